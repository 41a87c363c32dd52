"""History and baselines outlive kill -9, an upgrade, a full disk and a damaged file.

Real processes, real files and a real engine. The other files here have the store alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from canaryd.codec import from_json, to_json
from canaryd.config.settings import Config
from canaryd.engine.engine import Engine
from canaryd.facts import Doubt, Recording
from canaryd.judge.recordings.baseline import EVERY, LEARN, Baseline
from canaryd.model import Ack, Device, Reason, Run, State, Verdict
from canaryd.report import status
from canaryd.store import release_0_1
from canaryd.store.database import StoreTooNew
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.store import Store
from tests.store.hosts import DAY, GPU, HOUR, NOW, run

WRITER = Path(__file__).with_name("kill_store.py")
STORES = Path(__file__).parents[1] / "data" / "stores"
CPU = "CPU-1"
HOSTS = ("h0", "h1", "h2", "h3", "h4")
"""Runs of release 0.1.0 with a golden in doubt."""
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


# --- Upgrades --------------------------------------------------------------------------------------------------------


def old_store(place):
    """Make the database that release 0.1.0 wrote (tests/data/stores/write.py)."""
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(place / "canaryd.db")) as db:
        db.executescript((STORES / "release-0.1.0.sql").read_text())
    return place


def bodies(place, table):
    """Return the JSON that an older database holds in a table, facts in sentences converted."""
    with contextlib.closing(sqlite3.connect(place / "canaryd.db")) as db:
        found = [json.loads(zlib.decompress(body)) for (body,) in db.execute(f"SELECT body FROM {table}")]
    today = {"runs": release_0_1.converted, "polls": release_0_1.converted, "baselines": Baseline.upgrade_json}
    return [today.get(table, dict)(data) for data in found]


def kept(value, written):
    """Whether an object still says all that an older canaryd wrote of it; it may say more."""
    if isinstance(written, dict):
        return isinstance(value, dict) and all(k in value and kept(value[k], v) for k, v in written.items())
    if isinstance(written, list):
        return len(value) == len(written) and all(map(kept, value, written))
    return value == written


def test_the_store_of_the_older_release_keeps_all_it_has(tmp_path):
    """A file that release 0.1.0 wrote: each run, poll, verdict, baseline, device, event and count is as it was."""
    place = old_store(tmp_path)
    tables = {"runs": Run, "devices": Device, "verdicts": Verdict, "polls": Run, "baselines": Baseline, "acks": Ack}
    written = {table: bodies(place, table) for table in tables}
    written["verdicts"] = [verdict for verdict in written["verdicts"] if not verdict["drill"]]
    with Store.open(place, now=lambda: NOW) as store:
        assert (store.problem, store.problems) == ("", [])
        read = {
            "runs": store.runs(drill=None),
            "devices": [r.device for r in store.devices()],
            "verdicts": store.verdict_history("GPU-1"),
            "polls": store.polls("GPU-1"),
            "baselines": store.baselines(),
            "acks": store.acks(),
        }
        for table, kind in tables.items():
            assert written[table]
            assert [kept(to_json(v), w) for v, w in zip(read[table], written[table], strict=True)] == [True] * len(
                written[table]
            )
            assert read[table] == [from_json(kind, w) for w in written[table]]
        assert [r.id for r in store.runs(failed=True)] == ["b", "c", *HOSTS, "e30"]
        assert [r.id for r in store.runs(drill=True)] == ["d"]
        of = frozenset({"device": "GPU-1", "probe": "exact_matmul"}.items())
        assert (store.counters()["probe_trials", of], store.counters()["probe_mismatches", of]) == (12.0, 6.0)
        assert [(e.kind, e.name, e.detail, e.code) for e in store.events()] == [("xid", "31", "Xid 31", 31)]
        assert store.note("kernel log") == "boot:7"
        assert [(a.kind, a.reason, a.by) for a in store.acks()] == [("acknowledged", "ticket 4711", "kim")]
        assert store.add_run(dataclasses.replace(read["runs"][0], id="new"))
        assert store.add_ack(Ack(device="GPU-1", kind="repaired", at=NOW, reason="r"))
        assert store.set_baselines(read["baselines"])
    sound(place / "canaryd.db")


def test_what_0_1_0_told_in_sentences_is_a_field(tmp_path):
    """Place, doubt, span, repeats, the clock and a lost GPU; what a sentence does not tell stays unknown."""
    with Store.open(old_store(tmp_path), now=lambda: NOW) as store:
        runs = {r.id: r for r in store.runs(drill=None)}
    (wrong,) = runs["b"].comparisons
    assert (str(wrong.place), wrong.place.core) == ("core 3", 3)
    found = wrong.evidence
    assert (found.repeats, found.repeats_wrong, found.repeats_alike) == (3, 2, 2)
    assert {axis: str(span) for axis, span in found.lines.items()} == {
        "row": "3", "column": "= 1 mod 16", "head": "0…31 (32 distinct)"
    }  # fmt: skip
    assert [span.shared for span in found.lines.values()] == [True, True, False]
    doubts = [(str(c.place), c.doubt) for name in HOSTS for c in runs[name].comparisons]
    assert doubts == [
        ("cores 2 and 5", Doubt.MADE_TWICE), ("core 4 twice", Doubt.MADE_TWICE), ("core 6", Doubt.DIGEST),
        ("core 7", Doubt.ARITHMETIC), ("rack 9", Doubt.UNKNOWN),
    ]  # fmt: skip
    assert runs["h2"].comparisons[0].digest == "00ff"
    assert (runs["k"].clock, dict(runs["k"].environment)) == (NOW - 9, {"load": "0.5"})
    assert runs["l"].reason is Reason.DEVICE_LOST
    assert {r.reason for r in runs.values() if r.id != "l"} == {Reason.NONE}


def test_an_engine_of_today_judges_by_what_an_older_one_stored(tmp_path):
    """The mismatch of before the upgrade accuses, and the baseline of then is held against what comes now."""
    old_store(tmp_path)
    store = Store.open(tmp_path, now=lambda: NOW + HOUR)
    engine = Engine(Config(state_dir=tmp_path), store, clock=lambda: NOW + HOUR)
    engine.recall()
    assert "exact-mismatch" in {f.rule for f in engine.decide()["GPU-1"].findings}
    recording = Recording(case="story", digest="f" * 16, chain={"checkpoint": "c1"}, values=(1.0,))
    told = run(99, NOW + HOUR, probe="canary", comparisons=(), recordings=(recording,), stack={"torch": "2.13"})
    assert engine.add(told).unknown == ("story",)
    store.close()


def test_the_store_of_a_newer_version_is_refused_and_not_touched(tmp_path):
    """With both versions and what to do; nothing in the directory changes but the lock."""
    Store.open(tmp_path).close()
    before = (tmp_path / "canaryd.db").read_bytes()
    words = r"version 10 of the store, this one knows 5\); upgrade canaryd, or choose another"
    with pytest.raises(StoreTooNew, match=words):
        Store.open(tmp_path, migrations={5: MIGRATIONS[5]})
    assert (tmp_path / "canaryd.db").read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} <= {"canaryd.db", "canaryd.db.lock"}


def test_an_upgrade_that_is_killed_can_be_taken_up_or_left(tmp_path, writers):
    """Killed before every statement of every migration: a whole version each time, with all that it had, and a copy."""
    written = None
    for statement in itertools.count(1):
        place = old_store(tmp_path / str(statement))
        written = written or bodies(place, "runs")
        writers.begin("--upgrade", place, statement)
        said, code = writers.rest()
        sound(place / "canaryd.db")
        back = tmp_path / f"back {statement}"
        back.mkdir()
        shutil.copy(place / "canaryd.db.version-5", back / "canaryd.db")
        assert bodies(back, "runs") == written
        with contextlib.closing(sqlite3.connect(place / "canaryd.db")) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
        with Store.open(place, migrations={v: m for v, m in MIGRATIONS.items() if v <= version}) as store:
            assert to_json(store.runs(drill=None)) == to_json([from_json(Run, w) for w in written])
        with Store.open(place) as store:
            assert len(store.runs(drill=None)) == len(written)
            assert store.set_note("still", "works")
        if said:
            break
        assert code == -signal.SIGKILL
    assert statement > 30, "the migration has a statement for each failure, table and column"
    assert version == max(MIGRATIONS)


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
    assert "recording-unconfirmed" in during["found"]
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


def emptied(path):
    """Leave a file without a byte, as a crash of some filesystems does."""
    path.write_bytes(b"")


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
def test_a_damaged_file_is_kept_and_the_store_goes_on(host, how):
    """Set aside whole, named with its place; new evidence is stored, and the fresh file is sound."""
    before = None

    def damage(path):
        nonlocal before
        how(path)
        before = path.read_bytes()

    damaged(host, damage)
    (problem,) = host.store.problems
    (aside,) = host.place.glob("canaryd.db.corrupt-*Z")
    assert str(aside) in problem
    assert aside.read_bytes() == before
    host.live(HOUR)
    assert not host.store.problem
    assert len(host.store.runs()) == 2
    assert problem in status.gather(host.store, host.engine.config, host.now).problems
    sound(host.place / "canaryd.db")


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
        while host.engine.sum_up():
            pass
    assert "history-lost" not in host.rules
    host.now = lost + DAY
    assert "history-lost" in host.rules
    host.say("acknowledged", "looked at", host.now + DAY)
    assert "history-lost" not in host.rules


def test_a_file_without_a_byte_is_damage_and_not_a_beginning(host):
    """A crash of the machine may leave it so: what it held is gone, and that is said."""
    damaged(host, emptied)
    assert host.store.problems
