"""Every threshold has a line in docs/thresholds.md, with source and false-alarm probability."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.settings import TelemetryConfig
from canaryd.judge import cause
from canaryd.judge.recordings import baseline, departed
from canaryd.judge.statistics import RULE_OF_THREE, rate_bound, tail
from canaryd.judge.telemetry import rate_rules, xid_rules
from tests.command import ROOT
from tests.judge.made import DAY, HOUR, MINUTE, POLICY

DOCUMENT = ROOT / "docs" / "thresholds.md"
PACKAGE = ROOT / "canaryd"
CATALOGUES = ("judge.telemetry.xids", "judge.telemetry.readings")
"""Modules of the judge that list what there is, and decide nothing."""
JUDGING = (
    str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for path in PACKAGE.glob("judge/**/[a-z]*.py")
)
MODULES = (*sorted(set(JUDGING) - set(CATALOGUES)), "engine.schedule")
SECTIONS = {"judge": JudgePolicy, "telemetry": TelemetryConfig}
NOT_THRESHOLDS = {
    "judge.wrong.WIDTH": "bits of the number types",
    "judge.brief.ELEMENTS": "how much of an older run stays in memory; the store keeps all of it",
    "judge.brief.FEW": "how much of an older run stays in memory; the store keeps all of it",
    "judge.brief.SHOWN": "how many runs stay in memory whole; the store keeps all of them",
    "judge.incidents.BESIDE": "it only says which findings are told together: no state, cause or end rests on it",
    "judge.exact.NAMED": "length of a list in a message",
    "judge.findings.RUNS_NAMED": "length of a list in a message",
    "judge.selftest.SHOWN": "length of a list in a message",
    "judge.telemetry.poll_rules.MOST_NAMED": "length of a list in a message",
    "judge.phrases.DETAIL": "characters of a message",
    "judge.statistics.CONFIDENCE": "of intervals that are printed",
    "judge.telemetry.signals.MINUTE": "a unit of time",
    "judge.telemetry.signals.HOUR": "a unit of time",
    "telemetry.kernel_log": "a path",
    "engine.schedule.JITTER": "when a test runs, not what is said of it",
    "telemetry.xids": "the operator's own grades; there is none by default",
    "judge.telemetry.events.LARGEST": "what no counter of a driver can show is no number",
    "judge.telemetry.events.NVLINK5": "Xids",
    "judge.telemetry.signals.OFF_BUS": "an Xid",
    "judge.telemetry.signals.MEMORY_LOST": "Xids",
    "judge.telemetry.signals.OWN_LINK": "Xids",
    "judge.telemetry.signals.OWN_MEMORY": "Xids",
    "judge.telemetry.signals.REMAPPED": "Xids",
    "judge.telemetry.signals.ADVICE": "an Xid",
    "judge.telemetry.xid_rules.REMAP_FAILED": "an Xid",
}
"""What introspection finds and no line of the document tells, each with its reason."""


LIMIT = -math.log(0.05) / 3.5e7
"""Transients per hour that AEGIS (Lei et al., OSDI 2026) rules out at 95 %: none in 3.5e7 GPU-hours."""
WORST = 1e-4
"""Transients per hour a thousand times as many."""
YEAR = 365.25 * 24
"""Hours."""


def poisson(times: int, mean: float) -> float:
    """Return the chance of at least so many events where so many are expected."""
    ways = range(times, times + 500 + int(2 * mean))
    return sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in ways)


def ever_too_often(true: float, rate: float, runs: int) -> float:
    """Return the chance that unknown bits at a `true` rate fail the binomial test at least once within so many runs."""
    need, crossed, alive = 2, 0.0, [1.0]
    for n in range(1, runs + 1):
        after = [*(p * (1 - true) for p in alive), 0.0]
        for k, p in enumerate(alive):
            after[k + 1] += p * true
        while tail(need, n, rate) > departed.ALPHA:
            need += 1
        crossed += sum(after[need:])
        alive = after[:need]
    return crossed


def rate_for(seen: int, tries: int) -> float:
    """Return the rate at which at most so many would be seen in so many tries by a chance of 5 %."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - tail(seen + 1, tries, middle) > 0.05 else (low, middle)
    return low


BOUND = rate_bound(baseline.LEARN - 1)
FORMULAS: Mapping[str, Callable[[], float]] = {
    "transients": lambda: LIMIT,
    "one-a-year": lambda: -math.expm1(-YEAR * LIMIT),
    "two-a-day": lambda: poisson(2, 24 * WORST),
    "two-within-a-day": lambda: YEAR * LIMIT * -math.expm1(-24 * LIMIT),
    "two-within-a-day-worst": lambda: YEAR * WORST * -math.expm1(-24 * WORST),
    "three-a-week": lambda: poisson(3, 168 * WORST),
    "three-within-a-week": lambda: YEAR * LIMIT * poisson(2, 168 * LIMIT),
    "reruns": lambda: (-math.expm1(-WORST / 60)) ** POLICY.confirm_runs,
    "same-place": lambda: poisson(2, 400 * 24 * LIMIT) / 2,
    "two-a-watch": lambda: poisson(2, 720 * LIMIT),
    "three-expected": lambda: math.exp(-RULE_OF_THREE),
    "alone": lambda: max(
        n ** (1 - next(k for k in itertools.count(1) if n * n**-k <= cause.ALONE)) for n in range(2, 17)
    ),
    "among": lambda: 2 * tail(17, 18, 0.5),
    "learnt": lambda: BOUND,
    "steady": lambda: rate_bound(baseline.STEADY),
    "recorded-reruns": lambda: BOUND**POLICY.confirm_runs,
    "at-once": lambda: tail(12, 23, BOUND),
    "too-often": lambda: ever_too_often(BOUND, BOUND, 1000),
    "too-often-half": lambda: ever_too_often(BOUND / 2, BOUND, 1000),
    "unsteady": lambda: 2 / (baseline.LEARN + 1),
    "unsteady-reruns": lambda: (2 / (baseline.LEARN + 1)) ** POLICY.confirm_runs,
    "slow-simulated": lambda: rate_bound(80),
    "step": lambda: poisson(rate_rules.LEAST_STEP, 10),
    "corrected": lambda: poisson(1000, 500),
    "ten-a-day": lambda: poisson(10, 1),
    "replays-at-limit": lambda: poisson(311, 10 * 60 * rate_rules.BIT_ERROR_RATE * rate_rules.TRANSFERS[5] * 16),
    "replays-tenth": lambda: poisson(311, 60 * rate_rules.BIT_ERROR_RATE * rate_rules.TRANSFERS[5] * 16),
    "crashes": lambda: poisson(xid_rules.REPEATS, 1 / 7),
    "three-of-a-life": lambda: poisson(3, 0.5),
    "two-of-a-month": lambda: poisson(2, 30 / 3652.5),
    "triage-alone": lambda: rate_bound(1581),
    "triage-pairs": lambda: rate_for(1, 1580),
}


# --- The document ----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table."""

    name: str
    default: str
    decides: str
    source: str
    chance: str


def rows() -> list[Row]:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert [line for line, found in zip(lines, cells, strict=True) if len(found) != len(Row._fields)] == []
    return [Row(found[0].strip("`"), *found[1:]) for found in cells]


ROWS = rows()
names = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
UNITS = {"ms": 1e-3, "s": 1.0, "min": MINUTE, "h": HOUR, "d": DAY, "%": 1e-2}


def numbers(cell: str) -> list[float]:
    """Return the numbers of a cell, in seconds where they are times."""
    found = re.findall(r"(?<![\w.])(-?\d+(?:\.\d+)?(?:e-?\d+)?)(?: (ms|s|min|h|d|%)(?!\w))?", cell)
    return [float(number) * UNITS.get(unit, 1.0) for number, unit in found]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"canaryd.{name}")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def assigned(name: str) -> list[str]:
    """Return what a module assigns at its top, in order."""
    found = []
    for node in ast.parse(inspect.getsource(module(name))).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        flat = itertools.chain.from_iterable(t.elts if isinstance(t, ast.Tuple) else [t] for t in targets)
        found += [t.id for t in flat if isinstance(t, ast.Name)]
    return found


@functools.cache
def constants() -> dict[str, list[float]]:
    """Return every upper-case number, or row of numbers, that a module of the judgement assigns."""
    found = {}
    for name in MODULES:
        for constant in (c for c in assigned(name) if c.isupper()):
            value = getattr(module(name), constant)
            several = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            if several and all(map(is_number, several)):
                found[f"{name}.{constant}"] = [float(v) for v in several]
    return found


@functools.cache
def settings() -> dict[str, list[float]]:
    """Return every number of the sections that judge, settings with their defaults."""
    fields = {
        f"{section}.{name}": getattr(kind(), name)
        for section, kind in SECTIONS.items()
        for name in kind.__annotations__
    }
    return {name: [float(value)] if is_number(value) else [] for name, value in fields.items()}


def test_every_threshold_has_a_line():
    """Each constant and each setting that judges; and what is none says why."""
    known = {**constants(), **settings()}
    assert {n for n in NOT_THRESHOLDS if n not in known} == set()
    listed = [row.name for row in ROWS]
    assert [n for n in listed if listed.count(n) > 1] == []
    assert sorted(known.keys() - NOT_THRESHOLDS.keys() - set(listed)) == []


@names
def test_a_line_tells_the_default_that_the_code_has(row):
    """Of a setting or a constant; of a function it is the reader's to compare."""
    known = {**constants(), **settings()}
    if row.name in known:
        assert numbers(row.default) == pytest.approx(known[row.name])


VERDICTS = ("0 by construction: ", "not a false alarm: ", "cannot be stated: ")


@names
def test_a_line_is_complete(row):
    """What it decides, whose number it is, and a chance: computed, or why there is none."""
    assert all(row), row
    assert re.match(r"\*ours\*: |\*paper\*: |\*vendor\*: |\*design\*: |\*standard\*: ", row.source), row.source
    stated = re.findall(r"(\d[\d.]*(?:e-?\d+)?)[^`|;]*?\(`([a-z-]+)`\)", row.chance)
    assert row.chance.startswith(VERDICTS) or stated, row.chance
    for number, formula in stated:
        assert float(number) == float(f"{FORMULAS[formula]():.2g}"), (row.name, formula)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_stated_chance_is_what_its_formula_gives(name):
    """Computed again, to two digits; and something rests on it."""
    found = re.findall(rf"^- `{name}` = (\S+): .+", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert [float(number) for number in found] == [float(f"{FORMULAS[name]():.2g}")]
    assert f"(`{name}`)" in DOCUMENT.read_text()


def test_every_formula_of_the_document_is_computed():
    """None is only claimed."""
    listed = re.findall(r"^- `([a-z-]+)` = ", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert listed == list(FORMULAS)
