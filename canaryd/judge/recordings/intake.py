"""Which recordings may enter a baseline."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace

from canaryd.judge.recordings.baseline import (
    IDLE,
    LOADED,
    Baseline,
    Key,
    count,
    departure,
    key_of,
    learn,
)
from canaryd.judge.recordings.record import accepted_digests
from canaryd.judge.recordings.triage import BROKEN, triage
from canaryd.model import Recording, Run


def intake(run: Run, baselines: Mapping[Key, Baseline], *, learns: bool) -> tuple[Run, dict[Key, Baseline]]:
    """Return a run as it is to be kept, and the baselines that learnt from it, if it `learns`, or counted it.

    Of known vectors the digest is kept, for the baseline has the rest, and once; unknown ones are kept whole, and
    named. What is certainly broken is not learnt: a server that answers nothing must not be held to that.
    """
    fresh: dict[Key, Baseline] = {}
    known = ChainMap(fresh, dict(baselines))
    kept: dict[object, Recording] = {}
    strange: dict[Key, Recording] = {}
    passed: dict[Key, Recording] = {}
    learnt = []
    for number, recording in enumerate(run.recordings):
        key = key_of(run, recording)
        own = known.get(key)
        if learns and (own is None or not own.complete) and not _certainly_broken(recording):
            own = fresh[key] = learn(own, run, recording)
            learnt.append(recording.case)
        if own is not None and recording.digest in accepted_digests(known, key):
            brief = Recording(case=own.case, digest=recording.digest, chain=own.chain, condition=recording.condition)
            kept[brief.case, brief.digest, brief.condition] = brief
            passed[key] = recording
            continue
        kept[number] = recording
        if own is not None and own.complete and (away := departure(own, recording)) is not None and away.beyond:
            strange[key] = recording
    if not run.confirms and not run.drill:
        for key in {**passed, **strange}:
            own = known.get(key)
            recording = strange.get(key) or passed[key]
            counts = key not in strange or tells(own, recording)
            if own is not None and own.complete and own.case not in learnt and counts:
                fresh[key] = count(own, run, recording.condition, strange=key in strange)
    unknown = tuple(dict.fromkeys(r.case for r in strange.values()))
    return (
        replace(run, recordings=tuple(kept.values()), unknown=unknown, learnt=tuple(dict.fromkeys(learnt))),
        fresh,
    )


def _certainly_broken(recording: Recording) -> bool:
    found = None if recording.of_kernel else triage(recording)
    return found is not None and found.name in BROKEN and found.certainty == "certain"


def tells(baseline: Baseline | None, recording: Recording) -> bool:
    """Return whether a recording may be compared: one under load counts only where a baseline allows it."""
    return baseline is None or baseline.under(IDLE) != IDLE or recording.condition != LOADED
