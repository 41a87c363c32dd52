"""Graphics cards of AMD and Intel, from the list of the kernel's DRM (direct rendering manager)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from canaryd.facts import printable
from canaryd.worker.telemetry.sysfs import Unreadable, optional_entries, read_count, read_int, read_text


@dataclass(frozen=True, kw_only=True)
class Card:
    """One PCI function with a DRM driver."""

    path: Path
    """The card's class directory, e.g. /sys/class/drm/card1."""
    bus_id: str
    driver: str
    pci_class: int
    """PCI class, 24 bits: 0x030000 VGA, 0x038000 other display, 0x120000 processing accelerator."""
    product: int
    """The PCI device id."""

    @property
    def device(self) -> Path:
        """Directory of the PCI function."""
        return self.path / "device"


def cards(root: Path, vendor: int) -> list[Card]:
    """Return the cards of a PCI vendor below `root` (/sys), in order of their numbers."""
    found = []
    for path in optional_entries(root / "class/drm", "card[0-9]*"):  # a kernel without DRM has no such directory
        if not re.fullmatch(r"card\d+", path.name):
            continue  # card0-DP-1 is a connector
        try:
            event = dict(re.findall(r"^([A-Z_]+)=(.*)$", read_text(path / "device/uevent"), re.MULTILINE))
            card = Card(
                path=path,
                bus_id=event.get("PCI_SLOT_NAME", "").lower(),
                driver=event.get("DRIVER", ""),
                pci_class=read_int(path / "device/class"),
                product=read_count(path / "device/device"),
            )
            ours = read_int(path / "device/vendor") == vendor
        except Unreadable:
            continue  # not a PCI function: a display of the board, or a virtual one
        if ours and re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", card.bus_id):
            found.append(card)
    return found


def driver_version(root: Path, driver: str) -> str:
    """Return a driver's own version, or the kernel's version if the driver is part of the kernel."""
    own = texts(root / "module" / driver, {"version": "version"})
    return f"{driver} {own['version']}" if own else f"{driver} of kernel {os.uname().release}"


def texts(directory: Path, names: Mapping[str, str]) -> dict[str, str]:
    """Return key → text for those one-line files of a directory that can be read; `names` maps key → file name."""
    found = {}
    for key, name in names.items():
        try:
            found[key] = printable(" ".join(read_text(directory / name).split()))[:200]
        except Unreadable:
            continue
    return found
