"""Launches: the bits of a server belong to one start of it."""

import dataclasses

from canaryd.facts import ENDPOINT_REPEATS, ENDPOINT_STARTED, Reading
from canaryd.judge.recordings.baseline import LEARN
from canaryd.model import State
from tests.judge.recordings.made import BANG, DAY, GOOD, HOUR, STRANGE, History, recording

CASES = ("story", "tale")
FIRST, SECOND = 1_000_000.0, 2_000_000.0


def told(start):
    """Return the reading of a server that tells when it started."""
    return {"readings": (Reading(name=ENDPOINT_STARTED, value=start, unit="seconds"),)} if start else {}


def both(shift=0.0):
    """Return an answer in each case."""
    return [recording(shift, case=case) for case in CASES]


def learnt(start=FIRST, **fields):
    """Return a server that was learnt in two cases, and answered as before since."""
    history = History()
    history.add(9 * DAY, *(both() * LEARN), baselining=True, **told(start), **fields)
    history.add(2 * DAY, *both(), **told(start), **fields)
    return history


def departs(history, ago, shift=0.01, start=None, again=None):
    """Add a run with other bits in both cases, and three retests that repeat them."""
    first = history.add(ago, *both(shift), **told(start))
    for number in range(3):
        answers = both(shift if again is None else again + number / 100)
        history.add(ago - 1 - number, *answers, confirms=first.id, cases=CASES, **told(start))
    return first


def test_within_a_launch_it_departs():
    """The start is the one of the baseline."""
    history = learnt()
    assert departs(history, HOUR, start=FIRST).unknown == CASES
    assert history.found()["recording-departed suspect"].state is State.SUSPECT


def test_after_a_start_other_bits_are_another_chain():
    """Unknown until they are learnt, then compared with what this launch gave."""
    history = learnt()
    history.add(HOUR, *both(0.01), learns=False, **told(SECOND))
    assert history.found()["chain-changed"].state is State.UNKNOWN
    history.add(HOUR / 2, *(both(0.01) * LEARN), baselining=True, **told(SECOND))
    history.add(HOUR / 3, *both(0.01), **told(SECOND))
    assert history.found()["chain-changed"].state is State.HEALTHY
    assert "was restarted at 1970-01-24 03:33:20 UTC" in history.found()["chain-changed"].message
    departs(history, HOUR / 4, 0.02, SECOND)
    assert "recording-departed suspect" in history.found()


def test_known_bits_after_a_start_are_compared_from_then_on():
    """The launch goes on; a departure later in it is one."""
    history = learnt()
    history.add(HOUR, *both(), **told(SECOND))
    assert set(history.found()) == set()
    departs(history, HOUR / 2, start=SECOND)
    assert "recording-departed suspect" in history.found()


def test_a_server_that_was_started_often_is_known_by_its_newest_starts():
    """Ten starts gave the bits that were learnt: others within the tenth are a departure and no other launch."""
    history = learnt()
    for number in range(10):
        history.add(DAY - number * HOUR, *both(), **told(SECOND + number))
    departs(history, HOUR, start=SECOND + 9)
    assert "recording-departed suspect" in history.found()


def test_no_number_of_restarts_acquits_a_server():
    """What departed in a launch stands after ten more launches, though only eight are remembered."""
    history = learnt()
    departs(history, DAY, start=FIRST)
    for number in range(1, 11):
        history.add(DAY - number * HOUR, *(both(number) * LEARN), baselining=True, **told(SECOND + number))
        assert "recording-departed suspect" in history.found(), number


def test_two_replicas_behind_one_address_take_turns():
    """Each has its launch, and neither is learnt again when the other has answered."""
    history = learnt()
    history.add(8 * DAY, *(both(0.01) * LEARN), baselining=True, **told(SECOND))
    for number in range(6):
        history.add(HOUR - number, *both(0.01 * (number % 2)), **told(SECOND if number % 2 else FIRST))
    assert {b.chain["launch"] for b in history.baselines.values()} == {
        f"1970-01-{d} UTC" for d in ("12 13:46:40", "24 03:33:20")
    }
    departs(history, HOUR / 2, 0.02, FIRST)
    assert "recording-departed suspect" in history.found()


def test_an_untold_launch_is_every_answer_at_once_and_then_stable():
    """Not one answer of two, not other bits in the retests, not garbage."""
    history = learnt(start=0.0)
    departs(history, HOUR)
    assert set(history.found()) == {"answers-renewed"}
    history.add(HOUR / 2, *(both(0.01) * LEARN), baselining=True)
    history.add(HOUR / 3, *both(0.01))
    assert history.found()["answers-renewed"].state is State.HEALTHY
    departs(history, HOUR / 4, 0.02, again=0.03)
    assert "recording-departed suspect" in history.found()

    one = learnt(start=0.0)
    first = one.add(HOUR, recording(0.01, case="story"), recording(case="tale"))
    for number in range(3):
        one.add(HOUR - 1 - number, recording(0.01, case="story"), confirms=first.id, cases=("story",))
    assert "recording-departed suspect" in one.found()

    garbage = learnt(start=0.0)
    bangs = [dataclasses.replace(BANG, case=case) for case in CASES]
    first = garbage.add(HOUR, *bangs)
    for number in range(3):
        garbage.add(HOUR - 1 - number, *bangs, confirms=first.id, cases=CASES)
    assert "recording-departed suspect" in garbage.found()


def test_a_start_that_could_not_be_read_once_excuses_nothing():
    """The retests tell that it is the same launch."""
    history = learnt()
    first = history.add(HOUR, *both(0.01))
    for number in range(3):
        history.add(HOUR - 1 - number, *both(0.01), confirms=first.id, cases=CASES, **told(FIRST))
    assert "recording-departed suspect" in history.found()


def test_a_later_restart_does_not_turn_an_old_glitch_into_a_fault():
    """One answer was unknown once; all are others after an untold restart."""
    history = learnt(start=0.0)
    first = history.add(DAY, recording(0.3, case="story"), recording(case="tale"))
    history.confirm(first, *[recording(case="story")] * 3)
    history.add(DAY / 2, *both())
    departs(history, HOUR)
    assert set(history.found()) == {"answers-renewed", "recording-departed healthy"}


def test_where_equal_bits_are_promised_load_and_restarts_excuse_nothing():
    """The condition of an answer does not count then."""
    promise = (Reading(name=ENDPOINT_REPEATS, value="always"),)
    history = History()
    for condition in ("idle", "loaded"):
        vectors = [dataclasses.replace(GOOD, condition=condition)] * LEARN
        history.add(9 * DAY, *vectors, baselining=True, readings=promise)
    loaded = dataclasses.replace(STRANGE, condition="loaded")
    first = history.add(HOUR, loaded, readings=(*promise, *told(SECOND)["readings"]))
    for number in range(3):
        history.add(HOUR - 1 - number, loaded, confirms=first.id, cases=("story",), readings=promise)
    assert "recording-departed suspect" in history.found()
