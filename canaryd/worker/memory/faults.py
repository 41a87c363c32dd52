"""Faulty memory, for drills and tests of detection: a slice whose cells or transfers err as a model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from canaryd.facts import Cell
from canaryd.model import TORCH
from canaryd.worker.memory.slices import TILE, Expected, Slice
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.runtime import interface

MODELS = {
    "stuck-at-1": Cell.STUCK,
    "stuck-at-0": Cell.STUCK,
    "coupled": Cell.COUPLED,
    "alias": Cell.ALIAS,
    "transfer": Cell.TRANSFER,
    "leaking": Cell.LEAKING,
}
"""Name of a drill → what a sweep must call the words that it finds."""


@dataclass
class Model:
    """A faulty memory. `flat`: the words of a slice; `word`, `bit`: where; `other`: a second word."""

    name: str
    """One of `MODELS`; "": a sound memory."""
    flat: Any = None
    word: int = 0
    other: int = 0
    bit: int = 0
    last: int = 0
    """What `other` held after the last write."""
    reads: int = 0

    def wrote(self, start: int, stop: int) -> None:
        """Err after the words start…stop - 1 were written."""
        flat, word, other = self.flat, self.word, self.other
        strikes, meets = start <= word < stop, start <= other < stop
        if self.name == "stuck-at-1" and strikes:
            flat[word] |= self.bit
        elif self.name == "stuck-at-0" and strikes:
            flat[word] &= ~self.bit
        elif self.name == "coupled" and meets:  # the bit flips whenever that of the other word rises
            now = int(flat[other])
            if now & ~self.last & self.bit:
                flat[word] ^= self.bit
            self.last = now
        elif self.name == "alias" and (strikes or meets):  # two addresses reach one word: the last write counts
            low, high = sorted((word, other))
            if start <= high < stop:
                flat[low] = flat[high]
            else:
                flat[high] = flat[low]

    def read(self, difference: Any) -> None:
        """Flip a bit of every third read on its way, in place; the memory is right."""
        self.reads += 1
        if self.name == "transfer" and self.reads % 3 == 1:
            difference.view(-1)[mix64(self.word + self.reads) % difference.numel()] ^= self.bit

    def rested(self) -> None:
        """Lose the ones of a word that was not written for a while."""
        if self.name == "leaking":
            self.flat[self.word] &= 0


NAMES = (*MODELS, *faults.FAULTS)
"""Every drill of memory: the models, and what strikes the results of other probes, here words that were written."""


class Faulty(Slice):
    """What makes a slice, whose class comes behind it, one of a faulty memory."""

    model: Model = Model("")
    strike_rows: Callable[[int, int], None] = staticmethod(lambda _start, _stop: None)
    """What strikes the words start…stop - 1 after rows were written; single words are spared."""

    def arm(self, name: str, case: str, seed: int) -> None:
        """Put the fault called `name` in, where `seed` decides; raise `KeyError` for one that does not exist."""
        size = self.count
        if name in MODELS:
            word = mix64(seed) % size
            other = (word + 1 + mix64(seed + 1) % (size - 1)) % size
            self.model = Model(name, self.flat, word, other, 1 << (mix64(seed + 2) % 62))
        else:
            injector = faults.Injector(faults.FAULTS[name], seed, interface.named(TORCH), target=case)

            def strike(start: int, stop: int) -> None:
                written = self.flat[start:stop]
                injector.before(case, (written,), 0)
                injector.after(case, written)
                self.flat[start:stop] = written

            self.strike_rows = strike

    def write(self, part: range, expected: Expected) -> None:
        """See `Slice.write`."""
        super().write(part, expected)
        self.model.wrote(part.start * TILE, part.stop * TILE)
        self.strike_rows(part.start * TILE, part.stop * TILE)

    def difference(self, part: range, expected: Expected) -> Any:
        """See `Slice.difference`."""
        found = super().difference(part, expected)
        self.model.read(found)
        return found

    def put(self, at: Any, values: Any) -> None:
        """See `Slice.put`; one word after the other."""
        for word, value in zip(at, values.expand(at.shape) if hasattr(values, "expand") else [values], strict=True):
            self.flat[word] = value
            self.model.wrote(int(word), int(word) + 1)

    def invert(self, start: int, stop: int) -> None:
        """See `Slice.invert`."""
        super().invert(start, stop)
        self.model.wrote(start, stop)

    def rest(self, seconds: float) -> None:
        """See `Slice.rest`."""
        super().rest(seconds)
        self.model.rested()


class FaultySlice(Faulty, Slice):
    """A slice of a faulty memory of torch's."""
