"""NVIDIA accelerators through NVML and the `nvidia-ml-py` package; docs/readings.md says which call gives what.

Names, numbers and units are those of nvml.h (CUDA 13.3). Field numbers are written out, because a package and a driver
of different age must still understand each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ctypes import byref
from functools import partial
from types import ModuleType
from typing import Any

from canaryd.model import Device, Reading, reading_key
from canaryd.probe import Absent
from canaryd.worker.telemetry.interface import DeviceLost, Unavailable
from canaryd.worker.telemetry.nvml import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID,
    LOST,
    NOT_SUPPORTED,
    OLD_PACKAGE,
    REASONS,
    Ask,
    Check,
    Missing,
    ask_nvml,
    ask_text,
    device_count,
    device_handle,
    field_value,
    first,
    instance_handles,
    known,
    library,
    parse_count,
)
from canaryd.worker.telemetry.nvml import close as close  # noqa: PLC0414 - part of what a vendor module has
from canaryd.worker.telemetry.sysfs import aer, path_setting

Fact = Reading | Absent
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
_problems: list[str] = []


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs and their MIG instances, with identity and versions; raise `Unavailable` where NVML cannot start.

    A GPU that does not answer is left out; `problems` then says which and why.
    """
    _settings(settings)
    nvml = library()
    _problems.clear()
    found = []
    for index in range(device_count(nvml)):
        try:
            handle = ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
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
    nvml = library()
    handle = device_handle(nvml, device)
    if device.parent:
        yield from _use(nvml, handle)
        yield from (f for f in _errors(nvml, handle, "ecc_errors_total", 0) if isinstance(f, Reading))
        return
    groups = (_ecc, _rows, _heat, _power, _throttle, _clocks, _pcie, _state, _use, _fields)
    for group in groups:
        yield from _merged(group(nvml, handle))
    if bus_id := device.detail.get("bus_id"):
        yield from aer(root, bus_id)


def _settings(settings: Mapping[str, Any]) -> Any:
    for name in settings:
        if name != "sysfs":
            raise ValueError(f"{name}: is no setting of nvidia_telemetry; it has: sysfs")
    return path_setting(settings, "sysfs", "/sys")


def _gpu(nvml: ModuleType, handle: Any, index: int) -> Device:
    uuid = ask_nvml(nvml, "nvmlDeviceGetUUID", handle)
    detail = {
        "serial": ask_text(nvml, "nvmlDeviceGetSerial", handle),
        "board_part_number": ask_text(nvml, "nvmlDeviceGetBoardPartNumber", handle),
        "bus_id": known(partial(field_value, nvml, _bus_id, "nvmlDeviceGetPciInfo", handle)),
        "driver": ask_text(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": known(partial(field_value, nvml, _cuda, "nvmlSystemGetCudaDriverVersion")),
        "vbios": ask_text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "inforom": ask_text(nvml, "nvmlDeviceGetInforomImageVersion", handle),
        "inforom_ecc": ask_text(nvml, "nvmlDeviceGetInforomVersion", handle, 1),
        "inforom_power": ask_text(nvml, "nvmlDeviceGetInforomVersion", handle, 2),
        "gsp_firmware": ask_text(nvml, "nvmlDeviceGetGspFirmwareVersion", handle),
        "memory_bytes": known(
            partial(_part, partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", handle), parse_count, "total")
        ),
        "architecture": known(
            partial(field_value, nvml, partial(_word, ARCHITECTURES), "nvmlDeviceGetArchitecture", handle)
        ),
        "capability": known(partial(field_value, nvml, _capability, "nvmlDeviceGetCudaComputeCapability", handle)),
        "pcie_generation_max": known(
            partial(field_value, nvml, parse_count, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
        ),
        "pcie_width_max": known(partial(field_value, nvml, parse_count, "nvmlDeviceGetMaxPcieLinkWidth", handle)),
        "nvlinks": known(partial(_field, partial(_batch, nvml, handle, [(LINKS, 0)]), parse_count, LINKS)),
        "board_id": known(partial(field_value, nvml, _hexadecimal, "nvmlDeviceGetBoardId", handle)),
        "module_id": known(partial(field_value, nvml, parse_count, "nvmlDeviceGetModuleId", handle)),
    }
    return Device(
        uuid=uuid,
        backend="cuda",
        index=index,
        model=ask_text(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        detail={k: v for k, v in detail.items() if v},
    )


SHARED = (
    *("serial", "board_part_number", "bus_id", "driver", "cuda", "vbios", "inforom", "gsp_firmware", "architecture"),
    "capability",
)
"""What a MIG instance has from its GPU."""


def _instances(nvml: ModuleType, handle: Any, gpu: Device) -> Iterator[Device]:
    """Yield the MIG instances of a GPU; where they cannot be listed, that is one of the problems."""
    for number, instance in instance_handles(nvml, handle):
        uuid = ask_text(nvml, "nvmlDeviceGetUUID", instance)
        if not uuid:
            _problems.append(f"MIG instance {number} of GPU {gpu.index} could not be identified: it has no UUID")
            continue
        model = ask_text(nvml, "nvmlDeviceGetName", instance)
        attributes = partial(ask_nvml, nvml, "nvmlDeviceGetAttributes", instance)
        detail = {
            "instance": str(number),
            "profile": model.partition(" MIG ")[2],
            "gpu_instance_id": known(partial(field_value, nvml, parse_count, "nvmlDeviceGetGpuInstanceId", instance)),
            "compute_instance_id": known(
                partial(field_value, nvml, parse_count, "nvmlDeviceGetComputeInstanceId", instance)
            ),
            "memory_bytes": known(
                partial(_part, partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", instance), parse_count, "total")
            ),
            "multiprocessors": known(partial(_part, attributes, parse_count, "multiprocessorCount")),
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


def _bus_id(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _capability(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _hexadecimal(raw: Any) -> str:
    return f"{parse_count(raw):#x}"


def _cuda(version: int) -> str:
    """Write 12040 as "12.4" (CUDA_VERSION: 1000 major + 10 minor)."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _thousandth(raw: Any) -> float:
    """Milliwatts to watts, millijoules to joules."""
    return parse_count(raw) / 1000


def _seconds(raw: Any) -> float:
    """Nanoseconds to seconds."""
    return parse_count(raw) / 1_000_000_000


def _hertz(raw: Any) -> int:
    """Megahertz to hertz."""
    return parse_count(raw) * 1_000_000


def _fan(raw: Any) -> float:
    """Per cent of the fan's nominal top speed, which it may exceed, to a ratio."""
    return parse_count(raw) / 100


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
    value = parse_count(raw)
    return (words[value] if value < len(words) else "") or f"unknown({value})"


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


def _ecc(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    modes = _once(partial(ask_nvml, nvml, "nvmlDeviceGetEccMode", handle))
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
        call = partial(field_value, nvml, parse_count, "nvmlDeviceGetMemoryErrorCounter", handle)
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
    call = partial(field_value, nvml, parse_count, "nvmlDeviceGetTotalEccErrors", handle)
    total = [_fact(name, partial(call, n, counter), kind=kind, location="all") for n, kind in enumerate(KINDS)]
    return total if _any(total) else facts


def _sram(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    """Yield what only root is told of SRAM: the threshold, how errors were detected and in which unit."""

    def ask() -> Any:
        if not hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
            raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        ask_nvml(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
        return status

    status = _once(ask)
    yield _fact("ecc_sram_threshold_exceeded", partial(_part, status, _flag, "bThresholdExceeded"))
    for detection, end in (("parity", "UncParity"), ("sec_ded", "UncSecDed")):
        count = partial(_part, status, parse_count, f"volatile{end}")
        yield _fact("ecc_sram_uncorrected_total", count, detection=detection)
        count = partial(_part, status, parse_count, f"aggregate{end}")
        yield _fact("ecc_sram_aggregate_uncorrected_total", count, detection=detection)
    for unit, end in UNITS.items():
        yield _fact("ecc_sram_units_total", partial(_part, status, parse_count, f"aggregateUncBucket{end}"), unit=unit)


def _rows(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    # In this order: correctable, uncorrectable, pending, failed.
    rows = _once(partial(ask_nvml, nvml, "nvmlDeviceGetRemappedRows", handle))
    yield _fact("row_remap_rows", partial(_part, rows, parse_count, 0), cause="correctable")
    yield _fact("row_remap_rows", partial(_part, rows, parse_count, 1), cause="uncorrectable")
    yield _fact("row_remap_pending", partial(_part, rows, _flag, 2))
    yield _fact("row_remap_failed", partial(_part, rows, _flag, 3))
    banks = _once(partial(ask_nvml, nvml, "nvmlDeviceGetRowRemapperHistogram", handle))
    for left in BANKS:
        yield _fact("row_remap_banks", partial(_part, banks, parse_count, left), available=left)


def _heat(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    core = partial(first, nvml, names, handle, 0)
    yield _fact("temperature_celsius", lambda: _degrees(core()), "celsius", sensor="core")
    call = partial(field_value, nvml, _degrees, "nvmlDeviceGetTemperatureThreshold", handle)
    for number, threshold in enumerate(THRESHOLDS):
        yield _fact("temperature_threshold_celsius", partial(call, number), "celsius", threshold=threshold)
    call = partial(field_value, nvml, _margin, "nvmlDeviceGetMarginTemperature", handle)
    yield _fact("temperature_margin_celsius", call, "celsius")
    try:
        fans = field_value(nvml, parse_count, "nvmlDeviceGetNumFans", handle)
    except Missing as error:
        yield Absent(name="fan_ratio", reason=str(error))
        return
    for fan in range(fans):
        call = partial(field_value, nvml, _fan, "nvmlDeviceGetFanSpeed_v2", handle, fan)
        yield _fact("fan_ratio", call, fan=str(fan))
    if not fans:
        yield Absent(name="fan_ratio", reason="this device has no fan of its own")


def _power(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    def call(name: str) -> Ask:
        return partial(field_value, nvml, _thousandth, name, handle)

    yield _fact("power_watts", call("nvmlDeviceGetPowerUsage"), "watts")
    yield _fact("power_limit_watts", call("nvmlDeviceGetEnforcedPowerLimit"), "watts", limit="enforced")
    yield _fact("power_limit_watts", call("nvmlDeviceGetPowerManagementDefaultLimit"), "watts", limit="default")
    limits = _once(partial(ask_nvml, nvml, "nvmlDeviceGetPowerManagementLimitConstraints", handle))
    yield _fact("power_limit_watts", partial(_part, limits, _thousandth, 0), "watts", limit="min")
    yield _fact("power_limit_watts", partial(_part, limits, _thousandth, 1), "watts", limit="max")
    yield _fact("energy_joules_total", call("nvmlDeviceGetTotalEnergyConsumption"), "joules")


def _throttle(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    def ask(which: str) -> int:
        names = (f"nvmlDeviceGet{which}ClocksEventReasons", f"nvmlDeviceGet{which}ClocksThrottleReasons")
        return parse_count(first(nvml, names, handle))

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
            yield _fact(name, partial(field_value, nvml, _hertz, call, handle, number), "hertz", domain=domain)
    yield _fact("performance_state", partial(field_value, nvml, _performance, "nvmlDeviceGetPerformanceState", handle))


def _pcie(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    for name, call in (
        ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        ("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"),
    ):
        yield _fact(name, partial(field_value, nvml, parse_count, call, handle))


def _state(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    yield _fact("persistence_mode", partial(field_value, nvml, _flag, "nvmlDeviceGetPersistenceMode", handle))
    yield _worded("compute_mode", "mode", COMPUTE_MODES, partial(ask_nvml, nvml, "nvmlDeviceGetComputeMode", handle))
    mig = partial(ask_nvml, nvml, "nvmlDeviceGetMigMode", handle)
    yield _fact("mig_enabled", partial(_part, mig, _flag, 0))
    used = _once(partial(ask_nvml, nvml, "nvmlDeviceGetUtilizationRates", handle))
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
    ask_nvml(nvml, name, handle, byref(info))
    if not 1 <= info.state <= 3:
        raise Missing("not part of an NVLink fabric" if info.state == 0 else f"the fabric is unknown({info.state})")
    return int(info.state == 3 and info.status == 0)


def _use(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    """Yield memory and processes; of these only how many, and what they hold together."""
    memory = _once(partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", handle))
    yield _fact("memory_total_bytes", partial(_part, memory, parse_count, "total"), "bytes")
    yield _fact("memory_used_bytes", partial(_part, memory, parse_count, "used"), "bytes")
    processes = _once(partial(ask_nvml, nvml, "nvmlDeviceGetComputeRunningProcesses", handle))
    yield _fact("compute_processes", lambda: len(processes()))
    yield _fact("compute_processes_memory_bytes", lambda: sum(_held(p) for p in processes()), "bytes")


def _held(process: Any) -> int:
    if process.usedGpuMemory is None:
        raise Missing("the driver does not tell what each process holds")
    return parse_count(process.usedGpuMemory)


def _batch(nvml: ModuleType, handle: Any, fields: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Return field values by (number, link), all from one call."""
    wanted = list(fields)
    return dict(zip(wanted, ask_nvml(nvml, "nvmlDeviceGetFieldValues", handle, wanted), strict=True))


def _field(batch: Ask, check: Check, number: int, link: int = 0) -> Any:
    """Return one value of a batch, checked and in base units. Each has a code of its own."""
    given = batch()[number, link]
    if given.nvmlReturn == GPU_IS_LOST:
        raise DeviceLost(LOST)
    if given.nvmlReturn == 2:  # NVML_ERROR_INVALID_ARGUMENT
        raise Missing("the driver does not know this field", FUNCTION_NOT_FOUND)
    if given.nvmlReturn:
        raise Missing(REASONS.get(given.nvmlReturn, f"NVML: error {given.nvmlReturn}"), given.nvmlReturn)
    if given.valueType >= len(VALUES):
        raise Missing(f"the driver gave a value of an unknown type ({given.valueType})")
    return check(getattr(given.value, VALUES[given.valueType]))


def _fields(nvml: ModuleType, handle: Any) -> Iterator[Fact]:
    hardware = _hardware_throttled(ask_text(nvml, "nvmlSystemGetDriverVersion"))
    throttled = THROTTLED | hardware
    numbers = (*RETIRED.values(), MEMORY_TEMPERATURE, LINKS, RECOVERY, *MARGINS.values(), *throttled.values())
    field = partial(_field, _once(partial(_batch, nvml, handle, [(number, 0) for number in numbers])))
    yield _fact("retired_pages", partial(field, parse_count, RETIRED["single_bit"]), cause="single_bit")
    yield _fact("retired_pages", partial(field, parse_count, RETIRED["double_bit"]), cause="double_bit")
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
    yield _worded("recovery_action", "action", RECOVERIES, partial(field, parse_count, RECOVERY))
    yield from _links(nvml, handle, partial(field, parse_count, LINKS))


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
        yield _fact(
            "nvlink_up", partial(field_value, nvml, _up, "nvmlDeviceGetNvLinkState", handle, link), link=str(link)
        )
    call = partial(field_value, nvml, parse_count, "nvmlDeviceGetNvLinkErrorCounter", handle)
    facts: list[Fact] = []
    for number, kind in enumerate(LINK_ERRORS):
        facts += [_fact("nvlink_errors_total", partial(call, n, number), kind=kind, link=str(n)) for n in links]
        if not _any(facts):
            break  # from Blackwell on, links count other things
    if links and not _any(facts):
        fields = [(number, link) for number in LINK_FIELDS.values() for link in links]
        field = partial(_field, _once(partial(_batch, nvml, handle, fields)), parse_count)
        counted = [
            _fact("nvlink_errors_total", partial(field, number, link), kind=kind, link=str(link))
            for kind, number in LINK_FIELDS.items()
            for link in links
        ]
        facts = counted if _any(counted) else facts
    yield from facts
