"""How far a device is from its baselines, as a ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from canaryd.judge.recordings import cases
from canaryd.judge.recordings.baseline import SLACK, deviation, key_of, known_digests
from canaryd.judge.recordings.record import Record

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
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        if probe in silent:
            continue  # its newest run recorded nothing: older recordings say nothing about now
        kind = cases.kind_of(case)
        before = found.get((probe, kind), Drift(probe=probe, reading=kind, status=dict.fromkeys(STATUS, 0)))
        own = record.baselines.get(key_of(run, recording))
        complete = own is not None and own.complete
        passes = own is None or not complete or recording.digest in known_digests(record.baselines, own.key)
        differs = None if own is None or passes else deviation(own, recording)
        status = "learning" if not complete else "known" if differs is None else "unknown"
        after = replace(before, status={**before.status, status: before.status[status] + 1})
        if differs is not None and own is not None:
            tolerance = 0.0 if own.stable(recording.condition) else SLACK * (differs.noise or 0.0)
            length = max(len(differs.found.nearest.tokens), 1)
            first = (
                differs.found.position if differs.found.nearest.tokens else None
            )  # of a kernel's result it is a tile
            after = replace(
                after,
                ratio=max(before.ratio, differs.found.distance / tolerance if tolerance else math.inf),
                agreement=min(before.agreement, (length if first is None else first) / length),
                first=min((p for p in (before.first, first) if p is not None), default=None),
            )
        found[probe, kind] = after
    return tuple(found.values())
