"""Count the wrong results behind a finding, once for all reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from canaryd.facts import Place, Subject
from canaryd.judge.case import Case, results_during
from canaryd.judge.cause import Mismatch
from canaryd.judge.cells import cells_in
from canaryd.judge.findings import strongest
from canaryd.judge.links import is_link
from canaryd.judge.units import numbers_of
from canaryd.model import Confirmation, Outcome, PlaceTally, ProbeTally, Tally, WrongResults


def wrong_results(
    case: Case, mismatches: Sequence[Mismatch], confirmed: Sequence[Confirmation] = (), began: float | None = None
) -> WrongResults:
    """Return a summary of mismatches (oldest first, at least one); `confirmed` are their confirmations.

    Results are counted from `began` (s since the epoch), or from the first mismatch's run if `began` is None.
    """
    began = mismatches[0].run.started if began is None else began
    of_probe: dict[str, list[Mismatch]] = defaultdict(list)
    for m in mismatches:
        of_probe[m.run.probe].append(m)
    return WrongResults(
        probes={probe: _tally(case, group, began) for probe, group in sorted(of_probe.items())},
        why=strongest(mismatches).why,
        confirmed=tuple(confirmed),
    )


def retests(case: Case, mismatches: Sequence[Mismatch]) -> Tally:
    """Return a tally of the completed retests of the mismatches' runs, and of those among them that failed too.

    A run that repeats on one device what another computed wrong is no retest of either.
    """
    devices = {m.run.device for m in mismatches}
    own = {r.id for device in devices for r in case.node.runs[device]}
    roots = {m.run.confirms if m.run.confirms in own else m.run.id for m in mismatches}
    failed = {m.run.id for m in mismatches}
    confirming = (r for root in roots for r in case.node.confirming.get(root, ()) if r.device in devices)
    again = {r.id for r in confirming if r.outcome is Outcome.COMPLETED}
    return Tally(wrong=len(again & failed), of=len(again))


def _tally(case: Case, mismatches: Sequence[Mismatch], began: float) -> ProbeTally:
    """Return the counts of one probe: mismatches, and results since `began`.

    A wrong golden, or a wrong comparison on the device, counts as one result.
    """
    wrong = of = 0
    for subject in Subject:
        if group := [m for m in mismatches if m.comparison.subject is subject]:
            wrong += sum(m.comparison.wrong_trials if subject is Subject.DEVICE else 1 for m in group)
            of += results_during(case, group, began)
    evidence = [m.comparison.evidence for m in mismatches if m.comparison.evidence]
    return ProbeTally(
        wrong=wrong,
        of=of,
        runs=len({m.run.id for m in mismatches}),
        retests=retests(case, mismatches),
        places=_places(mismatches),
        bits=tuple(sorted({int(bit) for found in evidence for bit in found.bits})),
        cells=cells_in(evidence),
    )


def _places(mismatches: Sequence[Mismatch]) -> tuple[PlaceTally, ...]:
    """Return the single cores, SMs or links that computed in the mismatches' runs, with their numbers of results.

    Other runs are not counted: of a clean run only the sum is stored.
    """
    wrong, of = Counter[tuple[str, tuple[int, ...]]](), Counter[tuple[str, tuple[int, ...]]]()
    accused = {id(m.comparison) for m in mismatches}
    for run in {m.run.id: m.run for m in mismatches}.values():
        for c in run.comparisons:
            if c.subject is Subject.COMPARATOR or not (c.place.is_unit or c.subject is Subject.DEVICE):
                continue
            parts = [c.place.numbers] if is_link(c.place) else [(number,) for number in numbers_of(c.place)]
            for part in parts:
                of[c.place.unit, part] += c.trials // len(parts)
                wrong[c.place.unit, part] += c.wrong_trials // len(parts) if id(c) in accused else 0
    return tuple(
        PlaceTally(place=Place(unit=unit, numbers=part), wrong=wrong[unit, part], of=of[unit, part])
        for unit, part in sorted(of)
    )
