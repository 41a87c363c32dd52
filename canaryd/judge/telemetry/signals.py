"""What a device, its driver and the kernel log reported: the input of the rules, and the texts that rules share."""

from __future__ import annotations

import bisect
import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from canaryd.config.settings import TelemetryConfig
from canaryd.facts import Reading
from canaryd.formatting import format_duration, format_utc
from canaryd.judge.clock import EPOCH, POLL_AHEAD, credible
from canaryd.judge.laws import ALONE, Company, Moment, Trouble
from canaryd.judge.phrases import reason_of
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.events import RESET_SINCE, is_number, numbers, unread, within
from canaryd.model import Cause, Device, Event, EventKind, Reason, Remedy, Run

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
HELD = 30 * DAY
"""Seconds for which an event is held against a device, unless a reset clears it: the design's 30 days for `suspect`.
How long a wrong result is held against it, an operator sets: `judge.watch`."""
TRAINING = 10 * MINUTE
"""Seconds after a reset in which links train and the fabric forms: errors in that time are not faults (ours)."""
A_MONTH = f"Clears after {format_duration(HELD)} without another."
DRAIN_AND_RESET = "Drain the device and reset it."
"""What to do where a reset helps."""
RETURN = "Run the vendor's field diagnostic, which decides on a return."
ECC = ("ecc_errors_total", "ecc_aggregate_errors_total")
"""The same errors counted twice: since the driver was loaded, and over the device's life."""
NO_START = ("init-failed", "no-power", "probe-failed", "bar-invalid")
"""Names of the lines by which NVIDIA's driver says that it could not start a device."""
NOT_STARTED = "Switch the machine off and on again; if that does not help, open a vendor case."
"""What to do where a restart did not help (ours): the device keeps its state while it has power."""
RECOVERY: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("reset", "drain_and_reset"), ("reset", DRAIN_AND_RESET)),
    **dict.fromkeys(("reboot", "system_reboot"), ("reboot", "Drain the device and restart the machine.")),
    "drain_p2p": ("reset", "Drain the device's peer-to-peer traffic."),
    "bus_reset": ("reset", "Drain the device and reset it on the bus."),
}
"""Recovery action of NVIDIA's driver → (class, what to do); any other one makes the device degraded only."""
OFF_BUS, MEMORY_LOST, ADVICE = (79,), (48, 94, 95, 140, 171, 172), (154,)
"""Xids with a meaning of their own: the GPU left the bus, memory lost data, the driver gives advice."""
OWN_MEMORY, REMAPPED, OWN_LINK = (48, 140, 171, 172), (63, 64), (149,)
"""Xids of an error of the device itself: its memory lost data, a row of it was to be replaced, its link is down."""
HIT: Mapping[int, tuple[int, ...]] = {
    94: (*OWN_MEMORY, *REMAPPED, 95, 137),
    95: OWN_MEMORY,
    145: (144, 145, 146, 147, 148, 149, 150),
}
"""Xid by which a device says that an error reached it → Xids of other devices that explain it. A program that meets
another GPU's error over NVLink ends with 94 or 95; 145 follows 149 on every device of the fabric."""
NO_FAULT = ("none", "recover_imex_domain")
"""Actions in Xid 154's line that call for nothing: an IMEX domain is a service of several nodes and no fault of the
GPU, and its reading `recovery_action` tells it."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """One telemetry probe on one device."""

    period: float
    """Seconds between polls."""
    newest: Run | None
    """The newest poll, whatever its outcome."""
    completed: Run | None
    """The newest poll that completed."""
    before: float = 0.0
    """When the completed poll before that one began, in seconds since the epoch; 0.0 for none."""
    known: Mapping[str, tuple[Reading, float]] = field(default_factory=dict)
    """Key → the newest reading, also of those that this poll lacks, and when its poll began."""
    failures: int = 0
    """Polls in a row that did not complete, the newest included."""
    since: float = 0.0
    """When this canaryd began to poll it (seconds since the epoch): a grace for the first poll."""

    def after(self, since: float) -> Poll:
        """Return the poll without what was read up to a time, such as that of a repair."""
        completed = self.completed if self.completed and self.completed.started > since else None
        known = {key: (reading, at) for key, (reading, at) in self.known.items() if at > since}
        return replace(self, completed=completed, known=known, since=max(self.since, since))


@dataclass(frozen=True, kw_only=True)
class Incident:
    """All reports of one Xid of one grade by a device in the last `Signs.held` seconds."""

    xid: xids.Xid
    grade: str
    events: tuple[Event, ...]
    """Oldest first."""

    @property
    def last(self) -> float:
        """When it was last reported."""
        return max(e.last for e in self.events)

    @property
    def cause(self) -> Cause:
        """The cause as far as the catalogue shows it: a link has two ends, and a driver's bug looks like hardware."""
        causes = {"hardware": Cause.HARDWARE, "thermal-power": Cause.ENVIRONMENT}
        return causes.get(self.xid.nature, Cause.UNDETERMINED)

    @property
    def code(self) -> str:
        """The Xid's number as text; of an event without a number its name."""
        newest = self.events[-1]
        return str(newest.code) if newest.code is not None else newest.name

    def __str__(self) -> str:
        return f"Xid {self.code}: {self.xid.title}"


@dataclass(frozen=True, kw_only=True)
class Signs:
    """All that the telemetry rules judge."""

    device: Device
    polls: Mapping[str, Poll]
    """By the probe's name."""
    events: tuple[Event, ...]
    """Of this device, oldest first: the last 30 days, and what is on record of trouble that may come back. Boots are
    events of every device."""
    last_pass: float | None
    """When the newest clean, whole exact test on this device started; None without one."""
    last_mismatch: float | None
    """When the newest exact test with a wrong result started; None without one."""
    now: float
    policy: TelemetryConfig
    beside: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    """Name → the events of each other physical device of this host."""
    reporting: Mapping[str, Signs] = field(default_factory=dict)
    """Name → the polls of each other physical device of this host, where this one reports what may be shared."""
    siblings: Sequence[str] = ()
    """The names of those that are identical to this one."""
    held: float = HELD
    """Seconds for which events count."""
    gone: bool = False
    """Whether the device is not found any more: what it said last stands, however old it is."""

    @cached_property
    def facts(self) -> Mapping[str, tuple[Reading, float, float]]:
        """Reading's key → the newest reading, its age, and the age up to which it is fresh."""
        found: dict[str, tuple[Reading, float, float]] = {}
        for poll in self.polls.values():
            if poll.completed is not None:
                now, limit = poll.completed.started if self.gone else self.now, stale_after(poll.period)
                age = now - poll.completed.started
                # The age of a poll from the future is unknown: it counts as just stale, so only lasting flags hold.
                stale = math.nextafter(limit, math.inf)
                age = max(0.0, age) if age >= -POLL_AHEAD else stale
                read = numbers(poll.completed)
                names = {r.name for r in read.values()}
                # What this poll lacks, altogether or because the driver failed to give it, counts as stale at least.
                lost = {u.reading.key for u in unread(poll.completed, poll.known)}
                last: dict[str, float] = {}
                for r, at in poll.known.values():
                    last[r.name] = max(at, last.get(r.name, at))
                older = {
                    k: (r, at)
                    for k, (r, at) in poll.known.items()
                    if is_number(r) and (k in lost or (r.name not in names and at == last[r.name]))
                }
                found |= {k: (r, max(now - at, stale), limit) for k, (r, at) in older.items()}
                found |= {k: (r, age, limit) for k, r in read.items()}
        return found

    @cached_property
    def by_name(self) -> Mapping[str, list[tuple[Reading, float, float]]]:
        """The facts by the name of their reading: rules ask for some hundred."""
        found: dict[str, list[tuple[Reading, float, float]]] = defaultdict(list)
        for fact in self.facts.values():
            found[fact[0].name].append(fact)
        return found

    @cached_property
    def by_kind(self) -> Mapping[str, list[Event]]:
        """The events of the last `held` seconds by kind, oldest first. Times of a wrong clock count as now."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in sorted(map(self._dated, self.events), key=lambda e: e.last):
            if self.now - event.last <= self.held:
                found[event.kind].append(event)
        return found

    def _dated(self, event: Event) -> Event:
        last = event.last if credible(event.last, self.now) else self.now
        first = event.first if credible(event.first, last) else last
        return event if (first, last) == (event.first, event.last) else replace(event, first=first, last=last)

    def readings(self, name: str, within: float = 0.0) -> list[Reading]:
        """Return the readings of a name that are fresh, or at most `within` seconds old."""
        return [r for r, age, limit in self.by_name.get(name, ()) if age <= max(limit, within)]

    def value(self, name: str, within: float = 0.0, /, **labels: str) -> float | None:
        """Return one reading's number if it is fresh, or at most `within` seconds old; None otherwise."""
        found = [r for r in self.readings(name, within) if r.labels == labels]
        return float(found[0].value) if found else None

    def word(self, name: str, within: float = 0.0) -> str:
        """Return the word of a reading of `events.WORDS`; "" without one."""
        return next((w for r in self.readings(name, within) for w in r.labels.values()), "")

    @cached_property
    def life(self) -> Signs:
        """The same with all that is on record: what comes back is counted over a device's life."""
        return replace(self, held=math.inf)

    def seen(self, kind: str, within: float = math.inf, reading: str = "", /, **labels: str) -> list[Event]:
        """Return the events of a kind, at most `held` and `within` seconds old; of a reading with these labels."""
        return [
            e
            for e in self.by_kind.get(kind, ())
            if self.now - e.last <= within
            and (not reading or e.reading == reading)
            and labels.items() <= e.labels.items()
        ]

    def named(self, kind: str, name: str, within: float = math.inf) -> list[Event]:
        """Return the events of a kind and name, at most `within` seconds old."""
        return [e for e in self.seen(kind, within) if e.name == name]

    def rises(self, name: str, within: float = math.inf, /, **labels: str) -> list[Event]:
        """Return the rises of a counter that has at least these labels."""
        return self.seen(EventKind.COUNTER, within, name, **labels)

    def moment(self, at: float) -> str:
        """Return a time in words: the date, for a finding is read long after "a minute ago" was true."""
        return format_utc(min(max(at, EPOCH), self.now))

    @cached_property
    def boots(self) -> list[float]:
        """When the machine was restarted, ascending."""
        return sorted({t for e in self.seen(EventKind.BOOT) for t in (e.first, e.last)})

    @cached_property
    def resets(self) -> list[float]:
        """When the device was reset, its driver reloaded, or the machine restarted, at the latest; ascending.

        A restart of the machine is one reset, though the first poll after it finds the device's counters at zero.
        """
        found = {*self.boots}
        for event in self.seen(EventKind.RESET):
            since = _reset_since(event)
            if not any(since <= boot <= event.last for boot in self.boots):
                found.add(event.last)
            if event.first < since and not any(event.first - HOUR < boot <= event.first for boot in self.boots):
                found.add(event.first)
        return sorted(found)

    @cached_property
    def _since(self) -> Mapping[float, float]:
        """Reset that two polls showed → the older one's time: it came after that, at an unknown time."""
        return {e.last: _reset_since(e) for e in self.seen(EventKind.RESET)}

    def followed(self, after: float, resets: Sequence[float]) -> list[float]:
        """Return those of the `resets` that certainly came after a time, such as that of the poll before a reset."""
        return [r for r in resets if r > after and (r in self.boots or self._since.get(r, r) >= after)]

    @cached_property
    def trainings(self) -> list[float]:
        """When links had to train: at a reset, until the poll that shows it, and when MIG was switched; ascending."""
        shown = (t for e in self.seen(EventKind.RESET) for t in (e.first, e.last))
        return sorted({*self.boots, *shown, *(e.last for e in self.seen(EventKind.FLAG, HELD, "mig_enabled"))})

    @property
    def is_of_nvidia(self) -> bool:
        """Whether NVIDIA's documents hold for the device."""
        return self.device.backend.endswith("cuda")

    def advised(self, action: str, source: str) -> str:
        """Return what a document of NVIDIA advises, as a sentence; for another vendor's device it is canaryd's rule."""
        by = source if self.is_of_nvidia else "canaryd's own rule"
        return f"Recommended: {action} ({by})."

    def trained(self, event: Event, start: float, end: float) -> float:
        """Return `within`, without what happened before the device's links had trained."""
        before = bisect.bisect_right(self.trainings, event.last)
        return within(event, max(start, self.trainings[before - 1] + TRAINING) if before else start, end)

    def most(
        self, events: Sequence[Event], seconds: float, inside: Callable[[Event, float, float], float] = within
    ) -> float:
        """Return the largest count in any window of so many seconds that ended within `telemetry.settle`.

        So a rate near its limit does not switch its finding on and off.
        """
        ends = {self.now, *(e.last for e in events if self.now - e.last <= self.policy.settle)}
        return max(sum(inside(e, end - seconds, end) for e in events) for end in ends)

    def passed(self, after: float) -> bool:
        """Whether exact tests ran after a time, and all of them were clean."""
        wrong = self.last_mismatch is not None and self.last_mismatch > after
        return self.last_pass is not None and self.last_pass > after and not wrong

    def failed_to_start(self, reset: float) -> bool:
        """Whether the driver could not start the device at a reset or since, and it has not been read after that."""
        tried = [e.last for e in self.seen("driver") if e.name in NO_START]
        read = max((p.completed.started for p in self.polls.values() if p.completed), default=-math.inf)
        return bool(tried) and max(tried) >= reset and max(tried) > read

    def cleared(self, after: float, resets: Sequence[float]) -> bool:
        """Whether a reset was done after a time, and the exact tests since that reset are clean."""
        return any(self.passed(r) for r in self.followed(after, resets))

    def uncleared(self, events: Iterable[Event], resets: Sequence[float]) -> list[Event]:
        """Return the events that no such reset, with a clean exact test after it, has cleared; oldest first."""
        return sorted((e for e in events if not self.cleared(e.last, resets)), key=lambda e: e.last)

    @cached_property
    def incidents(self) -> list[Incident]:
        """The Xids by code and grade. Xid 154 is the driver's advice: only the newest one holds."""
        groups: dict[tuple[int, str], list[Event]] = defaultdict(list)
        apart = {id(e) for e in (*self.losses, *self.memory_lost, *self.hits)}
        events = [e for e in self.seen("xid") if id(e) not in apart]
        advice = [e for e in events if e.code in ADVICE]
        for event in (*(e for e in events if e.code not in ADVICE), *advice[-1:]):
            number = -1 if event.code is None else event.code
            groups[number, _grade(event, self.device, self.policy)].append(event)
        return [Incident(xid=xids.explain(c), grade=g, events=tuple(es)) for (c, g), es in sorted(groups.items())]

    @cached_property
    def losses(self) -> list[Event]:
        """The events in which the kernel or the driver lost the device from the bus."""
        found = [*self.seen(EventKind.OFF_BUS), *self.named("amdgpu", "lost"), *self._with_own_rule(OFF_BUS)]
        return sorted(found, key=lambda e: e.last)

    def trouble(self, like: Callable[[Signs], Sequence[Event]]) -> Trouble:
        """Return when this device and the others of this host had events that are `like` each other."""
        others = {name: spans(like(signs), of_others=True) for name, signs in sorted(self._others.items())}
        theirs = Trouble((), {n: spans(signs.changes) for n, signs in self._others.items() if n in self.siblings})
        changed = sorted(at.last for at in spans(self.changes) if theirs.with_it(at))
        return Trouble(own=spans(like(self)), others=others, siblings=self.siblings, changes=changed, now=self.now)

    @cached_property
    def changes(self) -> list[Event]:
        """The changes of the device's software and hardware."""
        return [e for e in self.seen(EventKind.CHANGE) if e.name != "device"]

    def of_codes(self, codes: Collection[int | None]) -> Trouble:
        """Return when the devices of this host had one of these Xids; cached, since each line is asked about."""
        if (known := tuple(codes)) not in self._troubles:
            self._troubles[known] = self.trouble(lambda signs: [e for e in signs.seen("xid") if e.code in codes])
        return self._troubles[known]

    @cached_property
    def _troubles(self) -> dict[tuple[int | None, ...], Trouble]:
        return {}

    @cached_property
    def _others(self) -> Mapping[str, Signs]:
        """The other devices of this host: what happened to them, and no more.

        Events of an hour are one, and a loss may be an hour after another: theirs count longer, so that company does
        not end before its occasion.
        """
        held = self.held + 2 * HOUR
        return {n: replace(self, events=tuple(events), beside={}, held=held) for n, events in self.beside.items()}

    @cached_property
    def counted_losses(self) -> list[Event]:
        """The rises of the device's own counts of uncorrected memory errors."""
        return [e for name in ECC for e in self.rises(name, kind="uncorrected")]

    @cached_property
    def marks(self) -> list[Event]:
        """What shows that the device's own memory lost data: it counted errors, or rows or pages are to be replaced."""
        flags = [e for e in self.seen(EventKind.FLAG) if e.reading.startswith(("row_remap_", "retired_pages_"))]
        remapped = [e for e in self.seen("xid") if e.code in REMAPPED]
        return [*self.counted_losses, *(e for e in flags if e.after != "0"), *remapped]

    @cached_property
    def memory_lost(self) -> list[Event]:
        """The events in which the driver reported an uncorrected memory error: under several codes, one fault."""
        hits = set(map(id, self.hits))
        return [e for e in self._with_own_rule(MEMORY_LOST) if id(e) not in hits]

    @cached_property
    def hits(self) -> list[Event]:
        """The Xids that say that an error reached the device, and that other devices had an error with.

        Not where the device had an error of its own at that time.
        """
        found: list[Event] = []
        for code, explained in HIT.items():
            own = [e for e in self.seen("xid") if e.code in explained and e.code in (*OWN_MEMORY, *OWN_LINK)]
            mine, theirs = Trouble((), {"own": spans([*self.marks, *own])}), self.of_codes(explained)
            for e in self._with_own_rule((code,)):
                found += [e] * all(theirs.with_it(at) and not mine.with_it(at) for at in spans([e]))
        return found

    def _with_own_rule(self, codes: Sequence[int]) -> list[Event]:
        """Return the events of Xids with a rule of their own, without those that the configuration grades."""
        return [e for e in self.seen("xid") if e.code in codes and str(e.code) not in self.policy.xids]


def stale_after(period: float) -> float:
    """Return the age in seconds beyond which a poll is stale; one missed poll is no gap (ours)."""
    return max(120.0, 5 * period)


def sentence(text: str) -> str:
    """Return a clause of ours as a sentence: with a capital letter and one full stop; "" stays ""."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def source_of(event: Event) -> str:
    """Return what shows an event as a sentence: a counter's rise, or the newest line of the kernel log; "" for none."""
    source = {EventKind.COUNTER: "Counter", EventKind.BOOT: "Seen by canaryd"}.get(event.kind, "Kernel log")
    return f"{source}: {event.detail.rstrip('.')}." if event.detail else ""


def lost_because(run: Run | None) -> str:
    """Return why a poll's device counts as lost; "" where it does not."""
    return reason_of(run) if run is not None and run.reason is Reason.DEVICE_LOST else ""


def _reset_since(event: Event) -> float:
    """Return when the newest reset of an event came at the earliest; releases before 0.2 did not note it."""
    with contextlib.suppress(ValueError):
        return min(float(event.fields.get(RESET_SINCE, "")), event.last)
    return event.last


def spans(events: Iterable[Event], *, of_others: bool = False) -> list[Moment]:
    """Return when events happened: of equal ones, which are one for an hour, the first and the last.

    A loss that polls show came at an unknown time between two of them, and others may have had a third line at any.
    """
    return [
        span
        for e in events
        for span in (
            [Moment(e.first, e.last)]
            if e.kind == EventKind.OFF_BUS or (of_others and e.kind != EventKind.COUNTER and e.count > 2)
            else dict.fromkeys((Moment(e.first, e.first), Moment(e.last, e.last)))
        )
    ]


def is_in_hive(device: Device) -> bool:
    """Return whether a device's peers are reset with it (AMD SMI's guide, "GPU reset behavior on XGMI systems")."""
    return device.backend == "rocm" and "Instinct" in device.model


def drain_and_reset(signs: Signs, found: Company = ALONE, shared: str = "power, riser, fabric, driver") -> str:
    """Return what to do where a reset helps, for all that it reaches; `shared`: what to check where others had it."""
    if is_in_hive(signs.device) and signs.siblings:
        return "Drain every device of this node (they are reset together), then reset."
    together = f"Send none back; check {shared}; drain all and reset them together."
    return together if found.names else DRAIN_AND_RESET


def escalated(cause: Cause) -> str:
    """Return what trouble that keeps coming back calls for, as a sentence; "" where the part may be sound."""
    return "Recommended: RMA (gpud's escalation rule, adopted by canaryd)." if cause is Cause.HARDWARE else ""


def recovery(signs: Signs, at: float | None, resets: Sequence[float], action: str) -> tuple[str, str, Remedy | None]:
    """Return what to do about a suspicion as old as `at` (None: it still holds), when it clears, and the remedy.

    That is `action` until one of the `resets` came, and an exact test from then on if the driver started the device.
    """
    remedy = Remedy.REBOOT if resets is signs.boots else Remedy.RESET
    what = remedy.value
    if at is not None and (since := signs.followed(at, resets)):
        if signs.failed_to_start(since[-1]):
            failed = f"The driver could not start the device after the {what}."
            return NOT_STARTED, f"{failed} Clears after a clean exact test, once the driver starts it.", Remedy.REBOOT
        clears = f"There was a {what} since. Clears after a clean exact test that starts after the {what}."
        return f"Run an exact test: canaryd check --device {signs.device.name}", clears, None
    return action, f"Clears after a {what} and then a clean exact test.", remedy


def _grade(event: Event, device: Device, policy: TelemetryConfig) -> str:
    """Return what an Xid calls for: by the configuration, by its line, or by the catalogue."""
    if str(event.code) in policy.xids:
        return policy.xids[str(event.code)]
    if event.code in ADVICE and (action := event.fields.get("action", "").replace("-", "_")):
        # A reset is the stricter reading of an action that is not known.
        return "none" if action in NO_FAULT else RECOVERY.get(action, ("reset", ""))[0]
    return (decode_xid(event, device) or xids.explain(event.code)).grade


def decode_xid(event: Event, device: Device) -> xids.Decoded | None:
    """Return the rows of NVIDIA's table that match an NVLink 5 error; None for other Xids and without a row."""
    if event.code is None:
        return None
    unit, info, status = (event.fields.get(k, "") for k in ("unit", "intr_info", "error_status"))
    found = xids.decode(event.code, unit, info, status, device.detail.get("driver", ""))
    return found if found.rows else None
