"""The judgement of recordings: known passes, unknown is confirmed, a changed chain comes before any device."""

import dataclasses
import random

import pytest

from canaryd.engine.schedule import CONFIRMED_UNKNOWN
from canaryd.facts import Comparison, Exactness
from canaryd.judge.recordings.baseline import LEARN
from canaryd.judge.recordings.rules import findings
from canaryd.model import Outcome, State
from tests.judge.recordings.made import (
    BANG,
    DAY,
    ENDPOINT,
    GOOD,
    GPU,
    HOUR,
    KERNEL,
    NOW,
    STRANGE,
    History,
    departed,
    recording,
)


def test_known_bits_are_nothing_to_speak_of():
    """A complete baseline and runs within it: no finding at all."""
    history = History().learn(9 * DAY, GOOD, STRANGE)
    history.add(HOUR, GOOD)
    history.add(HOUR / 2, STRANGE)
    assert history.found() == {}
    assert not any(r.unknown for r in history.runs)


def test_an_endpoint_is_unknown_until_something_was_compared():
    """Its recordings are all there is: one recording fewer than a baseline takes, or nothing after the last of them."""
    history = History().learn(times=LEARN - 1)
    assert set(history.found()) == {"baseline-learning unknown"}
    history.add(8 * DAY, GOOD)
    assert history.found()["baseline-learning unknown"].state is State.UNKNOWN
    history.add(HOUR, GOOD)
    assert history.found() == {}


def test_answers_that_cannot_be_judged_are_no_evidence():
    """Others are served all the while, every answer is new, and none tells how far such answers may be apart."""
    idle, tale = (dataclasses.replace(recording(case=case), condition="idle") for case in ("story", "tale"))
    loaded = dataclasses.replace(recording(0.5), condition="loaded")
    history = History().learn(9 * DAY, idle, tale, times=2 * LEARN)
    history.add(HOUR, loaded)
    assert history.found()["baseline-learning unknown"].state is State.UNKNOWN
    history.add(HOUR / 2, loaded, tale)
    assert "baseline-learning unknown" not in history.found()


def test_a_run_that_was_thrown_away_is_no_evidence():
    """Its recordings were not learnt, for it did not complete; nor does an older comparison stand in for it."""
    history = History()
    history.add(HOUR, *[GOOD] * LEARN, outcome=Outcome.SKIPPED, learns=False)
    history.add(HOUR / 2, *[GOOD] * 3)
    assert history.found()["baseline-learning unknown"].state is State.UNKNOWN


@pytest.mark.parametrize("exact", [False, True])
def test_a_device_of_which_only_unlearnt_recordings_ran_is_unknown(exact):
    """Exact tests of the same device are evidence of their own; without them there is none."""
    history = History(of=GPU)
    history.add(HOUR, dataclasses.replace(GOOD, chain=KERNEL))
    if exact:
        right = Comparison(case="product", shape="", seed=1, exactness=Exactness.UNIVERSAL)
        history.add(HOUR / 2, probe="exact", comparisons=(right,))
    found = history.found()
    assert set(found) == {"baseline-learning healthy" if exact else "baseline-learning unknown"}


def test_an_endpoint_is_unknown_until_a_run_gives_known_bits_again():
    """Its recordings are all there is: a re-run with known bits acquits nobody, the next run is one that counts."""
    history = departed(STRANGE, STRANGE, GOOD)
    found = history.found()
    assert set(found) == {"recording-departed unknown"}
    assert found["recording-departed unknown"].state is State.UNKNOWN
    assert "retests match the baseline again" in found["recording-departed unknown"].message
    history.add(HOUR / 2, GOOD)
    assert {rule: f.state for rule, f in history.found().items()} == {"recording-departed healthy": State.HEALTHY}


CASES = tuple(f"case{n}" for n in range(23))


def server(of=ENDPOINT, cases=CASES):
    """A server that was learnt in many cases at once, and answered each of them as before."""
    history = History(of)
    history.learn(9 * DAY, *(recording(case=case) for case in cases), times=LEARN * len(cases))
    history.add(2 * DAY, *(recording(case=case) for case in cases))
    return history


def struck(rng, chance, cases=CASES):
    """The answers of a server in which a fault strikes each case by chance, each time with other bits."""
    return [recording(rng.uniform(0.01, 0.4) if rng.random() < chance else 0.0, case=case) for case in cases]


def check(history, ago, rng, chance):
    """A run, and what it calls for: three re-runs of at most eight cases with unknown bits; return the verdict."""
    first = history.add(ago, *struck(rng, chance))
    for number in range(3 if first.unknown else 0):
        again = first.unknown[:CONFIRMED_UNKNOWN]
        history.add(ago - 1 - number, *struck(rng, chance, again), confirms=first.id, cases=again)
    found = [f for f in findings(history.record(NOW - ago + 60)) if f.probe == "canary"]
    return first, max(found, key=lambda f: f.state.severity, default=None)


@pytest.mark.parametrize("chance", [0.5, 0.1, 0.02, 1.0], ids=["1 in 50", "1 in 500", "rare", "permanent"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_no_check_after_learning_is_healthy_while_recordings_are_unknown(chance, seed):
    """Whatever the rate of the fault, and whichever cases its re-runs happen to strike; in the end it is a suspect.

    Seeds 1 and 2 are other courses of chance of what seed 0 shows at each rate.
    """
    rng, history = random.Random(f"{chance}/{seed}"), server()
    told = []
    for number in range(24):
        first, worst = check(history, DAY - number * 600, rng, chance)
        told.append(worst)
        if first.unknown:
            assert worst is not None
            assert worst.state.severity >= State.UNKNOWN.severity
    if chance >= 0.1:
        assert told[-1].state is State.SUSPECT


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_mode_that_all_cases_share_is_no_fault(seed):
    """A healthy server may have one that learning did not meet: many cases at once, as rarely as the bound allows."""
    rng, history = random.Random(seed), server()
    for number in range(60):
        shared = 0.3 * (rng.random() < 0.05)
        first = history.add(DAY - number * 600, *(recording(shared, case=case) for case in CASES))
        for again in range(3 if first.unknown else 0):
            repeated = first.unknown[:CONFIRMED_UNKNOWN]
            answers = [recording(case=case) for case in repeated]
            history.add(DAY - number * 600 - 1 - again, *answers, confirms=first.id, cases=repeated)
    assert "recording-departed suspect" not in history.found()


def test_a_departure_clears_by_time_and_known_bits():
    """30 days and three times as many known vectors as it took to depart once."""
    history = departed(STRANGE, STRANGE, STRANGE)
    assert "recording-departed suspect" in history.found(now=NOW + 40 * DAY)
    for n in range(200):
        history.add(HOUR - 1 - n, GOOD)
    assert "recording-departed suspect" in history.found(now=NOW + 29 * DAY)
    assert "recording-departed suspect" not in history.found(now=NOW + 31 * DAY)


def test_a_server_that_answers_nothing_from_the_start_is_not_learnt():
    """Its own first answers must not become the standard."""
    history = History()
    history.add(HOUR, *[BANG] * LEARN, baselining=True)
    assert history.baselines == {}
    assert history.found()["broken-output"].state is State.UNKNOWN


def test_under_load_only_idle_answers_count_where_they_can_be_had():
    """No few loads show what every other load gives; idle the same unknown bits are a departure."""
    idle, loaded = (dataclasses.replace(GOOD, condition=c) for c in ("idle", "loaded"))
    history = History()
    history.add(9 * DAY, *[idle] * 16, *[loaded] * 16, baselining=True)
    for n in range(20):
        history.add(2 * DAY - n, idle)
    far = dataclasses.replace(recording(0.5), condition="loaded")
    first = history.add(HOUR, far)
    history.confirm(first, far, far, far)
    assert history.found()["recording-departed healthy"].state is State.HEALTHY
    first = history.add(HOUR / 2, dataclasses.replace(far, condition="idle"))
    history.confirm(first, *[dataclasses.replace(far, condition="idle")] * 3)
    assert history.found()["recording-departed suspect"].state is State.SUSPECT


@pytest.mark.parametrize(
    ("times", "later", "state"), [(1, 0.0, "healthy"), (2, 0.0, "unknown"), (2, 2 * HOUR, "healthy")]
)
def test_an_endpoint_that_errs_again_is_unknown_for_a_day(times, later, state):
    """The first time passes with the next known answer; what came back does not, however rarely it comes."""
    history = History().learn()
    for n in range(100):
        history.add(9 * DAY - n * HOUR, GOOD)
    for n in range(times):
        history.confirm(history.add(DAY - n * HOUR, STRANGE), GOOD, GOOD, GOOD)
    for n in range(20):
        history.add(HOUR - n, GOOD)
    assert set(history.found(now=NOW + later)) == {f"recording-departed {state}"}
