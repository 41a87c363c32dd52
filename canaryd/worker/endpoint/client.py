"""HTTP for endpoint canaries, through urllib3: one request at a time; every failure becomes a readable reason.

Each request has its own connection, and one deadline that includes all attempts. No message contains the API key, and
a server's texts are shortened before they are quoted. urllib3 is loaded with the first request: the interpreter of
`worker.python`, which may lack urllib3, reads this module to describe the probes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from canaryd.facts import printable, whole
from canaryd.hidden import bare, hide, keep
from canaryd.probe import Skip

ATTEMPTS = 4
"""Maximum number of attempts of a request. A refused connection, 429 and 503 are tried again; `GATEWAY` is tried again
only on an optional path."""
PATIENCE = 10.0
"""Longest wait in seconds between two attempts; if a server asks for a longer wait, no further request is sent."""
CONNECT = 10.0
"""Seconds to wait for a connection, TLS included; a server on this host needs almost no time."""
MAX_BYTES = 16 << 20
"""Maximum bytes of an answer; 1,024 tokens with their alternatives take about 1 MB, and 20,000 scored tokens of a
prompt about 10 MB."""
MAX_VALUES = 1_000_000
"""Maximum values in a JSON document: 20,000 scored tokens of a prompt with their alternatives have about 900,000."""
MOST_WORDS = 4096
"""Maximum number of characters that are read of a server's error text."""
QUOTED = 200
"""Maximum number of characters that a message quotes of a server's error text."""
UNSAID = "without a message"
BUSY = (429, 503)
GATEWAY = (502, 504)
"""Status codes with which a proxy says that it cannot reach the server. They do not show whether a path exists."""
NO_TLS = dict.fromkeys(
    ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"), "that port speaks http, not https: begin url with http://"
)
"""Reason of OpenSSL for an answer that is not TLS → what to do."""


class NotListening(Skip):
    """The connection was refused, so no server received the request."""


class Refused(Skip):
    """The server received the request and declined it (4xx, 5xx); `words` is the server's own text."""

    def __init__(self, where: str, status: int, words: str) -> None:
        super().__init__(f"{where}: refused with {status}: {words[:QUOTED] or UNSAID}")
        self.status = status
        self.words = words


class Replayed(Refused):
    """A cache of whole answers gave an earlier answer again; no device computed it."""

    def __init__(self, where: str) -> None:
        text = "a cache before the server gives an earlier answer again; set url to the server"
        Skip.__init__(self, f"{where}: {text}")
        self.status, self.words = 200, text


@dataclass(kw_only=True)
class Reply:
    """A server's answer with any status."""

    where: str
    """Method and address of the request, for messages."""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    seconds: float = 0.0
    """From the request to the end of its answer, without earlier attempts."""
    data: Any = None
    """The body as JSON; None if the body is no readable JSON, or if an optional path did not succeed."""
    fault: str = ""
    """The reason why `data` is None, or ""."""
    words: str = ""
    """The error text in the body, shortened and without the API key."""

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")

    @property
    def server(self) -> str:
        """The Server header of the answer."""
        return self.headers.get("Server", "")

    def json(self) -> Any:
        """Return the JSON of a successful answer; raise `Refused` for another status, `Skip` if the body is no JSON."""
        if self.status >= 400:
            raise Refused(self.where, self.status, self.words)
        if self.data is None:
            text = self.text
            if text.lstrip()[:1] == "<":
                raise Skip(f"{self.where}: got a web page, wanted JSON: set url to the API, e.g. ending in /v1")
            raise Skip(f"{self.where}: the answer of {len(text)} characters {self.fault}")
        if isinstance(self.data, dict) and (self.data.get("error") or self.data.get("object") == "error"):
            raise Skip(f"{self.where}: answered with {self.status} and an error: {self.words[:QUOTED] or UNSAID}")
        return self.data


@dataclass(kw_only=True)
class Client:
    """A server's address, and the options that every request to this server needs."""

    url: str
    """Base of the OpenAI-compatible API, without a slash at the end, e.g. "http://127.0.0.1:8000/v1"."""
    key: str = field(default="", repr=False)
    ca_file: str = ""
    timeout: float = 60.0
    """Seconds for one request, from the look-up of the name to the last byte of the last attempt."""
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Parse the address; raise `Skip` if it is wrong or if certificates cannot be read."""
        keep(self.key)
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise Skip('url: not an address, wanted e.g. "http://127.0.0.1:8000/v1"') from None
        if "@" in self.url or parts.query or parts.fragment:  # not repeated: it may be a password
            raise Skip("url: remove the user, query or fragment; put a key into key_file")
        if parts.scheme not in ("http", "https") or not host or not self.url.isascii() or " " in self.url:
            raise Skip(f'url: got {self.url!r}, wanted e.g. "http://127.0.0.1:8000/v1"')
        self._address, self._tls = (host, port or (443 if parts.scheme == "https" else 80)), None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=self.ca_file or None)
            except (OSError, ValueError) as error:  # an unreadable file, or one without a certificate
                reason = getattr(error, "strerror", None) or error
                raise Skip(f"ca_file: {self.ca_file}: cannot read certificates: {reason}") from None
        self._origin, self._prefix = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
        self._root = self._prefix.removesuffix("/v1")

    def get(self, path: str) -> Reply:
        """Send a GET to a path below the root, e.g. "/version", which may be missing or forbidden; return the reply.

        Temporary failures (429, 502, 503, 504) are tried again, because they do not mean that the path is missing. A
        reply with any other status is returned. Raises `Skip` if a failure persists or no complete answer comes.
        """
        return self._ask("GET", self._root + path, None, optional=True)

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send JSON to a path below the server's root, e.g. "/tokenize"; return the reply. Failures are as in `get`."""
        return self._ask("POST", self._root + path, body, optional=True)

    def api(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send JSON to an API path, or a GET if `body` is None; return the reply. Raises `Skip` if none is complete."""
        return self._ask("GET" if body is None else "POST", self._prefix + path, body)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, *, optional: bool = False) -> Reply:
        end, wait = time.monotonic() + self.timeout, 0.25
        for attempt in range(1, ATTEMPTS + 1):
            wait *= 2
            try:
                reply = self._exchange(method, path, body, end)
            except NotListening:
                if attempt == ATTEMPTS or wait > end - time.monotonic():
                    raise
                self.sleep(wait)
                continue
            if reply.status not in BUSY and not (optional and reply.status in GATEWAY):
                break
            after = reply.headers.get("Retry-After", "")
            pause, refused = float(after) if after.isdecimal() else wait, f"{reply.where}: refused with {reply.status}"
            if pause > PATIENCE:
                raise Skip(f"{refused}: it asks to wait for {pause:g} s")
            if attempt == ATTEMPTS or pause > end - time.monotonic():
                times = "once" if attempt == 1 else f"{attempt} times"
                raise Skip(f"{refused}, {times}: {reply.words[:QUOTED] or UNSAID}")
            self.sleep(pause)
        if optional:
            reply.data = reply.data if reply.status < 300 else None
            return reply
        if reply.status in (401, 403):
            key = "the key of key_file" if self.key else "a request without a key; set key_file"
            raise Skip(f"{reply.where}: refused with {reply.status}: the server does not accept {key}")
        if 300 <= reply.status < 400:
            target = hide(printable(re.split("[?#]", bare(reply.headers.get("Location", "")))[0]))[:QUOTED]
            to = f"{target or 'nowhere'}: set url to the server itself"
            raise Skip(f"{reply.where}: redirected with {reply.status} to {to}")
        return reply

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None, end: float) -> Reply:
        """Return the complete reply.

        `end` is the deadline. Another thread talks to the server, so that the deadline holds even for a silent name
        server (`socket.getaddrinfo` has no timeout) and a server that sends a byte now and then. Raises `NotListening`
        if the connection is refused, `Skip` if no complete answer comes.
        """
        from urllib3.connection import HTTPConnection, HTTPSConnection

        reply = Reply(where=f"{method} {self._origin}{path}")
        begun = time.monotonic()
        left = max(0.001, end - begun)
        wait, (host, port) = min(CONNECT, left), self._address
        # Not a pool: no proxy, no redirect, no attempts of its own.
        connection = (
            HTTPSConnection(host, port, timeout=wait, ssl_context=self._tls)
            if self._tls
            else HTTPConnection(host, port, timeout=wait)
        )
        headers = {"Accept": "application/json", "User-Agent": "canaryd"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        connected, late, done = threading.Event(), threading.Event(), queue.SimpleQueue[tuple[Exception | None, bool]]()

        def talk() -> None:
            connection.connect()
            connected.set()
            if late.is_set():
                return
            connection.sock.settimeout(None)
            connection.timeout = None
            connection.request(method, path, data, headers, preload_content=False, decode_content=False)
            with contextlib.closing(connection.getresponse()) as response:
                reply.status, reply.headers = response.status, response.headers
                while part := response.read1(1 << 16):
                    reply.body += part
                    if len(reply.body) > MAX_BYTES:
                        raise Skip(f"{reply.where}: the answer is longer than the limit of {MAX_BYTES >> 20} MiB")

        def work() -> None:
            try:
                talk()
            except Exception as error:  # noqa: BLE001 - the other thread raises it
                done.put((error, connection.sock is not None))  # asked here: `close` takes the socket away
            else:
                done.put((None, True))
            finally:
                connection.close()

        threading.Thread(target=work, daemon=True).start()
        try:
            error, held = done.get(timeout=left)
        except queue.Empty:
            error, held, wait = TimeoutError(), connection.sock is not None, left
            late.set()
            with contextlib.suppress(OSError, AttributeError):  # no socket yet, or it ended just now
                connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
            if not done.empty():  # the thread gave up in this moment, and has closed what it held
                held = done.get()[1]
        if error is not None:
            raise self._failed(reply, error, held=held, connected=connected.is_set(), wait=wait)
        reply.seconds = time.monotonic() - begun
        reply.data, reply.fault = read(reply.text)
        reply.words = _words(reply.data, reply.text, body)
        return reply

    def _failed(self, reply: Reply, error: Exception, *, held: bool, connected: bool, wait: float) -> Skip:
        """Return the `Skip` for a failed exchange. `held`: a socket was open; `connected`: TLS was complete too."""
        if isinstance(error, Skip):
            return error
        cause = error.__cause__ or error
        if isinstance(cause, ConnectionRefusedError) and not connected:
            text = "connection refused: nothing listens there; start the server, or correct url"
            return NotListening(f"{reply.where}: {text}")
        if connected:
            text = _broken(cause, len(reply.body), self.timeout)
        elif isinstance(cause, TimeoutError):
            text = (
                f"connected, but no TLS within {wait:.2g} s: a hung server, or one that speaks http"
                if held
                else f"no connection within {wait:.2g} s: wrong address, a firewall, or a silent name server"
            )
        elif isinstance(cause, ssl.SSLCertVerificationError):
            said = printable(str(cause.verify_message))[:200].rstrip(".")
            text = f"its certificate is not accepted: {said}; correct url, or name its authority with ca_file"
        elif isinstance(cause, ssl.SSLError):
            text = f"no TLS ({cause.reason}): begin url with http:// if that port does not speak https"
            text = NO_TLS.get(cause.reason, text)
        elif isinstance(cause, socket.gaierror):
            text = f"unknown host name: {cause.strerror}"
        else:
            text = f"cannot be reached: {getattr(cause, 'strerror', None) or printable(str(cause))}"
        return Skip(f"{reply.where}: {text}")


def _broken(error: BaseException, size: int, timeout: float) -> str:
    """Return the reason why the answer was not complete when the exchange ended with `error`, after `size` bytes."""
    from urllib3.exceptions import IncompleteRead

    if isinstance(error, TimeoutError):
        return f"connected, but no complete answer within {timeout:g} s ({size} bytes came): slow, overloaded or hung"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection without an answer: it crashed on the request, or expects https"
    if isinstance(error, (IncompleteRead, http.client.IncompleteRead)):  # fewer bytes than Content-Length says
        more = isinstance(error, IncompleteRead) and error.expected
        return f"the answer was cut off after {size}{f' of {min(size + more, 10**20)}' if more else ''} bytes"
    if isinstance(error, OSError):
        return f"the connection was lost after {size} bytes of the answer: {error.strerror or error}"
    return f"the server does not speak HTTP ({type(error).__name__})"


def read(text: str) -> tuple[Any, str]:
    """Return the data of a JSON text and "", or None and a clause such as "is not JSON, or incomplete"."""
    if sum(map(text.count, ",:[{")) > MAX_VALUES:
        return None, f"has more than {MAX_VALUES:,} values"
    try:
        data = json.loads(text)
    except RecursionError:
        return None, "is nested too deeply"
    except ValueError:
        return None, "is not JSON, or incomplete"
    try:
        return whole(data), "is null" if data is None else ""
    except ValueError:
        return None, "is nested too deeply"


def _words(data: Any, text: str, body: Mapping[str, Any] | None) -> str:
    """Return the error text in an answer as one line, without the API key and without the text of the request."""
    words = _message(data)
    if not words and data is None and text.lstrip()[:1] != "<":
        words = text
    words = printable(" ".join(hide(words)[:MOST_WORDS].split()))[:1000]
    return _without(words, " ".join(json.dumps(body, ensure_ascii=False).split()) if body else "")


def first_choice(data: Any) -> dict[str, Any]:
    """Return `choices[0]` of an answer of the API, or {} if there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _message(data: Any) -> str:
    """Return the error text in JSON of one of the forms {"error": {"message": …}}, {"detail": …} or {"error": "…"}.

    FastAPI gives a list: [{"loc": ["body", "seed"], "msg": "Extra inputs …", "input": …}]; the input is left out.
    """
    for _ in range(3):
        if isinstance(data, dict):
            data = next((data[key] for key in ("error", "message", "detail", "msg") if data.get(key)), None)
    if isinstance(data, list):
        entries = [item for item in data if isinstance(item, dict)]
        places = [e["loc"] if isinstance(e.get("loc"), list) else () for e in entries]
        return "; ".join(f"{'.'.join(map(str, at))}: {e.get('msg', '')}" for at, e in zip(places, entries, strict=True))
    return data if isinstance(data, str) else ""


def _without(words: str, sent: str, width: int = 24) -> str:
    """Return `words` with "…" for every run of at least `width` characters that also occurs in `sent`."""
    kept, at = [], 0
    while at < len(words):
        end = at + width
        if end <= len(words) and words[at:end] in sent:
            while end < len(words) and words[at : end + 1] in sent:
                end += 1
            kept.append("…")
            at = end
        else:
            kept.append(words[at])
            at += 1
    return "".join(kept)
