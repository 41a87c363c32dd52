"""The judgement of telemetry: each rule from both sides and its way out, and that no rule is idle."""

import dataclasses
import math
from datetime import datetime, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.facts import Reading, Skipped
from canaryd.judge.telemetry import flag_rules, line_rules, xids
from canaryd.judge.telemetry.events import FLAGS, WORDS, changes, judged_values
from canaryd.judge.telemetry.readings import READINGS, split_key
from canaryd.judge.telemetry.rules import findings
from canaryd.judge.telemetry.signals import ECC, RECOVERY, Poll
from canaryd.model import Outcome
from tests.command import ROOT
from tests.judge.telemetry.made import (
    DAY,
    GPU,
    HEALTHY,
    HOUR,
    NOW,
    QUIET,
    SUSPECT,
    UE,
    U,
    event,
    failed,
    line,
    message,
    poll,
    reset,
    sign,
    told,
    wiped,
    xid,
)
from tests.judge.telemetry.scenarios import CONDITIONS, SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    """What is seen yields exactly these findings, with state and cause."""
    signs, expected = SCENARIOS[name]()
    assert told(signs) == sorted(expected), [f.message for f in findings(signs)]


def test_a_container_at_its_limit_says_nothing_of_the_hosts_memory():
    """The kernel kills in both cases; what helps differs."""
    for name, words, action in (
        ("system", "host's memory", "Free memory on the host (journalctl -k names the process)."),
        ("cgroup", "memory limit", "Raise that limit, or let it use less (journalctl -k names the process)."),
    ):
        (found,) = findings(sign(event("oom", name)))
        assert words in found.message
        assert found.action == action


@pytest.mark.parametrize("action", RECOVERY)
def test_the_kernel_log_and_the_reading_say_the_same_of_one_advice(action):
    """Xid 154 and the driver's reading are two ways to one advice: an operator gets one instruction."""
    read = sign(only={"recovery_action{action=none}": None, f"recovery_action{{action={action}}}": 1})
    logged = sign(xid(154, fields={"action": action.replace("_", "-")}))
    (one,), (other,) = findings(read), findings(logged)
    assert (one.action, one.state) == (other.action, other.state)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_finding_says_something_and_no_more_than_it_must(name):
    """Texts are single short sentences without empty places; the evidence names whose advice a class of action is."""
    for finding in findings(SCENARIOS[name]()[0]):
        for text in filter(None, (finding.message, finding.action, *finding.evidence)):
            assert "\n" not in text
            assert ".." not in text
            assert "None" not in text
            assert text.strip() == text
            assert text.endswith(".") or ": " in text[-80:], text
        assert finding.message
        assert len(finding.message) <= 120, finding.message
        assert len(finding.action) <= 90, finding.action
        assert all(0 < len(text) < 400 for text in finding.evidence)
        for text in (t for t in finding.evidence if t.startswith("Recommended: ")):
            advisers = ("NVIDIA", "DCGM", "AMD", "canaryd", "gpud", "telemetry.xids")
            assert any(a in text for a in advisers), text
        if finding.state is not HEALTHY:
            assert finding.action
            assert any("lear" in text for text in finding.evidence), finding


def test_every_rule_is_in_the_table_of_the_documentation():
    """What a finding is called, an operator can look up."""
    table = (ROOT / "docs" / "telemetry.md").read_text()
    named = {f.rule for build in SCENARIOS.values() for f in findings(build()[0])}
    assert {rule for rule in named if f"`{rule}`" not in table} == set()


def test_an_xid_of_an_application_tells_what_exact_goldens_said():
    """That is what tells a broken device from a broken application."""
    assert "Wait for the exact test" in message(sign(xid(31)), "xid")
    passed = message(sign(xid(31), passed=60), "xid")
    assert "Exact tests passed 59 minutes after it." in passed
    assert "Check the application first." in passed
    unreached = dataclasses.replace(sign(xid(31)), device=dataclasses.replace(GPU, torch_index=None))
    assert "torch does not reach the device" in message(unreached, "xid")
    failed_after = message(sign(xid(31), wrong=60), "xid")
    assert "An exact test failed 59 minutes after it." in failed_after
    assert "Check the device first." in failed_after
    repeated = message(sign(xid(31, 9 * HOUR), xid(31, 5 * HOUR), xid(31), passed=60), "xid")
    assert "NVIDIA's workflow for Xid 31" in repeated
    assert "Check the application first." in repeated


def test_a_suspicion_tells_how_far_its_way_out_is():
    """Before the reset it asks for one, after it for a pass alone."""
    before = message(sign(xid(64)), "xid")
    assert "Drain the device and reset it." in before
    assert "Clears after a reset and then a clean exact test." in before
    after = message(sign(xid(64), reset(60)), "xid")
    assert "Run an exact test: canaryd check --device cuda:0" in after
    assert "There was a reset since." in after
    assert "Clears after a reboot and then a clean exact test." in message(sign(xid(168), reset(60)), "xid")
    assert "There was a reset since." in message(sign(wiped()), "uncorrected-error")


def test_a_contained_error_of_six_gpus_is_a_note():
    """From a report of H200s: 137 and 94 on six of eight in one second, no counter moved, no reset asked for."""
    lines = (
        "NVRM: Xid (PCI:0000:0f:00): 137, TLC_RX interrupt hit on link 0 on GPU0: PRIV Error",
        "NVRM: Xid (PCI:0000:0f:00): 94, pid=4242, name=VLLM::Worker, Contained: SM (0x1). RST: No, D-RST: No",
    )
    each = [line(text, HOUR) for text in lines]
    others = {f"cuda:{n}": each for n in range(1, 6)}
    signs = sign(*each, siblings=[*others, "cuda:6", "cuda:7"], beside=others)
    assert {f.state for f in findings(signs)} == {HEALTHY}
    text = message(signs, "xid")
    assert "cuda:1, cuda:2, cuda:3, cuda:4, cuda:5 had it too" in text
    assert "Restart the application" in text
    assert "reset" not in text.lower()
    assert "No error was counted here." in text
    unread = sign(*each, beside=others, only={key: None for key in QUIET if key.startswith("ecc_")})
    assert "Its error counts are not read." in message(unread, "xid")


def test_what_came_at_other_times_drains_no_other_device():
    """Nobody is named, and a reset of all would reach too far."""
    at_other_times = {"cuda:1": [xid(48, 3 * DAY)], "cuda:2": [xid(48, 5 * DAY)]}
    text = message(sign(xid(48), siblings=("cuda:1", "cuda:2", "cuda:3"), beside=at_other_times), "uncorrected-error")
    assert "Drain the device and reset it." in text
    change = event("change", "driver", 9 * DAY)
    since = {name: [change, *events] for name, events in at_other_times.items()}
    text = message(sign(change, xid(48), siblings=("cuda:1", "cuda:2", "cuda:3"), beside=since), "uncorrected-error")
    assert "look at what changed" in text
    assert "Drain the device and reset it." in text


def test_one_link_that_fails_does_not_drain_its_fabric():
    """From a report of a rack of GB200s: 149 on one GPU, and 145 on every other a second later."""
    down = line("NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_DOWN Fatal XC0 i0 Link 14 (0x00000011 0x00000000)", 3601)
    hit = line("NVRM: Xid (PCI:0009:01:00): 145, RLW_SRC_TRACK Fatal XC1 i0 Link 14 (0x00000007 0x00000000)", HOUR)
    assert told(sign(down, beside={"cuda:1": [hit]})) == [("xid", SUSPECT, U)]
    assert told(sign(hit, beside={"cuda:1": [down], "cuda:2": [hit]})) == [("xid", HEALTHY, U)]
    assert told(sign(hit, beside={"cuda:1": [hit]})) == [("xid", HEALTHY, U)], "the link is another node's"


def test_a_reset_of_a_hive_is_said_to_reach_all_of_it():
    """AMD Instincts of one node are reset together: the jobs on the others end too."""
    broken = line("amdgpu 0000:68:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", HOUR)
    device = dataclasses.replace(GPU, backend="rocm", model="AMD Instinct MI300X")
    hive = sign(broken, device=device, siblings=[f"rocm:{n}" for n in range(1, 8)])
    assert "Drain every device of this node (they are reset together), then reset." in message(
        hive, "uncorrected-error"
    )
    assert "Drain the device and reset it." in message(dataclasses.replace(hive, siblings=()), "uncorrected-error")


def test_what_all_had_together_points_to_what_they_share():
    """No device is accused of hardware."""
    text = message(sign(xid(95), beside={"cuda:1": [xid(95)], "cuda:2": [xid(95)]}), "uncorrected-error")
    assert text.startswith("Uncorrected memory error on 3 devices at once.")
    assert "At about the same time: cuda:1, cuda:2 had it too." in text
    assert "Send none back; check power, riser, fabric, driver; drain all and reset them together." in text


def test_what_most_have_at_other_times_is_told_beside_the_xid():
    """Its driver's catalogue calls for a reset; three of four had it within a month."""
    others = {"cuda:1": [xid(119, 9 * DAY)], "cuda:2": [xid(119, 50 * DAY)]}
    text = message(sign(xid(119), siblings=["cuda:1", "cuda:2", "cuda:3"], beside=others), "xid")
    assert "Most identical devices had it too, at other times." in text
    assert "Drain the device and reset it." in text  # the others had it at other times: a reset of this one reaches it


def test_who_reported_a_machine_check_is_named():
    """The firmware speaks for any part; only what a processor reported is the processor's."""
    by_processor = message(sign(event("mce", "uncorrected", fields={"cpu": "3", "bank": "5"})), "machine-check")
    assert by_processor.startswith("Machine check: a processor reported an uncorrected error.\nDecode the error")
    told = {"severity": "recoverable", "section": "ARM processor error"}
    by_firmware = message(sign(event("mce", "uncorrected", fields=told)), "machine-check")
    assert by_firmware.startswith("The firmware reported an uncorrected error: ARM processor error.\nFind the part in")
    by_firmware = message(sign(event("mce", "uncorrected", fields={"severity": "fatal"})), "machine-check")
    assert by_firmware.startswith("The firmware reported an uncorrected error.\n")


def test_stale_telemetry_names_the_reason():
    """The newest failure says why, whether in its detail, in a skipped part or at the end of a traceback."""
    for newest, words in (
        (failed(Outcome.TIMED_OUT), "the newest poll timed out"),
        (
            failed(Outcome.SKIPPED, "permission denied: run as root\nmore"),
            "Reason: permission denied: run as root.",
        ),
        (failed(Outcome.SKIPPED, skipped=(Skipped(case="", reason="no driver"),)), "no driver"),
        (failed(Outcome.ERRORED, "Traceback\n  File\nKeyError: 'x'"), "KeyError: 'x'"),
    ):
        assert words in message(sign(completed=None, newest=newest), "telemetry-stale")


def test_every_name_that_a_rule_reads_is_a_reading():
    """A rule that asks for a reading which no probe may yield would never speak."""
    names = {*FLAGS, *WORDS, *ECC, *flag_rules.ADVICE, *(split_key(k)[0] for k in QUIET)}
    assert names <= READINGS.keys()
    flags = ((flag.reading, flag.labels) for flag in flag_rules.FLAGS if flag.labels)
    for name, labels in (*map(split_key, QUIET), *flags):
        assert set(labels) == set(READINGS[name].labels), name


# --- Properties -------------------------------------------------------------------------------------------------------


NAMES = [
    *QUIET,
    *(line.partition(" ")[2] for line in line_rules.LINES),
    *CONDITIONS,
    "throttle hw_thermal",
    "fatal port",
    "79",
    "13",
    "154",
    "x{",
    "",
    "driver",
]
KINDS = [
    *("counter", "reset", "boot", "change", "flag", "condition", "counter-fell", "xid", "sxid", "mce", "edac", "aer"),
    *("port", "unplaced"),
    *("pcie", "off-bus", "oom", "nvme", "thermal", "amdgpu", "intel", "driver", "hang", "clock", "lockup", "?"),
    "last-boot",
]
AGES = st.floats(-DAY, 40 * DAY)
EVENTS = st.builds(
    lambda kind, name, ago, lasted, count, words, facts: event(
        kind, name, ago, lasted=lasted, count=count, before=words[0], after=words[1], detail=words[2], **facts
    ),
    st.sampled_from(KINDS),
    st.sampled_from(NAMES) | st.integers(0, 200).map(str) | st.text(max_size=9),
    AGES,
    st.floats(0, HOUR),
    st.floats(0, 1e6),
    st.tuples(*[st.sampled_from(["", "0", "1", "tsc", f"{UE} 2"]) | st.text(max_size=9)] * 3),
    st.fixed_dictionaries(
        {},
        optional={
            "code": st.none() | st.integers(-1, 10**6) | st.sampled_from([13, 79, 94, 154]),
            "reading": st.sampled_from(["", *READINGS]) | st.text(max_size=9),
            "labels": st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
            "fields": st.dictionaries(
                st.sampled_from(["action", "severity", "unit", "intr_info", "gpc"]),
                st.sampled_from(["reset", "fatal", "0x1"]) | st.text(max_size=9),
                max_size=3,
            ),
        },
    ),
)
VALUES = st.integers() | st.floats() | st.text(max_size=3) | st.booleans()
READING = st.builds(
    lambda key, value: Reading(name=split_key(key)[0], value=value, labels=split_key(key)[1]),
    st.sampled_from([*QUIET, *READINGS]) | st.text(max_size=9),
    VALUES,
)
RUNS = st.builds(
    lambda ago, outcome, readings, detail: poll(ago, outcome=outcome, readings=tuple(readings), detail=detail),
    AGES,
    st.sampled_from(Outcome),
    st.lists(READING, max_size=9),
    st.sampled_from(["", "GPU is lost", "Traceback\nx"]) | st.text(max_size=9),
)
POLLS = st.builds(
    Poll,
    period=st.floats(0.1, 1e4),
    newest=st.none() | RUNS,
    completed=st.none() | RUNS,
    failures=st.integers(0, 9),
    since=st.floats(0, NOW),
)


@settings(max_examples=40)
@given(
    st.lists(EVENTS, max_size=12),
    st.dictionaries(st.text(max_size=3), POLLS, max_size=3),
    st.none() | AGES,
    st.none() | AGES,
)
def test_no_soup_of_signs_raises(events, polls, passed, wrong):
    """Whatever devices, drivers and a clock that was set give, there is an answer, and it can be printed."""
    for finding in findings(sign(*events, polls=polls, passed=passed, wrong=wrong)):
        assert finding.rule
        assert finding.message


@given(RUNS, RUNS)
def test_no_soup_of_readings_raises(before, after):
    """Two polls of anything give events whose count is a number above 0, and something hashable to watch."""
    for made in changes(before, after):
        assert 0 < made.count < math.inf
    hash(judged_values(after))
    assert changes(before, dataclasses.replace(before, started=before.started)) == []


@given(
    st.dictionaries(
        st.sampled_from(["temperature_celsius{sensor=core}", "utilization_ratio{engine=gpu}", "energy_joules_total"]),
        st.floats(0, 0.5),
    ),
    st.sets(st.sampled_from(sorted(QUIET))),
    st.floats(0, 119),
    st.none() | AGES,
)
def test_an_all_quiet_machine_yields_nothing_worse_than_healthy(moved, missing, ago, passed):
    """Whatever of the readings of a healthy device is missing, and however it is loaded."""
    facts = {**moved, **dict.fromkeys(missing)}
    before, after = poll(ago + 15, only=facts), poll(ago, only=facts)
    events = changes(before, after)
    assert {f.state for f in findings(sign(*events, completed=after, passed=passed))} <= {HEALTHY}


@given(st.integers(-1, 400), AGES)
def test_every_xid_is_forgotten_in_the_end(code, ago):
    """No code holds a device for longer than the watch, whatever the catalogue says of it."""
    made = dataclasses.replace(xid(31, ago), name=str(code), code=code)
    later = sign(made, now=made.last + 30 * DAY + 1, polls={})
    assert told(later) == []
    worst = max((f.state.severity for f in findings(sign(made, polls={}))), default=0)
    assert worst <= SUSPECT.severity
    assert worst == 0 or xids.explain(code).grade != "none"


def test_a_message_says_when_and_not_how_long_ago():
    """It is stored, and read long after it was written."""
    text = message(sign(event("off-bus", "driver", HOUR, detail="GPU is lost")), "gpu-lost")
    assert f"{datetime.fromtimestamp(NOW - HOUR, tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC" in text
    assert " ago" not in text
