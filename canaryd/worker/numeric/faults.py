"""Software faults for drills (runs with an injected fault), benchmarks and tests of detection.

Each fault changes the bits of a result or an operand on the device in place, as a broken unit does. All results of a
drill have the fault's name and never count against the device. Probes whose results are no tensors of a computation
inject one fault of their own, whatever the name. `canaryd.cli.check` lists the names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.seeds import mix64
from canaryd.worker.numeric.tensors import torch
from canaryd.worker.runtime.interface import Change, Runtime

LANES = 16
"""Number of lanes of the simulated unit. Elements this far apart are computed in the same lane."""


def signed(pattern: int, flat: Any) -> int:
    """Return the bits of `pattern` as the integer that torch needs for one element of `flat`; bytes are unsigned."""
    width = 8 * flat.element_size()
    pattern &= (1 << width) - 1
    return pattern - (1 << width) if width > 8 and pattern >> (width - 1) else pattern


def lane(flat: Any, choice: int) -> Any:
    """Return a view of every sixteenth element along the last axis of the raw bits `flat`; `choice` picks the first."""
    return flat[..., choice % LANES :: LANES]


def force(some: Any, bit: int, *, high: bool) -> None:
    """Set bit number `bit` of all elements of `some` (raw bits) to 1 if `high`, otherwise to 0, in place."""
    if high:
        some |= signed(1 << bit, some)
    else:
        some &= signed(~(1 << bit), some)


def flip(flat: Any, choice: int) -> None:
    """Flip one bit of one element, both chosen by `choice`."""
    flat[choice % flat.numel()] ^= signed(1 << (choice >> 32) % (8 * flat.element_size()), flat)


def _flip_low(flat: Any, choice: int) -> None:
    flat[choice % flat.numel()] ^= 1


def _zero(flat: Any, choice: int) -> None:
    flat[choice % flat.numel()].fill_(0)  # a number that is assigned is copied from the host: no graph carries that


def _swap(flat: Any, choice: int) -> None:
    """Exchange one element with the next that differs from it. The host reads nothing, so a graph can carry this."""
    first = choice % flat.numel()
    rolled = flat.roll(-first)
    away = (rolled != rolled[0]).int().argmax()  # 0 where all are equal
    at = torch.arange(flat.numel(), device=flat.device)
    # Not by index: deterministic torch reads the indices on the host (pytorch, Indexing.cu, wrapIndexOnce).
    swapped = torch.where(at == first, rolled.index_select(0, away.view(1)), flat)
    flat.copy_(torch.where(at == (away + first) % flat.numel(), flat[first], swapped))


def _nan(flat: Any, choice: int) -> None:
    # All exponent and mantissa bits set is NaN in every IEEE-like format, and -1's neighbour in an integer result.
    flat[choice % flat.numel()].fill_((1 << (flat.element_size() * 8 - 1)) - 1)


def _stuck(flat: Any, choice: int) -> None:
    """Set bit 0 to 1 in every sixteenth element, as a lane with a stuck wire does."""
    force(lane(flat, choice), 0, high=True)


def _same_bit(flat: Any, choice: int) -> None:  # noqa: ARG001  the same element whatever the choice
    flat[flat.numel() // 2] ^= 1 << (flat.element_size() * 8 - 2)


def _only_if(when: Any, change: Change) -> Change:
    """Return `change` as part of a graph, done where `when`, a truth value (1,) on the device, is true at a launch."""

    def happen(flat: Any, choice: int) -> None:
        changed = flat.clone()
        change(changed, choice)
        flat.copy_(torch.where(when, changed, flat))

    return happen


@dataclass(frozen=True)
class Fault:
    """A software fault: the way in which it changes a tensor, the tensor (an operand or a result), and how often."""

    name: str
    change: Change
    operand: bool = False
    """True: changes an operand before the product; False: changes the result after it."""
    always: bool = False
    """True: changes every result of every case; False: only the first result of one case."""


FAULTS = {
    f.name: f
    for f in (
        Fault("flip", _flip_low),
        Fault("zero", _zero),
        Fault("swap", _swap),
        Fault("nan", _nan),
        Fault("stuck", _stuck, operand=True, always=True),
        Fault("consistent", _same_bit, always=True),
    )
}


@dataclass
class Injector:
    """Injects one fault during a run: into every result, or only once, in a case that the seed chooses."""

    fault: Fault | None
    seed: int
    runtime: Runtime
    target: str = ""
    """Name of the case that a one-shot fault changes."""
    spent: bool = False
    when: Any = None
    """Of a graph: truth value (1,) on the device; only launches in which it is true have the fault. Otherwise None."""

    def arm(self, cases: list[str]) -> None:
        """Choose one of the `cases` by the seed, for a fault that is injected only once."""
        if cases:
            self.target = cases[mix64(self.seed) % len(cases)]

    def before(self, case: str, operands: tuple[Any, ...], struck: int) -> tuple[Any, ...]:
        """Return uploaded operands, with operand number `struck` changed if the fault is due for this case."""
        if not self._due(case, operand=True):
            return operands
        return (*operands[:struck], self._apply(operands[struck]), *operands[struck + 1 :])

    def after(self, case: str, result: Any) -> Any:
        """Return a result, changed if the fault is due for this case."""
        return self._apply(result) if self._due(case, operand=False) else result

    def in_graph(self, case: str, device: Device) -> Injector:
        """Return an injector for the work of a graph: the fault, if it is due for this case, is part of that work."""
        if not self.is_due(case):
            return replace(self, fault=None)
        (when,) = self.runtime.upload((torch.zeros(1, dtype=torch.bool),), device)
        return replace(self, when=when)

    def is_due(self, case: str) -> bool:
        """Return whether the fault strikes the next results of this case, or their operands."""
        return self.fault is not None and (self.fault.always or (case == self.target and not self.spent))

    def is_owed(self, case: str) -> bool:
        """Return whether a fault that strikes only once has still to strike this case."""
        return self.is_due(case) and self.fault is not None and not self.fault.always

    def launched(self, case: str) -> bool:
        """Return whether the fault strikes the launch of a graph that follows; it counts as injected then."""
        due = self.is_due(case)
        self.spent = self.spent or due
        return due

    def _due(self, case: str, *, operand: bool) -> bool:
        return self.is_due(case) and self.fault is not None and self.fault.operand is operand

    def _apply(self, array: Any) -> Any:
        assert self.fault is not None
        self.spent = True
        change = self.fault.change if self.when is None else _only_if(self.when, self.fault.change)
        return self.runtime.changed(array, change, mix64(self.seed + 1) >> 1)
