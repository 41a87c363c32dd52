"""Devices, verdicts and counters."""

from canaryd.formatting import DAY
from canaryd.model import Cause, Finding, Outcome, State
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store
from tests.store.made import NOW, comparison, count, counter, device, failure, passed, run, verdict


def test_devices_are_remembered_when_they_are_gone(store):
    """First and last sight, presence, and the newest description of each device."""
    store.see_device(device(), NOW)
    store.see_device(device("GPU-2"), NOW)
    store.see_device(device(index=4), NOW + 5)
    store.set_present(["GPU-2"], NOW + 9)
    assert store.devices() == [
        DeviceRecord(device=device(index=4), first_seen=NOW, last_seen=NOW + 5, present=False),
        DeviceRecord(device=device("GPU-2"), first_seen=NOW, last_seen=NOW + 9, present=True),
    ]
    store.set_present([], NOW + 99, unseen=["GPU-2"])  # nobody looked
    assert [(r.last_seen, r.present) for r in store.devices()] == [(NOW + 5, False), (NOW + 9, True)]


def test_a_verdict_makes_history_when_it_changes(tmp_path):
    """The same state and cause again replace the last entry."""
    finding = Finding(rule="exact-mismatch", state=State.SUSPECT, cause=Cause.UNDETERMINED, message="m", runs=("r1",))
    suspect = verdict(State.SUSPECT, Cause.UNDETERMINED, NOW + 2, findings=(finding,))
    later = verdict(State.SUSPECT, Cause.UNDETERMINED, NOW + 3)
    with Store.open(tmp_path) as store:
        for each in (verdict(), verdict(decided=NOW + 1), suspect, later):
            assert store.set_verdict(each)
        assert store.set_verdict(verdict(device="GPU-2"))
    with Store.open(tmp_path) as store:
        assert store.verdict_history("GPU-1") == [verdict(decided=NOW + 1), later]
        assert store.verdicts() == {"GPU-1": later, "GPU-2": verdict(device="GPU-2")}
        assert store.verdict("GPU-1") == later
        assert store.verdict("GPU-3") is None


def test_counters_outlive_restarts_and_pruned_runs(tmp_path, clock):
    """Outcomes, mismatches and trials are counted with the run; a series exists before its first mismatch."""
    of = {"device": "GPU-1", "probe": "exact_matmul"}
    with Store.open(tmp_path, now=clock) as store:
        store.add_run(run("a", comparisons=(comparison(trials=8),)))
        assert store.counters()["probe_mismatches", frozenset(of.items())] == 0
        store.add_run(failure("b"))
        store.add_run(run("c", outcome=Outcome.TIMED_OUT))
        count(store, "odd", 0.5, text="a=b&c d\n", empty="")
        passed(store, NOW + 1000 * DAY)
        store.prune(NOW + 1000 * DAY)
        assert [r.id for r in store.runs()] == ["c"]  # the newest of all stays
    with Store.open(tmp_path, now=clock) as store:
        assert counter(store, "probe_runs", **of, outcome="completed") == 2
        assert counter(store, "probe_runs", **of, outcome="timed_out") == 1
        assert counter(store, "probe_mismatches", **of) == 1
        assert counter(store, "probe_trials", **of) == 12
        assert counter(store, "odd", text="a=b&c d\n", empty="") == 0.5
