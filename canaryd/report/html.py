"""What all HTML pages share: head and foot, escaping, colours. A page is one file: no script, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Iterable

from canaryd.facts import printable

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #55606b; --line: #d5dae0; --paper: #fff; --card: #f4f6f8;
  --good: #1a7f4b; --bad: #b3261e; --calm: #7a5000; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a3adb8; --line: #3a424b; --paper: #15181c;
  --card: #1e2329; --good: #58c98b; --bad: #ff8a80; --calm: #e0b050; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.2rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
.soft { color: var(--soft); } .wide { overflow-x: auto; }
"""
"""The base style sheet of the dossier and of the comparison, which add their own rules."""


def escape(text: object) -> str:
    """Return a text as HTML. Its control characters become "?": a device may call itself anything."""
    return html.escape("\n".join(map(printable, str(text).split("\n"))))


def document(title: str, style: str, body: Iterable[str], *, head: str = "") -> str:
    """Return a whole page. `title` is plain text; `body` and `head` are HTML."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"{head}<title>{escape(title)}</title><style>{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )
