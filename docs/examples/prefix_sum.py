# ruff: noqa: INP001  a catalogue, not a package
"""Prefix sums of integers, which have one right answer.

Stresses: integer adders, and the way in which threads hand partial sums to each other.

Cannot see: floating-point units, memory beyond the operands.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

from canaryd.probe import Context, Exactness, Fact, ProbeSpec
from canaryd.worker.toolkit import Bound, Case, Problem, need_torch, torch, verify_all

SPEC = ProbeSpec(name="prefix_sum", summary="prefix sums of integers, compared bit for bit")
ELEMENTS = {"quick": 1 << 12, "standard": 1 << 16, "deep": 1 << 20}
LARGEST = 1 << 40


def run(ctx: Context) -> Iterator[Fact]:
    """Verify prefix sums of fresh numbers until the budget is spent."""
    need_torch()
    n = ELEMENTS[ctx.level]
    yield from verify_all(ctx, [Case(f"int64/prefix_sum/fresh@{n}", partial(build, n), compute)], [], None)


def build(n: int, seed: int) -> Problem:
    """Make operands and golden in plain Python, so that the golden shares no code with what is tested."""
    numbers = random.Random(seed)
    values = [numbers.randrange(1, LARGEST) for _ in range(n)]
    return Problem(
        operands=(torch.tensor(values),),
        golden=torch.tensor(list(accumulate(values))),
        exactness=Exactness.UNIVERSAL,
        bound=Bound(n * LARGEST, 1 << 63),  # raises where a sum would overflow
        shape=str(n),
    )


def compute(operands: tuple[Any, ...], out: Any) -> Any:  # noqa: ARG001  a new result each time
    """Compute on the device under test."""
    return torch.cumsum(*operands, dim=0)
