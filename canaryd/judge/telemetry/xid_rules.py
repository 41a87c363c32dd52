"""Rules for NVIDIA Xid and SXid errors.

`canaryd.judge.telemetry.rules` lists them, `xid_catalogue.json` grades the codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.signals import (
    ADVICE,
    DAY,
    DRAIN_AND_RESET,
    HELD,
    MINUTE,
    RECOVERY,
    RECURRENCES,
    Incident,
    Signs,
    decode_xid,
    recovery,
    returns,
    sentence,
    source_of,
)
from canaryd.model import Cause, Event, Finding, State

APART = MINUTE
"""Seconds between two occasions of one Xid: a burst of lines is one fault (ours, as `judge.repeat_gap`)."""
REPEATS = 3
"""Occasions of an application's Xid in a day that are more than one crash (ours; NVIDIA's workflows say "repeat")."""
ACTIONS = {
    "reset": DRAIN_AND_RESET,
    "reboot": "Restart the machine.",
    "inspect": "Inspect the device.",
    "rma": "Open a vendor case.",
}
"""Grade → what to do now."""


def xid_application(signs: Signs) -> Iterator[Finding]:
    """An Xid that an application can cause: a note for a day, with the result of exact tests since."""
    for incident in signs.incidents:
        if incident.grade == "application" and signs.now - incident.last <= DAY and not _repeated(signs, incident):
            failed = signs.last_mismatch is not None and signs.last_mismatch > incident.last
            cause = Cause.SOFTWARE if signs.passed(incident.last) else Cause.UNDETERMINED
            action, since = _tested_since(signs, incident)
            yield finding(
                *("xid-application", State.SUSPECT if failed else State.HEALTHY, cause),
                f"Xid {incident.code}: {incident.xid.title}.",
                action,
                since,
                *_evidence(signs, incident),
                "Clears after a day.",
            )


def xid_repeated(signs: Signs) -> Iterator[Finding]:
    """An application's Xid comes back on one device alone, or Xid 13 came twice from one place of its chip."""
    for incident in signs.incidents:
        if incident.grade == "application" and (how := _repeated(signs, incident)):
            action, since = _tested_since(signs, incident)
            workflow = "By canaryd's own rule an application's Xid that repeats counts against the device."
            if incident.xid.code in (13, 31):
                workflow = (
                    f"NVIDIA's workflow for Xid {incident.xid.code}: if it repeats on this device and not on others, "
                    "run DCGM's end-user diagnostic; if that passes, the field diagnostic."
                )
            yield finding(
                *("xid-repeated", State.DEGRADED, Cause.UNDETERMINED),
                f"{incident} {how} within a day.",
                action,
                since,
                workflow,
                *_evidence(signs, incident),
                "Clears a day after the last one.",
            )


def xid_recovery(signs: Signs) -> Iterator[Finding]:
    """An Xid that calls for a reset or a reboot: suspect until that and an exact pass; faulty if it keeps coming.

    What other devices of this host had at about the same time is no fault of its own.
    """
    for incident in signs.incidents:
        if incident.grade not in ("reset", "reboot"):
            continue
        cuts = signs.boots if incident.grade == "reboot" else signs.resets
        times = [t for e in incident.events if not _company(signs, e) for t in (e.first, e.last)]
        back = max(0, returns(times, signs.resets))
        # What a driver's bug can cause comes back on a sound part too, after any number of resets.
        if back >= RECURRENCES and incident.cause is Cause.HARDWARE:
            yield finding(
                *("xid-recurring", State.FAULTY, Cause.HARDWARE),
                f"{incident} came back after {back} resets (limit {RECURRENCES} in {format_duration(HELD)}).",
                "Inspect the hardware and run the field diagnostic.",
                f"Last at {signs.moment(incident.last)}.",
                "Recommended: RMA (gpud's escalation rule, adopted by canaryd).",
                _advice(signs, incident),
                f"Clears after {format_duration(HELD)} without another.",
            )
        elif not signs.cleared(incident.last, cuts):
            action, clears = recovery(signs, incident.last, cuts, _remedy(signs, incident))
            yield finding(
                *("xid-recovery", State.SUSPECT, _cause(signs, incident)),
                f"Xid {incident.code}: {incident.xid.title}.",
                action,
                f"It came back after {back} {'reset' if back == 1 else 'resets'}." if back else "",
                *_evidence(signs, incident),
                clears,
            )


def xid_inspect(signs: Signs) -> Iterator[Finding]:
    """An Xid after which somebody has to look at the part, or that the configuration grades for its return."""
    for incident in signs.incidents:
        if incident.grade in ("inspect", "rma"):
            is_rma = incident.grade == "rma"
            # The bucket of the code gives the action only where the grade is the code's own.
            is_own = incident.xid.grade == incident.grade
            bucket = xids.BUCKETS.get(incident.xid.immediate, "") if is_own else ""
            yield finding(
                "xid-inspect",
                State.FAULTY if is_rma else State.SUSPECT,
                Cause.HARDWARE if is_rma else _cause(signs, incident),
                f"Xid {incident.code}: {incident.xid.title}.",
                sentence(bucket) or ACTIONS[incident.grade],
                *_evidence(signs, incident),
                f"Clears after {format_duration(HELD)} without another.",
            )


def xid_unknown(signs: Signs) -> Iterator[Finding]:
    """An Xid for which no source gives an action: reported for a day."""
    for incident in signs.incidents:
        if incident.grade == xids.UNKNOWN and signs.now - incident.last <= DAY:
            yield finding(
                *("xid-unknown", State.DEGRADED, Cause.UNDETERMINED),
                f"Xid {incident.code}: {incident.xid.title}.",
                "Look the code up with NVIDIA and grade it under telemetry.xids.",
                *_evidence(signs, incident),
                "Clears after a day.",
            )


def xid_noted(signs: Signs) -> Iterator[Finding]:
    """An Xid of the hardware that asks for no action at once: many corrected errors, a part retired or not."""
    for incident in signs.incidents:
        is_noted = incident.grade == incident.xid.grade == "none" and incident.xid.nature == "hardware"
        if is_noted and signs.now - incident.last <= DAY:
            yield finding(
                *("xid-noted", State.HEALTHY, Cause.HARDWARE),
                f"Xid {incident.code}: {incident.xid.title}.",
                "",
                "Error counters and repairs show more.",
                *_evidence(signs, incident),
                "Clears after a day.",
            )


def sxid(signs: Signs) -> Iterator[Finding]:
    """An NVSwitch reported an error of its links. Links check what they carry, so no wrong number passes unseen."""
    for event in signs.seen("sxid", DAY):
        severity = event.fields.get("severity", "unknown")
        is_fatal = severity == "fatal"
        code = event.code if event.code is not None else event.name
        yield finding(
            *("sxid", State.DEGRADED if is_fatal else State.HEALTHY, Cause.HARDWARE),
            f"NVSwitch error SXid {code} ({severity}): {xids.explain_sxid(event.code)}.",
            "Reset the switches and GPUs." if is_fatal else "",
            f"Last at {signs.moment(event.last)}.",
            source_of(event),
            "Recommended: reset (NVIDIA's Fabric Manager guide)." if is_fatal else "Nothing to do.",
            "Clears after a day.",
        )


def _company(signs: Signs, event: Event) -> list[str]:
    """Return the other devices of this host that had the same Xid at about the same time."""
    return signs.together(event, lambda other: [e for e in other.seen("xid") if e.code == event.code])


def _cause(signs: Signs, incident: Incident) -> Cause:
    """Return the cause that the catalogue shows, unless other devices of this host had the same Xid with it."""
    shared = incident.cause is Cause.HARDWARE and _company(signs, incident.events[-1])
    return Cause.UNDETERMINED if shared else incident.cause


def _remedy(signs: Signs, incident: Incident) -> str:
    """Return what to do: by Xid 154 the very action that its line names, unless the configuration grades it."""
    advised = incident.events[-1].fields.get("action", "").replace("-", "_")
    if incident.xid.code in ADVICE and incident.code not in signs.policy.xids and advised in RECOVERY:
        return RECOVERY[advised][1]
    return ACTIONS[incident.grade]


def _tested_since(signs: Signs, incident: Incident) -> tuple[str, str]:
    """Return what to do, and what exact tests showed since an Xid: they tell a broken device from an application."""
    at = incident.last
    if signs.last_mismatch is not None and signs.last_mismatch > at:
        return "Check the device first.", f"An exact test failed {format_duration(signs.last_mismatch - at)} after it."
    if signs.last_pass is not None and signs.last_pass > at:
        return "Check the application first.", f"Exact tests passed {format_duration(signs.last_pass - at)} after it."
    if signs.device.torch_index is None and signs.device.backend != "cpu":
        return "Check the application and the device.", (
            "No exact test can tell a broken device from a broken application here: torch does not reach the device."
        )
    return "Wait for the exact test that canaryd has scheduled.", (
        "The exact test tells a broken device from a broken application."
    )


def _evidence(signs: Signs, incident: Incident) -> tuple[str, ...]:
    """Return when an Xid came last, its line, its class and whose advice that is."""
    newest = max(incident.events, key=lambda e: e.last)
    grades = {"inspect": "inspection", "rma": "RMA", "none": "", xids.UNKNOWN: ""}
    grade, company = grades.get(incident.grade, incident.grade), _company(signs, newest)
    source = "telemetry.xids" if str(incident.xid.code) in signs.policy.xids else "NVIDIA's Xid catalogue"
    return (
        f"Last at {signs.moment(incident.last)}.",
        source_of(newest),
        f"Recommended: {grade} ({source})." if grade else "",
        f"{', '.join(company)} had it too. What they share may be at fault." if company else "",
        _advice(signs, incident),
    )


def _advice(signs: Signs, incident: Incident) -> str:
    if decoded := decode_xid(incident.events[-1], signs.device):
        return f"NVIDIA's table for Xid 144 to 150: {decoded}."
    return f"NVIDIA's Xid catalogue: {incident.xid.advice}."


def _repeated(signs: Signs, incident: Incident) -> str:
    """Return in words how an Xid repeated within a day, by occasions and not by lines; "" where it did not.

    An application's own fault repeats on any device, and Xid 45 comes with every killed process: neither counts. Nor
    does what other devices of this host had with it: a job that uses them all crashes on them all.
    """
    if incident.xid.nature not in ("either", "hardware") or incident.xid.code == 45:
        return ""
    own = [e for e in incident.events if signs.now - e.last <= DAY and not _company(signs, e)]
    moments = [m for e in own for m in ((e.first, e.before), (e.last, e.after))]
    occasions: list[tuple[float, str]] = []
    for at, place in sorted(moments):
        if not occasions or at - occasions[-1][0] >= APART:
            occasions.append((at, place))
    if len(occasions) >= REPEATS:
        return f"on at least {len(occasions)} occasions (limit {REPEATS})"
    places = Counter(place for _, place in occasions if place)
    return next((f"{n} times on {place} (limit 2)" for place, n in places.most_common(1) if n > 1), "")
