"""The pictures of the documentation are those of their sources, and the README's first table that of its campaign."""

from __future__ import annotations

import json
import re

import pytest

from tests import pictures
from tests.command import ROOT

FIGURES = {"that changed a bit": "changed a bit"}
"""Column of the README → column of the campaign, where they differ."""


def test_every_picture_is_shown_and_noted():
    """Each PNG of docs/pictures stands in a page, and in sources.json with what it was drawn from."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\]\([\w/]*pictures/([\w-]+\.png)\)", page.read_text())}
    assert shown == set(pictures.digests()) == set(json.loads(pictures.SOURCES.read_text()))


@pytest.mark.parametrize("name", [pictures.STATUS, pictures.FLEET])
def test_a_picture_agrees_with_its_source(name):
    """It is the picture that was drawn, from the page or the JSON as they are now; else run scripts/pictures."""
    noted = json.loads(pictures.SOURCES.read_text())[name]
    assert noted == {"source": pictures.sources()[name], "picture": pictures.digests()[name]}, "run scripts/pictures"


def rows(text: str, first: str) -> list[dict[str, str]]:
    """Return the table whose header begins with a word."""
    table = text[text.index(f"\n| {first} |") :].strip().partition("\n\n")[0].splitlines()
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [dict(zip(head, line, strict=True)) for line in body]


def test_the_figures_of_the_readme_were_measured():
    """Each share of its table is that of benchmarks/results, by fault and way of checking."""
    measured = {row["fault"]: row for row in rows((ROOT / "benchmarks/results/detection.md").read_text(), "fault")}
    told = rows((ROOT / "README.md").read_text(), "fault")
    assert len(told) >= 5
    for row in told:
        for column, text in row.items():
            figure = measured[row["fault"]][FIGURES.get(column, column)]
            share = re.search(r"\((.*)\)", figure)
            assert text == (share[1] if share else figure), (row["fault"], column)
