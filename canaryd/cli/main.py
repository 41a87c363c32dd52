"""The command line: the only module that parses arguments, prints and exits."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from canaryd.cli.ack import ack_command
from canaryd.cli.arguments import USAGE, parser
from canaryd.cli.baseline import baseline_command
from canaryd.cli.check import check_command
from canaryd.cli.common import complain, overrides
from canaryd.cli.compare import capture_command, compare_command
from canaryd.cli.daemon import release_command, run_command
from canaryd.cli.inspect import (
    config_command,
    devices_command,
    fleet_command,
    gate_command,
    history_command,
    probes_command,
    report_command,
    status_command,
)
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.store.database import StoreTooNew
from canaryd.supervisor import capabilities


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    capabilities.withdraw()
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale without "…" must cost no more than that character
    try:
        outcome = _command(options)
        if sys.stdout is not None:  # a daemon may be started without it
            sys.stdout.flush()  # here, where a reader that went away is expected
    except ConfigError as error:
        complain(*error.problems)
        return USAGE
    except StoreTooNew as error:
        complain(str(error))
        return USAGE
    except BrokenPipeError:
        # The reader went away (| head): nothing to tell it. Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return outcome


def _command(options: argparse.Namespace) -> int:
    if options.command == "config":
        return config_command(options)
    settings = replace(load.load(options.config), **overrides(options))
    if settings.state_dir.exists() and not settings.state_dir.is_dir():
        complain(f"{settings.state_dir}: is no directory; name one for --state-dir or state_dir")
        return USAGE
    commands = {
        "check": check_command,
        "drill": check_command,
        "run": run_command,
        "status": status_command,
        "gate": gate_command,
        "release": release_command,
        "capture": capture_command,
        "compare": compare_command,
        "baseline": baseline_command,
        "report": report_command,
        "history": history_command,
        "fleet": fleet_command,
        "ack": ack_command,
        "probes": probes_command,
        "devices": devices_command,
    }
    return commands[options.command](options, settings)


if __name__ == "__main__":
    sys.exit(main())
