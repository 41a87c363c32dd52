"""What runs found is counted once, when they are stored, and stays when the runs are gone."""

import contextlib
import itertools
import sqlite3

import pytest

from canaryd.facts import Subject
from canaryd.formatting import DAY
from canaryd.judge.cause import Right, Same, SameKey
from canaryd.judge.slower import Day
from canaryd.judge.tally import edges, merged, total
from canaryd.model import Ack
from canaryd.store.database import PASSED_NOTE
from canaryd.store.migrations import SCHEMA
from canaryd.store.rows import ADD_RUN, ADD_SUMMARY, pack, run_row
from canaryd.store.store import Store
from tests.store.made import NOW, WRONG, comparison, failure, run

HOUR = 3600.0
MORNING = NOW - NOW % DAY + 6 * HOUR
STACK, OTHER = {"torch": "2.13.0"}, {"torch": "2.13.1"}
CLEAN = (comparison(trials=100, uploads=10),)


def clean(name, at=MORNING, **changes):
    return run(name, **{"started": at, "comparisons": CLEAN, "stack": STACK, **changes})


def wrong(name, at=MORNING, **changes):
    return failure(name, **{"started": at, "stack": STACK, **changes})


def told(store, device="GPU-1", **of):
    """Return what is counted of a device, as (runs, results, wrong) of each part of the record, by time."""
    found = [t for t in store.tallies(device) if all(getattr(t.lane, k) == v for k, v in of.items())]
    return [(t.runs, t.results, t.wrong) for t in sorted(found, key=lambda t: t.first)]


def test_the_runs_of_a_day_are_one_tally(store):
    """Each kind of runs has its own: probe, version, software, instruction set, load, retests, outcome."""
    for n in range(3):
        store.add_run(clean(f"r{n}", MORNING + n * HOUR))
    others = {"probe": "p"}, {"probe_version": 2}, {"stack": OTHER}, {"instruction_set": "avx2"}, {"intensity": "idle"}
    for n, changes in enumerate((*others, {"confirms": "r0"}, {"device": "GPU-2"})):
        store.add_run(clean(f"s{n}", MORNING + n, **changes))
    assert sorted(told(store)) == [*[(1, 100, 0)] * 6, (3, 300, 0)]
    assert told(store, "GPU-2") == [(1, 100, 0)]
    assert store.stacks()[clean("x").stack_id] == STACK


@pytest.mark.parametrize("kind", ["repaired", "replaced"])
def test_a_mismatch_a_repair_and_a_change_at_noon_split_the_day(store, kind):
    """What was before and what came after are never one figure."""
    store.add_run(clean("a", MORNING))
    store.add_run(wrong("b", MORNING + HOUR))
    store.add_run(clean("c", MORNING + 2 * HOUR))
    store.add_run(clean("d", MORNING + 3 * HOUR))
    assert told(store) == [(1, 100, 0), (1, 4, 1), (2, 200, 0)]
    store.add_ack(Ack(device="GPU-1", kind=kind, at=MORNING + 3.5 * HOUR, reason="new cooler"))
    store.add_run(clean("e", MORNING + 4 * HOUR))
    store.add_run(clean("f", MORNING + 5 * HOUR, stack=OTHER))
    assert told(store) == [(1, 100, 0), (1, 4, 1), (2, 200, 0), (1, 100, 0), (1, 100, 0)]


def test_what_a_run_found_is_counted_of_each_whom_it_accuses(store):
    """Results and uploads of the device; each wrong golden or comparison is one more upload. No retest is a test."""
    others = [comparison(subject=s, wrong_trials=1) for s in (Subject.HOST, Subject.HOST, Subject.COMPARATOR)]
    store.add_run(wrong("a", comparisons=(WRONG, *CLEAN, *others)))
    store.add_run(clean("b", MORNING + DAY, confirms="a"))
    found, retests = store.tallies("GPU-1")
    assert found.of(Subject.DEVICE) == (104, 1, 11, 1)
    assert found.of(Subject.HOST) == (13, 2, 13, 2)
    assert found.of(Subject.COMPARATOR) == (12, 1, 12, 1)
    assert [(t.runs, t.tested, t.failing) for t in (found, retests)] == [(1, 1, 1), (1, 0, 0)]


def test_the_first_and_newest_wrong_runs_are_known_without_reading_all(store):
    """Of each probe and stack, after a repair, and as the tallies themselves tell it; a device's alone."""
    for n, (hour, changes) in enumerate(itertools.product(range(5), ({}, {"probe": "p"}, {"stack": OTHER}))):
        store.add_run(wrong(f"w{n}", MORNING + hour * HOUR + n, **changes))
        store.add_run(clean(f"c{n}", MORNING + hour * HOUR + n + 1))
    store.add_run(wrong("other", MORNING + 9 * HOUR, device="GPU-2"))
    for since, pairs in ((0.0, 3), (MORNING + 2 * HOUR + 7, 3), (MORNING + 4 * HOUR + 12, 2), (MORNING + DAY, 0)):
        found = store.wrong_between("GPU-1", since)
        assert len(found) == pairs
        told = [t for t in store.tallies("GPU-1") if t.first > since]
        assert {at for pair in found for at in pair} == edges(told)


def test_a_wrong_run_of_a_sibling_splits_the_day_too(store):
    """A golden that this host made wrong can accuse the processor, whichever device met it."""
    store.add_run(clean("a", MORNING, device="GPU-2"))
    store.add_run(wrong("b", MORNING + HOUR))
    store.add_run(clean("c", MORNING + 2 * HOUR, device="GPU-2"))
    assert told(store, "GPU-2") == [(1, 100, 0), (1, 100, 0)]


def test_a_run_that_comes_twice_counts_once(store):
    """Its id tells."""
    for _ in range(2):
        store.add_run(clean("a"))
    assert told(store) == [(1, 100, 0)]


def test_what_waits_for_the_disk_is_counted_once(store):
    """It counts at once, and once when it reaches the disk, beside what another process counts meanwhile."""
    store.add_run(clean("a", MORNING))
    store.add_run(wrong("b", MORNING + HOUR))
    store._file.execute("PRAGMA max_page_count = 1")
    waiting = [clean("c", MORNING + 2 * HOUR), clean("d", MORNING + 3 * HOUR), wrong("e", MORNING + 4 * HOUR)]
    filler = [run(f"filler{n}", device="GPU-9", detail="x" * 3000) for n in range(20)]
    assert not [store.add_run(each) for each in (*filler, *waiting)][-1]
    expected = [(1, 100, 0), (1, 4, 1), (2, 200, 0), (1, 4, 1)]
    assert told(store) == expected
    store._file.execute("PRAGMA max_page_count = 1000000")
    store.changes()
    assert store.problem == ""
    assert told(store) == expected
    with Store.open(store.state_dir) as again:
        assert told(again) == expected


def test_what_memory_had_to_drop_stays_counted(tmp_path, monkeypatch):
    """Only the runs are lost, not what they found."""
    monkeypatch.setattr("canaryd.store.runs.BACKLOG", 2)
    (tmp_path / "state").write_text("in the way")
    with Store.open(tmp_path / "state") as store:
        for n in range(5):
            store.add_run(clean(f"r{n}", MORNING + n))
        (tmp_path / "state").unlink()
        store.changes()
        assert len(store.runs()) == 2
        assert told(store) == [(5, 500, 0)]


def test_pruning_forgets_runs_and_no_counts(tmp_path):
    """A year after the runs are gone their counts are there; parts of old days are added up, never across kinds."""
    with Store.open(tmp_path, now=lambda: NOW) as store:
        for hour in range(24):
            at = NOW - 350 * DAY + hour * HOUR
            store.add_run((wrong if hour % 3 == 1 else clean)(f"r{hour:02}", at))
        before = store.tallies("GPU-1")
        store.set_note(PASSED_NOTE, repr(NOW))
        with contextlib.closing(sqlite3.connect(store.path)) as db, db:
            db.execute("UPDATE runs SET stored = started")
        store.add_run(clean("now", NOW, device="GPU-9"))
        store.prune(NOW)
        after = store.tallies("GPU-1")
        assert {r.id for r in store.runs("GPU-1") if not r.wrong} == set()
        assert total(after) == total(before)
        assert len(after) < len(before)
        assert {t.lane for t in after} == {t.lane for t in before}
        store.prune(NOW)
        assert store.tallies("GPU-1") == after


def test_adding_up_keeps_the_edges(store):
    """In memory only the first and the newest mismatch divide the record."""
    for hour in range(12):
        store.add_run((wrong if hour in (2, 5, 8) else clean)(f"r{hour:02}", MORNING + hour * HOUR))
    found = merged(store.tallies("GPU-1"), {MORNING + 2 * HOUR, MORNING + 8 * HOUR})
    parts = [(t.runs, t.wrong) for t in sorted(found, key=lambda t: t.first)]
    assert parts == [(2, 0), (1, 1), (4, 0), (1, 1), (1, 1), (3, 0)]


def test_a_record_of_the_schema_before_is_counted(tmp_path):
    """Its runs are counted as if they had been when they were stored; verdicts, acknowledgements, baselines stay."""
    runs = [clean("a", MORNING), wrong("b", MORNING + HOUR), clean("c", MORNING + 2 * HOUR), clean("d", drill="x")]
    with contextlib.closing(sqlite3.connect(tmp_path / "canaryd.db")) as db, db:
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute("PRAGMA user_version = 10")
        for each in runs:
            db.execute(ADD_RUN, run_row(each, each.started))
        day = Day(device="GPU-1", day=int(MORNING // DAY) - 60, levels=(), tested=("exact_matmul",))
        db.execute(ADD_SUMMARY, (day.device, day.day, pack(day)))
    with Store.open(tmp_path) as store:
        assert store.problem == ""
        assert told(store)[1:] == [(1, 100, 0), (1, 4, 1), (1, 100, 0)]
        assert set(store.tested("GPU-1", 0.0)) == {("exact_matmul", day.day), ("exact_matmul", int(MORNING // DAY))}
        assert store.stacks() == {clean("x").stack_id: STACK}
        assert [run.id for run in store.runs()] == ["a", "b", "c"]


def test_how_siblings_computed_the_same_data_is_kept(store):
    """It is on record for the wrong results after a repair, and what rotted is no evidence."""
    key, other = SameKey("exact_matmul", 1, "a", own=True), SameKey("exact_matmul", 1, "b", own=False)
    same = Same({"GPU-2": Right(4, ("bfloat16/wide", "M=32", 7))}, frozenset({"GPU-3"}), frozenset({"GPU-4", "GPU-5"}))
    same = same._replace(outlasted=frozenset({"GPU-2", "GPU-4"}))
    assert store.set_compared("GPU-1", {key: Same(), other: same}, NOW)
    assert store.set_compared("GPU-1", {key: same}, NOW + 1)
    assert store.compared("GPU-1", 0.0) == {key: same, other: same}
    assert store.compared("GPU-1", NOW) == {key: same}
    store._file.execute("UPDATE compared SET body = '{\"alike\": 1}' WHERE own")
    assert store.compared("GPU-1", 0.0) == {other: same}


def test_what_is_learnt_of_siblings_while_the_disk_is_full_is_kept(store):
    """It is known at once, and on record when there is room again."""
    key, same = SameKey("exact_matmul", 1, "a", own=True), Same(alike=frozenset({"GPU-3"}))
    store._file.execute("PRAGMA max_page_count = 1")
    assert not [store.add_run(run(f"filler{n}", detail="x" * 3000)) for n in range(20)][-1]
    assert not store.set_compared("GPU-1", {key: same}, NOW)
    assert store.compared("GPU-1", 0.0) == {key: same}
    store._file.execute("PRAGMA max_page_count = 1000000")
    store.changes()
    assert store.problem == ""
    assert store.compared("GPU-1", 0.0) == {key: same}
    with Store.open(store.state_dir) as again:
        assert again.compared("GPU-1", 0.0) == {key: same}


ROTTEN = ["started = 'x'", "started = 9e999", "started = 1e30", "started = x'00'", "uploads = NULL"]


@pytest.mark.parametrize(
    "rotten", ["days SET day = 'x'", *(f"runs SET {number} WHERE number = 3" for number in ROTTEN)]
)
def test_a_rotten_number_does_not_keep_an_older_record_closed(tmp_path, rotten):
    """Its run is no evidence; the others are counted, and all are on record."""
    with contextlib.closing(sqlite3.connect(tmp_path / "canaryd.db")) as db, db:
        for statement in SCHEMA.split(";"):
            db.execute(statement)
        db.execute("PRAGMA user_version = 10")
        for n in range(4):
            db.execute(ADD_RUN, run_row(clean(f"r{n}", MORNING + n), MORNING + n))
        day = Day(device="GPU-1", day=int(MORNING // DAY) - 60, levels=(), tested=("exact_matmul",))
        db.execute(ADD_SUMMARY, (day.device, day.day, pack(day)))
        db.execute(f"UPDATE {rotten}")
    with Store.open(tmp_path) as store:
        assert (store.problem, store.unreadable) == ("", "")
        assert sum(runs for runs, _, _ in told(store)) in {3, 4}
        assert len(store.runs()) == 4


def test_how_siblings_computed_it_is_kept_while_wrong_results_are(tmp_path):
    """Nothing new is learnt of a fault that goes on for years; what is known of it must not go before it does."""
    with Store.open(tmp_path, now=lambda: NOW) as store:
        store.add_run(wrong("old", NOW - 500 * DAY, probe="p"))
        store.add_run(wrong("new", NOW - DAY))
        at = NOW - 450 * DAY
        known = {
            SameKey(probe, 1, wrong("x").stack_id, own=False): Same(alike=frozenset({"GPU-2"}))
            for probe in ("p", "exact_matmul")
        }
        store.set_compared("GPU-1", known, at)
        store.set_note(PASSED_NOTE, repr(NOW))
        store.prune(NOW)
        assert {key.probe for key in store.compared("GPU-1", 0.0)} == {"exact_matmul"}
