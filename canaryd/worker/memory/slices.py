"""Slices of memory, and the few operations of a memory test on them, all computed on the device.

A slice has `rows` x `TILE` words of 64 bits. The content of a word depends on its number: it is a word of the tile (the
content of every row), or the number itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from canaryd.worker.memory import pages
from canaryd.worker.numeric.tensors import torch

TILE = 8191
"""Number of words in a row. It is a prime of the form 2**13 - 1, so no power of two is a multiple of it. Therefore two
words whose addresses differ in one bit never hold the same word of the tile."""
WORD = 8
ROW = TILE * WORD
LARGEST = 256 << 20
"""Largest size of one slice in bytes."""
AT_ONCE = {"cpu": 16}
"""Device type → rows that one operation reads or writes: 1 MiB, so that the scratch memory fits a processor's cache."""
AT_ONCE_ELSEWHERE = 1024
OWN = 1 - (1 << 32)
"""Factor for the pattern of own numbers. A word's number times this factor, minus 2**32, has the number in the lower
half and its complement in the upper half."""


@dataclass(frozen=True)
class Expected:
    """The right content of the words of all slices."""

    tile: Any
    """Content of each row, int64, shape (TILE,), on the device; with `own`, the content of row 0."""
    own: bool = False
    """True: each word holds its own number in its lower half, and the complement in its upper half."""

    def into(self, out: Any, row: int) -> Any:
        """Write the right content of the rows from `row` on into `out`, int64 (rows, TILE); return `out`."""
        if not self.own:
            return out.copy_(self.tile)
        first = torch.arange(row, row + len(out), dtype=torch.int64, device=out.device)
        return torch.add((first * (TILE * OWN) - (1 << 32))[:, None], self.tile, out=out)

    def values(self, row: int, at: Any) -> Any:
        """Return the right content of the words with the numbers `at` (int64) in a slice whose first row is `row`."""
        return (at + row * TILE) * OWN - (1 << 32) if self.own else self.tile[at % TILE]

    def inverted(self) -> Expected:
        """Return this content with every bit inverted."""
        assert not self.own
        return Expected(torch.bitwise_not(self.tile))


def own_numbers(device: Any) -> Expected:
    """Return the pattern in which each word holds its own number, for tensors on `device`."""
    return Expected(torch.arange(TILE, dtype=torch.int64, device=device) * OWN, own=True)


def number_in(value: int, words: int) -> int | None:
    """Return the number of the word that holds `value` if each word holds its own, or None if no word does."""
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    number = low + ((high + low + 1 & 0xFFFFFFFF) << 32)
    return number if number < words else None


class Slice:
    """One block of allocated memory under test. The test reads and writes it only through these methods."""

    def __init__(self, rows: int, first: int, device: Any, scratch: Any) -> None:
        """Allocate `rows` rows. `first`: rows in all earlier slices; `scratch`: shared memory for differences."""
        self.rows, self.first = rows, first
        self.words: Any = torch.empty((rows, TILE), dtype=torch.int64, device=device)
        self.flat: Any = self.words.view(-1)
        self._scratch = scratch

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process, or the driver's address."""
        return int(self.words.data_ptr())

    @property
    def device(self) -> Any:
        """The torch device of the tensors that the methods take and return."""
        return self.words.device

    @property
    def count(self) -> int:
        """Number of words in the slice."""
        return self.rows * TILE

    def lock(self) -> bool:
        """Lock the pages if the slice is in the host's memory; return whether they are locked."""
        return self.device.type == "cpu" and pages.lock(int(self.words.data_ptr()), self.words.nbytes)

    def parts(self) -> list[range]:
        """Return ranges of row numbers, ascending, each small enough for one operation."""
        at_once = len(self._scratch)
        return [range(start, min(self.rows, start + at_once)) for start in range(0, self.rows, at_once)]

    def write(self, part: range, expected: Expected) -> None:
        """Write the expected content to a group of rows."""
        expected.into(self.words[part.start : part.stop], self.first + part.start)

    def difference(self, part: range, expected: Expected) -> Any:
        """Read rows once; return int64 (rows, TILE) with a 1 for each wrong bit; the next call overwrites it."""
        out, words = self._scratch[: len(part)], self.words[part.start : part.stop]
        if expected.own:
            return expected.into(out, self.first + part.start).bitwise_xor_(words)
        return torch.bitwise_xor(words, expected.tile, out=out)

    def get(self, at: Any) -> Any:
        """Return the words with the numbers `at`, read after all other words, so that no cache holds them."""
        self.words.sum()
        return self.flat[at]

    def put(self, at: Any, values: Any) -> None:
        """Write `values` to the words with the numbers `at`."""
        self.flat[at] = values

    def invert(self, start: int, stop: int) -> None:
        """Invert every bit of the words start…stop - 1."""
        self.flat[start:stop].bitwise_not_()

    def rest(self, seconds: float) -> None:
        """Wait for `seconds` without access to the memory."""
        time.sleep(seconds)


def scratch_for(device: Any, rows: int) -> Any:
    """Return a tensor of rows for intermediate results, which slices of at most `rows` rows share."""
    at_once = AT_ONCE.get(device.type, AT_ONCE_ELSEWHERE)
    return torch.empty((min(rows, at_once), TILE), dtype=torch.int64, device=device)
