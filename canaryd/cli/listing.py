"""`canaryd config`, `canaryd devices` and `canaryd probes`: what is configured, and what there is to test."""

from __future__ import annotations

import argparse
import json

from canaryd.cli.arguments import Commands
from canaryd.cli.common import complain, make_engine
from canaryd.codec import to_json
from canaryd.config import load
from canaryd.config.settings import Config
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.web import auth


def add_parsers(commands: Commands, common: argparse.ArgumentParser) -> None:
    """Add the parsers of these commands."""
    command = commands.add_parser("devices", parents=[common], help="list the devices of this host as JSON")
    command.set_defaults(function=devices_command)
    command = commands.add_parser("probes", parents=[common], help="list the probes and what each one tests")
    command.set_defaults(function=probes_command)
    command = commands.add_parser(
        "config", parents=[common], help="check the configuration, or print an example or its schema"
    )
    command.add_argument("what", choices=("check", "example", "schema"))


def config_command(options: argparse.Namespace) -> int:
    """Check the configuration, or print an example or the schema."""
    if options.what == "example":
        print(load.example(), end="")
    elif options.what == "schema":
        print(json.dumps(load.json_schema(), indent=2))
    else:
        loaded = load.load(options.config)
        if loaded.web_config:
            auth.WebConfig(loaded.web_config)
        print(f"{loaded.file or 'no configuration file, defaults are used'}: ok")
    return 0


def probes_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """List the probes; return the exit code."""
    engine = make_engine(settings)
    for name, entry in sorted(engine.entries.items(), key=lambda item: item[1].spec.order):
        print(f"{name:<20} {entry.spec.summary}  ({entry.file.source}: {entry.file.path})")
    complain(*engine.problems)
    return 0 if not engine.problems else exit_code(State.UNKNOWN)


def devices_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """List the devices as JSON; return the exit code."""
    engine = make_engine(settings)
    found = [to_json(d) | {"present": u in engine.present} for u, d in engine.devices.items()]
    print(json.dumps(found, indent=2))
    complain(*engine.problems)
    return 0 if found else exit_code(State.UNKNOWN)
