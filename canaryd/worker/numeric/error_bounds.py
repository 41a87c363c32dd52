"""Bounds for a kernel's distance from the exact result: float64 references, and forward error bounds for each element.

Each function takes operands as float64 host tensors (their values are exact there) and returns the reference and a
tolerance for all errors before the result is written. `allowed` adds the one rounding to the output's format. u is a
unit roundoff: 2**-p for p significant bits, rounding to nearest; the sources are

- N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM 2002: lemma 3.1 (a product of n factors
  (1 + d)**±1 with |d| ≤ u is within (1 - u)**-n - 1 ≤ gamma_n = n u / (1 - n u) of 1), section 3.1 (a dot product of
  length n in any order of summation, with or without fused multiply-add: |error| ≤ gamma_n |a|.|b|), sections 1.9 and
  3.1 (two-pass and textbook variance);
- T. F. Chan, G. H. Golub, R. J. LeVeque, "Algorithms for computing the sample variance", The American Statistician
  1983: updating formulas err by n times u times the condition number, which is at most sqrt(mean(x²) / variance).

What is *assumed*, and therefore generous:

- at most `ULPS` units in the last place for each elementary function of float32 (CUDA C++ Programming Guide,
  "Mathematical Functions": at most 2 for exp, exp2, log, sin, cos, erf and rsqrt; SLEEF's u10 functions on CPUs: 1.0);
- `EXP_ULPS` for exponentials in softmax and attention, because ATen's vectorised `exp_u20` states 20;
- `ERF` for erf, which ATen and oneDNN vectorise by a formula like 7.1.26 of Abramowitz and Stegun, "Handbook of
  Mathematical Functions", whose *absolute* error is at most 1.5e-7;
- the constant 3 for every variance algorithm, where Chan et al. give the order of n u;
- one rounding to nearest at the end, and that partial results below 2**-126 may be flushed to zero.

The float64 arithmetic of the reference has a unit roundoff 2**29 times smaller than float32's and makes the same
number of roundings: `WIDER` covers its error.
"""

from __future__ import annotations

import math
from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.tensors import Format, torch

SINGLE = 2.0**-24
"""Unit roundoff of float32, the format of a kernel's intermediate values."""
ULPS = 4.0
"""Assumed largest error of an elementary function in float32, in units in the last place; twice what is documented."""
EXP_ULPS = 32.0
"""Assumed largest error of the exponentials inside softmax and attention, in units in the last place."""
ERF = 2.0**-20
"""Assumed largest absolute error of erf: 9.5e-7, for a formula good to 1.5e-7 and the roundings of its evaluation."""
FLUSHED = 2.0**-126
"""Largest error of one partial result that is flushed to zero."""
WIDER = 1.0 + 2.0**-20
"""Factor that widens every tolerance by more than the reference's own error."""

Bounded = tuple[Any, Any]
"""Reference and tolerance, both float64 tensors with the result's shape."""


def unit(device: Device, source: str) -> float:
    """Return the unit roundoff (largest relative rounding error) of partial sums on `device`; `source`: operand format.

    For tensor cores it is four times 2**-bits. They truncate instead of rounding, which doubles the error. They align
    all products of a block to the largest before adding, so that each loses less than one unit of the largest, which
    doubles it again (M. Fasi et al., PeerJ CS 2021). For FP8, `characterised.accumulator` already includes one of these
    two factors.
    """
    if device.backend == "cpu" and source.startswith("float8"):
        return SINGLE  # their products are exact in float32, in which CPUs add them
    bits = accumulator(device, source).bits
    if device.backend == "cpu" or source == "float32":
        return 2.0**-bits
    return 2.0 ** ((1 if source.startswith("float8") else 2) - bits)


def roundoff(form: Format) -> float:
    """Return the unit roundoff of a format."""
    return 2.0**-form.bits


def reach(*steps: tuple[float, float]) -> float:
    """Return the largest relative change by a product of factors (1 + d)**±1; `steps`: (how many, largest |d|)."""
    return math.expm1(sum(-count * math.log1p(-u) for count, u in steps))


def allowed(bounded: Bounded, form: Format) -> Bounded:
    """Return the bounds after one more rounding, to `form`: half a unit in the last place is added to the tolerance."""
    reference, tolerance = bounded[0], bounded[1] * WIDER
    exponent = torch.frexp(reference.abs() + tolerance).exponent - 1
    half = torch.ldexp(torch.ones_like(reference), exponent.clamp(min=form.emin) - form.bits)
    return reference, tolerance + half + FLUSHED


def dot(a: Any, b: Any, u: float, *more: tuple[float, float]) -> Bounded:
    """Return reference and tolerance of a @ b. `u`: unit roundoff of the sums; `more`: further `steps` of `reach`."""
    return a @ b, (a.abs() @ b.abs()) * reach((a.shape[-1], u), *more)


def elementary(function: Any, x: Any) -> Bounded:
    """Return reference and tolerance of a float32 function: `ULPS` last-place units, each at most 2u of the value."""
    reference = function(x)
    return reference, reference.abs() * reach((2 * ULPS, SINGLE))


def rsqrt(x: Any, form: Format) -> Bounded:
    """Return reference and tolerance of 1 / sqrt(x); torch's scalar code rounds the root to `form` before dividing."""
    reference, tolerance = elementary(torch.rsqrt, x)
    return reference, tolerance + (reference.abs() + tolerance) * reach((1, roundoff(form)), (2, SINGLE))


def erf(x: Any) -> Bounded:
    """Return reference and tolerance of erf, an absolute error: near 0 the formula subtracts numbers near 1."""
    reference, tolerance = elementary(torch.erf, x)
    return reference, tolerance + ERF


def silu(x: Any) -> Bounded:
    """Return reference and tolerance of x / (1 + exp(-x)).

    The tolerance covers an exponential, a sum of positive terms, a division and a product.
    """
    reference = x * torch.sigmoid(x)
    return reference, reference.abs() * reach((2 * ULPS + 3, SINGLE))


def swiglu(gate: Any, up: Any, form: Format) -> Bounded:
    """Return reference and tolerance of silu(gate) * up; a kernel can store the first factor in `form`."""
    reference, tolerance = silu(gate)
    tiny = 2.0 ** (form.emin - form.bits)  # half the spacing of subnormals, where the first factor is one
    relative = reach((1, roundoff(form)), (2, SINGLE))
    wide = tolerance + (reference.abs() + tolerance) * relative + tiny
    return reference * up, wide * up.abs() * (1.0 + SINGLE) + (reference * up).abs() * SINGLE


def gelu(x: Any) -> Bounded:
    """Return reference and tolerance of x/2 (1 + erf(x/sqrt 2)): near erf = -1 the sum cancels, so the error is `ERF`.

    The argument is rounded twice; |z erf'(z)| ≤ sqrt(2/(pi e)) < 1/2, so this changes erf by at most 2u / 2 = u.
    """
    reference = x * 0.5 * torch.special.erfc(-x / math.sqrt(2.0))
    lost = ERF + SINGLE
    return reference, x.abs() * 0.5 * lost * (1.0 + reach((3, SINGLE))) + reference.abs() * reach((3, SINGLE))


def rope(x: Any, cosine: Any, sine: Any, form: Format) -> Bounded:
    """Return reference and tolerance of x cos + rotate(x) sin; a kernel can round all three operations to `form`."""
    turned = rotate(x)
    size = (x * cosine).abs() + (turned * sine).abs()
    return x * cosine + turned * sine, size * reach((2, roundoff(form)), (2, SINGLE)) + 2.0 ** (form.emin - form.bits)


def rotate(x: Any) -> Any:
    """Return `x` with its last axis rearranged: first the negated second half, then the first half."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rms_norm(x: Any, weight: Any, eps: float, form: Format) -> Bounded:
    """Return reference and tolerance of x rsqrt(mean(x²) + eps) weight.

    The sum has no cancellation, and the root halves its error. A kernel can write x times the root in `form` before it
    multiplies by the weight.
    """
    reference = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    steps = ((x.shape[-1] / 2 + 2, SINGLE), (2 * ULPS + 2, SINGLE), (1, roundoff(form)))
    return reference, reference.abs() * reach(*steps)


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> Bounded:
    """Return reference and tolerance of (x - mean) / sqrt(variance + eps) weight + bias for every usual algorithm.

    The mean errs by g mean|x| with g = gamma of n + 4 roundings. Let Q = mean(x²), which is ≥ mean² and ≥ variance. The
    textbook formula errs by g Q in mean(x²) and 2 |mean| g mean|x| ≤ 2 g Q in mean²; the two-pass one by less; updating
    ones by the order of n u sqrt(Q variance) ≤ g Q. So 3 g Q covers them. The root halves this error, relative to
    variance + eps.
    """
    n = x.shape[-1]
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    spread = x.var(-1, unbiased=False, keepdim=True) + eps
    scale, g = torch.rsqrt(spread), reach((n + 4, SINGLE))
    off = g * x.abs().mean(-1, keepdim=True)
    lost = (3.0 * g * square + off.square()) / spread
    # 1 / sqrt(1 - t) - 1 ≤ t for t ≤ 1/2, more than the half that a derivative would give
    relative = lost + reach((2 * ULPS + 3, SINGLE))
    normal = (x - mean) * scale
    # x scale - mean scale, as some kernels write it, rounds each of the two products
    moved = (off + 4.0 * SINGLE * (x.abs() + mean.abs())) * scale * (1.0 + relative)
    tolerance = (normal.abs() * relative + moved) * weight.abs() * (1.0 + 2.0 * SINGLE)
    reference = normal * weight + bias
    return reference, tolerance + SINGLE * ((normal * weight).abs() + tolerance + reference.abs())


def weights(scores: Any, error: Any) -> Bounded:
    """Return softmax(scores) over the last axis, and the relative error of each value.

    `error` holds the errors theta of the exponents. Subtracting the largest score rounds once, and kernels that use
    exp2 multiply by a rounded log2(e): at most 4u times |score - largest|; the choice of the subtracted score cancels.
    With exponents off by theta_j, p_j is multiplied by at most exp(theta_j), and the sum is multiplied or divided by at
    most sum p exp(theta) =: exp(m) (Jensen), so that theta_j + m bounds the logarithm of the change. Masked entries
    have p = 0 and do not count.
    """
    largest = scores.amax(-1, keepdim=True)
    away = torch.where(scores.isinf(), torch.zeros_like(scores), scores - largest)
    p = torch.softmax(scores, -1)
    theta = error + away.abs() * 4.0 * SINGLE + math.log1p(reach((2 * EXP_ULPS + 2, SINGLE)))
    return p, theta + (p * theta.exp()).sum(-1, keepdim=True).log()


def softmax(x: Any) -> Bounded:
    """Return reference and tolerance of softmax over the last axis.

    The tolerance covers the errors of `weights`, of a sum of n positive terms, and of a division.
    """
    p, theta = weights(x, torch.zeros_like(x))
    n = x.shape[-1]
    return p, p * torch.expm1(theta + math.log1p(reach((n + 4, SINGLE)))) + 2 * n * FLUSHED


def attention(query: Any, key: Any, value: Any, u: float, form: Format, *, causal: bool, written: bool) -> Bounded:
    """Return reference and tolerance of attention, softmax(q kᵀ / sqrt D) v, with the shape (B, H, L, D).

    `u`: unit roundoff of dot products; `written`: whether kernels can store scores in `form`. A score errs by a dot
    product's bound and by four roundings in float32. Where scaled operands, scores and masked scores are written in
    `form`, four roundings in `form` are added. Probabilities are rounded to `form` before their product with the
    values. Online kernels rescale sum and result by the same factor, whose own error cancels; the products with it
    round, at most twice a key.
    """
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scale, low, keys = 1.0 / math.sqrt(query.shape[-1]), roundoff(form), key.shape[-2]
    steps = ((4, SINGLE), (4 if written else 0, low))
    scores, error = dot(query, key.transpose(-1, -2) * scale, u, *steps)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores, error = scores.masked_fill(hidden, -torch.inf), error.masked_fill(hidden, 0.0)
    p, theta = weights(scores, error)
    rest = math.log1p(reach((2 * keys + 4, u), (2 * keys + 4, SINGLE), (2, low)))
    tolerance = (p * torch.expm1(theta + rest)) @ value.abs()
    # a probability that is subnormal in `form` loses at most half of its smallest step
    return p @ value, tolerance + (2.0 ** (form.emin - form.bits) + 2 * FLUSHED) * value.abs().sum(-2, keepdim=True)
