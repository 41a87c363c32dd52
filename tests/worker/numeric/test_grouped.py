"""Grouped products: each group of rows meets its own matrix, some are empty, and a wrong group is a wrong result."""

from dataclasses import replace

import pytest

from canaryd.facts import Comparison, Skipped
from canaryd.probe import Context
from canaryd.worker.numeric import grouped
from canaryd.worker.numeric.cases import refusal
from canaryd.worker.numeric.operands import CONTENTS
from canaryd.worker.numeric.stack import cpu, discover
from canaryd.worker.numeric.tensors import host_same_bits, upload
from canaryd.worker.numeric.verify import verify_all
from canaryd.worker.runtime import interface
from probes import exact_matmul
from tests.worker.numeric.cuda import DEVICES, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

SIZES = (5, 48, 32, 64)


def context(*wanted, drill="", level="standard", seed=11, budget=0.05):
    return Context(device=cpu(), level=level, seed=seed, budget=budget, cases=wanted, drill=drill)


def compared(facts):
    return [fact for fact in facts if isinstance(fact, Comparison)]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", grouped.KINDS)
def test_each_row_meets_the_matrix_of_its_group(content, kind):
    """For several seeds: the golden is the product in float64, which is exact here, and lengths differ from 0 up."""
    lengths = set()
    for seed in range(1, 9):
        problem = grouped.case(cpu(), content, kind, SIZES).build(seed)
        a, b, ends = problem.operands
        assert (a.shape, b.shape, ends.dtype, problem.golden.shape) == ((48, 64), (5, 64, 32), torch.int32, (48, 32))
        assert ends.tolist() == sorted(ends.tolist())
        assert int(ends[-1]) == 48
        first = 0
        for group, end in enumerate(ends.tolist()):
            right = a[first:end].to(torch.float64) @ b[group].to(torch.float64)
            assert host_same_bits(right.to(torch.bfloat16), problem.golden[first:end])
            lengths.add(end - first)
            first = end
        assert 0 in ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
        assert problem.witnessed
    assert len(lengths) > 8


@pytest.mark.parametrize("drill", ["", "flip", "stuck"])
def test_the_processor_is_right_and_an_injected_fault_is_not(drill):
    """In a run of the probe: no wrong result without a fault, and with one it is seen."""
    found = compared(exact_matmul.run(context("bfloat16-grouped/full/decode/nt", drill=drill)))
    assert found
    assert any(f.wrong for f in found) is bool(drill)


def wrong_by(change):
    """Return whether a kernel that gets operands changed by `change` is found to be wrong."""
    case = grouped.case(cpu(), "dense", "prefill", SIZES)
    broken = replace(case, compute=lambda operands, out: case.compute(change(*operands), out))
    return any(f.wrong for f in compared(verify_all(context(), [broken], [], None)))


def test_a_kernel_that_takes_another_group_is_wrong():
    """The next expert's matrix, a border that is one row off, or one group too few; with the right ones it is right."""
    assert not wrong_by(lambda a, b, ends: (a, b, ends))
    assert wrong_by(lambda a, b, ends: (a, b.roll(1, 0), ends))
    assert wrong_by(lambda a, b, ends: (a, b, (ends + (ends < 48).to(torch.int32))))
    assert wrong_by(lambda a, b, ends: (a, b, torch.cat([ends[:1], ends[:-2], ends[-1:]])))


def test_they_cost_quick_nothing_and_deep_has_all():
    """Standard has one case of each kind; every case can be asked for by name."""
    speeds = {grouped.LABEL: 0.0}
    standard, deep = (
        [c.name for c in grouped.fresh_cases(context(level=level), speeds)] for level in ("standard", "deep")
    )
    assert [name.split("/")[2] for name in standard] == list(grouped.KINDS)
    assert len(deep) == len(CONTENTS) * len(grouped.KINDS)
    assert deep[0] in {c.name for c in grouped.fresh_cases(context(deep[0]), speeds)}
    assert not list(grouped.fresh_cases(context(), {}))
    quick = list(exact_matmul.run(context(level="quick")))
    assert not any(grouped.LABEL in f.case for f in quick if isinstance(f, Comparison | Skipped))


@pytest.mark.filterwarnings("ignore:.*Triggered internally")
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.model)
def test_torch_takes_the_operands_on_a_gpu(monkeypatch, device):
    """By torch's own checks of their formats, shapes and strides for CUDA."""
    stand_in(monkeypatch, torch)
    problem = grouped.case(device, "dense", "prefill", SIZES).build(1)
    with fake(torch):
        result = grouped.case(device, "dense", "prefill", SIZES).compute(upload(problem.operands, device), None)
        assert (result.shape, result.dtype) == (problem.golden.shape, problem.golden.dtype)
        assert result.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SIZES, (8, 500, 1024, 2048)], ids=str)
def test_a_gpu_is_right_and_a_wrong_group_is_not(sizes):
    """Or torch says that the GPU has no such product, which is the reason why this is skipped."""
    gpu = next(d for d in discover()[0] if d.backend in ("cuda", "rocm"))
    for content in CONTENTS:
        case = grouped.case(gpu, content, "prefill", sizes)
        problem = case.build(1)
        if why := refusal(gpu, problem, case.compute):
            pytest.skip(why)
        a, b, ends = upload(problem.operands, gpu)
        with interface.of(gpu).strict(gpu):
            assert host_same_bits(case.compute((a, b, ends), None).cpu(), problem.golden), content
            assert not host_same_bits(case.compute((a, b.roll(1, 0), ends), None).cpu(), problem.golden), content
