"""Prompts whose continuation a small language model knows by heart: the same tokens on every healthy device.

Stresses: a whole inference in every floating-point format: embedding, norms, rotations, attention over a KV cache,
products at prefill and decode shapes, one row and four; eager, compiled, and replayed from a CUDA graph.

Cannot see: kernels that only serving uses, faults that move no logit beyond its tolerance (which is wide in 16-bit
formats), and faults that show only with large matrices or at full load. See docs/canaries.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Reading, Skip, Skipped
from canaryd.worker.canary.fixed import FIXED
from canaryd.worker.canary.golden import PATHS, Bench, Golden, Task, load_golden
from canaryd.worker.canary.model import DTYPES, BadFile
from canaryd.worker.numeric.cases import QUOTED
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import as_text
from canaryd.worker.toolkit import chosen, need_torch, strict_switches, torch

SPEC = ProbeSpec(
    name="canary_prompts",
    summary="a small language model that must continue its prompts as trained",
    every_instruction_set=True,
    timeout=120.0,  # torch.compile may take 90 of them
    order=20,
)
FILES = Path(__file__).parent / "canary"


def run(ctx: Context) -> Iterator[Fact]:
    """Compare every task's tokens and logits with the goldens; yield the distance per mode."""
    need_torch()
    try:
        golden = load_golden(FILES)
    except BadFile as error:
        raise Skip(f"{FILES}: {error}. This installation is damaged: install canaryd again") from error
    session = Session(ctx)
    tasks = [t for t in every_task(ctx, golden) if chosen(ctx, t.name) or chosen(ctx, f"{t.name}/logits")]
    if not tasks:
        raise NoCase(ctx.cases, (t.name for t in every_task(ctx, golden)))
    session.injector.arm([t.name for t in tasks if t.path in PATHS] or [t.name for t in tasks if t.rows])
    # A drill's case goes first. Compiled cases go early, so that the rest of the budget is shared by what is left.
    tasks.sort(key=lambda t: (not t.rows, t.name != session.injector.target, t.path != "compiled"))
    bench = Bench(session, golden)
    with strict_switches() as switches, torch.inference_mode(), bench.exits:
        text = as_text(switches)
        bench.settings = hashlib.sha256(text.encode()).hexdigest()[:16]
        yield Reading(name="switches", value=text)
        yield from _prepare(ctx, bench, tasks)
        yield from _verify(ctx, bench, [task for task in tasks if task.dtype in bench.models])
    if ctx.drill and not session.injector.spent:
        raise Skip(f"the fault {ctx.drill!r} was not injected: no result was computed for its case")
    yield from bench.readings()


def every_task(ctx: Context, golden: Golden) -> list[Task]:
    """Return one prompt per format at quick, in rotation; at other levels, and where cases are named, every prompt.

    Compiling takes long: deep compiles one format and batch, in rotation, other levels none.
    """
    count, named, wide = len(golden.names), bool(ctx.cases), bool(ctx.level != "quick" or ctx.cases)
    modes = [(dtype, batch) for batch in (1, 4) for dtype in DTYPES]
    compiled = modes if named else [modes[ctx.seed % len(modes)]] if ctx.level == "deep" else []
    graph = modes if wide and ctx.device.backend in ("cuda", "rocm") else []
    tasks = [
        Task(dtype, path, golden.names[i], tuple((i + row) % count for row in range(batch)))
        for turn in range(count if wide else 1)
        for number, dtype in enumerate(DTYPES)
        for i in ((ctx.seed + turn + number) % count,)
        for path in (*PATHS, *FIXED)
        for batch in ((1, 4) if wide else (1,))
        if path in PATHS or (dtype, batch) in {"compiled": compiled, "graph": graph}[path]
    ]
    return tasks + [Task(dtype, path) for path in ("sensitive", "weights") for dtype in DTYPES]


def _prepare(ctx: Context, bench: Bench, tasks: list[Task]) -> Iterator[Skipped]:
    for dtype in dict.fromkeys(task.dtype for task in tasks):
        try:
            bench.prepare(dtype)
        except Exception as error:
            if not is_refusal(error):
                raise
            reason = (str(error).splitlines() or ["no reason given"])[0][:QUOTED]
            yield Skipped(case=dtype, reason=f"this torch on {ctx.device.backend} does not support it: {reason}")


def _verify(ctx: Context, bench: Bench, tasks: list[Task]) -> Iterator[Fact]:
    cannot: dict[tuple[tuple[str, str], ...], str] = {}
    for number, task in enumerate(tasks):
        ctx.progress(number / len(tasks), task.name)
        if task.path == "weights":
            yield bench.weights(task.dtype)
        elif task.path == "sensitive":
            yield from bench.sensitive(task)
        elif number >= len(bench.models) and ctx.left <= 0.0 and not ctx.cases:
            yield ctx.late(task.name)
        elif task.mode not in cannot and (reason := bench.make(task)):
            cannot[task.mode] = reason
            yield Skipped(case=f"{task.dtype}/{task.path}/b{len(task.rows)}", reason=reason)
        elif task.mode not in cannot:
            yield from bench.verify(task, ctx.left / (len(tasks) - number) if ctx.level == "deep" else 0.0)
