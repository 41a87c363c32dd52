"""The laws hold in a sample of short stories."""

import pytest

from tests.laws.properties import broken
from tests.laws.sample import ALONE, SHORT, pairs, seeds


@pytest.mark.parametrize(("story", "law"), pairs(SHORT, ALONE))
def test_a_law_holds(story, law):
    """Told otherwise, the same things are judged in the same way."""
    assert not (found := broken(story, law, seeds(story))), "\n".join(found)
