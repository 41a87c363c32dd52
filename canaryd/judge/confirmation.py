"""The grounds on which a mismatch counts as confirmed."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from canaryd.config.settings import JudgePolicy
from canaryd.judge.cause import Hit
from canaryd.model import Outcome, Subject


def crowded(hits: Sequence[Hit], count: int, gap: float, window: float) -> bool:
    """Whether `count` wrong runs, each at least `gap` seconds after the one before, lie within `window` seconds."""
    times = sorted({h.run.started for h in hits})
    for start in times:
        at: float = start
        for _ in range(count - 1):
            following = bisect.bisect_left(times, at + gap)
            at = times[following] if following < len(times) else math.inf
        if at - start <= window:
            return True
    return False


def confirmed_by_reruns(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """3 of 3 confirmation runs of one mismatch are wrong too; more clean ones do not outvote them.

    Source: design §4. By chance: 4.6e-18 per mismatch (1e-4 transients an hour, re-runs of a minute).
    """
    wrong: dict[str, set[str]] = defaultdict(set)
    for run in (h.run for h in hits):
        if run.confirms and run.outcome is Outcome.COMPLETED:
            wrong[run.confirms].add(run.id)
    if all(len(ids) < policy.confirm_runs for ids in wrong.values()):
        return ""
    return f"{policy.confirm_runs} confirmation runs, each in a new process, are wrong too"


def confirmed_within_a_day(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """Two wrong runs within `repeat_window`, far enough apart to be independent.

    Source: design §4. By chance: 1.5e-9 a device-year at the AEGIS bound, 2.1e-3 at 1e-4 an hour.
    """
    if not crowded(hits, 2, policy.repeat_gap, policy.repeat_window):
        return ""
    return f"2 runs at least {spoken(policy.repeat_gap)} apart are wrong within {spoken(policy.repeat_window)}"


def confirmed_within_a_week(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """Three wrong runs within a week.

    Source: design §4. By chance: 7.8e-14 a device-year at the AEGIS bound.
    """
    if not crowded(hits, policy.week_count, policy.repeat_gap, policy.week):
        return ""
    return f"{policy.week_count} runs are wrong within {spoken(policy.week)}"


def confirmed_in_place(hits: Sequence[Hit], _policy: JudgePolicy) -> str:
    """Two uploads went wrong at the same place: one core, or one bit of one row, column or lane.

    Source: design §4. By chance: 1.7e-7 in 400 days with two cores, less with more.
    """
    seen: set[str] = set()
    for hit in (h for h in hits if h.comparison.subject is Subject.DEVICE):
        c = hit.comparison
        places = {hit.core} - {""}
        if c.evidence and len(c.evidence.bits) == 1:
            bit = next(iter(c.evidence.bits))
            # "0…31 (32 distinct)" is a range, not a place that two faults could share.
            places |= {f"bit {bit} at {axis} {at}" for axis, at in c.evidence.lines.items() if "…" not in at}
        if shared := seen & places:
            return f"2 uploads are wrong at the same place ({min(shared)})"
        seen |= places
    return ""


GROUNDS: tuple[Callable[[Sequence[Hit], JudgePolicy], str], ...] = (
    confirmed_by_reruns,
    confirmed_within_a_day,
    confirmed_within_a_week,
    confirmed_in_place,
)
"""Each returns in words why the charges are confirmed, or ""."""


def spoken(seconds: float) -> str:
    """Return a duration in words, in its largest fitting unit."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size or (unit == "hours" and seconds == size):
            return f"{seconds / size:.4g} {unit}" if seconds % size == 0 else f"{seconds // size:g} {unit}"
    return f"{seconds:g} seconds"
