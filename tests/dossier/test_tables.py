"""Counts, intervals and numbers of the dossier."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from canaryd.config.settings import Config
from canaryd.dossier import failures
from canaryd.dossier.gather import gather, ranges
from canaryd.judge import statistics
from canaryd.store.store import Store
from tests.dossier.made import GPU, NOW, UUID, run, written


@pytest.mark.parametrize(
    ("wrong", "total", "low", "high"),
    [
        # Clopper-Pearson at 95 %: closed forms for none and all, and two values of C. J. Clopper and E. S. Pearson's
        # definition by the F distribution.
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (1, 10, 0.0025286, 0.4450161),
        (5, 10, 0.1870860, 0.8129140),
        (2, 1000, 0.0002423, 0.0072058),
    ],
)
def test_the_interval_is_that_of_clopper_and_pearson(wrong, total, low, high):
    """Against closed forms and tabled values."""
    assert statistics.interval(wrong, total) == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize(("wrong", "total"), [(1, 4), (3, 7), (30, 1000), (999, 1000), (7, 10**6)])
def test_the_interval_leaves_two_and_a_half_percent_on_either_side(wrong, total):
    """By its definition, with the binomial summed term by term."""
    low, high = statistics.interval(wrong, total)

    def at_most(k: int, p: float) -> float:
        return math.fsum(math.comb(total, i) * p**i * (1 - p) ** (total - i) for i in range(k + 1))

    if wrong < 100:
        assert at_most(wrong, high) == pytest.approx(0.025, rel=1e-6)
        assert 1 - at_most(wrong - 1, low) == pytest.approx(0.025, rel=1e-6)
    mirrored = statistics.interval(total - wrong, total)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_three_results_of_one_upload_are_one_trial(tmp_path):
    """One upload was hit: 3 of 3 results, and the interval is that of 1 of 4 uploads, everywhere."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        one.add_run(run(1, wrong=3, trials=3))
        made, document, page = written(one, tmp_path)
    (failure,) = document["failures"]
    low, high = statistics.interval(1, 4)  # three fresh uploads were clean
    for counted in (failure, failure["places"][0], document["places"][0], document["probes"][0]):
        assert counted["results"] == {"wrong": 3, "total": 3}
        assert counted["uploads"] == {"wrong": 1, "total": 4, "low": low, "high": high}
    assert document["summary"].endswith(" 1 case failed (see below).")
    assert "29.2 % to 100 %" not in page  # that of 3 of 3
    assert "0.631 % to 80.6 %" in page
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    told = [
        m["metadata"]
        for line in lines
        if (m := line.get("testStepArtifact", {}).get("measurement", {})).get("metadata")
    ]
    assert [(m["results"], m["uploads"], m["wrongUploads"], m["uploadRateHigh"]) for m in told] == [(3, 4, 1, high)]


def test_uploads_that_a_comparison_stands_for_are_counted(tmp_path):
    """A clean comparison may sum up many."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        clean = run(2, device=UUID)
        one.add_run(run(1, wrong=1))
        one.add_run(replace(clean, comparisons=(replace(clean.comparisons[0], uploads=46),)))
        (failure,) = gather(one, Config(), GPU, now=NOW)["failures"]
    assert (failure["uploads"]["wrong"], failure["uploads"]["total"]) == (1, 50)


def test_no_trial_has_no_interval():
    """Nothing is known of what was not tried."""
    assert failures.rate(0, 0) == {"wrong": 0, "total": 0, "low": None, "high": None}


@pytest.mark.torch
def test_bits_are_named_as_the_worker_names_them():
    """The daemon must not import the worker, so it has a copy of the formats."""
    torch = pytest.importorskip("torch", reason="torch is not installed in this interpreter")
    from canaryd.worker.numeric.evidence import bit_name

    for form in failures.MANTISSA:
        for bit in range(failures.WIDTH[form]):
            assert bit_name(getattr(torch, form), bit) == f"bit {bit} ({failures.bit_name(form, bit)})"


def test_numbers_in_few_words():
    """Stretches of three and more are one word."""
    assert ranges([0, 1, 2, 3, 7, 8, 11]) == "0 to 3, 7, 8, 11"
    assert ranges([]) == ""
