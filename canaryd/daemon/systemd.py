"""What a service tells its manager: the protocol of sd_notify(3), in both of its directions.

The manager's variables are taken out of the environment, so that no worker can speak for the daemon.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a message may wait for a manager that does not read; the daemon does not hang with it (ours)."""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True, kw_only=True)
class Manager:
    """Who started the daemon and wants to hear from it; by default nobody does."""

    address: str = ""
    """Its socket: a path, or an abstract name that begins with "@"; "" for nobody."""
    watchdog: float = 0.0
    """Seconds within which it wants a WATCHDOG=1; 0.0 for no watchdog."""

    def tell(self, *assignments: str) -> bool:
        """Send assignments such as "READY=1"; return whether they were handed over. Never raises, never waits long."""
        if not self.address:
            return False
        where = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        text = "\n".join(line.replace("\n", " ") for line in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as way:
                way.settimeout(PATIENCE)
                way.sendto(text.encode(), where)
        except OSError as error:
            log.warning("the service manager could not be told %r at %s: %s", text, self.address, error)
            return False
        return True


def take(environment: MutableMapping[str, str]) -> Manager:
    """Take the manager's variables out of `environment` and return who it is.

    A watchdog that is meant for another process (WATCHDOG_PID) is none; neither is an address that is no UNIX socket.
    """
    address, period, pid = (environment.pop(name, "") for name in VARIABLES)
    mine = pid in ("", str(os.getpid()))
    return Manager(
        address=address if address.startswith(("/", "@")) else "",
        watchdog=int(period) / 1e6 if period.isdecimal() and mine else 0.0,
    )


def reloading() -> tuple[str, str]:
    """Return what announces a reload; READY=1 ends it. The time is that of the monotonic clock, as systemd reads it."""
    return "RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"
