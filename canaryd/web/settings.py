"""Prometheus's web configuration file: its keys and their types."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from canaryd.config.schema import (
    BOOLEAN,
    SPELLED,
    ListOf,
    Scalar,
    Variables,
    quoted,
    read_boolean,
    read_filled,
    section,
    setting,
)
from canaryd.config.values import choice, whole

MAKE_HASH = "import bcrypt, getpass; print(bcrypt.hashpw(getpass.getpass().encode(), bcrypt.gensalt(10)).decode())"
"""Python that asks for a password and prints its hash: canaryd's interpreter has all it needs."""
COSTS = (4, 15)
"""Least and largest cost of a bcrypt hash: bcrypt's own minimum; above the second, one check takes longer than a
scrape's usual 10 s (ours)."""
CIPHERS = {
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
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
VERSIONS = {"TLS12": "TLSv1_2", "TLS13": "TLSv1_3"}
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Headers that the toolkit lets be set → the values that it takes; () for any."""
_NONE, IF_GIVEN, REQUIRED = "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _version(text: str) -> str:
    if text in ("TLS10", "TLS11"):
        raise ValueError(f"{text} is insecure (RFC 8996) and not supported; write TLS12 or TLS13")
    if text not in VERSIONS:
        raise ValueError(f"{quoted(text)} is not a TLS version; write TLS12 or TLS13")
    return text


def _cipher(text: str) -> str:
    if text in _TLS13:
        raise ValueError(f"{text} is a suite of TLS 1.3, which are always on and cannot be chosen; remove it")
    if text not in CIPHERS:
        raise ValueError(f"{quoted(text)} is not a supported suite; choose from {', '.join(CIPHERS)}")
    return text


def _client_auth(text: str) -> str:
    if text in _UNVERIFIED:
        raise ValueError(
            f"{text} asks for certificates without verifying them, which keeps nobody out and which Python's TLS cannot"
            f" do; write {REQUIRED}, {IF_GIVEN} or {_NONE}"
        )
    if text not in (_NONE, IF_GIVEN, REQUIRED):
        raise ValueError(f"{quoted(text)} is not a client_auth_type; write {REQUIRED}, {IF_GIVEN} or {_NONE}")
    return text


def _hash(text: str) -> str:
    found = re.fullmatch(r"\$2[abxy]\$([0-9]{2})\$[./A-Za-z0-9]{53}", text)
    if not found:  # not repeated: it may be a password
        raise ValueError(f"not a bcrypt hash; make one with: {sys.executable} -c '{MAKE_HASH}'")
    if not COSTS[0] <= int(found[1]) <= COSTS[1]:
        raise ValueError(f"a bcrypt hash of cost {int(found[1])}; make one of cost {COSTS[0]} to {COSTS[1]}, e.g. 10")
    return text


def _interval(text: str) -> float:
    """Return the seconds of a duration as Go writes it: "1s", "500ms", "1m30s", or 0 for no limit."""
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)", text)
    if text == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f'{quoted(text)} is not an interval; write e.g. "1s" or "500ms"')
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds > 86400:
        raise ValueError(f'{quoted(text)} is longer than a day; write e.g. "1s"')
    return seconds


def _no_http2(text: str) -> bool:
    if read_boolean(text):
        raise ValueError("HTTP/2 is not supported, clients get HTTP/1.1; write false, or remove the line")
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
_VERSION = Scalar("TLS12 or TLS13", _version, {"enum": [*VERSIONS]})


@dataclass(frozen=True, kw_only=True)
class TlsServer:
    """The section `tls_server_config`. Names of files are relative to the web configuration."""

    cert: str | None = setting(_PEM, "null", "The server's certificate with its chain.")
    key: str | None = setting(_PEM, "null", "Its private key.")
    client_ca: str | None = setting(_PEM, "null", "The CA of client certificates.")
    cert_file: str | None = setting(_FILE, "null", "File of the server's certificate with its chain.")
    key_file: str | None = setting(_FILE, "null", "File of its private key.")
    client_ca_file: str | None = setting(_FILE, "null", "File of the CA of client certificates.")
    client_auth_type: str | None = setting(
        Scalar("text", _client_auth, {"type": "string"}), "null", "Whether clients must show a certificate."
    )
    client_allowed_sans: tuple[str, ...] | None = setting(
        ListOf(_TEXT), "null", "Names, one of which a client must have."
    )
    min_version: str = setting(_VERSION, "TLS12", "Oldest TLS version.")
    max_version: str = setting(_VERSION, "TLS13", "Newest TLS version.")
    cipher_suites: tuple[str, ...] | None = setting(
        ListOf(Scalar("a suite", _cipher, {"type": "string"})), "null", "Suites of TLS 1.2."
    )
    prefer_server_cipher_suites: bool = setting(BOOLEAN, "true", "Whether the server's order of suites counts.")
    curve_preferences: tuple[str, ...] | None = setting(
        ListOf(choice("a supported curve", [*CURVES], ("str",))), "null", "The curve of the key exchange."
    )


@dataclass(frozen=True, kw_only=True)
class HttpServer:
    """The section `http_server_config`."""

    http2: bool | None = setting(Scalar("false", _no_http2, {"const": False}, ("bool",)), "null", "HTTP/2: never.")
    headers: Mapping[str, str] = setting(
        Variables(
            Scalar("text (in quotes)", _header, {"type": "string"}),
            "|".join(HEADERS),
            "a mapping of headers to text",
            f"not a header that can be set; there are {', '.join(HEADERS)}",
        ),
        "{}",
        "Headers of every answer.",
    )


@dataclass(frozen=True, kw_only=True)
class RateLimit:
    """The section `rate_limit`: a token bucket for all requests together."""

    interval: float = setting(Scalar("an interval", _interval, {}, ("str", "int")), "0", "Seconds for one request.")
    burst: int | None = setting(whole(1, 1_000_000), "null", "Requests at once.")


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
            "not a user name: it is empty, or holds a colon or a control character",
        ),
        "{}",
        "User → bcrypt hash of the password.",
    )
    rate_limit: RateLimit = section(RateLimit, "A limit for requests.")
