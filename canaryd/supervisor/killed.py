"""Workers that canaryd itself has killed: errors that a driver then reports about them are not faults."""

from __future__ import annotations

import time
from collections import deque

LATE = 60.0
"""Seconds after which a driver has torn a killed worker's context down and said what there is to say (ours)."""
_killed: deque[tuple[int, float]] = deque(maxlen=256)


def note(pid: int) -> None:
    """Note that a worker that still ran is being killed now."""
    _killed.append((pid, time.time()))


def was_killed(pid: int, at: float) -> bool:
    """Return whether canaryd had killed that process shortly before `at` (seconds since the epoch)."""
    return any(pid == other and -1.0 <= at - when <= LATE for other, when in tuple(_killed))
