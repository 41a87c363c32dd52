"""What Intel GPUs report: temperature, power, clocks, throttling, link. docs/readings.md has the sources.

Reads: the kernel's files of each card.

Cannot see: memory errors (the drivers give no counts in sysfs), integrated graphics.

Settings: sysfs (default "/sys"), the directory that is read.
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.intel import read

SPEC = ProbeSpec(
    name="intel_telemetry",
    summary="temperature, power, clocks, throttling and PCI Express link of Intel GPUs",
    backends=("xpu",),
    period=15.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 1.0},
    timeout=5.0,
    numeric=False,
    telemetry=True,
    order=10,
    settings=("sysfs",),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield for each field one reading, or one absence with its reason."""
    yield from read(ctx.device, ctx.settings)
