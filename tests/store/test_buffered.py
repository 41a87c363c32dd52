"""Where there is no room or no right to write, the store works from memory."""

import contextlib
import os
import sqlite3
import subprocess
import tempfile
from pathlib import Path

import pytest

from canaryd.store import database
from canaryd.store import runs as store_runs
from canaryd.store.store import Store
from tests.store.made import NOW, WRITER, counter, device, failure, ids, junk, python, run, verdict


def test_a_full_disk_keeps_runs_in_memory_until_there_is_room(small_disk):
    """On a filesystem without a free byte nothing raises and nothing is lost; the backlog is written afterwards."""
    with Store.open(small_disk) as store:
        assert store.add_run(run("before"))
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 4096)
        added = [store.add_run(failure(f"during-{n}", detail=junk(3000).hex())) for n in range(30)]
        assert not all(added)
        assert store.problem
        assert len(store.runs()) == 31
        assert counter(store, "probe_mismatches", device="GPU-1", probe="exact_matmul") == 30
        (small_disk / "filler").unlink()
        assert store.add_run(run("after"))
        assert store.problem == ""
    with Store.open(small_disk) as store:
        assert ids(store.runs()) == ["before", *(f"during-{n}" for n in range(30)), "after"]
        assert counter(store, "probe_mismatches", device="GPU-1", probe="exact_matmul") == 30


def test_the_backlog_is_bounded_and_drops_failures_last(tmp_path, monkeypatch):
    """Beyond its bound the memory forgets the oldest successes first, says so, and keeps their counts."""
    monkeypatch.setattr(store_runs, "BACKLOG", 4)
    (tmp_path / "state").write_text("in the way")
    with Store.open(tmp_path / "state") as store:
        for name in ("f1", "s1", "f2", "s2", "s3", "f3"):
            store.add_run(failure(name) if name.startswith("f") else run(name))
        assert ids(store.runs()) == ["f1", "f2", "s3", "f3"]
        assert "dropped" in store.problems[0]
        for name in ("f4", "f5"):
            store.add_run(failure(name))
        assert ids(store.runs()) == ["f2", "f3", "f4", "f5"]
        assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 8


def test_a_large_backlog_is_written_in_parts(store, monkeypatch):
    """More runs than one transaction takes reach the disk in order."""
    names = [f"r{n:03}" for n in range(250)]
    store._file.execute("PRAGMA max_page_count = 1")
    for name in names:
        store.add_run(run(name))
    store._file.execute("PRAGMA max_page_count = 1000000")
    assert store.add_run(run("last"))
    with Store.open(store.state_dir) as other:
        assert ids(other.runs()) == [*names, "last"]


def test_a_state_directory_that_is_a_file_leaves_the_store_in_memory(tmp_path):
    """Nothing can be stored, everything works, and the problem names the path; once the way is free, all is written."""
    in_the_way = tmp_path / "state"
    in_the_way.write_text("a file")
    with Store.open(in_the_way) as store:
        assert str(in_the_way) in store.problem
        assert not store.add_run(run("a"))
        assert not store.see_device(device(), NOW)
        assert ids(store.runs()) == ["a"]
        in_the_way.unlink()
        assert store.add_run(run("b"))
        assert not store.problem
        assert ids(store.runs()) == ["a", "b"]
    with Store.open(in_the_way) as store:
        assert ids(store.runs()) == ["a", "b"]
        assert len(store.devices()) == 1


def test_a_reader_takes_no_answer_from_a_file_that_another_process_holds(tmp_path, monkeypatch):
    """It could be old, or half written: unknown beats both."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT", 0.1)
    with Store.open(tmp_path) as store:
        store.add_run(run())
    holder = sqlite3.connect(tmp_path / database.DATABASE, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("DELETE FROM runs")
    with contextlib.closing(Store.open(tmp_path, for_reading=True)) as reader:
        assert (reader.runs(), "locked" in reader.problem) == ([], True)
    holder.execute("ROLLBACK")
    holder.close()
    with contextlib.closing(Store.open(tmp_path, for_reading=True)) as reader:
        assert ([r.id for r in reader.runs()], reader.problem) == (["r1"], "")


def test_a_filesystem_remounted_read_only_and_back(small_disk):
    """A store opened where it may only read says so, answers, keeps new runs in memory, and writes when it may."""
    with Store.open(small_disk) as store:
        store.add_run(run("a"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with Store.open(small_disk) as store:
        assert "only be read" in store.problem
        assert not store.add_run(run("b"))
        assert not store.set_verdict(verdict())
        assert ids(store.runs()) == ["a", "b"]
        store.prune(NOW)
        with store.lock("GPU-1"):
            assert "no lock" in store.problems[0]
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert store.add_run(run("c"))
        assert not store.problem
    with Store.open(small_disk) as store:
        assert ids(store.runs()) == ["a", "b", "c"]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")
@pytest.mark.parametrize("daemon_runs", [True, False])
def test_another_user_reads_beside_the_daemon_and_after_it(daemon_runs):
    """Without write permission `status` sees every run that is stored, whether or not the daemon is there."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from canaryd.store.store import Store\n"
        "os.setuid(65534)\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        "print([r.id for r in store.runs()], store.add_run(store.runs()[0]), store.problem)\n"
    )
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        Path(place).chmod(0o755)
        daemon = stack.enter_context(Store.open(Path(place)))
        daemon.add_run(run("a"))
        if not daemon_runs:
            daemon.close()
            stack.pop_all()
        said, complaint = python("-c", code, place, WRITER.parents[2]).communicate(timeout=20)
        assert complaint == ""
        assert said.startswith("['a'] False ")
        assert "only be read" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can give files away")
def test_what_root_makes_belongs_to_the_owner_of_the_directory():
    """A check by root before the service has run leaves nothing that the service's user cannot write."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        state = Path(place)
        os.chown(state, 65534, 65533)
        store = stack.enter_context(Store.open(state))
        stack.enter_context(store.lock("GPU-1"))
        store.add_run(run("a"))
        made = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in state.rglob("*")}
    names = ("canaryd.db", "canaryd.db-wal", "canaryd.db-shm", "canaryd.db.lock", "locks", "GPU-1.lock")
    assert made == dict.fromkeys(names, (65534, 65533))
