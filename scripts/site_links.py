"""Hook of mkdocs: links of a page to files outside of docs/ lead to the published repository."""
# ruff: noqa: INP001  mkdocs loads it by path

from __future__ import annotations

import re

REPOSITORY = "https://github.com/canaryd/canaryd/blob/main/"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page's text with "](../X)" as "](REPOSITORY X)"."""
    return re.sub(r"\]\(\.\./([^)\s]*)\)", rf"]({REPOSITORY}\1)", markdown)
