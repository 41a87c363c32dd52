"""Sums of clean runs: the runs of six hours become one run, so that a long history costs little memory and time."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from canaryd.judge.brief import sign, summary
from canaryd.model import Outcome, Run
from canaryd.store.runs import Counted

SLOT = 6 * 3600.0
"""Seconds within which clean runs are added up (ours). It divides a UTC day, because the judge counts days of tests."""
Onsets = Mapping[str, Sequence[float]]
"""Probe → start times of mismatches, ascending. A run before and a run after the same mismatch are never added up."""


def can_sum(run: Run) -> bool:
    """Return whether an older run is clean and complete, so that only its counts matter."""
    return run.outcome is Outcome.COMPLETED and run.whole and not (run.wrong or run.unknown or run.drill)


def add_up(runs: Iterable[Run], onsets: Onsets) -> list[Run]:
    """Return the sums of clean runs, oldest first: one run for each kind and `SLOT`, dated like its newest run.

    Runs are of one kind if probe, version, instruction set and software are equal.
    """
    groups: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        kind = run.probe, run.probe_version, run.instruction_set, run.stack_id
        groups[kind, _slot(run.probe, run.started, onsets)].append(run)
    return [_total(group) for group in groups.values()]


def of_counts(counted: Iterable[Counted], onsets: Onsets, read: Callable[[str], Run | None]) -> list[Run]:
    """Return the sums of clean runs, from stored counts; `read` loads a kind's newest run by id, as a pattern."""
    lanes: dict[object, list[Counted]] = defaultdict(list)
    for c in counted:
        lanes[c.probe, c.probe_version, c.instruction_set, c.stack_id].append(c)
    found = []
    for of_lane in lanes.values():
        pattern = read(of_lane[-1].id)
        if pattern is None:  # it rotted: what cannot be read is no evidence
            continue
        for _, group in itertools.groupby(of_lane, key=lambda c: _slot(c.probe, c.started, onsets)):
            *_, newest = members = list(group)
            compared = summary(pattern.seed, sum(c.results for c in members), sum(c.uploads for c in members))
            told = pattern.readings if compared or not pattern.trials else ()  # else they compared nothing
            total = replace(pattern, id=newest.id, started=newest.started, comparisons=compared, readings=told)
            found.append(_bare(total))
    return found


def _slot(probe: str, started: float, onsets: Onsets) -> tuple[int, int]:
    return int(started // SLOT), bisect.bisect(onsets.get(probe, ()), started)


def _total(runs: Sequence[Run]) -> Run:
    newest = runs[-1]
    if len(runs) == 1:
        return newest
    results, uploads = sum(run.trials for run in runs), sum(run.uploads for run in runs)
    return _bare(replace(newest, comparisons=summary(newest.seed, results, uploads)))


def _bare(run: Run) -> Run:
    return replace(run, recordings=(), learnt=(), skipped=(), readings=() if run.trials else sign(run))
