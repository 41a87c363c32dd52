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
from typing import NamedTuple

from canaryd.facts import Comparison, Place, Subject
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
    """The facts around the mismatches of one device, probe and stack: the input of the table."""

    golden: bool = False
    """Whether this host made a golden in two ways with two results."""
    whole_host: bool = False
    """Whether the accused device is the host's CPU, and every accelerator was wrong too, each in other bits."""
    named: str = ""
    """A sentence that names the wrong part: a core, an SM, a link, or one end of its links; "" if none is known."""
    disputed: str = ""
    """What is known of two suspects of which one is at fault, such as both ends of a link; else ""."""
    cells: str = ""
    """Kinds of lasting faults of a few words of memory, in words, while the other words are right; else ""."""
    right: frozenset[str] = frozenset()
    """Siblings that are right on data on which the device is always wrong, and that did not begin to fail then."""
    alike: frozenset[str] = frozenset()
    """Siblings that computed the same data wrong in the same bits."""
    unlike: frozenset[str] = frozenset()
    """Siblings that computed the same data and are neither in `right` nor in `alike`."""
    outlasting: frozenset[str] = frozenset()
    spotless: int = 0
    """Number of the results of the devices in `outlasting` if none was ever wrong; else 0."""
    """Siblings that fail more rarely than the device, if chance does not explain the difference; else empty."""
    company: frozenset[str] = frozenset()
    """Devices that began to fail at about the same time, or since the same change: siblings, and accelerators of other
    kinds."""
    changed: str = ""
    """The software that changed just before the device began to fail, or "" if none did."""
    right_since: bool = False
    """Whether the device has since been right on other software for a week, and no sound sibling shows more; or, if an
    operator blames the software, for as long as that needs."""
    siblings: frozenset[str] = frozenset()
    """All siblings that ran the probe on the same stack."""
    views: frozenset[str] = frozenset()
    """The same physical part as devices of other runtimes, if they computed exact goldens correctly at that time."""
    host_clean: bool | None = None
    """Whether the host's CPU computed exact goldens correctly at about that time; None if it did not compute any, or is
    the accused device."""
    goldens_right: bool = False
    """Whether another result, of this device or a sibling, matched the goldens of the mismatches."""
    altered: str = ""
    """The compiled files of this software that are not those that pip installed, or "" if none are known."""
    as_installed: str = ""
    """The number of compiled files of this software, if all are as pip installed them; else ""."""

    def say(self, text: str) -> str:
        """Return the text with the names in the scene's fields instead of "{right}" and the like."""
        fields = {**vars(self), "others": self.company | self.alike}
        return text.format(**{k: names(v) if isinstance(v, frozenset) else v for k, v in fields.items()})


class Row(NamedTuple):
    """One line of the decision table: the condition, the cause that it shows, and the reason in words."""

    holds: Callable[[Scene], object]
    cause: Cause
    why: str
    """With "{right}" for the names in that field of the scene; "" if the reason is that nothing shows the cause."""


TABLE = (
    Row(
        lambda s: s.whole_host,
        Cause.HARDWARE,
        "Every device of this host is wrong, each in its own way: its memory, CPU or PCIe is at fault.",
    ),
    Row(lambda s: s.named, Cause.HARDWARE, "{named}"),
    Row(
        lambda s: s.right and not s.alike,
        Cause.HARDWARE,
        "Identical devices compute the same data correctly on the same software: {right}.",
    ),
    Row(
        lambda s: s.alike and not s.unlike and not s.right,
        Cause.SOFTWARE,
        "Identical devices give the same wrong bits on the same software: {alike}.",
    ),
    Row(
        lambda s: s.cells,
        Cause.HARDWARE,
        "The same writes and reads are right everywhere else in this memory: {cells}.",
    ),
    Row(
        lambda s: s.outlasting and not s.alike,
        Cause.HARDWARE,
        "It fails far more often than identical devices on the same software: {outlasting}.",
    ),
    Row(
        lambda s: s.changed and (s.company or s.alike),
        Cause.SOFTWARE,
        "Since a change of {changed}, others fail too: {others}.",
    ),
    Row(
        lambda s: s.right_since,
        Cause.SOFTWARE,
        "This device computes the same test correctly on other software.",
    ),
    Row(lambda _: True, Cause.UNDETERMINED, ""),
)
"""Rows of (condition, cause, reason). The first row whose condition holds gives the cause."""


class Decided(NamedTuple):
    """The cause of mismatches."""

    cause: Cause
    why: str
    """A sentence that gives the reason."""
    rivals: tuple[Rival, ...]
    """The other explanations that were considered."""


def decide(scene: Scene) -> Decided:
    """Return the cause that the facts show."""
    row = next(row for row in TABLE if row.holds(scene))
    # Who is right on some of the data and wrong in the same bits on other is no witness for the reference or the host.
    rivals = _rivals(replace(scene, right=scene.right - scene.alike), row.cause)
    return Decided(row.cause, scene.say(row.why or _open(scene)), tuple(rivals))


def _open(scene: Scene) -> str:
    """Return why the cause is not known."""
    reasons = (
        (scene.disputed, "{disputed}"),
        # Not software's: many a torch is patched on purpose, and a broken part beside one must not stay in service.
        (scene.altered, "compiled files of this node's software are not as pip installed them: {altered}."),
        (
            scene.right and scene.alike,
            "of the identical devices, {right} computed the same data correctly and {alike} gave the same wrong bits.",
        ),
        (
            scene.company,
            "{company} began to fail at about the same time.",
        ),
        (scene.siblings, "the identical devices have not run long enough to tell: {siblings}."),
        (
            scene.views,
            "the same part computes correctly through {views}. This runtime's kernels, or what they use, may be wrong.",
        ),
        (True, "no identical device here to compare with."),
    )
    return f"Cause unknown: {next(why for holds, why in reasons if holds)}"


class Clue(NamedTuple):
    """What one fact says about another explanation."""

    known: str
    """The field of the scene that has the fact; "" if none is needed."""
    shown: Shown
    rejects: bool
    why: str


KINDS = {
    Suspect.DEVICE: Cause.HARDWARE,
    Suspect.SOFTWARE: Cause.SOFTWARE,
    Suspect.REFERENCE: Cause.HARNESS,
    Suspect.HOST: Cause.HARDWARE,
}
"""Another explanation → the cause that the fault would have."""
CLUES: Mapping[Suspect, tuple[Clue, ...]] = {
    Suspect.DEVICE: (
        Clue("alike", Shown.ALIKE, True, "a fault of this device alone: {alike} would not give the same wrong bits"),
        Clue("company", Shown.TOGETHER, True, "a fault of this device alone: {company} began to fail with it"),
        Clue("", Shown.ELSEWHERE, False, "a fault of this device alone: it computes right on other software"),
    ),
    Suspect.SOFTWARE: (
        Clue("alike", Shown.ALIKE, False, "a wrong kernel: {alike} gives the same wrong bits, others do not"),
        Clue("right", Shown.RIGHT, True, "a wrong kernel: the same kernel gave the right bits on {right}"),
        Clue("outlasting", Shown.RARER, True, "a wrong kernel: it would fail as often on {outlasting}"),
        Clue("company", Shown.TOGETHER, False, "a wrong kernel: {company} began to fail at about the same time"),
        Clue("siblings", Shown.NOTHING, False, "a wrong kernel: {siblings} have not run long enough to tell"),
        Clue(
            *("as_installed", Shown.NOTHING, False),
            "a wrong kernel: {as_installed} compiled files are as pip installed them, which excludes no bug",
        ),
        Clue("", Shown.NOTHING, False, "a wrong kernel: no identical device has computed the same on this software"),
    ),
    Suspect.REFERENCE: (
        Clue("right", Shown.RIGHT, True, "a wrong reference: {right} matched it"),
        Clue("goldens_right", Shown.RIGHT, True, "a wrong reference: an earlier result matched it"),
        Clue("", Shown.NOTHING, False, "a wrong reference: no other result has matched it yet"),
    ),
    Suspect.HOST: (
        Clue(
            *("right", Shown.RIGHT, True),
            "the host's memory or CPU: in the same host, {right} computed right (slot and cable are not excluded)",
        ),
        Clue(
            *("outlasting", Shown.RARER, True),
            "the host's memory or CPU: in the same host, {outlasting} fails less (slot and cable are not excluded)",
        ),
        Clue("company", Shown.TOGETHER, False, "the host's memory, power or PCIe: {company} began to fail with it"),
        Clue("host_clean", Shown.PASSED, True, "the host's memory or CPU: its CPU passed the same tests at that time"),
        Clue("", Shown.NOTHING, False, "the host's memory, CPU or PCIe: nothing else on this host has passed recently"),
    ),
}
"""Another explanation → the facts for or against it. The first that is known counts."""


def _rivals(scene: Scene, cause: Cause) -> Iterator[Rival]:
    """Yield the other possible causes, each with the evidence for or against it. Without evidence none is rejected."""
    suspects = [Suspect.DEVICE if cause is Cause.SOFTWARE else Suspect.SOFTWARE, Suspect.REFERENCE]
    suspects += [] if scene.whole_host else [Suspect.HOST]
    for what in suspects if not scene.golden else ():
        clue = next(c for c in CLUES[what] if not c.known or getattr(scene, c.known))
        who = getattr(scene, clue.known, ())
        yield Rival(
            cause=KINDS[what],
            why=scene.say(clue.why),
            rejected=clue.rejects,
            what=what,
            shown=clue.shown,
            by=tuple(sorted(who)) if isinstance(who, frozenset) else (),
            of=scene.spotless if clue.shown is Shown.RARER else 0,
        )


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
    runs: Iterable[Run], like: Run, counted_runs: Iterable[Tallied], own: Collection[int] | None = None
) -> Record | None:
    """Return the results with the probe, version and stack of the run `like`, or None if there are none.

    If the stack is unknown, there are none. If `own` is given, wrong comparisons count only if their `id` is in it.
    `counted_runs` are the tallies of the normal runs among them, whether they are at hand or not.
    """
    of = like.probe, like.probe_version, like.stack_id
    same = [run for run in runs if like.stack and (run.probe, run.probe_version, run.stack_id) == of]
    found: dict[Operands, list[Comparison]] = defaultdict(list)
    failing = 0
    for run in same:
        mine = _own(run, own)
        for comparison in mine:
            found[operands_of(comparison)].append(comparison)
        failing += run.whole and any(c.wrong for c in mine)
    # A new file in the place of the record has counted less than what is at hand.
    tallied, at_hand = list(counted_runs), [run for run in same if run.whole]
    counts, least, uploads = total(tallied), sum(r.trials for r in at_hand), sum(r.uploads for r in at_hand)
    trials = counts._replace(results=max(counts.results, least), uploads=max(counts.uploads, uploads))
    return Record(dict(found), max(failing, sum(t.failing for t in tallied)), trials) if found or tallied else None


def _own(run: Run, own: Collection[int] | None) -> list[Comparison]:
    every = (c for c in run.comparisons if c.subject is Subject.DEVICE)
    return [c for c in every if own is None or not c.wrong_trials or id(c) in own]


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
