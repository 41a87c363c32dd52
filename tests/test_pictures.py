"""The pictures of the documentation are those of their sources, and the README's figures those of their campaign."""

from __future__ import annotations

import json
import re

import pytest

from tests import pictures
from tests.command import ROOT


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
    """How many faults changed a bit, and the share that the best other tool found."""
    campaign = (ROOT / "benchmarks/results/detection.md").read_text()
    told = re.search(
        r"found all of ([\d,]+) injected faults that changed a bit,\s+the best\s+other\s+tool\s+([\d.]+) %",
        (ROOT / "README.md").read_text(),
    )
    assert told
    assert f"canaryd found\n{told[1]} of these (100.000 %)" in campaign
    (row,) = (row for row in rows(campaign, "fault") if row["fault"] == "all")
    others = [text for tool, text in row.items() if tool not in ("fault", "canaryd")]
    assert max(float(share) for share in re.findall(r"\(([\d.]+) %\)", " ".join(others))) == float(told[2])
