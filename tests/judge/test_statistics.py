"""The formulas of chance, against enumeration and approximation."""

import itertools
import math

import pytest

from canaryd.judge.statistics import outlasts, rate_bound, tail


def test_the_tail_of_the_binomial():
    """Against enumeration."""
    rate = 0.1
    outcomes = list(itertools.product((0, 1), repeat=8))
    for times in range(9):
        exact = sum(rate ** sum(o) * (1 - rate) ** (8 - sum(o)) for o in outcomes if sum(o) >= times)
        assert tail(times, 8, rate) == pytest.approx(exact)


def test_the_tail_holds_for_thousands_of_runs():
    """Against the normal approximation, where enumeration is out of reach."""
    assert tail(1008, 2016, 0.5) == pytest.approx(0.509, abs=0.002)
    assert tail(2016, 2016, 0.01) == 0.0


@pytest.mark.parametrize("trials", [1, 10, 1000, 10**6])
def test_the_bound_is_the_rate_that_stays_clean_once_in_twenty(trials):
    """Its own definition, and the rule of three for many trials."""
    assert (1 - rate_bound(trials)) ** trials == pytest.approx(0.05)
    if trials >= 1000:
        assert rate_bound(trials) == pytest.approx(3 / trials, rel=0.01)


@pytest.mark.parametrize(("clean", "enough"), [(299, False), (300, True)])
def test_three_times_the_trials_per_failure(clean, enough):
    """One failure in a hundred: a record counts from three hundred, and is then wrong with less than 5 %."""
    assert outlasts(clean, 100, 1) is enough
    assert math.isclose((1 - 1 / 100) ** 300, 0.05, rel_tol=0.03)
