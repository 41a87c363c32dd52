"""The page of a dossier: one HTML file that needs no network, no script, and two minutes of a hardware engineer.

Made from the document alone (docs/dossier.schema.json), so that page and JSON cannot disagree. Every text is escaped;
every picture has its words in a title and a table, for text browsers and for readers who do not see it.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaryd.formatting import moment, quantity
from canaryd.report import svg
from canaryd.report.svg import Line, Mark

SHOWN = 12
"""Failing cases in the table; dossier.json has more."""
MAPS, MOST_BITS = 3, 4
LATEST = 60
"""Entries of the timeline on the page; dossier.json has more."""
ELEMENTS = 12
"""Wrong elements written out on the page."""
Document = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #55606b; --line: #d5dae0; --paper: #fff; --card: #f4f6f8;
  --good: #1a7f4b; --bad: #b3261e; --calm: #7a5000; --heat: 179 38 30; --empty: #e9ecf0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a3adb8; --line: #3a424b; --paper: #15181c;
  --card: #1e2329; --good: #58c98b; --bad: #ff8a80; --calm: #e0b050; --heat: 255 138 128; --empty: #262c33; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.2rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.verdict { border-left: .4rem solid var(--calm); background: var(--card); padding: .8rem 1rem; margin: 0 0 1rem; }
.verdict strong { display: block; font-size: 1.15rem; }
.faulty, .suspect { border-color: var(--bad); } .healthy { border-color: var(--good); }
.faulty strong, .suspect strong, .bad { color: var(--bad); } .healthy strong, .good { color: var(--good); }
.banner { border: 2px solid var(--calm); padding: .6rem .9rem; margin: 0 0 1rem; font-weight: 600; }
.soft { color: var(--soft); } .tight { margin: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
tbody th { font-weight: 600; } .facts th { width: 11rem; color: var(--soft); }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { background: var(--card); padding: .7rem .9rem; white-space: pre-wrap; margin: .4rem 0; }
figure { margin: 0 0 1rem; } figcaption { color: var(--soft); font-size: .94rem; }
.maps { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.2rem; }
.map svg { display: block; width: 100%; max-width: 34rem; height: auto; margin-top: .4rem; }
.map text, .bars text { fill: currentColor; font: 14px system-ui, sans-serif; }
.map .cell { fill: var(--empty); } .map .hit { fill: rgb(var(--heat)); }
.map .unknown { fill: var(--paper); }
.map .frame { fill: none; stroke: var(--soft); }
.bars svg { display: block; width: 100%; max-width: 26rem; height: auto; }
.bars .bar { fill: rgb(var(--heat)); } .bars .part { fill: var(--empty); } .bars .axis { stroke: var(--soft); }
.plot figcaption { color: var(--ink); }
.events th, .events td:nth-child(2) { white-space: nowrap; }
li { margin: .25rem 0; } ul, ol { padding-left: 1.3rem; }
@media (max-width: 30rem) {
  body { padding: 1rem .7rem 2rem; } .facts th { width: 7rem; }
  .cards, .cards tbody, .cards tr, .cards th { display: block; border: 0; padding: 0; }
  .cards thead { display: none; } .cards tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .cards td, .cards td.n { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0;
    text-align: right; white-space: normal; }
  .cards td::before { content: attr(data-c); color: var(--soft); text-align: left; flex: none; max-width: 50%; }
  .events, .events tbody, .events tr, .events td, .events th { display: block; border: 0; padding: 0;
    white-space: normal; }
  .events thead { display: none; } .events tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
}
@media print { body { max-width: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""

SUBJECTS = {
    "device": "the device's own result",
    "host": "the golden itself, which the host made in two ways that disagree",
    "comparator": "the device's comparison, which the host repeated on the same bytes",
}
EXACTNESS = {
    "U": "one bit pattern is right on every healthy device: every partial sum is exactly representable",
    "R": "one bit pattern is right wherever an exact sum is rounded once, to nearest even",
    "M": "decided by a margin that no healthy rounding crosses",
}
FIRMWARE = {
    "bus_id": "Bus id",
    "board_part_number": "Board part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "microcode": "Microcode",
    "driver": "Driver",
}
"""What of the identity has a row of its own."""
KINDS = {"wrong": "bad", "not completed": "calm", "xid": "bad", "verdict": "mark", "stack": "calm", "ack": "mark"}
"""Kind of a timeline entry → role of its mark in a plot."""


def page(document: Document) -> str:
    """Return the page of a dossier."""
    verdict = document["verdict"]
    kind = document["kind"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_t(document['title'])}</title><style>{STYLE}{svg.STYLE}</style></head><body><main>",
        f"<h1>{_t(document['title'])}</h1>",
    ]
    if document["drill"]:
        text = f"DRILL: canaryd injected “{document['drill']}” in software. Nothing here speaks against the part."
        parts.append(f'<p class="banner">{_t(text)}</p>')
    elif document["why_not_rma"] and kind == "evidence":
        parts.append(f'<p class="banner">Not an RMA dossier: {_t(document["why_not_rma"])}.</p>')
    if document["redacted"]:
        text = (
            "Redacted: names of hosts, serial numbers, uuids, bus ids, paths, addresses and URLs are pseudonyms in "
            "square brackets. Equal things have equal pseudonyms in this dossier, and others in any other."
        )
        parts.append(f'<p class="banner">{text}</p>')
    state = "drill" if document["drill"] else verdict["state"]
    parts.append(
        f'<div class="verdict {_t(state)}"><strong>{_t(_lead(document))}</strong>{_t(document["summary"])}'
        + (f'<p class="tight">{_t(verdict["note"])}</p>' if verdict["note"] else "")
        + "</div>"
    )
    for heading, body in (
        ("What part", _identity(document)),
        ("What failed", _failed(document)),
        ("Where", _where(document)),
        ("Which bits", _bits(document)),
        ("Why this verdict", _findings(document)),
        ("Peers on the same bytes", _peers(document)),
        ("How often, and what is ruled out", _rates(document)),
        ("What happened when", _timeline(document)),
        ("How to reproduce it", _reproduce(document)),
        ("Next step", _list(document["next_step"])),
        ("What was not checked", _list(document["not_checked"])),
        ("What is in this archive", _contents(document)),
    ):
        parts.append(f"<section><h2>{heading}</h2>{body}</section>")
    made = f"Made by canaryd {document['canaryd']}, {moment(document['generated'])}"
    made += f"; all times are {document['timezone']}."
    parts.append(f'<p class="soft">{_t(made)}</p></main></body></html>\n')
    return "\n".join(parts)


def _t(text: object) -> str:
    return html.escape(str(text))


def _lead(document: Document) -> str:
    verdict = document["verdict"]
    cause = "" if verdict["cause"] == "none" else f", cause: {verdict['cause']}"
    return f"{'DRILL: ' if document['drill'] else ''}{verdict['state'].upper()}{cause}"


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{_t(k)}</th><td>{_t(v)}</td></tr>' for k, v in pairs if v)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[int] = ()) -> str:
    """Return a table; the first column heads its row, `numeric` ones stand to the right.

    On a narrow screen a table of more than two columns becomes a list of cards, whose cells repeat their heading.
    """
    head = "".join(f'<th scope="col"{_n(i, numeric)}>{_t(c)}</th>' for i, c in enumerate(columns))
    lines = []
    for first, *rest in rows:
        cells = [f'<td data-c="{_t(columns[i])}"{_n(i, numeric)}>{_t(v)}</td>' for i, v in enumerate(rest, 1)]
        lines.append(f'<tr><th scope="row"{_n(0, numeric)}>{_t(first)}</th>{"".join(cells)}</tr>')
    kind = ' class="cards"' if len(columns) > 2 else ""
    return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _n(column: int, numeric: Sequence[int]) -> str:
    return ' class="n"' if column in numeric else ""


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_t(i)}</li>' for i in items)}</ul>" if items else "<p>Nothing.</p>"


def _share(value: float | None) -> str:
    if value is None:
        return "not known"
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    return f"{100 * value:.3g}%" if value >= 1e-5 else f"1 of {1 / value:,.0f}"


def _rate(of: Mapping[str, Any]) -> str:
    """Return "3 of 3 (95 %: 29.2% to 100%)"."""
    return f"{_counted(of)} (95 %: {_share(of['low'])} to {_share(of['high'])})" if of["total"] else "none"


def _counted(of: Mapping[str, Any]) -> str:
    return f"{of['wrong']:,} of {of['total']:,}" if of["total"] else "none"


# --- Sections --------------------------------------------------------------------------------------------------------


def _identity(document: Document) -> str:
    identity = document["identity"]
    seen = f"{moment(identity['first_seen'])} to {moment(identity['last_seen'])}" if identity["first_seen"] else ""
    pairs = [
        ("Serial number", identity["serial"] or "not given by the device"),
        ("uuid", identity["uuid"] + (" (weak: names no physical part)" if identity["weak"] else "")),
        ("Model", identity["model"]),
        ("Name on its host", f"{identity['name']}{'' if identity['present'] else ', not present now'}"),
        ("Host", identity["host"]),
        ("Instance of", identity["parent"]),
        *((label, identity["detail"].get(key, "")) for key, label in FIRMWARE.items()),
        ("Seen by canaryd", seen),
    ]
    rest = {k: v for k, v in identity["detail"].items() if k not in (*FIRMWARE, "serial")}
    return _facts([*pairs, ("Further", _joined(rest)), ("Stack under test", _joined(identity["stack"]))])


def _joined(facts: Mapping[str, str]) -> str:
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in sorted(facts.items()) if v not in ("", "none"))


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in few words: "0…14, 17"."""
    stretches: list[list[int]] = []
    for n in numbers:
        if stretches and n == stretches[-1][-1] + 1:
            stretches[-1].append(n)
        else:
            stretches.append([n])
    return ", ".join(", ".join(map(str, s)) if len(s) < 3 else f"{s[0]}…{s[-1]}" for s in stretches)


def _failed(document: Document) -> str:
    failures = document["failures"]
    if not failures:
        looked = sum(p["results"]["total"] for p in document["probes"])
        text = f"No exact result was wrong among {looked:,}." if looked else "No result of this device was compared."
        unknown = sum(p["unknown"] for p in document["probes"])
        if unknown:
            text += f" {unknown:,} recordings were beyond what is known of this device: see “Why this verdict”."
        return f"<p>{text}</p>"
    first = failures[0]
    pairs = [
        ("Probe and case", f"{first['probe']} {first['case']}"),
        ("Operands", f"{first['shape']}, seed {first['seed']}"),
        ("What is wrong", SUBJECTS[first["subject"]]),
        ("Pattern", first["pattern"]),
        ("Uploads wrong", _rate(first["uploads"])),
        ("Results wrong", _counted(first["results"])),
        ("Runs wrong", _rate(first["runs"])),
        ("Repeated at once", first["reproduced"]),
        ("Place", _placed(first)),
        ("First and last", f"{moment(first['first'])} and {moment(first['last'])}"),
        ("Instruction set", first["instruction_set"]),
        ("The right answer", EXACTNESS[first["exactness"]]),
        ("Reservation", "" if first["characterised"] else "exactness is not shown on this backend: cannot accuse"),
    ]
    rows = [
        (
            f"{f['probe']} {f['case']}" + (f" [{f['instruction_set']}]" if f["instruction_set"] else ""),
            _counted(f["uploads"]),
            _counted(f["results"]),
            f"{f['runs']['wrong']} of {f['runs']['total']}",
            _placed(f),
            ranges([int(b) for b in f["bits"]]) or "none written down",
            moment(f["last"]),
        )
        for f in failures[:SHOWN]
    ]
    more = len(failures) + document["failures_omitted"] - SHOWN
    table = _table(("case", "uploads wrong", "results wrong", "runs wrong", "place", "bits", "last seen"), rows)
    rest = f'<p class="soft">{more} more failing cases are in dossier.json.</p>' if more > 0 else ""
    note = (
        '<p class="soft">The intervals are of Clopper and Pearson. Results have none: those of one upload are not '
        "independent, and a run stops repeating an upload after three wrong ones.</p>"
    )
    return _facts(pairs) + (f"<h3>All failing cases</h3>{table}" if len(failures) > 1 else "") + rest + note


def _placed(failure: Mapping[str, Any]) -> str:
    wrong = [p for p in failure["places"] if p["results"]["wrong"]]
    return ", ".join(f"{p['place']} ({_counted(p['results'])} results)" for p in wrong) or "not known"


def _where(document: Document) -> str:
    parts = []
    places = document["places"]
    if places:
        rates = [(p["place"], _counted(p["results"]), _rate(p["uploads"])) for p in places]
        parts.append("<h3>By core or unit</h3>")
        parts.append(_table(("place", "results wrong", "uploads wrong"), rates))
        if {p["place"] for p in places} == {"device"}:
            parts.append('<p class="soft">The probes do not choose which unit of this device computes a tile.</p>')
    mapped = [f for f in document["failures"] if f["map"]][:MAPS]
    if mapped:
        parts.append("<h3>In the result</h3>")
        parts.append('<div class="maps">')
    for failure in mapped:
        shared = "; ".join(f"{axis} {text}" for axis, text in failure["lines"].items())
        told = f'<p class="tight">The wrong elements share: {_t(shared)}.</p>' if shared else ""
        parts.append(f"<div>{_map(failure)}{told}</div>")
    if mapped:
        parts.append("</div>")
    shown = next((f for f in mapped if f["elements"]), None)
    if shown:
        rows = [
            (str(e["index"]), e["expected"], e["observed"], _flipped(e["expected"], e["observed"]))
            for e in shown["elements"][:ELEMENTS]
        ]
        parts.append(f"<h3>Wrong elements of {_t(shown['case'])}</h3>")
        parts.append(_table(("index", "expected bits", "observed bits", "flipped"), rows))
        left = len(shown["elements"]) - ELEMENTS
        if left > 0:
            parts.append(f'<p class="soft">{left:,} more are in {_t(shown["exhibit"] or "dossier.json")}.</p>')
    return "".join(parts) or "<p>No wrong element is known, so there is no place to name.</p>"


def _flipped(expected: str, observed: str) -> str:
    changed = int(expected, 16) ^ int(observed, 16)
    return ranges([b for b in range(changed.bit_length()) if changed >> b & 1])


def _map(failure: Mapping[str, Any]) -> str:
    """Return a heat map of the wrong elements: rows downwards, columns to the right, darker where there are more."""
    m = failure["map"]
    high, wide = m["row_bins"], m["column_bins"]
    size = max(4, min(24, 416 // max(high, wide)))
    left, top = 64, 28
    width, height = left + wide * size + 8, top + high * size + 26
    width = max(width, 300)
    most = max(n for _, _, n in m["counts"])
    few = f"{m['elements']:,} wrong elements written down"
    cut = failure["wrong_elements"] > m["elements"]
    if cut:
        few += f" of {failure['wrong_elements']:,}, the first of each upload"
    cell = f"a cell is {_cells(m['rows'], high)} x {_cells(m['columns'], wide)} elements"
    title = f"{failure['case']}: {few}, in a result of {m['rows']:,} rows and {m['columns']:,} columns; {cell}"
    fullest = sorted(m["counts"], key=lambda c: -c[2])[:5]
    told = "; ".join(
        f"{_span('row', r, high, m['rows'])}, {_span('column', c, wide, m['columns'])}: {n:,}" for r, c, n in fullest
    )
    parts = [
        f'<figure class="map"><figcaption>{_t(title)}. Fullest cells: {_t(told)}.</figcaption>',
        f'<svg viewBox="0 0 {width} {height}" role="img"><title>{_t(title)}</title><desc>{_t(told)}</desc>',
        f'<rect class="cell" x="{left}" y="{top}" width="{wide * size}" height="{high * size}"/>',
    ]
    for r, c, n in m["counts"]:
        # A cell with one element among many must still be seen: opacity begins at a third.
        opacity = 0.35 + 0.65 * n / most
        where = f"{_span('row', r, high, m['rows'])}, {_span('column', c, wide, m['columns'])}: {n:,} wrong"
        parts.append(
            f'<rect class="hit" x="{left + c * size}" y="{top + r * size}" width="{size}" height="{size}"'
            f' fill-opacity="{opacity:.2f}"><title>{_t(where)}</title></rect>'
        )
    if cut:  # elements are written down in order: what lies beyond the last one is not known to be right
        known = 1 + max(r for r, _, _ in m["counts"])
        below = f'y="{top + known * size}" width="{wide * size}" height="{(high - known) * size}"'
        parts.append(f'<rect class="unknown" x="{left}" {below}/>')
        if (high - known) * size > 30:
            middle = f'x="{left + wide * size / 2:.0f}" y="{top + (high + known) * size / 2:.0f}"'
            parts.append(f'<text {middle} text-anchor="middle">not written down</text>')
    parts.append(
        f'<rect class="frame" x="{left}" y="{top}" width="{wide * size}" height="{high * size}"/>'
        f'<text x="{left}" y="{top - 10}">{_t(m["axes"][1])} 0</text>'
        f'<text x="{left + wide * size}" y="{top - 10}" text-anchor="end">{m["columns"] - 1:,}</text>'
        f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{_t(_short(m["axes"][0]))} 0</text>'
        f'<text x="{left - 8}" y="{top + high * size}" text-anchor="end">{m["rows"] - 1:,}</text>'
    )
    return "".join([*parts, "</svg></figure>"])


def _short(axis: str) -> str:
    return axis if len(axis) < 8 else "//"


def _cells(size: int, bins: int) -> str:
    return f"{size // bins}" if size % bins == 0 else f"about {size / bins:.1f}"


def _span(name: str, cell: int, bins: int, size: int) -> str:
    """Return what a cell of a map covers along one axis: "row 2", "rows 4…7"."""
    first, last = -(-cell * size // bins), -(-(cell + 1) * size // bins) - 1
    return f"{name} {first}" if first >= last else f"{name}s {first}…{last}"


def _bits(document: Document) -> str:
    if not document["bits"]:
        return "<p>No flipped bit is known.</p>"
    parts = []
    for form in document["bits"]:
        total = sum(b["count"] for b in form["bits"])
        most = max(form["bits"], key=lambda b: b["count"])
        title = f"{form['format']}: bit {most['bit']}{_meaning(most['name'])} was flipped most often"
        title += f", {most['count']:,} {'times' if most['count'] > 1 else 'time'}"
        parts.append(f'<figure class="bars"><figcaption>{_t(title)}.</figcaption>{_bars(form, title)}</figure>')
        rows = [
            (b["bit"], b["name"] or "not known", f"{b['count']:,}", f"{b['count'] / total:.1%}")
            for b in sorted(form["bits"], key=lambda b: -b["count"])[:MOST_BITS]
        ]
        parts.append(_table((f"bit of {form['format']}", "part", "flipped", "share"), rows, (2, 3)))
        if len(form["bits"]) > MOST_BITS:
            parts.append(f'<p class="soft">{len(form["bits"]) - MOST_BITS} more bits are in dossier.json.</p>')
    return "".join(parts)


def _meaning(name: str) -> str:
    return f" ({name})" if name else ""


def _bars(form: Mapping[str, Any], title: str) -> str:
    """Return a histogram over the bits of a format, the highest (the sign) on the left as a number is written.

    As wide as the narrowest phone, so that its letters can be read there; wider screens enlarge it.
    """
    width = form["width"]
    count = {b["bit"]: b["count"] for b in form["bits"]}
    most = max(count.values())
    room, left, top, tall = 320, 12 + 8 * len(f"{most:,}"), 16, 110
    step = room / width
    told = ", ".join(f"bit {b['bit']}{_meaning(b['name'])}: {b['count']:,}" for b in form["bits"])
    box = f'viewBox="0 0 {left + room + 8} {top + tall + 46}"'
    parts = [f'<svg {box} role="img"><title>{_t(title)}</title><desc>{_t(told)}</desc>']
    for bit in range(width):
        x, thick = left + (width - 1 - bit) * step, 0.8 * step
        size = tall * count.get(bit, 0) / most
        parts.append(f'<rect class="part" x="{x + 0.1 * step:.1f}" y="{top + tall}" width="{thick:.1f}" height="6"/>')
        if bit in count:
            parts.append(
                f'<rect class="bar" x="{x + 0.1 * step:.1f}" y="{top + tall - size:.1f}" width="{thick:.1f}"'
                f' height="{max(size, 1.5):.1f}"><title>bit {bit}: {count[bit]:,}</title></rect>'
            )
        if bit % (4 if width <= 32 else 8) == 0 or bit == width - 1:
            parts.append(f'<text x="{x + step / 2:.1f}" y="{top + tall + 22}" text-anchor="middle">{bit}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{left + room}" y1="{top + tall}" y2="{top + tall}"/>')
    parts.append(f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{most:,}</text>')
    parts.append(f'<text x="{left - 6}" y="{top + tall}" text-anchor="end">0</text>')
    parts.append(f'<text x="{left}" y="{top + tall + 38}">{_t(_legend(form["format"], width))}</text></svg>')
    return "".join(parts)


def _legend(form: str, width: int) -> str:
    fields = {"float64": "63 sign, 62…52 exponent, 51…0 mantissa", "float32": "31 sign, 30…23 exponent, 22…0 mantissa"}
    fields |= {"bfloat16": "15 sign, 14…7 exponent, 6…0 mantissa", "float16": "15 sign, 14…10 exponent, 9…0 mantissa"}
    return fields.get(form, f"{width - 1} sign" if form.startswith("int") else "")


def _findings(document: Document) -> str:
    findings = document["verdict"]["findings"]
    if not findings:
        return "<p>No rule of the judge has anything to say.</p>"
    parts = []
    for f in findings:
        kind = "note" if f["state"] == "healthy" else f"{f['state']}, cause {f['cause']}"
        parts.append(f"<h3>{_t(kind)} <span class='soft'>({_t(f['rule'])})</span></h3><p>{_t(f['message'])}</p>")
        if f["rivals"]:
            items = "".join(
                f"<li>{_t(r['cause'])}, {'rejected' if r['rejected'] else 'still open'}: {_t(r['why'])}</li>"
                for r in f["rivals"]
            )
            parts.append(f'<p class="tight">Other explanations that were considered:</p><ul>{items}</ul>')
    return "".join(parts)


def _peers(document: Document) -> str:
    peers = document["peers"]
    if not peers:
        return "<p>canaryd knows no other part of this model on this host, so no peer could be asked.</p>"
    rows = [
        (
            p["name"],
            p["uuid"],
            p["state"],
            f"{p['same_bytes_wrong']:,} of {p['same_bytes']:,} wrong" if p["same_bytes"] else "not asked",
            f"{p['wrong']:,} of {p['results']:,} wrong",
            "yes" if p["same_stack"] else "no",
        )
        for p in peers
    ]
    columns = ("peer", "uuid", "state", "the failing operands", "all results of these probes", "same stack")
    return _table(columns, rows)


def _rates(document: Document) -> str:
    rows = [
        (
            p["probe"],
            f"{p['runs']:,}",
            _counted(p["results"]),
            _rate(p["uploads"]),
            f"more than {_share(p['rules_out'])}" if p["rules_out"] is not None else "nothing",
            moment(p["last"]),
        )
        for p in document["probes"]
    ]
    if not rows:
        return "<p>No run is kept, so nothing is ruled out.</p>"
    columns = ("probe", "runs", "results wrong", "uploads wrong", "fault rate ruled out", "last run")
    note = (
        '<p class="soft">A probe without a wrong result rules out a fault that fires more often than that, under the '
        "loads and temperatures that it met; a clean result is no acquittal.</p>"
    )
    return _table(columns, rows, (1,)) + note


def _timeline(document: Document) -> str:
    entries = document["timeline"]
    parts = []
    for course in document["series"]:
        if len(course["points"]) > 1:
            line = Line(name=course["reading"], points=[(at, value) for at, value in course["points"]])
            marks = list(_marks(entries))
            start, end = svg.span([line], marks)
            parts.append(svg.plot(course["reading"], course["unit"], [line], marks, start=start, end=end))
    if not entries:
        return "".join(parts) + "<p>Nothing is on record.</p>"
    shown = entries[-LATEST:][::-1]
    body = "".join(
        f'<tr><th scope="row">{_t(moment(e["at"]))}</th><td>{_t(e["kind"])}</td>'
        f"<td>{_t(e['text'])}{_t(_conditions(e['conditions']))}</td></tr>"
        for e in shown
    )
    head = "<thead><tr><th>time</th><th>kind</th><th>what</th></tr></thead>"
    parts.append(f'<table class="events">{head}<tbody>{body}</tbody></table>')
    more = len(entries) - len(shown)
    if more or document["timeline_omitted"]:
        omitted = document["timeline_omitted"]
        gone = f", and {omitted:,} before them in canaryd's store" if omitted else ""
        parts.append(f'<p class="soft">Newest first; {more:,} earlier entries are in dossier.json{gone}.</p>')
    return "".join(parts)


def _conditions(conditions: Mapping[str, Any]) -> str:
    told = [quantity(float(c["value"]), c["unit"]) for c in conditions.values() if isinstance(c["value"], (int, float))]
    return f" [at {', '.join(told)}]" if told else ""


def _marks(entries: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    for entry in entries[-LATEST:]:
        yield Mark(at=entry["at"], label=entry["kind"], role=KINDS.get(entry["kind"], "calm"))


def _reproduce(document: Document) -> str:
    laid = [f for f in document["failures"] if f["exhibit"] and not f["exhibit_absent"]]
    parts = []
    if laid:
        parts.append("<p>With torch alone, from the directory of this page; 1000 is the number of runs:</p>")
        name = document["identity"]["torch_name"]
        parts += [f"<pre>python {_t(f['exhibit'])}/reproduce.py {_t(name)} 1000{_t(_core(f))}</pre>" for f in laid]
        parts.append(
            "<p>It prints which elements and bits differ from the golden, and ends with status 1 if any run was "
            "wrong, 0 if none was, 2 if it could not be run. On a healthy part it ends with 0.</p>"
        )
        if any(_core(f) for f in laid):
            parts.append("<p>--core names the core that failed; without it the script takes the same one.</p>")
    if document["reproduce"]:
        parts.append("<p>With canaryd:</p>")
        parts += [f"<pre>{_t(c['command'])}</pre>" for c in document["reproduce"]]
    why = sorted({f["exhibit_absent"] for f in document["failures"] if f["exhibit_absent"]})
    if why and not laid:
        parts.append(f"<p>No script without canaryd: {_t('; '.join(why))}.</p>")
    if document["drill"]:
        parts.append("<p>A drill's fault is canaryd's own: neither way shows it on a sound part.</p>")
    return "".join(parts) or "<p>There is no failing result to reproduce.</p>"


def failing_core(failure: Mapping[str, Any]) -> int | None:
    """Return the processor's core on which a case was wrong most often; None where no core is known."""
    wrong = [p for p in failure["places"] if p["results"]["wrong"] and p["unit"] == "core" and len(p["numbers"]) == 1]
    worst = max(wrong, key=lambda p: p["results"]["wrong"], default=None)
    return None if worst is None else int(worst["numbers"][0])


def _core(failure: Mapping[str, Any]) -> str:
    core = failing_core(failure)
    return "" if core is None else f" --core {core}"


def _contents(document: Document) -> str:
    parts = [_table(("file", "what it is"), [(c["file"], c["what"]) for c in document["contents"]])]
    if document["absent"]:
        parts.append("<h3>Not included, because</h3>")
        parts.append(_table(("file", "why not"), [(a["file"], a["why"]) for a in document["absent"]]))
    return "".join(parts)
