"""The page: self-contained, escaped, printed on two sheets."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.dossier import pictures, redact
from canaryd.dossier.page import page
from canaryd.dossier.pictures import heat_map
from canaryd.dossier.places import failing_core
from canaryd.dossier.summary import FIRMWARE, PART, STEP, STEPS
from canaryd.facts import Place, Span
from canaryd.judge import acks
from canaryd.model import Ack, Cause, Event, State
from tests.dossier.made import CASE, GPU, HOUR, NOW, PEER, SERIAL, SIBLING, UUID, evidence, run, verdict, written
from tests.places import place


class Reader(html.parser.HTMLParser):
    """What a text browser makes of a page: headings, text, and everything that would be loaded."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.untold: list[str] = []
        self._pictures: list[bool] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.loads += [v for k, v in attrs if k in ("src", "href", "action", "data") and v]
        if tag == "svg":
            told = "aria-label" in given or given.get("aria-hidden") == "true"
            self._pictures.append(told)
        if tag == "title" and self._pictures:
            self._pictures[-1] = True

    def handle_data(self, data):
        self.texts.append(data)

    def silent(self) -> int:
        return self._pictures.count(False)


def test_the_page_needs_nothing_else(store, tmp_path):
    """No script, no link, no picture or font from elsewhere; every picture says in words what it shows."""
    _, _, page = written(store, tmp_path)
    reader = Reader(page)
    assert reader.loads == []
    assert not {"script", "link", "iframe", "img", "object"} & set(reader.tags)
    assert "@import" not in page
    assert "url(" not in page
    assert reader.tags.count("svg") >= 4
    assert reader.silent() == 0
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


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium here: the page was not opened in a browser")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_without_network_shows_the_facts(store, tmp_path, scheme):
    """Headless, every name unresolvable: verdict, serial, case, element, bit and rate stand in the document."""
    made, _, _ = written(store, tmp_path)
    argv = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    argv += [f"--user-data-dir={tmp_path / scheme}", "--dump-dom"] + ["--force-dark-mode"] * (scheme == "dark")
    done = subprocess.run(
        [*argv, (made / "dossier.html").as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    text = " ".join(Reader(done.stdout).texts)
    for fact in ("FAULTY (hardware)", SERIAL, CASE, "[17, 40]", "bit 13 (exponent)", "2 of 1,000", "cuda:4"):
        assert fact in text, fact


def test_the_page_fits_a_phone(store, tmp_path):
    """At 360 px nothing of the bits' chart is hidden: the browser itself measures it, bar by bar."""
    _, _, page = written(store, tmp_path)
    measured = tmp_path / "measured.html"
    script = """<script>
    const wide = window.innerWidth;
    const bars = [...document.querySelectorAll(".bars svg, .bars .bar")].map(e => e.getBoundingClientRect());
    document.title = [wide, bars.length, ...bars.flatMap(b => [b.left, b.right])].join(" ");
    </script>"""
    frame = tmp_path / "frame.html"
    measured.write_text(page.replace("</body>", script + "</body>"))
    # A headless window has a least width of its own; a frame has none.
    frame.write_text(
        '<iframe id="f" style="width:360px;height:900px;border:0" src="measured.html"></iframe>'
        '<p id="out"></p><script>document.getElementById("f").onload = e => '
        'document.getElementById("out").textContent = e.target.contentDocument.title</script>'
    )
    argv = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    argv += [f"--user-data-dir={tmp_path / 'phone'}", "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r'<p id="out">([^<]+)</p>', done.stdout)
    assert found, done.stdout
    wide, count, *edges = map(float, found[1].split())
    assert (wide, count) == (360, 2)
    assert all(0 <= edge <= 360 for edge in edges)


def printed(html: str, tmp_path: Path, name: str) -> int:
    """Return on how many pages a browser prints a page."""
    source, paper = tmp_path / f"{name}.html", tmp_path / f"{name}.pdf"
    source.write_text(html)
    argv = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'printer'}"]
    argv += ["--no-pdf-header-footer", f"--print-to-pdf={paper}", source.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert paper.exists(), done.stderr
    return len(re.findall(rb"/Type\s*/Page\b", paper.read_bytes()))


def overflowing(document: dict) -> dict:
    """Return a dossier with more and longer of everything than a summary can show."""
    (failure,) = document["failures"]
    place = {**document["places"][0], "unit": "sm"}
    places = [{**place, "place": f"SM {n}", "numbers": [n]} for n in range(132)]
    long = {
        "case": f"{CASE}/" * 9, "shape": "M=64 N=96 K=128 " * 9, "pattern": "p " * 300, "reproduced": "r " * 300,
        "places": places, "bits": {str(bit): 1 for bit in range(0, 16, 2)}, "characterised": False,
        "lines": {"row": "x " * 200}, "exhibit": "evidence/1-x", "exhibit_absent": "",
    }  # fmt: skip
    probes = ("exact_matmul", "exact_attention", "exact_integer", "recorded_kernels")
    flips = [{"bit": bit, "name": "mantissa", "count": bit + 1} for bit in range(32)]
    told = ("serial", "model", "host", "parent")
    return document | {
        "failures": [{**failure, **long, "probe": probe} for probe in probes for _ in range(9)],
        "failures_omitted": 400,
        "places": places,
        "bits": [{"format": f"form {n}", "width": 32, "bits": flips} for n in range(7)],
        "summary": "One of many sentences about very many incidents. " * 90,
        "next_step": ["A step of many words that says at length what somebody has to do, and then why. " * 3] * 20,
        "identity": document["identity"]
        | dict.fromkeys(told, "W" * 400)
        | {"detail": dict.fromkeys((*PART, *FIRMWARE), "w" * 300), "weak": True},
        "verdict": document["verdict"] | {"note": "A note that is long. " * 30},
        "reproduce": [{"command": "canaryd " + "--case a/b " * 21, "what": "x"}],
        "redacted": True,
        "kind": "evidence",
        "why_not_rma": "because of many words " * 40,
    }


@pytest.mark.parametrize(
    ("kind", "paper"),
    [
        *((kind, "A4") for kind in ("rma", "health", "overflowing")),
        ("overflowing", "letter"),
        *(pytest.param(kind, "letter", marks=pytest.mark.slow) for kind in ("rma", "health")),
    ],
)
def test_the_summary_prints_as_two_pages(store, tmp_path, kind, paper):
    """On either paper, whatever the record holds; the appendices begin on the third page."""
    if kind == "health":
        store.set_verdict(verdict(device=PEER, state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, document, _ = written(store, tmp_path, SIBLING if kind == "health" else GPU)
    html = page(overflowing(document) if kind == "overflowing" else document)
    html = html.replace("@page {", f"@page {{ size: {paper};")
    sheets, heading, appendices = html.partition('<h2 class="part">')
    assert heading
    alone = sheets[: sheets.index("<h1>")] + heading + appendices
    assert printed(html, tmp_path, "whole") == 2 + printed(alone, tmp_path, "appendices")


def test_the_second_page_cuts_no_span_into_another(store, tmp_path):
    """A span "0…79" cut after its first letter reads as "0…7…": rows and columns of a case stay whole."""
    found = evidence(17, 40, 13, wrong=500)
    wide = {"row": Span(first=0, last=1094, distinct=86), "column": Span(first=0, last=1079, distinct=70)}
    (compared,) = run(30, wrong=1).comparisons
    for number in (30, 31, 32):
        store.add_run(run(number, comparisons=(replace(compared, seed=43, evidence=replace(found, lines=wide)),)))
    _, _, html = written(store, tmp_path)
    text = "All wrong elements lie in row 0…1094; column 0…1079."
    assert f"<p>Worst case: {text}</p>" in html


def test_each_wrong_element_is_listed_once(store, tmp_path):
    """Two runs recorded the same wrong element: one row, seen twice. The record has both."""
    _, document, html = written(store, tmp_path)
    assert len(document["failures"][0]["elements"]) == 2
    assert html.count("[17, 40]</td>") == 1
    assert '<td data-c="times seen" class="n">2</td>' in html


def test_failing_tests_stand_side_by_side_with_shares_of_places_and_one_chart(store, tmp_path):
    """A column for each test that failed, each place with its share, and the bits of all formats in one chart."""
    other = replace(run(30, wrong=1, probe="exact_attention"), id="00000000001e-abcdef")
    wide = replace(other.comparisons[0], case="float32/full", place=place("core 3"), trials=4, wrong_trials=1)
    store.add_run(replace(other, comparisons=(wide,)))
    _, document, html = written(store, tmp_path)
    columns = re.search(r'<div class="evidence">.*?</thead>', html, re.DOTALL)[0]
    assert [columns.count(f">{probe}</th>") for probe in ("exact_matmul", "exact_attention")] == [1, 1]
    assert len(document["bits"]) == 2
    assert html.count('<figure class="bars">') == 1
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
    assert failing_core(failure) is None
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
        ({}, None),
    ],
)
def test_the_failing_core_is_where_most_was_wrong(wrong, core):
    """All threads together and a device name no core; core 0 is one."""
    places = [
        {"place": p, "unit": place(p).unit, "numbers": list(place(p).numbers), "results": {"wrong": n, "total": 10}}
        for p, n in wrong.items()
    ]
    assert failing_core({"places": places}) == core


def test_one_row_is_no_rows(store, tmp_path):
    """A cell of two rows has rows, a cell of one has a row."""
    _, _, page = written(store, tmp_path)
    assert "rows 16…17, columns 39…41: 2" in page
    m = {"rows": 4, "columns": 64, "row_bins": 4, "column_bins": 32, "axes": ["row", "column"], "elements": 1}
    failure = {"case": "c", "wrong_elements": 1, "map": {**m, "counts": [[2, 5, 1]]}}
    assert "Fullest cells: row 2, columns 10…11: 1." in heat_map(failure)


def test_the_title_of_a_chart_fits_into_it():
    """With the name of the bit where there is room; always the bit, its share and of how many."""
    few = {"format": "bfloat16", "width": 16, "bits": [{"bit": 11, "name": "exponent", "count": 7}]}
    many = {
        "format": "float8_e4m3fn",
        "width": 8,
        "bits": [{"bit": 0, "name": "lowest of the mantissa", "count": 10**7}],
    }
    drawn = pictures.bit_chart([few, many])
    titles = re.findall(r'<text x="0" y="[0-9]+">(.*?)</text>', drawn)
    assert titles == ["float8_e4m3fn: bit 0, 100 % of 10,000,000 flips", "bfloat16: bit 11 (exponent), 7 of 7 flips"]
    assert max(map(len, titles)) <= pictures.TITLE


def test_further_steps_are_those_that_the_first_page_does_not_have(store, tmp_path):
    """Said once; and an Xid about which there is nothing to do is no step."""
    store.add_events(
        [Event(device=GPU.uuid, kind="xid", name=n, code=int(n), first=NOW, last=NOW) for n in ("63", "48")]
    )
    _, document, html = written(store, tmp_path)
    assert not [step for step in document["next_step"] if "nothing to do" in step]
    further = html.split("<h2>Further steps</h2>")[1].split("</section>")[0]
    assert further.count("<li>") == sum(len(step) > STEP or n >= STEPS for n, step in enumerate(document["next_step"]))
    assert "Open a case with NVIDIA" not in further
