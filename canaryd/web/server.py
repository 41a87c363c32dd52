"""A small HTTP server for prepared answers: every client has a thread and deadlines of its own."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

PLAIN_TEXT = "text/plain; charset=utf-8"
"""Media type of the server's own short answers."""

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer: a browser runs and fetches nothing, whatever text a device puts into a page."""


class Answer(NamedTuple):
    """The answer of a route."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()
    """Further header lines, e.g. "Content-Encoding: gzip"."""


Route = Callable[[Mapping[str, str]], Answer]
"""Takes the request's headers by their names in lower case; returns the answer. It must not wait for anything."""


class Gate(Protocol):
    """Decides which clients are served, at every connection and every request; `canaryd.web.auth.WebConfig` is one."""

    def enter(self, request: socket.socket, patience: float) -> tuple[socket.socket, object]:
        """Return (stream, pass) after a TLS handshake of at most `patience` seconds.

        The pass of a connection in plain text is None. Called in the connection's own thread. Raises `OSError` where
        the client is refused.
        """

    def holds(self, admitted: object) -> bool:
        """Return whether a connection with this pass is still served: not after other keys, rules or another gate.

        A connection in plain text is served as long as TLS is off: a change of rules does not break it.
        """

    def refusal(self, headers: Mapping[str, str], client: str) -> Answer | None:
        """Return the answer to a request that is refused, None for one that is not; may wait for its turn."""

    def headers(self) -> Mapping[str, str]:
        """Return headers of every answer, by name; they replace those of `SECURITY`."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one client. Times in seconds."""

    connections: int = 64
    head: float = 5.0
    """From a request's first byte to its blank line; also the silence allowed after connecting."""
    idle: float = 30.0
    """Silence allowed between two requests of one connection."""
    write: float = 10.0
    """For a whole answer."""
    patience: float = 1.0
    """An answer that takes longer than this loses its connection when another client needs the place."""


_LIMITS = Limits()
_MAX_REQUEST_LINE = 8 * 1024
_MAX_HEAD = 32 * 1024


class Server:
    """A small HTTP/1.1 server that answers GET and HEAD from prepared bytes.

    Each connection has a thread and deadlines of its own, so that a slow or silent client delays no other. When
    all places are taken, a new client gets the place of the one that has waited longest.
    """

    def __init__(
        self, host: str, port: int, routes: Mapping[str, Route], limits: Limits = _LIMITS, *, gate: Gate | None = None
    ) -> None:
        """Bind to `host` (IPv4, IPv6 or a name) and `port` (0: any free one); `routes` maps paths to answers.

        Without a gate every client that reaches the address is answered, in plain text. Raises `OSError` that names
        the address and what to do.
        """
        self._listener = _Listener(host, port, routes, limits)
        self._listener.gate = gate
        self._thread = threading.Thread(target=self._listener.serve_forever, name="canaryd-http", daemon=True)

    @property
    def port(self) -> int:
        """The port that is bound."""
        port: int = self._listener.socket.getsockname()[1]
        return port

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        address: str = self._listener.socket.getsockname()[0]
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback

    def guard(self, gate: Gate | None) -> None:
        """Replace the gate: connections that the new one would refuse are closed."""
        self._listener.gate = gate

    @property
    def refused(self) -> int:
        """Connections closed unanswered so far because every place was taken."""
        return self._listener.refused

    def start(self) -> None:
        """Start to answer, in threads of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and hang up on every client; takes up to half a second."""
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()
        self._listener.hang_up()


_ADVICE = {
    errno.EADDRINUSE: "another process, perhaps another canaryd, listens there: stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have that address: choose one that it has",
    errno.EACCES: "ports below 1024 need CAP_NET_BIND_SERVICE: choose a higher port",
}


class _Listener(socketserver.ThreadingTCPServer):
    # ThreadingHTTPServer, minus its look-up of the host's full name, which may wait for a name server.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128
    gate: Gate | None = None

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], limits: Limits) -> None:
        self.routes = routes
        self.limits = limits
        self.refused = 0
        self._lock = threading.Lock()
        # Connection → (is it being answered?, since when), the longest unchanged first.
        self._places: dict[socket.socket, tuple[bool, float]] = {}
        try:
            # No host is every interface, of both families where there are two: glibc does not look up an empty name.
            self._both = not host and socket.has_dualstack_ipv6()
            name = "::" if self._both else host or None
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__((str(address[0]), port), _Connection)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            advice = _ADVICE.get(error.errno or 0, "choose another address")
            raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}; {advice}") from error

    def server_bind(self) -> None:
        if self._both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # out of file descriptors, the pending connection would otherwise wake us in a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            admitted = len(self._places) < self.limits.connections or self._evict()
            if admitted:
                self._places[request] = (False, time.monotonic())
            else:
                self.refused += 1
        if admitted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _evict(self) -> bool:
        now = time.monotonic()
        for request, (answering, since) in self._places.items():
            if not answering or now - since > self.limits.patience:
                del self._places[request]
                _hang_up(request)
                return True
        return False

    def turn(self, request: socket.socket, *, answering: bool) -> bool:
        """Note that a connection is now being answered, or idle; False when it has lost its place."""
        with self._lock:
            if self._places.pop(request, None) is None:
                return False
            self._places[request] = (answering, time.monotonic())
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # forgotten before it is closed: _evict must never meet a reused descriptor
            self._places.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        with self._lock:
            for request in self._places:
                _hang_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (socketserver's signature)
        log.error("answering %s failed", client_address, exc_info=True)  # noqa: LOG014  (called while handling)


def _hang_up(request: socket.socket) -> None:
    """Make the thread that reads from or writes to `request` give up at once."""
    with contextlib.suppress(OSError):  # the client was faster
        request.shutdown(socket.SHUT_RDWR)


class _BadRequestError(Exception):
    """The message is the answer to the client."""


class _Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool


def _parse(head: bytes) -> _Request:
    first, *lines = re.split("\r?\n", head.decode("latin-1"))
    if len(first) > _MAX_REQUEST_LINE:
        raise _BadRequestError(f"request line longer than {_MAX_REQUEST_LINE} bytes")
    match = re.fullmatch(r"([!-~]+) ([!-~]+) HTTP/1\.([0-9])", first)
    if not match:
        raise _BadRequestError('malformed request line; wanted "GET /metrics HTTP/1.1"')
    headers: dict[str, str] = {}
    for line in lines:
        field = re.fullmatch(r"([!-9;-~]+):(.*)", line)  # blanks are stripped below: here, thousands would take seconds
        if not field:
            raise _BadRequestError('malformed header; wanted "Name: value"')
        name = field[1].lower()
        value = field[2].strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    # A body is never read, so what follows it could be taken for the next request.
    body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    keep_alive = match[3] != "0" and "close" not in headers.get("connection", "").lower() and not body
    return _Request(match[1], match[2].partition("?")[0], headers, keep_alive)


class _Connection(socketserver.BaseRequestHandler):
    """One client, in a thread of its own: all that waits for the client happens from `handle` on, never earlier."""

    server: _Listener
    request: socket.socket

    def handle(self) -> None:
        self._received = b""
        self._stream = self.request
        self._gate = self.server.gate
        self._pass: object = None
        patience = self.server.limits.head
        with contextlib.suppress(OSError):  # gone, too slow, evicted or refused: there is no client to answer
            # TLS writes in records: the last one would wait 40 ms for a delayed acknowledgement of those before it.
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._gate is not None:
                self._stream, self._pass = self._gate.enter(self.request, patience)
            try:
                while self._exchange(patience) and self.server.turn(self.request, answering=False):
                    patience = self.server.limits.idle
                self._linger()
            finally:
                if self._stream is not self.request:
                    self._stream.close()

    def _exchange(self, patience: float) -> bool:
        """Answer one request, waiting `patience` for it to begin; True if another may follow."""
        request = None
        extra: Mapping[str, str] = {}
        try:
            head = self._read_head(patience)
            if head is None or not self._admitted() or not self.server.turn(self.request, answering=True):
                return False
            if self._gate is not None:
                extra = self._gate.headers()
            request = _parse(head)
        except _BadRequestError as error:
            answer = Answer(400, PLAIN_TEXT, f"bad request: {error}\n".encode())
        else:
            refusal = self._gate.refusal(request.headers, self.client_address[0]) if self._gate is not None else None
            answer = refusal or self._answer(request)
        keep_alive = request is not None and request.keep_alive
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            *(f"{name}: {value}" for name, value in {**SECURITY, **extra}.items()),
            *answer.headers,
            f"Connection: {'keep-alive' if keep_alive else 'close'}",
        ]
        body = b"" if request is not None and request.method == "HEAD" else answer.body
        self._send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return keep_alive

    def _admitted(self) -> bool:
        """Return whether the present gate serves this connection; a client that is cut off connects again."""
        self._gate = self.server.gate
        return self._pass is None if self._gate is None else self._gate.holds(self._pass)

    def _send(self, data: bytes) -> None:
        """Send all of it within one deadline; TLS would otherwise restart the deadline with each record."""
        deadline = time.monotonic() + self.server.limits.write
        rest = memoryview(data)
        while rest:
            if (remaining := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            self._stream.settimeout(remaining)
            rest = rest[self._stream.send(rest) :]

    def _answer(self, request: _Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return Answer(405, PLAIN_TEXT, b"method not allowed: use GET or HEAD\n", ("Allow: GET, HEAD",))
        route = self.server.routes.get(request.path)
        if route is None:
            return Answer(404, PLAIN_TEXT, f"not found: use one of {', '.join(sorted(self.server.routes))}\n".encode())
        try:
            return route(request.headers)
        except Exception:
            log.exception("%s failed", request.path)
            return Answer(500, PLAIN_TEXT, b"internal error: see the log of canaryd\n")

    def _read_head(self, patience: float) -> bytes | None:
        """Return the next request up to its blank line; None when none arrives in time."""
        limits = self.server.limits
        deadline = time.monotonic() + (limits.head if self._received else patience)
        while not (end := re.search(b"\r?\n\r?\n", self._received)):
            if len(self._received) > _MAX_REQUEST_LINE and b"\n" not in self._received:
                raise _BadRequestError(f"request line longer than {_MAX_REQUEST_LINE} bytes")
            if len(self._received) > _MAX_HEAD:
                raise _BadRequestError(f"headers longer than {_MAX_HEAD} bytes")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            self._stream.settimeout(remaining)
            chunk = self._stream.recv(8192)
            if not chunk:
                return None
            if not self._received:
                deadline = time.monotonic() + limits.head
            self._received = (self._received + chunk).lstrip(b"\r\n")
        head, self._received = self._received[: end.start()], self._received[end.end() :]
        return head

    def _linger(self) -> None:
        """End our side and read on for a moment: closing with unread bytes would destroy the answer."""
        if self._stream is not self.request:  # TLS has an end of its own, before that of the connection
            self._stream.settimeout(self.server.limits.patience)
            with contextlib.suppress(OSError, ValueError):
                self._stream.unwrap()  # type: ignore[attr-defined]
        self.request.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + self.server.limits.patience
        while (remaining := deadline - time.monotonic()) > 0:
            self.request.settimeout(remaining)
            if not self.request.recv(65536):
                return
