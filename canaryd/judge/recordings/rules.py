"""The judgement of recordings: from vectors that nobody could foresee to findings.

What differs from a baseline is first asked which link of the chain changed; only an unchanged chain accuses a device.
`RULES` are asked one by one; docs/baselines.md has them as a table, each with its false-alarm probability.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from canaryd.judge.recordings.baseline import (
    EVERY,
    IDLE,
    LEARN,
    Baseline,
    Key,
    changed,
    key_of,
    spoken,
)
from canaryd.judge.recordings.intake import tells
from canaryd.judge.recordings.record import Peer, Record, Sighting, accepted_digests, find_sightings
from canaryd.judge.recordings.triage import BROKEN, Symptom, triage
from canaryd.judge.statistics import outlasts, tail
from canaryd.model import LINKS, Cause, Device, Finding, Outcome, Recording, Rival, Run, State

ALPHA = 1e-3
"""Chance at which a healthy device may fail a test of unknown bits, each time it is made (ours): by re-runs 9.5e-4 at
most; by how often they come 1.4 % within 1,000 runs at the bound."""
PROCESSES = 3
"""Processes that a vote takes at least: what one of them gives may stick to it (ours). False alarms: where each of two
modes sticks to a process with even chances, 1 in 4 of such devices still votes for one of them alone."""
RUNS_NAMED = 16
"""Newest run ids listed in one finding."""
NEWEST = 3
"""Runs whose median latency stands for now, so that one busy moment is none (ours). False alarms: 3.0e-4 a look if one
run in 100 is so slow."""
EARLIER = 10
"""Runs before these that must be known to call them slow (ours)."""
SLOWER, BUSY_SLOWER = 3.0, 10.0
"""Times the median of before from which an endpoint is called slow, when it is known that nobody else was served, and
when it is not: waiting for others is no fault (ours)."""
MODEL_LINKS = LINKS[: LINKS.index("prompt")]
"""Links that make it another model: an operator should say that this was meant."""
LATENCIES = {"endpoint_first_token_seconds": 0.1, "endpoint_token_seconds": 0.01}
"""Readings of an endpoint's speed, and by how many seconds one must have grown for anybody to notice (ours)."""


def departed(record: Record) -> Iterator[Finding]:
    """Unknown bits on an unchanged chain: confirmed by re-runs, or come back too often for what is known."""
    groups: dict[str, list[tuple[State, Key, list[Sighting], str]]] = defaultdict(list)
    for key, seen in sorted(record.sightings.items()):
        away = [s for s in seen if s.departure is not None and s.departure.beyond]
        if away and not _over(record, away[-1].baseline):
            state, why = _weigh(record, away)
            groups[key[0]].append((state, key, away, why))
    for probe, cases in groups.items():
        state, key, away, why = max(cases, key=lambda case: case[0].severity)
        last = away[-1]
        cause, whose = Cause.UNDETERMINED, ""
        rivals: tuple[Rival, ...] = ()
        if state is State.SUSPECT:
            cause, whose, rivals = _blame(record, key, away)
            kind = None if last.recording.of_kernel else _triaged(record, last.run, last.recording, last.baseline)
            if kind is not None:
                why += f" The answer is {kind.name}; next boundary to test: {kind.next_boundary}, with {kind.command}."
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
            runs=tuple(dict.fromkeys(s.run.id for _, _, listed, _ in cases for s in listed))[-RUNS_NAMED:],
            rivals=rivals,
        )


def _weigh(record: Record, away: Sequence[Sighting]) -> tuple[State, str]:
    """Return what unknown vectors of one case amount to, and the sentence that says by which test."""
    wanted, baseline = record.policy.confirm_runs, away[-1].baseline
    # What healthy hardware does seldom, it does as seldom in one case of a probe as in another.
    others = [b for b in record.baselines.values() if b.probe == baseline.probe and b.stack == baseline.stack]
    rate = baseline.rate(away[-1].recording.condition, others)
    grounds = f"a healthy device gives such bits in at most {rate:.2g} of its runs"
    roots = [s.run for s in away if not s.run.confirms]
    again = {root.id: record.reruns.get(root.id, []) for root in roots}
    repeated = max((sum(1 for s in away if s.run.confirms == root.id) for root in roots), default=0)
    if not _speaks(baseline, away):
        text = "Others were served at the same time, and idle it has not given unknown bits: load has modes of its own."
        return State.HEALTHY, text
    if repeated >= wanted and rate**wanted <= ALPHA:
        chance = f"{rate**wanted:.1g}"
        return State.SUSPECT, f"{repeated} re-runs in new processes repeat it; {grounds}, so by chance: {chance}."
    # Up to the newest of them: clean runs since then must not talk it away, the way out takes a month of them.
    trials = baseline.passed.get(EVERY, 0) - baseline.since + baseline.strange
    # Of this case alone: that others of its probe are steadier says nothing of how often it is strange.
    chance_of = tail(baseline.strange, trials, baseline.rate(away[-1].recording.condition))
    # A server's gauges are read before and after: what it served in between, for a moment, shows as a rare idle fault.
    counts = away[-1].recording.condition != IDLE or baseline.stable(EVERY)
    if counts and baseline.strange > 1 and chance_of <= ALPHA:
        text = f"It came in {baseline.strange} of {trials} runs; {grounds}, so by chance: {chance_of:.1g}."
        return State.SUSPECT, text
    if repeated >= wanted:
        return State.UNKNOWN, f"{repeated} re-runs repeat it, but the record is too short to tell ({grounds})."
    waiting = [r for r in roots if len(again[r.id]) < wanted and record.now - r.started <= record.policy.repeat_window]
    if waiting:
        return State.UNKNOWN, f"Next: {wanted - len(again[waiting[-1].id])} re-runs in new processes."
    known = "Re-runs gave known bits again" if any(again.values()) else "It was not run again in time"
    return State.HEALTHY, f"{known}: a mode that was not met while learning, or a rare fault. It is counted."


def _speaks(baseline: Baseline, away: Sequence[Sighting]) -> bool:
    """Whether unknown vectors count: where idle answers can be had, those under load do not count alone."""
    return any(tells(baseline, s.recording) for s in away)


def _over(record: Record, baseline: Baseline) -> bool:
    """Whether the watch is over, with so many known vectors since that the old rate is ruled out.

    Where the chain has become another meanwhile, what was known on that counts.
    """
    if baseline.strange == 0:
        return False
    case = baseline.probe, baseline.case, baseline.stack.get("instruction_set", "")
    later = [
        b.passed.get(EVERY, 0)
        for b in record.baselines.values()
        if (b.probe, b.case, b.stack.get("instruction_set", "")) == case and b.first > baseline.strange_at
    ]
    clean = baseline.since + sum(later)
    before = baseline.passed.get(EVERY, 0) - baseline.since + baseline.strange
    watched = min(record.now, record.reached) - baseline.strange_at >= record.policy.watch
    return watched and outlasts(clean, before, baseline.strange)


def _blame(record: Record, key: Key, away: Sequence[Sighting]) -> tuple[Cause, str, tuple[Rival, ...]]:
    """Return whose fault it is, by what others give on the same chain, why, and what else was considered."""
    digests = {s.recording.digest for s in away}
    since = away[0].run.started
    right, alike = set(), set()
    for name, peer in sorted(record.peers.items()):
        for s in find_sightings((r for r in peer.runs if r.started >= since), peer.baselines).get(key, ()):
            if s.recording.digest in digests:
                alike.add(name)
            elif s.recording.digest in away[-1].baseline.digests:
                right.add(name)
    names, shared = ", ".join(sorted(right)), ", ".join(sorted(alike))
    reference = Rival(
        cause=Cause.HARNESS, why="a wrong golden: bits are compared with bits, no golden is involved", rejected=True
    )
    if right and not alike:
        text = f"{names}, on the same chain, still gives the known bits."
        software = f"a change that is not in the chain: {names} would have met it too"
        return Cause.HARDWARE, text, (Rival(cause=Cause.SOFTWARE, why=software, rejected=True), reference)
    if alike and not right:
        text = f"{shared}, on the same chain, gives the same new bits: look for what changed for both."
        own = f"a fault of this device alone: {shared} would not give the same bits"
        return Cause.SOFTWARE, text, (Rival(cause=Cause.HARDWARE, why=own, rejected=True), reference)
    what = "another server of the same model and version" if record.served else "another device of this model and stack"
    blind = ""
    if record.served and "checkpoint" not in away[-1].recording.chain:
        blind = (
            "The checkpoint is no part of the chain: name its directory in the configuration, which tells a changed"
            " model from a fault. "
        )
    text = (
        f"{blind}Nobody else on this host computes the same, so whose fault it is stays open: ask {what}, and run "
        f"canaryd check --level deep{_on(record.device)}. To take it for right: "
        f'canaryd baseline accept {record.device.name} --reason "…"'
    )
    unseen = "a change that is not in the chain: nobody else on this host computes the same"
    return Cause.UNDETERMINED, text, (Rival(cause=Cause.SOFTWARE, why=unseen, rejected=False), reference)


def _on(device: Device) -> str:
    behind = device.detail.get("behind", "").split() if device.is_endpoint else [device.name]
    return "".join(f" --device {name}" for name in behind)


def chain_changed(record: Record) -> Iterator[Finding]:
    """Another chain gives other bits: which link changed is said first, and no device is accused."""
    groups: dict[tuple[str, str, bool, str], list[tuple[Run, Recording, Baseline | None]]] = defaultdict(list)
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        before, own = record.before(run, recording), record.baselines.get(key_of(run, recording))
        if before is None or recording.digest in accepted_digests(record.baselines, before.key):
            continue
        if own is not None and own.complete and (own.accepted or record.now - own.first > record.policy.week):
            continue
        if own is not None and own.complete and own.first <= before.first:
            continue  # back on a chain that was known before
        differ = changed({**before.stack, **before.chain}, {**run.stack, **recording.chain})
        groups[probe, spoken(differ), own is not None and own.complete, _kind(record, differ)].append(
            (run, recording, own)
        )
    for (probe, links, learnt, kind), cases in groups.items():
        run, recording, own = cases[0]
        have = own.learnt.get(EVERY, 0) if own is not None else 0
        text = f"{recording.case} and {len(cases) - 1} more" if len(cases) > 1 else recording.case
        text += f": the answer is another because the chain is: {links}. No device is accused. "
        text += (
            "What it gives now was learnt as a baseline of its own, which nobody has witnessed; the old one is kept. "
            f'If the change was meant: canaryd baseline accept {record.device.name} --reason "…"'
            if learnt
            else f"It cannot be compared with before; a new baseline is being learnt, {have} of {LEARN} recordings."
        )
        unknown = kind != "other" or (record.served and not learnt)
        state, cause = (State.UNKNOWN if unknown else State.HEALTHY), Cause.SOFTWARE
        if kind == "operands":
            cause = Cause.HARDWARE
            text += (
                ". The operands come from one seed and were made otherwise: look at this host's processor and memory"
            )
        elif kind == "blind":
            cause = Cause.HARNESS
            text += ". A link that is not known is no change: what else it may be is not known either"
        yield Finding(rule="chain-changed", state=state, cause=cause, message=text, probe=probe, runs=(run.id,))


def _kind(record: Record, differ: Sequence[tuple[str, str, str]]) -> str:
    """Return what it takes to believe that a chain was changed: "model", "operands", "blind", or "other"."""
    links = {link for link, _, _ in differ}
    if record.served:
        return "model" if links & {*MODEL_LINKS} else "other"
    if links == {"prompt"}:
        return "operands"
    return "blind" if all(not (before and after) for _, before, after in differ) else "other"


def learning(record: Record) -> Iterator[Finding]:
    """There is nothing to compare with yet: said, for a first answer cannot be wrong."""
    waiting: dict[str, list[int]] = defaultdict(list)
    fresh: dict[str, list[Baseline]] = defaultdict(list)
    for (probe, _, _), (run, recording) in record.newest.items():
        own = record.baselines.get(key_of(run, recording))
        if (own is None or not own.complete) and record.before(run, recording) is None:
            waiting[probe].append(own.learnt.get(EVERY, 0) if own is not None else 0)
        if own is None or not own.complete or not record.served or own.accepted:
            continue
        if not (own.passed or own.strange) or record.now - own.first <= record.policy.week:
            fresh[probe].append(own)
    for probe, learnt in sorted(fresh.items()):
        if not any(b.passed or b.strange for b in learnt):
            text = f"{len(learnt)} cases were learnt just now and compared with nothing yet"
            yield Finding(
                rule="baseline-fresh", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text, probe=probe
            )
        else:
            exact = sum(b.stable(IDLE) for b in learnt)
            text = (
                f"{len(learnt)} cases were learnt within the last week, and nobody has witnessed them: a model that was"
                f" broken already would pass. {exact} of them are held to the bit, the others only to their noise"
            )
            yield Finding(rule="baseline-fresh", state=State.HEALTHY, cause=Cause.NONE, message=text, probe=probe)
    for probe, counts in sorted(waiting.items()):
        text = (
            f"{len(counts)} recorded cases are still being learnt (at least {min(counts)} of {LEARN} recordings each)"
        )
        text += ": until then they are compared with nothing"
        yield Finding(rule="baseline-learning", state=State.HEALTHY, cause=Cause.NONE, message=text, probe=probe)


def outvoted(record: Record) -> Iterator[Finding]:
    """Siblings on one chain give other bits than this device: it may have been bad when it was first recorded.

    Kernels that repeat give equal devices equal bits on equal bytes. A strict majority of three or more names the odd
    one, and of two nobody is accused. One that shares some vectors with the others, and gives now what none of them
    knows, is disputed: it may have gone bad while it was learnt, or have met a mode that they have not.
    """
    found: dict[tuple[str, bool], list[Ballot]] = defaultdict(list)
    for own, digest in record.current:
        votes = [(name, b) for name, b in record.voters(own) if _votes(b)]
        if not votes or not _votes(own):
            continue
        camps = _camps([own, *(b for _, b in votes)])
        mine = next(c for c in camps if own in c)
        agree = sorted(name for name, b in votes if b in mine)
        differ = sorted(name for name, b in votes if b not in mine)
        if 2 * len(mine) <= len(votes) + 1 and differ:
            largest = max((c for c in camps if c is not mine), key=len)
            odd = 2 * len(largest) > len(votes) + 1 and _names_kernels(record, own)
            found[own.probe, odd].append((own, agree, differ))
        elif len(agree) > 1 and len(own.known) > 1 and not any(digest in b.digests for _, b in votes):
            found[own.probe, False].append((own, [], sorted(name for name, _ in votes)))
    for (probe, odd), cases in sorted(found.items()):
        yield _outvoted(record, probe, cases) if odd else _disputed(record, probe, cases)


Ballot = tuple[Baseline, list[str], list[str]]
"""A baseline, who agrees with it, and who does not."""


def _votes(baseline: Baseline) -> bool:
    """Whether a baseline says what its device gives: it repeats, and not only within a process or two."""
    return baseline.stable(EVERY) and baseline.independent(EVERY) >= PROCESSES


def _outvoted(record: Record, probe: str, cases: Sequence[Ballot]) -> Finding:
    own, _, differ = cases[0]
    others = ", ".join(differ)
    text = (
        f"{own.case}{_more(cases)}: {others} of the same model and stack agree on other bits than {record.device.name} "
        "has given since it was first recorded: it may have been bad from the start"
    )
    kernel = f"another kernel: the chain and the stack of {others} are the same"
    return Finding(
        rule="recording-outvoted",
        state=State.SUSPECT,
        cause=Cause.HARDWARE,
        message=text,
        probe=probe,
        rivals=(Rival(cause=Cause.SOFTWARE, why=kernel, rejected=True),),
    )


def _disputed(record: Record, probe: str, cases: Sequence[Ballot]) -> Finding:
    own, agree, differ = cases[0]
    with_it = f", and with it {', '.join(agree)}," if agree else ""
    blind = "" if _names_kernels(record, own) else " which kernels ran is not known,"
    others = ", ".join(differ)
    text = (
        f"{own.case}{_more(cases)}: {record.device.name}{with_it} gives other bits than {others} of the same "
        f"model and stack;{blind} and no majority says which is right. To settle it: canaryd check --level deep, or "
        "record the same on another host and take it in with canaryd baseline import"
    )
    rivals = (
        Rival(cause=Cause.HARDWARE, why="one of them computes wrongly: exact goldens tell", rejected=False),
        Rival(cause=Cause.SOFTWARE, why="they chose different kernels", rejected=False),
    )
    cause = Cause.UNDETERMINED
    return Finding(
        rule="recording-disputed", state=State.UNKNOWN, cause=cause, message=text, probe=probe, rivals=rivals
    )


def _more(cases: Sequence[Ballot]) -> str:
    return f" (and {len(cases) - 1} more cases)" if len(cases) > 1 else ""


def _names_kernels(record: Record, own: Baseline) -> bool:
    """Whether equal chains mean equal kernels: accelerators choose theirs, and a chain may not say which."""
    return record.device.backend == "cpu" or "kernel" in own.chain


def _camps(voters: Sequence[Baseline]) -> list[list[Baseline]]:
    """Return those together that have a vector in common."""
    camps: list[list[Baseline]] = []
    for one in voters:
        near = [c for c in camps if any(one.digests & b.digests for b in c)]
        camps = [c for c in camps if c not in near] + [[one, *(b for c in near for b in c)]]
    return camps


def witnesses(own: Baseline, voters: Iterable[tuple[str, Baseline]]) -> str:
    """Return who has confirmed a baseline: siblings that know all of its vectors, the reference, or an operator."""
    names = sorted(name for name, b in voters if own.digests <= b.digests)
    said = [", ".join(names)] * bool(names) + ["reference"] * own.referenced + ["operator"] * bool(own.pinned)
    return " and ".join(said)


def unwitnessed(record: Record) -> Iterator[Finding]:
    """Nobody has confirmed what a device gave when it was first recorded: said, for a bad unit looks the same."""
    alone: dict[str, list[Baseline]] = defaultdict(list)
    for own, _ in record.current if not record.served else ():
        if not witnesses(own, record.voters(own)):
            alone[own.probe].append(own)
    for probe, cases in sorted(alone.items()):
        text = (
            f"{len(cases)} recorded cases are unwitnessed: no sibling and no reference has confirmed what this device"
            " gave when it was first recorded. The same baseline of another host settles it (canaryd baseline import)"
        )
        yield Finding(rule="baseline-unwitnessed", state=State.HEALTHY, cause=Cause.NONE, message=text, probe=probe)


def symptom(record: Record) -> Iterator[Finding]:
    """What a person would call broken output; known bits are known to look as they do.

    On a chain that is another, or not learnt yet, it is only unknown: a new model may answer oddly for good.
    """
    told = set()
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        baseline = record.baselines.get(key_of(run, recording))
        settled = baseline is not None and baseline.complete
        if settled and baseline is not None and recording.digest in accepted_digests(record.baselines, baseline.key):
            continue
        whole = _whole(recording, baseline)
        known = baseline if settled else record.before(run, recording)
        if whole.of_kernel or not (whole.tokens or whole.text or whole.values or whole.finish):
            continue  # no answer; or only its digest is left, for it was known once
        found = _triaged(record, run, whole, known)
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
        if not settled:
            text += f'. If it is meant to be so: canaryd baseline accept {record.device.name} --reason "…"'
        yield Finding(
            rule="broken-output",
            state=State.SUSPECT if settled else State.UNKNOWN,
            cause=Cause.UNDETERMINED if settled or known is None else Cause.SOFTWARE,
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
        listed = [(run, v) for run, v in listed if _server(run) == _server(listed[-1][0])]  # noqa: PLW2901
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


def _server(run: Run) -> object:
    """Return what of a run's chain decides how fast it is answered."""
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
    """Yield what every rule finds."""
    for rule in RULES:
        yield from rule(record)
