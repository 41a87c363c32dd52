"""Benchmark scores side by side: tells whether two result files of an evaluation tool differ by more than chance.

Reads what lm-eval (EleutherAI/lm-evaluation-harness), evalscope (modelscope/evalscope) and opencompass
(open-compass/opencompass) write: `load`. `compare` tests task by task, on the same questions where both files know
them, and says what this many questions could not have shown. docs/scores.md tells the methods and their limits.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import yaml

from canaryd.model import printable

ALPHA = 0.05
"""Chance of at least one false "significant" in a whole comparison."""
POWER = 0.8
"""With which the smallest difference that could have been seen would have been seen."""
EXACT_UP_TO = 16
"""Unequal pairs up to which all 2^n sign flips are counted instead of drawn."""
FLIPS = 9_999
"""Sign flips that are drawn above that: the smallest p that they can give is 1/10,000."""
LONGEST = 1000
"""Characters of a message: names and settings in a file may be of any length."""
LARGEST = 1e100
"""A score beyond it is none: its square is no number any more."""
SEED = 20_240_229
"""Of the drawn sign flips: the same files always give the same p."""

_PROPORTION = re.compile(r"(?:^|[^a-z])(?:acc|accuracy|averageaccuracy|exact_match|em|pass@1)(?![a-z])")
"""Metrics that are the share of questions answered right, by name: only for them does n alone give a standard error."""
_CSV_HEADER = ["dataset", "version", "metric", "mode"]


class ScoreError(ValueError):
    """What is wrong with a result file, in one line for the user."""

    def __init__(self, said: str) -> None:
        super().__init__(printable(said)[:LONGEST])


@dataclass(frozen=True)
class Sample:
    """What one question gave."""

    value: float
    prompt: str = ""
    """Fingerprint of the rendered prompt; "" where the file does not tell."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task, as one file gives it."""

    task: str
    metric: str
    value: float
    """A share of right answers is between 0 and 1, whatever the file writes; everything else as written."""
    share: bool
    """Whether it is a mean of values between 0 and 1: then differences are told in points of a percent."""
    n: int | None = None
    stderr: float | None = None
    """Standard error of `value` as the file gives it."""
    samples: Mapping[str, Sample] = field(default_factory=dict)
    """By a key that equal questions share. Empty where there are none, or where their mean is not `value`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What must be equal for two scores to be comparable, as far as the file tells."""
    note: str = ""
    """Why there is less here than one would expect."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One result file."""

    path: str
    tool: str
    """"lm-eval", "evalscope" or "opencompass"."""
    scores: tuple[Score, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A setting that is not the same in both files."""

    setting: str
    a: str
    b: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task and metric in both files. Differences are B minus A, in the unit of `share` (1 = 100 points)."""

    task: str
    metric: str
    share: bool
    a: float
    b: float
    difference: float
    n: int | None
    """Questions; the smaller number where the files differ."""
    paired: bool
    test: str
    """The name of the test, or why there is none."""
    p: float | None = None
    adjusted: float | None = None
    """After Holm's correction over all rows that were tested."""
    interval: tuple[float, float] | None = None
    """95 %, not corrected for the number of rows."""
    interval_method: str = ""
    smallest: float | None = None
    """Difference that would have been found significant with a probability of 80 %, correction included."""
    spread: float | None = None
    """Standard error of the difference were there none; `smallest` is derived from it."""

    @property
    def significant(self) -> bool:
        """Whether chance is excluded at 5 % for the whole comparison."""
        return self.adjusted is not None and self.adjusted <= ALPHA


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """What `compare` found."""

    a: str
    b: str
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    sentence: str
    """The outcome for a tired person."""

    @property
    def comparable(self) -> bool:
        """False where a setting differs: then a difference in scores says nothing about the machine."""
        return not self.differences


# --- Reading ---------------------------------------------------------------------------------------------------------


def load(path: Path, samples: Sequence[Path] = ()) -> Scores:
    """Read a result file, or the directory that one run of the tool has written.

    `samples`: per-question files of lm-eval that do not lie beside the results. Raises `ScoreError` with one line that
    says what was looked for.
    """
    try:
        return _loaded(path, samples)
    except ScoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ScoreError(f"{path}: not of the shape that its tool writes ({said:.200}); copy it again") from error


def _loaded(path: Path, samples: Sequence[Path]) -> Scores:
    if path.is_dir():
        files = _files_in(path)
        parts = [_loaded(file, samples) for file in files]
        return replace(parts[0], path=str(path), scores=tuple(s for part in parts for s in part.scores))
    if path.suffix == ".csv":
        return _opencompass_summary(path)
    data = _json(path)
    if isinstance(data, dict) and isinstance(data.get("results"), dict):
        return _lm_eval(path, data, samples)
    if isinstance(data, dict) and isinstance(data.get("metrics"), list) and "dataset_name" in data:
        return _evalscope(path, data)
    if isinstance(data, dict) and ("details" in data or path.parent.parent.name == "results"):
        return _scores(path, "opencompass", _opencompass_results(path, data, {"model": path.parent.name}))
    if isinstance(data, dict) and isinstance(data.get("0"), dict) and "prediction" in data["0"]:
        raise ScoreError(f"{path}: predictions of opencompass bear no scores; give summary_*.csv or results/*/*.json")
    raise ScoreError(
        f'{path}: unknown format; looked for lm-eval ("results"), evalscope ("dataset_name" and "metrics") and '
        f'opencompass (a summary_*.csv, or a results file with "details")'
    )


def _files_in(directory: Path) -> list[Path]:
    """Find the files of one run: only evalscope writes one per data set."""
    for pattern in ("results_*.json", "*/results_*.json", "summary/summary_*.csv", "reports/*/*.json"):
        found = sorted(directory.glob(pattern))
        runs = {file.parent for file in found} if pattern.startswith("reports") else found
        if len(runs) > 1:
            raise ScoreError(f"{directory}: holds {len(runs)} runs; give one: {', '.join(map(str, sorted(runs)[:4]))}")
        if found:
            return found
    raise ScoreError(
        f"{directory}: no result file; looked for results_*.json (lm-eval), reports/*/*.json (evalscope) and "
        f"summary/summary_*.csv (opencompass)"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScoreError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ScoreError(f"{path}: is not text in UTF-8") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ScoreError(
            f"{path}: not whole JSON, broken at line {error.lineno} ({error.msg}); copy it again"
        ) from None


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), 1):  # a JSON string may hold U+2028, which splitlines splits
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ScoreError(f"{path}: line {number} is not whole JSON ({error.msg}); copy the file again") from None
        if not isinstance(item, dict):
            raise ScoreError(f"{path}: line {number}: wanted an object, got {type(item).__name__}")
        yield item


def _number(value: Any) -> float | None:
    """Return a finite number, or None: the tools write "N/A", null and NaN."""
    return float(value) if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= LARGEST else None


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _keyed(items: Iterable[tuple[str, Sample]]) -> dict[str, Sample]:
    """Key samples; a question that a data set holds twice is counted through."""
    seen: Counter[str] = Counter()
    keyed = {}
    for key, sample in items:
        seen[key] += 1
        keyed[key if seen[key] == 1 else f"{key}#{seen[key]}"] = sample
    return keyed


def _with_samples(score: Score, samples: Mapping[str, Sample]) -> Score:
    """Attach samples whose mean is the score; a metric of another make (perplexity, F1 of a corpus) has none."""
    if not samples:
        return score
    mean = fmean(sample.value for sample in samples.values())
    for scale in (1.0, 100.0):
        if abs(mean * scale - score.value) <= 1e-4 * max(scale, abs(score.value)):  # they are written with 4 digits
            share = all(0 <= sample.value <= 1 for sample in samples.values())
            value = mean if share else score.value
            if not share and scale != 1.0:
                samples = {key: replace(s, value=s.value * scale) for key, s in samples.items()}
            return replace(score, value=value, share=share, n=len(samples), samples=samples, note="")
    return replace(score, note=f"its samples average {mean:.4g}, not {score.value:.4g}: not used")


def _scores(path: Path, tool: str, scores: Iterable[Score]) -> Scores:
    found = tuple(replace(s, settings={"tool": tool, **s.settings}) for s in scores)
    if not found:
        raise ScoreError(f"{path}: {tool} wrote it, but there is no score in it")
    return Scores(path=str(path), tool=tool, scores=found)


def _lm_eval(path: Path, data: Mapping[str, Any], extra: Sequence[Path]) -> Scores:
    """Shape of lm-eval 0.4: results → task → "metric,filter" and "metric_stderr,filter"."""
    config = data.get("config") or {}
    configs = data.get("configs") or {}
    common = {"model": data["model_name"]} if data.get("model_name") else {}
    common |= {"limit": config.get("limit", "")} if "limit" in config else {}
    common |= {
        f"{k} seed": config[f"{k}_seed"] for k in ("random", "numpy", "torch", "fewshot") if f"{k}_seed" in config
    }
    common |= {k.replace("_sha", "").replace("_", " "): data[k] for k in ("chat_template_sha", "system_instruction_sha")
               if k in data}  # fmt: skip
    given = [*extra] or sorted(path.parent.glob(f"samples_*_{path.stem.rpartition('_')[2]}.jsonl"))
    embedded = data.get("samples") or {}

    @functools.cache
    def rows(task: str) -> list[dict[str, Any]]:
        wanted = re.compile(rf"samples_{re.escape(task)}(?:_\d{{4}}-[^_]*)?\.jsonl")
        found = embedded.get(task) or (row for file in given if wanted.fullmatch(file.name) for row in _jsonl(file))
        return [{k: v for k, v in row.items() if isinstance(v, (int, float, str))} for row in found]  # not the prompts

    def samples_of(task: str, metric: str, name: str) -> dict[str, Sample]:
        subtasks = [s for s in (data.get("group_subtasks") or {}).get(task, []) if s != task]
        if subtasks:
            return {f"{s}/{key}": v for s in subtasks for key, v in samples_of(s, metric, name).items()}
        return _keyed(
            (str(row.get("doc_hash") or row.get("doc_id")), Sample(value, str(row.get("prompt_hash", ""))))
            for row in rows(task)
            if row.get("filter", name) == name and (value := _number(row.get(metric))) is not None
        )

    def scores() -> Iterator[Score]:
        for task, metrics in data["results"].items():
            settings = dict(common)
            for setting, table in (("few-shot", data.get("n-shot")), ("task version", data.get("versions"))):
                settings |= {setting: table[task]} if table and task in table else {}
            kwargs = (configs.get(task) or {}).get("generation_kwargs")
            settings |= {"generation settings": json.dumps(kwargs, sort_keys=True)} if kwargs else {}
            n = ((data.get("n-samples") or {}).get(task) or {}).get("effective") or metrics.get("sample_len")
            for key, given_value in metrics.items():
                metric, _, name = key.partition(",")
                value = _number(given_value)
                if metric.endswith("_stderr") or key in ("alias", "sample_len", "samples") or value is None:
                    continue
                suffix = f",{name}" if name else ""
                score = Score(
                    task=task,
                    metric=key,
                    value=value,
                    share=bool(_PROPORTION.search(metric)) and 0 <= value <= 1,
                    n=_count(n),
                    stderr=max(0.0, _number(metrics.get(f"{metric}_stderr{suffix}")) or 0.0) or None,
                    settings={k: _word(v) for k, v in settings.items()},
                )
                yield _with_samples(score, samples_of(task, metric, name))

    return _scores(path, "lm-eval", scores())


def _evalscope(path: Path, report: Mapping[str, Any]) -> Scores:
    """Shape of evalscope 1.x: reports/MODEL/DATASET.json, reviews/MODEL/DATASET_SUBSET.jsonl, configs/*.yaml."""
    run, task = path.parent.parent.parent, str(report["dataset_name"])
    settings: dict[str, Any] = {"model": report.get("model_name", "")}
    for file in sorted((run / "configs").glob("*.yaml")):
        try:
            config = yaml.safe_load(_text(file))
        except yaml.YAMLError:
            raise ScoreError(f"{file}: not whole YAML; copy it again") from None
        dataset = (config.get("dataset_args") or {}).get(task) or {}
        settings |= {"few-shot": dataset["few_shot_num"]} if "few_shot_num" in dataset else {}
        settings |= {key: config[key] for key in ("limit", "seed", "repeats", "chat_template") if key in config}
        generation = {k: v for k, v in (config.get("generation_config") or {}).items() if k != "batch_size"}
        settings["generation settings"] = json.dumps(generation, sort_keys=True, default=str)
    subsets = {s["name"] for m in report["metrics"] for c in m.get("categories", ()) for s in c.get("subsets", ())}
    reviews = run / "reviews" / path.parent.name
    files = [(subset, reviews / f"{task}_{subset}.jsonl") for subset in sorted(subsets)]
    rows = [(subset, row) for subset, file in files if file.exists() for row in _jsonl(file)]

    def sample(subset: str, row: Mapping[str, Any], value: float) -> tuple[str, Sample]:
        asked = [m.get("content") for m in row.get("messages") or () if m.get("role") in ("system", "user")]
        prompt = _fingerprint(asked or row.get("input", ""))
        return f"{subset}/{row.get('index')}/{_fingerprint(row.get('target'))}", Sample(value, prompt)

    def scores() -> Iterator[Score]:
        for metric in report["metrics"]:
            identity = metric.get("identity") or {}  # since report schema 2; before it there is a name
            name = metric.get("name") or "_".join(filter(None, (identity.get("aggregation"), identity.get("name"))))
            value = _number(metric.get("score"))
            if value is None:
                continue
            score = Score(
                task=task,
                metric=name,
                value=value,
                share=bool(_PROPORTION.search(name.lower())) and 0 <= value <= 1,
                n=_count(metric.get("num")),
                settings={k: _word(v) for k, v in settings.items()},
            )
            values = [(s, row, row.get("sample_score", {}).get("score", {}).get("value") or {}) for s, row in rows]
            plain = name.removeprefix("mean_")
            keys = {plain, {"accuracy": "acc", "acc": "accuracy"}.get(plain, plain)}
            yield _with_samples(
                score,
                _keyed(
                    sample(subset, row, number)
                    for subset, row, given in values
                    for key in keys & set(given)
                    if (number := _number(given[key])) is not None
                ),
            )

    return _scores(path, "evalscope", scores())


def _opencompass_summary(path: Path) -> Scores:
    """Shape of summary/summary_TIME.csv; results/ and predictions/ beside it tell n and samples where they are."""
    rows = [row for row in csv.reader(_text(path).split("\n")) if row]
    if not rows or rows[0][:4] != _CSV_HEADER or len(rows[0]) < 5:
        raise ScoreError(f"{path}: unknown format; looked for opencompass's header {','.join(_CSV_HEADER)},MODEL")
    model, *more = rows[0][4:]
    if more:
        raise ScoreError(f"{path}: holds {1 + len(more)} models; give one model's results/MODEL/DATASET.json instead")
    run = path.parent.parent

    def scores() -> Iterator[Score]:
        for row in rows[1:]:
            if len(row) != len(rows[0]):
                raise ScoreError(
                    f"{path}: a line of {len(row)} columns under a header of {len(rows[0])}: {','.join(row)}"
                )
            task, version, metric, mode = row[:4]
            settings = {"model": model, "task version": version, "mode": mode}
            file = run / "results" / model / f"{task}.json"
            given = row[4]
            if file.exists():
                found = [s for s in _opencompass_results(file, _json(file), settings) if s.metric == metric]
                if found:
                    yield found[0]
                    continue
            try:
                value = float(given)
            except ValueError:  # "-": not evaluated
                continue
            yield _percent(Score(task=task, metric=metric, value=value, share=False, n=_predictions(run, model, task),
                                 settings=settings))  # fmt: skip

    return _scores(path, "opencompass", scores())


def _predictions(run: Path, model: str, task: str) -> int | None:
    """Count what was asked; a partial run writes TASK_0.json, TASK_1.json, …."""
    here = run / "predictions" / model
    files = [f for f in here.glob(f"{task}*.json") if re.fullmatch(rf"{re.escape(task)}(_\d+)?", f.stem)]
    return sum(len(_json(file)) for file in files) or None


def _percent(score: Score) -> Score:
    """Turn opencompass's percentages into shares; what is not above 1 may be either, and is left alone."""
    if not _PROPORTION.search(score.metric.lower()) or not 0 <= score.value <= 100:
        return score
    if 0 < score.value <= 1:
        return replace(score, note=f"{score.value:g} may be a fraction or a percentage")
    return replace(score, value=score.value / 100, share=True)


def _opencompass_results(path: Path, data: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Score]:
    """Shape of results/MODEL/DATASET.json: metrics as numbers, "details" as a list, or an object with "type"."""
    details = data.get("details") or {}
    rows = (
        list(enumerate(details)) if isinstance(details, list) else [(k, v) for k, v in details.items() if k != "type"]
    )

    def samples() -> Iterator[tuple[str, Sample]]:
        for number, row in rows:
            marks = next((row[k] for k in ("correct", "is_correct", "cascade_correct") if k in row), None)
            marks = [_number(mark) for mark in (marks if isinstance(marks, list) else [marks])]
            right = [mark for mark in marks if mark is not None]
            if right and len(right) == len(marks):
                wanted = row.get("references", row.get("answer", ""))
                prompt = _fingerprint(row["prompt"]) if "prompt" in row else ""
                yield f"{row.get('example_abbr', number)}/{_fingerprint(wanted)}", Sample(fmean(right), prompt)

    marked = _keyed(samples())
    n = len(rows) or _predictions(path.parent.parent.parent, path.parent.name, path.stem)
    for metric, given in data.items():
        value = _number(given)
        if value is not None and not isinstance(given, bool):
            score = _percent(Score(task=path.stem, metric=metric, value=value, share=False, n=n, settings=settings))
            yield _with_samples(score, marked) if _PROPORTION.search(metric.lower()) or metric == "score" else score


# --- Statistics ------------------------------------------------------------------------------------------------------


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p of b against c discordant pairs: a fair coin, thrown b + c times (McNemar 1947)."""
    n = b + c
    tail = sum(math.comb(n, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / (1 << n)) if n else 1.0


def sign_flip(differences: Sequence[float], *, flips: int = FLIPS, seed: int = SEED) -> float:
    """Return the two-sided p of the mean of paired differences under random signs (Fisher 1935).

    Exact over all 2^n assignments for up to 16 differences that are not zero; above, (hits + 1)/(flips + 1) of drawn
    ones, which never understates p (Phipson and Smyth 2010).
    """
    live = [d for d in differences if d]
    if not live:
        return 1.0
    observed = abs(math.fsum(live)) - 1e-9 * math.fsum(map(abs, live))  # sums in another order are the same sum
    if len(live) <= EXACT_UP_TO:
        sums = _signed_sums(live)
        return sum(abs(s) >= observed for s in sums) / len(sums)
    tables = [_signed_sums([*live[i : i + 8], *[0.0] * (i + 8 - len(live))]) for i in range(0, len(live), 8)]
    draw = random.Random(seed)
    hits = sum(abs(sum(map(operator.getitem, tables, draw.randbytes(len(tables))))) >= observed for _ in range(flips))
    return (hits + 1) / (flips + 1)


def _signed_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [s + value for s in sums] + [s - value for s in sums]
    return sums


def holm(ps: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number by Holm's step-down method (1979), in the given order."""
    adjusted = [0.0] * len(ps)
    worst = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


def _t95(freedom: int) -> float:
    """Return Student's 97.5 % quantile by Cornish and Fisher's expansion (Abramowitz and Stegun 26.7.5): 3+ degrees."""
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


def _around(centre: float, half: float) -> tuple[float, float]:
    return centre - half, centre + half


def _stderr(score: Score) -> tuple[float | None, str]:
    """Return the standard error of a score and where it comes from."""
    if score.stderr:
        return score.stderr, "given standard errors"
    if len(score.samples) > 1 and (spread := stdev(s.value for s in score.samples.values())):
        return spread / math.sqrt(len(score.samples)), "standard errors of the samples"
    if score.n and score.share:  # one right and one wrong answer are added: never 0 (Agresti and Caffo 2000)
        share = (score.value * score.n + 1) / (score.n + 2)
        shrunk = score.n / (score.n + 2)  # theirs is a test of the shrunk difference
        return math.sqrt(share * (1 - share) / (score.n + 2)) / shrunk, "binomial standard errors from n"
    return None, score.note or "no standard error, no samples, and no share of a known number of questions"


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
        p=sign_flip(differences),
        interval=_around(mean, _t95(n - 1) * spread) if spread is not None and n > 3 else None,
        interval_method="Student's t on paired differences",
        spread=spread,
    )


def _unpaired(row: Row, a: Score, b: Score) -> Row:
    (error_a, source_a), (error_b, source_b) = _stderr(a), _stderr(b)
    if error_a is None or error_b is None:
        return replace(row, test=f"not tested: {source_a if error_a is None else source_b}")
    spread = math.hypot(error_a, error_b)
    source = source_a if source_a == source_b else f"{source_a} (A), {source_b} (B)"
    return replace(
        row,
        test=f"z test, {source}",
        p=math.erfc(abs(row.difference) / spread / math.sqrt(2)),
        interval=_around(row.difference, NormalDist().inv_cdf(0.975) * spread),
        interval_method=f"normal, {source}",
        spread=spread,
    )


def _smallest(row: Row, tests: int) -> float | None:
    """Return (z of the strictest step of Holm + z of the power) times spread.

    A shift of right and wrong answers makes further discordant pairs: Connor's formula (1987) with them counted, and
    one pair for the exact test's steps. Below its fewest discordant pairs McNemar's test cannot be significant at all.
    """
    if not row.spread:
        return None
    z_alpha, z_power = NormalDist().inv_cdf(1 - ALPHA / tests / 2), NormalDist().inv_cdf(POWER)
    smallest = (z_alpha + z_power) * row.spread
    if not row.test.startswith("McNemar") or not row.n:
        return smallest
    smallest = min(1.0, smallest)
    for _ in range(50):  # a fixed point, near enough after a few steps
        discordant = row.n * row.spread**2 + smallest
        width = z_alpha * math.sqrt(discordant) + z_power * math.sqrt(max(0.0, discordant - smallest**2))
        smallest = min(1.0, width / math.sqrt(row.n) + 1 / row.n)
    return max(smallest, math.ceil(math.log2(2 * tests / ALPHA)) / row.n)  # all in one direction: 2 * 0.5^k


# --- Comparison ------------------------------------------------------------------------------------------------------


def compare(a: Scores, b: Scores) -> ScoreResult:
    """Compare every task and metric that both have. Raises `ScoreError` where there is nothing to compare."""
    others = dict(_numbered(b.scores))
    couples = [(s, others[key]) for key, s in _numbered(a.scores) if key in others]
    if not couples:
        names = [", ".join(sorted({f"{s.task} ({s.metric})" for s in x.scores})[:5]) for x in (a, b)]
        raise ScoreError(f"no common task and metric: {a.path} has {names[0]}; {b.path} has {names[1]}")
    differing: dict[tuple[str, str, str], list[str]] = {}
    rows = []
    for x, y in couples:
        row = Row(task=x.task, metric=x.metric, share=x.share and y.share, a=x.value, b=y.value, test="", paired=False,
                  difference=y.value - x.value, n=min((n for n in (x.n, y.n) if n), default=None))  # fmt: skip
        common = [key for key in x.samples if key in y.samples]
        if x.samples and y.samples and not common:
            raise ScoreError(f"{x.task}: no question of {a.path} is in {b.path} (by id or doc_hash): other data sets")
        for setting, left, right in _settings(x, y, common):
            tasks = differing.setdefault((setting, left, right), [])
            tasks += [x.task] if x.task not in tasks else []
        if x.share != y.share:
            rows.append(replace(row, test="not tested: a share in one file, not in the other"))
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
    """Key scores by task and metric; one that a file has twice, as in two modes, is counted through."""
    seen: Counter[tuple[str, str]] = Counter()
    for score in scores:
        name = (score.task, score.metric)
        yield (*name, seen[name]), score
        seen[name] += 1


def _settings(x: Score, y: Score, common: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield what differs. What only one file tells is not known to differ."""
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
        yield "prompt", "one", f"another for {changed} of {len(common)} questions"


def _amount(row: Row, value: float, *, sign: bool = False) -> str:
    form = "+" if sign else ""
    return f"{value * 100:{form}.1f} points" if row.share else f"{value:{form}.3g}"


def _asked(row: Row) -> str:
    return f"{row.n:,} questions" if row.n else "an unknown number of questions"


def _sentence(rows: Sequence[Row], differences: Sequence[Difference]) -> str:
    tested = [row for row in rows if row.p is not None]
    found = sorted((row for row in tested if row.significant), key=lambda row: row.adjusted or 0)
    if not tested:
        said = f"Nothing could be tested: {rows[0].test.removeprefix('not tested: ')}."
    elif found:
        parts = [
            f"{row.task} ({row.metric}) by {_amount(row, abs(row.difference))} "
            f"({'B is lower' if row.difference < 0 else 'B is higher'}, adjusted p {_p(row.adjusted)})"
            for row in found[:3]
        ]
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        said = f"Significant difference in {len(found)} of {len(tested)} scores: {'; '.join(parts)}{more}."
    else:
        said = "No significant difference" + _unseen([row for row in tested if row.smallest is not None]) + "."
    untested = len(rows) - len(tested)
    if tested and untested:
        said += f" {untested} of {len(rows)} scores could not be tested."
    if differences:
        which = "; ".join(f"{d.setting} ({_short(d.a)} in A, {_short(d.b)} in B)" for d in differences)
        return f"Not comparable, settings differ: {which}. As the numbers stand: {said}"
    return said


def _unseen(rows: Sequence[Row]) -> str:
    shares = [row for row in rows if row.share] or list(rows)
    if not shares:
        return ""
    first, *_, last = sorted(shares, key=lambda row: row.smallest or 0) * 2
    if len(rows) == 1:
        return f"; with {_asked(first)} differences below {_seen(first)} cannot be seen"
    ends = [f"{_seen(row)} ({row.task}, {_asked(row)})" for row in (first, last)]
    return f" in {len(rows)} scores; differences below {' to '.join(ends)} cannot be seen"


def _seen(row: Row) -> str:
    if row.smallest is None:
        return ""
    return "100 points" if row.share and row.smallest >= 1 else _amount(row, row.smallest)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"


def _p(p: float | None) -> str:
    return "" if p is None else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def text(result: ScoreResult) -> str:
    """Return the comparison as a table for a terminal, under its sentence."""
    head = ("task", "metric", "A", "B", "B - A", "95 % interval", "p", "adjusted", "n", "paired", "could be seen")
    lines: list[tuple[str, ...]] = [head]
    for row in result.rows:
        scale = 100 if row.share else 1
        ends = "" if row.interval is None else "{:+.2f} to {:+.2f}".format(*(scale * end for end in row.interval))
        values = [f"{scale * v:.2f}" if row.share else f"{v:.4g}" for v in (row.a, row.b)]
        lines.append(
            (row.task, row.metric, *values, f"{scale * row.difference:+.2f}", ends, _p(row.p), _p(row.adjusted),
             f"{row.n:,}" if row.n else "?", "yes" if row.paired else "no",
             _seen(row))
        )  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = {0, 1, 9}
    table = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    tests = sum(row.p is not None for row in result.rows)
    methods = sorted({row.test + (f"; interval: {row.interval_method}" if row.interval else "") for row in result.rows})
    warnings = [f"  {d.setting}: {d.a} in A, {d.b} in B ({', '.join(d.tasks[:5])})" for d in result.differences]
    return "\n".join(
        printable(line)
        for line in [
            result.sentence,
            "",
            f"A: {result.a}",
            f"B: {result.b}",
            *(["Settings that differ:", *warnings] if warnings else []),
            "",
            *(line.rstrip() for line in table),
            "",
            *(f"Test: {method}." for method in methods),
            f"Adjusted by Holm over {tests} tests; the intervals are not. Could be seen: with a power of {POWER:.0%}.",
        ]
    )
