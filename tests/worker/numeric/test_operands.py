"""Exact products: the bound holds and is refused when broken, and the golden is what integers say it is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.facts import Exactness
from canaryd.worker.numeric import operands
from canaryd.worker.numeric.integers import significant_bits
from canaryd.worker.numeric.operands import CONTENTS, Bound, Inexact, Product, build, build_int8
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.tensors import FORMATS, flat_bits, host_same_bits

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

# (operands, result, accumulator bits): every pair of the matmul probe with every width a backend may have.
WIDTHS = [
    ("float64", "float64", 53),
    ("float32", "float32", 24),
    *(("tfloat32", "float32", bits) for bits in (24, 22, 8)),
    *(("bfloat16", target, bits) for target in ("bfloat16", "float32") for bits in (24, 22, 8)),
    *(("float16", target, bits) for target in ("float16", "float32") for bits in (24, 22, 11)),
    ("float8_e4m3fn", "bfloat16", 13),
    ("float8_e4m3fn", "float32", 13),
    ("float8_e5m2", "bfloat16", 13),
]
SHAPES = [(1, 1, 32), (5, 3, 17), (16, 24, 64), (33, 7, 100), (2, 40, 257)]


def named(width, name, M, N, K, batch=0, layout="nn"):
    source, target, bits = width
    return Product(name, FORMATS[source], FORMATS[target], bits, M, N, K, batch, layout)


def title(width):
    return f"{width[0]}>{width[1]}/{width[2]}"


def pools_of(product, seed):
    """The integer pools of a product, as `build` draws them."""
    most = max(1, product.batch)
    P, Q = min(operands.POOL, product.M * most), min(operands.POOL, product.N * most)
    return CONTENTS[product.content](product, seed, P, Q)


def check_golden(problem, product):
    """Assert what every golden promises: finite, normal, no zero; operands finite, normal or zero."""
    size = problem.golden.to(torch.float64).abs()
    assert bool(torch.isfinite(size).all())
    assert float(size.min()) >= 2.0**product.target.emin
    for tensor in problem.operands:
        size = tensor.to(torch.float64).abs()
        assert bool(torch.isfinite(size).all())
        assert bool(((size == 0) | (size >= 2.0**product.source.emin)).all())
    assert problem.witnessed
    assert problem.bound.magnitude < problem.bound.limit == 1 << product.accumulator


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("width", WIDTHS, ids=title)
def test_golden_is_what_plain_integers_give(maker, width, name):
    """Every content, format and accumulator width: bit for bit the big-integer recomputation, for several shapes."""
    for number, (M, N, K) in enumerate(SHAPES):
        product = named(
            width, name, M, N, K, batch=3 if number == 1 else 0, layout=("nn", "nt", "tn", "tt")[number % 4]
        )
        problem = build(product, 100 + number)
        check_golden(problem, product)
        wanted = maker.product(problem, product.source.bits)
        assert maker.raw_of(problem.golden) == wanted, product
        pools = pools_of(product, 100 + number)
        is_universal = significant_bits(pools.a @ pools.b) <= product.target.bits
        assert problem.exactness is (Exactness.UNIVERSAL if is_universal else Exactness.ROUNDED)


@given(
    width=st.sampled_from(WIDTHS),
    name=st.sampled_from(list(CONTENTS)),
    sizes=st.tuples(*(st.integers(1, 300) for _ in "MNK")),
    batch=st.sampled_from([0, 0, 2]),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    seed=st.integers(0, (1 << 63) - 1),
)
@settings(max_examples=40)
def test_no_zero_subnormal_or_nonfinite_golden_for_any_size(width, name, sizes, batch, layout, seed):
    """Any M, N, K from 1 to 300: a problem keeps its promises, or is refused aloud where K leaves no room."""
    product = named(width, name, *sizes, batch, layout)
    try:
        problem = build(product, seed)
    except Inexact:
        assert product.K < 8, product  # a few live products often cancel, and one cannot cancel at all
        return
    check_golden(problem, product)
    assert tuple(problem.golden.shape[-2:]) == (product.M, product.N)
    assert [tuple(t.shape[-2:]) for t in problem.operands] == [(product.M, product.K), (product.K, product.N)]
    for tensor, how in zip(problem.operands, layout, strict=True):
        assert (tensor.transpose(-1, -2) if how == "t" else tensor).is_contiguous()


def test_bound_refuses_what_might_round():
    """A sum of magnitudes at or above 2**bits is refused, one below it is not."""
    assert Bound(255, 256).magnitude == 255
    with pytest.raises(Inexact, match="partial sums reach 256, the accumulator is exact below 256"):
        Bound(256, 256)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("width", [w for w in WIDTHS if w[2] in (53, 24, 13)], ids=title)
def test_no_order_of_summation_changes_a_bit(width, name):
    """Random orders and splits of the products, added in the accumulator's own type, end in the golden's bits."""
    product = named(width, name, 24, 20, 96)
    problem = build(product, 21)
    work = torch.float64 if product.source.name == "float64" else torch.float32
    a, b = (t.to(work) for t in problem.operands)
    terms = a.unsqueeze(-1) * b  # (M, K, N), each product exact in `work`
    exact = a.to(torch.float64).unsqueeze(-1) * b.to(torch.float64)
    assert bool((terms.to(torch.float64) == exact).all())
    generator = torch.Generator().manual_seed(mix64(4) >> 1)
    for _ in range(6):
        shuffled = terms[:, torch.randperm(product.K, generator=generator)]
        cuts = sorted({0, product.K, *torch.randint(1, product.K, (5,), generator=generator).tolist()})
        total = torch.zeros_like(shuffled[:, 0])
        for low, high in itertools.pairwise(cuts):
            part = torch.zeros_like(total)
            for k in range(low, high):
                part = part + shuffled[:, k]  # one addition at a time, each rounded to `work`
            total = part + total
        assert host_same_bits(total.to(problem.golden.dtype), problem.golden)


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_int8_products_match_plain_integers(maker, name):
    """int8 goldens are the integer answer; narrow ones never saturate a pair of 16-bit products."""
    problem = build_int8(name, 17, 19, 64, "nt", 3)
    assert maker.raw_of(problem.golden) == maker.product(problem)
    if name == "narrow":
        assert int(problem.operands[1].abs().max()) <= operands.INT8_NARROW
        assert 2 * 255 * operands.INT8_NARROW < 1 << 15


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16"])
def test_every_bit_of_both_operands_is_moved(source):
    """Stuck at 0 or at 1, in A or in B: over a few seeds some live value has it otherwise, in every format."""
    contents = ("full", "permute", "scaled")
    pairs = [build(named((source, source, FORMATS[source].bits), c, 64, 64, 96), s) for c in contents for s in range(6)]
    fraction = FORMATS[source].bits - 1
    for side in (0, 1):
        values = torch.cat([p.operands[side].flatten() for p in pairs])
        live = flat_bits(values)[values != 0]
        for n in (*range(fraction), 8 * live.element_size() - 1):
            assert set((live >> n & 1).unique().tolist()) == {0, 1}, f"operand {'AB'[side]}, bit {n}"


@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16"])
def test_scaled_operands_differ_from_dense_ones_by_powers_of_two_along_every_axis(source):
    """On rows, on columns and along K: with equal exponents within a sum nothing is aligned."""
    width = (source, source, max(24, FORMATS[source].bits))
    scaled, dense = (build(named(width, content, 24, 20, 64), 5) for content in ("scaled", "dense"))
    for one, other in zip(scaled.operands, dense.operands, strict=True):
        mantissa, exponent = torch.frexp(one.to(torch.float64) / other.to(torch.float64))
        assert set(mantissa.view(-1).tolist()) == {0.5}
        assert len(set(exponent[0].tolist())) > 1
        assert len(set(exponent[:, 0].tolist())) > 1
