"""The rule for lines of the kernel log that no other rule judges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from canaryd.judge.findings import finding
from canaryd.judge.telemetry.signals import DAY, Signs, source_of
from canaryd.model import Cause, Event, Finding, State


class Line(NamedTuple):
    """What a line of the kernel log is worth (ours)."""

    state: State
    cause: Cause
    message: str
    action: str


NOTE, ENVIRONMENT = (State.HEALTHY, Cause.UNDETERMINED), (State.HEALTHY, Cause.ENVIRONMENT)
DEGRADED, HARDWARE = (State.DEGRADED, Cause.UNDETERMINED), (State.DEGRADED, Cause.HARDWARE)
CHECK_APPLICATION = "Check the application, then the device."
READ_BMC = "Read the kernel log of that start and the event log of the BMC."
CHECK_LINK = "Check seating, riser and slot."
LINES: Mapping[tuple[str, str], Line] = {
    ("oom", ""): Line(
        *ENVIRONMENT, "The kernel killed a process because the host's memory ran out", "Free memory on the host."
    ),
    ("oom", "cgroup"): Line(
        *ENVIRONMENT,
        "The kernel killed a process of a container or service at its memory limit",
        "Raise that limit, or let it use less.",
    ),
    ("nvme", ""): Line(*ENVIRONMENT, "A disk did not answer", "Check the disk."),
    ("lockup", ""): Line(*DEGRADED, "A processor was stuck in the kernel", "Check the kernel log."),
    # Notes: some kernels and some firmware repeat what is told at a start at each later one.
    ("last-boot", "error"): Line(
        *NOTE, "The processor says that an uncorrected hardware error restarted the machine", READ_BMC
    ),
    ("last-boot", "heat"): Line(*ENVIRONMENT, "The processor says that heat restarted the machine", "Check cooling."),
    ("last-boot", "record"): Line(*NOTE, "The firmware kept a record of an error from before the restart", READ_BMC),
    ("hang", ""): Line(*DEGRADED, "A call into the driver hung", "Check the driver and kernel log."),
    ("driver", "mismatch"): Line(
        *ENVIRONMENT, "The driver does not match a program's library", "Check their versions."
    ),
    ("unplaced", ""): Line(
        *DEGRADED, "A driver reported a fault and did not name the device", "Look for it in the kernel log."
    ),
    ("port", ""): Line(
        *DEGRADED,
        "A PCIe port with several devices below it reported an error",
        "Check the riser, switch and slots of the devices below it.",
    ),
    ("driver", "no-power"): Line(
        State.DEGRADED,
        Cause.ENVIRONMENT,
        "The driver could not start the device: its power cables are not connected",
        "Connect the device's power cables.",
    ),
    ("driver", ""): Line(*DEGRADED, "The driver could not start the device", "Check driver and device."),
    ("pcie", "bandwidth"): Line(*ENVIRONMENT, "The device's PCIe link is slower than it could be", CHECK_LINK),
    ("pcie", "link-down"): Line(*NOTE, "The PCIe link above the device went down", CHECK_LINK),
    ("pcie", "contained"): Line(
        *DEGRADED, "The port above the device cut its link off after an error (DPC)", CHECK_LINK
    ),
    ("pcie", ""): Line(*DEGRADED, "A PCIe device does not answer", CHECK_LINK),
    ("amdgpu", "ring-timeout"): Line(*DEGRADED, "The device did not finish its work in time", CHECK_APPLICATION),
    ("amdgpu", "queue-hung"): Line(*DEGRADED, "The device did not give up its work in time", CHECK_APPLICATION),
    ("amdgpu", "soft-recovered"): Line(
        *NOTE, "The driver ended a job that hung, and the device went on", "Check the application."
    ),
    ("amdgpu", "reset-failed"): Line(*DEGRADED, "The driver could not reset the device", "Restart the machine."),
    ("amdgpu", "init-failed"): Line(*DEGRADED, "The driver could not start the device", "Check driver and device."),
    ("amdgpu", "bad-pages"): Line(
        *HARDWARE, "Bad memory pages have reached the driver's threshold", "Plan to return the device."
    ),
    ("amdgpu", "overheated"): Line(
        State.DEGRADED,
        Cause.ENVIRONMENT,
        "The device was too hot, and its driver shut the machine down",
        "Check fans, airflow and power.",
    ),
    ("amdgpu", "fault"): Line(
        *NOTE, "The device met a bad address; an application can cause that", "Check the application."
    ),
    ("intel", "hang"): Line(*DEGRADED, "The device did not finish its work in time", CHECK_APPLICATION),
    ("intel", "reset-failed"): Line(*DEGRADED, "The driver could not reset the device", "Restart the machine."),
    ("intel", "fault"): Line(
        *NOTE, "The device met a bad address; an application can cause that", "Check the application."
    ),
    ("intel", "firmware"): Line(
        *DEGRADED, "The device's firmware reported an error, and its driver stops using it", "Flash its firmware anew."
    ),
    ("amdgpu", "reset"): Line(*NOTE, "The driver reset the device", ""),
}
"""Kind and name of a line ("" for all other names of the kind) → what it is worth."""


def kernel_lines(signs: Signs) -> Iterator[Finding]:
    """Other lines of the kernel log that explain what follows; each for a day."""
    lines: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in (e for events in signs.by_kind.values() for e in events if signs.now - e.last <= DAY):
        lines[event.kind, event.name].append(event)
    for (kind, name), events in lines.items():
        line = LINES.get((kind, name)) or LINES.get((kind, ""))
        if line is not None:
            newest, count = max(events, key=lambda e: e.last), sum(e.count for e in events)
            times = f", {count:g} times in a day" if count > 1 else ""
            yield finding(
                *(f"kernel-{kind}", line.state, line.cause),
                f"{line.message}{times}.",
                line.action,
                f"Last at {signs.moment(newest.last)}.",
                source_of(newest),
                f"Below it: {newest.fields.get('below')}." if kind == "port" else "",
                "Rule: canaryd's own. Clears after a day.",
            )
