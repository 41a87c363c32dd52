"""The house may only get lighter (tools/weigh.py)."""

from __future__ import annotations

import ast

import pytest

from tests.command import ROOT
from tools import weigh


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        ({"rules": 41}, "rules: 41, at most 40"),
        ({"rules": 39}, "rules: 39, written 40"),
        ({"rules": 40, "lines lab": 1}, "lines lab: 1, at most 0"),
        ({}, "rules: is gone"),
    ],
)
def test_a_figure_that_grew_or_fell_is_named(now, complaint):
    """More is refused; less has to be written down, so that it stays."""
    assert [text for text in weigh.complaints(now, {"rules": 40}) if text.startswith(complaint)]


def test_a_part_may_lose_some_lines_without_writing():
    """Not every commit has to touch the file of figures."""
    assert list(weigh.complaints({"lines canaryd": 800}, {"lines canaryd": 1000})) == []
    assert list(weigh.complaints({"lines canaryd": 799}, {"lines canaryd": 1000})) != []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): pass", 1),
        ("def f(a, b):\n    if a and b or a:\n        pass", 4),
        ("def f(a):\n    return [x for x in a if x]", 3),
        ("def f(a):\n    def g():\n        if a: pass\n    return 1 if a else 2", 2),
        ("def f(a):\n    try: pass\n    except ValueError: pass\n    while a: pass", 3),
    ],
)
def test_complexity_counts_each_way_through(source, expected):
    """Branches, loops, handlers, boolean operators and comprehensions; a function inside counts for itself."""
    assert weigh.complexity(ast.parse(source).body[0]) == expected


def test_code_is_what_is_left_without_comments_and_docstrings():
    """Two lines of five."""
    source = '"""Text\nof two lines."""\n# why\nx = 1\n\ny = 2\n'
    assert weigh.code_lines(source, ast.parse(source)) == 2


def test_the_gate_weighs():
    """A ratchet that nobody turns holds nothing."""
    assert "tools/weigh.py --check" in (ROOT / ".ci/run").read_text()
