"""Slices of memory and the few operations that a sweep does on them, all on the device.

A slice is `rows` x `TILE` words of 64 bits. What a word must hold follows from its number: a tile that repeats in every
row, or the word's own number.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from canaryd.worker.memory import pages
from canaryd.worker.numeric.tensors import torch

TILE = 8191
"""Words of a row. A prime of the form 2**13 - 1: no power of two is a multiple of it, so that two words whose addresses
differ in one bit never hold the same word of the tile."""
WORD = 8
ROW = TILE * WORD
LARGEST = 256 << 20
"""Most bytes of one slice."""
AT_ONCE = {"cpu": 16}
"""Rows that one operation reads or writes, so that its scratch stays in a processor's cache: 1 MiB."""
AT_ONCE_ELSEWHERE = 1024
OWN = 1 - (1 << 32)
"""Times a word's number, less 2**32: the number in the lower half and its complement in the upper half."""


@dataclass(frozen=True)
class Expected:
    """What the words of a slice must hold."""

    tile: Any
    """int64, shape (TILE,), on the device: what each row holds; with `own`, the words' numbers within row 0."""
    own: bool = False
    """True: each word holds its own number, and the number's complement in its upper half."""

    def into(self, out: Any, row: int) -> Any:
        """Write what rows `row`… hold into `out`, int64 of shape (rows, TILE); return it."""
        if not self.own:
            return out.copy_(self.tile)
        first = torch.arange(row, row + len(out), dtype=torch.int64, device=out.device)
        return torch.add((first * (TILE * OWN) - (1 << 32))[:, None], self.tile, out=out)

    def values(self, row: int, at: Any) -> Any:
        """Return what words `at` (int64, their numbers within a slice that begins at row `row`) hold."""
        return (at + row * TILE) * OWN - (1 << 32) if self.own else self.tile[at % TILE]

    def inverted(self) -> Expected:
        """Return the same with every bit inverted."""
        assert not self.own
        return Expected(torch.bitwise_not(self.tile))


def own_numbers(device: Any) -> Expected:
    """Return the pattern in which each word holds its own number."""
    return Expected(torch.arange(TILE, dtype=torch.int64, device=device) * OWN, own=True)


def number_in(value: int, words: int) -> int | None:
    """Return which of `words` words holds this value (int64) in the pattern of own numbers; None where none does."""
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    number = low + ((high + low + 1 & 0xFFFFFFFF) << 32)
    return number if number < words else None


class Slice:
    """One allocation under test. Every read and write of the sweep goes through these methods."""

    def __init__(self, rows: int, first: int, device: Any, scratch: Any) -> None:
        """Allocate `rows` rows; `first`: rows of the slices before it; `scratch`: rows for differences, shared."""
        self.rows, self.first = rows, first
        self.words: Any = torch.empty((rows, TILE), dtype=torch.int64, device=device)
        self.flat: Any = self.words.view(-1)
        self._scratch = scratch

    @property
    def address(self) -> int | None:
        """Its first byte's virtual address, as the process or the device's driver numbers it; None: unknown."""
        return int(self.words.data_ptr())

    @property
    def device(self) -> Any:
        """Where tensors are that go in and come out."""
        return self.words.device

    @property
    def count(self) -> int:
        """Words in all."""
        return self.rows * TILE

    def lock(self) -> bool:
        """Keep the host's pages where they are, if it is the host's memory; return whether that was done."""
        return self.device.type == "cpu" and pages.lock(int(self.words.data_ptr()), self.words.nbytes)

    def parts(self) -> list[range]:
        """Return the rows in groups, ascending; one operation reads or writes a group."""
        at_once = len(self._scratch)
        return [range(start, min(self.rows, start + at_once)) for start in range(0, self.rows, at_once)]

    def write(self, part: range, expected: Expected) -> None:
        """Write what a group of rows must hold."""
        expected.into(self.words[part.start : part.stop], self.first + part.start)

    def difference(self, part: range, expected: Expected) -> Any:
        """Read a group of rows once; return the bits that differ, int64 (rows, TILE), valid until the next call."""
        out, words = self._scratch[: len(part)], self.words[part.start : part.stop]
        if expected.own:
            return expected.into(out, self.first + part.start).bitwise_xor_(words)
        return torch.bitwise_xor(words, expected.tile, out=out)

    def get(self, at: Any) -> Any:
        """Read single words again, from the memory: all other words are read first, which empties the caches."""
        self.words.sum()
        return self.flat[at]

    def put(self, at: Any, values: Any) -> None:
        """Write single words."""
        self.flat[at] = values

    def invert(self, start: int, stop: int) -> None:
        """Invert every bit of the words start…stop - 1."""
        self.flat[start:stop].bitwise_not_()

    def rest(self, seconds: float) -> None:
        """Leave the memory alone."""
        time.sleep(seconds)


def scratch_for(device: Any, rows: int) -> Any:
    """Return scratch for slices of at most `rows` rows."""
    at_once = AT_ONCE.get(device.type, AT_ONCE_ELSEWHERE)
    return torch.empty((min(rows, at_once), TILE), dtype=torch.int64, device=device)
