"""The tables of runs, and of what is learnt from runs: baselines and summaries of days."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from canaryd.formatting import DAY
from canaryd.judge.brief import SHOWN
from canaryd.judge.cause import Same, SameKey
from canaryd.judge.characterised import Met
from canaryd.judge.recordings.baseline import Baseline
from canaryd.judge.slower import Day
from canaryd.judge.tally import Lane, Tallied, tally
from canaryd.model import Outcome, Run
from canaryd.store.database import Database
from canaryd.store.rows import (
    ADD_BASELINE,
    ADD_COMPARED,
    ADD_COUNT,
    ADD_RUN,
    ADD_STACK,
    ADD_SUMMARY,
    ADD_TALLY,
    PART,
    add_met,
    baseline_key,
    compared_row,
    is_number,
    met_row,
    pack,
    part_of,
    run_counts,
    run_row,
    same_from_row,
    stack_row,
    tally_from_row,
    tally_row,
    texts,
)

BACKLOG = 10_000
"""Number of runs kept in memory while the disk refuses them; each takes about 5 KiB."""
KIND = "probe, instruction_set, intensity, confirms != '', wrong > 0 OR unknown > 0"
"""SQL columns whose values are equal for failures of one kind."""
CLEAN = "probe, outcome, intensity, confirms != ''"
"""SQL columns whose values are equal for clean runs of one kind."""
BRIEF = f"CASE WHEN turn <= {SHOWN} AND (wrong > 0 OR recordings > 0) THEN body ELSE ifnull(brief, body) END"
"""SQL expression for a run in the form that the judge needs; `turn` numbers the runs of one kind, the newest is 1."""
FOREVER = 1e18
"""Time of last use (epoch s) that is stored for a record that is never pruned."""


def _ranked(of: str, which: str) -> str:
    """Return an SQL join with the runs of a device (a parameter) that match `which`, and two numbers for each run.

    `place` numbers the runs with equal values in the columns `of`, `turn` those with equal kind, wholeness and outcome.
    The newest run has number 1.
    """
    rank = "row_number() OVER (PARTITION BY {} ORDER BY number DESC)"
    places = f"{rank.format(of)} AS place, {rank.format(f'{KIND}, whole, outcome')} AS turn"
    # Ranked in an index that has all these columns, and joined afterwards: a sort would copy every body.
    ranked = f"SELECT number, {places} FROM runs WHERE device = ? AND {which}"
    return f"({ranked}) JOIN runs USING (number)"


class RunTables(Database):
    """The tables of runs, baselines and days."""

    _passed: int | None = None
    """Number of the newest run on disk that `news` has considered."""

    @functools.cached_property
    def _own(self) -> set[str]:
        """Ids of runs that this process itself has stored since the last call of `news`, which does not return them."""
        return set()

    def add_run(self, run: Run, baselines: Iterable[Baseline] = (), met: Iterable[Met] = ()) -> bool:
        """Store and count a run, with the `baselines` and records (`met`) that it changed, in one transaction.

        Returns True if the run is on disk and survives `kill -9`. Returns False if the run waits in memory; `problem`
        says why. Never raises.

        At most `BACKLOG` runs wait. Beyond that the oldest successes are dropped, and failures only if nothing else is
        left. Dropped runs stay counted.
        """
        with self._lock:
            found = tally(run)
            row, counts = run_row(run, self._stamp()), run_counts(run, found.all)
            changed, classes = self._baseline_rows(baselines), self._met_rows(met)
            # What was wrong before is looked up here, as the rows that wait for the disk do not know it.
            (part,) = self._read(PART, *part_of(run.device, found))[0]
            counted = tally_row(run.device, found, part)

            def write(db: sqlite3.Connection) -> None:
                if db.execute(ADD_RUN, row).rowcount:
                    db.executemany(ADD_COUNT, counts)
                    db.execute(ADD_TALLY, counted)
                    db.execute(ADD_STACK, stack_row(run))
                    db.executemany(ADD_BASELINE, changed)
                    add_met(db, classes)

            self._own.add(run.id)
            return self._write(write) or self._forget("runs", "failed, number", BACKLOG)

    def runs(
        self,
        device: str | None = None,
        probe: str | None = None,
        since: float | None = None,
        *,
        until: float | None = None,
        failed: bool | None = None,
        outcome: Outcome | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """Return the runs that match, in the order of storing, newest last; an argument of `None` does not filter.

        `since` and `until` (exclusive) are compared with the time of storing (epoch s). That time never runs backwards,
        unlike the clock that gave `Run.started`. `failed` is as in `Retention`. `limit` keeps only the newest runs.
        """
        times = {"stored >= ?": since, "stored < ?": until}
        terms = {"device = ?": device, "probe = ?": probe, **times, "failed = ?": failed, "outcome = ?": outcome}
        where = {term: value for term, value in terms.items() if value is not None}
        # SQLite would rather read the whole table in order than the newest part of it and sort that.
        table = "runs" if since is None else "runs INDEXED BY runs_by_age"
        query = f"SELECT id, body FROM {table} WHERE {' AND '.join(where) or '1'} ORDER BY number DESC LIMIT ?"
        return self._decode(Run, self._read(query, *where.values(), -1 if limit is None else limit))[::-1]

    def run(self, run_id: str) -> Run | None:
        """Return one run, or None if it was never stored or is pruned."""
        return next(iter(self._decode(Run, self._read("SELECT id, body FROM runs WHERE id = ?", run_id))), None)

    def _on_open(self, db: sqlite3.Connection) -> None:
        (self._passed,) = db.execute("SELECT max(number) FROM runs").fetchone()

    def news(self) -> list[Run]:
        """Return the runs that other processes have stored since the last call, or since this file was opened.

        They come in the order on disk: a run that waited in another process's memory was written later than its time of
        storing says. While the disk refuses writes, the list is empty.
        """
        with self._lock:
            if self._copy is not None:
                return []
            query = "SELECT number, id, body FROM runs WHERE number > ? ORDER BY number"
            rows = self._read(query, self._passed or 0)
            others = [(name, body) for _, name, body in rows if name not in self._own]
            if rows:
                self._passed = rows[-1][0]
                self._own.clear()
            return self._decode(Run, others)

    def failures(self, device: str, limit: int) -> list[Run]:
        """Return a device's newest failures and retests in short form, at most `limit` of each kind.

        Failures are of one kind if they have the same probe, instruction set and intensity, are both mismatches or both
        incomplete runs, and are both confirmations or both not.
        """
        return self._brief(KIND, "(failed = 1 OR confirms != '')", limit, device)

    def confirmations(self, of: Run) -> list[str]:
        """Return the outcomes of the runs that confirm a run on its own device."""
        lane = "probe = ? AND instruction_set = ? AND intensity = ? AND confirms = ?"
        query = f"SELECT outcome FROM runs WHERE device = ? AND failed IN (0, 1) AND {lane}"
        return [o for (o,) in self._read(query, of.device, of.probe, of.instruction_set, of.intensity, of.id)]

    def kinds_of_failures(self, device: str) -> int:
        """Return the number of kinds (see `failures`) of a device's failures."""
        query = f"SELECT DISTINCT {KIND} FROM runs WHERE device = ? AND failed = 1"
        return len(self._read(query, device))

    def newest_clean(self, device: str, limit: int) -> list[Run]:
        """Return a device's newest clean runs in short form, at most `limit` of each kind.

        Runs of one kind have equal values in the columns `CLEAN`. So many runs of one probe do not hide the last run of
        another probe with a longer period, and many skipped runs do not hide the last completed one.
        """
        return self._brief(CLEAN, "failed = 0", limit, device)

    def _brief(self, of: str, which: str, most: int, device: str) -> list[Run]:
        """Return a device's newest runs that match `which`, in short form, oldest first; at most `most` of each kind.

        Runs of one kind are equal in the columns `of`.
        """
        query = f"SELECT id, {BRIEF} FROM {_ranked(of, which)} WHERE place <= ? ORDER BY number"
        return self._decode(Run, self._read(query, device, most))

    # Tallies

    def tallies(self, device: str) -> list[Tallied]:
        """Return a device's tallies, oldest first. Damaged ones are left out."""
        query = f"SELECT {', '.join(Lane._fields)}, {', '.join(Tallied._fields[1:])} FROM tallies WHERE device = ?"
        rows = self._read(f"{query} ORDER BY first", device)
        return [found for found in map(tally_from_row, rows) if found is not None]

    def wrong_between(self, device: str, since: float) -> list[tuple[float, float]]:
        """Return when the first and newest wrong runs of each probe and stack began, of those after `since` (epoch s).

        As `tally.edges` of the device's tallies, which need not all be in memory for it.
        """
        query = "SELECT MIN(first), MAX(last) FROM tallies WHERE device = ? AND erred AND first > ?"
        rows = self._read(f"{query} GROUP BY probe, stack_id", device, since)
        return [(first, last) for first, last in rows if is_number(first) and is_number(last)]

    def tested(self, device: str, since: float) -> list[tuple[str, int]]:
        """Return (probe, day since the epoch) for each day on which a device was tested after `since` (epoch s)."""
        query = "SELECT DISTINCT probe, day FROM tallies WHERE device = ? AND tested > 0 AND first > ?"
        return [(str(probe), day) for probe, day in self._read(query, device, since) if isinstance(day, int)]

    @property
    def ever_wrong(self) -> bool:
        """Whether any run on record found a wrong result."""
        return bool(self._read("SELECT 1 FROM tallies WHERE erred LIMIT 1"))

    def compared(self, device: str, since: float) -> dict[SameKey, Same]:
        """Return how siblings computed what a device computed wrong, of wrong results after `since` (epoch s)."""
        query = f"SELECT {', '.join(SameKey._fields)}, body FROM compared WHERE device = ? AND at > ?"
        return dict(found for row in self._read(query, device, since) if (found := same_from_row(row)))

    def set_compared(self, device: str, found: Mapping[SameKey, Same], at: float) -> bool:
        """Store it, with the time of the device's newest mismatch (epoch s). Return False if only in memory so far."""
        rows = [compared_row(device, key, same, at) for key, same in found.items()]
        return self._write(lambda db: db.executemany(ADD_COMPARED, rows))

    def stacks(self) -> dict[str, Mapping[str, str]]:
        """Return id → software stack, for all stacks that runs had."""
        return {str(name): texts(body) for name, body in self._read("SELECT id, body FROM stacks")}

    # Baselines

    def set_baselines(self, baselines: Iterable[Baseline]) -> bool:
        """Store baselines, replacing those with the same keys. Return False if they are only in memory so far."""
        with self._lock:
            rows = self._baseline_rows(baselines)
            return self._write(lambda db: db.executemany(ADD_BASELINE, rows))

    def _baseline_rows(self, baselines: Iterable[Baseline]) -> list[tuple[Any, ...]]:
        # By the store's time: a clock that was not set must not make a baseline look old enough to go.
        now = self._stamp()
        # What was used before time began is deleted with what is too old.
        return [(b.device, baseline_key(b), max(now, b.used) if b.used >= 0 else 0.0, pack(b)) for b in baselines]

    def baselines(self, device: str | None = None) -> list[Baseline]:
        """Return the baselines of a device, or of all devices if it is None, in the order of their last change."""
        query = "SELECT device, key, body FROM baselines WHERE device = ? OR ? IS NULL ORDER BY last"
        rows = self._read(query, device, device)
        found = self._decode(Baseline, [(f"{uuid} {key}", body) for uuid, key, body in rows])
        return [b for b in found if b.used >= 0]

    # Classes of exact cases

    def set_met(self, records: Iterable[Met]) -> bool:
        """Add records of exact test cases (computed correctly, or accepted). Return False if only in memory so far."""
        with self._lock:
            rows = self._met_rows(records)
            return self._write(lambda db: add_met(db, rows))

    def _met_rows(self, records: Iterable[Met]) -> list[tuple[Any, ...]]:
        now = self._stamp()
        return [met_row(m, FOREVER if m.imported or m.accepted else max(now, m.used)) for m in records]

    def met(self) -> list[Met]:
        """Return the records of exact test cases: which classes of cases each device has computed correctly."""
        rows = self._read("SELECT device, line, body FROM met ORDER BY device, line")
        return self._decode(Met, [(f"{uuid} {line}", body) for uuid, line, body in rows])

    # Days

    def add_day(self, day: Day) -> bool:
        """Store the summary of a day, which outlives the day's runs. Return False if it is only in memory so far."""
        return self._write(lambda db: db.execute(ADD_SUMMARY, (day.device, day.day, pack(day))))

    def days(self, device: str, since: float = 0.0) -> list[Day]:
        """Return the summaries of a device's days that ended at `since` or later, oldest first."""
        query = "SELECT day, body FROM days WHERE device = ? AND day >= ? ORDER BY day"
        rows = self._read(query, device, int(since // DAY))
        return self._decode(Day, [(f"{device} {day}", body) for day, body in rows])

    def summed(self, device: str, since: float) -> set[int]:
        """Return the days (since the epoch) that ended at `since` (epoch s) or later and have a summary of a device."""
        rows = self._read("SELECT day FROM days WHERE device = ? AND day >= ?", device, int(since // DAY))
        return {day for (day,) in rows}
