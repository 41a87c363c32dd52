"""What the parsers of all commands share: argument types, common options, exit statuses."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from canaryd.cli.common import say
from canaryd.config import values
from canaryd.formatting import did_you_mean

T = TypeVar("T")
FEW = 8
"""Choices up to which a mistake lists them all."""
USAGE = 64
"""Exit status of a usage or configuration error (EX_USAGE of sysexits.h)."""
EXIT_STATUS = "exit status: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown, 64 usage or configuration error"


class Parser(argparse.ArgumentParser):
    """A parser that exits with `USAGE` on a mistake, and says which known word is nearest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As usual, but "-5m" is a value: no option here begins with a digit."""
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-[0-9]")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = did_you_mean(str(value), known)
            # A few words are listed also beside the nearest: "healthy" is like "faulty", and not meant by it.
            hint = f" (choose from {', '.join(known)}){near}" if len(known) <= FEW or not near else near
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint}")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as usual; what is not known is a mistake in the command that it was given to."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            named: Any = [self]
            for action in self._actions:
                if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  it has no public name
                    named += filter(None, [action.choices.get(getattr(options, action.dest))])
            there = [word for each in named for word in each._option_string_actions if word.startswith("--")]  # noqa: SLF001
            alike = did_you_mean(unknown[0].lstrip("-"), [word[2:] for word in there])  # dashes make no likeness
            hint = did_you_mean(unknown[0], there) if alike else ""
            if unknown[0] in there:
                hint = f"; write it after the command: {named[-1].prog} {unknown[0]}"
            if getattr(options, "of_one_device", "") and not unknown[0].startswith("-"):
                hint = f"; for one device: {options.of_one_device} {unknown[0]}"
            named[-1].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if "command" in options and options.command is None:
            self.error("the following arguments are required: COMMAND")
        return options

    def error(self, message: str) -> NoReturn:
        """Print the mistake as one sentence, and exit; the usage is one --help away."""
        say(f'{self.prog}: {message}; type "{self.prog} --help"', sys.stderr)
        self.exit(USAGE)


class Commands:
    """The commands of a parser."""

    def __init__(self, top: argparse.ArgumentParser) -> None:
        """There is none yet."""
        self._commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def add(
        self, name: str, function: Callable[..., int], told: str, description: str = "", *, epilog: str | None = None
    ) -> argparse.ArgumentParser:
        """Return the parser of a command, with the options that every command takes.

        `told`: what the list of commands says of it; `description`: what its own help says, where that is more.
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
    """Add --wait, in seconds."""
    command.add_argument(
        "--wait",
        type=duration,
        default=600.0,
        metavar="10m",
        help="how long to wait for a device that is in use by another test (default: 10m)",
    )


def add_verbose(command: argparse.ArgumentParser, what: str) -> None:
    """Add -v; `what` names what it shows."""
    command.add_argument("-v", "--verbose", action="store_true", help=f"show {what} too")


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the type of an argument that is written as in the configuration."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


duration, listen = _argument(values.parse_duration), _argument(values.parse_listen)
"""The seconds of "30m"; host and port of "HOST:PORT"."""


def directory(text: str) -> Path:
    """Return a directory; that of "", as from an unset variable of a script, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("names no directory; leave the option out for the default")
    return Path(text)


def seed(text: str) -> int:
    """Return a seed: what JSON carries without loss, 0 to 2**53 - 1."""
    if not re.fullmatch(r"[0-9]{1,16}", text) or int(text) >= 2**53:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; write a whole number from 0 to 2**53 - 1")
    return int(text)
