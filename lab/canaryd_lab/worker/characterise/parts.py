"""Answer the requests of `canaryd characterise`: list the parts (groups of tests), or carry one out."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.model import RUNTIMES, TORCH, Device
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.products import FORMAT_PAIRS
from canaryd.worker.numeric.tensors import as_text, need_torch, torch, torch_device
from canaryd_lab.worker.characterise import (
    behaviour,
    controls,
    exactness,
    kernels,
    speed,
    vendor_tool,
    width,
)
from canaryd_lab.worker.characterise.bench import Bench, DeviceFailed, Progress

SLOW = {"jax": 60}
"""Runtime → seconds for its attention part, if 12 are too few: XLA compiles every shape anew."""


@dataclass(frozen=True)
class Part:
    """A group of tests. `rank` is its place in the order, 0 being the first. `seconds` is the most that it takes."""

    name: str
    title: str
    rank: int
    seconds: float
    carry_out: Callable[[Bench], None]
    runtimes: tuple[str, ...] = RUNTIMES
    """Runtimes through which the part can be carried out."""


def environment(bench: Bench) -> None:
    """Record the software under test, torch's switches, the device, and what the goldens assume of the device."""
    device = bench.device
    with bench.runtime.strict(device) as switches:
        bench.facts["switches"] = as_text(switches)
    bench.facts["stack"] = bench.runtime.stack(device, "")
    bench.facts["host"] = {**stack.environment(), "system": platform.platform()}
    if device.runtime == TORCH:
        bench.facts["torch_device"] = str(torch_device(device))
        bench.facts["torch_config"] = torch.__config__.show()
    bench.facts["variables"] = {
        n: v for n, v in sorted(os.environ.items()) if n.startswith(("CUDA_", "CUBLAS_", "ONEDNN_"))
    }
    bench.facts["assumed"] = {
        source: {"bits": room.bits, "characterised": room.characterised, "why": room.why}
        for source in dict.fromkeys(s for s, _ in FORMAT_PAIRS)
        for room in (accumulator(device, source),)
    }


PARTS = {
    part.name: part
    for part in (
        Part("environment", "Device and software", 0, 10, environment),
        Part("controls", "Controls that must fail", 10, 10, controls.controls),
        Part("width", "Bits that accumulators keep", 30, 20, width.widths),
        *(
            Part(f"exactness/{name}", f"Exactness of {name} products", 40, 14, carry_out)
            for name, carry_out in exactness.PRODUCT_PARTS
        ),
        *(
            Part(f"attention/{name}", f"Exactness of attention by {name}", 50, SLOW.get(runtime, 12), act, (runtime,))
            for runtime, name, act in exactness.ATTENTION_PARTS
        ),
        Part("kernels", "Kernels of each class of products", 60, 30, kernels.kernels, (TORCH,)),
        Part("throughput", "Raw and verified throughput", 70, 60, speed.throughput, (TORCH,)),
        Part("memory", "Memory that runs out", 85, 10, behaviour.memory, (TORCH,)),
    )
}
"""Name → part, for every part that the worker carries out."""
HELPERS = {
    part.name: part
    for part in (
        Part("spin", "Work that is killed", 0, 60, behaviour.spin),
        Part("vendor tool", "The vendor's own tool", 0, 10, vendor_tool.vendor_tool),
    )
}
"""Name → part, for parts that run only at the request of another part."""

WITHOUT_TORCH = frozenset({"vendor tool"})
"""Names of parts that run in canaryd's own interpreter."""


def answer(arguments: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Return {"parts": …} of the device if the argument `part` is "", else that part's "observations" and "facts"."""
    device = from_json(Device, arguments["device"])
    if not arguments["part"]:
        mine = (p for p in PARTS.values() if device.runtime in p.runtimes)
        return {"parts": [{"name": p.name, "title": p.title, "rank": p.rank, "seconds": p.seconds} for p in mine]}
    part = {**PARTS, **HELPERS}[arguments["part"]]
    if part.name not in WITHOUT_TORCH:
        need_torch()
    bench = Bench(device, arguments["seconds"], arguments["drill"], progress, memory=arguments.get("memory", ""))
    try:
        part.carry_out(bench)
    except DeviceFailed as failed:
        bench.facts["ended_early"] = str(failed)
    return {"observations": to_json(bench.seen), "facts": bench.facts}
