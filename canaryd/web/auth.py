"""TLS, client certificates and passwords for the daemon's address, in the format of Prometheus's web.config.yml.

The format is that of the Prometheus exporter toolkit (docs/web-configuration.md of prometheus/exporter-toolkit), with
its names, meanings and defaults. What Python's TLS cannot do is refused, never ignored. The file, and the files that it
names, are checked at every connection and read again when they have changed; while they cannot be used, the last good
rules stay in force.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from canaryd.config import permissions
from canaryd.config.load import ConfigError, raise_problems, read_bytes
from canaryd.config.schema import Notes, Section, document, quoted
from canaryd.web.server import PLAIN_TEXT, Answer
from canaryd.web.settings import HEADERS, REQUIRED, RateLimit, WebFile
from canaryd.web.tls import NAMED, Tls

log = logging.getLogger(__name__)
REALM = 'WWW-Authenticate: Basic realm="canaryd", charset="UTF-8"'
LONGEST = 72
"""Bytes of a password that bcrypt looks at (Provos and Mazières 1999); bcrypt 5 refuses longer ones."""
REMEMBERED = 64
"""Correct passwords that are kept, so that their hash is computed once (ours)."""
WAITING = 8
"""Requests that may wait for the check of their password; further ones get 429 (ours)."""
SHARE = 0.1
"""Largest share of one core that wrong passwords may cost, however many are sent (ours)."""
QUIET = 60.0
"""Seconds between two log lines about refused clients, so that they do not fill the log (ours)."""


@dataclass(frozen=True, eq=False)
class _Rules:
    """The rules in force: a whole, valid configuration. A connection belongs to the rules that admitted it."""

    users: Mapping[bytes, bytes]
    headers: Mapping[str, str]
    rate: RateLimit
    tls: ssl.SSLContext | None
    certified: bool
    """Whether every client must show a certificate."""
    sans: frozenset[str] | None
    warnings: tuple[str, ...]


def _read(file: Path, looked: dict[Path, object]) -> _Rules:
    """Read a web configuration and all that it names; raises `ConfigError` with every mistake.

    Sets in `looked`, even where it raises, the state of each file just before it was read.
    """
    looked[file] = _look(file)
    notes = Notes()
    node = document(read_bytes(file), notes)
    found: WebFile = (Section(WebFile).read(node, "", notes) if node else None) or WebFile()
    if found == WebFile() and not notes.problems:
        raise ConfigError([f"{file}:1: nothing is set; write what is wanted, or leave web_config out"])
    settings = found.tls_server_config
    names = {n: file.parent / name for n in NAMED if (name := getattr(settings, n))}
    looked.update({path: _look(path) for path in names.values()})
    warnings = [
        f"{path}: {text}" for path in (file, names.get("key_file")) if path and (text := permissions.exposure(path))
    ]
    wrong = {where for _, where, _ in notes.problems}
    context = Tls(settings, names, notes).context(wrong)
    for name, value in found.http_server_config.headers.items():
        if (taken := HEADERS.get(name)) and value is not None and value not in taken:
            notes.add_at(f"http_server_config.headers.{name}", f"{quoted(value)}; write {' or '.join(taken)}")
    if found.rate_limit.interval and found.rate_limit.burst is None and "rate_limit.burst" not in wrong:
        notes.add_at("rate_limit.interval", "without a burst every request is refused; write e.g. burst: 20")
    if found.basic_auth_users:
        try:
            import bcrypt  # noqa: F401, PLC0415  only where there are passwords
        except ImportError:
            why = "passwords need the package bcrypt, which is missing; install python3-bcrypt or bcrypt"
            notes.add_at("basic_auth_users", why)
    raise_problems(file, notes)
    sans = settings.client_allowed_sans
    return _Rules(
        users={user.encode(): hashed.encode() for user, hashed in found.basic_auth_users.items()},
        headers=found.http_server_config.headers,
        rate=found.rate_limit,
        tls=context,
        certified=settings.client_auth_type == REQUIRED,
        sans=None if sans is None else frozenset(map(_canonical, sans)),
        warnings=tuple(warnings),
    )


def _refuse_weaker(file: Path, old: _Rules, new: _Rules) -> None:
    """Raise `ConfigError` where the new rules lack a protection of the old ones.

    A program that writes a file empties it first, and on a full disk it stays empty.
    """
    gone = [
        text
        for text, before, after in (
            ("without TLS", old.tls, new.tls),
            ("without passwords", old.users, new.users),
            ("without client certificates", old.certified, new.certified),
        )
        if before and not after
    ]
    if gone:
        raise ConfigError([f"{file}:1: canaryd would serve {' and '.join(gone)}; restart it if that is wanted"])


def _look(path: Path) -> object:
    """Return a value that changes when a file is written, replaced or removed; takes microseconds."""
    try:
        s = os.stat(path)  # noqa: PTH116  three times as fast as Path.stat, for every request
    except OSError as error:
        return error.errno
    return s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_dev, s.st_mode


def _canonical(name: str) -> str:
    """Return a subject alternative name in the one form in which two are compared."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


class _Turns:
    """Checks one password at a time, with a short queue, and a pause after a wrong one that keeps within `SHARE`."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._places = threading.Lock()
        self._waiting: set[str] = set()
        """Addresses whose passwords wait or are checked: one each, so that a guesser keeps nobody else out."""
        self._next = 0.0

    def check(self, password: bytes, hashed: bytes, client: str) -> bool | None:
        """Return whether the password matches the hash; None where the client or too many others wait already."""
        import bcrypt  # noqa: PLC0415

        with self._places:
            if client in self._waiting or len(self._waiting) >= WAITING:
                return None
            self._waiting.add(client)
        try:
            with self._turn:
                if (pause := self._next - time.monotonic()) > 0:
                    time.sleep(pause)
                started = time.monotonic()
                right = False
                with contextlib.suppress(ValueError):  # bcrypt before 4 takes no NUL
                    right = bcrypt.checkpw(password, hashed)
                took = time.monotonic() - started
                if not right:
                    self._next = started + took / SHARE
                return right
        finally:
            with self._places:
                self._waiting.remove(client)


class _Bucket:
    """The toolkit's rate limit: `burst` requests at once, and one more each `interval` seconds."""

    def __init__(self, rate: RateLimit) -> None:
        self._interval, self._burst = rate.interval, rate.burst or 1
        self._left, self._at = float(self._burst), time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take a token; False where there is none."""
        if not self._interval:
            return True
        with self._lock:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._at) / self._interval)
            self._at = now
            if self._left < 1:
                return False
            self._left -= 1
            return True


class WebConfig:
    """A web configuration in force: the gate of a `canaryd.web.server.Server`."""

    def __init__(self, file: Path) -> None:
        """Read it; raises `ConfigError` with every mistake, each at its line."""
        self.problems: tuple[str, ...] = ()
        """What is wrong with the files as they are now; the last good rules are in force meanwhile."""
        self._file = file
        self._again = 0.0
        """When unusable files are read again although they have not changed."""
        self._lock = threading.Lock()
        self._looked: dict[Path, object] = {}
        self._rules = _read(file, self._looked)
        self._warn()
        self._bucket = _Bucket(self._rules.rate)
        self._turns = _Turns()
        self._secret = secrets.token_bytes(32)
        self._correct: OrderedDict[bytes, None] = OrderedDict()
        """Fingerprints of correct passwords, under a key of this process: memory holds no password."""
        self._logged: dict[str, tuple[float, int]] = {}
        """Kind of refusal → when it was last logged, and how many there were since."""

    @property
    def tls(self) -> bool:
        """Whether clients must use TLS."""
        return self._rules.tls is not None

    @property
    def authenticates(self) -> bool:
        """Whether clients need a password or a certificate."""
        return bool(self._rules.users) or self._rules.certified

    @property
    def passwords(self) -> bool:
        """Whether users have passwords."""
        return bool(self._rules.users)

    def refresh(self) -> None:
        """Read the files again if they have changed; where they cannot be used, keep the rules in force."""
        self._current()

    def _current(self) -> _Rules:
        if self._unchanged():
            return self._rules
        with self._lock:
            rules = self._rules
            if self._unchanged():
                return rules
            looked: dict[Path, object] = {}
            try:
                new = _read(self._file, looked)
                _refuse_weaker(self._file, rules, new)
            except ConfigError as error:
                self._looked, self.problems = looked, tuple(error.problems)
                self._again = time.monotonic() + QUIET
                for problem in (*error.problems, "the new web configuration is bad; the old one stays in force"):
                    log.error("%s", problem)  # noqa: TRY400  a mistake in a file, not a traceback
                return rules
            self._rules, self._looked, self.problems = new, looked, ()
            if new.rate != rules.rate:
                self._bucket = _Bucket(new.rate)
            log.info("%s: reloaded", self._file)
            self._warn()
            return new

    def _unchanged(self) -> bool:
        if self.problems and time.monotonic() > self._again:
            return False  # the machine, and not the file, may have been the cause
        return all(_look(path) == before for path, before in self._looked.items())

    def _warn(self) -> None:
        for warning in self._rules.warnings:
            log.warning("%s", warning)

    # What the server asks

    def enter(self, request: socket.socket, patience: float) -> tuple[socket.socket, object]:
        """Do the TLS handshake; raises `OSError` where the client is refused."""
        rules = self._current()
        if rules.tls is None:
            return request, None
        # A duplicate: the server can hang up on the original while this one is waited for.
        plain = request.dup()
        plain.settimeout(patience)
        try:
            stream = rules.tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        try:
            stream.do_handshake()  # the timeout is for the whole handshake
            _require(rules.sans, stream.getpeercert())
        except OSError as error:
            reason = getattr(error, "reason", None) or ""
            if reason == "HTTP_REQUEST":
                with contextlib.suppress(OSError):
                    request.settimeout(patience)
                    request.sendall(_HTTPS_ANSWER)
            if not isinstance(error, TimeoutError) and reason != "UNEXPECTED_EOF_WHILE_READING":
                what = reason.lower().replace("_", " ") or error.strerror or str(error)
                with contextlib.suppress(OSError):
                    self._log_refusal("TLS", f"{request.getpeername()[0]} was not let in: {what}")
            stream.close()
            raise
        except BaseException:
            stream.close()
            raise
        return stream, rules

    def holds(self, admitted: object) -> bool:
        """Return whether the rules that admitted a TLS connection are in force; for plain text, whether TLS is off."""
        rules = self._current()
        return rules.tls is None if admitted is None else rules is admitted

    def headers(self) -> Mapping[str, str]:
        """Return the headers that `http_server_config` sets."""
        return self._rules.headers

    def refusal(self, headers: Mapping[str, str], client: str) -> Answer | None:
        """Return the answer to a refused request: 429 for too many, 401 for no or a wrong password; else None."""
        if not self._bucket.take():
            return _busy("too many requests", 1)
        rules = self._rules
        if not rules.users:
            return None
        given = _credentials(headers.get("authorization", ""))
        if given is None:
            return _UNAUTHORIZED
        user, password = given[0], given[1][:LONGEST]
        hashed = rules.users.get(user)
        known = hashed is not None
        if hashed is None:
            hashed = self._stand_in(rules, user)
        mark = hmac.digest(self._secret, b"\0".join((user, hashed, password)), hashlib.sha256)
        if mark in self._correct:
            return None
        correct = self._turns.check(password, hashed, client)
        if correct is None:
            return _busy("too many passwords at once", 5)
        if not (correct and known):
            self._log_refusal("password", f"{client} was not let in: wrong user or password")
            return _UNAUTHORIZED
        with self._lock:
            self._correct[mark] = None
            if len(self._correct) > REMEMBERED:
                self._correct.popitem(last=False)
        return None

    def _stand_in(self, rules: _Rules, user: bytes) -> bytes:
        """Return a hash that no password has, for an unknown user; the same name always costs the same."""
        costs = sorted(hashed.split(b"$")[2] for hashed in rules.users.values())
        digest = hmac.digest(self._secret, user, hashlib.sha256)
        text = base64.b64encode(digest + digest).replace(b"+", b".")
        # The salt's last character carries only two bits: bcrypt refuses most others there.
        salt_and_digest = text[:21] + b"." + text[22:53]
        return b"$2b$%s$%s" % (costs[int.from_bytes(digest[:8], "big") % len(costs)], salt_and_digest)

    def _log_refusal(self, kind: str, text: str) -> None:
        """Log a refused client, at most once a minute for each kind of refusal, and how many more there were."""
        now = time.monotonic()
        with self._lock:
            last, more = self._logged.get(kind, (now - QUIET, 0))
            due = now - last >= QUIET
            self._logged[kind] = (now, 0) if due else (last, more + 1)
        if due:
            log.warning("%s%s", text, f" ({more} more since the last such line)" if more else "")


_UNAUTHORIZED = Answer(401, PLAIN_TEXT, b"unauthorized: give a user and a password (Basic)\n", (REALM,))


def _require(allowed: frozenset[str] | None, certificate: Mapping[str, Any] | None) -> None:
    if allowed is not None and not allowed & set(_names(certificate)):
        raise ConnectionAbortedError("its certificate has none of client_allowed_sans")


_HTTPS_TEXT = b"this is an HTTPS server: write https:// for http://\n"
_HTTPS_ANSWER = (
    f"HTTP/1.0 400 {HTTPStatus(400).phrase}\r\nContent-Type: {PLAIN_TEXT}\r\nContent-Length: {len(_HTTPS_TEXT)}\r\n\r\n"
).encode() + _HTTPS_TEXT


def _busy(why: str, seconds: int) -> Answer:
    return Answer(429, PLAIN_TEXT, f"{why}: try again later\n".encode(), (f"Retry-After: {seconds}",))


def _credentials(header: str) -> tuple[bytes, bytes] | None:
    """Return (user, password) of a header of basic authentication (RFC 7617), None for any other header."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
    except ValueError:
        return None
    return (user, password) if colon else None


def _names(certificate: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the subject alternative names of a certificate as `ssl` decodes it: DNS names, addresses, mail and URIs."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI", "IP Address"):
            yield _canonical(value)
