"""Integer and index operations: each golden twice, each computation right, each element used."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.worker.numeric.indexing import OPERATIONS, build
from canaryd.worker.numeric.tensors import host_same_bits, strict_switches
from canaryd.worker.runtime.interface import Operation, named

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch


@given(
    name=st.sampled_from(list(OPERATIONS)),
    n=st.integers(2, 40).map(lambda k: 16 * k),
    seed=st.integers(0, (1 << 63) - 1),
)
@settings(max_examples=100)
def test_golden_and_result_are_what_plain_python_gives(maker, name, n, seed):
    """For any seed and size the golden, its plain recomputation and torch's own result have the same bits."""
    problem = build(name, n, seed)
    assert maker.raw_of(problem.golden) == maker.index_operation(problem, name)
    result = OPERATIONS[name][1](*problem.operands).contiguous()
    assert result.dtype == problem.golden.dtype
    assert host_same_bits(result, problem.golden)
    assert problem.bound.magnitude < 1 << 63


def test_integers_meet_the_kernels_that_serve(monkeypatch):
    """Held to deterministic algorithms, CUDA's torch sorts where it uses atomics otherwise; integers need no order."""
    held = []
    builder, compute = OPERATIONS["index_add"]

    def seen(*operands):
        held.append(torch.are_deterministic_algorithms_enabled())
        return compute(*operands)

    monkeypatch.setitem(OPERATIONS, "index_add", (builder, seen))
    problem = build("index_add", 256, 5)
    with strict_switches():
        result = named("torch").run(Operation("index_add"), problem.operands, None)
        assert torch.are_deterministic_algorithms_enabled()
    assert host_same_bits(result, problem.golden)
    assert held == [False]
