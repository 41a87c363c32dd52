"""Events and acknowledgements as sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from canaryd.formatting import format_time
from canaryd.model import Ack, Event

SEPARATE = frozenset({"counter", "flag", "condition", "reset", "boot", "change"})
"""Kinds of events that are shown one by one: each has its own values or time. Equal lines of a log are one."""
AMOUNTS = frozenset({"counter", "condition"})
"""Kinds of events whose count is an amount (of errors, of seconds), and not how often they happened."""


def describe_events(events: Iterable[Event]) -> list[str]:
    """Return events as lines, newest last; of equal log lines the newest stands for all, with their number."""
    alike: dict[object, Event] = {}
    for number, event in enumerate(events):
        key = number if event.kind in SEPARATE else (event.kind, event.name)
        before = alike.pop(key, None)
        count = event.count + (before.count if before else 0.0)
        alike[key] = replace(event, first=min(event.first, before.first if before else event.first), count=count)
    return [f"{format_time(e.last)}  {describe_event(e)}" for e in alike.values()]


def describe_event(event: Event) -> str:
    """Return an event as a line without its time."""
    times = f" ({event.count:g} times)" if event.count > 1 and event.kind not in AMOUNTS else ""
    what = event.detail or f"{event.name}: {event.before} → {event.after}"
    name = f" {event.name}" if event.name not in what else ""
    return f"{event.kind}{name}{times}: {what}"


def describe_ack(ack: Ack, *, dated: bool = True) -> str:
    """Return an acknowledgement as a sentence; with its date if `dated`."""
    on = f" on {format_time(ack.at)}" if dated else ""
    if ack.kind == "acknowledged" and ack.until <= ack.at:
        return f"{ack.by or 'an operator'} ended the acknowledgement{on}: {ack.reason}"
    until = f" until {format_time(ack.until)}" if ack.until else ""
    by = f" by {ack.by}" if ack.by else ""
    return f"{ack.kind}{until}{by}{on}: {ack.reason}"
