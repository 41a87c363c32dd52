"""A clock that jumps costs neither history nor baselines, with a real engine."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import EVERY, LEARN
from canaryd.model import Event, State
from canaryd.report import status
from canaryd.store.store import DRILL_EXPIRY, Store
from tests.store.hosts import DAY, GPU, HOUR, NOW, YEAR, run

AHEAD, BACK, UNSET = NOW + YEAR, NOW - YEAR, 5000.0
"""A year ahead, a year back, and a clock that nobody has set."""
WRONG = pytest.mark.parametrize("wrong", [AHEAD, BACK, UNSET], ids=["a year ahead", "a year back", "1970"])


def history(store):
    """Return all that may not be forgotten because of a clock."""
    return {
        "runs": {r.id for r in store.runs()},
        "failures": {r.id for r in store.runs(failed=True)},
        "polls": {p.id for p in store.polls(GPU.uuid)},
        "baselines": {b.key for b in store.baselines()},
        "events": {(e.kind, e.name) for e in store.events()},
        "acks": {a.reason for a in store.acks()},
        "verdicts": {(v.state, v.cause) for v in store.verdict_history(GPU.uuid)},
    }


@WRONG
def test_a_clock_that_was_wrong_for_an_hour_forgets_nothing(host, wrong):
    """Pruned at the jump, as the daemon does, and hourly after it: all that lay before is there afterwards."""
    host.add(wrong=True)
    host.engine.watch.history.record(
        [Event(device=GPU.uuid, kind="xid", name="31", code=31, first=host.now, last=host.now)]
    )
    host.store.add_poll(run(9999, host.now, probe="nvidia_telemetry"), {})
    host.say("acknowledged", "known", host.now + DAY)
    host.engine.decide()
    before, right = history(host.store), host.now
    host.now = wrong
    host.store.prune(host.now)
    host.live(HOUR)
    host.store.prune(host.now)
    host.now = right + HOUR
    host.store.prune(host.now)
    host.restart()
    after = history(host.store)
    assert {what: names - after[what] for what, names in before.items()} == {what: set() for what in before}


@WRONG
def test_an_event_of_a_wrong_time_is_there_when_the_time_is_right(host, wrong):
    """An Xid that was heard then accuses now, after pruning and a restart too."""
    right, host.now = host.now, wrong
    host.engine.watch.history.record(
        [Event(device=GPU.uuid, kind="xid", name="48", code=48, first=host.now, last=host.now)]
    )
    assert "uncorrected-error" in host.rules
    host.now = right + HOUR
    host.add()
    host.store.prune(host.now)
    host.restart()
    assert [e.name for e in host.engine.watch.history.of(GPU)] == ["48"]
    assert "uncorrected-error" in host.rules


def test_runs_are_dated_rightly_once_the_clock_was_set_right(host):
    """By when they were stored: else the daemon reads a year of runs at every look, and no day has any to sum up."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    host.now = right
    host.live(6 * HOUR)
    recent = host.store.runs(since=host.now - HOUR)
    assert {r.started for r in recent if r.started < AHEAD} == {host.now - HOUR, host.now - HOUR / 2, host.now}


@WRONG
def test_learning_goes_on_through_a_jump(host, wrong):
    """Every recording counts once, whatever the clock said, and the baseline of before is the one that is compared."""
    right, (before,) = host.now, host.store.baselines()
    host.now = wrong
    host.live(2 * HOUR)
    other = (Recording(case="d", digest="3" * 16, values=(0.5,)),)
    host.live(5 * HOUR, recordings=other)
    host.now = right
    host.live(10 * HOUR, recordings=other)
    host.restart()
    first, second = sorted(host.store.baselines(), key=lambda b: b.case)
    assert first.passed[EVERY] == before.passed[EVERY] + 4
    assert second.learnt[EVERY] == LEARN
    strange = host.add(recordings=(Recording(case="d", digest="4" * 16, values=(0.75,)),))
    assert strange.unknown == ("d",)
    assert host.verdict.state is State.UNKNOWN


@WRONG
def test_a_mismatch_of_a_wrong_time_stands_when_the_time_is_right(host, wrong):
    """It is seen at once, and neither the right time nor a restart clears it before it was watched for 30 days."""
    right, host.now = host.now, wrong
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT
    host.live(HOUR)
    assert host.verdict.state is State.SUSPECT
    host.now = right
    assert host.verdict.state is State.SUSPECT
    host.live(DAY)
    host.restart()
    assert host.verdict.state is State.SUSPECT


@pytest.mark.parametrize("wrong", [BACK, UNSET])
def test_a_repair_does_not_hide_a_mismatch_of_a_clock_set_back(host, wrong):
    """The repair lies before it in truth, whatever the clock says."""
    host.say("repaired", "a new board")
    host.live(HOUR)
    host.now = wrong
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT


def test_a_suspect_does_not_clear_because_the_clock_ran_ahead(host):
    """Clean trials enough for any record, and an hour of a clock that is a year ahead: that is no watch of 30 days."""
    host.add(wrong=True)
    host.live(12 * HOUR, trials=1000)
    assert host.verdict.state is State.SUSPECT
    host.now += YEAR
    host.live(HOUR, trials=1000)
    assert host.verdict.state is State.SUSPECT


def test_unknown_bits_are_not_over_because_the_clock_ran_ahead(host):
    """A departure that re-runs have confirmed stands through a jump."""
    strange = (Recording(case="c", digest="2" * 16, values=(0.75,)),)
    first = host.add(recordings=strange)
    for _ in range(3):
        host.now += 60
        host.add(recordings=strange, confirms=first.id, cases=("c",))
    assert "recording-departed" in host.rules
    host.live(3 * DAY)
    assert "recording-departed" in host.rules
    host.now += YEAR
    host.live(HOUR)
    assert "recording-departed" in host.rules


def test_fresh_evidence_is_fresh_after_the_clock_was_set_back_and_goes_stale_in_time(host):
    """Runs dated in the future neither make what comes after them stale nor keep it from ever being so."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    host.now = right
    host.live(HOUR)
    assert host.verdict.state is State.HEALTHY
    assert host.rules >= {"clock-set-back"}
    host.now += DAY
    verdict = host.verdict
    assert verdict.state is State.UNKNOWN
    assert "stale-evidence" in {f.rule for f in verdict.findings}


def test_a_verdict_from_the_future_is_not_tended_for_a_year(host):
    """The daemon ends while the clock is ahead: with the right time nobody vouches for its last verdict."""
    right, host.now = host.now, AHEAD
    host.live(HOUR)
    assert host.verdict.state is State.HEALTHY
    host.now = right
    (shown,) = status.gather(host.store, host.engine.config, host.now + DAY).devices
    assert shown.verdict.state is State.UNKNOWN
    assert {f.rule for f in shown.verdict.findings} == {"no-evidence"}


@pytest.mark.parametrize("judged", [False, True])
def test_an_acknowledgement_from_the_future_hides_no_new_mismatch(host, judged):
    """Given while the clock ran a year ahead, it would cover whatever comes until then, judged by meanwhile or not."""
    right, host.now = host.now, AHEAD
    word = host.say("acknowledged", "known", host.now + 7 * DAY)
    host.now += 1
    repaired = host.say("repaired", "a new board")
    if judged:
        assert host.verdict.state is State.UNKNOWN, "nothing was seen since the repair"
    host.now = right + HOUR
    host.add(wrong=True)
    assert host.verdict.state is State.SUSPECT
    assert [dataclasses.replace(ack, void=False) for ack in host.store.acks()] == [word, repaired]


@WRONG
def test_an_acknowledgement_stands_again_when_the_time_is_right(host, wrong):
    """What an operator knows is known again after a jump, and a suspect is never healthy meanwhile."""
    host.add(wrong=True)
    host.say("acknowledged", "known", host.now + 7 * DAY)
    assert host.verdict.state is State.UNKNOWN
    right, host.now = host.now, wrong
    assert host.verdict.state in (State.SUSPECT, State.UNKNOWN)
    host.now = right + HOUR
    assert host.verdict.state is State.UNKNOWN
    assert "acknowledged" in host.rules


@WRONG
def test_a_drill_of_a_wrong_time_is_no_result_of_the_next(host, wrong):
    """Its runs touch no verdict, and an hour after the clock was set right no later drill is judged by them."""
    right, host.now = host.now, wrong
    host.add(wrong=True, drill="flip", recordings=())
    assert host.engine.decisions.rehearse(host.store.drilled(host.now))[GPU.uuid].state is State.SUSPECT
    host.now = right + 2 * DRILL_EXPIRY
    host.add()
    assert host.verdict.state is State.HEALTHY
    assert host.store.drilled(host.now) == {}
    host.restart()
    assert host.store.drilled(host.now) == {}


def test_what_came_before_a_clock_was_set_right_hides_nothing_that_comes_then(host):
    """What is dated in the future keeps nothing healthy; what is found then does, and grows old."""
    host.now += 300 * DAY
    host.live(2 * DAY)
    host.now -= 300 * DAY
    assert host.verdict.state is State.UNKNOWN
    host.live(HOUR)
    assert host.verdict.state is State.HEALTHY
    host.restart()
    assert host.verdict.state is State.HEALTHY
    host.now += 3 * HOUR
    assert host.verdict.state is State.UNKNOWN


def test_a_mismatch_of_a_clock_set_back_is_undated(host):
    """It says what the clock showed, and is no second one beside that of a month ago."""
    for _ in range(40 * 24):
        host.now += HOUR
        host.store.prune(host.now)
    right, host.now = host.now, host.now - 39 * DAY
    found = host.add(wrong=True)
    assert (found.started, found.clock) == (right, right - 39 * DAY)
    assert host.add().clock is None


def test_a_clock_set_back_hides_no_run(tmp_path):
    """Runs keep the order in which they came, and `since` finds those made while the clock was wrong."""
    now = [NOW]
    with Store.open(tmp_path, now=lambda: now[0]) as store:
        store.add_run(run(1, NOW))
        now[0] = NOW - 10 * YEAR
        store.prune(now[0])
        store.add_run(run(2, now[0], wrong=True))
    with Store.open(tmp_path, now=lambda: now[0]) as store:
        store.add_run(run(3, now[0], wrong=True))
        now[0] = NOW + DAY
        store.add_run(run(4, now[0]))
        numbers = [r.id for r in store.runs()]
        assert numbers == [f"run-{n:05d}" for n in (1, 2, 3, 4)]
        assert [r.id for r in store.runs(since=NOW - 1)] == numbers
        assert [r.id for r in store.runs(since=NOW + 1)] == numbers[3:]
        store.prune(NOW + 2 * DAY)
        assert [r.id for r in store.runs()] == numbers


def test_a_clock_that_was_set_back_is_believed_after_a_day(tmp_path):
    """Until then a wrong result has the time of storing."""
    now = [NOW]
    with Store.open(tmp_path, now=lambda: now[0]) as store:

        def live(hours):
            for _ in range(hours):
                now[0] += HOUR
                store.prune(now[0])

        live(48)
        before = store.passed
        assert before == now[0]
        now[0] -= 40 * DAY
        live(23)
        assert store.passed == before
        live(3)
        assert store.passed == pytest.approx(now[0], abs=HOUR)
