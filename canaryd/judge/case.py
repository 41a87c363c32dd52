"""The case: all that one decision rests on, and how runs are counted in it."""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd.config.settings import JudgePolicy
from canaryd.judge import cause as judge_cause
from canaryd.judge.cause import Hit, bytes_of
from canaryd.judge.clock import EPOCH
from canaryd.judge.confirmation import GROUNDS
from canaryd.judge.statistics import Count
from canaryd.judge.telemetry.signals import Signs
from canaryd.model import DATED, Ack, Cause, Device, Finding, Outcome, Run, Subject

DRILL_EXPIRY = 3600.0
"""Seconds after which a drill's runs are forgotten (ours). False alarms: none, drills never meet a real verdict."""
AHEAD = 3600.0
"""Seconds by which a run may lie in the future before the clock is doubted and the run is no fresh evidence (ours).
False alarms: none, how old it is is not known."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The devices of a node and their runs, admitted once for the verdicts on all of them."""

    devices: Mapping[str, Device]
    runs: Mapping[str, tuple[Run, ...]]
    """By uuid; sorted by start, of one world (drill or not), each id once."""

    @cached_property
    def all(self) -> list[Run]:
        """The runs of all devices, oldest first."""
        return sorted(itertools.chain.from_iterable(self.runs.values()), key=_time)

    @cached_property
    def at(self) -> dict[str, float]:
        """Id → start of every run."""
        return {r.id: r.started for r in self.all}

    @cached_property
    def host_hits(self) -> tuple[list[Hit], list[Hit]]:
        """Goldens that this node made in two ways that disagree: (those that accuse its CPU, those that cannot).

        The same words about the same bytes from different single cores are no core's fault: the reference itself fails.
        """
        hits = find_hits(self.all, Subject.HOST)
        cores: dict[object, set[str]] = defaultdict(set)
        for hit in hits:
            cores[hit.words].add(hit.core)
        shared = [len(cores[h.words] - {""}) > 1 for h in hits]
        return [h for h, s in zip(hits, shared, strict=True) if not s], list(itertools.compress(hits, shared))

    @cached_property
    def goldens(self) -> set[object]:
        """Which goldens this node has made without contradiction: they were then compared with a device's result."""
        return {
            (r.probe, r.probe_version, bytes_of(c))
            for r in self.all
            for c in r.comparisons
            if c.subject is Subject.DEVICE
        }

    @cached_property
    def cpu_erred(self) -> list[float]:
        """Return when this host's CPU was wrong, in its goldens or in its own runs; ascending."""
        cpus = (runs for uuid, runs in self.runs.items() if self.devices[uuid].backend == "cpu")
        own = [h for runs in cpus for h in _accusing(runs)]
        return sorted(h.run.started for h in (*self.host_hits[0], *own))


def node(devices: Mapping[str, Device], runs: Mapping[str, Iterable[Run]], now: float, *, drill: bool = False) -> Node:
    """Return the runs that count at `now`; with `drill`, those of the last hour's drills, without, none of them."""

    def admitted(candidates: Iterable[Run]) -> tuple[Run, ...]:
        # A clock that was not set yet must not make a mismatch look decades old, and so long cleared.
        unique = {
            r.id: r if r.started >= EPOCH else replace(r, started=now) for r in candidates if bool(r.drill) == drill
        }
        recent = (r for r in unique.values() if not drill or abs(now - r.started) <= DRILL_EXPIRY)
        return tuple(sorted(recent, key=_time))

    return Node(devices=devices, runs={uuid: admitted(runs.get(uuid, ())) for uuid in devices})


@dataclass(frozen=True, kw_only=True)
class Docket:
    """All that one decision rests on."""

    device: Device
    node: Node
    wanted: Mapping[str, float]
    policy: JudgePolicy
    now: float
    reached: float = math.inf
    """A time that has come for certain, however wrong the clock was."""
    gone_since: float | None = None
    """When the device was last seen, if it is not found any more."""
    signs: Signs | None = None
    """What the device says about itself; None where that is not judged."""
    count: tuple[int, int] | None = None
    """Accelerators found and expected on this host, where the configuration says how many; for the host's CPU only."""
    unlisted: Mapping[str, str] = field(default_factory=dict)
    """Vendor → why its devices on this host could not be listed; for the host's CPU only."""
    recorded: Sequence[Finding] = ()
    """What `recorded.findings` makes of this device's recordings."""
    serving: Mapping[str, tuple[int, Sequence[Finding]]] = field(default_factory=dict)
    """Endpoint that this device serves → how many devices do so, and the same of it."""
    said: Sequence[Ack] = ()
    """What operators said of the device."""
    lost: tuple[float, str] | None = None
    """When the records of this machine were lost, and where what is left of them is kept; None where they were not."""
    trends: Sequence[Finding] = ()
    """What `trend.findings` makes of this device's days."""

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
        """Whether the host itself is on trial."""
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
    def charges(self) -> tuple[Hit, ...]:
        """Every hit that speaks against this device, with its cause, oldest first; only a cure forgets one."""
        groups: dict[tuple[Subject, str, str, bool], list[Hit]] = defaultdict(list)
        for hit in (*_accusing(self.runs), *(self.node.host_hits[0] if self.is_cpu else ())):
            # A core that once made a golden twice, unlike, says nothing of a reference that fails elsewhere.
            groups[hit.comparison.subject, hit.run.probe, hit.run.stack_id, bool(hit.makers)].append(hit)
        charges: list[Hit] = []
        for hits in groups.values():
            cause, why, rivals = judge_cause.decide(scene(self, hits))
            if cause is not Cause.SOFTWARE or not _cured(self, hits[-1].run):
                charges += [replace(h, cause=cause, why=why, rivals=rivals) for h in hits]
        return tuple(sorted((self._doubted(h) for h in charges), key=lambda h: _time(h.run)))

    def _doubted(self, hit: Hit) -> Hit:
        if not self.host_in_doubt(hit.run):
            return hit
        why = "The host's own CPU was wrong at about the same time, so this device cannot be told apart from its host."
        return replace(hit, cause=Cause.UNDETERMINED, why=why, rivals=(), host_in_doubt=True)

    @cached_property
    def confirmed(self) -> list[tuple[list[Hit], list[str]]]:
        """The charges that are confirmed, with the grounds.

        Software's charges and the device's own do not confirm each other, and none counts whose host is in doubt, or
        that is disputed.
        """
        firm = [h for h in self.charges if not h.host_in_doubt and not _disputed(h)]
        sides = [[h for h in firm if (h.cause is Cause.SOFTWARE) is excused] for excused in (False, True)]
        found = [(hits, [text for ground in GROUNDS if (text := ground(hits, self.policy))]) for hits in sides]
        return [(hits, grounds) for hits, grounds in found if grounds]

    def standing(self, subject: Subject, hits: Iterable[Hit]) -> Iterator[list[Hit]]:
        """Yield the hits of a subject, probe by probe, where they have not cleared by time and clean trials."""
        found = sorted((h for h in hits if h.comparison.subject is subject), key=lambda h: h.run.probe)
        for _, group in itertools.groupby(found, key=lambda h: h.run.probe):
            if not _cleared(self, listed := list(group)):
                yield listed


def _time(run: Run) -> tuple[float, str]:
    return run.started, run.id


def find_hits(runs: Iterable[Run], subject: Subject) -> list[Hit]:
    """Facts that a worker delivered before it crashed are facts too: the outcome of the run does not matter here."""
    return [Hit(run=r, comparison=c) for r in runs for c in r.comparisons if c.wrong and c.subject is subject]


def _accusing(runs: Iterable[Run]) -> list[Hit]:
    return [h for h in find_hits(runs, Subject.DEVICE) if h.comparison.characterised]


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


def record(docket: Docket, hits: Sequence[Hit]) -> tuple[Count, Count]:
    """Return the trials up to the newest hit of a probe, and the clean ones since, under the same conditions."""
    subject, newest = hits[-1].comparison.subject, hits[-1].run
    pool = docket.node.all if subject is Subject.HOST else docket.runs
    lanes, loads = {h.run.instruction_set for h in hits}, {h.run.intensity for h in hits}
    # What was seen only under load is cleared only by trials under load; what shows in a usual run shows in any.
    runs = [
        r
        for r in pool
        if r.probe == newest.probe and r.instruction_set in lanes and ("" in loads or r.intensity in loads)
    ]
    before, _ = _tally((r for r in runs if r.started <= newest.started), subject)
    _, since = _tally((r for r in runs if r.started > newest.started), subject)
    return before, since


def _cleared(docket: Docket, hits: Sequence[Hit]) -> bool:
    """Way out of `suspect`: the watch is over, and so many clean trials that the old failure rate is ruled out."""
    before, since = record(docket, hits)
    certain = min(docket.now, docket.reached)
    return certain - hits[-1].run.started >= docket.policy.watch and since.outlasts(before)


def _cured(docket: Docket, run: Run) -> bool:
    """Way out of a software fault: the newest stack of this lane is another one, and exact there."""
    lane = [
        r
        for r in docket.scheduled(run.probe)
        if r.instruction_set == run.instruction_set and r.outcome is Outcome.COMPLETED and r.stack
    ]
    stack = lane[-1].stack_id if lane else run.stack_id
    found, _ = _tally((r for r in lane if r.stack_id == stack), Subject.DEVICE)
    return stack != run.stack_id and found.results > 0 and found.failed == 0


def scene(docket: Docket, hits: Sequence[Hit]) -> judge_cause.Scene:
    """Return what is known around the hits of one subject, probe and stack."""
    run, own = hits[-1].run, judge_cause.results(docket.runs, hits[-1].run)
    if hits[-1].comparison.subject is Subject.HOST:
        return _scene_of_goldens(docket, hits)
    siblings = {
        device.name: theirs
        for uuid, device in sorted(docket.devices.items())
        if device.kind == docket.device.kind and (theirs := judge_cause.results(docket.peers[uuid], run))
    }
    data = {h.bytes for h in hits}
    right, alike, unlike = judge_cause.same_bytes(own, siblings, data)
    return judge_cause.Scene(
        whole_host=docket.is_cpu and _whole_host(docket, hits),
        right=right,
        alike=alike,
        unlike=unlike,
        outlasting=judge_cause.long_clean(own, siblings),
        siblings=frozenset(siblings),
        host_clean=docket.host_clean(run),
        goldens_right=any(c.trials > c.wrong_trials for key in data for c in own.get(key, ())),
        command=repeat_command(run),
    )


def _scene_of_goldens(docket: Docket, hits: Sequence[Hit]) -> judge_cause.Scene:
    """Return what is known of goldens that contradict each other: a core may be to blame, or the reference itself."""
    command = repeat_command(hits[-1].run)
    for hit in reversed(hits):
        if hit.makers:
            return judge_cause.Scene(golden=True, makers=hit.makers, command=command)
        if hit.core and (hit.run.probe, hit.run.probe_version, hit.bytes) in docket.node.goldens:
            return judge_cause.Scene(golden=True, lone_core=hit.core, command=command)
    return judge_cause.Scene(golden=True, command=command)


def _whole_host(docket: Docket, hits: Sequence[Hit]) -> bool:
    """Whether, within `repeat_window`, every accelerator (two or more) was wrong too and no two in the same way."""
    times, window = sorted(h.run.started for h in hits), docket.policy.repeat_window
    peers = [_accusing(runs) for uuid, runs in docket.peers.items() if docket.devices[uuid].backend != "cpu"]
    accused = [hits, *([h for h in theirs if _near(times, h.run.started, window)] for theirs in peers)]
    ways = [{(h.run.probe, h.bytes, m) for h in each for m in judge_cause.marks([h.comparison])} for each in accused]
    return len(peers) >= 2 and all(accused) and len(set().union(*ways)) == sum(map(len, ways))


def _near(times: Sequence[float], at: float, window: float) -> bool:
    """Whether any of the ascending times lies within `window` seconds of `at`, before or after."""
    following = bisect.bisect_left(times, at - window)
    return following < len(times) and times[following] <= at + window


def repeat_command(run: Run) -> str:
    """Return the command that repeats a run."""
    return run.repro or f"canaryd check --probe {run.probe}"


def _disputed(hit: Hit) -> bool:
    """Whether it is a golden that disagrees, and nobody can tell its maker from the reference.

    A wrong reference repeats itself as faithfully as a broken core: suspect, never confirmed.
    """
    return hit.comparison.subject is Subject.HOST and hit.cause is not Cause.HARDWARE


def freshness(policy: JudgePolicy, period: float) -> float:
    """Return the age in seconds up to which evidence of a probe that runs every `period` seconds is fresh.

    Three periods: two runs may be missed (ours). False alarms: none, the evidence is that old.
    """
    return max(policy.stale_after, 3 * period)


def age(run: Run, now: float) -> float:
    """Return the seconds since a run began; infinite where it is dated in the future, for then nobody knows.

    What the store has dated by its own time is as old as the clock said then, if the clock of now can tell that.
    """
    said = re.fullmatch(rf"{DATED}(\d+)", run.environment.get("clock", "")) if run.started > now + AHEAD else None
    began = float(said[1]) if said else run.started
    return now - began if began <= now + AHEAD else math.inf
