"""Turns that a device gathers, computes and compares without the host, which launches them and reads the answers.

While the host reads one turn, the device works on the next. So there are two repeaters with separate operands and
results: the data of a wrong turn are still there to be examined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.operands import SHEET
from canaryd.worker.numeric.session import Session
from canaryd.worker.runtime.graphs import cannot_be_captured, why_not
from canaryd.worker.runtime.interface import Repeated

AHEAD = 2
"""Most turns that the device has been given but has not answered yet."""
TRIED = SHEET
"""Turn for making a repeater and for the test with a wrong golden. It is none of the first turns, because their results
must not be in memory before."""
EQUAL, DIFFERENT = 0, 1


class Repeater:
    """One launchable turn of a case: the device gathers operands, computes and compares in one operation."""

    def __init__(
        self, session: Session, case: Case, gatherer: Gatherer, results: list[Any], indices: tuple[Any, ...]
    ) -> None:
        """Prepare the operation with the memory of `results`; `indices` are those of any turn."""
        self._runtime, self._case, self._gatherer, self.results = session.runtime, case, gatherer, results
        self._indices = tuple(index.clone() for index in indices)
        self.operands: tuple[Any, ...] = ()
        self.golden: Any = None
        self._device: Repeated = session.runtime.repeated(session.ctx.device, self._compute)

    def _compute(self) -> tuple[list[Any], Any]:
        self.operands, self.golden = self._gatherer.gather_by(self._indices, 1)
        self._runtime.spoil(self.results[:1])
        for result in self.results:
            made = self._case.compute(self.operands, result)
            if made is not result:  # a kernel that chooses the memory of its results: the next turn may take it
                result.copy_(made)
        return self.results, self.golden

    def launch(self, indices: tuple[Any, ...]) -> None:
        """Start a turn with these indices on the device.

        Its results overwrite those of the turn before the last, which has another golden: a kernel that writes nothing
        leaves wrong results. Single elements of both may be equal (half of them, where sums cancel), so the memory of
        the first result is overwritten before.
        """
        for mine, given in zip(self._indices, indices, strict=True):
            mine.copy_(given)
        self._device.launch()

    def answers(self) -> list[int]:
        """Wait for the turn and return its answers; see `Repeated.answers`."""
        return self._device.answers()


@dataclass(frozen=True)
class Turn:
    """The answers of one turn."""

    number: int
    answers: list[int]
    by: Repeater
    """The repeater, with the turn's operands and results until the next turn is requested."""


class RepeatedTurns:
    """The turns of one case on one device, beginning with the second."""

    def __init__(self, session: Session, case: Case, gatherer: Gatherer, results: list[Any]) -> None:
        """Prepare two repeaters, one with the memory of `results`. Raises the errors of `Runtime.repeated`."""
        self._session, self._gatherer = session, gatherer
        self._number, self._sheet = 0, gatherer.sheet(0)
        spare = session.runtime.room(results[0], len(results))
        tried = self._indices(TRIED)
        self._repeaters = [Repeater(session, case, gatherer.twin(), memory, tried) for memory in (results, spare)]

    def _indices(self, turn: int) -> tuple[Any, ...]:
        number, at = divmod(turn - 1, SHEET)
        if number != self._number:
            self._number, self._sheet = number, self._gatherer.sheet(number)
        return tuple(index[at] for index in self._sheet)

    def blind(self, choice: int) -> str:
        """Flip one bit of a golden on purpose; return a text if a repeater does not see the difference, else "".

        A comparison that never sees a difference would hide every error.
        """
        session, at = self._session, self._gatherer.answer(TRIED, choice)

        def flip(flat: Any, choice: int) -> None:
            faults.flip(flat[at : at + 1], choice)

        session.runtime.changed(self._gatherer.answers, flip, choice)
        seen = []
        for repeater in self._repeaters:
            with session.on_device():
                repeater.launch(self._indices(TRIED))
            seen += repeater.answers()
        session.runtime.changed(self._gatherer.answers, flip, choice)
        if not (blind := len(seen) - seen.count(DIFFERENT)):
            return ""
        return f"one bit of a golden was flipped on purpose, and the device finds no difference in {blind} results"

    def turns(self, until: float, most: int = 0) -> Iterator[Turn]:
        """Launch turns until the time `until`, at least one, or `most` turns (0: no such limit); yield each of them.

        A turn is yielded when its answers have arrived.
        """
        session, waiting, turn = self._session, deque[tuple[int, Repeater]](), 1
        ahead = 1 if session.ctx.room else AHEAD  # a server gets pauses in which nothing is left to do
        try:
            while True:
                if turn == 1 or (session.ctx.clock() < until and not 0 < most < turn):
                    session.ctx.pace()
                    repeater = self._repeaters[turn % AHEAD]
                    with session.on_device():
                        repeater.launch(self._indices(turn))
                    session.gathers += 1
                    waiting.append((turn, repeater))
                    turn += 1
                    if len(waiting) < ahead:
                        continue
                elif not waiting:
                    break
                number, repeater = waiting.popleft()
                yield Turn(number, repeater.answers(), repeater)
        finally:
            for _, repeater in waiting:  # nothing that is still running may lose its memory
                repeater.answers()


def prepare(session: Session, case: Case, gatherer: Gatherer, held: int, results: list[Any]) -> RepeatedTurns | None:
    """Return the turns that the device repeats, or None if the host must start each operation.

    None for a drill, which changes single steps, and for a retest under load, where another thread uses the device.
    `held`: bytes of operands and golden; each repeater has its own.
    """
    ctx = session.ctx
    if ctx.drill or ctx.intensity or not session.runtime.repeats(ctx.device):
        return None
    session.single_steps = session.runtime.cannot_repeat
    if session.single_steps:
        return None
    if ctx.room and AHEAD * (held + sum(result.nbytes for result in results)) > ctx.room // 2:
        return None  # the other half is for the pools, the first turn, and what a comparison takes
    try:
        return RepeatedTurns(session, case, gatherer, results)
    except Exception as error:
        if kind_of(error) is ErrorKind.MEMORY:
            return None  # single steps take less
        if not cannot_be_captured(error):
            raise
        session.runtime.cannot_repeat = session.single_steps = why_not(error)
        return None
