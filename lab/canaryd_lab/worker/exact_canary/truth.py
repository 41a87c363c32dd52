"""The right results of every operator of an inference, from the proof, and the largest error of a healthy device.

Nearly all results are exact, with three exceptions: 16-bit formats round the scores of losing keys; float64 has e^-110
for these keys where other formats have 0; and float64 adds this share of their values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from canaryd.probe import Skip
from canaryd.worker.exact_canary.cases import text
from canaryd.worker.exact_canary.golden import continuation
from canaryd.worker.exact_canary.shape import TINY, Shape
from canaryd.worker.exact_canary.shipped import Model
from canaryd.worker.numeric.tensors import FORMATS, host_same_bits, on_core, torch, visible_cores
from canaryd_lab.worker.exact_canary.construct import construct
from canaryd_lab.worker.exact_canary.prove import Walk

POSITION = {"rotated_query": 2, "rotated_key": 2, "keys": 2, "values": 2, "scores": 3, "softmax": 3}
"""Operator → number of the axis of its result that counts positions; for operators that are not listed it is 1."""
KEY = 4
"""Number of the axis of scores and of softmax that counts keys."""
EXPONENTIAL = 2.0**-44
"""Allowed relative error of softmax in float64: a hundred times the error of any library."""
TINIEST = 2.0**-1022
"""Smallest normal number of float64; a device may flush smaller numbers to 0."""
NOTHING = -760.0
"""Largest score whose exponential is 0 even in float64, whether or not small numbers are flushed to 0."""
LARGEST_VALUE = 4.0
"""Twice the largest magnitude of a value in the mixture that attention computes."""


@dataclass(frozen=True)
class Truth:
    """The right results of one inference at all positions of prompt and continuation, computed on the host alone."""

    model: Model
    tokens: tuple[int, ...]
    """The prompt and its continuation, without the last word."""
    steps: int
    """Number of generated words."""
    values: Mapping[str, Any]
    """Name of a place as in `run` → right results: float64, one row, laid out as in `Runner.watch`. "word" has the
    chosen words."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The words of the prompt."""
        return self.tokens[: len(self.tokens) - self.steps + 1]

    def expected(self, place: str, form: str, end: int, sizes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return (right values of `place` before position `end`, shaped as `sizes`; allowed deviation, 0 if exact)."""
        operator, count = place.rpartition(".")[2], sizes[axis_of(place)]
        start = end - count
        value = self.values[place].narrow(axis_of(place), start, count)
        slack = torch.zeros((), dtype=torch.float64)
        if operator in ("scores", "softmax"):
            value = value.narrow(KEY, 0, end)
        if operator == "scores" and FORMATS[form].bits < 24:
            near = value.to(FORMATS[form].dtype).to(torch.float64)
            unit = torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - FORMATS[form].bits)
            slack = torch.where(near == value, 0.0, unit)  # rounded down or up
        if operator == "softmax" and form == "float64":
            chances, tiny = self._losers(place, start, end)
            value, slack = value + chances, chances * EXPONENTIAL + tiny
        if operator == "mixed" and form == "float64":
            tails = sum(part.sum(-1) for part in self._losers(place, start, end)) * LARGEST_VALUE
            tails = tails.view(-1, count).T.repeat_interleave(self.model.shape.head, 1)[None]
            slack = torch.where(value == 0, tails, 0.0)  # it vanishes beside any other value
        return value, slack

    def _losers(self, place: str, start: int, end: int) -> tuple[Any, Any]:
        """Return (softmax of losing keys in float64, 0 for other keys; the part that a device can flush to 0)."""
        layer = place.rpartition(".")[0]
        scores, share = (self.values[f"{layer}.{name}"][..., start:end, :end] for name in ("scores", "softmax"))
        hidden = torch.arange(end) > torch.arange(start, end)[:, None]
        counts = (share == 0) & ~hidden & (scores > NOTHING)
        chances = torch.where(counts, torch.exp(scores) * share.amax(-1, keepdim=True), 0.0)
        return chances, counts * torch.full_like(chances, TINIEST)


@functools.lru_cache(maxsize=4)
def model(shape: Shape, seed: int, anchored: bool, cores: tuple[int, ...]) -> Model:  # noqa: ARG001
    """Return the model of a seed; it is made once for each set of `cores`, the cores that this process may use."""
    return construct(shape, seed, anchored=anchored)


def axis_of(place: str) -> int:
    """Return the number of the axis that counts positions in the result of a place."""
    return POSITION.get(place.rpartition(".")[2], 1)


def truth(seed: int, steps: int, *, anchored: bool, shape: Shape = TINY) -> Truth:
    """Return the truth of the model that `seed` makes, computed on two cores; raise `Skip` if they disagree."""
    cores = visible_cores()
    first, second = (_made(core, shape, seed, steps, anchored) for core in (cores[0], cores[-1]))
    if not same(first, second):
        raise Skip(f"cores {cores[0]} and {cores[-1]} of this host proved the right answer and got two")
    return first


def same(a: Truth, b: Truth) -> bool:
    """Return whether two truths are equal, bit for bit."""
    return a.tokens == b.tokens and all(
        host_same_bits(x, y)
        for x, y in (
            *((a.values[place], b.values[place]) for place in a.values),
            *((a.model.weights[name], b.model.weights[name]) for name in a.model.weights),
        )
    )


def _made(core: int, shape: Shape, seed: int, steps: int, anchored: bool) -> Truth:
    with on_core(core):
        made = model(shape, seed, anchored, (core,))
        tokens = text(made, seed, 0, steps)
        proof = Walk(shape, made.weights, keep=True).prove(tokens)
        prompt = tokens[: len(tokens) - steps + 1]
        words = [*tokens[1:], continuation(made.program, shape.layers, prompt, steps)[-1]]
    if not proof.witnessed:
        raise Skip(f"integer and float64 arithmetic of core {core} of this host disagree on the right answer")
    return Truth(made, tuple(tokens), steps, {**_laid_out(proof.values, shape), "word": torch.tensor([words]).double()})


def _laid_out(values: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """Return proved values in the layout of an inference; rotated values and the cache are copies of other values."""
    found = {}
    for place, value in values.items():
        layer, _, operator = place.rpartition(".")
        if operator in ("scores", "softmax"):
            found[place] = value.view(1, shape.kv_heads, -1, *value.shape[1:])
            continue
        found[place] = value[None]
        if operator in ("query", "key", "value"):
            heads = value.view(1, len(value), -1, shape.head).transpose(1, 2)
            for name in {"query": ("rotated_query",), "key": ("rotated_key", "keys"), "value": ("values",)}[operator]:
                found[f"{layer}.{name}"] = heads
    return found
