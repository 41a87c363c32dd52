"""Launches: a server that tunes its kernels when it starts answers with other last bits after every start.

So the bits of a server belong to a launch, one start of it, as those of a worker belong to its process. The launch is a
link of the chain of its answers: the time of the first start that gave these bits. A new launch that gives known bits
goes on with what is known; one that gives others is learnt anew, and only departures within a launch accuse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from canaryd.facts import ENDPOINT_REPEATS, ENDPOINT_STARTED, Recording
from canaryd.formatting import format_utc
from canaryd.judge.recordings.baseline import LAUNCH, Baseline, Key, key_of, known_digests
from canaryd.judge.recordings.triage import certainly_broken
from canaryd.model import Run, is_served

UNTOLD = "about "
"""How the launch of a server begins that does not tell when it started."""
KEPT = 8
"""Launches that are remembered of each case (ours): replicas behind one address take turns."""


def label(run: Run, baselines: Mapping[Key, Baseline], earlier: Sequence[Run], again: int) -> Run:
    """Return a run of an endpoint whose recordings have their launch as a link of the chain; other runs as they are.

    `earlier`: runs of the endpoint before it. `again`: as in `begins_launch`.
    """
    if not is_served(run.device):
        return run
    if promise := _promise(run):  # equality is demanded, whatever was served besides
        always = promise == "always"
        return replace(run, recordings=tuple(replace(r, condition="") if always else r for r in run.recordings))
    anew = None if started(run) else _newest_untold(run, baselines, earlier, again)
    by_key: dict[Key, list[Recording]] = defaultdict(list)
    for recording in run.recordings:
        by_key[key_of(run, recording)].append(recording)
    launches = {key: _launch(run, key, given, baselines, anew) for key, given in by_key.items()}
    labelled = (
        replace(r, chain={**r.chain, LAUNCH: found}) if (found := launches[key_of(run, r)]) else r
        for r in run.recordings
    )
    return replace(run, recordings=tuple(labelled))


def started(run: Run) -> int:
    """Return when the server of a run had started, in whole seconds since the epoch; 0 where it does not say so."""
    return next((round(float(r.value)) for r in run.readings if r.name == ENDPOINT_STARTED), 0)


def untold(run: Run) -> str:
    """Return the name of the launch that a run began on a server that does not tell when it started."""
    return f"{UNTOLD}{format_utc(run.started)}"


def _promise(run: Run) -> str:
    return next((str(r.value) for r in run.readings if r.name == ENDPOINT_REPEATS), "")


def _launch(run: Run, key: Key, given: Sequence[Recording], baselines: Mapping[Key, Baseline], anew: Run | None) -> str:
    """Return the launch that the recordings of one case belong to."""
    known = launches_of(key, baselines)
    at = started(run)
    if own := next((b for b in known if at in b.launches), None):
        return own.chain.get(LAUNCH, "")
    for b in known:
        if b.complete and all(r.digest in known_digests(baselines, b.key) or not b.departs(r) for r in given):
            return b.chain.get(LAUNCH, "")
    if at:
        return format_utc(at)
    if anew is not None and (not known or known[0].used <= anew.started):
        return untold(anew)
    return known[0].chain.get(LAUNCH, "") if known else ""


def launches_of(key: Key, baselines: Mapping[Key, Baseline]) -> list[Baseline]:
    """Return the baselines of a case in every launch, `key` being that of one of them, the newest first."""
    found = [b for b in baselines.values() if b.used >= 0 and key in (b.any_launch, b.key)]
    return sorted(found, key=lambda b: -b.used)


def met(baseline: Baseline, run: Run) -> Baseline:
    """Return a baseline whose vectors a run has met, with the start of the run's server."""
    at = started(run)
    if not at or at in baseline.launches:
        return baseline
    return replace(baseline, launches=(*baseline.launches, at)[-KEPT:])


def superseded(fresh: Baseline, baselines: Mapping[Key, Baseline]) -> list[Baseline]:
    """Return the baselines that change when a case is learnt in one more launch.

    The oldest go, but for those that something departed from. The run that began an untold launch departed from none.
    """
    others = [b for b in launches_of(fresh.any_launch, baselines) if b.key != fresh.key]
    changed = [replace(b, known=(), learnt={}, used=-1.0) for b in others[KEPT - 1 :] if not b.strange]
    if fresh.chain.get(LAUNCH, "").startswith(UNTOLD) and others and others[0].strange:
        left = others[0].strange - 1
        changed.append(replace(others[0], strange=left, calm=others[0].calm if left else {}))
    return changed


def _newest_untold(run: Run, baselines: Mapping[Key, Baseline], earlier: Sequence[Run], again: int) -> Run | None:
    """Return the newest earlier run in which every answer had changed; None where there is none."""
    whole = (r for r in reversed(earlier) if r.unknown and r.probe == run.probe and r.whole)
    first = next(whole, None)
    return first if first is not None and begins_launch(first, earlier, baselines, again) else None


def begins_launch(first: Run, runs: Iterable[Run], baselines: Mapping[Key, Baseline], again: int) -> bool:
    """Return whether a run shows a new launch of a server that does not tell when it started.

    Every answer that can be compared was unknown, of two cases at least, none was broken, and `again` retests have
    repeated all bits. A fault that strikes everything in the same way looks like that too: exact tests tell. `runs`:
    those among which the retests are.
    """
    retests = [r for r in runs if r.confirms == first.id and r.recordings]
    compared = [r for r in first.recordings if (b := baselines.get(key_of(first, r))) is not None and b.complete]
    given = {r.case: r.digest for r in compared}
    return (
        not (_promise(first) or any(map(started, (first, *retests))))
        and len(given) > 1
        and given.keys() <= {*first.unknown}
        and len(retests) >= again
        and all(given.get(r.case) == r.digest for run in retests for r in run.recordings)
        and not any(certainly_broken(r) for r in compared)
    )
