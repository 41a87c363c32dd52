"""The rule for a device that fails to answer now and then, and computes right in between, also with days in between."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from canaryd.formatting import format_duration
from canaryd.judge.case import Case, lasting
from canaryd.judge.cause import ALONE
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.laws import Moment, Trouble, Who, company
from canaryd.judge.phrases import KERNEL_LOG, count, reason_of
from canaryd.model import IN_USE_ALONE, MPS_CLIENT, Cause, Finding, Outcome, Run, State

HANGS = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.UNKILLABLE})
"""Outcomes of a device that does not answer; what a machine lacks or canaryd does wrong is not among them."""
TIMES = 3
"""Runs without an answer, at separate times or at the end, that make a device suspect; disappearances too (ours)."""
SELDOM = 5
"""Times within `watch`, each more than `repeat_window` after the last, that count where no sibling ever failed so
(ours). More are needed where they would all be of one device by chance more often than `ALONE`."""

HUNG = "hung or crashed {times} separate times within {watch}"
TAKE_OUT = f"Take it out of service and read the kernel log: {KERNEL_LOG}"


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
    for probe in sorted({run.probe for run in case.runs if run.outcome in HANGS} & {*case.wanted}):
        window = lasting(case.policy, case.wanted[probe])
        siblings = (
            [r for r in runs if r.probe == probe and r.whole and age(r, case.now) <= window]
            for uuid, runs in case.peers.items()
            if case.device.has_witnesses and case.devices[uuid].kind == case.device.kind
        )
        yield from (
            _always(case, probe, [*filter(None, siblings)])
            or [*seldom(case, probe, "keeps-failing", HANGS, f"{{probe}} {HUNG}")]
            or _often(case, probe, window)
        )


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


def _often(case: Case, probe: str, window: float) -> list[Finding]:
    """It hung or crashed, and again after an answer: suspect where it does so alone and often, else unknown."""
    hung, times = _hung(case, probe)
    if times < 2 or age(hung[-1], case.now) > window:
        return []
    often = any(_gap(case, a, b) <= window for a, b in zip(hung, hung[TIMES - 1 :], strict=False))
    trouble = _trouble(case, probe, HANGS)
    clean = sum(name not in trouble.others for name in trouble.siblings)
    others = f"{count(clean, 'identical device')} always answered." if clean else "Others here do so far less often."
    alone = company(trouble, trouble.own[-1]).who is Who.ALONE
    return _suspect(
        HUNG.format(times=times, watch=format_duration(case.policy.watch)),
        hung[-1],
        others if alone else "",
        f"Clears {format_duration(window)} after it stops.",
        state=State.SUSPECT if alone and often else State.UNKNOWN,
    )


def _suspect(
    what: str, run: Run, *evidence: str, state: State = State.SUSPECT, action: str = TAKE_OUT
) -> list[Finding]:
    return [make_finding("keeps-failing", state, Cause.UNDETERMINED, f"{run.probe} {what}", action, run, evidence)]


def seldom(case: Case, probe: str, rule: str, outcomes: Collection[Outcome], message: str) -> Iterator[Finding]:
    """It fails in one way for days apart, and its siblings never do: suspect.

    `message` has {probe}, {times}, {watch} and {reason}. Under MPS an error of any other client ends this one too.
    """
    apart, clean = _repeated(case, probe, outcomes)
    is_shared = Outcome.DEVICE_ERROR in outcomes and any(MPS_CLIENT in r.environment for r in apart)
    if apart and not is_shared:
        watch = format_duration(case.policy.watch)
        text = message.format(probe=probe, times=len(apart), watch=watch, reason=reason_of(apart[-1]))
        others = f"{count(clean, 'identical device')} never failed this way."
        yield make_finding(
            *(rule, State.SUSPECT, Cause.UNDETERMINED, text, TAKE_OUT, apart[-1]),
            (others, f"Clears {watch} after it stops."),
        )


def _repeated(case: Case, probe: str, outcomes: Collection[Outcome]) -> tuple[Sequence[Run], int]:
    """Return the first run of each time that a probe had one of `outcomes` alone, and how many siblings never had one.

    Nothing where the times are too few, or chance would put so many on one device.
    """
    ended = _ended(case, probe, outcomes)
    if len(ended) < SELDOM:
        return (), 0
    trouble = _trouble(case, probe, outcomes)
    failed = [run for run, at in ended if company(trouble, at).who is Who.ALONE]
    day = case.policy.repeat_window
    apart = [r for b, r in zip([None, *failed], failed, strict=False) if b is None or _gap(case, b, r) > day]
    clean = sum(name not in trouble.others for name in trouble.siblings)
    chance = (1 + clean) ** (1 - len(apart))
    return (apart, clean) if clean and chance <= ALONE and len(apart) >= SELDOM else ((), 0)


def identical(case: Case) -> Mapping[str, Sequence[Run]]:
    """Return name → runs of each other card that is identical; of an endpoint there is none."""
    return {
        device.name: case.peers[uuid]
        for uuid, device in case.devices.items()
        if device.has_witnesses and device.kind == case.device.kind and device.part != case.device.part
    }


def _trouble(case: Case, probe: str, outcomes: Collection[Outcome]) -> Trouble:
    """Return when this device and its siblings had one of `outcomes` in a probe that they all run."""
    siblings = {
        name: runs
        for name, runs in identical(case).items()
        if any(r.probe == probe and r.outcome is Outcome.COMPLETED for r in runs)
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
    mine = [r for r in runs if r.probe == probe and r.whole]
    if not any(r.outcome in outcomes for r in mine):
        return
    mine.sort(key=lambda r: -age(r, case.now))
    times = [case.now - age(r, case.now) for r in mine]
    for number, (run, at) in enumerate(zip(mine, times, strict=True)):
        if run.outcome in outcomes and case.now - at <= case.policy.watch:
            yield run, Moment(times[max(0, number - 1)], at)


def _gap(case: Case, before: Run, after: Run) -> float:
    return age(before, case.now) - age(after, case.now)


def _hung(case: Case, probe: str) -> tuple[Sequence[Run], int]:
    """Return the runs of a probe that hung or crashed within `watch`, and how often it stopped answering.

    It did so after an answer, or so long after it hung last that no result was fresh.
    """
    ended = {*HANGS, Outcome.COMPLETED}
    since = (r for r in filter(tells, case.scheduled(probe)) if age(r, case.now) <= case.policy.watch)
    runs = [r for r in since if r.outcome in ended]
    hung = [r for r in runs if r.outcome in HANGS]
    same = sum(
        {a.outcome, b.outcome} <= HANGS and _gap(case, a, b) <= case.limit(probe) for a, b in itertools.pairwise(runs)
    )
    return hung, len(hung) - same
