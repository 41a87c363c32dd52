"""Memory tested with patterns: own addresses, moving inversions, random words read twice, and a pause.

Stresses: cells, rows and decoders of a device's memory or the host's, and the path to it. A wrong word is read again:
if the second read is right, the transfer was wrong, otherwise the cell is. Then the word is written again, which shows
whether the cell is stuck, coupled, aliased or leaking.

Cannot see: memory that other programs hold, memory kept in reserve, cells that ECC corrects (telemetry counts those).
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.memory.slices import LARGEST
from canaryd.worker.memory.sweep import sweep_memory
from canaryd.worker.toolkit import need_torch

SPEC = ProbeSpec(
    name="memory_sweep",
    summary="memory read back under patterns: cells, addresses and transfers",
    budget={"quick": 0.3, "standard": 5.0, "deep": 120.0},
    order=60,
    settings=("mebibytes",),
)

MIB = 1 << 20
MOST = {"quick": 16 * MIB, "standard": 1024 * MIB, "deep": 1 << 50}
"""Level → maximum bytes that are tested; at deep the limit is all free memory, less a reserve."""
BEYOND_CACHES = LARGEST
"""Maximum bytes tested on an accelerator at quick. Fewer would stay in its cache and never reach the memory: the L2 of
an H100 holds 50 MB, of a B200 126 MB, the last cache of an MI300X 256 MB (the vendors' white papers)."""
PAUSE = {"quick": 0.02, "standard": 0.5, "deep": 5.0}
"""Level → seconds between writing and reading in the case `retention`."""


def run(ctx: Context) -> Iterator[Fact]:
    """Test as much memory as the level, the setting `mebibytes`, and a server's budget allow."""
    need_torch()
    most = MOST[ctx.level] if ctx.device.unit == "cpu" else max(MOST[ctx.level], BEYOND_CACHES)
    yield from sweep_memory(ctx, min(most, _setting(ctx)), PAUSE[ctx.level])


def _setting(ctx: Context) -> int:
    """Return the setting `mebibytes` in bytes."""
    value = ctx.settings.get("mebibytes", MOST["deep"] // MIB)
    if type(value) is not int or value < 1:
        raise ValueError(f"probes.memory_sweep.settings.mebibytes: {value!r} is not a positive whole number")
    return value * MIB
