"""Decide which recordings enter a baseline, and count the others."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace

from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import IDLE, LOADED, Baseline, Key, count_run, deviation, key_of, learn
from canaryd.judge.recordings.record import known_digests
from canaryd.judge.recordings.triage import BROKEN, triage
from canaryd.model import Run


def intake(run: Run, baselines: Mapping[Key, Baseline], *, learns: bool) -> tuple[Run, dict[Key, Baseline]]:
    """Return a run as it is to be stored, and the baselines that it changed.

    With `learns` it adds samples to baselines that are not complete; complete ones count it. Of known vectors the run
    keeps the digest, once, for the baseline has the rest; unknown ones are kept whole, and their cases are named in
    `Run.unknown`. Output that is certainly broken is not learnt: a server that answers nothing must not become its own
    standard.
    """
    changed: dict[Key, Baseline] = {}
    current = ChainMap(changed, dict(baselines))
    kept: dict[object, Recording] = {}
    unknown: dict[Key, Recording] = {}
    known: dict[Key, Recording] = {}
    learnt = []
    for number, recording in enumerate(run.recordings):
        key = key_of(run, recording)
        own = current.get(key)
        if learns and (own is None or not own.complete) and not _certainly_broken(recording):
            own = changed[key] = learn(own, run, recording)
            learnt.append(recording.case)
        if own is not None and recording.digest in known_digests(current, key):
            brief = Recording(case=own.case, digest=recording.digest, chain=own.chain, condition=recording.condition)
            kept[brief.case, brief.digest, brief.condition] = brief
            known[key] = recording
            continue
        kept[number] = recording
        if own is not None and own.complete and (found := deviation(own, recording)) is not None and found.is_outlier:
            unknown[key] = recording
    exact = {key for key, recording in unknown.items() if _repeats_exactly(current.get(key), recording)}
    if not run.confirms and not run.drill:
        for key in {**known, **unknown}:
            own = current.get(key)
            recording = unknown.get(key) or known[key]
            counts = key not in unknown or is_comparable(own, recording)
            if own is not None and own.complete and own.case not in learnt and counts:
                strange, beside = key in unknown, bool(exact - {key})
                changed[key] = count_run(own, run, recording.condition, strange=strange, beside=beside)
    names = tuple(dict.fromkeys(recording.case for recording in unknown.values()))
    return (replace(run, recordings=tuple(kept.values()), unknown=names, learnt=tuple(dict.fromkeys(learnt))), changed)


def _certainly_broken(recording: Recording) -> bool:
    found = None if recording.of_kernel else triage(recording)
    return found is not None and found.name in BROKEN and found.certainty == "certain"


def _repeats_exactly(baseline: Baseline | None, recording: Recording) -> bool:
    stable = baseline is not None and baseline.stable(recording.condition)
    return stable and is_comparable(baseline, recording)


def is_comparable(baseline: Baseline | None, recording: Recording) -> bool:
    """Whether a recording may be compared: one under load does not count where the baseline has idle samples."""
    return baseline is None or baseline.effective_condition(IDLE) != IDLE or recording.condition != LOADED
