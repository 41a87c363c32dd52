"""The readers of /sys: units, labels, and a reason for everything that is not a value."""

from __future__ import annotations

import re

import pytest

from canaryd.worker.telemetry import interface
from canaryd.worker.telemetry.sysfs import hwmon, pcie
from tests.worker.telemetry.trees import checked, plant

BUS = "0000:65:00.0"
FUNCTION = f"bus/pci/devices/{BUS}"


SPEEDS = {"2.5 GT/s PCIe": 1, "5.0 GT/s PCIe": 2, "8.0 GT/s PCIe": 3, "16.0 GT/s PCIe": 4, "32.0 GT/s PCIe": 5}
SPEEDS |= {"64.0 GT/s PCIe": 6, "8 GT/s": 3, "5 GT/s": 2}


@pytest.mark.parametrize(("speed", "generation"), SPEEDS.items())
def test_a_speed_is_a_generation(tmp_path, speed, generation):
    """In the spelling of kernels old and new."""
    files = {"current_link_speed": speed, "max_link_speed": "32.0 GT/s PCIe"}
    plant(tmp_path / FUNCTION, files | {"current_link_width": "8", "max_link_width": "16"})
    readings, absent = checked(pcie(tmp_path, BUS))
    wanted = {"pcie_generation": generation, "pcie_generation_max": 5, "pcie_width": 8, "pcie_width_max": 16}
    assert (readings, absent) == (wanted, {})


def test_a_narrow_slot_is_no_fault_of_the_device(tmp_path):
    """At most is what the device and the port above it can both do."""
    port = tmp_path / "devices/pci0000:60/0000:60:01.0"
    plant(port, {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "8"})
    files = {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    plant(port / BUS, files | {"current_link_width": "8", "max_link_width": "16"})
    (tmp_path / FUNCTION).parent.mkdir(parents=True)
    (tmp_path / FUNCTION).symlink_to(port / BUS)
    readings, _ = checked(pcie(tmp_path, BUS))
    assert readings == {"pcie_generation": 4, "pcie_generation_max": 4, "pcie_width": 8, "pcie_width_max": 8}


def test_a_link_that_is_not_known_is_absent(tmp_path):
    """The kernel writes "Unknown", 0 and 255 for the link of a virtual function or a device that is off."""
    files = {"current_link_speed": "Unknown", "current_link_width": "0", "max_link_width": "255"}
    plant(tmp_path / FUNCTION, files)
    readings, absent = checked(pcie(tmp_path, BUS))
    assert readings == {}
    assert absent["pcie_generation"] == "not a speed of PCI Express: 'Unknown'"
    assert absent["pcie_width"] == "not a width of PCI Express: 0"
    assert absent["pcie_width_max"] == "not a width of PCI Express: 255"
    assert absent["pcie_generation_max"].startswith("not offered")


def test_what_no_silicon_survives_is_not_a_temperature(tmp_path):
    """Chips write such numbers for a sensor that is not connected and a threshold that is not set."""
    files = {"temp1_input": "-128000", "temp2_input": "30000", "temp2_max": "65261850", "temp3_input": "-60000"}
    files |= {"temp4_input": "150001", "temp5_input": "150000"}
    plant(tmp_path / FUNCTION / "hwmon/hwmon0", files)
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    wanted = {"temp2": 30.0, "temp3": -60.0, "temp5": 150.0}
    assert readings == {f"temperature_celsius{{sensor={sensor}}}": value for sensor, value in wanted.items()}
    assert "temperature_celsius{sensor=temp4}" in absent
    assert "gives -128 degrees: not connected or not set" in absent["temperature_celsius{sensor=temp1}"]
    assert "temperature_threshold_celsius{threshold=temp2_max}" in absent


def test_a_sensor_that_reports_a_fault_is_absent(tmp_path):
    """Whatever number stands beside it."""
    files = {"temp1_input": "30000", "temp1_fault": "1", "fan1_input": "0", "fan1_fault": "1", "fan2_input": "0"}
    plant(tmp_path / FUNCTION / "hwmon/hwmon0", files | {"fan2_fault": "0"})
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    assert readings == {"fan_rpm{fan=fan2}": 0}
    assert "the chip reports a fault of this sensor" in absent["temperature_celsius{sensor=temp1}"]
    assert "the chip reports a fault of this sensor" in absent["fan_rpm{fan=fan1}"]


@pytest.mark.parametrize(
    ("vendor", "wrong", "message"),
    [
        ("nvidia", {"sysfs": 5}, "sysfs: got 5, wanted an absolute path such as '/sys'"),
        ("nvidia", {"sysf": "/sys"}, "sysf: nvidia_telemetry has no such setting; it has sysfs"),
        ("amd", {"amdsmi": "no"}, "amdsmi: got 'no', wanted true or false"),
        ("amd", {"sysf": "/sys"}, "sysf: amd_telemetry has no such setting; it has amdsmi, sysfs"),
        ("intel", {"path": "/sys"}, "path: intel_telemetry has no such setting; it has sysfs"),
        ("ascend", {"npu_smi": ""}, "npu_smi: got '', wanted the name or path of a command"),
        ("ascend", {"smi": "x"}, "smi: ascend_telemetry has no such setting; it has npu_smi, sysfs"),
        ("apple", {"pmset": None, "sysctl": "sysctl"}, "pmset: got None"),
        ("apple", {"top": "top"}, "top: apple_telemetry has no such setting"),
        ("host", {"proc": 5}, "proc: got 5, wanted an absolute path such as '/proc'"),
        (
            "host",
            {"sysfs_root": "/sys"},
            "sysfs_root: host_telemetry has no such setting; it has proc",
        ),
    ],
)
def test_a_wrong_setting_is_named(vendor, wrong, message):
    """By what was given and what was wanted, before anything is read."""
    with pytest.raises(ValueError, match=re.escape(message)):
        interface.inventory(vendor, wrong)
