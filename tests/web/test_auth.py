"""The web configuration: what the file may say, and who is let in by it."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import logging
import re
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from canaryd.config.load import ConfigError
from canaryd.web import auth
from canaryd.web.auth import LONGEST, SHARE, WAITING, WebConfig
from canaryd.web.server import SECURITY, Answer, Limits, Server
from canaryd.web.settings import MAKE_HASH
from tests.command import ROOT, eventually
from tests.pki import Authority

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


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def pair(ca):
    return ca.issue("server")


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


def trusting(ca, client=None, **versions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.cert)
    if client:
        context.load_cert_chain(client.cert, client.key)
    for name, value in versions.items():
        setattr(context, name, value)
    return context


def basic(user: str, password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def get(server, context=None, path="/metrics", timeout=20, **headers):
    """Return (status, headers, body, certificate of the server) of one request on a connection of its own."""
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind("127.0.0.1", server.port, timeout=timeout, **({"context": context} if context else {}))
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        certificate = connection.sock.getpeercert() if context else None
        return response.status, response.headers, response.read(), certificate


def asked_again(connection) -> bool:
    """Tell whether an open connection still answers."""
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read() == BODY
    except (OSError, http.client.HTTPException):
        return False


def refused(server, context, **headers) -> bool:
    """Tell whether the server lets nobody in who comes like this."""
    try:
        get(server, context, **headers)
    except (OSError, http.client.HTTPException):
        return True
    return False


def problems(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        WebConfig(file)
    return [problem.removeprefix(f"{file}:") for problem in caught.value.problems]


# --- The file --------------------------------------------------------------------------------------------------------


def test_every_mistake_is_told_at_once_with_its_line(tmp_path):
    """What is unknown, what is misspelt and what Python's TLS cannot do; no secret is repeated."""
    text = """\
tls_server_config:
  cert_file: server.crt
  key: hunter2
  client_auth_type: RequireAnyClientCert
  min_version: TLS11
  max_version: SSL3
  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_RSA_WITH_RC4_128_SHA]
  curve_preferences: [CurveP224]
  certificate: x
http_server_config:
  http2: true
  headers: {Server: x, X-Frame-Options: sometimes}
basic_auth_users:
  alice: hunter2
  bob: 123456789
  eve: "$2y$31$vakpDkkQhyIU1fs6gTe1suHKHeXCvI8xdwi5..GXpF9ihWMxzUyqe"
rate_limit: {interval: soon, burst: 0}
"""
    found = problems(write(tmp_path, text))
    begun = [re.match(r"(\d+): ([\w.-]+)(\[\d\])?: ", line) for line in found]
    assert [(int(m[1]), m[2]) for m in begun if m] == [
        (3, "tls_server_config.key"),
        (4, "tls_server_config.client_auth_type"),
        (5, "tls_server_config.min_version"),
        (6, "tls_server_config.max_version"),
        (7, "tls_server_config.cipher_suites"),
        (7, "tls_server_config.cipher_suites"),
        (8, "tls_server_config.curve_preferences"),
        (9, "tls_server_config.certificate"),
        (11, "http_server_config.http2"),
        (12, "http_server_config.headers.Server"),
        (12, "http_server_config.headers.X-Frame-Options"),
        (14, "basic_auth_users.alice"),
        (15, "basic_auth_users.bob"),
        (16, "basic_auth_users.eve"),
        (17, "rate_limit.interval"),
        (17, "rate_limit.burst"),
    ]
    assert len(begun) == 16
    assert "hunter2" not in "".join(found)
    assert "123456789" not in "".join(found)


@pytest.mark.parametrize(
    ("more", "where", "said"),
    [
        ("  min_version: TLS12\n  cert: |\n    -----BEGIN CERTIFICATE-----\n", "cert_file", "given beside cert"),
        (
            "  client_auth_type: RequireAndVerifyClientCert\n",
            "client_auth_type",
            "the CA of client",
        ),
        ("  client_ca_file: ca.crt\n", "client_ca_file", "not used without client_auth_type"),
        ("  client_allowed_sans: [a]\n", "client_allowed_sans", "means nothing without"),
        ("  min_version: TLS13\n  max_version: TLS12\n", "max_version", "older than min_version"),
        ("  curve_preferences: [X25519, CurveP256]\n", "curve_preferences", "exactly one curve"),
        ("  cipher_suites: []\n", "cipher_suites", "an empty list"),
        ("rate_limit: {interval: 1s}\n", "rate_limit.interval", "without a burst"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, pair, more, where, said):
    """Each is refused with the setting that has to change."""
    (problem,) = problems(write(tmp_path, tls(pair, more)))
    assert where in problem.split(": ")[1]
    assert said in problem


def test_half_a_tls_section_is_no_plain_text(tmp_path):
    """A section that asks for TLS in any way never ends in an address without it."""
    found = problems(write(tmp_path, "tls_server_config: {max_version: TLS13, client_auth_type: NoClientCert}\n"))
    assert [line.partition(": ")[2] for line in found] == [
        "tls_server_config: without cert_file (or cert) there is no TLS; name the file",
        "tls_server_config: without key_file (or key) there is no TLS; name the file",
    ]
    for nothing in ("", "# later\n", "tls_server_config:\n", "tls_server_config: {}\nbasic_auth_users: {}\n"):
        assert problems(write(tmp_path, nothing)) == [
            "1: nothing is set; write what is wanted, or leave web_config out"
        ]


def test_files_that_are_no_certificates(tmp_path, ca, pair):
    """Missing, unreadable as PEM, not a pair, encrypted, no authority: each is said at its setting, with its path."""
    other = ca.issue("other")
    noise = tmp_path / "noise"
    noise.write_text("nothing\n")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", pair.key, "-out", locked],
        check=True, capture_output=True,
    )  # fmt: skip

    def said(cert, key, more="") -> str:
        (problem,) = problems(write(tmp_path, f"tls_server_config:\n  cert_file: {cert}\n  key_file: {key}\n{more}"))
        return problem

    assert said("gone.crt", pair.key) == (
        f"2: tls_server_config.cert_file: {tmp_path}/gone.crt: cannot be read: No such file or directory"
    )
    assert said(noise, pair.key) == f"2: tls_server_config.cert_file: {noise} holds no certificate in PEM"
    assert said(pair.cert, noise) == f"3: tls_server_config.key_file: {noise} holds no private key in PEM"
    assert said(pair.cert, other.key).startswith("3: tls_server_config.key_file: not the key of the certificate")
    assert said(pair.cert, locked).startswith("3: tls_server_config.key_file: the key is encrypted")
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {noise}\n"
    assert (
        said(pair.cert, pair.key, more) == f"5: tls_server_config.client_ca_file: {noise} holds no certificate in PEM"
    )
    broken = tmp_path / "broken.crt"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert "OpenSSL cannot use this certificate" in said(broken, pair.key)
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {broken}\n"
    assert "holds no certificate that OpenSSL reads" in said(pair.cert, pair.key, more)


@pytest.mark.parametrize("name", ["missing.yml", "."])
def test_a_file_that_is_none(tmp_path, name):
    """A missing file and a directory are named."""
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / name))):
        WebConfig(tmp_path / name)


def test_a_file_that_others_can_write_is_refused(tmp_path):
    """Whoever writes it decides who may read the evidence."""
    path = write(tmp_path, "")
    path.chmod(0o662)
    reason = r"it is writable by others \(-rw-rw--w-\); if you trust it, run chmod go-w"
    with pytest.raises(ConfigError, match=rf"web\.yml: {reason}"):
        WebConfig(path)


def test_keys_that_everybody_may_read_are_warned_of(tmp_path, ca, caplog):
    """They work, and the log says how to end it."""
    pair = ca.issue("open")
    pair.key.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        WebConfig(write(tmp_path, tls(pair)))
    assert f"{pair.key}: all users may read it (-rw-r--r--); run chmod o-rwx {pair.key}" in caplog.text


def test_the_shipped_example_is_read_and_promtool_agrees(tmp_path, ca, pair):
    """deploy/web.yml, every line of it uncommented, is a configuration for canaryd and for Prometheus alike."""
    text = (ROOT / "deploy" / "web.yml").read_text()
    assert "nothing is set" in problems(write(tmp_path, text))[0]
    full = re.sub(r"(?m)^( *)#(?=\S)", r"\1", text)
    shutil.copy(pair.cert, tmp_path / "server.crt")
    shutil.copy(pair.key, tmp_path / "server.key")
    shutil.copy(ca.cert, tmp_path / "clients.crt")
    gate = WebConfig(write(tmp_path, full))
    assert gate.tls
    assert gate.passwords
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed here: nobody else has read the example")
    done = subprocess.run(
        [promtool, "check", "web-config", tmp_path / "web.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- TLS -------------------------------------------------------------------------------------------------------------


def test_tls(tmp_path, ca, pair):
    """The body arrives whole, with our headers, by TLS 1.2 and 1.3 and by nothing older; ALPN says HTTP/1.1."""
    with serving(write(tmp_path, tls(pair))) as server:
        status, headers, body, _ = get(server, trusting(ca))
        assert (status, body) == (200, BODY)
        assert SECURITY.items() <= dict(headers).items()
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            assert get(server, trusting(ca, minimum_version=version, maximum_version=version))[0] == 200
        old = trusting(ca)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert refused(server, old)
        assert refused(server, ssl.create_default_context())
        assert refused(server, None) or get(server)[0] == 400
        context = trusting(ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            assert client.selected_alpn_protocol() == "http/1.1"


def test_plain_text_to_a_tls_server_is_told_so(tmp_path, pair):
    """One sentence, as other servers do, and no evidence."""
    with serving(write(tmp_path, tls(pair))) as server:
        status, _, body, _ = get(server)
        assert (status, body) == (400, b"this is an HTTPS server: write https:// for http://\n")


def test_inline_certificates(tmp_path, ca, pair):
    """cert, key and client_ca hold the text itself."""
    block = {"cert": pair.cert, "key": pair.key, "client_ca": ca.cert}
    text = "tls_server_config:\n  client_auth_type: RequireAndVerifyClientCert\n"
    for name, path in block.items():
        text += f"  {name}: |\n" + "".join(f"    {line}\n" for line in path.read_text().splitlines())
    with serving(write(tmp_path, text)) as server:
        assert get(server, trusting(ca, ca.issue("client")))[0] == 200
        assert refused(server, trusting(ca))


def test_client_certificates(tmp_path, ca, pair):
    """Required: nobody without one of ours that is valid; if given: nobody with a foreign one."""
    client, expired = ca.issue("client"), ca.issue("expired", days=-1)
    stranger = Authority(tmp_path / "other", "other").issue("stranger")
    required = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {ca.cert}\n"
    with serving(write(tmp_path, tls(pair, required))) as server:
        assert get(server, trusting(ca, client))[0] == 200
        assert [refused(server, trusting(ca, who)) for who in (None, expired, stranger)] == [True] * 3
    with serving(
        write(tmp_path, tls(pair, required.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")))
    ) as s:
        assert [get(s, trusting(ca, who))[0] for who in (None, client)] == [200, 200]
        assert [refused(s, trusting(ca, who)) for who in (expired, stranger)] == [True] * 2


def test_allowed_names(tmp_path, ca, pair, caplog):
    """A client's certificate must hold one of the names: DNS, address, mail or URI; the log says who was sent away."""
    more = f"  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: {ca.cert}\n"
    more += (
        "  client_allowed_sans: [prometheus.example, '2001:db8::1', ops@example.org, 'spiffe://example/prometheus']\n"
    )
    sans = (
        "DNS:prometheus.example",
        "IP:2001:DB8:0:0:0:0:0:1",
        "email:ops@example.org",
        "URI:spiffe://example/prometheus",
    )
    with serving(write(tmp_path, tls(pair, more))) as server:
        for number, san in enumerate(sans):
            assert get(server, trusting(ca, ca.issue(f"c{number}", f"DNS:other,{san}")))[0] == 200
        assert refused(server, trusting(ca, ca.issue("c9", "DNS:grafana.example,IP:127.0.0.1")))
        eventually(lambda: "127.0.0.1 was not let in: its certificate has none of client_allowed_sans" in caplog.text)


def test_suites_and_curves(tmp_path, ca, pair):
    """Only what is named is spoken."""
    more = "  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n"
    more += "  curve_preferences: [CurveP384]\n  prefer_server_cipher_suites: false\n"
    with serving(write(tmp_path, tls(pair, more))) as server:
        assert get(server, trusting(ca))[0] == 200
        wrong = trusting(ca)
        wrong.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        assert refused(server, wrong)
        other = trusting(ca)
        other.set_ecdh_curve("prime256v1")
        assert refused(server, other)


def test_a_new_certificate_is_used_at_once(tmp_path, ca):
    """No restart, no signal: by renaming over it, as tools do; a connection from before is not served any more."""
    first, second = ca.issue("first"), ca.issue("second")
    for source, name in ((first.cert, "s.crt"), (first.key, "s.key")):
        shutil.copy(source, tmp_path / name)
    file = write(tmp_path, "tls_server_config: {cert_file: s.crt, key_file: s.key}\n")
    with serving(file) as server:
        old = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=trusting(ca))
        assert asked_again(old)
        assert asked_again(old)
        number = get(server, trusting(ca))[3]["serialNumber"]
        for source, name in ((second.cert, "s.crt"), (second.key, "s.key")):
            shutil.copy(source, tmp_path / "new")
            (tmp_path / "new").rename(tmp_path / name)
        assert get(server, trusting(ca))[3]["serialNumber"] != number
        assert not asked_again(old)
        old.close()


def test_a_bad_file_leaves_the_old_one_in_force(tmp_path, ca, caplog):
    """The log says what is wrong, once, and so do the problems; what is mended is used, whichever file it was."""
    pair = ca.issue("kept")
    cert = tmp_path / "s.crt"
    shutil.copy(pair.cert, cert)
    file = write(tmp_path, f"tls_server_config: {{cert_file: s.crt, key_file: {pair.key}}}\n")
    good = file.read_text()
    gate = WebConfig(file)
    server = Server("127.0.0.1", 0, ROUTES, gate=gate)
    server.start()
    with contextlib.closing(server), caplog.at_level(logging.INFO):
        cert.unlink()
        assert [get(server, trusting(ca))[0] for _ in range(3)] == [200] * 3
        assert caplog.text.count("s.crt: cannot be read: No such file") == 1
        assert "the old one stays in force" in caplog.text
        assert [problem.startswith(f"{file}:1: ") for problem in gate.problems] == [True]
        shutil.copy(pair.cert, cert)
        assert get(server, trusting(ca))[0] == 200
        assert gate.problems == ()
        write(tmp_path, good.replace("s.crt", "later.crt"))
        assert get(server, trusting(ca))[0] == 200
        assert "later.crt: cannot be read" in gate.problems[0]
        shutil.copy(pair.cert, tmp_path / "later.crt")  # the web configuration itself does not change again
        assert get(server, trusting(ca))[0] == 200
        assert gate.problems == ()
        write(tmp_path, good + "surprise: 1\n")
        assert get(server, trusting(ca))[0] == 200
        assert "surprise: unknown setting" in gate.problems[0]
        file.unlink()
        assert get(server, trusting(ca))[0] == 200
        assert "no such file" in gate.problems[0]
        for cut_short in ("", "tls_server_config:\n", "rate_limit: {interval: 1s, burst: 100}\n"):
            write(tmp_path, cut_short)
            assert get(server, trusting(ca))[0] == 200
            assert gate.problems


def test_nothing_that_keeps_strangers_out_is_lost_while_it_runs(tmp_path, ca, pair):
    """A file that is being written is empty or half there for a moment: passwords and certificates stay wanted."""
    given = users(alice=hashed()) + tls(pair, f"  client_ca_file: {ca.cert}\n  client_auth_type: {REQUIRED}\n")
    gate = WebConfig(write(tmp_path, given))
    file = gate._file
    for text, lost in (
        (users(alice=hashed()), "without TLS and without client certificates"),
        (tls(pair, f"  client_ca_file: {ca.cert}\n  client_auth_type: {REQUIRED}\n"), "without passwords"),
        (given.replace(REQUIRED, "VerifyClientCertIfGiven"), "without client certificates"),
    ):
        write(tmp_path, text)
        gate.refresh()
        assert gate.problems == (f"{file}:1: canaryd would serve {lost}; restart it if that is wanted",)
        assert (gate.tls, gate.passwords, gate.authenticates) == (True, True, True)
    write(tmp_path, given + "http_server_config: {headers: {X-Frame-Options: deny}}\n")
    gate.refresh()
    assert gate.problems == ()
    assert gate.headers()


def test_what_could_not_be_read_is_tried_again(tmp_path, monkeypatch):
    """The machine may have been at fault (no descriptor, an error of the disk), and the file never changes."""
    gate = WebConfig(write(tmp_path, users(alice=hashed())))

    def fails(file, looked):
        looked[file] = auth._look(file)
        raise ConfigError([f"{file}: cannot be read: Too many open files"])

    with monkeypatch.context() as patched:
        patched.setattr(auth, "_read", fails)
        write(tmp_path, users(alice=hashed(), bob=hashed()))
        gate.refresh()
    gate.refresh()
    assert gate.problems
    gate._again = 0.0
    gate.refresh()
    assert gate.problems == ()
    assert len(gate._rules.users) == 2


def test_tls_can_be_turned_on_while_it_runs(tmp_path, ca, pair):
    """A connection in plain text from before is hung up on, not answered."""
    file = write(tmp_path, "rate_limit: {interval: 1ms, burst: 100}\n")
    with serving(file) as server:
        old = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        assert asked_again(old)
        assert asked_again(old)
        write(tmp_path, tls(pair))
        assert not asked_again(old)
        old.close()
        assert get(server, trusting(ca))[0] == 200


def test_a_change_of_rules_costs_no_scrape_in_plain_text(tmp_path):
    """Connections from before, one that has asked and one that is about to, are answered by the rules as they are."""
    plain = "rate_limit: {interval: 1ms, burst: 100}\n"
    other = tmp_path / "other"
    other.mkdir()
    with serving(file := write(tmp_path, plain)) as server, contextlib.ExitStack() as stack:
        for change in (
            lambda: write(tmp_path, plain + "http_server_config: {headers: {X-Frame-Options: deny}}\n"),
            lambda: server.guard(WebConfig(write(other, plain))),
            lambda: server.guard(None),
            lambda: server.guard(WebConfig(file)),
        ):
            asked, silent = (http.client.HTTPConnection("127.0.0.1", server.port, timeout=20) for _ in range(2))
            stack.callback(asked.close)
            stack.callback(silent.close)
            assert asked_again(asked)
            silent.connect()
            # The server took it before a third one, which it has answered.
            assert get(server)[0] == 200
            change()
            assert asked_again(asked)
            assert asked_again(silent)
        write(tmp_path, plain + users(alice=hashed()))
        asked.request("GET", "/metrics")
        assert asked.getresponse().status == 401, "a password is asked for of whoever was there before, too"


def test_a_connection_of_one_gate_is_nothing_to_another(tmp_path, ca, pair):
    """TLS let it in by keys that are no longer those of the server, and nobody shakes hands twice."""
    with serving(file := write(tmp_path, tls(pair))) as server:
        for gate in (WebConfig(file), None):
            old = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=trusting(ca))
            assert asked_again(old)
            server.guard(gate)
            assert not asked_again(old)
            old.close()


# --- Clients that do not behave --------------------------------------------------------------------------------------


def hello(ca) -> bytes:
    """Return the first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    client = trusting(ca).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("sent", [0, 20, 10_000], ids=["nothing", "half a hello", "no second flight"])
def test_handshakes_that_stop_hold_up_nobody(tmp_path, ca, pair, sent):
    """Two hundred connections that stop in a handshake: a scrape is answered at once, and they end in time."""
    start = hello(ca)[:sent]
    with serving(write(tmp_path, tls(pair)), head=3.0) as server, contextlib.ExitStack() as stack:
        stuck = []
        for _ in range(200):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            with contextlib.suppress(OSError):  # it may have lost its place already
                client.sendall(start)
            stuck.append(client)
        begun = time.monotonic()
        for _ in range(5):
            assert get(server, trusting(ca))[0] == 200
        assert time.monotonic() - begun < 10
        for client in stuck:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
        assert get(server, trusting(ca))[0] == 200


def test_a_handshake_in_drops_is_cut_off(tmp_path, ca, pair):
    """The deadline is for the whole handshake, however regularly bytes come."""
    start = hello(ca)
    with (
        serving(write(tmp_path, tls(pair)), head=1.0) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as client,
    ):
        begun, cut = time.monotonic(), False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for byte in start * 10:
                client.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    cut = client.recv(1) == b""
                if cut:
                    break
        assert 0.5 < time.monotonic() - begun < 15


def test_a_slow_reader_of_tls_is_cut_off(tmp_path, ca, pair):
    """The deadline is for the whole answer, not for each record of it."""
    routes = {"/big": lambda _: Answer(200, "text/plain", b"x" * 64_000_000)}
    server = Server("127.0.0.1", 0, routes, Limits(write=2.0), gate=WebConfig(write(tmp_path, tls(pair))))
    server.start()
    with (
        contextlib.closing(server),
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
        trusting(ca).wrap_socket(plain, server_hostname="localhost") as client,
    ):
        client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        received, begun = 0, time.monotonic()
        with contextlib.suppress(OSError):
            while chunk := client.recv(16_384):
                received += len(chunk)
                time.sleep(0.05 if time.monotonic() - begun < 3.0 else 0.0)
                assert time.monotonic() - begun < 60
        assert received < 64_000_000


# --- Passwords -------------------------------------------------------------------------------------------------------


def test_passwords(tmp_path):
    """One of a known user lets in, everywhere; nothing else does, and the answer says how to come in."""
    with serving(write(tmp_path, users(alice=hashed(), bob=hashed("other")))) as server:
        for path, status in (("/metrics", 200), ("/healthz", 503), ("/nowhere", 404)):
            assert get(server, path=path, **basic("alice", PASSWORD))[0] == status
            assert get(server, path=path)[0] == 401
        status, headers, body, _ = get(server)
        assert headers["WWW-Authenticate"] == 'Basic realm="canaryd", charset="UTF-8"'
        assert b"canaryd_" not in body
        assert get(server, **basic("bob", "other"))[0] == 200
        for user, password in (("alice", "other"), ("bob", PASSWORD), ("eve", PASSWORD), ("", ""), ("alice", "")):
            assert get(server, **basic(user, password))[0] == 401
        for header in ("Bearer x", "Basic", "Basic !!!", "Basic YWxpY2U=", "Basic " + "A" * 5000, "basic"):
            assert get(server, Authorization=header)[0] == 401
        assert get(server, Authorization="bASIC  " + basic("alice", PASSWORD)["Authorization"][6:])[0] == 200


@pytest.mark.parametrize("password", ["", "x\0y", "pässwörd", "x" * 72, "y" * 200, "a:b:c"])
def test_passwords_of_every_kind(tmp_path, password):
    """Empty, not ASCII, with colons, longer than bcrypt looks: as bcrypt defines it; one with a NUL lets nobody in."""
    with serving(write(tmp_path, users(alice=hashed("x" if "\0" in password else password)))) as server:
        assert get(server, **basic("alice", password))[0] == (401 if "\0" in password else 200)
        assert get(server, **basic("alice", "z" + password))[0] == 401


def test_hashes_that_htpasswd_makes(tmp_path):
    """$2y$ is taken as $2b$."""
    with serving(write(tmp_path, users(alice=hashed().replace("$2b$", "$2y$")))) as server:
        assert get(server, **basic("alice", PASSWORD))[0] == 200


def test_the_documented_line_makes_a_hash_with_what_is_installed(tmp_path):
    """docs/security.md: canaryd's own interpreter asks for the password; a bad hash names the line too."""
    (line,) = re.findall(r'^printf "basic_auth_users.*$', (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert MAKE_HASH in line
    here = line.replace("/opt/canaryd/bin/python3", sys.executable).replace("-o root -g canaryd ", "")
    script = here.replace("/etc/canaryd/web.yml", str(tmp_path / "web.yml"))
    subprocess.run(["/bin/sh", "-c", script], input=f"{PASSWORD}\n", text=True, start_new_session=True, check=True)
    (tmp_path / "web.yml").chmod(0o640)
    with serving(tmp_path / "web.yml") as server:
        assert get(server, **basic("prometheus", PASSWORD))[0] == 200
        assert get(server, **basic("prometheus", "another"))[0] == 401
    with pytest.raises(ConfigError) as caught:
        WebConfig(write(tmp_path, users(alice="typed")))
    assert MAKE_HASH in str(caught.value)


def seconds(server, user: str, password: str) -> float:
    begun = time.thread_time(), time.monotonic()
    assert get(server, **basic(user, password))[0] == 401
    return time.monotonic() - begun[1]


def test_an_unknown_user_costs_what_a_known_one_does(tmp_path):
    """The stand-in is computed at the cost of a real user's hash, and the same for the same name."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=4), bob=hashed(cost=6))))
    rules = gate._rules
    costs = {}
    for name in (b"eve%d" % i for i in range(200)):
        stand_in = gate._stand_in(rules, name)
        assert stand_in == gate._stand_in(rules, name)
        assert not bcrypt.checkpw(b"x", stand_in)
        costs[name] = int(stand_in.split(b"$")[2])
    assert 40 < sum(cost == 4 for cost in costs.values()) < 160
    assert set(costs.values()) == {4, 6}


def test_known_and_unknown_users_take_the_same_time(tmp_path):
    """Median against median, wrong passwords for both, each on a gate of its own."""
    took = {}
    for user in ("alice", "eve"):
        gate = WebConfig(write(tmp_path, users(alice=hashed(cost=8))))
        times = []
        for number in range(9):
            gate._turns._next = 0.0  # the pause after a wrong password would hide what is compared
            begun = time.thread_time()
            answer = gate.refusal({"authorization": basic(user, f"wrong{number}")["Authorization"]}, "test")
            times.append(time.thread_time() - begun)
            assert answer is not None
            assert answer.status == 401
        took[user] = statistics.median(times)
    assert 0.5 < took["eve"] / took["alice"] < 2.0


def test_a_right_password_is_computed_once(tmp_path):
    """Scrapes cost no hash each; a new hash for the user is heeded at once; nothing in memory is the password."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=10))))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    assert gate.refusal(header, "test") is None
    begun = time.thread_time()
    for _ in range(100):
        assert gate.refusal(header, "test") is None
    assert time.thread_time() - begun < 1.0  # a hundred hashes would take several
    assert PASSWORD.encode() not in b"".join(gate._correct)
    write(tmp_path, users(alice=hashed("new", cost=4)))
    gate.refresh()
    assert gate.refusal(header, "test") is not None


def test_a_wrong_password_is_never_remembered(tmp_path):
    """A user whose hash is mended comes in with the very password that was wrong a moment ago."""
    file = write(tmp_path, users(alice=hashed("first")))
    with serving(file) as server:
        assert get(server, **basic("alice", "second"))[0] == 401
        write(tmp_path, users(alice=hashed("second")))
        assert get(server, **basic("alice", "second"))[0] == 200
        assert get(server, **basic("alice", "first"))[0] == 401


def test_guessing_costs_a_bounded_share_and_keeps_no_scraper_out(tmp_path):
    """Forty clients guess as fast as they can: few wait, the others are sent away, and who is known is served."""
    with serving(write(tmp_path, users(alice=hashed(cost=9)))) as server:
        assert get(server, **basic("alice", PASSWORD))[0] == 200
        seen: list[int] = []
        stop = threading.Event()

        def guess(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                with contextlib.suppress(OSError, http.client.HTTPException):  # its place is given to another
                    seen.append(get(server, timeout=60, **basic("alice", f"{number} {turn}"))[0])
                time.sleep(0.01)

        with concurrent.futures.ThreadPoolExecutor(40) as pool:
            for number in range(40):
                pool.submit(guess, number)
            eventually(lambda: 429 in seen and 401 in seen)
            begun = time.monotonic()
            for _ in range(10):
                assert get(server, **basic("alice", PASSWORD))[0] == 200
            assert time.monotonic() - begun < 20
            stop.set()
        assert set(seen) == {401, 429}


def test_the_pause_after_a_wrong_password(tmp_path):
    """Computing takes at most the promised share of the time, however many ask at once."""
    gate = WebConfig(write(tmp_path, users(alice=hashed(cost=8))))
    header = {"authorization": basic("alice", "wrong")["Authorization"]}
    begun = time.monotonic()
    spent = []
    for _ in range(4):
        before = time.thread_time()
        gate.refusal(header, "test")
        spent.append(time.thread_time() - before)
    assert sum(spent[:3]) / (time.monotonic() - begun) < 2 * SHARE
    gate._turns._waiting |= {f"other {number}" for number in range(WAITING)}
    answer = gate.refusal(header, "test")
    assert answer is not None
    assert (answer.status, answer.headers) == (429, ("Retry-After: 5",))


def test_a_guesser_keeps_out_nobody_but_itself(tmp_path):
    """One place for each address: while one guesses, a scraper that is not known yet comes in."""
    gate = WebConfig(write(tmp_path, users(alice=hashed())))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    gate._turns._waiting.add("guesser")
    assert gate.refusal(header, "guesser").status == 429
    assert gate.refusal(header, "scraper") is None


def test_who_is_known_stays_known_when_others_change(tmp_path, monkeypatch):
    """Another user's change costs a scraper no computing, its own does; and one password is remembered once."""
    gate = WebConfig(write(tmp_path, users(alice=(one := hashed()))))
    header = {"authorization": basic("alice", PASSWORD)["Authorization"]}
    assert gate.refusal(header, "test") is None
    write(tmp_path, users(alice=one, bob=hashed("b")))
    gate.refresh()
    with monkeypatch.context() as patched:
        patched.setattr(gate._turns, "check", lambda *_: pytest.fail("computed again"))
        assert gate.refusal(header, "test") is None
    write(tmp_path, users(alice=hashed("another"), bob=hashed("b")))
    gate.refresh()
    assert gate.refusal(header, "test").status == 401
    long = "l" * 80
    write(tmp_path, users(alice=hashed(long)))
    gate.refresh()
    before = len(gate._correct)
    for more in ("", "x", "yy"):  # bcrypt looks at the first 72 bytes
        assert gate.refusal({"authorization": basic("alice", long + more)["Authorization"]}, "test") is None
    assert len(gate._correct) == before + 1


def test_an_authority_that_others_may_write_lets_nobody_in(tmp_path, ca, pair):
    """Whoever can put an authority there can issue himself a certificate."""
    theirs = tmp_path / "clients.crt"
    shutil.copy(ca.cert, theirs)
    theirs.chmod(0o666)
    more = f"  client_ca_file: {theirs}\n  client_auth_type: {REQUIRED}\n"
    assert "is writable by others" in problems(write(tmp_path, tls(pair, more)))[0]


def test_no_secret_in_the_log(tmp_path, caplog):
    """Who was sent away is named by address, once a minute; what was typed is not, not even the user."""
    with caplog.at_level(logging.DEBUG), serving(write(tmp_path, users(alice=hashed()))) as server:
        for number in range(3):
            get(server, **basic("s3cret-user", f"s3cret-{number}"))
        get(server, Authorization="Bearer s3cret")
    assert caplog.text.count("127.0.0.1 was not let in: wrong user or password") == 1
    assert "s3cret" not in caplog.text
    assert "$2b$" not in caplog.text


# --- Headers and rates -----------------------------------------------------------------------------------------------


def test_headers(tmp_path):
    """Those that are set replace ours of the same name; the others stay."""
    text = "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n"
    text += "    Content-Security-Policy: \"default-src 'self'\"\n"
    with serving(write(tmp_path, text)) as server:
        headers = get(server)[1]
        assert headers["X-Frame-Options"] == "deny"
        assert headers.get_all("Content-Security-Policy") == ["default-src 'self'"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_rate_limit(tmp_path):
    """As many at once as `burst` says, then 429 until an interval is over; 0 is no limit."""
    with serving(write(tmp_path, "rate_limit: {interval: 2s, burst: 3}\n")) as server:
        answers = [get(server)[0] for _ in range(6)]
        assert answers[:3] == [200] * 3
        assert 429 in answers[3:]
        eventually(lambda: get(server)[0] == 200)
    with serving(write(tmp_path, "rate_limit: {interval: 0, burst: 1}\n")) as server:
        assert {get(server)[0] for _ in range(10)} == {200}


def test_bcrypt_is_loaded_only_where_there_are_passwords(tmp_path):
    """A node without it serves TLS all the same, and with passwords is told what is missing."""
    file = write(tmp_path, "http_server_config: {headers: {X-Frame-Options: deny}}\n")
    code = "import sys, pathlib; from canaryd.web.auth import WebConfig; sys.modules['bcrypt'] = None\n"
    code += "WebConfig(pathlib.Path(sys.argv[1]))"
    argv = [sys.executable, "-c", code, file]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    write(tmp_path, users(alice=hashed()))
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "web.yml:2: basic_auth_users: passwords need the package bcrypt, which is missing" in done.stderr
