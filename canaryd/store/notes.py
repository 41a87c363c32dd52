"""Names of the notes and locks that the daemon and the commands use to communicate."""

from __future__ import annotations

from canaryd.store.store import Store

BUDGET_NOTE = "budget"
"""Name of a note: device → the time and the reason of its postponed test, as JSON; valid only while the daemon runs."""


def daemon_runs(store: Store) -> bool:
    """Return whether a daemon uses this state directory; raise `Unreadable` if this user has no right to see it."""
    return store.is_locked(DAEMON_LOCK)


LOG_PROBLEM_NOTE = "kernel log problem"
"""Name of a note: the reason why the process that records telemetry cannot read the kernel log, or "" if it can."""
LOG_NOTE = "kernel log"
"""Name of a note: the newest record of the kernel log that is already counted, as "boot id:sequence"."""
BOOT_NOTE, RUNNING_NOTE = "boot", "running"
"""Names of two notes: the boot id that was seen last, and the boot id of a daemon that started and has not stopped."""
RELEASE_NOTE, RELEASED_NOTE = "release", "released"
"""Names of two notes with a time (epoch s). `canaryd release` sets the first: until that time the daemon must not
use devices. The daemon copies the time to the second note when it no longer uses any device."""
DAEMON_LOCK, TELEMETRY_LOCK = "daemon", "telemetry"
"""Names of two locks: of a running daemon, and of the single process that records telemetry."""


def released_until(store: Store, now: float) -> float:
    """Return the time (epoch s) at which a release ends, or 0.0 if no release is in force."""
    until = store.note_time(RELEASE_NOTE)
    return until if until > now else 0.0
