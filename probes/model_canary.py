"""The user's own Hugging Face model, run in this process: its answers are compared bit for bit with earlier ones.

Stresses: a whole inference of the served model: its own weights and shapes, prefill and decode from a KV cache, the
kernels that torch chooses for it.

Cannot see: the serving engine's own kernels, batching and parallel groups (an endpoint canary does); a fault that was
present when the baseline was learnt; a weight that no prompt uses. See docs/canaries.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from canaryd.probe import Context, Fact, NoCase, ProbeSpec, Reading, Skip, Skipped
from canaryd.worker.canary.checkpoint import BadCheckpoint, links
from canaryd.worker.canary.hugging_face import (
    PATHS,
    Checkpoint,
    Model,
    Tokenized,
    chain_of,
    check_memory,
    read_settings,
    recording,
)
from canaryd.worker.endpoint.prompts import load
from canaryd.worker.numeric.faults import FAULTS
from canaryd.worker.numeric.tensors import as_text
from canaryd.worker.toolkit import chosen, derive, need_torch, strict_switches, torch

SPEC = ProbeSpec(
    name="model_canary",
    summary="your own Hugging Face model, answering as it did before",
    budget={"quick": 20.0, "standard": 60.0, "deep": 300.0},
    timeout=900.0,
    opt_in=True,
    order=40,
    settings=("directory", "dtype", "prompts"),
)
PROMPTS = Path(__file__).parent / "endpoint" / "prompts.json"
REPEATS = 30
"""Number of recordings per case while a baseline is learnt."""
LEARNING = 300.0
"""Seconds after which a run that learns a baseline starts no further round; the probe's timeout lets a round end."""


def run(ctx: Context) -> Iterator[Fact]:
    """Decode and score every prompt; yield recordings."""
    need_torch()
    if ctx.drill and ctx.drill not in FAULTS:
        raise Skip(f"unknown fault {ctx.drill!r}; there are {', '.join(FAULTS)}")
    settings = read_settings(ctx.settings)
    source = Checkpoint(settings)
    every = [source.tokens(p.name, p.text, p.tokens) for p in load(settings.prompts or PROMPTS)]
    asked = [p for p in every if any(chosen(ctx, f"{source.dtype}/{path}/{p.name}") for path in PATHS)]
    if not asked:
        raise NoCase(ctx.cases, (f"{source.dtype}/{path}/{p.name}" for path in PATHS for p in every))
    for prompt in asked:
        if reason := source.room(prompt):
            yield Skipped(case=f"{source.dtype}/*/{prompt.name}", reason=reason)
    fitting = [p for p in every if not source.room(p)]
    asked = [p for p in asked if p in fitting]
    if not asked:
        raise Skip(f"{settings.directory}: none of the prompts fits: {source.room(every[0])}")
    need = source.need(fitting)
    check_memory(source, ctx.device, need)
    yield Reading(name="model_memory", value=need, unit="bytes", labels={"dtype": source.dtype})
    start = ctx.seed % len(asked)  # where loading uses up the budget, another run begins with another prompt
    asked = [*asked[start:], *asked[:start]]
    if ctx.level == "quick" and not ctx.cases and not ctx.baselining:
        asked = asked[:1]
    try:
        found = links(
            settings.directory,
            memory=ctx.memory,
            thorough=bool(ctx.cases),
            progress=lambda done, text: ctx.progress(done / 4, text),
        )
    except BadCheckpoint as error:
        raise Skip(str(error)) from error
    ctx.progress(0.25, f"loading {settings.directory}")
    started = ctx.clock()
    model = source.load(ctx.device)
    yield Reading(name="model_load", value=ctx.clock() - started, unit="seconds", labels={"dtype": source.dtype})
    try:
        with strict_switches() as switches, torch.inference_mode():
            # An operator of the model may have no deterministic kernel; then its modes are part of the baseline.
            torch.set_deterministic_debug_mode("default")
            yield Reading(name="switches", value=as_text({**switches, "deterministic_algorithms": "False"}))
            yield from _answers(ctx, source, model, found, asked)
    finally:
        model.close()


def _answers(
    ctx: Context,
    source: Checkpoint,
    model: Model,
    found: dict[str, str],
    asked: list[Tokenized],
) -> Iterator[Fact]:
    started, rounds = ctx.clock(), REPEATS if ctx.baselining else 1
    for number in range(rounds * len(asked)):
        turn, place = divmod(number, len(asked))
        prompt = asked[place]
        ctx.progress(0.5 + number / (2 * rounds * len(asked)), prompt.name)
        if ctx.baselining and turn and ctx.clock() - started > LEARNING:
            return
        if number and ctx.left <= 0.0 and not ctx.baselining and not ctx.cases:
            yield ctx.late(f"{source.dtype}/*/{prompt.name}")
            continue
        chain = chain_of(found, source, prompt)
        decoded = model.decode(prompt)
        scored = model.score(prompt, decoded.tokens)
        text = model.tokenizer.decode(decoded.tokens)
        for path, seen in zip(PATHS, (decoded, scored), strict=True):
            if chosen(ctx, case := f"{source.dtype}/{path}/{prompt.name}"):
                struck = seen.struck(FAULTS[ctx.drill], derive(ctx.seed, case)) if ctx.drill else seen
                yield recording(case, struck, chain, text)
