"""Whose fault it is: the decision table, and the other explanations that were considered.

`TABLE` is read from the top; the first row that holds gives the cause. docs/judgement.md has the same rows in prose.
A *mismatch* is a wrong comparison. A *sibling* is another device of this node, of the same backend and model, whose
runs of the same probe, version and stack are compared.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from canaryd.facts import Comparison, Place, Subject
from canaryd.judge.statistics import Count
from canaryd.model import Cause, Rival, Run

Operands = tuple[str, str, int]
"""Case, shape and seed: equal ones mean bit-for-bit equal operands."""
Mark = tuple[tuple[tuple[int, ...], str, str], ...] | str
"""What tells two wrong results apart: the wrong elements with their bits, or a digest."""
Results = Mapping[Operands, Sequence[Comparison]]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """One wrong comparison, and whose fault it is as far as the peers can tell."""

    run: Run
    comparison: Comparison
    cause: Cause = Cause.UNDETERMINED
    why: str = ""
    """What the cause rests on, or what would settle it."""
    rivals: tuple[Rival, ...] = ()
    host_in_doubt: bool = False
    """True where the host's CPU erred at about the same time: such a mismatch accuses nobody firmly."""

    @property
    def operands(self) -> Operands:
        """What it was computed from."""
        return operands_of(self.comparison)

    @property
    def core(self) -> int | None:
        """The single core that computed it; None where it is not known."""
        return self.comparison.place.core

    @property
    def makers(self) -> Place | None:
        """The two cores (or the one core) on which one program gave two results; None for any other mismatch."""
        place = self.comparison.place
        return place if place.unit == "core" and len(place.numbers) > 1 else None

    @property
    def same_story(self) -> object:
        """What is equal for two mismatches that show the same doubt about the same golden."""
        comparison, evidence = self.comparison, self.comparison.evidence
        first = evidence.first if evidence else ()
        return self.run.probe, self.run.probe_version, self.operands, comparison.doubt, comparison.digest, first


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known around the mismatches of one subject, probe and stack: the left side of the table."""

    golden: bool = False
    """This host made goldens in two ways that disagree."""
    makers: Place | None = None
    """The cores on which one program gave two results."""
    lone_core: int | None = None
    """A core that made a golden wrong which this host has made right elsewhere."""
    whole_host: bool = False
    """Every accelerator was wrong too, no two alike, and the host's CPU is on trial."""
    right: frozenset[str] = frozenset()
    """Siblings that computed the same data right."""
    alike: frozenset[str] = frozenset()
    """Siblings that computed the same data wrong in the same bits."""
    unlike: frozenset[str] = frozenset()
    """Siblings that computed the same data, and neither clearly."""
    outlasting: frozenset[str] = frozenset()
    """Siblings that ran the probe clean for three times the accused's trials per failure, each or together."""
    siblings: frozenset[str] = frozenset()
    """All that ran the probe on the same stack."""
    host_clean: bool | None = None
    """Whether the host's CPU computed exact goldens right at about the same time; None where it did not compute any,
    or is on trial itself."""
    goldens_right: bool = False
    """The same goldens have been matched by a result, here or on a sibling."""
    command: str = ""
    """What repeats the newest mismatch."""


class Row(NamedTuple):
    """One line of the decision table."""

    holds: Callable[[Scene], object]
    cause: Cause
    why: Callable[[Scene], str]


TABLE: tuple[Row, ...] = (
    Row(lambda s: s.makers is not None, Cause.HARDWARE, lambda s: f"One program gave two results on {s.makers}."),
    Row(
        lambda s: s.lone_core is not None,
        Cause.HARDWARE,
        lambda s: f"Other cores of this host computed the same reference right; core {s.lone_core} did not.",
    ),
    Row(
        lambda s: s.golden,
        Cause.UNDETERMINED,
        lambda _: "Cause unknown: either this processor or the reference is wrong.",
    ),
    Row(
        lambda s: s.whole_host,
        Cause.HARDWARE,
        lambda _: "Every device of this host is wrong, each in its own way: its memory, CPU or PCIe is at fault.",
    ),
    Row(
        lambda s: s.right and s.alike,
        Cause.UNDETERMINED,
        lambda s: (
            f"Cause unknown: of the identical devices, {names(s.right)} computed the same data correctly and "
            f"{names(s.alike)} gave the same wrong bits."
        ),
    ),
    Row(
        lambda s: s.right,
        Cause.HARDWARE,
        lambda s: f"Identical devices compute the same data correctly on the same software: {names(s.right)}.",
    ),
    Row(
        lambda s: s.alike and not s.unlike,
        Cause.SOFTWARE,
        lambda s: f"Identical devices give the same wrong bits on the same software: {names(s.alike)}.",
    ),
    Row(
        lambda s: s.outlasting and not s.alike,
        Cause.HARDWARE,
        lambda s: (
            f"Identical devices ran the same test without an error: {names(s.outlasting)}, "
            f"{'together ' * (len(s.outlasting) > 1)}at least 3 times as long as this device runs between failures."
        ),
    ),
    Row(
        lambda s: s.siblings,
        Cause.UNDETERMINED,
        lambda s: f"Cause unknown: the identical devices have not run long enough to tell: {names(s.siblings)}.",
    ),
    Row(
        lambda _: True,
        Cause.UNDETERMINED,
        lambda _: "Cause unknown: no identical device here to compare with.",
    ),
)
"""Read from the top: what holds, whose fault it then is, and why."""


def decide(scene: Scene) -> tuple[Cause, str, tuple[Rival, ...]]:
    """Return the cause, the sentence that says why, and the other explanations that were considered."""
    row = next(row for row in TABLE if row.holds(scene))
    return row.cause, row.why(scene), tuple(_rivals(scene, row.cause))


def _rivals(scene: Scene, cause: Cause) -> Iterator[Rival]:
    """Yield what else it could have been, and what speaks against it; nothing is rejected for lack of evidence."""
    if scene.golden:
        return
    if cause is not Cause.SOFTWARE:
        yield _software(scene)
    else:
        text = f"a fault of this device alone: {names(scene.alike)} would not give the same wrong bits"
        yield Rival(cause=Cause.HARDWARE, why=text, rejected=True)
    if scene.right or scene.goldens_right:
        who = names(scene.right) or "an earlier result"
        yield Rival(cause=Cause.HARNESS, why=f"a wrong reference: {who} matched it", rejected=True)
    else:
        yield Rival(cause=Cause.HARNESS, why="a wrong reference: no other result has matched it yet", rejected=False)
    if not scene.whole_host:
        yield _host(scene)


def _software(scene: Scene) -> Rival:
    if scene.alike:
        text, rejected = f"a wrong kernel: {names(scene.alike)} gives the same wrong bits, others do not", False
    elif scene.right:
        text, rejected = f"a wrong kernel: the same kernel gave the right bits on {names(scene.right)}", True
    elif scene.outlasting and not scene.alike:
        text, rejected = f"a wrong kernel: it has run on {names(scene.outlasting)} for long without an error", True
    else:
        text, rejected = "a wrong kernel: no identical device has computed the same on the same software", False
    return Rival(cause=Cause.SOFTWARE, why=text, rejected=rejected)


def _host(scene: Scene) -> Rival:
    if scene.right or scene.outlasting:
        who = names(scene.right or scene.outlasting)
        text = f"the host's memory or CPU: in the same host, {who} computed right (slot and cable are not excluded)"
        rejected = True
    elif scene.host_clean:
        text, rejected = "the host's memory or CPU: its CPU passed the same tests at about the same time", True
    else:
        text, rejected = "the host's memory, CPU or PCIe: nothing else on this host has passed recently", False
    return Rival(cause=Cause.HARDWARE, why=text, rejected=rejected)


# --- What siblings computed -----------------------------------------------------------------------------------------


def operands_of(comparison: Comparison) -> Operands:
    """Return what tells the operands of a comparison from all others."""
    return comparison.case, comparison.shape, comparison.seed


def results(runs: Iterable[Run], like: Run) -> dict[Operands, list[Comparison]]:
    """Return what devices computed with the probe and stack of a run; a stack that was not recorded equals none."""
    found: dict[Operands, list[Comparison]] = defaultdict(list)
    for run in runs:
        same_probe = (run.probe, run.probe_version) == (like.probe, like.probe_version)
        if like.stack and same_probe and run.stack == like.stack:
            for comparison in run.comparisons:
                if comparison.subject is Subject.DEVICE:
                    found[operands_of(comparison)].append(comparison)
    return dict(found)


def same_operands(
    own: Results, siblings: Mapping[str, Results], data: set[Operands]
) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the siblings that computed the same data: right, wrong in the same way, and neither clearly."""
    right: set[str] = set()
    alike: set[str] = set()
    unlike: set[str] = set()
    for key, (name, theirs) in itertools.product(sorted(data & own.keys()), siblings.items()):
        if key not in theirs:
            continue
        accused, record = counted(own[key]), counted(theirs[key])
        if record.failed:
            (alike if marks(own[key]) & marks(theirs[key]) else unlike).add(name)
        # One right answer is enough against a fault that always shows; a rare one must have had its chance to show.
        elif accused.wrong == accused.results or record.outlasts(accused):
            right.add(name)
        else:
            unlike.add(name)
    return frozenset(right), frozenset(alike), frozenset(unlike)


def long_clean(own: Results, siblings: Mapping[str, Results]) -> frozenset[str]:
    """Return the siblings without a mismatch whose record is three times the accused's trials per failure.

    Were it software, all would fail at that rate. So where none of them has failed, their records count together.
    """
    accused = counted(itertools.chain.from_iterable(own.values()))
    records = {name: counted(itertools.chain.from_iterable(theirs.values())) for name, theirs in siblings.items()}
    if not accused.failed:
        return frozenset()
    together = functools.reduce(Count.plus, records.values(), Count())
    if not together.failed and together.outlasts(accused):
        return frozenset(name for name, record in records.items() if record.results)
    return frozenset(n for n, record in records.items() if not record.failed and record.outlasts(accused))


def marks(comparisons: Iterable[Comparison]) -> set[Mark]:
    """Return what the wrong results look like; a digest shows one only where the first result was wrong for sure."""
    found: set[Mark] = set()
    for c in comparisons:
        if c.wrong:
            first = c.evidence.first if c.evidence else ()
            found.add(first or (c.digest if c.wrong_trials == c.trials else ""))
    return found - {""}


def names(listed: Iterable[str]) -> str:
    """Return names in order, with commas."""
    return ", ".join(sorted(listed))


def counted(comparisons: Iterable[Comparison]) -> Count:
    """Count results and uploads, and how many of both were wrong."""
    each = (Count(c.trials, c.wrong_trials, c.uploads, int(c.wrong)) for c in comparisons)
    return functools.reduce(Count.plus, each, Count())
