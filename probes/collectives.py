"""Data sent between devices, or between the cores of a processor: transfers over every link, and collectives.

Stresses: the links between devices (NVLink, xGMI, HCCS, PCIe, or what the library chooses), by send and receive over
every link in both directions, all-gather and all-reduce, with patterns that toggle every line and sums that are exact
in any order. In a processor: the paths between its cores and sockets, by processes that are pinned to them. The probe
finds faults that appear only when several devices work together. It names the link that is wrong.

Cannot see: links to other hosts, paths that the library did not choose, errors that a link corrects itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.links.group import send_around
from canaryd.worker.toolkit import need_torch

SPEC = ProbeSpec(
    name="collectives",
    summary="data sent between devices, or cores, bit for bit: names the link that is wrong",
    backends=("cpu", "cuda", "rocm", "xpu", "npu"),
    budget={"quick": 0.5, "standard": 2.0, "deep": 30.0},
    timeout=180.0,
    group=True,
    order=64,
)

WORDS = {"quick": 1 << 14, "standard": 1 << 16, "deep": 1 << 20}
"""Level → number of 64-bit words in one transfer between cores; a transfer between devices has 16 times as many."""
FORMATS = ("int64", "float32", "bfloat16")
"""Number formats of the sums."""


def run(ctx: Context) -> Iterator[Fact]:
    """Send every pattern over every link repeatedly, and yield the comparisons."""
    need_torch()
    words = WORDS[ctx.level] * (1 if ctx.device.unit == "cpu" else 16)
    yield from send_around(ctx, words, FORMATS)
