"""`canaryd capture` and `canaryd compare`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canaryd.cli.arguments import USAGE
from canaryd.cli.common import ask, complain, device_names, make_engine, may_write, write_file
from canaryd.codec import to_json
from canaryd.compare import score_files, scores
from canaryd.compare.captures import page, table
from canaryd.config.settings import Config
from canaryd.engine.engine import choose
from canaryd.judge.verdict import exit_code
from canaryd.model import State


def capture_command(options: argparse.Namespace, settings: Config) -> int:
    """Write a capture of what a device computes; return the exit code."""
    if not may_write("--out", options.out):
        return USAGE
    engine = make_engine(settings)
    there = {u: d for u, d in engine.devices.items() if not d.is_endpoint and engine.reached(d)}
    found, missing = choose(there, [options.device] if options.device else [])
    if len(found) > 1 and not options.device:
        found = [d for d in found if d.backend != "cpu"] if len(found) == 2 else []
    if missing or len(found) != 1:
        complain(f"--device {options.device or 'is not given'}: name one of {device_names(there)}", *engine.problems)
        return USAGE
    arguments = {
        "device": to_json(found[0]),
        "out": str(options.out.absolute()),
        "model": str(options.model.absolute()) if options.model else "",
        "dtype": options.dtype,
        "prompts": options.prompt,
        "operators": options.operators,
        "forced": not options.decode,
        "drill": options.drill,
    }
    answer = ask(engine, found[0], "capture", arguments, options.wait)
    if answer is None:
        return exit_code(State.UNKNOWN)
    print(
        f"{options.out}: {answer['tensors']:,} tensors of {found[0].name}, {answer['bytes']:,} bytes,"
        f" in {answer['seconds']:.1f} s"
    )
    return 0


def compare_command(options: argparse.Namespace, settings: Config) -> int:
    """Compare captures in a worker, which has torch; files of scores right here."""
    if options.report and not may_write("--report", options.report):
        return USAGE
    unread = [path for path in (options.a, options.b) if not path.exists()]
    if unread:
        complain(*(f"{path}: no such file" for path in unread))
        return USAGE
    captures = [_is_capture(path) for path in (options.a, options.b)]
    if captures.count(True) == 1:
        other = options.b if captures[0] else options.a
        complain(f"{other}: is no capture, and the other one is: give two captures, or two results of an evaluation")
        return USAGE
    if not captures[0]:
        return _compare_scores(options)
    engine = make_engine(settings)
    cpu = next((d for d in engine.devices.values() if d.backend == "cpu"), None)
    if cpu is None:
        complain("compare: worker.python cannot be started, and it does the arithmetic", *engine.problems)
        return exit_code(State.UNKNOWN)
    arguments = {"a": str(options.a.absolute()), "b": str(options.b.absolute())}
    answer = ask(engine, cpu, "compare", arguments, wait=600.0)
    if answer is None:
        return exit_code(State.UNKNOWN)
    if options.report:
        write_file("--report", options.report, page(answer))
    print(json.dumps(answer, indent=2) if options.json else table(answer))
    return {"equal": 0, "rounding": 0, "fault": exit_code(State.SUSPECT)}.get(
        answer["verdict"]["kind"], exit_code(State.UNKNOWN)
    )


def _is_capture(path: Path) -> bool:
    """Whether a file begins like a safetensors file: the length of a header, and an object."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and head[:1] != b"{"


def _compare_scores(options: argparse.Namespace) -> int:
    if options.report:
        complain("--report: is for captures; of scores there is the table, and --json")
        return USAGE
    try:
        result = scores.compare(score_files.load(options.a), score_files.load(options.b))
    except score_files.ScoreError as error:
        complain(str(error))
        return USAGE
    print(json.dumps(to_json(result), indent=2) if options.json else scores.text(result))
    return 0 if result.comparable else exit_code(State.UNKNOWN)
