"""Decide which recordings enter a baseline, and count the others."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace

from canaryd.facts import Recording
from canaryd.judge.recordings.baseline import Baseline, Key, count_run, key_of, known_digests, learn
from canaryd.judge.recordings.launches import met, superseded
from canaryd.judge.recordings.triage import certainly_broken
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
        if learns and (own is None or not own.complete) and not certainly_broken(recording):
            fresh = own is None
            own = changed[key] = met(learn(own, run, recording), run)
            changed.update({b.key: b for b in superseded(own, current)} if fresh else {})
            learnt.append(recording.case)
        if own is not None and recording.digest in known_digests(current, key):
            brief = Recording(case=own.case, digest=recording.digest, chain=own.chain, condition=recording.condition)
            kept[brief.case, brief.digest, brief.condition] = brief
            known[key] = recording
            continue
        kept[number] = recording
        if own is not None and own.complete and own.departs(recording):
            unknown[key] = recording
    exact = {k for k, r in unknown.items() if current[k].compares(r) and current[k].stable(r.condition)}
    for key in {**known, **unknown} if not run.confirms else ():
        own, strange = current[key], unknown.get(key)
        if own.complete and own.case not in learnt and (strange is None or own.compares(strange)):
            condition = (strange or known[key]).condition
            counted = count_run(own, run, condition, strange=strange, beside=bool(exact - {key}))
            changed[key] = met(counted, run) if strange is None else counted
    names = tuple(dict.fromkeys(recording.case for recording in unknown.values()))
    return replace(run, recordings=tuple(kept.values()), unknown=names, learnt=tuple(dict.fromkeys(learnt))), changed
