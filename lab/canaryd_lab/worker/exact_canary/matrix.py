"""Build one linear operator from two parts: its signal, and weights of full significand that cancel for every input.

All weights have at most 8 significant bits, so bfloat16 holds them. Quantised weights of one row are integers of few
bits times one power of two.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from canaryd.worker.exact_canary.shape import Unfit
from canaryd.worker.numeric.integers import below, permutation, signed
from canaryd.worker.numeric.tensors import torch
from canaryd_lab.worker.exact_canary.layout import LARGEST, Port

PERIOD = 251
"""Number of rows after which the cancelling weights repeat: a prime, so that no tile has the same rows twice."""


@dataclass(frozen=True)
class Digits:
    """The precision of the weights of one model."""

    bits: int = 8
    """Maximum number of significant bits of a weight."""
    levels: int = 0
    """Largest weight as a whole number in units of its row; 0 if every weight has an exponent of its own."""

    @staticmethod
    def quantised(bits: int) -> Digits:
        """Return the precision of weights that will be stored in `bits` bits; 0 for weights that are not quantised."""
        return Digits(bits - 1, (1 << bits - 1) - 1) if bits else Digits()

    @property
    def gate(self) -> int:
        """Maximum number of significant bits of a neuron's weights."""
        return min(6, self.bits)

    @property
    def open(self) -> float:
        """Unit of the gates. Positive gates are 1,056 to 2,016 in size, and SiLU keeps them; it makes others 0."""
        return 2.0 ** (11 - self.gate)

    @property
    def offered(self) -> float:
        """Unit of the gains of the value projection, which are 1 to 2."""
        return 2.0 ** (1 - self.bits)

    @property
    def half(self) -> int:
        """Maximum number of significant bits of a weight in a row that also holds half of this weight."""
        return self.bits - 1 if self.levels else self.bits


@dataclass
class Matrix:
    """A linear operator under construction, with `rows` outputs and the inputs of a port."""

    port: Port
    rows: int
    digits: Digits = field(default_factory=Digits)
    _single: list[tuple[int, int, float]] = field(default_factory=list)
    _many: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def add(self, row: int, *weights: tuple[int, float]) -> None:
        """Add weights, each as (column, value), to the signal of one row."""
        self._single += [(row, column, value) for column, value in weights]

    def add_all(self, rows: Any, columns: Any, values: Any) -> None:
        """Add one weight to the signal of each of many rows: `values[i]` in row `rows[i]` and column `columns[i]`."""
        self._many.append((rows, columns, values))

    def finish(self, seed: int, size: float, most: int, live: Any = None) -> Any:
        """Return the weight (rows, inputs), float32: the signal, and up to `most` pairs of cancelling weights per row.

        `size` is a power of two: the terms of a cancelling pair are half of it to four times it. With `digits.levels`,
        their weights are as large as the row's unit allows. Only rows that `live` marks get pairs (None: all).
        """
        weight = self._noise(seed, size, most)
        if live is not None:
            weight[~live] = 0
        if self.digits.levels:
            weight *= self._units()
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
        count, here = len(pairs), min(self.rows, PERIOD)
        drawn = signed(seed, "full", (here, count), 64, 127).to(torch.float64)
        if self.digits.levels:
            at_first, at_second, size = *_whole_pairs(g, h, drawn, self.digits.levels), 1.0
        else:
            plain = _is_power(g) & _is_power(h)
            odd = (drawn.abs() * 2 + 1) * drawn.sign() / 128  # odd: the lowest of 8 bits is 1
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
        return weight[torch.arange(self.rows) % here]

    def _units(self) -> Any:
        """Return the unit (rows, 1) of each row's weights: the smallest power of two with which all fit."""
        size = torch.zeros(self.rows, dtype=torch.float64)
        for row, _, value in self._single:
            size[row] = max(float(size[row]), abs(value))
        for rows, _, values in self._many:
            size.scatter_reduce_(0, rows, values.abs(), "amax")
        return units(size, self.digits.levels).to(torch.float32).view(-1, 1)


def units(size: Any, levels: int) -> Any:
    """Return the smallest powers of two that reach these sizes when multiplied by `levels`; 0 for a size of 0."""
    return torch.exp2(torch.ceil(torch.log2(size / levels)))


def _whole_pairs(g: Any, h: Any, drawn: Any, levels: int) -> tuple[Any, Any]:
    """Return pairs of integer weights, at most `levels`, that cancel for gains g and h; (0, 0) if none exist.

    The smallest pair is (h, g) without common factors. It is multiplied by an odd factor, chosen by `drawn`, that makes
    it large.
    """
    whole_g, whole_h = (part.mul(2.0**20).to(torch.int64) for part in (g, h))
    common = torch.gcd(whole_g, whole_h)
    first, second = whole_h // common, whole_g // common
    room = levels // torch.maximum(first.abs(), second.abs())
    largest = (room - 1) // 2 * 2 + 1  # odd; -1 where there is no room
    factor = (largest - 2 * (drawn.abs().to(torch.int64) % (room // 4 + 1))) * (room > 0) * drawn.sign().to(torch.int64)
    return first * factor, -second * factor


def _is_power(values: Any) -> Any:
    return torch.frexp(values.abs()).mantissa == 0.5


@dataclass(frozen=True)
class Twins:
    """Two inputs with odd gains `a` and `c`: for each n in 1 … LARGEST, one (b, d, k) gives a b - c d = n 2^k."""

    a: int
    c: int
    solutions: tuple[tuple[int, int, int], ...]

    def weights(self, n: int, unit: float) -> tuple[float, float]:
        """Return the two weights that produce n from inputs a * unit and c * unit."""
        b, d, k = self.solutions[abs(n) - 1]
        scale = (1 if n > 0 else -1) / (2.0**k * unit)
        return b * scale, -d * scale


@functools.lru_cache(maxsize=8)
def twins(bits: int, levels: int) -> tuple[Twins, ...]:
    """Return 16 twins whose gains have `bits` bits; unless `levels` is 0, b and d are at most that, and all k equal."""
    found: list[Twins] = []
    low, high = 1 << (bits - 1), (1 << bits) - 1
    for attempt in range(4096):
        a, c = (low + int(v) | 1 for v in below(attempt, f"twins {bits}", (2,), high - low))
        solutions = (_whole_solutions(a, c, bits, levels) if levels else _solutions(a, c)) if a != c else None
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


def _whole_solutions(a: int, c: int, bits: int, levels: int) -> tuple[tuple[int, int, int], ...] | None:
    found = []
    k = int(math.log2((levels << bits) / LARGEST))
    for n in range(1, LARGEST + 1):
        tried = ((b, *divmod(a * b - n * 2**k, c)) for b in range(-levels, levels + 1))
        hits = [(b, d, k) for b, d, rest in tried if not rest and abs(d) <= levels]
        if not hits:
            return None
        found.append(max(hits, key=lambda hit: min(abs(hit[0]), abs(hit[1]))))
    return tuple(found)


def full(seed: int, name: str, count: int, low: float, bits: int) -> list[float]:
    """Return `count` numbers from `low` to about 2 `low` with `bits` significant bits; the lowest bit is mostly 1."""
    scale = 2.0 ** (bits - 1 - math.floor(math.log2(low)))
    first = -int(-low * scale // 1) | 1
    found = []
    for raw in below(seed, f"full {name}", (count,), 1 << 30).tolist():
        number = first + 2 * (raw % max(1, first // 2))
        found.append((number if number < 1 << bits else (number // 2 | 1) * 2) / scale)
    return found
