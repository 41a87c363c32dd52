"""The case: all data for the decision about one device, and the counts of its runs."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Subject, stack_id
from canaryd.judge import cause as judge_cause
from canaryd.judge import served
from canaryd.judge.cause import Mismatch, Record, Same, SameKey
from canaryd.judge.cells import broken_cells
from canaryd.judge.clock import AHEAD, age
from canaryd.judge.confirmation import GROUNDS
from canaryd.judge.links import links_of, lone_link
from canaryd.judge.node import Node, by_time
from canaryd.judge.statistics import RULE_OF_THREE, Count
from canaryd.judge.tally import Tallied, tally, total
from canaryd.judge.telemetry.signals import Signs
from canaryd.judge.units import lone_unit
from canaryd.judge.watch import is_over
from canaryd.model import Ack, Cause, Confirmation, Device, Event, Finding, Run, Verdict

NO_STACK = stack_id({})
"""Id of a stack that is not known."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All data for one decision about one device."""

    device: Device
    node: Node
    wanted: Mapping[str, float]
    """Probe whose results the verdict needs → seconds between two of its runs."""
    policy: JudgePolicy
    now: float
    previous: Verdict | None = None
    """The device's last verdict, or None before the first."""
    drill: bool = False
    """Whether drills are judged, and not real runs."""
    divided: bool = False
    """Whether the device is divided into instances (MIG). Then these are tested and not the device."""
    gone_since: float | None = None
    """Time at which the device was last seen, if it is not found any more; else None."""
    signs: Signs | None = None
    """What the device reports about itself (telemetry), or None if that is not judged."""
    sightings: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    """Peer → events that the list of devices showed about it in the last month, oldest first."""
    accelerators: tuple[int, int] | None = None
    """Numbers of accelerators found and expected on this host, if configured; for the host's CPU only."""
    unlisted: Mapping[str, str] = field(default_factory=dict)
    """Vendor → reason why its devices on this host could not be listed; for the host's CPU only."""
    recordings: Sequence[Finding] = ()
    """Findings about results without a known right answer, which are compared with earlier ones."""
    behind: Sequence[served.Behind] = ()
    """The devices on which this endpoint's server runs; empty for a device."""
    serving: Mapping[str, tuple[int, Sequence[Finding]]] = field(default_factory=dict)
    """Endpoint served by this device → number of devices that serve it, and the findings about its recordings."""
    acks: Sequence[Ack] = ()
    """Acknowledgements, repairs and replacements of this device."""
    history_lost: tuple[float, str] | None = None
    """Time at which this machine's records were lost, and the file with the rest; None if none were lost."""
    unread: str = ""
    """The reason why recorded runs of this device could not be read; "" if all were read."""
    slower: Sequence[Finding] = ()
    """Findings about this device's speed, from the summaries of its days."""
    compared: tuple[int, int] | None = None
    """(Number of results that a check compared, number that it had to compare), or None if no number was asked for."""

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
    def is_cpu(self) -> bool:
        """Whether the device is the host's processor."""
        return self.device.backend == "cpu"

    def watched(self, since: float, probes: Collection[str], of: Iterable[str]) -> bool:
        """Return whether the observation period since `since` is over, counted in days with tests.

        Only tests with one of `probes` on one of the devices `of` (uuids) count.
        """
        days = {day for uuid in of for probe in probes for day in self.node.tested.get(uuid, {}).get(probe, ())}
        fresh = min((self.limit(probe) for probe in probes if probe in self.wanted), default=0.0)
        return is_over(since, self.now, self.policy.watch, days, fresh)

    def limit(self, probe: str) -> float:
        """Return the largest age in seconds of a result of this probe that counts as fresh."""
        return freshness(self.policy, self.wanted[probe])

    def scheduled(self, probe: str) -> list[Run]:
        """Return the probe's runs that show the device's present state, oldest first.

        Runs that confirm another run, or are limited to some cases, are left out. Runs dated in the future (by a clock
        that was set back) count only if there are no others, because they must not hide newer runs.
        """
        return self._scheduled.get(probe, [])

    @cached_property
    def _scheduled(self) -> Mapping[str, list[Run]]:
        by_probe: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            if run.whole:
                by_probe[run.probe].append(run)
        return {probe: self._dated(runs) for probe, runs in by_probe.items()}

    def _dated(self, runs: list[Run]) -> list[Run]:
        known = [r for r in runs if age(r, self.now) < math.inf]
        return sorted(known, key=lambda r: -age(r, self.now)) or runs

    @cached_property
    def current(self) -> list[Run]:
        """The newest runs of the probes in `wanted`, one for each instruction set that is still tested."""
        found = []
        for probe in sorted(self.wanted):
            runs = self.scheduled(probe)
            lanes = {r.instruction_set: r for r in runs}
            found += [r for r in lanes.values() if r is runs[-1] or age(r, self.now) <= self.limit(probe)]
        return found

    @cached_property
    def fresh_results(self) -> int:
        """Number of results that the probes in `wanted` compared recently enough to be fresh."""
        runs = ((run, self.limit(probe)) for probe in self.wanted for run in self.scheduled(probe))
        return sum(run.trials for run, limit in runs if age(run, self.now) <= limit)

    def host_in_doubt(self, run: Run) -> bool:
        """Return whether the host's CPU was wrong at about the same time as a run on an accelerator."""
        return not self.is_cpu and _near(self.node.cpu_erred, run.started, self.policy.repeat_window)

    def host_clean(self, run: Run) -> bool | None:
        """Return whether the host's CPU computed only right goldens near the run's time; None if it computed none."""
        near = [
            r
            for uuid, runs in self.peers.items()
            if self.devices[uuid].backend == "cpu" and uuid != self.device.physical
            for r in runs
            if r.trials and abs(r.started - run.started) <= self.policy.repeat_window
        ]
        return not self.host_in_doubt(run) if near and not self.is_cpu else None

    @cached_property
    def accusations(self) -> tuple[Mismatch, ...]:
        """All mismatches that accuse this device, with causes, oldest first; not those that new software has cured."""
        accusations: list[Mismatch] = []
        for mismatches in self._groups:
            seen = scene(self, mismatches)
            cause, why, rivals = judge_cause.decide(seen)
            if cause is not Cause.SOFTWARE or not cured(self, mismatches):
                blamed = (h._replace(cause=cause, why=why, rivals=rivals) for h in mismatches)
                accusations += [h if seen.insistent else self._doubted(h) for h in blamed]
        return tuple(sorted(accusations, key=lambda h: by_time(h.run)))

    @cached_property
    def _groups(self) -> Sequence[Sequence[Mismatch]]:
        """The mismatches that accuse this device, in groups with one cause each."""
        groups: dict[object, list[Mismatch]] = defaultdict(list)
        goldens = self.node.host_mismatches[0] if self.is_cpu else ()
        for mismatch in (*self.node.accusing[self.device.uuid], *goldens):
            # A core that once gave two results says nothing of a reference that fails elsewhere.
            groups[
                mismatch.comparison.subject,
                mismatch.run.probe,
                mismatch.run.stack_id,
                mismatch.makers is not None,
                id(mismatch.comparison) in self.node.own,
                bool(mismatch.comparison.peer),
            ].append(mismatch)
        return [*groups.values()]

    @cached_property
    def same(self) -> Mapping[SameKey, Same]:
        """How siblings computed the data that this device computed wrong: what was known, and what runs show now."""
        known = self.node.known.get(self.device.uuid, {})
        found = {**known}
        for mismatches in self._groups if not self.device.is_endpoint else ():
            run, of = mismatches[-1].run, mismatches[-1].comparison
            if of.subject is Subject.DEVICE and not of.peer and run.stack:
                own, siblings = _records(self, mismatches)
                data = {m.operands for m in mismatches}
                same = judge_cause.same_operands(own, siblings, data, 1 + self.policy.confirm_runs)
                key = same_key(self, mismatches)
                before = known.get(key, Same())
                outlasted = _outlasted(self, mismatches, before)
                found[key] = same._replace(outlasted=outlasted).after(before, own.results)
        return found

    def _doubted(self, mismatch: Mismatch) -> Mismatch:
        if not self.host_in_doubt(mismatch.run):
            return mismatch
        why = "The host's CPU was wrong at about the same time: the fault may be the host's."
        return mismatch._replace(cause=Cause.UNDETERMINED, why=why, rivals=(), host_in_doubt=True)

    @cached_property
    def confirmed(self) -> list[tuple[list[Mismatch], list[Confirmation]]]:
        """The confirmed mismatches, as pairs (mismatches, how they were confirmed).

        Mismatches caused by software and mismatches of the device do not confirm each other. A mismatch does not count
        if the host's CPU was wrong at that time, or if its golden is disputed.
        """
        firm = [h for h in self.accusations if not h.host_in_doubt and not _disputed(h)]
        sides = [[h for h in firm if (h.cause is Cause.SOFTWARE) is excused] for excused in (False, True)]
        found = [
            (mismatches, [how for ground in GROUNDS if (how := ground(mismatches, self.policy))])
            for mismatches in sides
        ]
        return [(mismatches, grounds) for mismatches, grounds in found if grounds]

    def standing(self, subject: Subject, mismatches: Iterable[Mismatch]) -> Iterator[list[Mismatch]]:
        """Yield, probe by probe, the mismatches of a subject that time and clean trials have not cleared."""
        found = sorted((h for h in mismatches if h.comparison.subject is subject), key=lambda h: h.run.probe)
        for _, group in itertools.groupby(found, key=lambda h: h.run.probe):
            if not _cleared(self, listed := list(group)):
                yield listed


def record(case: Case, mismatches: Sequence[Mismatch]) -> tuple[Count, Count]:
    """Return the counts of all trials up to a probe's newest mismatch and of clean ones since, in equal conditions.

    What is dated in the future is no clean trial: the clock was wrong then, or is wrong now.
    """
    newest, subject = mismatches[-1].run.started, mismatches[-1].comparison.subject
    counted = _under_same_conditions(case, mismatches)
    since = total((t for t in counted if newest < t.first <= case.now + AHEAD), subject)
    clean = Count(since.results - since.wrong, 0, since.uploads - since.failed, 0)
    return total((t for t in counted if t.first <= newest), subject), clean


def since_onset(case: Case, mismatches: Sequence[Mismatch]) -> Count:
    """Return the count of trials since the first mismatch of a probe, under the same conditions."""
    first = first_failure(case, mismatches)
    counted = (t for t in _under_same_conditions(case, mismatches) if t.last >= first)
    return total(counted, mismatches[-1].comparison.subject)


def results_during(case: Case, mismatches: Sequence[Mismatch], began: float) -> int:
    """Return the number of results that were compared from `began` until the newest mismatch of a probe."""
    newest = mismatches[-1].run.started
    counted = (t for t in _under_same_conditions(case, mismatches) if t.last >= began and t.first <= newest)
    return total(counted, mismatches[-1].comparison.subject).results


def first_failure(case: Case, mismatches: Sequence[Mismatch]) -> float:
    """Return the time (epoch s) of the first mismatch of a probe on one stack, though its run may be gone."""
    run = mismatches[0].run
    erred = [t for t in case.node.tallies[case.device.uuid] if t.lane.erred and t.lane.probe == run.probe]
    first = min((t.first for t in erred if t.lane.stack_id == run.stack_id), default=run.started)
    at_hand = any(r.started == first and r.probe == run.probe for r in case.runs)
    return run.started if at_hand else min(first, run.started)


def _under_same_conditions(case: Case, mismatches: Sequence[Mismatch]) -> list[Tallied]:
    """Return the probe's tallies with the instruction sets and the intensities of the runs with mismatches."""
    runs = {m.run.id: m.run for m in mismatches}.values()
    lanes = {(run.probe, run.instruction_set) for run in runs}
    # What was seen only under load is cleared only by trials under load; what shows in a usual run shows in any.
    loads = {run.intensity for run in runs}
    pool = case.node.tallies if mismatches[-1].comparison.subject is Subject.HOST else [case.device.uuid]
    every = itertools.chain.from_iterable(case.node.tallies[uuid] for uuid in pool)
    found = [t for t in every if (t.lane.probe, t.lane.instruction_set) in lanes and loads & {"", t.lane.intensity}]
    # Without a count of what was wrong the counts are damaged.
    return found if any(t.lane.erred for t in found) else [*found, *map(tally, runs)]


def _cleared(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether mismatches no longer count: the observation period is over and clean trials exclude their rate."""
    before, since = record(case, mismatches)
    newest, of = mismatches[-1].run, [case.device.uuid]
    if mismatches[-1].comparison.subject is Subject.HOST:  # goldens are made for every device
        of = [*case.node.devices]
    return case.watched(newest.started, {newest.probe}, of) and since.outlasts(before)


def newest_stack(case: Case, run: Run) -> str:
    """Return the id of the software (`Run.stack_id`) with which this probe and instruction set ran last."""
    return max(_lane(case, run), key=lambda t: t.last, default=tally(run)).lane.stack_id


def cured(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether the probe now runs on other software than in mismatches of one stack, and has been right on it.

    It takes three times as many clean trials as one failure took on the accused software.
    """
    run, stack = mismatches[-1].run, newest_stack(case, mismatches[-1].run)
    found = total(t for t in _lane(case, run) if t.lane.stack_id == stack)
    before = [
        t
        for t in _under_same_conditions(case, mismatches)
        if t.lane.stack_id == run.stack_id and t.first <= run.started
    ]
    # Retests repeat what was wrong, and so say nothing of how often a normal run fails; under load there are no others.
    accused = total(t for t in before if t.lane.whole)
    accused = accused if accused.failed else total(before)
    return stack != run.stack_id and not found.failed and accused.failed > 0 and found.outlasts(accused)


def scene(case: Case, mismatches: Sequence[Mismatch]) -> judge_cause.Scene:
    """Return the facts from which the cause of mismatches follows; all are of one subject, probe and software stack."""
    newest, run = mismatches[-1], mismatches[-1].run
    if case.device.is_endpoint:
        return served.scene(case.behind, case.runs, mismatches)
    if newest.comparison.subject is Subject.HOST:
        return _scene_of_goldens(case, mismatches)
    if newest.comparison.peer:
        links = links_of(case.node.ends, case.device.uuid, case.node.devices, mismatches)
        return judge_cause.Scene(links=links, host_clean=case.host_clean(run))
    own, siblings = _records(case, mismatches)
    key = same_key(case, mismatches)
    changed = _changed(case, mismatches)
    company = _company(case, mismatches, changed)
    sound = siblings.keys() - company
    enough = 1 + case.policy.confirm_runs
    same = case.same.get(key, Same())
    # Beside others that fail one wrong upload says nothing, since those were right elsewhere too.
    right = {u: n for u, (n, _) in same.right.items() if u in sound and (n >= enough or not company)}
    lone = lone_unit(case.runs, mismatches, enough)
    return judge_cause.Scene(
        whole_host=case.is_cpu and _whole_host(case, mismatches),
        lone_unit=lone[0] if lone else None,
        sound_units=lone[1] if lone else None,
        links=lone_link(mismatches),
        cells=broken_cells(m.comparison.evidence for m in mismatches if m.comparison.evidence),
        right=_names(case, right),
        insistent=max(right.values(), default=0) >= enough and not same.alike,
        alike=_names(case, same.alike),
        unlike=_names(case, same.unlike),
        outlasting=_names(case, same.outlasted),
        company=_names(case, company),
        changed=changed,
        right_since=not sound - _wrong_too(case, run) and _right_since(case, mismatches),
        believed=_believed(case, mismatches),
        siblings=_names(case, siblings),
        views=_views(case, run),
        host_clean=case.host_clean(run),
        goldens_right=any(c.trials > c.wrong_trials for m in mismatches for c in own.results.get(m.operands, ())),
    )


def _outlasted(case: Case, mismatches: Sequence[Mismatch], before: Same) -> frozenset[str]:
    """Return the siblings that fail far more rarely than this device, now or when it was found, if they do so still.

    After a change of software from which others fail too, rates tell nothing of a device.
    """
    own, siblings = _records(case, mismatches)
    changed = _changed(case, mismatches)
    if changed and any(record.failing for record in siblings.values()):
        return frozenset()
    if before.outlasted and judge_cause.outlasts_still(own, siblings):
        return before.outlasted
    return judge_cause.fails_more(own, siblings, _company(case, mismatches, changed))


def same_key(case: Case, mismatches: Sequence[Mismatch]) -> SameKey:
    """Return of what siblings' results on the data of mismatches are told."""
    run = mismatches[-1].run
    own = id(mismatches[-1].comparison) in case.node.own
    return SameKey(run.probe, run.probe_version, run.stack_id, own)


def _records(case: Case, mismatches: Sequence[Mismatch]) -> tuple[Record, Mapping[str, Record]]:
    """Return the device's results like those of mismatches, and its siblings' by uuid."""
    run, shared = mismatches[-1].run, not same_key(case, mismatches).own
    own = case.node.record(case.device.uuid, run, shared=shared) or Record({}, 0, Count())
    siblings = {
        uuid: theirs
        for uuid, device in sorted(case.devices.items())
        if device.kind == case.device.kind and (theirs := case.node.record(uuid, run, shared=shared))
    }
    return own, siblings


def _names(case: Case, uuids: Iterable[str]) -> frozenset[str]:
    return frozenset(case.devices[uuid].name if uuid in case.devices else uuid for uuid in uuids)


def _views(case: Case, run: Run) -> frozenset[str]:
    """Return the names of the same physical part in other runtimes that computed only right results at that time."""
    same = {uuid: d.name for uuid, d in case.devices.items() if d.physical == case.device.physical}
    near = {
        uuid: [r for r in case.peers[uuid] if r.trials and abs(r.started - run.started) <= case.policy.repeat_window]
        for uuid in same
    }
    return frozenset(same[uuid] for uuid, runs in near.items() if runs and not any(r.wrong for r in runs))


def _company(case: Case, mismatches: Sequence[Mismatch], changed: str) -> frozenset[str]:
    """Return the devices that began to be wrong with this one and can share the cause.

    These are devices of the same kind on the same software, and accelerators of other kinds, which share the host. They
    began within `repeat_window`, or, if software `changed`, on the new one at any time.
    """
    onsets, own, run = case.node.onsets, case.device, mismatches[-1].run
    began = onsets.get((own.uuid, run.stack_id))
    if began is None or not run.stack or not same_key(case, mismatches).own:
        return frozenset()
    return frozenset(
        uuid
        for (uuid, stack), theirs in onsets.items()
        if uuid in case.devices and (changed or abs(theirs - began) <= case.policy.repeat_window)
        if (stack == run.stack_id if case.devices[uuid].kind == own.kind else _share_a_host(case.devices[uuid], own))
    )


def _share_a_host(one: Device, other: Device) -> bool:
    """Return whether two devices are different accelerators: only the host can make both of them wrong."""
    return not any(d.backend == "cpu" or d.is_endpoint for d in (one, other)) and one.part != other.part


def _wrong_too(case: Case, run: Run) -> frozenset[str]:
    """Return the other devices with a wrong result from the same probe on the same software, in any bits."""
    return frozenset(
        uuid
        for uuid in case.devices
        if any((m.run.probe, m.run.stack_id) == (run.probe, run.stack_id) for m in case.node.accusing[uuid])
    )


def _lane(case: Case, run: Run) -> list[Tallied]:
    """Return the tallies of completed, whole runs of the same probe and instruction set as `run`, oldest first.

    Runs without a stack are left out, and runs that are dated in the future.
    """
    of = run.probe, run.instruction_set
    return [
        t
        for t in case.node.tallies[case.device.uuid]
        if (t.lane.probe, t.lane.instruction_set) == of and t.lane.whole and t.lane.completed
        if t.lane.stack_id != NO_STACK and t.first <= case.now + AHEAD
    ]


class OtherSoftware(NamedTuple):
    """A device's results on software other than the software on which the device was wrong."""

    tallies: Sequence[Tallied]
    """Completed, whole runs of the same probe and instruction set."""
    tried: Count
    """Count of results and uploads in `tallies`."""
    accused: Count
    """Count of results and uploads on the software on which the device was wrong, up to the newest mismatch."""

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(t.runs for t in self.tallies)

    @property
    def lasted(self) -> float:
        """Seconds from the first run to the last."""
        return max((t.last for t in self.tallies), default=0.0) - min((t.first for t in self.tallies), default=0.0)

    @property
    def right(self) -> bool:
        """Whether nothing was wrong in three times as many trials as one failure took on the accused software."""
        failed = self.accused.failed > 0 and not self.tried.failed
        return bool(self.tallies) and failed and self.tried.outlasts(self.accused)


def on_other_software(case: Case, mismatches: Sequence[Mismatch], *, since: bool) -> OtherSoftware:
    """Return the device's results on other software: those after its first mismatch if `since`, else those before."""
    run, newest, lane = mismatches[0].run, mismatches[-1].run.started, _lane(case, mismatches[0].run)
    first = first_failure(case, mismatches)
    tried = [t for t in lane if t.lane.stack_id != run.stack_id and (t.first > first) is since]
    accused = (t for t in lane if t.lane.stack_id == run.stack_id and t.first <= newest)
    return OtherSoftware(tried, total(tried), total(accused))


def _changed(case: Case, mismatches: Sequence[Mismatch]) -> str:
    """Return what changed in the software before the first mismatch, or "" if no change can explain the mismatches.

    The device must have been right on the old software. On the new one it must not have been right nine times as long
    as it then took to fail (ours; a fault of the new software would be absent for so long in 1.2e-4 of cases).
    """
    before, run, first = (
        on_other_software(case, mismatches, since=False),
        mismatches[0].run,
        first_failure(case, mismatches),
    )
    here = [t for t in _lane(case, run) if t.lane.stack_id == run.stack_id]
    at_first = total(t for t in here if t.first < first)
    then = total(t for t in here if first < t.first <= mismatches[-1].run.started)
    rarer = then._replace(results=RULE_OF_THREE * then.results, uploads=RULE_OF_THREE * then.uploads)
    if not before.right or (then.failed and at_first.outlasts(rarer)):
        return ""
    old, new = case.node.stack(max(before.tallies, key=lambda t: t.last).lane.stack_id), run.stack
    return ", ".join(sorted(link for link in {*old, *new} if old.get(link) != new.get(link)))


def _right_since(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether, since its first mismatch, the device has been right on other software for at least a week."""
    other = on_other_software(case, mismatches, since=True)
    return other.right and other.lasted >= case.policy.week


def _believed(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether an operator blamed the software after the newest mismatch, and later runs support that."""
    said = any(a.kind == "software" and a.at >= mismatches[-1].run.started for a in case.acks)
    return said and supports(case, on_other_software(case, mismatches, since=True))


def least_right_runs(policy: JudgePolicy) -> int:
    """Return the least number of right runs on other software that support an operator's word: a run and retests."""
    return 1 + policy.confirm_runs


def supports(case: Case, other: OtherSoftware) -> bool:
    """Return whether runs on other software support an operator's word that the software was at fault.

    They must last a day (`judge.repeat_window`), because heat and load return daily. They must be four or more, because
    one proves little. They must have three times the trials per failure. Without an operator's word a week is
    needed. False alarms: none, it accuses no device.
    """
    enough = other.runs >= least_right_runs(case.policy) and other.lasted >= case.policy.repeat_window
    return enough and other.right


def _scene_of_goldens(case: Case, mismatches: Sequence[Mismatch]) -> judge_cause.Scene:
    """Return the facts about goldens that the host computed twice, with two results: a core or the golden is wrong."""
    for mismatch in reversed(mismatches):
        if mismatch.makers:
            return judge_cause.Scene(golden=True, makers=mismatch.makers)
        made = mismatch.run.probe, mismatch.run.probe_version, mismatch.operands
        core = mismatch.comparison.place.core
        if core is not None and made in case.node.goldens:
            return judge_cause.Scene(golden=True, lone_core=core)
    return judge_cause.Scene(golden=True)


def _whole_host(case: Case, mismatches: Sequence[Mismatch]) -> bool:
    """Return whether, within `repeat_window`, all accelerators (two or more) were wrong too, each in different bits."""
    times, window = sorted(h.run.started for h in mismatches), case.policy.repeat_window
    others = (uuid for uuid, d in case.devices.items() if d.backend != "cpu" and d.physical == d.uuid)
    peers = [case.node.accusing[uuid] for uuid in others]
    accused = [mismatches, *([h for h in theirs if _near(times, h.run.started, window)] for theirs in peers)]
    ways = [{(h.run.probe, h.operands, m) for h in each for m in judge_cause.marks([h.comparison])} for each in accused]
    return len(peers) >= 2 and all(accused) and len(set().union(*ways)) == sum(map(len, ways))


def _near(times: Sequence[float], at: float, window: float) -> bool:
    """Return whether a time in `times` (ascending) is at most `window` seconds before or after `at`."""
    following = bisect.bisect_left(times, at - window)
    return following < len(times) and times[following] <= at + window


def _disputed(mismatch: Mismatch) -> bool:
    """Return whether it is not known which of two is at fault: a golden or the core that made it, or a link's two ends.

    A wrong reference repeats as reliably as a broken core, and a wrong link at both ends: suspect, never confirmed.
    """
    of_two = mismatch.comparison.subject is Subject.HOST or bool(mismatch.comparison.peer)
    return of_two and mismatch.cause is not Cause.HARDWARE


def freshness(policy: JudgePolicy, period: float) -> float:
    """Return the age in seconds up to which a result counts as fresh, for a probe that runs every `period` seconds.

    It is three periods, because two runs can be missed (ours). False alarms: none, the evidence is that old.
    """
    return max(policy.stale_after, 3 * period)
