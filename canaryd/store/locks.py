"""Lock files and files that are created atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

RETRY = 0.05
"""Seconds between two tries for a lock: flock has no timeout of its own."""
FULL = 1024 * 1024
"""A disk with fewer free bytes counts as full: SQLite needs room for each file of a database."""


class Busy(TimeoutError):
    """Another process held the lock for longer than the timeout; the message names it."""


class Unreadable(OSError):
    """What is recorded cannot be read; the message says why, and what to type."""


def user_name() -> str:
    """Return the name of this process's user, or its number where it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def reason(path: Path, error: Exception) -> str:
    """Return why a file could not be used; where its disk is full, which SQLite may call an I/O error, also that."""
    why = f"{getattr(error, 'strerror', None) or error}"
    try:
        there = os.statvfs(path.parent)
    except OSError:
        return why
    free = there.f_bavail * there.f_frsize
    return f"{why} ({free:,} bytes are free on its disk)" if free < FULL else why


def refusal(path: Path, error: Exception) -> str:
    """Return what cannot be read and why, with what to type where another user may read it."""
    if not isinstance(error, PermissionError):
        # Exactly this class is what SQLite raises for a damaged file (`database.py`).
        aside = "; canaryd check keeps it under another name and begins a new record"
        return f"cannot read {path}: {reason(path, error)}{aside if type(error) is sqlite3.DatabaseError else ''}"
    return f"cannot read {path.parent} as user {user_name()}: {'use sudo' if os.geteuid() else error.strerror}"


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of `path`. Creates nothing. Raises `OSError` where it cannot tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once must not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Flag:
    """A sign to other processes, as a lock on a directory: it needs no right to write and ends with its process."""

    def __init__(self, directory: Path) -> None:
        """The flag is down at first."""
        self._directory = directory
        self._fd: int | None = None

    def fly(self, raised: bool) -> None:
        """Raise or lower the flag. Where the directory cannot be opened or locked, it stays down."""
        if raised and self._fd is None:
            with contextlib.suppress(OSError):
                fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    raise
                self._fd = fd
        elif not raised and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def flies(directory: Path) -> bool:
        """Return whether another process has raised the flag of a directory; False where that is unknown."""
        try:
            return is_held(directory)
        except OSError:
            return False


def make(path: Path) -> int:
    """Create a new file and open it; one that root makes gets the owner of its directory.

    Otherwise a command that root runs before the service would leave a database that the service's user cannot write.
    SQLite itself gives the log beside a database the owner of the database.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)  # O_EXCL follows no symbolic link
    _hand_over(fd, path.parent)
    return fd


def may_make(path: Path) -> bool:
    """Return whether this user may make a directory that does not exist."""
    above = next(p for p in path.absolute().parents if os.path.exists(p))  # noqa: PTH110  never raises
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


def make_directory(path: Path) -> None:
    """Create a directory where there is none; one that root makes gets the owner of the directory above it."""
    if path.exists():
        return
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    _hand_over(fd, path.parent)
    os.close(fd)


def _hand_over(fd: int, directory: Path) -> None:
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # A root that may not give files away keeps them.
            there = directory.stat()
            os.fchown(fd, there.st_uid, there.st_gid)


@contextlib.contextmanager
def flock(
    path: Path,
    timeout: float,
    on_wait: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    doing: str = "",
) -> Iterator[None]:
    """Lock the file `path`, which names its holder and what it is `doing`; wait `timeout` seconds, or until `stopped`.

    Raises `Busy`, or `OSError` where lock files cannot exist.
    """
    try:
        fd = make(path)
    except FileExistsError:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # Another user's file, or one on a read-only disk, can be locked, but not signed.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                holder = os.pread(fd, 4096, 0).decode("utf-8", "replace") or "a process that left no name"
                waited = time.monotonic() - start
                if waited >= timeout or stopped():
                    held = f"still held after {waited:.0f} s" if timeout > 0 else "held"
                    raise Busy(f"{path}: {held} by {holder}; wait for it or stop it") from error
                if on_wait and not holder.startswith(_name()):  # of another thread here, nobody needs to hear
                    on_wait(f"{holder}; this command gives up after {timeout:g} s (--wait)")
                    on_wait = None
                time.sleep(RETRY)
        _sign(fd, f"{_name()}{doing and f', {doing}'}")
        try:
            yield
        finally:
            _sign(fd, "")
    finally:
        os.close(fd)


def _name() -> str:
    """Return what tells this process from others in a lock file."""
    return f"pid {os.getpid()}: {shlex.join(sys.argv)}"


def _sign(fd: int, name: str) -> None:
    with contextlib.suppress(OSError):  # A full disk, or another user's file, costs the name but not the lock.
        os.ftruncate(fd, 0)
        os.pwrite(fd, name.encode("utf-8", "replace")[:4096], 0)
