"""Names of the notes and locks by which the daemon and the commands communicate."""

from __future__ import annotations

from canaryd.store.store import Store

BUDGET_NOTE = "budget"
"""Note: device → since when and why a test is postponed, as JSON; valid only while the daemon runs."""


def daemon_runs(store: Store) -> bool:
    """Return whether a daemon uses this state directory; raise `Unreadable` if this user may not know it."""
    return store.is_locked(DAEMON_LOCK)


LOG_PROBLEM_NOTE = "kernel log problem"
"""Note: the reason why the process that records telemetry cannot read the kernel log, or "" if it can."""
LOG_NOTE = "kernel log"
"""Note: the newest kernel log record that is already counted, as "boot id:sequence"."""
BOOT_NOTE, RUNNING_NOTE = "boot", "running"
"""Notes: the boot id of the last look; the boot id of a daemon that started and has not stopped."""
RELEASE_NOTE, RELEASED_NOTE = "release", "released"
"""Notes: the time (epoch s) until which `canaryd release` asks the daemon not to use devices; the same time, once the
daemon uses no device any more."""
DAEMON_LOCK, TELEMETRY_LOCK = "daemon", "telemetry"
"""Locks: one of a running daemon, and one of the single process that records telemetry."""


def released_until(store: Store, now: float) -> float:
    """Return the time (epoch s) at which a release ends, or 0.0 if no release is in force."""
    until = store.note_time(RELEASE_NOTE)
    return until if until > now else 0.0
