"""The database: one SQLite file, and a copy of it in memory while the file cannot be written.

One connection serves all queries at a time: to the file, or to the copy. Rows that cannot be written to the file go to
the copy and to a third, small database (`_waiting`). They move to the file as soon as it can be written again.
"""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from canaryd.facts import printable
from canaryd.files import NOT_PLAIN, allowed, owners_rights
from canaryd.formatting import DAY
from canaryd.judge.clock import EPOCH
from canaryd.store.locks import flock, make, reason, refusal
from canaryd.store.migrations import MIGRATIONS, migrate
from canaryd.store.rows import ADD_RUN, COPIED, MET, NOTE, RUN, VERDICT, add_met, add_verdict, parse_time, unpack

DATABASE = "canaryd.db"
"""Name of the database in the state directory."""
BUSY_TIMEOUT = 5.0
"""Seconds that a statement waits for the end of another process's transaction."""
CACHE = 512
"""KiB of the database that SQLite caches, a quarter of its default (ours): the operating system caches pages anyway."""
OPEN_TIMEOUT = 10.0
"""Seconds to wait while another process creates, checks or migrates the database."""
BATCH = 100
"""Number of runs that move to disk in one transaction, so that another process never waits long."""
LOST_NOTE = "history lost"
"""Name of the note about the last loss of a database. Its text is "seconds path": the time (epoch s), and the path of
what is left."""
PASSED_NOTE = "aged"
"""Name of the note with the latest time known to be past (epoch s); see `Database.passed`."""
LOGS = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database. SQLite would use those of a lost database for a new
one."""
READ_ONLY = "it can only be read here; run as its owner, or choose another --state-dir"
WAL = b"\2\2"
"""Bytes 18 and 19 of a database file that has a write-ahead log (sqlite.org/fileformat.html)."""
T = TypeVar("T")


class StoreTooNew(RuntimeError):
    """A newer canaryd wrote the database; the file is left unchanged."""


class _Replaced(OSError):
    """Another file replaced the database file during a write."""


REFUSED = (OSError, sqlite3.Error, StoreTooNew)
"""Errors that the disk, the file or another process can cause; any other error is a mistake in canaryd."""


class Database:
    """The database in a state directory; the tables of the store are built on it. Reads and writes never raise."""

    def __init__(self, state_dir: Path, now: Callable[[], float], *, for_reading: bool, name: str = DATABASE) -> None:
        """Open nothing yet; `now` is the clock in seconds since the epoch, `name` that of the file."""
        self.state_dir = state_dir
        self.path = state_dir / name
        self._open_lock = f"{name}.lock"  # held while the file is opened, created, migrated or renamed
        self._log = Path(f"{self.path}-wal")
        self.for_reading = for_reading
        """Open read-only: never create, repair, migrate or lock. What is written stays in memory."""
        self.problem = ""
        """One sentence while something cannot be stored, with how much waits for it; "" when all is well."""
        self.refused = ""
        """The same without what waits: a command that ends takes that with it."""
        self.unreadable = ""
        """Why the record cannot be read, one sentence; "" when it can, and where there is none. Meanwhile answers lack
        what is on record. Of a store for reading this stays."""
        self.said: dict[str, str] = {}
        """What happened since the store was opened that an operator should know, one sentence each, by its subject."""
        self.generation = 0
        """How many databases were open so far; at each further one, what was read before is outdated."""
        self._now = now
        self._lock = threading.RLock()  # one thread at a time uses the connections
        self._file: sqlite3.Connection | None = None
        self._read_only = False
        self._resting = False  # opened while no other process had it open
        self._identity: tuple[int, int] | None = None  # of the file that was opened last
        self._replaced = False  # another file took its place since
        self._opened = 0
        self._copy: sqlite3.Connection | None = None
        self._copied: object = None  # `_version()` at that time
        self._waiting: sqlite3.Connection | None = None
        self._dropped: Counter[str] = Counter()
        self._loss = ""  # what the new file's `LOST_NOTE` will say
        # Locks are taken only beside a record, and outlive it. Looked for once: later ones may be this process's own.
        self._ran_before = name == DATABASE and _has_locks(state_dir)

    def begin(self) -> None:
        """Open the file. Raises only `StoreTooNew`."""
        try:
            self._attempt(self._settle)
        except StoreTooNew:
            self._close_file()
            raise
        except (OSError, sqlite3.Error) as error:
            self._fail(error)

    def close(self) -> None:
        """Try once more to write the rows that wait in memory, then close the file."""
        with self._lock:
            if self._waiting is not None:
                try:
                    self._attempt(self._settle)
                except REFUSED as error:
                    self._refuse(error)
            self._close_file()

    @property
    def waiting(self) -> bool:
        """Whether rows in memory wait for the disk."""
        return self._waiting is not None

    @property
    def problems(self) -> list[str]:
        """Problems of the store since it was opened that an operator should know, one sentence each."""
        return list(self.said.values())

    def changes(self) -> object:
        """Return a value that changes whenever another process has written, or another database file is in use.

        Checks whether the file was removed or replaced, and tries again to write the waiting rows. Never raises.
        """
        with self._lock:
            if not (self.for_reading and self._copy is not None):
                try:
                    self._attempt(self._settle)
                    self.problem = self.refused = ""
                except REFUSED as error:
                    self._fail(error)
            version = self._version()
            if self._waiting is not None and self._file is not None and version != self._copied:
                self._make_copy()
            # SQLite counts for each connection from the start.
            return self.generation, self._opened, version

    # For the tables

    def _read(self, query: str, *args: Any) -> list[Any]:
        """Return the rows of a query. If the file cannot be read, return the rows in memory and set `problem`."""
        with self._lock:
            try:
                return self._attempt(lambda db: db.execute(query, args).fetchall(), reads=True)
            except REFUSED as error:
                return self._lose(error).execute(query, args).fetchall()

    def _write(self, write: Callable[[sqlite3.Connection], object]) -> bool:
        """Execute `write` in one transaction. Return False if its rows are only in memory; `problem` says why."""
        with self._lock:
            why: Exception | None = None
            try:
                if not self.for_reading:
                    self.commit(write)
                    self.problem = self.refused = ""
                    return True
            except REFUSED as error:
                why = error
            try:
                write(self._copy or self._make_copy())
            except sqlite3.Error as error:  # the name of a column has rotted
                write(self._lose(error))
            if why is not None:
                self._waiting = self._waiting or _memory()
                write(self._waiting)
                self._refuse(why)
            return False

    def _forget(self, table: str, order: str, most: int) -> bool:
        """Drop the oldest waiting rows of a table, sorted by `order`, until at most `most` are left; return False."""
        with self._lock:
            if self._waiting is not None and self._copy is not None:
                (count,) = self._waiting.execute(f"SELECT count(*) FROM {table}").fetchone()
                first = f"SELECT id FROM {table} ORDER BY {order} LIMIT {max(0, count - most)}"
                if ids := self._waiting.execute(first).fetchall():
                    for db in (self._waiting, self._copy):
                        db.executemany(f"DELETE FROM {table} WHERE id = ?", ids)
                    self._dropped[table] += len(ids)
                    self.said[f"dropped {table}"] = (
                        f"{self.path}: cannot be written, and memory holds {most} {table} at most: "
                        f"{self._dropped[table]} older ones were dropped"
                    )
            return False

    def _decode(self, kind: type[T], rows: Iterable[tuple[str, bytes]]) -> list[T]:
        """Return the objects in `rows` of (name, packed object). Damaged rows are skipped; `problems` reports them."""
        found = []
        for name, body in rows:
            try:
                found.append(unpack(kind, body))
            except (ValueError, TypeError, RecursionError, zlib.error) as error:
                self.said["damaged"] = printable(
                    f"{self.path}: skipped the unreadable {kind.__name__} {name}: {error!s:.300}"
                )
        return found

    # Notes

    def note(self, name: str) -> str:
        """Return the value of a note, or "" if there is no such note."""
        rows = self._read("SELECT value FROM notes WHERE name = ?", name)
        return str(rows[0][0]) if rows else ""

    def parsed_note(self, name: str, parse: Callable[[str], T], absent: T) -> T:
        """Return the result of `parse` for a note's text, or `absent` if there is no note or its text is damaged.

        Damage is also reported as a problem. `parse` raises `LookupError`, `TypeError` or `ValueError` for a damaged
        text.
        """
        text = self.note(name)
        try:
            found = parse(text) if text else absent
        except (LookupError, TypeError, ValueError, RecursionError):
            self.said[f"note {name}"] = printable(
                f'{self.path}: the note "{name}" is damaged and counts as absent: {text!r:.100}'
            )
            return absent
        self.said.pop(f"note {name}", None)
        return found

    def note_time(self, name: str) -> float:
        """Return the time (epoch s) in a note, or 0.0 if there is no such note."""
        return self.parsed_note(name, parse_time, 0.0)

    def set_note(self, name: str, value: str) -> bool:
        """Set the value of a note. Return False if it is only in memory so far."""
        return self._write(lambda db: db.execute(NOTE, (name, value)))

    @property
    def passed(self) -> float:
        """Latest time known to be past (epoch s), even if the clock shows an earlier time; 0.0 if none is known yet."""
        return self.note_time(PASSED_NOTE)

    def date(self, at: float) -> float:
        """Return `at`, or the time of storing if `at` is more than a day before `passed` (all in epoch s)."""
        return at if at >= self.passed - DAY else self._stamp()

    def _stamp(self) -> float:
        """Return the time of storing (epoch s): the time of the clock, or `passed` if that is later."""
        return max(self._now(), self.passed)

    # The file

    def commit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Write the waiting rows to disk, then do `write` in one transaction; return its result, or raise `REFUSED`."""

        def work(db: sqlite3.Connection) -> T:
            self._settle(db)
            return self._transact(db, write)

        with self._lock:
            return self._attempt(work)

    def look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work` on the file, outside of a transaction; raise `REFUSED` on failure."""
        with self._lock:
            return self._attempt(work)

    def _attempt(self, work: Callable[[sqlite3.Connection], T], *, reads: bool = False) -> T:
        """Return the result of `work`. If the file is damaged or was replaced, open the new file and try once more.

        Work that only `reads` uses the copy in memory if there is one, and does not check whether the file was
        replaced.
        """
        with owners_rights(self.state_dir):
            for again in (True, False):
                try:
                    with _rotten_text():
                        return work((reads and again and (self._copy or self._file)) or self._connect())
                except _Replaced:
                    if not again:
                        raise
                except sqlite3.DatabaseError as error:
                    if not again or self._read_only or not _is_damage(error):
                        raise
                    with flock(self.state_dir, self._open_lock, OPEN_TIMEOUT):
                        if not self._is_moved():
                            self._set_aside(f"damaged ({error})")
        raise AssertionError

    def _settle(self, db: sqlite3.Connection) -> None:
        """Move the rows that wait in memory to disk, and drop the copy of the file in memory."""
        if self.for_reading:
            return
        if self._read_only:
            raise PermissionError(READ_ONLY)
        while (waiting := self._waiting) is not None:
            last = self._transact(db, lambda db: _pour(waiting, db, BATCH))
            waiting.execute("DELETE FROM runs WHERE number <= ?", (last,))
            for table in ("verdicts", "met", *COPIED):
                waiting.execute(f"DELETE FROM {table}")
            if not waiting.execute("SELECT 1 FROM runs LIMIT 1").fetchone():
                self._waiting = None
        self._copy = None

    def _transact(self, db: sqlite3.Connection, write: Callable[[sqlite3.Connection], T]) -> T:
        db.execute("BEGIN IMMEDIATE")
        try:
            self._check_version(db)
            result = write(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        try:
            moved = self._is_moved()
        except OSError:
            moved = False
        if moved:
            raise _Replaced("another file took its place during the write")
        return result

    def _fail(self, error: Exception) -> None:
        """Record that the file cannot be opened, written or checked."""
        if self._file is None and self._copy is None:
            self._lose(error)
        elif not self.for_reading:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """Set `refused` and `problem`: rows wait in memory because of `error`."""
        (runs,) = self._waiting.execute("SELECT count(*) FROM runs").fetchone() if self._waiting else (0,)
        self.refused = f"{self.path}: {reason(self.path, error)}"
        self.problem = f"{self.refused}; runs waiting in memory: {runs}"

    def _lose(self, error: Exception) -> sqlite3.Connection:
        """Record that the file cannot be read; return a database in memory with only the waiting rows."""
        self._close_file()
        lost = _exists(self.path) or bool(self._why_missing())
        if lost or (self.for_reading and not isinstance(error, FileNotFoundError)):
            self.unreadable = self.problem = refusal(self.path, error)
        if not self.for_reading:
            self._refuse(error)
        return self._make_copy()

    def _make_copy(self) -> sqlite3.Connection:
        """Copy the file and the waiting rows into memory; the copy serves all reads and writes from now on."""
        self._copied, copy = self._version(), _memory()
        if self._file is not None:
            try:
                with owners_rights(self.state_dir):
                    self._file.backup(copy)
            except REFUSED as error:
                return self._lose(error)
        if self._waiting is not None:
            _pour(self._waiting, copy, -1)
        self._copy = copy
        return copy

    def _version(self) -> object:
        """Return a value that changes when another connection writes to the file, or None if it is unknown."""
        with contextlib.suppress(*REFUSED), owners_rights(self.state_dir):
            if self._file is not None:
                return self._file.execute("PRAGMA data_version").fetchone()
        return None

    # Opening it

    def _on_open(self, db: sqlite3.Connection) -> None:
        """Prepare the tables after another file was opened. Subclasses override this; here it does nothing."""

    def _connect(self) -> sqlite3.Connection:
        """Return the connection to the file; open it if it is closed, replaced, or now writable."""
        if self._file is not None:
            moved = self._is_moved()
            self._replaced |= moved
            if moved or (self._read_only and (self._may_write() or (self._resting and self._log.exists()))):
                self._close_file()
        if self._file is not None:
            return self._file
        before = self._identity
        try:
            if not self.for_reading:
                self.state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            with owners_rights(self.state_dir), _rotten_text():
                db = self._open_as_allowed()
                if self._identity != before or self._replaced:
                    self._on_open(db)
                    self.generation += 1
        except BaseException:
            self._identity = before
            self._close_file()
            raise
        self._opened, self._replaced = self._opened + 1, False
        if not self.for_reading:
            self.unreadable = ""
        return db

    def _close_file(self) -> None:
        connection, self._file = self._file, None
        if connection is not None:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):
                    stack.enter_context(owners_rights(self.state_dir))
                connection.close()

    def _open_as_allowed(self) -> sqlite3.Connection:
        for suffix in ("", *LOGS):
            _expect_file(Path(f"{self.path}{suffix}"))
        if self._may_write():
            try:
                with flock(self.state_dir, self._open_lock, OPEN_TIMEOUT):
                    return self._open_to_write()
            except OSError as error:
                # After an error of its own ext4 refuses every write, while access(2) still promises them.
                if error.errno != errno.EROFS:
                    raise
        self._read_only = True
        if why := self._why_missing():
            raise OSError(f"it {why}; restore a backup, or begin a new record: canaryd check")
        # SQLite would make a log beside a database that nobody has open, only to read it.
        self._resting = _is_resting(self.path)
        return self._open_to_read("mode=ro&immutable=1" if self._resting else "mode=ro")

    def _open_to_write(self) -> sqlite3.Connection:
        """Open the file and return the connection; create the file if it is missing or unusable.

        The caller holds the open lock.
        """
        try:
            if self.path.exists():
                with _rotten_text():
                    return self._open_and_migrate()
            why = self._why_missing()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            why = f"damaged ({error})"
        if why:
            self._set_aside(why)
        self._create()
        return self._open_and_migrate()

    def _open_and_migrate(self) -> sqlite3.Connection:
        if self.path.stat().st_size == 0:
            raise sqlite3.DatabaseError("it is empty")
        before = self._identity
        db = self._open("mode=rw", read_only=False)
        version = self._check_version(db)
        if 0 < version < min(MIGRATIONS):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._set_aside("canaryd 0.1.0 wrote it, and its records are not converted", f"version-{version}")
            self._create()
            return self._open_and_migrate()
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok" or not version:
            raise sqlite3.DatabaseError(verdict if version else "it has no tables")
        with contextlib.suppress(sqlite3.OperationalError):  # some file systems have none; readers then wait in turn
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{CACHE}")
        if version < max(MIGRATIONS):
            _keep(db, _kept(self.path, version))
            self._transact(db, lambda db: migrate(db, version))
        # The process that replaced a lost file has noted the loss already.
        replaced = self._replaced or before not in (None, self._identity)
        if replaced and not db.execute("SELECT 1 FROM notes WHERE name = ?", (LOST_NOTE,)).fetchone():
            self._note_loss("was replaced while it was in use", "continuing with the new file")
            self._transact(db, lambda db: db.execute(NOTE, (LOST_NOTE, self._loss)))
        self._loss = ""
        return db

    def _create(self) -> None:
        """Create a complete new file and only then rename it into place, so that an empty file always means damage."""
        new = Path(f"{self.path}.new")
        with contextlib.closing(_new(new)) as db:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("BEGIN")
            migrate(db, 0)
            if (now := self._now()) >= EPOCH:
                db.execute(NOTE, (PASSED_NOTE, repr(now)))
            if self._loss:
                db.execute(NOTE, (LOST_NOTE, self._loss))
            db.execute("COMMIT")
        new.replace(self.path)

    def _open_to_read(self, mode: str) -> sqlite3.Connection:
        db = self._open(mode, read_only=True)
        try:
            version = self._check_version(db)
        except sqlite3.OperationalError as error:
            # In WAL mode even a reader needs the -shm file. Where it is missing and cannot be made, nobody is writing
            # either, and SQLite may take the file as it stands. Not so where another process has locked it.
            if mode != "mode=ro" or "locked" in str(error):
                raise
            self._close_file()
            return self._open_to_read("mode=ro&immutable=1")
        if version < max(MIGRATIONS):
            then = "start the daemon or run canaryd check, which keeps it aside" if self.for_reading else READ_ONLY
            raise OSError(f"an older canaryd wrote it: {then}")
        return db

    def _open(self, mode: str, *, read_only: bool) -> sqlite3.Connection:
        self._read_only = read_only
        self._file = db = connect(f"{_uri(self.path)}?{mode}")
        there = self.path.stat()
        self._identity = there.st_dev, there.st_ino
        if not allowed(Path(os.environ.get("TMPDIR", "/")), os.X_OK):  # root's own may be closed to the owner
            db.execute("PRAGMA temp_store = MEMORY")
        return db

    def _check_version(self, db: sqlite3.Connection) -> int:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        known = max(MIGRATIONS)
        if version > known:
            kept = _kept(self.path, known)
            back = f"; {kept} is a copy from before the conversion (docs/install.md: how to go back)"
            raise StoreTooNew(
                f"{self.path}: was written by a newer canaryd (version {version} of the store, this one knows {known});"
                f" upgrade canaryd, or choose another --state-dir{back if kept.exists() else ''}"
            )
        return version

    def _set_aside(self, why: str, name: str = "") -> None:
        """Rename the files that are left of an unusable or missing database; the caller holds the open lock.

        `why`: the reason, for messages. `name`: part of the new names (default: "corrupt" and the time).
        """
        stamp = datetime.fromtimestamp(self._now(), tz=timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        base = f"{self.path.name}.{name or f'corrupt-{stamp}'}"
        names = (f"{base}{again}" for again in ("", *(f".{n}" for n in range(2, 1000))))
        aside = next(self.state_dir / name for name in names if not any(self.state_dir.glob(f"{name}*")))
        kept = []
        for suffix in ("", *LOGS):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
                kept.append(f"{aside}{suffix}")
            # Closed when it is renamed: SQLite then sees that it has moved, and neither writes to it nor drops its log.
            self._close_file()
        self._replaced = True
        if kept:
            self._loss = f"{self._now()!r} {kept[0]}"
            self.said[aside.name] = f"{self.path}: {why}; kept as {kept[0]}; started a new, empty database"
        else:
            self._note_loss(why, "started a new, empty database")

    def _note_loss(self, what: str, then: str) -> None:
        self._loss = f"{self._now()!r} nothing: {self.path} {what}"
        self.said["gone"] = f"{self.path}: {what}; {then}"

    # The file at its path

    def _is_moved(self) -> bool:
        """Return whether the file was removed or replaced; raise `OSError` if this cannot be checked."""
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True
        return (there.st_dev, there.st_ino) != self._identity

    def _why_missing(self) -> str:
        """Return why the database file must have existed before, or "" if it exists or never did."""
        if _exists(self.path):
            return ""
        if self._identity is not None:
            return "was removed while it was in use"
        before = self._ran_before or any(Path(f"{self.path}{log}").exists() for log in LOGS)
        return "is missing, although canaryd ran here before" if before else ""

    def _may_write(self) -> bool:
        # The directory too: SQLite keeps its log beside the database.
        if self.for_reading or not allowed(self.state_dir, os.W_OK):
            return False
        return not self.path.exists() or allowed(self.path, os.W_OK)


def connect(uri: str) -> sqlite3.Connection:
    """Return a new SQLite connection with explicit transactions, for threads that take turns under one lock."""
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # Rotten text must not look like a failed operation.
    return db


def _uri(path: Path) -> str:
    return f"file:{quote(str(path.absolute()))}"


def _memory() -> sqlite3.Connection:
    db = connect("file::memory:")
    migrate(db, 0)
    return db


def _new(path: Path) -> sqlite3.Connection:
    """Create and return an empty database that needs no other file. A file that is already at the path is removed."""
    path.unlink(missing_ok=True)
    os.close(make(path))
    db = connect(f"{_uri(path)}?mode=rw")
    db.execute("PRAGMA journal_mode = MEMORY")
    return db


def _kept(path: Path, version: int) -> Path:
    """Return the path at which a copy of a database is kept before it is converted from `version`."""
    return Path(f"{path}.version-{version}")


def _keep(db: sqlite3.Connection, kept: Path) -> None:
    """Copy a database to `kept`, completely or not at all, so that its old release can be installed again."""
    new = Path(f"{kept}.new")
    with contextlib.closing(_new(new)) as copy:
        db.backup(copy)
    new.replace(kept)


def _pour(source: sqlite3.Connection, target: sqlite3.Connection, limit: int) -> int:
    """Add the rows of `source` to `target`, but only the oldest `limit` runs; return the last run's number or 0."""
    runs = source.execute(f"SELECT number, {RUN} FROM runs ORDER BY number LIMIT {limit}").fetchall()
    target.executemany(ADD_RUN, [row[1:] for row in runs])
    for table, (columns, add) in COPIED.items():
        target.executemany(add, source.execute(f"SELECT {columns} FROM {table} ORDER BY rowid"))
    for verdict in source.execute(f"SELECT {VERDICT} FROM verdicts ORDER BY number"):
        add_verdict(target, verdict)
    add_met(target, source.execute(f"SELECT {MET} FROM met"))
    return runs[-1][0] if runs else 0


def _has_locks(state_dir: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((state_dir / "locks").iterdir())
    return False


def _exists(path: Path) -> bool:
    """Return whether a file exists; True also if this is unknown, because its directory cannot be searched."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _expect_file(path: Path) -> None:
    """Raise `OSError` if the path is not a plain file: SQLite would wait at a pipe until a process writes to it."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.ENXIO, NOT_PLAIN, str(path))


def _is_resting(path: Path) -> bool:
    """Return whether no process has a database with a write-ahead log open; raise an error if it is unreadable.

    The last process that closes such a database removes its log.
    """
    with path.open("rb") as file:
        head = file.read(20)
    if not head:
        raise sqlite3.DatabaseError("it is empty")
    return head[18:] == WAL and not Path(f"{path}-wal").exists()


@contextlib.contextmanager
def _rotten_text() -> Iterator[None]:
    """Within this context, raise SQLite's own error for text that is not UTF-8, instead of a `UnicodeDecodeError`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"a text in it is not UTF-8: {error.object!r:.200}") from error


def _is_damage(error: sqlite3.Error) -> bool:
    # SQLITE_CORRUPT and SQLITE_NOTADB arrive as the bare class; everything that may pass arrives as a subclass.
    return type(error) is sqlite3.DatabaseError
