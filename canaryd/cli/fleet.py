"""`canaryd fleet`: the state of all nodes, from a Prometheus."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from canaryd.cli.arguments import EXIT_STATUS, USAGE, Commands, add_json, duration
from canaryd.cli.common import complain
from canaryd.config.settings import Config
from canaryd.formatting import columns
from canaryd.judge.verdict import exit_code
from canaryd.model import State


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("fleet", fleet_command),
        "show the state of all nodes, from a Prometheus",
        "Show the state of all nodes, from the Prometheus that scrapes them.",
        epilog=EXIT_STATUS,
    )
    command.add_argument("--prometheus", required=True, metavar="URL", help="its address, e.g. http://prometheus:9090")
    command.add_argument(
        "--token-file", type=Path, metavar="FILE", help='file with a bearer token, or with "Basic " and credentials'
    )
    command.add_argument("--ca-file", type=Path, metavar="FILE", help="CA certificates (PEM) to verify the server with")
    command.add_argument(
        "--timeout", type=duration, default=60.0, metavar="60s", help="time for all queries together (default: 60s)"
    )
    add_json(command)


def fleet_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """Print what a Prometheus knows about all nodes; return the exit code."""
    from canaryd.fleet import prometheus, vote, vote_text  # noqa: PLC0415  no other command asks another machine

    files = {"token_file": options.token_file, "ca_file": options.ca_file}
    try:
        client = prometheus.Prometheus(options.prometheus, patience=options.timeout, **files)
    except (OSError, ValueError) as error:
        complain(f"fleet: {error}")
        return USAGE
    try:
        found = vote.gather(client)
    except prometheus.FleetError as error:
        complain(f"fleet: {options.prometheus}: {error}")
        return exit_code(State.UNKNOWN)
    print(json.dumps(vote_text.as_json(found), indent=2) if options.json else vote_text.as_text(found, columns()))
    return exit_code(found.state)
