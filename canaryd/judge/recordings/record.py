"""Everything that the judgement of one device's recordings rests on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import Baseline, Difference, Key, key_of, known_digests
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
    difference: Difference | None
    """None where the vector is known."""
    is_outlier: bool
    """Whether it departs from the baseline by more than noise."""

    @property
    def noise(self) -> float | None:
        """As `Baseline.noise`, under its condition."""
        return self.baseline.noise(self.recording.condition)

    @property
    def is_judged(self) -> bool:
        """Whether it can be called right or wrong; an unknown vector of a case whose noise is not known cannot."""
        return self.difference is None or self.is_outlier or self.noise is not None

    @property
    def is_comparable(self) -> bool:
        """Whether it may be held against the device."""
        return self.baseline.compares(self.recording)

    @property
    def repeats_exactly(self) -> bool:
        """Whether its case gives the same bits every time under its condition."""
        return self.baseline.stable(self.recording.condition)


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest recording of a case and instruction set."""

    run: Run
    recording: Recording
    own: Baseline | None
    """Its baseline; None where nothing of it was learnt."""
    before: Baseline | None
    """The complete baseline that the case was compared with before its chain or stack changed."""
    known: bool
    """Whether its complete baseline has its vector."""

    @property
    def complete(self) -> Baseline | None:
        """Its baseline, if that is complete."""
        return self.own if self.own is not None and self.own.complete else None

    @property
    def samples(self) -> int:
        """Samples that its baseline was learnt from."""
        return self.own.samples if self.own is not None else 0


@dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that the judgement of one device's recordings rests on. Runs are sorted by start."""

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
    def parts(self) -> list[str]:
        """Names of the devices to test: the device itself, or those that serve the endpoint."""
        return self.device.detail.get("behind", self.device.name).split()

    @property
    def deep_test(self) -> str:
        """The action that tests these devices."""
        return "Run: canaryd check --level deep" + "".join(f" --device {name}" for name in self.parts)

    @property
    def acceptance(self) -> str:
        """The command with which an operator accepts new results."""
        return f'canaryd baseline accept {self.device.name} --reason "…"'

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
        served = not self.device.computes_here
        return [r for r in of if served and begins_launch(r, self.reruns[r.id], self.baselines, wanted)]

    @cached_property
    def newest(self) -> list[Newest]:
        """The newest recording of every case and instruction set, sorted by these."""
        found = {variant_of(run, r.case): (run, r) for run in self.runs for r in run.recordings}
        return [self._newest(run, recording) for _, (run, recording) in sorted(found.items(), key=lambda of: of[0])]

    def _newest(self, run: Run, recording: Recording) -> Newest:
        own = self.baselines.get(key_of(run, recording))
        known = own is not None and own.complete and recording.digest in known_digests(self.baselines, own.key)
        return Newest(run=run, recording=recording, own=own, before=self.before(run, recording), known=known)

    @cached_property
    def complete(self) -> dict[CaseVariant, list[Baseline]]:
        """The complete baselines of every case: a device that served for years has thousands."""
        found: dict[CaseVariant, list[Baseline]] = defaultdict(list)
        for baseline in self.baselines.values():
            if baseline.complete:
                found[variant_of(baseline, baseline.case)].append(baseline)
        return found

    def before(self, run: Run, recording: Recording, *, intended: bool = False) -> Baseline | None:
        """Return the complete baseline that a case was compared with before its chain or stack changed.

        With `intended`, the newest one that an operator accepted or that is a week old, else the first.
        """
        own = key_of(run, recording)
        others = [b for b in self.complete.get(variant_of(run, recording.case), ()) if b.key != own]
        if intended:
            others = [b for b in others if not self.is_fresh(b)] or sorted(others, key=lambda b: b.first)[:1]
        return max(others, key=lambda b: b.used, default=None)

    def is_fresh(self, baseline: Baseline) -> bool:
        """Return whether a baseline is less than a week old, and no operator has accepted it."""
        return not baseline.accepted and self.now - baseline.first <= self.policy.week

    def voters(self, own: Baseline) -> list[tuple[str, Baseline]]:
        """Return the complete baselines of siblings for the same case, chain and stack, with the name of each sibling.

        Only trusted devices of the same model vote, here or imported. Each physical part votes once: instances of one
        GPU share it and do not confirm each other. Servers do not vote: their flags and devices are not in the chain.
        """
        by_part: dict[str, tuple[str, Baseline]] = {}
        for name, peer in sorted(self.peers.items() if self.device.has_witnesses else ()):
            same = peer.trusted and peer.device.kind == self.device.kind and peer.device.part != self.device.part
            if same and (b := peer.baselines.get(own.key)) is not None:
                by_part.setdefault(peer.device.part, (name, b))
        for b in self._witnesses.get(own.key, ()):
            by_part.setdefault(b.device, (f"{b.device} (imported)", b))
        return [(name, b) for name, b in by_part.values() if b.complete]

    @cached_property
    def _witnesses(self) -> dict[Key, list[Baseline]]:
        """The baselines of other hosts' devices of the same model, by key."""
        found: dict[Key, list[Baseline]] = defaultdict(list)
        for b in self.imported if self.device.has_witnesses else ():
            if b.imported_kind == self.device.kind and b.device != self.device.uuid:
                found[b.key].append(b)
        return found


def variant_of(of: Run | Baseline, case: str) -> CaseVariant:
    """Return a case with the instruction set of a run or baseline."""
    return CaseVariant(of.probe, case, of.stack.get("instruction_set", ""))


def find_observations(runs: Iterable[Run], baselines: Mapping[Key, Baseline]) -> dict[Key, list[Observation]]:
    """Return one observation per run and case: an outlier if there is one. Samples of the baseline are left out."""
    found: dict[Key, dict[str, Observation]] = defaultdict(dict)
    for run in runs:
        for recording in (r for r in run.recordings if r.case not in run.learnt):
            key = key_of(run, recording)
            if (b := baselines.get(key)) is None or not b.complete:
                continue
            away = None if recording.digest in known_digests(baselines, key) else b.difference(recording)
            beyond = away is not None and b.departs(recording)
            if beyond or run.id not in found[key]:
                found[key][run.id] = Observation(
                    run=run, recording=recording, baseline=b, difference=away, is_outlier=beyond
                )
    return {key: list(of.values()) for key, of in found.items()}
