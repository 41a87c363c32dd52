"""Whose fault it is: the decision table, row by row, and the other explanations that were considered.

`TABLE` is read from the top; the first row that holds gives the cause. docs/judgement.md has the same rows in prose.
Shorthand: a *hit* is a wrong comparison; a *sibling* is another device of this node, of the same backend and model,
whose runs of the same probe, version and stack are compared.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from canaryd.judge.statistics import Count
from canaryd.model import Cause, Comparison, Rival, Run, Subject

Bytes = tuple[str, str, int]
"""Case, shape and seed: equal ones mean bit-for-bit equal operands."""
Mark = tuple[tuple[tuple[int, ...], str, str], ...] | str
"""What tells two wrong results apart: the wrong elements with their bits, or a digest."""
Results = Mapping[Bytes, Sequence[Comparison]]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One wrong comparison, and whose fault it is as far as the peers can tell."""

    run: Run
    comparison: Comparison
    cause: Cause = Cause.UNDETERMINED
    why: str = ""
    """A sentence: what the cause rests on, or what would settle it."""
    rivals: tuple[Rival, ...] = ()
    host_in_doubt: bool = False
    """True where the host's CPU erred at about the same time: accuses nobody firmly."""

    @property
    def bytes(self) -> Bytes:
        """What operands it was computed from."""
        return bytes_of(self.comparison)

    @property
    def core(self) -> str:
        """The single core it happened on, "" where it is not known."""
        return self.comparison.place if re.fullmatch(r"core \d+", self.comparison.place) else ""

    @property
    def makers(self) -> str:
        """Where this host gave two results for one program, "" where the hit is about something else."""
        return self.comparison.place if re.fullmatch(r"cores \d+ and \d+|core \d+ alone", self.comparison.place) else ""

    @property
    def words(self) -> object:
        """What was said about which golden: equal for two hits that tell the same story."""
        evidence = self.comparison.evidence
        return self.run.probe, self.run.probe_version, self.bytes, evidence.pattern if evidence else ""

    def __str__(self) -> str:
        c, evidence = self.comparison, self.comparison.evidence
        text = f"{c.case} ({', '.join(filter(None, (c.shape, f'seed {c.seed}')))})"
        text += f" on {c.place}" if c.place else ""
        if evidence is None:
            return f"{text}: {c.wrong_trials} of {c.trials} results wrong"
        if evidence.wrong:
            text += f": {evidence.wrong} of {evidence.total} elements wrong"
        return "; ".join(filter(None, (f"{text}: {evidence.pattern}", evidence.reproduced)))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is known around the hits of one subject, probe and stack: the left side of the table."""

    golden: bool = False
    """The hits are goldens that this host made in two ways that disagree."""
    makers: str = ""
    """Where one program gave two results, as "cores 2 and 5", or "core 3 alone" where there is no other."""
    lone_core: str = ""
    """A core that made a golden otherwise than this host has made it elsewhere."""
    whole_host: bool = False
    """Every accelerator was wrong too, no two alike, and it is the host's CPU that is asked about."""
    right: frozenset[str] = frozenset()
    """Siblings that computed the same bytes right."""
    alike: frozenset[str] = frozenset()
    """Siblings that computed the same bytes wrong in the same bits."""
    unlike: frozenset[str] = frozenset()
    """Siblings that computed the same bytes, and neither clearly."""
    outlasting: frozenset[str] = frozenset()
    """Siblings that ran the probe clean for three times the accused's trials per failure, each or together."""
    siblings: frozenset[str] = frozenset()
    """All that ran the probe on the same stack."""
    host_clean: bool | None = None
    """Whether the host's CPU computed exact goldens right at about the same time; None where it did not compute any,
    or is itself the accused."""
    goldens_right: bool = False
    """The same goldens have been matched by a result, here or on a sibling."""
    command: str = ""
    """What repeats the newest hit."""


class Row(NamedTuple):
    """One line of the decision table."""

    seen: Callable[[Scene], object]
    cause: Cause
    why: Callable[[Scene], str]


TABLE: tuple[Row, ...] = (
    Row(lambda s: s.makers, Cause.HARDWARE, lambda s: f"One program gave two results on {s.makers}."),
    Row(
        lambda s: s.lone_core,
        Cause.HARDWARE,
        lambda s: f"This host has also made the same golden right; here {s.lone_core} did not.",
    ),
    Row(
        lambda s: s.golden,
        Cause.UNDETERMINED,
        lambda s: (
            "Whether processor or reference is wrong stays open. To settle it, run the same command on another "
            f"host: {s.command}"
        ),
    ),
    Row(
        lambda s: s.whole_host,
        Cause.HARDWARE,
        lambda _: "Every device of this host is wrong, each in its own way: memory, CPU or PCIe is at fault.",
    ),
    Row(
        lambda s: s.right and s.alike,
        Cause.UNDETERMINED,
        lambda s: (
            f"Whose fault stays open: {names(s.right)} of the same model computed the same bytes right, and "
            f"{names(s.alike)} gives the same wrong bits. {_settle(s)}"
        ),
    ),
    Row(
        lambda s: s.right,
        Cause.HARDWARE,
        lambda s: f"{names(s.right)} of the same model computed the same bytes right on the same stack.",
    ),
    Row(
        lambda s: s.alike and not s.unlike,
        Cause.SOFTWARE,
        lambda s: f"{names(s.alike)} of the same model gives the same wrong bits on the same stack.",
    ),
    Row(
        lambda s: s.outlasting and not s.alike,
        Cause.HARDWARE,
        lambda s: (
            f"{names(s.outlasting)} of the same model ran the same probe on the same stack without a mismatch, "
            f"{'together ' * (len(s.outlasting) > 1)}at least three times as long as this device takes to fail once."
        ),
    ),
    Row(
        lambda s: s.siblings,
        Cause.UNDETERMINED,
        lambda s: f"Whose fault stays open: {names(s.siblings)} cannot tell yet. {_settle(s)}",
    ),
    Row(
        lambda _: True,
        Cause.UNDETERMINED,
        lambda s: f"Whose fault stays open: no sibling to ask (same model, same stack). {_settle(s)}",
    ),
)
"""Read from the top: what is seen, whose fault it then is, and why."""


def decide(scene: Scene) -> tuple[Cause, str, tuple[Rival, ...]]:
    """Return the cause, the sentence that says why, and the other explanations that were considered."""
    row = next(row for row in TABLE if row.seen(scene))
    return row.cause, row.why(scene), tuple(_rivals(scene, row.cause))


def _settle(scene: Scene) -> str:
    return f"To settle it, run the same command on another host with the same stack: {scene.command}"


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
        yield Rival(cause=Cause.HARNESS, why=f"a wrong golden: {who} matched the same golden", rejected=True)
    else:
        yield Rival(cause=Cause.HARNESS, why="a wrong golden: no other result has matched it yet", rejected=False)
    if not scene.whole_host:
        yield _host(scene)


def _software(scene: Scene) -> Rival:
    if scene.alike:
        text, rejected = f"a wrong kernel: {names(scene.alike)} gives the same wrong bits, others do not", False
    elif scene.right:
        text, rejected = f"a wrong kernel: the same kernel gave the right bits on {names(scene.right)}", True
    elif scene.outlasting and not scene.alike:
        text, rejected = f"a wrong kernel: it has run on {names(scene.outlasting)} for long without a mismatch", True
    else:
        text, rejected = "a wrong kernel: no sibling has computed the same on the same stack", False
    return Rival(cause=Cause.SOFTWARE, why=text, rejected=rejected)


def _host(scene: Scene) -> Rival:
    if scene.right or scene.outlasting:
        who = names(scene.right or scene.outlasting)
        text, rejected = f"the host's memory or CPU: {who} in the same host is right (slot and link are its own)", True
    elif scene.host_clean:
        text, rejected = "the host's memory or CPU: it computed exact goldens right at about the same time", True
    else:
        text, rejected = "the host's memory, CPU or PCIe: nothing in this host has been shown right beside it", False
    return Rival(cause=Cause.HARDWARE, why=text, rejected=rejected)


# --- What siblings computed -----------------------------------------------------------------------------------------


def bytes_of(comparison: Comparison) -> Bytes:
    """Return what tells the operands of a comparison from all others."""
    return comparison.case, comparison.shape, comparison.seed


def results(runs: Iterable[Run], like: Run) -> dict[Bytes, list[Comparison]]:
    """Return what devices computed with the probe and stack of a run, by operands; an unrecorded stack equals none."""
    found: dict[Bytes, list[Comparison]] = defaultdict(list)
    for run in runs:
        same_probe = (run.probe, run.probe_version) == (like.probe, like.probe_version)
        if like.stack and same_probe and run.stack == like.stack:
            for comparison in run.comparisons:
                if comparison.subject is Subject.DEVICE:
                    found[bytes_of(comparison)].append(comparison)
    return dict(found)


def same_bytes(
    own: Results, siblings: Mapping[str, Results], data: set[Bytes]
) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the siblings that computed the same bytes: right, wrong in the same way, and neither clearly."""
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
    results = wrong = uploads = failed = 0
    for c in comparisons:
        results, wrong, uploads, failed = (
            results + c.trials,
            wrong + c.wrong_trials,
            uploads + c.uploads,
            failed + c.wrong,
        )
    return Count(results, wrong, uploads, failed)
