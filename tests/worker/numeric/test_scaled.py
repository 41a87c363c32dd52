"""Products with scales: what is stored stands for the golden in whole numbers, and a wrong scale is a wrong result."""

import itertools
from dataclasses import replace

import pytest

from canaryd.facts import Comparison, Skipped
from canaryd.probe import Context
from canaryd.worker.numeric import scaled
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, host_same_bits, upload
from canaryd.worker.numeric.verify import verify_all
from probes import exact_matmul
from tests.worker.numeric.cuda import HOPPER, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

SIZES = (16, 128, 256)
UNIT = 40
"""Every stored value, scale and answer is a whole number of 2**-UNIT, and fewer than 2**63 of them."""


def whole(values):
    """Return values as whole numbers of 2**-(UNIT / 2), int64; no rounding is allowed."""
    numbers = values.to(torch.float64) * 2.0 ** (UNIT / 2)
    assert bool((numbers == numbers.round()).all())
    return numbers.to(torch.int64)


def reference(operands):
    """Return the product of scaled operands by whole numbers alone, in units of 2**-UNIT, int64 (M, N)."""
    a, b, scale_a, scale_b = operands
    left, right = (whole(values.to(torch.float32) * scales) for values, scales in ((a, scale_a), (b, scale_b)))
    assert int((left.abs().to(torch.float64) @ right.abs().to(torch.float64)).max()) < 1 << 62
    return left @ right


def cases(device=None, contents=scaled.DRAWN, sizes=SIZES):
    """Return a case of each scaling, format of results and content."""
    device = device or cpu()
    every = itertools.product(scaled.pairs(device), contents)
    return [scaled.case(device, *pair, content, "decode", sizes) for pair, content in every]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name.partition("@")[0])
def test_what_is_stored_stands_for_the_golden(case):
    """For several seeds: the golden is the product in whole numbers, rounded at most once, and never 0."""
    target = FORMATS[case.name.partition("/")[0].partition(">")[2]].dtype
    for seed in range(1, 6):
        problem = case.build(seed)
        answer = reference(problem.operands).to(torch.float64) * 2.0**-UNIT
        assert host_same_bits(answer.to(target), problem.golden)
        assert problem.witnessed
        assert bool((problem.golden != 0).all())


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name.partition("@")[0])
def test_rows_and_columns_have_many_scales(case):
    """Of rows and of columns; and the values use small and large exponents of their format."""
    a, b, scale_a, scale_b = case.build(1).operands
    assert scale_a.shape == (SIZES[0], 1)
    assert scale_b.shape == (1, SIZES[1])
    assert len(set(scale_a.flatten().tolist())) > 5
    assert len(set(scale_b.flatten().tolist())) > 12
    sizes = torch.cat([t.to(torch.float32).abs().flatten() for t in (a, b)])
    assert float(sizes.max()) >= 32
    assert float(sizes[sizes > 0].min()) <= 0.25


def context(*wanted, drill="", level="standard", seed=11, budget=0.05):
    return Context(device=cpu(), level=level, seed=seed, budget=budget, cases=wanted, drill=drill)


def compared(facts):
    return [fact for fact in facts if isinstance(fact, Comparison)]


@pytest.mark.parametrize("drill", ["", "flip", "stuck"])
def test_the_processor_is_right_and_an_injected_fault_is_not(drill):
    """In a run of the probe: no wrong result without a fault, and with one it is seen."""
    found = compared(exact_matmul.run(context("float8_e4m3fn-rowwise>float32/dense/decode/nt", drill=drill)))
    assert found
    assert any(f.wrong for f in found) is bool(drill)


def wrong_by(case, change):
    """Return whether a kernel that gets operands changed by `change` is found to be wrong."""
    honest = case.compute
    broken = replace(case, compute=lambda operands, out: honest(change(*operands), out))
    return any(f.wrong for f in compared(verify_all(context(), [broken], [], None)))


@pytest.mark.parametrize("case", cases(contents=("full",)), ids=lambda case: case.name.partition("@")[0])
def test_a_kernel_that_takes_another_scale_is_wrong(case):
    """The next row's, the next column's, or none; and with the right ones it is right."""
    assert not wrong_by(case, lambda a, b, p, q: (a, b, p, q))
    assert wrong_by(case, lambda a, b, p, q: (a, b, p.roll(1, 0), q))
    assert wrong_by(case, lambda a, b, p, q: (a, b, p, q.roll(1, 1)))
    assert wrong_by(case, lambda a, b, p, q: (a, b, p, torch.ones_like(q)))


def test_they_cost_quick_nothing_and_deep_has_all():
    """Standard has one case for each label, and other ones with another seed; every case can be asked for by name."""
    labels = {scaled.label_of(cpu(), *pair) for pair in scaled.pairs(cpu())}
    speeds = dict.fromkeys(labels, 0.0)
    names = {
        level: [c.name for c in scaled.fresh_cases(context(level=level), speeds)] for level in ("standard", "deep")
    }
    assert len(names["standard"]) == len(labels)
    assert len(names["deep"]) == len(labels) * len(scaled.DRAWN) * len(scaled.KINDS)
    (again,) = (c.name for c in scaled.fresh_cases(context(names["deep"][0]), speeds) if c.name == names["deep"][0])
    assert again
    quick = list(exact_matmul.run(context(level="quick")))
    assert not any(label in f.case for f in quick if isinstance(f, Comparison | Skipped) for label in labels)


@pytest.mark.filterwarnings("ignore:.*Triggered internally")
def test_torch_takes_the_operands_on_a_gpu(monkeypatch):
    """By torch's own checks of their formats, shapes and strides for CUDA."""
    stand_in(monkeypatch, torch)
    for case in cases(HOPPER, contents=("dense",)):
        problem = case.build(1)
        with fake(torch):
            operands = upload(problem.operands, HOPPER)
            result = case.compute(operands, None)
            assert (result.shape, result.dtype) == (problem.golden.shape, problem.golden.dtype)
