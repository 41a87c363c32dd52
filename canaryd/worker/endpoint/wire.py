"""One exchange over HTTP: every wait ends at one moment, and what is read is bounded, whatever the server sends."""

from __future__ import annotations

import http.client
import io
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
"""Seconds to wait for a connection; a server on this host needs almost none."""
MAX_BYTES = 16 << 20
"""Most bytes of an answer, status lines and headers included; 1,024 tokens with their alternatives take about 1 MB,
and 20,000 scored tokens of a prompt about 10 MB."""
OTHER_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (x509_vfy.h)."""
OUT_OF_DATE = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
T = TypeVar("T")


class NotListening(Skip):
    """The connection was refused, so no server received the request."""


class _TooLong(Exception):
    """More than `MAX_BYTES` came."""


class _Socket(io.RawIOBase):
    """A connected socket for `http.client`, whose operations together take no longer than until `end`.

    A socket's own timeout begins anew with every byte, so that a server could drip its answer for ever.
    """

    def __init__(self, raw: socket.socket, end: float) -> None:
        self._raw, self._end = raw, end
        self.received = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait()
        size = self._raw.recv_into(buffer)
        self.received += size
        if self.received > MAX_BYTES:
            raise _TooLong
        return size

    def sendall(self, data: Any) -> None:
        self._wait()
        self._raw.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def close(self) -> None:
        """Do nothing: `http.client` closes before it has read the body; `hang_up` closes."""

    def hang_up(self) -> None:
        self._raw.close()

    def _wait(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._raw.settimeout(left)


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
        self._where, self._timeout, self._size = f"{method} {site.origin}{path}", site.timeout, 0
        self._socket = _Socket(self._connected(site, end), end)
        self._connection = http.client.HTTPConnection(*site.address)
        self._connection.sock = self._socket
        headers = {"Accept": "application/json, text/event-stream", "User-Agent": "canaryd"}
        if site.key:
            headers["Authorization"] = f"Bearer {site.key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        try:
            self._guarded(lambda: self._connection.request(method, path, data, headers))
            self._response: http.client.HTTPResponse = self._guarded(self._connection.getresponse)
        except BaseException:
            self._socket.hang_up()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        self._socket.hang_up()

    @property
    def status(self) -> int:
        """The status of the answer."""
        return self._response.status

    def header(self, name: str) -> str:
        """Return a header of the answer, "" where there is none."""
        return self._response.getheader(name) or ""

    def parts(self) -> Iterator[bytes]:
        """Yield the body as it comes; raise `Skip` where it is late, incomplete or too long."""
        while part := self._guarded(lambda: self._response.read1(1 << 16)):
            self._size += len(part)
            yield part
        wanted = self.header("Content-Length")
        if wanted.isdecimal() and self._size < int(wanted[:20]):
            raise Skip(f"{self._where}: the answer was cut off after {self._size} of {wanted[:20]} bytes")

    def _connected(self, site: Site, end: float) -> socket.socket:
        wait = min(CONNECT, end - time.monotonic())
        try:
            raw = _connect(site.address, time.monotonic() + wait)
        except ConnectionRefusedError:
            raise NotListening(
                f"{self._where}: connection refused: nothing listens there; start the server, or correct url"
            ) from None
        except TimeoutError:
            raise Skip(
                f"{self._where}: no connection within {wait:g} s: wrong address, a firewall, or a silent name server"
            ) from None
        except socket.gaierror as error:
            raise Skip(f"{self._where}: unknown host name: {error.strerror}") from None
        except OSError as error:
            raise Skip(f"{self._where}: cannot be reached: {error.strerror or error}") from None
        if site.tls is None:
            return raw
        wait = max(0.001, min(CONNECT, end - time.monotonic()))
        try:
            raw.settimeout(wait)  # of the whole handshake
            return site.tls.wrap_socket(raw, server_hostname=site.address[0])
        except OSError as error:
            raw.close()
            late = f"connected, but no TLS within {wait:.2g} s: a hung server, or one that speaks http"
            raise Skip(f"{self._where}: {late if isinstance(error, TimeoutError) else _untrusted(error)}") from None

    def _guarded(self, action: Callable[[], T]) -> T:
        """Return what an action on the connection returns; raise `Skip` where it fails."""
        try:
            return action()
        except TimeoutError:
            raise Skip(
                f"{self._where}: connected, but no complete answer within {self._timeout:g} s "
                f"({self._socket.received} bytes came): slow, overloaded or hung"
            ) from None
        except _TooLong:
            raise Skip(f"{self._where}: the answer is longer than the limit of {MAX_BYTES >> 20} MiB") from None
        except http.client.IncompleteRead:
            raise Skip(f"{self._where}: the answer was cut off after {self._size} bytes") from None
        except (http.client.HTTPException, OSError) as error:
            # RemoteDisconnected: a server that crashed on the request, or one that does not speak HTTP.
            raise Skip(f"{self._where}: {_broken(error, self._size)}") from None


def _connect(address: tuple[str, int], end: float) -> socket.socket:
    """Return a connection to the first address of a name that accepts one until `end`; raise `OSError` for none."""
    failed: OSError = TimeoutError()
    for family, kind, protocol, _, place in _resolved(address, end):
        raw = socket.socket(family, kind, protocol)
        try:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            raw.settimeout(left)
            raw.connect(place)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raw.close()
            failed = error
        else:
            return raw
    raise failed


def _resolved(address: tuple[str, int], end: float) -> list[Any]:
    """Return the addresses of a name as `socket.getaddrinfo` does, which itself knows no deadline."""
    found: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(error)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        answer = found.get(timeout=max(0.0, end - time.monotonic()))
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, OSError):
        raise answer
    return answer


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


def _broken(error: Exception, size: int) -> str:
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer: it crashed on the request, or expects https"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed after {size} bytes of the answer: {error.reason or error}"
    if isinstance(error, OSError):
        return f"the connection was lost after {size} bytes of the answer: {error.strerror or error}"
    return f"the server does not speak HTTP ({type(error).__name__})"
