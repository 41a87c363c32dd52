"""NVIDIA's readings are what the device says, and what stands for no value never leaks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time

import pytest

from tests.worker.telemetry.agents import NOT_SUPPORTED, gpu, say
from tests.worker.telemetry.trees import plant

INVALID = "the driver gave no valid value"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None, reason="nvidia-ml-py is not installed in this interpreter"
)

MEGA = 10**6
TABLE = (
    # The stand-in's key, the reading, how many of its units are one of the reading's, word → what the device says.
    ("volatile.{}.dram", "ecc_errors_total{{kind={},location=dram}}", 1, {"corrected": 11, "uncorrected": 12}),
    ("volatile.{}.sram", "ecc_errors_total{{kind={},location=sram}}", 1, {"corrected": 13, "uncorrected": 14}),
    (
        "aggregate.{}.dram",
        "ecc_aggregate_errors_total{{kind={},location=dram}}",
        1,
        {"corrected": 15, "uncorrected": 16},
    ),
    (
        "aggregate.{}.sram",
        "ecc_aggregate_errors_total{{kind={},location=sram}}",
        1,
        {"corrected": 17, "uncorrected": 18},
    ),
    ("ecc_{}", "ecc_enabled{{when={}}}", 1, {"current": 1, "pending": 0}),
    ("sram.volatile.{}", "ecc_sram_uncorrected_total{{detection={}}}", 1, {"parity": 21, "sec_ded": 22}),
    ("sram.aggregate.{}", "ecc_sram_aggregate_uncorrected_total{{detection={}}}", 1, {"parity": 23, "sec_ded": 24}),
    ("sram.aggregate.{}", "ecc_sram_units_total{{unit={}}}", 1, {"l2": 25, "sm": 26, "pcie": 27, "mcu": 28}),
    ("sram.aggregate.{}", "ecc_sram_units_total{{unit={}}}", 1, {"other": 29}),
    ("sram.threshold", "ecc_sram_threshold_exceeded", 1, {"": 1}),
    ("remapped.{}", "row_remap_rows{{cause={}}}", 1, {"correctable": 31, "uncorrectable": 32}),
    ("remapped.{}", "row_remap_{}", 1, {"pending": 1, "failed": 0}),
    ("banks.{}", "row_remap_banks{{available={}}}", 1, {"max": 41, "high": 42, "partial": 43, "low": 44, "none": 45}),
    ("retired.{}", "retired_pages{{cause={}}}", 1, {"single_bit": 51, "double_bit": 52}),
    ("retired.pending", "retired_pages_pending", 1, {"": 1}),
    ("temperature", "temperature_celsius{{sensor=core}}", 1, {"": 61}),
    ("memory_temperature", "temperature_celsius{{sensor=memory}}", 1, {"": 62}),
    ("temperature_margin", "temperature_margin_celsius", 1, {"": -3}),
    ("threshold.{}", "temperature_threshold_celsius{{threshold={}}}", 1, {"shutdown": 97, "slowdown": 94}),
    ("threshold.{}", "temperature_threshold_celsius{{threshold={}}}", 1, {"memory_max": 95, "gpu_max": 87}),
    ("threshold.acoustic_{}", "temperature_threshold_celsius{{threshold=acoustic_{}}}", 1, {"min": 65, "current": 83}),
    ("threshold.acoustic_{}", "temperature_threshold_celsius{{threshold=acoustic_{}}}", 1, {"max": 90}),
    ("tlimit.{}", "temperature_margin_threshold_celsius{{threshold={}}}", 1, {"shutdown": -8, "slowdown": -2}),
    ("tlimit.{}", "temperature_margin_threshold_celsius{{threshold={}}}", 1, {"memory_max": 1, "gpu_max": 0}),
    ("fan.{}", "fan_ratio{{fan={}}}", 100, {"0": 30, "1": 105}),
    ("power", "power_watts", 1000, {"": 345_678}),
    ("power_limit.{}", "power_limit_watts{{limit={}}}", 1000, {"enforced": 650_000, "default": 700_000}),
    ("power_limit.{}", "power_limit_watts{{limit={}}}", 1000, {"min": 200_000, "max": 750_000}),
    ("energy", "energy_joules_total", 1000, {"": 9_876_543_210_123}),
    (
        "throttle_ns.{}",
        "throttle_seconds_total{{reason={}}}",
        10**9,
        {"sw_power_cap": 15 * 10**8, "sync_boost": 3 * 10**9},
    ),
    (
        "throttle_ns.{}",
        "throttle_seconds_total{{reason={}}}",
        10**9,
        {"sw_thermal": 2 * 10**9, "board_limit": 4 * 10**9},
    ),
    ("throttle_ns.{}", "throttle_seconds_total{{reason={}}}", 10**9, {"reliability": 5 * 10**9}),
    ("throttle_ns.{}", "throttle_seconds_total{{reason={}}}", 10**9, {"hw_thermal": 86_400_000_000_000_250}),
    ("throttle_ns.{}", "throttle_seconds_total{{reason={}}}", 10**9, {"hw_power_brake": 7 * 10**9}),
    ("clock.{}", "clock_hertz{{domain={}}}", 1 / MEGA, {"graphics": 1755, "sm": 1756, "memory": 2619, "video": 1425}),
    ("clock_max.{}", "clock_max_hertz{{domain={}}}", 1 / MEGA, {"graphics": 1980, "sm": 1981, "memory": 3201}),
    ("clock_max.{}", "clock_max_hertz{{domain={}}}", 1 / MEGA, {"video": 1545}),
    ("{}", "{}", 1, {"performance_state": 2, "pcie_generation": 4, "pcie_generation_max": 5, "pcie_width": 8}),
    ("{}", "{}", 1, {"pcie_width_max": 16}),
    ("pcie_replays", "pcie_replays_total", 1, {"": 71}),
    ("nvlink.{}.up", "nvlink_up{{link={}}}", 1, {"0": 0, "1": 1}),
    ("nvlink.0.{}", "nvlink_errors_total{{kind={},link=0}}", 1, {"replay": 81, "recovery": 82, "crc_flit": 83}),
    ("nvlink.0.{}", "nvlink_errors_total{{kind={},link=0}}", 1, {"crc_data": 84, "ecc_data": 85}),
    ("nvlink.1.{}", "nvlink_errors_total{{kind={},link=1}}", 1, {"replay": 0, "recovery": 0, "crc_flit": 86}),
    ("nvlink.1.{}", "nvlink_errors_total{{kind={},link=1}}", 1, {"crc_data": 0, "ecc_data": 0}),
    ("utilization.{}", "utilization_ratio{{engine={}}}", 100, {"gpu": 37, "memory": 21}),
    ("memory_{}", "memory_{}_bytes", 1, {"total": 150_754_820_096, "used": 91_234_567_890}),
)
OTHERS = {"fans": 2, "reasons": 0x44, "nvlinks": 2, "fabric_status": 1, "compute_mode": 3, "recovery_action": 4}
OTHERS |= {"fabric_health": 0b0101_10_01_10_01, "fabric_summary": 3}
OTHERS |= {"volatile.corrected.l2": 999_001, "aggregate.corrected.l2": 999_002}  # part of SRAM: must not count again
OTHERS |= {"processes": "4999999:1073741824,4999998:5"}
EVERYTHING = OTHERS | {key.format(word): raw for key, _, _, words in TABLE for word, raw in words.items()}
THROTTLES = ("gpu_idle", "applications_clocks", "hw_slowdown", "sync_boost", "sw_thermal", "hw_power_brake")


FABRIC = ("degraded_bandwidth", "route_recovery", "route_unhealthy", "access_timeout_recovery")
FABRIC += ("incorrect_configuration",)
SUMMARIES = ("unhealthy", "limited_capacity")
FAULTY = ("degraded_bandwidth", "route_unhealthy", "incorrect_configuration", "limited_capacity")


def expected() -> dict[str, float]:
    wanted = {name.format(word): raw / units for _, name, units, words in TABLE for word, raw in words.items()}
    wanted |= {f"throttle_active{{reason={reason}}}": 0 for reason in (*THROTTLES, "display_clocks")}
    wanted |= {f"throttle_active{{reason={reason}}}": 1 for reason in ("sw_power_cap", "hw_thermal")}
    return wanted | {
        "fabric_ready": 0,
        **{f"fabric_fault{{fault={fault}}}": int(fault in FAULTY) for fault in (*FABRIC, *SUMMARIES)},
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


def test_every_reading_is_what_the_device_says(machine, agent, tmp_path):
    """Each field at a value of its own arrives under its own name and labels, in base units; its neighbours do not."""
    files = {"correctable": "RxErr 90\nTOTAL_ERR_COR 91", "nonfatal": "TOTAL_ERR_NONFATAL 92"}
    files["fatal"] = "TOTAL_ERR_FATAL 93"
    where = "bus/pci/devices/0000:12:00.0/aer_dev_"
    sysfs = plant(tmp_path / "sys", {where + severity: text + "\n" for severity, text in files.items()})
    say(machine, 2, EVERYTHING)
    readings, absent = agent.read(gpu(machine, 2), {"sysfs": str(sysfs)})
    assert readings == pytest.approx(expected(), rel=1e-12)
    assert absent == {f"throttle_active{{reason={r}}}": NOT_SUPPORTED for r in ("board_limit", "reliability")}
    others, _ = agent.read(gpu(machine, 1), {"sysfs": str(sysfs)})
    assert others["temperature_celsius{sensor=core}"] == 34
    assert others["ecc_errors_total{kind=corrected,location=dram}"] == 0


def test_the_newest_process_tells_its_age(machine, agent):
    """Workers of canaryd, and processes that are not visible here, do not count."""
    servers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "/opt/canaryd/worker/__main__.py"])
    try:
        time.sleep(1.1)
        machine.set(0, "processes", ",".join(f"{process.pid}:5" for process in (*servers, worker)) + ",4999999:5")
        readings, _ = agent.read(gpu(machine, 0))
        assert 1.0 <= readings["compute_process_age_seconds"] < 100.0
        machine.set(0, "processes", f"{worker.pid}:5,1:5")
        readings, _ = agent.read(gpu(machine, 0))
        assert readings["compute_process_age_seconds"] > 1.0  # of process 1
        machine.set(0, "processes", f"{worker.pid}:5")
        assert "compute_process_age_seconds" not in agent.read(gpu(machine, 0))[0]
    finally:
        for process in (*servers, worker):
            process.kill()
            process.wait()


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


@pytest.mark.parametrize("version", [2, 3])
def test_each_field_of_the_fabrics_health_is_a_reading(machine, agent, version):
    """Two bits a field: 1 a fault, 2 none; of the configuration 1 is none. The summary came with structure 3."""
    machine.set(0, "fabric_version", version)
    healthy, _ = agent.read(gpu(machine, 0))
    quiet = {f"fabric_fault{{fault={fault}}}": 0 for fault in (*FABRIC, *SUMMARIES[: 2 * version - 4])}
    assert {k: v for k, v in healthy.items() if k.startswith("fabric")} == {"fabric_ready": 1, **quiet}
    wrong = {f: ("fabric_health", 0x1AA ^ 0b11 << 2 * n) for n, f in enumerate(FABRIC[:4])}
    wrong |= {FABRIC[4]: ("fabric_health", 0xAA | 8 << 8)}
    wrong |= {f: ("fabric_summary", n) for n, f in enumerate(SUMMARIES, 2) if version == 3}
    for fault, (key, value) in wrong.items():
        machine.set(0, key, value)
        readings, absent = agent.read(gpu(machine, 0))
        assert {k: readings[k] for k in quiet} == {**quiet, f"fabric_fault{{fault={fault}}}": 1}
        unknown = {k: why for k, why in absent.items() if k.startswith("fabric")}
        assert unknown == {f"fabric_fault{{fault={f}}}": NOT_SUPPORTED for f in SUMMARIES if version == 2}
        machine.unset(0, key)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("fabric_state", 2, "the device has not joined its fabric"),
        ("fabric_state", 0, "not part of an NVLink fabric"),
        ("nvmlDeviceGetGpuFabricInfoV", 13, NOT_SUPPORTED),  # the older call knows no health
        ("nvmlDeviceGetGpuFabricInfoV", 2, NOT_SUPPORTED),
        ("nvmlDeviceGetGpuFabricInfoV", 3, NOT_SUPPORTED),
    ],
)
def test_a_health_of_the_fabric_that_is_not_given_is_no_fault(machine, agent, key, value, reason):
    """One reason for all of its fields; or a driver fills some."""
    machine.set(0, "fabric_health", 0x1)
    machine.set(0, "fabric_summary", 0)
    readings, absent = agent.read(gpu(machine, 0))
    assert [k for k in readings if k.startswith("fabric_fault")] == ["fabric_fault{fault=degraded_bandwidth}"]
    assert absent["fabric_fault{fault=unhealthy}"] == absent["fabric_fault{fault=route_recovery}"] == NOT_SUPPORTED
    machine.set(0, key, value)
    readings, absent = agent.read(gpu(machine, 0))
    assert not [k for k in readings if k.startswith("fabric_fault")]
    assert absent["fabric_fault"] == reason


DRIVERS = dict.fromkeys(("535.261.03", "570.133.20", "580.76.05", "no version"), False)
DRIVERS |= dict.fromkeys(("575.57.08", "580.65.06", "580.82.07", "590.44.01"), True)


@pytest.mark.parametrize(("driver", "known"), DRIVERS.items())
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
