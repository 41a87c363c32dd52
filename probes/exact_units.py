"""The same exact tiles on every core of a processor and every SM of a GPU; the wrong core or SM is named.

Stresses: each core in turn, with the computing thread pinned to it; each SM, through its tensor cores and through
single multiplications and additions (a kernel reads the number of the SM on which it runs, and the lane of the warp
that holds each element). All units compute the same bytes: if one unit alone is wrong, the software is not the cause.

Cannot see: faults that show only under full load or in larger products (exact_matmul has those), SMs that got no block
from the device (listed under "skipped"). The SMs of a GPU need Triton, which comes with torch for CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Device, Fact, ProbeSpec
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.toolkit import need_torch
from canaryd.worker.units.processors import Cores, Multiprocessors, Processor
from canaryd.worker.units.sweep import sweep_units
from canaryd.worker.units.tiles import Tiles

SPEC = ProbeSpec(
    name="exact_units",
    summary="the same exact tiles on every core or SM: names the one that is wrong",
    backends=("cpu", "cuda"),
    budget={"quick": 0.3, "standard": 5.0, "deep": 60.0},
    order=15,
)

KINDS = {
    "cpu": (
        *(("float32", content, "gemm") for content in ("dense", "full", "cancel")),
        *(("float64", content, "gemm") for content in ("dense", "full")),
        *((name, "cancel", "gemm") for name in ("bfloat16", "float16")),
        ("int8", "narrow", "gemm"),
    ),
    "cuda": (
        *((name, content, "dot") for content in ("full", "cancel", "dense") for name in ("bfloat16", "float16")),
        ("int8", "wide", "dot"),
        *(("float32", content, "fma") for content in ("dense", "full", "cancel")),
        ("int32", "wide", "fma"),
    ),
}
"""Backend → the kinds of tile (operand format, content, path) to compute; docs/goldens.md describes the contents."""
QUICK = {"dense", "cancel", "narrow", "wide"}
"""Contents of a quick run. Of the contents for tensor cores, only `cancel` is among them: it shows an error of one unit
in the sums."""
ROUNDS = {"quick": 4, "standard": 8, "deep": 8}
SIZES = (64, 64, 128)
"""M, N, K of a tile: the size that a warp group on Hopper's tensor cores computes at once, with a long enough sum."""


def run(ctx: Context) -> Iterator[Fact]:
    """Compute every kind of tile on every unit that this process may use."""
    need_torch()
    yield from sweep_units(ctx, processor(ctx.device), every_kind(ctx))


def processor(device: Device) -> Processor:
    """Return the object that runs tiles on the units of the device."""
    return Cores() if device.backend == "cpu" else Multiprocessors(device)


def every_kind(ctx: Context) -> list[Tiles]:
    """Return the kinds of tiles that a run computes."""
    kinds = [kind for kind in KINDS[ctx.device.backend] if ctx.level != "quick" or ctx.cases or kind[1] in QUICK]
    return [Tiles(*kind, accumulator(ctx.device, kind[0]).bits, ROUNDS[ctx.level], *SIZES) for kind in kinds]
