"""`canaryd config`, `canaryd devices` and `canaryd probes`: show the configuration, and what can be tested."""

from __future__ import annotations

import argparse
import json
import shutil

from canaryd.cli.arguments import Commands
from canaryd.cli.common import complain, make_engine, open_record, open_store, say
from canaryd.codec import to_json
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.config.settings import Config, TlsConfig
from canaryd.engine.engine import Engine
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.store.store import Store
from canaryd.web.tls import Tls

CONFIG_EXIT_STATUS = "exit status of check: 0 no mistake, 3 a setting has no effect, 64 the file cannot be used"


def add_parsers(commands: Commands) -> None:
    """Add the parsers of these commands."""
    commands.add(
        *("devices", devices_command, "list the devices of this host as JSON"),
        epilog="exit status: 0 listed, 3 no device, or the record cannot be read, 64 usage or configuration error",
    )
    commands.add(
        *("probes", probes_command, "list the probes and what each one tests"),
        epilog="exit status: 0 listed, 3 something could not be loaded, 64 usage or configuration error",
    )
    command = commands.add(
        *("config", config_command),
        "check the configuration, or print an example or its schema",
        "Check the configuration file, or print a commented example or its JSON Schema.",
        epilog=CONFIG_EXIT_STATUS,
    )
    command.add_argument("what", choices=("check", "example", "schema"))


def config_command(options: argparse.Namespace) -> int:
    """Check the configuration, or print an example or the schema; return the exit code."""
    if options.what == "example":
        print(load.example(), end="")
    elif options.what == "schema":
        print(json.dumps(load.json_schema(), indent=2))
    else:
        return _check_config(load.load(options.config))
    return 0


def _check_config(loaded: Config) -> int:
    """Print what is wrong with a configuration that can be loaded, and return the exit code."""
    if loaded.tls != TlsConfig():
        Tls(loaded.tls)
    if loaded.worker.python and shutil.which(loaded.worker.python) is None:
        raise ConfigError(
            [f"{loaded.file}: worker.python: {loaded.worker.python} cannot be run here; name another one"]
        )
    with Store.open(loaded.state_dir, for_reading=True) as store:
        ignored = [*load.missing_files(loaded), *Engine(loaded, store).discovery.ignored(complain)]
    file = loaded.file or "no configuration file, defaults are used"
    complain(*(f"{file}: {line}" for line in ignored))
    if not ignored:
        say(f"{file}: ok")
    return exit_code(State.UNKNOWN) if ignored else 0


def probes_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """List the probes and return the exit code."""
    engine = make_engine(settings, open_store(settings, for_reading=True))
    for name, entry in sorted(engine.entries.items(), key=lambda item: item[1].spec.order):
        say(f"{name:<20} {entry.spec.summary}  ({entry.file.source}: {entry.file.path})")
    complain(*engine.problems)
    return 0 if not engine.problems else exit_code(State.UNKNOWN)


def devices_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """List the devices as JSON and return the exit code."""
    with open_record(settings) as store:
        engine = make_engine(settings, store)
        found = [to_json(d) | {"present": u in engine.present} for u, d in engine.devices.items()]
    print(json.dumps(found, indent=2))
    complain(*engine.problems)
    return 0 if found else exit_code(State.UNKNOWN)
