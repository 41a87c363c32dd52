"""Workers under another interpreter, and behind a command in another place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from canaryd.model import Outcome
from canaryd.probe import ProbeSpec
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import eventually, soon
from tests.supervisor.workers import PATIENCE, PROBES, gone, pid_in, readings, request, run_once


def test_a_foreign_interpreter_needs_nothing_of_ours(bare_python):
    """A probe runs there, and reaches canaryd.model, canaryd.probe and canaryd.worker alone."""
    said = readings(run_once("echoes", spec=WorkerSpec(python=bare_python)))
    assert said["executable"] == bare_python
    assert str(Path(__file__).parents[2]) not in said["path"].split(os.pathsep)
    assert not any(entry.endswith("worker") for entry in said["path"].split(os.pathsep))
    said = readings(run_once("imports_daemon", spec=WorkerSpec(python=bare_python)))
    assert said.pop("canaryd.worker.runner") == "imported"
    assert "No module named 'yaml'" in said.pop("yaml")
    assert len(said) == 4
    assert all("belongs to the daemon" in message for message in said.values())


def test_the_daemons_modules_are_closed_in_our_own_interpreter_too():
    """Where canaryd is installed a probe reaches no more of it."""
    said = readings(run_once("imports_daemon"))
    assert "belongs to the daemon" in said["canaryd.supervisor.series"]


@pytest.fixture
def elsewhere(bare_python, tmp_path, monkeypatch) -> WorkerSpec:
    """A command in another directory with an interpreter that knows nothing of canaryd."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir("/")
    return WorkerSpec(command=("/usr/bin/env", "-C", "/", bare_python), env={"MINE": "yes"})


def test_a_command_gets_its_code_over_standard_input(elsewhere, bare_python, tmp_path):
    """Code, environment and instruction set travel; nothing is left behind."""
    with Series(elsewhere, instruction_set="avx2") as series:
        run = series.run(request("echoes", settings={"names": ["MINE"]}), PATIENCE)
        said = readings(run)
        assert run.outcome is Outcome.COMPLETED, run.detail
        assert said["executable"] == bare_python
        assert said["file"].startswith(f"{tmp_path}/canaryd-")
        assert (said["MINE"], said["ATEN_CPU_CAPABILITY"]) == ("yes", "avx2")
        assert said["stdin"] == ""
        assert readings(series.run(request("reads_data"), PATIENCE)) == {"golden": "42"}
        assert series.run(request("prints_at_import"), PATIENCE).outcome is Outcome.COMPLETED
        assert series.workers_started == 1
    assert list(tmp_path.iterdir()) == []


def test_probes_of_several_directories_travel(elsewhere, tmp_path):
    """A second directory is sent when the first of its probes is asked for."""
    other = tmp_path / "probes.d"
    other.mkdir()
    (other / "passes.py").write_text((PROBES / "passes.py").read_text())
    with Series(elsewhere) as series:
        described = series.describe([PROBES / "passes.py", other / "passes.py"])
        assert all(isinstance(spec, ProbeSpec) for spec in described.probes.values())
        assert len(described.probes) == 2
        assert series.run(request("passes", probe_path=other / "passes.py"), PATIENCE).outcome is Outcome.COMPLETED
        assert series.run(request("nowhere", probe_path=tmp_path / "nowhere.py"), 5.0).outcome is Outcome.ERRORED


@pytest.mark.parametrize(
    ("name", "outcome", "detail"),
    [
        ("crashes", Outcome.CRASHED, "SIGSEGV"),
        ("exits_early", Outcome.CRASHED, "status 0"),
        ("killed", Outcome.CRASHED, "SIGKILL"),
        ("hangs", Outcome.TIMED_OUT, "hangs.py"),
        ("floods_stdout", Outcome.COMPLETED, ""),
        ("raises", Outcome.ERRORED, "ZeroDivisionError"),
        ("garbles_protocol", Outcome.GARBLED, "{]"),
    ],
)
def test_outcomes_are_the_same_behind_a_command(elsewhere, tmp_path, name, outcome, detail):
    """A crash elsewhere is told from an answer, by signal name, and its files are removed."""
    timeout = soon(2.0) if name == "hangs" else PATIENCE
    # Half a second is too short for six workers on two cores to remove their files.
    run = run_once(name, timeout=timeout, spec=elsewhere, grace=PATIENCE, settings={"how": "json"})
    assert (run.outcome, detail in run.detail) == (outcome, True), run
    assert eventually(lambda: list(tmp_path.iterdir()) == [])


def test_a_killed_command_leaves_no_files(elsewhere, tmp_path):
    """SIGKILL also ends the process that unpacked the worker, and the files are removed all the same."""
    deaf = run_once("hangs_ignoring_sigterm", timeout=soon(3.0), spec=elsewhere)
    assert (deaf.outcome, deaf.readings != ()) == (Outcome.TIMED_OUT, True)
    assert eventually(lambda: list(tmp_path.iterdir()) == [])
    with Series(elsewhere, on_progress=lambda *_: series.kill("a test")) as series:
        run = series.run(request("hangs"), PATIENCE)
    assert (run.outcome, gone(pid_in(run))) == (Outcome.ERRORED, True)
    assert eventually(lambda: list(tmp_path.iterdir()) == [])


def test_what_the_command_itself_prints_is_no_answer(bare_python):
    """A banner on standard output, as wrappers print, is chatter."""
    banner = ("/bin/sh", "-c", 'echo "Welcome to the container"; exec "$@"', "sh", bare_python)
    assert run_once("passes", spec=WorkerSpec(command=banner)).outcome is Outcome.COMPLETED


def test_a_worker_out_of_reach_ends_with_its_input(bare_python, tmp_path):
    """Where no signal arrives (a container), the end of standard input alone ends the worker."""
    run = run_once("hangs", timeout=soon(2.5), spec=WorkerSpec(command=("/usr/bin/env", "setsid", "-w", bare_python)))
    assert run.outcome is Outcome.TIMED_OUT
    assert gone(pid_in(run))
