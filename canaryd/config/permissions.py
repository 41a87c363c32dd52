"""Who could have written a file: whoever can write what canaryd runs, or what tells it what to run, is canaryd."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_LINKS = 40
"""Symbolic links in one path after which Linux itself gives up (path_resolution(7))."""


def doubt(path: Path) -> str:
    """Say why what is at `path` may be the word of somebody else; "" where it is root's or this user's alone.

    It must belong to root or to the user that runs this process, and neither group nor others may write it. The same
    holds for every directory on the way to it, through every symbolic link, since who can rename a directory can put
    another in its place; there the sticky bit is enough, as on /tmp. The mode of a directory does not count where it is
    a read-only mount of its own: whoever made that is root (Kubernetes mounts what it configures so, with mode 0777).
    A device cannot be rewritten and is never doubted. Raises `OSError` where something on the way cannot be looked at.
    """
    status = path.stat()
    if stat.S_ISCHR(status.st_mode):
        return ""
    if stat.S_ISFIFO(status.st_mode):  # a shell's <(…): its name leads through /proc to no directory
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
            return f"the link {here / part} on the way to it {_belongs(status)}"
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
    """Whether a directory belongs to root, and is a read-only mount by itself, not only part of one.

    Part of one is not enough: to a service that systemd protects (ProtectSystem=strict), nearly everything is that.
    """
    there = os.statvfs(directory)
    return directory.stat().st_uid == 0 and directory.is_mount() and bool(there.f_flag & os.ST_RDONLY)


def _doubt(status: os.stat_result, what: str, *, shared: bool) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return what + _belongs(status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (shared and status.st_mode & stat.S_ISVTX):
        return f"{what}is writable by others ({stat.filemode(status.st_mode)}); chmod go-w it, if you trust it"
    return ""


def _belongs(status: os.stat_result) -> str:
    wanted = "root" if os.geteuid() == 0 else f"root or user {os.geteuid()}"
    return f"belongs to user {status.st_uid}; wanted {wanted}: chown it, if you trust it"


def exposure(path: Path) -> str:
    """Say that everybody may read what is at `path`, and how to end that; "" where that is not so, or not to be had."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    if not mode & stat.S_IROTH:
        return ""
    return f"everybody may read it ({stat.filemode(mode)}): chmod o-rwx {path}"
