"""AMD accelerators: the amdgpu driver's files in sysfs, and amdsmi where ROCm has installed it.

sysfs: the kernel's Documentation/gpu/amdgpu (driver-misc, thermal, ras). amdsmi: the Python reference of AMD SMI 7.0.
Devices are always found through sysfs; a reading of amdsmi replaces the one with the same name and labels. Not used:
`amdsmi_get_pcie_info`, which measures for up to a second, and stored error records (CPER), which outlast the errors.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
        # sysfs takes precedence, so that the texts do not change when the library comes or goes.
        detail = _amdsmi().detail(card.bus_id) if library else {}
        detail |= {"bus_id": card.bus_id, "driver": driver_version(root, card.driver)}
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
    given = list(_amdsmi().readings(bus_id)) if library else []
    yield from given
    keys, names = {reading.key for reading in given}, {reading.name for reading in given}
    for fact in _from_sysfs(root, card):
        if (fact.key not in keys) if isinstance(fact, Reading) else (fact.name not in keys | names):
            yield fact


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
    for name in ("throttle_active", "energy_joules_total"):
        yield Absent(name=name, reason="only amdsmi gives it; it is not installed or does not answer")


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
    yield from _counted(PAGES[page.group(1)] for page in pages if page)


def _counted(pages: Iterable[str]) -> Iterator[Reading]:
    numbers = Counter(pages)
    for status in PAGES.values():
        yield Reading(name="memory_bad_pages", value=numbers[status], unit="1", labels={"status": status})


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
        self.why = ""
        """Why an installed library cannot be used; "" where none is installed."""
        self.handles: dict[str, Any] = {}
        place = _installed()
        if place is None:
            return
        noise = io.StringIO()
        try:
            with contextlib.redirect_stdout(noise):
                self.api = _import(place)
                self.api.amdsmi_init()
                for handle in self.api.amdsmi_get_processor_handles():
                    self.handles[str(self.api.amdsmi_get_gpu_device_bdf(handle)).lower()] = handle
        except Exception as error:  # noqa: BLE001 - KeyError, AttributeError, OSError and its own have all been seen
            text = " ".join((noise.getvalue() or str(error)).split())
            self.api, self.why = None, f"amdsmi cannot be used: {type(error).__name__}: {text[:200]}"

    def detail(self, bus_id: str) -> dict[str, str]:
        """Return identity and versions of a device, as the library gives them, and the library's own version."""
        if self.api is None:
            return {"library": self.why} if self.why else {}
        found = {"library": f"amdsmi {getattr(self.api, '__version__', 'of no version')}"}
        board = self._ask("amdsmi_get_gpu_board_info", bus_id=bus_id)
        wanted = {
            "serial": _at(board, "product_serial"),
            "board_part_number": _at(board, "model_number"),
            "product": _at(board, "product_name"),
            "unique_id": _at(self._ask("amdsmi_get_gpu_asic_info", bus_id=bus_id), "asic_serial"),
        }
        return found | {k: v.strip() for k, v in wanted.items() if isinstance(v, str) and v.strip() not in ("", "N/A")}

    def readings(self, bus_id: str) -> Iterator[Reading]:
        """Yield the readings of the library; other readings come from sysfs."""
        if self.api is None or bus_id not in self.handles:
            return
        ask = partial(self._ask, bus_id=bus_id)
        for block in getattr(self.api, "AmdSmiGpuBlock", ()):
            member = ("AmdSmiGpuBlock", block.name)
            if getattr(ask("amdsmi_get_gpu_ecc_status", member), "name", "") == "ENABLED":  # others answer 0
                counts = ask("amdsmi_get_gpu_ecc_count", member)
                for kind in ("correctable", "uncorrectable", "deferred"):
                    labels = {"kind": kind.replace("able", "ed"), "location": block.name.lower()}
                    yield from _given("ecc_errors_total", "1", counts, f"{kind}_count", 0, 1 << 63, **labels)
        pages = ask("amdsmi_get_gpu_bad_page_info")
        if isinstance(pages, list) and all(_at(page, "status") in (0, 1, 2) for page in pages):
            yield from _counted([*PAGES.values()][int(_at(page, "status"))] for page in pages)
        yield from self._heat(bus_id)
        power = ask("amdsmi_get_power_info")
        each = ("current_socket_power", "average_socket_power")  # one of them, depending on the generation
        yield from [r for key in each for r in _given("power_watts", "watts", power, key, 1, 10_000)][:1]
        caps = ask("amdsmi_get_power_cap_info")
        for limit, prefix in (("enforced", ""), ("default", "default_"), ("min", "min_"), ("max", "max_")):
            key = f"{prefix}power_cap"
            yield from _given("power_limit_watts", "watts", caps, key, 10**6, 4 * 10**9, 1, 10**6, limit=limit)
        energy = ask("amdsmi_get_energy_count")
        if (step := _number(energy, "counter_resolution", 1e-6, 1e6)) is not None:  # microjoules
            key = "energy_accumulator"
            yield from _given("energy_joules_total", "joules", energy, key, 1, 1 << 63, step, 10**6)
        for domain, name in (("graphics", "GFX"), ("memory", "MEM")):
            clock = ask("amdsmi_get_clock_info", ("AmdSmiClkType", name))
            for reading, key in (("clock_hertz", "clk"), ("clock_max_hertz", "max_clk")):
                yield from _given(reading, "hertz", clock, key, 1, 10_000, 10**6, domain=domain)
        use = ask("amdsmi_get_gpu_activity")
        for engine, key in (("gpu", "gfx_activity"), ("memory", "umc_activity")):
            yield from _given("utilization_ratio", "1", use, key, 0, 100, 1, 100, engine=engine)
        memory = ask("amdsmi_get_gpu_vram_usage")
        if total := _number(memory, "vram_total", 1, 1 << 30):  # MiB
            for part in ("total", "used"):
                yield from _given(f"memory_{part}_bytes", "bytes", memory, f"vram_{part}", 0, total, 1 << 20)

    def _heat(self, bus_id: str) -> Iterator[Reading]:
        for sensor, kind in (("edge", "EDGE"), ("junction", "HOTSPOT"), ("mem", "VRAM")):
            for metric, name, label, text in (
                ("CURRENT", "temperature_celsius", "sensor", sensor),
                ("CRITICAL", "temperature_threshold_celsius", "threshold", f"{sensor}_crit"),
            ):
                members = (("AmdSmiTemperatureType", kind), ("AmdSmiTemperatureMetric", metric))
                given = {"it": self._ask("amdsmi_get_temp_metric", *members, bus_id=bus_id)}
                # The reference says millidegrees, AMD's own tool prints degrees: no chip between 0.15 and 150 degrees
                # can be taken for the other.
                yield from _given(name, "celsius", given, "it", 1001, 150_000, 1, 1000, **{label: text})
                yield from _given(name, "celsius", given, "it", 1e-9, 150, **{label: text})
        # Measured over a tenth of a second by the library itself.
        violations = self._ask("amdsmi_get_violation_status", bus_id=bus_id)
        for reason, key in THROTTLED.items():
            active = _at(violations, f"active_{key}")
            if isinstance(active, bool) or active in (0, 1):
                yield Reading(name="throttle_active", value=int(active), unit="1", labels={"reason": reason})

    def _ask(self, function: str, *arguments: tuple[str, str], bus_id: str) -> Any:
        """Return a library function's answer, or None after any failure; `arguments`: pairs (enumeration, member)."""
        try:
            members = [getattr(getattr(self.api, enumeration), member) for enumeration, member in arguments]
            with contextlib.redirect_stdout(io.StringIO()):
                return getattr(self.api, function)(self.handles[bus_id], *members)
        except Exception:  # noqa: BLE001 - not supported, no permission, unknown to this version: sysfs answers instead
            return None


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


def _at(answer: Any, key: str) -> Any:
    return answer.get(key) if isinstance(answer, Mapping) else None


def _number(answer: Any, key: str, least: float, most: float) -> float | None:
    """Return a field within its bounds, or None: the library gives "N/A" or the type's greatest number for no value."""
    value = _at(answer, key)
    return value if type(value) in (int, float) and least <= value <= most else None


def _given(
    name: str,
    unit: str,
    answer: Any,
    key: str,
    least: float,
    most: float,
    times: float = 1,
    by: int = 1,
    /,
    **labels: str,
) -> Iterator[Reading]:
    if (value := _number(answer, key, least, most)) is not None:
        yield Reading(name=name, value=value * times / by if by > 1 else value * times, unit=unit, labels=labels)
