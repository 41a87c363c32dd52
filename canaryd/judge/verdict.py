"""The judge: from stored runs to a verdict on one device, as a pure function of its arguments.

Read it from the end: `RULES` lists the rules, each yields findings, the worst finding gives the verdict its state.
Whose fault it is, `canaryd/blame.py` decides. docs/judgement.md has both as tables, with their sources and why no rule
raises a false alarm; docs/thresholds.md has every number with its false-alarm chance. Shorthand here: a *hit* is a
wrong comparison; a *charge* is a hit that speaks against the device on trial; a *peer* is another device of this node;
a *sibling* is a peer of the same backend and model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from canaryd.config.settings import JudgePolicy
from canaryd.formatting import moment
from canaryd.judge import acks
from canaryd.judge.case import Docket, Node
from canaryd.judge.coverage import (
    checked_nothing,
    clock_set_back,
    devices_missing,
    devices_unlisted,
    history_lost,
    no_fresh_evidence,
    not_completed,
    unreached,
    vanished,
)
from canaryd.judge.exact import (
    comparator_disagreement,
    confirmed,
    exact_mismatch,
    golden_disagreement,
    golden_in_doubt,
    host_in_doubt,
    uncharacterised_mismatch,
)
from canaryd.judge.findings import CAUSES
from canaryd.judge.statistics import rate_bound
from canaryd.judge.telemetry import rules
from canaryd.judge.telemetry.signals import Signs
from canaryd.model import Ack, Cause, Device, Finding, Run, State, Verdict


def telemetry_signs(docket: Docket) -> Iterator[Finding]:
    """What the device, its driver and the kernel log say of it (docs/telemetry.md)."""
    if docket.signs is not None:
        gone = docket.gone_since is not None  # what it was found to be stands; that it is silent now says nothing new
        yield from (f for f in rules.findings(docket.signs) if not (gone and f.rule == "telemetry-stale"))


def recordings(docket: Docket) -> Iterator[Finding]:
    """What the device's recordings say beside their baselines (docs/baselines.md)."""
    yield from docket.recorded


def drift(docket: Docket) -> Iterator[Finding]:
    """What the device's days say beside its own before and its siblings' (docs/judgement.md): slow, hot, less exact."""
    yield from docket.trends


def endpoint_departed(docket: Docket) -> Iterator[Finding]:
    """An endpoint that this device serves gives unknown bits on an unchanged chain: the device is a suspect."""
    for name, (count, findings) in sorted(docket.serving.items()):
        for found in (f for f in findings if f.rule == "recording-departed"):
            among = "" if count == 1 else f", one of {count} devices behind it,"
            cause = found.cause if count == 1 else Cause.UNDETERMINED
            message = f"{name}, which this device{among} serves, departs: {found.message}"
            yield replace(found, rule="endpoint-departed", cause=cause, message=message, runs=())


def acknowledged(docket: Docket) -> Iterator[Finding]:
    """An operator knows of it: said, and for how long. It makes nothing healthy."""
    if ack := acks.standing(docket.said, docket.now):
        yield acks.note(ack)
    if docket.gone_since is None and not docket.device.weak_identity:
        for ack in (a for a in docket.said if a.kind == "replaced"):
            on = moment(ack.at, seconds=False)
            text = f"it was said to be replaced on {on}, and it is still found: its record stands"
            yield Finding(rule="replaced-is-here", state=State.HEALTHY, cause=Cause.NONE, message=text)


def _heeding(docket: Docket, finding: Finding) -> Finding:
    """Return a finding as it stands beside an acknowledgement.

    Only rules that spoke when the word was given, of what had been seen by then, are covered; what is faulty stays so.
    """
    ack = acks.standing(docket.said, docket.now)
    if ack is None or not acks.covers(ack, finding):
        return finding
    times = [docket.node.at.get(run, docket.now) for run in finding.runs]
    if not times and docket.signs is not None:  # what the device says of itself
        times = [e.last for e in docket.signs.events]
    return finding if max(times, default=0.0) > ack.at else acks.covered(ack, finding)


Rule = Callable[[Docket], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    vanished,
    devices_missing,
    devices_unlisted,
    unreached,
    telemetry_signs,
    confirmed,
    exact_mismatch,
    golden_disagreement,
    comparator_disagreement,
    host_in_doubt,
    golden_in_doubt,
    recordings,
    drift,
    endpoint_departed,
    uncharacterised_mismatch,
    not_completed,
    no_fresh_evidence,
    checked_nothing,
    history_lost,
    clock_set_back,
    acknowledged,
)
"""Every rule is asked, in any order: the worst finding decides."""


def decide(
    device: Device,
    among: Node,
    *,
    wanted: Mapping[str, float],
    policy: JudgePolicy,
    now: float,
    previous: Verdict | None,
    drill: bool = False,
    reached: float = math.inf,
    gone_since: float | None = None,
    signs: Signs | None = None,
    count: tuple[int, int] | None = None,
    unlisted: Mapping[str, str] | None = None,
    recorded: Sequence[Finding] = (),
    serving: Mapping[str, tuple[int, Sequence[Finding]]] | None = None,
    said: Sequence[Ack] = (),
    lost: tuple[float, str] | None = None,
    trends: Sequence[Finding] = (),
) -> Verdict:
    """Judge one device, one of those of a node. Deterministic.

    `wanted` maps each probe that is expected to give evidence to its period in seconds. `gone_since` is when a device
    was last seen that is not found now. `signs` is its telemetry, `count` how many accelerators were found and
    expected, `unlisted` why those of a vendor could not be listed. `recorded` is what was found of its recordings,
    `serving` of the endpoints that it serves how many devices do so, and what was found of theirs; `said` is what
    operators said of it, `lost` when its history was lost, `trends` what was found of its days. `reached` is a time
    that has come for certain. `drill` marks a verdict on drills.
    """
    docket = Docket(
        device=device,
        node=among,
        wanted=wanted,
        policy=policy,
        now=now,
        reached=reached,
        gone_since=gone_since,
        signs=signs,
        count=count,
        unlisted=unlisted or {},
        recorded=recorded,
        serving=serving or {},
        said=said,
        lost=lost,
        trends=trends,
    )
    found = (_heeding(docket, finding) for rule in RULES for finding in rule(docket))
    findings = tuple(sorted(found, key=lambda f: (-f.state.severity, f.probe, f.rule, f.message)))
    state = findings[0].state if findings else State.HEALTHY
    blamed = (f.cause for f in findings if f.state is state is not State.HEALTHY)
    cause = min(blamed, key=CAUSES.index, default=Cause.NONE)
    unchanged = previous is not None and (previous.state, previous.cause) == (state, cause)
    since = previous.since if previous is not None and unchanged else now
    return Verdict(
        device=device.uuid, state=state, cause=cause, findings=findings, decided=now, since=since, drill=drill
    )


def worst(verdicts: Iterable[Verdict]) -> State:
    """Return the worst state; no verdict at all is `unknown`."""
    return max((v.state for v in verdicts), key=lambda s: s.severity, default=State.UNKNOWN)


def exit_code(state: State) -> int:
    """Return what `canaryd check` exits with: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown."""
    return {State.HEALTHY: 0, State.DEGRADED: 1, State.SUSPECT: 2, State.FAULTY: 2, State.UNKNOWN: 3}[state]


def fault_rate_bound(runs: Iterable[Run], *, drill: bool = False) -> dict[str, float]:
    """Return, per probe, the faults per trial that its clean trials rule out at 95 % (the rule of three: about 3/n).

    Exactly: the rate at which n trials would stay clean with a probability of 5 %, 1 - 0.05^(1/n). A probe with a
    mismatch of any kind, or without a trial, is absent.
    """
    trials: dict[str, int] = defaultdict(int)
    wrong = set()
    for run in runs:
        if bool(run.drill) == drill:
            trials[run.probe] += run.trials
            if run.wrong:
                wrong.add(run.probe)
    return {p: rate_bound(n) for p, n in sorted(trials.items()) if n and p not in wrong}
