"""How long everything is kept, and what goes first when the file is too large."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from canaryd.config.settings import StoreConfig
from canaryd.formatting import DAY
from canaryd.store.database import Database
from canaryd.store.runs import KIND

BATCH = 100
"""Rows deleted in one transaction, so that another process never waits long."""
SUCCESS, FAILURE = "(drill != '' OR NOT failed)", "(drill = '' AND failed)"
FEW = 16
"""Wrong runs of a probe on one device up to which its clean runs are kept longer: what fails more often is suspect by
the wrong runs alone (ours)."""
RATED = (
    "drill = '' AND (device, probe) IN (SELECT device, probe FROM runs WHERE failed = 1 AND drill = '' AND wrong > 0"
    f" GROUP BY device, probe HAVING count(*) <= {FEW})"
)
"""Runs of a probe that was seldom wrong on the device: how often it fails, so when a suspect clears, rests on them."""
LONGER = 90 * DAY
"""Time in seconds for which such runs are kept, so that no restart clears a suspect: it clears after three times the
tests of the 14 days before its mismatch (docs/judgement.md), in 42 days at an even rate; twice that (ours)."""
KEPT = 100
"""Newest failures of each kind on each device that no bound of the size costs: all that the judge looks at. Without
them one device that fails all day would make another healthy, whose few failures are older."""
DRILLS = 1 * DAY
"""Seconds for which runs with an injected fault are kept, whatever their outcome."""
POLLS = 14 * DAY
"""Seconds for which telemetry is kept: readings over time; what they showed to have happened is kept as events. The
newest poll that completed is kept like a failure: flags that the device set there hold for 30 days, also where the
driver hangs meanwhile."""
SPARE = "number NOT IN (SELECT max(number) FROM polls WHERE completed GROUP BY device, probe)"
"""Polls other than each device's newest completed ones."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long runs are kept, in seconds since they were stored: `StoreConfig` in canaryd/config/settings.py sets it.

    A failure is a run with wrong results or unknown bits, or one that did not complete and was not skipped.
    """

    successes: float = StoreConfig().keep_successes
    failures: float = StoreConfig().keep_failures


DEFAULT = Retention()


def prune(database: Database, keep: Retention, max_bytes: int, now: float) -> None:
    """Delete what `keep` allows to, then spare polls and the oldest successes until the file is below `max_bytes`.

    Failures go before their time only when nothing else is left to go, with a problem, and never the newest of their
    kind. `now` is in seconds since the epoch. Raises `REFUSED`.
    """
    for condition, age in (
        ("drill != ''", DRILLS),
        (f"{SUCCESS} AND NOT ({RATED})", keep.successes),
        (SUCCESS, max(keep.successes, LONGER)),
        (FAILURE, keep.failures),
    ):
        while _delete(database, f"{condition} AND stored < ?", now - age):
            pass
    oldest = now - keep.failures
    newest = "SELECT max(number) FROM verdicts GROUP BY device, drill"
    for condition, limit in (
        (f"verdicts WHERE decided < ? AND number NOT IN ({newest})", oldest),
        ("events WHERE last < ?", oldest),
        ("baselines WHERE last < ?", oldest),
        ("met WHERE last < ?", oldest),
        ("days WHERE day < ?", oldest // DAY),
    ):
        database.commit(lambda db: db.execute(f"DELETE FROM {condition}", (limit,)))  # noqa: B023 - called at once
    while _delete(database, f"{SPARE} AND started < ? OR started < ?", now - POLLS, oldest, table="polls"):
        pass
    newest = f"SELECT number, row_number() OVER (PARTITION BY device, {KIND} ORDER BY number DESC) AS place FROM runs"
    spare = f"number IN (SELECT number FROM ({newest} WHERE {FAILURE}) WHERE place > {KEPT})"
    while database.look(used) >= max_bytes:
        if _delete(database, SPARE, table="polls") or _delete(database, SUCCESS):
            continue
        if not _delete(database, spare):
            database.said["size"] = (
                f"{database.path}: larger than {max_bytes} bytes, though of its runs only the newest failures are left;"
                " raise store.max_size"
            )
            break
        database.said["size"] = (
            f"{database.path}: failures younger than {keep.failures / DAY:g} days were deleted to stay below "
            f"{max_bytes} bytes; raise store.max_size"
        )
    database.look(_compact)


def _delete(database: Database, condition: str, *args: float, table: str = "runs") -> int:
    """Delete the oldest `BATCH` rows, but never the newest run, whose number another would get; return how many."""
    if table == "runs":
        condition = f"({condition}) AND number < (SELECT max(number) FROM runs)"
    oldest = f"SELECT number FROM {table} WHERE {condition} ORDER BY number LIMIT {BATCH}"
    delete = f"DELETE FROM {table} WHERE number IN ({oldest})"
    return database.commit(lambda db: db.execute(delete, args).rowcount)


def used(db: sqlite3.Connection) -> int:
    """Return the bytes that the database needs; pages that can be given back are not counted."""
    pages, free, size = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


def _compact(db: sqlite3.Connection) -> None:
    # A script, because `execute` stops after the first page: the pragma returns rows without columns.
    db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)")
