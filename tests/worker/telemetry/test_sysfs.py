"""The readers of /sys: units, labels, and a reason for everything that is not a value."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from canaryd.worker.telemetry.sysfs import (
    Denied,
    Unreadable,
    aer,
    attempt,
    count,
    entries,
    hwmon,
    optional_entries,
    optional_text,
    path_setting,
    pcie,
    read_count,
    read_int,
    read_text,
)
from tests.worker.telemetry.trees import checked, plant, unprivileged

BUS = "0000:65:00.0"
FUNCTION = f"bus/pci/devices/{BUS}"
GARBAGE = ("", "   ", "\0\0", "N/A", "nan", "inf", "1e3", "12 34", "0x", "1_000", "٣", "9" * 400, b"\xff\xfe\x00")


@pytest.fixture
def open_directory():
    """A directory that every user may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(("text", "number"), [("7", 7), ("-40000", -40000), ("0x10de", 0x10DE), ("007", 7), ("+5", 5)])
def test_a_number_is_read_in_the_forms_that_the_kernel_writes(tmp_path, text, number):
    """Decimal with a sign, and hexadecimal after 0x."""
    assert read_int(plant(tmp_path, {"f": text}) / "f") == number


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_never_a_number(tmp_path, text):
    """It is a reason that names the file."""
    plant(tmp_path, {"f": text})
    with pytest.raises(Unreadable, match=str(tmp_path / "f")):
        read_int(tmp_path / "f")
    _, absent = checked([count("crash_records", tmp_path / "f")])
    assert set(absent) == {"crash_records"}


def test_a_count_is_not_negative(tmp_path):
    """A driver that writes -1 means that it does not know."""
    with pytest.raises(Unreadable, match="not a count"):
        read_count(plant(tmp_path, {"f": "-1"}) / "f")


def test_a_large_file_is_read_whole(tmp_path):
    """/proc/interrupts of a large machine has megabytes."""
    text = "0123456789" * 300_000
    assert read_text(plant(tmp_path, {"f": text}) / "f") == text


def test_each_failure_has_its_own_reason(tmp_path):
    """Missing, below a file, a directory instead of a file."""
    plant(tmp_path, {"f": "1"})
    for path, reason in (
        (tmp_path / "none", "not offered by this kernel or device"),
        (tmp_path / "f/below", "not offered by this kernel or device"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(Unreadable, match=reason) as caught:
            read_text(path)
        assert not isinstance(caught.value, Denied)
    with pytest.raises(Unreadable, match="not offered"):
        entries(tmp_path / "none")
    assert optional_text(tmp_path / "none") == ""
    assert optional_entries(tmp_path / "none", "*") == []


def test_a_file_that_only_root_may_read_says_so(open_directory):
    """For files and directories alike, with what to do about it."""
    plant(open_directory, {"file": "1", "directory/file": "1"})
    (open_directory / "file").chmod(0)
    (open_directory / "directory").chmod(0)
    code = """
import sys
from pathlib import Path
from canaryd.worker.telemetry.sysfs import Denied, entries, read_int
# drop
for attempt in (lambda: read_int(Path(sys.argv[1], "file")), lambda: entries(Path(sys.argv[1], "directory"))):
    try:
        print(attempt())
    except Denied as error:
        print(error)
"""
    lines = unprivileged(code, str(open_directory)).splitlines()
    wanted = [f"permission denied: run as root to read {open_directory / name}" for name in ("file", "directory")]
    assert lines == wanted


def test_names_are_in_natural_order(tmp_path):
    """Controller 10 comes after controller 2, as people and boards number them."""
    plant(tmp_path, {f"mc{number}/x": "" for number in (10, 2, 1)} | {"power": ""})
    assert [path.name for path in entries(tmp_path, "mc[0-9]*")] == ["mc1", "mc2", "mc10"]


@pytest.mark.parametrize("given", [5, "sys", "", "/a\0b", None, ["/sys"]])
def test_a_wrong_path_is_refused(given):
    """With the setting's name, what was given and what is wanted."""
    with pytest.raises(ValueError, match=r"sysfs: got .*, wanted an absolute path such as '/sys'"):
        path_setting({"sysfs": given}, "sysfs", "/sys")


def test_a_path_setting_has_its_default():
    """Where nothing is given."""
    assert path_setting({}, "sysfs", "/sys") == Path("/sys")
    assert path_setting({"sysfs": "/tree"}, "sysfs", "/sys") == Path("/tree")


def test_a_reading_is_given_or_absent(tmp_path):
    """`attempt` gives one fact, whatever happens."""
    plant(tmp_path, {"f": "1500"})
    fact = attempt("clock_hertz", lambda: read_int(tmp_path / "f") * 1e6, "hertz", {"domain": "memory"})
    assert (fact.key, fact.value, fact.unit) == ("clock_hertz{domain=memory}", 1.5e9, "hertz")
    absent = attempt("clock_hertz", lambda: read_int(tmp_path / "g"), "hertz", {"domain": "memory"})
    assert absent.name == "clock_hertz{domain=memory}"
    assert absent.reason == f"not offered by this kernel or device: no {tmp_path / 'g'}"


# --- PCI Express ------------------------------------------------------------------------------------------------------

AER = {
    "aer_dev_correctable": "RxErr 3\nBadTLP 2\nBadDLLP 0\nTOTAL_ERR_COR 5",
    "aer_dev_nonfatal": "Undefined 0\nDLP 0\nTOTAL_ERR_NONFATAL 1",
    "aer_dev_fatal": "Undefined 0\nDLP 0\nTOTAL_ERR_FATAL 0",
}


def test_aer_totals_are_read_by_severity(tmp_path):
    """A zero that the kernel counted is a zero."""
    plant(tmp_path / FUNCTION, AER)
    readings, absent = checked(aer(tmp_path, BUS))
    total = "pcie_aer_errors_total"
    wanted = {f"{total}{{severity={s}}}": n for s, n in (("correctable", 5), ("nonfatal", 1), ("fatal", 0))}
    assert (readings, absent) == (wanted, {})


def test_a_port_without_aer_has_no_errors_and_no_zero(tmp_path):
    """Three reasons, one for each severity."""
    readings, absent = checked(aer(tmp_path, BUS))
    assert readings == {}
    assert set(absent) == {f"pcie_aer_errors_total{{severity={s}}}" for s in ("correctable", "nonfatal", "fatal")}


@pytest.mark.parametrize(
    "text", [*GARBAGE, "TOTAL_ERR_COR", "TOTAL_ERR_COR -1", "TOTAL_ERR_CORR 4", "TOTAL_ERR_COR 4x"]
)
def test_garbage_in_aer_is_absent(tmp_path, text):
    """And the other severities are still read."""
    plant(tmp_path / FUNCTION, AER | {"aer_dev_correctable": text})
    readings, absent = checked(aer(tmp_path, BUS))
    assert len(readings) == 2
    assert set(absent) == {"pcie_aer_errors_total{severity=correctable}"}


@pytest.mark.parametrize(
    ("speed", "generation"),
    [
        ("2.5 GT/s PCIe", 1),
        ("5.0 GT/s PCIe", 2),
        ("8.0 GT/s PCIe", 3),
        ("16.0 GT/s PCIe", 4),
        ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6),
        ("8 GT/s", 3),
        ("5 GT/s", 2),
    ],
)
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


# --- hwmon ------------------------------------------------------------------------------------------------------------


def test_a_chip_gives_heat_fans_and_power_in_base_units(tmp_path):
    """Labels are the chip's own; thresholds are named after their sensor; the average power is preferred."""
    chip = tmp_path / FUNCTION / "hwmon/hwmon4"
    plant(
        chip,
        {
            "name": "amdgpu",
            "temp1_input": "41000",
            "temp1_label": "edge",
            "temp1_crit": "100000",
            "temp2_input": "43500",
            "temp2_label": "junction",
            "temp2_max": "110000",
            "temp3_input": "39000",
            "fan1_input": "1200",
            "power1_average": "45000000",
            "power1_input": "99000000",
        },
    )
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    assert absent == {}
    assert readings == {
        "temperature_celsius{sensor=edge}": 41.0,
        "temperature_celsius{sensor=junction}": 43.5,
        "temperature_celsius{sensor=temp3}": 39.0,
        "temperature_threshold_celsius{threshold=edge_crit}": 100.0,
        "temperature_threshold_celsius{threshold=junction_max}": 110.0,
        "fan_rpm{fan=fan1}": 1200,
        "power_watts": 45.0,
    }


def test_a_device_has_one_power(tmp_path):
    """The first chip's: a second rail is part of it."""
    for number, power in enumerate(("45000000", "9000000")):
        plant(tmp_path / FUNCTION / f"hwmon/hwmon{number}", {"power1_input": power, "power2_input": "1000000"})
    readings, _ = checked(hwmon(tmp_path, FUNCTION))
    assert readings == {"power_watts": 45.0}


def test_a_device_without_a_chip_says_so(tmp_path):
    """One reason for each kind of reading, for a missing directory and for an empty chip."""
    kinds = {"temperature_celsius", "temperature_threshold_celsius", "fan_rpm", "power_watts"}
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    assert (readings, set(absent)) == ({}, kinds)
    plant(tmp_path / FUNCTION / "hwmon/hwmon4", {"name": "xe"})
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    assert (readings, absent) == ({}, dict.fromkeys(kinds, "no hwmon chip of the device gives it"))


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


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_in_a_chip_is_absent(tmp_path, text):
    """Each reading by itself, with its key."""
    plant(tmp_path / FUNCTION / "hwmon/hwmon0", {"temp1_input": text, "fan1_input": text, "power1_average": text})
    readings, absent = checked(hwmon(tmp_path, FUNCTION))
    assert readings == {}
    assert set(absent) == {
        "temperature_celsius{sensor=temp1}",
        "temperature_threshold_celsius",
        "fan_rpm{fan=fan1}",
        "power_watts",
    }


def test_sensors_of_one_label_are_told_apart(tmp_path):
    """Some chips call two sensors alike; a series must not stand for both."""
    files = {f"temp{number}_label": "Sensor" for number in (1, 2)} | {"temp1_input": "1000", "temp2_input": "2000"}
    plant(tmp_path / FUNCTION / "hwmon/hwmon0", files)
    readings, _ = checked(hwmon(tmp_path, FUNCTION))
    assert readings == {
        "temperature_celsius{sensor=Sensor temp1}": 1.0,
        "temperature_celsius{sensor=Sensor temp2}": 2.0,
    }


def test_no_descriptor_stays_open(tmp_path):
    """A worker reads for as long as its machine runs."""
    plant(tmp_path, {"f": "1"})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        read_int(tmp_path / "f")
        with pytest.raises(Unreadable):
            read_text(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
