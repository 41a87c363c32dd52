"""Count the wrong results of a fault, once for all its findings and for all reports."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from canaryd.facts import Comparison, Doubt, Evidence, Place, Subject
from canaryd.formatting import HOUR, MINUTE
from canaryd.judge.case import Case, Mismatches
from canaryd.judge.cause import Mismatch
from canaryd.judge.cells import cells_in
from canaryd.judge.findings import strongest
from canaryd.judge.incidents import incidents
from canaryd.judge.links import is_link
from canaryd.judge.phrases import DOUBTS
from canaryd.judge.statistics import RULE_OF_THREE
from canaryd.judge.tally import tally, total
from canaryd.judge.units import numbers_of
from canaryd.model import Confirmation, Elsewhere, Files, Outcome, PlaceTally, ProbeTally, Run, Tally, WrongResults

WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int64": 64, "int32": 32}
"""Number type → its bits."""
NO_TYPE = "not known"
"""Stands for the number type of results of which neither a type nor a width is recorded."""


def wrong_results(
    case: Case, mismatches: Sequence[Mismatch], fault: Sequence[Mismatch], confirmed: Sequence[Confirmation] = ()
) -> WrongResults:
    """Return a summary of a `fault` (oldest first), as far as these mismatches' probes show it, counted from its begin.

    `confirmed` are the mismatches' confirmations.
    """
    probes = {m.run.probe for m in mismatches}
    of_probe: dict[str, list[Mismatch]] = defaultdict(list)
    for m in (m for m in fault if m.run.probe in probes):
        of_probe[m.run.probe].append(m)
    began = fault[0].run.started
    doubts = [m.comparison.doubt.value for m in fault if m.comparison.subject is Subject.HOST]
    return WrongResults(
        probes={probe: _tally(case, group, began) for probe, group in sorted(of_probe.items())},
        why=strongest(mismatches).why,
        confirmed=tuple(confirmed),
        files=Files(files.after) if (files := Mismatches(case, mismatches).files) else None,
        doubt=next((d if d in DOUBTS else Doubt.UNKNOWN.value for d in reversed(doubts)), ""),
        elsewhere=_elsewhere(case, fault),
    )


def prominence(wrong: Sequence[tuple[Run, Comparison]]) -> tuple[Any, ...]:
    """Return a sort key for a case's wrong results: the device's own, what fails most, and the cheapest come first."""
    of_device = wrong[0][1].subject is Subject.DEVICE
    size = next((c.evidence.total for _, c in wrong if c.evidence), 0)
    return not of_device, -len({run.id for run, _ in wrong}), -sum(c.wrong_trials for _, c in wrong), size


def _elsewhere(case: Case, fault: Sequence[Mismatch]) -> Elsewhere:
    """Return options that repeat a fault here, and on a sound sibling or another node.

    What is repeated stays the same while the fault lasts; where else, and for how long, follows from what is known now.
    """
    runs = {m.run.id for m in fault}
    before = incidents(case.previous) if case.previous else ()
    known = (i.wrong.elsewhere for i in before if i.wrong and i.wrong.elsewhere and not runs.isdisjoint(i.runs))
    chosen = next(known, None) or _worst(case, fault)
    siblings = (
        other.name
        for uuid, other in sorted(case.devices.items())
        if other.kind == case.device.kind and other.physical != case.device.physical and not case.node.missed[uuid]
    )
    return replace(
        chosen,
        device=next(siblings, case.device.backend) if case.device.has_witnesses else case.device.backend,
        seconds=_long_enough(case, [m for m in fault if m.run.probe == chosen.probe] or fault),
    )


def _worst(case: Case, fault: Sequence[Mismatch]) -> Elsewhere:
    of_case: dict[object, list[tuple[Run, Comparison]]] = defaultdict(list)
    for m in fault:
        lane = m.run.probe, m.run.probe_version, m.run.instruction_set
        of_case[lane, m.operands, m.comparison.subject].append((m.run, m.comparison))
    run, comparison = min(of_case.values(), key=prominence)[0]
    options = {name: getattr(run, name) for name in ("probe", "seed", "level", "instruction_set", "intensity")}
    return Elsewhere(device="", here=case.node.devices[run.device].name, case=comparison.case, **options)


def _long_enough(case: Case, mismatches: Sequence[Mismatch]) -> float:
    """Return the seconds for which to repeat the newest mismatch's test, so that it fails at least once with 95 %.

    The other device is assumed to be as fast and to fail as often (rule of three, for results and for uploads). 0.0
    means that one run is enough.
    """
    run, subject = mismatches[-1].run, mismatches[-1].comparison.subject
    alike = [m for m in mismatches if m.run.probe == run.probe and m.comparison.subject is subject]
    group = Mismatches(case, alike)
    here = total((t for t in group.trials if t.last >= group.began), subject)
    each = ((here.results, here.wrong, run.trials), (here.uploads, here.failed, run.uploads))
    runs = max((RULE_OF_THREE * of / wrong / done for of, wrong, done in each if wrong and done), default=0.0)
    seconds = runs * run.seconds
    step = next((s for s in (HOUR, MINUTE) if seconds > s), 1.0)
    return 0.0 if runs <= 1.0 else math.ceil(seconds / step) * step


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
    """Return the counts of one probe: mismatches, and all results since `began` on the devices that show them.

    A wrong golden, or a wrong comparison on the device, counts as one result.
    """
    runs = {m.run.id: m.run for m in mismatches}.values()
    tallies = (t for uuid in {r.device for r in runs} for t in case.node.tallies[uuid] if t.last >= began)
    since = [t for t in tallies if t.lane.probe == mismatches[0].run.probe]
    # Without a count of what was wrong the counts are damaged.
    since += [] if any(t.lane.erred for t in since) else map(tally, runs)
    evidence = [m.comparison.evidence for m in mismatches if m.comparison.evidence]
    return ProbeTally(
        wrong=sum(m.comparison.wrong_trials if m.comparison.subject is Subject.DEVICE else 1 for m in mismatches),
        of=sum(t.all.of for t in since),
        runs=len(runs),
        retests=retests(case, mismatches),
        places=_places(mismatches),
        bits=tuple(sorted({int(bit) for found in evidence for bit in found.bits})),
        bits_by_type=_bits_by_type(mismatches),
        cells=cells_in(evidence),
    )


def type_of(probe: str, case: str, evidence: Iterable[Evidence]) -> str:
    """Return the number type of a case's results ("float32"); else their width ("32 bits"), or `NO_TYPE`."""
    width = next((4 * len(e.first[0][1].removeprefix("0x")) for e in evidence if e.first), 0)
    ends = (part.rpartition(">")[2] for part in case.partition("@")[0].split("/"))
    named = next((end for part in ends if (end := {"tfloat32": "float32"}.get(part, part)) in WIDTH), "")
    if probe == "exact_integer" and case.startswith("int64/embedding/"):
        named = "int32"
    if width and WIDTH.get(named) != width:
        return f"{width} bits"
    return named or NO_TYPE


def _bits_by_type(mismatches: Sequence[Mismatch]) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = defaultdict(set)
    for run, c in ((m.run, m.comparison) for m in mismatches):
        if c.evidence and c.evidence.bits:
            found[type_of(run.probe, c.case, [c.evidence])] |= set(map(int, c.evidence.bits))
    return {each: tuple(sorted(found[each])) for each in sorted(found)}


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
