"""What the kernel and vendors' tools say of a machine: /sys, /proc, the firmware's tables, npu-smi, macOS's commands.

Readers never raise but what they say (`Unreadable`, `Unavailable`); each fact is one of the table of readings, with its
labels, as a finite number that is not negative, or an absence with its reason, and no fact comes twice. Devices have
an identity, an address of the form that they should have, and nothing in them that steers a terminal.
"""
# ruff: noqa: PT017  a refusal is examined where it is caught: most inputs are none

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from canaryd.facts import Reading, printable
from canaryd.judge.telemetry.readings import READINGS
from canaryd.model import Device
from canaryd.probe import Absent, Skip
from canaryd.worker.telemetry import amd, apple, ascend, drm, host, intel, machine, pci, sysfs
from canaryd.worker.telemetry.interface import on_the_bus
from canaryd.worker.telemetry.sysfs import Unreadable
from tests.fuzz.material import Choices, modes, seed, stretched
from tests.fuzz.properties import finite, in_time, plain, scratch

DATA = Path(__file__).resolve().parents[2] / "data/vendors"
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
CARD = "class/drm/card1/device"
FUNCTION = "bus/pci/devices/0000:65:00.0"
SYSFS: Mapping[str, str] = {
    f"{CARD}/uevent": "DRIVER=amdgpu\nPCI_CLASS=38000\nPCI_SLOT_NAME=0000:65:00.0",
    f"{CARD}/class": "0x038000",
    f"{CARD}/device": "0x74a1",
    f"{CARD}/vendor": "0x1002",
    f"{CARD}/unique_id": "0x1f2e3d4c5b6a7988",
    f"{CARD}/serial_number": "692231001234",
    f"{CARD}/mem_info_vram_total": "206141652992",
    f"{CARD}/mem_info_vram_used": "100",
    f"{CARD}/gpu_busy_percent": "50",
    f"{CARD}/pcie_replay_count": "3",
    f"{CARD}/pp_dpm_sclk": "0: 132Mhz\n1: 2100Mhz *",
    f"{CARD}/ras/features": "feature mask: 0x1",
    f"{CARD}/ras/umc_err_count": "ue: 0\nce: 5\nde: 1",
    f"{CARD}/ras/gpu_vram_bad_pages": "0x0000 : 0x1000 : R\n0x0001 : 0x1000 : P",
    f"{CARD}/hwmon/hwmon3/power1_cap": "750000000",
    f"{CARD}/tile0/gt0/freq0/act_freq": "1200",
    f"{CARD}/tile0/gt0/freq0/rp0_freq": "1550",
    f"{CARD}/tile0/gt0/freq0/throttle/reason_pl1": "1",
    f"{CARD}/tile0/physical_vram_size_bytes": "0",
    f"{FUNCTION}/vendor": "0x10de",
    f"{FUNCTION}/class": "0x030200",
    f"{FUNCTION}/device": "0x2335",
    f"{FUNCTION}/current_link_speed": "32.0 GT/s PCIe",
    f"{FUNCTION}/max_link_speed": "32.0 GT/s PCIe",
    f"{FUNCTION}/current_link_width": "16",
    f"{FUNCTION}/max_link_width": "255",
    f"{FUNCTION}/aer_dev_correctable": "RxErr 0\nTOTAL_ERR_COR 7",
    f"{FUNCTION}/hwmon/hwmon3/temp1_input": "45000",
    f"{FUNCTION}/hwmon/hwmon3/temp1_label": "edge",
    f"{FUNCTION}/hwmon/hwmon3/temp1_crit": "100000",
    f"{FUNCTION}/hwmon/hwmon3/temp2_input": "65261850",
    f"{FUNCTION}/hwmon/hwmon3/temp2_fault": "1",
    f"{FUNCTION}/hwmon/hwmon3/fan1_input": "1200",
    f"{FUNCTION}/hwmon/hwmon3/power1_average": "300000000",
    f"{FUNCTION}/hwmon/hwmon3/energy1_input": "5000000",
    "devices/system/edac/mc/mc0/dimm0/dimm_ce_count": "2",
    "devices/system/edac/mc/mc0/dimm0/dimm_ue_count": "0",
    "devices/system/edac/mc/mc0/dimm0/dimm_label": "CPU_SrcID#0",
    "devices/system/edac/mc/mc0/ce_noinfo_count": "0",
    "devices/system/edac/mc/mc0/ue_noinfo_count": "0",
    "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "4",
    "devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "4",
    "devices/system/cpu/cpu0/topology/physical_package_id": "0",
    "devices/system/cpu/cpu0/topology/core_id": "0",
    "devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "2400000",
    "devices/system/cpu/online": "0-3,8",
    "devices/system/cpu/present": "0-15",
    "devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "devices/system/memory/block_size_bytes": "8000000",
    "class/hwmon/hwmon0/name": "coretemp",
    "class/hwmon/hwmon0/temp1_input": "51000",
    "class/hwmon/hwmon0/temp1_label": "Core 0",
    "class/thermal/thermal_zone0/type": "acpitz",
    "class/thermal/thermal_zone0/temp": "27800",
    "class/dmi/id/product_name": "PowerEdge",
    "module/amdgpu/version": "6.10.5",
}
PROC: Mapping[str, str] = {
    "interrupts": "      CPU0\n MCE:     0       1   Machine check exceptions\n MCP: 5 Machine check polls",
    "loadavg": "0.52 0.58 0.59 1/467 12345",
    "meminfo": "MemTotal:       32594832 kB\nMemAvailable:   22594832 kB\nSwapTotal: 8 kB\nSwapFree: 9 kB",
    "pressure/memory": "some avg10=0.00 avg60=1.25 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.5 avg300=0.00 total=0",
    "pressure/io": "some avg10=0.00 avg60=150.25 avg300=0.00 total=0",
    "stat": "cpu 1\nbtime 1700000000\nprocesses 5",
    "cpuinfo": "processor : 0\nmodel name : AMD EPYC\nflags : fpu hypervisor\nmicrocode : 0x1\ncpu MHz : 2400.000",
    "mounts": "pstore /sys/fs/pstore pstore rw 0 0",
    "sys/kernel/osrelease": "6.1.0",
}
TEXTS = (
    *("", "-1", "0", "18446744073709551615", "99999999999999999999", "0x", "0xffffffffffffffff", "nan", "1e5", "N/A"),
    *("\0", "\x1b[2J", "0-99999,99999-0", "0-3,", "5000000", "a" * 70_000, "1\n" * 3000, "\xff", "²", "- 1", "65535"),
)


def told(facts: Iterable[Reading | Absent]) -> None:
    """Check every fact, and that none comes twice."""
    seen: set[str] = set()
    for fact in facts:
        plain(fact)
        key = fact.key if isinstance(fact, Reading) else fact.name
        assert key not in seen, f"{key} twice"
        seen.add(key)
        name = fact.name.partition("{")[0]
        assert name in READINGS, name
        if isinstance(fact, Absent):
            assert fact.reason
            continue
        finite(fact.value, -60.0 if name.startswith("temperature") else 0.0)
        assert set(fact.labels) == set(READINGS[name].labels), fact
        if name.endswith("_ratio"):
            finite(fact.value, 0.0, 10.0)


def found(devices: Iterable[Device]) -> None:
    for device in devices:
        plain(device)
        assert device.uuid
        assert device.index >= 0
        if address := device.detail.get("bus_id", ""):
            assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", address), address
        for text in (device.uuid, device.model, device.name, *device.detail.values()):
            assert len(text) < 1000
            assert printable(text) == text, text


def _tree(data: bytes) -> None:
    choices = Choices(data)
    drivers = choices.of((("amdgpu", "0x1002"), ("xe", "0x8086"), ("i915", "0x8086")))
    with scratch.fresh() as place:
        root, proc = place / "sys", place / "proc"
        for base, files in ((root, SYSFS), (proc, PROC)):
            for name, text in files.items():
                said = text.replace("amdgpu", drivers[0]).replace("0x1002", drivers[1])
                path = base / name
                kind = choices.below(12)
                if kind == 0:
                    continue
                if kind == 1:
                    said = choices.of(TEXTS)
                elif kind == 2:
                    at = choices.below(len(said) + 1)
                    said = said[:at] + choices.text() + said[at + choices.below(3) :]
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == 3 and not choices.below(4):
                    path.mkdir(exist_ok=True)
                else:
                    path.write_bytes(f"{said}\n".encode("utf-8", "replace"))
        if choices.flag():
            (root / FUNCTION).mkdir(parents=True, exist_ok=True)
            (root / FUNCTION / "driver").symlink_to(root / "module/amdgpu")
        with in_time(1_000_000):
            _read(root, proc)


def _read(root: Path, proc: Path) -> None:
    given = {"sysfs": str(root), "proc": str(proc)}
    told(host.read(CPU, given))
    for name, text in machine.facts(root, proc).items():
        assert text, name
        text.encode()
        assert len(text) < 200_000
    found(on_the_bus(root))
    for function in pci.accelerators(root) if (root / "bus/pci/devices").exists() else []:
        assert re.fullmatch("[0-9a-f]{4,20}", function.device_id), function
    drm.cards(root, 0x1002)
    for vendor, more in ((amd, {"amdsmi": False}), (intel, {})):
        settings: dict[str, Any] = {"sysfs": str(root), **more}
        devices = vendor.devices(settings)
        found(devices)
        for device in devices:
            try:
                told(vendor.read(device, settings))
            except Skip as error:
                assert str(error)


def _file(data: bytes) -> None:
    """One file of any bytes, read as everything that a file of the kernel may be."""
    data = stretched(data)
    with scratch.fresh() as place, in_time(len(data) * 4):
        path = place / "current_link_speed"
        path.write_bytes(data)
        (place / "current_link_width").write_bytes(data)
        for read, low, high in (
            (sysfs.read_int, -1e20, 1e20),
            (sysfs.read_count, 0, 1e20),
            (sysfs.celsius, -60, 150),
            (sysfs._generation, 1, 7),
            (sysfs._width, 1, 32),
            (sysfs.percent, 0, 1),
            (host._machine_checks, 0, 1e30),
        ):
            try:
                finite(read(path), low, high)
            except Unreadable as error:
                assert str(error)
        with contextlib.suppress(Unreadable):
            assert all(0 <= number < 100_000 for number in host._ids(path))


def _firmware(data: bytes) -> None:
    """A Memory Device structure of SMBIOS."""
    module = machine.memory_device(data)
    if module is not None:
        assert 0 <= module.size < 1 << 60
        assert module.slot
        for text in (module.slot, module.make, module.serial):
            text.encode()


def _ascend(data: bytes) -> None:
    """The tables and lists of npu-smi."""
    choices = Choices(data)
    name = choices.of(sorted(file.name for file in DATA.rglob("*") if file.is_file()))
    text = next(iter(DATA.rglob(name))).read_text(errors="replace")
    if choices.flag():
        text = stretched(choices.rest()).decode("utf-8", "replace")
    else:
        for _ in range(choices.below(6)):
            at = choices.below(len(text) + 1)
            text = text[:at] + choices.text() + text[at + choices.below(20) :]
    with in_time(len(text)):
        chips = ascend._chips(text)
        ascend._pairs(text)
        ascend._section(text, "0", alone=choices.flag())
    now = float("inf")
    ascend._answers.clear()
    try:
        for chip in ("", *(c.npu for c in chips)):
            for question in ("board", "health", "memory", "ecc", "common"):
                argv = ("npu-smi", "info", "-t", question, "-i", chip)
                ascend._answers[argv] = (now, text)
                for place in {c.chip for c in chips}:
                    ascend._answers[(*argv, "-c", place)] = (now, text)
        ascend._answers["npu-smi", "info"] = (now, text)
        settings = {"npu_smi": "npu-smi", "sysfs": "/nonexistent"}
        devices = ascend.devices(settings)
        found(devices)
        for device in devices[:4]:
            told(ascend.read(device, settings))
    except Skip as error:
        assert str(error)
    finally:
        ascend._answers.clear()


def _apple(data: bytes) -> None:
    """What ioreg and pmset print."""
    text = stretched(data).decode("utf-8", "replace")
    with in_time(len(data)):
        for read in (
            lambda: apple._busy(apple._statistics(text)),
            lambda: apple._warning(text, "thermal"),
            lambda: apple._limited(text, "CPU_Speed_Limit", 100),
            lambda: apple._limited(text, "CPU_Available_CPUs", text[:3]),
            lambda: apple._count({"hw.memsize": text}, "hw.memsize", "sysctl"),
        ):
            try:
                finite(read(), 0.0)
            except Unreadable as error:
                assert str(error)


target = modes(_tree, _file, _firmware, _ascend, _apple)


def seeds() -> list[bytes]:
    fixed = bytes([17, 0x28, 1, 0]) + bytes(8) + b"\x00\x40" + bytes(2) + b"\1\2"
    memory = fixed.ljust(0x28, b"\0") + b"DIMM A1\0bank\0\0"
    ioreg = '"PerformanceStatistics" = {"Device Utilization %"=12,"In use system memory"=5}\n CPU_Speed_Limit = 100\n'
    return [
        *(seed(0, bytes((n + i * 7) % 256 for i in range(200))) for n in range(0, 250, 12)),
        *(seed(1, text) for text in (*TEXTS[:8], "32.0 GT/s PCIe", " MCE:  1  2  Machine check", "0-3,8", "45000")),
        seed(2, memory),
        *(seed(3, bytes([n, 0]) + bytes(range(n, n + 40))) for n in range(0, 40, 3)),
        seed(4, ioreg),
        seed(4, "thermal warning level set to 1\n"),
    ]
