"""Exact products: the bound holds and is refused when broken, and the golden is what integers say it is."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canaryd.facts import Exactness
from canaryd.worker.numeric import operands
from canaryd.worker.numeric.integers import significant_bits
from canaryd.worker.numeric.operands import CONTENTS, Bound, Inexact, Pools, Product, build, build_int8
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
@settings(max_examples=120)
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


@pytest.mark.parametrize("width", [w for w in WIDTHS if w[2] <= 13], ids=title)
def test_narrow_accumulators_never_run_out_of_draws(width):
    """The redraw of rows with a zero answer succeeds for full pools where cancellation is likeliest."""
    for seed in range(12):
        build(named(width, "full", 128, 128, 48 + 7 * seed), seed)


def test_bound_refuses_what_might_round():
    """A sum of magnitudes at or above 2**bits is refused, one below it is not."""
    assert Bound(255, 256).magnitude == 255
    with pytest.raises(Inexact, match="partial sums reach 256, the accumulator is exact below 256"):
        Bound(256, 256)


@pytest.mark.parametrize("name", CONTENTS)
def test_pools_too_wide_for_the_accumulator_are_refused(monkeypatch, name):
    """Operands one bit wider than the accumulator allows do not become a problem."""
    honest = CONTENTS[name]

    def wide(product, seed, P, Q):
        pools = honest(product, seed, P, Q)
        return Pools(pools.a << product.accumulator, pools.b)

    monkeypatch.setitem(CONTENTS, name, wide)
    with pytest.raises(Inexact, match="partial sums reach"):
        build(named(("float32", "float32", 24), name, 8, 8, 64), 1)


def test_the_bound_is_measured_over_magnitudes_not_over_the_answer(monkeypatch):
    """Sums that leave the accumulator on the way and come back are refused, however small the answer."""

    def treacherous(product, seed, P, Q):
        a = torch.ones((P, product.K), dtype=torch.int64)
        b = torch.full((product.K, Q), 1 << 12, dtype=torch.int64)
        b[1::2] = -(1 << 12)
        b[0] += 1
        return Pools(a, b)

    monkeypatch.setitem(CONTENTS, "dense", treacherous)
    with pytest.raises(Inexact, match="partial sums reach"):
        build(named(("float32", "float32", 24), "dense", 4, 4, 1 << 13), 1)
    monkeypatch.setitem(CONTENTS, "dense", lambda *a: Pools(treacherous(*a).a, treacherous(*a).b >> 12 << 2))
    with pytest.raises(Inexact, match="an answer is zero"):
        build(named(("float32", "float32", 24), "dense", 4, 4, 1 << 13), 1)


def test_operands_outside_the_format_are_refused(monkeypatch):
    """An integer that its format cannot hold, finite or normal, is refused by range; none is rounded in silence."""
    narrow = FORMATS["float16"]
    monkeypatch.setitem(CONTENTS, "dense", lambda _p, _s, P, Q: _ones(P, Q, 1 << 40))
    with pytest.raises(Inexact):
        build(Product("dense", narrow, narrow, 53, 4, 4, 16), 1)


def _ones(P, Q, factor):
    return Pools(torch.ones((P, 16), dtype=torch.int64), torch.full((16, Q), factor, dtype=torch.int64))


def test_classes_are_what_they_claim():
    """Narrow results of dense sums are rounded once (R); results as wide as the accumulator are universal (U)."""
    for source, target, bits in WIDTHS:
        for name in CONTENTS:
            made = build(named((source, target, bits), name, 48, 48, 96), 3).exactness
            if FORMATS[target].bits >= bits or name in ("cancel", "permute"):
                assert made is Exactness.UNIVERSAL
            elif name in ("dense", "scaled") and bits == 24:
                assert made is Exactness.ROUNDED


@pytest.mark.parametrize("width", WIDTHS, ids=title)
def test_cancelling_sums_are_small_and_climb_through_the_accumulator(width):
    """Answers hold at most 8 significant bits; in order of K every sum climbs past 2**(bits - 3) and comes back.

    Operands of one or two bits, which accumulators below 22 bits leave, reach 2**(bits - 4).
    """
    for seed, K in ((5, 300), (6, 256), (7, 511)):
        product = named(width, "cancel", 40, 40, K)
        pools = pools_of(product, seed)
        assert significant_bits(pools.a @ pools.b) <= 8
        assert build(product, seed).exactness is Exactness.UNIVERSAL
        reached = (pools.a.unsqueeze(-1) * pools.b).cumsum(1).abs().amax(1)
        assert int(reached.min()) > 1 << (product.accumulator - (3 if product.accumulator >= 22 else 4))


def test_a_single_term_cannot_cancel():
    """K = 1 is refused with the reason."""
    with pytest.raises(Inexact, match="a single term cannot cancel"):
        build(named(WIDTHS[1], "cancel", 4, 4, 1), 1)


@pytest.mark.parametrize("name", CONTENTS)
def test_same_seed_same_bytes(name):
    """A problem is a function of its arguments; every seed gives other operands and another golden."""
    for width in WIDTHS[::3]:
        product = named(width, name, 24, 40, 64, 2, "nt")
        one, two, other = build(product, 8), build(product, 8), build(product, 9)
        for a, b, c in zip(
            (*one.operands, one.golden), (*two.operands, two.golden), (*other.operands, other.golden), strict=True
        ):
            assert host_same_bits(a, b)
            assert not host_same_bits(a, c)


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


def test_no_order_of_summation_changes_a_bit_in_bfloat16_accumulators():
    """With 8 bits promised, even partial sums kept in bfloat16 are exact; with 11, in float16."""
    for source, bits, dtype in (("bfloat16", 8, torch.bfloat16), ("float16", 11, torch.float16)):
        for name in CONTENTS:
            product = named((source, source, bits), name, 16, 16, 80)
            problem = build(product, 2)
            a, b = problem.operands
            for order in (range(80), range(79, -1, -1), [*range(0, 80, 2), *range(1, 80, 2)]):
                total = torch.zeros(16, 16, dtype=dtype)
                for k in order:
                    total = total + a[:, k : k + 1] * b[k : k + 1]
                assert host_same_bits(total, problem.golden), (source, name)


def test_a_larger_pool_than_rows_and_fewer_rows_than_pool():
    """Rows beyond the pool repeat pool rows under powers of two; every pool row is used."""
    product = named(("float32", "float32", 24), "full", 300, 4, 64)
    a = build(product, 6).operands[0]
    assert len({tuple(row) for row in a.tolist()}) >= operands.POOL


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_int8_products_match_plain_integers(maker, name):
    """int8 goldens are the integer answer; narrow ones never saturate a pair of 16-bit products."""
    problem = build_int8(name, 17, 19, 64, "nt", 3)
    assert maker.raw_of(problem.golden) == maker.product(problem)
    if name == "narrow":
        assert int(problem.operands[1].abs().max()) <= operands.INT8_NARROW
        assert 2 * 255 * operands.INT8_NARROW < 1 << 15


@given(bits=st.integers(-10, 70), cap_a=st.integers(1, 53), cap_b=st.integers(1, 53))
def test_bits_are_shared_within_the_caps(bits, cap_a, cap_b):
    """_split never exceeds the total or a cap, and gives each operand a bit or both none."""
    a, b = operands._split(bits, cap_a, cap_b)
    assume(bits >= 2)
    assert 1 <= a <= cap_a
    assert 1 <= b <= cap_b
    assert a + b <= max(2, bits)


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
