"""Judge recordings: from results that nobody could predict to findings (docs/baselines.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from canaryd.facts import Recording
from canaryd.judge.findings import finding
from canaryd.judge.recordings.baseline import Baseline
from canaryd.judge.recordings.changed import changed, learning
from canaryd.judge.recordings.departed import departed, unlike
from canaryd.judge.recordings.record import Record
from canaryd.judge.recordings.triage import Kind, kind_of_wrong, known_answers
from canaryd.model import Cause, Finding, State


def broken_output(record: Record) -> Iterator[Finding]:
    """Broken output that is not known: known vectors may look as they do.

    On a changed chain, or before a baseline is complete, the state is only unknown: a new model may answer oddly
    for ever.
    """
    reported = set()
    for new in (n for n in record.newest if not n.known):
        probe, case, complete, known = new.run.probe, new.recording.case, new.complete, new.complete or new.before
        found = _kind(new.recording, new.own, known)
        if found is None or not (known or found.certain) or found.name in reported:
            continue
        reported.add(found.name)
        lasts = found.certain and known is not None and _lasts(record, probe, case, known)
        yield finding(
            "broken-output",
            (State.FAULTY if lasts else State.SUSPECT) if complete else State.UNKNOWN,
            Cause.UNDETERMINED if complete or known is None else Cause.SOFTWARE,
            f"Broken output in case {case}: {found.name} ({found.evidence}).",
            f"Run: {found.next_test(record.parts)}",
            f"This is {'certain' if found.certain else 'likely'}.",
            f"Likely causes, the likeliest first: {'; '.join(cause.what for cause in found.causes)}.",
            "" if complete else f"If this output is intended: {record.acceptance}",
            probe=probe,
            repro=new.run.repro,
            runs=(new.run.id,),
        )


def _lasts(record: Record, probe: str, case: str, known: Baseline) -> bool:
    """Whether the answers of the last two rounds are broken beyond doubt: two, as of wrong runs."""
    of_probe = (run for run in record.runs if run.probe == probe and not run.confirms)
    last = [(run, recording) for run in of_probe for recording in run.recordings if recording.case == case][-2:]
    if len(last) < 2 or last[1][0].started - last[0][0].started < record.policy.repeat_gap:
        return False
    return all(found is not None and found.certain for found in (_kind(r, known, known) for _, r in last))


def _kind(recording: Recording, own: Baseline | None, known: Baseline | None) -> Kind | None:
    """Return what kind of wrong a recording is, with what its baseline keeps of it; None where only bits are left."""
    whole = next((k for k in known_answers(own) if k.digest == recording.digest), recording)
    given = whole.tokens or whole.text or whole.values or whole.finish
    return kind_of_wrong(whole, known_answers(known)) if given else None


RULES: tuple[Callable[[Record], Iterator[Finding]], ...] = (departed, unlike, changed, learning, broken_output)


def findings(record: Record) -> Iterator[Finding]:
    """Yield the findings of every rule."""
    for rule in RULES:
        yield from rule(record)
