"""What canaryd remembers: runs, baselines, polls, events, devices, verdicts, acks, counters, in one SQLite file.

Each write is one short transaction. A write that the disk refuses goes to an equal database in memory instead, which
is part of every answer and moves to disk as soon as that works again. So a full disk, a read-only directory or a
damaged file costs durability for a while, says so in `Store.problem`, and nothing else.
"""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from canaryd.codec import from_json
from canaryd.judge.clock import EPOCH
from canaryd.judge.recordings.baseline import Baseline
from canaryd.judge.trends.days import Day
from canaryd.model import Ack, Device, Event, Outcome, Run, Verdict, printable, whole
from canaryd.store.locks import Busy, flock, make, make_directory
from canaryd.store.migrations import MIGRATIONS, Migration, apply_migration
from canaryd.store.rows import (
    ACK,
    ADD_ACK,
    ADD_BASELINE,
    ADD_COUNT,
    ADD_DEVICE,
    ADD_EVENT,
    ADD_POLL,
    ADD_RUN,
    ADD_SUMMARY,
    BASELINE,
    COUNTER,
    DEVICE,
    EVENT,
    HOUR,
    NOTE,
    POLL,
    RUN,
    SUMMARY,
    VERDICT,
    add_verdict,
    baseline_key,
    encode_labels,
    event_from_row,
    event_row,
    pack,
    refused,
    run_counts,
    run_row,
)

DATABASE = "canaryd.db"
"""Name of the database in the state directory."""
DAY = 86_400.0
BUSY_TIMEOUT = 5.0
"""Seconds that a statement waits for another process's transaction."""
CACHE = 512
"""KiB of the database that SQLite keeps in memory, a quarter of its default (ours): a look at the record takes its time
for decoding JSON, hardly any for pages, which the system holds anyway."""
OPEN_TIMEOUT = 10.0
"""Seconds to wait while another process creates, checks or migrates the database."""
BACKLOG = 10_000
"""Runs kept in memory while they cannot be written; about 2 KiB each."""
WAITING_POLLS = 1000
"""Polls kept in memory while they cannot be written."""
FOREVER = 1e18
"""When a pinned baseline was last needed, as far as pruning goes."""
BATCH = 100
"""Runs moved or deleted in one transaction, so that another process never waits long."""
DOUBTED = DAY
"""Seconds by which a clock may stand before a time that has come for certain until it is not believed (ours)."""
STEP = 2 * HOUR
"""Seconds by which one prune follows the clock: twice the daemon's hour, so that an hour of a wrong clock costs no more
than two (ours)."""
JUMP = 60.0
"""Seconds by which the clock may part from the monotonic one between two looks and not have been set (ours)."""
REACHED_NOTE, LOST_NOTE = "reached", "history lost"
"""Notes: see `Store.reached`; when a damaged file was set aside, and as what, as "seconds path"."""
T = TypeVar("T")


class StoreTooNew(RuntimeError):
    """The database was written by a newer canaryd; it is left as it is."""


class _Replaced(OSError):
    """The path leads to another file than the one just used: that one was set aside by another process, or removed."""


REFUSED = (OSError, sqlite3.Error, StoreTooNew)
"""What the disk, the file or another process can do to us; anything else is a mistake here."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long runs are kept, in seconds since they were stored.

    A failure is a run with a wrong comparison or unknown bits, or one that neither completed nor was skipped.
    """

    successes: float = 14 * DAY
    failures: float = 400 * DAY
    drills: float = 1 * DAY
    """Runs with an injected fault, whatever came of them."""
    polls: float = 14 * DAY
    """Telemetry: the course of readings over time; what they showed to have happened is kept as events."""


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device that was seen on this machine, now or before. Times are seconds since the epoch."""

    device: Device
    first_seen: float
    last_seen: float
    present: bool
    """False once it was looked for and not found."""


class Store:
    """The memory of the daemon and of every command beside it. Safe to use from several threads and processes."""

    def __init__(
        self,
        state_dir: Path,
        now: Callable[[], float],
        max_bytes: int,
        keep: Retention,
        migrations: Sequence[Migration],
        for_reading: bool = False,
    ) -> None:
        self.state_dir = state_dir
        self.path = state_dir / DATABASE
        self.max_bytes = max_bytes
        self.keep = keep
        self.problem = ""
        """One sentence while something cannot be stored; "" when all is well."""
        self._now = now
        self._for_reading = for_reading
        self._migrations = migrations
        self._lock = threading.RLock()
        self._notes: dict[str, str] = {}
        self._newest = 0.0
        self._disk: sqlite3.Connection | None = None
        self._opened = 0
        self._identity: tuple[int, int] | None = None
        self._replaced = False  # since it was opened last, by whatever process
        self._read_only = False
        self._memory = _connect("file::memory:")
        self._data_version: object = None
        self._steady: tuple[float, float] | None = None  # when the clock was last set: its time, and monotonic time
        self._lost = ""  # what is to be noted in the fresh file
        self._waiting = False  # for the disk, in `_memory`
        for migrate in migrations:
            migrate(self._memory)

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        now: Callable[[], float] = time.time,
        max_bytes: int = 256 * 1024 * 1024,
        keep: Retention = Retention(),
        migrations: Sequence[Migration] = MIGRATIONS,
        for_reading: bool = False,
    ) -> Store:
        """Open or create the store in `state_dir`; `now` is the clock, in seconds since the epoch.

        `for_reading`: whoever asks, nothing is created, mended, migrated or locked, and that is no problem.

        Raises `StoreTooNew` and nothing else: a damaged database is set aside (see `problems`), and where nothing can
        be stored, the store works from memory and `problem` says why.
        """
        store = cls(state_dir, now, max_bytes, keep, migrations, for_reading)
        try:
            store._connection()
        except StoreTooNew:
            store.close()
            raise
        except (OSError, sqlite3.Error) as error:
            store._fail(error)
        return store

    def close(self) -> None:
        """Try once more to write what waits in memory, then let go of the file."""
        with self._lock:
            try:
                self._move_to_disk()
            except REFUSED as error:
                self._fail(error)
            self._disconnect()
            self._memory.close()

    def __enter__(self) -> Store:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def writable(self) -> bool:
        """False while the database is open for reading only, or not at all."""
        return self._disk is not None and not self._read_only

    @property
    def problems(self) -> list[str]:
        """What happened to the store since it was opened that an operator should know, one sentence each."""
        return list(self._notes.values())

    # Runs

    def add_run(self, run: Run, baselines: Iterable[Baseline] = ()) -> bool:
        """Store and count a run, and the `baselines` that it has changed, in one transaction. Never raises.

        True: it is on disk and survives `kill -9`.

        False: it waits in memory and `problem` says why. At most `BACKLOG` runs wait; beyond, the oldest successes are
        dropped, and failures only when nothing else is left. They stay counted.
        """
        with self._lock:
            row, counts = run_row(run, self._stamp()), run_counts(run)
            learnt = self._baseline_rows(baselines)

            def write(db: sqlite3.Connection) -> None:
                if db.execute(ADD_RUN, row).rowcount:
                    db.executemany(ADD_COUNT, counts)
                    db.executemany(ADD_BASELINE, learnt)

            if self._store(write):
                return True
            oldest = "SELECT number FROM runs ORDER BY failed, number"
            beyond = f"max(0, (SELECT count(*) FROM runs) - {BACKLOG})"
            if self._memory.execute(f"DELETE FROM runs WHERE number IN ({oldest} LIMIT {beyond})").rowcount:
                self._notes["dropped"] = f"{self.path}: only {BACKLOG} runs can wait in memory; older ones were dropped"
            return False

    def runs(
        self,
        device: str | None = None,
        probe: str | None = None,
        since: float | None = None,
        *,
        until: float | None = None,
        drill: bool | None = False,
        failed: bool | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """Return runs in the order in which they were stored, newest last; `None` does not narrow.

        `since` and `until` (left out) go by when a run was stored, in seconds since the epoch: that never runs
        backwards, while the clock that `Run.started` was read from may. `failed` is as in `Retention`. `limit` keeps
        the newest.
        """
        times = {"stored >= ?": since, "stored < ?": until}
        terms = {"device = ?": device, "probe = ?": probe, **times, "failed = ?": failed}
        where = {term: value for term, value in {**terms, "(drill != '') = ?": drill}.items() if value is not None}
        query = f"SELECT id, body FROM runs WHERE {' AND '.join(where) or '1'} ORDER BY number DESC LIMIT ?"
        stored, waiting = self._read(query, *where.values(), -1 if limit is None else limit)
        return self._unpack(Run, [*waiting, *stored][:limit])[::-1]

    def run(self, run_id: str) -> Run | None:
        """Return one run; None where it is not known (any more)."""
        stored, waiting = self._read("SELECT id, body FROM runs WHERE id = ?", run_id)
        return next(iter(self._unpack(Run, [*stored, *waiting])), None)

    def mismatched(self) -> frozenset[str]:
        """Return the devices (their uuids) with a mismatch on record, drills left out."""
        stored, waiting = self._read("SELECT DISTINCT device FROM runs WHERE wrong > 0 AND drill = ''")
        return frozenset(uuid for (uuid,) in (*stored, *waiting))

    # Baselines

    def set_baselines(self, baselines: Iterable[Baseline]) -> bool:
        """Make these the newest of their keys, in one transaction. False: only in memory so far."""
        with self._lock:
            rows = self._baseline_rows(baselines)
            return self._store(lambda db: db.executemany(ADD_BASELINE, rows))

    def _baseline_rows(self, baselines: Iterable[Baseline]) -> list[tuple[Any, ...]]:
        # By the store's time: a clock that was not set must not make a baseline look old enough to go.
        now = self._stamp()
        return [(b.device, baseline_key(b), FOREVER if b.pinned else max(now, b.used), pack(b)) for b in baselines]

    def baselines(self, device: str | None = None) -> list[Baseline]:
        """Return the baselines of a device, or of all, in the order in which they were learnt."""
        query = "SELECT device, key, body FROM baselines WHERE device = ? OR ? IS NULL ORDER BY last"
        stored, waiting = self._read(query, device, device)
        newest = {(uuid, key): body for uuid, key, body in (*stored, *waiting)}
        return self._unpack(Baseline, [(f"{uuid} {key}", body) for (uuid, key), body in newest.items()])

    # An operator's word

    def add_ack(self, ack: Ack) -> bool:
        """Keep what an operator said of a device, for good: it is evidence too. False: only in memory so far."""
        row = (ack.device, ack.kind, ack.at, pack(ack))
        return self._store(lambda db: db.execute(ADD_ACK, row))

    def acks(self, device: str | None = None) -> list[Ack]:
        """Return what operators said of a device, or of all, newest last."""
        stored, waiting = self._read(
            "SELECT device, body FROM acks WHERE device = ? OR ? IS NULL ORDER BY number", device, device
        )
        return sorted(self._unpack(Ack, [*stored, *waiting]), key=lambda a: a.at)

    # Days

    def add_day(self, day: Day) -> bool:
        """Keep what a day was; it outlives the runs and polls it was made of. False: only in memory so far."""
        return self._store(lambda db: db.execute(ADD_SUMMARY, (day.device, day.day, pack(day))))

    def days(self, device: str, since: float = 0.0) -> list[Day]:
        """Return the summaries of a device's days that ended at `since` or later, oldest first."""
        query = "SELECT day, body FROM days WHERE device = ? AND day >= ? ORDER BY day"
        stored, waiting = self._read(query, device, int(since // DAY))
        newest = dict((*stored, *waiting))
        return self._unpack(Day, [(f"{device} {day}", body) for day, body in sorted(newest.items())])

    def summed(self, device: str, since: float) -> set[int]:
        """Return which of a device's days (since the epoch) that ended at `since` or later have a summary."""
        stored, waiting = self._read("SELECT day FROM days WHERE device = ? AND day >= ?", device, int(since // DAY))
        return {day for (day,) in (*stored, *waiting)}

    # Telemetry

    def add_poll(self, poll: Run, outcomes: Mapping[Outcome, int], events: Iterable[Event] = ()) -> bool:
        """Keep one poll, what it shows to have happened, and the number of polls since the last one kept, by outcome.

        One transaction: after a kill the next poll is compared with this one exactly when its events are stored.
        False: only in memory so far.
        """
        of = {"device": poll.device, "probe": poll.probe}
        counts = [("probe_runs", encode_labels({**of, "outcome": o.value}), float(n)) for o, n in outcomes.items()]
        done = poll.outcome is Outcome.COMPLETED
        row = (poll.id, poll.device, poll.probe, poll.started, done, pack(poll))
        rows = [event_row(e) for e in events]

        def write(db: sqlite3.Connection) -> None:
            if db.execute(ADD_POLL, row).rowcount:
                db.executemany(ADD_COUNT, counts)
                db.executemany(ADD_EVENT, rows)

        if self._store(write):
            return True
        beyond = f"max(0, (SELECT count(*) FROM polls) - {WAITING_POLLS})"
        with self._lock:
            self._memory.execute(
                f"DELETE FROM polls WHERE number IN (SELECT number FROM polls ORDER BY number LIMIT {beyond})"
            )
        return False

    def polls(
        self,
        device: str,
        probe: str | None = None,
        since: float = 0.0,
        *,
        until: float = math.inf,
        completed: bool = False,
        limit: int | None = None,
    ) -> list[Run]:
        """Return the polls that were kept of a device, started from `since` to before `until`, newest last.

        `limit` keeps the newest. With `completed`, only those that did.
        """
        query = (
            "SELECT id, body FROM polls WHERE device = ? AND (probe = ? OR ? IS NULL) AND started >= ? AND started < ?"
            " AND completed >= ? ORDER BY number DESC LIMIT ?"
        )
        most = -1 if limit is None else limit
        stored, waiting = self._read(query, device, probe, probe, since, until, completed, most)
        return self._unpack(Run, [*waiting, *stored][:limit])[::-1]

    def add_events(
        self,
        events: Iterable[Event],
        counts: Iterable[tuple[str, Mapping[str, str], float]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> bool:
        """Store what happened, increase counters (name, labels, by) and set notes, all in one transaction.

        So a position in a log moves on exactly when what was read there is counted. False: only in memory so far.
        """
        rows = [event_row(e) for e in events]
        counters = [(name, encode_labels(labels), by) for name, labels, by in counts]

        def write(db: sqlite3.Connection) -> None:
            db.executemany(ADD_EVENT, rows)
            db.executemany(ADD_COUNT, counters)
            db.executemany(NOTE, (notes or {}).items())

        return self._store(write)

    def events(self, since: float = 0.0, device: str | None = None) -> list[Event]:
        """Return what happened at `since` or later (seconds since the epoch), newest last."""
        query = f"SELECT {EVENT} FROM events WHERE last >= ? AND (device = ? OR ? IS NULL)"
        stored, waiting = self._read(query, since, device, device)
        found = [event_from_row(row) for row in (*stored, *waiting)]
        return sorted(found, key=lambda e: (e.last, e.first, e.device, e.kind, e.name))

    def note(self, name: str) -> str:
        """Return what was noted last under a name; "" for nothing."""
        stored, waiting = self._read("SELECT value FROM notes WHERE name = ?", name)
        return str(([*stored, *waiting] or [("",)])[-1][0])

    def set_note(self, name: str, value: str) -> bool:
        """Note a value under a name. False: only in memory so far."""
        return self.add_events((), notes={name: value})

    @property
    def lost(self) -> tuple[float, str] | None:
        """When a damaged database was set aside last, in seconds since the epoch, and as what; None for never."""
        at, _, aside = self.note(LOST_NOTE).partition(" ")
        return (float(at), aside) if at else None

    # Devices

    def see_device(self, device: Device, now: float) -> bool:
        """Remember that `device` was there at `now` (seconds since the epoch). False: only in memory so far."""
        row = (device.uuid, now, now, True, pack(device))
        return self._store(lambda db: db.execute(ADD_DEVICE, row))

    def set_present(self, uuids: Collection[str], now: float) -> bool:
        """Remember that of all known devices exactly `uuids` were there at `now`. False: only in memory so far."""
        with self._lock:
            rows = []
            for known in self.devices():
                here = known.device.uuid in uuids
                seen = now if here else known.last_seen
                rows.append((known.device.uuid, known.first_seen, seen, here, pack(known.device)))
            return self._store(lambda db: db.executemany(ADD_DEVICE, rows))

    def devices(self) -> list[DeviceRecord]:
        """Return every device ever seen here, in the order of their uuids."""
        stored, waiting = self._read("SELECT uuid, body, first_seen, last_seen, present FROM devices")
        first_seen = {uuid: first for uuid, _, first, _, _ in [*waiting, *stored]}
        newest = {row[0]: row for row in [*stored, *waiting]}
        return [
            DeviceRecord(device=device, first_seen=first_seen[uuid], last_seen=last, present=bool(present))
            for uuid, body, _, last, present in sorted(newest.values())
            for device in self._unpack(Device, [(uuid, body)])
        ]

    # Verdicts

    def set_verdict(self, verdict: Verdict) -> bool:
        """Make `verdict` its device's newest. False: only in memory so far.

        The history gains an entry when state or cause changed; otherwise its last entry is replaced.
        """
        row = (verdict.device, verdict.drill, verdict.state.value, verdict.cause.value, verdict.decided, pack(verdict))
        return self._store(lambda db: add_verdict(db, row))

    def verdicts(self, *, drill: bool = False) -> dict[str, Verdict]:
        """Return each device's newest verdict, by uuid: from real evidence, or from drills alone."""
        newest = "SELECT max(number) FROM verdicts WHERE drill = ? GROUP BY device"
        stored, waiting = self._read(f"SELECT device, body FROM verdicts WHERE number IN ({newest})", drill)
        return {verdict.device: verdict for verdict in self._unpack(Verdict, [*stored, *waiting])}

    def verdict(self, device: str) -> Verdict | None:
        """Return the newest verdict on one device (its uuid) from real evidence; None where there is none."""
        query = "SELECT device, body FROM verdicts WHERE device = ? AND drill = 0 ORDER BY number DESC LIMIT 1"
        stored, waiting = self._read(query, device)
        return next(iter(self._unpack(Verdict, [*waiting, *stored])), None)

    def verdict_history(self, device: str, *, drill: bool = False) -> list[Verdict]:
        """Return the verdicts on one device (its uuid), newest last; neighbours differ in state or cause."""
        query = "SELECT device, body FROM verdicts WHERE device = ? AND drill = ? ORDER BY number"
        stored, waiting = self._read(query, device, drill)
        history = self._unpack(Verdict, [*stored, *waiting])
        pairs = itertools.zip_longest(history, history[1:])  # The last on disk and the first in memory may be equal.
        return [v for v, after in pairs if after is None or (v.state, v.cause) != (after.state, after.cause)]

    # Counters

    def count(self, name: str, labels: Mapping[str, str], by: float = 1) -> bool:
        """Increase a counter; it outlives restarts and pruned runs. False: only in memory so far."""
        return self._store(lambda db: db.execute(ADD_COUNT, (name, encode_labels(labels), by)))

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return every counter by its name and label items, what is not on disk yet included."""
        total: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        stored, waiting = self._read("SELECT name, labels, value FROM counters")
        for name, labels, value in [*stored, *waiting]:
            key = name, frozenset(parse_qsl(labels, keep_blank_values=True))
            total[key] = total.get(key, 0) + value
        return total

    def written_elsewhere(self) -> object:
        """Return what is another whenever another connection has written; None where it cannot be told."""
        with self._lock:
            try:
                (version,) = self._attempt(lambda disk: disk.execute("PRAGMA data_version").fetchone())
            except REFUSED as error:
                self._fail(error)
                return None
            # SQLite counts for each connection anew, and a file made after another was removed may have its inode. A
            # disk that refuses writes is opened for every look: that alone is no news.
            return self._identity, self._opened, version

    def changed_elsewhere(self) -> bool:
        """Return whether another connection has written since this was asked last; True the first time."""
        with self._lock:
            before, self._data_version = self._data_version, self.written_elsewhere()
            return self._data_version is None or before != self._data_version

    # Time

    @property
    def reached(self) -> float:
        """A time that has come for certain, in seconds since the epoch, however wrong the clock was; 0.0 at first.

        It follows the clock by at most `STEP` at each prune, and never back; a clock that has run for a day without a
        jump is believed.
        """
        return float(self.note(REACHED_NOTE) or 0.0)

    def _stamp(self) -> float:
        """Return the time of storing: a clock set back must not make new evidence look old."""
        now = self._now()
        if now < EPOCH:  # a clock that has not been set says nothing
            return self._newest or now
        # Far behind the newest, that one may be of a clock that ran ahead: what has come for certain is enough.
        floor = self._newest if self._newest - now < DOUBTED else self.reached or self._newest
        stamp = max(now, floor)
        self._newest = stamp
        return stamp

    def dated(self, events: Iterable[Event]) -> list[Event]:
        """Return events with those dated by the time of storing that a clock set back would make old."""
        stamp, reached = self._stamp(), self.reached
        return [e if e.last >= reached - DOUBTED else replace(e, first=stamp, last=stamp) for e in events]

    def _follow(self, now: float) -> float:
        """Let `reached` follow the clock, and return by which time age is reckoned."""
        reached, tick = self.reached, time.monotonic()
        if now < EPOCH:
            return reached or self._newest
        if self._steady is None or abs((now - self._steady[0]) - (tick - self._steady[1])) > JUMP:
            self._steady = now, tick
        before = reached or self._newest or now
        # A clock that has run without a jump for a day is right, however far it is from what was believed.
        after = now if tick - self._steady[1] >= DAY else min(now, before + STEP)
        if after > reached or (after < reached - DOUBTED and after == now):
            self.set_note(REACHED_NOTE, repr(after))
            self._newest = min(self._newest, after)
        return after

    # Upkeep

    def prune(self, now: float) -> None:
        """Forget what `keep` allows to, then the oldest successes until the file is below `max_bytes`.

        Failures go before their time only when nothing else is left to go; `problems` then says so. `now` is in
        seconds since the epoch. Never raises: `problem` says what went wrong.
        """
        now = self._follow(now)
        success, failure = "(drill != '' OR NOT failed)", "(drill = '' AND failed)"
        ages = {"drill != ''": self.keep.drills, success: self.keep.successes, failure: self.keep.failures}
        newest = "SELECT max(number) FROM verdicts GROUP BY device, drill"
        old_verdicts = f"DELETE FROM verdicts WHERE decided < ? AND number NOT IN ({newest})"
        try:
            for condition, age in ages.items():
                while self._delete(f"{condition} AND stored < ?", now - age):
                    pass
            self._commit(lambda db: db.execute(old_verdicts, (now - self.keep.failures,)))
            for table in ("events", "baselines"):
                self._commit(lambda db: db.execute(f"DELETE FROM {table} WHERE last < ?", (now - self.keep.failures,)))  # noqa: B023
            self._commit(lambda db: db.execute("DELETE FROM days WHERE day < ?", ((now - self.keep.failures) // DAY,)))
            while self._delete_polls("started < ?", now - self.keep.polls):
                pass
            while self._attempt(_used) >= self.max_bytes and (
                self._delete_polls("1") or self._delete(success) or self._delete_early(failure)
            ):
                pass
            self._attempt(_compact)
        except REFUSED as error:
            self._fail(error)

    def _delete_early(self, condition: str) -> int:
        deleted = self._delete(condition)
        if deleted:
            self._notes["size"] = (
                f"{self.path}: failures younger than {self.keep.failures / DAY:g} days were forgotten to stay below "
                f"{self.max_bytes} bytes; raise store.max_size"
            )
        return deleted

    def _delete_polls(self, condition: str, *args: float) -> int:
        return self._delete(condition, *args, table="polls")

    def _delete(self, condition: str, *args: float, table: str = "runs") -> int:
        oldest = f"SELECT number FROM {table} WHERE {condition} ORDER BY number LIMIT {BATCH}"
        delete = f"DELETE FROM {table} WHERE number IN ({oldest})"
        return self._commit(lambda db: db.execute(delete, args).rowcount)

    @contextlib.contextmanager
    def lock(
        self,
        device_uuid: str,
        timeout: float = 0,
        on_wait: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """Hold a device alone among all processes that share the state directory.

        Waits up to `timeout` seconds, or until `stopped`; `on_wait` is told once who holds it. Raises `Busy`, which
        names the holder. The kernel releases the lock of a process that dies. Where lock files cannot exist, the device
        is used unlocked and `problems` says so.
        """
        path = self.state_dir / "locks" / f"{quote(device_uuid, safe='')}.lock"
        with contextlib.ExitStack() as held:
            try:
                make_directory(path.parent)
                held.enter_context(flock(path, timeout, on_wait, stopped))
            except Busy:
                raise
            except OSError as error:
                self._notes["lock"] = f"{path}: another canaryd may use the device at the same time, no lock: {error}"
            yield

    # Both databases

    def _store(self, write: Callable[[sqlite3.Connection], Any]) -> bool:
        """Do `write` on disk, after all that waits in memory; where the disk refuses, in memory."""
        with self._lock:
            try:
                self._move_to_disk()
                self._commit(write)
            except REFUSED as error:
                write(self._memory)
                self._waiting = True
                self._fail(error)
                return False
            self.problem = ""
            return True

    def _move_to_disk(self) -> None:
        memory = self._memory
        while self._waiting:
            runs = memory.execute(f"SELECT number, {RUN} FROM runs ORDER BY number LIMIT {BATCH}").fetchall()
            devices = memory.execute(f"SELECT {DEVICE} FROM devices").fetchall()
            counters = memory.execute(f"SELECT {COUNTER} FROM counters").fetchall()
            verdicts = memory.execute(f"SELECT {VERDICT} FROM verdicts ORDER BY number").fetchall()
            polls = memory.execute(f"SELECT {POLL} FROM polls ORDER BY number").fetchall()
            events = memory.execute(f"SELECT {EVENT}, hour FROM events").fetchall()
            notes = memory.execute("SELECT name, value FROM notes").fetchall()
            baselines = memory.execute(f"SELECT {BASELINE} FROM baselines").fetchall()
            acks = memory.execute(f"SELECT {ACK} FROM acks ORDER BY number").fetchall()
            days = memory.execute(f"SELECT {SUMMARY} FROM days").fetchall()

            def write(db: sqlite3.Connection) -> None:
                db.executemany(ADD_RUN, [row[1:] for row in runs])  # noqa: B023 - called before the next turn
                db.executemany(ADD_DEVICE, devices)  # noqa: B023
                db.executemany(ADD_COUNT, counters)  # noqa: B023
                db.executemany(ADD_POLL, polls)  # noqa: B023
                db.executemany(ADD_EVENT, events)  # noqa: B023
                db.executemany(NOTE, notes)  # noqa: B023
                db.executemany(ADD_BASELINE, baselines)  # noqa: B023
                db.executemany(ADD_ACK, acks)  # noqa: B023
                db.executemany(ADD_SUMMARY, days)  # noqa: B023
                for verdict in verdicts:  # noqa: B023
                    add_verdict(db, verdict)

            self._commit(write)
            memory.execute("DELETE FROM runs WHERE number <= ?", (runs[-1][0] if runs else 0,))
            for table in ("devices", "counters", "verdicts", "polls", "events", "notes", "baselines", "acks", "days"):
                memory.execute(f"DELETE FROM {table}")
            self._waiting = len(runs) == BATCH

    def _commit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Do `write` on disk, in one transaction; what it returns is there when this returns."""
        return self._attempt(lambda disk: self._transact(disk, write))

    def _transact(self, db: sqlite3.Connection, write: Callable[[sqlite3.Connection], T]) -> T:
        if self._read_only:
            raise PermissionError("it may only be read here; run as its owner, or choose another --state-dir")
        db.execute("BEGIN IMMEDIATE")
        try:
            self._version(db)
            result = write(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if self._moved():
            raise _Replaced("another file took its place during the write")
        return result

    def _read(self, query: str, *args: Any) -> tuple[list[Any], list[Any]]:
        """Return the rows on disk (none, with a `problem`, where they cannot be read) and the rows in memory."""
        with self._lock:
            try:
                stored = self._attempt(lambda disk: disk.execute(query, args).fetchall())
            except REFUSED as error:
                self._fail(error)
                stored = []
            return stored, self._memory.execute(query, args).fetchall()

    def _unpack(self, kind: type[T], rows: Iterable[tuple[str, bytes]]) -> list[T]:
        """Rebuild what `_pack` made; a damaged one is left out and noted."""
        found = []
        for name, body in rows:
            try:
                text = zlib.decompress(body)
                data = json.loads(text, parse_constant=refused)
                found.append(from_json(kind, whole(data) if b"\\ud" in text else data))
            except (ValueError, TypeError, RecursionError, zlib.error) as error:
                self._notes["damaged"] = printable(
                    f"{self.path}: {kind.__name__} {name} is passed over, it is unreadable: {error!s:.300}"
                )
        return found

    def _fail(self, error: Exception) -> None:
        (runs,) = self._memory.execute("SELECT count(*) FROM runs").fetchone()
        self.problem = f"{self.path}: {error}; runs waiting in memory: {runs}"

    # The file

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` on the file at `path`; where it turns out to be damaged or replaced, once more on the next one."""
        with self._lock:
            try:
                return work(self._connection())
            except _Replaced:
                pass
            except sqlite3.DatabaseError as error:
                if self._read_only or not _is_damage(error):
                    raise
                with flock(self._open_lock, OPEN_TIMEOUT):
                    if not self._moved():
                        self._set_aside(error)
            return work(self._connection())

    def _connection(self) -> sqlite3.Connection:
        if self._disk is not None and (self._moved() or (self._read_only and self._may_write())):
            self._replaced = self._replaced or self._is_gone()
            self._disconnect()
        if self._disk is not None:
            return self._disk
        try:
            self.state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            disk = self._open_as_allowed()
            (newest,) = disk.execute("SELECT max(stored) FROM runs").fetchone()
        except REFUSED:
            self._disconnect()
            raise
        self._newest = max(self._newest, newest or 0)
        return disk

    def _open_as_allowed(self) -> sqlite3.Connection:
        if self._may_write():
            try:
                return self._open_to_write()
            except OSError as error:
                # After an error of its own ext4 refuses every write, while access(2) still promises them.
                if error.errno != errno.EROFS:
                    raise
        return self._open_to_read("mode=ro")

    def _open_to_write(self) -> sqlite3.Connection:
        with flock(self._open_lock, OPEN_TIMEOUT):
            try:
                return self._open_and_migrate()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(error)
            return self._open_and_migrate()

    def _create(self) -> None:
        """Make the file whole before it has its name: one without a byte is then damage, and never a beginning."""
        fresh = Path(f"{self.path}.new")
        fresh.unlink(missing_ok=True)
        os.close(make(fresh))
        with contextlib.closing(_connect(f"file:{quote(str(fresh.absolute()))}?mode=rw")) as db:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA user_version = 0")
        fresh.replace(self.path)

    def _open_and_migrate(self) -> sqlite3.Connection:
        if not self.path.exists():
            if self._identity is not None and not self._lost:
                self._lost = f"{self._now()!r} nothing: {self.path} was removed while it was in use"
                self._notes["gone"] = f"{self.path}: was removed while it was in use; a fresh one was begun"
            self._create()
        elif self.path.stat().st_size == 0:
            self._open("mode=rw", read_only=False)
            raise sqlite3.DatabaseError("it is empty")
        db = self._open("mode=rwc", read_only=False)
        version = self._version(db)
        self._opened += 1
        self._identity = _identity(self.path)
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        if note := use_wal(db):
            self._notes["wal"] = f"{self.path}: {note}"
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{CACHE}")
        for number in range(version, len(self._migrations)):
            self._transact(
                db, functools.partial(apply_migration, migration=self._migrations[number], version=number + 1)
            )
        known = "SELECT 1 FROM notes WHERE name = ?"  # by whoever replaced it: one that was damaged
        if self._replaced and not self._lost and not db.execute(known, (LOST_NOTE,)).fetchone():
            self._lost = f"{self._now()!r} nothing: {self.path} was replaced while it was in use"
            self._notes["gone"] = f"{self.path}: was replaced while it was in use by another one, which goes on"
        if self._lost:
            self._transact(db, lambda db: db.execute(NOTE, (LOST_NOTE, self._lost)))
        self._lost, self._replaced = "", False
        return db

    def _open_to_read(self, mode: str) -> sqlite3.Connection:
        db = self._open(mode, read_only=True)
        self._identity = _identity(self.path)
        try:
            version = self._version(db)
        except sqlite3.OperationalError:
            # In WAL mode even a reader needs the -shm file. Where that is not there and may not be made, nobody is
            # writing either, and SQLite may take the file as it stands.
            if mode != "mode=ro":
                raise
            self._disconnect()
            return self._open_to_read("mode=ro&immutable=1")
        if version < len(self._migrations):
            raise PermissionError("it is of an older version; run canaryd once as its owner to migrate it")
        if not self._for_reading:
            self._fail(PermissionError("it may only be read here"))
        return db

    def _open(self, mode: str, *, read_only: bool) -> sqlite3.Connection:
        self._read_only = read_only
        self._disk = _connect(f"file:{quote(str(self.path.absolute()))}?{mode}")
        return self._disk

    def _version(self, db: sqlite3.Connection) -> int:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(self._migrations):
            raise StoreTooNew(
                f"{self.path}: was written by a newer canaryd (version {version} of the store, this one knows "
                f"{len(self._migrations)}); upgrade canaryd, or choose another --state-dir"
            )
        return version

    def _set_aside(self, error: Exception) -> None:
        """Rename the damaged file, its -wal and its -shm; the caller holds the open lock."""
        stamp = datetime.fromtimestamp(self._now(), tz=timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        names = (f"{DATABASE}.corrupt-{stamp}{again}" for again in ("", *(f".{n}" for n in range(2, 1000))))
        aside = next(path for path in map(self.state_dir.joinpath, names) if not path.exists())
        # Renamed before it is closed: SQLite then sees that it has moved, and neither writes to it nor drops its log.
        self.path.rename(aside)
        self._disconnect()
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
        self._lost = f"{self._now()!r} {aside}"
        self._notes[aside.name] = f"{self.path}: damaged ({error}); kept as {aside}, a fresh one was begun"

    def _disconnect(self) -> None:
        if self._disk is not None:
            self._disk.close()
        self._disk = None

    def _moved(self) -> bool:
        return _identity(self.path) != self._identity

    def _is_gone(self) -> bool:
        """Whether another file stands where this one was, or none; one that cannot be looked at may be the same."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return self._moved()

    def _may_write(self) -> bool:
        # The directory too: SQLite keeps its log beside the database.
        if self._for_reading or not os.access(self.state_dir, os.W_OK):
            return False
        return not self.path.exists() or os.access(self.path, os.W_OK)

    @property
    def _open_lock(self) -> Path:
        return Path(f"{self.path}.lock")


def use_wal(db: sqlite3.Connection) -> str:
    """Switch to write-ahead logging, so that readers never wait for a writer; return a sentence where that fails."""
    try:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError as error:
        mode = str(error)
    if mode == "wal":
        return ""
    return f"no write-ahead log here (journal mode: {mode}); nothing is lost, but readers and writers wait in turn"


def _connect(uri: str) -> sqlite3.Connection:
    # Transactions are begun and ended explicitly; one lock of ours serves all threads.
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # Rotten text must not look like a failed operation.
    return db


def _is_damage(error: sqlite3.Error) -> bool:
    # SQLITE_CORRUPT and SQLITE_NOTADB arrive as the bare class; everything that may pass arrives as a subclass.
    return type(error) is sqlite3.DatabaseError


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _used(db: sqlite3.Connection) -> int:
    """Return the bytes that the database needs; pages that can be given back are not counted."""
    pages, free, size = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


def _compact(db: sqlite3.Connection) -> None:
    # A script, because `execute` stops after the first page: the pragma returns rows without columns.
    db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)")
