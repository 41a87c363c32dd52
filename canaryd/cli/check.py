"""`canaryd check` and `canaryd drill`."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from canaryd.cli.arguments import EXIT_STATUS, USAGE, Commands, add_json, add_verbose, add_wait, duration, label, seed
from canaryd.cli.common import (
    ProgressPrinter,
    complain,
    device_names,
    is_released,
    make_writable,
    may_write,
    open_store,
    refuse_beside_daemon,
    say,
    stop_on_signals,
    stopped_by_release,
    use_color,
    write_report,
)
from canaryd.config.settings import Config
from canaryd.engine import check
from canaryd.engine.check import Result
from canaryd.engine.engine import Engine, choose
from canaryd.engine.host import Options
from canaryd.files import write_whole
from canaryd.formatting import command, did_you_mean
from canaryd.judge.verdict import exit_code
from canaryd.model import ENDPOINT, EXACT_ENDPOINT, INTENSITIES, Device, State
from canaryd.probe import LEVELS
from canaryd.report import boundary
from canaryd.report.advice import NO_ALERT, raised_until
from canaryd.report.boundary import Boundary, Compared, DeviceChange
from canaryd.report.check import as_json, as_text
from canaryd.report.status import newest_drill
from canaryd.store.notes import daemon_runs
from canaryd.supervisor.environment import INSTRUCTION_SETS

FAULTS = ("flip", "zero", "swap", "nan", "stuck", "consistent")
"""Faults that `canaryd drill` can inject; canaryd/worker/numeric/faults.py describes them."""
DRILL_EXIT_STATUS = (
    "exit status: 2 the fault was caught, as it must be, 3 it was not, or nothing could be tested, 64 usage error"
)


def add_parsers(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_check(commands)
    _add_drill(commands)


def _add_check(commands: Commands) -> None:
    command = commands.add(
        *("check", check_command), "test every device now and print one verdict each", epilog=EXIT_STATUS
    )
    command.add_argument(
        "--level", choices=LEVELS, default="standard", help="how thoroughly to test (default: standard)"
    )
    _add_selection(command)
    command.add_argument(
        *("--case",),
        action="append",
        default=[],
        metavar="CASE",
        help="test only this case, or those whose names continue with / or @ after it; repeatable",
    )
    command.add_argument(
        "--for", dest="seconds", type=duration, default=0.0, metavar="30m", help="keep repeating for this long"
    )
    command.add_argument("--seed", type=seed, metavar="N", help="make the operands from this seed")
    command.add_argument(
        "--instruction-set",
        choices=[name for name in INSTRUCTION_SETS if name],
        default="",
        help="test only this execution path: native, avx2, baseline (CPU); strict, tf32 (MLX)",
    )
    command.add_argument(
        "--intensity",
        choices=INTENSITIES,
        default="",
        help="repeat under other conditions than usual: same data, new data, steady or pulsed load, pauses "
        "(docs/judgement.md)",
    )
    add_verbose(command, "evidence, skipped cases and what was not tested")
    add_json(command)
    command.add_argument("--report", type=Path, metavar="FILE", help="write the JSON object to this file too")
    command.add_argument(
        "--textfile", type=Path, metavar="FILE", help="write metrics for node_exporter to this file too"
    )
    command.add_argument(
        "--boundary",
        choices=(boundary.BEGIN, boundary.END),
        help="begin: note the state of each device before a job; end: say which went wrong during it",
    )
    command.add_argument("--label", type=label, metavar="JOB", help="the job or tenancy that --boundary is about")
    command.set_defaults(fault="")


def _add_drill(commands: Commands) -> None:
    command = commands.add(
        *("drill", check_command),
        "inject a fault by software and check that the alarm arrives",
        "Inject a fault by software and check that the alarm arrives. It never counts against the device.",
        epilog=DRILL_EXIT_STATUS,
    )
    command.add_argument(
        "--fault",
        choices=FAULTS,
        metavar="FAULT",
        default="flip",
        help=f"fault to inject (default: flip): {', '.join(FAULTS)}; memory, copies, links and endpoints have one of "
        "their own, whatever the name",
    )
    _add_selection(command)
    add_verbose(command, "evidence, skipped cases and what was not tested")
    add_json(command)
    command.set_defaults(level="quick", case=[], seed=None, instruction_set="", intensity="", seconds=0.0)
    command.set_defaults(report=None, textfile=None, boundary=None, label=None)


def _add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="DEV",
        help="test only this device: uuid, cpu:0, cuda:3 or a backend; repeatable",
    )
    command.add_argument("--probe", action="append", default=[], metavar="NAME", help="run only this probe; repeatable")
    command.add_argument(
        "--drained",
        action="store_true",
        help="use accelerators fully; otherwise tests beside other processes keep to the budget (docs/budget.md)",
    )
    add_wait(command)


def check_command(options: argparse.Namespace, settings: Config) -> int:
    """Test devices now, print one verdict for each, and return the exit code."""
    if not _may_begin(options):
        return USAGE
    store = open_store(settings)
    complain(*store.problems)
    if is_released(options.command, store):
        return exit_code(State.UNKNOWN)
    printer = ProgressPrinter(options.seconds)
    engine = Engine(settings, store, listener=printer)
    stop_on_signals(engine, options.command)
    with stopped_by_release(engine):
        result = _tested(options, engine, printer)
        passed = _boundary(options, engine, result)
    daemon = bool(options.fault) and daemon_runs(store)
    store.close()
    if isinstance(result, int):
        return result
    if (kept := store.drills if options.fault else store).waiting:  # closing has tried once more what was refused
        result.problems.append(f"what this check found is not kept: {make_writable(kept.refused)}")
    code = _told(options, result, passed, printer, stopped=bool(engine.stopping))
    if options.fault and check.alarmed(result):
        complain(f"drill: the fault was caught; {_raised(result, settings, daemon=daemon)}")
    return code


def _may_begin(options: argparse.Namespace) -> bool:
    """Return whether the options go together and name files that can be written; if not, print the reason."""
    if bool(options.boundary) != bool(options.label):
        complain(
            "check: --boundary and --label go together; type canaryd check --boundary begin --label JOB before a job,"
            " and canaryd check --boundary end --label JOB after it"
        )
        return False
    if options.report and not may_write("--report", options.report, pipes=True):
        return False
    return not options.textfile or may_write("--textfile", options.textfile)


def _raised(result: Result, settings: Config, *, daemon: bool) -> str:
    """Return when the alert of a caught drill ends, or why there is none, as a clause."""
    ends = (drill.until for runs in result.runs.values() if (drill := newest_drill(runs)) and drill.caught)
    return raised_until(max(ends)) if daemon else f"{NO_ALERT} ({settings.state_dir})"


def _tested(options: argparse.Namespace, engine: Engine, printer: ProgressPrinter) -> Result | int:
    """Test the requested devices; return the result, or the exit code if an option is wrong and nothing was tested."""
    printer.moving(0.0, "looking for devices")
    engine.discover(printer.complain, keep=True)
    printer.clear()
    devices, missing = choose(engine.devices, options.device)  # one that has vanished is unknown
    if not engine.stopping and (mistakes := _mistakes(engine, missing, options.probe)):
        complain(*engine.problems, *mistakes)
        unsure = engine.failing or engine.unloaded & {*options.probe}
        return exit_code(State.UNKNOWN) if unsure else USAGE
    if options.fault and not options.device:
        devices = [d for d in devices if d.computes_here]
    refuse_beside_daemon(engine.store, devices)
    return check.run(engine, _engine_options(options, devices), devices, printer.waiting, printer.expect)


def _boundary(options: argparse.Namespace, engine: Engine, result: Result | int) -> Boundary | None:
    """Keep the begin of a job, or say what became of each device since; None if not asked for, or not tested."""
    if isinstance(result, int) or result.without_case or not options.boundary:
        return None
    store = engine.store
    tests = command(
        *("check", ("level", options.level), ("intensity", options.intensity)),
        *(("instruction_set", options.instruction_set), *(("probe", name) for name in sorted(options.probe))),
        *(("case", name) for name in sorted(options.case)),
    )
    now = boundary.take(result, store, options.label, tests, time.time())
    if options.boundary == boundary.BEGIN:
        kept = boundary.keep(now, store.state_dir)
        if not kept:
            result.problems.append(f"the begin of job {now.label} is not kept: {store.state_dir} cannot be written")
        return Boundary(moment=boundary.BEGIN, label=now.label, begun=now.at if kept else None, ended=None)
    found = boundary.compare(boundary.recall(now.label, store.state_dir), now, result.verdicts)
    told = (
        _with_dossier(d, now.label, engine, result) if d.change is DeviceChange.WENT_WRONG else d for d in found.devices
    )
    return replace(found, devices=tuple(told))


def _with_dossier(compared: Compared, label: str, engine: Engine, result: Result) -> Compared:
    """Write the dossier of a device that went wrong; its digest says later which evidence the statement rests on."""
    from canaryd.dossier import write  # noqa: PLC0415  only what went wrong needs it
    from canaryd.dossier.document import DossierError  # noqa: PLC0415

    try:
        # Not where it stays: the state directory can belong to another user, who could lead root's worker elsewhere.
        with tempfile.TemporaryDirectory(prefix="canaryd-") as aside:
            device = next(d for d in result.devices if d.uuid == compared.device)
            made = write.write(engine.store, engine.config, engine, device, Path(aside), redact=False, now=time.time())
            archive = made.with_name(f"{made.name}.tar.gz")
            path, digest = boundary.keep_dossier(archive, label, engine.store.state_dir)
    except (DossierError, OSError) as error:
        return replace(compared, why=f"{compared.why}; no dossier: {error}")
    return replace(compared, why=f"{compared.why}; dossier {path}, SHA-256 {digest}", dossier=path, sha256=digest)


def _told(
    options: argparse.Namespace,
    result: Result,
    passed: Boundary | None,
    printer: ProgressPrinter,
    *,
    stopped: bool,
) -> int:
    """Print the results and write the requested files; return the exit code. `stopped`: a signal ended the check."""
    if options.case and result.without_case:
        printer.clear()
        complain(*dict.fromkeys(f"check: {run.probe}: {run.detail}" for run in result.without_case))
        return USAGE
    document = json.dumps(as_json(result, passed), indent=2)
    written = _write_files(result, document, options.report, options.textfile)
    if options.json:
        print(document)
    else:
        print(as_text(result, verbose=options.verbose, color=use_color()))
        if passed:
            say("\n".join(passed.lines()))
    if options.fault and not check.alarmed(result):
        if check.ended(result) and not stopped:
            complain(
                f"drill: the fault {options.fault!r} raised no alarm: it hit no result, or the probe tolerates it;"
                " try --probe exact_matmul, or another --fault"
            )
        return exit_code(State.UNKNOWN)
    return exit_code(result.state) or (0 if written else exit_code(State.UNKNOWN))


def _mistakes(engine: Engine, missing: Sequence[str], probes: Sequence[str]) -> list[str]:
    """Return one sentence for each requested device that is missing, and each probe that is missing or not loaded."""
    host, there = device_names(engine.devices), sorted(engine.entries)
    listed = "; to list them, type canaryd probes"
    return [
        *(f"--device {name}: no such device; this host has {host}" for name in missing),
        *(f"--probe {name}: it could not be loaded" for name in probes if name in engine.unloaded),
        *(
            f"--probe {name}: no such probe{did_you_mean(name, there) or listed}"
            for name in probes
            if name not in engine.entries.keys() | engine.unloaded
        ),
    ]


def _engine_options(options: argparse.Namespace, devices: Sequence[Device]) -> Options:
    return Options(
        level=options.level,
        probes=tuple(options.probe) or (_drill_probes(devices) if options.fault else ()),
        cases=tuple(options.case),
        seed=options.seed,
        instruction_set=options.instruction_set,
        intensity=options.intensity,
        seconds=options.seconds,
        drill=options.fault,
        drained=options.drained,
        wait=options.wait,
    )


def _drill_probes(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the probes that a drill runs by default."""
    probes = {ENDPOINT: "endpoint_canary", EXACT_ENDPOINT: "exact_endpoint"}
    return tuple(dict.fromkeys(probes.get(d.tested_as[0], "exact_matmul") for d in devices)) or ("exact_matmul",)


def _write_files(result: Result, document: str, report: Path | None, textfile: Path | None) -> bool:
    """Write the requested files; return whether all of them were written."""
    written = not report or write_report(report, f"{document}\n")
    if textfile:
        from canaryd.report import textfile as metrics  # noqa: PLC0415  a check need not pay for the exposition

        try:
            write_whole(textfile, metrics.render(result, exit_code(result.state)), metrics.MODE)
        except OSError as error:
            complain(f"--textfile {textfile}: not written: {error.strerror}")
            return False
    return written
