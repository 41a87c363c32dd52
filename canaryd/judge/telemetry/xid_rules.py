"""Rules for NVIDIA Xid and SXid errors.

`canaryd.judge.telemetry.rules` lists them, `xid_catalogue.json` grades the codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import TOGETHER, Company, Who, closest, company, recurrence
from canaryd.judge.phrases import count
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.signals import (
    ADVICE,
    DAY,
    DRAIN_AND_RESET,
    ECC,
    HELD,
    HIT,
    RECOVERY,
    Incident,
    Signs,
    decode_xid,
    drain_and_reset,
    escalated,
    in_company,
    recovery,
    sentence,
    source_of,
    spans,
)
from canaryd.model import Cause, Event, Finding, State

REPEATS = 3
"""Occasions of an application's Xid in a day that are more than one crash (ours; NVIDIA's workflows say "repeat")."""
REMAP_FAILED = 64
"""The Xid of a memory row that could not be replaced."""
UNLIKELY = ("driver", "either")
"""Natures of Xids that point to hardware only where they come back on one device: its siblings have the same driver."""
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

    What other devices of this host had at about the same time is no fault of its own. A driver's bug comes back too,
    but on identical devices as well.
    """
    for incident in signs.incidents:
        if incident.grade not in ("reset", "reboot"):
            continue
        cuts = signs.boots if incident.grade == "reboot" else signs.resets
        same = (i for i in signs.life.incidents if (i.code, i.grade) == (incident.code, incident.grade))
        life = next(same, incident)
        trouble = signs.life.of_codes([incident.events[-1].code])
        occasions = [(at.last, company(trouble, at)) for at in spans(life.events)]
        again = recurrence(occasions, signs.life.resets, signs.now - HELD)
        if again.is_faulty:
            cause = _whose(incident, again.company, UNLIKELY)
            yield finding(
                *("xid-recurring", State.FAULTY, cause),
                f"{incident} came back after {again.back} resets or reboots.",
                "Inspect the hardware and run the field diagnostic.",
                f"Last at {signs.moment(incident.last)}.",
                in_company(again.company),
                escalated(cause),
                _advice(signs, incident),
                f"Clears after {format_duration(HELD)} without another.",
            )
        elif not signs.cleared(incident.last, cuts):
            action, clears = recovery(signs, incident.last, cuts, _remedy(signs, incident))
            yield finding(
                *("xid-recovery", State.SUSPECT, _cause(signs, incident)),
                f"Xid {incident.code}: {incident.xid.title}.",
                action,
                f"It came back after {count(again.back, 'reset')}." if again.back else "",
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
    """An Xid that asks for no action at once: many corrected errors, a part retired or not, another device's error."""
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
    counted = "No error was counted here." if any(map(signs.readings, ECC)) else "Its error counts are not read."
    for event in {e.code: e for e in signs.hits if signs.now - e.last <= DAY}.values():
        yield finding(
            *("xid-noted", State.HEALTHY, Cause.UNDETERMINED),
            f"Xid {event.code}: an error of another device, or of what they share, reached it.",
            "Restart the application; look at the devices and links that failed at that time.",
            in_company(_company(signs, event)),
            f"Last at {signs.moment(event.last)}.",
            source_of(event),
            counted,
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


def _company(signs: Signs, event: Event) -> Company:
    """Return who else of this host had the same Xid."""
    trouble = signs.life.of_codes(HIT.get(event.code or 0, [event.code]))
    return closest(company(trouble, at) for at in spans([event]))


def _cause(signs: Signs, incident: Incident) -> Cause:
    """Return the cause that the catalogue shows; hardware only where no other device had the same Xid."""
    return _whose(incident, _company(signs, incident.events[-1]))


def _whose(incident: Incident, found: Company, also: Collection[str] = ()) -> Cause:
    """Return the cause of an incident in such company; hardware where the code's nature is that, or one of `also`.

    A memory row that could not be replaced is the vendor's own criterion: it needs no comparison.
    """
    if incident.cause is not Cause.HARDWARE and incident.xid.nature not in also:
        return incident.cause
    return Cause.HARDWARE if incident.xid.code == REMAP_FAILED and found.is_own else found.cause


def _remedy(signs: Signs, incident: Incident) -> str:
    """Return what to do: by Xid 154 the very action that its line names, unless the configuration grades it."""
    advised = incident.events[-1].fields.get("action", "").replace("-", "_")
    if incident.xid.code in ADVICE and incident.code not in signs.policy.xids and advised in RECOVERY:
        return RECOVERY[advised][1]
    found = _company(signs, incident.events[-1])
    return drain_and_reset(signs, found) if incident.grade == "reset" else ACTIONS[incident.grade]


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
    grade, found = grades.get(incident.grade, incident.grade), _company(signs, newest)
    source = "telemetry.xids" if str(incident.xid.code) in signs.policy.xids else "NVIDIA's Xid catalogue"
    return (
        f"Last at {signs.moment(incident.last)}.",
        source_of(newest),
        f"Recommended: {grade} ({source})." if grade else "",
        in_company(found) if found.names or incident.grade in ACTIONS else "",
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
    lately, alone = [e for e in incident.events if signs.now - e.last <= DAY], (Who.ALONE, Who.UNCOMPARED)
    own = [e for e in lately if _company(signs, e).who in alone]
    moments = [m for e in own for m in ((e.first, e.before), (e.last, e.after))]
    occasions: list[tuple[float, str]] = []
    for at, place in sorted(moments):
        if not occasions or at - occasions[-1][0] >= TOGETHER:
            occasions.append((at, place))
    if len(occasions) >= REPEATS:
        return f"on at least {len(occasions)} occasions (limit {REPEATS})"
    places = Counter(place for _, place in occasions if place)
    return next((f"{n} times on {place} (limit 2)" for place, n in places.most_common(1) if n > 1), "")
