"""Compare a device's baselines with those of its siblings: who confirms them, and who is outvoted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from canaryd.judge.findings import finding
from canaryd.judge.phrases import and_more, count, listed
from canaryd.judge.recordings.baseline import EVERY, Baseline
from canaryd.judge.recordings.record import Record
from canaryd.model import Cause, Finding, Rival, State

PROCESSES = 3
"""Processes that a voting baseline needs at least, since a result may depend on its process (ours). False alarms: where
each of two modes occurs in half of all processes, 1 in 4 such devices still votes for a single mode."""


class _Vote(NamedTuple):
    own: Baseline
    agree: list[str]
    """Siblings that share a vector with it."""
    differ: list[str]


def outvoted(record: Record) -> Iterator[Finding]:
    """Siblings with the same chain give other results: the device may have been faulty when it was first recorded.

    Deterministic kernels give equal devices equal results on equal data. A strict majority of three or more names the
    odd one; of two, none is accused. A device that shares some vectors with the others, but now gives one that none of
    them knows, is disputed: it may have become faulty while it was learnt, or met a mode that they have not met.
    """
    found: dict[tuple[str, bool, bool], list[_Vote]] = defaultdict(list)
    for own, digest in record.current:
        voters = [(name, b) for name, b in record.voters(own) if _may_vote(b)]
        if not voters or not _may_vote(own):
            continue
        groups = _groups([own, *(b for _, b in voters)])
        mine = next(g for g in groups if own in g)
        agree = sorted(name for name, b in voters if b in mine)
        differ = sorted(name for name, b in voters if b not in mine)
        if 2 * len(mine) <= len(voters) + 1 and differ:
            largest = max((g for g in groups if g is not mine), key=len)
            odd = 2 * len(largest) > len(voters) + 1 and _names_kernels(record, own)
            found[own.probe, odd, False].append(_Vote(own, agree, differ))
        elif len(agree) > 1 and len(own.known) > 1 and not any(digest in b.digests for _, b in voters):
            found[own.probe, False, True].append(_Vote(own, [], sorted(name for name, _ in voters)))
    for (probe, odd, gave_theirs), votes in sorted(found.items()):
        yield _outvoted(record, probe, votes) if odd else _disputed(record, probe, votes, gave_theirs=gave_theirs)


def _may_vote(baseline: Baseline) -> bool:
    """Whether a baseline is representative of its device: the case repeats, and in enough processes."""
    return baseline.stable(EVERY) and baseline.independent_samples(EVERY) >= PROCESSES


def _outvoted(record: Record, probe: str, votes: Sequence[_Vote]) -> Finding:
    own, _, differ = votes[0]
    device, others = record.device.name, listed(differ)
    kernel = Rival(cause=Cause.SOFTWARE, why=f"another kernel: {others} run the same software", rejected=True)
    return finding(
        *("recording-outvoted", State.SUSPECT, Cause.HARDWARE),
        f"{device} differs from {count(len(differ), 'identical device')} ({_where(own, votes)}).",
        f"Run: canaryd check --level deep --device {device}",
        f"Most identical devices with the same software agree on other results: {others}.",
        f"{device} has given its results since it was first recorded: it may have been faulty from the start.",
        probe=probe,
        rivals=(kernel,),
    )


def _disputed(record: Record, probe: str, votes: Sequence[_Vote], *, gave_theirs: bool) -> Finding:
    """Say that devices disagree; `gave_theirs`: the device shares vectors with those that differ now."""
    own, agree, differ = votes[0]
    device = record.device.name
    evidence = [f"Same model and software, other results: {listed(differ)}."]
    why = "no majority shows which is right"
    if agree:
        evidence.append(f"Same results as {device}: {listed(agree)}.")
    if gave_theirs:
        why = "it gave theirs too, while its baseline was learnt"
    elif not _names_kernels(record, own):
        why = "they may have chosen different kernels"
        evidence.append("It is not known which kernels ran.")
    evidence.append("Or record the same on another host and import it here: canaryd baseline import.")
    return finding(
        *("recording-disputed", State.UNKNOWN, Cause.UNDETERMINED),
        f"{device} and {count(len(differ), 'identical device')} disagree ({_where(own, votes)}); {why}.",
        "Run: canaryd check --level deep",
        *evidence,
        probe=probe,
        rivals=(
            Rival(cause=Cause.HARDWARE, why="one of them computes wrongly: exact tests show it", rejected=False),
            Rival(cause=Cause.SOFTWARE, why="they chose different kernels", rejected=False),
        ),
    )


def _where(own: Baseline, votes: Sequence[_Vote]) -> str:
    return f"case {own.case}{and_more(len(votes))}"


def _names_kernels(record: Record, own: Baseline) -> bool:
    """Whether equal chains mean equal kernels: accelerators choose theirs, and the chain may not name the choice."""
    return record.device.backend == "cpu" or "kernel" in own.chain


def _groups(voters: Sequence[Baseline]) -> list[list[Baseline]]:
    """Return the voters in groups that have a vector in common."""
    groups: list[list[Baseline]] = []
    for one in voters:
        near = [g for g in groups if any(one.digests & b.digests for b in g)]
        groups = [g for g in groups if g not in near] + [[one, *(b for g in near for b in g)]]
    return groups


def witnesses(own: Baseline, voters: Iterable[tuple[str, Baseline]]) -> str:
    """Return who has confirmed a baseline (siblings with all its vectors, a reference); "" for none."""
    names = sorted(name for name, b in voters if own.digests <= b.digests)
    found = [", ".join(names)] * bool(names) + ["reference"] * own.referenced
    return " and ".join(found)


def unwitnessed(record: Record) -> Iterator[Finding]:
    """Note unconfirmed baselines: a device that was faulty from the start has such baselines too."""
    alone: dict[str, list[Baseline]] = defaultdict(list)
    for own, _ in record.current if not record.is_endpoint else ():
        if not witnesses(own, record.voters(own)):
            alone[own.probe].append(own)
    for probe, baselines in sorted(alone.items()):
        yield finding(
            *("baseline-unwitnessed", State.HEALTHY, Cause.NONE),
            f"Baselines of {count(len(baselines), 'case')} are not confirmed by another device or a reference.",
            "Import the same baselines from another host: canaryd baseline import",
            "They are this device's own first results. If it was faulty then, its faults count as right.",
            probe=probe,
        )
