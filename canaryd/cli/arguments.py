"""What the parsers of all commands share: argument types, common options, exit statuses."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn, TypeAlias

from canaryd.config import values

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  it has no public name
"""What the parsers of commands are added to."""
USAGE = 64
"""Exit status of a usage or configuration error (EX_USAGE of sysexits.h)."""
EXIT_STATUS = "exit status: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage or configuration error"


class Parser(argparse.ArgumentParser):
    """A parser that exits with `USAGE` on a mistake, and names the help that shows what is allowed."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the mistake, and exit."""
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def common_options() -> argparse.ArgumentParser:
    """Return a parent parser with the options that every command takes."""
    common = Parser(add_help=False)
    common.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file (default: /etc/canaryd/canaryd.yaml)"
    )
    common.add_argument("--state-dir", type=Path, metavar="DIR", help="directory of the stored runs and verdicts")
    return common


def add_json(command: argparse.ArgumentParser) -> None:
    """Add --json."""
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_verbose(command: argparse.ArgumentParser, what: str) -> None:
    """Add -v; `what` names what it shows."""
    command.add_argument("-v", "--verbose", action="store_true", help=f"show {what} too")


def duration(text: str) -> float:
    """Return the seconds of a duration such as "30m"."""
    try:
        return values.parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def seed(text: str) -> int:
    """Return a seed: what JSON carries without loss, 0 to 2**53 - 1."""
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; write a whole number from 0 to 2**53 - 1")
    return int(text)


def listen(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT"."""
    try:
        return values.parse_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
