"""From a plan to a verdict: a real engine, a real store, real workers running probes that behave and misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from canaryd.config.settings import (
    Config,
    DevicesConfig,
    EndpointConfig,
    EndpointsConfig,
    ProbesConfig,
    ProbeSettings,
    WorkerConfig,
)
from canaryd.engine import budget, schedule
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.engine import Engine, Progress
from canaryd.engine.evidence import NEWEST
from canaryd.engine.host import Options
from canaryd.engine.inventory import Found
from canaryd.facts import Comparison, Evidence, Exactness, Reading
from canaryd.model import Cause, Device, Outcome, Run, State, Verdict
from canaryd.probe import ProbeSpec
from canaryd.report.status import gather
from canaryd.store import database
from canaryd.store.locks import Busy
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.command import BUILTIN, PATIENCE, ROOT, bare_python, catalogue, eventually, soon

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
NOW = 1_700_000_000.0
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one element")


def settings(directory: Path, *probes: str, **each: ProbeSettings) -> Config:
    off = {name: ProbeSettings(enabled=False) for name in BUILTIN}
    return Config(
        state_dir=directory / "state",
        worker=WorkerConfig(python=bare_python()),
        probes=ProbesConfig(directories=(catalogue(directory / "probes.d", *probes),), each=off | each),
    )


def start(config: Config, **fields) -> Engine:
    engine = Engine(config, Store.open(config.state_dir), **fields)
    engine.discover()
    return engine


def the_cpu(engine: Engine) -> Device:
    return next(d for d in engine.devices.values() if d.backend == "cpu")


def carry_out(engine: Engine, *names: str, drill: str = "", **arguments) -> list[Run]:
    device = the_cpu(engine)
    entries = [e for n, e in engine.entries.items() if not names or n in names]
    plans = schedule.plan_round(device, entries, levels=engine.levels("quick"), seed=7, sets=("",), drill=drill)
    return [run for plan in plans for run in engine.carry_out(plan, **arguments)]


def verdict(engine: Engine) -> Verdict:
    return engine.verdict(the_cpu(engine).uuid)


def made(number: int, probe: str = "p", *, wrong: bool = False, at: float = NOW, **fields) -> Run:
    comparison = Comparison(
        case="a",
        shape="N=4",
        seed=1,
        exactness=Exactness.UNIVERSAL,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
    )
    default = {"id": f"{number:012x}-{probe}", "device": CPU.uuid, "probe": probe, "probe_version": 1, "seconds": 1.0}
    fields = {"outcome": Outcome.COMPLETED, "comparisons": (comparison,)} | fields
    return Run(started=at + number, **(default | fields))


@pytest.fixture
def idle(tmp_path) -> Engine:
    """An engine that knows a device and looks at no hardware."""
    engine = Engine(Config(state_dir=tmp_path), Store.open(tmp_path), clock=lambda: NOW)
    engine.devices = {CPU.uuid: CPU}
    return engine


# --- Good and bad numbers --------------------------------------------------------------------------------------------


def test_right_numbers_make_a_device_healthy(tmp_path):
    """A completed run is stored, and the verdict that follows from it too."""
    engine = start(settings(tmp_path, "passes"))
    (run,) = carry_out(engine)
    assert (run.outcome, run.trials) == (Outcome.COMPLETED, 3)
    assert verdict(engine).state is State.HEALTHY
    assert [stored.id for stored in engine.store.runs()] == [run.id]
    assert engine.store.verdicts()[run.device].state is State.HEALTHY


def test_a_mismatch_is_confirmed_in_new_workers_and_makes_a_device_faulty(tmp_path):
    """Exactly as many repetitions as the policy says, of the same case and seed, each in a process of its own."""
    log = tmp_path / "log"
    engine = start(settings(tmp_path, "records", records=ProbeSettings(settings={"log": str(log), "wrong": 99})))
    first, *again = carry_out(engine)
    assert [run.confirms for run in again] == [first.id] * 3
    assert {(run.seed, run.outcome, len(run.wrong)) for run in again} == {(first.seed, Outcome.COMPLETED, 1)}
    pids = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("begin")]
    assert len(set(pids)) == len(pids) == 4
    found = verdict(engine)
    assert (found.state, found.cause) == (State.FAULTY, Cause.UNDETERMINED)  # no sibling to ask
    assert "exact-mismatch-confirmed" in {finding.rule for finding in found.findings}
    assert len(engine.store.runs(failed=True)) == 4


def test_a_suspect_is_known_before_it_is_confirmed(tmp_path):
    """The first wrong bit is stored and judged at once; nothing waits for the confirmations."""
    states = []

    def listen(progress: Progress) -> None:
        if progress.done:
            states.append(engine.store.verdicts()[progress.device.uuid].state)

    always = ProbeSettings(settings={"log": str(tmp_path / "log"), "wrong": 99})
    engine = start(settings(tmp_path, "records", records=always), listener=listen)
    carry_out(engine)
    assert states == [State.SUSPECT, State.SUSPECT, State.SUSPECT, State.FAULTY]


def test_evidence_survives_a_restart(tmp_path):
    """A new engine on the same store knows the device, its runs and its state; a reboot resets nothing."""
    config = settings(tmp_path, "mismatches")
    engine = start(config)
    runs = carry_out(engine)
    before = verdict(engine)
    engine.store.close()
    again = start(config)
    assert [run.id for run in again.evidence(runs[0].device)] == [run.id for run in runs]
    after = verdict(again)
    assert (after.state, after.cause, after.since) == (State.FAULTY, before.cause, before.since)


def test_a_record_that_cannot_be_read_yet_is_no_health(tmp_path, monkeypatch):
    """Another program locks the database while the engine starts, and lets go: unknown, then faulty as before."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT", 0.01)
    engine = start(settings(tmp_path, "mismatches"))
    carry_out(engine)
    before = verdict(engine)
    engine.store.close()
    config = settings(tmp_path, "passes", mismatches=ProbeSettings(enabled=False))
    with contextlib.closing(sqlite3.connect(config.state_dir / "canaryd.db", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        again = start(config)
        carry_out(again)
        found = verdict(again)
        assert (found.state, found.findings[0].rule) == (State.UNKNOWN, "record-unread")
        assert "database is locked" in found.findings[0].message
    again.recall()
    assert not again.unread
    after = verdict(again)
    assert (after.state, after.since) == (State.FAULTY, before.since)
    assert {r.probe for r in again.evidence(after.device)} == {"mismatches", "passes"}
    assert [v.state for v in again.store.verdict_history(after.device)] == [State.SUSPECT, State.FAULTY]


def test_a_read_that_fails_once_is_made_good(tmp_path, monkeypatch):
    """The lock is gone before the recall is over: what was read after it does not hide what was not read before."""
    engine = start(settings(tmp_path, "mismatches"))
    carry_out(engine)
    store = engine.store
    again = Engine(engine.config, store)
    failures = store.failures
    monkeypatch.setattr(store, "failures", lambda *a: store._lose(sqlite3.OperationalError("locked")) and [])
    again.recall()
    assert verdict(again).state is State.UNKNOWN
    assert "record-unread" in {finding.rule for finding in verdict(again).findings}
    monkeypatch.setattr(store, "failures", failures)
    again.recall()
    assert verdict(again).state is State.FAULTY


def test_a_drill_is_a_world_of_its_own(tmp_path):
    """Its mismatches are confirmed and judged by the same rules, and touch neither the verdict nor the record."""
    engine = start(settings(tmp_path, "records"))
    carry_out(engine)
    runs = carry_out(engine, drill="flip")
    assert [(run.drill, len(run.wrong)) for run in runs] == [("flip", 1)] * 4
    uuid, real = runs[0].device, engine.store.runs()
    assert engine.decisions.rehearse(engine.store.drilled(engine.clock()))[uuid].state is State.FAULTY
    assert verdict(engine).state is State.HEALTHY
    assert not any(run.failed or run.drill for run in (*real, *engine.evidence(uuid)))
    again = Engine(engine.config, engine.store)
    again.recall()
    assert [run.id for run in again.evidence(uuid)] == [run.id for run in real]


# --- Misbehaving probes ----------------------------------------------------------------------------------------------


def test_a_hanging_probe_leaves_its_device_unknown(tmp_path):
    """It is killed at its deadline; no evidence is not health."""
    engine = start(settings(tmp_path, "records", records=ProbeSettings(timeout=0.3, settings={"seconds": 600})))
    (run,) = carry_out(engine)
    assert (run.outcome, run.trials) == (Outcome.TIMED_OUT, 0)
    assert verdict(engine).state is State.UNKNOWN
    assert [stored.outcome for stored in engine.store.runs()] == [Outcome.TIMED_OUT]


def test_a_broken_probe_hurts_only_itself(tmp_path):
    """Import errors, bad names and crashes become sentences and outcomes; the others run as if alone."""
    engine = start(settings(tmp_path, "crashes", "passes", "raises_at_import", "wrong_name", "raises", "bad_spec"))
    assert sorted(engine.entries) == ["crashes", "passes", "raises"]
    for name in ("raises_at_import", "wrong_name", "bad_spec"):
        assert any(f"{name}.py" in problem for problem in engine.problems), engine.problems
    outcomes = {run.probe: run.outcome for run in carry_out(engine)}
    assert outcomes == {"crashes": Outcome.CRASHED, "passes": Outcome.COMPLETED, "raises": Outcome.ERRORED}
    found = verdict(engine)
    assert found.state is State.UNKNOWN
    assert {f.probe for f in found.findings if f.rule == "not-completed"} == {"crashes", "raises"}
    assert not any(f.probe == "passes" for f in found.findings)


def test_a_mismatch_survives_the_crash_that_follows(tmp_path):
    """What a probe has measured before it took the process down is evidence."""
    engine = start(settings(tmp_path, "mismatches_then_crashes"))
    runs = carry_out(engine)
    assert [(run.outcome, len(run.wrong)) for run in runs] == [(Outcome.CRASHED, 1)] * 4
    assert verdict(engine).state is State.SUSPECT  # a confirmation must complete to count as one


def test_a_disabled_probe_does_not_run_and_is_not_health(tmp_path):
    """With all of them disabled the device is unknown."""
    engine = start(settings(tmp_path, "passes", passes=ProbeSettings(enabled=False)))
    assert carry_out(engine) == []
    assert verdict(engine).state is State.UNKNOWN


def test_a_setting_for_a_probe_that_does_not_exist_is_said(tmp_path):
    """A typing error must not look like a disabled probe."""
    engine = start(settings(tmp_path, "passes", pases=ProbeSettings(enabled=False)))
    assert 'probes.pases: no probe of that name was found; did you mean "passes"?' in engine.problems


def test_an_interpreter_that_cannot_start_is_a_problem_and_no_device(tmp_path):
    """The sentence names the setting; known devices stay known."""
    config = settings(tmp_path, "passes")
    start(config).store.close()
    broken = dataclasses.replace(config, worker=WorkerConfig(python="/nonexistent/python"))
    engine = start(broken)
    assert engine.present == set()
    assert [d.backend for d in engine.devices.values()] == ["cpu"]
    assert any("worker.python (/nonexistent/python) cannot be started" in problem for problem in engine.problems)
    assert verdict(engine).state is State.UNKNOWN


# --- Stopping, waiting -----------------------------------------------------------------------------------------------


def test_stop_ends_a_hung_worker_at_once_and_stores_no_run(tmp_path):
    """From another thread; what canaryd cut short itself says nothing about the device."""
    log = tmp_path / "log"
    stubborn = ProbeSettings(settings={"log": str(log), "seconds": 600, "stubborn": True})
    engine = start(settings(tmp_path, "records", records=stubborn))
    found: list[Run] = []
    thread = threading.Thread(target=lambda: found.extend(carry_out(engine)))
    thread.start()
    eventually(lambda: log.exists() and log.read_text())
    begun = time.monotonic()
    engine.stop("enough")
    thread.join(PATIENCE)
    assert time.monotonic() - begun < soon(2)
    assert found == []
    assert engine.store.runs() == []
    pid = int(log.read_text().split()[1])
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), 5)  # noqa: PTH110  a process, not a path
    assert carry_out(engine) == []  # nothing starts any more


def test_a_wrong_bit_before_a_stop_is_kept(tmp_path):
    """A rare fault may not show itself again: the run is stored although canaryd cut it short."""
    (tmp_path / "probes.d").mkdir()
    text = (Path(__file__).parents[1] / "probes/mismatches.py").read_text().replace('"mismatches"', '"wrong_and_slow"')
    (tmp_path / "probes.d/wrong_and_slow.py").write_text(
        f"{text}    open({str(tmp_path / 'seen')!r}, 'w')\n    import time; time.sleep(600)\n"
    )
    (tmp_path / "probes.d/wrong_and_slow.py").chmod(0o644)
    engine = start(settings(tmp_path))
    thread = threading.Thread(target=carry_out, args=(engine,))
    thread.start()
    eventually((tmp_path / "seen").exists)
    time.sleep(0.3)  # the fact travels
    engine.stop("enough")
    thread.join(PATIENCE)
    (kept,) = engine.store.runs()
    assert len(kept.wrong) == 1
    assert verdict(engine).state is State.SUSPECT


def test_a_locked_device_is_busy(tmp_path):
    """The message names the holder; nothing has run, and once the lock is free everything does."""
    engine = start(settings(tmp_path, "passes"))
    with Store.open(tmp_path / "state") as other, other.lock(the_cpu(engine).uuid):
        with pytest.raises(Busy, match=f"pid {os.getpid()}"):
            carry_out(engine)
        assert engine.store.runs() == []
    assert len(carry_out(engine)) == 1


def test_a_wait_for_a_device_ends_with_stop(tmp_path):
    """A user who interrupts a waiting check is not kept for the ten minutes that it may wait."""
    engine = start(settings(tmp_path, "passes"))
    holders: list[str] = []
    holds = (
        "import sys; from pathlib import Path; from canaryd.store.store import Store\n"
        "with Store.open(Path(sys.argv[1])) as store, store.lock(sys.argv[2]): print(flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", holds, str(tmp_path / "state"), the_cpu(engine).uuid]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"\n"
        threading.Timer(0.3, engine.stop, ("enough",)).start()
        begun = time.monotonic()
        with pytest.raises(Busy):
            carry_out(engine, wait=60.0, on_wait=holders.append)
        assert time.monotonic() - begun < soon(5)
        other.stdin.close()
    assert len(holders) == 1
    assert f"pid {other.pid}" in holders[0]


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_a_frequent_probe_does_not_crowd_out_a_rare_one_after_a_restart(tmp_path):
    """The same when the evidence is read back from the store."""
    config = settings(tmp_path, "passes", "records")
    engine = start(config)
    device = the_cpu(engine).uuid
    engine.store.add_run(dataclasses.replace(made(0, "passes"), device=device))
    for number in range(1, 2 * NEWEST):
        engine.store.add_run(dataclasses.replace(made(number, "records"), device=device))
    engine.store.close()
    probes = [run.probe for run in start(config).evidence(device)]
    assert (probes.count("passes"), probes.count("records")) == (1, NEWEST)


def test_a_mismatch_is_never_crowded_out(idle):
    """What is clean is counted, and takes no place of it."""
    runs = [made(0, wrong=True), *(made(number, cases=("a",)) for number in range(1, 300))]
    for run in runs:
        idle.store.add_run(run)
        idle.take(run)
    kept = idle.evidence(CPU.uuid)
    assert kept[0].wrong
    assert len(kept) == NEWEST + 1


@pytest.mark.parametrize(("kinds", "each"), [(1, 8), (4, 8), (8, 4), (20, 2)])
def test_a_device_that_fails_in_everything_takes_no_more_memory(idle, monkeypatch, kinds, each):
    """Eight such devices fit in the memory of a daemon; each kind keeps its newest failures, also after a restart."""
    for name, value in {"FAILURES": 8, "DEVICE_FAILURES": 32, "FEWEST": 2}.items():
        monkeypatch.setattr(f"canaryd.engine.evidence.{name}", value)
    for number in range(10):
        for kind in range(kinds):
            run = made(number, f"p{kind}", wrong=True)
            idle.take(dataclasses.replace(run, id=f"{run.id}-{kind:02}"))
            idle.store.add_run(dataclasses.replace(run, id=f"{run.id}-{kind:02}"))
    probes = Counter(run.probe for run in idle.evidence(CPU.uuid))
    assert probes == {f"p{kind}": each for kind in range(kinds)}
    assert idle.store.kinds_of_failures(CPU.uuid) == kinds
    again = Engine(idle.config, idle.store, clock=lambda: NOW)
    again.devices = {CPU.uuid: CPU}
    again._evidence.recall()
    assert {r.id for r in again.evidence(CPU.uuid)} == {r.id for r in idle.evidence(CPU.uuid)}


# --- Restricted checks, and which device -----------------------------------------------------------------------------


def test_a_restricted_check_does_not_decide_for_the_device(tmp_path):
    """Its verdict is about the probes it asked for, and is not stored."""
    engine = start(settings(tmp_path, "passes", "records"))
    engine.asked = Options(probes=("passes",))
    carry_out(engine, "passes")
    assert verdict(engine).state is State.HEALTHY
    assert engine.store.verdicts() == {}


def test_interrupted_confirmations_are_owed(idle, tmp_path, monkeypatch):
    """What a stop cut short is made up for later: as many as are missing, for mismatches of the last day only.

    A confirmation that has left memory, but is on record, is not missing; nor is one that a lost record lacks.
    """
    (tmp_path / "p.py").write_text("")
    file = ProbeFile(name="p", path=tmp_path / "p.py", source="directory")
    idle.entries = {"p": Entry(spec=ProbeSpec(name="p", summary="s"), file=file)}
    assert idle.experiments.owed(CPU.uuid) == []
    hit = made(1, wrong=True, at=NOW - 60)
    idle.take(hit)
    assert [plan.steps[0].confirms for plan in idle.experiments.owed(CPU.uuid)] == [hit.id] * 3
    idle.take(made(2, confirms=hit.id))
    assert len(idle.experiments.owed(CPU.uuid)) == 2
    idle.take(made(3, wrong=True, at=NOW - 2 * 86400))
    assert len(idle.experiments.owed(CPU.uuid)) == 2
    for name in ("FAILURES", "FEWEST"):
        monkeypatch.setattr(f"canaryd.engine.evidence.{name}", 1)
    idle.add(made(4, wrong=True, at=NOW - 50))
    for number in (5, 6, 7):
        idle.add(made(number, confirms=made(4).id))
    assert idle.experiments.owed(CPU.uuid) == []


CARDS = [Device(uuid=f"GPU-{i}", backend="cuda", index=i, model="a card", torch_index=i) for i in range(8)]


def of_cards(engine: Engine, tmp_path: Path) -> None:
    """Let an engine know eight cards of one model and one probe that computes."""
    engine.devices = {d.uuid: d for d in CARDS}
    engine.present = set(engine.devices)
    file = ProbeFile(name="p", path=tmp_path / "p.py", source="directory")
    engine.entries = {"p": Entry(spec=ProbeSpec(name="p", summary="s"), file=file)}


def test_confirmations_ask_whether_they_may(idle, tmp_path, monkeypatch):
    """On the accused and on each sibling; what may not be loaded is left alone, and the accused owes the rest."""
    of_cards(idle, tmp_path)
    accused, barred = CARDS[0], CARDS[1]
    asked = []

    def series(plan: schedule.Plan, purpose: str) -> list[Run]:
        asked.append(plan.device.uuid)
        return [] if plan.steps[0].confirms else [made(1, device=accused.uuid, wrong=True, at=NOW - 60)]

    monkeypatch.setattr(idle, "_run_series", series)
    idle.may = lambda device, purpose: purpose == budget.DOUBT and device not in (accused, barred)
    step = schedule.Step(entry=idle.entries["p"], level="quick", seed=1)
    (hit,) = idle.carry_out(schedule.Plan(device=accused, instruction_set="", steps=(step,)))
    assert asked == [accused.uuid, *(d.uuid for d in CARDS[2:])]
    idle.take(hit)
    assert len(idle.experiments.owed(accused.uuid)) == 3


def test_what_was_faulty_stays_so_when_the_inventory_fails(idle):
    """A restart with a worker that cannot start must not make an alarm disappear."""
    idle.store.see_device(CPU, NOW)
    for n in (1, 2, 3):
        idle.store.add_run(made(n, wrong=True, at=NOW - 600 + 100 * n))
    again = Engine(idle.config, idle.store, clock=lambda: NOW)
    again.recall()
    assert again.in_place == {CPU.uuid}
    assert again.verdict(CPU.uuid).state is State.FAULTY


def test_the_processor_is_not_gone_where_no_worker_starts(tmp_path):
    """What else is listed, a server here, does not make it so."""
    config = settings(tmp_path, "passes")
    served = EndpointsConfig(each={"main": EndpointConfig(url="http://127.0.0.1:1/v1")})
    engine = start(dataclasses.replace(config, endpoints=served))
    cpu = the_cpu(engine)
    engine.config = dataclasses.replace(engine.config, worker=WorkerConfig(python=str(tmp_path / "nothing")))
    engine.discover()
    assert cpu.uuid in engine.in_place
    assert "device-vanished" not in {f.rule for f in engine.verdict(cpu.uuid).findings}


def test_the_last_included_device_can_be_gone(idle):
    """Nothing that is included is there any more, and that was found out: it does not stay in place."""
    gpu = Device(uuid="GPU-1", backend="cuda", index=0, model="H100")
    idle.config = dataclasses.replace(idle.config, devices=DevicesConfig(include=("cuda",)))
    for devices in ((CPU, gpu), (CPU,)):
        idle.discovery._take_inventory(Found(devices=devices, uncertain=frozenset()), idle.in_place)
    assert (idle.in_place, idle.present) == (set(), set())
    assert "device-vanished" in {f.rule for f in idle.verdict(gpu.uuid).findings}
    idle.discovery._take_inventory(Found(devices=(), uncertain=frozenset()), ())
    assert gpu.uuid in idle.devices


def test_a_configuration_of_fewer_devices_changes_nothing_for_the_others(tmp_path):
    """A check may have one of its own: what it leaves out is not gone for the daemon, nor back at its next look."""
    config = settings(tmp_path, "passes")
    served = EndpointsConfig(each={"main": EndpointConfig(url="http://127.0.0.1:1/v1")})
    engine = start(dataclasses.replace(config, endpoints=served))
    before = [(r.device.uuid, r.present) for r in engine.store.devices()]
    check = start(dataclasses.replace(config, devices=DevicesConfig(include=("cuda",))))
    assert (check.devices, check.in_place) == ({}, set())
    assert [(r.device.uuid, r.present) for r in engine.store.devices()] == before
    assert gather(engine.store, check.config).devices == ()
    engine.discover()
    assert engine.in_place == {uuid for uuid, _ in before}
    assert not engine.watch.history.of(the_cpu(engine))


def test_a_vendor_that_cannot_be_asked_makes_the_host_unknown(tmp_path):
    """Something of NVIDIA's is set up wrongly here: the host is not healthy by silence, and the reason is told."""
    wrong = ProbeSettings(settings={"sysf": "/x"})
    engine = start(settings(tmp_path, "passes", nvidia_telemetry=wrong))
    carry_out(engine, "passes")
    found = verdict(engine)
    assert found.state is State.UNKNOWN
    (finding,) = [f for f in found.findings if f.rule == "devices-unlisted"]
    assert "sysf" in finding.message


# --- Days ------------------------------------------------------------------------------------------------------------


def timed(number: int, at: float, seconds: float) -> Run:
    reading = Reading(name="kernel_seconds", value=seconds, unit="seconds", labels={"kind": "gemm"})
    comparison = Comparison(case="a", shape="", seed=number, exactness=Exactness.UNIVERSAL, trials=1)
    return Run(
        id=f"run-{number:06d}",
        device=CPU.uuid,
        probe="recorded_kernels",
        probe_version=1,
        started=at,
        seconds=1.0,
        outcome=Outcome.COMPLETED,
        comparisons=(comparison,),
        readings=(reading,),
        stack={"torch": "2.13"},
    )


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_days_are_summed_up_once_and_a_device_that_got_slower_is_degraded(tmp_path, slower):
    """From the store alone, day after day, as the daemon does it; runs that were pruned since are not missed."""
    day = 86_400.0
    moment = [NOW - 40 * day]
    store = Store.open(tmp_path / "state", now=lambda: moment[0], keep=Retention(successes=14 * day))
    engine = Engine(Config(state_dir=tmp_path / "state"), store, clock=lambda: moment[0])
    store.see_device(CPU, moment[0])
    for number in range(40):
        for hour in range(4):
            moment[0] = NOW - (40 - number) * day + hour * 6 * 3600.0
            wobble = 1 + 0.01 * ((number * 7 + hour * 3) % 5 - 2) / 2
            store.add_run(timed(4 * number + hour, moment[0], 1e-3 * wobble * (slower if number >= 30 else 1)))
        engine.present = {CPU.uuid}
        engine.recall()
        while engine.days.sum_up():
            pass
        for _ in range(12):  # every other hour of the day: a prune follows the clock by two hours
            store.prune(moment[0])
    moment[0] = NOW + 60.0
    engine.recall()
    while engine.days.sum_up():
        pass
    assert not engine.days.sum_up()
    assert len(store.days(CPU.uuid)) >= 39
    assert len(store.runs(CPU.uuid)) < 4 * 20
    found = {f.rule: f.state for f in engine.decide()[CPU.uuid].findings if "slower" in f.rule}
    assert found == ({"slower-than-before": State.DEGRADED} if slower > 1 else {})
