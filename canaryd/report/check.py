"""The result of a check as text for a terminal, or as one JSON object."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from canaryd.codec import to_json
from canaryd.engine.check import Result, compared, found
from canaryd.facts import DEVICE_SECONDS
from canaryd.formatting import format_time
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count
from canaryd.judge.statistics import rate_bound
from canaryd.judge.tally import counted
from canaryd.judge.verdict import exit_code
from canaryd.model import Device, Outcome, Run, State
from canaryd.report.boundary import Boundary
from canaryd.report.incidents import INDENT, STATE, device_json, note_lines, state_lines
from canaryd.report.terminal import Line, paint, paragraph, role_of

SCHEMA = "canaryd.check/1"
FEW = 6
"""Largest number of skipped cases of one probe that are listed by name."""


def as_json(result: Result, boundary: Boundary | None = None) -> dict[str, Any]:
    """Return the object that `check --json` prints (docs/check.schema.json); `boundary`: what --boundary asked for."""
    return {
        "schema": SCHEMA,
        "state": result.state.value,
        "exit_code": exit_code(result.state),
        "level": result.level,
        "drill": result.drill,
        "started": result.started,
        "seconds": round(result.seconds, 3),
        "devices": [_device(result, device) for device in result.devices],
        "not_checked": [str(gap) for gap in result.not_checked],
        "problems": list(result.problems),
        "boundary": to_json(boundary),
    }


def _device(result: Result, device: Device) -> dict[str, Any]:
    verdict = result.verdicts[device.uuid]
    return {
        **device_json(device, verdict),
        "since": verdict.since,
        **found(result.runs.get(device.uuid, [])),
        "runs": [_run(run) for run in result.runs.get(device.uuid, [])],
        "skipped": [
            {"probe": probe, "case": skipped.case, "reason": skipped.reason, "late": skipped.late}
            for probe, skipped in result.skipped.get(device.uuid, [])
        ],
        "rules_out": result.rules_out.get(device.uuid, {}),
        "shared": result.shared.get(device.uuid, ""),
        "telemetry": {
            probe: {
                "completed": poll.completed is not None,
                "readings": [
                    {"name": r.name, "labels": dict(r.labels), "value": r.value}
                    for r in (poll.completed.readings if poll.completed else ())
                ],
                "absent": dict(poll.completed.absent) if poll.completed else {},
            }
            for probe, poll in result.polls.get(device.uuid, {}).items()
        },
        "events": [to_json(event) for event in result.events.get(device.uuid, ())],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "probe": run.probe,
        "outcome": run.outcome.value,
        "level": run.level,
        "instruction_set": run.instruction_set,
        "seed": run.seed,
        "started": run.started,
        "seconds": round(run.seconds, 3),
        "device_seconds": _reading(run, DEVICE_SECONDS),
        "operations": _reading(run, "operations"),
        "trials": counted([run]).of,
        "wrong_trials": counted([run]).wrong,
        "recordings": len(run.recordings),
        "unknown": list(run.unknown),
        "confirms": run.confirms,
        "intensity": run.intensity,
        "stack": run.stack_id,
        "detail": run.detail,
        "repro": run.repro,
    }


def _reading(run: Run, name: str) -> float | None:
    """Return a number from the run's readings, or None if the run does not have it."""
    return next((float(r.value) for r in run.readings if r.name == name), None)


def as_text(result: Result, *, verbose: bool = False, color: bool = False) -> str:
    """Return the report of a check for a terminal: the incidents of each device, and what was not tested.

    `verbose` adds findings, counts, readings, skipped cases, and the reasons why something was not tested.
    """
    lines: list[Line] = []
    worst_first = sorted(result.devices, key=lambda d: -result.verdicts[d.uuid].state.severity)
    healthy = [d for d in worst_first if result.verdicts[d.uuid].state is State.HEALTHY]
    for device in (d for d in worst_first if d not in healthy):
        lines += _bad_lines(result, device, verbose=verbose)
    lines += _healthy_lines(result, healthy, verbose=verbose)
    if not result.devices:
        lines.append(("", "no device was tested"))
    for device in (d for d in result.devices if d.uuid in result.shared):
        lines += paragraph("", f"{device.name}: {result.shared[device.uuid]}", role="calm")
    for problem in result.problems:
        lines += paragraph("problem: ", problem, role="calm")
    if verbose:
        lines += [line for gap in result.not_checked for line in paragraph("not tested: ", str(gap))]
    elif result.not_checked:
        skipped = {probe for each in result.skipped.values() for probe, what in each if what.case == "*"}
        gaps = [
            *([f"{count(len(skipped), 'probe')} skipped"] if skipped else []),
            *(g.what for g in result.not_checked),
        ]
        many = f"{count(len(gaps), 'thing')} {'was' if len(gaps) == 1 else 'were'} not tested"
        lines += paragraph("", f"{many}: {', '.join(gaps)} (-v lists them)")
    state = result.state
    name = "drill verdict" if result.drill else "verdict"
    lines.append((role_of(state), f"{name}: {state.value.upper()}  (exit {exit_code(state)}, {result.seconds:.1f} s)"))
    return paint(lines, color=color)


def _bad_lines(result: Result, device: Device, *, verbose: bool) -> Iterator[Line]:
    verdict = result.verdicts[device.uuid]
    yield from state_lines(device, verdict, verbose=verbose)
    yield from _this_check_lines(result, device)
    if verdict.drill and verdict.state.severity >= State.SUSPECT.severity:
        yield from paragraph(
            INDENT, "The injected fault was caught, as it must be; it does not count against the device."
        )
    if verbose:
        yield from _detail_lines(result, device)


def _this_check_lines(result: Result, device: Device) -> Iterator[Line]:
    """Yield a line with the result counts of this check, if the other lines do not show them.

    Without this line nobody could see whether a repeat was clean or wrong again.
    """
    verdict, runs = result.verdicts[device.uuid], result.runs.get(device.uuid, [])
    wrong = [i for i in incidents(verdict) if i.wrong]
    if verdict.drill or device.uuid in result.missed or any(i.since >= result.started for i in wrong):
        return
    of = found(runs)
    what = compared(runs) if of["results"] or of["recordings"] else "no result"
    clean = not (of["wrong"] or of["differ"])
    kept = f" The fault of {format_time(wrong[0].since, seconds=False)} stays on record." if wrong and clean else ""
    yield from paragraph(INDENT, f"This check: {what}.{kept}")


def _healthy_lines(result: Result, devices: Sequence[Device], *, verbose: bool) -> Iterator[Line]:
    """Yield one line for each healthy device, or only one line with all of them if another device is not healthy."""
    if len(devices) < len(result.devices) and not verbose:
        if devices:
            yield from paragraph(f"{'HEALTHY':<{STATE}}", " ".join(d.name for d in devices), role="good")
        return
    for device in devices:
        runs = result.runs.get(device.uuid, [])
        what = f"{device.name}  {device.model}  {compared(runs)}, {sum(r.seconds for r in runs):.0f} s"
        yield from paragraph(f"{'HEALTHY':<{STATE}}", what, role="good")
        if bounds := result.rules_out.get(device.uuid, {}):
            clean = sum(run.trials for run in runs if run.probe in bounds)
            yield from paragraph(INDENT, f"would have caught {_rate(rate_bound(clean))}")
        yield from note_lines(result.verdicts[device.uuid], verbose=verbose)
        if verbose:
            yield from _detail_lines(result, device)


def _detail_lines(result: Result, device: Device) -> Iterator[Line]:
    """Yield lines about this check on a device: results by probe, readings, detectable fault rates, skipped cases."""
    yield from paragraph("  ", f"This check on {device.name} ({device.uuid}):")
    yield from _count_lines(result.runs.get(device.uuid, []))
    for probe, poll in result.polls.get(device.uuid, {}).items():
        if poll.completed is not None:
            absent = f"; {len(poll.completed.absent)} unavailable on this machine" if poll.completed.absent else ""
            yield from paragraph(f"  {probe:<26} ", f"{len(poll.completed.readings):>9,} readings{absent}")
    for probe, bound in result.rules_out.get(device.uuid, {}).items():
        yield from paragraph(f"  {probe}: ", f"would have caught {_rate(bound)}")
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for probe, skipped in result.skipped.get(device.uuid, []):
        reasons[probe, skipped.reason].append(skipped.case)
    for (probe, reason), cases in reasons.items():
        few = ", ".join(cases) if len(cases) <= FEW else f"{len(cases)} cases"
        yield from paragraph("  skipped ", f"{probe}{'' if cases == ['*'] else f' {few}'}: {reason}")


def _rate(bound: float) -> str:
    return f"any fault that hits at least 1 in {1 / bound:,.0f} results (95 %)"


def _count_lines(runs: Iterable[Run]) -> Iterator[Line]:
    """Yield one line per probe and instruction set: how many results were compared, and how many of them were wrong."""
    by_name: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_name[f"{run.probe} [{run.instruction_set}]" if run.instruction_set else run.probe].append(run)
    for name, of in by_name.items():
        failed = sum(r.outcome is not Outcome.COMPLETED for r in of)
        results = counted(of)
        counts = {
            f"{results.of:,} results, {results.wrong:,} wrong": any(r.comparisons for r in of),
            f"{sum(len(r.recordings) for r in of):,} recordings, {sum(len(r.unknown) for r in of):,} differ from the "
            "baseline": any(r.recordings for r in of),
            f"{failed} of {count(len(of), 'run')} did not complete": bool(failed),
        }
        said = "; ".join(text for text, holds in counts.items() if holds) or "nothing compared"
        yield from paragraph(f"  {name:<26} ", said, role="bad" if results.wrong else "")
