"""What stays of a run in memory: counts, places and what was wrong; never less than the judge asks for."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.codec import from_json, to_json
from canaryd.facts import Comparison, Exactness, Place, Reading, Recording, Skipped, Subject
from canaryd.judge.brief import ELEMENTS, FEW, brief, fold
from canaryd.judge.characterised import FOLDED
from canaryd.model import MPS_CLIENT, Outcome, Run
from tests.engine.test_engine import EVIDENCE, made

CORES = (Place(unit="core", numbers=(0,)), Place(unit="core", numbers=(1,)), Place(unit="threads", numbers=(2,)))


def compared(number, *, wrong=False, subject=Subject.DEVICE, case=""):
    return Comparison(
        case=case or f"case {number}",
        shape="n=4",
        seed=number,
        exactness=Exactness.UNIVERSAL,
        subject=subject,
        place=CORES[number % 3],
        trials=3,
        wrong_trials=int(wrong),
        evidence=EVIDENCE if wrong else None,
        uploads=2,
    )


def failed(**changes):
    """A run with 12 comparisons: two are wrong, and one is of a case that is wrong beside it."""
    found = [compared(n, wrong=n in (3, 7)) for n in range(10)]
    others = [compared(10, case="case 3"), compared(11, subject=Subject.HOST)]
    return dataclasses.replace(made(1, wrong=True), comparisons=(*found, *others), **changes)


def test_a_failed_run_keeps_what_was_wrong_and_counts_the_rest_place_by_place():
    """The judge compares wrong results one by one, and counts clean ones of a device, of a core and of a run."""
    run = failed()
    short = brief(run)
    assert short.wrong == fold(run).wrong
    assert (short.trials, short.uploads) == (run.trials, run.uploads)
    for place in CORES:
        assert sum(c.trials for c in short.comparisons if c.place == place) == sum(
            c.trials for c in run.comparisons if c.place == place
        )
    left = [c for c in short.comparisons if not c.wrong]
    assert [c.case for c in left] == ["case 3", "case 11", FOLDED, FOLDED, FOLDED]


@pytest.mark.parametrize("changes", [{"confirms": "r"}, {"cases": ("case 3",)}, {"intensity": "repeated"}])
def test_what_looked_at_a_part_keeps_every_comparison(changes):
    """A confirmation computes what was wrong elsewhere: that it was right here decides whose fault it is."""
    run = failed(**changes)
    assert [c.case for c in brief(run).comparisons] == [c.case for c in run.comparisons]


def test_wrong_elements_are_few_and_a_traceback_is_of_what_did_not_complete():
    """Enough to tell two mismatches from each other; the store keeps all."""
    many = dataclasses.replace(EVIDENCE, first=tuple(((i,), "0x1", "0x2") for i in range(64)))
    comparison = dataclasses.replace(compared(0, wrong=True), evidence=many)
    (wrong,) = brief(dataclasses.replace(made(1, wrong=True), comparisons=(comparison,))).wrong
    assert len(wrong.evidence.first) == ELEMENTS
    assert brief(made(1, detail="said")).detail == ""
    assert brief(made(1, outcome=Outcome.CRASHED, detail="said")).detail == "said"


def test_what_only_the_store_has_to_remember_is_left_out():
    """A device under MPS, and a drill's command, are judged or shown; commands and surroundings are read when asked."""
    run = brief(made(1, repro="canaryd check", environment={"hostname": "node17", MPS_CLIENT: "yes"}))
    assert (run.repro, run.environment) == ("", {MPS_CLIENT: "yes"})
    assert brief(made(1, drill="flip", repro="canaryd drill")).repro == "canaryd drill"
    skips = (Skipped(case="fp8", reason="no kernel"),)
    assert brief(made(1, skipped=skips)).skipped == ()
    assert brief(made(1, skipped=skips, comparisons=())).skipped == skips
    long = (Reading(name="switches", value="x" * 500), Reading(name="version", value="2.13"))
    assert [r.value for r in brief(made(1, readings=long)).readings] == ["", "2.13"]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 0),
        ({"unknown": ("a",)}, FEW + 1),
        ({"device": "endpoint:main"}, 0),
        ({"device": "endpoint:main", "few": True}, FEW),
        ({"confirms": "r", "few": True}, FEW),
        ({"few": True}, 0),
    ],
)
def test_recordings_stay_where_they_are_asked_for_later(changes, kept):
    """What departed, few of an endpoint, and few of a confirmation: those are compared with later ones."""
    count = FEW if changes.pop("few", False) else FEW + 1
    recordings = tuple(Recording(case=f"case {n}", digest=f"{n:016x}") for n in range(count))
    assert len(brief(made(1, recordings=recordings, **changes)).recordings) == kept


@pytest.mark.parametrize("run", [made(1), failed(), failed(confirms="r"), made(1, outcome=Outcome.CRASHED)])
def test_brief_twice_is_brief(run):
    """What a restart reads from the store is what was in memory: stored and made brief again it stays the same."""
    short = brief(run)
    assert brief(short) == short
    assert from_json(Run, to_json(short)) == short
