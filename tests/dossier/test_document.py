"""The dossier says what the store has, and no more."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from canaryd.dossier import timeline
from canaryd.dossier.document import DossierError
from canaryd.dossier.failures import enough_runs
from canaryd.engine.polling import KEEP
from canaryd.facts import Span
from canaryd.judge.phrases import PROVIDER
from canaryd.model import Ack, Cause, Event, EventKind, State
from canaryd.store.store import Store
from tests.dossier.made import (
    GPU,
    HOST,
    HOUR,
    NOW,
    PEER,
    PROCESSOR,
    SERIAL,
    SIBLING,
    UUID,
    evidence,
    poll,
    run,
    verdict,
    written,
)


def test_the_facts_are_those_of_the_store(store, tmp_path):
    """State, identity, case, element, bit, rates, times, stack change and conditions, as they were recorded."""
    _, document, _ = written(store, tmp_path)
    assert (document["kind"], document["title"]) == ("rma", f"RMA dossier of NVIDIA H200, serial {SERIAL}")
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
    assert (failure["first"], failure["last"]) == (NOW - 25 * HOUR, NOW - 23 * HOUR)


def test_the_server_of_a_part_is_named(store, tmp_path):
    """Its maker takes the part back, and asks for its serial number and BIOS first."""
    assert written(store, tmp_path)[1]["identity"]["server"] == {}
    before = replace(PROCESSOR, uuid="CPU-0", detail={"product": "the machine of before"})
    store.see_device(before, NOW - HOUR)
    store.see_device(PROCESSOR, NOW)
    made, document, page = written(store, tmp_path, now=NOW + 1)
    assert document["identity"]["server"]["product_serial"] == "S0815X4711"
    assert "memory_serials" not in document["identity"]["server"]
    assert f"<td>{HOST}, Supermicro SYS-821GE-TNHR, serial S0815X4711</td>" in page
    assert "bios American Megatrends 2.3 11/05/2024; driver 580.65.06" in page
    assert '{"info": "Supermicro SYS-821GE-TNHR"}' in (made / "ocp.jsonl").read_text()


def test_what_was_before_a_repair_is_left_out_and_said(store, tmp_path):
    """As in judging: a healthy part with failures beside it would contradict itself."""
    store.add_ack(Ack(device=UUID, kind="repaired", at=NOW - HOUR, until=0.0, reason="reseated", by="bob"))
    store.add_run(run(30, started=NOW - 60))
    store.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, document, html = written(store, tmp_path)
    assert (document["kind"], document["failures"]) == ("health", [])
    assert [p["results"] for p in document["probes"]] == [{"wrong": 0, "total": 100}]
    assert "do not count and are left out" in html


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


def test_every_time_is_in_utc(store, tmp_path, monkeypatch):
    """Who receives it is elsewhere, and a host's clock may have been put back since the fault."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        made, document, page = written(store, tmp_path)
    time.tzset()
    assert document["timezone"] == "UTC"
    assert "is FAULTY (hardware) since 2026-09-21 09:13:20 UTC." in document["summary"]
    for text in (page, (made / "log.txt").read_text()):
        times = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?(?: UTC)?", text)
        assert times
        assert all(t.endswith(" UTC") for t in times)
    assert "2026-09-21 13:13:20 UTC … 2026-09-21 13:13:20 UTC  xid 94" in (made / "log.txt").read_text()


def test_wrong_elements_of_other_runs_are_not_left_out(store, tmp_path):
    """The dossier describes all wrong runs of a case, not only the worst one."""
    (other,) = run(30, wrong=1).comparisons
    elsewhere = replace(evidence(5, 40, 13), repeats_wrong=2, repeats_alike=1)
    store.add_run(run(30, comparisons=(replace(other, evidence=elsewhere),)))
    _, document, page = written(store, tmp_path)
    (failure,) = document["failures"]
    assert {tuple(e["index"]) for e in failure["elements"]} == {(17, 40), (5, 40)}
    assert failure["lines"] == {"row": "5 to 17", "column": "40"}
    assert "all of them lie in row 5 to 17; column 40" in page
    assert failure["reproduced"] == "2 of 9 fresh uploads wrong, 1 with the same bits in the same elements"


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        ([Span(first=3, last=19, distinct=2, period=16), Span(first=35, last=35, distinct=1)], "= 3 mod 16"),
        ([Span(first=3, last=35, distinct=2, period=32), Span(first=3, last=19, distinct=2, period=16)], "= 3 mod 16"),
        ([Span(first=3, last=19, distinct=2, period=16), Span(first=4, last=4, distinct=1)], "3 to 19"),
        ([Span(first=3, last=19, distinct=2, period=16), Span(first=1, last=9, distinct=7)], "1 to 19"),
        ([Span(first=3, last=9, distinct=3)] * 2, "3 to 9"),  # they may differ in what lies between
        ([Span(first=1, last=1, distinct=0, period=16), Span(first=3, last=5, distinct=3)], None),  # of release 0.1.0
    ],
)
def test_what_all_runs_share_is_told(store, tmp_path, spans, wanted):
    """A residue that holds in every run is a lane of the part; what holds in one run only is not said of all."""
    for number in (5, 7):
        compared = replace(run(number, wrong=1).comparisons[0], evidence=None)
        found = replace(evidence(17, 40, 13), lines={"column": spans[number == 7]})
        store.add_run(run(number + 30, comparisons=(replace(compared, evidence=found, seed=43),)))
    _, document, _ = written(store, tmp_path)
    assert next(f for f in document["failures"] if f["seed"] == 43)["lines"] == ({"column": wanted} if wanted else {})


@pytest.mark.parametrize(
    ("case", "test", "core", "wanted"),
    [
        ((4, 40), (4, 34_961), None, 27_000),  # a case is named because it failed: the test says how rare that is
        ((4, 40), (4, 340_961), (4, 34_961), 27_000),
        ((1, 9_000), (400, 18_000), None, 27_000),
        ((40, 44), (40, 44), None, 1000),
        ((1, 1_000_000), (1, 1_000_000), None, 3_000_000),
        ((2_652, 6_065_000), (2_652, 6_065_000), None, 1_900_000),  # one upload of 61,000: as many copies
    ],
)
def test_the_script_runs_often_enough_to_see_the_fault(case, test, core, wanted):
    """Three times 1/rate: with fewer runs a vendor sees nothing, and sends the part back."""

    def tried(counts):
        uploads = (1, 61_000) if counts[0] == 2_652 else (counts[0], max(counts[0], counts[1] // 100))
        results, copies = (dict(zip(("wrong", "total"), pair, strict=True)) for pair in (counts, uploads))
        return {"results": results, "uploads": copies}

    assert enough_runs(tried(case), tried(core or test)) == wanted


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
    assert set(kinds) == {"run", "stack", "verdict", "event", "ack"}
    assert kinds.count("stack") == 1
    assert "driver 570.10.01 → 580.65.06" in next(e for e in entries if e["kind"] == "stack")["text"]
    wrong = next(e for e in entries if e["kind"] == "run")
    assert {name: c["value"] for name, c in wrong["conditions"].items()} == {
        "temperature_celsius": 55.0,
        "power_watts": 600.5,
        "clock_hertz": 1.98e9,
    }


def test_the_flag_that_decides_a_return_outlasts_many_wrong_runs(store, tmp_path, monkeypatch):
    """A failed row remap of last week stays in the timeline, however many runs were wrong since."""
    monkeypatch.setattr(timeline, "TIMELINE", 4)
    at = NOW - 30 * 86_400
    flag = {
        "kind": EventKind.FLAG,
        "name": "row_remap_failed",
        "before": "0",
        "after": "1",
        "reading": "row_remap_failed",
    }
    store.add_events([Event(device=GPU.uuid, first=at, last=at, **flag)])
    _, document, _ = written(store, tmp_path)
    entries = document["timeline"]
    assert [e["at"] for e in entries] == sorted(e["at"] for e in entries)
    assert ("row_remap_failed: 0 → 1" in entries[0]["text"], len(entries)) == (True, 5)


def test_every_wrong_run_between_two_stored_polls_has_its_conditions(store, tmp_path):
    """Of a quiet device a poll is stored every five minutes: a run half-way between two was at their temperature."""
    keep = KEEP
    for offset in (0.0, keep):
        store.add_poll(replace(poll(20, 61.0), id=f"{offset:012.0f}-abcdef", started=NOW - 600 + offset), {})
    store.add_run(run(40, wrong=1, started=NOW - 600 + keep / 2))
    _, document, _ = written(store, tmp_path)
    newest = [e for e in document["timeline"] if e["kind"] == "run"][-1]
    assert newest["conditions"]["temperature_celsius"]["value"] == 61.0


def test_the_log_has_lines_of_the_kernel_alone(store, tmp_path):
    """What canaryd read of the device itself is in no kernel log: a vendor who looks for it there finds nothing."""
    at = {"device": UUID, "first": NOW - HOUR, "last": NOW - HOUR}
    flag = Event(kind=EventKind.FLAG, name="row_remap_failed", detail="row remap failed changed from 0 to 1", **at)
    fell = replace(flag, kind=EventKind.COUNTER_FELL, name="ecc", detail="ECC errors fell")
    lost = replace(flag, kind=EventKind.OFF_BUS, name="driver", detail="the driver lost the device")
    store.add_events([flag, fell, lost, replace(lost, name="", detail="GPU has fallen off the bus")])
    made, document, _ = written(store, tmp_path)
    log = (made / "log.txt").read_text()
    assert "GPU has fallen off the bus" in log
    assert "MMU fault" in log
    told = " ".join(entry["text"] for entry in document["timeline"])
    for event in (flag, fell, lost):
        assert event.detail in told
        assert event.detail not in log


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
    assert ("No RMA" in document["next_step"][0]) == (cause is not Cause.HARDWARE)


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
    assert "It has no verdict yet." in document["summary"]
    assert any("no run of this device is on record" in text for text in document["not_checked"])


def test_an_old_verdict_says_how_old_it_is(store, tmp_path):
    """A verdict that is a week old is shown with its age, in the words of `canaryd status`."""
    _, document, page = written(store, tmp_path, now=NOW + 7 * 86_400)
    assert document["kind"] == "rma"
    assert "This verdict is 7 days old; no newer one was stored." in document["summary"]
    assert "This verdict is 7 days old" in page


def test_a_healthy_verdict_does_not_outlive_a_failure(store, tmp_path):
    """Judged healthy, wrong since: it is unknown, never a health report, and says what to run."""
    store.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=NOW - 24 * HOUR))
    _, document, page = written(store, tmp_path)
    assert (document["kind"], document["verdict"]["state"]) == ("evidence", "unknown")
    assert "A newer exact_matmul run computed wrong results" in document["summary"]
    assert "Test it: canaryd check" in document["next_step"]
    assert "HEALTHY" not in page
    assert "Nothing to do" not in page


def test_failures_that_were_answered_are_told_as_such(store, tmp_path):
    """A healthy verdict that is newer than every failure stands, and the summary does not contradict it."""
    store.set_verdict(verdict(state=State.HEALTHY, cause=Cause.NONE, findings=()))
    _, document, _ = written(store, tmp_path)
    assert document["kind"] == "health"
    assert "Earlier failures are resolved (see the timeline): 1 case failed" in document["summary"]


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
    assert document["next_step"][-1].endswith("run canaryd check --device cuda:3 first.")
    assert "reproduce.py" not in page
