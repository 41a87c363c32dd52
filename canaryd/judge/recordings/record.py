"""Everything that the judgement of one device's recordings rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import Baseline, Deviation, Key, deviation, key_of, known_digests
from canaryd.judge.recordings.launches import begins_launch
from canaryd.model import Device, Outcome, Run


class CaseVariant(NamedTuple):
    """A case with the instruction set it was computed with: switching between sets is no change of the chain."""

    probe: str
    case: str
    instruction_set: str


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another device or endpoint of this node."""

    device: Device
    trusted: bool = True
    """Whether nothing counts against it; an untrusted peer confirms no baseline."""
    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One recording compared with its complete baseline."""

    run: Run
    recording: Recording
    baseline: Baseline
    deviation: Deviation | None
    """None where the vector is known."""

    @property
    def is_outlier(self) -> bool:
        """Whether it deviates from the baseline by more than noise."""
        return self.deviation is not None and self.deviation.is_outlier

    @property
    def is_judged(self) -> bool:
        """Whether it can be called right or wrong; an unknown vector of a case whose noise is not known cannot."""
        return self.deviation is None or self.deviation.is_outlier or self.deviation.noise is not None

    @property
    def is_comparable(self) -> bool:
        """Whether it may be held against the device."""
        return self.baseline.compares(self.recording)

    @property
    def repeats_exactly(self) -> bool:
        """Whether its case gives the same bits every time under its condition."""
        return self.baseline.stable(self.recording.condition)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that the judgement of one device's recordings rests on. Runs are sorted by start; drills never mix."""

    device: Device
    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]
    policy: JudgePolicy
    now: float
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """By name."""
    tested: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Probe → days (UTC, since the epoch) on which it completed a run of the device."""
    wanted: Mapping[str, float] = field(default_factory=dict)
    """Probe → its period in seconds."""
    imported: Sequence[Baseline] = ()
    """Baselines of devices on other hosts."""

    @property
    def is_endpoint(self) -> bool:
        """Whether the device is an endpoint: recordings are then the only evidence."""
        return self.device.is_endpoint

    @property
    def parts(self) -> list[str]:
        """Names of the devices to test: the device itself, or those that serve the endpoint."""
        return self.device.detail.get("behind", "").split() if self.is_endpoint else [self.device.name]

    @property
    def deep_test(self) -> str:
        """The action that tests these devices."""
        return "Run: canaryd check --level deep" + "".join(f" --device {name}" for name in self.parts)

    @cached_property
    def observations(self) -> dict[Key, list[Observation]]:
        """Every recording with a complete baseline, by key, oldest first."""
        return find_observations(self.runs, self.baselines)

    @cached_property
    def reruns(self) -> Mapping[str, list[Run]]:
        """The completed re-runs, by the id of the run that they repeat."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            if run.confirms and run.outcome is Outcome.COMPLETED and run.recordings:
                found[run.confirms].append(run)
        return found

    @cached_property
    def launches(self) -> list[Run]:
        """The runs that show a new launch of a server that does not tell when it started, oldest first."""
        wanted, of = self.policy.confirm_runs, (r for r in self.runs if r.unknown and not r.confirms)
        return [r for r in of if self.is_endpoint and begins_launch(r, self.reruns[r.id], self.baselines, wanted)]

    @cached_property
    def newest(self) -> dict[CaseVariant, tuple[Run, Recording]]:
        """The newest recording of every case and instruction set."""
        return {_variant(run, recording): (run, recording) for run in self.runs for recording in run.recordings}

    @cached_property
    def keys_in_order(self) -> dict[CaseVariant, list[Key]]:
        """The baseline keys that every case was recorded under, the newest last."""
        found: dict[CaseVariant, dict[Key, None]] = defaultdict(dict)
        for run in self.runs:
            for recording in run.recordings:
                keys, key = found[_variant(run, recording)], key_of(run, recording)
                keys.pop(key, None)
                keys[key] = None
        return {variant: list(keys) for variant, keys in found.items()}

    @cached_property
    def complete(self) -> dict[CaseVariant, list[Baseline]]:
        """The complete baselines of every case: a device that served for years has thousands."""
        found: dict[CaseVariant, list[Baseline]] = defaultdict(list)
        for baseline in self.baselines.values():
            if baseline.complete:
                found[variant_of(baseline)].append(baseline)
        return found

    def before(self, run: Run, recording: Recording, *, intended: bool = False) -> Baseline | None:
        """Return the complete baseline that a case was compared with before its chain or stack changed.

        With `intended`, the newest one that an operator accepted or that is a week old, else the first.
        """
        own, variant = key_of(run, recording), _variant(run, recording)
        others = [b for b in self.complete.get(variant, ()) if b.key != own]
        if intended:
            stands = [b for b in others if b.accepted or self.now - b.first > self.policy.week]
            others = stands or sorted(others, key=lambda b: b.first)[:1]
        order = self.keys_in_order.get(variant, [])
        return max(others, key=lambda b: (order.index(b.key) if b.key in order else -1, b.last), default=None)

    def voters(self, own: Baseline) -> list[tuple[str, Baseline]]:
        """Return the complete baselines of siblings for the same case, chain and stack, with the name of each sibling.

        Only trusted devices of the same model vote, here or imported. Each physical part votes once: instances of one
        GPU share it and do not confirm each other. Servers do not vote: their flags and devices are not in the chain.
        """
        by_part: dict[str, tuple[str, Baseline]] = {}
        for name, peer in sorted(self.peers.items()) if not self.is_endpoint else ():
            same = peer.trusted and peer.device.kind == self.device.kind and peer.device.part != self.device.part
            if same and (b := peer.baselines.get(own.key)) is not None:
                by_part.setdefault(peer.device.part, (name, b))
        for b in self._witnesses.get(own.key, ()) if not self.is_endpoint else ():
            by_part.setdefault(b.device, (f"{b.device} (imported)", b))
        return [(name, b) for name, b in by_part.values() if b.complete]

    @cached_property
    def _witnesses(self) -> dict[Key, list[Baseline]]:
        """The baselines of other hosts' devices of the same model, by key."""
        found: dict[Key, list[Baseline]] = defaultdict(list)
        for b in self.imported:
            if b.imported_kind == self.device.kind and b.device != self.device.uuid:
                found[b.key].append(b)
        return found

    @cached_property
    def current(self) -> list[tuple[Baseline, str]]:
        """The complete baselines of the newest recordings, with the newest digest."""
        newest = {key_of(run, recording): recording.digest for run, recording in self.newest.values()}
        return [(b, d) for key, d in newest.items() if (b := self.baselines.get(key)) is not None and b.complete]


def _variant(run: Run, recording: Recording) -> CaseVariant:
    return CaseVariant(run.probe, recording.case, run.stack.get("instruction_set", ""))


def variant_of(baseline: Baseline) -> CaseVariant:
    """Return the case and instruction set of a baseline."""
    return CaseVariant(baseline.probe, baseline.case, baseline.stack.get("instruction_set", ""))


def find_observations(runs: Iterable[Run], baselines: Mapping[Key, Baseline]) -> dict[Key, list[Observation]]:
    """Return one observation per run and case: an outlier if there is one. Samples of the baseline are left out."""
    found: dict[Key, dict[str, Observation]] = defaultdict(dict)
    for run in runs:
        for recording in (r for r in run.recordings if r.case not in run.learnt):
            key = key_of(run, recording)
            if (baseline := baselines.get(key)) is None or not baseline.complete:
                continue
            known = recording.digest in baseline.digests or recording.digest in known_digests(baselines, key)
            made = Observation(
                run=run,
                recording=recording,
                baseline=baseline,
                deviation=None if known else deviation(baseline, recording),
            )
            if run.id not in found[key] or made.is_outlier:
                found[key][run.id] = made
    return {key: list(of.values()) for key, of in found.items()}
