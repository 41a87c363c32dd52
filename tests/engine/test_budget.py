"""The budget from both sides: what each rule withholds, what it lets through, and what the account says of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from canaryd.config.load import ConfigError, load
from canaryd.config.settings import BudgetConfig, Config, ScheduleConfig
from canaryd.daemon import daemon as daemon_daemon
from canaryd.daemon.snapshot import stale
from canaryd.engine import budget
from canaryd.engine.budget import DOUBT, FORCED, PURPOSES, REASONS, RETEST, ROUND, Account, Facts, Wait
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.schedule import Plan, Step
from canaryd.facts import Reading
from canaryd.model import Device, Outcome, Run, State
from canaryd.probe import Context, ProbeSpec, Skip
from canaryd.report import status
from canaryd.store.notes import BUDGET_NOTE
from canaryd.store.store import Store
from canaryd.supervisor import cgroup
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.limits import SKIPPED, Bursts, excuse, install, make_room
from tests.command import Daemon, bare_python, canaryd, configure, eventually, running

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="a card")
PART = Device(uuid="MIG-1", backend="cuda", index=0, model="a card", parent="GPU-1")
NOW = datetime(2026, 5, 4, 12, 0, tzinfo=timezone.utc).timestamp()
GIB = 1 << 30

PROBE = '''"""Says how it runs."""

import os
import time
from pathlib import Path

from canaryd.probe import Comparison, Exactness, ProbeSpec, Reading

SPEC = ProbeSpec(
    name="computes",
    summary="Says how it runs",
    period=1.0,
    budget={"quick": 0.3, "standard": 0.3, "deep": 0.3},
)


class OutOfMemoryError(RuntimeError):
    pass


def own(name):
    path = Path("/proc/self", name)
    return path.read_text().strip() if path.exists() else ""


def run(ctx):
    if "raises" in ctx.settings:
        said = ctx.settings["raises"]
        raise (RuntimeError if "error:" in said else OutOfMemoryError)(said)
    yield Reading(name="nice", value=os.getpriority(os.PRIO_PROCESS, 0), unit="1")
    yield Reading(name="oom_score_adj", value=own("oom_score_adj"))
    yield Reading(name="autogroup", value=own("autogroup"))
    yield Reading(name="policy", value=os.sched_getscheduler(0), unit="1")
    yield Reading(name="mps", value=os.environ.get("CUDA_MPS_CLIENT_PRIORITY", ""))
    while time.process_time() < ctx.settings.get("burn", 0):
        pass
    while ctx.settings.get("wait") and int(own("schedstat").split()[1]) < 1e9 * ctx.settings["wait"]:
        pass
    trials, began = 0, time.monotonic()
    while ctx.left:
        time.sleep(0.005)
        trials += 1
        if ctx.settings.get("paces"):
            ctx.pace()
        else:
            yield Reading(name="turn", value=trials, unit="1")
    yield Reading(name="trials", value=trials, unit="1")
    yield Comparison(case="only", shape="N=1", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=max(trials, 1))
'''


@pytest.fixture
def policy():
    return BudgetConfig()


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
        ("heat", {"headroom": 1.0}, {"margin": -1.0}, {"margin": None}),
        ("power", {"power": 0.95}, {"power": 0.95}, {"power": 0.94}),
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
    found = budget.wait(policy, Facts(**{"now": NOW} | waits), ROUND)
    assert found is not None
    assert (found.reason, bool(found.text)) == (reason, True)
    assert budget.wait(policy, Facts(**{"now": NOW} | runs), ROUND) is None


def test_what_is_switched_off_withholds_nothing():
    """No power limit by default; 1 as load is never, and so is 0 as headroom."""
    assert budget.wait(BudgetConfig(headroom=0.0), Facts(now=NOW, margin=-3.0), ROUND) is None
    assert budget.wait(BudgetConfig(), Facts(now=NOW, power=1.2), ROUND) is None
    assert budget.wait(BudgetConfig(busy=1.0), Facts(now=NOW, busy=1.0), ROUND) is None


def test_nothing_known_holds_nothing_back(policy):
    """A device that says nothing is tested."""
    assert budget.wait(policy, Facts(now=NOW), ROUND) is None


def test_the_first_round_runs_whatever_it_may_take(policy):
    """How long it takes is known afterwards; one that is dearer than a whole hour's share would never run otherwise."""
    assert budget.wait(policy, Facts(now=NOW, expected=100.0), ROUND) is None
    assert budget.wait(policy, Facts(now=NOW, expected=100.0, spent=0.1), ROUND) is not None


ALL = {
    "compute_mode": {"mode": "prohibited"},
    "memory": {"free": 0},
    "quiet_hours": {},
    "heat": {"margin": 0.0},
    "power": {"power": 1.0},
    "load": {"busy": 1.0},
    "share": {"spent": 100.0},
}


@pytest.mark.parametrize(
    ("purpose", "heeded"),
    [
        (ROUND, set(REASONS)),
        (FORCED, {"compute_mode", "memory"}),
        (DOUBT, {"compute_mode", "memory"}),
        (RETEST, {"compute_mode", "memory", "quiet_hours", "heat", "power"}),
    ],
)
def test_who_waits_for_what(purpose, heeded):
    """Age of evidence and doubt overrule all but memory and compute mode; a retest is meant for load."""
    found = set()
    for reason, fields in ALL.items():
        hours = ((0, 1440),) if reason == "quiet_hours" else ()
        policy = BudgetConfig(quiet_hours=hours, power=0.9)
        if held := budget.wait(policy, Facts(now=NOW, **fields), purpose):
            assert held.reason == reason
            found.add(reason)
    assert found == heeded


def test_the_most_binding_reason_is_told():
    """One that nothing overrules comes before one that waiting mends."""
    policy = BudgetConfig(quiet_hours=((0, 1440),))
    found = budget.wait(policy, Facts(now=NOW, free=0, busy=1.0), ROUND)
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
        return budget.wait(policy, Facts(now=at), ROUND) is not None

    assert [waits(clock) for clock in quiet] == [True] * len(quiet)
    assert [waits(clock) for clock in loud] == [False] * len(loud)


def test_quiet_hours_are_local(monkeypatch):
    """Noon in UTC is 20:00 nine hours east less one."""
    monkeypatch.setenv("TZ", "XYZ-8")
    time.tzset()
    try:
        assert budget.wait(BudgetConfig(quiet_hours=((1200, 1260),)), Facts(now=NOW), ROUND) is not None
    finally:
        monkeypatch.undo()
        time.tzset()


def test_when_evidence_is_forced(policy):
    """By default at three quarters of what counts as fresh; else when the operator says."""
    assert budget.oldest(policy, 7200.0) == 5400.0
    assert budget.oldest(BudgetConfig(evidence=600.0), 7200.0) == 600.0


# --- Facts -----------------------------------------------------------------------------------------------------------


def reading(name: str, value: float, **labels: str) -> Reading:
    return Reading(name=name, value=value, labels=labels)


def known(device: Device, *own: Reading, whole: tuple[Reading, ...] = ()) -> Facts:
    return budget.facts(device, own, whole, now=NOW, spent=1.0, expected=2.0)


def test_facts_of_an_accelerator():
    """Its engines' use without its memory's; the nearest limit of heat; free memory; power over its enforced limit."""
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
        reading("power_watts", 350.0),
        reading("power_limit_watts", 700.0, limit="enforced"),
        reading("power_limit_watts", 350.0, limit="min"),
        reading("compute_mode", 1, mode="exclusive_process"),
        reading("compute_processes", 2),
    )
    assert (found.busy, found.free, found.margin, found.power) == (0.4, 8 * GIB, 5.0, 0.5)
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
    """Heat, power and compute mode are those of the whole device; memory and use are its own."""
    whole = (
        reading("temperature_margin_celsius", 3.0),
        reading("temperature_celsius", 60.0, sensor="core"),
        reading("power_watts", 50.0),
        reading("power_limit_watts", 100.0, limit="enforced"),
        reading("memory_total_bytes", 80 * GIB),
        reading("memory_used_bytes", 80 * GIB),
        reading("utilization_ratio", 1.0, engine="gpu"),
        reading("compute_mode", 2, mode="prohibited"),
    )
    own = reading("memory_total_bytes", 10 * GIB), reading("memory_used_bytes", GIB)
    found = known(PART, *own, whole=whole)
    assert (found.free, found.margin, found.power, found.busy) == (9 * GIB, 3.0, 0.5, None)
    assert found.mode == "prohibited"
    assert known(PART, reading("compute_mode", 0, mode="default"), whole=whole).mode == "default"


def test_facts_of_a_silent_device():
    """What is not read is not known, and text is no number."""
    assert known(GPU, Reading(name="power_watts", value="n/a")) == Facts(now=NOW, spent=1.0, expected=2.0)


# --- The account -----------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
        facts = Facts(now=clock.now, spent=account.spent("a"), expected=account.cost("a", ("p",)))
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
    text = """budget: {share: 0.01, burst: "0.1s", memory: "2GiB", free: "256MiB", busy: 0.5, power: 0.9, headroom: 8,
      quiet_hours: ["08:00-20:00", "22:30-06:00"], evidence: "1h"}"""
    assert read(tmp_path, text) == BudgetConfig(
        share=0.01,
        burst=0.1,
        memory=2 * GIB,
        free=GIB // 4,
        busy=0.5,
        power=0.9,
        headroom=8.0,
        quiet_hours=((480, 1200), (1350, 360)),
        evidence=3600.0,
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
        ("headroom: -1", "out of range; write a number from 0 to 100"),
        ('evidence: "2h"', "make budget.evidence shorter than judge.stale_after"),
    ],
)
def test_mistakes_are_told(tmp_path, text, said):
    """Each at its line, with what to write; evidence that would be stale before it is forced is one."""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"budget:\n  {text}\n")
    assert re.search(r"canaryd\.yaml:2: budget\.\w+", str(caught.value))
    assert said in str(caught.value)


# --- The worker ------------------------------------------------------------------------------------------------------


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "computes.py"
    path.write_text(PROBE)
    return path


LEAST = {"burst": 0.02, "rest": 3.0, "memory": 1024, "free": 1024}


def ask(
    probe: Path, *, nice: int = 0, device: Device = CPU, timeout: float = 60.0, beside_: dict | None = None, **settings
):
    """Run the probe in a worker of its own; return the run and the series, which has ended."""
    spec = ProbeSpec(name="computes", summary="", budget={"quick": 0.3, "standard": 0.3, "deep": 0.3})
    request = RunRequest(
        probe_path=probe, spec=spec, device=device, level="quick", seed=1, settings=settings, beside=beside_ or {}
    )
    with Series(WorkerSpec(python=bare_python(), nice=nice)) as series:
        run = series.run(request, timeout)
    return run, series


def told(run) -> dict[str, object]:
    assert run.outcome is Outcome.COMPLETED, run.detail
    return {r.name: r.value for r in run.readings}


def test_a_worker_steps_back_only_where_it_is_asked(probe):
    """Nice, the scheduler's group of its session, first to go when memory runs out, and below normal under MPS."""
    plain, stepped = (told(ask(probe, nice=nice)[0]) for nice in (0, budget.NICE))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (plain["nice"], stepped["nice"]) == (own, max(own, budget.NICE))
    assert (plain["oom_score_adj"] == "1000", stepped["oom_score_adj"] == "1000") == (False, True)
    assert (plain["mps"], stepped["mps"]) == ("", "1")
    lowest = os.SCHED_IDLE if cgroup.apart(None) else os.SCHED_OTHER
    assert (plain["policy"], stepped["policy"]) == (os.SCHED_OTHER, lowest)
    if not stepped["autogroup"]:
        pytest.skip("this kernel groups no sessions")
    assert str(stepped["autogroup"]).endswith(f"nice {budget.NICE}")
    assert not str(plain["autogroup"]).endswith(f"nice {budget.NICE}")


def test_a_command_may_lead_into_the_group_of_a_server(probe):
    """There the lowest claim would be next to none, and nobody could tell: nice is all."""
    spec = ProbeSpec(name="computes", summary="", budget={"quick": 0.3, "standard": 0.3, "deep": 0.3})
    request = RunRequest(probe_path=probe, spec=spec, device=CPU, level="quick", seed=1)
    with Series(WorkerSpec(command=(bare_python(),), nice=budget.NICE)) as series:
        said = told(series.run(request, 60.0))
    assert (said["nice"], said["policy"]) == (max(os.getpriority(os.PRIO_PROCESS, 0), budget.NICE), os.SCHED_OTHER)


@pytest.mark.parametrize("paces", [True, False], ids=["a probe that paces", "a probe that only yields"])
def test_pauses_cost_no_trials(probe, paces):
    """In bursts a run does as many trials within its budget, and its pauses are no device time."""
    whole, _ = ask(probe, paces=paces)
    bursts, series = ask(probe, paces=paces, beside_=LEAST)
    paused = bursts.seconds - 0.3
    assert int(told(bursts)["trials"]) >= 0.3 / 0.005 / 4  # a busy machine makes trials longer, not many of them
    assert paused > 0.3
    assert series.wall_seconds < bursts.seconds
    assert whole.seconds < bursts.seconds


def test_pauses_by_count():
    """One pause for each burst, none before the first is over, and the clock of the run stands meanwhile."""
    clock = Clock()
    bursts = Bursts(burst=10.0, rest=0.0, clock=clock)
    counts = []
    for _ in range(40):
        clock.now += 1.0
        bursts.pause()
        counts.append(bursts.pauses)
    assert counts == [turn // 10 for turn in range(1, 41)]
    assert bursts.clock() == 40.0 - bursts.paused


def test_a_retest_keeps_its_own_rhythm():
    """Its load and its pauses are the test."""
    ctx = Context(device=CPU, level="quick", seed=1, budget=1.0, intensity="steady")
    before = ctx.pace
    assert install(ctx, LEAST) is None
    assert (ctx.pace, ctx.clock) == (before, time.monotonic)


def test_memory_that_is_not_there_is_not_taken(tmp_path, probe):
    """Below what it may take and must leave, the run is skipped with that reason, and nothing was computed."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable: 1024 kB\n")
    with pytest.raises(
        Skip, match=re.escape("budget: 1 MiB of memory are free; budget.memory and budget.free need 2 MiB")
    ):
        make_room(CPU, {"memory": 1 << 20, "free": 1 << 20}, meminfo)
    make_room(CPU, {"memory": 1 << 19, "free": 1 << 19}, meminfo)
    make_room(CPU, {"memory": 1 << 60, "free": 0}, tmp_path / "none")
    run, _ = ask(probe, beside_=LEAST | {"memory": 1 << 60})
    assert run.outcome is Outcome.SKIPPED
    assert run.detail.startswith(SKIPPED)
    assert run.readings == ()


@pytest.mark.parametrize(
    ("device", "given", "said", "outcome"),
    [
        (GPU, LEAST, "CUDA out of memory. Tried to allocate 2 GiB", Outcome.SKIPPED),
        (GPU, {}, "CUDA out of memory. Tried to allocate 2 GiB", Outcome.OUT_OF_MEMORY),
        (GPU, LEAST, "CUDA error: out of memory", Outcome.SKIPPED),
        (GPU, {}, "CUDA error: out of memory", Outcome.OUT_OF_MEMORY),
        (GPU, LEAST, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Outcome.SKIPPED),
        (CPU, LEAST, "out of memory", Outcome.OUT_OF_MEMORY),
        (GPU, {}, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Outcome.SKIPPED),
        (GPU, LEAST, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", Outcome.SKIPPED),
    ],
)
def test_what_is_nobodys_fault_is_skipped(probe, device, given, said, outcome):
    """The cap of its own making, and a device that its owner shares with nobody; all else stays what it was."""
    run, _ = ask(probe, device=device, beside_=given, raises=said)
    assert run.outcome is outcome
    assert (run.detail.startswith(SKIPPED)) == (outcome is Outcome.SKIPPED)
    assert said in run.detail


def test_other_errors_are_no_excuse():
    """A device that fails is not excused."""
    assert excuse(RuntimeError("CUDA error: an illegal memory access was encountered"), capped=True) == ""
    assert excuse(ValueError("busy or unavailable"), capped=True) == ""


@pytest.mark.gpu
@pytest.mark.torch
def test_the_cap_holds_on_an_accelerator():
    """Torch refuses what is beyond the cap; the server's memory is not touched."""
    import torch

    device = next(
        d for d in __import__("canaryd.worker.numeric.stack", fromlist=["x"]).discover()[0] if d.backend != "cpu"
    )
    make_room(device, {"memory": 64 << 20, "free": 0})
    try:
        kept = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        assert kept.nbytes == 32 << 20
        assert excuse(caught.value, capped=True).startswith(SKIPPED)
    finally:  # the cap is the process's, and the tests after this one need more
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who waited for a core")
def test_a_starved_worker_does_not_hang(probe):
    """One that waits for its core longer than its timeout completes; without stepping back it is timed out."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        run, _ = ask(probe, nice=budget.NICE, timeout=10.0, wait=15.0)
        plain, _ = ask(probe, timeout=10.0, wait=15.0)
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, cores)
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert run.seconds > 10.0
    assert plain.outcome is Outcome.TIMED_OUT


# --- The daemon, asked directly --------------------------------------------------------------------------------------

CARD, TWIN = replace(GPU, torch_index=0), replace(GPU, uuid="GPU-2", index=1, torch_index=1)
PERIODS = {"a": 1800.0, "b": 1800.0}
BUSY = (reading("utilization_ratio", 1.0, engine="gpu"),)
PROHIBITED = (reading("compute_mode", 2, mode="prohibited"),)


class Beside(daemon_daemon.Daemon):
    """A daemon with two busy cards and two probes that compute; what it would run is noted, and takes 16 s."""

    def __init__(self, store: Store, policy: BudgetConfig) -> None:
        super().__init__(Config(budget=policy), None, store)
        engine = self.engine
        engine.devices = {d.uuid: d for d in (CARD, TWIN)}
        engine.present = engine.in_place = set(engine.devices)
        file = ProbeFile(name="p", path=Path("/p.py"), source="builtin")
        engine.entries = {n: Entry(spec=ProbeSpec(name=n, summary="s", period=1800.0), file=file) for n in PERIODS}
        self.said = dict.fromkeys(engine.devices, BUSY)
        self.ran: list[tuple[str, tuple[str, ...], str]] = []
        self._rounds._last = {(u, n): 0.0 for u in engine.devices for n in PERIODS}  # the first round is over
        engine.watch.readings = lambda uuid, _: self.said[uuid]
        engine.carry_out = self._note

    def _note(self, plan: Plan, *, purpose: str) -> None:
        self.ran.append((plan.device.uuid, tuple(s.entry.spec.name for s in plan.steps), purpose))
        self.engine.account.spend(plan.device.uuid, 16.0, purpose)

    def know(self, probe: str, age: float, outcome: Outcome = Outcome.COMPLETED, **fields) -> None:
        """Remember a run of so long ago."""
        started, number = time.time() - age, len(self.engine.evidence(CARD.uuid))
        made = {"id": f"{number}", "device": CARD.uuid, "probe": probe, "probe_version": 1, "seconds": 32.0}
        self.engine.take(Run(started=started, outcome=outcome, **{**made, **fields}))

    def chosen(self) -> tuple[list[str], str]:
        return self._rounds.within_budget(CARD, ["a", "b"], PERIODS)

    def waits(self) -> str:
        held = self.engine.account.withheld(CARD.uuid)
        return held.wait.reason if held else ""


@pytest.fixture
def served(tmp_path):
    with Store.open(tmp_path) as store:
        yield Beside(store, BudgetConfig())


OLD = 0.75 * 7200.0
"""Seconds after which evidence is forced by default."""


@pytest.mark.parametrize(
    ("outcome", "detail"),
    [
        (Outcome.ERRORED, ""),
        (Outcome.TIMED_OUT, ""),
        (Outcome.OUT_OF_MEMORY, ""),
        (Outcome.SKIPPED, f"{SKIPPED}more than budget.memory was asked for"),
    ],
)
def test_a_probe_that_never_completes_is_no_way_around_the_budget(served, outcome, detail):
    """It is forced as often as evidence is wanted and no oftener, by itself, and the others keep to the budget."""
    served.know("a", 1800)
    assert served.chosen() == (["b"], FORCED)
    served.know("b", 1800, outcome, detail=detail)
    served.know("b", OLD + 1, outcome, detail=detail)
    assert served.chosen() == ([], ROUND)
    assert served.waits() == "load"


def test_a_failure_is_tried_again_when_evidence_is_wanted(served):
    """Not never again."""
    served.know("a", 1800)
    served.know("b", OLD + 1, Outcome.ERRORED)
    assert served.chosen() == (["b"], FORCED)
    served.know("b", 0, confirms="another", cases=("c",))
    assert served.chosen() == (["b"], FORCED)


def test_only_what_is_old_is_forced_and_the_rest_waits_on(served):
    """What waits is not told anew because another probe ran."""
    served.know("a", OLD + 1)
    served.know("b", OLD - 60)
    assert served.engine.account.withhold(CARD.uuid, Wait(reason="load", text="it is in use"), 1.0)
    served._rounds.tick(CARD.uuid)
    assert served.ran == [(CARD.uuid, ("a",), FORCED)]
    served._rounds.tick(CARD.uuid)
    assert (len(served.ran), served.waits()) == (1, "load")
    assert served.engine.account.totals(CARD.uuid)[1]["load"] == 1


def test_evidence_from_the_future_is_none(served):
    """After a clock was set back the next round is forced, once; a clock that is minutes wrong changes nothing."""
    for probe in PERIODS:
        served.know(probe, -300)
    assert served.chosen() == ([], ROUND)
    served.engine._evidence._runs.clear()
    for probe in PERIODS:
        served.know(probe, -7 * 86_400)
    assert served.chosen() == (["a", "b"], FORCED)
    assert stale(served.engine, CARD, served.engine.evidence(CARD.uuid), time.time()) == [
        "cuda:0 a: all evidence is dated in the future",
        "cuda:0 b: all evidence is dated in the future",
    ]
    for probe in PERIODS:
        served.know(probe, 0)
    assert served.chosen() == ([], ROUND)
    assert stale(served.engine, CARD, served.engine.evidence(CARD.uuid), time.time()) == []


def test_a_restart_knows_what_a_round_takes(served):
    """By what its probes took the last time: two of them at 8 s of work each are more than the share has left."""
    served.said[CARD.uuid] = ()
    for probe in PERIODS:
        served.know(probe, 1800)
    served._rounds.recall_spent(CARD.uuid)
    assert served.engine.account.spent(CARD.uuid) == 16.0
    assert served.chosen() == ([], ROUND)
    assert served.waits() == "share"


def test_a_test_out_of_turn_is_no_measure_of_a_round(served):
    """It takes nothing of the share, which does not mean that a round takes nothing."""
    served.said[CARD.uuid] = ()
    served.engine.account.took(CARD.uuid, ("a", "b"), 16.0)
    served.engine.account.withhold(CARD.uuid, Wait(reason="share", text="enough"), 1.0)
    served.engine.watch.history.triggers[CARD.uuid] = "an Xid"
    served._rounds.tick(CARD.uuid)
    assert served.ran == [(CARD.uuid, ("a", "b"), DOUBT)]
    assert served.engine.account.cost(CARD.uuid, ("a", "b")) == 16.0
    assert served.waits() == ""


def test_the_first_quick_round_of_a_start_is_not_put_off(served):
    """Whatever a check before it found, and once: a longer one, and every further one, keeps to the budget."""
    for probe in PERIODS:
        served.know(probe, 60)
    assert served.chosen() == ([], ROUND)
    served._rounds._last.clear()
    assert served.chosen() == (["a", "b"], FORCED)
    served.engine.config = replace(served.engine.config, schedule=ScheduleConfig(level="standard"))
    assert served.chosen() == ([], ROUND)
    served.engine.config = replace(served.engine.config, schedule=ScheduleConfig())
    served._rounds.tick(CARD.uuid)
    assert served.ran == [(CARD.uuid, ("a", "b"), FORCED)]
    assert served.chosen() == ([], ROUND)
    served._rounds._last.clear()
    served.said[CARD.uuid] = PROHIBITED
    assert served.chosen() == ([], ROUND)


@pytest.mark.parametrize(
    "end",
    [
        lambda engine: engine.present.clear(),
        lambda engine: engine.devices.clear(),
        lambda engine: engine.release("released by hand"),
        lambda engine: engine.entries.clear(),
    ],
    ids=["gone", "forgotten", "released", "disabled"],
)
def test_what_can_run_no_more_does_not_wait(served, end):
    """It would be told as waiting for as long as the device is known."""
    for probe in PERIODS:
        served.know(probe, 1800)
    served._rounds.tick(CARD.uuid)
    assert served.waits() == "load"
    assert served.store.note(BUDGET_NOTE)
    end(served.engine)
    served._rounds.tick(CARD.uuid)
    assert served.waits() == ""
    assert not served.store.note(BUDGET_NOTE)


def test_a_sibling_that_must_be_left_alone_is_not_retested(served):
    """The accused is asked all the same; a sibling waits for what a retest waits for, and not for load."""
    step = Step(entry=served.engine.entries["a"], level="deep", seed=1, intensity="steady")
    plans = [Plan(device=d, instruction_set="", steps=(step,)) for d in (CARD, TWIN)]
    for said, asked in ((PROHIBITED, [CARD.uuid]), (BUSY, [CARD.uuid, TWIN.uuid])):
        served.said[TWIN.uuid], served.ran = said, []
        served._rounds.run_aside(CARD, plans, RETEST)
        assert [uuid for uuid, *_ in served.ran] == asked


def test_a_confirmation_heeds_compute_mode_and_memory_alone(tmp_path):
    """On whichever device it is: a wrong bit is no time to save."""
    with Store.open(tmp_path) as store:
        served = Beside(store, BudgetConfig(quiet_hours=((0, 1440),)))
        assert served.engine.may(TWIN, DOUBT)
        assert not served.engine.may(TWIN, RETEST)
        served.said[TWIN.uuid] = PROHIBITED
        assert not served.engine.may(TWIN, DOUBT)
        served.said[TWIN.uuid] = reading("memory_total_bytes", GIB), reading("memory_used_bytes", GIB)
        assert not served.engine.may(TWIN, DOUBT)


# --- The daemon ------------------------------------------------------------------------------------------------------


def prepared(directory: Path, *names: str, each: dict | None = None, **sections) -> Path:
    """Write a configuration with the probe above, which loads the device, and others of tests/probes."""
    config = configure(directory, *names, each=each, **sections)
    path = directory / "probes.d" / "computes.py"
    path.write_text(PROBE)
    path.chmod(0o644)
    return config


def completed(daemon: Daemon, probe: str = "computes") -> float:
    return daemon.value("canaryd_probe_runs_total", probe=probe, outcome="completed") or 0.0


def spent(daemon: Daemon, purpose: str) -> float:
    return daemon.value("canaryd_budget_spent_seconds_total", purpose=purpose) or 0.0


def test_quiet_hours_withhold_and_the_age_of_evidence_overrules_them(tmp_path):
    """The first run is forced, for there is no evidence; then rounds wait, and say so, until the evidence is too old.

    What loads no device of ours runs on.
    """
    state = tmp_path / "state"
    config = prepared(tmp_path, "passes", budget={"quiet_hours": ["00:00-24:00"], "evidence": "20s"})
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: completed(daemon) == 1)
        eventually(lambda: daemon.value("canaryd_budget_withheld", reason="quiet_hours") == 1)
        assert daemon.value("canaryd_budget_skipped_total", reason="quiet_hours") == 1
        assert daemon.value("canaryd_budget_skipped_total", reason="load") == 0
        assert (completed(daemon), spent(daemon, ROUND)) == (1, 0)
        first = eventually(lambda: spent(daemon, FORCED))
        assert first > 0
        assert "put off: quiet hours 00:00-24:00" in daemon.line("put off")
        shown = canaryd("status", "--config", config, "--state-dir", state)
        assert "A test has been waiting since" in shown.out
        assert "quiet hours 00:00-24:00" in " ".join(shown.out.split())
        found = canaryd("status", "--json", "--config", config, "--state-dir", state).document["devices"][0]
        assert [f["severity"] for f in found["findings"] if f["rule"] == status.WITHHELD_RULE] == ["healthy"]
        eventually(lambda: completed(daemon) == 2)
        eventually(lambda: spent(daemon, FORCED) > first)  # booked when the worker has ended
        assert spent(daemon, ROUND) == 0
        assert completed(daemon, "passes") >= 1
        assert daemon.value("canaryd_budget_share_ratio") == 0.005


def test_without_reasons_rounds_run_and_spend(tmp_path):
    """The other side: nothing is withheld, and time is booked on rounds."""
    with running(Daemon(prepared(tmp_path), tmp_path / "state")) as daemon:
        eventually(lambda: completed(daemon) >= 2)
        assert spent(daemon, ROUND) > 0
        assert spent(daemon, FORCED) == 0
        assert daemon.value("canaryd_budget_withheld") is None


def test_load_withholds_until_it_falls(tmp_path):
    """What telemetry says decides; a round that waits runs when the load is over."""
    said = tmp_path / "said.json"

    def load(tasks: float) -> None:
        readings = [["load_average", tasks, {}], ["cpu_cores", 4, {"state": "online"}]]
        new = said.with_suffix(".new")
        new.write_text(json.dumps({"readings": readings}))
        new.rename(said)

    load(4.0)
    config = prepared(tmp_path, "says", each={"says": {"settings": {"file": str(said)}, "timeout": "20s"}})
    with running(Daemon(config, tmp_path / "state")) as daemon:
        eventually(lambda: completed(daemon) == 1)
        eventually(lambda: daemon.value("canaryd_budget_withheld", reason="load") == 1)
        before = completed(daemon)
        load(0.1)
        eventually(lambda: completed(daemon) > before)


def test_a_verdict_comes_within_two_minutes_of_a_start_on_loaded_cores(tmp_path):
    """Two busy loops, and a load of 228 % that telemetry reports first: a check's young evidence puts nothing off."""
    said = tmp_path / "said.json"
    readings = [["load_average", 4.56, {}], ["cpu_cores", 2, {"state": "online"}]]
    said.write_text(json.dumps({"readings": readings}))
    each = {"says": {"settings": {"file": str(said)}, "timeout": "20s"}, "computes": {"period": "30m"}}
    config, state = prepared(tmp_path, "says", each=each), tmp_path / "state"
    assert canaryd("check", "--config", config, "--state-dir", state).code == 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
    try:
        for loop, core in zip(loops, cores, strict=True):
            os.sched_setaffinity(loop.pid, {core})
        begun = time.monotonic()
        with running(Daemon(config, state)) as daemon:
            os.sched_setaffinity(daemon.popen.pid, cores)
            with Store.open(state) as store:
                (device,) = store.devices()
                with store.lock(device.device.uuid, timeout=20):
                    eventually(lambda: daemon.value("canaryd_load_average"), 120)
            eventually(lambda: completed(daemon) == 2, 120)
            eventually(lambda: daemon.value("canaryd_device_state", state="healthy") == 1, 120)
            assert time.monotonic() - begun < 120
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_the_share_withholds(tmp_path):
    """Of a tiny budget rounds take what an hour gives, and then wait for the hour."""
    burn = min(20.0, 0.4 * (os.cpu_count() or 1))  # seconds of all cores that make more than the share of an hour
    each = {"computes": {"settings": {"burn": burn}}}
    with running(Daemon(prepared(tmp_path, each=each, budget={"share": 0.0001}), tmp_path / "state")) as daemon:
        eventually(lambda: daemon.value("canaryd_budget_withheld", reason="share") == 1, 300)
        assert spent(daemon, ROUND) <= 0.36 or completed(daemon) == 1
        assert spent(daemon, ROUND) > 0.1


def test_a_check_has_the_device_to_itself(tmp_path):
    """It is asked for: no quiet hours, no nice, no bursts, and no memory to be left."""
    limits = {"quiet_hours": ["00:00-24:00"], "share": 0.0001, "memory": "1000TiB"}
    config = prepared(tmp_path, budget=limits)
    answer = canaryd("check", "--config", config, "--state-dir", tmp_path / "state", "--json")
    assert answer.code == 0, answer.out
    with Store.open(tmp_path / "state") as store:
        (run,) = store.runs(probe="computes")
    assert told(run)["nice"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_short_memory_is_never_overruled(tmp_path):
    """Not even the lack of any evidence: the worker skips, says why, and the device stays unknown."""
    config = prepared(tmp_path, budget={"memory": "1000TiB"})
    with running(Daemon(config, tmp_path / "state")) as daemon:
        outcome = {"probe": "computes", "outcome": "skipped"}
        eventually(lambda: (daemon.value("canaryd_probe_runs_total", **outcome) or 0) >= 1)
        assert "budget.memory" in daemon.line("computes skipped")
        assert completed(daemon) == 0
        eventually(lambda: daemon.value("canaryd_device_state", state="unknown") == 1)


def test_word_is_left_only_while_a_daemon_runs(tmp_path):
    """Without one nobody puts anything off."""
    with Store.open(tmp_path) as store:
        store.see_device(CPU, NOW)
        store.set_present({CPU.uuid}, NOW)
        store.set_note(BUDGET_NOTE, json.dumps({CPU.uuid: {"since": NOW, "text": "it is hot"}}))
        config = load(Path(prepared(tmp_path)))
        notes = {
            runs: [
                (f.message, f.state)
                for f in status.gather(store, config, NOW, daemon=runs).devices[0].verdict.findings
                if f.rule == status.WITHHELD_RULE
            ]
            for runs in (True, False)
        }
    assert notes[False] == []
    ((message, state),) = notes[True]
    assert message.endswith(": it is hot")
    assert state is State.HEALTHY
