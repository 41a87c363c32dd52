"""The judgement of recordings: from vectors that nobody could foresee to findings.

What differs from a baseline is first asked which link of the chain changed; only an unchanged chain accuses a device.
`RULES` are asked one by one; docs/baselines.md has them as a table, each with its false-alarm probability.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd.baseline import (
    EVERY,
    IDLE,
    LEARN,
    SLACK,
    Baseline,
    Departure,
    Key,
    changed,
    departure,
    key_of,
    learn,
    spoken,
)
from canaryd.config import JudgePolicy
from canaryd.model import Cause, Device, Finding, Outcome, Recording, Run, State
from canaryd.triage import BROKEN, Symptom, triage

ALPHA = 1e-3
"""Chance at which a healthy device may fail the test that follows its first unknown vector (ours)."""
RULE_OF_THREE = 3
"""No failure in n trials bounds the rate by about 3/n at 95 %."""
NEWEST = 3
"""Runs whose median latency stands for now, so that one busy moment is none (ours)."""
EARLIER = 10
"""Runs before these that must be known to call them slow (ours)."""
SLOWER, BUSY_SLOWER = 3.0, 10.0
"""Times the median of before from which an endpoint is called slow, when it is known that nobody else was served, and
when it is not: waiting for others is no fault (ours)."""
CACHES = ("fresh", "warm")
"""Last words of cases that are one question, asked past the prefix cache and through it."""
LATENCIES = {"endpoint_first_token_seconds": 0.1, "endpoint_token_seconds": 0.01}
"""Readings of an endpoint's speed, and by how many seconds one must have grown for anybody to notice (ours)."""

Lane = tuple[str, str, str]
"""Probe, case, and the instruction set that it was computed with: another one is no change of the chain."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another device or endpoint of this node."""

    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One recording held against its complete baseline."""

    run: Run
    recording: Recording
    baseline: Baseline
    departure: Departure | None
    """None where exactly these bits are known."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that the judgement of one device's recordings rests on. Runs are sorted by start, of one world."""

    device: Device
    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]
    policy: JudgePolicy
    now: float
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """By name."""

    @property
    def served(self) -> bool:
        """Whether it is an endpoint: recordings are then the only evidence."""
        return self.device.backend == "endpoint"

    @cached_property
    def sightings(self) -> dict[Key, list[Sighting]]:
        """Every recording with a complete baseline, by key, oldest first."""
        return _sightings(self.runs, self.baselines)

    @cached_property
    def newest(self) -> dict[Lane, tuple[Run, Recording]]:
        """The newest recording of every case, each way in which a CPU may be told to compute by itself."""
        return {_lane(run, recording): (run, recording) for run in self.runs for recording in run.recordings}

    @cached_property
    def past(self) -> dict[Lane, list[Key]]:
        """The keys that every case was recorded under, the newest last."""
        found: dict[Lane, dict[Key, None]] = defaultdict(dict)
        for run in self.runs:
            for recording in run.recordings:
                keys, key = found[_lane(run, recording)], key_of(run, recording)
                keys.pop(key, None)
                keys[key] = None
        return {lane: list(keys) for lane, keys in found.items()}

    def before(self, run: Run, recording: Recording) -> Baseline | None:
        """Return the complete baseline that a case was held against before its chain or stack became another."""
        own, lane = key_of(run, recording), _lane(run, recording)
        others = [
            b
            for b in self.baselines.values()
            if b.complete and b.key != own and (b.probe, b.case, b.stack.get("instruction_set", "")) == lane
        ]
        order = self.past.get(lane, [])
        return max(others, key=lambda b: (order.index(b.key) if b.key in order else -1, b.last), default=None)


def _lane(run: Run, recording: Recording) -> Lane:
    return run.probe, recording.case, run.stack.get("instruction_set", "")


def _kin(baselines: Mapping[Key, Baseline], key: Key) -> frozenset[str]:
    """Return the digests that pass for a case: its own, and those of the same question asked cold or warm.

    A server whose cache cannot be bypassed forgets when it likes: then the one is answered as the other was.
    """
    question, _, how = key[2].rpartition("/")
    cases = [f"{question}/{other}" for other in CACHES] if how in CACHES else [key[2]]
    found = (baselines.get((key[0], key[1], case, key[3], key[4])) for case in cases)
    return frozenset().union(*(b.digests for b in found if b is not None))


def _sightings(runs: Iterable[Run], baselines: Mapping[Key, Baseline]) -> dict[Key, list[Sighting]]:
    found: dict[Key, list[Sighting]] = defaultdict(list)
    kin: dict[Key, frozenset[str]] = {}
    for run in runs:
        for recording in run.recordings:
            key = key_of(run, recording)
            baseline = baselines.get(key)
            if key not in kin:
                kin[key] = _kin(baselines, key)
            # What it was learnt from says nothing about it.
            if baseline is not None and baseline.complete and run.started > baseline.last:
                seen = None if recording.digest in kin[key] else departure(baseline, recording)
                found[key].append(Sighting(run=run, recording=recording, baseline=baseline, departure=seen))
    return dict(found)


def intake(run: Run, baselines: Mapping[Key, Baseline], *, learns: bool) -> tuple[Run, dict[Key, Baseline]]:
    """Return a run as it is to be kept, and the baselines that learnt from it, if it `learns`.

    Of known vectors the digest is kept, for the baseline has the rest; unknown ones are kept whole, and named.
    """
    fresh: dict[Key, Baseline] = {}
    kept, strange = [], []
    for recording in run.recordings:
        key = key_of(run, recording)
        own = fresh.get(key) or baselines.get(key)
        if learns and (own is None or not own.complete):
            own = fresh[key] = learn(own, run, recording)
        if own is not None and recording.digest in _kin({**baselines, **fresh}, key):
            kept.append(
                Recording(case=own.case, digest=recording.digest, chain=own.chain, condition=recording.condition)
            )
            continue
        kept.append(recording)
        if own is not None and own.complete and (away := departure(own, recording)) is not None and away.beyond:
            strange.append(recording.case)
    return replace(run, recordings=tuple(kept), unknown=tuple(dict.fromkeys(strange))), fresh


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Where the newest recordings of one probe stand, those of one kind together (a case up to its first "/")."""

    probe: str
    reading: str
    status: Mapping[str, int]
    """Cases by status: "known" bits, "unknown" ones, or still "learning"."""
    ratio: float = 0.0
    """Largest distance over its tolerance: 0 while all bits are known, infinite where none is tolerated."""
    agreement: float = 1.0
    """Smallest share of tokens before the first that differs from the nearest known vector."""
    first: int | None = None
    """Earliest token that differs, from 0 on."""


def drifts(record: Record) -> tuple[Drift, ...]:
    """Return how far the newest recordings are from what is known, per probe and kind."""
    found: dict[tuple[str, str], Drift] = {}
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        kind = case.partition("/")[0]
        before = found.get(
            (probe, kind), Drift(probe=probe, reading=kind, status={"known": 0, "unknown": 0, "learning": 0})
        )
        own = record.baselines.get(key_of(run, recording))
        learnt = own is not None and own.complete
        away = departure(own, recording) if own is not None and learnt else None
        away = None if own is not None and recording.digest in _kin(record.baselines, own.key) else away
        status = "learning" if not learnt else "known" if away is None else "unknown"
        after = replace(before, status={**before.status, status: before.status[status] + 1})
        if away is not None:
            tolerance = 0.0 if own is None or own.stable(recording.condition) else SLACK * away.noise
            ratio = away.distance / tolerance if tolerance else math.inf
            length = max(len(away.known.tokens), 1)
            position = away.position if away.position is not None else length
            firsts = [p for p in (before.first, away.position) if p is not None]
            after = replace(
                after,
                ratio=max(before.ratio, ratio),
                agreement=min(before.agreement, position / length),
                first=min(firsts, default=None),
            )
        found[probe, kind] = after
    return tuple(found.values())


# --- Rules ----------------------------------------------------------------------------------------------------------


def departed(record: Record) -> Iterator[Finding]:
    """Unknown bits on an unchanged chain: confirmed by re-runs, or come back too often for what is known."""
    groups: dict[tuple[str, State, Cause, str], list[tuple[Sighting, str]]] = defaultdict(list)
    for key, seen in sorted(record.sightings.items()):
        away = [s for s in seen if s.departure is not None and s.departure.beyond]
        if not away or _over(record, seen, away):
            continue
        state, why = _weigh(record, seen, away)
        if state is State.SUSPECT and (kind := _triaged(record, away[-1].run, away[-1].recording, away[-1].baseline)):
            why += f" The answer is {kind.name}; next boundary to test: {kind.next_boundary}, with {kind.command}."
        cause, whose = (Cause.UNDETERMINED, "") if state is not State.SUSPECT else _blame(record, key, away)
        groups[key[0], state, cause, whose].append((away[-1], why))
    for (probe, state, cause, whose), cases in groups.items():
        last, why = cases[-1]
        more = f" (and {len(cases) - 1} more cases)" if len(cases) > 1 else ""
        text = f"{last.recording.case}{more}: unknown bits on an unchanged chain: {last.departure}. {why}"
        rule = {State.SUSPECT: "recording-departed", State.UNKNOWN: "recording-unconfirmed"}.get(
            state, "recording-not-repeated"
        )
        yield Finding(
            rule=rule,
            state=state,
            cause=cause if state is not State.HEALTHY else Cause.NONE,
            message=f"{text} {whose}".strip(),
            probe=probe,
            repro=last.run.repro,
            runs=tuple(dict.fromkeys(s.run.id for s, _ in cases)),
        )


def _weigh(record: Record, seen: Sequence[Sighting], away: Sequence[Sighting]) -> tuple[State, str]:
    """Return what unknown vectors of one case amount to, and the sentence that says by which test."""
    wanted = record.policy.confirm_runs
    condition = away[-1].recording.condition
    baseline = away[-1].baseline
    clean = sum(1 for s in seen if s.departure is None and not s.run.confirms)
    rate = baseline.rate(condition, clean)
    roots = {s.run.confirms or s.run.id for s in away}
    again = {root: [s for s in seen if s.run.confirms == root] for root in roots}
    best = max(sum(1 for s in mine if s.departure is not None and s.departure.beyond) for mine in again.values())
    grounds = f"a healthy device gives such bits in at most {rate:.2g} of its runs"
    if best >= wanted and rate**wanted <= ALPHA:
        chance = f"{rate**wanted:.1g}"
        return State.SUSPECT, f"{best} re-runs in new processes repeat it; {grounds}, so by chance: {chance}."
    if best >= wanted:
        return State.UNKNOWN, f"{best} re-runs repeat it, but the record is too short to tell ({grounds})."
    if any(len(mine) < wanted for mine in again.values() if not _late(record, mine)):
        newest = max(roots)
        if len(again[newest]) < wanted:
            return State.UNKNOWN, f"Next: {wanted - len(again[newest])} re-runs in new processes."
    week = [s for s in seen if not s.run.confirms and record.now - s.run.started <= record.policy.week]
    times = len({s.run.id for s in week if s.departure is not None and s.departure.beyond})
    chance_of = _tail(times, len(week), rate)
    if times > 1 and chance_of <= ALPHA:
        text = f"It came {times} times in {len(week)} runs within the week; {grounds}, so by chance: {chance_of:.1g}."
        return State.SUSPECT, text
    text = "Re-runs gave known bits again: a mode that was not met while learning, or a rare fault. It is counted."
    return State.HEALTHY, text


def _late(record: Record, again: Sequence[Sighting]) -> bool:
    """Whether confirmations that are still missing will not come any more."""
    return bool(again) and record.now - again[-1].run.started > record.policy.repeat_window


def _tail(times: int, trials: int, rate: float) -> float:
    """Return the chance of at least `times` events in `trials` at `rate` each (the binomial's upper tail)."""
    if times == 0:
        return 1.0
    below = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(times))
    return max(0.0, 1.0 - below)


def _over(record: Record, seen: Sequence[Sighting], away: Sequence[Sighting]) -> bool:
    """Whether the watch is over, with so many known vectors since that the old rate is ruled out."""
    last = away[-1].run.started
    before = [s for s in seen if s.run.started <= last]
    clean = sum(1 for s in seen if s.run.started > last and s.departure is None)
    return record.now - last >= record.policy.watch and clean * len(away) >= RULE_OF_THREE * len(before)


def _blame(record: Record, key: Key, away: Sequence[Sighting]) -> tuple[Cause, str]:
    """Return whose fault it is, by what others give for the same case on the same chain, and how that is known."""
    digests = {s.recording.digest for s in away}
    since = away[0].run.started
    right, alike = [], []
    for name, peer in sorted(record.peers.items()):
        for s in _sightings((r for r in peer.runs if r.started >= since), peer.baselines).get(key, ()):
            if s.recording.digest in digests:
                alike.append(name)
            elif s.recording.digest in away[-1].baseline.digests:
                right.append(name)
    names = ", ".join(sorted({*right}))
    if right and not alike:
        return Cause.HARDWARE, f"{names}, on the same chain, still gives the known bits."
    if alike and not right:
        shared = ", ".join(sorted({*alike}))
        return Cause.SOFTWARE, f"{shared}, on the same chain, gives the same new bits: look for what changed for both."
    what = "another server of the same model and version" if record.served else "another device of this model and stack"
    return Cause.UNDETERMINED, (
        f"Nobody else on this host computes the same, so whose fault it is stays open: ask {what}, and run "
        f"canaryd check --level deep{_on(record.device)}. To take it for right: "
        f"canaryd baseline accept {record.device.name}."
    )


def _on(device: Device) -> str:
    behind = device.detail.get("behind", "").split() if device.backend == "endpoint" else [device.name]
    return "".join(f" --device {name}" for name in behind)


def chain_changed(record: Record) -> Iterator[Finding]:
    """Another chain gives other bits: which link changed is said first, and no device is accused."""
    groups: dict[tuple[str, str, bool], list[tuple[Run, Recording, Baseline | None]]] = defaultdict(list)
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        before, own = record.before(run, recording), record.baselines.get(key_of(run, recording))
        if before is None or recording.digest in _kin(record.baselines, before.key):
            continue
        if own is not None and own.complete and record.now - own.first > record.policy.week:
            continue
        links = spoken(changed({**before.stack, **before.chain}, {**run.stack, **recording.chain}))
        groups[probe, links, own is not None and own.complete].append((run, recording, own))
    for (probe, links, learnt), cases in groups.items():
        run, recording, own = cases[0]
        have = own.learnt.get(EVERY, 0) if own is not None else 0
        text = f"{recording.case} and {len(cases) - 1} more" if len(cases) > 1 else recording.case
        text += f": the answer is another because the chain is: {links}. No device is accused. "
        text += (
            "What it gives now was learnt as a baseline of its own, which nobody has witnessed; the old one is kept."
            if learnt
            else f"It cannot be compared with before; a new baseline is being learnt, {have} of {LEARN} recordings."
        )
        state = State.UNKNOWN if record.served and not learnt else State.HEALTHY
        cause = Cause.SOFTWARE
        yield Finding(rule="chain-changed", state=state, cause=cause, message=text, probe=probe, runs=(run.id,))


def learning(record: Record) -> Iterator[Finding]:
    """There is nothing to compare with yet: said, for a first answer cannot be wrong."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for (probe, _, _), (run, recording) in record.newest.items():
        own = record.baselines.get(key_of(run, recording))
        if (own is None or not own.complete) and record.before(run, recording) is None:
            waiting[probe].append(own.learnt.get(EVERY, 0) if own is not None else 0)
    for probe, counts in sorted(waiting.items()):
        text = (
            f"{len(counts)} recorded cases are still being learnt (at least {min(counts)} of {LEARN} recordings each)"
        )
        text += ": until then they are compared with nothing"
        yield Finding(rule="baseline-learning", state=State.HEALTHY, cause=Cause.NONE, message=text, probe=probe)


def symptom(record: Record) -> Iterator[Finding]:
    """What a person would call broken output, whatever chain it came by; known bits are known to look as they do."""
    told = set()
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        baseline = record.baselines.get(key_of(run, recording))
        if baseline is not None and baseline.complete and recording.digest in _kin(record.baselines, baseline.key):
            continue
        known = baseline if baseline is not None and baseline.complete else record.before(run, recording)
        found = _triaged(record, run, _whole(recording, baseline), known)
        if found is None or found.name not in BROKEN or (known is None and found.certainty != "certain"):
            continue
        if found.name in told:
            continue
        told.add(found.name)
        others = f" ({found.scope})" if found.scope else ""
        causes = "; ".join(f"{s.what} ({s.why})" for s in found.causes[:3])
        text = (
            f"{case}: {found.name}{others}, {found.certainty}: {found.evidence}. In order of likelihood: {causes}. "
            f"Next boundary to test: {found.next_boundary}, with {found.command}"
        )
        yield Finding(
            rule="broken-output",
            state=State.SUSPECT,
            cause=Cause.UNDETERMINED,
            message=text,
            probe=probe,
            repro=run.repro,
            runs=(run.id,),
        )


def _triaged(record: Record, run: Run, recording: Recording, known: Baseline | None) -> Symptom | None:
    """Return what kind of answer a recording is, beside what others of this node answer to the same."""
    behind = record.device.detail.get("behind", "").split() if record.served else []
    return triage(
        recording,
        [k.recording for k in known.known] if known is not None else (),
        others={name: _symptom_of(peer, run.probe, recording.case) for name, peer in _askers(record, run, recording)},
        devices=max(1, len(behind)),
        device=behind[0] if behind else record.device.name,
    )


def _whole(recording: Recording, own: Baseline | None) -> Recording:
    """Return a recording with what its baseline keeps of it."""
    kept = (k.recording for k in own.known) if own is not None else ()
    return next((k for k in kept if k.digest == recording.digest), recording)


def _askers(record: Record, run: Run, recording: Recording) -> Iterator[tuple[str, Peer]]:
    """Yield the peers that have recorded the same case."""
    for name, peer in sorted(record.peers.items()):
        if any(r.probe == run.probe and s.case == recording.case for r in peer.runs for s in r.recordings):
            yield name, peer


def _symptom_of(peer: Peer, probe: str, case: str) -> str:
    """Return the name of what is wrong with a peer's newest answer to a case; "" for nothing."""
    run, newest = max(
        ((r, s) for r in peer.runs if r.probe == probe for s in r.recordings if s.case == case),
        key=lambda pair: pair[0].started,
    )
    own = peer.baselines.get(key_of(run, newest))
    if own is not None and own.complete and newest.digest in own.digests:
        return ""
    found = triage(_whole(newest, own), [k.recording for k in own.known] if own is not None else ())
    return "" if found is None else found.name


def slow(record: Record) -> Iterator[Finding]:
    """The same chain answers several times slower than before: the numbers are right, something holds it up."""
    values: dict[tuple[str, str], list[tuple[Run, float]]] = defaultdict(list)
    for run in (r for r in record.runs if r.outcome is Outcome.COMPLETED and r.whole):
        for reading in run.readings:
            if reading.name in LATENCIES:
                values[run.probe, reading.key].append((run, float(reading.value)))
    for (probe, key), listed in sorted(values.items()):
        factor = BUSY_SLOWER
        if all(_idle(run) for run, _ in listed[-NEWEST:]):  # nobody else was served: then it cannot be their doing
            factor, listed = SLOWER, [(run, v) for run, v in listed if _idle(run)]  # noqa: PLW2901
        now, before = [v for _, v in listed[-NEWEST:]], [v for _, v in listed[:-NEWEST]]
        if len(now) < NEWEST or len(before) < EARLIER:
            continue
        usual, present = statistics.median(before), statistics.median(now)
        if present > factor * usual and present - usual > LATENCIES[key.partition("{")[0]]:
            text = (
                f"{key} is {present:.3g} s, {present / usual:.1f} times the {usual:.3g} s of {len(before)} runs before:"
                " look for other load, throttling, and a cache that is gone"
            )
            yield Finding(
                rule="endpoint-slow",
                state=State.DEGRADED,
                cause=Cause.ENVIRONMENT,
                message=text,
                probe=probe,
                runs=(listed[-1][0].id,),
            )


def _idle(run: Run) -> bool:
    return bool(run.recordings) and all(r.condition == IDLE for r in run.recordings)


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (departed, chain_changed, learning, symptom, slow)


def findings(record: Record) -> Iterator[Finding]:
    """Yield what every rule finds."""
    for rule in RULES:
        yield from rule(record)
