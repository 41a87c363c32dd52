"""Classes of exact cases that were met."""

from canaryd.formatting import DAY
from canaryd.judge.characterised import Met
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from tests.store.made import NOW, failure, junk, run


def met(device="GPU-1", stack="580", at=NOW, names=("bfloat16/full/square/nt",), **fields):
    """Return the classes that a device met on a stack."""
    classes = dict.fromkeys(names, at)
    common = {"kind": ("cuda", "H200"), "probe": "exact_matmul", "probe_version": 1, "stack": {"driver": stack}}
    return Met(device=device, classes=classes, used=at, **{**common, **fields})


def test_classes_that_were_met_are_merged_by_device_probe_and_stack(tmp_path):
    """Two processes add what each has seen: nothing is lost, and another driver is another record."""
    with Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        assert store.set_met([met(), met(stack="590")])
        assert other.set_met([met(names=("float16/full/decode/nn",), at=NOW + 60, accepted={"x": "shown to be exact"})])
        found = {m.line: m for m in store.met() if m.device == "GPU-1"}
        assert len(found) == 2
        both = found[met().line]
        assert set(both.classes) == {"bfloat16/full/square/nt", "float16/full/decode/nn"}
        assert (both.used, both.accepted) == (NOW + 60, {"x": "shown to be exact"})
        assert set(found[met(stack="590").line].classes) == {"bfloat16/full/square/nt"}


def test_classes_are_stored_with_the_run_that_met_them(tmp_path):
    """One transaction, and they survive the run."""
    clock = [NOW]
    with Store.open(tmp_path, now=lambda: clock[0], keep=Retention(successes=DAY)) as store:
        store.add_run(run("a"), met=[met()])
        store.add_run(run("b"))
        for hour in range(0, 2 * 24, 2):
            clock[0] = NOW + hour * 3600
            store.prune(clock[0])
        assert [r.id for r in store.runs()] == ["b"]
        assert [m.line for m in store.met()] == [met().line]


def test_classes_of_software_that_no_device_runs_any_more_go_with_the_failures(tmp_path):
    """What was imported or accepted stays: nobody could learn it again here."""
    clock = [NOW]
    with Store.open(tmp_path, now=lambda: clock[0], keep=Retention(failures=3 * DAY)) as store:
        store.set_met([met(), met("GPU-2", imported=True), met("GPU-3", accepted={"x": "shown"})])
        for hour in range(0, 4 * 24, 2):
            clock[0] = NOW + hour * 3600
            store.prune(clock[0])
        assert {m.device for m in store.met()} == {"GPU-2", "GPU-3"}


def test_classes_wait_in_memory_while_the_disk_refuses(store, tmp_path):
    """They are part of every answer, and are merged with those on disk when it can be written again."""
    assert store.set_met([met()])
    (pages,) = store._file.execute("PRAGMA page_count").fetchone()
    store._file.execute(f"PRAGMA max_page_count = {pages}")
    while store.add_run(failure(f"new-{pages}", detail=junk(3000).hex())):
        pages += 1
    assert not store.set_met([met(names=("float32/full/square/nt",))])
    assert set(store.met()[0].classes) == {"bfloat16/full/square/nt", "float32/full/square/nt"}
    store._file.execute("PRAGMA max_page_count = 1000000")
    store.close()
    with Store.open(tmp_path / "state") as again:
        assert set(again.met()[0].classes) == {"bfloat16/full/square/nt", "float32/full/square/nt"}
