"""Make a finding that rests on runs or mismatches."""

from __future__ import annotations

from collections.abc import Sequence

from canaryd.judge.cause import Mismatch
from canaryd.model import Cause, Finding, Run, State

RUNS_NAMED = 16
"""Newest run ids listed in one finding; a broken device would fill the store with them."""
CAUSES = (Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS, Cause.NONE)
"""Which cause names the verdict when findings of the same state differ: the one that costs most to overlook first."""


def make_finding(
    rule: str,
    state: State,
    cause: Cause,
    message: str,
    action: str,
    basis: Sequence[Mismatch] | Run,
    evidence: Sequence[str] = (),
) -> Finding:
    """Make a finding that rests on one run, or on mismatches (oldest first)."""
    runs = [basis] if isinstance(basis, Run) else [m.run for m in basis]
    return Finding(
        rule=rule,
        state=state,
        cause=cause,
        message=message,
        action=action,
        evidence=tuple(filter(None, evidence)),
        probe=runs[-1].probe,
        repro=runs[-1].repro,
        runs=tuple(dict.fromkeys(r.id for r in runs))[-RUNS_NAMED:],
        rivals=() if isinstance(basis, Run) else strongest(basis).rivals,
    )


def strongest(mismatches: Sequence[Mismatch]) -> Mismatch:
    """Return the newest of the mismatches whose cause ranks first."""
    return min(reversed(mismatches), key=lambda m: CAUSES.index(m.cause))
