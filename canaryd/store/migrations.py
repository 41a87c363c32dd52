"""The versions of the database schema, in order."""

from __future__ import annotations

import sqlite3

SCHEMA = """
    CREATE TABLE runs (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, device TEXT NOT NULL, probe TEXT NOT NULL,
        started REAL NOT NULL, stored REAL NOT NULL, outcome TEXT NOT NULL, failed INTEGER NOT NULL,
        wrong INTEGER NOT NULL, drill TEXT NOT NULL, confirms TEXT NOT NULL, stack_id TEXT NOT NULL,
        body BLOB NOT NULL, probe_version, instruction_set, intensity, whole, unknown, recordings, results, uploads,
        brief BLOB);
    CREATE INDEX runs_by_probe ON runs (device, probe);
    CREATE INDEX runs_by_age ON runs (stored);
    CREATE INDEX runs_by_failure ON runs (failed);
    CREATE INDEX runs_by_kind ON runs
        (device, failed, drill, probe, instruction_set, intensity, confirms, wrong, unknown, whole, outcome);
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
        count REAL NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL, detail TEXT NOT NULL, code INTEGER,
        reading TEXT NOT NULL DEFAULT '', labels TEXT NOT NULL DEFAULT '', fields TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (device, kind, name, hour));
    CREATE INDEX events_by_age ON events (last);
    CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE baselines (device TEXT, key TEXT, last REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (device, key));
    CREATE TABLE acks (
        number INTEGER PRIMARY KEY, device TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
        UNIQUE (device, kind, at));
    CREATE TABLE days (device TEXT, day INTEGER, body BLOB NOT NULL, PRIMARY KEY (device, day));
    CREATE TABLE met (device TEXT, line TEXT, last REAL NOT NULL, body BLOB NOT NULL, PRIMARY KEY (device, line))"""

MIGRATIONS: dict[int, str] = {10: SCHEMA}
"""Version of the schema, ascending → SQL statements (separated by ";") that convert a database of the version
before."""


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Convert a database from a version (0 means empty) to the newest, inside the caller's transaction."""
    for number, script in MIGRATIONS.items():
        if number > version:
            for statement in script.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
