"""The runs that the judge sees: which runs stay in memory, and how much of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from canaryd.engine.host import Host
from canaryd.judge import acks
from canaryd.judge.brief import SHOWN, brief, fold
from canaryd.judge.hangs import HANGS
from canaryd.judge.watch import has_looked
from canaryd.model import Ack, Outcome, Run

NEWEST = 50
"""Number of clean runs of one probe and instruction set that the judge sees of a device; tallies count all of them."""
FAILURES = 100
"""Number of mismatches of one probe and instruction set that stay in memory. Runs that hung or ended with a device
error have their own limit of this number, and so do clean confirmations: none of them can ever push out a mismatch."""
STOPPED = HANGS | {Outcome.DEVICE_ERROR}
"""Outcomes that count for as long as the judge watches a device, because they can happen again days later."""
DEVICE_FAILURES = 400
"""Number of mismatches of one device that stay in memory; if more than four kinds of runs fail, fewer of each kind stay
(ours). 100 runs of each kind prove a device's fault no better than 50, and take as much memory as eight devices."""
FEWEST = 16
"""Number of mismatches of one kind that always stay in memory, however many kinds there are; every rule needs fewer."""


class Acknowledgements:
    """The acknowledgements of operators, by device."""

    def __init__(self, host: Host) -> None:
        """Start empty; `read` fills it."""
        self._host = host
        self._all: tuple[Ack, ...] = ()
        self._of: dict[str, tuple[Ack, ...]] = {}
        self.version = 0
        """Rises whenever `read` finds a change."""

    def read(self) -> None:
        """Read all acknowledgements from the store. Acknowledgements dated in the future become void for good.

        Nobody deletes an acknowledgement. If the store lacks a known one, the database was replaced: it is stored
        again.
        """
        store = self._host.store
        found = tuple(store.acks())
        if store.unreadable:
            return  # what was read before still holds
        if lost := {a for a in self._all if not a.void} - {*found}:
            for ack in lost:
                store.add_ack(ack)
            found = tuple(store.acks())
        if ahead := acks.ahead(found, self._host.clock(), store.passed):
            store.void_acks(ahead)
            found = tuple(store.acks())
        self._of = {uuid: tuple(a for a in found if a.device == uuid) for uuid in self._host.devices}
        if found != self._all:
            self._all = found
            self.version += 1

    def in_force(self, uuid: str) -> tuple[Ack, ...]:
        """Return the acknowledgements of a device that count now. One dated in the future counts only later."""
        return acks.heeded(self._of.get(uuid, ()), self._host.clock())

    def evidence_since(self, uuid: str) -> float:
        """Return the time (epoch s) of a device's last repair; evidence from before it does not count."""
        return acks.cut(self._host.devices[uuid], self.in_force(uuid))


class _Counting(NamedTuple):
    kept: list[Run]
    since: float
    runs: tuple[Run, ...]
    looked: tuple[Run, ...]


class Evidence:
    """The runs of each device that stay in memory."""

    def __init__(self, host: Host, acknowledgements: Acknowledgements) -> None:
        """Start empty; `recall` loads the runs."""
        self._host = host
        self._acks = acknowledgements
        self._runs: dict[str, list[Run]] = {}
        self._counting: dict[str, _Counting] = {}
        """What `of` and `looked` returned last; a list in `_runs` is never changed, only replaced."""
        self._brief: dict[str, frozenset[str]] = {}
        """Device → the ids of its runs that were made brief already."""
        self._recalled: set[str] = set()
        """Devices whose record has been read from the store."""
        self._generation: int | None = None
        """`Store.generation` when it was read; None before the first try, -1 after one that failed."""

    @property
    def outdated(self) -> bool:
        """Whether the database has runs to read: it was locked and is readable now, or it replaced the previous one."""
        store = self._host.store
        return self._generation not in (None, store.generation) and not store.unreadable

    def recall(self) -> None:
        """Read from the store the runs of devices that are new, or whose runs could not be read before.

        If the database was replaced, the runs of all devices are read, and the runs in memory stay.
        """
        store, devices = self._host.store, self._host.devices
        generation = store.generation
        before: Mapping[str, Sequence[Run]] = {}
        if self.outdated:
            before = self._runs
            self._recalled.clear()
        for uuid in devices:
            if uuid not in self._recalled:
                self._runs[uuid] = self._load(uuid, before.get(uuid, ()))
        self._recalled, self._generation = set(devices), -1 if store.unreadable else generation

    def of(self, uuid: str) -> tuple[Run, ...]:
        """Return a device's runs that count, oldest first: clean runs in short form."""
        return self._of(uuid).runs

    def looked(self, uuid: str) -> tuple[Run, ...]:
        """Return those that tested the device."""
        return self._of(uuid).looked

    def _of(self, uuid: str) -> _Counting:
        with self._host.mutex:
            kept = self._runs.get(uuid, [])
            since = self._acks.evidence_since(uuid) if uuid in self._host.devices else 0.0
            known = self._counting.get(uuid)
            if known is None or known.kept is not kept or known.since != since:
                runs = tuple([run for run in kept if run.started > since])
                known = self._counting[uuid] = _Counting(kept, since, runs, tuple(filter(has_looked, runs)))
            return known

    def dated(self, run: Run) -> Run:
        """Return the run; if the clock is far behind the stored records, `started` becomes the time of storing.

        Otherwise a mismatch would look older than the runs before it.
        """
        at = self._host.store.date(run.started)
        return run if at == run.started else replace(run, started=at, clock=run.started)

    def add(self, run: Run) -> bool:
        """Add a run; False if it was already added: a run that has just ended can also come from the store."""
        runs = self._runs.setdefault(run.device, [])
        if any(known.id == run.id for known in runs):
            return False
        self._runs[run.device] = self._kept(run.device, [*runs, fold(run)], self._brief.get(run.device, frozenset()))
        return True

    def _load(self, uuid: str, before: Iterable[Run] = ()) -> list[Run]:
        """Return a device's stored runs that the judge needs: all failures and the newest other runs.

        The result includes the runs `before`, which were in memory already.
        """
        store = self._host.store
        # What passed long ago by a probe that is switched off is not shown beside what is tested now.
        clean = [r for r in store.newest_clean(uuid, NEWEST) if self._host.settings(r.probe).enabled is not False]
        found = store.failures(uuid, _most(store.kinds_of_failures(uuid))) + clean
        runs = {run.id: run for run in before} | {run.id: fold(run) for run in found}
        return self._kept(uuid, [runs[name] for name in sorted(runs)])

    def _kept(self, uuid: str, runs: Sequence[Run], known: frozenset[str] = frozenset()) -> list[Run]:
        """Return the runs of a device (oldest first) that stay in memory: the newest of each kind.

        `known` has the ids of the runs that are in short form already.
        """
        most = _most(len({_kind(run) for run in runs if run.failed}))
        seen: Counter[object] = Counter()
        of_kind: Counter[object] = Counter()
        kept: list[Run] = []
        shortened: set[str] = set()
        for run in reversed(runs):
            failed = bool(run.wrong or run.unknown)
            stopped = run.outcome in STOPPED
            completed = run.outcome is Outcome.COMPLETED
            # A run that was skipped never takes the place of a completed one.
            kind = failed, stopped, bool(run.confirms), run.intensity, failed or completed
            lane = run.probe, run.instruction_set, kind
            seen[lane] += 1
            if seen[lane] <= (most if failed or stopped or run.confirms else NEWEST):
                # Known recordings are counted in the baselines already; the newest few runs are enough to show them.
                # One that did not complete, or tested only a part, is not shown in the place of a complete one.
                shown = lane, run.whole, completed
                of_kind[shown] += 1
                if of_kind[shown] > SHOWN:
                    kept.append(run if run.id in known else brief(run))
                    shortened.add(run.id)
                else:
                    kept.append(run)
        self._brief[uuid] = frozenset(shortened)
        # In the order given, not by id: where the clock was set back, the ids of newer runs are smaller.
        place = {run.id: n for n, run in enumerate(runs)}
        return sorted(kept, key=lambda run: place[run.id])


def _most(kinds: int) -> int:
    """Return the number of failures of each kind that stay in memory for a device with `kinds` kinds of failures."""
    return max(FEWEST, min(FAILURES, DEVICE_FAILURES // max(1, kinds)))


def _kind(run: Run) -> object:
    """Return a key that is equal for failures of one kind, as in `RunTables.failures`."""
    return run.probe, run.instruction_set, run.intensity, bool(run.confirms), bool(run.wrong or run.unknown)


def last_pass(runs: Iterable[Run]) -> float | None:
    """Return the start (epoch s) of the newest clean run of a whole probe, or None if there is no such run."""
    clean = (r for r in runs if r.outcome is Outcome.COMPLETED and r.whole and not r.wrong)
    return max((r.started for r in clean if r.trials), default=None)
