"""All that is known of the recordings of one device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from canaryd.config.settings import JudgePolicy
from canaryd.judge.recordings.baseline import (
    Baseline,
    Departure,
    Key,
    departure,
    key_of,
)
from canaryd.model import Device, Outcome, Recording, Run

CACHES = ("fresh", "warm")
"""Last words of cases that are one question, asked past the prefix cache and through it."""
Lane = tuple[str, str, str]
"""Probe, case, and the instruction set that it was computed with: another one is no change of the chain."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another device or endpoint of this node."""

    device: Device
    trusted: bool = True
    """Whether nothing speaks against it: else it witnesses nothing."""
    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One recording held against its complete baseline."""

    run: Run
    recording: Recording
    baseline: Baseline
    departure: Departure | None
    """None where exactly these bits are known."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that the judgement of one device's recordings rests on. Runs are sorted by start, of one world."""

    device: Device
    runs: tuple[Run, ...]
    baselines: Mapping[Key, Baseline]
    policy: JudgePolicy
    now: float
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """By name."""
    reached: float = math.inf
    """A time that has come for certain, however wrong the clock was."""
    imported: Sequence[Baseline] = ()
    """Baselines of devices that are not of this host."""

    @property
    def served(self) -> bool:
        """Whether it is an endpoint: recordings are then the only evidence."""
        return self.device.is_endpoint

    @cached_property
    def sightings(self) -> dict[Key, list[Sighting]]:
        """Every recording with a complete baseline, by key, oldest first."""
        return find_sightings(self.runs, self.baselines)

    @cached_property
    def reruns(self) -> dict[str, list[Run]]:
        """The re-runs that completed, by the id of the run that they repeat."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            if run.confirms and run.outcome is Outcome.COMPLETED and run.recordings:
                found[run.confirms].append(run)
        return found

    @cached_property
    def newest(self) -> dict[Lane, tuple[Run, Recording]]:
        """The newest recording of every case, each way in which a CPU may be told to compute by itself."""
        return {_lane(run, recording): (run, recording) for run in self.runs for recording in run.recordings}

    @cached_property
    def past(self) -> dict[Lane, list[Key]]:
        """The keys that every case was recorded under, the newest last."""
        found: dict[Lane, dict[Key, None]] = defaultdict(dict)
        for run in self.runs:
            for recording in run.recordings:
                keys, key = found[_lane(run, recording)], key_of(run, recording)
                keys.pop(key, None)
                keys[key] = None
        return {lane: list(keys) for lane, keys in found.items()}

    def before(self, run: Run, recording: Recording) -> Baseline | None:
        """Return the complete baseline that a case was held against before its chain or stack became another."""
        own, lane = key_of(run, recording), _lane(run, recording)
        others = [
            b
            for b in self.baselines.values()
            if b.complete and b.key != own and (b.probe, b.case, b.stack.get("instruction_set", "")) == lane
        ]
        order = self.past.get(lane, [])
        return max(others, key=lambda b: (order.index(b.key) if b.key in order else -1, b.last), default=None)

    def voters(self, own: Baseline) -> list[tuple[str, Baseline]]:
        """Return the others' baselines of the same case on the same chain and stack, with whose they are.

        Only siblings are asked, for other models have other kernels, and each part once: instances of one GPU share
        it, and are no witnesses for each other. Servers do not vote: their flags and devices are not in the chain.
        """
        if self.served:
            return []
        by_part: dict[str, tuple[str, Baseline]] = {}
        for name, peer in sorted(self.peers.items()):
            same = peer.device.kind == self.device.kind and peer.device.part != self.device.part
            if same and peer.trusted and (b := peer.baselines.get(own.key)) is not None:
                by_part.setdefault(peer.device.part, (name, b))
        for b in self.imported:
            if b.key == own.key and b.imported == " ".join(self.device.kind) and b.device != self.device.uuid:
                by_part.setdefault(b.device, (f"{b.device} (imported)", b))
        return [(name, b) for name, b in by_part.values() if b.complete]

    @cached_property
    def current(self) -> list[tuple[Baseline, str]]:
        """The complete baselines that the newest recordings belong to, with the digest that was given last."""
        newest = {key_of(run, recording): recording.digest for run, recording in self.newest.values()}
        return [(b, d) for key, d in newest.items() if (b := self.baselines.get(key)) is not None and b.complete]


def _lane(run: Run, recording: Recording) -> Lane:
    return run.probe, recording.case, run.stack.get("instruction_set", "")


def accepted_digests(baselines: Mapping[Key, Baseline], key: Key) -> frozenset[str]:
    """Return the digests that pass for a case: its own, and those of the same question asked cold or warm.

    A server whose cache cannot be bypassed forgets when it likes: then the one is answered as the other was.
    """
    question, _, how = key[2].rpartition("/")
    cases = [f"{question}/{other}" for other in CACHES] if how in CACHES else [key[2]]
    found = (baselines.get((key[0], key[1], case, key[3], key[4])) for case in cases)
    return frozenset().union(*(b.digests for b in found if b is not None))


def find_sightings(runs: Iterable[Run], baselines: Mapping[Key, Baseline]) -> dict[Key, list[Sighting]]:
    """Return one sighting per run and case: the strangest of its recordings. What was learnt from tells nothing."""
    found: dict[Key, list[Sighting]] = defaultdict(list)
    kin: dict[Key, frozenset[str]] = {}
    for run in runs:
        mine: dict[Key, Sighting] = {}
        for recording in run.recordings:
            key = key_of(run, recording)
            baseline = baselines.get(key)
            if baseline is None or not baseline.complete or recording.case in run.learnt:
                continue
            if key not in kin:
                kin[key] = accepted_digests(baselines, key)
            away = None if recording.digest in kin[key] else departure(baseline, recording)
            if key not in mine or (away is not None and away.beyond):
                mine[key] = Sighting(run=run, recording=recording, baseline=baseline, departure=away)
        for key, sighting in mine.items():
            found[key].append(sighting)
    return dict(found)
