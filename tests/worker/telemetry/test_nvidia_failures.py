"""Calls of NVIDIA's library that fail, older drivers and packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.worker.telemetry.agents import Agent, gpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)


@pytest.mark.parametrize("advice", ["none", "!2"])
def test_a_device_that_must_be_reset_says_so_on_any_driver(machine, agent, advice):
    """Drivers before 570 have no reading for it: the code of a refused call is their advice."""
    machine.set(0, "recovery_action", advice)
    machine.fail(0, "nvmlDeviceGetPowerUsage", 16)
    readings, absent = agent.read(gpu(machine, 0))
    assert absent["power_watts"] == "the device must be reset before this can be read"
    assert readings["recovery_action{action=reset}"] == 1
    assert not any(name.startswith("recovery_action") for name in absent)
    assert sum(name.startswith("recovery_action") for name in readings) == 1


@pytest.mark.parametrize(("value", "advice"), [(2, "reboot"), (0, "none")])
def test_the_drivers_own_advice_is_kept(machine, agent, value, advice):
    """A reboot is more than the reset that a refused call asks for; a change of MIG that waits for one is no fault."""
    machine.set(0, "recovery_action", value)
    machine.fail(0, "nvmlDeviceGetPowerUsage", 16)
    readings, _ = agent.read(gpu(machine, 0))
    assert [n for n in readings if n.startswith("recovery_action")] == [f"recovery_action{{action={advice}}}"]


def test_an_older_driver_is_asked_by_the_older_names(machine, agent):
    """A missing call costs nothing where an older one gives the same."""
    whole, _ = agent.read(gpu(machine, 0))
    newer = ("TemperatureV", "CurrentClocksEventReasons", "SupportedClocksEventReasons")
    for name in newer:
        machine.fail(0, f"nvmlDeviceGet{name}", 13)
    readings, _ = agent.read(gpu(machine, 0))
    assert readings == whole


FUNCTIONS = (
    *("EccMode", "MemoryErrorCounter", "SramEccErrorStatus", "RemappedRows", "RowRemapperHistogram", "TemperatureV"),
    *("TemperatureThreshold", "MarginTemperature", "NumFans", "PowerUsage", "EnforcedPowerLimit", "UtilizationRates"),
    *("PowerManagementDefaultLimit", "PowerManagementLimitConstraints", "TotalEnergyConsumption", "NvLinkState"),
    *("CurrentClocksEventReasons", "SupportedClocksEventReasons", "ClockInfo", "MaxClockInfo", "PerformanceState"),
    *("CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkWidth", "MigMode"),
    *("PcieReplayCounter", "NvLinkErrorCounter", "GpuFabricInfoV", "MemoryInfo", "PersistenceMode", "ComputeMode"),
    *("ComputeRunningProcesses_v3", "FieldValues"),
)


def test_no_call_whatever_it_answers_costs_the_poll(machine, agent):
    """Each call of a read fails on its own: the rest is there, and what it gave is absent or comes from elsewhere."""
    machine.set(0, "reasons_supported", 0x7FF)
    whole, _ = agent.read(gpu(machine, 0))
    for function in FUNCTIONS:
        for code in (13, 999):
            machine.fail(0, f"nvmlDeviceGet{function}", code)
            readings, absent = agent.read(gpu(machine, 0))
            gone = {key.partition("{")[0] for key in set(whole) - set(readings)}
            assert gone <= {name.partition("{")[0] for name in absent}, function
            assert len(readings) > len(whole) / 4, function
            assert readings.items() <= whole.items(), function
        machine.unset(0, f"nvmlDeviceGet{function}")


def test_a_gpu_that_is_lost_in_the_middle_ends_the_read(machine, agent):
    """Whichever call hears of it first."""
    for function in FUNCTIONS:
        machine.fail(0, f"nvmlDeviceGet{function}", 15)
        assert agent.refused(gpu(machine, 0)).startswith("GPU is lost: "), function
        machine.unset(0, f"nvmlDeviceGet{function}")
    machine.set(0, "memory_temperature", "!15")
    assert agent.refused(gpu(machine, 0)).startswith("GPU is lost: ")
    machine.unset(0, "memory_temperature")
    assert agent.read(gpu(machine, 0))[0]["temperature_celsius{sensor=memory}"] == 41


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (4, "no permission to use the NVIDIA driver: run as root, or give this user access to /dev/nvidia*"),
        (9, "the NVIDIA driver is not loaded: load its kernel module (modprobe nvidia)"),
        (18, "the driver was upgraded but the old kernel module is still loaded: reboot or reload it"),
        (999, "NVML does not start: Unknown Error (999)"),
    ],
)
def test_a_driver_that_does_not_start_is_one_clear_line(machine, agent, code, text):
    """Inventory and read say the same; once the driver works, so do they."""
    machine.fail(None, "nvmlInitWithFlags", code)
    assert agent.ask("devices", {}) == {"unavailable": text}
    assert agent.refused(gpu(machine, 0)) == text
    machine.unset(None, "nvmlInitWithFlags")
    assert len(agent.inventory()[0]) == 8


def test_an_older_package_costs_only_what_it_does_not_know(machine, tmp_path):
    """As nvidia-ml-py 12.535: without the calls that came later, and without their structures."""
    source = Path(importlib.util.find_spec("pynvml").origin).read_text()
    names = ("TemperatureV", "MarginTemperature", "SramEccErrorStatus", "GpuFabricInfoV")
    gone = [*(f"nvmlDeviceGet{name}" for name in names), "c_nvmlEccSramErrorStatus_v1_t"]
    gone += [f"c_nvmlGpuFabricInfo_v{version}_t" for version in (2, 3)]
    (tmp_path / "pynvml.py").write_text(f"{source}\ndel {', '.join(gone)}\n")
    with Agent(machine, PYTHONPATH=str(tmp_path)) as agent:
        readings, absent = agent.read(gpu(machine, 0))
    assert readings["temperature_celsius{sensor=core}"] == 34
    assert readings["fabric_ready"] == 1
    old = "this version of nvidia-ml-py does not know this call"
    assert absent["ecc_sram_threshold_exceeded"] == absent["temperature_margin_celsius"] == old
