"""Runs with an injected fault: a file of their own, which nothing else in the record knows."""

import contextlib
import sqlite3

import pytest

from canaryd.formatting import DAY
from canaryd.model import Cause, State
from canaryd.store.migrations import SCHEMA, TALLIES
from canaryd.store.rows import ADD_RUN, pack, run_row
from canaryd.store.store import DRILL_EXPIRY, DRILLS, Store
from tests.store.made import NOW, counter, failure, ids, passed, run, verdict


def test_a_drill_is_counted_and_judged_apart(store):
    """The record beside it has no run, no count and no wrong result of it, and no news for other processes."""
    assert store.drills.add_run(failure("a", drill="flip"))
    assert (store.runs(), store.tallies("GPU-1"), store.ever_wrong, store.counters()) == ([], [], False, {})
    assert store.news() == []
    assert ids(store.drills.runs()) == ["a"]
    assert counter(store.drills, "drill_mismatches", device="GPU-1", probe="exact_matmul") == 1


def test_a_drill_of_another_process_is_seen(tmp_path, clock):
    """A daemon that looks every few seconds learns of it without a restart."""
    with Store.open(tmp_path, now=clock) as daemon:
        assert daemon.drilled(NOW) == {}
        before = daemon.drills.changes()
        with Store.open(tmp_path, now=clock) as command:
            command.drills.add_run(failure("a", drill="flip", started=NOW))
        assert daemon.drills.changes() != before
        assert {uuid: ids(runs) for uuid, runs in daemon.drilled(NOW).items()} == {"GPU-1": ["a"]}
        assert daemon.problems == daemon.drills.problems == []


@pytest.mark.parametrize("wrong", [-400 * DAY, 400 * DAY])
def test_a_drill_ends_by_itself(tmp_path, clock, wrong):
    """An hour after it, by a clock that is right now: one that was wrong during the drill keeps no alert up."""
    with Store.open(tmp_path, now=clock) as store:
        store.drills.add_run(failure("a", drill="flip", started=NOW))
        store.drills.add_run(failure("b", drill="flip", started=NOW + wrong))
        assert [ids(runs) for runs in store.drilled(NOW + DRILL_EXPIRY).values()] == [["a"]]
        assert store.drilled(NOW + DRILL_EXPIRY + 1) == {}


def test_drills_are_kept_for_a_day(store):
    """So that one of the evening can still be reported in the morning; the newest stays, and the counts."""
    for name in "abc":
        store.drills.add_run(failure(name, drill="flip"))
    store.prune(NOW + 0.9 * DAY)
    assert len(store.drills.runs()) == 3
    passed(store.drills, NOW + 1.1 * DAY)
    store.prune(NOW + 1.1 * DAY)
    assert ids(store.drills.runs()) == ["c"]
    assert counter(store.drills, "drill_mismatches", device="GPU-1", probe="exact_matmul") == 3


def test_who_only_reads_makes_no_file(tmp_path):
    """A status, a report: without a drill there is nothing to read, and no problem."""
    with Store.open(tmp_path) as store:
        store.add_run(run("a"))
    with Store.open(tmp_path, for_reading=True) as store:
        assert store.drilled(NOW) == {}
        assert (store.drills.problem, store.drills.unreadable, store.drills.problems) == ("", "", [])
    assert not (tmp_path / DRILLS).exists()


def test_drills_in_the_record_of_an_older_version_are_dropped(tmp_path):
    """They were a rehearsal; the runs, the verdicts and the counts of the real world stay."""
    known = verdict(State.FAULTY, Cause.HARDWARE)
    with contextlib.closing(sqlite3.connect(tmp_path / "canaryd.db")) as db, db:
        for statement in f"{SCHEMA};{TALLIES}".split(";"):
            db.execute(statement)
        db.execute("PRAGMA user_version = 11")
        for each in (run("real"), failure("drilled", drill="flip")):
            db.execute(ADD_RUN, run_row(each, each.started))
        row = (1, known.device, False, known.state.value, known.cause.value, known.decided, pack(known))
        db.execute("INSERT INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        db.executemany("INSERT INTO counters VALUES (?, '', 3)", [("drill_runs",), ("drill_mismatches",), ("odd",)])
    with Store.open(tmp_path) as store:
        assert (store.problem, store.problems) == ("", [])
        assert ids(store.runs()) == ["real"]
        assert store.verdict_history("GPU-1") == [known]
        assert {name for name, _ in store.counters()} == {"odd"}
        assert store.drills.runs() == []
