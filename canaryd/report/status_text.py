"""`canaryd status` as text for a terminal, or as one JSON object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from canaryd.codec import to_json
from canaryd.formatting import columns, format_time, time_zone
from canaryd.judge.incidents import incidents, notes
from canaryd.judge.verdict import exit_code
from canaryd.model import State
from canaryd.report.advice import advice, advised, answer, drills, steps
from canaryd.report.events import describe_ack, describe_events
from canaryd.report.incidents import INDENT, STATE, describe, device_json, note_lines, state_lines, step, step_lines
from canaryd.report.status import DeviceStatus, Status, ago, newest_of
from canaryd.report.terminal import Line, paint, paragraph, role_of, typed

SCHEMA = "canaryd.status/1"
RECENT_EVENTS = 10
"""Largest number of events of one device on a terminal; JSON has all events."""
PARAGRAPHS = 2
"""Largest number of paragraphs about devices with which the untested parts are still listed; else they are counted."""


def as_json(status: Status) -> dict[str, Any]:
    """Return the object that `status --json` prints (docs/status.md, docs/status.schema.json)."""
    return {
        "schema": SCHEMA,
        "state": status.state.value,
        "exit_code": exit_code(status.state),
        "answer": answer(status),
        "advice": advice(status),
        "now": status.now,
        "daemon_running": status.daemon,
        "released_until": status.released_until or None,
        "devices": [
            {
                **device_json(d.device, d.verdict),
                "name": d.device.name,
                "present": d.present,
                "since": d.verdict.since,
                "decided": d.verdict.decided,
                "acks": [
                    {"kind": a.kind, "at": a.at, "until": a.until or None, "reason": a.reason, "by": a.by}
                    for a in d.acks
                ],
                "evidence": dict(d.evidence),
                "drill": to_json(d.drill),
                "events": [to_json(event) for event in d.events],
            }
            for d in status.devices
        ],
        "not_tested": [str(gap) for gap in status.not_tested],
        "problems": list(status.problems),
    }


def as_text(status: Status, *, verbose: bool = False, color: bool = False) -> str:
    """Return the status as text: whether to trust the numbers, what to do now, then each device, worst first."""
    lines: list[Line] = paragraph("", answer(status), role=role_of(status.state))
    lines += step_lines("Do now: ", steps(status))
    alike, covered = dict[object, list[DeviceStatus]](), advised(status)
    for d in status.devices:
        if not _is_quiet(d, verbose=verbose):
            shown = _what_is_shown(d, verbose=verbose, advised=d.device.uuid in covered)
            alike.setdefault(d.device.uuid if d.events else shown, []).append(d)
    for same in alike.values():
        lines += _device_lines(same, status, verbose=verbose, advised=same[0].device.uuid in covered)
    quiet = [d for d in status.devices if _is_quiet(d, verbose=verbose)]
    # Where many paragraphs have to fit on a screen, what was not tested is only counted, beside what is healthy.
    counted = bool(quiet) and len(alike) > PARAGRAPHS and not verbose and bool(status.not_tested)
    if quiet:
        more = f"; {len(status.not_tested)} things were not tested (-v)" if counted else ""
        lines += _healthy_lines(quiet, status, more, verbose=verbose)
    for problem in status.problems:
        lines += paragraph("problem: ", problem, role="calm")
    if status.released_until:
        until = format_time(status.released_until)
        lines += paragraph("", f"devices are released until {until} (canaryd release): nothing is tested", role="calm")
    for drill in drills(status):
        lines += paragraph("", drill)
    if not counted:
        lines += _untested_lines(status, verbose=verbose)
    lines += _last_lines(status)
    return paint(lines, color=color)


def _is_quiet(d: DeviceStatus, *, verbose: bool) -> bool:
    """Return whether a device is healthy and nothing else about it (event, acknowledgement, note) has to be shown."""
    healthy = d.verdict.state is State.HEALTHY and not (d.events or d.acks)
    return healthy and not any(note_lines(d.verdict, verbose=verbose))


def _what_is_shown(d: DeviceStatus, *, verbose: bool, advised: bool) -> object:
    """Return a value that is equal for devices with the same text. These devices share one paragraph."""
    said: tuple[object, ...] = tuple(
        (describe(i), step(i, d.device).text if advised and number == 0 else step(i, d.device))
        for number, i in enumerate(incidents(d.verdict))
    )
    said += tuple((f.message, f.evidence, f.rivals) for f in d.verdict.findings if verbose)
    noted = tuple(f.message for f in notes(d.verdict))
    return (
        d.device.model,
        d.present,
        d.verdict.state,
        d.verdict.cause,
        said,
        noted,
        tuple(map(describe_ack, d.acks_to_show)),
    )


def _healthy_lines(devices: Sequence[DeviceStatus], status: Status, more: str, *, verbose: bool) -> Iterator[Line]:
    """Yield lines that list the healthy devices with nothing else to report. `more` is added after the names."""
    models: dict[str, list[str]] = {}
    for d in devices:
        models.setdefault(d.device.model, []).append(d.device.name)
    if verbose or status.state is State.HEALTHY:
        names = ", ".join(f"{' '.join(names)} ({model})" for model, names in models.items())
    else:
        names = " ".join(d.device.name for d in devices)
    yield from paragraph(f"{'HEALTHY':<{STATE}}", names + more, role="good")
    if verbose:
        yield from _evidence_lines(devices, status.now)


def _device_lines(same: Sequence[DeviceStatus], status: Status, *, verbose: bool, advised: bool) -> Iterator[Line]:
    """Yield the paragraph for devices with equal content. `advised`: the first lines already say what to do."""
    d = same[0]
    name = ", ".join(each.device.name for each in same)
    yield from state_lines(d.device, d.verdict, name=name, gone=not d.present, advised=advised, verbose=verbose)
    for ack in d.acks_to_show:
        yield from paragraph(f"{'!':<{STATE}}", describe_ack(ack))
    yield from _event_lines(describe_events(d.events), verbose=verbose)
    if verbose:
        for each in same:
            yield from paragraph(INDENT, f"{each.device.name} is {each.device.uuid}")
        since = f"{d.verdict.state.value} since {format_time(d.verdict.since)} ({ago(d.verdict.since, status.now)})"
        yield from paragraph(INDENT, f"{since}, judged {ago(d.verdict.decided, status.now)}")
        yield from _evidence_lines(same, status.now)


def _event_lines(events: Sequence[str], *, verbose: bool) -> Iterator[Line]:
    """Yield a line with the newest event of the last day; with `verbose` a line for each of the newest events."""
    if not verbose:
        for event in events[-1:]:
            end = f" (and {len(events) - 1} more: -v)" if len(events) > 1 else ""
            yield "", f"{'*':<{STATE}}{textwrap.shorten(event, columns() - STATE - len(end), placeholder=' …')}{end}"
        return
    for event in events[-RECENT_EVENTS:]:
        yield from paragraph(f"{'*':<{STATE}}", event)
    if (more := len(events) - RECENT_EVENTS) > 0:
        yield "", f"{INDENT}and {more} earlier kinds of event in the last day: {typed('canaryd status --json')}"


def _evidence_lines(devices: Sequence[DeviceStatus], now: float) -> list[Line]:
    """Return lines with the age of each probe's newest result, the oldest first."""
    ages = ", ".join(f"{probe} ({ago(at, now)})" for probe, at in newest_of(devices).items())
    return paragraph(INDENT, f"newest results: {ages}") if ages else []


def _untested_lines(status: Status, *, verbose: bool) -> Iterator[Line]:
    """Yield lines about what the recorded tests did not examine; with `verbose`, with the reasons."""
    if verbose:
        yield from (line for gap in status.not_tested for line in paragraph("not tested: ", str(gap)))
    elif status.not_tested:
        yield from paragraph("not tested: ", f"{', '.join(gap.what for gap in status.not_tested)} (-v says more)")


def _last_lines(status: Status) -> Iterator[Line]:
    """Yield the last lines: whether the daemon runs, the probe that ran least recently, time zone and state."""
    known = [(*d.stalest, d.device.name) for d in status.devices if d.stalest]
    oldest = ""
    if known:
        probe, at, name = min(known, key=lambda one: one[1] or 0.0)
        oldest = f"; oldest test: {probe}, {name}, {ago(at, status.now)}"
    daemon = "running" if status.daemon else "not running on this state directory"
    daemon = "not known without a state directory" if status.closed else daemon
    yield from paragraph("", f"daemon: {daemon}{oldest}; times: {time_zone()}")
    yield role_of(status.state), f"status: {status.state.value.upper()}  (exit {exit_code(status.state)})"
