"""The exact canary's inferences as cases for `verify_all`: build weights, prompt and answer; run one inference."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

from canaryd.facts import Exactness
from canaryd.model import Device
from canaryd.worker.canary.fixed import COMPILING, FIXED, Decoder, cannot_be_fixed, time_limit, why_not
from canaryd.worker.exact_canary.construct import Model, construct
from canaryd.worker.exact_canary.golden import continuation, prompt
from canaryd.worker.exact_canary.prove import Proof, Walk
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import TINY, Shape, plan
from canaryd.worker.numeric.cases import QUOTED, Case
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.operands import Bound, Problem
from canaryd.worker.numeric.tensors import torch, visible_cores
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operators, Unsupported
from canaryd.worker.runtime.torch import OPERATORS

EAGER = "eager"
"""Attention operator by operator, and not by a kernel."""
PATHS = ("decode", "forced")
"""A prompt is continued word by word from the KV cache; or prompt and continuation come in one pass. `FIXED` are ways
to continue by calls of fixed shapes."""
MOST_ROWS = 2
"""Rows of a batch."""
NORM = "model.norm.weight"
"""The operand that an injected operand fault strikes: every bit of it reaches every logit's sum."""


@dataclass(frozen=True)
class Inference:
    """One inference: format, path, rows, attention, words generated."""

    form: str
    path: str
    rows: int
    kernel: str
    steps: int
    shape: Shape = TINY

    @property
    def anchored(self) -> bool:
        """Whether two scores tie; torch's math kernel scales q and k by a root each, which rounds (docs)."""
        return self.kernel != "math"

    @property
    def label(self) -> str:
        """Its attention, and whether its model has experts."""
        return self.kernel + ("-experts" if self.shape.experts else "")

    @property
    def name(self) -> str:
        """The case's name."""
        return f"{self.form}/{self.path}/b{self.rows}/{self.label}@{self.steps}"


def case(device: Device, inference: Inference, seed: int) -> Case:
    """Return an inference with the model and prompts of a run's seed as a case."""
    sound = accumulator(device, inference.form).characterised
    names = tuple(model(inference.shape, seed, inference.anchored, visible_cores()).weights)
    return Case(
        inference.name,
        partial(build, inference, seed),
        partial(infer, inference, names, operators=interface.operators_of(device)),
        sound,
        struck=names.index(NORM),
    )


def kernels(device: Device) -> tuple[str, ...]:
    """Return the ways in which a device's runtime computes attention, eager first."""
    return EAGER, *map(str.lower, interface.of(device).attention_kernels)


@functools.lru_cache(maxsize=4)
def model(shape: Shape, seed: int, anchored: bool, cores: tuple[int, ...]) -> Model:  # noqa: ARG001
    """Return a model; made once by each set of `cores` that asks."""
    return construct(shape, seed, anchored=anchored)


@functools.lru_cache(maxsize=4)
def proofs(shape: Shape, seed: int, anchored: bool, steps: int, cores: tuple[int, ...]) -> list[Proof]:
    """Return the proofs of all rows' prompts and continuations; made once by each set of `cores` that asks."""
    made = model(shape, seed, anchored, cores)
    walk = Walk(shape, made.weights)
    return [walk.prove(text(made, seed, row, steps), steps) for row in range(MOST_ROWS)]


def text(made: Model, seed: int, row: int, steps: int) -> list[int]:
    """Return a row's prompt and the words that follow it, without the last, which no engine is given."""
    words = prompt(made.program, seed + row)
    return words + continuation(made.program, made.shape.layers, words, steps)[:-1]


def build(inference: Inference, seed: int, _: int) -> Problem:
    """Return weights and tokens, and the logits: of the generated words, or where all is given of every position.

    Operands: the weights by name order of the model, then tokens (rows, T). Golden (rows, positions, vocabulary).
    """
    kind, cores = getattr(torch, inference.form), visible_cores()
    made = model(inference.shape, seed, inference.anchored, cores)
    proved = proofs(inference.shape, seed, inference.anchored, inference.steps, cores)[: inference.rows]
    texts = [text(made, seed, row, inference.steps) for row in range(inference.rows)]
    logits = torch.stack([p.logits for p in proved]).to(kind)
    if inference.path != "forced":
        length = len(texts[0]) - inference.steps + 1
        texts, logits = [words[:length] for words in texts], logits[:, -inference.steps :].contiguous()
    needed = max(o.sums for p in proved for o in p.operators.values())
    return Problem(
        operands=(*(w.to(kind) for w in made.weights.values()), torch.tensor(texts)),
        golden=logits,
        exactness=Exactness.UNIVERSAL,
        bound=Bound((1 << needed) - 1, 1 << 24),
        shape=f"{inference.shape.layers} layers of {inference.shape.hidden}, {inference.rows} x {len(texts[0])} tokens",
        witnessed=all(p.witnessed for p in proved),
    )


def infer(
    inference: Inference,
    names: tuple[str, ...],
    operands: tuple[Any, ...],
    out: Any,  # noqa: ARG001
    operators: Operators = OPERATORS,
) -> Any:
    """Return the logits of one inference on the operands' device."""
    *weights, tokens = operands
    kernel = "" if inference.kernel == EAGER else inference.kernel.upper()
    runner = Runner(inference.shape, dict(zip(names, weights, strict=True)), kernel, operators=operators)

    def work() -> Any:
        if inference.path in FIXED:
            return _infer_fixed(inference, runner, tokens)
        return runner.decode(tokens, inference.steps)[1] if inference.path == "decode" else runner.forward(tokens)

    return runner.operators.run(work)


def _infer_fixed(inference: Inference, runner: Runner, tokens: Any) -> Any:
    """Return what `infer` returns, by compiled or captured calls; raise `Unsupported` where they cannot be made."""
    try:
        with time_limit(COMPILING, "torch.compile"):
            decoder = Decoder(runner, tokens.shape[0], tokens.shape[1], inference.steps)
            (decoder.compile if inference.path == "compiled" else decoder.capture)()
            return decoder(tokens)[1]  # compiled at the first call of a process, for any weights
    except Exception as error:
        if not cannot_be_fixed(error):
            raise
        raise Unsupported(why_not(error, QUOTED)) from error


def steps(shape: Shape, level: str) -> int:
    """Return how many words a level generates: at quick a few, else as many as there are places."""
    most = plan(shape).steps
    return min(12, most) if level == "quick" else most
