"""Building blocks of all HTML pages: head and foot, escaping, colours, tables. A page is one file and loads nothing."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

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
"""The style sheet that the dossier, the comparison and the characterisation share; each adds rules of its own."""
TABLES = """
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .6rem; }
.verdict { border-left: .4rem solid var(--calm); background: var(--card); padding: .8rem 1rem; margin: 0 0 1rem; }
.verdict strong { display: block; font-size: 1.15rem; }
.banner { border: 2px solid var(--calm); padding: .6rem .9rem; margin: 0 0 1rem; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
@media screen and (min-width: 48rem) { th, td { overflow-wrap: break-word; } }
tbody th { font-weight: 600; } .facts th { width: 11rem; color: var(--soft); }
@media (max-width: 30rem) {
  body { padding: 1rem .7rem 2rem; } .facts th { width: 7rem; }
  .cards, .cards tbody, .cards tr, .cards th { display: block; border: 0; padding: 0; }
  .cards thead, .cards td:empty { display: none; } .cards tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .cards td, .cards td.n { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0;
    text-align: right; white-space: normal; }
  .cards td::before { content: attr(data-c); color: var(--soft); text-align: left; flex: none; max-width: 50%; }
}
"""
"""The additional style sheet of pages with a verdict and with `facts` and `table`."""


def escape(text: object) -> str:
    """Return a text as HTML; its control characters become "?", because a device may have any name."""
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


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table of names and values; a pair whose value is empty is left out."""
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in pairs if v != "")
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    numeric: Sequence[int] = (),
    cell: Callable[[object], str] = escape,
) -> str:
    """Return an HTML table; the first column is the rows' headings, columns numbered in `numeric` are aligned right.

    On a narrow screen a table of more than two columns becomes a list of cards, whose cells repeat their heading.
    `cell` is a function that returns the HTML of a cell's value.
    """
    align = [' class="n"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col"{a}>{escape(c)}</th>' for a, c in zip(align, columns, strict=True))
    lines = []
    for first, *rest in rows:
        cells = [f'<td data-c="{escape(columns[i])}"{align[i]}>{cell(v)}</td>' for i, v in enumerate(rest, 1)]
        lines.append(f'<tr><th scope="row">{cell(first)}</th>{"".join(cells)}</tr>')
    kind = ' class="cards"' if len(columns) > 2 else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
