"""The machine around the accelerators: memory errors, machine checks, heat, clocks, load and pressure.

Reads: EDAC, /proc/interrupts, hwmon and thermal zones, cpufreq, /proc and pressure files, pstore.
docs/readings.md says which readings come from which file.

Cannot see: memory errors where no EDAC driver is loaded, as in most virtual machines.

Settings: sysfs (default "/sys"), proc (default "/proc").
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.host import read

SPEC = ProbeSpec(
    name="host_telemetry",
    summary="memory errors, machine checks, heat and load of the host",
    backends=("cpu",),
    period=15.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 1.0},
    timeout=5.0,
    numeric=False,
    telemetry=True,
    order=10,
    settings=("sysfs", "proc"),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield for each field one reading, or one absence with its reason."""
    yield from read(ctx.device, ctx.settings)
