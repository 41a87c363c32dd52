"""A record of the workers that canaryd has killed: a driver's errors about such a worker are no fault of the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LATE = 60.0
"""Seconds after a kill in which a driver can still report errors while it removes the worker's context (ours)."""
OF_HOST = "pid:[4026531836]"
"""The kernel's name of the host's process ids (include/linux/proc_ns.h, PROC_PID_INIT_INO). The log speaks of these."""
PROC = Path("/proc")


class Kill(NamedTuple):
    """One kill of a worker."""

    pids: frozenset[int]
    """The ids of the worker and of all processes of its group, as this process sees them."""
    bus_id: str
    """PCI address of the worker's device, or "" if it is unknown."""
    at: float
    hidden: bool
    """Whether the log calls these processes by other ids, because this process lives in a container."""


_killed: deque[Kill] = deque(maxlen=256)


def note(leader: int, bus_id: str = "", *, hidden: bool = False) -> None:
    """Record that canaryd now kills a worker that is still running, and with it the group that it leads.

    `hidden`: whether the worker runs elsewhere than its command, so that nobody here knows its ids.
    """
    with contextlib.suppress(OSError):
        hidden |= str((PROC / "self/ns/pid").readlink()) != OF_HOST
    _killed.append(Kill(_group(leader), bus_id, time.time(), hidden))


def _group(leader: int) -> frozenset[int]:
    """Return the ids of all processes in the group of `leader`."""
    found = {leader}
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(path.read_text().rpartition(")")[2].split()[2]) == leader:  # proc(5): pgrp
                found.add(int(path.parent.name))
    return frozenset(found)


def was_killed(pid: int, at: float, is_on: Callable[[str], bool]) -> bool:
    """Return whether canaryd killed the process `pid` in the last `LATE` seconds before `at` (epoch s).

    Where the log's ids are others, a kill on the same device counts; `is_on` says so of a PCI address.
    """
    recent = [kill for kill in tuple(_killed) if -1.0 <= at - kill.at <= LATE]
    return any(pid in kill.pids or (kill.hidden and is_on(kill.bus_id)) for kill in recent)
