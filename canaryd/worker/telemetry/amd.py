"""AMD accelerators: the amdgpu driver's files in sysfs, and amdsmi where ROCm has installed it.

sysfs: the kernel's Documentation/gpu/amdgpu (driver-misc, thermal, ras). amdsmi: the Python reference of AMD SMI 7.0.
sysfs gives everything but the reasons for throttling and the energy, which amdsmi adds. Stored error records (CPER) are
not read, because they outlast the errors.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from canaryd.facts import Reading
from canaryd.model import Device
from canaryd.probe import Absent
from canaryd.worker.telemetry.drm import Card, cards, driver_version, texts
from canaryd.worker.telemetry.interface import Unavailable
from canaryd.worker.telemetry.sysfs import (
    Unreadable,
    aer,
    attempt,
    entries,
    hwmon,
    line,
    only,
    path_setting,
    pcie,
    percent,
    read_bytes,
    read_count,
    read_text,
)

VENDOR = 0x1002
ACCELERATORS = (0x0380, 0x1200)
"""PCI classes (16 bits) of data-centre devices: 0x0380 "other display controller", 0x1200 "processing accelerator"."""
LEAST_MEMORY = 8 << 30
"""Bytes of its own memory that a GPU must have to count as an accelerator that serves models."""
KINDS = {"ce": "corrected", "ue": "uncorrected", "de": "deferred"}
"""The kernel's abbreviation → kind of error: corrected, uncorrected, or deferred until the memory is read."""
PAGES = {"R": "reserved", "P": "pending", "F": "unreservable"}
THROTTLED = {"prochot": "prochot_thrm", "power": "ppt_pwr", "thermal": "socket_thrm", "vr_thermal": "vr_thrm"}
THROTTLED |= {"memory_thermal": "hbm_thrm"}
"""Reason → amdsmi's word for it."""
FIRMWARE = ("smc", "sos", "mec", "sdma", "vcn", "ta_ras", "ta_xgmi", "asd", "rlc")
"""Names of the firmware parts whose versions are recorded; the driver lists further parts."""


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the accelerators that the amdgpu driver uses, with the serial numbers and versions that it gives."""
    root, library = _settings(settings)
    found = []
    for index, card in enumerate(_accelerators(root)):
        detail = {"bus_id": card.bus_id, "driver": driver_version(root, card.driver)}
        if library and (about := _amdsmi().about):
            detail["library"] = about
        files = {"serial": "serial_number", "vbios": "vbios_version", "board_part_number": "product_number"}
        detail |= texts(card.device, files | {"unique_id": "unique_id", "product": "product_name"})
        detail |= texts(card.device / "fw_version", {f"firmware_{name}": f"{name}_fw_version" for name in FIRMWARE})
        chip = detail.pop("unique_id", "").lower().removeprefix("0x")
        named = re.fullmatch(r"[0-9a-f]{1,16}", chip) is not None and int(chip, 16) != 0
        found.append(
            Device(
                uuid=f"GPU-{chip.zfill(16)}" if named else f"GPU-{card.bus_id}",
                backend="rocm",
                index=index,
                model=detail.pop("product", f"AMD GPU [1002:{card.product:04x}]"),
                weak_identity=not named,
                detail=detail,
            )
        )
    return found


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Reading | Absent]:
    """Yield the readings of the device from driver and library; raise `Unavailable` if the device is missing."""
    root, library = _settings(settings)
    bus_id = device.detail.get("bus_id", "")
    card = next((card for card in _accelerators(root) if card.bus_id == bus_id), None)
    if device.backend != "rocm" or card is None:
        raise Unavailable(f"{device.name}: no AMD accelerator with a driver at PCI address {bus_id or 'unknown'}")
    yield from _from_sysfs(root, card)
    given = list(_amdsmi().readings(bus_id)) if library else []
    yield from given
    for name in {"throttle_active", "energy_joules_total"} - {reading.name for reading in given}:
        yield Absent(name=name, reason="only amdsmi gives it; it is not installed or does not answer")


def close() -> None:
    """Shut amdsmi down, so that its device files are closed."""
    library = _loaded.pop("amdsmi", None)
    if library is not None and library.api is not None:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            library.api.amdsmi_shut_down()


def _settings(settings: Mapping[str, Any]) -> tuple[Path, bool]:
    only(settings, "amd_telemetry", "sysfs", "amdsmi")
    library = settings.get("amdsmi", True)
    if not isinstance(library, bool):
        raise ValueError(f"amdsmi: got {library!r}, wanted true or false")  # noqa: TRY004 - a setting, not a call
    return path_setting(settings, "sysfs", "/sys"), library


def _accelerators(root: Path) -> list[Card]:
    return [card for card in cards(root, VENDOR) if card.driver == "amdgpu" and _serves(card)]


def _serves(card: Card) -> bool:
    """Return whether a card is an accelerator that serves models.

    Its own memory decides, or its PCI class if the memory cannot be read. The class alone is not enough: the second
    display controller of a portable computer is a 0x0380 too.
    """
    try:
        return read_count(card.device / "mem_info_vram_total") >= LEAST_MEMORY
    except Unreadable:
        return card.pci_class >> 8 in ACCELERATORS


def _from_sysfs(root: Path, card: Card) -> Iterator[Reading | Absent]:
    yield from _errors(card)
    yield from _pages(card)
    yield from hwmon(root, f"bus/pci/devices/{card.bus_id}")
    for limit, name in (("enforced", "cap"), ("default", "cap_default"), ("min", "cap_min"), ("max", "cap_max")):
        yield attempt("power_limit_watts", partial(_cap, card, f"power1_{name}"), "watts", limit=limit)
    for domain, name in (("graphics", "pp_dpm_sclk"), ("memory", "pp_dpm_mclk")):
        yield attempt("clock_hertz", partial(_clock, card.device / name, most=False), "hertz", domain=domain)
        yield attempt("clock_max_hertz", partial(_clock, card.device / name, most=True), "hertz", domain=domain)
    for engine, name in (("gpu", "gpu_busy_percent"), ("memory", "mem_busy_percent")):
        yield attempt("utilization_ratio", partial(percent, card.device / name), engine=engine)
    for part in ("total", "used"):
        yield attempt(f"memory_{part}_bytes", partial(read_count, card.device / f"mem_info_vram_{part}"), "bytes")
    yield attempt("pcie_replays_total", partial(read_count, card.device / "pcie_replay_count"))
    yield from pcie(root, card.bus_id)
    yield from aer(root, card.bus_id)


def _errors(card: Card) -> Iterator[Reading | Absent]:
    """Yield the error counts for each block of the chip; the block xgmi_wafl is the links between devices."""
    features = partial(line, card.device / "ras/features", r"\Afeature mask:\s*0x([0-9a-fA-F]{1,16})\b")
    # Bit 0: the error handling of the memory controllers (block 0, umc) is on.
    yield attempt("ecc_enabled", lambda: int(features(), 16) & 1, when="current")
    try:
        files = entries(card.device / "ras", "*_err_count")
    except Unreadable as error:
        yield Absent(name="ecc_errors_total", reason=str(error))
        return
    for file in files:
        location = file.name.removesuffix("_err_count")
        try:
            counts = re.findall(r"^(ue|ce|de)\s*:\s*(\d{1,19})\s*$", read_text(file), re.MULTILINE)
            why = f"{file} holds no count"
        except Unreadable as error:
            counts, why = [], str(error)
        if not counts:
            yield Absent(name=f"ecc_errors_total{{location={location}}}", reason=why)
        for kind, number in dict(counts).items():
            yield attempt("ecc_errors_total", partial(int, number), kind=KINDS[kind], location=location)
    if not files:
        yield Absent(name="ecc_errors_total", reason="the driver counts no errors of this device")


def _pages(card: Card) -> Iterator[Reading | Absent]:
    path = card.device / "ras/gpu_vram_bad_pages"
    try:
        lines = [line for line in read_bytes(path).decode(errors="replace").splitlines() if line.strip()]
    except Unreadable as error:
        yield Absent(name="memory_bad_pages", reason=str(error))
        return
    pages = [re.fullmatch(r"\s*0x[0-9a-fA-F]+\s*:\s*0x[0-9a-fA-F]+\s*:\s*([RPF])\s*", line) for line in lines]
    if not all(pages):
        yield Absent(name="memory_bad_pages", reason=f"{path} has lines that are not bad pages")
        return
    numbers = Counter(page.group(1) for page in pages if page)
    for letter, status in PAGES.items():
        yield Reading(name="memory_bad_pages", value=numbers[letter], unit="1", labels={"status": status})


def _cap(card: Card, name: str) -> float:
    for chip in entries(card.device / "hwmon", "hwmon[0-9]*"):
        if (chip / name).exists():
            return read_count(chip / name) / 1e6
    raise Unreadable("no hwmon chip of the device gives it")


def _clock(path: Path, *, most: bool) -> int:
    """Return hertz from lines such as "1: 2100Mhz *": the one in use (with the star), or with `most` the highest."""
    levels = re.findall(r"^(?:\d+|S):\s*(\d{1,6})\s*[Mm][Hh]z\s*(\*?)\s*$", read_text(path), re.MULTILINE)
    wanted = [int(clock) for clock, star in levels if star or most]
    if not wanted:
        raise Unreadable(f"{path} holds no clock in use")
    return max(wanted) * 10**6


class _Library:
    """The library amdsmi, initialised once per worker; if it cannot be used, it gives no readings."""

    def __init__(self) -> None:
        self.api: ModuleType | None = None
        self.about = ""
        """Its version, or why it cannot be used although it is installed; "" where none is installed."""
        self._handles: dict[str, Any] = {}
        place = _installed()
        if place is None:
            return
        noise = io.StringIO()
        try:
            with contextlib.redirect_stdout(noise):
                self.api = _import(place)
                self.api.amdsmi_init()
                for handle in self.api.amdsmi_get_processor_handles():
                    self._handles[str(self.api.amdsmi_get_gpu_device_bdf(handle)).lower()] = handle
            self.about = f"amdsmi {getattr(self.api, '__version__', 'of no version')}"
        except Exception as error:  # noqa: BLE001 - KeyError, AttributeError, OSError and its own have all been seen
            text = " ".join((noise.getvalue() or str(error)).split())
            self.api, self.about = None, f"amdsmi cannot be used: {type(error).__name__}: {text[:200]}"

    def readings(self, bus_id: str) -> Iterator[Reading]:
        """Yield the reasons for throttling, which the library measures over a tenth of a second, and the energy."""
        violations = self._ask("amdsmi_get_violation_status", bus_id)
        for reason, key in THROTTLED.items():
            active = violations.get(f"active_{key}")
            if isinstance(active, bool) or active in (0, 1):
                yield Reading(name="throttle_active", value=int(active), unit="1", labels={"reason": reason})
        energy = self._ask("amdsmi_get_energy_count", bus_id)
        count, step = energy.get("energy_accumulator"), energy.get("counter_resolution")  # of microjoules
        # The library gives "N/A" or the type's greatest number where there is no value.
        if type(count) is int and 0 < count < 1 << 63 and isinstance(step, float) and 1e-6 <= step <= 1e6:
            yield Reading(name="energy_joules_total", value=count * step / 10**6, unit="joules")

    def _ask(self, function: str, bus_id: str) -> Mapping[str, Any]:
        """Return a library function's answer about a device, or {} after any failure."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                answer = getattr(self.api, function)(self._handles[bus_id])
        except Exception:  # noqa: BLE001 - not supported, no permission, unknown to this version
            return {}
        return answer if isinstance(answer, Mapping) else {}


_loaded: dict[str, _Library] = {}


def _amdsmi() -> _Library:
    if "amdsmi" not in _loaded:
        _loaded["amdsmi"] = _Library()
    return _loaded["amdsmi"]


def _installed() -> Path | None:
    """Return ROCm's directory, or None if it has no C library: then the Python package cannot be imported."""
    roots = [os.environ.get("ROCM_HOME", ""), os.environ.get("ROCM_PATH", ""), "/opt/rocm"]
    for root in filter(None, roots):
        if (Path(root) / "lib/libamd_smi.so").exists():
            return Path(root)
    return None


def _import(rocm: Path) -> ModuleType:
    """Import the Python package that ROCm ships with its library; other packages can be of another version."""
    shipped = str(rocm / "share/amd_smi")
    sys.path.insert(0, shipped)
    try:
        return importlib.import_module("amdsmi")
    finally:
        sys.path.remove(shipped)
