"""How far a device is from its baselines, as a ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from canaryd.judge.recordings.baseline import SLACK
from canaryd.judge.recordings.record import Newest, Record

STATUS = ("known", "unknown", "learning")


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How the newest recordings of one probe compare with their baselines, all cases of one kind together."""

    probe: str
    reading: str
    """The kind of the cases."""
    status: Mapping[str, int]
    """`STATUS` → cases: with known vectors, with unknown ones, or still being learnt."""
    ratio: float = 0.0
    """Largest distance over its tolerance: 0 while all vectors are known, infinite where the tolerance is 0."""
    agreement: float = 1.0
    """Smallest share of tokens before the first that differs from the nearest known vector."""
    first: int | None = None
    """Earliest token that differs, from 0 on."""


def drifts(record: Record) -> tuple[Drift, ...]:
    """Return how far the newest recordings are from their baselines, per probe and kind of case."""
    found: dict[tuple[str, str], Drift] = {}
    silent = {r.probe for r in {r.probe: r for r in record.runs if r.whole}.values() if not r.recordings}
    for new in record.newest:
        probe, kind = new.run.probe, new.recording.case.partition("/")[0]
        if probe not in silent:  # else its newest run recorded nothing: older recordings say nothing about now
            before = found.get((probe, kind), Drift(probe=probe, reading=kind, status=dict.fromkeys(STATUS, 0)))
            found[probe, kind] = _with(before, new)
    return tuple(found.values())


def _with(drift: Drift, new: Newest) -> Drift:
    """Return the drift of several cases with that of one more."""
    own = new.complete
    status = "learning" if own is None else "known" if new.known else "unknown"
    counted = replace(drift, status={**drift.status, status: drift.status[status] + 1})
    away = None if own is None or new.known else own.difference(new.recording)
    if own is None or away is None:
        return counted
    condition = new.recording.condition
    tolerance = 0.0 if own.stable(condition) else SLACK * (own.noise(condition) or 0.0)
    ratio = max(drift.ratio, away.distance / tolerance if tolerance else math.inf)
    if not (length := len(away.nearest.tokens)) or away.position is None:  # of a kernel's result it is a tile
        return replace(counted, ratio=ratio)
    first = away.position if drift.first is None else min(drift.first, away.position)
    return replace(counted, ratio=ratio, agreement=min(drift.agreement, away.position / length), first=first)
