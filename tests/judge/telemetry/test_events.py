"""Two polls make events: what rose, fell, changed or held, and which call for exact goldens."""

import pytest

from canaryd.facts import LogRecord
from canaryd.judge.telemetry.events import changes, log_event, triggers
from canaryd.judge.telemetry.readings import split_key
from canaryd.worker.telemetry import kernel_log
from tests.judge.telemetry.made import (
    AER,
    AGGREGATE_CE,
    CE,
    DIMM_CE,
    DIMM_UE,
    LINK,
    NOW,
    THERMAL,
    UE,
    boot,
    event,
    held_down,
    message,
    poll,
    reset,
    rise,
    sign,
    xid,
)

# --- Events -----------------------------------------------------------------------------------------------------------


def between(before=None, after=None, seconds=15.0):
    """Return what happened between two polls as (kind, name) → event."""
    events = changes(poll(5 + seconds, only=before), poll(5, only=after))
    assert {e.last for e in events} <= {NOW - 5}
    return {(e.kind, e.name): e for e in events}


def test_a_counter_that_rises_is_an_event_and_one_that_stays_is_none():
    """With the rise as count, and the values before and after."""
    assert between() == {}
    found = between(after={CE: 5})
    assert list(found) == [("counter", CE)]
    assert (found["counter", CE].count, found["counter", CE].before, found["counter", CE].after) == (2, "3", "5")


def test_a_counter_that_nobody_judges_is_no_event():
    """Energy, and time in which software capped the power, rise at every poll."""
    assert between(after={"energy_joules_total": 6000, "throttle_seconds_total{reason=sw_power_cap}": 9015}) == {}


def test_a_gap_is_no_rise():
    """A counter that could not be read in one of two polls says nothing, however far it moved."""
    assert between(before={CE: None}) == {}
    assert between(after={CE: None}) == {}
    assert between(before={"nvlink_up{link=3}": None}) == {}


def test_counters_that_fall_show_a_reset():
    """One event however many fell; what the counter shows now has risen from 0; an uncorrected error is named first."""
    found = between({UE: 2, CE: 9, "energy_joules_total": 5000}, {UE: 0, CE: 4, "energy_joules_total": 1})
    assert set(found) == {("reset", "driver or device"), ("counter", CE)}
    assert found["counter", CE].count == 4
    assert found["reset", "driver or device"].before == f"{UE} 2"
    assert (found["reset", "driver or device"].reading, found["reset", "driver or device"].labels) == split_key(UE)
    assert "ECC errors (uncorrected, dram) fell from 2 to 0" in found["reset", "driver or device"].detail


LINKS = {LINK(kind): 9 for kind in ("crc_flit", "crc_data", "replay")}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        # Cleared by hand while energy goes on: no reset, and no rise of the new value.
        (LINKS, dict.fromkeys(LINKS, 2), [("counter-fell", "nvlink_errors_total")]),
        ({"pcie_replays_total": 9}, {"pcie_replays_total": 2}, [("counter-fell", "pcie_replays_total")]),
        # No energy and no ECC count to tell: most of what counts must fall, and more than one.
        (
            {"pcie_replays_total": 9, CE: 0, "energy_joules_total": None},
            {"pcie_replays_total": 2, CE: 0, "energy_joules_total": None},
            [("counter-fell", "pcie_replays_total")],
        ),
        (
            {**LINKS, "energy_joules_total": None, CE: 0},
            {**dict.fromkeys(LINKS, 0), "pcie_replays_total": 0, THERMAL: 0, "energy_joules_total": None, CE: 0},
            [("reset", "driver or device")],
        ),
        # Either alone tells.
        ({}, {"energy_joules_total": 1}, [("reset", "driver or device")]),
        ({}, {CE: 0}, [("reset", "driver or device")]),
    ],
)
def test_only_what_nothing_else_clears_shows_a_reset(before, after, found):
    """`nvidia-smi nvlink -re` and a counter at its end must not end a suspicion."""
    assert list(between(before, after)) == found


SUMS = ("throttle_events_total{scope=core}", "machine_check_exceptions_total")


@pytest.mark.parametrize(
    ("cores", "values", "kinds"),
    [
        ((64, 63), (5600, 5000), ["counter-fell"]),
        ((63, 64), (5000, 5600), []),
        ((64, 64), (5000, 5600), ["counter"]),
        ((64, 63), (5000, 5600), ["counter"]),
        ((None, None), (5000, 5600), ["counter"]),
    ],
)
@pytest.mark.parametrize("key", SUMS)
def test_a_processor_that_goes_or_comes_is_neither_reset_nor_rise(key, cores, values, kinds):
    """Its counts leave and come back; that the machine was started again, its boot tells."""
    before, after = ({key: v, "cpu_cores{state=online}": n} for v, n in zip(values, cores, strict=True))
    assert [kind for kind, _ in between(before, after)] == kinds


def test_a_reboot_of_the_host_is_told_by_its_boot_alone():
    """Even where all that it counts falls at once."""
    keys = (*SUMS, DIMM_CE, DIMM_UE)
    assert {kind for kind, _ in between(dict.fromkeys(keys, 9), dict.fromkeys(keys, 1))} == {"counter-fell"}


def test_a_counter_for_life_that_falls_is_no_reset():
    """It says that the board was replaced or its record cleared."""
    found = between({AGGREGATE_CE: 12_000}, {AGGREGATE_CE: 3})
    assert list(found) == [("counter-fell", AGGREGATE_CE)]


def test_a_line_of_the_kernel_log_keeps_its_fields():
    """From the text of the log through the event to the grade, whatever the values hold."""
    text = "NVRM: Xid (PCI:0008:06:00): 145, RLW_SRC_TRACK Fatal XC0 i0 Link 00 (0x00000007 0x00000001 0x0 0x0 0x0)"
    record = kernel_log.classify(text)
    made = log_event(LogRecord(boot="b", sequence=1, at=5.0, **record._asdict()), "GPU-a")
    assert (made.device, made.kind, made.first, made.last, made.count) == ("GPU-a", "xid", 5, 5, 1)
    assert (made.name, made.code) == ("145 RLW_SRC_TRACK fatal reset", 145)
    assert made.detail.startswith("NVRM: Xid (PCI:0008:06:00): 145")
    fields = made.fields
    assert (fields["unit"], fields["intr_info"], fields["error_status"]) == (
        "RLW_SRC_TRACK",
        "0x00000007",
        "0x00000001",
    )
    odd = log_event(
        LogRecord(boot="b", sequence=1, at=5.0, kind="aer", text="{a=b}", fields={"x": "1, {y=2}"}), "GPU-a"
    )
    assert (odd.detail, odd.fields) == ("{a=b}", {"x": "1, {y=2}"})
    action = (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    )
    record = kernel_log.classify(action)
    made = log_event(LogRecord(boot="b", sequence=1, at=NOW - 60, **record._asdict()), "GPU-a")
    assert "Drain the device and restart the machine.\n" in message(sign(made), "xid")
    assert "Recommended: reboot (NVIDIA's Xid catalogue)." in message(sign(made), "xid")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (rise(UE), "uncorrected ECC error"),
        (rise(DIMM_UE), "uncorrected ECC error"),
        (event("edac", "uncorrected"), "uncorrected ECC error"),
        (rise(CE, 100), "corrected errors jumped"),
        (rise(CE, 99), ""),
        (rise(DIMM_CE, 10), "corrected errors jumped"),
        (rise(DIMM_CE, 9), ""),
        (event("edac", "corrected"), ""),
        (xid(31), "Xid 31"),
        (xid(63), "Xid 63"),
        (xid(999), "Xid 999"),
        (xid(79), ""),
        (xid(38), ""),
        (event("mce", "logged"), "machine check"),
        (event("mce", "corrected"), ""),
        (rise("machine_check_exceptions_total"), "machine check"),
        (event("change", "driver", before="1", after="2"), "driver changed"),
        (event("change", "device", before="found", after="gone"), ""),
        (reset(1), "reset"),
        (boot(1), "reboot"),
        (rise(THERMAL), "throttled"),
        (rise("throttle_events_total{scope=core}"), "throttled"),
        (rise("device_recoveries_total"), "reset"),
        (held_down("hw_thermal"), "throttled"),
        (event("condition", "hot"), "throttled"),
        (event("thermal", "core"), "throttled"),
        (event("condition", "pcie-width"), ""),
        (rise(AER("fatal")), "PCI Express error"),
        (rise(AER("correctable")), ""),
        (rise("pcie_replays_total"), ""),
        (event("amdgpu", "ring-timeout"), "amdgpu ring-timeout"),
        (event("amdgpu", "ras-corrected"), ""),
        (event("intel", "hang"), "Intel hang"),
        (event("oom", "system"), ""),
        (event("oom", "cgroup"), ""),
    ],
)
def test_what_calls_for_exact_goldens(made, reason):
    """Design, section 4: an Xid or machine check, a jump in corrected errors, heat, a change."""
    assert triggers([made]) == reason


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"pcie_width": 8, "pcie_generation": 5, "utilization_ratio{engine=gpu}": 0.6}, "pcie-width"),
        ({"pcie_generation": 3, "utilization_ratio{engine=gpu}": 0.6}, "pcie-generation"),
        ({"temperature_celsius{sensor=core}": 90}, "hot"),
        ({"temperature_celsius{sensor=edge}": 100}, "hot"),
        ({"temperature_margin_celsius": -2}, "hot"),
        ({"throttle_active{reason=hw_thermal}": 1}, "throttle hw_thermal"),
        ({"pressure_ratio{kind=full,resource=memory}": 0.1}, "memory-pressure"),
    ],
)
def test_a_condition_that_holds_is_an_event_for_as_long(facts, name):
    """Its count is the time since the poll before, at most three periods of 15 s, and none when the clock went back."""
    assert between({}, facts)["condition", name].count == 15
    assert between({}, facts, seconds=9000)["condition", name].count == 45
    assert not [kind for kind, _ in between({}, facts, seconds=-60) if kind == "condition"]


@pytest.mark.parametrize(
    "facts",
    [
        {"pcie_generation": 3, "utilization_ratio{engine=gpu}": 0.5},
        {"pcie_generation": 3, "utilization_ratio{engine=gpu}": None},
        {"pcie_width": 8, "utilization_ratio{engine=gpu}": 0.5},  # a link may rest when the device does
        {"pcie_width": 8, "utilization_ratio{engine=gpu}": None},
        {"pcie_width": 0, "pcie_generation": 5, "utilization_ratio{engine=gpu}": 0.9},
        {"temperature_celsius{sensor=core}": 89},
        {"temperature_margin_celsius": -1},
        {"throttle_active{reason=sw_thermal}": 1},  # its time is counted, which is better
        {"throttle_active{reason=gpu_idle}": 1},
        {"pressure_ratio{kind=full,resource=memory}": 0.09},
    ],
)
def test_a_condition_that_does_not_hold_is_no_event(facts):
    """At the last value before each limit."""
    assert not [kind for kind, _ in between({}, facts) if kind == "condition"]
