"""The control group of the workers, below the one that the service manager has delegated to the daemon.

The kernel gives controllers to a group only where no process is in the one above it, so the daemon moves into a leaf of
its own. The limits are those of the whole service, less what the daemon itself needs: a worker that uses up its part
ends, and the daemon lives to tell (Documentation/admin-guide/cgroup-v2.rst of the kernel).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

DAEMON, WORKERS = "daemon", "workers"
CONTROLLERS = ("cpu", "memory", "pids")
MEMORY_KEPT = 256 << 20
"""Bytes of the service's limit that workers cannot have: four times what the daemon may take (ours)."""
TASKS_KEPT = 256
"""Tasks of the service's limit that workers cannot have: 64 clients, the queues of 32 devices, and room (ours)."""
WEIGHT = 50
"""Share of the workers in the service's processor time; the daemon has 100, the kernel's default: scrapes are answered
while every worker computes (ours)."""


class Undivided(Exception):
    """There is no control group to be divided; the message says why, and what to do where something is wrong."""


def divide(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Path:
    """Move this process into the leaf `DAEMON` of its control group and return the leaf for workers.

    Raises `Undivided` where the group is not ours to divide: no version 2, or not delegated.
    """
    try:
        (path,) = (line[3:] for line in membership.read_text(encoding="utf-8").splitlines() if line.startswith("0::/"))
    except (OSError, ValueError):
        raise Undivided("there is no control group of version 2") from None
    own = root / path.lstrip("/")
    if not (own / "cgroup.procs").is_file():
        raise Undivided(f"{own} is no control group of version 2")
    if not _delegated(own):
        raise Undivided("the control group is not delegated to canaryd (Delegate= of its unit)")
    try:
        for leaf in (DAEMON, WORKERS):
            (own / leaf).mkdir(exist_ok=True)
            (own / leaf).chmod(0o755)  # whatever the umask: anybody may see what runs here, as everywhere
        _write(own / DAEMON / "cgroup.procs", os.getpid())
        given = (own / "cgroup.controllers").read_text(encoding="ascii").split()
        for controller in CONTROLLERS:
            if controller in given:
                _write(own / "cgroup.subtree_control", f"+{controller}")
        _limit(own)
    except OSError as error:
        advice = "; name its control group in ReadWritePaths= of the unit" if error.errno == errno.EROFS else ""
        raise Undivided(f"{error.filename or own}: {error.strerror}{advice}") from None
    return own / WORKERS


def apart(group: Path | None, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> bool:
    """Whether the scheduler weighs workers by a group of their own, whose share they get however little they ask for.

    `group` is where workers are put. Where that does not divide the processor, each has the group of its session,
    unless this process is in a control group that does (sched(7), "The autogroup feature"). False where it cannot be
    known.
    """
    if group is not None and (group / "cpu.weight").exists():
        return True
    try:
        if (proc / "sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii").strip() != "1":
            return False
        for line in (proc / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(",") and path != "/":
                return False
            own = root / path.lstrip("/")
            # The group at the very top has no such file; what looks like the top of a container is not it.
            if not controllers and any((each / "cpu.weight").exists() for each in (own, *own.parents)):
                return False
    except (OSError, ValueError):
        return False
    return True


def _delegated(group: Path) -> bool:
    """Whether systemd (251 or newer) has marked a group as ours: by its owner alone a login session would pass too."""
    try:
        return os.getxattr(group, "user.delegate") == b"1"
    except OSError:
        return False


def _limit(own: Path) -> None:
    """Give the workers what the service may use, less the daemon's part; files of absent controllers are not there."""
    workers = own / WORKERS
    for name, kept in (("memory.max", MEMORY_KEPT), ("pids.max", TASKS_KEPT)):
        if (workers / name).exists():
            whole = (own / name).read_text(encoding="ascii").strip()
            # A limit that is hardly more than the daemon's part is the operator's own choice, and is left to act alone.
            part = int(whole) - kept if whole != "max" and int(whole) >= 2 * kept else "max"
            _write(workers / name, part)
    if (workers / "cpu.weight").exists():
        _write(workers / "cpu.weight", WEIGHT)


def _write(file: Path, value: object) -> None:
    with file.open("w", encoding="ascii") as stream:
        stream.write(f"{value}\n")
