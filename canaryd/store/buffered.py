"""Two equal databases as one: the file, and one in memory for what the file refuses."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import math
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from canaryd.facts import printable
from canaryd.store.clock import Clock, parse_time
from canaryd.store.database import READ_ONLY, REFUSED, Database, connect
from canaryd.store.locks import reason, refusal
from canaryd.store.migrations import Migration
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
    MET,
    NOTE,
    POLL,
    RUN,
    SUMMARY,
    VERDICT,
    add_met,
    add_verdict,
    unpack,
)

BATCH = 100
"""Runs moved to disk in one transaction, so that another process never waits long."""
RECENT = 60.0
"""Seconds before the last look for news from which on runs of another file are news (ours): clocks differ a little."""
T = TypeVar("T")

_COPIED = (
    ("devices", DEVICE, ADD_DEVICE),
    ("counters", COUNTER, ADD_COUNT),
    ("polls", POLL, ADD_POLL),
    ("events", f"{EVENT}, hour", ADD_EVENT),
    ("notes", "name, value", NOTE),
    ("baselines", BASELINE, ADD_BASELINE),
    ("acks", ACK, ADD_ACK),
    ("days", SUMMARY, ADD_SUMMARY),
)
"""Tables whose rows move from memory to disk as they are: name, columns, and the statement that adds a row."""


class BufferedDatabase:
    """Writes go to the file, or else to memory, and move to the file as soon as that works again. Reads see both.

    The tables of the store are built on this. Its methods never raise for what the disk refuses: they set `problem`.
    """

    def __init__(
        self,
        state_dir: Path,
        clocks: tuple[Callable[[], float], Callable[[], float]],
        migrations: Mapping[int, Migration],
        *,
        for_reading: bool,
    ) -> None:
        """`clocks` are the system's, in seconds since the epoch, and a monotonic one."""
        now, monotonic = clocks
        self.state_dir = state_dir
        self.problem = ""
        """One sentence while something cannot be stored, with how much waits for it; "" when all is well."""
        self.refused = ""
        """The same without what waits: a command that ends takes that with it."""
        self.unreadable = ""
        """Why the record could not be read, one sentence; "" when it could, and where there is none. Of a store for
        reading this stays: some of its answers lack what is on record."""
        self.failed_reads = 0
        """How often something on record, or that may be, could not be read."""
        self.failure = ""
        """Why, the last time, one sentence."""
        self._clock = Clock(
            now,
            monotonic,
            load=self.note_time,
            save=lambda note, at: self.set_note(note, repr(at)),
        )
        self._database = Database(state_dir, now, migrations, for_reading=for_reading, on_open=self._note_newest)
        self.path = self._database.path
        self._lock = self._database.lock
        self._problems = self._database.problems
        self._memory = connect("file::memory:")
        self.waiting = False
        """Whether something in memory waits for the disk."""
        self._own: set[str] = set()  # runs that this process has stored and `RunTables.news` has not passed yet
        self._passed: tuple[int, str] | None = None  # number and id of the newest run on disk that it has passed
        self._looked = now()  # when it looked last
        for migrate in migrations.values():
            migrate(self._memory)

    def close(self) -> None:
        """Try once more to write what waits in memory, then let go of the file."""
        with self._lock:
            try:
                self._move_to_disk()
            except REFUSED as error:
                self._fail(error)
            self._database.close()
            self._memory.close()

    @property
    def files(self) -> int:
        """How many databases were open so far; at each further one, what was read before is outdated."""
        return self._database.files

    @property
    def problems(self) -> list[str]:
        """What happened to the store since it was opened that an operator should know, one sentence each."""
        return list(self._problems.values())

    # Notes

    def note(self, name: str) -> str:
        """Return the value of a note; "" where there is none."""
        stored, waiting = self._read("SELECT value FROM notes WHERE name = ?", name)
        return str(([*stored, *waiting] or [("",)])[-1][0])

    def parsed_note(self, name: str, parse: Callable[[str], T], absent: T) -> T:
        """Return what `parse` makes of a note; `absent` where there is none, or one that rotted, with a problem.

        `parse` raises `LookupError`, `TypeError` or `ValueError` for a text that no canaryd wrote.
        """
        text = self.note(name)
        try:
            found = parse(text) if text else absent
        except (LookupError, TypeError, ValueError, RecursionError):
            self._problems[f"note {name}"] = printable(
                f'{self.path}: the note "{name}" is damaged and counts as absent: {text!r:.100}'
            )
            return absent
        self._problems.pop(f"note {name}", None)
        return found

    def note_time(self, name: str) -> float:
        """Return the time that a note holds, in seconds since the epoch; 0.0 where there is none."""
        return self.parsed_note(name, parse_time, 0.0)

    def set_note(self, name: str, value: str) -> bool:
        """Set the value of a note. False: only in memory so far."""
        return self._write(lambda db: db.execute(NOTE, (name, value)))

    # For the tables

    def _write(self, write: Callable[[sqlite3.Connection], Any]) -> bool:
        """Do `write` on disk, after all that waits in memory; where the disk refuses, in memory."""
        with self._lock:
            if self._database.for_reading:
                write(self._memory)
                return False
            try:
                self._move_to_disk()
                self._commit(write)
            except REFUSED as error:
                write(self._memory)
                self.waiting = True
                self._fail(error)
                return False
            self.problem = self.refused = ""
            return True

    def _read(self, query: str, *args: Any) -> tuple[list[Any], list[Any]]:
        """Return the rows on disk (none, with a `problem`, where they cannot be read) and the rows in memory."""
        with self._lock:
            try:
                stored = self._database.attempt(lambda db: db.execute(query, args).fetchall())
                self._check_writable()
                if not self._database.for_reading:
                    self.unreadable = ""
            except REFUSED as error:
                self._fail_to_read(error)
                stored = []
            return stored, self._memory.execute(query, args).fetchall()

    def _decode(self, kind: type[T], rows: Iterable[tuple[str, bytes]]) -> list[T]:
        """Rebuild objects from (name, packed body); skip a damaged one, with a problem."""
        found = []
        for name, body in rows:
            try:
                found.append(unpack(kind, body))
            except (ValueError, TypeError, RecursionError, zlib.error) as error:
                self._problems["damaged"] = printable(
                    f"{self.path}: skipped the unreadable {kind.__name__} {name}: {error!s:.300}"
                )
        return found

    def _open(self) -> None:
        """Open the file; raises `REFUSED`."""
        self._database.connect()
        self._check_writable()

    def _commit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Do `write` on disk, in one transaction; raises `REFUSED`."""
        return self._database.commit(write)

    def _fail(self, error: Exception) -> None:
        (runs,) = self._memory.execute("SELECT count(*) FROM runs").fetchone()
        self.refused = f"{self.path}: {reason(self.path, error)}"
        self.problem = f"{self.refused}; runs waiting in memory: {runs}"

    def _fail_to_read(self, error: Exception) -> None:
        missing, why = isinstance(error, FileNotFoundError), refusal(self.path, error)
        if self._passed is not None or (not missing and _may_exist(self.path)):
            self.failed_reads, self.failure = self.failed_reads + 1, why
        if not missing:
            self.unreadable = why
        if not self._database.for_reading:
            self._fail(error)
        elif not missing:
            self.problem = self.unreadable

    def _check_writable(self) -> None:
        if self._database.read_only and not self._database.for_reading and not self.problem:
            self._fail(PermissionError(READ_ONLY))

    def _note_newest(self, db: sqlite3.Connection) -> None:
        # To SQLite every text and blob is above every number: a time that rotted to one is no time.
        (newest,) = db.execute("SELECT max(stored) FROM runs WHERE stored < 9e999").fetchone()
        self._clock.saw(newest or 0.0)
        before = math.inf
        if self._passed is not None:
            if db.execute("SELECT 1 FROM runs WHERE number = ? AND id = ?", self._passed).fetchone():
                return  # the file is the one that was open before
            before = self._looked - RECENT
        last = "SELECT number, id FROM runs WHERE stored < ? ORDER BY number DESC LIMIT 1"
        self._passed = db.execute(last, (before,)).fetchone() or (0, "")

    def _move_to_disk(self) -> None:
        memory = self._memory
        while self.waiting:
            runs = memory.execute(f"SELECT number, {RUN} FROM runs ORDER BY number LIMIT {BATCH}").fetchall()
            verdicts = memory.execute(f"SELECT {VERDICT} FROM verdicts ORDER BY number").fetchall()
            met = memory.execute(f"SELECT {MET} FROM met").fetchall()
            others = [
                (add, memory.execute(f"SELECT {columns} FROM {table} ORDER BY rowid").fetchall())
                for table, columns, add in _COPIED
            ]

            def write(db: sqlite3.Connection) -> None:
                db.executemany(ADD_RUN, [row[1:] for row in runs])  # noqa: B023 - called before the next turn
                for add, rows in others:  # noqa: B023
                    db.executemany(add, rows)
                for verdict in verdicts:  # noqa: B023
                    add_verdict(db, verdict)
                add_met(db, met)  # noqa: B023

            self._commit(write)
            self._own.update(row[1] for row in runs)
            memory.execute("DELETE FROM runs WHERE number <= ?", (runs[-1][0] if runs else 0,))
            for table in ("verdicts", "met", *(name for name, _, _ in _COPIED)):
                memory.execute(f"DELETE FROM {table}")
            self.waiting = len(runs) == BATCH


def _may_exist(path: Path) -> bool:
    """Return whether a file exists, or nobody can say: its directory may be out of reach."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
