"""What can go wrong between here and an answer; tests/engine/test_hostile.py has servers that mean harm."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time

import pytest

from canaryd.worker.endpoint import client as endpoint_client
from canaryd.worker.endpoint.client import Client
from tests.command import soon
from tests.worker.endpoint.asked import KEY, PROMPT, reason, routes_of, run
from tests.worker.endpoint.served import models, recordings, served

# --- What can go wrong between here and an answer --------------------------------------------------------------------


def test_a_server_that_is_not_there_is_one_line(monkeypatch):
    """After a few attempts, with the address and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        waits = []
        text = reason(Client(url=url, sleep=waits.append).api, "/models")
    assert text == f"GET {url}/models: connection refused: nothing listens there; start the server, or correct url"
    assert waits == [0.5, 1.0, 2.0]


def test_a_server_that_comes_up_is_waited_for():
    """A refused connection has changed nothing and is tried again."""
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        with answering(late, b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"data": []}') as arrive:
            client = Client(url=f"http://127.0.0.1:{late.getsockname()[1]}/v1", sleep=lambda _: arrive())
            assert client.api("/models").json() == {"data": []}


@contextlib.contextmanager
def answering(listener, said):
    """Yield what makes a bound socket answer its first connection with `said`, and hang up."""

    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(said)

    thread = threading.Thread(target=answer)

    def arrive():
        listener.listen()
        thread.start()

    yield arrive
    thread.join()


def test_no_proxy_of_the_environment_is_asked(monkeypatch):
    """The answers would be those of another path than the one that is configured."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with served({"GET /v1/models": models("tiny")}) as server:
        assert Client(url=server.url).api("/models").json() == models("tiny")


def test_an_unknown_host_is_one_line():
    """The name is not known, nothing else is said."""
    assert "unknown host name" in reason(Client(url="http://nowhere.invalid/v1").api, "/models")


def test_a_silent_name_server_does_not_outlast_the_deadline(monkeypatch):
    """The resolver has no deadline of its own, and waits half a minute for three silent servers (resolv.conf(5))."""
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(30))
    begun = time.monotonic()
    try:
        assert "silent name server" in reason(Client(url="http://model.example/v1", timeout=0.5).api, "/models")
        assert time.monotonic() - begun < soon(5)
    finally:
        over.set()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000/v1", "wanted e.g."),
        ("ftp://host/v1", "wanted e.g."),
        ("http:///v1", "wanted e.g."),
        ("http://host:99999/v1", "not an address"),
        ("http://user:hunter2@host/v1", "put a key into key_file"),
        ("http:/user:hunter2@host/v1", "put a key into key_file"),
        ("http://host/v1?key=hunter2", "put a key into key_file"),
        ("http://host /v1", "wanted e.g."),
    ],
)
def test_an_address_that_cannot_be_meant_is_one_line(url, said):
    """And a password in it is not repeated."""
    text = reason(Client, url=url)
    assert said in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (200, {"Content-Type": "text/html"}, b"<!doctype html><title>Login</title>"),
            "got a web page, wanted JSON",
        ),
        ((500, {}, {"error": {"message": "CUDA error: device-side assert"}}), "500: CUDA error: device-side assert"),
        ((502, {}, b"<html>Bad Gateway</html>"), "refused with 502: without a message"),
        ((500, {}, b"Internal\n  Server Error"), "refused with 500: Internal Server Error"),
        ({"error": {"message": "CUDA error", "code": 500}}, "answered with 200 and an error: CUDA error"),
        ({"object": "error", "message": "EngineCore died", "code": 500}, "answered with 200 and an error: EngineCore"),
        ({"error": True}, "answered with 200 and an error: without a message"),
        ((307, {"Location": "https://else.example/v1?token=x"}, b""), "to https://else.example/v1: set url"),
        ((307, {"Location": "https://me:p/w@else.example/v1"}, b""), "to …@else.example/v1: set url"),
        ((200, {}, b"[" * 101 + b"]" * 101), "is nested too deeply"),
    ],
)
def test_what_is_no_answer_is_one_line(answer, said):
    """It says what came instead."""
    with served({"POST /v1/completions": answer}) as server:
        client = Client(url=server.url, timeout=5.0)
        text = reason(lambda: client.api("/completions", {"prompt": PROMPT.text}).json())
    assert said in text
    assert text.startswith(f"POST {server.url}/completions: ")


def test_the_words_of_a_server_hold_neither_prompt_nor_key():
    """FastAPI and others echo what they were sent."""
    prompt = "What the diver saw below, step by step."
    words = f"cannot take {prompt!r} with {KEY}: too long"
    for content in ({"error": {"message": words}}, {"detail": words}, {"message": words}, words.encode()):
        with served({"POST /v1/completions": (400, {}, content)}) as server:
            client = Client(url=server.url, key=KEY)
            text = reason(lambda: client.api("/completions", {"prompt": prompt}).json())  # noqa: B023 - called at once
            assert text.endswith("400: cannot take '…' with …: too long")


def test_an_answer_may_take_longer_than_the_connection(monkeypatch):
    """A connection has seconds, the answer all of its timeout."""
    monkeypatch.setattr(endpoint_client, "CONNECT", 0.2)
    with served({"GET /v1/models": lambda _: time.sleep(0.6) or models("tiny")}) as server:
        assert Client(url=server.url, timeout=20.0).api("/models").json() == models("tiny")


@pytest.mark.parametrize(
    ("after", "waits"), [("2", [2.0, 2.0, 2.0]), ("soon", [0.5, 1.0, 2.0]), (None, [0.5, 1.0, 2.0])]
)
def test_a_busy_server_is_asked_again_a_few_times(after, waits):
    """As long after as it wishes, and not for ever."""
    headers = {} if after is None else {"Retry-After": after}
    with served({"GET /v1/models": (503, headers, {"error": "loading model"})}) as server:
        slept = []
        assert reason(Client(url=server.url, sleep=slept.append).api, "/models").endswith(
            "refused with 503, 4 times: loading model"
        )
        assert slept == waits
        assert len(server.requests) == 4
        answers = iter([(429, headers, {}), models("tiny")])
        server.routes["GET /v1/models"] = lambda _: next(answers)
        assert Client(url=server.url, sleep=slept.append).api("/models").json() == models("tiny")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("route", ["GET /version", "GET /metrics"])
def test_a_hiccup_of_an_optional_path_never_changes_the_chain(monkeypatch, status, route):
    """It is tried again, and where it stays it ends the run: a version that is missing once is another chain."""
    monkeypatch.setattr(endpoint_client, "PATIENCE", 0.0)  # a wish to wait at all ends the waiting
    refusal = (status, {}, {"error": "no upstream"})
    with served(routes_of("vllm")) as server:
        steady = recordings(run(server.url, cases=("chat/reef/fresh",)))["chat/reef/fresh"][0].chain
        good = server.routes[route]
        server.routes[route] = refusal
        assert f"{route.replace(' ', f' {server.url[:-3]}')}: refused with {status}" in reason(run, server.url)
        monkeypatch.setattr(endpoint_client, "PATIENCE", 10.0)
        answers = itertools.chain([refusal], itertools.repeat(good))
        server.routes[route] = lambda _: next(answers)
        again = recordings(run(server.url, cases=("chat/reef/fresh",)))["chat/reef/fresh"][0].chain
        assert again == steady


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "that port speaks http, not https: begin url with http://"),
        (b"", "no TLS (UNEXPECTED_EOF_WHILE_READING): begin url with http:// if that port does not speak https"),
    ],
)
def test_https_to_a_port_of_http_is_one_line(answer, said):
    """It says how url has to begin, and no name of OpenSSL where that is certain."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        client = Client(url=f"https://127.0.0.1:{listener.getsockname()[1]}/v1", timeout=5.0)
        assert reason(client.api, "/models").endswith(f"/v1/models: {said}")


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_cannot_be_read_are_one_line(tmp_path, content):
    """Missing, or something else."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    assert f"ca_file: {path}: cannot read certificates" in reason(Client, url="https://127.0.0.1/v1", ca_file=str(path))
