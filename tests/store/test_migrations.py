"""Versions of the database: older ones are migrated, newer ones left alone."""

import contextlib
import sqlite3
import tempfile
import time

import pytest

from canaryd.model import Outcome
from canaryd.store import rows as store_rows
from canaryd.store.database import StoreTooNew, use_wal
from canaryd.store.migrations import MIGRATIONS
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.store.made import NOW, event, ids, run


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
