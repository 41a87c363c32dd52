"""The rule for a device that is lost and found again and again, as the inventory saw it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.case import Case
from canaryd.judge.findings import finding
from canaryd.judge.hangs import SELDOM, TIMES
from canaryd.judge.laws import together_with
from canaryd.judge.phrases import KERNEL_LOG, count
from canaryd.judge.telemetry.signals import Signs
from canaryd.model import UNDRIVEN, Cause, Event, EventKind, Finding, State

DEVICE, FOUND = "device", "found"
"""`Event.name` of a change of the inventory itself, and its value where the device was found; else it is "gone"."""


class Absence(NamedTuple):
    """A time during which a device may have been missing, in seconds since the epoch."""

    since: float
    """When it was last found before."""
    until: float
    """When it was found again; infinite where it was not."""


class Outage(NamedTuple):
    """One or more disappearances within an hour."""

    first: float
    """When the device was last found before."""
    last: float
    """When it was newly missed, the last time."""
    back: float
    """When it was found again; infinite where it was not."""
    times: int


def keeps_vanishing(case: Case) -> Iterator[Finding]:
    """A device that vanished repeatedly, without being removed, is suspect if other devices of this host stayed.

    An instance of a divided GPU is left out: it goes whenever the GPU is divided anew.
    """
    if case.signs is None or case.device.parent:
        return
    limits = ((case.policy.week, TIMES), (case.policy.watch, SELDOM))
    found = ((_counted(case, case.signs, within), within, least) for within, least in limits)
    seen, within = next(((seen, within) for seen, within, least in found if seen.times >= least), (None, 0.0))
    if seen is None:
        return
    suspect = bool(seen.stayed)
    who = f"{count(len(seen.stayed), 'other device')} of this host stayed each time." if suspect else ""
    last = case.signs.moment(seen.newest)
    yield finding(
        "keeps-vanishing",
        State.SUSPECT if suspect else State.UNKNOWN,
        Cause.HARDWARE if suspect and not seen.left else Cause.UNDETERMINED,
        f"It vanished {seen.times} times within {format_duration(within)}; last missed at {last}",
        f"Take it out of service; check slot, power, cables and the kernel log: {KERNEL_LOG}",
        who,
        "No reboot, change of the driver or canaryd release explains it.",
        f"Clears {format_duration(within)} after it stops.",
        company=together_with(seen.left),
    )


class Counted(NamedTuple):
    """Disappearances that nothing explains."""

    times: int
    newest: float
    """When the device was newly missed, the last time."""
    stayed: frozenset[str]
    """Siblings that were there each time."""
    left: frozenset[str]
    """Siblings that went with it at least once."""


def _counted(case: Case, signs: Signs, within: float) -> Counted:
    """Count the disappearances of the last `within` seconds."""
    siblings = {
        device.name: case.sightings.get(uuid, ())
        for uuid, device in sorted(case.devices.items())
        if device.backend == case.device.backend and not device.parent and not device.detail.get(UNDRIVEN)
    }
    counted, stayed, left, newest = 0, set(siblings), set[str](), 0.0
    for outage in outages(signs.seen(EventKind.CHANGE, within)):
        here, went = _others(siblings, outage)
        if _explained(signs, outage) or (went and not here):
            continue
        counted, stayed, left, newest = counted + outage.times, stayed & here, left | went, outage.last
    return Counted(counted, newest, frozenset(stayed), frozenset(left))


def outages(events: Sequence[Event]) -> Iterator[Outage]:
    """Yield the disappearances among a device's events (oldest first)."""
    seen = [e for e in events if e.name == DEVICE]
    for number, event in enumerate(seen):
        # Equal events of an hour are one: found and gone took turns, and `before` tells which came first.
        times = (int(event.count) + (event.before == FOUND)) // 2
        if times:
            back = (e.last for e in seen[number:] if e.after == FOUND)
            yield Outage(event.first, event.last, next(back, math.inf), times)


def absences(events: Sequence[Event]) -> Iterator[Absence]:
    """Yield when a device may have been missing, by all its events (oldest first); also before it was first found."""
    since: float | None = None
    for event in (e for e in events if e.name == DEVICE):
        if event.before != FOUND:
            since = -math.inf if since is None else since
        elif since is None:
            since = event.first
        if event.after == FOUND:
            yield Absence(since, event.last)
            since = None
        elif event.count > 1 and event.before != FOUND:
            yield Absence(since, event.last)
            since = event.first
    if since is not None:
        yield Absence(since, math.inf)


def _others(siblings: Mapping[str, Sequence[Event]], outage: Outage) -> tuple[set[str], set[str]]:
    """Return the siblings that were there all the time, and those that vanished during the outage too."""
    here = {
        name
        for name, events in siblings.items()
        if not any(a.since <= outage.last and a.until > outage.first for a in absences(events))
    }
    went = {
        name
        for name, events in siblings.items()
        if any(theirs.first <= outage.last and theirs.last >= outage.first for theirs in outages(events))
    }
    return here, went


def _explained(signs: Signs, outage: Outage) -> bool:
    """Whether somebody took it away: a reboot or a release meanwhile, or another driver when it was back."""
    taken = [*signs.seen(EventKind.BOOT), *signs.seen(EventKind.RELEASE)]
    if any(e.first <= outage.last and e.last >= outage.first for e in taken):
        return True
    return any(outage.first <= e.last <= outage.back for e in signs.named(EventKind.CHANGE, "driver"))
