"""When the daemon counts as alive, for systemd's watchdog and for HTTP clients."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping

from canaryd.web.server import PLAIN_TEXT, Answer, Route

log = logging.getLogger("canaryd")

STARVED = 600.0
"""Seconds without a successful look at the store (`REFRESH`) after which the daemon counts as hung (ours). Legitimate
waits are shorter: a statement waits 5 s for a lock, and every thread that is in line before it as long."""
SILENT = 120.0
"""Seconds without a successful look at the store after which no prepared page is served any more (ours): a page that
does not age must not be believed."""
ANSWER = 10.0
"""Seconds that the HTTP server may take to hang up on a client that hung up (ours)."""


class Watchdog:
    """Knows when the daemon last worked. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.looked = time.monotonic()
        """When the last successful look at the store ended."""
        self.pulsed = 0.0
        """When scheduler, store and HTTP server were last seen to work."""

    def pulse(self, address: tuple[str, int] | None) -> None:
        """Check that the daemon works: the scheduler runs this, the store is read, and HTTP clients are served.

        docs/systemd.md lists what may hang without an end of the pulse, and why.
        """
        since = time.monotonic() - self.looked
        if since > STARVED:
            log.error("no look at the store has succeeded for %.0f s: the watchdog is not fed", since)
        elif address is not None and not served(address):
            log.error("the HTTP server did not answer within %.0f s: the watchdog is not fed", ANSWER)
        else:
            self.pulsed = time.monotonic()

    def guard(self, route: Route) -> Route:
        """Return a route that answers 503 while the daemon hangs: a page prepared before says nothing of now."""

        def guarded(headers: Mapping[str, str]) -> Answer:
            since = time.monotonic() - self.looked
            if since <= SILENT:
                return route(headers)
            text = f"canaryd hangs: its last good look at the store was {since:.0f} s ago; read its log, restart it\n"
            return Answer(503, PLAIN_TEXT, text.encode())

        return guarded


def within_reach(host: str, port: int) -> tuple[str, int] | None:
    """Return where this process can reach its own server; None where a firewall may stand between.

    IPAddressAllow= may close an address of the network to ourselves, and that is no reason to restart.
    """
    if host in ("", "0.0.0.0", "localhost") or host.startswith("127."):  # noqa: S104  compared, not bound
        return host if host.startswith("127.") else "127.0.0.1", port
    return ("::1", port) if host in ("::", "::1") else None


def served(address: tuple[str, int]) -> bool:
    """Return whether the server takes a silent client and lets it go; this works with TLS and passwords too."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=ANSWER) as client:
        client.settimeout(ANSWER)
        client.shutdown(socket.SHUT_WR)
        try:
            while client.recv(4096):
                pass
        except TimeoutError:
            return False
    return True
