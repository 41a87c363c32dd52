"""The supervisor against every way in which a probe may misbehave: real processes, short deadlines."""

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

from canaryd.facts import Reading
from canaryd.model import MPS_CLIENT, Device, Outcome, Run
from canaryd.probe import Absent, ProbeSpec
from canaryd.supervisor import killed, protocol
from canaryd.supervisor import series as supervisor_series
from canaryd.supervisor.process import abandoned
from canaryd.supervisor.protocol import RunRequest, WorkerSpec, new_run_id
from canaryd.supervisor.series import Series
from tests.command import children, eventually

PROBES = Path(__file__).parents[1] / "probes"
DEVICE = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
PATIENCE = 20.0


def request(name: str, **fields) -> RunRequest:
    fields = {"probe_path": PROBES / f"{name}.py", "device": DEVICE, "level": "quick", "seed": 7} | fields
    return RunRequest(spec=ProbeSpec(name=name, summary="under test", version=3), **fields)


def run_once(name: str, timeout: float = PATIENCE, spec: WorkerSpec | None = None, grace: float = 0.5, **fields) -> Run:
    with Series(spec or WorkerSpec(), grace=grace) as series:
        return series.run(request(name, **fields), timeout)


def readings(run: Run) -> dict:
    return {reading.name: reading.value for reading in run.readings}


def pid_in(run: Run, name: str = "pid") -> int:
    return int(readings(run)[name])


def gone(pid: int, within: float = 3.0) -> bool:
    """Tell whether a process has ended (a zombie has)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def series():
    with Series(WorkerSpec(), grace=0.5) as one:
        yield one


# --- What a good run is made of --------------------------------------------------------------------------------------


def test_a_completed_run_carries_its_facts(series):
    """Facts, absences, skipped parts and the identity of the run arrive; nothing is added to say."""
    run = series.run(request("passes", confirms="an earlier run", drill="flip"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    assert (run.device, run.probe, run.probe_version, run.level, run.seed) == ("CPU-test", "passes", 3, "quick", 7)
    assert readings(run) == {"answer_seconds": 0.25}
    assert run.trials == 3
    assert run.wrong == ()
    assert [part.reason for part in run.skipped] == ["not on this device"]
    assert run.absent == {"temperature_celsius": "no sensor"}
    assert (run.confirms, run.drill, run.detail) == ("an earlier run", "flip", "")
    assert 0 <= run.seconds < 5
    assert abs(run.started - time.time()) < 10


def test_a_mismatch_is_a_fact_of_a_completed_run(series):
    """A wrong bit is evidence, not an outcome."""
    run = series.run(request("mismatches"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    (wrong,) = run.wrong
    assert wrong.evidence is not None
    assert wrong.evidence.first == (((0, 1), "3f800000", "00000000"),)


def test_the_context_reaches_the_probe(series):
    """Level, seed, budget, cases, drill, settings and device are what the request said."""
    settings = {"names": ["HOME"], "deep": {"er": [1, 2.5, None]}}
    said = readings(series.run(request("echoes", cases=("a", "b"), drill="flip", settings=settings), PATIENCE))
    assert (said["cases"], said["drill"], said["level"], said["seed"]) == ("a,b", "flip", "quick", 7)
    assert (said["budget"], said["device"], said["settings"]) == (2.0, "CPU-test", repr(settings))


def test_repro_repeats_the_run():
    """The command names device, probe, cases, seed, level and instruction set, quoted for a shell."""
    with Series(WorkerSpec(), instruction_set="avx2") as series:
        run = series.run(request("passes", cases=("bf16/a b", "c")), PATIENCE)
    assert run.instruction_set == "avx2"
    assert run.repro == (
        "canaryd check --device cpu:0 --probe passes --case 'bf16/a b' --case c --seed 7 --level quick "
        "--instruction-set avx2"
    )


def test_ids_sort_by_time_and_never_repeat():
    """A thousand ids of one instant are distinct; a later instant sorts later."""
    ids = {new_run_id(1_700_000_000.0) for _ in range(1000)}
    assert len(ids) == 1000
    assert max(ids) < new_run_id(1_700_000_000.001)


def test_progress_arrives_throttled_and_bounded():
    """A probe that reports constantly costs a handful of messages, each between 0 and 1."""
    seen = []
    with Series(WorkerSpec(), on_progress=lambda fraction, text: seen.append((fraction, text))) as series:
        run = series.run(request("reports_progress"), PATIENCE)
    assert readings(run)["calls"] > 1000
    assert 3 <= len(seen) <= 12
    *working, last = seen
    assert all(0 <= fraction <= 1 and text == "working" for fraction, text in working)
    assert last == (1.0, "beyond the end")


@pytest.mark.torch
def test_a_numeric_run_records_its_stack(series):
    """Stack and environment of the interpreter that computed are part of the run, or the reason why not."""
    pytest.importorskip("canaryd.worker.numeric.stack")
    run = series.run(request("surroundings"), 60.0)
    assert run.outcome is Outcome.COMPLETED, run.detail
    assert run.absent == {}
    assert run.stack["python"].startswith("3.")
    assert "hostname" in run.environment


# --- The worker's environment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instruction_set", "wanted"),
    [
        ("", ("unset", "unset", "unset")),
        ("native", ("unset", "unset", "unset")),
        ("avx2", ("avx2", "unset", "AVX2")),
        ("baseline", ("default", "COMPATIBLE", "unset")),
    ],
)
def test_what_libraries_read_at_start_is_set_at_start(monkeypatch, instruction_set, wanted):
    """Each instruction set has its environment; what the daemon inherited by chance does not leak through."""
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "chance")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with Series(WorkerSpec(env={"MINE": "yes"}), instruction_set=instruction_set) as series:
        said = readings(
            series.run(request("echoes", settings={"names": ["PYTORCH_CUDA_ALLOC_CONF", "MINE"]}), PATIENCE)
        )
    assert (said["ATEN_CPU_CAPABILITY"], said["MKL_CBWR"], said["MKL_ENABLE_INSTRUCTIONS"]) == wanted
    assert (said["CUBLAS_WORKSPACE_CONFIG"], said["NVIDIA_TF32_OVERRIDE"]) == (":4096:8", "unset")
    assert (said["PYTORCH_CUDA_ALLOC_CONF"], said["MINE"]) == ("unset", "yes")


def test_an_unknown_instruction_set_is_refused_by_name():
    """The error says what was given and what there is."""
    with pytest.raises(ValueError, match="'sse9' is not one of native, avx2, baseline"):
        Series(WorkerSpec(), instruction_set="sse9")


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
        ("garbles_protocol", {"how": "fact"}, Outcome.GARBLED, "Reading.name: wanted str, got int"),
        ("garbles_protocol", {"how": "line"}, Outcome.GARBLED, "the worker sent too much"),
    ],
)
def test_misbehaviour_becomes_an_outcome(name, settings, outcome, detail):
    """Whatever a probe does, the caller gets a run that says so in words, and gets it quickly."""
    begun = time.monotonic()
    run = run_once(name, settings=settings)
    assert (run.outcome, detail in run.detail) == (outcome, True), run
    assert time.monotonic() - begun < 10


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
    run = run_once(name, timeout=2.0)
    assert time.monotonic() - begun < 2.0 + 0.5 + 1.0
    assert run.outcome is Outcome.TIMED_OUT
    assert f'{name}.py", line' in run.detail
    assert run.seconds > 0.3
    assert gone(pid_in(run))


def test_a_worker_that_ignores_sigterm_dies_with_its_children():
    """SIGKILL goes to the whole group after the grace."""
    begun = time.monotonic()
    run = run_once("hangs_ignoring_sigterm", timeout=2.0)
    assert 2.5 <= time.monotonic() - begun < 2.0 + 0.5 + 1.0
    assert run.outcome is Outcome.TIMED_OUT
    assert gone(pid_in(run, "child"))


def test_a_worker_that_survives_sigkill_is_abandoned(tmp_path):
    """It is counted and never waited for; the series goes on with another, and the old one is reaped when it wakes."""
    before = abandoned()
    release = tmp_path / "release"
    with Series(WorkerSpec(), grace=0.5) as series:
        begun = time.monotonic()
        run = series.run(request("unkillable", settings={"release": str(release)}), 2.0)
        took = time.monotonic() - begun
        if run.outcome is Outcome.SKIPPED:
            pytest.skip(f"no unkillable process can be had: {run.detail}")
        try:
            assert run.outcome is Outcome.UNKILLABLE
            assert took < 2.0 + 0.5 + 1.0 + 0.5
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
    run = run_once("hangs", timeout=3.0)
    assert run.outcome is Outcome.TIMED_OUT
    pid, when = killed._killed[-1]
    assert {other for other, _ in killed._killed} - {other for other, _ in before} == {pid}
    assert killed.was_killed(pid, when + 1.0)
    assert not killed.was_killed(pid, when + killed.LATE + 1.0)
    assert not killed.was_killed(pid + 1, when)


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
    threading.Timer(6.0, release.touch).start()
    with Series(WorkerSpec(only=device), grace=0.5) as series:
        run = series.run(request("unkillable", device=device, settings={"release": str(release)}), 2.0)
    if run.outcome is Outcome.SKIPPED:
        pytest.skip(f"no unkillable process can be had: {run.detail}")
    assert run.outcome is Outcome.TIMED_OUT, run.detail


# --- Floods and leftovers --------------------------------------------------------------------------------------------


def test_a_flood_of_output_neither_blocks_nor_grows(series):
    """64 MiB on standard output cost the supervisor no memory to speak of, and the answer still arrives."""
    series.run(request("passes"), PATIENCE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = series.run(request("floods_stdout"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    assert run.detail == ""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10


def test_an_endless_flood_cannot_outlive_its_deadline():
    """The deadline holds however fast a worker prints; the tail that is kept is short."""
    begun = time.monotonic()
    run = run_once("floods_stderr", timeout=1.0)
    assert time.monotonic() - begun < 3.0
    assert run.outcome is Outcome.TIMED_OUT
    assert len(run.detail) < 6000


def test_printing_never_mixes_with_the_protocol(series):
    """Output at import, without a final newline or in no encoding, is only chatter."""
    run = series.run(request("prints_at_import"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    assert readings(run) == {"one": 1}


@pytest.mark.parametrize("crash", [False, True])
def test_children_of_a_probe_die_with_the_worker(crash):
    """A child that holds every pipe open delays nothing and is not left behind."""
    begun = time.monotonic()
    run = run_once("forks_a_grandchild", settings={"crash": crash})
    assert time.monotonic() - begun < 5
    assert run.outcome is (Outcome.CRASHED if crash else Outcome.COMPLETED)
    assert gone(pid_in(run, "child"))


def test_a_child_that_escapes_the_group_blocks_nothing():
    """A process in a session of its own that holds the pipes does not keep the supervisor waiting."""
    begun = time.monotonic()
    run = run_once("forks_a_grandchild", settings={"crash": True, "escape": True, "seconds": 30})
    try:
        assert run.outcome is Outcome.CRASHED
        assert time.monotonic() - begun < 5
    finally:
        os.kill(pid_in(run, "child"), signal.SIGKILL)


def test_descriptors_and_zombies_do_not_pile_up():
    """Worker after worker, the daemon's process stays as it was."""
    run_once("passes")
    before, begun = len(list(Path("/proc/self/fd").iterdir())), children()
    for name in ("passes", "crashes", "garbles_protocol", "raises"):
        run_once(name, settings={"how": "text"})
    run_once("passes", spec=WorkerSpec(python="/nonexistent/python"))
    run_once("passes", spec=WorkerSpec(command=("/nonexistent/docker",)))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert children() == begun


# --- The series ------------------------------------------------------------------------------------------------------


def test_a_series_pays_for_the_start_once(series):
    """Good runs and skips share one process."""
    pids = {pid_in(series.run(request("echoes"), PATIENCE))}
    series.run(request("skips"), PATIENCE)
    pids.add(pid_in(series.run(request("echoes"), PATIENCE)))
    assert len(pids) == 1
    assert series.workers_started == 1


@pytest.mark.parametrize("name", ["crashes", "hangs", "garbles_protocol", "raises", "exhausts_memory"])
def test_after_a_bad_run_the_next_gets_a_fresh_worker(series, name):
    """A poisoned process never runs a second probe."""
    series.run(request(name, settings={"how": "text"}), 1.0)
    assert series.run(request("passes"), PATIENCE).outcome is Outcome.COMPLETED
    assert series.workers_started == 2


def test_a_worker_that_dies_between_runs_is_replaced(series):
    """Its death is nobody's outcome."""
    pid = pid_in(series.run(request("echoes"), PATIENCE))
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert series.run(request("passes"), PATIENCE).outcome is Outcome.COMPLETED


def test_the_last_words_of_an_earlier_run_are_ignored():
    """Progress that a leftover thread reports is not taken for the present run's."""
    seen = []
    with Series(WorkerSpec(), on_progress=lambda _, text: seen.append(text)) as series:
        series.run(request("late_thread"), PATIENCE)
        seen.clear()
        run = series.run(request("reports_progress"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    assert set(seen) == {"working", "beyond the end"}


def test_kill_from_another_thread_ends_the_run_at_once(series):
    """Shutdown does not wait for a probe, and a stopped series starts nothing more."""
    threading.Timer(0.5, series.kill, ["the operator asked"]).start()
    begun = time.monotonic()
    run = series.run(request("hangs_ignoring_sigterm"), 60.0)
    assert time.monotonic() - begun < 2
    assert (run.outcome, run.detail.partition("\n")[0]) == (Outcome.ERRORED, "stopped: the operator asked")
    assert series.run(request("passes"), PATIENCE).detail == "stopped: the operator asked"
    assert series.workers_started == 1


def test_close_ends_a_busy_worker_within_the_grace():
    """Closing after an interrupt in the middle of a run leaves no process."""

    def interrupt(fraction, text):
        raise KeyboardInterrupt

    begun, before = time.monotonic(), children()
    with pytest.raises(KeyboardInterrupt), Series(WorkerSpec(), grace=0.5, on_progress=interrupt) as series:
        series.run(request("hangs"), 60.0)
    assert time.monotonic() - begun < 3
    assert children() == before


@pytest.mark.parametrize("name", ["hangs", "hangs_ignoring_sigterm"])
def test_a_killed_supervisor_leaves_no_orphans(name):
    """After kill -9 of the daemon, worker and children see the end of their input and go."""
    script = f"""
        from pathlib import Path
        from canaryd.model import Device
        from canaryd.probe import ProbeSpec
        from canaryd.supervisor.protocol import RunRequest, WorkerSpec; from canaryd.supervisor.series import Series
        import os, threading, time
        def tell():
            while True:
                time.sleep(0.1)
                path = f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children"
                for task in os.listdir("/proc/self/task"):
                    for pid in open(f"/proc/self/task/{{task}}/children").read().split():
                        print(pid, flush=True)
        threading.Thread(target=tell, daemon=True).start()
        device = Device(uuid="CPU-test", backend="cpu", index=0, model="x")
        path = Path({str(PROBES / name)!r} + ".py")
        spec = ProbeSpec(name={name!r}, summary="x")
        with Series(WorkerSpec()) as series:
            series.run(RunRequest(probe_path=path, spec=spec, device=device, level="quick", seed=1), 60.0)
    """
    daemon = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    with daemon.stdout:
        worker = int(daemon.stdout.readline())
        time.sleep(0.7)  # as a rule it hangs by then
        listed = Path(f"/proc/{worker}/task/{worker}/children")
        if name == "hangs_ignoring_sigterm":  # it starts one before it hangs
            eventually(listed.read_text)
        family = [worker, *map(int, listed.read_text().split())]
        daemon.kill()
        daemon.wait()
    assert all(gone(pid) for pid in family)


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
    assert (described.python, described.probes) == ("", {})


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


# --- Another interpreter, and another place --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    """An interpreter that has nothing installed, canaryd included."""
    place = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    python = str(place / "bin" / "python")
    bare = subprocess.run([python, "-c", "import canaryd"], cwd="/", capture_output=True, check=False)
    assert bare.returncode == 1
    return python


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
    timeout = 2.0 if name == "hangs" else PATIENCE
    # Half a second is too short for six workers on two cores to remove their files.
    run = run_once(name, timeout=timeout, spec=elsewhere, grace=PATIENCE, settings={"how": "json"})
    assert (run.outcome, detail in run.detail) == (outcome, True), run
    if outcome is not Outcome.GARBLED:  # that one is killed at once
        assert list(tmp_path.iterdir()) == []


def test_what_the_command_itself_prints_is_no_answer(bare_python):
    """A banner on standard output, as wrappers print, is chatter."""
    banner = ("/bin/sh", "-c", 'echo "Welcome to the container"; exec "$@"', "sh", bare_python)
    assert run_once("passes", spec=WorkerSpec(command=banner)).outcome is Outcome.COMPLETED


def test_a_worker_out_of_reach_ends_with_its_input(bare_python, tmp_path):
    """Where no signal arrives (a container), the end of standard input alone ends the worker."""
    run = run_once("hangs", timeout=2.5, spec=WorkerSpec(command=("/usr/bin/env", "setsid", "-w", bare_python)))
    assert run.outcome is Outcome.TIMED_OUT
    assert gone(pid_in(run))


# --- describe --------------------------------------------------------------------------------------------------------


def test_describe_tells_specs_and_what_is_wrong(series):
    """A broken probe hurts only itself."""
    names = ("passes", "raises_at_import", "exits_at_import", "bad_spec", "bad_name", "no_run", "wrong_name")
    described = series.describe([PROBES / f"{name}.py" for name in names])
    found = {path.stem: value for path, value in described.probes.items()}
    assert described.python.startswith("3.")
    assert found["passes"] == ProbeSpec(name="passes", summary="A well-behaved probe", numeric=False)
    assert found["raises_at_import"] == "ImportError: no module named unobtainium"
    assert found["exits_at_import"] == "SystemExit: not today"
    assert "SPEC is dict" in str(found["bad_spec"])
    assert "snake case" in str(found["bad_name"])
    assert "no function run" in str(found["no_run"])
    assert isinstance(found["wrong_name"], ProbeSpec)


def test_describe_survives_probes_that_crash_or_hang(bare_python):
    """The culprit is named; those before and after it are described."""
    names = ("passes", "crashes_at_import", "skips", "hangs_at_import", "raises")
    with Series(WorkerSpec(python=bare_python), grace=0.5) as series:
        described = series.describe([PROBES / f"{name}.py" for name in names], timeout=2.5)
    found = {path.stem: value for path, value in described.probes.items()}
    assert isinstance(found["passes"], ProbeSpec)
    assert isinstance(found["skips"], ProbeSpec)
    assert isinstance(found["raises"], ProbeSpec)
    assert "SIGSEGV" in str(found["crashes_at_import"])
    assert "did not answer before its deadline" in str(found["hangs_at_import"])


HANGS = "import time\nwhile True:\n    time.sleep(1)\n"
ABORTS = """import ctypes
import os
import sys
print("loading libraries", *range(100), sep="\\n", flush=True)
print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr)
print("  what():  std::bad_alloc", file=sys.stderr, flush=True)
os.abort()
"""


def interpreter(python: str, directory: Path, torch: str) -> WorkerSpec:
    """Return an interpreter whose torch is this text."""
    (directory / "torch.py").write_text(torch)
    return WorkerSpec(python=python, env={"PYTHONPATH": str(directory)})


@pytest.mark.parametrize(("torch", "words"), [(HANGS, "before its deadline"), (ABORTS, "SIGABRT; terminate called")])
def test_a_torch_that_hangs_or_aborts_is_one_cause(bare_python, tmp_path, torch, words):
    """It is asked once, in its own time; what needs no torch is described, and the cause is one line."""
    matmul = PROBES.parents[1] / "probes/exact_matmul.py"
    bare = tmp_path / "probes"
    bare.mkdir()
    (bare / "imports_torch.py").write_text("import torch\n")
    told: list[str] = []
    with Series(interpreter(bare_python, tmp_path, torch), grace=0.5) as series:
        begun = time.monotonic()
        paths = [matmul, PROBES / "passes.py", bare / "imports_torch.py"]
        described = series.describe(paths, timeout=60.0, import_timeout=3.0, on_wait=told.append)
        assert time.monotonic() - begun < 30.0
        assert series.workers_started == 2
    assert described.lost == f"torch of worker.python ({bare_python}) does not import"
    reason = described.torch_reason
    assert reason.startswith(f"{described.lost}: the worker ")
    assert words in reason
    assert "torch.py" in reason
    assert len(reason.splitlines()) == 1
    assert len(reason) < 1000
    assert [path.stem for path in described.probes] == ["passes"]
    assert described.torch is None
    assert [d.backend for d in described.devices] == ["cpu"]


def test_a_long_import_is_told_live_and_waited_for(bare_python, tmp_path, monkeypatch):
    """A slow disk is no fault: one line says what is waited for, with the interpreter's name."""
    monkeypatch.setattr(supervisor_series, "PATIENCE", 0.5)
    told: list[str] = []
    slow = "import time\ntime.sleep(2)\nraise ImportError('slow')\n"
    with Series(interpreter(bare_python, tmp_path, slow)) as series:
        described = series.describe([PROBES / "passes.py"], on_wait=told.append)
    assert told == [f"waiting for torch of worker.python ({bare_python}) to import, for at most 120 s"]
    assert described.lost == ""
    assert isinstance(described.probes[PROBES / "passes.py"], ProbeSpec)


def test_another_runtime_that_hangs_is_told_live(bare_python, tmp_path, monkeypatch):
    """As with torch: before the time limit ends it, one line says what is waited for."""
    monkeypatch.setattr(supervisor_series, "PATIENCE", 0.5)
    told: list[str] = []
    (tmp_path / "wgpu.py").write_text("import time\ntime.sleep(100)\n")
    with Series(WorkerSpec(python=bare_python, env={"PYTHONPATH": str(tmp_path)}), grace=0.5) as series:
        reach = series.reach("webgpu", timeout=3.0, on_wait=told.append)
    where = f"worker.python ({bare_python})"
    assert told == [f"waiting for webgpu of {where} to import and to list its devices, for at most 3 s"]
    assert reach.devices == ()
    assert "before its deadline" in reach.problem


@pytest.mark.torch
def test_describe_lists_the_devices():
    """The host's processors are always among them."""
    pytest.importorskip("canaryd.worker.numeric.stack")
    with Series(WorkerSpec()) as series:
        described = series.describe([])
    assert "cpu:0" in {device.name for device in described.devices}
    assert described.torch or described.torch_reason


def test_describe_without_torch_says_why(bare_python):
    """No torch is a reason, never a failure."""
    with Series(WorkerSpec(python=bare_python)) as series:
        described = series.describe([])
    assert described.torch is None
    assert described.torch_reason


@pytest.mark.parametrize(
    "item",
    [
        None,
        [],
        ["name"],
        ["name", 1],
        ["name", 1, "unit"],
        ["name", None, "unit", {}],
        [1, 1, "unit", {}],
        ["name", 1, 1, {}],
        ["name", 1, "unit", []],
        ["name", 1, "unit", {"label": 1}],
        ["name", [1], "unit", {}],
    ],
)
def test_what_stands_for_no_reading_is_refused(item):
    """Readings are taken apart by hand, and as strictly as every other message."""
    with pytest.raises(ValueError, match="not a reading"):
        protocol.parse_fact(item)


def test_readings_arrive_as_they_were_yielded():
    """Name, value with its type, unit, labels; an absence with its reason."""
    assert protocol.parse_fact(["a", True, "1", {"b": "c"}]) == Reading(
        name="a", value=True, unit="1", labels={"b": "c"}
    )
    assert protocol.parse_fact(["a", 2**60, "", {}]).value == 2**60
    assert protocol.parse_fact(["a", "why"]) == Absent(name="a", reason="why")


def test_polls_share_their_texts():
    """What poll after poll says is kept once."""
    said = json.dumps(["a name", "a value", "a unit", {"a label": "its value"}])
    one, other = (protocol.parse_fact(json.loads(said)) for _ in range(2))
    assert (one.name is other.name, one.value is other.value, one.unit is other.unit) == (True, True, True)
    ((key, value),), ((same_key, same_value),) = one.labels.items(), other.labels.items()
    assert (key is same_key, value is same_value) == (True, True)
