"""Show the result of `canaryd_lab.worker.canary.compare` (docs/lab.md) on a terminal and on a page with a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from canaryd.facts import printable
from canaryd.formatting import columns, wrapped
from canaryd_lab import html
from canaryd_lab.html import escape

WIDTH = 100
"""Maximum number of columns of the table; on a narrower terminal the operators' names are shortened."""
SERIES = 6
"""Maximum number of lines in the plot. Each is a forward pass; the pass with the first difference is always shown."""
WORDS = {
    "equal": "EQUAL",
    "rounding": "ROUNDING",
    "fault": "FAULT",
    "different model": "DIFFERENT MODEL",
    "incomparable": "INCOMPARABLE",
}

Row = Mapping[str, Any]


def table(result: Mapping[str, Any], width: int | None = None) -> str:
    """Return the comparison as text of at most `WIDTH` columns, and at most `width` (None: the terminal's width)."""
    verdict = result["verdict"]
    room = min(WIDTH, columns() if width is None else width)
    lines = wrapped(f"{WORDS[verdict['kind']]}: ", verdict["why"], room)
    lines += [line for which in "AB" for line in wrapped(f"{which}: ", _head(which, result), room)]
    lines += [line for note in result["notes"] for line in wrapped("note: ", note, room)]
    lines += [line for found in result["tokens"] for line in wrapped("token: ", _token(found), room)]
    passes = _passes(result)
    detailed = _detailed_pass(result, passes)
    for key, rows in passes.items():
        if key == detailed:
            lines += ["", f"prompt {key[0]}, step {key[1]}", *_table_of(rows, verdict, room)]
    others = {key: rows for key, rows in passes.items() if key != detailed}
    if others:
        lines += ["", "other passes"]
        lines += [line for text in _folded(others) for line in wrapped("  ", text, room)]
    return "\n".join(printable(line)[:room] for line in lines)


def _head(which: str, result: Mapping[str, Any]) -> str:
    header = result[which.lower()]
    drill = f", DRILL at {header['drill']}" if header["drill"] else ""
    about = f"{header['dtype']} {header['path']}, {header['date']}, {header['device_model']}, {header['device']}{drill}"
    return f"{_file(which, result)}{about}"


def _file(which: str, result: Mapping[str, Any]) -> str:
    path = result.get("files", {}).get(which.lower(), "")
    return f"{Path(path).name}, " if path else ""


def _token(found: Mapping[str, Any]) -> str:
    return f"prompt {found['prompt']}, position {found['position']}: {found['a']} in A, {found['b']} in B"


def _passes(result: Mapping[str, Any]) -> dict[tuple[str, str], list[Row]]:
    grouped = groupby(result["rows"], key=lambda row: (row["prompt"], row["step"]))
    return {key: list(rows) for key, rows in grouped}


def _detailed_pass(result: Mapping[str, Any], passes: Mapping[tuple[str, str], list[Row]]) -> tuple[str, str] | None:
    """Return (prompt, step) of the pass with the first difference, else of the first pass; None if there is no pass."""
    verdict = result["verdict"]
    return (verdict["prompt"], verdict["step"]) if verdict["prompt"] else next(iter(passes), None)


def _table_of(rows: Sequence[Row], verdict: Mapping[str, Any], room: int) -> list[str]:
    """Return the lines of a table for one pass, `room` columns wide; consecutive equal tensors share one line."""
    name = max(12, min(26, room - 62))
    lines = [
        f"  {'layer':<6} {'operator':<{name}} {'rel. L2':>8} {'1 - cos':>8} {'ULP':>10} {'max diff':>8} {'excess':>7}"
    ]
    for equal, stretch in groupby(rows, key=lambda row: bool(row["equal"])):
        part = list(stretch)
        if equal:
            lines.append(f"  {_span(part)}: {len(part)} equal")
            continue
        for row in part:
            mark = ">" if _is_place(row, verdict) else " "
            accused = f" {row['departs']}" if row["departs"] else ""
            lines.append(
                f"{mark} {row['layer'][:6]:<6} {row['operator'][:name]:<{name}} {_number(row.get('relative_l2')):>8}"
                f" {_number(_one_minus_cosine(row)):>8} {_whole(row.get('ulp')):>10} {_number(row.get('max_abs')):>8}"
                f" {_number(row['excess']):>7}{accused}"
            )
            if _is_place(row, verdict):
                lines += [line for text in _detail(row) for line in wrapped("    ", text, room)]
    return lines


def _is_place(row: Row, verdict: Mapping[str, Any]) -> bool:
    """Return whether this row is the place that the verdict names."""
    keys = ("prompt", "step")
    operator = verdict["first_operator"] or row["operator"]
    return (
        all(row[key] == verdict[key] for key in keys)
        and row["layer"] == verdict["first_layer"]
        and row["operator"] == operator
    )


def _span(rows: Sequence[Row]) -> str:
    first, last = (f"{row['layer']}.{row['operator']}" for row in (rows[0], rows[-1]))
    return first if first == last else f"{first} … {last}"


def _one_minus_cosine(row: Row) -> float | None:
    return None if row.get("cosine") is None else 1.0 - row["cosine"]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "inf" if value >= 1e300 else f"{value:.2g}"  # JSON has no infinity


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}" if value < 10**8 else f"{value:.2g}"


def _detail(row: Row) -> list[str]:
    """Return lines that describe the first element that differs, or [] if the row has none."""
    if "first" not in row:
        return []
    first = row["first"]
    lines = [f"{row['differing']:,} of {row['total']:,} elements differ, the first at {first['index']}:"]
    lines.append(f"{first['a']} ({first['a_bits']}) in A, {first['b']} ({first['b_bits']}) in B")
    if row["absent"]:
        lines.append(f"{row['absent']}: {row['nonfinite'][0]:,} not finite in A, {row['nonfinite'][1]:,} in B")
    return lines


def _folded(passes: Mapping[tuple[str, str], list[Row]]) -> list[str]:
    """Return one line for each pass that differs, and one line for each group of consecutive equal passes."""
    lines = []
    for equal, stretch in groupby(passes.items(), key=lambda item: all(row["equal"] for row in item[1])):
        part = list(stretch)
        names = [f"{prompt} {step}" for (prompt, step), _ in part]
        if equal:
            span = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
            lines.append(f"{span}: {sum(len(rows) for _, rows in part):,} tensors equal")
            continue
        for name, (_, rows) in zip(names, part, strict=True):
            worst = max(rows, key=lambda row: row.get("relative_l2") or 0.0)
            unequal = sum(not row["equal"] for row in rows)
            size = _number(worst.get("relative_l2"))
            beyond = sum(bool(row["departs"]) for row in rows)
            what = f"{unequal} of {len(rows)} differ, rel. L2 up to {size} at {worst['layer']}.{worst['operator']}"
            lines.append(f"{name}: {what}" + (f", {beyond} beyond rounding" if beyond else ""))
    return lines


STYLE = """
:root { --c0: #2563c9; --c1: #a0a8b2; }
@media (prefers-color-scheme: dark) { :root { --c0: #6ea8ff; --c1: #5d6670; } }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.fault { color: var(--bad); } .equal { color: var(--good); } .rounding { color: var(--good); }
.different, .incomparable { color: var(--calm); }
svg { display: block; min-width: 40rem; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the comparison as one HTML page: the verdict, the plot, and the text for a terminal."""
    verdict, passes = result["verdict"], _passes(result)
    kind = verdict["kind"]
    parts = [f'<h1 class="{escape(kind.split()[0])}">{WORDS[kind]}</h1><p>{escape(verdict["why"])}</p>']
    if detailed := _detailed_pass(result, passes):
        parts += ["<h2>Relative error by depth</h2>", f'<div class="wide">{_plot(passes, detailed, verdict)}</div>']
        parts.append(f'<p class="soft">{CAPTION}{OTHERS if len(passes) > 1 else ""}</p>')
    parts.append(f'<h2>In numbers</h2><div class="wide"><pre>{escape(table(result, WIDTH))}</pre></div>')
    return html.document(f"canaryd compare: {kind}", html.STYLE + STYLE, parts)


CAPTION = "Points: tensors in computing order; equal ones at the bottom. Rounding grows slowly, a fault jumps."
OTHERS = " Grey: other passes."
LEFT, RIGHT, TOP, BOTTOM, W, H = 64, 12, 28, 40, 960, 380
"""Margins (left, right, top, bottom), width and height of the plot, in units of the SVG."""


def _plot(passes: Mapping[tuple[str, str], list[Row]], detailed: tuple[str, str], verdict: Mapping[str, Any]) -> str:
    """Return an SVG: relative L2 difference on a logarithmic axis, over the tensors in the order of computation."""
    background = [key for key in passes if key != detailed][: SERIES - 1]
    values = [row["relative_l2"] for key in (*background, detailed) for row in passes[key] if row.get("relative_l2")]
    low = math.floor(math.log10(min(values))) if values else -8
    high = max(low + 1, math.ceil(math.log10(max(values))) if values else 0)
    places = [(row["layer"], row["operator"]) for row in passes[detailed]]
    at = {place: i for i, place in enumerate(places)}
    step = (W - LEFT - RIGHT) / max(1, len(places) - 1)
    bottom = H - BOTTOM

    def x(i: int) -> float:
        return LEFT + i * step

    def y(row: Row) -> float:
        return bottom if row["equal"] else level(row.get("relative_l2"))

    def level(value: float | None) -> float:
        if not value:  # some element is not finite, or A is zero
            return TOP
        return bottom - 16 - (math.log10(value) - low) / (high - low) * (bottom - 16 - TOP)

    parts = [f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="relative L2 by operator">']
    every = max(1, (high - low) // 8)
    for power in range(low, high + 1, every):
        at_y = level(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{W - RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at_y + 4:.1f}" text-anchor="end">1e{power}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{W - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="var(--soft)"/>')
    parts.append(f'<text x="{LEFT - 8}" y="{bottom + 4}" text-anchor="end">equal</text>')
    parts += _layers(places, x, step, bottom)
    for key in (*background, detailed):
        colour, width = ("var(--c0)", 2) if key == detailed else ("var(--c1)", 1)
        points = [(x(at[p]), y(row), row) for row in passes[key] if (p := _at(row)) in at]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        if key == detailed:
            for a, b, row in points:
                text = escape(f"{row['layer']}.{row['operator']}: {_number(row.get('relative_l2'))}")
                fill = "var(--bad)" if row["departs"] else colour
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{fill}"><title>{text}</title></circle>')
    here = next((row for row in passes[detailed] if verdict["kind"] == "fault" and _is_place(row, verdict)), None)
    if here is not None:
        i = at[_at(here)]
        anchor, offset = ("end", -6) if i > len(places) / 2 else ("start", 6)
        text = escape(f"{here['layer']}.{here['operator']}")
        line = f'<line x1="{x(i):.1f}" x2="{x(i):.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="var(--bad)"'
        parts.append(f'{line} stroke-dasharray="4 3"/>')
        label = f'<text x="{x(i) + offset:.1f}" y="{TOP - 12}" text-anchor="{anchor}" style="fill: var(--bad)">'
        parts.append(f"{label}fault at {text}</text>")
    return "".join([*parts, "</svg>"])


def _at(row: Row) -> tuple[str, str]:
    return row["layer"], row["operator"]


def _layers(places: Sequence[tuple[str, str]], x: Any, step: float, bottom: float) -> list[str]:
    """Return the SVG of marks below the axis, one where each layer begins, with the layers' names if they fit."""
    parts, room = [], -math.inf
    i = 0
    for layer, stretch in groupby(places, key=lambda place: place[0]):
        count = len(list(stretch))
        start, middle = x(i) - step / 2, x(i) + step * (count - 1) / 2
        if i:
            parts.append(f'<line x1="{start:.1f}" x2="{start:.1f}" y1="{TOP}" y2="{bottom + 6}" stroke="var(--line)"/>')
        width = 7 * len(layer) + 6
        if middle - width / 2 > room:
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 20}" text-anchor="middle">{escape(layer)}</text>')
            room = middle + width / 2
        i += count
    parts.append(f'<text x="{(LEFT + W) / 2:.1f}" y="{bottom + 36}" text-anchor="middle">layer</text>')
    return parts
