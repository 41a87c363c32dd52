"""What happened to a device, in order of time, with temperature, power and clocks."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaryd.dossier.facts import PLOTTED, Facts
from canaryd.formatting import format_utc
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count
from canaryd.model import Event, EventKind, Outcome
from canaryd.report.incidents import headline
from canaryd.report.terminal import verdict_note

TIMELINE = 200
"""Newest entries that the timeline keeps."""
DECISIVE = (EventKind.FLAG, EventKind.OFF_BUS, EventKind.RESET)
"""Kinds of older events that it keeps too: a flag such as a failed row remap decides a return."""
POLLS, POINTS, SERIES = 20_000, 400, 8
"""Polls read, points kept per series, series kept."""
NEARBY = 150.0
"""Largest distance in seconds of a poll that gives the conditions of a run (ours: half the default `telemetry.keep`, at
which the polls of a quiet device are stored)."""
FIRST_SENSORS = ("core", "memory", "package", "sm", "graphics")
"""Sensors and domains whose series are kept first."""


def timeline(facts: Facts) -> tuple[list[dict[str, Any]], int]:
    """Return what happened, oldest first: wrong runs with their conditions, verdicts, events, stacks, acks."""
    entries = [*_wrong_runs(facts), *_stack_changes(facts)]
    if not facts.drill:
        entries += _verdicts(facts)
        entries += [
            {"at": e.last, "kind": e.kind, "text": _event(e), "conditions": {}}
            for e in facts.events
            if e.kind not in (EventKind.COUNTER, EventKind.CONDITION) or e.count
        ]
        for ack in facts.store.acks(facts.device.uuid):
            until = f", until {format_utc(ack.until)}" if ack.until else ""
            entries.append({"at": ack.at, "kind": "ack", "text": f"{ack.kind}{until}: {ack.reason}", "conditions": {}})
    entries.sort(key=lambda e: (e["at"], e["kind"], e["text"]))
    cut, kept = entries[:-TIMELINE], entries[-TIMELINE:]
    decisive = [e for e in cut if e["kind"] in DECISIVE][-TIMELINE:]
    return decisive + kept, len(cut) - len(decisive)


def _event(event: Event) -> str:
    times = f" ({event.count:g} times since {format_utc(event.first)})" if event.count > 1 else ""
    return f"{event.detail or f'{event.name}: {event.before} → {event.after}'}{times}"


def _wrong_runs(facts: Facts) -> Iterator[dict[str, Any]]:
    for run in facts.runs:
        failed = run.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED)
        if not (run.wrong or run.unknown or failed):
            continue
        first = run.wrong[0] if run.wrong else None
        text = f"{run.probe} {run.outcome.value.replace('_', ' ')}"
        if first is not None:
            text = f"{run.probe}: {count(len(run.wrong), 'wrong comparison')}, {first.case}"
            text += f" on {first.place}" if first.place else ""
            text += f": {first.evidence.pattern}" if first.evidence and first.evidence.pattern else ""
        elif run.unknown:
            text = f"{run.probe}: {count(len(run.unknown), 'recording')} outside the baseline, {run.unknown[0]}"
        if run.confirms:
            text += f" (retest of run {run.confirms})"
        elif run.trigger:
            text += f" (triggered by {run.trigger})"
        kind = "wrong" if run.wrong or run.unknown else "not completed"
        yield {"at": run.started, "kind": kind, "text": text, "conditions": _conditions(facts, run.started)}


def _conditions(facts: Facts, at: float) -> dict[str, Any]:
    """Return temperature, power and clocks of the poll nearest to a time, near enough."""
    first = bisect.bisect_left(facts.plotted_polls, at - NEARBY, key=lambda p: p.started)
    near = list(
        itertools.takewhile(lambda p: p.started <= at + NEARBY, itertools.islice(facts.plotted_polls, first, None))
    )
    if not near:
        return {}
    poll = min(near, key=lambda p: abs(p.started - at))
    chosen = sorted(
        (r for r in poll.readings if r.name in PLOTTED), key=lambda r: (PLOTTED.index(r.name), _rank(r.key))
    )
    found: dict[str, Any] = {}
    for reading in chosen:
        found.setdefault(reading.name, {"key": reading.key, "value": reading.value, "unit": reading.unit})
    return found


def _rank(key: str) -> tuple[int, str]:
    return next((i for i, sensor in enumerate(FIRST_SENSORS) if f"={sensor}" in key), len(FIRST_SENSORS)), key


def _stack_changes(facts: Facts) -> list[dict[str, Any]]:
    before: dict[tuple[str, str], Mapping[str, str]] = {}
    latest: dict[str, float] = {}
    found = []
    for run in (r for r in facts.runs if r.stack):
        key = (run.probe, run.instruction_set)
        old = before.get(key, run.stack)
        before[key] = run.stack
        changed = [k for k in sorted({*old, *run.stack}) if old.get(k, "none") != run.stack.get(k, "none")]
        if not changed:
            continue
        text = ", ".join(f"{k}: {old.get(k, 'none')} → {run.stack.get(k, 'none')}" for k in changed)
        if run.started - latest.get(text, -math.inf) > 3600.0:  # every probe reports the same change within a round
            found.append({"at": run.started, "kind": "stack", "text": text, "conditions": {}})
        latest[text] = run.started
    return found


def _verdicts(facts: Facts) -> Iterator[dict[str, Any]]:
    stored = facts.store.verdict_history(facts.device.uuid)
    now = [] if facts.verdict.since in {v.since for v in stored} else [facts.verdict]  # judged for this dossier alone
    for verdict in [*stored, *now]:
        found = incidents(verdict)
        why = f": {headline(found[0])}" if found else ""
        yield {
            "at": verdict.since,
            "kind": "verdict",
            "text": f"{verdict_note(verdict)}{why}",
            "conditions": {},
        }


def series(facts: Facts) -> list[dict[str, Any]]:
    """Return temperature, power and clocks over time, each thinned to its lowest and highest points."""
    values: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for poll in facts.polls:
        for reading in poll.readings:
            if reading.name in PLOTTED and isinstance(reading.value, (int, float)):
                values[reading.key, reading.unit].append((poll.started, float(reading.value)))
    ordered = sorted(values, key=lambda k: (_rank(k[0])[0], PLOTTED.index(k[0].partition("{")[0]), k[0]))
    return [{"reading": k, "unit": unit, "points": _thinned(sorted(values[k, unit]))} for k, unit in ordered[:SERIES]]


def _thinned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    size = max(1, math.ceil(len(points) / (POINTS / 2)))
    kept: list[tuple[float, float]] = []
    for i in range(0, len(points), size):
        part = points[i : i + size]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [list(p) for p in kept]
