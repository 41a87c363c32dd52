"""Departures: a case gives other bits than its baseline has, though nothing of its chain changed.

One law for every device and server, within one launch: what a healthy one gives new bits at a known rate at most. Three
retests that all repeat it, or runs that depart too often, are too unlikely for one. The cases of a run share a process
and a moment, so no chance here multiplies those of several cases, except where the finding says so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.case import freshness, lasting
from canaryd.judge.findings import OTHER_BITS, RUNS_NAMED, finding
from canaryd.judge.phrases import and_more, count, listed
from canaryd.judge.recordings.baseline import EVERY, IDLE, LAUNCH, Baseline
from canaryd.judge.recordings.launches import untold
from canaryd.judge.recordings.record import Observation, Record, find_observations, variant_of
from canaryd.judge.recordings.triage import kind_of_wrong, known_answers
from canaryd.judge.statistics import outlasts, rate_bound, tail
from canaryd.judge.watch import is_over
from canaryd.model import Cause, Finding, Rival, Run, State

ALPHA = 1e-3
"""Probability at which a healthy device may fail a test of unknown vectors, each time it is made (ours): by re-runs
9.5e-4 at most; by their frequency 1.4 % within 1,000 runs at the bound."""
NEXT_RUN = "Wait for the next run; it shows whether the results match the baseline again."
DIFFERS = "differs from its baseline"


class _Said(NamedTuple):
    """What the departures of a probe amount to, by one test."""

    state: State
    seen: str
    """The message, between the probe and the cases."""
    outcome: str
    """The message, after the cases."""
    why: str
    newest: Observation
    action: str = ""


class _Round(NamedTuple):
    """A run in which comparable cases departed, with its retests."""

    run: Run
    compared: Sequence[Observation]
    again: Sequence[Observation]

    @property
    def outliers(self) -> list[Observation]:
        return [o for o in self.compared if o.is_outlier]

    @property
    def exact(self) -> list[Observation]:
        """The outliers of cases that repeat exactly."""
        return [o for o in self.outliers if o.repeats_exactly]


def departed(record: Record) -> Iterator[Finding]:
    """Unknown bits on an unchanged chain: repeated by retests, too frequent for the baseline, or unlike siblings."""
    launched = {run.id for run in record.launches}
    by_probe: dict[str, list[Observation]] = defaultdict(list)
    for key, observations in sorted(record.observations.items()):
        of = [o for o in observations if not {o.run.id, o.run.confirms} & launched]
        cleared = bool(of) and _cleared(record, of[-1].baseline)
        by_probe[key.probe] += [o for o in of if not (o.is_outlier and (cleared or _is_shared(record, o)))]
    for probe, of in by_probe.items():
        every = sorted((o for o in of if o.is_outlier), key=lambda o: o.run.started)
        if every:
            rounds = _rounds(of)
            found = [*_by_retests(record, rounds), *_by_frequency(record, rounds), _open(record, every)]
            said = max(found, key=lambda s: s.state.severity)
            yield from _findings(record, probe, said, every)


def _rounds(observations: Iterable[Observation]) -> list[_Round]:
    """Return the runs of a probe in which comparable cases departed, oldest first."""
    first: dict[str, list[Observation]] = defaultdict(list)
    again: dict[str, list[Observation]] = defaultdict(list)
    for each in (o for o in observations if o.is_comparable):
        (again[each.run.confirms] if each.run.confirms else first[each.run.id]).append(each)
    made = [_Round(of[0].run, of, again[name]) for name, of in first.items()]
    return sorted((r for r in made if r.outliers), key=lambda r: (r.run.started, r.run.id))


def _by_retests(record: Record, rounds: Sequence[_Round]) -> Iterator[_Said]:
    """Yield what it means that all retests of a run gave unknown bits too, in any steady case or in the same one."""
    for each in rounds:
        asked, wanted = {o.baseline.key for o in each.again}, record.policy.confirm_runs
        for odd in (each.exact, *([o] for o in each.outliers)):
            some = [o for o in odd if o.baseline.key in asked]
            keys = {o.baseline.key for o in some}
            repeated = len({o.run.id for o in each.again if o.is_outlier and o.baseline.key in keys})
            if not some or repeated < wanted:
                continue
            rate = _bound(record, some)
            why = f"A healthy device gives such results in at most {100 * rate:.2g} % of its runs"
            seen, outcome = DIFFERS, f"; it repeats in {count(repeated, 'retest')}"
            if len(some) > 1:
                seen = f"{DIFFERS} in {len(each.outliers)} of {len(each.compared)} cases at once"
                outcome = f"; {count(repeated, 'retest')} differ too"
            if (chance := rate**wanted) <= ALPHA:
                why = f"{why}; the chance is {chance:.1g} that retests in new processes repeat it by chance."
                yield _Said(State.SUSPECT, seen, outcome, why, some[-1])
            else:
                more = "Wait for more runs: the record is too short to judge."
                yield _Said(State.UNKNOWN, seen, f"{outcome}; not judged yet", f"{why}.", some[-1], more)


def _by_frequency(record: Record, rounds: Sequence[_Round]) -> Iterator[_Said]:
    """Yield what it means that any steady case, or one case, departs in so many runs; or so many cases at once."""
    for each in rounds[-1:]:
        told_for = lasting(record.policy, record.wanted.get(each.run.probe, 0.0))
        steady, odd = [o for o in each.compared if o.repeats_exactly], each.exact
        for some, among in ((odd, steady), *(([o], ()) for o in each.outliers)):
            chance, times, runs = _too_often(record, some, among)
            seen = f"differed from its baseline in {times} of {runs} runs"
            why = f"The probability that it comes so often by chance is {chance:.1g}."
            if times > 1 and chance <= ALPHA:
                yield _Said(State.SUSPECT, seen, "", why, some[-1])
            elif not record.device.has_witnesses and times > 1 and record.now - each.run.started <= told_for:
                more = f"{why} Clears {format_duration(told_for)} after it stops."
                yield _Said(State.UNKNOWN, seen, "; not judged yet", more, some[-1], record.deep_test)
        if any(_stands(record, o) for o in odd):
            chance = tail(len(odd), len(steady), max(o.baseline.rate(o.recording.condition) for o in steady))
            seen = f"{DIFFERS} in {len(odd)} of {len(steady)} cases at once"
            why = f"The probability of so many at once is {chance:.1g} if cases vary independently of each other."
            if chance <= ALPHA:
                yield _Said(State.UNKNOWN, seen, "; not judged yet", why, odd[-1], NEXT_RUN)


def _bound(record: Record, some: Sequence[Observation]) -> float:
    """Return an upper bound of the rate at which a healthy device gives unknown bits in any of these cases in a run.

    The smaller of two that hold however the cases depend on each other: the sum of their rates (Boole's inequality),
    and the bound by the samples in a row, here and on siblings, that brought no new vector in any of them.
    """
    each, clean = 0.0, list[int]()
    for o in some:
        b, condition, siblings = o.baseline, o.recording.condition, _siblings(record, o.baseline)
        each += b.rate(condition, [*_alike(record, b), *siblings])
        samples = [one.independent_samples(condition) for one in (b, *siblings) if one.stable(condition)]
        clean.append(sum(samples) if o.repeats_exactly else 1)
    return min(1.0, each, rate_bound(min(clean)) if min(clean) > 1 else 1.0)


def _too_often(record: Record, some: Sequence[Observation], among: Sequence[Observation]) -> tuple[float, int, int]:
    """Return the chance that a healthy device departs so often, in one case or in any `among` several; times; runs.

    Gauges are read before and after a request: what a server serves for a moment in between looks like a rare fault. So
    of idle answers of a server that batches only those count that no load explains.
    """
    found = [(1.0, 0, 0)]
    for o in some:
        b, condition = o.baseline, o.recording.condition
        if condition == IDLE and not b.stable(EVERY):
            times, rate = b.far, b.rate_of_far()
        elif among:
            times, rate = b.strange + b.beside, _bound(record, among)
        else:  # of this case alone: that others are steadier does not tell how often this one gives new vectors
            times, rate = b.strange, b.rate(condition, _siblings(record, b))
        times -= _began_launch(record, b)
        if _siblings(record, b):
            times = min(times, _own(record, among or (o,)))
        found.append((tail(times, b.trials, rate), times, b.trials))
    return min(found)


def _open(record: Record, outliers: Sequence[Observation]) -> _Said:
    """Return what holds where no test accuses: retests are awaited, the newest run departed, or it is only counted."""
    comparable = [o for o in outliers if o.is_comparable]
    if not comparable:
        why = "Right results can differ under another load."
        return _Said(State.HEALTHY, DIFFERS, " only under load", why, outliers[-1])
    newest, wanted = comparable[-1], record.policy.confirm_runs
    runs = {o.run.id: o.run for o in comparable if not o.run.confirms}.values()
    recent = [r for r in runs if r.started >= record.now - record.policy.repeat_window]
    if missing := [n for r in recent if (n := wanted - len(record.reruns[r.id])) > 0]:
        action = f"Wait for {count(missing[-1], 'retest')} in new processes."
        return _Said(State.UNKNOWN, DIFFERS, "; not judged yet", "", newest, action)
    again = any(record.reruns[run.id] for run in runs)
    outcome = "; retests match the baseline again" if again else "; it was not run again in time"
    why = "It may be a legitimate result that was not seen while learning, or a rare fault. It is counted."
    if not record.device.has_witnesses and any(_stands(record, o) for o in comparable):
        return _Said(State.UNKNOWN, DIFFERS, f"{outcome}; not judged yet", why, newest, NEXT_RUN)
    return _Said(State.HEALTHY, DIFFERS, outcome, why, newest)


def _findings(record: Record, probe: str, said: _Said, every: Sequence[Observation]) -> Iterator[Finding]:
    """Yield the finding on the departures of a probe, and a note on what its newest broken answer was."""
    newest, last, suspect = said.newest, every[-1], said.state is State.SUSPECT
    cases = len({o.baseline.key for o in every})
    differs = newest.difference.sentence(newest.noise) if newest.difference is not None else ""
    restarted = ", nor was the server restarted" if newest.baseline.launches else ""
    evidence = [f"Neither the model nor its settings nor the software changed{restarted}.", differs, said.why]
    cause, action, rivals = Cause.UNDETERMINED, said.action, list[Rival]()
    if suspect:
        cause, action, why, rivals = _blame(record, every)
        evidence += why
    yield finding(
        *(OTHER_BITS, said.state, Cause.NONE if said.state is State.HEALTHY else cause),
        f"{probe} {said.seen} (case {newest.recording.case}{and_more(cases)}){said.outcome}.",
        action,
        *evidence,
        probe=probe,
        repro=newest.run.repro,
        runs=tuple(dict.fromkeys(o.run.id for o in every))[-RUNS_NAMED:],
        rivals=rivals,
    )
    broken = kind_of_wrong(last.recording, known_answers(last.baseline))
    if suspect and last.baseline.since and broken is not None:
        text = f"Earlier output was broken in case {last.recording.case}: {broken.name} ({broken.evidence})."
        more = "It has given known answers since."
        yield finding("broken-output", State.HEALTHY, Cause.NONE, text, "", more, probe=probe, runs=(last.run.id,))


def _blame(record: Record, outliers: Sequence[Observation]) -> tuple[Cause, str, list[str], list[Rival]]:
    """Return which side is at fault, what to do, why, and the rivals, by what peers give on the same chain."""
    clean, alike = _peers_by_result(record, outliers)
    device, right, same = record.device.name, listed(clean), listed(alike)
    unseen = "a change that canaryd does not see"
    if alike and not clean:
        why = f"a fault of this device alone: {same} would not give the same new results"
        look = f"Find out what changed for {listed(sorted([device, *alike]))}."
        found = [f"Same model and software, and the same new results: {same}."]
        return Cause.SOFTWARE, look, found, [Rival(cause=Cause.HARDWARE, why=why, rejected=True)]
    if clean and not alike:
        cause = Cause.HARDWARE if record.device.is_hardware else Cause.UNDETERMINED
        found = [f"Same model and software, and no difference from the baseline: {right}."]
        why = f"{unseen}: it would show on {right} too"
        return cause, record.deep_test, found, [Rival(cause=Cause.SOFTWARE, why=why, rejected=True)]
    peers = "nothing else on this host computes the same"
    if clean:
        peers = f"the baseline is matched by {right}, the new results by {same}"
    evidence = [f"Cause unknown: {peers}."]
    if not record.device.has_witnesses and "checkpoint" not in outliers[-1].recording.chain:
        evidence.append("Set endpoints.NAME.directory: then canaryd can tell a changed model from a fault.")
    evidence.append(f"If the new results are right: {record.acceptance}")
    rival = Rival(cause=Cause.SOFTWARE, why=f"{unseen}: {peers}", rejected=False)
    return Cause.UNDETERMINED, record.deep_test, evidence, [rival]


def _peers_by_result(record: Record, outliers: Sequence[Observation]) -> tuple[list[str], list[str]]:
    """Return the peers that gave nothing but known vectors since the first outlier, and those that gave the same."""
    key, since = outliers[-1].baseline.any_launch, outliers[0].run.started
    digests = {o.recording.digest for o in outliers}
    clean, alike, odd = set[str](), set[str](), set[str]()
    for name, peer in sorted(record.peers.items()):
        found = find_observations((r for r in peer.runs if r.started >= since), peer.baselines).values()
        for o in (o for each in found for o in each if o.baseline.any_launch == key):
            (alike if o.recording.digest in digests else clean if o.difference is None else odd).add(name)
    return sorted(clean - odd - alike), sorted(alike)


def _stands(record: Record, outlier: Observation) -> bool:
    """Whether the newest scheduled run of a case, today's, gave unknown bits: nothing shows known ones since."""
    b = outlier.baseline
    current = any(new.own is b for new in record.newest)
    recent = b.since == 0 and record.now - b.strange_at <= record.policy.repeat_window
    return current and recent and not _began_launch(record, b)


def _began_launch(record: Record, b: Baseline) -> bool:
    """Whether the newest unknown bits began a launch that is not learnt yet: they are counted, and depart from none."""
    begun = {untold(run) for run in record.launches if run.started == b.strange_at}
    return bool(begun) and not any(
        o.chain.get(LAUNCH) in begun and o.any_launch == b.any_launch for o in record.baselines.values()
    )


def _alike(record: Record, baseline: Baseline) -> list[Baseline]:
    """Return the baselines of the same probe, stack and launch: what is rare in one case is as rare in another."""
    same = (b for b in record.baselines.values() if b.probe == baseline.probe and b.stack == baseline.stack)
    launch = baseline.chain.get(LAUNCH)
    return [b for b in same if b.chain.get(LAUNCH) == launch or {*b.launches} & {*baseline.launches}]


def _siblings(record: Record, baseline: Baseline) -> list[Baseline]:
    """Return the siblings' baselines with the same bits: what none of them gave is as rare on this device."""
    return [b for _, b in record.voters(baseline) if b.digests & baseline.digests]


def _own(record: Record, some: Iterable[Observation]) -> int:
    """Return in how many runs, of those in memory, any of these cases gave a vector that no sibling learnt."""
    met = (e for o in some for e in record.observations[o.baseline.key] if e.is_outlier and not e.run.confirms)
    return len({e.run.id for e in met if not _is_shared(record, e)})


def _is_shared(record: Record, o: Observation) -> bool:
    """Whether a sibling with the same bits learnt this vector as well: a mode that its own learning did not meet."""
    return any(o.recording.digest in b.digests for b in _siblings(record, o.baseline))


def _cleared(record: Record, baseline: Baseline) -> bool:
    """Whether the watch is over, with so many clean runs since that the earlier rate of outliers is ruled out.

    Where the chain changed meanwhile, clean runs on the new chain count.
    """
    if baseline.strange == 0:
        return False
    later = (b for b in record.complete.get(variant_of(baseline, baseline.case), ()) if b.first > baseline.strange_at)
    since = baseline.since + sum(b.passed.get(EVERY, 0) for b in later)
    days = record.tested.get(baseline.probe, ())
    fresh = freshness(record.policy, record.wanted[baseline.probe]) if baseline.probe in record.wanted else 0.0
    watched = is_over(baseline.strange_at, record.now, record.policy.watch, days, fresh)
    return watched and outlasts(since, baseline.trials, baseline.strange)


def unlike(record: Record) -> Iterator[Finding]:
    """Siblings with the same chain learnt other results: the device may have been faulty when it was first recorded.

    Deterministic kernels give equal devices equal results on equal data. A strict majority of three or more names the
    odd one; of two, none is accused. A device that shares vectors with the others, but now gives one that none of them
    knows, is disputed: it may have become faulty while it was learnt, or met a mode that they have not met.
    """
    found: dict[tuple[str, str, bool], list[tuple[Baseline, list[str], list[str]]]] = defaultdict(list)
    for own, digest in ((n.complete, n.recording.digest) for n in record.newest if n.complete is not None):
        voters = [(name, b) for name, b in record.voters(own) if _may_vote(record, b)]
        if not voters or not _may_vote(record, own):
            continue
        agree = sorted(name for name, b in voters if b.digests & own.digests)
        differ = sorted(name for name, b in voters if not b.digests & own.digests)
        others = Counter(d for _, b in voters for d in b.digests - own.digests)  # vector → siblings that gave it
        if 2 * (1 + len(agree)) <= len(voters) + 1 and differ:
            named = record.device.backend == "cpu" or "kernel" in own.chain
            why = "no majority shows which is right" if named else "they may have chosen different kernels"
            odd = named and 2 * max(others.values()) > len(voters) + 1
            found[own.probe, why, odd].append((own, agree, differ))
        elif len(agree) > 1 and len(own.known) > 1 and all(digest not in b.digests for _, b in voters):
            found[own.probe, "it gave theirs too, while its baseline was learnt", False].append((own, [], agree))
    for (probe, why, odd), votes in sorted(found.items()):
        own, agree, differ = votes[0]
        device, siblings = record.device.name, count(len(differ), "identical device")
        where = f"(case {own.case}{and_more(len(votes))})"
        yield finding(
            *(OTHER_BITS, State.SUSPECT, Cause.HARDWARE) if odd else (OTHER_BITS, State.UNKNOWN, Cause.UNDETERMINED),
            f"{device} differs from {siblings} {where}."
            if odd
            else f"{device} and {siblings} disagree {where}; {why}.",
            f"Run: canaryd check --level deep --device {device}" if odd else "Run: canaryd check --level deep",
            f"Same model and software, other results: {listed(differ)}.",
            f"Same results as {device}: {listed(agree)}." if agree else "",
            "It may have been faulty from the start." if odd else "",
            "" if odd else "Or record the same on another host and import it here: canaryd baseline import.",
            probe=probe,
            rivals=(Rival(cause=Cause.SOFTWARE, why="they chose different kernels", rejected=odd),),
        )


def _may_vote(record: Record, baseline: Baseline) -> bool:
    """Whether a baseline is representative of its device: the case repeats, and in enough processes."""
    return baseline.stable(EVERY) and baseline.independent_samples(EVERY) >= record.policy.confirm_runs
