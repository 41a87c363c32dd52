"""What the machine is made of: constructed firmware tables, processors and hypervisors, and this machine."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from canaryd.worker.telemetry import host, machine
from tests.worker.telemetry.trees import plant

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and /sys are Linux's")
DMI = "sys/class/dmi/id"
GIB = 1 << 30


def facts(root: Path) -> dict[str, str]:
    return host.facts({"sysfs": str(root / "sys"), "proc": str(root / "proc")})


def memory_device(size: int, *strings: str, extended: int = 0, length: int = 0x28) -> bytes:
    """Build a Memory Device structure as DSP0134 lays it out: slot, bank, manufacturer, serial, asset tag, part."""
    fixed = bytearray(length)
    struct.pack_into("<BBH", fixed, 0, 17, length, 0x1100)
    struct.pack_into("<H", fixed, 0x0C, size)
    for offset, index in ((0x10, 1), (0x11, 2), (0x17, 3), (0x18, 4), (0x19, 5), (0x1A, 6)):
        if offset < length and index <= len(strings):
            fixed[offset] = index
    if length >= 0x20:
        struct.pack_into("<I", fixed, 0x1C, extended)
    return bytes(fixed) + b"".join(text.encode() + b"\0" for text in strings) + b"\0"


@pytest.mark.parametrize(
    ("size", "extended", "wanted"),
    [
        (0x4000, 0, 16 * GIB),
        (0x7FFF, 65536, 64 * GIB),
        (0x7FFF, 0x80000000 | 131072, 128 * GIB),  # the highest bit is reserved
        (0x8000 | 512, 0, 512 << 10),  # counted in KiB
        (0xFFFF, 0, 0),  # not known
    ],
)
def test_a_module_has_its_size(size, extended, wanted):
    """In the two forms of the standard."""
    raw = memory_device(size, "P0_A", "BANK 0", "Samsung", "4029F3A1", "tag", "M321R8GA0BB0-CQKZJ", extended=extended)
    assert machine.memory_device(raw) == ("P0_A", wanted, "Samsung M321R8GA0BB0-CQKZJ", "4029F3A1")


def test_what_nobody_filled_in_is_left_out():
    """Placeholders are not a make, and a short structure of the old standard has none."""
    raw = memory_device(0x4000, "Not Specified", "BANK 0", "Unknown", "Default string", "", "To Be Filled By O.E.M.")
    assert machine.memory_device(raw) == ("BANK 0", 16 * GIB, "", "")
    assert machine.memory_device(memory_device(0x4000, "A1", length=0x15)) == ("A1", 16 * GIB, "", "")


def test_memory_is_described_by_make_and_slot(tmp_path):
    """Modules of one make together, in the order of the firmware's table; serials by slot; empty slots left out."""
    strings = ("BANK", "Samsung", "tag", "M321R8GA0BB0-CQKZJ")
    modules = [
        memory_device(0x7FFF, f"P0_{slot}", strings[0], strings[1], f"00{slot}", *strings[2:], extended=65536)
        for slot in "ABCDEFGHIJK"
    ]
    modules[1] = memory_device(0, "P0_B")
    modules[10] = memory_device(0x4000, "P0_K", "BANK", "Micron", "77", "tag", "MTC")
    plant(tmp_path, {f"sys/firmware/dmi/entries/17-{n}/raw": raw for n, raw in enumerate(modules)})
    found = facts(tmp_path)
    assert found["memory_modules"] == (
        "1 x 16 GiB Micron MTC in P0_K; "
        "9 x 64 GiB Samsung M321R8GA0BB0-CQKZJ in P0_A, P0_C, P0_D, P0_E, P0_F, P0_G, P0_H, P0_I, P0_J"
    )
    assert found["memory_serials"].startswith("P0_A: 00A, P0_C: 00C, ")
    assert found["memory_serials"].endswith(", P0_J: 00J, P0_K: 77")


def test_half_a_table_is_no_table(tmp_path):
    """A module whose entry cannot be read must not look like one that was taken out."""
    plant(tmp_path, {"sys/firmware/dmi/entries/17-0/raw": memory_device(0x4000, "A1")})
    (tmp_path / "sys/firmware/dmi/entries/17-1/raw").mkdir(parents=True)
    assert "memory_modules" not in facts(tmp_path)


def test_without_the_firmware_edac_names_the_modules(tmp_path):
    """By label, size and kind of memory."""
    files = {"size": "32768", "dimm_mem_type": "Registered-DDR4"}
    controller = tmp_path / "sys/devices/system/edac/mc/mc0"
    plant(controller / "dimm0", files | {"dimm_label": "A1"})
    plant(controller / "dimm1", files)
    plant(controller / "dimm2", {"size": "?"})
    found = facts(tmp_path)
    wanted = "1 x unknown size in mc0 dimm2; 2 x 32 GiB Registered-DDR4 in A1, mc0 dimm1"
    assert found == {"memory_modules": wanted}


def test_firmware_board_and_product(tmp_path):
    """In one line each, without placeholders; serials where they may be read."""
    files = {
        "bios_vendor": "American Megatrends",
        "bios_version": "2.1",
        "bios_date": "03/14/2024",
        "board_vendor": "Supermicro",
        "board_name": "H13DSG-O-CPU",
        "board_version": "To be filled by O.E.M.",
        "board_serial": "Default string",
        "sys_vendor": "Supermicro",
        "product_name": "AS  -8125GS-TNHR",
        "product_serial": "S1234",
    }
    assert facts(plant(tmp_path / DMI, files) and tmp_path) == {
        "bios": "American Megatrends 2.1 03/14/2024",
        "board": "Supermicro H13DSG-O-CPU",
        "product": "Supermicro AS -8125GS-TNHR",
        "product_serial": "S1234",
    }


FLAGS = "processor\t: 0\nmicrocode\t: 0x2b000603\nflags\t\t: fpu vme {}sse\n\nprocessor\t: 1\nmicrocode\t: 0x2b000590"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, None),
        ({"proc/cpuinfo": FLAGS.format("")}, "none"),
        ({"proc/cpuinfo": FLAGS.format(""), f"{DMI}/product_name": "KVM ready workstation"}, "none"),
        ({"proc/cpuinfo": FLAGS.format("hypervisor ")}, "unnamed"),
        ({"proc/cpuinfo": FLAGS.format("hypervisor "), "sys/hypervisor/type": "xen"}, "xen"),
        ({"proc/cpuinfo": FLAGS.format("hypervisor "), f"{DMI}/sys_vendor": "QEMU"}, "kvm"),
        ({"proc/cpuinfo": FLAGS.format("hypervisor "), f"{DMI}/product_name": "VMware7,1"}, "vmware"),
        ({"proc/cpuinfo": FLAGS.format("hypervisor "), f"{DMI}/product_name": "Virtual Machine"}, "hyperv"),
        ({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd", f"{DMI}/sys_vendor": "QEMU"}, "kvm"),
        ({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd"}, None),
    ],
)
def test_the_hypervisor_is_named_where_one_shows(tmp_path, files, wanted):
    """It is "none" only where the processor itself says so; nothing where it cannot tell."""
    assert facts(plant(tmp_path, files)).get("hypervisor") == wanted


def test_processors_and_memory_are_counted(tmp_path):
    """Offline processors have no topology; memory is what its blocks sum up to."""
    files = {"sys/devices/system/memory/block_size_bytes": "80000000", "proc/meminfo": "MemTotal: 1 kB"}
    files |= {f"sys/devices/system/memory/memory{number}/online": "1" for number in range(4)}
    for number in range(8):
        topology = f"sys/devices/system/cpu/cpu{number}/topology"
        files[f"{topology}/physical_package_id"] = str(number // 4)
        files[f"{topology}/core_id"] = str(number % 2)
    plant(tmp_path, files | {"sys/devices/system/cpu/cpu8/online": "0"})
    counts = {"sockets": "2", "cores": "4", "threads": "8"}
    assert facts(tmp_path) == counts | {"memory_bytes": str(8 * GIB)}
