"""The cause of wrong results: the decision table, and the other explanations that were considered.

`TABLE` is read from the top, and the first row whose condition holds gives the cause. docs/judgement.md has the same
rows in prose. A *mismatch* is a wrong comparison. A *sibling* is another device of this node, of the same backend and
model, whose runs of the same probe, version and stack are compared.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from canaryd.facts import Cell, Comparison, Place, Subject
from canaryd.judge.cells import name_cells
from canaryd.judge.characterised import Proof
from canaryd.judge.statistics import Count, tail
from canaryd.judge.tally import Tallied, total
from canaryd.model import Cause, Rival, Run, Shown, Suspect

ALONE, AMONG = 0.02, 2e-4
"""Limits for the chance that, of devices which fail equally often, one has so many of the failing runs. Below the limit
the fault is that device's own. ALONE is used if no sibling has failed, AMONG (at each look) if siblings fail too
(ours). False alarms: of four devices that share a fault the first 4 failing runs fall on one in 1.6 % of cases."""
TIMES = 5
"""Least ratio of a device's failure rate to its siblings' rate, if these fail (ours): heat and clocks explain less."""

Operands = tuple[str, str, int]
"""Case, shape and seed: equal values mean bit-for-bit equal operands."""
Mark = tuple[tuple[tuple[int, ...], str, str], ...] | str
"""What a wrong result looks like: the wrong elements with their bits, or a digest of the result."""
Results = Mapping[Operands, Sequence[Comparison]]


class Mismatch(NamedTuple):
    """One wrong comparison, with the cause that results of other devices show."""

    run: Run
    comparison: Comparison
    cause: Cause = Cause.UNDETERMINED
    why: str = ""
    """The evidence for the cause, or the test that would show the cause."""
    rivals: tuple[Rival, ...] = ()
    proof: Proof | None = None
    """The proof that healthy devices give the golden exactly; None if there is none: then it accuses no device."""
    host_in_doubt: bool = False
    """Whether the host's CPU was wrong at about the same time. Such a mismatch does not confirm a fault."""

    @property
    def operands(self) -> Operands:
        """The operands from which the wrong result was computed."""
        return operands_of(self.comparison)

    @property
    def makers(self) -> Place | None:
        """The cores (one or two) on which one program gave two results; None for any other mismatch."""
        place = self.comparison.place
        return place if place.unit == "core" and len(place.numbers) > 1 else None

    @property
    def same_story(self) -> object:
        """A key that is equal for mismatches with the same kind of doubt about the same golden."""
        comparison, evidence = self.comparison, self.comparison.evidence
        first = evidence.first if evidence else ()
        return self.run.probe, self.run.probe_version, self.operands, comparison.doubt, comparison.digest, first


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The facts around the mismatches of one subject, probe and stack: the input of the table."""

    golden: bool = False
    """Whether this host made a golden in two ways with two results."""
    makers: Place | None = None
    """The cores on which one program gave two results."""
    lone_core: int | None = None
    """The core that made a golden wrong, if this host also made the same golden correctly; else None."""
    whole_host: bool = False
    """Whether the accused device is the host's CPU, and every accelerator was wrong too, each in other bits."""
    cells: tuple[Cell, ...] = ()
    """Kinds of lasting faults of a few words of memory, while the other words are right; else empty."""
    lone_unit: Place | None = None
    """The core or SM that has all wrong results, if the others computed the same data correctly; else None."""
    sound_units: Place | None = None
    """The other cores or SMs, if `lone_unit` is known: they computed the same data correctly."""
    links: Links | None = None
    """The facts about wrong links, or None if no link was wrong."""
    right: frozenset[str] = frozenset()
    """Siblings that are right on data on which the device is always wrong, and that did not begin to fail then."""
    insistent: bool = False
    """Whether, on data of `right`, the device was wrong as often as a confirmation requires and never right since."""
    alike: frozenset[str] = frozenset()
    """Siblings that computed the same data wrong in the same bits."""
    unlike: frozenset[str] = frozenset()
    """Siblings that computed the same data and are neither in `right` nor in `alike`."""
    outlasting: frozenset[str] = frozenset()
    """Siblings that fail more rarely than the device, if chance does not explain the difference; else empty."""
    company: frozenset[str] = frozenset()
    """Devices that began to fail at about the same time, or since the same change: siblings, and accelerators of other
    kinds."""
    changed: str = ""
    """The software that changed just before the device began to fail, or "" if none did."""
    right_since: bool = False
    """Whether the device has since been right on other software for a week, and no sound sibling shows more."""
    believed: bool = False
    """Whether an operator blames the software, and the runs on other software since support that."""
    siblings: frozenset[str] = frozenset()
    """All siblings that ran the probe on the same stack."""
    views: frozenset[str] = frozenset()
    """The same physical part as devices of other runtimes, if they computed exact goldens correctly at that time."""
    host_clean: bool | None = None
    """Whether the host's CPU computed exact goldens correctly at about that time; None if it did not compute any, or is
    the accused device."""
    goldens_right: bool = False
    """Whether another result, of this device or a sibling, matched the goldens of the mismatches."""
    served: Served | None = None
    """The facts about an endpoint, whose answers come from devices and software together; None for a device."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The facts about the devices that serve an endpoint, since its first wrong answer."""

    wrong: frozenset[str] = frozenset()
    """Devices with findings against them."""
    right: frozenset[str] = frozenset()
    """Devices that passed a deep test."""
    untested: frozenset[str] = frozenset()
    """Devices that are neither in `wrong` nor in `right`."""
    inconstant: bool = False
    """Whether the server gave different wrong answers to the same question."""


class Links(NamedTuple):
    """The facts about wrong links."""

    alone: bool
    """Whether the wrong part is known: one link, or one end of the links."""
    why: str


class Row(NamedTuple):
    """One line of the decision table: the condition, the cause that it shows, and the reason in words."""

    holds: Callable[[Scene], object]
    cause: Cause
    why: Callable[[Scene], str]


TABLE: tuple[Row, ...] = (
    Row(
        lambda s: s.served and s.served.wrong,
        Cause.UNDETERMINED,
        lambda s: f"Cause unknown: {names(_behind(s).wrong)}, which serves it, has findings too.",
    ),
    Row(
        lambda s: s.served and s.served.inconstant,
        Cause.UNDETERMINED,
        lambda _: (
            "Cause unknown: its wrong answers to one question differ. It may be a bug of the engine or a rare fault."
        ),
    ),
    Row(
        lambda s: s.served and s.served.right and not s.served.untested,
        Cause.SOFTWARE,
        lambda s: f"The devices that serve it have passed the exact tests since: {names(_behind(s).right)}.",
    ),
    Row(
        lambda s: s.served,
        Cause.UNDETERMINED,
        lambda s: (
            f"Cause unknown: not tested since the wrong answer: {names(_behind(s).untested)}."
            if _behind(s).untested
            else "Cause unknown: no device of this host serves it."
        ),
    ),
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
        lambda s: s.lone_unit,
        Cause.HARDWARE,
        lambda s: f"Only {s.lone_unit} is wrong: {s.sound_units} computed the same data correctly.",
    ),
    Row(lambda s: s.links and s.links.alone, Cause.HARDWARE, lambda s: s.links.why if s.links else ""),
    Row(lambda s: s.links, Cause.UNDETERMINED, lambda s: s.links.why if s.links else ""),
    Row(
        lambda s: s.right and not s.alike,
        Cause.HARDWARE,
        lambda s: f"Identical devices compute the same data correctly on the same software: {names(s.right)}.",
    ),
    Row(
        lambda s: s.alike and not s.unlike and not s.right,
        Cause.SOFTWARE,
        lambda s: f"Identical devices give the same wrong bits on the same software: {names(s.alike)}.",
    ),
    Row(
        lambda s: s.cells,
        Cause.HARDWARE,
        lambda s: f"The same writes and reads are right everywhere else in this memory: {name_cells(s.cells)}.",
    ),
    Row(
        lambda s: s.outlasting and not s.alike,
        Cause.HARDWARE,
        lambda s: f"It fails far more often than identical devices on the same software: {names(s.outlasting)}.",
    ),
    Row(
        lambda s: s.changed and (s.company or s.alike),
        Cause.SOFTWARE,
        lambda s: (
            f"{names(s.company)} began to fail after the same change of {s.changed}."
            if s.company
            else f"Since a change of {s.changed}, {names(s.alike)} gives the same wrong bits."
        ),
    ),
    Row(
        lambda s: s.right_since or s.believed,
        Cause.SOFTWARE,
        lambda _: "This device computes the same test correctly on other software.",
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
        lambda s: s.company,
        Cause.UNDETERMINED,
        lambda s: (
            f"Cause unknown: {names(s.company)} began to fail at about the same time. "
            "What they share may be at fault: the host's memory, power or PCIe, or the software."
        ),
    ),
    Row(
        lambda s: s.siblings,
        Cause.UNDETERMINED,
        lambda s: f"Cause unknown: the identical devices have not run long enough to tell: {names(s.siblings)}.",
    ),
    Row(
        lambda s: s.views,
        Cause.UNDETERMINED,
        lambda s: (
            f"Cause unknown: the same part computes correctly through {names(s.views)}. "
            "Either the kernels of this runtime are wrong, or a part of the chip that only they use."
        ),
    ),
    Row(lambda _: True, Cause.UNDETERMINED, lambda _: "Cause unknown: no identical device here to compare with."),
)
"""Rows of (condition, cause, reason). The first row whose condition holds gives the cause."""


def decide(scene: Scene) -> tuple[Cause, str, tuple[Rival, ...]]:
    """Return the cause, a sentence that gives the reason, and the other explanations that were considered."""
    row = next(row for row in TABLE if row.holds(scene))
    # Who is right on some of the data and wrong in the same bits on other is no witness for the reference or the host.
    return row.cause, row.why(scene), tuple(_rivals(replace(scene, right=scene.right - scene.alike), row.cause))


def _rivals(scene: Scene, cause: Cause) -> Iterator[Rival]:
    """Yield the other possible causes, each with the evidence for or against it. Without evidence none is rejected."""
    if scene.golden:
        return
    if scene.served:
        yield from _rivals_of_endpoint(scene, scene.served, cause)
        return
    yield _this_device(scene) if cause is Cause.SOFTWARE else _software(scene)
    if scene.right or scene.goldens_right:
        why = f"a wrong reference: {names(scene.right) or 'an earlier result'} matched it"
        yield _rival(Suspect.REFERENCE, why, Shown.RIGHT, scene.right, rejected=True)
    else:
        yield _rival(Suspect.REFERENCE, "a wrong reference: no other result has matched it yet")
    if not scene.whole_host:
        yield _host(scene)


KINDS = {
    Suspect.DEVICE: Cause.HARDWARE,
    Suspect.SOFTWARE: Cause.SOFTWARE,
    Suspect.REFERENCE: Cause.HARNESS,
    Suspect.HOST: Cause.HARDWARE,
}
"""Another explanation → the cause that the fault would have."""


def _rival(
    what: Suspect, why: str, shown: Shown = Shown.NOTHING, by: Iterable[str] = (), *, rejected: bool = False
) -> Rival:
    return Rival(cause=KINDS[what], why=why, rejected=rejected, what=what, shown=shown, by=tuple(sorted(by)))


def _behind(scene: Scene) -> Served:
    """Return the facts about the devices behind an endpoint, that is, the devices on which its server runs."""
    return scene.served or Served()


def _rivals_of_endpoint(scene: Scene, served: Served, cause: Cause) -> Iterator[Rival]:
    software = "the engine, its settings, or the copy of the model in its memory"
    if cause is not Cause.SOFTWARE:
        yield Rival(cause=Cause.SOFTWARE, why=software, rejected=False)
    known = {
        "with findings of its own": served.wrong,
        "right in the exact tests since (memory that they did not use is not excluded)": served.right,
        "not tested since": served.untested,
    }
    each = ", ".join(f"{names(who)} {text}" for text, who in known.items() if who)
    yield Rival(cause=Cause.HARDWARE, why=f"what serves it: {each or 'no device of this host'}", rejected=False)
    matched = "the same questions were answered right" if scene.goldens_right else "no answer has matched it yet"
    yield Rival(cause=Cause.HARNESS, why=f"a wrong reference: {matched}", rejected=scene.goldens_right)


def _this_device(scene: Scene) -> Rival:
    of = partial(_rival, Suspect.DEVICE)
    if scene.alike:
        why = f"a fault of this device alone: {names(scene.alike)} would not give the same wrong bits"
        return of(why, Shown.ALIKE, scene.alike, rejected=True)
    if scene.company:
        why = f"a fault of this device alone: {names(scene.company)} began to fail with it"
        return of(why, Shown.TOGETHER, scene.company, rejected=True)
    return of("a fault of this device alone: it computes right on other software", Shown.ELSEWHERE)


def _software(scene: Scene) -> Rival:
    of = partial(_rival, Suspect.SOFTWARE)
    if scene.alike:
        why = f"a wrong kernel: {names(scene.alike)} gives the same wrong bits, others do not"
        return of(why, Shown.ALIKE, scene.alike)
    if scene.right:
        why = f"a wrong kernel: the same kernel gave the right bits on {names(scene.right)}"
        return of(why, Shown.RIGHT, scene.right, rejected=True)
    if scene.outlasting:
        why = f"a wrong kernel: it would fail as often on {names(scene.outlasting)}"
        return of(why, Shown.RARER, scene.outlasting, rejected=True)
    if scene.company:
        why = f"a wrong kernel: {names(scene.company)} began to fail at about the same time"
        return of(why, Shown.TOGETHER, scene.company)
    if scene.siblings:
        return of(f"a wrong kernel: the identical devices have not run long enough to tell: {names(scene.siblings)}")
    return of("a wrong kernel: no identical device has computed the same on the same software")


def _host(scene: Scene) -> Rival:
    of = partial(_rival, Suspect.HOST)
    if who := scene.right or scene.outlasting:
        why = (
            f"the host's memory or CPU: in the same host, {names(who)} computed right (slot and cable are not excluded)"
        )
        return of(why, Shown.RIGHT if scene.right else Shown.RARER, who, rejected=True)
    if scene.company:
        return of(f"the host's memory, power or PCIe: {names(scene.company)} began to fail at about the same time")
    if scene.host_clean:
        why = "the host's memory or CPU: its CPU passed the same tests at about the same time"
        return of(why, Shown.PASSED, rejected=True)
    return of("the host's memory, CPU or PCIe: nothing else on this host has passed recently")


# --- What siblings computed -----------------------------------------------------------------------------------------


def operands_of(comparison: Comparison) -> Operands:
    """Return case, shape and seed of a comparison, which identify its operands."""
    return comparison.case, comparison.shape, comparison.seed


class Record(NamedTuple):
    """The results of a device, or of one core, with one probe on one software stack."""

    results: Results
    """Operands → comparisons, oldest first."""
    failing: int
    """Number of normal runs with a wrong result. Confirmations and retests do not count: they repeat what was wrong."""
    trials: Count
    """Count of the results and uploads in normal runs."""


def results(
    runs: Iterable[Run],
    like: Run,
    counted_runs: Iterable[Tallied],
    own: Collection[int] | None = None,
    *,
    mixed: bool = False,
) -> Record | None:
    """Return the results with the probe, version and stack of the run `like`, or None if there are none.

    If the stack is unknown, there are none. If `own` is given, wrong comparisons count only if their `id` is in it.
    `counted_runs` are the tallies of the normal runs among them, whether they are at hand or not. They do not tell
    which failing runs are the device's own: if others are `mixed` with these, only failing runs at hand count.
    """
    found: dict[Operands, list[Comparison]] = defaultdict(list)
    failing = trials = uploads = 0
    for run in runs if like.stack else ():
        if run.probe != like.probe or run.probe_version != like.probe_version or run.stack_id != like.stack_id:
            continue
        every = [c for c in run.comparisons if c.subject is Subject.DEVICE]
        mine = [c for c in every if own is None or not c.wrong_trials or id(c) in own]
        for comparison in mine:
            found[operands_of(comparison)].append(comparison)
        if run.whole:
            failing += any(c.wrong for c in mine)
            trials += run.trials
            uploads += run.uploads
    tallied = list(counted_runs)
    # A new file in the place of the record has counted less than what is at hand.
    of = total(tallied)
    of = Count(max(of.results, trials), of.wrong, max(of.uploads, uploads), of.failed)
    failing = failing if mixed else max(failing, sum(t.failing for t in tallied))
    return Record(dict(found), failing, of) if found or tallied else None


class SameKey(NamedTuple):
    """Of what a `Same` is told: the wrong results of one probe, version and software stack."""

    probe: str
    probe_version: int
    stack_id: str
    own: bool
    """Whether of those that no other device gave in the same bits."""


class Right(NamedTuple):
    """How often a device was wrong on data on which it is always wrong, and a sibling is right."""

    failed: int
    """Number of its wrong uploads."""
    data: Operands


class Same(NamedTuple):
    """How siblings computed the data that a device computed wrong. It is stored, since the runs that show it go."""

    right: Mapping[str, Right] = {}
    """Sibling that is right on data that the device always computes wrong → the data that it computed wrong most."""
    alike: frozenset[str] = frozenset()
    """Siblings that computed the data wrong in the same bits as the device."""
    unlike: frozenset[str] = frozenset()
    """Siblings that computed the data but are neither in `right` nor in `alike`."""
    outlasted: frozenset[str] = frozenset()
    """Siblings that failed far more rarely when that was found, and do so still."""

    def after(self, known: Same, results: Results) -> Same:
        """Return this and what was known before, but for what `results` of the device contradict."""
        right = {name: found for name, found in known.right.items() if found.data not in results}
        for name, found in self.right.items():
            right[name] = max(found, right.get(name, found))
        return Same(right, self.alike | known.alike, self.unlike | known.unlike, self.outlasted)


def same_operands(own: Record, siblings: Mapping[str, Record], data: set[Operands], enough: int) -> Same:
    """Return how the siblings computed the data in `data`, which the device computed wrong.

    A device that was right before counts as always wrong after `enough` wrong uploads in a row.
    """
    right: dict[str, Right] = {}
    alike: set[str] = set()
    unlike: set[str] = set()
    for key, (name, theirs) in itertools.product(sorted(data & own.results.keys()), siblings.items()):
        if key not in theirs.results:
            continue
        mine = own.results[key]
        since = counted(itertools.dropwhile(lambda c: not c.wrong, mine))
        if counted(theirs.results[key]).failed:
            (alike if marks(mine) & marks(theirs.results[key]) else unlike).add(name)
        # One right answer is enough against a fault that always shows; a rare one is a matter of numbers.
        elif since.wrong == since.results and (mine[0].wrong or since.failed >= enough):
            found = Right(since.failed, key)
            right[name] = max(found, right.get(name, found))
        else:
            unlike.add(name)
    return Same(right, frozenset(alike), frozenset(unlike))


def fails_more(
    own: Record, siblings: Mapping[str, Record], company: frozenset[str], *, among: int = 0
) -> frozenset[str]:
    """Return the siblings if a device fails more often than they do and chance does not explain it; else an empty set.

    `company`: devices that began to fail with it. `among`: number of devices or cores that are compared (default: all
    of these). If software or host were at fault, failing runs would be distributed as the trials are. Of siblings that
    fail, and did not begin with it, the half that fails most is left out: another broken device says nothing of this.
    """
    theirs = {name: record for name, record in siblings.items() if record.trials.results}
    failing, others = _usual(theirs, company)
    if not outlasts_still(own, theirs, company):
        return frozenset()
    share = max(
        mine / max(1, mine + other)
        for mine, other in ((own.trials.results, others.results), (own.trials.uploads, others.uploads))
    )
    chance = (among or 1 + len(theirs)) * tail(own.failing, own.failing + failing, share)
    met = company or any(record.failing for record in theirs.values())
    return frozenset(theirs) if chance <= (AMONG if met else ALONE) else frozenset()


def outlasts_still(own: Record, siblings: Mapping[str, Record], company: frozenset[str] = frozenset()) -> bool:
    """Return whether a device fails `TIMES` as often as its siblings usually do."""
    failing, others = _usual(siblings, company)
    return bool(own.failing) and own.failing * others.results >= TIMES * failing * own.trials.results


def _usual(siblings: Mapping[str, Record], company: frozenset[str]) -> tuple[int, Count]:
    """Return failing runs and trials of the siblings at most as bad as the median one, and of those in `company`."""
    by_rate = sorted(siblings, key=lambda name: siblings[name].failing / max(1, siblings[name].trials.results))
    some = {*by_rate[: len(by_rate) // 2 + 1], *company.intersection(siblings)}
    some.update(name for name in siblings if not siblings[name].failing)
    trials = functools.reduce(Count.plus, (siblings[name].trials for name in some), Count())
    return sum(siblings[name].failing for name in some), trials


def marks(comparisons: Iterable[Comparison]) -> set[Mark]:
    """Return what the wrong results look like, each different look once."""
    return {mark(c) for c in comparisons if c.wrong} - {""}


def mark(wrong: Comparison) -> Mark:
    """Return what a wrong result looks like (its wrong elements, or a digest), or "" if that is not known.

    The digest is of the first result, so it counts only if the first result was certainly wrong.
    """
    first = wrong.evidence.first if wrong.evidence else ()
    return first or (wrong.digest if wrong.wrong_trials == wrong.trials else "")


def names(listed: Iterable[str]) -> str:
    """Return names in alphabetical order, separated by commas."""
    return ", ".join(sorted(listed))


def counted(comparisons: Iterable[Comparison]) -> Count:
    """Return the numbers of results and of uploads in the comparisons, and how many of each were wrong."""
    results = wrong = uploads = failed = 0
    for c in comparisons:
        results += c.trials
        uploads += c.uploads
        if c.wrong_trials:
            wrong += c.wrong_trials
            failed += 1
    return Count(results, wrong, uploads, failed)
