"""NVIDIA accelerators through NVML and the `nvidia-ml-py` package; docs/readings.md lists the call of each reading.

Numbers and words of nvml.h are in `nvml_values`, calls and their errors in `nvml`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import byref
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from uuid import UUID

from canaryd.facts import Reading, reading_key
from canaryd.model import KERNEL_DRIVER, ON_THE_BUS, UNDRIVEN, UNIDENTIFIED, Device
from canaryd.probe import Absent
from canaryd.worker.telemetry import nvml_values as values
from canaryd.worker.telemetry.interface import DeviceLost, Unavailable, on_the_bus
from canaryd.worker.telemetry.nvml import (
    FUNCTION_NOT_FOUND,
    NOT_FOUND,
    NOT_SUPPORTED,
    OLD_PACKAGE,
    REASONS,
    RESET_REQUIRED,
    UNKNOWN_VERSION,
    Check,
    Missing,
    ask_nvml,
    ask_text,
    device_count,
    device_handle,
    identify,
    instance_handles,
    library,
    parse_count,
)
from canaryd.worker.telemetry.nvml import close as close  # noqa: PLC0414 - part of what a vendor module has
from canaryd.worker.telemetry.nvml_asked import PREFIX, Asked
from canaryd.worker.telemetry.nvml_links import read_links
from canaryd.worker.telemetry.sysfs import Fact, aer, attempt, only, path_setting

_problems: list[str] = []


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the GPUs and MIG instances, with identity and versions; raise `Unavailable` if NVML cannot start.

    A GPU that cannot be identified is named after its PCI address or number; `problems` gives the reason.
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
    """Yield a device for each GPU number in `silent` (number → reason why this GPU could not be identified).

    The device is named after its PCI address, or after its number. If NVML gives no address, the next PCI function is
    assumed that NVML knows and that is not in `taken` (addresses of answering GPUs); both numbers and functions are in
    the order of the bus.
    """
    places = {index: _address(nvml, index) for index in silent}
    functions = {d.detail["bus_id"]: d for d in on_the_bus(root) if d.backend == "cuda"} if silent else {}
    free = (bus_id for bus_id in functions if bus_id not in {*taken, *places.values()} and _knows(nvml, bus_id))
    for index, why in silent.items():
        bus_id = places[index] or next(free, "")
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
    """Return the PCI address of the GPU with this NVML number, or "" if NVML does not give it."""
    try:
        handle = ask_nvml(nvml, "nvmlDeviceGetHandleByIndex", index)
        return values.pci_address(ask_nvml(nvml, "nvmlDeviceGetPciInfo", handle))
    except (Missing, Unavailable):
        return ""


def _knows(nvml: ModuleType, bus_id: str) -> bool:
    """Return whether NVML counts the GPU at an address, even if that GPU does not answer."""
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
    """Yield the readings of a GPU or a MIG instance; raise `Unavailable` if the device or NVML does not answer.

    If `memory` is a directory that outlives this process, constant values are asked for only once a day.
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
        asked = Asked(plain, handle)
        yield from _merged([*_rows_of(asked, USE), *_use(asked)])
        yield from (f for f in _errors(asked, "ecc_errors_total", 0) if isinstance(f, Reading))
        return
    asked = Asked(plain, handle, memory, device.uuid)
    facts = list(_facts(asked))
    *rest, advice = facts
    if isinstance(advice, Absent) and any(isinstance(f, Absent) and f.code == RESET_REQUIRED for f in facts):
        # Drivers before 570 give no advice: a call that they refuse until a reset is their advice. Later ones refuse
        # calls while a change of MIG waits for a reset, and advise nothing.
        advice = Reading(name="recovery_action", value=1, unit="1", labels={"action": "reset"})
    yield from _merged([*rest, advice])
    asked.keep()
    if bus_id := device.detail.get("bus_id"):
        yield from aer(root, bus_id)


def _settings(settings: Mapping[str, Any]) -> Path:
    only(settings, "nvidia_telemetry", "sysfs")
    return path_setting(settings, "sysfs", "/sys")


def _known(asked: Asked, details: Mapping[str, tuple[str, Check, int | str | None]]) -> dict[str, str]:
    found = {}
    for key, (name, check, part) in details.items():
        with contextlib.suppress(Missing):
            found[key] = str(asked.value(name, check=check, part=part))
    return found


DETAILS: Mapping[str, tuple[str, Check, int | str | None]] = {
    "bus_id": ("PciInfo", values.pci_address, None),
    "memory_bytes": ("MemoryInfo", parse_count, "total"),
    "architecture": ("Architecture", partial(values.word, values.ARCHITECTURES), None),
    "capability": ("CudaComputeCapability", values.capability, None),
    "pcie_generation_max": ("MaxPcieLinkGeneration", parse_count, None),
    "pcie_width_max": ("MaxPcieLinkWidth", parse_count, None),
    "board_id": ("BoardId", values.hexadecimal, None),
    "module_id": ("ModuleId", parse_count, None),
}
TEXTS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "serial": ("Serial", ()),
    "board_part_number": ("BoardPartNumber", ()),
    "vbios": ("VbiosVersion", ()),
    "inforom": ("InforomImageVersion", ()),
    "inforom_ecc": ("InforomVersion", (1,)),
    "inforom_power": ("InforomVersion", (2,)),
    "gsp_firmware": ("GspFirmwareVersion", ()),
}
SHARED = (
    *("serial", "board_part_number", "bus_id", "driver", "cuda", "vbios", "inforom", "gsp_firmware", "architecture"),
    *("capability", "confidential_computing"),
)
"""Names of facts that a MIG instance takes from its GPU."""
OF_INSTANCE: Mapping[str, tuple[str, Check, int | str | None]] = {
    "gpu_instance_id": ("GpuInstanceId", parse_count, None),
    "compute_instance_id": ("ComputeInstanceId", parse_count, None),
    "memory_bytes": ("MemoryInfo", parse_count, "total"),
    "multiprocessors": ("Attributes", parse_count, "multiprocessorCount"),
}


def _gpu(nvml: ModuleType, handle: Any, uuid: str, index: int) -> Device:
    asked = Asked(nvml, handle)
    detail = {key: ask_text(nvml, f"{PREFIX}{name}", handle, *which) for key, (name, which) in TEXTS.items()}
    detail |= {"driver": asked.driver, **_known(asked, DETAILS)}
    with contextlib.suppress(Missing):
        detail["cuda"] = values.cuda_version(ask_nvml(nvml, "nvmlSystemGetCudaDriverVersion"))
    detail["confidential_computing"] = _confidential(nvml)
    with contextlib.suppress(Missing):
        detail["nvlinks"] = str(asked.field([(LINKS, 0)], LINKS))
    with contextlib.suppress(Missing):
        fabric = _fabric_info(nvml, handle)
        if any(cluster := bytes(fabric.clusterUuid)):  # zeros: the fabric of one machine
            detail |= {"fabric_cluster": str(UUID(bytes=cluster)), "fabric_clique": str(fabric.cliqueId)}
    return Device(
        uuid=uuid,
        backend="cuda",
        index=index,
        model=ask_text(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        detail={k: v for k, v in detail.items() if v},
    )


def _confidential(nvml: ModuleType) -> str:
    """Return "off", "on", or either with the mode of several GPUs ("on, nvle"); "" if the driver does not say it."""
    found = ""
    with contextlib.suppress(Missing, AttributeError):  # an older package has no structure for the settings
        found = values.word(values.SWITCHED, ask_nvml(nvml, "nvmlSystemGetConfComputeState").ccFeature)
        settings = nvml.c_nvmlSystemConfComputeSettings_v1_t()
        code = ask_nvml(nvml, "nvmlSystemGetConfComputeSettings", byref(settings))  # returned by pynvml, not raised
        if not code and settings.multiGpuMode:
            found += f", {values.word(values.PROTECTIONS, settings.multiGpuMode)}"
    return found


def _instances(nvml: ModuleType, handle: Any, gpu: Device) -> Iterator[Device]:
    """Yield the MIG instances of a GPU; add a sentence to the problems for each unidentified one."""
    for number, instance in instance_handles(nvml, handle):
        uuid = ask_text(nvml, "nvmlDeviceGetUUID", instance)
        if not uuid:
            _problems.append(f"MIG instance {number} of GPU {gpu.index} could not be identified: it has no UUID")
            continue
        model = ask_text(nvml, "nvmlDeviceGetName", instance)
        detail = {"instance": str(number), "profile": model.partition(" MIG ")[2]}
        detail |= _known(Asked(nvml, instance), OF_INSTANCE) | {name: gpu.detail.get(name, "") for name in SHARED}
        yield Device(
            uuid=uuid,
            backend="cuda",
            index=gpu.index,
            model=model or f"{gpu.model} MIG",
            parent=gpu.uuid,
            detail={k: v for k, v in detail.items() if v},
        )


Names = str | tuple[str, ...]


class Row(NamedTuple):
    """The definition of one reading: its name, unit and labels, and the NVML call or field that gives the value."""

    name: str
    source: Names | int
    """Name of an NVML call, or several names of which the newest known one is called, or the number of a field."""
    check: Check = parse_count
    unit: str = "1"
    labels: Mapping[str, str] = MappingProxyType({})
    arguments: tuple[int, ...] = ()
    part: int | str | None = None


def _rows(name: str, source: Names, check: Check, unit: str, label: str, words: Iterable[str]) -> Iterator[Row]:
    """Yield one row for each of the `words`; the NVML call takes the position of the word as its argument."""
    yield from (Row(name, source, check, unit, {label: word}, (number,)) for number, word in enumerate(words))


def _parts(
    name: str, source: Names, unit: str, label: str, words: Mapping[str, int | str], check: Check
) -> Iterator[Row]:
    yield from (Row(name, source, check, unit, {label: word}, part=part) for word, part in words.items())


def _numbers(name: str, unit: str, label: str, numbers: Mapping[str, int], check: Check) -> Iterator[Row]:
    yield from (Row(name, number, check, unit, {label: word}) for word, number in numbers.items())


USE = (
    Row("memory_total_bytes", "MemoryInfo", unit="bytes", part="total"),
    Row("memory_used_bytes", "MemoryInfo", unit="bytes", part="used"),
)
CELSIUS, HERTZ, WATTS = "celsius", "hertz", "watts"
READINGS = (
    # In this order: correctable, uncorrectable, pending, failed.
    *_parts("row_remap_rows", "RemappedRows", "1", "cause", {"correctable": 0, "uncorrectable": 1}, parse_count),
    Row("row_remap_pending", "RemappedRows", values.flag, part=2),
    Row("row_remap_failed", "RemappedRows", values.flag, part=3),
    *_parts("row_remap_banks", "RowRemapperHistogram", "1", "available", {b: b for b in values.BANKS}, parse_count),
    Row("temperature_celsius", ("TemperatureV", "Temperature"), values.degrees, CELSIUS, {"sensor": "core"}, (0,)),
    *_rows(
        "temperature_threshold_celsius", "TemperatureThreshold", values.degrees, CELSIUS, "threshold", values.THRESHOLDS
    ),
    Row("temperature_margin_celsius", "MarginTemperature", values.margin, CELSIUS),
    Row("power_watts", "PowerUsage", values.thousandths, WATTS),
    Row("power_limit_watts", "EnforcedPowerLimit", values.thousandths, WATTS, {"limit": "enforced"}),
    Row("power_limit_watts", "PowerManagementDefaultLimit", values.thousandths, WATTS, {"limit": "default"}),
    *_parts(
        "power_limit_watts",
        *("PowerManagementLimitConstraints", WATTS, "limit"),
        {"min": 0, "max": 1},
        values.thousandths,
    ),
    Row("energy_joules_total", "TotalEnergyConsumption", values.thousandths, "joules"),
    *_rows("clock_hertz", "ClockInfo", values.hertz, HERTZ, "domain", values.CLOCKS),
    *_rows("clock_max_hertz", "MaxClockInfo", values.hertz, HERTZ, "domain", values.CLOCKS),
    Row("performance_state", "PerformanceState", values.performance_state),
    Row("pcie_generation", "CurrPcieLinkGeneration"),
    Row("pcie_generation_max", "MaxPcieLinkGeneration"),
    Row("pcie_width", "CurrPcieLinkWidth"),
    Row("pcie_width_max", "MaxPcieLinkWidth"),
    Row("pcie_replays_total", "PcieReplayCounter"),
    Row("persistence_mode", "PersistenceMode", values.flag),
    Row("mig_enabled", "MigMode", values.flag, part=0),
    *_parts("utilization_ratio", "UtilizationRates", "1", "engine", {"gpu": "gpu", "memory": "memory"}, values.share),
    *_numbers("retired_pages", "1", "cause", {"single_bit": 29, "double_bit": 30}, parse_count),
    Row("retired_pages_pending", 31, values.flag),
    Row("temperature_celsius", 82, values.degrees, CELSIUS, {"sensor": "memory"}),
    *_numbers("temperature_margin_threshold_celsius", CELSIUS, "threshold", values.MARGINS, values.margin),
    *_numbers("throttle_seconds_total", "seconds", "reason", values.THROTTLED, values.seconds),
)
"""Readings that need only one call of NVML, or one field."""
LINKS, RECOVERY = 91, 230
"""NVML field numbers: number of NVLinks, and the driver's advice on recovery."""


def _facts(asked: Asked) -> Iterator[Fact]:
    """Yield all readings of a GPU that NVML gives, the driver's advice last."""
    hardware = values.hardware_throttle_fields(asked.driver)
    rows = (*READINGS, *_numbers("throttle_seconds_total", "seconds", "reason", hardware, values.seconds))
    wanted = [(row.source, 0) for row in rows if isinstance(row.source, int)] + [(LINKS, 0), (RECOVERY, 0)]
    field = partial(asked.field, wanted)
    yield from _ecc(asked)
    yield from _rows_of(asked, (*rows, *USE), wanted)
    for reason in values.HARDWARE_THROTTLED if not hardware else ():
        key = reading_key("throttle_seconds_total", {"reason": reason})
        yield Absent(name=key, reason="this driver has no known field for it")
    yield from _fans(asked)
    yield from _throttle(asked)
    yield from _use(asked)
    yield _worded("compute_mode", "mode", values.COMPUTE_MODES, partial(asked.call, "ComputeMode"))
    yield from _fabric(asked)
    try:
        links, why = field(LINKS), Missing("this device has no NVLink")
    except Missing as error:
        links, why = 0, error
    for name in ("nvlink_up", "nvlink_errors_total") if not links else ():
        yield Absent(name=name, reason=str(why), code=why.code)
    if links:
        yield from read_links(asked, range(links))
    yield _worded("recovery_action", "action", values.RECOVERIES, partial(field, RECOVERY))


def _rows_of(asked: Asked, rows: Iterable[Row], fields: Iterable[tuple[int, int]] = ()) -> Iterator[Fact]:
    for row in rows:
        if isinstance(row.source, int):
            ask = partial(asked.field, fields, row.source, check=row.check)
        else:
            ask = partial(asked.value, row.source, *row.arguments, check=row.check, part=row.part)
        yield attempt(row.name, ask, row.unit, **row.labels)


def _worded(name: str, label: str, words: tuple[str, ...], ask: Callable[[], Any]) -> Fact:
    """Return a reading with the value 1 and a label: the word, in `words`, for the number that `ask` returns."""
    try:
        return attempt(name, lambda: 1, **{label: values.word(words, ask())})
    except Missing as missing:
        return Absent(name=name, reason=str(missing), code=missing.code)


def _merged(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield the facts; if all facts of one name are absent for the same reason, yield one `Absent` for the name."""
    grouped: dict[str, list[Fact]] = {}
    for fact in facts:
        grouped.setdefault(fact.name.partition("{")[0], []).append(fact)
    for name, group in grouped.items():
        reasons = {(f.reason, f.code) if isinstance(f, Absent) else None for f in group}
        if len(group) > 1 and len(reasons) == 1 and (shared := reasons.pop()):
            yield Absent(name=name, reason=shared[0], code=shared[1])
        else:
            yield from group


def _ecc(asked: Asked) -> Iterator[Fact]:
    for part, when in enumerate(("current", "pending")):
        yield attempt("ecc_enabled", partial(asked.value, "EccMode", check=values.flag, part=part), when=when)
    try:
        is_off = asked.call("EccMode")[0] == 0
    except Missing:
        is_off = False
    for counter, name in enumerate(("ecc_errors_total", "ecc_aggregate_errors_total")):
        facts = _errors(asked, name, counter)
        yield from (Absent(name=f.name, reason="error correction is off") for f in facts) if is_off else facts
    status = partial(asked.once, "sram", partial(_sram, asked))
    for name, member, labels in values.SRAM_STATUS:
        check = values.flag if member == "bThresholdExceeded" else parse_count
        yield attempt(name, lambda m=member, c=check: c(getattr(status(), m)), **labels)  # type: ignore[misc]


def _errors(asked: Asked, name: str, counter: int) -> list[Fact]:
    """Return the error counts of DRAM and SRAM, or of DRAM and each cache, or one total; nothing is counted twice."""

    def at(location: str, call: str, *code: int) -> list[Fact]:
        each = enumerate(values.KINDS)
        return [
            attempt(name, partial(asked.value, call, n, counter, *code), kind=k, location=location) for n, k in each
        ]

    counters = "MemoryErrorCounter"
    inside = at("sram", counters, values.SRAM)
    if all(isinstance(fact, Absent) and fact.code == NOT_SUPPORTED for fact in inside):
        caches = [fact for location, code in values.CACHES.items() for fact in at(location, counters, code)]
        inside = [fact for fact in caches if isinstance(fact, Reading)] or inside
    facts = at("dram", counters, values.DRAM) + inside
    if not any(isinstance(fact, Reading) for fact in facts):
        total = at("all", "TotalEccErrors")
        facts = total if any(isinstance(fact, Reading) for fact in total) else facts
    return facts


def _sram(asked: Asked) -> Any:
    """Return NVML's structure with the state of SRAM errors, which the driver gives only to root."""
    if not hasattr(asked.nvml, "c_nvmlEccSramErrorStatus_v1_t"):
        raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
    status = asked.nvml.c_nvmlEccSramErrorStatus_v1_t()
    ask_nvml(asked.nvml, "nvmlDeviceGetSramEccErrorStatus", asked.handle, byref(status))
    return status


def _fans(asked: Asked) -> Iterator[Fact]:
    try:
        fans = asked.value("NumFans")
    except Missing as missing:
        yield Absent(name="fan_ratio", reason=str(missing), code=missing.code)
        return
    for fan in range(fans):
        yield attempt("fan_ratio", partial(asked.value, "FanSpeed_v2", fan, check=values.fan_ratio), fan=str(fan))
    if not fans:
        yield Absent(name="fan_ratio", reason="this device has no fan of its own")


def _throttle(asked: Asked) -> Iterator[Fact]:
    def ask(which: str) -> int:
        return int(asked.value((f"{which}ClocksEventReasons", f"{which}ClocksThrottleReasons")))

    try:
        active = ask("Current")
    except Missing as missing:
        yield Absent(name="throttle_active", reason=str(missing), code=missing.code)
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


def _fabric_info(nvml: ModuleType, handle: Any) -> Any:
    """Return the newest structure about a GPU's NVLink fabric that package and driver know."""
    missing = Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND)
    for name, structure in values.FABRIC_CALLS:
        if not hasattr(nvml, structure):
            continue
        info = getattr(nvml, structure)()
        try:
            ask_nvml(nvml, name, handle, byref(info))
        except Missing as error:
            missing = error
            if error.code in (FUNCTION_NOT_FOUND, *UNKNOWN_VERSION):
                continue
            break
        if 1 <= info.state <= values.JOINED:
            return info
        raise Missing("not part of an NVLink fabric" if info.state == 0 else f"the fabric is unknown({info.state})")
    raise missing


def _fabric(asked: Asked) -> Iterator[Fact]:
    """Yield whether a GPU joined its fabric and, once it did, each fault that the driver can report."""
    info = partial(asked.once, "fabric", partial(_fabric_info, asked.nvml, asked.handle))

    def health(member: str) -> int:
        if info().state != values.JOINED:
            raise Missing("the device has not joined its fabric")
        if value := getattr(info(), member, 0):  # older structures lack it
            return int(value)
        raise Missing(REASONS[NOT_SUPPORTED], NOT_SUPPORTED)

    def fault(name: str, right: str) -> int:
        parts = f"SHIFT_{name}", f"WIDTH_{name}", f"{name}_NOT_SUPPORTED", f"{name}_{right}"
        try:
            shift, width, none, fine = (getattr(asked.nvml, f"NVML_GPU_FABRIC_HEALTH_MASK_{p}") for p in parts)
        except AttributeError as error:
            raise Missing(OLD_PACKAGE, FUNCTION_NOT_FOUND) from error
        if (value := health("healthMask") >> shift & width) == none:
            raise Missing(REASONS[NOT_SUPPORTED], NOT_SUPPORTED)
        return int(value != fine)

    yield attempt("fabric_ready", lambda: int(info().state == values.JOINED and info().status == 0))
    for kind, names in values.FABRIC_FAULTS.items():
        yield attempt("fabric_fault", partial(fault, *names), fault=kind)
    for kind, number in values.FABRIC_SUMMARIES.items():
        yield attempt("fabric_fault", lambda n=number: int(health("healthSummary") == n), fault=kind)  # type: ignore[misc]


def _use(asked: Asked) -> Iterator[Fact]:
    """Yield the memory that the driver reserves, and of the processes the number, their memory and the newest's age."""
    reserved = partial(asked.value, "MemoryInfo", asked.nvml.nvmlMemory_v2, part="reserved")
    yield attempt("memory_reserved_bytes", reserved, "bytes")
    processes = partial(asked.call, "ComputeRunningProcesses")
    yield attempt("compute_processes", lambda: len(processes()))
    yield attempt("compute_processes_memory_bytes", lambda: sum(_held(p) for p in processes()), "bytes")
    with contextlib.suppress(Missing):
        if ages := [age for p in processes() if (age := _age(p.pid)) is not None]:
            yield Reading(name="compute_process_age_seconds", value=min(ages), unit="seconds")


def _age(pid: int) -> float | None:
    """Return the seconds since a process began; None for a worker of canaryd, and for a process that is not visible."""
    try:
        own = b"canaryd/worker/" in Path(f"/proc/{pid}/cmdline").read_bytes()
        began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # ticks since boot (proc(5))
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return None if own else max(0.0, up - began / os.sysconf("SC_CLK_TCK"))


def _held(process: Any) -> int:
    if process.usedGpuMemory is None:
        raise Missing("the driver does not say how much memory each process uses")
    return parse_count(process.usedGpuMemory)
