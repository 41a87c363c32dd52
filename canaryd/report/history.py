"""`canaryd history`: what happened to a device, newest first. Everything comes from the store, no device is touched."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from canaryd.codec import finding_json, to_json
from canaryd.config.settings import Config
from canaryd.formatting import DAY, format_duration
from canaryd.judge.coverage import OUTCOMES
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count, reason_of
from canaryd.judge.slower import Day, Stack, stacks
from canaryd.model import AckKind, Device, Event, EventKind, Run, State, Verdict
from canaryd.report import status
from canaryd.report.events import AMOUNTS, describe_ack, describe_event
from canaryd.report.incidents import headline, incidents_json
from canaryd.report.terminal import verdict_note
from canaryd.store.store import Store

SCHEMA = "canaryd.history/2"
POLLS, RUNS, FAILED = 600, 400, 500
"""Polls, runs and failed runs of all devices together that are read (ours): about three seconds."""
LEAST_READ = 50
"""The same for one device at least."""
MOST_PAUSES = 5
"""Pauses that are listed one by one (ours); more of them are summed up in one line."""
MOST_ITEMS = 25
"""Lines that a terminal shows per device; JSON has all."""
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
class DeviceHistory:
    """The history of one device."""

    device: Device
    present: bool
    verdict: Verdict
    items: tuple[Item, ...]
    """Newest first."""


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
    days: Mapping[str, Sequence[Day]] | None = None,
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
        full = [part for part, most in ((polls, most_polls), (runs, most_runs)) if len(part) == most]
        read_from = max((min(r.started for r in part) for part in full), default=since)
        items = [
            *_verdicts(store.verdict_history(uuid)),
            *_pauses(summed, [*runs, *polls, *failed], read_from, now, config.judge.stale_after),
            *_failures(failed),
            *_events(store.events(since, uuid)),
            *_acks(store, uuid),
            *_stacks([*(s for day in summed for s in day.stacks), *stacks(runs)]),
        ]
        shown = sorted((i for i in items if since <= i.at <= now), key=lambda i: i.at, reverse=True)
        found.append(DeviceHistory(device=one.device, present=one.present, verdict=one.verdict, items=tuple(shown)))
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


def _pauses(days: Sequence[Day], seen: Sequence[Run], read_from: float, now: float, limit: float) -> Iterator[Item]:
    """Yield the times of more than `limit` seconds in which nothing was recorded, after the device's first record.

    `seen` are its runs and polls, complete from `read_from` on. On a day of which only the summary is left, something
    was recorded.
    """
    spans = [(r.started, r.started + r.seconds) for r in seen if r.started <= now]
    own = {int(start // DAY) for start, _ in spans}
    kept = (d.day for d in days if (d.levels or d.stacks or d.tested) and (d.day not in own or d.day * DAY < read_from))
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


def _stacks(seen: Iterable[Stack]) -> Iterator[Item]:
    """Yield the changes of the software stack; each CPU instruction set has a stack of its own."""
    newest: dict[str, Stack] = {}
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
            }
            for one in history.devices
        ],
        "problems": list(history.problems),
    }
