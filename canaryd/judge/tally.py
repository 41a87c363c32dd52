"""Tallies: what runs found, counted once when they are stored, so that no verdict depends on which runs are kept.

One tally counts the runs of one kind on one device and day (UTC). Within a day a new tally begins after each wrong
result of the probe and after each repair of the device, so that what was before and after can be told apart.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from canaryd.facts import Subject
from canaryd.judge.statistics import Count
from canaryd.judge.watch import has_looked
from canaryd.model import Outcome, Run, Tally, added


class Lane(NamedTuple):
    """The kind of the runs that one tally counts."""

    probe: str
    probe_version: int
    stack_id: str
    instruction_set: str
    intensity: str
    whole: bool
    """Whether they tested everything that the probe normally tests; retests and confirmations repeat what was wrong."""
    completed: bool
    erred: bool
    """Whether they found a wrong result, of the device, of a golden or of a comparator."""


class Tallied(NamedTuple):
    """The runs of one kind on one device, added up."""

    lane: Lane
    first: float
    """Start of the first run (epoch s)."""
    last: float
    """Start of the last run (epoch s)."""
    runs: int = 1
    tested: int = 0
    """Whole, completed runs that tested the device (`watch.has_looked`)."""
    failing: int = 0
    """Runs with a wrong result of the device."""
    results: int = 0
    wrong: int = 0
    uploads: int = 0
    failed: int = 0
    """Uploads with a wrong result of the device."""
    goldens: int = 0
    """Goldens that the host made in two ways with two results."""
    comparators: int = 0
    """Comparisons of the same bytes on which device and host disagree."""

    def plus(self, other: Tallied) -> Tallied:
        """Return the sum of two tallies of one kind."""
        counts = map(sum, zip(self[3:], other[3:], strict=True))
        return Tallied(self.lane, min(self.first, other.first), max(self.last, other.last), *counts)

    @property
    def all(self) -> Tally:
        """The results of every kind, and the wrong ones: each reference or comparison that was wrong is one result."""
        others = self.goldens + self.comparators
        return Tally(wrong=self.wrong + others, of=self.results + others)

    def of(self, subject: Subject) -> Count:
        """Return the trials and the wrong ones among them; for a golden or a comparator each upload is one trial."""
        if subject is Subject.DEVICE:
            return Count(self.results, self.wrong, self.uploads, self.failed)
        found = self.goldens if subject is Subject.HOST else self.comparators
        return Count(self.uploads + found, found, self.uploads + found, found)


def tally(run: Run) -> Tallied:
    """Return the tally of one run."""
    wrong = run.wrong
    of = {subject: [c for c in wrong if c.subject is subject] for subject in Subject}
    completed = run.outcome is Outcome.COMPLETED
    return Tallied(
        lane=Lane(
            *(run.probe, run.probe_version, run.stack_id, run.instruction_set, run.intensity),
            *(run.whole, completed, bool(wrong)),
        ),
        first=run.started,
        last=run.started,
        tested=int(completed and run.whole and has_looked(run)),
        failing=int(bool(of[Subject.DEVICE])),
        results=run.trials,
        wrong=sum(c.wrong_trials for c in of[Subject.DEVICE]),
        uploads=run.uploads,
        failed=len(of[Subject.DEVICE]),
        goldens=len(of[Subject.HOST]),
        comparators=len(of[Subject.COMPARATOR]),
    )


def counted(runs: Iterable[Run]) -> Tally:
    """Return how many results the runs compared, and how many were wrong: the numbers that every report gives."""
    return added(tally(run).all for run in runs)


def total(counted: Iterable[Tallied], subject: Subject = Subject.DEVICE) -> Count:
    """Return the sum of what was counted of a subject."""
    found = Count()
    for each in counted:
        found = found.plus(each.of(subject))
    return found


def edges(counted: Iterable[Tallied]) -> frozenset[float]:
    """Return the times (epoch s) of the first and the newest wrong run of each probe on each software stack."""
    times: dict[object, list[float]] = defaultdict(list)
    for each in counted:
        if each.lane.erred:
            times[each.lane.probe, each.lane.stack_id] += [each.first, each.last]
    return frozenset(at for of in times.values() for at in (min(of), max(of)))


def merged(counted: Iterable[Tallied], at: Collection[float]) -> tuple[Tallied, ...]:
    """Return the tallies, added up wherever none of the times `at` lies within or between them."""
    times = sorted(at)
    found: list[Tallied] = []
    by_lane = sorted(counted, key=lambda each: (each.lane, each.first))
    for _, lane in itertools.groupby(by_lane, key=lambda each: each.lane):
        newest: Tallied | None = None
        for each in lane:
            if newest is not None and not _within(times, newest.first, max(newest.last, each.last)):
                newest = newest.plus(each)
                continue
            found += [newest] if newest is not None else []
            newest = each
        found += [newest] if newest is not None else []
    return tuple(found)


def _within(times: Sequence[float], first: float, last: float) -> bool:
    next_at = bisect_left(times, first)
    return next_at < len(times) and times[next_at] <= last
