"""Two polls make events: what rose, fell, changed or held, and which call for exact goldens."""

import dataclasses
import itertools

import pytest

from canaryd.facts import LogRecord
from canaryd.judge.telemetry.events import changes, judged_values, log_event, triggers, within
from canaryd.judge.telemetry.readings import split_key
from canaryd.judge.telemetry.rules import findings
from canaryd.judge.telemetry.signals import stale_after
from canaryd.model import Event
from canaryd.store.store import Store
from canaryd.worker.telemetry import kernel_log
from tests.judge.telemetry.made import (
    AER,
    AGGREGATE_CE,
    CE,
    DEGRADED,
    DIMM_CE,
    DIMM_UE,
    HEALTHY,
    HOUR,
    LINK,
    NOW,
    PLACE,
    POLICY,
    SUSPECT,
    THERMAL,
    UE,
    H,
    U,
    boot,
    event,
    held_down,
    line,
    message,
    policy,
    poll,
    reset,
    rise,
    sign,
    told,
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


def test_a_rise_came_between_two_polls_and_a_reset_is_dated_by_the_newer():
    """So that a rule can share out what came while nobody looked."""
    found = between({"energy_joules_total": 5000}, {"energy_joules_total": 1, CE: 5}, seconds=8 * HOUR)
    assert (found["counter", CE].first, found["counter", CE].last) == (NOW - 5 - 8 * HOUR, NOW - 5)
    assert found["reset", "driver or device"].first == NOW - 5
    hot = between({}, {"temperature_celsius{sensor=core}": 90}, seconds=8 * HOUR)["condition", "hot"]
    assert hot.last - hot.first == hot.count == 45


@pytest.mark.parametrize(
    ("start", "end", "share"),
    [(-10, 200, 100), (0, 100, 100), (25, 50, 25), (-10, 10, 10), (90, 200, 10), (100, 200, 0), (-9, 0, 0)],
)
def test_a_rise_is_shared_out_evenly(start, end, share):
    """What came within a window, if it came at an even rate; a moment is in or out."""
    long = Event(device="d", kind="counter", name="x", first=0.0, last=100.0, count=100.0)
    assert within(long, start, end) == share
    moment = dataclasses.replace(long, first=100.0)
    assert within(moment, start, end) == (100 if start < 100 <= end else 0)


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


@pytest.mark.parametrize(
    ("before", "after", "name", "values"),
    [
        ({}, {"row_remap_pending": 1}, "row_remap_pending", ("0", "1")),
        ({}, {"nvlink_up{link=3}": False}, "nvlink_up{link=3}", ("1", "0")),
        ({}, {"pcie_width_max": 8}, "pcie_width_max", ("16", "8")),
        ({}, {"pcie_width": 8}, "pcie_width", ("16", "8")),
        (
            {},
            {"recovery_action{action=none}": None, "recovery_action{action=reset}": 1},
            "recovery_action",
            ("none", "reset"),
        ),
        ({}, {"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1}, "clock_source", ("tsc", "hpet")),
    ],
)
def test_a_flag_that_changes_is_an_event(before, after, name, values):
    """With what it was before and what it is now."""
    found = between(before, after)
    assert list(found) == [("flag", name)]
    assert (found["flag", name].before, found["flag", name].after) == values


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


def test_what_is_watched_changes_with_flags_and_judged_counters_alone():
    """Temperatures, energy and idle time move at every poll and are no reason to store one."""
    quiet = judged_values(poll())
    assert hash(quiet) == hash(
        judged_values(poll(only={"temperature_celsius{sensor=core}": 61, "energy_joules_total": 9}))
    )
    assert quiet == judged_values(poll(only={"throttle_seconds_total{reason=sw_power_cap}": 9999}))
    for facts in (
        {CE: 4},
        {"row_remap_pending": 1},
        {"clock_source{source=tsc}": None, "clock_source{source=hpet}": 1},
    ):
        assert quiet != judged_values(poll(only=facts))


def test_a_condition_lasts_through_polls_until_it_has_been_away_for_settle(tmp_path):
    """A width that flaps at every poll makes one finding that holds: from the polls, through the store, to the rule."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    busy = {"utilization_ratio{engine=gpu}": 0.9, "pcie_generation": 5}
    polls = [poll(4000 - 15 * i, only={**busy, "pcie_width": 8 if i % 2 else 16}) for i in range(200)]
    seen = []
    for before, after in itertools.pairwise(polls):
        store.add_events(changes(before, after))
        signs = sign(completed=after, events=tuple(store.events()), now=after.started + 1)
        seen.append([f.rule for f in findings(signs)])
    start = seen.index(["pcie-width"])
    assert 6 <= start <= 9
    assert all(rules == ["pcie-width"] for rules in seen[start:])
    last = max(e.last for e in store.events())
    for away, expected in ((POLICY.settle, ["pcie-width"]), (POLICY.settle + 1, [])):
        later = sign(completed=poll(NOW - last - away), events=tuple(store.events()), now=last + away)
        assert [f.rule for f in findings(later)] == expected
    store.close()


def test_the_place_of_an_xid_outlives_merging(tmp_path):
    """Two Xid 13 at one place ten minutes apart are still two occasions there when the store has merged them."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    top = NOW // HOUR * HOUR - HOUR
    store.add_events([xid(13, NOW - top - t, PLACE) for t in (100, 700)])
    assert len(store.events()) == 1
    assert told(sign(events=tuple(store.events()))) == [("xid-repeated", DEGRADED, U)]
    store.close()


def test_what_is_graded_apart_is_kept_apart(tmp_path):
    """A harmless line after a fatal one of the same code and hour hides nothing."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    top = NOW // HOUR * HOUR - HOUR
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    link = "NVRM: Xid (PCI:0008:06:00): 145, RLW_SRC_TRACK {} XC0 i0 Link 00 (0x00000007 {} 0x0 0x0 0x0)"
    lines = [switch.format("Fatal"), switch.format("Non-fatal"), link.format("Fatal", "0x00000001")]
    lines += [link.format("Non-fatal", "0x00000002")] * 2
    for second, text in enumerate(lines):
        store.add_events([line(text, NOW - top - second)])
    kept = store.events()
    assert [(e.name, e.count) for e in kept] == [
        ("20034 fatal", 1),
        ("20034 non-fatal", 1),
        ("145 RLW_SRC_TRACK fatal reset", 1),
        ("145 RLW_SRC_TRACK non-fatal none", 2),
    ]
    assert told(sign(events=tuple(kept))) == sorted(
        [("sxid", DEGRADED, H), ("sxid", HEALTHY, H), ("xid-recovery", SUSPECT, U)]
    )
    assert told(sign(events=tuple(kept), policy=policy(xids={"145": "none"}))) == sorted(
        [("sxid", DEGRADED, H), ("sxid", HEALTHY, H)]
    )
    assert triggers([kept[2]]) == "Xid 145"
    store.close()


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
    assert "Drain the device and restart the machine.\n" in message(sign(made), "xid-recovery")
    assert "Recommended: reboot (NVIDIA's Xid catalogue)." in message(sign(made), "xid-recovery")


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


def test_triggers_are_named_once_and_three_at_most():
    """The reason is stored with the run, so it stays short."""
    assert triggers([]) == ""
    assert triggers([xid(31), xid(31), reset(1)]) == "Xid 31, reset"
    assert triggers([xid(c) for c in (13, 31, 63, 64, 95)]) == "Xid 13, Xid 31, Xid 63"


def test_a_poll_is_fresh_for_five_periods_and_two_minutes():
    """One missed poll on a busy machine must not flap."""
    assert (stale_after(15), stale_after(60)) == (120, 300)


def test_a_reset_that_ended_failing_polls_came_after_them():
    """What was reported while they failed, it may clear; without a failed poll it came after the poll before."""
    before, after = (poll(only={"energy_joules_total": energy}) for energy in (900.0, 5.0))
    before = dataclasses.replace(before, started=after.started - 7200.0)

    def since(*failed):
        (reset,) = (e for e in changes(before, after, *failed) if e.kind == "reset")
        return float(reset.fields["since"])

    assert since() == before.started
    assert since(after.started - 15.0) == after.started - 15.0
    assert since(after.started + 99.0) == after.started
