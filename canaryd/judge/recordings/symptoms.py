"""Find broken output: what a person would call wrong at first sight."""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.facts import Recording
from canaryd.judge.findings import finding
from canaryd.judge.recordings.baseline import Baseline, key_of
from canaryd.judge.recordings.record import Observation, Peer, Record, devices_behind, known_digests
from canaryd.judge.recordings.triage import BROKEN, Symptom, triage
from canaryd.model import Cause, Finding, Run, State

CAUSES_NAMED = 3
"""Likely causes listed in one finding."""


def symptom(record: Record) -> Iterator[Finding]:
    """Broken output that is not known: known vectors may look as they do.

    On a changed chain, or before a baseline is complete, the state is only unknown: a new model may answer oddly
    forever.
    """
    reported = set()
    for (probe, case, _), (run, recording) in sorted(record.newest.items()):
        baseline = record.baselines.get(key_of(run, recording))
        complete = baseline is not None and baseline.complete
        if complete and baseline is not None and recording.digest in known_digests(record.baselines, baseline.key):
            continue
        whole = _whole(recording, baseline)
        known = baseline if complete else record.before(run, recording)
        if whole.of_kernel or not (whole.tokens or whole.text or whole.values or whole.finish):
            continue  # no answer, or only its digest is left because it was known once
        found = triaged(record, run, whole, known)
        if found is None or found.name not in BROKEN or (known is None and found.certainty != "certain"):
            continue
        if found.name in reported:
            continue
        reported.add(found.name)
        lasts = found.certainty == "certain" and known is not None and _lasts(record, probe, case, known)
        yield finding(
            "broken-output",
            (State.FAULTY if lasts else State.SUSPECT) if complete else State.UNKNOWN,
            Cause.UNDETERMINED if complete or known is None else Cause.SOFTWARE,
            f"Broken output in case {case}: {found.name} ({found.evidence}).",
            f"Run: {found.command}",
            *_evidence(record, found, complete=complete),
            probe=probe,
            repro=run.repeat,
            runs=(run.id,),
        )


def was_broken(record: Record, newest: Observation) -> Iterator[Finding]:
    """A note where the newest answer that departed was broken and known ones came since: what it was still holds."""
    found = None
    if newest.baseline.since and not newest.recording.of_kernel:
        found = triaged(record, newest.run, newest.recording, newest.baseline)
    if found is not None and found.name in BROKEN:
        yield finding(
            *("broken-output", State.HEALTHY, Cause.NONE),
            f"Earlier output was broken in case {newest.recording.case}: {found.name} ({found.evidence}).",
            "",
            "It has given known answers since.",
            probe=newest.run.probe,
            runs=(newest.run.id,),
        )


def _lasts(record: Record, probe: str, case: str, known: Baseline) -> bool:
    """Whether the answers of the last two rounds are broken beyond doubt: two, as of wrong runs."""
    rounds = [
        (run, recording)
        for run in record.runs
        if run.probe == probe and not run.confirms
        for recording in run.recordings
        if recording.case == case
    ][-2:]
    if len(rounds) < 2 or rounds[1][0].started - rounds[0][0].started < record.policy.repeat_gap:
        return False
    answers = [mode.recording for mode in known.known]
    found = [triage(_whole(recording, known), answers) for _, recording in rounds]
    return all(f is not None and f.name in BROKEN and f.certainty == "certain" for f in found)


def _evidence(record: Record, found: Symptom, *, complete: bool) -> tuple[str, ...]:
    scope = f" Seen on: {found.scope}." if found.scope else ""
    likely = "; ".join(f"{cause.what} ({cause.why})" for cause in found.causes[:CAUSES_NAMED])
    sentences = [
        f"Certainty: {found.certainty}.{scope}",
        f"Likely causes, the likeliest first: {likely}.",
        f"Test this next: {found.next_boundary}.",
    ]
    if not complete:
        sentences.append(f'If this output is intended: canaryd baseline accept {record.device.name} --reason "…"')
    return tuple(sentences)


def triaged(record: Record, run: Run, recording: Recording, known: Baseline | None) -> Symptom | None:
    """Return the symptom of an answer, with what the other devices of this node answer in the same case."""
    behind = devices_behind(record.device)
    return triage(
        recording,
        [mode.recording for mode in known.known] if known is not None else (),
        others={name: _symptom_of(peer, run.probe, recording.case) for name, peer in _peers(record, run, recording)},
        devices=max(1, len(behind)),
        device=behind[0] if behind else record.device.name,
    )


def _whole(recording: Recording, own: Baseline | None) -> Recording:
    """Return a recording with what its baseline keeps of it."""
    kept = (mode.recording for mode in own.known) if own is not None else ()
    return next((k for k in kept if k.digest == recording.digest), recording)


def _peers(record: Record, run: Run, recording: Recording) -> Iterator[tuple[str, Peer]]:
    """Yield the peers that have recorded the same case."""
    for name, peer in sorted(record.peers.items()):
        if any(r.probe == run.probe and s.case == recording.case for r in peer.runs for s in r.recordings):
            yield name, peer


def _symptom_of(peer: Peer, probe: str, case: str) -> str:
    """Return the name of the symptom of a peer's newest answer in a case; "" for none."""
    run, newest = max(
        ((r, s) for r in peer.runs if r.probe == probe for s in r.recordings if s.case == case),
        key=lambda pair: pair[0].started,
    )
    own = peer.baselines.get(key_of(run, newest))
    if own is not None and own.complete and newest.digest in own.digests:
        return ""
    found = triage(_whole(newest, own), [mode.recording for mode in own.known] if own is not None else ())
    return "" if found is None else found.name
