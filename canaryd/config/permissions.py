"""Check which users can change a file: a user who can change canaryd's programs or configuration controls canaryd."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_LINKS = 40
"""Largest number of symbolic links that Linux follows in one path (path_resolution(7))."""


def doubt(path: Path) -> str:
    """Return the reason why another user could have written the file at `path`, or "" if only root or this user could.

    The file must belong to root or to the user of this process, and neither group nor others can have write permission.
    The same holds for every directory on the way to the file, through every symbolic link, because a user who can
    rename a directory can put another in its place. For a directory the sticky bit is enough, as on /tmp. The mode of a
    directory does not count if it is a read-only mount of its own, because only root can make one (Kubernetes mounts
    its configuration this way, with mode 0777). A device file is always trusted. Raises `OSError` if something on the
    way cannot be examined.
    """
    status = path.stat()
    if stat.S_ISCHR(status.st_mode):
        return ""
    if stat.S_ISFIFO(status.st_mode):  # a shell's <(…): its name in /proc leads to no directory
        return _doubt(status, "it ", shared=False)
    rest = list(reversed(path.absolute().parts[1:]))
    here, links = Path("/"), 0
    status = here.lstat()
    while rest:
        if (problem := _doubt(status, f"its directory {here} ", shared=True)) and not _sealed(here):
            return problem
        part = rest.pop()
        if part == "..":
            here = here.parent
            status = here.lstat()
            continue
        status = (here / part).lstat()
        if not stat.S_ISLNK(status.st_mode):
            here /= part
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"its link {here / part} {_belongs(status)}"
        if (links := links + 1) > _LINKS:
            return f"more than {_LINKS} links lead to it; name the file itself"
        target = (here / part).readlink()
        rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        if target.is_absolute():
            here = Path("/")
        status = here.lstat()
    problem = _doubt(status, "it ", shared=False)
    return "" if problem and stat.S_ISDIR(status.st_mode) and _sealed(here) else problem


def _sealed(directory: Path) -> bool:
    """Return whether a directory belongs to root and is itself a read-only mount point.

    A directory inside a read-only mount is not enough: for a service with ProtectSystem=strict nearly all are.
    """
    there = os.statvfs(directory)
    return directory.stat().st_uid == 0 and directory.is_mount() and bool(there.f_flag & os.ST_RDONLY)


def _doubt(status: os.stat_result, what: str, *, shared: bool) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return what + _belongs(status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (shared and status.st_mode & stat.S_ISVTX):
        return f"{what}is writable by others ({stat.filemode(status.st_mode)}); if you trust it, run chmod go-w on it"
    return ""


def _belongs(status: os.stat_result) -> str:
    wanted = "root" if os.geteuid() == 0 else f"root or user {os.geteuid()}"
    return f"belongs to user {status.st_uid}; wanted {wanted}; if you trust it, chown it"


def exposure(path: Path) -> str:
    """Return a warning if all users can read the file at `path`; "" if they cannot or the file cannot be examined."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    if not mode & stat.S_IROTH:
        return ""
    return f"all users may read it ({stat.filemode(mode)}); run chmod o-rwx {path}"
