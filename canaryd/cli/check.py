"""`canaryd check` and `canaryd drill`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from canaryd.cli.arguments import USAGE
from canaryd.cli.common import Teller, complain, device_names, may_write, open_store, stop_on_signals, write_file
from canaryd.config.settings import Config
from canaryd.engine import check
from canaryd.engine.engine import Engine, choose
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, State
from canaryd.report.check import as_json, as_text
from canaryd.store import notes
from canaryd.store.notes import released_until


def check_command(options: argparse.Namespace, settings: Config) -> int:
    """Test devices now and print one verdict each; return the exit code."""
    into: Path | None = getattr(options, "report", None)
    prom: Path | None = getattr(options, "textfile", None)
    if into and not may_write("--report", into):
        return USAGE
    if prom and not may_write("--textfile", prom):
        return USAGE
    store = open_store(settings)
    complain(*store.problems)
    if (until := released_until(store, time.time())) and notes.daemon_runs(store):
        left = until - time.time()
        complain(f"devices are released for another {left:.0f} s and are not touched: wait, or canaryd release --end")
        return exit_code(State.UNKNOWN)
    teller = Teller()
    engine = Engine(settings, store, listener=teller)
    stop_on_signals(engine)
    engine.discover()
    devices, missing = choose(engine.devices, options.device)  # one that has vanished is tried, and so unknown
    unknown = [p for p in options.probe if p not in engine.entries]
    if options.command == "drill" and not options.device:
        devices = [d for d in devices if not d.is_endpoint]
    complaints = [f"--device {m}: no such device here; there are {device_names(engine.devices)}" for m in missing]
    complaints += [f"--probe {p}: no such probe; there are {', '.join(sorted(engine.entries))}" for p in unknown]
    if complaints and not engine.stopping:
        complain(*complaints, *engine.problems)
        return USAGE
    asked = check.Options(
        level="quick" if options.command == "drill" else options.level,
        devices=tuple(options.device),
        probes=tuple(options.probe) or (_drilled(devices) if options.command == "drill" else ()),
        cases=tuple(getattr(options, "case", ())),
        seed=getattr(options, "seed", None),
        instruction_set=getattr(options, "instruction_set", ""),
        intensity=getattr(options, "intensity", ""),
        seconds=getattr(options, "seconds", 0.0),
        drill=options.fault if options.command == "drill" else "",
        wait=options.wait,
    )
    engine.only, engine.cases, engine.intensity = frozenset(asked.probes), asked.cases, asked.intensity
    result = check.run(engine, asked, devices, teller.waiting)
    store.close()
    document = as_json(result)
    if into:
        write_file("--report", into, json.dumps(document, indent=2) + "\n")
    if prom:
        from canaryd.report import textfile  # noqa: PLC0415  a check need not pay for the exposition

        try:
            textfile.write(prom, textfile.render(result, exit_code(result.state)))
        except OSError as error:
            complain(f"--textfile {prom}: not written: {error.strerror}")
    print(json.dumps(document, indent=2) if options.json else as_text(result))
    if options.command == "drill" and not check.alarmed(result):
        complain(
            f"drill: the fault {options.fault!r} raised no alarm: it met no result, or it is within what the probe"
            " allows; take --probe exact_matmul, or another --fault"
        )
        return exit_code(State.UNKNOWN)
    return exit_code(result.state)


def _drilled(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the probes that a drill runs unless others are named."""
    served = [d.is_endpoint for d in devices]
    return ("exact_matmul",) * (not all(served)) + ("endpoint_canary",) * any(served)
