"""The interface of the vendors' modules, and the inventory that uses them.

Only a vendor's own module imports the vendor's library, and only when the module is used. A new vendor also needs a
probe, `probes/<name>_telemetry.py`, and its backend in `canaryd.engine.inventory.BACKEND_OF_MODULE`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from canaryd.model import KERNEL_DRIVER, ON_THE_BUS, UNDRIVEN, Device, Reason
from canaryd.probe import Skip
from canaryd.worker.telemetry import pci
from canaryd.worker.telemetry.sysfs import Unreadable, path_setting


class Unavailable(Skip):
    """The vendor's library or driver cannot be used here; the reason is reported and the poll is skipped."""


class DeviceLost(Unavailable):
    """The driver says that the device no longer answers."""

    reason = Reason.DEVICE_LOST


class NotHere(Unavailable):
    """Nothing of the vendor is installed, which is normal on a host without its devices."""


def module(name: str) -> Any:
    """Return the module of a vendor; this does not import the vendor's library yet.

    `settings`: its probe's own section of the configuration. `devices(settings)` returns the devices with identity and
    versions, `read(device, settings)` yields the readings of one; both raise `Unavailable` if library or driver cannot
    be used. Optional: `facts(settings)` returns facts of the machine; `problems()` returns one sentence for each thing
    that the last `devices` could not identify; `close()` releases every handle.
    """
    return importlib.import_module(f"canaryd.worker.telemetry.{name}")


def inventory(name: str, settings: Mapping[str, Any]) -> tuple[list[Device], dict[str, str], list[str]]:
    """Return the devices that a vendor's module finds, facts of the machine, and sentences on unidentified devices.

    Raises `Unavailable` if library or driver cannot be used.
    """
    vendor = module(name)
    try:
        devices = vendor.devices(settings)
        facts: dict[str, str] = getattr(vendor, "facts", lambda _: {})(settings)
        if name == "host":
            devices = [*devices, *on_the_bus(path_setting(settings, "sysfs", "/sys"))]
        return devices, facts, getattr(vendor, "problems", list)()
    finally:
        getattr(vendor, "close", lambda: None)()


def on_the_bus(sysfs: Path) -> list[Device]:
    """Return a placeholder for each accelerator on the PCI bus, for those that neither library nor torch lists."""
    try:
        functions = pci.accelerators(sysfs)
    except Unreadable:
        return []
    return [
        Device(
            uuid=f"{ON_THE_BUS}{function.bus_id}",
            backend=function.backend,
            index=index,
            model=f"{function.vendor} device {function.device_id}",
            weak_identity=True,
            detail={"bus_id": function.bus_id, UNDRIVEN: "yes", KERNEL_DRIVER: function.driver or "none"},
        )
        for index, function in enumerate(functions)
        if not (function.passed_through or function.virtual)
    ]
