"""The case: all that one decision rests on, and how runs are counted in it."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd.config.settings import JudgePolicy
from canaryd.facts import Subject
from canaryd.judge import cause as judge_cause
from canaryd.judge.cause import Mismatch, operands_of
from canaryd.judge.clock import EPOCH, age
from canaryd.judge.confirmation import GROUNDS
from canaryd.judge.statistics import Count
from canaryd.judge.telemetry.signals import Signs
from canaryd.model import Ack, Cause, Device, Finding, Outcome, Run, Verdict

DRILL_EXPIRY = 3600.0
"""Seconds after which a drill's runs are forgotten (ours). False alarms: none, drills never meet a real verdict."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The devices of a node and the runs that count, selected once for the verdicts on all of them."""

    devices: Mapping[str, Device]
    runs: Mapping[str, tuple[Run, ...]]
    """By uuid, sorted by start, each id once; either drills only or no drills."""

    @cached_property
    def all(self) -> list[Run]:
        """The runs of all devices, oldest first."""
        return sorted(itertools.chain.from_iterable(self.runs.values()), key=_time)

    @cached_property
    def at(self) -> dict[str, float]:
        """Id → start of every run."""
        return {r.id: r.started for r in self.all}

    @cached_property
    def host_mismatches(self) -> tuple[list[Mismatch], list[Mismatch]]:
        """Return goldens that this node made in two ways that disagree: (those that accuse its CPU, those that cannot).

        If several single cores show the same doubt about the same golden, the reference is wrong, not a core.
        """
        mismatches = find_mismatches(self.all, Subject.HOST)
        cores: dict[object, set[int | None]] = defaultdict(set)
        for mismatch in mismatches:
            cores[mismatch.same_story].add(mismatch.core)
        shared = [len(cores[m.same_story] - {None}) > 1 for m in mismatches]
        return [h for h, s in zip(mismatches, shared, strict=True) if not s], list(
            itertools.compress(mismatches, shared)
        )

    @cached_property
    def goldens(self) -> set[object]:
        """The goldens that this node has made without contradiction: those that a result was compared with."""
        return {
            (r.probe, r.probe_version, operands_of(c))
            for r in self.all
            for c in r.comparisons
            if c.subject is Subject.DEVICE
        }

    @cached_property
    def cpu_erred(self) -> list[float]:
        """When this host's CPU was wrong, in its goldens or in its own runs; ascending."""
        cpus = (runs for uuid, runs in self.runs.items() if self.devices[uuid].backend == "cpu")
        own = [h for runs in cpus for h in _accusing(runs)]
        return sorted(h.run.started for h in (*self.host_mismatches[0], *own))


def node(devices: Mapping[str, Device], runs: Mapping[str, Iterable[Run]], now: float, *, drill: bool = False) -> Node:
    """Return the runs that count at `now`; with `drill`, those of the last hour's drills, without, none of them."""

    def selected(candidates: Iterable[Run]) -> tuple[Run, ...]:
        # A clock that was not set yet must not make a mismatch look decades old, and so long cleared.
        unique = {
            r.id: r if r.started >= EPOCH else replace(r, started=now) for r in candidates if bool(r.drill) == drill
        }
        recent = (r for r in unique.values() if not drill or abs(now - r.started) <= DRILL_EXPIRY)
        return tuple(sorted(recent, key=_time))

    return Node(devices=devices, runs={uuid: selected(runs.get(uuid, ())) for uuid in devices})


@dataclass(frozen=True, kw_only=True)
class Case:
    """All that one decision rests on."""

    device: Device
    node: Node
    wanted: Mapping[str, float]
    """Probe that is expected to give evidence → its period in seconds."""
    policy: JudgePolicy
    now: float
    previous: Verdict | None = None
    """The device's verdict until now; None for the first."""
    drill: bool = False
    """Whether drills are judged."""
    confirmed_time: float = math.inf
    """A time that has certainly come, however wrong the clock is: a watch ends by it."""
    gone_since: float | None = None
    """When the device was last seen, if it is not found any more."""
    signs: Signs | None = None
    """What the device reports about itself; None where that is not judged."""
    accelerators: tuple[int, int] | None = None
    """Accelerators found and expected on this host, where the configuration says how many; for the host's CPU only."""
    unlisted: Mapping[str, str] = field(default_factory=dict)
    """Vendor → why its devices on this host could not be listed; for the host's CPU only."""
    recordings: Sequence[Finding] = ()
    """What the rules for recordings found of this device."""
    serving: Mapping[str, tuple[int, Sequence[Finding]]] = field(default_factory=dict)
    """Endpoint that this device serves → how many devices serve it, and what was found of its recordings."""
    acks: Sequence[Ack] = ()
    """The operators' acknowledgements, repairs and replacements of this device."""
    history_lost: tuple[float, str] | None = None
    """When this machine's records were lost, and which file keeps what is left; None where they were not."""
    trends: Sequence[Finding] = ()
    """What the rules for trends found of this device."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The device's own runs."""
        return self.node.runs[self.device.uuid]

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """The peers' devices by uuid."""
        return {uuid: other for uuid, other in self.node.devices.items() if uuid != self.device.uuid}

    @cached_property
    def peers(self) -> Mapping[str, tuple[Run, ...]]:
        """The peers' runs by uuid."""
        return {uuid: self.node.runs[uuid] for uuid in self.devices}

    @property
    def divided(self) -> bool:
        """Whether the device is divided into instances, which are tested in its place."""
        return any(d.parent == self.device.uuid for d in self.devices.values())

    @property
    def is_cpu(self) -> bool:
        """Whether the device is the host's processor."""
        return self.device.backend == "cpu"

    def limit(self, probe: str) -> float:
        """Return the age in seconds beyond which evidence of a wanted probe is stale."""
        return freshness(self.policy, self.wanted[probe])

    def scheduled(self, probe: str) -> list[Run]:
        """Return the probe's runs that stand for its state now, oldest first.

        Confirmations and runs limited to some cases look at a part only. Runs dated in the future (the clock was set
        back) count only while there are no others: they must not hide what came after them.
        """
        runs = [r for r in self.runs if r.probe == probe and r.whole]
        known = [r for r in runs if age(r, self.now) < math.inf]
        return sorted(known, key=lambda r: -age(r, self.now)) or runs

    @cached_property
    def current(self) -> list[Run]:
        """The newest runs of the wanted probes, one per instruction set unless a newer run has outlived it."""
        found = []
        for probe in sorted(self.wanted):
            runs = self.scheduled(probe)
            lanes = {r.instruction_set: r for r in runs}
            found += [r for r in lanes.values() if r is runs[-1] or age(r, self.now) <= self.limit(probe)]
        return found

    def host_in_doubt(self, run: Run) -> bool:
        """Whether the host's CPU was wrong at about the same time as a run on an accelerator."""
        return not self.is_cpu and _near(self.node.cpu_erred, run.started, self.policy.repeat_window)

    def host_clean(self, run: Run) -> bool | None:
        """Whether the host's CPU computed exact goldens right at about the time of a run, as far as it computed any."""
        near = [
            r
            for uuid, runs in self.peers.items()
            if self.devices[uuid].backend == "cpu"
            for r in runs
            if r.trials and abs(r.started - run.started) <= self.policy.repeat_window
        ]
        return not self.host_in_doubt(run) if near and not self.is_cpu else None

    @cached_property
    def accusations(self) -> tuple[Mismatch, ...]:
        """Every mismatch that speaks against this device, with its cause, oldest first; only a cure removes one."""
        groups: dict[tuple[Subject, str, str, bool], list[Mismatch]] = defaultdict(list)
        for mismatch in (*_accusing(self.runs), *(self.node.host_mismatches[0] if self.is_cpu else ())):
            # A core that once gave two results says nothing of a reference that fails elsewhere.
            groups[
                mismatch.comparison.subject, mismatch.run.probe, mismatch.run.stack_id, mismatch.makers is not None
            ].append(mismatch)
        accusations: list[Mismatch] = []
        for mismatches in groups.values():
            cause, why, rivals = judge_cause.decide(scene(self, mismatches))
            if cause is not Cause.SOFTWARE or not _cured(self, mismatches[-1].run):
                accusations += [replace(h, cause=cause, why=why, rivals=rivals) for h in mismatches]
        return tuple(sorted((self._doubted(h) for h in accusations), key=lambda h: _time(h.run)))

    def _doubted(self, mismatch: Mismatch) -> Mismatch:
        if not self.host_in_doubt(mismatch.run):
            return mismatch
        why = "The host's CPU was wrong at about the same time: the fault may be the host's."
        return replace(mismatch, cause=Cause.UNDETERMINED, why=why, rivals=(), host_in_doubt=True)

    @cached_property
    def confirmed(self) -> list[tuple[list[Mismatch], list[str]]]:
        """The accusations that are confirmed, with the grounds.

        Accusations of software and of the device do not confirm each other. None counts whose host is in doubt or
        whose golden is disputed.
        """
        firm = [h for h in self.accusations if not h.host_in_doubt and not _disputed(h)]
        sides = [[h for h in firm if (h.cause is Cause.SOFTWARE) is excused] for excused in (False, True)]
        found = [
            (mismatches, [text for ground in GROUNDS if (text := ground(mismatches, self.policy))])
            for mismatches in sides
        ]
        return [(mismatches, grounds) for mismatches, grounds in found if grounds]

    def standing(self, subject: Subject, mismatches: Iterable[Mismatch]) -> Iterator[list[Mismatch]]:
        """Yield the mismatches of a subject, probe by probe, where they have not cleared by time and clean trials."""
        found = sorted((h for h in mismatches if h.comparison.subject is subject), key=lambda h: h.run.probe)
        for _, group in itertools.groupby(found, key=lambda h: h.run.probe):
            if not _cleared(self, listed := list(group)):
                yield listed


def _time(run: Run) -> tuple[float, str]:
    return run.started, run.id


def find_mismatches(runs: Iterable[Run], subject: Subject) -> list[Mismatch]:
    """Return the mismatches of a subject, also of runs that did not complete: a fact stays one after a crash."""
    return [Mismatch(run=r, comparison=c) for r in runs for c in r.comparisons if c.wrong and c.subject is subject]


def _accusing(runs: Iterable[Run]) -> list[Mismatch]:
    return [h for h in find_mismatches(runs, Subject.DEVICE) if h.comparison.characterised]


def _tally(runs: Iterable[Run], subject: Subject) -> tuple[Count, Count]:
    """Return all trials, and the clean ones among them.

    A golden is made, and a comparator checked, once per upload of the device.
    """
    all_ = clean = Count()
    for c in itertools.chain.from_iterable(r.comparisons for r in runs):
        wrong = c.subject is subject and c.wrong
        if c.subject is not Subject.DEVICE and not wrong:
            continue
        results = c.trials if subject is Subject.DEVICE else c.uploads
        fails = c.wrong_trials if subject is Subject.DEVICE else int(wrong)
        count = Count(results, fails if wrong else 0, c.uploads, int(wrong))
        all_, clean = all_.plus(count), clean if wrong else clean.plus(count)
    return all_, clean


def record(case: Case, mismatches: Sequence[Mismatch]) -> tuple[Count, Count]:
    """Return the trials up to the newest mismatch of a probe, and the clean ones since, under the same conditions."""
    subject, newest = mismatches[-1].comparison.subject, mismatches[-1].run
    pool = case.node.all if subject is Subject.HOST else case.runs
    lanes, loads = {h.run.instruction_set for h in mismatches}, {h.run.intensity for h in mismatches}
    # What was seen only under load is cleared only by trials under load; what shows in a usual run shows in any.
    runs = [
        r
        for r in pool
        if r.probe == newest.probe and r.instruction_set in lanes and ("" in loads or r.intensity in loads)
    ]
    before, _ = _tally((r for r in runs if r.started <= newest.started), subject)
    _, since = _tally((r for r in runs if r.started > newest.started), subject)
    return before, since


def _cleared(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether the watch is over and enough clean trials rule the old failure rate out."""
    before, since = record(case, mismatches)
    certain = min(case.now, case.confirmed_time)
    return certain - mismatches[-1].run.started >= case.policy.watch and since.outlasts(before)


def _cured(case: Case, run: Run) -> bool:
    """Return whether the newest software on this lane differs from that of the run, and passes."""
    lane = [
        r
        for r in case.scheduled(run.probe)
        if r.instruction_set == run.instruction_set and r.outcome is Outcome.COMPLETED and r.stack
    ]
    stack = lane[-1].stack_id if lane else run.stack_id
    found, _ = _tally((r for r in lane if r.stack_id == stack), Subject.DEVICE)
    return stack != run.stack_id and found.results > 0 and found.failed == 0


def scene(case: Case, mismatches: Sequence[Mismatch]) -> judge_cause.Scene:
    """Return what is known around the mismatches of one subject, probe and stack."""
    run, own = mismatches[-1].run, judge_cause.results(case.runs, mismatches[-1].run)
    if mismatches[-1].comparison.subject is Subject.HOST:
        return _scene_of_goldens(case, mismatches)
    siblings = {
        device.name: theirs
        for uuid, device in sorted(case.devices.items())
        if device.kind == case.device.kind and (theirs := judge_cause.results(case.peers[uuid], run))
    }
    data = {h.operands for h in mismatches}
    right, alike, unlike = judge_cause.same_operands(own, siblings, data)
    return judge_cause.Scene(
        whole_host=case.is_cpu and _whole_host(case, mismatches),
        right=right,
        alike=alike,
        unlike=unlike,
        outlasting=judge_cause.long_clean(own, siblings),
        siblings=frozenset(siblings),
        host_clean=case.host_clean(run),
        goldens_right=any(c.trials > c.wrong_trials for key in data for c in own.get(key, ())),
        command=repeat_command(run),
    )


def _scene_of_goldens(case: Case, mismatches: Sequence[Mismatch]) -> judge_cause.Scene:
    """Return what is known of goldens that contradict each other: a core may be to blame, or the reference itself."""
    command = repeat_command(mismatches[-1].run)
    for mismatch in reversed(mismatches):
        if mismatch.makers:
            return judge_cause.Scene(golden=True, makers=mismatch.makers, command=command)
        if (
            mismatch.core is not None
            and (mismatch.run.probe, mismatch.run.probe_version, mismatch.operands) in case.node.goldens
        ):
            return judge_cause.Scene(golden=True, lone_core=mismatch.core, command=command)
    return judge_cause.Scene(golden=True, command=command)


def _whole_host(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Whether, within `repeat_window`, every accelerator (two or more) was wrong too and no two in the same way."""
    times, window = sorted(h.run.started for h in mismatches), case.policy.repeat_window
    peers = [_accusing(runs) for uuid, runs in case.peers.items() if case.devices[uuid].backend != "cpu"]
    accused = [mismatches, *([h for h in theirs if _near(times, h.run.started, window)] for theirs in peers)]
    ways = [{(h.run.probe, h.operands, m) for h in each for m in judge_cause.marks([h.comparison])} for each in accused]
    return len(peers) >= 2 and all(accused) and len(set().union(*ways)) == sum(map(len, ways))


def _near(times: Sequence[float], at: float, window: float) -> bool:
    """Whether any of the ascending times lies within `window` seconds of `at`, before or after."""
    following = bisect.bisect_left(times, at - window)
    return following < len(times) and times[following] <= at + window


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run."""
    return run.repro or f"canaryd check --probe {run.probe}"


def _disputed(mismatch: Mismatch) -> bool:
    """Return whether a golden disagrees and either its maker or the reference may be wrong.

    A wrong reference repeats as faithfully as a broken core: suspect, never confirmed.
    """
    return mismatch.comparison.subject is Subject.HOST and mismatch.cause is not Cause.HARDWARE


def freshness(policy: JudgePolicy, period: float) -> float:
    """Return the age in seconds up to which evidence of a probe that runs every `period` seconds is fresh.

    Three periods: two runs may be missed (ours). False alarms: none, the evidence is that old.
    """
    return max(policy.stale_after, 3 * period)
