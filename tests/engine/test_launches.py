"""Launches of a server: a healthy one that tunes its kernels answers with other last bits after every start.

A real HTTP server, the real engine, workers and command.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from canaryd.model import Run, State
from tests import engines
from tests.command import canaryd, configure
from tests.engines import NAMED
from tests.worker.endpoint.served import completion, models, served

WORDS = (" the", " reef", " lies", " two", " miles", " off", " the", " coast")


class Server:
    """A server with vLLM's pages, bit-stable within a launch."""

    def __init__(self, *, tells: bool) -> None:
        """Nothing is served yet."""
        self.url = ""
        self.launch, self.started, self.shift, self.tells = 0, int(time.time()) - 1000, 0.0, tells
        self.routes = {
            "GET /v1/models": models("tiny", owner="vllm"),
            "GET /version": {"version": "0.32.0"},
            "GET /metrics": lambda _: self.metrics(),
            "POST /v1/completions": self.answer,
        }

    def metrics(self) -> bytes:
        """Return a page with the time of the start where vLLM has it."""
        started = f"process_start_time_seconds {self.started}\n" * self.tells
        return f"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n{started}".encode()

    def restart(self) -> None:
        """Start again: kernels are tuned anew, and the last bits are others."""
        self.launch, self.started = self.launch + 1, self.started + 60

    def answer(self, _: object) -> dict:
        """Return a completion, as the kernels of this launch give it."""
        values = [-0.1 * (n + 1) - 5e-7 * self.launch - self.shift for n in range(len(WORDS))]
        top = [{w: v, " sea": v - 3.0} for w, v in zip(WORDS, values, strict=True)]
        scores = {"tokens": list(WORDS), "token_logprobs": values, "top_logprobs": top}
        return completion({"text": "".join(WORDS), "logprobs": scores})


@contextlib.contextmanager
def serving(*, tells: bool) -> Iterator[Server]:
    """Serve until the end of the block."""
    server = Server(tells=tells)
    with served(server.routes) as replay:
        server.url = replay.url
        yield server


class Host:
    """A host whose processor serves the model."""

    def __init__(self, directory: Path, server: Server, **endpoint: object) -> None:
        prompts = directory / "prompts.json"
        text = "A diver sank slowly towards the reef, and saw what nobody had seen. " * 3
        prompts.write_text(json.dumps({"prompts": [{"name": "reef", "text": text, "tokens": 32}]}))
        section = {"url": server.url, "prompts": str(prompts), "apis": ["completions"], **endpoint}
        self.path = configure(
            directory,
            each={"endpoint_canary": {"enabled": True}},
            endpoints={"main": section},
            state_dir=str(directory / "state"),
        )
        self.engine = engines.start(self.path)

    def ask(self) -> list[Run]:
        """Run the canary once, with all that it calls for."""
        return engines.ask(self.engine)

    @property
    def said(self) -> str:
        """The messages of the endpoint's findings."""
        return " ".join(f.message for f in self.engine.verdict(NAMED).findings)

    def state(self, name: str = NAMED) -> State:
        """Return the state of a device."""
        return self.engine.verdict(next(u for u, d in self.engine.devices.items() if d.name == name)).state

    def accused(self, name: str) -> bool:
        """Return whether a device has a finding beyond a note on what it serves."""
        found = self.engine.verdict(next(u for u, d in self.engine.devices.items() if d.name == name)).findings
        return any(f.state.severity >= State.SUSPECT.severity for f in found)


@pytest.fixture(params=[True, False], ids=["tells its start", "does not"])
def server(request) -> Iterator[Server]:
    """Return a server that tells when it started, and one that does not."""
    with serving(tells=request.param) as found:
        yield found


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_restarts_are_healthy_and_named(tmp_path, server, times):
    """Each is learnt anew; neither the server nor the device behind it is accused."""
    host = Host(tmp_path, server)
    host.ask()
    assert host.state() is State.HEALTHY, host.said
    for _ in range(times):
        server.restart()
        host.ask()
        assert host.state() is State.HEALTHY, host.said
        assert re.search("was restarted at 20|all answers at once", host.said), host.said
        assert not host.accused("cpu:0")
    kept = {b.chain.get("launch") for b in host.engine.store.baselines(NAMED)}
    assert len(kept) == min(times + 1, 8)


def test_a_fault_within_a_launch_makes_a_suspect(tmp_path, server):
    """The same answers twice, then others without a restart; the device is not accused. A restart acquits nobody."""
    if not server.tells:
        pytest.skip("nothing tells such a fault from a restart, if it strikes every answer alike")
    host = Host(tmp_path, server)
    host.ask()
    server.restart()
    host.ask()
    assert host.state() is State.HEALTHY, host.said
    server.shift = 0.01
    runs = host.ask()
    assert [bool(run.confirms) for run in runs] == [False, True, True, True]
    assert host.state() is State.SUSPECT, host.said
    assert not host.accused("cpu:0")
    server.shift = 0.0
    server.restart()
    host.ask()
    assert host.state() is State.SUSPECT, host.said


def test_known_answers_after_a_restart_are_compared_and_not_learnt_again(tmp_path, server):
    """A server that does not tune: one run, as on any other day; and then a fault of one answer of two departs."""
    host = Host(tmp_path, server)
    host.ask()
    server.started += 60
    assert len(host.ask()) == 1
    assert "restarted" not in host.said
    assert host.state() is State.HEALTHY, host.said


def test_a_check_says_that_the_server_was_restarted(tmp_path, server):
    """Exit code 0, the restart in words, and which flags switch tuning off."""
    host = Host(tmp_path, server)
    check = ("check", "--config", host.path, "--level", "quick", "--device", NAMED)
    assert canaryd(*check).code == 0
    server.restart()
    done = canaryd(*check, "-v")
    said = " ".join(done.out.split())
    assert done.code == 0, said
    assert "tune kernels at start" in said
    assert "--disable-flashinfer-autotune" in said


def test_where_equal_bits_are_promised_a_restart_excuses_nothing(tmp_path):
    """By a setting, since vLLM does not show VLLM_BATCH_INVARIANT."""
    with serving(tells=True) as server:
        host = Host(tmp_path, server, repeats="always")
        host.ask()
        assert host.state() is State.HEALTHY, host.said
        server.restart()
        host.ask()
        assert host.state() is State.SUSPECT, host.said
