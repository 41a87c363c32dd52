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


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_seed_same_bytes(name):
    """A problem is a function of its arguments."""
    one, two, other = build(name, 256, 5), build(name, 256, 5), build(name, 256, 6)
    for a, b in zip((*one.operands, one.golden), (*two.operands, two.golden), strict=True):
        assert host_same_bits(a, b)
    assert not host_same_bits(one.golden, other.golden)


@pytest.mark.parametrize("name", ["sort", "topk"])
def test_order_is_decided_by_unique_keys(name):
    """Ties would have more than one right answer: there are none."""
    values = build(name, 4096, 3).operands[0].tolist()
    assert len(set(values)) == len(values)


def test_scatter_writes_every_place_once_and_index_add_meets_every_target():
    """No order of writes matters: places are a permutation, and sums are of integers."""
    assert sorted(build("scatter", 512, 2).operands[1].tolist()) == list(range(512))
    assert set(build("index_add", 4096, 2).operands[1].tolist()) == set(range(512))


def test_modulo_covers_negative_numbers_and_the_modulus_one():
    """The sign convention is Python's, on operands of both signs."""
    values, by = build("modulo", 4096, 2).operands
    assert bool((values < 0).any())
    assert bool((values > 0).any())
    assert int(by.min()) >= 1
    assert int(values.abs().max()) > 1 << 61


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
