"""Make a finding from runs or mismatches."""

from __future__ import annotations

from collections.abc import Sequence

from canaryd.judge.cause import Hit
from canaryd.model import Cause, Finding, Run, State

RUNS_NAMED = 16
"""Newest run ids listed in one finding; a broken device would fill the store with them."""
CAUSES = (Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS, Cause.NONE)
"""Which cause names the verdict when findings of the same state differ: the one that costs most to overlook first."""


def make_finding(rule: str, state: State, cause: Cause, message: str, evidence: Sequence[Hit] | Run) -> Finding:
    """Make a finding that rests on one run, or on hits (oldest first)."""
    runs = [evidence] if isinstance(evidence, Run) else [h.run for h in evidence]
    return Finding(
        rule=rule,
        state=state,
        cause=cause,
        message=message,
        probe=runs[-1].probe,
        repro=runs[-1].repro,
        runs=tuple(dict.fromkeys(r.id for r in runs))[-RUNS_NAMED:],
        rivals=() if isinstance(evidence, Run) else strongest(evidence).rivals,
    )


def strongest(hits: Sequence[Hit]) -> Hit:
    """Return the newest of the hits whose cause ranks first."""
    return min(reversed(hits), key=lambda h: CAUSES.index(h.cause))
