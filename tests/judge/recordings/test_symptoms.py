"""Slow endpoints and broken output."""

import dataclasses

import pytest

from canaryd.facts import Reading
from canaryd.judge.recordings.baseline import LEARN, STEADY
from canaryd.judge.recordings.speed import BESIDE_SLOWER, SLOWER
from canaryd.model import Cause, State
from tests.judge.recordings.made import (
    BANG,
    CHAIN,
    DAY,
    ENDPOINT,
    GOOD,
    HOUR,
    POLICY,
    History,
)


def timed(history, *seconds, condition, ago=2 * HOUR):
    """Add a run for each latency, a second apart."""
    asked = dataclasses.replace(GOOD, condition=condition)
    for n, value in enumerate(seconds):
        reading = Reading(name="endpoint_token_seconds", value=value, unit="seconds", labels={"api": "chat"})
        history.add(ago - n, asked, readings=(reading,))
    return history


def served(*seconds, condition, name="main", **fields):
    """An endpoint that was learnt under a condition, with its latencies since."""
    history = History(dataclasses.replace(ENDPOINT, uuid=f"endpoint:{name}"))
    history.learn(9 * DAY, dataclasses.replace(GOOD, condition=condition))
    return timed(history, *seconds, condition=condition, **fields)


def latencies(usual, times):
    return [usual] * STEADY + [usual * times] * POLICY.confirm_runs


@pytest.mark.parametrize(
    ("condition", "usual", "times", "slow"),
    [
        ("idle", 0.01, SLOWER - 0.1, False),
        ("idle", 0.01, SLOWER + 0.1, True),
        ("loaded", 0.01, 100.0, False),
        ("", 0.01, 100.0, False),
        ("idle", 0.0001, 90.0, False),
        ("idle", 0.0001, 110.0, True),
    ],
)
def test_an_idle_endpoint_that_became_slow_is_degraded(condition, usual, times, slow):
    """Several times its own median, in several runs, and by as much as anybody notices; the numbers are right.

    While others are served, or where the server does not tell, slowness may be the others' doing.
    """
    history = served(*latencies(usual, times), condition=condition)
    assert ("endpoint-slow" in history.found()) is slow
    if slow:
        found = history.found()["endpoint-slow"]
        assert (found.state, found.cause) == (State.DEGRADED, Cause.ENVIRONMENT)


@pytest.mark.parametrize(
    ("times", "theirs", "ago", "slow"),
    [
        (BESIDE_SLOWER - 0.1, 1.0, 2 * HOUR, False),
        (BESIDE_SLOWER + 0.1, 1.0, 2 * HOUR, True),
        (BESIDE_SLOWER + 0.1, SLOWER - 0.1, 2 * HOUR, True),
        (BESIDE_SLOWER + 0.1, SLOWER + 0.1, 2 * HOUR, False),
        (BESIDE_SLOWER + 0.1, 1.0, 2 * HOUR + 2, True),
        (BESIDE_SLOWER + 0.1, 1.0, 2 * HOUR + 3, False),
    ],
)
def test_without_a_queue_only_a_replica_that_is_not_slow_tells_a_slow_endpoint(times, theirs, ago, slow):
    """A load that all replicas share slows all of them; one that was measured at another time says nothing."""
    mine = served(*latencies(0.01, times), condition="")
    replica = served(*latencies(0.01, theirs), condition="", name="other", ago=ago)
    found = mine.found(**{"endpoint:other": replica})
    assert ("endpoint-slow" in found) is slow
    if slow:
        assert any("endpoint:other" in sentence for sentence in found["endpoint-slow"].evidence)


@pytest.mark.parametrize(
    ("apart", "state"), [(POLICY.repeat_gap - 1, State.SUSPECT), (POLICY.repeat_gap, State.FAULTY)]
)
def test_certain_garbage_for_two_rounds_is_faulty(apart, state):
    """Once it may have passed; two rounds beyond doubt, and nobody may trust the answers."""
    history = History().learn()
    history.add(HOUR + apart, BANG)
    history.add(HOUR, BANG)
    assert history.found()["broken-output"].state is state
    history.add(HOUR / 2, GOOD)
    assert "broken-output" not in history.found()


def test_broken_output_of_another_chain_accuses_nobody():
    """A new model may be what is broken; nothing of it is learnt by itself, and an operator's word settles it."""
    history = History().learn()
    changed = dataclasses.replace(BANG, chain=CHAIN | {"checkpoint": "c2"})
    history.add(HOUR, *[changed] * LEARN, baselining=True)
    found = history.found()["broken-output"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.SOFTWARE)
    assert any("baseline accept" in sentence for sentence in found.evidence)
    assert len(history.baselines) == 1
