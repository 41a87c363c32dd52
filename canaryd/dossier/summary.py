"""The two pages that open a dossier: verdict, next step and part; then the evidence of each test, side by side.

Each prints on one sheet of A4 or US Letter, whatever the record holds: what is cut here is whole in the
appendices or in dossier.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from canaryd.dossier import pictures
from canaryd.dossier.places import enough_runs, failing_core, shared_lines, told_places
from canaryd.dossier.text import clipped, counted, flipped_bits, rated, ruled_out, share
from canaryd.formatting import format_utc
from canaryd.judge.phrases import count
from canaryd.report.html import bullets, escape, facts, soft, table
from canaryd.report.terminal import state_note

VERDICT, NOTE, BANNER, STEP, FACT, CELL, SPANS, COMMAND = 700, 200, 250, 170, 80, 60, 90, 240
"""Letters of the verdict, its note, a banner, a step, a fact about the part, a cell of evidence, rows and columns,
and a command at most."""
STEPS, TESTS, PLACES, PROBES = 6, 3, 6, 8
"""Next steps, failing tests side by side, places, and tests of a device without a failure that are shown at most."""
Document = Mapping[str, Any]
SUBJECTS = {
    "device": "the device's result",
    "host": "the reference: the host got two results for it",
    "comparator": "the comparison on the device: the host's differs",
}
EXACTNESS = {
    "U": "any order of additions gives the same bits",
    "R": "the exact sum is rounded once, to nearest even",
    "M": "the margin is larger than any rounding error",
}
UNPROVEN = "not shown: no device has passed it on this software"
"""Of a case that may accuse no device."""
PART = {"bus_id": "Bus id", "board_part_number": "Board part number"}
FIRMWARE = {
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP",
    "microcode": "microcode",
    "driver": "driver",
    "bios": "BIOS",
}
"""Details of the identity that the first page names."""


def summary(document: Document) -> str:
    """Return the two pages."""
    first = [
        *(f'<p class="banner">{escape(clipped(text, BANNER))}</p>' for text in _banners(document)),
        _verdict(document),
    ]
    first += [_section("Next step for its owner", _steps(document["next_step"])), _section("Part", _identity(document))]
    return f'<div class="sheet">{"".join(first)}</div><div class="sheet">{"".join(_evidence(document))}</div>'


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>"


def _banners(document: Document) -> list[str]:
    """Return what a reader must know before the verdict: drill, no RMA dossier, redacted."""
    told = []
    if document["drill"]:
        told.append(f"DRILL: canaryd injected “{document['drill']}” in software. The device is not at fault.")
    elif document["why_not_rma"] and document["kind"] == "evidence":
        told.append(f"Not an RMA dossier: {document['why_not_rma']}.")
    if document["redacted"]:
        told.append(
            "Redacted: names of hosts, serial numbers, uuids, bus ids, paths, addresses and URLs are replaced by "
            "pseudonyms in square brackets. One name has one pseudonym in this dossier, and another in any other."
        )
    return told


def _verdict(document: Document) -> str:
    verdict = document["verdict"]
    style = "drill" if document["drill"] else verdict["state"]
    headline = "DRILL: " * bool(document["drill"]) + state_note(verdict["state"].upper(), verdict["cause"])
    said = clipped(document["summary"], VERDICT, "… (the rest: “Why this verdict”)")
    note = f'<p class="tight">{escape(clipped(verdict["note"], NOTE))}</p>' if verdict["note"] else ""
    return f'<div class="verdict {style}"><strong>{escape(headline)}</strong>{escape(said)}{note}</div>'


def _steps(steps: Sequence[str]) -> str:
    more = soft("“Further steps” has the rest.") if cut(steps) else ""
    return bullets([clipped(step, STEP) for step in steps[:STEPS]]) + more


def cut(steps: Sequence[str]) -> list[str]:
    """Return the next steps that do not stand whole on the first page."""
    return [step for number, step in enumerate(steps) if number >= STEPS or len(step) > STEP]


def _identity(document: Document) -> str:
    identity = document["identity"]
    detail, server = identity["detail"], identity["server"]
    known = {**server, **detail}
    serial = f"serial {server['product_serial']}" if "product_serial" in server else ""
    first, last = identity["first_seen"], identity["last_seen"]
    pairs = [
        ("Serial number", identity["serial"] or "not reported by the device"),
        ("uuid", identity["uuid"] + (" (weak: not of the physical part)" if identity["weak"] else "")),
        ("Model", identity["model"]),
        ("Name on its host", f"{identity['name']}{'' if identity['present'] else ', not present now'}"),
        ("Host", ", ".join(filter(None, (identity["host"], server.get("product"), serial)))),
        ("Instance of", identity["parent"]),
        *((label, detail.get(key, "")) for key, label in PART.items()),
        ("Firmware", "; ".join(f"{name} {known[key]}" for key, name in FIRMWARE.items() if known.get(key))),
        ("Seen by canaryd", f"{format_utc(first)} to {format_utc(last)}" if first else ""),
    ]
    return facts([(label, clipped(value, FACT)) for label, value in pairs])


# --- The second page -------------------------------------------------------------------------------------------------


def _evidence(document: Document) -> list[str]:
    if not document["failures"]:
        return [_section("What was tested", _tested(document))]
    worst = _worst(document["failures"])
    return [
        _section("What failed", _compared(document, worst)),
        _section("Where, and which bits", f'<div class="pair"><div>{_places(document)}</div>{_bits(document)}</div>'),
        _section("See it yourself", _shortest(document)),
    ]


def _worst(failures: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the worst failing case of each test."""
    first: dict[str, Mapping[str, Any]] = {}
    for failure in failures:
        first.setdefault(failure["probe"], failure)
    return list(first.values())


def _compared(document: Document, worst: Sequence[Mapping[str, Any]]) -> str:
    """Return the worst case of each failing test in a column of its own."""
    shown, failures = worst[:TESTS], document["failures"]
    cases = {f["probe"]: sum(g["probe"] == f["probe"] for g in failures) for f in shown}
    sets = [f"{f['case']}" + (f" [{f['instruction_set']}]" if f["instruction_set"] else "") for f in shown]
    rows: list[tuple[str, list[str]]] = [
        ("Failing cases", [f"{cases[f['probe']]:,}{'+' * bool(document['failures_omitted'])}" for f in shown]),
        ("Worst case", sets),
        ("Operands", [f"{f['shape']}, seed {f['seed']}" for f in shown]),
        ("Its wrong results", [counted(f["results"]) for f in shown]),
        ("Its wrong uploads", [rated(f["uploads"]) for f in shown]),
        ("Its wrong runs", [counted(f["runs"]) for f in shown]),
        ("Repeated at once", [f["reproduced"] for f in shown]),
        ("Where", [told_places(f) or "not known" for f in shown]),
        ("Flipped bits", [flipped_bits(f) for f in shown]),
        ("Its worst run", [f["pattern"] for f in shown]),
        ("What is wrong", [SUBJECTS[f["subject"]] for f in shown]),
        ("Right because", [EXACTNESS[f["exactness"]] if f["characterised"] else UNPROVEN for f in shown]),
        (
            "Seen",
            [f"{format_utc(f['first'], seconds=False)} to {format_utc(f['last'], seconds=False)}" for f in shown],
        ),
    ]
    cells = [(label, *(clipped(cell, CELL * TESTS // len(shown)) for cell in row)) for label, row in rows if any(row)]
    more = len(worst) - TESTS
    rest = soft(f"“All failing cases” has {count(more, 'more failing test')}.") if more > 0 else ""
    compared = table(("", *(f["probe"] for f in shown)), cells)
    return f'<div class="evidence">{compared}</div>' + rest + _alike(document)


def _alike(document: Document) -> str:
    """Return what identical devices computed from the same operands: one sentence."""
    peers = [p for p in document["peers"] if p["same_bytes"]]
    if not peers:
        return "<p>No identical device of this host has computed the same operands.</p>"
    wrong, results = (sum(p[key] for p in peers) for key in ("same_bytes_wrong", "same_bytes"))
    who = count(len(peers), "identical device")
    return f"<p>{who} of this host computed the same operands: {wrong:,} of {results:,} results wrong.</p>"


def _places(document: Document) -> str:
    places = sorted(document["places"], key=lambda p: -p["results"]["wrong"])
    if not places:
        return "<p>No place is recorded.</p>"
    wrong = sum(p["results"]["wrong"] for p in places)
    rows = [
        (
            p["place"],
            f"{counted(p['results'])} ({share(p['results']['wrong'] / (p['results']['total'] or 1))})",
            share(p["results"]["wrong"] / wrong) if wrong else "none",
        )
        for p in places[:PLACES]
    ]
    parts = [table(("place", "results wrong there", "share of all wrong"), rows)]
    if len(places) > PLACES:
        parts.append(soft(f"“All places” has {count(len(places) - PLACES, 'more place')}."))
    if {p["place"] for p in places} == {"device"}:
        parts.append(soft("The tests cannot choose the unit that computes a result, so no unit is named."))
    lines = shared_lines(document["failures"][0])
    return "".join(parts) + (f"<p>Worst case: {escape(clipped(lines, SPANS))}</p>" if lines else "")


def _bits(document: Document) -> str:
    return pictures.bit_chart(document["bits"]) if document["bits"] else "<p>No flipped bit is recorded.</p>"


def _shortest(document: Document) -> str:
    """Return the shortest ways to see the fault: the first script, and the first command."""
    script = next(iter(scripts(document)), "")
    lines = ["# without canaryd, in the directory of this page", script] if script else []
    if document["reproduce"] and len(document["reproduce"][0]["command"]) <= COMMAND:
        lines += ["# with canaryd", document["reproduce"][0]["command"]]
    shown = f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
    return shown + soft("“How to reproduce it” has all commands.")


def scripts(document: Document) -> list[str]:
    """Return the commands that repeat failing cases without canaryd."""
    name = document["identity"]["torch_name"]
    laid = [f for f in document["failures"] if f["exhibit"] and not f["exhibit_absent"]]
    return [f"python3 {f['exhibit']}/reproduce.py {name} {enough_runs(f, document)}{core_option(f)}" for f in laid]


def core_option(failure: Mapping[str, Any]) -> str:
    """Return the option of a script that chooses the core that failed; "" where none is known."""
    core = failing_core(failure)
    return "" if core is None else f" --core {core}"


def _tested(document: Document) -> str:
    """Return what was tested of a device without a failing case, and what that rules out."""
    compared = sum(p["results"]["total"] for p in document["probes"])
    text = f"{count(compared, 'exact result')} compared, 0 wrong." if compared else "No exact result was compared."
    unknown = sum(p["unknown"] for p in document["probes"])
    if unknown:
        verb = "differs from its" if unknown == 1 else "differ from their"
        text += f" {count(unknown, 'recording')} {verb} baseline: see “Why this verdict”."
    rows = [(p["probe"], f"{p['runs']:,}", counted(p["results"]), ruled_out(p)) for p in document["probes"][:PROBES]]
    tests = table(("test", "runs", "results wrong", "fault rate ruled out"), rows, (1,)) if rows else ""
    return f"<p>{escape(text)}</p>{tests}" + soft("“What was not checked” limits this.")
