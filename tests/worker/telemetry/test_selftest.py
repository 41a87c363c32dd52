"""Vendors' self-tests: stand-in programs that really run, hang, fail, print garbage, or may not be stopped.

No tool of a vendor ran here. The outputs are made by hand after the sources that docs/vendors.md names, and none was
captured from a device.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from canaryd.facts import SELF_TEST, Reading
from canaryd.judge.selftest import PROBE
from canaryd.model import Device, Outcome
from canaryd.probe import Context, Skip
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.telemetry import selftest
from tests.command import PATIENCE, ROOT, eventually


def device(backend, index=1):
    return Device(uuid=f"{backend}-1", backend=backend, index=index, model="a stand-in")


def dcgm(key, *results):
    """The document of `dcgmi diag -j` with one test, "memory", and one of the software."""
    tests = [{"name": "memory", "results": list(results)}]
    software = {"name": "software", "results": [{"entity_group": "CPU", "entity_id": 1, "status": "Fail"}]}
    return json.dumps({key: {"test_categories": [{"category": "Hardware", "tests": [*tests, software]}]}})


def four(entity, status, *severities):
    """One result of DCGM 4."""
    warnings = [{"warning": f"warning {s}", "error_severity": s, "error_id": 1} for s in severities]
    return {"entity_group": "GPU", "entity_id": entity, "status": status, "warnings": warnings}


ASCEND = """Stress test is being performed, please wait.
Summary:
    Arch: aarch64
    Time: 20250529-19:35:34

Hardware:
    aicore:
        EMERGENCY_WARN
    hbm:
        PASS
"""
RVS = {
    "version": "1.0",
    "gst": {
        "stress": [
            {"gpu_id": "123", "gpu_index": "0", "gflops": "9", "pass": "true"},
            {"gpu_id": "124", "gpu_index": "1", "gflops": "1", "pass": "false"},
        ]
    },
}
XPU = {"component_list": [{"component_type": "XPUM_DIAG_HARDWARE_SYSMAN", "result": "Fail", "message": "no"}]}


@pytest.fixture
def tool(tmp_path):
    """Write a program that does what the given lines of Python say, and return its path."""

    def write(*lines):
        path = tmp_path / "tool"
        path.write_text("\n".join([f"#!{sys.executable}", "import os, signal, sys, time", *lines]) + "\n")
        path.chmod(0o755)
        return str(path)

    return write


def run(backend, command, budget=20.0, level="deep", **settings):
    """The readings of one run: test → result."""
    ctx = Context(device=device(backend), level=level, seed=1, budget=budget, settings={"command": command, **settings})
    return {f.labels["test"]: f.value for f in selftest.read(ctx) if isinstance(f, Reading) and f.name == SELF_TEST}


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([four(0, "Fail", 2), four(1, "Pass")], "pass"),
        ([four(0, "Pass"), four(1, "Fail", 2)], "fail"),
        ([four(1, "Fail", 5)], "configuration"),
        ([four(1, "Fail", 5, 2)], "fail"),
        ([four(1, "Skip")], "skip"),
        ([four(1, "Odd")], "unknown"),
        ([{"gpu_id": "1", "status": "Fail", "warnings": "an old text"}, {"gpu_id": "0", "status": "Pass"}], "fail"),
    ],
)
def test_dcgms_results_are_those_of_the_device(tool, results, status):
    """Of both versions of the document: only this GPU's, and a failure for a setting is told apart."""
    for key in ("DCGM Diagnostic", "DCGM GPU Diagnostic"):
        program = tool(f"print('Running.'); print({dcgm(key, *results)!r})", "sys.exit(226)")
        assert run("cuda", program) == {"memory": status}


def test_each_vendors_output_is_read(tool):
    """RVS writes a file, ascend-dmi lines, xpu-smi JSON."""
    rvs = tool("open(sys.argv[sys.argv.index('-j') + 1], 'w').write(" + repr(json.dumps(RVS)) + ")")
    assert run("rocm", rvs) == {"gst/stress": "fail"}
    assert run("npu", tool(f"print({ASCEND!r})")) == {"aicore": "fail", "hbm": "pass"}
    assert run("xpu", tool(f"print({json.dumps(XPU)!r})")) == {"XPUM_DIAG_HARDWARE_SYSMAN": "fail"}


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        ("cuda", ["diag", "-r", "3", "-i", "1", "-j"]),
        ("rocm", ["-m", "gst", "-i", "1", "-j"]),
        ("npu", ["-dg", "-i", "aicore", "-d", "1", "-q"]),
        ("xpu", ["diag", "-d", "1", "-l", "2", "-j"]),
    ],
)
def test_the_tool_is_asked_about_one_device(tool, backend, wanted):
    """With its documented options; a suite with anything else in it is refused."""
    with pytest.raises(Skip) as why:
        run(backend, tool("print(sys.argv[1:])"))
    assert str(wanted)[1:-1] in str(why.value)
    with pytest.raises(ValueError, match="suite: got"):
        run(backend, "true", suite="3; reboot")


@pytest.mark.parametrize("backend", selftest.TOOLS)
@pytest.mark.parametrize("lines", [["print('{\"DCGM Diagnostic\": 7}')"], ["print('Hardware:')"], ["sys.exit(3)"], []])
def test_garbage_is_no_result(tool, backend, lines):
    """Neither a pass nor a failure: the run is skipped with what the tool said last and its exit status."""
    with pytest.raises(Skip, match=r"gave no result of this device \(exit status [03]\); it said: "):
        run(backend, tool(*lines))


def test_a_tool_that_is_not_there_is_named():
    """No result, and why."""
    with pytest.raises(Skip, match="/nowhere/dcgmi is not installed, or not in PATH"):
        run("cuda", "/nowhere/dcgmi")


def test_a_tool_that_hangs_is_stopped(tool, tmp_path, monkeypatch):
    """At the end of its budget; one that ignores that is killed."""
    monkeypatch.setattr(selftest, "GRACE", 0.5)
    ended = tmp_path / "ended"
    polite = tool(
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(ended)!r}, 'w'), sys.exit(1)))", "time.sleep(60)"
    )
    with pytest.raises(Skip, match="did not end within 4 s and was stopped"):
        run("cuda", polite, budget=4.0)
    assert ended.exists()
    deaf = tool(
        f"signal.signal(15, signal.SIG_IGN); open({str(ended)!r}, 'w').write(str(os.getpid()))", "time.sleep(60)"
    )
    with pytest.raises(Skip, match="was stopped"):
        run("cuda", deaf, budget=4.0)
    assert _is_gone(int(ended.read_text()))


@pytest.mark.parametrize(("timeout", "outcome"), [(PATIENCE, Outcome.ERRORED), (6.0, Outcome.TIMED_OUT)])
def test_a_tool_ends_with_its_worker(tool, tmp_path, monkeypatch, timeout, outcome):
    """Where canaryd stops the run, and where the worker overruns: nothing of it runs on, and no file is left."""
    begun, files = tmp_path / "begun", tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    slow = tool(
        "signal.signal(15, signal.SIG_IGN)",
        "child = os.fork()",
        f"open({str(begun)!r}, 'w').write(f'{{os.getpid()}} {{child}}') if child else None",
        "time.sleep(600)",
    )
    with Series(WorkerSpec(), grace=0.5) as series:
        if outcome is Outcome.ERRORED:
            threading.Thread(target=lambda: (eventually(begun.exists), series.kill("a test"))).start()
        done = series.run(_asked(series, "cuda", slow), timeout)
    assert done.outcome is outcome, done
    assert eventually(lambda: all(_is_gone(int(pid)) for pid in begun.read_text().split()))
    assert eventually(lambda: list(files.iterdir()) == [])


def test_a_tool_that_moves_the_voltage_is_never_stopped(tool, tmp_path):
    """It runs on to its end, also when its worker is killed; the reason says so and names its process."""
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with pytest.raises(Skip, match=r"still runs \(process \d+\): canaryd does not stop it, because .* voltage"):
        run("npu", tool("time.sleep(1)"), budget=0.2)
    slow = tool(
        f"open({str(begun)!r}, 'w').write(str(os.getpid()))",
        *(f"signal.signal({n}, lambda *_: os._exit(9))" for n in (1, 2, 15)),
        "time.sleep(12)",
        f"open({str(ended)!r}, 'w').close()",
    )
    with Series(WorkerSpec()) as series:
        done = series.run(_asked(series, "npu", slow), 6.0)  # the supervisor's deadline: it kills the worker's group
    assert done.outcome is Outcome.TIMED_OUT
    pid = int(begun.read_text())
    for _ in range(300):
        if ended.exists() and _is_gone(pid):
            break
        time.sleep(0.1)
    assert ended.exists(), "the tool was stopped"


def _asked(series, backend, command):
    """A run of the probe, for a worker."""
    path = ROOT / "probes/vendor_selftest.py"
    return RunRequest(
        probe_path=path,
        spec=series.describe([path]).probes[path],
        device=device(backend),
        level="deep",
        seed=1,
        budget=60.0,
        settings={"command": command},
    )


def _is_gone(pid):
    """Whether a process has ended; one of this process's children may be left as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_it_runs_at_level_deep_alone_and_where_it_is_enabled(maker):
    """Never by default; at another level the reason says what to type."""
    probe = maker.load("vendor_selftest")
    assert probe.SPEC.opt_in
    assert probe.SPEC.name == PROBE
    assert set(probe.SPEC.backends) == set(selftest.TOOLS)
    ctx = Context(device=device("cuda"), level="standard", seed=1, budget=1.0)
    with pytest.raises(Skip, match="drain it, then canaryd check --level deep"):
        list(probe.run(ctx))
