"""Rules for NVIDIA Xid and SXid errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from canaryd.formatting import format_duration
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.signals import DAY, MINUTE, Incident, Signs, decode_xid, finding, returns, until
from canaryd.model import Cause, Finding, State

APART = MINUTE
"""Seconds between two occasions of one Xid: a burst of lines is one fault (ours, as `judge.repeat_gap`)."""
REPEATS = 3
"""Occasions of an application's Xid in a day that are no single crash (ours; NVIDIA's workflows say "repeat")."""
RECURRENCES = 2
"""Resets or reboots after which the same Xid has come back: gpud's escalation to an inspection of the hardware."""


def xid_application(signs: Signs) -> Iterator[Finding]:
    """An Xid that an application can cause: a note, with what exact goldens said since. Forgotten after a day."""
    for incident in signs.incidents:
        if incident.grade == "application" and signs.now - incident.last <= DAY and not _repeated(signs, incident):
            wrong = signs.last_mismatch is not None and signs.last_mismatch > incident.last
            cause = Cause.SOFTWARE if signs.passed(incident.last) else Cause.UNDETERMINED
            text = f"{incident} {signs.moment(incident.last)}. Application-class: {_advice(signs, incident)}. "
            state = State.SUSPECT if wrong else State.HEALTHY
            yield finding("xid-application", state, cause, text + _since(signs, incident))


def xid_repeated(signs: Signs) -> Iterator[Finding]:
    """The same application's Xid again and again on one device, or Xid 13 twice at one place of the chip."""
    for incident in signs.incidents:
        if incident.grade == "application" and (how := _repeated(signs, incident)):
            text = f"{incident} {how}, last {signs.moment(incident.last)}. Application-class: "
            if incident.xid.code in (13, 31):
                text += (
                    f"NVIDIA's workflow for Xid {incident.xid.code}: when it repeats on this device and not on others, "
                    "run DCGM's end-user diagnostic, and if that passes, the field diagnostic"
                )
            else:
                text += f"{_advice(signs, incident)}; that it repeats is held against it by us"
            text = f"{text}. {_since(signs, incident)}. Over a day after the last"
            yield finding("xid-repeated", State.DEGRADED, Cause.UNDETERMINED, text)


def xid_recovery(signs: Signs) -> Iterator[Finding]:
    """An Xid that calls for a reset or a reboot: suspect until that and an exact pass; faulty when it keeps coming."""
    for incident in signs.incidents:
        if incident.grade not in ("reset", "reboot"):
            continue
        cuts = signs.boots if incident.grade == "reboot" else signs.resets
        times = [t for e in incident.events for t in (e.first, e.last)]
        back = returns(times, signs.resets)
        # What a driver's bug can cause comes back on a sound part too, however often it is reset.
        if back >= RECURRENCES and incident.cause is Cause.HARDWARE:
            text = (
                f"{incident} came back after {back} resets or reboots within 30 days. RMA-class (gpud's escalation, "
                f"ours): inspect the hardware, run the field diagnostic. {_advice(signs, incident)}"
            )
            yield finding("xid-recurring", State.FAULTY, Cause.HARDWARE, text)
        elif not signs.cleared(incident.last, cuts):
            again = f", {back} times after a reset" if back else ""
            text = f"{incident} {signs.moment(incident.last)}{again}. {incident.grade.capitalize()}-class: "
            text += f"{_advice(signs, incident)}. "
            yield finding("xid-recovery", State.SUSPECT, incident.cause, text + until(signs, incident.last, cuts))


def xid_inspect(signs: Signs) -> Iterator[Finding]:
    """An Xid that calls for somebody to look at the part, or by the configuration for its return."""
    for incident in signs.incidents:
        if incident.grade in ("inspect", "rma"):
            state = State.FAULTY if incident.grade == "rma" else State.SUSPECT
            cause = Cause.HARDWARE if incident.grade == "rma" else incident.cause
            kind = "RMA" if incident.grade == "rma" else "Inspection"
            text = f"{incident} {signs.moment(incident.last)}. {kind}-class: {_advice(signs, incident)}. "
            yield finding("xid-inspect", state, cause, f"{text}Over after 30 days without another")


def xid_unknown(signs: Signs) -> Iterator[Finding]:
    """An Xid for which NVIDIA names no action that is known here: said for a day."""
    for incident in signs.incidents:
        if incident.grade == xids.UNKNOWN and signs.now - incident.last <= DAY:
            newest = max(incident.events, key=lambda e: e.last)
            text = f"Xid {newest.name.partition(' ')[0]} ({incident.xid.title}) {signs.moment(newest.last)}: "
            text += f"{newest.detail.rstrip('.')}. "
            text += f"{_advice(signs, incident)}. Grade it under telemetry.xids. Over after a day"
            yield finding("xid-unknown", State.DEGRADED, Cause.UNDETERMINED, text)


def xid_noted(signs: Signs) -> Iterator[Finding]:
    """Xid 92 asks for nothing, but it tells of many corrected errors."""
    for incident in signs.incidents:
        if incident.xid.code == 92 and incident.grade == "none" and signs.now - incident.last <= DAY:
            text = f"{incident} {signs.moment(incident.last)}. {_advice(signs, incident)}. The counters tell the rate"
            yield finding("xid-noted", State.HEALTHY, Cause.HARDWARE, text)


def sxid(signs: Signs) -> Iterator[Finding]:
    """An NVSwitch reported an error of its links. Links check what they carry: numbers do not go wrong in silence."""
    for event in signs.seen("sxid", DAY):
        fatal = event.name.endswith(" fatal")
        text = f"NVSwitch error SXid {event.name} {signs.moment(event.last)}: {event.detail.rstrip('.')}. "
        text += "Reset-class (NVIDIA's Fabric Manager guide): reset switches and GPUs" if fatal else "Nothing to do"
        state = State.DEGRADED if fatal else State.HEALTHY
        yield finding("sxid", state, Cause.HARDWARE, f"{text}. Over after a day")


def _since(signs: Signs, incident: Incident) -> str:
    """Say what exact goldens have shown since an Xid: what tells a broken device from a broken application."""
    at = incident.last
    if signs.last_mismatch is not None and signs.last_mismatch > at:
        return (
            f"An exact golden was missed {format_duration(signs.last_mismatch - at)} after it: look at the device first"
        )
    if signs.last_pass is not None and signs.last_pass > at:
        return (
            f"Exact goldens ran clean {format_duration(signs.last_pass - at)} after it: look at the application first"
        )
    if signs.device.torch_index is None and signs.device.backend != "cpu":
        return (
            "No exact golden can tell a broken device from a broken application here: torch does not reach the device"
        )
    return "Exact goldens have been asked for; they tell a broken device from a broken application"


def _advice(signs: Signs, incident: Incident) -> str:
    text = f"NVIDIA's Xid catalogue: {incident.xid.advice}"
    if decoded := decode_xid(incident.events[-1], signs.device):
        text = f"NVIDIA's table for Xid 144 to 150: {decoded}"
    return f"Graded so by telemetry.xids; {text}" if str(incident.xid.code) in signs.policy.xids else text


def _repeated(signs: Signs, incident: Incident) -> str:
    """Say how an Xid repeats within a day, by occasions and not by lines; "" where it does not, or tells nothing.

    What is an application's own fault repeats on any device, and Xid 45 comes with every killed process.
    """
    if incident.xid.nature not in ("either", "hardware") or incident.xid.code == 45:
        return ""
    moments = [
        m for e in incident.events for m in ((e.first, e.before), (e.last, e.after)) if signs.now - e.last <= DAY
    ]
    occasions: list[tuple[float, str]] = []
    for at, place in sorted(moments):
        if not occasions or at - occasions[-1][0] >= APART:
            occasions.append((at, place))
    if len(occasions) >= REPEATS:
        return f"on {len(occasions)} occasions or more within a day"
    places = Counter(place for _, place in occasions if place)
    return next((f"{n} times on {place} within a day" for place, n in places.most_common(1) if n > 1), "")
