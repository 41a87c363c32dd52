"""TLS of the daemon's address: certificate, key and the authority that signs clients; changed files are read again."""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path

from canaryd.config import permissions
from canaryd.config.load import ConfigError
from canaryd.config.settings import TlsConfig

log = logging.getLogger(__name__)


class Tls:
    """The TLS context for new connections. While changed files cannot be used, the last good files stay in force."""

    def __init__(self, settings: TlsConfig) -> None:
        """Read the files that the settings name; raise `ConfigError` if they cannot be used."""
        if not (settings.cert_file and settings.key_file):
            raise ConfigError(["TLS needs both tls.cert_file and tls.key_file; name both, or nothing under tls"])
        self.problems: tuple[str, ...] = ()
        """What is wrong with the files as they are now."""
        named = {name: getattr(settings, name) for name in ("cert_file", "key_file", "client_ca_file")}
        self._files: dict[str, Path] = {name: path for name, path in named.items() if path}
        self._seen = self._look()
        self.context = self._read()
        """What new connections are made with."""

    def refresh(self) -> None:
        """Read the files again if they have changed. The caller makes sure that only one thread at a time does this."""
        seen = self._look()
        if seen == self._seen and not self.problems:
            return
        try:
            self.context, self._seen = self._read(), seen
        except ConfigError as error:
            if self.problems != (problems := tuple(error.problems)):
                self.problems = problems
                for problem in (*problems, "the new TLS files are bad; the old ones stay in force"):
                    log.error("%s", problem)  # noqa: TRY400  a mistake in a file, not a traceback
        else:
            self.problems = ()
            log.info("%s: reloaded", ", ".join(map(str, self._files.values())))

    def _look(self) -> list[object]:
        """Return a value that changes when one of the files is written, replaced or removed."""
        found: list[object] = []
        for path in self._files.values():
            with contextlib.suppress(OSError):
                s = path.stat()
                found.append((path, s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino, s.st_mode))
        return found

    def _read(self) -> ssl.SSLContext:
        cert, key, authority = self._files["cert_file"], self._files["key_file"], self._files.get("client_ca_file")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION  # a handshake costs us more than the client
        context.set_alpn_protocols(["http/1.1"])
        what = f"tls.key_file: OpenSSL cannot use {key} with {cert}", "name a certificate and its key, unencrypted PEM"
        try:
            context.load_cert_chain(cert, key, lambda: "")  # never a question on a terminal
            if authority:
                what = f"tls.client_ca_file: OpenSSL cannot use {authority}", "name certificates in PEM"
                if doubt := permissions.doubt(authority):  # it decides who is let in
                    raise ConfigError([f"tls.client_ca_file: {authority}: {doubt}"])
                context.load_verify_locations(authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise ConfigError([f"{what[0]} ({reason.lower().replace('_', ' ')}); {what[1]}"]) from error
        return context
