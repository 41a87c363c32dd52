"""`canaryd check` and `canaryd drill`: verdicts, documents, interruptions, and two of them at once."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from canaryd.model import Device, Outcome, State
from canaryd.store.store import Store
from tests.command import (
    PATIENCE,
    ROOT,
    Answer,
    Process,
    bare_python,
    canaryd,
    catalogue,
    configure,
    eventually,
    in_turn,
    intervals,
    running,
    soon,
)

SCHEMA = json.loads((ROOT / "docs/check.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def valid(document: Any) -> Any:
    VALIDATOR.validate(document)
    return document


def again(repro: str, *more: object, **extra: str):
    """Run a printed command as a shell would."""
    program, *arguments = shlex.split(repro)
    assert program == "canaryd"
    return canaryd(*arguments, *more, **extra)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """One real quick check of this machine: (answer, document)."""
    directory = tmp_path_factory.mktemp("real")
    (directory / "empty.yaml").touch()
    report = directory / "report.json"
    common = ("--config", directory / "empty.yaml", "--state-dir", directory / "state")
    # One round, however busy this machine is: below the least number of results a check of a level takes its time.
    once = ("--level", "quick", "--for", "0.1s")
    return canaryd("check", "-v", *once, "--report", report, *common), json.loads(report.read_text())


@pytest.fixture(scope="module")
def drill(tmp_path_factory):
    """One real drill on the processor: (answer, options that it was given beside its own)."""
    directory = tmp_path_factory.mktemp("drill")
    (directory / "empty.yaml").touch()
    common = ("--config", directory / "empty.yaml", "--state-dir", directory / "state")
    options = ("--fault", "flip", "--device", "cpu", "--probe", "exact_integer", "--json")
    return canaryd("drill", *options, *common), common


# --- A sound machine -------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_sound_machine_is_healthy(real):
    """Exit 0, and one verdict per device that rests on comparisons of every probe."""
    answer, document = real
    assert answer.code == 0, answer.out
    valid(document)
    assert (document["state"], document["exit_code"], document["level"]) == ("healthy", 0, "quick")
    for device in document["devices"]:
        assert (device["state"], device["cause"]) == ("healthy", "none")
        assert {"exact_attention", "exact_integer", "exact_matmul"} <= {run["probe"] for run in device["runs"]}
        assert all(run["trials"] > 0 and run["wrong_trials"] == 0 for run in device["runs"])


@pytest.mark.torch
def test_what_was_read_before_and_after_the_tests_is_on_record(real, tmp_path_factory):
    """How warm a device was under test is evidence, though no reading moved enough to be news."""
    _, document = real
    directory = next(tmp_path_factory.getbasetemp().glob("real*"))
    with contextlib.closing(Store.open(directory / "state")) as store:
        for device in document["devices"]:
            if device["backend"] == "cpu":
                started = [run.started for run in store.polls(device["device"], "host_telemetry")]
                tested = [run["started"] for run in device["runs"]]
                assert min(started) < min(tested) <= max(tested) < max(started)


@pytest.mark.torch
def test_standard_output_holds_the_report_and_nothing_else(real):
    """From the first device to the verdict; each device by name and model, with what it computed."""
    answer, document = real
    lines = answer.out.splitlines()
    assert lines[-1].startswith("verdict: HEALTHY  (exit 0, ")
    for line, device in zip(lines[::2], document["devices"], strict=False):
        trials = sum(run["trials"] for run in device["runs"])
        lead = f"HEALTHY  {device['backend']}:{device['index']}  {device['model']}  {trials:,} results, 0 wrong, "
        assert line.startswith(lead[:60])


def test_what_is_gone_is_not_tested_by_what_is_in_its_place(tmp_path):
    """A record that came with a disk from another machine: this processor's results are not those of that one."""
    config, state = configure(tmp_path, "passes"), tmp_path / "state"
    with Store.open(state) as store:
        store.see_device(Device(uuid="CPU-elsewhere", backend="cpu", index=0, model="a processor"), time.time())
    answer = canaryd("check", "--json", "--config", config, "--state-dir", state)
    assert answer.code == 3
    told = {d["device"]: d for d in answer.document["devices"]}
    gone = told.pop("CPU-elsewhere")
    (here,) = told.values()
    assert [f["rule"] for f in gone["findings"] if f["severity"] == "unknown"] == ["device-vanished", "no-evidence"]
    assert (len(gone["runs"]), len(here["runs"]), here["state"]) == (0, 1, "healthy")


@pytest.mark.torch
def test_progress_is_plain_lines_where_nobody_watches(real):
    """One per finished run on standard error, without control characters."""
    answer, document = real
    runs = [run for device in document["devices"] for run in device["runs"]]
    finished = [
        line for line in answer.err.splitlines() if re.search(r"(cpu|cuda|xpu|mps):\d+ \w+.*: completed, ", line)
    ]
    assert len(finished) == len(runs)
    assert "\r" not in answer.err
    assert "\x1b" not in answer.err


@pytest.mark.torch
def test_what_is_clean_says_how_clean(real):
    """The rate that each probe rules out follows from its results: about three over their number."""
    _, document = real
    for device in document["devices"]:
        for probe, bound in device["rules_out"].items():
            trials = sum(run["trials"] for run in device["runs"] if run["probe"] == probe)
            assert bound == pytest.approx(1 - 0.05 ** (1 / trials))


@pytest.mark.torch
def test_everything_left_out_has_a_reason(real):
    """Skipped cases, and what this level does not look at."""
    answer, document = real
    assert document["not_checked"]
    assert all(part["reason"].strip() for device in document["devices"] for part in device["skipped"])
    assert answer.out.count("not tested: ") == len(document["not_checked"])


# --- A fault ---------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_a_drill_ends_with_a_confirmed_alarm(drill):
    """Exit 2; the injected flip is found, repeated in three new workers, and labelled a drill in the document."""
    answer, _ = drill
    assert answer.code == 2, answer.err
    document = valid(answer.document)
    (device,) = document["devices"]
    assert (document["drill"], device["state"]) == ("flip", "faulty")
    end = "drill: the fault was caught; it raises no alert, because no daemon runs on this state directory ("
    assert f"canaryd: {end}" in answer.err
    first, *confirmations = device["runs"]
    assert [run["confirms"] for run in confirmations] == [first["id"]] * 3
    assert all(run["wrong_trials"] > 0 for run in device["runs"])
    assert "exact-mismatch-confirmed" in {finding["rule"] for finding in device["findings"]}


@pytest.mark.torch
def test_the_printed_command_repeats_the_case_with_its_seed(drill):
    """Without the drill's fault, the very same operands come out right."""
    answer, common = drill
    confirmation = answer.document["devices"][0]["runs"][1]
    repeated = again(confirmation["repro"], "--json", *common)
    assert repeated.code == 0, repeated.out
    (run,) = valid(repeated.document)["devices"][0]["runs"]
    assert (run["seed"], run["probe"], run["level"]) == (confirmation["seed"], "exact_integer", "quick")
    assert run["trials"] > 0
    assert run["wrong_trials"] == 0


@pytest.mark.torch
def test_progress_and_report_count_the_same_wrong_results(drill):
    """How many results were wrong is the same in the progress and below it."""
    answer, _ = drill
    progress = sum(int(n.replace(",", "")) for n in re.findall(r"results, ([\d,]+) WRONG", answer.err))
    (incident,) = answer.document["devices"][0]["incidents"]
    (whole,) = re.findall(r"Wrong results in exact_integer: ([\d,]+) of ", incident["text"])
    assert progress == int(whole.replace(",", "")) > 0


@pytest.mark.torch
def test_a_drill_leaves_no_trace_in_the_record(drill):
    """Its runs have a file of their own; real evidence and verdicts know nothing of it."""
    _, common = drill
    with Store.open(Path(common[-1])) as store:
        assert len(store.drills.runs()) == 4
        assert all(not run.wrong for run in store.runs())
        assert all(verdict.state.value != "faulty" for verdict in store.verdicts().values())


def test_a_mismatch_is_reported_with_a_command_that_another_node_can_type(tmp_path):
    """Exit 2, the finding in words, and a command on its own line: it tests the same where the run is not on record."""
    config = configure(tmp_path, "mismatches")
    answer = canaryd("check", "--level", "quick", "--config", config, "--state-dir", tmp_path / "state")
    assert answer.code == 2
    assert answer.out.startswith("FAULTY   cpu:0  ")
    assert answer.out.splitlines()[-1].startswith("verdict: FAULTY  (exit 2, ")
    (repro,) = re.finditer(r"^Do now:  .*(?:\n +.*)?:\n +(canaryd check .*)$", answer.out, re.MULTILINE)
    repeated = again(repro[1], "--json", "--state-dir", tmp_path / "other", CANARYD_CONFIG=str(config))
    assert repeated.code == 2
    with Store.open(tmp_path / "state") as store:
        asked = next(run for run in store.runs() if run.wrong and f"--seed {run.seed} " in repro[1])
    run, *_ = repeated.document["devices"][0]["runs"]
    assert (run["seed"], run["probe"], run["level"]) == (asked.seed, asked.probe, asked.level)
    assert run["wrong_trials"] > 0


@pytest.mark.parametrize("intensity", [pytest.param("", marks=pytest.mark.slow), "repeated"])
def test_a_run_is_repeated_as_it_was(tmp_path, intensity):
    """By the command that it names: its device, seed, level, instruction set and intensity."""
    log, state = tmp_path / "log", tmp_path / "state"
    config = configure(tmp_path, "records", "passes", each={"records": {"settings": {"log": str(log), "wrong": 1}}})
    hard = ("--intensity", intensity) if intensity else ()
    common = ("--config", config, "--state-dir", state, "--json")
    first = canaryd("check", "--level", "quick", "--seed", 7, "--instruction-set", "avx2", *hard, *common)
    (wrong,) = [r for r in first.document["devices"][0]["runs"] if r["wrong_trials"] and not r["confirms"]]
    repeated = again(wrong["repro"], *common)
    with Store.open(state) as store:
        before, (after,) = store.run(wrong["id"]), [store.run(r["id"]) for r in repeated.document["devices"][0]["runs"]]
    for name in ("device", "probe", "seed", "level", "instruction_set", "intensity"):
        assert getattr(after, name) == getattr(before, name), name
    assert (before.seed, before.level, before.intensity) == (7, "quick", intensity)
    assert (repeated.code, after.wrong) == (2, ()), "it was right this time, and the record still accuses"


def test_a_repetition_on_a_clean_device_does_not_acquit_it(tmp_path):
    """The record is shared: the next check says what the last one found."""
    once = {"records": {"settings": {"log": str(tmp_path / "log"), "wrong": 1}}}
    options = ("--config", configure(tmp_path, "records", each=once), "--state-dir", tmp_path / "state", "--json")
    first, second = in_turn(("check", *options), ("check", *options))
    assert first.document["state"] == "suspect"
    assert (second.code, second.document["state"]) == (2, "suspect")
    assert all(run["wrong_trials"] == 0 for run in second.document["devices"][0]["runs"])


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stuck-at-0", "Wrong memory (stuck cells) in memory_sweep"),
        ("transfer", "Wrong memory (wrong transfers) in memory_sweep"),
    ],
)
def test_a_drill_of_memory_says_memory(tmp_path, fault, said):
    """The alarm arrives, and its words tell a cell from a transfer; a fault of memory needs no probe to be named.

    The drill says that this is its success, and asks for nothing.
    """
    settings = {"probes": {"memory_sweep": {"settings": {"mebibytes": 1}}}}
    (tmp_path / "canaryd.yaml").write_text(json.dumps(settings))
    common = ("--config", tmp_path / "canaryd.yaml", "--state-dir", tmp_path / "state")
    answer = canaryd("drill", "--fault", fault, "--device", "cpu:0", *common)
    assert answer.code == 2, answer.out
    told = " ".join(answer.out.split())
    assert said in told
    assert "The injected fault was caught, as it must be" in told
    assert "Do now" not in told
    assert ("Cause: hardware" in told) == (fault == "stuck-at-0")


# --- No evidence -----------------------------------------------------------------------------------------------------


def test_without_torch_a_device_is_unknown(tmp_path):
    """Exit 3; every exact probe is listed as skipped with the reason, and the problem is named."""
    config = tmp_path / "canaryd.yaml"
    config.write_text(json.dumps({"worker": {"python": bare_python()}}))
    answer = canaryd("check", "--level", "quick", "--json", "--config", config, "--state-dir", tmp_path / "state")
    assert answer.code == 3
    document = valid(answer.document)
    (device,) = document["devices"]
    assert device["state"] == "unknown"
    assert {run["outcome"] for run in device["runs"]} == {"skipped"}
    reasons = {part["probe"]: part["reason"] for part in device["skipped"]}
    assert reasons.keys() == {run["probe"] for run in device["runs"]}
    assert reasons.keys() >= {
        *("exact_attention", "exact_canary", "exact_integer", "exact_matmul"),
        *("exact_units", "memory_sweep", "recorded_kernels"),
    }
    assert all("torch" in reason for reason in reasons.values())
    assert any("cannot import torch" in problem for problem in document["problems"])


def test_a_torch_that_aborts_is_told_once(tmp_path):
    """One line with the interpreter's name, exit 3, also for a probe or device that only torch could show."""
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    worker = {"python": bare_python(), "env": {"PYTHONPATH": str(tmp_path)}}
    each = {name: {"enabled": True} for name in ("exact_matmul", "exact_attention")}
    config = configure(tmp_path, "passes", each=each, worker=worker)
    common = ("--config", config, "--state-dir", tmp_path / "state")
    asked = (("--probe", "exact_matmul"), ("--device", "cuda:0"), ("--probe", "nonsense", "--device", "cpu:0"))
    answer, told, *others, last = in_turn(*(("check", *more, *common) for more in ((), ("--json",), *asked)))
    assert answer.code == 3
    assert answer.out.count("SIGABRT") == 1, answer.out
    assert bare_python() in "".join(answer.out.split())
    assert len((answer.out + answer.err).splitlines()) < 30
    document = valid(told.document)
    assert [text for text in document["problems"] if bare_python() in text] == document["problems"]
    assert len(document["problems"]) == 1
    assert [f["message"] for f in document["devices"][0]["findings"] if bare_python() in f["message"]]
    for answer in others:
        assert (answer.code, answer.out) == (3, "")
        assert "could not be loaded" in answer.err or "no such device" in answer.err
        assert answer.err.count("SIGABRT") == 1
    assert last.code == 3


def test_what_did_not_complete_is_unknown(tmp_path):
    """Exit 3 with a finding that says what happened."""
    outcomes = {"crashes": Outcome.CRASHED, "raises": Outcome.ERRORED, "skips": Outcome.SKIPPED}
    common = ("--config", configure(tmp_path, *outcomes))
    typed = [("check", "--json", "--probe", name, "--state-dir", tmp_path / name, *common) for name in outcomes]
    for (probe, outcome), answer in zip(outcomes.items(), in_turn(*typed), strict=True):
        assert answer.code == 3
        (device,) = valid(answer.document)["devices"]
        assert [run["outcome"] for run in device["runs"]] == [outcome.value]
        assert probe in {finding["probe"] for finding in device["findings"]}


def test_an_unwritable_state_directory_costs_the_record_only(tmp_path):
    """The check runs, judges, and says that nothing of it is kept, why, and what to do; nothing waits after its end."""
    (tmp_path / "file").touch()
    config = configure(tmp_path, "passes")
    common = ("--config", config, "--state-dir", tmp_path / "file/state")
    answer, told = in_turn(("check", *common), ("check", "--json", *common))
    assert answer.code == 0
    remedy = "use sudo" if os.geteuid() else "make it writable"
    why = f"what this check found is not kept: {tmp_path}/file/state/canaryd.db: Not a directory; {remedy},"
    assert f"problem: {why}".replace(" ", "") in "".join(answer.out.split())
    assert f"{why} or name another directory with --state-dir" in valid(told.document)["problems"]
    assert "waiting in memory" not in answer.out + told.out


def test_a_device_that_cannot_be_had_is_unknown(tmp_path):
    """Whatever it was yesterday: a check that examined nothing reports no health."""
    options = ("--config", configure(tmp_path, "passes"), "--state-dir", tmp_path / "state", "--json")
    before = canaryd("check", *options)
    assert before.code == 0
    with Store.open(tmp_path / "state") as store, store.lock(before.document["devices"][0]["device"]):
        answer = canaryd("check", "--wait", "0.2s", *options)
    assert answer.code == 3
    (device,) = valid(answer.document)["devices"]
    assert (device["state"], device["runs"]) == ("unknown", [])
    assert f"pid {os.getpid()}" in device["skipped"][0]["reason"]
    assert "waiting: " in answer.err


# --- Interrupted, waiting, watched -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("past", "number"),
    [
        pytest.param(False, signal.SIGINT, id="first-SIGINT", marks=pytest.mark.slow),
        pytest.param(True, signal.SIGTERM, id="after a clean check-SIGTERM"),
        pytest.param(False, signal.SIGTERM, id="first-SIGTERM", marks=pytest.mark.slow),
        pytest.param(True, signal.SIGINT, id="after a clean check-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_check_is_unknown_and_leaves_nothing_behind(tmp_path, number, past):
    """Within five seconds, exit 3, "interrupted" in the report, no worker left, even one that ignores SIGTERM."""
    log, state = tmp_path / "log", tmp_path / "state"
    if past:
        config = configure(tmp_path, "records")
        assert canaryd("check", "--config", config, "--state-dir", state).code == 0
    hangs = {"records": {"settings": {"log": str(log), "seconds": 600, "stubborn": True}}}
    config = configure(tmp_path, "records", each=hangs)
    with running(Process("check", "--for", "30m", "--config", config, "--state-dir", state)) as process:
        eventually(lambda: log.exists() and log.read_text())
        code, seconds = process.end(number)
        assert (code, process.others()) == (3, [])
        assert seconds < soon(5)
        out = process.popen.stdout.read()
    who = "you interrupted the check" if number is signal.SIGINT else "SIGTERM ended the check"
    assert f"{who}; 0 of 1 test had ended (0 results, 0 wrong). Do now: Run it again: canaryd check" in " ".join(
        out.split()
    )
    assert out.count(who) == out.count("UNKNOWN  cpu:0") == 1
    assert "--device cpu:0 --for 1800s" in out
    assert "(environment)" not in out
    assert "Traceback" not in "".join(process.lines)


def test_a_check_that_compared_nothing_is_unknown(tmp_path):
    """Readings that nothing judges say nothing about the device, however many there are."""
    config = configure(tmp_path, "echoes")
    answer = canaryd("check", "--level", "quick", "--config", config, "--state-dir", tmp_path / "state")
    assert answer.code == 3
    assert "echoes completed but checked nothing" in (text := " ".join(answer.out.split()))
    assert re.search("To see why, test it alone: canaryd check .*--probe echoes --device cpu:0 -v", text)
    assert "HEALTHY" not in answer.out


def test_an_interrupted_drill_says_nothing_of_its_alarm(tmp_path):
    """The fault was never seen by a run that ended: exit 3, and the interruption is the reason."""
    log = tmp_path / "log"
    config = configure(tmp_path, "records", each={"records": {"settings": {"log": str(log), "seconds": 600}}})
    options = ("--probe", "records", "--config", config, "--state-dir", tmp_path / "state")
    with running(Process("drill", *options)) as process:
        eventually(log.exists)
        assert process.end(signal.SIGINT)[0] == 3
        assert "you interrupted the drill; 0 of 1 test" in process.popen.stdout.read()
        assert not any("no alarm" in line for line in process.lines), process.lines


def test_two_checks_never_use_a_device_at_once(tmp_path):
    """The second waits for the first, says for whom, and then runs."""
    log, enough = tmp_path / "log", tmp_path / "enough"
    slow = {"records": {"settings": {"log": str(log), "until": str(enough)}}}
    options = ("--config", configure(tmp_path, "records", each=slow), "--state-dir", tmp_path / "state")
    with running(Process("check", *options)) as first:
        eventually(lambda: log.exists() and log.read_text())
        with running(Process("check", *options)) as second:
            waiting = second.line("waiting: ")
            enough.touch()
            assert first.popen.wait(PATIENCE) == second.popen.wait(PATIENCE) == 0
        assert f"waiting: pid {first.popen.pid}: " in waiting
        # A budget of 0.1 s and a time-out of 60 s.
        assert ", testing cpu:0 (records) for at most 61 s; this command gives up after 10 minutes (--wait)" in waiting
    (_, end), (begin, _) = intervals(log)
    assert begin >= end


def test_an_interrupt_ends_the_wait_for_a_device(tmp_path):
    """Ctrl-C does not have to wait for whoever holds the device."""
    log, state = tmp_path / "log", tmp_path / "state"
    slow = {"records": {"settings": {"log": str(log), "seconds": 600}}}
    options = ("--config", configure(tmp_path, "records", each=slow), "--state-dir", state)
    with running(Process("check", *options)) as first:
        eventually(lambda: log.exists() and log.read_text())
        with running(Process("check", *options)) as second:
            second.line("waiting: ")
            code, seconds = second.end(signal.SIGINT)
            assert (code, seconds < soon(5)) == (3, True)
            assert "you interrupted the check" in second.popen.stdout.read()
        assert first.popen.poll() is None


def test_an_interrupt_while_devices_are_sought_is_no_usage_error(tmp_path):
    """Nothing is known yet about the device that was asked for: exit 3, not 64."""
    options = (
        "--device",
        "cpu:0",
        "--config",
        configure(tmp_path, "hangs_at_import"),
        "--state-dir",
        tmp_path / "state",
    )
    with running(Process("check", *options)) as process:
        eventually(process.others)
        time.sleep(0.3)
        code, seconds = process.end(signal.SIGINT)
        assert (code, process.others()) == (3, [])
        assert seconds < soon(5)
        assert "you interrupted the check" in process.popen.stdout.read()


def test_an_interrupt_while_probes_are_sought_changes_no_verdict(tmp_path):
    """A check that has not looked yet judges nothing: the daemon's verdict stays."""
    config = configure(tmp_path, "passes")
    options = ("--config", config, "--state-dir", tmp_path / "state")
    assert canaryd("check", *options).code == 0
    catalogue(tmp_path / "probes.d", "hangs_at_import")
    with running(Process("check", *options)) as process:
        eventually(process.others)
        time.sleep(0.3)
        assert process.end(signal.SIGINT)[0] == 3
    with Store.open(tmp_path / "state") as store:
        (verdict,) = store.verdicts().values()
    assert verdict.state is State.HEALTHY


def test_a_terminal_shows_one_moving_line(tmp_path):
    """It is overwritten in place, and the line of a finished run stays."""
    config = configure(tmp_path, "reports_progress")
    watcher, terminal = pty.openpty()
    try:
        options = ("--config", config, "--state-dir", tmp_path / "state")
        with running(Process("check", "--level", "quick", *options, stderr=terminal)) as process:
            os.close(terminal)
            seen = b""
            while True:
                try:
                    data = os.read(watcher, 4096)
                except OSError:  # Linux says so when the last writer has closed
                    break
                if not data:
                    break
                seen += data
            assert process.popen.wait(PATIENCE) == 0
    finally:
        os.close(watcher)
    bars = re.findall(rb"\r\[(#*)(\.*)\] part 1 of 1[^:]*: cpu:0 reports_progress", seen)
    assert all(len(done) + len(left) == 10 for done, left in bars)
    assert len({len(done) for done, _ in bars}) > 3
    assert re.search(rb"\rcpu:0 reports_progress: completed, .*\r\n", seen)


def test_a_check_repeats_rounds_for_as_long_as_it_is_told(tmp_path):
    """Each round with a seed of its own."""
    slow = {"records": {"settings": {"seconds": 0.2}}}
    options = ("--config", configure(tmp_path, "records", each=slow), "--state-dir", tmp_path / "state")
    begun = time.monotonic()
    document = canaryd("check", "--for", "5s", "--json", *options).document
    assert 5 <= document["seconds"] < time.monotonic() - begun
    seeds = {run["seed"] for run in document["devices"][0]["runs"]}
    assert len(seeds) > 2


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """One check by one light probe, without telemetry: (answer, text of the report file)."""
    directory = tmp_path_factory.mktemp("light")
    config = configure(directory, "passes")
    (directory / "kernel.log").unlink()
    options = ("--report", directory / "report.json", "--config", config, "--state-dir", directory / "state")
    answer = canaryd("check", "--json", *options)
    return answer, (directory / "report.json").read_text()


def test_the_report_file_holds_the_object(light):
    """The same as --json prints, byte for byte."""
    answer, report = light
    assert report == answer.out


def test_a_disabled_probe_is_listed_with_its_reason(light):
    """Disabled is not OK, and not forgotten."""
    (device,) = valid(light[0].document)["devices"]
    reasons = {part["probe"]: part["reason"] for part in device["skipped"] if part["case"] == "*"}
    assert reasons["exact_matmul"] == "disabled in the configuration"


# --- The schema ------------------------------------------------------------------------------------------------------


def test_the_schema_refuses_what_is_not_a_report(tmp_path):
    """A missing field, an unknown one, a state that does not exist, an empty reason: at every depth."""
    said = tmp_path / "said.json"
    said.write_text('{"readings": [["temperature_celsius", 40, {"sensor": "core"}]], "absent": {"fan_rpm": "no fan"}}')
    config = configure(tmp_path, "mismatches", "passes", "says", each={"says": {"settings": {"file": str(said)}}})
    (tmp_path / "kernel.log").write_text("4,1,1000000,-;CPU0: Core temperature above threshold, cpu clock throttled\n")
    options = ("--config", config, "--state-dir", tmp_path / "state")
    good = valid(canaryd("check", "--json", *options).document)

    def places(value: Any, path: tuple = ()):
        if isinstance(value, dict):
            yield path
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, (dict, list)):
                yield from places(inner, (*path, key))

    def at(document: Any, path: tuple) -> Any:
        for key in path:
            document = document[key]
        return document

    free = {"rules_out", "telemetry", "labels", "fields", "absent", "probes", "bits_by_type"}
    paths = [path for path in places(good) if not free.intersection(path[-1:])]
    objects = {"devices", "findings", "rivals", "characterised", "runs", "skipped", "telemetry", "readings", "events"}
    objects |= {"incidents", "probes", 0}  # 0: an incident has an object of its retests
    assert {path[-2] for path in paths if len(path) > 1} == objects
    for path in paths:
        for field in at(good, path):
            bad = copy.deepcopy(good)
            del at(bad, path)[field]
            assert not VALIDATOR.is_valid(bad), (path, field)
        bad = copy.deepcopy(good)
        at(bad, path)["surprise"] = 1
        assert not VALIDATOR.is_valid(bad), path
    for path, field, value in (
        ((), "state", "fine"),
        ((), "schema", "canaryd.check/2"),
        (("devices", 0, "skipped", 0), "reason", ""),
        (("devices", 0, "runs", 0), "outcome", "ok"),
        (("devices", 0, "rules_out"), "passes", 0),
        (("devices", 0, "telemetry", "says", "absent"), "fan_rpm", ""),
        (("devices", 0, "telemetry", "says", "readings", 0, "labels"), "sensor", 1),
    ):
        bad = copy.deepcopy(good)
        at(bad, path)[field] = value
        assert not VALIDATOR.is_valid(bad), (path, field)


def test_telemetry_that_is_switched_off_is_told(light):
    """A device that nobody listens to is not checked in that respect, and the report says so; so is an unread log."""
    left_out = light[0].document["not_checked"]
    assert "telemetry: no telemetry probe ran for cpu:0" in left_out
    assert any(text.startswith("kernel log: ") and "kernel.log" in text for text in left_out)


# --- Enough results --------------------------------------------------------------------------------------------------


EXACT = ("exact_attention", "exact_integer", "exact_matmul", "exact_units")


@pytest.fixture
def slow_canaryd(tmp_path):
    """An installed canaryd, whose exact probes give so many results a budget, and take so many seconds for it."""

    def installed(per_budget, seconds=0.0, **others):
        package = tmp_path / "canaryd"
        shutil.copytree(ROOT / "canaryd", package)  # with its byte code: to compile all of it takes seconds
        catalogue(package / "probes.d", *(f"counts:{name}" for name in EXACT), *(f"{p}:{n}" for n, p in others.items()))
        settings = {"per_budget": per_budget, "seconds": seconds}
        (tmp_path / "kernel.log").touch()
        content = {
            "worker": {"python": bare_python()},
            "probes": {name: {"settings": settings} for name in EXACT},
            "telemetry": {"kernel_log": str(tmp_path / "kernel.log")},
        }
        (tmp_path / "canaryd.yaml").write_text(json.dumps(content))

        def typed(command, *options):
            argv = [sys.executable, "-m", "canaryd", command, *options]
            argv += ["--config", tmp_path / "canaryd.yaml", "--state-dir", tmp_path / "state"]
            done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert not done.stderr.count("Traceback"), done.stderr
            return Answer(done.returncode, done.stdout, done.stderr)

        return typed

    return installed


def test_too_few_results_are_unknown(slow_canaryd):
    """A machine so busy that three times the usual time is not enough: exit 3, how many there are, in status too."""
    typed = slow_canaryd(per_budget=1, seconds=0.3)
    answer = typed("check", "--level", "quick", "--json")
    (device,) = valid(answer.document)["devices"]
    told = f"{device['results']} of at least 5,000 results"
    assert (answer.code, answer.document["state"], device["state"]) == (3, "unknown", "unknown")
    assert [f["rule"] for f in device["findings"] if told in f["message"]] == ["too-few-results"]
    assert {run["probe"] for run in device["runs"]} == {*EXACT}
    assert 4 < device["results"] < 100, "it did not try again, or did not end"
    answer = typed("status")
    assert answer.code == 3
    assert told in " ".join(answer.out.split())
    answer = typed("check", "--level", "standard")
    assert answer.code == 3
    assert "of at least 5,000 results" in " ".join(answer.out.split())


def test_a_check_goes_on_until_it_has_enough_results(slow_canaryd):
    """With the probes that give exact results, for as much longer as it takes; then the device is healthy."""
    answer = slow_canaryd(per_budget=500)("check", "--level", "quick", "--json")
    (device,) = valid(answer.document)["devices"]
    assert (answer.code, device["state"], device["results"]) == (0, "healthy", 5000)
    assert [run["trials"] for run in device["runs"] if run["probe"] == "exact_matmul"] == [500, 750]


@pytest.mark.parametrize(
    "options", [("--probe", "exact_matmul"), ("--case", "only"), ("--for", "0.1s")], ids=lambda options: options[0]
)
def test_who_chooses_what_runs_has_no_least_number(slow_canaryd, options):
    """Three results are what was asked for."""
    answer = slow_canaryd(per_budget=3)("check", "--level", "quick", "--json", *options)
    assert answer.code == 0, answer.out
    assert all(run["trials"] == 3 for run in valid(answer.document)["devices"][0]["runs"])


def test_a_part_without_time_is_not_tested(slow_canaryd):
    """It is listed so, everywhere, and makes nobody unknown who gave enough results otherwise."""
    typed = slow_canaryd(per_budget=2000, memory_sweep="runs_late")
    answer = typed("check", "--level", "quick", "--json")
    (device,) = valid(answer.document)["devices"]
    assert (answer.code, device["state"], device["incidents"]) == (0, "healthy", [])
    assert "memory: not tested on cpu:0" in answer.document["not_checked"]
    parts = [part for part in device["skipped"] if part["probe"] == "memory_sweep"]
    assert [(part["case"], part["late"]) for part in parts] == [("only", True)]
    said = " ".join(typed("check", "--level", "quick").out.split())
    assert re.search("were not tested: .*, memory, ", said), said
    assert "memory_sweep: Not tested: its time was over" in said
    answer = typed("status")
    assert answer.code == 0
    assert "memory_sweep: Not tested: its time was over" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("per_budget", "probe", "why"),
    [
        pytest.param(1, "runs_late", "of at least 5,000 results", id="no time, and too few results"),
        pytest.param(2000, "skips_all", "memory_sweep completed but checked nothing", id="another reason"),
    ],
)
def test_a_part_that_checked_nothing_is_unknown(slow_canaryd, per_budget, probe, why):
    """Where time was not what it lacked, or nothing else shows enough."""
    answer = slow_canaryd(per_budget, memory_sweep=probe)("check", "--level", "quick")
    assert answer.code == 3
    assert why in " ".join(answer.out.split())
