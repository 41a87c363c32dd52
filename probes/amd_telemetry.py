"""What AMD accelerators report: memory errors, temperature, power, clocks, link. docs/readings.md has more.

Reads: the kernel's files of each card, and ROCm's own library where it is installed.

Cannot see: graphics inside processors; stored error records (CPER), because old ones stay after their errors ended.

Settings: sysfs (default "/sys"), the directory that is read; amdsmi (default true), whether ROCm's library is used
where it is installed.
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
    settings=("sysfs", "amdsmi"),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield for each field one reading, or one absence with its reason."""
    yield from read(ctx.device, ctx.settings)
