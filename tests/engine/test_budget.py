"""The budget: its decision, facts, account and configuration."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from canaryd.config.load import ConfigError, load
from canaryd.config.settings import BudgetConfig
from canaryd.engine import budget
from canaryd.engine.budget import DOUBT, FORCED, REASONS, RETEST, ROUND, Account, Conditions
from canaryd.facts import Reading
from canaryd.model import Device
from tests.engine.budgets import GIB, GPU, NOW, Clock, reading


@pytest.fixture
def utc(monkeypatch):
    """The local time of this process is UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


# --- The decision ----------------------------------------------------------------------------------------------------


NEED = GIB
"""Bytes that an accelerator must have free: what a small run takes, as much for the server, and the context."""


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
        ("memory", {"memory": 4 * GIB}, {"free": NEED - 1}, {"free": NEED}),
        ("memory", {}, {"free": NEED, "accelerator": False}, {"free": 2 * NEED, "accelerator": False}),
        ("starting", {}, {"newest": 0.0}, {"newest": None}),
        ("starting", {}, {"newest": 599.0}, {"newest": 600.0}),
        ("starting", {}, {"newest": 1.0, "starting": 1199.0}, {"newest": 1.0, "starting": 1200.0}),
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


ALL = {
    "compute_mode": {"mode": "prohibited"},
    "memory": {"free": 0},
    "starting": {"newest": 1.0},
    "quiet_hours": {},
    "heat": {"margin": 0.0},
    "load": {"busy": 1.0},
    "share": {"spent": 100.0},
}


@pytest.mark.parametrize(("free", "room"), [(None, GIB), (2 * GIB, GIB), (2 * GIB - 1, GIB // 4), (NEED, GIB // 4)])
def test_a_run_is_small_where_memory_is_short(policy, free, room):
    """Only on an accelerator; never more than the setting says."""
    assert budget.room(policy, Conditions(now=NOW, free=free)) == room
    assert budget.room(policy, Conditions(now=NOW, free=free, accelerator=False)) == GIB
    assert budget.room(BudgetConfig(memory=1 << 20), Conditions(now=NOW, free=NEED - 1)) == 1 << 20


@pytest.mark.parametrize(
    ("purpose", "heeded"),
    [
        (ROUND, set(REASONS)),
        (FORCED, {"compute_mode", "memory", "starting"}),
        (DOUBT, {"compute_mode", "memory", "starting"}),
        (RETEST, {"compute_mode", "memory", "starting", "quiet_hours", "heat"}),
    ],
)
def test_who_waits_for_what(purpose, heeded):
    """Age of evidence and doubt overrule neither memory, compute mode nor a server's start; a retest is for load."""
    found = set()
    for reason, fields in ALL.items():
        hours = ((0, 1440),) if reason == "quiet_hours" else ()
        policy = BudgetConfig(quiet_hours=hours)
        if held := budget.wait(policy, Conditions(now=NOW, **fields), purpose):
            assert held.reason == reason
            found.add(reason)
    assert found == heeded


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
        reading("compute_process_age_seconds", 40.0),
    )
    assert (found.busy, found.free, found.margin) == (0.4, 8 * GIB, 5.0)
    assert (found.mode, found.processes, found.newest) == ("exclusive_process", 2, 40.0)
    assert found.accelerator
    assert (found.spent, found.expected, found.now) == (1.0, 2.0, NOW)


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


def test_new_processes_count_from_the_first_of_a_row():
    """A server that starts again and again is one row, until no process is new any more."""
    clock = Clock()
    account, seen = Account(clock), []
    for clock.now, newest in ((0.0, 30.0), (60.0, 5.0), (600.0, 20.0), (900.0, 700.0), (910.0, 2.0), (920.0, None)):
        seen.append(account.starting("a", newest))
    assert seen == [30.0, 90.0, 630.0, 0.0, 2.0, 0.0]
    assert account.starting("b", 1.0) == 1.0


# --- The configuration -----------------------------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> BudgetConfig:
    path = tmp_path / "canaryd.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return load(path).budget


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
        ("headroom: 8", "unknown setting; known settings: busy, memory, quiet_hours, share"),
    ],
)
def test_mistakes_are_told(tmp_path, text, said):
    """Each at its line, with what to write; a former setting is one."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"budget:\n  {text}\n")
    assert re.search(r"canaryd\.yaml:2: budget\.\w+", str(caught.value))
    assert said in str(caught.value)
