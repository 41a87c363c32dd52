"""When the daemon counts as alive."""

from __future__ import annotations

import contextlib
import socket

STARVED = 600.0
"""Seconds without one good look at the record (`REFRESH`) after which the daemon is taken to hang (ours). Legitimate
waits are shorter: a statement waits 5 s for a lock, and every thread that is in line before it as long."""
SILENT = 120.0
"""Seconds without one good look at the record after which nothing that was prepared is served any more (ours): what
does not age must not be believed."""
ANSWER = 10.0
"""Seconds that the HTTP server may take to hang up on a client that hung up (ours)."""


def within_reach(host: str, port: int) -> tuple[str, int] | None:
    """Return where this process itself can reach its own server; None where a firewall may stand between.

    An address of the network may be closed to ourselves by IPAddressAllow=, and that is no reason to restart.
    """
    if host in ("", "0.0.0.0", "localhost") or host.startswith("127."):  # noqa: S104  compared, not bound
        return host if host.startswith("127.") else "127.0.0.1", port
    return ("::1", port) if host in ("::", "::1") else None


def served(address: tuple[str, int]) -> bool:
    """Whether the server takes a client that says nothing, and lets it go: with TLS and passwords too."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=ANSWER) as client:
        client.settimeout(ANSWER)
        client.shutdown(socket.SHUT_WR)
        try:
            while client.recv(4096):
                pass
        except TimeoutError:
            return False
    return True
