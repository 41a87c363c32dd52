"""The documentation builds as a site, every page is in its navigation, and it loads nothing from elsewhere."""

from __future__ import annotations

import re

import yaml

from tests.command import ROOT
from tests.programs import accepted, needed

PARTS = ["Operate", "Understand", "Extend"]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tag names a Python function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> list:
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]


def test_the_navigation_is_that_of_the_index():
    """Three parts with the pages of docs/README.md, in its order."""
    first, *parts = navigation()
    assert first == "README.md"
    assert [name for part in parts for name in part] == PARTS
    index = (ROOT / "docs/README.md").read_text()
    for part in parts:
        ((name, entries),) = part.items()
        listed = index.partition(f"## {name}\n")[2].partition("\n## ")[0]
        assert [page for entry in entries for page in entry.values()] == re.findall(r"\]\(([\w-]+\.md)\)", listed)


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    """No dead link, no page left out; styles, scripts, fonts and pictures are its own, and there is a search index."""
    mkdocs = needed("mkdocs", untested="the documentation site was not built (pip install --group docs)")
    accepted(mkdocs, "build", "--strict", "--quiet", "--config-file", ROOT / "mkdocs.yml", "--site-dir", tmp_path)
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages | {"index", "404"} == {path.stem for path in tmp_path.glob("*.html")}
    assert list(tmp_path.glob("search/search_index.*"))
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"([^\"]*)\"", page.read_text())
        loaded += re.findall(
            r"<link\b[^>]*\brel=\"(?:stylesheet|preconnect|icon)\"[^>]*\bhref=\"([^\"]*)\"", page.read_text()
        )
        loaded += re.findall(
            r"<link\b[^>]*\bhref=\"([^\"]*)\"[^>]*\brel=\"(?:stylesheet|preconnect|icon)\"", page.read_text()
        )
        assert [where for where in loaded if re.match(r"(?:https?:)?//", where)] == [], page.name
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text()), sheet.name
