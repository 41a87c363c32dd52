"""Turns (draws of operands) that a device gathers, computes and compares; the host only starts them and reads answers.

While the host reads one turn, the device works on the next. So there are two repeaters with separate operands and
results: the data of a wrong turn are still there to be examined.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from canaryd.worker.numeric import faults
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.digests import UNFIT, Digest, fits
from canaryd.worker.numeric.errors import ErrorKind, is_refusal, kind_of
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.operands import SHEET
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import has_events, timed, torch_device
from canaryd.worker.runtime.graphs import cannot_be_captured, why_not
from canaryd.worker.runtime.interface import Repeated

AHEAD = 2
"""Largest number of turns that are launched but not answered yet."""
TRIED = SHEET
"""Number of the turn with which a repeater is made and tested with a wrong golden. It is not one of the first turns,
because their results must not be in memory beforehand."""
EQUAL, DIFFERENT = 0, 1
SLOWER = 1.5
"""How many times as long as the comparison with goldens that of digests may take, without the gather of goldens, which
it saves (ours). A GB300 multiplies integers several times more slowly than floating-point numbers (pytorch issue
187094)."""


class Repeater:
    """One operation on the device, launched for each turn: gather operands, compute, compare with golden or digests."""

    def __init__(
        self, session: Session, case: Case, gatherer: Gatherer, results: list[Any], indices: tuple[Any, ...]
    ) -> None:
        """Prepare the operation; `results` is the memory for its results, and `indices` are the indices of any turn."""
        self._runtime, self._case, self._gatherer, self.results = session.runtime, case, gatherer, results
        self._injector = session.injector.in_graph(case.name, session.ctx.device)
        self._indices = tuple(index.clone() for index in indices)
        self.operands: tuple[Any, ...] = ()
        self.golden: Any = None
        """The golden of the turn, on the device; None if digests take its place."""
        self._device: Repeated = session.runtime.repeated(session.ctx.device, self._compute)

    def _compute(self) -> tuple[list[Any], Any]:
        injector, name = replace(self._injector), self._case.name  # what is captured was run once before
        operands, right = self._gatherer.gather_by(self._indices, 1)
        self.golden = right if self._gatherer.digest is None else None
        self.operands = injector.before(name, operands, self._case.struck)
        self._runtime.spoil(self.results[:1] if self._gatherer.renews else self.results)
        for result in self.results:
            made = self._case.compute(self.operands, result)
            if made is not result:  # a kernel that chooses the memory of its results: the next one may take it
                result.copy_(made)
                self._runtime.spoil([made])
            injector.after(name, result)
        return self._gatherer.compared(self.results), right

    def launch(self, indices: tuple[Any, ...], *, struck: bool = False) -> None:
        """Start a turn with these indices on the device; with `struck`, the fault of a drill strikes it.

        The results overwrite those of the turn before the last, which has another golden: a kernel that writes nothing
        leaves wrong results. Single elements of both goldens can be equal (half of them, where sums cancel), so the
        memory of the first result is overwritten with ones beforehand; of all results, if the golden stays the same.
        """
        for mine, given in zip(self._indices, indices, strict=True):
            mine.copy_(given)
        if self._injector.when is not None:
            self._injector.when.fill_(struck)
        self._device.launch()

    def answers(self) -> list[int]:
        """Wait for the turn; return a number for each result: 0 equal, 1 different, any other number not compared."""
        return self._device.answers()


@dataclass(frozen=True)
class Turn:
    """The outcome of one turn: its number, the answers (see `Repeater.answers`), and the repeater that ran it."""

    number: int
    answers: list[int]
    by: Repeater
    """The repeater that ran this turn. It holds the turn's operands and results until the next turn is requested."""


class RepeatedTurns:
    """The turns of one case from the second on, which the device runs without the host."""

    def __init__(self, session: Session, case: Case, gatherer: Gatherer, results: list[Any]) -> None:
        """Prepare two repeaters; one uses the memory of `results`. Raises the errors of `Runtime.repeated`."""
        self._session, self._name, self._gatherer = session, case.name, gatherer
        self._number, self._sheet = 0, gatherer.sheet(0)
        spare = session.runtime.room(results[0], len(results))
        tried, twins = self._indices(TRIED), [gatherer.twin(), gatherer.twin()]
        if digest := _digest(session, case, twins[0], results, tried):
            twins = [twin.digesting(digest) for twin in twins]
        memories = zip(twins, (results, spare), strict=True)
        self._repeaters = [Repeater(session, case, twin, memory, tried) for twin, memory in memories]

    def _indices(self, turn: int) -> tuple[Any, ...]:
        number, at = divmod(turn - 1, SHEET)
        if number != self._number:
            self._number, self._sheet = number, self._gatherer.sheet(number)
        return tuple(index[at] for index in self._sheet)

    def blind(self, choice: int) -> str:
        """Flip one bit of a golden, chosen by `choice`; return "" if all comparisons on the device see the difference.

        Otherwise return a text with the number of comparisons that see none: they would hide every error.
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

    def again(self, turn: Turn) -> list[int]:
        """Compute a turn once more, on the memory of the first time; return its answers."""
        with self._session.on_device():
            turn.by.launch(self._indices(turn.number), struck=self._strikes())
        return turn.by.answers()

    def _strikes(self) -> bool:
        return self._session.injector.launched(self._name)

    def turns(self, until: float, most: int = 0) -> Iterator[Turn]:
        """Launch turns until the clock reads `until`; yield each turn as soon as its answers have arrived.

        At least one turn is launched, and at most `most` turns (0: no limit).
        """
        session, waiting, turn = self._session, deque[tuple[int, Repeater]](), 1
        # A server, and a retest that lets the device idle, get pauses in which nothing is left to do.
        ahead = 1 if session.ctx.room or session.ctx.intensity else AHEAD
        try:
            while True:
                if turn == 1 or (session.ctx.clock() < until and not 0 < most < turn):
                    session.ctx.pace()
                    repeater = self._repeaters[turn % AHEAD]
                    with session.on_device():
                        repeater.launch(self._indices(turn), struck=self._strikes())
                    session.gathers += self._gatherer.renews
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


def _digest(
    session: Session, case: Case, gatherer: Gatherer, results: list[Any], tried: tuple[Any, ...]
) -> Digest | None:
    """Return what makes digests of rows, after it was right for a golden in the place of every result.

    `tried`: the indices of the golden's turn. Return None if nothing is gathered, if the backend is `UNFIT`, if the
    rows do not fit, if the device multiplies integers slowly, or if it refuses or fails this test: then the run
    compares with goldens. The test involves none of the results, so that its failure accuses nobody here: products of
    integers have cases of their own.
    """
    runtime, device, result = session.runtime, session.ctx.device, results[0]
    if session.undigested or not gatherer.renews or device.backend in UNFIT or not fits(results, len(gatherer.answers)):
        return None
    seed = derive(session.ctx.seed, f"digest {case.name}")
    digest = Digest(result.shape[-1], result.element_size(), seed, torch_device(device))
    _, golden = gatherer.gather_by(tried, TRIED)
    for memory in results:
        memory.copy_(golden)
    try:
        _, right = gatherer.digesting(digest).gather_by(tried, TRIED)
        agreed = runtime.agree(digest.of(results), right)
        flipped = [runtime.changed(memory, faults.flip, seed) for memory in results]
        blind = runtime.agree(digest.of(flipped), right)
    except (RuntimeError, AttributeError) as error:
        if not is_refusal(error):
            raise
        session.undigested = why_not(error)
        return None
    if not all(agreed) or any(blind):
        session.undigested = "the device's digests of right results were wrong, or those of wrong ones right"
        return None
    if has_events(device):
        ways = (partial(runtime.agree, results, golden), lambda: runtime.agree(digest.of(results), right))
        wait = partial(runtime.synchronize, device)
        whole, digested = (min(timed(device, way, wait)[1] for _ in range(2)) for way in ways)
        if digested > SLOWER * whole:
            return None
    return digest


def repeats(session: Session) -> bool:
    """Return whether the device can run turns by itself, as far as is known."""
    if not session.runtime.repeats(session.ctx.device):
        return False
    session.single_steps = session.runtime.cannot_repeat
    return not session.single_steps


def prepare(session: Session, case: Case, gatherer: Gatherer, held: int, results: list[Any]) -> RepeatedTurns | None:
    """Return an object that runs the turns on the device, or None if the host must start each operation itself.

    None is returned if the device cannot do it or has too little memory. `held`: bytes of operands and golden, needed
    by each repeater.
    """
    ctx = session.ctx
    if not repeats(session):
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
        if not session.undigested:  # perhaps it is the digests that cannot be captured
            session.undigested = why_not(error)
            return prepare(session, case, gatherer, held, results)
        session.runtime.cannot_repeat = session.single_steps = why_not(error)
        return None
