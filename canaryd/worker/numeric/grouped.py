"""Exact grouped products, as mixtures of experts use them: each group of rows is multiplied by a matrix of its own.

Letters: G groups (experts), M rows (tokens) in all, which are sorted by group; N and K as in `operands`. Operands are A
(M, K), B (G, K, N), and the end of each group, int32 (G,). Groups have different lengths, and at least one is empty.

The bound is that of one product of the pools: every element of the result is one of its dot products. Kernels
accumulate in float32 and do not split K (pytorch, aten/src/ATen/native/cuda/GroupMM.cu); where there is none, torch
multiplies group by group, with the switches of other products.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from canaryd.model import TORCH, Device
from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.characterised import room_of
from canaryd.worker.numeric.integers import below
from canaryd.worker.numeric.operands import CONTENTS, Problem, Product, draw, make_pools
from canaryd.worker.numeric.sizes import asked_for, choose
from canaryd.worker.numeric.tensors import FORMATS, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation

FORM = "bfloat16"
LABEL = f"{FORM}-grouped"
KINDS = ("decode", "prefill")
GROUPS = 8
"""Number of groups, as in Mixtral; larger mixtures have longer lists of the same kernel's tiles."""
GRAIN, LONGEST = 16, 2048
"""N and K are multiples of the first, as strides of 16 bytes want; K is at most the second, because the host gathers
all of B."""


def case(device: Device, content: str, kind: str, sizes: tuple[int, int, int, int]) -> Case:
    """Return one grouped product as a case; `sizes` are G, M, N and K."""
    form, room = FORMATS[FORM], room_of(device, FORM, FORM, batched=False)
    groups, M, N, K = sizes
    return Case(
        f"{LABEL}/{content}/{kind}/nt@{groups}x{M}x{N}x{K}",
        partial(build, Product(content, form, form, room, M, groups * N, K, 0, "nt"), groups),
        partial(interface.of(device).run, Operation("grouped", FORM, FORM)),
        characterised=False,
    )


def tiny_cases(device: Device) -> dict[str, Case]:
    """Return a small case by its label, which tells whether the device supports such products."""
    return {LABEL: case(device, "dense", "decode", (2, 16, 16, 16))} if device.runtime == TORCH else {}


def fresh_cases(ctx: Context, speeds: Mapping[str, float]) -> Iterator[Case]:
    """Yield two cases, one of each kind, or every content and kind at "deep" or if asked for.

    Each group has a matrix of half of the columns that a single product has; so all groups together have enough tiles.
    """
    if LABEL not in speeds:
        return
    contents = list(CONTENTS)
    every = list(itertools.product(contents, KINDS))
    some = [(contents[(ctx.seed + n) % len(contents)], kind) for n, kind in enumerate(KINDS)]
    for content, kind in every if ctx.level == "deep" or ctx.cases else some:
        name = f"{content}/{kind}/nt"
        asked = asked_for(ctx, f"{LABEL}/{name}")
        M, N, K, groups = asked or choose(ctx, speeds.get(FORM, 0.0), kind, f"{FORM}/{name}")
        N, K = (max(1, n // GRAIN) * GRAIN for n in (N if asked else N // 2, min(K, LONGEST)))
        yield case(ctx.device, content, kind, (max(2, groups or GROUPS), M, N, K))


def build(product: Product, groups: int, seed: int) -> Problem:
    """Return the problem of a grouped product; `product` has the columns of all groups side by side.

    Operands: A (M, K), B (G, K, N), and the ends of the groups, int32 (G,); golden (M, N). Equal arguments give equal
    problems. Raises `Inexact` as `make_pools` does.
    """
    pools = make_pools(product, seed)
    (rows,), (columns,) = draw(product, seed, 0)
    columns = columns.view(groups, -1)
    ends = _ends(seed, groups, product.M)
    a, b = pools.operands
    parts = zip(rows.tensor_split(ends[:-1]), columns, strict=True)
    golden = torch.cat([pools.golden[mine].index_select(1, wanted) for mine, wanted in parts])
    return replace(
        pools,
        operands=(a[rows], b[columns].mT, ends.to(torch.int32)),
        golden=golden,
        shape=f"groups={groups} M={product.M} N={columns.shape[1]} K={product.K}",
        operations=2 * golden.numel() * product.K,
    )


def _ends(seed: int, groups: int, M: int) -> Any:
    """Return the number of the row behind each group, int64 (groups,), ascending up to M; one group is empty."""
    ends = below(seed, "ends of groups", (groups,), M + 1).sort().values
    empty = int(below(seed, "empty group", (1,), groups - 1))
    ends[empty] = ends[empty - 1] if empty else 0
    ends[-1] = M
    return ends
