"""Ascend telemetry on constructed answers of npu-smi."""

from __future__ import annotations

import time

import pytest

from canaryd.model import Device, Outcome
from canaryd.worker.telemetry import ascend
from canaryd.worker.telemetry.interface import Unavailable
from tests.command import soon
from tests.worker.telemetry.trees import CAPTURES, checked, command, plant, run_probe

ASCEND = CAPTURES / "ascend"
ANSWERS = {
    "info": ASCEND / "info.txt",
    **{f"info -t {question} -i 0": ASCEND / f"{question}-0.txt" for question in ("board", "ecc", "memory", "common")},
    "info -t board -i 0 -c 0": ASCEND / "board-0-0.txt",
    "info -t board -i 1": ASCEND / "board-1.txt",
    "info -t health -i 1": ASCEND / "health-1.txt",
}
DEVICE = Device(uuid="NPU-1", backend="npu", index=0, model="Ascend", detail={"npu": "0", "chip": "0"})
SECOND = Device(uuid="NPU-2", backend="npu", index=1, model="Ascend", detail={"npu": "1", "chip": "0"})


@pytest.fixture(autouse=True)
def forgetful():
    """Answers are remembered for a sweep; each test begins with none."""
    ascend.close()
    yield
    ascend.close()


@pytest.fixture
def settings(tmp_path):
    """Make a tree without PCI functions, and npu-smi from answers."""

    def make(answers: dict = ANSWERS) -> dict:
        smi = command(tmp_path / "npu-smi", answers, tmp_path / "log")
        return {"npu_smi": smi, "sysfs": str(tmp_path / "sys")}

    return make


def test_npus_are_known_by_their_serial_numbers(settings):
    """A card without a readable one goes by its slot, and that is weak."""
    first, second = ascend.devices(settings())
    assert (first.uuid, first.index, first.model, first.weak_identity) == ("NPU-102400000001", 0, "Ascend 910B3", False)
    assert first.detail == {
        "npu": "0",
        "chip": "0",
        "serial": "102400000001",
        "driver": "25.5.1",
        "firmware": "7.8.0.6.201",
        "product": "IT21TEST",
        "board_id": "0x65",
        "die_id": "00000001 00000002 00000003 00000004 00000005",
        "bus_id": "0000:c1:00.0",
    }
    assert (second.uuid, second.index, second.weak_identity) == ("NPU-0000:c2:00.0", 1, True)


def test_npu_smi_gives_every_reading(settings, tmp_path):
    """Table, memory, errors and clocks of a chip alone on its card, and its link from sysfs."""
    function = "sys/bus/pci/devices/0000:c1:00.0"
    plant(tmp_path, {f"{function}/current_link_speed": "16.0 GT/s PCIe\n", f"{function}/current_link_width": "16\n"})
    readings, absent = checked(ascend.read(DEVICE, settings()))
    assert readings == {
        "device_health{status=ok}": 1,
        "power_watts": 97.6,
        "temperature_celsius{sensor=core}": 52,
        "temperature_celsius{sensor=memory}": 54,
        "utilization_ratio{engine=aicore}": 0.37,
        "memory_used_bytes": 3525 << 20,
        "memory_total_bytes": 65536 << 20,
        "ecc_errors_total{kind=corrected,location=hbm}": 2,
        "ecc_errors_total{kind=uncorrected,location=hbm}": 0,
        "ecc_aggregate_errors_total{kind=corrected,location=hbm}": 17,
        "ecc_aggregate_errors_total{kind=uncorrected,location=hbm}": 1,
        "retired_pages{cause=double_bit}": 1,
        "retired_pages_pending": 1,
        "clock_hertz{domain=aicore}": 1_650_000_000,
        "clock_max_hertz{domain=aicore}": 1_800_000_000,
        "pcie_generation": 4,
        "pcie_width": 16,
    }
    assert {name.partition("{")[0] for name in absent} == {
        "pcie_generation_max",
        "pcie_width_max",
        "pcie_aer_errors_total",
    }


def test_an_alarm_comes_with_its_codes(settings):
    """Each code once; what the card does not answer is absent with what npu-smi said."""
    readings, absent = checked(ascend.read(SECOND, settings()))
    assert readings["device_health{status=alarm}"] == 1
    assert readings["device_fault{code=80E01801}"] == 1
    assert readings["device_fault{code=80C98000}"] == 1
    assert "does not support info -t ecc -i 1." in absent["ecc_errors_total{kind=corrected,location=hbm}"]
    assert "does not support info -t memory -i 1." in absent["temperature_celsius{sensor=memory}"]


def test_the_codes_of_a_neighbour_are_not_taken(settings, tmp_path):
    """Two chips on a card: each has the codes of its own block."""
    table = tmp_path / "table"
    table.write_text((ASCEND / "info-two-chips.txt").read_text().replace("| OK   ", "| Alarm"))
    health = tmp_path / "health"
    health.write_text("NPU ID : 0\n\nError Code : 80E01801\nChip ID : 0\n\nError Code : 80C98000\nChip ID : 1\n")
    smi = settings({"info": table, "info -t health -i 0": health})
    second = Device(uuid="NPU-3", backend="npu", index=1, model="Ascend", detail={"npu": "0", "chip": "1"})
    readings, _ = checked(ascend.read(second, smi))
    assert [key for key in readings if key.startswith("device_fault")] == ["device_fault{code=80C98000}"]


def test_two_chips_share_a_card(settings):
    """Each finds its own values; the card's power is told by its first chip only."""
    smi = settings(
        {
            "info": ASCEND / "info-two-chips.txt",
            "info -t board -i 0": ASCEND / "board-0.txt",
            "info -t memory -i 0": ASCEND / "memory-two-chips.txt",
            "info -t common -i 0": ASCEND / "common-run-together.txt",
        }
    )
    first, second = ascend.devices(smi)
    assert [first.uuid, second.uuid] == ["NPU-102400000001-0", "NPU-102400000001-1"]
    assert first.model == "Ascend 910"
    readings, absent = checked(ascend.read(second, smi))
    assert readings["temperature_celsius{sensor=core}"] == 35
    assert readings["temperature_celsius{sensor=memory}"] == 42
    assert readings["utilization_ratio{engine=aicore}"] == 0.12
    assert absent["power_watts"] == "column Power(W): '-' is not a number"
    # Without a line between the chips nobody can say whose value is whose.
    assert "not printed" in absent["clock_hertz{domain=aicore}"]


def test_the_older_form_is_understood(settings):
    """Fewer columns, DDR memory in place of stacked memory."""
    smi = settings({"info": ASCEND / "info-old.txt"})
    (device,) = ascend.devices(smi)
    assert (device.uuid, device.model, device.detail["npu"]) == ("NPU-0000:81:00.0", "Ascend 310P3", "32768")
    readings, absent = checked(ascend.read(device, smi))
    assert readings["device_health{status=critical}"] == 1
    assert readings["temperature_celsius{sensor=core}"] == 65
    assert readings["memory_total_bytes"] == 44280 << 20
    assert absent["power_watts"] == "column Power(W): 'NA' is not a number"
    assert "failed with status 1" in absent["device_fault"]


def test_devices_of_a_sweep_share_the_answers(settings, tmp_path):
    """The table is asked for once, and a question once per card; close() forgets."""
    smi = settings()
    for device in (DEVICE, SECOND, DEVICE):
        list(ascend.read(device, smi))
    asked = (tmp_path / "log").read_text().splitlines()
    assert len(asked) == len(set(asked)) == 8
    ascend.close()
    list(ascend.read(DEVICE, smi))
    assert (tmp_path / "log").read_text().splitlines().count("info") == 2


def test_a_word_that_is_no_state_of_health_is_absent(settings, tmp_path):
    """Nobody is called healthy, or ill, by a guess."""
    path = tmp_path / "table"
    path.write_text((ASCEND / "info.txt").read_text().replace("| OK   ", "| Fine "))
    _, absent = checked(ascend.read(DEVICE, settings(ANSWERS | {"info": path})))
    assert absent["device_health"] == "npu-smi gives 'Fine', not a state of health"


def test_a_command_that_hangs_costs_its_deadline_once(settings, monkeypatch):
    """The next device of the sweep does not wait for it again."""
    monkeypatch.setattr(ascend, "PATIENCE", 0.5)
    smi = settings(ANSWERS | {"info -t ecc -i 0": "exec sleep 30"})
    begun = time.monotonic()
    for _ in range(2):
        _, absent = checked(ascend.read(DEVICE, smi))
    assert time.monotonic() - begun < soon(5)
    assert "did not answer within 0.5 s" in absent["ecc_errors_total{kind=corrected,location=hbm}"]


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({}, "failed with status 1 and said: This device does not support info."),
        ({"info": "echo DrvMngGetConsoleLogLevel failed"}, "prints no table of devices"),
    ],
)
def test_an_npu_smi_without_a_table_is_one_clear_line(settings, answers, why):
    """The driver is absent, or another tool has taken the name."""
    with pytest.raises(Unavailable, match=why):
        ascend.devices(settings(answers))


def test_the_probe_runs_through_the_supervisor(settings):
    """Completed on captures, skipped with its reason where there is no npu-smi."""
    run = run_probe("ascend_telemetry", DEVICE, settings())
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert {reading.name for reading in run.readings} >= {"device_health", "ecc_errors_total", "power_watts"}
    run = run_probe("ascend_telemetry", DEVICE, {"npu_smi": "no-such-npu-smi"})
    assert run.outcome is Outcome.SKIPPED, run.detail
    assert run.detail == "no-such-npu-smi is not installed, or not in PATH"
