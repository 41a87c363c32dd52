"""What macOS reports without root about the GPU of Apple silicon: use, memory, restarts, thermal throttling.

Reads: ioreg, pmset, sysctl and system_profiler.

Cannot see: temperatures, power and clocks, which need root; memory errors, which macOS does not count.

Settings: ioreg, pmset, sysctl, system_profiler, the paths of these commands (default: where macOS keeps them).
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.apple import read

SPEC = ProbeSpec(
    name="apple_telemetry",
    summary="use, memory, restarts and throttling of Apple GPUs, as macOS reports them without root",
    backends=("mps",),
    period=15.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 1.0},
    timeout=10.0,  # three commands of at most two seconds each
    numeric=False,
    telemetry=True,
    order=10,
    settings=("sysctl", "ioreg", "pmset", "system_profiler"),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield for each field one reading, or one absence with its reason."""
    yield from read(ctx.device, ctx.settings)
