"""A series on real workers: what a run carries, floods, leftovers, and its end."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from canaryd.model import Outcome
from canaryd.supervisor import protocol
from canaryd.supervisor.process import MAX_RUN
from canaryd.supervisor.protocol import WorkerSpec, new_run_id
from canaryd.supervisor.series import Series
from tests.command import children, soon
from tests.supervisor.workers import PATIENCE, gone, pid_in, readings, request, run_once

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
    assert 0 <= run.seconds < soon(5)
    assert abs(run.started - time.time()) < soon(10)


def test_a_mismatch_is_a_fact_of_a_completed_run(series):
    """A wrong bit is evidence, not an outcome."""
    run = series.run(request("mismatches"), PATIENCE)
    assert run.outcome is Outcome.COMPLETED
    (wrong,) = run.wrong
    assert wrong.evidence is not None
    assert wrong.evidence.first == (((0, 1), "3f800000", "00000000"),)


SLOW_TO_READ = """
import time
from canaryd.probe import Comparison, Evidence, Exactness, ProbeSpec
SPEC = ProbeSpec(name="wrong_at_last", summary="Wrong, then hangs", numeric=False)
def run(ctx):
    ctx.progress(0.5, "soon")
    time.sleep(0.2)
    evidence = Evidence(wrong=1, total=1, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one element")
    yield Comparison(case="a", shape="N=1", seed=1, exactness=Exactness.UNIVERSAL, wrong_trials=1, evidence=evidence)
    time.sleep(60)
"""


@pytest.mark.parametrize(("stopped", "outcome"), [(True, Outcome.ERRORED), (False, Outcome.TIMED_OUT)])
def test_what_arrived_before_the_end_is_kept_though_nobody_has_read_it(tmp_path, stopped, outcome):
    """Somebody who shows progress took his time: the wrong bit is in the pipe when the worker is stopped, or late."""

    def show(_, text):
        if text == "soon":
            time.sleep(1.5)
            if stopped:
                series.kill()

    (tmp_path / "wrong_at_last.py").write_text(SLOW_TO_READ)
    with Series(WorkerSpec(), grace=0.5, on_progress=show) as series:
        series.run(request("passes"), PATIENCE)
        timeout = PATIENCE if stopped else 1.0
        run = series.run(request("wrong_at_last", probe_path=tmp_path / "wrong_at_last.py"), timeout)
    assert (run.outcome, [c.case for c in run.wrong]) == (outcome, ["a"])


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
    assert readings(run)["speed_calls"] > 1000
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
    assert time.monotonic() - begun < soon(3.0)
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
    assert time.monotonic() - begun < soon(5)
    assert run.outcome is (Outcome.CRASHED if crash else Outcome.COMPLETED)
    assert gone(pid_in(run, "child"))


def test_a_child_that_escapes_the_group_blocks_nothing():
    """A process in a session of its own that holds the pipes does not keep the supervisor waiting."""
    begun = time.monotonic()
    run = run_once("forks_a_grandchild", settings={"crash": True, "escape": True, "seconds": 30})
    try:
        assert run.outcome is Outcome.CRASHED
        assert time.monotonic() - begun < soon(5)
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
    assert time.monotonic() - begun < soon(2)
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
    assert time.monotonic() - begun < soon(3)
    assert children() == before


@pytest.mark.parametrize(
    "sent",
    [
        {"trials": 2**40},
        {"uploads": 2**40},
        {"uploads": -1},
        {"trials": 2**64, "wrong_trials": 1},
    ],
)
def test_counts_that_no_store_holds_are_refused(sent):
    """They break the protocol: the run is garbled. As many as one run can send stay below what the store holds."""
    common = {"case": "c", "shape": "", "seed": 1, "exactness": "U"}
    with pytest.raises(ValueError, match="uploads"):
        list(protocol.facts_in("fact", {"type": "Comparison", "value": common | sent}))
    shortest = len(json.dumps(common))
    assert MAX_RUN // shortest * (protocol.MOST_COUNTED - 1) < protocol.MOST


@pytest.mark.parametrize("value", [2**64, -(2**64), 10**400], ids=["large", "negative", "no double"])
def test_readings_of_more_than_64_bits_are_refused(value):
    """A number that no double holds would cost the whole page of metrics."""
    with pytest.raises(ValueError, match="has more than 64 bits"):
        list(protocol.facts_in("readings", {"values": [["energy_joules", value, "joules", {}]]}))


def test_polls_share_their_texts():
    """What poll after poll says is kept once."""
    said = json.dumps(["a name", "a value", "a unit", {"a label": "its value"}])
    one, other = (protocol.parse_fact(json.loads(said)) for _ in range(2))
    assert (one.name is other.name, one.value is other.value, one.unit is other.unit) == (True, True, True)
    ((key, value),), ((same_key, same_value),) = one.labels.items(), other.labels.items()
    assert (key is same_key, value is same_value) == (True, True)
