"""The devices of a host with the runs that count, and what follows from the results of several devices together."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd.facts import Comparison, Subject
from canaryd.judge import cause as judge_cause
from canaryd.judge.cause import Mismatch, Record, Same, SameKey, operands_of
from canaryd.judge.characterised import By, Claims, Proof, class_of, learns
from canaryd.judge.clock import EPOCH
from canaryd.judge.links import Ends, errs_with_a_third, wrong_ends
from canaryd.judge.tally import Tallied, tally
from canaryd.judge.watch import days_of_tests
from canaryd.model import Device, Run

SHIPPED = Proof(By.SHIPPED)
by_time = operator.attrgetter("started", "id")
"""Sort key of runs: the start, then the id, so that runs with the same start always have the same order."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """The devices of a node and the runs that count, selected once for the verdicts on all of them."""

    devices: Mapping[str, Device]
    runs: Mapping[str, tuple[Run, ...]]
    """Device uuid → its runs by start, each id once."""
    summed: Mapping[str, Mapping[str, Iterable[int]]] = field(default_factory=dict)
    """Device → probe → past days on which it was tested, from summaries of days, which are kept longer than runs."""
    tallies: Mapping[str, Sequence[Tallied]] = field(default_factory=dict)
    """Device → what its runs found, counted when they were stored; they outlive the runs."""
    stacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id → software stack of runs that may be gone."""
    known: Mapping[str, Mapping[SameKey, Same]] = field(default_factory=dict)
    """Device → how siblings computed the data that it computed wrong, as it was known before."""
    claims: Claims = field(default_factory=Claims)
    """The classes of test cases in which devices, here and on other hosts, gave the golden."""
    _records: dict[object, Record | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of the results of `record`."""

    @cached_property
    def all(self) -> list[Run]:
        """The runs of all devices, oldest first."""
        return sorted(itertools.chain.from_iterable(self.runs.values()), key=by_time)

    @cached_property
    def tested(self) -> Mapping[str, Mapping[str, frozenset[int]]]:
        """Device → probe → days (UTC, since the epoch) on which it was tested."""
        return {uuid: days_of_tests(runs, self.summed.get(uuid)) for uuid, runs in self.runs.items()}

    @cached_property
    def at(self) -> dict[str, float]:
        """Id of a run → its start, in seconds since the epoch."""
        return {r.id: r.started for r in self.all}

    @cached_property
    def confirming(self) -> Mapping[str, Sequence[Run]]:
        """Id of a run → the runs that were started to confirm it."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.all:
            if run.confirms:
                found[run.confirms].append(run)
        return found

    @cached_property
    def host_mismatches(self) -> tuple[list[Mismatch], list[Mismatch]]:
        """Mismatches of goldens that this host made in two ways: (those that accuse its CPU, those that do not).

        If several single cores get the same difference for one golden, the golden is wrong and no core is at fault.
        """
        mismatches = find_mismatches(self.all, Subject.HOST)
        cores: dict[object, set[int | None]] = defaultdict(set)
        for mismatch in mismatches:
            cores[mismatch.same_story].add(mismatch.comparison.place.core)
        accusing: list[Mismatch] = []
        shared: list[Mismatch] = []
        for mismatch in mismatches:
            (shared if len(cores[mismatch.same_story] - {None}) > 1 else accusing).append(mismatch)
        return accusing, shared

    @cached_property
    def goldens(self) -> set[object]:
        """Keys of the goldens that this host made without a doubt, because device results were compared with them."""
        return {
            (r.probe, r.probe_version, operands_of(c))
            for r in self.all
            for c in r.comparisons
            if c.subject is Subject.DEVICE
        }

    @cached_property
    def accusing(self) -> Mapping[str, Sequence[Mismatch]]:
        """Device → the mismatches that accuse it, oldest first: there is proof that healthy devices give the golden.

        For a wrong link, this end is not accused if the other end's link to a third device is wrong too.
        """
        return {
            uuid: [m for m in found if m.proof is not None and not errs_with_a_third(self.ends, m.comparison.peer)]
            for uuid, found in self.missed.items()
        }

    @cached_property
    def ends(self) -> Ends:
        """Device → the other ends of its wrong links."""
        return wrong_ends(self.missed)

    @cached_property
    def missed(self) -> Mapping[str, Sequence[Mismatch]]:
        """Device → its mismatches, oldest first, each with the proof (or None) that healthy devices give the golden."""
        return {
            uuid: [
                Mismatch(run=r, comparison=c, proof=self._proof(r, c))
                for r in runs
                for c in r.wrong
                if c.subject is Subject.DEVICE
            ]
            for uuid, runs in self.runs.items()
        }

    def _proof(self, run: Run, comparison: Comparison) -> Proof | None:
        """Return the proof that healthy devices give the golden of a wrong comparison, or None if there is none."""
        if comparison.characterised:
            return SHIPPED
        kind = self.devices[run.device].kind
        if not learns(kind):
            return None
        if not self.devices[run.device].has_witnesses:
            # Another server, or this one later, may have other settings: only what it gave before counts.
            if self.claims.met_since(kind, run, comparison.case) < run.started:
                return Proof(By.ITSELF, (run.device,))
        elif proof := self.claims.proof(kind, run, comparison.case):
            return proof
        if _claim(run, comparison) in self._contradicted[run.device]:
            return Proof(By.CONTRADICTION, (run.device,))
        return None

    @cached_property
    def _contradicted(self) -> Mapping[str, frozenset[object]]:
        """Device → keys of the classes in which it gave right and wrong results for the same bytes."""
        return {uuid: contradictions(find_mismatches(runs, Subject.DEVICE)) for uuid, runs in self.runs.items()}

    @cached_property
    def cpu_erred(self) -> list[float]:
        """Times (epoch s, ascending) at which this host's CPU made a wrong golden or was wrong as a tested device."""
        own = [m for uuid, ms in self.accusing.items() if self.devices[uuid].backend == "cpu" for m in ms]
        return sorted(m.run.started for m in (*self.host_mismatches[0], *own))

    def data(self, run: Run, comparison: Comparison) -> object:
        """Return a key of the data of a comparison: equal for the same kind of device, probe, software and operands."""
        kind = self.devices[run.device].kind
        return kind, run.probe, run.probe_version, run.stack_id, operands_of(comparison)

    def record(self, uuid: str, like: Run, *, shared: bool) -> Record | None:
        """Return a device's results with the probe, version and stack of the run `like`, or None if there are none.

        With `shared` every wrong result counts, else only the device's own (`own`). The result is cached for all
        verdicts on the node's devices, because each needs the results of all siblings.
        """
        of = like.probe, like.probe_version, like.stack_id
        asked = uuid, *of, bool(like.stack), shared
        if asked not in self._records:
            counted = [t for t in self.tallies[uuid] if t.lane[:3] == of and t.lane.whole and like.stack]
            if not shared and (like.probe, like.stack_id) in self._mixed:
                # A tally does not tell which failing runs are the device's own: only those at hand count.
                counted = [t._replace(failing=0) for t in counted]
            own = None if shared else self.own
            self._records[asked] = judge_cause.results(self.runs[uuid], like, counted, own)
        return self._records[asked]

    def stack(self, stack_id: str) -> Mapping[str, str]:
        """Return the software stack with an id, or {} if no run on record had it."""
        return self.stacks.get(stack_id) or next((r.stack for r in self.all if r.stack_id == stack_id), {})

    @cached_property
    def _unproven(self) -> Mapping[object, Sequence[Mismatch]]:
        """(Data, wrong bits) → the mismatches without a proof that healthy devices give the golden."""
        return self._by_look(m for ms in self.missed.values() for m in ms if m.proof is None)

    def _by_look(self, mismatches: Iterable[Mismatch]) -> Mapping[object, Sequence[Mismatch]]:
        found: dict[object, list[Mismatch]] = defaultdict(list)
        for mismatch in mismatches:
            if mismatch.run.stack and (mark := judge_cause.mark(mismatch.comparison)):
                found[self.data(mismatch.run, mismatch.comparison), mark].append(mismatch)
        return found

    def gave_alike(self, mismatch: Mismatch) -> set[str]:
        """Return the other devices that gave the same wrong bits for the same data as a mismatch without proof."""
        if not mismatch.run.stack:
            return set()
        look = self.data(mismatch.run, mismatch.comparison), judge_cause.mark(mismatch.comparison)
        return {m.run.device for m in self._unproven.get(look, ())} - {mismatch.run.device}

    def is_shared(self, mismatch: Mismatch) -> bool:
        """Return whether a mismatch without proof is one that identical devices share, in the same bits.

        If none of their results for its data is in memory, the device's other mismatches of its class tell.
        """
        if self.gave_alike(mismatch):
            return True
        run, comparison = mismatch.run, mismatch.comparison
        forgotten = self._computed_in_shared_claims.get(self.data(run, comparison), set()) <= {run.device}
        return forgotten and (run.device, _claim(run, comparison)) in self._shared_claims

    @cached_property
    def _shared_claims(self) -> Collection[tuple[str, object]]:
        """(Device, claim) of the mismatches without proof that another device gave in the same bits."""
        every = itertools.chain.from_iterable(self._unproven.values())
        return {(m.run.device, _claim(m.run, m.comparison)) for m in every if self.gave_alike(m)}

    @cached_property
    def _computed_in_shared_claims(self) -> Mapping[object, set[str]]:
        """Data → the devices with results for them, right or wrong, where devices share mismatches without proof."""
        found: dict[object, set[str]] = defaultdict(set)
        claims = {claim for _, claim in self._shared_claims}
        for run in self.all if claims else ():
            for c in run.comparisons:
                if _claim(run, c) in claims:
                    found[self.data(run, c)].add(run.device)
        return found

    @cached_property
    def _accused(self) -> Sequence[Mismatch]:
        """The mismatches that accuse any device, each device's oldest first."""
        return [*itertools.chain.from_iterable(self.accusing.values())]

    @cached_property
    def _alike(self) -> Sequence[Sequence[Mismatch]]:
        """Those whose wrong bits several devices gave for the same data, in groups: not one part's fault."""
        if sum(map(bool, self.accusing.values())) < 2:
            return ()  # at once, since most faults are those of one device
        looks = self._by_look(self._accused).values()
        return [alike for alike in looks if any(m.run.device != alike[0].run.device for m in alike)]

    @cached_property
    def shared(self) -> frozenset[int]:
        """The `id` of each wrong comparison in `_alike`."""
        return frozenset(id(m.comparison) for alike in self._alike for m in alike)

    @cached_property
    def _sharers(self) -> Mapping[tuple[str, tuple[str, str]], frozenset[str]]:
        """(Device, (probe, stack id)) → the devices that gave the same wrong bits there at any time."""
        found: dict[tuple[str, tuple[str, str]], frozenset[str]] = defaultdict(frozenset)
        for uuid, of in self.known.items():
            for key, same in of.items():
                if same.alike:
                    found[uuid, (key.probe, key.stack_id)] |= same.alike
        for alike in self._alike:
            devices = frozenset(m.run.device for m in alike)
            for m in alike:
                found[m.run.device, (m.run.probe, m.run.stack_id)] |= devices - {m.run.device}
        return found

    @cached_property
    def own(self) -> frozenset[int]:
        """The `id` of each wrong comparison that is only this device's: a bug that several share must not hide it.

        If others share a bug of its probe and software, it counts only if they computed the same data.
        """
        bugs = {bug for _, bug in self._sharers}
        computed: dict[object, set[str]] = defaultdict(set)
        for run in self.all if bugs else ():
            if (run.probe, run.stack_id) in bugs:
                for comparison in run.comparisons:
                    computed[self.data(run, comparison)].add(run.device)
        found = set()
        for m in self._accused:
            others = computed[self.data(m.run, m.comparison)] - {m.run.device} if bugs else frozenset()
            alike = self._sharers.get((m.run.device, (m.run.probe, m.run.stack_id)))
            if not alike or (id(m.comparison) not in self.shared and others and alike <= others):
                found.add(id(m.comparison))
        return frozenset(found)

    @cached_property
    def _mixed(self) -> Collection[tuple[str, str]]:
        """(Probe, stack id) of wrong results that accuse no single device: shared ones, and those without proof."""
        every = itertools.chain.from_iterable(self.missed.values())
        excused = {(m.run.probe, m.run.stack_id) for m in every if id(m.comparison) not in self.own}
        return excused | {bug for _, bug in self._sharers}

    @cached_property
    def fickle(self) -> frozenset[int]:
        """The `id` of each shared wrong comparison whose device also computed the same data correctly, then or later.

        If a bug comes and goes, a sibling can be right by luck, which looks like a fault of one part.
        """
        first: dict[object, float] = {}
        for m in (shared := sorted(itertools.chain.from_iterable(self._alike), key=lambda m: by_time(m.run))):
            first.setdefault((m.run.device, self.data(m.run, m.comparison)), m.run.started)
        bugs = {(m.run.probe, m.run.stack_id) for m in shared}
        right = {
            key
            for run in self.all
            if (run.probe, run.stack_id) in bugs
            for c in run.comparisons
            if c.subject is Subject.DEVICE and not c.wrong
            if first.get(key := (run.device, self.data(run, c)), math.inf) < run.started
        }
        return frozenset(
            id(m.comparison)
            for m in shared
            if (m.run.device, self.data(m.run, m.comparison)) in right or _was_right_too(m.comparison)
        )

    @cached_property
    def onsets(self) -> Mapping[tuple[str, str], float]:
        """(Device, stack id) → time of the first wrong comparison there that is in `own` or `fickle` (epoch s)."""
        found: dict[tuple[str, str], float] = {}
        for m in self._accused:
            if id(m.comparison) in self.own or id(m.comparison) in self.fickle:
                found.setdefault((m.run.device, m.run.stack_id), m.run.started)
        return found


def node(
    devices: Mapping[str, Device],
    runs: Mapping[str, Iterable[Run]],
    now: float,
    counted: Mapping[str, Sequence[Tallied]] | None = None,
) -> Node:
    """Return the devices with the runs that count at `now`.

    `counted` are each device's tallies; without them the runs at hand are counted.
    """

    def dated(run: Run) -> Run:
        # A clock that was not set yet must not make a failure look decades old, and so long cleared. Any other run
        # stays as old as it says: of now, it would be fresh for ever.
        return replace(run, started=now) if run.started < EPOCH and run.failed else run

    unique = {uuid: {r.id: dated(r) for r in runs.get(uuid, ())} for uuid in devices}
    chosen = {uuid: tuple(sorted(found.values(), key=by_time)) for uuid, found in unique.items()}
    tallies = {u: counted.get(u, ()) if counted is not None else tuple(map(tally, chosen[u])) for u in devices}
    return Node(devices=devices, runs=chosen, tallies=tallies)


def find_mismatches(runs: Iterable[Run], subject: Subject) -> list[Mismatch]:
    """Return the wrong comparisons of a subject. Runs that did not complete count too: a crash does not undo a fact."""
    return [Mismatch(run=r, comparison=c) for r in runs for c in r.wrong if c.subject is subject]


def contradictions(mismatches: Iterable[Mismatch]) -> frozenset[object]:
    """Return keys of the classes in which a device gave right and wrong results for the same bytes.

    The results are of one upload, of repeated uploads of the same operands, or of several cores or SMs of the device.
    """
    return frozenset(
        _claim(m.run, m.comparison) for m in mismatches if _was_right_too(m.comparison) or _right_elsewhere(m)
    )


def _was_right_too(comparison: Comparison) -> bool:
    evidence = comparison.evidence
    again = evidence is not None and evidence.repeats_wrong < evidence.repeats
    return comparison.wrong_trials < comparison.trials or again


def _right_elsewhere(mismatch: Mismatch) -> bool:
    """Return whether another core or SM of the device computed the same operands correctly in the same run."""
    others = (c for c in mismatch.run.comparisons if c.subject is Subject.DEVICE and not c.wrong)
    return any(operands_of(c) == mismatch.operands for c in others)


def is_inconstant(mismatches: Iterable[Mismatch]) -> bool:
    """Return whether a device gave different wrong results for the same bytes.

    That accuses nobody: a kernel that adds in no fixed order, and rounds, does so on healthy devices.
    """
    looks: dict[object, object] = {}
    for mismatch in mismatches:
        evidence = mismatch.comparison.evidence
        if evidence is None:
            continue
        if evidence.repeats_alike is not None and evidence.repeats_alike < evidence.repeats_wrong:
            return True
        look, on = (evidence.wrong, evidence.first), (_claim(mismatch.run, mismatch.comparison), mismatch.operands)
        if evidence.first and looks.setdefault(on, look) != look:
            return True
    return False


def _claim(run: Run, comparison: Comparison) -> object:
    """Return a key of the claim that a class of cases is exact: probe, version, software and class."""
    return run.probe, run.probe_version, run.stack_id, class_of(comparison.case)
