"""What breaks around a running daemon: disks, rights, memory, processes, descriptors, signals, clocks, clients.

Real daemons and real failures; docs/failures.md says what fails and what canaryd does. Each test asks
the same: does the daemon go on, does it say so, does it come back by itself, is each run stored and counted once?
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from pathlib import Path

import pytest

from canaryd.config.load import load
from canaryd.config.settings import Config
from canaryd.daemon import watchdog
from canaryd.daemon.daemon import Daemon as RealDaemon
from canaryd.model import Outcome
from canaryd.store.locks import Busy
from canaryd.store.notes import DAEMON_LOCK
from canaryd.store.store import Store
from canaryd.web.server import Request
from tests.command import (
    MARK,
    ROOT,
    Daemon,
    canaryd,
    catalogue,
    configure,
    environment,
    eventually,
    exchange,
    in_turn,
    running,
    soon,
)
from tests.daemon.test_telemetry import Site
from tests.programs import needed

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="NOT TESTED: these failures are made with Linux's means"
)

QUICK = {"passes": {"period": "2s"}}
"""The daemon asks every five seconds what is due: one run each time."""
STOP = 5.0
"""Seconds within which SIGTERM ends a daemon."""
SCRAPERS, SLOW = 100, 50
STRANDED = 65_534
"""The user "nobody": whose the state directory is when it is not ours."""
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


class Under(Daemon):
    """A daemon that another program starts: `unshare`, `setpriv`, a shell."""

    def __init__(self, prefix, config, state):
        self.mark, self.lines = uuid.uuid4().hex, []
        words = ["run", "--config", config, "--state-dir", state, "--listen", "127.0.0.1:0"]
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-m", "canaryd", *map(str, words)],
            cwd=ROOT,
            env=environment(**{MARK: self.mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()


def ready(daemon):
    """Wait until a daemon has tested its device."""
    eventually(lambda: daemon.get("/readyz")[0] == 200)


def runs(daemon, outcome="completed", probe="passes"):
    return daemon.value("canaryd_probe_runs_total", probe=probe, outcome=outcome) or 0


def is_in(daemon, state):
    return daemon.value("canaryd_device_state", state=state) == 1


def nothing_twice(state):
    """Hold the counters of a store against its runs, and return these."""
    with Store.open(state) as store:
        assert store.problems == []
        found = store.runs()
        counted = sum(value for (name, _), value in store.counters().items() if name == "probe_runs")
        assert counted == len(found) == len({r.id for r in found})
        return found


@contextlib.contextmanager
def mounted(where, *options):
    """Mount something for a while."""
    where.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(where)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"NOT TESTED: a filesystem of its own needs root and CAP_SYS_ADMIN: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(path):
    """Write until there is not a byte left."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@contextlib.contextmanager
def cgroup(controller, limits):
    """Make a control group with a limit: (file in version 2, file in version 1) → value."""
    problems = []
    for base, (name, value) in zip((Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup") / controller), limits, strict=True):
        group = base / f"canaryd-failures-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").read_text()
            (group / name).write_text(value)
        except OSError as error:
            problems.append(str(error))
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            eventually(lambda group=group: not (group / "cgroup.procs").read_text().strip(), 20)
            eventually(lambda group=group: group.rmdir() is None, 20)
        return
    pytest.skip(f"NOT TESTED: no control group of {controller} can be made here: {'; '.join(problems)}")


# --- Disks and rights ------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_by_a_command_that_would_write(tmp_path):
    """Not taken for a record without devices."""
    disk = tmp_path / "disk"
    with mounted(disk, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        common = ("--config", configure(tmp_path, "passes"), "--state-dir", disk / "state")
        assert canaryd("check", *common).code == 0
        fill(disk / "filler")
        answer = canaryd("ack", "cpu:0", "--reason", "seen", *common)
        assert (answer.code, "its disk is full (" in answer.err) == (3, True), answer
        assert "sudo" not in answer.err, "it gives no room"


@pytest.mark.slow
def test_a_full_disk_costs_nothing_but_durability(tmp_path):
    """A file system without a free byte under database, log and locks; then room again, and all of it is on disk."""
    disk = tmp_path / "disk"
    config, state = configure(tmp_path, "passes", each=QUICK), disk / "state"
    with mounted(disk, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        with running(Daemon(config, state)) as daemon:
            ready(daemon)
            fill(disk / "filler")
            before = runs(daemon)
            eventually(lambda: runs(daemon) >= before + 2)
            eventually(lambda: daemon.value("canaryd_store_problem") == 1)
            daemon.line("nothing can be stored, what is found waits in memory: ")
            assert is_in(daemon, "healthy")
            assert daemon.get("/healthz") == (200, "ok\n")
            assert canaryd("status", "--config", config, "--state-dir", state).code in (0, 3), "what is stored, by age"
            (disk / "filler").unlink()
            eventually(lambda: daemon.value("canaryd_store_problem") == 0)
            daemon.line("the store works again")
            assert daemon.end()[0] == 0
            logged = sum(" passes completed: " in line for line in daemon.lines)
        assert len(nothing_twice(state)) == logged
        fill(disk / "filler")
        with running(Daemon(config, state)) as daemon:  # started on a full disk
            eventually(lambda: daemon.value("canaryd_store_problem") == 1)
            eventually(lambda: runs(daemon) >= logged + 1)
            (disk / "filler").unlink()
            eventually(lambda: daemon.value("canaryd_store_problem") == 0)
            assert daemon.end()[0] == 0
            logged += sum(" passes completed: " in line for line in daemon.lines)
        assert len(nothing_twice(state)) == logged


def test_a_full_disk_costs_no_stop(tmp_path):
    """Stopped while nothing can be stored: status 0, and what was stored before is whole."""
    disk = tmp_path / "disk"
    config, state = configure(tmp_path, "passes", each=QUICK), disk / "state"
    with mounted(disk, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        with running(Daemon(config, state)) as daemon:
            ready(daemon)
            fill(disk / "filler")
            eventually(lambda: daemon.value("canaryd_store_problem") == 1)
            code, seconds = daemon.end()
            assert code == 0
            assert seconds < soon(STOP)
        (disk / "filler").unlink()
        assert len(nothing_twice(state)) >= 1


def test_a_disk_that_failed_still_tells_what_was_faulty(tmp_path):
    """An ext4 with an error refuses every write, yet says that it may be written: a restart there forgets nothing.

    That is what errors=remount-ro makes of a failing disk.
    """
    needed("mkfs.ext4", untested="this failure was not made")
    needed("losetup", untested="this failure was not made")
    image, disk = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    state = disk / "state"
    with mounted(disk, "-o", "loop,errors=remount-ro", str(image)):
        used = subprocess.run(["losetup", "-nO", "NAME", "-j", str(image)], capture_output=True, text=True, check=True)
        trigger = Path("/sys/fs/ext4") / Path(used.stdout.strip()).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip(f"NOT TESTED: this kernel has no {trigger}")
        with running(Daemon(configure(tmp_path, "mismatches"), state)) as daemon:
            eventually(lambda: is_in(daemon, "faulty"))
            trigger.write_text("canaryd's test")
            assert daemon.end(signal.SIGKILL)[0] == -signal.SIGKILL
        with pytest.raises(OSError, match="Read-only file system"):
            (disk / "file").touch()
        with Store.open(state) as store:
            assert store.changes() == store.changes()  # although it tries to write for each look
        with running(Daemon(configure(tmp_path, "passes", each=QUICK), state)) as daemon:
            eventually(lambda: runs(daemon) >= 2)
            eventually(lambda: is_in(daemon, "faulty"))
            assert daemon.value("canaryd_store_problem") == 1
            daemon.line("nothing can be stored, what is found waits in memory: ")
        assert "FAULTY" in canaryd("status", "--config", tmp_path / "canaryd.yaml", "--state-dir", state).out


def test_a_directory_of_somebody_else_is_said_and_nothing_is_lost_when_it_is_given_back(tmp_path, state):
    """Root without its capabilities is an ordinary user to the file system."""
    needed("setpriv", untested="this failure was not made")
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can give a directory away")
    state.mkdir()
    os.chown(state, STRANDED, STRANDED)
    powerless = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    with running(Under(powerless, configure(tmp_path, "passes", each=QUICK), state)) as daemon:
        eventually(lambda: daemon.value("canaryd_store_problem") == 1)
        eventually(lambda: is_in(daemon, "healthy"))
        assert daemon.get("/readyz")[0] == 503
        assert daemon.get("/healthz") == (200, "ok\n")
        eventually(lambda: runs(daemon) >= 2)
        assert list(state.iterdir()) == []
        os.chown(state, 0, 0)
        eventually(lambda: daemon.value("canaryd_store_problem") == 0)
        assert daemon.end()[0] == 0
        logged = sum(" passes completed: " in line for line in daemon.lines)
    assert len(nothing_twice(state)) == logged


def test_a_database_of_somebody_else_is_no_health(tmp_path, state):
    """A check of another user left it: what stands in it says nothing of a daemon that runs and cannot store."""
    needed("setpriv", untested="this failure was not made")
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can give files away")
    config = configure(tmp_path, "passes", each=QUICK)
    shown = ("--config", config, "--state-dir", state)
    assert canaryd("check", *shown).code == 0
    for path in state.rglob("*"):
        os.chown(path, STRANDED, STRANDED)
    assert canaryd("status", *shown).code == 0
    powerless = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    with running(Under(powerless, config, state)) as daemon:
        eventually(lambda: daemon.value("canaryd_store_problem") == 1)
        status, text = daemon.get("/readyz")
        assert (status, text.startswith("cannot store: ")) == (503, True)
        answer = canaryd("status", "--json", *shown)
        assert (answer.code, answer.document["state"]) == (3, "unknown")
        assert answer.document["devices"][0]["findings"][0]["rule"] == "unstored"
        document = canaryd("gate", "--json", *shown).document
        assert (document["decision"], document["devices"][0]["state"]) == ("unknown", "unknown")
        for path in state.rglob("*"):
            os.chown(path, 0, 0)
        eventually(lambda: daemon.value("canaryd_store_problem") == 0)
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        eventually(lambda: canaryd("status", *shown).code == 0)


def begun_anew(daemon, state):
    """Wait until a daemon has devices and locks in a fresh record, knows of its loss, and calls nothing healthy."""
    daemon.line("is another database: taking its locks and looking for devices again")
    eventually(lambda: is_in(daemon, "unknown"))
    with Store.open(state) as store:
        assert store.lost is not None
        eventually(store.devices)
        with pytest.raises(Busy), store.lock(DAEMON_LOCK):
            pass


@pytest.mark.parametrize(
    "whole", [pytest.param(True, id="directory", marks=pytest.mark.slow), pytest.param(False, id="database")]
)
def test_a_record_that_is_removed_under_a_daemon_is_made_again_and_said(tmp_path, state, whole):
    """Devices, locks and counters are there again, and the device is unknown: what was found before is not known.

    A directory that goes is seen by test_a_state_directory_that_comes_back_late_is_begun_anew too.
    """
    config = configure(tmp_path, "passes", each=QUICK)
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        eventually(lambda: is_in(daemon, "healthy"))
        if whole:
            shutil.rmtree(state)
        else:
            for path in sorted(state.glob("canaryd.db*"), reverse=True):  # last the one whose loss is noticed
                path.unlink()
        daemon.line("was removed while it was in use; started a new, empty database")
        begun_anew(daemon, state)
        assert "history-lost" in daemon.line("history-lost")

        def seen():
            document = canaryd("status", "--json", "--config", config, "--state-dir", state).document
            return document["daemon_running"] and [d["state"] for d in document["devices"]] == ["unknown"]

        eventually(seen)
        assert daemon.end()[0] == 0


def remove(state, *patterns):
    """Remove files of a state directory that nothing uses."""
    for path in [path for pattern in patterns for path in state.glob(pattern)]:
        path.unlink()


def rules(answer):
    """Return the rules of a report's findings that are unknown."""
    return {f["rule"] for d in answer.document["devices"] for f in d["findings"] if f["severity"] == "unknown"}


def test_a_record_that_is_removed_while_nothing_runs_is_history_lost(tmp_path, state):
    """A faulty device does not become healthy, neither to those who read nor to those who begin a new record."""
    config = configure(tmp_path, "mismatches", each={"mismatches": {"period": "1h"}}, enforcement="act")
    common = ("--config", config, "--state-dir", state)
    assert canaryd("check", *common).code == 2
    remove(state, "canaryd.db*")
    shutil.copy(catalogue(tmp_path / "other", "passes:mismatches") / "mismatches.py", tmp_path / "probes.d")
    told, gate = in_turn(("status", *common), ("gate", *common))
    assert (told.code, gate.code) == (3, 3)
    assert told.err.startswith(f"canaryd: cannot read {state}/canaryd.db: it is missing, although canaryd ran here")
    assert f"{state}/canaryd.db: it is missing, although canaryd ran here before" in gate.out
    assert not list(state.glob("canaryd.db")), "to read begins nothing"
    answer = canaryd("check", "--json", *common)
    assert (answer.code, rules(answer)) == (3, {"history-lost"})
    assert "is missing, although canaryd ran here before; started a new, empty database" in answer.err
    commands = (("gate",), ("status",), ("ack", "cpu:0", "--reason", "looked at"), ("check",))
    after = in_turn(*((*words, *common) for words in commands))
    assert [answer.code for answer in after] == [3, 3, 0, 0]


def test_a_daemon_that_starts_without_its_record_says_so(tmp_path, state):
    """Log, metrics and page: unknown, and why."""
    config = configure(tmp_path, "passes", each=QUICK)
    assert canaryd("check", "--config", config, "--state-dir", state).code == 0
    remove(state, "canaryd.db*")
    with running(Daemon(config, state)) as daemon:
        daemon.line("is missing, although canaryd ran here before; started a new, empty database")
        assert "history-lost" in daemon.line("history-lost")
        eventually(lambda: daemon.get("/readyz")[0] == 200 and is_in(daemon, "unknown"))
        assert "The record of this machine was lost" in daemon.get("/")[1]
        assert daemon.end()[0] == 0


def test_a_log_without_its_database_comes_into_no_other(tmp_path, state):
    """A daemon is killed, and then only the database is removed: its log is kept aside, and read by nobody."""
    config = configure(tmp_path, "passes", each=QUICK)
    common = ("--config", config, "--state-dir", state)
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        daemon.end(signal.SIGKILL)
    with Store.open(state, for_reading=True) as store:
        old = {run.id for run in store.runs()}
    before = (state / "canaryd.db-wal").read_bytes()
    remove(state, "canaryd.db", "locks/*")
    answer = canaryd("check", "--json", *common)
    assert (answer.code, rules(answer)) == (3, {"history-lost"})
    (aside,) = state.glob("canaryd.db.corrupt-*-wal")
    assert aside.read_bytes() == before
    assert str(aside) in answer.err
    assert old
    assert not old & {run.id for run in nothing_twice(state)}


@pytest.mark.parametrize("made", [(), ("locks/", "memory/"), ("locks/", "canaryd.db.lock", "canaryd.db.new")])
def test_a_state_directory_without_a_record_is_a_beginning(tmp_path, state, made):
    """As an installation leaves it, and as a first start that was interrupted before it made the database does."""
    state.mkdir()
    for name in made:
        (state / name).mkdir() if name.endswith("/") else (state / name).touch()
    common = ("--config", configure(tmp_path, "passes"), "--state-dir", state)
    status, answer = in_turn(("status", *common), ("check", "--json", *common))
    assert "missing, although" not in status.err
    assert (answer.code, rules(answer)) == (0, set())
    assert "missing, although" not in answer.out + answer.err


def test_a_record_that_another_command_makes_again_is_found_out(tmp_path, state):
    """Who comes first makes the fresh one, and cannot know what was lost: the daemon does, and says it."""
    config = configure(tmp_path, "passes", each={"passes": {"period": "1h"}})
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        eventually(lambda: is_in(daemon, "healthy"))
        daemon.send(signal.SIGSTOP)
        shutil.rmtree(state)
        assert canaryd("check", "--probe", "passes", "--config", config, "--state-dir", state).code == 0
        daemon.send(signal.SIGCONT)
        daemon.line("was replaced while it was in use; continuing with the new file")
        begun_anew(daemon, state)
        assert daemon.end()[0] == 0


def test_a_state_directory_that_comes_back_late_is_begun_anew(tmp_path, state):
    """While it cannot be made again everything waits in memory; then devices and locks are there again."""
    config = configure(tmp_path, "passes", each=QUICK)
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        state.rename(tmp_path / "gone")
        state.touch()
        eventually(lambda: daemon.value("canaryd_store_problem") == 1)
        state.unlink()
        begun_anew(daemon, state)
        assert daemon.end()[0] == 0


def test_a_record_that_is_mounted_late_is_read(tmp_path, state):
    """Its faults count, and its lock shows that a daemon runs; no restart is needed."""
    config, aside = configure(tmp_path, "mismatches", each={"mismatches": {"period": "1h"}}), tmp_path / "aside"
    assert canaryd("check", "--config", config, "--state-dir", aside).code == 2
    shutil.copy(catalogue(tmp_path / "other", "passes:mismatches") / "mismatches.py", tmp_path / "probes.d")
    state.symlink_to(tmp_path / "nowhere")
    with running(Daemon(config, state)) as daemon:
        eventually(lambda: is_in(daemon, "healthy"))
        exchange(aside, state)
        eventually(lambda: is_in(daemon, "faulty"))
        daemon.line("is another database: taking its locks and looking for devices again")
        with Store.open(state) as store, pytest.raises(Busy), store.lock(DAEMON_LOCK):
            pass
        assert daemon.end()[0] == 0


def test_a_database_that_is_emptied_under_a_daemon_is_found_out(tmp_path, state):
    """`status` leaves it, the next check sets it aside; the daemon goes on in the fresh one and is unknown."""
    config = configure(tmp_path, "passes", each=QUICK)
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        os.truncate(state / "canaryd.db", 0)
        told = canaryd("status", "--config", config, "--state-dir", state)
        assert told.code == 3
        assert told.err.startswith(f"canaryd: cannot read {state / 'canaryd.db'}: it is empty; canaryd check ")
        assert told.err.endswith(" keeps it under another name and begins a new record\n")
        assert not list(state.glob("canaryd.db.corrupt-*"))
        canaryd("check", "--config", config, "--state-dir", state)
        assert list(state.glob("canaryd.db.corrupt-*"))
        eventually(lambda: is_in(daemon, "unknown"))
        daemon.line("history-lost")
        before = runs(daemon)
        eventually(lambda: runs(daemon) > before)
        assert daemon.end()[0] == 0
    with Store.open(state) as store:
        assert len(store.runs()) >= 1
        assert store.lost is not None


# --- Stopped and continued -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_daemon_takes_what_its_worker_found_meanwhile(tmp_path, state):
    """SIGSTOP beyond the deadline of a run that ended well: it completed, nothing is run twice, and ages are right."""
    log = tmp_path / "log"
    each = {"records": {"timeout": "2s", "period": "10m", "settings": {"log": str(log), "seconds": 2.0}}}
    with running(Daemon(configure(tmp_path, "records", "passes", each=each | QUICK), state)) as daemon:
        eventually(lambda: log.exists() and "begin" in log.read_text())
        daemon.send(signal.SIGSTOP)
        eventually(lambda: "end" in log.read_text())
        begun = time.time()
        time.sleep(12)
        daemon.send(signal.SIGCONT)
        eventually(lambda: runs(daemon, probe="records") == 1)
        eventually(lambda: runs(daemon) >= 2)
        assert daemon.end()[0] == 0
    found = nothing_twice(state)
    assert [r.outcome for r in found if r.probe == "records"] == [Outcome.COMPLETED]
    since = [r for r in found if r.probe == "passes" and r.started > begun]
    assert len(since) <= 1 + (time.time() - begun - 12) / 2, "what was missed is not made up for"


@pytest.mark.slow
def test_a_machine_that_slept_is_no_fault_of_its_workers(tmp_path, state):
    """Daemon and worker stopped together, as by a frozen container: no run is told as hung, and the next completes."""
    log = tmp_path / "log"
    each = {"records": {"timeout": "2s", "period": "2s", "settings": {"log": str(log), "seconds": 1.5}}}
    with running(Daemon(configure(tmp_path, "records", each=each), state)) as daemon:
        eventually(lambda: log.exists() and "begin" in log.read_text())
        daemon.send(signal.SIGSTOP)
        workers = daemon.others()  # which stay, if only as zombies, while nobody reaps them
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        time.sleep(13)  # the worker's own deadline too
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        daemon.send(signal.SIGCONT)
        eventually(lambda: runs(daemon, probe="records") >= 1)
        assert daemon.end()[0] == 0
    assert {r.outcome for r in nothing_twice(state)} == {Outcome.COMPLETED}


def test_a_daemon_that_hangs_serves_no_old_page(tmp_path):
    """Without a look at the record for two minutes every address answers 503: a prepared page does not age."""
    with Store.open(tmp_path / "state") as store:
        hung = RealDaemon(Config(state_dir=tmp_path / "state"), None, store)
        hung._publisher.changed()
        routes = hung._routes()
        assert routes["/metrics"](Request({})).status == 200
        hung._watchdog.looked -= watchdog.SILENT + 1
        for route in routes.values():
            assert route(Request({})).status == 503
            assert re.match(rb"canaryd hangs: its last good look at the store was 12\d s ago", route(Request({})).body)
        hung._refresh()
        assert routes["/metrics"](Request({})).status == 200


def test_a_look_that_fails_is_no_look(tmp_path, monkeypatch):
    """Whatever raises in it each time: the page of before is not served for ever, and the watchdog is not fed."""
    with Store.open(tmp_path / "state") as store:
        hung = RealDaemon(Config(state_dir=tmp_path / "state"), None, store)
        hung._watchdog.looked -= watchdog.STARVED + 1
        monkeypatch.setattr(hung, "_look", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hung._refresh()
        assert hung._routes()["/healthz"](Request({})).status == 503
        hung._watchdog.pulse(None)
        assert not hung._watchdog.pulsed
        monkeypatch.undo()
        hung._refresh()
        hung._watchdog.pulse(None)
        assert hung._watchdog.pulsed


def test_a_storm_of_sighups_is_a_few_reloads_and_holds_up_no_stop(tmp_path, state):
    """A thousand within a second or two."""
    with running(Daemon(configure(tmp_path, "passes", each=QUICK), state)) as daemon:
        ready(daemon)
        for _ in range(1000):
            daemon.send(signal.SIGHUP)
            time.sleep(0.001)
        assert daemon.get("/healthz")[0] == 200
        code, seconds = daemon.end()
        assert code == 0
        assert seconds < soon(STOP)
        assert 1 <= sum("configuration reloaded" in line for line in daemon.lines) < 500
        assert not any("Traceback" in line for line in daemon.lines)
    nothing_twice(state)


@pytest.mark.parametrize("times", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_sigterm_at_any_moment_of_the_start_leaves_a_sound_record(tmp_path, state, times):
    """Before it serves, the signal ends it as it ends any program; afterwards it stops in order. Nothing is left."""
    config, dice = configure(tmp_path, "passes", each=QUICK), random.Random(7)
    codes = set()
    for number in range(times):
        with running(Daemon(config, state)) as daemon:
            if number % 3 == 2:
                daemon.line("serves http://")
            time.sleep(dice.uniform(0.0, 1.0))
            code, seconds = daemon.end()
            codes.add(code)
            assert seconds < soon(STOP)
            eventually(lambda daemon=daemon: daemon.others() == [], 10)
            assert not any("Traceback" in line for line in daemon.lines), daemon.lines
    assert codes <= {0, -signal.SIGTERM}
    assert 0 in codes
    nothing_twice(state)


# --- Memory, processes, descriptors ----------------------------------------------------------------------------------

EATS = """
from canaryd.probe import ProbeSpec

SPEC = ProbeSpec(name="eats", summary="Fills memory", numeric=False)


def run(ctx):
    kept = [bytearray(b"x") * (1 << 20) for _ in range(4096)]
    yield
"""


def test_a_worker_that_eats_the_memory_of_all_takes_nobody_with_it(tmp_path, state):
    """One control group for daemon and workers: the kernel kills the worker, and the next probe runs."""
    config = configure(tmp_path, "passes", each=QUICK | {"eats": {"period": "1h"}})
    probe = tmp_path / "probes.d/eats.py"
    probe.write_text(EATS)
    probe.chmod(0o644)
    limit = str(200 << 20)
    with cgroup("memory", [("memory.max", limit), ("memory.limit_in_bytes", limit)]) as group:
        joins = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        with running(Under(joins, config, state)) as daemon:
            eventually(lambda: runs(daemon, "out_of_memory", "eats") == 1)
            daemon.line("eats out_of_memory: ")
            assert is_in(daemon, "unknown")
            assert "eats" in daemon.get("/healthz")[1]
            eventually(lambda: runs(daemon) >= 2)
            assert daemon.end()[0] == 0
    nothing_twice(state)


def test_where_no_process_can_be_started_the_outcome_says_so(tmp_path, state):
    """pids.max, as a container's limit or TasksMax= of systemd: unknown meanwhile, and healthy again by itself."""
    config = configure(tmp_path, "passes", each=QUICK)
    with cgroup("pids", [("pids.max", "max")] * 2) as group, running(Daemon(config, state)) as daemon:
        ready(daemon)
        (group / "cgroup.procs").write_text(f"{daemon.popen.pid}\n")  # what it starts from now on is there too
        for pid in daemon.others():
            with contextlib.suppress(ProcessLookupError):  # a worker that ended meanwhile
                (group / "cgroup.procs").write_text(f"{pid}\n")
        (group / "pids.max").write_text("1")
        daemon.line("passes errored: 0 results: worker.python")
        daemon.line("healthy → unknown (canaryd itself)")
        assert "cannot be started: Resource temporarily unavailable" in daemon.line(" passes errored: ")
        assert daemon.popen.poll() is None
        (group / "pids.max").write_text("max")
        eventually(lambda: is_in(daemon, "healthy"))
        tried = [line for line in daemon.lines if " passes errored: " in line]
        assert len(tried) < 60, "one try each time that it is due"
        assert daemon.end()[0] == 0
    nothing_twice(state)


@pytest.mark.slow
def test_without_a_free_file_descriptor_nothing_leaks(tmp_path, state):
    """The limit falls to what is open, and then a little above it, where a start gets half of what it needs."""
    config = configure(tmp_path, "passes", each=QUICK)
    with running(Daemon(config, state)) as daemon:
        ready(daemon)
        pid = daemon.popen.pid
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]

        def numbers():
            return {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}

        before = numbers()
        free = [number for number in range(max(before) + 20) if number not in before]
        for left in (0, 2, 4, 6, 8):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[left], hard))
            tries = len([line for line in daemon.lines if "Too many open files" in line])
            eventually(
                lambda tries=tries: (
                    len([x for x in daemon.lines if " passes errored: " in x or "Too many" in x]) > tries
                )
            )
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        eventually(lambda: is_in(daemon, "healthy"))
        eventually(lambda: runs(daemon) >= 2)
        eventually(lambda: len(numbers()) <= len(before) + 2)
        assert daemon.end()[0] == 0
    assert Outcome.ERRORED in {r.outcome for r in nothing_twice(state)}


# --- Surroundings ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(config, state, **streams):
    """Run a daemon whose standard streams are not the test's, and yield (process, what /healthz answers)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["run", "--config", config, "--state-dir", state, "--listen", address]
    argv = [*streams.pop("prefix", []), sys.executable, "-m", "canaryd", *map(str, words)]
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(), **streams)

    def health():
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(http.client.HTTPConnection(address, timeout=5)) as link,
        ):
            link.request("GET", "/healthz", headers={"Connection": "close"})
            answer = link.getresponse()
            answer.read()
            return answer.status
        return None

    try:
        yield process, health
    finally:
        process.kill()
        process.wait(20)


def test_a_log_whose_reader_is_gone(tmp_path, state):
    """As of `canaryd run 2>&1 | head`: the lines are lost, and nothing else."""
    reading, writing = os.pipe()
    with started(configure(tmp_path, "passes", each=QUICK), state, stderr=writing) as (daemon, health):
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        eventually(lambda: health() == 200)
        daemon.terminate()
        assert daemon.wait(20) == 0
    assert len(nothing_twice(state)) >= 1


def test_standard_streams_that_are_closed(tmp_path, state):
    """Their numbers must not pass to the database or a socket."""
    prefix = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    with started(configure(tmp_path, "passes", each=QUICK), state, prefix=prefix) as (daemon, health):
        eventually(lambda: health() == 200)
        assert {str(Path(f"/proc/{daemon.pid}/fd/{n}").readlink()) for n in range(3)} == {os.devnull}
        daemon.terminate()
        assert daemon.wait(20) == 0
    assert len(nothing_twice(state)) >= 1


@pytest.mark.slow
def test_a_log_that_is_full_is_no_health(tmp_path, state):
    """Nobody reads the pipe, and it is full from the start: never 200; once somebody reads, all goes on."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    with started(configure(tmp_path, "passes", each=QUICK), state, stderr=writing) as (daemon, health):
        os.close(writing)
        for _ in range(20):
            assert health() in (None, 503)
            time.sleep(0.5)
        drained = threading.Thread(target=lambda: [*iter(lambda: os.read(reading, 65536), b"")], daemon=True)
        drained.start()
        eventually(lambda: health() == 200)
        daemon.terminate()
        assert daemon.wait(20) == 0
        drained.join(20)
    os.close(reading)
    assert len(nothing_twice(state)) >= 1


@pytest.mark.parametrize("what", ["/proc", "/tmp"])
def test_without_proc_or_with_a_full_tmp(tmp_path, state, what):
    """An empty /proc, and a /tmp without a free byte, in a mount namespace of its own."""
    needed("unshare", untested="this failure was not made")
    place = Path("/var/tmp") / f"canaryd-failures-{os.getpid()}"
    place.mkdir()
    try:
        config = configure(place, "passes", each=QUICK, worker={"python": sys.executable})
        mount = "mount -t tmpfs -o size=16k none " + ("/proc" if what == "/proc" else f"{tmp_path}")
        more = "" if what == "/proc" else f"; export TMPDIR={tmp_path}; cat /dev/zero > {tmp_path}/filler 2>/dev/null"
        prefix = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            f'{mount} || exit 77{more}; exec "$@"',
            "sh",
        ]
        with running(Under(prefix, config, place / "state")) as daemon:
            eventually(lambda: daemon.popen.poll() == 77 or any("serves http://" in line for line in daemon.lines))
            if daemon.popen.poll() == 77:
                pytest.skip("NOT TESTED: a mount namespace needs root and CAP_SYS_ADMIN")
            ready(daemon)
            eventually(lambda: runs(daemon) >= 2)
            assert daemon.get("/healthz") == (200, "ok\n")
            assert daemon.end()[0] == 0
            assert not any("Traceback" in line for line in daemon.lines)
        assert len(nothing_twice(place / "state")) >= 2
    finally:
        shutil.rmtree(place, ignore_errors=True)


def resident(daemon):
    """Return the memory of a daemon in MiB."""
    text = Path(f"/proc/{daemon.popen.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) / 1024


@pytest.mark.slow
def test_a_clock_that_jumps_under_a_daemon(tmp_path, state, monkeypatch):
    """A year ahead and back again: the jump is said, jobs go on at once, and what was missed costs no memory."""
    if not FAKETIME.exists():
        pytest.skip("NOT TESTED: libfaketime is not installed here")
    clock = tmp_path / "clock"
    clock.write_text("+0d")
    monkeypatch.setenv("LD_PRELOAD", str(FAKETIME))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    with running(Daemon(configure(tmp_path, "passes", each=QUICK), state)) as daemon:
        monkeypatch.undo()
        ready(daemon)
        eventually(lambda: is_in(daemon, "healthy"))
        for offset, sign in (("+365d", "+"), ("+0d", "-")):
            clock.write_text(offset)
            daemon.line(f"the clock jumped by {sign}")
            before = runs(daemon)
            eventually(lambda before=before: runs(daemon) >= before + 2)
            assert daemon.popen.poll() is None
            assert resident(daemon) < 80, "MiB"
        eventually(lambda: is_in(daemon, "healthy"))
        assert daemon.end()[0] == 0
    nothing_twice(state)


# --- Clients ---------------------------------------------------------------------------------------------------------


def test_a_hundred_scrapers_and_fifty_slow_clients(tmp_path, state):
    """At once, five times each, while fifty others never end their request: every scrape is whole."""
    times, failed, gate = [], [], threading.Barrier(SCRAPERS)

    def scrape(host):
        gate.wait()
        for _ in range(5):
            begun = time.monotonic()
            try:
                link = http.client.HTTPConnection(host, timeout=soon(30))
                link.request("GET", "/metrics")
                answer = link.getresponse()
                assert (answer.status, answer.read()[-1:]) == (200, b"\n")
                link.close()
            except (OSError, AssertionError, http.client.HTTPException) as error:
                failed.append(repr(error))
            times.append(time.monotonic() - begun)

    with running(Daemon(configure(tmp_path, "passes", each=QUICK), state)) as daemon:
        ready(daemon)
        host = urllib.parse.urlsplit(daemon.address).netloc
        with contextlib.ExitStack() as held:
            for _ in range(SLOW):
                slow = held.enter_context(socket.create_connection(host.split(":")))
                slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            threads = [threading.Thread(target=scrape, args=(host,)) for _ in range(SCRAPERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failed == []
        times.sort()
        print(f"p50 {1e3 * times[len(times) // 2]:.0f} ms, p99 {1e3 * times[int(0.99 * len(times))]:.0f} ms")
        assert times[-1] < soon(20)
        before = runs(daemon)
        eventually(lambda: runs(daemon) > before)
        assert daemon.end()[0] == 0


# --- Devices ---------------------------------------------------------------------------------------------------------

with_nvml = pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None,
    reason="NOT TESTED: nvidia-ml-py is not installed in this interpreter",
)


@with_nvml
def test_a_gpu_that_comes_back_elsewhere_keeps_its_history(tmp_path):
    """Gone, then back at another place on the bus: counters and evidence stay with the uuid, and the index follows."""
    site = Site(tmp_path / "site", gpus=2)
    first, second = site.uuids
    with site.daemon() as daemon:

        def healthy(uuid):
            return daemon.value("canaryd_device_state", device=uuid, state="healthy") == 1

        eventually(lambda: healthy(first) and healthy(second))
        before = runs_of(daemon, second)
        site.machine.set(None, "count", 1)
        site.seen_by_torch.write_text(first)
        daemon.send(signal.SIGHUP)
        eventually(lambda: daemon.value("canaryd_device_present", device=second, index="1") == 0)
        eventually(lambda: daemon.value("canaryd_device_state", device=second, state="healthy") == 0)
        site.machine.set(0, "uuid", second)
        site.machine.set(1, "uuid", first)
        site.machine.set(None, "count", 2)
        site.seen_by_torch.write_text(f"{second},{first}")
        daemon.send(signal.SIGHUP)
        eventually(lambda: daemon.value("canaryd_device_present", device=second, index="0") == 1)
        eventually(lambda: daemon.value("canaryd_device_present", device=first, index="1") == 1)
        assert daemon.value("canaryd_device_present", device=second, index="1") is None
        eventually(lambda: (runs_of(daemon, second) or 0) >= before >= 1)
        assert daemon.end()[0] == 0


@with_nvml
def test_a_release_that_lost_sight_of_a_gpu_is_not_ready(tmp_path):
    """A roll-out stops at a torch that no longer shows what the release before has tested."""
    site = Site(tmp_path / "site", gpus=2)
    first, second = site.uuids
    with site.daemon() as daemon:
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        before = runs_of(daemon, first)
        assert daemon.end()[0] == 0
    site.seen_by_torch.write_text(first)
    with site.daemon() as daemon:
        eventually(lambda: (runs_of(daemon, first) or 0) > before)
        assert daemon.get("/readyz")[0] == 503
        site.seen_by_torch.write_text(f"{first},{second}")
        daemon.send(signal.SIGHUP)
        eventually(lambda: daemon.get("/readyz")[0] == 200)
        assert daemon.end()[0] == 0


@with_nvml
def test_a_gpu_that_comes_back_is_found_without_being_told(tmp_path, monkeypatch):
    """It is looked for after one minute, two, four: as long again as it was away, and an hour at most."""
    site = Site(tmp_path / "site", gpus=2)
    for name, value in site.machine.environment.items():
        monkeypatch.setenv(name, value)
    with Store.open(site.state) as store:
        daemon = RealDaemon(load(site.config), site.config, store)
        daemon._jobs.scheduler.start(paused=True)

        def look(away=0.0):
            """Take one inventory; return the whole minutes to the next, and whether each GPU is there."""
            if away:
                daemon._inventories._missing_since = time.monotonic() - away
            daemon._inventories.discover()
            interval = daemon._jobs.scheduler.get_job("discover").trigger.interval.total_seconds()
            return interval // 60, [uuid in daemon.engine.present for uuid in site.uuids]

        def leave(gpus):
            site.machine.set(None, "count", gpus)
            site.seen_by_torch.write_text(",".join(site.uuids[:gpus]))

        try:
            assert look() == (60, [True, True])
            leave(1)
            assert look() == (1, [True, False])
            assert look() == (1, [True, False])  # asked for out of turn: it was not away for longer
            assert look(away=120) == (2, [True, False])
            assert look(away=600) == (10, [True, False])
            assert look(away=5000) == (60, [True, False])
            leave(2)
            assert look() == (60, [True, True])
            site.seen_by_torch.write_text(site.uuids[0])  # the other's fabric is not ready yet, as after a boot
            assert look() == (1, [True, True])
            assert look(away=120) == (2, [True, True])
            leave(2)
            assert look() == (60, [True, True])
            site.machine.fail(None, "nvmlInitWithFlags", 9)  # the driver is not loaded
            site.seen_by_torch.write_text("")
            assert look() == (1, [False, False])
        finally:
            daemon._jobs.scheduler.shutdown()
            daemon.engine.stop()
            eventually(lambda: not daemon.engine.holds)


@pytest.mark.parametrize("fails", [False, True])
def test_an_inventory_that_is_asked_for_during_another_is_not_lost(tmp_path, fails):
    """What changed after the first had looked is found, also where that one fails: by the next look at the record."""
    taken = []
    with Store.open(tmp_path / "state") as store:
        daemon = RealDaemon(load(configure(tmp_path, "passes")), None, store)
        daemon._jobs.scheduler.start()
        whole = daemon._inventories.take

        def take():
            whole()
            taken.append(len(taken))
            if len(taken) == 1:
                daemon._inventories.look_around()
                assert not fails, "as a worker that cannot be started might"

        daemon._inventories.take = take
        try:
            daemon._inventories.look_around()
            eventually(lambda: len(taken) == (1 if fails else 2))
            if fails:
                eventually(lambda: daemon._refresh() or len(taken) == 2)
        finally:
            daemon._jobs.scheduler.shutdown()
            daemon.engine.stop()
            eventually(lambda: not daemon.engine.holds)


def runs_of(daemon, uuid):
    return daemon.value("canaryd_probe_runs_total", device=uuid, probe="passes", outcome="completed")
