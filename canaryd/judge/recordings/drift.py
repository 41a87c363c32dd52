"""How far a device is from its baselines, as a ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from canaryd.judge.recordings import cases
from canaryd.judge.recordings.baseline import SLACK, deviation, key_of
from canaryd.judge.recordings.record import Record, known_digests


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How the newest recordings of one probe compare with their baselines, all cases of one kind together."""

    probe: str
    reading: str
    """The kind of the cases."""
    status: Mapping[str, int]
    """Cases by status: "known" vectors, "unknown" ones, or still "learning"."""
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
    for variant, (run, recording) in sorted(record.newest.items()):
        if variant.probe in silent:
            continue  # its newest run recorded nothing: older recordings say nothing about now
        kind = cases.kind_of(variant.case)
        before = found.get(
            (variant.probe, kind),
            Drift(probe=variant.probe, reading=kind, status={"known": 0, "unknown": 0, "learning": 0}),
        )
        own = record.baselines.get(key_of(run, recording))
        learnt = own is not None and own.complete
        passes = own is not None and recording.digest in known_digests(record.baselines, own.key)
        differs = deviation(own, recording) if own is not None and learnt and not passes else None
        status = "learning" if not learnt else "known" if differs is None else "unknown"
        after = replace(before, status={**before.status, status: before.status[status] + 1})
        if differs is not None:
            tolerance = 0.0 if own is None or own.stable(recording.condition) else SLACK * (differs.noise or 0.0)
            ratio = differs.distance / tolerance if tolerance else math.inf
            length = max(len(differs.nearest.tokens), 1)
            first = differs.position if differs.nearest.tokens else None  # of a kernel's result it is a tile
            position = first if first is not None else length
            firsts = [p for p in (before.first, first) if p is not None]
            after = replace(
                after,
                ratio=max(before.ratio, ratio),
                agreement=min(before.agreement, position / length),
                first=min(firsts, default=None),
            )
        found[variant.probe, kind] = after
    return tuple(found.values())
