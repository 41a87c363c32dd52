"""NVIDIA's readings are what the device says, and what stands for no value never leaks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.worker.telemetry.agents import NOT_SUPPORTED, gpu, say
from tests.worker.telemetry.vendor_facts import tree

INVALID = "the driver gave no valid value"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)

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
        "memory_reserved_bytes": 577_765_376,
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
