"""Count by runs: a rare fault seldom strikes one case again, but it strikes some case in many runs.

The cases of a run are not independent of each other: they share a process, a server and a moment. So no chance here
multiplies those of several cases, except where the finding says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from canaryd.judge.recordings.baseline import EVERY, IDLE, Baseline, Key
from canaryd.judge.recordings.intake import is_comparable
from canaryd.judge.recordings.record import Observation, Record
from canaryd.judge.statistics import rate_bound, tail
from canaryd.model import Run


@dataclass(frozen=True, kw_only=True)
class Round:
    """A scheduled run with its re-runs: what they gave in the cases that repeat exactly and can be compared."""

    run: Run
    compared: Sequence[Observation]
    outliers: Sequence[Observation]
    """Those of `compared` with unknown bits."""
    repeated: Sequence[Observation]
    """Unknown bits in re-runs of the same cases, oldest first."""
    asked: Sequence[Observation]
    """The outliers whose cases a re-run asked again."""

    @property
    def repeats(self) -> int:
        """In how many re-runs any of the cases gave unknown bits again."""
        return len({o.run.id for o in self.repeated})

    @property
    def chance(self) -> float:
        """The chance of so many outliers at once, if a healthy device's cases differed independently of each other.

        P(X ≥ k; m, r) for k of m cases, with r the largest bound of any case's own rate.
        """
        rate = max(o.baseline.rate(o.recording.condition) for o in self.compared)
        return tail(len(self.outliers), len(self.compared), rate)

    def often(self, others: Sequence[Baseline]) -> tuple[int, int, float]:
        """Return in how many of how many runs any case differed, and the chance of that on a healthy device.

        Counted beside the longest record among the outliers. No chance is small where the server's gauges may have
        missed that others were served for a moment: such a run looks like a rare fault.
        """
        reliable = [o.baseline for o in self.outliers if o.recording.condition != IDLE or o.baseline.stable(EVERY)]
        longest = max(reliable, key=lambda b: b.trials, default=None)
        if longest is None:
            return 0, 0, 1.0
        times = longest.strange + longest.beside
        return times, longest.trials, tail(times, longest.trials, rate_of_any(self.compared, others))


def rounds(record: Record, probe: str, doubted: Collection[Key]) -> list[Round]:
    """Return the runs of a probe in which any of the `doubted` cases gave unknown bits, oldest first."""
    first: dict[str, list[Observation]] = defaultdict(list)
    again: dict[str, list[Observation]] = defaultdict(list)
    for each in (o for key, listed in record.observations.items() if key.probe == probe for o in listed):
        if each.baseline.stable(each.recording.condition) and is_comparable(each.baseline, each.recording):
            (again[each.run.confirms] if each.run.confirms else first[each.run.id]).append(each)
    found = []
    for name, compared in first.items():
        outliers = [o for o in compared if o.is_outlier and o.baseline.key in doubted]
        reruns = sorted(again[name], key=lambda o: (o.run.started, o.run.id))
        asked, keys = {o.baseline.key for o in reruns}, {o.baseline.key for o in outliers}
        if outliers:
            found.append(
                Round(
                    run=compared[0].run,
                    compared=compared,
                    outliers=outliers,
                    repeated=[o for o in reruns if o.is_outlier and o.baseline.key in keys],
                    asked=[o for o in outliers if o.baseline.key in asked],
                )
            )
    return sorted(found, key=lambda r: (r.run.started, r.run.id))


def rate_of_any(observations: Sequence[Observation], others: Sequence[Baseline]) -> float:
    """Return an upper bound of the rate at which a healthy device gives unknown bits in any of these cases in a run.

    The smaller of two bounds that hold however the cases depend on each other: the sum of their rates (Boole's
    inequality), and the bound by the samples in a row that brought no new vector in any of them.
    """
    each = sum(o.baseline.rate(o.recording.condition, others) for o in observations)
    together = min(o.baseline.independent_samples(o.recording.condition) for o in observations)
    return min(1.0, each, rate_bound(together))
