"""`canaryd status` and `canaryd release`: what the store knows, and letting go."""

import json
import re
import time
from dataclasses import replace

import jsonschema
import pytest

from canaryd.cli.main import parser
from canaryd.config.settings import Config, ProbeSettings
from canaryd.engine.check import ONLY
from canaryd.facts import Comparison, Evidence, Exactness
from canaryd.formatting import format_duration, format_time
from canaryd.judge.phrases import PROVIDER, VENDOR_CASE
from canaryd.judge.trends.days import Day
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Rival, Run, State, Verdict
from canaryd.report import status, status_page
from canaryd.report.advice import advice, answer
from canaryd.report.incidents import state_lines
from canaryd.report.status_text import as_json as status_json
from canaryd.report.status_text import as_text as status_text
from canaryd.store.clock import REACHED_NOTE, STEP
from canaryd.store.notes import DAEMON_LOCK, LOG_PROBLEM_NOTE, RELEASE_NOTE
from canaryd.store.store import Store
from tests.command import ROOT, Daemon, canaryd, configure, eventually, running
from tests.documented import objects, unexplained
from tests.mixed_machine import fault
from tests.mixed_machine import verdict as told_of

NOW = 1_790_000_000.0
GPU = Device(uuid="GPU-1", backend="cuda", index=3, model="NVIDIA H200")
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
SCHEMA = json.loads((ROOT / "docs/status.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "state", now=lambda: NOW) as opened:
        yield opened


def verdict(state, cause, *messages, decided=NOW - 60):
    found = tuple(Finding(rule="a-rule", state=state, cause=cause, message=m) for m in messages)
    return Verdict(device=GPU.uuid, state=state, cause=cause, findings=found, decided=decided, since=NOW - 7200)


def ask(store, now=NOW, config=None):
    found = status.gather(store, config or Config(), now)
    VALIDATOR.validate(json.loads(json.dumps(status_json(found))))
    return found


def beside(store, *told, daemon=True):
    """Return the status of cuda:0, cuda:1 … with these states and causes, as a running daemon sees it."""
    for index, (state, cause) in enumerate(told):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        store.see_device(device, NOW)
        found = Finding(rule="a-rule", state=state, cause=cause, message="a reason", action="Mend it")
        listed = () if state is State.HEALTHY else (found,)
        store.set_verdict(replace(verdict(state, cause), device=device.uuid, findings=listed))
    return replace(ask(store), daemon=daemon)


def unwrapped(text):
    return " ".join(text.split())


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


# --- At three in the morning -----------------------------------------------------------------------------------------

H, S, E, U, X = Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS
SOUND = (State.HEALTHY, Cause.NONE)


@pytest.mark.parametrize(
    ("told", "daemon", "first", "second"),
    [
        ([SOUND], True, "YES, trust this node's numbers: cuda:0 is healthy", "Nothing."),
        ([SOUND] * 3, True, "YES, trust this node's numbers: 3 devices are healthy", "Nothing."),
        ([SOUND], False, "YES, trust", "The daemon is not running: start it (canaryd run)."),
        (
            [SOUND, (State.DEGRADED, H)],
            True,
            "YES, this node's numbers are right so far: cuda:1 is degraded",
            "Nothing urgent. Plan to look at cuda:1. Mend it.",
        ),
        (
            [(State.UNKNOWN, X)],
            True,
            "UNKNOWN whether this node's numbers are right: cuda:0 is unknown",
            "Mend it.",
        ),
        ([(State.UNKNOWN, X)], False, "UNKNOWN", "Mend it."),
        (
            [(State.SUSPECT, U), SOUND],
            True,
            "NO, do not trust this node's numbers: cuda:0 is suspect (cause unknown): a reason; cuda:1 is healthy",
            "Send cuda:0 no new work, and hold back its results. Mend it.",
        ),
        (
            [(State.SUSPECT, U)] * 2,
            False,
            "NO, do not trust this node's numbers: cuda:0 and cuda:1 are suspect",
            "Send cuda:0 and cuda:1 no new work, and hold back their results. Mend it.",
        ),
        (
            [(State.FAULTY, S), (State.FAULTY, H)],
            True,
            "NO, do not trust this node's numbers: cuda:1 is faulty (hardware): a reason; cuda:0 is faulty (software)",
            "Take cuda:1 out of service. Mend it.",
        ),
        ([(State.FAULTY, S)], True, "NO", "Do not use the results of cuda:0. Mend it."),
        ([(State.FAULTY, S)], False, "NO", "nothing else is tested: start it (canaryd run)."),
        ([(State.FAULTY, U)], True, "NO", "Take cuda:0 out of service. Mend it."),
        (
            [(State.FAULTY, H)] * 8,
            True,
            "NO, do not trust this node's numbers: cuda:0, cuda:1, cuda:2, cuda:3 and 4 more are faulty",
            "Take cuda:0, cuda:1, cuda:2, cuda:3 and 4 more out of service. Mend it.",
        ),
    ],
)
def test_the_first_line_answers_and_the_second_says_what_to_do(store, told, daemon, first, second):
    """For each state and cause; of several, for the worst."""
    found = beside(store, *told, daemon=daemon)
    assert answer(found).startswith(first)
    assert second in advice(found)
    lines = status_text(found).split("\n")
    assert lines[0].startswith(first[:60])
    assert unwrapped(status_text(found)).startswith(f"{answer(found)} Do now: {advice(found)}")
    document = status_json(found)
    assert (document["answer"], document["advice"]) == (answer(found), advice(found))


@pytest.mark.parametrize(("weak", "then"), [(False, VENDOR_CASE), (True, f"tell {PROVIDER}")])
def test_a_faulty_processor_takes_the_whole_node_out_of_service(store, weak, then):
    """It computes for every device; and who provides it, a cloud or a vendor, canaryd does not know."""
    cpu = Device(uuid="CPU-1", backend="cpu", index=0, model="EPYC", weak_identity=weak)
    store.see_device(cpu, NOW)
    store.set_verdict(told_of(fault(), device=cpu))
    told = advice(ask(store))
    assert told.startswith("Take this whole node out of service (cpu:0 is its processor)")
    assert f", then {then}: canaryd report cpu:0 -o ./case" in told


LOST = Finding(rule="gpu-lost", state=State.SUSPECT, cause=H, message="It is lost.", action="Restart the machine.")
STORM = Finding(rule="ecc", state=State.DEGRADED, cause=H, message="Errors rise.", action="Run an exact test")
GARBAGE = Finding(rule="broken-output", state=State.SUSPECT, cause=U, message="Bad.", action="Run: canaryd check --x")


@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize(
    "found",
    [
        LOST,
        STORM,
        GARBAGE,
        *(replace(LOST, state=State.FAULTY, cause=c) for c in (H, S, E, U)),
        *(fault(cause=c) for c in (H, S, U)),
        fault(State.SUSPECT, U),
        replace(LOST, state=State.UNKNOWN),
    ],
)
def test_the_header_says_what_every_report_says(store, found, daemon):
    """One device has one thing to do: that of its worst incident, said once."""
    store.see_device(GPU, NOW)
    store.set_verdict(told_of(found, device=GPU))
    seen = replace(ask(store), daemon=daemon)
    (incident,) = status_json(seen)["devices"][0]["incidents"]
    todo = f"{incident['action']} {incident['command']}".rstrip()
    assert todo in advice(seen)
    assert unwrapped(status_text(seen)).count("Do now:") == 1
    told = unwrapped("\n".join(text for _, text in state_lines(GPU, seen.devices[0].verdict, verbose=False)))
    assert f"Do now: {todo}" in told


def test_a_suspect_that_nothing_retests_is_tested_by_hand(store):
    """Its retests wait for a daemon that does not run: the same command makes them."""
    store.see_device(GPU, NOW)
    store.set_verdict(told_of(fault(State.SUSPECT, U, to_come=2), device=GPU))
    seen = ask(store)
    assert advice(seen).endswith("No daemon runs that would test it again; type: canaryd check --device cuda:3")
    assert "Wait for 2 automatic retests" in advice(replace(seen, daemon=True))
    assert status_text(seen).count("Do now:") == 1


def test_several_devices_that_need_different_steps_keep_their_own(store):
    """The header has the first one's, and says who else must be looked at."""
    for index, found in enumerate((LOST, GARBAGE)):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        store.see_device(device, NOW)
        store.set_verdict(told_of(found, device=device))
    seen = replace(ask(store), daemon=True)
    both = "Send cuda:0 and cuda:1 no new work, and hold back their results."
    assert advice(seen) == f"{both} Restart the machine. For cuda:1, see below."
    assert "Do now:  Run: canaryd check --x\n" in status_text(seen)


def test_the_first_line_says_what_is_wrong_with_what(store):
    """The device, its state and the worst finding; those of devices alike are said once."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.FAULTY, Cause.HARDWARE, "27 of 4,310 results of exact_matmul are wrong."))
    first = "cuda:3 is faulty (hardware): 27 of 4,310 results of exact_matmul are wrong"
    assert answer(ask(store)) == f"NO, do not trust this node's numbers: {first}"


def test_the_first_line_says_of_each_device_what_is_wrong_with_it(store):
    """What is found on one device is said of no other, and an old verdict hides nothing that it found."""
    facts = {"rule": "device-vanished", "state": State.UNKNOWN, "cause": U}
    for index, text in enumerate(("", "it is gone", "")):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        store.see_device(device, NOW)
        found = (Finding(message=text, **facts),) if text else ()
        told = verdict(State.UNKNOWN if text else State.HEALTHY, U if text else Cause.NONE, decided=NOW - 7200)
        store.set_verdict(replace(told, device=device.uuid, findings=found))
    store.set_present({"GPU-0", "GPU-2"}, NOW)
    found = ask(store)
    assert answer(found).endswith(
        "cuda:1 is unknown: it is gone; cuda:0 and cuda:2 are unknown: The last verdict is 2 hours old; it was healthy"
    )
    assert advice(found).startswith("Find out why cuda:1 is gone")
    assert advice(found).endswith("canaryd check")


def test_a_record_that_cannot_be_read_sends_nobody_to_text_that_is_not_there(store):
    """JSON has the advice too, and no "below"; a further problem is still pointed at."""
    found = replace(ask(store), unreadable="cannot read /x: use sudo", problems=("cannot read /x: use sudo",))
    assert advice(found) == "Make the stored record readable, then ask again."
    assert "see below" in advice(replace(found, problems=(*found.problems, "the kernel log is not read")))


@pytest.mark.parametrize(("wrong", "words"), [(True, "caught; the alert CanarydDrill ends by"), (False, "not caught")])
def test_a_drill_is_told_while_its_alert_stands(store, wrong, words):
    """When, and how it ended; the device stays healthy, and an hour later nothing is left."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE))
    assert status_json(ask(store))["devices"][0]["drill"] is None
    made = replace(mismatch(1), drill="flip", started=NOW - 600)
    store.add_run(made if wrong else replace(made, comparisons=()))
    seen = ask(store)
    until = NOW + 3000
    told = status_json(seen)["devices"][0]["drill"]
    assert told == {"fault": "flip", "at": NOW - 600, "caught": wrong, "until": until}
    assert seen.state is State.HEALTHY
    line = f"drill of {format_time(NOW - 600, seconds=False)} (flip) on cuda:3: {words}"
    for text in (status_text(seen), re.sub(r"<[^>]+>", "", status_page.render(seen, NOW).decode())):
        assert line in unwrapped(text)
        assert (format_time(until, seconds=False) in unwrapped(text)) is wrong
    later = status.as_of(seen, NOW + 3001)
    assert later.devices[0].drill is None
    assert "drill" not in status_text(later)


def waiting(**facts):
    """Return a verdict of a device that no probe has tested yet, but for a finding with these facts."""
    finding = {"rule": "no-evidence", "state": State.UNKNOWN, "cause": Cause.UNDETERMINED, "probe": "exact_matmul"}
    found = Finding(message="exact_matmul has not completed a run on this device yet", **finding | facts)
    return replace(verdict(State.UNKNOWN, Cause.UNDETERMINED), findings=(found,))


@pytest.mark.parametrize("judged", [None, waiting()])
def test_right_after_a_start_the_first_tests_are_running(store, judged):
    """Nobody who asks too early is told to start the daemon that runs."""
    store.see_device(GPU, NOW)
    if judged:
        store.set_verdict(judged)
    with store.lock(DAEMON_LOCK):
        found = ask(store)
    assert answer(found) == "UNKNOWN whether this node's numbers are right: first tests are running on cuda:3"
    assert advice(found) == "Wait some minutes, then ask again. No device counts as healthy before it is judged."
    assert "tart the daemon" not in status_text(found)
    assert "tart the daemon" in status_text(ask(store)) or judged


def test_a_daemon_that_has_found_no_device_yet_is_not_started_again(store):
    """Its first look takes some seconds."""
    with store.lock(DAEMON_LOCK):
        found = ask(store)
    assert "tart the daemon" not in status_text(found)
    assert answer(found) == "UNKNOWN whether this node's numbers are right: the daemon is still looking for devices"


def test_a_device_that_nothing_tests_waits_for_no_first_test(store):
    """No probe is enabled for it, or it is unknown for another reason too."""
    store.see_device(GPU, NOW)
    other = Finding(rule="not-completed", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message="exact_matmul hung")
    both = waiting()
    for judged in (waiting(probe=""), replace(both, findings=(*both.findings, other))):
        store.set_verdict(judged)
        with store.lock(DAEMON_LOCK):
            assert "first tests" not in answer(ask(store))


def test_every_command_that_is_advised_exists(store):
    """A tired person types what is printed."""
    subparsers = next(action for action in parser()._actions if action.dest == "command")
    told = [advice(beside(store, (state, cause), daemon=d)) for state in State for cause in Cause for d in (0, 1)]
    store.set_verdict(told_of(fault(State.SUSPECT, U, to_come=2), device=replace(GPU, uuid="GPU-0")))
    told.append(advice(ask(store)))
    named = {command for text in told for command in re.findall(r"canaryd (check|run|release|report|ack|\w+ --)", text)}
    assert {command.split()[0] for command in named} <= set(subparsers.choices)
    assert {"check", "run"} <= named


def test_what_is_released_or_gone_is_advised_about(store):
    """An unknown device has a way back: end the release, look for the part, or declare it absent."""
    store.see_device(GPU, NOW)
    store.set_note(RELEASE_NOTE, str(NOW + 60))
    assert "canaryd release --end" in advice(ask(store))
    store.set_note(RELEASE_NOTE, "")
    store.set_verdict(verdict(State.UNKNOWN, U, "vanished"))
    store.set_present(set(), NOW)
    assert "Find out why cuda:3 is gone" in advice(ask(store))
    assert "devices.absent" in advice(ask(store))


def test_healthy_devices_are_one_line(store):
    """Of a device without findings, events or words of operators there is nothing to say; a note brings it back."""
    found = beside(store, *[SOUND] * 8)
    (line,) = [line for line in status_text(found).split("\n") if "cuda:" in line]
    assert line == "HEALTHY  cuda:0 cuda:1 cuda:2 cuda:3 cuda:4 cuda:5 cuda:6 cuda:7 (NVIDIA H200)"
    seen = [{"a": NOW - 60 * index, "b": NOW} for index in range(8)]
    devices = tuple(replace(d, evidence=e) for d, e in zip(found.devices, seen, strict=True))
    assert "; oldest result: a of cuda:7 (7 minutes)" in unwrapped(status_text(replace(found, devices=devices)))
    note = Finding(rule="a-note", state=State.HEALTHY, cause=Cause.NONE, message="persistence is off", action="Set it")
    store.set_verdict(replace(verdict(*SOUND), device="GPU-5", findings=(note,)))
    text = status_text(ask(store))
    assert "HEALTHY  cuda:5  NVIDIA H200" in text
    assert "note     persistence is off. Set it." in text
    assert "cuda:4 cuda:6" in text
    store.set_verdict(replace(verdict(*SOUND), device="GPU-5", findings=(replace(note, action=""),)))
    assert "cuda:4 cuda:5 cuda:6" in status_text(ask(store)), "there is nothing to do about it"
    assert "note     persistence is off." in status_text(ask(store), verbose=True)


def test_devices_alike_share_a_paragraph(store):
    """Whatever runs their findings rest on; another rival or another word of an operator is another paragraph."""
    rival = Rival(cause=S, why="the siblings are clean", rejected=True)
    base = Finding(rule="a-rule", state=State.DEGRADED, cause=H, message="a link lost lanes", rivals=(rival,))
    for index in range(4):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        store.see_device(device, NOW)
        finding = replace(base, runs=(f"run-{index}",), rivals=() if index == 3 else base.rivals)
        store.set_verdict(replace(verdict(State.DEGRADED, H), device=device.uuid, findings=(finding,)))
    store.add_ack(Ack(device="GPU-2", kind="repaired", at=NOW - 60, reason="new riser"))
    text = status_text(ask(store), verbose=True)
    assert text.count("- a-rule: a link lost lanes") == 3
    assert "DEGRADED cuda:0, cuda:1  NVIDIA H200" in text
    assert "cuda:0 is GPU-0\n         cuda:1 is GPU-1" in text
    brief = status_text(ask(store))
    assert brief.count("         a link lost lanes.") == 2, "the rivals are not shown, so they make no difference"
    assert "DEGRADED cuda:0, cuda:1, cuda:3  NVIDIA H200" in brief


def test_the_rivals_of_a_finding_are_told(store):
    """What else it could be, and why not; what is open is told apart from what was rejected."""
    store.see_device(GPU, NOW)
    rivals = (
        Rival(cause=S, why="the siblings are clean", rejected=True),
        Rival(cause=E, why="no power was read", rejected=False),
    )
    finding = Finding(rule="a-rule", state=State.FAULTY, cause=H, message="wrong bits", rivals=rivals)
    store.set_verdict(replace(verdict(State.FAULTY, H), findings=(finding,)))
    found = ask(store)
    lines = [line.strip() for line in status_text(found, verbose=True).split("\n")]
    assert "not software: the siblings are clean" in lines
    assert "maybe environment: no power was read" in lines
    assert "siblings" not in status_text(found)
    assert status_json(found)["devices"][0]["findings"][0]["rivals"] == [
        {"cause": "software", "why": "the siblings are clean", "rejected": True, "what": None, "shown": "", "by": []},
        {"cause": "environment", "why": "no power was read", "rejected": False, "what": None, "shown": "", "by": []},
    ]


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


def acknowledge(store, at=NOW - 10, until=NOW + 600, rules=("exact-mismatch",), **more):
    given = {"device": GPU.uuid, "kind": "acknowledged", "at": at, "reason": "RMA 7", "by": "anna"}
    store.add_ack(Ack(**given | {"until": until, "rules": rules} | more))


def mismatch(number, **more):
    """Return a run that was wrong, stored when it started."""
    bits = Evidence(wrong=1, total=9, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one")
    seen = Comparison(case="bf16", shape="M=1", seed=1, exactness=Exactness.UNIVERSAL, wrong_trials=1, evidence=bits)
    return run(number, comparisons=(seen,), **more)


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
    assert status.as_of(found, NOW + 9e4).devices[0].verdict.findings == (only,)


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
    """It is not told as the newest evidence of a device that has none yet, whoever gathered it."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.UNKNOWN, U, "no evidence yet"))
    store.add_run(run(1))
    store.add_run(run(2, probe="later", started=NOW - 5))
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 100, reason="new riser"))
    assert ask(store).devices[0].evidence == {"exact": None, "later": NOW - 5}
    given = {GPU.uuid: {"exact": NOW - 101, "never": None, "later": NOW - 99}}
    found = status.gather(store, Config(), NOW, daemon=True, evidence=given)
    assert found.devices[0].evidence == {"exact": None, "never": None, "later": NOW - 99}


def test_a_word_that_nobody_has_judged_covers_what_was_suspect(store):
    """As the judge would: unknown, not healthy, and known. What is faulty, or of another rule, stays."""
    store.see_device(GPU, NOW)
    store.set_verdict(suspect())
    acknowledge(store)
    found = ask(store)
    (one,) = found.devices
    assert (one.verdict.state, one.verdict.cause, one.acknowledged) == (State.UNKNOWN, U, True)
    assert [(f.rule, f.state, f.acknowledged) for f in one.verdict.findings] == [
        ("exact-mismatch", State.UNKNOWN, True),
        ("acknowledged", State.HEALTHY, False),
    ]
    assert ": wrong bits" in one.verdict.findings[0].message
    assert "Nothing new: cuda:3 is acknowledged" in advice(found)
    assert status_text(found).count("RMA 7") == 1
    store.set_verdict(suspect(Finding(rule="confirmed", state=State.FAULTY, cause=H, message="thrice")))
    assert ask(store).state is State.FAULTY
    store.set_verdict(suspect(Finding(rule="other", state=State.SUSPECT, cause=H, message="slow link")))
    found = ask(store)
    assert (found.state, found.devices[0].verdict.cause) == (State.SUSPECT, H)
    assert "Nothing new" not in advice(found)


def test_a_word_that_ended_leaves_the_suspicion(store):
    """Ended by the operator or by time: what it covered is suspect until it is judged again."""
    store.see_device(GPU, NOW)
    covered = Finding(rule="exact-mismatch", state=State.UNKNOWN, cause=U, message="known: bits", acknowledged=True)
    store.set_verdict(replace(verdict(State.UNKNOWN, U), findings=(covered,)))
    acknowledge(store, at=NOW - 90)
    assert ask(store).state is State.UNKNOWN
    assert ask(store, now=NOW + 601).state is State.SUSPECT
    acknowledge(store, until=NOW - 10)
    found = ask(store)
    assert found.state is State.SUSPECT
    assert "The acknowledgement has ended" in status_text(found)
    assert "Nothing new" not in status_text(found)


def test_a_clock_that_jumped_ends_no_acknowledgement(store):
    """It ends by the time that has come for certain, as in verdicts; `canaryd ack` and the metrics ask the same."""
    store.see_device(GPU, NOW)
    store.set_note(REACHED_NOTE, repr(NOW))
    covered = Finding(rule="exact-mismatch", state=State.UNKNOWN, cause=U, message="known: bits", acknowledged=True)
    store.set_verdict(replace(verdict(State.UNKNOWN, U), findings=(covered,)))
    acknowledge(store, until=NOW + 2 * STEP)
    (one,) = status.gather(store, Config(), NOW + 30 * 86_400).devices
    assert one.acks
    assert one.verdict.state is State.UNKNOWN
    cached = status.gather(store, Config(), NOW + 30 * 86_400)
    assert status.as_of(cached, cached.now + 60).devices[0].acks
    assert not status.as_of(cached, cached.now + 2 * STEP).devices[0].acks
    store.set_note(REACHED_NOTE, repr(NOW + STEP))
    assert store.certain(NOW) == NOW
    assert not status.gather(store, Config(), NOW + 30 * 86_400).devices[0].acks


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
    for each in (mismatch(1, drill="flip"), run(2, outcome=Outcome.TIMED_OUT), mismatch(3, device="GPU-2")):
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


def test_a_wrong_run_after_a_word_is_news(store):
    """The operator cannot have known of it; one from before a repair is history."""
    store.see_device(GPU, NOW)
    store.set_verdict(suspect())
    acknowledge(store, at=NOW - 59)
    assert "Nothing new" in advice(ask(store))
    store.add_run(run(4, unknown=("prefill/1",)))
    found = ask(store)
    assert "Nothing new" not in advice(found)
    assert "A newer exact run differed from its baseline (case prefill/1); not judged yet." in unwrapped(
        status_text(found)
    )
    store.add_ack(Ack(device=GPU.uuid, kind="repaired", at=NOW - 70, reason="new riser"))
    assert "Nothing new" in advice(ask(store))


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


def test_equal_lines_of_the_log_are_one_with_their_number(store):
    """The newest stands for all of them; each change has its own line; JSON has every event."""
    store.see_device(GPU, NOW)
    line = "Out of memory: Killed process total-vm:132kB"
    hours = [Event(device=GPU.uuid, kind="oom", name="system", first=t, last=t, count=2, detail=f"{line}{end}")
             for t, end in ((NOW - 9000, "9"), (NOW - 5000, "5"), (NOW - 60, ""))]  # fmt: skip
    flips = [Event(device=GPU.uuid, kind="change", name="driver", first=t, last=t, before=str(t), after="570")
             for t in (NOW - 9000.0, NOW - 99.0)]  # fmt: skip
    store.add_events([*hours, *flips])
    store.set_verdict(verdict(State.DEGRADED, H, "slow"))
    found = ask(store)
    text = unwrapped(status_text(found, verbose=True))
    assert text.count("Out of memory") == 1
    assert f"* {format_time(NOW - 60)} out of memory (6 times): {line}" in text
    assert text.count("→ 570") == 2
    assert len(status_json(found)["devices"][0]["events"]) == 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 seconds"), (1, "1 second"), (1.4, "1 second"), (2, "2 seconds"), (120, "2 minutes")],
)
def test_a_duration_is_said_as_people_do(seconds, words):
    """One second is no plural; from two of a unit on it is that unit."""
    assert format_duration(seconds) == words


def test_a_part_that_was_replaced_is_not_told_of(store):
    """It left with its record; as long as it is found, the word alone does not make it leave."""
    for device in (GPU, CPU):
        store.see_device(device, NOW - 60)
        store.set_verdict(replace(verdict(State.FAULTY, H, "wrong bits"), device=device.uuid))
    store.add_ack(Ack(device=GPU.uuid, kind="replaced", at=NOW, reason="RMA 7"))
    assert {d.device.uuid for d in ask(store).devices} == {"GPU-1", "CPU-1"}
    store.set_present({CPU.uuid}, NOW)
    assert {d.device.uuid for d in ask(store).devices} == {"CPU-1"}


def run(number, **what):
    base = {"id": f"{number:012x}-aaaaaa", "device": GPU.uuid, "probe": "exact", "probe_version": 1, "seconds": 1.0}
    return Run(**base | {"started": NOW - 1000 + number, "outcome": Outcome.COMPLETED} | what)


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
        run(6, drill="flip"),
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
    assert "oldest result: never of cuda:3 (none yet)" in unwrapped(status_text(found))


def test_the_evidence_of_devices_alike_is_the_oldest(store):
    """One of them without evidence must not hide behind the others."""
    found = beside(store, (State.DEGRADED, H), (State.DEGRADED, H))
    seen = [{"a": NOW - 10, "b": NOW - 60, "c": NOW}, {"a": NOW - 90, "b": NOW - 50, "c": None, "its own": NOW - 20}]
    devices = tuple(replace(d, evidence=e) for d, e in zip(found.devices, seen, strict=True))
    assert status.newest_of(devices) == {"c": None, "a": NOW - 90, "b": NOW - 60, "its own": NOW - 20}
    text = status_text(replace(found, devices=devices), verbose=True)
    newest = "newest results: c (none yet), a (90 seconds ago), b (60 seconds ago), its own (20 seconds ago)"
    assert newest in unwrapped(text)


def test_the_schema_is_closed_and_every_field_is_explained():
    """docs/json.md has a row for each field of each object, and no row for anything else."""
    VALIDATOR.check_schema(SCHEMA)
    for part in objects(SCHEMA):
        assert part["additionalProperties"] is False
        assert sorted(part["required"]) == sorted(part["properties"])
    shared = ("incidents[]", "findings[]", "rivals[]", "characterised[]", "events[]")
    assert unexplained("`canaryd status --json`", SCHEMA, shared) == []


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


# --- The daemon ------------------------------------------------------------------------------------------------------


def test_a_running_daemon_and_a_release_are_told(store):
    """Whoever holds the daemon's lock is the daemon; a release is told until it is over."""
    store.set_note(RELEASE_NOTE, str(NOW + 60))
    with store.lock(DAEMON_LOCK), Store.open(store.state_dir, now=lambda: NOW) as other:
        found = ask(other)
        assert found.daemon
        assert found.released_until == NOW + 60
        assert "released until" in status_text(found)
        assert "daemon: running" in status_text(found)
    assert ask(store, now=NOW + 61).released_until == 0.0
    assert "not running" in status_text(ask(store))


def test_nothing_to_release_without_a_daemon(tmp_path):
    """Between two commands nothing is held: said, and no error."""
    (tmp_path / "state").mkdir()
    answer = canaryd("release", "--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state")
    assert answer.code == 0
    assert "no daemon runs" in answer.out


def test_a_daemon_releases_and_takes_back(tmp_path):
    """`canaryd release` returns when nothing is held; polls stop, and go on after `--end`."""
    said = tmp_path / "said.json"
    said.write_text(json.dumps({"readings": [["persistence_mode", 0, {}]]}))
    config = configure(tmp_path, "says", each={"says": {"settings": {"file": str(said)}}})
    state = tmp_path / "state"
    common = ("--config", config, "--state-dir", state)
    pids = tmp_path / "said.json.pids"
    with running(Daemon(config, state)) as daemon:
        eventually(pids.exists)
        eventually(lambda: "canaryd_device_handles_held 1.0" in daemon.get("/metrics")[1])
        answer = canaryd("release", "--for", "10m", *common)
        assert (answer.code, answer.err) == (0, "")
        assert "canaryd_released 1.0" in daemon.get("/metrics")[1]
        before = pids.read_text()
        document = canaryd("status", "--json", *common).document
        assert document["daemon_running"]
        assert document["released_until"] > time.time() + 500
        assert canaryd("release", "--end", *common).code == 0
        eventually(lambda: pids.read_text() != before)
        assert "canaryd_released 0.0" in daemon.get("/metrics")[1]


def on_record(store, *, level="quick", probes=("exact_matmul", *ONLY), state=State.HEALTHY):
    """Return the status of a node whose GPU ran these probes at a level."""
    store.see_device(GPU, NOW)
    cause = Cause.NONE if state is State.HEALTHY else Cause.HARDWARE
    store.set_verdict(verdict(state, cause, *([] if state is State.HEALTHY else ["a fault"])))
    for number, probe in enumerate(probes):
        run = Run(
            id=f"r{number}",
            device=GPU.uuid,
            probe=probe,
            probe_version=1,
            started=NOW - 60,
            seconds=1.0,
            outcome=Outcome.COMPLETED,
            level=level,
        )
        store.add_run(run)
    return ask(store)


def test_status_says_what_was_not_tested(store):
    """As a check of the level that ran says it: a healthy node is healthy as far as it was tested."""
    found = on_record(store)
    assert "not tested: serving engine, other instruction sets, most shapes" in status_text(found)
    assert "most memory: beyond 16 MiB of each device" in unwrapped(status_text(found, verbose=True))
    assert "higher load: load, power and temperature above those of this check" in status_json(found)["not_tested"]
    assert b"Not tested: serving engine" in status_page.render(found, NOW)


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


def test_status_names_the_zone_of_its_times(store, monkeypatch):
    """Somebody else reads it in another country."""
    for zone, told in {"UTC": "UTC", "IST-5:30": "UTC+05:30", "XYZ+3": "UTC-03:00"}.items():
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            assert f"; times: {told} status:" in unwrapped(status_text(on_record(store)))
    time.tzset()


def test_a_problem_of_canaryd_is_no_nothing(store):
    """To say that there is nothing to do would contradict it."""
    found = replace(on_record(store), daemon=True, problems=("the disk is full",))
    assert advice(found) == "Nothing is wrong with the devices. canaryd itself has a problem (see below)."
    assert advice(replace(found, problems=())) == "Nothing."


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (Cause.HARDWARE, "Send the file that it names to the vendor."),
        (
            Cause.UNDETERMINED,
            (
                "Wrong there too: look for a software fault first. Right there: cuda:3 is at fault; write the report "
                "for the vendor: canaryd report cuda:3 -o ./case"
            ),
        ),
        (Cause.SOFTWARE, ""),
    ],
)
def test_status_says_what_to_send_to_the_vendor(store, cause, told):
    """Once the part is known to be at fault; a bug of the software is no case for its vendor."""
    store.see_device(GPU, NOW)
    store.set_verdict(replace(told_of(fault(cause=cause)), device=GPU.uuid, cause=cause))
    assert told in advice(ask(store))
    assert ("Send the file that it names" in advice(ask(store))) is (cause is Cause.HARDWARE)
