"""`canaryd prove`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from canaryd import __version__
from canaryd.cli.arguments import USAGE, Commands, add_json, add_wait, duration
from canaryd.cli.common import (
    ProgressPrinter,
    complain,
    device_names,
    is_released,
    may_write,
    open_store,
    refuse_beside_daemon,
    say,
    stop_on_signals,
    stopped_by_release,
    write_report,
)
from canaryd.config.settings import Config
from canaryd.engine import check, prove
from canaryd.engine.check import Result
from canaryd.engine.engine import Engine, choose
from canaryd.engine.host import Options
from canaryd.judge.incidents import incidents
from canaryd.model import Device, State
from canaryd.report import proof
from canaryd.report.incidents import brief
from canaryd.report.proof import Decision, Proof, Proved

DEFAULT = 1800.0
LEVELS = {"deep": 3600.0, "standard": 900.0, "quick": 0.0}
"""Level of the tests before the load → the seconds of a proof from which they are worth their time (ours)."""
EXIT_STATUS = (
    "exit status: 0 proven, 2 refused: a fault was found, 3 not proven: not all could be tested, 64 usage error"
)


def add_parsers(commands: Commands) -> None:
    """Add the parser of this command."""
    command = commands.add(
        *("prove", prove_command),
        "prove a new or repaired node: everything under full load at once",
        "Test every device, then all at once under steady and under pulsed load, then once more, hot. For a node that "
        "serves nobody.",
        epilog=EXIT_STATUS,
    )
    command.add_argument(
        *("--for",), dest="seconds", type=duration, default=DEFAULT, metavar="30m", help="how long (default: 30m)"
    )
    command.add_argument("--device", action="append", default=[], metavar="DEV", help="only this device; repeatable")
    command.add_argument("--strict", action="store_true", help="refuse a degraded device too")
    command.add_argument("--report", type=Path, metavar="FILE", help="write the JSON object to this file too")
    add_wait(command)
    add_json(command)


def prove_command(options: argparse.Namespace, settings: Config) -> int:
    """Prove the node, print one line, and return the exit code."""
    if options.report and not may_write("--report", options.report, pipes=True):
        return USAGE
    store = open_store(settings)
    complain(*store.problems)
    if is_released(options.command, store):
        return Decision.NOT_PROVEN.exit_code
    printer = ProgressPrinter(options.seconds)
    engine = Engine(settings, store, listener=printer)
    stop_on_signals(engine, options.command)
    started = engine.clock()
    with stopped_by_release(engine):
        printer.moving(0.0, "looking for devices")
        engine.discover(printer.complain, keep=True)
        printer.clear()
        devices, missing = choose(engine.devices, options.device)
        if missing:
            complain(f"prove --device {missing[0]}: no such device; this host has {device_names(engine.devices)}")
            store.close()
            return USAGE
        refuse_beside_daemon(engine.store, devices)
        try:
            proof.forget(settings.state_dir)
        except OSError as error:
            complain(f"prove: the last proof cannot be removed from {settings.state_dir}: {error.strerror}")
            store.close()
            return Decision.NOT_PROVEN.exit_code
        level = next(name for name, least in LEVELS.items() if options.seconds >= least)
        wanted = Options(level=level, seconds=options.seconds, drained=True, wait=options.wait)
        results = prove.run(engine, wanted, devices, printer.waiting, printer.expect)
    found = _proof(results, devices, started, strict=options.strict)
    store.close()
    complain(*dict.fromkeys(problem for result in results for problem in result.problems))
    try:
        proof.keep(found, settings.state_dir)
    except OSError as error:
        complain(f"prove: the proof is not kept in {settings.state_dir}: {error.strerror}")
    written = not options.report or write_report(options.report, json.dumps(proof.as_json(found), indent=2) + "\n")
    print(json.dumps(proof.as_json(found), indent=2)) if options.json else say(str(found))
    return found.decision.exit_code or (0 if written else Decision.NOT_PROVEN.exit_code)


def _proof(results: Sequence[Result], devices: Sequence[Device], started: float, *, strict: bool) -> Proof:
    proved = [_proved(results, device, strict=strict) for device in devices]
    ranks = [*Decision]
    proved.sort(key=lambda found: -ranks.index(found.decision))
    gaps = dict.fromkeys(str(gap) for gap in results[0].not_checked if gap not in check.NEVER_CHECKED)
    return Proof(
        canaryd=__version__,
        started=started,
        seconds=sum(result.seconds for result in results),
        loaded=sum(result.seconds for result in results[1 : 1 + len(prove.LOADS)]),
        decision=proved[0].decision if proved else Decision.NOT_PROVEN,
        devices=tuple(proved),
        not_tested=tuple(gaps),
    )


def _proved(results: Sequence[Result], device: Device, *, strict: bool) -> Proved:
    verdict, uuid = results[-1].verdicts[device.uuid], device.uuid
    runs = [run for result in results for run in result.runs.get(uuid, ())]
    totals, loads = check.found(runs), prove.under_load(results, uuid)
    worst = [brief(incident) for incident in incidents(verdict)][:1]
    missed = next((result.missed[uuid] for result in results if uuid in result.missed), "")
    idle = [load for load, compared in loads.items() if not compared]
    refused = verdict.state.severity >= State.SUSPECT.severity or (strict and verdict.state is State.DEGRADED)
    if refused:
        decision, why = Decision.REFUSED, worst
    elif verdict.state is State.UNKNOWN or missed or totals["wrong"]:
        decision, why = Decision.NOT_PROVEN, [missed] if missed else worst
    elif idle and device.computes_here:
        decision, why = Decision.NOT_PROVEN, [f"nothing was tested under {' or '.join(idle)} load"]
    else:
        decision, why = Decision.PROVEN, worst
    return Proved(
        device=uuid,
        name=device.name,
        decision=decision,
        why=why[0].rstrip(".") if why else "",
        state=verdict.state,
        cause=verdict.cause,
        results=totals["results"],
        wrong=totals["wrong"],
        under_load=loads,
    )
