"""Intel discrete GPUs: the files of the xe and i915 drivers in sysfs.

The files are those of the kernel's documentation: Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and
-i915-hwmon, Documentation/gpu/xe/xe_gt_freq.rst, and drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.model import Device
from canaryd.probe import Absent
from canaryd.worker.telemetry.drm import Card, cards, driver_version
from canaryd.worker.telemetry.interface import Unavailable
from canaryd.worker.telemetry.pci import INTEGRATED
from canaryd.worker.telemetry.sysfs import (
    Fact,
    Unreadable,
    aer,
    attempt,
    hwmon,
    only,
    optional_entries,
    path_setting,
    pcie,
    read_count,
)

VENDOR = 0x8086
DRIVERS = ("xe", "i915")
THROTTLE = ("pl1", "pl2", "pl4", "thermal", "prochot", "ratl", "vr_thermalert", "vr_tdc")
"""Reasons for throttling that both drivers report."""


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return Intel's discrete GPUs. The driver gives no serial number: a GPU is identified, weakly, by its slot."""
    root = _root(settings)
    return [
        Device(
            uuid=f"XPU-{card.bus_id}",
            backend="xpu",
            index=index,
            model=f"Intel GPU [8086:{card.product:04x}]",
            weak_identity=True,
            detail={"bus_id": card.bus_id, "driver": driver_version(root, card.driver)},
        )
        for index, card in enumerate(_discrete(root))
    ]


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the driver's readings of the GPU; raise `Unavailable` if the GPU is missing."""
    root = _root(settings)
    bus_id = device.detail.get("bus_id", "")
    card = next((card for card in _discrete(root) if card.bus_id == bus_id), None)
    if device.backend != "xpu" or card is None:
        raise Unavailable(f"{device.name}: no discrete Intel GPU with a driver at PCI address {bus_id or 'unknown'}")
    yield from hwmon(root, f"bus/pci/devices/{card.bus_id}")
    yield from _power(card)
    units = _units(card)
    for domain, actual, most, _ in units:
        for name, file in (("clock_hertz", actual), ("clock_max_hertz", most)):  # a sleeping unit really runs at 0
            yield attempt(name, lambda: read_count(file) * 10**6, "hertz", domain=domain)  # noqa: B023 - called at once
    if not units:
        for name in ("clock_hertz", "clock_max_hertz"):
            yield Absent(name=name, reason="the driver lists no graphics unit of the device")
    for reason in THROTTLE:
        files = [Path(prefix + reason) for _, _, _, prefix in units]
        yield attempt("throttle_active", partial(_throttled, files), reason=reason)
    yield attempt("memory_total_bytes", partial(_memory, card), "bytes")
    yield from pcie(root, card.bus_id)
    yield from aer(root, card.bus_id)
    yield Absent(name="ecc_errors_total", reason="the xe and i915 drivers give no memory error counts in sysfs")


def _root(settings: Mapping[str, Any]) -> Path:
    only(settings, "intel_telemetry", "sysfs")
    return path_setting(settings, "sysfs", "/sys")


def _discrete(root: Path) -> list[Card]:
    return [card for card in cards(root, VENDOR) if card.driver in DRIVERS and (VENDOR, card.bus_id) != INTEGRATED]


def _units(card: Card) -> list[tuple[str, Path, Path, str]]:
    """Return (name, file of the present clock, file of the highest clock, prefix of throttle files) of each unit."""
    found = []
    for tile in optional_entries(card.device, "tile[0-9]*"):  # xe
        for unit in optional_entries(tile, "gt[0-9]*"):
            clocks = unit / "freq0"
            name = f"{tile.name}/{unit.name}"
            found.append((name, clocks / "act_freq", clocks / "rp0_freq", f"{clocks}/throttle/reason_"))
    for unit in optional_entries(card.path / "gt", "gt[0-9]*"):  # i915
        prefix = f"{unit}/throttle_reason_"
        found.append((unit.name, unit / "rps_act_freq_mhz", unit / "rps_RP0_freq_mhz", prefix))
    return found


def _throttled(files: list[Path]) -> int:
    """Return 1 if one of these files (one per unit) says that the unit is throttled, else 0; some can be missing."""
    flags, failure = [], Unreadable("the driver gives no reasons for lower clocks")
    for file in files:
        try:
            flags.append(read_count(file))
        except Unreadable as error:
            failure = error
    if not flags:
        raise failure
    if max(flags) > 1:
        raise Unreadable(f"the driver gives {max(flags)} for a flag")
    return max(flags)


def _power(card: Card) -> Iterator[Fact]:
    """Yield energy and power limits of the card (channel 1), or of the package (channel 2) if channel 1 has none."""
    chips = optional_entries(card.device / "hwmon", "hwmon[0-9]*")
    yield attempt("energy_joules_total", partial(_channel, chips, "energy", "_input"), "joules")
    yield attempt("power_limit_watts", partial(_channel, chips, "power", "_max"), "watts", limit="enforced")
    yield attempt("power_limit_watts", partial(_channel, chips, "power", "_rated_max"), "watts", limit="default")


def _channel(chips: list[Path], kind: str, suffix: str) -> float:
    """Return the first channel's value that exists, converted from millionths; raise `Unreadable` for a limit of 0."""
    failure = Unreadable("no hwmon chip of the device gives it")
    for chip in chips:
        for channel in (1, 2):
            try:
                value = read_count(chip / f"{kind}{channel}{suffix}")
            except Unreadable as error:
                failure = error
                continue
            if kind == "power" and value == 0:
                raise Unreadable("the power limit is disabled")
            return value / 1e6
    raise failure


def _memory(card: Card) -> int:
    tiles = optional_entries(card.device, "tile[0-9]*")
    if not tiles:
        raise Unreadable(f"the {card.driver} driver does not give the size of the memory")
    return sum(read_count(tile / "physical_vram_size_bytes") for tile in tiles)
