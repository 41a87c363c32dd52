"""Intel telemetry on constructed trees of the xe and i915 drivers."""

from __future__ import annotations

import os

import pytest

from canaryd.model import Device, Outcome
from canaryd.worker.telemetry import intel
from canaryd.worker.telemetry.interface import Unavailable
from tests.worker.telemetry.trees import checked, plant, run_probe

BUS = "0000:03:00.0"
FUNCTION = f"bus/pci/devices/{BUS}"
HWMON = f"{FUNCTION}/hwmon/hwmon2"
DEVICE = Device(uuid=f"XPU-{BUS}", backend="xpu", index=0, model="Intel GPU", detail={"bus_id": BUS})
REASONS = ("pl1", "pl2", "pl4", "thermal", "prochot", "ratl", "vr_thermalert", "vr_tdc")


def identity(driver: str, bus: str = BUS) -> dict[str, str]:
    return {
        "class/drm/card0/device": f"-> ../../../bus/pci/devices/{bus}",
        "class/drm/card0-DP-1/status": "connected\n",
        f"bus/pci/devices/{bus}/uevent": f"DRIVER={driver}\nPCI_SLOT_NAME={bus}\n",
        f"bus/pci/devices/{bus}/vendor": "0x8086\n",
        f"bus/pci/devices/{bus}/device": "0xe20b\n",
        f"bus/pci/devices/{bus}/class": "0x030000\n",
    }


LINK = {
    f"{FUNCTION}/current_link_speed": "16.0 GT/s PCIe\n",
    f"{FUNCTION}/current_link_width": "8\n",
    f"{FUNCTION}/max_link_speed": "16.0 GT/s PCIe\n",
    f"{FUNCTION}/max_link_width": "8\n",
    f"{FUNCTION}/aer_dev_correctable": "TOTAL_ERR_COR 0\n",
    f"{FUNCTION}/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
    f"{FUNCTION}/aer_dev_fatal": "TOTAL_ERR_FATAL 0\n",
}
XE = LINK | {
    f"{HWMON}/energy1_input": "123456789\n",
    f"{HWMON}/energy1_label": "card\n",
    f"{HWMON}/power1_max": "190000000\n",
    f"{HWMON}/power1_rated_max": "200000000\n",
    f"{HWMON}/temp2_input": "55000\n",
    f"{HWMON}/temp2_label": "pkg\n",
    f"{HWMON}/temp3_input": "60000\n",
    f"{HWMON}/temp3_label": "vram\n",
    f"{HWMON}/fan1_input": "900\n",
    f"{FUNCTION}/tile0/physical_vram_size_bytes": "12884901888\n",
    f"{FUNCTION}/tile0/gt0/freq0/act_freq": "2850\n",
    f"{FUNCTION}/tile0/gt0/freq0/rp0_freq": "2900\n",
    f"{FUNCTION}/tile0/gt1/freq0/act_freq": "0\n",
    f"{FUNCTION}/tile0/gt1/freq0/rp0_freq": "1500\n",
    **{f"{FUNCTION}/tile0/gt0/freq0/throttle/reason_{reason}": "0\n" for reason in REASONS},
    **{f"{FUNCTION}/tile0/gt1/freq0/throttle/reason_{reason}": "0\n" for reason in REASONS},
    f"{FUNCTION}/tile0/gt0/freq0/throttle/reason_thermal": "1\n",
}
I915 = LINK | {
    f"{HWMON}/energy1_input": "5000000\n",
    f"{HWMON}/power1_max": "0\n",
    "class/drm/card0/gt/gt0/rps_act_freq_mhz": "2400\n",
    "class/drm/card0/gt/gt0/rps_RP0_freq_mhz": "2400\n",
    **{f"class/drm/card0/gt/gt0/throttle_reason_{reason}": "0\n" for reason in REASONS},
    "class/drm/card0/gt/gt0/throttle_reason_pl1": "1\n",
}


def settings(root) -> dict:
    return {"sysfs": str(root)}


def test_a_discrete_gpu_is_known_by_its_slot(tmp_path):
    """The driver tells no serial number: the identity is weak and says so."""
    (device,) = intel.devices(settings(plant(tmp_path, identity("xe"))))
    assert device == Device(
        uuid=f"XPU-{BUS}",
        backend="xpu",
        index=0,
        model="Intel GPU [8086:e20b]",
        weak_identity=True,
        detail={"bus_id": BUS, "driver": f"xe of kernel {os.uname().release}"},
    )


@pytest.mark.parametrize(("driver", "bus"), [("i915", "0000:00:02.0"), ("vfio-pci", BUS), ("", BUS)])
def test_integrated_graphics_and_other_drivers_are_left_alone(tmp_path, driver, bus):
    """The unit inside a processor serves no model; a card that a virtual machine owns is not ours to read."""
    assert intel.devices(settings(plant(tmp_path, identity(driver, bus)))) == []


def test_xe_gives_every_reading(tmp_path):
    """Two graphics units on one tile; a unit that sleeps runs at 0 Hz, which is true."""
    readings, absent = checked(intel.read(DEVICE, settings(plant(tmp_path, identity("xe") | XE))))
    assert readings == {
        "temperature_celsius{sensor=pkg}": 55,
        "temperature_celsius{sensor=vram}": 60,
        "fan_rpm{fan=fan1}": 900,
        "energy_joules_total": pytest.approx(123.456789),
        "power_limit_watts{limit=enforced}": 190,
        "power_limit_watts{limit=default}": 200,
        "clock_hertz{domain=tile0/gt0}": 2_850_000_000,
        "clock_max_hertz{domain=tile0/gt0}": 2_900_000_000,
        "clock_hertz{domain=tile0/gt1}": 0,
        "clock_max_hertz{domain=tile0/gt1}": 1_500_000_000,
        **{f"throttle_active{{reason={reason}}}": int(reason == "thermal") for reason in REASONS},
        "memory_total_bytes": 12884901888,
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_width": 8,
        "pcie_width_max": 8,
        "pcie_aer_errors_total{severity=correctable}": 0,
        "pcie_aer_errors_total{severity=nonfatal}": 0,
        "pcie_aer_errors_total{severity=fatal}": 0,
    }
    assert set(absent) == {"temperature_threshold_celsius", "power_watts", "ecc_errors_total"}


def test_i915_gives_what_it_has(tmp_path):
    """Clocks and reasons lie elsewhere, a limit of 0 is no limit, the size of the memory is not told."""
    readings, absent = checked(intel.read(DEVICE, settings(plant(tmp_path, identity("i915") | I915))))
    assert readings["clock_hertz{domain=gt0}"] == 2_400_000_000
    assert readings["throttle_active{reason=pl1}"] == 1
    assert readings["throttle_active{reason=thermal}"] == 0
    assert readings["energy_joules_total"] == 5
    assert absent["power_limit_watts{limit=enforced}"] == "the power limit is disabled"
    assert absent["memory_total_bytes"] == "the i915 driver does not give the size of the memory"


def test_what_a_device_lacks_is_absent_and_never_zero(tmp_path):
    """A bare function gives reasons instead of readings."""
    readings, absent = checked(intel.read(DEVICE, settings(plant(tmp_path, identity("xe")))))
    assert readings == {}
    assert absent["clock_hertz"] == "the driver lists no graphics unit of the device"
    assert absent["throttle_active{reason=pl1}"] == "the driver gives no reasons for lower clocks"


def test_no_such_device_is_one_clear_line(tmp_path):
    """An empty machine has none; one that is gone, or another vendor's, is not read."""
    assert intel.devices(settings(tmp_path)) == []
    with pytest.raises(Unavailable, match=f"xpu:0: no discrete Intel GPU with a driver at PCI address {BUS}"):
        list(intel.read(DEVICE, settings(tmp_path)))
    foreign = Device(uuid="GPU-1", backend="cuda", index=0, model="x", detail={"bus_id": BUS})
    with pytest.raises(Unavailable, match="cuda:0: no discrete Intel GPU"):
        list(intel.read(foreign, settings(plant(tmp_path, identity("xe")))))


def test_the_probe_runs_through_the_supervisor(tmp_path):
    """Completed on a tree, skipped with its reason where there is no such device."""
    run = run_probe("intel_telemetry", DEVICE, settings(plant(tmp_path / "sys", identity("xe") | XE)))
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {reading.name for reading in run.readings} >= {"clock_hertz", "throttle_active", "energy_joules_total"}
    run = run_probe("intel_telemetry", DEVICE)
    assert run.outcome is Outcome.SKIPPED, run.detail
    assert run.detail == f"xpu:0: no discrete Intel GPU with a driver at PCI address {BUS}"
