"""The stories of tests/stories need every rule of the judge, and tell chance and mistakes as they are."""

from __future__ import annotations

import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from canaryd.judge import case, cause, characterised, node, verdict
from canaryd.judge.recordings import rules
from tests.command import ROOT
from tests.story.chances import chances, detected, rounds_until, too_rare
from tests.story.format import STORIES, Expectation, Story, load
from tests.story.playing import play, summary

FILES = sorted(STORIES.glob("*.yaml"))
TOLD_BY = {
    "vanished": "vanishes-and-returns",
    "devices_missing": "vanishes-and-returns",
    "devices_unlisted": "library-broken",
    "unreached": "torch-cannot-see",
    "telemetry": "xid-79",
    "confirmed": "lone-device",
    "exact_mismatch": "daemon-restarts",
    "golden_disagreement": "core-makes-goldens",
    "comparator_disagreement": "comparator",
    "host_in_doubt": "bad-host-ram",
    "golden_in_doubt": "dead-reference",
    "recordings": "drift",
    "slower": "slower-than-before",
    "endpoint_departed": "endpoint-departs",
    "uncharacterised_mismatch": "new-model-alone-wrong",
    "not_completed": "probe-times-out",
    "device_error": "uncorrectable-on-one",
    "vendor_selftest": "vendors-tool-fails",
    "keeps_failing": "hangs-now-and-then",
    "keeps_vanishing": "vanishes-again-and-again",
    "no_fresh_evidence": "never-completed",
    "checked_nothing": "nothing-checked",
    "clock_set_back": "clock-jump",
    "history_lost": "history-lost",
    "record_unread": "record-unread",
    "acknowledged": "acknowledged-suspect",
    "confirmed_by_reruns": "confirmed-by-reruns",
    "confirmed_within_a_day": "twice-in-a-day",
    "confirmed_within_a_week": "thrice-in-a-week",
    "confirmed_in_place": "same-place",
    "departed": "drift",
    "unlike": "bad-at-baselining",
    "changed": "blas-change-on-one",
    "learning": "only-recordings",
    "broken_output": "endpoint-garbage",
}
"""Rule or ground → a story that cannot end rightly without it."""
BLAMED = (
    *("bad-host-ram", "one-core-one-set", "stuck-bit", "whole-model", "stuck-cell", "one-sm", "race-after-upgrade"),
    *("lone-gpu-new-driver", "lone-device"),
)
"""For each row of the decision table, in its order, a story that ends by that row."""
TABLES = ((verdict, "RULES"), (case, "GROUNDS"), (rules, "RULES"))
RULES = [(module, table, rule) for module, table in TABLES for rule in getattr(module, table)]


def named(name: str) -> Story:
    return load(STORIES / f"{name}.yaml")


def test_every_rule_and_row_has_its_story():
    """`.ci/full` shows of each that its story cannot do without it."""
    assert {*TOLD_BY} == {rule.__name__ for _, _, rule in RULES}
    assert len(BLAMED) == len(cause.TABLE), "a row was added or removed: name its story in BLAMED"


@pytest.mark.slow
@pytest.mark.parametrize(("module", "table", "rule"), RULES, ids=lambda value: getattr(value, "__name__", value))
def test_without_a_rule_a_story_fails(monkeypatch, module, table, rule):
    """The experiment of a missing part: the judge without this one rule, everything else as it is.

    Nothing is replaced by what behaves otherwise, so this is no mock: it shows that the stories need the rule.
    """
    monkeypatch.setattr(module, table, tuple(each for each in getattr(module, table) if each is not rule))
    assert play(named(TOLD_BY[rule.__name__]), until_failed=True).failures(), f"no one misses {rule.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("new-model-one-wrong", "new-model-one-breaks", "new-model-alone-breaks", "witness-from-another-host"),
        "exact-endpoint-turns-wrong",
    ],
)
def test_without_what_was_met_a_story_fails(monkeypatch, name):
    """The same experiment with the records of classes that devices met: then nobody vouches for the goldens."""
    monkeypatch.setattr(characterised.Claims, "proof", lambda *_: None)
    monkeypatch.setattr(characterised.Claims, "met_since", lambda *_: math.inf)
    assert play(named(name), until_failed=True).failures(), "no one misses what was met"


@pytest.mark.slow
def test_without_contradictions_a_story_fails(monkeypatch):
    """The same experiment with what a device says against itself."""
    monkeypatch.setattr(node, "contradictions", lambda _: frozenset())
    assert play(named("new-model-now-and-then"), until_failed=True).failures(), "no one misses the contradictions"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(cause.TABLE) - 1))
def test_without_a_row_of_the_decision_table_a_story_fails(monkeypatch, number):
    """The same experiment with whose fault it is."""
    monkeypatch.setattr(cause, "TABLE", tuple(row for n, row in enumerate(cause.TABLE) if n != number))
    assert play(named(BLAMED[number]), until_failed=True).failures(), "no one misses this row"


def test_without_its_last_row_the_decision_table_has_no_answer(monkeypatch):
    """Then a lone device's mismatch is nobody's: the judge stops."""
    monkeypatch.setattr(cause, "TABLE", cause.TABLE[:-1])
    with pytest.raises(RuntimeError, match="StopIteration"):
        play(named(BLAMED[-1]))


def test_a_story_that_expects_nothing_is_refused(tmp_path):
    """It could not fail."""
    told = yaml.safe_load(FILES[0].read_text()) | {"expect": []}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(told))
    with pytest.raises(ValueError, match="expect: holds nothing"):
        load(tmp_path / "x.yaml")
    assert subprocess.run([ROOT / "scripts/story"], capture_output=True, check=False).returncode == 64


@pytest.mark.parametrize("path", [p for p in FILES if load(p).statistics], ids=lambda path: path.stem)
def test_a_fault_shows_after_as_many_rounds_as_its_rate_predicts(path):
    """Over several seeds: half of them by the median, and all but a few by the stated quantile, neither more nor less.

    The bounds are those of a two-sided binomial test at one in a thousand.
    """
    told = load(path)
    statistics = told.statistics
    assert statistics is not None
    each = chances(told)
    found = [detected(told, seed) for seed in range(1, statistics.seeds + 1)]
    for quantile in (0.5, statistics.probability):
        rounds = rounds_until(each, quantile)
        assert rounds is not None, "the story is too short for its own quantile"
        chance = 1 - _product(1 - c for c in each[:rounds])
        within = sum(f is not None and f <= rounds for f in found)
        assert not too_rare(within, statistics.seeds, chance), (quantile, rounds, chance, found)


def _product(values):
    product = 1.0
    for value in values:
        product *= value
    return product


def test_the_predicted_wait_is_that_of_the_geometric_distribution():
    """Which is ln(1 - 0.99) / ln(1 - p) for a chance that is the same in every round."""
    assert rounds_until([0.1] * 100, 0.99) == 44  # ln 0.01 / ln 0.9 = 43.7
    assert rounds_until([0.1] * 10, 0.99) is None


def test_the_binomial_test_crosses_from_both_sides():
    """20 seeds at 99 %: 18 of them are within one in a thousand, 16 are not; at 50 %, 4 and 2."""
    assert not too_rare(18, 20, 0.99)
    assert too_rare(16, 20, 0.99)
    assert not too_rare(4, 20, 0.5)
    assert too_rare(2, 20, 0.5)


def test_the_same_seed_tells_the_same_story():
    """Chance, clock and ids come from the seed: what failed once can be looked at again."""
    first, again = (play(named("core-makes-goldens")).verdicts for _ in range(2))
    assert {n: [summary(v) for v in vs] for n, vs in first.items()} == {
        n: [summary(v) for v in vs] for n, vs in again.items()
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("faults: [{kind: exakt}]", "exakt"),
        ("faults: [{kind: exact, device: gpu9}]", "gpu9"),
        ("faults: [{kind: exact, probabilty: 1.0}]", "probabilty"),
        ("events: [{at: 1, do: upgrade}]", "upgrade"),
        ("events: [{at: 99, do: reboot}]", "99"),
        ("noise: [{case: gemm}]", "gemm"),
    ],
)
def test_a_mistake_in_a_story_is_named(tmp_path: Path, change, complaint):
    """A misspelt fault would never happen, and its story would pass for the wrong reason."""
    text = (STORIES / "drill.yaml").read_text().partition("events:")[0]
    path = tmp_path / "bad.yaml"
    path.write_text(f"{text}{change}\nexpect: [{{device: gpu0, state: healthy}}]\n")
    with pytest.raises(ValueError, match=complaint):
        load(path)


@pytest.mark.parametrize(
    "expected",
    [
        {"state": "faulty"},
        {"cause": "hardware"},
        {"rules": ("exact-mismatch",)},
        {"says": "wrong"},
        {"state": "suspect", "by": 3},
        {"always_below": "healthy"},
    ],
)
def test_an_expectation_can_fail(expected):
    """Each kind of expectation, held against a device to which nothing happens."""
    told = named("drill")
    wrong = Expectation(device="gpu1", **expected)
    played = play(replace(told, expect=(wrong,), rounds=9))
    assert played.failures()


@pytest.mark.parametrize("expected", [{"never": "hardware"}, {"never_rule": "exact-mismatch"}])
def test_a_ban_can_be_broken(expected):
    """What must never be said, held against a device of which it is said."""
    told = named("confirmed-by-reruns")
    assert play(replace(told, expect=(Expectation(device="gpu0", **expected),))).failures()
