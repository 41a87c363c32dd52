"""Which runs stay in memory, and in how little of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from canaryd.judge.case import DRILL_EXPIRY
from canaryd.judge.recordings import rules
from canaryd.judge.recordings.baseline import IDLE
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import (
    Comparison,
    Exactness,
    Outcome,
    Reading,
    Recording,
    Run,
    Subject,
)

NEWEST = 50
"""Unremarkable runs of one probe and instruction set that the judge looks at on a device without a mismatch."""
RECORD = 3000
"""The same on a device with one, and on its siblings: how often it fails and what it did since decide, over more than
the judge's watch."""
FAILURES = 100
"""Mismatches of one probe and instruction set that are kept in memory, and clean confirmations of it: two lanes, for a
sibling's many confirmations must never push out a mismatch."""
FEW, SHOWN = 16, 5
"""Recordings of a run that are few enough to keep, and runs of which more are kept, with their readings."""
BRIEF = 4
"""Wrong elements of a comparison that are kept in memory; the store keeps them all."""
KEPT = frozenset({"golden_fingerprint", *READINGS})
"""Readings that stay in memory."""


def fold(run: Run) -> Run:
    """Return a clean run with its comparisons summed into one: what the judge needs of it, in little memory."""
    if run.wrong:
        return replace(run, comparisons=tuple(map(_brief, run.comparisons)), skipped=(), readings=_kept(run))
    if not run.whole or len(run.comparisons) < 2:
        return run
    elements = Comparison(
        case="*",
        shape="",
        seed=run.seed,
        exactness=Exactness.UNIVERSAL,
        subject=Subject.DEVICE,
        trials=run.trials,
        uploads=sum(c.uploads for c in run.comparisons if c.subject is Subject.DEVICE),
    )
    return replace(run, comparisons=(elements,) if run.trials else (), skipped=(), readings=_kept(run))


def _brief(comparison: Comparison) -> Comparison:
    """Return a comparison with the first few of its wrong elements: what tells two mismatches apart."""
    found = comparison.evidence
    return comparison if found is None else replace(comparison, evidence=replace(found, first=found.first[:BRIEF]))


def _kept(run: Run) -> tuple[Reading, ...]:
    """Return the readings that are shown or judged; of a run without, one that says that it looked at something."""
    return tuple(r for r in run.readings if r.name in KEPT) or run.readings[:1]


def without_recordings(run: Run) -> Run:
    """Return a run without its recordings and what belongs to them; of its readings, only what older runs are asked.

    How fast an endpoint was counts beside what it was and whether others were served: the first recording tells the
    one, and one that was not alone the other.
    """
    asked = tuple(r for r in run.readings if r.name == "golden_fingerprint" or r.name in rules.LATENCIES)
    kept: tuple[Recording, ...] = ()
    if any(r.name in rules.LATENCIES for r in asked):
        kept = run.recordings[:1] + tuple(r for r in run.recordings[1:] if r.condition != IDLE)[:1]
    learnt = tuple(case for case in run.learnt if case in {r.case for r in kept})
    return replace(run, recordings=kept, learnt=learnt, readings=asked or run.readings[:1])


def last_pass(runs: Iterable[Run]) -> float | None:
    """Return when the newest whole, clean run began."""
    clean = (r for r in runs if r.outcome is Outcome.COMPLETED and r.whole and not (r.wrong or r.drill))
    return max((r.started for r in clean if r.trials), default=None)


def expired(run: Run, now: float) -> bool:
    """Return whether a run is a drill that is over."""
    return bool(run.drill) and abs(now - run.started) > DRILL_EXPIRY
