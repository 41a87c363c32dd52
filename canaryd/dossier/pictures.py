"""Pictures of a dossier as inline SVG: where in the result the wrong elements lie, and which bits were flipped.

Every picture says in its title and caption what it shows, for readers who cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaryd.dossier.text import share
from canaryd.judge.phrases import count
from canaryd.report.html import escape

STYLE = """
:root { --heat: 179 38 30; --empty: #e9ecf0; }
@media (prefers-color-scheme: dark) { :root { --heat: 255 138 128; --empty: #262c33; } }
figure { margin: 0 0 1rem; } figcaption { color: var(--soft); font-size: .94rem; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem; }
.map svg { display: block; width: 100%; max-width: 34rem; height: auto; margin-top: .4rem; }
.map text, .bars text { fill: currentColor; font: 14px system-ui, sans-serif; }
.bars .names { font-size: 12px; opacity: .75; }
.map .cell { fill: var(--empty); } .map .hit { fill: rgb(var(--heat)); }
.map .unknown { fill: var(--paper); }
.map .frame { fill: none; stroke: var(--soft); }
.bars svg { display: block; width: 100%; max-width: 26rem; height: auto; }
.bars .bar { fill: rgb(var(--heat)); } .bars .part { fill: var(--soft); opacity: .5; }
"""
TITLE = 48
"""Letters of the title of a row that fit into a chart."""
FORMATS = 3
"""Formats in the chart of bits at most: it shares a sheet of paper."""
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
    recorded = count(grid["elements"], "wrong element") + " recorded"
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


def bit_chart(formats: Sequence[Mapping[str, Any]]) -> str:
    """Return one chart of the flipped bits: a row for each format, the sign on the left as a number is written.

    The lowest bits of all rows stand below each other. The chart is as wide as the narrowest phone, so that its letters
    can be read there; wider screens enlarge it. Of many formats the most often flipped are drawn.
    """
    shown = sorted(formats, key=lambda f: -sum(b["count"] for b in f["bits"]))[:FORMATS]
    room, row, widest = 340, 60, max(f["width"] for f in shown)
    titles = [_most_flipped(flips) for flips in shown]
    summary = "; ".join(
        f"{f['format']}: " + ", ".join(f"bit {b['bit']}{_part(b)} {b['count']:,} times" for b in f["bits"])
        for f in shown
    )
    parts = [
        '<figure class="bars"><figcaption>How often each bit was flipped, the lowest bit on the right.</figcaption>',
        f'<svg viewBox="0 0 {room + 4} {row * len(shown)}" role="img">',
        f"<title>{escape('; '.join(titles))}</title><desc>{escape(summary)}</desc>",
    ]
    for number, (flips, title) in enumerate(zip(shown, titles, strict=True)):
        parts += _bit_row(flips, title, room, room / widest, row * number)
    return "".join([*parts, "</svg></figure>"])


def _most_flipped(flips: Mapping[str, Any]) -> str:
    top, total = max(flips["bits"], key=lambda b: b["count"]), sum(b["count"] for b in flips["bits"])
    whole = f"{flips['format']}: bit {top['bit']}{_part(top)}, {top['count']:,} of {count(total, 'flip')}"
    short = f"{flips['format']}: bit {top['bit']}, {share(top['count'] / total)} of {count(total, 'flip')}"
    return whole if len(whole) <= TITLE else short


def _bit_row(flips: Mapping[str, Any], title: str, room: float, step: float, top: float) -> Iterator[str]:
    """Yield one format of the chart: its title, bars of the flipped bits over a strip of all bits, their names."""
    count = {b["bit"]: b["count"] for b in flips["bits"]}
    most, tall, floor = max(count.values()), 20, top + 40
    yield f'<text x="0" y="{top + 14}">{escape(title)}</text>'
    for bit in range(flips["width"]):
        across = f'x="{room - (bit + 0.9) * step:.1f}" width="{0.8 * step:.1f}"'
        yield f'<rect class="part" {across} y="{floor}" height="4"/>'
        if bit in count:
            height = max(tall * count[bit] / most, 1.5)
            bar = f'y="{floor - height:.1f}" height="{height:.1f}"'
            yield f'<rect class="bar" {across} {bar}><title>bit {bit}: {count[bit]:,}</title></rect>'
    layout = LAYOUTS.get(flips["format"], f"{flips['width'] - 1} sign" if flips["format"].startswith("int") else "")
    yield f'<text class="names" x="{room}" y="{floor + 16}" text-anchor="end">{layout}</text>'


def _part(bit: Mapping[str, Any]) -> str:
    return f" ({bit['name']})" if bit["name"] else ""
