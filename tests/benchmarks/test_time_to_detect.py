"""The core that errs in `benchmarks.time_to_detect`: only there, as often as it says."""

import pytest

from benchmarks.time_to_detect import OneCore
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import can_pin, on_core, same_bits, visible_cores
from canaryd.worker.runtime.interface import Operation

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

MATMUL = Operation("matmul", "float32", "float32")


def wrong(runtime, count, core=None):
    """How many of so many products were wrong."""
    operands = runtime.upload((torch.eye(4), torch.eye(4)), cpu())
    with on_core(core):
        return sum(not same_bits(runtime.run(MATMUL, operands, None), torch.eye(4)) for _ in range(count))


def test_it_errs_at_its_rate():
    """4000 products at 1 in 20: 200, give or take five standard deviations."""
    runtime = OneCore(5, visible_cores()[0], 0.05)
    assert 131 <= wrong(runtime, 4000) == runtime.struck <= 269
    assert runtime.computed == runtime.products == 4000


def test_only_products_of_its_core_err():
    """Of those on all cores together it takes part."""
    first, *others = visible_cores()
    if not others or not can_pin():
        pytest.skip("this machine has one core, or does not let a process choose its core")
    runtime = OneCore(5, first, 0.5)
    assert (wrong(runtime, 50, others[0]), runtime.products, runtime.computed) == (0, 0, 50)
    assert wrong(runtime, 50, first) > 0
    assert wrong(runtime, 50) > 0


def test_a_computed_product_may_stand_for_many():
    """At 1 in 10,000, where each stands for 100: 40 of 4000, give or take five standard deviations."""
    runtime = OneCore(5, visible_cores()[0], 1e-4, stands_for=100)
    assert 8 <= wrong(runtime, 4000) <= 72
    assert (runtime.computed, runtime.products) == (4000, 400_000)
