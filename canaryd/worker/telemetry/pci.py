"""Accelerators on the PCI bus, with or without a driver or a library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from canaryd.worker.telemetry.sysfs import Unreadable, entries, optional_entries, read_count, read_int

NVIDIA, AMD = 0x10DE, 0x1002
ACCELERATORS = {
    NVIDIA: ("NVIDIA", "cuda", (0x0300, 0x0302)),
    AMD: ("AMD", "rocm", (0x0302, 0x0380, 0x1200)),
    0x8086: ("Intel", "xpu", (0x0380,)),
    0x19E5: ("Huawei", "npu", (0x1200,)),
}
"""Vendor id → name, backend and classes (PCI Code and ID Assignment Specification) of its accelerators.

0x0300 is a VGA controller, 0x0302 and 0x0380 are display controllers without one, 0x1200 is a processing accelerator.
AMD's and Intel's VGA controllers are left out, because most are part of a processor. So is Intel's 0x1200, the neural
unit of a client processor, which no backend here drives.
"""
GRAPHICS, PROCESSING = 0x03, 0x12
"""PCI base classes of graphics units (3) and of processing accelerators (18)."""
PORT = 0x0604
"""PCI class of a bridge to further functions, such as a port of PCI Express."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
INTEGRATED = (0x8086, "0000:00:02.0")
"""PCI vendor and address of the graphics unit inside an Intel processor; its PCI class does not matter."""


@dataclass(frozen=True, kw_only=True)
class PciFunction:
    """One PCI function that is an accelerator, or a virtual share of one."""

    bus_id: str
    """Domain, bus, device and function, e.g. "0000:65:00.0"."""
    vendor: str
    """"NVIDIA", "AMD", "Intel" or "Huawei"."""
    backend: str
    device_id: str
    """The vendor's number for the model, four hex digits, e.g. "2335"."""
    driver: str
    """The kernel driver bound to the function, or "" if there is none."""
    virtual: bool
    """True for an SR-IOV virtual function."""

    @property
    def passed_through(self) -> bool:
        """Whether the function is reserved for a virtual machine. No library of this host lists it then."""
        return "vfio" in self.driver or self.driver == "pci-stub" or (self.virtual and not self.driver)


def accelerators(sysfs: Path) -> list[PciFunction]:
    """Return the accelerators in the order of the PCI bus; raise `Unreadable` if the kernel lists no PCI functions."""
    found = []
    for function in sorted(entries(sysfs / "bus/pci/devices")):
        try:
            number = read_int(function / "vendor")
            vendor, backend, classes = ACCELERATORS.get(number, ("", "", ()))
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
                backend=backend,
                device_id=device_id,
                driver=driver.resolve().name if driver.is_symlink() else "",
                virtual=(function / "physfn").is_symlink(),
            )
        )
    return found


def only_one(sysfs: Path, vendor: int) -> str:
    """Return the address of a vendor's only graphics unit or accelerator, driven or not; "" for none or for several."""
    functions = optional_entries(sysfs / "bus/pci/devices", "*")
    found = [f.name for f in functions if _class(f, vendor) >> 8 in (GRAPHICS, PROCESSING)]
    return found[0] if len(found) == 1 else ""


def below(sysfs: Path, port: str) -> list[str]:
    """Return the addresses of functions behind a PCI port, without ports and virtual functions; [] for a non-port."""
    found, waiting = [], [sysfs / "bus/pci/devices" / port] if port else []
    while waiting:
        for function in optional_entries(waiting.pop(), "*:*:*.*"):
            if not _ADDRESS.fullmatch(function.name) or (function / "physfn").is_symlink():
                continue
            if _class(function) == PORT:
                waiting.append(function)
            else:
                found.append(function.name)
    return sorted(found)


def _class(function: Path, vendor: int = 0) -> int:
    """Return the PCI class of a function, or 0 if the function has another vendor or has left the bus."""
    try:
        return read_int(function / "class") >> 8 if vendor in (0, read_int(function / "vendor")) else 0
    except Unreadable:
        return 0
