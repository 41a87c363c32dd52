"""Messages to the service manager: the protocol of sd_notify(3).

The manager's variables are removed from the environment, so that no worker can speak for the daemon.
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
"""Seconds that a message waits for a service manager that does not read it, so that the daemon does not hang too
(ours)."""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True, kw_only=True)
class Manager:
    """The service manager that started the daemon; by default there is no manager."""

    address: str = ""
    """Address of the manager's socket: a path, an abstract name that begins with "@", or "" for no manager."""
    watchdog: float = 0.0
    """Seconds within which the manager expects a WATCHDOG=1, or 0.0 if it has no watchdog."""

    def tell(self, *assignments: str) -> bool:
        """Send assignments such as "READY=1" to the manager; return False on failure. Never raises or waits long."""
        if not self.address:
            return False
        where = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        text = "\n".join(line.replace("\n", " ") for line in assignments)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(PATIENCE)
                sender.sendto(text.encode(), where)
        except OSError as error:
            log.warning("cannot send %r to the service manager at %s: %s", text, self.address, error)
            return False
        return True


def take(environment: MutableMapping[str, str]) -> Manager:
    """Remove the manager's variables from `environment`, and return the manager that they describe.

    Ignores a watchdog for another process (WATCHDOG_PID), and an address that is not a UNIX socket.
    """
    address, period, pid = (environment.pop(name, "") for name in VARIABLES)
    mine = pid in ("", str(os.getpid()))
    return Manager(
        address=address if address.startswith(("/", "@")) else "",
        watchdog=int(period) / 1e6 if period.isdecimal() and mine else 0.0,
    )


def reloading() -> tuple[str, str]:
    """Return the assignments that begin a reload for systemd: RELOADING=1 and the monotonic time. READY=1 ends it."""
    return "RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"
