"""The commands `canaryd capture` (which writes a file, or compares with the truth: `--exact`) and `canaryd compare`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canaryd.cli.arguments import USAGE, Commands, add_json, add_wait, seed
from canaryd.cli.common import (
    complain,
    device_names,
    is_released,
    make_engine,
    may_write,
    open_store,
    refuse_beside_daemon,
    say,
    stopped_by_release,
    write_report,
)
from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.engine.engine import Engine, choose
from canaryd.engine.schedule import new_seed
from canaryd.facts import DTYPES
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, State
from canaryd_lab.cli.asking import ask, ask_processor
from canaryd_lab.compare import exact, score_files, scores
from canaryd_lab.compare.captures import page, table

CAPTURE_EXIT_STATUS = "exit status: 0 done, and nothing is wrong, 2 --exact found a fault, 3 not done, 64 usage error"
COMPARE_EXIT_STATUS = "exit status: 0 no fault found, 2 a fault, 3 not comparable or not done, 64 usage error"


def add_parsers(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_capture(commands)
    _add_compare(commands)


def _add_capture(commands: Commands) -> None:
    command = commands.add(
        *("capture", capture_command),
        "record what a device computes, layer by layer, to compare devices",
        "Record what a device computes for your model, layer by layer, in one safetensors file. With "
        "--exact, compare it with the known right values instead: no other device is needed.",
        epilog=CAPTURE_EXIT_STATUS,
    )
    command.add_argument(
        *("-o", "--out"),
        type=Path,
        metavar="FILE",
        help="safetensors file to write; with --exact it is optional, and written only if a result is wrong",
    )
    command.add_argument(
        "--exact", action="store_true", help="run a model whose every value is known, and name the first wrong one"
    )
    command.add_argument(
        "--device", metavar="DEV", help="uuid, cpu:0 or cuda:3 (default: the only accelerator, or the CPU)"
    )
    command.add_argument(
        "--model", type=Path, metavar="DIR", help="the Hugging Face directory to run; --exact has a model of its own"
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="TYPE",
        help="float64, float32, bfloat16 or float16 (default: float32; with --exact one after the other)",
    )
    command.add_argument(
        "--prompt", action="append", default=[], metavar="NAME", help="use only this prompt; repeatable"
    )
    command.add_argument("--operators", action="store_true", help="record every operator, not only every layer")
    command.add_argument("--decode", action="store_true", help="decode token by token instead of scoring in one pass")
    command.add_argument("--drill", default="", metavar="PLACE", help="corrupt one element there, e.g. 2.down")
    command.add_argument("--seed", type=seed, metavar="N", help="with --exact: use this seed, to repeat an earlier run")
    add_json(command)
    add_wait(command)


def _add_compare(commands: Commands) -> None:
    command = commands.add(
        *("compare", compare_command),
        "find where two captures differ, or compare two score files",
        "Find the first place where two captures differ, or test whether two score files differ.",
        epilog=COMPARE_EXIT_STATUS,
    )
    command.add_argument(
        "a", type=Path, metavar="A", help="a capture, or a result file of lm-eval, evalscope or opencompass"
    )
    command.add_argument("b", type=Path, metavar="B", help="what to compare it with: a file of the same kind")
    add_json(command)
    command.add_argument("--report", type=Path, metavar="FILE", help="write a page with a plot too (captures only)")


def capture_command(options: argparse.Namespace, settings: Config) -> int:
    """Write a capture of a model's results, or compare an exact canary with the truth; return the exit code."""
    if wrong := _contradiction(options):
        complain(f"capture: {wrong}")
        return USAGE
    if options.out and not may_write("--out", options.out):
        return USAGE
    store = open_store(settings)
    if is_released("capture", store):
        return exit_code(State.UNKNOWN)
    engine = make_engine(settings, store)
    with stopped_by_release(engine):
        return _capture(options, engine)


def _capture(options: argparse.Namespace, engine: Engine) -> int:
    there = {u: d for u, d in engine.devices.items() if d.computes_here and d.is_reached}
    found, missing = choose(there, [] if options.device is None else [options.device])
    if len(found) > 1 and options.device is None:
        found = [d for d in found if d.backend != "cpu"] if len(found) == 2 else []
    if missing or len(found) != 1:
        what = "more than one device; choose with --device" if options.device is None else ""
        what = what or f'no single device "{options.device}"'
        complain(f"capture: {what}; name one of {device_names(there)}", *engine.problems)
        return USAGE
    refuse_beside_daemon(engine.store, found)
    if options.exact:
        return _capture_exactly(options, engine, found[0])
    arguments = {
        "device": to_json(found[0]),
        "out": str(options.out.absolute()),
        "model": str(options.model.absolute()),
        "dtype": options.dtype or "float32",
        "prompts": options.prompt,
        "operators": options.operators,
        "forced": not options.decode,
        "drill": options.drill,
    }
    answer = ask(engine, found[0], "capture", arguments, options.wait)
    if answer is None:
        return exit_code(State.UNKNOWN)
    say(
        f"{options.out}: {answer['tensors']:,} tensors of {found[0].name}, {answer['bytes']:,} bytes,"
        f" in {answer['seconds']:.1f} s"
    )
    return 0


def _contradiction(options: argparse.Namespace) -> str:
    """Return a sentence that says which options contradict or are missing, and the remedy; "" if none."""
    without = [name for name in ("model", "prompt", "operators", "decode") if getattr(options, name)]
    alone = [f"--{name}" for name in ("json", "seed") if getattr(options, name) not in (None, False)]
    if options.exact:
        return f"--exact has a model and prompts of its own; leave out --{without[0]}" if without else ""
    if alone:
        return f"{alone[0]}: only with --exact"
    if not options.model:
        return "name a model: --model DIR, a Hugging Face directory; or use --exact, which needs none"
    return "" if options.out else "name the file to write: -o FILE"


def _capture_exactly(options: argparse.Namespace, engine: Engine, device: Device) -> int:
    """Compare every value of an exact canary on a device with the proved value; return the exit code."""
    arguments = {
        "device": to_json(device),
        "out": str(options.out.absolute()) if options.out else "",
        "dtype": options.dtype or "",
        "seed": new_seed() if options.seed is None else options.seed,
        "drill": options.drill,
    }
    answer = ask(engine, device, "exact_capture", arguments, options.wait)
    if answer is None:
        return exit_code(State.UNKNOWN)
    print(json.dumps(answer, indent=2) if options.json else exact.text(answer))
    return exit_code(State.SUSPECT) if answer["verdict"] == "wrong" else 0


def compare_command(options: argparse.Namespace, settings: Config) -> int:
    """Compare two captures in a worker, which has torch, or two score files here; return the exit code."""
    if options.report and not may_write("--report", options.report, pipes=True):
        return USAGE
    if problems := [problem for path in (options.a, options.b) if (problem := _unreadable(path))]:
        complain(*problems)
        return USAGE
    captures = [_is_capture(path) for path in (options.a, options.b)]
    if captures.count(True) == 1:
        other = options.b if captures[0] else options.a
        complain(f"{other}: not a capture, but the other file is; give two captures or two score files")
        return USAGE
    if not captures[0]:
        return _compare_scores(options)
    engine = make_engine(settings, open_store(settings, for_reading=True))
    arguments = {"a": str(options.a.absolute()), "b": str(options.b.absolute())}
    answer = ask_processor("compare", engine, "does the arithmetic", "compare", arguments, wait=600.0)
    if answer is None:
        return exit_code(State.UNKNOWN)
    written = not options.report or write_report(options.report, page(answer))
    print(json.dumps(answer, indent=2) if options.json else table(answer))
    kind = answer["verdict"]["kind"]
    if kind == "fault":
        return exit_code(State.SUSPECT)
    return 0 if written and kind in ("equal", "rounding") else exit_code(State.UNKNOWN)


def _unreadable(path: Path) -> str:
    """Return the reason why this user cannot read a path, or ""; of a directory the files are not checked."""
    try:
        if not path.is_dir():
            path.open("rb").close()
    except FileNotFoundError:
        return f"{path}: no such file"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}; name a readable file"
    return ""


def _is_capture(path: Path) -> bool:
    """Return whether a file begins as a safetensors file: a header length, then a JSON object."""
    if path.is_dir():
        return False
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:] == b"{" and head[:1] != b"{"


def _compare_scores(options: argparse.Namespace) -> int:
    if options.report:
        complain("--report: only for captures; for score files use --json")
        return USAGE
    try:
        result = scores.compare(score_files.load(options.a), score_files.load(options.b))
    except score_files.ScoreError as error:
        complain(str(error))
        return USAGE
    print(json.dumps(to_json(result), indent=2) if options.json else scores.text(result))
    return 0 if result.comparable else exit_code(State.UNKNOWN)
