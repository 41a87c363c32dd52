"""The command line: only this package parses arguments, prints and exits."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from canaryd import __version__
from canaryd.cli.arguments import EXIT_STATUS, USAGE, Commands, Parser
from canaryd.cli.common import Unstored, complain, overrides
from canaryd.config import load
from canaryd.config.load import ConfigError
from canaryd.config.settings import Config
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.report.terminal import type_with
from canaryd.store.database import StoreTooNew
from canaryd.store.locks import Unreadable
from canaryd.supervisor import capabilities

EPILOG = EXIT_STATUS.replace("exit status", "exit status of check and status") + (
    "; of the other commands: see COMMAND --help"
)
MODULES = {
    "check": "check",
    "drill": "check",
    "prove": "prove",
    "run": "daemon",
    "release": "daemon",
    "status": "status",
    "history": "status",
    "gate": "status",
    "report": "report",
    "demo": "demo",
    "ack": "ack",
    "baseline": "baseline",
    "devices": "listing",
    "probes": "listing",
    "config": "listing",
}
"""Command → its module. Only this module is loaded: loading all modules takes a quarter of a short command's time."""
GROUP = "canaryd.commands"
"""Entry-point group of other distributions: command → a module with `add_parsers`."""
LAB = ("canary", "capture", "characterise", "compare", "pack")
"""Commands of the lab, a separate distribution."""


def parser(command: str = "") -> argparse.ArgumentParser:
    """Return the argument parser for all commands, or only for those of the module that has `command`."""
    top = Parser(prog="canaryd", description="Test whether this machine computes correctly.", epilog=EPILOG)
    top.add_argument("--version", action="version", version=f"canaryd {__version__}")
    commands = Commands(top)
    for module in dict.fromkeys(_modules(command).values()):
        importlib.import_module(module).add_parsers(commands)
    return top


def _modules(command: str) -> dict[str, str]:
    """Return command → module: only for `command` if canaryd's core has it, else for all installed commands."""
    if command in MODULES:
        return {command: f"canaryd.cli.{MODULES[command]}"}
    own = {name: f"canaryd.cli.{module}" for name, module in MODULES.items()}
    installed = {point.name: point.value for point in metadata.entry_points(group=GROUP)}
    return {command: installed[command]} if command in installed else {**own, **installed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    capabilities.withdraw()
    type_with(())
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words and words[0] in LAB and words[0] not in _modules(words[0]):
        complain(f'"canaryd {words[0]}" is part of the lab; install it: pip install "canaryd[lab]"')
        return USAGE
    options = parser(words[0] if words else "").parse_args(words)
    try:
        return _run(options)
    except ConfigError as error:
        complain(*error.problems)
        return USAGE
    except Unstored as error:
        complain(f"{options.command}: {error}")
        return exit_code(State.UNKNOWN)
    except Unreadable as error:
        complain(str(error))
        return exit_code(State.UNKNOWN)
    except StoreTooNew as error:
        complain(str(error))
        return USAGE


def _run(options: argparse.Namespace) -> int:
    if options.command == "config":
        return int(options.function(options))
    loaded = load.load(options.config)
    try:
        settings = replace(loaded, **overrides(options))
        type_with(_own(options, loaded), sudo=_needs_sudo(options.command, settings.state_dir))
    except FileNotFoundError:  # of Path.absolute
        complain("the working directory does not exist: change to another one, or name paths from /")
        return USAGE
    if os.path.exists(settings.state_dir) and not settings.state_dir.is_dir():  # noqa: PTH110  never raises
        complain(f"{settings.state_dir}: not a directory; give a directory with --state-dir or state_dir")
        return USAGE
    function: Callable[[argparse.Namespace, Config], int] = options.function
    return function(options, settings)


def _own(options: argparse.Namespace, loaded: Config) -> list[str]:
    """Return --config and --state-dir, with values, if they are not the defaults: printed commands must repeat them."""
    own = []
    if options.config and options.config.absolute() != load.SYSTEM_FILE:
        own += ["--config", str(options.config.absolute())]
    if options.state_dir and options.state_dir.absolute() != loaded.state_dir:
        own += ["--state-dir", str(options.state_dir.absolute())]
    return own


def _needs_sudo(command: str, state_dir: Path) -> bool:
    """Return whether readers must type sudo: systemd or sudo started this process, or it cannot write the record."""
    started = "SUDO_USER" in os.environ or (command == "run" and "NOTIFY_SOCKET" in os.environ)
    return started or (os.path.exists(state_dir) and not os.access(state_dir, os.W_OK))  # noqa: PTH110  never raises
