"""Faulty memory, for drills and tests of detection: a slice whose cells or transfers err as a model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from canaryd.facts import Cell
from canaryd.model import TORCH
from canaryd.worker.memory.buffers import BufferSlice
from canaryd.worker.memory.slices import TILE, Expected, Slice
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.runtime import interface


@dataclass
class Model:
    """What a faulty memory does. `flat`: the words of a slice; `word`, `bit`: where; `other`: a second word."""

    cell: ClassVar[Cell]
    """What a sweep must call the words that it finds."""
    flat: Any
    word: int
    other: int
    bit: int
    last: int = 0
    """What `other` held after the last write."""
    reads: int = 0

    def wrote(self, start: int, stop: int) -> None:
        """Some of the words start…stop - 1 were written."""

    def read(self, difference: Any) -> None:
        """Words were read; their differences may be changed in place."""

    def rested(self) -> None:
        """Time passed without a write."""


class StuckAtOne(Model):
    """One bit reads 1 whatever is written."""

    cell = Cell.STUCK

    def wrote(self, start: int, stop: int) -> None:
        """See `Model.wrote`."""
        if start <= self.word < stop:
            self.flat[self.word] |= self.bit


class StuckAtZero(Model):
    """One bit reads 0 whatever is written."""

    cell = Cell.STUCK

    def wrote(self, start: int, stop: int) -> None:
        """See `Model.wrote`."""
        if start <= self.word < stop:
            self.flat[self.word] &= ~self.bit


class Coupled(Model):
    """A bit of one word flips whenever the same bit of another word rises."""

    cell = Cell.COUPLED

    def wrote(self, start: int, stop: int) -> None:
        """See `Model.wrote`."""
        if start <= self.other < stop:
            now = int(self.flat[self.other])
            if now & ~self.last & self.bit:
                self.flat[self.word] ^= self.bit
            self.last = now


class Aliased(Model):
    """Two addresses reach one word: what is written to one is read at the other."""

    cell = Cell.ALIAS

    def wrote(self, start: int, stop: int) -> None:
        """See `Model.wrote`."""
        first, second = sorted((self.word, self.other))
        if start <= second < stop:
            self.flat[first] = self.flat[second]
        elif start <= first < stop:
            self.flat[second] = self.flat[first]


class Flipping(Model):
    """Every third read of many words flips a bit on its way; the memory is right."""

    cell = Cell.TRANSFER

    def read(self, difference: Any) -> None:
        """See `Model.read`."""
        self.reads += 1
        if self.reads % 3 == 1:
            difference.view(-1)[mix64(self.word + self.reads) % difference.numel()] ^= self.bit


class Leaking(Model):
    """A word loses its ones while it is not written."""

    cell = Cell.LEAKING

    def rested(self) -> None:
        """See `Model.rested`."""
        self.flat[self.word] &= 0


MODELS: dict[str, type[Model]] = {
    "stuck-at-1": StuckAtOne,
    "stuck-at-0": StuckAtZero,
    "coupled": Coupled,
    "alias": Aliased,
    "transfer": Flipping,
    "leaking": Leaking,
}
"""Name of a drill → the faulty memory."""
NAMES = (*MODELS, *faults.FAULTS)
"""Every drill of memory: the models, and what strikes the results of any probe, here the words that were written."""


class Faulty(Slice):
    """What makes a slice, whose class comes behind it, one of a faulty memory."""

    model: Model = Model(None, 0, 0, 0)
    strike_rows: Callable[[int, int], None] = staticmethod(lambda _start, _stop: None)
    """What strikes the words start…stop - 1 after rows were written; single words are spared."""

    def arm(self, name: str, case: str, seed: int) -> None:
        """Put the fault called `name` in, where `seed` decides; raise `KeyError` for one that does not exist."""
        size = self.count
        if name in MODELS:
            word = mix64(seed) % size
            other = (word + 1 + mix64(seed + 1) % (size - 1)) % size
            self.model = MODELS[name](self.flat, word, other, 1 << (mix64(seed + 2) % 62))
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


class FaultyBuffer(Faulty, BufferSlice):
    """A slice of a faulty memory that WebGPU reaches."""
