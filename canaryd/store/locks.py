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

from canaryd.files import open_plain, owners_rights
from canaryd.formatting import format_duration

RETRY = 0.05
"""Seconds between two attempts to get a lock, since flock has no timeout."""
WAIT = 600.0
"""Seconds for which a command waits for a device that another process uses, unless --wait says otherwise."""
DISK_FULL = "its disk is full"
FULL = 1024 * 1024
"""Free bytes below which a disk counts as full: SQLite needs room for each file of a database."""


class Busy(TimeoutError):
    """Another process held the lock for longer than the timeout; the message names that process."""


class Unreadable(OSError):
    """The store cannot be read. The message has the reason and a command that helps."""


def user_name() -> str:
    """Return the name of this process's user, or the user's number if it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def reason(path: Path, error: Exception) -> str:
    """Return the reason why a file could not be used; it names another file if the error is about that one.

    If the disk is full, the reason says so, because SQLite may call that an I/O error.
    """
    why = f"{getattr(error, 'strerror', None) or error}"
    if (other := getattr(error, "filename", None)) and str(other) not in (str(path), str(path.parent)):
        why = f"{other}: {why}"
    try:
        there = os.statvfs(path.parent)
    except OSError:
        return why
    free = there.f_bavail * there.f_frsize
    return f"{DISK_FULL} ({free:,} bytes free): {why}" if free < FULL else why


def refusal(path: Path, error: Exception) -> str:
    """Return a sentence that says what cannot be read, why, and which command helps, if there is one."""
    if not isinstance(error, PermissionError):
        # Exactly this class is what SQLite raises for a damaged file (`database.py`).
        aside = "; canaryd check keeps it under another name and begins a new record"
        return f"cannot read {path}: {reason(path, error)}{aside if type(error) is sqlite3.DatabaseError else ''}"
    return f"cannot read {path.parent} as user {user_name()}: {'use sudo' if os.geteuid() else reason(path, error)}"


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of `path`; raise `OSError` if this is unknown. No file is created."""
    try:
        fd = open_plain(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return _is_held(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look at once must not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class Flag:
    """A sign to other processes: a lock on a directory. It needs no write permission and ends with its process."""

    def __init__(self, directory: Path) -> None:
        """Begin with the flag lowered."""
        self._directory = directory
        self._fd: int | None = None

    def fly(self, raised: bool) -> None:
        """Raise the flag if `raised`, else lower it. If the directory cannot be locked, the flag stays lowered."""
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
        """Return whether another process has raised the flag of a directory; False if this is unknown."""
        try:
            return _is_held(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            return False


def make(path: Path) -> int:
    """Create a new file and return its open descriptor; raise `FileExistsError` if it exists."""
    return open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def may_make(path: Path) -> bool:
    """Return whether this user can create the directory `path`, which does not exist yet."""
    above = next(p for p in path.absolute().parents if os.path.exists(p))  # noqa: PTH110  never raises
    return above.is_dir() and os.access(above, os.W_OK | os.X_OK)


@contextlib.contextmanager
def flock(
    home: Path,
    name: str,
    timeout: float,
    on_wait: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    doing: str = "",
) -> Iterator[None]:
    """Hold the lock of file `name` in the state directory `home`. The file names its holder and the text `doing`.

    Waits `timeout` seconds, or until `stopped()`; `on_wait` is called once with the holder's name. Raises `Busy`, or
    `OSError` if lock files cannot exist.
    """
    path = home / name
    with owners_rights(home):
        fd = _open_lock(path)
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
                    on_wait(f"{holder}; this command gives up after {format_duration(timeout)} (--wait)")
                    on_wait = None
                time.sleep(RETRY)
        _sign(fd, f"{_name()}{doing and f', {doing}'}")
        try:
            yield
        finally:
            _sign(fd, "")
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        return make(path)
    try:
        return open_plain(path, os.O_RDWR)
    except OSError:  # Another user's file, or one on a read-only disk, can be locked, but not signed.
        return open_plain(path, os.O_RDONLY)


def _name() -> str:
    """Return the text with which a lock file names this process as its holder."""
    return f"pid {os.getpid()}: {shlex.join(sys.argv)}"


def _sign(fd: int, name: str) -> None:
    with contextlib.suppress(OSError):  # A full disk, or another user's file, costs the name but not the lock.
        os.ftruncate(fd, 0)
        os.pwrite(fd, name.encode("utf-8", "replace")[:4096], 0)
