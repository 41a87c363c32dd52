"""`canaryd status`, `canaryd history` and `canaryd gate`: show what is stored, without access to a device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import AbstractContextManager

from canaryd.cli.arguments import EXIT_STATUS, USAGE, Commands, add_json, add_verbose, duration
from canaryd.cli.common import complain, one_device, open_record, open_store, use_color
from canaryd.config.settings import Config
from canaryd.formatting import columns
from canaryd.judge.verdict import exit_code
from canaryd.model import Cause, State
from canaryd.report import gate, history, status, status_text
from canaryd.store.store import Store

HISTORY = 30 * 86_400.0
"""Length of time that `canaryd history` shows by default, in seconds before now."""
GATE_EXIT_STATUS = (
    'exit status: always 0 unless the configuration has "enforcement: act" (the default is log) and nothing silences '
    "it: then 0 pass, 2 fail, 3 unknown. In any case 64 for a usage or configuration error"
)


def add_parsers(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_status(commands)
    _add_history(commands)
    _add_gate(commands)


def _open(options: argparse.Namespace, settings: Config) -> AbstractContextManager[Store]:
    """Open the store for reading. With --json, a store that cannot be read becomes a problem in the printed object."""
    return open_store(settings, for_reading=True) if options.json else open_record(settings)


def _add_status(commands: Commands) -> None:
    command = commands.add(
        *("status", status_command),
        "show the stored verdicts and what to do now",
        "Show the stored verdicts and what to do now. Touches no device.",
        epilog=EXIT_STATUS,
    )
    add_verbose(command, "the evidence of each finding and the age of each probe's newest result")
    add_json(command)


def status_command(options: argparse.Namespace, settings: Config) -> int:
    """Print the stored verdicts and return the exit code."""
    with _open(options, settings) as store:
        found = status.gather(store, settings)
    if options.json:
        print(json.dumps(status_text.as_json(found), indent=2))
    else:
        print(status_text.as_text(found, verbose=options.verbose, color=use_color()))
    return exit_code(found.state)


def _add_history(commands: Commands) -> None:
    command = commands.add(
        *("history", history_command),
        "show what happened to a device",
        "Show what happened to a device, newest first. Touches no device.",
        epilog="exit status: 0 shown, whatever happened, 3 the record cannot be read, 64 usage or configuration error",
    )
    command.add_argument("device", nargs="?", default="", metavar="DEV", help="uuid or name (default: every device)")
    command.add_argument(
        "--since", type=duration, default=HISTORY, metavar="30d", help="how far back to look (default: 30d)"
    )
    add_verbose(command, "the evidence of each finding")
    add_json(command)


def history_command(options: argparse.Namespace, settings: Config) -> int:
    """Print what happened to devices and return the exit code."""
    now = time.time()
    with _open(options, settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        named = options.device and not store.unreadable
        device = one_device("history", options.device, known) if named else None
        if named and device is None:
            return USAGE
        days = {uuid: store.days(uuid) for uuid in known}
        found = history.gather(store, settings, device.uuid if device else None, now - options.since, now, days)
    if options.json:
        print(json.dumps(history.as_json(found), indent=2))
    else:
        print(history.as_text(found, verbose=options.verbose, color=use_color()))
    return exit_code(State.UNKNOWN) if store.unreadable else 0


def _add_gate(commands: Commands) -> None:
    command = commands.add(
        *("gate", gate_command),
        "decide whether this node may take work, for schedulers",
        "Decide whether this node may take work: one line for drains, taints and job prologs.",
        epilog=GATE_EXIT_STATUS,
    )
    command.add_argument(
        "--on",
        action="append",
        choices=[s.value for s in gate.ACTS_ON],
        metavar="STATE",
        help="fail on this state and worse: degraded, suspect or faulty (default); unknown fails only if you name it",
    )
    command.add_argument(
        "--cause",
        action="append",
        choices=[c.value for c in Cause if c is not Cause.NONE],
        metavar="CAUSE",
        help="fail for this cause; repeatable (default: hardware, environment, undetermined)",
    )
    command.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEV",
        help="only these devices: uuid, cuda:3, a backend, or 0,1 (default: every device)",
    )
    command.add_argument(
        "--max-age",
        type=duration,
        default=0.0,
        metavar="2h",
        help="treat a device as unknown if its newest test is older than this",
    )
    command.add_argument(
        "--proven", action="store_true", help="treat a device as unknown unless canaryd prove has proven it as it is"
    )
    add_json(command)


def gate_command(options: argparse.Namespace, settings: Config) -> int:
    """Print whether this node may take work, and return the exit code."""
    devices = tuple(name for given in options.device for name in given.split(",") if name)
    if options.device and not devices:
        complain("gate --device: names no device; write e.g. cuda:3, or leave it out to ask about every device")
        return USAGE
    question = gate.Question(
        on=tuple(State(s) for s in options.on or [State.FAULTY.value]),
        causes=tuple(Cause(c) for c in options.cause or [c.value for c in gate.CAUSES]),
        devices=devices,
        max_age=options.max_age,
        proven=options.proven,
    )
    answer, silence = gate.ask(settings, question), gate.silenced(settings, os.environ)
    if options.json:
        print(json.dumps(gate.as_json(answer, question, silence), indent=2))
    else:
        print(gate.as_text(answer, question, silence, columns() if sys.stdout.isatty() else 0))
    return gate.exit_code(answer, silence)
