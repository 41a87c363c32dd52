"""Keys and certificates for tests, made by the openssl command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.programs import accepted, needed


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """One that vouches for others."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._openssl = needed("openssl", untested="no certificate was made, and TLS not tried")
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.pair = Pair(directory / f"{name}.crt", directory / f"{name}.key")
        self._run(
            *("req", "-x509", *_NEW, "-keyout", self.pair.key, "-out", self.pair.cert, "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),  # Python 3.13 and newer want it
        )

    @property
    def cert(self) -> Path:
        """Its own certificate."""
        return self.pair.cert

    def issue(self, name: str, sans: str = "DNS:localhost,IP:127.0.0.1", days: int = 2) -> Pair:
        """Vouch for somebody until `days` from now; one below 0 has expired."""
        made = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        request, extension = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        self._run("req", *_NEW, "-keyout", made.key, "-out", request, "-subj", f"/CN={name}")
        extension.write_text(f"subjectAltName={sans}\nauthorityKeyIdentifier=keyid\n")
        self._run(
            *("x509", "-req", "-in", request, "-CA", self.pair.cert, "-CAkey", self.pair.key, "-CAcreateserial"),
            *("-days", str(days), "-extfile", extension, "-out", made.cert),
        )
        return made

    def _run(self, *arguments: object) -> None:
        accepted(self._openssl, *arguments)


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
