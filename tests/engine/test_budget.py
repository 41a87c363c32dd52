"""The budget: its decision, facts, account and configuration."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from canaryd.config.load import ConfigError, load
from canaryd.config.settings import BudgetConfig
from canaryd.engine import budget
from canaryd.engine.budget import DOUBT, FORCED, PURPOSES, REASONS, RETEST, ROUND, Account, Conditions, Wait
from canaryd.facts import Reading
from canaryd.model import Device, Outcome, Run
from tests.engine.budgets import CPU, GIB, GPU, NOW, Clock, reading

PART = Device(uuid="MIG-1", backend="cuda", index=0, model="a card", parent="GPU-1")


@pytest.fixture
def utc(monkeypatch):
    """The local time of this process is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# --- The decision ----------------------------------------------------------------------------------------------------


NEED = 2 * GIB
"""Bytes that an accelerator must have free by default: what a worker may take, what stays free, and the context."""


@pytest.mark.parametrize(
    ("reason", "changed", "waits", "runs"),
    [
        ("compute_mode", {}, {"mode": "prohibited"}, {"mode": "default"}),
        (
            "compute_mode",
            {},
            {"mode": "exclusive_process", "processes": 0},
            {"mode": "exclusive_process", "processes": 1},
        ),
        ("compute_mode", {}, {"mode": "exclusive_thread", "processes": 0}, {"mode": "exclusive_thread"}),
        ("compute_mode", {}, {"mode": "exclusive_process", "processes": 0}, {"mode": ""}),
        ("memory", {}, {"free": NEED - 1}, {"free": NEED}),
        ("memory", {}, {"free": 0}, {"free": None}),
        ("memory", {"memory": 4 * GIB}, {"free": NEED}, {"free": 5 * GIB}),
        ("heat", {}, {"margin": 4.9}, {"margin": 5.0}),
        ("heat", {}, {"margin": -1.0}, {"margin": None}),
        ("load", {}, {"busy": 0.9}, {"busy": 0.89}),
        ("load", {"busy": 0.5}, {"busy": 3.0}, {"busy": None}),
        ("share", {}, {"spent": 10.0, "expected": 8.1}, {"spent": 10.0, "expected": 8.0}),
        ("share", {"share": 0.1}, {"spent": 361.0}, {"spent": 360.0}),
        ("quiet_hours", {"quiet_hours": ((720, 780),)}, {}, {"now": NOW - 1}),
    ],
)
def test_each_reason_from_both_sides(policy, utc, reason, changed, waits, runs):
    """A round waits on one side of each limit and runs on the other; the reason is told in words."""
    policy = BudgetConfig(**changed)
    found = budget.wait(policy, Conditions(**{"now": NOW} | waits), ROUND)
    assert found is not None
    assert (found.reason, bool(found.text)) == (reason, True)
    assert budget.wait(policy, Conditions(**{"now": NOW} | runs), ROUND) is None


def test_a_limit_of_one_is_no_limit_of_load():
    """It runs however busy the device is."""
    assert budget.wait(BudgetConfig(busy=1.0), Conditions(now=NOW, busy=1.0), ROUND) is None


def test_nothing_known_holds_nothing_back(policy):
    """A device that says nothing is tested."""
    assert budget.wait(policy, Conditions(now=NOW), ROUND) is None


def test_the_first_round_runs_whatever_it_may_take(policy):
    """How long it takes is known afterwards; one that is dearer than a whole hour's share would never run otherwise."""
    assert budget.wait(policy, Conditions(now=NOW, expected=100.0), ROUND) is None
    assert budget.wait(policy, Conditions(now=NOW, expected=100.0, spent=0.1), ROUND) is not None


ALL = {
    "compute_mode": {"mode": "prohibited"},
    "memory": {"free": 0},
    "quiet_hours": {},
    "heat": {"margin": 0.0},
    "load": {"busy": 1.0},
    "share": {"spent": 100.0},
}


@pytest.mark.parametrize(
    ("purpose", "heeded"),
    [
        (ROUND, set(REASONS)),
        (FORCED, {"compute_mode", "memory"}),
        (DOUBT, {"compute_mode", "memory"}),
        (RETEST, {"compute_mode", "memory", "quiet_hours", "heat"}),
    ],
)
def test_who_waits_for_what(purpose, heeded):
    """Age of evidence and doubt overrule all but memory and compute mode; a retest is meant for load."""
    found = set()
    for reason, fields in ALL.items():
        hours = ((0, 1440),) if reason == "quiet_hours" else ()
        policy = BudgetConfig(quiet_hours=hours)
        if held := budget.wait(policy, Conditions(now=NOW, **fields), purpose):
            assert held.reason == reason
            found.add(reason)
    assert found == heeded


def test_the_most_binding_reason_is_told():
    """One that nothing overrules comes before one that waiting mends."""
    policy = BudgetConfig(quiet_hours=((0, 1440),))
    found = budget.wait(policy, Conditions(now=NOW, free=0, busy=1.0), ROUND)
    assert found is not None
    assert found.reason == "memory"


@pytest.mark.parametrize(
    ("hours", "quiet", "loud"),
    [
        ((480, 1200), ("08:00", "12:00", "19:59"), ("07:59", "20:00")),
        ((1320, 360), ("22:00", "23:59", "00:00", "05:59"), ("21:59", "06:00", "12:00")),
        ((0, 1440), ("00:00", "23:59"), ()),
    ],
)
def test_quiet_hours(utc, hours, quiet, loud):
    """From the first minute on, until the last has passed; across midnight; a whole day."""
    policy = BudgetConfig(quiet_hours=(hours,))

    def waits(clock: str) -> bool:
        at = datetime.fromisoformat(f"2026-05-04T{clock}:00+00:00").timestamp()
        return budget.wait(policy, Conditions(now=at), ROUND) is not None

    assert [waits(clock) for clock in quiet] == [True] * len(quiet)
    assert [waits(clock) for clock in loud] == [False] * len(loud)


def test_quiet_hours_are_local(monkeypatch):
    """Noon in UTC is 20:00 nine hours east less one."""
    monkeypatch.setenv("TZ", "XYZ-8")
    time.tzset()
    try:
        assert budget.wait(BudgetConfig(quiet_hours=((1200, 1260),)), Conditions(now=NOW), ROUND) is not None
    finally:
        monkeypatch.undo()
        time.tzset()


def known(device: Device, *own: Reading, whole: tuple[Reading, ...] = ()) -> Conditions:
    return budget.facts(device, own, whole, now=NOW, spent=1.0, expected=2.0)


def test_facts_of_an_accelerator():
    """Its engines' use without its memory's; the nearest limit of heat; free memory."""
    found = known(
        GPU,
        reading("utilization_ratio", 0.4, engine="gpu"),
        reading("utilization_ratio", 0.9, engine="memory"),
        reading("memory_total_bytes", 80 * GIB),
        reading("memory_used_bytes", 72 * GIB),
        reading("temperature_celsius", 70.0, sensor="core"),
        reading("temperature_celsius", 90.0, sensor="mem"),
        reading("temperature_threshold_celsius", 87.0, threshold="slowdown"),
        reading("temperature_threshold_celsius", 95.0, threshold="mem_crit"),
        reading("temperature_threshold_celsius", 92.0, threshold="shutdown"),
        reading("compute_mode", 1, mode="exclusive_process"),
        reading("compute_processes", 2),
    )
    assert (found.busy, found.free, found.margin) == (0.4, 8 * GIB, 5.0)
    assert (found.mode, found.processes, found.accelerator) == ("exclusive_process", 2, True)
    assert (found.spent, found.expected, found.now) == (1.0, 2.0, NOW)


def test_facts_of_a_processor():
    """Tasks that run or wait over its cores; what can be had without swapping."""
    found = known(
        CPU,
        reading("load_average", 6.0),
        reading("cpu_cores", 4, state="online"),
        reading("cpu_cores", 2, state="offline"),
        reading("memory_available_bytes", GIB),
    )
    assert (found.busy, found.free, found.accelerator) == (1.5, GIB, False)


def test_facts_of_an_instance():
    """Heat and compute mode are those of the whole device; memory and use are its own."""
    whole = (
        reading("temperature_margin_celsius", 3.0),
        reading("temperature_celsius", 60.0, sensor="core"),
        reading("memory_total_bytes", 80 * GIB),
        reading("memory_used_bytes", 80 * GIB),
        reading("utilization_ratio", 1.0, engine="gpu"),
        reading("compute_mode", 2, mode="prohibited"),
    )
    own = reading("memory_total_bytes", 10 * GIB), reading("memory_used_bytes", GIB)
    found = known(PART, *own, whole=whole)
    assert (found.free, found.margin, found.busy) == (9 * GIB, 3.0, None)
    assert found.mode == "prohibited"
    assert known(PART, reading("compute_mode", 0, mode="default"), whole=whole).mode == "default"


def test_facts_of_a_silent_device():
    """What is not read is not known, and text is no number."""
    assert known(GPU, Reading(name="temperature_margin_celsius", value="n/a")) == Conditions(
        now=NOW, spent=1.0, expected=2.0
    )


def test_the_share_is_of_a_sliding_hour():
    """What was spent an hour ago is forgotten; retests and confirmations have shares of their own."""
    clock = Clock()
    account = Account(clock)
    account.spend("a", 10.0, ROUND)
    account.spend("a", 5.0, DOUBT)
    account.spend("a", 7.0, RETEST)
    clock.now = 1800.0
    account.spend("a", 4.0, FORCED)
    assert (account.spent("a"), account.spent("b")) == (14.0, 0.0)
    clock.now = 3600.0
    assert account.spent("a") == 4.0
    assert account.totals("a")[0] == {ROUND: 10.0, FORCED: 4.0, RETEST: 7.0, DOUBT: 5.0}


def test_default_rounds_keep_the_default_share(policy):
    """16 s, as much as one takes on an accelerator, are due every half hour: over a day the share is kept."""
    clock = Clock()
    account = Account(clock)
    for _ in range(24 * 720):
        clock.now += 5.0
        due = clock.now % 1800.0 == 0.0 or account.withheld("a") is not None
        facts = Conditions(now=clock.now, spent=account.spent("a"), expected=account.cost("a", ("p",)))
        if due and (held := budget.wait(policy, facts, ROUND)):
            account.withhold("a", held, clock.now)
        elif due:
            account.spend("a", 16.0, ROUND)
            account.took("a", ("p",), 16.0)
        assert account.spent("a") <= policy.share * 3600.0
    assert account.totals("a")[0][ROUND] == 16.0 * 24
    assert account.totals("a")[1]["share"] == 24


def test_a_restart_begins_no_new_hour():
    """What an earlier process spent counts towards the hour, and is not counted as spent by this one."""
    account = Account(Clock())
    account.recall("a", 9.0, 60.0)
    account.recall("a", 9.0, 3601.0)
    assert account.spent("a") == 9.0
    assert account.totals("a")[0] == dict.fromkeys(PURPOSES, 0.0)


def test_each_reason_is_counted_once_for_what_waits():
    """Asked again every five seconds, it is one round that was put off; a change of the reason is news."""
    account = Account(Clock())
    load, share = (Wait(reason=r, text=r) for r in ("load", "share"))
    assert [account.withhold("a", w, 1.0) for w in (load, load, share, share, load)] == [True, False, True, False, True]
    held = account.withheld("a")
    assert held is not None
    assert (held.since, held.wait) == (1.0, load)
    assert account.totals("a")[1] == dict.fromkeys(REASONS, 0) | {"load": 1, "share": 1}
    account.took("a", ("p",), 3.0)
    assert (account.withheld("a"), account.cost("a", ("p",)), account.cost("a", ("q",))) == (None, 3.0, 0.0)
    account.withhold("a", load, 2.0)
    assert account.totals("a")[1]["load"] == 2
    account.release("a")
    assert account.withheld("a") is None


def _run(outcome=Outcome.COMPLETED, **seconds):
    fields = {"id": "r", "device": GPU.uuid, "probe": "p", "probe_version": 1, "started": 0.0, "seconds": 9.0}
    readings = tuple(Reading(name=f"{name}_seconds", value=value) for name, value in seconds.items())
    return Run(**fields, outcome=outcome, level="quick", seed=1, readings=readings)


def test_device_time():
    """Of a processor its share of all cores; of an accelerator what the runs say that it worked, if each says so."""
    assert budget.device_seconds(CPU, 9.0, 4.0) == 4.0 / (os.cpu_count() or 1)
    assert budget.device_seconds(CPU, 9.0, None) == 9.0
    assert budget.device_seconds(GPU, 9.0, 4.0) == 9.0
    assert budget.device_seconds(GPU, -0.1, 4.0) == 0.0
    told = [_run(device=0.25, host=2.5), _run(device=1.0, host=4.0)]
    assert budget.device_seconds(GPU, 9.0, 4.0, told) == 1.25
    assert budget.device_seconds(GPU, 9.0, 4.0, [*told, _run(Outcome.SKIPPED)]) == 1.25
    for silent in (Outcome.COMPLETED, Outcome.CRASHED, Outcome.TIMED_OUT):
        assert budget.device_seconds(GPU, 9.0, 4.0, [*told, _run(silent)]) == 2.5
    assert budget.device_seconds(CPU, 9.0, 4.0, told) == 4.0 / (os.cpu_count() or 1)


# --- The configuration -----------------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> BudgetConfig:
    path = tmp_path / "canaryd.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return load(path).budget


def test_every_key_is_read(tmp_path):
    """As an operator writes them."""
    text = """budget: {share: 0.01, memory: "2GiB", busy: 0.5, quiet_hours: ["08:00-20:00", "22:30-06:00"]}"""
    assert read(tmp_path, text) == BudgetConfig(
        share=0.01, memory=2 * GIB, busy=0.5, quiet_hours=((480, 1200), (1350, 360))
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quiet_hours: ["8-20"]', 'not a time of day; write e.g. "08:00-20:00"'),
        ('quiet_hours: ["08:00-08:00"]', "not a time of day"),
        ('quiet_hours: ["08:61-09:00"]', "not a time of day"),
        ('quiet_hours: ["24:00-09:00"]', "not a time of day"),
        ("share: 0", "out of range; write a number from 0.0001 to 1"),
        ("share: 1.5", "out of range"),
        ("memory: 2", "not a size"),
        ("headroom: 8", "no setting any more: it is always 5; delete the line"),
    ],
)
def test_mistakes_are_told(tmp_path, text, said):
    """Each at its line, with what to write; a former setting is one."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"budget:\n  {text}\n")
    assert re.search(r"canaryd\.yaml:2: budget\.\w+", str(caught.value))
    assert said in str(caught.value)
