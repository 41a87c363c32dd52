"""The command `canaryd pack`, which writes a golden pack (cases with right results) and judges results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canaryd.cli.arguments import USAGE, Commands, add_wait
from canaryd.cli.common import complain, make_engine, open_store, say
from canaryd.config.settings import Config
from canaryd.engine.catalogue import builtin_directory
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd_lab.cli.asking import ask_processor
from canaryd_lab.cli.canary import unusable
from canaryd_lab.compare import pack

EXIT_STATUS = """\
exit status: 0 written or healthy, 2 faulty, 3 unknown or not done,
64 a file that cannot be judged"""
DESCRIPTION = """\
Write fixed goldens as files that any runtime can run without canaryd, and
judge what came back.

  export  write a pack into DIR
  verify  judge the result file RESULTS by the pack that --pack names"""


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("pack", pack_command),
        "write fixed goldens for devices without canaryd, and judge their results",
        DESCRIPTION,
        epilog=EXIT_STATUS,
    )
    command.add_argument("what", choices=("export", "verify"), help="what to do")
    command.add_argument("path", type=Path, metavar="DIR|RESULTS", help="the new directory, or the result file")
    command.add_argument("--pack", type=Path, metavar="DIR", help="verify: the pack (default: the file's directory)")
    add_wait(command)


def pack_command(options: argparse.Namespace, settings: Config) -> int:
    """Write a golden pack or judge a result file; return the exit code."""
    if options.what == "verify":
        return _verify(options)
    if options.pack:
        complain("pack export: --pack is for verify; leave it out")
        return USAGE
    return _export(options, settings)


def _export(options: argparse.Namespace, settings: Config) -> int:
    """Write a golden pack in a worker, which has torch; return the exit code."""
    directory = options.path.absolute()
    if mistake := unusable(directory):
        complain(mistake)
        return USAGE
    engine = make_engine(settings, open_store(settings))
    goldens = json.loads((builtin_directory() / "golden/exact_matmul.json").read_text(encoding="utf-8"))
    arguments = {"directory": str(directory), "goldens": goldens}
    answer = ask_processor("pack", engine, "makes the operands", "pack", arguments, options.wait)
    if answer is None:
        return exit_code(State.UNKNOWN)
    say(
        f"{directory}: {answer['cases']} cases, {answer['bytes'] / 1e6:.1f} MB, pack {answer['id'][:16]}\n"
        "Next: copy it to the device, and there: python3 run_pack.py -o results.json\n"
        f"Then here: canaryd pack verify results.json --pack {directory}"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Judge a result file in this process, without worker or device; return the exit code."""
    try:
        judged = pack.judge(options.path, options.pack or options.path.absolute().parent)
    except pack.Refused as refused:
        complain(f"pack verify: {refused}")
        return USAGE
    print(pack.text(judged))
    return exit_code(judged.state)
