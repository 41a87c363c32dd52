"""NVIDIA's devices: identity, instances, handles, how often the driver is asked, the probe."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.model import Device, Outcome, Run
from tests.command import soon
from tests.nvml_stand_in import StandIn
from tests.worker.telemetry import trees
from tests.worker.telemetry.agents import NOT_SUPPORTED, PATIENCE, Agent, gpu, say

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)


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
        "confidential_computing": "off",
    }
    own = {"serial": "1650423000001", "bus_id": "0000:11:00.0", "board_id": "0x6100", "module_id": "1"}
    assert found[1] == gpu(machine, 1, detail=common | own)
    assert found[2] == gpu(
        machine, 2, detail=common | {"bus_id": "000a:12:00.0", "module_id": "2", "inforom_power": "2.0"}
    )


def test_a_fabric_of_several_machines_is_a_fact_of_the_gpu(machine, agent):
    """Which cluster, and which clique of it; the fabric of one machine has no name."""
    say(machine, 2, {"fabric_cluster": 0xC1, "fabric_clique": 7})
    details = [d.detail for d in agent.inventory()[0]]
    assert details[2]["fabric_cluster"] == "00000000-0000-0000-0000-0000000000c1"
    assert details[2]["fabric_clique"] == "7"
    assert "fabric_cluster" not in details[1]


@pytest.mark.parametrize(
    ("feature", "several", "told"),
    [(1, 0, "on"), (1, 2, "on, nvle"), (0, 1, "off, protected_pcie"), (0, "none", "off"), ("none", "none", None)],
)
def test_confidential_computing_is_a_fact_of_the_gpu(machine, agent, feature, several, told):
    """It is the driver's for all GPUs; one that does not know it tells nothing."""
    machine.set(None, "cc_feature", feature)
    machine.set(None, "cc_multi_gpu", several)
    assert {d.detail.get("confidential_computing") for d in agent.inventory()[0]} == {told}


def test_a_lost_gpu_is_a_problem_and_takes_no_other_with_it(machine, agent):
    """The others are listed and read, though NVML's search by UUID fails for all of them now."""
    machine.lose(3)
    machine.set(5, "uuid", "!999")
    found, problems = agent.inventory()
    assert [d.index for d in found if not d.weak_identity] == [0, 1, 2, 4, 6, 7]
    places = [(d.uuid, d.index) for d in found if d.weak_identity]  # of one that is lost NVML tells no address
    assert places == [("NVML-3", 3), ("PCI-0000:15:00.0", 5)]
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


@pytest.mark.parametrize("code", [16, 999])
def test_a_gpu_that_alone_cannot_be_opened_is_lost(machine, agent, code):
    """Its siblings answer through the same driver. Where none does, or the right is missing, it may not be the GPU."""
    handles = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByPciBusId_v2")
    for handle in handles:
        machine.fail(3, handle, code)
    assert agent.lost(gpu(machine, 3))
    assert agent.read(gpu(machine, 4))[0]["temperature_celsius{sensor=core}"] == 34
    for number, handle in itertools.product(range(8), handles):
        machine.fail(number, handle, code)
    assert not agent.lost(gpu(machine, 3))
    for handle in handles:
        machine.unset(4, handle)
        machine.fail(3, handle, 4)
    assert not agent.lost(gpu(machine, 3))


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
        "confidential_computing": "off",
    } | {key: whole.detail[key] for key in shared}
    assert second.detail["gpu_instance_id"] == "9"


def test_an_instance_gives_what_it_has_and_no_list_of_what_it_lacks(machine, agent):
    """Memory, processes and the errors that are counted per instance; the rest is read on its GPU."""
    machine.divide(1, 2)
    say(machine, "1/1", {"memory_used": 5_000_000, "processes": "4999999:4096", "volatile.uncorrected.sram": 3})
    found, _ = agent.inventory()
    assert agent.read(found[3]) == (
        {
            "memory_total_bytes": 18253611008,
            "memory_used_bytes": 5_000_000,
            "memory_reserved_bytes": 0,
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


def run_probe(machine: StandIn, device: Device, timeout: float = PATIENCE) -> Run:
    return trees.run_probe("nvidia_telemetry", device, timeout=timeout, env=dict(machine.environment))


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
    run = run_probe(machine, gpu(machine, 6), timeout=soon(3.0))
    assert run.outcome is outcome, run.detail
    assert "nvmlDeviceGetPowerUsage" in run.detail
    assert run_probe(machine, gpu(machine, 5)).outcome is Outcome.COMPLETED
    assert machine.holders() == {}


def test_what_cannot_be_asked_is_skipped_with_the_reason(machine):
    """A lost GPU and a missing driver are no errors of the probe."""
    machine.lose(2)
    run = run_probe(machine, gpu(machine, 2))
    assert run.outcome is Outcome.SKIPPED
    assert run.detail.startswith("GPU is lost: ")
    machine.fail(None, "nvmlInitWithFlags", 9)
    run = run_probe(machine, gpu(machine, 1))
    assert (run.outcome, run.detail.partition(":")[0]) == (Outcome.SKIPPED, "the NVIDIA driver is not loaded")
