"""What canaryd remembers: runs, baselines, polls, events, devices, verdicts, acks, counters, in one SQLite file.

Each write is one short transaction. A write that the disk refuses goes to an equal database in memory instead, which
is part of every answer and moves to disk as soon as that works again. So a full disk, a read-only directory or a
damaged file costs durability for a while, says so in `Store.problem`, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from canaryd.files import allowed, owners_rights
from canaryd.store.clock import STEP, parse_time
from canaryd.store.database import LOST_NOTE, REFUSED, StoreTooNew
from canaryd.store.devices import DeviceTables
from canaryd.store.locks import Busy, Unreadable, flock, is_held, refusal
from canaryd.store.migrations import MIGRATIONS, Migration
from canaryd.store.retention import DEFAULT, Retention, prune
from canaryd.store.runs import RunTables
from canaryd.store.telemetry import TelemetryTables


class Store(RunTables, TelemetryTables, DeviceTables):
    """The memory of the daemon and of every command beside it. Safe to use from several threads and processes."""

    def __init__(
        self,
        state_dir: Path,
        clocks: tuple[Callable[[], float], Callable[[], float]],
        max_bytes: int,
        keep: Retention,
        migrations: Mapping[int, Migration],
        for_reading: bool = False,
    ) -> None:
        super().__init__(state_dir, clocks, migrations, for_reading=for_reading)
        self.max_bytes = max_bytes
        self.keep = keep
        self._version: object = None

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        max_bytes: int = 256 * 1024 * 1024,
        keep: Retention = DEFAULT,
        migrations: Mapping[int, Migration] = MIGRATIONS,
        for_reading: bool = False,
    ) -> Store:
        """Open or create the store in `state_dir`; `now` is the clock, in seconds since the epoch.

        `monotonic`: the clock that nobody sets.

        `for_reading`: open read-only; never create, repair, migrate or rename a file. What is written stays in memory,
        and where there never was a record, it is an empty one: neither is a problem.

        Raises `StoreTooNew` and nothing else: a damaged database is set aside (see `problems`), and where nothing can
        be stored, the store works from memory and `problem` says why.
        """
        store = cls(state_dir, (now, monotonic), max_bytes, keep, migrations, for_reading)
        try:
            store._open()
        except StoreTooNew:
            store.close()
            raise
        except (OSError, sqlite3.Error) as error:
            store._fail_to_read(error)
        return store

    def __enter__(self) -> Store:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lost(self) -> tuple[float, str] | None:
        """When a database was lost last, in seconds since the epoch, and what is left of it; None for never."""
        return self.parsed_note(LOST_NOTE, _parse_loss, None)

    @property
    def reached(self) -> float:
        """A time that has come for certain, in seconds since the epoch, however wrong the clock was; 0.0 at first."""
        return self._clock.confirmed

    def certain(self, now: float) -> float:
        """Return `now`, or less if the clock is far ahead of the last confirmed time.

        A wrong clock must not end a waiting period, nor an acknowledgement.
        """
        confirmed = self.reached
        return min(now, confirmed + STEP) if confirmed else now

    def written_elsewhere(self) -> object:
        """Return a value that changes whenever another connection has written; None where it is unknown."""
        with self._lock:
            try:
                return self._database.version()
            except REFUSED as error:
                self._fail(error)
                return None

    def changed_elsewhere(self) -> bool:
        """Return whether another connection has written since the last call; True the first time."""
        with self._lock:
            before, self._version = self._version, self.written_elsewhere()
            return self._version is None or before != self._version

    def prune(self, now: float) -> None:
        """Delete what is older than `keep` allows, then the oldest until the file is below `max_bytes`.

        `now` is in seconds since the epoch. Never raises: `problem` says what went wrong.
        """
        try:
            prune(self._database, self.keep, self.max_bytes, self._clock.advance(now))
        except REFUSED as error:
            self._fail(error)

    @contextlib.contextmanager
    def lock(
        self,
        device_uuid: str,
        timeout: float = 0,
        on_wait: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        doing: str = "",
    ) -> Iterator[None]:
        """Hold a device alone among all processes that share the state directory; tell them what for (`doing`).

        Waits up to `timeout` seconds, or until `stopped`; `on_wait` is called once with the holder's name and what it
        is doing. Raises `Busy`, which names the holder. The kernel releases the lock of a process that dies. Where lock
        files cannot exist, the device is used unlocked and `problems` says so.
        """
        name = _lock_file(device_uuid)
        with contextlib.ExitStack() as held:
            try:
                if not self._database.for_reading or (self.state_dir / name).exists():
                    held.enter_context(flock(self.state_dir, name, timeout, on_wait, stopped, doing))
            except Busy:
                raise
            except OSError as error:
                self._problems["lock"] = (
                    f"{self.state_dir / name}: no lock ({error}); another canaryd may use the device meanwhile"
                )
            yield

    def is_locked(self, device_uuid: str) -> bool:
        """Return whether a process holds a device's lock; raises `Unreadable` where this user may not know it."""
        try:
            with owners_rights(self.state_dir):
                return is_held(self.state_dir / _lock_file(device_uuid))
        except OSError as error:
            raise Unreadable(refusal(self.path, error)) from error

    def may_lock(self, device_uuid: str) -> bool:
        """Return whether this user may take a device's lock."""
        path = self.state_dir / _lock_file(device_uuid)
        with owners_rights(self.state_dir):
            return allowed(path, os.R_OK) if path.exists() else allowed(path.parent, os.W_OK)


def _lock_file(device_uuid: str) -> str:
    return f"locks/{quote(device_uuid, safe='')}.lock"


def _parse_loss(text: str) -> tuple[float, str] | None:
    at, _, aside = text.partition(" ")
    return parse_time(at), aside
