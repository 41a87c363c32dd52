"""What happened to a device, in order of time, with temperature, power and clocks at each failing run."""

from __future__ import annotations

import bisect

from canaryd.dossier.document import MEASURED, Facts, Json
from canaryd.formatting import format_utc
from canaryd.judge.slower import stacks
from canaryd.model import EventKind
from canaryd.report import history
from canaryd.report.history import Item

TIMELINE = 200
"""Number of newest entries that the timeline keeps."""
DECISIVE = (EventKind.FLAG, EventKind.OFF_BUS, EventKind.RESET)
"""Kinds of events that newer entries do not push out of the timeline: a flag can decide about a return."""
NEARBY = 150.0
"""Largest distance in seconds between a run and the poll that shows its temperature, power and clocks (ours: half of
`engine.polling.KEEP`, the time between two stored polls of a quiet device)."""
FIRST_SENSORS = ("core", "memory", "package", "sm", "graphics")
"""Sensors and clocks to prefer if a device has several, the most preferred first."""


def timeline(facts: Facts) -> tuple[list[Json], int]:
    """Return the newest entries of the timeline, oldest first, and the number of older entries that are left out."""
    items, decisive = [*history.of_runs(facts.runs, joined=False), *history.of_stacks(stacks(facts.runs))], list[Item]()
    if not facts.drill:
        stored = facts.store.verdict_history(facts.device.uuid)
        now = (
            [] if facts.verdict.since in {v.since for v in stored} else [facts.verdict]
        )  # newer than any that is stored
        decisive = [*history.of_events(e for e in facts.events if e.kind in DECISIVE)]
        items += history.of_verdicts([*stored, *now])
        items += history.of_events(e for e in facts.events if e.kind not in DECISIVE)
        for ack in facts.store.acks(facts.device.uuid):  # without who entered it
            until = f", until {format_utc(ack.until)}" if ack.until else ""
            text = f"{ack.kind}{until}: {ack.reason}"
            items.append(Item(at=ack.at, first=ack.at, kind="ack", role="mark", text=text))
    items.sort(key=lambda i: (i.at, i.kind, i.text))
    kept = sorted([*decisive[-TIMELINE:], *items[-TIMELINE:]], key=lambda i: (i.at, i.kind, i.text))
    entries: list[Json] = [
        {"at": i.at, "kind": i.kind, "text": i.text, "conditions": _conditions(facts, i.at) if i.kind == "run" else {}}
        for i in kept
    ]
    return entries, len(items) + len(decisive) - len(kept)


def _conditions(facts: Facts, at: float) -> Json:
    """Return temperature, power and clocks of the poll nearest to a time, if it is within `NEARBY` seconds."""
    first = bisect.bisect_left(facts.measured, at - NEARBY, key=lambda p: p.started)
    last = bisect.bisect_right(facts.measured, at + NEARBY, key=lambda p: p.started)
    if first == last:
        return {}
    poll = min(facts.measured[first:last], key=lambda p: abs(p.started - at))
    found: Json = {}
    for reading in sorted((r for r in poll.readings if r.name in MEASURED), key=lambda r: _rank(r.key)):
        found.setdefault(reading.name, {"key": reading.key, "value": reading.value, "unit": reading.unit})
    return {name: found[name] for name in MEASURED if name in found}


def _rank(key: str) -> tuple[int, str]:
    return next((i for i, sensor in enumerate(FIRST_SENSORS) if f"={sensor}" in key), len(FIRST_SENSORS)), key
