"""The role of each dimension of the residual stream, before attention (point "A") and before the MLP (point "B").

Every block writes every dimension, and none is 0. Mean squares are 4 at A and 16 at B, so a norm divides by 2 or 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from canaryd.worker.exact_canary.shape import Plan, Shape, Unfit
from canaryd.worker.numeric.integers import below, permutation

LARGEST = 40
"""Largest whole number that a pair of equal inputs (`matrix.Twins`) can produce."""

UNITS = 8
"""Number of dimensions that are 2 at A and 4 at B, so that a norm gives exactly 1; the first is reserved for biases."""
ONE = "one"
"""Name of the class of inputs that are constants."""


GAP = 110.0
"""Minimum distance, after scaling, from the winning key's score down to all other scores: e^-104 is 0 in float32 and
narrower formats, and adding it to 1 changes nothing in float64."""


@dataclass(frozen=True)
class Copied:
    """A pair of dimensions, sign * s ± turn * 2 t: s is a constant bit; t is a retrieved bit, which is 0 at point A."""

    first: int
    second: int
    static: int
    retrieved: int
    sign: int
    turn: int


@dataclass(frozen=True)
class Written:
    """A pair of dimensions, sign * (c ± turn * u): u is a bit of the value, c is 2 at point A and -2 at point B."""

    first: int
    second: int
    bit: int
    sign: int
    turn: int


@dataclass(frozen=True)
class Layout:
    """The role of each dimension of the residual stream."""

    copied: tuple[Copied, ...]
    written: tuple[Written, ...]
    units: tuple[int, ...]
    ballast: tuple[tuple[int, int, int], ...]
    """(dimension, its value at A, its value at B): constants that complete the mean squares."""


@dataclass
class Port:
    """The inputs of one linear operator, in classes: input i is gain[i] times the value of its class.

    So two inputs of one class, a pair, can cancel, with any gains.
    """

    classes: list[Hashable]
    gains: list[float]
    members: dict[Hashable, list[int]] = field(default_factory=dict)
    pairs: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Collect the inputs of each class. If no pairs are given, neighbours in a class become pairs."""
        for i, name in enumerate(self.classes):
            self.members.setdefault(name, []).append(i)
        if not self.pairs:
            for group in self.members.values():
                self.pairs += list(zip(group[::2], group[1::2], strict=False))


def lay_out(shape: Shape, program: Plan, seed: int) -> Layout:
    """Assign a role to each dimension; raise `Unfit` if there are too few dimensions."""
    d, order = shape.hidden, permutation(seed, "dimensions", shape.hidden).tolist()
    repeats = 2 * max(1, d // (32 * program.value_bits))
    count_ballast, count_written = max(8, d // 16), 2 * repeats * program.value_bits
    quads = (d - count_ballast - count_written - UNITS) // 4
    statics, retrieved = program.statics, 2 * program.value_bits
    if quads < max(statics, retrieved):
        raise Unfit(f"hidden {d}: room for {quads} static bits, wanted {statics}")
    signs = (2 * below(seed, "signs", (2 * d,), 2) - 1).tolist()
    draw, take = iter(signs), iter(order)
    copied = [
        Copied(next(take), next(take), q % statics, (q + q // statics) % retrieved, next(draw), next(draw))
        for q in range(quads)
        for _ in range(2)
    ]
    written = [
        Written(next(take), next(take), bit, next(draw), next(draw))
        for bit in range(program.value_bits)
        for _ in range(repeats)
    ]
    rest = list(take)
    dims, units = rest[:count_ballast], rest[count_ballast:]
    used = 4 * quads
    left_a = 4 * d - used - 5 * count_written - 4 * len(units)
    left_b = 16 * d - 5 * used - 5 * count_written - 16 * len(units)
    at_b = squares(left_b, count_ballast)
    at_a = squares(left_a, count_ballast)[::-1]
    at_a = [a if a != b else -a for a, b in zip(at_a, at_b, strict=True)]
    return Layout(tuple(copied), tuple(written), tuple(units), tuple(zip(dims, at_a, at_b, strict=True)))


def squares(total: int, count: int) -> list[int]:
    """Return `count` positive integers of nearly equal size whose squares add up to `total`.

    By Lagrange's theorem any number is the sum of four squares. The last four integers are searched; all others are the
    root of the mean. If the four would be too large, as many of the others as needed are larger by 1.
    """
    base = max(1, math.isqrt(total // count))
    for low in (base, base - 1, base + 1, base - 2):
        rest = total - low * low * (count - 4)
        more = min(count - 4, (rest - 4 * low * low) // (2 * low + 1)) if rest > LARGEST * LARGEST else 0
        rest -= more * (2 * low + 1)
        span = range(max(1, low - 6), max(1, math.isqrt(max(1, rest))) + 1)
        for a, b, c in itertools.combinations_with_replacement(span, 3):
            last = rest - a * a - b * b - c * c
            if last >= c * c and math.isqrt(last) ** 2 == last:
                return [low] * (count - 4 - more) + [low + 1] * more + [a, b, c, math.isqrt(last)]
    raise Unfit(f"{total} is no sum of {count} nearly equal squares")


def ports(layout: Layout, shape: Shape, *, reserve: bool) -> tuple[Port, Port]:
    """Return the inputs after the norm at points A and B; `reserve` leaves out the dimension kept for biases."""
    classes: tuple[list[Hashable], ...] = tuple([None] * shape.hidden for _ in range(2))
    gains = tuple([1.0] * shape.hidden for _ in range(2))

    def put(where: int, dim: int, name: Hashable, gain: float) -> None:
        classes[where][dim], gains[where][dim] = name, gain

    for p in layout.copied:
        for dim, slot in ((p.first, 1), (p.second, -1)):
            put(0, dim, ("s", p.static), p.sign / 2)
            put(1, dim, ("st", p.static, p.retrieved, p.sign * p.turn * slot), p.sign / 4)
    for w in layout.written:
        for dim, slot in ((w.first, 1), (w.second, -1)):
            put(0, dim, ("u", w.bit, w.turn * slot), w.sign / 2)
            put(1, dim, ("u", w.bit, w.turn * slot), w.sign / 4)
    for dim, a, b in layout.ballast:
        put(0, dim, ONE, a / 2)
        put(1, dim, ONE, b / 4)
    for dim in layout.units:
        put(0, dim, ONE, 1.0)
        put(1, dim, ONE, 1.0)
    if reserve:
        put(0, layout.units[0], "bias", 1.0)
    return Port(classes[0], gains[0]), Port(classes[1], gains[1])


def query_scale(shape: Shape, program: Plan) -> float:
    """Return the smallest weight of a code's bits with which a key that is wrong in one bit scores lower by `GAP`.

    Raises `Unfit` if float16 cannot hold the scores.
    """
    repeats = shape.still // program.place_bits
    low = math.sqrt(GAP * math.sqrt(shape.head) / (2 * repeats))
    high = math.sqrt(60_000 / (2 * shape.still)) / 2
    if low > high:
        raise Unfit(f"head {shape.head}: no room for a code of {program.place_bits} bits")
    return low
