"""NVIDIA accelerators through NVML and the `nvidia-ml-py` package; docs/readings.md says which call gives what.

Numbers and words of nvml.h are in `nvml_values`, calls and their errors in `nvml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ctypes import byref
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from canaryd.facts import Reading, reading_key
from canaryd.model import KERNEL_DRIVER, ON_THE_BUS, UNDRIVEN, UNIDENTIFIED, Device
from canaryd.probe import Absent
from canaryd.worker.telemetry import nvml_values as values
from canaryd.worker.telemetry.daily import Daily
from canaryd.worker.telemetry.interface import DeviceLost, Unavailable, on_the_bus
from canaryd.worker.telemetry.nvml import (
    FUNCTION_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    OLD_PACKAGE,
    REASONS,
    RESET_REQUIRED,
    Ask,
    Check,
    Missing,
    ask_nvml,
    ask_text,
    device_count,
    device_handle,
    field_value,
    first,
    identify,
    instance_handles,
    known,
    library,
    parse_count,
)
from canaryd.worker.telemetry.nvml import close as close  # noqa: PLC0414 - part of what a vendor module has
from canaryd.worker.telemetry.nvml_facts import (
    Fact,
    absent,
    any_reading,
    ask_fields,
    field_of,
    make_fact,
    merged,
    missing_code,
    once,
    part,
    worded,
)
from canaryd.worker.telemetry.nvml_links import read_links
from canaryd.worker.telemetry.sysfs import aer, path_setting

_problems: list[str] = []


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs and their MIG instances, with identity and versions; raise `Unavailable` where NVML cannot start.

    A GPU that cannot be identified is there by its place; `problems` names it and the reason.
    """
    root = _settings(settings)
    nvml = library()
    _problems.clear()
    found, silent = [], {}
    for index in range(device_count(nvml)):
        try:
            handle, uuid = identify(nvml, index)
            gpu = _gpu(nvml, handle, uuid, index)
            found += [gpu, *_instances(nvml, handle, gpu)]
        except Unavailable as error:
            silent[index] = str(error)
            _problems.append(f"GPU {index} of NVML could not be identified: {error}")
    return [*found, *_unidentified(nvml, root, silent, {d.detail.get("bus_id", "") for d in found})]


def _unidentified(nvml: ModuleType, root: Path, silent: Mapping[int, str], taken: set[str]) -> Iterator[Device]:
    """Yield a device for each of the `silent` numbers of NVML, by its address, or else by that number.

    NVML may not tell the address. Then it is that of a function on the PCI bus that NVML knows and that is not `taken`
    by a GPU that answers; both are in the order of the bus.
    """
    told = {index: _address(nvml, index) for index in silent}
    functions = {d.detail["bus_id"]: d for d in on_the_bus(root) if d.backend == "cuda"} if silent else {}
    free = (bus_id for bus_id in functions if bus_id not in {*taken, *told.values()} and _knows(nvml, bus_id))
    for index, why in silent.items():
        bus_id = told[index] or next(free, "")
        function = functions.get(bus_id)
        place = {"bus_id": bus_id} if bus_id else {}
        detail = {**place, KERNEL_DRIVER: "nvidia", UNDRIVEN: why, UNIDENTIFIED: "yes"}
        yield Device(
            uuid=f"{ON_THE_BUS}{bus_id}" if bus_id else f"NVML-{index}",
            backend="cuda",
            index=index,
            model=function.model if function else "NVIDIA GPU",
            weak_identity=True,
            detail=detail,
        )


def _address(nvml: ModuleType, index: int) -> str:
    """Return where NVML's GPU of a number is, "" where it does not tell."""
    try:
        handle = ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
        return str(field_value(nvml, values.pci_address, "nvmlDeviceGetPciInfo", handle))
    except (Missing, Unavailable):
        return ""


def _knows(nvml: ModuleType, bus_id: str) -> bool:
    """Return whether NVML counts what is at an address, whether that answers or not."""
    try:
        ask_nvml(nvml, "nvmlDeviceGetHandleByPciBusId", bus_id)
    except Missing as error:
        return error.code != NOT_FOUND
    except DeviceLost:
        pass
    return True


def problems() -> list[str]:
    """Return one sentence for each GPU that the last `devices` counted but could not identify."""
    return list(_problems)


def read(device: Device, settings: Mapping[str, Any], memory: str = "") -> Iterator[Reading | Absent]:
    """Yield the readings of a GPU or a MIG instance; raise `Unavailable` where it or NVML does not answer.

    What does not change is asked once a day, where a directory `memory` outlives this process.
    """
    root = _settings(settings)
    plain = library()
    if UNDRIVEN in device.detail:
        if UNIDENTIFIED not in device.detail:
            raise Unavailable(f"{device.name} is on the PCI bus, and the driver does not list it")
        _gpu(plain, *identify(plain, device.index), device.index)  # raises why it is not identified
        raise Unavailable(f"{device.name} answers again: the next inventory lists it by its uuid")
    handle = device_handle(plain, device)
    if device.parent:
        yield from _use(plain, handle)
        yield from (f for f in _errors(plain, handle, "ecc_errors_total", 0) if isinstance(f, Reading))
        return
    nvml = Daily(plain, memory, device.uuid)
    nvml.recall()
    groups = (_ecc, _rows, _heat, _power, _throttle, _clocks, _pcie, _state, _use, _fields)
    facts = (fact for group in groups for fact in merged(group(nvml, handle)))
    yield from _advised(facts)
    nvml.keep()
    if bus_id := device.detail.get("bus_id"):
        yield from aer(root, bus_id)


def _advised(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield facts; a refused call that asks for a reset is the advice of a driver that has no other.

    Drivers before 570 have no `recovery_action`. It is among the last facts, after nearly all calls. Those that have it
    refuse calls while a change of MIG waits for a reset, and say that nothing is wrong.
    """
    must_reset = False
    for fact in facts:
        must_reset |= isinstance(fact, Absent) and fact.code == RESET_REQUIRED
        if must_reset and fact.name == "recovery_action" and isinstance(fact, Absent):
            yield Reading(name="recovery_action", value=1, unit="1", labels={"action": "reset"})
        else:
            yield fact


def _settings(settings: Mapping[str, Any]) -> Path:
    for name in settings:
        if name != "sysfs":
            raise ValueError(f"{name}: nvidia_telemetry has no such setting; it has: sysfs")
    return path_setting(settings, "sysfs", "/sys")


def _gpu(nvml: ModuleType, handle: Any, uuid: str, index: int) -> Device:
    def value(check: Check, name: str) -> str:
        return known(partial(field_value, nvml, check, name, handle))

    memory = partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", handle)
    links = partial(ask_fields, nvml, handle, [(values.LINKS, 0)])
    detail = {
        "serial": ask_text(nvml, "nvmlDeviceGetSerial", handle),
        "board_part_number": ask_text(nvml, "nvmlDeviceGetBoardPartNumber", handle),
        "bus_id": value(values.pci_address, "nvmlDeviceGetPciInfo"),
        "driver": ask_text(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": known(partial(field_value, nvml, values.cuda_version, "nvmlSystemGetCudaDriverVersion")),
        "vbios": ask_text(nvml, "nvmlDeviceGetVbiosVersion", handle),
        "inforom": ask_text(nvml, "nvmlDeviceGetInforomImageVersion", handle),
        "inforom_ecc": ask_text(nvml, "nvmlDeviceGetInforomVersion", handle, 1),
        "inforom_power": ask_text(nvml, "nvmlDeviceGetInforomVersion", handle, 2),
        "gsp_firmware": ask_text(nvml, "nvmlDeviceGetGspFirmwareVersion", handle),
        "memory_bytes": known(partial(part, memory, parse_count, "total")),
        "architecture": value(partial(values.word, values.ARCHITECTURES), "nvmlDeviceGetArchitecture"),
        "capability": value(values.capability, "nvmlDeviceGetCudaComputeCapability"),
        "pcie_generation_max": value(parse_count, "nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width_max": value(parse_count, "nvmlDeviceGetMaxPcieLinkWidth"),
        "nvlinks": known(partial(field_of, links, parse_count, values.LINKS)),
        "board_id": value(values.hexadecimal, "nvmlDeviceGetBoardId"),
        "module_id": value(parse_count, "nvmlDeviceGetModuleId"),
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
    *("capability",),
)
"""What a MIG instance takes from its GPU."""


def _instances(nvml: ModuleType, handle: Any, gpu: Device) -> Iterator[Device]:
    """Yield the MIG instances of a GPU; add to the problems each one that cannot be identified."""
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
                partial(part, partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", instance), parse_count, "total")
            ),
            "multiprocessors": known(partial(part, attributes, parse_count, "multiprocessorCount")),
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


def _ecc(nvml: Any, handle: Any) -> Iterator[Fact]:
    modes = once(partial(ask_nvml, nvml, "nvmlDeviceGetEccMode", handle))
    yield make_fact("ecc_enabled", partial(part, modes, values.flag, 0), when="current")
    yield make_fact("ecc_enabled", partial(part, modes, values.flag, 1), when="pending")
    try:
        off = modes()[0] == 0
    except Missing:
        off = False
    for name, counter in (("ecc_errors_total", 0), ("ecc_aggregate_errors_total", 1)):
        facts = list(_errors(nvml, handle, name, counter))
        yield from (Absent(name=f.name, reason="error correction is off") for f in facts) if off else facts
    yield from _sram(nvml, handle)


def _errors(nvml: Any, handle: Any, name: str, counter: int) -> list[Fact]:
    """Return errors by location: memory and SRAM, or memory and each cache, or one total; never two of these."""
    call = partial(field_value, nvml, parse_count, "nvmlDeviceGetMemoryErrorCounter", handle)

    def at(location: str, code: int) -> tuple[list[Fact], bool]:
        """Return the facts of one location, and whether this device does not support it."""
        asks = [once(partial(call, number, counter, code)) for number in range(len(values.KINDS))]
        facts = [make_fact(name, a, kind=kind, location=location) for a, kind in zip(asks, values.KINDS, strict=True)]
        return facts, all(missing_code(ask) == NOT_SUPPORTED for ask in asks)

    inside, is_unsupported = at("sram", values.SRAM)
    if is_unsupported:
        caches = [fact for location, code in values.CACHES.items() for fact in at(location, code)[0]]
        inside = [f for f in caches if isinstance(f, Reading)] or inside
    facts = at("dram", values.DRAM)[0] + inside
    if any_reading(facts):
        return facts
    sums = partial(field_value, nvml, parse_count, "nvmlDeviceGetTotalEccErrors", handle)
    kinds = enumerate(values.KINDS)
    total = [make_fact(name, partial(sums, n, counter), kind=kind, location="all") for n, kind in kinds]
    return total if any_reading(total) else facts


def _sram(nvml: Any, handle: Any) -> Iterator[Fact]:
    """Yield the SRAM facts that the driver gives only to root: threshold, way of detection, unit."""

    def ask() -> Any:
        if not hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
            raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        ask_nvml(nvml, "nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
        return status

    status = once(ask)
    yield make_fact("ecc_sram_threshold_exceeded", partial(part, status, values.flag, "bThresholdExceeded"))
    for detection, end in (("parity", "UncParity"), ("sec_ded", "UncSecDed")):
        count = partial(part, status, parse_count, f"volatile{end}")
        yield make_fact("ecc_sram_uncorrected_total", count, detection=detection)
        count = partial(part, status, parse_count, f"aggregate{end}")
        yield make_fact("ecc_sram_aggregate_uncorrected_total", count, detection=detection)
    for unit, end in values.UNITS.items():
        count = partial(part, status, parse_count, f"aggregateUncBucket{end}")
        yield make_fact("ecc_sram_units_total", count, unit=unit)


def _rows(nvml: Any, handle: Any) -> Iterator[Fact]:
    # In this order: correctable, uncorrectable, pending, failed.
    rows = once(partial(ask_nvml, nvml, "nvmlDeviceGetRemappedRows", handle))
    yield make_fact("row_remap_rows", partial(part, rows, parse_count, 0), cause="correctable")
    yield make_fact("row_remap_rows", partial(part, rows, parse_count, 1), cause="uncorrectable")
    yield make_fact("row_remap_pending", partial(part, rows, values.flag, 2))
    yield make_fact("row_remap_failed", partial(part, rows, values.flag, 3))
    banks = once(partial(ask_nvml, nvml, "nvmlDeviceGetRowRemapperHistogram", handle))
    for left in values.BANKS:
        yield make_fact("row_remap_banks", partial(part, banks, parse_count, left), available=left)


def _heat(nvml: Any, handle: Any) -> Iterator[Fact]:
    names = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
    core = partial(first, nvml, names, handle, 0)
    yield make_fact("temperature_celsius", lambda: values.degrees(core()), "celsius", sensor="core")
    call = partial(field_value, nvml, values.degrees, "nvmlDeviceGetTemperatureThreshold", handle)
    for number, threshold in enumerate(values.THRESHOLDS):
        yield make_fact("temperature_threshold_celsius", partial(call, number), "celsius", threshold=threshold)
    call = partial(field_value, nvml, values.margin, "nvmlDeviceGetMarginTemperature", handle)
    yield make_fact("temperature_margin_celsius", call, "celsius")
    try:
        fans = field_value(nvml, parse_count, "nvmlDeviceGetNumFans", handle)
    except Missing as error:
        yield absent("fan_ratio", error)
        return
    for fan in range(fans):
        call = partial(field_value, nvml, values.fan_ratio, "nvmlDeviceGetFanSpeed_v2", handle, fan)
        yield make_fact("fan_ratio", call, fan=str(fan))
    if not fans:
        yield Absent(name="fan_ratio", reason="this device has no fan of its own")


def _power(nvml: Any, handle: Any) -> Iterator[Fact]:
    def call(name: str) -> Ask:
        return partial(field_value, nvml, values.thousandths, name, handle)

    yield make_fact("power_watts", call("nvmlDeviceGetPowerUsage"), "watts")
    yield make_fact("power_limit_watts", call("nvmlDeviceGetEnforcedPowerLimit"), "watts", limit="enforced")
    yield make_fact("power_limit_watts", call("nvmlDeviceGetPowerManagementDefaultLimit"), "watts", limit="default")
    limits = once(partial(ask_nvml, nvml, "nvmlDeviceGetPowerManagementLimitConstraints", handle))
    yield make_fact("power_limit_watts", partial(part, limits, values.thousandths, 0), "watts", limit="min")
    yield make_fact("power_limit_watts", partial(part, limits, values.thousandths, 1), "watts", limit="max")
    yield make_fact("energy_joules_total", call("nvmlDeviceGetTotalEnergyConsumption"), "joules")


def _throttle(nvml: Any, handle: Any) -> Iterator[Fact]:
    def ask(which: str) -> int:
        names = (f"nvmlDeviceGet{which}ClocksEventReasons", f"nvmlDeviceGet{which}ClocksThrottleReasons")
        return parse_count(first(nvml, names, handle))

    try:
        active = ask("Current")
    except Missing as error:
        yield absent("throttle_active", error)
        return
    try:
        supported = ask("Supported")
    except Missing:
        supported = (1 << len(values.THROTTLES)) - 1
    for bit in range(max(len(values.THROTTLES), active.bit_length())):
        reason = values.THROTTLES[bit] if bit < len(values.THROTTLES) else f"unknown({1 << bit:#x})"
        if (active | supported) >> bit & 1:
            yield Reading(name="throttle_active", value=active >> bit & 1, unit="1", labels={"reason": reason})
        elif bit < len(values.THROTTLES):
            yield Absent(name=reading_key("throttle_active", {"reason": reason}), reason=REASONS[NOT_SUPPORTED])


def _clocks(nvml: Any, handle: Any) -> Iterator[Fact]:
    for name, call in (("clock_hertz", "nvmlDeviceGetClockInfo"), ("clock_max_hertz", "nvmlDeviceGetMaxClockInfo")):
        for number, domain in enumerate(values.CLOCKS):
            ask = partial(field_value, nvml, values.hertz, call, handle, number)
            yield make_fact(name, ask, "hertz", domain=domain)
    state = partial(field_value, nvml, values.performance_state, "nvmlDeviceGetPerformanceState", handle)
    yield make_fact("performance_state", state)


def _pcie(nvml: Any, handle: Any) -> Iterator[Fact]:
    for name, call in (
        ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        ("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
        ("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"),
    ):
        yield make_fact(name, partial(field_value, nvml, parse_count, call, handle))


def _state(nvml: Any, handle: Any) -> Iterator[Fact]:
    yield make_fact("persistence_mode", partial(field_value, nvml, values.flag, "nvmlDeviceGetPersistenceMode", handle))
    mode = partial(ask_nvml, nvml, "nvmlDeviceGetComputeMode", handle)
    yield worded("compute_mode", "mode", values.COMPUTE_MODES, mode)
    mig = partial(ask_nvml, nvml, "nvmlDeviceGetMigMode", handle)
    yield make_fact("mig_enabled", partial(part, mig, values.flag, 0))
    used = once(partial(ask_nvml, nvml, "nvmlDeviceGetUtilizationRates", handle))
    for engine in ("gpu", "memory"):
        yield make_fact("utilization_ratio", partial(part, used, values.share, engine), engine=engine)
    yield make_fact("fabric_ready", partial(_fabric, nvml, handle))


def _fabric(nvml: Any, handle: Any) -> int:
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


def _use(nvml: Any, handle: Any) -> Iterator[Fact]:
    """Yield memory and processes: how many, and how much memory they hold together."""
    memory = once(partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", handle))
    yield make_fact("memory_total_bytes", partial(part, memory, parse_count, "total"), "bytes")
    yield make_fact("memory_used_bytes", partial(part, memory, parse_count, "used"), "bytes")
    reserved = partial(ask_nvml, nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    yield make_fact("memory_reserved_bytes", partial(part, reserved, parse_count, "reserved"), "bytes")
    processes = once(partial(ask_nvml, nvml, "nvmlDeviceGetComputeRunningProcesses", handle))
    yield make_fact("compute_processes", lambda: len(processes()))
    yield make_fact("compute_processes_memory_bytes", lambda: sum(_held(p) for p in processes()), "bytes")


def _held(process: Any) -> int:
    if process.usedGpuMemory is None:
        raise Missing("the driver does not say how much memory each process uses")
    return parse_count(process.usedGpuMemory)


def _fields(nvml: Any, handle: Any) -> Iterator[Fact]:
    hardware = values.hardware_throttle_fields(ask_text(nvml, "nvmlSystemGetDriverVersion"))
    throttled = values.THROTTLED | hardware
    numbers = (
        *values.RETIRED.values(),
        values.MEMORY_TEMPERATURE,
        values.LINKS,
        values.RECOVERY,
        *values.MARGINS.values(),
        *throttled.values(),
    )
    field = partial(field_of, once(partial(ask_fields, nvml, handle, [(number, 0) for number in numbers])))
    yield make_fact("retired_pages", partial(field, parse_count, values.RETIRED["single_bit"]), cause="single_bit")
    yield make_fact("retired_pages", partial(field, parse_count, values.RETIRED["double_bit"]), cause="double_bit")
    yield make_fact("retired_pages_pending", partial(field, values.flag, values.RETIRED["pending"]))
    yield make_fact(
        "temperature_celsius", partial(field, values.degrees, values.MEMORY_TEMPERATURE), "celsius", sensor="memory"
    )
    for threshold, number in values.MARGINS.items():
        ask = partial(field, values.margin, number)
        yield make_fact("temperature_margin_threshold_celsius", ask, "celsius", threshold=threshold)
    for reason in (*values.THROTTLED, *values.HARDWARE_THROTTLED):
        if reason in throttled:
            yield make_fact(
                "throttle_seconds_total", partial(field, values.seconds, throttled[reason]), "seconds", reason=reason
            )
        else:
            key = reading_key("throttle_seconds_total", {"reason": reason})
            yield Absent(name=key, reason="this driver has no known field for it")
    yield worded("recovery_action", "action", values.RECOVERIES, partial(field, parse_count, values.RECOVERY))
    yield from read_links(nvml, handle, partial(field, parse_count, values.LINKS))
