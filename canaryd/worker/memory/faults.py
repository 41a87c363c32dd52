"""Faulty memory for drills (runs with an injected fault) and tests: slices whose cells or transfers err on purpose."""

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
"""Name of a drill → the kind of wrong word that the memory test must report for it."""


@dataclass
class Model:
    """A model of a memory fault in the words `flat` of a slice: at `bit` of `word`. `other` is a second word."""

    name: str
    """One of `MODELS`, or "" for memory without a fault."""
    flat: Any = None
    word: int = 0
    other: int = 0
    bit: int = 0
    last: int = 0
    """The content of the word `other` after the last write."""
    reads: int = 0

    def wrote(self, start: int, stop: int) -> None:
        """Apply the fault after the words start…stop - 1 were written."""
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
        """Flip one bit of `difference`, in place, at every third read, as a wrong transfer from right memory does."""
        self.reads += 1
        if self.name == "transfer" and self.reads % 3 == 1:
            difference.view(-1)[mix64(self.word + self.reads) % difference.numel()] ^= self.bit

    def rested(self) -> None:
        """Clear all bits of one word, as a leaking cell does during a pause."""
        if self.name == "leaking":
            self.flat[self.word] &= 0


NAMES = (*MODELS, *faults.FAULTS)
"""All drills of memory: the models in this module, and faults of other probes, which strike written words."""


class Faulty(Slice):
    """A mixin that injects a fault into the slice class that follows it in the list of base classes."""

    model: Model = Model("")
    strike_rows: Callable[[int, int], None] = staticmethod(lambda _start, _stop: None)
    """Function that injects a fault into the words start…stop - 1 after rows (not single words) were written."""

    def arm(self, name: str, case: str, seed: int) -> None:
        """Choose the fault called `name`, at a place drawn from `seed`; raise `KeyError` for an unknown name."""
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
        """Write the expected content to the group of rows `part`, then inject the fault."""
        super().write(part, expected)
        self.model.wrote(part.start * TILE, part.stop * TILE)
        self.strike_rows(part.start * TILE, part.stop * TILE)

    def difference(self, part: range, expected: Expected) -> Any:
        """Return the wrong bits of rows as `Slice.difference` does; a drill of transfers adds a wrong bit."""
        found = super().difference(part, expected)
        self.model.read(found)
        return found

    def put(self, at: Any, values: Any) -> None:
        """Write `values` to the words with the numbers `at`, one after the other; inject the fault after each."""
        for word, value in zip(at, values.expand(at.shape) if hasattr(values, "expand") else [values], strict=True):
            self.flat[word] = value
            self.model.wrote(int(word), int(word) + 1)

    def invert(self, start: int, stop: int) -> None:
        """Invert every bit of the words start…stop - 1, then inject the fault."""
        super().invert(start, stop)
        self.model.wrote(start, stop)

    def rest(self, seconds: float) -> None:
        """Wait for `seconds` without access to the memory, then inject the fault of a leaking cell."""
        super().rest(seconds)
        self.model.rested()


class FaultySlice(Faulty, Slice):
    """A slice of torch's memory with a fault."""
