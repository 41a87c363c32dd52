"""The functions that each vendor's module must have, and the inventory that uses them.

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
    """Raised if the vendor's library or driver cannot be used; the reason is reported and this poll is skipped."""


class DeviceLost(Unavailable):
    """Raised if the driver says that the device no longer answers."""

    reason = Reason.DEVICE_LOST


class NotHere(Unavailable):
    """Raised if nothing of the vendor is installed, which is normal on a host without the vendor's devices."""


def module(name: str) -> Any:
    """Return the Python module of a vendor; this does not import the vendor's library yet.

    A module has `devices(settings)`, which returns the devices with identity and versions, and `read(device,
    settings)`, which yields the readings of one. `settings` is the configuration of its probe. Both raise `Unavailable`
    if library or driver cannot be used. Optional: `facts(settings)` returns facts of the machine; `problems()` returns
    one sentence for each thing that the last `devices` could not identify; `close()` releases every handle.
    """
    return importlib.import_module(f"canaryd.worker.telemetry.{name}")


def inventory(name: str, settings: Mapping[str, Any]) -> tuple[list[Device], dict[str, str], list[str]]:
    """Return (devices that a vendor's module finds, facts of the machine, sentences on unidentified devices).

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
    """Return a placeholder device for each accelerator on the PCI bus, in case neither a library nor torch lists it."""
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
