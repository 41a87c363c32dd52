"""The HTTP server: prepared answers, and clients of every kind that hold up nobody else."""

import contextlib
import http.client
import logging
import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest

from canaryd.metrics.exposition import TEXT
from canaryd.web.server import Answer, Limits, Server
from tests.command import PATIENCE, soon

BODY = b"canaryd_build_info 1\n" * 100
BIG = b"x" * 32_000_000


def broken(request):
    raise RuntimeError("secret of the house")


ROUTES = {
    "/metrics": lambda request: Answer(200, TEXT, BODY),
    "/accept": lambda request: Answer(
        503, "text/plain", request.headers["accept"].encode(), ("Vary: Accept", "X-Own: 1")
    ),
    "/big": lambda request: Answer(200, "text/plain", BIG),
    "/broken": broken,
}


@contextlib.contextmanager
def serving(host="127.0.0.1", **limits):
    server = Server(host, 0, ROUTES, Limits(**limits))
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def get(server, path="/metrics", method="GET", host="127.0.0.1", **headers):
    """Return (response, body, seconds) of one request on a connection of its own."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, server.port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read(), time.perf_counter() - started


def say(server, data):
    """Send bytes, and return all that comes back until the server closes."""
    with connect(server) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(65536), b""))


def closed(client):
    """Tell whether the server hung up, waiting for at most the client's timeout."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_get(server):
    """A scrape gets the prepared bytes, their type and length, and no word about the software behind."""
    response, body, _ = get(server, "/metrics?name=x")
    assert (response.status, body) == (200, BODY)
    assert response.headers["Content-Type"] == TEXT
    assert response.headers["Content-Length"] == str(len(BODY))
    assert response.headers["Server"] is None


def test_head(server):
    """HEAD answers with the headers of GET and no body; a second request on the connection is not read."""
    first, _, rest = say(server, b"HEAD /metrics HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert f"Content-Length: {len(BODY)}".encode() in first
    assert b"Connection: close" in first
    assert rest == b""


def test_a_route_sees_the_headers_and_chooses_status_and_headers(server):
    """A route is handed the request's headers, whatever their spelling; its status and its headers are sent on."""
    response, body, _ = get(server, "/accept", ACCEPT="text/plain;version=0.0.4;q=0.5,*/*")
    assert (response.status, body) == (503, b"text/plain;version=0.0.4;q=0.5,*/*")
    assert (response.headers["Vary"], response.headers["X-Own"]) == ("Accept", "1")


def test_unknown_path(server):
    """An unknown path answers 404 and says what there is."""
    response, body, _ = get(server, "/nothing")
    assert response.status == 404
    assert body == b"not found: use one of /accept, /big, /broken, /metrics\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods(server, method):
    """Everything but GET and HEAD is refused, with what is allowed."""
    response, body, _ = get(server, method=method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    assert body == b"method not allowed: use GET or HEAD\n"


def test_a_body_ends_the_connection(server):
    """An unread body is never taken for the next request, and the answer arrives all the same."""
    smuggled = b"GET /big HTTP/1.1\r\n\r\n"
    head = b"POST /metrics HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (len(smuggled) + 8_000_000)
    answer = say(server, head + smuggled + b"x" * 8_000_000)
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"GET /metrics HTTP/one\r\n\r\n", 400),
        (b"GET /metrics and more HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"a" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000, 431),
    ],
)
def test_bad_requests(server, request_, status):
    """Nonsense and heads above 32 KiB are answered in plain text, nothing of them is repeated, and it hangs up."""
    head, _, body = say(server, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Content-Type: text/plain" in head
    assert body.startswith(b"bad request: ")
    assert len(body) < 60


def test_a_request_line_without_a_version(server):
    """What was HTTP/0.9 gets a whole answer, and the end of the connection."""
    answer = say(server, b"GET /metrics\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(BODY)


def test_a_failing_route_tells_the_log_and_not_the_client(server, caplog):
    """A route that raises costs one answer, which does not say why; the log does."""
    with caplog.at_level(logging.ERROR):
        response, body, _ = get(server, "/broken")
    assert (response.status, body) == (500, b"internal error: see the log of canaryd\n")
    assert "secret of the house" in caplog.text
    assert get(server)[0].status == 200


def test_two_hundred_scrapes(server):
    """200 scrapes in a row, each on a fresh connection, get the same bytes without delay."""
    seconds = []
    for _ in range(200):
        _, body, took = get(server)
        assert body == BODY
        seconds.append(took)
    assert sorted(seconds)[100] < soon(0.02)


def test_silent_connections_do_not_keep_a_scraper_out():
    """With a hundred connections that say nothing, a scrape is answered at once; the oldest lost their places."""
    with serving() as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(100)]
        for _ in range(5):
            response, body, seconds = get(server)
            assert (response.status, body) == (200, BODY)
            assert seconds < soon(1.0)
        assert closed(idle[0])
        idle[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert idle[-1].recv(15) == b"HTTP/1.1 200 OK"


def test_slow_loris():
    """A client that dribbles its headers is cut off at the deadline, however regularly it sends; others do not wait."""
    with serving(seconds=0.5) as server, connect(server) as client:
        client.settimeout(0.05)
        started = time.perf_counter()
        cut = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            while not cut and time.perf_counter() - started < PATIENCE:
                client.sendall(b"a")
                assert get(server)[2] < soon(1.0)
                with contextlib.suppress(TimeoutError):
                    cut = client.recv(1) == b""
        assert 0.4 < time.perf_counter() - started < soon(3)


def test_silent_connections_end():
    """A connection on which no request comes is closed."""
    with serving(seconds=0.2) as server, connect(server) as silent:
        started = time.perf_counter()
        assert closed(silent)
        assert time.perf_counter() - started < soon(1.5)


def test_a_client_that_does_not_read_is_cut_off():
    """An answer that is not taken in time ends its connection; others are served meanwhile."""
    with serving(seconds=1.5) as server, connect(server) as stuck:
        stuck.sendall(b"GET /big HTTP/1.1\r\n\r\n")
        assert get(server)[2] < 1.4
        time.sleep(2.0)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while chunk := stuck.recv(1 << 20):
                received += len(chunk)
        assert 0 < received < len(BIG)


def test_full_house():
    """While every place is taken, a newcomer is served, and the oldest client loses its place."""
    with serving(connections=2) as server, connect(server) as one, connect(server) as two:
        for client in (one, two):
            client.sendall(b"GET /big HTTP/1.1\r\n\r\n")
            assert client.recv(8) == b"HTTP/1.1"
        assert get(server)[0].status == 200
        with contextlib.suppress(ConnectionResetError):
            assert len(b"".join(iter(lambda: one.recv(1 << 20), b""))) < len(BIG)


def test_out_of_file_descriptors():
    """When no connection can be accepted the server waits calmly, and serves it once there is room again."""
    with serving() as server, socket.socket() as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()), hard))
        try:
            fillers = []
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            before = time.process_time()
            client.settimeout(5)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            time.sleep(0.5)
            assert time.process_time() - before < 0.25
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        assert client.recv(15) == b"HTTP/1.1 200 OK"


def test_ipv6():
    """The server listens on IPv6 addresses too."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with serving(host="::1") as server:
        assert get(server, host="::1")[1] == BODY


def test_every_interface():
    """No host means all of them, of both families where the machine has two."""
    with serving(host="") as server:
        assert get(server)[1] == BODY
        assert not server.local
        if socket.has_dualstack_ipv6():
            assert get(server, host="::1")[1] == BODY


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_local(host, local):
    """Whether others can reach it is read of the socket, not of the name."""
    with serving(host=host) as server:
        assert server.local is local


def test_port_taken(server):
    """A port that is taken is an OSError that names the address and says what to do."""
    with pytest.raises(
        OSError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: .* in use; .*choose another port"
    ):
        Server("127.0.0.1", server.port, ROUTES)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such-host.invalid"])
def test_foreign_address(host):
    """An address that this machine does not have, or a name that is none, is named in the error."""
    with pytest.raises(OSError, match=re.escape(host)):
        Server(host, 0, ROUTES)


def test_close():
    """After close nobody is connected and the port is free; a server that was never started closes too."""
    with serving() as server, connect(server) as client:
        port = server.port
        server.close()
        assert closed(client)
    again = Server("127.0.0.1", port, ROUTES)
    again.close()


def test_blanks_in_a_header_cost_nothing(server):
    """Thousands of them take no time in which no other thread runs."""
    blanks = b" \t" * 5_000
    before = time.process_time()
    answer = say(server, b"GET /accept HTTP/1.0\r\nAccept:" + blanks + b"a" + blanks + b"b" + blanks + b"\r\n\r\n")
    assert time.process_time() - before < 0.5
    assert b"\r\n\r\na" + blanks + b"b" in answer
