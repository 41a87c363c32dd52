"""Describe events and acknowledgements in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from canaryd.formatting import DAY, format_time
from canaryd.model import Ack, AckKind, Event, EventKind

NAMED_BY_KIND = frozenset({EventKind.FILES, EventKind.OFF_BUS, "oom", EventKind.RESET, "thermal"})
"""Kinds of events whose words already include the event's name."""
AMOUNTS = frozenset({EventKind.COUNTER, EventKind.CONDITION})
"""Kinds of events whose count is an amount (of errors, of seconds) and not the number of occurrences."""


KINDS: Mapping[str, str] = {
    "aer": "PCI Express error",
    "amdgpu": "AMD driver",
    EventKind.BOOT: "",
    EventKind.CHANGE: "changed",
    "clock": "clock",
    EventKind.CONDITION: "",
    EventKind.COUNTER: "",
    EventKind.COUNTER_FELL: "",
    "driver": "NVIDIA driver",
    "edac": "memory error",
    EventKind.FILES: "software",
    EventKind.FLAG: "",
    "hang": "driver hung",
    "intel": "Intel driver",
    "last-boot": "the restart before",
    "lockup": "processor stuck",
    "mce": "machine check",
    "nvme": "disk",
    EventKind.OFF_BUS: "device lost",
    "oom": "out of memory",
    "pcie": "PCI Express",
    "port": "PCI Express port",
    EventKind.RELEASE: "",
    EventKind.RESET: "reset",
    "sxid": "NVSwitch error, SXid",
    "thermal": "slowed down for heat",
    "unplaced": "kernel log, no device named",
    "xid": "NVIDIA error, Xid",
}
"""Kind of event → words that begin its description; "" if no words are needed. Any other kind is a kernel log line."""


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events in order. Events of one day, kind and name are joined: the newest, with the sum of counts."""
    alike: dict[tuple[str, str, int], Event] = {}
    for event in events:
        key = event.kind, event.name, int(event.last // DAY)
        old = alike.pop(key, event)
        count = event.count + (old.count if old is not event else 0.0)
        alike[key] = replace(event, first=min(event.first, old.first), count=count)
    return list(alike.values())


def describe_events(events: Iterable[Event]) -> list[str]:
    """Return events as lines, newest last."""
    return [f"{format_time(e.last)}  {describe_event(e)}" for e in joined(events)]


def describe_event(event: Event) -> str:
    """Return an event as one line without its time."""
    times = f" ({event.count:g} times)" if event.count > 1 and event.kind not in AMOUNTS else ""
    lead = KINDS.get(event.kind, "kernel log")
    what = event.detail or f"{event.name}: {event.before} → {event.after}"
    if not lead:
        return what
    name = f" {event.name}" if event.kind not in NAMED_BY_KIND and event.name not in what else ""
    return f"{lead}{name}{times}: {what}"


def describe_ack(ack: Ack, *, dated: bool = True) -> str:
    """Return an acknowledgement as a sentence; with its date if `dated`."""
    on = f" on {format_time(ack.at)}" if dated else ""
    if ack.kind == AckKind.ACKNOWLEDGED and ack.until <= ack.at:
        return f"{ack.by or 'an operator'} ended the acknowledgement{on}: {ack.reason}"
    until = f" until {format_time(ack.until)}" if ack.until else ""
    by = f" by {ack.by}" if ack.by else ""
    what = "wrong results put down to software" if ack.kind == "software" else ack.kind
    return f"{what}{until}{by}{on}: {ack.reason}"
