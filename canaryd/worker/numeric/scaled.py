"""Exact products of FP8 operands with scales: one for each row of A and each column of B, as serving quantises them.

The bound. A product of whole numbers is drawn as in `operands`, so that partial sums are below 2**bits in any order.
Each row of A is then stored divided by a power of two, and its scale is that power times another one, 2**r; columns of
B likewise, with 2**c. A stored value times its scale is the whole number times 2**r, so all terms of an output have the
same unit, 2**(r + c). Whether a kernel multiplies scales into operands, into partial sums or into the result, every
number on its way is a whole number below 2**bits times a power of two. Nothing rounds but the result, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.model import TORCH, Device
from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.characterised import room_of
from canaryd.worker.numeric.integers import below
from canaryd.worker.numeric.operands import Inexact, Problem, Product, draw, gather_golden, make_pools
from canaryd.worker.numeric.products import computing
from canaryd.worker.numeric.sizes import asked_for, choose
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, bits, torch

KINDS = ("decode", "prefill")
DRAWN = ("dense", "full", "cancel")
"""Content classes whose values are whole numbers; the other classes add powers of two, as the scales do here."""
SPREAD = 4
"""Limit for the exponents r and c: they lie in -4 … 3."""
GRAIN, LONGEST = 128, 4096
"""N and K are multiples of the first; K is at most the second, because the host gathers the whole operands."""


@dataclass(frozen=True)
class Scaling:
    """A form of scaled operands, with the formats of their values and results."""

    name: str
    source: str
    """Format of the values: a name of `FORMATS`."""
    targets: tuple[str, ...]
    shifts: tuple[int, int]
    """Smallest and largest e for which every whole number of `source.bits` bits, divided by 2**e, is in the format."""


SCALINGS = {s.name: s for s in (Scaling("rowwise", "float8_e4m3fn", ("bfloat16", "float32"), (-4, 6)),)}


def pairs(device: Device) -> list[tuple[Scaling, str]]:
    """Return (scaling, format of results) of every tested product."""
    return [(s, target) for s in SCALINGS.values() for target in s.targets] if device.runtime == TORCH else []


def label_of(device: Device, scaling: Scaling, target: str) -> str:
    """Return the label of a scaling and a format of results for the names of cases."""
    return f"{float8(device, scaling.source)}-{scaling.name}>{target}"


def case(device: Device, scaling: Scaling, target: str, content: str, kind: str, sizes: tuple[int, int, int]) -> Case:
    """Return one product as a case; `sizes` are M, N and K."""
    M, N, K = sizes
    source = float8(device, scaling.source)
    room = room_of(device, source, target, batched=False)
    return Case(
        f"{label_of(device, scaling, target)}/{content}/{kind}/nt@{M}x{N}x{K}",
        partial(build, scaling, Product(content, FORMATS[source], FORMATS[target], room, M, N, K, 0, "nt")),
        computing(device, source, target),
        characterised=False,
    )


def tiny_cases(device: Device) -> dict[str, Case]:
    """Return a small case of every label, which tells whether the device supports such products."""
    return {label_of(device, *pair): case(device, *pair, "dense", "decode", (16, 128, 128)) for pair in pairs(device)}


def fresh_cases(ctx: Context, speeds: Mapping[str, float]) -> Iterator[Case]:
    """Yield the cases of the labels in `speeds`: one of each, or every content and kind at "deep" or if asked for."""
    variants = list(itertools.product(DRAWN, KINDS))
    for turn, (scaling, target) in enumerate(pairs(ctx.device), ctx.seed):
        label = label_of(ctx.device, scaling, target)
        if label not in speeds:
            continue
        plain = f"{float8(ctx.device, 'float8_e4m3fn')}>{target}"
        for content, kind in variants if ctx.level == "deep" or ctx.cases else [variants[turn % len(variants)]]:
            name = f"{content}/{kind}/nt"
            asked = asked_for(ctx, f"{label}/{name}")
            M, N, K, _ = asked or choose(ctx, speeds.get(plain, 0.0), kind, f"{plain}/{name}")
            N, K = (max(1, n // GRAIN) * GRAIN for n in (N, min(K, LONGEST)))
            yield case(ctx.device, scaling, target, content, kind, (M, N, K))


def build(scaling: Scaling, product: Product, seed: int) -> Problem:
    """Return the problem of a scaled product: A (M, K), B (K, N), scales of A (M, 1) and of B (1, N), golden (M, N).

    Equal arguments give equal problems. Raises `Inexact` as `make_pools` does.
    """
    pools = make_pools(product, seed)
    golden = gather_golden(product, pools, seed, 0).to(torch.float32)
    stored, scales = [], []
    for name, pool, index in zip("ab", pools.operands, draw(product, seed, 0), strict=True):
        rows = index[0]
        shifts, own = _exponents(scaling, f"scales of {name}", seed, len(pool), len(rows))
        stored.append(_shifted(pool, shifts)[rows].view(pool.dtype))
        scales.append(_two_to(shifts[rows] + own))
        golden *= _two_to(own) if name == "a" else _two_to(own).mT
    (a, b), (scale_a, scale_b) = stored, scales
    return replace(pools, operands=(a, b.mT, scale_a, scale_b.mT.contiguous()), golden=golden.to(product.target.dtype))


def _exponents(scaling: Scaling, name: str, seed: int, pool: int, rows: int) -> tuple[Any, Any]:
    """Return the exponents e of the pool's rows (pool, 1), and those of the operand's own rows (rows, 1): r or c."""
    low, high = scaling.shifts
    own = below(seed, f"{name}, of rows", (rows, 1), 2 * SPREAD) - SPREAD
    return low + below(seed, name, (pool, 1), high - low + 1), own


def _shifted(pool: Any, shifts: Any) -> Any:
    """Return the raw bits of a pool's values divided by 2**`shifts`; raise `Inexact` if one is not in the format."""
    values = pool.to(torch.float32) * _two_to(-shifts)
    stored = values.to(pool.dtype)
    if not bool((stored.to(torch.float32) == values).all()):
        raise Inexact(f"a value divided by its scale is not in {pool.dtype}")
    return bits(stored)


def _two_to(exponents: Any) -> Any:
    return (torch.tensor(2.0, dtype=torch.float64) ** exponents).to(torch.float32)
