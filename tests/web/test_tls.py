"""TLS: certificates, their change while the server runs, clients that do not behave."""

from __future__ import annotations

import contextlib
import http.client
import logging
import shutil
import socket
import ssl
import time

import pytest

from canaryd.config.load import ConfigError
from canaryd.web import auth
from canaryd.web.auth import WebConfig
from canaryd.web.server import SECURITY, Answer, Limits, Server
from tests.command import eventually
from tests.pki import Authority
from tests.web.gates import BODY, REQUIRED, ROUTES, get, hashed, serving, tls, users, write


def trusting(ca, client=None, **versions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.cert)
    if client:
        context.load_cert_chain(client.cert, client.key)
    for name, value in versions.items():
        setattr(context, name, value)
    return context


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
