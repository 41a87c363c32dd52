"""Make the operands and the golden (right result) of a case twice on the host, or the pools that they are drawn from.

While an accelerator computes, the host makes the next case's data, so that the device does not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

from canaryd.facts import Comparison, Doubt, Place, Subject
from canaryd.model import TORCH
from canaryd.worker.numeric import evidence
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.gathering import laid_out
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Problem, make_pools
from canaryd.worker.numeric.session import Session, thread
from canaryd.worker.numeric.tensors import can_pin, host_same_bits, on_two_cores
from canaryd.worker.runtime import interface

Made = tuple[Problem, list[Comparison]]
"""(problem of a case, or its pools; failed comparisons of the host's own work, [] if the host is healthy)."""


def gathers(session: Session, case: Case) -> bool:
    """Return whether the device itself gathers the operands of this case from uploaded pools."""
    return case.product is not None and session.runtime.gathers


def make(session: Session, case: Case, seed: int, core: int | None, shipped: str) -> Made:
    """Return the data of a case; if `begin` has started to make this data, wait for it and return that.

    The data are the problem, or its pools if the device gathers. Errors of making are raised here. `core` is the core
    that will compute, or None; `shipped` is the digest of the golden that canaryd ships, or "".
    """
    if session.begun is not None and session.begun[0] == (case.name, seed):
        future, session.begun = session.begun[1], None
        return future.result()
    settle(session)
    return _make(session, case, seed, core, shipped)


def begin(session: Session, case: Case, seed: int, core: int | None, shipped: str) -> None:
    """Start making the next case in another thread; do nothing on a processor, because there the host is the device."""
    if session.ctx.device.unit == "cpu":
        return
    session.begun = (case.name, seed), thread("make").submit(_make, session, case, seed, core, shipped)


def settle(session: Session) -> None:
    """Wait until no other thread makes a case, so that an alarm names the core that really made the golden."""
    if session.begun is not None:
        wait([session.begun[1]])


@contextlib.contextmanager
def settled(session: Session) -> Iterator[None]:
    """Run the block, then wait for work in other threads, also after an error: the next run makes new goldens."""
    try:
        yield
    finally:
        settle(session)
        if session.looking is not None:
            wait([session.looking])


def finish(session: Session) -> list[Comparison]:
    """Wait for a case that was begun but will not run any more; return the comparisons that failed while it was made.

    A host that computed two different goldens is reported even for a case that does not run. Errors of making are
    ignored, because the case was left out for lack of time.
    """
    begun, session.begun = session.begun, None
    if begun is None:
        return []
    try:
        return begun[1].result()[1]
    except Exception:  # noqa: BLE001  whatever a case raises; it is raised when the case is run
        return []


def _make(session: Session, case: Case, seed: int, core: int | None, shipped: str) -> Made:
    if gathers(session, case):
        return _make_pools(session, case, seed, core)
    return make_twice(session, case, seed, core, shipped)


def _make_pools(session: Session, case: Case, seed: int, core: int | None) -> Made:
    """Make the pools of a case twice on the host, or reuse the last pools if product and seed are the same."""
    assert case.product is not None
    wanted = (case.product.of_pools, seed)
    doubts: list[Comparison] = []
    if session.pools is None or session.pools[0] != wanted:
        pools, doubts = make_twice(
            session, replace(case, build=partial(make_pools, case.product.of_pools)), seed, core, ""
        )
        session.pools = None if doubts else (wanted, pools)
    else:
        pools = session.pools[1]
    operations = 2 * case.product.elements * case.product.K
    ready = laid_out(case.product, pools)  # here, because another thread computes meanwhile
    return replace(ready, shape=case.product.shape, operations=operations), doubts


def make_twice(session: Session, case: Case, seed: int, core: int | None, shipped: str) -> Made:
    """Build a problem on two cores; return it with a failed comparison for each sign that it or the host is wrong."""
    first, second = session.makers(case.name, core)
    problem, twin = on_two_cores(first, second, partial(case.build, seed))
    doubts = []

    def doubt(kind: Doubt, place: Place, text: str, other: Any = None, made: str = "") -> None:
        if other is not None and other.shape == problem.golden.shape and not host_same_bits(other, problem.golden):
            found = evidence.collect(problem.golden, other)
        else:
            found = evidence.collect_nothing(problem.golden)
        doubts.append(
            Comparison(
                case=case.name,
                shape=problem.shape,
                seed=seed,
                exactness=problem.exactness,
                subject=Subject.HOST,
                place=place,
                doubt=kind,
                digest=made,
                wrong_trials=1,
                evidence=replace(found, pattern=f"{text}: {found.pattern}" if found.pattern else text),
            )
        )

    session.made_twice += can_pin() and first != second
    pairs = [*zip(problem.operands, twin.operands, strict=True), (problem.golden, twin.golden)]
    if all(host_same_bits(a, b) for a, b in pairs):
        interface.named(TORCH).spoil([twin.golden])  # a result must not find the right answer in freed memory
    else:
        text = "this host computed operands and golden twice and got two results"
        doubt(Doubt.MADE_TWICE, session.place_of_makers(first, second), text, twin.golden)
    maker, other = (Place(unit="core", numbers=(n,)) if can_pin() else Place(unit="thread") for n in (first, second))
    if not (problem.witnessed and twin.witnessed):
        place = other if problem.witnessed else maker
        doubt(Doubt.ARITHMETIC, place, "integer and float64 arithmetic of this host disagree on the golden")
    if shipped and case.fixed and (made := digest(problem.golden)) != shipped:
        text = f"the golden has digest {made}; the one shipped with canaryd has {shipped}"
        doubt(Doubt.DIGEST, maker, text, made=made)
    return problem, doubts
