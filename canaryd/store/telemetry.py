"""Polls of telemetry, events, and counters."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace
from urllib.parse import parse_qsl

from canaryd.model import Event, Outcome, Run
from canaryd.store.database import Database
from canaryd.store.rows import (
    ADD_COUNT,
    ADD_EVENT,
    ADD_POLL,
    EVENT,
    NOTE,
    encode_labels,
    event_from_row,
    event_row,
    is_number,
    pack,
)

WAITING_POLLS = 1000
"""Number of polls kept in memory while the disk refuses them."""

LASTING = (
    "kind IN ('xid', 'off-bus', 'amdgpu', 'intel', 'aer', 'mce', 'last-boot', 'boot', 'reset', 'change')"
    " OR kind = 'counter' AND (labels LIKE '%uncorrected%' OR labels LIKE '%fatal%')"
)
"""SQL condition for events that count over a device's life."""


class TelemetryTables(Database):
    """The tables of polls, events and counters."""

    def add_poll(self, poll: Run, outcomes: Mapping[Outcome, int], events: Iterable[Event] = ()) -> bool:
        """Store one poll and its `events`, and add `outcomes` (outcome → number of polls) to the counters.

        One transaction stores all of it, so that after a kill the next poll is compared with the last poll whose events
        are stored. Returns False if the poll is only in memory so far.
        """
        of = {"device": poll.device, "probe": poll.probe}
        counts = [("probe_runs", encode_labels({**of, "outcome": o.value}), float(n)) for o, n in outcomes.items()]
        done = poll.outcome is Outcome.COMPLETED
        row = (poll.id, poll.device, poll.probe, poll.started, done, pack(poll))
        rows = [event_row(e) for e in events]

        def write(db: sqlite3.Connection) -> None:
            if db.execute(ADD_POLL, row).rowcount:
                db.executemany(ADD_COUNT, counts)
                db.executemany(ADD_EVENT, rows)

        return self._write(write) or self._forget("polls", "number", WAITING_POLLS)

    def polls(
        self,
        device: str,
        probe: str | None = None,
        since: float = 0.0,
        *,
        until: float = math.inf,
        completed: bool = False,
        limit: int | None = None,
    ) -> list[Run]:
        """Return a device's stored polls that started at `since` or later and before `until`, newest last.

        `limit` keeps the newest polls. `completed` keeps only polls that completed.
        """
        query = (
            "SELECT id, body FROM polls WHERE device = ? AND (probe = ? OR ? IS NULL) AND started >= ? AND started < ?"
            " AND completed >= ? ORDER BY number DESC LIMIT ?"
        )
        most = -1 if limit is None else limit
        return self._decode(Run, self._read(query, device, probe, probe, since, until, completed, most))[::-1]

    # Events

    def add_events(
        self,
        events: Iterable[Event],
        counts: Iterable[tuple[str, Mapping[str, str], float]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> bool:
        """Store events, increase counters by (name, labels, increment), and set notes, all in one transaction.

        Counters outlive restarts and pruned runs. A note with the position in a log thus moves exactly when the records
        before that position are counted. Returns False if this is only in memory so far.
        """
        rows = [event_row(e) for e in events]
        counters = [(name, encode_labels(labels), by) for name, labels, by in counts]

        def write(db: sqlite3.Connection) -> None:
            db.executemany(ADD_EVENT, rows)
            db.executemany(ADD_COUNT, counters)
            db.executemany(NOTE, (notes or {}).items())

        return self._write(write)

    def events(self, since: float = 0.0, device: str | None = None) -> list[Event]:
        """Return the events that were last seen at `since` or later (seconds since the epoch), newest last."""
        query = f"SELECT {EVENT} FROM events WHERE last >= ? AND (device = ? OR ? IS NULL)"
        found = [event_from_row(row) for row in self._read(query, since, device, device)]
        return sorted(found, key=lambda e: (e.last, e.first, e.device, e.kind, e.name))

    def lasting(self, before: float) -> list[Event]:
        """Return events from before a time that may come back, and reboots, resets and changes, oldest first."""
        query = f"SELECT {EVENT} FROM events WHERE last < ? AND ({LASTING}) ORDER BY last"
        return [event_from_row(row) for row in self._read(query, before)]

    def dated(self, events: Iterable[Event]) -> list[Event]:
        """Return the events. An event from a clock that was far behind gets the time of storing (see `date`)."""
        dates = [(event, self.date(event.last)) for event in events]
        return [event if at == event.last else replace(event, first=at, last=at) for event, at in dates]

    # Counters

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return (name, set of (label, value)) → value of every counter."""
        return {
            (str(name), frozenset(parse_qsl(labels, keep_blank_values=True))): value
            for name, labels, value in self._read("SELECT name, labels, value FROM counters")
            if isinstance(labels, str) and is_number(value)  # one that rotted begins anew
        }
