"""The case: all data for the decision about one device, and the counts of its runs."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Subject, stack_id
from canaryd.judge import cause as judge_cause
from canaryd.judge import served
from canaryd.judge.cause import Decided, Mismatch, Record, Same, SameKey
from canaryd.judge.cells import broken_cells, name_cells
from canaryd.judge.clock import AHEAD, age
from canaryd.judge.confirmation import GROUNDS
from canaryd.judge.findings import strongest
from canaryd.judge.links import links_of, lone_link
from canaryd.judge.node import Node, by_time, find_mismatches
from canaryd.judge.statistics import RULE_OF_THREE, Count
from canaryd.judge.tally import Tallied, tally, total
from canaryd.judge.telemetry.signals import Signs
from canaryd.judge.units import lone_unit
from canaryd.judge.watch import is_over
from canaryd.model import Ack, Cause, Confirmation, Device, Event, EventKind, Files, Finding, ModelServer, Run, Verdict

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

    def near(self, uuid: str, run: Run) -> list[Run]:
        """Return a peer's runs with results that began within `repeat_window` of a run."""
        return [r for r in self.peers[uuid] if r.trials and abs(r.started - run.started) <= self.policy.repeat_window]

    def host_in_doubt(self, run: Run) -> bool:
        """Return whether the host's CPU was wrong at about the same time as a run on an accelerator."""
        return not self.is_cpu and _near(self.node.cpu_erred, run.started, self.policy.repeat_window)

    def host_clean(self, run: Run) -> bool | None:
        """Return whether the host's CPU computed only right goldens near the run's time; None if it computed none."""
        cpus = (u for u, d in self.devices.items() if d.backend == "cpu" and u != self.device.physical)
        near = any(self.near(uuid, run) for uuid in cpus)
        return not self.host_in_doubt(run) if near and not self.is_cpu else None

    @cached_property
    def accusations(self) -> tuple[Mismatch, ...]:
        """All mismatches that accuse this device, with causes, oldest first; not those that new software has cured."""
        accusations: list[Mismatch] = []
        for group in self._groups:
            cause, why, rivals = group.decided
            if cause is not Cause.SOFTWARE or not group.is_cured:
                blamed = (h._replace(cause=cause, why=why, rivals=rivals) for h in group.mismatches)
                accusations += [h if group.is_insistent else self._doubted(h) for h in blamed]
        return tuple(sorted(accusations, key=lambda h: by_time(h.run)))

    @cached_property
    def _groups(self) -> Sequence[Mismatches]:
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
        return [Mismatches(self, mismatches) for mismatches in groups.values()]

    @cached_property
    def same(self) -> Mapping[SameKey, Same]:
        """How siblings computed the data that this device computed wrong: what was known, and what runs show now."""
        known = self.node.known.get(self.device.uuid, {})
        return {**known, **{group.key: group.same for group in self._groups if group.is_compared}}

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
        found = ((side, [how for ground in GROUNDS if (how := ground(side, self.policy))]) for side in sides)
        return [(side, grounds) for side, grounds in found if grounds]

    @cached_property
    def suspected(self) -> Mapping[Subject, Sequence[list[Mismatch]]]:
        """Subject → probe by probe, what accuses this device and was not cleared."""
        of = {s: find_mismatches(self.runs, s) if s is Subject.COMPARATOR else self.accusations for s in Subject}
        return {subject: list(self.standing(subject, mismatches)) for subject, mismatches in of.items()}

    def fault(self, mismatches: Sequence[Mismatch]) -> list[Mismatch]:
        """Return all mismatches of the fault to which these belong, oldest first; what software causes is another."""
        excused = strongest(mismatches).cause is Cause.SOFTWARE
        groups = itertools.chain(*self.suspected.values(), (accused for accused, _ in self.confirmed))
        same = (m for group in groups for m in group if (m.cause is Cause.SOFTWARE) is excused)
        return sorted({id(m.comparison): m for m in (*same, *mismatches)}.values(), key=lambda m: by_time(m.run))

    def standing(self, subject: Subject, mismatches: Iterable[Mismatch]) -> Iterator[list[Mismatch]]:
        """Yield, probe by probe, the mismatches of a subject that time and clean trials have not cleared."""
        found = sorted((h for h in mismatches if h.comparison.subject is subject), key=lambda h: h.run.probe)
        for _, group in itertools.groupby(found, key=lambda h: h.run.probe):
            if not Mismatches(self, listed := list(group)).is_cleared:
                yield listed


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
    def is_right(self) -> bool:
        """Whether nothing was wrong in three times as many trials as one failure took on the accused software."""
        failed = self.accused.failed > 0 and not self.tried.failed
        return bool(self.tallies) and failed and self.tried.outlasts(self.accused)

    def supports(self, policy: JudgePolicy) -> bool:
        """Return whether the runs support an operator's word that the software was at fault.

        They must last a day, because heat and load return daily. False alarms: none, it accuses no device.
        """
        enough = self.runs >= least_right_runs(policy) and self.lasted >= policy.repeat_window
        return enough and self.is_right


def least_right_runs(policy: JudgePolicy) -> int:
    """Return the least number of right runs on other software that support an operator's word: a run and retests."""
    return 1 + policy.confirm_runs


@dataclass(frozen=True, eq=False)
class Mismatches:
    """Mismatches of one subject and probe, oldest first; what names a cause is meant for those of one stack."""

    case: Case
    mismatches: Sequence[Mismatch]

    @property
    def run(self) -> Run:
        """The run of the newest mismatch."""
        return self.mismatches[-1].run

    @property
    def subject(self) -> Subject:
        """The subject of all its comparisons."""
        return self.mismatches[-1].comparison.subject

    # -- trials, under the conditions of the mismatches --

    @cached_property
    def trials(self) -> Sequence[Tallied]:
        """The probe's tallies with the instruction sets and the intensities of the runs with mismatches."""
        runs, tallies = {m.run.id: m.run for m in self.mismatches}.values(), self.case.node.tallies
        lanes = {(run.probe, run.instruction_set) for run in runs}
        # What was seen only under load is cleared only by trials under load; what shows in a usual run shows in any.
        loads = {run.intensity for run in runs}
        pool = tallies if self.subject is Subject.HOST else [self.case.device.uuid]
        every = itertools.chain.from_iterable(tallies[uuid] for uuid in pool)
        found = [t for t in every if (t.lane.probe, t.lane.instruction_set) in lanes and loads & {"", t.lane.intensity}]
        # Without a count of what was wrong the counts are damaged.
        return found if any(t.lane.erred for t in found) else [*found, *map(tally, runs)]

    @cached_property
    def accused(self) -> Count:
        """The count of all trials up to the newest mismatch."""
        return total((t for t in self.trials if t.first <= self.run.started), self.subject)

    @cached_property
    def clean(self) -> Count:
        """The count of clean trials since. What is dated in the future is none: the clock was wrong then, or is now."""
        newest = self.run.started
        since = total((t for t in self.trials if newest < t.first <= self.case.now + AHEAD), self.subject)
        return Count(since.results - since.wrong, 0, since.uploads - since.failed, 0)

    @property
    def is_cleared(self) -> bool:
        """Whether it counts no more: the observation period is over, and clean trials exclude the failure rate."""
        host = self.subject is Subject.HOST  # goldens are made for every device
        of = self.case.node.devices if host else [self.case.device.uuid]
        return self.case.watched(self.run.started, {self.run.probe}, of) and self.clean.outlasts(self.accused)

    @cached_property
    def began(self) -> float:
        """The time (epoch s) of the first mismatch of a probe on one stack, though its run may be gone."""
        run, case = self.mismatches[0].run, self.case
        erred = [t for t in case.node.tallies[case.device.uuid] if t.lane.erred and t.lane.probe == run.probe]
        first = min((t.first for t in erred if t.lane.stack_id == run.stack_id), default=run.started)
        at_hand = any(r.started == first and r.probe == run.probe for r in case.runs)
        return run.started if at_hand else min(first, run.started)

    # -- other software --

    def _lane(self, run: Run) -> list[Tallied]:
        """Return the tallies of completed, whole runs of the same probe and instruction set as `run`, oldest first.

        Runs without a stack are left out, and runs that are dated in the future.
        """
        of, case = (run.probe, run.instruction_set), self.case
        return [
            t
            for t in case.node.tallies[case.device.uuid]
            if (t.lane.probe, t.lane.instruction_set) == of and t.lane.whole and t.lane.completed
            if t.lane.stack_id != NO_STACK and t.first <= case.now + AHEAD
        ]

    @property
    def newest_stack(self) -> str:
        """The id of the software (`Run.stack_id`) with which this probe and instruction set ran last."""
        return max(self._lane(self.run), key=lambda t: t.last, default=tally(self.run)).lane.stack_id

    @property
    def is_cured(self) -> bool:
        """Whether the probe runs on other software now, and was right there for three times the trials per failure."""
        run, stack = self.run, self.newest_stack
        found = total(t for t in self._lane(run) if t.lane.stack_id == stack)
        before = [t for t in self.trials if t.lane.stack_id == run.stack_id and t.first <= run.started]
        # Retests repeat what was wrong: they do not show how often a normal run fails. Under load there are no others.
        accused = total(t for t in before if t.lane.whole)
        accused = accused if accused.failed else total(before)
        return stack != run.stack_id and not found.failed and accused.failed > 0 and found.outlasts(accused)

    def on_other_software(self, *, since: bool) -> OtherSoftware:
        """Return the device's results on other software: after the first mismatch if `since`, else before it."""
        run, lane = self.mismatches[0].run, self._lane(self.mismatches[0].run)
        tried = [t for t in lane if t.lane.stack_id != run.stack_id and (t.first > self.began) is since]
        accused = (t for t in lane if t.lane.stack_id == run.stack_id and t.first <= self.run.started)
        return OtherSoftware(tried, total(tried), total(accused))

    @cached_property
    def changed(self) -> str:
        """What changed in the software before the first mismatch, or "" if no change can explain the mismatches.

        The device must have been right on the old software. On the new one it must not have been right nine times as
        long as it then took to fail: a fault of the new software would be absent for so long in 1.2e-4 of cases.
        """
        before, run, first = self.on_other_software(since=False), self.mismatches[0].run, self.began
        here = [t for t in self._lane(run) if t.lane.stack_id == run.stack_id]
        at_first = total(t for t in here if t.first < first)
        then = total(t for t in here if first < t.first <= self.run.started)
        rarer = then._replace(results=RULE_OF_THREE * then.results, uploads=RULE_OF_THREE * then.uploads)
        if not before.is_right or (then.failed and at_first.outlasts(rarer)):
            return ""
        old, new = self.case.node.stack(max(before.tallies, key=lambda t: t.last).lane.stack_id), run.stack
        return ", ".join(sorted(link for link in {*old, *new} if old.get(link) != new.get(link)))

    def _right_since(self, sound: Collection[str]) -> bool:
        """Return whether the device has been right on other software for long enough to blame the former.

        For a week, if no `sound` sibling was right on it or tells more; for a day, if an operator says so.
        """
        case, run = self.case, self.run
        other = self.on_other_software(since=True)
        if any(a.kind == "software" and a.at >= run.started for a in case.acks) and other.supports(case.policy):
            return True
        wrong_too = {
            uuid
            for uuid in case.devices
            if any((m.run.probe, m.run.stack_id) == (run.probe, run.stack_id) for m in case.node.accusing[uuid])
        }
        return not {*sound} - wrong_too and other.is_right and other.lasted >= case.policy.week

    # -- siblings --

    @cached_property
    def key(self) -> SameKey:
        """Of what siblings' results on the data of the mismatches are told."""
        own = id(self.mismatches[-1].comparison) in self.case.node.own
        return SameKey(self.run.probe, self.run.probe_version, self.run.stack_id, own)

    @property
    def is_compared(self) -> bool:
        """Whether siblings can tell anything: they have no part in an endpoint's answers, a golden or a link."""
        link = self.mismatches[-1].comparison.peer
        return self.subject is Subject.DEVICE and self.case.device.has_witnesses and not link and bool(self.run.stack)

    @cached_property
    def own(self) -> Record:
        """The device's results like those of the mismatches."""
        found = self.case.node.record(self.case.device.uuid, self.run, shared=not self.key.own)
        return found or Record({}, 0, Count())

    @cached_property
    def siblings(self) -> Mapping[str, Record]:
        """The siblings' results like those of the mismatches, by uuid."""
        case, shared = self.case, not self.key.own
        kin = (uuid for uuid, device in sorted(case.devices.items()) if device.kind == case.device.kind)
        return {uuid: theirs for uuid in kin if (theirs := case.node.record(uuid, self.run, shared=shared))}

    @cached_property
    def company(self) -> frozenset[str]:
        """The devices that began to be wrong with this one and can share the cause.

        These are devices of the same kind on the same software, and accelerators of other kinds, which share the host.
        They began within `repeat_window`, or, if software `changed`, on the new one at any time.
        """
        case, run, onsets = self.case, self.run, self.case.node.onsets
        began = onsets.get((case.device.uuid, run.stack_id))
        if began is None or not run.stack or not self.key.own:
            return frozenset()
        return frozenset(
            uuid
            for (uuid, stack), theirs in onsets.items()
            if (other := case.devices.get(uuid))
            if self.changed or abs(theirs - began) <= case.policy.repeat_window
            if (stack == run.stack_id if other.kind == case.device.kind else _share_a_host(other, case.device))
        )

    @cached_property
    def same(self) -> Same:
        """How siblings computed the data that the device computed wrong: what was known, and what runs show now."""
        if not self.is_compared:
            return Same()
        known = self.case.node.known.get(self.case.device.uuid, {}).get(self.key, Same())
        data, enough = {m.operands for m in self.mismatches}, 1 + self.case.policy.confirm_runs
        same = judge_cause.same_operands(self.own, self.siblings, data, enough)
        return same._replace(outlasted=self._outlasted(known)).after(known, self.own.results)

    def _outlasted(self, known: Same) -> frozenset[str]:
        """Return the siblings that fail far more rarely, now or when it was found, if they do so still.

        After a change of software from which others fail too, rates tell nothing of a device.
        """
        if self.changed and any(record.failing for record in self.siblings.values()):
            return frozenset()
        if known.outlasted and judge_cause.outlasts_still(self.own, self.siblings):
            return known.outlasted
        return judge_cause.fails_more(self.own, self.siblings, self.company)

    def _spotless(self, siblings: Collection[str]) -> int:
        """Return the number of the siblings' results like those of the mismatches, or 0 if anything was ever wrong."""
        found = [self.case.node.record(uuid, self.run, shared=True) or Record({}, 1, Count()) for uuid in siblings]
        failed = any(self.case.node.missed[uuid] for uuid in siblings) or any(
            r.failing or any(c.wrong for cs in r.results.values() for c in cs) for r in found
        )
        return 0 if failed else sum(r.trials.results for r in found)

    @cached_property
    def _right(self) -> Mapping[str, int]:
        """Sibling that is right on data on which the device is always wrong → the device's wrong uploads of it.

        Beside others that fail one wrong upload says nothing, since those were right elsewhere too.
        """
        enough, sound = 1 + self.case.policy.confirm_runs, self.siblings.keys() - self.company
        return {u: n for u, (n, _) in self.same.right.items() if u in sound and (n >= enough or not self.company)}

    @property
    def is_insistent(self) -> bool:
        """Whether siblings are right on data on which the device was wrong as often as a confirmation requires."""
        most = max(self._right.values(), default=0) if self.is_compared else 0
        return most > self.case.policy.confirm_runs and not self.same.alike

    # -- the cause --

    @cached_property
    def decided(self) -> Decided:
        """The cause of the mismatches."""
        case = self.case
        if isinstance(case.device, ModelServer):
            return served.decide(case.behind, case.runs, self.mismatches)
        if self.subject is Subject.HOST:
            return judge_cause.decide(self._goldens())
        if self.mismatches[-1].comparison.peer:
            ends = links_of(case.node.ends, case.device.uuid, case.node.devices, self.mismatches)
            return judge_cause.decide(replace(ends, host_clean=case.host_clean(self.run)))
        return judge_cause.decide(self._scene())

    def _scene(self) -> judge_cause.Scene:
        case, run, same = self.case, self.run, self.same
        evidence = (m.comparison.evidence for m in self.mismatches if m.comparison.evidence)
        part = lone_unit(case.runs, self.mismatches, 1 + case.policy.confirm_runs)
        named = f"Only {part[0]} is wrong: {part[1]} computed the same data correctly." if part else ""
        return judge_cause.Scene(
            whole_host=case.is_cpu and self._is_whole_host(),
            named=named or lone_link(self.mismatches),
            cells=name_cells(broken_cells(evidence)),
            right=self._names(self._right),
            alike=self._names(same.alike),
            unlike=self._names(same.unlike),
            outlasting=self._names(same.outlasted),
            spotless=self._spotless(same.outlasted),
            company=self._names(self.company),
            changed=self.changed,
            right_since=self._right_since(self.siblings.keys() - self.company),
            siblings=self._names(self.siblings),
            views=self._views(),
            host_clean=case.host_clean(run),
            altered=self.files.fields["files"] if self.files and self.files.after == Files.ALTERED.value else "",
            as_installed=self.files.fields["compared"]
            if self.files and self.files.after == Files.AS_INSTALLED.value
            else "",
            goldens_right=any(
                c.trials > c.wrong_trials for m in self.mismatches for c in self.own.results.get(m.operands, ())
            ),
        )

    @cached_property
    def files(self) -> Event | None:
        """The newest comparison of this software's files with what was installed, or None."""
        seen = self.case.signs.named(EventKind.FILES, self.run.stack_id) if self.case.signs else []
        return seen[-1] if seen else None

    def _names(self, uuids: Iterable[str]) -> frozenset[str]:
        devices = self.case.devices
        return frozenset(devices[uuid].name if uuid in devices else uuid for uuid in uuids)

    def _views(self) -> frozenset[str]:
        """Return the names of the same part in other runtimes that computed only right results at that time."""
        case = self.case
        same = {u: case.near(u, self.run) for u, d in case.devices.items() if d.physical == case.device.physical}
        return self._names(uuid for uuid, runs in same.items() if runs and not any(r.wrong for r in runs))

    def _goldens(self) -> judge_cause.Scene:
        """Return the facts about goldens that the host computed twice, with two results: a core or the golden is wrong.

        A core is named if this host also made the same golden without a doubt.
        """
        named = ""
        for mismatch in reversed(self.mismatches):
            core = mismatch.comparison.place.core
            made = mismatch.run.probe, mismatch.run.probe_version, mismatch.operands
            if mismatch.makers:
                named = f"One program gave two results on {mismatch.makers}."
                break
            if core is not None and made in self.case.node.goldens:
                named = f"Other cores of this host computed the same reference right; core {core} did not."
                break
        return judge_cause.Scene(golden=True, named=named, disputed="either this processor or the reference is wrong.")

    def _is_whole_host(self) -> bool:
        """Return whether, within `repeat_window`, all accelerators (two or more) were wrong too, in different bits."""
        case, window = self.case, self.case.policy.repeat_window
        times = sorted(h.run.started for h in self.mismatches)
        others = (uuid for uuid, d in case.devices.items() if d.backend != "cpu" and d.physical == d.uuid)
        peers = [case.node.accusing[uuid] for uuid in others]
        accused = [self.mismatches, *([h for h in theirs if _near(times, h.run.started, window)] for theirs in peers)]
        ways = [
            {(h.run.probe, h.operands, m) for h in each for m in judge_cause.marks([h.comparison])} for each in accused
        ]
        return len(peers) >= 2 and all(accused) and len(set().union(*ways)) == sum(map(len, ways))


def _share_a_host(one: Device, other: Device) -> bool:
    """Return whether two devices are different accelerators: only the host can make both of them wrong."""
    return "cpu" not in (one.backend, other.backend) and one.part != other.part


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


def lasting(policy: JudgePolicy, period: float) -> float:
    """Return for how many seconds trouble that came back is told after the last time: 20 periods, at least a day."""
    return max(policy.repeat_window, 20 * period)
