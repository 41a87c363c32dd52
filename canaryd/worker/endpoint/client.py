"""HTTP for endpoint canaries: one request at a time; every failure becomes a readable reason.

Each request has its own connection, and one deadline that includes all attempts. No message contains the API key, and
a server's texts are shortened before they are quoted.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from canaryd.facts import printable
from canaryd.hidden import bare, hide, keep
from canaryd.probe import Skip
from canaryd.worker.endpoint import documents
from canaryd.worker.endpoint.wire import Exchange, NotListening, Site

ATTEMPTS = 4
"""One request and three more: only after a refused connection, 429 or 503 (`GATEWAY` too on an optional path)."""
PATIENCE = 10.0
"""Longest wait in seconds between two attempts; a server that wants more gets no further request."""
MOST_WORDS = 4096
"""Characters of a server's own text that are looked at."""
LONGEST_EVENT = 1 << 20
"""Bytes of an event of a stream; one of a token has some hundred (ours)."""
QUOTED = 200
"""Characters of a server's own text that a message quotes."""
UNSAID = "without a message"
BUSY = (429, 503)
GATEWAY = (502, 504)
"""Status of a proxy that does not reach its server; it does not show whether an optional path exists."""


class Refused(Skip):
    """The server took the request and declined it (4xx, 5xx, or no stream): `words` is the server's own text."""

    def __init__(self, where: str, status: int, words: str) -> None:
        super().__init__(f"{where}: refused with {status}: {words[:QUOTED] or UNSAID}")
        self.status = status
        self.words = words


class Replayed(Refused):
    """An earlier answer came again: a cache of whole answers gave it, and no device."""

    def __init__(self, where: str) -> None:
        text = "a cache before the server gives an earlier answer again; set url to the server"
        Skip.__init__(self, f"{where}: {text}")
        self.status, self.words = 200, text


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer with any status."""

    where: str
    """Method and address, for messages."""
    status: int
    server: str
    """The Server header."""
    data: Any
    """The body as JSON; None where it is not JSON that can be read."""
    fault: str = ""
    """Why not."""
    text: str
    """The body as text."""
    words: str
    """The body's own words about a failure, short and without the key."""

    def json(self) -> Any:
        """Return the JSON of a success; raise `Refused` for another status, `Skip` where the body is no JSON."""
        if self.status >= 400:
            raise Refused(self.where, self.status, self.words)
        if self.data is None:
            if self.text.lstrip()[:1] == "<":
                raise Skip(f"{self.where}: got a web page, wanted JSON: set url to the API, e.g. ending in /v1")
            raise Skip(f"{self.where}: the answer of {len(self.text)} characters {self.fault}")
        if isinstance(self.data, dict) and (self.data.get("error") or self.data.get("object") == "error"):
            raise Skip(f"{self.where}: answered with {self.status} and an error: {self.words[:QUOTED] or UNSAID}")
        return self.data


@dataclass(kw_only=True)
class Client:
    """A server's address, and what every request to it needs."""

    url: str
    """Base of the OpenAI-compatible API, without a slash at the end, e.g. "http://127.0.0.1:8000/v1"."""
    key: str = field(default="", repr=False)
    ca_file: str = ""
    timeout: float = 60.0
    """Seconds for one request, from the first connection to the last byte of the last attempt."""
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Parse the address; raise `Skip` for a wrong one, or for certificates that cannot be read."""
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
        tls = None
        if parts.scheme == "https":
            try:
                tls = ssl.create_default_context(cafile=self.ca_file or None)
            except (OSError, ValueError) as error:  # an unreadable file, or one without a certificate
                reason = getattr(error, "strerror", None) or error
                raise Skip(f"ca_file: {self.ca_file}: cannot read certificates: {reason}") from None
        self._prefix = parts.path.rstrip("/")
        self._root = self._prefix.removesuffix("/v1")
        self._site = Site(
            origin=f"{parts.scheme}://{parts.netloc}",
            address=(host, port or (443 if parts.scheme == "https" else 80)),
            tls=tls,
            key=self.key,
            timeout=self.timeout,
        )

    def get(self, path: str) -> Reply:
        """Request a path below the server's root, e.g. "/version", which may be missing or forbidden.

        Returns a reply for every status except temporary failures (429, 502, 503, 504), which do not mean that the path
        is missing: they are tried again. Raises `Skip` where they persist, or where no complete answer comes.
        """
        return self._ask("GET", self._root + path, None, optional=True)

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send JSON to a path below the server's root, e.g. "/tokenize"; otherwise like `get`."""
        return self._ask("POST", self._root + path, body, optional=True)

    def api(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """Send JSON to a path of the API, or request it without a body; raise `Skip` where no complete answer comes."""
        return self._ask("GET" if body is None else "POST", self._prefix + path, body)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, Any]]:
        """Send JSON to a path of the API; yield (seconds since the request, event) until the stream's end.

        Raises `Refused` where the server does not stream, `Skip` where the stream is cut off or is not JSON.
        """
        where = f"POST {self._site.origin}{self._prefix}{path}"
        begun = time.monotonic()
        with closing(Exchange(self._site, "POST", self._prefix + path, body, begun + self.timeout)) as answer:
            if answer.status >= 400 or "text/event-stream" not in answer.header("Content-Type"):
                text = b"".join(answer.parts()).decode(errors="replace")
                words = _words(documents.read(text)[0], text, body) if answer.status >= 400 else "no stream of events"
                raise Refused(where, answer.status, words)
            count, finished, rest = 0, False, b""
            for part in answer.parts():
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > LONGEST_EVENT:
                    raise Skip(f"{where}: the stream contains an event of more than {LONGEST_EVENT >> 20} MiB")
                for line in lines:
                    kind, _, value = line.decode(errors="replace").strip().partition(":")
                    if kind != "data":
                        continue
                    if value.strip() == "[DONE]":
                        return
                    event, fault = documents.read(value)
                    if not isinstance(event, dict) or event.get("error"):
                        words = _words(event, value, body)
                        instead = words[:QUOTED] or f"data that {fault or 'is no object'}"
                        raise Skip(f"{where}: after {count} events the stream contains: {instead}")
                    count += 1
                    finished = finished or bool(first_choice(event).get("finish_reason"))
                    yield time.monotonic() - begun, event
        if not finished:
            raise Skip(f"{where}: the stream broke off after {count} events, before the server marked its end")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, *, optional: bool = False) -> Reply:
        where, end = f"{method} {self._site.origin}{path}", time.monotonic() + self.timeout
        for attempt in range(1, ATTEMPTS + 1):
            wait = 0.5 * 2 ** (attempt - 1)
            try:
                with closing(Exchange(self._site, method, path, body, end)) as answer:
                    text = b"".join(answer.parts()).decode(errors="replace")
                    status, server, after = answer.status, answer.header("Server"), answer.header("Retry-After")
                    location = answer.header("Location")
            except NotListening:
                if attempt == ATTEMPTS or wait > end - time.monotonic():
                    raise
                self.sleep(wait)
                continue
            if status not in BUSY and not (optional and status in GATEWAY):
                break
            wait = float(after) if after.isdecimal() else wait
            if wait > PATIENCE:
                raise Skip(f"{where}: refused with {status}: it asks to wait for {wait:g} s")
            if attempt == ATTEMPTS or wait > end - time.monotonic():
                break
            self.sleep(wait)
        data, fault = documents.read(text)
        words = _words(data, text, body)
        if status in BUSY or (optional and status in GATEWAY):
            raise Skip(f"{where}: refused with {status}, {_times(attempt)}: {words[:QUOTED] or UNSAID}")
        if optional:
            good = data if status < 300 else None
            return Reply(where=where, status=status, server=server, data=good, text=text, words=words)
        if status in (401, 403):
            key = "the key of key_file" if self.key else "a request without a key; set key_file"
            raise Skip(f"{where}: refused with {status}: the server does not accept {key}")
        if 300 <= status < 400:
            target = hide(printable(re.split("[?#]", bare(location))[0]))[:QUOTED]
            raise Skip(f"{where}: redirected with {status} to {target or 'nowhere'}: set url to the server itself")
        return Reply(where=where, status=status, server=server, data=data, fault=fault, text=text, words=words)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _words(data: Any, text: str, body: Mapping[str, Any] | None) -> str:
    """Return an answer's text about a failure, in one line, without the key and without what was sent."""
    words = _message(data)
    if not words and data is None and text.lstrip()[:1] != "<":
        words = text
    words = printable(" ".join(hide(words)[:MOST_WORDS].split()))[:1000]
    return _without(words, " ".join(json.dumps(body, ensure_ascii=False).split()) if body else "")


def first_choice(data: Any) -> dict[str, Any]:
    """Return `choices[0]` of an answer or an event of the API; empty where there is none."""
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def _message(data: Any) -> str:
    """Return the text of an error: {"error": {"message": …}}, {"detail": …}, or {"error": "…"}.

    A list is FastAPI's: [{"loc": ["body", "seed"], "msg": "Extra inputs …", "input": …}]; the input is left out.
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
    """Replace every run of at least `width` characters that also occurs in `sent` by "…"."""
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
