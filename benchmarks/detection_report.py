"""Tables and the plot of the campaign (`benchmarks/detection.py`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import common, other_faults, rivals
from benchmarks.time_to_detect import PATIENCE, STANDS_FOR, Campaigns

COLOURS = {
    "canaryd": "#2563c9", "gpu-burn": "#c26a00", "DCGM": "#4d7c0f", "RVS": "#b91c1c", "SuperBench": "#7c3aed",
    "ai-chip-integrity": "#0e7490", "relative L2": "#777", "not finite": "#bbb",
}  # fmt: skip
WIDE, LEFT, RIGHT = 760, 290, 24
TEXT = 'font-family="sans-serif" font-size="12" fill="#444"'


@dataclass
class Row:
    """The counts of the injections of one fault class in one format."""

    injected: int = 0
    changed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    """Rule → number of changed results that it could judge: some tools do not support some formats."""
    unobserved: Counter[str] = field(default_factory=Counter)
    clean: Counter[str] = field(default_factory=Counter)
    """Rule → number of clean results that it judged."""
    alarms: Counter[str] = field(default_factory=Counter)
    """Rule → number of clean results that it called wrong."""

    def add(self, other: Row) -> None:
        """Add the counts of another row to this one."""
        self.injected += other.injected
        self.changed += other.changed
        for name in ("found", "judged", "unobserved", "clean", "alarms"):
            getattr(self, name).update(getattr(other, name))


def share(found: int, of: int) -> str:
    """Return a count with its percentage, "5 (50.0 %)", or "takes none" if `of` is 0."""
    return f"{found:,} ({100 * found / of:.1f} %)" if of else "takes none"


def _table(first: str, names: Sequence[str], rows: Mapping[str, Row]) -> str:
    cells = [
        [
            name,
            f"{r.injected:,}",
            f"{r.changed:,}",
            *(share(r.found[n], r.judged[n]) for n in names),
            r.unobserved.total(),
        ]
        for name, r in rows.items()
    ]
    return common.table([first, "injected", "changed a bit", *names, "unobserved"], cells)


def _others(parts: Mapping[str, other_faults.Part]) -> str:
    names = ["canaryd", *other_faults.MEMORY_RIVALS]
    cells = []
    for name, part in parts.items():
        takes = names if name.startswith("memory") else names[:1]
        shares = [share(part.found[n], part.changed) if n in takes else "" for n in names]
        cells.append([name, f"{part.injected:,}", f"{part.changed:,}", *shares, "; ".join(sorted(part.told))])
    return common.table(["fault", "injected", "changed something", *names, "called"], cells)


def _campaigns(found: Sequence[Campaigns]) -> str:
    cells = []
    for c in found:
        waits, named = sorted(c.waits), sorted(c.named_after)
        expected = 1 - (1 - c.rate) ** c.limit
        spread = 1.96 * math.sqrt(expected * (1 - expected) / len(waits))
        cells.append(
            [
                f"{c.rate:g}" + (" (simulated clock)" if c.simulated else ""),
                len(waits),
                f"{waits[len(waits) // 2]:,}",
                f"{100 * c.in_time:.1f} % in {c.limit:,}",
                f"{100 * (expected - spread):.1f} to {100 * min(1.0, expected + spread):.1f} %",
                share(len(named) - c.wrongly_named, len(waits)),
                f"{named[len(named) // 2]:,}" if named else "",
                c.wrongly_named,
                c.missed,
                c.false_alarms,
            ]
        )
    header = (
        "rate per product", "campaigns", "found after (median)", "found within 3 / rate", "expected (95 %)",
        "core named", "named after (median)", "another core named", "wrong products missed", "false alarms",
    )  # fmt: skip
    return common.table(header, cells)


def report(
    names: Sequence[str],
    by_fault: Mapping[str, Row],
    by_format: Mapping[str, Row],
    others: Mapping[str, other_faults.Part],
    campaigns: Sequence[Campaigns],
) -> str:
    """Return the body of the report. `names`: the rules, canaryd's first."""
    total = by_fault["all"]
    strikes = {name: others[name] for name in other_faults.STRIKES}
    controls = {name: others[name] for name in other_faults.CONTROLS}
    changed = total.changed + sum(p.changed for p in strikes.values())
    found = total.found["canaryd"] + sum(p.found["canaryd"] for p in strikes.values())
    injected = total.injected + sum(p.injected for p in strikes.values())
    cells = [[n, f"{total.clean[n]:,}", total.alarms[n]] for n in names]
    missed = sum(p.changed - p.found["canaryd"] for p in controls.values())
    why: Counter[str] = total.unobserved
    return "\n".join(
        [
            f"{injected:,} faults were injected; {changed:,} changed a bit of a result or of memory, and canaryd found",
            f"{found:,} of these ({100 * found / changed:.3f} %).",
            "",
            "![recall and time to detect](detection.svg)",
            "",
            "## Faults of products",
            "",
            "Shares are of the faults that changed a bit of the result, in the formats that the tool takes. The data",
            "are canaryd's: gpu-burn and DCGM multiply larger numbers, all positive, so that in float32 their 1e-3 is",
            "less than one bit of a result.",
            "",
            *(rivals.__doc__ or "").partition("files:\n\n")[2].strip().splitlines(),
            "",
            _table("fault", names, by_fault),
            _table("format", names, by_format),
            "Clean results that each way called wrong:",
            "",
            common.table(["way", "clean results", "called wrong"], cells),
            "## Gather, comparator, memory",
            "",
            *(other_faults.__doc__ or "").partition("\n\n")[2].strip().splitlines(),
            "",
            _others(strikes),
            "## Time to detect",
            "",
            "One core errs at a rate per product in which it takes part. A campaign goes on until the judge names the",
            f"core, for {PATIENCE} / rate products at most. With a simulated clock each computed product stands for",
            f"{STANDS_FOR}. Before the fault each campaign has a round without it: a verdict other than healthy is a",
            "false alarm.",
            "",
            _campaigns(campaigns),
            "## What canaryd misses, and why",
            "",
            "A fault that changed no bit of the result:",
            "",
            common.table(["why", "injections"], [[name, f"{n:,}"] for name, n in sorted(why.items())]),
            "A comparator that does not look at one tile, beside results that are wrong there from the second on:",
            f"{missed:,} injections. The host itself compares the first result of every case, and the device must see",
            "one bit that is flipped on purpose: a case reveals such a comparator when this bit lies in the tile.",
            "",
            _others(controls),
        ]
    )


def plot(by_fault: Mapping[str, Row], names: Sequence[str], campaigns: Sequence[Campaigns]) -> str:
    """Return an SVG image: recall by fault class and rule, and below it the time to detect."""
    step, top = 22, 70
    middle = top + step * len(by_fault) + 70
    high = middle + 220
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {high}">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    parts += _legend(names)
    for percent in range(0, 101, 20):
        x = _across(percent / 100)
        parts.append(f'<path d="M{x:.1f} {top - 12}V{top + step * len(by_fault) - 8}" stroke="#ddd"/>')
        label = f'<text x="{x:.1f}" y="{top + step * len(by_fault) + 8}" text-anchor="middle" {TEXT}>{percent} %</text>'
        parts.append(label)
    for number, (fault, row) in enumerate(by_fault.items()):
        y = top + step * number
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" {TEXT}>{fault}</text>')
        parts.append(f'<path d="M{LEFT} {y}H{WIDE - RIGHT}" stroke="#eee"/>')
        for place, name in enumerate(names):
            if row.judged[name]:
                x = _across(row.found[name] / row.judged[name])
                # Those of one share lie below each other, canaryd's ring around them.
                down = 0 if name == "canaryd" else 2 * (place - len(names) / 2)
                parts.append(_dot(x, y + down, name))
    parts += _curves(campaigns, middle, high - 44)
    return "\n".join(parts) + "\n</svg>\n"


def _across(part: float) -> float:
    return LEFT + part * (WIDE - RIGHT - LEFT)


def _dot(x: float, y: float, name: str) -> str:
    ring = f'r="8" fill="none" stroke="{COLOURS[name]}" stroke-width="2"'
    dot = ring if name == "canaryd" else f'r="3.5" fill="{COLOURS[name]}" fill-opacity="0.9"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" {dot}/>'


def _legend(names: Sequence[str]) -> list[str]:
    parts = [f'<text x="12" y="20" {TEXT}>Share of the faults that changed a bit and were found</text>']
    x = 16.0
    for name in names:
        parts.append(_dot(x, 38, name))
        parts.append(f'<text x="{x + 12}" y="42" {TEXT}>{name}</text>')
        x += 34 + 6.4 * len(name)
    return parts


def _curves(campaigns: Sequence[Campaigns], top: int, bottom: int) -> list[str]:
    """Return SVG curves: fraction of campaigns that found the fault over (products of the core x fault rate)."""
    most, shades = 5.0, ("#93b4ea", "#5b8bdc", "#2563c9", "#123f8a")

    def x(value: float) -> float:
        return _across(min(value, most) / most)

    def y(value: float) -> float:
        return bottom - value * (bottom - top)

    parts = [
        f'<text x="12" y="{top - 22}" {TEXT}>Campaigns in which canaryd found an intermittent fault of one core</text>'
    ]
    for percent in (0, 50, 95, 100):
        parts.append(f'<path d="M{LEFT} {y(percent / 100):.1f}H{WIDE - RIGHT}" stroke="#ddd"/>')
        label = "" if percent == 95 else f"{percent} %"
        parts.append(f'<text x="{LEFT - 12}" y="{y(percent / 100) + 4:.1f}" text-anchor="end" {TEXT}>{label}</text>')
    ticks = range(int(most) + 1)
    parts += [f'<text x="{x(n):.1f}" y="{bottom + 18}" text-anchor="middle" {TEXT}>{n}</text>' for n in ticks]
    parts.append(f'<path d="M{x(3):.1f} {top}V{bottom}" stroke="#999" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{x(3) + 6:.1f}" y="{bottom - 8}" {TEXT}>95 % are to be found by 3 / rate</text>')
    parts.append(
        f'<text x="{_across(0.5):.1f}" y="{bottom + 36}" text-anchor="middle" {TEXT}>products of the core x rate</text>'
    )
    for number, (c, shade) in enumerate(zip(campaigns, shades, strict=True)):
        points = [(0.0, 0.0)] + [(w * c.rate, (i + 1) / len(c.waits)) for i, w in enumerate(sorted(c.waits))]
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points if a <= most)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{shade}" stroke-width="2"/>')
        label = f"rate {c.rate:g}" + (", simulated clock" if c.simulated else "")
        parts.append(f'<text x="24" y="{top + 24 + 20 * number}" {TEXT.replace("#444", shade)}>{label}</text>')
    return parts
