"""The judge: from stored runs to a verdict on one device, as a pure function of its arguments.

Read it from the end: `RULES` lists the rules, each yields findings, the worst finding gives the verdict its state.
Whose fault it is, `canaryd/blame.py` decides. docs/judgement.md has both as tables, with their sources and why no rule
raises a false alarm; docs/thresholds.md has every number with its false-alarm chance. Shorthand here: a *hit* is a
wrong comparison; a *charge* is a hit that speaks against the device on trial; a *peer* is another device of this node;
a *sibling* is a peer of the same backend and model.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd import acks, blame, telemetry
from canaryd.blame import Hit, bytes_of, names
from canaryd.chance import EPOCH, RULE_OF_THREE, Count, rate_bound
from canaryd.config import JudgePolicy
from canaryd.model import DATED, Ack, Cause, Device, Finding, Outcome, Run, State, Subject, Verdict
from canaryd.telemetry import Signs
from canaryd.wording import moment

DRILL_EXPIRY = 3600.0
"""Seconds after which a drill's runs are forgotten (ours). False alarms: none, drills never meet a real verdict."""
AHEAD = 3600.0
"""Seconds by which a run may lie in the future before the clock is doubted and the run is no fresh evidence (ours).
False alarms: none, how old it is is not known."""
RUNS_NAMED = 16
"""Newest run ids listed in one finding; a broken device would fill the store with them."""
CAUSES = (Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS, Cause.NONE)
"""Which cause names the verdict when findings of the same state differ: the one that costs most to overlook first."""


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
        hits = _hits(self.all, Subject.HOST)
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
            cause, why, rivals = blame.decide(scene(self, hits))
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


# --- Hits, tallies and ways out --------------------------------------------------------------------------------------


def _time(run: Run) -> tuple[float, str]:
    return run.started, run.id


def _hits(runs: Iterable[Run], subject: Subject) -> list[Hit]:
    """Facts that a worker delivered before it crashed are facts too: the outcome of the run does not matter here."""
    return [Hit(run=r, comparison=c) for r in runs for c in r.comparisons if c.wrong and c.subject is subject]


def _accusing(runs: Iterable[Run]) -> list[Hit]:
    return [h for h in _hits(runs, Subject.DEVICE) if h.comparison.characterised]


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


def _record(docket: Docket, hits: Sequence[Hit]) -> tuple[Count, Count]:
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
    before, since = _record(docket, hits)
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


# --- Whose fault ----------------------------------------------------------------------------------------------------


def scene(docket: Docket, hits: Sequence[Hit]) -> blame.Scene:
    """Return what is known around the hits of one subject, probe and stack."""
    run, own = hits[-1].run, blame.results(docket.runs, hits[-1].run)
    if hits[-1].comparison.subject is Subject.HOST:
        return _scene_of_goldens(docket, hits)
    siblings = {
        device.name: theirs
        for uuid, device in sorted(docket.devices.items())
        if device.kind == docket.device.kind and (theirs := blame.results(docket.peers[uuid], run))
    }
    data = {h.bytes for h in hits}
    right, alike, unlike = blame.same_bytes(own, siblings, data)
    return blame.Scene(
        whole_host=docket.is_cpu and _whole_host(docket, hits),
        right=right,
        alike=alike,
        unlike=unlike,
        outlasting=blame.long_clean(own, siblings),
        siblings=frozenset(siblings),
        host_clean=docket.host_clean(run),
        goldens_right=any(c.trials > c.wrong_trials for key in data for c in own.get(key, ())),
        command=_command(run),
    )


def _scene_of_goldens(docket: Docket, hits: Sequence[Hit]) -> blame.Scene:
    """Return what is known of goldens that contradict each other: a core may be to blame, or the reference itself."""
    command = _command(hits[-1].run)
    for hit in reversed(hits):
        if hit.makers:
            return blame.Scene(golden=True, makers=hit.makers, command=command)
        if hit.core and (hit.run.probe, hit.run.probe_version, hit.bytes) in docket.node.goldens:
            return blame.Scene(golden=True, lone_core=hit.core, command=command)
    return blame.Scene(golden=True, command=command)


def _whole_host(docket: Docket, hits: Sequence[Hit]) -> bool:
    """Whether, within `repeat_window`, every accelerator (two or more) was wrong too and no two in the same way."""
    times, window = sorted(h.run.started for h in hits), docket.policy.repeat_window
    peers = [_accusing(runs) for uuid, runs in docket.peers.items() if docket.devices[uuid].backend != "cpu"]
    accused = [hits, *([h for h in theirs if _near(times, h.run.started, window)] for theirs in peers)]
    ways = [{(h.run.probe, h.bytes, m) for h in each for m in blame.marks([h.comparison])} for each in accused]
    return len(peers) >= 2 and all(accused) and len(set().union(*ways)) == sum(map(len, ways))


def _near(times: Sequence[float], at: float, window: float) -> bool:
    """Whether any of the ascending times lies within `window` seconds of `at`, before or after."""
    following = bisect.bisect_left(times, at - window)
    return following < len(times) and times[following] <= at + window


def _command(run: Run) -> str:
    return run.repro or f"canaryd check --probe {run.probe}"


# --- Grounds of confirmation ----------------------------------------------------------------------------------------


def _crowded(hits: Sequence[Hit], count: int, gap: float, window: float) -> bool:
    """Whether `count` wrong runs, each at least `gap` seconds after the one before, lie within `window` seconds."""
    times = sorted({h.run.started for h in hits})
    for start in times:
        at: float = start
        for _ in range(count - 1):
            following = bisect.bisect_left(times, at + gap)
            at = times[following] if following < len(times) else math.inf
        if at - start <= window:
            return True
    return False


def confirmed_by_reruns(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """3 of 3 confirmation runs of one mismatch are wrong too; more clean ones do not outvote them.

    Source: design §4. By chance: 4.6e-18 per mismatch (1e-4 transients an hour, re-runs of a minute).
    """
    wrong: dict[str, set[str]] = defaultdict(set)
    for run in (h.run for h in hits):
        if run.confirms and run.outcome is Outcome.COMPLETED:
            wrong[run.confirms].add(run.id)
    if all(len(ids) < policy.confirm_runs for ids in wrong.values()):
        return ""
    return f"{policy.confirm_runs} confirmation runs, each in a new process, are wrong too"


def confirmed_within_a_day(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """Two wrong runs within `repeat_window`, far enough apart to be independent.

    Source: design §4. By chance: 1.5e-9 a device-year at the AEGIS bound, 2.1e-3 at 1e-4 an hour.
    """
    if not _crowded(hits, 2, policy.repeat_gap, policy.repeat_window):
        return ""
    return f"2 runs at least {_spoken(policy.repeat_gap)} apart are wrong within {_spoken(policy.repeat_window)}"


def confirmed_within_a_week(hits: Sequence[Hit], policy: JudgePolicy) -> str:
    """Three wrong runs within a week.

    Source: design §4. By chance: 7.8e-14 a device-year at the AEGIS bound.
    """
    if not _crowded(hits, policy.week_count, policy.repeat_gap, policy.week):
        return ""
    return f"{policy.week_count} runs are wrong within {_spoken(policy.week)}"


def confirmed_in_place(hits: Sequence[Hit], _policy: JudgePolicy) -> str:
    """Two uploads went wrong at the same place: one core, or one bit of one row, column or lane.

    Source: design §4. By chance: 1.7e-7 in 400 days with two cores, less with more.
    """
    seen: set[str] = set()
    for hit in (h for h in hits if h.comparison.subject is Subject.DEVICE):
        c = hit.comparison
        places = {hit.core} - {""}
        if c.evidence and len(c.evidence.bits) == 1:
            bit = next(iter(c.evidence.bits))
            # "0…31 (32 distinct)" is a range, not a place that two faults could share.
            places |= {f"bit {bit} at {axis} {at}" for axis, at in c.evidence.lines.items() if "…" not in at}
        if shared := seen & places:
            return f"2 uploads are wrong at the same place ({min(shared)})"
        seen |= places
    return ""


GROUNDS: tuple[Callable[[Sequence[Hit], JudgePolicy], str], ...] = (
    confirmed_by_reruns,
    confirmed_within_a_day,
    confirmed_within_a_week,
    confirmed_in_place,
)
"""Each returns in words why the charges are confirmed, or ""."""


# --- Rules ----------------------------------------------------------------------------------------------------------


def exact_mismatch(docket: Docket) -> Iterator[Finding]:
    """An exact golden was missed: suspect at once, and for as long as the watch lasts."""
    for hits in docket.standing(Subject.DEVICE, docket.charges):
        yield _suspicion(docket, "exact-mismatch", "", hits)


def golden_disagreement(docket: Docket) -> Iterator[Finding]:
    """Two ways to make a golden on this host disagree: the CPU is the accused, whichever device's run showed it."""
    for hits in docket.standing(Subject.HOST, docket.charges):
        yield _suspicion(docket, "golden-disagreement", "goldens made twice on this CPU disagree: ", hits)


def confirmed(docket: Docket) -> Iterator[Finding]:
    """The charges repeat: faulty, whatever the cause; the cause decides only what to do about it."""
    part = f"the dossier for the vendor: canaryd report {docket.device.name} -o DIR"
    if docket.device.weak_identity:
        part = "its identity names no physical part, so give this to whoever runs the machine"
    todo = {
        Cause.HARDWARE: f" Take it out of service; {part}.",
        Cause.SOFTWARE: " No RMA: the stack gives wrong numbers. Clears when another stack runs clean.",
    }
    for hits, grounds in docket.confirmed:
        lead = _strongest(hits)
        message = f"confirmed: {'; '.join(grounds)}. Newest: {hits[-1]}. {lead.why}{todo.get(lead.cause, '')}"
        yield _finding("exact-mismatch-confirmed", State.FAULTY, lead.cause, message, hits)


def _disputed(hit: Hit) -> bool:
    """Whether it is a golden that disagrees, and nobody can tell its maker from the reference.

    A wrong reference repeats itself as faithfully as a broken core: suspect, never confirmed.
    """
    return hit.comparison.subject is Subject.HOST and hit.cause is not Cause.HARDWARE


def host_in_doubt(docket: Docket) -> Iterator[Finding]:
    """An accelerator and its host's CPU were wrong at about the same time: the host is accused, not the accelerator."""
    doubted = [h for h in docket.charges if h.host_in_doubt]
    if list(docket.standing(Subject.DEVICE, doubted)):
        cpus = names(f"{d.name} ({d.model})" for d in docket.devices.values() if d.backend == "cpu")
        message = (
            f"the host's CPU, {cpus or 'not in the list of devices'}, was wrong itself within "
            f"{_spoken(docket.policy.repeat_window)} of this device's mismatch: the host is accused. "
            "Settle the CPU first; until then this device is no more than suspect"
        )
        yield _finding("host-in-doubt", State.UNKNOWN, Cause.HARDWARE, message, doubted)


def golden_in_doubt(docket: Docket) -> Iterator[Finding]:
    """The newest run met a golden that its maker could not make twice alike: it says nothing about this device."""
    accusing, shared = docket.node.host_hits
    for run in docket.current:
        if hits := [h for h in shared if h.run is run]:
            text = f"several cores fail alike on one golden, so the reference is wrong and not a core: {hits[-1]}"
            yield _finding("golden-in-doubt", State.UNKNOWN, Cause.HARNESS, text, hits)
        elif not docket.is_cpu and (hits := [h for h in accusing if h.run is run]):
            text = f"this run's golden is in doubt, because its maker, the host's CPU, is a suspect: {hits[-1]}"
            yield _finding("golden-in-doubt", State.UNKNOWN, Cause.HARNESS, text, hits)


def comparator_disagreement(docket: Docket) -> Iterator[Finding]:
    """Device and host compared the same bytes and disagree: once it may be either, repeatedly it is the device.

    Repeated by chance: 1.9e-9 in 30 days (ours).
    """
    for hits in docket.standing(Subject.COMPARATOR, _hits(docket.runs, Subject.COMPARATOR)):
        doubted = any(docket.host_in_doubt(h.run) for h in hits)
        repeated = not doubted and _crowded(hits, 2, docket.policy.repeat_gap, docket.policy.watch)
        weight = "once, so it may be either side"
        if doubted:
            weight = "and the host's CPU was wrong at about the same time"
        elif repeated:
            weight = "repeatedly, so the device's own comparison or its way to the host is wrong"
        cause = Cause.HARDWARE if repeated else Cause.UNDETERMINED
        message = f"device and host compared the same bytes and disagree, {weight}: {hits[-1]}"
        yield _finding("comparator-disagreement", State.SUSPECT, cause, message, hits)


def uncharacterised_mismatch(docket: Docket) -> Iterator[Finding]:
    """A golden was missed whose exactness nobody has shown on this backend: no accusation, but no health either."""
    hits = [h for h in _hits(docket.runs, Subject.DEVICE) if not h.comparison.characterised]
    for listed in docket.standing(Subject.DEVICE, hits):
        message = (
            f"{listed[-1]}. Exactness of this class has not been shown on a healthy {docket.device.backend} device, so "
            f"it cannot accuse. Compare with a known good device of this model: {_command(listed[-1].run)}"
        )
        yield _finding("uncharacterised-mismatch", State.UNKNOWN, Cause.HARNESS, message, listed)


OUTCOMES: Mapping[Outcome, tuple[Cause, str]] = {
    Outcome.SKIPPED: (Cause.ENVIRONMENT, "was skipped"),
    Outcome.ERRORED: (Cause.HARNESS, "raised an error"),
    Outcome.CRASHED: (Cause.UNDETERMINED, "crashed: the worker died"),
    Outcome.TIMED_OUT: (Cause.UNDETERMINED, "timed out: a hung driver or a busy machine"),
    Outcome.OUT_OF_MEMORY: (Cause.ENVIRONMENT, "ran out of memory: free some, or lower the level"),
    Outcome.UNKILLABLE: (
        Cause.UNDETERMINED,
        "left a worker that survives SIGKILL: the driver may hang, see the kernel log",
    ),
    Outcome.GARBLED: (Cause.HARNESS, "answered what is not the protocol"),
}
"""What a run that did not complete is blamed on, and how its sentence goes on after the probe's name."""


def not_completed(docket: Docket) -> Iterator[Finding]:
    """The newest run of a wanted probe did not complete: nothing is known about the numbers."""
    for run in docket.current:
        if run.outcome is not Outcome.COMPLETED:
            cause, text = OUTCOMES[run.outcome]
            lane = f" ({run.instruction_set})" if run.instruction_set else ""
            reason = telemetry.reason_of(run)
            message = f"{run.probe}{lane} {text}" + (f": {reason}" if reason else "")
            yield _finding("not-completed", State.UNKNOWN, cause, message, run)


def unreached(docket: Docket) -> Iterator[Finding]:
    """The device is there, but nothing can compute on it: no driver, or a torch that does not see it."""
    device = docket.device
    if docket.gone_since is not None:
        return
    if (
        device.backend == "cpu"
        or device.is_endpoint
        or device.torch_index is not None
        or docket.divided
        or any(r.trials for r in docket.runs)
    ):
        return
    if why := device.detail.get("undriven", ""):
        driven = device.detail.get("kernel_driver", "none") != "none"
        lack = "it cannot be asked" if driven else "nothing drives it"
        text = f"it is on the PCI bus at {device.detail.get('bus_id', '?')}, but {lack}: {why}"
    else:
        text = (
            "its driver lists it, but the torch under test does not reach it, so nothing was computed on it: point "
            "worker.python at the serving engine's interpreter, and look at CUDA_VISIBLE_DEVICES"
        )
    yield Finding(rule="unreached", state=State.UNKNOWN, cause=Cause.ENVIRONMENT, message=text)


def devices_missing(docket: Docket) -> Iterator[Finding]:
    """Fewer accelerators are found than the configuration expects."""
    if docket.count is not None and docket.count[0] < docket.count[1]:
        found, expected = docket.count
        text = (
            f"{found} of {expected} accelerators are found: look for the others in the kernel log and on the bus; "
            "those taken out on purpose belong into devices.absent, with devices.expected lowered"
        )
        yield Finding(rule="devices-missing", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text)


def devices_unlisted(docket: Docket) -> Iterator[Finding]:
    """A vendor's library or driver is there and could not say which devices there are: some may be missing here."""
    for vendor, why in sorted(docket.unlisted.items()):
        text = f"the {vendor} devices of this host could not be listed, so some may be missing from this report: {why}"
        yield Finding(rule="devices-unlisted", state=State.UNKNOWN, cause=Cause.ENVIRONMENT, message=text)


def telemetry_signs(docket: Docket) -> Iterator[Finding]:
    """What the device, its driver and the kernel log say of it (docs/telemetry.md)."""
    if docket.signs is not None:
        gone = docket.gone_since is not None  # what it was found to be stands; that it is silent now says nothing new
        yield from (f for f in telemetry.findings(docket.signs) if not (gone and f.rule == "telemetry-stale"))


def recordings(docket: Docket) -> Iterator[Finding]:
    """What the device's recordings say beside their baselines (docs/baselines.md)."""
    yield from docket.recorded


def drift(docket: Docket) -> Iterator[Finding]:
    """What the device's days say beside its own before and its siblings' (docs/trend.md): slow, hot, less exact."""
    yield from docket.trends


def endpoint_departed(docket: Docket) -> Iterator[Finding]:
    """An endpoint that this device serves gives unknown bits on an unchanged chain: the device is a suspect."""
    for name, (count, findings) in sorted(docket.serving.items()):
        for found in (f for f in findings if f.rule == "recording-departed"):
            among = "" if count == 1 else f", one of {count} devices behind it,"
            cause = found.cause if count == 1 else Cause.UNDETERMINED
            message = f"{name}, which this device{among} serves, departs: {found.message}"
            yield replace(found, rule="endpoint-departed", cause=cause, message=message, runs=())


def no_fresh_evidence(docket: Docket) -> Iterator[Finding]:
    """Nothing was asked, nothing has run, or it is too long ago: unknown, never healthy."""
    if not docket.wanted and not docket.divided and not any(unreached(docket)):
        text = "no enabled probe gives evidence about this device; disabled is not healthy"
        yield Finding(rule="no-evidence", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text)
    for probe in sorted(docket.wanted):
        completed = [r for r in docket.scheduled(probe) if r.outcome is Outcome.COMPLETED]
        if not completed and any(unreached(docket)):
            continue
        if not completed:
            text = f"no evidence yet: {probe} has not completed a run on this device"
            yield Finding(rule="no-evidence", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text, probe=probe)
        elif (old := age(completed[-1], docket.now)) > docket.limit(probe):
            period = _spoken(docket.wanted[probe])
            what = f"{_spoken(old)} old" if old < math.inf else "dated in the future, so its age is not known"
            text = f"evidence is {what}: {probe} has not completed since, though wanted every {period}"
            yield _finding("stale-evidence", State.UNKNOWN, Cause.UNDETERMINED, text, completed[-1])


def checked_nothing(docket: Docket) -> Iterator[Finding]:
    """A run completed without looking at anything: skipped parts are fine, skipping all of them is not evidence."""
    for run in docket.current:
        idle = not run.readings or any(r.name == "trials" and r.value == 0 for r in run.readings)
        compared = any(c.subject is Subject.DEVICE for c in run.comparisons)
        if run.outcome is Outcome.COMPLETED and idle and not compared:
            reason = f"; first skipped: {run.skipped[0].case}, {run.skipped[0].reason}" if run.skipped else ""
            message = f"{run.probe} completed, but it checked nothing{reason}"
            yield _finding("checked-nothing", State.UNKNOWN, Cause.HARNESS, message, run)


def history_lost(docket: Docket) -> Iterator[Finding]:
    """The database was damaged and begun anew: what was suspect before is not known, until somebody has looked."""
    if docket.lost is None:
        return
    at, aside = docket.lost
    if docket.now - at < docket.policy.watch and not any(a.at >= at for a in docket.said):
        text = (
            f"the records of this machine were damaged or removed, and begun anew on {moment(at, seconds=False)}, so "
            f"what was found of this device before is not known; what is left of them is {aside}. Ends after "
            f"{_spoken(docket.policy.watch)}, or with "
            f'canaryd ack {docket.device.name} --reason "…"'
        )
        yield Finding(rule="history-lost", state=State.UNKNOWN, cause=Cause.HARNESS, message=text)


def clock_set_back(docket: Docket) -> Iterator[Finding]:
    """A run is dated in the future: its age is not known, so it is no fresh evidence. By itself it is only said."""
    ahead = [r for r in docket.runs if r.started > docket.now + AHEAD]
    if ahead:
        lead = _spoken(ahead[-1].started - docket.now)
        text = f"runs are dated up to {lead} in the future: was the clock set back? They are no fresh evidence"
        yield _finding("clock-set-back", State.HEALTHY, Cause.ENVIRONMENT, text, ahead[-1])


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


def vanished(docket: Docket) -> Iterator[Finding]:
    """The device was there and is not found any more: whatever it was, nothing is known of it now."""
    if docket.gone_since is not None:
        ago = _spoken(max(0.0, docket.now - docket.gone_since) // 60 * 60)
        yield Finding(
            rule="device-vanished",
            state=State.UNKNOWN,
            cause=Cause.UNDETERMINED,
            message=f"{docket.device.name} ({docket.device.model}) was last found {ago} ago and is not found now:"
            " look for it in the kernel log and on the bus; taken out on purpose, it is forgotten after judge.watch",
        )


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


def _suspicion(docket: Docket, rule: str, opening: str, hits: Sequence[Hit]) -> Finding:
    lead = _strongest(hits)
    count = len({h.run.id for h in hits})
    message = f"{opening}{hits[-1]}. Seen in {count} run{'s' * (count > 1)}. "
    known = any(h is lead for charges, _ in docket.confirmed for h in charges)
    message += "It is confirmed." if known else f"{lead.why} {_next(docket, hits)}"
    return _finding(rule, State.SUSPECT, lead.cause, message, hits)


def _next(docket: Docket, hits: Sequence[Hit]) -> str:
    """Say what happens next to a suspect: confirmation runs, then the watch."""
    root = hits[-1].run.confirms or hits[-1].run.id
    again = [r for r in docket.runs if r.confirms == root and r.outcome is Outcome.COMPLETED]
    clean = sum(1 for r in again if not any(h.run is r for h in hits))
    to_come = docket.policy.confirm_runs - len(again)
    before, _ = _record(docket, hits)
    text = f"Next: {to_come} confirmation runs in new processes. " if to_come > 0 else ""
    if clean:
        text += f"{clean} of {len(again)} confirmation runs are clean; a clean retest is not an acquittal. "
    uploads = math.ceil(RULE_OF_THREE * before.uploads / before.failed)
    results = math.ceil(RULE_OF_THREE * before.results / before.wrong)
    return (
        f"{text}Watched until {_spoken(docket.policy.watch)}, {uploads} clean uploads and {results} clean results have "
        "passed without another."
    )


def _finding(rule: str, state: State, cause: Cause, message: str, evidence: Sequence[Hit] | Run) -> Finding:
    """Make a finding that rests on one run, or on hits (oldest first)."""
    runs = [evidence] if isinstance(evidence, Run) else [h.run for h in evidence]
    return Finding(
        rule=rule,
        state=state,
        cause=cause,
        message=message,
        probe=runs[-1].probe,
        repro=runs[-1].repro,
        runs=tuple(dict.fromkeys(r.id for r in runs))[-RUNS_NAMED:],
        rivals=() if isinstance(evidence, Run) else _strongest(evidence).rivals,
    )


def _strongest(hits: Sequence[Hit]) -> Hit:
    """Return the newest of the hits whose cause ranks first."""
    return min(reversed(hits), key=lambda h: CAUSES.index(h.cause))


def _spoken(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size or (unit == "hours" and seconds == size):
            return f"{seconds / size:.4g} {unit}" if seconds % size == 0 else f"{seconds // size:g} {unit}"
    return f"{seconds:g} seconds"


# --- Verdicts -------------------------------------------------------------------------------------------------------


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
