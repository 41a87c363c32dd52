"""A changed chain (model, tokenizer, template, settings) accuses no device."""

import dataclasses
import itertools

import pytest

from canaryd.judge.recordings.baseline import accept, empty_baseline
from canaryd.model import Cause, State
from tests.judge.recordings.made import (
    BANG,
    CHAIN,
    DAY,
    GOOD,
    HOUR,
    STRANGE,
    History,
    departed,
    recording,
    twin,
)

LINKS = [("checkpoint", "c2"), ("tokenizer", "t2"), ("template", "m2"), ("server", "vllm 0.33"), ("client", "vllm 2")]


@pytest.mark.parametrize(("link", "value"), LINKS)
def test_a_changed_chain_accuses_no_device(link, value):
    """Another answer after a change of one link: the finding names the link, and none accuses hardware."""
    history = History().learn()
    history.add(HOUR, recording(0.5, chain=CHAIN | {link: value}))
    found = history.found()
    assert set(found) == {"chain-changed"}
    assert found["chain-changed"].message == f"canary results changed after a change of {link} (case story)."
    assert f"Changed: {link} ({CHAIN[link]} → {value})." in found["chain-changed"].evidence
    assert (found["chain-changed"].state, found["chain-changed"].cause) == (State.UNKNOWN, Cause.SOFTWARE)


def test_a_launch_is_not_named_beside_what_was_launched():
    """Another chain is always in another launch: an operator knows the change of the model and of its server."""
    history = History().learn()
    links = {"checkpoint": "c2", "server": "vllm 0.33", "launch": "2026-09-21 13:00:00 UTC"}
    history.add(HOUR, recording(0.5, chain=CHAIN | links))
    told = history.found()["chain-changed"].message
    assert told == "canary results changed after a change of checkpoint and server (case story)."


def test_findings_have_one_sentence_for_what_was_seen_and_one_for_what_to_do():
    """Everything else is evidence; a command stands once."""
    stories = [departed(), departed(*[STRANGE] * 3), departed(STRANGE, GOOD, GOOD), History().learn(times=3)]
    stories += [twin("a", STRANGE), History().learn()]
    stories[-1].add(HOUR, BANG, recording(0.5, case="tale", chain=CHAIN | {"server": "x"}))
    for found in itertools.chain.from_iterable(story.found().values() for story in stories):
        assert found.message.endswith(".")
        assert len(found.message) <= 160
        assert ". " not in found.message + found.action
        commands = [text for text in (found.action, *found.evidence) if "canaryd " in text]
        assert len(commands) == len({*commands})
        assert all(sentence[0].isupper() for sentence in found.evidence)


def test_another_model_stays_unknown_until_somebody_says_that_it_was_meant():
    """Nobody can tell a deployment from a file that rotted; an operator's word can."""
    history = History().learn()
    other = recording(0.5, chain=CHAIN | {"checkpoint": "c2"})
    history.learn(2 * DAY, other)
    history.add(DAY, other)
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.SOFTWARE)
    assert "baseline accept endpoint:main --reason" in found.action
    key = next(b.key for b in history.baselines.values() if b.chain["checkpoint"] == "c2")
    history.baselines[key] = dataclasses.replace(history.baselines[key], accepted="deployed")
    assert history.found() == {}


def test_what_an_operator_accepted_is_what_the_next_change_is_told_from():
    """Even if nothing was compared with it in between: an accepted model is not asked about again."""
    history, model = History().learn(), CHAIN | {"checkpoint": "c2"}
    met = history.add(2 * HOUR, recording(0.5, chain=model), learns=False)
    own = accept(empty_baseline(met, met.recordings[0]), met, met.recordings[0], "deployed")
    history.baselines[own.key] = own
    history.add(HOUR, recording(0.7, chain=model | {"server": "vllm 0.33"}))
    assert history.found()["chain-changed"].message == "canary results changed after a change of server (case story)."


def test_a_changed_chain_with_the_same_bits_is_no_news():
    """Another client, same answer."""
    history = History().learn()
    history.add(HOUR, recording(chain=CHAIN | {"client": "vllm 2"}))
    assert history.found() == {}


def test_a_bad_unit_does_not_become_its_own_standard():
    """What is not to be learnt from leaves every baseline as it was."""
    history = History()
    history.add(HOUR, GOOD, learns=False)
    assert history.baselines == {}
