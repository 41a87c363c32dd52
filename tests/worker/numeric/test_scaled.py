"""Products with scales: what is stored stands for the golden in whole numbers, and a wrong scale is a wrong result."""

import itertools
from dataclasses import replace

import pytest

from canaryd.facts import Comparison, Skipped
from canaryd.probe import Context
from canaryd.worker.numeric import scaled
from canaryd.worker.numeric.cases import refusal
from canaryd.worker.numeric.reproducer import exhibit
from canaryd.worker.numeric.stack import cpu, discover
from canaryd.worker.numeric.tensors import FORMATS, host_same_bits, upload
from canaryd.worker.numeric.verify import verify_all
from canaryd.worker.runtime import interface
from probes import exact_matmul
from tests.worker.numeric.cuda import HOPPER, MI300X, fake, stand_in

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

SIZES = (16, 256, 384)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UNIT = 20
"""What every operand stands for is a whole number of 2**-UNIT."""


def scaling_of(case):
    return scaled.SCALINGS[case.name.partition(">")[0].partition("-")[2]]


def target_of(case):
    return FORMATS[case.name.partition("/")[0].partition(">")[2]].dtype


def unscaled(side):
    """Return the values of an operand by rows (rows, K), float64; FP4 is decoded from its codes."""
    if side.dtype is not torch.uint8:
        return side.to(torch.float64)
    codes = torch.stack([side & 15, side >> 4], -1).flatten(1).to(torch.int64)
    return torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.float64)[codes]


def table_of(scaling, scales, name, rows, blocks):
    """Return the scales of an operand (rows, blocks), float64, from where torch and cuBLAS say that they lie."""
    if scaling.code is None:
        table = (scales if name == "a" or (scaling.block and not scaling.square) else scales.mT).to(torch.float64)
        return table[:, :blocks].repeat_interleave(rows // len(table), 0)
    row, block = torch.arange(rows).view(-1, 1), torch.arange(blocks).view(1, -1)
    tile = row // 128 * -(-blocks // 4) + block // 4
    raw = scales[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    if scaling.block == 16:
        return raw.view(torch.float8_e4m3fn).to(torch.float64)
    return 2.0 ** (raw.to(torch.float64) - 127)


def decoded(case, operands):
    """Return what the operands stand for, by rows: A (M, K) and B (N, K), float64."""
    scaling = scaling_of(case)
    a, b, scale_a, scale_b, *whole = operands
    found = []
    for name, side, scales, every in zip("ab", (a, b.mT), (scale_a, scale_b), whole or (1.0, 1.0), strict=True):
        values = unscaled(side)
        block = scaling.block or values.shape[1]
        table = table_of(scaling, scales, name, len(values), values.shape[1] // block)
        found.append(values * table.repeat_interleave(block, 1) * float(every))
    return found


def reference(case, operands):
    """Return the result of a case, computed in whole numbers on the host and rounded once."""
    sides = [side * 2.0**UNIT for side in decoded(case, operands)]
    assert all(bool((side == side.round()).all()) for side in sides)
    left, right = (side.to(torch.int64) for side in sides)
    assert float((sides[0].abs() @ sides[1].abs().mT).max()) < 2.0**62
    return ((left @ right.mT).to(torch.float64) * 4.0**-UNIT).to(target_of(case))


def cases(device=None, contents=scaled.DRAWN, kind="decode"):
    """Return a case of each scaling, format of results and content."""
    every = itertools.product(scaled.pairs(device or cpu()), contents)
    return [scaled.case(device or cpu(), *pair, content, kind, SIZES) for pair, content in every]


def title(case):
    return case.name.partition("@")[0]


@pytest.mark.parametrize("case", cases(), ids=title)
def test_what_is_stored_stands_for_the_golden(case):
    """For several seeds: the golden is the product in whole numbers, rounded at most once, and never 0."""
    for seed in range(1, 4):
        problem = case.build(seed)
        assert host_same_bits(reference(case, problem.operands), problem.golden)
        assert problem.witnessed
        assert bool((problem.golden != 0).all())


@pytest.mark.parametrize("case", cases(contents=("dense",)), ids=title)
def test_rows_and_blocks_have_many_scales(case):
    """No two neighbouring rows, columns or blocks have the same scales throughout."""
    scaling = scaling_of(case)
    operands = case.build(1).operands
    for name, side, scales in zip("ab", (operands[0], operands[1].mT), operands[2:4], strict=True):
        blocks = SIZES[2] // (scaling.block or SIZES[2])
        table = table_of(scaling, scales, name, len(side), blocks)
        step = 128 if scaling.square and name == "b" else 1
        assert not bool((table[step:] == table[:-step]).all())
        assert blocks == 1 or bool((table[:, 1:] != table[:, :-1]).any())


@pytest.mark.parametrize("scaling", scaled.SCALINGS.values(), ids=lambda scaling: scaling.name)
def test_values_fill_their_format(scaling):
    """Over many seeds: every code of FP4 but zero's, and normal numbers of FP8 from small to large."""
    seen = [set(), set()]
    for content, seed in itertools.product(("dense", "full"), range(1, 21)):
        a, b = scaled.case(cpu(), scaling, "bfloat16", content, "decode", SIZES).build(seed).operands[:2]
        for sizes, side in zip(seen, (a, b.mT), strict=True):
            sizes |= set(unscaled(side).abs().unique().tolist())
    for sizes in seen:
        if scaling.source.startswith("float4"):
            assert sizes >= set(FP4[1:])
        else:
            assert max(sizes) == 240
            assert min(sizes - {0.0}) <= 2.0**-5


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


def wrong_by(case, change=lambda _: None, drill=""):
    """Return whether a kernel is found to be wrong that gets operands changed by `change`, in place.

    The kernel is the processor's own; where it has none, it is a product in float64 of what the operands stand for.
    """

    def compute(operands, out):
        changed = tuple(operand.clone() for operand in operands)
        change(changed)
        if not scaling_of(case).block:
            return case.compute(changed, out)
        left, right = decoded(case, changed)
        return (left @ right.mT).to(target_of(case))

    return any(f.wrong for f in compared(verify_all(context(drill=drill), [replace(case, compute=compute)], [], None)))


@pytest.mark.parametrize("case", [c for c in cases(contents=("full",)) if ">bfloat16" in c.name], ids=title)
@pytest.mark.parametrize("side", [0, 1])
def test_a_kernel_that_takes_another_scale_is_wrong(case, side):
    """One scale is another power of two, or each is its neighbour's; a kernel with the right ones is right."""
    if not side:
        assert not wrong_by(case)
        assert wrong_by(case, drill="stuck")

    def one(operands):
        code, scales = scaling_of(case).code, operands[2 + side]
        if code is None:
            scales[0, 0] *= 2
        else:
            scales[0] ^= 1 << code[1]

    def all_moved(operands):
        scales = operands[2 + side]
        scales.copy_(scales.roll(1, int(scales.shape[0] == 1)))

    assert wrong_by(case, one)
    assert wrong_by(case, all_moved)


def test_a_scale_of_all_that_is_lost_is_a_wrong_result():
    """NVFP4 has two: of all of A, and of all of B."""
    (case,) = (c for c in cases(contents=("full",)) if "nvfp4>float32" in c.name)
    for at in (4, 5):
        assert wrong_by(case, lambda operands, at=at: operands[at].mul_(2))


def test_they_cost_quick_nothing_and_deep_has_all():
    """Standard has one case for each label, and other ones with another seed; every case can be asked for by name."""
    labels = {scaled.label_of(cpu(), *pair) for pair in scaled.pairs(cpu())}
    speeds = dict.fromkeys(labels, 0.0)
    standard, deep = (
        [c.name for c in scaled.fresh_cases(context(level=level), speeds)] for level in ("standard", "deep")
    )
    assert len(standard) == len(labels)
    assert len(deep) == len(labels) * len(scaled.DRAWN) * len(scaled.KINDS)
    assert deep[0] in {c.name for c in scaled.fresh_cases(context(deep[0]), speeds)}
    quick = list(exact_matmul.run(context(level="quick")))
    assert not any(label in f.case for f in quick if isinstance(f, Comparison | Skipped) for label in labels)


def test_what_a_device_lacks_is_named_as_not_tested():
    """Scales of blocks on a processor: one reason for all of them, and nothing is compared."""
    labels = [scaled.label_of(cpu(), *pair) for pair in scaled.pairs(cpu()) if pair[0].block]
    facts = list(exact_matmul.run(context("float8_e4m3fn-rowwise>bfloat16/dense/decode/nt", *labels)))
    skipped = [f for f in facts if isinstance(f, Skipped) and "for NVIDIA GPUs" in f.reason]
    assert [f.case for f in skipped] == labels
    (reason,) = {f.reason for f in skipped}
    assert reason.endswith("does not support it: products with scales of blocks are for NVIDIA GPUs alone")
    assert not any(f.case.startswith(label) for f in compared(facts) for label in labels)


def test_a_kernel_that_fails_is_not_taken_for_a_missing_one(monkeypatch):
    """Only what torch says about support leaves a format out."""

    def broken(*_, **__):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        list(exact_matmul.run(context("float8_e4m3fn-rowwise>bfloat16")))


@pytest.mark.filterwarnings("ignore:.*Triggered internally")
@pytest.mark.parametrize("kind", scaled.KINDS)
def test_torch_takes_the_operands_on_a_gpu(monkeypatch, kind):
    """By torch's own checks of their formats, shapes and strides for CUDA; so do the scripts that repeat a case.

    Of MXFP4 torch's fake kernel counts bytes instead of codes, and wants half of the scales that the real one wants.
    """
    stand_in(monkeypatch, torch)
    for case in cases(HOPPER, contents=("dense",), kind=kind):
        made = exhibit("exact_matmul", case.name, 1, HOPPER)
        golden = made.problem.golden
        with fake(torch):
            operands = upload(made.problem.operands, HOPPER)
            named = {"torch": torch, **dict(zip(made.names, operands, strict=True))}
            for compute in (
                lambda operands=operands, case=case: case.compute(operands, None),
                lambda made=made, named=named: eval(made.compute, named),
            ):
                if "mxfp4" in case.name:
                    with pytest.raises(RuntimeError, match=r"must have 1024 \(got: 1536\) and scale_b must have 2048"):
                        compute()
                else:
                    result = compute()
                    assert (result.shape, result.dtype) == (golden.shape, golden.dtype)


def test_an_instinct_is_refused_aloud(monkeypatch):
    """Its FP8 has other names, and torch wants its scales of blocks in another order."""
    stand_in(monkeypatch, torch)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    made = cases(MI300X, contents=("dense",))
    assert {case.name.partition("-")[0] for case in made} == {"float8_e4m3fnuz", "float4_e2m1fn"}
    for case in made:
        if scaling_of(case).block:
            operands = case.build(1).operands
            with fake(torch), pytest.raises(NotImplementedError, match="for NVIDIA GPUs alone"):
                case.compute(upload(operands, MI300X), None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", scaled.SCALINGS)
@pytest.mark.parametrize("sizes", [SIZES, (512, 1024, 2048)], ids=str)
def test_a_gpu_is_right_and_a_wrong_scale_is_not(name, sizes):
    """Or torch says that the GPU has no such product, which is the reason why this is skipped."""
    gpu = next(d for d in discover()[0] if d.backend in ("cuda", "rocm"))
    refused = []
    for target, content in itertools.product(scaled.SCALINGS[name].targets, scaled.DRAWN):
        case = scaled.case(gpu, scaled.SCALINGS[name], target, content, "prefill", sizes)
        problem = case.build(1)
        if why := refusal(gpu, problem, case.compute):
            refused.append(f"{case.name}: {why}")
            continue
        operands = upload(problem.operands, gpu)
        with interface.of(gpu).strict(gpu):
            assert host_same_bits(case.compute(operands, None).cpu(), problem.golden), case.name
            scales = operands[2]
            scales.copy_(scales.roll(1, 0))
            assert not host_same_bits(case.compute(operands, None).cpu(), problem.golden), case.name
    if refused:
        pytest.skip("; ".join(refused))
