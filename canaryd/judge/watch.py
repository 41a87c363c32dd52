"""When a watch is over: it counts days of tests, because clocks jump and machines are switched off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from canaryd.facts import TRIALS, Subject
from canaryd.formatting import DAY
from canaryd.model import Outcome, Run


def has_looked(run: Run) -> bool:
    """Return whether a completed run compared a result of the device, or read something from it."""
    idle = not run.readings or any(r.name == TRIALS and r.value == 0 for r in run.readings)
    return not idle or any(c.subject is Subject.DEVICE for c in run.comparisons)


def days_of_tests(runs: Iterable[Run], past: Mapping[str, Iterable[int]] | None = None) -> dict[str, frozenset[int]]:
    """Return, by probe, the days (UTC, since the epoch) on which it completed a whole run that is no drill.

    A run that skipped everything is no test.
    `past` has such days from summaries, which outlive the runs.
    """
    days: dict[str, set[int]] = defaultdict(set, {probe: set(found) for probe, found in (past or {}).items()})
    for run in runs:
        if run.outcome is Outcome.COMPLETED and run.whole and not run.drill and has_looked(run):
            days[run.probe].add(int(run.started // DAY))
    return {probe: frozenset(found) for probe, found in sorted(days.items())}


def is_over(since: float, now: float, watch: float, days: Iterable[int], fresh: float) -> bool:
    """Return whether a watch of `watch` seconds that began at `since` is over at `now`, by the clock and by its days.

    `days` are those of `days_of_tests`. A run also stands for the days after it while it is `fresh` (seconds). The day
    on which the watch began does not count. A day without a test does not count either, so the watch may end later.
    """
    if now - since < watch:
        return False
    first, last, reach = int(since // DAY), int(now // DAY), int(fresh // DAY)
    covered = {day + further for day in days for further in range(reach + 1)}
    return sum(first < day <= last for day in covered) >= watch // DAY
