"""Full-mantissa operands through the kernels that serving uses: results are recorded and compared with error bounds.

Stresses: products at prefill and decode shapes, attention, norms, activations, rotations, softmax, elementary
functions, quantised and FP8 products, each in the kernel that torch chooses here; rounding and all mantissa bits, which
exact goldens do not test.

Cannot see: results that were wrong from the first recording on and are within the bound (a comparison of identical
devices can show them); faults that need full load, many threads or other sizes. See docs/goldens.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Reading, Skip
from canaryd.worker.numeric.recording import Recorder
from canaryd.worker.numeric.serving_kernels import Kernel, every_kernel
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import as_text, on_cores
from canaryd.worker.toolkit import chosen, need_torch, strict_switches, torch

SPEC = ProbeSpec(
    name="recorded_kernels",
    summary="kernels that serving uses, compared with error bounds and with earlier results",
    budget={"quick": 1.0, "standard": 10.0, "deep": 60.0},
    every_instruction_set=True,
    order=30,
)
ROUNDS = {"quick": 1, "standard": 5, "deep": 30}
"""Level → number of times that each case is computed, each time from a fresh upload."""
LEARNING = 30
"""Number of rounds with which one learning run completes a baseline; a retest under load has as many."""
LEAST = 3
"""Minimum number of rounds of a run that learns a baseline, even if the budget is spent."""


def run(ctx: Context) -> Iterator[Fact]:
    """Run all cases in rotation from one that the seed chooses; check each result against its bound, and record it."""
    need_torch()
    session = Session(ctx)
    cases = every_kernel(ctx.device)
    kernels = [k for k in cases if chosen(ctx, k.name)]
    if not kernels:
        raise NoCase(ctx.cases, (k.name for k in cases))
    start = ctx.seed % len(kernels)
    kernels = [*kernels[start:], *kernels[:start]]
    session.injector.arm([k.name for k in kernels])
    kernels.sort(key=lambda k: k.name != session.injector.target)  # a drill's case goes first
    with strict_switches() as switches, torch.inference_mode(), on_cores((), 1):
        text = as_text(switches)
        yield Reading(name="switches", value=text)
        recorder = Recorder(session, hashlib.sha256(text.encode()).hexdigest()[:16])
        yield from _rounds(ctx, recorder, kernels)
        yield from recorder.summary()
    if ctx.drill and not session.injector.spent:
        raise Skip(f"the fault {ctx.drill!r} was not injected: no result was computed for its case")


def _rounds(ctx: Context, recorder: Recorder, kernels: list[Kernel]) -> Iterator[Fact]:
    rounds = LEARNING if ctx.baselining or ctx.intensity else ROUNDS[ctx.level]
    for turn in range(rounds):
        # Round by round, so that each time another kernel ran before and other memory is free.
        for number, kernel in enumerate(kernels):
            ctx.progress((turn + number / len(kernels)) / rounds, kernel.name)
            needed = (
                turn < LEAST if ctx.baselining else turn == 0 and (number == 0 or (ctx.cases and "*" not in ctx.cases))
            )
            if needed or ctx.left > 0.0:
                ctx.pace()
                yield from recorder.record(kernel, turn)
            elif turn == 0:
                recorder.missed(kernel)
        kernels = [k for k in kernels if not recorder.refused(k)]
        session = recorder.session
        if session.injector.fault and not session.injector.spent and kernels:
            session.injector.arm([k.name for k in kernels])  # the case that the seed chose is not supported here
