"""TLS, client certificates and passwords for the daemon's address, in the format of Prometheus's web.config.yml.

The format is that of the Prometheus exporter toolkit (docs/web-configuration.md of prometheus/exporter-toolkit), with
its names, meanings and defaults. What Python's TLS cannot do is refused, never ignored. The file and what it names are
looked at whenever a client comes, and read again when they have changed; while they cannot be used, what was read
before stays in force.
"""
# ruff: noqa: RUF009  `setting` and `section` return `dataclasses.field(…)`

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
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

from canaryd import trust
from canaryd.config import MAX_FILE_BYTES, ConfigError, raise_problems, read_bytes
from canaryd.schema import (
    BOOLEAN,
    SPELLED,
    ListOf,
    Notes,
    Scalar,
    Section,
    Variables,
    document,
    quoted,
    read_boolean,
    read_filled,
    read_integer,
    section,
    setting,
)
from canaryd.serve import PLAIN_TEXT, Answer

log = logging.getLogger(__name__)

REALM = 'WWW-Authenticate: Basic realm="canaryd", charset="UTF-8"'
LONGEST = 72
"""Bytes of a password that bcrypt looks at (Provos and Mazières 1999); bcrypt 5 refuses longer ones."""
COSTS = (4, 15)
"""Costs of a bcrypt hash: bcrypt's own least; beyond the second, one check outlasts a scrape's usual 10 s. Ours."""
REMEMBERED = 64
"""Passwords that were right and need not be computed again. Ours: more users than that scrape nobody."""
WAITING = 8
"""Requests that may wait until their password is computed; more are told to come again. Ours."""
SHARE = 0.1
"""Share of one core that wrong passwords may cost, whoever sends how many: the node is there to serve. Ours."""
QUIET = 60.0
"""Seconds between two lines of the log about clients that were not let in: they must not fill it. Ours."""

# --- Values ----------------------------------------------------------------------------------------------------------

_CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
}
"""Suites of TLS 1.2 that the toolkit takes (Go's crypto/tls.CipherSuites) → OpenSSL's name for each (ciphers(1))."""
_TLS13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_VERSIONS = {"TLS12": "TLSv1_2", "TLS13": "TLSv1_3"}
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Headers that the toolkit lets be set → the values that it takes; () for any."""
_NONE, _IF_GIVEN, _REQUIRED = "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _version(text: str) -> str:
    if text in ("TLS10", "TLS11"):
        raise ValueError(f"{text} is broken (RFC 8996) and not spoken here; write TLS12 or TLS13")
    if text not in _VERSIONS:
        raise ValueError(f"{quoted(text)} is no version of TLS; write TLS12 or TLS13")
    return text


def _cipher(text: str) -> str:
    if text in _TLS13:
        raise ValueError(f"{text} belongs to TLS 1.3, whose suites cannot be chosen and are all on; remove it")
    if text not in _CIPHERS:
        raise ValueError(f"{quoted(text)} is no suite that is known here; write some of {', '.join(_CIPHERS)}")
    return text


def _curve(text: str) -> str:
    if text not in _CURVES:
        raise ValueError(f"{quoted(text)} is no curve that is known here; write one of {', '.join(_CURVES)}")
    return text


def _client_auth(text: str) -> str:
    if text in _UNVERIFIED:
        raise ValueError(
            f"{text} asks for certificates without verifying them, which Python's TLS cannot do and which keeps nobody"
            f" out; write {_REQUIRED}, {_IF_GIVEN} or {_NONE}"
        )
    if text not in (_NONE, _IF_GIVEN, _REQUIRED):
        raise ValueError(f"{quoted(text)} is no way to ask for certificates; write {_REQUIRED}, {_IF_GIVEN} or {_NONE}")
    return text


def _hash(text: str) -> str:
    found = re.fullmatch(r"\$2[abxy]\$([0-9]{2})\$[./A-Za-z0-9]{53}", text)
    if not found:  # not repeated: it may be a password
        raise ValueError('not a bcrypt hash; make one with: htpasswd -nBC 10 "" | tr -d ":\\n"')
    if not COSTS[0] <= int(found[1]) <= COSTS[1]:
        raise ValueError(f"a bcrypt hash of cost {int(found[1])}; make one of cost {COSTS[0]} to {COSTS[1]}, e.g. 10")
    return text


def _interval(text: str) -> float:
    """Return the seconds of a duration as Go writes it: "1s", "500ms", "1m30s", or 0 for no limit."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)", text)
    if text == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f'{quoted(text)} is no interval; write e.g. "1s" or "500ms"')
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds > 86400:
        raise ValueError(f'{quoted(text)} is longer than a day; write e.g. "1s"')
    return seconds


def _burst(text: str) -> int:
    if not 1 <= (number := read_integer(text)) <= 1_000_000:
        raise ValueError(f"{text} is out of range; write a whole number from 1 to 1000000")
    return number


def _no_http2(text: str) -> bool:
    if read_boolean(text):
        raise ValueError("HTTP/2 is not spoken here, clients get HTTP/1.1; write false, or remove the line")
    return False


def _pem(text: str) -> str:
    if "-----BEGIN " not in text:  # not repeated: it may be a key
        raise ValueError("not PEM text; write it as a block (key: |), or name a file with cert_file and key_file")
    return text


def _header(text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise ValueError("a header holds printable ASCII only")
    return text


_FILE = Scalar("the name of a file", read_filled, {"type": "string"})
_PEM = Scalar("PEM text", _pem, {"type": "string"}, SPELLED)
_TEXT = Scalar("text (in quotes)", read_filled, {"type": "string"})
_VERSION = Scalar("TLS12 or TLS13", _version, {"enum": [*_VERSIONS]})


@dataclass(frozen=True, kw_only=True)
class TlsServer:
    """The section `tls_server_config`. Names of files are relative to the web configuration."""

    cert: str | None = setting(_PEM, "null", "The server's certificate with its chain.")
    key: str | None = setting(_PEM, "null", "Its private key.")
    client_ca: str | None = setting(_PEM, "null", "Who vouches for clients.")
    cert_file: str | None = setting(_FILE, "null", "File of the server's certificate with its chain.")
    key_file: str | None = setting(_FILE, "null", "File of its private key.")
    client_ca_file: str | None = setting(_FILE, "null", "File of those who vouch for clients.")
    client_auth_type: str | None = setting(
        Scalar("text", _client_auth, {"type": "string"}), "null", "Whether clients must show a certificate."
    )
    client_allowed_sans: tuple[str, ...] | None = setting(ListOf(_TEXT), "null", "Names of which a client's has one.")
    min_version: str = setting(_VERSION, "TLS12", "Oldest version that is spoken.")
    max_version: str = setting(_VERSION, "TLS13", "Newest version that is spoken.")
    cipher_suites: tuple[str, ...] | None = setting(
        ListOf(Scalar("a suite", _cipher, {"type": "string"})), "null", "Suites of TLS 1.2."
    )
    prefer_server_cipher_suites: bool = setting(BOOLEAN, "true", "Whose order of suites counts.")
    curve_preferences: tuple[str, ...] | None = setting(
        ListOf(Scalar("a curve", _curve, {"type": "string"})), "null", "The curve of the key exchange."
    )


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """The section `http_server_config`."""

    http2: bool | None = setting(Scalar("false", _no_http2, {"const": False}, ("bool",)), "null", "HTTP/2: never.")
    headers: Mapping[str, str] = setting(
        Variables(
            Scalar("text (in quotes)", _header, {"type": "string"}),
            "|".join(_HEADERS),
            "a mapping of headers to text",
            f"not a header that can be set; there are {', '.join(_HEADERS)}",
        ),
        "{}",
        "Headers of every answer.",
    )


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """The section `rate_limit`: a token bucket for all requests together."""

    interval: float = setting(Scalar("an interval", _interval, {}, ("str", "int")), "0", "Seconds for one request.")
    burst: int | None = setting(Scalar("a whole number", _burst, {}, ("int",)), "null", "Requests at once.")


@dataclass(frozen=True, kw_only=True)
class WebFile:
    """A whole web configuration."""

    tls_server_config: TlsServer = section(TlsServer, "TLS.")
    http_server_config: HttpServer = section(HttpServer, "HTTP.")
    basic_auth_users: Mapping[str, str] = setting(
        Variables(
            Scalar("a bcrypt hash (in quotes)", _hash, {"type": "string"}, SPELLED),
            r"[^:\x00-\x1f\x7f]+",
            "a mapping of users to bcrypt hashes",
            "not a user's name: it holds a colon or a control character, or nothing",
        ),
        "{}",
        "User → bcrypt hash of the password.",
    )
    rate_limit: RateLimit = section(RateLimit, "A limit for requests.")


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rules:
    """What is in force: a whole configuration that was found good. A connection is let in by one of them."""

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

    Notes in `looked`, whatever becomes of it, what each file looked like just before it was read.
    """
    looked[file] = _look(file)
    notes = Notes()
    node = document(read_bytes(file), notes)
    found: WebFile = (Section(WebFile).read(node, "", notes) if node else None) or WebFile()
    if found == WebFile() and not notes.problems:
        raise ConfigError([f"{file}:1: nothing is set; write what is wanted, or leave web_config out"])
    settings = found.tls_server_config
    names = {n: file.parent / name for n in _NAMED if (name := getattr(settings, n))}
    looked.update({path: _look(path) for path in names.values()})
    warnings = [f"{path}: {text}" for path in (file, names.get("key_file")) if path and (text := trust.exposure(path))]
    wrong = {where for _, where, _ in notes.problems}
    tls = _Tls(settings, names, notes)
    context = tls.context(wrong)
    for name, value in found.http_server_config.headers.items():
        if (taken := _HEADERS.get(name)) and value is not None and value not in taken:
            tls.complain(f"http_server_config.headers.{name}", f"{quoted(value)}; write {' or '.join(taken)}")
    if found.rate_limit.interval and found.rate_limit.burst is None and "rate_limit.burst" not in wrong:
        tls.complain("rate_limit.interval", "without a burst nobody is ever answered; write e.g. burst: 20")
    if found.basic_auth_users:
        with _explained(tls, "basic_auth_users"):
            import bcrypt  # noqa: F401, PLC0415  only where there are passwords
    raise_problems(file, notes)
    sans = settings.client_allowed_sans
    return _Rules(
        users={user.encode(): hashed.encode() for user, hashed in found.basic_auth_users.items()},
        headers=found.http_server_config.headers,
        rate=found.rate_limit,
        tls=context,
        certified=settings.client_auth_type == _REQUIRED,
        sans=None if sans is None else frozenset(map(_canonical, sans)),
        warnings=tuple(warnings),
    )


def _keeps(file: Path, old: _Rules, new: _Rules) -> None:
    """Raise `ConfigError` where what kept strangers out before would no longer.

    Whoever writes a file empties it first, and on a full disk it stays empty.
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


_NAMED = ("cert_file", "key_file", "client_ca_file")


def _look(path: Path) -> object:
    """Return what changes when a file is written, replaced or removed; costs microseconds, so that it can be asked."""
    try:
        s = os.stat(path)  # noqa: PTH116  three times as fast as Path.stat, for every request
    except OSError as error:
        return error.errno
    return s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_dev, s.st_mode


@contextlib.contextmanager
def _explained(tls: _Tls, where: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        tls.complain(where, "passwords need the package bcrypt, which is not there; install python3-bcrypt or bcrypt")


class _Tls:
    """The section `tls_server_config`, made into what the connections use."""

    def __init__(self, settings: TlsServer, names: Mapping[str, Path], notes: Notes) -> None:
        self._settings = settings
        self._names = names
        self._notes = notes

    def complain(self, where: str, message: str) -> None:
        """Note a mistake at the line of the setting, or of what it stands in."""
        lines = self._notes.lines
        line = next((lines[w] for w in (where, where.rpartition(".")[0], where.partition(".")[0]) if w in lines), 1)
        self._notes.problems.append((line, where, message))

    def context(self, wrong: set[str]) -> ssl.SSLContext | None:
        """Return the context of new connections, None where the section is empty or holds a mistake."""
        s = self._settings
        named = {n.removeprefix(_HERE) for n in self._notes.lines if n.startswith(_HERE)}
        given = {n for n in named if _HERE + n in wrong or getattr(s, n, None) is not None}
        if not given:
            return None
        known = len(self._notes.problems)
        if not hasattr(os, "memfd_create"):
            self.complain("tls_server_config", "TLS needs Linux here (memfd_create)")
        for what in ("cert", "key", "client_ca"):
            if what in given and f"{what}_file" in given:
                self._complain(f"{what}_file", f"given beside {what}; keep one of them")
        for what in ("cert", "key"):
            if not given & {what, f"{what}_file"}:
                self.complain("tls_server_config", f"without {what}_file (or {what}) there is no TLS; name the file")
        verifies = s.client_auth_type in (_IF_GIVEN, _REQUIRED)
        authority = given & {"client_ca", "client_ca_file"}
        if verifies and not authority:
            self._complain("client_auth_type", "who vouches for clients? name the file in client_ca_file")
        if authority and not verifies and f"{_HERE}client_auth_type" not in wrong:
            self._complain(min(authority), f"not used without client_auth_type: {_REQUIRED}; write that as well")
        if s.client_allowed_sans is not None and s.client_auth_type != _REQUIRED:
            self._complain("client_allowed_sans", f"means nothing without client_auth_type: {_REQUIRED}")
        if s.min_version == "TLS13" and s.max_version == "TLS12":
            self._complain("max_version", "older than min_version; no client could come in")
        if s.curve_preferences is not None and len(s.curve_preferences) != 1:
            self._complain("curve_preferences", "Python's TLS takes exactly one curve; name one, or remove the line")
        if s.cipher_suites is not None and not s.cipher_suites:
            self._complain("cipher_suites", "an empty list leaves nothing to choose; name some, or remove the line")
        if len(self._notes.problems) > known or any(w.startswith(_HERE) for w in wrong):
            return None
        return self._build(verifies=verifies)

    def _complain(self, name: str, message: str) -> None:
        self.complain(_HERE + name, message)

    def _build(self, *, verifies: bool) -> ssl.SSLContext | None:
        s = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = getattr(ssl.TLSVersion, _VERSIONS[s.min_version])
        context.maximum_version = getattr(ssl.TLSVersion, _VERSIONS[s.max_version])
        context.options |= ssl.OP_NO_RENEGOTIATION  # a handshake costs us more than the client
        context.set_alpn_protocols(["http/1.1"])
        if not s.prefer_server_cipher_suites:
            context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        if s.cipher_suites is not None:
            context.set_ciphers(":".join(_CIPHERS[name] for name in s.cipher_suites))
        if s.curve_preferences is not None:
            context.set_ecdh_curve(_CURVES[s.curve_preferences[0]])
        texts = {what: self._text(what) for what in ("cert", "key", "client_ca")}
        if None in texts.values():
            return None
        try:
            self._load(context, texts["cert"] or "", texts["key"] or "")
        except ssl.SSLError as error:
            reason = error.reason or ""
            if "MISMATCH" in reason:
                self._complain(self._name("key"), "not the key of the certificate; is one of the two newer?")
            else:
                said = f" ({reason.lower().replace('_', ' ')})" if reason else ""
                self._complain(self._name("cert"), f"OpenSSL cannot use this certificate with this key{said}")
            return None
        if verifies:
            try:
                context.load_verify_locations(cadata=texts["client_ca"])
            except ssl.SSLError as error:
                said = (error.reason or "").lower().replace("_", " ")
                self._complain(self._name("client_ca"), f"holds no certificate that OpenSSL reads ({said})")
                return None
            context.verify_mode = ssl.CERT_REQUIRED if s.client_auth_type == _REQUIRED else ssl.CERT_OPTIONAL
        return context

    def _name(self, what: str) -> str:
        return f"{what}_file" if f"{what}_file" in self._names else what

    def _text(self, what: str) -> str | None:
        """Return the PEM text of a part, "" where none is given, None where a problem was noted."""
        name, path = self._name(what), self._names.get(f"{what}_file")
        text = getattr(self._settings, what) or ""
        try:
            if path is not None:
                with path.open("rb") as stream:
                    text = stream.read(MAX_FILE_BYTES).decode("ascii", "replace")
                if what == "client_ca" and (doubt := trust.doubt(path)):  # it decides who is let in
                    self._complain(name, f"{path}: {doubt}")
                    return None
        except OSError as error:
            self._complain(name, f"{path}: cannot be read: {error.strerror}")
            return None
        kind = "PRIVATE KEY" if what == "key" else "CERTIFICATE"
        if (path or text) and f"{kind}-----" not in text:
            self._complain(name, f"{path or 'the text'} holds no {kind.lower()} in PEM")
            return None
        if what == "key" and "ENCRYPTED" in text:
            self._complain(name, "the key is encrypted, and nobody is there to type its password; store it decrypted")
            return None
        return str(text)

    def _load(self, context: ssl.SSLContext, cert: str, key: str) -> None:
        """Hand over certificate and key as they were read, through memory alone: they may be written to meanwhile."""
        with contextlib.ExitStack() as stack:
            paths = []
            for text in (cert, key):
                fd = os.memfd_create("canaryd-tls")
                stack.callback(os.close, fd)
                os.write(fd, text.encode())
                paths.append(f"/proc/self/fd/{fd}")
            context.load_cert_chain(paths[0], paths[1], lambda: "")  # never a question on a terminal


_HERE = "tls_server_config."


def _canonical(name: str) -> str:
    """Return a subject alternative name in the one form in which two are compared."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


# --- The gate --------------------------------------------------------------------------------------------------------


class _Turns:
    """One password at a time, few that wait, and a pause after a wrong one that keeps their cost below `SHARE`."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._places = threading.Lock()
        self._waiting: set[str] = set()
        """Addresses whose passwords wait or are computed: one each, so that a guesser keeps nobody else out."""
        self._next = 0.0

    def check(self, password: bytes, hashed: bytes, client: str) -> bool | None:
        """Return whether the password is that of the hash; None where the client or too many others wait already."""
        import bcrypt  # noqa: PLC0415

        with self._places:
            if client in self._waiting or len(self._waiting) >= WAITING:
                return None
            self._waiting.add(client)
        try:
            with self._turn:
                if (pause := self._next - time.monotonic()) > 0:
                    time.sleep(pause)
                begun = time.monotonic()
                right = False
                with contextlib.suppress(ValueError):  # bcrypt before 4 takes no NUL
                    right = bcrypt.checkpw(password, hashed)
                took = time.monotonic() - begun
                if not right:
                    self._next = begun + took / SHARE
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
    """A web configuration in force: the gate of a `canaryd.serve.Server`."""

    def __init__(self, file: Path) -> None:
        """Read it; raises `ConfigError` with every mistake, each at its line."""
        self.problems: tuple[str, ...] = ()
        """What is wrong with the files as they are now; what was read before is in force meanwhile."""
        self._file = file
        self._again = 0.0
        """When files that could not be used are read again although they look the same."""
        self._lock = threading.Lock()
        self._looked: dict[Path, object] = {}
        self._rules = _read(file, self._looked)
        self._warn()
        self._bucket = _Bucket(self._rules.rate)
        self._turns = _Turns()
        self._secret = secrets.token_bytes(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        """Fingerprints of what was right, under a key of this process: memory holds no password."""
        self._told: dict[str, tuple[float, int]] = {}

    @property
    def tls(self) -> bool:
        """Whether clients are asked to speak TLS."""
        return self._rules.tls is not None

    @property
    def authenticates(self) -> bool:
        """Whether somebody without a password or a certificate is kept out."""
        return bool(self._rules.users) or self._rules.certified

    @property
    def passwords(self) -> bool:
        """Whether users have passwords."""
        return bool(self._rules.users)

    def refresh(self) -> None:
        """Read the files again if they have changed; keep what is in force where they cannot be used."""
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
                _keeps(self._file, rules, new)
            except ConfigError as error:
                self._looked, self.problems = looked, tuple(error.problems)
                self._again = time.monotonic() + QUIET
                for problem in (*error.problems, "the new web configuration is bad; the old one stays in force"):
                    log.error("%s", problem)  # noqa: TRY400  a mistake in a file, not a traceback
                return rules
            self._rules, self._looked, self.problems = new, looked, ()
            if new.rate != rules.rate:
                self._bucket = _Bucket(new.rate)
            log.info("%s: read again", self._file)
            self._warn()
            return new

    def _unchanged(self) -> bool:
        if self.problems and time.monotonic() > self._again:
            return False  # what could not be read may have been the machine's fault, and not the file's
        return all(_look(path) == before for path, before in self._looked.items())

    def _warn(self) -> None:
        for warning in self._rules.warnings:
            log.warning("%s", warning)

    # What the server asks

    def enter(self, request: socket.socket, patience: float) -> tuple[socket.socket, object]:
        """Shake hands; raises `OSError` where the client is not one that is let in."""
        rules = self._current()
        if rules.tls is None:
            return request, None
        # A duplicate: the server hangs up on the original, whoever waits for this one then.
        plain = request.dup()
        plain.settimeout(patience)
        try:
            stream = rules.tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            plain.close()
            raise
        try:
            stream.do_handshake()  # its timeout is for the whole of it
            _require(rules.sans, stream.getpeercert())
        except OSError as error:
            reason = getattr(error, "reason", None) or ""
            if reason == "HTTP_REQUEST":
                with contextlib.suppress(OSError):
                    request.settimeout(patience)
                    request.sendall(_HTTPS)
            if not isinstance(error, TimeoutError) and reason != "UNEXPECTED_EOF_WHILE_READING":
                what = reason.lower().replace("_", " ") or error.strerror or str(error)
                with contextlib.suppress(OSError):
                    self._tell("TLS", f"{request.getpeername()[0]} was not let in: {what}")
            stream.close()
            raise
        except BaseException:
            stream.close()
            raise
        return stream, rules

    def holds(self, admitted: object) -> bool:
        """Whether nothing has changed since TLS let the connection in; one in plain text, whether that is spoken."""
        rules = self._current()
        return rules.tls is None if admitted is None else rules is admitted

    def headers(self) -> Mapping[str, str]:
        """Return the headers that `http_server_config` sets."""
        return self._rules.headers

    def refusal(self, headers: Mapping[str, str], client: str) -> Answer | None:
        """Return what one is told who is not let in: 429 for too many, 401 for no or a wrong password."""
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
        if mark in self._right:
            return None
        right = self._turns.check(password, hashed, client)
        if right is None:
            return _busy("too many passwords at once", 5)
        if not (right and known):
            self._tell("password", f"{client} was not let in: wrong user or password")
            return _UNAUTHORIZED
        with self._lock:
            self._right[mark] = None
            if len(self._right) > REMEMBERED:
                self._right.popitem(last=False)
        return None

    def _stand_in(self, rules: _Rules, user: bytes) -> bytes:
        """Return a hash that no password has, at the cost of a real one: always the same user's for the same name."""
        costs = sorted(hashed.split(b"$")[2] for hashed in rules.users.values())
        digest = hmac.digest(self._secret, user, hashlib.sha256)
        text = base64.b64encode(digest + digest).replace(b"+", b".")[:53]
        return b"$2b$%s$%s" % (costs[int.from_bytes(digest[:8], "big") % len(costs)], _bounded(text))

    def _tell(self, kind: str, text: str) -> None:
        """Log that a client was not let in, at most once a minute of a kind, and how many more there were."""
        now = time.monotonic()
        with self._lock:
            last, more = self._told.get(kind, (now - QUIET, 0))
            due = now - last >= QUIET
            self._told[kind] = (now, 0) if due else (last, more + 1)
        if due:
            log.warning("%s%s", text, f" ({more} more since the last such line)" if more else "")


def _bounded(text: bytes) -> bytes:
    """Return 53 characters that bcrypt takes for salt and digest: the salt's last one carries two bits alone."""
    return text[:21] + b"." + text[22:]


_UNAUTHORIZED = Answer(401, PLAIN_TEXT, b"unauthorized: give a user and a password (Basic)\n", (REALM,))


def _require(allowed: frozenset[str] | None, certificate: Mapping[str, Any] | None) -> None:
    if allowed is not None and not allowed & set(_names(certificate)):
        raise ConnectionAbortedError("its certificate has none of client_allowed_sans")


_SAID = b"this is an HTTPS server: write https:// for http://\n"
_HTTPS = (
    f"HTTP/1.0 400 {HTTPStatus(400).phrase}\r\nContent-Type: {PLAIN_TEXT}\r\nContent-Length: {len(_SAID)}\r\n\r\n"
).encode() + _SAID


def _busy(why: str, seconds: int) -> Answer:
    return Answer(429, PLAIN_TEXT, f"{why}: come again\n".encode(), (f"Retry-After: {seconds}",))


def _credentials(header: str) -> tuple[bytes, bytes] | None:
    """Return (user, password) of a header of basic authentication (RFC 7617), None where it is none."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(value.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (user, password) if colon else None


def _names(certificate: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the subject alternative names of a certificate as `ssl` decodes it: DNS names, addresses, mail and URIs."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI", "IP Address"):
            yield _canonical(value)
