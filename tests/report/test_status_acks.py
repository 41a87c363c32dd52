"""What `canaryd status` says of an operator's words: acknowledged, repaired, replaced."""

from dataclasses import replace

import pytest

from canaryd.config.settings import Config
from canaryd.formatting import format_time
from canaryd.model import Ack, Finding, State
from canaryd.report import status, status_page
from canaryd.report.advice import advice, answer
from canaryd.report.status_text import as_json as status_json
from canaryd.report.status_text import as_text as status_text
from tests.pages import unwrapped
from tests.report.statuses import CPU, GPU, NOW, H, U, acknowledge, ask, run, verdict


def test_the_word_of_an_operator_is_told_while_it_holds(store):
    """Who, until when and why; one that has run out is told no more, a repair for good."""
    store.see_device(GPU, NOW)
    known = Finding(rule="a-rule", state=State.UNKNOWN, cause=H, message="known: wrong bits", acknowledged=True)
    store.set_verdict(replace(verdict(State.UNKNOWN, H), findings=(known,)))
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 9e5, reason="new riser"))
    store.add_ack(Ack(device=GPU.uuid, kind="acknowledged", at=NOW - 60, until=NOW + 600, reason="RMA 7", by="anna"))
    found = ask(store)
    text = unwrapped(status_text(found))
    assert f"! acknowledged until {format_time(NOW + 600)} by anna on {format_time(NOW - 60)}: RMA 7" in text
    assert f"! repaired on {format_time(NOW - 9e5)}: new riser" in text
    assert "Nothing new: cuda:3 is acknowledged until" in text
    assert "Still, send it no work and do not use its results." in text
    told = status_json(found)["devices"][0]["acks"]
    assert [(a["kind"], a["until"], a["by"]) for a in told] == [
        ("repaired", None, ""),
        ("acknowledged", NOW + 600, "anna"),
    ]
    later = ask(store, now=NOW + 601)
    assert [a.kind for a in later.devices[0].acks] == ["repaired"]
    assert "Nothing new" not in status_text(later)


def suspect(*extra, decided=NOW - 60):
    """Return a verdict that is suspect by one mismatch, with other findings beside it."""
    found = Finding(rule="exact-mismatch", state=State.SUSPECT, cause=U, message="wrong bits", runs=("r1",))
    return replace(verdict(State.SUSPECT, U, decided=decided), findings=(found, *extra))


@pytest.mark.parametrize("state", [State.HEALTHY, State.SUSPECT, State.FAULTY])
def test_a_repair_that_nobody_has_judged_makes_the_device_unknown(store, state):
    """Whatever it was: no daemon may have run since, and what it did before is history."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(state, H, "wrong bits"))
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 61, reason="new riser"))
    assert ask(store).state is state
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 50, reason="new riser"))
    found = ask(store)
    (only,) = found.devices[0].verdict.findings
    assert (found.state, only.rule) == (State.UNKNOWN, "unjudged")
    assert "repaired or replaced" in only.message
    assert only.evidence[0].startswith(f"Before, it was {state.value} (hardware). Earlier failures no longer count")
    assert (found.devices[0].verdict.decided, found.devices[0].verdict.since) == (NOW - 60, NOW - 50)
    assert "UNKNOWN" in answer(found)


@pytest.mark.parametrize(
    ("daemon", "todo"),
    [
        (False, "Do now: Test it:\n        canaryd check\n"),
        (True, "Do now: Wait some minutes for the daemon to judge it.\n"),
    ],
)
def test_what_a_replacement_asks_for_can_be_done(store, daemon, todo):
    """No daemon is waited for where none runs; a command stands alone on its line; canaryd is not blamed."""
    part = replace(CPU, weak_identity=True)
    store.see_device(part, NOW)
    store.set_verdict(replace(verdict(State.FAULTY, H, "wrong bits"), device=part.uuid))
    store.add_ack(Ack(device=part.uuid, kind="replaced", at=NOW - 50, reason="swapped"))
    found = status.gather(store, Config(), NOW, daemon=daemon)
    text = status_text(found)
    assert todo in text
    assert "canaryd itself" not in text
    assert "canaryd itself)" not in status_page.render(found).decode().partition("<details>")[0]


def test_a_replaced_part_that_names_itself_keeps_its_verdict(store):
    """Its record stands while it is found; a processor has no name of its own and begins anew."""
    for device in (GPU, replace(CPU, weak_identity=True)):
        store.see_device(device, NOW)
        store.set_verdict(replace(verdict(State.FAULTY, H, "wrong bits"), device=device.uuid))
        store.add_ack(Ack(device=device.uuid, kind="replaced", at=NOW - 50, reason="swapped"))
    assert {d.device.name: d.verdict.state for d in ask(store).devices} == {
        "cuda:3": State.FAULTY,
        "cpu:0": State.UNKNOWN,
    }


def test_evidence_from_before_a_repair_is_history(store):
    """Where a repaired device has not been tested since, status shows no evidence, in the store or from a check."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.UNKNOWN, U, "no evidence yet"))
    store.add_run(run(1))
    store.add_run(run(2, probe="later", started=NOW - 5))
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 100, reason="new riser"))
    assert ask(store).devices[0].evidence == {"exact": None, "later": NOW - 5}
    given = {GPU.uuid: {"exact": NOW - 101, "never": None, "later": NOW - 99}}
    found = status.gather(store, Config(), NOW, daemon=True, evidence=given)
    assert found.devices[0].evidence == {"exact": None, "never": None, "later": NOW - 99}


def test_a_word_counts_once_it_is_judged(store):
    """Until then the suspicion stands, and the word stands beside it."""
    store.see_device(GPU, NOW)
    store.set_verdict(suspect())
    acknowledge(store)
    found = ask(store)
    assert found.state is State.SUSPECT
    assert "Nothing new" not in advice(found)
    assert status_text(found).count("RMA 7") == 1


@pytest.fixture
def covered(store):
    """A device whose one finding is known by a word of its operator."""
    store.see_device(GPU, NOW)
    found = Finding(rule="exact-mismatch", state=State.UNKNOWN, cause=U, message="known: bits", acknowledged=True)
    store.set_verdict(replace(verdict(State.UNKNOWN, U), findings=(found,)))
    acknowledge(store, at=NOW - 90)
    assert "Nothing new" in advice(ask(store))
    return store


def test_a_word_that_ended_is_old_news(covered):
    """What it covered is not called known any more, even before it is judged again."""
    assert "Nothing new" not in advice(ask(covered, now=NOW + 601))
    acknowledge(covered, until=NOW - 10)
    found = ask(covered)
    assert found.state is State.UNKNOWN
    assert "Nothing new" not in advice(found)


def test_a_wrong_run_after_a_word_is_news(covered):
    """The operator cannot have known of it; one from before a repair is history."""
    covered.add_run(run(4, unknown=("prefill/1",)))
    found = ask(covered)
    assert "Nothing new" not in advice(found)
    told = unwrapped(status_text(found))
    assert "A newer exact run differed from its baseline (case prefill/1); not judged yet." in told


def test_a_part_that_was_replaced_is_not_told_of(store):
    """It left with its record; as long as it is found, the word alone does not make it leave."""
    for device in (GPU, CPU):
        store.see_device(device, NOW - 60)
        store.set_verdict(replace(verdict(State.FAULTY, H, "wrong bits"), device=device.uuid))
    store.add_ack(Ack(device=GPU.uuid, kind="replaced", at=NOW, reason="RMA 7"))
    assert {d.device.uuid for d in ask(store).devices} == {"GPU-1", "CPU-1"}
    store.set_present({CPU.uuid}, NOW)
    assert {d.device.uuid for d in ask(store).devices} == {"CPU-1"}


@pytest.mark.parametrize("kind", ["repaired", "replaced"])
def test_what_was_acknowledged_of_an_earlier_part_is_not_shown_of_this_one(store, kind):
    """The new part's fault carries no old acknowledgement: in the text, the JSON and the page."""
    part = replace(CPU, weak_identity=True)
    store.see_device(part, NOW - 900)
    acknowledge(store, at=NOW - 600, device=part.uuid)
    store.add_ack(Ack(device=part.uuid, kind=kind, at=NOW - 300, reason="swapped"))
    bits = Finding(rule="exact-mismatch", state=State.FAULTY, cause=U, message="wrong bits")
    faulty = replace(verdict(State.FAULTY, U), device=part.uuid)
    store.set_verdict(replace(faulty, findings=(bits,)))
    found = ask(store)
    assert [a["kind"] for a in status_json(found)["devices"][0]["acks"]] == [kind]
    for text in (status_text(found), str(status_json(found)), status_page.render(found).decode()):
        assert "RMA 7" not in text
        assert "wrong bits" in text


def test_a_part_that_names_itself_stays_acknowledged_until_it_is_gone(store):
    """Its uuid is that of the part: another one has no acknowledgement, and this one's record stands."""
    store.see_device(GPU, NOW)
    covered = Finding(rule="exact-mismatch", state=State.UNKNOWN, cause=U, message="known: bits", acknowledged=True)
    store.set_verdict(replace(verdict(State.UNKNOWN, U), findings=(covered,)))
    acknowledge(store)
    store.add_ack(Ack(device=GPU.uuid, kind="replaced", at=NOW - 5, reason="swapped"))
    assert "Nothing new: cuda:3 is acknowledged" in advice(ask(store))
