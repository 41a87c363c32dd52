"""Rules for exact goldens: mismatches, goldens, comparators."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from canaryd.judge.case import Docket, find_hits, record, repeat_command
from canaryd.judge.cause import Hit, names
from canaryd.judge.confirmation import crowded, spoken
from canaryd.judge.findings import make_finding, strongest
from canaryd.judge.statistics import RULE_OF_THREE
from canaryd.model import Cause, Finding, Outcome, State, Subject


def exact_mismatch(docket: Docket) -> Iterator[Finding]:
    """An exact golden was missed: suspect at once, and for as long as the watch lasts."""
    for hits in docket.standing(Subject.DEVICE, docket.charges):
        yield _suspicion(docket, "exact-mismatch", "", hits)


def golden_disagreement(docket: Docket) -> Iterator[Finding]:
    """Two ways to make a golden on this host disagree: the CPU is the accused, whichever device's run showed it."""
    for hits in docket.standing(Subject.HOST, docket.charges):
        yield _suspicion(docket, "golden-disagreement", "goldens made twice on this CPU disagree: ", hits)


def confirmed(docket: Docket) -> Iterator[Finding]:
    """The charges repeat: faulty, whatever the cause; the cause decides only what to do about it."""
    part = f"the dossier for the vendor: canaryd report {docket.device.name} -o DIR"
    if docket.device.weak_identity:
        part = "its identity names no physical part, so give this to whoever runs the machine"
    todo = {
        Cause.HARDWARE: f" Take it out of service; {part}.",
        Cause.SOFTWARE: " No RMA: the stack gives wrong numbers. Clears when another stack runs clean.",
    }
    for hits, grounds in docket.confirmed:
        lead = strongest(hits)
        message = f"confirmed: {'; '.join(grounds)}. Newest: {hits[-1]}. {lead.why}{todo.get(lead.cause, '')}"
        yield make_finding("exact-mismatch-confirmed", State.FAULTY, lead.cause, message, hits)


def host_in_doubt(docket: Docket) -> Iterator[Finding]:
    """An accelerator and its host's CPU were wrong at about the same time: the host is accused, not the accelerator."""
    doubted = [h for h in docket.charges if h.host_in_doubt]
    if list(docket.standing(Subject.DEVICE, doubted)):
        cpus = names(f"{d.name} ({d.model})" for d in docket.devices.values() if d.backend == "cpu")
        message = (
            f"the host's CPU, {cpus or 'not in the list of devices'}, was wrong itself within "
            f"{spoken(docket.policy.repeat_window)} of this device's mismatch: the host is accused. "
            "Settle the CPU first; until then this device is no more than suspect"
        )
        yield make_finding("host-in-doubt", State.UNKNOWN, Cause.HARDWARE, message, doubted)


def golden_in_doubt(docket: Docket) -> Iterator[Finding]:
    """The newest run met a golden that its maker could not make twice alike: it says nothing about this device."""
    accusing, shared = docket.node.host_hits
    for run in docket.current:
        if hits := [h for h in shared if h.run is run]:
            text = f"several cores fail alike on one golden, so the reference is wrong and not a core: {hits[-1]}"
            yield make_finding("golden-in-doubt", State.UNKNOWN, Cause.HARNESS, text, hits)
        elif not docket.is_cpu and (hits := [h for h in accusing if h.run is run]):
            text = f"this run's golden is in doubt, because its maker, the host's CPU, is a suspect: {hits[-1]}"
            yield make_finding("golden-in-doubt", State.UNKNOWN, Cause.HARNESS, text, hits)


def comparator_disagreement(docket: Docket) -> Iterator[Finding]:
    """Device and host compared the same bytes and disagree: once it may be either, repeatedly it is the device.

    Repeated by chance: 1.9e-9 in 30 days (ours).
    """
    for hits in docket.standing(Subject.COMPARATOR, find_hits(docket.runs, Subject.COMPARATOR)):
        doubted = any(docket.host_in_doubt(h.run) for h in hits)
        repeated = not doubted and crowded(hits, 2, docket.policy.repeat_gap, docket.policy.watch)
        weight = "once, so it may be either side"
        if doubted:
            weight = "and the host's CPU was wrong at about the same time"
        elif repeated:
            weight = "repeatedly, so the device's own comparison or its way to the host is wrong"
        cause = Cause.HARDWARE if repeated else Cause.UNDETERMINED
        message = f"device and host compared the same bytes and disagree, {weight}: {hits[-1]}"
        yield make_finding("comparator-disagreement", State.SUSPECT, cause, message, hits)


def uncharacterised_mismatch(docket: Docket) -> Iterator[Finding]:
    """A golden was missed whose exactness nobody has shown on this backend: no accusation, but no health either."""
    hits = [h for h in find_hits(docket.runs, Subject.DEVICE) if not h.comparison.characterised]
    for listed in docket.standing(Subject.DEVICE, hits):
        message = (
            f"{listed[-1]}. Exactness of this class has not been shown on a healthy {docket.device.backend} device, so "
            f"it cannot accuse. Compare with a known good device of this model: {repeat_command(listed[-1].run)}"
        )
        yield make_finding("uncharacterised-mismatch", State.UNKNOWN, Cause.HARNESS, message, listed)


def _suspicion(docket: Docket, rule: str, opening: str, hits: Sequence[Hit]) -> Finding:
    lead = strongest(hits)
    count = len({h.run.id for h in hits})
    message = f"{opening}{hits[-1]}. Seen in {count} run{'s' * (count > 1)}. "
    known = any(h is lead for charges, _ in docket.confirmed for h in charges)
    message += "It is confirmed." if known else f"{lead.why} {_next(docket, hits)}"
    return make_finding(rule, State.SUSPECT, lead.cause, message, hits)


def _next(docket: Docket, hits: Sequence[Hit]) -> str:
    """Say what happens next to a suspect: confirmation runs, then the watch."""
    root = hits[-1].run.confirms or hits[-1].run.id
    again = [r for r in docket.runs if r.confirms == root and r.outcome is Outcome.COMPLETED]
    clean = sum(1 for r in again if not any(h.run is r for h in hits))
    to_come = docket.policy.confirm_runs - len(again)
    before, _ = record(docket, hits)
    text = f"Next: {to_come} confirmation runs in new processes. " if to_come > 0 else ""
    if clean:
        text += f"{clean} of {len(again)} confirmation runs are clean; a clean retest is not an acquittal. "
    uploads = math.ceil(RULE_OF_THREE * before.uploads / before.failed)
    results = math.ceil(RULE_OF_THREE * before.results / before.wrong)
    return (
        f"{text}Watched until {spoken(docket.policy.watch)}, {uploads} clean uploads and {results} clean results have "
        "passed without another."
    )
