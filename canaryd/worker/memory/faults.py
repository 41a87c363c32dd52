"""Faulty memory, an injected fault: one bit of one word always reads 1."""

from __future__ import annotations

from typing import Any

from canaryd.worker.memory.slices import Expected, Slice
from canaryd.worker.numeric.seeds import mix64


class Stuck(Slice):
    """A slice with this fault."""

    word, bit = 0, 0

    def arm(self, seed: int) -> None:
        """Choose the word and the bit by `seed`."""
        self.word, self.bit = mix64(seed) % self.count, 1 << mix64(seed + 1) % 62

    def write(self, part: range, expected: Expected) -> None:
        """Write the expected content to the group of rows `part`; the bit stays 1."""
        super().write(part, expected)
        self.flat[self.word] |= self.bit

    def put(self, at: Any, values: Any) -> None:
        """Write `values` to the words with the numbers `at`; the bit stays 1."""
        super().put(at, values)
        self.flat[self.word] |= self.bit

    def invert(self, start: int, stop: int) -> None:
        """Invert every bit of the words start…stop - 1; the bit stays 1."""
        super().invert(start, stop)
        self.flat[self.word] |= self.bit
