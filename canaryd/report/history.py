"""`canaryd history`: what happened to a device, newest first. Everything comes from the store; no device is used.

The timeline of a dossier is made of the same items.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canaryd.codec import to_json
from canaryd.config.settings import Config
from canaryd.formatting import DAY, HOUR, format_time, time_zone
from canaryd.judge.coverage import OUTCOMES
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count, reason_of
from canaryd.judge.slower import Day, Stack, stacks
from canaryd.judge.tally import counted
from canaryd.model import Ack, Event, EventKind, Outcome, Run, Verdict
from canaryd.report import status
from canaryd.report.advice import START
from canaryd.report.events import AMOUNTS, describe_ack, describe_event, joined
from canaryd.report.incidents import device_json, state_lines, step_lines, title
from canaryd.report.status import DeviceStatus
from canaryd.report.terminal import Line, paint, paragraph, role_of, typed, verdict_note
from canaryd.store.store import Store

SCHEMA = "canaryd.history/2"
RUNS, FAILED = 400, 500
"""Largest numbers of runs and of failed runs to read for all devices together (ours): that takes 3 seconds."""
LEAST_READ = 50
"""Smallest number of runs that are read for one device."""
MOST_ITEMS = 25
"""Largest number of lines per device on a terminal; JSON has all lines."""
BAD = frozenset(
    {
        *("xid", "sxid", "mce", "edac", "aer", EventKind.OFF_BUS, "pcie", "port", "unplaced", "oom", "thermal"),
        EventKind.COUNTER,
    }
)
"""Kinds of events that speak against a device. Other kinds, such as a change of the driver, do not."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of the timeline. Equal lines of one day are joined, with a count."""

    at: float
    """Time of the last occurrence, in seconds since the epoch."""
    first: float
    kind: str
    """"verdict", "run", "event", "ack" or "stack"."""
    role: str
    """"bad" for an event against the device, "good" for one in its favour, "calm" for others, "mark" for a
    statement."""
    text: str
    """A sentence without the time."""
    count: int = 1
    runs: tuple[str, ...] = ()
    """Ids of the runs that the line is about."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that `canaryd history` shows."""

    now: float
    since: float
    devices: tuple[tuple[DeviceStatus, tuple[Item, ...]], ...]
    """Each device with its items: the worst device first, the newest item first."""
    problems: tuple[str, ...]


def gather(
    store: Store, config: Config, device: str | None, since: float, now: float, days: Mapping[str, Sequence[Day]]
) -> History:
    """Return the history of one device (uuid), or of all for None, from `since` to `now` (seconds since the epoch).

    `days`: device → summaries of its days. A device that the store does not know is left out.
    """
    seen = status.gather(store, config, now, evidence={})
    chosen = [d for d in seen.devices if device in (None, d.device.uuid)]
    share = max(1, len(chosen))
    found = []
    for one in chosen:
        uuid = one.device.uuid
        runs = store.runs(uuid, since=since, limit=max(LEAST_READ, RUNS // share))
        items = [
            *of_verdicts(store.verdict_history(uuid)),
            *of_runs(store.runs(uuid, since=since, failed=True, limit=max(LEAST_READ, FAILED // share))),
            *of_events(store.events(since, uuid)),
            *of_acks(store.acks(uuid)),
            *of_stacks([*(s for day in days.get(uuid, ()) for s in day.stacks), *stacks(runs)]),
        ]
        shown = sorted((i for i in items if since <= i.at <= now), key=lambda i: i.at, reverse=True)
        found.append((one, tuple(shown)))
    return History(now=now, since=since, devices=tuple(found), problems=seen.problems)


def of_verdicts(verdicts: Sequence[Verdict]) -> Iterator[Item]:
    """Yield an item for each change of state or cause. The item names the incidents that are new."""
    before: set[tuple[str, str]] = set()
    for verdict in verdicts:
        held = incidents(verdict)
        came = [i for i in held if not {(f.rule, f.probe) for f in i.findings} <= before]
        before = {(f.rule, f.probe) for i in held for f in i.findings}
        why = "; ".join(map(title, came))
        text = f"became {verdict_note(verdict)}" + (f": {why}" if why else "")
        runs = tuple(r for i in came for r in i.runs)
        role = role_of(verdict.state)
        yield Item(at=verdict.since, first=verdict.since, kind="verdict", role=role, text=text, runs=runs)


def of_runs(runs: Iterable[Run], *, joined: bool = True) -> Iterator[Item]:
    """Yield items for runs that were wrong, differed from the baseline, or did not complete.

    With `joined`, runs of one day with the same probe and problem become one item.
    """
    alike: dict[tuple[str, str, object], list[Run]] = defaultdict(list)
    for run in runs:
        what = "wrong" if run.wrong else "unknown" if run.unknown else run.outcome.value
        if what not in (Outcome.COMPLETED.value, Outcome.SKIPPED.value):
            alike[run.probe, what, int(run.started // DAY) if joined else run.id].append(run)
    for (probe, what, _), same in alike.items():
        times = f"{len(same)} runs" if len(same) > 1 else "a run"
        again = sum(bool(r.confirms) for r in same)
        retested = f"{again} of them {'retests' if again > 1 else 'a retest'}" if len(same) > 1 else "a retest"
        retests = f" ({retested})" if again else ""
        if what == "wrong":
            cases = Counter(c.case for r in same for c in r.wrong)
            text = f"{count(counted(same).wrong, 'wrong result')} in {times} of {probe}{retests}, {_cases(cases)}"
        elif what == "unknown":
            cases = Counter(case for r in same for case in r.unknown)
            text = f"{times} of {probe}{retests}: results that differ from the baseline, {_cases(cases)}"
        else:
            why = next(filter(None, map(reason_of, reversed(same))), "")
            ended = OUTCOMES[same[0].outcome][1] if same[0].outcome in OUTCOMES else "ended with a device error"
            text = f"{times} of {probe}{retests} {ended}" + (f": {why}" if why else "")
        started, ids = [r.started for r in same], tuple(r.id for r in same)
        role = "bad" if what in ("wrong", "unknown") else "calm"
        yield Item(at=max(started), first=min(started), kind="run", role=role, text=text, count=len(same), runs=ids)


def _cases(cases: Counter[str]) -> str:
    (case, _), more = cases.most_common(1)[0], len(cases) - 1
    return f"most in case {case}, the others in {count(more, 'more case')}" if more else f"in case {case}"


def of_events(events: Iterable[Event]) -> Iterator[Item]:
    """Yield an item for each event. Equal events of one day are joined."""
    for e in joined(events):
        times = 1 if e.kind in AMOUNTS else max(1, round(e.count))
        role = "bad" if e.kind in BAD else "calm"
        yield Item(at=e.last, first=e.first, kind="event", role=role, text=describe_event(e), count=times)


def of_acks(acks: Iterable[Ack]) -> Iterator[Item]:
    """Yield an item for each statement of an operator."""
    for ack in acks:
        yield Item(at=ack.at, first=ack.at, kind="ack", role="mark", text=describe_ack(ack, dated=False))


def of_stacks(seen: Iterable[Stack]) -> Iterator[Item]:
    """Yield an item for each change of the software stack. Each CPU instruction set has its own stack."""
    newest: dict[str, Stack] = {}
    known: set[str] = set()
    for stack in sorted(seen, key=lambda s: s.at):
        kind = stack.parts.get("instruction_set", "")
        before = newest.get(kind)
        if before is not None and stack.id not in known:
            names = sorted(k for k in {*before.parts, *stack.parts} if before.parts.get(k) != stack.parts.get(k))
            moved = ", ".join(f"{k} {before.parts.get(k, 'none')} → {stack.parts.get(k, 'none')}" for k in names)
            text = f"the software changed: {moved}"
            yield Item(at=stack.at, first=stack.at, kind="stack", role="calm", text=text)
        known.add(stack.id)
        newest[kind] = stack


def as_json(history: History) -> dict[str, Any]:
    """Return the object that `canaryd history --json` prints (docs/history.schema.json)."""
    return {
        "schema": SCHEMA,
        "now": history.now,
        "since": history.since,
        "devices": [
            {
                **device_json(one.device, one.verdict),
                "name": one.device.name,
                "present": one.present,
                "state_since": one.verdict.since,
                "timeline": to_json(items),
            }
            for one, items in history.devices
        ],
        "problems": list(history.problems),
    }


def as_text(history: History, *, verbose: bool = False, color: bool = False) -> str:
    """Return the history as text: each device's verdict, then its items, newest first."""
    lines: list[Line] = []
    for one, items in history.devices:
        lines += state_lines(one.device, one.verdict, gone=not one.present, verbose=verbose)
        lines += [("", ""), ("head", "  What happened, newest first")]
        for item in items[:MOST_ITEMS]:
            from_ = f" (since {format_time(item.first, seconds=False)})" if item.at - item.first >= HOUR else ""
            at = format_time(item.at, seconds=False)
            lines += paragraph(f"    {at}  ", f"{item.text}{from_}", item.role)
        if not items:
            lines.append(("", "    nothing on record"))
        if (more := len(items) - MOST_ITEMS) > 0:
            lines.append(("", f"    and {more} more: {typed('canaryd history --json')}"))
        lines.append(("", ""))
    if not history.devices:
        lines += [("", "nothing is recorded yet"), *step_lines("Do now: ", START), ("", "")]
    for problem in history.problems:
        lines += paragraph("problem: ", problem, role="calm")
    span = f"from {format_time(history.since, seconds=False)} to {format_time(history.now, seconds=False)}"
    lines += [*paragraph("", f"{span}; times: {time_zone()}. Everything:"), ("", typed("canaryd history --json"))]
    return paint(lines, color=color)
