"""History and baselines outlive kill -9, an upgrade, a full disk, a clock that jumps and a damaged file.

Real processes, real files and a real engine. `tests/store/test_store.py` has the store alone.
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
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.engine import Engine
from canaryd.facts import Comparison, Doubt, Evidence, Exactness, Reading, Recording
from canaryd.judge import node
from canaryd.judge.recordings.baseline import EVERY, LEARN, Baseline
from canaryd.model import Ack, Device, Event, Outcome, Reason, Run, State, Verdict
from canaryd.probe import ProbeSpec
from canaryd.report import status
from canaryd.store import release_0_1
from canaryd.store.clock import REACHED_NOTE
from canaryd.store.database import StoreTooNew
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.store import Store
from tests.places import place

WRITER = Path(__file__).with_name("kill_store.py")
STORES = Path(__file__).parents[1] / "data" / "stores"
CPU = "CPU-1"
NOW = 1_790_000_000.0
HOUR, DAY, YEAR = 3600.0, 86_400.0, 365 * 86_400.0
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


# --- A clock that jumps ----------------------------------------------------------------------------------------------

GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="H100", torch_index=0)
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={"0": 1}, zeroed=0, nonfinite=0, lines={}, pattern="one element")
AHEAD, BACK, UNSET = NOW + YEAR, NOW - YEAR, 5000.0
"""A year ahead, a year back, and a clock that nobody has set."""


def run(number, at, *, wrong=False, trials=10, **fields):
    comparison = Comparison(
        case="a",
        shape="M=4",
        seed=number,
        exactness=Exactness.UNIVERSAL,
        place=place("device"),
        trials=trials,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
    )
    made = {"device": GPU.uuid, "probe": "p", "probe_version": 1, "seconds": 1.0, "outcome": Outcome.COMPLETED}
    made |= {"comparisons": (comparison,), "readings": (Reading(name="trials", value=trials),)}
    return Run(id=f"run-{number:05d}", started=at, **{**made, **fields})


class Host:
    """A store and an engine whose clock the test sets."""

    def __init__(self, place, now):
        self.place, self.now = place, now
        self.store = Store.open(place, now=self.clock)
        self.store.see_device(GPU, now)
        self.numbers = itertools.count(len(self.store.runs()))
        file = ProbeFile(name="p", path=place / "p.py", source="directory")
        self.entries = {"p": Entry(spec=ProbeSpec(name="p", summary="s"), file=file)}
        self.restart()

    def clock(self):
        return self.now

    def restart(self):
        """Begin anew on the same store, as the next daemon would."""
        self.engine = Engine(Config(state_dir=self.place), self.store, clock=self.clock)
        self.engine.entries, self.engine.present = self.entries, {GPU.uuid}
        self.engine.recall()

    def add(self, **fields):
        """Add a run of now, with a recording of known bits."""
        default = {"recordings": (Recording(case="c", digest="1" * 16, values=(0.5,)),)}
        return self.engine.add(run(next(self.numbers), self.now, **{**default, **fields}))

    def live(self, seconds, **fields):
        """Add a run every half hour for so long."""
        for _ in range(int(seconds / (HOUR / 2))):
            self.now += HOUR / 2
            self.add(**fields)

    def say(self, kind, reason, until=0.0):
        """Add an operator's word of now, from another process's place."""
        rules = tuple(f.rule for f in self.verdict.findings if f.state is State.SUSPECT)
        word = Ack(device=GPU.uuid, kind=kind, at=self.now, until=until, reason=reason, rules=rules)
        with Store.open(self.place, now=self.clock) as other:
            assert other.add_ack(word)
        return word

    @property
    def verdict(self):
        return self.engine.decide()[GPU.uuid]

    @property
    def rules(self):
        return {f.rule for f in self.verdict.findings}


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Return the directory of a host with a day of clean runs, a learnt baseline, and a prune behind it."""
    place = tmp_path_factory.mktemp("lived")
    host = Host(place, NOW - DAY)
    host.live(DAY)
    host.store.prune(host.now)
    host.store.close()
    return place


@pytest.fixture
def host(tmp_path, lived):
    shutil.copy(lived / "canaryd.db", tmp_path)
    made = Host(tmp_path, NOW)
    assert made.verdict.state is State.HEALTHY
    yield made
    made.store.close()


def history(store):
    """Return all that may not be forgotten because of a clock."""
    return {
        "runs": {r.id for r in store.runs()},
        "failures": {r.id for r in store.runs(failed=True)},
        "polls": {p.id for p in store.polls(GPU.uuid)},
        "baselines": {b.key for b in store.baselines()},
        "events": {(e.kind, e.name) for e in store.events()},
        "acks": {a.reason for a in store.acks()},
        "verdicts": {(v.state, v.cause) for v in store.verdict_history(GPU.uuid)},
    }


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(AHEAD, id="a year ahead"),
        pytest.param(NOW + 500 * DAY, id="500 days ahead"),
        pytest.param(BACK, id="a year back"),
        pytest.param(UNSET, id="1970"),
    ],
)
def test_a_clock_that_was_wrong_for_an_hour_forgets_nothing(host, wrong):
    """Pruned at the jump, as the daemon does, and hourly after it: all that lay before is there afterwards."""
    host.add(wrong=True)
    host.engine.watch.history.record(
        [Event(device=GPU.uuid, kind="xid", name="31", code=31, first=host.now, last=host.now)]
    )
    host.store.add_poll(run(9999, host.now, probe="nvidia_telemetry"), {})
    host.say("acknowledged", "known", host.now + DAY)
    host.engine.decide()
    before, right = history(host.store), host.now
    host.now = wrong
    host.store.prune(host.now)
    host.live(HOUR)
    host.store.prune(host.now)
    host.now = right + HOUR
    host.store.prune(host.now)
    host.restart()
    after = history(host.store)
    assert {what: names - after[what] for what, names in before.items()} == {what: set() for what in before}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(AHEAD, id="a year ahead"),
        *(pytest.param(at, id=name) for at, name in ((BACK, "a year back"), (UNSET, "1970"))),
    ],
)
def test_an_event_of_a_wrong_time_is_there_when_the_time_is_right(host, wrong):
    """An Xid that was heard then accuses now, after pruning and a restart too."""
    right, host.now = host.now, wrong
    host.engine.watch.history.record(
        [Event(device=GPU.uuid, kind="xid", name="48", code=48, first=host.now, last=host.now)]
    )
    assert "uncorrected-error" in host.rules
    host.now = right + HOUR
    host.add()
    host.store.prune(host.now)
    host.restart()
    assert [e.name for e in host.engine.watch.history.of(GPU)] == ["48"]
    assert "uncorrected-error" in host.rules


def test_runs_are_dated_rightly_once_the_clock_was_set_right(host):
    """By when they were stored: else the daemon reads a year of runs at every look, and no day has any to sum up."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    host.now = right
    host.live(6 * HOUR)
    recent = host.store.runs(since=host.now - HOUR)
    assert {r.started for r in recent if r.started < AHEAD} == {host.now - HOUR, host.now - HOUR / 2, host.now}


@pytest.mark.parametrize("wrong", [AHEAD, BACK, UNSET])
def test_learning_goes_on_through_a_jump(host, wrong):
    """Every recording counts once, whatever the clock said, and the baseline of before is the one that is compared."""
    right, (before,) = host.now, host.store.baselines()
    host.now = wrong
    host.live(2 * HOUR)
    other = (Recording(case="d", digest="3" * 16, values=(0.5,)),)
    host.live(5 * HOUR, recordings=other)
    host.now = right
    host.live(10 * HOUR, recordings=other)
    host.restart()
    first, second = sorted(host.store.baselines(), key=lambda b: b.case)
    assert first.passed[EVERY] == before.passed[EVERY] + 4
    assert second.learnt[EVERY] == LEARN
    strange = host.add(recordings=(Recording(case="d", digest="4" * 16, values=(0.75,)),))
    assert strange.unknown == ("d",)
    assert host.verdict.state is State.UNKNOWN


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(AHEAD, id="a year ahead"),
        pytest.param(
            BACK,
            id="a year back",
        ),
        pytest.param(UNSET, id="1970"),
    ],
)
def test_a_mismatch_of_a_wrong_time_stands_when_the_time_is_right(host, wrong):
    """It is seen at once, and neither the right time nor a restart clears it before it was watched for 30 days."""
    right, host.now = host.now, wrong
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT
    host.live(HOUR)
    assert host.verdict.state is State.SUSPECT
    host.now = right
    assert host.verdict.state is State.SUSPECT
    host.live(DAY)
    host.restart()
    assert host.verdict.state is State.SUSPECT


@pytest.mark.parametrize("wrong", [BACK, UNSET])
def test_a_repair_does_not_hide_a_mismatch_of_a_clock_set_back(host, wrong):
    """The repair lies before it in truth, whatever the clock says."""
    host.say("repaired", "a new board")
    host.live(HOUR)
    host.now = wrong
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT


def test_a_suspect_does_not_clear_because_the_clock_ran_ahead(host):
    """Clean trials enough for any record, and an hour of a clock that is a year ahead: that is no watch of 30 days."""
    host.add(wrong=True)
    host.live(12 * HOUR, trials=1000)
    assert host.verdict.state is State.SUSPECT
    host.now += YEAR
    host.live(HOUR, trials=1000)
    assert host.verdict.state is State.SUSPECT


def test_unknown_bits_are_not_over_because_the_clock_ran_ahead(host):
    """A departure that re-runs have confirmed stands through a jump."""
    strange = (Recording(case="c", digest="2" * 16, values=(0.75,)),)
    first = host.add(recordings=strange)
    for _ in range(3):
        host.now += 60
        host.add(recordings=strange, confirms=first.id, cases=("c",))
    assert "recording-departed" in host.rules
    host.live(3 * DAY)
    assert "recording-departed" in host.rules
    host.now += YEAR
    host.live(HOUR)
    assert "recording-departed" in host.rules


def test_a_suspicion_that_a_jump_lifted_is_back_with_the_time(host):
    """Nothing was deleted but by pruning: what was said while the clock was wrong does not outlive it."""
    host.add(wrong=True)
    host.live(12 * HOUR, trials=1000)
    right = host.now
    host.now += YEAR
    host.live(HOUR, trials=1000)
    host.now = right + HOUR
    assert host.verdict.state is State.SUSPECT
    assert "clock-set-back" in host.rules


def test_fresh_evidence_is_fresh_after_the_clock_was_set_back_and_goes_stale_in_time(host):
    """Runs dated in the future neither make what comes after them stale nor keep it from ever being so."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    host.now = right
    host.live(HOUR)
    assert host.verdict.state is State.HEALTHY
    assert host.rules >= {"clock-set-back"}
    host.now += DAY
    verdict = host.verdict
    assert verdict.state is State.UNKNOWN
    assert "stale-evidence" in {f.rule for f in verdict.findings}


@pytest.mark.parametrize("recordings", [(), (Recording(case="c", digest="1" * 16, values=(0.5,)),)])
@pytest.mark.parametrize("back", [3 * DAY, 300 * DAY])
def test_runs_after_a_clock_was_set_back_are_the_newest_evidence(host, back, recordings):
    """What is dated in the future keeps nothing healthy; what comes then does, dated by the store too, and grows old.

    The clock had run ahead for days, and so was believed: recordings are dated by that for a day.
    """
    host.now += 300 * DAY
    host.live(2 * DAY, recordings=recordings)
    host.store.set_note(REACHED_NOTE, repr(host.now))
    assert host.verdict.state is State.HEALTHY
    host.now -= back
    assert host.verdict.state is State.UNKNOWN
    assert "stale-evidence" in host.rules
    host.live(HOUR, recordings=recordings)
    assert host.verdict.state is State.HEALTHY
    host.restart()
    assert host.verdict.state is State.HEALTHY
    host.now += 3 * HOUR
    assert host.verdict.state is State.UNKNOWN


def test_a_verdict_from_the_future_is_not_tended_for_a_year(host):
    """The daemon ends while the clock is ahead: with the right time nobody vouches for its last verdict."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    assert host.verdict.state is State.HEALTHY
    host.now = right
    (shown,) = status.gather(host.store, host.engine.config, host.now + DAY).devices
    assert shown.verdict.state is State.UNKNOWN
    assert {f.rule for f in shown.verdict.findings} == {"no-evidence"}


@pytest.mark.parametrize(
    "judged",
    [
        False,
        pytest.param(
            True,
        ),
    ],
)
def test_an_acknowledgement_from_the_future_hides_no_new_mismatch(host, judged):
    """Given while the clock ran a year ahead, it would cover whatever comes until then, judged by meanwhile or not."""
    right, host.now = host.now, AHEAD
    word = host.say("acknowledged", "known", host.now + 7 * DAY)
    host.now += 1
    repaired = host.say("repaired", "a new board")
    if judged:
        assert host.verdict.state is State.UNKNOWN, "nothing was seen since the repair"
    host.now = right + HOUR
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT
    assert [dataclasses.replace(ack, void=False) for ack in host.store.acks()] == [word, repaired]


@pytest.mark.parametrize("wrong", [AHEAD, BACK, UNSET])
def test_an_acknowledgement_stands_again_when_the_time_is_right(host, wrong):
    """What an operator knows is known again after a jump, and a suspect is never healthy meanwhile."""
    host.add(wrong=True)
    host.say("acknowledged", "known", host.now + 7 * DAY)
    assert host.verdict.state is State.UNKNOWN
    right, host.now = host.now, wrong
    assert host.verdict.state in (State.SUSPECT, State.UNKNOWN)
    host.now = right + HOUR
    assert host.verdict.state is State.UNKNOWN
    assert "acknowledged" in host.rules


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            AHEAD,
        ),
        BACK,
        UNSET,
    ],
)
def test_a_drill_of_a_wrong_time_is_no_result_of_the_next(host, wrong):
    """Its runs touch no verdict, and an hour after the clock was set right no later drill is judged by them."""
    right, host.now = host.now, wrong
    host.add(wrong=True, drill="flip", recordings=())
    assert host.engine.drill_verdict(GPU.uuid).state is State.SUSPECT
    host.now = right + 2 * node.DRILL_EXPIRY
    host.add()
    assert host.verdict.state is State.HEALTHY
    begun = host.now
    assert "exact-mismatch" not in {f.rule for f in host.engine.drill_verdict(GPU.uuid, since=begun).findings}
    host.restart()
    assert "exact-mismatch" not in {f.rule for f in host.engine.drill_verdict(GPU.uuid, since=begun).findings}


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
    assert host.store.writable
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
