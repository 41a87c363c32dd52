"""The command line: the only package that parses arguments, prints and exits."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from canaryd import __version__
from canaryd.cli import ack, baseline, check, compare, daemon, fleet, listing, report, status
from canaryd.cli.arguments import EXIT_STATUS, USAGE, Parser, common_options
from canaryd.cli.common import complain, overrides
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.config.settings import Config
from canaryd.store.database import StoreTooNew
from canaryd.supervisor import capabilities


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    common = common_options()
    top = Parser(prog="canaryd", description="Test whether this machine computes correctly.", epilog=EXIT_STATUS)
    top.add_argument("--version", action="version", version=f"canaryd {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for module in (check, daemon, status, report, ack, baseline, compare, fleet, listing):
        module.add_parsers(commands, common)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    capabilities.withdraw()
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without "…" must cost no more than that character
    try:
        outcome = _run(options)
        if sys.stdout is not None:  # a daemon may be started without it
            sys.stdout.flush()  # here, where a reader that went away is expected
    except ConfigError as error:
        complain(*error.problems)
        return USAGE
    except StoreTooNew as error:
        complain(str(error))
        return USAGE
    except BrokenPipeError:
        # The reader went away (| head). Python would complain while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return outcome


def _run(options: argparse.Namespace) -> int:
    if options.command == "config":
        return listing.config_command(options)
    settings = replace(load.load(options.config), **overrides(options))
    if settings.state_dir.exists() and not settings.state_dir.is_dir():
        complain(f"{settings.state_dir}: not a directory; give a directory with --state-dir or state_dir")
        return USAGE
    function: Callable[[argparse.Namespace, Config], int] = options.function
    return function(options, settings)


if __name__ == "__main__":
    sys.exit(main())
