"""`canaryd history`: what happened to a device, newest first, and its readings over time.

Everything comes from the store, without touching a device. Older readings come from the summaries of days
(`canaryd.judge.trends.days.Day`), so that two months take seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.codec import finding_json, to_json
from canaryd.config.settings import Config
from canaryd.formatting import DAY, HOUR, format_duration
from canaryd.judge.coverage import OUTCOMES
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count, reason_of
from canaryd.judge.trends import change as trends_change
from canaryd.judge.trends import days as trends_days
from canaryd.judge.trends.change import Change
from canaryd.judge.trends.days import Key, Point
from canaryd.judge.trends.followed import HEAT, SHOWN, followed
from canaryd.model import AckKind, Device, Event, EventKind, Run, State, Verdict
from canaryd.report import status
from canaryd.report.events import AMOUNTS, describe_ack, describe_event
from canaryd.report.incidents import headline, incidents_json
from canaryd.report.terminal import verdict_note
from canaryd.store.store import Store

SCHEMA = "canaryd.history/1"
POLLS, RUNS, FAILED = 600, 400, 500
"""Polls, runs and failed runs of all devices together that are read (ours): about three seconds."""
LEAST_READ = 50
"""The same for one device at least."""
HOURLY = 3 * DAY
"""Span up to which readings are shown by the hour, and by the day beyond (ours)."""
MOST_PAUSES = 5
"""Pauses that are listed one by one (ours); more of them are summed up in one line."""
MOST_ITEMS, MOST_READINGS = 25, 20
"""Lines of each kind that a terminal shows per device; JSON has all."""
BAD = frozenset(
    {
        *("xid", "sxid", "mce", "edac", "aer", EventKind.OFF_BUS, "pcie", "port", "unplaced", "oom", "thermal"),
        EventKind.COUNTER,
    }
)
"""Kinds of events that count against a device; others are as harmless as a change of the driver."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of the timeline; equal ones of a day are joined, with a count."""

    at: float
    """When it was last, in seconds since the epoch."""
    first: float
    kind: str
    """"verdict", "run", "event", "ack", "stack" or "pause"."""
    role: str
    """"bad" for what counts against the device, "calm" for a change around it, "good", or "mark" for the rest."""
    label: str
    """A few words, for a mark in a plot; only JSON carries it."""
    text: str
    """A sentence, without its time."""
    count: int = 1
    runs: tuple[str, ...] = ()
    """Ids of the runs it is about."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """One reading over time."""

    key: Key
    unit: str
    step: float
    """Seconds that one point covers: an hour or a day."""
    points: tuple[Point, ...]
    """Oldest first, dated at the middle of their hour or day; never empty."""
    changes: tuple[Change, ...]
    """Where it changed to another level; days since the epoch."""

    @property
    def values(self) -> list[float]:
        """The points without their times."""
        return [p.value for p in self.points]


@dataclass(frozen=True, kw_only=True)
class DeviceHistory:
    """The history of one device."""

    device: Device
    present: bool
    verdict: Verdict
    items: tuple[Item, ...]
    """Newest first."""
    trends: tuple[Trend, ...]
    """Those that changed first."""
    stacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id of a stack → its parts, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that `canaryd history` shows."""

    now: float
    since: float
    devices: tuple[DeviceHistory, ...]
    """The worst first."""
    problems: tuple[str, ...]
    asked: str | None = None
    """The one device that was selected; None for all."""


def gather(
    store: Store,
    config: Config,
    device: str | None,
    since: float,
    now: float,
    days: Mapping[str, Sequence[trends_days.Day]] | None = None,
) -> History:
    """Read the history of one device (uuid or name), or of all, from `since` on; times in seconds since the epoch.

    `days` are the summaries of days by device. A device that the store does not know gives no entry.
    """
    seen = status.gather(store, config, now, evidence={})
    chosen = [d for d in seen.devices if device in (None, d.device.uuid, d.device.name)]
    share = max(1, len(chosen))
    found = []
    for one in chosen:
        uuid = one.device.uuid
        summed = (days or {}).get(uuid, ())
        most_polls, most_runs = max(LEAST_READ, POLLS // share), max(LEAST_READ, RUNS // share)
        polls = store.polls(uuid, since=since, completed=True, limit=most_polls)
        runs = store.runs(uuid, since=since, limit=most_runs)
        failed = store.runs(uuid, since=since, failed=True, limit=max(LEAST_READ, FAILED // share))
        stacks = [*(s for day in summed for s in day.stacks), *trends_days.stacks(runs)]
        full = [part for part, most in ((polls, most_polls), (runs, most_runs)) if len(part) == most]
        read_from = max((min(r.started for r in part) for part in full), default=since)
        items = [
            *_verdicts(store.verdict_history(uuid)),
            *_pauses(summed, [*runs, *polls, *failed], read_from, now, config.judge.stale_after),
            *_failures(failed),
            *_events(store.events(since, uuid)),
            *_acks(store, uuid),
            *_stacks(stacks),
        ]
        shown = sorted((i for i in items if since <= i.at <= now), key=lambda i: i.at, reverse=True)
        courses = _trends(summed, runs, polls, since, now)
        found.append(
            DeviceHistory(
                device=one.device,
                present=one.present,
                verdict=one.verdict,
                items=tuple(shown),
                trends=tuple(courses),
                stacks={s.id: s.parts for s in stacks},
            )
        )
    return History(now=now, since=since, devices=tuple(found), problems=seen.problems, asked=device)


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[Item]:
    """Yield each change of state or cause with the incidents that came with it."""
    before: set[tuple[str, str]] = set()
    for verdict in verdicts:
        held = incidents(verdict)
        came = [i for i in held if not {(f.rule, f.probe) for f in i.findings} <= before]
        before = {(f.rule, f.probe) for i in held for f in i.findings}
        label = f"became {verdict_note(verdict)}"
        why = "; ".join(map(headline, came))
        text = f"{label}: {why}" if why else label
        role = "bad" if verdict.state.severity >= State.SUSPECT.severity else "calm"
        role = "good" if verdict.state is State.HEALTHY else role
        runs = tuple(r for i in came for r in i.runs)
        yield Item(at=verdict.since, first=verdict.since, kind="verdict", role=role, label=label, text=text, runs=runs)


def _failures(runs: Iterable[Run]) -> Iterator[Item]:
    """Yield wrong results, differences from a baseline and runs that did not complete, equal ones of a day joined."""
    alike: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs:
        what = "wrong" if run.wrong else "unknown" if run.unknown else run.outcome.value
        alike[run.probe, what, int(run.started // DAY)].append(run)
    for (probe, what, _), same in alike.items():
        first, last = min(r.started for r in same), max(r.started for r in same)
        times = f"{len(same)} runs" if len(same) > 1 else "a run"
        again = sum(bool(r.confirms) for r in same)
        retests = f" ({again} of them {'retests' if again > 1 else 'a retest'})" if again else ""
        if what == "wrong":
            wrong = sum(c.wrong_trials for r in same for c in r.wrong)
            cases = Counter(c.case for r in same for c in r.wrong)
            text = f"{count(wrong, 'wrong result')} in {times} of {probe}{retests}, {_cases(cases)}"
        elif what == "unknown":
            cases = Counter(case for r in same for case in r.unknown)
            text = f"{times} of {probe}{retests}: results that differ from the baseline, {_cases(cases)}"
        else:
            why = next(filter(None, map(reason_of, reversed(same))), "")
            text = f"{times} of {probe}{retests} {OUTCOMES[same[0].outcome][1]}" + (f": {why}" if why else "")
        role = "bad" if what in ("wrong", "unknown") else "calm"
        ids = tuple(r.id for r in same)
        label = f"{probe}: {what.replace('_', ' ')}"
        yield Item(at=last, first=first, kind="run", role=role, label=label, text=text, count=len(same), runs=ids)


def _cases(cases: Counter[str]) -> str:
    (case, _), more = cases.most_common(1)[0], len(cases) - 1
    return f"most in case {case}, the others in {more} more cases" if more else f"in case {case}"


def _events(events: Iterable[Event]) -> Iterator[Item]:
    """Yield the events, equal ones of a day joined."""
    alike: dict[tuple[str, str, int], Event] = {}
    for event in events:
        key = event.kind, event.name, int(event.last // DAY)
        old = alike.get(key)
        alike[key] = event if old is None else replace(event, first=old.first, count=old.count + event.count)
    for event in alike.values():
        text = describe_event(event)
        role = "bad" if event.kind in BAD else "calm"
        count = 1 if event.kind in AMOUNTS else max(1, round(event.count))
        label = f"{event.kind} {event.name}"
        yield Item(at=event.last, first=event.first, kind="event", role=role, label=label, text=text, count=count)


def _acks(store: Store, uuid: str) -> Iterator[Item]:
    for ack in store.acks(uuid):
        text = describe_ack(ack, dated=False)
        ended = ack.kind == AckKind.ACKNOWLEDGED and ack.until <= ack.at
        label = "acknowledgement ended" if ended else ack.kind
        yield Item(at=ack.at, first=ack.at, kind="ack", role="mark", label=label, text=text)


def _pauses(
    days: Sequence[trends_days.Day], seen: Sequence[Run], read_from: float, now: float, limit: float
) -> Iterator[Item]:
    """Yield the times of more than `limit` seconds in which nothing was recorded, after the device's first record.

    `seen` are its runs and polls, complete from `read_from` on. On a day of which only the summary is left, something
    was recorded.
    """
    spans = [(r.started, r.started + r.seconds) for r in seen if r.started <= now]
    own = {int(start // DAY) for start, _ in spans}
    kept = (d.day for d in days if (d.levels or d.stacks) and (d.day not in own or d.day * DAY < read_from))
    spans += [(day * DAY, (day + 1) * DAY) for day in kept]
    found: list[tuple[float, float]] = []
    reached = math.inf  # there is no pause before the first record
    for start, end in [*sorted(spans), (now, now)]:
        if start > read_from and start - reached > limit:
            found.append((reached, start))
        reached = end if math.isinf(reached) else max(reached, end)
    if len(found) > MOST_PAUSES:
        longest = format_duration(max(end - start for start, end in found))
        what = f"{len(found)} gaps of more than {format_duration(limit)} without a record, the longest {longest}"
        yield _pause(found[0][0], found[-1][1], what, len(found))
    else:
        for start, end in found:
            yield _pause(start, end, f"nothing was recorded for {format_duration(end - start)}", 1)


def _pause(start: float, end: float, what: str, count: int) -> Item:
    text = f"{what} (no daemon ran, or it could not test)"
    return Item(at=end, first=start, kind="pause", role="calm", label="nothing recorded", text=text, count=count)


def _stacks(seen: Iterable[trends_days.Stack]) -> Iterator[Item]:
    """Yield the changes of the software stack; each CPU instruction set has a stack of its own."""
    newest: dict[str, trends_days.Stack] = {}
    known: set[str] = set()
    for stack in sorted(seen, key=lambda s: s.at):
        kind = stack.parts.get("instruction_set", "")
        before = newest.get(kind)
        if before is not None and stack.id not in known:
            names = sorted(k for k in {*before.parts, *stack.parts} if before.parts.get(k) != stack.parts.get(k))
            moved = ", ".join(f"{k} {before.parts.get(k, 'none')} → {stack.parts.get(k, 'none')}" for k in names)
            text = f"the software changed: {moved}; readings before and after are not comparable"
            yield Item(at=stack.at, first=stack.at, kind="stack", role="calm", label=moved, text=text)
        known.add(stack.id)
        newest[kind] = stack


def _trends(
    days: Sequence[trends_days.Day], runs: Sequence[Run], polls: Sequence[Run], since: float, now: float
) -> list[Trend]:
    """Return each followed reading over time: those that changed first, then those that a rule judges."""
    daily = trends_days.courses(days, runs, polls)
    hourly = now - since <= HOURLY
    points: dict[Key, tuple[str, list[Point]]] = {}
    if hourly:
        for key, track in trends_days.tracks(runs, polls).items():
            by_hour: dict[int, list[float]] = defaultdict(list)
            for at, value in track.points:
                by_hour[int(at // HOUR)].append(value)
            how = followed(key.reading) or SHOWN
            points[key] = (
                track.unit,
                [Point((h + 0.5) * HOUR, trends_days.level(v, how)) for h, v in sorted(by_hour.items())],
            )
    else:
        for key, course in daily.items():
            points[key] = course.unit, [Point((d + 0.5) * DAY, v) for d, v in sorted(course.days.items())]
    step = HOUR if hourly else DAY
    found = []
    for key, (unit, all_) in points.items():
        inside = tuple(p for p in all_ if since <= p.at + step / 2 and p.at - step / 2 <= now)
        changes = trends_change.marks(daily[key], key.reading) if key in daily else []
        shown = tuple(c for c in changes if c.since * DAY >= since - DAY)
        if inside:
            found.append(Trend(key=key, unit=unit, step=step, points=inside, changes=shown))
    return sorted(found, key=_importance)


def _importance(one: Trend) -> tuple[Any, ...]:
    how = followed(one.key.reading) or SHOWN
    return not one.changes, how is HEAT, not how.rule, one.key


def is_telling(one: Trend) -> bool:
    """Whether a reading is worth a line. Counters that stayed zero and unchanged heat by power are not."""
    if one.changes:
        return True
    return followed(one.key.reading) is not HEAT and (any(one.values) or not counter(one))


def counter(one: Trend) -> bool:
    """Whether a trend follows a counter."""
    how = followed(one.key.reading)
    return how is not None and how.level == "mean"


def as_json(history: History) -> dict[str, Any]:
    """Return the object that `canaryd history --json` prints (docs/json.md, docs/history.schema.json)."""
    return {
        "schema": SCHEMA,
        "now": history.now,
        "since": history.since,
        "devices": [
            {
                "device": one.device.uuid,
                "backend": one.device.backend,
                "index": one.device.index,
                "name": one.device.name,
                "model": one.device.model,
                "present": one.present,
                "state": one.verdict.state.value,
                "cause": one.verdict.cause.value,
                "state_since": one.verdict.since,
                "incidents": incidents_json(one.verdict, one.device),
                "findings": [finding_json(f) for f in one.verdict.findings],
                "timeline": [to_json(item) for item in one.items],
                "readings": [_reading(t) for t in one.trends],
            }
            for one in history.devices
        ],
        "problems": list(history.problems),
    }


def _reading(one: Trend) -> dict[str, Any]:
    return {
        "probe": one.key.probe,
        "reading": one.key.reading,
        "basis": one.key.basis,
        "unit": one.unit,
        "step": one.step,
        "min": min(one.values),
        "median": statistics.median(one.values),
        "max": max(one.values),
        "last": one.values[-1],
        "points": [[p.at, p.value] for p in one.points],
        "changes": [
            {"at": c.since * DAY, "before": c.before, "after": c.after, "chance": c.chance} for c in one.changes
        ],
    }
