"""Names of the notes and locks by which the daemon and the commands communicate."""

from __future__ import annotations

from canaryd.store.store import Store

BUDGET_NOTE = "budget"
"""Note: device → since when a test is postponed, and why, as JSON; valid while the daemon runs."""


def daemon_runs(store: Store) -> bool:
    """Return whether a daemon uses this state directory; raises `Unreadable` where this user may not know it."""
    return store.is_locked(DAEMON_LOCK)


LOG_PROBLEM_NOTE = "kernel log problem"
"""Note: why the process that records telemetry cannot read the kernel log; "" when it can."""
LOG_NOTE = "kernel log"
"""Note: the newest record of the kernel log that is counted, as "boot id:sequence"."""
BOOT_NOTE, RUNNING_NOTE = "boot", "running"
"""Notes: the boot id last seen; the boot id of a daemon that started and has not stopped."""
RELEASE_NOTE, RELEASED_NOTE = "release", "released"
"""Notes: until when `canaryd release` asks the daemon to leave devices alone, in seconds since the epoch; the same once
the daemon has let go of them."""
DAEMON_LOCK, TELEMETRY_LOCK = "daemon", "telemetry"
"""Locks: of a running daemon, and of the one process that records telemetry."""


def released_until(store: Store, now: float) -> float:
    """Return the end of a release in seconds since the epoch; 0.0 where there is none."""
    until = store.note_time(RELEASE_NOTE)
    return until if until > now else 0.0
