"""Find the one core or SM that is wrong while the others compute the same correctly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from canaryd.facts import UNITS, Comparison, Place, Subject
from canaryd.judge.cause import Mismatch, Record, counted, fails_more, results, same_operands
from canaryd.judge.tally import tally
from canaryd.model import Run


def numbers_of(place: Place) -> tuple[int, ...]:
    """Return the numbers of the cores or SMs of a place, or () if the place is something else, such as a link."""
    return place.numbers if place.unit in UNITS else ()


def lone_unit(runs: Iterable[Run], mismatches: Sequence[Mismatch], enough: int) -> tuple[Place, Place] | None:
    """Return (the only wrong core or SM, the others that computed the same data correctly), or None if it is not known.

    The unit must be always wrong on data that others compute correctly, or fail more often than by chance, counted in
    runs or in uploads of data that others computed too. `mismatches` are of one probe and software, `runs` are the
    device's. A unit that was right before counts as always wrong after `enough` failures in a row.
    """
    accused = {m.comparison.place for m in mismatches if m.comparison.place.unit in UNITS}
    if len(accused) != 1 or not (unit := accused.pop()).is_unit:
        return None
    like = mismatches[-1].run
    on_it, elsewhere = (_results(runs, like, unit, on_it=on_it) for on_it in (True, False))
    if on_it is None or elsewhere is None:
        return None
    at = {number for cs in elsewhere.results.values() for c in cs for number in numbers_of(c.place)} - {*unit.numbers}
    others = {"others": elsewhere}
    found = (
        same_operands(on_it, others, {m.operands for m in mismatches}, enough).right
        or fails_more(on_it, others, frozenset(), among=1 + len(at))
        or fails_more(*_by_uploads(on_it, elsewhere), frozenset(), among=1 + len(at))
    )
    return (unit, Place(unit=unit.unit, numbers=tuple(sorted(at)))) if found else None


def _results(runs: Iterable[Run], like: Run, unit: Place, *, on_it: bool) -> Record | None:
    """Return the results of one unit if `on_it`, else of the others, counted here: tallies do not tell units apart."""
    of = like.probe, like.probe_version, like.stack_id
    same = [run for run in runs if (run.probe, run.probe_version, run.stack_id) == of]
    parts = (replace(run, comparisons=tuple(_shares(run.comparisons, unit, on_it=on_it))) for run in same)
    kept = [part for part in parts if part.comparisons]
    return results(kept, like, [tally(part) for part in kept if part.whole])


def _by_uploads(on_it: Record, elsewhere: Record) -> tuple[Record, dict[str, Record]]:
    """Return both counts on data that unit and others computed, in wrong uploads instead of wrong runs.

    One program on the same bytes is wrong everywhere alike, so each wrong upload is evidence about the unit. Wrong
    uploads of different bytes can be evidence about the bytes.
    """
    both = on_it.results.keys() & elsewhere.results.keys()
    counts = [counted(itertools.chain.from_iterable(r.results[key] for key in both)) for r in (on_it, elsewhere)]
    mine, theirs = (Record({}, count.failed, count) for count in counts)
    return mine, {"others": theirs}


def _shares(comparisons: Iterable[Comparison], unit: Place, *, on_it: bool) -> Iterator[Comparison]:
    """Yield each comparison reduced to the results of one unit if `on_it`, else to those of the other units.

    Units in one comparison computed equally many. Every unit had an upload's operands once.
    """
    for c in comparisons:
        if c.subject is not Subject.DEVICE or c.place.unit != unit.unit:
            continue
        within = sum(number == unit.numbers[0] for number in c.place.numbers)
        share, whole = within if on_it else len(c.place.numbers) - within, len(c.place.numbers)
        if share == whole == 1:
            yield c
        elif share:
            right, wrong = c.trials * share // whole, c.wrong_trials * share // whole
            yield replace(c, trials=right, wrong_trials=wrong, uploads=c.uploads * share)
