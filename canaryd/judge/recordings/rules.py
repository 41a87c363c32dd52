"""Judge recordings: from results that nobody could predict to findings.

Where a result differs from its baseline, the first question is which link of the chain changed; only an unchanged chain
accuses a device. `RULES` run one by one; docs/baselines.md lists them, each with its probability of a false alarm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from canaryd.facts import LINKS, Recording
from canaryd.judge.case import freshness
from canaryd.judge.findings import RUNS_NAMED, finding
from canaryd.judge.phrases import and_more, count, listed
from canaryd.judge.recordings.baseline import EVERY, IDLE, LEARN, Baseline, Key, LinkChange, changed_links, key_of
from canaryd.judge.recordings.intake import is_comparable
from canaryd.judge.recordings.learning import learning, text_alone, uncompared
from canaryd.judge.recordings.record import (
    Observation,
    Record,
    devices_behind,
    find_observations,
    known_digests,
    variant_of,
)
from canaryd.judge.recordings.rounds import Round, rate_of_any, rounds
from canaryd.judge.recordings.speed import slow
from canaryd.judge.recordings.symptoms import symptom, triaged, was_broken
from canaryd.judge.recordings.votes import outvoted, unwitnessed
from canaryd.judge.statistics import outlasts, tail
from canaryd.judge.watch import is_over
from canaryd.model import Cause, Finding, Rival, Run, State

ALPHA = 1e-3
"""Probability at which a healthy device may fail a test of unknown vectors, each time it is made (ours): by re-runs
9.5e-4 at most; by their frequency 1.4 % within 1,000 runs at the bound."""
NEXT_RUN = "Wait for the next run; it shows whether the results match the baseline again."
MODEL_LINKS = LINKS[: LINKS.index("prompt") + 1]
"""Links that make it another model: an operator should confirm that the change was intended. A prompt that the server
renders in another way shows another tokenizer or chat template."""


# --- Outliers on an unchanged chain ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """What the outliers of one case amount to."""

    outliers: Sequence[Observation]
    state: State
    differs: str
    """How it differs, in words: the verb of the message."""
    outcome: str
    """What the re-runs showed, in words: the end of the message; may be ""."""
    action: str = ""
    evidence: str

    @property
    def newest(self) -> Observation:
        return self.outliers[-1]


@dataclass(frozen=True, kw_only=True)
class _Blame:
    """Which side is at fault, and why."""

    cause: Cause
    action: str
    evidence: tuple[str, ...]
    rivals: tuple[Rival, ...]


_DEPARTURE_RULES = {
    State.SUSPECT: "recording-departed",
    State.UNKNOWN: "recording-unconfirmed",
    State.HEALTHY: "recording-not-repeated",
}


def departed(record: Record) -> Iterator[Finding]:
    """Outliers on an unchanged chain: confirmed by re-runs, or too frequent for the baseline."""
    by_probe: dict[str, dict[Key, list[Observation]]] = defaultdict(dict)
    for key, observations in sorted(record.observations.items()):
        outliers = [o for o in observations if o.is_outlier]
        if outliers and not _cleared(record, outliers[-1].baseline):
            by_probe[key.probe][key] = outliers
    for probe, cases in by_probe.items():
        every = sorted((o for outliers in cases.values() for o in outliers), key=lambda o: o.run.started)
        together = [_alone(record, every), _weigh_runs(record, probe, cases)]
        found = _departure(record, probe, [*filter(None, together)], [_weigh(record, c) for c in cases.values()])
        yield found
        if found.state is State.SUSPECT:
            yield from was_broken(record, every[-1])


def _alone(record: Record, outliers: Sequence[Observation]) -> _Weighed | None:
    """Return what the outliers of all cases of a probe amount to beside the siblings' runs; None where by chance.

    If all devices gave such results alike, they would fall on the devices as their runs do.
    """
    keys = {o.baseline.key for o in outliers if o.baseline.stable(EVERY) and is_comparable(o.baseline, o.recording)}
    runs = {o.run.id for o in outliers if o.baseline.key in keys and not o.run.confirms}
    voters = {name for o in outliers for name, _ in record.voters(o.baseline) if name in record.peers}
    own = max((_compared(record.baselines[key]) for key in keys), default=0)
    theirs = sum(
        max((_compared(b) for key in keys if (b := record.peers[name].baselines.get(key))), default=0)
        for name in voters
    )
    others = sum(b.strange for name in voters for key in keys if (b := record.peers[name].baselines.get(key)))
    if not runs or not theirs or others:
        return None
    chance = (1 + len(voters)) * tail(len(runs), len(runs), own / (own + theirs))
    if chance > ALPHA:
        return None
    names = listed(sorted(voters))
    return _Weighed(
        outliers=outliers,
        state=State.SUSPECT,
        differs=f"differed from its baseline in {len(runs)} of {own} runs",
        outcome="",
        evidence=f"{names} never did in {theirs} runs; the probability that chance picks one device is {chance:.1g}.",
    )


def _compared(baseline: Baseline) -> int:
    """Return how many runs were compared with a baseline."""
    return baseline.passed.get(EVERY, 0) + baseline.strange


def _departure(record: Record, probe: str, together: Sequence[_Weighed], cases: Sequence[_Weighed]) -> Finding:
    """Return the finding on all outliers of one probe; the most severe case, or all `together`, stand for them."""
    worst = max((*together, *cases), key=lambda each: each.state.severity)
    newest = worst.newest
    action, evidence = worst.action, ["Neither the model nor its settings nor the software changed."]
    if newest.deviation is not None:
        evidence.append(newest.deviation.sentence())
    evidence.append(worst.evidence)
    cause = Cause.NONE if worst.state is State.HEALTHY else Cause.UNDETERMINED
    rivals: tuple[Rival, ...] = ()
    if worst.state is State.SUSPECT:
        blame = _blame(record, worst.outliers)
        cause, action, rivals = blame.cause, blame.action, blame.rivals
        kind = None if newest.recording.of_kernel else triaged(record, newest.run, newest.recording, newest.baseline)
        if kind is not None:
            next_test = f"Test this next: {kind.next_boundary}, with: {kind.command}"
            evidence += [f"Kind of wrong answer: {kind.name}.", next_test]
        evidence += blame.evidence
    where = f"(case {newest.recording.case}{and_more(len(cases))})"
    return finding(
        *(_DEPARTURE_RULES[worst.state], worst.state, cause),
        f"{probe} {worst.differs} {where}{worst.outcome}.",
        action,
        *evidence,
        probe=probe,
        repro=newest.run.repeat,
        runs=tuple(dict.fromkeys(o.run.id for each in cases for o in each.outliers))[-RUNS_NAMED:],
        rivals=rivals,
    )


def _weigh(record: Record, outliers: Sequence[Observation]) -> _Weighed:
    """Return what the outliers of one case amount to, and by which test."""
    wanted, newest = record.policy.confirm_runs, outliers[-1]
    baseline, condition = newest.baseline, newest.recording.condition
    # Siblings compute the same: what none of them gave is as rare on this one.
    siblings = [b for _, b in record.voters(baseline) if b.digests & baseline.digests]
    rate = baseline.rate(condition, [*_alike(record, baseline), *siblings])
    grounds = f"A healthy device gives such results in at most {100 * rate:.2g} % of its runs"
    first_runs = [o.run for o in outliers if not o.run.confirms]
    repeated = max((sum(1 for o in outliers if o.run.confirms == run.id) for run in first_runs), default=0)
    differs, repeats = "differs from its baseline", f"; it repeats in {count(repeated, 'retest')}"

    def weighed(state: State, outcome: str, evidence: str, action: str = "", seen: str = differs) -> _Weighed:
        return _Weighed(outliers=outliers, state=state, differs=seen, outcome=outcome, evidence=evidence, action=action)

    # Where the baseline has idle samples, results under load do not count alone.
    if not any(is_comparable(baseline, o.recording) for o in outliers):
        why = "It differs only while the server has other requests. Right results can differ under another load."
        return weighed(State.HEALTHY, " only under load", why)
    if repeated >= wanted and rate**wanted <= ALPHA:
        by_chance = f"the probability that retests in new processes repeat it by chance is {rate**wanted:.1g}"
        return weighed(State.SUSPECT, repeats, f"{grounds}; {by_chance}.")
    # Of this case alone: that other cases are steadier does not tell how often this one gives new vectors.
    chance = tail(baseline.strange, baseline.trials, baseline.rate(condition, siblings))
    # Gauges are read before and after a request: what a server serves for a moment in between looks like a rare fault.
    reliable = condition != IDLE or baseline.stable(EVERY)
    if reliable and baseline.strange > 1 and chance <= ALPHA:
        often = f"differed from its baseline in {baseline.strange} of {baseline.trials} runs"
        by_chance = f"the probability that it comes so often by chance is {chance:.1g}"
        return weighed(State.SUSPECT, "", f"{grounds}; {by_chance}.", seen=often)
    if repeated >= wanted:
        more = "Wait for more runs: the record is too short to judge."
        return weighed(State.UNKNOWN, f"{repeats}; not judged yet", f"{grounds}.", more)
    reruns = {run.id: record.reruns.get(run.id, []) for run in first_runs}
    recent = [r for r in first_runs if record.now - r.started <= record.policy.repeat_window]
    waiting = [r for r in recent if len(reruns[r.id]) < wanted]
    if waiting:
        missing = count(wanted - len(reruns[waiting[-1].id]), "retest")
        return weighed(State.UNKNOWN, "; not judged yet", f"{grounds}.", f"Wait for {missing} in new processes.")
    outcome = "; retests match the baseline again" if any(reruns.values()) else "; it was not run again in time"
    why = "It may be a legitimate result that was not seen while learning, or a rare fault. It is counted."
    if record.is_endpoint and _stands(record, outliers):
        return weighed(State.UNKNOWN, f"{outcome}; not judged yet", why, NEXT_RUN)
    return weighed(State.HEALTHY, outcome, why)


def _weigh_runs(record: Record, probe: str, cases: Mapping[Key, Sequence[Observation]]) -> _Weighed | None:
    """Return what the outliers of all cases that repeat exactly amount to, run by run; None where that is nothing."""
    found, wanted = rounds(record, probe, cases), record.policy.confirm_runs
    if not found:
        return None
    newest, most = found[-1], max(found, key=lambda each: (each.repeats, each.run.started))
    others = _alike(record, newest.outliers[-1].baseline)

    def weighed(of: Round, state: State, outcome: str, evidence: str, action: str = "", seen: str = "") -> _Weighed:
        at_once = f"differs from its baseline in {len(of.outliers)} of {len(of.compared)} cases at once"
        outliers = (*of.outliers, *of.repeated)
        return _Weighed(
            outliers=outliers, state=state, differs=seen or at_once, outcome=outcome, evidence=evidence, action=action
        )

    rate = rate_of_any(most.asked, others) if most.asked else 1.0
    if len(most.outliers) > 1 and most.repeats >= wanted and rate**wanted <= ALPHA:
        grounds = f"A healthy device differs in any of the {len(most.asked)} repeated cases in at most"
        by_chance = f"the probability that every retest does so by chance is {rate**wanted:.1g}"
        outcome = f"; {count(most.repeats, 'retest')} differ too"
        return weighed(most, State.SUSPECT, outcome, f"{grounds} {100 * rate:.2g} % of its runs; {by_chance}.")
    times, runs, chance = newest.often(others)
    if times > 1 and chance <= ALPHA:
        often = f"differed from its baseline in {times} of {runs} runs"
        why = f"The probability that any case differs in so many runs by chance is {chance:.1g}."
        return weighed(newest, State.SUSPECT, "", why, seen=often)
    if newest.chance <= ALPHA and any(_stands(record, cases[o.baseline.key]) for o in newest.outliers):
        why = f"The probability of so many at once is {newest.chance:.1g} if cases vary independently of each other."
        return weighed(newest, State.UNKNOWN, "; not judged yet", why, NEXT_RUN)
    return None


def _stands(record: Record, outliers: Sequence[Observation]) -> bool:
    """Whether the newest scheduled run of a case, today's, gave unknown bits: nothing shows known ones since."""
    baseline = outliers[-1].baseline
    newest = max((o.run.started for o in outliers if not o.run.confirms), default=0.0)
    current = record.keys_in_order[variant_of(baseline)][-1] == baseline.key
    return current and baseline.since == 0 and record.now - newest <= record.policy.repeat_window


def _alike(record: Record, baseline: Baseline) -> list[Baseline]:
    """Return the baselines of the same probe and stack: what is rare in one case is as rare in another."""
    return [b for b in record.baselines.values() if b.probe == baseline.probe and b.stack == baseline.stack]


def _cleared(record: Record, baseline: Baseline) -> bool:
    """Whether the watch is over, with so many clean runs since that the earlier rate of outliers is ruled out.

    Where the chain changed meanwhile, clean runs on the new chain count.
    """
    if baseline.strange == 0:
        return False
    later = [
        b.passed.get(EVERY, 0)
        for b in record.baselines.values()
        if variant_of(b) == variant_of(baseline) and b.first > baseline.strange_at
    ]
    days = record.tested.get(baseline.probe, ())
    fresh = freshness(record.policy, record.wanted[baseline.probe]) if baseline.probe in record.wanted else 0.0
    watched = is_over(baseline.strange_at, record.now, record.policy.watch, days, fresh)
    return watched and outlasts(baseline.since + sum(later), baseline.trials, baseline.strange)


def _blame(record: Record, outliers: Sequence[Observation]) -> _Blame:
    """Return which side is at fault, by what the peers give on the same chain."""
    device, newest = record.device.name, outliers[-1]
    clean, alike = _peers_by_result(record, outliers)
    behind = devices_behind(record.device) if record.is_endpoint else [device]
    deep = "Run: canaryd check --level deep" + "".join(f" --device {name}" for name in behind)
    no_golden = Rival(
        cause=Cause.HARNESS,
        why="a wrong reference: results are compared with earlier ones, not with a reference",
        rejected=True,
    )
    if clean and not alike:
        names = listed(clean)
        software = Rival(
            cause=Cause.SOFTWARE, why=f"a change that canaryd does not see: it would show on {names} too", rejected=True
        )
        found = f"Same model and software, and no difference from the baseline: {names}."
        return _Blame(cause=Cause.HARDWARE, action=deep, evidence=(found,), rivals=(software, no_golden))
    if alike and not clean:
        names = listed(alike)
        hardware = Rival(
            cause=Cause.HARDWARE,
            why=f"a fault of this device alone: {names} would not give the same new results",
            rejected=True,
        )
        found = f"Same model and software, and the same new results: {names}."
        look = f"Find out what changed for {listed(sorted([device, *alike]))}."
        return _Blame(cause=Cause.SOFTWARE, action=look, evidence=(found,), rivals=(hardware, no_golden))
    other = "server of the same model, version" if record.is_endpoint else "device of the same model"
    peers = "nothing else on this host computes the same"
    if clean:
        peers = f"the baseline is matched by {listed(clean)}, the new results by {listed(alike)}"
    evidence = [f"Cause unknown: {peers}.", f"Compare with another {other} and software."]
    if record.is_endpoint and "checkpoint" not in newest.recording.chain:
        evidence.append(
            "Name the model's directory in the configuration (endpoints.NAME.directory): then canaryd can tell a"
            " changed model from a fault."
        )
    evidence.append(f'If the new results are right: canaryd baseline accept {device} --reason "…"')
    unseen = Rival(cause=Cause.SOFTWARE, why=f"a change that canaryd does not see: {peers}", rejected=False)
    return _Blame(cause=Cause.UNDETERMINED, action=deep, evidence=tuple(evidence), rivals=(unseen, no_golden))


def _peers_by_result(record: Record, outliers: Sequence[Observation]) -> tuple[list[str], list[str]]:
    """Return the peers that gave nothing but known vectors since the first outlier, and those that gave the same."""
    key, since = outliers[-1].baseline.key, outliers[0].run.started
    digests = {o.recording.digest for o in outliers}
    clean, alike, odd = set(), set(), set()
    for name, peer in sorted(record.peers.items()):
        for o in find_observations((r for r in peer.runs if r.started >= since), peer.baselines).get(key, ()):
            if o.recording.digest in digests:
                alike.add(name)
            elif o.recording.digest in outliers[-1].baseline.digests:
                clean.add(name)
            elif o.is_outlier:
                odd.add(name)
    return sorted(clean - odd - alike), sorted(alike)


# --- Changes of the chain --------------------------------------------------------------------------------------------


_Changed = tuple[Run, Recording, Baseline | None]
"""A recording on a chain that changed, its run, and its own baseline."""


def chain_changed(record: Record) -> Iterator[Finding]:
    """Results changed with the chain: name the links that changed, and accuse no device."""
    groups: dict[tuple[str, tuple[LinkChange, ...], bool], list[_Changed]] = defaultdict(list)
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        before = _compared_with(record, run, recording)
        own = record.baselines.get(key_of(run, recording))
        if before is None or recording.digest in known_digests(record.baselines, before.key):
            continue
        complete = own is not None and own.complete
        if own is not None and complete and (own.accepted or record.now - own.first > record.policy.week):
            continue
        if own is not None and complete and own.first <= before.first:
            continue  # back on a chain that was known before
        changes = changed_links({**before.stack, **before.chain}, {**run.stack, **recording.chain})
        groups[probe, changes, complete].append((run, recording, own))
    for (_, changes, _), cases in groups.items():
        yield _chain_change(record, changes, cases)


def _compared_with(record: Record, run: Run, recording: Recording) -> Baseline | None:
    """Return the baseline before the change; of an endpoint the one before another model too, while it is unconfirmed.

    A change of the model that nobody has confirmed yet is not confirmed by the next change, of the server say.
    """
    before = record.before(run, recording)
    if before is None or not record.is_endpoint:
        return before
    stands = record.before(run, recording, intended=True) or before
    other_model = any(change.link in MODEL_LINKS for change in changed_links(stands.chain, before.chain))
    return stands if other_model else before


def _chain_change(record: Record, changes: Sequence[LinkChange], cases: Sequence[_Changed]) -> Finding:
    run, recording, own = cases[0]
    complete = own is not None and own.complete
    samples = own.learnt.get(EVERY, 0) if own is not None else 0
    links = {change.link for change in changes}
    is_model = record.is_endpoint and not links.isdisjoint(MODEL_LINKS)
    other_operands = not record.is_endpoint and links == {"prompt"}
    unrecorded = not (record.is_endpoint or other_operands) and not any(c.before and c.after for c in changes)
    accept = f'canaryd baseline accept {record.device.name} --reason "…"'
    # Where no link differs, the probe has another version: its older results cannot be compared either.
    what = ", ".join(map(str, changes)) or "the version of the probe"
    evidence = [f"Changed: {what}.", "The device itself is not suspected."]
    if complete:
        action = f"If the change was intended: {accept}"
        evidence.append("The new results have their own baseline, which nothing has confirmed; the old one is kept.")
    else:
        action = f"Wait until the new baseline is ready ({samples} of {LEARN} samples)."
        evidence.append("The new results cannot be compared with the old ones.")
    cause = Cause.SOFTWARE
    unknown = is_model or other_operands or unrecorded or (record.is_endpoint and not complete)
    if other_operands:
        cause, evidence = Cause.HARDWARE, [*evidence, action]
        action = "Check this host's CPU and memory: they made other inputs from the same seed."
    elif unrecorded:
        cause = Cause.HARNESS
        evidence.append("The rest was not recorded and may have changed too.")
    names = listed([change.link for change in changes]) or "the probe"
    return finding(
        *("chain-changed", State.UNKNOWN if unknown else State.HEALTHY, cause),
        f"{run.probe} results changed after a change of {names} (case {recording.case}{and_more(len(cases))}).",
        action,
        *evidence,
        probe=run.probe,
        runs=(run.id,),
    )


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    departed,
    outvoted,
    unwitnessed,
    chain_changed,
    uncompared,
    learning,
    text_alone,
    symptom,
    slow,
)


def findings(record: Record) -> Iterator[Finding]:
    """Yield the findings of every rule."""
    for rule in RULES:
        yield from rule(record)
