"""The versions of the database schema, in order."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from canaryd.facts import stack_id
from canaryd.formatting import DAY
from canaryd.judge.slower import Day
from canaryd.judge.tally import Lane, Tallied, tally
from canaryd.model import Run
from canaryd.store.rows import ADD_STACK, ADD_TALLY, PART, part_of, stack_row, tally_row, unpack

T = TypeVar("T")

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

TALLIES = """
    CREATE TABLE tallies (
        device TEXT, probe TEXT, probe_version INTEGER, stack_id TEXT, instruction_set TEXT, intensity TEXT,
        whole INTEGER, completed INTEGER, erred INTEGER, day INTEGER, part REAL, first REAL NOT NULL,
        last REAL NOT NULL, runs INTEGER NOT NULL, tested INTEGER NOT NULL, failing INTEGER NOT NULL,
        results INTEGER NOT NULL, wrong INTEGER NOT NULL, uploads INTEGER NOT NULL, failed INTEGER NOT NULL,
        goldens INTEGER NOT NULL, comparators INTEGER NOT NULL,
        PRIMARY KEY (day, probe, device, probe_version, stack_id, instruction_set, intensity, whole, completed, erred,
                     part));
    CREATE INDEX tallies_by_device ON tallies (device);
    CREATE TABLE stacks (id TEXT PRIMARY KEY, body TEXT NOT NULL);
    CREATE TABLE compared (
        device TEXT, probe TEXT, probe_version INTEGER, stack_id TEXT, own INTEGER, at REAL NOT NULL,
        body TEXT NOT NULL, PRIMARY KEY (device, probe, probe_version, stack_id, own))"""

DRILLS_APART = """
    DELETE FROM runs WHERE drill != '';
    DELETE FROM counters WHERE name IN ('drill_runs', 'drill_mismatches');
    DROP INDEX runs_by_kind;
    CREATE INDEX runs_by_kind ON runs
        (device, failed, probe, instruction_set, intensity, confirms, wrong, unknown, whole, outcome)"""

MIGRATIONS: dict[int, str] = {10: SCHEMA, 11: TALLIES, 12: DRILLS_APART}
"""Version of the schema, ascending → SQL statements (separated by ";") that convert a database of the version
before."""


def migrate(db: sqlite3.Connection, version: int) -> None:
    """Convert a database from a version (0 means empty) to the newest, inside the caller's transaction."""
    for number, script in MIGRATIONS.items():
        if number > version:
            for statement in script.split(";"):
                db.execute(statement)
            if version and number in FILLS:
                FILLS[number](db)
            db.execute(f"PRAGMA user_version = {number}")


def _count(db: sqlite3.Connection) -> None:
    """Count the runs that are there, and the days whose runs are gone."""
    for device, body in db.execute("SELECT device, body FROM days").fetchall():
        if (summary := _read(Day, body)) is not None:
            at = summary.day * DAY
            for probe in summary.tested:
                lane = Lane(probe, 0, stack_id({}), "", "", whole=True, completed=True, erred=False)
                _add(db, device, Tallied(lane, at, at, runs=0, tested=1))
    of = "device, probe, probe_version, stack_id, instruction_set, intensity, started, results, uploads"
    # A body is read only where the columns do not tell all: a second for 10,000 runs.
    plain = "failed = 0 AND outcome = 'completed' AND whole = 1 AND results > 0"
    plain += " AND number NOT IN (SELECT min(number) FROM runs GROUP BY stack_id)"
    rows = db.execute(f"SELECT number, {plain}, {of} FROM runs WHERE drill = '' ORDER BY started, number").fetchall()
    for number, is_plain, device, *kind, started, results, uploads in rows:
        if is_plain:
            lane = Lane._make((*kind, True, True, False))
            counted: Tallied | None = Tallied(lane, started, started, tested=1, results=results, uploads=uploads)
        else:
            counted = _counted(db, number)
        if counted is not None:
            _add(db, device, counted)


def _add(db: sqlite3.Connection, device: str, counted: Tallied) -> None:
    # A number that rotted makes a run no evidence; it must not keep the record from being opened.
    with contextlib.suppress(TypeError, ValueError, OverflowError, sqlite3.IntegrityError):
        (part,) = db.execute(PART, part_of(device, counted)).fetchone()
        db.execute(ADD_TALLY, tally_row(device, counted, part))


def _counted(db: sqlite3.Connection, number: int) -> Tallied | None:
    """Return the tally of a run that must be read, and store its software stack; None for one that is rotten."""
    (body,) = db.execute("SELECT ifnull(brief, body) FROM runs WHERE number = ?", (number,)).fetchone()
    if (run := _read(Run, body)) is None:
        return None
    db.execute(ADD_STACK, stack_row(run))
    return tally(run)


def _read(kind: type[T], body: bytes) -> T | None:
    """Return what is packed, or None if it is rotten: then it is no evidence."""
    with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):
        return unpack(kind, body)
    return None


FILLS: Mapping[int, Callable[[sqlite3.Connection], None]] = {11: _count}
"""Version → what fills its new tables in a database of the version before."""
