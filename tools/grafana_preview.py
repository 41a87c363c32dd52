r"""Draw a dashboard from its JSON and a Prometheus: a preview, not a screenshot of Grafana.

    python -m tools.grafana_preview --prometheus http://127.0.0.1:9090 --out DIR \
        [--since 6h] [--set instance=node-a] [UID …]

Run it from the root of a checkout. It writes one HTML page for each dashboard, and a PNG beside it where chromium is
installed. Titles, places, queries, units, value mappings, thresholds, legends, column orders and annotations are those
of the JSON; fonts, spacing and axes are not. It shows whether panels have data, room and readable names; folded rows
stay folded. It does not show that Grafana itself loads the file.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools import grafana_queries as queries
from tools.grafana_queries import Api, Json, Line, Window

DASHBOARDS = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"
WIDTH, MARGIN, UNIT, GAP = 1440, 12, 38, 8
"""Sizes in pixels: width of the page (a laptop's screen), its margin, one unit of height, gap between panels."""
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff9830", "#f2495c", "#b877d9", "#5794f2", "#ffa6b0", "#96d98d", "#ca95e5")
PAPER, CARD, INK, FAINT, RULE = "#111217", "#181b1f", "#ccccdc", "#8e8e9b", "#2c3036"
STYLE = f"""
body {{ margin: 0; background: {PAPER}; color: {INK}; font: 13px Inter, "DejaVu Sans", sans-serif; }}
.page {{ position: relative; width: {WIDTH}px; }}
.panel, .row {{ position: absolute; box-sizing: border-box; overflow: hidden; }}
.panel {{ background: {CARD}; border: 1px solid {RULE}; border-radius: 2px; padding: 5px 8px; }}
.row {{ font-weight: 600; font-size: 15px; line-height: 30px; }}
.title {{ font-weight: 600; font-size: 13px; height: 20px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }}
.tiles {{ display: flex; gap: 4px; position: absolute; inset: 28px 4px 4px 4px; }}
.tile {{ flex: 1; border-radius: 3px; display: flex; flex-direction: column; align-items: center;
  justify-content: center; color: #fff; text-align: center; overflow: hidden; }}
.tile b {{ font-size: 30px; font-weight: 600; }} .tile span {{ font-size: 12px; }}
table {{ border-collapse: collapse; width: 100%; table-layout: auto; font-size: 12px; }}
th {{ text-align: left; color: #6e9fff; font-weight: 500; }}
th, td {{ padding: 4px 6px; border-bottom: 1px solid {RULE}; white-space: nowrap; max-width: 320px; overflow: hidden;
  text-overflow: ellipsis; }}
td.number {{ text-align: right; }} a {{ color: #6e9fff; text-decoration: none; }}
.none {{ color: {FAINT}; text-align: center; padding-top: 30px; font-size: 14px; }}
.legend {{ font-size: 11px; line-height: 15px; position: absolute; left: 8px; right: 8px; bottom: 4px; max-height: 45px;
  overflow: hidden; }}
.legend i {{ display: inline-block; width: 12px; height: 3px; margin: 0 4px 3px 8px; }}
pre {{ background: {PAPER}; padding: 6px; margin: 4px 0; }} p {{ margin: 6px 0; }}
.note {{ position: absolute; color: {FAINT}; left: {MARGIN}px; }} svg text {{ fill: {FAINT}; font-size: 10px; }}
"""


# --- Values in words --------------------------------------------------------------------------------------------------


def _scaled(value: float, sizes: Sequence[tuple[float, str]], decimals: int | None) -> str:
    size, name = next(((s, n) for s, n in sizes if abs(value) >= s), sizes[-1])
    return f"{_plain(value / size, decimals)}{name}"


def _plain(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.15g}" if value == round(value) else f"{value:.3g}"


SIZES: Mapping[str, Sequence[tuple[float, str]]] = {
    "s": ((86400, " d"), (3600, " h"), (60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs")),
    "bytes": ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")),
    "hertz": ((1e9, " GHz"), (1e6, " MHz"), (1, " Hz")),
}


def spoken(value: float, unit: str, decimals: int | None, now: float) -> str:
    """Return a value with its unit, nearly as Grafana writes it. `now` (epoch s) is needed for relative times."""
    if math.isinf(value) or math.isnan(value):
        return {math.inf: "∞", -math.inf: "-∞"}.get(value, "NaN")
    if unit in SIZES:
        return _scaled(value, SIZES[unit], decimals) if value else f"0{SIZES[unit][-1][1]}"
    if unit == "percentunit":
        return f"{_plain(100 * value, decimals)}%"
    if unit == "dateTimeFromNow":
        return f"{_scaled(max(now - value / 1000, 1), SIZES['s'][:4], 0)} ago"
    if unit.startswith("suffix:"):
        return f"{_plain(value, decimals)}{unit.removeprefix('suffix:')}"
    names = {"celsius": " °C", "watt": " W", "ops": " ops/s", "none": "", "": ""}
    return _plain(value, decimals) + names[unit]


def _ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers between two values, for an axis."""
    size = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (size * factor) <= 5)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


# --- Panels -----------------------------------------------------------------------------------------------------------


class Drawing:
    """A preview of one dashboard for one time range."""

    def __init__(self, dashboard: Json, api: Api, window: Window, wanted: Mapping[str, str]) -> None:
        self.dashboard = dashboard
        self.api = api
        self.window = window
        self.chosen = queries.choices(dashboard, api, window, **wanted)
        self.empty: list[str] = []
        """Titles of panels without data."""
        self.marks = [
            (point[0], mark["iconColor"])
            for mark in dashboard["annotations"]["list"]
            if mark["enable"]
            for line in queries.over_time(api, mark["expr"], self.chosen, window)
            for point in line.points[:1]
        ]

    def page(self) -> str:
        """Return the preview as an HTML page."""
        drawn = [self._placed(panel) for panel in self.dashboard["panels"]]
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in self.dashboard["panels"]) * UNIT + 80
        values = ", ".join(f"{k} = {'All' if v == '.+' else v}" for k, v in self.chosen.items())
        note = f"{self.dashboard['title']} · {values} · preview drawn from the JSON, no screenshot of Grafana"
        return (
            f'<!DOCTYPE html><html><head><meta charset="utf-8"><style>{STYLE}</style></head><body>'
            f'<div class="page" style="height:{height}px"><div class="note" style="top:12px">{html.escape(note)}</div>'
            f"{''.join(drawn)}</div></body></html>"
        )

    def _placed(self, panel: Json) -> str:
        place = panel["gridPos"]
        column = (WIDTH - 2 * MARGIN + GAP) / 24
        left, top = MARGIN + place["x"] * column, 40 + place["y"] * UNIT
        width, height = place["w"] * column - GAP, place["h"] * UNIT - GAP
        box = f"left:{left:.0f}px;top:{top:.0f}px;width:{width:.0f}px;height:{height:.0f}px"
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            return f'<div class="row" style="{box}">{"▸" if panel.get("collapsed") else "▾"} {title}</div>'
        draw: Callable[[Json, float, float], str] = {
            "stat": self._stat,
            "timeseries": self._lines,
            "state-timeline": self._timeline,
            "table": self._table,
            "text": self._words,
        }[panel["type"]]
        inner = draw(panel, width - 16, height - 32)
        return f'<div class="panel" style="{box}"><div class="title">{title}</div>{inner}</div>'

    def _nothing(self, panel: Json) -> str:
        self.empty.append(panel["title"])
        return f'<div class="none">{html.escape(panel["fieldConfig"]["defaults"].get("noValue", "No data"))}</div>'

    def _stat(self, panel: Json, _width: float, _height: float) -> str:
        config = panel["fieldConfig"]["defaults"]
        tiles = []
        for target in panel["targets"]:
            for line in queries.now(self.api, target["expr"], self.chosen, self.window):
                value = line.points[-1][1]
                name = queries.legend(target["legendFormat"], line.labels)
                found = queries.mapping(config, value)
                color = found["color"] if found else queries.threshold(config, value)
                text = (
                    found["text"] if found else spoken(value, config["unit"], config.get("decimals"), self.window.end)
                )
                if panel["options"]["textMode"] == "name":
                    text = name
                tiles.append((color, text, name))
        if not tiles:
            return self._nothing(panel)
        several = len(tiles) > 1
        shown = (
            f'<div class="tile" style="background:{color}"><b>{html.escape(text)}</b>'
            f"{f'<span>{html.escape(name)}</span>' if several else ''}</div>"
            for color, text, name in tiles
        )
        return f'<div class="tiles">{"".join(shown)}</div>'

    def _series(self, panel: Json) -> list[tuple[str, Line]]:
        return [
            (queries.legend(target["legendFormat"], line.labels), line)
            for target in panel["targets"]
            for line in queries.over_time(self.api, target["expr"], self.chosen, self.window.of(panel))
        ]

    def _x(self, at: float, left: float, width: float) -> float:
        return left + (at - self.window.start) / (self.window.end - self.window.start) * width

    def _times(self, left: float, width: float, height: float) -> str:
        parts = []
        for number in range(1, 6):
            at = self.window.start + number * (self.window.end - self.window.start) / 6
            x = self._x(at, left, width)
            parts.append(
                f'<text x="{x:.0f}" y="{height + 12:.0f}" text-anchor="middle">'
                f"{time.strftime('%H:%M', time.localtime(at))}</text>"
            )
        return "".join(parts)

    def _lines(self, panel: Json, width: float, height: float) -> str:
        series = [(name, line) for name, line in self._series(panel) if any(math.isfinite(v) for _, v in line.points)]
        if not series:
            return self._nothing(panel)
        config = panel["fieldConfig"]["defaults"]
        fixed = {
            one["matcher"]["options"]: one["properties"][0]["value"]["fixedColor"]
            for one in panel["fieldConfig"]["overrides"]
        }
        colors = [fixed.get(name, PALETTE[number % len(PALETTE)]) for number, (name, _) in enumerate(series)]
        stacked = config["custom"].get("stacking", {}).get("mode") == "normal"
        bars = config["custom"]["drawStyle"] == "bars"
        limits = [s for s in config["thresholds"]["steps"] if s["value"] is not None]
        low, high = self._range(series, config, stacked=stacked)
        left, chart = 58.0, height - 62

        def y(value: float) -> float:
            return 6 + (high - value) / (high - low) * chart

        parts = []
        for value in _ticks(low, high):
            label = html.escape(spoken(value, config["unit"], config.get("decimals"), self.window.end))
            parts.append(
                f'<line x1="{left}" x2="{width}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{RULE}"/>'
                f'<text x="{left - 6}" y="{y(value) + 3:.1f}" text-anchor="end">{label}</text>'
            )
        parts += [
            f'<line x1="{left}" x2="{width}" y1="{y(s["value"]):.1f}" y2="{y(s["value"]):.1f}" stroke="{s["color"]}" '
            'stroke-width="1.5" stroke-dasharray="8 6"/>'
            for s in limits
            if low <= s["value"] <= high
        ]
        parts += [
            f'<line x1="{self._x(at, left, width - left):.1f}" x2="{self._x(at, left, width - left):.1f}" y1="6" '
            f'y2="{chart + 6}" stroke="{color}" stroke-dasharray="3 3"/>'
            for at, color in self.marks
        ]
        base: dict[float, float] = {}
        for (_, line), color in zip(series, colors, strict=True):
            step = self.window.of(panel).step
            parts.append(self._drawn(line, color, step, base, y, left, width - left, stacked=stacked, bars=bars))
        parts.append(self._times(left, width - left, chart + 6))
        names = "".join(
            f'<i style="background:{color}"></i>{html.escape(name)}'
            for (name, _), color in zip(series, colors, strict=True)
        )
        svg = f'<svg width="{width:.0f}" height="{height - 40:.0f}">{"".join(parts)}</svg>'
        return f'{svg}<div class="legend">{names}</div>'

    def _range(self, series: Sequence[tuple[str, Line]], config: Json, *, stacked: bool) -> tuple[float, float]:
        values = [v for _, line in series for _, v in line.points if math.isfinite(v)]
        if stacked:
            sums: dict[float, float] = {}
            for _, line in series:
                for at, value in line.points:
                    sums[at] = sums.get(at, 0.0) + (value if math.isfinite(value) else 0.0)
            values += sums.values()
        low = config.get("min", min([*values, config["custom"].get("axisSoftMin", math.inf)]))
        high = config.get("max", max(values))
        if high <= low:
            high, low = (
                (low + 1, low) if "min" in config else (high, low - 1) if "max" in config else (low + 1, low - 1)
            )
        pad = 0.05 * (high - low)
        return (low if "min" in config else low - pad), (high if "max" in config else high + pad)

    def _drawn(
        self,
        line: Line,
        color: str,
        step: float,
        base: dict[float, float],
        y: Callable[[float], float],
        left: float,
        width: float,
        *,
        stacked: bool,
        bars: bool,
    ) -> str:
        if stacked:
            parts = []
            wide = max(width * step / (self.window.end - self.window.start), 1.0) * (0.8 if bars else 1)
            for at, value in line.points:
                below = base.get(at, 0.0)
                base[at] = below + value
                x = self._x(at, left, width)
                parts.append(
                    f'<rect x="{x - wide / 2:.1f}" y="{y(below + value):.1f}" '
                    f'width="{wide if bars else wide + 0.5:.1f}" '
                    f'height="{max(y(below) - y(below + value), 0):.1f}" fill="{color}" opacity="0.8"/>'
                )
            return "".join(parts)
        pieces, last = [], -math.inf
        for at, value in line.points:
            if math.isfinite(value):
                gap = at - last > 1.5 * step
                pieces.append(f"{'M' if gap else 'L'}{self._x(at, left, width):.1f} {y(value):.1f}")
                last = at
        return f'<path d="{"".join(pieces)}" fill="none" stroke="{color}" stroke-width="2"/>'

    def _timeline(self, panel: Json, width: float, height: float) -> str:
        series = sorted(self._series(panel), key=lambda one: one[0])
        if not series:
            return self._nothing(panel)
        config = panel["fieldConfig"]["defaults"]
        left = min(200.0, 7.0 * max(len(name) for name, _ in series) + 10)
        lane = min((height - 20) / len(series), 60.0)
        parts = []
        for number, (name, line) in enumerate(series):
            top = number * lane + 2
            parts.append(
                f'<text x="{left - 6}" y="{top + lane / 2 + 3:.1f}" text-anchor="end" style="fill:{INK}">'
                f"{html.escape(name)}</text>"
            )
            for begin, end, value in self._merged(line):
                found = queries.mapping(config, value)
                color = found["color"] if found else queries.threshold(config, value)
                x, to = self._x(begin, left, width - left), self._x(end, left, width - left)
                parts.append(
                    f'<rect x="{x:.1f}" y="{top:.1f}" width="{max(to - x, 1):.1f}" '
                    f'height="{lane * 0.85:.1f}" fill="{color}"/>'
                )
                text = found["text"] if found else _plain(value, None)
                if to - x > 7 * len(text):
                    parts.append(
                        f'<text x="{x + 4:.1f}" y="{top + lane / 2 + 2:.1f}" style="fill:#fff">'
                        f"{html.escape(text)}</text>"
                    )
        parts.append(self._times(left, width - left, len(series) * lane))
        return f'<svg width="{width:.0f}" height="{height:.0f}">{"".join(parts)}</svg>'

    def _merged(self, line: Line) -> list[tuple[float, float, float]]:
        pieces: list[tuple[float, float, float]] = []
        for at, value in line.points:
            if pieces and pieces[-1][2] == value and at - pieces[-1][1] < 1.5 * self.window.step:
                pieces[-1] = (pieces[-1][0], at, value)
            else:
                if pieces and at - pieces[-1][1] < 1.5 * self.window.step:
                    pieces[-1] = (pieces[-1][0], at, pieces[-1][2])
                pieces.append((at, at + self.window.step, value))
        return pieces

    def _table(self, panel: Json, _width: float, _height: float) -> str:
        answers = {t["refId"]: queries.now(self.api, t["expr"], self.chosen, self.window) for t in panel["targets"]}
        found = queries.table(panel, answers)
        if not found.rows:
            return self._nothing(panel)
        each: dict[str, dict[str, Any]] = {
            one["matcher"]["options"]: {p["id"]: p["value"] for p in one["properties"]}
            for one in panel["fieldConfig"]["overrides"]
        }
        shown = [c for c in found.columns if not each.get(c, {}).get("custom.hidden")]
        head = "".join(
            f'<th style="width:{each.get(c, {}).get("custom.width", "auto")}px">{html.escape(c)}</th>' for c in shown
        )
        body = "".join(
            f"<tr>{''.join(self._cell(row.get(c), each.get(c, {})) for c in shown)}</tr>" for row in found.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"

    def _cell(self, value: str | float | None, config: Json) -> str:
        if value is None:
            return f'<td style="color:{FAINT}">{html.escape(str(config.get("noValue", "")))}</td>'
        mapped = queries.mapping(config, value)
        color, text = "", str(value)
        if mapped:
            color, text = mapped["color"], mapped["text"]
        elif isinstance(value, float):
            text = spoken(value, config.get("unit", "none"), config.get("decimals"), self.window.end)
            if "thresholds" in config:
                color = queries.threshold(config, value)
        style = "" if color in ("", "transparent", "text") else f"background:{color};color:#fff"
        text = html.escape(text)
        if "links" in config:
            text = f"<a>{text}</a>"
        kind = "number" if isinstance(value, float) and not mapped else ""
        return f'<td class="{kind}" style="{style}">{text}</td>'

    def _words(self, panel: Json, _width: float, _height: float) -> str:
        text = html.escape(queries.fill(panel["options"]["content"], self.chosen, self.window), quote=False)
        text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text, flags=re.DOTALL)
        text = re.sub(r"`(.+?)`", r"<code>\1</code>", text)
        blocks = []
        for block in text.strip().split("\n\n"):
            if block.startswith("    "):
                blocks.append("<pre>" + "\n".join(line[4:] for line in block.splitlines()) + "</pre>")
            else:
                blocks.append(f"<p>{block}</p>")
        return "".join(blocks)


def shoot(page: Path, *, height: int) -> bool:
    """Write a PNG beside an HTML page and return True, or return False if chromium is not installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return False
    argv = [browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{height}"]
    argv += [f"--screenshot={page.with_suffix('.png')}", page.as_uri()]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    return True


def main() -> int:
    """Draw the named dashboards, or all of them; return 1 if Prometheus does not answer, else 0."""
    parser = argparse.ArgumentParser(description="previews of the dashboards from their JSON")
    parser.add_argument("uids", nargs="*", metavar="UID", help="default: all")
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--since", type=float, default=6.0, metavar="HOURS", help="how far back (default: 6)")
    parser.add_argument("--scrape", type=float, default=15.0, metavar="SECONDS", help="scrape interval (default: 15)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="choose a variable; repeatable"
    )
    parser.add_argument("--no-png", action="store_true", help="pages alone")
    told = parser.parse_args()
    end = time.time()
    start = end - 3600 * told.since
    step = max((end - start) / 600, told.scrape)
    window = Window(start=start, end=end, step=step, scrape=told.scrape)
    wanted = dict(one.split("=", 1) for one in told.set)
    told.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text())
        if told.uids and dashboard["uid"] not in told.uids:
            continue
        try:
            drawing = Drawing(dashboard, Api(told.prometheus.rstrip("/")), window, wanted)
            text = drawing.page()
        except (OSError, queries.Refused) as error:
            sys.stderr.write(f"{path.name}: {error}\n")
            return 1
        page = told.out.resolve() / f"{path.stem}.html"
        page.write_text(text)
        found = re.search(r'class="page" style="height:(\d+)px"', text)
        shot = not told.no_png and shoot(page, height=int(found[1]) if found else 900)
        picture = "" if shot else "; no PNG: chromium is not installed"
        sys.stdout.write(f"{page}{picture}; without data: {'; '.join(drawing.empty) or 'none'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
