"""The rule for a device that fails to answer now and then, and computes right in between, also with days in between."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from canaryd.formatting import format_duration
from canaryd.judge.case import Case
from canaryd.judge.cause import ALONE
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.laws import Moment, Trouble, Who, company
from canaryd.judge.phrases import KERNEL_LOG, count
from canaryd.model import IN_USE_ALONE, Cause, Finding, Outcome, Run, State

HANGS = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.UNKILLABLE})
"""Outcomes of a device that does not answer; what a machine lacks or canaryd does wrong is not among them."""
TIMES = 3
"""Times that a device stopped answering and answered again (ours): one outage has one beginning, however long it is."""
RUNS = 20
"""Newest runs of a probe among which they count, where `repeat_window` has fewer (ours)."""
SELDOM = 5
"""Times within `watch`, each more than `repeat_window` after the last, that count where no sibling ever failed so
(ours). More are needed where they would all be of one device by chance more often than `ALONE`."""


def tells(run: Run) -> bool:
    """Return whether a run shows if its device answers.

    One that timed out while others kept this device alone busy does not: the driver shares the time out among them, and
    no idle sibling is a witness. It still speaks against accusing a sibling.
    """
    return IN_USE_ALONE not in run.environment


def keeps_failing(case: Case) -> Iterator[Finding]:
    """A probe hangs or crashes again and again: suspect where siblings answer, else unknown.

    A server is never suspect for it: it is slow or down, and no other server tells whether its answers are right.
    """
    for probe in sorted(case.wanted):
        recent = _recent(case, [*filter(tells, case.scheduled(probe))])
        siblings = [
            _recent(case, [r for r in runs if r.probe == probe and r.whole])
            for uuid, runs in case.peers.items()
            if case.devices[uuid].kind == case.device.kind and not case.device.is_endpoint
        ]
        met = [runs for runs in siblings if runs]
        yield from _always(case, probe, met) or _often(case, probe, recent) or _seldom(case, probe)


def _always(case: Case, probe: str, met: Sequence[Sequence[Run]]) -> list[Finding]:
    """It does not answer any more, and most siblings answered `TIMES` times meanwhile, and always: suspect.

    Where most did not, what they share may be at fault, and `not_completed` says what is known. The finding rests on
    the run that answered last, so what is acknowledged stays so when it hangs again.
    """
    tried = [r for r in case.scheduled(probe) if r.outcome is not Outcome.SKIPPED and tells(r)]
    hung = [*itertools.takewhile(lambda r: r.outcome in HANGS, reversed(tried))]
    if len(hung) < TIMES:
        return []
    since = age(hung[-1], case.now)
    meanwhile = [[r.outcome for r in runs if age(r, case.now) <= since] for runs in met]
    sound = sum(told.count(Outcome.COMPLETED) >= TIMES and HANGS.isdisjoint(told) for told in meanwhile)
    if sound <= len(met) - sound:
        return []
    others = "" if sound == len(met) else f" {len(met) - sound} did not."
    return _suspect(
        f"hung or crashed in each of the last {len(hung)} runs",
        tried[-len(hung) - 1] if len(tried) > len(hung) else hung[-1],
        f"{count(sound, 'identical device')} always answered meanwhile.{others}",
        "If it hangs again after a restart of the machine, and no program uses it, hardware is likely.",
        action=f"See which program uses it, then read the kernel log: {KERNEL_LOG}",
    )


def _often(case: Case, probe: str, recent: Sequence[Run]) -> list[Finding]:
    """It hangs or crashes, and answers in between: suspect where it does so alone, else unknown."""
    times = _times(recent)
    if times < TIMES:
        return []
    failed = [r for r in recent if r.outcome in HANGS]
    trouble = _trouble(case, probe, HANGS)
    clean = sum(name not in trouble.others for name in trouble.siblings)
    alone = bool(trouble.own) and company(trouble, trouble.own[-1]).who is Who.ALONE
    others = f"{count(clean, 'identical device')} always answered." if clean else "Others here do so far less often."
    return _suspect(
        f"hung or crashed in {len(failed)} of {len(recent)} runs, {times} separate times",
        failed[-1],
        others if alone else "",
        "" if any(r.wrong for r in recent) else "Its results were right when it answered.",
        state=State.SUSPECT if alone else State.UNKNOWN,
    )


def _seldom(case: Case, probe: str) -> list[Finding]:
    """It hangs or crashes for days apart, and its siblings never do: suspect."""
    failed, answering = repeated(case, probe, HANGS)
    if not failed:
        return []
    watch = format_duration(case.policy.watch)
    return _suspect(
        f"hung or crashed {len(failed)} separate times within {watch}",
        failed[-1],
        f"{count(answering, 'identical device')} always answered.",
        f"Clears {watch} after it stops.",
    )


def _suspect(what: str, run: Run, *evidence: str, state: State = State.SUSPECT, action: str = "") -> list[Finding]:
    action = action or f"Take it out of service and read the kernel log: {KERNEL_LOG}"
    message = f"{run.probe} {what}"
    return [make_finding("keeps-failing", state, Cause.UNDETERMINED, message, action, run, evidence)]


def repeated(case: Case, probe: str, outcomes: Collection[Outcome]) -> tuple[Sequence[Run], int]:
    """Return the first run of each time that a probe had one of `outcomes` alone, and how many siblings never had one.

    Nothing where the times are too few, or chance would put so many on one device.
    """
    trouble = _trouble(case, probe, outcomes)
    failed = [run for run, at in _ended(case, probe, outcomes) if company(trouble, at).who is Who.ALONE]
    apart = [r for b, r in zip([None, *failed], failed, strict=False) if b is None or _apart(case, b, r)]
    clean = sum(name not in trouble.others for name in trouble.siblings)
    chance = (1 + clean) ** (1 - len(apart))
    return (apart, clean) if clean and chance <= ALONE and len(apart) >= SELDOM else ((), 0)


def _trouble(case: Case, probe: str, outcomes: Collection[Outcome]) -> Trouble:
    """Return when this device and its siblings had one of `outcomes` in a probe that they all run."""
    siblings = {
        device.name: case.peers[uuid]
        for uuid, device in case.devices.items()
        if device.kind == case.device.kind and device.part != case.device.part and not device.is_endpoint
        if any(r.probe == probe and r.outcome is Outcome.COMPLETED for r in case.peers[uuid])
    }
    others = {name: [at for _, at in _moments(case, runs, probe, outcomes)] for name, runs in siblings.items()}
    own = [at for _, at in _ended(case, probe, outcomes)]
    return Trouble(own, {name: spans for name, spans in others.items() if spans}, siblings)


def _ended(case: Case, probe: str, outcomes: Collection[Outcome]) -> list[tuple[Run, Moment]]:
    return [*_moments(case, filter(tells, case.runs), probe, outcomes)]


def _moments(
    case: Case, runs: Iterable[Run], probe: str, outcomes: Collection[Outcome]
) -> Iterator[tuple[Run, Moment]]:
    """Yield a probe's runs with one of `outcomes` within `watch`, and when that came: since the run before it."""
    mine = sorted((r for r in runs if r.probe == probe and r.whole), key=lambda r: -age(r, case.now))
    times = [case.now - age(r, case.now) for r in mine]
    for number, (run, at) in enumerate(zip(mine, times, strict=True)):
        if run.outcome in outcomes and case.now - at <= case.policy.watch:
            yield run, Moment(times[max(0, number - 1)], at)


def _apart(case: Case, before: Run, after: Run) -> bool:
    return age(before, case.now) - age(after, case.now) > case.policy.repeat_window


def _recent(case: Case, runs: Sequence[Run]) -> Sequence[Run]:
    within = [r for r in runs if age(r, case.now) <= case.policy.repeat_window]
    return within if len(within) >= RUNS else runs[-RUNS:]


def _times(runs: Sequence[Run]) -> int:
    """Return how often it stopped answering."""
    return sum(
        after.outcome in HANGS and before.outcome is Outcome.COMPLETED for before, after in itertools.pairwise(runs)
    )
