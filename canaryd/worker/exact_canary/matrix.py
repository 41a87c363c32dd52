"""Build one linear operator: its signal, and weights of full significand that cancel exactly on every input.

All weights have at most 8 significant bits, so bfloat16 holds them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from canaryd.worker.exact_canary.layout import Port
from canaryd.worker.exact_canary.shape import Unfit
from canaryd.worker.numeric.integers import below, permutation, signed
from canaryd.worker.numeric.tensors import torch

PERIOD = 251
"""Rows after which the cancelling weights repeat: a prime, so that no tile meets the same rows again."""


@dataclass
class Matrix:
    """A linear operator in the making: `rows` outputs over the inputs of a port."""

    port: Port
    rows: int
    _single: list[tuple[int, int, float]] = field(default_factory=list)
    _many: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def add(self, row: int, *weights: tuple[int, float]) -> None:
        """Add weights (column, value) to the signal of one row."""
        self._single += [(row, column, value) for column, value in weights]

    def add_all(self, rows: Any, columns: Any, values: Any) -> None:
        """Add one weight to the signal of each of many rows: three tensors of equal length."""
        self._many.append((rows, columns, values))

    def finish(self, seed: int, size: float, most: int, live: Any = None) -> Any:
        """Return the weight (rows, inputs), float32: the signal, and beside it up to `most` cancelling pairs a row.

        `size` is a power of two: the terms of a cancelling pair are half of it to four times it. Only `live` rows get
        pairs.
        """
        weight = self._noise(seed, size, most)
        if live is not None:
            weight[~live] = 0
        single = torch.tensor(self._single, dtype=torch.float64).reshape(-1, 3).unbind(1)
        single = (single[0].to(torch.int64), single[1].to(torch.int64), single[2])
        rows, columns, values = (torch.cat(parts) for parts in zip(single, *self._many, strict=True))
        if len(rows):
            partner = torch.arange(len(self.port.classes))
            first, second = torch.tensor(self.port.pairs).T
            partner[first], partner[second] = second, first
            weight[rows, columns] = 0
            weight[rows, partner[columns]] = 0
            weight.index_put_((rows, columns), values.to(torch.float32), accumulate=True)
        return weight

    def _noise(self, seed: int, size: float, most: int) -> Any:
        pairs = torch.tensor(self.port.pairs)
        gains = torch.tensor(self.port.gains, dtype=torch.float64)
        order = permutation(seed, "pairs", len(pairs))
        first, second = pairs[order].T
        g, h = gains[first], gains[second]
        plain = _is_power(g) & _is_power(h)
        count, here = len(pairs), min(self.rows, PERIOD)
        odd = signed(seed, "full", (here, count), 64, 127).to(torch.float64)
        odd = (odd.abs() * 2 + 1) * odd.sign() / 128  # odd: the lowest of 8 bits is 1
        sign = odd.sign()
        largest = torch.maximum(g.abs(), h.abs())
        scale = torch.exp2(torch.floor(torch.log2(largest)))
        at_first = torch.where(plain, odd / g, sign * h / scale / scale)
        at_second = torch.where(plain, -odd / h, -sign * g / scale / scale)
        if most < count:
            start = below(seed, "start", (here, 1), count)
            dead = (torch.arange(count) + start) % count >= most
            at_first[dead], at_second[dead] = 0, 0
        weight = torch.zeros((here, len(gains)), dtype=torch.float32)
        weight[:, first] = (at_first * size).to(torch.float32)
        weight[:, second] = (at_second * size).to(torch.float32)
        return weight[torch.arange(self.rows) % here].clone()


def _is_power(values: Any) -> Any:
    return torch.frexp(values.abs()).mantissa == 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Twins: two equal inputs with different full-significand gains, whose weighted difference is a small whole number.

LARGEST = 40
"""Whole numbers up to here can be written by a pair of twins."""


@dataclass(frozen=True)
class Twins:
    """Gains `a` and `c` (odd whole numbers), and for each n in 1 … LARGEST (b, d, k) with a b - c d = n 2^k."""

    a: int
    c: int
    solutions: tuple[tuple[int, int, int], ...]

    def weights(self, n: int, unit: float) -> tuple[float, float]:
        """Return the two weights that make n out of inputs a * unit and c * unit."""
        b, d, k = self.solutions[abs(n) - 1]
        scale = (1 if n > 0 else -1) / (2.0**k * unit)
        return b * scale, -d * scale


@functools.lru_cache(maxsize=8)
def twins(bits: int) -> tuple[Twins, ...]:
    """Return 16 twins with gains of `bits` significant bits; the same in every run."""
    found: list[Twins] = []
    low, high = 1 << (bits - 1), (1 << bits) - 1
    for attempt in range(4096):
        a, c = (low + int(v) | 1 for v in below(attempt, f"twins {bits}", (2,), high - low))
        solutions = _solutions(a, c) if a != c else None
        if solutions:
            found.append(Twins(a, c, solutions))
        if len(found) == 16:
            return tuple(found)
    raise Unfit(f"only {len(found)} twins of {bits} bits")


def _solutions(a: int, c: int) -> tuple[tuple[int, int, int], ...] | None:
    found = []
    for n in range(1, LARGEST + 1):
        top = (a * 192 // (6 * n)).bit_length()  # the terms are then some 6 to 24 times the result
        tried = ((b, *divmod(a * b - n * 2**k, c), k) for k in range(top, max(0, top - 3), -1) for b in range(128, 256))
        hit = next(((b, d, k) for b, d, rest, k in tried if not rest and 128 <= d < 256), None)
        if hit is None:
            return None
        found.append(hit)
    return tuple(found)


def full(seed: int, name: str, count: int, low: float) -> list[float]:
    """Return `count` numbers of 8 significant bits, the lowest of them 1, between `low` and about twice that."""
    scale = 2.0 ** (7 - math.floor(math.log2(low)))
    first = -int(-low * scale // 1) | 1
    found = []
    for raw in below(seed, f"full {name}", (count,), 1 << 30).tolist():
        number = first + 2 * (raw % max(1, first // 2))
        found.append((number if number < 256 else (number // 2 | 1) * 2) / scale)
    return found
