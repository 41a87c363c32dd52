"""The names of the notes that daemon and commands leave each other in the store."""

from __future__ import annotations

from canaryd.store.locks import Busy
from canaryd.store.store import Store

BUDGET_NOTE = "budget"
"""Note in the store: device → since when something waits, and why, as JSON; it holds while the daemon runs."""


def daemon_runs(store: Store) -> bool:
    """Return whether a daemon holds this state directory."""
    try:
        with store.lock(DAEMON_LOCK):
            return False
    except Busy:
        return True


LOG_PROBLEM_NOTE = "kernel log problem"
"""Note in the store: why whoever records telemetry cannot read the kernel log; "" when it can."""
LOG_NOTE = "kernel log"
"""Note in the store: how far the kernel log has been counted, as "boot id:sequence"."""
BOOT_NOTE, RUNNING_NOTE = "boot", "running"
"""Notes in the store: the boot id last seen; the boot id under which a daemon runs that has not stopped."""
RELEASE_NOTE, RELEASED_NOTE = "release", "released"
"""Notes in the store: until when `canaryd release` wants devices to be left alone, in seconds since the epoch; and the
same once the daemon has let go of them."""
DAEMON_LOCK, TELEMETRY_LOCK = "daemon", "telemetry"
"""Locks in the store: of a running daemon, and of the one process that records telemetry."""


def released_until(store: Store, now: float) -> float:
    """Return until when devices are to be left alone, in seconds since the epoch; 0.0 where they are not."""
    until = float(store.note(RELEASE_NOTE) or 0.0)
    return until if until > now else 0.0
