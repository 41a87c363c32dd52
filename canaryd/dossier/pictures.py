"""Pictures of a dossier as inline SVG: where in the result the wrong elements lie, and which bits were flipped.

Every picture says in its title and caption what it shows, for readers who cannot see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canaryd.dossier.text import plural
from canaryd.report.html import escape

STYLE = """
:root { --heat: 179 38 30; --empty: #e9ecf0; }
@media (prefers-color-scheme: dark) { :root { --heat: 255 138 128; --empty: #262c33; } }
figure { margin: 0 0 1rem; } figcaption { color: var(--soft); font-size: .94rem; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem; }
.map svg { display: block; width: 100%; max-width: 34rem; height: auto; margin-top: .4rem; }
.map text, .bars text { fill: currentColor; font: 14px system-ui, sans-serif; }
.map .cell { fill: var(--empty); } .map .hit { fill: rgb(var(--heat)); }
.map .unknown { fill: var(--paper); }
.map .frame { fill: none; stroke: var(--soft); }
.bars svg { display: block; width: 100%; max-width: 26rem; height: auto; }
.bars .bar { fill: rgb(var(--heat)); } .bars .part { fill: var(--empty); } .bars .axis { stroke: var(--soft); }
"""
LAYOUTS = {
    "float64": "63 sign, 62…52 exponent, 51…0 mantissa",
    "float32": "31 sign, 30…23 exponent, 22…0 mantissa",
    "bfloat16": "15 sign, 14…7 exponent, 6…0 mantissa",
    "float16": "15 sign, 14…10 exponent, 9…0 mantissa",
}
"""Format → what its bits mean."""


def heat_map(failure: Mapping[str, Any]) -> str:
    """Return a heat map of the wrong elements: rows downwards, columns to the right, darker where there are more."""
    grid = failure["map"]
    rows, columns = grid["row_bins"], grid["column_bins"]
    size = max(4, min(24, 416 // max(rows, columns)))
    left, top = 64, 28
    right, bottom = left + columns * size, top + rows * size
    most = max(n for _, _, n in grid["counts"])
    incomplete = failure["wrong_elements"] > grid["elements"]
    recorded = plural(grid["elements"], "wrong element") + " recorded"
    if incomplete:
        recorded += f" of {failure['wrong_elements']:,}, the first of each upload"
    cell = f"one cell is {_cell_size(grid['rows'], rows)} x {_cell_size(grid['columns'], columns)} elements"
    title = f"{failure['case']}: {recorded}; the result has {grid['rows']:,} rows and {grid['columns']:,} columns"
    title += f"; {cell}"

    def where(r: int, c: int) -> str:
        return f"{_span('row', r, rows, grid['rows'])}, {_span('column', c, columns, grid['columns'])}"

    fullest = sorted(grid["counts"], key=lambda count: -count[2])[:5]
    summary = "; ".join(f"{where(r, c)}: {n:,}" for r, c, n in fullest)
    area = f'x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"'
    parts = [
        f'<figure class="map"><figcaption>{escape(title)}. Fullest cells: {escape(summary)}.</figcaption>',
        f'<svg viewBox="0 0 {max(right + 8, 300)} {bottom + 26}" role="img"><title>{escape(title)}</title>',
        f'<desc>{escape(summary)}</desc><rect class="cell" {area}/>',
    ]
    for r, c, n in grid["counts"]:
        # A cell with one element among many must still be visible: opacity begins at a third.
        parts.append(
            f'<rect class="hit" x="{left + c * size}" y="{top + r * size}" width="{size}" height="{size}"'
            f' fill-opacity="{0.35 + 0.65 * n / most:.2f}"><title>{escape(where(r, c))}: {n:,} wrong</title></rect>'
        )
    if incomplete:  # elements are recorded in order: those beyond the last one are not known to be right
        known = top + (1 + max(r for r, _, _ in grid["counts"])) * size
        parts.append(f'<rect class="unknown" x="{left}" y="{known}" width="{right - left}" height="{bottom - known}"/>')
        if bottom - known > 30:
            middle = f'x="{(left + right) / 2:.0f}" y="{(known + bottom) / 2:.0f}"'
            parts.append(f'<text {middle} text-anchor="middle">not recorded</text>')
    row_axis, column_axis = grid["axes"]
    parts.append(
        f'<rect class="frame" {area}/>'
        f'<text x="{left}" y="{top - 10}">{escape(column_axis)} 0</text>'
        f'<text x="{right}" y="{top - 10}" text-anchor="end">{grid["columns"] - 1:,}</text>'
        f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{row_axis if len(row_axis) < 8 else "//"} 0</text>'
        f'<text x="{left - 8}" y="{bottom}" text-anchor="end">{grid["rows"] - 1:,}</text></svg></figure>'
    )
    return "".join(parts)


def _cell_size(size: int, bins: int) -> str:
    return f"{size // bins}" if size % bins == 0 else f"about {size / bins:.1f}"


def _span(name: str, cell: int, bins: int, size: int) -> str:
    """Return what a cell of a map covers along one axis: "row 2", "rows 4…7"."""
    first, last = -(-cell * size // bins), -(-(cell + 1) * size // bins) - 1
    return f"{name} {first}" if first >= last else f"{name}s {first}…{last}"


def bit_chart(flips: Mapping[str, Any]) -> str:
    """Return a histogram over the bits of one format, the highest (the sign) on the left as a number is written.

    It is as wide as the narrowest phone, so that its letters can be read there; wider screens enlarge it.
    """
    width, bits = flips["width"], flips["bits"]
    count = {b["bit"]: b["count"] for b in bits}
    top_bit = max(bits, key=lambda b: b["count"])
    most = top_bit["count"]
    title = f"{flips['format']}: bit {top_bit['bit']}{_part(top_bit)} was flipped most often, {plural(most, 'time')}"
    summary = ", ".join(f"bit {b['bit']}{_part(b)}: {b['count']:,}" for b in bits)
    room, left, top, tall = 320, 12 + 8 * len(f"{most:,}"), 16, 110
    step, floor = room / width, top + tall
    parts = [
        f'<figure class="bars"><figcaption>{escape(title)}.</figcaption>',
        f'<svg viewBox="0 0 {left + room + 8} {floor + 46}" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(summary)}</desc>",
    ]
    for bit in range(width):
        x, thick = left + (width - 1 - bit) * step, 0.8 * step
        across = f'x="{x + 0.1 * step:.1f}" width="{thick:.1f}"'
        parts.append(f'<rect class="part" {across} y="{floor}" height="6"/>')
        if bit in count:
            height = tall * count[bit] / most
            bar = f'y="{floor - height:.1f}" height="{max(height, 1.5):.1f}"'
            parts.append(f'<rect class="bar" {across} {bar}><title>bit {bit}: {count[bit]:,}</title></rect>')
        if bit % (4 if width <= 32 else 8) == 0 or bit == width - 1:
            parts.append(f'<text x="{x + step / 2:.1f}" y="{floor + 22}" text-anchor="middle">{bit}</text>')
    layout = LAYOUTS.get(flips["format"], f"{width - 1} sign" if flips["format"].startswith("int") else "")
    parts.append(
        f'<line class="axis" x1="{left}" x2="{left + room}" y1="{floor}" y2="{floor}"/>'
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{most:,}</text>'
        f'<text x="{left - 6}" y="{floor}" text-anchor="end">0</text>'
        f'<text x="{left}" y="{floor + 38}">{layout}</text></svg></figure>'
    )
    return "".join(parts)


def _part(bit: Mapping[str, Any]) -> str:
    return f" ({bit['name']})" if bit["name"] else ""
