"""The judge: it computes the verdict on one device from a case (all data about the device), without side effects.

`RULES` lists the rules. Each yields findings, and the worst finding gives the verdict its state; `cause.py` decides
what is at fault. docs/judgement.md has both as tables; docs/thresholds.md has every number with its source and its
false-alarm chance. Those that an operator can set are in canaryd/config/judge_policy.py, all others beside the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from canaryd.formatting import format_utc
from canaryd.judge import acks, coverage, exact
from canaryd.judge.case import Case
from canaryd.judge.device_errors import device_error
from canaryd.judge.findings import DEPARTED, OTHER_BITS, REPLACED_IS_HERE, conclusion
from canaryd.judge.hangs import keeps_failing
from canaryd.judge.selftest import vendor_selftest
from canaryd.judge.statistics import rate_bound
from canaryd.judge.telemetry import flag_rules, rules
from canaryd.judge.vanishing import keeps_vanishing
from canaryd.judge.whose import pointed
from canaryd.model import AckKind, Cause, EventKind, Finding, Run, State, Verdict


def telemetry(case: Case) -> Iterator[Finding]:
    """Yield findings about what the device, its driver and the kernel log report (docs/telemetry.md)."""
    if case.signs is not None and (case.signs.polls or case.signs.events):
        yield from rules.findings(case.signs if case.gone_since is None else replace(case.signs, gone=True))


def recordings(case: Case) -> Iterator[Finding]:
    """Yield findings about results without a known right answer that differ from earlier ones (docs/baselines.md)."""
    yield from case.recordings


def slower(case: Case) -> Iterator[Finding]:
    """Yield findings about the device's speed, compared with earlier days and siblings (docs/judgement.md)."""
    yield from case.slower


def endpoint_departed(case: Case) -> Iterator[Finding]:
    """Yield an endpoint's unknown answers as a note on each device behind it: its own exact tests decide."""
    for name, (count, findings) in sorted(case.serving.items()):
        for found in (f for f in findings if f.rule == OTHER_BITS and f.state is State.SUSPECT):
            among = f"{name} is served by {count} devices, this one among them." if count > 1 else ""
            yield replace(
                found,
                rule=DEPARTED,
                state=State.HEALTHY,
                cause=Cause.NONE,
                message=f"{name}, served by this device, gives wrong answers: {found.message}",
                evidence=tuple(filter(None, (among, *found.evidence))),
                runs=(),
            )


def acknowledged(case: Case) -> Iterator[Finding]:
    """Yield notes about an acknowledgement that has not ended, and about a replaced part that is still here."""
    if ack := acks.standing(case.device, case.acks, case.now):
        yield acks.note(ack)
    if case.gone_since is None and not case.device.weak_identity:
        for ack in (a for a in case.acks if a.kind == AckKind.REPLACED):
            day = format_utc(ack.at, seconds=False)
            text = f"Reported as replaced on {day}, but it is still here; its record still counts"
            yield Finding(rule=REPLACED_IS_HERE, state=State.HEALTHY, cause=Cause.NONE, message=text)


def _acknowledged(case: Case, finding: Finding) -> Finding:
    """Return the finding, as an acknowledged one if an operator's acknowledgement covers it.

    An acknowledgement covers only the rules that it lists, and only what had been seen by then. A faulty device stays
    faulty.
    """
    ack = acks.standing(case.device, case.acks, case.now)
    if ack is None or not acks.covers(ack, finding):
        return finding
    if finding.runs:
        again = max(case.node.at.get(run, case.now) for run in finding.runs) > ack.at
    else:
        again = _reported_again(case, finding.rule, ack.at)
    return finding if again else acks.covered(ack, finding)


def _reported_again(case: Case, rule: str, at: float) -> bool:
    """Return whether what the device reported since `at` is alone enough to make the device suspect by this rule.

    Other reports, such as a corrected error, are no news about what an operator knows.
    """
    if case.signs is None:
        return False
    since = [e for e in case.signs.events if e.last > at]
    if any(flag_rules.ADVICE.get(e.reading) == rule for e in since):  # another advice, another health
        return True
    # A reset tells again of the errors that it wiped out.
    since = [replace(e, labels={}) if e.kind == EventKind.RESET else e for e in since]
    signs = replace(case.signs, events=tuple(since), polls={})
    told = (*rules.findings(signs), *keeps_vanishing(replace(case, signs=signs)))
    return any(f.rule == rule and f.state.severity >= State.SUSPECT.severity for f in told)


Rule = Callable[[Case], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    coverage.vanished,
    coverage.devices_missing,
    coverage.devices_unlisted,
    coverage.unreached,
    telemetry,
    exact.confirmed,
    exact.exact_mismatch,
    exact.golden_disagreement,
    exact.comparator_disagreement,
    exact.host_in_doubt,
    exact.golden_in_doubt,
    recordings,
    slower,
    endpoint_departed,
    exact.uncharacterised_mismatch,
    coverage.not_completed,
    device_error,
    vendor_selftest,
    keeps_failing,
    keeps_vanishing,
    coverage.no_fresh_evidence,
    coverage.checked_nothing,
    coverage.history_lost,
    coverage.record_unread,
    coverage.clock_set_back,
    acknowledged,
)
"""All rules. Their order does not matter: the worst finding decides."""


def decide(case: Case) -> Verdict:
    """Return the verdict on one device. It depends only on the case."""
    found = (_acknowledged(case, pointed(case, finding)) for rule in RULES for finding in rule(case))
    findings = tuple(sorted(found, key=lambda f: (-f.state.severity, f.probe, f.rule)))
    state, cause = conclusion(findings)
    before = case.previous
    unchanged = before is not None and (before.state, before.cause) == (state, cause)
    return Verdict(
        device=case.device.uuid,
        state=state,
        cause=cause,
        findings=findings,
        decided=case.now,
        since=before.since if before is not None and unchanged else case.now,
    )


def worst(verdicts: Iterable[Verdict]) -> State:
    """Return the worst state, or `unknown` if there is no verdict."""
    return max((v.state for v in verdicts), key=lambda s: s.severity, default=State.UNKNOWN)


def exit_code(state: State) -> int:
    """Return the exit status of `canaryd check`: 0 healthy, 1 degraded, 2 suspect or faulty, 3 unknown."""
    return {State.HEALTHY: 0, State.DEGRADED: 1, State.SUSPECT: 2, State.FAULTY: 2, State.UNKNOWN: 3}[state]


def fault_rate_bound(runs: Iterable[Run]) -> dict[str, float]:
    """Return probe → fault rate per trial that its clean trials exclude at 95 % (the rule of three: about 3/n).

    Exactly: the rate at which n trials would stay clean with a probability of 5 %, 1 - 0.05^(1/n). A probe with a
    mismatch of any kind, or without a trial, is absent.
    """
    trials: dict[str, int] = defaultdict(int)
    wrong = set()
    for run in runs:
        trials[run.probe] += run.trials
        if run.wrong:
            wrong.add(run.probe)
    return {p: rate_bound(n) for p, n in sorted(trials.items()) if n and p not in wrong}
