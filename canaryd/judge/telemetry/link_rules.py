"""Rules for PCIe and NVLink."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import closest, company, recurrence
from canaryd.judge.telemetry.signals import (
    DAY,
    HELD,
    MINUTE,
    TRAINING,
    Signs,
    clears_after,
    in_company,
    recovery,
    source_of,
    spans,
)
from canaryd.model import Cause, Event, EventKind, Finding, State

BIT_ERROR_RATE = 1e-12
"""Errors per bit that PCI Express allows; DCGM derives its limit of replays from it."""
TRANSFERS = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9, 7: 128e9}
"""PCI Express generation → transfers per second and lane (PCI Express Base Specifications 1.0 to 7.0)."""
CRC_PER_SECOND = 100
"""NVLink CRC errors: DCGM's limit (DcgmGPUHardwareLimits.h)."""


def replay_limit(generation: float, lanes: float) -> float:
    """Return the replays per minute that a bit error rate of 1e-12 explains; 31 for generation 5 with 16 lanes."""
    return math.ceil(BIT_ERROR_RATE * TRANSFERS.get(int(generation), TRANSFERS[5]) * lanes * MINUTE)


def pcie_errors(signs: Signs) -> Iterator[Finding]:
    """The link to the host corrects more errors than allowed."""
    lanes, generation = (signs.value(f"pcie_{k}_max", HELD) or d for k, d in (("width", 16), ("generation", 5)))
    limit = replay_limit(generation, lanes)
    # Over ten minutes, where DCGM takes one: a single burst is no rate (ours).
    span = 10 * MINUTE
    corrected = {
        "PCIe replays": signs.rises("pcie_replays_total", signs.policy.settle + span),
        "correctable PCIe errors": signs.rises(
            "pcie_aer_errors_total", signs.policy.settle + span, severity="correctable"
        ),
    }
    for what, events in corrected.items():
        if (rate := signs.most(events, span, signs.trained) * MINUTE / span) > limit:
            yield finding(
                *("pcie-replays", State.DEGRADED, Cause.HARDWARE),
                f"{rate:.3g} {what} a minute (limit {limit:g}).",
                "Check seating, riser and slot.",
                f"Limit: DCGM's for this link (bit error rate 1e-12), over {format_duration(span)}.",
                clears_after(signs.policy.settle),
            )


def pcie_uncorrected(signs: Signs) -> Iterator[Finding]:
    """The link to the host reports errors that it could not correct.

    Errors of several devices at once, and those that the port above reports, are not the device's for sure.
    """
    for severity, state in (("fatal", State.SUSPECT), ("nonfatal", State.DEGRADED)):

        def reported(of: Signs, name: str = severity) -> list[Event]:
            counted = of.rises("pcie_aer_errors_total", severity=name)
            events = [*counted, *of.named("aer", name), *of.named("aer", f"{name} port")]
            return [e for e in events if of.trained(e, -math.inf, of.now)]

        if not reported(signs):
            continue
        life = signs.life.trouble(reported)
        occasions = [(at.last, company(life, at)) for at in life.own]
        back = severity == "fatal" and recurrence(occasions, signs.life.resets, signs.now - HELD).is_faulty
        events = [e for e in reported(signs) if back or not signs.cleared(e.last, signs.resets)]
        newest = max(events, key=lambda e: e.last, default=None)
        if newest and (severity == "fatal" or signs.now - newest.last <= DAY):
            from_port = all("below" in e.fields for e in events)
            found = closest(company(life, at) for at in spans([newest]))
            action, clears = "Check seating and slot, then reset the device.", "Clears after a day."
            if not found.is_own:
                action = "Check the riser, switch and power that they share, then reset the devices."
            if severity == "fatal":
                action, clears = recovery(signs, newest.last, signs.resets, action)
            yield finding(
                *("pcie-aer", State.FAULTY if back else state, Cause.UNDETERMINED if from_port else found.cause),
                f"{'The PCIe port above the device' if from_port else 'PCIe'} reported a {severity} error.",
                action,
                in_company(found),
                f"Last at {signs.moment(newest.last)}.",
                source_of(newest),
                "Recommended: reset (canaryd's own rule).",
                f"It came back after each reset. Clears after {format_duration(HELD)}." if back else clears,
            )


def lanes_lost(signs: Signs) -> Iterator[Finding]:
    """A link came back from a reset with fewer lanes, and has had no more since, loaded or not.

    A device that was moved to a narrow slot has all the lanes that both can do.

    A link that narrows by itself when it is idle is known by having done so: `conditions` judges it under load.
    """
    changes = [e for e in signs.seen(EventKind.FLAG, HELD, "pcie_width") if e.before and e.after]
    falls = [e for e in changes if float(e.after) < float(e.before)]
    now = signs.value("pcie_width", signs.policy.settle)
    if not falls or now is None:
        return
    across = any(falls[-1].first <= reset <= falls[-1].last for reset in signs.resets)
    before = float(falls[-1].before)
    most = min(before, signs.value("pcie_width_max", signs.policy.settle) or before)
    if across and len(falls) == 1 and 0 < now < most:
        yield finding(
            *("pcie-width", State.DEGRADED, Cause.ENVIRONMENT),
            f"PCIe link uses {now:g} of {most:g} lanes since the last reset or reboot.",
            "Reseat the device; if it stays, check riser, slot and board.",
            f"Found at {signs.moment(falls[-1].last)}.",
            "The link lost lanes (canaryd's own rule).",
            f"Clears when the lanes are back, or after {format_duration(HELD)}.",
        )


def nvlink_errors(signs: Signs) -> Iterator[Finding]:
    """A link between devices had to recover or could not, or corrects more errors than DCGM allows."""
    settle = signs.policy.settle
    links: dict[str, list[Event]] = defaultdict(list)
    for event in signs.rises("nvlink_errors_total", 2 * settle):
        links[event.name].append(event)
    worst_first = sorted(links.values(), key=lambda es: (es[0].labels.get("kind") != "recovery_failed", es[0].name))
    if bad := [text for events in worst_first if (text := _nvlink_error(signs, events))]:
        more = f", and {len(bad) - 1} more kinds of error" if len(bad) > 1 else ""
        yield finding(
            *("nvlink-errors", State.DEGRADED, Cause.HARDWARE),
            f"NVLink {bad[0]}{more}.",
            "Check both ends of the link.",
            *(f"NVLink {text}." for text in bad),
            "The limits are DCGM's; the limit of no failed recovery is canaryd's own.",
            clears_after(settle),
        )


def _nvlink_error(signs: Signs, events: Sequence[Event]) -> str:
    """Return in words how the errors of one kind on one link exceed their limit; "" where they do not."""
    settle, labels = signs.policy.settle, events[0].labels
    kind, link = labels.get("kind", ""), f"link {labels.get('link', 'unknown')}"
    times = signs.most(events, settle, signs.trained)
    if kind == "recovery_failed" and signs.now - events[-1].last <= settle and times:
        return f"{link} could not recover"
    if kind in ("replay", "recovery"):
        return f"{link}: {times:.3g} {kind} errors in {format_duration(settle)} (limit 0)" if times >= 1 else ""
    rate = signs.most(events, MINUTE, signs.trained) / MINUTE
    limit = CRC_PER_SECOND
    return f"{link}: {rate:.3g} {kind} errors a second (limit {limit})" if rate >= limit else ""


def nvlink_down(signs: Signs) -> Iterator[Finding]:
    """A link that was up is down, or the device left its fabric; also for a while after it came back."""
    # A device divided by MIG has its links off, and one that was reset waits for them.
    if signs.device.parent or signs.value("mig_enabled", signs.policy.settle):
        return
    if any(signs.now - t <= TRAINING for t in signs.trainings):
        return
    newest = {e.name: e for reading in ("nvlink_up", "fabric_ready") for e in signs.seen(EventKind.FLAG, HELD, reading)}
    for _, event in sorted(newest.items()):
        down = event.after == "0" and not signs.value(event.reading, **event.labels)
        fell = (event.after == "0" or event.before == "1") and signs.trained(event, -math.inf, signs.now) > 0
        if down or (fell and signs.now - event.last <= signs.policy.settle):
            what = "The device left its NVLink fabric"
            if event.reading == "nvlink_up":
                what = f"NVLink link {event.labels.get('link', 'unknown')} went down"
            yield finding(
                *("nvlink-down", State.DEGRADED, Cause.UNDETERMINED),
                f"{what} and {'is not back' if down else 'came back'}.",
                "Check Fabric Manager and the other end of the link.",
                f"Last change at {signs.moment(event.last)}.",
                "Rule: canaryd's own.",
                f"Clears {format_duration(signs.policy.settle)} after it is back.",
            )
