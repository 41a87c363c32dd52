"""The cause of an endpoint's wrong answers, from the results of the devices on which its server runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from canaryd.judge.cause import Decided, Mismatch, names, operands_of
from canaryd.judge.node import is_inconstant
from canaryd.model import Cause, Outcome, Rival, Run


class Behind(NamedTuple):
    """A device on which an endpoint's server runs, with its results."""

    name: str
    runs: Sequence[Run]
    doubted: bool
    """Whether the device's own verdict has findings against it."""


class _Served(NamedTuple):
    """The names of the devices that serve an endpoint, by what they did since its first wrong answer."""

    wrong: str
    """Those with findings against them."""
    right: str
    """Those that passed the deep test that a wrong answer causes."""
    untested: str


def decide(behind: Iterable[Behind], runs: Iterable[Run], mismatches: Sequence[Mismatch]) -> Decided:
    """Return the cause of an endpoint's wrong answers; `runs` are the endpoint's own runs."""
    served = _served(behind, mismatches[0].run.started)
    cause, why = Cause.UNDETERMINED, "Cause unknown: no device of this host serves it."
    if served.wrong:
        why = f"Cause unknown: {served.wrong}, which serves it, has findings too."
    elif is_inconstant(mismatches):
        why = "Cause unknown: its wrong answers to one question differ. It may be a bug of the engine or a rare fault."
    elif served.untested:
        why = f"Cause unknown: not tested since the wrong answer: {served.untested}."
    elif served.right:
        cause, why = Cause.SOFTWARE, f"The devices that serve it have passed the exact tests since: {served.right}."
    asked = {m.operands for m in mismatches}
    matched = any(c.trials > c.wrong_trials for r in runs for c in r.comparisons if operands_of(c) in asked)
    return Decided(cause, why, tuple(_rivals(served, cause, matched)))


def _served(behind: Iterable[Behind], since: float) -> _Served:
    found: dict[str, list[str]] = {part: [] for part in _Served._fields}
    for device in behind:
        after = [r for r in device.runs if r.started >= since]
        deep = any(r.intensity == "content" and r.outcome is Outcome.COMPLETED and r.trials for r in after)
        wrong = device.doubted or any(r.wrong for r in after)
        found["wrong" if wrong else "right" if deep else "untested"].append(device.name)
    return _Served(*map(names, found.values()))


def _rivals(served: _Served, cause: Cause, matched: bool) -> Iterator[Rival]:
    if cause is not Cause.SOFTWARE:
        why = "the engine, its settings, or the copy of the model in its memory"
        yield Rival(cause=Cause.SOFTWARE, why=why, rejected=False)
    words = (
        "with findings of its own",
        "right in the exact tests since (memory that they did not use is not excluded)",
        "not tested since",
    )
    each = ", ".join(f"{who} {text}" for who, text in zip(served, words, strict=True) if who)
    yield Rival(cause=Cause.HARDWARE, why=f"what serves it: {each or 'no device of this host'}", rejected=False)
    answered = "the same questions were answered right" if matched else "no answer has matched it yet"
    yield Rival(cause=Cause.HARNESS, why=f"a wrong reference: {answered}", rejected=matched)
