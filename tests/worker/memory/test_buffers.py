"""Sweeps of memory through WebGPU: clean is clean, every fault is found and told from the others.

The buffers here are those of a software renderer, so the memory is the host's; the shaders and what is read back are
WebGPU's own.
"""

import pytest

from canaryd.facts import Cell, Comparison, Reading
from canaryd.probe import Context, Skip
from canaryd.worker.memory import sweep
from canaryd.worker.memory.slices import ROW, TILE
from canaryd.worker.runtime import interface

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = [pytest.mark.torch, pytest.mark.runtimes]

ROWS = 20
PATTERNS = ("address", "inversions", "random", "retention")


@pytest.fixture(scope="module")
def device():
    """The first adapter."""
    pytest.importorskip("wgpu", reason="wgpu is not installed in this interpreter")
    try:
        return interface.named("webgpu").devices()[0]
    except Skip as why:
        pytest.skip(str(why))


def context(device, *cases, drill="", seed=11, **more):
    return Context(device=device, level="quick", seed=seed, budget=60.0, cases=cases, drill=drill, **more)


def swept(ctx, rows=ROWS):
    """The comparisons of a sweep: those that are wrong by pattern, those that are right."""
    found = [f for f in sweep.sweep_memory(ctx, rows * ROW, 0.001) if isinstance(f, Comparison)]
    return {c.case.split("/")[1]: c for c in found if c.wrong}, [c for c in found if not c.wrong]


@pytest.mark.parametrize("rows", [1, 129])
def test_clean_memory_is_clean(device, rows):
    """Every pattern, in one group of rows and in two."""
    wrong, right = swept(context(device), rows)
    assert wrong == {}
    assert sorted(c.case for c in right) == [f"int64/{name}/sweep@{rows * TILE}" for name in PATTERNS]


def test_a_drill_is_found(device):
    """As through torch: the kind of the cell; it has no address."""
    for seed in (1, 2):
        wrong, right = swept(context(device, drill="flip", seed=seed))
        assert {Cell(kind) for c in wrong.values() for kind in c.evidence.memory.cells} == {Cell.STUCK}
        assert len(wrong) + len(right) == len(PATTERNS)
        for c in wrong.values():
            assert c.evidence.memory.address is None
            assert "virtual address unknown" in c.evidence.pattern


def test_a_fault_below_the_sweep_is_found(device, monkeypatch):
    """Every dispatch leaves one bit at 1. The sweep is not told, and names the word and the bit."""
    runtime, held = interface.of(device), []
    allocate, compute = sweep.allocate, runtime.compute
    monkeypatch.setattr(sweep, "allocate", lambda *given: held.extend(allocate(*given)) or held)

    def stuck(shader, count, more, *buffers):
        compute(shader, count, more, *buffers)
        if held and buffers[-1] is held[0].words:
            held[0].flat[54321] = held[0].flat[54321] | 1 << 40

    monkeypatch.setattr(runtime, "compute", stuck)
    wrong, _ = swept(context(device))
    assert set(wrong) >= {"inversions", "retention"}
    for c in wrong.values():
        assert c.evidence.memory.cells == {"stuck": 1}
        assert [index for index, _, _ in c.evidence.first] == [(54321,)]
        assert dict(c.evidence.bits) == {"40": 1}


def test_slices_stay_within_what_the_adapter_binds(device, monkeypatch):
    """In slices of at most 256 MiB and the adapter's limit; 1 GiB where the runtime tells no free memory."""
    monkeypatch.setattr(sweep, "LARGEST", 4 * ROW)
    assert [m.rows for m in sweep.allocate(context(device), 6 * ROW)] == [4, 2]
    monkeypatch.setattr(type(interface.of(device)), "largest", property(lambda _: 3 * ROW))
    monkeypatch.setattr("canaryd.worker.memory.buffers.AT_ONCE", 2)
    assert [m.rows for m in sweep.allocate(context(device), 6 * ROW)] == [3, 3]
    facts = list(sweep.sweep_memory(context(device), 6 * ROW, 0.001))
    assert {f.name: f.value for f in facts if isinstance(f, Reading)}["memory_swept_bytes"] == 6 * ROW
