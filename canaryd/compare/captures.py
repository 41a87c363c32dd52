"""What people read of a comparison of two captures: a table for a terminal, and a page with a plot.

Both take the result of `canaryd.worker.compare` as it came from the worker (docs/compare.md).
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from canaryd.model import printable

WIDTH = 100
"""Columns of the table at most."""
SERIES = 6
"""Lines in the plot at most: forward passes, the one where the captures part among them."""
WORDS = {
    "equal": "EQUAL",
    "rounding": "ROUNDING",
    "fault": "FAULT",
    "different model": "DIFFERENT MODEL",
    "incomparable": "INCOMPARABLE",
}

Row = Mapping[str, Any]


def table(result: Mapping[str, Any]) -> str:
    """Return the comparison for a terminal: the verdict, what was compared, and the pass in which they part."""
    verdict = result["verdict"]
    lines = _wrapped(f"{WORDS[verdict['kind']]}: ", verdict["why"])
    lines += [line for which in "AB" for line in _head(which, result)]
    lines += [line for note in result["notes"] for line in _wrapped("note: ", note)]
    for found in result["tokens"]:
        lines += _wrapped("token: ", _token(found))
    passes = _passes(result)
    shown = _shown(result, passes)
    for key, rows in passes.items():
        if key == shown:
            lines += ["", f"prompt {key[0]}, step {key[1]}", *_table_of(rows, verdict)]
    others = {key: rows for key, rows in passes.items() if key != shown}
    if others:
        lines += ["", "other passes"]
        lines += [f"  {line}" for line in _folded(others)]
    return "\n".join(printable(line)[:WIDTH] for line in lines)


def _wrapped(lead: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_on_hyphens=False)


def _head(which: str, result: Mapping[str, Any]) -> list[str]:
    header = result[which.lower()]
    drill = f", DRILL at {header['drill']}" if header["drill"] else ""
    what = f"{header['dtype']} {header['path']}, {header['date']}, {header['device_model']}, {header['device']}{drill}"
    return _wrapped(f"{which}: ", f"{_file(which, result)}{what}")


def _file(which: str, result: Mapping[str, Any]) -> str:
    path = result.get("files", {}).get(which.lower(), "")
    return f"{Path(path).name}, " if path else ""


def _token(found: Mapping[str, Any]) -> str:
    return f"prompt {found['prompt']}, position {found['position']}: {found['a']} in A, {found['b']} in B"


def _passes(result: Mapping[str, Any]) -> dict[tuple[str, str], list[Row]]:
    grouped = groupby(result["rows"], key=lambda row: (row["prompt"], row["step"]))
    return {key: list(rows) for key, rows in grouped}


def _shown(result: Mapping[str, Any], passes: Mapping[tuple[str, str], list[Row]]) -> tuple[str, str] | None:
    """Return the pass to show row by row: where they part, else the first."""
    verdict = result["verdict"]
    return (verdict["prompt"], verdict["step"]) if verdict["prompt"] else next(iter(passes), None)


def _table_of(rows: Sequence[Row], verdict: Mapping[str, Any]) -> list[str]:
    """Return the lines of one pass; stretches of equal tensors are one line each."""
    lines = [
        f"  {'layer':<6} {'operator':<26} {'rel. L2':>9} {'1 - cos':>9} {'ULP':>11} {'max |a-b|':>10} {'excess':>8}"
    ]
    for equal, stretch in groupby(rows, key=lambda row: bool(row["equal"])):
        part = list(stretch)
        if equal:
            lines.append(f"  {_span(part)}: {len(part)} equal")
            continue
        for row in part:
            mark = ">" if _is_place(row, verdict) else " "
            departs = f" {row['departs']}" if row["departs"] else ""
            lines.append(
                f"{mark} {row['layer'][:6]:<6} {row['operator'][:26]:<26} {_number(row.get('relative_l2')):>9}"
                f" {_number(_off(row)):>9} {_whole(row.get('ulp')):>11} {_number(row.get('max_abs')):>10}"
                f" {_number(row['excess']):>8}{departs}"
            )
            if _is_place(row, verdict):
                lines += [f"    {line}" for line in _detail(row)]
    return lines


def _is_place(row: Row, verdict: Mapping[str, Any]) -> bool:
    """Whether this is the row that the verdict names."""
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


def _off(row: Row) -> float | None:
    return None if row.get("cosine") is None else 1.0 - row["cosine"]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "no end" if value >= 1e300 else f"{value:.2g}"  # JSON has no infinity


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}" if value < 10**8 else f"{value:.2g}"


def _detail(row: Row) -> list[str]:
    """Return what is known of the first element that differs, in words."""
    if "first" not in row:
        return []
    first = row["first"]
    lines = [f"{row['differing']:,} of {row['total']:,} elements differ, the first at {first['index']}:"]
    lines.append(f"{first['a']} ({first['a_bits']}) in A, {first['b']} ({first['b_bits']}) in B")
    if row["absent"]:
        lines.append(f"{row['absent']}: {row['nonfinite'][0]:,} not finite in A, {row['nonfinite'][1]:,} in B")
    return lines


def _folded(passes: Mapping[tuple[str, str], list[Row]]) -> list[str]:
    """Return one line per pass, and one for each stretch of passes in which all is equal."""
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


# ---------------------------------------------------------------------------------------------------------------------
# The page.

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d5dae0; --paper: #fff; --card: #f5f7f9;
  --good: #1a7f4b; --bad: #c62828; --calm: #8a5a00; --c0: #2563c9; --c1: #a0a8b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #363d45; --paper: #15181c;
  --card: #1e2227; --good: #58c98b; --bad: #ff7b72; --calm: #e0b050; --c0: #6ea8ff; --c1: #5d6670; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.fault { color: var(--bad); } .equal { color: var(--good); } .rounding { color: var(--good); }
.different, .incomparable { color: var(--calm); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: .8rem; margin-top: 1rem; }
.two > div { background: var(--card); border-radius: 8px; padding: .7rem .9rem; overflow-wrap: anywhere; }
.two b { display: block; } small, .soft { color: var(--soft); }
.wide { overflow-x: auto; } svg { display: block; min-width: 40rem; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.here td { color: var(--bad); font-weight: 600; } td.fold { color: var(--soft); text-align: left; }
code { font-family: ui-monospace, monospace; font-size: .92em; } ul { padding-left: 1.2rem; }
"""


def page(result: Mapping[str, Any]) -> str:
    """Return the comparison as one HTML page that needs nothing else: verdict, plot, table, what was compared."""
    verdict = result["verdict"]
    passes = _passes(result)
    shown = _shown(result, passes)
    kind = verdict["kind"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>canaryd compare: {html.escape(kind)}</title><style>{STYLE}</style></head><body>",
        f'<h1 class="{html.escape(kind.split()[0])}">{WORDS[kind]}</h1><p>{html.escape(verdict["why"])}</p>',
        '<div class="two">',
        *(_card(which, result) for which in "AB"),
        "</div>",
    ]
    if result["notes"] or result["tokens"]:
        said = [*result["notes"], *(f"token differs: {_token(found)}" for found in result["tokens"])]
        items = "".join(f"<li>{html.escape(text)}</li>" for text in said)
        parts.append(f"<h2>What differs besides, and what was not compared</h2><ul>{items}</ul>")
    if shown:
        title = f"prompt {shown[0]}, step {shown[1]}"
        parts += ["<h2>Relative error by depth</h2>", f'<div class="wide">{_plot(passes, shown, verdict)}</div>']
        parts.append(f'<p class="soft">{CAPTION}{OTHERS if len(passes) > 1 else ""}</p>')
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(f'<div class="wide">{_html_table(passes[shown], verdict)}</div>')
    others = {key: rows for key, rows in passes.items() if key != shown}
    if others:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in _folded(others))
        parts.append(f"<h2>Other passes</h2><ul>{items}</ul>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _card(which: str, result: Mapping[str, Any]) -> str:
    header = result[which.lower()]
    lines = [
        f"{_file(which, result)}{header['dtype']}, {header['path']}, {header['date']}",
        f"{header['device_model']} ({header['backend']})",
        header["device"],
        f"model {header['model']} ({header['digest']})",
        f"torch {header['environment'].get('torch', 'not given')}, canaryd {header['canaryd']}",
    ]
    if header["drill"]:
        lines.append(f"DRILL: one element spoilt at {header['drill']}")
    return f"<div><b>{which}</b>{'<br>'.join(map(html.escape, lines))}</div>"


def _html_table(rows: Sequence[Row], verdict: Mapping[str, Any]) -> str:
    columns = ("layer", "operator", "relative L2", "1 - cosine", "ULP", "max |a-b|", "excess", "departs")
    lines = ["<table><thead><tr>", *(f"<th>{column}</th>" for column in columns), "</tr></thead><tbody>"]
    for equal, stretch in groupby(rows, key=lambda row: bool(row["equal"])):
        part = list(stretch)
        if equal:
            text = html.escape(f"{_span(part)}: {len(part)} equal")
            lines.append(f'<tr><td class="fold" colspan="{len(columns)}">{text}</td></tr>')
            continue
        for row in part:
            cells = [row["layer"], row["operator"], _number(row.get("relative_l2")), _number(_off(row))]
            cells += [_whole(row.get("ulp")), _number(row.get("max_abs")), _number(row["excess"]), row["departs"]]
            here = _is_place(row, verdict)
            inside = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
            lines.append(f'<tr class="here">{inside}</tr>' if here else f"<tr>{inside}</tr>")
            if here and _detail(row):
                text = "<br>".join(f"<code>{html.escape(line)}</code>" for line in _detail(row))
                lines.append(f'<tr><td class="fold" colspan="{len(columns)}">{text}</td></tr>')
    return "".join([*lines, "</tbody></table>"])


CAPTION = "Each point is one tensor, in computing order; at the bottom: equal. Rounding grows slowly; a fault jumps."
OTHERS = " Grey: other passes."
LEFT, RIGHT, TOP, BOTTOM, W, H = 64, 12, 28, 40, 960, 380
"""Margins and size of the plot in its own units."""


def _plot(passes: Mapping[tuple[str, str], list[Row]], shown: tuple[str, str], verdict: Mapping[str, Any]) -> str:
    """Return an SVG: relative L2 on a logarithmic axis against the tensor's place in computing order."""
    chosen = [key for key in passes if key != shown][: SERIES - 1]
    values = [row["relative_l2"] for key in (*chosen, shown) for row in passes[key] if row.get("relative_l2")]
    low = math.floor(math.log10(min(values))) if values else -8
    high = max(low + 1, math.ceil(math.log10(max(values))) if values else 0)
    places = [(row["layer"], row["operator"]) for row in passes[shown]]
    at = {place: i for i, place in enumerate(places)}
    step = (W - LEFT - RIGHT) / max(1, len(places) - 1)
    bottom = H - BOTTOM

    def x(i: int) -> float:
        return LEFT + i * step

    def y(row: Row) -> float:
        return bottom if row["equal"] else level(row.get("relative_l2"))

    def level(value: float | None) -> float:
        if not value:  # not finite somewhere, or compared with zero
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
    for key in (*chosen, shown):
        colour, width = ("var(--c0)", 2) if key == shown else ("var(--c1)", 1)
        points = [(x(at[p]), y(row), row) for row in passes[key] if (p := _at(row)) in at]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        if key == shown:
            for a, b, row in points:
                text = html.escape(f"{row['layer']}.{row['operator']}: {_number(row.get('relative_l2'))}")
                fill = "var(--bad)" if row["departs"] else colour
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{fill}"><title>{text}</title></circle>')
    here = next((row for row in passes[shown] if verdict["kind"] == "fault" and _is_place(row, verdict)), None)
    if here is not None:
        i = at[_at(here)]
        anchor, beside = ("end", -6) if i > len(places) / 2 else ("start", 6)
        text = html.escape(f"{here['layer']}.{here['operator']}")
        line = f'<line x1="{x(i):.1f}" x2="{x(i):.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="var(--bad)"'
        parts.append(f'{line} stroke-dasharray="4 3"/>')
        words = f'<text x="{x(i) + beside:.1f}" y="{TOP - 12}" text-anchor="{anchor}" style="fill: var(--bad)">'
        parts.append(f"{words}they part at {text}</text>")
    return "".join([*parts, "</svg>"])


def _at(row: Row) -> tuple[str, str]:
    return row["layer"], row["operator"]


def _layers(places: Sequence[tuple[str, str]], x: Any, step: float, bottom: float) -> list[str]:
    """Return the marks below the axis: where each layer begins, named as far as there is room."""
    parts, room = [], -math.inf
    i = 0
    for layer, stretch in groupby(places, key=lambda place: place[0]):
        count = len(list(stretch))
        start, middle = x(i) - step / 2, x(i) + step * (count - 1) / 2
        if i:
            parts.append(f'<line x1="{start:.1f}" x2="{start:.1f}" y1="{TOP}" y2="{bottom + 6}" stroke="var(--line)"/>')
        width = 7 * len(layer) + 6
        if middle - width / 2 > room:
            parts.append(f'<text x="{middle:.1f}" y="{bottom + 20}" text-anchor="middle">{html.escape(layer)}</text>')
            room = middle + width / 2
        i += count
    parts.append(f'<text x="{(LEFT + W) / 2:.1f}" y="{bottom + 36}" text-anchor="middle">layer</text>')
    return parts
