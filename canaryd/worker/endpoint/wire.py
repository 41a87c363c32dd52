"""One exchange through urllib3: it ends at one moment, and an answer is bounded, whatever the server sends.

urllib3 is loaded with the first request: `worker.python`, which may lack it, reads this module to describe the probes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from canaryd.facts import printable
from canaryd.probe import Skip

CONNECT = 10.0
"""Seconds to wait for a connection, TLS included; a server on this host needs almost none."""
MAX_BYTES = 16 << 20
"""Most bytes of an answer; 1,024 tokens with their alternatives take about 1 MB, and 20,000 scored tokens of a prompt
about 10 MB."""
OTHER_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (x509_vfy.h)."""
OUT_OF_DATE = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
T = TypeVar("T")


class NotListening(Skip):
    """The connection was refused, so no server received the request."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where requests go, and with what."""

    origin: str
    """Scheme, host and port, for messages."""
    address: tuple[str, int]
    tls: ssl.SSLContext | None = None
    key: str = field(default="", repr=False)
    timeout: float
    """Seconds that a request may take, for messages."""


class Exchange:
    """One request and the head of its answer; the caller closes it."""

    def __init__(self, site: Site, method: str, path: str, body: Mapping[str, Any] | None, end: float) -> None:
        """Connect and ask; `end` is the last moment of the monotonic clock for all of it, the body included.

        Raises `NotListening` where the connection is refused, `Skip` where no head of an answer comes.
        """
        from urllib3.connection import HTTPConnection, HTTPSConnection

        self._where, self._timeout, self._size, self._late = f"{method} {site.origin}{path}", site.timeout, 0, False
        wait = max(0.001, min(CONNECT, end - time.monotonic()))
        host, port = site.address
        # Not a pool: it reads the whole head out of reach, and a server may drip that for ever. No proxy, no redirect.
        self._connection = (
            HTTPSConnection(host, port, timeout=wait, ssl_context=site.tls)
            if site.tls
            else HTTPConnection(host, port, timeout=wait)
        )
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "canaryd"}
        if site.key:
            headers["Authorization"] = f"Bearer {site.key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        self._connect(wait)
        self._socket, self._connection.timeout = self._connection.sock, None
        self._timer = threading.Timer(end - time.monotonic(), self._hang_up)
        self._timer.daemon = True
        self._timer.start()
        try:
            self._guarded(
                lambda: self._connection.request(
                    method, path, data, headers, preload_content=False, decode_content=False
                )
            )
            self._response = self._guarded(self._connection.getresponse)
        except BaseException:
            self._timer.cancel()
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        self._response.close()
        self._connection.close()

    @property
    def status(self) -> int:
        """The status of the answer."""
        return self._response.status

    def header(self, name: str) -> str:
        """Return a header of the answer, "" where there is none."""
        return self._response.headers.get(name, "")

    def parts(self) -> Iterator[bytes]:
        """Yield the body as it comes; raise `Skip` where it is late, incomplete or too long."""
        while part := self._guarded(lambda: self._response.read1(1 << 16)):
            self._size += len(part)
            if self._size > MAX_BYTES:
                raise Skip(f"{self._where}: the answer is longer than the limit of {MAX_BYTES >> 20} MiB")
            yield part

    def _hang_up(self) -> None:
        """End every wait for the server: a socket's timeout begins anew with every byte, so one may drip for ever."""
        self._late = True
        with contextlib.suppress(OSError):  # the server was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def _connect(self, wait: float) -> None:
        """Connect beside this thread, which then has a deadline: `socket.getaddrinfo` knows none."""
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def connect() -> None:
            try:
                self._connection.connect()
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                done.put(error)
            else:
                done.put(None)

        threading.Thread(target=connect, daemon=True).start()
        try:
            error = done.get(timeout=wait)
        except queue.Empty:
            error = TimeoutError()
        if error is None:
            return
        cause, connected = error.__cause__ or error, self._connection.sock is not None
        self._connection.close()
        if isinstance(cause, ConnectionRefusedError):
            raise NotListening(
                f"{self._where}: connection refused: nothing listens there; start the server, or correct url"
            ) from None
        if isinstance(cause, TimeoutError):
            text = (
                f"connected, but no TLS within {wait:.2g} s: a hung server, or one that speaks http"
                if connected
                else f"no connection within {wait:g} s: wrong address, a firewall, or a silent name server"
            )
        elif isinstance(cause, socket.gaierror):
            text = f"unknown host name: {cause.strerror}"
        elif connected and isinstance(cause, OSError):
            text = _untrusted(cause)
        else:
            text = f"cannot be reached: {getattr(cause, 'strerror', None) or printable(str(cause))}"
        raise Skip(f"{self._where}: {text}") from None

    def _guarded(self, action: Callable[[], T]) -> T:
        """Return what an action on the connection returns; raise `Skip` where it fails, or is late."""
        from urllib3.exceptions import HTTPError

        failed: BaseException | None = None
        try:
            result = action()
        except (HTTPError, http.client.HTTPException, OSError) as error:
            failed = error.__cause__ or error
        if self._late:
            raise Skip(
                f"{self._where}: connected, but no complete answer within {self._timeout:g} s "
                f"({self._size} bytes came): slow, overloaded or hung"
            )
        if failed:
            raise Skip(f"{self._where}: {_broken(failed, self._size)}")
        return result


def _untrusted(error: OSError) -> str:
    """Return why a TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = printable(str(error.verify_message))[:200].rstrip(".")
        if error.verify_code in OTHER_NAME:
            return f"its certificate is for another name ({message}): write a name of the certificate in url"
        if error.verify_code in OUT_OF_DATE:
            return f"its certificate is out of date ({message}): renew it, or correct this machine's clock"
        return f"its certificate is not accepted: {message}; name its authority with ca_file"
    if isinstance(error, ssl.SSLError):
        return f"the server does not speak TLS ({error.reason or error}): write http://, or configure the server"
    return f"the connection was lost during the TLS handshake: {error.strerror or error}"


def _broken(error: BaseException, size: int) -> str:
    """Return why no complete answer came after `size` bytes of one."""
    from urllib3.exceptions import IncompleteRead

    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer: it crashed on the request, or expects https"
    if isinstance(error, IncompleteRead):  # urllib3's: fewer bytes than Content-Length says
        return f"the answer was cut off after {size} of {min(size + error.expected, 10**20)} bytes"
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer was cut off after {size} bytes"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed after {size} bytes of the answer: {error.reason or error}"
    if isinstance(error, OSError):
        return f"the connection was lost after {size} bytes of the answer: {error.strerror or error}"
    return f"the server does not speak HTTP ({type(error).__name__})"
