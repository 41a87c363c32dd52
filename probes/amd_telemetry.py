"""What AMD accelerators say about themselves: memory errors, heat, power, clocks, link. docs/readings.md has more.

Reads: the kernel's files of each card, and ROCm's own library where it is installed.

Cannot see: displays of processors, stored error records (CPER), which outlive what they report.

Settings: sysfs (default "/sys"), the tree that is read; amdsmi (default true), whether ROCm's library is asked where it
is installed.
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.amd import read

SPEC = ProbeSpec(
    name="amd_telemetry",
    summary="memory errors, bad pages, temperature, power, clocks and PCI Express link of AMD accelerators",
    backends=("rocm",),
    period=15.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 1.0},
    timeout=5.0,
    numeric=False,
    telemetry=True,
    order=10,
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield one reading, or one absence with its reason, per field."""
    yield from read(ctx.device, ctx.settings)
