"""Write files completely or not at all, and access the state directory safely when another user owns it."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
"""Machine → number of the system call setgroups of Linux. The C library's function would change all threads."""
NOT_PLAIN = "it is a link, a pipe or a device, and no plain file"


def write_whole(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write `data` to `path` in one step: a reader sees the old file or the new one, also after a power loss.

    `mode`: permissions of the file (default: from the umask). On failure it raises `OSError` and leaves no file behind.
    """
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}")  # no collector reads it: it is no *.prom
    try:
        with part.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def owners_rights(directory: Path) -> Iterator[None]:
    """Limit root, in this thread and within this context, to the file permissions of a directory's owner.

    canaryd opens every file below the state directory in this context, SQLite's own files too, because the owner can
    put links there that lead anywhere. Files that root creates belong to the owner. The context changes nothing if the
    process is not root's, if root owns the directory, or if the directory does not exist. Raises `OSError` if root
    cannot take these permissions.
    """
    try:
        owner = directory.stat() if os.geteuid() == 0 else None
    except OSError:  # no path below it leads anywhere then
        owner = None
    if owner is None or owner.st_uid in (0, _switch("setfsuid", -1)):
        yield
        return
    with contextlib.ExitStack() as before:
        _take(owner, before, directory)
        try:
            yield
        except PermissionError as error:
            if error.errno is None:  # raised by canaryd itself
                raise
            why = f"{error.strerror} to user {owner.st_uid}, whose rights root takes in {directory}"
            raise PermissionError(error.errno, why, error.filename) from error


def _take(owner: os.stat_result, before: contextlib.ExitStack, directory: Path) -> None:
    # Linux takes root's capabilities over files away with the user, and gives them back with it.
    before.callback(_switch, "setfsgid", _switch("setfsgid", owner.st_gid))
    if groups := os.getgroups():
        before.callback(_set_groups, groups)
        _set_groups(())
    before.callback(_switch, "setfsuid", _switch("setfsuid", owner.st_uid))
    if os.getgroups() or [_switch(name, -1) for name in ("setfsgid", "setfsuid")] != [owner.st_gid, owner.st_uid]:
        why = f"root cannot take the rights of user {owner.st_uid}, whose directory it is; run canaryd as that user"
        raise PermissionError(errno.EPERM, why, str(directory))


@functools.cache
def _library() -> Any:
    import ctypes  # noqa: PLC0415  only root needs it

    return ctypes.CDLL(None)


def _switch(name: str, number: int) -> int:
    """Set this thread's user or group id for files; return the former id, or 0 if no function has this `name`."""
    call = getattr(_library(), name, None)
    return call(number) & 0xFFFFFFFF if call else 0


def _set_groups(groups: Sequence[int]) -> None:
    number = _SETGROUPS.get(os.uname().machine)
    if number is not None and hasattr(_library(), "setfsuid"):
        _library().syscall(number, len(groups), b"".join(group.to_bytes(4, sys.byteorder) for group in groups))


def allowed(path: Path, mode: int) -> bool:
    """Return whether this thread can access a file at this moment with `mode` (as in `os.access`)."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def open_plain(path: Path, flags: int) -> int:
    """Open a regular file and return its descriptor. Raises `OSError` for a symbolic link, a pipe or anything else."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, NOT_PLAIN, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, NOT_PLAIN, str(path))
    return fd


def recall(directory: str, name: str) -> Any:
    """Return the value that `keep` stored under `name` in `directory`, or None if there is none or it is damaged."""
    path = Path(directory) / _file_name(name)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if directory:
            with owners_rights(path.parent.parent), os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
                return json.loads(file.read())
    return None


def keep(directory: str, name: str, value: Any) -> None:
    """Store a value for later processes; None deletes it. If that is not possible, do nothing and raise nothing.

    `directory` is a directory inside the state directory, or "" to store nothing.
    """
    if not directory:
        return
    path = Path(directory) / _file_name(name)
    with contextlib.suppress(OSError), owners_rights(path.parent.parent):
        if value is None:
            path.unlink()
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(value).encode())


def _file_name(name: str) -> str:
    return f"{quote(name, safe='')}.json"  # a driver names devices: no name may lead elsewhere
