"""The grounds that confirm a fault: repetitions of a wrong result that are too rare by chance."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Place, Span, Subject
from canaryd.formatting import format_duration
from canaryd.judge.cause import Mismatch
from canaryd.model import Confirmation, Ground, Outcome


def crowded(mismatches: Sequence[Mismatch], count: int, gap: float, window: float) -> bool:
    """Return whether `count` wrong runs are within `window` seconds and each at least `gap` seconds after the last."""
    times = sorted({m.run.started for m in mismatches})
    for start in times:
        at: float = start
        for _ in range(count - 1):
            following = bisect.bisect_left(times, at + gap)
            at = times[following] if following < len(times) else math.inf
        if at - start <= window:
            return True
    return False


def confirmed_by_reruns(mismatches: Sequence[Mismatch], policy: JudgePolicy) -> Confirmation | None:
    """Return a confirmation if 3 of 3 repeats of one wrong run failed too; further clean repeats do not undo it.

    Source: design §4. By chance: 4.6e-18 per mismatch (1e-4 transients an hour, re-runs of a minute).
    """
    wrong: dict[str, set[str]] = defaultdict(set)
    for run in (m.run for m in mismatches):
        if run.confirms and run.outcome is Outcome.COMPLETED:
            wrong[run.confirms].add(run.id)
    if all(len(ids) < policy.confirm_runs for ids in wrong.values()):
        return None
    return Confirmation(ground=Ground.RETESTS, why="its retests failed too")


def confirmed_within_a_day(mismatches: Sequence[Mismatch], policy: JudgePolicy) -> Confirmation | None:
    """Return a confirmation if two runs within `repeat_window` were wrong and began at least `repeat_gap` apart.

    Source: design §4. By chance: 1.5e-9 a device-year at the AEGIS bound, 2.1e-3 at 1e-4 an hour.
    """
    if not crowded(mismatches, 2, policy.repeat_gap, policy.repeat_window):
        return None
    gap, window = format_duration(policy.repeat_gap), format_duration(policy.repeat_window)
    return Confirmation(ground=Ground.DAY, why=f"2 runs at least {gap} apart failed within {window}")


def confirmed_within_a_week(mismatches: Sequence[Mismatch], policy: JudgePolicy) -> Confirmation | None:
    """Return a confirmation if three runs were wrong within a week.

    Source: design §4. By chance: 7.8e-14 a device-year at the AEGIS bound.
    """
    if not crowded(mismatches, policy.week_count, policy.repeat_gap, policy.week):
        return None
    why = f"{policy.week_count} runs failed within {format_duration(policy.week)}"
    return Confirmation(ground=Ground.WEEK, why=why)


def confirmed_in_place(mismatches: Sequence[Mismatch], _policy: JudgePolicy) -> Confirmation | None:
    """Return a confirmation if two uploads were wrong at one core or SM, or in one bit of a row, column or lane.

    Source: design §4. By chance: 1.7e-7 in 400 days with two cores, less with more.
    """
    seen: set[tuple[str, str, Span] | Place] = set()
    for mismatch in (m for m in mismatches if m.comparison.subject is Subject.DEVICE):
        c = mismatch.comparison
        places: set[tuple[str, str, Span] | Place] = {c.place} if c.place.is_unit else set()
        if c.evidence and len(c.evidence.bits) == 1:
            bit = next(iter(c.evidence.bits))
            places |= {(bit, axis, _line(span)) for axis, span in c.evidence.lines.items() if span.shared}
        if shared := seen & places:
            why = f"it failed twice at the same place ({min(map(_place_text, shared))})"
            return Confirmation(ground=Ground.PLACE, why=why)
        seen |= places
    return None


def _line(span: Span) -> Span:
    """Return the span without first and last index: two results can be wrong in different elements of one line."""
    if not span.period:
        return span
    rest = span.first % span.period
    return Span(first=rest, last=rest, distinct=0, period=span.period)


def _place_text(place: tuple[str, str, Span] | Place) -> str:
    return str(place) if isinstance(place, Place) else f"bit {place[0]} at {place[1]} {place[2]}"


GROUNDS: tuple[Callable[[Sequence[Mismatch], JudgePolicy], Confirmation | None], ...] = (
    confirmed_by_reruns,
    confirmed_within_a_day,
    confirmed_within_a_week,
    confirmed_in_place,
)
"""Functions that each check one ground: they return the confirmation, or None if the ground does not apply."""
