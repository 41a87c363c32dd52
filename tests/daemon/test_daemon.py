"""`canaryd run` as it is deployed: a real process with real workers, scraped, signalled, stopped and killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import platform
import random
import re
import signal
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from canaryd.config.load import load
from canaryd.daemon import daemon as daemon_module
from canaryd.daemon.rounds import log_run
from canaryd.engine.engine import Progress
from canaryd.metrics.families import FAMILIES
from canaryd.model import Cause, Device, State, Verdict
from canaryd.store.store import Store
from canaryd.supervisor.environment import STRICT
from tests.command import (
    PROBES,
    ROOT,
    RUN_ID,
    Daemon,
    canaryd,
    catalogue,
    configure,
    eventually,
    intervals,
    running,
    soon,
)
from tests.judge import made
from tests.judge.recordings.made import recording

STOP = 5.0
"""Seconds within which SIGTERM ends a daemon, whatever its workers do."""


def begun(log: Path) -> list[int]:
    """Return the process ids of the probe `records`, one for each time it has begun."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("begin ")]


def uuid_of(daemon: Daemon) -> str:
    """Return the uuid of the processor, as the metrics know it."""
    page = daemon.get("/metrics")[1]
    return next(part for part in page.split('"') if part.startswith("CPU-"))


# --- Serving ---------------------------------------------------------------------------------------------------------


def test_it_serves_before_the_first_round_ends(tmp_path, state):
    """Metrics at once, and no health before there is evidence; then, with the evidence, both."""
    log, enough = tmp_path / "log", tmp_path / "enough"
    each = {"records": {"settings": {"log": str(log), "until": str(enough)}}}
    with running(Daemon(configure(tmp_path, "records", each=each), state)) as daemon:
        assert daemon.value("canaryd_build_info") == 1
        given = set(re.findall(r"^# TYPE (\w+)", daemon.get("/metrics")[1], re.MULTILINE))
        assert {name for name, of in FAMILIES.items() if not of.labels} - given == {"canaryd_devices_expected"}
        assert daemon.get("/readyz")[0] == 503
        eventually(lambda: begun(log))
        assert intervals(log) == []
        status, reasons = daemon.get("/healthz")
        assert status == 503
        assert "records: no evidence yet" in eventually(lambda: daemon.get("/healthz")[1])
        assert reasons
        eventually(lambda: daemon.value("canaryd_device_state", state="unknown") == 1)
        enough.touch()
        eventually(lambda: daemon.get("/healthz") == (200, "ok\n"))
        assert daemon.get("/readyz") == (200, "ready\n")
        eventually(lambda: daemon.value("canaryd_device_state", state="healthy") == 1)
        assert daemon.get("/nowhere")[0] == 404


def test_a_restart_is_ready_when_it_has_tested_itself(tmp_path, state):
    """A roll-out waits for what the new release computed; the runs of the release before prove nothing about it."""
    log, enough = tmp_path / "log", tmp_path / "enough"
    config = configure(tmp_path, "records", each={"records": {"settings": {"log": str(log), "until": str(enough)}}})
    enough.touch()
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert daemon.end()[0] == 0
    before = len(begun(log))
    enough.unlink()
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: len(begun(log)) > before)
        eventually(lambda: daemon.value("canaryd_device_state", state="healthy") == 1)
        assert daemon.get("/readyz") == (503, "waiting for a first run on every device\n")
        enough.touch()
        eventually(lambda: daemon.get("/readyz")[0] == 200)


@pytest.mark.parametrize(
    ("probe", "outcome"), [("skips", "skipped"), ("skips_all", "completed"), ("raises", "errored")]
)
def test_a_release_that_tests_nothing_is_not_ready(tmp_path, state, probe, outcome):
    """Runs that skip all they have, or fail before they reach the device, cannot follow a release that tested it."""
    config = configure(tmp_path, "passes")

    def runs():
        return daemon.value("canaryd_probe_runs_total", probe="passes", outcome=outcome) or 0

    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        before = runs()
        assert daemon.end()[0] == 0
    released = (PROBES / f"{probe}.py").read_text().replace(f'name="{probe}"', 'name="passes"')
    (tmp_path / "probes.d/passes.py").write_text(released)
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: runs() > before)
        assert daemon.get("/readyz") == (503, "waiting for a first run on every device\n")


def test_a_release_that_has_to_wait_for_the_server_is_ready(tmp_path, state):
    """A server holds the device in exclusive mode: nothing can be tested, and a roll-out goes on."""
    config = configure(tmp_path, "passes")
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert daemon.end()[0] == 0
    released = (PROBES / "skips.py").read_text().replace('name="skips"', 'name="passes"')
    withheld = "from canaryd.model import Reason\n\nSkip.reason = Reason.BUDGET\n"
    (tmp_path / "probes.d/passes.py").write_text(released.replace("\nSPEC", f"{withheld}\nSPEC", 1))
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert daemon.value("canaryd_probe_runs_total", probe="passes", outcome="skipped") >= 1


def test_a_run_that_looked_at_nothing_is_no_health(tmp_path, state):
    """It came to its end, and is no evidence."""
    with running(Daemon(configure(tmp_path, "skips_all"), state)) as daemon:
        eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="skips_all", outcome="completed"))
        assert daemon.get("/healthz") == (503, "cpu:0 skips_all: no evidence yet\n")


def test_a_daemon_without_a_test_is_no_health(tmp_path, state):
    """Everything is disabled: there is no old evidence, and none that is fresh."""
    with running(Daemon(configure(tmp_path), state)) as daemon:
        eventually(lambda: daemon.value("canaryd_device_state", state="unknown") == 1)
        assert daemon.get("/healthz") == (503, "cpu:0: none of the chosen probes tests it\n")
        assert daemon.get("/readyz")[0] == 503


def test_stale_evidence_is_no_health(tmp_path, state):
    """When the device cannot be had for longer than the limit: 503 with the age, and 200 again afterwards."""
    config = configure(tmp_path, "records", judge={"stale_after": "3s"})
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/healthz")[0] == 200)
        with Store.open(state) as store, store.lock(uuid_of(daemon), timeout=20):
            eventually(lambda: daemon.get("/healthz")[0] == 503)
            assert "cpu:0 records: newest evidence is " in daemon.get("/healthz")[1]
            assert daemon.get("/readyz")[0] == 200
            eventually(lambda: daemon.value("canaryd_device_state", state="unknown") == 1)
        eventually(lambda: daemon.get("/healthz")[0] == 200)


def test_a_first_start_is_one_line_for_all_tests(tmp_path, state):
    """What has not run yet is no warning each: on a node of eight GPUs that would be a screen."""
    each = {"records": {"settings": {"log": str(tmp_path / "log"), "seconds": 600}}}
    with running(Daemon(configure(tmp_path, "passes", "records", each=each), state)) as daemon:
        eventually(lambda: begun(tmp_path / "log"))
        assert daemon.end()[0] == 0
    (line,) = (line for line in daemon.lines if "no-evidence" in line)
    assert line.endswith("cpu:0 no-evidence: no run has completed yet of passes, records")


# --- Starting and stopping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_stops_at_once_with_a_worker_that_will_not(tmp_path, state, number):
    """Within five seconds, status 0, no process left, no run stored that canaryd itself cut short."""
    log = tmp_path / "log"
    each = {"records": {"settings": {"log": str(log), "seconds": 600, "stubborn": True}}}
    with running(Daemon(configure(tmp_path, "records", each=each), state)) as daemon:
        eventually(lambda: begun(log))
        code, seconds = daemon.end(number)
        assert (code, daemon.others()) == (0, [])
        assert seconds < soon(STOP)
    assert not any("Traceback" in line for line in daemon.lines)
    with Store.open(state) as store:
        assert store.runs() == []


@pytest.mark.parametrize("held", [60.0, 0.5])
def test_it_stops_at_once_while_another_process_holds_the_database(tmp_path, state, held):
    """Within five seconds, and a run that waited in memory is on disk where the disk is free again in time."""
    config = configure(tmp_path, "passes", each={"passes": {"period": "1s"}})
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        other = sqlite3.connect(state / "canaryd.db", isolation_level=None, check_same_thread=False, timeout=10)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            before = len(daemon.lines)
            eventually(lambda: any(" passes completed: " in line for line in daemon.lines[before:]))
            eventually(lambda: daemon.value("canaryd_store_problem") == 1)
            free = threading.Timer(held, lambda: other.execute("ROLLBACK"))
            free.start()
            code, seconds = daemon.end()
            free.cancel()
            free.join()
        assert code == 0
        assert seconds < soon(STOP)
    found = {RUN_ID.search(line)[0] for line in daemon.lines if " passes completed: " in line}
    with Store.open(state) as store:
        assert (found <= {run.id for run in store.runs()}) is (held < STOP)


def test_it_stops_at_once_while_it_looks_for_devices(tmp_path, state):
    """The first inventory may hang in a driver: that does not hold the stop either."""
    config = configure(tmp_path, "hangs_at_import")
    with running(Daemon(config, state)) as daemon:
        assert daemon.address
        eventually(daemon.others)
        time.sleep(0.5)
        code, seconds = daemon.end()
        assert (code, daemon.others()) == (0, [])
        assert seconds < soon(STOP)


@pytest.mark.parametrize("reloaded", [False, True])
def test_a_stop_while_it_looks_for_probes_changes_no_verdict(tmp_path, state, reloaded):
    """What was healthy stays so: what is not known yet says nothing of the device."""
    config = configure(tmp_path, "passes")
    assert canaryd("check", "--config", config, "--state-dir", state).code == 0
    if not reloaded:
        configure(tmp_path, "passes", "hangs_at_import")
    with running(Daemon(config, state)) as daemon:
        assert daemon.address
        if reloaded:
            eventually(lambda: daemon.get("/readyz")[0] == 200)
            catalogue(tmp_path / "probes.d", "hangs_at_import")
            daemon.send(signal.SIGHUP)
            daemon.line("configuration reloaded")
        eventually(daemon.others)
        time.sleep(0.5)
        assert daemon.end()[0] == 0
    with Store.open(state) as store:
        (verdict,) = store.verdicts().values()
    assert verdict.state is State.HEALTHY, verdict.findings


def test_what_it_has_not_judged_yet_does_not_look_healthy(tmp_path, state):
    """It serves before it has read what it knows: an alarm stands at once, what was healthy long ago is unknown."""
    config = configure(tmp_path, "hangs_at_import")
    now = time.time()
    with Store.open(state) as store:
        for index, (old, told) in enumerate(
            [(3600.0, State.HEALTHY), (60.0, State.HEALTHY), (3600.0, State.FAULTY), (3600.0, State.DEGRADED)]
        ):
            device = Device(uuid=f"GPU-{index}", backend="cuda", index=index, model="NVIDIA H100")
            store.see_device(device, now)
            made = {"cause": Cause.NONE, "findings": (), "decided": now - old, "since": now - 7200}
            store.set_verdict(Verdict(device=device.uuid, state=told, **made))
    with running(Daemon(config, state)) as daemon:
        families = text_string_to_metric_families(daemon.get("/metrics")[1])
        states = [s for family in families for s in family.samples if s.name == "canaryd_device_state" and s.value]
        assert {s.labels["device"]: s.labels["state"] for s in states if "GPU" in s.labels["device"]} == {
            "GPU-0": "unknown",
            "GPU-1": "healthy",
            "GPU-2": "faulty",
            "GPU-3": "unknown",
        }
        assert daemon.get("/healthz")[0] == daemon.get("/readyz")[0] == 503


def test_it_goes_on_after_a_restart(tmp_path, state):
    """Counters go on counting, and the state is known again from the record."""
    config = configure(tmp_path, "mismatches")
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.value("canaryd_device_state", state="faulty") == 1)
        eventually(lambda: daemon.value("canaryd_probe_mismatches_total", probe="mismatches") == 4)
        assert daemon.end()[0] == 0
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.value("canaryd_device_state", state="faulty") == 1)
        assert daemon.value("canaryd_probe_mismatches_total", probe="mismatches") >= 4


def test_a_stopped_worker_is_timed_out_and_recorded(tmp_path, state):
    """SIGSTOP, as a debugger or a frozen cgroup would: the deadline holds, and the daemon goes on."""
    log = tmp_path / "log"
    each = {"records": {"timeout": f"{soon(2):g}s", "period": "1h", "settings": {"log": str(log), "seconds": 600}}}
    with running(Daemon(configure(tmp_path, "records", "passes", each=each), state)) as daemon:
        (worker,) = eventually(lambda: begun(log))
        os.kill(worker, signal.SIGSTOP)
        eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="records", outcome="timed_out") == 1)
        assert " records timed_out: " in daemon.line("timed_out")
        eventually(lambda: worker not in daemon.others(), 5)
        eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="passes", outcome="completed"))


def test_a_broken_probe_does_not_silence_the_others(tmp_path, state):
    """A fingerprint that is no number, a crash, a file that cannot be imported: the page goes on changing."""
    each = {"records": {"settings": {"fingerprint": "not a number"}}, "second": {"settings": {"fingerprint": 2**60}}}
    config = configure(tmp_path, "records", "records:second", "crashes", "raises_at_import", "passes", each=each)
    with running(Daemon(config, state)) as daemon:
        for probe in ("records", "second", "passes"):
            eventually(lambda probe=probe: daemon.value("canaryd_probe_runs_total", probe=probe, outcome="completed"))
        eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="crashes", outcome="crashed"))
        assert daemon.value("canaryd_golden_fingerprint") is None
        daemon.line("raises_at_import.py: ImportError")


# --- Configuration while it runs -------------------------------------------------------------------------------------


def test_a_bad_file_is_refused_and_a_good_one_takes_effect(tmp_path, state):
    """SIGHUP: the metric shows a refused file, the daemon goes on with the old one, and the next good one counts."""
    config = configure(tmp_path, "passes")
    good = config.read_text()
    name = "canaryd_config_last_reload_successful"
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert daemon.value(name) == 1
        config.write_text("judge: {stale_after: soon}\n")
        daemon.send(signal.SIGHUP)
        eventually(lambda: daemon.value(name) == 0)
        daemon.line(f"{config}:1: judge.stale_after: ")
        daemon.line("the old one stays in force")
        assert daemon.value("canaryd_probe_runs_total", probe="passes", outcome="completed") >= 1
        config.write_text('state_dir: "\\U99999999"\n')
        daemon.send(signal.SIGHUP)
        daemon.line(f"{config}:1: cannot read this YAML: ")

        catalogue(tmp_path / "probes.d", "echoes")
        config.write_text(json.dumps(json.loads(good) | {"devices": {"expected": 5}}))
        daemon.send(signal.SIGHUP)
        eventually(lambda: daemon.value(name) == 1)
        eventually(lambda: daemon.value("canaryd_devices_expected") == 5)
        eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="echoes", outcome="completed"))
        # What the command line gave still wins: nothing has changed about these two.
        assert not any("takes effect at the next restart" in line for line in daemon.lines)
        assert daemon.end()[0] == 0


def test_a_reload_that_fails_in_any_way_keeps_the_old_configuration(tmp_path, state):
    """A mistake of canaryd while it reads the files is a traceback in its log and a bad configuration, not its end."""
    path = configure(tmp_path, "passes")
    config = load(path)
    with Store.open(state) as store:
        daemon = daemon_module.Daemon(config, path, store, overrides={"no_such_setting": 1})
        daemon._reload()
        assert not daemon._publisher.config_ok
        assert daemon.config is config


# --- Killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_killed_daemon_has_lost_no_run_that_it_logged(tmp_path, state, times):
    """SIGKILL at any moment, again and again: every run whose id was logged is stored, and counted once."""
    names = [f"passes:p{number}" for number in range(12)]
    config = configure(tmp_path, *names)
    logged: set[str] = set()
    for number in range(times):
        with running(Daemon(config, state)) as daemon:
            daemon.line("serves http://")
            if number % 2:
                daemon.line(" completed: ")
            time.sleep(random.uniform(0.0, 0.6))
            daemon.end(signal.SIGKILL)
            eventually(lambda daemon=daemon: daemon.others() == [], 10)
        logged |= {found[0] for line in daemon.lines if " completed: " in line and (found := RUN_ID.search(line))}
    with Store.open(state) as store:
        assert store.problems == []
        lost = [run for run in logged if store.run(run) is None]
        counted = sum(value for (name, _), value in store.counters().items() if name == "probe_runs")
        assert (lost, counted) == ([], len(store.runs()))
    assert len(logged) >= times


def test_a_second_daemon_shares_the_device(tmp_path, state):
    """On another port and the same state directory: they take turns, and nobody crashes."""
    log = tmp_path / "log"
    each = {"records": {"settings": {"log": str(log), "seconds": 0.5}}}
    config = configure(tmp_path, "records", each=each)
    with running(Daemon(config, state)) as first, running(Daemon(config, state)) as second:
        eventually(lambda: len(begun(log)) >= 3)
        assert (first.end()[0], second.end()[0]) == (0, 0)
        lines = first.lines + second.lines
    times = intervals(log)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert not any("Traceback" in line or " ERROR " in line for line in lines)


def test_an_abandoned_worker_does_not_outlive_its_daemon(tmp_path, state):
    """SIGKILL for the daemon: its worker sees the end of its requests and goes, with its children."""
    log = tmp_path / "log"
    each = {"records": {"settings": {"log": str(log), "seconds": 600, "stubborn": True}}}
    with running(Daemon(configure(tmp_path, "records", each=each), state)) as daemon:
        eventually(lambda: begun(log))
        daemon.end(signal.SIGKILL)
        eventually(lambda: daemon.others() == [], 10)


def test_no_health_without_a_device(tmp_path, state):
    """Fresh evidence of the last life is not enough when the devices cannot even be listed."""
    config = configure(tmp_path, "passes")
    assert canaryd("check", "--config", config, "--state-dir", state).code == 0
    config = configure(tmp_path, "passes", worker={"python": "/nonexistent/python"})
    with running(Daemon(config, state)) as daemon:
        daemon.line("worker.python (/nonexistent/python) cannot be started")
        eventually(lambda: "/nonexistent/python" in daemon.get("/healthz")[1])
        assert daemon.get("/healthz")[0] == 503
        assert daemon.get("/readyz")[0] == 503


HEAP = 64 << 20
"""Bytes of address space that glibc reserves for a further heap, aligned to as many (malloc/arena.c, HEAP_MAX_SIZE)."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads heaps of their own")
def test_threads_share_one_heap(tmp_path, state, monkeypatch):
    """Heaps of single threads never shrink: with the unit's environment there are none. Workers have their own."""
    unit = (ROOT / "systemd/canaryd.service").read_text()
    given = dict(re.findall(r"^Environment=(MALLOC_\w+)=(.+)$", unit, re.MULTILINE))
    assert given == {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    config = configure(tmp_path, "records", each={"records": {"settings": {"log": str(log), "seconds": 5.0}}})
    with running(Daemon(config, state)) as daemon:
        (worker,) = eventually(lambda: begun(log))
        environment = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        own = {f"{name}={value}".encode() for name, value in STRICT.items() if name.startswith("MALLOC_")}
        assert {line for line in environment if line.startswith(b"MALLOC_")} == own
        assert b"MALLOC_ARENA_MAX=1" in Path(f"/proc/{daemon.popen.pid}/environ").read_bytes()
        eventually(lambda: daemon.get("/readyz")[0] in (200, 503))
        lines = Path(f"/proc/{daemon.popen.pid}/maps").read_text().splitlines()
        parts = [(*(int(end, 16) for end in line.split()[0].split("-")), line.split()[1:]) for line in lines]
        further = [
            begin
            for (begin, middle, used), (again, end, kept) in itertools.pairwise(parts)
            if begin % HEAP == 0 and (middle, end - begin) == (again, HEAP) and (used[0], kept[0]) == ("rw-p", "---p")
        ]
        assert not further


# --- Several looks at one daemon; last, so that it does not run beside all other tests --------------------------------


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A daemon on a sound device that several tests look at: (daemon, configuration, state directory, log)."""
    directory = tmp_path_factory.mktemp("watched")
    log = directory / "log"
    each = {"records": {"settings": {"log": str(log), "seconds": 0.2, "fingerprint": 77}}}
    config = configure(directory, "records", "passes", "skips", each=each)
    with running(Daemon(config, directory / "state")) as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        yield daemon, config, directory / "state", log


def test_a_check_beside_it_is_counted_and_never_meets_it(watched):
    """They share the record, and the device's lock."""
    daemon, config, state, log = watched
    answer = canaryd("check", "--for", "6s", "--json", "--config", config, "--state-dir", state)
    runs = [run["id"] for run in answer.document["devices"][0]["runs"] if run["probe"] == "records"]
    assert len(runs) > 1

    def counted() -> bool:
        with Store.open(state) as store:
            stored = len(store.runs(probe="records"))
        total = daemon.value("canaryd_probe_runs_total", probe="records", outcome="completed")
        # One may have ended since the page was made; the daemon has had runs of its own.
        return total is not None and total >= stored - 1 and total > len(runs)

    eventually(counted)
    times = intervals(log)
    assert len(times) > len(runs)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))


def test_a_drill_beside_it_shows_as_a_drill(watched):
    """Its counters and its state arrive in the metrics; the device stays what it was."""
    daemon, config, state, _ = watched
    before = daemon.value("canaryd_probe_mismatches_total", probe="records")
    answer = canaryd("drill", "--probe", "records", "--config", config, "--state-dir", state)
    assert answer.code == 2
    eventually(lambda: daemon.value("canaryd_drill_device_state", state="faulty") == 1)
    eventually(lambda: daemon.value("canaryd_drill_runs_total", probe="records") == 4)
    eventually(lambda: daemon.value("canaryd_drill_mismatches_total", probe="records") == 4)
    assert daemon.value("canaryd_probe_mismatches_total", probe="records") == before == 0
    assert daemon.value("canaryd_device_state", state="faulty") == 0
    assert daemon.value("canaryd_device_state", state="suspect") == 0


def test_a_skipped_probe_is_counted_and_keeps_the_device_unknown(watched):
    """No evidence is not health, and the reason is a finding, not a number."""
    daemon = watched[0]
    eventually(lambda: daemon.value("canaryd_probe_runs_total", probe="skips", outcome="skipped"))
    assert daemon.value("canaryd_device_state", state="healthy") == 0
    assert daemon.get("/healthz")[0] == 503
    assert "cpu:0 skips: no evidence yet" in daemon.get("/healthz")[1]


def test_the_log_counts_what_a_run_gave(caplog):
    """An endpoint's run has recordings alone, and is no run of 0 results."""
    caplog.set_level(logging.INFO, logger="canaryd")
    about = {"device": made.device(), "instruction_set": "default", "probe": "p", "fraction": 1.0, "text": ""}
    for gave in ({"recordings": (recording(), recording())}, {"comparisons": (made.right(trials=3),)}, {}):
        log_run(Progress(**about, done=made.run(60.0, **gave)))
    assert [line.split(": ")[1] for line in caplog.messages] == ["2 recordings", "3 results", "0 results"]
