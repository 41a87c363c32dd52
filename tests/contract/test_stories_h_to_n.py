"""The stories from H to N take the course that is promised of them."""

from tests.contract.promise import promised

test_a_story_takes_its_course = promised("h", "n")
