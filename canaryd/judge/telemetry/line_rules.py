"""Rules for single events that explain what follows, each for a day: lines of the kernel log, restarts, changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from canaryd.judge.findings import finding
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.telemetry.signals import DAY, Signs, source_of
from canaryd.model import Cause, Event, EventKind, Finding, Part, Remedy, State


class Line(NamedTuple):
    """What an event is worth (ours)."""

    state: State
    cause: Cause
    message: str
    """With {kind}, {name}, and of an SXid {code}, {severity} and {title}."""
    action: str
    advice: str = "Rule: canaryd's own."
    rule: str = "event-reported"
    parts: tuple[Part, ...] = ()
    """The shared parts that it is about."""
    remedy: Remedy | None = None


NOTE, ENVIRONMENT = (State.HEALTHY, Cause.UNDETERMINED), (State.HEALTHY, Cause.ENVIRONMENT)
DEGRADED, HARDWARE = (State.DEGRADED, Cause.UNDETERMINED), (State.DEGRADED, Cause.HARDWARE)
OUTSIDE = (State.DEGRADED, Cause.ENVIRONMENT)
CHECK_APPLICATION = "Check the application, then the device."
CHECK_LINK = "Check seating, riser and slot."
SXID = "NVSwitch error SXid {code} ({severity}): {title}"
REPORTED = Line(*NOTE, "The kernel log has a line about {kind}: {name}", "")
LINES: Mapping[str, Line] = {
    "oom": Line(
        *ENVIRONMENT,
        "The kernel killed a process because the host's memory ran out",
        "Free memory on the host (journalctl -k names the process).",
    ),
    "oom cgroup": Line(
        *ENVIRONMENT,
        "The kernel killed a process of a container or service at its memory limit",
        "Raise that limit, or let it use less (journalctl -k names the process).",
    ),
    "lockup": Line(*DEGRADED, "A processor was stuck in the kernel", "Check the kernel log."),
    "boot unclean": Line(*NOTE, "The machine restarted without a shutdown", "Find out why: power, or a kernel crash."),
    **dict.fromkeys(
        ("clock", "flag clock_source tsc"),
        Line(*OUTSIDE, "The kernel gave up the processor's clock (tsc)", "Update the BIOS and restart the machine."),
    ),
    "hang": Line(*DEGRADED, "A call into the driver hung", "Check the driver and kernel log."),
    "unplaced": Line(
        *DEGRADED, "A driver reported a fault and did not name the device", "Look for it in the kernel log."
    ),
    "port": Line(
        *DEGRADED,
        "A PCIe port with several devices below it reported an error",
        "Check the riser, switch and slots of the devices below it.",
        parts=(Part.RISER, Part.SWITCH),
    ),
    "driver mismatch": Line(*ENVIRONMENT, "The driver does not match a program's library", "Check their versions."),
    "driver no-power": Line(
        *OUTSIDE,
        "The driver could not start the device: its power cables are not connected",
        "Connect the device's power cables.",
    ),
    **dict.fromkeys(
        ("driver", "amdgpu init-failed"),
        Line(*DEGRADED, "The driver could not start the device", "Check driver and device."),
    ),
    "pcie contained": Line(*DEGRADED, "The port above the device cut its link off (DPC)", CHECK_LINK, rule="pcie-aer"),
    **dict.fromkeys(
        ("pcie not-ready", "pcie inaccessible"),
        Line(*DEGRADED, "A PCIe device does not answer", CHECK_LINK, rule="pcie-aer"),
    ),
    "amdgpu bad-pages": Line(
        *HARDWARE, "Bad memory pages reached the driver's threshold", "Plan to return the device.", rule="memory-worn"
    ),
    "amdgpu overheated": Line(
        *OUTSIDE, "The device was too hot, and its driver shut the machine down", "Check fans, airflow and power."
    ),
    "intel firmware": Line(
        *DEGRADED, "The device's firmware reported an error, and its driver stops using it", "Flash its firmware anew."
    ),
    **dict.fromkeys(
        ("amdgpu ring-timeout", "amdgpu queue-hung", "intel hang"),
        Line(*DEGRADED, "The device did not finish its work in time", CHECK_APPLICATION),
    ),
    **dict.fromkeys(
        ("amdgpu reset-failed", "intel reset-failed"),
        Line(*DEGRADED, "The driver could not reset the device", "Restart the machine.", remedy=Remedy.REBOOT),
    ),
    **dict.fromkeys(("amdgpu", "intel", "last-boot", "nvme", "pcie"), REPORTED),
    "counter device_recoveries_total": Line(
        *DEGRADED, "The driver restarted the device to free it, and work was lost", CHECK_APPLICATION
    ),
    "sxid fatal": Line(
        *(*HARDWARE, SXID, "Reset the switches and GPUs.", "Recommended: reset (NVIDIA's Fabric Manager guide)."),
        parts=(Part.FABRIC,),
        remedy=Remedy.RESET,
    ),
    "sxid": Line(State.HEALTHY, Cause.HARDWARE, SXID, "", "Nothing to do."),
}
"""Kind, or kind and (last word of the) name, of an event, perhaps with the value before it → what it is worth. One
without a row of its name is worth what its kind is. Links of an NVSwitch check what they carry, so no wrong number
passes unseen."""
ELSEWHERE = {("amdgpu", "lost"), ("amdgpu", "ras-uncorrected"), ("intel", "ras-uncorrected")}
"""Kind and name of lines that another rule judges."""


def _row(event: Event) -> Line | None:
    kind, name = event.kind, event.name
    keys = (f"{kind} {name} {event.before}", f"{kind} {name}", f"{kind} {name.rpartition(' ')[2]}", kind)
    return None if (kind, name) in ELSEWHERE else next((LINES[key] for key in keys if key in LINES), None)


def reported(signs: Signs) -> Iterator[Finding]:
    """Something happened that explains what follows, by the kernel log or a counter."""
    events: dict[tuple[str, str, Line | None], list[Event]] = defaultdict(list)
    for event in (e for of_kind in signs.by_kind.values() for e in of_kind if signs.now - e.last <= DAY):
        events[event.kind, event.name, _row(event)].append(event)
    for (kind, name, line), alike in events.items():
        newest, count = max(alike, key=lambda e: e.last), sum(e.count for e in alike)
        if line is not None:
            code, severity = newest.code or name, newest.fields.get("severity", "unknown")
            title = xids.explain_sxid(newest.code)
            message = line.message.format(kind=kind, name=name, code=code, severity=severity, title=title)
            times = f", {count:g} times in a day" if count > 1 else ""
            yield finding(
                *(line.rule, line.state, line.cause),
                f"{message}{times}.",
                line.action,
                f"Last at {signs.moment(newest.last)}.",
                source_of(newest),
                f"Below it: {newest.fields.get('below')}." if kind == "port" else "",
                line.advice,
                "Clears after a day.",
                parts=line.parts,
                remedy=line.remedy,
            )


def changed(signs: Signs) -> Iterator[Finding]:
    """Something of the machine differs from a day ago: no fault, but it explains what comes later."""
    for event in signs.seen(EventKind.CHANGE, DAY):
        is_device = event.name == "device" and event.detail
        message = event.detail if is_device else f"{event.name} changed: {event.before} → {event.after}"
        found = f"Found at {signs.moment(event.last)}."
        yield finding("noted", State.HEALTHY, Cause.NONE, f"{message}.", "", found, "Clears after a day.")
    for event in signs.seen(EventKind.COUNTER_FELL, DAY):
        kind = READINGS.get(event.reading)
        why = "It counts over the device's life, so the board was replaced or its record was cleared."
        action = "Check whether the board was replaced or its record was cleared."
        if kind is not None and kind.volatile:
            if any(event.first <= boot <= event.last for boot in signs.boots):
                continue
            why = "There was no reset: it was cleared by hand or wrapped, or a part that it counts is gone."
            action = ""
        yield finding(
            *("noted", State.HEALTHY, Cause.NONE),
            f"{event.detail or f'{event.name} fell'}.",
            action,
            f"At {signs.moment(event.last)}.",
            why,
            "Clears after a day.",
        )
