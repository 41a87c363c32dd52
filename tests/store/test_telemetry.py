"""Polls and events."""

import sqlite3

import pytest

from canaryd.formatting import DAY
from canaryd.model import Outcome
from canaryd.store import rows as store_rows
from canaryd.store import telemetry
from canaryd.store.retention import used
from canaryd.store.store import Store
from tests.store.made import NOW, counter, event, ids, run


def test_a_poll_is_kept_apart_from_runs_and_counts_all_since_the_last(store):
    """Polls never pass for runs; the counters say how many there were, kept or not."""
    assert store.add_poll(run("p1", probe="nvidia_telemetry"), {Outcome.COMPLETED: 20, Outcome.TIMED_OUT: 1})
    assert store.add_poll(run("p2", probe="host_telemetry", started=NOW + 1), {Outcome.COMPLETED: 1})
    assert store.runs() == []
    assert ids(store.polls("GPU-1")) == ["p1", "p2"]
    assert ids(store.polls("GPU-1", "nvidia_telemetry")) == ["p1"]
    assert ids(store.polls("GPU-1", since=NOW + 1)) == ["p2"]
    assert ids(store.polls("GPU-1", limit=1)) == ["p2"]
    assert counter(store, "probe_runs", device="GPU-1", probe="nvidia_telemetry", outcome="completed") == 20
    assert counter(store, "probe_runs", device="GPU-1", probe="nvidia_telemetry", outcome="timed_out") == 1


def test_equal_events_within_an_hour_are_one_with_a_count(store):
    """A failing part cannot fill the disk: first and last, the oldest before, the newest after, the sum."""
    hour = NOW // 3600 * 3600
    for i in range(5):
        at = hour + 10 * i
        assert store.add_events([event(first=at, last=at, count=2, before=str(i), after=str(i + 1), detail=f"d{i}")])
    store.add_events([event(first=hour + 3600, last=hour + 3600), event(name="79", first=hour, last=hour)])
    assert [(e.name, e.count, e.before, e.after, e.detail, e.last - e.first) for e in store.events()] == [
        ("79", 1, "", "", "", 0),
        ("31", 10, "0", "5", "d4", 40),
        ("31", 1, "", "", "", 0),
    ]
    assert store.events(device="GPU-2") == []
    assert len(store.events(since=hour + 3600)) == 1


def test_merged_events_keep_the_first_reading_and_the_newest_fields(store):
    """A reset that cleared an uncorrected error is not hidden by a later one; of Xid 154 the newest line holds."""
    key = {"kind": "uncorrected", "location": "dram"}
    reset = event(kind="reset", name="driver or device", reading="ecc_errors_total", labels=key)
    later = event(kind="reset", name="driver or device", reading="energy_joules_total", last=NOW + 1)
    store.add_events([reset, later])
    store.add_events([event(name="154", code=154, fields={"action": action}) for action in ("reset", "none")])
    found = {e.kind: e for e in store.events()}
    assert (found["reset"].reading, found["reset"].labels) == ("ecc_errors_total", key)
    assert (found["xid"].code, found["xid"].fields) == (154, {"action": "none"})


def test_trouble_that_a_law_counts_over_a_life_is_read_with_its_remedies(store):
    """Of every vendor and of the host; not what programs or heat did, nor what was corrected."""
    kinds = {"xid", "off-bus", "amdgpu", "intel", "aer", "mce", "last-boot", "boot", "reset", "change"}
    store.add_events(event(kind=kind) for kind in (*kinds, "oom", "thermal"))
    labels = ({"kind": "uncorrected"}, {"kind": "corrected"}, {"severity": "fatal"}, {"severity": "correctable"})
    store.add_events(event(kind="counter", name=f"c{n}", labels=of) for n, of in enumerate(labels))
    assert {e.kind for e in store.lasting(NOW + 1)} == {*kinds, "counter"}
    assert {e.name for e in store.lasting(NOW + 1) if e.kind == "counter"} == {"c0", "c2"}
    assert store.lasting(NOW) == []


def test_an_event_whose_facts_rotted_is_read_without_them(store):
    """What it was and when is still worth having."""
    store.add_events([event(code=31, labels={"a": "b"}, fields={"c": "d"})])
    for rotten in ("{", "[]", "7", None, b"\x00"):
        values = (rotten if rotten is not None else "", "x", rotten if rotten is not None else "null")
        store.commit(lambda db, v=values: db.execute("UPDATE events SET labels = ?, code = ?, fields = ?", v))
        assert store.events() == [event()]


def test_events_counters_and_notes_are_one_transaction(tmp_path):
    """What is counted and how far the log was read cannot part: a refused write leaves all three as they were."""
    with Store.open(tmp_path) as store:
        assert store.add_events([event()], [("xid_errors", {"device": "GPU-1", "xid": "31"}, 1)], {"log": "boot:7"})
        with pytest.raises(sqlite3.Error):
            store.commit(lambda db: (db.execute(store_rows.NOTE, ("log", "boot:8")), db.execute("nonsense")))
    with Store.open(tmp_path) as store:
        assert store.note("log") == "boot:7"
        assert store.note("nothing") == ""
        assert counter(store, "xid_errors", device="GPU-1", xid="31") == 1


def test_telemetry_waits_in_memory_while_the_disk_refuses(tmp_path, monkeypatch):
    """A full disk costs no event, no count and no position; only the oldest of very many polls go."""
    with Store.open(tmp_path) as store:
        store.add_events([event()], notes={"log": "a:1"})
        store._file.execute("PRAGMA query_only = 1")
        monkeypatch.setattr(telemetry, "WAITING_POLLS", 3)
        assert not store.add_events([event(count=4)], [("xid_errors", {"xid": "31"}, 4)], {"log": "a:5"})
        for i in range(5):
            assert not store.add_poll(run(f"p{i}"), {Outcome.COMPLETED: 1})
        assert store.problem
        assert store.note("log") == "a:5"
        assert sum(e.count for e in store.events()) == 5
        store._file.execute("PRAGMA query_only = 0")
        assert store.set_note("other", "x")
        assert not store.problem
    with Store.open(tmp_path) as store:
        assert store.note("log") == "a:5"
        assert [e.count for e in store.events()] == [5]
        assert ids(store.polls("GPU-1")) == ["p2", "p3", "p4"]
        assert counter(store, "xid_errors", xid="31") == 4
        assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 5


def test_polls_go_by_age_and_first_when_space_runs_out(tmp_path):
    """Old polls are forgotten; beyond the size they go before a single run does. The newest that completed stays."""
    with Store.open(tmp_path, now=lambda: NOW) as store:
        lost = {"outcome": Outcome.TIMED_OUT, "probe": "nvidia_telemetry"}
        store.add_poll(run("n0", started=NOW - 30 * DAY, probe="nvidia_telemetry"), {})
        store.add_poll(run("n1", started=NOW - 20 * DAY, **lost), {})
        for i in range(3):
            store.add_poll(run(f"p{i}", started=NOW - (20 - 10 * i) * DAY), {})
        store.add_run(run("r"))
        store.add_events([event(), event(name="old", first=NOW - 500 * DAY, last=NOW - 500 * DAY)])
        store.prune(NOW)
        assert ids(store.polls("GPU-1")) == ["n0", "p1", "p2"]
        assert [e.name for e in store.events()] == ["31"]
        store.max_bytes = used(store._file) - 1
        store.prune(NOW)
        assert ids(store.polls("GPU-1")) == ["n0", "p2"]
