"""NVIDIA accelerators through NVML and the `nvidia-ml-py` package; docs/nvidia.md says which call gives what.

Names, numbers and units are those of nvml.h (CUDA 13.3). Field numbers are written out, because a package and a driver
of different age must still understand each other.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import byref
from functools import partial
from types import ModuleType
from typing import Any

from canaryd.model import Device, Reading, reading_key
from canaryd.probe import Absent
from canaryd.worker.sysfs import aer, path_setting
from canaryd.worker.vendors import NotHere, Unavailable

Fact = Reading | Absent
Ask = Callable[[], Any]
"""Returns a value or raises `Missing`."""
Check = Callable[[Any], Any]
"""Turns a raw value into base units; raises `Missing` for a value by which the driver says that it has none."""


class Missing(Exception):
    """One thing could not be read; the argument is the reason that people will read, `code` is NVML's."""

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(reason)
        self.code = code


NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST = 3, 6, 13, 15
"""The nvmlReturn_t values that decide what is asked next."""
LOST = (
    "GPU is lost: it no longer answers on its bus. Drain the node and reboot it; if it stays away, see to its seating"
)
OLD_PACKAGE = "this version of nvidia-ml-py does not know this call"
INVALID = "the driver gave no valid value"
REASONS = {
    NOT_SUPPORTED: "not supported by this device",
    4: "permission denied: run as root",
    10: "the driver did not answer in time",
    FUNCTION_NOT_FOUND: "the driver does not know this call",
    14: "the device's InfoROM is corrupted",
    16: "the device must be reset before this can be read",
    999: "the driver reports an unknown error (999)",
}
"""nvmlReturn_t of one call → why there is no reading."""
NO_LIBRARY = "libnvidia-ml.so.1 is not here: no NVIDIA driver is installed"
NO_START = {
    4: "no permission to use the NVIDIA driver: run as root, or give this user access to /dev/nvidia*",
    9: "the NVIDIA driver is not loaded: load its kernel module (modprobe nvidia)",
    12: NO_LIBRARY,
    18: "the driver was upgraded but the old kernel module is still loaded: reboot or reload it",
}
"""nvmlReturn_t of nvmlInit → why nothing can be asked."""
ARCHITECTURES: tuple[str, ...] = (
    *(
        "",
        "",
        "kepler",
        "maxwell",
        "pascal",
        "volta",
        "turing",
        "ampere",
        "ada",
        "hopper",
        "blackwell",
        "",
        "",
        "rubin",
    ),
)
"""nvmlDeviceArchitecture_t."""
KINDS = ("corrected", "uncorrected")
"""nvmlMemoryErrorType_t."""
CACHES = {"l1": 0, "l2": 1, "register_file": 3, "texture": 4, "texture_shm": 5, "cbu": 6}
"""nvmlMemoryLocation_t of what is told apart before Turing only; later devices sum it up as `SRAM`."""
DRAM, SRAM = 2, 7
UNITS = {"l2": "L2", "sm": "Sm", "pcie": "Pcie", "mcu": "Mcu", "other": "Other"}
BANKS = ("max", "high", "partial", "low", "none")
THRESHOLDS = ("shutdown", "slowdown", "memory_max", "gpu_max", "acoustic_min", "acoustic_current", "acoustic_max")
"""nvmlTemperatureThresholds_t."""
MARGINS = {"shutdown": 193, "slowdown": 194, "memory_max": 195, "gpu_max": 196}
"""NVML_FI_DEV_TEMPERATURE_*_TLIMIT: from Ada on, thresholds as margins."""
THROTTLES = (
    *("gpu_idle", "applications_clocks", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal"),
    *("hw_power_brake", "display_clocks", "board_limit", "reliability"),
)
"""nvmlClocksEventReason*, from bit 0 up."""
THROTTLED = {"sw_power_cap": 74, "sw_thermal": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""NVML_FI_DEV_PERF_POLICY_*: nanoseconds in which a reason held the clocks down."""
HARDWARE_THROTTLED = ("hw_thermal", "hw_power_brake")
CLOCKS = ("graphics", "sm", "memory", "video")
"""nvmlClockType_t."""
LINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
"""nvmlNvLinkErrorCounter_t, up to Hopper."""
LINK_FIELDS = {"malformed": 206, "overrun": 207, "receive": 208, "integrity": 211, "discard": 212}
LINK_FIELDS |= {"recovery_failed": 214, "recovery": 215, "effective": 219}
"""NVML_FI_DEV_NVLINK_COUNT_*, from Blackwell on; symbol errors are left out: coding repairs them all the time."""
COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")
RECOVERIES = (
    *("none", "reset", "reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain", "bus_reset", "system_reboot"),
)
"""nvmlDeviceGpuRecoveryAction_t."""
RETIRED, LINKS, MEMORY_TEMPERATURE, RECOVERY = {"single_bit": 29, "double_bit": 30, "pending": 31}, 91, 82, 230
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""nvmlValueType_t → the member of nvmlValue_t."""
LEAST_MARGIN, HOTTEST = -100, 300
"""Degrees from which on a value is a sentinel (ours). NVML has been seen to say -256, 4294967040, and 0 for memory."""

_nvml: ModuleType | None = None
_problems: list[str] = []


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs and their MIG instances, with identity and versions; raise `Unavailable` where NVML cannot start.

    A GPU that does not answer is left out; `problems` then says which and why.
    """
    _settings(settings)
    nvml = _library()
    _problems.clear()
    found = []
    for index in range(_how_many(nvml)):
        try:
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            gpu = _gpu(nvml, handle, index)
            found += [gpu, *_instances(nvml, handle, gpu)]
        except (Missing, Unavailable) as error:
            _problems.append(f"GPU {index} of NVML could not be identified: {error}")
    return found


def problems() -> list[str]:
    """Return one sentence for each GPU that the last `devices` counted but could not identify."""
    return list(_problems)


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Reading | Absent]:
    """Yield what a GPU or a MIG instance says about itself; raise `Unavailable` where it or NVML cannot be asked."""
    root = _settings(settings)
    nvml = _library()
    handle = _handle(nvml, device)
    if device.parent:
        yield from _use(nvml, handle)
        yield from (f for f in _errors(nvml, handle, "ecc_errors_total", 0) if isinstance(f, Reading))
        return
    groups = (_ecc, _rows, _heat, _power, _throttle, _clocks, _pcie, _state, _use, _fields)
    for group in groups:
        yield from _merged(group(nvml, handle))
    if bus_id := device.detail.get("bus_id"):
        yield from aer(root, bus_id)


def close() -> None:
    """Let go of the driver. A GPU without persistence is reset by this when nobody else holds it."""
    global _nvml
    if _nvml is not None:
        nvml, _nvml = _nvml, None
        with contextlib.suppress(Exception):  # there is nothing left to let go of
            nvml.nvmlShutdown()


def _settings(settings: Mapping[str, Any]) -> Any:
    for name in settings:
        if name != "sysfs":
            raise ValueError(f"{name}: is no setting of nvidia_telemetry; it has: sysfs")
    return path_setting(settings, "sysfs", "/sys")


# --- Calls ------------------------------------------------------------------------------------------------------------


def _library() -> ModuleType:
    """Return pynvml with NVML started; raise `Unavailable`."""
    global _nvml  # noqa: PLW0603 - the library's own state is global too
    if _nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except Exception as error:
            text = f"nvidia-ml-py cannot be imported ({type(error).__name__}: {error}): install it beside canaryd"
            raise Unavailable(text) from error
        try:
            nvml.nvmlInit()
        except Exception as error:
            code = getattr(error, "value", 0)
            kind = NotHere if code in (9, 12) else Unavailable  # images carry the library to machines without a GPU
            raise kind(NO_START.get(code) or f"NVML does not start: {_said(error)}") from error
        _nvml = nvml
    return _nvml


def _ask(nvml: ModuleType, name: str, *arguments: Any) -> Any:
    """Return what one call returns; raise `Missing` with the reason, or `Unavailable` where the GPU is lost."""
    call = getattr(nvml, name, None)
    if call is None:
        raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
    try:
        return call(*arguments)
    except Exception as error:
        # pynvml answers a missing function in two ways: as an error code, and as NVMLLibraryMismatchError.
        code = getattr(error, "value", FUNCTION_NOT_FOUND if "Mismatch" in type(error).__name__ else 0)
        if code == GPU_IS_LOST:
            raise Unavailable(LOST) from error
        raise Missing(REASONS.get(code, f"NVML: {_said(error)}"), code) from error


def _first(nvml: ModuleType, names: Iterable[str], *arguments: Any) -> Any:
    """Return the answer of the first call that package and driver both know; the newest name comes first."""
    missing = Missing(OLD_PACKAGE)
    for name in names:
        try:
            return _ask(nvml, name, *arguments)
        except Missing as error:
            missing = error
            if error.code != FUNCTION_NOT_FOUND:
                break
    raise missing


def _said(error: Exception) -> str:
    code = getattr(error, "value", None)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if code is None else f"{text} ({code})"


def _how_many(nvml: ModuleType) -> int:
    try:
        return _count(_ask(nvml, "nvmlDeviceGetCount"))
    except Missing as error:
        raise Unavailable(f"the driver does not count its GPUs: {error}") from error


def _handle(nvml: ModuleType, device: Device) -> Any:
    """Return the handle of a GPU or a MIG instance; raise `Unavailable` where it does not answer or is gone."""
    handle = _gpu_handle(nvml, device.parent or device.uuid, device.detail.get("bus_id", ""))
    if not device.parent:
        return handle
    for _, instance in _instance_handles(nvml, handle):
        if _text(nvml, "nvmlDeviceGetUUID", instance) == device.uuid:
            return instance
    raise Unavailable(f"MIG instance {device.uuid} is no longer there: its GPU was divided anew")


def _gpu_handle(nvml: ModuleType, uuid: str, bus_id: str) -> Any:
    """Look where the GPU was, then everywhere. A search by UUID fails for every GPU when one is lost (nvml.h)."""
    if bus_id:
        try:
            handle = _ask(nvml, "nvmlDeviceGetHandleByPciBusId", bus_id)
            if _ask(nvml, "nvmlDeviceGetUUID", handle) == uuid:
                return handle
        except Missing as error:
            if error.code != NOT_FOUND:
                raise Unavailable(f"the GPU at {bus_id} does not answer: {error}") from error
    silent: dict[str, None] = {}
    for index in range(_how_many(nvml)):
        try:
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            if _ask(nvml, "nvmlDeviceGetUUID", handle) == uuid:
                return handle
        except (Missing, Unavailable) as error:
            silent[str(error)] = None
    if silent:
        raise Unavailable(f"GPU {uuid} is not among those that answer; of others the driver says: {'; '.join(silent)}")
    raise Unavailable(f"GPU {uuid} is no longer there: the driver does not list it")


# --- Identity ---------------------------------------------------------------------------------------------------------


def _gpu(nvml: ModuleType, handle: Any, index: int) -> Device:
    uuid = _ask(nvml, "nvmlDeviceGetUUID", handle)
    detail = {
        "serial": _text(nvml, "nvmlDeviceGetSerial", handle),
        "board_part_number": _text(nvml, "nvmlDeviceGetBoardPartNumber", handle),
        "bus_id": _known(partial(_value, nvml, _bus_id, "nvmlDeviceGetPciInfo", handle)),
        "driver": _text(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": _known(partial(_value, nvml, _cuda, "nvmlSystemGetCudaDriverVersion")),
        "vbios": _text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "inforom": _text(nvml, "nvmlDeviceGetInforomImageVersion", handle),
        "inforom_ecc": _text(nvml, "nvmlDeviceGetInforomVersion", handle, 1),
        "inforom_power": _text(nvml, "nvmlDeviceGetInforomVersion", handle, 2),
        "gsp_firmware": _text(nvml, "nvmlDeviceGetGspFirmwareVersion", handle),
        "memory_bytes": _known(partial(_part, partial(_ask, nvml, "nvmlDeviceGetMemoryInfo", handle), _count, "total")),
        "architecture": _known(
            partial(_value, nvml, partial(_word, ARCHITECTURES), "nvmlDeviceGetArchitecture", handle)
        ),
        "capability": _known(partial(_value, nvml, _capability, "nvmlDeviceGetCudaComputeCapability", handle)),
        "pcie_generation_max": _known(partial(_value, nvml, _count, "nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        "pcie_width_max": _known(partial(_value, nvml, _count, "nvmlDeviceGetMaxPcieLinkWidth", handle)),
        "nvlinks": _known(partial(_field, partial(_batch, nvml, handle, [(LINKS, 0)]), _count, LINKS)),
        "board_id": _known(partial(_value, nvml, _hexadecimal, "nvmlDeviceGetBoardId", handle)),
        "module_id": _known(partial(_value, nvml, _count, "nvmlDeviceGetModuleId", handle)),
    }
    return Device(
        uuid=uuid,
        backend="cuda",
        index=index,
        model=_text(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        detail={k: v for k, v in detail.items() if v},
    )


SHARED = (
    *("serial", "board_part_number", "bus_id", "driver", "cuda", "vbios", "inforom", "gsp_firmware", "architecture"),
    "capability",
)
"""What a MIG instance has from its GPU."""


def _instances(nvml: ModuleType, handle: Any, gpu: Device) -> Iterator[Device]:
    """Yield the MIG instances of a GPU; where they cannot be listed, that is one of the problems."""
    for number, instance in _instance_handles(nvml, handle):
        uuid = _text(nvml, "nvmlDeviceGetUUID", instance)
        if not uuid:
            _problems.append(f"MIG instance {number} of GPU {gpu.index} could not be identified: it has no UUID")
            continue
        model = _text(nvml, "nvmlDeviceGetName", instance)
        attributes = partial(_ask, nvml, "nvmlDeviceGetAttributes", instance)
        detail = {
            "instance": str(number),
            "profile": model.partition(" MIG ")[2],
            "gpu_instance_id": _known(partial(_value, nvml, _count, "nvmlDeviceGetGpuInstanceId", instance)),
            "compute_instance_id": _known(partial(_value, nvml, _count, "nvmlDeviceGetComputeInstanceId", instance)),
            "memory_bytes": _known(
                partial(_part, partial(_ask, nvml, "nvmlDeviceGetMemoryInfo", instance), _count, "total")
            ),
            "multiprocessors": _known(partial(_part, attributes, _count, "multiprocessorCount")),
        }
        detail |= {name: gpu.detail.get(name, "") for name in SHARED}
        yield Device(
            uuid=uuid,
            backend="cuda",
            index=gpu.index,
            model=model or f"{gpu.model} MIG",
            parent=gpu.uuid,
            detail={k: v for k, v in detail.items() if v},
        )


def _instance_handles(nvml: ModuleType, handle: Any) -> Iterator[tuple[int, Any]]:
    """Yield the handles of MIG instances with their numbers; nothing where the GPU is not divided."""
    try:
        divided = _ask(nvml, "nvmlDeviceGetMigMode", handle)[0] == 1
        places = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) if divided else 0
    except Missing:
        return
    for number in range(places):
        try:
            yield number, _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
        except Missing:
            continue  # an empty place


def _text(nvml: ModuleType, name: str, *arguments: Any) -> str:
    """Return a text that NVML gives, "" where it gives none."""
    try:
        given = _ask(nvml, name, *arguments)
    except Missing:
        return ""
    text = (given.decode(errors="replace") if isinstance(given, bytes) else str(given)).strip()
    return "" if text.upper() in ("N/A", "[N/A]", "UNKNOWN", "0") else text


def _known(ask: Ask) -> str:
    """Return a value as text, "" where it could not be read."""
    try:
        return str(ask())
    except Missing:
        return ""


def _bus_id(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _capability(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _hexadecimal(raw: Any) -> str:
    return f"{_count(raw):#x}"


def _cuda(version: int) -> str:
    """Write 12040 as "12.4" (CUDA_VERSION: 1000 major + 10 minor)."""
    return f"{version // 1000}.{version % 1000 // 10}"


# --- Values -----------------------------------------------------------------------------------------------------------


def _count(raw: Any) -> int:
    """Return a number that cannot be negative; raise `Missing` for the values by which NVML and DCGM say "none"."""
    value = int(raw)
    if value < 0 or value == 0xFFFFFFFF or 0x7FFFFFF0 <= value <= 0x7FFFFFFF or value >= 0x7FFFFFFFFFFFFFF0:
        raise Missing(INVALID)
    return value


def _thousandth(raw: Any) -> float:
    """Milliwatts to watts, millijoules to joules."""
    return _count(raw) / 1000


def _seconds(raw: Any) -> float:
    """Nanoseconds to seconds."""
    return _count(raw) / 1_000_000_000


def _hertz(raw: Any) -> int:
    """Megahertz to hertz."""
    return _count(raw) * 1_000_000


def _fan(raw: Any) -> float:
    """Per cent of the fan's nominal top speed, which it may exceed, to a ratio."""
    return _count(raw) / 100


def _share(raw: Any) -> float:
    """Per cent of time to a ratio."""
    if not 0 <= int(raw) <= 100:
        raise Missing(INVALID)
    return int(raw) / 100


def _degrees(raw: Any) -> int:
    """Return a temperature in use; raise `Missing` where it is none."""
    value = int(raw)
    if not 0 < value < HOTTEST:
        raise Missing(INVALID)
    return value


def _margin(raw: Any) -> int:
    """Return degrees up to a limit, negative past it; they may arrive as an unsigned number."""
    value = int(raw)
    value -= 1 << 32 if value > 0x7FFFFFFF else 0
    if not LEAST_MARGIN < value < HOTTEST:
        raise Missing(INVALID)
    return value


def _flag(raw: Any) -> int:
    if int(raw) not in (0, 1):
        raise Missing(f"the driver gave {int(raw)}, wanted 0 or 1")
    return int(raw)


def _up(raw: Any) -> int:
    return int(raw != 0)  # NVML_FEATURE_DISABLED is 0


def _performance(raw: Any) -> int:
    if not 0 <= int(raw) <= 15:  # NVML_PSTATE_UNKNOWN is 32
        raise Missing("the driver does not know the state")
    return int(raw)


def _word(words: tuple[str, ...], raw: Any) -> str:
    """Return the name of an enumeration's value, "unknown(N)" for one that came later."""
    value = _count(raw)
    return (words[value] if value < len(words) else "") or f"unknown({value})"


def _value(nvml: ModuleType, check: Check, name: str, *arguments: Any) -> Any:
    """Return what one call gives, checked and in base units."""
    return check(_ask(nvml, name, *arguments))


def _once(ask: Ask) -> Ask:
    """Ask once for what serves several readings; where that failed, each of them is told so."""
    try:
        given, missing = ask(), None
    except Missing as error:
        given, missing = None, error

    def again() -> Any:
        if missing:
            raise missing
        return given

    return again


def _part(ask: Ask, check: Check, which: int | str) -> Any:
    """Return one item or member of what a call gives, checked and in base units."""
    given = ask()
    return check(given[which] if isinstance(which, int) else getattr(given, which))


def _fact(name: str, ask: Ask, unit: str = "1", /, **labels: str) -> Fact:
    """Return one reading, or why it is absent."""
    try:
        return Reading(name=name, value=ask(), unit=unit, labels=labels)
    except Missing as error:
        return Absent(name=reading_key(name, labels), reason=str(error))


def _worded(name: str, label: str, words: tuple[str, ...], ask: Ask) -> Fact:
    """Return the reading 1 with the word as its label."""
    try:
        return Reading(name=name, value=1, unit="1", labels={label: _word(words, ask())})
    except Missing as error:
        return Absent(name=name, reason=str(error))


def _any(facts: list[Fact]) -> bool:
    return any(isinstance(f, Reading) for f in facts)


def _merged(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield facts; where all of one name are absent for one reason, that is one absence of the name."""
    grouped: dict[str, list[Fact]] = {}
    for fact in facts:
        grouped.setdefault(fact.name.partition("{")[0], []).append(fact)
    for name, group in grouped.items():
        reasons = {f.reason if isinstance(f, Absent) else "" for f in group}
        if len(group) > 1 and len(reasons) == 1 and (reason := reasons.pop()):
            yield Absent(name=name, reason=reason)
        else:
            yield from group


# --- Groups of readings -----------------------------------------------------------------------------------------------


def _ecc(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    modes = _once(partial(_ask, nvml, "nvmlDeviceGetEccMode", handle))
    yield _fact("ecc_enabled", partial(_part, modes, _flag, 0), when="current")
    yield _fact("ecc_enabled", partial(_part, modes, _flag, 1), when="pending")
    try:
        off = modes()[0] == 0
    except Missing:
        off = False
    for name, counter in (("ecc_errors_total", 0), ("ecc_aggregate_errors_total", 1)):
        facts = list(_errors(nvml, handle, name, counter))
        yield from (Absent(name=f.name, reason="error correction is off") for f in facts) if off else facts
    yield from _sram(nvml, handle)


def _errors(nvml: ModuleType, handle: Any, name: str, counter: int) -> list[Fact]:
    """Return errors by location: memory and SRAM, or memory and each cache, or the sum of all; never two of these."""

    def at(locations: Mapping[str, int]) -> list[Fact]:
        call = partial(_value, nvml, _count, "nvmlDeviceGetMemoryErrorCounter", handle)
        return [
            _fact(name, partial(call, number, counter, code), kind=kind, location=location)
            for location, code in locations.items()
            for number, kind in enumerate(KINDS)
        ]

    inside = at({"sram": SRAM})
    if all(isinstance(f, Absent) and f.reason == REASONS[NOT_SUPPORTED] for f in inside):
        inside = [f for f in at(CACHES) if isinstance(f, Reading)] or inside
    facts = at({"dram": DRAM}) + inside
    if _any(facts):
        return facts
    call = partial(_value, nvml, _count, "nvmlDeviceGetTotalEccErrors", handle)
    total = [_fact(name, partial(call, n, counter), kind=kind, location="all") for n, kind in enumerate(KINDS)]
    return total if _any(total) else facts


def _sram(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    """Yield what only root is told of SRAM: the threshold, how errors were detected and in which unit."""

    def ask() -> Any:
        if not hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
            raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        _ask(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
        return status

    status = _once(ask)
    yield _fact("ecc_sram_threshold_exceeded", partial(_part, status, _flag, "bThresholdExceeded"))
    for detection, end in (("parity", "UncParity"), ("sec_ded", "UncSecDed")):
        count = partial(_part, status, _count, f"volatile{end}")
        yield _fact("ecc_sram_uncorrected_total", count, detection=detection)
        count = partial(_part, status, _count, f"aggregate{end}")
        yield _fact("ecc_sram_aggregate_uncorrected_total", count, detection=detection)
    for unit, end in UNITS.items():
        yield _fact("ecc_sram_units_total", partial(_part, status, _count, f"aggregateUncBucket{end}"), unit=unit)


def _rows(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    # In this order: correctable, uncorrectable, pending, failed.
    rows = _once(partial(_ask, nvml, "nvmlDeviceGetRemappedRows", handle))
    yield _fact("row_remap_rows", partial(_part, rows, _count, 0), cause="correctable")
    yield _fact("row_remap_rows", partial(_part, rows, _count, 1), cause="uncorrectable")
    yield _fact("row_remap_pending", partial(_part, rows, _flag, 2))
    yield _fact("row_remap_failed", partial(_part, rows, _flag, 3))
    banks = _once(partial(_ask, nvml, "nvmlDeviceGetRowRemapperHistogram", handle))
    for left in BANKS:
        yield _fact("row_remap_banks", partial(_part, banks, _count, left), available=left)


def _heat(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    core = partial(_first, nvml, names, handle, 0)
    yield _fact("temperature_celsius", lambda: _degrees(core()), "celsius", sensor="core")
    call = partial(_value, nvml, _degrees, "nvmlDeviceGetTemperatureThreshold", handle)
    for number, threshold in enumerate(THRESHOLDS):
        yield _fact("temperature_threshold_celsius", partial(call, number), "celsius", threshold=threshold)
    call = partial(_value, nvml, _margin, "nvmlDeviceGetMarginTemperature", handle)
    yield _fact("temperature_margin_celsius", call, "celsius")
    try:
        fans = _value(nvml, _count, "nvmlDeviceGetNumFans", handle)
    except Missing as error:
        yield Absent(name="fan_ratio", reason=str(error))
        return
    for fan in range(fans):
        call = partial(_value, nvml, _fan, "nvmlDeviceGetFanSpeed_v2", handle, fan)
        yield _fact("fan_ratio", call, fan=str(fan))
    if not fans:
        yield Absent(name="fan_ratio", reason="this device has no fan of its own")


def _power(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    def call(name: str) -> Ask:
        return partial(_value, nvml, _thousandth, name, handle)

    yield _fact("power_watts", call("nvmlDeviceGetPowerUsage"), "watts")
    yield _fact("power_limit_watts", call("nvmlDeviceGetEnforcedPowerLimit"), "watts", limit="enforced")
    yield _fact("power_limit_watts", call("nvmlDeviceGetPowerManagementDefaultLimit"), "watts", limit="default")
    limits = _once(partial(_ask, nvml, "nvmlDeviceGetPowerManagementLimitConstraints", handle))
    yield _fact("power_limit_watts", partial(_part, limits, _thousandth, 0), "watts", limit="min")
    yield _fact("power_limit_watts", partial(_part, limits, _thousandth, 1), "watts", limit="max")
    yield _fact("energy_joules_total", call("nvmlDeviceGetTotalEnergyConsumption"), "joules")


def _throttle(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    def ask(which: str) -> int:
        names = (f"nvmlDeviceGet{which}ClocksEventReasons", f"nvmlDeviceGet{which}ClocksThrottleReasons")
        return _count(_first(nvml, names, handle))

    try:
        active = ask("Current")
    except Missing as error:
        yield Absent(name="throttle_active", reason=str(error))
        return
    try:
        supported = ask("Supported")
    except Missing:
        supported = (1 << len(THROTTLES)) - 1
    for bit in range(max(len(THROTTLES), active.bit_length())):
        reason = THROTTLES[bit] if bit < len(THROTTLES) else f"unknown({1 << bit:#x})"
        if (active | supported) >> bit & 1:
            yield Reading(name="throttle_active", value=active >> bit & 1, unit="1", labels={"reason": reason})
        elif bit < len(THROTTLES):
            yield Absent(name=reading_key("throttle_active", {"reason": reason}), reason=REASONS[NOT_SUPPORTED])


def _clocks(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    for name, call in (("clock_hertz", "nvmlDeviceGetClockInfo"), ("clock_max_hertz", "nvmlDeviceGetMaxClockInfo")):
        for number, domain in enumerate(CLOCKS):
            yield _fact(name, partial(_value, nvml, _hertz, call, handle, number), "hertz", domain=domain)
    yield _fact("performance_state", partial(_value, nvml, _performance, "nvmlDeviceGetPerformanceState", handle))


def _pcie(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    for name, call in (
        ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        ("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"),
    ):
        yield _fact(name, partial(_value, nvml, _count, call, handle))


def _state(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    yield _fact("persistence_mode", partial(_value, nvml, _flag, "nvmlDeviceGetPersistenceMode", handle))
    yield _worded("compute_mode", "mode", COMPUTE_MODES, partial(_ask, nvml, "nvmlDeviceGetComputeMode", handle))
    mig = partial(_ask, nvml, "nvmlDeviceGetMigMode", handle)
    yield _fact("mig_enabled", partial(_part, mig, _flag, 0))
    used = _once(partial(_ask, nvml, "nvmlDeviceGetUtilizationRates", handle))
    for engine in ("gpu", "memory"):
        yield _fact("utilization_ratio", partial(_part, used, _share, engine), engine=engine)
    yield _fact("fabric_ready", partial(_fabric, nvml, handle))


def _fabric(nvml: ModuleType, handle: Any) -> int:
    """Return whether a GPU has joined its fabric (nvmlGpuFabricState_t: none, not started, in progress, completed)."""
    if hasattr(nvml, "c_nvmlGpuFabricInfo_v2_t"):
        name, info = "nvmlDeviceGetGpuFabricInfoV", nvml.c_nvmlGpuFabricInfo_v2_t()
    elif hasattr(nvml, "c_nvmlGpuFabricInfo_t"):
        name, info = "nvmlDeviceGetGpuFabricInfo", nvml.c_nvmlGpuFabricInfo_t()
    else:
        raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
    _ask(nvml, name, handle, byref(info))
    if not 1 <= info.state <= 3:
        raise Missing("not part of an NVLink fabric" if info.state == 0 else f"the fabric is unknown({info.state})")
    return int(info.state == 3 and info.status == 0)


def _use(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    """Yield memory and processes; of these only how many, and what they hold together."""
    memory = _once(partial(_ask, nvml, "nvmlDeviceGetMemoryInfo", handle))
    yield _fact("memory_total_bytes", partial(_part, memory, _count, "total"), "bytes")
    yield _fact("memory_used_bytes", partial(_part, memory, _count, "used"), "bytes")
    processes = _once(partial(_ask, nvml, "nvmlDeviceGetComputeRunningProcesses", handle))
    yield _fact("compute_processes", lambda: len(processes()))
    yield _fact("compute_processes_memory_bytes", lambda: sum(_held(p) for p in processes()), "bytes")


def _held(process: Any) -> int:
    if process.usedGpuMemory is None:
        raise Missing("the driver does not tell what each process holds")
    return _count(process.usedGpuMemory)


# --- Field values -----------------------------------------------------------------------------------------------------


def _batch(nvml: ModuleType, handle: Any, fields: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Return field values by (number, link), all from one call."""
    wanted = list(fields)
    return dict(zip(wanted, _ask(nvml, "nvmlDeviceGetFieldValues", handle, wanted), strict=True))


def _field(batch: Ask, check: Check, number: int, link: int = 0) -> Any:
    """Return one value of a batch, checked and in base units. Each has a code of its own."""
    given = batch()[number, link]
    if given.nvmlReturn == GPU_IS_LOST:
        raise Unavailable(LOST)
    if given.nvmlReturn == 2:  # NVML_ERROR_INVALID_ARGUMENT
        raise Missing("the driver does not know this field", FUNCTION_NOT_FOUND)
    if given.nvmlReturn:
        raise Missing(REASONS.get(given.nvmlReturn, f"NVML: error {given.nvmlReturn}"), given.nvmlReturn)
    if given.valueType >= len(VALUES):
        raise Missing(f"the driver gave a value of an unknown type ({given.valueType})")
    return check(getattr(given.value, VALUES[given.valueType]))


def _fields(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    hardware = _hardware_throttled(_text(nvml, "nvmlSystemGetDriverVersion"))
    throttled = THROTTLED | hardware
    numbers = (*RETIRED.values(), MEMORY_TEMPERATURE, LINKS, RECOVERY, *MARGINS.values(), *throttled.values())
    field = partial(_field, _once(partial(_batch, nvml, handle, [(number, 0) for number in numbers])))
    yield _fact("retired_pages", partial(field, _count, RETIRED["single_bit"]), cause="single_bit")
    yield _fact("retired_pages", partial(field, _count, RETIRED["double_bit"]), cause="double_bit")
    yield _fact("retired_pages_pending", partial(field, _flag, RETIRED["pending"]))
    yield _fact("temperature_celsius", partial(field, _degrees, MEMORY_TEMPERATURE), "celsius", sensor="memory")
    for threshold, number in MARGINS.items():
        ask = partial(field, _margin, number)
        yield _fact("temperature_margin_threshold_celsius", ask, "celsius", threshold=threshold)
    for reason in (*THROTTLED, *HARDWARE_THROTTLED):
        if reason in throttled:
            yield _fact("throttle_seconds_total", partial(field, _seconds, throttled[reason]), "seconds", reason=reason)
        else:
            key = reading_key("throttle_seconds_total", {"reason": reason})
            yield Absent(name=key, reason="this driver has no field for it whose number is known")
    yield _worded("recovery_action", "action", RECOVERIES, partial(field, _count, RECOVERY))
    yield from _links(nvml, handle, partial(field, _count, LINKS))


def _hardware_throttled(driver: str) -> dict[str, int]:
    """Return the fields for the time in which hardware held the clocks down, for a driver's version.

    They have moved: nvidia-ml-py 12.575.51 and 13.580.65 have them at 252 and 253, 13.580.82 and later at 270 and 271,
    older ones not at all. Either number is something else to the other, so a driver in between is not asked.
    """
    major, _, rest = driver.partition(".")
    minor = rest.partition(".")[0]
    version = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    if version >= (580, 82):
        return dict(zip(HARDWARE_THROTTLED, (270, 271), strict=True))
    return dict(zip(HARDWARE_THROTTLED, (252, 253), strict=True)) if (575, 51) <= version <= (580, 65) else {}


def _links(nvml: ModuleType, handle: Any, how_many: Ask) -> Iterator[Fact]:
    """Yield state and errors of the NVLinks that a GPU has."""
    try:
        links, reason = range(how_many()), "this device has no NVLink"
    except Missing as error:
        links, reason = range(0), str(error)
    if not links:
        yield Absent(name="nvlink_up", reason=reason)
        yield Absent(name="nvlink_errors_total", reason=reason)
    for link in links:
        yield _fact("nvlink_up", partial(_value, nvml, _up, "nvmlDeviceGetNvLinkState", handle, link), link=str(link))
    call = partial(_value, nvml, _count, "nvmlDeviceGetNvLinkErrorCounter", handle)
    facts: list[Fact] = []
    for number, kind in enumerate(LINK_ERRORS):
        facts += [_fact("nvlink_errors_total", partial(call, n, number), kind=kind, link=str(n)) for n in links]
        if not _any(facts):
            break  # from Blackwell on, links count other things
    if links and not _any(facts):
        fields = [(number, link) for number in LINK_FIELDS.values() for link in links]
        field = partial(_field, _once(partial(_batch, nvml, handle, fields)), _count)
        counted = [
            _fact("nvlink_errors_total", partial(field, number, link), kind=kind, link=str(link))
            for kind, number in LINK_FIELDS.items()
            for link in links
        ]
        facts = counted if _any(counted) else facts
    yield from facts
