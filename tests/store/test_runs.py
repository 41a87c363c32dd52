"""What is stored of runs comes back, as it was and once."""

import threading

from canaryd.facts import Reading, Skipped
from canaryd.model import Outcome
from canaryd.store.store import Store
from tests.store.made import NOW, WRONG, comparison, counter, failure, ids, run


def test_a_run_comes_back_as_it_was(tmp_path):
    """Every field of a run survives the disk, absence and evidence included."""
    whole = run(
        readings=(Reading(name="duration", value=0.25, unit="seconds"), Reading(name="kernel", value="ampere")),
        comparisons=(WRONG, comparison()),
        skipped=(Skipped(case="fp8", reason="no such kernel"),),
        absent={"temperature": "no sensor"},
        stack={"torch": "2.13"},
        environment={"host": "näme"},
        detail="line\nline",
        repro="canaryd check",
        confirms="r0",
    )
    with Store.open(tmp_path) as store:
        assert store.add_run(whole)
    with Store.open(tmp_path) as store:
        assert store.runs() == [whole]
        assert store.run("r1") == whole
        assert store.run("r2") is None
        assert (store.problem, store.problems) == ("", [])


def test_runs_are_narrowed_by_each_argument(store, clock):
    """Device, probe, time, failure and limit narrow the answer; the newest is last."""
    store.add_run(run("a"))
    store.add_run(run("b", device="GPU-2"))
    store.add_run(failure("c", probe="exact_integer"))
    clock.now += 10
    store.add_run(run("e", outcome=Outcome.CRASHED))
    store.add_run(run("f", outcome=Outcome.SKIPPED))
    assert ids(store.runs()) == ["a", "b", "c", "e", "f"]
    assert ids(store.runs("GPU-2")) == ["b"]
    assert ids(store.runs("GPU-1", "exact_matmul")) == ["a", "e", "f"]
    assert ids(store.runs(since=NOW + 5)) == ["e", "f"]
    assert ids(store.runs(failed=True)) == ["c", "e"]
    assert ids(store.runs(failed=False)) == ["a", "b", "f"]
    assert ids(store.runs(limit=2)) == ["e", "f"]
    assert store.runs(limit=0) == []


def test_a_run_is_stored_and_counted_once(store):
    """Handing over the same run again changes nothing."""
    assert store.add_run(run())
    assert store.add_run(run())
    assert ids(store.runs()) == ["r1"]
    assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 1


def test_threads_share_a_store(store):
    """Four threads writing and reading at once lose nothing and count everything."""

    def work(name):
        for number in range(10):
            assert store.add_run(run(f"{name}-{number}"))
            store.runs(limit=1)

    threads = [threading.Thread(target=work, args=[name]) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.runs()) == 40
    assert counter(store, "probe_runs", device="GPU-1", probe="exact_matmul", outcome="completed") == 40


def test_recent_runs_are_found_by_their_time(tmp_path):
    """The daemon asks for them every 15 seconds: it must not read 400 days of failures for that."""
    with Store.open(tmp_path) as store:
        said: list[str] = []
        store._file.set_trace_callback(said.append)
        store.runs(since=1.0)
        store.runs("CPU-1", since=1.0, until=2.0, failed=True, limit=5)
        asked = [statement for statement in said if "FROM runs" in statement]
        plans = [store._file.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall() for statement in asked]
    assert len(plans) == 2
    assert all("runs_by_age" in str(plan) for plan in plans)
