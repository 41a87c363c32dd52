"""Commands that only read: status, gate, probes, devices, history, fleet, config, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from canaryd.cli.arguments import USAGE
from canaryd.cli.common import complain, device_names, make_engine, open_store
from canaryd.codec import to_json
from canaryd.config import load
from canaryd.config.settings import Config
from canaryd.dossier import write
from canaryd.dossier.document import DossierError
from canaryd.engine.engine import choose
from canaryd.formatting import columns
from canaryd.judge.verdict import exit_code
from canaryd.model import Cause, State
from canaryd.report import gate, history, history_text, status
from canaryd.report.check import status_json, status_text
from canaryd.web import auth


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
        print(f"{loaded.file or 'no configuration file: defaults'}: ok")
    return 0


def status_command(options: argparse.Namespace, settings: Config) -> int:
    """Print what the store knows; return the exit code."""
    with open_store(settings) as store:
        found = status.gather(store, settings)
    print(json.dumps(status_json(found), indent=2) if options.json else status_text(found))
    return exit_code(found.state)


def gate_command(options: argparse.Namespace, settings: Config) -> int:
    """Say whether this node may take work; return the exit code."""
    words = tuple(word for given in options.device for word in given.split(",") if word)
    if options.device and not words:
        complain("--device: names none; leave it out to ask about every device")
        return USAGE
    question = gate.Question(
        on=tuple(State(s) for s in options.on or [State.FAULTY.value]),
        causes=tuple(Cause(c) for c in options.cause or [c.value for c in gate.CAUSES]),
        devices=words,
        max_age=options.max_age,
    )
    answer, silence = gate.ask(settings, question), gate.silenced(settings, os.environ)
    if options.json:
        print(json.dumps(gate.as_json(answer, question, silence), indent=2))
    else:
        print(gate.as_text(answer, question, silence))
    return gate.exit_code(answer, silence)


def report_command(options: argparse.Namespace, settings: Config) -> int:
    """Write the dossier; a worker makes the operands of what failed once more, where one can be started."""
    engine = make_engine(settings)
    known = {r.device.uuid: r.device for r in engine.store.devices()}  # gone ones too
    found, _ = choose(known, [options.device])
    if len(found) != 1:
        complain(f"report {options.device}: names {len(found)} devices; there are {device_names(known)}")
        return USAGE
    flags = {"redact": options.redact, "drill": options.drill}
    try:
        made = write.write(engine.store, settings, engine, found[0], options.out, now=time.time(), **flags)
    except DossierError as error:
        complain(str(error))
        return exit_code(State.UNKNOWN)
    print((made / "dossier.json").read_text(encoding="utf-8").rstrip() if options.json else made)
    return 0


def history_command(options: argparse.Namespace, settings: Config) -> int:
    """Print what happened to devices; return the exit code."""
    now = time.time()
    with open_store(settings) as store:
        known = {r.device.uuid: r.device for r in store.devices()}
        found, missing = choose(known, [options.device] if options.device else [])
        if missing or (options.device and len(found) != 1):
            complain(f"history {options.device}: names {len(found)} devices; there are {device_names(known)}")
            return USAGE
        days = {uuid: store.days(uuid) for uuid in known}
        of = found[0].uuid if options.device else None
        told = history.gather(store, settings, of, now - options.since, now, days)
    if options.json:
        print(json.dumps(history.as_json(told), indent=2))
    else:
        print(history_text.as_text(told, columns(), color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


def fleet_command(options: argparse.Namespace, settings: Config) -> int:  # noqa: ARG001  one signature for commands
    """Print what a Prometheus knows about all nodes; return the exit code."""
    from canaryd.fleet import prometheus, vote  # noqa: PLC0415  no other command asks another machine

    files = {"token_file": options.token_file, "ca_file": options.ca_file}
    try:
        asked = prometheus.Prometheus(options.prometheus, patience=options.timeout, **files)
    except (OSError, ValueError) as error:
        complain(f"fleet: {error}")
        return USAGE
    try:
        found = vote.gather(asked)
    except prometheus.FleetError as error:
        complain(f"fleet: {options.prometheus}: {error}")
        return exit_code(State.UNKNOWN)
    print(json.dumps(vote.as_json(found), indent=2) if options.json else vote.as_text(found, columns()))
    return exit_code(found.state)


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
