"""Decide when a suspect device's observation period ends. It counts days with tests: clocks jump, machines are off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from canaryd.facts import SELF_TEST, SPEEDS, TRIALS
from canaryd.formatting import DAY
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Outcome, Run

LOOKED = "looked"
"""Reading that says that a run tested its device, if the results themselves are not stored."""
JUDGED = frozenset({*READINGS, SELF_TEST})
"""Readings that the judge uses at once. Speeds are judged over days."""


def has_looked(run: Run) -> bool:
    """Return whether a completed run tested its device: it compared or recorded a result, or read a judged value.

    Other readings, such as settings, do not count. If a probe that compares results compared none, nothing counts.
    """
    if run.trials or run.recordings:
        return True
    names = {r.name for r in run.readings}
    if LOOKED in names:
        return True
    return TRIALS not in names and any(n in JUDGED or n.startswith(SPEEDS) for n in names)


def days_of_tests(runs: Iterable[Run], past: Mapping[str, Iterable[int]] | None = None) -> dict[str, frozenset[int]]:
    """Return probe → days (days since the epoch, UTC) on which a whole run completed.

    A run that skipped everything is no test. `past`: earlier such days from summaries, which are kept longer than runs.
    """
    days: dict[str, set[int]] = defaultdict(set, {probe: set(found) for probe, found in (past or {}).items()})
    for run in runs:
        if run.outcome is Outcome.COMPLETED and run.whole and has_looked(run):
            days[run.probe].add(int(run.started // DAY))
    return {probe: frozenset(found) for probe, found in sorted(days.items())}


def is_over(since: float, now: float, watch: float, days: Iterable[int], fresh: float) -> bool:
    """Return whether an observation period of `watch` seconds since `since` is over at `now`, by clock and test days.

    `days` come from `days_of_tests`. A run also counts for the days after it while it is `fresh` (seconds). The first
    day does not count. A day without a test does not count either, so the period can end later than by the clock.
    """
    if now - since < watch:
        return False
    first, last, reach = int(since // DAY), int(now // DAY), int(fresh // DAY)
    covered = {day + further for day in days for further in range(reach + 1)}
    return sum(first < day <= last for day in covered) >= watch // DAY
