"""The common face of the vendors: what a telemetry module must offer, and the inventory that asks all of them.

A module is `canaryd.worker.<name>` with `devices`, `read` and `close`. It alone imports its vendor's library, and only
when it is asked something.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from canaryd.model import Device, Reading, Reason
from canaryd.probe import Absent, Skip
from canaryd.worker.telemetry import pci
from canaryd.worker.telemetry.sysfs import Unreadable, path_setting

BACKENDS = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "xpu", "Huawei": "npu"}
"""Vendor as the PCI bus names it → backend."""


class Unavailable(Skip):
    """The vendor's library or driver cannot be used here; a poll that meets it is skipped for that reason."""


class DeviceLost(Unavailable):
    """The driver says that the device no longer answers."""

    reason = Reason.DEVICE_LOST


class NotHere(Unavailable):
    """Nothing of the vendor is installed: no failure where there is no such device."""


class Vendor(Protocol):
    """What each module offers. `settings` is the probe's own section of the configuration.

    Two more functions are optional: `facts(settings)` returns what belongs to the inventory of the machine rather than
    to one device, and `problems()` what the last `devices` could not make out, one sentence each.
    """

    def devices(self, settings: Mapping[str, Any]) -> list[Device]:
        """Return the devices with identity and versions; raise `Unavailable` where nothing can be asked."""
        ...

    def read(self, device: Device, settings: Mapping[str, Any]) -> Iterator[Reading | Absent]:
        """Yield what the device says about itself now; raise `Unavailable` where nothing can be asked."""
        ...

    def close(self) -> None:
        """Let go of every handle, and of the library where that is possible."""
        ...


def module(name: str) -> Vendor:
    """Return the module of a vendor; nothing of the vendor's own is imported yet."""
    found: Vendor = importlib.import_module(f"canaryd.worker.telemetry.{name}")
    return found


def inventory(name: str, settings: Mapping[str, Any]) -> tuple[list[Device], dict[str, str], list[str]]:
    """Return the devices that a vendor's module finds, facts of the machine, and what it could not make out.

    Raises `Unavailable` where nothing can be asked.
    """
    vendor = module(name)
    try:
        devices = vendor.devices(settings)
        facts: dict[str, str] = getattr(vendor, "facts", lambda _: {})(settings)
        if name == "host":
            devices = [*devices, *on_the_bus(path_setting(settings, "sysfs", "/sys"))]
        return devices, facts, getattr(vendor, "problems", list)()
    finally:
        vendor.close()


def on_the_bus(sysfs: Path) -> list[Device]:
    """Return a placeholder for each accelerator on the PCI bus: it stands in where no library and no torch shows it."""
    try:
        functions = pci.accelerators(sysfs)
    except Unreadable:
        return []
    return [
        Device(
            uuid=f"PCI-{function.bus_id}",
            backend=BACKENDS[function.vendor],
            index=index,
            model=f"{function.vendor} device {function.device_id}",
            weak_identity=True,
            detail={"bus_id": function.bus_id, "undriven": "yes", "kernel_driver": function.driver or "none"},
        )
        for index, function in enumerate(functions)
        if not (function.passed_through or function.virtual)
    ]
