"""Examine wrong words of a slice: whether the cell or the transfer was wrong, and how the cell behaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from canaryd.facts import Cell
from canaryd.worker.memory.slices import TILE, Expected, Slice, number_in
from canaryd.worker.numeric.tensors import torch

EXAMINED = 4096
"""Largest number of wrong words of one slice and pattern that are examined; further ones are only counted."""
TRACED = 4
"""Largest number of wrong words of one group of rows for which the word that disturbs them is searched."""
MARKS = (0x0F1E2D3C4B5A6978, 0x5A5A0FF0C33C6996)
"""Two values written in turn to one word. Another word that shows both shares its cell: an alias, not a coupling."""


@dataclass
class Wrong:
    """The words of one slice that were wrong in one pattern, in the order in which they were found."""

    slices: Sequence[Slice]
    """All slices under test, not only the slice with the wrong words."""
    count: int = 0
    at: list[int] = field(default_factory=list)
    """Numbers of the wrong words within the slice, at most `EXAMINED`."""
    expected: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    """Wrong bits of each word at the first read, as int64."""
    cells: Counter[Cell] = field(default_factory=Counter)
    partner: int | None = None
    """Number, counted over all slices, of the first word found to change a wrong word; None if none was found."""

    def add(self, memory: Slice, part: range, expected: Expected, difference: Any) -> None:
        """Record and examine the new wrong words in the rows `part`; `difference` has a 1 for each wrong bit."""
        flat = difference.reshape(-1)
        where = torch.nonzero(flat).reshape(-1)
        if self.at:  # an earlier look may have found them too
            known = torch.tensor(self.at, device=where.device) - part.start * TILE
            where = where[~torch.isin(where, known)]
        self.count += len(where)
        where = where[: max(0, EXAMINED - len(self.at))]
        bits, at = flat[where].tolist(), where + part.start * TILE
        if bits:
            values = expected.values(memory.first, at)
            self.at += at.tolist()
            self.bits += bits
            self.expected += values.tolist()
            self._examine(memory, at, values, own=expected.own)

    def _examine(self, memory: Slice, at: Any, values: Any, *, own: bool) -> None:
        """Classify wrong words by further reads and test values; count each kind in `cells`; restore the right values.

        `at`: numbers of the words; `values`: their right values; `own`: whether each word holds its own number.
        """
        again = memory.get(at)
        stays = again != values
        self.cells[Cell.TRANSFER] += int((~stays).sum())
        at, values, again = at[stays], values[stays], again[stays]
        if not len(at):
            return
        memory.put(at, torch.zeros_like(values))
        ones = memory.get(at)
        memory.put(at, torch.full_like(values, -1))
        zeros = ~memory.get(at)
        stuck = (ones ^ zeros) != 0
        self.cells[Cell.STUCK] += int(stuck.sum())
        memory.put(at, values)
        left = list(zip(*(t[~stuck].tolist() for t in (at, values, again)), strict=True))
        for number, (word, value, held) in enumerate(left):
            self.cells[self._behaviour(memory, word, value, held, own=own, trace=number < TRACED)] += 1

    def _behaviour(self, memory: Slice, word: int, value: int, held: int, *, own: bool, trace: bool) -> Cell:
        """Return the kind of error of a word that is not stuck: alias, coupled or flipped.

        `held`: the wrong value; `own`: each word holds its own number; `trace`: search for the word that disturbs it.
        """
        number = number_in(held, sum(m.count for m in self.slices)) if own else None
        if number is not None:
            owner = next(m for m in reversed(self.slices) if m.first * TILE <= number)
            if _follows(memory, word, value, owner, number - owner.first * TILE, held):
                self.partner = number if self.partner is None else self.partner
                return Cell.ALIAS
        found = disturber(memory, word, value) if trace else None
        if found is None:
            return Cell.FLIPPED
        self.partner = found + memory.first * TILE if self.partner is None else self.partner
        return Cell.ALIAS if _follows(memory, word, value, memory, found, _read(memory, found)) else Cell.COUPLED


def _follows(memory: Slice, word: int, value: int, owner: Slice, other: int, other_value: int) -> bool:
    """Return whether `word` shows what is written to `other`, a word of the slice `owner`; restore both words."""
    one, mine = (torch.tensor([number], device=memory.device) for number in (other, word))
    follows = []
    for mark in MARKS:
        owner.put(one, mark)
        follows.append(_read(memory, word) == mark)
    memory.put(mine, value)
    owner.put(one, other_value)  # last: of two addresses of one cell the sound one is right again
    return all(follows)


def disturber(memory: Slice, word: int, value: int) -> int | None:
    """Return the number of a word of the slice that changes `word` when it is written, or None if none is found.

    `value` is what `word` must hold. The search halves the slice repeatedly and inverts the words of each half twice.
    """

    def disturbed(start: int, stop: int) -> bool:
        memory.put(torch.tensor([word], device=memory.device), value)
        changed = False
        for _ in range(2):
            for first, last in ((start, min(stop, word)), (max(start, word + 1), stop)):
                if first < last:
                    memory.invert(first, last)
            changed |= _read(memory, word) != value
        return changed

    start, stop = 0, memory.count
    if not disturbed(start, stop):
        return None
    while stop - start > 1:
        middle = (start + stop) // 2
        if disturbed(start, middle):
            stop = middle
        elif disturbed(middle, stop):
            start = middle
        else:
            return None  # it does not do it every time
    return start


def holds(memory: Slice, wrong: Wrong, seconds: float) -> int:
    """Write the wrong words again, wait for `seconds` without access; return how many are wrong afterwards."""
    at = torch.tensor(wrong.at, device=memory.device)
    values = torch.tensor(wrong.expected, dtype=torch.int64, device=memory.device)
    memory.put(at, values)
    memory.rest(seconds)
    return int((memory.get(at) != values).sum())


def _read(memory: Slice, word: int) -> int:
    return int(memory.flat[word])
