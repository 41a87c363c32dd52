"""Decide whether the evidence supports `canaryd ack --software`: that the software caused the wrong results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from canaryd.facts import Subject
from canaryd.formatting import format_duration
from canaryd.judge.case import Case, Mismatches, OtherSoftware, least_right_runs
from canaryd.judge.cause import Mismatch
from canaryd.judge.phrases import count
from canaryd.judge.statistics import RULE_OF_THREE
from canaryd.model import Cause


def missing(case: Case) -> str:
    """Return a sentence about the evidence that is missing for `canaryd ack --software`, or "" if none is.

    The device itself must have wrong results, all on software that is no longer in use and without another known cause.
    On other software it must have been right often enough since (`OtherSoftware.supports`).
    """
    groups: dict[object, list[Mismatch]] = defaultdict(list)
    for mismatch in _that_count(case):
        groups[mismatch.run.probe, mismatch.run.stack_id, mismatch.run.instruction_set].append(mismatch)
    if not groups:
        return f"{case.device.name} has no wrong results that software could have caused"
    return next(filter(None, (_lacks(case, mismatches) for mismatches in groups.values())), "")


def _that_count(case: Case) -> list[Mismatch]:
    """Return the mismatches that make the device suspect or faulty, oldest first."""
    confirmed = {id(m) for mismatches, _ in case.confirmed for m in mismatches}
    standing = {id(m) for subject in Subject for each in case.standing(subject, case.accusations) for m in each}
    return [m for m in case.accusations if id(m) in confirmed | standing]


def _lacks(case: Case, mismatches: Sequence[Mismatch]) -> str:
    newest = mismatches[-1]
    run, accused = newest.run, next((m for m in mismatches if m.cause is Cause.HARDWARE), None)
    if newest.comparison.subject is not Subject.DEVICE:
        return f"{run.probe} found that this CPU computes references wrongly; no software of a device explains that"
    if accused is not None:
        return f"the cause is hardware: {accused.why}"
    if any(m.host_in_doubt for m in mismatches):
        return "the host's CPU was wrong at about the same time; test it first"
    if not run.stack:
        return f"the wrong runs of {run.probe} do not say on which software they ran"
    group = Mismatches(case, mismatches)
    other = group.on_other_software(since=True)
    if group.newest_stack == run.stack_id:
        return f"{run.probe} still runs on the software on which it was wrong; change that first"
    if other.tried.failed:
        return f"{run.probe} was wrong on other software too, in {other.tried.failed} of {other.tried.uploads} uploads"
    return "" if other.supports(case.policy) else _too_little(case, run.probe, other)


def _too_little(case: Case, probe: str, other: OtherSoftware) -> str:
    """Return a sentence: how many right results on other software are needed, and how many there are."""
    tried, accused = other.tried, other.accused
    results = -(-RULE_OF_THREE * accused.results // accused.wrong)
    uploads = -(-RULE_OF_THREE * accused.uploads // accused.failed)
    wanted = f"{count(results, 'right result')} from {count(uploads, 'upload')}"
    runs = f"{count(least_right_runs(case.policy), 'run')} over {format_duration(case.policy.repeat_window)}"
    have = f"{tried.results:,} from {tried.uploads:,} in {count(other.runs, 'run')}"
    return (
        f"{probe} needs {wanted} in {runs} on other software, and has {have} over {format_duration(other.lasted)}: "
        "wait, and try again"
    )
