"""Bits that rotted where no checksum covers them: each costs one value at most, and never the daemon."""

import json
import random

import pytest

from canaryd.config.settings import Config
from canaryd.judge.characterised import Met
from canaryd.judge.recordings.baseline import Baseline
from canaryd.judge.slower import Day
from canaryd.model import Ack, AckKind, Outcome
from canaryd.report import status
from canaryd.store import notes
from canaryd.store.database import LOST_NOTE, PASSED_NOTE
from canaryd.store.devices import VOID_NOTE
from canaryd.store.store import Store
from tests.store.made import NOW, count, device, event, failure, run, verdict

OF_CASE = {"device": "GPU-1", "probe": "exact_matmul", "probe_version": 1, "stack": {}}


def whole_record(path):
    """Make a database with something in every table, and return its bytes."""
    budget = json.dumps({"GPU-1": {"since": NOW, "text": "CPU load is 228 %"}})
    said = Ack(device="GPU-1", kind=AckKind.REPAIRED, at=NOW, reason="new board")
    with Store.open(path, now=lambda: NOW) as store:
        store.see_device(device(), NOW)
        for number in range(4):
            store.add_run(
                run(f"r{number}"),
                [Baseline(case="c", chain={}, **OF_CASE)],
                [Met(kind=("cuda", "H200"), used=NOW, **OF_CASE)],
            )
            store.add_run(failure(f"f{number}"))
            store.add_poll(run(f"p{number}"), {Outcome.COMPLETED: 1}, [event(name=str(number), labels={"a": "b"})])
        store.set_verdict(verdict())
        store.add_ack(said)
        store.void_acks([said])
        store.add_day(Day(device="GPU-1", day=20_000, levels=()))
        store.prune(NOW)
        for name, value in ((notes.BUDGET_NOTE, budget), (notes.RELEASE_NOTE, str(NOW)), (LOST_NOTE, f"{NOW!r} /x")):
            store.set_note(name, value)
    return (path / "canaryd.db").read_bytes()


def read_all(store):
    """Read everything as the daemon and the commands do."""
    (store.devices(), store.verdicts(), store.verdict("GPU-1"), store.verdict_history("GPU-1"), store.acks())
    (store.runs(), store.run("r1"), store.news(), store.failures("GPU-1", 9), store.kinds_of_failures("GPU-1"))
    (store.newest_clean("GPU-1", 1), store.tallies("GPU-1"), store.stacks(), store.baselines(), store.met())
    (store.days("GPU-1"), store.summed("GPU-1", 0.0), store.polls("GPU-1"), store.counters())
    (store.events(), store.dated(store.events()), store.passed, store.lost, notes.released_until(store, NOW))
    status.gather(store, Config(), NOW, daemon=True)
    store.set_present({"GPU-1"}, NOW)
    store.prune(NOW)
    store.add_run(run("new"))


def test_no_rotten_bit_ends_the_daemon(tmp_path):
    """Whatever one bit of the file becomes: the store opens, all that is left can be read, and new runs are stored."""
    good = whole_record(tmp_path)
    chance = random.Random(7)
    written = [place for place, byte in enumerate(good) if byte and place >= 100]
    for place in chance.choices(written, k=60):
        for old in tmp_path.glob("canaryd.db*"):
            old.unlink()
        rotten = bytearray(good)
        rotten[place] ^= 1 << chance.randrange(8)
        (tmp_path / "canaryd.db").write_bytes(rotten)
        with Store.open(tmp_path, now=lambda: NOW) as store:
            read_all(store)
            assert store.run("new"), place


def test_a_note_that_rotted_counts_as_absent_and_is_named(tmp_path):
    """No command and no daemon ends because of a note; the store says which one was damaged."""
    whole_record(tmp_path)
    names = (VOID_NOTE, LOST_NOTE, PASSED_NOTE, notes.RELEASE_NOTE, notes.BUDGET_NOTE)
    for rotten in ("\x10", "[1]", "nan", "1e300", '{"GPU-1": {}}'):
        with Store.open(tmp_path, now=lambda: NOW) as store:
            for name in names:
                store.set_note(name, rotten)
            assert (store.lost, store.passed, notes.released_until(store, 0.0)) == (None, 0.0, 0.0)
            assert not store.acks()[0].void
            assert status.gather(store, Config(), NOW, daemon=True).devices
            store.prune(NOW)
            damaged = [text for text in store.problems if "is damaged" in text]
            assert sorted(text.split('"')[1] for text in damaged) == sorted(names)


def test_an_event_whose_columns_rotted_is_read_in_its_place(store):
    """A column of another type than it should have has no value, and the others keep theirs."""
    store.add_events([event(name="a"), event(name="b")])
    store.commit(lambda db: db.execute("UPDATE events SET last = x'00', first = 1e300, kind = x'01' WHERE name = 'a'"))
    rotten, good = store.events()
    assert (rotten.name, rotten.first, rotten.last) == ("a", 0.0, 0.0)
    assert good == event(name="b")


def test_a_count_that_rotted_begins_anew(store):
    """The other counters stay, and the rotten one counts from 0 again."""
    count(store, "sxid_errors", device="GPU-1")
    count(store, "xid_errors", device="GPU-1")
    store.commit(lambda db: db.execute("UPDATE counters SET value = x'00' WHERE name = 'xid_errors'"))
    assert [name for name, _ in store.counters()] == ["sxid_errors"]


@pytest.mark.parametrize("for_reading", [False, True])
def test_a_schema_that_is_no_text_is_damage(tmp_path, for_reading):
    """The file is set aside and named; a reader, which may not do so, says what is wrong."""
    good = whole_record(tmp_path)
    rotten = good.replace(b"CREATE TABLE notes", b"CREATE TABL\xdf notes")
    assert rotten != good
    (tmp_path / "canaryd.db").write_bytes(rotten)
    with Store.open(tmp_path, now=lambda: NOW, for_reading=for_reading) as store:
        assert store.runs() == []
        assert ("damaged" if not for_reading else "cannot read") in " ".join([*store.problems, store.problem])
        assert bool(list(tmp_path.glob("*.corrupt-*Z"))) is not for_reading


@pytest.mark.parametrize(
    "column",
    [
        *("devices.first_seen", "devices.last_seen", "runs.stored", "runs.started", "runs.results", "runs.wrong"),
        *("polls.started", "verdicts.decided", "baselines.last", "acks.at", "days.day", "met.last"),
        *("counters.labels", "counters.name"),
    ],
)
def test_a_column_of_another_type_ends_nothing(tmp_path, column):
    """A rotten header of a row makes a blob of a number: all else is read and written as before."""
    table, _, name = column.partition(".")
    whole_record(tmp_path)
    with Store.open(tmp_path, now=lambda: NOW) as store:
        first = f"SELECT min(rowid) FROM {table}"
        store.commit(lambda db: db.execute(f"UPDATE {table} SET {name} = x'10' WHERE rowid = ({first})"))
    with Store.open(tmp_path, now=lambda: NOW) as store:
        read_all(store)
        assert store.run("new")


def test_a_counter_whose_labels_rotted_is_left_out(store):
    """Labels of other names than canaryd's are no evidence of a probe."""
    store.see_device(device(), NOW)
    store.add_run(run())
    store.commit(lambda db: db.execute("UPDATE counters SET labels = replace(labels, 'probe', 'prode')"))
    (shown,) = status.gather(store, Config(), NOW, daemon=True).devices
    assert shown.device == device()
