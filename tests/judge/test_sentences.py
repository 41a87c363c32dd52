"""Each story of tests/stories ends as its file says, and the same way when every sentence is changed.

`.ci/full` plays them as they are told; the gate plays them with every sentence changed (tests/contract).
"""

from __future__ import annotations

import functools

import pytest

from canaryd.facts import Evidence, Sentence, Skipped
from canaryd.model import Finding, Run, Verdict
from tests.alert_texts import untrue_of
from tests.sentences import _hints, in_other_words
from tests.story.format import STORIES, load
from tests.story.playing import play

FILES = sorted(STORIES.glob("*.yaml"))

READ = {path: load(path) for path in FILES}
"""What each file says; none of them is read twice to choose what is played."""


def chance(path):
    """Whether another seed tells a story another way."""
    told = READ[path]
    return any(0 < fault.probability < 1 for fault in told.faults) or bool(told.noise)


@functools.cache
def as_told(path, seed=None):
    """Play a story as its file tells it; return what is wrong with its end, all conclusions, and untrue alerts."""
    played = play(load(path), seed=seed)
    return played.failures(), concluded(played), untrue_of(played)


def concluded(played):
    """Return every verdict of a played story, without a sentence."""
    return [
        (
            name,
            number,
            v.state,
            v.cause,
            [(f.rule, f.state, f.cause, f.probe, len(f.runs), f.acknowledged) for f in v.findings],
        )
        for name, verdicts in sorted(played.verdicts.items())
        for number, v in enumerate(verdicts)
        if v is not None
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "seed"),
    [
        *(pytest.param(p, None, id=p.stem) for p in FILES),
        *(pytest.param(p, 2, id=f"{p.stem}-seed-2") for p in FILES if chance(p)),
    ],
)
def test_a_story_ends_as_its_file_says(path, seed):
    """The right state, with the right cause, by the round that is written there; and no alert claims more than it.

    In another course of chance too: a rule that needs a lucky seed accuses a healthy device one day.
    """
    told = load(path)
    assert told.name == path.stem
    assert told.seed != 2, "seed 2 is the other one"
    assert len(told.text.split()) > 10, "the text says what happened in the world"
    failures, _, untrue = as_told(path, seed)
    assert not failures, "\n".join(failures)
    assert not untrue, "\n".join(untrue)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_story_goes_the_same_way_in_other_words(path, monkeypatch):
    """State, cause, rules and the number of runs that they rest on, for every device in every round."""
    assert concluded(in_other_words(path, monkeypatch)) == as_told(path)[1]


def test_a_rule_that_reads_a_sentence_is_found_out(monkeypatch):
    """The experiment can fail: a judge that looks for words in a detail concludes otherwise when they change."""
    from canaryd.judge import verdict
    from canaryd.model import Cause, State

    def reads(case):
        if any("simulated" in run.detail for run in case.runs):
            yield Finding(rule="reads", state=State.UNKNOWN, cause=Cause.HARNESS, message="it reads")

    monkeypatch.setattr(verdict, "RULES", (*verdict.RULES, reads))
    path = STORIES / "probe-times-out.yaml"
    assert concluded(in_other_words(path, monkeypatch)) != concluded(play(load(path)))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Run, {"detail", "absent"}),
        (Evidence, {"pattern"}),
        (Skipped, {"reason"}),
        (Finding, {"message", "action", "evidence"}),
        (Verdict, set()),
    ],
)
def test_every_sentence_is_declared_as_one(kind, names):
    """Text for people has a type of its own; identifiers, commands and values of drivers have not."""
    hints = _hints(kind)
    assert {n for n, hint in hints.items() if hint == Sentence or Sentence in getattr(hint, "__args__", ())} == names
