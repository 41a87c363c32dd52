"""A torch runtime with a broken gather, for drills: one method makes an error, and the device itself is right."""

from __future__ import annotations

from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.tensors import bits
from canaryd.worker.runtime.interface import Operation
from canaryd.worker.runtime.torch import Torch

INDICES = 4
"""Number of index tensors that `Gatherer.gather` uploads at once: A's rows, B's columns, and the golden's both."""


class Faulty(Torch):
    """torch with a fault that happens once: in gather number `turn` or later, at a place that `choice` selects."""

    def __init__(self, choice: int, turn: int = 0) -> None:
        """Prepare the fault; it happens when the gather number `turn` runs."""
        self.choice, self.turn = choice, turn
        self.turns = 0
        """Turns whose indices were uploaded."""
        self.struck = 0
        """How often it changed anything."""

    def repeats(self, device: Device) -> bool:  # noqa: ARG002
        """Return False: the host starts each step separately."""
        return False

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """See `Runtime.upload`."""
        self.turns += len(tensors) == INDICES
        return super().upload(tensors, device)


class WrongIndex(Faulty):
    """One index of a row of operand A points at another row, as if it had changed on its way to the device."""

    which = 0
    """Number of the uploaded tensor that the fault changes."""
    moved = 0, 0
    """(right index, wrong index) of the row."""

    def upload(self, tensors: tuple[Any, ...], device: Device) -> tuple[Any, ...]:
        """See `Runtime.upload`."""
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
        """See `Runtime.upload`."""
        self.next_is_a = len(tensors) == INDICES
        return super().upload(tensors, device)

    def run(self, operation: Operation, operands: tuple[Any, ...], out: Any) -> Any:
        """See `Runtime.run`."""
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
"""Name of a drill → the runtime whose gather has this fault."""
