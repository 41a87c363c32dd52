"""Small plots as inline SVG: values over time, with marks for events. Standard library only.

A page includes `STYLE` once. Colours come from the page's text colour and a few custom properties, so a plot is
readable in light, in dark and on paper. The caption repeats its content in words, for readers without pictures.
"""

from __future__ import annotations

import html
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from canaryd.formatting import DAY, HOUR, MINUTE, format_utc, number, quantity, scale

STYLE = """
.plot { --plot-own: #2563c9; --plot-bad: #c62828; --plot-calm: #8a5a00; margin: 0 0 1.2rem; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  .plot { --plot-own: #6ea8ff; --plot-bad: #ff7b72; --plot-calm: #e0b050; } }
.plot svg { display: block; width: 100%; min-width: 30rem; height: auto; }
.plot figcaption { position: sticky; left: 0; }
.plot text { fill: currentColor; font: 12px system-ui, sans-serif; }
.plot .grid, .plot .axis { stroke: currentColor; opacity: .2; } .plot .axis { opacity: .6; }
.plot polyline { fill: none; stroke: var(--plot-own); stroke-width: 1.6; stroke-linejoin: round; }
.plot circle { fill: var(--plot-own); }
.plot .mark { stroke: currentColor; stroke-dasharray: 3 3; }
.plot .bad { stroke: var(--plot-bad); } .plot text.bad { fill: var(--plot-bad); stroke: none; }
.plot .calm { stroke: var(--plot-calm); } .plot text.calm { fill: var(--plot-calm); stroke: none; }
.plot text.mark { stroke: none; }
"""
"""The style sheet of all plots."""
W, H, LEFT, RIGHT, TOP, BOTTOM = 720, 220, 64, 12, 34, 26
"""Size and margins of a plot in its own units."""
LETTER = 7.6
"""Approximate width of a letter of 12 pixels (ours)."""
FLAT = 0.05
"""Smallest height of the value axis as a share of the largest value: noise must not fill a plot (ours)."""
GAP = 4.0
"""A gap longer than this many usual distances of two points is not bridged by a line (ours)."""
MOST = 300
"""Buckets of time along a line; the lowest and the highest point of each are drawn."""
SHORT = (10.0, 30.0, MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR)
STEPS = (*SHORT, *(n * DAY for n in (1, 2, 7, 14, 28, 91, 364)))
"""Possible distances of the ticks on the time axis, in seconds."""
TICKS = 8
"""Ticks on the time axis at most."""

Point = tuple[float, float]
"""(seconds since the epoch, value in base units)."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at a time."""

    at: float
    label: str
    role: str = "mark"
    """"bad" for evidence against the device, "calm" for a change of its surroundings, "mark" for the rest."""


def plot(title: str, unit: str, points: Sequence[Point], marks: Sequence[Mark] = ()) -> str:
    """Return a `<figure>` with values over time, oldest first, and marks near to them (`_span`).

    `unit` is a reading's base unit. Without any point the figure is a sentence.
    """
    points = [(at, value) for at, value in points if math.isfinite(value)]
    summary = html.escape(_summary(title, unit, points))
    caption = f"<figcaption>{summary}</figcaption>"
    if not points:
        return f'<figure class="plot">{caption}</figure>'
    first, last = _span(points, marks)
    low, high = _value_range([value for _, value in points])
    across, bottom = (W - LEFT - RIGHT) / max(last - first, 1e-9), H - BOTTOM

    def x(at: float) -> float:
        return LEFT + (at - first) * across

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    parts = [f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="{summary}">']
    size, symbol = scale(unit, max(abs(low), abs(high)))
    for value in _levels(low, high):
        at_y = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{W - RIGHT}" y1="{at_y}" y2="{at_y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{number(value / size)}</text>')
    if symbol:
        parts.append(f'<text x="{LEFT - 8}" y="{TOP - 20}" text-anchor="end">{html.escape(symbol)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{W - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for at, label in _times(first, last):
        parts.append(f'<line class="axis" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        inside_x = min(x(at), W - LETTER * len(label) / 2)
        parts.append(f'<text x="{inside_x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    parts += _marks([m for m in marks if first <= m.at <= last], x, bottom)
    parts += _drawn(points, first, last, x, y)
    return f'<figure class="plot">{caption}{"".join(parts)}</svg></figure>'


def _span(points: Sequence[Point], marks: Sequence[Mark]) -> tuple[float, float]:
    """Return start and end of a plot: the times of the points, and of marks at most one such duration away.

    So the values take at least a third of the width, however long ago another event was (ours).
    """
    first, last = points[0][0], points[-1][0]
    near = [m.at for m in marks if abs(m.at - (first + last) / 2) <= 1.5 * (last - first)]
    return min([first, *near]), max([last, *near])


def _summary(title: str, unit: str, points: Sequence[Point]) -> str:
    """Return in words what the plot shows, for readers who cannot see it."""
    if not points:
        return f"{title}: no values in this time"
    values = [v for _, v in points]
    values_text = f"{quantity(min(values), unit)} to {quantity(max(values), unit)}, last {quantity(values[-1], unit)}"
    start, end = (format_utc(at, seconds=False) for at, _ in (points[0], points[-1]))
    return f"{title}: {values_text} ({start} to {end})"


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis for values, no nearer to each other than `FLAT` allows."""
    low, high = min(values), max(values)
    least = FLAT * max(abs(low), abs(high)) or 1.0
    spare = max(0.0, least - (high - low)) / 2
    return low - spare, high + spare


def _levels(low: float, high: float) -> list[float]:
    """Return round values between two bounds: three to eight steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(n * power for n in (1, 2, 5) if n * power <= raw)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _times(first: float, last: float) -> Iterator[tuple[float, str]]:
    """Yield the ticks of the time axis with their labels, on whole hours and days of UTC."""
    step = next((s for s in STEPS if (last - first) / s <= TICKS), STEPS[-1])
    for k in range(math.ceil(first / step), math.floor(last / step) + 1):
        at = datetime.fromtimestamp(k * step, tz=timezone.utc)
        if step < MINUTE:
            yield k * step, f"{at:%H:%M:%S}"
        else:
            yield k * step, f"{at:%H:%M}" if step < DAY and (at.hour or at.minute) else f"{at:%d %b}"


def _marks(marks: Sequence[Mark], x: Callable[[float], float], bottom: float) -> Iterator[str]:
    """Yield a line with a title for each mark, and its label where there is room."""
    room = -math.inf
    for mark in sorted(marks, key=lambda m: m.at):
        at, label = x(mark.at), html.escape(mark.label)
        yield (
            f'<line class="mark {mark.role}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 6}" y2="{bottom}">'
            f"<title>{format_utc(mark.at)} {label}</title></line>"
        )
        wide = LETTER * len(mark.label)
        begins = min(max(at - wide / 2, LEFT), W - wide)  # the unit of the values is left of that
        if begins > room and begins >= LEFT:
            yield f'<text class="mark {mark.role}" x="{begins:.1f}" y="{TOP - 12}">{label}</text>'
            room = begins + wide + 8


def _drawn(
    points: Sequence[Point], first: float, last: float, x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[str]:
    """Yield the values as strokes between gaps; a lone value is a dot."""
    usual = statistics.median([b - a for (a, _), (b, _) in itertools.pairwise(points)] or [0.0])
    most = max(GAP * usual, 2 * (last - first) / MOST)
    points = _thinned(points, first, last)
    stretch: list[Point] = []
    for (at, value), after in itertools.zip_longest(points, points[1:]):
        stretch.append((x(at), y(value)))
        if after is None or after[0] - at > most:
            if len(stretch) > 1:
                yield f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in stretch)}"/>'
            else:
                yield f'<circle cx="{stretch[0][0]:.1f}" cy="{stretch[0][1]:.1f}" r="2.5"/>'
            stretch = []


def _thinned(points: Sequence[Point], first: float, last: float) -> list[Point]:
    """Return at most two points per bucket of time, the lowest and the highest: no peak is lost."""
    if len(points) <= 2 * MOST:
        return list(points)
    buckets: dict[int, list[Point]] = {}
    for point in points:
        buckets.setdefault(int((point[0] - first) / max(last - first, 1e-9) * MOST), []).append(point)
    kept = [{min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])} for b in buckets.values()]
    return sorted(p for both in kept for p in both)
