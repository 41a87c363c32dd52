"""What Ascend NPUs report through npu-smi: health, memory errors, temperature, power, clocks, link.

Reads: what npu-smi prints, and the kernel's files of the link.

Cannot see: links between NPUs, and whatever this version of npu-smi does not print. docs/readings.md has more.

Settings: npu_smi (default "npu-smi"), the command's name or path; sysfs (default "/sys"), where the link is read.
"""

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec
from canaryd.worker.telemetry.ascend import read

SPEC = ProbeSpec(
    name="ascend_telemetry",
    summary="health, memory errors, temperature, power, clocks and PCI Express link of Ascend NPUs",
    backends=("npu",),
    period=15.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 1.0},
    timeout=20.0,  # up to five calls of npu-smi of at most four seconds each
    numeric=False,
    telemetry=True,
    order=10,
    settings=("npu_smi", "sysfs"),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield for each field one reading, or one absence with its reason."""
    yield from read(ctx.device, ctx.settings)
