"""Reduce runs to what the judge needs: the counts of a clean run, and the wrong results of a failed one.

The daemon reduces a run when the run has ended, and the store does the same for a later start. So a restart reads the
data that were in memory before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from canaryd.facts import FINGERPRINT, SHARED, Comparison, Exactness, Place, Reading, Subject
from canaryd.judge.characterised import FOLDED
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.watch import LOOKED, has_looked
from canaryd.model import IN_USE, IN_USE_ALONE, MPS_CLIENT, NOTHING, Outcome, Run, is_served

FEW = 16
"""Largest number of recordings that a run of an endpoint, or of some cases only, keeps. With more it keeps none."""
SHOWN = 5
"""Number of newest runs of each kind that keep all recordings, and keep clean comparisons beside wrong ones."""
ELEMENTS = 4
"""Number of a comparison's wrong elements that stay in memory; the store keeps all of them."""
KEPT = frozenset({FINGERPRINT, *READINGS})
"""Readings that stay in memory."""
JUDGED = (MPS_CLIENT, IN_USE, IN_USE_ALONE)
"""Entries of a run's environment that stay in memory."""


def fold(run: Run) -> Run:
    """Return a recent run, reduced: a clean one has the sum of its comparisons, a wrong one keeps all, shortened."""
    if run.wrong:
        return replace(run, comparisons=tuple(map(_shortened, run.comparisons)), skipped=(), readings=_kept(run))
    if not run.whole or len(run.comparisons) < 2:
        return run
    return replace(run, comparisons=summary(run.seed, run.trials, run.uploads), skipped=(), readings=_kept(run))


def brief(run: Run) -> Run:
    """Return an older run, reduced more than by `fold`. There must be `SHOWN` newer runs of its kind.

    Its clean comparisons are summed up place by place, except those of a case that was wrong too: a confirmation can
    have the same operands. Recordings are left out if there are many and all were known.
    """
    run = _without_words(fold(run))
    if run.wrong and run.whole:
        cases = {c.case for c in run.wrong}
        left = [c for c in run.comparisons if _can_sum(c) and c.case not in cases]
        if any(c.case != FOLDED for c in left):
            dropped = set(map(id, left))
            kept = (c for c in run.comparisons if id(c) not in dropped)
            run = replace(run, comparisons=(*kept, *_by_place(run.seed, left)))
    return without_recordings(run) if len(run.recordings) > kept_recordings(run) else run


def _without_words(run: Run) -> Run:
    """Return a run without data that only the store must keep, such as the command to repeat it."""
    return replace(
        run,
        readings=tuple(map(_short, run.readings)),
        skipped=() if run.comparisons else run.skipped,
        environment={k: v for k, v in run.environment.items() if k in JUDGED} or NOTHING,
        detail="" if run.outcome is Outcome.COMPLETED else run.detail,
        repro="",
    )


def kept_recordings(run: Run) -> int:
    """Return the largest number of recordings with which a run keeps them; with more it keeps none."""
    if run.unknown:
        return len(run.recordings)
    return 0 if run.whole and not is_served(run.device) else FEW


def summary(seed: int, results: int, uploads: int, place: Place = Place()) -> tuple[Comparison, ...]:  # noqa: B008
    """Return one comparison with the sums of a run's clean comparisons, or () if `results` is 0."""
    exact = Exactness.UNIVERSAL
    one = Comparison(case=FOLDED, shape="", seed=seed, exactness=exact, place=place, trials=results, uploads=uploads)
    return (one,) if results else ()


def without_recordings(run: Run) -> Run:
    """Return a run without its recordings, and with only those readings that are compared with later runs."""
    compared = tuple(r for r in run.readings if r.name == FINGERPRINT)
    return replace(run, recordings=(), learnt=(), readings=compared if run.trials else (*compared, *sign(run)))


def _shortened(comparison: Comparison) -> Comparison:
    """Return a comparison with its first wrong elements only, enough to distinguish two mismatches."""
    found = comparison.evidence
    if found is None or len(found.first) <= ELEMENTS:
        return comparison
    return replace(comparison, evidence=replace(found, first=found.first[:ELEMENTS]))


def _kept(run: Run) -> tuple[Reading, ...]:
    """Return the readings of a run that are shown or judged."""
    return tuple(r for r in run.readings if r.name in KEPT)


def sign(run: Run) -> tuple[Reading, ...]:
    """Return one reading that says that the run tested its device, or () if it did not; the results are left out."""
    return (Reading(name=LOOKED, value=1, unit="1"),) if has_looked(run) else ()


def _short(reading: Reading) -> Reading:
    """Return a reading with "" instead of a long text, such as a list of all switches: nothing compares long texts."""
    return replace(reading, value="") if isinstance(reading.value, str) and len(reading.value) > SHARED else reading


def _can_sum(comparison: Comparison) -> bool:
    return comparison.subject is Subject.DEVICE and not comparison.wrong


def _by_place(seed: int, comparisons: Iterable[Comparison]) -> tuple[Comparison, ...]:
    """Return one comparison for each place (core, SM, …): the sum of the clean comparisons computed there."""
    results: dict[Place, int] = defaultdict(int)
    uploads: dict[Place, int] = defaultdict(int)
    for c in comparisons:
        results[c.place] += c.trials
        uploads[c.place] += c.uploads
    return tuple(c for place in results for c in summary(seed, results[place], uploads[place], place))
