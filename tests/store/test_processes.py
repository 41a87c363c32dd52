"""Several processes share a store; some are killed."""

import contextlib
import random
import sqlite3
import time

from canaryd.store.store import Store
from tests.store.made import WRITER, counter, ids, python, run


def test_kill_9_loses_no_run_whose_commit_returned(tmp_path):
    """Fifty writers are killed at random moments, the start included: each id they printed is there, and counted."""
    dice = random.Random(1)
    promised = []
    for cycle in range(50):
        writer = python(WRITER, tmp_path, cycle)
        if cycle % 2:
            promised += [writer.stdout.readline().strip()]
        time.sleep(dice.uniform(0, 0.06 if cycle % 2 else 0.15))
        writer.kill()
        with writer:  # not `communicate`: it would lose what `readline` has read beyond its line
            said, complaint = writer.stdout.read(), writer.stderr.read()
        assert complaint == ""
        promised += said.split()
    with Store.open(tmp_path) as store:
        stored = ids(store.runs())
        assert len(promised) > 50
        assert set(promised) <= set(stored)
        assert len(stored) <= len(promised) + 50, "at most one run of each writer was on disk but not yet printed"
        assert counter(store, "probe_runs", device="CPU-1", probe="exact_matmul", outcome="completed") == len(stored)
        assert store.problems == []


def test_processes_write_at_once_and_lose_nothing(tmp_path):
    """The daemon and two checks write at the same time, from the creation of the file on."""
    writers = [python(WRITER, tmp_path, name, 60) for name in ("a", "b")]
    with Store.open(tmp_path) as store:
        mine = [run(f"mine-{number}", device="CPU-1") for number in range(60)]
        added = [store.add_run(r) for r in mine]
        assert all(added)
        for writer in writers:
            _, complaint = writer.communicate(timeout=30)
            assert (writer.returncode, complaint) == (0, "")
        assert len(store.runs()) == 180
        assert counter(store, "probe_runs", device="CPU-1", probe="exact_matmul", outcome="completed") == 180


def test_a_lock_held_too_long_costs_only_time(tmp_path):
    """While another process keeps the database locked a run waits in memory; later it is written."""
    with Store.open(tmp_path) as store:
        store._file.execute("PRAGMA busy_timeout = 20")
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            assert not store.add_run(run("a"))
            assert "locked" in store.problem
            assert "waiting in memory: 1" in store.problem
        assert store.add_run(run("b"))
        assert store.problem == ""
    with Store.open(tmp_path) as store:
        assert ids(store.runs()) == ["a", "b"]
