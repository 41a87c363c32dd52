"""The argument parser of every command."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from canaryd import __version__
from canaryd.config import values
from canaryd.model import INTENSITIES, Cause
from canaryd.probe import LEVELS
from canaryd.report import gate
from canaryd.supervisor.environment import INSTRUCTION_SETS

USAGE = 64
"""Exit status of a usage or configuration error (EX_USAGE of sysexits.h)."""
HISTORY = 30 * 86_400.0
"""Seconds back that `canaryd history` looks unless another time is given."""
ACK = 7 * 86_400.0
"""Seconds for which a fault is acknowledged unless another time is given."""
FAULTS = ("flip", "zero", "swap", "nan", "stuck", "consistent")
"""Faults that `canaryd drill` can inject; canaryd/worker/inject.py says what each does."""
COMPARED = "exit status: 0 compared, no fault; 2 a fault; 3 not comparable, or it could not be done; 64 usage error"
GATED = "exit status where enforcement acts: 0 pass, 2 fail, 3 unknown; where it only logs: 0; 64 usage error"
EPILOG = "exit status: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage or configuration error"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration (default: /etc/canaryd/canaryd.yaml)"
    )
    common.add_argument("--state-dir", type=Path, metavar="DIR", help="where runs and verdicts are kept")
    top = _Parser(prog="canaryd", description="Tells whether it was the machine.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"canaryd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("check", parents=[common], epilog=EPILOG, help="test every device now, one verdict each")
    one.add_argument("--level", choices=LEVELS, default="standard", help="how hard to look (default: standard)")
    one.add_argument("--for", dest="seconds", type=_duration, default=0.0, metavar="30m", help="repeat for so long")
    one.add_argument("--json", action="store_true", help="print one JSON object (docs/json.md)")
    one.add_argument("--report", type=Path, metavar="FILE", help="write that JSON object to a file as well")
    one.add_argument(
        "--textfile", type=Path, metavar="FILE", help="write metrics for node_exporter as well (docs/metrics.md)"
    )
    _selection(one)
    one.add_argument("--case", action="append", default=[], metavar="CASE", help="only this case or prefix; repeatable")
    one.add_argument("--seed", type=_seed, metavar="N", help="repeat a run with its seed")
    sets = [name for name in INSTRUCTION_SETS if name]
    one.add_argument("--instruction-set", choices=sets, default="", help="CPU: only this execution path")

    one.add_argument("--intensity", choices=INTENSITIES, default="", help="ask as a retest does (docs/judgement.md)")

    drill = commands.add_parser(
        "drill", parents=[common], epilog=EPILOG, help="inject a software fault and watch the alarm arrive"
    )
    drill.add_argument("--fault", choices=FAULTS, default="flip", help="what to break (default: flip)")
    drill.add_argument("--json", action="store_true", help="print one JSON object")
    _selection(drill)

    daemon = commands.add_parser("run", parents=[common], help="the daemon: test on a schedule and serve metrics")
    daemon.add_argument("--listen", type=_listen, metavar="HOST:PORT", help="where /metrics is served")

    settings = commands.add_parser("config", parents=[common], help="check, or print an example or the schema")
    settings.add_argument("what", choices=("check", "example", "schema"))

    one = commands.add_parser("status", parents=[common], epilog=EPILOG, help="what the store knows; touches no device")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "gate", parents=[common], epilog=GATED, help="may this node take work? For drains, taints and prologs"
    )
    one.add_argument(
        "--on",
        action="append",
        choices=[s.value for s in gate.ACTS_ON],
        metavar="STATE",
        help="fail on this state and worse: degraded, suspect, faulty (default); unknown fails only if named",
    )
    one.add_argument(
        "--cause",
        action="append",
        choices=[c.value for c in Cause if c is not Cause.NONE],
        metavar="CAUSE",
        help="fail for this cause; repeatable (default: hardware, environment, undetermined)",
    )
    one.add_argument(
        "--device", action="append", default=[], metavar="DEV", help="only these: uuid, cuda:3, a backend, or 0,1"
    )
    one.add_argument(
        "--max-age", type=_duration, default=0.0, metavar="2h", help="a device whose newest test is older is unknown"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "release", parents=[common], help="let go of every device for a while, as for a driver upgrade"
    )
    one.add_argument("--for", dest="seconds", type=_duration, default=600.0, metavar="10m", help="how long")
    one.add_argument("--end", action="store_true", help="end a release early")

    one = commands.add_parser("capture", parents=[common], help="write what a device computes, layer by layer")
    one.add_argument(
        "--device", default="", metavar="DEV", help="uuid, cpu:0 or cuda:3 (default: the only one, or the CPU)"
    )
    one.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the safetensors file to write")
    one.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face directory (default: the built-in canary)"
    )
    one.add_argument(
        "--dtype", default="float32", metavar="TYPE", help="float64, float32 (default), bfloat16 or float16"
    )
    one.add_argument("--prompt", action="append", default=[], metavar="NAME", help="only this prompt; repeatable")
    one.add_argument("--operators", action="store_true", help="every operator's result, not only each layer's")
    one.add_argument("--decode", action="store_true", help="decode token by token instead of scoring in one pass")
    one.add_argument("--drill", default="", metavar="PLACE", help="corrupt one element there, e.g. 2.down")
    one.add_argument("--wait", type=_duration, default=600.0, metavar="10m", help="for a device that is being tested")

    one = commands.add_parser(
        "compare",
        parents=[common],
        epilog=COMPARED,
        help="where two captures part, or whether two files of scores differ",
    )
    one.add_argument("a", type=Path, metavar="A", help="a capture, or a result of lm-eval, evalscope or opencompass")
    one.add_argument("b", type=Path, metavar="B")
    one.add_argument("--json", action="store_true", help="print one JSON object")
    one.add_argument("--report", type=Path, metavar="FILE", help="write a page with a plot as well (captures only)")

    one = commands.add_parser("baseline", parents=[common], help="what is known of recorded cases, and what is right")
    one.add_argument("what", choices=("list", "show", "accept", "pin", "unpin", "export", "import"))
    one.add_argument(
        "device",
        nargs="?",
        default="",
        metavar="DEV",
        help="uuid or name; default: every one. import: the file that export wrote",
    )
    one.add_argument("--probe", default="", metavar="NAME", help="only this probe")
    one.add_argument("--case", default="", metavar="CASE", help="only this case, or those below it")
    one.add_argument(
        "--reason", default="", metavar="TEXT", help="accept, pin: why these bits are right; kept with them"
    )
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser(
        "report", parents=[common], help="the dossier of a device: page, JSON, evidence, one archive"
    )
    one.add_argument("device", metavar="DEV", help="uuid or name")
    one.add_argument(
        "-o", "--out", type=Path, default=Path(), metavar="DIR", help="where it is written (default: here)"
    )
    one.add_argument("--redact", action="store_true", help="pseudonyms for hosts, serials, uuids, paths and addresses")
    one.add_argument("--drill", action="store_true", help="report the drills of the last hour instead")
    one.add_argument("--json", action="store_true", help="print dossier.json")

    one = commands.add_parser("history", parents=[common], help="what happened to devices, and how they changed")
    one.add_argument("device", nargs="?", default="", metavar="DEV", help="uuid or name; default: every one")
    one.add_argument("--since", type=_duration, default=HISTORY, metavar="30d", help="how far back (default: 30d)")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser("fleet", parents=[common], epilog=EPILOG, help="what a Prometheus knows of all nodes")
    one.add_argument("--prometheus", required=True, metavar="URL", help="its address, e.g. http://prometheus:9090")
    one.add_argument("--token-file", type=Path, metavar="FILE", help="a bearer token, or a line that begins with Basic")
    one.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates (PEM) that vouch for the server")
    one.add_argument("--timeout", type=_duration, default=60.0, metavar="60s", help="for all questions together")
    one.add_argument("--json", action="store_true", help="print one JSON object")

    one = commands.add_parser("ack", parents=[common], help="say that a fault is known, or a part repaired or replaced")
    one.add_argument("device", metavar="DEV", help="uuid or name")
    one.add_argument("--reason", default="", metavar="TEXT", help="why, and where it is followed up; kept as evidence")
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--for", dest="seconds", type=_duration, default=ACK, metavar="7d", help="how long it is known")
    kind.add_argument("--end", action="store_true", help="end an acknowledgement early")
    kind.add_argument("--repaired", action="store_true", help="the part was repaired: it begins anew")
    kind.add_argument("--replaced", action="store_true", help="the part was taken out for another")

    commands.add_parser("probes", parents=[common], help="list the catalogue: what each probe stresses")
    commands.add_parser("devices", parents=[common], help="list devices with their identity")
    return top


def _selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", action="append", default=[], metavar="DEV", help="uuid, cpu:0, cuda:3 or a backend"
    )
    command.add_argument("--probe", action="append", default=[], metavar="NAME", help="only this probe; repeatable")
    command.add_argument(
        "--wait", type=_duration, default=600.0, metavar="10m", help="for a device that is being tested"
    )


def _duration(text: str) -> float:
    try:
        return values.parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; write a whole number from 0 to 2**53 - 1")
    return int(text)


def _listen(text: str) -> tuple[str, int]:
    try:
        return values.parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
