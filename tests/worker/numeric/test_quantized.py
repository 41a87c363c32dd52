"""Products with quantised weights: what is stored stands for the golden, nothing rounds, and every code bit is live."""

import itertools
from dataclasses import replace

import pytest

from canaryd.facts import Exactness
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric import quantized
from canaryd.worker.numeric.tensors import FORMATS, host_same_bits
from canaryd.worker.runtime import interface

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PACKINGS = interface.named("mlx").packings
SIZES = (3, 128, 256)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def meant(problem, packing):
    """What the stored weights stand for, in float64, decoded from the bits as MLX's documentation says."""
    _, words, scales, *offsets = problem.operands
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(0, 32, packing.bits)
    codes = (unsigned.unsqueeze(-1) >> shifts & (1 << packing.bits) - 1).flatten(1)
    e4m3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    values = {"affine": codes.to(torch.float64), "mxfp8": e4m3[codes]}.get(packing.mode)
    values = FP4[codes & 15] if values is None else values
    steps = {"affine": lambda: scales.to(torch.float64), "nvfp4": lambda: e4m3[scales.to(torch.int64)]}
    step = steps.get(packing.mode, lambda: 2.0 ** (scales.to(torch.float64) - 127))()
    weights = values * step.repeat_interleave(packing.group, 1)
    return weights + offsets[0].to(torch.float64).repeat_interleave(packing.group, 1) if offsets else weights


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.name)
@pytest.mark.parametrize("form", quantized.FORMS)
def test_what_is_stored_stands_for_the_golden(packing, form):
    """In either layout: the golden is the product of what the bits mean, no weight is rounded, and no answer is 0."""
    for layout, seed in itertools.product(quantized.LAYOUTS, (1, 2)):
        problem = quantized.build(packing, FORMATS[form], layout, SIZES, seed)
        weights = meant(problem, packing)
        assert host_same_bits(weights.to(FORMATS[form].dtype).to(torch.float64), weights)
        answer = problem.operands[0].to(torch.float64) @ (weights.T if layout == "nt" else weights)
        assert host_same_bits(answer.to(FORMATS[form].dtype), problem.golden)
        assert host_same_bits(problem.golden.to(torch.float64), answer)
        assert problem.exactness is Exactness.UNIVERSAL
        assert problem.witnessed
        assert bool((problem.golden != 0).all())


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.name)
def test_every_bit_of_a_code_is_seen_with_both_values(packing):
    """Where a row of x reads a code, each of its bits is 0 for some and 1 for others; mxfp8 keeps four exponents."""
    problem = quantized.build(packing, FORMATS["float32"], "nt", SIZES, 1)
    words = problem.operands[1].to(torch.int64) & 0xFFFFFFFF
    fixed = {0b0110_0000} if packing.mode == "mxfp8" else set()
    for bit in range(packing.bits):
        seen = set((words >> bit & 1).view(-1).tolist())
        assert seen == {0, 1} or any(1 << bit & mask for mask in fixed), bit


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.name)
def test_one_flipped_bit_of_a_code_changes_an_answer(packing):
    """In every format of activations, at a place that a row of x reads."""
    for form in quantized.FORMS:
        problem = quantized.build(packing, FORMATS[form], "nt", SIZES, 3)
        x, words = problem.operands[:2]
        k = int(x[0].ne(0).nonzero()[0])
        for bit in range(packing.bits):
            changed = words.clone()
            at = k * packing.bits % 32 + bit
            changed[5, k * packing.bits // 32] ^= (1 << at) - (1 << 32 if at == 31 else 0)
            weights = meant(replace(problem, operands=(x, changed, *problem.operands[2:])), packing)
            assert float(x[0].to(torch.float64) @ weights[5]) != float(problem.golden[0, 5]), bit


def test_quick_runs_take_one_case_of_each_packing_and_all_of_them_in_turn():
    """Of twelve seeds in a row each has every packing once; together they have every format, kind and layout."""
    device = Device(uuid="mlx-1", backend="mlx-cpu", index=0, model="EPYC")
    labels = [quantized.label_of(*pair) for pair in quantized.pairs(device)]
    seen = set()
    for seed in range(12):
        context = Context(device=device, level="quick", seed=seed, budget=1.0)
        names = [case.name.partition("@")[0].split("/") for case in quantized.fresh_cases(context, labels)]
        assert [label.partition(">")[0] for label, *_ in names] == [packing.name for packing in PACKINGS]
        seen |= {(label, kind, layout) for label, _, kind, layout in names}
    assert seen == set(itertools.product(labels, quantized.KINDS, quantized.LAYOUTS))
