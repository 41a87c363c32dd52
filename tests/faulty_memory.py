"""Memory whose cells or transfers err, below torch: the code that is tested knows nothing of it."""

from __future__ import annotations

from typing import Any

from canaryd.facts import Cell
from canaryd.worker.memory.slices import TILE

CELLS = {
    "stuck-at-1": Cell.STUCK,
    "stuck-at-0": Cell.STUCK,
    "coupled": Cell.COUPLED,
    "alias": Cell.ALIAS,
    "transfer": Cell.TRANSFER,
    "leaking": Cell.LEAKING,
}
"""Fault → the kind of wrong word that the memory test must report for it."""


def faulty_device(behaviour: str, word: int, other: int, bit: int, rows: int) -> Any:
    """Return a layer below torch's operations: the first allocation of `rows` rows has a fault, whoever touches it."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Faulty(TorchDispatchMode):  # type: ignore[misc]
        flat: Any = None
        last, reads = (0, 0), 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if self.flat is None:
                if isinstance(result, torch.Tensor) and result.shape == (rows, TILE):
                    self.flat = result.view(-1)
                return result
            named = [(a, kwargs[a.name]) for a in function._schema.arguments if a.name in (kwargs or {})]
            named += zip(function._schema.arguments, args, strict=False)
            if any(a.alias_info and a.alias_info.is_write and self._mine(value) for a, value in named):
                self._wrote()
            if "bitwise_xor" in str(function) and not self._mine(result):
                self._read(result)
            return result

        def _mine(self, value: Any) -> bool:
            storage = self.flat.untyped_storage().data_ptr()
            return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == storage

        def _wrote(self) -> None:
            flat, (first, second) = self.flat, self.last
            if behaviour == "stuck-at-1":
                flat[word] |= bit
            elif behaviour == "stuck-at-0":
                flat[word] &= ~bit
            elif behaviour == "coupled" and (int(flat[other]) ^ second) & bit:
                flat[word] ^= bit
            elif behaviour == "alias" and int(flat[other]) != second:
                flat[word] = flat[other]
            elif behaviour == "alias" and int(flat[word]) != first:
                flat[other] = flat[word]
            self.last = int(flat[word]), int(flat[other])

        def _read(self, difference: Any) -> None:
            self.reads += 1
            if behaviour == "transfer" and self.reads % 4 == 2:
                difference.view(-1)[word % difference.numel()] ^= bit

        def rested(self, _seconds: float) -> None:
            if behaviour == "leaking":
                self.flat[word] &= ~bit

    return Faulty()
