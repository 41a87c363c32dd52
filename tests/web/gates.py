"""Servers of a web configuration, certificates and clients for their tests."""

from __future__ import annotations

import contextlib
import http.client
from pathlib import Path

import pytest

from canaryd.config.load import ConfigError
from canaryd.web.auth import LONGEST, WebConfig
from canaryd.web.server import Answer, Limits, Server

bcrypt = pytest.importorskip("bcrypt", reason="bcrypt is not installed here: passwords are not tried")
BODY = b"canaryd_build_info 1\n" * 1000
ROUTES = {
    "/metrics": lambda headers: Answer(200, "text/plain", BODY),
    "/healthz": lambda _: Answer(503, "text/plain", b""),
}
COST = 5
PASSWORD = "correct horse"
REQUIRED = "RequireAndVerifyClientCert"


def hashed(password: str = PASSWORD, cost: int = COST) -> str:
    return bcrypt.hashpw(password.encode()[:LONGEST], bcrypt.gensalt(cost)).decode()


def write(directory: Path, text: str) -> Path:
    path = directory / "web.yml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def tls(pair, more: str = "") -> str:
    return f"tls_server_config:\n  cert_file: {pair.cert}\n  key_file: {pair.key}\n{more}"


def users(**given: str) -> str:
    return "basic_auth_users:\n" + "".join(f"  {user}: '{text}'\n" for user, text in given.items())


@contextlib.contextmanager
def serving(file: Path, **limits):
    gate = WebConfig(file)
    server = Server("127.0.0.1", 0, ROUTES, Limits(**limits), gate=gate)
    server.start()
    try:
        yield server
    finally:
        server.close()


def get(server, context=None, path="/metrics", timeout=20, **headers):
    """Return (status, headers, body, certificate of the server) of one request on a connection of its own."""
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind("127.0.0.1", server.port, timeout=timeout, **({"context": context} if context else {}))
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        certificate = connection.sock.getpeercert() if context else None
        return response.status, response.headers, response.read(), certificate


def problems(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        WebConfig(file)
    return [problem.removeprefix(f"{file}:") for problem in caught.value.problems]
