"""Benchmark scores: the three tools' files are read, the statistics are right, and the sentence says what is known."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import pytest
from canaryd_lab.compare import score_files, score_tests, scores
from canaryd_lab.compare.score_files import Sample, Score, ScoreError, Scores, load
from canaryd_lab.compare.score_tests import holm, mcnemar, sign_flip
from canaryd_lab.compare.scores import compare, text

FILES = Path(__file__).parents[1] / "scores"
PAIRS = 1_000
LIMIT = 0.05 + 3 * math.sqrt(0.05 * 0.95 / PAIRS)
"""5 % and three standard errors of a rate that is found in 1,000 trials."""


def of(name: str) -> Scores:
    return load(FILES / name)


def score(value: float, *, n: int | None = 1000, stderr: float | None = None, task: str = "task", **more) -> Score:
    return Score(task=task, metric="acc", value=value, share=True, n=n, stderr=stderr, **more)


def sampled(values: list[float], **more) -> Score:
    return score(fmean(values), n=len(values), samples={str(i): Sample(v) for i, v in enumerate(values)}, **more)


def file(*many: Score, path: str = "x.json") -> Scores:
    return Scores(path=path, scores=many)


def one(a: Score, b: Score) -> scores.Row:
    (row,) = compare(file(a), file(b)).rows
    return row


# --- Reading ---------------------------------------------------------------------------------------------------------


def test_lm_eval_is_read_with_its_samples():
    """Both filters of a task, a group as the pool of its subtasks, and a metric that is no mean of samples."""
    found = {(s.task, s.metric): s for s in of("lm-eval-a").scores}
    strict = found["gsm8k", "exact_match,strict-match"]
    assert (strict.n, len(strict.samples), strict.share) == (24, 24, True)
    assert strict.stderr == pytest.approx(stdev(s.value for s in strict.samples.values()) / math.sqrt(24))
    assert strict.settings["few-shot"] == "5"
    assert strict.settings["task version"] == "3.0"
    assert strict.settings["limit"] == "24.0"
    assert strict.settings["random seed"] == "0"
    assert strict.settings["model"] == "tiny"
    assert len(found["mmlu", "acc,none"].samples) == 20
    assert found["mmlu", "acc,none"].value == pytest.approx(0.9)
    assert not found["wikitext", "word_perplexity,none"].samples
    assert found["wikitext", "word_perplexity,none"].stderr is None  # "N/A" in the file is absence, not 0


def test_lm_eval_samples_may_be_embedded(tmp_path):
    """They lie beside the results; the dictionary that the library returns holds them itself."""
    results = next((FILES / "lm-eval-a").glob("results_*.json"))
    lonely = shutil.copy(results, tmp_path / results.name)
    assert not load(lonely).scores[0].samples
    beside = load(results)
    assert len(beside.scores[0].samples) == 24
    rows = next((FILES / "lm-eval-a").glob("samples_gsm8k_*.jsonl")).read_text().splitlines()
    data = json.loads(results.read_text()) | {"samples": {"gsm8k": [json.loads(row) for row in rows]}}
    embedded = tmp_path / "whole.json"
    embedded.write_text(json.dumps(data))
    assert load(embedded).scores[0].samples == beside.scores[0].samples


@pytest.mark.parametrize("name", ["evalscope-a", "evalscope-v2"])
def test_evalscope_is_read_in_both_report_schemas(name):
    """The name of a metric is a word in the old schema and an identity in the new one; the directory is one run."""
    found = {s.task: s for s in of(name).scores}
    assert found["gsm8k"].metric == found["arc"].metric == "mean_accuracy" if name.endswith("2") else "mean_acc"
    assert len(found["gsm8k"].samples) == found["gsm8k"].n == 12
    assert (found["arc"].n, len(found["arc"].samples)) == (1172, 0)
    assert found["gsm8k"].settings["few-shot"] == "4"
    assert found["gsm8k"].settings["limit"] == "12"
    assert found["gsm8k"].settings["seed"] == "42"


def test_a_line_separator_inside_a_json_string_does_not_end_the_line():
    """U+2028 is legal in JSON; evalscope writes it as it is."""
    reviews = FILES / "evalscope-a" / "reviews" / "tiny" / "gsm8k_main.jsonl"
    assert "\u2028" in reviews.read_text()
    assert len(of("evalscope-a").scores[-1].samples) == 12


def test_opencompass_is_read_from_the_summary_and_what_lies_beside_it():
    """Percentages become shares; details give samples, predictions give n, a partial run's parts are added."""
    found = {s.task: s for s in of("opencompass-a").scores}
    assert found["demo_gsm8k"].value == pytest.approx(0.625)
    assert len(found["demo_gsm8k"].samples) == 16
    assert len(found["demo_piqa"].samples) == 10
    assert found["demo_race"].n == 50
    assert found["demo_race"].settings["task version"] == "69ee4f"
    assert (found["demo_bleu"].value, found["demo_bleu"].share) == (21.31, False)
    assert "demo_none" not in found


def test_an_opencompass_results_file_is_read_alone():
    """It is recognised by its details."""
    (found,) = load(FILES / "opencompass-a" / "results" / "tiny" / "demo_piqa.json").scores
    assert (found.task, found.n, found.value) == ("demo_piqa", 10, pytest.approx(0.7))


def test_samples_whose_mean_is_another_number_are_not_used():
    """A metric that is not their mean would be tested on the wrong numbers."""
    kept = score_files._with_samples(score(0.5), {"a": Sample(1.0), "b": Sample(1.0)})
    assert not kept.samples
    assert "average 1, not 0.5" in kept.note


ERRORS = {
    "other.json": ('{"accuracy_table": 3}', 'unknown format; wanted lm-eval ("results")'),
    "cut.json": ('{"results": {"gsm8k": {"acc,none": 0.', "invalid JSON at line 1"),
    "empty.json": ('{"results": {}}', "a file of lm-eval without scores"),
    "predictions.json": ('{"0": {"prediction": "A"}}', "opencompass predictions have no scores"),
    "other.csv": ("name,score\nx,1\n", "wanted opencompass's header dataset,version,metric,mode,MODEL"),
    "two.csv": (
        "dataset,version,metric,mode,a,b\nx,1,accuracy,gen,50.0,60.0\n",
        "holds 2 models; give one model's results/MODEL/DATASET.json instead",
    ),
    "ragged.csv": ("dataset,version,metric,mode,a\nx,1\n", "a line has 2 columns, the header has 5"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_bad_file_gives_one_line(tmp_path, name):
    """It names the file and what was looked for."""
    content, wanted = ERRORS[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ScoreError) as caught:
        load(tmp_path / name)
    assert wanted in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened_gives_one_line(tmp_path):
    """A missing file, an empty directory, a directory of two runs, a cut sample file."""
    with pytest.raises(ScoreError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ScoreError, match="no result file; wanted results_"):
        load(tmp_path)
    with pytest.raises(ScoreError, match="holds 3 runs; give one"):
        load(FILES)
    run = Path(shutil.copytree(FILES / "lm-eval-a", tmp_path / "run"))
    samples = next(run.glob("samples_gsm8k_*"))
    samples.write_text(samples.read_text()[:-40])
    with pytest.raises(ScoreError, match="line 48: invalid JSON"):
        load(run)


def test_nothing_in_common_is_an_error():
    """Both files' tasks are named."""
    with pytest.raises(
        ScoreError, match=r"no common task and metric: .*lm-eval-a has gsm8k .*; .*opencompass-a has demo_"
    ):
        compare(of("lm-eval-a"), of("opencompass-a"))


def test_samples_of_other_questions_are_an_error():
    """Equal tasks by name, other data by doc_hash."""
    a = score(0.5, samples={"a": Sample(1.0), "b": Sample(0.0)})
    b = score(0.5, samples={"c": Sample(1.0), "d": Sample(0.0)})
    with pytest.raises(ScoreError, match=r"no question of x\.json is in x\.json"):
        compare(file(a), file(b))


# --- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (5, 0), (6, 0), (3, 9), (9, 3), (7, 7), (20, 41), (900, 1100)])
def test_mcnemar_is_the_binomial_sum(b, c):
    """Written as fractions: every outcome at least as lopsided as the observed one."""
    n = b + c
    extreme = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(b - c))
    assert mcnemar(b, c) == pytest.approx(float(Fraction(extreme, 2**n)), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_few_sign_flips_are_all_counted(seed):
    """Against brute force over every assignment, ties included."""
    draw = random.Random(seed)
    differences = [draw.choice([-0.3, 0.0, 0.1, 0.2, 0.5]) for _ in range(draw.randint(1, 11))]
    observed = abs(math.fsum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    hits = sum(
        abs(math.fsum(s * d for s, d in zip(flip, differences, strict=True))) >= observed - 1e-9 for flip in signs
    )
    assert sign_flip(differences) == pytest.approx(hits / len(signs))


@pytest.mark.parametrize("seed", range(5))
def test_drawn_sign_flips_agree_with_all_of_them(seed, monkeypatch):
    """Within five standard errors of the drawing; and again the same with the same seed."""
    draw = random.Random(seed)
    differences = [draw.gauss(0.2, 1) for _ in range(15)]
    exact = sign_flip(differences)
    monkeypatch.setattr(score_tests, "EXACT_UP_TO", 0)
    drawn = sign_flip(differences)
    assert drawn == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / score_tests.FLIPS) + 1e-4)
    assert sign_flip(differences) == drawn


def test_sign_flips_of_marks_are_mcnemar():
    """Of differences that are 1 and -1 the permutation test is the sign test."""
    assert sign_flip([1.0] * 9 + [-1.0] * 3 + [0.0] * 50) == pytest.approx(mcnemar(9, 3))


def test_holm_is_the_step_down_method():
    """Holm's own arithmetic on four values, monotone and never above 1; the order given is kept."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984), (10_000, 1.960)]
)
def test_students_quantile_is_that_of_the_tables(freedom, quantile):
    """Published to three digits."""
    assert score_tests.t95(freedom) == pytest.approx(quantile, abs=5e-4)


def test_without_scipy_it_is_said_what_to_install(monkeypatch):
    """The file is not blamed, and no command but this one needs SciPy."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ScoreError, match="install it: pip install scipy"):
        one(sampled([1.0, 0.0]), sampled([1.0, 1.0]))


def test_the_z_test_is_the_closed_form():
    """From given standard errors, and from n with one right and one wrong answer added."""
    row = one(score(0.70, stderr=0.012), score(0.74, stderr=0.016))
    assert row.p == pytest.approx(2 * (1 - NormalDist().cdf(0.04 / 0.02)))
    assert row.interval == pytest.approx((0.04 - 1.959964 * 0.02, 0.04 + 1.959964 * 0.02))
    assert row.smallest == pytest.approx((1.959964 + 0.841621) * 0.02)
    assert "given standard errors" in row.test
    row = one(score(1.0, n=50), score(0.9, n=50))
    errors = [math.sqrt(p * (1 - p) / 52) for p in (51 / 52, 46 / 52)]
    assert row.p == pytest.approx(math.erfc(5 / 52 / math.hypot(*errors) / math.sqrt(2)))
    assert "binomial standard errors from n" in row.test


def test_without_a_standard_error_nothing_is_claimed():
    """No n, no samples: no p, no interval, and the reason."""
    row = one(score(0.7, n=None), score(0.5, n=None))
    assert (row.p, row.adjusted, row.interval, row.smallest, row.significant) == (None, None, None, None, False)
    assert row.test == f"not tested: {row.reason}"
    assert row.reason.startswith("no standard error")
    assert row.method is scores.Method.NONE
    assert compare(file(score(0.7, n=None)), file(score(0.5, n=None))).sentence.startswith("Nothing could be tested")


def rate(hits: int) -> float:
    return hits / PAIRS


def test_null_pairs_of_marks_are_seldom_significant():
    """Right and wrong answers of two runs of one model: McNemar is exact, so at most 5 %; intervals cover 95 %."""
    draw = random.Random(1)
    hits = covered = 0
    for _ in range(PAIRS):
        a, b = [], []
        for _ in range(150):
            chance = draw.betavariate(0.6, 0.3)  # easy and hard questions
            a.append(float(draw.random() < chance))
            b.append(float(draw.random() < chance))
        row = one(sampled(a), sampled(b))
        hits += row.significant
        covered += row.interval[0] <= 0 <= row.interval[1]
    assert 0.01 < rate(hits) <= LIMIT
    assert rate(covered) >= 1 - LIMIT


@pytest.mark.slow
def test_null_pairs_of_graded_answers_are_seldom_significant(monkeypatch):
    """Skewed grades between 0 and 1, sign flips drawn."""
    monkeypatch.setattr(score_tests, "sign_flip", lambda d: sign_flip(d, flips=399))
    draw = random.Random(2)
    hits = covered = 0
    for _ in range(PAIRS):
        truth = [draw.betavariate(2, 1) for _ in range(40)]
        row = one(*(sampled([min(1.0, max(0.0, t + draw.gauss(0, 0.2))) for t in truth]) for _ in "ab"))
        hits += row.significant
        covered += row.interval[0] <= 0 <= row.interval[1]
    assert 0.03 < rate(hits) <= LIMIT
    assert rate(covered) >= 1 - LIMIT


def test_null_unpaired_scores_are_seldom_significant():
    """Two samples of questions, standard errors from n, at an ordinary and at an extreme rate."""
    draw = random.Random(3)
    for p in (0.7, 0.98):
        rows = [
            one(*(score(sum(draw.random() < p for _ in range(200)) / 200, n=200) for _ in "ab")) for _ in range(PAIRS)
        ]
        assert rate(sum(row.significant for row in rows)) <= LIMIT


def test_many_tasks_do_not_raise_the_alarm_rate():
    """Holm holds the chance of any false alarm over twelve tasks at 5 %."""
    draw = random.Random(4)
    z = NormalDist(0.6, 0.01)
    names = [f"task{i}" for i in range(12)]
    alarms = 0
    for _ in range(PAIRS):
        a, b = (file(*(score(z.inv_cdf(draw.random()), stderr=0.01, task=t) for t in names)) for _ in "ab")
        alarms += any(row.significant for row in compare(a, b).rows)
    assert 0.03 < rate(alarms) <= LIMIT


@pytest.mark.slow
def test_the_smallest_difference_is_seen_four_times_in_five():
    """What is said to be visible is found with a power near 80 %: paired and unpaired."""
    draw = random.Random(5)
    n, kept = 600, 0
    for _ in range(300):
        a = [float(draw.random() < 0.7) for _ in range(n)]
        noise = [x if draw.random() > 0.2 else float(draw.random() < 0.7) for x in a]
        smallest = one(sampled(a), sampled(noise)).smallest
        lowered = [0.0 if x and draw.random() < smallest / 0.7 else x for x in noise]
        kept += one(sampled(a), sampled(lowered)).significant
    assert 0.7 < kept / 300 < 0.9
    found = 0
    for _ in range(1000):
        seen = one(score(0.6, stderr=0.01), score(0.6, stderr=0.01)).smallest
        a, b = (score(draw.gauss(0.6 + shift, 0.01), stderr=0.01) for shift in (0, seen))
        found += one(a, b).significant
    assert 0.76 < found / 1000 < 0.84


# --- The whole -------------------------------------------------------------------------------------------------------


def test_paired_files_of_the_three_tools_are_compared():
    """Each pair of runs gives its rows, in pairs where there are samples."""
    for name, paired in (("lm-eval", 5), ("evalscope", 1), ("opencompass", 2)):
        result = compare(of(f"{name}-a"), of(f"{name}-b"))
        assert result.comparable, result.differences
        assert sum(row.paired for row in result.rows) == paired
        assert result.sentence.startswith("No significant difference in ")


def test_a_difference_in_settings_is_said_before_the_numbers():
    """Few-shot count and prompts differ in gsm8k."""
    result = compare(of("lm-eval-a"), of("lm-eval-fewshot"))
    assert not result.comparable
    assert next((d.setting, d.a, d.b, d.tasks) for d in result.differences) == ("few-shot", "5", "8", ("gsm8k",))
    assert [d.setting for d in result.differences] == ["few-shot", "prompt"]
    assert result.sentence.startswith("Not comparable, settings differ: few-shot (5 in A, 8 in B)")


@pytest.mark.parametrize("setting", ["few-shot", "model", "task version", "limit", "random seed", "chat template"])
def test_every_setting_that_both_files_tell_is_compared(setting):
    """What only one file tells is not called different."""
    a, b = (score(0.7, settings={setting: value}) for value in ("1", "2"))
    assert [d.setting for d in compare(file(a), file(b)).differences] == [setting]
    assert compare(file(a), file(score(0.7))).comparable


def test_another_number_of_questions_is_a_difference():
    """One run was limited."""
    (difference,) = compare(file(score(0.7, n=100)), file(score(0.7, n=1319))).differences
    assert (difference.setting, difference.a, difference.b) == ("number of questions", "100", "1319")


def test_no_difference_is_told_with_what_could_not_be_seen():
    """The sentence of the issue, at the numbers of GSM8K."""
    a, b = (score(0.61, n=1319, task="gsm8k") for _ in "ab")
    wanted = "No significant difference; with 1,319 questions differences below 5.3 points cannot be seen."
    assert compare(file(a), file(b)).sentence == wanted


def test_a_significant_difference_is_told_with_direction_and_size():
    """The worst comes first; a task without a test is counted."""
    a = file(score(0.80, task="gsm8k"), score(0.6, task="arc"), score(0.5, n=None, task="other"))
    b = file(score(0.70, task="gsm8k"), score(0.6, task="arc"), score(0.5, n=None, task="other"))
    said = compare(a, b).sentence
    assert said.startswith(
        "Significant difference in 1 of 2 scores: gsm8k (acc) by 10.0 points (B is lower, adjusted p "
    )
    assert said.endswith("1 of 3 scores could not be tested.")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_comparison_shows_every_score(width):
    """With both values and their difference; no line is longer than the terminal."""
    result = compare(of("lm-eval-a"), of("lm-eval-b"))
    lines = text(result, width).split("\n")
    assert max(len(line) for line in lines if not line.startswith(("A: ", "B: "))) <= width
    shown = " ".join(" ".join(lines).split())
    assert shown.startswith(result.sentence)
    for row in result.rows:
        scale, digits = (100, ".2f") if row.share else (1, ".4g")
        numbers = f"A {scale * row.a:{digits}}, B {scale * row.b:{digits}}, B - A {scale * row.difference:+.2f}"
        assert f"{row.task} {row.metric} {numbers}" in shown


def test_the_comparison_names_every_method():
    """Each test that was made, and nothing invented for what was not tested."""
    result = compare(of("lm-eval-a"), of("lm-eval-b"))
    shown = text(result, 120)
    assert shown.count(", paired") == sum(row.paired for row in result.rows)
    assert "Test: McNemar's exact test; interval: Bonett and Price's adjusted Wald." in shown
    assert "Test: not tested: no standard error" in shown
    assert "nan" not in shown.lower()


def test_every_test_is_typed():
    """Nothing has to read the sentence to know which test was made."""
    assert one(sampled([1.0, 0.0]), sampled([1.0, 1.0])).method is scores.Method.MCNEMAR
    assert one(sampled([0.5, 0.0]), sampled([1.0, 0.4])).method is scores.Method.SIGN_FLIP
    assert one(score(0.7), score(0.6)).method is scores.Method.Z


def test_swapping_the_files_swaps_the_signs():
    """A against B is B against A, negated."""
    there, back = compare(of("evalscope-a"), of("evalscope-b")), compare(of("evalscope-b"), of("evalscope-a"))
    for x, y in zip(there.rows, back.rows, strict=True):
        assert (x.p, x.smallest) == pytest.approx((y.p, y.smallest))
        assert x.difference == pytest.approx(-y.difference)
        assert x.interval == pytest.approx((-y.interval[1], -y.interval[0]))
