"""The runs that the judge sees: which of them stay in memory, and how little of each."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from canaryd.engine.host import Host
from canaryd.engine.met import MetClasses
from canaryd.engine.sums import add_up, can_sum, of_counts, summary
from canaryd.facts import Comparison, Reading, Recording
from canaryd.judge import acks
from canaryd.judge.node import DRILL_EXPIRY
from canaryd.judge.recordings import speed
from canaryd.judge.recordings.baseline import IDLE
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Ack, Outcome, Run
from canaryd.store.clock import MAX_LAG
from canaryd.store.runs import FEW

NEWEST = 50
"""Clean runs of one probe and instruction set that the judge sees of a device without a mismatch."""
RECORD = 3000
"""The same for a device with a mismatch and for its siblings. Their failure rates and their behaviour since the
mismatch decide; this many runs cover more than the time for which the judge watches a suspect."""
FAILURES = 100
"""Mismatches of one probe and instruction set that stay in memory, and as many clean confirmations. The two are counted
apart, because a sibling's many confirmations must never push out a mismatch."""
SHOWN = 5
"""A run with at most `FEW` recordings keeps them; of runs with more, only the newest `SHOWN` keep theirs."""
BRIEF = 4
"""Wrong elements of a comparison that stay in memory; the store keeps all."""
KEPT = frozenset({"golden_fingerprint", *READINGS})
"""Readings that stay in memory."""


class Acknowledgements:
    """What operators acknowledged, by device."""

    def __init__(self, host: Host) -> None:
        """Read nothing yet; `read` does."""
        self._host = host
        self._all: tuple[Ack, ...] = ()
        self._of: dict[str, tuple[Ack, ...]] = {}
        self.version = 0
        """Rises whenever `read` finds a change."""

    def read(self) -> None:
        """Read all acknowledgements from the store; those that are dated in the future are void from now on."""
        store = self._host.store
        found = tuple(store.acks())
        if ahead := acks.ahead(found, self._host.clock(), store.reached):
            store.void_acks(ahead)
            found = tuple(store.acks())
        self._of = {uuid: tuple(a for a in found if a.device == uuid) for uuid in self._host.devices}
        if found != self._all:
            self._all = found
            self.version += 1

    def in_force(self, uuid: str) -> tuple[Ack, ...]:
        """Return the acknowledgements of a device that count now; the clock may make a future one count later."""
        return acks.heeded(self._of.get(uuid, ()), self._host.clock())

    def evidence_since(self, uuid: str) -> float:
        """Return the time of a device's last repair; evidence before it does not count."""
        return acks.cut(self._host.devices[uuid], self.in_force(uuid))


class Evidence:
    """The runs of each device that stay in memory."""

    def __init__(self, host: Host, acknowledgements: Acknowledgements, met: MetClasses) -> None:
        """Load nothing yet; `recall` does."""
        self._host = host
        self._acks = acknowledgements
        self._met = met
        self._runs: dict[str, list[Run]] = {}
        self._mismatched: frozenset[str] = frozenset()
        """Devices with a mismatch on record."""
        self._onsets: dict[str, list[float]] = defaultdict(list)
        """Probe → the starts of mismatches, ascending, between which clean runs may be added up."""
        self._loaded: set[str] = set()
        """Probes whose newest runs have been read from the store."""
        self._clock_offset = 0.0
        """Seconds added to the start of a run while the clock is behind the last confirmed time."""

    def recall(self) -> None:
        """Read the runs of new devices, and of all devices when there are new probes, from the store."""
        onsets = self._host.store.onsets()
        self._mismatched = frozenset(uuid for uuid, *_ in onsets)
        self._onsets.clear()
        for _, probe, first, newest in onsets:
            bisect.insort(self._onsets[probe], first)
            bisect.insort(self._onsets[probe], newest)
        self._met.read()
        new = set(self._host.entries) - self._loaded
        self._loaded |= new
        for uuid in self._host.devices:
            if new or uuid not in self._runs:
                self._runs[uuid] = self._load(uuid)

    def of(self, uuid: str) -> Sequence[Run]:
        """Return the runs of a device that count, oldest first: clean ones folded, drills only while recent."""
        with self._host.mutex:
            runs, now = self._runs.get(uuid, ()), self._host.clock()
            since = self._acks.evidence_since(uuid) if uuid in self._host.devices else 0.0
            return tuple(run for run in runs if run.started > since and not expired(run, now))

    def redated(self, run: Run) -> Run:
        """Return a run with a corrected start where the clock was set back.

        Otherwise a mismatch would look older than the runs before it. The distances between runs stay.
        """
        confirmed = self._host.store.reached
        if run.started >= confirmed - MAX_LAG:
            self._clock_offset = 0.0
        elif (run.wrong or run.recordings) and not run.drill:
            self._clock_offset = self._clock_offset or confirmed - run.started
            return replace(run, started=run.started + self._clock_offset, clock=run.started)
        return run

    def add(self, run: Run) -> None:
        """Add a run, once: a run that has just ended may have been read from the store already."""
        runs = self._runs.setdefault(run.device, [])
        if any(known.id == run.id for known in runs):
            return
        kin = self._host.kin(run.device)
        if run.wrong and not run.drill:
            bisect.insort(self._onsets[run.probe], run.started)
            if not kin & self._mismatched:
                # From now on the whole record of this device and of its siblings counts.
                self._mismatched |= {run.device}
                self._runs |= {uuid: self._load(uuid) for uuid in kin}
                runs = [known for known in self._runs[run.device] if known.id != run.id]
        self._runs[run.device] = self._kept(run.device, [*runs, fold(run)])

    def _limit(self, uuid: str) -> int:
        """Return how many clean runs of one kind count: many where the device or a sibling has a mismatch."""
        return RECORD if self._host.kin(uuid) & self._mismatched else NEWEST

    def _load(self, uuid: str) -> list[Run]:
        """Read from the store what the judge needs: all failures, the newest of the rest, and recent drills."""
        store = self._host.store
        found = store.failures(uuid, FAILURES)
        # One probe at a time: many runs of one must not hide the last run of another with a longer period.
        for probe in self._host.entries:
            found += store.runs(uuid, probe, failed=False, limit=NEWEST)
        if self._limit(uuid) > NEWEST:
            older, counted = store.older_clean(uuid, NEWEST, RECORD)
            found += [*older, *of_counts(counted, self._onsets, store.run)]
        found += store.runs(uuid, drill=True, since=self._host.clock() - DRILL_EXPIRY)
        if learnt := self._met.learn(found):  # of a release that kept no such record
            store.set_met(learnt)
        runs = {run.id: fold(run) for run in found}
        return self._kept(uuid, [runs[name] for name in sorted(runs)])

    def _kept(self, uuid: str, runs: Sequence[Run]) -> list[Run]:
        """Return which of a device's runs (oldest first) stay in memory: the newest of each kind."""
        limit, now = self._limit(uuid), self._host.clock()
        seen: Counter[object] = Counter()
        with_recordings: Counter[object] = Counter()
        kept: list[Run] = []
        summed: list[Run] = []
        for run in reversed(runs):
            failed = bool(run.wrong or run.unknown)
            lane = (run.probe, run.instruction_set, run.drill, failed, bool(run.confirms), run.intensity)
            seen[lane] += 1
            if limit > NEWEST and seen[lane] > NEWEST and can_sum(run):
                summed.append(run)
            elif seen[lane] <= (FAILURES if failed or run.confirms else limit) and not expired(run, now):
                # Known recordings are counted in the baselines already; the newest few runs are enough to show them.
                # A run that did not complete, or tested only a part, never takes the place of a complete one.
                kind = lane, run.whole, run.outcome is Outcome.COMPLETED
                many = len(run.recordings) > FEW and not run.unknown
                with_recordings[kind] += many
                kept.append(without_recordings(run) if many and with_recordings[kind] > SHOWN else run)
        # In the order given, not by id: where the clock was set back, the ids of newer runs are smaller.
        place = {run.id: n for n, run in enumerate(runs)}
        return sorted([*kept, *add_up(reversed(summed), self._onsets)], key=lambda run: place[run.id])


def fold(run: Run) -> Run:
    """Return a clean run with its comparisons summed into one, which is all that the judge needs."""
    if run.wrong:
        return replace(run, comparisons=tuple(map(_brief, run.comparisons)), skipped=(), readings=_kept_readings(run))
    if not run.whole or len(run.comparisons) < 2:
        return run
    return replace(
        run, comparisons=summary(run.seed, run.trials, run.uploads), skipped=(), readings=_kept_readings(run)
    )


def _brief(comparison: Comparison) -> Comparison:
    """Return a comparison with the first few of its wrong elements, enough to distinguish two mismatches."""
    found = comparison.evidence
    return comparison if found is None else replace(comparison, evidence=replace(found, first=found.first[:BRIEF]))


def _kept_readings(run: Run) -> tuple[Reading, ...]:
    """Return the readings that are shown or judged; without any, the first one, as a sign that there were some."""
    return tuple(r for r in run.readings if r.name in KEPT) or run.readings[:1]


def without_recordings(run: Run) -> Run:
    """Return a run without its recordings, and with only those readings that are compared with later runs.

    The latency of an endpoint depends on what was asked and on whether it served others at the time. The first
    recording shows the one, the first recording that was not alone shows the other.
    """
    compared = tuple(r for r in run.readings if r.name == "golden_fingerprint" or r.name in speed.LATENCIES)
    kept: tuple[Recording, ...] = ()
    if any(r.name in speed.LATENCIES for r in compared):
        kept = run.recordings[:1] + tuple(r for r in run.recordings[1:] if r.condition != IDLE)[:1]
    learnt = tuple(case for case in run.learnt if case in {r.case for r in kept})
    return replace(run, recordings=kept, learnt=learnt, readings=compared or run.readings[:1])


def last_pass(runs: Iterable[Run]) -> float | None:
    """Return the start of the newest clean run that tested everything; None where there is none."""
    clean = (r for r in runs if r.outcome is Outcome.COMPLETED and r.whole and not (r.wrong or r.drill))
    return max((r.started for r in clean if r.trials), default=None)


def expired(run: Run, now: float) -> bool:
    """Return whether a run is a drill that no longer counts."""
    return bool(run.drill) and abs(now - run.started) > DRILL_EXPIRY
