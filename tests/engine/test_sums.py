"""Older clean runs are added up: nothing is lost, nothing of two sides of a mismatch meets, and memory is small."""

from __future__ import annotations

import dataclasses

from canaryd.engine.evidence import NEWEST
from canaryd.engine.sums import SLOT
from canaryd.facts import TRIALS, Reading
from canaryd.formatting import DAY
from canaryd.judge.watch import days_of_tests
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
