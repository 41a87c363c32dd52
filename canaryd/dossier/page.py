"""The page of a dossier: one HTML file without scripts or network, to be read by a hardware engineer in two minutes.

It is made from the document alone (docs/dossier.schema.json), so page and JSON cannot disagree. All text is escaped.
Every picture says in words what it shows, for text browsers and for readers who cannot see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaryd.dossier import pictures
from canaryd.dossier.places import failing_core
from canaryd.dossier.text import counted, flipped, plural, ranges, rated, share, wrong_places
from canaryd.formatting import format_time, quantity
from canaryd.report import html, svg
from canaryd.report.html import escape
from canaryd.report.svg import Line, Mark

CASES = 12
"""Failing cases in the table; dossier.json has more."""
MAPS, MOST_BITS = 3, 4
LATEST = 60
"""Entries of the timeline on the page; dossier.json has more."""
ELEMENTS = 12
"""Wrong elements listed on the page; dossier.json has more."""
Document = Mapping[str, Any]

STYLE = """
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.verdict { border-left: .4rem solid var(--calm); background: var(--card); padding: .8rem 1rem; margin: 0 0 1rem; }
.verdict strong { display: block; font-size: 1.15rem; }
.faulty, .suspect { border-color: var(--bad); } .healthy { border-color: var(--good); }
.faulty strong, .suspect strong, .bad { color: var(--bad); } .healthy strong, .good { color: var(--good); }
.banner { border: 2px solid var(--calm); padding: .6rem .9rem; margin: 0 0 1rem; font-weight: 600; }
.tight { margin: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap; }
tbody th { font-weight: 600; } .facts th { width: 11rem; color: var(--soft); }
pre { background: var(--card); padding: .7rem .9rem; white-space: pre-wrap; margin: .4rem 0; }
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
    "device": "the result that the device computed",
    "host": "the reference: the host computed it in two ways and got two results",
    "comparator": "the comparison on the device: the host compared the same bytes and got another answer",
}
EXACTNESS = {
    "U": "every partial sum can be represented exactly, so every healthy device computes the same bits",
    "R": "the exact sum is rounded once, to nearest even, so only one bit pattern is right",
    "M": "the answer is decided by a margin larger than any rounding error",
}
PROVEN = {
    "shipped": "it rounds nothing, or healthy processors have been shown to give these bits",
    "characterise": "an operator accepted it as characterised",
    "itself": "this device itself has given the right bits in this class on this software",
    "sibling": "an identical device of this host has given the right bits in this class on this software",
    "witness": "an identical device of another host has given the right bits in this class on this software",
    "contradiction": "this device gives right and wrong results for the same bytes",
}
"""By what a class is characterised, in words."""
FIRMWARE = {
    "bus_id": "Bus id",
    "board_part_number": "Board part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "microcode": "Microcode",
    "driver": "Driver",
}
"""Details of the identity that have a row of their own."""
KINDS = {"wrong": "bad", "not completed": "calm", "xid": "bad", "verdict": "mark", "stack": "calm", "ack": "mark"}
"""Kind of a timeline entry → role of its mark in a plot."""


def page(document: Document) -> str:
    """Return the page of a dossier."""
    sections = (
        ("Next step", _bullets(document["next_step"])),
        ("Part", _identity(document)),
        ("What failed", _failures(document)),
        ("Where", _places(document)),
        ("Which bits", _bits(document)),
        ("Why this verdict", _findings(document)),
        ("Identical devices", _peers(document)),
        ("How often, and what is ruled out", _rates(document)),
        ("What happened when", _timeline(document)),
        ("How to reproduce it", _reproduce(document)),
        ("What was not checked", _bullets(document["not_checked"])),
        ("What is in this archive", _contents(document)),
    )
    made = format_time(document["generated"])
    footer = f"Made by canaryd {document['canaryd']}, {made}; all times are {document['timezone']}."
    body = [
        f"<main><h1>{escape(document['title'])}</h1>",
        *(f'<p class="banner">{escape(text)}</p>' for text in _banners(document)),
        _verdict(document),
        *(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in sections),
        f'<p class="soft">{escape(footer)}</p></main>',
    ]
    return html.document(document["title"], html.STYLE + STYLE + pictures.STYLE + svg.STYLE, body)


def _banners(document: Document) -> Iterator[str]:
    """Yield what a reader must know before the verdict: drill, no RMA dossier, redacted."""
    if document["drill"]:
        yield f"DRILL: canaryd injected “{document['drill']}” in software. The device is not at fault."
    elif document["why_not_rma"] and document["kind"] == "evidence":
        yield f"Not an RMA dossier: {document['why_not_rma']}."
    if document["redacted"]:
        yield (
            "Redacted: names of hosts, serial numbers, uuids, bus ids, paths, addresses and URLs are replaced by "
            "pseudonyms in square brackets. One name has one pseudonym in this dossier, and another in any other."
        )


def _verdict(document: Document) -> str:
    verdict = document["verdict"]
    cause = "" if verdict["cause"] == "none" else f", cause: {verdict['cause']}"
    headline = f"{'DRILL: ' if document['drill'] else ''}{verdict['state'].upper()}{cause}"
    note = f'<p class="tight">{escape(verdict["note"])}</p>' if verdict["note"] else ""
    style = "drill" if document["drill"] else verdict["state"]
    return f'<div class="verdict {style}"><strong>{escape(headline)}</strong>{escape(document["summary"])}{note}</div>'


def _facts(pairs: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in pairs if v)
    return f'<table class="facts"><tbody>{rows}</tbody></table>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]], numeric: Sequence[int] = ()) -> str:
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


def _bullets(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(i)}</li>' for i in items)}</ul>" if items else "<p>Nothing.</p>"


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


# --- Sections --------------------------------------------------------------------------------------------------------


def _identity(document: Document) -> str:
    identity = document["identity"]
    seen = (
        f"{format_time(identity['first_seen'])} to {format_time(identity['last_seen'])}"
        if identity["first_seen"]
        else ""
    )
    pairs = [
        ("Serial number", identity["serial"] or "not reported by the device"),
        ("uuid", identity["uuid"] + (" (weak: does not identify the physical part)" if identity["weak"] else "")),
        ("Model", identity["model"]),
        ("Name on its host", f"{identity['name']}{'' if identity['present'] else ', not present now'}"),
        ("Host", identity["host"]),
        ("Instance of", identity["parent"]),
        *((label, identity["detail"].get(key, "")) for key, label in FIRMWARE.items()),
        ("Seen by canaryd", seen),
    ]
    rest = {k: v for k, v in identity["detail"].items() if k not in (*FIRMWARE, "serial")}
    return _facts([*pairs, ("Other details", _joined(rest)), ("Software", _joined(identity["stack"]))])


def _joined(facts: Mapping[str, str]) -> str:
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in sorted(facts.items()) if v not in ("", "none"))


def _failures(document: Document) -> str:
    failures = document["failures"]
    if not failures:
        return f"<p>{_nothing_failed(document)}</p>"
    first = failures[0]
    pairs = [
        ("Test and case", f"{first['probe']} {first['case']}"),
        ("Operands", f"{first['shape']}, seed {first['seed']}"),
        ("What is wrong", SUBJECTS[first["subject"]]),
        ("Pattern", first["pattern"]),
        ("Uploads wrong", rated(first["uploads"])),
        ("Results wrong", counted(first["results"])),
        ("Runs wrong", rated(first["runs"])),
        ("Immediate retest", first["reproduced"]),
        ("Place", _placed(first)),
        ("First and last seen", f"{format_time(first['first'])} and {format_time(first['last'])}"),
        ("Instruction set", first["instruction_set"]),
        ("Why the reference is right", EXACTNESS[first["exactness"]]),
        ("Proven exact by", PROVEN.get(first["characterised_by"], "")),
        (
            "Limitation",
            "" if first["characterised"] else "nobody has met this case on this software: it accuses no device",
        ),
    ]
    rows = [
        (
            f"{f['probe']} {f['case']}" + (f" [{f['instruction_set']}]" if f["instruction_set"] else ""),
            counted(f["uploads"]),
            counted(f["results"]),
            counted(f["runs"]),
            _placed(f),
            ranges([int(b) for b in f["bits"]]) or "not recorded",
            format_time(f["last"]),
        )
        for f in failures[:CASES]
    ]
    more = len(failures) + document["failures_omitted"] - CASES
    table = _table(("case", "uploads wrong", "results wrong", "runs wrong", "place", "bits", "last seen"), rows)
    rest = _soft(f"dossier.json has {plural(more, 'more failing case')}.") if more > 0 else ""
    note = _soft(
        "An upload copies the operands to the device once; several results are computed from it. The results of one "
        "upload are not independent, so only uploads and runs have an interval (Clopper-Pearson). A run stops "
        "repeating an upload after three wrong results."
    )
    return _facts(pairs) + (f"<h3>All failing cases</h3>{table}" if len(failures) > 1 else "") + rest + note


def _nothing_failed(document: Document) -> str:
    compared = sum(p["results"]["total"] for p in document["probes"])
    text = f"{plural(compared, 'exact result')} compared, 0 wrong." if compared else "No exact result was compared."
    unknown = sum(p["unknown"] for p in document["probes"])
    if unknown:
        verb = "differs from its" if unknown == 1 else "differ from their"
        text += f" {plural(unknown, 'recording')} {verb} baseline: see “Why this verdict”."
    return text


def _placed(failure: Mapping[str, Any]) -> str:
    return ", ".join(f"{p['place']} ({counted(p['results'])} results)" for p in wrong_places(failure)) or "not known"


def _places(document: Document) -> str:
    parts = []
    places = document["places"]
    if places:
        rates = [(p["place"], counted(p["results"]), rated(p["uploads"])) for p in places]
        parts.append("<h3>By core or unit</h3>")
        parts.append(_table(("place", "results wrong", "uploads wrong"), rates))
        if {p["place"] for p in places} == {"device"}:
            parts.append(_soft("The tests cannot choose the unit that computes a result, so no unit is named."))
    mapped = [f for f in document["failures"] if f["map"]][:MAPS]
    if mapped:
        maps = "".join(f"<div>{pictures.heat_map(f)}{_shared_lines(f)}</div>" for f in mapped)
        parts.append(f'<h3>In the result</h3><div class="maps">{maps}</div>')
    detailed = next((f for f in mapped if f["elements"]), None)
    if detailed:
        rows = [
            (str(e["index"]), e["expected"], e["observed"], ranges(flipped(e["expected"], e["observed"])))
            for e in detailed["elements"][:ELEMENTS]
        ]
        parts.append(f"<h3>Wrong elements of {escape(detailed['case'])}</h3>")
        parts.append(_table(("index", "expected", "observed", "flipped bits"), rows))
        more = len(detailed["elements"]) - ELEMENTS
        if more > 0:
            parts.append(_soft(f"{detailed['exhibit'] or 'dossier.json'} has {more:,} more."))
    return "".join(parts) or "<p>No wrong element is recorded, so no place can be named.</p>"


def _shared_lines(failure: Mapping[str, Any]) -> str:
    shared = "; ".join(f"{axis} {text}" for axis, text in failure["lines"].items())
    return f'<p class="tight">All wrong elements share: {escape(shared)}.</p>' if shared else ""


def _bits(document: Document) -> str:
    if not document["bits"]:
        return "<p>No flipped bit is recorded.</p>"
    parts = []
    for flips in document["bits"]:
        total = sum(b["count"] for b in flips["bits"])
        rows = [
            (b["bit"], b["name"] or "not known", f"{b['count']:,}", f"{100 * b['count'] / total:.1f} %")
            for b in sorted(flips["bits"], key=lambda b: -b["count"])[:MOST_BITS]
        ]
        parts.append(pictures.bit_chart(flips))
        parts.append(_table((f"bit of {flips['format']}", "part", "flipped", "share"), rows, (2, 3)))
        more = len(flips["bits"]) - MOST_BITS
        if more > 0:
            parts.append(_soft(f"dossier.json has {plural(more, 'more bit')}."))
    return "".join(parts)


def _findings(document: Document) -> str:
    """Return each incident with what else was considered, and on request what each rule says."""
    parts = []
    for incident in document["verdict"]["incidents"]:
        parts.append(f"<h3>{escape(incident['state'])}, cause {escape(incident['cause'])}</h3>")
        parts.append(f"<p>{escape(incident['text'])}</p>")
        if rivals := [
            f"{r['cause']}, {'rejected' if r['rejected'] else 'open'}: {r['why']}" for r in incident["rivals"]
        ]:
            parts.append(f'<p class="tight">Other explanations:</p>{_bullets(rivals)}')
    rules = "".join(map(_finding, document["verdict"]["findings"]))
    if rules:
        parts.append(f"<details><summary>What each rule says</summary>{rules}</details>")
    return "".join(parts) or "<p>There are no findings.</p>"


def _finding(finding: Mapping[str, Any]) -> str:
    action = f"<p><strong>Do now:</strong> {escape(finding['action'])}</p>" if finding["action"] else ""
    evidence = _bullets(finding["evidence"]) if finding["evidence"] else ""
    return f"<h3>{escape(finding['rule'])}</h3><p>{escape(finding['message'])}</p>{action}{evidence}"


def _peers(document: Document) -> str:
    peers = document["peers"]
    if not peers:
        return "<p>canaryd knows no other device of this model on this host, so there is nothing to compare with.</p>"
    rows = [
        (
            p["name"],
            p["uuid"],
            p["state"],
            f"{p['same_bytes_wrong']:,} of {p['same_bytes']:,} wrong" if p["same_bytes"] else "not computed",
            f"{p['wrong']:,} of {p['results']:,} wrong",
            "yes" if p["same_stack"] else "no",
        )
        for p in peers
    ]
    columns = ("device", "uuid", "state", "same operands", "all results of these tests", "same software")
    return _table(columns, rows)


def _rates(document: Document) -> str:
    rows = [
        (
            p["probe"],
            f"{p['runs']:,}",
            counted(p["results"]),
            rated(p["uploads"]),
            f"more than {share(p['rules_out'])}" if p["rules_out"] is not None else "nothing",
            format_time(p["last"]),
        )
        for p in document["probes"]
    ]
    if not rows:
        return "<p>No run is on record, so nothing is ruled out.</p>"
    columns = ("test", "runs", "results wrong", "uploads wrong", "fault rate ruled out", "last run")
    note = (
        "A test with 0 wrong results would have caught any more frequent fault with 95 % probability, at the load and "
        "temperature of its runs. It does not prove that the device is healthy."
    )
    return _table(columns, rows, (1,)) + _soft(note)


def _timeline(document: Document) -> str:
    entries = document["timeline"]
    newest = entries[-LATEST:]
    marks = [Mark(at=e["at"], label=e["kind"], role=KINDS.get(e["kind"], "calm")) for e in newest]
    parts = []
    for series in document["series"]:
        if len(series["points"]) > 1:
            line = Line(name=series["reading"], points=[(at, value) for at, value in series["points"]])
            start, end = svg.span([line], marks)
            parts.append(svg.plot(series["reading"], series["unit"], [line], marks, start=start, end=end))
    if not entries:
        return "".join(parts) + "<p>Nothing is on record.</p>"
    rows = "".join(
        f'<tr><th scope="row">{format_time(e["at"])}</th><td>{escape(e["kind"])}</td>'
        f"<td>{escape(e['text'] + _conditions(e['conditions']))}</td></tr>"
        for e in reversed(newest)
    )
    head = "<thead><tr><th>time</th><th>kind</th><th>what</th></tr></thead>"
    parts.append(f'<table class="events">{head}<tbody>{rows}</tbody></table>')
    more, omitted = len(entries) - len(newest), document["timeline_omitted"]
    if more or omitted:
        stored = f"; canaryd's store has {omitted:,} before them" if omitted else ""
        parts.append(_soft(f"Newest first. dossier.json has {more:,} earlier entries{stored}."))
    return "".join(parts)


def _conditions(conditions: Mapping[str, Any]) -> str:
    values = [
        quantity(float(c["value"]), c["unit"]) for c in conditions.values() if isinstance(c["value"], (int, float))
    ]
    return f" [at {', '.join(values)}]" if values else ""


def _reproduce(document: Document) -> str:
    scripts = [f for f in document["failures"] if f["exhibit"] and not f["exhibit_absent"]]
    parts = []
    if scripts:
        name = document["identity"]["torch_name"]
        lines = [f"python {f['exhibit']}/reproduce.py {name} 1000{_core_option(f)}" for f in scripts]
        parts.append("<p>Without canaryd: this needs torch only. Run it in the directory of this page (1000 runs):</p>")
        parts += [f"<pre>{escape(line)}</pre>" for line in lines]
        parts.append(
            "<p>The script prints the wrong elements and bits. Exit status: 0 if no run was wrong, as on a healthy "
            "part; 1 if any was; 2 if it could not run.</p>"
        )
        if any(_core_option(f) for f in scripts):
            parts.append("<p>--core selects the core. The default is the core that failed.</p>")
    if document["reproduce"]:
        parts.append("<p>With canaryd:</p>")
        parts += [f"<pre>{escape(c['command'])}</pre>" for c in document["reproduce"]]
    why = sorted({f["exhibit_absent"] for f in document["failures"] if f["exhibit_absent"]})
    if why and not scripts:
        parts.append(f"<p>There is no script: {escape('; '.join(why))}.</p>")
    if document["drill"]:
        parts.append("<p>This was a drill: on a healthy part none of these commands shows the fault.</p>")
    return "".join(parts) or "<p>There is no failing result to reproduce.</p>"


def _core_option(failure: Mapping[str, Any]) -> str:
    core = failing_core(failure)
    return "" if core is None else f" --core {core}"


def _contents(document: Document) -> str:
    parts = [_table(("file", "what it is"), [(c["file"], c["what"]) for c in document["contents"]])]
    if document["absent"]:
        parts.append("<h3>Not included</h3>")
        parts.append(_table(("file", "why not"), [(a["file"], a["why"]) for a in document["absent"]]))
    return "".join(parts)
