"""Apple silicon's GPU: the readings that macOS gives without root.

`sysctl` and `system_profiler` give the identity, `ioreg` gives the driver's own statistics, and `pmset -g therm` gives
thermal throttling. Temperatures, power and clocks need root (powermetrics), so they are absent. The machine's
processors and memory belong to the CPU device.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from canaryd.model import Device
from canaryd.probe import Absent
from canaryd.worker.telemetry.command import command_setting, output
from canaryd.worker.telemetry.interface import NotHere, Unavailable
from canaryd.worker.telemetry.sysfs import Fact, Unreadable, attempt, only

PATIENCE = 2.0
"""Seconds after which a command is abandoned."""
PROFILE_PATIENCE = 15.0
"""Seconds after which system_profiler is abandoned; it starts a service of its own."""
COMMANDS = {
    "sysctl": "/usr/sbin/sysctl",
    "ioreg": "/usr/sbin/ioreg",
    "pmset": "/usr/bin/pmset",
    "system_profiler": "/usr/sbin/system_profiler",
}
"""Name of a setting → path of the command on macOS."""
FACTS = ("hw.optional.arm64", "hw.model", "machdep.cpu.brand_string", "hw.memsize", "hw.ncpu", "kern.osproductversion")
LIMITS = {"cpu_speed": "CPU_Speed_Limit", "cpu_scheduler": "CPU_Scheduler_Limit"}
"""Reason for throttling → the value that pmset prints, in percent; 100 means no limit (pmset(1))."""


def devices(settings: Mapping[str, Any]) -> list[Device]:
    """Return the one GPU of an Apple silicon machine, or [] on other Macs; raise `Unavailable` on other systems."""
    commands = _commands(settings)
    facts = _facts(commands)
    if facts.get("hw.optional.arm64") != "1":
        return []
    detail = {"driver": f"macOS {facts['kern.osproductversion']}"} if "kern.osproductversion" in facts else {}
    try:
        text = output([commands["system_profiler"], "SPHardwareDataType"], PROFILE_PATIENCE)
    except Unreadable:
        text = ""
    profile = dict(re.findall(r"^\s+([^:\n]+):[ \t]+(\S.*)$", text, re.MULTILINE))
    for key, name in (
        ("serial", "Serial Number (system)"),
        ("board_part_number", "Model Number"),
        ("firmware", "System Firmware Version"),
    ):
        if name in profile:
            detail[key] = profile[name].strip()
    for key, name in (("product", "hw.model"), ("memory_bytes", "hw.memsize")):
        if name in facts:
            detail[key] = facts[name]
    identity = profile.get("Hardware UUID", "").strip().lower()
    return [
        Device(
            uuid=f"MPS-{identity or 'local'}",
            backend="mps",
            index=0,
            model=f"{facts.get('machdep.cpu.brand_string', 'Apple')} GPU",
            weak_identity=not identity,
            detail=detail,
        )
    ]


def read(device: Device, settings: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the readings of macOS about the GPU; raise `Unavailable` on anything but Apple silicon."""
    commands = _commands(settings)
    if device.backend != "mps":
        raise Unavailable(f"{device.name} is not an Apple GPU")
    facts = _facts(commands)
    if facts.get("hw.optional.arm64") != "1":
        raise Unavailable("this machine has no Apple silicon")
    yield attempt("memory_total_bytes", partial(_count, facts, "hw.memsize", "sysctl"), "bytes")
    try:
        statistics = _statistics(output([commands["ioreg"], "-r", "-d", "1", "-c", "AGXAccelerator"], PATIENCE))
    except Unreadable as error:
        for name in ("utilization_ratio", "memory_used_bytes", "device_recoveries_total"):
            yield Absent(name=name, reason=str(error))
    else:
        counted = partial(_count, statistics, source="ioreg")
        yield attempt("utilization_ratio", partial(_busy, statistics), engine="gpu")
        yield attempt("memory_used_bytes", partial(counted, "In use system memory"), "bytes")
        yield attempt("device_recoveries_total", partial(counted, "recoveryCount"))
    yield from _throttling(commands, facts)
    for name in ("temperature_celsius", "power_watts", "clock_hertz"):
        yield Absent(name=name, reason="macOS gives it only to root (powermetrics)")
    yield Absent(name="ecc_errors_total", reason="macOS gives no memory error counts")


def _commands(settings: Mapping[str, Any]) -> dict[str, str]:
    only(settings, "apple_telemetry", *COMMANDS)
    if sys.platform != "darwin" and "sysctl" not in settings:
        raise NotHere("this machine does not run macOS")
    return {name: command_setting(settings, name, default) for name, default in COMMANDS.items()}


def _facts(commands: Mapping[str, str]) -> dict[str, str]:
    """Return sysctl's values by name; names that this kernel does not have are left out (option -i)."""
    try:
        text = output([commands["sysctl"], "-i", *FACTS], PATIENCE)
    except Unreadable as error:
        raise Unavailable(str(error)) from error
    return dict(re.findall(r"^([a-z.0-9_]+):[ \t]*(\S.*?)\s*$", text, re.MULTILINE))


def _statistics(text: str) -> dict[str, str]:
    found = re.search(r'"PerformanceStatistics" = \{([^{}]*)\}', text)
    if not found:
        raise Unreadable("ioreg shows no statistics of an Apple GPU")
    return dict(re.findall(r'"([^"]+)"=(\d+)(?=,|$)', found.group(1)))


def _count(facts: Mapping[str, str], name: str, source: str) -> int:
    if not re.fullmatch(r"\d{1,18}", facts.get(name, "")):
        raise Unreadable(f"{source} gives no {name}")
    return int(facts[name])


def _busy(statistics: Mapping[str, str]) -> float:
    percent = _count(statistics, "Device Utilization %", "ioreg")
    if percent > 100:
        raise Unreadable(f"ioreg gives {percent} for a percentage")
    return percent / 100


def _throttling(commands: Mapping[str, str], facts: Mapping[str, str]) -> Iterator[Fact]:
    """Yield a reading for each reason that can throttle the machine, or `Absent` ones if pmset recorded nothing."""
    try:
        text = output([commands["pmset"], "-g", "therm"], PATIENCE)
    except Unreadable as error:
        yield Absent(name="throttle_active", reason=str(error))
        return
    for reason in ("thermal", "performance"):
        yield attempt("throttle_active", partial(_warning, text, reason), reason=f"{reason}_warning")
    for reason, name in LIMITS.items():
        yield attempt("throttle_active", partial(_limited, text, name, 100), reason=reason)
    cores = partial(_limited, text, "CPU_Available_CPUs", facts.get("hw.ncpu", ""))
    yield attempt("throttle_active", cores, reason="cpus_offline")


def _warning(text: str, kind: str) -> int:
    level = re.search(rf"{kind} warning level set to (\d{{1,3}})\.?\s*$", text, re.IGNORECASE | re.MULTILINE)
    if not level:
        raise Unreadable(f"macOS has recorded no {kind} warning level")
    return int(int(level.group(1)) > 0)


def _limited(text: str, name: str, full: int | str) -> int:
    value = re.search(rf"^\s*{name}\s*=\s*(\d{{1,4}})\s*$", text, re.MULTILINE)
    if not value or not str(full).isdigit():
        raise Unreadable(f"pmset gives no {name}")
    return int(int(value.group(1)) < int(full))
