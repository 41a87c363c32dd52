"""The page of a dossier: two sheets for a hardware engineer with two minutes, then appendices. One file, no scripts.

It is made from the document alone (docs/dossier.schema.json), so page and JSON cannot disagree. All text is escaped.
Every picture says in words what it shows, for text browsers and for readers who cannot see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from canaryd.dossier import pictures
from canaryd.dossier.appendices import appendices
from canaryd.dossier.summary import summary
from canaryd.formatting import format_utc
from canaryd.report import html, svg
from canaryd.report.html import escape

STYLE = """
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.faulty, .suspect { border-color: var(--bad); } .healthy { border-color: var(--good); }
.faulty strong, .suspect strong, .bad { color: var(--bad); } .healthy strong, .good { color: var(--good); }
.tight { margin: .2rem 0; }
pre { background: var(--card); padding: .7rem .9rem; white-space: pre-wrap; margin: .4rem 0; }
.plot figcaption { color: var(--ink); }
.evidence tbody th { width: 8.5rem; }
.events th, .events td:nth-child(2) { white-space: nowrap; }
li { margin: .25rem 0; } ul, ol { padding-left: 1.3rem; }
@media (max-width: 30rem) {
  .events, .events tbody, .events tr, .events td, .events th { display: block; border: 0; padding: 0;
    white-space: normal; }
  .events thead { display: none; } .events tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
}
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem; }
h2.part { border-top: 3px solid var(--ink); margin-top: 3rem; }
@page { margin: 12mm; }
@media print {
  :root { color-scheme: light; font-size: 9pt; }
  body { max-width: none; padding: 0; font-size: 1rem; line-height: 1.35; }
  h1 { font-size: 15pt; } h2 { font-size: 12pt; margin-top: 1.2rem; break-after: avoid; }
  h3 { break-after: avoid; }
  .sheet { break-after: page; } .sheet h2 { margin-top: .8rem; } p { margin: .5rem 0; }
  .sheet .facts { table-layout: fixed; }
  .sheet .facts td { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
  th, td { padding: .18rem .6rem .18rem 0; }
  h2.part ~ section :is(th, td) { overflow-wrap: break-word; }
  h2.part { border: 0; margin: 0; } figure, tr, pre { break-inside: avoid; } .pair { grid-template-columns: 1fr 1fr; }
  .maps { grid-template-columns: 1fr 1fr; } details::details-content { content-visibility: visible; display: block; }
}
"""


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a dossier."""
    footer = f"Made by canaryd {document['canaryd']}, {format_utc(document['generated'])}."
    body = [
        f"<main><h1>{escape(document['title'])}</h1>",
        summary(document),
        f'<h2 class="part">Appendices</h2>{appendices(document)}',
        f'<p class="soft">{escape(footer)}</p></main>',
    ]
    return html.document(document["title"], html.STYLE + html.TABLES + STYLE + pictures.STYLE + svg.STYLE, body)
