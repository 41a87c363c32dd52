"""What baselines cannot tell: those that are not ready, are new, or hold text alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from canaryd.facts import Recording
from canaryd.judge.findings import TEXT_ONLY, finding
from canaryd.judge.phrases import count
from canaryd.judge.recordings.baseline import EVERY, IDLE, LEARN, Baseline, key_of
from canaryd.judge.recordings.intake import is_comparable
from canaryd.judge.recordings.record import Record, known_digests
from canaryd.model import Cause, Finding, Outcome, Run, State


def uncompared(record: Record) -> Iterator[Finding]:
    """Recordings are the only evidence, and none was compared: no answer has a known one beside it."""
    newest = {
        (r.probe, r.instruction_set): r
        for r in record.runs
        if r.outcome is Outcome.COMPLETED and not r.confirms and (r.recordings or r.trials)
    }
    runs = {run.id: run for run in newest.values()}
    recorded = [(run, recording) for run in runs.values() for recording in run.recordings]
    if not recorded or _compared(record, runs) or any(_has_earlier_chain(record, *each) for each in recorded):
        return
    yield finding(
        *("nothing-compared", State.UNKNOWN, Cause.UNDETERMINED),
        "No result was compared yet: no baseline was ready for the newest run.",
        f"Wait for the next run, or run it now: canaryd check --device {record.device.name}",
        probe=recorded[-1][0].probe,
        runs=(recorded[-1][0].id,),
    )


def _compared(record: Record, runs: Mapping[str, Run]) -> bool:
    """Whether one of these runs compared a result of the device: with a golden, or with a ready baseline."""
    if any(run.trials for run in runs.values()):
        return True
    observed = (o for each in record.observations.values() for o in each if o.run.id in runs)
    return any(o.is_judged and (not o.is_outlier or is_comparable(o.baseline, o.recording)) for o in observed)


def _has_earlier_chain(record: Record, run: Run, recording: Recording) -> bool:
    """Whether what a case gave on an earlier chain says something of it.

    It gives the same still; or it does not, and `chain_changed` says that the endpoint's new chain is not learnt.
    """
    before, own = record.before(run, recording), record.baselines.get(key_of(run, recording))
    if before is None:
        return False
    told = record.is_endpoint and (own is None or not own.complete)
    return told or recording.digest in known_digests(record.baselines, before.key)


def learning(record: Record) -> Iterator[Finding]:
    """Report baselines that are not ready, or too new to be trusted: a first answer cannot be called wrong."""
    samples: dict[str, list[int]] = defaultdict(list)
    fresh: dict[str, list[Baseline]] = defaultdict(list)
    for (probe, _, _), (run, recording) in record.newest.items():
        own = record.baselines.get(key_of(run, recording))
        if (own is None or not own.complete) and record.before(run, recording) is None:
            samples[probe].append(own.learnt.get(EVERY, 0) if own is not None else 0)
        if own is None or not own.complete or not record.is_endpoint or own.accepted:
            continue
        if record.now - own.first <= record.policy.week:
            fresh[probe].append(own)
    for probe, baselines in sorted(fresh.items()):
        yield _fresh(probe, baselines)
    for probe, counts in sorted(samples.items()):
        least = f"at least {min(counts)}" if len({*counts}) > 1 else f"{counts[0]}"
        have = "has" if len(counts) == 1 else "have"
        text = f"Baseline not ready: {count(len(counts), 'case')} {have} {least} of {LEARN} samples; not checked yet."
        yield finding("baseline-learning", State.HEALTHY, Cause.NONE, text, probe=probe)


def text_alone(record: Record) -> Iterator[Finding]:
    """Note answers without log probabilities: what a fault changes below the words is not seen."""
    found: dict[str, list[bool]] = defaultdict(list)
    for (probe, _, _), (run, recording) in sorted(record.newest.items()):
        if (own := record.baselines.get(key_of(run, recording))) is not None:
            found[probe].append(own.is_text_only)
    for probe, blind in found.items():
        if any(blind):
            text = f"Judged by text alone: no log probabilities in {sum(blind)} of {count(len(blind), 'case')}."
            unseen = "A fault that changes no word is not seen."
            yield finding(TEXT_ONLY, State.HEALTHY, Cause.NONE, text, "", unseen, probe=probe)


def _fresh(probe: str, baselines: Sequence[Baseline]) -> Finding:
    """Return the finding on baselines of an endpoint that are new."""
    what = count(len(baselines), "case")
    exact = sum(b.stable(IDLE) for b in baselines)
    return finding(
        *("baseline-fresh", State.HEALTHY, Cause.NONE),
        f"New baseline: {what} learnt within the last week; not confirmed by another source.",
        "",
        "A model that was broken from the start would pass.",
        f"{exact} of {len(baselines)} are compared bit by bit, the others within their usual variation.",
        probe=probe,
    )
