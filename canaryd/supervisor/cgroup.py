"""Put workers into their own control group, below the group that the service manager has delegated to the daemon.

The kernel enables controllers for a group only if its parent holds no process, so the daemon moves into a leaf group.
The workers' limits are those of the whole service minus the daemon's part. A worker that uses up the workers' part is
killed, and the daemon can report it (Linux, Documentation/admin-guide/cgroup-v2.rst).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

DAEMON, WORKERS = "daemon", "workers"
CONTROLLERS = ("cpu", "memory", "pids")
MEMORY_KEPT = 256 << 20
"""Bytes of the service's memory limit that are reserved for the daemon: four times what the daemon needs at most
(ours)."""
TASKS_KEPT = 256
"""Number of tasks (processes and threads) that are reserved for the daemon, out of the service's limit: 64 clients,
32 device queues, and some spare (ours)."""
WEIGHT = 50
"""CPU weight of the workers. The daemon keeps the kernel's default of 100, so that it answers scrapes while all workers
compute (ours)."""


class Undivided(Exception):
    """The control group cannot be divided. The message says why, and what to do if this is a mistake."""


def divide(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Path:
    """Move this process into the child `DAEMON` of its control group and return the path of the child for workers.

    Raises `Undivided` if there is no cgroup version 2, or if the group is not delegated to canaryd.
    """
    try:
        (path,) = (line[3:] for line in membership.read_text(encoding="utf-8").splitlines() if line.startswith("0::/"))
    except (OSError, ValueError):
        raise Undivided("this process has no cgroup version 2") from None
    own = root / path.lstrip("/")
    if not (own / "cgroup.procs").is_file():
        raise Undivided(f"{own} is not a cgroup version 2")
    if not _delegated(own):
        raise Undivided("the control group is not delegated to canaryd (set Delegate= in its unit)")
    try:
        for leaf in (DAEMON, WORKERS):
            (own / leaf).mkdir(exist_ok=True)
            (own / leaf).chmod(0o755)  # whatever the umask: other users may see the processes here, as elsewhere
        _write(own / DAEMON / "cgroup.procs", os.getpid())
        given = (own / "cgroup.controllers").read_text(encoding="ascii").split()
        for controller in CONTROLLERS:
            if controller in given:
                _write(own / "cgroup.subtree_control", f"+{controller}")
        _limit(own)
    except OSError as error:
        advice = "; add its control group to ReadWritePaths= in the unit" if error.errno == errno.EROFS else ""
        raise Undivided(f"{error.filename or own}: {error.strerror}{advice}") from None
    return own / WORKERS


def apart(group: Path | None, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> bool:
    """Return whether workers form a scheduling group, so that the idle policy applies only among workers.

    True if `group`, the control group of workers, has a CPU controller. True also if the kernel makes a scheduling
    group for each session (sched(7), "The autogroup feature") and this process is in no control group with a CPU
    controller. Otherwise, or if this is unknown, False.
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
            # The root group has no such file; what looks like the root inside a container is not the root.
            if not controllers and any((each / "cpu.weight").exists() for each in (own, *own.parents)):
                return False
    except (OSError, ValueError):
        return False
    return True


def _delegated(group: Path) -> bool:
    """Return whether systemd (251 or newer) marked a group as delegated. Ownership of the group does not prove this."""
    try:
        return os.getxattr(group, "user.delegate") == b"1"
    except OSError:
        return False


def _limit(own: Path) -> None:
    """Set each limit of the workers to the service's limit minus the daemon's part; skip limits without a file."""
    workers = own / WORKERS
    for name, kept in (("memory.max", MEMORY_KEPT), ("pids.max", TASKS_KEPT)):
        if (workers / name).exists():
            whole = (own / name).read_text(encoding="ascii").strip()
            # If the limit is hardly more than the daemon's part, only the operator's own limit applies.
            part = int(whole) - kept if whole != "max" and int(whole) >= 2 * kept else "max"
            _write(workers / name, part)
    if (workers / "cpu.weight").exists():
        _write(workers / "cpu.weight", WEIGHT)


def _write(file: Path, value: object) -> None:
    with file.open("w", encoding="ascii") as stream:
        stream.write(f"{value}\n")
