"""The tables of docs/json.md, for the tests that compare them with a schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tests.command import ROOT

PAGE = ROOT / "docs/json.md"


def section(title: str) -> str:
    """Return the text below the page's heading "## title"."""
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def tables(text: str) -> list[list[str]]:
    """Return the names of the fields in each table of a text, sorted."""
    found = re.findall(r"((?:^\|.*\n)+)", text, re.MULTILINE)
    return [
        sorted(
            x
            for names in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", t, re.MULTILINE)
            for x in names.strip("`").split("`, `")
        )
        for t in found
    ]


def objects(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return every object that a schema describes."""
    return [schema, *(part for part in schema["$defs"].values() if "properties" in part)]


def unexplained(title: str, schema: Mapping[str, Any], shared: Iterable[str]) -> list[list[str]]:
    """Return the objects of a schema without a table of exactly their fields, and the tables without an object.

    A table stands in the command's own section, or is one of those that several commands share.
    """
    common = section("Shared objects")
    parts = [tables(common.partition(f"### `{name}`")[2].partition("\n### ")[0])[0] for name in shared]
    written = sorted([*tables(section(title)), *parts])
    wanted = sorted(sorted(part["properties"]) for part in objects(schema))
    return [one for one in [*written, *wanted] if written.count(one) != wanted.count(one)]
