"""Broken output."""

import dataclasses

import pytest

from canaryd.judge.recordings.baseline import LEARN
from canaryd.model import Cause, State
from tests.judge.recordings.made import (
    BANG,
    CHAIN,
    GOOD,
    HOUR,
    POLICY,
    History,
)


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
