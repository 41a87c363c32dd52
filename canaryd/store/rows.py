"""Columns, statements and rows of the tables."""

# ruff: noqa: S608 - statements are composed of constants of this package; values travel as parameters
from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from canaryd.codec import from_json, to_json
from canaryd.facts import whole
from canaryd.formatting import DAY
from canaryd.judge.brief import brief
from canaryd.judge.cause import Right, Same, SameKey
from canaryd.judge.characterised import Met
from canaryd.judge.recordings.baseline import Baseline
from canaryd.judge.slower import Day
from canaryd.judge.tally import Lane, Tallied
from canaryd.model import Ack, Device, Event, Run, Tally, Verdict

T = TypeVar("T")

HOUR = 3600.0
"""Seconds of an hour. Equal events within an hour become one event with a count, so a bad part cannot fill the disk."""
END = 253_370_764_800.0
"""Time (epoch s) in the year 9999, the last year of the calendar; a later number cannot be a time."""
LANE = "probe_version, instruction_set, intensity, whole, unknown, recordings, results, uploads"
RUN = f"id, device, probe, started, stored, outcome, failed, wrong, drill, confirms, stack_id, body, {LANE}, brief"
"""Columns of a run; `brief` is the short form of the run for the judge (`judge.brief`), packed like `body`."""
ADD_RUN = f"INSERT INTO runs ({RUN}) VALUES ({', '.join('?' * 21)}) ON CONFLICT (id) DO NOTHING"
COUNTER = "name, labels, value"
ADD_COUNT = (
    f"INSERT INTO counters ({COUNTER}) VALUES (?, ?, ?)"
    " ON CONFLICT (name, labels) DO UPDATE SET value = value + excluded.value"
)
DEVICE = "uuid, first_seen, last_seen, present, body"
ADD_DEVICE = (
    f"INSERT INTO devices ({DEVICE}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (uuid) DO UPDATE"
    " SET last_seen = excluded.last_seen, present = excluded.present, body = excluded.body"
)
VERDICT = "device, drill, state, cause, decided, body"
POLL = "id, device, probe, started, completed, body"
ADD_POLL = f"INSERT INTO polls ({POLL}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
EVENT = "device, kind, name, first, last, count, before, after, detail, code, reading, labels, fields"
ADD_EVENT = (
    f"INSERT INTO events ({EVENT}, hour) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (device, kind, name, hour)"
    " DO UPDATE SET first = min(first, excluded.first), last = max(last, excluded.last),"
    " count = count + excluded.count, after = excluded.after, detail = excluded.detail,"
    " fields = excluded.fields"
)
BASELINE = "device, key, last, body"
ADD_BASELINE = (
    f"INSERT INTO baselines ({BASELINE}) VALUES (?, ?, ?, ?) ON CONFLICT (device, key) DO UPDATE"
    " SET last = excluded.last, body = excluded.body"
)
ACK = "device, kind, at, body"
ADD_ACK = f"INSERT INTO acks ({ACK}) VALUES (?, ?, ?, ?) ON CONFLICT (device, kind, at) DO NOTHING"
SUMMARY = "device, day, body"
ADD_SUMMARY = (
    f"INSERT INTO days ({SUMMARY}) VALUES (?, ?, ?) ON CONFLICT (device, day) DO UPDATE SET body = excluded.body"
)
MET = "device, line, last, body"
ADD_MET = (
    f"INSERT INTO met ({MET}) VALUES (?, ?, ?, ?) ON CONFLICT (device, line) DO UPDATE"
    " SET last = max(last, excluded.last), body = excluded.body"
)
DAY_OF_LANE = f"device, {', '.join(Lane._fields)}, day"
COUNTS = Tallied._fields[3:]
TALLY = f"{DAY_OF_LANE}, part, first, last, {', '.join(COUNTS)}"
"""Columns of a tally; `part` is the time (epoch s) after which this part of the day began, or 0."""
UPSERT_TALLY = (
    f"ON CONFLICT ({DAY_OF_LANE}, part) DO UPDATE"
    " SET first = min(first, excluded.first), last = max(last, excluded.last), "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS)
)
ADD_TALLY = f"INSERT INTO tallies ({TALLY}) VALUES ({', '.join('?' * len(TALLY.split(',')))}) {UPSERT_TALLY}"
JOIN_TALLIES = (
    f"INSERT INTO tallies ({TALLY}) SELECT {DAY_OF_LANE}, 0.0, min(first), max(last),"
    f" {', '.join(f'sum({name})' for name in COUNTS)} FROM tallies WHERE day < ? AND part > 0 GROUP BY {DAY_OF_LANE}"
    f" {UPSERT_TALLY}"
)
"""Adds up the parts of each day before one (in days since the epoch)."""
PART = (
    "SELECT max(at) FROM (SELECT max(last) AS at FROM tallies WHERE day = ? AND probe = ? AND erred AND last < ?"
    " UNION ALL SELECT max(at) FROM acks WHERE device = ? AND kind IN ('repaired', 'replaced') AND at >= ? AND at < ?)"
)
"""Query for the newest wrong result of a probe, or repair of a device, before a time on its day."""
COMPARED = f"device, {', '.join(SameKey._fields)}, at, body"
ADD_COMPARED = (
    f"INSERT INTO compared ({COMPARED}) VALUES (?, ?, ?, ?, ?, ?, ?)"
    f" ON CONFLICT (device, {', '.join(SameKey._fields)}) DO UPDATE SET at = excluded.at, body = excluded.body"
)
STACK = "id, body"
ADD_STACK = f"INSERT INTO stacks ({STACK}) VALUES (?, ?) ON CONFLICT (id) DO NOTHING"
NOTE = "INSERT INTO notes (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
COPIED = {
    "devices": (DEVICE, ADD_DEVICE),
    "counters": (COUNTER, ADD_COUNT),
    "polls": (POLL, ADD_POLL),
    "events": (f"{EVENT}, hour", ADD_EVENT),
    "notes": ("name, value", NOTE),
    "baselines": (BASELINE, ADD_BASELINE),
    "acks": (ACK, ADD_ACK),
    "days": (SUMMARY, ADD_SUMMARY),
    "tallies": (TALLY, ADD_TALLY),
    "stacks": (STACK, ADD_STACK),
    "compared": (COMPARED, ADD_COMPARED),
}
"""Tables whose rows move from memory to disk unchanged: name → (columns, statement that adds a row)."""


def baseline_key(baseline: Baseline) -> str:
    """Return the key of a baseline as text."""
    return json.dumps(baseline.key, separators=(",", ":"))


def refused(constant: str) -> float:
    """Raise `ValueError`: `constant` is a NaN or an infinity, which canaryd does not accept in JSON."""
    raise ValueError(f"{constant} is not a number")


FORMAT = 2
"""Version of the format of a run's body."""


def pack(value: Run | Device | Verdict | Baseline | Ack | Day | Met) -> bytes:
    """Return a model object as compressed JSON."""
    # Without defaults a run of many comparisons has half the fields, and a start reads thousands of runs.
    data = to_json(value, sparse=True) | {"format": FORMAT} if isinstance(value, Run) else to_json(value)
    # zlib: a run takes a twelfth of the space, and the checksum notices bytes that rotted.
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode())


def unpack(kind: type[T], body: bytes) -> T:
    """Return the `kind` object that `pack` packed; raise `ValueError`, `TypeError` or `zlib.error` if damaged."""
    text = zlib.decompress(body)
    data = json.loads(text, parse_constant=refused)
    data = whole(data) if b"\\ud" in text else data
    if kind is Run and isinstance(data, dict):
        data.pop("format", None)
    return from_json(kind, data)


def run_row(run: Run, stored: float) -> tuple[Any, ...]:
    """Return the row of a run."""
    facts = (run.id, run.device, run.probe, run.started, stored, run.outcome.value, run.failed, len(run.wrong))
    return (*facts, run.drill, run.confirms, run.stack_id, pack(run), *lane(run), pack(brief(run)))


def lane(run: Run) -> tuple[Any, ...]:
    """Return the values of a run in the columns `LANE`: its kind, and its numbers of cases, results and uploads."""
    kind = run.probe_version, run.instruction_set, run.intensity, run.whole
    return (*kind, len(run.unknown), len(run.recordings), run.trials, run.uploads)


def part_of(device: str, of: Tallied) -> tuple[Any, ...]:
    """Return the parameters of `PART` for the tally of one run."""
    day = of.first // DAY
    return int(day), of.lane.probe, of.first, device, day * DAY, of.first


def tally_row(device: str, of: Tallied, part: float | None) -> tuple[Any, ...]:
    """Return the row of a tally; `part` is what `PART` found before it."""
    return (device, *of.lane, int(of.first // DAY), part or 0.0, *of[1:])


def tally_from_row(row: Sequence[Any]) -> Tallied | None:
    """Return the tally with these values of its columns from the lane to the counts, or None if they are damaged."""
    kind, counts = row[: len(Lane._fields)], row[len(Lane._fields) :]
    if not all(map(is_number, (*counts, *kind[1:2], *kind[5:]))):
        return None
    probe, version, stack, sets, intensity, whole_, completed, erred = kind
    of = str(probe), version, str(stack), str(sets), str(intensity)
    return Tallied(Lane(*of, bool(whole_), bool(completed), bool(erred)), *counts)


def compared_row(device: str, key: SameKey, same: Same, at: float) -> tuple[Any, ...]:
    """Return the row of how siblings computed what a device computed wrong; `at` is its newest mismatch (epoch s)."""
    body = {"alike": sorted(same.alike), "unlike": sorted(same.unlike), "right": same.right}
    body["outlasted"] = sorted(same.outlasted)
    return device, *key, at, json.dumps(body, sort_keys=True)


def same_from_row(row: Sequence[Any]) -> tuple[SameKey, Same] | None:
    """Return the key and the facts in a row of the columns from the key on, without `at`; None if it is damaged."""
    probe, version, stack, own, body = row
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = json.loads(body)
        alike, unlike, outlasted = (frozenset(map(str, found[name])) for name in ("alike", "unlike", "outlasted"))
        right = {
            name: Right(int(failed), (str(case), str(shape), int(seed)))
            for name, (failed, (case, shape, seed)) in found["right"].items()
        }
        return SameKey(str(probe), int(version), str(stack), bool(own)), Same(right, alike, unlike, outlasted)
    return None


def stack_row(run: Run) -> tuple[str, str]:
    """Return the row of a run's software stack."""
    return run.stack_id, json.dumps(dict(run.stack))


def run_counts(run: Run, results: Tally) -> list[tuple[str, str, float]]:
    """Return the counts that a run with these results adds to the counters, as (name, labels, increment).

    Zero increments are included: `increase()` of Prometheus needs a series before its first increase.
    """
    of = {"device": run.device, "probe": run.probe}
    if run.drill:
        return [("drill_runs", encode_labels(of), 1), ("drill_mismatches", encode_labels(of), results.wrong)]
    return [
        ("probe_runs", encode_labels({**of, "outcome": run.outcome.value}), 1),
        ("probe_mismatches", encode_labels(of), results.wrong),
        ("probe_trials", encode_labels(of), float(results.of)),
    ]


def event_row(e: Event) -> tuple[Any, ...]:
    """Return the row of an event."""
    hour = int(e.last // HOUR)
    about = (e.code, e.reading, json.dumps(dict(e.labels)), json.dumps(dict(e.fields)))
    return (e.device, e.kind, e.name, e.first, e.last, e.count, e.before, e.after, e.detail, *about, hour)


def event_from_row(row: Sequence[Any]) -> Event:
    """Return the event with these values of the columns `EVENT`."""
    device, kind, name, first, last, count, before, after, detail, code, reading, labels, fields = row
    return Event(
        device=str(device),
        kind=str(kind),
        name=str(name),
        first=time_of(first),
        last=time_of(last),
        count=count if is_number(count) else 1.0,
        before=str(before),
        after=str(after),
        detail=str(detail),
        code=code if isinstance(code, int) else None,
        reading=str(reading),
        labels=texts(labels),
        fields=texts(fields),
    )


def is_number(column: object) -> bool:
    """Return whether a value from a number column is a finite number; SQLite returns damaged values as any type."""
    return isinstance(column, (int, float)) and math.isfinite(column)


def parse_time(text: str) -> float:
    """Return the time (epoch s) in the text of a note; raise `ValueError` if the text cannot be a time."""
    at = float(text)
    if not 0 <= at < END:
        raise ValueError(f"{text} is not a time")
    return at


def time_of(column: Any) -> float:
    """Return the time (epoch s) in a column, or 0.0 if the value is damaged."""
    return column if is_number(column) and 0 <= column < END else 0.0


def texts(column: Any) -> Mapping[str, str]:
    """Return the mapping of texts in a column, or {} if it is damaged: the rest of the event is still of use."""
    try:
        found = json.loads(column)
    except (TypeError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def encode_labels(labels: Mapping[str, str]) -> str:
    """Return labels as one text, sorted by name."""
    return urlencode(sorted(labels.items()))


def met_row(met: Met, last: float) -> tuple[Any, ...]:
    """Return the row of a record of exact test cases. Pruning takes `last` (epoch s) as the time of its last use."""
    return met.device, json.dumps(met.line, separators=(",", ":")), last, pack(met)


def add_met(db: sqlite3.Connection, rows: Iterable[Sequence[Any]]) -> None:
    """Add records of exact test cases. Stored records of the same key, perhaps of another process, are merged in."""
    for device, line, last, body in rows:
        stored = db.execute("SELECT body FROM met WHERE device = ? AND line = ?", (device, line)).fetchone()
        merged = body
        if stored:
            # A record that rotted is learnt anew from here.
            with contextlib.suppress(ValueError, TypeError, RecursionError, zlib.error):
                merged = pack(unpack(Met, stored[0]).merged(unpack(Met, body)))
        db.execute(ADD_MET, (device, line, last, merged))


def add_verdict(db: sqlite3.Connection, row: Sequence[Any]) -> None:
    """Add a verdict. It replaces the device's newest verdict if both have the same state and cause."""
    device, _, state, cause, decided, body = row
    last = db.execute(
        "SELECT number, state, cause FROM verdicts WHERE device = ? ORDER BY number DESC LIMIT 1", (device,)
    ).fetchone()
    if last and last[1:] == (state, cause):
        db.execute("UPDATE verdicts SET decided = ?, body = ? WHERE number = ?", (decided, body, last[0]))
    else:
        db.execute(f"INSERT INTO verdicts ({VERDICT}) VALUES (?, ?, ?, ?, ?, ?)", row)
