"""Versions of the database: newer ones are left alone, older ones converted or kept aside."""

import contextlib
import shutil
import sqlite3

import pytest

from canaryd.store.database import StoreTooNew
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.store import Store
from tests.store.made import NOW, ids, run

KNOWN = max(MIGRATIONS)


@pytest.fixture
def state(tmp_path):
    """A state directory with the record of this version."""
    with Store.open(tmp_path) as store:
        store.add_run(run("a"))
    return tmp_path


def in_version(state, version):
    """Make a database say that it is of a version."""
    with contextlib.closing(sqlite3.connect(state / "canaryd.db")) as db:
        db.execute(f"PRAGMA user_version = {version}")


def version_of(path):
    """Return the version of a sound database that lies alone."""
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return db.execute("PRAGMA user_version").fetchone()[0]


def becomes(monkeypatch, *statements):
    """Let this canaryd know one more version."""
    monkeypatch.setitem(MIGRATIONS, KNOWN + 1, ";".join(statements))


def test_a_database_of_release_0_1_0_is_kept_aside_and_said(state):
    """It is not converted: a new record begins, and its devices are unknown; the old release can have its file back."""
    in_version(state, 5)
    with Store.open(state, for_reading=True) as store:
        assert "an older canaryd wrote it" in store.unreadable
    with Store.open(state, now=lambda: NOW) as store:
        assert (store.runs(), store.problem) == ([], "")
        assert store.lost == (NOW, f"{state}/canaryd.db.version-5")
        assert "0.1.0 wrote it" in store.problems[0]
        assert store.add_run(run("b"))
    assert version_of(state / "canaryd.db.version-5") == 5


def test_a_database_is_migrated_and_keeps_what_it_has(state, monkeypatch):
    """Its runs stay, new ones go beside them, and a copy of before is the way back to the release that wrote it."""
    becomes(monkeypatch, "ALTER TABLE runs ADD COLUMN note TEXT NOT NULL DEFAULT 'none'")
    with Store.open(state) as store:
        assert store.add_run(run("b"))
        assert ids(store.runs()) == ["a", "b"]
    assert version_of(state / "canaryd.db") == KNOWN + 1
    assert version_of(state / f"canaryd.db.version-{KNOWN}") == KNOWN
    monkeypatch.undo()
    with pytest.raises(StoreTooNew, match="is a copy from before the conversion"):
        Store.open(state)
    shutil.move(state / f"canaryd.db.version-{KNOWN}", state / "canaryd.db")
    with Store.open(state) as store:
        assert ids(store.runs()) == ["a"]


def test_a_migration_that_fails_leaves_the_old_version(state, monkeypatch):
    """Half a migration is none: the store works from memory, says why, and the older code goes on with the file."""
    becomes(monkeypatch, "ALTER TABLE runs ADD COLUMN half TEXT", "INSERT INTO notes VALUES ('aged', 0)")
    with Store.open(state) as store:
        assert not store.add_run(run("b"))
        assert "UNIQUE" in store.problem
        assert store.unreadable
    monkeypatch.undo()
    with Store.open(state) as store:
        assert ids(store.runs()) == ["a"]
        assert "half" not in [row[1] for row in store._file.execute("PRAGMA table_info(runs)")]


def test_a_newer_database_is_refused_and_left_alone(state):
    """With both versions and what to do; not a byte of it changes."""
    in_version(state, 99)
    before = (state / "canaryd.db").read_bytes()
    with pytest.raises(StoreTooNew, match=rf"version 99 of the store, this one knows {KNOWN}\); upgrade canaryd, or"):
        Store.open(state)
    assert (state / "canaryd.db").read_bytes() == before
    assert {p.name for p in state.iterdir()} <= {"canaryd.db", "canaryd.db.lock"}


def test_a_database_upgraded_under_a_running_daemon(state):
    """A newer `canaryd check` migrates the file: the older daemon writes nothing more into it, says why, and lives."""
    with Store.open(state) as store:
        in_version(state, 99)
        assert not store.add_run(run("b"))
        assert "newer canaryd" in store.problem
        assert ids(store.runs()) == ["a", "b"]
