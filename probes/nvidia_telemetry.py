"""What NVIDIA GPUs and their MIG instances report through NVML. docs/readings.md lists every call.

Reads: NVML through NVIDIA's own binding, and the kernel's counts of PCI Express errors.

Cannot see: faults that no counter counts, and Xid messages, which are in the kernel log.

Settings: sysfs (default "/sys"), where PCI Express errors are read.
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.nvidia import read

SPEC = ProbeSpec(
    name="nvidia_telemetry",
    summary="memory errors, remapped rows, temperature, power, throttling, clocks, PCI Express, NVLink of NVIDIA GPUs",
    backends=("cuda",),
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
    yield from read(ctx.device, ctx.settings, ctx.memory)
