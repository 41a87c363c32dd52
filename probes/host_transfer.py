"""Copies between the host and the device, with patterns that toggle every line, compared bit for bit at both ends.

Stresses: the path from the host's memory to the device's and back (PCIe, its slot and bridges, the copy engines), by
walking bits, alternating words, random words and own addresses. Host and device each make the pattern themselves, so
errors of the transfer are reported separately from errors of the device's memory. The speed of each direction is also
measured and compared over time.

Cannot see: errors that the link corrects itself (telemetry counts replays), paths between devices (`collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.links.transfers import copy_patterns
from canaryd.worker.toolkit import need_torch

SPEC = ProbeSpec(
    name="host_transfer",
    summary="copies between host and device, bit for bit",
    backends=("cuda", "rocm", "xpu", "npu", "mps"),
    budget={"quick": 0.05, "standard": 1.0, "deep": 10.0},
    order=62,
)

WORDS = {"quick": 1 << 20, "standard": 1 << 22, "deep": 1 << 23}
"""Level → number of 64-bit words in one copy: 8 MiB at quick, 64 MiB at deep."""


def run(ctx: Context) -> Iterator[Fact]:
    """Copy every pattern in both directions; beside a server, copies are no larger than its free memory allows."""
    need_torch()
    words = WORDS[ctx.level]
    yield from copy_patterns(ctx, min(words, ctx.room // 64) if ctx.room else words)
