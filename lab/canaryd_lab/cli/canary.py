"""The command `canaryd canary export`."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from canaryd.cli.arguments import USAGE, Commands, add_wait, seed
from canaryd.cli.common import complain, make_engine, open_store, say
from canaryd.config.settings import Config
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd_lab.cli.asking import ask_processor

CANARY_EXIT_STATUS = "exit status: 0 written, 3 not done, 64 usage or configuration error"
MAX_CONFIG_BYTES = 1 << 20
FORMATS = ("bfloat16", "float16", "float32")
QUANTIZATIONS = {
    "awq": "vLLM or mlx-lm",
    "mlx-4bit": "mlx-lm",
    "mlx-8bit": "mlx-lm",
    "mlx-mxfp8": "mlx-lm",
    "w8a8": "vLLM",
    "fp8": "transformers",
}
"""Quantised form → engines with which it was tried."""
DESCRIPTION = """\
Write an exact canary: a checkpoint in Hugging Face's format, or a GGUF file,
and the answers that every healthy engine gives.

  export  write the checkpoint into DIR"""


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("canary", canary_command),
        "write a model with known right answers for your serving engine",
        DESCRIPTION,
        epilog=CANARY_EXIT_STATUS,
    )
    command.add_argument("what", choices=("export",), help="what to do")
    command.add_argument("directory", type=Path, metavar="DIR", help="where to write it: a new or an empty directory")
    command.add_argument(
        "--like", type=Path, metavar="CONFIG", help="take the sizes of a served model's config.json (default: tiny)"
    )
    command.add_argument(
        "--layers", type=layers, default=4, metavar="4", help="at most this many layers, with --like (default: 4)"
    )
    command.add_argument(
        "--seed",
        type=seed,
        default=1,
        metavar="1",
        help="make the weights, prompts and answers from this seed (default: 1)",
    )
    command.add_argument(
        "--no-anchor",
        action="store_true",
        help="for an engine that rounds when it scales queries (docs/exact-canary.md)",
    )
    form = command.add_mutually_exclusive_group()
    form.add_argument(
        "--gguf", choices=FORMATS, default="", help="write a GGUF file with matrices in this format, for llama.cpp"
    )
    form.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        metavar="FORM",
        default="",
        help="write quantised weights: awq (vLLM, mlx-lm), mlx-4bit, mlx-8bit or mlx-mxfp8 (mlx-lm), w8a8 (vLLM), "
        "fp8 (transformers)",
    )
    add_wait(command)


def layers(text: str) -> int:
    """Return the number of layers in the text of an option."""
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of layers; write for example 4")
    return int(text)


def canary_command(options: argparse.Namespace, settings: Config) -> int:
    """Write the checkpoint in a worker, which has torch; return the exit code."""
    directory = options.directory.absolute()
    mistake, like = unusable(directory), None
    if options.like and not mistake:
        mistake, like = _read(options.like)
    if mistake:
        complain(mistake)
        return USAGE
    begun = time.monotonic()
    engine = make_engine(settings, open_store(settings))
    arguments = {
        "directory": str(directory),
        "like": like,
        "layers": options.layers,
        "seed": options.seed,
        "no_anchor": options.no_anchor,
        "form": options.gguf or options.quantization,
    }
    answer = ask_processor("canary", engine, "makes the model", "export", arguments, options.wait)
    if answer is None:
        return exit_code(State.UNKNOWN)
    if mistake := answer.get("mistake", ""):
        complain(f"{options.like or directory}: no exact canary has these sizes: {mistake}")
        return USAGE
    say(_written(directory, options, answer, time.monotonic() - begun))
    return 0


def unusable(directory: Path) -> str:
    """Return the reason why a checkpoint cannot be written into a directory, or "" if none is known beforehand."""
    try:
        there = directory.is_dir()
        if there and any(directory.iterdir()):
            return f"{directory}: not empty; name a new directory"
        if not there and os.path.lexists(directory):
            return f"{directory}: not a directory; name a new one"
    except OSError as error:
        return f"{directory}: cannot be read: {error.strerror}"
    if not os.access(directory.parent, os.W_OK | os.X_OK):
        return f"{directory}: cannot be written; name a directory in one that exists and is yours"
    return ""


def _read(path: Path) -> tuple[str, Any]:
    """Return ("", the object) of a config.json, or (the reason why it cannot be read, None)."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return f"--like {path}: larger than 1 MiB; name a model's config.json", None
        data = json.loads(path.read_bytes())
    except OSError as error:
        return f"--like {path}: cannot be read: {error.strerror}; name a model's config.json", None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or not data:
        return f"--like {path}: not a JSON object; name a model's config.json", None
    return "", data


def _written(directory: Path, options: argparse.Namespace, answer: dict[str, Any], seconds: float) -> str:
    serve = "Serve this directory with your engine, unquantised, in bfloat16, float16 or float32."
    if options.gguf:
        serve = f"Serve this file with llama.cpp: llama-server -m {directory / 'model.gguf'}"
    elif options.quantization:
        serve = f"Serve this directory with {QUANTIZATIONS[options.quantization]}, or another engine that reads it."
    return f"""\
{directory}: {answer["layers"]} layers of {answer["hidden"]}, {answer["vocabulary"]:,} words, {answer["prompts"]} \
proved prompts of {answer["words"]} words; {answer["bytes"] / 1e6:.1f} MB in {seconds:.1f} s
Next:
1. {serve}
2. Add it to /etc/canaryd/canaryd.yaml, with the address of that server:

endpoints:
  exact:
    url: "http://127.0.0.1:8000/v1"
    exact: {json.dumps(str(directory))}

3. canaryd check --device endpoint:exact"""
