"""An operator's word: what it covers, what it does not, and that nothing is deleted by it."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.settings import Config
from canaryd.daemon.snapshot import is_acknowledged
from canaryd.engine.engine import Engine
from canaryd.facts import Comparison, Evidence, Exactness, Reading
from canaryd.model import Ack, Cause, Device, Outcome, Run, State, Verdict
from canaryd.store.store import Store
from tests.command import canaryd
from tests.places import place

NOW = 1_790_000_000.0
HOUR, DAY = 3600.0, 86_400.0
GPU = Device(uuid="GPU-a", backend="cuda", index=0, model="H100", torch_index=0)
EVIDENCE = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one element")


def word(kind, ago, until=0.0, of=GPU):
    return Ack(device=of.uuid, kind=kind, at=NOW - ago, until=until, reason="ticket 4711", by="kim")


# --- With engine and store --------------------------------------------------------------------------------------------


def result(number, ago, *, wrong=False, of=GPU):
    comparison = Comparison(
        case="a",
        shape="M=4",
        seed=number,
        exactness=Exactness.UNIVERSAL,
        place=place("device"),
        trials=10,
        wrong_trials=10 * wrong,
        evidence=EVIDENCE if wrong else None,
    )
    return Run(
        id=f"run-{number:04d}",
        device=of.uuid,
        probe="exact_matmul",
        probe_version=1,
        started=NOW - ago,
        seconds=1.0,
        outcome=Outcome.COMPLETED,
        comparisons=(comparison,),
        readings=(Reading(name="trials", value=10),),
    )


@pytest.fixture
def host(tmp_path):
    """Return a store with a GPU that was wrong twice, and what makes an engine on it."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    store.see_device(GPU, NOW)
    for number, ago in enumerate((3 * HOUR, 2 * HOUR)):
        store.add_run(result(number, ago, wrong=True))

    def judged():
        engine = Engine(Config(state_dir=tmp_path / "state", judge=JudgePolicy()), store, clock=lambda: NOW)
        engine.present = {GPU.uuid}
        engine.recall()
        return engine.decide().get(GPU.uuid)

    return store, judged


def state(verdict):
    return verdict.state, verdict.cause


def test_a_repaired_device_is_unknown_until_it_has_run_again(host):
    """What it did before is history: kept, and no evidence for or against it."""
    store, judged = host
    assert state(judged()) == (State.FAULTY, Cause.UNDETERMINED)
    store.add_ack(word("repaired", HOUR))
    assert judged().state is State.UNKNOWN
    assert len(store.runs(GPU.uuid, failed=True)) == 2
    store.add_run(result(7, HOUR / 2, wrong=True))
    assert judged().state is State.SUSPECT, "one mismatch since, and no confirmation by those before"


def test_a_replaced_part_stands_while_it_is_found_and_is_not_waited_for_when_it_is_gone(host):
    """The record of a part that names itself goes with the part."""
    store, judged = host
    store.add_ack(word("replaced", 0))
    verdict = judged()
    assert state(verdict) == (State.FAULTY, Cause.UNDETERMINED)
    assert "replaced-is-here" in {f.rule for f in verdict.findings}
    store.set_present([], NOW)
    engine = Engine(Config(state_dir=store.state_dir), store, clock=lambda: NOW + HOUR)
    engine.recall()
    assert GPU.uuid not in engine.devices
    assert len(store.runs(GPU.uuid)) == 2


def test_a_cause_that_becomes_known_is_no_later_fault(host):
    """Else it pages again for what an operator knows; a device that was better meanwhile is news."""
    store, _ = host

    def become(state, cause, ago):
        verdict = Verdict(device=GPU.uuid, state=state, cause=cause, findings=(), decided=NOW - ago, since=NOW - ago)
        store.set_verdict(verdict)
        return verdict

    ack = word("acknowledged", 3 * HOUR, NOW + DAY)
    assert is_acknowledged(ack, become(State.FAULTY, Cause.UNDETERMINED, 4 * HOUR), store)
    assert is_acknowledged(ack, become(State.FAULTY, Cause.HARDWARE, 2 * HOUR), store)
    assert not is_acknowledged(ack, become(State.FAULTY, Cause.SOFTWARE, HOUR), store)  # another fault
    become(State.HEALTHY, Cause.NONE, HOUR / 2)
    assert not is_acknowledged(ack, become(State.FAULTY, Cause.HARDWARE, 60.0), store)
    assert not is_acknowledged(None, None, store)


def test_the_command_keeps_the_word_and_says_what_follows(host, tmp_path):
    """With who said it; a device that is not there, or no reason, is a usage error and keeps nothing."""
    store, _ = host
    common = ("--state-dir", tmp_path / "state")
    assert canaryd("ack", "GPU-zz", "--reason", "x", *common).code == 64
    assert canaryd("ack", "GPU-a", *common).code == 64
    assert canaryd("ack", "GPU-a", "--reason", " ", *common).code == 64
    assert store.acks() == []
    done = canaryd("ack", "cuda:0", "--reason", "ticket 1", "--for", "2d", *common)
    assert (done.code, "this node knows no fault of it" in " ".join(done.out.split())) == (0, True)
    done = canaryd("ack", "cuda:0", "--reason", "came back from the vendor", "--repaired", *common)
    assert (done.code, "earlier failures no longer count" in done.out) == (0, True)
    known, repaired = store.acks(GPU.uuid)
    assert (known.kind, known.reason, round(known.until - known.at)) == ("acknowledged", "ticket 1", 2 * 86_400)
    assert (repaired.kind, repaired.until, bool(repaired.by)) == ("repaired", 0.0, True)


def test_what_is_said_of_a_healthy_device_is_true(host, tmp_path):
    """Its node knows no fault that could be muted; the fleet comparison may."""
    store, _ = host
    healthy = Verdict(device=GPU.uuid, state=State.HEALTHY, cause=Cause.NONE, findings=(), decided=NOW, since=NOW)
    store.set_verdict(healthy)
    done = canaryd("ack", "cuda:0", "--reason", "odd in the fleet", "--state-dir", tmp_path / "state")
    assert done.code == 0
    assert "but this node knows no fault of it. Muted until then: the page of the fleet comparison," in done.out
    assert "known now" not in done.out
    store.set_verdict(dataclasses.replace(healthy, state=State.FAULTY, cause=Cause.HARDWARE))
    done = canaryd("ack", "cuda:0", "--reason", "case 4711", "--state-dir", tmp_path / "state")
    assert "pages about what is known now are muted. Suspect" in done.out


def test_words_outlive_a_disk_that_refuses_and_a_kill(tmp_path):
    """They wait in memory, are part of every answer, and move to disk when it takes them."""
    directory = tmp_path / "state"
    store = Store.open(directory, now=lambda: NOW)
    store.see_device(GPU, NOW)
    store._file.execute("PRAGMA query_only = ON")
    assert store.add_ack(word("repaired", HOUR)) is False
    assert [a.kind for a in store.acks()] == ["repaired"]
    store._file.execute("PRAGMA query_only = OFF")
    assert store.add_ack(word("acknowledged", 0, NOW + DAY)) is True
    again = Store.open(directory, now=lambda: NOW)  # the other one was not closed, as after a kill
    assert [a.kind for a in again.acks(GPU.uuid)] == ["repaired", "acknowledged"]
