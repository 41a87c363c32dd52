"""Parts that the parsers of all commands share: argument types, common options, exit statuses."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from canaryd.cli.common import say
from canaryd.config import values
from canaryd.formatting import format_duration
from canaryd.probe import LEVELS
from canaryd.store.locks import WAIT

T = TypeVar("T")
USAGE = 64
"""Exit status of a usage or configuration error (EX_USAGE of sysexits.h)."""
EXIT_STATUS = "exit status: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage or configuration error"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one sentence and exits with `USAGE`."""

    def error(self, message: str) -> NoReturn:
        """Print a mistake as one sentence and exit. The usage is not printed: --help shows it."""
        word = message.removeprefix("unrecognized arguments: ").partition(" ")[0]
        if word in LEVELS:
            advice = f"did you mean --level {word}?"
        elif word.endswith((".yaml", ".yml")) and message.startswith("unrecognized"):
            advice = f"did you mean --config {word}?"
        else:
            advice = f'type "{self.prog} --help"'
        say(f"{self.prog}: {message}; {advice}", sys.stderr)
        self.exit(USAGE)


class Commands:
    """The subcommands of the command line, such as `check` in `canaryd check`."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        """Prepare the parser `top` for subcommands; `add` adds each of them."""
        self._commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)

    def add(
        self, name: str, function: Callable[..., int], told: str, description: str = "", *, epilog: str | None = None
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser, which already has the options that every command has.

        `told`: the command's line in the list of commands. `description`: the text of its own help (default: `told`).
        """
        lines = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
        description = description or f"{told[0].upper()}{told[1:]}."
        command = self._commands.add_parser(
            name, help=told, description=description, epilog=epilog, formatter_class=lines
        )
        command.set_defaults(function=function)
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="configuration file (default: /etc/canaryd/canaryd.yaml)"
        )
        command.add_argument(
            *("--state-dir",),
            type=directory,
            metavar="DIR",
            help="directory of the stored runs and verdicts (default: /var/lib/canaryd, or ~/.local/state/canaryd)",
        )
        return command


def add_json(command: argparse.ArgumentParser) -> None:
    """Add --json."""
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_wait(command: argparse.ArgumentParser) -> None:
    """Add --wait, a time in seconds."""
    command.add_argument(
        "--wait",
        type=duration,
        default=WAIT,
        metavar="10m",
        help=f"how long to wait for a device that is in use by another test (default: {format_duration(WAIT)})",
    )


def add_verbose(command: argparse.ArgumentParser, what: str) -> None:
    """Add the option -v with the help text "show `what` too"."""
    command.add_argument("-v", "--verbose", action="store_true", help=f"show {what} too")


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse type that parses a text with `parse`. A `ValueError` of `parse` becomes a usage mistake."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


duration, listen = _argument(values.parse_duration), _argument(values.parse_listen)
"""Argparse types: `duration` converts "30m" to seconds, `listen` converts "HOST:PORT" to a pair (host, port)."""


def directory(text: str) -> Path:
    """Return a text as a path. Refuses "", the value of an unset variable: it would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("names no directory; leave the option out for the default")
    return Path(text)


def seed(text: str) -> int:
    """Return a text as a seed: a whole number from 0 to 2**53 - 1, because every JSON reader keeps these exactly."""
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; write a whole number from 0 to 2**53 - 1")
    return int(text)


def label(text: str) -> str:
    """Return a text as the label of a job. It becomes part of a file's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no label; write a letter or digit, then at most 63 of these, dots, hyphens and underscores"
        )
    return text
