"""A record of the workers that canaryd has killed: a driver's errors about such a worker are no fault of the device."""

from __future__ import annotations

import time
from collections import deque

LATE = 60.0
"""Seconds after a kill in which a driver can still report errors while it removes the worker's context (ours)."""
_killed: deque[tuple[int, float]] = deque(maxlen=256)


def note(pid: int) -> None:
    """Record that canaryd now kills the worker `pid`, which is still running."""
    _killed.append((pid, time.time()))


def was_killed(pid: int, at: float) -> bool:
    """Return whether canaryd killed the process `pid` in the last `LATE` seconds before `at` (epoch s)."""
    return any(pid == other and -1.0 <= at - when <= LATE for other, when in tuple(_killed))
