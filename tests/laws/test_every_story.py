"""The laws hold in every story, and in 500 days of a healthy fleet."""

import pytest

from tests.laws.fleet import accused, innocent
from tests.laws.properties import broken, courses, names
from tests.laws.sample import pairs
from tests.story.playing import play

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("story", "law"), pairs(names()))
def test_a_law_holds_in_every_story(story, law):
    """Told otherwise, the same things are judged in the same way, by whatever chance."""
    assert not (found := broken(story, law, courses(story))), "\n".join(found)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_healthy_fleet_is_never_accused(seed):
    """Upgrades, reboots, dips of the power, jobs that crash and noise in the log make no device suspect."""
    assert not (found := list(accused(play(innocent(500, seed), seed=seed)))), "\n".join(found)
