"""Turns that a device gathers, computes and compares by itself: the host launches them, and reads what they found.

While the host reads one, the device works on the next. So there are two, each with operands and results of its own:
what is found wrong is still there to be looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from canaryd.worker.canary.fixed import cannot_be_fixed
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.operands import SHEET
from canaryd.worker.numeric.session import Session
from canaryd.worker.runtime.interface import Repeated

AHEAD = 2
"""Bursts that are handed to the device at a time."""
EQUAL, DIFFERENT = 0, 1


class RepeatedTurn:
    """Results over operands that it gathers first, all in one go of the device."""

    def __init__(self, session: Session, case: Case, gatherer: Gatherer, results: list[Any], like: Any) -> None:
        """Prepare a burst into the memory of `results`; `like` are the indices of a turn."""
        self._session, self._case, self._gatherer, self.results = session, case, gatherer, results
        self._indices = tuple(index.clone() for index in like)
        self.operands: tuple[Any, ...] = ()
        self.golden: Any = None
        self._device: Repeated = session.runtime.repeated(session.ctx.device, self._compute)

    def _compute(self) -> tuple[list[Any], Any]:
        self.operands, self.golden = self._gatherer.gather_by(self._indices, 1)
        self.results = [self._case.compute(self.operands, result) for result in self.results]
        return self.results, self.golden

    def launch(self, indices: tuple[Any, ...]) -> None:
        """Hand a turn with these indices to the device.

        Its results lie where those of the turn before the last lay, which has another golden: a kernel that writes
        nothing leaves wrong ones.
        """
        for mine, given in zip(self._indices, indices, strict=True):
            mine.copy_(given)
        self._device.launch()

    def answers(self) -> list[int]:
        """Wait for the turn; see `Repeated.answers`."""
        return self._device.answers()


@dataclass(frozen=True)
class Turn:
    """What became of a turn."""

    number: int
    answers: list[int]
    burst: RepeatedTurn
    """With operands and results as the turn left them, until the next turn is asked for."""


class RepeatedTurns:
    """The turns of one case on one device, from the second on."""

    def __init__(self, session: Session, case: Case, gatherer: Gatherer, results: list[Any]) -> None:
        """Prepare two bursts, one of them in the memory of `results`. Raises what `Runtime.repeated` raises."""
        self._session, self._gatherer = session, gatherer
        self._number, self._sheet = 0, gatherer.sheet(0)
        spare = session.runtime.room(results[0], len(results))
        self._bursts = [
            RepeatedTurn(session, case, gatherer.twin(), memory, self._indices(1)) for memory in (results, spare)
        ]

    def _indices(self, turn: int) -> tuple[Any, ...]:
        number, at = divmod(turn - 1, SHEET)
        if number != self._number:
            self._number, self._sheet = number, self._gatherer.sheet(number)
        return tuple(index[at] for index in self._sheet)

    def blind(self, bit: int) -> str:
        """Flip one bit of a golden's first element on purpose; return what no burst may say then, "" where none does.

        A comparison that never sees a difference would hide all that errs.
        """
        session, choice = self._session, self._gatherer.first(1) | bit << 32
        session.runtime.changed(self._gatherer.answers, faults.flip, choice)
        seen = []
        for burst in self._bursts:
            with session.on_device():
                burst.launch(self._indices(1))
            seen += burst.answers()
        session.runtime.changed(self._gatherer.answers, faults.flip, choice)
        if not (equal := len(seen) - seen.count(DIFFERENT)):
            return ""
        return f"one bit of a golden was flipped on purpose, and the device finds {equal} results equal"

    def turns(self, until: float) -> Iterator[Turn]:
        """Launch turn after turn until a time, once at least, and yield each when its answers are there."""
        session, waiting = self._session, deque[tuple[int, RepeatedTurn]]()
        turn = 1
        try:
            while True:
                if turn == 1 or session.ctx.clock() < until:
                    session.ctx.pace()
                    burst = self._bursts[turn % AHEAD]
                    with session.on_device():
                        burst.launch(self._indices(turn))
                    session.gathers += 1
                    waiting.append((turn, burst))
                    turn += 1
                    if len(waiting) < AHEAD:
                        continue
                if not waiting:
                    return
                number, burst = waiting.popleft()
                yield Turn(number, burst.answers(), burst)
        finally:
            for _, burst in waiting:  # nothing that is still running may lose its memory
                burst.answers()


def prepare(session: Session, case: Case, gatherer: Gatherer, held: int, results: list[Any]) -> RepeatedTurns | None:
    """Return the bursts of a case; None where the host must hand each operation to the device.

    A drill strikes single steps, and in a retest under load another thread uses the device, so they have none. `held`:
    bytes of operands and golden, of which each burst has its own.
    """
    ctx = session.ctx
    if ctx.room and AHEAD * (held + sum(result.nbytes for result in results)) > ctx.room // 2:
        return None
    if ctx.drill or ctx.intensity or not session.repeats or not session.runtime.repeats(ctx.device):
        return None
    try:
        return RepeatedTurns(session, case, gatherer, results)
    except Exception as error:
        if not cannot_be_fixed(error):
            raise
        session.repeats = False
        return None
