"""Accelerators whose memory a server holds: a check and a daemon ask for nothing above the budget, or for nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from canaryd.engine.budget import SMALL
from canaryd.model import Outcome
from canaryd.store.store import Store
from tests.cards_stand_in import Cards
from tests.command import Daemon, canaryd, configure, eventually, running
from tests.engine.budgets import GIB
from tests.nvml_stand_in import StandIn

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
    ),
]
MIB = 1 << 20
SHORT, FULL = range(2)
"""GPUs: with 1,100 MiB that the server left free, and with 300 MiB."""
LEFT = {SHORT: 1100, FULL: 300}
GREEDY = '''"""Takes what the memory sweep takes at deep, then asks for all that it may have once more."""

from canaryd.probe import Comparison, Exactness, ProbeSpec
from canaryd.worker.memory.sweep import allocate
from canaryd.worker.toolkit import torch

BUDGET = dict.fromkeys(("quick", "standard", "deep"), 0.1)
SPEC = ProbeSpec(name="takes", summary="Takes memory", backends=("cuda",), budget=BUDGET)


def run(ctx):
    taken = allocate(ctx, 1 << 50)
    try:
        torch.empty(ctx.room, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        yield Comparison(case="taken", shape=f"N={len(taken)}", seed=1, exactness=Exactness.UNIVERSAL, trials=1)
'''


class Served:
    """A machine with two GPUs whose memory servers hold."""

    def __init__(self, directory: Path) -> None:
        self.machine, self.cards = StandIn(directory, 2), Cards(directory, 2)
        self.state = directory / "state"
        for gpu, free in LEFT.items():
            self.cards.set(gpu, "counted", True)
            self.cards.set(gpu, "used", 80 * GIB - free * MIB)
            self.machine.set(gpu, "memory_total", 80 * GIB)
            self.machine.set(gpu, "memory_used", 80 * GIB - free * MIB)
            self.machine.set(gpu, "processes", "4999999:71940702208")
        (directory / "sys").mkdir()
        each = {"nvidia_telemetry": {"settings": {"sysfs": str(directory / "sys")}}, "takes": {"period": "1s"}}
        software = {"python": sys.executable, "env": dict(self.cards.environment)}
        schedule = {"level": "deep"}
        self.config = configure(directory, each=each, worker=software, schedule=schedule, budget={"busy": 1})
        probe = directory / "probes.d/takes.py"
        probe.write_text(GREEDY)
        probe.chmod(0o644)

    def assert_kept(self) -> None:
        """What was asked for of the one GPU is most of a small run and no more; the other was not even opened."""
        asked, refused = self.cards.asked()
        assert SMALL // 2 < asked <= SMALL
        assert refused > SMALL
        assert {uuid for _, _, uuid in self.cards.log()} == {self.machine.uuids[SHORT]}
        with Store.open(self.state) as store:
            runs = store.runs(probe="takes")
            short = next(d.device.uuid for d in store.devices() if d.device.name == f"cuda:{SHORT}")
        assert {(r.device, r.outcome) for r in runs} == {(short, Outcome.COMPLETED)}
        assert all(run.trials and "at most 256 MiB" in run.skipped[0].reason for run in runs)


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


@pytest.mark.parametrize(
    "level", ["quick", *(pytest.param(level, marks=pytest.mark.slow) for level in ("standard", "deep"))]
)
def test_a_check_asks_for_nothing_above_the_budget(served, level):
    """A small run, which names what it leaves out; where even that does not fit the GPU is unknown, never healthy."""
    where = ("--config", served.config, "--state-dir", served.state)
    gpus = ("--device", "cuda:0", "--device", "cuda:1")
    answer = canaryd("check", "--json", "--level", level, *gpus, *where, timeout=600, **served.machine.environment)
    served.assert_kept()
    devices = {f"{d['backend']}:{d['index']}": d for d in answer.document["devices"]}
    assert "at most 256 MiB of its memory" in devices["cuda:0"]["shared"]
    assert any(
        "all that takes more memory: too little is free on cuda:0" in gap for gap in answer.document["not_checked"]
    )
    (finding,) = [f for f in devices["cuda:1"]["findings"] if f["rule"] == "not-examined"]
    assert "300 MiB of memory free, 1,024 MiB needed" in finding["message"]
    assert devices["cuda:1"]["state"] == "unknown"


@pytest.mark.slow
def test_a_daemon_asks_for_nothing_above_the_budget(served, monkeypatch):
    """At level deep; the GPU on which nothing fits waits, and its reason is told."""
    for name, value in served.machine.environment.items():
        monkeypatch.setenv(name, value)
    with running(Daemon(served.config, served.state)) as daemon:
        eventually(lambda: daemon.value("canaryd_budget_withheld", reason="memory", index="1") == 1, 300)
        done = {"probe": "takes", "outcome": "completed", "index": "0"}
        eventually(lambda: (daemon.value("canaryd_probe_runs_total", **done) or 0) >= 1, 300)
    served.assert_kept()
