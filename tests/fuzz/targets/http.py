"""What a serving endpoint sends: bytes on a socket, from the status line to the last byte of a body.

Through a real connection to a server that says what the fuzzer wants. Only `Skip` (and its `Refused`): each one
printable line without the key, in bounded time, whatever lengths, chunks and redirects are announced.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import contextlib
import socket
import threading

from canaryd.probe import Skip
from canaryd.worker.endpoint.client import Client, Refused
from tests.fuzz.material import Choices, dumps, modes, seed, stretched, warped
from tests.fuzz.properties import in_time, one_line

KEY = "sk-Zq9secretkey7"
BODY = {"model": "tiny", "prompt": "The diver sank slowly towards the reef, and the water was clear.", "seed": 1}


class Sayer:
    """Answers every connection with the same bytes, once the request has come, and hangs up."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        self.said = b""
        self.asked = 0
        threading.Thread(target=self._serve, name="fuzz-sayer", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65_536) or b"\r\n\r\n"
                self.asked += 1
                connection.sendall(self.said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass


_sayers: list[Sayer] = []


def sayer() -> Sayer:
    if not _sayers:
        _sayers.append(Sayer())
    return _sayers[0]


def _raw(data: bytes) -> None:
    choices = Choices(data[:2])
    how = choices.below(3)
    _asked(how, stretched(data[2:]))


def _asked(how: int, said: bytes) -> None:
    server = sayer()
    server.said = said
    server.asked = 0
    client = Client(url=f"http://127.0.0.1:{server.port}/v1", key=KEY, timeout=20.0, sleep=lambda _: None)
    with in_time(len(said)):
        try:
            if how == 0:
                reply = client.api("/models")
            elif how == 1:
                reply = client.get("/props")
            else:
                reply = client.api("/completions", BODY)
            assert 100 <= reply.status <= 999, reply.status
            assert KEY not in reply.words
            assert len(reply.words) <= 1000
            assert reply.words.isprintable()
            reply.json()
        except Skip as error:
            one_line(str(error))
            assert KEY not in str(error), "the key stands in a message"
            assert not isinstance(error, Refused) or KEY not in error.words
    assert server.asked <= 4, "more attempts than are allowed"


LINES = (b"HTTP/1.1 200 OK", b"HTTP/1.0 200", b"HTTP/1.1 429 Busy", b"HTTP/1.1 503 x", b"HTTP/1.1 302 Found",
         b"HTTP/1.1 401 no", b"HTTP/1.1 422 no", b"HTTP/1.1 500 x", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK",
         b"HTTP/1.1 204 none", b"HTTP/1.1 304 x", b"HTTP/1.1 999 x", b"HTTP/1.1 000 x",
         b"HTTP/2 200", b"ICY 200 OK")  # fmt: skip
NAMES = (b"Content-Type", b"Content-Length", b"Transfer-Encoding", b"Location", b"Retry-After", b"Connection",
         b"Server", b"Content-Encoding", b"X")  # fmt: skip
SAID = {
    "error": {"message": "The diver sank slowly towards the reef, and the water", "code": KEY},
    "detail": [{"loc": ["body", "seed"], "msg": "Extra inputs", "input": 1}],
    "choices": [{"text": "x", "finish_reason": "stop"}],
}


def _built(data: bytes) -> None:
    """Status lines, headers and bodies that exist, together as they never should be."""
    choices = Choices(data)
    how = choices.below(3)
    body = dumps(warped(SAID, choices)).encode()
    if choices.flag():
        events = [b"data: " + dumps(warped(SAID["choices"], choices)).encode() for _ in range(choices.below(3))]
        body = b"\n\n".join([*events, choices.of((b"data: [DONE]", b"data: " + body, b": ping", b"event: x", b""))])
    values = {
        b"Content-Type": (b"text/event-stream", b"application/json", b"text/html; charset=\xff"),
        b"Content-Length": (
            str(len(body)).encode(),
            b"5",
            b"-1",
            b"9" * 5000,
            b"1e3",
            b"\xb2",
            b"99999999999999999999",
        ),
        b"Transfer-Encoding": (b"chunked", b"gzip, chunked", b"identity"),
        b"Location": (b"http://[", b"http://u:" + KEY.encode() + b"@h/?k=" + KEY.encode(), b"\x1b[2J", b"//x:99999/"),
        b"Retry-After": (b"1", b"99999", b"9" * 5000, b"-1", b"\xb2", b"soon"),
    }
    headers = []
    for _ in range(choices.below(5)):
        name = choices.of(NAMES)
        value = (
            choices.of(values[name])
            if name in values and choices.below(4)
            else choices.text().encode("utf-8", "replace")
        )
        headers.append(name + b": " + value)
        if value == b"chunked":
            size = choices.of((f"{len(body):x}".encode(), b"5", b"-5", b"fffffffff", b"", b"zz", b"5;x=y"))
            body = size + b"\r\n" + body + b"\r\n" + choices.of((b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"", b"-1\r\n"))
    _asked(how, b"\r\n".join([choices.of(LINES), *headers, b"", body]))


target = modes(_raw, _built)


def seeds() -> list[bytes]:
    good = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"data": [1]}'
    stream = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'2c\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\r\n0\r\n\r\n'
    )
    refused = b'HTTP/1.1 422 x\r\n\r\n{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}'
    moved = b"HTTP/1.1 302 x\r\nLocation: http://other/v1?key=1\r\n\r\n"
    return [
        *(seed(0, bytes([how, 0]) + said) for how in range(3) for said in (good, stream, refused, moved)),
        *(seed(1, bytes(range(n, n + 60))) for n in range(0, 190, 10)),
    ]
