"""A server that means harm: every hostile answer on a port of its own, in a process of its own.

`python -m tests.hostile DIRECTORY` reads TLS pairs named in DIRECTORY (other.crt, other.key, alien.crt, alien.key),
prints {name: address} as one line of JSON, and serves until standard input ends. What a case does not spoil is answered
as a server that nobody knows would answer.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.worker.endpoint.served import BARE_LEGACY, LENGTH, USAGE, completion, models

KEY = "sk-canary-0123456789abcdef"
ROOT = Path(__file__).resolve().parent.parent
TEXT = "the diver saw a light"
WORDS = [" the", " diver", " saw", " a", " light"]


@dataclass
class Request:
    """One request, and the connection that it came by."""

    connection: socket.socket
    route: str
    head: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """The key that came with it."""
        return self.head.partition("Bearer ")[2].partition("\r\n")[0]


Case = Callable[[Request], "bytes | dict[str, Any] | None"]
"""What to answer: bytes as they are, JSON, or None to be honest."""
BOMB = gzip.compress(bytes(64 << 20), 1)
CHUNKED = "Transfer-Encoding: chunked"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
MANY = {"tokens": WORDS * 4000, "token_logprobs": [-1.0] * 20_000}
LONG = "a" * 1_000_000


def http(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    unknown = ("Transfer-Encoding", "Content-Length")
    length = [] if any(word in line for line in lines for word in unknown) else [f"Content-Length: {len(body)}"]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, *length, "Connection: close", "", ""]).encode() + body


def answer(**changed: Any) -> dict[str, Any]:
    """Return an honest completion with something else in its choice, or beside it."""
    scores = {"tokens": WORDS, "token_logprobs": [-1.0] * 5, "top_logprobs": BARE_LEGACY["top_logprobs"] * 5}
    choice = {"text": TEXT, "logprobs": scores, **LENGTH}
    rest = {"model": "tiny", "usage": USAGE}
    for name, value in changed.items():
        (choice if name in ("text", "logprobs", "finish_reason") else rest)[name] = value
    return completion(choice, **rest)


def honest(request: Request) -> dict[str, Any] | None:
    if request.route == "GET /v1/models":
        return models("tiny", owner="nobody")
    return answer() if asked(request) else None


def asked(request: Request) -> bool:
    return request.route == "POST /v1/completions"


def when_asked(made: Callable[[], Any]) -> Case:
    """Return a case that answers a question with what is made, and else honestly."""
    return lambda request: made() if asked(request) else None


def drips(first: bytes, more: bytes, pause: float) -> Case:
    """Return a case that sends something again and again, until the other side hangs up."""

    def drip(request: Request) -> None:
        request.connection.sendall(first)
        while True:
            request.connection.sendall(more)
            time.sleep(pause)

    return drip


def resets(request: Request) -> None:
    request.connection.sendall(http(b"{", "Content-Length: 900"))
    time.sleep(0.1)
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


def repeats_all(request: Request) -> bytes | None:
    if not asked(request):
        return None
    words = f"cannot take {request.head}{json.dumps(request.body)}"
    return http(json.dumps({"error": {"message": words}}).encode(), status="500 no")


def claims(request: Request, said: dict[str, bytes]) -> bytes | dict[str, Any] | None:
    """Answer as a vLLM server, with `said` for other routes."""
    if request.route == "GET /v1/models":
        return models("tiny", owner="vllm")
    return said.get(request.route)


def metrics_without_end(request: Request) -> Any:
    if request.route == "GET /metrics":
        drips(http(b"", CHUNKED), b"1\r\nx\r\n", 0.2)(request)
    return claims(request, {})


NO_ANSWER = "connected, but no complete answer within"
TOO_LONG = "longer than the limit of 16 MiB|no complete answer within"
NO_HTTP = "does not speak HTTP"
NO_JSON = "is not JSON, or incomplete"
ODD = "has an unknown shape"
CASES: dict[str, tuple[Case, str]] = {
    # The connection
    "silence": (lambda _: time.sleep(60), NO_ANSWER),
    "hangs_up": (lambda _: b"", "closed the connection without an answer"),
    "resets": (resets, "the connection was lost after"),
    "continues_slowly": (drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.2), NO_ANSWER),
    "continues_for_ever": (drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, 0.0), TOO_LONG),
    "drips_its_head": (drips(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.2), NO_ANSWER),
    "heads_without_end": (drips(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000, 0.0), NO_HTTP),
    "long_head": (lambda _: http(b"{}", "X: " + "x" * (1 << 20)), NO_HTTP),
    "drips_its_body": (drips(http(b"", "Content-Length: 1000"), b" ", 0.2), NO_ANSWER),
    "body_without_end": (drips(http(b"", CHUNKED), b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0.0), TOO_LONG),
    "chunks_of_a_byte": (drips(http(b"", CHUNKED), b"1\r\n \r\n" * 5000, 0.0), TOO_LONG),
    "drips_chunks": (drips(http(b"", CHUNKED), b"1\r\n \r\n", 0.2), NO_ANSWER),
    "bad_chunk": (lambda _: http(b"zz\r\n{", CHUNKED), "cut off after"),
    "trailers_without_end": (drips(http(b"2\r\n{}\r\n0\r\n", CHUNKED), b"X: y\r\n" * 5000, 0.0), TOO_LONG),
    "half_a_body": (lambda _: http(b"{", "Content-Length: 50"), "the answer was cut off after 1 of 50 bytes"),
    "other_protocol": (lambda _: b"SSH-2.0-OpenSSH_9.6\r\n\r\n", NO_HTTP),
    "bad_status": (lambda _: b"HTTP/1.1 fine\r\n\r\n{}", NO_HTTP),
    "always_busy": (
        lambda _: http(b'{"error": "come back"}', "Retry-After: 9", status="503 Busy"),
        "refused with 503, once: come back",
    ),
    "sends_away": (
        lambda request: http(b"", f"Location: http://127.0.0.1:1/{request.key}?k={request.key}", status="307 Moved"),
        "redirected with 307",
    ),
    "tls_silence": (lambda _: None, "no TLS within"),
    "tls_drips": (lambda _: None, "no TLS within"),
    "tls_other_name": (lambda _: None, "its certificate is not accepted: IP address mismatch"),
    "tls_out_of_date": (lambda _: None, "its certificate is not accepted: certificate has expired"),
    "tls_alien": (lambda _: None, "its certificate is not accepted"),
    # A frame of settings (RFC 9113, section 3.4).
    "speaks_http_2": (lambda _: b"\0\0\x12\x04\0\0\0\0\0" + b"\0\x03\0\0\0\x64" * 3, NO_HTTP),
    "upgrades": (drips(SWITCHED, b"\x81\x02{}", 0.2), "of 0 characters is not JSON, or incomplete"),
    "hints_for_ever": (
        drips(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n", 0.2),
        "of 0 characters is not JSON, or incomplete",
    ),
    "long_chunk_head": (
        lambda _: http(b"2;" + b"x" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n", CHUNKED),
        "does not speak HTTP|cut off after",
    ),
    "negative_chunk": (lambda _: http(b"-5\r\n{}\r\n0\r\n\r\n", CHUNKED), "cut off after"),
    "shorter_than_it_is": (lambda request: http(json.dumps(honest(request)).encode(), "Content-Length: 9"), NO_JSON),
    "longer_than_it_is": (
        lambda request: http(json.dumps(honest(request)).encode(), f"Content-Length: {'9' * 400}"),
        "the answer was cut off after",
    ),
    "busy_for_ages": (
        lambda _: http(b"{}", f"Retry-After: {'9' * 400}", status="503 Busy"),
        "refused with 503: it asks to wait for",
    ),
    # The document
    "large_document": (lambda _: http(b"[" + b"[]," * 5_600_000 + b"[]]"), TOO_LONG),
    "many_lists": (lambda _: http(b"[" + b"[]," * 4_000_000 + b"[]]"), "has more than 1,000,000 values"),
    "deep_document": (lambda _: http(b"[" * 8_000_000), "has more than 1,000,000 values"),
    "nested": (lambda _: http(b"[" * 5000 + b"]" * 5000), "is nested too deeply"),
    "web_page": (lambda _: http(b"<!doctype html><title>Login</title>", "Content-Type: text/html"), "got a web page"),
    "null": (lambda _: http(b"null"), "of 4 characters is null"),
    "half_a_document": (lambda _: http(b'{"data": [{"id": "ti'), NO_JSON),
    "binary": (lambda _: http(bytes(range(256)) * 4, "Content-Encoding: gzip"), NO_JSON),
    "gzip_bomb": (lambda _: http(BOMB, "Content-Encoding: gzip"), NO_JSON),
    "long_number": (lambda _: http(b'{"data": [{"id": "tiny", "created": ' + b"9" * 5000 + b"}]}"), NO_JSON),
    "long_name": (
        lambda request: models("x" * (1 << 20)) if request.route == "GET /v1/models" else None,
        "model: not set, and the server lists none",
    ),
    "many_models": (
        lambda request: models(*(f"m{n}" for n in range(50_000))) if request.route == "GET /v1/models" else None,
        "model: not set, and the server lists 50000",
    ),
    "refuses_the_key": (
        lambda request: http(json.dumps({"error": f"Invalid key {request.key}"}).encode(), status="401 Unauthorized"),
        "the server does not accept the key of key_file",
    ),
    "repeats_all": (repeats_all, "refused with 500: cannot take"),
    # The answer
    "object_for_a_count": (when_asked(lambda: answer(usage={"prompt_tokens": {"text": 14}})), ODD),
    "object_for_a_number": (
        when_asked(lambda: answer(logprobs={"tokens": WORDS, "token_logprobs": [{"v": -1.0}] * 5})),
        ODD,
    ),
    "object_for_a_text": (when_asked(lambda: answer(text={"parts": [TEXT]})), ODD),
    "object_for_an_end": (when_asked(lambda: answer(finish_reason={"why": ["length"] * 1000})), ODD),
    "countless": (when_asked(lambda: answer(usage={"prompt_tokens": 10**30})), ODD),
    "list_for_an_object": (when_asked(lambda: http(json.dumps([answer()]).encode())), ODD),
    "many_tokens": (
        when_asked(lambda: answer(text=TEXT * 4000, logprobs=MANY)),
        "has 20,000 tokens; at most 72 were asked for",
    ),
    "long_text": (
        when_asked(lambda: answer(text=LONG, logprobs=None)),
        "has 1,000,000 characters; at most 72 tokens were asked for",
    ),
    "long_token": (when_asked(lambda: answer(text=LONG, logprobs={"tokens": [LONG], "token_logprobs": [-1.0]})), ODD),
    # A server that says which it is, and means harm beside its answers
    "metrics_without_end": (metrics_without_end, NO_ANSWER),
    "long_version": (
        lambda request: claims(request, {"GET /version": http(b'{"version": "' + b"9" * (17 << 20) + b'"}')}),
        TOO_LONG,
    ),
}
"""Hostile answers, and what canaryd says of each."""
TLS = {
    "tls_silence": "silent",
    "tls_drips": "dripping",
    "tls_other_name": "other",
    "tls_out_of_date": "old",
    "tls_alien": "alien",
}
"""Case that speaks TLS → whose certificate it shows."""


# --- Echoes of the key -----------------------------------------------------------------------------------------------


def encoded(key: str, before: str = "") -> str:
    return base64.b64encode(f"{before}{key}".encode()).decode()


def in_texts(request: Request) -> dict[str, Any] | None:
    key = request.key
    escaped = "".join(f"%{ord(c):02x}" for c in key) + "".join(f"&#{ord(c)};" for c in key)
    text = f"Your key is {key}, {key.upper()}, {escaped} {key.encode().hex(' ')}"
    end = f"stop {key.title()} {encoded(key, 'u:')}"
    return answer(text=text, logprobs=None, finish_reason=end, system_fingerprint="x" * 100 + key)


def in_tokens(request: Request) -> dict[str, Any] | None:
    tokens = [request.key[:4], request.key[4:9], *request.key[9:]]
    scores = {"tokens": tokens, "token_logprobs": [-1.0] * len(tokens)}
    return answer(text=request.key, logprobs=scores, system_fingerprint=encoded(request.key, "Bearer "))


def in_disguise(request: Request) -> dict[str, Any] | None:
    key = request.key
    wide = "".join(chr(ord(c) + 0xFEE0) for c in key)  # FULLWIDTH forms (Unicode, Halfwidth and Fullwidth Forms)
    apart = ("\u200b", "\u00ad", "\0", "\x1b[0m", ".", "*", "][", "\u0301")
    text = " ".join([wide, *(between.join(key) for between in apart), str(list(key.encode()))])
    codes = "".join(f"\\{ord(c):03o}" for c in key) + "".join(f"={ord(c):02X}" for c in key)
    end = base64.b64encode(key.encode("utf-16-le")).decode()
    return answer(text=text, logprobs=None, finish_reason=end, system_fingerprint=codes)


def beside_many_prompt_tokens(request: Request) -> dict[str, Any] | None:
    return answer(system_fingerprint=request.key, prompt_token_ids=list(range(100_000)))


ECHOES: dict[str, Case] = {
    case.__name__: case for case in (in_texts, in_tokens, in_disguise, beside_many_prompt_tokens)
}
"""Answers in which the key stands, and that are answers all the same."""


# --- The server ------------------------------------------------------------------------------------------------------


def _read(connection: socket.socket) -> Request:
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError
        head += part
    head, _, body = head.partition(b"\r\n\r\n")
    text = head.decode() + "\r\n"
    length = int(text.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
    while len(body) < length:
        body += connection.recv(1 << 16)
    method, path = text.split(" ", 2)[:2]
    return Request(connection, f"{method} {path}", text, json.loads(body or b"{}"))


def _serve(case: Case, connection: socket.socket, whose: str, directory: Path) -> None:
    with contextlib.suppress(OSError), connection:
        if whose in ("silent", "dripping"):
            hello = b"\x16\x03\x03\x3f\xff\x02\0\x3f\xfb\x03\x03"  # a TLS record with a long hello of a server
            for _ in range(100):
                time.sleep(0.2)
                if whose == "dripping":
                    connection.sendall(hello[:1])
                    hello = hello[1:] or b"\0"
            return
        if whose:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(directory / f"{whose}.crt", directory / f"{whose}.key")
            connection = tls.wrap_socket(connection, server_side=True)
        request = _read(connection)
        known = case in ECHOES.values() and not asked(request)
        said = None if known else case(request)
        if said is None:
            said = honest(request)
        if said is None:
            said = http(b'{"error": "Not Found"}', status="404 Not Found")
        connection.sendall(said if isinstance(said, bytes) else http(json.dumps(said).encode()))
        connection.shutdown(socket.SHUT_WR)


def _listen(listener: socket.socket, case: Case, whose: str, directory: Path) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(case, connection, whose, directory), daemon=True).start()


def main() -> None:
    directory = Path(sys.argv[1])
    addresses = {}
    every = {name: case for name, (case, _) in CASES.items()} | ECHOES
    for name, case in every.items():
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        whose = TLS.get(name, "")
        addresses[name] = f"{'https' if whose else 'http'}://127.0.0.1:{listener.getsockname()[1]}/v1"
        threading.Thread(target=_listen, args=(listener, case, whose, directory), daemon=True).start()
    print(json.dumps(addresses), flush=True)
    sys.stdin.read()
    os._exit(0)


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[dict[str, str]]:
    """Serve every case until the end of the block; yield its address by name."""
    argv = [sys.executable, "-m", "tests.hostile", str(directory)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.kill()


if __name__ == "__main__":
    main()
