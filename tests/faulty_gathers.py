"""Torch runtimes whose gather is wrong on purpose: one method makes an error, the device makes none."""

from __future__ import annotations

from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.tensors import bits
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.runtime.torch import Torch

INDICES = 4
"""Number of index tensors that one gather uploads: A's rows and B's columns, and both again for the golden."""


class Faulty(Torch):
    """torch with a fault that happens once: in gather number `turn` or later, at a place that `choice` selects."""

    def __init__(self, choice: int, turn: int = 0) -> None:
        """Prepare the fault; it happens when the gather number `turn` runs."""
        self.choice, self.turn = choice, turn
        self.turns = 0
        """Turns whose indices were uploaded."""
        self.struck = 0
        """How often it changed anything."""

    def repeats(self, device: Device) -> bool:
        """Return False: the host starts each step separately."""
        return False

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors on the device, and count the gathers that their uploads begin."""
        self.turns += len(tensors) == INDICES
        return super().upload(tensors, device)


class WrongIndex(Faulty):
    """One index of a row of operand A points at another row, as if it had changed on its way to the device."""

    which = 0
    """Number of the uploaded tensor that the fault changes."""
    moved = 0, 0
    """(right index, wrong index) of the row."""

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors on the device; the due gather gets one wrong index."""
        done = super().upload(tensors, device)
        if len(tensors) == INDICES and self.turns > self.turn and not self.struck:
            index = done[self.which].view(-1)
            at, count = self.choice % len(index), int(index.max()) + 1
            self.moved = int(index[at]), (int(index[at]) + 1) % count
            index[at] = self.moved[1]
            self.struck += count > 1
        return done


class WrongColumn(WrongIndex):
    """One index of a column of the golden (the right result) points at another column."""

    which = 2


class StaleRow(Faulty):
    """One row of operand A keeps the values of the gather before."""

    next_is_a = False
    """Whether indices were just uploaded, so that the next gather makes operand A."""

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """Return copies of host tensors on the device, and note whether they are the indices of a gather."""
        self.next_is_a = len(tensors) == INDICES
        return super().upload(tensors, device)

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """Return the result of an operation; one row of the due gather of operand A keeps its earlier values."""
        strikes = self.next_is_a and out is not None and self.turns > self.turn and not self.struck
        self.next_is_a = False
        if not strikes:
            return super().run(operation, operands, out)
        row = (0,) * (out.dim() - 2) + (self.choice % out.shape[-2],)
        stale = bits(out)[row].clone()
        done = super().run(operation, operands, out)
        self.struck += bool((bits(done)[row] != stale).any())
        bits(done)[row] = stale
        return done


GATHERS: dict[str, type[Faulty]] = {"wrong-row": WrongIndex, "stale-row": StaleRow, "wrong-column": WrongColumn}
"""Name of a fault → the runtime whose gather has it."""
