"""Decide when a watch is over. It counts days with tests, because clocks jump and machines are switched off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from canaryd.facts import SELF_TEST, SPEEDS, TRIALS
from canaryd.formatting import DAY
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Outcome, Run

LOOKED = "looked"
"""Reading of a run without its results: it shows that the run had tested its device."""
JUDGED = frozenset({*READINGS, SELF_TEST})
"""Readings that are judged directly. Speeds are judged over days."""


def has_looked(run: Run) -> bool:
    """Return whether a completed run compared or recorded a result of the device, or read what is judged.

    Other readings, such as settings, do not count; nor do readings of a probe that compares, but compared nothing.
    """
    names = {r.name for r in run.readings}
    if run.trials or run.recordings or LOOKED in names:
        return True
    return TRIALS not in names and any(n in JUDGED or n.startswith(SPEEDS) for n in names)


def days_of_tests(runs: Iterable[Run], past: Mapping[str, Iterable[int]] | None = None) -> dict[str, frozenset[int]]:
    """Return probe → days (UTC, since the epoch) on which it completed a whole run that is no drill.

    A run that skipped everything is no test.
    `past` has such days from summaries, which are kept longer than the runs.
    """
    days: dict[str, set[int]] = defaultdict(set, {probe: set(found) for probe, found in (past or {}).items()})
    for run in runs:
        if run.outcome is Outcome.COMPLETED and run.whole and not run.drill and has_looked(run):
            days[run.probe].add(int(run.started // DAY))
    return {probe: frozenset(found) for probe, found in sorted(days.items())}


def is_over(since: float, now: float, watch: float, days: Iterable[int], fresh: float) -> bool:
    """Return whether a watch of `watch` seconds that began at `since` is over at `now`, by the clock and by its days.

    `days` come from `days_of_tests`. A run also counts for the days after it while it is `fresh` (seconds). The day
    on which the watch began does not count. A day without a test does not count either, so the watch may end later.
    """
    if now - since < watch:
        return False
    first, last, reach = int(since // DAY), int(now // DAY), int(fresh // DAY)
    covered = {day + further for day in days for further in range(reach + 1)}
    return sum(first < day <= last for day in covered) >= watch // DAY
