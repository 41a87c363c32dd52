"""Accelerators on the PCI bus, with or without a driver or a library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from canaryd.worker.telemetry.sysfs import Unreadable, entries, read_count, read_int

ACCELERATORS = {
    0x10DE: ("NVIDIA", (0x0300, 0x0302)),
    0x1002: ("AMD", (0x0302, 0x0380, 0x1200)),
    0x8086: ("Intel", (0x0380,)),
    0x19E5: ("Huawei", (0x1200,)),
}
"""Vendor id → name and the classes (PCI Code and ID Assignment Specification) under which its accelerators appear.

0x0300 is a VGA controller, 0x0302 and 0x0380 are display controllers without one, 0x1200 is a processing accelerator.
AMD's and Intel's VGA controllers are left out, because most are part of a processor. So is Intel's 0x1200, the neural
unit of a client processor, which no backend here drives.
"""
INTEGRATED = (0x8086, "0000:00:02.0")
"""Vendor and place of every graphics unit that is part of an Intel processor, whatever its class."""


@dataclass(frozen=True, kw_only=True)
class PciFunction:
    """One PCI function that is an accelerator or a share of one."""

    bus_id: str
    """Domain, bus, device and function, e.g. "0000:65:00.0"."""
    vendor: str
    """"NVIDIA", "AMD", "Intel" or "Huawei"."""
    device_id: str
    """The vendor's number for the model, four hex digits, e.g. "2335"."""
    driver: str
    """The kernel driver bound to it; "" for none."""
    virtual: bool
    """True for an SR-IOV virtual function."""

    @property
    def passed_through(self) -> bool:
        """Whether it is reserved for a virtual machine, so that no library of this host lists it."""
        return "vfio" in self.driver or self.driver == "pci-stub" or (self.virtual and not self.driver)


def accelerators(sysfs: Path) -> list[PciFunction]:
    """Return the accelerators on the bus in its order; raise `Unreadable` where the kernel lists no PCI functions."""
    found = []
    for function in sorted(entries(sysfs / "bus/pci/devices")):
        try:
            number = read_int(function / "vendor")
            vendor, classes = ACCELERATORS.get(number, ("", ()))
            if read_int(function / "class") >> 8 not in classes or (number, function.name) == INTEGRATED:
                continue
            device_id = f"{read_count(function / 'device'):04x}"
        except Unreadable:
            continue  # it left the bus meanwhile, or it is not a function
        driver = function / "driver"
        found.append(
            PciFunction(
                bus_id=function.name,
                vendor=vendor,
                device_id=device_id,
                driver=driver.resolve().name if driver.is_symlink() else "",
                virtual=(function / "physfn").is_symlink(),
            )
        )
    return found
