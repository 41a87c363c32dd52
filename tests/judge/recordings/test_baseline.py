"""Baselines: learning, passing, departing; each threshold from both sides, and each chance against counting."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd.codec import from_json, to_json
from canaryd.facts import Recording
from canaryd.judge.recordings import baseline
from canaryd.judge.recordings.baseline import (
    EVERY,
    LEARN,
    SLACK,
    STEADY,
    accept,
    changed_links,
    count_run,
    deviation,
    key_of,
    learn,
)
from canaryd.model import Outcome, Run

WORDS = tuple("the canary sings on")


def recording(values=(), digest="", condition="", tokens=WORDS, margins=None, **fields):
    values = tuple(values)
    return Recording(
        case="story",
        digest=digest or f"{hash((values, tokens)) & 0xFFFFFFFFFFFFFFFF:016x}",
        condition=condition,
        tokens=tokens[: len(values)] if values and tokens is WORDS else tokens,
        values=values,
        margins=tuple(margins) if margins is not None else (1.0,) * len(values),
        **fields,
    )


def run(*recordings, at=1000.0, **fields):
    made = {"id": f"r{at}", "device": "D", "probe": "canary", "probe_version": 1, "started": at, "seconds": 1.0}
    return Run(**{**made, "outcome": Outcome.COMPLETED, "recordings": recordings, **fields})


def learnt(*vectors, times=LEARN):
    """Return a baseline that saw these vectors in turn, `times` in all."""
    made = None
    for number, one in enumerate(itertools.islice(itertools.cycle(vectors), times)):
        made = learn(made, run(one, at=1000.0 + number), one)
    return made


def near(base, by):
    return recording(tuple(v + by for v in base))


BASE = (-0.5, -1.0, -0.25, -2.0)
PLAIN = recording(BASE)


def test_a_baseline_is_complete_after_so_many_recordings():
    """One fewer is not enough; afterwards nothing more is learnt by itself."""
    assert not learnt(PLAIN, times=LEARN - 1).complete
    full = learnt(PLAIN)
    assert full.complete
    assert learn(full, run(near(BASE, 1.0)), near(BASE, 1.0)) is full


def test_known_bits_pass_and_others_depart():
    """Every mode seen while learning passes at once; anything else is a departure from the nearest."""
    other = near(BASE, 0.01)
    both = learnt(PLAIN, other)
    assert deviation(both, PLAIN) is None
    assert deviation(both, other) is None
    away = deviation(both, near(BASE, 0.011))
    assert away.nearest == other
    assert away.distance == pytest.approx(0.001)
    assert away.position is None


def test_it_survives_the_codec():
    """What is stored comes back equal, key included."""
    full = learnt(PLAIN, near(BASE, 0.01))
    again = from_json(baseline.Baseline, to_json(full))
    assert again == full
    assert again.key == full.key == key_of(run(PLAIN), PLAIN)


@pytest.mark.parametrize(
    ("imported", "kind"), [("", None), ("cuda NVIDIA H200", ("cuda", "NVIDIA H200")), ("gone", ("gone", ""))]
)
def test_a_baseline_of_release_0_1_0_is_still_read(imported, kind):
    """It named backend and model of an imported baseline in one text; anything else there is refused."""
    older = {name: value for name, value in to_json(learnt(PLAIN)).items() if name != "imported_kind"}
    found = from_json(baseline.Baseline, {**older, "imported": imported})
    assert found == dataclasses.replace(learnt(PLAIN), imported_kind=kind)
    assert found.imported is bool(imported)
    with pytest.raises(ValueError, match="unknown field 'imported'"):
        from_json(baseline.Baseline, {**older, "imported": 7})


@pytest.mark.parametrize(("last_new", "stable"), [(LEARN - STEADY, True), (LEARN - STEADY + 1, False)])
def test_stable_needs_so_many_known_vectors_in_a_row(last_new, stable):
    """A second mode that shows too late leaves open whether there is a third."""
    vectors = [near(BASE, 0.5) if n == last_new - 1 else PLAIN for n in range(LEARN)]
    full = learnt(*vectors)
    assert full.stable("") is stable
    assert deviation(full, near(BASE, 0.6)).is_outlier is stable  # within the noise, were there any


def under(load, *vectors):
    return [dataclasses.replace(v, condition=load) for v in vectors]


def test_a_server_that_batches_is_stable_only_when_idle():
    """Few loads that gave few vectors say nothing about the next load; idle it repeats itself exactly."""
    shifted = [near(BASE, n / 1000) for n in range(1, 5)]
    loaded = under("loaded", *itertools.islice(itertools.cycle(shifted), STEADY + 4))
    full = learnt(*loaded, *under("idle", *[PLAIN] * (STEADY + 2)), times=2 * STEADY + 6)
    assert full.stable("idle")
    assert not full.stable("loaded")
    assert not full.stable("")
    assert deviation(full, *under("idle", near(BASE, 0.0005))).is_outlier
    assert not deviation(full, *under("loaded", near(BASE, 0.0005))).is_outlier
    assert full.noise("idle") is None


def test_a_batch_invariant_server_is_stable_under_load():
    """What came under load came alone as well: then unknown bits count whoever else is served."""
    full = learnt(*under("idle", *[PLAIN] * (STEADY + 1)), *under("loaded", *[PLAIN] * (STEADY + 1)), times=26)
    assert full.stable("loaded")
    assert full.stable("")


def unsteady():
    """Return a baseline whose vectors never repeat, each 0.001 from the next."""
    return learnt(*(recording(tuple(v + n / 1000 for v in BASE)) for n in range(LEARN)))


@pytest.mark.parametrize(("steps", "beyond"), [(SLACK - 0.1, False), (SLACK + 0.1, True)])
def test_an_unsteady_case_departs_beyond_so_many_times_its_noise(steps, beyond):
    """The tolerance is in units of the distance between its own modes."""
    high = (LEARN - 1) / 1000
    assert deviation(unsteady(), near(BASE, high + steps / 1000)).is_outlier is beyond


@pytest.mark.parametrize(("margin", "beyond"), [(2 * SLACK - 0.1, False), (2 * SLACK + 0.1, True)])
def test_another_token_is_legal_only_at_a_near_tie(margin, beyond):
    """Two logits that each may stray can change places only where they are that near."""
    margins = (9.0, 9.0, margin / 1000, 9.0)
    vectors = [recording(tuple(v + n / 1000 for v in BASE), margins=margins) for n in range(LEARN)]
    forked = recording((*BASE[:2], -0.3, -0.3), tokens=(*WORDS[:2], "X", "Y"))
    away = deviation(learnt(*vectors), forked)
    assert away.position == 2
    assert away.margin == pytest.approx(margin / 1000)
    assert away.is_outlier is beyond


def test_behind_the_fork_nothing_is_compared():
    """After another token the model answers another question."""
    forked = recording((*BASE[:2], -7.0, -9.0), tokens=(*WORDS[:2], "X", "Y"))
    assert deviation(learnt(PLAIN), forked).distance == 0.0


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_value_that_is_lost_is_infinitely_far(lost):
    """A log probability that is missing or not finite departs, however noisy the case is."""
    away = deviation(unsteady(), recording((BASE[0], lost, *BASE[2:]), digest="lost"))
    assert math.isinf(away.distance)
    assert away.is_outlier
    assert "missing or not finite" in away.sentence()


def test_text_alone_cannot_measure_noise():
    """Without values an unsteady case is never beyond, a stable one always."""
    texts = [recording(tokens=(*WORDS[:3], str(n))) for n in range(LEARN)]
    assert not deviation(learnt(*texts), recording(tokens=tuple("quite else"))).is_outlier
    assert deviation(learnt(texts[0]), recording(tokens=tuple("quite else"))).is_outlier


def test_the_rate_of_a_stable_case_is_the_exact_rule_of_three():
    """At the bound, so many clean recordings would come by a chance of 5 %."""
    full = learnt(PLAIN)
    rate = full.rate("")
    assert (1 - rate) ** (LEARN - 1) == pytest.approx(0.05)
    for _ in range(1000):
        full = count_run(full, run(PLAIN), "", strange=False)
    assert full.rate("") < rate / 30


def test_what_is_strange_is_judged_by_the_record_before_it():
    """The clean runs between two faults of a rare kind must not make the first one more unlikely afterwards."""
    full = learnt(PLAIN)
    before = full.rate("")
    full = count_run(full, run(PLAIN, at=5000.0), "", strange=True)
    for _ in range(50):
        full = count_run(full, run(PLAIN), "", strange=False)
    assert full.rate("") == before
    assert (full.strange, full.since, full.strange_at, full.passed[EVERY]) == (1, 50, 5000.0, 50)


def test_one_glitch_while_learning_does_not_widen_the_noise():
    """It is known from then on; what others may stray by is measured without the farthest one."""
    glitch = near(BASE, 4.0)
    vectors = [recording(tuple(v + n / 1000 for v in BASE)) for n in range(LEARN - 1)]
    full = learnt(*vectors[:20], glitch, *vectors[20:])
    assert full.noise("") == pytest.approx(0.001)
    assert deviation(full, near(BASE, 1.0)).is_outlier


def test_a_near_tie_at_the_first_token_is_measured_within_each_branch():
    """Two answers that share no token are no measure of each other."""
    other = ("quite", "another", "answer", "here")
    luck = random.Random(1)
    vectors = [
        recording(
            tuple(v + luck.gauss(0, 1e-3) for v in BASE), tokens=luck.choice((WORDS, other)), margins=(0.0005,) * 4
        )
        for _ in range(LEARN + 200)
    ]
    full = learnt(*vectors[:LEARN])
    assert full.noise("") > 0
    assert sum(deviation(full, v).is_outlier for v in vectors[LEARN:]) <= 10


def test_fewer_than_three_vectors_measure_no_noise():
    """Where it is not bit-stable and nothing tells by how much it varies, nothing can be beyond it."""
    full = learnt(*under("loaded", *[PLAIN] * (LEARN - 2)), *under("loaded", near(BASE, 0.001), PLAIN))
    assert full.noise("") is None
    assert not deviation(full, near(BASE, 0.002)).is_outlier


def test_the_rate_of_an_unsteady_case_holds_by_counting():
    """Among exchangeable vectors one lies farther out than all others did at most as often as is said."""
    luck, beyond, tries = random.Random(5), 0, 400
    for _ in range(tries):
        vectors = [recording(tuple(v + luck.gauss(0, 1e-3) for v in BASE)) for _ in range(LEARN + 1)]
        full = learnt(*vectors[:LEARN])
        away = deviation(full, vectors[-1])
        beyond += away is not None and away.distance > full.noise("")
    said = unsteady().rate("")
    assert said == pytest.approx(2 / (LEARN + 1))
    assert beyond / tries <= said + 3 * math.sqrt(said / tries)


def test_accepting_makes_bits_known():
    """An operator's word, kept with its reason."""
    strange = near(BASE, 3.0)
    taken = accept(learnt(PLAIN), run(strange, at=9000.0), strange, "new cooling, same card")
    assert deviation(taken, strange) is None
    assert taken.accepted == "new cooling, same card"


def test_changed_links_stand_in_the_order_of_the_chain():
    """From weights to answer, then the stack; equal ones are left out."""
    before = {"server": "a 1", "tokenizer": "x", "torch": "2.4", "client": "c"}
    after = {"server": "a 2", "tokenizer": "y", "torch": "2.5", "client": "c", "template": "t"}
    found = changed_links(before, after)
    assert [change.link for change in found] == ["tokenizer", "template", "server", "torch"]
    assert [str(change) for change in found[:2]] == ["tokenizer (x → y)", "template (unknown → t)"]


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=60))
def test_learning_counts_every_recording_once(digests):
    """Whatever comes: the counts add up, and no more is learnt than it takes."""
    made = None
    for number, digest in enumerate(digests):
        one = dataclasses.replace(PLAIN, digest=digest)
        made = learn(made, run(one, at=float(number)), one)
    assert made.learnt[EVERY] == min(len(digests), LEARN)
    assert sum(sum(k.counts.values()) for k in made.known) == made.learnt[EVERY]
    assert made.digests == frozenset(digests[:LEARN])
