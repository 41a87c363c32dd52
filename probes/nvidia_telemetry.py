"""What NVIDIA GPUs and their MIG instances say about themselves, through NVML. docs/readings.md has every call.

Reads: NVML through NVIDIA's own binding, and the kernel's counts of PCI Express errors.

Cannot see: what goes wrong without being counted, and Xid messages, which the kernel log has.

Settings: sysfs (default "/sys"), the tree in which PCI Express errors are read.
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.nvidia import read

SPEC = ProbeSpec(
    name="nvidia_telemetry",
    summary="memory errors, row remapping, heat, power, throttling, clocks, PCI Express and NVLink of NVIDIA GPUs",
    backends=("cuda",),
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
