"""Rules for how long records are kept, and which records are deleted first if the file is too large."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from canaryd.formatting import DAY
from canaryd.store.database import Database
from canaryd.store.rows import JOIN_TALLIES
from canaryd.store.runs import KIND

BATCH = 100
"""Number of rows deleted in one transaction, so that another process never waits long."""
FAILURE = "(failed OR confirms != '')"
"""SQL condition for failures and what was run to confirm them: without its clean retests a failure accuses more."""
SUCCESS = f"NOT {FAILURE}"
KEPT = 100
"""Number of newest failures of each kind on each device that stay, however large the file is; the judge reads no more.
Without this, a device that fails all day would displace another device's failures and make it look healthy."""
POLLS = 14 * DAY
"""Seconds for which telemetry polls are kept; events have their own limit. The newest completed poll is kept as long as
a failure, because flags that the device set in that poll hold for 30 days, even if the driver hangs meanwhile."""
STILL_WRONG = (
    "SELECT 1 FROM tallies AS t WHERE t.device = compared.device AND t.probe = compared.probe"
    " AND t.stack_id = compared.stack_id AND t.erred"
)
"""SQL query for wrong results of which `compared` tells; it changes only with what is known of them."""
SPARE = "number NOT IN (SELECT max(number) FROM polls WHERE completed GROUP BY device, probe)"
"""SQL condition for polls other than the newest completed poll of each device and probe."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Seconds for which runs are kept after they were stored; `StoreConfig` in canaryd/config/settings.py sets them.

    A failure is a run with wrong results or with recordings that differ from the baseline, or a run that did not
    complete and was not skipped. The retests of failures are kept as long.
    """

    successes: float = 45 * DAY
    failures: float = 400 * DAY


DEFAULT = Retention()


def prune(database: Database, keep: Retention, max_bytes: int, now: float) -> None:
    """Delete the runs that `keep` no longer covers, then polls and old successes, until the file is below `max_bytes`.

    Failures are deleted early only if nothing else is left; this is reported as a problem. The newest failures of each
    kind always stay. `now` is in seconds since the epoch. Raises one of `REFUSED`.
    """
    for condition, age in ((SUCCESS, keep.successes), (FAILURE, keep.failures)):
        while _delete(database, f"{condition} AND stored < ?", now - age):
            pass
    oldest = now - keep.failures
    newest = "SELECT max(number) FROM verdicts GROUP BY device"
    for condition, limit in (
        (f"verdicts WHERE decided < ? AND number NOT IN ({newest})", oldest),
        ("events WHERE last < ?", oldest),
        ("baselines WHERE last < ?", oldest),
        ("met WHERE last < ?", oldest),
        ("days WHERE day < ?", oldest // DAY),
        ("tallies WHERE day < ?", oldest // DAY - 1),
        (f"compared WHERE at < ? AND NOT EXISTS ({STILL_WRONG})", oldest),
    ):
        database.commit(lambda db: db.execute(f"DELETE FROM {condition}", (limit,)))  # noqa: B023 - called at once
    database.commit(lambda db: _add_up(db, (now - keep.successes) // DAY))
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


def _add_up(db: sqlite3.Connection, day: float) -> None:
    """Add up the parts of each day before `day`, since a device that always fails makes many."""
    db.execute(JOIN_TALLIES, (day,))
    db.execute("DELETE FROM tallies WHERE day < ? AND part > 0", (day,))


def _delete(database: Database, condition: str, *args: float, table: str = "runs") -> int:
    """Delete the oldest `BATCH` rows that match; return their count. The newest run stays, so no number is reused."""
    if table == "runs":
        condition = f"({condition}) AND number < (SELECT max(number) FROM runs)"
    oldest = f"SELECT number FROM {table} WHERE {condition} ORDER BY number LIMIT {BATCH}"
    delete = f"DELETE FROM {table} WHERE number IN ({oldest})"
    return database.commit(lambda db: db.execute(delete, args).rowcount)


def used(db: sqlite3.Connection) -> int:
    """Return the bytes that the database needs, without the free pages in its file."""
    pages, free, size = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


def _compact(db: sqlite3.Connection) -> None:
    # A script, because `execute` stops after the first page: the pragma returns rows without columns.
    db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)")
