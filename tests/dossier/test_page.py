"""The page: self-contained, escaped, printed on two sheets."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.dossier import redact
from canaryd.dossier.document import DossierError
from canaryd.dossier.page import asked, by_case
from canaryd.facts import Place, Span
from canaryd.judge import acks
from canaryd.model import Ack, Cause, Event, State
from tests.dossier.made import CASE, GPU, HOUR, NOW, PEER, SERIAL, SIBLING, UUID, evidence, run, verdict, written
from tests.pages import Page
from tests.places import place
from tests.programs import measured, opened


def test_the_page_needs_nothing_else(store, tmp_path):
    """No script, no link, no picture or font from elsewhere; every picture says in words what it shows."""
    _, _, page = written(store, tmp_path)
    reader = Page(page)
    assert reader.addresses == []
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    assert "@import" not in page
    assert "url(" not in page
    assert reader.tags.count("svg") == 1
    assert reader.tags[reader.tags.index("svg") + 1] == "title"
    assert reader.tags.count("h1") == 1


def test_what_devices_say_is_escaped(store, tmp_path):
    """A log line with markup and control characters is text, in every file."""
    made, _, page = written(store, tmp_path)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;?[31m" in page
    for path in made.rglob("*"):
        if path.suffix in (".html", ".json", ".txt", ".jsonl"):
            assert "\x1b" not in path.read_text()
            assert "\\u001b" not in path.read_text()


def test_nothing_private_leaves(store, tmp_path):
    """No user's name, no process name, no secret, no person who acknowledged, in any file."""
    note = acks.note(Ack(device=UUID, kind="acknowledged", at=NOW - 600, until=NOW + HOUR, reason="known", by="bob"))
    store.set_verdict(verdict(findings=(*verdict().findings, note)))
    made, document, _ = written(store, tmp_path)
    assert [(a["kind"], a["reason"]) for a in document["acks"]] == [("acknowledged", "known")]
    text = "\n".join(p.read_text() for p in made.rglob("*") if p.is_file())
    for private in ("alice", "python3", "abcd1234", "bob"):
        assert private not in text, private
    assert "MMU fault" in (made / "log.txt").read_text()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer [left out]"),
        ("api_key=sk-12345678", "api_key=[left out]"),
        ("HF_TOKEN=hf_12345678 rest", "HF_TOKEN=[left out] rest"),
        ("/home/carol/x and /Users/dave/y", "/home/[user]/x and /Users/[user]/y"),
        ("pid=77, name=trainer, Ch 8", "pid=77, name=[left out], Ch 8"),
        ("serve --hf-token hf_12345678 -p 80", "serve --hf-token [left out] -p 80"),
        ("bearer x1y2z3w4", "bearer [left out]"),
        ("GET https://me:pw@h:8000/v1 failed", "GET https://[left out]@h:8000/v1 failed"),
        (
            "3 tokens generated were other ones, at token 5: reef",
            "3 tokens generated were other ones, at token 5: reef",
        ),
        ("a\tb\x07", "a    b?"),
        ('{"Authorization": "Bearer sk-proj-4f9a"}', '{"Authorization": [left out]}'),
        ("headers={'authorization': 'Basic cHJvbTpz='}", "headers={'authorization': [left out]}"),
        ("Cookie: session=abcdef; other=2", "Cookie: [left out]"),
        ("password='two words here', more", "password=[left out], more"),
        ("pwd=hunter2 rest", "pwd=[left out] rest"),
        ("https://user:p@ss@host/x", "https://[left out]@host/x"),
        ("a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb", "a\n[left out]\nb"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", "[left out]"),
    ],
)
def test_texts_are_cleaned(given, wanted):
    """Secrets, home directories, process names and control characters."""
    assert redact.clean(given) == wanted


def test_processes_are_cut_out_of_nvidia_smi():
    """The section goes, with everything indented below it; the next one stays."""
    text = "GPU 00000000:65:00.0\n    Clocks\n        SM : 1980 MHz\n    Processes\n        Process ID : 12\n"
    text += "            Name : python\n    Fabric\n        State : Completed\n"
    cut = redact.without_processes(text)
    assert "python" not in cut
    assert "Process ID" not in cut
    assert "Processes: left out by canaryd" in cut
    assert cut.endswith("    Fabric\n        State : Completed\n")
    assert "SM : 1980 MHz" in cut


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_without_network_shows_the_facts(store, tmp_path, scheme):
    """Headless, every name unresolvable: verdict, serial, case, element, bit and rate stand in the document."""
    made, _, _ = written(store, tmp_path)
    options = ["--host-resolver-rules=MAP * ~NOTFOUND"] + ["--force-dark-mode"] * (scheme == "dark")
    text = " ".join(Page(opened((made / "dossier.html").as_uri(), tmp_path / scheme, *options)).words)
    for fact in ("FAULTY (hardware)", SERIAL, CASE, "[17, 40]", "bit 13 (exponent)", "2 of 1,000", "cuda:4"):
        assert fact in text, fact


@pytest.mark.parametrize("width", [360, 1300])
def test_nothing_on_the_page_is_cut_off(store, tmp_path, width):
    """No part of it is wider than the window, the chart's bars included: the browser itself measures it."""
    _, _, page = written(store, tmp_path)
    script = """d => {
      const right = Math.max(...[...d.body.querySelectorAll("*")].map(e => e.getBoundingClientRect().right));
      return [d.querySelectorAll(".bits .bar").length, d.documentElement.scrollWidth, right];
    }"""
    bars, scroll, right = measured(page, tmp_path, (width, 900), script, "--virtual-time-budget=5000")
    assert bars == 1
    assert max(scroll, right) <= width


def printed(html: str, tmp_path: Path, name: str) -> int:
    """Return on how many pages a browser prints a page."""
    source, paper = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
    source.write_text(html)
    opened(source.as_uri(), tmp_path / "printer", "--no-pdf-header-footer", f"--print-to-pdf={paper}")
    return len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))


@pytest.mark.parametrize(
    ("kind", "paper"),
    [("rma", "A4"), ("health", "letter"), *(pytest.param(*p, marks=pytest.mark.slow) for p in (("rma", "letter"),))],
)
def test_the_first_two_sheets_are_two_pages(store, tmp_path, kind, paper):
    """On either paper, each fits its page; the details begin on the third."""
    if kind == "health":
        store.set_verdict(verdict(device=PEER, state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, _, html = written(store, tmp_path, SIBLING if kind == "health" else GPU)
    html = html.replace("@page {", f"@page {{ size: {paper};")
    sheets, heading, details = html.partition('<h2 class="part">')
    assert heading
    alone = sheets[: sheets.index('<section class="sheet">')] + heading + details
    assert printed(html, tmp_path, "whole") == 2 + printed(alone, tmp_path, "details")


def test_no_text_is_clipped(store, tmp_path):
    """Whatever a record holds, a reader gets all of it: long names, notes, spans and steps are wrapped."""
    found = evidence(17, 40, 13, wrong=500)
    wide = {"row": Span(first=0, last=1094, distinct=86), "column": Span(first=0, last=1079, distinct=70)}
    (compared,) = run(30, wrong=1).comparisons
    case = "bfloat16/" + "cancel" * 80
    for number in (30, 31, 32):
        bad = replace(compared, case=case, evidence=replace(found, lines=wide, pattern="a pattern " * 90))
        store.add_run(run(number, comparisons=(bad,)))
    said = "many words about one fault " * 90
    (finding,) = verdict().findings
    store.set_verdict(verdict(findings=(replace(finding, message=said, action=said),)))
    _, _, html = written(store, tmp_path)
    for text in (case, ("a pattern " * 90).strip(), said.strip(), "row 0 to 1094; column 0 to 1079"):
        assert text in html
    assert "…" not in html


def test_each_wrong_element_is_listed_once(store, tmp_path):
    """Two runs recorded the same wrong element: one row, seen twice. The record has both."""
    _, document, html = written(store, tmp_path)
    assert len(document["failures"][0]["elements"]) == 2
    assert html.count("[17, 40]</td>") == 1
    assert '<td data-c="times seen" class="n">2</td>' in html


def test_failing_cases_are_rows_worst_first_with_one_chart_of_bits(store, tmp_path):
    """The one to repeat is on the first sheet; each place has its share; all formats are in one chart."""
    other = replace(run(30, wrong=1, probe="exact_attention"), id="00000000001e-abcdef")
    wide = replace(other.comparisons[0], case="float32/full", place=place("core 3"), trials=4, wrong_trials=1)
    store.add_run(replace(other, comparisons=(wide,)))
    _, document, html = written(store, tmp_path)
    first, second = html.split('<section class="sheet">')[1:]
    assert "The test to repeat: exact_matmul" in first
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>', second)
    assert rows[:2] == [f"exact_matmul {CASE}", "exact_attention float32/full"]
    assert len(document["bits"]) == 2
    assert html.count('<figure class="bits">') == 1
    assert "core 3: 1 of 4 (25 %)" in html
    assert '<td data-c="share of all wrong">33.3 %</td>' in html


def test_an_sm_and_its_lane_are_named_as_a_core_is(store, tmp_path):
    """The SM with its share, the lane as what all wrong elements share, and the SM as a part in the OCP output."""
    seen = evidence(17, 40, 13)
    seen = replace(seen, lines={**seen.lines, "lane": Span(first=19, last=19, distinct=1)})
    tiles = {"case": "float16>float32/full/tiles/dot@8x64x64x128", "seed": 5, "shape": "M=512 N=64 K=128 rounds=8"}
    given = run(31, wrong=1, probe="exact_units")
    bad = replace(given.comparisons[0], place=place("SM 17"), trials=8, wrong_trials=8, evidence=seen, **tiles)
    rest = Place(unit="sm", numbers=tuple(n for n in range(132) if n != 17))
    sound = replace(bad, place=rest, trials=131 * 8, wrong_trials=0, evidence=None)
    store.add_run(replace(given, id="00000000001f-abcdef", comparisons=(bad, sound)))
    made, document, html = written(store, tmp_path)
    (failure,) = [f for f in document["failures"] if f["probe"] == "exact_units"]
    assert failure["lines"]["lane"] == "19"
    assert [(p["place"], p["results"]["wrong"]) for p in failure["places"]] == [("131 SMs", 0), ("SM 17", 8)]
    assert failure["core"] is None
    assert "SM 17: 8 of 8 (100 %)" in html
    assert "lane 19" in html
    assert '"name": "SM 17"' in (made / "ocp.jsonl").read_text()


def test_canaryd_itself_is_named_as_on_every_other_page(store, tmp_path):
    """The cause `harness` stays in the JSON; people read "canaryd itself"."""
    store.set_verdict(verdict(state=State.UNKNOWN, cause=Cause.HARNESS))
    _, document, html = written(store, tmp_path)
    assert document["verdict"]["cause"] == "harness"
    assert "UNKNOWN (canaryd itself)" in html
    assert "harness" not in html.replace("exact-mismatch", "")


@pytest.mark.parametrize(
    ("wrong", "core"),
    [
        ({"core 3": 2, "core 0": 0}, 3),
        ({"core 0": 5, "core 12": 7}, 12),
        ({"all 2 threads": 9, "core 0": 1}, 0),
        ({"all 2 threads": 9}, None),
        ({"device": 9}, None),
    ],
)
def test_the_failing_core_is_where_most_was_wrong(store, tmp_path, wrong, core):
    """All threads together and a device name no core; core 0 is one."""
    (bad,) = run(30, wrong=1).comparisons
    at = [replace(bad, place=place(p), seed=9, trials=10, wrong_trials=n) for p, n in wrong.items()]
    store.add_run(run(30, comparisons=tuple(replace(c, evidence=c.evidence if c.wrong_trials else None) for c in at)))
    _, document, _ = written(store, tmp_path)
    assert next(f for f in document["failures"] if f["seed"] == 9)["core"] == core


def test_an_xid_without_advice_is_no_step(store, tmp_path):
    """An Xid about which there is nothing to do asks for nothing."""
    told = [Event(device=GPU.uuid, kind="xid", name=n, code=int(n), first=NOW, last=NOW) for n in ("63", "48")]
    store.add_events(told)
    _, document, _ = written(store, tmp_path)
    assert not [step for step in document["next_step"] if "nothing to do" in step]


def test_without_jinja2_the_report_says_what_to_install(store, tmp_path, monkeypatch):
    """One line, before anything is left on the disk."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(DossierError, match=r"^Jinja2 is missing; install it: .* -m pip install Jinja2$"):
        written(store, tmp_path)
    assert not list((tmp_path / "out").iterdir())


def test_what_a_vendor_asks_for_is_a_list_with_what_is_missing(store, tmp_path):
    """Page one says what is here and what is not, so that nobody sends half a case."""
    _, document, page = written(store, tmp_path)
    assert document["verdict"]["cause"] == "hardware"
    found = dict(asked(document))
    assert list(found) == [
        *("Serial number", "Fails again", "Identical part", "Vendor's diagnostic", "Other slot or host"),
        "Lost at a reboot",
    ]
    assert found["Serial number"] == SERIAL
    assert found["Vendor's diagnostic"] == "missing: not on record"
    assert found["Lost at a reboot"] == (
        "missing: bug report, event log of the BMC, records of the firmware (see “What is in this archive”)"
    )
    text = " ".join(Page(page).words)
    assert "What the vendor asks for" in text
    assert all(value in text for value in found.values())


def test_a_case_is_one_row_whatever_its_operands():
    """Its counts are added, and the interval is that of the sum."""
    failure = {
        "probe": "exact_matmul", "case": "float32/dense", "instruction_set": "", "bits": {"3": 1}, "last": 0.0,
        "format": "float32",
        **{of: {"wrong": 1, "total": 4} for of in ("results", "uploads", "runs")},
        "places": [{"place": "device", "results": {"wrong": 1, "total": 4}}],
    }  # fmt: skip
    (row,) = by_case([failure, failure | {"bits": {"5": 1}, "last": 60.0}])
    assert row[:2] == ("exact_matmul float32/dense", "2 of 8")
    assert row[2].startswith("2 of 8 (95 % interval: 3.19 % to 65.1 %)")
    assert row[3:] == ("2 of 8", "device: 2 of 8 (25 %)", "3, 5 of float32", "1970-01-01 00:01:00 UTC")
