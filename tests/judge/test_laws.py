"""Company and recurrence: who else had it, and whether it comes back on this one alone."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd.judge.laws import ALONE, Company, Moment, Trouble, Who, closest, company, recurrence
from canaryd.model import Cause

DAY = 86_400.0


def at(*days):
    return [Moment(day * DAY, day * DAY) for day in days]


NOW = at(10)[0]
A_MINUTE_BEFORE, TWO_BEFORE = ([Moment(NOW.first - s, NOW.first - s)] for s in (60.0, 121.0))


@pytest.mark.parametrize(
    ("trouble", "who"),
    [
        (Trouble(at(10), {}, ["b"]), Who.ALONE),
        (Trouble(at(10), {}), Who.UNCOMPARED),
        (Trouble(at(10), {"b": A_MINUTE_BEFORE}, ["b"]), Who.TOGETHER),
        (Trouble(at(10), {"b": A_MINUTE_BEFORE}), Who.TOGETHER),
        (Trouble(at(10), {"b": TWO_BEFORE}, ["b"]), Who.OTHERS),
        (Trouble(at(10), {"b": TWO_BEFORE}, ["b", "c"]), Who.ALONE),
        (Trouble(at(10), {"b": TWO_BEFORE, "c": at(1)}, ["b", "c", "d"]), Who.OTHERS),
        (Trouble(at(4, 7, 10), {"b": at(5)}, ["b"]), Who.ALONE),
        (Trouble(at(7, 10), {"b": at(5)}, ["b"]), Who.OTHERS),
        (Trouble(at(5, 7, 10), {"b": at(5), "c": at(5)}, ["b", "c"]), Who.ALONE),
        (Trouble(at(10), {"b": at(8, 9)}, ["b"], [7 * DAY]), Who.CHANGED),
        (Trouble(at(10), {"b": at(6, 9)}, ["b"], [7 * DAY]), Who.OTHERS),
        (Trouble(at(6, 10), {"b": at(9)}, ["b"], [7 * DAY]), Who.OTHERS),
        (Trouble(at(10), {"b": at(9)}, ["b", "c"], [7 * DAY]), Who.ALONE),
        (Trouble(at(10), {}, ["b", "c", "d"], [7 * DAY], 15.9 * DAY), Who.UNCOMPARED),
        (Trouble(at(10), {}, ["b", "c", "d"], [7 * DAY], 16 * DAY), Who.ALONE),
        (Trouble(at(6, 10), {}, ["b", "c", "d"], [7 * DAY], 11 * DAY), Who.ALONE),
        (Trouble(at(10), {}, ["b", "c", "d"], [2 * DAY], 11 * DAY), Who.ALONE),
        (Trouble(at(10), {"b": at(5)}, ["b"], [2 * DAY, 7 * DAY]), Who.OTHERS),
        (Trouble(at(10), {}, ["b", "c", "d"], [2 * DAY, 7 * DAY], 11 * DAY), Who.UNCOMPARED),
        (Trouble([Moment(9 * DAY, 10 * DAY)], {"b": [Moment(9 * DAY, 10 * DAY)]}, ["b"]), Who.TOGETHER),
    ],
)
def test_company(trouble, who):
    """One answer; two that break at different times are each alone while a third is clean."""
    assert company(trouble, trouble.own[-1]).who is who


def test_company_names_those_that_had_it_at_that_time():
    """Not those that had it at another."""
    found = company(Trouble(at(10), {"c": at(10), "b": at(10), "d": at(9)}, ["b"]), NOW)
    assert found == Company(Who.TOGETHER, ["b", "c"])
    assert found.cause is Cause.UNDETERMINED


@given(st.lists(st.floats(0, 99), max_size=4), st.permutations(["b", "c", "d"]))
def test_a_clean_sibling_accuses_nobody_less(days, names):
    """Of three siblings the third is clean: who was alone stays so."""
    trouble = Trouble(at(10), {names[0]: at(*days)}, names[:2])
    more = replace(trouble, siblings=names)
    assert company(more, NOW).who is company(trouble, NOW).who


@pytest.mark.parametrize(
    ("occasions", "remedies", "back", "is_faulty", "cause"),
    [
        ([], [], 0, False, Cause.HARDWARE),
        ([(1, ALONE), (3, ALONE), (5, ALONE)], [2, 4], 2, True, Cause.HARDWARE),
        ([(1, ALONE), (3, ALONE), (5, ALONE)], [2], 1, False, Cause.HARDWARE),
        ([(1, ALONE), (3, ALONE), (5, ALONE)], [], 0, False, Cause.HARDWARE),
        ([(n, Company(Who.UNCOMPARED)) for n in (1, 3, 5)], [2, 4], 2, True, Cause.UNDETERMINED),
        ([(n, Company(Who.TOGETHER, ["b"])) for n in (1, 3, 5)], [2, 4], 0, False, Cause.HARDWARE),
        ([(n, Company(Who.CHANGED)) for n in (1, 3, 5)], [2, 4], 0, False, Cause.HARDWARE),
        ([(n, Company(Who.OTHERS)) for n in (1, 3, 5)], [2, 4], 2, True, Cause.UNDETERMINED),
        ([(1, ALONE), (3, Company(Who.TOGETHER, ["b"])), (5, ALONE), (7, ALONE)], [2, 4, 6], 2, True, Cause.HARDWARE),
    ],
)
def test_recurrence(occasions, remedies, back, is_faulty, cause):
    """Only what came on no other at that time counts, once between two remedies; such an occasion hides no other."""
    found = recurrence(occasions, remedies, 0.0)
    assert (found.back, found.is_faulty, found.company.cause) == (back, is_faulty, cause)


def test_what_is_faulty_came_back_lately():
    """Three times in a life, one of them in the last month; or as often in that month as a fatal class allows."""
    thrice = [(1.0, ALONE), (3.0, ALONE), (5.0, ALONE)]
    assert recurrence(thrice, [2, 4], since=5.0).is_faulty
    assert not recurrence(thrice, [2, 4], since=6.0).is_faulty
    assert recurrence(thrice[1:], [2, 4], since=3.0, few=2).is_faulty
    assert not recurrence(thrice[1:], [2, 4], since=4.0, few=2).is_faulty


def test_what_accuses_most_is_the_closest():
    """Of several occasions one alone is enough."""
    assert closest([Company(Who.TOGETHER, ["b"]), ALONE, Company(Who.OTHERS)]) == ALONE
