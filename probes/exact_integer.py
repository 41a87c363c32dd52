"""Integer and index operations: gather, embedding, scatter, sort, cumulative sum, modulo, routing to experts.

Stresses: integer units, address arithmetic, atomics, and the memory paths of indexed reads and writes. In real
incidents a wrong scatter or a wrong modulo was the first symptom, long before any product was wrong.

Cannot see: faults of floating-point units (exact_matmul does), memory that these sizes do not touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from canaryd.probe import Context, Device, Fact, ProbeSpec
from canaryd.worker.numeric.characterised import is_settled
from canaryd.worker.numeric.indexing import OPERATIONS, build
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.toolkit import Case, need_torch, verify_all

SPEC = ProbeSpec(
    name="exact_integer",
    summary="integer and index operations with one right answer",
    budget={"quick": 0.5, "standard": 8.0, "deep": 60.0},
    runtimes=("*",),
    every_instruction_set=True,
    order=5,
)

ELEMENTS = {"quick": 8_192, "standard": 1 << 17, "deep": 1 << 20}
GOLDEN = Path(__file__).parent / "golden" / "exact_integer.json"


def run(ctx: Context) -> Iterator[Fact]:
    """Verify every operation once on fixed operands and then on fresh ones."""
    need_torch()
    yield from verify_all(ctx, every_case(ctx), fixed_cases(ctx.device), GOLDEN)


def every_case(ctx: Context) -> list[Case]:
    """Return every fresh case of a run."""
    return [_case(ctx.device, name, ELEMENTS[ctx.level]) for name in OPERATIONS]


def fixed_cases(device: Device) -> list[Case]:
    """Return every fixed case; the digests of its right results ship with canaryd."""
    return [_case(device, name, 1024, is_fixed=True) for name in OPERATIONS]


def _case(device: Device, name: str, n: int, *, is_fixed: bool = False) -> Case:
    """Return an operation as a case of size `n`; it counts as known to be right if the device `is_settled`."""
    kind = "fixed" if is_fixed else "fresh"
    compute = partial(interface.of(device).run, Operation(name))
    return Case(f"int64/{name}/{kind}@{n}", partial(build, name, n), compute, is_settled(device), fixed=is_fixed)
