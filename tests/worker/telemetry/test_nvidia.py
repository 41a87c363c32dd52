"""NVIDIA telemetry through the real pynvml on the stand-in for NVML, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.codec import from_json, to_json
from canaryd.facts import Reading
from canaryd.model import Device, Outcome, Run
from canaryd.probe import Absent
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.nvml_stand_in import StandIn
from tests.worker.telemetry.vendor_facts import checked, tree

ROOT = Path(__file__).resolve().parents[3]
PROBE = ROOT / "probes/nvidia_telemetry.py"
PATIENCE = 20.0
AGENT = """
import json, sys
from canaryd.codec import from_json, to_json
from canaryd.model import Device
from canaryd.worker.telemetry import nvidia
from canaryd.worker.telemetry.interface import Unavailable
for line in sys.stdin:
    what, *rest = json.loads(line)
    try:
        if what == "devices":
            answer = {"devices": to_json(nvidia.devices(*rest)), "problems": nvidia.problems()}
        elif what == "read":
            facts = nvidia.read(from_json(Device, rest[0]), *rest[1:])
            answer = {"facts": [[type(fact).__name__, to_json(fact)] for fact in facts]}
        else:
            answer = {"closed": nvidia.close()}
    except Unavailable as error:
        answer = {"unavailable": str(error)}
    except ValueError as error:
        answer = {"wrong": str(error)}
    print(json.dumps(answer), flush=True)
"""
NOT_SUPPORTED = "not supported by this device"
INVALID = "the driver gave no valid value"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)


class Agent:
    """A process that asks canaryd.worker.telemetry.nvidia what it is told to."""

    def __init__(self, machine: StandIn | None, **extra: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            cwd=ROOT,
            env=env | dict(machine.environment if machine else {}) | extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.popen.stdin.close()
        self.popen.wait(PATIENCE)
        self.popen.stdout.close()

    def ask(self, *request) -> dict:
        self.popen.stdin.write(json.dumps(request) + "\n")
        self.popen.stdin.flush()
        return json.loads(self.popen.stdout.readline())

    def inventory(self, settings: dict | None = None) -> tuple[list[Device], list[str]]:
        answer = self.ask("devices", settings or {})
        return [from_json(Device, d) for d in answer["devices"]], answer["problems"]

    def read(self, device: Device, settings: dict | None = None, memory: Path | str = "") -> tuple[dict, dict]:
        """Return readings by key and absences by name; each was held against READINGS."""
        answer = self.ask("read", to_json(device), settings or {}, str(memory))
        assert "facts" in answer, answer
        return checked(from_json({"Reading": Reading, "Absent": Absent}[kind], data) for kind, data in answer["facts"])

    def refused(self, device: Device) -> str:
        return self.ask("read", to_json(device), {})["unavailable"]


@pytest.fixture
def machine(tmp_path):
    return StandIn(tmp_path)


@pytest.fixture
def agent(machine):
    with Agent(machine) as one:
        yield one


def gpu(machine: StandIn, number: int, **fields) -> Device:
    """Return a GPU as the inventory gives it, without having asked."""
    fields = {"detail": {"bus_id": f"0000:1{number:x}:00.0"}} | fields
    return Device(uuid=machine.uuids[number], backend="cuda", index=number, model="NVIDIA H200", **fields)


def say(machine: StandIn, number: int | str, values: dict) -> None:
    for key, value in values.items():
        machine.set(number, key, value)


# --- Identity ---------------------------------------------------------------------------------------------------------


def test_the_inventory_tells_identity_and_versions(machine, agent):
    """Every GPU with what identifies it; what one does not have is not in its detail."""
    say(machine, 2, {"serial": "N/A", "inforom_power": "2.0", "board_id": "none", "domain": "0xa"})
    found, problems = agent.inventory()
    assert problems == []
    assert [d.uuid for d in found] == machine.uuids
    assert [d.name for d in found] == [f"cuda:{i}" for i in range(8)]
    common = {
        "board_part_number": "692-2G520-0280-501",
        "driver": "580.95.05",
        "cuda": "13.0",
        "vbios": "96.00.B8.00.01",
        "inforom": "G520.0280.00.01",
        "inforom_ecc": "7.16",
        "gsp_firmware": "580.95.05",
        "memory_bytes": "150754820096",
        "architecture": "hopper",
        "capability": "9.0",
        "pcie_generation_max": "5",
        "pcie_width_max": "16",
        "nvlinks": "18",
    }
    own = {"serial": "1650423000001", "bus_id": "0000:11:00.0", "board_id": "0x6100", "module_id": "1"}
    assert found[1] == gpu(machine, 1, detail=common | own)
    assert found[2] == gpu(
        machine, 2, detail=common | {"bus_id": "000a:12:00.0", "module_id": "2", "inforom_power": "2.0"}
    )


def test_a_lost_gpu_is_a_problem_and_takes_no_other_with_it(machine, agent):
    """The others are listed and read, though NVML's search by UUID fails for all of them now."""
    machine.lose(3)
    machine.set(5, "uuid", "!999")
    found, problems = agent.inventory()
    assert [d.index for d in found] == [0, 1, 2, 4, 6, 7]
    assert [p.partition(":")[0] for p in problems] == [
        "GPU 3 of NVML could not be identified",
        "GPU 5 of NVML could not be identified",
    ]
    assert "GPU is lost" in problems[0]
    assert "unknown error (999)" in problems[1]
    readings, _ = agent.read(found[3])
    assert readings["temperature_celsius{sensor=core}"] == 34
    assert agent.refused(gpu(machine, 3)).startswith("GPU is lost: it no longer answers on its bus")
    assert agent.refused(gpu(machine, 3, detail={})).startswith("GPU is lost: ")
    nowhere = agent.refused(replace(gpu(machine, 6, detail={}), uuid="GPU-elsewhere"))
    assert nowhere.startswith("GPU GPU-elsewhere is not among those that answer; of others")
    assert "GPU is lost" in nowhere


@pytest.mark.parametrize(
    ("known", "at", "unfound"),
    [
        ("0000:13:00.0", "nvmlDeviceGetHandleByPciBusId_v2", 0),
        ("0000:13:00.0", "nvmlDeviceGetUUID", 0),
        ("0000:13:00.0", "nvmlDeviceGetHandleByIndex_v2", 6),
        ("0000:13:00.0", "nvmlDeviceGetHandleByIndex_v2", 2),
        ("0000:13:00.0", "nvmlDeviceGetUUID", 999),
        ("", "nvmlDeviceGetHandleByIndex_v2", 0),
        ("", "nvmlDeviceGetUUID", 0),
    ],
)
def test_a_gpu_is_known_as_lost_whichever_call_says_so(machine, agent, known, at, unfound):
    """By its address, by its number, by its uuid, and where the driver does not find its address any more."""
    bus = "nvmlDeviceGetHandleByPciBusId_v2"
    machine.fail(3, at, 15)
    if unfound:
        machine.fail(None, bus, unfound)
    assert agent.refused(gpu(machine, 3, detail={"bus_id": known})).startswith("GPU is lost: ")
    assert agent.read(gpu(machine, 4))[0]["temperature_celsius{sensor=core}"] == 34
    machine.fail(None, "nvmlDeviceGetCount_v2", 15)
    machine.unset(None, bus)
    assert agent.read(gpu(machine, 4))[0]["temperature_celsius{sensor=core}"] == 34  # a driver's error accuses no GPU


def test_a_gpu_is_found_by_what_it_is_and_not_by_where_it_was(machine, agent):
    """Moved to another slot it is found there; a stranger in its place is not taken for it."""
    moved = gpu(machine, 4, detail={"bus_id": "0000:77:00.0"})
    swapped = gpu(machine, 4, detail={"bus_id": "0000:11:00.0"})
    machine.set(4, "temperature", 77)
    for device in (moved, swapped, gpu(machine, 4, detail={})):
        assert agent.read(device)[0]["temperature_celsius{sensor=core}"] == 77
    stranger = Device(uuid="GPU-of-yesterday", backend="cuda", index=0, model="", detail={"bus_id": "0000:10:00.0"})
    assert agent.refused(stranger) == "GPU GPU-of-yesterday is no longer there: the driver does not list it"
    machine.fail(6, "nvmlDeviceGetHandleByPciBusId_v2", 4)
    machine.fail(6, "nvmlDeviceGetUUID", 4)
    assert "0000:16:00.0 does not answer: permission denied" in agent.refused(gpu(machine, 6))


# --- Readings ---------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "volatile.corrected.dram": 11,
    "volatile.uncorrected.dram": 12,
    "volatile.corrected.sram": 13,
    "volatile.uncorrected.sram": 14,
    "aggregate.corrected.dram": 15,
    "aggregate.uncorrected.dram": 16,
    "aggregate.corrected.sram": 17,
    "aggregate.uncorrected.sram": 18,
    "volatile.corrected.l2": 999_001,  # part of SRAM: must not be counted again
    "aggregate.corrected.l2": 999_002,
    "ecc_pending": 0,
    "sram.volatile.parity": 21,
    "sram.volatile.sec_ded": 22,
    "sram.aggregate.parity": 23,
    "sram.aggregate.sec_ded": 24,
    "sram.aggregate.l2": 25,
    "sram.aggregate.sm": 26,
    "sram.aggregate.pcie": 27,
    "sram.aggregate.mcu": 28,
    "sram.aggregate.other": 29,
    "sram.threshold": 1,
    "remapped.correctable": 31,
    "remapped.uncorrectable": 32,
    "remapped.pending": 1,
    "remapped.failed": 0,
    "banks.max": 41,
    "banks.high": 42,
    "banks.partial": 43,
    "banks.low": 44,
    "banks.none": 45,
    "retired.single_bit": 51,
    "retired.double_bit": 52,
    "retired.pending": 1,
    "temperature": 61,
    "memory_temperature": 62,
    "temperature_margin": -3,
    "threshold.shutdown": 97,
    "threshold.slowdown": 94,
    "threshold.memory_max": 95,
    "threshold.gpu_max": 87,
    "threshold.acoustic_min": 65,
    "threshold.acoustic_current": 83,
    "threshold.acoustic_max": 90,
    "tlimit.shutdown": -8,
    "tlimit.slowdown": -2,
    "tlimit.memory_max": 1,
    "tlimit.gpu_max": 0,
    "fans": 2,
    "fan.0": 30,
    "fan.1": 105,
    "power": 345_678,
    "power_limit.enforced": 650_000,
    "power_limit.default": 700_000,
    "power_limit.min": 200_000,
    "power_limit.max": 750_000,
    "energy": 9_876_543_210_123,
    "reasons": 0x44,
    "throttle_ns.sw_power_cap": 1_500_000_000,
    "throttle_ns.sw_thermal": 2_000_000_000,
    "throttle_ns.sync_boost": 3_000_000_000,
    "throttle_ns.board_limit": 4_000_000_000,
    "throttle_ns.reliability": 5_000_000_000,
    "throttle_ns.hw_thermal": 86_400_000_000_000_250,
    "throttle_ns.hw_power_brake": 7_000_000_000,
    "clock.graphics": 1755,
    "clock.sm": 1756,
    "clock.memory": 2619,
    "clock.video": 1425,
    "clock_max.graphics": 1980,
    "clock_max.sm": 1981,
    "clock_max.memory": 3201,
    "clock_max.video": 1545,
    "performance_state": 2,
    "pcie_generation": 4,
    "pcie_generation_max": 5,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "pcie_replays": 71,
    "nvlinks": 2,
    "nvlink.0.up": 0,
    "nvlink.0.replay": 81,
    "nvlink.0.recovery": 82,
    "nvlink.0.crc_flit": 83,
    "nvlink.0.crc_data": 84,
    "nvlink.0.ecc_data": 85,
    "nvlink.1.crc_flit": 86,
    "fabric_state": 2,
    "utilization.gpu": 37,
    "utilization.memory": 21,
    "memory_total": 150_754_820_096,
    "memory_used": 91_234_567_890,
    "compute_mode": 3,
    "processes": "4242:1073741824,77:5",
    "recovery_action": 4,
}


def expected() -> dict[str, float]:
    volatile, aggregate = "ecc_errors_total", "ecc_aggregate_errors_total"
    places = [(kind, place) for place in ("dram", "sram") for kind in ("corrected", "uncorrected")]
    wanted: dict[str, float] = {"ecc_enabled{when=current}": 1, "ecc_enabled{when=pending}": 0}
    for base, name in ((11, volatile), (15, aggregate)):
        wanted |= {f"{name}{{kind={kind},location={place}}}": base + i for i, (kind, place) in enumerate(places)}
    wanted |= {
        "ecc_sram_threshold_exceeded": 1,
        "ecc_sram_uncorrected_total{detection=parity}": 21,
        "ecc_sram_uncorrected_total{detection=sec_ded}": 22,
        "ecc_sram_aggregate_uncorrected_total{detection=parity}": 23,
        "ecc_sram_aggregate_uncorrected_total{detection=sec_ded}": 24,
        "row_remap_rows{cause=correctable}": 31,
        "row_remap_rows{cause=uncorrectable}": 32,
        "row_remap_pending": 1,
        "row_remap_failed": 0,
        "retired_pages{cause=single_bit}": 51,
        "retired_pages{cause=double_bit}": 52,
        "retired_pages_pending": 1,
        "temperature_celsius{sensor=core}": 61,
        "temperature_celsius{sensor=memory}": 62,
        "temperature_margin_celsius": -3,
        "fan_ratio{fan=0}": 0.3,
        "fan_ratio{fan=1}": 1.05,
        "power_watts": 345.678,
        "energy_joules_total": 9_876_543_210.123,
        "performance_state": 2,
        "pcie_generation": 4,
        "pcie_generation_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "pcie_replays_total": 71,
        "nvlink_up{link=0}": 0,
        "nvlink_up{link=1}": 1,
        "fabric_ready": 0,
        "utilization_ratio{engine=gpu}": 0.37,
        "utilization_ratio{engine=memory}": 0.21,
        "memory_total_bytes": 150_754_820_096,
        "memory_used_bytes": 91_234_567_890,
        "persistence_mode": 1,
        "compute_mode{mode=exclusive_process}": 1,
        "mig_enabled": 0,
        "compute_processes": 2,
        "compute_processes_memory_bytes": 1_073_741_829,
        "recovery_action{action=drain_and_reset}": 1,
        "pcie_aer_errors_total{severity=correctable}": 91,
        "pcie_aer_errors_total{severity=nonfatal}": 92,
        "pcie_aer_errors_total{severity=fatal}": 93,
    }
    labelled = {
        "ecc_sram_units_total{unit": {"l2": 25, "sm": 26, "pcie": 27, "mcu": 28, "other": 29},
        "row_remap_banks{available": {"max": 41, "high": 42, "partial": 43, "low": 44, "none": 45},
        "temperature_threshold_celsius{threshold": {
            "shutdown": 97,
            "slowdown": 94,
            "memory_max": 95,
            "gpu_max": 87,
            "acoustic_min": 65,
            "acoustic_current": 83,
            "acoustic_max": 90,
        },
        "temperature_margin_threshold_celsius{threshold": {
            "shutdown": -8,
            "slowdown": -2,
            "memory_max": 1,
            "gpu_max": 0,
        },
        "power_limit_watts{limit": {"enforced": 650, "default": 700, "min": 200, "max": 750},
        "throttle_active{reason": {
            "gpu_idle": 0,
            "applications_clocks": 0,
            "sw_power_cap": 1,
            "hw_slowdown": 0,
            "sync_boost": 0,
            "sw_thermal": 0,
            "hw_thermal": 1,
            "hw_power_brake": 0,
            "display_clocks": 0,
        },
        "throttle_seconds_total{reason": {
            "sw_power_cap": 1.5,
            "sw_thermal": 2,
            "sync_boost": 3,
            "board_limit": 4,
            "reliability": 5,
            "hw_thermal": 86_400_000.00000025,
            "hw_power_brake": 7,
        },
        "clock_hertz{domain": {"graphics": 1755e6, "sm": 1756e6, "memory": 2619e6, "video": 1425e6},
        "clock_max_hertz{domain": {"graphics": 1980e6, "sm": 1981e6, "memory": 3201e6, "video": 1545e6},
    }
    wanted |= {f"{start}={k}}}": v for start, values in labelled.items() for k, v in values.items()}
    kinds = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
    wanted |= {f"nvlink_errors_total{{kind={kind},link=0}}": 81 + i for i, kind in enumerate(kinds)}
    wanted |= {f"nvlink_errors_total{{kind={k},link=1}}": 86 if k == "crc_flit" else 0 for k in kinds}
    return wanted


def test_every_reading_is_what_the_device_says(machine, agent, tmp_path):
    """Each field at a value of its own arrives under its own name and labels, in base units; its neighbours do not."""
    files = {"correctable": "RxErr 90\nTOTAL_ERR_COR 91", "nonfatal": "TOTAL_ERR_NONFATAL 92"}
    files["fatal"] = "TOTAL_ERR_FATAL 93"
    where = "bus/pci/devices/0000:12:00.0/aer_dev_"
    sysfs = tree(tmp_path / "sys", {where + severity: text + "\n" for severity, text in files.items()})
    say(machine, 2, EVERYTHING)
    readings, absent = agent.read(gpu(machine, 2), {"sysfs": str(sysfs)})
    assert readings == pytest.approx(expected(), rel=1e-12)
    assert absent == {f"throttle_active{{reason={r}}}": NOT_SUPPORTED for r in ("board_limit", "reliability")}
    others, _ = agent.read(gpu(machine, 1), {"sysfs": str(sysfs)})
    assert others["temperature_celsius{sensor=core}"] == 34
    assert others["ecc_errors_total{kind=corrected,location=dram}"] == 0


def test_values_change_while_the_process_runs(machine, agent):
    """A read shows the moment: nothing is kept from the one before."""
    device = gpu(machine, 0)
    for value in (40, 55, 70):
        machine.set(0, "temperature", value)
        assert agent.read(device)[0]["temperature_celsius{sensor=core}"] == value


def test_a_device_without_sram_counters_counts_by_cache(machine, agent):
    """Before Turing each cache counts for itself; what it has no counter for is silent, not zero."""
    say(machine, 0, {f"{c}.{k}.sram": "none" for c in ("volatile", "aggregate") for k in ("corrected", "uncorrected")})
    places = ("l1", "l2", "register_file", "texture", "texture_shm", "cbu")
    say(machine, 0, {f"volatile.uncorrected.{place}": n for n, place in enumerate(places, 1)})
    readings, absent = agent.read(gpu(machine, 0))
    found = {k: v for k, v in readings.items() if k.startswith("ecc_errors_total")}
    wanted = {f"ecc_errors_total{{kind=uncorrected,location={place}}}": n for n, place in enumerate(places, 1)}
    dram = {f"ecc_errors_total{{kind={kind},location=dram}}": 0 for kind in ("corrected", "uncorrected")}
    assert found == wanted | dram
    key = "ecc_aggregate_errors_total{kind=uncorrected,location=sram}"
    assert absent[key] == NOT_SUPPORTED


def test_a_device_that_only_sums_its_errors_gives_the_sum(machine, agent):
    """Where no location has a counter, the total stands for all of them."""
    for counter in ("volatile", "aggregate"):
        for kind in ("corrected", "uncorrected"):
            say(machine, 0, {f"{counter}.{kind}.{place}": "none" for place in ("dram", "sram")})
    say(machine, 0, {"volatile.corrected.all": 4, "volatile.uncorrected.all": 5})
    readings, absent = agent.read(gpu(machine, 0))
    found = {k: v for k, v in readings.items() if k.startswith("ecc_errors_total")}
    assert found == {f"ecc_errors_total{{kind={k},location=all}}": n for k, n in (("corrected", 4), ("uncorrected", 5))}
    assert absent["ecc_aggregate_errors_total"] == NOT_SUPPORTED


def test_error_correction_that_is_off_is_the_reason(machine, agent):
    """No counters is no zero, and not the device's fault either."""
    machine.set(0, "ecc_current", 0)
    readings, absent = agent.read(gpu(machine, 0))
    assert readings["ecc_enabled{when=current}"] == 0
    assert not [key for key in readings if key.startswith(("ecc_errors", "ecc_aggregate"))]
    assert absent["ecc_errors_total"] == absent["ecc_aggregate_errors_total"] == "error correction is off"


def test_without_root_the_sram_totals_are_there_all_the_same(machine, agent):
    """NVML tells the SRAM status to root alone: the counters come from elsewhere and do not change their names."""
    machine.fail(0, "nvmlDeviceGetSramEccErrorStatus", 4)
    readings, absent = agent.read(gpu(machine, 0))
    assert readings["ecc_errors_total{kind=uncorrected,location=sram}"] == 0
    assert absent["ecc_sram_threshold_exceeded"] == "permission denied: run as root"
    assert absent["ecc_sram_units_total"] == "permission denied: run as root"


def test_links_of_blackwell_count_other_things(machine, agent):
    """The counters of older links are gone there; the new ones are asked for in their place."""
    machine.fail(0, "nvmlDeviceGetNvLinkErrorCounter", 3)
    say(machine, 0, {"nvlinks": 2, "nvlink.malformed": 0, "nvlink.1.effective": 7, "nvlink.recoveries": 3})
    readings, absent = agent.read(gpu(machine, 0))
    assert {k: v for k, v in readings.items() if k.startswith("nvlink_errors")} == {
        "nvlink_errors_total{kind=malformed,link=0}": 0,
        "nvlink_errors_total{kind=malformed,link=1}": 0,
        "nvlink_errors_total{kind=effective,link=1}": 7,
        "nvlink_errors_total{kind=recovery,link=0}": 3,
        "nvlink_errors_total{kind=recovery,link=1}": 3,
    }
    assert absent["nvlink_errors_total{kind=effective,link=0}"] == NOT_SUPPORTED


@pytest.mark.parametrize(("links", "reason"), [(0, "this device has no NVLink"), ("none", NOT_SUPPORTED)])
def test_a_device_without_links_says_so_once(machine, agent, links, reason):
    """No series for links that do not exist, and one reason for all of them."""
    machine.set(0, "nvlinks", links)
    readings, absent = agent.read(gpu(machine, 0))
    assert not [key for key in readings if key.startswith("nvlink")]
    assert {k: v for k, v in absent.items() if k.startswith("nvlink")} == {
        "nvlink_up": reason,
        "nvlink_errors_total": reason,
    }


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("535.261.03", False),
        ("570.133.20", False),
        ("575.57.08", True),
        ("580.65.06", True),
        ("580.76.05", False),
        ("580.82.07", True),
        ("590.44.01", True),
        ("no version", False),
    ],
)
def test_hardware_throttling_is_asked_by_the_number_that_the_driver_gave_it(machine, agent, driver, known):
    """The fields have moved; where their number is not certain, nothing is read, for it would be something else."""
    machine.set(None, "driver", driver)
    say(machine, 0, {"throttle_ns.hw_thermal": 2_000_000_000, "throttle_ns.hw_power_brake": 3_000_000_000})
    readings, absent = agent.read(gpu(machine, 0))
    keys = [f"throttle_seconds_total{{reason={r}}}" for r in ("hw_thermal", "hw_power_brake")]
    if known:
        assert [readings[key] for key in keys] == [2, 3]
    else:
        assert [absent[key] for key in keys] == ["this driver has no known field for it"] * 2
    assert readings["throttle_seconds_total{reason=sw_thermal}"] == 0


# --- What is no value -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "values", "name", "reason"),
    [
        ("temperature", (-256, 0, 0xFFFFFFFF, 0x7FFFFFF0), "temperature_celsius{sensor=core}", INVALID),
        ("memory_temperature", (-256, 0, 0xFFFFFFFF, 0x7FFFFFF0), "temperature_celsius{sensor=memory}", INVALID),
        ("tlimit.slowdown", (-256, 0x7FFFFFF0), "temperature_margin_threshold_celsius{threshold=slowdown}", INVALID),
        ("temperature_margin", (-256, 0x7FFFFFF0), "temperature_margin_celsius", INVALID),
        ("power", (0xFFFFFFFF, 0x7FFFFFF0), "power_watts", INVALID),
        ("energy", (2**64 - 1, 9223372036854775794), "energy_joules_total", INVALID),
        ("volatile.corrected.dram", (2**64 - 1,), "ecc_errors_total{kind=corrected,location=dram}", INVALID),
        ("throttle_ns.sw_thermal", (2**64 - 1, 2**63 - 14), "throttle_seconds_total{reason=sw_thermal}", INVALID),
        ("utilization.gpu", (0xFFFFFFFF, 101), "utilization_ratio{engine=gpu}", INVALID),
        ("memory_used", (2**64 - 1,), "memory_used_bytes", INVALID),
        ("clock.sm", (0xFFFFFFFF,), "clock_hertz{domain=sm}", INVALID),
        ("pcie_width", (0xFFFFFFFF,), "pcie_width", INVALID),
        ("pcie_replays", (0xFFFFFFFF,), "pcie_replays_total", INVALID),
        ("nvlinks", (0xFFFFFFFF,), "nvlink_up", INVALID),
        ("compute_mode", (0xFFFFFFFF,), "compute_mode", INVALID),
        ("recovery_action", (0xFFFFFFFF,), "recovery_action", INVALID),
        ("performance_state", (32,), "performance_state", "the driver does not know the state"),
        ("remapped.failed", (7,), "row_remap_failed", "the driver gave 7, wanted 0 or 1"),
        ("fabric_state", (0,), "fabric_ready", "not part of an NVLink fabric"),
        ("fabric_state", (9,), "fabric_ready", "the fabric is unknown(9)"),
        ("type.memory_temperature", (9,), "temperature_celsius{sensor=memory}", "unknown type (9)"),
        (
            "processes",
            ("1:5,2:none",),
            "compute_processes_memory_bytes",
            "does not say how much memory each process uses",
        ),
        ("fans", (0,), "fan_ratio", "this device has no fan of its own"),
    ],
)
def test_what_stands_for_no_value_never_leaks(machine, agent, key, values, name, reason):
    """Sentinels of NVML and DCGM and numbers that cannot be are absences with a reason."""
    for value in values:
        machine.set(0, key, value)
        readings, absent = agent.read(gpu(machine, 0))
        assert name not in readings
        assert reason in absent[name]


def test_a_newer_driver_may_know_more_words(machine, agent):
    """A value that came after this release is named by its number."""
    say(machine, 0, {"compute_mode": 9, "recovery_action": 42, "reasons": 1 << 20 | 8, "architecture": 99})
    readings, _ = agent.read(gpu(machine, 0))
    assert readings["compute_mode{mode=unknown(9)}"] == 1
    assert readings["recovery_action{action=unknown(42)}"] == 1
    assert readings["throttle_active{reason=unknown(0x100000)}"] == 1
    assert readings["throttle_active{reason=hw_slowdown}"] == 1
    assert agent.inventory()[0][0].detail["architecture"] == "unknown(99)"


# --- Calls that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (2, "NVML: Invalid Argument (2)"),
        (3, NOT_SUPPORTED),
        (4, "permission denied: run as root"),
        (10, "the driver did not answer in time"),
        (13, "the driver does not know this call"),
        (16, "the device must be reset before this can be read"),
        (21, "NVML: stand-in error 21 (21)"),
        (999, "the driver reports an unknown error (999)"),
    ],
)
def test_a_failing_call_is_one_absence(machine, agent, code, reason):
    """It costs its own reading and no other."""
    whole, _ = agent.read(gpu(machine, 0))
    machine.fail(0, "nvmlDeviceGetPowerUsage", code)
    readings, absent = agent.read(gpu(machine, 0))
    assert absent["power_watts"] == reason
    assert set(whole) - set(readings) == {"power_watts"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [(2, "the driver does not know this field"), (4, "permission denied: run as root"), (21, "NVML: error 21")],
)
def test_a_failing_field_is_one_absence(machine, agent, code, reason):
    """Each value of the batch has a code of its own."""
    whole, _ = agent.read(gpu(machine, 0))
    machine.set(0, "memory_temperature", f"!{code}")
    readings, absent = agent.read(gpu(machine, 0))
    assert absent["temperature_celsius{sensor=memory}"] == reason
    assert set(whole) - set(readings) == {"temperature_celsius{sensor=memory}"}


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


def test_without_a_library_it_says_so(machine):
    """The loader's own failure, not a made-up code."""
    with Agent(None) as agent:
        answer = agent.ask("devices", {})
    assert answer == {"unavailable": "libnvidia-ml.so.1 is not here: no NVIDIA driver is installed"}


def test_a_package_that_breaks_at_import_is_one_clear_line(machine, tmp_path):
    """Whatever the binding raises at import, the poll says it in a sentence."""
    (tmp_path / "pynvml.py").write_text("raise KeyError('HOME')\n")
    with Agent(machine, PYTHONPATH=str(tmp_path)) as agent:
        answer = agent.ask("devices", {})
    text = "nvidia-ml-py cannot be imported (KeyError: 'HOME'): install it beside canaryd"
    assert answer == {"unavailable": text}


def test_an_older_package_costs_only_what_it_does_not_know(machine, tmp_path):
    """As nvidia-ml-py 12.535: without the calls that came later, and without their structures."""
    source = Path(importlib.util.find_spec("pynvml").origin).read_text()
    names = ("TemperatureV", "MarginTemperature", "SramEccErrorStatus", "GpuFabricInfoV")
    gone = [*(f"nvmlDeviceGet{name}" for name in names), "c_nvmlEccSramErrorStatus_v1_t", "c_nvmlGpuFabricInfo_v2_t"]
    (tmp_path / "pynvml.py").write_text(f"{source}\ndel {', '.join(gone)}\n")
    with Agent(machine, PYTHONPATH=str(tmp_path)) as agent:
        readings, absent = agent.read(gpu(machine, 0))
    assert readings["temperature_celsius{sensor=core}"] == 34
    assert readings["fabric_ready"] == 1
    old = "this version of nvidia-ml-py does not know this call"
    assert absent["ecc_sram_threshold_exceeded"] == absent["temperature_margin_celsius"] == old


def test_a_driver_without_gpus_has_none(machine, agent):
    """A driver that works and lists nothing is no failure."""
    machine.set(None, "count", 0)
    assert agent.inventory() == ([], [])
    machine.set(None, "count", "!999")
    assert "does not count its GPUs" in agent.ask("devices", {})["unavailable"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sysfs": 5}, "sysfs: got 5, wanted an absolute path such as '/sys'"),
        ({"sysf": "/sys"}, "sysf: nvidia_telemetry has no such setting; it has: sysfs"),
    ],
)
def test_a_wrong_setting_is_refused(machine, agent, settings, text):
    """What the probe has no setting for is an error that says what there is."""
    assert agent.ask("devices", settings) == {"wrong": text}
    assert agent.ask("read", to_json(gpu(machine, 0)), settings) == {"wrong": text}


# --- MIG --------------------------------------------------------------------------------------------------------------


def test_instances_are_devices_of_their_own(machine, agent):
    """Beside their GPU, which they name; with their own memory and what they share with it."""
    machine.divide(1, 2)
    machine.set("1/1", "gpu_instance_id", 9)
    found, problems = agent.inventory()
    assert problems == []
    assert [d.name for d in found] == ["cuda:0", "cuda:1", "cuda:1.0", "cuda:1.1", *(f"cuda:{i}" for i in range(2, 8))]
    whole, first, second = found[1:4]
    assert (first.uuid, first.parent, first.index) == ("MIG-00000000-0000-4000-8100-000000000000", whole.uuid, 1)
    assert first.model == "NVIDIA H200 MIG 1g.18gb"
    shared = ("serial", "board_part_number", "bus_id", "driver", "cuda", "vbios", "inforom", "gsp_firmware")
    assert first.detail == {
        "instance": "0",
        "profile": "1g.18gb",
        "gpu_instance_id": "0",
        "compute_instance_id": "0",
        "memory_bytes": "18253611008",
        "multiprocessors": "16",
        "architecture": "hopper",
        "capability": "9.0",
    } | {key: whole.detail[key] for key in shared}
    assert second.detail["gpu_instance_id"] == "9"


def test_an_instance_gives_what_it_has_and_no_list_of_what_it_lacks(machine, agent):
    """Memory, processes and the errors that are counted per instance; the rest is read on its GPU."""
    machine.divide(1, 2)
    say(machine, "1/1", {"memory_used": 5_000_000, "processes": "9:4096", "volatile.uncorrected.sram": 3})
    found, _ = agent.inventory()
    assert agent.read(found[3]) == (
        {
            "memory_total_bytes": 18253611008,
            "memory_used_bytes": 5_000_000,
            "compute_processes": 1,
            "compute_processes_memory_bytes": 4096,
            "ecc_errors_total{kind=uncorrected,location=sram}": 3,
        },
        {},
    )
    readings, absent = agent.read(found[1])
    assert readings["mig_enabled"] == 1
    assert readings["temperature_celsius{sensor=core}"] == 34
    assert readings["ecc_aggregate_errors_total{kind=uncorrected,location=dram}"] == 0
    for name in ("ecc_errors_total", "row_remap_rows", "row_remap_failed", "utilization_ratio"):
        assert absent[name] == NOT_SUPPORTED


def test_an_instance_that_was_dissolved_is_gone(machine, agent):
    """Its GPU is there, it is not."""
    machine.divide(1, 2)
    found, _ = agent.inventory()
    machine.set(1, "mig_instances", 1)
    assert agent.refused(found[3]).endswith("is no longer there: its GPU was partitioned again")
    machine.lose(1)
    assert agent.refused(found[2]).startswith("GPU is lost: ")


# --- Handles ----------------------------------------------------------------------------------------------------------


def test_close_lets_go_of_the_driver(machine, agent):
    """Between the requests of a sweep it is held; afterwards only the library's text is mapped, and then nothing."""
    agent.read(gpu(machine, 0))
    assert machine.holders() == {agent.popen.pid: ["library", "handle"]}
    agent.ask("close")
    assert machine.holders() == {agent.popen.pid: ["library"]}
    agent.read(gpu(machine, 0))
    assert machine.holders() == {agent.popen.pid: ["library", "handle"]}
    agent.popen.stdin.close()
    agent.popen.wait(PATIENCE)
    assert machine.holders() == {}


def test_without_persistence_letting_go_forgets_volatile_errors(machine, agent):
    """What makes canaryd keep a handle there; as long as anybody holds one, nothing is forgotten."""
    device, volatile = gpu(machine, 0), "ecc_errors_total{kind=corrected,location=dram}"
    aggregate = volatile.replace("errors", "aggregate_errors")

    def counted() -> tuple[float, float]:
        readings, _ = agent.read(device)
        return readings[volatile], readings[aggregate]

    machine.set(0, "persistence", 0)
    say(machine, 0, {"volatile.corrected.dram": 5, "aggregate.corrected.dram": 5})
    assert counted() == (0, 5)
    say(machine, 0, {"volatile.corrected.dram": 7, "aggregate.corrected.dram": 7})
    assert counted() == (2, 7)
    with Agent(machine) as keeper:
        keeper.inventory()
        agent.ask("close")
        assert counted() == (2, 7)
    agent.ask("close")
    assert counted() == (0, 7)
    assert agent.read(device)[0]["persistence_mode"] == 0


# --- How often the driver is asked ------------------------------------------------------------------------------------


def swept(machine: StandIn, directory: Path, number: int = 1) -> tuple[int, dict, dict]:
    """Return how many calls one sweep's read of a GPU made, in a process of its own, and what it read."""
    calls = directory / "calls"
    calls.write_text("")
    with Agent(machine, NVML_STAND_IN_CALLS=str(calls)) as agent:
        found = agent.read(gpu(machine, number), memory=directory / "memory")
    return len(calls.read_text().split()), *found


def test_a_sweep_asks_for_at_most_forty_things(machine, agent, tmp_path):
    """What does not change is asked once a day, links in one call; every reading is there all the same.

    Two kinds of errors have no field for links beyond the twelfth: a GPU of 18 that counts them takes 12 calls more.
    """
    say(machine, 1, {"nvlink.3.replay": 7, "nvlink.14.crc_flit": 5, "nvlink.2.up": 0})
    whole = agent.read(gpu(machine, 1))
    first, *found = swept(machine, tmp_path)
    assert [*found] == [*whole]
    assert first > 100
    machine.set(1, "nvlink.14.crc_flit", 6)
    later, readings, absent = swept(machine, tmp_path)
    assert (readings["nvlink_errors_total{kind=crc_flit,link=14}"], readings["nvlink_up{link=2}"]) == (6, 0)
    assert (readings.keys(), absent) == (whole[0].keys(), whole[1])
    assert later <= 40 + 2 * (18 - 12)
    machine.set(2, "nvlinks", 12)
    swept(machine, tmp_path, 2)
    assert swept(machine, tmp_path, 2)[0] <= 40


def test_fields_that_say_something_else_are_not_believed(machine, agent, tmp_path):
    """Where a driver does not know the fields of links, or another driver came, the calls are asked."""
    machine.set(None, "no_link_fields", 1)
    whole = agent.read(gpu(machine, 1))
    for _ in range(2):
        calls, *found = swept(machine, tmp_path)
        assert [*found] == [*whole]
        assert calls > 100
    machine.unset(None, "no_link_fields")
    machine.set(None, "driver", "590.44.01")
    swept(machine, tmp_path)
    assert swept(machine, tmp_path)[0] < 60


@pytest.mark.parametrize("kept", ["", "{", '{"driver": "580.95.05", "at": 0, "known": {}}', '{"driver": "580.95.05"}'])
def test_a_memory_that_is_old_or_damaged_is_made_anew(machine, agent, tmp_path, kept):
    """It is what it would be without."""
    file = tmp_path / f"memory/nvml-{machine.uuids[1]}.json"
    file.parent.mkdir()
    file.write_text(kept)
    calls, *found = swept(machine, tmp_path)
    assert ([*found], calls > 100) == ([*agent.read(gpu(machine, 1))], True)
    assert swept(machine, tmp_path)[0] < 60


# --- The probe, through the supervisor --------------------------------------------------------------------------------


def run_probe(machine: StandIn, device: Device, timeout: float = PATIENCE) -> Run:
    spec = importlib.util.spec_from_file_location("nvidia_telemetry", PROBE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    request = RunRequest(probe_path=PROBE, spec=module.SPEC, device=device, level="quick", seed=1)
    with Series(WorkerSpec(env=machine.environment), grace=0.5) as series:
        return series.run(request, timeout)


def test_the_probe_completes(machine):
    """Facts of one GPU, and nothing is held afterwards."""
    machine.set(6, "temperature", 58)
    run = run_probe(machine, gpu(machine, 6))
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {r.key: r.value for r in run.readings}["temperature_celsius{sensor=core}"] == 58
    assert run.absent["retired_pages"] == NOT_SUPPORTED
    assert machine.holders() == {}


@pytest.mark.parametrize(("mischief", "outcome"), [(StandIn.hang, Outcome.TIMED_OUT), (StandIn.crash, Outcome.CRASHED)])
def test_a_call_that_hangs_or_crashes_costs_the_worker(machine, mischief, outcome):
    """That poll is lost and says where it hung; the other GPUs are read as before."""
    mischief(machine, 6, "nvmlDeviceGetPowerUsage")
    run = run_probe(machine, gpu(machine, 6), timeout=3.0)
    assert run.outcome is outcome, run.detail
    assert "nvmlDeviceGetPowerUsage" in run.detail
    assert run_probe(machine, gpu(machine, 5)).outcome is Outcome.COMPLETED
    assert machine.holders() == {}


def test_a_driver_that_hangs_at_the_start_costs_the_worker(machine):
    """A hang inside nvmlInit is killed at the deadline like any other call."""
    machine.hang(None, "nvmlInitWithFlags")
    run = run_probe(machine, gpu(machine, 0), timeout=3.0)
    assert (run.outcome, run.readings) == (Outcome.TIMED_OUT, ())


def test_what_cannot_be_asked_is_skipped_with_the_reason(machine):
    """A lost GPU and a missing driver are no errors of the probe."""
    machine.lose(2)
    run = run_probe(machine, gpu(machine, 2))
    assert run.outcome is Outcome.SKIPPED
    assert run.detail.startswith("GPU is lost: ")
    machine.fail(None, "nvmlInitWithFlags", 9)
    run = run_probe(machine, gpu(machine, 1))
    assert (run.outcome, run.detail.partition(":")[0]) == (Outcome.SKIPPED, "the NVIDIA driver is not loaded")
