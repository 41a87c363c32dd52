"""Rules for trouble that a reset or a restart ends, and that counts when it comes back: losses, uncorrected errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from canaryd.facts import Reading
from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import ALONE, Company, Moment, Recurrence, Trouble, Who, closest, company, meet, recurrence
from canaryd.judge.phrases import count
from canaryd.judge.telemetry.signals import (
    A_MONTH,
    DAY,
    ECC,
    HELD,
    HIT,
    HOUR,
    RETURN,
    TRAINING,
    Signs,
    drain_and_reset,
    escalated,
    lost_because,
    recovery,
    source_of,
    spans,
)
from canaryd.model import Cause, Device, Event, EventKind, Finding, State

LOST_TOGETHER = HOUR
"""Seconds within which devices leave the bus together (ours): heat or an overloaded supply takes one after another."""
REBOOT = "Recommended: reboot (canaryd's own rule)."
NEVER_BACK = Recurrence(0, False, ALONE)


class Report(NamedTuple):
    """What a device, or somebody for it, reported: the texts are sentences."""

    rule: str
    found: Company
    """Who else had it."""
    message: str
    action: str
    at: float | None
    """When it was reported last; None where it still holds."""
    remedies: Sequence[float]
    """When it was remedied."""
    evidence: Sequence[str] = ()
    advice: str = ""
    """What is recommended, and by whom."""
    again: Recurrence = NEVER_BACK
    back: str = ""
    """The message where it comes back: "{resets}" or "{reboots}" stands for how many came before that."""
    inspect: str = RETURN
    """What to do where it comes back."""
    state: State = State.SUSPECT
    clears: str = ""
    """When it ends, where no remedy ends it."""
    cause: Cause | None = None
    """The cause, where it is not what the company says."""


def _judged(signs: Signs, report: Report, *, is_open: bool = True) -> Iterator[Finding]:
    """Yield the finding: faulty where it keeps coming back here alone, else suspect while it is open."""
    if report.again.is_faulty:
        back, found = report.again.back, report.again.company
        yield finding(
            *(
                report.rule,
                State.FAULTY,
                report.cause or found.cause,
                report.back.format(resets=count(back, "reset"), reboots=count(back, "reboot")),
                report.inspect,
            ),
            *report.evidence,
            escalated(found.cause) if report.inspect == RETURN else "",
            f"Clean tests in between do not clear it. {A_MONTH}",
            company=found,
        )
    elif is_open:
        action, clears, remedy = report.action, report.clears, None
        if not clears:
            action, clears, remedy = recovery(signs, report.at, report.remedies, action)
        yield finding(
            *(report.rule, report.state, report.cause or report.found.cause, report.message, action),
            *report.evidence,
            report.advice,
            clears,
            company=report.found,
            remedy=remedy,
        )


def gpu_lost(signs: Signs) -> Iterator[Finding]:
    """The driver or the kernel lost the device; the finding stands until a reboot and an exact pass.

    What other devices of this host were lost with it for is no fault of its own: they share power, cooling and PCIe.
    """
    lost = [f"{probe}: {why}" for probe, poll in sorted(signs.polls.items()) if (why := lost_because(poll.newest))]
    events = signs.losses
    times = [t for e in events for t in (e.first, e.last)] + [signs.now] * bool(lost)
    if not times:
        return
    trouble = replace(signs.life.trouble(lambda other: other.losses), within=LOST_TOGETHER)
    moments = [*spans(signs.life.losses), *[Moment(signs.now, signs.now)] * (bool(lost) and not events)]
    occasions = [(at.last, company(trouble, at)) for at in moments]
    found = occasions[-1][1]
    answers = any(p.completed is not None and p.completed.started > max(times) for p in signs.polls.values())
    shared = "Check the power, cooling and PCIe switch that they share, then restart the machine."
    report = Report(
        *("gpu-lost", found),
        f"The driver or the kernel lost the device{'; it answers again' if answers else ''}.",
        "Drain every device of this node, then restart the machine." if found.is_own else shared,
        max(times),
        signs.boots,
        (
            *(f"{text.rstrip('.')}." for text in lost),
            _identity(signs.device),
            *(text for e in events[-1:] for text in (f"Last event at {signs.moment(e.last)}.", source_of(e))),
        ),
        signs.advised("reboot", "NVIDIA's Xid catalogue"),
        # A loss is of the fatal class: two within `HELD` are enough.
        recurrence(occasions, signs.life.boots, signs.now - HELD, few=2),
        "The device was lost again after {reboots}.",
        "Check seating, riser, power and slot; return the part if the fault moves with it.",
    )
    yield from _judged(signs, report, is_open=bool(lost) or not signs.cleared(max(times), signs.boots))


def _identity(device: Device) -> str:
    """Return which part in which slot a device is, as it was when it last answered."""
    known = (("serial", "serial {}"), ("bus_id", "PCI address {}"), ("slot", "slot {}"))
    told = [text.format(device.detail[name]) for name, text in known if device.detail.get(name)]
    return f"It was {', '.join([device.model, *told])}."


def host_uncorrected(signs: Signs) -> Iterator[Finding]:
    """The host's memory lost data: every golden and every operand goes through it."""
    lines = (*signs.named("edac", "uncorrected"), *signs.named("mce", "memory"))
    events = signs.uncleared((*signs.rises("edac_errors_total", kind="uncorrected"), *lines), signs.boots)
    standing = [r for r in signs.readings("edac_errors_total") if r.labels.get("kind") == "uncorrected" and r.value]
    places = [*(r.labels for r in standing), *(e.labels or e.fields for e in events)]
    place = next((f for f in reversed(places) if "dimm" in f), {})
    module = ": memory module {dimm} (controller {controller})" if place else ""
    when = events[-1].last if events else None
    report = Report(
        *("uncorrected-error", ALONE),
        f"Uncorrected error in the host's memory{module.format_map({'controller': 'unknown', **place})}.",
        "Find and replace the memory module, then restart the machine.",
        *(when, signs.boots),
        (_when(signs, when), *map(source_of, events[-1:])),
        REBOOT,
    )
    yield from _judged(signs, report, is_open=bool(events or standing))


def _when(signs: Signs, at: float | None) -> str:
    return "Counted since the driver was loaded." if at is None else f"Last at {signs.moment(at)}."


def _fatal(signs: Signs) -> list[Event]:
    """Return what the processor could not correct, also where it restarted the machine.

    Some firmware tells that at each start anew, so only a start without a shutdown before it counts.
    """
    died = [e.last for e in signs.named(EventKind.BOOT, "unclean")]
    restarts = [e for e in signs.named("last-boot", "error") if any(0 <= e.last - at <= TRAINING for at in died)]
    return [*signs.rises("machine_check_exceptions_total"), *signs.named("mce", "uncorrected"), *restarts]


def machine_check(signs: Signs) -> Iterator[Finding]:
    """A processor of the host reported an error of its own, or restarted the machine by one again and again."""
    events = sorted(_fatal(signs), key=lambda e: e.last)
    if not events:
        return
    again = recurrence(((e.last, ALONE) for e in _fatal(signs.life)), signs.life.boots, signs.now - HELD)
    restarts = sum(e.kind == "last-boot" for e in events)
    open_ = signs.uncleared((e for e in events if e.kind != "last-boot"), signs.boots)
    newest = open_[-1] if open_ and not again.is_faulty else events[-1]
    message = "Machine check: a processor reported an uncorrected error."
    action = "Decode the error, then restart the machine."
    if "severity" in newest.fields:  # the firmware speaks for any part
        section = newest.fields.get("section")
        message = f"The firmware reported an uncorrected error{f': {section}' if section else ''}."
        action = "Find the part in the event log of the BMC, then restart the machine."
    report = Report(
        *("machine-check", ALONE, message, action, newest.last, signs.boots),
        (
            f"Errors restarted the machine {count(restarts, 'time')} in {format_duration(HELD)}." if restarts else "",
            *(f"Last at {signs.moment(newest.last)}.", source_of(newest)),
        ),
        *(REBOOT, again, "Uncorrected errors of the processor came back after {reboots}."),
        "Find the part in the event log of the BMC, and replace it.",
    )
    if restarts > 1:
        message = "An uncorrected error of the processor restarted the machine again."
        report = report._replace(message=message, action=report.inspect, clears=A_MONTH)
    yield from _judged(signs, report, is_open=bool(open_) or restarts > 1)


def _logged(signs: Signs) -> list[Event]:
    """Return the lines by which the driver says that the device lost data."""
    ras = [e for kind in ("amdgpu", "intel") for e in signs.named(kind, "ras-uncorrected")]
    return [*ras, *signs.memory_lost]


def _unexplained(signs: Signs, by: int | None) -> list[Event]:
    return [e for e in _logged(signs) if by not in HIT.get(e.code or 0, ())]


def _occasions(signs: Signs) -> Iterator[tuple[float, Event, Company]]:
    """Yield when the device lost data, what shows it, and who else did.

    What the device itself counted is its own, unless others counted it between the same polls too: a dip of the power
    strikes all. A line with a mark beside it is as that is; another one is not, where others have one that it does not
    explain.
    """
    marked = signs.trouble(lambda other: other.marks)
    lines = [(at, e) for e in _logged(signs) for at in spans([e])]
    codes = {e.code for _, e in lines}
    told = {c: replace(signs.trouble(partial(_unexplained, by=c)), own=[at for at, _ in lines]) for c in codes}
    known = [at.last for at, _ in lines] + [e.last for e in signs.counted_losses if e.reading == ECC[0]]
    for e in signs.counted_losses:
        # A lifetime count shows the same errors at a less certain time: across a reset it may have risen before that.
        is_volatile = e.reading == ECC[0]
        if is_volatile or not any(e.first <= at <= e.last for at in known):
            yield e.last if is_volatile else e.first, e, closest(_of_mark(marked, at) for at in spans([e]))
    for at, e in lines:
        beside = [_of_mark(marked, mark) for mark in marked.own if meet(at, mark)]
        yield at.last, e, closest(beside or [company(told[e.code], at)])


def _of_mark(marked: Trouble, at: Moment) -> Company:
    found = company(marked, at)
    return found if found.who is Who.TOGETHER else ALONE


def _open(signs: Signs) -> tuple[list[tuple[float, Event]], list[Event], list[Reading]]:
    """Return what shows a loss that no reset with an exact pass after it has cleared.

    That is when rises and lines came, with these; resets that wiped a count out; counts that are above 0.
    """
    counted = [each for each in signs.by_name.get(ECC[0], ()) if each[0].labels.get("kind") == "uncorrected"]
    # One that was read before and is not now still stands, until a reset and an exact pass came after it.
    standing = [
        r
        for r, age, limit in counted
        if r.value and age <= HELD and (age <= limit or not signs.cleared(signs.now - age, signs.resets))
    ]
    # While nothing was lost since the last reset, the lifetime count rose before it, though no poll came in between.
    early = ECC[1:] if not standing and any(age <= limit for _, age, limit in counted) else ()
    came = [(e.first if e.reading in early else e.last, e) for e in (*signs.counted_losses, *_logged(signs))]
    wiped = signs.seen(EventKind.RESET, HELD, ECC[0], kind="uncorrected")
    held = [(at, e) for at, e in came if not signs.cleared(at, signs.resets)]
    return held, [e for e in wiped if not signs.passed(e.last)], standing


def uncorrected_error(signs: Signs) -> Iterator[Finding]:
    """The device reported that it lost data: suspect until a reset and an exact pass after it."""
    logged = _logged(signs)
    life = signs.life if signs.counted_losses or logged else signs
    occasions, (held, wiped, standing) = [*_occasions(life)], _open(signs)
    events = [*(e for _, e in held), *wiped]
    whose = [found for _, e, found in occasions if e in events]
    if standing or wiped:  # as the rises that made the count; at first sight it is its own
        whose += [found for _, e, found in occasions if e in signs.counted_losses] or [ALONE]
    found = closest(whose or [ALONE])
    places = [*(e.labels.get("location") or e.fields.get("block") for e in events)]
    places += [r.labels.get("location") for r in standing]
    where = ", ".join(sorted({place or "the device's memory" for place in places}))
    error = "Uncorrected error" if any(e.kind == "intel" for e in events) else "Uncorrected memory error"
    report = Report(
        *("uncorrected-error", found),
        f"{error} {f'on {1 + len(found.names)} devices at once' if found.names else f'in {where}'}.",
        drain_and_reset(signs, found),
        max((at for at, _ in held), default=0.0 if wiped else None),
        signs.resets,
        (_when(signs, max((e.last for e in events), default=None)), *(source_of(e) for e in events if e in logged)),
        signs.advised("reset", "NVIDIA's memory error management"),
        recurrence(((at, found) for at, _, found in occasions), life.resets, signs.now - HELD),
        "Uncorrected memory errors came back after {resets}.",
    )
    yield from _judged(signs, report, is_open=bool(events or standing))


def pcie_uncorrected(signs: Signs) -> Iterator[Finding]:
    """The link to the host reports errors that it could not correct; a nonfatal one is degraded for a day.

    Errors of several devices at once, and those that the port above reports, are not the device's for sure.
    """
    for severity in ("fatal", "nonfatal"):

        def reported(of: Signs, name: str = severity) -> list[Event]:
            counted = of.rises("pcie_aer_errors_total", severity=name)
            events = [*counted, *of.named("aer", name), *of.named("aer", f"{name} port")]
            return [e for e in events if of.trained(e, -math.inf, of.now)]

        if not (events := sorted(reported(signs), key=lambda e: e.last)):
            continue
        open_ = signs.uncleared(events, signs.resets)
        newest, above = (open_ or events)[-1], all("below" in e.fields for e in open_ or events)
        life, is_fatal = signs.life.trouble(reported), severity == "fatal"
        occasions = [(at.last, company(life, at)) for at in life.own]
        found = closest(company(life, at) for at in spans([newest]))
        report = Report(
            *("pcie-aer", found),
            f"{'The PCIe port above the device' if above else 'PCIe'} reported a {severity} error.",
            "Check seating and slot, then reset the device."
            if found.is_own
            else "Check the riser, switch and power that they share, then reset the devices.",
            *(newest.last, signs.resets),
            (f"Last at {signs.moment(newest.last)}.", source_of(newest)),
            "Recommended: reset (canaryd's own rule).",
            recurrence(occasions, signs.life.resets, signs.now - HELD) if is_fatal else NEVER_BACK,
            "Fatal PCIe errors came back after {resets}.",
            "Check seating and slot; return the part if the fault stays with it.",
            cause=Cause.UNDETERMINED if above else None,
        )
        if not is_fatal:
            report = report._replace(state=State.DEGRADED, clears="Clears after a day.")
        yield from _judged(signs, report, is_open=bool(open_) and (is_fatal or signs.now - newest.last <= DAY))
