"""Integer and index problems whose answers plain Python computes, one element at a time.

Index operations were the first wrong kernels of real incidents (scatter, modulo). Their right answer is the same on
every device and stack. The golden is plain Python and shares no code with the tested kernels.

Letters: n elements, D columns of an embedding, E experts of a mixture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from canaryd.facts import Exactness
from canaryd.worker.numeric.integers import below, permutation, signed, stream
from canaryd.worker.numeric.operands import Bound, Problem
from canaryd.worker.numeric.tensors import torch

Builder = Callable[[int, int], tuple[tuple[Any, ...], list[Any]]]
"""Function that takes a seed and the size n, and returns (operands, golden as nested lists of Python integers)."""


def _gather(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    table, index = stream(seed, "table", (n,)), below(seed, "index", (n,), n)
    values = table.tolist()
    return (table, index), [values[i] for i in index.tolist()]


def _embedding(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    # Bit patterns of the whole int32 range ride through a gather of rows, as token embeddings do.
    table = (stream(seed, "table", (n // 16, 16)) % (1 << 31)).to(torch.int32)
    index = below(seed, "index", (n // 8,), n // 16)
    rows = table.tolist()
    return (table, index), [rows[i] for i in index.tolist()]


def _scatter(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    values, place = stream(seed, "values", (n,)), permutation(seed, "place", n)
    out = [0] * n
    for i, v in zip(place.tolist(), values.tolist(), strict=True):
        out[i] = v
    return (values, place), out


def _index_add(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    # Many sources per target: integer addition is exact in every order, so atomics do not matter.
    values, place = signed(seed, "values", (n,), 1, 1 << 40), below(seed, "place", (n,), n // 8)
    out = [1] * (n // 8)
    for i, v in zip(place.tolist(), values.tolist(), strict=True):
        out[i] += v
    return (values, place), out


def _cumsum(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    values = signed(seed, "values", (n,), 1, 1 << 40)
    return (values,), list(accumulate(values.tolist()))


def _sort(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    values = stream(seed, "values", (n,))
    return (values,), sorted(values.tolist())


def _topk(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    values = permutation(seed, "keys", n) * 3 + 1  # unique keys: one right set of indices
    ranked = sorted(range(n), key=values.tolist().__getitem__, reverse=True)
    return (values,), ranked[: n // 16]


def _modulo(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    values, by = signed(seed, "values", (n,), 1, 1 << 62), below(seed, "by", (n,), 151_936) + 1
    return (values, by), [v % m for v, m in zip(values.tolist(), by.tolist(), strict=True)]


def _bucketize(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    edges = torch.sort(stream(seed, "edges", (n // 16,))).values
    values = stream(seed, "values", (n,))
    limits = edges.tolist()
    return (values, edges), [bisect_left(limits, v) for v in values.tolist()]


def _experts(seed: int, n: int) -> tuple[tuple[Any, ...], list[Any]]:
    """Return tokens, the expert number of each, and the golden: each token changed by its expert's number, in order."""
    tokens, expert = stream(seed, "tokens", (n,)) >> 2, below(seed, "expert", (n,), 64)
    return (tokens, expert), [t ^ (e * 0x9E3779B9) for t, e in zip(tokens.tolist(), expert.tolist(), strict=True)]


EXPERTS = (
    "torch.empty_like(a).scatter_(0, (order := torch.argsort(b, stable=True)), a.index_select(0, order) ^ "
    "(torch.repeat_interleave(torch.arange(64, device=a.device), torch.zeros(64, dtype=torch.int64, "
    "device=a.device).index_add_(0, b, torch.ones_like(b)), output_size=a.numel()) * 0x9E3779B9))"
)
EXPRESSIONS: dict[str, tuple[Builder, str]] = {
    "gather": (_gather, "a.gather(0, b)"),
    "embedding": (_embedding, "a.index_select(0, b)"),
    "scatter": (_scatter, "torch.zeros_like(a).scatter_(0, b, a)"),
    "index_add": (_index_add, "torch.ones(a.numel() // 8, dtype=a.dtype, device=a.device).index_add_(0, b, a)"),
    "cumsum": (_cumsum, "a.cumsum(0)"),
    "sort": (_sort, "torch.sort(a).values"),
    "topk": (_topk, "torch.topk(a, a.numel() // 16).indices"),
    "modulo": (_modulo, "torch.remainder(a, b)"),
    "bucketize": (_bucketize, "torch.bucketize(a, b)"),
    "experts": (_experts, EXPERTS),
}
"""Name of the operation → its builder, and a torch expression of the operands a and b. The script for people without
canaryd uses the same expression."""
OPERATIONS: dict[str, tuple[Builder, Callable[..., Any]]] = {
    name: (make, eval(f"lambda a, b=None: {text}", {"torch": torch}))  # noqa: S307 - our own text
    for name, (make, text) in EXPRESSIONS.items()
}


def build(name: str, n: int, seed: int) -> Problem:
    """Build one integer problem of n elements, with int64 or int32 tensors."""
    operands, answer = OPERATIONS[name][0](seed, n)
    golden = torch.tensor(answer, dtype=operands[0].dtype if name == "embedding" else torch.int64)
    return Problem(
        operands=operands,
        golden=golden,
        exactness=Exactness.UNIVERSAL,
        bound=Bound(int(golden.abs().max()), 1 << 63),
        shape=f"n={n}",
    )
