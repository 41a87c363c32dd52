"""The budget in the daemon: what waits, what is forced, what is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.load import load
from canaryd.config.settings import BudgetConfig, Config, ScheduleConfig
from canaryd.daemon import daemon as daemon_daemon
from canaryd.engine.budget import DOUBT, FORCED, RETEST, ROUND, STARTING, STARTS
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.schedule import Plan
from canaryd.facts import Reading
from canaryd.judge.telemetry.signals import Poll
from canaryd.model import Outcome, Run, State
from canaryd.probe import ProbeSpec
from canaryd.report import status
from canaryd.store.locks import Busy
from canaryd.store.notes import BUDGET_NOTE
from canaryd.store.store import Store
from canaryd.worker.limits import SKIPPED
from tests.command import Daemon, canaryd, configure, eventually, running
from tests.engine.budgets import CPU, GIB, GPU, NOW, PROBE, Clock, reading, told

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
        made["readings"] = (Reading(name="speed_copy", value=1.0),)
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
    """It is forced alone, once each time that its evidence is too old; the other probes keep to the budget."""
    served.know("a", 1800)
    assert served.chosen() == (["b"], FORCED)
    served.know("b", 1800, outcome, detail=detail)
    served.know("b", OLD + 1, outcome, detail=detail)
    assert served.chosen() == ([], ROUND)
    assert served.waits() == "load"


def test_nothing_runs_on_an_accelerator_before_its_memory_is_known(served):
    """A worker would open a context, which takes half a GiB, before it finds that the server has left less."""
    served.said = dict.fromkeys(served.engine.devices, ())
    spec = ProbeSpec(name="t", summary="s", telemetry=True, numeric=False)
    served.engine.entries["t"] = Entry(spec=spec, file=ProbeFile(name="t", path=Path("/t.py"), source="builtin"))
    served._rounds.tick(CARD.uuid)
    assert served.ran == []
    words = {"id": "r", "device": CARD.uuid, "probe": "t", "probe_version": 1, "started": NOW, "seconds": 0.1}
    poll = Run(**words, outcome=Outcome.COMPLETED)
    for known in ({}, {"t": Poll(period=15.0, newest=None, completed=poll)}):  # that of the daemon before is old
        served.engine.watch.polls = lambda _, known=known: known
        served._rounds.tick(CARD.uuid)
        assert served.ran == []
    served.engine.watch.polls = lambda _: {"t": Poll(period=15.0, newest=poll, completed=None)}
    served._rounds.tick(CARD.uuid)
    assert served.ran == [(CARD.uuid, ("a", "b"), ROUND)]


def test_a_server_that_loads_its_model_meets_no_test(served):
    """Not even the first round of a device; but not for longer than evidence may age, and not for ever."""
    clock = served.engine.account._clock = Clock()
    new = (reading("compute_process_age_seconds", 30.0),)
    served.said = dict.fromkeys(served.engine.devices, new)
    assert (served.chosen(), served.waits()) == (([], ROUND), "starting")
    assert "a process began 30 s ago" in served.engine.account.withheld(CARD.uuid).wait.text
    assert not served._rounds.may(CARD, DOUBT)
    clock.now = STARTS
    assert served.chosen() == (["a", "b"], ROUND)
    served.said[CARD.uuid] = (reading("compute_process_age_seconds", STARTING),)
    assert served.chosen() == (["a", "b"], ROUND)
    served.said[CARD.uuid] = new
    served.engine.config = replace(served.engine.config, judge=JudgePolicy(stale_after=900.0))
    chosen = []
    for _ in range(2):
        chosen.append(served._rounds.within_budget(CARD, ["a"], {"a": 300.0})[0])
        clock.now += 900.0 / 4
    assert chosen == [[], ["a"]]


@pytest.mark.parametrize("hindered", ["busy", "released"])
@pytest.mark.parametrize("trigger", ["", "Xid 31"])
def test_what_could_not_be_run_is_due_as_before(served, hindered, trigger):
    """Another process holds the device, or it is released in the middle of a round: no test waits for its next turn."""
    served.said = dict.fromkeys(served.engine.devices, ())
    carried_out = served.engine.carry_out

    def hinder(plan, **_):
        if hindered == "busy":
            raise Busy("a check holds it")
        served.engine.workers.released = "released until noon"
        return []

    served.engine.carry_out = hinder
    if trigger:
        served.engine.watch.history.triggers[CARD.uuid] = trigger
        served._rounds._last = {(CARD.uuid, n): time.time() for n in PERIODS}
    served._rounds.tick(CARD.uuid)
    assert served.ran == []
    served.engine.carry_out, served.engine.workers.released = carried_out, ""
    served._rounds.tick(CARD.uuid)
    assert served.ran == [(CARD.uuid, ("a", "b"), DOUBT if trigger else ROUND)]
    served._rounds.tick(CARD.uuid)
    assert len(served.ran) == 1


def test_extra_tests_get_rarer_while_events_go_on(served, monkeypatch):
    """A program that crashes every minute keeps no device busy: the pause doubles, from ten minutes on."""
    served.said, minute = dict.fromkeys(served.engine.devices, ()), 0
    served._rounds._last = {(CARD.uuid, n): time.time() for n in PERIODS}
    clock = SimpleNamespace(time=time.time, monotonic=lambda: 1e6 + 60.0 * minute)
    monkeypatch.setattr("canaryd.daemon.rounds.time", clock)
    tested = []
    for minute in range(240):
        served.engine.watch.history.triggers[CARD.uuid] = "Xid 31"
        served._rounds.tick(CARD.uuid)
        tested += [minute] * (len(served.ran) - len(tested))
    assert tested == [0, 10, 30, 70, 150]


def test_a_restart_resets_no_share(served):
    """The last hour's rounds count, without their pauses; older ones, and runs that are no rounds, do not."""
    aside = {"confirms": "1"}, {"intensity": "idle"}
    for age, fields in ((1800.0, {}), (3700.0, {}), *((600.0, fields) for fields in aside)):
        served.know("a", age, **fields)
    served._rounds.recall_spent(CARD.uuid)
    assert served.engine.account.spent(CARD.uuid) == 32.0 / 4.0


def test_a_restart_resets_no_share_of_a_card_that_another_runtime_reaches(served):
    """What all runtimes of a card take is one share."""
    view = replace(CARD, uuid="onnx-of-GPU", backend="onnx-cuda", card=CARD.uuid)
    served.engine.devices[view.uuid] = view
    served.know("a", 1800.0, device=view.uuid)
    served._rounds.recall_spent(view.uuid)
    assert served.engine.account.spent(view.physical) == 32.0 / 4.0


def test_a_round_that_failed_has_had_its_turn(served):
    """A mistake of canaryd in a round: the log has it once a period, and not at every tick."""
    served.said, tries = dict.fromkeys(served.engine.devices, ()), []

    def fail(plan, **_):
        tries.append(plan)
        raise OverflowError("a number too large")

    served.engine.carry_out = fail
    with pytest.raises(OverflowError):
        served._rounds.tick(CARD.uuid)
    served._rounds.tick(CARD.uuid)
    assert len(tries) == 1


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
    config = prepared(tmp_path, "passes", budget={"quiet_hours": ["00:00-24:00"]}, judge={"stale_after": "27s"})
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
