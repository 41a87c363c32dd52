"""No rule and no state depends on the wording of a sentence: all of them changed, every story goes as before."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.facts import Evidence, Sentence, Skipped
from canaryd.model import Finding, Run, Verdict
from canaryd.store import rows
from canaryd.store.store import Store
from tests import story
from tests.sentences import _hints, changed, rewritten
from tests.story import STORIES, Host, Simulated

FILES = sorted(STORIES.glob("*.yaml"))


def facts(path, monkeypatch, *, change):
    """Play a story; return what was concluded in every round, without a sentence."""
    found = []

    def watch(number, verdicts):
        for name, verdict in sorted(verdicts.items()):
            rules = [(f.rule, f.state, f.cause, f.probe, len(f.runs), f.acknowledged) for f in verdict.findings]
            found.append((number, name, verdict.state, verdict.cause, rules))
        return False

    with monkeypatch.context() as patch:
        if change:
            rewrite(patch)
        story.play(story.load(path), watch=watch)
    return found


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_story_goes_the_same_way_in_other_words(path, monkeypatch):
    """State, cause, rules and the number of runs that they rest on, for every device in every round."""
    assert facts(path, monkeypatch, change=True) == facts(path, monkeypatch, change=False)


def test_a_rule_that_reads_a_sentence_is_found_out(monkeypatch):
    """The experiment can fail: a judge that looks for words in a detail concludes otherwise when they change."""
    from canaryd.judge import verdict
    from canaryd.model import Cause, State

    def reads(case):
        if any("simulated" in run.detail for run in case.runs):
            yield Finding(rule="reads", state=State.UNKNOWN, cause=Cause.HARNESS, message="it reads")

    monkeypatch.setattr(verdict, "RULES", (*verdict.RULES, reads))
    path = STORIES / "probe-times-out.yaml"
    assert facts(path, monkeypatch, change=True) != facts(path, monkeypatch, change=False)


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
