"""The versions of the database schema, in order."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Mapping

from canaryd.judge.brief import brief
from canaryd.model import Run
from canaryd.store.rows import LANE, facts_from_0_1_0, lane, pack, unpack

Migration = Callable[[sqlite3.Connection], None]
"""Brings a database from the version before it to its own; runs inside a transaction (never `executescript`)."""
BRIEF = 200
"""Failures of each kind that are made brief at once: as many as a start reads first."""


def _release_0_1_0(db: sqlite3.Connection) -> None:
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
        CREATE TABLE counters (name TEXT, labels TEXT, value REAL NOT NULL, PRIMARY KEY (name, labels));
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
        CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE baselines (
            device TEXT, key TEXT, last REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (device, key));
        CREATE TABLE acks (number INTEGER PRIMARY KEY, device TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL,
            body BLOB NOT NULL, UNIQUE (device, kind, at));
        CREATE TABLE days (device TEXT, day INTEGER, body BLOB NOT NULL, PRIMARY KEY (device, day))"""
    for statement in schema.split(";"):
        db.execute(statement)


def _after_0_1_0(db: sqlite3.Connection) -> None:
    """Facts of events, and what the judge chooses runs by, become columns; bodies of runs name their format.

    Clean runs of before are read whole until they are pruned. `brief`, what the judge needs of a run, is made for the
    failures that a start reads first.
    """
    db.execute(
        "CREATE TABLE met (device TEXT, line TEXT, last REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (device, line))"
    )
    for column in ("code INTEGER", *(f"{name} TEXT NOT NULL DEFAULT ''" for name in ("reading", "labels", "fields"))):
        db.execute(f"ALTER TABLE events ADD COLUMN {column}")
    for number, *texts in db.execute("SELECT rowid, kind, name, before, detail FROM events").fetchall():
        code, reading, labels, fields = facts_from_0_1_0(*map(str, texts))
        row = (code, reading, json.dumps(labels), json.dumps(fields), number)
        db.execute("UPDATE events SET code = ?, reading = ?, labels = ?, fields = ? WHERE rowid = ?", row)
    columns = *LANE.split(", "), "brief BLOB"
    for column in columns:
        db.execute(f"ALTER TABLE runs ADD COLUMN {column}")
    db.execute(
        "CREATE INDEX runs_by_kind ON runs"
        " (device, failed, drill, probe, instruction_set, intensity, confirms, wrong, unknown, whole, outcome)"
    )
    assigned = ", ".join(f"{column.removesuffix(' BLOB')} = ?" for column in columns)
    newer: Counter[object] = Counter()
    for (number,) in db.execute("SELECT number FROM runs WHERE failed ORDER BY number DESC").fetchall():
        (body,) = db.execute("SELECT body FROM runs WHERE number = ?", (number,)).fetchone()
        with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):  # one that rotted stays as it is
            run = unpack(Run, body)
            kind = run.device, run.probe, run.instruction_set, run.intensity, bool(run.wrong), run.drill
            newer[kind] += 1
            shown = pack(brief(run)) if newer[kind] <= BRIEF else None
            db.execute(f"UPDATE runs SET {assigned} WHERE number = ?", (*lane(run), shown, number))


MIGRATIONS: Mapping[int, Migration] = {5: _release_0_1_0, 10: _after_0_1_0}
"""Version, in ascending order → what makes it of the one before; `user_version` of the database says which it has. No
release made the others."""


def migrate(db: sqlite3.Connection, *, migrations: Mapping[int, Migration], version: int) -> None:
    """Carry out every migration after `version`, in one transaction: no copy is ever made of a version in between."""
    for number, migration in migrations.items():
        if number > version:
            migration(db)
            db.execute(f"PRAGMA user_version = {number}")
