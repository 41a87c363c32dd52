"""The dossier: its facts are those of the store, its files check, it says what it is not, and it opens anywhere."""

from __future__ import annotations

import gzip
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from canaryd.config import load
from canaryd.config.settings import Config
from canaryd.dossier import advice, failures, ocp, redact, write
from canaryd.dossier.document import DossierError, gather
from canaryd.dossier.page import page
from canaryd.dossier.pictures import heat_map
from canaryd.dossier.places import failing_core
from canaryd.dossier.summary import FIRMWARE, PART
from canaryd.dossier.text import ranges
from canaryd.engine.engine import Engine
from canaryd.facts import Comparison, Evidence, Exactness, Place, Reading, Span
from canaryd.judge import statistics
from canaryd.judge.phrases import PROVIDER
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, Run, State, Verdict
from canaryd.store.store import Store
from tests.command import ROOT, canaryd, configure
from tests.places import line, place

VALIDATOR = jsonschema.Draft202012Validator(json.loads((ROOT / "docs/dossier.schema.json").read_text()))
NOW = 1_790_000_000.0
HOUR = 3600.0
UUID = "GPU-5f1c0a44-1111-2222-3333-444455556666"
PEER = "GPU-77aa0a44-1111-2222-3333-444455556666"
SERIAL = "1650923004711"
HOST = "rack7-node12"
CASE = "bfloat16/cancel/prefill/nt@64x96x128"
GPU = Device(
    uuid=UUID,
    backend="cuda",
    index=3,
    torch_index=3,
    model="NVIDIA H200",
    detail={"serial": SERIAL, "bus_id": "0000:65:00.0", "vbios": "96.00.A5.00.01", "driver": "580.65.06"},
)
SIBLING = replace(GPU, uuid=PEER, index=4, torch_index=4, detail={"serial": "1650923004712", "bus_id": "0000:66:00.0"})
STACK = {"torch": "2.9.0", "driver": "580.65.06", "cuda": "13.0", "weights": "/srv/models/llama/secret-name"}
NASTY = "<script>alert(1)</script>\x1b[31m"


def evidence(row: int, column: int, bit: int, wrong: int = 1) -> Evidence:
    right = 0x4180
    return Evidence(
        wrong=wrong,
        total=64 * 96,
        first=(((row, column), f"0x{right:04x}", f"0x{right ^ 1 << bit:04x}"),),
        bits={str(bit): wrong},
        zeroed=0,
        nonfinite=0,
        lines={"row": line(row), "column": line(column)},
        pattern=f"element [{row}, {column}]: only bit {bit} is flipped",
        repeats=3,
    )


def run(number: int, *, device: str = UUID, wrong: int = 0, trials: int = 100, **changed) -> Run:
    """Return a run of the one case; `wrong` of its `trials` results had bit 13 of element [17, 40] flipped."""
    compared = Comparison(
        case=CASE,
        shape="M=64 N=96 K=128",
        seed=42,
        exactness=Exactness.UNIVERSAL,
        place=place("device"),
        trials=trials,
        wrong_trials=wrong,
        evidence=evidence(17, 40, 13) if wrong else None,
    )
    given = {
        "id": f"{number:012x}-abcdef",
        "device": device,
        "probe": "exact_matmul",
        "probe_version": 1,
        "started": NOW - 30 * HOUR + number * HOUR,
        "seconds": 4.0,
        "outcome": Outcome.COMPLETED,
        "comparisons": (compared,),
        "readings": (Reading(name="trials", value=trials, unit="1"),),
        "stack": STACK,
        "environment": {"hostname": HOST},
        "repro": "canaryd check --device cuda:3 --probe exact_matmul --seed 42 --level quick",
    }
    return Run(**given | changed)


def poll(number: int, celsius: float) -> Run:
    readings = (
        Reading(name="temperature_celsius", value=celsius, unit="celsius", labels={"sensor": "core"}),
        Reading(name="power_watts", value=600.5, unit="watts"),
        Reading(name="clock_hertz", value=1.98e9, unit="hertz", labels={"domain": "sm"}),
    )
    at = NOW - 30 * HOUR + number * HOUR + 10
    return run(number + 500, probe="nvidia_telemetry", started=at, comparisons=(), readings=readings, repro="")


def verdict(**changed) -> Verdict:
    finding = Finding(
        rule="exact-mismatch-confirmed",
        state=State.FAULTY,
        cause=Cause.HARDWARE,
        message=f"confirmed: 2 runs are wrong {NASTY}",
        probe="exact_matmul",
        repro="canaryd check --device cuda:3",
        runs=("1", "2"),
        rivals=(Rival(cause=Cause.SOFTWARE, why="cuda:4 computed the same bytes right", rejected=True),),
    )
    given = {"device": UUID, "state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (finding,)}
    return Verdict(**given | {"decided": NOW - 60, "since": NOW - 5 * HOUR} | changed)


@pytest.fixture
def store(tmp_path):
    """The record of a GPU that is wrong in 2 of 1,000 results, with a clean sibling, heat, an Xid and a new driver."""
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        opened.see_device(GPU, NOW - 40 * HOUR)
        opened.see_device(SIBLING, NOW - 40 * HOUR)
        old = {**STACK, "driver": "570.10.01"}
        for n in range(10):
            opened.add_run(run(n, wrong=int(n in (5, 7)), stack=old if n < 3 else STACK))
            opened.add_run(run(n + 100, device=PEER, started=NOW - HOUR * n))
            opened.add_poll(poll(n, 50.0 + n), {Outcome.COMPLETED: 1})
        xid = Event(
            device=UUID, kind="xid", name="31", code=31, first=NOW - 3 * HOUR, last=NOW - 3 * HOUR, detail=NASTY
        )
        told = f"on {HOST} (10.1.2.3) at PCI:0000:65:00: MMU fault, name=python3, /home/alice/train.py token=abcd1234"
        opened.add_events([xid, replace(xid, name="94", code=94, detail=told, first=NOW - HOUR, last=NOW - HOUR)])
        opened.add_ack(Ack(device=UUID, kind="acknowledged", at=NOW - 600, until=NOW + HOUR, reason="known", by="bob"))
        opened.set_verdict(verdict(state=State.SUSPECT, decided=NOW - 6 * HOUR, since=NOW - 6 * HOUR))
        opened.set_verdict(verdict())
        yield opened


def written(store, tmp_path, device=GPU, engine=None, **changed):
    """Write a dossier, check all that must hold of any, and return (directory, document, page)."""
    made = write.write(store, Config(), engine, device, tmp_path / "out", **{"redact": False, "now": NOW, **changed})
    document = json.loads((made / "dossier.json").read_text())
    VALIDATOR.validate(document)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    assert {line.partition(": ")[0] for line in done.stdout.splitlines()} == files - {"SHA256SUMS"}
    assert {c["file"] for c in document["contents"]} == files
    assert all(a["why"].strip() for a in document["absent"])
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
    return made, document, (made / "dossier.html").read_text()


# --- Facts -----------------------------------------------------------------------------------------------------------


def test_the_facts_are_those_of_the_store(store, tmp_path):
    """State, identity, case, element, bit, rates, times, stack change and conditions, as they were recorded."""
    _, document, _ = written(store, tmp_path)
    assert (document["kind"], document["title"]) == ("rma", "RMA dossier of cuda:3")
    assert document["verdict"]["state"] == "faulty"
    assert document["identity"]["serial"] == SERIAL
    assert document["identity"]["host"] == HOST
    (failure,) = document["failures"]
    assert failure["results"] == {"wrong": 2, "total": 1000}
    assert (failure["runs"]["wrong"], failure["runs"]["total"]) == (2, 10)
    assert (failure["uploads"]["wrong"], failure["uploads"]["total"]) == (2, 16)  # 3 clean ones after each wrong one
    assert failure["bits"] == {"13": 2}
    assert failure["format"] == "bfloat16"
    assert {tuple(e["index"]) for e in failure["elements"]} == {(17, 40)}
    assert document["bits"] == [
        {"format": "bfloat16", "width": 16, "bits": [{"bit": 13, "name": "exponent", "count": 2}]}
    ]
    where = failure["map"]
    assert where["counts"] == [[17 * 32 // 64, 40 * 32 // 96, 2]]
    assert (failure["first"], failure["last"]) == (NOW - 25 * HOUR, NOW - 23 * HOUR)


def test_a_finding_shows_message_action_and_evidence(store, tmp_path):
    """What was seen, then what to do; what it rests on opens on request, and the OCP diagnosis has the first two."""
    (finding,) = verdict().findings
    finding = replace(finding, message="Wrong results.", action="Take it out.", evidence=("3 of 3 retests failed.",))
    store.set_verdict(verdict(findings=(finding,)))
    made, document, page = written(store, tmp_path)
    told = document["verdict"]["findings"][0]
    assert (told["message"], told["action"], told["evidence"]) == (
        *("Wrong results.", "Take it out."),
        ["3 of 3 retests failed."],
    )
    details = "<ul><li>3 of 3 retests failed.</li></ul>"
    assert f"<p>Wrong results.</p><p><strong>Do now:</strong> Take it out.</p>{details}" in page
    assert page.index("<summary>What each rule says</summary>") < page.index(details)
    assert '"message": "Wrong results. Take it out."' in (made / "ocp.jsonl").read_text()


def test_peers_that_computed_the_same_bytes_are_named(store, tmp_path):
    """With how many results, none of them wrong."""
    _, document, _ = written(store, tmp_path)
    (peer,) = document["peers"]
    assert (peer["uuid"], peer["same_bytes"], peer["same_bytes_wrong"], peer["same_stack"]) == (PEER, 1000, 0, True)


def test_the_timeline_has_conditions_stacks_verdicts_xids_and_acks(store, tmp_path):
    """In order of time; a wrong run says how hot it was."""
    _, document, _ = written(store, tmp_path)
    entries = document["timeline"]
    assert [e["at"] for e in entries] == sorted(e["at"] for e in entries)
    kinds = [e["kind"] for e in entries]
    assert {"wrong", "stack", "verdict", "xid", "ack"} <= set(kinds)
    assert kinds.count("stack") == 1
    assert next(e for e in entries if e["kind"] == "stack")["text"] == "driver: 570.10.01 → 580.65.06"
    wrong = next(e for e in entries if e["kind"] == "wrong")
    assert wrong["conditions"]["temperature_celsius"]["value"] == 55.0
    assert {s["reading"] for s in document["series"]} == {
        "temperature_celsius{sensor=core}",
        "power_watts",
        "clock_hertz{domain=sm}",
    }


def test_the_next_step_is_the_vendors(store, tmp_path):
    """NVIDIA's Field Diagnostic, and what its catalogue says of the Xids seen."""
    _, document, _ = written(store, tmp_path)
    text = " ".join(document["next_step"])
    assert "Field Diagnostic" in text
    assert "Xid 31 (" in text
    assert "Xid 94 (" in text


def test_a_weak_identity_yields_no_rma_dossier(store, tmp_path):
    """The same record under a weak identity: evidence, with the reason, in title, page and next step."""
    weak = replace(GPU, weak_identity=True)
    store.see_device(weak, NOW)
    _, document, page = written(store, tmp_path, weak)
    assert document["kind"] == "evidence"
    assert document["title"] == "cuda:3: evidence, not an RMA dossier"
    assert "Not an RMA dossier: its identity is weak" in page
    assert PROVIDER in document["next_step"][0]


@pytest.mark.parametrize(
    ("state", "cause", "kind"),
    [
        (State.FAULTY, Cause.SOFTWARE, "evidence"),
        (State.SUSPECT, Cause.HARDWARE, "evidence"),
        (State.FAULTY, Cause.UNDETERMINED, "evidence"),
        (State.UNKNOWN, Cause.HARNESS, "evidence"),
        (State.FAULTY, Cause.HARDWARE, "rma"),
    ],
)
def test_only_confirmed_hardware_is_an_rma_case(store, tmp_path, state, cause, kind):
    """Everything else is evidence, and says which verdict would be needed."""
    store.set_verdict(verdict(state=state, cause=cause))
    _, document, _ = written(store, tmp_path)
    assert document["kind"] == kind
    assert (document["why_not_rma"] == "") == (kind == "rma")
    assert ("No RMA" in document["next_step"][0]) == (cause in (Cause.SOFTWARE, Cause.HARNESS))


def test_a_healthy_device_says_so_and_what_was_looked_at(store, tmp_path):
    """No failing case; the rate that its clean results rule out."""
    store.set_verdict(verdict(device=PEER, state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, document, page = written(store, tmp_path, SIBLING)
    assert (document["kind"], document["failures"]) == ("health", [])
    assert document["summary"].startswith("cuda:4 (NVIDIA H200, serial 1650923004712) is HEALTHY since ")
    assert document["summary"].endswith("1,000 results compared, 0 wrong.")
    assert document["probes"][0]["rules_out"] == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert "1,000 exact results compared, 0 wrong." in page


def test_a_device_that_nobody_judged_is_unknown(tmp_path):
    """An empty record is no health."""
    with Store.open(tmp_path / "empty", now=lambda: NOW) as empty:
        empty.see_device(GPU, NOW)
        _, document, _ = written(empty, tmp_path)
    assert (document["verdict"]["state"], document["kind"]) == ("unknown", "evidence")
    assert "There is no verdict yet." in document["verdict"]["note"]
    assert any("no run of this device is on record" in text for text in document["not_checked"])


def test_an_old_verdict_says_how_old_it_is(store, tmp_path):
    """Nobody has judged the device for a week: that is said beside what was known."""
    _, document, page = written(store, tmp_path, now=NOW + 7 * 86_400)
    assert document["verdict"]["note"] == "This verdict is 7 days old; nothing newer is judged."
    assert document["verdict"]["note"] in page


def test_a_healthy_verdict_does_not_outlive_a_failure(store, tmp_path):
    """Judged healthy, wrong since: without an engine it is unknown, never a health report, and says what to run."""
    store.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=NOW - 24 * HOUR))
    _, document, page = written(store, tmp_path)
    assert (document["kind"], document["verdict"]["state"]) == ("evidence", "unknown")
    assert re.search(
        r"Not judged yet: 1 run failed after the last verdict \(healthy, .*canaryd check --device cuda:3\.", page
    )
    assert "HEALTHY" not in page
    assert "Nothing to do" not in page


def test_failures_that_were_answered_are_told_as_such(store, tmp_path):
    """A healthy verdict that is newer than every failure stands, and the summary does not contradict it."""
    store.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, document, _ = written(store, tmp_path)
    assert document["kind"] == "health"
    assert "Earlier failures are resolved (see the timeline): exact_matmul" in document["summary"]


def test_an_engine_judges_anew(tmp_path):
    """The stored verdict says healthy, a run is wrong since: the judge's word of now stands, with what was stored."""
    settings = replace(Config(), state_dir=tmp_path / "state")
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        opened.see_device(GPU, NOW - 40 * HOUR)
        opened.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=NOW - 20 * HOUR))
        for n in (25, 26):
            opened.add_run(run(n, wrong=1))
        engine = Engine(settings, opened, clock=lambda: NOW)
        engine.recall()
        assert UUID in engine.devices
        document = gather(opened, settings, GPU, now=NOW, engine=engine)
        assert (document["verdict"]["state"], document["kind"]) in {("faulty", "evidence"), ("faulty", "rma")}
        assert document["verdict"]["note"].startswith("Judged again for this dossier. The stored verdict of ")
        assert document["verdict"]["note"].endswith(" was healthy.")
        assert document["timeline"][-1]["kind"] == "verdict"
        assert document["timeline"][-1]["text"].startswith("faulty")


def test_a_drill_that_never_was_is_refused(store, tmp_path):
    """Nothing is written, and the message says what to run."""
    with pytest.raises(DossierError, match=r"no drill is on record; run canaryd drill --device cuda:3"):
        written(store, tmp_path, drill=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("judged", [False, True])
def test_what_was_never_tested_is_to_be_checked_first(tmp_path, judged):
    """There is no script to run where nothing has run."""
    with Store.open(tmp_path / "empty", now=lambda: NOW) as empty:
        empty.see_device(GPU, NOW)
        if judged:
            empty.set_verdict(verdict(state=State.UNKNOWN, cause=Cause.UNDETERMINED, findings=()))
        _, document, page = written(empty, tmp_path)
    assert document["next_step"][0].endswith("run canaryd check --device cuda:3 first.")
    assert "reproduce.py" not in page


def test_an_open_question_without_a_wrong_result_names_no_script(store, tmp_path):
    """It ran and nothing was wrong: what is open stands in the findings."""
    store.set_verdict(verdict(device=PEER, state=State.UNKNOWN, cause=Cause.UNDETERMINED, findings=()))
    _, document, _ = written(store, tmp_path, SIBLING)
    assert "no wrong result is on record" in document["next_step"][0]
    assert "reproduce.py" not in " ".join(document["next_step"])


# --- Statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "total", "low", "high"),
    [
        # Clopper-Pearson at 95 %: closed forms for none and all, and two values of C. J. Clopper and E. S. Pearson's
        # definition by the F distribution.
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (1, 10, 0.0025286, 0.4450161),
        (5, 10, 0.1870860, 0.8129140),
        (2, 1000, 0.0002423, 0.0072058),
    ],
)
def test_the_interval_is_that_of_clopper_and_pearson(wrong, total, low, high):
    """Against closed forms and tabled values."""
    assert statistics.interval(wrong, total) == pytest.approx((low, high), abs=2e-6)


@pytest.mark.parametrize(("wrong", "total"), [(1, 4), (3, 7), (30, 1000), (999, 1000), (7, 10**6)])
def test_the_interval_leaves_two_and_a_half_percent_on_either_side(wrong, total):
    """By its definition, with the binomial summed term by term."""
    low, high = statistics.interval(wrong, total)

    def at_most(k: int, p: float) -> float:
        return math.fsum(math.comb(total, i) * p**i * (1 - p) ** (total - i) for i in range(k + 1))

    if wrong < 100:
        assert at_most(wrong, high) == pytest.approx(0.025, rel=1e-6)
        assert 1 - at_most(wrong - 1, low) == pytest.approx(0.025, rel=1e-6)
    mirrored = statistics.interval(total - wrong, total)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


def test_three_results_of_one_upload_are_one_trial(tmp_path):
    """One upload was hit: 3 of 3 results, and the interval is that of 1 of 4 uploads, everywhere."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        one.add_run(run(1, wrong=3, trials=3))
        made, document, page = written(one, tmp_path)
    (failure,) = document["failures"]
    low, high = statistics.interval(1, 4)  # three fresh uploads were clean
    for counted in (failure, failure["places"][0], document["places"][0], document["probes"][0]):
        assert counted["results"] == {"wrong": 3, "total": 3}
        assert counted["uploads"] == {"wrong": 1, "total": 4, "low": low, "high": high}
    assert document["summary"].endswith(
        f"exact_matmul computed wrong results in 1 of 4 uploads (3 of 3 results); flipped bit: 13. Case: {CASE}."
    )
    assert "29.2 % to 100 %" not in page  # that of 3 of 3
    assert "0.631 % to 80.6 %" in page
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    told = [
        m["metadata"]
        for line in lines
        if (m := line.get("testStepArtifact", {}).get("measurement", {})).get("metadata")
    ]
    assert [(m["results"], m["uploads"], m["wrongUploads"], m["uploadRateHigh"]) for m in told] == [(3, 4, 1, high)]


def test_uploads_that_a_comparison_stands_for_are_counted(tmp_path):
    """A clean comparison may sum up many."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        clean = run(2, device=UUID)
        one.add_run(run(1, wrong=1))
        one.add_run(replace(clean, comparisons=(replace(clean.comparisons[0], uploads=46),)))
        (failure,) = gather(one, Config(), GPU, now=NOW)["failures"]
    assert (failure["uploads"]["wrong"], failure["uploads"]["total"]) == (1, 50)


def test_no_trial_has_no_interval():
    """Nothing is known of what was not tried."""
    assert failures.rate(0, 0) == {"wrong": 0, "total": 0, "low": None, "high": None}


@pytest.mark.torch
def test_bits_are_named_as_the_worker_names_them():
    """The daemon must not import the worker, so it has a copy of the formats."""
    torch = pytest.importorskip("torch", reason="torch is not installed in this interpreter")
    from canaryd.worker.numeric.evidence import bit_name

    for form in failures.MANTISSA:
        for bit in range(failures.WIDTH[form]):
            assert bit_name(getattr(torch, form), bit) == f"bit {bit} ({failures.bit_name(form, bit)})"


def test_numbers_in_few_words():
    """Stretches of three and more are one word."""
    assert ranges([0, 1, 2, 3, 7, 8, 11]) == "0…3, 7, 8, 11"
    assert ranges([]) == ""


# --- The page --------------------------------------------------------------------------------------------------------


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
    made, _, _ = written(store, tmp_path)
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


# --- Redaction -------------------------------------------------------------------------------------------------------


def test_a_redacted_dossier_names_nothing(store, tmp_path):
    """No host, serial, uuid, bus id, path or address in any file; the part's own facts stay, and the page says so."""
    made, document, page = written(store, tmp_path, redact=True)
    text = "\n".join(p.read_text() for p in made.rglob("*") if p.is_file()).lower()
    private = (UUID, PEER, UUID.partition("-")[2], SERIAL, HOST, "0000:65:00", "10.1.2.3", "/srv/models", "secret-name")
    for name in private:
        assert name.lower() not in text, name
    assert "redacted: names of hosts" in text
    assert document["redacted"] is True
    assert (document["identity"]["model"], document["failures"][0]["bits"]) == ("NVIDIA H200", {"13": 2})
    assert document["identity"]["detail"]["vbios"] == "96.00.A5.00.01"
    assert "Redacted: " in page


@pytest.mark.parametrize("host", ["vm", "x", "device", "healthy", "state", "faulty"])
def test_no_name_of_a_host_is_too_short_or_too_plain(tmp_path, host):
    """Where a field holds it, it is a pseudonym; the words of the format are not."""
    with Store.open(tmp_path / "one", now=lambda: NOW) as one:
        one.see_device(GPU, NOW)
        one.add_run(run(1, wrong=1, environment={"hostname": host}))
        one.set_verdict(verdict())
        made, document, page = written(one, tmp_path, redact=True)
    assert re.fullmatch(r"\[host [0-9a-f]{8}\]", document["identity"]["host"])
    assert (document["verdict"]["state"], document["failures"][0]["subject"]) == ("faulty", "device")
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    about = lines[1]["testRunArtifact"]["testRunStart"]["dutInfo"]
    assert about["name"] == about["dutInfoId"] == document["identity"]["host"]
    assert f"<td>{document['identity']['host']}</td>" in page
    assert f"<td>{host}</td>" not in page


def test_equal_names_stay_equal_inside_and_differ_outside(store, tmp_path):
    """The part's uuid is one pseudonym wherever it stands; another dossier has another one."""
    first, one, _ = written(store, tmp_path, redact=True)
    _, other, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    assert re.fullmatch(r"\[uuid [0-9a-f]{8}\]", one["identity"]["uuid"])
    assert one["identity"]["uuid"] != other["identity"]["uuid"]
    assert one["peers"][0]["uuid"] not in (one["identity"]["uuid"], other["peers"][0]["uuid"])
    lines = [json.loads(line) for line in (first / "ocp.jsonl").read_text().splitlines()]
    assert lines[1]["testRunArtifact"]["testRunStart"]["metadata"]["uuid"] == one["identity"]["uuid"]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("bus 0000:65:00.0", "bus 00000000:65:00.0", True),
        ("bus 0000:65:00.0", "bus 0000:65:00", True),
        ("at 0000:65:00.0", "at 0000:66:00.0", False),
        ("GPU-12345678-1234-1234-1234-123456789abc", "12345678-1234-1234-1234-123456789ABC", True),
        (HOST, HOST.upper(), True),
        ("see fe80::1ff:fe23:4567:890a", "see fe80::1", False),
    ],
)
def test_a_thing_has_one_pseudonym_however_it_is_written(store, a, b, equal):
    """Domain, function, prefix and case do not make another thing."""
    redactor = redact.Redactor(store, gather(store, Config(), GPU, now=NOW), salt=b"salt")
    one, other = re.search(r"\[\w+ \w+\]", redactor.text(a)), re.search(r"\[\w+ \w+\]", redactor.text(b))
    assert one
    assert other
    assert (one[0] == other[0]) == equal


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.9.0+cu130",
        "2026-11-21 19:27:40",
        "driver 580.65.06",
        "vbios 96.00.A5.00.01",
        "bits 3, 4 and/or 5",
        "std::x",
    ],
)
def test_what_names_nothing_is_left_alone(store, text):
    """Versions, times and prose are no addresses."""
    redactor = redact.Redactor(store, gather(store, Config(), GPU, now=NOW), salt=b"salt")
    assert redactor.text(text) == text


# --- Files -----------------------------------------------------------------------------------------------------------


def test_the_archive_is_the_directory_and_reproducible(store, tmp_path):
    """The same names and bytes; nobody's files; written again at the same time, the archive is equal bit for bit."""
    made, _, _ = written(store, tmp_path)
    archive = made.with_name(made.name + ".tar.gz")
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        names = [m.name for m in members]
        assert names == sorted(names)
        assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "", NOW)}
        inside = {m.name: tar.extractfile(m).read() for m in members if m.isfile()}
    outside = {str(p.relative_to(made.parent)): p.read_bytes() for p in made.rglob("*") if p.is_file()}
    assert inside == outside
    shutil.move(made.parent, tmp_path / "before")
    again, _, _ = written(store, tmp_path)
    assert archive.read_bytes() == (tmp_path / "before" / archive.name).read_bytes()
    assert again.name == "canaryd-dossier-cuda-3-20260921T141320Z"


def test_a_dossier_is_never_overwritten(store, tmp_path):
    """The second one in the same second is refused, and the first stays."""
    made, _, _ = written(store, tmp_path)
    with pytest.raises(DossierError, match="already exists"):
        written(store, tmp_path)
    assert (made / "SHA256SUMS").exists()


def test_what_cannot_be_written_leaves_nothing(store, tmp_path):
    """A file where the directory should be: one sentence, no rest."""
    (tmp_path / "out").write_text("a file")
    with pytest.raises(DossierError, match="cannot be made: File exists"):
        write.write(store, Config(), None, GPU, tmp_path / "out", redact=False, now=NOW)
    assert (tmp_path / "out").read_text() == "a file"


def tools(directory: Path, **scripts: str) -> str:
    """Put programs of these names in a directory, and return a search path that begins with it."""
    directory.mkdir()
    for name, body in scripts.items():
        path = directory / name.replace("_", "-").replace("-sh", ".sh")
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_the_vendors_tool_is_asked_about_this_device(store, tmp_path, monkeypatch):
    """`nvidia-smi -q -i UUID`, with its processes left out; with --redact its names are pseudonyms as well."""
    said = (
        'echo "asked: $*"; echo "    Serial Number : 1650923004711"; echo "    Processes"; echo "        Name : python"'
    )
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_smi=said))
    made, document, _ = written(store, tmp_path)
    text = (made / "nvidia-smi-q.txt").read_text()
    assert f"asked: -q -i {UUID}" in text
    assert SERIAL in text
    assert "python" not in text
    assert any(a["file"] == "nvidia-bug-report.log.gz" for a in document["absent"])
    made, _, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    text = (made / "nvidia-smi-q.txt").read_text()
    assert SERIAL not in text
    assert re.search(r"Serial Number : \[serial [0-9a-f]{8}\]", text)


@pytest.mark.parametrize(("body", "why"), [("exit 9", "ended with status 9"), ("sleep 60", "did not end within 0.5 s")])
def test_a_tool_that_fails_is_absent_with_the_reason(store, tmp_path, monkeypatch, body, why):
    """Its failure or its hanging costs its file alone."""
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_smi=body))
    monkeypatch.setitem(write.TOOL_PATIENCE, "nvidia-smi", 0.5)
    _, document, _ = written(store, tmp_path)
    (absent,) = (a for a in document["absent"] if a["file"] == "nvidia-smi-q.txt")
    assert why in absent["why"]


@pytest.mark.skipif(os.geteuid() != 0, reason="nvidia-bug-report.sh needs root, so canaryd does not start it here")
def test_the_bug_report_is_cleaned_and_never_redacted(store, tmp_path, monkeypatch):
    """It comes along without processes and names; a redacted dossier leaves it out and says why."""
    lines = r"printf 'uname of rack7\n    Processes\n        Name : python\n    Next : /home/eve/x\n' | gzip > $2"
    monkeypatch.setenv("PATH", tools(tmp_path / "bin", nvidia_bug_report_sh=lines))
    made, _, _ = written(store, tmp_path)
    text = gzip.decompress((made / "nvidia-bug-report.log.gz").read_bytes()).decode()
    assert "Next : /home/[user]/x" in text
    assert "python" not in text
    _, document, _ = written(store, tmp_path, redact=True, now=NOW + 1)
    (absent,) = (a for a in document["absent"] if a["file"] == "nvidia-bug-report.log.gz")
    assert "cannot be redacted" in absent["why"]


# --- OCP Test & Validation -------------------------------------------------------------------------------------------


def test_the_ocp_output_follows_the_specification(store, tmp_path):
    """Version first, one run, steps that begin and end, sequence numbers without a gap, references that exist."""
    made, document, _ = written(store, tmp_path)
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    assert lines[0]["schemaVersion"] == {"major": 2, "minor": 0}
    assert [line["sequenceNumber"] for line in lines] == list(range(len(lines)))
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"]) for line in lines)
    assert all(len(line.keys() & {"schemaVersion", "testRunArtifact", "testStepArtifact"}) == 1 for line in lines)
    start = lines[1]["testRunArtifact"]["testRunStart"]
    assert {"name", "version", "commandLine", "parameters", "dutInfo"} <= start.keys()
    (part,) = start["dutInfo"]["hardwareInfos"]
    assert (part["serialNumber"], part["name"]) == (SERIAL, "NVIDIA H200")
    assert lines[-1]["testRunArtifact"] == {"testRunEnd": {"status": "COMPLETE", "result": "FAIL"}}
    open_steps: set[str] = set()
    for entry in lines:
        if step := entry.get("testStepArtifact"):
            if "testStepStart" in step:
                assert step["testStepId"] not in open_steps
                open_steps.add(step["testStepId"])
            assert step["testStepId"] in open_steps
            for kind in ("measurement", "diagnosis"):
                assert step.get(kind, {"hardwareInfoId": part["hardwareInfoId"]})["hardwareInfoId"] == "0"
            if "file" in step:
                assert (made / step["file"]["uri"].removeprefix("file:")).exists()
            if "testStepEnd" in step:
                open_steps.remove(step["testStepId"])
    assert open_steps == set()
    verdicts = [
        entry["testStepArtifact"]["diagnosis"] for entry in lines if "diagnosis" in entry.get("testStepArtifact", {})
    ]
    assert [(v["verdict"], v["type"]) for v in verdicts] == [("exact-mismatch-confirmed", "FAIL")]
    assert ocp.lines(document) == (made / "ocp.jsonl").read_text()


# --- From an injected fault to the dossier ---------------------------------------------------------------------------

ONE_CORE = '''
"""Wrong on core 3 alone: one element of its tile, bit 5, in 2 of every 8 results."""

from canaryd.probe import Comparison, Evidence, Exactness, Place, ProbeSpec, Reading, Span

SPEC = ProbeSpec(name="one_core", summary="wrong on one core", numeric=False)
EVIDENCE = Evidence(
    wrong=1, total=4096, first=(((17, 40), "0x3f800000", "0x3f800020"),), bits={"5": 1}, zeroed=0, nonfinite=0,
    lines={"row": Span(first=17, last=17, distinct=1), "column": Span(first=40, last=40, distinct=1)},
    pattern="element [17, 40]: only bit 5 (mantissa) is flipped",
)


def run(ctx):
    yield Reading(name="trials", value=24, unit="1")
    for core in (0, 1, 3):
        yield Comparison(
            case=f"float32/dense/square/{core}", shape="M=64 N=64 K=8", seed=core, exactness=Exactness.UNIVERSAL,
            place=Place(unit="core", numbers=(core,)), trials=8, wrong_trials=2 * (core == 3),
            evidence=EVIDENCE if core == 3 else None,
        )
'''


def test_a_fault_of_one_core_is_named_with_tile_bit_and_rate(tmp_path):
    """A probe that is wrong on core 3, found and confirmed by a real check: the dossier names exactly that."""
    settings = configure(tmp_path)
    (tmp_path / "probes.d/one_core.py").write_text(ONE_CORE)
    (tmp_path / "probes.d/one_core.py").chmod(0o644)
    answer = canaryd("check", "--config", settings, "--state-dir", tmp_path / "state", "--json")
    assert answer.code == 2, answer.err
    with Store.open(tmp_path / "state") as store:
        device = store.devices()[0].device
        made, document, page = written(store, tmp_path, device, now=store.runs(device.uuid)[-1].started + 60)
    (failure,) = document["failures"]
    assert [(p["place"], p["results"]) for p in failure["places"]] == [("core 3", {"wrong": 8, "total": 32})]
    wrong = {p["place"]: p["results"]["wrong"] for p in document["places"]}
    assert wrong == {"core 0": 0, "core 1": 0, "core 3": 8}
    assert (failure["bits"], failure["format"]) == ({"5": 4}, "float32")
    assert failure["map"]["counts"] == [[17 // 2, 40 // 2, 4]]
    assert (failure["uploads"]["wrong"], failure["uploads"]["total"], failure["uploads"]["high"]) == (4, 4, 1.0)
    assert failure["uploads"]["low"] == pytest.approx(0.025 ** (1 / 4))
    assert (failure["runs"]["wrong"], failure["runs"]["total"]) == (4, 4)
    assert document["verdict"]["state"] == "faulty"
    assert "cpu:0: evidence, not an RMA dossier" in page  # a processor's identity is weak
    assert "not made from a seed alone" in failure["exhibit_absent"] or "no worker" in failure["exhibit_absent"]
    rows = (made / failure["exhibit"] / "wrong.csv").read_text().splitlines()
    assert rows[0] == "run,index,expected,observed,flipped_bits"
    assert {row.partition(",")[2] for row in rows[1:]} == {"17 40,0x3f800000,0x3f800020,5"}


@pytest.fixture(scope="module")
def drilled(tmp_path_factory):
    """A real drill on the processor, and its dossier with what a real worker laid out: (directory, document, page)."""
    directory = tmp_path_factory.mktemp("drilled")
    quiet = directory / "kernel.log"
    quiet.touch()
    settings = directory / "canaryd.yaml"
    # One retest: the three of every other drill (tests/engine/test_check.py) are not the point.
    settings.write_text(json.dumps({"telemetry": {"kernel_log": str(quiet)}, "judge": {"confirm_runs": 1}}))
    common = ("--config", settings, "--state-dir", directory / "state")
    answer = canaryd("drill", "--fault", "consistent", "--device", "cpu", "--probe", "exact_integer", "--json", *common)
    assert answer.code == 2, answer.err
    loaded = replace(load.load(settings), state_dir=directory / "state")
    with Store.open(directory / "state") as store:
        engine = Engine(loaded, store)
        engine.recall()
        device = next(d for d in engine.devices.values() if d.backend == "cpu")
        now = store.runs(device.uuid, drill=True)[-1].started + 60
        yield written(store, directory, device, engine, drill=True, now=now)


@pytest.mark.torch
def test_the_dossier_of_a_drill_names_the_injected_element_bit_and_rate(drilled):
    """The fault "consistent": the same exponent bit of the middle element, in every result; every case says so."""
    _, document, _ = drilled
    assert (document["drill"], document["kind"]) == ("consistent", "drill")
    assert document["verdict"]["state"] == "faulty"
    assert len(document["failures"]) >= 10
    for failure in document["failures"]:
        width = 32 if failure["format"] == "int32" else 64
        assert list(failure["bits"]) == [str(width - 2)], failure["case"]
        assert failure["results"]["wrong"] == failure["results"]["total"] > 0
        assert failure["uploads"]["wrong"] == failure["uploads"]["total"] >= 4
        assert failure["uploads"]["high"] == 1.0
        middle = failure["elements_of_result"] // 2
        flat = [
            e["index"][0] * 16 + e["index"][1] if len(e["index"]) == 2 else e["index"][0] for e in failure["elements"]
        ]
        assert set(flat) == {middle}


@pytest.mark.torch
def test_a_drill_is_labelled_everywhere(drilled):
    """Title, banner, verdict, OCP output and next step: nobody may take it for the device's own fault."""
    made, document, page = drilled
    assert document["title"].startswith("DRILL of cpu:0")
    assert "DRILL: canaryd injected" in page
    assert "DRILL: FAULTY" in page
    assert "never count against the device" in document["next_step"][0]
    lines = [json.loads(line) for line in (made / "ocp.jsonl").read_text().splitlines()]
    assert lines[1]["testRunArtifact"]["testRunStart"]["name"] == "canaryd DRILL"
    assert lines[-1]["testRunArtifact"]["testRunEnd"]["result"] == "NOT_APPLICABLE"
    told = [
        entry["testStepArtifact"]["diagnosis"] for entry in lines if "diagnosis" in entry.get("testStepArtifact", {})
    ]
    assert told
    assert all(d["verdict"].startswith("drill-") and d["type"] != "FAIL" for d in told)


@pytest.mark.torch
def test_the_laid_out_case_runs_without_canaryd(drilled, tmp_path):
    """On the sound processor its script finds nothing; with one bit of the golden flipped, exactly that bit."""
    made, document, page = drilled
    laid = [f for f in document["failures"] if f["exhibit"] and not f["exhibit_absent"]]
    assert len(laid) == advice.EXHIBITS
    core = failing_core(laid[0])  # a case may also run on all threads at once
    option, told = ("", "cpu") if core is None else (f" --core {core}", f"cpu, core {core}")
    assert f"{laid[0]['exhibit']}/reproduce.py cpu 1000{option}</pre>" in page
    folder = shutil.copytree(made / laid[0]["exhibit"], tmp_path / "case")
    argv = [sys.executable, "-I", str(folder / "reproduce.py"), "cpu", "2"]
    clean = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert (clean.returncode, clean.stdout) == (0, f"0 of 2 runs were wrong on {told}\n")
    data = bytearray((folder / "golden.npy").read_bytes())
    data[-1] ^= 1 << 6
    (folder / "golden.npy").write_bytes(data)
    spoilt = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=120, check=False)
    assert spoilt.returncode == 1
    assert re.search(r"flipped bits \[(62|30)\]$", spoilt.stdout.splitlines()[0])
    assert spoilt.stdout.splitlines()[-1] == f"2 of 2 runs were wrong on {told}"
