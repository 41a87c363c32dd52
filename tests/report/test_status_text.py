"""What `canaryd status` prints: the first line answers, the second says what to do."""

import re
import time
from dataclasses import replace

import pytest

from canaryd.cli.main import parser
from canaryd.formatting import format_duration, format_time
from canaryd.judge.phrases import PROVIDER, VENDOR_CASE
from canaryd.judge.telemetry.signals import RETURN
from canaryd.judge.telemetry.xid_rules import ACTIONS
from canaryd.model import Ack, Cause, Device, Event, Finding, Rival, State
from canaryd.report import status_page
from canaryd.report.advice import advice, answer
from canaryd.report.incidents import state_lines
from canaryd.report.status_text import as_json as status_json
from canaryd.report.status_text import as_text as status_text
from canaryd.store.notes import DAEMON_LOCK, RELEASE_NOTE
from tests.mixed_machine import fault
from tests.mixed_machine import verdict as told_of
from tests.pages import unwrapped
from tests.report.statuses import GPU, NOW, E, H, S, U, X, ask, beside, mismatch, on_record, verdict

SOUND = (State.HEALTHY, Cause.NONE)


@pytest.mark.parametrize(
    ("told", "daemon", "first", "second"),
    [
        ([SOUND], True, "YES, trust this node's numbers: cuda:0 is healthy", "Nothing."),
        ([SOUND] * 3, True, "YES, trust this node's numbers: 3 devices are healthy", "Nothing."),
        ([SOUND], False, "YES, trust", "The daemon is not running. Start it: canaryd run"),
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
            "NO, do not trust the numbers of cuda:0: cuda:0 is suspect (cause unknown): a reason; cuda:1 is healthy",
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
        ([(State.FAULTY, S)], False, "NO", "nothing else is tested. Start it: canaryd run"),
        ([(State.FAULTY, U)], True, "NO", "Take cuda:0 out of service. Mend it."),
        (
            [(State.FAULTY, H), SOUND, (State.UNKNOWN, X)],
            True,
            "NO, do not trust this node's numbers: cuda:0 is faulty (hardware): a reason; cuda:2 is unknown",
            "Take cuda:0 out of service. Mend it.",
        ),
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


@pytest.mark.parametrize(
    "other",
    [
        Device(uuid="endpoint:main", backend="endpoint", index=0, model="m", detail={"behind": "cuda:0"}),
        Device(uuid="MIG-2", backend="cuda", index=0, model="H200", parent=GPU.uuid, detail={"instance": "2"}),
    ],
)
def test_what_a_wrong_device_serves_or_is_part_of_is_not_said_to_be_right(store, other):
    """The answers of a server behind it, and the instances of the same chip, are not excepted by the first line."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.FAULTY, H, "a fault"))
    store.see_device(other, NOW)
    store.set_verdict(replace(verdict(State.HEALTHY, Cause.NONE), device=other.uuid))
    assert answer(ask(store)).startswith("NO, do not trust this node's numbers: ")


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
    assert "Do now:  Run:\n         canaryd check --x\n" in status_text(seen)


@pytest.mark.parametrize("action", [RETURN, ACTIONS["rma"]])
def test_a_part_for_return_is_taken_out_of_service_once(store, action):
    """Every report says that of a faulty device before what its finding asks for."""
    store.see_device(GPU, NOW)
    store.set_verdict(told_of(replace(LOST, state=State.FAULTY, action=action), device=GPU))
    told = advice(replace(ask(store), daemon=True))
    assert (told.count("out of service"), told.endswith(action)) == (1, True)


def test_a_command_that_names_its_device_is_said_of_each(store):
    """The header has the first one's command and sends the reader below: the other's is there."""
    for index in range(3):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        todo = f'If no fault was known here: canaryd ack cuda:{index} --reason "…"'
        store.see_device(device, NOW)
        found = Finding(rule="history-lost", state=State.UNKNOWN, cause=X, message="The record was lost", action=todo)
        store.set_verdict(told_of(found, device=device))
    seen = replace(ask(store), daemon=True)
    assert advice(seen).endswith('canaryd ack cuda:0 --reason "…" For cuda:1 and cuda:2, see below.')
    text = status_text(seen)
    assert [text.count(f"canaryd ack cuda:{index} ") for index in range(3)] == [1, 1, 1]


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


@pytest.mark.parametrize(
    ("wrong", "daemon", "words"),
    [
        (True, True, "caught; the alert CanarydDrill ends at about"),
        (True, False, "caught; it raises no alert, because no daemon runs on this state directory"),
        (False, True, "not caught"),
    ],
)
def test_a_drill_is_told_while_its_alert_stands(store, wrong, daemon, words):
    """When, and how it ended, also where nobody serves an alert; an hour later nothing is left."""
    store.see_device(GPU, NOW)
    store.set_verdict(verdict(State.HEALTHY, Cause.NONE))
    assert status_json(ask(store))["devices"][0]["drill"] is None
    made = replace(mismatch(1), drill="flip", started=NOW - 600)
    store.drills.add_run(made if wrong else replace(made, comparisons=()))
    seen = replace(ask(store), daemon=daemon)
    until = NOW + 3000
    told = status_json(seen)["devices"][0]["drill"]
    assert told == {"fault": "flip", "at": NOW - 600, "caught": wrong, "until": until}
    assert seen.state is State.HEALTHY
    line = f"drill of {format_time(NOW - 600, seconds=False)} (flip) on cuda:3: {words}"
    for text in (status_text(seen), re.sub(r"<[^>]+>", "", status_page.render(seen).decode())):
        assert line in unwrapped(text)
        assert (format_time(until, seconds=False) in unwrapped(text)) is (wrong and daemon)
    later = ask(store, now=NOW + 3001)
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


def test_what_several_findings_ask_for_is_said_once(store):
    """A check of a GPU alone leaves every probe of the processor untested: eight findings, one thing to do."""
    store.see_device(GPU, NOW)
    found = [replace(waiting(probe=f"probe_{n}", action="Run it now.").findings[0], message=f"{n}") for n in range(8)]
    store.set_verdict(replace(waiting(), findings=tuple(found)))
    text = status_text(ask(store), verbose=True)
    assert (text.count("no-evidence ("), text.count("    Do now: Run it now.")) == (8, 1)


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
    assert "; oldest test: a, cuda:7, 7 minutes ago" in unwrapped(status_text(replace(found, devices=devices)))
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
        {
            "cause": "software",
            "why": "the siblings are clean",
            "rejected": True,
            "what": None,
            "shown": "",
            "by": [],
            "of": 0,
        },
        {
            "cause": "environment",
            "why": "no power was read",
            "rejected": False,
            "what": None,
            "shown": "",
            "by": [],
            "of": 0,
        },
    ]


def test_equal_lines_of_the_log_are_one_with_their_number(store):
    """The newest of a day stands for all of them; JSON has every event."""
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
    assert text.count("→ 570") == 1
    assert len(status_json(found)["devices"][0]["events"]) == 5


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 seconds"), (1, "1 second"), (1.4, "1 second"), (2, "2 seconds"), (120, "2 minutes")],
)
def test_a_duration_is_said_as_people_do(seconds, words):
    """One second is no plural; from two of a unit on it is that unit."""
    assert format_duration(seconds) == words


def test_status_names_the_zone_of_its_times(store, monkeypatch):
    """Somebody else reads it in another country."""
    for zone, told in {"UTC": "UTC", "IST-5:30": "UTC+05:30", "XYZ+3": "UTC-03:00"}.items():
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            time.tzset()
            assert f"; times: {told} status:" in unwrapped(status_text(on_record(store)))
    time.tzset()


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
