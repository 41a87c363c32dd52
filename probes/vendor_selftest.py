"""The vendor's own self-test of an accelerator: dcgmi diag, RVS, ascend-dmi or xpu-smi diag; its results are recorded.

Stresses: what the vendor's tool does, alone on the device, for minutes to hours. It runs at level deep only, and only
where the configuration enables it: take the device out of service first.

Cannot see: what the vendor's tool does not test. A pass proves no device healthy; docs/vendors.md says what a failure
means.

Settings: command (name or path of the tool), suite (what it runs: DCGM's level 1 to 4, RVS's module, ascend-dmi's
items, xpu-smi's level 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.probe import Context, Fact, ProbeSpec, Skip
from canaryd.worker.telemetry.selftest import TOOLS, read

SPEC = ProbeSpec(
    name="vendor_selftest",
    summary="the vendor's own self-test, at level deep where it is enabled",
    backends=tuple(TOOLS),
    period=30 * 86400.0,
    budget={"quick": 1.0, "standard": 1.0, "deep": 7200.0},
    timeout=90.0,
    numeric=False,
    opt_in=True,
    order=90,
    settings=("command", "suite"),
)


def run(ctx: Context) -> Iterator[Fact]:
    """Yield the result of each test of the vendor's tool."""
    if ctx.level != "deep":
        raise Skip("a vendor's self-test takes the whole device: drain it, then canaryd check --level deep")
    yield from read(ctx)
