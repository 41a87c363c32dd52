"""A device's behaviour in two hard situations: memory that is exhausted, and work that does not end."""

from __future__ import annotations

import itertools
import resource
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
"""Bytes that this process can still allocate: its memory is exhausted before a server's memory is (ours)."""
BLOCK = 256 << 20
"""Bytes of one allocation."""


def memory(bench: Bench) -> None:
    """Allocate memory until none is left. The error must say that memory is exhausted; later answers must be right."""
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
    """Compute until the time is spent, so that the caller can kill the worker."""
    a = torch.ones((1024, 1024), device=torch_device(bench.device))
    turns = 0
    while bench.left > 0:
        bench.progress(0.5, "computing")
        torch.matmul(a, a)
        turns += 1
        if turns % 16 == 0:
            synchronize(bench.device)
    bench.add("products", Claim.OPEN, Seen.MEASURED, values={"products": turns})
