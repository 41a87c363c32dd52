"""Test whether the benchmark scores in two result files differ by more than chance (docs/lab.md has the methods).

`compare` tests each task, question by question if both files have the answers, and gives the smallest difference
that it could have found.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist, fmean, stdev

from canaryd.facts import printable
from canaryd.formatting import columns, wrapped
from canaryd_lab.compare.score_files import Score, ScoreError, Scores
from canaryd_lab.compare.score_tests import EXACT_UP_TO, FLIPS, holm, mcnemar, sign_flip, t95

ALPHA = 0.05
"""Largest probability that a comparison of two files, over all its tests, calls a chance difference significant."""
POWER = 0.8
"""Probability of finding a true difference that is as large as the smallest visible one."""


class Method(str, Enum):
    """The statistical test of a row."""

    MCNEMAR = "mcnemar"
    SIGN_FLIP = "sign-flip"
    Z = "z"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting whose values differ between the two files."""

    setting: str
    a: str
    b: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one task in both files. Differences are B minus A; if `share`, 1 means 100 percentage points."""

    task: str
    metric: str
    share: bool
    a: float
    b: float
    difference: float
    n: int | None
    """Number of questions; if the files have different numbers, the smaller one."""
    paired: bool
    test: str
    """The test's name with its details, or "not tested: " followed by the reason."""
    method: Method = Method.NONE
    reason: str = ""
    """The reason why the row was not tested, or ""."""
    p: float | None = None
    adjusted: float | None = None
    """The p value after Holm's correction over all tested rows; None if the row was not tested."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the difference, without a correction for the number of rows."""
    interval_method: str = ""
    smallest: float | None = None
    """Size of the true difference that would be found significant, after the correction, with a probability of 80 %;
    None if unknown."""
    spread: float | None = None
    """Standard error of the difference if the true difference is 0; `smallest` is derived from it."""

    @property
    def significant(self) -> bool:
        """Whether the adjusted p is at most 5 %."""
        return self.adjusted is not None and self.adjusted <= ALPHA


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """The result of `compare`."""

    a: str
    b: str
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    sentence: str
    """The outcome in one or two sentences."""

    @property
    def comparable(self) -> bool:
        """Whether all settings are equal; if one differs, different scores say nothing about the machine."""
        return not self.differences


def _around(centre: float, half: float) -> tuple[float, float]:
    return centre - half, centre + half


def _stderr(score: Score) -> tuple[float | None, str]:
    """Return (the standard error of a score or None, a text that says how it was found)."""
    if score.stderr:
        return score.stderr, "given standard errors"
    if len(score.samples) > 1 and (spread := stdev(s.value for s in score.samples.values())):
        return spread / math.sqrt(len(score.samples)), "standard errors of the samples"
    if score.n and score.share:  # adds one right and one wrong answer, so never 0 (Agresti and Caffo 2000)
        share = (score.value * score.n + 1) / (score.n + 2)
        shrunk = score.n / (score.n + 2)  # their test is of the shrunk difference
        return math.sqrt(share * (1 - share) / (score.n + 2)) / shrunk, "binomial standard errors from n"
    return None, score.note or "no standard error, no samples, and not a share of a known number of questions"


def _paired(row: Row, pairs: Sequence[tuple[float, float]]) -> Row:
    z = NormalDist().inv_cdf(0.975)
    n = len(pairs)
    differences = [b - a for a, b in pairs]
    mean = fmean(differences)
    row = replace(row, paired=True, n=n, difference=mean)
    if all(value in (0.0, 1.0) for pair in pairs for value in pair):
        up, down = differences.count(1.0), differences.count(-1.0)
        gained, lost = (up + 1) / (n + 2), (down + 1) / (n + 2)
        half = z * math.sqrt((gained + lost - (gained - lost) ** 2) / (n + 2))
        return replace(
            row,
            test="McNemar's exact test",
            method=Method.MCNEMAR,
            p=mcnemar(up, down),
            interval=_around(gained - lost, half),
            interval_method="Bonett and Price's adjusted Wald",
            spread=math.sqrt((gained + lost) / n),
        )
    exact = sum(map(bool, differences)) <= EXACT_UP_TO
    spread = stdev(differences) / math.sqrt(n) if n > 1 else None
    return replace(
        row,
        test=f"sign flips, {'all' if exact else format(FLIPS, ',')}",
        method=Method.SIGN_FLIP,
        p=sign_flip(differences),
        interval=_around(mean, t95(n - 1) * spread) if spread is not None and n > 3 else None,
        interval_method="Student's t on paired differences",
        spread=spread,
    )


def _unpaired(row: Row, a: Score, b: Score) -> Row:
    (error_a, source_a), (error_b, source_b) = _stderr(a), _stderr(b)
    if error_a is None or error_b is None:
        return _untested(row, source_a if error_a is None else source_b)
    spread = math.hypot(error_a, error_b)
    source = source_a if source_a == source_b else f"{source_a} (A), {source_b} (B)"
    return replace(
        row,
        test=f"z test, {source}",
        method=Method.Z,
        p=math.erfc(abs(row.difference) / spread / math.sqrt(2)),
        interval=_around(row.difference, NormalDist().inv_cdf(0.975) * spread),
        interval_method=f"normal, {source}",
        spread=spread,
    )


def _untested(row: Row, reason: str) -> Row:
    return replace(row, test=f"not tested: {reason}", reason=reason)


def _smallest(row: Row, tests: int) -> float | None:
    """Return the smallest visible difference: (z of Holm's strictest step + z of the power) times the row's `spread`.

    For McNemar's test, the difference itself adds pairs of unequal answers. Connor's formula (1987) counts them; one is
    added for the exact test's steps. If there are too few of them, the test is never significant.
    """
    if not row.spread:
        return None
    z_alpha, z_power = NormalDist().inv_cdf(1 - ALPHA / tests / 2), NormalDist().inv_cdf(POWER)
    smallest = (z_alpha + z_power) * row.spread
    if row.method is not Method.MCNEMAR or not row.n:
        return smallest
    smallest = min(1.0, smallest)
    for _ in range(50):  # iterates to a fixed point, close enough after a few steps
        discordant = row.n * row.spread**2 + smallest
        width = z_alpha * math.sqrt(discordant) + z_power * math.sqrt(max(0.0, discordant - smallest**2))
        smallest = min(1.0, width / math.sqrt(row.n) + 1 / row.n)
    return max(smallest, math.ceil(math.log2(2 * tests / ALPHA)) / row.n)  # all in one direction: 2 * 0.5^k


def compare(a: Scores, b: Scores) -> ScoreResult:
    """Return the comparison of every task and metric that both files have. Raises `ScoreError` if they share none."""
    others = dict(_numbered(b.scores))
    pairs = [(s, others[key]) for key, s in _numbered(a.scores) if key in others]
    if not pairs:
        names = [", ".join(sorted({f"{s.task} ({s.metric})" for s in x.scores})[:5]) for x in (a, b)]
        raise ScoreError(
            f"no common task and metric: {a.path} has {names[0]}; {b.path} has {names[1]}; give two runs of one task"
        )
    differing: dict[tuple[str, str, str], list[str]] = {}
    rows = []
    for x, y in pairs:
        row = Row(task=x.task, metric=x.metric, share=x.share and y.share, a=x.value, b=y.value, test="", paired=False,
                  difference=y.value - x.value, n=min((n for n in (x.n, y.n) if n), default=None))  # fmt: skip
        common = [key for key in x.samples if key in y.samples]
        if x.samples and y.samples and not common:
            raise ScoreError(
                f"{x.task}: no question of {a.path} is in {b.path} (by id or doc_hash); give two runs on one data set"
            )
        for setting, left, right in _settings(x, y, common):
            tasks = differing.setdefault((setting, left, right), [])
            tasks += [x.task] if x.task not in tasks else []
        if x.share != y.share:
            rows.append(_untested(row, "a share in one file, not in the other"))
        elif common:
            rows.append(_paired(row, [(x.samples[k].value, y.samples[k].value) for k in common]))
        else:
            rows.append(_unpaired(row, x, y))
    tested = [row.p for row in rows if row.p is not None]
    adjusted = iter(holm(tested))
    final = tuple(
        row if row.p is None else replace(row, adjusted=next(adjusted), smallest=_smallest(row, len(tested)))
        for row in rows
    )
    differences = tuple(
        Difference(setting=s, a=left, b=right, tasks=tuple(tasks)) for (s, left, right), tasks in differing.items()
    )
    sentence = printable(_sentence(final, differences))
    return ScoreResult(a=a.path, b=b.path, rows=final, differences=differences, sentence=sentence)


def _numbered(scores: Iterable[Score]) -> Iterator[tuple[tuple[str, str, int], Score]]:
    """Yield ((task, metric, number), score); the number separates entries that occur twice in a file."""
    seen: Counter[tuple[str, str]] = Counter()
    for score in scores:
        name = (score.task, score.metric)
        yield (*name, seen[name]), score
        seen[name] += 1


def _settings(x: Score, y: Score, common: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, value in x, value in y) for settings that differ; a setting of only one file is ignored."""
    for setting in x.settings:
        if setting in y.settings and x.settings[setting] != y.settings[setting]:
            yield setting, x.settings[setting], y.settings[setting]
    if x.n and y.n and x.n != y.n:
        yield "number of questions", str(x.n), str(y.n)
    elif common and len(common) < max(len(x.samples), len(y.samples)):
        yield "questions", f"{len(x.samples)} of which {len(common)} in both", f"{len(y.samples)}"
    prompts = [(x.samples[key].prompt, y.samples[key].prompt) for key in common]
    changed = sum(p != q for p, q in prompts if p and q)
    if changed:
        yield "prompt", "one version", f"another version for {changed} of {len(common)} questions"


def _amount(row: Row, value: float) -> str:
    return f"{value * 100:.1f} points" if row.share else f"{value:.3g}"


def _questions(row: Row) -> str:
    return f"{row.n:,} questions" if row.n else "an unknown number of questions"


def _sentence(rows: Sequence[Row], differences: Sequence[Difference]) -> str:
    tested = [row for row in rows if row.p is not None]
    found = sorted((row for row in tested if row.significant), key=lambda row: row.adjusted or 0)
    if not tested:
        text = f"Nothing could be tested: {rows[0].reason}."
    elif found:
        parts = [
            f"{row.task} ({row.metric}) by {_amount(row, abs(row.difference))} "
            f"({'B is lower' if row.difference < 0 else 'B is higher'}, adjusted p {_p(row.adjusted)})"
            for row in found[:3]
        ]
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        text = f"Significant difference in {len(found)} of {len(tested)} scores: {'; '.join(parts)}{more}."
    else:
        text = "No significant difference" + _not_visible([row for row in tested if row.smallest is not None]) + "."
    untested = len(rows) - len(tested)
    if tested and untested:
        text += f" {untested} of {len(rows)} scores could not be tested."
    if differences:
        which = "; ".join(f"{d.setting} ({_short(d.a)} in A, {_short(d.b)} in B)" for d in differences)
        return f"Not comparable, settings differ: {which}. As the numbers stand: {text}"
    return text


def _not_visible(rows: Sequence[Row]) -> str:
    shares = [row for row in rows if row.share] or list(rows)
    if not shares:
        return ""
    first, *_, last = sorted(shares, key=lambda row: row.smallest or 0) * 2
    if len(rows) == 1:
        return f"; with {_questions(first)} differences below {_visible(first)} cannot be seen"
    ends = [f"{_visible(row)} ({row.task}, {_questions(row)})" for row in (first, last)]
    return f" in {len(rows)} scores; differences below {' to '.join(ends)} cannot be seen"


def _visible(row: Row) -> str:
    if row.smallest is None:
        return ""
    return "100 points" if row.share and row.smallest >= 1 else _amount(row, row.smallest)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"


def _p(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def text(result: ScoreResult, width: int | None = None) -> str:
    """Return the comparison as text of `width` columns (None: as wide as this terminal): a sentence, then each row."""
    room = columns() if width is None else width
    tests = sum(row.p is not None for row in result.rows)
    methods = sorted({row.test + (f"; interval: {row.interval_method}" if row.interval else "") for row in result.rows})
    differences = [f"{d.setting}: {d.a} in A, {d.b} in B ({', '.join(d.tasks[:5])})" for d in result.differences]
    note = f"Adjusted: Holm over {tests} tests; intervals are not. Could be seen: with {100 * POWER:.0f} % probability."
    lines = [
        *wrapped("", result.sentence, room),
        "",
        f"A: {result.a}",
        f"B: {result.b}",
        *(["Settings that differ:"] if differences else []),
        *(line for difference in differences for line in wrapped("  ", difference, room)),
        "",
        *(line for row in result.rows for line in _block(row, room)),
        "",
        *(line for method in methods for line in wrapped("Test: ", f"{method}.", room)),
        *wrapped("", note, room),
    ]
    return "\n".join(printable(line) for line in lines)


def _block(row: Row, room: int) -> list[str]:
    """Return a row as three lines, wrapped if they are longer than `room` columns; shares are in percent."""
    scale = 100 if row.share else 1
    a, b = (f"{scale * v:.2f}" if row.share else f"{v:.4g}" for v in (row.a, row.b))
    scores = f"A {a}, B {b}, B - A {scale * row.difference:+.2f}"
    if row.interval is not None:
        scores += " (95 % interval {:+.2f} to {:+.2f})".format(*(scale * end for end in row.interval))
    tested = f"p {_p(row.p)}, adjusted {_p(row.adjusted)}" if row.p is not None else "not tested"
    test = f"{tested}; {_questions(row)}, {'paired' if row.paired else 'not paired'}"
    visible = f"; could be seen: {_visible(row)}" if row.smallest is not None else ""
    lines = wrapped("", f"{row.task}  {row.metric}", room)
    return [*lines, *wrapped("    ", scores, room), *wrapped("    ", test + visible, room)]
