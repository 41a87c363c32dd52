"""TLS contexts from web configuration."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from canaryd.config import permissions
from canaryd.config.load import MAX_FILE_BYTES
from canaryd.config.schema import Notes
from canaryd.web.settings import CIPHERS, CURVES, IF_GIVEN, REQUIRED, VERSIONS, TlsServer

NAMED = ("cert_file", "key_file", "client_ca_file")


class Tls:
    """Makes an SSL context of the section `tls_server_config`."""

    def __init__(self, settings: TlsServer, names: Mapping[str, Path], notes: Notes) -> None:
        self._settings = settings
        self._names = names
        self._notes = notes

    def context(self, wrong: set[str]) -> ssl.SSLContext | None:
        """Return the context of new connections, None where the section is empty or holds a mistake."""
        s = self._settings
        named = {n.removeprefix(_HERE) for n in self._notes.lines if n.startswith(_HERE)}
        given = {n for n in named if _HERE + n in wrong or getattr(s, n, None) is not None}
        if not given:
            return None
        known = len(self._notes.problems)
        if not hasattr(os, "memfd_create"):
            self._notes.add_at("tls_server_config", "TLS needs Linux here (memfd_create)")
        for what in ("cert", "key", "client_ca"):
            if what in given and f"{what}_file" in given:
                self._complain(f"{what}_file", f"given beside {what}; keep one of them")
        for what in ("cert", "key"):
            if not given & {what, f"{what}_file"}:
                self._notes.add_at(
                    "tls_server_config", f"without {what}_file (or {what}) there is no TLS; name the file"
                )
        verifies = s.client_auth_type in (IF_GIVEN, REQUIRED)
        authority = given & {"client_ca", "client_ca_file"}
        if verifies and not authority:
            self._complain("client_auth_type", "the CA of client certificates is missing; name client_ca_file")
        if authority and not verifies and f"{_HERE}client_auth_type" not in wrong:
            self._complain(min(authority), f"not used without client_auth_type: {REQUIRED}; write that as well")
        if s.client_allowed_sans is not None and s.client_auth_type != REQUIRED:
            self._complain("client_allowed_sans", f"means nothing without client_auth_type: {REQUIRED}")
        if s.min_version == "TLS13" and s.max_version == "TLS12":
            self._complain("max_version", "older than min_version, so no client could connect; swap the two")
        if s.curve_preferences is not None and len(s.curve_preferences) != 1:
            self._complain("curve_preferences", "Python's TLS takes exactly one curve; name one, or remove the line")
        if s.cipher_suites is not None and not s.cipher_suites:
            self._complain("cipher_suites", "an empty list leaves nothing to choose; name some, or remove the line")
        if len(self._notes.problems) > known or any(w.startswith(_HERE) for w in wrong):
            return None
        return self._build(verifies=verifies)

    def _complain(self, name: str, message: str) -> None:
        self._notes.add_at(_HERE + name, message)

    def _build(self, *, verifies: bool) -> ssl.SSLContext | None:
        s = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = getattr(ssl.TLSVersion, VERSIONS[s.min_version])
        context.maximum_version = getattr(ssl.TLSVersion, VERSIONS[s.max_version])
        context.options |= ssl.OP_NO_RENEGOTIATION  # a handshake costs us more than the client
        context.set_alpn_protocols(["http/1.1"])
        if not s.prefer_server_cipher_suites:
            context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        if s.cipher_suites is not None:
            context.set_ciphers(":".join(CIPHERS[name] for name in s.cipher_suites))
        if s.curve_preferences is not None:
            context.set_ecdh_curve(CURVES[s.curve_preferences[0]])
        texts = {what: self._text(what) for what in ("cert", "key", "client_ca")}
        if None in texts.values():
            return None
        try:
            self._load(context, texts["cert"] or "", texts["key"] or "")
        except ssl.SSLError as error:
            reason = error.reason or ""
            if "MISMATCH" in reason:
                self._complain(self._name("key"), "not the key of the certificate; name a matching pair")
            else:
                detail = f" ({reason.lower().replace('_', ' ')})" if reason else ""
                self._complain(self._name("cert"), f"OpenSSL cannot use this certificate with this key{detail}")
            return None
        if verifies:
            try:
                context.load_verify_locations(cadata=texts["client_ca"])
            except ssl.SSLError as error:
                detail = (error.reason or "").lower().replace("_", " ")
                self._complain(self._name("client_ca"), f"holds no certificate that OpenSSL reads ({detail})")
                return None
            context.verify_mode = ssl.CERT_REQUIRED if s.client_auth_type == REQUIRED else ssl.CERT_OPTIONAL
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
                if what == "client_ca" and (doubt := permissions.doubt(path)):  # it decides which clients are admitted
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
            self._complain(name, "the key is encrypted, and canaryd cannot ask for its password; store it decrypted")
            return None
        return str(text)

    def _load(self, context: ssl.SSLContext, cert: str, key: str) -> None:
        """Load certificate and key as they were read, through memory: their files may change meanwhile."""
        with contextlib.ExitStack() as stack:
            paths = []
            for text in (cert, key):
                fd = os.memfd_create("canaryd-tls")
                stack.callback(os.close, fd)
                os.write(fd, text.encode())
                paths.append(f"/proc/self/fd/{fd}")
            context.load_cert_chain(paths[0], paths[1], lambda: "")  # never a question on a terminal


_HERE = "tls_server_config."
