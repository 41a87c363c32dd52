"""`canaryd history` for a terminal."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from canaryd.formatting import DAY, HOUR, moment, number, scale, spoken, wrapped
from canaryd.judge.trends.change import Change
from canaryd.model import Finding, State, printable
from canaryd.report.history import MOST_ITEMS, MOST_READINGS, DeviceHistory, History, Trend, counter, is_telling

BLOCKS = "▁▂▃▄▅▆▇█"
FLAT = 0.05
"""Least height of a sparkline as a share of the largest value (ours): noise must not look like a change."""
UP, DOWN = "↗", "↘"
NARROW = 80
"""Columns of text at least: a narrower table would have to leave something out."""
COLOURS = {"bad": "\x1b[31m", "calm": "\x1b[33m", "good": "\x1b[32m", "head": "\x1b[1m"}
PLAIN = "\x1b[0m"


def sparkline(one: Trend, since: float, now: float, room: int) -> str:
    """Return the course in at most `room` columns: blocks, spaces where nothing is known, an arrow at each change."""
    first = math.floor(max(since, one.points[0].at - one.step / 2) / one.step)
    count = max(1, math.floor(now / one.step) - first + 1)
    arrows = one.changes[-max(1, room // 4) :]
    width = max(1, min(count, room - len(arrows)))
    per = count / width
    cells: list[list[float]] = [[] for _ in range(width)]
    for at, value in one.points:
        cells[min(width - 1, max(0, int((at / one.step - first) / per)))].append(value)
    low, high = min(one.values), max(one.values)
    spare = max(0.0, (FLAT * max(abs(low), abs(high)) or 1.0) - (high - low)) / 2
    low, high = low - spare, high + spare
    drawn = []
    for values in cells:
        share = (statistics.median(values) - low) / (high - low) if values else -1.0
        drawn.append(BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if values else " ")
    for change in reversed(arrows):
        cell = min(width - 1, max(0, int((change.since * DAY / one.step - first) / per)))
        drawn.insert(cell, UP if change.after > change.before else DOWN)
    return "".join(drawn)


def as_text(history: History, width: int, *, color: bool = False) -> str:
    """Return the history for a terminal of so many columns: the verdict first, then what happened, then readings."""
    room = max(NARROW, width)
    lines: list[tuple[str, str]] = []
    for one in history.devices:
        lines += [*_text_of(one, history, room), ("", "")]
    if not history.devices:
        said = NOTHING if history.asked is None else NOBODY
        lines += [("", line) for line in wrapped("", said, room)] + [("", "")]
    for problem in history.problems:
        lines += [("calm", line) for line in wrapped("problem: ", problem, room)]
    span = f"from {moment(history.since, seconds=False)} to {moment(history.now, seconds=False)}, local time"
    lines += [("", line) for line in wrapped("", f"{span}; all of it: canaryd history --json", room)]
    safe = ((role, printable(line)) for role, line in lines)
    return "\n".join(
        f"{COLOURS[role]}{line}{PLAIN}" if color and role in COLOURS and line else line for role, line in safe
    )


NOTHING = "nothing was recorded yet: start the daemon (canaryd run), or run canaryd check"
NOBODY = "nothing is known of such a device: canaryd status names those that are known"


def _text_of(one: DeviceHistory, history: History, room: int) -> Iterator[tuple[str, str]]:
    device, verdict = one.device, one.verdict
    gone = "" if one.present else "  GONE"
    for line in wrapped("", f"{device.name}  {device.model}  {device.uuid}{gone}", room):
        yield "head", line
    role = {State.HEALTHY: "good", State.SUSPECT: "bad", State.FAULTY: "bad"}.get(verdict.state, "calm")
    cause = "" if verdict.state is State.HEALTHY else f", cause: {verdict.cause.value}"
    ago = spoken(history.now - verdict.since)
    since = f"since {moment(verdict.since, seconds=False)} ({ago} ago)"
    for line in wrapped("  ", f"{verdict.state.value.upper()}{cause}, {since}", room):
        yield role, line
    for finding in verdict.findings:
        lead = "  - note  " if finding.state is State.HEALTHY else f"  - {finding.state.value}  "
        for line in wrapped(lead, _sentence(finding), room):
            yield "", line
    yield "", ""
    yield "head", "  What happened, newest first"
    if not one.items:
        yield "", "    nothing that was kept"
    for item in one.items[:MOST_ITEMS]:
        from_ = f" (since {moment(item.first, seconds=False)})" if item.at - item.first >= HOUR else ""
        for line in wrapped(f"    {moment(item.at, seconds=False)}  ", f"{item.text}{from_}", room):
            yield item.role, line
    if (more := len(one.items) - MOST_ITEMS) > 0:
        yield "", f"    and {more} more: canaryd history --json"
    yield "", ""
    yield from _table(one, history, room)


def _sentence(finding: Finding) -> str:
    where = f"{finding.probe}: " if finding.probe and not finding.message.startswith(finding.probe) else ""
    return f"{where}{finding.message}"


COLUMNS = (8, 8, 8, 8)
NAME = 24
"""Columns of a reading's name; a longer one gets a line of its own."""


def _table(one: DeviceHistory, history: History, room: int) -> Iterator[tuple[str, str]]:
    telling = [t for t in one.trends if is_telling(t)]
    zeros = sum(counter(t) and not any(t.values) for t in one.trends)
    if not telling:
        yield "head", "  Readings"
        yield "", "    none that was kept" + (f" but {_zeros(zeros)}" if zeros else "")
        return
    step = "hour" if telling[0].step == HOUR else "day"
    yield "head", f"  Readings, by the {step}"
    heads = "".join(f"{word:>{n}}" for word, n in zip(("least", "median", "most", "last"), COLUMNS, strict=True))
    yield "", f"    {'':<{NAME}}{heads}"
    bases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for t in telling:
        bases[t.key.probe, t.key.reading].append(t.key.basis)
    for t in telling[:MOST_READINGS]:
        size, symbol = scale(t.unit, max(map(abs, t.values)))
        name = f"{t.key.reading}{f' [{symbol}]' if symbol else ''}"
        if len(alike := bases[t.key.probe, t.key.reading]) > 1:
            name += f" {_apart(t.key.basis, alike, one.stacks)}"
        values = (min(t.values), statistics.median(t.values), max(t.values), t.values[-1])
        row = "".join(f"{number(v / size):>{n}}" for v, n in zip(values, COLUMNS, strict=True))
        if len(name) > NAME:
            for line in wrapped("    ", name, room):
                yield "", line
            name = ""
        left = f"    {name:<{NAME}}{row}  "
        yield (
            "calm" if t.changes else "",
            f"{left}{sparkline(t, history.since, history.now, room - len(left))}".rstrip(),
        )
        for change in t.changes:
            for line in wrapped("      ", _told(change, size, symbol), room):
                yield "calm", line
    if (more := len(telling) - MOST_READINGS) > 0:
        yield "", f"    and {more} more readings: canaryd history --json"
    if zeros:
        yield "", f"    and {_zeros(zeros)}"


SHORT = 48
"""Columns up to which what differs between stacks is named (ours); the digest stands for more."""


def _apart(basis: str, alike: Sequence[str], stacks: Mapping[str, Mapping[str, str]]) -> str:
    """Return in words what tells a basis ("version/level/stack") from the others of the same reading."""
    split = [b.split("/", 2) for b in alike]
    version, level, stack = basis.split("/", 2)
    said = [f"version {version}"] if len({v for v, _, _ in split}) > 1 else []
    said += [level] if len({n for _, n, _ in split}) > 1 else []
    ids = {s for _, _, s in split}
    if len(ids) > 1:
        parts = [stacks.get(i, {}) for i in ids]
        names = sorted(k for k in set().union(*parts) if len({p.get(k) for p in parts}) > 1)
        # One part that is another in each of them is enough: an instruction set brings its kernels with it.
        names = next(([k] for k in TELLING if len({p.get(k) for p in parts}) == len(parts)), names)
        own = stacks.get(stack, {})
        values = ", ".join(own.get(k, f"no {k}") if k in SELF_EVIDENT else f"{k} {own.get(k, 'none')}" for k in names)
        said.append(values if all(parts) and values and len(values) <= SHORT else f"stack {stack[:6]}")
    return f"on {', '.join(said)}"


TELLING = ("instruction_set", "torch", "driver")
"""Parts of a stack by which people know it, the first that tells all apart first."""
SELF_EVIDENT = frozenset({"instruction_set"})
"""Parts of a stack whose values need no name beside them."""


def _zeros(count: int) -> str:
    return f"{count} counter{'s' if count > 1 else ''} that did not rise"


def _told(change: Change, size: float, symbol: str) -> str:
    arrow = UP if change.after > change.before else DOWN
    before, after = (f"{number(v / size)} {symbol}".rstrip() for v in (change.before, change.after))
    return f"{arrow} from {before} to {after} on {moment(change.since * DAY, seconds=False)[:10]}"
