"""The versions of the database schema, in order."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Callable

from canaryd.judge.brief import brief
from canaryd.model import Run
from canaryd.store.rows import LANE, facts_from_0_1_0, lane, pack, unpack

Migration = Callable[[sqlite3.Connection], None]
"""Brings a database from the version before it to its own; runs inside a transaction (never `executescript`)."""


def _version_1(db: sqlite3.Connection) -> None:
    schema = """
        CREATE TABLE runs (
            number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, device TEXT NOT NULL, probe TEXT NOT NULL,
            started REAL NOT NULL, stored REAL NOT NULL, outcome TEXT NOT NULL, failed INTEGER NOT NULL,
            wrong INTEGER NOT NULL, drill TEXT NOT NULL, confirms TEXT NOT NULL, stack_id TEXT NOT NULL,
            body BLOB NOT NULL);
        CREATE INDEX runs_by_probe ON runs (device, probe);
        CREATE INDEX runs_by_age ON runs (stored);
        CREATE INDEX runs_by_failure ON runs (failed);
        CREATE TABLE devices (
            uuid TEXT PRIMARY KEY, first_seen REAL NOT NULL, last_seen REAL NOT NULL, present INTEGER NOT NULL,
            body BLOB NOT NULL);
        CREATE TABLE verdicts (
            number INTEGER PRIMARY KEY, device TEXT NOT NULL, drill INTEGER NOT NULL, state TEXT NOT NULL,
            cause TEXT NOT NULL, decided REAL NOT NULL, body BLOB NOT NULL);
        CREATE INDEX verdicts_by_device ON verdicts (device, drill);
        CREATE TABLE counters (name TEXT, labels TEXT, value REAL NOT NULL, PRIMARY KEY (name, labels))"""
    for statement in schema.split(";"):
        db.execute(statement)


def _version_2(db: sqlite3.Connection) -> None:
    schema = """
        CREATE TABLE polls (
            number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, device TEXT NOT NULL, probe TEXT NOT NULL,
            started REAL NOT NULL, completed INTEGER NOT NULL, body BLOB NOT NULL);
        CREATE INDEX polls_by_probe ON polls (device, probe, started);
        CREATE INDEX polls_by_age ON polls (started);
        CREATE TABLE events (
            device TEXT, kind TEXT, name TEXT, hour INTEGER, first REAL NOT NULL, last REAL NOT NULL,
            count REAL NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL, detail TEXT NOT NULL,
            PRIMARY KEY (device, kind, name, hour));
        CREATE INDEX events_by_age ON events (last);
        CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL)"""
    for statement in schema.split(";"):
        db.execute(statement)


def _version_3(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE baselines (device TEXT, key TEXT, last REAL NOT NULL, body BLOB NOT NULL,"
        " PRIMARY KEY (device, key))"
    )


def _version_4(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE acks (number INTEGER PRIMARY KEY, device TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL,"
        " body BLOB NOT NULL, UNIQUE (device, kind, at))"
    )


def _version_5(db: sqlite3.Connection) -> None:
    db.execute("CREATE TABLE days (device TEXT, day INTEGER, body BLOB NOT NULL, PRIMARY KEY (device, day))")


def _version_6(db: sqlite3.Connection) -> None:
    """Bodies of runs name their format now (rows.FORMAT): no table changes, but an older canaryd cannot read them."""
    del db


def _version_7(db: sqlite3.Connection) -> None:
    for column in ("code INTEGER", *(f"{name} TEXT NOT NULL DEFAULT ''" for name in ("reading", "labels", "fields"))):
        db.execute(f"ALTER TABLE events ADD COLUMN {column}")
    for number, *texts in db.execute("SELECT rowid, kind, name, before, detail FROM events").fetchall():
        code, reading, labels, fields = facts_from_0_1_0(*map(str, texts))
        row = (code, reading, json.dumps(labels), json.dumps(fields), number)
        db.execute("UPDATE events SET code = ?, reading = ?, labels = ?, fields = ? WHERE rowid = ?", row)


def _version_8(db: sqlite3.Connection) -> None:
    """The classes of exact cases that devices met; those of runs on record are learnt when they are read."""
    db.execute(
        "CREATE TABLE met (device TEXT, line TEXT, last REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (device, line))"
    )


def _version_9(db: sqlite3.Connection) -> None:
    """What the judge chooses runs by becomes columns. Clean runs of before are read whole until they are pruned."""
    for column in LANE.split(", "):
        db.execute(f"ALTER TABLE runs ADD COLUMN {column}")
    db.execute("CREATE INDEX runs_by_lane ON runs (device, failed, drill, probe)")
    for number, body in db.execute("SELECT number, body FROM runs WHERE failed").fetchall():
        with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):  # one that rotted stays as it is
            assigned = ", ".join(f"{column} = ?" for column in LANE.split(", "))
            db.execute(f"UPDATE runs SET {assigned} WHERE number = ?", (*lane(unpack(Run, body)), number))


def _version_10(db: sqlite3.Connection) -> None:
    """What the judge needs of a run, beside all of it: made here for the failures that a start reads first."""
    db.execute("ALTER TABLE runs ADD COLUMN brief BLOB")
    db.execute("DROP INDEX runs_by_lane")
    db.execute(
        "CREATE INDEX runs_by_kind ON runs"
        " (device, failed, drill, probe, instruction_set, intensity, confirms, wrong, unknown, whole, outcome)"
    )
    newest = (
        "SELECT number, body, row_number() OVER (PARTITION BY device, probe, instruction_set, intensity, wrong > 0"
        " ORDER BY number DESC) AS place FROM runs WHERE failed AND drill = ''"
    )
    for number, body in db.execute(f"SELECT number, body FROM ({newest}) WHERE place <= 200").fetchall():
        with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):  # one that rotted stays as it is
            db.execute("UPDATE runs SET brief = ? WHERE number = ?", (pack(brief(unpack(Run, body))), number))


MIGRATIONS: tuple[Migration, ...] = (
    *(_version_1, _version_2, _version_3, _version_4),
    *(_version_5, _version_6, _version_7, _version_8, _version_9, _version_10),
)
"""In order; `user_version` of the database says how many were applied."""


def apply_migration(db: sqlite3.Connection, *, migration: Migration, version: int) -> None:
    """Carry out one migration and note its version."""
    migration(db)
    db.execute(f"PRAGMA user_version = {version}")
