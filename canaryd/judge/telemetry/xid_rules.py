"""The rule for NVIDIA Xid errors.

`xid_catalogue.json` grades the codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import POWER_AND_PCIE, TOGETHER, Company, Who, closest, company, recurrence
from canaryd.judge.phrases import count, listed
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.signals import (
    A_MONTH,
    ADVICE,
    DAY,
    DRAIN_AND_RESET,
    ECC,
    HELD,
    HIT,
    OFF_BUS,
    RECOVERY,
    REMAPPED,
    Incident,
    Signs,
    decode_xid,
    drain_and_reset,
    escalated,
    recovery,
    sentence,
    source_of,
    spans,
)
from canaryd.model import Cause, Event, Finding, Part, Remedy, State

REPEATS = 3
"""Occasions of an application's Xid in a day that are more than one crash (ours; NVIDIA's workflows say "repeat")."""
REMAP_FAILED = 64
"""The Xid of a memory row that could not be replaced."""
PARTS: Mapping[int | str, tuple[Part, ...]] = {
    **dict.fromkeys((*REMAPPED, 156, 157, 160, 161, 168), (Part.DRIVER,)),  # each GPU repairs its own memory and chip
    **dict.fromkeys((121, 159), (Part.DRIVER,)),  # of the chip-to-chip link, which a GPU has to its CPU alone
    **dict.fromkeys(OFF_BUS, (*POWER_AND_PCIE, Part.COOLING)),
    167: POWER_AND_PCIE,
    "link": (Part.FABRIC,),
    "thermal-power": (Part.SUPPLY,),
    **dict.fromkeys(("driver", "application"), (Part.DRIVER,)),
}
"""Xid, or nature of any other → the shared parts that can give it to several devices, in our reading of NVIDIA's
catalogue (`xids`); of the rest it may be any part."""
UNLIKELY = ("driver", "either")
"""Natures of Xids that point to hardware only where they come back on one device: its siblings have the same driver."""
ACTIONS = {
    "reset": DRAIN_AND_RESET,
    "reboot": "Restart the machine.",
    "inspect": "Inspect the device.",
    "rma": "Open a vendor case.",
}
"""Grade → what to do now."""
A_DAY = "Clears after a day."


class Conclusion(NamedTuple):
    """What follows from an Xid."""

    state: State
    cause: Cause
    action: str
    clears: str
    how: str = ""
    """How it came back, to follow the code and its title."""
    why: Sequence[str] = ()
    """Evidence, the most important first."""
    advice: str = ""
    """What is recommended, and by whom, where that is not the catalogue's own advice."""
    remedy: Remedy | None = None
    company: Company | None = None
    """Who else had it, where not only the newest one tells that."""


def xid(signs: Signs) -> Iterator[Finding]:
    """An Xid, by its grade: NVIDIA's catalogue or the configuration gives it. An error that reached it is a note."""
    for incident in signs.incidents:
        if made := BY_GRADE[incident.grade](signs, incident):
            found = made.company or _company(signs, max(incident.events, key=lambda e: e.last))
            said = dict.fromkeys((*made.why, *_evidence(signs, incident, made.advice), made.clears))
            yield finding(
                *("xid", made.state, made.cause, f"{incident}{made.how}.", made.action),
                *said,
                company=found if found.names or incident.grade in ACTIONS else None,
                parts=_parts(incident.xid) if found.names else (),
                remedy=made.remedy,
            )
    counted = "No error was counted here." if any(map(signs.readings, ECC)) else "Its error counts are not read."
    for event in {e.code: e for e in signs.hits if signs.now - e.last <= DAY}.values():
        yield finding(
            *("xid", State.HEALTHY, Cause.UNDETERMINED),
            f"Xid {event.code}: an error of another device, or of what they share, reached it.",
            "Restart the application; look at the devices and links that failed at that time.",
            f"Last at {signs.moment(event.last)}.",
            source_of(event),
            counted,
            A_DAY,
            company=_company(signs, event),
            parts=_parts(xids.explain(event.code)),
        )


def _application(signs: Signs, incident: Incident) -> Conclusion | None:
    """What an application can cause: a note, with what exact tests showed since; degraded if it repeats here alone."""
    if repeated := _repeated(signs, incident):
        action, since = _tested_since(signs, incident)
        workflow = "By canaryd's own rule an application's Xid that repeats counts against the device."
        if incident.xid.code in (13, 31):
            workflow = (
                f"NVIDIA's workflow for Xid {incident.xid.code}: if it repeats on this device and not on others, "
                "run DCGM's end-user diagnostic; if that passes, the field diagnostic."
            )
        how = f"; {repeated} within a day"
        return Conclusion(State.DEGRADED, Cause.UNDETERMINED, action, A_DAY, how, (since, workflow))
    if signs.now - incident.last > DAY:
        return None
    failed = signs.last_mismatch is not None and signs.last_mismatch > incident.last
    cause = Cause.SOFTWARE if signs.passed(incident.last) else Cause.UNDETERMINED
    action, since = _tested_since(signs, incident)
    return Conclusion(State.SUSPECT if failed else State.HEALTHY, cause, action, A_DAY, why=(since,))


def _remedied(signs: Signs, incident: Incident) -> Conclusion | None:
    """What calls for a reset or a reboot: suspect until that and an exact pass; faulty if it keeps coming here alone.

    What other devices of this host had at about the same time is no fault of its own. A driver's bug comes back too,
    but on identical devices as well.
    """
    same = (i for i in signs.life.incidents if (i.code, i.grade) == (incident.code, incident.grade))
    trouble = signs.life.of_codes([incident.events[-1].code])
    occasions = [(at.last, company(trouble, at)) for at in spans(next(same, incident).events)]
    again = recurrence(occasions, signs.life.resets, signs.now - HELD)
    if again.is_faulty:
        cause = _whose(incident, again.company, UNLIKELY)
        return Conclusion(
            *(State.FAULTY, cause, "Inspect the hardware and run the field diagnostic.", A_MONTH),
            f"; it came back after {count(again.back, 'reset')}",
            advice=escalated(cause),
            company=again.company,
        )
    cuts = signs.boots if incident.grade == "reboot" else signs.resets
    if signs.cleared(incident.last, cuts):
        return None
    action, clears, remedy = recovery(signs, incident.last, cuts, _remedy(signs, incident))
    back = f"It came back after {count(again.back, 'reset')}." if again.back else ""
    return Conclusion(State.SUSPECT, _cause(signs, incident), action, clears, why=(back,), remedy=remedy)


def _looked_at(signs: Signs, incident: Incident) -> Conclusion:
    """What somebody has to look at; or what the configuration grades for the part's return."""
    # The bucket of the code gives the action only where the grade is the code's own.
    bucket = incident.xid.immediate if incident.xid.grade == incident.grade else ""
    is_rma = incident.grade == "rma"
    cause = Cause.HARDWARE if is_rma else _cause(signs, incident)
    action = sentence(xids.advice_of(bucket)) or ACTIONS[incident.grade]
    return Conclusion(State.FAULTY if is_rma else State.SUSPECT, cause, action, A_MONTH)


def _shown(signs: Signs, incident: Incident) -> Conclusion | None:
    """What no source gives an action for; and what asks for none at once, where the catalogue calls it hardware."""
    is_told = incident.grade != "none" or (incident.xid.grade == "none" and incident.xid.nature == "hardware")
    return FOR_A_DAY[incident.grade] if is_told and signs.now - incident.last <= DAY else None


FOR_A_DAY = {
    "none": Conclusion(State.HEALTHY, Cause.HARDWARE, "", A_DAY, why=("Error counters and repairs show more.",)),
    xids.UNKNOWN: Conclusion(
        *(State.DEGRADED, Cause.UNDETERMINED),
        *("Look the code up with NVIDIA and grade it under telemetry.xids.", A_DAY),
    ),
}
BY_GRADE: Mapping[str, Callable[[Signs, Incident], Conclusion | None]] = {
    **dict.fromkeys(("none", xids.UNKNOWN), _shown),
    "application": _application,
    **dict.fromkeys(("reset", "reboot"), _remedied),
    **dict.fromkeys(("inspect", "rma"), _looked_at),
}
"""Grade → the function that says what follows."""


def _company(signs: Signs, event: Event) -> Company:
    """Return who else of this host had the same Xid."""
    trouble = signs.life.of_codes(HIT.get(event.code or 0, [event.code]))
    return closest(company(trouble, at) for at in spans([event]))


def _parts(of: xids.Xid) -> tuple[Part, ...]:
    """Return the shared parts that can give an Xid to several devices; () for any."""
    return PARTS.get(of.code) or PARTS.get(of.nature, ())


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
    if incident.grade != "reset":
        return ACTIONS[incident.grade]
    parts = listed([part.value for part in _parts(incident.xid)])
    return drain_and_reset(signs, found, f"the {parts}") if parts else drain_and_reset(signs, found)


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


def _evidence(signs: Signs, incident: Incident, advice: str = "") -> tuple[str, ...]:
    """Return when an Xid came last, its line, and its class with whose advice that is, unless there is other `advice`.

    Then NVIDIA's words about the code.
    """
    newest, table = max(incident.events, key=lambda e: e.last), decode_xid(incident.events[-1], signs.device)
    grades = {"inspect": "inspection", "rma": "RMA", "none": "", xids.UNKNOWN: ""}
    grade = grades.get(incident.grade, incident.grade)
    source = "telemetry.xids" if str(incident.xid.code) in signs.policy.xids else "NVIDIA's Xid catalogue"
    return (
        f"Last at {signs.moment(incident.last)}.",
        source_of(newest),
        advice or (f"Recommended: {grade} ({source})." if grade else ""),
        f"NVIDIA's table for Xid 144 to 150: {table}." if table else f"NVIDIA's Xid catalogue: {incident.xid.advice}.",
    )


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
