"""The page of a characterisation: one HTML file without scripts or network, made from the document alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from canaryd.formatting import format_time, quantity
from canaryd_lab import html
from canaryd_lab.characterise.document import Document
from canaryd_lab.html import escape

ROWS = 64
"""Maximum number of observations that a table on the page shows; the JSON document has all of them."""
STYLE = """
h3 { margin: 1.2rem 0 .3rem; font-size: 1rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; padding-top: .6rem; border-top: 1px solid var(--line); }
.verdict.right { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); } .calm { color: var(--calm); }
b.good, b.bad, b.calm, td span { white-space: nowrap; }
.wide table { overflow-wrap: break-word; }
details { margin: .4rem 0; } summary { cursor: pointer; } h2 .soft { font-weight: 400; font-size: .95rem; }
"""
VERDICTS = {
    "right": ("right", "RIGHT", "Every strict result was right, and every injected fault was caught."),
    "incomplete": (
        "",
        "INCOMPLETE",
        "Nothing was wrong so far, but it is not complete: some parts are not done, or no fault was injected.",
    ),
    "wrong": ("bad", "WRONG", "At least one strict result was wrong."),
    "invalid": ("bad", "INVALID", "An injected fault was missed: no result here counts."),
    "unclassified": ("bad", "UNCLASSIFIED", "An error came that canaryd cannot tell from a failure of the device."),
    "failed": ("bad", "FAILED", "The device failed, or a worker did not come to its end."),
}
"""Verdict → (CSS class, word to show, sentence to show)."""
ROLES = {"right": "good", "measured": "good", "not_tried": "calm"}
"""Status → CSS class; "bad" for any other status."""
UNITS = {"flops_per_second": "flops per second", "bytes": "bytes", "seconds": "seconds"}
"""Suffix of a value's name → its unit."""
IMPORTANT = {("strict", "wrong"): 0, ("control", "right"): 0, ("strict", "raised"): 1, ("open", "raised"): 1}
"""(claim, what was seen) → place of such observations in a table, 0 first. All other observations come last."""


def page(document: Document) -> str:
    """Return the page of a document."""
    device, drill = document["device"], document["drill"]
    name = f"{device['backend']}:{device['index']}"
    title = f"Characterisation of {device['model']} ({name})"
    kind, word, sentence = VERDICTS[document["verdict"]]
    banner = f"DRILL: canaryd put the fault “{drill}” in by software. The device is not at fault."
    body = [
        f"<main><h1>{escape(title)}</h1>",
        f'<p class="banner">{escape(banner)}</p>' if drill else "",
        f'<div class="verdict {kind}"><strong>{word}</strong>{escape(sentence)}<br>{escape(_counted(document))}</div>',
        _overview(document),
        _left(document["left"]),
        *(_part(part) for part in document["parts"]),
        f'<p class="soft">Made by canaryd {escape(document["canaryd"])}, {format_time(document["generated"])}.</p>',
        "</main>",
    ]
    return html.document(title, html.STYLE + html.TABLES + STYLE, body)


def _counted(document: Document) -> str:
    strict, controls = document["strict"], document["controls"]
    return (
        f"{strict['right']:,} strict results right, {strict['wrong']:,} wrong, {strict['raised']:,} errors; "
        f"{strict['refused'] + strict['not_offered']:,} not offered here, "
        f"{strict['left_out'] + strict['not_reached']:,} left out or not reached; "
        f"controls: {controls['failed_as_they_must']:,} failed as they must, {controls['did_not_fail']:,} did not."
    )


def _overview(document: Document) -> str:
    rows = [
        (
            f'<a href="#{escape(_anchor(p["name"]))}">{_breakable(p["title"])}</a>',
            _word(p["status"]) + (" in part" if _in_part(p) else ""),
            escape(_summary(p)),
            escape(f"{p['seconds']:.1f} s"),
        )
        for p in document["parts"]
    ]
    return "<h2>Parts</h2>" + html.table(("part", "came to", "what was seen", "took"), rows, (3,), str)


def _in_part(part: Mapping[str, Any]) -> bool:
    """Return whether the part ran only partly, because its time was spent before some observation was made."""
    return any("not_reached" in counts for counts in part["counts"].values())


def _summary(part: Mapping[str, Any]) -> str:
    """Return a text that says, for each claim, how many observations of a part had which outcome."""
    parts = []
    for claim, counts in part["counts"].items():
        words = ", ".join(f"{n:,} {seen.replace('_', ' ')}" for seen, n in counts.items())
        parts.append(f"{claim}: {words}" if claim != "control" else f"controls: {_controls(counts)}")
    return "; ".join(parts) or part["detail"].partition("\n")[0][:120]


def _controls(counts: Mapping[str, int]) -> str:
    words = {"wrong": "caught", "right": "missed"}
    return ", ".join(f"{n:,} {words.get(seen, seen.replace('_', ' '))}" for seen, n in counts.items())


def _left(left: Sequence[Mapping[str, Any]]) -> str:
    if not left:
        return ""
    names = "".join(f"<li>{escape(p['title'])}</li>" for p in left)
    many = f"{len(left)} part{'' if len(left) == 1 else 's'}"
    return f"<details><summary>Not done yet: {many}; continue with --resume DIR</summary><ul>{names}</ul></details>"


def _part(part: Mapping[str, Any]) -> str:
    """Return the HTML section of one part."""
    heading = f'{escape(part["title"])} {_word(part["status"])} <span class="soft">{escape(part["name"])}</span>'
    lines = [f'<section id="{escape(_anchor(part["name"]))}"><h2>{heading}</h2>']
    if part["outcome"] != "completed" or part["detail"]:
        text = f"{part['outcome'].replace('_', ' ')}: {part['detail'] or 'no reason given'}"
        lines.append(f"<p>{escape(text[:1000])}</p>")
    if part["name"] == "environment":
        lines += _environment(part["facts"])
    if part["name"].startswith(("exactness/", "attention/", "cases/")):
        lines.append(_matrix(part["observations"]))
        shown = [o for o in part["observations"] if o["seen"] != "right"]
    elif part["name"] == "recorded":  # a result that changes is what is looked for
        kernels = [o for o in part["observations"] if "vectors" in o["values"]]
        unlike = part["facts"].get("kernels_with_other_bits", 0)
        lines.append(f"<p>{len(kernels):,} kernels recorded; {unlike:,} gave other bits from one time to the next.</p>")
        shown = [
            o for o in part["observations"] if o["seen"] in ("wrong", "raised") or o["values"].get("vectors", 0) > 1
        ]
    else:
        shown = part["observations"]
    lines.append(_observations(shown, is_open=not part["name"].startswith(("exactness/", "attention/", "cases/"))))
    return "".join([*lines, "</section>"])


def _environment(facts: Mapping[str, Any]) -> Iterator[str]:
    pairs = [*facts.get("stack", {}).items(), *facts.get("host", {}).items()]
    yield html.facts(pairs)
    assumed = [
        (source, room["bits"], "yes" if room["characterised"] else "not yet", room["why"])
        for source, room in facts.get("assumed", {}).items()
    ]
    if assumed:
        yield "<h3>What the goldens assume of accumulators</h3>"
        yield html.table(("operands", "bits", "characterised", "why"), assumed, (1,))


def _matrix(observations: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table of the numbers of right observations; the first two parts of a name give row and column."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for o in observations:
        first, _, rest = o["name"].partition("/")
        second = rest.partition("/")[0].partition("@")[0]
        if o["claim"] == "strict" and o["seen"] in ("right", "wrong", "raised", "not_reached"):
            cells[first, second].append(o)
    if not cells:
        return ""
    columns = sorted({second for _, second in cells})
    if len(columns) > 12:
        return ""
    rows = []
    for first in dict.fromkeys(first for first, _ in cells):
        row = [_breakable(first)]
        for second in columns:
            here = cells.get((first, second), [])
            tried = [o for o in here if o["seen"] != "not_reached"]
            right = sum(o["seen"] == "right" for o in tried)
            role = "calm" if not tried else "good" if right == len(tried) else "bad"
            more = f" of {len(here)}" if len(here) > len(tried) else ""
            text = f"{right}/{len(tried)} right{more}" if here else ""
            row.append(f'<span class="{role}">{text}</span>' if here else text)
        rows.append(tuple(row))
    return html.table(("", *columns), rows, cell=str)


def _observations(observations: Sequence[Mapping[str, Any]], *, is_open: bool) -> str:
    if not observations:
        return ""
    ordered = sorted(observations, key=lambda o: IMPORTANT.get((o["claim"], o["seen"]), 2))
    names = list(dict.fromkeys(name for o in ordered[:ROWS] for name in o["values"]))[:6]
    has_detail = any(o["detail"] or o["error"] for o in ordered[:ROWS])
    rows = [
        (
            _breakable(o["name"]),
            _seen(o),
            *(escape(_value(name, o["values"].get(name))) for name in names),
            *((escape(f"{o['error']}: {o['detail']}" if o["error"] else o["detail"]),) if has_detail else ()),
        )
        for o in ordered[:ROWS]
    ]
    headings = ("what", "seen", *(_heading(n) for n in names), *(("detail",) if has_detail else ()))
    texts = {name for o in ordered[:ROWS] for name, value in o["values"].items() if isinstance(value, str)}
    table = html.table(headings, rows, [i for i, name in enumerate(names, 2) if name not in texts], str)
    more = len(ordered) - ROWS
    if more > 0:
        table += f'<p class="soft">The JSON document has {more:,} more.</p>'
    if is_open or any((o["claim"], o["seen"]) in IMPORTANT for o in ordered):
        return table
    return f"<details><summary>{len(ordered):,} others</summary>{table}</details>"


def _seen(o: Mapping[str, Any]) -> str:
    """Return the word for an observation's outcome as HTML, coloured by its status."""
    if o["claim"] == "control":
        good, word = o["seen"] == "wrong", {"wrong": "caught", "right": "missed"}.get(o["seen"], "")
        role = "good" if good else "bad" if o["seen"] in ("right", "raised") else "calm"
        return f'<span class="{role}">{word or escape(o["seen"].replace("_", " "))}</span>'
    roles = {"right": "good", "wrong": "bad" if o["claim"] == "strict" else "calm", "raised": "bad", "measured": ""}
    word = o["seen"].replace("_", " ")
    if o["claim"] == "open" and o["seen"] in ("right", "wrong"):
        word = "same bits" if o["seen"] == "right" else "other bits, as allowed"
    return f'<span class="{roles.get(o["seen"], "calm")}">{escape(word)}</span>'


def _breakable(text: str) -> str:
    """Return a name as HTML in which the browser can break the line after "/" and ">"."""
    return escape(text).replace("/", "/<wbr>").replace("&gt;", "&gt;<wbr>")


def _heading(name: str) -> str:
    unit = next((end for end in UNITS if name.endswith(f"_{end}")), "")
    return name.removesuffix(f"_{unit}").replace("_", " ") if unit else name.replace("_", " ")


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    unit = next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")
    if unit:
        return quantity(float(value), unit)
    if name.endswith(("_busy", "_over_raw")):
        return f"{100 * value:.0f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _word(status: str) -> str:
    return f'<b class="{ROLES.get(status, "bad")}">{escape(status.replace("_", " "))}</b>'


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)
