"""Functions that make findings, and names of rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from canaryd.judge.cause import Mismatch
from canaryd.judge.characterised import By, Proof, class_of
from canaryd.judge.laws import Company
from canaryd.judge.phrases import describe, repeating
from canaryd.model import Cause, Characterised, Finding, Part, Remedy, Rival, Run, State, WrongResults

NO_EVIDENCE, NOT_COMPLETED = "no-evidence", "not-completed"
"""Two rules that belong together: a probe has no fresh result; its newest run did not complete."""
UNCHARACTERISED, DEPARTED = "uncharacterised-mismatch", "endpoint-departed"
"""Rules that engine and reports search for: wrong results, no proof that the test is exact; a server's new answers."""
OTHER_BITS, RENEWED = "recording-departed", "answers-renewed"
"""Rules that the engine searches for: recorded bits changed though the software did not; all of a server's answers
changed at once, after a restart or because of a fault."""
ACKNOWLEDGED, REPLACED_IS_HERE, TEXT_ONLY = "acknowledged", "replaced-is-here", "recording-text-only"
"""Rules whose notes reports always show."""
RUNS_NAMED = 16
"""Largest number of run ids in one finding, the newest: a broken device would fill the store with them."""
CAUSES = (Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS, Cause.NONE)
"""Causes, the most costly to overlook first. If findings of the worst state have several causes, the first counts."""


def finding(
    rule: str,
    state: State,
    cause: Cause,
    message: str,
    action: str = "",
    *evidence: str,
    probe: str = "",
    repro: str = "",
    runs: tuple[str, ...] = (),
    rivals: Iterable[Rival] = (),
    company: Company | None = None,
    parts: tuple[Part, ...] = (),
    remedy: Remedy | None = None,
) -> Finding:
    """Return a finding with these fields. Empty texts in `evidence` are removed.

    `company`: who else had it, if that was asked; `parts`: the shared parts that may be at fault, if not any may be.
    """
    return Finding(
        rule=rule,
        state=state,
        cause=cause,
        message=message,
        action=action,
        evidence=tuple(filter(None, (str(company or ""), *evidence))),
        probe=probe,
        repro=repro,
        runs=runs,
        rivals=tuple(rivals),
        subject=company.subject if company else None,
        shared_by=tuple(company.names) if company else (),
        parts=parts,
        remedy=remedy,
    )


def make_finding(
    rule: str,
    state: State,
    cause: Cause,
    message: str,
    action: str,
    basis: Sequence[Mismatch] | Run,
    evidence: Sequence[str] = (),
    wrong: WrongResults | None = None,
    company: Company | None = None,
) -> Finding:
    """Return a finding about `basis`: one run, or mismatches (oldest first), whose summary is `wrong`.

    The newest mismatch is described after the `evidence`.
    """
    mismatches = () if isinstance(basis, Run) else basis
    runs = [basis] if isinstance(basis, Run) else [m.run for m in basis]
    made = finding(
        *(rule, state, cause, message, action),
        *evidence,
        *(f"Newest: {describe(m)}." for m in mismatches[-1:]),
        probe=runs[-1].probe,
        repro=repeating(there, there.here) if (there := wrong and wrong.elsewhere) else runs[-1].repro,
        runs=tuple(dict.fromkeys(r.id for r in runs))[-RUNS_NAMED:],
        rivals=strongest(mismatches).rivals if mismatches else (),
        company=company,
    )
    return replace(made, characterised=_characterised(mismatches), since=runs[0].started, wrong=wrong)


def proofs(mismatches: Sequence[Mismatch]) -> dict[str, Proof]:
    """Return class of test cases → proof that it is exact, for mismatches with a proof; the weakest proof is last."""
    found = {class_of(m.comparison.case): m.proof for m in mismatches if m.proof is not None}
    return dict(sorted(found.items(), key=lambda item: (list(By).index(item[1].by), item[0])))


def _characterised(mismatches: Sequence[Mismatch]) -> tuple[Characterised, ...]:
    found = [Characterised(name=name, by=p.by.value, devices=p.devices) for name, p in proofs(mismatches).items()]
    return tuple(found[:RUNS_NAMED])


def conclusion(findings: Sequence[Finding]) -> tuple[State, Cause]:
    """Return the worst state of the findings, and the first cause, in the order of `CAUSES`, that has this state."""
    state = max((f.state for f in findings), key=lambda s: s.severity, default=State.HEALTHY)
    causes = (f.cause for f in findings if f.state is state is not State.HEALTHY)
    return state, min(causes, key=CAUSES.index, default=Cause.NONE)


def strongest(mismatches: Sequence[Mismatch]) -> Mismatch:
    """Return the newest of the mismatches whose cause comes first in `CAUSES`."""
    return next(m for cause in CAUSES for m in reversed(mismatches) if m.cause is cause)
