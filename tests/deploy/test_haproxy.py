"""A poisoned replica behind HAProxy: real HAProxy, real daemon, two servers that compute every answer."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="the servers of these tests compute with torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason="NOT TESTED: haproxy is not installed here (Debian has it)"
    ),
]


from tests.command import ROOT, Daemon, canaryd, configure, eventually, free_port, running, soon  # noqa: E402
from tests.exact_server import exported, serving  # noqa: E402

SHIPPED = ROOT / "deploy/haproxy/canaryd.cfg"
NORM = ("model.norm.weight", 7, 3)
QUESTION = {"model": "exact", "prompt": "a b c", "max_tokens": 4, "logprobs": 5, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    with exported(tmp_path_factory.mktemp("exact") / "canary") as path:
        yield path


def accepts(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def haproxy(place, canaryd_port, ports):
    """Start HAProxy with the shipped backend for two servers of this machine; yields the address to ask."""
    text, front = SHIPPED.read_text(), free_port()
    text = text.replace("19469", str(canaryd_port)).replace("inter 5s", "inter 300ms")
    for name, port in ports.items():
        number = "12"["ab".index(name)]
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{port}").replace(f"10.0.0.{number}", "127.0.0.1")
        line = f"server {name} 127.0.0.1:{port}"
        send = f'agent-send "GET /endpoints/{name}/agent HTTP/1.0\\r\\n\\r\\n"'
        text = text.replace(line, f"{line} {send}", 1)
    head = (
        "global\n    maxconn 100\ndefaults\n    mode http\n    timeout connect 2s\n    timeout client 60s\n"
        f"    timeout server 60s\nfrontend all\n    bind 127.0.0.1:{front}\n    default_backend replicas\n"
    )
    (place / "haproxy.cfg").write_text(head + text.replace("GET /health", "GET /v1/models"))
    with (place / "haproxy.log").open("w") as log:
        process = subprocess.Popen(["haproxy", "-f", str(place / "haproxy.cfg")], stdout=log, stderr=log)
        try:
            eventually(lambda: process.poll() is not None or accepts(front))
            assert process.poll() is None, (place / "haproxy.log").read_text()
            yield f"http://127.0.0.1:{front}/v1"
        finally:
            process.terminate()
            process.wait()


def ask(address):
    body = json.dumps(QUESTION).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.dumps(json.load(answer)["choices"])


def served(address, right, times=12):
    """Ask the proxy; return how many answers were right and wrong: a refusal raises."""
    found = Counter[str]()
    for _ in range(times):
        found["right" if ask(address) == right else "wrong"] += 1
        time.sleep(0.02)
    return found


def test_a_poisoned_replica_gets_no_requests_until_it_is_right_again(tmp_path, directory):
    """Wrong answers before and after; then both are poisoned, and somebody answers all the same."""
    ports = {name: free_port() for name in "ab"}
    each = {"exact_endpoint": {"enabled": True, "period": "2s"}}
    ends = {
        name: {"url": f"http://127.0.0.1:{port}/v1", "exact": str(directory), "apis": ["completions"]}
        for name, port in ports.items()
    }
    config, state = configure(tmp_path, each=each, endpoints=ends, enforcement="act"), tmp_path / "state"
    with contextlib.ExitStack() as stack:
        good = {name: stack.enter_context(contextlib.ExitStack()) for name in ports}
        for name, port in ports.items():
            good[name].enter_context(serving(directory, port))
        daemon = stack.enter_context(running(Daemon(config, state)))
        right = ask(f"http://127.0.0.1:{ports['a']}/v1")
        assert ask(f"http://127.0.0.1:{ports['b']}/v1") == right
        eventually(lambda: daemon.value("canaryd_device_state", device="endpoint:b", state="healthy") == 1, 120)
        eventually(lambda: daemon.get("/endpoints/b/ready")[0] == 200)
        address = stack.enter_context(haproxy(tmp_path, int(daemon.address.rpartition(":")[2]), ports))
        eventually(lambda: served(address, right, 4)["right"] == 4, 60)

        good["b"].close()
        bad = stack.enter_context(contextlib.ExitStack())
        bad.enter_context(serving(directory, ports["b"], flipped=NORM))
        before = Counter()
        since = time.monotonic()
        while daemon.get("/endpoints/b/ready")[0] == 200:
            before += served(address, right, 2)
            assert time.monotonic() - since < soon(120)
        status, why = daemon.get("/endpoints/b/ready")
        assert (status, why.startswith("fail: endpoint:b faulty")) == (503, True), why
        time.sleep(1.5)  # some probe intervals of the proxy
        after = served(address, right, 40)
        assert before["wrong"] > 0
        assert after == {"right": 40}
        print(f"wrong answers served: {before['wrong']} of {before.total()} before, 0 of 40 after")

        (tmp_path / "no-enforcement").touch()  # the switch beside the configuration: nothing acts
        eventually(lambda: daemon.get("/endpoints/b/ready")[0] == 200, 40)
        assert daemon.get("/endpoints/b/ready")[1].startswith("would fail: endpoint:b faulty")
        (tmp_path / "no-enforcement").unlink()
        eventually(lambda: daemon.get("/endpoints/b/ready")[0] == 503, 40)

        good["a"].close()
        worse = stack.enter_context(contextlib.ExitStack())
        worse.enter_context(serving(directory, ports["a"], flipped=NORM))
        while daemon.get("/endpoints/a/ready")[0] == 200:
            served(address, right, 2)  # nobody is refused while it is found out
        time.sleep(1.5)
        assert served(address, right, 20).total() == 20

        for name, poisoned in (("a", worse), ("b", bad)):
            poisoned.close()
            stack.enter_context(serving(directory, ports[name]))
            answer = canaryd(
                "ack",
                f"endpoint:{name}",
                "--repaired",
                "--reason",
                "served anew",
                "--config",
                config,
                "--state-dir",
                state,
            )
            assert answer.code == 0, answer
        eventually(lambda: all(daemon.get(f"/endpoints/{name}/ready")[0] == 200 for name in "ab"), 120)
        eventually(lambda: served(address, right, 10) == {"right": 10}, 30)


def test_what_a_load_balancer_may_ask(tmp_path):
    """Each mistake is answered by what was meant; HAProxy's words have no head."""
    config = configure(tmp_path, "passes", endpoints={"main": {"url": "http://127.0.0.1:9/v1"}}, enforcement="act")
    with running(Daemon(config, tmp_path / "state")) as daemon:
        daemon.line("serves http")
        assert daemon.get("/endpoints/other/ready") == (404, "not found: /endpoints/main/ready\n")
        assert daemon.get("/endpoints/main/ready?on=broken") == (
            *(400, "on=broken: not understood; write on=suspect, on=unknown or on=degraded\n"),
        )
        assert daemon.get("/endpoints/main/ready")[0] == 200, "nothing is known yet, and unknown does not act"
        assert daemon.get("/endpoints/main/ready?on=unknown")[0] == 503
        with socket.create_connection(("127.0.0.1", int(daemon.address.rpartition(":")[2]))) as client:
            client.sendall(b"GET /endpoints/main/agent?on=unknown HTTP/1.0\r\n\r\n")
            assert client.makefile("rb").read().startswith(b"down #fail: ")
