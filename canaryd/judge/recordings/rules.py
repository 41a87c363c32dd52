"""Judge recordings: from results that nobody could predict to findings.

Where a result differs from its baseline, the first question is which link of the chain changed; only an unchanged chain
accuses a device. `RULES` run one by one; docs/baselines.md lists them, each with its probability of a false alarm.
"""

from __future__ import annotations

import enum
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from canaryd.facts import LINKS, Recording
from canaryd.judge.recordings.baseline import (
    EVERY,
    IDLE,
    LEARN,
    Baseline,
    LinkChange,
    changed_links,
    key_of,
)
from canaryd.judge.recordings.intake import is_comparable
from canaryd.judge.recordings.record import (
    Observation,
    Record,
    devices_behind,
    find_observations,
    known_digests,
    variant_of,
)
from canaryd.judge.recordings.symptoms import symptom, triaged
from canaryd.judge.recordings.votes import outvoted, unwitnessed
from canaryd.judge.statistics import outlasts, tail
from canaryd.judge.wording import and_more, count, listed
from canaryd.model import Cause, Finding, Outcome, Rival, Run, State

ALPHA = 1e-3
"""Probability at which a healthy device may fail a test of unknown vectors, each time it is made (ours): by re-runs
9.5e-4 at most; by their frequency 1.4 % within 1,000 runs at the bound."""
RUNS_NAMED = 16
"""Newest run ids listed in one finding."""
NEWEST = 3
"""Runs whose median is the current latency, so that one busy moment does not count (ours). False alarms: 3.0e-4 a look
if one run in 100 is so slow."""
EARLIER = 10
"""Earlier runs that a comparison of latencies needs at least (ours)."""
SLOWER, BUSY_SLOWER = 3.0, 10.0
"""Times the earlier median from which an endpoint is slow: when it is known that it served nobody else, and when it is
not, since waiting for others is no fault (ours)."""
MODEL_LINKS = LINKS[: LINKS.index("prompt")]
"""Links that make it another model: an operator should confirm that the change was intended."""
LATENCIES = {"endpoint_first_token_seconds": 0.1, "endpoint_token_seconds": 0.01}
"""Readings of an endpoint's speed, and by how many seconds one must have grown to matter (ours)."""


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
    by_probe: dict[str, list[_Weighed]] = defaultdict(list)
    for key, observations in sorted(record.observations.items()):
        outliers = [o for o in observations if o.is_outlier]
        if outliers and not _cleared(record, outliers[-1].baseline):
            by_probe[key.probe].append(_weigh(record, outliers))
    for probe, weighed in by_probe.items():
        yield _departure(record, probe, weighed)


def _departure(record: Record, probe: str, cases: Sequence[_Weighed]) -> Finding:
    """Return the finding on all outliers of one probe; the most severe case stands for them."""
    worst = max(cases, key=lambda each: each.state.severity)
    newest = worst.newest
    action, evidence = worst.action, ["The chain and the stack did not change."]
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
            next_test = f"Next boundary to test: {kind.next_boundary}, with: {kind.command}"
            evidence += [f"The answer is: {kind.name}.", next_test]
        evidence += blame.evidence
    where = f"(case {newest.recording.case}{and_more(len(cases))})"
    return Finding(
        rule=_DEPARTURE_RULES[worst.state],
        state=worst.state,
        cause=cause,
        message=f"{probe} {worst.differs} {where}{worst.outcome}.",
        action=action,
        evidence=tuple(evidence),
        probe=probe,
        repro=newest.run.repro,
        runs=tuple(dict.fromkeys(o.run.id for each in cases for o in each.outliers))[-RUNS_NAMED:],
        rivals=rivals,
    )


def _weigh(record: Record, outliers: Sequence[Observation]) -> _Weighed:
    """Return what the outliers of one case amount to, and by which test."""
    wanted, newest = record.policy.confirm_runs, outliers[-1]
    baseline, condition = newest.baseline, newest.recording.condition
    # What healthy hardware rarely does in one case of a probe, it does as rarely in another.
    others = [b for b in record.baselines.values() if b.probe == baseline.probe and b.stack == baseline.stack]
    rate = baseline.rate(condition, others)
    grounds = f"A healthy device gives such results in at most {100 * rate:.2g} % of its runs"
    first_runs = [o.run for o in outliers if not o.run.confirms]
    repeated = max((sum(1 for o in outliers if o.run.confirms == run.id) for run in first_runs), default=0)
    differs, repeats = "differs from its baseline", f"; it repeats in {count(repeated, 're-run')}"

    def weighed(state: State, outcome: str, evidence: str, action: str = "", seen: str = differs) -> _Weighed:
        return _Weighed(outliers=outliers, state=state, differs=seen, outcome=outcome, evidence=evidence, action=action)

    # Where the baseline has idle samples, results under load do not count alone.
    if not any(is_comparable(baseline, o.recording) for o in outliers):
        why = "It differs only while others are served, never when idle; other loads have other legitimate results."
        return weighed(State.HEALTHY, " only under load", why)
    if repeated >= wanted and rate**wanted <= ALPHA:
        by_chance = f"the probability that re-runs in new processes repeat it by chance is {rate**wanted:.1g}"
        return weighed(State.SUSPECT, repeats, f"{grounds}; {by_chance}.")
    # Of this case alone: that other cases are steadier does not tell how often this one gives new vectors.
    chance = tail(baseline.strange, baseline.trials, baseline.rate(condition))
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
        missing = count(wanted - len(reruns[waiting[-1].id]), "re-run")
        return weighed(State.UNKNOWN, "; not judged yet", f"{grounds}.", f"Wait for {missing} in new processes.")
    outcome = "; re-runs match the baseline again" if any(reruns.values()) else "; it was not run again in time"
    why = "It may be a legitimate result that was not seen while learning, or a rare fault. It is counted."
    return weighed(State.HEALTHY, outcome, why)


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
    watched = min(record.now, record.reached) - baseline.strange_at >= record.policy.watch
    return watched and outlasts(baseline.since + sum(later), baseline.trials, baseline.strange)


def _blame(record: Record, outliers: Sequence[Observation]) -> _Blame:
    """Return which side is at fault, by what the peers give on the same chain."""
    device, newest = record.device.name, outliers[-1]
    clean, alike = _peers_by_result(record, outliers)
    behind = devices_behind(record.device) if record.is_endpoint else [device]
    deep = "Run: canaryd check --level deep" + "".join(f" --device {name}" for name in behind)
    no_golden = Rival(
        cause=Cause.HARNESS, why="a wrong golden: results are compared with earlier ones, not a golden", rejected=True
    )
    if clean and not alike:
        names = listed(clean)
        software = Rival(
            cause=Cause.SOFTWARE, why=f"a change outside the chain: it would show on {names} too", rejected=True
        )
        found = f"Matching the baseline on the same chain: {names}."
        return _Blame(cause=Cause.HARDWARE, action=deep, evidence=(found,), rivals=(software, no_golden))
    if alike and not clean:
        names = listed(alike)
        hardware = Rival(
            cause=Cause.HARDWARE,
            why=f"a fault of this device alone: {names} would not give the same new results",
            rejected=True,
        )
        found = f"Same new results on the same chain: {names}."
        look = f"Find out what changed for {device} and {names}."
        return _Blame(cause=Cause.SOFTWARE, action=look, evidence=(found,), rivals=(hardware, no_golden))
    other = "server of the same model, version" if record.is_endpoint else "device of the same model"
    peers = "nothing else on this host computes the same"
    if clean:
        peers = f"the baseline is matched by {listed(clean)}, the new results by {listed(alike)}"
    evidence = [f"Cause unknown: {peers}.", f"Compare with another {other} and stack."]
    if record.is_endpoint and "checkpoint" not in newest.recording.chain:
        evidence.append(
            "The checkpoint is not in the chain: name its directory in the configuration, so that canaryd can tell a"
            " changed model from a fault."
        )
    evidence.append(f'If the new results are right: canaryd baseline accept {device} --reason "…"')
    unseen = Rival(cause=Cause.SOFTWARE, why=f"a change outside the chain: {peers}", rejected=False)
    return _Blame(cause=Cause.UNDETERMINED, action=deep, evidence=tuple(evidence), rivals=(unseen, no_golden))


def _peers_by_result(record: Record, outliers: Sequence[Observation]) -> tuple[list[str], list[str]]:
    """Return the peers that still gave known vectors since the first outlier, and those that gave the same outliers."""
    key, since = outliers[-1].baseline.key, outliers[0].run.started
    digests = {o.recording.digest for o in outliers}
    clean, alike = set(), set()
    for name, peer in sorted(record.peers.items()):
        for o in find_observations((r for r in peer.runs if r.started >= since), peer.baselines).get(key, ()):
            if o.recording.digest in digests:
                alike.add(name)
            elif o.recording.digest in outliers[-1].baseline.digests:
                clean.add(name)
    return sorted(clean), sorted(alike)


# --- Changes of the chain --------------------------------------------------------------------------------------------


class _Change(enum.Enum):
    """What a change of the chain means for its cause."""

    MODEL = "model"
    OPERANDS = "operands"
    UNKNOWN_LINK = "a link is not known"
    OTHER = "other"


def chain_changed(record: Record) -> Iterator[Finding]:
    """Results changed with the chain: name the links that changed, and accuse no device."""
    groups: dict[tuple[str, tuple[LinkChange, ...], bool], list[tuple[Run, Recording, Baseline | None]]] = defaultdict(
        list
    )
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        before, own = record.before(run, recording), record.baselines.get(key_of(run, recording))
        if before is None or recording.digest in known_digests(record.baselines, before.key):
            continue
        complete = own is not None and own.complete
        if own is not None and complete and (own.accepted or record.now - own.first > record.policy.week):
            continue
        if own is not None and complete and own.first <= before.first:
            continue  # back on a chain that was known before
        changes = changed_links({**before.stack, **before.chain}, {**run.stack, **recording.chain})
        groups[probe, changes, complete].append((run, recording, own))
    for (_, changes, complete), cases in groups.items():
        yield _chain_change(record, changes, cases, complete=complete)


def _chain_change(
    record: Record,
    changes: tuple[LinkChange, ...],
    cases: Sequence[tuple[Run, Recording, Baseline | None]],
    *,
    complete: bool,
) -> Finding:
    run, recording, own = cases[0]
    samples = own.learnt.get(EVERY, 0) if own is not None else 0
    kind = _kind_of_change(record, changes)
    accept = f'canaryd baseline accept {record.device.name} --reason "…"'
    # Where no link differs, the probe has another version: its older results cannot be compared either.
    what = ", ".join(map(str, changes)) or "the version of the probe"
    evidence = [f"Changed: {what}.", "The device itself is not accused."]
    if complete:
        action = f"If the change was intended: {accept}"
        evidence.append("The new results have their own baseline, which nothing has confirmed; the old one is kept.")
    else:
        action = f"Wait until the new baseline is ready ({samples} of {LEARN} samples)."
        evidence.append("The new results cannot be compared with the old ones.")
    cause, unknown = Cause.SOFTWARE, kind is not _Change.OTHER or (record.is_endpoint and not complete)
    if kind is _Change.OPERANDS:
        cause, evidence = Cause.HARDWARE, [*evidence, action]
        action = "Check this host's CPU and memory: they made other operands from the same seed."
    elif kind is _Change.UNKNOWN_LINK:
        cause = Cause.HARNESS
        evidence.append("A link that is not known does not prove a change: the results may differ for another reason.")
    names = listed([change.link for change in changes]) or "the probe"
    return Finding(
        rule="chain-changed",
        state=State.UNKNOWN if unknown else State.HEALTHY,
        cause=cause,
        message=f"{run.probe} results changed after a change of {names} (case {recording.case}{and_more(len(cases))}).",
        action=action,
        evidence=tuple(evidence),
        probe=run.probe,
        runs=(run.id,),
    )


def _kind_of_change(record: Record, changes: Sequence[LinkChange]) -> _Change:
    links = {change.link for change in changes}
    if record.is_endpoint:
        return _Change.MODEL if links & {*MODEL_LINKS} else _Change.OTHER
    if links == {"prompt"}:
        return _Change.OPERANDS
    return _Change.UNKNOWN_LINK if all(not (c.before and c.after) for c in changes) else _Change.OTHER


# --- Baselines that say little yet -----------------------------------------------------------------------------------


def learning(record: Record) -> Iterator[Finding]:
    """Report baselines that are not ready, or too new to be trusted: a first answer cannot be called wrong."""
    samples: dict[str, list[int]] = defaultdict(list)
    fresh: dict[str, list[Baseline]] = defaultdict(list)
    for (probe, _, _), (run, recording) in record.newest.items():
        own = record.baselines.get(key_of(run, recording))
        if (own is None or not own.complete) and record.before(run, recording) is None:
            samples[probe].append(own.learnt.get(EVERY, 0) if own is not None else 0)
        if own is None or not own.complete or not record.is_endpoint or own.accepted:
            continue
        if not (own.passed or own.strange) or record.now - own.first <= record.policy.week:
            fresh[probe].append(own)
    for probe, baselines in sorted(fresh.items()):
        yield _fresh(probe, baselines)
    for probe, counts in sorted(samples.items()):
        least = f"at least {min(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
        have = "has" if len(counts) == 1 else "have"
        message = (
            f"Baseline not ready: {count(len(counts), 'case')} {have} {least} of {LEARN} samples; not checked yet."
        )
        yield Finding(rule="baseline-learning", state=State.HEALTHY, cause=Cause.NONE, message=message, probe=probe)


def _fresh(probe: str, baselines: Sequence[Baseline]) -> Finding:
    """Return the finding on baselines of an endpoint that are new."""
    what = count(len(baselines), "case")
    if not any(b.passed or b.strange for b in baselines):
        return Finding(
            rule="baseline-fresh",
            state=State.UNKNOWN,
            cause=Cause.UNDETERMINED,
            message=f"New baseline: {what} learnt just now; not compared with a run yet.",
            probe=probe,
        )
    exact = sum(b.stable(IDLE) for b in baselines)
    return Finding(
        rule="baseline-fresh",
        state=State.HEALTHY,
        cause=Cause.NONE,
        message=f"New baseline: {what} learnt within the last week; not confirmed by another source.",
        evidence=(
            "A model that was broken from the start would pass.",
            f"{exact} of {len(baselines)} are compared bit by bit, the others within their noise.",
        ),
        probe=probe,
    )


# --- Speed -----------------------------------------------------------------------------------------------------------


def slow(record: Record) -> Iterator[Finding]:
    """The same chain answers several times slower than before: the results are right, but late."""
    values: dict[tuple[str, str, str], list[tuple[Run, float]]] = defaultdict(list)
    for run in (r for r in record.runs if r.outcome is Outcome.COMPLETED and r.whole):
        for reading in run.readings:
            if reading.name in LATENCIES:
                values[run.probe, reading.name, reading.key].append((run, float(reading.value)))
    for (probe, name, key), series in sorted(values.items()):
        serving = _serving_links(series[-1][0])
        series = [(run, v) for run, v in series if _serving_links(run) == serving]  # noqa: PLW2901
        factor = BUSY_SLOWER
        if all(_idle(run) for run, _ in series[-NEWEST:]):  # it served nobody else: others cannot explain it
            factor, series = SLOWER, [(run, v) for run, v in series if _idle(run)]  # noqa: PLW2901
        now, before = [v for _, v in series[-NEWEST:]], [v for _, v in series[:-NEWEST]]
        if len(now) < NEWEST or len(before) < EARLIER:
            continue
        usual, present = statistics.median(before), statistics.median(now)
        if present > factor * usual and present - usual > LATENCIES[name]:
            yield Finding(
                rule="endpoint-slow",
                state=State.DEGRADED,
                cause=Cause.ENVIRONMENT,
                message=f"Slow: {key} is {present:.3g} s, {present / usual:.1f} times the usual {usual:.3g} s.",
                action="Look for other load, throttling or a lost cache.",
                evidence=(f"Medians of the newest {NEWEST} runs and of the {len(before)} runs before.",),
                probe=probe,
                runs=(series[-1][0].id,),
            )


def _serving_links(run: Run) -> object:
    """Return the links of a run's chain that decide how fast it is answered."""
    chain = run.recordings[0].chain if run.recordings else {}
    return tuple(chain.get(link, "") for link in ("dtype", "checkpoint", "config", "server", "client"))


def _idle(run: Run) -> bool:
    return bool(run.recordings) and all(r.condition == IDLE for r in run.recordings)


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (
    departed,
    outvoted,
    unwitnessed,
    chain_changed,
    learning,
    symptom,
    slow,
)


def findings(record: Record) -> Iterator[Finding]:
    """Yield the findings of every rule."""
    for rule in RULES:
        yield from rule(record)
