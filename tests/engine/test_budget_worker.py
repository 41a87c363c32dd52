"""The budget in the worker: pauses, the group of a server, memory that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canaryd.engine import budget
from canaryd.model import Device, Outcome, Reason
from canaryd.probe import Context, ProbeSpec, Skip
from canaryd.supervisor import cgroup
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.limits import SKIPPED, Bursts, excuse, install, make_room
from tests.command import bare_python
from tests.engine.budgets import CPU, GPU, Clock, told

LEAST = {"burst": 0.02, "rest": 3.0, "memory": 1024, "free": 1024, "small": 0}


def ask(
    probe: Path, *, nice: int = 0, device: Device = CPU, timeout: float = 60.0, beside_: dict | None = None, **settings
):
    """Run the probe in a worker of its own; return the run and the series, which has ended."""
    spec = ProbeSpec(name="computes", summary="", budget={"quick": 0.3, "standard": 0.3, "deep": 0.3})
    request = RunRequest(
        probe_path=probe, spec=spec, device=device, level="quick", seed=1, settings=settings, beside=beside_ or {}
    )
    with Series(WorkerSpec(python=bare_python(), nice=nice)) as series:
        run = series.run(request, timeout)
    return run, series


def test_a_worker_steps_back_only_where_it_is_asked(probe):
    """Nice, the scheduler's group of its session, first to go when memory runs out, and below normal under MPS."""
    plain, stepped = (told(ask(probe, nice=nice)[0]) for nice in (0, budget.NICE))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (plain["nice"], stepped["nice"]) == (own, max(own, budget.NICE))
    assert (plain["oom_score_adj"] == "1000", stepped["oom_score_adj"] == "1000") == (False, True)
    assert (plain["mps"], stepped["mps"]) == ("", "1")
    lowest = os.SCHED_IDLE if cgroup.apart(None) else os.SCHED_OTHER
    assert (plain["policy"], stepped["policy"]) == (os.SCHED_OTHER, lowest)
    if not stepped["autogroup"]:
        pytest.skip("this kernel groups no sessions")
    assert str(stepped["autogroup"]).endswith(f"nice {budget.NICE}")
    assert not str(plain["autogroup"]).endswith(f"nice {budget.NICE}")


@pytest.mark.parametrize("paces", [True, False], ids=["a probe that paces", "a probe that only yields"])
def test_pauses_cost_no_trials(probe, paces):
    """In bursts a run works for as long as its budget, and its pauses, three times as long, are no device time."""
    begun = time.monotonic()
    bursts, series = ask(probe, paces=paces, beside_=LEAST)
    assert bursts.seconds > 0.3 + 0.5
    assert series.wall_seconds < time.monotonic() - begun - 0.5


def test_pauses_by_count(monkeypatch):
    """One pause for each burst, none before the first is over, and the clock of the run stands meanwhile."""
    clock = Clock()
    bursts = Bursts(burst=10.0, rest=0.0, clock=clock)
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    counts = []
    for _ in range(40):
        clock.now += 1.0
        bursts.pause()
        counts.append(len(slept))
    assert counts == [turn // 10 for turn in range(1, 41)]
    assert bursts.clock() == 40.0 - bursts.paused


def test_a_retest_keeps_its_own_rhythm():
    """Its load and its pauses are the test."""
    ctx = Context(device=CPU, level="quick", seed=1, budget=1.0, intensity="steady")
    before = ctx.pace
    assert install(ctx, LEAST, 7) is None
    assert (ctx.pace, ctx.clock, ctx.room) == (before, time.monotonic, 7)


def test_memory_that_is_not_there_is_not_taken(tmp_path, probe):
    """Below what it may take and must leave, the run is skipped with that reason, and nothing was computed."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 1024 kB\n")
    with pytest.raises(
        Skip, match=re.escape("budget: 1 MiB of memory are free; budget.memory and what stays free need 2 MiB")
    ):
        make_room(CPU, LEAST | {"memory": 1 << 20, "free": 1 << 20}, meminfo)
    make_room(CPU, LEAST | {"memory": 1 << 19, "free": 1 << 19}, meminfo)
    make_room(CPU, LEAST | {"memory": 1 << 60, "free": 0}, tmp_path / "none")
    run, _ = ask(probe, beside_=LEAST | {"memory": 1 << 60})
    assert run.outcome is Outcome.SKIPPED
    assert (run.detail.startswith(SKIPPED), run.reason) == (True, Reason.BUDGET)
    assert run.readings == ()


@pytest.mark.parametrize(
    ("device", "given", "said", "outcome"),
    [
        (GPU, LEAST, "CUDA out of memory. Tried to allocate 2 GiB", Outcome.SKIPPED),
        (GPU, {}, "CUDA out of memory. Tried to allocate 2 GiB", Outcome.OUT_OF_MEMORY),
        (GPU, LEAST, "CUDA error: out of memory", Outcome.SKIPPED),
        (GPU, {}, "CUDA error: out of memory", Outcome.OUT_OF_MEMORY),
        (GPU, LEAST, "Triton Error [CUDA]: out of memory", Outcome.SKIPPED),
        (GPU, LEAST, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Outcome.SKIPPED),
        (CPU, LEAST, "out of memory", Outcome.OUT_OF_MEMORY),
        (GPU, {}, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Outcome.SKIPPED),
        (GPU, LEAST, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Outcome.SKIPPED),
    ],
)
def test_what_is_nobodys_fault_is_skipped(probe, device, given, said, outcome):
    """The cap of its own making, and a device that its owner shares with nobody; all else stays what it was."""
    run, _ = ask(probe, device=device, beside_=given, raises=said)
    assert run.outcome is outcome
    assert (run.detail.startswith(SKIPPED)) == (outcome is Outcome.SKIPPED) == (run.reason is Reason.BUDGET)
    assert said in run.detail


@pytest.mark.gpu
@pytest.mark.torch
def test_the_cap_holds_on_an_accelerator():
    """Torch refuses what is beyond the cap; the server's memory is not touched."""
    import torch

    device = next(
        d for d in __import__("canaryd.worker.numeric.stack", fromlist=["x"]).discover()[0] if d.backend != "cpu"
    )
    make_room(device, LEAST | {"memory": 64 << 20, "free": 0})
    try:
        kept = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        assert kept.nbytes == 32 << 20
        assert excuse(caught.value, capped=True).startswith(SKIPPED)
    finally:  # the cap is the process's, and the tests after this one need more
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who waited for a core")
def test_a_starved_worker_does_not_hang(probe):
    """One that waits for its core longer than its timeout completes; without stepping back it is timed out."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        run, _ = ask(probe, nice=budget.NICE, timeout=10.0, wait=15.0)
        plain, _ = ask(probe, timeout=10.0, wait=15.0)
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert run.seconds > 10.0
    assert plain.outcome is Outcome.TIMED_OUT
