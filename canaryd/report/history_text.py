"""`canaryd history` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.formatting import HOUR, format_time, time_zone
from canaryd.report.advice import START
from canaryd.report.history import MOST_ITEMS, DeviceHistory, History
from canaryd.report.incidents import state_lines, step_lines
from canaryd.report.terminal import Line, paint, paragraph, typed

NARROW = 80
"""Columns of text at least: a narrower line would break within words."""


def as_text(history: History, width: int, *, verbose: bool = False, color: bool = False) -> str:
    """Return the history for a terminal of so many columns: the verdict first, then what happened."""
    room = max(NARROW, width)
    lines: list[Line] = []
    for one in history.devices:
        lines += [*_device_lines(one, room, verbose=verbose), ("", "")]
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


def _device_lines(one: DeviceHistory, room: int, *, verbose: bool) -> Iterator[Line]:
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
