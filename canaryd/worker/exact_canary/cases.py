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
"""Attention computed operator by operator instead of by one kernel."""
PATHS = ("decode", "forced")
"""Two ways to compute an inference: decode word by word from the KV cache, or pass prompt and continuation at once."""
MOST_ROWS = 2
"""Maximum number of rows (texts) in a batch."""
WITHIN = 64
"""Number of consecutive seeds that choose the same prompts of different models; it is more than there are models."""
NORM = "model.norm.weight"
"""The operand whose bits an injected operand fault changes: each of them reaches the sum of every logit."""


@dataclass(frozen=True)
class Inference:
    """One inference to verify: number format, path, rows of the batch, kind of attention, number of generated words."""

    form: str
    path: str
    rows: int
    kernel: str
    steps: int
    shape: Shape = TINY

    @property
    def anchored(self) -> bool:
        """Whether the model makes two attention scores tie. No tie for torch's "math" kernel: it rounds q and k."""
        return self.kernel != "math"

    @property
    def label(self) -> str:
        """The part of the case's name that names the kind of attention and says whether the model has experts."""
        return self.kernel + ("-experts" if self.shape.experts else "")

    @property
    def name(self) -> str:
        """The name of the inference's case."""
        return f"{self.form}/{self.path}/b{self.rows}/{self.label}@{self.steps}"


def case(device: Device, inference: Inference, seed: int, models: Path) -> Case:
    """Return an inference as a case; `seed` chooses a model in the directory `models`, and prompts. Raises `Skip`."""
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
    """Return the kinds of attention for a device: `EAGER`, then the attention kernels of its runtime."""
    return EAGER, *map(str.lower, interface.of(device).attention_kernels)


@functools.lru_cache(maxsize=4)
def shipped(models: Path, shape: Shape, seed: int, anchored: bool, cores: tuple[int, ...]) -> Shipped:  # noqa: ARG001
    """Return the model that a seed chooses and its proved prompts, read once per set of `cores`. Raises `Skip`."""
    return load(models, shape, seed, anchored=anchored)


def text(made: Model, seed: int, row: int, steps: int) -> list[int]:
    """Return prompt number `seed` + `row` and `steps` generated words without the last, which is never an input."""
    words = prompt(made.program, seed + row)
    return words + continuation(made.program, made.shape.layers, words, steps)[:-1]


def build(inference: Inference, seed: int, models: Path, _: int) -> Problem:
    """Return the problem of an inference: weights, tokens and the golden (right) logits.

    Operands: the weights sorted by the model's names, then tokens (rows, T). Golden: (rows, positions, vocabulary); the
    positions are all positions for the path "forced", otherwise the generated words. The golden is witnessed if all its
    logits have the shipped digests.
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
    """Return the logits of one inference, computed on the device of `operands`: weights called `names`, then tokens."""
    *weights, tokens = operands
    kernel = "" if inference.kernel == EAGER else inference.kernel.upper()
    runner = Runner(inference.shape, dict(zip(names, weights, strict=True)), kernel, operators=operators)

    def work() -> Any:
        return runner.decode(tokens, inference.steps)[1] if inference.path == "decode" else runner.forward(tokens)

    return runner.operators.run(work)


def steps(shape: Shape, level: str) -> int:
    """Return the number of words to generate: a few at level quick, otherwise as many as the model can generate."""
    most = plan(shape).steps
    return min(12, most) if level == "quick" else most
