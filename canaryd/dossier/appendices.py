"""The appendices of a dossier: all failing cases, wrong elements, reasons, rates, timeline, commands and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from canaryd.dossier import pictures
from canaryd.dossier.places import shared_lines, told_places
from canaryd.dossier.summary import FIRMWARE, PART, PLACES, core_option, cut, scripts
from canaryd.dossier.text import counted, flipped, flipped_bits, ranges, rated, ruled_out
from canaryd.formatting import format_utc, quantity
from canaryd.judge.characterised import By
from canaryd.judge.phrases import count
from canaryd.model import Cause, Rival
from canaryd.report import svg
from canaryd.report.html import bullets, escape, facts, soft, table
from canaryd.report.svg import Mark
from canaryd.report.terminal import rival_words, state_note

CASES = 24
"""Failing cases in the table; dossier.json has more."""
MAPS = 3
LATEST = 60
"""Entries of the timeline on the page; dossier.json has more."""
ELEMENTS = 24
"""Wrong elements listed on the page; dossier.json has more."""
PROVEN = {
    By.SHIPPED: "it rounds nothing, or healthy processors have been shown to give these bits",
    By.ACCEPTED: "an operator accepted it as exact",
    By.ITSELF: "this device itself has given the right bits in this class on this software",
    By.SIBLING: "an identical device of this host has given the right bits in this class on this software",
    By.WITNESS: "an identical device of another host has given the right bits in this class on this software",
    By.CONTRADICTION: "this device gives right and wrong results for the same bytes",
}
"""By what a class is characterised, in words."""
KINDS = {"wrong": "bad", "not completed": "calm", "xid": "bad", "verdict": "mark", "stack": "calm", "ack": "mark"}
"""Kind of a timeline entry → role of its mark in a plot."""
Document = Mapping[str, Any]


def appendices(document: Document) -> str:
    """Return the appendices; those without content are left out."""
    found = (
        ("Further steps", bullets(rest) if (rest := cut(document["next_step"])) else ""),
        ("All failing cases", _cases(document)),
        ("All places", _places(document)),
        ("Wrong elements", _elements(document)),
        ("Why this verdict", _findings(document)),
        ("The vendor's own self-test", _selftests(document)),
        ("Identical devices", _peers(document)),
        ("How often, and what is ruled out", _rates(document)),
        ("What happened when", _timeline(document)),
        ("How to reproduce it", _reproduce(document)),
        ("What was not checked", bullets(document["not_checked"])),
        ("Part in detail", _details(document)),
        ("What is in this archive", _contents(document)),
    )
    parts = [(heading, content) for heading, content in found if content]
    return "".join(f"<section><h2>{heading}</h2>{content}</section>" for heading, content in parts)


def _cases(document: Document) -> str:
    failures = document["failures"]
    if not failures:
        return ""
    rows = [
        (
            f"{f['probe']} {f['case']}" + (f" [{f['instruction_set']}]" if f["instruction_set"] else ""),
            counted(f["uploads"]),
            counted(f["results"]),
            counted(f["runs"]),
            told_places(f) or "not known",
            flipped_bits(f),
            format_utc(f["last"]),
        )
        for f in failures[:CASES]
    ]
    more = len(failures) + document["failures_omitted"] - CASES
    cases = table(("case", "uploads wrong", "results wrong", "runs wrong", "where", "bits", "last seen"), rows)
    rest = soft(f"dossier.json has {count(more, 'more failing case')}.") if more > 0 else ""
    proofs = sorted({PROVEN[f["characterised_by"]] for f in failures if f["characterised_by"]})
    proven = f'<p class="tight">Why these cases may accuse:</p>{bullets(proofs)}' if proofs else ""
    note = soft(
        "An upload copies the operands to the device once; several results are computed from it. The results of one "
        "upload are not independent, so only uploads and runs have an interval (Clopper-Pearson). A run stops "
        "repeating an upload after three wrong results."
    )
    return cases + rest + proven + note


def _selftests(document: Document) -> str:
    each = document["selftests"]
    if not each:
        return ""
    rows = [(s["test"], s["result"], s["message"], format_utc(s["at"])) for s in each]
    note = (
        "What the tool says stands beside canaryd's own results: a pass acquits nothing, and a failure proves nothing."
    )
    return table((f"test of {each[0]['tool']}", "result", "message", "when"), rows) + soft(note)


def _places(document: Document) -> str:
    if len(document["places"]) <= PLACES:
        return ""
    rows = [(p["place"], counted(p["results"]), rated(p["uploads"])) for p in document["places"]]
    return table(("place", "results wrong", "uploads wrong"), rows)


def _elements(document: Document) -> str:
    """Return where in the result the wrong elements of the worst cases lie, and each of these elements once."""
    mapped = [f for f in document["failures"] if f["map"]][:MAPS]
    if not mapped:
        return ""
    maps = "".join(f"<div>{pictures.heat_map(f)}{_shared(f)}</div>" for f in mapped)
    seen = Counter((f["case"], tuple(e["index"]), e["expected"], e["observed"]) for f in mapped for e in f["elements"])
    rows = [
        (case, str(list(index)), expected, observed, ranges(flipped(expected, observed)), f"{times:,}")
        for (case, index, expected, observed), times in list(seen.items())[:ELEMENTS]
    ]
    columns = ("case", "index", "expected", "observed", "flipped bits", "times seen")
    more = len(seen) - ELEMENTS
    rest = soft(f"dossier.json has {more:,} more.") if more > 0 else ""
    return f'<div class="maps">{maps}</div>' + table(columns, rows, (5,)) + rest


def _shared(failure: Mapping[str, Any]) -> str:
    lines = shared_lines(failure)
    return f'<p class="tight">{escape(lines)}</p>' if lines else ""


def _rates(document: Document) -> str:
    rows = [
        (p["probe"], f"{p['runs']:,}", counted(p["results"]), rated(p["uploads"]), ruled_out(p), format_utc(p["last"]))
        for p in document["probes"]
    ]
    if not rows:
        return "<p>No run is on record, so nothing is ruled out.</p>"
    columns = ("test", "runs", "results wrong", "uploads wrong", "fault rate ruled out", "last run")
    note = (
        "This counts all that is on record; the verdict counts from the first wrong run to the last. "
        "A test with 0 wrong results would have caught any more frequent fault with 95 % probability, at the load and "
        "temperature of its runs. It does not prove that the device is healthy."
    )
    return table(columns, rows, (1,)) + soft(note)


def _timeline(document: Document) -> str:
    entries = document["timeline"]
    newest = entries[-LATEST:]
    marks = [Mark(at=e["at"], label=e["kind"], role=KINDS.get(e["kind"], "calm")) for e in newest]
    plotted = (series for series in document["series"] if len(series["points"]) > 1)
    parts = [svg.plot(series["reading"], series["unit"], series["points"], marks) for series in plotted]
    if not entries:
        return "".join(parts) + "<p>Nothing is on record.</p>"
    rows = "".join(
        f'<tr><th scope="row">{format_utc(e["at"])}</th><td>{escape(e["kind"])}</td>'
        f"<td>{escape(e['text'] + _conditions(e['conditions']))}</td></tr>"
        for e in reversed(newest)
    )
    head = "<thead><tr><th>time</th><th>kind</th><th>what</th></tr></thead>"
    parts.append(f'<table class="events">{head}<tbody>{rows}</tbody></table>')
    more, omitted = len(entries) - len(newest), document["timeline_omitted"]
    if more or omitted:
        stored = f"; canaryd's store has {omitted:,} before them" if omitted else ""
        parts.append(soft(f"Newest first. dossier.json has {more:,} earlier entries{stored}."))
    return "".join(parts)


def _conditions(conditions: Mapping[str, Any]) -> str:
    values = [
        quantity(float(c["value"]), c["unit"]) for c in conditions.values() if isinstance(c["value"], (int, float))
    ]
    return f" [at {', '.join(values)}]" if values else ""


def _reproduce(document: Document) -> str:
    laid = scripts(document)
    parts = []
    if laid:
        parts.append("<p>Without canaryd: this needs torch only. Run it in the directory of this page:</p>")
        parts += [f"<pre>{escape(line)}</pre>" for line in laid]
        parts.append(
            "<p>The script prints the wrong elements and bits. Exit status: 0 if no run was wrong, as on a healthy "
            "part; 1 if any was; 2 if it could not run. If the fault comes as often as it was recorded, so many runs "
            "miss it with a probability of 5 %; with fewer, no wrong run proves nothing. If they take too long, Ctrl-C "
            "ends the script, and it tells how many it did.</p>"
        )
        if any(map(core_option, document["failures"])):
            parts.append("<p>--core selects the core. The default is the core that failed.</p>")
    if document["reproduce"]:
        parts.append("<p>With canaryd:</p>")
        parts += [f"<pre>{escape(c['command'])}</pre>" for c in document["reproduce"]]
    why = sorted({f["exhibit_absent"] for f in document["failures"] if f["exhibit_absent"]})
    if why and not laid:
        parts.append(f"<p>There is no script: {escape('; '.join(why))}.</p>")
    if document["drill"]:
        parts.append("<p>This was a drill: on a healthy part none of these commands shows the fault.</p>")
    return "".join(parts) or "<p>There is no failing result to reproduce.</p>"


def _contents(document: Document) -> str:
    parts = [table(("file", "what it is"), [(c["file"], c["what"]) for c in document["contents"]])]
    if document["absent"]:
        parts.append("<h3>Not included</h3>")
        parts.append(table(("file", "why not"), [(a["file"], a["why"]) for a in document["absent"]]))
    return "".join(parts)


def _findings(document: Document) -> str:
    """Return each incident with what else was considered, and on request what each rule says."""
    parts = []
    for incident in document["verdict"]["incidents"]:
        parts.append(f"<h3>{escape(state_note(incident['state'], incident['cause']))}</h3>")
        parts.append(f"<p>{escape(incident['text'])}</p>")
        rivals = [Rival(cause=Cause(r["cause"]), why=r["why"], rejected=r["rejected"]) for r in incident["rivals"]]
        if rivals:
            parts.append(f'<p class="tight">Other explanations:</p>{bullets([*map(rival_words, rivals)])}')
    rules = "".join(map(_finding, document["verdict"]["findings"]))
    if rules:
        parts.append(f"<details><summary>What each rule says</summary>{rules}</details>")
    return "".join(parts) or "<p>There are no findings.</p>"


def _finding(finding: Mapping[str, Any]) -> str:
    action = f"<p><strong>Do now:</strong> {escape(finding['action'])}</p>" if finding["action"] else ""
    evidence = bullets(finding["evidence"]) if finding["evidence"] else ""
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
    return table(columns, rows)


def _details(document: Document) -> str:
    identity = document["identity"]
    rest = {k: v for k, v in identity["detail"].items() if k not in (*PART, *FIRMWARE, "serial")}
    pairs = [("Other details", _joined(rest)), ("Software", _joined(identity["stack"]))]
    return facts(pairs) if any(text for _, text in pairs) else ""


def _joined(named: Mapping[str, str]) -> str:
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in sorted(named.items()) if v not in ("", "none"))
