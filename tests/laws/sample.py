"""Which stories the gate holds against which laws, and what is known to break."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests.laws.further import BLAMELESS
from tests.laws.properties import LAWS, courses

SHORT = (
    "confirmed-by-reruns",
    "core-errs-on-its-links",
    "drill-on-new-model",
    "exact-endpoint-right",
    "exact-endpoint-served-anew",
    "exact-endpoint-wrong",
    "fails-under-load",
    "integers-are-shipped",
    "new-model-now-and-then",
    "nothing-checked",
    "only-recordings",
    "record-unread",
    "stuck-cell",
    "torch-cannot-see",
)
"""The stories of the gate; each is held against every law. They are the shortest, whatever they show."""
ALONE = (
    ("bug-of-two-of-three", "innocence"),
    ("bug-of-two-of-three", "retention"),
    ("power-dip", "innocence"),
    ("power-dip", "order"),
    ("storm-that-stalls-polls", "steady"),
    ("two-cores", "steady"),
)
"""Longer stories that the gate holds against some laws."""
BROKEN: Mapping[tuple[str, str], str] = {}
"""(story, law) → what breaks. The test of a pair fails where it holds again: strike its line then."""


def seeds(story: str) -> range:
    """Return the courses of chance in the gate: two where chance has a part in a story, else one."""
    return courses(story)[: 2 if len(courses(story)) > 2 else 1]


def pairs(stories: Iterable[str], alone: Iterable[tuple[str, str]] = ()) -> list[Any]:
    """Return each story with each law as parameters of a test, and more pairs; what is known to break must break."""
    every = [(story, law) for story in stories for law in LAWS if law != "innocence" or story in BLAMELESS]
    found = []
    for story, law in (*every, *alone):
        known = BROKEN.get((story, law))
        marks = [pytest.mark.xfail(reason=known, strict=True, raises=AssertionError)] if known else []
        found.append(pytest.param(story, law, marks=marks, id=f"{story}-{law}"))
    return found
