"""Tables, lists and notes of a dossier's page as HTML; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence

from canaryd.report.html import escape


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values; those without a value are left out."""
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in pairs if v)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[int] = ()) -> str:
    """Return a table; the first column heads its row, columns in `numeric` are aligned to the right.

    On a narrow screen a table of more than two columns becomes a list of cards, whose cells repeat their heading.
    """
    align = [' class="n"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col"{a}>{escape(c)}</th>' for a, c in zip(align, columns, strict=True))
    lines = []
    for first, *rest in rows:
        cells = [f'<td data-c="{escape(columns[i])}"{align[i]}>{escape(v)}</td>' for i, v in enumerate(rest, 1)]
        lines.append(f'<tr><th scope="row"{align[0]}>{escape(first)}</th>{"".join(cells)}</tr>')
    kind = ' class="cards"' if len(columns) > 2 else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def bullets(items: Sequence[str]) -> str:
    """Return a list, or "Nothing."."""
    return f"<ul>{''.join(f'<li>{escape(i)}</li>' for i in items)}</ul>" if items else "<p>Nothing.</p>"


def soft(text: str) -> str:
    """Return a note."""
    return f'<p class="soft">{escape(text)}</p>'
