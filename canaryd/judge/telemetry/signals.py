"""What a device, its driver and the kernel log reported, as input of the rules."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property

from canaryd.config.settings import TelemetryConfig
from canaryd.formatting import format_duration
from canaryd.judge.clock import EPOCH
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.events import fields_of, has, numbers, within, xid_code
from canaryd.judge.wording import reason_of
from canaryd.model import Cause, Device, Event, Finding, Reading, Reason, Run, State

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
WATCH = 30 * DAY
"""Seconds for which an event is held against a device: the design's 30 days for `suspect`."""
AHEAD = MINUTE
"""Seconds by which a poll may be dated in the future and still tell of the present: clocks are set (ours)."""
TRAINING = 10 * MINUTE
"""Seconds after a reset in which links train and the fabric forms: errors there are no faults (ours)."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """One telemetry probe on one device."""

    period: float
    """Seconds between polls."""
    newest: Run | None
    """The newest poll, whatever became of it."""
    completed: Run | None
    """The newest one that completed."""
    failures: int = 0
    """Polls in a row that did not complete, the newest included."""
    since: float = 0.0
    """When this canaryd began to poll it (seconds since the epoch): a grace for the first poll."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """All the times within the watch that a device reported one Xid of one grade."""

    xid: xids.Xid
    grade: str
    events: tuple[Event, ...]
    """Oldest first."""

    @property
    def last(self) -> float:
        """When it was reported last."""
        return max(e.last for e in self.events)

    @property
    def cause(self) -> Cause:
        """Whose fault it is as far as the catalogue can tell; a link has two ends, and a driver's bug looks broken."""
        causes = {"hardware": Cause.HARDWARE, "thermal-power": Cause.ENVIRONMENT}
        return causes.get(self.xid.nature, Cause.UNDETERMINED)

    def __str__(self) -> str:
        return f"Xid {self.xid.code} ({self.xid.title})"


@dataclass(frozen=True, kw_only=True)
class Signs:
    """All that is judged here."""

    device: Device
    polls: Mapping[str, Poll]
    """By the probe's name."""
    events: tuple[Event, ...]
    """Of this device, oldest first, at least the last 30 days. Boots are events of every device."""
    last_pass: float | None
    """When the newest clean, whole run of an exact golden on this device started; None: there is none."""
    last_mismatch: float | None
    """When the newest wrong run of an exact golden started."""
    now: float
    policy: TelemetryConfig

    @cached_property
    def facts(self) -> Mapping[str, tuple[Reading, float, float]]:
        """Reading's key → the newest reading, its age, and the age up to which it is fresh."""
        found: dict[str, tuple[Reading, float, float]] = {}
        for poll in self.polls.values():
            if poll.completed is not None:
                age, limit = self.now - poll.completed.started, stale_after(poll.period)
                # Of a poll from the future nobody knows how old it is: what lasts is true still, the rest is stale.
                age = max(0.0, age) if age >= -AHEAD else math.nextafter(limit, math.inf)
                found |= {k: (r, age, limit) for k, r in numbers(poll.completed).items()}
        return found

    @cached_property
    def by_kind(self) -> Mapping[str, list[Event]]:
        """The events of the watch by kind, oldest first. What a wrong clock dated is as of now."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in sorted(map(self._dated, self.events), key=lambda e: e.last):
            if self.now - event.last <= WATCH:
                found[event.kind].append(event)
        return found

    def _dated(self, event: Event) -> Event:
        if EPOCH <= event.first <= event.last <= self.now:
            return event
        last = event.last if EPOCH <= event.last <= self.now else self.now
        return replace(event, first=event.first if EPOCH <= event.first <= last else last, last=last)

    def readings(self, name: str, within: float = 0.0) -> list[Reading]:
        """Return the readings of a name that are fresh, or not older than `within` seconds."""
        return [r for r, age, limit in self.facts.values() if r.name == name and age <= max(limit, within)]

    def value(self, name: str, within: float = 0.0, /, **labels: str) -> float | None:
        """Return one reading's number if it is fresh, or not older than `within` seconds; None otherwise."""
        found = [r for r in self.readings(name, within) if r.labels == labels]
        return float(found[0].value) if found else None

    def word(self, name: str, within: float = 0.0) -> str:
        """Return what a reading of `WORDS` says; "" for nothing."""
        return next((w for r in self.readings(name, within) for w in r.labels.values()), "")

    def seen(self, kind: str, within: float = WATCH, start: str = "") -> list[Event]:
        """Return the events of a kind, not older than `within` seconds, whose names begin with `start`."""
        return [e for e in self.by_kind.get(kind, ()) if e.name.startswith(start) and self.now - e.last <= within]

    def rises(self, name: str, within: float = WATCH, /, **labels: str) -> list[Event]:
        """Return the rises of a counter that has at least these labels."""
        return [e for e in self.seen("counter", within, name) if has(e.name, name, labels)]

    def moment(self, at: float) -> str:
        """Say when something was: a message is read long after it was written, when "a minute ago" is not true."""
        return f"at {datetime.fromtimestamp(min(max(at, EPOCH), self.now), tz=timezone.utc):%Y-%m-%d %H:%M:%S} UTC"

    @cached_property
    def boots(self) -> list[float]:
        """When the machine was started again, ascending."""
        return sorted({t for e in self.seen("boot") for t in (e.first, e.last)})

    @cached_property
    def resets(self) -> list[float]:
        """When the device was reset, its driver loaded again, or the machine started again; ascending."""
        return sorted({*self.boots, *(t for e in self.seen("reset") for t in (e.first, e.last))})

    @cached_property
    def trainings(self) -> list[float]:
        """When links had to train again: after a reset, and when a device was divided or put together; ascending."""
        return sorted({*self.resets, *(e.last for e in self.seen("flag", start="mig_enabled"))})

    def trained(self, event: Event, start: float, end: float) -> float:
        """Return `within`, without what came before the links of a device had trained."""
        before = bisect.bisect_right(self.trainings, event.last)
        return within(event, max(start, self.trainings[before - 1] + TRAINING) if before else start, end)

    def most(
        self, events: Sequence[Event], seconds: float, inside: Callable[[Event, float, float], float] = within
    ) -> float:
        """Return the largest count in any so many seconds that ended within `telemetry.settle`: it does not flap."""
        ends = {self.now, *(e.last for e in events if self.now - e.last <= self.policy.settle)}
        return max(sum(inside(e, end - seconds, end) for e in events) for end in ends)

    def passed(self, after: float) -> bool:
        """Whether exact goldens ran after a time, and only clean."""
        wrong = self.last_mismatch is not None and self.last_mismatch > after
        return self.last_pass is not None and self.last_pass > after and not wrong

    def cleared(self, after: float, resets: Sequence[float]) -> bool:
        """Way out of what needs a reset: one came, and exact goldens that started later are clean."""
        return any(r > after and self.passed(r) for r in resets)

    @cached_property
    def incidents(self) -> list[Incident]:
        """The Xids of the watch by code and grade. Of Xid 154, the driver's advice, the newest alone is true."""
        groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
        events = [e for e in self.seen("xid") if e not in (*self.losses, *self.contained)]
        advice = [e for e in events if e.name == "154"]
        for event in (*(e for e in events if e.name != "154"), *advice[-1:]):
            groups[xid_code(event), _grade(event, self.device, self.policy)].append(event)
        return [Incident(xid=xids.explain(c), grade=g, events=tuple(es)) for (c, g), es in sorted(groups.items())]

    @cached_property
    def losses(self) -> list[Event]:
        """When the kernel said that the device has fallen off the bus."""
        found = [*self.seen("off-bus"), *(e for e in self.seen("amdgpu") if e.name == "lost"), *self._own("79")]
        return sorted(found, key=lambda e: e.last)

    @cached_property
    def contained(self) -> list[Event]:
        """When the driver contained an uncorrected memory error to one application."""
        return self._own("94")

    def _own(self, code: str) -> list[Event]:
        """Return the events of an Xid that has a rule of its own; one that the configuration grades is like others."""
        return [] if code in self.policy.xids else [e for e in self.seen("xid") if xid_code(e) == int(code)]


def stale_after(period: float) -> float:
    """Return the age in seconds beyond which a poll says nothing of the present: ours, so that one missed is none."""
    return max(120.0, 5 * period)


def finding(rule: str, state: State, cause: Cause, message: str, probe: str = "") -> Finding:
    """Return a finding that rests on telemetry."""
    return Finding(rule=rule, state=state, cause=cause, message=message, probe=probe)


def lost_because(run: Run | None) -> str:
    """Return why a poll's device counts as lost; "" where it does not."""
    return reason_of(run) if run is not None and run.reason is Reason.DEVICE_LOST else ""


def clears_after(signs: Signs) -> str:
    """Return when the finding ends, as a sentence."""
    return f"Over {format_duration(signs.policy.settle)} after the last"


def returns(times: Iterable[float], resets: Sequence[float]) -> int:
    """Return after how many resets (ascending) it happened again."""
    return len({bisect.bisect_left(resets, t) for t in times}) - 1


def until(signs: Signs, at: float | None, resets: Sequence[float]) -> str:
    """Say what ends a suspicion that is as old as `at`, or that still stands (None)."""
    what = "reboot" if resets is signs.boots else "reset"
    if at is not None and any(r > at for r in resets):
        return f"There was a {what} since; suspect until exact goldens that start after it run clean"
    return f"Suspect until a {what}, and a clean run of exact goldens after it"


def _grade(event: Event, device: Device, policy: TelemetryConfig) -> str:
    """Return what an Xid calls for: by the configuration, by what the line itself says, or by the catalogue."""
    code = event.name.partition(" ")[0]
    if code in policy.xids:
        return policy.xids[code]
    action = fields_of(event).get("action", "")
    if event.name == "154" and action:
        return next((g for g in ("reboot", "none") if g in action), "reset")
    decoded = decode_xid(event, device)
    return (decoded or xids.explain(xid_code(event))).grade


def decode_xid(event: Event, device: Device) -> xids.Decoded | None:
    """Return what NVIDIA's table says about an NVLink 5 error; None for other Xids, and for a row it does not have."""
    fields, code = fields_of(event), xid_code(event)
    unit, info, status = (fields.get(k, "") for k in ("unit", "intr_info", "error_status"))
    found = xids.decode(code, unit, info, status, device.detail.get("driver", ""))
    return found if found.rows else None
