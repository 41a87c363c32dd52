"""Each story of tests/stories ends as its file says, and the same way when every sentence is changed."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from canaryd.facts import Evidence, Sentence, Skipped
from canaryd.model import Finding, Run, Verdict
from canaryd.store import rows
from canaryd.store.store import Store
from tests.alert_texts import untrue_of
from tests.judge.test_stories import TOLD_BY
from tests.sentences import _hints, changed, rewritten
from tests.story.format import STORIES, load
from tests.story.host import Host, Simulated
from tests.story.playing import play

FILES = sorted(STORIES.glob("*.yaml"))
NEEDED = frozenset(TOLD_BY.values())
"""Stories that together need every rule: the gate plays them with every sentence changed, the others as they are told,
unless they are long. `.ci/full` plays every story both ways."""
LONG = 20
"""Rounds above which a story that no rule needs is told in `.ci/full` alone: it takes one to nine seconds."""


READ = {path: load(path) for path in FILES}
"""What each file says; none of them is read twice to choose what is played."""


def late(path):
    """Whether `.ci/full` alone plays a story as it is told."""
    return path.stem in NEEDED or READ[path].rounds > LONG


def chance(path):
    """Whether another seed tells a story another way."""
    told = READ[path]
    return any(0 < fault.probability < 1 for fault in told.faults) or bool(told.noise)


@functools.cache
def as_told(path, seed=None):
    """Play a story as its file tells it; return what is wrong with its end, all conclusions, and untrue alerts."""
    played = play(load(path), seed=seed)
    return played.failures(), concluded(played), untrue_of(played)


def in_other_words(path, monkeypatch):
    """Play a story with every sentence changed."""
    told = load(path)
    wordless = tuple(dataclasses.replace(expected, says="") for expected in told.expect)
    with monkeypatch.context() as patch:
        rewrite(patch)
        return play(dataclasses.replace(told, expect=wordless))


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


def rewrite(patch):
    """Change every sentence that a worker says or that the store gives back."""
    compute, inventory, follow = Host.compute, Simulated.inventory, Simulated.follow
    decode, events = rows.from_json, Store.events
    patch.setattr(Host, "compute", lambda self, *a: rewritten(compute(self, *a)))
    patch.setattr(rows, "from_json", lambda kind, data: rewritten(decode(kind, data)))
    patch.setattr(Store, "events", lambda self, *a, **k: [rewritten(e) for e in events(self, *a, **k)])

    def asked(self, *arguments, **named):
        listing = inventory(self, *arguments, **named)
        fields = {name: getattr(listing, name).items() for name in ("unavailable", "failing")}
        reasons = {name: {k: changed(v) for k, v in items} for name, items in fields.items()}
        return dataclasses.replace(listing, problems=tuple(map(changed, listing.problems)), **reasons)

    def followed(self, path, position, on_batch, **named):
        def batch(records, at):
            on_batch([dataclasses.replace(r, text=changed(r.text)) for r in records], at)

        return follow(self, path, position, batch, **named)

    patch.setattr(Simulated, "inventory", asked)
    patch.setattr(Simulated, "follow", followed)


@pytest.mark.parametrize(
    ("path", "seed"),
    [
        *(pytest.param(p, None, id=p.stem, marks=pytest.mark.slow if late(p) else ()) for p in FILES),
        *(pytest.param(p, 2, id=f"{p.stem}-seed-2", marks=pytest.mark.slow) for p in FILES if chance(p)),
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


@pytest.mark.parametrize("path", [p for p in FILES if p.stem in NEEDED], ids=lambda path: path.stem)
def test_a_story_ends_the_same_in_other_words(path, monkeypatch):
    """The right state, with the right cause, by the round that is written there, whatever the sentences are."""
    failures = in_other_words(path, monkeypatch).failures()
    assert not failures, "\n".join(failures)


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
