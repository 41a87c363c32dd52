"""Apple telemetry on constructed answers of macOS's commands."""

from __future__ import annotations

import sys

import pytest

from canaryd.model import Device, Outcome
from canaryd.worker.telemetry import apple
from canaryd.worker.telemetry.interface import Unavailable
from tests.worker.telemetry.trees import CAPTURES, checked, command, run_probe

APPLE = CAPTURES / "apple"
FACTS = f"-i {' '.join(apple.FACTS)}"
IOREG = "-r -d 1 -c AGXAccelerator"
DEVICE = Device(uuid="MPS-1", backend="mps", index=0, model="Apple")


@pytest.fixture
def settings(tmp_path):
    """Make macOS's four commands from answers."""

    def make(therm="pmset-hot.txt", **changes) -> dict:
        answers = {
            "sysctl": {FACTS: APPLE / "sysctl.txt"},
            "ioreg": {IOREG: APPLE / "ioreg.txt"},
            "pmset": {"-g therm": APPLE / therm},
            "system_profiler": {"SPHardwareDataType": APPLE / "system_profiler.txt"},
        }
        return {name: command(tmp_path / name, changes.get(name, answers[name])) for name in answers}

    return make


def text(path, content: str):
    path.write_text(content)
    return path


def test_the_machine_is_known_by_its_hardware_uuid(settings):
    """With serial number, model and firmware, where system_profiler tells them."""
    (device,) = apple.devices(settings())
    assert device == Device(
        uuid="MPS-00000000-1111-2222-3333-444444444444",
        backend="mps",
        index=0,
        model="Apple M2 Max GPU",
        detail={
            "driver": "macOS 15.1",
            "serial": "TESTSERIAL01",
            "board_part_number": "Z17Z0000XLL/A",
            "firmware": "11881.41.5",
            "product": "Mac14,13",
            "memory_bytes": "68719476736",
        },
    )


def test_macos_gives_every_reading(settings):
    """A hot machine: held down by heat, with cores taken away and a slower clock."""
    readings, absent = checked(apple.read(DEVICE, settings()))
    assert readings == {
        "memory_total_bytes": 68719476736,
        "memory_used_bytes": 745570304,
        "utilization_ratio{engine=gpu}": 0.26,
        "device_recoveries_total": 2,
        "throttle_active{reason=thermal_warning}": 1,
        "throttle_active{reason=performance_warning}": 0,
        "throttle_active{reason=cpu_speed}": 1,
        "throttle_active{reason=cpu_scheduler}": 0,
        "throttle_active{reason=cpus_offline}": 1,
    }
    assert set(absent) == {"temperature_celsius", "power_watts", "clock_hertz", "ecc_errors_total"}


def test_nothing_recorded_is_no_measurement(settings):
    """Where macOS has recorded no warning, none is called inactive."""
    readings, absent = checked(apple.read(DEVICE, settings("pmset-cool.txt")))
    assert not any(key.startswith("throttle_active") for key in readings)
    assert absent["throttle_active{reason=thermal_warning}"] == "macOS has recorded no thermal warning level"
    assert absent["throttle_active{reason=cpu_speed}"] == "pmset gives no CPU_Speed_Limit"


def test_each_command_fails_on_its_own(settings):
    """Without ioreg and pmset the rest is read all the same."""
    readings, absent = checked(apple.read(DEVICE, settings(ioreg={}, pmset={})))
    assert readings == {"memory_total_bytes": 68719476736}
    assert "failed with status 1" in absent["utilization_ratio"]
    assert "failed with status 1" in absent["throttle_active"]


def test_other_macs_and_other_machines(settings, tmp_path):
    """An Intel Mac has no such GPU; elsewhere one clear line says so."""
    intel = settings(sysctl={FACTS: text(tmp_path / "facts", "hw.model: MacBookPro16,1\n")})
    assert apple.devices(intel) == []
    with pytest.raises(Unavailable, match="this machine has no Apple silicon"):
        list(apple.read(DEVICE, intel))
    foreign = Device(uuid="GPU-1", backend="cuda", index=0, model="x")
    with pytest.raises(Unavailable, match="cuda:0 is not an Apple GPU"):
        list(apple.read(foreign, settings()))
    with pytest.raises(Unavailable, match="/nowhere/sysctl is not installed, or not in PATH"):
        apple.devices(settings() | {"sysctl": "/nowhere/sysctl"})


def test_the_probe_runs_through_the_supervisor(settings):
    """Completed on captures."""
    run = run_probe("apple_telemetry", DEVICE, settings())
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {reading.name for reading in run.readings} >= {"memory_total_bytes", "device_recoveries_total"}


@pytest.mark.skipif(sys.platform == "darwin", reason="this machine runs macOS")
def test_elsewhere_the_probe_is_skipped():
    """With its reason, and without asking for commands of other systems that bear the same names."""
    run = run_probe("apple_telemetry", DEVICE)
    assert run.outcome is Outcome.SKIPPED, run.detail
    assert run.detail == "this machine does not run macOS"
