"""A database that is damaged, removed or replaced."""

import subprocess
import sys
from pathlib import Path

import pytest

from canaryd.formatting import DAY
from canaryd.store import devices
from canaryd.store import rows as store_rows
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.store.made import NOW, fill, ids, junk, run, verdict


def damage(path, offset, size):
    # From another process: closing a file here would drop the locks that SQLite holds in this one.
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-S", "-c", code, path, str(offset)], input=junk(size), check=True)


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
        store._file.execute("PRAGMA shrink_memory")
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
            finder._file.execute("PRAGMA shrink_memory")
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


def test_a_removed_database_counts_as_changed(store):
    """Who asked before must look again, also where the fresh file has the inode of the one that was removed."""
    assert store.add_run(run("a"))
    before = store.changes()
    assert store.changes() == before
    for path in store.state_dir.glob("canaryd.db*"):
        path.unlink()
    after = store.changes()
    assert after != before
    assert store.changes() == after


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
    (body,) = store._file.execute("SELECT body FROM runs WHERE id = 'b'").fetchone()
    store._file.execute("UPDATE runs SET body = ? WHERE id = 'b'", (body[:-1] + bytes([body[-1] ^ 1]),))
    assert ids(store.runs()) == ["a", "c"]
    assert store.run("b") is None
    assert "Run b" in store.problems[0]
