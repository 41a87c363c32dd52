"""Rules that decide whether the daemon counts as alive, for systemd's watchdog and for HTTP clients."""

from __future__ import annotations

import contextlib
import logging
import socket
import time

from canaryd.web.server import PLAIN_TEXT, Answer, Request, Route

log = logging.getLogger("canaryd")

STARVED = 600.0
"""Seconds without a successful reading of the store after which the daemon counts as hung (ours). Normal waits are
shorter: a statement waits 5 s for a lock, and so does each thread before it in the queue."""
SILENT = 120.0
"""Seconds without a successful reading of the store after which prepared pages are no longer served (ours), because
nobody should trust a page that never changes."""
ANSWER = 10.0
"""Seconds within which the HTTP server must close the connection of a client that hung up (ours)."""


class Watchdog:
    """A record of the times (monotonic clock) at which the daemon last worked."""

    def __init__(self) -> None:
        self.looked = time.monotonic()
        """When the last successful look at the store ended."""
        self.pulsed = 0.0
        """When scheduler, store and HTTP server were last seen to work."""

    def pulse(self, address: tuple[str, int] | None) -> None:
        """Set `pulsed` to now if the store was read lately and the HTTP server answers at `address`, unless it is None.

        The scheduler calls this function, so the watchdog notices a hung scheduler too. Workers and drivers can hang
        unnoticed, because a restart would not help them.
        """
        since = time.monotonic() - self.looked
        if since > STARVED:
            log.error("no look at the store has succeeded for %.0f s: the watchdog is not fed", since)
        elif address is not None and not served(address):
            log.error("the HTTP server did not answer within %.0f s: the watchdog is not fed", ANSWER)
        else:
            self.pulsed = time.monotonic()

    def guard(self, route: Route) -> Route:
        """Return `route`, but with the answer 503 while the daemon hangs: the prepared page is then out of date."""

        def guarded(request: Request) -> Answer:
            since = time.monotonic() - self.looked
            if since <= SILENT:
                return route(request)
            text = f"canaryd hangs: its last good look at the store was {since:.0f} s ago; read its log, restart it\n"
            return Answer(503, PLAIN_TEXT, text.encode())

        return guarded


def within_reach(host: str, port: int) -> tuple[str, int] | None:
    """Return a loopback address of this process's own server, or None if the server listens on a network address only.

    The systemd option IPAddressAllow= can close a network address to this process, which is no reason for a restart.
    """
    if host in ("", "0.0.0.0", "localhost") or host.startswith("127."):  # noqa: S104  compared, not bound
        return host if host.startswith("127.") else "127.0.0.1", port
    return ("::1", port) if host in ("::", "::1") else None


def served(address: tuple[str, int]) -> bool:
    """Return False if the server accepts a silent client but keeps it connected for `ANSWER` seconds, else True."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=ANSWER) as client:
        client.settimeout(ANSWER)
        client.shutdown(socket.SHUT_WR)
        try:
            while client.recv(4096):
                pass
        except TimeoutError:
            return False
    return True
