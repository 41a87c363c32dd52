"""The cause of an endpoint's wrong answers, from the results of the devices on which its server runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from canaryd.judge.cause import Mismatch, Scene, Served, operands_of
from canaryd.judge.node import is_inconstant
from canaryd.model import Outcome, Run


class Behind(NamedTuple):
    """A device on which an endpoint's server runs, with its results."""

    name: str
    runs: Sequence[Run]
    doubted: bool
    """Whether the device's own verdict has findings against it."""


def scene(behind: Iterable[Behind], runs: Iterable[Run], mismatches: Sequence[Mismatch]) -> Scene:
    """Return the facts around an endpoint's wrong answers; `runs` are the endpoint's own runs.

    A device counts as right if it has passed the deep test that a wrong answer causes.
    """
    since = mismatches[0].run.started
    wrong, right, untested = set(), set(), set()
    for device in behind:
        after = [r for r in device.runs if r.started >= since]
        if device.doubted or any(r.wrong for r in after):
            wrong.add(device.name)
        elif any(r.intensity == "content" and r.outcome is Outcome.COMPLETED and r.trials for r in after):
            right.add(device.name)
        else:
            untested.add(device.name)
    asked = {m.operands for m in mismatches}
    answers = [c for r in runs for c in r.comparisons if operands_of(c) in asked]
    return Scene(
        served=Served(
            wrong=frozenset(wrong),
            right=frozenset(right),
            untested=frozenset(untested),
            inconstant=is_inconstant(mismatches),
        ),
        goldens_right=any(c.trials > c.wrong_trials for c in answers),
    )
