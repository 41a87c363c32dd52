"""The daemon's HTTP server: prepared answers, a thread for each client, and a limit on every wait for a client."""

from __future__ import annotations

import contextlib
import errno
import io
import ipaddress
import logging
import math
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from canaryd.web.tls import Tls

log = logging.getLogger(__name__)

PLAIN_TEXT = "text/plain; charset=utf-8"
"""Media type of the server's own short answers."""

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer. They forbid a browser to run or fetch anything, whatever text a device puts into a page."""


class Answer(NamedTuple):
    """The answer of a route."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()
    """Additional header lines, e.g. "Content-Encoding: gzip"."""
    bare: bool = False
    """Whether only the body is sent, as HAProxy's agent checks want it."""


class Request(NamedTuple):
    """What a client asks for."""

    headers: Mapping[str, str]
    """Names in lower case."""
    path: str = ""
    query: str = ""
    """What follows "?", as it was sent."""


Route = Callable[[Request], Answer]
"""Function request → answer. It must not wait for anything."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for clients."""

    connections: int = 64
    """Number of open connections above which a new one replaces the oldest."""
    seconds: float = 15.0
    """Time for a whole connection, with the handshake of TLS; a late client is cut off at most half a second later."""


_LIMITS = Limits()
_MAX_HEAD = 32 * 1024
_HTTPS = b"HTTP/1.0 400 Bad Request\r\n\r\nthis is an HTTPS server: write https:// for http://\n"
_QUIET = 60.0
"""Minimum seconds between two log lines about clients that TLS refused, so that they do not fill the log (ours)."""


class Server(socketserver.ThreadingTCPServer):
    """A small HTTP/1.1 server that answers GET and HEAD from prepared bytes, one request per connection.

    A slow or silent client delays no other. If all places are taken, a new connection replaces the oldest. A route
    whose path ends with "/" also answers every path below it, but for the root.
    """

    # Not http.server's own ThreadingHTTPServer: it looks up the host's full name, and may wait for a name server.
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, routes: Mapping[str, Route], limits: Limits = _LIMITS, *, tls: Tls | None = None
    ) -> None:
        """Bind to `host` (IPv4, IPv6 or a name) and `port` (0: any free one); `routes` maps paths to answers.

        Raises `OSError` with a message that names the address and what to do.
        """
        self.routes, self.limits, self.tls = routes, limits, tls
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}  # connection → when it is cut off (monotonic), the oldest first
        self._warned = -_QUIET
        self._thread = threading.Thread(target=self.serve_forever, name="canaryd-http", daemon=True)
        try:
            # No host is every interface, of both families where there are two: glibc does not look up an empty name.
            self._both = not host and socket.has_dualstack_ipv6()
            name = "::" if self._both else host or None
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family, _, _, _, address = found[0]
            super().__init__((str(address[0]), port), _Connection)
        except OSError as error:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            advice = "choose an address of this machine, and a port above 1023"
            if error.errno == errno.EADDRINUSE:
                advice = "stop what listens there, perhaps another canaryd, or choose another port"
            raise OSError(error.errno, f"cannot listen on {where}: {error.strerror}; {advice}") from error

    @property
    def port(self) -> int:
        """The port that the server is bound to."""
        return int(self.server_address[1])

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        return ipaddress.ip_address(str(self.server_address[0]).partition("%")[0]).is_loopback

    def start(self) -> None:
        """Start to answer requests, in separate threads."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close the connections of all clients; takes up to half a second."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        self._cut_off(math.inf)

    def server_bind(self) -> None:
        """Bind the socket, to IPv4 and IPv6 if no host is named."""
        if self._both:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Return the next connection without waiting for its client."""
        try:
            request, address = super().get_request()
        except OSError:
            time.sleep(0.1)  # out of file descriptors, the pending connection would otherwise wake us in a busy loop
            raise
        if self.tls:
            request = self.tls.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread."""
        with self._lock:
            if len(self._ends) >= self.limits.connections:
                self._hang_up(next(iter(self._ends)))
            self._ends[request] = time.monotonic() + self.limits.seconds
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut off late clients. `serve_forever` calls this twice a second and after every new connection."""
        self._cut_off(time.monotonic())

    def end_soon(self, request: socket.socket) -> None:
        """Give a connection one more second."""
        with self._lock:
            if request in self._ends:
                self._ends[request] = time.monotonic() + 1.0

    def _cut_off(self, now: float) -> None:
        with self._lock:
            for request in [request for request, end in self._ends.items() if end <= now]:
                self._hang_up(request)

    def _hang_up(self, request: socket.socket) -> None:
        del self._ends[request]
        with contextlib.suppress(OSError):  # the client was faster
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # not TLS's own, which is the other thread's

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its place."""
        with self._lock:  # forgotten before it is closed: nobody hangs up on a reused descriptor
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (socketserver's signature)
        """Log an error of canaryd itself; a client that left or was cut off is not logged."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.error("answering %s failed", client_address, exc_info=True)  # noqa: LOG014  (called while handling)

    def warn(self, client: str, why: str) -> None:
        """Log that TLS refused a client, at most once a minute."""
        now = time.monotonic()
        if now - self._warned >= _QUIET:
            self._warned = now
            log.warning("%s was not let in: %s", client, why)


class _Connection(BaseHTTPRequestHandler):
    """One client, served in its own thread. Waits have no limit here, because the server cuts off late clients."""

    server: Server
    rfile: io.BufferedReader
    default_request_version = "HTTP/1.0"  # a request line without a version is no HTTP/0.9, whose answers have no head
    disable_nagle_algorithm = True  # TLS writes in records: the last would wait 40 ms for an acknowledgement

    def handle(self) -> None:
        if self.server.tls is None or self._shake_hands():
            with self.rfile as stream:
                head = self._read_head(stream)
            if head:
                self._answer(head)
        # To close with unread bytes would destroy the answer: end our side, and read on for a moment.
        self.server.end_soon(self.request)
        socket.socket.shutdown(self.request, socket.SHUT_WR)
        while socket.socket.recv(self.request, 65536):
            pass

    def _shake_hands(self) -> bool:
        try:
            self.request.do_handshake()
        except ssl.SSLEOFError:
            return False  # it hung up, as the daemon's own look at this server does
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                socket.socket.sendall(self.request, _HTTPS)
            self.server.warn(self.client_address[0], (error.reason or str(error)).lower().replace("_", " "))
            return False
        return True

    def _read_head(self, stream: io.BufferedReader) -> bytes:
        """Return a request up to its blank line, or more bytes than are allowed, or b"" if the client hung up early."""
        head = bytearray()
        while len(head) <= _MAX_HEAD:
            line = stream.readline(_MAX_HEAD + 1 - len(head))
            head += line
            if not line:
                return b""
            if line in (b"\r\n", b"\n"):
                break
        return bytes(head)

    def _answer(self, head: bytes) -> None:
        self.command = ""
        self.raw_requestline, _, headers = head.partition(b"\n")
        self.rfile = io.BytesIO(headers)  # type: ignore[assignment]  # as much of the stream as is asked for
        if len(head) > _MAX_HEAD:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.parse_request():
            self._reply(self._found())

    def _found(self) -> Answer:
        routes, (path, _, query) = self.server.routes, self.path.partition("?")
        route = routes.get(path) or routes.get(f"/{path.split('/')[1]}/" if path.count("/") > 1 else "")
        if self.command not in ("GET", "HEAD"):
            return Answer(405, PLAIN_TEXT, b"method not allowed: use GET or HEAD\n", ("Allow: GET, HEAD",))
        if route is None:
            return Answer(404, PLAIN_TEXT, f"not found: use one of {', '.join(sorted(routes))}\n".encode())
        headers = {name.lower(): ", ".join(self.headers.get_all(name, ())) for name in self.headers}
        try:
            return route(Request(headers, path, query))
        except Exception:
            log.exception("%s failed", path)
            return Answer(500, PLAIN_TEXT, b"internal error: see the log of canaryd\n")

    def _reply(self, answer: Answer) -> None:
        lines = [
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
            f"Date: {self.date_time_string()}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            *(f"{name}: {value}" for name, value in SECURITY.items()),
            *answer.headers,
            "Connection: close",
        ]
        body = b"" if self.command == "HEAD" else answer.body
        if answer.bare:
            self.wfile.write(body)
            return
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer a bad request without repeating any of it; the standard library would repeat it in HTML."""
        self._reply(Answer(code, PLAIN_TEXT, f"bad request: {HTTPStatus(code).phrase}\n".encode()))

    def log_message(self, *_: object) -> None:
        """Log no request, since a scrape every 15 s would fill the journal."""
