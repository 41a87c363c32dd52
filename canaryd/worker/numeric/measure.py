"""Compute one case on a device repeatedly, compare every result with the golden (right result), and collect evidence.

The device compares; in repeated turns it compares digests of rows where they fit (digests.py). The host also compares
the first result of every upload, because the comparison on the device can be wrong too; on an accelerator the host does
so while the device computes the next results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from canaryd.facts import Comparison, Doubt, Evidence, Subject, is_of_graph
from canaryd.worker.numeric import evidence, faults
from canaryd.worker.numeric.cases import Case, first_result
from canaryd.worker.numeric.gathering import PRODUCTS, Gatherer, Held
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Problem
from canaryd.worker.numeric.repeating import DIFFERENT, EQUAL, RepeatedTurns, Turn, prepare, repeats
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import host_same_bits, is_alone, on_core, same_bits
from canaryd.worker.runtime.interface import burst_bytes

WRONG_ENOUGH = 3
"""Number of wrong results after which the computation on these operands stops."""
LOOKED_AT = 8
"""The host checks the gathered arrays in one of this many cases, even if nothing is wrong (ours)."""

Found = tuple[int, Comparison, Comparison | None]
"""(number of the turn, i.e. the draw of operands; the turn's comparison; a comparison that accuses the device's
comparator, or None if the comparator did not err)."""


@dataclass(frozen=True)
class OnDevice:
    """Operands and golden on the device, and the host's data about them."""

    operands: tuple[Any, ...]
    golden: Any
    """The golden; None where digests of its rows take its place."""
    problem: Problem
    """The problem that the host made, or the pools from which the device gathered operands and golden."""
    right: Callable[[], Any]
    """Function that returns the host's own golden."""


@dataclass(frozen=True)
class Computed:
    """The result of computing with one set of operands on the device, with the host's check of that result."""

    comparison: Comparison
    agreed: bool = True
    """Whether the device's own comparison found the first result equal to the golden."""
    looked: Future[Evidence | None] | None = None
    """Future of the host's comparison: evidence that the first result is wrong, or None if it is right. There is no
    future if the host does not compare."""
    gathered: Future[str] | None = None
    """Future of a text that names wrongly gathered arrays, or ""; None (no future) if the host does not check them."""
    blind: str = ""
    """Text about a difference that the device's comparison did not see, or ""."""

    def settled(self, right: Callable[[], Any]) -> tuple[Comparison, Comparison | None, str]:
        """Wait for the host's checks; return (comparison, comparison that accuses the comparator or None, text).

        The text names wrongly gathered arrays; it is "" if there are none. `right` returns the host's own golden.
        """
        comparison, erred = self.comparison, self.blind
        if self.looked is not None:
            found = self.looked.result()
            if (found is None) != self.agreed:
                words = ("differs", "equals") if self.agreed else ("equals", "differs")
                erred = f"the host finds that the result {words[0]}, the device that it {words[1]}"
            if found is not None and found.wrong and self.agreed:  # what no element shows accuses no device
                comparison = replace(comparison, wrong_trials=comparison.wrong_trials + 1, evidence=found)
        wrongly = "" if self.gathered is None else self.gathered.result()
        return comparison, comparator_error(comparison, right(), erred) if erred else None, wrongly


def measure_whole(
    session: Session, case: Case, problem: Problem, seed: int, core: int | None, seconds: float
) -> list[Found]:
    """Compute and compare for `seconds` on operands that the host made and uploads once; return the comparisons."""
    if case.repeats and seconds > 0.0 and repeats(session):
        held = Held(session.runtime, session.ctx.device, problem)
        return _Turns(session, case, held, problem, seed, core, session.ctx.clock() + seconds).found()
    runtime, device = session.runtime, session.ctx.device
    operands = runtime.upload(problem.operands, device)
    (golden,) = runtime.upload((problem.golden,), device)
    upload = OnDevice(operands, golden, problem, lambda: problem.golden)
    done = _compute(session, case, upload, seed, core, session.ctx.clock() + seconds, [], armed=case.base)
    comparison, comparator, _ = done.settled(upload.right)
    return [(0, comparison, comparator)]


def measure_fresh(
    session: Session, case: Case, pools: Problem, seed: int, core: int | None, seconds: float
) -> list[Found]:
    """Compute and compare for `seconds` on operands that the device gathers; return the comparisons.

    The trials of all right turns are added to the comparison of the first turn, or of the first in a graph. The host
    checks the gathered arrays on every alarm, and in one case of `LOOKED_AT`.
    """
    assert case.product is not None
    gatherer = Gatherer(session.runtime, session.ctx.device, case.product, pools, seed)
    return _Turns(session, case, gatherer, pools, seed, core, session.ctx.clock() + seconds).found()


class _Turns:
    """One case over many turns, whose operands the device gathers from its pools, or repeats."""

    def __init__(
        self,
        session: Session,
        case: Case,
        gatherer: Gatherer,
        pools: Problem,
        seed: int,
        core: int | None,
        until: float,
    ) -> None:
        self.session, self.case, self.gatherer, self.pools = session, case, gatherer, pools
        self.seed, self.core, self.until = seed, core, until
        # A turn that was asked for by name, because another device was wrong in it, keeps its name.
        self.asked = {name for name in session.ctx.cases if "#" in name}
        self.buffers: list[Any] = []
        self.clean: list[Found] = []
        self.wrong: list[Found] = []

    def found(self) -> list[Found]:
        """Compute turns until the time is over or `WRONG_ENOUGH` results are wrong; return all comparisons."""
        done, upload = self._compute(0)
        turns = None if done.comparison.wrong else self._prepared(upload)
        if turns is not None and (blind := turns.blind(derive(self.seed, "flipped on purpose"))):
            done, turns = replace(done, blind=blind), None
        if turns is not None:
            self._repeat(turns, done, upload)
            return self.clean + self.wrong
        self._judge(0, done, upload)
        turn = 1
        while self._goes_on() or self._is_owed:
            self._judge(turn, *self._compute(turn))
            turn += 1
        return self.clean + self.wrong

    def _prepared(self, upload: OnDevice) -> RepeatedTurns | None:
        if not (self._goes_on() or self._is_owed):
            return None
        held = sum(array.nbytes for array in (*upload.operands, upload.golden))
        return prepare(self.session, self.case, self.gatherer, held, self.buffers)

    def _goes_on(self) -> bool:
        return not self._is_wrong_enough and self.session.ctx.clock() < self.until

    @property
    def _is_owed(self) -> bool:
        """Whether a drill's only fault has not struck yet. It strikes in a graph if there is one, not before it."""
        return self.session.injector.is_owed(self.case.name)

    @property
    def _is_wrong_enough(self) -> bool:
        # What repeats one upload was compared with one golden, whose memory may be what is wrong.
        enough = WRONG_ENOUGH if self.gatherer.renews else 1
        return sum(comparison.wrong_trials for _, comparison, _ in self.wrong) >= enough

    def _at(self, turn: int, *, graph: bool = False) -> Case:
        """Return the case of a turn. One upload has one name, and one more for what a graph computed from it."""
        return self.case.at(turn if self.gatherer.renews else int(graph), graph=graph)

    def _compute(self, turn: int) -> tuple[Computed, OnDevice]:
        with on_core(self.core), self.session.on_device():
            operands, golden = self.gatherer.gather(turn)
        self.session.gathers += self.gatherer.renews
        upload = self._upload(turn, operands, golden)
        held_back = turn == 0 and self._is_owed and repeats(self.session)
        done = _compute(
            self.session, self._at(turn), upload, self.seed, self.core, self.until, self.buffers,
            most=PRODUCTS, look=turn == 0, armed="" if held_back else self.case.base,
        )  # fmt: skip
        if self.gatherer.renews and turn == 0 and derive(self.seed, "looked at") % LOOKED_AT == 0:
            done = replace(done, gathered=self.session.look(self._gathered(turn, upload)))
        return done, upload

    def _upload(self, turn: int, operands: tuple[Any, ...], golden: Any) -> OnDevice:
        right = functools.cache(partial(self.gatherer.right, turn))
        return OnDevice(operands, golden, self.pools, right)

    def _gathered(self, turn: int, upload: OnDevice) -> Callable[[], str]:
        """Copy the gathered arrays to the host; return a function that returns a text on the wrong ones, or ""."""
        arrays = (*upload.operands, upload.golden)
        held = [None if array is None else self.session.runtime.download(array) for array in arrays]
        return lambda: self.gatherer.differs(held, turn)

    def _repeat(self, turns: RepeatedTurns, first: Computed, upload: OnDevice) -> None:
        """Let the device compute turns one by one without the host, while the host checks the first turn."""
        for turn in turns.turns(self.until):
            mine = self._upload(turn.number, turn.by.operands, turn.by.golden)
            missing = sum(answer not in (EQUAL, DIFFERENT) for answer in turn.answers)
            blind = f"the device compared {missing} of {len(turn.answers)} results with nothing" if missing else ""
            self._judge(turn.number, Computed(self._counted(turn, mine), blind=blind), mine)
            if self.wrong and self.wrong[-1][0] == turn.number:
                self.wrong[-1] = self._again(turns, turn, *self.wrong[-1])
            if blind or self._is_wrong_enough:
                break
        self._judge(0, first, upload)
        self.clean.sort(key=itemgetter(0))

    def _again(
        self, turns: RepeatedTurns, turn: Turn, number: int, comparison: Comparison, comparator: Comparison | None
    ) -> Found:
        """Compute a wrong turn in the graph once more; return what was found, with the number of results of both."""
        assert comparison.evidence is not None
        answers = turns.again(turn)
        wrong = answers.count(DIFFERENT)
        found = replace(comparison.evidence, repeats=wrong + answers.count(EQUAL), repeats_wrong=wrong)
        return number, replace(comparison, evidence=found), comparator

    def _counted(self, turn: Turn, upload: OnDevice) -> Comparison:
        wrong = [result for result, answer in zip(turn.by.results, turn.answers, strict=True) if answer == DIFFERENT]
        seen = "a difference" if turn.by.golden is not None else "other digests of rows"
        found = _evidence(upload.right(), self.session.runtime.download(wrong[0]), seen) if wrong else None
        trials = len(wrong) + turn.answers.count(EQUAL)
        self.session.repeated += trials
        self.session.digested += trials * (turn.by.golden is None)
        case = self._at(turn.number, graph=True)
        return counted(self.session, case, upload.problem, self.seed, self.core, trials, len(wrong), found)

    def _judge(self, turn: int, done: Computed, upload: OnDevice) -> None:
        """Add a right turn's trials to the first comparison of its kind, in a graph or not; keep a wrong turn's own."""
        comparison, comparator, why = done.settled(upload.right)
        if comparison.wrong or why:
            why = why or self._gathered(turn, upload)()
            # A golden that was gathered wrongly explains why host and device disagree.
            self.wrong.append((turn, _with_gather(comparison, why, upload.right()), None if why else comparator))
            return
        alike = (
            n
            for n, (_, kept, _) in enumerate(self.clean)
            if is_of_graph(kept.case) == is_of_graph(comparison.case) and kept.case not in self.asked
        )
        at = next(alike, None)
        if comparator is not None or at is None or comparison.case in self.asked:
            self.clean.append((turn, comparison, comparator))
        else:
            first, summed, erred = self.clean[at]
            self.clean[at] = (first, replace(summed, trials=summed.trials + comparison.trials), erred)


def _with_gather(comparison: Comparison, why: str, golden: Any) -> Comparison:
    """Return the comparison; it is marked as wrong if `why`, a text about wrongly gathered arrays, is not ""."""
    if not why:
        return comparison
    found = comparison.evidence or evidence.collect_nothing(golden)
    found = replace(found, pattern=": ".join(filter(None, (why, found.pattern))))
    return replace(comparison, wrong_trials=max(1, comparison.wrong_trials), evidence=found)


def _compute(
    session: Session,
    case: Case,
    upload: OnDevice,
    seed: int,
    core: int | None,
    until: float,
    buffers: list[Any],
    *,
    armed: str,
    most: int = 0,
    look: bool = True,
) -> Computed:
    """Compute and compare on one set of operands until the clock reads `until`, or until `most` results exist.

    With `most` 0 only the time counts. With `look` the host compares the first result too. `buffers` keeps the memory
    of results between calls. A fault that strikes one case only strikes if `armed` is that case.
    """
    ctx, runtime, golden = session.ctx, session.runtime, upload.golden
    operands = session.injector.before(armed, upload.operands, case.struck)
    trials = wrong = 0
    found: Evidence | None = None
    first: tuple[bool, Future[Evidence | None] | None, str, str] = (True, None, "", "")
    burst = runtime.burst(golden, burst_bytes(ctx.room))
    together = burst > 1 and most > 0  # what is no turn may be of an operation that chooses the memory of its results
    with on_core(core):
        while True:
            ctx.pace()
            with session.on_device():
                if not buffers:
                    results = [first_result(ctx.device, case.compute, operands)]
                    buffers[:] = runtime.room(results[0], burst) if together else [*results, *[None] * (burst - 1)]
                else:
                    results = [case.compute(operands, buffer) for buffer in buffers]
                    buffers[:] = [new if kept is None else kept for kept, new in zip(buffers, results, strict=True)]
                results = [session.injector.after(armed, result) for result in results]
                agreed = runtime.agree(results, golden)
            if trials == 0 and look:
                first = _look(session, case, upload, core, results[0], seed, agreed=agreed[0])
            trials += len(results)
            for result, same in zip(results, agreed, strict=True):
                if not same:
                    wrong += 1
                    found = found or _evidence(upload.right(), runtime.download(result))
            runtime.spoil(results)
            if wrong >= WRONG_ENOUGH or (trials > 1 and ctx.clock() >= until) or 0 < most <= trials:
                break
    said, looked, blind, made = first
    comparison = replace(counted(session, case, upload.problem, seed, core, trials, wrong, found), digest=made)
    return Computed(comparison, said, looked, blind=blind)


def _look(
    session: Session, case: Case, upload: OnDevice, core: int | None, result: Any, seed: int, *, agreed: bool
) -> tuple[bool, Future[Evidence | None], str, str]:
    """Let the host compare a result, and test the device's comparison with a flipped bit; return four values.

    They are: `agreed`; a future of the host's evidence, or of None if the result is right; a text if the device did not
    see the flipped bit, else ""; the digest of a fixed case, else "".
    """
    runtime = session.runtime
    held = runtime.download(result)

    def look() -> Evidence | None:
        right = upload.right()
        return None if _host_agrees(session, case, core, held, right) else _evidence(right, held)

    looked = session.look(look)
    made = digest(held) if case.fixed else ""
    blind = ""
    if agreed:
        # A comparator that never sees a difference would hide all that errs after the first result.
        flipped = runtime.changed(result, faults.flip, derive(seed, "flipped on purpose"))
        if runtime.agree([flipped], upload.golden)[0]:
            blind = "one bit of a right result was flipped on purpose, and the device finds it equal"
    return agreed, looked, blind, made


def counted(
    session: Session,
    case: Case,
    problem: Problem,
    seed: int,
    core: int | None,
    trials: int,
    wrong: int,
    found: Evidence | None,
) -> Comparison:
    """Return the comparison of `trials` results, and add them to the session's totals."""
    session.trials += trials
    session.operations += trials * problem.operations
    return Comparison(
        case=case.name,
        shape=problem.shape,
        seed=seed,
        exactness=problem.exactness,
        place=session.place_of(core),
        trials=trials,
        wrong_trials=wrong,
        evidence=found,
        characterised=case.characterised,
    )


def _host_agrees(session: Session, case: Case, core: int | None, result: Any, golden: Any) -> bool:
    """Return whether a result equals the golden, compared on the host by another method and on another core."""
    by_bytes = session.pins and (core is not None or is_alone(golden))
    compare = same_bits if by_bytes else host_same_bits
    with on_core(None if core is None else session.makers(case.name, core)[0]):
        return compare(result, golden)


def comparator_error(comparison: Comparison, golden: Any, text: str) -> Comparison:
    """Return a comparison that accuses the device's comparator; `text` says how host and device disagree."""
    doubt = evidence.collect_nothing(golden, text)
    erred = replace(comparison, subject=Subject.COMPARATOR, doubt=Doubt.COMPARATOR, evidence=doubt, digest="")
    return replace(erred, trials=1, wrong_trials=1)


def _evidence(golden: Any, observed: Any, seen: str = "a difference") -> Evidence:
    """Return what is wrong with a result; `seen`: what the device saw, if the host's copy of the result is right."""
    if host_same_bits(observed, golden):
        return evidence.collect_nothing(golden, f"the device saw {seen}, and the host's copy of the result is right")
    return evidence.collect(golden, observed)
