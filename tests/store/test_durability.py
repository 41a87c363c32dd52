"""History and baselines outlive kill -9, a full disk and a damaged file.

Real processes, real files and a real engine. The other files here have the store alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canaryd.judge.recordings.baseline import EVERY, LEARN
from canaryd.model import State
from canaryd.report import status
from canaryd.store.store import Store
from tests.store.hosts import DAY, GPU, HOUR

WRITER = Path(__file__).with_name("kill_store.py")
CPU = "CPU-1"
COMMITS = 6
"""Transactions of one turn of the writer: baselines, run, verdict, event, poll, ack."""


def writer(*args, **pipes):
    command = [sys.executable, WRITER, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **pipes)


class Writers:
    """Writers that one process forks, one after the other: it alone has to import canaryd."""

    def __init__(self, process):
        self.process = process

    def begin(self, *args):
        """Start one and return its process id."""
        self.process.stdin.write(json.dumps([*map(str, args)]) + "\n")
        self.process.stdin.flush()
        word, pid = self.line().split()
        assert word == "begun"
        return int(pid)

    def line(self):
        """Return the next line that it writes: each is one write to the pipe, so a kill cuts none short."""
        return self.process.stdout.readline()

    def rest(self):
        """Return the other lines that it wrote, and its exit code, once it has ended."""
        lines = []
        while not (lines and lines[-1].startswith("ended ")):
            lines.append(line := self.line())
            assert line, self.process.stderr.read()
        return lines[:-1], int(lines[-1].split()[1])


@pytest.fixture(scope="module")
def writers():
    """Return what starts writers; they have complained of nothing at the end."""
    with writer("--forks", stdin=subprocess.PIPE) as process:
        yield Writers(process)
        process.stdin.close()
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def sound(path):
    """Fail unless SQLite finds nothing wrong with a database."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def counted(store):
    """Return how many runs the one baseline was learnt from or has counted."""
    return sum(b.learnt[EVERY] + b.passed.get(EVERY, 0) + b.strange for b in store.baselines(CPU))


def recorded(store):
    return [r for r in store.runs(CPU, "recorded") if not r.confirms]


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory, writers):
    """Return the directory of an engine that was killed thirty times at random moments, and what it had promised."""
    place, dice = tmp_path_factory.mktemp("killed"), random.Random(5)
    promised = {"run": [], "event": [], "poll": [], "ack": []}
    for cycle in range(30):
        process = writers.begin("--engine", place, cycle)
        first = [writers.line() for _ in range(dice.randrange(1, 32) if cycle % 5 else 0)]
        time.sleep(dice.uniform(0, 0.03))  # within a turn, or while it opens the store
        os.kill(process, signal.SIGKILL)
        said, code = writers.rest()
        assert code == -signal.SIGKILL
        for line in (*first, *said):
            what, name = line.split()
            promised[what].append(name)
    return place, promised


def test_kill_9_loses_nothing_that_was_promised(killed):
    """Runs, events, polls and acks that an engine called stored are there; the file is sound, and none is doubled."""
    place, promised = killed
    sound(place / "canaryd.db")
    with Store.open(place) as store:
        assert (store.problem, store.problems) == ("", [])
        found = {
            "run": [r.id for r in recorded(store)],
            "event": [e.name for e in store.events()],
            "poll": [p.id for p in store.polls(CPU)],
            "ack": [a.reason for a in store.acks()],
        }
        for what, names in promised.items():
            assert len(names) > 60, what
            assert set(names) <= set(found[what]), what
            assert len(found[what]) == len(set(found[what])) <= len(names) + 30, what
        counters = {name: value for (name, of), value in store.counters().items() if ("probe", "recorded") in of}
        assert counters["probe_runs"] == len(found["run"])
        assert store.counters()["stories", frozenset({("device", CPU)})] == len(found["event"])
        assert store.note("log") in found["event"]


def test_kill_9_leaves_baselines_and_verdicts_that_fit_the_runs(killed):
    """What was learnt is named in the runs it was learnt from; no stored run is missing in the counts."""
    place, _ = killed
    with Store.open(place) as store:
        runs, (baseline,) = recorded(store), store.baselines(CPU)
        assert baseline.complete
        assert baseline.learnt[EVERY] == LEARN
        assert sum(bool(r.learnt) for r in runs) <= LEARN
        assert baseline.strange >= sum(bool(r.unknown) for r in runs) > 0
        assert len(runs) <= counted(store) <= len(runs) + 30, "at most the run that was under way at each kill"
        (known,) = baseline.known
        assert known.recording.values == (0.5, 0.25)
        assert store.verdicts()[CPU].state is not State.HEALTHY
        assert {v.device for v in store.verdict_history(CPU)} == {CPU}


@pytest.mark.parametrize("commit", [*range(1, COMMITS + 1), LEARN * COMMITS + 1])
def test_a_kill_before_any_commit_leaves_what_was_promised(tmp_path, writers, commit):
    """Killed just before each transaction of a turn, in the first and after learning: the rest is whole.

    A run and its baseline are one transaction: whichever a kill falls before, exactly the stored runs are counted.
    """
    writers.begin("--engine", tmp_path, "a", commit)
    said, code = writers.rest()
    assert code == -signal.SIGKILL
    sound(tmp_path / "canaryd.db")
    promised = [line.split()[1] for line in said if line.startswith("run")]
    with Store.open(tmp_path) as store:
        assert set(promised) <= {r.id for r in recorded(store)}
        assert counted(store) == len(recorded(store))


# --- A full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_neither_history_nor_baselines(tmp_path):
    """While no file may grow, all that a real engine adds is part of every answer and is said; then it is on disk."""
    process = writer("--full", tmp_path)
    said, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (0, "")
    before, during, after = map(json.loads, said.splitlines())
    assert all(before["promised"])
    assert not any(during["promised"])
    assert all(after["promised"])
    assert (before["problems"], after["problems"]) == ([], [])
    (problem,) = during["problems"]
    assert "runs waiting in memory: 15" in problem
    assert "canaryd.db" in problem
    for answers, turns in ((before, 20), (during, 35), (after, 36)):
        assert [len(answers[k]) for k in ("runs", "polls", "events", "acks")] == [turns] * 4
        assert answers["counted"] == [turns]
    assert before["runs"] == during["runs"][:20]
    assert before["found"] != during["found"] == after["found"], "what came while it was full was judged"
    assert "recording-departed" in during["found"]
    sound(tmp_path / "canaryd.db")
    with Store.open(tmp_path) as store:
        assert [r.id for r in store.runs()] == after["runs"]
        assert [p.id for p in store.polls(CPU)] == after["polls"]
        assert sorted(e.name for e in store.events()) == after["events"]
        assert [a.reason for a in store.acks()] == after["acks"]
        assert counted(store) == 36
        assert [b.strange for b in store.baselines()] == after["strange"] == [1]
        assert [[v.state.value, v.cause.value] for v in store.verdict_history(CPU)] == after["verdicts"]
        assert store.counters()["stories", frozenset({("device", CPU)})] == 36


# --- A damaged file --------------------------------------------------------------------------------------------------


def overwritten(path):
    """Overwrite the middle third with junk."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(random.Random(1).randbytes(size // 3))


def truncated(path):
    """Cut the file in the middle of a page."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)


DAMAGES = [overwritten, truncated]


def damaged(host, how):
    """Damage the file of a host that has a suspect on record; return the host that goes on with what is left."""
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT
    host.store.close()
    how(host.place / "canaryd.db")
    host.store = Store.open(host.place, now=host.clock)
    host.store.see_device(GPU, host.now)
    host.restart()
    return host


@pytest.mark.parametrize("how", DAMAGES)
def test_a_device_whose_history_was_lost_is_not_healthy(host, how):
    """A suspect does not become healthy because the record of its mismatch rotted, not even after a restart."""
    damaged(host, how)
    host.live(HOUR)
    finding = next(f for f in host.verdict.findings if f.rule == "history-lost")
    assert (host.verdict.state, finding.state.value, finding.cause.value) == (State.UNKNOWN, "unknown", "harness")
    assert re.search(r"canaryd\.db\.corrupt-", " ".join(finding.evidence))
    host.store.close()
    host.store = Store.open(host.place, now=host.clock)
    assert host.store.problems == []
    host.restart()
    assert "history-lost" in host.rules
    (shown,) = status.gather(host.store, host.engine.config, host.now).devices
    assert shown.verdict.state is State.UNKNOWN


def test_a_lost_history_ends_with_an_operators_word_or_with_the_watch(host):
    """Either somebody has looked, or the device was tested on as many days as a suspect would have been."""
    damaged(host, overwritten)
    lost = host.now
    host.live(HOUR)
    assert "history-lost" in host.rules
    for day in range(1, 32):
        host.now = lost + day * DAY
        host.live(HOUR)
        while host.engine.days.sum_up():
            pass
    assert "history-lost" not in host.rules
    host.now = lost + DAY
    assert "history-lost" in host.rules
    host.say("acknowledged", "looked at", host.now + DAY)
    assert "history-lost" not in host.rules
