"""The machine's parts for the inventory: kernel, firmware, board, processors, memory modules.

The firmware's tables are read from /sys, where the kernel copies them; their layout is SMBIOS (DMTF DSP0134).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from canaryd.facts import filled
from canaryd.worker.telemetry.sysfs import Unreadable, optional_entries, optional_text, read_bytes, read_int


class Module(NamedTuple):
    """One memory module in its slot."""

    slot: str
    size: int
    """Size in bytes; 0 if it is unknown."""
    make: str
    """Manufacturer and part number, or the kind of memory if nothing else is known."""
    serial: str


def facts(sysfs: Path, proc: Path) -> dict[str, str]:
    """Return name → text for those facts that can be read.

    The names are: kernel, boot_id, clock_source, hypervisor, microcode, sockets, cores, threads, memory_bytes,
    memory_modules, memory_serials, bios, board, board_serial, product, product_serial.
    """
    cpuinfo = optional_text(proc / "cpuinfo")
    kernel = proc / "sys/kernel"
    dmi = sysfs / "class/dmi/id"
    found = {
        "kernel": f"{optional_text(kernel / 'osrelease')} {optional_text(kernel / 'version')}".strip(),
        "boot_id": optional_text(kernel / "random/boot_id"),
        "clock_source": optional_text(sysfs / "devices/system/clocksource/clocksource0/current_clocksource"),
        "hypervisor": _hypervisor(sysfs, cpuinfo),
        "microcode": ", ".join(sorted(set(re.findall(r"^microcode\s*:\s*(\S+)$", cpuinfo, re.MULTILINE)))),
        **_processors(sysfs),
        "memory_bytes": _memory_bytes(sysfs, proc),
        **_memory_modules(sysfs),
        "bios": _named(dmi, "bios_vendor", "bios_version", "bios_date"),
        "board": _named(dmi, "board_vendor", "board_name", "board_version"),
        "board_serial": _named(dmi, "board_serial"),
        "product": _named(dmi, "sys_vendor", "product_name", "product_version"),
        "product_serial": _named(dmi, "product_serial"),
    }
    return {name: value for name, value in found.items() if value}


def _named(directory: Path, *names: str) -> str:
    return " ".join(text for name in names if (text := filled(optional_text(directory / name))))


def _hypervisor(sysfs: Path, cpuinfo: str) -> str:
    """Return the hypervisor's name ("unnamed" if it gives none), "none" if there is none, or "" if that is unknown."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags and "hypervisor" not in flags.group(1).split():
        return "none"
    if kind := optional_text(sysfs / "hypervisor/type"):
        return kind
    sources = optional_text(sysfs / "devices/system/clocksource/clocksource0/available_clocksource")
    dmi = _named(sysfs / "class/dmi/id", "sys_vendor", "product_name")
    for name, hints in (
        ("kvm", ("kvm-clock", "QEMU", "KVM")),
        ("hyperv", ("hyperv_clocksource", "Virtual Machine")),
        ("vmware", ("VMware",)),
    ):
        if any(hint in f"{sources} {dmi}" for hint in hints):
            return name
    return "unnamed" if flags else ""  # only x86 processors report a hypervisor


def _processors(sysfs: Path) -> dict[str, str]:
    """Return the numbers of online sockets, cores and threads, under these names."""
    units = []
    for path in optional_entries(sysfs / "devices/system/cpu", "cpu[0-9]*"):
        try:
            units.append((read_int(path / "topology/physical_package_id"), read_int(path / "topology/core_id")))
        except Unreadable:
            continue  # offline: such a processor has no topology
    if not units:
        return {}
    return {"sockets": str(len({unit[0] for unit in units})), "cores": str(len(set(units))), "threads": str(len(units))}


def _memory_bytes(sysfs: Path, proc: Path) -> str:
    """Return the bytes of all memory blocks; unlike MemTotal, this does not depend on what the kernel itself uses."""
    base = sysfs / "devices/system/memory"
    size, blocks = optional_text(base / "block_size_bytes"), optional_entries(base, "memory[0-9]*")
    if blocks and re.fullmatch(r"[0-9a-f]{1,16}", size):
        return str(int(size, 16) * len(blocks))
    total = re.search(r"^MemTotal:\s+([0-9]{1,18}) kB$", optional_text(proc / "meminfo"), re.MULTILINE)
    return str(int(total.group(1)) * 1024) if total else ""


def _memory_modules(sysfs: Path) -> dict[str, str]:
    """Return the memory modules with make and slot, from the firmware's list, else from EDAC."""
    modules = [*_from_firmware(sysfs)] or [*_from_edac(sysfs)]
    lines = []
    for (size, make), number in sorted(Counter((module.size, module.make) for module in modules).items()):
        amount = f"{size / (1 << 30):g} GiB" if size else "unknown size"
        slots = ", ".join(module.slot for module in modules if (module.size, module.make) == (size, make))
        lines.append(f"{number} x {amount} {make}".rstrip() + f" in {slots}")
    serials = [f"{module.slot}: {module.serial}" for module in modules if module.serial]
    return {"memory_modules": "; ".join(lines), "memory_serials": ", ".join(serials)}


def _from_firmware(sysfs: Path) -> list[Module]:
    found = []
    for entry in optional_entries(sysfs / "firmware/dmi/entries", "17-*"):
        try:
            module = memory_device(read_bytes(entry / "raw"))
        except Unreadable:
            return []  # only root may read them: half a list would look like a module taken out
        if module:
            found.append(module)
    return found


def _from_edac(sysfs: Path) -> list[Module]:
    found = []
    for controller in optional_entries(sysfs / "devices/system/edac/mc", "mc[0-9]*"):
        for path in optional_entries(controller, "dimm[0-9]*") + optional_entries(controller, "rank[0-9]*"):
            slot = optional_text(path / "dimm_label") or f"{controller.name} {path.name}"
            size = re.fullmatch(r"[0-9]{1,12}", optional_text(path / "size"))
            kind = optional_text(path / "dimm_mem_type")
            found.append(Module(slot=slot, size=int(size.group()) << 20 if size else 0, make=kind, serial=""))
    return found


def memory_device(raw: bytes) -> Module | None:
    """Return the module in a Memory Device structure (SMBIOS type 17), or None for an empty slot or garbage.

    The offsets are those of DSP0134, table "Memory Device (Type 17) structure".
    """
    if len(raw) < 0x15 or raw[0] != 17 or not 0x15 <= raw[1] <= len(raw):
        return None
    fixed, strings = raw[: raw[1]], raw[raw[1] :].split(b"\0")

    def word(offset: int, width: int) -> int:
        return int.from_bytes(fixed[offset : offset + width], "little")

    def string(offset: int) -> str:
        number = word(offset, 1)  # 0, and a structure that is too short, mean none
        return filled(strings[number - 1].decode(errors="replace")) if 0 < number <= len(strings) else ""

    size = word(0x0C, 2)
    if not size:
        return None
    if size == 0xFFFF:
        memory = 0
    elif size == 0x7FFF:
        memory = (word(0x1C, 4) & 0x7FFFFFFF) << 20
    else:
        memory = (size & 0x7FFF) << (10 if size & 0x8000 else 20)
    return Module(
        slot=string(0x10) or string(0x11) or "a slot without a name",
        size=memory,
        make=f"{string(0x17)} {string(0x1A)}".strip(),
        serial=string(0x18),
    )
