"""The store: what it promises about kills, full disks, damage, other processes and odd clocks."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from canaryd.facts import Comparison, Evidence, Exactness, Reading, Skipped
from canaryd.judge.characterised import Met
from canaryd.model import Cause, Device, Event, Finding, Outcome, Run, State, Verdict
from canaryd.store import database, devices, telemetry
from canaryd.store import rows as store_rows
from canaryd.store import runs as store_runs
from canaryd.store.clock import AGED_NOTE, DAY, REACHED_NOTE
from canaryd.store.database import StoreTooNew, use_wal
from canaryd.store.devices import DeviceRecord
from canaryd.store.locks import Busy
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.retention import Retention, used
from canaryd.store.store import Store

NOW = 1_790_000_000.0
WRITER = Path(__file__).with_name("kill_store.py")
EVIDENCE = Evidence(
    wrong=1, total=64, first=(((3, 5), "3f80", "3f81"),), bits={"0": 1}, zeroed=0, nonfinite=0, lines={}, pattern="one"
)


def comparison(**changes):
    fields = {"case": "bfloat16/cancel", "shape": "M=8 N=8 K=8", "seed": 7, "exactness": Exactness.UNIVERSAL}
    return Comparison(**{**fields, **changes})


WRONG = comparison(trials=4, wrong_trials=1, evidence=EVIDENCE)


def run(name="r1", **changes):
    fields = {"device": "GPU-1", "probe": "exact_matmul", "probe_version": 1, "started": NOW, "seconds": 1.5}
    return Run(id=name, **{**fields, "outcome": Outcome.COMPLETED, **changes})


def failure(name, **changes):
    return run(name, **{"comparisons": (WRONG,), **changes})


def device(uuid="GPU-1", **changes):
    return Device(
        **{"uuid": uuid, "backend": "cuda", "index": 0, "model": "H100", "detail": {"serial": "1"}, **changes}
    )


def verdict(state=State.HEALTHY, cause=Cause.NONE, decided=NOW, **changes):
    fields = {"device": "GPU-1", "findings": (), "since": NOW, **changes}
    return Verdict(state=state, cause=cause, decided=decided, **fields)


def event(**changes):
    fields = {"device": "GPU-1", "kind": "xid", "name": "31", "first": NOW, "last": NOW}
    return Event(**{**fields, **changes})


def ids(runs):
    return [r.id for r in runs]


def python(*args, **options):
    # -S: the writers need the standard library only, and start in half the time.
    command = [sys.executable, "-S", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def damage(path, offset, size):
    # From another process: closing a file here would drop the locks that SQLite holds in this one.
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-S", "-c", code, path, str(offset)], input=junk(size), check=True)


def junk(size):
    return random.Random(size).randbytes(size)


class Clock:
    """A clock that the test sets."""

    def __init__(self, now=NOW):
        self.now = now
        self.lived = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with Store.open(tmp_path / "state", now=clock) as opened:
        yield opened


def counter(store, name, **labels):
    return store.counters().get((name, frozenset(labels.items())), 0)


def passed(store, now):
    """Let time pass for a store as if it had been pruned hour by hour."""
    store.set_note(REACHED_NOTE, repr(now))
    store.set_note(AGED_NOTE, repr(now))


def fill(state_dir, runs, **options):
    """Write many runs in few transactions: they gather in memory while a file is in the way."""
    state_dir.write_text("in the way")
    with Store.open(state_dir, **options) as store:
        for each in runs:
            assert not store.add_run(each)
        state_dir.unlink()


# What is stored comes back


def test_a_run_comes_back_as_it_was(tmp_path):
    """Every field of a run survives the disk, absence and evidence included."""
    whole = run(
        readings=(Reading(name="duration", value=0.25, unit="seconds"), Reading(name="kernel", value="ampere")),
        comparisons=(WRONG, comparison()),
        skipped=(Skipped(case="fp8", reason="no such kernel"),),
        absent={"temperature": "no sensor"},
        stack={"torch": "2.13"},
        environment={"host": "näme"},
        detail="line\nline",
        repro="canaryd check",
        confirms="r0",
    )
    with Store.open(tmp_path) as store:
        assert store.add_run(whole)
    with Store.open(tmp_path) as store:
        assert store.runs() == [whole]
        assert store.run("r1") == whole
        assert store.run("r2") is None
        assert (store.problem, store.problems, store.writable) == ("", [], True)


def test_runs_are_narrowed_by_each_argument(store, clock):
    """Device, probe, time, drill, failure and limit narrow the answer; the newest is last."""
    store.add_run(run("a"))
    store.add_run(run("b", device="GPU-2"))
    store.add_run(failure("c", probe="exact_integer"))
    store.add_run(failure("d", drill="bit_flip"))
    clock.now += 10
    store.add_run(run("e", outcome=Outcome.CRASHED))
    store.add_run(run("f", outcome=Outcome.SKIPPED))
    assert ids(store.runs()) == ["a", "b", "c", "e", "f"]
    assert ids(store.runs(drill=True)) == ["d"]
    assert ids(store.runs(drill=None)) == ["a", "b", "c", "d", "e", "f"]
    assert ids(store.runs("GPU-2")) == ["b"]
    assert ids(store.runs("GPU-1", "exact_matmul")) == ["a", "e", "f"]
    assert ids(store.runs(since=NOW + 5)) == ["e", "f"]
    assert ids(store.runs(failed=True)) == ["c", "e"]
    assert ids(store.runs(failed=False)) == ["a", "b", "f"]
    assert ids(store.runs(limit=2)) == ["e", "f"]
    assert store.runs(limit=0) == []


def test_a_run_is_stored_and_counted_once(store):
    """Handing over the same run again changes nothing."""
    assert store.add_run(run())
    assert store.add_run(run())
    assert ids(store.runs()) == ["r1"]
    assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 1


def test_threads_share_a_store(store):
    """Four threads writing and reading at once lose nothing and count everything."""

    def work(name):
        for number in range(10):
            assert store.add_run(run(f"{name}-{number}"))
            store.runs(limit=1)

    threads = [threading.Thread(target=work, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.runs()) == 40
    assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 40


# Kills and other processes


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
        store._database.connection.execute("PRAGMA busy_timeout = 20")
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            assert not store.add_run(run("a"))
            assert "locked" in store.problem
            assert "waiting in memory: 1" in store.problem
        assert store.add_run(run("b"))
        assert store.problem == ""
    with Store.open(tmp_path) as store:
        assert ids(store.runs()) == ["a", "b"]


# No room, no right to write


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


def test_what_a_full_database_refused_is_part_of_every_answer(store, tmp_path):
    """Runs, counters, verdicts and devices answer from memory and disk together, and move to disk once they can."""
    store.add_run(run("old"))
    store.see_device(device(), NOW)
    store.set_verdict(verdict())
    store.count("worker_starts", {"device": "GPU-1"})
    before = store.verdict_history("GPU-1")
    (pages,) = store._database.connection.execute("PRAGMA page_count").fetchone()
    store._database.connection.execute(f"PRAGMA max_page_count = {pages}")
    number = 0
    while store.add_run(failure(f"new-{number}", detail=junk(3000).hex())):
        number += 1
    assert "full" in store.problem
    big = tuple(
        Finding(rule=junk(900).hex(), state=State.FAULTY, cause=Cause.HARDWARE, message=str(n)) for n in range(9)
    )
    assert not store.set_verdict(verdict(decided=NOW + 1))
    assert not store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, NOW + 2, findings=big))
    assert not store.see_device(device(index=5), NOW + 3)
    assert not store.see_device(device("GPU-2"), NOW + 3)
    assert not store.count("worker_starts", {"device": "GPU-1"}, 2)

    def check(store):
        assert ids(store.runs()) == ["old", *(f"new-{n}" for n in range(number + 1))]
        assert ids(store.runs(limit=1)) == [f"new-{number}"]
        assert store.run(f"new-{number}").wrong
        assert [v.decided for v in store.verdict_history("GPU-1")] == [NOW + 1, NOW + 2]
        assert store.verdicts()["GPU-1"].findings == big
        assert store.verdict("GPU-1") == store.verdicts()["GPU-1"]
        assert [(r.device.index, r.first_seen, r.last_seen) for r in store.devices()] == [
            (5, NOW, NOW + 3),
            (0, NOW + 3, NOW + 3),
        ]
        assert counter(store, "worker_starts", device="GPU-1") == 3
        assert counter(store, "probe_mismatches", device="GPU-1", probe="exact_matmul") == number + 1

    assert [v.decided for v in before] == [NOW]
    check(store)
    store._database.connection.execute("PRAGMA max_page_count = 1000000")
    assert store.count("worker_starts", {"device": "GPU-1"}, 0)
    assert store.problem == ""
    check(store)
    with Store.open(store.state_dir) as other:
        check(other)


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
    store._database.connection.execute("PRAGMA max_page_count = 1")
    for name in names:
        store.add_run(run(name))
    store._database.connection.execute("PRAGMA max_page_count = 1000000")
    assert store.add_run(run("last"))
    with Store.open(store.state_dir) as other:
        assert ids(other.runs()) == [*names, "last"]


def test_a_state_directory_that_is_a_file_leaves_the_store_in_memory(tmp_path):
    """Nothing can be stored, everything works, and the problem names the path; once the way is free, all is written."""
    in_the_way = tmp_path / "state"
    in_the_way.write_text("a file")
    with Store.open(in_the_way) as store:
        assert str(in_the_way) in store.problem
        assert not store.writable
        assert not store.add_run(run("a"))
        assert not store.see_device(device(), NOW)
        assert ids(store.runs()) == ["a"]
        in_the_way.unlink()
        assert store.add_run(run("b"))
        assert store.writable
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
        assert not store.writable
        assert "only be read" in store.problem
        assert not store.add_run(run("b"))
        assert not store.set_verdict(verdict())
        assert ids(store.runs()) == ["a", "b"]
        store.prune(NOW)
        with store.lock("GPU-1"):
            assert "no lock" in store.problems[0]
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert store.add_run(run("c"))
        assert (store.problem, store.writable) == ("", True)
    with Store.open(small_disk) as store:
        assert ids(store.runs()) == ["a", "b", "c"]


def test_an_empty_read_only_filesystem(small_disk):
    """Without a database and without the right to make one the store works from memory."""
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with Store.open(small_disk / "state") as store:
        assert store.problem
        assert not store.add_run(run())
        assert ids(store.runs()) == ["r1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")
@pytest.mark.parametrize("daemon_runs", [True, False])
def test_another_user_reads_beside_the_daemon_and_after_it(daemon_runs):
    """Without write permission `status` sees every run that is stored, whether or not the daemon is there."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from canaryd.store.store import Store\n"
        "os.setuid(65534)\n"
        "store = Store.open(Path(sys.argv[1]))\n"
        "print([r.id for r in store.runs()], store.writable, store.add_run(store.runs()[0]), store.problem)\n"
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
        assert said.startswith("['a'] False False ")
        assert "only be read" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can give files away")
def test_what_root_makes_belongs_to_the_owner_of_the_directory(tmp_path):
    """A check by root before the service has run leaves nothing that the service's user cannot write."""
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65533)
    with Store.open(state) as store, store.lock("GPU-1"):
        store.add_run(run("a"))
        made = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in state.rglob("*")}
    names = ("canaryd.db", "canaryd.db-wal", "canaryd.db-shm", "canaryd.db.lock", "locks", "GPU-1.lock")
    assert made == dict.fromkeys(names, (65534, 65533))


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root can give files away")
def test_root_gives_nothing_away_that_it_did_not_make(tmp_path):
    """Neither a file that was there nor the target of a link that somebody has put in the way."""
    os.chown(tmp_path, 65534, 65533)
    (tmp_path / "there").touch()
    (tmp_path / "canaryd.db.new").symlink_to(tmp_path / "there")
    (tmp_path / "canaryd.db.lock").symlink_to(tmp_path / "there")
    with Store.open(tmp_path) as store:
        assert store.add_run(run("a"))
    assert (tmp_path / "there").stat().st_uid == 0


# Damage


@pytest.mark.parametrize("content", [b"not a database at all " * 400, junk(8192)])
def test_a_file_that_is_no_database_is_set_aside(tmp_path, content):
    """Garbage in the header: the file is kept under a new name, reported, and a fresh store works."""
    (tmp_path / "canaryd.db").write_bytes(content)
    with Store.open(tmp_path, now=lambda: NOW) as store:
        assert store.add_run(run())
        aside = tmp_path / "canaryd.db.corrupt-20260921T141320Z"
        assert aside.read_bytes() == content
        assert str(aside) in store.problems[0]
        assert store.problem == ""


def test_nothing_set_aside_is_ever_overwritten(tmp_path):
    """Two damaged files in the same second are both kept."""
    for content in (b"first " * 999, b"second " * 999):
        (tmp_path / "canaryd.db").write_bytes(content)
        Store.open(tmp_path, now=lambda: NOW).close()
    kept = sorted(p.read_bytes()[:6] for p in tmp_path.glob("*.corrupt-*"))
    assert kept == [b"first ", b"second"]


def test_a_damaged_header_is_found_at_opening(tmp_path):
    """A real database whose first page rotted is set aside with its log."""
    writer = python(WRITER, tmp_path, "a")
    writer.stdout.readline()
    writer.kill()
    writer.communicate()
    log = (tmp_path / "canaryd.db-wal").read_bytes()
    damage(tmp_path / "canaryd.db", 0, 4096)
    damage(tmp_path / "canaryd.db-wal", 0, len(log))
    with Store.open(tmp_path, now=lambda: NOW) as store:
        assert store.runs() == []
        assert store.add_run(run())
    names = {p.name.replace("canaryd.db.corrupt-20260921T141320Z", "X") for p in tmp_path.glob("*.corrupt-*")}
    assert {"X", "X-wal"} <= names


def test_damage_in_the_middle_is_found_at_opening(tmp_path):
    """Rotten pages behind a sound header: the file is set aside when it is opened."""
    fill(tmp_path / "s", [run(f"r{n}", detail=junk(n).hex()) for n in range(300)])
    damage(tmp_path / "s/canaryd.db", 40 * 4096, 20 * 4096)
    with Store.open(tmp_path / "s") as store:
        assert "damaged" in store.problems[0]
        assert store.runs() == []
        assert store.add_run(run())
    assert len(list((tmp_path / "s").glob("*.corrupt-*Z"))) == 1


@pytest.mark.parametrize("touch", [lambda s: s.runs(), lambda s: s.add_run(run("new")), lambda s: s.prune(NOW)])
def test_damage_in_the_middle_is_found_at_work(tmp_path, touch):
    """Pages that rot while the store is open: whoever meets them, reader or writer, carries on with a fresh file."""
    fill(tmp_path / "s", [run(f"r{n}", detail=junk(n).hex()) for n in range(300)])
    with Store.open(tmp_path / "s", now=lambda: NOW + 30 * DAY, keep=Retention(successes=0)) as store:
        store._database.connection.execute("PRAGMA shrink_memory")
        damage(store.path, 8192, 60 * 4096)
        touch(store)
        assert "damaged" in store.problems[0]
        assert store.add_run(run("after"))
        assert "after" in ids(store.runs())
        assert store.problem == ""
    assert (tmp_path / "s/canaryd.db.corrupt-20261021T141320Z").stat().st_size > 60 * 4096


def test_every_process_follows_to_the_fresh_file(tmp_path):
    """When one process sets a damaged file aside, the others write to the new one, and none harms the new log."""
    fill(tmp_path / "s", [run(f"r{n}", detail=junk(n).hex()) for n in range(300)])
    with Store.open(tmp_path / "s") as finder:
        with Store.open(tmp_path / "s") as other:
            finder._database.connection.execute("PRAGMA shrink_memory")
            damage(finder.path, 8192, 60 * 4096)
            assert finder.runs() == []
            assert finder.add_run(run("a"))
            assert other.add_run(run("b"))
        assert finder.add_run(run("c"))
        assert ids(finder.runs()) == ["a", "b", "c"]
    with Store.open(tmp_path / "s") as store:
        assert ids(store.runs()) == ["a", "b", "c"]


def test_a_removed_database_is_begun_anew(store):
    """An operator who deletes the file under a running daemon loses the past, not the future."""
    store.add_run(run("a"))
    for path in store.state_dir.glob("canaryd.db*"):
        path.unlink()
    assert store.add_run(run("b"))
    with Store.open(store.state_dir) as other:
        assert ids(other.runs()) == ["b"]


def test_a_removed_database_counts_as_changed(store, monkeypatch):
    """The fresh file often has the inode of the one that was removed; who asked before must look again all the same."""
    monkeypatch.setattr(database, "_identity", lambda path: (1, 2) if path.exists() else None)
    store.set_note("opened", "since")
    assert store.add_run(run("a"))
    assert store.changed_elsewhere()
    assert not store.changed_elsewhere()
    for path in store.state_dir.glob("canaryd.db*"):
        path.unlink()
    assert store.changed_elsewhere()
    assert not store.changed_elsewhere()


def test_a_file_replaced_during_a_write_gets_the_run_too(store, monkeypatch):
    """A commit into a file that was set aside meanwhile is not a promise: the run goes into the new file as well."""
    real = store_rows.add_verdict

    def replaced_meanwhile(db, row):
        real(db, row)
        if aside.exists():
            return
        store.path.rename(aside)
        for suffix in ("-wal", "-shm"):
            Path(f"{store.path}{suffix}").rename(f"{aside}{suffix}")

    aside = store.state_dir / "aside"
    monkeypatch.setattr(devices, "add_verdict", replaced_meanwhile)
    assert store.set_verdict(verdict())
    with Store.open(store.state_dir) as other:
        assert other.verdicts() == {"GPU-1": verdict()}


def test_a_rotten_run_is_passed_over_and_named(store):
    """A run whose bytes changed fails its checksum: it is left out, named, and costs no other run."""
    for name in ("a", "b", "c"):
        store.add_run(run(name))
    (body,) = store._database.connection.execute("SELECT body FROM runs WHERE id = 'b'").fetchone()
    store._database.connection.execute("UPDATE runs SET body = ? WHERE id = 'b'", (body[:-1] + bytes([body[-1] ^ 1]),))
    assert ids(store.runs()) == ["a", "c"]
    assert store.run("b") is None
    assert "Run b" in store.problems[0]


# Telemetry


def test_a_poll_is_kept_apart_from_runs_and_counts_all_since_the_last(store):
    """Polls never pass for runs; the counters say how many there were, kept or not."""
    assert store.add_poll(run("p1", probe="nvidia_telemetry"), {Outcome.COMPLETED: 20, Outcome.TIMED_OUT: 1})
    assert store.add_poll(run("p2", probe="host_telemetry", started=NOW + 1), {Outcome.COMPLETED: 1})
    assert store.runs(drill=None) == []
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


@pytest.mark.parametrize(
    ("texts", "facts"),
    [
        ({"kind": "xid", "name": "31"}, {"code": 31}),
        (
            {"kind": "xid", "name": "145 RLW fatal reset", "detail": "NVRM: x {intr_info=0x7,unit=RLW}"},
            {"code": 145, "fields": {"intr_info": "0x7", "unit": "RLW"}},
        ),
        (
            {"kind": "xid", "name": "154", "detail": "a {b} {action=reset}"},
            {"code": 154, "fields": {"action": "reset"}},
        ),
        ({"kind": "sxid", "name": "20034 fatal"}, {"code": 20034, "fields": {"severity": "fatal"}}),
        ({"kind": "sxid", "name": "20034"}, {"code": 20034}),
        ({"kind": "xid", "name": "soup"}, {}),
        ({"kind": "edac", "name": "corrected", "detail": "EDAC {dimm=A1}"}, {"fields": {"dimm": "A1"}}),
        ({"kind": "off-bus", "name": "driver", "detail": "GPU is lost"}, {}),
        (
            {"kind": "counter", "name": "x_total{kind=a,link=3}"},
            {"reading": "x_total", "labels": {"kind": "a", "link": "3"}},
        ),
        ({"kind": "flag", "name": "clock_source", "before": "tsc"}, {"reading": "clock_source"}),
        (
            {"kind": "reset", "name": "driver or device", "before": "ecc_errors_total{kind=uncorrected} 2"},
            {"reading": "ecc_errors_total", "labels": {"kind": "uncorrected"}},
        ),
        ({"kind": "reset", "name": "driver or device"}, {}),
        (
            {"kind": "condition", "name": "throttle hw_thermal"},
            {"reading": "throttle_active", "labels": {"reason": "hw_thermal"}},
        ),
        ({"kind": "condition", "name": "hot", "detail": "core at 90 °C"}, {}),
        ({"kind": "change", "name": "driver", "detail": "driver: 1 → {2}"}, {}),
    ],
)
def test_an_event_that_0_1_0_stored_has_the_facts_of_its_texts_and_no_more(tmp_path, texts, facts):
    """Its columns were texts for people: a migration takes the facts out of them, once."""
    row = {
        "device": "GPU-1",
        "name": "",
        "first": NOW,
        "last": NOW,
        "count": 2.0,
        "before": "",
        "after": "",
        "detail": "",
    }
    row |= texts
    with Store.open(tmp_path, migrations={5: MIGRATIONS[5]}) as old:
        columns = f"INSERT INTO events (hour, {', '.join(row)}) VALUES (1, {', '.join('?' * len(row))})"
        old._commit(lambda db: db.execute(columns, tuple(row.values())))
    with Store.open(tmp_path) as store:
        assert store.events() == [Event(**{**row, **facts})]


def test_an_event_whose_facts_rotted_is_read_without_them(store):
    """What it was and when is still worth having."""
    store.add_events([event(code=31, labels={"a": "b"}, fields={"c": "d"})])
    for rotten in ("{", "[]", "7", None, b"\x00"):
        values = (rotten if rotten is not None else "", "x", rotten if rotten is not None else "null")
        store._commit(lambda db, v=values: db.execute("UPDATE events SET labels = ?, code = ?, fields = ?", v))
        assert store.events() == [event()]


def test_events_counters_and_notes_are_one_transaction(tmp_path):
    """What is counted and how far the log was read cannot part: a refused write leaves all three as they were."""
    with Store.open(tmp_path) as store:
        assert store.add_events([event()], [("xid_errors", {"device": "GPU-1", "xid": "31"}, 1)], {"log": "boot:7"})
        with pytest.raises(sqlite3.Error):
            store._commit(lambda db: (db.execute(store_rows.NOTE, ("log", "boot:8")), db.execute("nonsense")))
    with Store.open(tmp_path) as store:
        assert store.note("log") == "boot:7"
        assert store.note("nothing") == ""
        assert counter(store, "xid_errors", device="GPU-1", xid="31") == 1


def test_telemetry_waits_in_memory_while_the_disk_refuses(tmp_path, monkeypatch):
    """A full disk costs no event, no count and no position; only the oldest of very many polls go."""
    with Store.open(tmp_path) as store:
        store.add_events([event()], notes={"log": "a:1"})
        store._database.connection.execute("PRAGMA query_only = 1")
        monkeypatch.setattr(telemetry, "WAITING_POLLS", 3)
        assert not store.add_events([event(count=4)], [("xid_errors", {"xid": "31"}, 4)], {"log": "a:5"})
        for i in range(5):
            assert not store.add_poll(run(f"p{i}"), {Outcome.COMPLETED: 1})
        assert store.problem
        assert store.note("log") == "a:5"
        assert sum(e.count for e in store.events()) == 5
        store._database.connection.execute("PRAGMA query_only = 0")
        assert store.set_note("other", "x")
        assert not store.problem
    with Store.open(tmp_path) as store:
        assert store.note("log") == "a:5"
        assert [e.count for e in store.events()] == [5]
        assert ids(store.polls("GPU-1")) == ["p2", "p3", "p4"]
        assert counter(store, "xid_errors", xid="31") == 4
        assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 5


def test_polls_go_by_age_and_first_when_space_runs_out(tmp_path):
    """Old polls are forgotten; beyond the size all polls go before a single run does."""
    with Store.open(tmp_path) as store:
        for i in range(3):
            store.add_poll(run(f"p{i}", started=NOW - i * 10 * DAY), {})
        store.add_run(run("r"))
        store.add_events([event(), event(name="old", first=NOW - 500 * DAY, last=NOW - 500 * DAY)])
        store.prune(NOW)
        assert ids(store.polls("GPU-1")) == ["p0", "p1"]
        assert [e.name for e in store.events()] == ["31"]
        store.max_bytes = used(store._database.connection) - 1
        store.prune(NOW)
        assert store.polls("GPU-1") == []


# Versions


def add_note(db):
    db.execute("ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'none'")


def half_way(db):
    db.execute("ALTER TABLE runs ADD COLUMN half TEXT")
    raise sqlite3.OperationalError("no")


def test_a_database_is_migrated_and_keeps_what_it_has(tmp_path):
    """A version becomes the next, its runs stay, and new ones go beside them."""
    with Store.open(tmp_path) as store:
        store.add_run(run("a"))
    with Store.open(tmp_path, migrations={**MIGRATIONS, 99: add_note}) as store:
        assert store.add_run(run("b"))
        assert ids(store.runs()) == ["a", "b"]
        assert store._database.connection.execute("SELECT note FROM runs").fetchall() == [("none",), ("none",)]
        assert store._database.connection.execute("PRAGMA user_version").fetchone() == (99,)


def test_every_earlier_version_is_migrated(tmp_path):
    """A database as each earlier release left it opens, keeps its runs, and takes polls and events."""
    for version in [*MIGRATIONS][:-1]:
        state = tmp_path / str(version)
        with Store.open(state, migrations={v: m for v, m in MIGRATIONS.items() if v <= version}) as old:
            columns = [*map(str.strip, store_rows.RUN.split(","))][:12]  # those of version 1
            statement = f"INSERT INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * 12)})"
            for made in (run("a"), run("b", outcome=Outcome.CRASHED)):
                row = store_rows.run_row(made, NOW)[:12]
                old._commit(lambda db: db.execute(statement, row))  # noqa: B023 - called at once
        with Store.open(state) as new:
            assert ids(new.runs()) == ["a", "b"]
            assert ids(new.failures(new.runs()[0].device, 1)) == ["b"]
            read, counted = new.older_clean(new.runs()[0].device, 0, 1)
            assert (ids(read), counted) == (["a"], []), "what has no columns is read whole"
            assert new.add_poll(run("p"), {})
            assert new.add_events([event()])
            assert not new.problem


def test_a_migration_that_fails_leaves_the_old_version(tmp_path):
    """Half a migration is no migration: version and tables are as before, and the older code goes on."""
    with Store.open(tmp_path) as store:
        store.add_run(run("a"))
    with contextlib.closing(Store(tmp_path, (time.time, time.monotonic), 10**9, Retention(), MIGRATIONS)) as store:
        store._database.migrations = {**MIGRATIONS, 99: half_way}
        assert not store.add_run(run("b"))
        assert store.problem
    with Store.open(tmp_path) as store:
        assert ids(store.runs()) == ["a"]
        assert "half" not in [row[1] for row in store._database.connection.execute("PRAGMA table_info(runs)")]


def test_a_newer_database_is_refused_and_left_alone(tmp_path):
    """A database of a newer canaryd raises a message that says what to do; not a byte of it changes."""
    Store.open(tmp_path, migrations={**MIGRATIONS, 99: add_note}).close()
    before = (tmp_path / "canaryd.db").read_bytes()
    with pytest.raises(
        StoreTooNew,
        match=rf"version 99 of the store, this one knows {max(MIGRATIONS)}.*upgrade canaryd",
    ):
        Store.open(tmp_path)
    assert (tmp_path / "canaryd.db").read_bytes() == before
    assert list(tmp_path.glob("*.corrupt-*")) == []


def test_a_database_upgraded_under_a_running_daemon(tmp_path):
    """A newer `canaryd check` migrates the file: the older daemon writes nothing more into it, says why, and lives."""
    with Store.open(tmp_path) as store:
        store.add_run(run("a"))
        Store.open(tmp_path, migrations={**MIGRATIONS, 99: add_note}).close()
        assert not store.add_run(run("b"))
        assert "newer canaryd" in store.problem
        assert ids(store.runs()) == ["a", "b"]


def test_a_filesystem_without_write_ahead_log_is_named():
    """Where SQLite cannot have a log beside the file the store says what that means."""
    with tempfile.TemporaryDirectory() as place:
        # A locking method without shared memory, as on some network filesystems.
        db = sqlite3.connect(f"file:{place}/x.db?vfs=unix-dotfile", uri=True, isolation_level=None)
        with contextlib.closing(db):
            assert "journal mode: delete" in use_wal(db)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        assert "journal mode: memory" in use_wal(db)


# Clocks


def test_a_clock_set_back_hides_no_run(tmp_path, clock):
    """Runs keep the order in which they came, and `since` finds those made while the clock was wrong."""
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(run("a", started=clock.now))
        clock.now -= 10 * 365 * DAY
        store.add_run(failure("b", started=clock.now))
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(failure("c", started=clock.now))
        clock.now = NOW + DAY
        store.add_run(run("d", started=clock.now))
        assert ids(store.runs()) == ["a", "b", "c", "d"]
        assert ids(store.runs(since=NOW - 1)) == ["a", "b", "c", "d"]
        assert ids(store.runs(since=NOW + 1)) == ["d"]
        store.prune(NOW + 2 * DAY)
        assert ids(store.runs()) == ["a", "b", "c", "d"]


def test_pruning_with_a_clock_set_back_forgets_nothing(store):
    """A clock at the epoch makes nothing old."""
    store.add_run(run("a"))
    store.prune(0.0)
    assert ids(store.runs()) == ["a"]


def test_a_clock_set_back_takes_the_confirmed_time_back_after_a_day_without_a_jump(tmp_path, clock):
    """Until then a wrong result is dated by the confirmed time, and not beside one of a month ago."""
    with Store.open(tmp_path, now=clock, monotonic=lambda: clock.lived) as store:

        def live(hours: int) -> None:
            for _ in range(hours):
                clock.now, clock.lived = clock.now + 3600, clock.lived + 3600
                store.prune(clock.now)

        live(48)
        before, back = store.reached, 40 * DAY
        assert before == clock.now
        clock.now -= back
        live(23)
        assert store.reached == before
        live(3)
        assert store.reached == pytest.approx(clock.now, abs=3600)


# Devices, verdicts, counters


def test_devices_are_remembered_when_they_are_gone(store):
    """First and last sight, presence, and the newest description of each device."""
    store.see_device(device(), NOW)
    store.see_device(device("GPU-2"), NOW)
    store.see_device(device(index=4), NOW + 5)
    store.set_present(["GPU-2"], NOW + 9)
    assert store.devices() == [
        DeviceRecord(device=device(index=4), first_seen=NOW, last_seen=NOW + 5, present=False),
        DeviceRecord(device=device("GPU-2"), first_seen=NOW, last_seen=NOW + 9, present=True),
    ]


def test_a_verdict_makes_history_when_it_changes(tmp_path):
    """The same state and cause again replace the last entry; drills have a history of their own."""
    finding = Finding(rule="exact-mismatch", state=State.SUSPECT, cause=Cause.UNDETERMINED, message="m", runs=("r1",))
    suspect = verdict(State.SUSPECT, Cause.UNDETERMINED, NOW + 2, findings=(finding,))
    later = verdict(State.SUSPECT, Cause.UNDETERMINED, NOW + 3)
    drilled = verdict(State.FAULTY, Cause.HARDWARE, NOW + 4, drill=True)
    with Store.open(tmp_path) as store:
        for each in (verdict(), verdict(decided=NOW + 1), suspect, later, drilled):
            assert store.set_verdict(each)
        assert store.set_verdict(verdict(device="GPU-2"))
    with Store.open(tmp_path) as store:
        assert store.verdict_history("GPU-1") == [verdict(decided=NOW + 1), later]
        assert store.verdicts() == {"GPU-1": later, "GPU-2": verdict(device="GPU-2")}
        assert store.verdict("GPU-1") == later
        assert store.verdict("GPU-3") is None


def test_counters_outlive_restarts_and_pruned_runs(tmp_path, clock):
    """Outcomes, mismatches and trials are counted with the run; a series exists before its first mismatch."""
    of = {"device": "GPU-1", "probe": "exact_matmul"}
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(run("a", comparisons=(comparison(trials=8),)))
        assert store.counters()["probe_mismatches", frozenset(of.items())] == 0
        store.add_run(failure("b"))
        store.add_run(run("c", outcome=Outcome.TIMED_OUT))
        store.count("odd", {"text": "a=b&c d\n", "empty": ""}, 0.5)
        passed(store, NOW + 1000 * DAY)
        store.prune(NOW + 1000 * DAY)
        assert store.runs() == []
    with Store.open(tmp_path, now=clock) as store:
        assert counter(store, "probe_runs", **of, outcome="completed") == 2
        assert counter(store, "probe_runs", **of, outcome="timed_out") == 1
        assert counter(store, "probe_mismatches", **of) == 1
        assert counter(store, "probe_trials", **of) == 12
        assert counter(store, "odd", text="a=b&c d\n", empty="") == 0.5


def test_drills_are_counted_apart(store):
    """An injected fault touches no counter of the real world."""
    store.add_run(failure("a", drill="bit_flip"))
    assert {name for name, _ in store.counters()} == {"drill_runs", "drill_mismatches"}
    assert counter(store, "drill_runs", device="GPU-1", probe="exact_matmul") == 1
    assert counter(store, "drill_mismatches", device="GPU-1", probe="exact_matmul") == 1


# Pruning


def test_failures_are_kept_longer_than_successes_and_drills_shortest(store):
    """A wrong comparison or a lost worker is a failure; a skipped run is not; a drill goes first."""
    store.add_run(run("ok"))
    store.add_run(run("skipped", outcome=Outcome.SKIPPED))
    store.add_run(failure("wrong"))
    store.add_run(run("crashed", outcome=Outcome.CRASHED))
    store.add_run(failure("drill", drill="bit_flip"))
    store.prune(NOW + 0.9 * DAY)
    assert len(store.runs(drill=None)) == 5
    passed(store, NOW + 1.1 * DAY)
    store.prune(NOW + 1.1 * DAY)
    assert ids(store.runs(drill=None)) == ["ok", "skipped", "wrong", "crashed"]
    passed(store, NOW + 14.1 * DAY)
    store.prune(NOW + 14.1 * DAY)
    assert ids(store.runs()) == ["wrong", "crashed"]
    passed(store, NOW + 401 * DAY)
    store.prune(NOW + 401 * DAY)
    assert store.runs() == []


def test_a_clock_years_ahead_deletes_no_failure_however_long_it_stands(tmp_path, clock):
    """After a day the clock is believed, and what it says is far older than failures are kept: they stay."""
    with Store.open(tmp_path, now=clock, monotonic=lambda: clock.lived) as store:
        store.add_run(failure("wrong"))
        store.set_verdict(verdict(State.FAULTY))
        store.set_verdict(verdict(decided=NOW + 1))
        store.prune(NOW)
        for hour in range(10 * 24):
            clock.now, clock.lived = NOW + 800 * DAY + hour * 3600, hour * 3600
            store.prune(clock.now)
        assert store.reached > NOW + 800 * DAY
        assert ids(store.runs()) == ["wrong"]
        assert len(store.verdict_history("GPU-1")) == 2


def test_old_verdicts_go_but_never_the_newest(store):
    """History is kept as long as failures; the last word on a device for ever."""
    store.set_verdict(verdict(State.SUSPECT))
    store.set_verdict(verdict(decided=NOW + 1))
    store.set_verdict(verdict(State.FAULTY, drill=True))
    store.prune(NOW + 500 * DAY)
    assert store.verdict_history("GPU-1") == [verdict(decided=NOW + 1)]


def test_the_size_bound_costs_successes_first(tmp_path):
    """The file shrinks below its bound; the oldest successes went, and every failure is still there."""
    rows = [(failure if n % 10 == 0 else run)(f"r{n:04}", detail=junk(2000 + n).hex()) for n in range(1000)]
    fill(tmp_path / "s", rows, now=lambda: NOW)
    with Store.open(tmp_path / "s", max_bytes=2_000_000) as store:
        assert store.path.stat().st_size > 2_000_000
        store.prune(NOW)
        assert store.path.stat().st_size < 2_000_000
        kept = store.runs()
        assert ids(store.runs(failed=True)) == [r.id for r in rows[::10]]
        assert len(kept) >= 400, "no more went than needed"
        assert kept[-1].id == "r0999"
        assert store.problems == []


def test_the_size_bound_costs_failures_only_when_nothing_else_is_left(tmp_path):
    """The oldest failures go last, and the store says so."""
    rows = [failure(f"f{n:03}", detail=junk(2000 + n).hex()) for n in range(400)]
    fill(tmp_path / "s", [*rows, run("success")], now=lambda: NOW)
    with Store.open(tmp_path / "s", max_bytes=700_000) as store:
        store.prune(NOW)
        assert store.path.stat().st_size < 700_000
        assert ids(store.runs()) == [r.id for r in rows[-len(store.runs()) :]]
        assert len(store.runs()) >= 100
        assert "raise store.max_size" in store.problems[0]


# Locks

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from canaryd.store.store import Store
with Store.open(Path(sys.argv[2])).lock("GPU-1"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(store):
    process = python("-c", HOLDER, WRITER.parents[2], store.state_dir)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_held_device_names_its_holder(store, holder):
    """`Busy` gives the process and its command; other devices are free."""
    with pytest.raises(Busy) as caught, store.lock("GPU-1"):
        pass
    assert f"GPU-1.lock: still held after 0 s by pid {holder.pid}: " in str(caught.value)
    assert str(store.state_dir) in str(caught.value)
    with store.lock("GPU-2"), store.lock("../odd name"):
        pass
    assert store.problems == []


def test_the_lock_of_a_killed_holder_is_free_at_once(store, holder):
    """The waiting process is told once whom it waits for, and goes on when that one is killed."""
    told = []

    def on_wait(text):
        told.append(text)
        holder.send_signal(signal.SIGKILL)

    with store.lock("GPU-1", timeout=20, on_wait=on_wait):
        assert [text.split(":")[0] for text in told] == [f"pid {holder.pid}"]


def test_a_lock_excludes_threads_of_the_same_process(store):
    """The daemon's own threads do not share a device either; after its release the lock can be taken again."""
    with store.lock("GPU-1"), pytest.raises(Busy, match=f"pid {os.getpid()}"), store.lock("GPU-1", timeout=0.1):
        pass
    with store.lock("GPU-1"):
        pass


def test_an_error_under_the_lock_is_not_taken_for_a_lock_problem(store):
    """What goes wrong while the device is held reaches the caller as it is, and the lock is released."""
    with pytest.raises(OSError, match="mine"), store.lock("GPU-1"):
        raise OSError("mine")
    with store.lock("GPU-1"):
        assert store.problems == []


# --- Classes of exact cases ------------------------------------------------------------------------------------------


def met(device="GPU-1", stack="580", at=NOW, names=("bfloat16/full/square/nt",), **fields):
    """Return the classes that a device met on a stack."""
    classes = dict.fromkeys(names, at)
    common = {"kind": ("cuda", "H200"), "probe": "exact_matmul", "probe_version": 1, "stack": {"driver": stack}}
    return Met(device=device, classes=classes, used=at, **{**common, **fields})


def test_classes_that_were_met_are_merged_by_device_probe_and_stack(tmp_path):
    """Two processes add what each has seen: nothing is lost, and another driver is another record."""
    with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        assert store.set_met([met(), met(stack="590")])
        assert other.set_met([met(names=("float16/full/decode/nn",), at=NOW + 60, accepted={"x": "shown to be exact"})])
        found = {m.line: m for m in store.met() if m.device == "GPU-1"}
        assert len(found) == 2
        both = found[met().line]
        assert set(both.classes) == {"bfloat16/full/square/nt", "float16/full/decode/nn"}
        assert (both.used, both.accepted) == (NOW + 60, {"x": "shown to be exact"})
        assert set(found[met(stack="590").line].classes) == {"bfloat16/full/square/nt"}


def test_classes_are_stored_with_the_run_that_met_them(tmp_path):
    """One transaction, and they survive the run."""
    clock = [NOW]
    with Store.open(tmp_path, now=lambda: clock[0], keep=Retention(successes=DAY)) as store:
        store.add_run(run("a"), met=[met()])
        for hour in range(0, 2 * 24, 2):
            clock[0] = NOW + hour * 3600
            store.prune(clock[0])
        assert store.runs() == []
        assert [m.line for m in store.met()] == [met().line]


def test_classes_of_software_that_no_device_runs_any_more_go_with_the_failures(tmp_path):
    """What was imported or accepted stays: nobody could learn it again here."""
    clock = [NOW]
    with Store.open(tmp_path, now=lambda: clock[0], keep=Retention(failures=3 * DAY)) as store:
        store.set_met([met(), met("GPU-2", imported=True), met("GPU-3", accepted={"x": "shown"})])
        for hour in range(0, 4 * 24, 2):
            clock[0] = NOW + hour * 3600
            store.prune(clock[0])
        assert {m.device for m in store.met()} == {"GPU-2", "GPU-3"}


def test_classes_wait_in_memory_while_the_disk_refuses(store, tmp_path):
    """They are part of every answer, and are merged with those on disk when it can be written again."""
    assert store.set_met([met()])
    (pages,) = store._database.connection.execute("PRAGMA page_count").fetchone()
    store._database.connection.execute(f"PRAGMA max_page_count = {pages}")
    while store.add_run(failure(f"new-{pages}", detail=junk(3000).hex())):
        pages += 1
    assert not store.set_met([met(names=("float32/full/square/nt",))])
    assert set(store.met()[0].classes) == {"bfloat16/full/square/nt", "float32/full/square/nt"}
    store._database.connection.execute("PRAGMA max_page_count = 1000000")
    store.close()
    with Store.open(tmp_path / "state") as again:
        assert set(again.met()[0].classes) == {"bfloat16/full/square/nt", "float32/full/square/nt"}


def test_recent_runs_are_found_by_their_time(tmp_path):
    """The daemon asks for them every 15 seconds: it must not read 400 days of failures for that."""
    with Store.open(tmp_path) as store:
        said: list[str] = []
        store._database.connection.set_trace_callback(said.append)
        store.runs(since=1.0, drill=True)
        store.runs("CPU-1", since=1.0, until=2.0, failed=True, limit=5)
        asked = [statement for statement in said if "FROM runs" in statement]
        plans = [
            store._database.connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall() for statement in asked
        ]
    assert len(plans) == 2
    assert all("runs_by_age" in str(plan) for plan in plans)
