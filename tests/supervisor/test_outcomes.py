"""What becomes of a worker is an outcome: crashes, device errors, memory, deadlines, interpreters."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from canaryd.engine import kernel_log
from canaryd.facts import LogRecord
from canaryd.model import MPS_CLIENT, Device, Outcome
from canaryd.supervisor import killed
from canaryd.supervisor.process import abandoned
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series
from tests.command import soon
from tests.supervisor.workers import DEVICE, PATIENCE, PROBES, gone, pid_in, readings, request, run_once

# --- Outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "outcome", "detail"),
    [
        ("skips", {}, Outcome.SKIPPED, "no tensor cores here"),
        ("raises", {}, Outcome.ERRORED, "ZeroDivisionError: the moon is in the wrong phase"),
        ("raises_at_import", {}, Outcome.ERRORED, "ImportError: no module named unobtainium"),
        ("exits", {}, Outcome.ERRORED, "SystemExit: 0"),
        ("exits_at_import", {}, Outcome.ERRORED, "SystemExit: not today"),
        ("bad_spec", {}, Outcome.ERRORED, "SPEC is dict; write SPEC = ProbeSpec"),
        ("bad_name", {}, Outcome.ERRORED, "'Bad Name' is not snake case"),
        ("no_run", {}, Outcome.ERRORED, "no function run"),
        ("nowhere", {}, Outcome.ERRORED, "nowhere.py"),
        ("returns_nothing", {}, Outcome.ERRORED, "'NoneType' object is not iterable"),
        ("yields_nonsense", {"what": "dict"}, Outcome.ERRORED, "the probe yielded dict; it may yield Reading,"),
        ("yields_nonsense", {"what": "none"}, Outcome.ERRORED, "the probe yielded NoneType"),
        ("yields_nonsense", {"what": "class"}, Outcome.ERRORED, "the probe yielded type"),
        ("yields_nonsense", {"what": "nan"}, Outcome.ERRORED, "yielded a Reading that is not plain data"),
        ("yields_nonsense", {"what": "object"}, Outcome.ERRORED, "yielded a Reading that is not plain data"),
        (
            "yields_nonsense",
            {"what": "missing"},
            Outcome.ERRORED,
            "yielded a Reading that is not plain data: Reading(name=None",
        ),
        ("exhausts_memory", {}, Outcome.OUT_OF_MEMORY, "MemoryError"),
        ("exhausts_device", {}, Outcome.OUT_OF_MEMORY, "Tried to allocate 20.00 GiB"),
        ("exhausts_device", {"plain": True}, Outcome.OUT_OF_MEMORY, "ALLOC_FAILED"),
        ("crashes", {}, Outcome.CRASHED, "killed by SIGSEGV"),
        ("crashes", {}, Outcome.CRASHED, "crashes.py"),
        ("crashes_at_import", {}, Outcome.CRASHED, "killed by SIGSEGV"),
        ("aborts", {}, Outcome.CRASHED, "killed by SIGABRT"),
        ("aborts", {}, Outcome.CRASHED, "std::bad_day"),
        ("exits_early", {}, Outcome.CRASHED, "exited with status 0 without an answer"),
        ("killed", {}, Outcome.CRASHED, "killed by SIGKILL, not by canaryd"),
        ("closes_descriptors", {}, Outcome.CRASHED, "lost its protocol pipe"),
        ("closes_descriptors_and_hangs", {}, Outcome.GARBLED, "closed its protocol pipe"),
        ("garbles_protocol", {"how": "text"}, Outcome.GARBLED, "segmentation violets"),
        ("garbles_protocol", {"how": "json"}, Outcome.GARBLED, "{]"),
        ("garbles_protocol", {"how": "list"}, Outcome.GARBLED, "not an object"),
        ("garbles_protocol", {"how": "deep"}, Outcome.GARBLED, "[[["),
        ("garbles_protocol", {"how": "fact"}, Outcome.GARBLED, "Recording.case: wanted str, got int"),
        ("counts_too_far", {}, Outcome.GARBLED, f"{2**64} trials"),
        ("garbles_protocol", {"how": "line"}, Outcome.GARBLED, "the worker sent too much"),
    ],
)
def test_misbehaviour_becomes_an_outcome(name, settings, outcome, detail):
    """Whatever a probe does, the caller gets a run that says so in words, and gets it quickly."""
    begun = time.monotonic()
    run = run_once(name, settings=settings)
    assert (run.outcome, detail in run.detail) == (outcome, True), run
    assert time.monotonic() - begun < soon(10)


@pytest.mark.parametrize(
    ("name", "settings", "backend", "outcome"),
    [
        ("fails_on_device", {}, "cuda", Outcome.DEVICE_ERROR),
        ("fails_on_device", {"cleaning": True}, "rocm", Outcome.DEVICE_ERROR),
        ("fails_on_device", {}, "cpu", Outcome.ERRORED),
        ("aborts_on_device", {}, "rocm", Outcome.DEVICE_ERROR),
        ("aborts_on_device", {}, "cpu", Outcome.CRASHED),
        ("aborts", {}, "cuda", Outcome.CRASHED),
    ],
)
def test_an_error_of_the_device_is_an_outcome_of_its_own(name, settings, backend, outcome):
    """Where there is a device that can fail; also where the runtime aborts, and where cleaning up failed too."""
    device = replace(DEVICE, backend=backend)
    run = run_once(name, spec=WorkerSpec(only=device), device=device, settings=settings)
    assert run.outcome is outcome, run.detail


def test_a_run_whose_length_others_decide_may_send_less(tmp_path):
    """What a server answered reaches the daemon up to 16 MiB, and no further."""
    said = tmp_path / "said"
    said.write_text(json.dumps({"cases": {"a": [{"digest": "0" * 16, "text": "a" * 4096}]}, "repeat": 5000}))
    asked = request("recalls", settings={"file": str(said)}, baselining=True)
    with Series(WorkerSpec()) as series:
        assert series.run(asked, 60.0).outcome is Outcome.COMPLETED
        run = series.run(replace(asked, spec=replace(asked.spec, numeric=False)), 60.0)
    assert (run.outcome, "the worker sent too much" in run.detail) == (Outcome.GARBLED, True)


def test_a_server_that_fills_a_workers_memory_is_one_sentence():
    """The kernel refuses what is beyond the limit."""
    served = Device(uuid="endpoint:main", backend="endpoint", index=0, model="x")
    run = run_once("exhausts_memory", device=served)
    assert (run.outcome, run.detail) == (
        Outcome.OUT_OF_MEMORY,
        "the server's answers need more than 1024 MiB of memory",
    )
    run = run_once("exhausts_memory", device=served, settings={"limit": False})
    assert run.outcome is Outcome.OUT_OF_MEMORY


def test_facts_survive_an_exception_and_a_crash():
    """What was measured before the end is evidence, above all a wrong bit just before the crash."""
    assert readings(run_once("raises")) == {"before": 1}
    run = run_once("mismatches_then_crashes")
    assert run.outcome is Outcome.CRASHED
    assert len(run.wrong) == 1


def test_the_traceback_points_into_the_probe():
    """An author sees the file and the line."""
    assert 'raises.py", line 10, in run' in run_once("raises").detail


def test_no_core_is_dumped(tmp_path, monkeypatch):
    """A worker that crashes in a loop must not fill the disk with its core, even where cores are on."""
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != resource.RLIM_INFINITY:
        pytest.skip("core dumps cannot be switched on here")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, before[1]))
    monkeypatch.chdir(tmp_path)
    try:
        assert run_once("crashes").outcome is Outcome.CRASHED
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert list(tmp_path.iterdir()) == []


def test_the_kernels_out_of_memory_killer_is_recognised(tmp_path):
    """A SIGKILL from the kernel while its count of such kills rises is out_of_memory, not a crash."""
    kind, group = memory_cgroup()
    if group is None:
        pytest.skip(f"no memory cgroup can be made here: {kind}")
    try:
        run = run_once("killed_for_memory", settings={"cgroup": str(group)})
        assert run.outcome is Outcome.OUT_OF_MEMORY, run.detail
        assert "out-of-memory kills rose" in run.detail
    finally:
        remove_cgroup(group)


def memory_cgroup() -> tuple[str, Path | None]:
    """Make a cgroup limited to 96 MiB: (what was tried, its path or None)."""
    tried = []
    for base, limit in (
        (Path("/sys/fs/cgroup"), "memory.max"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ):
        group = base / f"canaryd-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / "cgroup.procs").read_text()  # a directory of the cgroup file system, not of a tmpfs below it
            (group / limit).write_text(str(96 << 20))
        except OSError as error:
            tried.append(str(error))
            remove_cgroup(group)
        else:
            return limit, group
    return "; ".join(tried), None


def remove_cgroup(group: Path) -> None:
    for _ in range(50):
        with contextlib.suppress(FileNotFoundError):
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)
                continue
        return


# --- Deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hangs", "hangs_holding_gil"])
def test_a_hang_is_timed_out_and_says_where(name):
    """SIGTERM makes the worker print its stack, even inside a C call that holds the interpreter lock."""
    begun = time.monotonic()
    run = run_once(name, timeout=soon(2.0))
    assert time.monotonic() - begun < soon(2.0 + 0.5 + 1.0)
    assert run.outcome is Outcome.TIMED_OUT
    assert f'{name}.py", line' in run.detail
    assert run.seconds > 0.3
    assert gone(pid_in(run))


def test_a_worker_that_ignores_sigterm_dies_with_its_children():
    """SIGKILL goes to the whole group after the grace."""
    begun = time.monotonic()
    run = run_once("hangs_ignoring_sigterm", timeout=soon(2.0))
    assert soon(2.0) + 0.5 <= time.monotonic() - begun < soon(2.0 + 0.5 + 1.0)
    assert run.outcome is Outcome.TIMED_OUT
    assert gone(pid_in(run, "child"))


def test_a_worker_that_survives_sigkill_is_abandoned(tmp_path):
    """It is counted and never waited for; the series goes on with another, and the old one is reaped when it wakes."""
    before = abandoned()
    release = tmp_path / "release"
    with Series(WorkerSpec(), grace=0.5) as series:
        series.run(request("passes"), PATIENCE)  # on a busy machine a worker may take two seconds to start
        begun = time.monotonic()
        run = series.run(request("unkillable", settings={"release": str(release)}), soon(2.0))
        took = time.monotonic() - begun
        if run.outcome is Outcome.SKIPPED:
            pytest.skip(f"no unkillable process can be had: {run.detail}")
        try:
            assert run.outcome is Outcome.UNKILLABLE
            assert took < soon(2.0 + 0.5 + 1.0 + 0.5)
            assert "survived SIGKILL" in run.detail
            assert abandoned() == before + 1
            pid = pid_in(run)
            assert not gone(pid, within=0.2)
            assert series.run(request("passes"), PATIENCE).outcome is Outcome.COMPLETED
        finally:
            release.touch()
        assert gone(pid)
        series.close()
        series.run(request("passes"), PATIENCE)
        assert not Path(f"/proc/{pid}").exists()
        assert abandoned() == before + 1


def test_canaryd_knows_whom_it_killed():
    """A worker that hung, and none that ended when it was asked to."""
    before = list(killed._killed)
    with Series(WorkerSpec(only=replace(DEVICE, backend="cuda")), grace=0.5) as series:
        assert series.run(request("passes"), PATIENCE).outcome is Outcome.COMPLETED
    assert list(killed._killed) == before
    run = run_once("hangs", timeout=soon(3.0))
    assert run.outcome is Outcome.TIMED_OUT
    kill = killed._killed[-1]
    assert len({other.pids for other in killed._killed if other not in before}) == 1
    (pid,), when = kill.pids, kill.at
    for hidden in (False, True):  # in a container the log has other ids: then the place and the time tell
        killed._killed[-1] = kill._replace(hidden=hidden, bus_id="0000:65:00.0")
        assert killed.was_killed(pid, when + 1.0, lambda _: False)
        assert not killed.was_killed(pid, when + killed.LATE + 1.0, lambda _: True)
        assert killed.was_killed(pid + 1, when, "0000:65:00.0".__eq__) is hidden
        assert not killed.was_killed(pid + 1, when, "0000:66:00.0".__eq__)


@pytest.mark.parametrize(("code", "own"), [(31, True), (43, True), (46, False), (109, False), (142, False)])
def test_by_its_place_alone_no_error_that_asks_for_a_reset_is_of_a_killed_worker(code, own):
    """In a container a server on the same GPU has ids that nobody here knows: a hang that made canaryd kill is told."""
    gpu = replace(DEVICE, uuid="GPU-a", backend="cuda", detail={"bus_id": "00000000:65:00.0"})
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as worker:
        killed.note(worker.pid, "0000:65:00.0", hidden=True)
        worker.kill()
    told = {"process": str(worker.pid + 1)}
    record = LogRecord(boot="b", sequence=1, at=time.time(), kind="xid", name=str(code), bus_id="0000:65:00.0", text="")
    event = kernel_log._event(replace(record, fields=told), [gpu])
    assert ("that canaryd killed" in event.name, event.kind == "xid") == (own, not own)


def test_canaryd_knows_the_children_of_whom_it_killed():
    """Their ids are in the log too, where they worked on the device: a test of links has one for each."""
    script = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stdout=subprocess.PIPE)
    try:
        assert leader.stdout.readline() == b"up\n"
        killed.note(leader.pid)
        found = killed._killed[-1].pids
        assert leader.pid in found
        assert len(found) == 2
        assert os.getpid() not in found
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        leader.stdout.close()


@pytest.mark.parametrize("shared", [True, False])
def test_beside_mps_a_slow_run_may_finish(tmp_path, shared):
    """A client of MPS that is killed at work may take the server with it: only one that hangs on is killed."""
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from canaryd.probe import ProbeSpec\n"
        'SPEC = ProbeSpec(name="slow", summary="Slow", version=3, numeric=False)\n'
        "def run(ctx):\n    time.sleep(4.0)\n    yield from ()\n"
    )
    if shared:
        (tmp_path / "control").touch()
    device = replace(DEVICE, backend="cuda")
    spec = WorkerSpec(only=device, env={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    before = len(killed._killed)
    run = run_once("slow", timeout=2.0, spec=spec, device=device, probe_path=tmp_path / "slow.py")
    assert run.outcome is Outcome.TIMED_OUT
    assert (len(killed._killed) == before) is shared
    assert (MPS_CLIENT in run.environment) is shared, "what other clients do may end its runs"


def test_a_context_may_take_its_time_to_be_torn_down(tmp_path):
    """A worker on an accelerator that ends some seconds after SIGKILL was slow, not unkillable."""
    release = tmp_path / "release"
    device = replace(DEVICE, backend="cuda")
    with Series(WorkerSpec(only=device), grace=0.5) as series:
        series.run(request("passes", device=device), PATIENCE)
        threading.Timer(6.0, release.touch).start()
        run = series.run(request("unkillable", device=device, settings={"release": str(release)}), soon(2.0))
    if run.outcome is Outcome.SKIPPED:
        pytest.skip(f"no unkillable process can be had: {run.detail}")
    assert run.outcome is Outcome.TIMED_OUT, run.detail


# --- Interpreters that cannot serve ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (WorkerSpec(python="/nonexistent/python"), ("worker.python", "/nonexistent/python")),
        (WorkerSpec(python="/etc/passwd"), ("worker.python", "Permission denied")),
        (WorkerSpec(python="/bin/false"), ("worker.python (/bin/false)", "exited with status 1")),
        (WorkerSpec(command=("/nonexistent/docker", "exec")), ("worker.command", "/nonexistent/docker")),
        (WorkerSpec(command=("/bin/sh", "-c", "echo no such container >&2; exit 125")), ("no such container", "125")),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_with_its_reason(spec, words):
    """The message names the setting and what the system or the command said; describe says the same, once."""
    run = run_once("passes", spec=spec)
    assert run.outcome is Outcome.ERRORED
    assert all(word in run.detail for word in words), run.detail
    with Series(spec) as series:
        described = series.describe([PROBES / "passes.py"])
    assert all(word in described.torch_reason for word in words)
    assert described.lost.startswith("worker.")
    assert described.probes == {}


def test_an_old_interpreter_gets_one_clear_line(tmp_path):
    """Python before 3.10 is refused in words, by path and by command."""
    old = tmp_path / "python3"
    old.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            import sys; sys.version_info = (3, 8, 1); sys.version = "3.8.1 (old)"
            if sys.argv[1] == "-c":
                exec(sys.argv[2])
            else:
                import runpy
                path, sys.argv = sys.argv[1], sys.argv[1:]
                runpy.run_path(path, run_name="__main__")
        """)
    )
    old.chmod(0o755)
    for spec in (WorkerSpec(python=str(old)), WorkerSpec(command=(str(old),))):
        run = run_once("passes", spec=spec)
        assert run.outcome is Outcome.ERRORED
        assert "the worker needs Python 3.10 or newer" in run.detail
        assert "is 3.8.1" in run.detail
