"""Accelerators on a constructed PCI bus, and on this machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from canaryd.worker.telemetry.pci import AMD, accelerators, below, only_one
from canaryd.worker.telemetry.sysfs import Unreadable
from tests.worker.telemetry.trees import link, plant


def function(sysfs: Path, bus_id: str, vendor: str, pci_class: str, *, driver: str = "", virtual: bool = False) -> Path:
    path = sysfs / "bus/pci/devices" / bus_id
    files = {"vendor": vendor, "device": "0x2335", "class": pci_class}
    plant(path, files)
    if driver:
        link(path / "driver", sysfs / "bus/pci/drivers" / driver)
    if virtual:
        link(path / "physfn", sysfs / "bus/pci/devices/0000:00:00.0")
    return path


@pytest.mark.parametrize(
    ("vendor", "pci_class", "name"),
    [
        ("0x10de", "0x030200", "NVIDIA"),  # data-centre part
        ("0x10de", "0x030000", "NVIDIA"),  # workstation part
        ("0x1002", "0x038000", "AMD"),
        ("0x1002", "0x030200", "AMD"),
        ("0x1002", "0x120000", "AMD"),
        ("0x8086", "0x038000", "Intel"),
        ("0x19e5", "0x120000", "Huawei"),
        ("0x10de", "0x040300", ""),  # a GPU's sound
        ("0x10de", "0x068000", ""),  # NVSwitch
        ("0x1002", "0x030000", ""),  # graphics of a processor
        ("0x8086", "0x030000", ""),
        ("0x8086", "0x120000", ""),  # neural unit of a client processor
        ("0x1a03", "0x030000", ""),  # graphics of a board's management controller
        ("0x144d", "0x010802", ""),  # an NVMe drive
    ],
)
def test_vendor_and_class_tell_an_accelerator(tmp_path, vendor, pci_class, name):
    """Everything else on the bus is left out."""
    function(tmp_path, "0000:65:00.0", vendor, pci_class)
    assert [found.vendor for found in accelerators(tmp_path)] == ([name] if name else [])


def test_the_graphics_of_an_intel_processor_are_no_accelerator(tmp_path):
    """On a server without a screen they have the class of a card, and sit where they always do; a card does not."""
    function(tmp_path, "0000:00:02.0", "0x8086", "0x038000")
    function(tmp_path, "0000:65:00.0", "0x8086", "0x038000")
    assert [found.bus_id for found in accelerators(tmp_path)] == ["0000:65:00.0"]


@pytest.mark.parametrize(
    ("driver", "virtual", "passed"),
    [
        ("", False, False),
        ("nvidia", False, False),
        ("nouveau", False, False),
        ("vfio-pci", False, True),
        ("nvgrace_gpu_vfio_pci", False, True),
        ("pci-stub", False, True),
        ("", True, True),
        ("vfio-pci", True, True),
        ("amdgpu", True, False),
    ],
)
def test_what_is_set_aside_for_a_virtual_machine(tmp_path, driver, virtual, passed):
    """By its driver, or as a virtual function that the host leaves alone: no library of the host shows it."""
    function(tmp_path, "0000:65:00.0", "0x1002", "0x120000", driver=driver, virtual=virtual)
    (found,) = accelerators(tmp_path)
    assert (found.driver, found.virtual, found.passed_through) == (driver, virtual, passed)


def test_a_kernel_without_pci_is_not_an_empty_bus(tmp_path):
    """Whether there are accelerators is then not known."""
    with pytest.raises(Unreadable, match="not offered by this kernel"):
        accelerators(tmp_path)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert accelerators(tmp_path) == []


def test_the_only_one_of_a_vendor(tmp_path):
    """Whatever drives it, and graphics of a processor count: only what can be no other device is the only one."""
    assert only_one(tmp_path, AMD) == ""
    function(tmp_path, "0000:65:00.0", "0x1002", "0x120000")
    function(tmp_path, "0000:65:00.1", "0x1002", "0x040300")
    function(tmp_path, "0000:17:00.0", "0x10de", "0x030200")
    assert only_one(tmp_path, AMD) == "0000:65:00.0"
    function(tmp_path, "0000:0c:00.0", "0x1002", "0x030000")
    assert only_one(tmp_path, AMD) == ""


def switch(sysfs: Path) -> None:
    """Plant a root port with a switch, below whose ports are two GPUs, one with sound and a virtual function."""
    root = sysfs / "bus/pci/devices/0000:60:01.0"
    above = root / "0000:61:00.0"
    places = (root, above, above / "0000:62:00.0", above / "0000:62:01.0")
    for port in places:
        plant(port, {"vendor": "0x1000", "class": "0x060400"})
        if port != root:
            link(sysfs / "bus/pci/devices" / port.name, port)
    for place, pci_class in (("0000:63:00.0", "0x030200"), ("0000:63:00.1", "0x040300"), ("0000:63:00.4", "0x030200")):
        plant(places[2] / place, {"vendor": "0x10de", "class": pci_class})
    link(places[2] / "0000:63:00.4/physfn", places[2] / "0000:63:00.0")
    plant(places[3] / "0000:64:00.0", {"vendor": "0x10de", "class": "0x030200"})


def test_what_is_below_a_port(tmp_path):
    """Through switches, without ports and virtual functions."""
    switch(tmp_path)
    assert below(tmp_path, "0000:60:01.0") == ["0000:63:00.0", "0000:63:00.1", "0000:64:00.0"]
    assert below(tmp_path, "0000:62:01.0") == ["0000:64:00.0"]
    assert below(tmp_path, "0000:64:00.0") == below(tmp_path, "0000:99:00.0") == below(tmp_path, "") == []
