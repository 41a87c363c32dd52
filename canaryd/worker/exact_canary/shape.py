"""The sizes of an exact canary and the program that it runs. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

THETA = 1e38
"""Base of the rotary frequencies: the pairs from `Shape.first_still` on rotate too little to change any format."""
EPSILON = 1e-30
"""Number that is added to the mean square of a norm, which is 4 or 16; it is too small to change it in any format."""
CONTEXT = 8192
"""Number of positions within which the rotary pairs from `Shape.first_still` on keep their values."""
FAMILIES = ("llama", "qwen2")
"""Model families whose layers each have one MLP."""
MIXTURE = "mixtral"
"""Model family whose layers have experts in place of the MLP."""
CHOSEN = 2
"""Number of experts that compute each word."""


class Unfit(ValueError):
    """Sizes for which no exact canary can be constructed; the text says which and why."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as in `config.json`."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    layers: int
    vocabulary: int
    family: str = "llama"
    experts: int = 0
    """Experts in each layer; 0 if a layer has one MLP instead."""

    def __post_init__(self) -> None:
        """Raise `Unfit` for sizes that no model of this family can have."""
        if self.family not in (*FAMILIES, MIXTURE):
            raise Unfit(f"family {self.family!r}: there are {', '.join((*FAMILIES, MIXTURE))}")
        if self.family == MIXTURE and (self.experts < 2 * CHOSEN or self.experts.bit_count() != 1):
            raise Unfit(f"{self.experts} experts: wanted a power of two from {2 * CHOSEN} on")
        if self.family != MIXTURE and self.experts:
            raise Unfit(f"{self.experts} experts: family {self.family} has none")
        if self.heads < 2 or self.heads % self.kv_heads:
            raise Unfit(f"{self.heads} heads on {self.kv_heads} KV heads: wanted at least two, and whole groups")
        if self.hidden % 16 or self.head % 2 or self.inner % 2 or self.hidden < 128:
            raise Unfit(f"hidden {self.hidden}, head {self.head}, inner {self.inner}: wanted multiples of 16, 2 and 2")

    @property
    def biased(self) -> bool:
        """Whether q, k and v have biases."""
        return self.family == "qwen2"

    @property
    def first_still(self) -> int:
        """The first rotary pair whose rotation is below float64's precision at all `CONTEXT` positions.

        A pair (a, b) rotates to a cos - b sin. With |b| at most twice |a| the second term must stay below half a unit
        in the last place of a: 2 CONTEXT theta^(-i / half) < 2^-54.
        """
        half = self.head // 2
        return next(i for i in range(half + 1) if i == half or 2 * CONTEXT * THETA ** (-i / half) < 2.0**-54)

    @property
    def still(self) -> int:
        """Number of rotary pairs from `first_still` on; their dimensions hold a bit of a code and a constant."""
        return self.head // 2 - self.first_still


@dataclass(frozen=True)
class Plan:
    """The program: a word is a pair (place, value), and in each layer the next value depends on two earlier values.

    A word's number is `place * values + value`. A prompt is the anchor (a fixed word), if the program has one, then the
    first `prompt` places in any order, except that the last of them comes last.
    """

    place_bits: int
    value_bits: int
    prompt: int
    lags: tuple[int, int]
    """Number of places that the even and the odd attention heads look back; words of the prompt look at themselves."""
    anchored: bool
    """Whether every query also finds the anchor, so that two scores tie at 0 and a wrong score changes the result.

    A tie is exact if a kernel scales scores after their sum, or by a power of two before it.
    """
    routes: int = 1
    """Number of pairs of experts: pair `place modulo routes` computes a word."""

    @property
    def places(self) -> int:
        """Number of places; a text has each of them at most once."""
        return 1 << self.place_bits

    @property
    def values(self) -> int:
        """Number of values that a place may have."""
        return 1 << self.value_bits

    @property
    def words(self) -> int:
        """Number of words of the vocabulary that the program uses; all other words only have logits."""
        return self.places * self.values

    @property
    def anchor(self) -> int:
        """Number of the word that begins a text; its key is zero, so queries find it and the place that they seek."""
        return self.words

    @property
    def statics(self) -> int:
        """Number of a word's constant bits: own place, two places to look at, own place again, "no anchor", experts."""
        return self.first_route + self.routes.bit_length() - 1

    @property
    def first_route(self) -> int:
        """Index of the lowest of the constant bits that select a word's pair of experts."""
        return 4 * self.place_bits + 1

    @property
    def steps(self) -> int:
        """Maximum number of words that can be generated."""
        return self.places - self.prompt


TINY = Shape(hidden=256, heads=4, kv_heads=2, head=64, inner=256, layers=3, vocabulary=1152)
"""The shipped model; making it from its seed takes a fraction of a second."""
EXPERTS = Shape(
    hidden=256, heads=4, kv_heads=2, head=64, inner=128, layers=2, vocabulary=1152, family=MIXTURE, experts=4
)
"""The shipped model with a mixture of experts."""


def plan(shape: Shape, *, anchored: bool | None = None) -> Plan:
    """Return the largest program that fits the sizes; raise `Unfit` if none does.

    `anchored`: whether the program has an anchor; None: it has one if the scale of scores, head^-1/2, is a power of
    two.
    """
    value_bits = 4 if shape.vocabulary < 1 << 15 else 6
    room = (shape.vocabulary - 1) >> value_bits
    place_bits = min(room.bit_length() - 1, shape.still, 6 if shape.vocabulary < 1 << 15 else 9)
    if place_bits < 4:
        raise Unfit(f"vocabulary {shape.vocabulary} and {shape.still} still pairs: room for less than 16 places")
    if shape.head // 2 < value_bits + 1 or shape.inner // 2 < 1 + 7 * value_bits:
        raise Unfit(f"head {shape.head} or inner {shape.inner}: too small for values of {value_bits} bits")
    routes = max(1, shape.experts // CHOSEN)
    if routes > 1 << value_bits:
        raise Unfit(f"{shape.experts} experts: at most {CHOSEN << value_bits} with values of {value_bits} bits")
    prompt = min(24, (1 << place_bits) * 3 // 8)
    exact = math.isqrt(shape.head) ** 2 == shape.head and math.isqrt(shape.head).bit_count() == 1
    return Plan(place_bits, value_bits, prompt, (3, prompt), exact if anchored is None else anchored, routes)
