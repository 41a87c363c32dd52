"""The copy of the database from before its last migration: the way back to the release that wrote it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from canaryd.formatting import quantity
from canaryd.store.locks import make


def copy_of(path: Path, version: int) -> Path:
    """Return where the copy of a database of that version lies."""
    return Path(f"{path}.version-{version}")


def check_room(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Raise `OSError` where the disk has no room for a copy and for as much again, which the log takes meanwhile.

    At the price of two numbers, for this is tried often.
    """
    pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    free = shutil.disk_usage(path.parent).free
    if free < 2 * pages * size:
        needed = f"that and the conversion need {quantity(2 * pages * size, 'bytes')}"
        raise _refused(copy_of(path, version), f"{needed}, and {quantity(free, 'bytes')} are free")


def keep(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy a database with what its log holds, whole or not at all, with its owner and mode.

    Replaces the copy of an earlier migration from that version, whose runs it holds as well. Raises `OSError`.
    """
    kept = copy_of(path, version)
    new = Path(f"{kept}.new")
    try:
        new.unlink(missing_ok=True)
        fd = make(new)
        try:
            like = path.stat()
            with contextlib.suppress(OSError):  # not every file system has modes
                os.fchmod(fd, stat.S_IMODE(like.st_mode))
            with contextlib.suppress(OSError):  # only root gives files away
                os.fchown(fd, like.st_uid, like.st_gid)
        finally:
            os.close(fd)
        uri = f"file:{quote(str(new.absolute()))}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as copy:
            copy.execute("PRAGMA journal_mode = OFF")  # there is nothing to go back to
            db.backup(copy)
        new.replace(kept)
        _sync(kept.parent)  # the name is on disk before the migration is
    except (OSError, sqlite3.Error) as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise _refused(kept, getattr(error, "strerror", None) or str(error)) from error


def drop_unconverted(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Remove the copy where the conversion failed and the database is still of that version."""
    with contextlib.suppress(OSError, sqlite3.Error):
        if db.execute("PRAGMA user_version").fetchone() == (version,):
            copy_of(path, version).unlink(missing_ok=True)


def tidy(path: Path, version: int) -> None:
    """Remove what a kill left beside a database of that version: halves of copies, and copies before a later one.

    The later one holds their runs as well, unless it was made before them: of a backup that somebody put back.
    """
    with contextlib.suppress(OSError):
        kept = [copy_of(path, number) for number in range(1, version) if copy_of(path, number).exists()]
        for older, newer in pairwise(kept):
            if older.stat().st_mtime_ns <= newer.stat().st_mtime_ns:
                older.unlink()
        for number in range(1, version):
            Path(f"{copy_of(path, number)}.new").unlink(missing_ok=True)


def way_back(path: Path, version: int) -> str:
    """Return what a message about a newer database says of the copy that a canaryd of that version opens."""
    kept = copy_of(path, version)
    return f"; {kept} is a copy from before the conversion (docs/install.md: how to go back)" if kept.exists() else ""


def _refused(kept: Path, why: str) -> OSError:
    return OSError(
        f"an older canaryd wrote it, and it cannot be copied to {kept.name} beside it: {why}; "
        "make room; canaryd then copies and converts it"
    )


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # not every file system can
        os.fsync(fd)
    os.close(fd)
