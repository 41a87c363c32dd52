"""Attention with one right answer: recomputed from its definition, and the same through orders, blocks and kernels."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.facts import Exactness
from canaryd.worker.numeric import attention
from canaryd.worker.numeric.attention import CONTENTS, GAP, GAP_FLOAT64, MASKS, Attention, build
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.tensors import FORMATS, host_same_bits

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

FORMS = ("float64", "float32", "bfloat16", "float16")
# (B, H, G, L, S, D): square, grouped, decode, odd sizes with more queries than keys.
SIZES = [(1, 2, 2, 24, 24, 64), (1, 4, 2, 9, 33, 64), (2, 2, 1, 1, 80, 32), (1, 1, 1, 40, 19, 96)]


def check(maker, problem, spec):
    """Recompute the answer from the definition, and assert what every golden promises."""
    assert problem.witnessed
    wanted = Exactness.UNIVERSAL if problem.golden.element_size() > 2 else Exactness.ROUNDED
    assert problem.exactness is wanted
    size = problem.golden.to(torch.float64).abs()
    assert bool(torch.isfinite(size).all())
    assert float(size.min()) >= 2.0**spec.form.emin
    for tensor in problem.operands[:3]:
        size = tensor.to(torch.float64).abs()
        assert bool((torch.isfinite(size) & ((size == 0) | (size >= 2.0**spec.form.emin))).all())
    assert maker.raw_of(problem.golden) == maker.attention(problem, causal=spec.mask == "causal"), spec


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f in ("float32", "bfloat16") else pytest.mark.slow) for f in FORMS]
)
def test_golden_is_what_the_definition_gives(maker, form, name, mask):
    """Scores are exactly 0 or vanish, winners are a power of two, and their mean is the golden, bit for bit."""
    for number, sizes in enumerate(SIZES):
        spec = Attention(name, FORMATS[form], mask, *sizes)
        problem = build(spec, 40 + number)
        check(maker, problem, spec)
        assert tuple(problem.operands[1].shape) == (sizes[0], sizes[2], sizes[4], sizes[5])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONTENTS)
def test_a_large_batch_repeats_two_sequences(maker, name, mask):
    """Each is right by the definition, both occur, and their order is random: a unit that mixes them up is wrong."""
    spec = Attention(name, FORMATS["float32"], mask, 9, 2, 1, 9, 33, 64)
    problem = build(spec, 40)
    check(maker, problem, spec)
    assert (problem.shape, problem.operations) == (spec.shape, 4 * 9 * 2 * 9 * 33 * 64)
    assert len({tuple(maker.raw_of(values)) for values in problem.operands[2]}) == 2


@given(
    form=st.sampled_from(FORMS),
    name=st.sampled_from(CONTENTS),
    mask=st.sampled_from(MASKS),
    L=st.integers(1, 20),
    S=st.integers(1, 70),
    D=st.integers(8, 130),
    seed=st.integers(0, (1 << 63) - 1),
)
@settings(max_examples=80)
def test_any_size_is_right_or_refused(maker, form, name, mask, L, S, D, seed):
    """Any lengths and head dimension: the definition's answer, or `Inexact` where codes or groups have no room."""
    spec = Attention(name, FORMATS[form], mask, 1, 2, 1, L, S, D)
    try:
        problem = build(spec, seed)
    except Inexact:
        assert S < 18 or D < 2 * 7, spec
        return
    check(maker, problem, spec)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONTENTS)
def test_losing_scores_vanish_with_room_to_spare(form, name):
    """Every losing score is at most -gap after scaling, also when query and key were rounded after scaling apart."""
    for D in (32, 64, 80, 96, 128, 256):
        problem = build(Attention(name, FORMATS[form], "none", 1, 2, 2, 8, 200, D), 3)
        query, key = (t.to(torch.float64) for t in problem.operands[:2])
        scores = query @ key.transpose(-1, -2) / math.sqrt(D)
        gap = GAP_FLOAT64 if form == "float64" else GAP
        losing = scores[scores != 0]
        assert float(losing.max()) <= -gap * (1 - 2.0**-40)
        assert float(losing.min()) >= -attention.LARGEST_SCORE or form == "float64"
        # The composite kernel scales query and key by the root of the scale, each rounded to the format.
        root = torch.tensor(D**-0.25, dtype=torch.float64)
        parts = [(t * root.to(problem.golden.dtype)).to(torch.float64) for t in problem.operands[:2]]
        apart = parts[0] @ parts[1].transpose(-1, -2)
        assert bool(((apart == 0) == (scores == 0)).all())
        assert float(apart[apart != 0].max()) <= (-746.0 if form == "float64" else -104.0)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("form", ["float64", "float32"])
def test_no_block_size_or_order_changes_a_bit(form, name):
    """Online softmax written out, over blocks of any size and keys in any order, ends in the golden's bits."""
    problem = build(Attention(name, FORMATS[form], "none", 1, 2, 2, 12, 100, 64), 6)
    query, key, value, _ = problem.operands
    generator = torch.Generator().manual_seed(1)
    for block in (1, 7, 32, 100):
        order = torch.randperm(100, generator=generator)
        k, v = key[:, :, order], value[:, :, order]
        best = torch.full((1, 2, 12, 1), -torch.inf, dtype=query.dtype)
        total, out = torch.zeros_like(best), torch.zeros_like(problem.golden)
        for low in range(0, 100, block):
            scores = query @ k[:, :, low : low + block].transpose(-1, -2) / 8.0
            top = torch.maximum(best, scores.amax(-1, keepdim=True))
            weight, keep = torch.exp(scores - top), torch.exp(best - top)
            total = total * keep + weight.sum(-1, keepdim=True)
            out = out * keep + weight @ v[:, :, low : low + block]
            best = top
        assert host_same_bits(out / total, problem.golden)


def parted(query, key, value, size):
    """Return attention as kernels compute it that share the keys out: each part is normalised on its own, in float32.

    A part's weight comes from the logarithm of its sum. CUDA's `__logf` errs by 3 units in the last place (CUDA C++
    Programming Guide, "Intrinsic Functions"), 2**-21.4 for a sum of three: here every other part by 2**-21.
    """
    query, key, value = (t.to(torch.float32) for t in (query, key, value))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    outs, logs = [], []
    for keys, values in zip(key.split(size, 2), value.split(size, 2), strict=True):
        scores = query @ keys.mT * query.shape[-1] ** -0.5
        outs.append(torch.softmax(scores, -1) @ values)
        logs.append(torch.logsumexp(scores, -1, keepdim=True))
    weights = torch.softmax(torch.stack(logs), 0)
    weights[weights < 1] *= 1 + 2**-21
    weights[1::2][weights[1::2] < 1] *= 1 - 2**-20
    return sum(weight * out for weight, out in zip(weights, outs, strict=True))


@pytest.mark.parametrize("form", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_kernel_that_shares_the_keys_out_gives_the_golden(form, content):
    """FlashAttention does so where rows and heads leave SMs idle: what it rounds must not reach 16 bits."""
    for seed in range(4):
        problem = build(Attention(content, FORMATS[form], "none", 1, 8, 2, 96, 200, 128), seed)
        found = parted(*problem.operands[:3], 128).to(problem.golden.dtype)
        assert host_same_bits(found, problem.golden), seed
