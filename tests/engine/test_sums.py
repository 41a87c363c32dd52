"""Older clean runs are added up: nothing is lost, nothing of two sides of a mismatch meets, and memory is small."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.engine.evidence import NEWEST
from canaryd.engine.sums import SLOT, add_up, can_sum
from canaryd.facts import TRIALS, Reading, Recording
from canaryd.formatting import DAY
from canaryd.judge.brief import SHOWN
from canaryd.judge.watch import days_of_tests
from canaryd.model import Outcome
from tests.engine.test_engine import NOW, made, settings, start, the_cpu

START = NOW - NOW % SLOT


def results(runs):
    """Return how many clean results there were in each slot."""
    found = {}
    for run in runs:
        if not run.wrong:
            slot = run.started // SLOT
            found[slot] = found.get(slot, 0) + run.trials
    return found


def test_live_and_read_back_are_alike(tmp_path):
    """A device with mismatches in the middle of slots: 400 runs in 100 hours, live and after a restart."""
    config = settings(tmp_path, "passes")
    engine = start(config)
    device = the_cpu(engine).uuid
    runs = [
        dataclasses.replace(
            made(number, "passes", wrong=number in (130, 210), stack={"torch": "1" if number < 300 else "2"}),
            device=device,
            started=START + 900.0 * number,
        )
        for number in range(400)
    ]
    for run in runs:
        engine.store.add_run(run)
        engine.take(run)
    live = engine.evidence(device)
    engine.store.close()
    again = start(config)
    read = again.evidence(device)
    for found in (live, read):
        assert results(found) == results(runs)
        assert len(found) < NEWEST + 25
        first, newest = (run for run in found if run.wrong)
        between = sum(run.trials for run in found if first.started < run.started < newest.started)
        after = sum(run.trials for run in found if run.started > newest.started)
        assert (between, after) == (79, 189), "what was clean before and after a mismatch is told apart"
        assert [r.id for r in found] == sorted(r.id for r in found)
    assert {(r.id, r.started, r.trials, r.stack_id) for r in live} == {
        (r.id, r.started, r.trials, r.stack_id) for r in read
    }
    again.store.close()


def test_runs_that_checked_nothing_are_no_tests(tmp_path):
    """Three days of them are added up as what they are, live and after a restart: a watch counts days of tests."""
    config = settings(tmp_path, "passes")
    engine = start(config)
    device = the_cpu(engine).uuid
    for number in range(400):
        idle = 0 < number < 300
        run = made(number, "passes", wrong=number == 0, device=device, at=START + 899.0 * number)
        readings = (Reading(name="switches", value="none"), Reading(name=TRIALS, value=0 if idle else run.trials))
        run = dataclasses.replace(run, readings=readings, comparisons=() if idle else run.comparisons)
        engine.store.add_run(run)
        engine.take(run)
    live = engine.evidence(device)
    engine.store.close()
    again = start(config)
    days = {int((START + 900.0 * number) // DAY) for number in (0, *range(300, 400))}
    assert days_of_tests(live) == days_of_tests(again.evidence(device)) == {"passes": days}
    again.store.close()


def test_failures_are_read_back_as_they_were_in_memory(tmp_path):
    """Of the newest all comparisons, of older ones what was wrong: a restart changes no verdict."""
    config = settings(tmp_path, "passes")
    engine = start(config)
    device = the_cpu(engine).uuid
    recordings = tuple(Recording(case=f"case {n}", digest="0" * 16) for n in range(3))
    for number in range(60):
        run = made(number, "passes", wrong=number % 2 == 0, device=device, recordings=recordings)
        others = tuple(
            dataclasses.replace(run.comparisons[0], case=f"other {n}", wrong_trials=0, evidence=None) for n in range(4)
        )
        run = dataclasses.replace(run, comparisons=(*run.comparisons, *others))
        engine.store.add_run(run)
        engine.take(run)
    live = engine.evidence(device)
    engine.store.close()
    again = start(config)
    assert again.evidence(device) == live
    assert [len(r.comparisons) for r in live if r.wrong] == [2] * (30 - SHOWN) + [5] * SHOWN
    again.store.close()


def test_a_mismatch_that_comes_later_finds_the_record_in_parts(tmp_path):
    """A clean device keeps its newest runs only; with the first mismatch its whole record counts."""
    engine = start(settings(tmp_path, "passes"))
    device = the_cpu(engine).uuid
    for number in range(300):
        run = dataclasses.replace(made(number, "passes", wrong=number == 299), device=device)
        engine.store.add_run(run)
        engine.take(run)
    found = engine.evidence(device)
    assert sum(r.trials for r in found) == 300
    assert len(found) <= NEWEST + 3
    engine.store.close()


def test_after_a_clock_was_set_back_the_newest_runs_stay(tmp_path):
    """Ids are made of the clock: those of the newest runs are smaller then, and order by them would drop the newest."""
    engine = start(settings(tmp_path, "passes"))
    device = the_cpu(engine).uuid
    numbers = [*range(1000, 1000 + 2 * NEWEST), *range(10)]
    for number in numbers:
        engine.take(dataclasses.replace(made(number, "passes"), device=device))
    assert [run.id for run in engine.evidence(device)][-10:] == [made(n, "passes").id for n in range(10)]
    engine.store.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"cases": ("a",)},
        {"confirms": "x"},
        {"intensity": "steady"},
        {"outcome": Outcome.TIMED_OUT},
        {"unknown": ("a",)},
        {"drill": "exact"},
        {"wrong": True},
    ],
)
def test_what_the_judge_looks_into_stays_whole(changes):
    """A part of a probe, other intensity, what did not complete, and whatever was wrong."""
    assert can_sum(made(1))
    assert not can_sum(made(1, **changes))


def test_other_software_is_never_added():
    """Nor another version of the probe or another instruction set."""
    runs = [
        made(1, at=START),
        made(2, at=START, stack={"torch": "2"}),
        made(3, at=START, probe_version=2),
        made(4, at=START, instruction_set="avx2"),
        made(5, at=START),
    ]
    found = add_up(runs, {})
    assert sorted(run.trials for run in found) == [1, 1, 1, 2]
    assert add_up(runs, {"p": [START + 3]})[0].trials == 1
