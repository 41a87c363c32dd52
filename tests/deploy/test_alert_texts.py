"""The alerts about devices claim what the verdict says: stories are held against them in tests/judge/test_sentences.py.

Here: every state and cause, the old texts that were untrue, and what is told of a target that was lost.
"""

from __future__ import annotations

import pytest

from canaryd.judge.incidents import WRONG
from canaryd.model import Cause, Finding, State, Verdict
from tests.alert_texts import TEXTS, fired, rendered, untrue

UUIDS = ("CPU-1", "GPU-1", "endpoint:main")


def verdict(uuid: str, state: State, cause: Cause, rule: str = WRONG[0]) -> Verdict:
    finding = Finding(rule=rule, state=state, cause=cause, message="a message")
    return Verdict(device=uuid, state=state, cause=cause, findings=(finding,), decided=1.0, since=0.0)


@pytest.mark.parametrize("uuid", UUIDS)
@pytest.mark.parametrize("cause", [Cause.HARDWARE, Cause.SOFTWARE, Cause.UNDETERMINED])
@pytest.mark.parametrize("state", [State.FAULTY, State.SUSPECT])
def test_an_alert_claims_no_more_than_the_verdict(uuid, state, cause):
    """Confirmed or not, whose fault, and what is wrong."""
    told = verdict(uuid, state, cause)
    assert [*fired(told)]
    assert untrue(told) == []


@pytest.mark.parametrize(
    ("alert", "part", "old", "uuid", "cause"),
    [
        (
            *("CanarydHostFaulty", "description", "A fault of the processor, memory or bus is confirmed."),
            *("CPU-1", Cause.UNDETERMINED),
        ),
        ("CanarydDeviceFaulty", "summary", "X computes wrong results", "GPU-1", Cause.HARDWARE),
        ("CanarydDeviceFaulty", "summary", "X has a hardware fault", "GPU-1", Cause.UNDETERMINED),
    ],
)
def test_a_text_that_claims_more_is_found(alert, part, old, uuid, cause):
    """The experiment can fail: texts that were shipped, and one that is wrong, are told."""
    texts = {**TEXTS, alert: {**TEXTS[alert], part: old}}
    assert untrue(verdict(uuid, State.FAULTY, cause, "memory-failed"), texts)


def test_the_text_follows_the_cause():
    """The same alert, before and after the cause is known."""
    text = TEXTS["CanarydHostFaulty"]["description"]
    assert "the cause is not known yet." in rendered(text, Cause.UNDETERMINED)
    assert "the cause is hardware." in rendered(text, Cause.HARDWARE)


def test_a_lost_target_says_that_its_alarms_stand():
    """They do for an hour (tests/deploy/rules/daemon.yml)."""
    text = TEXTS["CanarydTargetLost"]["description"]
    assert "stay active for an hour" in text
    assert "ended" not in text
