"""Result files of evaluation tools: lm-eval, evalscope, opencompass; one file, a directory, and two compared.

Only `ScoreError`, one printable line. Scores are finite, shares lie between 0 and 1, numbers of questions are positive;
p values are chances, intervals in order; the table is text that steers no terminal; a file compared with itself never
differs significantly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from canaryd_lab.compare import score_files, scores

from canaryd.codec import to_json
from tests.fuzz.material import Choices, dumps, modes, seed, warped
from tests.fuzz.properties import finite, in_time, lines, one_line, scratch

GIVEN = Path(__file__).resolve().parents[3] / "lab/tests/scores"
RUNS: dict[str, dict[str, Any]] = {}
for _run in sorted(GIVEN.iterdir()):
    RUNS[_run.name] = {}
    for _file in sorted(_run.rglob("*")):
        if _file.is_file():
            _text = _file.read_text(encoding="utf-8")
            _read: Any = _text
            if _file.suffix == ".json":
                _read = json.loads(_text)
            elif _file.suffix == ".jsonl":
                _read = [json.loads(line) for line in _text.split("\n") if line][:6]
            elif _file.suffix == ".yaml":
                _read = yaml.safe_load(_text)
            RUNS[_run.name][str(_file.relative_to(_run))] = _read
NAMES = tuple(RUNS)


def _write(place: Path, files: Mapping[str, Any]) -> Path:
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl") and isinstance(content, list):
            text = "\n".join(dumps(row) for row in content)
        else:
            text = content if isinstance(content, str) else dumps(content)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return place


def _run(data: bytes) -> None:
    """A whole run of a tool with some of its files spoilt, against itself and against the sound one."""
    choices = Choices(data)
    files = RUNS[choices.of(NAMES)]
    spoilt = {name: warped(said, choices) if choices.flag() else said for name, said in files.items()}
    with scratch.fresh() as place, in_time(100_000):
        found = loaded(_write(place / "b", spoilt))
        if found is not None:
            sound = loaded(_write(place / "a", files))
            assert sound is not None
            compared(found, found)
            compared(sound, found)


def _file(data: bytes) -> None:
    """One file of any bytes, under each of the names that decide how it is read."""
    choices = Choices(data[:1])
    name = choices.of(("results_2024-01-01T00-00-00.json", "summary/summary_20240101_000000.csv",
                       "reports/model/gsm8k.json", "results/model/gsm8k.json"))  # fmt: skip
    with scratch.fresh() as place, in_time(len(data)):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[1:])
        found = loaded(path)
        if found is not None:
            compared(found, found)


def loaded(path: Path) -> score_files.Scores | None:
    try:
        found = score_files.load(path)
    except score_files.ScoreError as error:
        one_line(str(error))
        return None
    assert found.scores
    for score in found.scores:
        finite(score.value)
        assert not score.share or 0 <= score.value <= 1, score
        assert score.n is None or (type(score.n) is int and score.n > 0), score.n
        assert score.stderr is None or finite(score.stderr, 0.0) is None
        assert all(finite(sample.value) is None for sample in score.samples.values())
        assert all(isinstance(v, str) for v in (*score.settings, *score.settings.values()))
        assert isinstance(score.task, str)
        assert isinstance(score.metric, str)
    return found


def compared(a: score_files.Scores, b: score_files.Scores) -> None:
    try:
        result = scores.compare(a, b)
    except score_files.ScoreError as error:
        one_line(str(error))
        return
    for row in result.rows:
        finite(row.difference)
        for p in (row.p, row.adjusted):
            assert p is None or finite(p, 0.0, 1.0) is None
        if row.interval is not None:
            finite(row.interval[0])
            finite(row.interval[1], row.interval[0])
        assert row.smallest is None or finite(row.smallest, 0.0) is None
        assert a is not b or not row.significant, "a file differs from itself"
    json.dumps(to_json(result), allow_nan=False).encode()
    lines(scores.text(result))
    one_line(result.sentence)
    assert a is not b or replace(result, sentence="").comparable


target = modes(_run, _file)


def seeds() -> list[bytes]:
    found = []
    for index, files in enumerate(RUNS.values()):
        found += [seed(0, bytes([index]) + bytes(range(n, n + 40))) for n in range(0, 160, 20)]
        for name, said in files.items():
            kind = 1 if name.endswith(".csv") else 2 if name.startswith("reports/") else 3 if "results/" in name else 0
            found.append(
                seed(1, bytes([kind]) + (said if isinstance(said, str) else json.dumps(said)).encode()[:20_000])
            )
    return found
