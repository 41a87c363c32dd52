"""`canaryd gate`: one quick answer for drains, taints and prologs, which empties no fleet by mistake."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import jsonschema
import pytest

from canaryd.config.settings import Config
from canaryd.model import Cause, Device, Finding, Outcome, Part, Run, State, Verdict, Whose
from canaryd.report import gate
from canaryd.store.database import DATABASE
from canaryd.store.locks import Flag
from canaryd.store.notes import DAEMON_LOCK
from canaryd.store.store import Store
from tests.command import ROOT, canaryd, children, environment, in_turn

GPU = Device(uuid="GPU-3", backend="cuda", index=3, model="NVIDIA H200")
OTHER = Device(uuid="GPU-4", backend="cuda", index=4, model="NVIDIA H200")
SLICE = Device(uuid="MIG-1", backend="cuda", index=3, model="NVIDIA H200", parent=GPU.uuid, detail={"instance": "1"})
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
SERVER = Device(uuid="endpoint:main", backend="endpoint", index=0, model="a server")
SCHEMA = json.loads((ROOT / "docs/gate.schema.json").read_text())
ASKED = """
import contextlib, io, json, os, sys
from canaryd.cli.main import main
for line in sys.stdin:
    words, extra = json.loads(line)
    os.environ.update(extra)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["gate", *words])
    for name in extra:
        del os.environ[name]
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
"""The command again and again in one process: a start for each of many questions would cost a minute."""


@pytest.fixture(scope="module", autouse=True)
def asked():
    """A process that asks the gate."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ASKED], cwd=ROOT, env=environment(), **pipes) as process:
        ask.process = process
        yield
        process.stdin.close()


@pytest.fixture
def acting(tmp_path):
    """A configuration under which enforcement acts."""
    path = tmp_path / "canaryd.yaml"
    path.write_text("enforcement: act\n")
    return path


def told(state, *verdicts, runs=()):
    """Store devices with a verdict each: (device, state, cause)."""
    now = time.time()
    with Store.open(state) as store:
        for device, what, cause in verdicts:
            found = () if what is State.HEALTHY else (Finding(rule="a-rule", state=what, cause=cause, message="a row"),)
            store.see_device(device, now)
            told = {"device": device.uuid, "state": what, "cause": cause, "findings": found}
            assert store.set_verdict(Verdict(**told, decided=now, since=now))
        for run in runs:
            assert store.add_run(run)


def ask(state, config, *options, **extra):
    """Ask in text and in JSON; return the decision, the exit status and the line."""

    def answer(*words):
        given = ["--config", str(config), "--state-dir", str(state), *words, *options]
        ask.process.stdin.write(json.dumps([given, extra]) + "\n")
        ask.process.stdin.flush()
        return json.loads(ask.process.stdout.readline())

    code, line, complaint = answer()
    status, text, _ = answer("--json")
    document = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert (code, complaint) == (status, "")
    assert document["exit_code"] == code
    assert line.count("\n") == 1
    return document["decision"], code, line.strip()


FAULTY = (GPU, State.FAULTY, Cause.HARDWARE)
FINE = (CPU, State.HEALTHY, Cause.NONE)


def test_a_healthy_node_passes(state, acting):
    """And the line says of how many devices that is said."""
    told(state, FINE, (GPU, State.HEALTHY, Cause.NONE))
    assert ask(state, acting) == ("pass", 0, "pass: 2 devices, none of them faulty")


def test_a_faulty_device_fails_with_its_name_its_cause_and_why(state, acting):
    """One line, the worst device first."""
    told(state, FINE, FAULTY, (OTHER, State.FAULTY, Cause.UNDETERMINED))
    assert ask(state, acting) == ("fail", 2, "fail: cuda:3 faulty (hardware): a row (and cuda:4)")


def test_what_several_devices_share_is_the_subject(state, acting):
    """So that nobody drains and returns each device for itself."""
    shared_by = (GPU.name, OTHER.name)
    found = Finding(rule="gpu-lost", state=State.FAULTY, cause=Cause.UNDETERMINED, message="It was lost.")
    found = replace(found, subject=Whose.SHARED, parts=(Part.SUPPLY,), shared_by=shared_by, reach=shared_by)
    told(state, FINE, FAULTY, (OTHER, State.FAULTY, Cause.UNDETERMINED))
    with Store.open(state) as store:
        for verdict in store.verdicts().values():
            if verdict.state is State.FAULTY:
                store.set_verdict(replace(verdict, cause=Cause.UNDETERMINED, findings=(found,)))
    assert ask(state, acting)[2] == (
        "fail: cuda:3 faulty (cause unknown): It was lost; this points to what cuda:3 and cuda:4 share, not to one"
        " device (and cuda:4)"
    )


def test_a_daemon_that_cannot_store_makes_it_unknown(state, acting):
    """What is stored may be older than what the daemon knows; an alarm stands."""
    told(state, FINE)
    flag = Flag(state)
    flag.fly(True)
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("unknown", 3)
    assert "cannot store" in line
    flag.fly(False)
    assert ask(state, acting)[0] == "pass"
    told(state, FAULTY)
    flag.fly(True)
    assert ask(state, acting)[0] == "fail"
    flag.fly(False)


def test_by_default_it_only_says_what_it_would_do(state, tmp_path):
    """Without a word in the configuration, or with `log`, the exit status is 0 whatever was found."""
    told(state, FAULTY)
    for text in ("{}", "enforcement: log"):
        (tmp_path / "quiet.yaml").write_text(text)
        decision, code, line = ask(state, tmp_path / "quiet.yaml")
        assert (decision, code) == ("fail", 0)
        assert line.startswith("would fail: cuda:3 faulty (hardware): a row [exit 0, log only: enforcement is log (")


def test_one_file_silences(state, acting):
    """Empty or not, and beside the configuration: any configuration management and any ConfigMap can put it there."""
    told(state, FAULTY)
    switch = acting.parent / gate.SWITCH.name
    switch.touch()
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("fail", 0)
    assert f"[exit 0, log only: {switch} exists]" in line
    switch.unlink()
    switch.symlink_to("nowhere")  # as a ConfigMap that is being replaced
    assert ask(state, acting)[1] == 0
    switch.unlink()
    assert ask(state, acting)[1] == 2


def test_a_switch_that_cannot_be_looked_at_silences(acting):
    """It is not taken for one that is off."""
    long = Config(enforcement="act", file=acting.parent / ("x" * 300) / "canaryd.yaml")
    assert "cannot be checked: File name too long" in gate.silenced(long, {})
    assert gate.silenced(replace(long, file=acting), {}) == ""


@pytest.mark.parametrize("word", ["log", "", "off", "ACT"])
def test_one_variable_silences(state, acting, word):
    """Any value but "act"; what is misspelt does not act."""
    told(state, FAULTY)
    decision, code, line = ask(state, acting, CANARYD_ENFORCEMENT=word)
    assert (decision, code) == ("fail", 0)
    assert f"[exit 0, log only: CANARYD_ENFORCEMENT={word} in the environment]" in line


def test_the_variable_cannot_turn_it_on(state, tmp_path):
    """Only the configuration can: who sets the environment of a job must not drain a node."""
    told(state, FAULTY)
    (tmp_path / "canaryd.yaml").write_text("{}")
    assert ask(state, tmp_path / "canaryd.yaml", CANARYD_ENFORCEMENT="act")[1] == 0


@pytest.mark.parametrize(("cause", "words"), [(Cause.SOFTWARE, "software"), (Cause.HARNESS, "canaryd itself")])
def test_wrong_software_drains_no_fleet(state, acting, cause, words):
    """It would be every node at once; it is told, and acts where it is asked for."""
    told(state, FINE, (GPU, State.FAULTY, cause))
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("pass", 0)
    assert f"cuda:3 faulty ({words}): passes: {words} is not among the causes to fail for" in line
    assert ask(state, acting, "--cause", "hardware", "--cause", cause.value)[:2] == ("fail", 2)


@pytest.mark.parametrize(
    ("on", "fails"),
    [
        ((), "faulty"),
        (("faulty",), "faulty"),
        (("suspect",), "suspect faulty"),
        (("degraded",), "degraded suspect faulty"),
        (("unknown",), "unknown suspect faulty"),
        (("degraded", "unknown"), "degraded unknown suspect faulty"),
    ],
)
def test_on_is_this_and_worse_and_unknown_only_by_name(on, fails):
    """`--on degraded` must not drain a fleet whose daemons were stopped."""
    question = gate.Question(on=tuple(State(s) for s in on) or gate.Question().on)
    document = gate.as_json(gate.Answer(decision="pass"), question, "")
    assert " ".join(document["on"]) == fails


def test_a_suspect_device_fails_where_that_is_asked_for(state, acting):
    """And not otherwise."""
    told(state, (GPU, State.SUSPECT, Cause.UNDETERMINED))
    assert ask(state, acting)[:2] == ("pass", 0)
    assert ask(state, acting, "--on", "suspect")[:2] == ("fail", 2)


def test_an_acknowledged_suspicion_is_unknown(state, acting):
    """As everywhere else: known to the operator, and not healthy."""
    told(state, (GPU, State.UNKNOWN, Cause.UNDETERMINED))
    with Store.open(state) as store:
        (verdict,) = store.verdicts().values()
        findings = tuple(replace(f, acknowledged=True) for f in verdict.findings)
        assert store.set_verdict(replace(verdict, findings=findings))
    assert ask(state, acting, "--on", "suspect")[:2] == ("unknown", 3)


# --- What is not known never acts -------------------------------------------------------------------------------------


def test_no_store_is_unknown_and_nothing_is_made(state, acting):
    """Not even the directory: the question may come from a node that has no canaryd yet."""
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("unknown", 3)
    assert f"{state / DATABASE}: No such file or directory; start the daemon (canaryd run --config {acting}" in line
    assert not state.exists()


def test_a_stopped_daemon_is_unknown(state, acting):
    """A healthy verdict that nobody has renewed says nothing; an alarm that it left stands."""
    told(state, FINE, (GPU, State.HEALTHY, Cause.NONE))
    with Store.open(state) as store:
        for verdict in store.verdicts().values():
            assert store.set_verdict(replace(verdict, decided=time.time() - 7200))
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("unknown", 3)
    assert "The last verdict is 2 hours old" in line
    assert line.endswith("[unknown: exit 3, not fail]")
    assert ask(state, acting, "--on", "unknown")[:2] == ("fail", 2)
    told(state, FAULTY)
    with Store.open(state) as store:
        assert store.set_verdict(replace(store.verdicts()[GPU.uuid], decided=time.time() - 7200))
    assert ask(state, acting)[:2] == ("fail", 2)


@pytest.mark.parametrize("content", [b"", b"rubbish" * 4096])
def test_a_damaged_store_is_unknown_and_left_as_it_is(state, acting, content):
    """To set it aside is the daemon's business."""
    state.mkdir()
    (state / DATABASE).write_bytes(content)
    decision, code, _ = ask(state, acting)
    assert (decision, code) == ("unknown", 3)
    assert (state / DATABASE).read_bytes() == content
    assert [p.name for p in state.iterdir() if "corrupt" in p.name] == []


def test_a_store_of_a_newer_canaryd_is_unknown(state, acting):
    """Elsewhere that is a usage error; here it would be one of every node in a roll-out."""
    told(state, FAULTY)
    db = sqlite3.connect(state / DATABASE)
    db.execute("PRAGMA user_version = 999")
    db.close()
    decision, code, line = ask(state, acting)
    assert (decision, code) == ("unknown", 3)
    assert "written by a newer canaryd" in line


def test_a_locked_store_is_unknown_in_time(state, acting):
    """Another process keeps it for itself: the answer comes all the same."""
    told(state, FAULTY)
    db = sqlite3.connect(state / DATABASE, isolation_level=None)
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("BEGIN EXCLUSIVE")
    db.execute("DELETE FROM notes")
    begun = time.monotonic()
    answer = canaryd("gate", "--config", acting, "--state-dir", state)
    assert time.monotonic() - begun < gate.PATIENCE + 20  # it takes 5 s; a start of Python on a busy machine the rest
    assert (answer.code, answer.out.partition(":")[0]) == (3, "unknown")
    db.execute("ROLLBACK")
    db.close()


@pytest.fixture
def hanging(state):
    """Return a state directory with a database that nobody can open for 45 seconds, because it is leased (fcntl(2))."""
    state.mkdir()
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for it back
    with (state / DATABASE).open("w") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield state
    signal.signal(signal.SIGIO, before)


def test_a_disk_that_hangs_does_not_hang_the_answer(hanging, acting):
    """A file that does not open stands in for it: the reader is abandoned, and so is its hold on our output."""
    answer = canaryd("gate", "--config", acting, "--state-dir", hanging, timeout=gate.PATIENCE + 50)
    assert answer.code == 3
    assert answer.out == "unknown: the database did not answer within 5 s [unknown: exit 3, not fail]\n"


THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
"""Threads of a test hold nothing that the reader takes; the command has none."""


@THREADS
def test_silence_is_a_failure_where_unknown_was_named(hanging):
    """Whatever it was that could not be known."""
    before = children()
    strict = gate.Question(on=(State.UNKNOWN,))
    answer = gate.ask(Config(state_dir=hanging), strict, patience=0.2)
    assert (answer.decision, answer.reason) == ("fail", "the database did not answer within 0.2 s")
    assert children() == before


@THREADS
def test_a_reader_that_fails_is_unknown():
    """Whatever happens to it: an exception, or death."""

    def failing():
        raise OSError("boom")

    assert "OSError: boom" in gate._within(60, failing).reason
    assert "the process that reads it died" in gate._within(60, lambda: os.kill(os.getpid(), 9)).reason


def test_a_configuration_that_cannot_be_read_is_a_usage_error(state, tmp_path):
    """64, which no script of ours takes for a reason to drain."""
    (tmp_path / "bad.yaml").write_text("enforcement: perhaps")
    answer = canaryd("gate", "--config", tmp_path / "bad.yaml", "--state-dir", state)
    assert answer.code == 64
    assert '"perhaps" is not a way to enforce; write one of log, act' in answer.err


def test_no_test_for_too_long_is_unknown(state, acting):
    """`--max-age` asks for evidence of its own; a poll of telemetry and a run that failed are none."""
    old = time.time() - 7200
    run = Run(
        id="1-1", device=GPU.uuid, probe="p", probe_version=1, started=old, seconds=1.0, outcome=Outcome.COMPLETED
    )
    failed = replace(run, id="2-2", started=old + 7000, outcome=Outcome.ERRORED)
    told(state, (GPU, State.HEALTHY, Cause.NONE), runs=(run, failed))
    assert ask(state, acting, "--max-age", "3h")[:2] == ("pass", 0)
    decision, code, line = ask(state, acting, "--max-age", "1h")
    assert (decision, code) == ("unknown", 3)
    assert "the newest test is 2 hours old" in line
    assert ask(state, acting, "--max-age", "1h", "--on", "unknown")[:2] == ("fail", 2)


@pytest.mark.parametrize(("ahead", "decision"), [(300.0, "pass"), (300 * 86_400.0, "unknown")])
def test_a_test_that_is_dated_in_the_future_has_no_age(state, acting, ahead, decision):
    """A clock that is minutes wrong changes nothing; after one that was set back nobody knows how old it is."""
    run = Run(
        id="1-1",
        device=GPU.uuid,
        probe="p",
        probe_version=1,
        started=time.time() + ahead,
        seconds=1.0,
        outcome=Outcome.COMPLETED,
    )
    told(state, (GPU, State.HEALTHY, Cause.NONE), runs=(run,))
    assert ask(state, acting, "--max-age", "1h")[0] == decision
    with Store.open(state) as store:
        store.add_run(replace(run, id="2-2", started=time.time()))
    assert ask(state, acting, "--max-age", "1h")[0] == "pass"


# --- Only some devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "decision"),
    [
        ("GPU-3", "fail"),
        ("cuda:3", "fail"),
        ("3", "fail"),
        ("4,3", "fail"),
        ("cuda", "fail"),
        ("MIG-1", "fail"),
        ("4", "pass"),
        ("cpu:0", "pass"),
        ("endpoint:main", "pass"),
        ("3,cuda:9", "fail"),
    ],
)
def test_only_the_devices_of_a_job(state, acting, words, decision):
    """By uuid, name, backend or an accelerator's index; an instance is as good as the device that it is part of."""
    healthy = [(d, State.HEALTHY, Cause.NONE) for d in (OTHER, SLICE, CPU, SERVER)]
    told(state, FAULTY, *healthy)
    acting.write_text('{enforcement: act, endpoints: {main: {url: "http://127.0.0.1:8000/v1"}}}')
    assert ask(state, acting, "--device", words)[0] == decision


def test_a_whole_device_is_no_better_than_its_instance(state, acting):
    """Whoever asks for the device is told of the instance."""
    told(state, (GPU, State.HEALTHY, Cause.NONE), (SLICE, State.FAULTY, Cause.HARDWARE))
    assert ask(state, acting, "--device", GPU.uuid)[2].startswith("fail: cuda:3.1 faulty (hardware)")


def test_a_device_that_this_node_does_not_have_is_unknown(state, acting):
    """One that vanished or never was: with the names that there are; a faulty device fails all the same."""
    told(state, FINE, (OTHER, State.HEALTHY, Cause.NONE))
    with Store.open(state) as store:
        assert store.set_present({CPU.uuid}, time.time())
    acting.write_text("enforcement: act\ndevices: {absent: [GPU-4]}\n")
    for word in ("GPU-4", "cuda:4", "cuda:9", "99", "GPU-9", "rocm"):
        decision, code, line = ask(state, acting, "--device", word)[:3]
        assert (decision, code) == ("unknown", 3), word
        assert re.match(f"unknown: no device {word}; this host has .*cpu:0", line)
    assert ask(state, acting, "--device", "cuda:9", "--on", "unknown")[:2] == ("fail", 2)
    (none,) = in_turn(("gate", "--device", ",", "--config", acting, "--state-dir", state))
    assert (none.code, none.out) == (64, "")
    told(state, FAULTY)
    assert ask(state, acting, "--device", "3,cuda:9")[0] == "fail"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("silence", ["", "enforcement is log in /etc/canaryd/canaryd.yaml"])
def test_on_a_terminal_the_line_fits(width, silence):
    """The decision and whether it acts are never cut, and --json has everything; a pipe gets the whole line."""
    item = gate.Item(
        device="GPU-1",
        name="cuda:3",
        state=State.FAULTY,
        cause=Cause.HARDWARE,
        finding="wrong results " * 20,
        decision="fail",
    )
    told = gate.Answer(decision="fail", devices=(item,))
    line = gate.as_text(told, gate.Question(), silence, width)
    assert width - len("results ") <= len(line) <= width
    assert line.partition("…")[0].endswith((" wrong", " results")), "it ends after a word"
    assert line.startswith("would fail: cuda:3 faulty (hardware): " if silence else "fail: cuda:3 faulty (hardware): ")
    assert line.endswith("… [exit 0, log only]" if silence else "…")
    assert len(gate.as_text(told, gate.Question(), silence)) > 280
    assert len(gate.as_text(replace(told, devices=(replace(item, finding=""),)), gate.Question(), silence, 79)) < 80


# --- Beside the daemon ------------------------------------------------------------------------------------------------


def test_it_waits_for_no_writer_and_leaves_no_trace(state, acting):
    """With the locks held and a transaction open it answers from what is stored; no file is made or changed."""
    told(state, FAULTY)
    with Store.open(state) as store, store.lock(DAEMON_LOCK):
        db = sqlite3.connect(state / DATABASE, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        before = sorted((p.name, p.stat().st_mtime_ns) for p in state.rglob("*") if not p.name.endswith("-shm"))
        assert ask(state, acting)[:2] == ("fail", 2)
        after = sorted((p.name, p.stat().st_mtime_ns) for p in state.rglob("*") if not p.name.endswith("-shm"))
        assert before == after
        db.execute("ROLLBACK")
        db.close()


def test_nothing_that_a_device_calls_itself_breaks_the_line(state, acting):
    """It becomes a reason in Slurm and a message in Kubernetes."""
    now = time.time()
    with Store.open(state) as store:
        store.see_device(GPU, now)
        found = Finding(rule="r", state=State.FAULTY, cause=Cause.HARDWARE, message='a\n"row"\x1b[31m')
        told = {"device": GPU.uuid, "state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (found,)}
        store.set_verdict(Verdict(**told, decided=now, since=now))
    assert ask(state, acting)[2] == 'fail: cuda:3 faulty (hardware): a "row"?[31m'
