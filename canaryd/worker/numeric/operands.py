"""Operands of exact products: every partial sum is exact, so there is only one right result.

Letters: M, N, K the sizes of a product; P ≤ M and Q ≤ N the sizes of the *pools*. Rows of A are drawn from a pool of P
integer rows and columns of B from a pool of Q integer columns, each with a power of two of its own; the answer of the
pools (P x Q, integer arithmetic) then gives the whole answer by indexing, and a large product costs a small golden.

The bound. Let the products of one output be a_k b_k, integers in units of 2**u. Every kernel adds some of them in some
order, keeping partial sums in an accumulator of `bits` significant bits. Any partial sum is an integer multiple of the
unit and at most S = sum |a_k b_k| in magnitude. With S < 2**bits each is exactly representable, so no addition rounds,
whatever the order, the split, the tile or the fusion of multiply and add. `Bound` computes S over the real data and
refuses to build a problem that breaks it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from canaryd.facts import Exactness
from canaryd.worker.numeric.integers import (
    below,
    longest,
    permutation,
    round_significand,
    signed,
    significant_bits,
    stream,
)
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import WORD, Format, bits, torch

POOL = 128
"""Number of rows (columns) of a pool: 128 x 128 different dot products are enough and cost about a millisecond."""
POOLS = {"square": POOL, "prefill": POOL, "batched": POOL, "decode": POOL, "long": POOL // 2, "ragged": POOL // 2}
"""Kind of product → number of rows of its pools. The first four kinds have the same K and share pools. The pools of
"long" sums cost the host several times as much, and those of "ragged" products serve one case. Other kinds need pools
of their own, no larger than the product."""

SHEET = 16
"""Number of turns (draws of operands) that one call draws: one turn costs nearly as much as sixteen (ours)."""

INT8_NARROW = 63
"""|b| ≤ 63 keeps a pair sum of u8 x s8 products at 2 x 255 x 63 = 32,130 < 2**15: CPUs without VNNI add such pairs in
saturating 16-bit arithmetic (VPMADDUBSW) and are healthy."""


class Inexact(AssertionError):
    """Raised if a problem cannot be proven to be exact: this is a defect of canaryd, never of a device."""


@dataclass(frozen=True)
class Bound:
    """The proof of exactness: the largest sum of magnitudes of one output, and the limit below which sums are exact."""

    magnitude: int
    limit: int

    def __post_init__(self) -> None:
        """Raise `Inexact` if the largest sum reaches the limit, so that a partial sum can be rounded."""
        if self.magnitude >= self.limit:
            raise Inexact(f"partial sums reach {self.magnitude}, the accumulator is exact below {self.limit}")


@dataclass(frozen=True)
class Pools:
    """The integers that operands are drawn from: rows `a` (P, K) and columns `b` (K, Q), int64."""

    a: Any
    b: Any


@dataclass(frozen=True)
class Problem:
    """One problem with a known result: operands, golden (right result), and proof. All tensors are on the host."""

    operands: tuple[Any, ...]
    golden: Any
    exactness: Exactness
    bound: Bound
    shape: str
    witnessed: bool = True
    """False if a second computation of the golden (float64 products of the integers) gave another result."""
    operations: int = 0
    """Number of multiplications and additions of one result; 0 where they are not counted."""


@dataclass(frozen=True)
class Product:
    """The description of one matrix product: `M` x `K` times `K` x `N`, `batch` of them (0: no batch dimension)."""

    content: str
    source: Format
    target: Format
    accumulator: int
    """Number of significant bits of the narrowest format in which a kernel can keep a partial sum."""
    M: int
    N: int
    K: int
    batch: int = 0
    layout: str = "nn"
    """Memory layouts of A and B, one letter each: "n" row-major, "t" stored transposed."""
    pool: int = 0
    """Number of rows of each pool; 0 means the product's own number of rows, but at most `POOL`."""

    @functools.cached_property
    def of_pools(self) -> Product:
        """The product of all pool rows and pool columns, P x K times K x Q; products with the same pools share it."""
        P, Q = (self.pool or min(POOL, n * max(1, self.batch)) for n in (self.M, self.N))
        return replace(self, M=P, N=Q, batch=0, layout="nn")

    @functools.cached_property
    def together(self) -> int:
        """Number of neighbouring pool columns drawn together to fill a `WORD` of memory; 1 where sizes forbid it."""
        count = WORD // min(self.source.dtype.itemsize, self.target.dtype.itemsize)
        sizes = [self.N, self.of_pools.N]
        if self.layout[0] == "t":
            sizes += [self.M, self.of_pools.M]
        return 1 if any(size % count for size in sizes) else count

    @property
    def elements(self) -> int:
        """Number of elements of the result."""
        return max(1, self.batch) * self.M * self.N

    @property
    def shape(self) -> str:
        """The sizes as text."""
        return f"{f'batch={self.batch} ' if self.batch else ''}M={self.M} N={self.N} K={self.K}"


def _split(total: int, cap_a: int, cap_b: int) -> tuple[int, int]:
    """Split `total` bits between two operands as evenly as their caps allow; return (0, 0) if `total` is below 2."""
    if total < 2:
        return 0, 0
    a = min(cap_a, (total + 1) // 2)
    b = min(cap_b, total - a)
    return min(cap_a, total - b), b


def _log2_ceil(n: int) -> int:
    return max(0, (n - 1).bit_length())


def _dense(product: Product, seed: int, P: int, Q: int) -> Pools:
    """Build operands without zeros. One term of each sum is odd, all others are even, so that no sum is zero."""
    K, p = product.K, product.source.bits
    a_bits, b_bits = _split(product.accumulator - _log2_ceil(K) - 1, p, p - 1)
    live = K
    if not a_bits:  # too many terms for the accumulator: fewer live products, the rest zero in B
        a_bits, b_bits = 1, 1
        live = 1 << max(0, product.accumulator - 3)
    a = signed(seed, "a", (P, K), 1, (1 << a_bits) - 1)
    b = 2 * signed(seed, "b", (K, Q), 1, (1 << b_bits) - 1)
    order = permutation(seed, "live", K)
    b[order[live:]] = 0
    odd = order[0]
    a[:, odd] |= 1
    b[odd] |= 1
    return Pools(a, b)


def _sparse(product: Product, seed: int, P: int, Q: int, a_bits: int, b_bits: int, live: int) -> Pools:
    """Build operands in which `live` terms of each dot product are nonzero, spread over K.

    For an odd seed, row i of A is nonzero at o_i, o_i + s, o_i + 2 s, … mod K. An even seed exchanges A and B: if only
    B were wide, the low bits of A would never be 1. `a_bits` and `b_bits` are the widths of the values.
    """
    if not seed & 1:
        turned = _sparse_rows(product, seed, Q, P, a_bits, b_bits, live)
        return Pools(turned.b.T.contiguous(), turned.a.T.contiguous())
    return _sparse_rows(product, seed, P, Q, a_bits, b_bits, live)


def _sparse_rows(product: Product, seed: int, P: int, Q: int, a_bits: int, b_bits: int, live: int) -> Pools:
    K = product.K
    live = min(live, K)
    stride = max(1, K // live)
    offset = below(seed, "offset", (P, 1), K)
    position = (offset + stride * torch.arange(live).view(1, live)) % K
    value = signed(seed, "a", (P, live), 1 << (a_bits - 1), (1 << a_bits) - 1)
    b = signed(seed, "b", (K, Q), 1 << (b_bits - 1), (1 << b_bits) - 1)
    for attempt in range(64):
        a = torch.zeros((P, K), dtype=torch.int64).scatter_(1, position, value)
        zero_rows = ((a @ b) == 0).any(dim=1)
        if not bool(zero_rows.any()):
            return Pools(a, b)
        # A zero answer would hide the commonest corruption (a value turned to zero): draw those rows again.
        again = signed(seed, f"a again {attempt}", (P, live), 1 << (a_bits - 1), (1 << a_bits) - 1)
        value = torch.where(zero_rows.view(P, 1), again, value)
    raise Inexact(f"{product.content}: rows without a zero answer were not found in 64 draws")


def _full(product: Product, seed: int, P: int, Q: int) -> Pools:
    """Build operands with full significands; each sum has as many nonzero terms as the accumulator adds exactly."""
    p, acc = product.source.bits, product.accumulator
    if 2 * p <= acc:
        return _sparse(product, seed, P, Q, p, p, 1 << (acc - 2 * p))
    narrow = acc // 4  # too wide to multiply fully: one side wide, the other narrow, four live products
    return _sparse(product, seed, P, Q, min(p, acc - 2 - narrow), narrow, 4)


def _permute(product: Product, seed: int, P: int, Q: int) -> Pools:
    """Build a signed permutation and a matrix with full significands, whose elements (or negatives) are the outputs."""
    b_bits = min(product.source.bits, product.target.bits, product.accumulator)
    return _sparse(product, seed, P, Q, 1, b_bits, 1)


def _cancel(product: Product, seed: int, P: int, Q: int) -> Pools:
    """Build sums that climb to half of the accumulator's range and come back to at most 8 significant bits.

    Columns k and k' of A are equal. Row k' of B is minus row k, plus 1 or -1 at one k in each column. So each answer is
    one element of A, up to its sign. It is small and exact in every output format, so an error of one unit in the
    accumulator is seen. The terms of the first half share the sign of their row and column: with random signs they
    would stay near zero.
    """
    pairs, p = product.K // 2, product.source.bits
    if not pairs:
        raise Inexact(f"{product}: a single term cannot cancel")
    a_cap = min(p, product.target.bits, 8)
    total = product.accumulator - _log2_ceil(2 * pairs)
    live = pairs
    if total < 3:
        live, total = 1 << (product.accumulator - 4), 3
    a_bits, b_bits = _split(total, a_cap, p)
    if b_bits < 2:
        a_bits, b_bits = total - 2, 2
    sign = signed(seed, "sign", (1, pairs), 1, 1)
    a = sign * signed(seed, "row sign", (P, 1), 1, 1)
    a = a * signed(seed, "a", (P, pairs), 1 << (a_bits - 1), (1 << a_bits) - 1).abs()
    b = sign.T * signed(seed, "column sign", (1, Q), 1, 1)
    b = b * signed(seed, "b", (pairs, Q), 1 << (b_bits - 1), (1 << b_bits) - 2).abs()
    order = permutation(seed, "live", pairs)
    b[order[live:]] = 0
    chosen = order[below(seed, "chosen", (1, Q), live)]
    delta = torch.zeros_like(b).scatter_(0, chosen, signed(seed, "delta", (1, Q), 1, 1))
    rest = product.K - 2 * pairs  # an odd K leaves one term over
    a = torch.cat([a, a, signed(seed, "rest", (P, rest), 1, 1)], dim=1)
    b = torch.cat([b, delta - b, torch.zeros((rest, Q), dtype=torch.int64)], dim=0)
    ends = torch.arange(2 * pairs, product.K)
    shuffle = torch.cat([permutation(seed, "up", pairs), pairs + permutation(seed, "down", pairs), ends])
    return Pools(a[:, shuffle], b[shuffle])


CONTENTS: dict[str, Callable[[Product, int, int, int], Pools]] = {
    "dense": _dense,
    "full": _full,
    "permute": _permute,
    "cancel": _cancel,
    "scaled": _dense,  # with powers of two on rows, columns and along K
    "band": _full,  # with one power of two that moves everything to the edge of the format's range
}
"""Content class of float products → function that builds operands (docs/goldens.md: the purpose of each class)."""


def _exponents(product: Product, seed: int, pools: Pools, top: int) -> tuple[Any, Any, Any]:
    """Return exponents for the pools' rows (P), their columns (Q), and along K: no value is subnormal or overflows.

    `top` is the bit length of the largest |answer| or operand sum. The unit of a term becomes 2**(row + column).
    """
    source, target = product.source, product.target
    low = max(target.emin, source.emin, -126)  # -126: partial sums live in float32 (or wider) accumulators
    high = min(target.emax, 127) - top
    wide = {"scaled": 20, "permute": 8, "band": 0}.get(product.content, 0)
    a_low, a_high = source.emin, source.emax - longest(pools.a)
    b_low, b_high = source.emin, source.emax - longest(pools.b)
    low, high = max(low, a_low + b_low), min(high, a_high + b_high)
    if low > high:
        raise Inexact(f"{product}: no exponent keeps the answer normal and finite in {target.name}")
    base = min(max(0, low), high)
    if product.content == "band":
        edges = [e for e in (low + 4, -40, 40, high - 4, low, high) if low <= e <= high]
        base = edges[int(below(seed, "band", (1,), len(edges)))]
    spread = min(wide, (high - low) // 2)
    base = min(max(base, low + spread), high - spread)
    # Split the base between the operands, then keep each operand's own exponents inside its own format.
    a_base = min(max(base // 2, a_low), a_high)
    b_base = base - a_base
    if not b_low <= b_base <= b_high:
        b_base = min(max(b_base, b_low), b_high)
        a_base = base - b_base
    half = min(spread // 2, a_base - a_low, a_high - a_base, b_base - b_low, b_high - b_base)
    along = min(
        spread - half, a_base - half - a_low, a_high - a_base - half, b_base - half - b_low, b_high - b_base - half
    )
    # Dealt out in the order in which the first gather takes the rows.
    order_a = permutation(seed, "row", pools.a.shape[0]).argsort()
    order_b = permutation(seed, "column", pools.b.shape[1]).argsort()
    rows = a_base + _around(seed, "rows", len(order_a), half)[order_a]
    columns = b_base + _around(seed, "columns", len(order_b), half)[order_b]
    return rows, columns, _around(seed, "along", product.K, max(0, along))


def _around(seed: int, name: str, n: int, width: int) -> Any:
    return below(seed, name, (n,), 2 * width + 1) - width


def _pick(seed: int, name: str, batch: int, n: int, pool: int) -> Any:
    """Return a pool row number for each of batch x n rows, (batch, n); all pool rows are used if possible."""
    count = batch * n
    if count <= pool:
        return permutation(seed, name, pool)[:count].view(batch, n)
    index = stream(seed, name, (count,)) % pool
    index[permutation(seed, f"{name} all", count)[:pool]] = torch.arange(pool)
    return index.view(batch, n)


def _shuffles(seed: int, name: str, count: int, pool: int, together: int) -> Any:
    """Return numbers of pool rows for `SHEET` turns, (SHEET, count): repeated random orders of all pool rows."""
    order = stream(seed, name, (SHEET, -(-count // pool), pool // together)).argsort(-1)
    return (order.unsqueeze(-1) * together + torch.arange(together)).view(SHEET, -1)[:, :count]


def _stored(tensor: Any, how: str) -> Any:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if how == "t" else tensor.contiguous()


def make_pools(product: Product, seed: int) -> Problem:
    """Return the pools of one float product as a problem; equal arguments give equal pools.

    Its operands are rows of A (P, K) and columns of B, stored as rows (Q, K), in `source.dtype`. Its golden contains
    the results of all pairs (P, Q) in `target.dtype`. Raises `Inexact` if the bound or the range is broken, or if an
    answer is zero.
    """
    P, Q = product.of_pools.M, product.of_pools.N
    pools = CONTENTS[product.content](product, seed, P, Q)
    answer = pools.a @ pools.b
    bound = Bound(int((pools.a.abs() @ pools.b.abs()).max()), 1 << product.accumulator)
    if bool((answer == 0).any()):
        raise Inexact(f"{product}: an answer is zero")
    # The second way: float64 holds these integers and their sums exactly, and runs on another unit of the processor.
    real_a, real_b = pools.a.to(torch.float64), pools.b.to(torch.float64)
    witness = (real_a @ real_b).to(torch.int64)
    rounded = round_significand(answer, product.target.bits)
    exactness = Exactness.UNIVERSAL if significant_bits(answer) <= product.target.bits else Exactness.ROUNDED
    top = max(longest(rounded), bound.magnitude.bit_length())
    rows, columns, along = _exponents(product, seed, pools, top)
    # Powers of two scale exactly; the work format holds every significand, float64 for float64 and float32 otherwise.
    work = torch.float64 if product.source.bits > 24 else torch.float32
    two = torch.tensor(2.0, dtype=torch.float64)
    row, column = ((two**e).to(work) for e in (rows.view(P, 1), columns.view(1, Q)))
    a = (real_a * two**along).to(work) * row
    b = (real_b.T * two**-along).to(work) * column.T
    made = Problem(
        operands=(a.to(product.source.dtype), b.to(product.source.dtype).contiguous()),
        golden=(rounded.to(work) * row * column).to(product.target.dtype),
        exactness=exactness,
        bound=bound,
        shape=product.shape,
        operations=2 * product.elements * product.K,
        witnessed=bool((witness == answer).all()),
    )
    _check_range(made, product)
    return made


@functools.lru_cache(maxsize=2)  # the device's gather and the host's own want the same
def draw(product: Product, seed: int, turn: int) -> tuple[Any, Any]:
    """Return the numbers of the pool rows (batch, M) and pool columns (batch, N), int64, of draw `turn`.

    Turn 0 is the first draw; canaryd ships its digests for the fixed cases. Later turns draw `Product.together`
    neighbours at once if the device gathers columns. The batch is 1 if the product has none.
    """
    P, Q, batch = product.of_pools.M, product.of_pools.N, max(1, product.batch)
    if turn == 0:
        return _pick(seed, "row", batch, product.M, P), _pick(seed, "column", batch, product.N, Q)
    number, at = divmod(turn - 1, SHEET)
    rows, columns = sheet(product, seed, number)
    return rows[at], columns[at]


@functools.lru_cache(maxsize=2)  # of one product, and of another beside it
def sheet(product: Product, seed: int, number: int) -> tuple[Any, Any]:
    """Return the draws of `SHEET` turns from `number * SHEET + 1` on: rows (SHEET, batch, M), columns (…, N)."""
    P, Q, batch = product.of_pools.M, product.of_pools.N, max(1, product.batch)
    stem = derive(seed, f"gather {number}")
    r = _shuffles(stem, "rows", batch * product.M, P, 1 if product.layout[0] == "n" else product.together)
    c = _shuffles(stem, "columns", batch * product.N, Q, product.together)
    return r.view(SHEET, batch, product.M), c.view(SHEET, batch, product.N)


def gather(product: Product, pools: Problem, seed: int, turn: int) -> Problem:
    """Return the problem of draw number `turn`, by indexing the pools: A (…, M, K), B (…, K, N), golden (…, M, N).

    The operands have the product's memory layouts. No error is raised.
    """
    r, c = draw(product, seed, turn)
    a, b = (bits(pool) for pool in pools.operands)  # FP8 cannot be indexed, its bits can
    whole = [a[r], b[c].transpose(1, 2)]
    if not product.batch:
        whole = [tensor[0] for tensor in whole]
    stored = (_stored(tensor, how) for tensor, how in zip(whole, product.layout, strict=True))
    operands = tuple(_as(tensor, product.source.dtype) for tensor in stored)
    return replace(pools, operands=operands, golden=gather_golden(product, pools, seed, turn))


def gather_golden(product: Product, pools: Problem, seed: int, turn: int) -> Any:
    """Return the golden (…, M, N) of draw number `turn`, by indexing the pools' answers; raises nothing."""
    r, c = draw(product, seed, turn)
    table = bits(pools.golden)
    # Columns first, while there are few rows: several times faster than both at once.
    matrices = [table.index_select(1, columns).index_select(0, rows) for rows, columns in zip(r, c, strict=True)]
    return _as(torch.stack(matrices) if product.batch else matrices[0], product.target.dtype)


def _as(raw: Any, dtype: Any) -> Any:
    """Return raw bits viewed as the format `dtype`; the tensor can be stored transposed."""
    return raw.view(dtype) if raw.is_contiguous() else raw.mT.view(dtype).mT


def build(product: Product, seed: int, turn: int = 0) -> Problem:
    """Return the problem of one floating-point product: A (…, M, K), B (…, K, N), golden (…, M, N).

    Operands have `source.dtype`, the golden has `target.dtype`. Every `turn` draws other rows and columns of the same
    pools. Equal arguments give equal problems. Raises `Inexact` as `make_pools` does.
    """
    return gather(product, make_pools(product, seed), seed, turn)


def _check_range(problem: Problem, product: Product) -> None:
    """Raise `Inexact` unless operands and golden are finite and normal, and the golden has no zero."""
    for tensor, form, zeros in (
        (problem.golden, product.target, False),
        *((t, product.source, True) for t in problem.operands),
    ):
        size = (tensor.to(torch.float32) if tensor.element_size() == 1 else tensor).abs()  # FP8 has no arithmetic
        if not bool(torch.isfinite(size.max())):  # the largest of values with a NaN among them is NaN
            raise Inexact(f"{product}: a value is not finite")
        smallest = float((size.masked_fill_(size == 0, torch.inf) if zeros else size).min())
        if smallest < 2.0**form.emin:
            raise Inexact(f"{product}: {smallest} is zero or subnormal in {form.name}")


def build_int8(content: str, M: int, N: int, K: int, layout: str, seed: int, *, left: str = "int8") -> Problem:
    """Return an int8 product with int32 results; `content` "wide" has values -128…127, "narrow" keeps |b| ≤ 63.

    With `left` "uint8", A has the format uint8 and values 0…255.
    """
    lowest = 0 if left == "uint8" else -128
    a = below(seed, "a", (M, K), 256) + lowest
    b = below(seed, "b", (K, N), 256) - 128 if content == "wide" else signed(seed, "b", (K, N), 1, INT8_NARROW)
    answer = a @ b
    for attempt in range(64):
        zero_rows = (answer == 0).any(dim=1, keepdim=True)
        if not bool(zero_rows.any()):
            break
        a = torch.where(zero_rows, below(seed, f"a again {attempt}", (M, K), 256) + lowest, a)
        answer = a @ b
    else:
        raise Inexact(f"int8 {content}: rows without a zero answer were not found in 64 draws")
    witness = (a.to(torch.float64) @ b.to(torch.float64)).to(torch.int64)
    return Problem(
        operands=(_stored(a.to(getattr(torch, left)), layout[0]), _stored(b.to(torch.int8), layout[1])),
        golden=answer.to(torch.int32).contiguous(),
        exactness=Exactness.UNIVERSAL,
        bound=Bound(int((a.abs() @ b.abs()).max()), 1 << 31),
        shape=f"M={M} N={N} K={K}",
        operations=2 * M * N * K,
        witnessed=bool((witness == answer).all()),
    )
