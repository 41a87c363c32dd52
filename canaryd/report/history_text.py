"""`canaryd history` for a terminal."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from canaryd.formatting import DAY, HOUR, format_time, number, scale, time_zone
from canaryd.judge.phrases import count
from canaryd.judge.trends.change import Change
from canaryd.report.advice import START
from canaryd.report.history import MOST_ITEMS, MOST_READINGS, DeviceHistory, History, Trend, counter, is_telling
from canaryd.report.incidents import state_lines, step_lines
from canaryd.report.svg import value_range
from canaryd.report.terminal import Line, paint, paragraph, typed

BLOCKS = "▁▂▃▄▅▆▇█"
UP, DOWN = "↗", "↘"
NARROW = 80
"""Columns of text at least: a narrower table would lose a column."""


def sparkline(one: Trend, since: float, now: float, room: int) -> str:
    """Return the values over time in at most `room` columns: a space is a gap, an arrow a change of level."""
    first = math.floor(max(since, one.points[0].at - one.step / 2) / one.step)
    count = max(1, math.floor(now / one.step) - first + 1)
    arrows = one.changes[-max(1, room // 4) :]
    width = max(1, min(count, room - len(arrows)))
    per = count / width
    cells: list[list[float]] = [[] for _ in range(width)]
    for at, value in one.points:
        cells[min(width - 1, max(0, int((at / one.step - first) / per)))].append(value)
    low, high = value_range(one.values)
    drawn = []
    for values in cells:
        share = (statistics.median(values) - low) / (high - low) if values else -1.0
        drawn.append(BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if values else " ")
    for change in reversed(arrows):
        cell = min(width - 1, max(0, int((change.since * DAY / one.step - first) / per)))
        drawn.insert(cell, UP if change.after > change.before else DOWN)
    return "".join(drawn)


def as_text(history: History, width: int, *, verbose: bool = False, color: bool = False) -> str:
    """Return the history for a terminal of so many columns: the verdict first, then what happened, then readings."""
    room = max(NARROW, width)
    lines: list[Line] = []
    for one in history.devices:
        lines += [*_device_lines(one, history, room, verbose=verbose), ("", "")]
    if not history.devices:
        if history.asked is None:
            lines += [("", "nothing is recorded yet"), *step_lines("Do now: ", START, room), ("", "")]
        else:
            lines += [*paragraph("", NO_DEVICE, room), ("", "")]
    for problem in history.problems:
        lines += paragraph("problem: ", problem, room, role="calm")
    span = f"from {format_time(history.since, seconds=False)} to {format_time(history.now, seconds=False)}"
    lines += [*paragraph("", f"{span}; times: {time_zone()}. Everything:", room), ("", typed("canaryd history --json"))]
    return paint(lines, color=color)


NO_DEVICE = "no such device is known: canaryd status lists those that are"


def _device_lines(one: DeviceHistory, history: History, room: int, *, verbose: bool) -> Iterator[Line]:
    yield from state_lines(one.device, one.verdict, gone=not one.present, verbose=verbose, width=room)
    yield "", ""
    yield "head", "  What happened, newest first"
    if not one.items:
        yield "", "    nothing on record"
    for item in one.items[:MOST_ITEMS]:
        from_ = f" (since {format_time(item.first, seconds=False)})" if item.at - item.first >= HOUR else ""
        yield from paragraph(f"    {format_time(item.at, seconds=False)}  ", f"{item.text}{from_}", room, item.role)
    if (more := len(one.items) - MOST_ITEMS) > 0:
        yield "", f"    and {more} more: {typed('canaryd history --json')}"
    yield "", ""
    yield from _table(one, history, room)


COLUMNS = (8, 8, 8, 8)
NAME = 24
"""Columns of a reading's name; a longer one gets a line of its own."""


def _table(one: DeviceHistory, history: History, room: int) -> Iterator[Line]:
    telling = [t for t in one.trends if is_telling(t)]
    zeros = sum(counter(t) and not any(t.values) for t in one.trends)
    if not telling:
        yield "head", "  Readings"
        yield "", "    none on record" + (f" but {count(zeros, 'counter')} that did not rise" if zeros else "")
        return
    step = "hour" if telling[0].step == HOUR else "day"
    yield "head", f"  Readings, by the {step}"
    heads = "".join(f"{word:>{n}}" for word, n in zip(("min", "median", "max", "last"), COLUMNS, strict=True))
    yield "", f"    {'':<{NAME}}{heads}"
    bases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for t in telling:
        bases[t.key.probe, t.key.reading].append(t.key.basis)
    for t in telling[:MOST_READINGS]:
        size, symbol = scale(t.unit, max(map(abs, t.values)))
        name = f"{t.key.reading}{f' [{symbol}]' if symbol else ''}"
        if len(alike := bases[t.key.probe, t.key.reading]) > 1:
            name += f" {_difference(t.key.basis, alike, one.stacks)}"
        values = (min(t.values), statistics.median(t.values), max(t.values), t.values[-1])
        row = "".join(f"{number(v / size):>{n}}" for v, n in zip(values, COLUMNS, strict=True))
        if len(name) > NAME:
            yield from paragraph("    ", name, room)
            name = ""
        left = f"    {name:<{NAME}}{row}  "
        yield (
            "calm" if t.changes else "",
            f"{left}{sparkline(t, history.since, history.now, room - len(left))}".rstrip(),
        )
        for change in t.changes:
            yield from paragraph("      ", _change(change, size, symbol), room, role="calm")
    if (more := len(telling) - MOST_READINGS) > 0:
        yield "", f"    and {more} more readings: {typed('canaryd history --json')}"
    if zeros:
        yield "", f"    and {count(zeros, 'counter')} that did not rise"


SHORT = 48
"""Columns up to which the difference between stacks is named (ours); a longer one is shown as a digest."""


def _difference(basis: str, alike: Sequence[str], stacks: Mapping[str, Mapping[str, str]]) -> str:
    """Return how a basis ("version/level/stack") differs from the others of the same reading, e.g. "on torch 2.9"."""
    split = [b.split("/", 2) for b in alike]
    version, level, stack = basis.split("/", 2)
    parts_named = [f"version {version}"] if len({v for v, _, _ in split}) > 1 else []
    parts_named += [level] if len({n for _, n, _ in split}) > 1 else []
    ids = {s for _, _, s in split}
    if len(ids) > 1:
        parts = [stacks.get(i, {}) for i in ids]
        names = sorted(k for k in set().union(*parts) if len({p.get(k) for p in parts}) > 1)
        # One part that differs in all of them is enough: another instruction set implies other kernels.
        names = next(([k] for k in WELL_KNOWN if len({p.get(k) for p in parts}) == len(parts)), names)
        own = stacks.get(stack, {})
        values = ", ".join(own.get(k, f"no {k}") if k in SELF_EVIDENT else f"{k} {own.get(k, 'none')}" for k in names)
        parts_named.append(values if all(parts) and values and len(values) <= SHORT else f"stack {stack[:6]}")
    return f"on {', '.join(parts_named)}"


WELL_KNOWN = ("instruction_set", "torch", "mlx", "onnxruntime", "jax", "driver")
"""Parts of a stack that people know best, in the order in which they are tried."""
SELF_EVIDENT = frozenset({"instruction_set"})
"""Parts of a stack whose values need no name before them."""


def _change(change: Change, size: float, symbol: str) -> str:
    arrow = UP if change.after > change.before else DOWN
    before, after = (f"{number(v / size)} {symbol}".rstrip() for v in (change.before, change.after))
    return f"{arrow} from {before} to {after} on {format_time(change.since * DAY, seconds=False)[:10]}"
