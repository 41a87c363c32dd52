"""A record of workers that canaryd itself has killed: errors that a driver then reports about them are no faults."""

from __future__ import annotations

import time
from collections import deque

LATE = 60.0
"""Seconds after a kill within which a driver removes the worker's context and reports its last errors (ours)."""
_killed: deque[tuple[int, float]] = deque(maxlen=256)


def note(pid: int) -> None:
    """Record that a worker that was still running is killed now."""
    _killed.append((pid, time.time()))


def was_killed(pid: int, at: float) -> bool:
    """Return whether canaryd killed the process `pid` shortly before `at` (epoch s)."""
    return any(pid == other and -1.0 <= at - when <= LATE for other, when in tuple(_killed))
