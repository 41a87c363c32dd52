"""Requests to the daemon's own server: any bytes on a connection, and headers that choose an encoding.

What comes back is one of the answers that the server has, never an internal error; nobody is kept waiting beyond a
limit, and the next client is served as if nothing had been. An Accept-Encoding header of any kind gets the page.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import re
import socket
import time

from canaryd.metrics import exposition
from canaryd.metrics.exposition import Exposition, Family, Page
from canaryd.web.server import PLAIN_TEXT, Answer, Limits, Server
from tests.fuzz.material import Choices, modes, seed, stretched

LIMITS = Limits(connections=8, seconds=2.0)
STATUSES = (200, 400, 404, 405, 431, 505)
PAGE = Page({"canaryd_x": Family("gauge", ("name",), "Help.")})
PAGE.add("canaryd_x", 1, "a")
EXPOSED = Exposition(PAGE.text())
HANGS = 20.0

_servers: list[Server] = []


def _server() -> Server:
    if not _servers:
        routes = {
            "/metrics": lambda request: EXPOSED.answer(request.headers),
            "/": lambda _: Answer(200, PLAIN_TEXT, b"page\n"),
        }
        server = Server("127.0.0.1", 0, routes, LIMITS)
        server.start()
        atexit.register(server.close)
        _servers.append(server)
    return _servers[0]


def _said(data: bytes, *, pieces: int = 1) -> bytes:
    """Return all that the server answers to bytes after which the client is silent."""
    with socket.create_connection(("127.0.0.1", _server().port), timeout=HANGS) as connection:
        with contextlib.suppress(OSError):  # it may have said enough already
            step = max(1, len(data) // pieces)
            for at in range(0, len(data), step):
                connection.sendall(data[at : at + step])
            connection.shutdown(socket.SHUT_WR)
        got = []
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65_536):
                got.append(part)
        return b"".join(got)


def _bytes(data: bytes) -> None:
    begun = time.monotonic()
    data = stretched(data)
    said = _said(data, pieces=3 if len(data) % 2 else 1)
    assert time.monotonic() - begun < HANGS
    _understood(said)
    if data[:1] == b"a":  # one in many: the server lives
        assert _said(b"GET / HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\npage\n")


def _understood(said: bytes) -> None:
    """One answer after the other, each with a length that is its body's."""
    rest = said
    while rest:
        head, blank, rest = rest.partition(b"\r\n\r\n")
        assert blank, said[:200]
        first, *lines = head.split(b"\r\n")
        found = re.fullmatch(rb"HTTP/1\.1 ([0-9]{3}) [A-Za-z ]+", first)
        assert found, first
        assert int(found[1]) in STATUSES, first
        headers = dict(line.split(b": ", 1) for line in lines)
        length = int(headers[b"Content-Length"])
        if rest[:9] == b"HTTP/1.1 " or not rest:  # the answer to a HEAD has no body
            continue
        assert len(rest) >= length, said[:200]
        body, rest = rest[:length], rest[length:]
        if headers.get(b"Content-Encoding") == b"gzip":
            assert gzip.decompress(body)


METHODS = ("GET", "HEAD", "POST", "get", "GET\t", "OPTIONS", "\x1b", "G" * 9000)
PATHS = ("/metrics", "/", "/metrics?x=1", "//", "/../etc/passwd", "*", "http://a/metrics", "/%00", "/" + "a" * 9000)
VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/1.1.1", "HTTP/1.9", "", "HTTP/1.\u0661")
NAMES = ("Accept", "Accept-Encoding", "Connection", "Content-Length", "Transfer-Encoding", "Host", "Expect", "X y", "")
VALUES = ("application/openmetrics-text;version=1.0.0", "*/*", "gzip", "gzip;q=0", "close", "keep-alive", "0", "5",
          "-1", "chunked", "text/plain;version=0.0.4;q=0.5, */*;q=0.1", "gzip;q=1.0001",
          "100-continue", "a" * 40_000)  # fmt: skip


def _built(data: bytes) -> None:
    choices = Choices(data)
    requests = []
    for _ in range(choices.below(3) + 1):
        lines = [f"{choices.of(METHODS)} {choices.of(PATHS)} {choices.of(VERSIONS)}"]
        for _ in range(choices.below(4)):
            value = choices.of(VALUES) if choices.below(4) else choices.text()
            lines.append(f"{choices.of(NAMES)}{choices.of((': ', ':', ' : ', ''))}{value}")
        end = choices.of(("\r\n", "\n"))
        requests.append(end.join([*lines, "", ""]))
    _understood(_said("".join(requests).encode("utf-8", "replace"), pieces=choices.below(3) + 1))


def _accept(data: bytes) -> None:
    text = stretched(data).decode("latin-1")
    packed = exposition.takes_gzip(text)
    assert isinstance(packed, bool)
    said = EXPOSED.answer({"accept-encoding": text})
    assert said.status == 200
    assert (gzip.decompress(said.body) if packed else said.body) == EXPOSED.text


target = modes(_bytes, _built, _accept)


def seeds() -> list[bytes]:
    return [
        seed(0, "GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n"),
        seed(0, "HEAD / HTTP/1.1\r\n\r\nGET /metrics HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n"),
        *(seed(1, bytes(range(n, n + 40))) for n in range(0, 200, 20)),
        *(seed(2, value) for value in VALUES),
    ]
