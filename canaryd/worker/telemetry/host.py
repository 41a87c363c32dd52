"""The machine around the accelerators: memory errors, machine checks, temperatures, clocks, load and pressure.

On Linux the values come from /proc and /sys (docs/readings.md lists the file of each); on other systems psutil gives
some of them. No series is per core, so that a large machine has few of them.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from canaryd.facts import Reading
from canaryd.model import Device
from canaryd.probe import Absent
from canaryd.worker.telemetry import machine
from canaryd.worker.telemetry.interface import Unavailable
from canaryd.worker.telemetry.sysfs import (
    Denied,
    Fact,
    Unreadable,
    attempt,
    celsius,
    entries,
    inputs,
    line,
    only,
    optional_entries,
    optional_text,
    path_setting,
    read_bytes,
    read_count,
    read_text,
    rpm,
    thresholds,
    unique,
)

MOST_SENSORS = 128
"""Most temperatures and fans that are read: each is stored as a series, and some need a transfer over a slow bus."""
OF_ACCELERATORS = ("0x03", "0x12")
"""PCI classes of display controllers and accelerators, whose sensors the vendors' modules read."""
MOST_CLOCKS = 16
"""Most processors whose clock is read: before Linux 5.18 a read can take 10 ms (arch/x86/kernel/cpu/aperfmperf.c)."""
MOST_PROCESSORS = 1 << 17
"""Largest plausible number of processors in a list; the kernel itself can be built for 8,192 at most."""
KINDS = (("corrected", "ce"), ("uncorrected", "ue"))
"""Kind of memory error, and its abbreviation in the names of EDAC's files."""
UNWATCHED = "no EDAC driver watches the memory: errors are not known"


class Roots(NamedTuple):
    """Paths of the kernel's file trees."""

    sysfs: Path
    proc: Path


def roots(settings: Mapping[str, Any]) -> Roots:
    """Return the paths in the settings sysfs and proc; raise `ValueError` for a wrong or unknown setting."""
    only(settings, "host_telemetry", *Roots._fields)
    return Roots(path_setting(settings, "sysfs", "/sys"), path_setting(settings, "proc", "/proc"))


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return [], because the processors are found by the code that lists the software under test."""
    roots(settings)
    return []


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the present readings of the machine; raise `Unavailable` for a device that is not its processors."""
    if device.backend != "cpu":
        raise Unavailable(f"{device.name} is not a processor: host telemetry is read for the cpu device")
    where = roots(settings)
    if sys.platform != "linux":
        yield from portable()
        return
    yield from edac(where.sysfs)
    yield attempt("machine_check_exceptions_total", partial(_machine_checks, where.proc))
    yield from throttling(where.sysfs)
    yield from sensors(where.sysfs)
    yield from clocks(where)
    yield attempt("load_average", lambda: float(line(where.proc / "loadavg", r"^([0-9]{1,9}\.[0-9]{1,9}) ")))
    yield from memory(where.proc)
    yield from pressure(where.proc)
    yield from cores(where.sysfs)
    yield from clock_source(where.sysfs)
    yield attempt("boot_time_seconds", lambda: int(line(where.proc / "stat", r"^btime ([0-9]{1,12})$")), "seconds")
    yield attempt("crash_records", partial(_crash_records, where))


def edac(sysfs: Path) -> Iterator[Fact]:
    """Yield the memory errors of each memory controller and module; they are absent if there is no controller.

    The count is per module if the driver gives it, else per channel and row (the older layout), else per controller.
    """
    controllers, reason = _listed(sysfs / "devices/system/edac/mc", "mc[0-9]*")
    if not controllers:
        for name in ("edac_controllers", "edac_errors_total"):
            yield Absent(name=name, reason=reason or UNWATCHED)
        return
    yield Reading(name="edac_controllers", value=len(controllers), unit="1")
    for controller in controllers:
        try:
            counters = _edac_counters(controller)
        except Unreadable as error:
            yield Absent(name=f"edac_errors_total{{controller={controller.name}}}", reason=str(error))
            continue
        for kind, module, path in counters:
            read = partial(read_count, path)
            yield attempt("edac_errors_total", read, kind=kind, controller=controller.name, dimm=module)


def _listed(directory: Path, pattern: str) -> tuple[list[Path], str]:
    """Return (matching entries of a directory, reason); the reason is "" unless this user may not list them."""
    try:
        return entries(directory, pattern), ""
    except Unreadable as error:
        return [], str(error) if isinstance(error, Denied) else ""


def _edac_counters(controller: Path) -> list[tuple[str, str, Path]]:
    """Return (kind of error, module, file) for each counter of a memory controller; each module has a unique name."""
    modules = [*entries(controller, "dimm[0-9]*"), *entries(controller, "rank[0-9]*")]
    modules = [path for path in modules if (path / "dimm_ce_count").exists()]
    names = unique([(" ".join(optional_text(path / "dimm_label").split())[:60], path.name) for path in modules])
    found = [
        (kind, name, path / f"dimm_{file}_count")
        for path, name in zip(modules, names, strict=True)
        for kind, file in KINDS
    ]
    if not found:
        for row in entries(controller, "csrow[0-9]*"):
            channels = entries(row, "ch[0-9]*_ce_count")
            found += [("corrected", f"{row.name} {path.name.removesuffix('_ce_count')}", path) for path in channels]
            found.append(("uncorrected", row.name, row / "ue_count"))
    if not found:
        return [(kind, "all", controller / f"{file}_count") for kind, file in KINDS]
    return found + [(kind, "unknown", controller / f"{file}_noinfo_count") for kind, file in KINDS]


def _machine_checks(proc: Path) -> int:
    """Return the machine check exceptions (MCE) of all online processors together; the row MCP only counts polls."""
    for row in reversed(read_bytes(proc / "interrupts").splitlines()):
        if match := re.fullmatch(rb" *MCE:((?: +[0-9]{1,20})+)(?: +[A-Z].*)?", row):
            return sum(map(int, match.group(1).split()))
    raise Unreadable("the kernel counts no machine checks here: a virtual machine, or not an x86 processor")


def throttling(sysfs: Path) -> Iterator[Fact]:
    """Yield how often heat has slowed down cores, and how often it has slowed down packages.

    Each processor has both counters: siblings share those of a core, and all processors of a package share those of the
    package (Documentation/ABI/testing/sysfs-devices-system-cpu). Heat slows many cores down at once, so a sum would
    depend on the number of cores: the highest count of all is used.
    """
    try:
        processors = entries(sysfs / "devices/system/cpu", "cpu[0-9]*")
        processors = [path for path in processors if (path / "thermal_throttle").exists()]
        reason = "this processor or kernel does not count thermal throttling"
    except Unreadable as error:
        processors, reason = [], str(error)
    for scope in ("core", "package"):
        if processors:
            yield attempt("throttle_events_total", partial(_throttled, processors, scope), scope=scope)
        else:
            yield Absent(name=f"throttle_events_total{{scope={scope}}}", reason=reason)


def _throttled(processors: list[Path], scope: str) -> int:
    return max(read_count(path / f"thermal_throttle/{scope}_throttle_count") for path in processors)


def sensors(sysfs: Path) -> Iterator[Fact]:
    """Yield the machine's temperatures, critical temperatures and fans; sensors of accelerators are left out.

    A sensor is called "chip/device/label". The device distinguishes chips of one kind, whose numbers change at a
    reboot. If several sensors have the same name, and for the cores of a processor, only the hottest is yielded.
    """
    temperatures: dict[str, list[Path]] = defaultdict(list)
    fans: dict[str, list[Path]] = defaultdict(list)
    chips, denied = _listed(sysfs / "class/hwmon", "hwmon*")
    for chip in chips:
        if optional_text(chip / "device/class")[:4] in OF_ACCELERATORS:
            continue
        owner = f"{optional_text(chip / 'name')[:40] or 'chip'}/{_owner(chip)}"
        with contextlib.suppress(Unreadable):  # it was removed meanwhile
            for path, label in inputs(chip, "temp"):
                temperatures[f"{owner}/{re.sub('^Core [0-9]+$', 'hottest core', label)}"].append(path)
            for path, label in inputs(chip, "fan"):
                fans[f"{owner}/{label}"].append(path)
    for zone in optional_entries(sysfs / "class/thermal", "thermal_zone*"):
        if not optional_entries(zone, "hwmon*"):  # one that has such a chip was read above
            temperatures[f"{optional_text(zone / 'type')[:40] or 'zone'}/{zone.name}"].append(zone / "temp")
    for name, label, unit, found, read in (
        ("temperature_celsius", "sensor", "celsius", temperatures, celsius),
        ("fan_rpm", "fan", "1", fans, rpm),
    ):
        if not found:
            yield Absent(name=name, reason=denied or "neither a hwmon chip nor a thermal zone gives it")
        for sensor, paths in itertools.islice(found.items(), MOST_SENSORS):
            yield attempt(name, lambda: max(map(read, paths)), unit, **{label: sensor})  # noqa: B023 - called at once
            yield from thresholds(paths[0], sensor, "crit") if found is temperatures else ()
        if len(found) > MOST_SENSORS:
            reason = f"only the first {MOST_SENSORS} of {len(found)} are read"
            yield Absent(name=f"{name}{{{label}=others}}", reason=reason)


def _owner(chip: Path) -> str:
    """Return the name of a sensor chip's device ("coretemp.0", "nvme0", "0000:00:18.3"), or the chip's own name."""
    device = chip / "device"
    return device.resolve().name if device.exists() else chip.name


def clocks(where: Roots) -> Iterator[Fact]:
    """Yield the mean of the processors' present clocks, and the highest clock that is possible."""
    policies = optional_entries(where.sysfs / "devices/system/cpu/cpufreq", "policy[0-9]*")
    sample = policies[:: max(1, -(-len(policies) // MOST_CLOCKS))]
    now, most = (
        [int(khz) * 1e3 for path in sample if re.fullmatch("[1-9][0-9]{0,9}", khz := optional_text(path / name))]
        for name in ("scaling_cur_freq", "cpuinfo_max_freq")
    )
    if not now:
        text = optional_text(where.proc / "cpuinfo")
        now = [float(mhz) * 1e6 for mhz in re.findall(r"^cpu MHz\s*:\s*([0-9]{1,6}\.[0-9]{1,6})$", text, re.MULTILINE)]
    for name, hertz in (("clock_hertz", sum(now) / max(1, len(now))), ("clock_max_hertz", max(most, default=0.0))):
        if hertz:
            yield Reading(name=name, value=round(hertz), unit="hertz", labels={"domain": "cpu"})
        else:
            yield Absent(name=f"{name}{{domain=cpu}}", reason="neither a cpufreq driver nor the processor gives it")


def memory(proc: Path) -> Iterator[Fact]:
    """Yield memory and swap of the machine."""

    def kib(field: str) -> int:
        return int(line(proc / "meminfo", rf"^{field}:\s+([0-9]{{1,18}}) kB$")) * 1024

    def used() -> int:
        if (free := kib("SwapFree")) > (total := kib("SwapTotal")):
            raise Unreadable(f"{proc / 'meminfo'} gives more free swap than swap")
        return total - free

    yield attempt("memory_total_bytes", partial(kib, "MemTotal"), "bytes")
    yield attempt("memory_available_bytes", partial(kib, "MemAvailable"), "bytes")
    yield attempt("swap_total_bytes", partial(kib, "SwapTotal"), "bytes")
    yield attempt("swap_used_bytes", used, "bytes")


def pressure(proc: Path) -> Iterator[Fact]:
    """Yield the shares of the last minute in which work waited for a resource (Documentation/accounting/psi.rst)."""
    for resource in ("cpu", "memory", "io"):
        for kind in ("some", "full"):
            read = partial(_pressure, proc / "pressure" / resource, kind)
            yield attempt("pressure_ratio", read, resource=resource, kind=kind)


def _pressure(path: Path, kind: str) -> float:
    if (path.name, kind) == ("cpu", "full"):
        raise Unreadable("not defined for a whole machine: the kernel writes 0")
    return round(float(line(path, rf"^{kind} .*\bavg60=([0-9]{{1,3}}\.[0-9]{{1,6}})\b")) / 100, 6)


def cores(sysfs: Path) -> Iterator[Fact]:
    """Yield the number of online processors, and of processors that are present but offline."""
    base = sysfs / "devices/system/cpu"
    yield attempt("cpu_cores", lambda: len(_ids(base / "online")), state="online")
    # The kernel's own list `offline` also contains processors that could be plugged in.
    yield attempt("cpu_cores", lambda: len(_ids(base / "present") - _ids(base / "online")), state="offline")


def _ids(path: Path) -> set[int]:
    text = read_text(path)
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        raise Unreadable(f"{path} holds {text[:40]!r}, not a list of processors")
    spans = [(int(first), int(last or first)) for first, _, last in (part.partition("-") for part in text.split(","))]
    if sum(last - first + 1 for first, last in spans if last >= first) > MOST_PROCESSORS:
        raise Unreadable(f"{path} lists more than {MOST_PROCESSORS} processors: {text[:40]!r}…")
    return {number for first, last in spans for number in range(first, last + 1)}


def clock_source(sysfs: Path) -> Iterator[Fact]:
    """Yield the kernel's clock source."""
    try:
        source = read_text(sysfs / "devices/system/clocksource/clocksource0/current_clocksource")
    except Unreadable as error:
        yield Absent(name="clock_source", reason=str(error))
    else:
        yield Reading(name="clock_source", value=1, unit="1", labels={"source": source[:40]})


def _crash_records(where: Roots) -> int:
    """Return the number of crash records in pstore; raise `Unreadable` if pstore has no place to store them."""
    # Where pstore is not mounted, its mount point is an empty directory too.
    if not re.search(r"^\S+ \S+ pstore ", optional_text(where.proc / "mounts"), re.MULTILINE):
        raise Unreadable("pstore is not mounted, so it cannot show whether the last kernel crashed")
    if optional_text(where.sysfs / "module/pstore/parameters/backend") in ("", "(null)"):
        raise Unreadable("pstore has no storage on this machine, so it cannot keep records of a crash")
    return len(entries(where.sysfs / "fs/pstore"))


def portable() -> Iterator[Fact]:
    """Yield the readings of psutil where there is no /proc, above all on macOS."""
    system = platform.system()
    for name in ("edac_errors_total", "machine_check_exceptions_total", "temperature_celsius", "fan_rpm"):
        yield Absent(name=name, reason=f"not read on {system}")
    for name, unit, labels, function in PORTABLE:
        yield attempt(name, partial(_from_psutil, function), unit, **labels)


PORTABLE: tuple[tuple[str, str, Mapping[str, str], Callable[[Any], float | None]], ...] = (
    ("load_average", "1", {}, lambda psutil: psutil.getloadavg()[0]),
    ("memory_total_bytes", "bytes", {}, lambda psutil: psutil.virtual_memory().total),
    ("memory_available_bytes", "bytes", {}, lambda psutil: psutil.virtual_memory().available),
    ("swap_total_bytes", "bytes", {}, lambda psutil: psutil.swap_memory().total),
    ("swap_used_bytes", "bytes", {}, lambda psutil: psutil.swap_memory().used),
    ("boot_time_seconds", "seconds", {}, lambda psutil: psutil.boot_time()),
    ("cpu_cores", "1", {"state": "online"}, lambda psutil: psutil.cpu_count()),
    ("clock_hertz", "hertz", {"domain": "cpu"}, lambda psutil: psutil.cpu_freq().current * 1e6 or None),
    ("clock_max_hertz", "hertz", {"domain": "cpu"}, lambda psutil: psutil.cpu_freq().max * 1e6 or None),
)
"""Readings from psutil: name, unit, labels, and a function that returns the value, or None if it is unknown."""


def _from_psutil(function: Callable[[Any], float | None]) -> float:
    try:
        import psutil  # only needed away from Linux

        value = function(psutil)
    except Exception as error:  # noqa: BLE001 - psutil raises what the system's calls raise
        raise Unreadable(f"psutil: {type(error).__name__}: {error}") from None
    if value is None:
        raise Unreadable("psutil does not give it on this machine")
    return value


def facts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name → text of the machine's hardware and software for the inventory; unreadable values are left out."""
    where = roots(settings)
    if sys.platform != "linux":
        return {"kernel": f"{platform.release()} {platform.version()}"}
    return machine.facts(where.sysfs, where.proc)
