"""`canaryd status`: verdicts, evidence, problems and what was not tested."""

import json
from dataclasses import replace

import pytest

from canaryd.config.settings import Config, ProbeSettings
from canaryd.judge.slower import Day
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, State, Verdict
from canaryd.report import status, status_page
from canaryd.report.advice import advice
from canaryd.report.status_text import as_json as status_json
from canaryd.report.status_text import as_text as status_text
from canaryd.store.notes import LOG_PROBLEM_NOTE
from canaryd.store.store import Store
from tests.pages import unwrapped
from tests.report.statuses import (
    CPU,
    GPU,
    NOW,
    VALIDATOR,
    H,
    S,
    U,
    acknowledge,
    ask,
    beside,
    mismatch,
    on_record,
    run,
    verdict,
)


def test_nothing_known_is_unknown(store):
    """An empty store is no healthy machine."""
    found = ask(store)
    assert found.state is State.UNKNOWN
    assert "no device has been tested yet" in status_text(found)


def test_a_verdict_is_told_with_why_and_what_happened(store):
    """State, cause, since when, the finding, the events of the last day: in text and in JSON alike."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "a row could not be remapped"))
    old = Event(device=GPU.uuid, kind="xid", name="31", first=NOW - 9e4, last=NOW - 9e4, detail="long ago")
    new = Event(device=GPU.uuid, kind="xid", name="79", first=NOW - 60, last=NOW - 60, count=2, detail="off the bus")
    store.add_events([old, new])
    found = ask(store)
    text = status_text(found)
    for words in ("FAULTY   cuda:3", "faulty (hardware)", "a row could not be remapped", "off the bus", "2 times"):
        assert words in text
    assert "long ago" not in text
    document = json.loads(json.dumps(status_json(found)))
    assert (document["state"], document["exit_code"], document["daemon_running"]) == ("faulty", 2, False)
    assert document["devices"][0]["findings"][0]["message"] == "a row could not be remapped"
    assert [e["name"] for e in document["devices"][0]["events"]] == ["79"]


def test_a_verdict_that_nobody_renews_is_unknown(store):
    """A daemon that stopped hours ago leaves no healthy device behind; an alarm it left stays one."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE, decided=NOW - 3 * 3600))
    found = ask(store)
    assert found.state is State.UNKNOWN
    assert "The last verdict is 3 hours old; it was healthy." in status_text(found)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "broken", decided=NOW - 3 * 3600))
    found = ask(store)
    assert found.state is State.FAULTY
    assert "This verdict is 3 hours old; no newer one was stored." in unwrapped(status_text(found))


def test_a_healthy_verdict_of_the_future_is_not_believed(store):
    """The clock was wrong when it was made: nobody knows how old it is, and no daemon works here."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE, decided=NOW + 3 * 3600))
    found = ask(store)
    assert found.state is State.UNKNOWN
    assert "dated ahead of the clock" in unwrapped(status_text(found))


def test_a_device_without_verdict_and_one_that_is_gone_are_not_healthy(store):
    """What was never judged is unknown; what is gone is shown as gone until it is forgotten or was taken out."""
    store.see_device(GPU, NOW)
    assert ask(store).state is State.UNKNOWN
    store.set_verdict(verdict(State.UNKNOWN, Cause.UNDETERMINED, "vanished"))
    store.set_present(set(), NOW)
    assert "GONE" in status_text(ask(store))
    store.see_device(CPU, NOW)
    for day in range(1, 31):
        shown = [d.device for d in ask(store, now=NOW + 40 * 86400).devices]
        assert GPU in shown, f"{day - 1} days of tests without it: the machine may have been off"
        store.add_day(Day(device=CPU.uuid, day=int(NOW // 86400) + day, levels=(), tested=("exact_matmul",)))
    assert [d.device for d in ask(store, now=NOW + 40 * 86400).devices] == [CPU]
    store.set_present(set(), NOW)
    taken_out = Config().devices.__class__(absent=(GPU.uuid,))
    assert ask(store, config=Config(devices=taken_out)).devices == ()


def test_an_instance_of_a_gpu_that_was_divided_anew_is_forgotten(store):
    """Other instances have taken its place: it is not missed, nor does it make the machine unknown."""
    old = Device(uuid="MIG-1", backend="cuda", index=3, model="NVIDIA H200", parent=GPU.uuid)
    for device in (GPU, old):
        store.see_device(device, NOW)
        store.set_verdict(Verdict(**{**vars(verdict(State.HEALTHY, Cause.NONE)), "device": device.uuid}))
    store.set_present({GPU.uuid}, NOW)
    found = ask(store)
    assert [d.device.uuid for d in found.devices] == [GPU.uuid]
    assert found.state is State.HEALTHY


@pytest.mark.parametrize("state", [State.SUSPECT, State.FAULTY])
def test_dividing_a_gpu_anew_acquits_no_instance(store, state):
    """Wrong numbers came from silicon that is still there: the page must not end with the instance."""
    old = Device(uuid="MIG-1", backend="cuda", index=3, model="NVIDIA H200", parent=GPU.uuid)
    for device, found in ((GPU, State.HEALTHY), (old, state)):
        store.see_device(device, NOW)
        store.set_verdict(Verdict(**{**vars(verdict(found, Cause.HARDWARE)), "device": device.uuid}))
    store.set_present({GPU.uuid}, NOW)
    found = ask(store)
    assert {d.device.uuid for d in found.devices} == {GPU.uuid, "MIG-1"}
    assert found.state is state


def test_many_events_are_summed_up(store):
    """A terminal shows the newest one, with -v the ten newest; JSON has all."""
    store.see_device(GPU, NOW)
    store.add_events(
        [Event(device=GPU.uuid, kind="xid", name=str(n), first=NOW, last=NOW, detail=f"line {n}") for n in range(30)]
    )
    found = ask(store)
    assert "(and 29 more: -v)" in status_text(found)
    assert "and 20 earlier kinds of event" in status_text(found, verbose=True)
    assert len(status_json(found)["devices"][0]["events"]) == 30


@pytest.mark.parametrize(
    "found",
    [
        verdict(State.HEALTHY, Cause.NONE),
        verdict(State.FAULTY, H, "confirmed"),
        verdict(State.UNKNOWN, U, "never ran"),
        None,
    ],
)
def test_news_is_news(store, found):
    """An acknowledgement does not make known what it does not cover: health, a fault, what was never judged."""
    store.see_device(GPU, NOW)
    if found is not None:
        store.set_verdict(found)
    acknowledge(store, at=NOW - 90)
    assert "Nothing new" not in advice(ask(store))


@pytest.mark.parametrize(("state", "cause"), [(State.HEALTHY, Cause.NONE), (State.DEGRADED, H)])
def test_a_wrong_run_that_nobody_has_judged_leaves_no_trust(store, state, cause):
    """A check of a part stores no verdict, and a daemon may be killed before it judges."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(state, cause, decided=NOW - 1))
    for each in (run(2, outcome=Outcome.TIMED_OUT), mismatch(3, device="GPU-2")):
        store.add_run(each)
    assert ask(store).state is state
    store.add_run(mismatch(4))
    found = ask(store)
    assert found.state is State.UNKNOWN
    (said,) = (f for f in found.devices[0].verdict.findings if f.rule == "unjudged")
    assert said.message == "A newer exact run computed wrong results (case bf16); not judged yet."
    assert said.runs == (mismatch(4).id,)
    store.set_verdict(replace(verdict(State.SUSPECT, U, "wrong bits"), decided=NOW))
    assert [f.rule for f in ask(store).devices[0].verdict.findings] == ["a-rule"]


def test_a_log_that_is_not_read_is_a_problem_of_a_daemon_that_runs(store):
    """One that does not run reads nothing, and that is as it should be."""
    store.set_note(LOG_PROBLEM_NOTE, "no permission")
    assert ask(store).problems == ()
    assert status.gather(store, Config(), NOW, daemon=True).problems == ("the kernel log is not read: no permission",)


def test_lost_records_are_told_until_somebody_has_heard(tmp_path):
    """On every call, with or without a device; not for longer than a suspect is watched."""
    with Store.open(tmp_path, now=lambda: NOW - 60) as store:
        store.see_device(GPU, NOW)
    (tmp_path / "canaryd.db").write_bytes(b"rubbish" * 999)
    for _ in range(3):
        with Store.open(tmp_path, now=lambda: NOW) as store:
            (told,) = ask(store).problems
            assert "damaged" in told
            assert "corrupt" in told
            assert "(see below)" in advice(ask(store))
    with Store.open(tmp_path, now=lambda: NOW) as store:
        assert ask(store, now=NOW + Config().judge.watch).problems == ()
        acknowledge(store, at=NOW - 1)
        assert len(ask(store).problems) == 1
        acknowledge(store, at=NOW + 1)
        assert ask(store).problems == ()


def test_the_newest_evidence_is_told(store):
    """Of each probe the newest whole run that completed, or the newest poll; null where there is none."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.DEGRADED, H, "slow"))
    for each in (
        run(1),
        run(2),
        run(3, outcome=Outcome.TIMED_OUT),
        run(4, cases=("one",)),
        run(5, confirms="000000000001-aaaaaa"),
        run(7, probe="never", outcome=Outcome.ERRORED),
        run(8, probe="off"),
    ):
        store.add_run(each)
    store.add_poll(run(9, probe="telemetry"), {Outcome.COMPLETED: 1})
    probes = Config().probes
    config = Config(probes=replace(probes, each={"off": ProbeSettings(enabled=False)}))
    found = ask(store, config=config)
    assert status_json(found)["devices"][0]["evidence"] == {
        "exact": NOW - 998,
        "never": None,
        "telemetry": NOW - 991,
    }
    assert "newest results: never (none yet), exact (16 minutes ago), telemetry (16 minutes ago)" in unwrapped(
        status_text(found, verbose=True)
    )
    assert "oldest test: never, cuda:3, none yet" in unwrapped(status_text(found))


def test_a_result_from_before_many_skipped_runs_is_told(store):
    """A job has taken the memory for days: the last result is old, and not none."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.UNKNOWN, H, "skipped"))
    for each in (run(1), *(run(number, outcome=Outcome.SKIPPED) for number in range(2, 100))):
        store.add_run(each)
    assert "oldest test: exact, cuda:3, 16 minutes ago" in unwrapped(status_text(ask(store)))


def test_the_evidence_of_devices_alike_is_the_oldest(store):
    """One of them without evidence must not hide behind the others."""
    found = beside(store, (State.DEGRADED, H), (State.DEGRADED, H))
    seen = [{"a": NOW - 10, "b": NOW - 60, "c": NOW}, {"a": NOW - 90, "b": NOW - 50, "c": None, "its own": NOW - 20}]
    devices = tuple(replace(d, evidence=e) for d, e in zip(found.devices, seen, strict=True))
    assert status.newest_of(devices) == {"c": None, "a": NOW - 90, "b": NOW - 60, "its own": NOW - 20}
    text = status_text(replace(found, devices=devices), verbose=True)
    newest = "newest results: c (none yet), a (90 seconds ago), b (60 seconds ago), its own (20 seconds ago)"
    assert newest in unwrapped(text)


def test_the_schema_refuses_what_is_no_status(store):
    """A field that is missing or unknown, a rival without a reason, a time that is no time."""
    store.see_device(GPU, NOW)
    rival = Rival(cause=S, why="the siblings are clean", rejected=True)
    finding = Finding(rule="a-rule", state=State.FAULTY, cause=H, message="wrong bits", rivals=(rival,))
    store.set_verdict(replace(verdict(State.FAULTY, H), findings=(finding,)))
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 9e5, reason="new riser"))
    good = json.dumps(status_json(ask(store)))
    for old, new in (
        ('"answer"', '"reply"'),
        ('"why": "the siblings are clean"', '"why": ""'),
        ('"until": null', '"until": 0'),
        ('"state": "faulty"', '"state": "poorly"'),
        ('"released_until": null', '"released_until": ""'),
    ):
        assert old in good
        assert not VALIDATOR.is_valid(json.loads(good.replace(old, new)))


def test_status_says_what_was_not_tested(store):
    """As a check of the level that ran says it: a healthy node is healthy as far as it was tested."""
    found = on_record(store)
    assert "not tested: serving engine, most shapes" in status_text(found)
    assert "most memory: beyond 16 MiB of each device" in unwrapped(status_text(found, verbose=True))
    assert "higher load: load, power and temperature above those of this check" in status_json(found)["not_tested"]
    assert b"Not tested: serving engine" in status_page.render(found)


def test_a_run_of_chosen_cases_is_no_test_of_its_level(store):
    """One case at standard examined neither a gibibyte of memory nor the other instruction sets."""
    found = on_record(store)
    device = found.devices[0].device.uuid
    store.add_run(run(99, device=device, probe="exact_matmul", level="standard", cases=("float32/dense",)))
    assert "most memory: beyond 16 MiB of each device" in unwrapped(status_text(ask(store), verbose=True))


def test_other_instruction_sets_are_those_of_a_tested_processor(store):
    """A GPU has none, nor has a processor whose results have not come yet; one with a single set left none out."""
    on_record(store)

    def is_told(*sets):
        store.see_device(replace(CPU, instruction_sets=sets), NOW)
        return any(gap.what == "other instruction sets" for gap in ask(store).not_tested)

    assert not is_told("native", "avx2")
    store.add_run(run(1, device=CPU.uuid, probe="exact_matmul", level="quick"))
    assert is_told("native", "avx2")
    assert not is_told("native")


def test_what_was_not_tested_at_all_is_not_also_tested_in_part(store):
    """Most memory beside memory would say that some of it was tested."""
    told = [gap.what for gap in on_record(store, level="standard", probes=("exact_matmul",)).not_tested]
    assert told.count("memory") == 1
    assert "most memory" not in told
    assert "each core or SM" in told


def test_nothing_is_listed_as_untested_before_a_test(store):
    """A node that nobody has tested yet says that, and no list."""
    store.see_device(GPU, NOW)
    assert ask(store).not_tested == ()


def test_a_problem_of_canaryd_is_no_nothing(store):
    """To say that there is nothing to do would contradict it."""
    found = replace(on_record(store), daemon=True, problems=("the disk is full",))
    assert advice(found) == "Nothing is wrong with the devices. canaryd itself has a problem (see below)."
    assert advice(replace(found, problems=())) == "Nothing."
