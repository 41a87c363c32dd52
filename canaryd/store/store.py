"""The records of canaryd in one SQLite file: runs, baselines, polls, events, devices, verdicts, acks, counters.

Each write is one short transaction. While the disk refuses writes, the store works on a copy in memory, and its new
rows move to disk as soon as the disk works again. A full disk, a read-only directory or a damaged file thus only costs
durability for a while, and `Store.problem` says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from canaryd.files import allowed, owners_rights
from canaryd.formatting import DAY
from canaryd.judge.clock import EPOCH
from canaryd.model import Run
from canaryd.store.database import LOST_NOTE, PASSED_NOTE, REFUSED
from canaryd.store.devices import DeviceTables
from canaryd.store.locks import Busy, Unreadable, flock, is_held, refusal
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.retention import DEFAULT, Retention, prune
from canaryd.store.rows import HOUR, parse_time
from canaryd.store.runs import RunTables
from canaryd.store.telemetry import TelemetryTables

STEP = 2 * HOUR
"""Maximum seconds by which one prune moves `Store.passed` forward: twice the hour between the daemon's prunes. A
clock that is wrong for an hour thus ages the records by at most two hours (ours)."""
DRILLS = f"drills.{max(MIGRATIONS)}.db"
"""Name of the file of drills (runs with an injected fault) in the state directory. Another version of the schema has
another file, so that none is ever converted: drills are not worth it."""
DRILL_EXPIRY = 3600.0
"""Seconds for which a drill is shown, and its alert stands (ours): a drill lasts minutes."""
BELIEVED = 24
"""Number of successive prunes that must find the clock a day behind `Store.passed` before the clock is trusted
(ours)."""


class Store(RunTables, TelemetryTables, DeviceTables):
    """The records of the daemon and of every command beside it. Safe to use from several threads and processes."""

    max_bytes = 256 * 1024 * 1024
    keep = DEFAULT
    _drills: Store | None = None
    _behind = 0
    """Number of successive prunes that found the clock a day behind `passed`."""

    @classmethod
    def open(
        cls,
        state_dir: Path,
        *,
        now: Callable[[], float] = time.time,
        max_bytes: int = max_bytes,
        keep: Retention = DEFAULT,
        for_reading: bool = False,
    ) -> Store:
        """Open or create the store in `state_dir`; `now` is the clock, in seconds since the epoch.

        `for_reading` opens it read-only: no file is ever created, repaired, migrated or renamed. New rows stay in
        memory, and a store that does not exist is empty; neither is reported as a problem.

        Raises only `StoreTooNew`. A damaged database is renamed (see `problems`). If nothing can be stored, the store
        works from memory and `problem` says why.
        """
        store = cls(state_dir, now, for_reading=for_reading)
        store.max_bytes, store.keep = max_bytes, keep
        store.begin()
        return store

    def __enter__(self) -> Store:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Try once more to write the rows that wait in memory, then close the files."""
        if self._drills is not None:
            self._drills.close()
        super().close()

    @property
    def drills(self) -> Store:
        """The runs with an injected fault of the last day, in a file of their own: nothing here leaves them out."""
        with self._lock:
            if self._drills is None:
                self._drills = Store(self.state_dir, self._now, for_reading=self.for_reading, name=DRILLS)
                self._drills.keep = Retention(successes=DAY, failures=DAY)
                self._drills.begin()
            return self._drills

    def drilled(self, now: float) -> dict[str, list[Run]]:
        """Return device uuid → its runs with an injected fault in the hour before `now` (epoch s), oldest first."""
        found: dict[str, list[Run]] = {}
        for run in sorted(self.drills.runs(since=now - DRILL_EXPIRY), key=lambda r: r.started):
            if abs(now - run.started) <= DRILL_EXPIRY:
                found.setdefault(run.device, []).append(run)
        return found

    @property
    def lost(self) -> tuple[float, str] | None:
        """Time (epoch s) of the last loss of a database and what is left of it, or None if none was ever lost."""
        return self.parsed_note(LOST_NOTE, _parse_loss, None)

    def prune(self, now: float) -> None:
        """Delete records older than `keep` allows, then the oldest ones until the file is below `max_bytes`.

        `now` is in seconds since the epoch. Never raises: `problem` says what went wrong.
        """
        try:
            prune(self, self.keep, self.max_bytes, self._advance(now))
        except REFUSED as error:
            self._refuse(error)
        if self._drills is not None:
            self._drills.prune(now)

    def _advance(self, now: float) -> float:
        """Move `passed` towards the clock's time `now`; return `passed` (epoch s), by which pruning measures ages.

        `passed` moves back only after the clock was behind it for a day. After an outage, records are thus kept longer.
        """
        before = self.passed or now
        if before < EPOCH:
            return before
        self._behind = self._behind + 1 if EPOCH <= now < before - DAY else 0
        after = now if self._behind > BELIEVED else max(before, min(now, before + STEP))
        self.set_note(PASSED_NOTE, repr(after))
        return after

    @contextlib.contextmanager
    def lock(
        self,
        device_uuid: str,
        timeout: float = 0,
        on_wait: Callable[[str], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        doing: str = "",
    ) -> Iterator[None]:
        """Hold a device's lock among all processes that share the state directory; others see the text `doing`.

        Waits up to `timeout` seconds, or until `stopped`. `on_wait` is called once with the holder's name and what the
        holder is doing. Raises `Busy`, which names the holder. The kernel releases the lock of a process that dies. If
        lock files cannot exist, the device is used without a lock and `problems` says so.
        """
        name = _lock_file(device_uuid)
        with contextlib.ExitStack() as held:
            try:
                if not self.for_reading or (self.state_dir / name).exists():
                    held.enter_context(flock(self.state_dir, name, timeout, on_wait, stopped, doing))
            except Busy:
                raise
            except OSError as error:
                self.said["lock"] = (
                    f"{self.state_dir / name}: no lock ({error}); another canaryd may use the device meanwhile"
                )
            yield

    def is_locked(self, device_uuid: str) -> bool:
        """Return whether a process holds a device's lock; raise `Unreadable` if this user has no right to see it."""
        try:
            with owners_rights(self.state_dir):
                return is_held(self.state_dir / _lock_file(device_uuid))
        except OSError as error:
            raise Unreadable(refusal(self.path, error)) from error

    def may_lock(self, device_uuid: str) -> bool:
        """Return whether this user has the right to take a device's lock."""
        path = self.state_dir / _lock_file(device_uuid)
        with owners_rights(self.state_dir):
            return allowed(path, os.R_OK) if path.exists() else allowed(path.parent, os.W_OK)


def _lock_file(device_uuid: str) -> str:
    return f"locks/{quote(device_uuid, safe='')}.lock"


def _parse_loss(text: str) -> tuple[float, str] | None:
    at, _, aside = text.partition(" ")
    return parse_time(at), aside
