"""Exact products of operands with scales, as serving quantises them: for rows, or for blocks of elements along K.

The bound. A product of whole numbers is drawn as in `operands`, so that partial sums are below 2**bits in any order.
Each row of A is then stored divided by a power of two for each of its blocks, and the scale of a block is that power
times another one of the whole row, 2**r; columns of B likewise, with 2**c. A stored value times its scale is the whole
number times 2**r, so all terms of an output have the same unit, 2**(r + c). Whether a kernel multiplies scales into
operands, into the sums of blocks or into the result, every number on its way is a whole number below 2**bits times a
power of two. Nothing rounds but the result, once.

Sources: pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes and strides of scales); cuBLAS documentation, "1D
Block Scaling Factors Layout"; OCP Microscaling Formats 1.0, section 5.3 (E2M1, E8M0).
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
from canaryd.worker.numeric.quantized import FP4
from canaryd.worker.numeric.sizes import asked_for, choose
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, Format, bits, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation

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
    block: int = 0
    """Number of elements along K that have one scale; 0: all."""
    code: tuple[int, int] | None = None
    """Bias of the exponent and number of bits of the significand in the byte of a scale; None: scales in float32."""
    square: bool = False
    """Whether `GRAIN` columns of B have their scales in common."""


E4M3, E2M1 = (-4, 6), (-1, 1)  # of E2M1 all codes are used, 1/2 too: it is subnormal in name alone
WIDE = ("bfloat16", "float32")
SCALINGS = {
    s.name: s
    for s in (
        Scaling("rowwise", "float8_e4m3fn", WIDE, E4M3),
        Scaling("1x128", "float8_e4m3fn", WIDE, E4M3, 128),
        Scaling("128x128", "float8_e4m3fn", WIDE, E4M3, 128, square=True),
        Scaling("mxfp8", "float8_e4m3fn", WIDE, E4M3, 32, (127, 0)),
        Scaling("mxfp4", "float4_e2m1fn", WIDE[:1], E2M1, 32, (127, 0)),
        Scaling("nvfp4", "float4_e2m1fn", WIDE, E2M1, 16, (7, 3)),
    )
}


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
    blocks = partial(interface.of(device).run, Operation("blocks", scaling.name, target))
    return Case(
        f"{label_of(device, scaling, target)}/{content}/{kind}/nt@{M}x{N}x{K}",
        partial(build, scaling, Product(content, FORMATS[source], FORMATS[target], room, M, N, K, 0, "nt")),
        blocks if scaling.block else computing(device, source, target),
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
    """Return the problem of a scaled product: A (M, K), B (K, N), scales of A and of B, golden (M, N).

    "nvfp4" has two more operands, a scale of all of A and one of all of B. FP4 values are bytes of two codes along K.
    Equal arguments give equal problems. Raises `Inexact` as `make_pools` does.
    """
    pools = make_pools(product, seed)
    golden = gather_golden(product, pools, seed, 0).to(torch.float32)
    stored, scales, whole = [], [], []
    for name, pool, (rows,) in zip("ab", pools.operands, draw(product, seed, 0), strict=True):
        tile = GRAIN if scaling.square and name == "b" else 1  # columns with scales in common come from the whole pool
        low, high = scaling.shifts
        blocks = product.K // (scaling.block or product.K)
        shifts = low + below(seed, f"shifts of {name}", (1 if tile > 1 else len(pool), blocks), high - low + 1)
        shifts = shifts.expand(len(pool), blocks)
        own = below(seed, f"rows of {name}", (len(rows) // tile, 1), 2 * SPREAD) - SPREAD
        every = below(seed, f"all of {name}", (int(scaling.name == "nvfp4"),), 2 * SPREAD) - SPREAD
        own = own.repeat_interleave(tile, 0)
        stored.append(_stored(product.source, pool, shifts)[rows])
        scales.append(_scales(scaling, (shifts[rows] + own)[::tile], name))
        whole += _two_to(every)
        factor = _two_to(own + every.sum())
        golden *= factor if name == "a" else factor.mT
    a, b = (side if "float4" in scaling.source else side.view(product.source.dtype) for side in stored)
    return replace(pools, operands=(a, b.mT, *scales, *whole), golden=golden.to(product.target.dtype))


def _stored(form: Format, pool: Any, shifts: Any) -> Any:
    """Return the codes of a pool's values divided by 2**`shifts`, as bytes; raise `Inexact` if there is no such code.

    FP4 has two codes in a byte, the first in the lower half.
    """
    values = pool.to(torch.float32) * _two_to(-shifts).repeat_interleave(pool.shape[1] // shifts.shape[1], 1)
    if form.name.startswith("float4"):
        twice = torch.tensor(FP4, dtype=torch.float32)
        codes = torch.searchsorted(twice, 2 * values.abs())
        meant = twice[codes.clamp(max=7)].copysign(values) / 2
        codes += (values < 0).to(torch.int64) << 3
        stored = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    else:
        stored = bits(values.to(pool.dtype))
        meant = values.to(pool.dtype).to(torch.float32)
    if not bool((meant == values).all()):
        raise Inexact(f"a value divided by its scale is not in {form.name}")
    return stored


def _scales(scaling: Scaling, exponents: Any, name: str) -> Any:
    """Return 2**`exponents` (rows or tiles, blocks) of operand "a" or "b", laid out as torch wants such scales."""
    if scaling.code is not None:
        bias, significand = scaling.code
        return swizzled((exponents + bias << significand).to(torch.uint8))
    table = _two_to(exponents)
    if not scaling.block:
        return table if name == "a" else table.mT.contiguous()
    if scaling.square and name == "b":
        return torch.nn.functional.pad(table, (0, -table.shape[1] % 4)).mT
    return table.mT.contiguous().mT


def swizzled(table: Any) -> Any:
    """Return bytes (rows, blocks) in cuBLAS's order, filled up with zeros to whole tiles of 128 x 4."""
    rows, blocks = table.shape
    whole = torch.nn.functional.pad(table, (0, -blocks % 4, 0, -rows % 128))
    return whole.view(-1, 4, 32, whole.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def _two_to(exponents: Any) -> Any:
    return (torch.tensor(2.0, dtype=torch.float64) ** exponents).to(torch.float32)
