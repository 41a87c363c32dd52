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
TLS: dict[str, str] = {}
"""Case that speaks TLS → whose certificate it shows."""
CASES: dict[str, tuple[Case, str]] = {}
"""Hostile answers, and what canaryd says of each."""
ECHOES: dict[str, Case] = {}
"""Answers in which the key stands, and that are answers all the same."""


def hostile(said: str, *, tls: str = "") -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        CASES[case.__name__] = (case, said)
        if tls:
            TLS[case.__name__] = tls
        return case

    return add


def echo(case: Case) -> Case:
    ECHOES[case.__name__] = case
    return case


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
    return answer() if request.route == "POST /v1/completions" else None


def asked(request: Request) -> bool:
    return request.route == "POST /v1/completions"


def drip(request: Request, first: bytes, more: bytes, pause: float) -> None:
    """Send something again and again, until the other side hangs up."""
    request.connection.sendall(first)
    while True:
        request.connection.sendall(more)
        time.sleep(pause)


# --- The connection --------------------------------------------------------------------------------------------------


@hostile("connected, but no complete answer within")
def silence(_: Request) -> None:
    time.sleep(60)


@hostile("closed the connection without an answer")
def hangs_up(_: Request) -> bytes:
    return b""


@hostile("the connection was lost after")
def resets(request: Request) -> None:
    request.connection.sendall(http(b"{", "Content-Length: 900"))
    time.sleep(0.1)
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.connection.close()


@hostile("connected, but no complete answer within")
def continues_slowly(request: Request) -> None:
    drip(request, b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.2)


@hostile("longer than the limit of 16 MiB|no complete answer within")
def continues_for_ever(request: Request) -> None:
    drip(request, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, 0.0)


@hostile("connected, but no complete answer within")
def drips_its_head(request: Request) -> None:
    drip(request, b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.2)


@hostile("does not speak HTTP")
def heads_without_end(request: Request) -> None:
    drip(request, b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000, 0.0)


@hostile("does not speak HTTP")
def long_head(_: Request) -> bytes:
    return http(b"{}", "X: " + "x" * (1 << 20))


@hostile("connected, but no complete answer within")
def drips_its_body(request: Request) -> None:
    drip(request, http(b"", "Content-Length: 1000"), b" ", 0.2)


@hostile("longer than the limit of 16 MiB|no complete answer within")
def body_without_end(request: Request) -> None:
    drip(request, http(b"", "Transfer-Encoding: chunked"), b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0.0)


@hostile("longer than the limit of 16 MiB|no complete answer within")
def chunks_of_a_byte(request: Request) -> None:
    drip(request, http(b"", "Transfer-Encoding: chunked"), b"1\r\n \r\n" * 5000, 0.0)


@hostile("connected, but no complete answer within")
def drips_chunks(request: Request) -> None:
    drip(request, http(b"", "Transfer-Encoding: chunked"), b"1\r\n \r\n", 0.2)


@hostile("cut off after")
def bad_chunk(_: Request) -> bytes:
    return http(b"zz\r\n{", "Transfer-Encoding: chunked")


@hostile("longer than the limit of 16 MiB|no complete answer within")
def trailers_without_end(request: Request) -> None:
    drip(request, http(b"2\r\n{}\r\n0\r\n", "Transfer-Encoding: chunked"), b"X: y\r\n" * 5000, 0.0)


@hostile("the answer was cut off after 1 of 50 bytes")
def half_a_body(_: Request) -> bytes:
    return http(b"{", "Content-Length: 50")


@hostile("does not speak HTTP")
def other_protocol(_: Request) -> bytes:
    return b"SSH-2.0-OpenSSH_9.6\r\n\r\n"


@hostile("does not speak HTTP")
def bad_status(_: Request) -> bytes:
    return b"HTTP/1.1 fine\r\n\r\n{}"


@hostile("refused with 503, once: come back")
def always_busy(_: Request) -> bytes:
    return http(b'{"error": "come back"}', "Retry-After: 9", status="503 Busy")


@hostile("redirected with 307")
def sends_away(request: Request) -> bytes:
    return http(b"", f"Location: http://127.0.0.1:1/{request.key}?k={request.key}", status="307 Moved")


@hostile("no TLS within", tls="silent")
def tls_silence(_: Request) -> None:
    raise AssertionError


@hostile("no TLS within", tls="dripping")
def tls_drips(_: Request) -> None:
    raise AssertionError


@hostile("its certificate is not accepted: IP address mismatch", tls="other")
def tls_other_name(_: Request) -> None:
    return None


@hostile("its certificate is not accepted: certificate has expired", tls="old")
def tls_out_of_date(_: Request) -> None:
    return None


@hostile("its certificate is not accepted", tls="alien")
def tls_alien(_: Request) -> None:
    return None


@hostile("does not speak HTTP")
def speaks_http_2(_: Request) -> bytes:
    return b"\0\0\x12\x04\0\0\0\0\0" + b"\0\x03\0\0\0\x64" * 3  # a frame of settings (RFC 9113, section 3.4)


@hostile("of 0 characters is not JSON, or incomplete")
def upgrades(request: Request) -> None:
    switched = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    drip(request, switched, b"\x81\x02{}", 0.2)


@hostile("of 0 characters is not JSON, or incomplete")
def hints_for_ever(request: Request) -> None:
    drip(request, b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n", 0.2)


@hostile("does not speak HTTP|cut off after")
def long_chunk_head(_: Request) -> bytes:
    return http(b"2;" + b"x" * (1 << 20) + b"\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked")


@hostile("cut off after")
def negative_chunk(_: Request) -> bytes:
    return http(b"-5\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked")


@hostile("is not JSON, or incomplete")
def shorter_than_it_is(request: Request) -> bytes:
    return http(json.dumps(honest(request)).encode(), "Content-Length: 9")


@hostile("the answer was cut off after")
def longer_than_it_is(request: Request) -> bytes:
    return http(json.dumps(honest(request)).encode(), f"Content-Length: {'9' * 400}")


@hostile("refused with 503: it asks to wait for")
def busy_for_ages(_: Request) -> bytes:
    return http(b"{}", f"Retry-After: {'9' * 400}", status="503 Busy")


# --- The document ----------------------------------------------------------------------------------------------------


@hostile("longer than the limit of 16 MiB|no complete answer within")
def large_document(_: Request) -> bytes:
    return http(b"[" + b"[]," * 5_600_000 + b"[]]")


@hostile("has more than 1,000,000 values")
def many_lists(_: Request) -> bytes:
    return http(b"[" + b"[]," * 4_000_000 + b"[]]")


@hostile("has more than 1,000,000 values")
def deep_document(_: Request) -> bytes:
    return http(b"[" * 8_000_000)


@hostile("is nested too deeply")
def nested(_: Request) -> bytes:
    return http(b"[" * 5000 + b"]" * 5000)


@hostile("got a web page")
def web_page(_: Request) -> bytes:
    return http(b"<!doctype html><title>Login</title>", "Content-Type: text/html")


@hostile("of 4 characters is null")
def null(_: Request) -> bytes:
    return http(b"null")


@hostile("is not JSON, or incomplete")
def half_a_document(_: Request) -> bytes:
    return http(b'{"data": [{"id": "ti')


@hostile("is not JSON, or incomplete")
def binary(_: Request) -> bytes:
    return http(bytes(range(256)) * 4, "Content-Encoding: gzip")


@hostile("is not JSON, or incomplete")
def gzip_bomb(_: Request) -> bytes:
    return http(BOMB, "Content-Encoding: gzip")


@hostile("is not JSON, or incomplete")
def long_number(_: Request) -> bytes:
    return http(b'{"data": [{"id": "tiny", "created": ' + b"9" * 5000 + b"}]}")


@hostile("model: not set, and the server lists none")
def long_name(request: Request) -> dict[str, Any] | None:
    return models("x" * (1 << 20)) if request.route == "GET /v1/models" else None


@hostile("model: not set, and the server lists 50000")
def many_models(request: Request) -> dict[str, Any] | None:
    return models(*(f"m{n}" for n in range(50_000))) if request.route == "GET /v1/models" else None


@hostile("the server does not accept the key of key_file")
def refuses_the_key(request: Request) -> bytes:
    return http(json.dumps({"error": f"Invalid key {request.key}"}).encode(), status="401 Unauthorized")


@hostile("refused with 500: cannot take")
def repeats_all(request: Request) -> bytes | None:
    words = f"cannot take {request.head}{json.dumps(request.body)}"
    return http(json.dumps({"error": {"message": words}}).encode(), status="500 no") if asked(request) else None


# --- The answer ------------------------------------------------------------------------------------------------------


@hostile("has an unknown shape")
def object_for_a_count(request: Request) -> dict[str, Any] | None:
    return answer(usage={"prompt_tokens": {"text": 14}}) if asked(request) else None


@hostile("has an unknown shape")
def object_for_a_number(request: Request) -> dict[str, Any] | None:
    return answer(logprobs={"tokens": WORDS, "token_logprobs": [{"v": -1.0}] * 5}) if asked(request) else None


@hostile("has an unknown shape")
def object_for_a_text(request: Request) -> dict[str, Any] | None:
    return answer(text={"parts": [TEXT]}) if asked(request) else None


@hostile("has an unknown shape")
def object_for_an_end(request: Request) -> dict[str, Any] | None:
    return answer(finish_reason={"why": ["length"] * 1000}) if asked(request) else None


@hostile("has an unknown shape")
def countless(request: Request) -> dict[str, Any] | None:
    return answer(usage={"prompt_tokens": 10**30}) if asked(request) else None


@hostile("has an unknown shape")
def list_for_an_object(request: Request) -> bytes | None:
    return http(json.dumps([answer()]).encode()) if asked(request) else None


@hostile("has 20,000 tokens; at most 72 were asked for")
def many_tokens(request: Request) -> dict[str, Any] | None:
    many = {"tokens": WORDS * 4000, "token_logprobs": [-1.0] * 20_000}
    return answer(text=TEXT * 4000, logprobs=many) if asked(request) else None


@hostile("has 1,000,000 characters; at most 72 tokens were asked for")
def long_text(request: Request) -> dict[str, Any] | None:
    return answer(text="a" * 1_000_000, logprobs=None) if asked(request) else None


@hostile("has an unknown shape")
def long_token(request: Request) -> dict[str, Any] | None:
    token = "a" * 1_000_000
    return answer(text=token, logprobs={"tokens": [token], "token_logprobs": [-1.0]}) if asked(request) else None


# --- A server that says which it is, and means harm beside its answers ------------------------------------------------


def claims(request: Request, said: dict[str, bytes]) -> bytes | dict[str, Any] | None:
    """Answer as a vLLM server, with `said` for other routes."""
    if request.route == "GET /v1/models":
        return models("tiny", owner="vllm")
    return said.get(request.route)


@hostile("connected, but no complete answer within")
def metrics_without_end(request: Request) -> Any:
    if request.route == "GET /metrics":
        drip(request, http(b"", "Transfer-Encoding: chunked"), b"1\r\nx\r\n", 0.2)
    return claims(request, {})


@hostile("longer than the limit of 16 MiB|no complete answer within")
def long_version(request: Request) -> Any:
    return claims(request, {"GET /version": http(b'{"version": "' + b"9" * (17 << 20) + b'"}')})


# --- Echoes of the key -----------------------------------------------------------------------------------------------


def encoded(key: str, before: str = "") -> str:
    return base64.b64encode(f"{before}{key}".encode()).decode()


@echo
def in_texts(request: Request) -> dict[str, Any] | None:
    key = request.key
    escaped = "".join(f"%{ord(c):02x}" for c in key) + "".join(f"&#{ord(c)};" for c in key)
    text = f"Your key is {key}, {key.upper()}, {escaped} {key.encode().hex(' ')}"
    end = f"stop {key.title()} {encoded(key, 'u:')}"
    return answer(text=text, logprobs=None, finish_reason=end, system_fingerprint="x" * 100 + key)


@echo
def in_tokens(request: Request) -> dict[str, Any] | None:
    tokens = [request.key[:4], request.key[4:9], *request.key[9:]]
    scores = {"tokens": tokens, "token_logprobs": [-1.0] * len(tokens)}
    return answer(text=request.key, logprobs=scores, system_fingerprint=encoded(request.key, "Bearer "))


@echo
def in_disguise(request: Request) -> dict[str, Any] | None:
    key = request.key
    wide = "".join(chr(ord(c) + 0xFEE0) for c in key)  # FULLWIDTH forms (Unicode, Halfwidth and Fullwidth Forms)
    apart = ("\u200b", "\u00ad", "\0", "\x1b[0m", ".", "*", "][", "\u0301")
    text = " ".join([wide, *(between.join(key) for between in apart), str(list(key.encode()))])
    codes = "".join(f"\\{ord(c):03o}" for c in key) + "".join(f"={ord(c):02X}" for c in key)
    end = base64.b64encode(key.encode("utf-16-le")).decode()
    return answer(text=text, logprobs=None, finish_reason=end, system_fingerprint=codes)


@echo
def beside_many_prompt_tokens(request: Request) -> dict[str, Any] | None:
    return answer(system_fingerprint=request.key, prompt_token_ids=list(range(100_000)))


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
