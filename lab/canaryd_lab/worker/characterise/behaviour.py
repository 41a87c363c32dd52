"""How a device behaves under strain: memory that runs out, work that does not end, a decode loop."""

from __future__ import annotations

import itertools
import math
import resource
import time
from functools import partial
from typing import Any

from canaryd.facts import beginning
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.operands import build
from canaryd.worker.numeric.products import multiply
from canaryd.worker.numeric.tensors import strict_switches, synchronize, torch, torch_device
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import SEED, Bench
from canaryd_lab.worker.characterise.exactness import product_of

ROOM = 1 << 30
"""Bytes that this process may take beyond what it has, so that memory runs out here and not for a server (ours)."""
BLOCK = 256 << 20
"""Bytes of one allocation."""
WIDTH, LAYERS, BATCH = {"cpu": 192}, 16, 8
"""Width of the decode loop's layers by backend (others: `WIDE`), their number, and its rows."""
WIDE = 4096


def memory(bench: Bench) -> None:
    """Take memory until there is no more: that must be called so, and right answers must follow.

    A limit makes it run out for this process alone, where torch can set one; elsewhere it is the device's last.
    """
    device, (_, total) = torch_device(bench.device), bench.runtime.memory(bench.device)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    held: list[Any] = []
    if bench.device.backend == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + ROOM, limits[1]))
    try:
        bench.runtime.limit_memory(bench.device, ROOM)
        for _ in itertools.repeat(None, 4096):
            held.append(torch.empty(BLOCK, dtype=torch.uint8, device=device))
            if bench.left <= 0:
                break
        bench.add("memory runs out", Claim.OPEN, Seen.NOT_REACHED, f"{len(held) * BLOCK:,} bytes were taken in time")
    except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
        kind, taken = kind_of(caught), len(held) * BLOCK
        held.clear()
        good = kind is ErrorKind.MEMORY
        text = "" if good else f"taken for {kind.value}: {beginning(str(caught), 200)}"
        bench.add(
            "memory runs out", Claim.STRICT, Seen.RIGHT if good else Seen.WRONG, text, values={"taken_bytes": taken}
        )
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        bench.runtime.limit_memory(bench.device, total or ROOM)
        if hasattr(getattr(torch, device.type, None), "empty_cache"):
            getattr(torch, device.type).empty_cache()
    with strict_switches():
        product = product_of(bench.device, "float32", "float32", "dense", "nt", (128, 128, 256, 0))
        bench.verify("computes afterwards", partial(build, product, SEED), partial(multiply, "float32", "float32"))


def _data_bytes() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123  not a path to compute with
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["VmData"].split()[0]) << 10


def spin(bench: Bench) -> None:
    """Compute until the time is spent: for a worker that is going to be killed."""
    a = torch.ones((1024, 1024), device=torch_device(bench.device))
    turns = 0
    while bench.left > 0:
        bench.progress(0.5, "computing")
        torch.matmul(a, a)
        turns += 1
        if turns % 16 == 0:
            synchronize(bench.device)
    bench.add("products", Claim.OPEN, Seen.MEASURED, values={"products": turns})


def decode_loop(bench: Bench) -> None:
    """Decode as a server does, one step after another through a stack of layers, and note its speed and latency."""
    device = torch_device(bench.device)
    width = WIDTH.get(bench.device.backend, WIDE)
    kind = torch.float32 if device.type == "cpu" else torch.float16
    layers = [torch.full((width, width), 1.0 / width, device=device, dtype=kind) for _ in range(LAYERS)]
    x = torch.ones((BATCH, width), device=device, dtype=kind)
    steps: list[float] = []
    while bench.left > 0:
        started = time.perf_counter()
        for layer in layers:
            x = x @ layer
        float(x[0, 0])  # the next token is needed on the host
        steps.append(time.perf_counter() - started)
    ordered = sorted(steps)
    last = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)))]
    values = {
        "tokens_per_second": round(BATCH * len(steps) / sum(steps), 1),
        "median_step_seconds": ordered[len(ordered) // 2],
        "slowest_hundredth_step_seconds": last,
    }
    bench.add("decode loop", Claim.OPEN, Seen.MEASURED, values=values)
