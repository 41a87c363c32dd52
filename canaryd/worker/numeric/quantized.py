"""Exact products with quantised weights: stored codes, their values, and the one right result.

Letters: x (M, K) activations; W (K, N) weights. The value of a weight is scale * code, plus an offset in mode "affine".
Weights are stored in groups that share a scale, along K (layout "nt": rows of the stored matrix are columns of W) or
along N ("nn").

Every value is a whole number times a power of two that depends only on the row of x and the column of W. Kernels differ
in two ways. Some convert weights to the format of x and keep partial sums in it too (MLX does on CPUs, as of 0.32.4):
so every scale * code, every weight and every partial sum is representable there. Others sum x * code and x * offset
separately, in float32: so these sums stay below 2**22, as for TF32 products. Then nothing rounds, in any order.

No weight is 0. No answer is 0 either: one place along K, the anchor, has odd weights and odd activations, and all other
activations are even. Where the format has room for one product only, that product is the answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from canaryd.facts import Exactness
from canaryd.model import Device
from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.integers import below, permutation, signed
from canaryd.worker.numeric.operands import Bound, Inexact, Problem
from canaryd.worker.numeric.tensors import FORMATS, Format, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation, Packing

FORMS = ("float32", "bfloat16", "float16")
"""Formats of activations and results."""
KINDS = ("decode", "prefill")
LAYOUTS = ("nt", "nn")
FIXED = (16, 128, 256)
SIZES = {"quick": (256, 512), "standard": (256, 2048), "deep": (512, 4096)}
"""Level → N and K: multiples of groups of 128. MLX on Metal splits the sums of K = 4096 among blocks."""
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PREFILL = 64
APART = 22
"""Number of significant bits that sums of x * code have room for, if a kernel adds the offsets separately."""
SPREAD = 3
"""Limit for the exponents of rows and of columns: they lie in -3 … 2, so that 11 bits stay inside float16."""
LARGEST_SCALE = 15
"""Largest significand of a scale: four bits, as E4M3 has."""
FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of each E2M1 code (OCP Microscaling Formats 1.0, section 5.3.3)."""


@dataclass(frozen=True)
class Weights:
    """Quantised weights, int64 whole numbers: `codes`, `values` (rows, length), `scales`, `offsets` (rows, groups)."""

    codes: Any
    values: Any
    """Weights as whole numbers, scale * code + offset; the powers of two of the columns are not included."""
    scales: Any
    offsets: Any
    """Offsets of the groups in mode "affine"; otherwise 0."""


def pairs(device: Device) -> list[tuple[Packing, str]]:
    """Return (packing, format of activations) for every packing of weights that the device's runtime multiplies."""
    return list(itertools.product(interface.of(device).packings, FORMS))


def label_of(packing: Packing, form: str) -> str:
    """Return the label of a packing and a format for the names of cases."""
    return f"{packing.name}>{form}"


def case(device: Device, packing: Packing, form: str, kind: str, layout: str, sizes: tuple[int, int, int]) -> Case:
    """Return one product as a case; `sizes` are M, N and K."""
    return Case(
        f"{label_of(packing, form)}/codes/{kind}/{layout}@{'x'.join(map(str, sizes))}",
        partial(build, packing, FORMATS[form], layout, sizes),
        partial(interface.of(device).run, Operation("quantized", form, packing=packing, turned=layout == "nn")),
        is_characterised(device, form),
        struck=1,
        fixed=kind == "fixed",
    )


def fixed_cases(device: Device) -> list[Case]:
    """Return the fixed case of every packing and format."""
    return [case(device, *pair, "fixed", "nt", FIXED) for pair in pairs(device)]


def fresh_cases(ctx: Context, labels: Collection[str]) -> Iterator[Case]:
    """Yield the cases of the packings and formats in `labels`; at level "quick" only one case of each packing."""
    variants = list(itertools.product(KINDS, LAYOUTS))
    for turn, (packing, form) in enumerate(pairs(ctx.device), ctx.seed):
        if label_of(packing, form) not in labels:
            continue
        chosen = variants if ctx.level == "deep" or ctx.cases else [variants[turn % len(variants)]]
        if ctx.level == "quick" and not ctx.cases and turn % len(FORMS):
            continue
        for kind, layout in chosen:
            rows = ROWS[int(below(ctx.seed, f"rows {packing.name} {form}", (1,), len(ROWS)))]
            yield case(
                ctx.device, packing, form, kind, layout, (rows if kind == "decode" else PREFILL, *SIZES[ctx.level])
            )


def build(packing: Packing, form: Format, layout: str, sizes: tuple[int, int, int], seed: int) -> Problem:
    """Return the problem of a quantised product: x, stored codes (int32 words), scales, offsets, golden (M, N).

    Equal arguments give equal problems. Raises `Inexact` if a sum exceeds its bound.
    """
    M, N, K = sizes
    anchor = int(below(seed, "anchor", (1,), K))
    kept = _weights(packing, form, seed, anchor, (N, K) if layout == "nt" else (K, N), turned=layout == "nn")
    W, apart = (part.T if layout == "nt" else part for part in (kept.values, _apart(packing, kept)))
    x = _activations(form, seed, M, K, anchor, max(int(W.abs().max()), (int(apart.max()) + 1) // 2))
    answer = x @ W
    Bound(_largest_sum(x, W), 1 << form.bits)
    bound = Bound(_largest_sum(x, apart), 1 << APART)
    if bool((answer == 0).any()):
        raise Inexact(f"{packing.name}: an answer is zero")
    rows, columns = (below(seed, name, (n,), 2 * SPREAD) - SPREAD for name, n in (("rows", M), ("columns", N)))
    if layout == "nn":  # columns of a group share their scale
        columns = columns[torch.arange(N) // packing.group * packing.group]
    stored = columns.view(N, 1) if layout == "nt" else columns[:: packing.group].view(1, -1)
    two = torch.tensor(2.0, dtype=torch.float64)
    row, column = two ** rows.view(M, 1), two ** columns.view(1, N)
    witness = (x.to(torch.float64) @ W.to(torch.float64)).to(torch.int64)
    return Problem(
        operands=((x * row).to(form.dtype), packed(packing.bits, kept.codes), *_scaled(packing, form, kept, stored)),
        golden=(answer * row * column).to(form.dtype).contiguous(),
        exactness=Exactness.UNIVERSAL,
        bound=bound,
        shape=f"M={M} N={N} K={K}",
        operations=2 * M * N * K,
        witnessed=bool((witness == answer).all()),
    )


def _weights(
    packing: Packing, form: Format, seed: int, anchor: int, shape: tuple[int, int], *, turned: bool
) -> Weights:
    """Draw codes, scales and offsets: no weight is 0, and all weights at the position `anchor` along K are odd."""
    groups = shape[0], shape[1] // packing.group
    at = torch.zeros(shape, dtype=torch.bool)
    at[(anchor, slice(None)) if turned else (slice(None), anchor)] = True
    near = at.view(*groups, packing.group).any(-1)
    codes = below(seed, "codes", shape, 1 << packing.bits)
    scales, offsets = torch.ones(groups, dtype=torch.int64), torch.zeros(groups, dtype=torch.int64)
    if packing.mode == "affine":
        width = 1 << packing.bits
        most = min(LARGEST_SCALE, (1 << min(form.bits, 11)) // width, max(1, (1 << form.bits) // (16 * width)))
        scales = 1 + below(seed, "scales", groups, most) | near.to(torch.int64)
        offsets = below(seed, "offsets", groups, 1 << 40) % scales - scales * below(seed, "zeros", groups, width)
    elif packing.mode == "nvfp4":
        scales = 8 + below(seed, "scales", groups, 8) | near.to(torch.int64)
    if packing.mode == "mxfp8":  # normal numbers of four exponents, so that sums of their products stay narrow
        codes = _codes_of_fp8(seed, shape, at)
    elif packing.mode != "affine":
        codes = torch.where(at, codes & 8 | torch.where(codes & 1 == 1, 1, 3), codes)
        codes = torch.where(codes & 7 == 0, codes | 1, codes)
    wide, off = (part.repeat_interleave(packing.group, 1) for part in (scales, offsets))
    values = _meant(packing, codes) * wide + off
    if packing.mode == "affine":  # the lowest bit of a code changes a weight by its scale
        wrong = (values == 0) | (at & (values % 2 == 0))
        codes = torch.where(wrong, codes ^ 1, codes)
        values = codes * wide + off
    return Weights(codes, values, scales, offsets)


def _codes_of_fp8(seed: int, shape: tuple[int, int], at: Any) -> Any:
    """Return random E4M3 codes: each has a significand from 8 to 15 and one of four exponents.

    At the places `at` the significand is odd and the exponent is the lowest of the four.
    """
    fields = below(seed, "exponents", shape, 4)
    fields, mantissas = torch.where(at, 0, fields), below(seed, "mantissas", shape, 8) | at.to(torch.int64)
    return below(seed, "signs", shape, 2) << 7 | (fields + 6) << 3 | mantissas


def _meant(packing: Packing, codes: Any) -> Any:
    """Return the values that the codes stand for, as whole numbers, before scale and offset."""
    if packing.mode == "affine":
        return codes
    size = 8 + (codes & 7) << (codes >> 3 & 15) - 6 if packing.mode == "mxfp8" else torch.tensor(FP4)[codes & 7]
    return torch.where(codes >> packing.bits - 1 == 1, -size, size)


def _largest_sum(x: Any, weights: Any) -> int:
    """Return the largest sum over K of |x * weight| among all outputs; float64 holds it exactly."""
    return int((x.abs().to(torch.float64) @ weights.abs().to(torch.float64)).max())


def _apart(packing: Packing, kept: Weights) -> Any:
    """Return |scale * code| + |offset| of every weight."""
    wide, off = (part.repeat_interleave(packing.group, 1) for part in (kept.scales, kept.offsets))
    return (_meant(packing, kept.codes) * wide).abs() + off.abs()


def _activations(form: Format, seed: int, M: int, K: int, anchor: int, largest: int) -> Any:
    """Return x (M, K): each row has as many nonzero elements, and then as large ones, as the sums have room for."""
    room = (1 << min(form.bits, APART - 1)) - 1  # a bit less: offsets that are added apart need as much again
    live = min(K - 1, (room - largest) // (2 * largest))
    order = permutation(seed, "live", K)
    place = (torch.arange(M).view(M, 1) * max(1, live) + torch.arange(max(1, live)).view(1, -1)) % K
    x = torch.zeros((M, K), dtype=torch.int64)
    if live < 1:  # one product in each row
        return x.scatter_(1, order[place], signed(seed, "x", (M, 1), 1, 1))
    most = min((1 << min(form.bits, 11)) // 2 - 1, (room - largest) // (2 * largest * live))
    x.scatter_(1, order[place], 2 * signed(seed, "x", (M, live), 1, max(1, most)))
    x[:, anchor] = signed(seed, "x at the anchor", (M,), 1, 1)
    return x


def packed(bits: int, codes: Any) -> Any:
    """Return codes packed into words of 32 bits, the first code in the lowest bits."""
    count = 32 // bits
    shifts = torch.arange(count) * bits
    words = (codes.view(codes.shape[0], -1, count) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _scaled(packing: Packing, form: Format, kept: Weights, exponents: Any) -> tuple[Any, ...]:
    """Return the stored scales, and in mode "affine" the offsets, both multiplied by 2**`exponents` of the columns."""
    if packing.mode == "affine":
        two = torch.tensor(2.0, dtype=torch.float64)
        return tuple((part * two**exponents).to(form.dtype) for part in (kept.scales, kept.offsets))
    exponents = exponents.expand_as(kept.scales)
    if packing.mode == "nvfp4":  # E4M3: significand 8 to 15 of unit 2**-3; a code's unit is 1/2
        return ((exponents + 7 + 4 << 3 | kept.scales - 8).to(torch.uint8),)
    unit = 1 if packing.mode == "mxfp4" else 4  # of codes: 1/2, or 2**(6 - 7 - 3)
    return ((exponents + 127 + unit).to(torch.uint8),)  # E8M0
