"""`canaryd status` for a terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from canaryd.codec import finding_json, to_json
from canaryd.formatting import format_duration, format_time
from canaryd.judge.verdict import exit_code
from canaryd.report.advice import advice, answer, steps
from canaryd.report.events import describe_ack, describe_events
from canaryd.report.status import DeviceStatus, Status, newest_of
from canaryd.report.terminal import Line, finding_lines, headline, paint, paragraph, role_of

SCHEMA = "canaryd.status/1"
RECENT_EVENTS = 10
"""Events of one device that a terminal shows; JSON has them all."""


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
                "device": d.device.uuid,
                "backend": d.device.backend,
                "index": d.device.index,
                "name": d.device.name,
                "model": d.device.model,
                "present": d.present,
                "state": d.verdict.state.value,
                "cause": d.verdict.cause.value,
                "since": d.verdict.since,
                "decided": d.verdict.decided,
                "findings": [finding_json(f) for f in d.verdict.findings],
                "acks": [
                    {"kind": a.kind, "at": a.at, "until": a.until or None, "reason": a.reason, "by": a.by}
                    for a in d.acks
                ],
                "evidence": dict(d.evidence),
                "events": [to_json(event) for event in d.events],
            }
            for d in status.devices
        ],
        "problems": list(status.problems),
    }


def as_text(status: Status, *, verbose: bool = False, color: bool = False) -> str:
    """Return the status for a terminal: may the numbers be trusted, what to do now, then each device, worst first."""
    lines: list[Line] = [*paragraph("", answer(status), role=role_of(status.state)), *_advice_lines(status), ("", "")]
    alike: dict[object, list[DeviceStatus]] = {}
    for d in status.devices:
        if not d.unremarkable:
            alike.setdefault(d.device.uuid if d.events else _what_is_shown(d, verbose=verbose), []).append(d)
    for same in alike.values():
        lines += [*_device_lines(same, status.now, verbose=verbose), ("", "")]
    if unremarkable := [d for d in status.devices if d.unremarkable]:
        lines += [*_healthy_lines(unremarkable, status.now, verbose=verbose), ("", "")]
    for problem in status.problems:
        lines += paragraph("problem: ", problem, role="calm")
    if status.released_until:
        until = format_time(status.released_until)
        lines += paragraph("", f"devices are released until {until} (canaryd release): nothing is tested", role="calm")
    lines.append(("", "daemon: running" if status.daemon else "daemon: not running on this state directory"))
    lines.append((role_of(status.state), f"status: {status.state.value.upper()}  (exit {exit_code(status.state)})"))
    return paint(lines, color=color)


def _advice_lines(status: Status) -> Iterator[Line]:
    """Yield what to do now: sentences that follow each other as a paragraph, commands on lines of their own."""
    lead, sentences = "Do now: ", ""
    for step in steps(status):
        sentences = f"{sentences} {step.text}".lstrip()
        if step.command:
            yield from paragraph(lead, sentences)
            yield "head", f"        {step.command}"
            lead, sentences = "        ", ""
    if sentences:
        yield from paragraph(lead, sentences)


def _what_is_shown(d: DeviceStatus, *, verbose: bool) -> object:
    """Return what a paragraph says of a device: devices that share it share the paragraph."""
    findings = tuple((f.message, f.action, *((f.evidence, f.rivals) if verbose else ())) for f in d.verdict.findings)
    return d.present, d.verdict.state, d.verdict.cause, findings, tuple(map(describe_ack, d.acks_to_show))


def _healthy_lines(devices: Sequence[DeviceStatus], now: float, *, verbose: bool) -> Iterator[Line]:
    """Yield the devices about which there is nothing else to report, on one line if they fit."""
    models: dict[str, list[str]] = {}
    for d in devices:
        models.setdefault(d.device.model, []).append(d.device.name)
    names = ", ".join(f"{' '.join(names)} ({model})" for model, names in models.items())
    yield from paragraph("HEALTHY  ", names, role="good")
    yield from _evidence_lines("         ", devices, now, verbose=verbose)


def _device_lines(same: Sequence[DeviceStatus], now: float, *, verbose: bool) -> Iterator[Line]:
    """Yield the paragraph of devices that share it."""
    d = same[0]
    for each in same:
        gone = "" if each.present else "  GONE"
        yield from paragraph("", f"{each.device.name}  {each.device.model}  {each.device.uuid}{gone}", role="head")
    since = (
        f"since {format_time(d.verdict.since)} ({_ago(d.verdict.since, now)}), judged {_ago(d.verdict.decided, now)}"
    )
    yield from paragraph("  ", f"{headline(d.verdict)}  {since}", role=role_of(d.verdict.state))
    for ack in d.acks_to_show:
        yield from paragraph("  ! ", describe_ack(ack))
    yield from finding_lines(d.verdict.findings, verbose=verbose)
    events = describe_events(d.events)
    for event in events[-RECENT_EVENTS:]:
        yield from paragraph("  * ", event)
    if (more := len(events) - RECENT_EVENTS) > 0:
        yield "", f"  * and {more} earlier kinds of event in the last day: canaryd status --json"
    yield from _evidence_lines("  ", same, now, verbose=verbose)


def _evidence_lines(lead: str, devices: Sequence[DeviceStatus], now: float, *, verbose: bool) -> list[Line]:
    """Return the age of each probe's newest result if `verbose`, else of the oldest among them."""
    ages = [f"{probe} ({_ago(at, now)})" for probe, at in newest_of(devices).items()]
    if not ages:
        return []
    return paragraph(lead, f"newest results: {', '.join(ages)}" if verbose else f"oldest result: {ages[0]}")


def _ago(at: float | None, now: float) -> str:
    return "none yet" if at is None else f"{format_duration(now - at)} ago"
