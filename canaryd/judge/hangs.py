"""The rule for a device that fails to answer now and then, and computes right in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.wording import KERNEL_LOG, count
from canaryd.model import Cause, Finding, Outcome, Run, State

HANGS = frozenset({Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.UNKILLABLE})
"""Outcomes of a device that does not answer; what a machine lacks or canaryd does wrong is not among them."""
TIMES = 3
"""Times that a device stopped answering and answered again (ours): one outage has one beginning, however long it is."""
RUNS = 20
"""Newest runs of a probe among which they count, where `repeat_window` has fewer (ours)."""


def keeps_failing(case: Case) -> Iterator[Finding]:
    """A probe hangs or crashes again and again: suspect where siblings always answer, else unknown."""
    for probe in sorted(case.wanted):
        recent = _recent(case, case.scheduled(probe))
        times = _times(recent)
        if times < TIMES:
            continue
        siblings = [
            _recent(case, [r for r in runs if r.probe == probe and r.whole])
            for uuid, runs in case.peers.items()
            if case.devices[uuid].kind == case.device.kind
        ]
        answering = [runs for runs in siblings if len(runs) >= TIMES and not any(r.outcome in HANGS for r in runs)]
        alone = bool(answering) and len(answering) == len([runs for runs in siblings if runs])
        failed = [r for r in recent if r.outcome in HANGS]
        who = f"{count(len(answering), 'identical device')} always answered." if alone else ""
        yield make_finding(
            "keeps-failing",
            State.SUSPECT if alone else State.UNKNOWN,
            Cause.UNDETERMINED,
            f"{probe} hung or crashed in {len(failed)} of {len(recent)} runs, {times} separate times",
            f"Take it out of service and read the kernel log: {KERNEL_LOG}",
            failed[-1],
            (who, "Its results were right when it answered.") if not any(r.wrong for r in recent) else (who,),
        )


def _recent(case: Case, runs: Sequence[Run]) -> Sequence[Run]:
    within = [r for r in runs if age(r, case.now) <= case.policy.repeat_window]
    return within if len(within) >= RUNS else runs[-RUNS:]


def _times(runs: Sequence[Run]) -> int:
    """Return how often it stopped answering."""
    return sum(
        after.outcome in HANGS and before.outcome is Outcome.COMPLETED for before, after in itertools.pairwise(runs)
    )
