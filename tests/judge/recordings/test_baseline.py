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
    assert both.difference(PLAIN) is None
    assert both.difference(other) is None
    away = both.difference(near(BASE, 0.011))
    assert away.nearest == other
    assert away.distance == pytest.approx(0.001)
    assert away.position is None


def test_it_survives_the_codec():
    """What is stored comes back equal, key included."""
    full = learnt(PLAIN, near(BASE, 0.01))
    again = from_json(baseline.Baseline, to_json(full))
    assert again == full
    assert again.key == full.key == key_of(run(PLAIN), PLAIN)


def unsteady():
    """Return a baseline whose vectors never repeat, each 0.001 from the next."""
    return learnt(*(recording(tuple(v + n / 1000 for v in BASE)) for n in range(LEARN)))


@pytest.mark.parametrize(("steps", "beyond"), [(SLACK - 0.1, False), (SLACK + 0.1, True)])
def test_an_unsteady_case_departs_beyond_so_many_times_its_noise(steps, beyond):
    """The tolerance is in units of the distance between its own modes."""
    high = (LEARN - 1) / 1000
    assert unsteady().departs(near(BASE, high + steps / 1000)) is beyond


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_value_that_is_lost_is_infinitely_far(lost):
    """A log probability that is missing or not finite departs, however noisy the case is."""
    vector = recording((BASE[0], lost, *BASE[2:]), digest="lost")
    away = unsteady().difference(vector)
    assert math.isinf(away.distance)
    assert unsteady().departs(vector)
    assert "missing or not finite" in away.sentence(None)


def test_the_rate_of_an_unsteady_case_holds_by_counting():
    """Among exchangeable vectors one lies farther out than all others did at most as often as is said."""
    luck, beyond, tries = random.Random(5), 0, 150
    for _ in range(tries):
        vectors = [recording(tuple(v + luck.gauss(0, 1e-3) for v in BASE)) for _ in range(LEARN + 1)]
        full = learnt(*vectors[:LEARN])
        away = full.difference(vectors[-1])
        beyond += away is not None and away.distance > full.noise("")
    said = unsteady().rate("")
    assert said == pytest.approx(2 / (LEARN + 1))
    assert beyond / tries <= said + 3 * math.sqrt(said / tries)


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
