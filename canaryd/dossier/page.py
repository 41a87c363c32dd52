"""The page of a dossier: one HTML file from one template, without scripts or links to other files.

The first two sheets are a summary, the rest are details. The page is made from the JSON alone, so page and JSON always
agree. The template escapes every text.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from canaryd.dossier.document import DossierError
from canaryd.dossier.gather import ranges
from canaryd.dossier.perishable import BMC_LOG, BUG_REPORT, RECORDS, where
from canaryd.formatting import format_utc, quantity
from canaryd.judge.exact import PROVEN
from canaryd.judge.phrases import count, listed
from canaryd.judge.statistics import interval
from canaryd.judge.wrong import NO_TYPE
from canaryd.model import Cause, Rival, State
from canaryd.report.terminal import rival_words, state_note

TEMPLATE = Path(__file__).parent / "dossier.html.j2"
UNNAMED = {by.value: text.replace(", {}", "").replace(" on {}", "") for by, text in PROVEN.items()}
"""Proof that a class is exact → the judge's words for it, without the names of devices."""
WORDS = {
    "device": "the device's result",
    "host": "the reference: the host got two results for it",
    "comparator": "the comparison on the device: the host's differs",
    "U": "any order of additions gives the same bits",
    "R": "the exact sum is rounded once, to nearest even",
    "M": "the margin is larger than any rounding error",
}
"""Subject of a failing case, or exactness of its golden → words for it."""


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a dossier. Raises `DossierError` if Jinja2 is missing."""
    try:
        import jinja2  # this command alone needs it
    except ImportError as error:
        raise DossierError(f"Jinja2 is missing; install it: {sys.executable} -m pip install Jinja2") from error
    made = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"utc": format_utc, "share": share, "counted": counted, "rated": rated, "joined": joined}
    made.filters |= {"rival": _rival, "conditions": _conditions, "places": failing_places, "bits": flipped_bits}
    made.filters |= {"by_case": by_case}
    made.globals |= {
        "asked": asked,
        "proven": UNNAMED,
        "words": WORDS,
        "state": state_note,
        "count": count,
        "once": _once,
    }
    return made.from_string(TEMPLATE.read_text(encoding="utf-8")).render(d=document)


def share(value: float | None) -> str:
    """Return a fraction as a percentage with three digits, a tiny one as "1 of 200,000", None as "not known"."""
    if value is None:
        return "not known"
    return f"{100 * value:.3g} %" if value >= 1e-5 or not value else f"1 of {1 / value:,.0f}"


def counted(tally: Mapping[str, Any]) -> str:
    """Return the counts "wrong" and "total" of a tally as text: "3 of 1,000", or "none" if the total is 0."""
    return f"{tally['wrong']:,} of {tally['total']:,}" if tally["total"] else "none"


def rated(rate: Mapping[str, Any]) -> str:
    """Return a rate as counts with its interval: "3 of 3 (95 % interval: 29.2 % to 100 %)"."""
    interval = f" (95 % interval: {share(rate['low'])} to {share(rate['high'])})"
    return counted(rate) + (interval if rate["total"] else "")


def joined(named: Mapping[str, str]) -> str:
    """Return names with their values as one text: "driver 580.65.06; torch 2.9.0". Empty values are left out."""
    return "; ".join(f"{k.replace('_', ' ')} {v}" for k, v in sorted(named.items()) if v not in ("", "none"))


def by_case(failures: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row for each case, in the order of its first failure: name, results, uploads and runs that were wrong.

    Then the places, the flipped bits and when it was seen last. Failures are one for each set of operands.
    """
    of_case: dict[str, list[Mapping[str, Any]]] = {}
    for f in failures:
        path = f" [{f['instruction_set']}]" if f["instruction_set"] else ""
        of_case.setdefault(f"{f['probe']} {f['case']}{path}", []).append(f)
    rows: list[tuple[str, ...]] = []
    for name, found in of_case.items():
        results, uploads, runs = (
            {"wrong": sum(f[of]["wrong"] for f in found), "total": sum(f[of]["total"] for f in found)}
            for of in ("results", "uploads", "runs")
        )
        low, high = interval(uploads["wrong"], uploads["total"])
        where = failing_places({"places": _added([place for f in found for place in f["places"]])})
        shares = rated(uploads | {"low": low, "high": high})
        seen = where, flipped_bits(*found), format_utc(max(f["last"] for f in found))
        rows.append((name, counted(results), shares, counted(runs), *seen))
    return rows


def _added(places: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return each place once, with the sum of its results."""
    found: dict[str, dict[str, int]] = {}
    for place in places:
        at = found.setdefault(place["place"], {"wrong": 0, "total": 0})
        for name in at:
            at[name] += place["results"][name]
    return [{"place": name, "results": results} for name, results in found.items()]


def asked(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what vendors ask for before they take a part back → what of it is here, or how to get it."""
    part = document["identity"]
    same, wrong = (sum(peer[key] for peer in document["peers"]) for key in ("same_bytes", "same_bytes_wrong"))
    confirmed = document["verdict"]["state"] == State.FAULTY.value
    failed = [test["test"] for test in document["selftests"] if test["result"] == "fail"]
    diagnostic = f"failed: {', '.join(failed)}" if failed else "passed, which disproves no wrong result that repeats"
    found = [
        ("Serial number", part["serial"] or "missing: read it from the label or the BMC"),
        ("Fails again", "yes, confirmed" if confirmed else "not confirmed yet"),
        ("Identical part", f"compared: {wrong:,} of {same:,} wrong there" if same else "missing: none was compared"),
        ("Vendor's diagnostic", diagnostic if document["selftests"] else "missing: not on record"),
        ("Other slot or host", "missing: try it by hand, once this archive is made"),
    ]
    files = {"bug report": BUG_REPORT} if part["backend"] == "cuda" else {}
    files |= {"event log of the BMC": BMC_LOG, "records of the firmware": RECORDS}
    here, missing = (
        [w for w, name in files.items() if where(document, name)[0] is is_here] for is_here in (True, False)
    )
    told = [f"in this archive: {', '.join(here)}"] if here else []
    told += [f"missing: {', '.join(missing)} (see “What is in this archive”)"] if missing else []
    found.append(("Lost at a reboot", "; ".join(told)))
    return found


def failing_places(failure: Mapping[str, Any]) -> str:
    """Return the places where a case failed, worst first, as text: "core 3: 8 of 32 (25 %)", or "not known"."""
    wrong = sorted((p for p in failure["places"] if p["results"]["wrong"]), key=lambda p: -p["results"]["wrong"])
    named = [
        f"{p['place']}: {counted(p['results'])} ({share(p['results']['wrong'] / p['results']['total'])})"
        for p in wrong[:4]
    ]
    return ", ".join([*named, *([f"{len(wrong) - 4} more"] if len(wrong) > 4 else [])]) or "not known"


def flipped_bits(*failures: Mapping[str, Any]) -> str:
    """Return the bits that failing cases flipped, with their number type: "0 to 3, 7 of float32"; or "not recorded"."""
    bits = ranges(sorted({int(bit) for f in failures for bit in f["bits"]}))
    types = sorted({f["format"] for f in failures if f["bits"]} - {NO_TYPE})
    return " of ".join(filter(None, (bits, listed(types)))) if bits else "not recorded"


def flipped(expected: str, observed: str) -> list[int]:
    """Return the positions of the bits in which two hex numbers differ, ascending; bit 0 is the lowest."""
    changed = int(expected, 16) ^ int(observed, 16)
    return [bit for bit in range(changed.bit_length()) if changed >> bit & 1]


def _once(failures: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str, str, int]]:
    """Return each different wrong element once, as (case, index, expected, observed, flipped bits, times seen)."""
    seen = Counter(
        (f["case"], str(list(e["index"])), e["expected"], e["observed"]) for f in failures for e in f["elements"]
    )
    return [(*each, ranges(flipped(*each[2:])), times) for each, times in seen.items()]


def _rival(rival: Mapping[str, Any]) -> str:
    return rival_words(Rival(cause=Cause(rival["cause"]), why=rival["why"], rejected=rival["rejected"]))


def _conditions(conditions: Mapping[str, Any]) -> str:
    values = (c for c in conditions.values() if isinstance(c["value"], (int, float)))
    return ", ".join(quantity(float(c["value"]), c["unit"]) for c in values)
