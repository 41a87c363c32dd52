"""The interface of the vendors' modules, and the inventory that uses them.

A module is `canaryd.worker.telemetry.<name>` with `devices`, `read` and `close`. Only it imports its vendor's library,
and only when one of these is called. A new vendor also needs a probe, `probes/<name>_telemetry.py`, and its backend in
`canaryd.engine.inventory.BACKEND_OF_MODULE`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from canaryd.facts import Reading
from canaryd.model import KERNEL_DRIVER, ON_THE_BUS, UNDRIVEN, Device, Reason
from canaryd.probe import Absent, Skip
from canaryd.worker.telemetry import pci
from canaryd.worker.telemetry.sysfs import Unreadable, path_setting


class Unavailable(Skip):
    """The vendor's library or driver cannot be used here; the poll is skipped with this reason."""


class DeviceLost(Unavailable):
    """The driver says that the device no longer answers."""

    reason = Reason.DEVICE_LOST


class NotHere(Unavailable):
    """Nothing of the vendor is installed, which is normal on a host without its devices."""


class Vendor(Protocol):
    """What each module offers. `settings` is the probe's own section of the configuration.

    Two more functions are optional: `facts(settings)` returns facts of the machine rather than of one device, and
    `problems()` one sentence for each thing that the last `devices` could not identify.
    """

    def devices(self, settings: Mapping[str, Any]) -> list[Device]:
        """Return the devices with identity and versions; raise `Unavailable` where library or driver cannot be used."""
        ...

    def read(self, device: Device, settings: Mapping[str, Any]) -> Iterator[Reading | Absent]:
        """Yield the device's readings; raise `Unavailable` where library or driver cannot be used."""
        ...

    def close(self) -> None:
        """Release every handle, and the library where that is possible."""
        ...


def module(name: str) -> Vendor:
    """Return the module of a vendor, which does not import the vendor's library yet."""
    found: Vendor = importlib.import_module(f"canaryd.worker.telemetry.{name}")
    return found


def inventory(name: str, settings: Mapping[str, Any]) -> tuple[list[Device], dict[str, str], list[str]]:
    """Return the devices that a vendor's module finds, facts of the machine, and what it could not identify.

    Raises `Unavailable` where library or driver cannot be used.
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
    """Return a placeholder for each accelerator on the PCI bus, for use where neither a library nor torch lists it."""
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
