"""A changed chain (model, tokenizer, template, settings) accuses no device."""

import dataclasses
import itertools

import pytest

from canaryd.judge.recordings.baseline import LEARN
from canaryd.judge.recordings.rules import findings
from canaryd.model import Cause, State
from tests.judge.recordings.made import (
    BANG,
    CHAIN,
    DAY,
    GOOD,
    GPU,
    HOUR,
    KERNEL,
    NOW,
    STRANGE,
    History,
    asking,
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


@pytest.mark.parametrize("link", ["tokenizer", "template", "prompt"])
def test_another_tokenizer_or_template_is_unknown_until_somebody_says_that_it_was_meant(link):
    """A prompt that the server renders in another way is a changed template, also where no directory tells so."""
    chain = CHAIN | {"prompt": "p1"}
    history = History().learn(9 * DAY, recording(chain=chain))
    other = recording(0.5, chain=chain | {link: "new"})
    history.learn(2 * DAY, other)
    history.add(HOUR, other)
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.SOFTWARE)
    assert "baseline accept endpoint:main" in found.action


def test_another_version_of_a_probe_is_named_as_the_change():
    """The chain is the same; the results of the older version cannot be compared."""
    history = History().learn()
    history.add(HOUR, STRANGE, probe_version=2)
    found = history.found()["chain-changed"]
    assert found.message == "canary results changed after a change of the probe (case story)."
    assert "Changed: the version of the probe." in found.evidence


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


def test_a_changed_chain_is_learnt_and_told_for_a_while():
    """Learnt anew it is healthy again, with a note for a week; then the note goes."""
    history = History().learn(30 * DAY)
    answered = recording(0.5, chain=CHAIN | {"server": "vllm 0.33"})
    history.learn(2 * DAY, answered)
    assert history.found()["nothing-compared"].state is State.UNKNOWN
    history.add(DAY, answered)
    assert "nothing-compared" not in history.found()
    assert history.found()["baseline-fresh"].state is State.HEALTHY
    assert history.found()["chain-changed"].state is State.HEALTHY
    assert any("nothing has confirmed" in sentence for sentence in history.found()["chain-changed"].evidence)
    assert history.found(now=NOW + 10 * DAY) == {}


def test_another_instruction_set_is_no_changed_chain():
    """A CPU is tested in turn by several ways to compute: each has a baseline of its own."""
    history = History(of=dataclasses.replace(GPU, backend="cpu"))
    for number, name in enumerate(("native", "avx2")):
        vectors = [recording(number / 10)] * LEARN
        history.add(9 * DAY - number, *vectors, stack={"instruction_set": name}, baselining=True)
    history.add(HOUR, GOOD, stack={"instruction_set": "native"})
    history.add(HOUR / 2, recording(0.1), stack={"instruction_set": "avx2"})
    assert set(history.found()) == {"baseline-unwitnessed"}


def test_back_on_a_known_chain_nothing_is_new():
    """A rollback is compared with what it gave before."""
    history = History().learn(9 * DAY)
    history.learn(8 * DAY, recording(0.5, chain=CHAIN | {"checkpoint": "c2"}))
    history.add(HOUR, GOOD)
    assert history.found() == {}


def test_cases_of_one_probe_make_one_record():
    """Two re-runs are enough where several cases have shown how seldom a new vector comes."""
    history = History(policy=asking(2)).learn()
    for name in ("tale", "saga", "ode"):
        history.learn(9 * DAY, recording(case=name))
    first = history.add(HOUR, STRANGE)
    history.confirm(first, STRANGE, STRANGE)
    assert history.found()["recording-departed"].state is State.SUSPECT


def test_what_changed_is_told_beside_what_was_there_last():
    """After an excursion to another server and back, a new tokenizer is all that is new."""
    history = History().learn(9 * DAY)
    history.learn(8 * DAY, recording(0.5, chain=CHAIN | {"server": "vllm 0.33"}))
    history.add(DAY, GOOD)
    history.add(HOUR, recording(0.7, chain=CHAIN | {"tokenizer": "t2"}))
    assert "Changed: tokenizer (t1 → t2)." in history.found()["chain-changed"].evidence


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


def test_a_suspicion_on_a_chain_that_is_gone_clears_on_the_next():
    """The clean runs that are wanted can only come on what is served now."""
    history = departed(STRANGE, STRANGE, STRANGE)
    new = recording(chain=CHAIN | {"server": "vllm 0.33"})
    history.learn(HOUR / 2, new)
    for n in range(200):
        history.add(HOUR / 2 - 1 - n, new)
    assert "recording-departed" in history.found(now=NOW + 29 * DAY)
    assert "recording-departed" not in history.found(now=NOW + 31 * DAY)
    untested = dataclasses.replace(history.record(now=NOW + 31 * DAY), tested={})
    assert "recording-departed" in {f.rule for f in findings(untested)}, "a machine that was off clears nothing"


def test_a_link_that_is_not_known_any_more_is_no_change_to_be_believed():
    """A profiler that is barred from the day on which the bits change explains nothing."""
    history = twin("a", GOOD)
    blind = dataclasses.replace(STRANGE, chain={"dtype": "bfloat16"}, case="gemm/prefill")
    history.add(HOUR / 2, blind)
    assert history.found()["chain-changed"].state is State.UNKNOWN
    history = twin("a", GOOD)
    history.add(HOUR / 2, dataclasses.replace(blind, chain=KERNEL | {"kernel": "another"}))
    assert history.found()["chain-changed"].state is State.HEALTHY


def test_a_harmless_change_after_one_that_nobody_confirmed_is_no_news():
    """The server was updated two days ago, and learnt; then canaryd's own client changes, and no bit does."""
    history = History().learn(30 * DAY)
    updated = recording(0.5, chain=CHAIN | {"server": "vllm 0.33"})
    history.learn(2 * DAY, updated)
    history.add(DAY, updated)
    history.add(HOUR, dataclasses.replace(updated, chain=updated.chain | {"client": "vllm 2"}))
    assert history.found() == {}


def test_a_device_that_is_rolled_back_is_compared_with_what_it_ran_before():
    """Its host made other inputs for another version of the probe: that is long known, and the host is not accused."""
    history = History(of=GPU)

    def ran(ago, prompt, driver, version, shift, times=1):
        made = dataclasses.replace(recording(shift), chain={"dtype": "bf16", "prompt": prompt}, case="g")
        for number in range(times):
            more = {"stack": {"driver": driver}, "probe_version": version}
            history.add(ago - number, made, baselining=times > 1, **more)

    ran(30 * DAY, "p1", "1", 1, 0.0, times=LEARN)
    ran(2 * DAY, "p2", "2", 2, 0.5, times=LEARN)
    ran(DAY, "p2", "2", 2, 0.5)
    ran(HOUR, "p2", "1", 2, 0.3)
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.HEALTHY, Cause.SOFTWARE)
    assert "a change of driver" in found.message
