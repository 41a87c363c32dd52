"""Verify exact goldens: build twice, upload, compute, compare on the device and on the host, collect evidence.

A probe gives its cases and how to compute them; `verify_all` does the rest and yields comparisons.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from canaryd.facts import FINGERPRINT, TRIALS, Comparison, Doubt, Evidence, Exactness, Reading, Skipped, Subject
from canaryd.probe import Absent, Context, Fact, Skip
from canaryd.worker.numeric import evidence, faults
from canaryd.worker.numeric.cases import Case, Refused, first_result, none_supported, restrict, selects
from canaryd.worker.numeric.gathering import PRODUCTS, Gatherer, differs
from canaryd.worker.numeric.integers import combine, digest
from canaryd.worker.numeric.making import begin, finish, gathers, make, make_twice, settle, settled
from canaryd.worker.numeric.operands import Problem, gather, gather_golden
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import (
    as_text,
    can_pin,
    host_same_bits,
    is_alone,
    need_torch,
    on_core,
    same_bits,
)
from canaryd.worker.runtime.faulty import GATHERS

FIXED_SEED = 20_260_101
"""Seed of the fixed cases, whose golden digests ship with the package and whose results make the fingerprint."""
FRESH_UPLOADS = 3
"""Fresh uploads tried at once after a mismatch, in the same process."""
ELSEWHERE = 5.0
"""Seconds for which a run computes the operands of its first wrong result on the other cores of a processor (ours)."""
WRONG_ENOUGH = 3
"""Wrong results after which an upload is not repeated further."""
LOOKED_AT = 8
"""In one of so many cases the host looks at what the device gathered though nothing is wrong (our choice)."""


def verify_all(
    ctx: Context, fresh: Sequence[Case], fixed: Sequence[Case], shipped: Path | None, refused: Sequence[str] = ()
) -> Iterator[Fact]:
    """Verify the fixed cases once each and the fresh cases for the rest of the budget; yield every fact of the run.

    `shipped` is the file of golden digests made elsewhere; `refused` says why cases were left out. Raises `Skip` when
    there is nothing to do.
    """
    need_torch()  # the host makes the goldens with it, whatever computes
    session = Session(ctx)
    if not (fixed or fresh):
        raise Skip(none_supported(ctx.device, "case of this probe", *refused))
    kept = restrict(ctx, [*fixed, *fresh])
    fixed, fresh = [c for c in kept if c.fixed], [c for c in kept if not c.fixed]
    for want in ctx.cases:
        if not any(selects(want, case.name) for case in (*fixed, *fresh)):
            yield Skipped(case=want, reason="no case here has this name")
    start = ctx.seed % max(1, len(fresh))  # where a budget ends early, another run starts with other cases
    fresh = [*fresh[start:], *fresh[:start]]
    digests = json.loads(shipped.read_text()) if shipped and shipped.exists() else {}
    if shipped and not digests:
        yield Absent(name="shipped_digests", reason=f"{shipped} is missing or empty: this installation is damaged")
    session.injector.arm([c.name for c in fresh or fixed])
    fresh.sort(key=lambda case: case.name != session.injector.target)  # a drill's case goes first
    with session.runtime.strict(ctx.device) as switches, settled(session):
        yield Reading(name="switches", value=as_text(switches))
        late, order = 0, [*fixed, *fresh]
        for number, case in enumerate(order):
            remaining = len(order) - number
            ctx.progress(number / len(order), case.name)
            # A loaded machine still gets fresh operands, the target: only the fixed ones forever would prove little.
            needed = case.fixed or case.name == session.injector.target or (ctx.cases and "*" not in ctx.cases)
            if ctx.left <= 0.0 and not needed:
                late += 1
                yield Skipped(case=case.name, reason=f"the budget of {ctx.budget:g} s was spent before its turn")
                continue
            # A fixed case is brief, unless a retest is about it.
            brief = case.fixed and not (ctx.intensity and ctx.cases)
            seconds = 0.0 if brief else ctx.left / remaining
            before = session.trials
            following = next(iter(order[number + 1 :]), None) if ctx.left > seconds else None
            wanted = None if following is None else (following, digests.get(following.name, ""))
            try:
                yield from verify_case(session, case, seconds, digests.get(case.name, ""), wanted)
            except Refused as why:
                if session.trials > before:
                    raise  # the device has computed this case already
                session.refused[case.name] = str(why)
                if case.name == session.injector.target:
                    session.injector.arm([c.name for c in order[number + 1 :][:1]])
                yield Skipped(case=case.name, reason=str(why))
    yield from finish(session)
    if ctx.drill and not session.struck:
        raise Skip(f"the fault {ctx.drill!r} was not injected: nothing that it strikes was done")
    if session.refused and len(session.refused) + late == len(order):
        raise Skip(none_supported(ctx.device, "case that was asked for", *session.refused.values()))
    yield Reading(name=TRIALS, value=session.trials, unit="1")
    yield Reading(name="gathers", value=session.gathers, unit="1")
    yield Reading(name="elements_compared", value=session.elements, unit="1")
    yield Reading(name="operations", value=session.operations, unit="1")
    yield from session.times()
    yield Reading(name="goldens_made_on_two_cores", value=session.made_twice, unit="1")
    yield Reading(name="places", value=", ".join(sorted(map(str, session.places))))
    met = [case for case in fixed if case.name not in session.refused]
    if met and not ctx.cases and len(session.digests) == len(met):
        yield Reading(name=FINGERPRINT, value=combine(session.digests), unit="1")


def case_seed(ctx: Context, case: Case) -> int:
    """Return the seed of a case's operands: fixed, or derived from the run's seed and the case's stem, or its name."""
    return FIXED_SEED if case.fixed else derive(ctx.seed, case.stem or case.name.partition("@")[0])


def verify_case(
    session: Session, case: Case, seconds: float, shipped: str = "", following: tuple[Case, str] | None = None
) -> Iterator[Fact]:
    """Verify one case for `seconds` (once at least), on fresh operands where the device can gather; yield its facts.

    `shipped` is its digest, if one ships; `following` the next case with its own.
    """
    ctx = session.ctx
    core = session.place(case.name)
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
    measure = _measure_fresh if fresh else _measure_whole
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
    """Make, upload and compute the same operands again; yield what was wrong, return the comparison with the counts."""
    again = []
    settle(session)
    for _ in range(FRESH_UPLOADS):
        problem, doubts = make_twice(session, case, seed, core, shipped)
        yield from doubts
        if doubts:
            break
        again += [found for _, found, _ in _measure_whole(session, case, problem, seed, core, 0.0)]
    else:
        yield from _elsewhere(session, case, problem, seed, core)
    yield from (c for c in again if c.wrong)
    return _with_reproduction(comparison, again)


def _elsewhere(session: Session, case: Case, problem: Problem, seed: int, core: int | None) -> Iterator[Comparison]:
    """Compute the same operands on every other core alone, once in a run; yield what is right too: it names the core.

    Of more cores than fit into `ELSEWHERE` another run begins with others.
    """
    others = [c for c in session.cores if c != core]
    if session.told_apart or not (session.pins and can_pin() and others):
        return
    session.told_apart = True
    start, until = session.ctx.seed % len(others), session.ctx.clock() + ELSEWHERE
    for other in (*others[start:], *others[:start]):
        yield from (found for _, found, _ in _measure_whole(session, case, problem, seed, other, 0.0))
        if session.ctx.clock() >= until:
            return


def _with_reproduction(comparison: Comparison, again: list[Comparison]) -> Comparison:
    assert comparison.evidence is not None
    wrong = [c.evidence for c in again if c.evidence is not None]
    same = sum(1 for e in wrong if e.first == comparison.evidence.first)
    found = replace(comparison.evidence, repeats=len(again), repeats_wrong=len(wrong), repeats_alike=same)
    return replace(comparison, evidence=found)


Found = tuple[int, Comparison, Comparison | None]
"""Turn, its comparison, and one more if the comparator erred."""


@dataclass(frozen=True)
class OnDevice:
    """Operands and golden on the device, and what the host knows of them."""

    operands: tuple[Any, ...]
    golden: Any
    problem: Problem
    """The problem, or the pools that it was gathered from."""
    right: Callable[[], Any]
    """Gives the host's own golden."""
    elements: int
    """Of one result."""


def _measure_whole(
    session: Session, case: Case, problem: Problem, seed: int, core: int | None, seconds: float
) -> list[Found]:
    """Compute and compare for `seconds` over one upload of what the host made."""
    runtime, device = session.runtime, session.ctx.device
    operands = runtime.upload(problem.operands, device)
    (golden,) = runtime.upload((problem.golden,), device)
    upload = OnDevice(operands, golden, problem, lambda: problem.golden, problem.golden.numel())
    return [(0, *_compute(session, case, upload, seed, core, session.ctx.clock() + seconds, []))]


def _measure_fresh(
    session: Session, case: Case, pools: Problem, seed: int, core: int | None, seconds: float
) -> list[Found]:
    """Compute and compare for `seconds` over turns that the device gathers; clean turns are summed up under the first.

    The host compares the first turn's result with its own golden, and what was gathered on every alarm and in one case
    of `LOOKED_AT`.
    """
    ctx, runtime = session.ctx, session.runtime
    assert case.product is not None
    product = case.product
    looked_at = derive(seed, "looked at") % LOOKED_AT == 0
    gatherer = Gatherer(runtime, ctx.device, product, pools, seed)
    until = ctx.clock() + seconds
    clean: list[Found] = []
    wrong: list[Found] = []
    buffers: list[Any] = []
    turn = 0
    least = 2 if ctx.drill in GATHERS else 1  # a row is stale from the second turn on
    while turn < least or (sum(c.wrong_trials for _, c, _ in wrong) < WRONG_ENOUGH and ctx.clock() < until):
        with on_core(core), session.on_device():
            operands, golden = gatherer.gather(turn)
        session.gathers += 1
        whole = functools.cache(partial(gather, product, pools, seed, turn))  # made when somebody asks
        right = functools.cache(partial(gather_golden, product, pools, seed, turn))
        upload = OnDevice(operands, golden, pools, right, product.elements)
        why = differs(runtime, operands, golden, whole()) if turn == 0 and looked_at else ""
        comparison, comparator = _compute(
            session, case.at(turn), upload, seed, core, until, buffers, most=PRODUCTS, look=turn == 0
        )
        if comparison.wrong or why:
            why = why or differs(runtime, operands, golden, whole())
            # A golden that was gathered wrongly explains why host and device disagree.
            wrong.append((turn, _told(comparison, why, right()), None if why else comparator))
        elif comparator is not None or not clean:
            clean.append((turn, comparison, comparator))
        else:
            first, summed, erred = clean[0]
            clean[0] = (first, replace(summed, trials=summed.trials + comparison.trials), erred)
        turn += 1
    return clean + wrong


def _told(comparison: Comparison, why: str, golden: Any) -> Comparison:
    """Return a wrong comparison with what the device gathered wrongly, if it did; right results do not excuse that."""
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
    most: int = 0,
    look: bool = True,
) -> tuple[Comparison, Comparison | None]:
    """Compute and compare over one upload until a time, or at `most` so many results (0: no such limit).

    `look`: the host compares the first result too. `buffers` keeps the memory of results between calls.
    """
    ctx, runtime = session.ctx, session.runtime
    problem, golden, right = upload.problem, upload.golden, upload.right
    armed = case.name.partition("#")[0]  # a drill names cases, not turns
    operands = session.injector.before(armed, upload.operands, case.struck)
    place = session.place_of(core)
    session.places.add(place)
    trials = wrong = 0
    found = None
    observed_digest = ""
    comparator_erred = ""
    burst = runtime.burst(golden)
    with on_core(core):
        while True:
            ctx.pace()
            with session.on_device():
                if not buffers:
                    buffers[:] = results = [first_result(ctx.device, case.compute, operands)]
                    buffers += [None] * (burst - 1)
                else:
                    results = [case.compute(operands, buffer) for buffer in buffers]
                results = [session.injector.after(armed, result) for result in results]
                buffers[: len(results)] = results
                agreed = runtime.agree(results, golden)
            if trials == 0 and look:
                # The comparator can be the broken part: the host compares the first result of every upload itself.
                host_says = _host_agrees(session, case, core, results[0], right())
                if host_says != agreed[0]:
                    words = ("differs", "equals") if agreed[0] else ("equals", "differs")
                    comparator_erred = f"the host finds that the result {words[0]}, the device that it {words[1]}"
                    agreed[0] = agreed[0] and host_says
                if case.fixed:
                    observed_digest = digest(runtime.download(results[0]))
            trials += len(results)
            for result, same in zip(results, agreed, strict=True):
                if not same:
                    wrong += 1
                    found = found or _evidence(right(), runtime.download(result))
            if trials == len(results) and look and agreed[0] and not comparator_erred:
                # A comparator that never sees a difference would hide all that errs after the first result.
                flipped = runtime.changed(results[0], faults.flip, derive(seed, "flipped on purpose"))
                if runtime.agree([flipped], golden)[0]:
                    comparator_erred = "one bit of a right result was flipped on purpose, and the device finds it equal"
            runtime.spoil(results)
            if wrong >= WRONG_ENOUGH or (trials > 1 and ctx.clock() >= until) or 0 < most <= trials:
                break
    session.trials += trials
    session.elements += trials * upload.elements
    session.operations += trials * problem.operations
    comparison = Comparison(
        case=case.name,
        shape=problem.shape,
        seed=seed,
        exactness=problem.exactness,
        place=place,
        trials=trials,
        wrong_trials=wrong,
        evidence=found,
        digest=observed_digest,
        characterised=case.characterised,
    )
    return comparison, _comparator_error(comparison, right(), comparator_erred) if comparator_erred else None


def _host_agrees(session: Session, case: Case, core: int | None, result: Any, golden: Any) -> bool:
    """Compare a result on the host: on another core than the one that computed it, and in another way."""
    by_bytes = session.pins and (core is not None or is_alone(golden))
    compare = same_bits if by_bytes else host_same_bits
    with on_core(None if core is None else session.makers(case.name, core)[0]):
        return compare(session.runtime.download(result), golden)


def _comparator_error(comparison: Comparison, golden: Any, text: str) -> Comparison:
    """Return the comparison that accuses the comparator; `text` says how host and device disagree."""
    doubt = evidence.collect_nothing(golden, text)
    erred = replace(comparison, subject=Subject.COMPARATOR, doubt=Doubt.COMPARATOR, evidence=doubt, digest="")
    return replace(erred, trials=1, wrong_trials=1)


def _evidence(golden: Any, observed: Any) -> Evidence:
    if host_same_bits(observed, golden):
        return evidence.collect_nothing(golden, "the device saw a difference that the host's copy does not show")
    return evidence.collect(golden, observed)
