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
from canaryd.config.settings import TlsConfig
from canaryd.web.server import SECURITY, Answer, Limits, Server
from canaryd.web.tls import Tls
from tests.command import eventually, soon
from tests.pki import Authority

BODY = b"canaryd_build_info 1\n" * 1000
ROUTES = {"/metrics": lambda _: Answer(200, "text/plain", BODY)}


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def pair(ca):
    return ca.issue("server")


def made(pair, clients=None) -> Tls:
    return Tls(TlsConfig(cert_file=pair.cert, key_file=pair.key, client_ca_file=clients and clients.cert))


@contextlib.contextmanager
def serving(tls, routes=ROUTES, **limits):
    server = Server("127.0.0.1", 0, routes, Limits(**limits), tls=tls)
    server.start()
    with contextlib.closing(server):
        yield server


def trusting(ca, client=None, **versions) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca.cert)
    if client:
        context.load_cert_chain(client.cert, client.key)
    for name, value in versions.items():
        setattr(context, name, value)
    return context


def get(server, context=None):
    """Return (status, headers, body) of one request on a connection of its own."""
    kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
    connection = kind("127.0.0.1", server.port, timeout=20, **({"context": context} if context else {}))
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def refused(server, context) -> bool:
    """Tell whether the server lets nobody in who comes like this."""
    try:
        get(server, context)
    except (OSError, http.client.HTTPException):
        return True
    return False


def test_tls(ca, pair):
    """The body arrives whole, with our headers, by TLS 1.2 and 1.3 and by nothing older; ALPN says HTTP/1.1."""
    with serving(made(pair)) as server:
        status, headers, body = get(server, trusting(ca))
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
        context = trusting(ca)
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            assert client.selected_alpn_protocol() == "http/1.1"


def test_client_certificates(tmp_path, ca, pair, caplog):
    """Nobody without one of ours that is valid; the log says so once a minute."""
    client, expired = ca.issue("client"), ca.issue("expired", days=-1)
    stranger = Authority(tmp_path / "other", "other").issue("stranger")
    with serving(made(pair, ca)) as server:
        assert get(server, trusting(ca, client))[0] == 200
        assert [refused(server, trusting(ca, who)) for who in (None, expired, stranger)] == [True] * 3
        eventually(lambda: "127.0.0.1 was not let in: peer did not return a certificate" in caplog.text)
    assert caplog.text.count("was not let in") == 1


def test_files_that_cannot_be_used(tmp_path, ca, pair):
    """Missing, of another kind, a key that does not fit or asks a password: one line names file and remedy."""
    nonsense, open_to_all, locked = tmp_path / "nonsense", tmp_path / "clients.crt", tmp_path / "locked.key"
    nonsense.write_text("no certificate\n")
    shutil.copy(ca.cert, open_to_all)
    open_to_all.chmod(0o666)
    shutil.copy(pair.key, locked)
    ca._run("ec", "-in", pair.key, "-out", locked, "-aes128", "-passout", "pass:secret")
    for cert, key, clients, words in (
        (pair.cert, tmp_path / "gone.key", None, ("gone.key", "no such file", "name a certificate and its key")),
        (nonsense, pair.key, None, ("nonsense", "name a certificate and its key, unencrypted PEM")),
        (pair.cert, ca.issue("another").key, None, ("another.key", "key values mismatch")),
        (pair.cert, locked, None, ("locked.key", "name a certificate and its key, unencrypted PEM")),
        (pair.cert, pair.key, nonsense, ("tls.client_ca_file", "nonsense", "name certificates in PEM")),
        (pair.cert, pair.key, tmp_path / "gone.crt", ("tls.client_ca_file", "gone.crt", "no such file")),
        (pair.cert, pair.key, open_to_all, ("tls.client_ca_file", "is writable by others")),
    ):
        with pytest.raises(ConfigError) as caught:
            Tls(TlsConfig(cert_file=cert, key_file=key, client_ca_file=clients))
        (problem,) = caught.value.problems
        assert all(word in problem for word in words), problem


def test_a_bad_file_leaves_the_old_one_in_force(tmp_path, ca, caplog):
    """The log says what is wrong, once, and so do the problems, until the file is good again, the same one included."""
    pair = ca.issue("kept")
    good, tls = pair.cert.read_bytes(), made(pair, ca)
    client = trusting(ca, ca.issue("client"))
    with serving(tls) as server, caplog.at_level(logging.INFO):
        for bad in (b"", good[:100], None):
            pair.cert.unlink() if bad is None else pair.cert.write_bytes(bad)
            for _ in range(3):
                tls.refresh()
            assert (get(server, client)[0], refused(server, trusting(ca))) == (200, True)
            assert len(tls.problems) == 1
            assert caplog.text.count(tls.problems[0]) == 1
            assert "the old ones stay in force" in caplog.text
            pair.cert.write_bytes(good)
            tls.refresh()
            assert tls.problems == ()
            assert get(server, client)[0] == 200
            caplog.clear()
        away = pair.key.rename(tmp_path / "away")
        tls.refresh()
        assert tls.problems
        away.rename(pair.key)
        tls.refresh()
        assert tls.problems == ()


# --- Clients that do not behave --------------------------------------------------------------------------------------


def hello(ca) -> bytes:
    """Return the first bytes of a handshake."""
    outgoing = ssl.MemoryBIO()
    client = trusting(ca).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("sent", [0, 20, 10_000], ids=["nothing", "half a hello", "no second flight"])
def test_handshakes_that_stop_hold_up_nobody(ca, pair, sent):
    """Two hundred connections that stop in a handshake: a scrape is answered at once, and they end in time."""
    start = hello(ca)[:sent]
    with serving(made(pair), seconds=3.0) as server, contextlib.ExitStack() as stack:
        stuck = []
        for _ in range(200):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            with contextlib.suppress(OSError):  # it may have lost its place already
                client.sendall(start)
            stuck.append(client)
        begun = time.monotonic()
        for _ in range(5):
            assert get(server, trusting(ca))[0] == 200
        assert time.monotonic() - begun < soon(10)
        for client in stuck:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
        assert get(server, trusting(ca))[0] == 200


def test_a_handshake_in_drops_is_cut_off(ca, pair):
    """The deadline is for the whole handshake, however regularly bytes come."""
    start = hello(ca)
    with (
        serving(made(pair), seconds=1.0) as server,
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
        assert 0.5 < time.monotonic() - begun < soon(15)


def test_a_slow_reader_of_tls_is_cut_off(ca, pair):
    """The deadline is for the whole answer, not for each record of it."""
    big = {"/big": lambda _: Answer(200, "text/plain", b"x" * 64_000_000)}
    with (
        serving(made(pair), big, seconds=2.0) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
        trusting(ca).wrap_socket(plain, server_hostname="localhost") as client,
    ):
        client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        received, begun = 0, time.monotonic()
        with contextlib.suppress(OSError):
            while chunk := client.recv(16_384):
                received += len(chunk)
                time.sleep(0.05 if time.monotonic() - begun < 4.0 else 0.0)
                assert time.monotonic() - begun < 60
        assert received < 64_000_000
