"""Verify exact cases: build the golden (right result) twice, upload, compute, compare on device and host.

A probe gives its cases and their functions; `verify_all` does the rest and yields comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from canaryd.facts import FINGERPRINT, Comparison, Exactness, Reading, Skipped, is_of_graph
from canaryd.probe import Absent, Context, Fact, Skip
from canaryd.worker.numeric.cases import Case, Refused, none_supported, restrict, selects
from canaryd.worker.numeric.integers import combine
from canaryd.worker.numeric.making import begin, finish, gathers, make, make_twice, settle, settled
from canaryd.worker.numeric.measure import Found, measure_fresh, measure_whole
from canaryd.worker.numeric.operands import Problem
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import (
    as_text,
    can_pin,
    need_torch,
)

FIXED_SEED = 20_260_101
"""Seed of the fixed cases. canaryd ships the digests of their goldens; their results make the fingerprint."""
FRESH_UPLOADS = 3
"""Number of new uploads of the same operands right after a mismatch, in the same process."""
ELSEWHERE = 5.0
"""Seconds that a run spends on computing its first wrong result again on a processor's other cores (ours)."""


def verify_all(
    ctx: Context, fresh: Sequence[Case], fixed: Sequence[Case], shipped: Path | None, refused: Sequence[str] = ()
) -> Iterator[Fact]:
    """Verify each fixed case once and the fresh cases until the time is over; yield every fact of the run.

    `shipped` is the file with digests of goldens that were made on other machines; `refused` has the reasons why the
    device lacks cases that `ctx.cases` selects. Raises `Skip` if there is nothing to do, and `NoCase` if `ctx.cases`
    selects no case and none is refused.
    """
    need_torch()  # the host makes the goldens with it, whatever computes
    session = Session(ctx)
    kept = restrict(ctx, [*fixed, *fresh], refused)
    fixed, fresh = [c for c in kept if c.fixed], [c for c in kept if not c.fixed]
    for want in ctx.cases:
        if not any(selects(want, c.name) or want.partition("#")[0] == c.base for c in (*fixed, *fresh)):
            yield Skipped(case=want, reason="no case that this device supports has this name")
    start = ctx.seed % max(1, len(fresh))  # where a budget ends early, another run starts with other cases
    fresh = [*fresh[start:], *fresh[:start]]
    digests = json.loads(shipped.read_text()) if shipped and shipped.exists() else {}
    if shipped and not digests:
        yield Absent(name="shipped_digests", reason=f"{shipped} is missing or empty: this installation is damaged")
    session.injector.arm([c.base for c in fresh if c.measure is None] or [c.base for c in fresh or fixed])
    # The injected fault goes first; what has its time kept free goes last, because some of it has crashed kernels.
    fresh.sort(key=lambda case: (case.base != session.injector.target, case.seconds > 0.0))
    with session.runtime.strict(ctx.device) as switches, settled(session):
        yield Reading(name="switches", value=as_text(switches))
        late, order = 0, [*fixed, *fresh]
        for number, case in enumerate(order):
            remaining, following = len(order) - number, order[number + 1 :]
            left = max(0.0, ctx.left - sum(each.seconds for each in following))
            ctx.progress(number / len(order), case.name)
            # A loaded machine still gets fresh operands, the target: only the fixed ones forever would prove little.
            needed = case.fixed or case.base == session.injector.target or (ctx.cases and "*" not in ctx.cases)
            if left <= 0.0 and not needed:
                late += 1
                yield ctx.late(case.name)
                continue
            # A fixed case is brief, unless a retest is about it.
            brief = case.fixed and not (ctx.intensity and ctx.cases)
            seconds = 0.0 if brief else left / remaining
            before = session.trials
            wanted = (following[0], digests.get(following[0].name, "")) if following and ctx.left > seconds else None
            try:
                yield from verify_case(session, case, seconds, digests.get(case.name, ""), wanted)
            except Refused as why:
                if session.trials > before:
                    raise  # the device has computed this case already
                session.refused[case.name] = str(why)
                if case.base == session.injector.target:
                    session.injector.arm([c.base for c in following[:1]])
                yield Skipped(case=case.name, reason=str(why))
    yield from finish(session)
    if ctx.drill and not session.injector.spent:
        raise Skip(f"the fault {ctx.drill!r} was not injected: nothing that it strikes was done")
    if session.refused and len(session.refused) + late == len(order):
        raise Skip(none_supported(ctx.device, "case that was asked for", *session.refused.values()))
    yield from session.totals()
    ran = [case for case in fixed if case.name not in session.refused]
    if ran and not ctx.cases and len(session.digests) == len(ran):
        yield Reading(name=FINGERPRINT, value=combine(session.digests), unit="1")


def case_seed(ctx: Context, case: Case) -> int:
    """Return the seed of a case's operands: fixed, or derived from the run's seed and the case's stem or name."""
    return FIXED_SEED if case.fixed else derive(ctx.seed, case.stem or case.name.partition("@")[0])


def _place(session: Session, case: Case) -> int | None:
    """Return the core that runs a case, or None for all; a case with a way of its own would be too long for one."""
    return None if case.measure else session.place(case.name)


def _way(case: Case) -> Callable[..., list[Found]]:
    """Return the function that measures a case whose operands the host makes."""
    return case.measure or measure_whole


def verify_case(
    session: Session, case: Case, seconds: float, shipped: str = "", following: tuple[Case, str] | None = None
) -> Iterator[Fact]:
    """Verify one case for `seconds`, at least once; yield its facts. If the device gathers, each turn has new operands.

    `shipped` is the digest of the golden, or "". `following` is the next case with its digest; it is made meanwhile.
    """
    ctx = session.ctx
    core = _place(session, case)
    seed = case_seed(ctx, case)
    started = ctx.clock()
    fresh = gathers(session, case)
    problem, doubts = make(session, case, seed, core, shipped)
    if following is not None:
        other, digest_of = following
        begin(session, other, case_seed(ctx, other), session.place(other.name), digest_of)
    if problem.exactness is Exactness.ROUNDED and not session.runtime.rounds:
        raise Refused(f"{session.runtime.name} guarantees no rounding mode: this result would be rounded")
    yield from doubts
    if doubts:
        return  # a doubtful golden accuses only the core that made it
    measure = measure_fresh if fresh else _way(case)
    found = measure(session, case, problem, seed, core, seconds - (ctx.clock() - started))
    repeated = False
    for turn, first, comparator in found:
        comparison = first
        if comparison.digest:  # of the first upload only: a wrong result must change the fingerprint, not remove it
            session.digests.append((case.name, comparison.digest))
        if comparison.wrong and not repeated:
            repeated = True
            comparison = yield from _repeat(session, case.at(turn) if fresh else case, comparison, seed, core, shipped)
        yield comparison
        if comparator is not None:
            yield comparator


def _repeat(
    session: Session, case: Case, comparison: Comparison, seed: int, core: int | None, shipped: str
) -> Generator[Fact, None, Comparison]:
    """Make, upload and compute the same operands again; yield wrong results, return `comparison` with their number."""
    again = []
    settle(session)
    for _ in range(FRESH_UPLOADS):
        problem, doubts = make_twice(session, case, seed, core, shipped)
        yield from doubts
        if doubts:
            break
        try:
            again += [found for _, found, _ in _way(case)(session, case, problem, seed, core, 0.0)]
        except Refused:  # memory ran out meanwhile; what was wrong stays wrong
            break
    else:
        yield from _elsewhere(session, case, problem, seed, core)
    yield from (c for c in again if c.wrong)
    return _with_reproduction(comparison, again)


def _elsewhere(session: Session, case: Case, problem: Problem, seed: int, core: int | None) -> Iterator[Comparison]:
    """Compute the operands of a wrong result on each other core alone; yield one comparison per core, once in a run.

    Right results on other cores accuse the first core. If `ELSEWHERE` is too short for all cores, the next run starts
    with other cores.
    """
    others = [c for c in session.cores if c != core]
    if session.cores_compared or case.measure or not (session.pins and can_pin() and others):
        return
    session.cores_compared = True
    start, until = session.ctx.seed % len(others), session.ctx.clock() + ELSEWHERE
    for other in (*others[start:], *others[:start]):
        yield from (found for _, found, _ in measure_whole(session, case, problem, seed, other, 0.0))
        if session.ctx.clock() >= until:
            return


def _with_reproduction(comparison: Comparison, again: list[Comparison]) -> Comparison:
    assert comparison.evidence is not None
    wrong = [c.evidence for c in again if c.evidence is not None]
    if is_of_graph(comparison.case):  # it was repeated in the graph at once
        text = f"wrong in {len(wrong)} of {len(again)} repeats without a graph"
        pattern = ": ".join(filter(None, (comparison.evidence.pattern, text)))
        return replace(comparison, evidence=replace(comparison.evidence, pattern=pattern))
    same = sum(1 for e in wrong if e.first == comparison.evidence.first)
    found = replace(comparison.evidence, repeats=len(again), repeats_wrong=len(wrong), repeats_alike=same)
    return replace(comparison, evidence=found)
