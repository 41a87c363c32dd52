"""How far a device is from its baseline, as a ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from canaryd.judge.recordings.baseline import (
    SLACK,
    departure,
    key_of,
)
from canaryd.judge.recordings.record import Record, accepted_digests


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Where the newest recordings of one probe stand, those of one kind together (a case up to its first "/")."""

    probe: str
    reading: str
    status: Mapping[str, int]
    """Cases by status: "known" bits, "unknown" ones, or still "learning"."""
    ratio: float = 0.0
    """Largest distance over its tolerance: 0 while all bits are known, infinite where none is tolerated."""
    agreement: float = 1.0
    """Smallest share of tokens before the first that differs from the nearest known vector."""
    first: int | None = None
    """Earliest token that differs, from 0 on."""


def drifts(record: Record) -> tuple[Drift, ...]:
    """Return how far the newest recordings are from what is known, per probe and kind."""
    found: dict[tuple[str, str], Drift] = {}
    silent = {r.probe for r in {r.probe: r for r in record.runs if r.whole}.values() if not r.recordings}
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        if probe in silent:
            continue  # what it answered before it fell silent says nothing of now
        kind = case.partition("/")[0]
        before = found.get(
            (probe, kind), Drift(probe=probe, reading=kind, status={"known": 0, "unknown": 0, "learning": 0})
        )
        own = record.baselines.get(key_of(run, recording))
        learnt = own is not None and own.complete
        passes = own is not None and recording.digest in accepted_digests(record.baselines, own.key)
        away = departure(own, recording) if own is not None and learnt and not passes else None
        status = "learning" if not learnt else "known" if away is None else "unknown"
        after = replace(before, status={**before.status, status: before.status[status] + 1})
        if away is not None:
            tolerance = 0.0 if own is None or own.stable(recording.condition) else SLACK * (away.noise or 0.0)
            ratio = away.distance / tolerance if tolerance else math.inf
            length = max(len(away.known.tokens), 1)
            first = away.position if away.known.tokens else None  # of a kernel's result it is a tile
            position = first if first is not None else length
            firsts = [p for p in (before.first, first) if p is not None]
            after = replace(
                after,
                ratio=max(before.ratio, ratio),
                agreement=min(before.agreement, position / length),
                first=min(firsts, default=None),
            )
        found[probe, kind] = after
    return tuple(found.values())
