"""The exact canary's inferences as cases for `verify_all`: a shipped model, a proved prompt and its answer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.facts import Exactness
from canaryd.model import Device
from canaryd.worker.exact_canary.golden import continuation, prompt
from canaryd.worker.exact_canary.run import Runner
from canaryd.worker.exact_canary.shape import TINY, Shape, plan
from canaryd.worker.exact_canary.shipped import Model, Shipped, load, logits
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Bound, Problem
from canaryd.worker.numeric.tensors import torch, visible_cores
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operators

EAGER = "eager"
"""Attention operator by operator, and not by a kernel."""
PATHS = ("decode", "forced")
"""A prompt is continued word by word from the KV cache; or prompt and continuation come in one pass."""
MOST_ROWS = 2
"""Rows of a batch."""
WITHIN = 64
"""Seeds that choose a model, before they choose its prompts: more than there are models."""
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


def case(device: Device, inference: Inference, seed: int, models: Path) -> Case:
    """Return an inference as a case: a run's seed chooses among the `models` and their prompts; raises `Skip`."""
    sound = accumulator(device, inference.form).characterised
    names = tuple(shipped(models, inference.shape, seed, inference.anchored, visible_cores()).model.weights)
    return Case(
        inference.name,
        partial(build, inference, seed, models),
        partial(infer, inference, names, operators=interface.operators_of(device)),
        sound,
        struck=names.index(NORM),
    )


def kernels(device: Device) -> tuple[str, ...]:
    """Return the ways in which a device's runtime computes attention, eager first."""
    return EAGER, *map(str.lower, interface.of(device).attention_kernels)


@functools.lru_cache(maxsize=4)
def shipped(models: Path, shape: Shape, seed: int, anchored: bool, cores: tuple[int, ...]) -> Shipped:  # noqa: ARG001
    """Return the model that a seed chooses; read once by each set of `cores` that asks. Raises `Skip`."""
    return load(models, shape, seed, anchored=anchored)


def text(made: Model, seed: int, row: int, steps: int) -> list[int]:
    """Return a row's prompt and the words that follow it, without the last, which no engine is given."""
    words = prompt(made.program, seed + row)
    return words + continuation(made.program, made.shape.layers, words, steps)[:-1]


def build(inference: Inference, seed: int, models: Path, _: int) -> Problem:
    """Return weights and tokens, and the logits: of the generated words, or where all is given of every position.

    Operands: the weights by name order of the model, then tokens (rows, T). Golden (rows, positions, vocabulary). It is
    witnessed where all its logits have the digests that ship.
    """
    kind, steps = getattr(torch, inference.form), inference.steps
    found = shipped(models, inference.shape, seed, inference.anchored, visible_cores())
    whole = found.model.program.steps
    texts, goldens, witnessed = [], [], True
    for row in range(inference.rows):
        number, wanted = found.prompts[(seed // WITHIN + row) % len(found.prompts)]
        words = text(found.model, number, 0, whole)
        right = logits(found, words, whole)
        witnessed &= digest(right.to(torch.bfloat16)) == wanted
        length = len(words) - whole + steps
        texts.append(words[:length])
        goldens.append(right[:length])
    golden = torch.stack(goldens).to(kind)
    if inference.path != "forced":
        length = len(texts[0]) - steps + 1
        texts, golden = [words[:length] for words in texts], golden[:, -steps:].contiguous()
    return Problem(
        operands=(*(w.to(kind) for w in found.model.weights.values()), torch.tensor(texts)),
        golden=golden,
        exactness=Exactness.UNIVERSAL,
        bound=Bound((1 << found.sums) - 1, 1 << 24),
        shape=f"{inference.shape.layers} layers of {inference.shape.hidden}, {inference.rows} x {len(texts[0])} tokens",
        witnessed=witnessed,
    )


def infer(
    inference: Inference,
    names: tuple[str, ...],
    operands: tuple[Any, ...],
    out: Any,  # noqa: ARG001
    operators: Operators | None = None,
) -> Any:
    """Return the logits of one inference on the operands' device."""
    *weights, tokens = operands
    kernel = "" if inference.kernel == EAGER else inference.kernel.upper()
    runner = Runner(inference.shape, dict(zip(names, weights, strict=True)), kernel, operators=operators)

    def work() -> Any:
        return runner.decode(tokens, inference.steps)[1] if inference.path == "decode" else runner.forward(tokens)

    return runner.operators.run(work)


def steps(shape: Shape, level: str) -> int:
    """Return how many words a level generates: at quick a few, else as many as there are places."""
    most = plan(shape).steps
    return min(12, most) if level == "quick" else most
