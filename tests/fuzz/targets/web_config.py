"""The web configuration: the file, what it names, and the credentials of a request.

Only `ConfigError`, each problem one printable line without a password, a hash or a key in it. Where users are set,
nobody comes in but with a user's own password, whatever the header.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import base64
import json
from pathlib import Path

import bcrypt

from canaryd.config.load import ConfigError
from canaryd.web import auth
from canaryd.web.auth import WebConfig
from canaryd.web.server import Answer
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import in_time, one_line, scratch

ROOT = Path(__file__).resolve().parents[3]
PASSWORD = "Zq9pass7X"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
TEXT = f"""tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: NoClientCert
  min_version: TLS12
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  curve_preferences: [X25519]
  client_allowed_sans: [a.example]
http_server_config:
  http2: true
  headers:
    X-Frame-Options: deny
basic_auth_users:
  prometheus: {HASH}
rate_limit:
  interval: 1s
  burst: 5
"""
USERS = f"basic_auth_users:\n  prometheus: {HASH}\n"


def _read(data: bytes) -> WebConfig | None:
    with scratch.fresh() as place, in_time(len(data)):
        file = place / "web.yml"
        file.write_bytes(data)
        file.chmod(0o600)
        for name in ("server.crt", "server.key"):
            (place / name).write_text(f"-----BEGIN {PASSWORD}-----\n")
            (place / name).chmod(0o600)
        try:
            return WebConfig(file)
        except ConfigError as error:
            assert error.problems
            for problem in error.problems:
                one_line(problem)
                assert PASSWORD not in problem
                assert HASH not in problem
            return None


def _bytes(data: bytes) -> None:
    _read(stretched(data))


def _lines(data: bytes) -> None:
    """The sound file with some of its lines spoilt, left out or doubled."""
    choices = Choices(data)
    said = []
    for line in TEXT.split("\n"):
        kind = choices.below(6)
        if kind == 0:
            continue
        if kind == 1:
            name, colon, _ = line.partition(":")
            line = f"{name}{colon} {choices.text() if choices.flag() else json.dumps(choices.text())}"  # noqa: PLW2901
        said += [line] * (2 if kind == 2 and not choices.below(4) else 1)
    found = _read("\n".join(said).encode("utf-8", "surrogatepass"))
    if found is not None:
        for name, value in found.headers().items():
            assert (name + value).isprintable(), "a header could end the answer's head"


_made: list[WebConfig] = []


def _asked(data: bytes) -> None:
    if not _made:
        with scratch.fresh() as place:
            file = place / "web.yml"
            file.write_text(USERS)
            file.chmod(0o600)
            _made.append(WebConfig(file))
    choices = Choices(data)
    user, password = choices.text(), choices.text()
    if choices.flag():
        user = choices.of(("prometheus", "Prometheus", "prometheus ", ""))
    if choices.flag():
        password = choices.of((PASSWORD, PASSWORD + "\0x", PASSWORD.upper(), "", HASH))
    packed = base64.b64encode(f"{user}:{password}".encode("utf-8", "replace")).decode()
    header = f"{choices.of(('Basic', 'basic', 'Bearer', 'Basic ', ''))} {packed}"
    if not choices.below(3):
        header = choices.text() if choices.flag() else "Basic " + choices.text()
    given = auth._credentials(header)
    said = _made[0].refusal({"authorization": header} if choices.below(8) else {}, "127.0.0.1")
    if said is None:
        assert given is not None
        assert given[0] == b"prometheus"
        assert given[1] == PASSWORD.encode(), given
    else:
        assert isinstance(said, Answer)
        assert said.status in (401, 429)
        assert PASSWORD.encode() not in said.body


def _header(data: bytes) -> None:
    text = stretched(data).decode("latin-1")
    with in_time(len(data)):
        given = auth._credentials(text)
    assert given is None or (isinstance(given[0], bytes) and b":" not in given[0])


target = modes(_bytes, _lines, _asked, _header)


def seeds() -> list[bytes]:
    return [
        seed(0, TEXT),
        seed(0, USERS),
        seed(0, (ROOT / "deploy/web.yml").read_bytes() if (ROOT / "deploy/web.yml").exists() else b""),
        *(seed(mode, bytes((n + i * 7) % 256 for i in range(60))) for mode in (1, 2) for n in range(0, 250, 12)),
        seed(3, "Basic " + base64.b64encode(b"prometheus:x").decode()),
    ]
