"""The database file: opened, checked, migrated, set aside when it is damaged, and opened again when it was replaced."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from canaryd.files import NOT_PLAIN, allowed, owners_rights
from canaryd.store import copies
from canaryd.store.locks import flock, make
from canaryd.store.migrations import Migration, migrate
from canaryd.store.rows import NOTE

DATABASE = "canaryd.db"
"""Name of the database in the state directory."""
OPEN_LOCK = f"{DATABASE}.lock"
"""Name of the file that is locked while the database is opened, copied, migrated or set aside."""
BUSY_TIMEOUT = 5.0
"""Seconds that a statement waits for another process's transaction."""
CACHE = 512
"""KiB of the database that SQLite keeps in memory, a quarter of its default (ours): reading the record takes its time
for decoding JSON, hardly any for pages, which the system caches anyway."""
OPEN_TIMEOUT = 10.0
"""Seconds to wait while another process creates, checks or migrates the database."""
LOST_NOTE = "history lost"
"""Note: when a database was lost last and what is left of it, as "seconds path"."""
MISSING = "is missing, although canaryd ran here before"
LOGS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a database: it would take those of a database that is gone for the next one's."""
READ_ONLY = "it can only be read here; run as its owner, or choose another --state-dir"
WAL = b"\2\2"
"""Bytes 18 and 19 of a database with a write-ahead log (sqlite.org/fileformat.html)."""
T = TypeVar("T")


class StoreTooNew(RuntimeError):
    """A newer canaryd wrote the database; it is left as it is."""


class _Replaced(OSError):
    """The path leads to another file than the one just used: another process set that one aside or removed it."""


REFUSED = (OSError, sqlite3.Error, StoreTooNew)
"""What the disk, the file or another process can do to us; anything else is a mistake here."""


class Database:
    """The SQLite file in a state directory. Its methods raise `REFUSED`."""

    def __init__(
        self,
        state_dir: Path,
        now: Callable[[], float],
        migrations: Mapping[int, Migration],
        *,
        for_reading: bool,
        on_open: Callable[[sqlite3.Connection], None],
    ) -> None:
        """`now` is the clock in seconds since the epoch; `on_open` is called with each new connection."""
        self.state_dir = state_dir
        self.path = state_dir / DATABASE
        self.migrations = migrations
        self.for_reading = for_reading
        """Open read-only: never create, repair, migrate or lock."""
        self.read_only = False
        self.problems: dict[str, str] = {}
        """What an operator should know, one sentence each, by what it is about."""
        self.lock = threading.RLock()
        """One thread at a time uses the connection."""
        self.connection: sqlite3.Connection | None = None
        self.files = 0
        """How many databases were open so far; at each further one, what was read before is outdated."""
        self.now = now
        self._on_open = on_open
        self._opened = 0
        self._resting = False  # opened while no other process had it open
        self._identity: tuple[int, int] | None = None
        self._replaced = False  # since it was opened last, by any process
        self._lost = ""  # what the new file's `LOST_NOTE` will say
        # Locks are taken only beside a record, and outlive it. Looked for once: later ones may be this process's own,
        # which works from memory where it can make no record.
        self._ran_before = _has_locks(state_dir)

    def close(self) -> None:
        """Let go of the file."""
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):
                    stack.enter_context(owners_rights(self.state_dir))
                connection.close()

    # Using it

    def attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work` on the file; where the file turns out to be damaged or replaced, once more on the next one."""
        with self.lock, owners_rights(self.state_dir):
            try:
                with _rotten_text():
                    return work(self.connect())
            except _Replaced:
                pass
            except sqlite3.DatabaseError as error:
                if self.read_only or not _is_damage(error):
                    raise
                with flock(self.state_dir, OPEN_LOCK, OPEN_TIMEOUT):
                    if not self._moved():
                        self._set_aside(f"damaged ({error})")
            with _rotten_text():
                return work(self.connect())

    def commit(self, write: Callable[[sqlite3.Connection], T]) -> T:
        """Do `write` in one transaction; it is on disk when this returns."""
        return self.attempt(lambda db: self._transact(db, write))

    def version(self) -> object:
        """Return a value that changes whenever another connection has written."""
        (version,) = self.attempt(lambda db: db.execute("PRAGMA data_version").fetchone())
        # SQLite counts for each connection from the start, and a file made after another was removed may have its
        # inode. A disk that refuses writes is opened again for every look: that alone is no change.
        return self._identity, self._opened, version

    def _transact(self, db: sqlite3.Connection, write: Callable[[sqlite3.Connection], T]) -> T:
        if self.read_only:
            raise PermissionError(READ_ONLY)
        db.execute("BEGIN IMMEDIATE")
        try:
            self._schema_version(db)
            result = write(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        if self._moved():
            raise _Replaced("another file took its place during the write")
        return result

    # Opening it

    def connect(self) -> sqlite3.Connection:
        """Return the connection; open it where there is none, the file was replaced, or it can be written again."""
        if self.connection is not None and (self._moved() or (self.read_only and self._is_outdated())):
            self._replaced = self._replaced or self._is_gone()
            self.close()
        if self.connection is not None:
            return self.connection
        try:
            if not self.for_reading:
                self.state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            with owners_rights(self.state_dir), _rotten_text():
                db = self._open_as_allowed()
                self._on_open(db)
        except REFUSED:
            self.close()
            raise
        return db

    def _open_as_allowed(self) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm", "-journal"):
            _expect_file(Path(f"{self.path}{suffix}"))
        if self._may_write():
            try:
                return self._open_to_write()
            except OSError as error:
                # After an error of its own ext4 refuses every write, while access(2) still promises them.
                if error.errno != errno.EROFS:
                    raise
        self.read_only = True
        if why := self._why_missing():
            raise OSError(f"it {why}; restore a backup, or begin a new record: canaryd check")
        # SQLite would make a log beside a database that nobody has open, only to read it.
        self._resting = _is_resting(self.path)
        return self._open_to_read("mode=ro&immutable=1" if self._resting else "mode=ro")

    def _open_to_write(self) -> sqlite3.Connection:
        with flock(self.state_dir, OPEN_LOCK, OPEN_TIMEOUT):
            try:
                with _rotten_text():
                    return self._open_and_migrate()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._set_aside(f"damaged ({error})")
            return self._open_and_migrate()

    def _open_and_migrate(self) -> sqlite3.Connection:
        if not self.path.exists():
            if why := self._why_missing():
                self._set_aside(why)
            _create(self.path)
        elif self.path.stat().st_size == 0:
            self._open("mode=rw", read_only=False)
            raise sqlite3.DatabaseError("it is empty")
        db = self._open("mode=rwc", read_only=False)
        version = self._schema_version(db)
        if version == 0 and self._ran_before:  # a process that began this file did not get as far as noting the loss
            self._note_loss(MISSING, "started a new, empty database")
        self._opened += 1
        self._identify()
        outdated = 0 < version < max(self.migrations)
        if outdated:
            copies.check_room(db, self.path, version)
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        if note := use_wal(db):
            self.problems["wal"] = f"{self.path}: {note}"
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{CACHE}")
        if outdated:
            copies.keep(db, self.path, version)
        if version < max(self.migrations):
            try:
                self._transact(db, functools.partial(self._convert, version=version))
            except BaseException:
                if outdated:
                    copies.drop_unconverted(db, self.path, version)
                raise
        copies.tidy(self.path, max(self.migrations))
        # The process that replaced a damaged file has noted the loss already.
        if self._replaced and not db.execute("SELECT 1 FROM notes WHERE name = ?", (LOST_NOTE,)).fetchone():
            self._note_loss("was replaced while it was in use", "continuing with the new file")
        if self._lost:
            self._transact(db, lambda db: db.execute(NOTE, (LOST_NOTE, self._lost)))
        self._lost, self._replaced = "", False
        return db

    def _convert(self, db: sqlite3.Connection, version: int) -> None:
        migrate(db, migrations=self.migrations, version=version)
        if self._lost:
            db.execute(NOTE, (LOST_NOTE, self._lost))

    def _note_loss(self, what: str, then: str) -> None:
        if not self._lost:
            self._lost = f"{self.now()!r} nothing: {self.path} {what}"
            self.problems["gone"] = f"{self.path}: {what}; {then}"

    def _open_to_read(self, mode: str) -> sqlite3.Connection:
        db = self._open(mode, read_only=True)
        self._identify()
        try:
            version = self._schema_version(db)
        except sqlite3.OperationalError as error:
            # In WAL mode even a reader needs the -shm file. Where it is missing and cannot be made, nobody is writing
            # either, and SQLite may take the file as it stands. Not so where another process has locked it.
            if mode != "mode=ro" or "locked" in str(error):
                raise
            self.close()
            return self._open_to_read("mode=ro&immutable=1")
        if version < max(self.migrations):
            then = "start the daemon or run canaryd check to convert it" if self.for_reading else READ_ONLY
            raise OSError(f"an older canaryd wrote it: {then}")
        return db

    def _open(self, mode: str, *, read_only: bool) -> sqlite3.Connection:
        self.read_only = read_only
        self.connection = connect(f"file:{quote(str(self.path.absolute()))}?{mode}")
        if not allowed(Path(os.environ.get("TMPDIR", "/")), os.X_OK):  # root's own may be closed to the owner
            self.connection.execute("PRAGMA temp_store = MEMORY")
        return self.connection

    def _schema_version(self, db: sqlite3.Connection) -> int:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        if version > max(self.migrations):
            raise StoreTooNew(
                f"{self.path}: was written by a newer canaryd (version {version} of the store, this one knows "
                f"{max(self.migrations)}); upgrade canaryd, or choose another --state-dir"
                f"{copies.way_back(self.path, max(self.migrations))}"
            )
        return version

    def _set_aside(self, why: str) -> None:
        """Rename what there is of a database that is damaged or missing; the caller holds the open lock."""
        stamp = datetime.fromtimestamp(self.now(), tz=timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        names = (f"{DATABASE}.corrupt-{stamp}{again}" for again in ("", *(f".{n}" for n in range(2, 1000))))
        aside = next(self.state_dir / name for name in names if not any(self.state_dir.glob(f"{name}*")))
        kept = []
        for suffix in ("", *LOGS):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
                kept.append(f"{aside}{suffix}")
            # Closed when it is renamed: SQLite then sees that it has moved, and neither writes to it nor drops its log.
            self.close()
        if not kept:
            self._note_loss(why, "started a new, empty database")
            return
        self._lost = f"{self.now()!r} {kept[0]}"
        self.problems[aside.name] = f"{self.path}: {why}; kept as {kept[0]}; started a new, empty database"

    # The file at its path

    def _identify(self) -> None:
        """Note which file was opened, and whether it is another one than before."""
        before, self._identity = self._identity, _identity(self.path)
        self.files += self._identity != before or self._replaced

    def _moved(self) -> bool:
        return _identity(self.path) != self._identity

    def _is_gone(self) -> bool:
        """Return whether the file was removed or replaced; one that cannot be looked at may be the same."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return self._moved()

    def _why_missing(self) -> str:
        """Return how it is known that a database was at its path; "" where one is there, or none ever was."""
        if self.path.exists():
            return ""
        if self._identity is not None:
            return "was removed while it was in use"
        return MISSING if self._ran_before or any(Path(f"{self.path}{log}").exists() for log in LOGS) else ""

    def _is_outdated(self) -> bool:
        """Return whether a connection that only reads should be opened anew: to write, or to see what is written."""
        return self._may_write() or (self._resting and _log(self.path).exists())

    def _may_write(self) -> bool:
        # The directory too: SQLite keeps its log beside the database.
        if self.for_reading or not allowed(self.state_dir, os.W_OK):
            return False
        return not self.path.exists() or allowed(self.path, os.W_OK)


def connect(uri: str) -> sqlite3.Connection:
    """Open an SQLite database for several threads that share one lock of ours, with explicit transactions."""
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # Rotten text must not look like a failed operation.
    return db


def use_wal(db: sqlite3.Connection) -> str:
    """Switch to write-ahead logging, so that readers never wait for a writer; return a sentence where that fails."""
    try:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
    except sqlite3.OperationalError as error:
        mode = str(error)
    if mode == "wal":
        return ""
    return f"no write-ahead log here (journal mode: {mode}); nothing is lost, but readers and writers wait in turn"


def _create(path: Path) -> None:
    """Complete the new file before it gets its name: an empty file is then damage, and never a beginning."""
    new = Path(f"{path}.new")
    new.unlink(missing_ok=True)
    os.close(make(new))
    with contextlib.closing(connect(f"file:{quote(str(new.absolute()))}?mode=rw")) as db:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute("PRAGMA user_version = 0")
    new.replace(path)


def _has_locks(state_dir: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((state_dir / "locks").iterdir())
    return False


def _expect_file(path: Path) -> None:
    """Raise `OSError` where something else is: SQLite would wait at a pipe for as long as nobody writes to it."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.ENXIO, NOT_PLAIN, str(path))


def _log(path: Path) -> Path:
    return Path(f"{path}-wal")


def _is_resting(path: Path) -> bool:
    """Return whether no process has a database with a write-ahead log open. Raises what stands in the way of reading.

    The last process that closes such a database removes its log.
    """
    with path.open("rb") as file:
        head = file.read(20)
    if not head:
        raise sqlite3.DatabaseError("it is empty")
    return head[18:] == WAL and not _log(path).exists()


@contextlib.contextmanager
def _rotten_text() -> Iterator[None]:
    """Raise SQLite's own error for damage that Python cannot tell, because it repeats a text that rotted."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"a text in it is not UTF-8: {error.object!r:.200}") from error


def _is_damage(error: sqlite3.Error) -> bool:
    # SQLITE_CORRUPT and SQLITE_NOTADB arrive as the bare class; everything that may pass arrives as a subclass.
    return type(error) is sqlite3.DatabaseError


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
