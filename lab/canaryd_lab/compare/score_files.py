"""Read score files of evaluation harnesses (lm-eval, evalscope, opencompass)."""

from __future__ import annotations

import csv
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from canaryd.facts import printable

LONGEST = 1000
"""Maximum number of characters of an error message, because names in a file can have any length."""
LARGEST = 1e100
"""Largest score that is accepted; the square of a larger one could overflow."""
_PROPORTION = re.compile(r"(?:^|[^a-z])(?:acc|accuracy|averageaccuracy|exact_match|em|pass@1)(?![a-z])")
"""Names of metrics that are a share of right answers. Only for these can a standard error be computed from n alone."""
_CSV_HEADER = ["dataset", "version", "metric", "mode"]


class ScoreError(ValueError):
    """A result file that cannot be used; the message is one line for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message)[:LONGEST])


@dataclass(frozen=True)
class Sample:
    """The result of one question of a task."""

    value: float
    prompt: str = ""
    """Fingerprint of the prompt that the model got; "" if the file has none."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task in one file."""

    task: str
    metric: str
    value: float
    """The score as in the file, except that a share of right answers is always 0 … 1 and never a percentage."""
    share: bool
    """Whether the score is a mean of values between 0 and 1; differences are then shown in percentage points."""
    n: int | None = None
    stderr: float | None = None
    """Standard error of `value` from the file; None if the file has none."""
    samples: Mapping[str, Sample] = field(default_factory=dict)
    """Key of a question → its result; empty if the file has no samples, or if their mean is not `value`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings in the file that must be the same in both files before their scores can be compared."""
    note: str = ""
    """The reason why the score has no samples or no unit, or ""."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores in one result file."""

    path: str
    scores: tuple[Score, ...]


def load(path: Path) -> Scores:
    """Return the scores in a result file or in the directory of one run; raise `ScoreError` if it cannot be used."""
    try:
        return _loaded(path)
    except ScoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ScoreError(f"{path}: damaged, or not as its tool writes it ({reason:.200}); copy it again") from error


def _loaded(path: Path) -> Scores:
    if path.is_dir():
        files = _files_in(path)
        parts = [_loaded(file) for file in files]
        return replace(parts[0], path=str(path), scores=tuple(s for part in parts for s in part.scores))
    if path.suffix == ".csv":
        return _opencompass_summary(path)
    data = _json(path)
    if isinstance(data, dict) and isinstance(data.get("results"), dict):
        return _lm_eval(path, data)
    if isinstance(data, dict) and isinstance(data.get("metrics"), list) and "dataset_name" in data:
        return _evalscope(path, data)
    if isinstance(data, dict) and ("details" in data or path.parent.parent.name == "results"):
        return _scores(path, "opencompass", _opencompass_results(path, data, {"model": path.parent.name}))
    if isinstance(data, dict) and isinstance(data.get("0"), dict) and "prediction" in data["0"]:
        raise ScoreError(f"{path}: opencompass predictions have no scores; give summary_*.csv or results/*/*.json")
    raise ScoreError(
        f'{path}: unknown format; wanted lm-eval ("results"), evalscope ("dataset_name" and "metrics") or '
        f'opencompass (a summary_*.csv, or a results file with "details")'
    )


def _files_in(directory: Path) -> list[Path]:
    """Return the files of one run in a directory: one file, or for evalscope one for each data set."""
    for pattern in ("results_*.json", "*/results_*.json", "summary/summary_*.csv", "reports/*/*.json"):
        found = sorted(directory.glob(pattern))
        runs = {file.parent for file in found} if pattern.startswith("reports") else found
        if len(runs) > 1:
            raise ScoreError(f"{directory}: holds {len(runs)} runs; give one: {', '.join(map(str, sorted(runs)[:4]))}")
        if found:
            return found
    raise ScoreError(
        f"{directory}: no result file; wanted results_*.json (lm-eval), reports/*/*.json (evalscope) or "
        f"summary/summary_*.csv (opencompass)"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ScoreError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ScoreError(f"{path}: not UTF-8 text; give a result file") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ScoreError(f"{path}: invalid JSON at line {error.lineno} ({error.msg}); copy it again") from None


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), 1):  # a JSON string may hold U+2028, which splitlines splits
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise ScoreError(f"{path}: line {number}: invalid JSON ({error.msg}); copy the file again") from None
        if not isinstance(item, dict):
            raise ScoreError(f"{path}: line {number}: is a {type(item).__name__}, wanted an object")
        yield item


def _number(value: Any) -> float | None:
    """Return a number if it is finite, or None for "N/A", null, NaN and infinity."""
    return float(value) if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= LARGEST else None


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _keyed(items: Iterable[tuple[str, Sample]]) -> dict[str, Sample]:
    """Return key → sample; if the key of a question occurs more than once, a number is added to it."""
    seen: Counter[str] = Counter()
    keyed = {}
    for key, sample in items:
        seen[key] += 1
        keyed[key if seen[key] == 1 else f"{key}#{seen[key]}"] = sample
    return keyed


def _with_samples(score: Score, samples: Mapping[str, Sample]) -> Score:
    """Return the score with its samples if their mean is the score (it is not for perplexity), else without samples."""
    if not samples:
        return score
    mean = fmean(sample.value for sample in samples.values())
    for scale in (1.0, 100.0):
        if abs(mean * scale - score.value) <= 1e-4 * max(scale, abs(score.value)):  # files have 4 digits
            share = all(0 <= sample.value <= 1 for sample in samples.values())
            value = mean if share else score.value
            if not share and scale != 1.0:
                samples = {key: replace(s, value=s.value * scale) for key, s in samples.items()}
            return replace(score, value=value, share=share, n=len(samples), samples=samples, note="")
    return replace(score, note=f"samples not used: they average {mean:.4g}, not {score.value:.4g}")


def _scores(path: Path, tool: str, scores: Iterable[Score]) -> Scores:
    found = tuple(replace(s, settings={"tool": tool, **s.settings}) for s in scores)
    if not found:
        raise ScoreError(f"{path}: a file of {tool} without scores")
    return Scores(path=str(path), scores=found)


def _lm_eval(path: Path, data: Mapping[str, Any]) -> Scores:
    """Return the scores of lm-eval 0.4: results → task → "metric,filter" and "metric_stderr,filter"."""
    config = data.get("config") or {}
    configs = data.get("configs") or {}
    common = {"model": data["model_name"]} if data.get("model_name") else {}
    common |= {"limit": config.get("limit", "")} if "limit" in config else {}
    common |= {
        f"{k} seed": config[f"{k}_seed"] for k in ("random", "numpy", "torch", "fewshot") if f"{k}_seed" in config
    }
    common |= {k.replace("_sha", "").replace("_", " "): data[k] for k in ("chat_template_sha", "system_instruction_sha")
               if k in data}  # fmt: skip
    given = sorted(path.parent.glob(f"samples_*_{path.stem.rpartition('_')[2]}.jsonl"))
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
    """Return evalscope 1.x's scores: reports/MODEL/DATASET.json, reviews/MODEL/DATASET_SUBSET.jsonl, configs/*.yaml."""
    run, task = path.parent.parent.parent, str(report["dataset_name"])
    settings: dict[str, Any] = {"model": report.get("model_name", "")}
    for file in sorted((run / "configs").glob("*.yaml")):
        try:
            config = yaml.safe_load(_text(file))
        except yaml.YAMLError:
            raise ScoreError(f"{file}: invalid YAML; copy it again") from None
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
    """Return the scores in summary/summary_TIME.csv; results/ and predictions/ of the same run give n and samples."""
    rows = [row for row in csv.reader(_text(path).split("\n")) if row]
    if not rows or rows[0][:4] != _CSV_HEADER or len(rows[0]) < 5:
        raise ScoreError(f"{path}: unknown format; wanted opencompass's header {','.join(_CSV_HEADER)},MODEL")
    model, *more = rows[0][4:]
    if more:
        raise ScoreError(f"{path}: holds {1 + len(more)} models; give one model's results/MODEL/DATASET.json instead")
    run = path.parent.parent

    def scores() -> Iterator[Score]:
        for row in rows[1:]:
            if len(row) != len(rows[0]):
                raise ScoreError(
                    f"{path}: a line has {len(row)} columns, the header has {len(rows[0])}: {','.join(row)}"
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
    """Return the number of questions of a task in TASK.json, or in TASK_0.json, TASK_1.json, …; None if unknown."""
    here = run / "predictions" / model
    files = [f for f in here.glob(f"{task}*.json") if re.fullmatch(rf"{re.escape(task)}(_\d+)?", f.stem)]
    return sum(len(_json(file)) for file in files) or None


def _percent(score: Score) -> Score:
    """Return opencompass's percentage as a share; a value of at most 1 is ambiguous and stays unchanged."""
    if not _PROPORTION.search(score.metric.lower()) or not 0 <= score.value <= 100:
        return score
    if 0 < score.value <= 1:
        return replace(score, note=f"{score.value:g} may be a fraction or a percentage")
    return replace(score, value=score.value / 100, share=True)


def _opencompass_results(path: Path, data: Mapping[str, Any], settings: Mapping[str, str]) -> Iterator[Score]:
    """Yield the scores in results/MODEL/DATASET.json: numbers are metrics, and "details" have the samples."""
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
