"""Policies, facts and devices of tests of the budget."""

from __future__ import annotations

from datetime import datetime, timezone

from canaryd.facts import Reading
from canaryd.model import Device, Outcome

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="a card")
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=timezone.utc).timestamp()
GIB = 1 << 30
PROBE = '''"""Says how it runs."""

import os
import time
from pathlib import Path

from canaryd.probe import Comparison, Exactness, ProbeSpec, Reading

SPEC = ProbeSpec(
    name="computes",
    summary="Says how it runs",
    period=1.0,
    budget={"quick": 0.3, "standard": 0.3, "deep": 0.3},
)


class OutOfMemoryError(RuntimeError):
    pass


def own(name):
    path = Path("/proc/self", name)
    return path.read_text().strip() if path.exists() else ""


def run(ctx):
    if "raises" in ctx.settings:
        said = ctx.settings["raises"]
        raise (RuntimeError if "error:" in said else OutOfMemoryError)(said)
    yield Reading(name="nice", value=os.getpriority(os.PRIO_PROCESS, 0), unit="1")
    yield Reading(name="room", value=ctx.room, unit="bytes")
    yield Reading(name="oom_score_adj", value=own("oom_score_adj"))
    yield Reading(name="autogroup", value=own("autogroup"))
    yield Reading(name="policy", value=os.sched_getscheduler(0), unit="1")
    yield Reading(name="mps", value=os.environ.get("CUDA_MPS_CLIENT_PRIORITY", ""))
    while time.process_time() < ctx.settings.get("burn", 0):
        pass
    while ctx.settings.get("wait") and int(own("schedstat").split()[1]) < 1e9 * ctx.settings["wait"]:
        pass
    trials, began = 0, time.monotonic()
    while ctx.left:
        time.sleep(0.005)
        trials += 1
        if ctx.settings.get("paces"):
            ctx.pace()
        else:
            yield Reading(name="turn", value=trials, unit="1")
    yield Reading(name="trials", value=trials, unit="1")
    yield Comparison(case="only", shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=max(trials, 1))
'''


def reading(name: str, value: float, **labels: str) -> Reading:
    return Reading(name=name, value=value, labels=labels)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(run) -> dict[str, object]:
    assert run.outcome is Outcome.COMPLETED, run.detail
    return {r.name: r.value for r in run.readings}
