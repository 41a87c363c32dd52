"""The judgement of telemetry: from what a device says about itself to events, and from these to findings.

Everything is a pure function. `changes` and `happened` turn polls and lines of the kernel log into events, `RULES` turn
events and the newest polls into findings. docs/telemetry.md has the rules as a table, each with its source and with
why it raises no false alarm. A finding whose state is healthy is a *note*: shown, never held against the device.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property

from canaryd import xids
from canaryd.chance import EPOCH
from canaryd.config import TelemetryConfig
from canaryd.events import HARMFUL, fields_of, has, numbers, taken_apart, within, xid_code
from canaryd.model import Cause, Device, Event, Finding, Outcome, Reading, Run, State
from canaryd.readings import READINGS
from canaryd.wording import spoken

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
WATCH = 30 * DAY
"""Seconds for which an event is held against a device: the design's 30 days for `suspect`."""
AHEAD = MINUTE
"""Seconds by which a poll may be dated in the future and still tell of the present: clocks are set (ours)."""
TRAINING = 10 * MINUTE
"""Seconds after a reset in which links train and the fabric forms: errors there are no faults (ours)."""
APART = MINUTE
"""Seconds between two occasions of one Xid: a burst of lines is one fault (ours, as `judge.repeat_gap`)."""
LASTING, STRETCH = MINUTE, 10 * MINUTE
"""Seconds for which a passing condition must have held, and within how many: two polls at least, so one odd reading is
none, and neither are blips here and there (ours)."""
LEAST_STEP, TIMES_MEAN = 100, 10
"""Corrected errors in a day that are a step, when they are also so many times the mean day before (ours)."""
MOST_RETIRED, MANY_DOUBLE_BIT = 63, 15
"""Retired pages: DCGM's limit, and its softer limit for those with double-bit errors (DcgmGPUHardwareLimits.h)."""
MOST_REMAPPED = 512
"""Rows remapped for uncorrectable errors: NVIDIA's RMA policy, and DCGM's limit."""
BIT_ERROR_RATE = 1e-12
"""Errors per bit that PCI Express allows; from it DCGM derives its limit of replays."""
TRANSFERS = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9, 7: 128e9}
"""PCI Express generation → transfers per second and lane (PCI Express Base Specifications 1.0 to 7.0)."""
CRC_PER_SECOND = 100
"""NVLink CRC errors: DCGM's limit (DcgmGPUHardwareLimits.h)."""
CPU_THROTTLES = 10
"""Times in `telemetry.settle` that processors slow down for heat (ours): less is a fan that catches up."""
MACHINE_CHECKS = 10
"""Corrected machine checks in a day: mcelog's default for a memory module, taken for all (ours)."""
REPEATS = 3
"""Occasions of an application's Xid in a day that are no single crash (ours; NVIDIA's workflows say "repeat")."""
RECURRENCES = 2
"""Resets or reboots after which the same Xid has come back: gpud's escalation to an inspection of the hardware."""


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


# --- Rules: is there fresh telemetry at all? --------------------------------------------------------------------------

OUTCOMES: Mapping[Outcome, tuple[Cause, str]] = {
    Outcome.TIMED_OUT: (Cause.UNDETERMINED, "a call into the driver hung"),
    Outcome.UNKILLABLE: (Cause.UNDETERMINED, "a call into the driver hangs and survives SIGKILL"),
    Outcome.CRASHED: (Cause.UNDETERMINED, "the vendor's library took its worker down"),
    Outcome.OUT_OF_MEMORY: (Cause.ENVIRONMENT, "memory ran out"),
    Outcome.SKIPPED: (Cause.ENVIRONMENT, "it cannot be asked"),
    Outcome.ERRORED: (Cause.HARNESS, "the probe raised an error"),
    Outcome.GARBLED: (Cause.HARNESS, "the worker answered what is not the protocol"),
}
"""What a failed poll is blamed on, and in words."""


def telemetry_stale(signs: Signs) -> Iterator[Finding]:
    """No poll has completed for too long; one failed poll alone says nothing."""
    for probe, poll in sorted(signs.polls.items()):
        times = (poll.since, poll.completed.started if poll.completed else poll.since)
        seen = max((t for t in times if t <= signs.now + AHEAD), default=None)
        if lost_because(poll.newest) or (seen is not None and signs.now - seen <= stale_after(poll.period)):
            continue
        cause, why = Cause.HARNESS, "none was made; is the daemon overloaded or stopped?"
        if poll.newest is not None and poll.newest.outcome in OUTCOMES:
            cause, why = OUTCOMES[poll.newest.outcome]
            why = ": ".join(filter(None, (why, reason_of(poll.newest))))
        since = "since the clock was set back" if seen is None else f"for {spoken(signs.now - seen)}"
        text = f"{probe}: no poll has completed {since} ({poll.failures} failed in a row): {why}"
        yield _finding("telemetry-stale", State.UNKNOWN, cause, text, probe)


def gpu_lost(signs: Signs) -> Iterator[Finding]:
    """The driver or the kernel says that the device is lost; it stands until a reboot and an exact pass."""
    lost = [f"{probe}: {why}" for probe, poll in sorted(signs.polls.items()) if (why := lost_because(poll.newest))]
    events = signs.losses
    times = [t for e in events for t in (e.first, e.last)] + [signs.now] * bool(lost)
    if not times:
        return
    what = "; ".join([*lost, *(f"the kernel log, {signs.moment(e.last)}: {e.detail.rstrip('.')}" for e in events[-1:])])
    if any(p.completed is not None and p.completed.started > max(times) for p in signs.polls.values()):
        what += ". It answers again"
    if _returns(times, signs.boots) >= 1:
        text = (
            f"lost again after a reboot, within 30 days: {what}. Inspection-class (NVIDIA's Xid catalogue: contact "
            "support): look at seating, riser, power and slot, and return the part if the fault goes with it (ours)"
        )
        yield _finding("gpu-lost", State.FAULTY, Cause.HARDWARE, text)
    elif lost or not signs.cleared(max(times), signs.boots):
        text = f"lost: {what}. Reboot-class (NVIDIA's Xid catalogue): restart the machine. "
        yield _finding("gpu-lost", State.SUSPECT, Cause.HARDWARE, text + _until(signs, max(times), signs.boots))


# --- Rules: memory of an accelerator ----------------------------------------------------------------------------------


RETURN = (
    "RMA-class: NVIDIA's RMA policy asks for a run of the field diagnostic, which decides on the return. "
    "Take the device out of service"
)
STANDING: Mapping[str, tuple[str, float, State, str]] = {
    "row_remap_failed": (
        *("row-remap-failed", WATCH, State.FAULTY),
        f"a memory row could not be replaced by a spare one. {RETURN}",
    ),
    "ecc_sram_threshold_exceeded": (
        *("sram-threshold", WATCH, State.FAULTY),
        f"the device counts more uncorrectable SRAM errors than its threshold allows. {RETURN}",
    ),
    "row_remap_pending": (
        *("row-remap-pending", 0.0, State.DEGRADED),
        "a memory row waits to be replaced. Reset-class (NVIDIA's memory error management): drain the device, reset it",
    ),
    "retired_pages_pending": (
        *("retired-pages-pending", 0.0, State.DEGRADED),
        "a memory page waits to be retired. Reset-class (NVIDIA's page retirement): drain the device, reset it",
    ),
    "memory_bad_pages{status=pending}": (
        *("memory-bad-pages", 0.0, State.DEGRADED),
        "bad memory pages wait to be taken out of use. Reset-class (AMD): drain the device, load its driver again",
    ),
}
"""Reading that is above 0 → (rule, age in seconds up to which a poll tells it, state, words); 0 is `telemetry.settle`.

Some flags never fall on the same part, so a driver that hangs afterwards must not lift the finding.
"""


def standing(signs: Signs) -> Iterator[Finding]:
    """The device itself says that its memory needs a reset or a return."""
    for key, (rule, age, state, text) in STANDING.items():
        name, labels = taken_apart(key)
        if signs.value(name, age or signs.policy.settle, **labels):
            yield _finding(rule, state, Cause.HARDWARE, text)


def row_remap_exhausted(signs: Signs) -> Iterator[Finding]:
    """Spare rows run out: in a bank, or in all."""
    rows = signs.value("row_remap_rows", WATCH, cause="uncorrectable") or 0
    banks = signs.value("row_remap_banks", WATCH, available="none") or 0
    if rows >= MOST_REMAPPED:
        text = (
            f"{rows:g} memory rows were replaced after uncorrectable errors; NVIDIA's RMA policy and DCGM's limit are "
            f"{MOST_REMAPPED}. RMA-class: run the field diagnostic; it decides on the return"
        )
        yield _finding("row-remap-exhausted", State.FAULTY, Cause.HARDWARE, text)
    elif banks:
        text = (
            f"{banks:g} memory banks have no spare row left: a bad row there cannot be replaced. Plan a return (ours)"
        )
        yield _finding("row-remap-exhausted", State.DEGRADED, Cause.HARDWARE, text)


def retired_pages(signs: Signs) -> Iterator[Finding]:
    """Pages of memory were taken out of use, on devices that cannot replace rows."""
    pages = {r.labels.get("cause", ""): float(r.value) for r in signs.readings("retired_pages", WATCH)}
    if sum(pages.values()) >= MOST_RETIRED:
        text = f"{sum(pages.values()):g} memory pages are retired; DCGM's limit is {MOST_RETIRED}. "
        text += "RMA-class: run the field diagnostic"
        yield _finding("retired-pages", State.FAULTY, Cause.HARDWARE, text)
    elif pages.get("double_bit", 0) >= MANY_DOUBLE_BIT:
        text = (
            f"{pages['double_bit']:g} memory pages are retired after double-bit errors; DCGM's softer limit is "
            f"{MANY_DOUBLE_BIT}. Beyond it, more than one a week calls for a return"
        )
        yield _finding("retired-pages", State.DEGRADED, Cause.HARDWARE, text)


ECC = ("ecc_errors_total", "ecc_aggregate_errors_total")
"""The same errors counted twice: since the driver was loaded, and over the device's life."""


def uncorrected_error(signs: Signs) -> Iterator[Finding]:
    """Data was lost and the device said so: suspect until a reset and an exact pass after it."""
    rises = [e for name in ECC for e in signs.rises(name, kind="uncorrected")]
    wiped = [e for e in signs.seen("reset") if has(e.before.partition(" ")[0], ECC[0], {"kind": "uncorrected"})]
    logged = [*signs.contained, *(e for e in signs.seen("amdgpu") if e.name == "ras-uncorrected")]
    events = [e for e in (*rises, *logged) if not signs.cleared(e.last, signs.resets)]
    events += [e for e in wiped if not signs.passed(e.last)]
    standing = [r for r in signs.readings(ECC[0]) if r.labels.get("kind") == "uncorrected" and r.value]
    if not events and not standing:
        return
    keys = [*(e.before.partition(" ")[0] if e.kind == "reset" else e.name for e in events), *(r.key for r in standing)]
    places = sorted({taken_apart(k)[1].get("location", "the device's memory") for k in keys})
    when = max((e.last for e in events), default=None)
    before_reset = max((e.last for e in events if e.kind != "reset"), default=0.0 if events else None)
    text = f"uncorrected memory error in {', '.join(places)}, "
    text += "counted since the driver was loaded" if when is None else f"last {signs.moment(when)}"
    text += ". Reset-class (NVIDIA's memory error management): drain the device, reset it. "
    yield _finding("uncorrected-error", State.SUSPECT, Cause.HARDWARE, text + _until(signs, before_reset, signs.resets))


def corrected_errors_rising(signs: Signs) -> Iterator[Finding]:
    """Corrected errors come at a rate, or in a step: the numbers are still right, the reserve dwindles."""
    day, before, most = 0.0, 0.0, signs.policy.corrected_per_day
    rises = [e for name in ECC for e in signs.rises(name, kind="corrected")]
    first = min((e.first for e in rises), default=signs.now)
    days = max(1.0, (signs.now - first) / DAY - 1)
    for place in {taken_apart(e.name)[1].get("location", "") for e in rises}:
        # Volatile and aggregate count the same errors: the larger of the two, never their sum.
        both = [[e for e in rises if has(e.name, name, {"location": place})] for name in ECC]
        day += max(signs.most(each, DAY) for each in both)
        before += max(sum(within(e, -math.inf, signs.now - DAY) for e in each) for each in both)
    step = day >= LEAST_STEP and day >= TIMES_MEAN * before / days
    if day >= most or step:
        text = f"{day:.0f} corrected memory errors in a day, after {before / days:.3g} a day before; "
        text += f"our limits are {most} (telemetry.corrected_per_day), or {TIMES_MEAN} times as many. "
        text += (
            "NVIDIA's RMA policy leaves corrected errors out. Exact goldens tell whether the numbers hold. "
            f"Over after a day below it and {spoken(signs.policy.settle)}"
        )
        yield _finding("corrected-errors-rising", State.DEGRADED, Cause.HARDWARE, text)


# --- Rules: memory and processors of the host -------------------------------------------------------------------------


def dimm_errors_rising(signs: Signs) -> Iterator[Finding]:
    """A memory module of the host has more corrected errors in a day than mcelog's default allows."""
    modules: dict[str, list[Event]] = defaultdict(list)
    for event in signs.rises("edac_errors_total", kind="corrected"):
        modules[event.name].append(event)
    for key, events in sorted(modules.items()):
        if (day := signs.most(events, DAY)) >= signs.policy.dimm_corrected_per_day:
            where = " of controller ".join(taken_apart(key)[1].get(k, "?") for k in ("dimm", "controller"))
            text = f"memory module {where}: {day:.3g} corrected errors in a day. The limit is "
            text += f"{signs.policy.dimm_corrected_per_day} (telemetry.dimm_corrected_per_day). Plan to replace it"
            yield _finding("dimm-errors-rising", State.DEGRADED, Cause.HARDWARE, text)


def host_uncorrected(signs: Signs) -> Iterator[Finding]:
    """The host's memory lost data: every golden and every operand goes through it."""
    events = [
        *signs.rises("edac_errors_total", kind="uncorrected"),
        *(e for e in signs.seen("edac") if e.name == "uncorrected"),
    ]
    open_ = [e for e in events if not signs.cleared(e.last, signs.boots)]
    standing = [r for r in signs.readings("edac_errors_total") if r.labels.get("kind") == "uncorrected" and r.value]
    if open_ or standing:
        when = max((e.last for e in open_), default=None)
        text = f"uncorrected error in the host's memory: {open_[-1].detail if open_ else standing[0].key}. "
        text += "Reboot-class (ours): find the module, replace it, restart the machine. "
        yield _finding("host-uncorrected-error", State.SUSPECT, Cause.HARDWARE, text + _until(signs, when, signs.boots))


def machine_check(signs: Signs) -> Iterator[Finding]:
    """A processor of the host reported an error of its own."""
    lines = signs.seen("mce")
    events = [*signs.rises("machine_check_exceptions_total"), *(e for e in lines if e.name == "uncorrected")]
    open_ = [e for e in events if not signs.cleared(e.last, signs.boots)]
    # "logged" tells no severity; what a processor could not correct would have been an exception.
    corrected = signs.most([e for e in lines if e.name != "uncorrected"], DAY)
    if open_:
        newest = max(open_, key=lambda e: e.last)
        text = f"machine check {signs.moment(newest.last)}: {newest.detail.rstrip('.')}. "
        text += "Reboot-class (ours): decode it, restart. "
        yield _finding("machine-check", State.SUSPECT, Cause.HARDWARE, text + _until(signs, newest.last, signs.boots))
    elif corrected >= MACHINE_CHECKS:
        text = (
            f"{corrected:.3g} machine checks in a day, corrected; the limit is {MACHINE_CHECKS} (mcelog's, for memory)"
        )
        yield _finding("machine-check", State.DEGRADED, Cause.HARDWARE, text)


# --- Rules: Xids and SXids --------------------------------------------------------------------------------------------


def xid_application(signs: Signs) -> Iterator[Finding]:
    """An Xid that an application can cause: a note, with what exact goldens said since. Forgotten after a day."""
    for incident in signs.incidents:
        if incident.grade == "application" and signs.now - incident.last <= DAY and not _repeated(signs, incident):
            wrong = signs.last_mismatch is not None and signs.last_mismatch > incident.last
            cause = Cause.SOFTWARE if signs.passed(incident.last) else Cause.UNDETERMINED
            text = f"{incident} {signs.moment(incident.last)}. Application-class: {_advice(signs, incident)}. "
            state = State.SUSPECT if wrong else State.HEALTHY
            yield _finding("xid-application", state, cause, text + _since(signs, incident))


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
            yield _finding("xid-repeated", State.DEGRADED, Cause.UNDETERMINED, text)


def xid_recovery(signs: Signs) -> Iterator[Finding]:
    """An Xid that calls for a reset or a reboot: suspect until that and an exact pass; faulty when it keeps coming."""
    for incident in signs.incidents:
        if incident.grade not in ("reset", "reboot"):
            continue
        cuts = signs.boots if incident.grade == "reboot" else signs.resets
        times = [t for e in incident.events for t in (e.first, e.last)]
        back = _returns(times, signs.resets)
        # What a driver's bug can cause comes back on a sound part too, however often it is reset.
        if back >= RECURRENCES and incident.cause is Cause.HARDWARE:
            text = (
                f"{incident} came back after {back} resets or reboots within 30 days. RMA-class (gpud's escalation, "
                f"ours): inspect the hardware, run the field diagnostic. {_advice(signs, incident)}"
            )
            yield _finding("xid-recurring", State.FAULTY, Cause.HARDWARE, text)
        elif not signs.cleared(incident.last, cuts):
            again = f", {back} times after a reset" if back else ""
            text = f"{incident} {signs.moment(incident.last)}{again}. {incident.grade.capitalize()}-class: "
            text += f"{_advice(signs, incident)}. "
            yield _finding("xid-recovery", State.SUSPECT, incident.cause, text + _until(signs, incident.last, cuts))


def xid_inspect(signs: Signs) -> Iterator[Finding]:
    """An Xid that calls for somebody to look at the part, or by the configuration for its return."""
    for incident in signs.incidents:
        if incident.grade in ("inspect", "rma"):
            state = State.FAULTY if incident.grade == "rma" else State.SUSPECT
            cause = Cause.HARDWARE if incident.grade == "rma" else incident.cause
            kind = "RMA" if incident.grade == "rma" else "Inspection"
            text = f"{incident} {signs.moment(incident.last)}. {kind}-class: {_advice(signs, incident)}. "
            yield _finding("xid-inspect", state, cause, f"{text}Over after 30 days without another")


def xid_unknown(signs: Signs) -> Iterator[Finding]:
    """An Xid for which NVIDIA names no action that is known here: said for a day."""
    for incident in signs.incidents:
        if incident.grade == xids.UNKNOWN and signs.now - incident.last <= DAY:
            newest = max(incident.events, key=lambda e: e.last)
            text = f"Xid {newest.name.partition(' ')[0]} ({incident.xid.title}) {signs.moment(newest.last)}: "
            text += f"{newest.detail.rstrip('.')}. "
            text += f"{_advice(signs, incident)}. Grade it under telemetry.xids. Over after a day"
            yield _finding("xid-unknown", State.DEGRADED, Cause.UNDETERMINED, text)


def xid_noted(signs: Signs) -> Iterator[Finding]:
    """Xid 92 asks for nothing, but it tells of many corrected errors."""
    for incident in signs.incidents:
        if incident.xid.code == 92 and incident.grade == "none" and signs.now - incident.last <= DAY:
            text = f"{incident} {signs.moment(incident.last)}. {_advice(signs, incident)}. The counters tell the rate"
            yield _finding("xid-noted", State.HEALTHY, Cause.HARDWARE, text)


def sxid(signs: Signs) -> Iterator[Finding]:
    """An NVSwitch reported an error of its links. Links check what they carry: numbers do not go wrong in silence."""
    for event in signs.seen("sxid", DAY):
        fatal = event.name.endswith(" fatal")
        text = f"NVSwitch error SXid {event.name} {signs.moment(event.last)}: {event.detail.rstrip('.')}. "
        text += "Reset-class (NVIDIA's Fabric Manager guide): reset switches and GPUs" if fatal else "Nothing to do"
        state = State.DEGRADED if fatal else State.HEALTHY
        yield _finding("sxid", state, Cause.HARDWARE, f"{text}. Over after a day")


# --- Rules: heat, power, links ----------------------------------------------------------------------------------------


def throttled(signs: Signs) -> Iterator[Finding]:
    """Heat or power held the clocks down for longer than the policy allows: slow, and right."""
    settle, seconds = signs.policy.settle, {}
    for reason in HARMFUL:
        rises = signs.rises("throttle_seconds_total", 2 * settle, reason=reason)
        seconds[reason] = signs.most([*rises, *signs.seen("condition", 2 * settle, f"throttle {reason}")], settle)
    # Not the sum: hw_slowdown counts again what hw_thermal and hw_power_brake count.
    reason, longest = max(seconds.items(), key=lambda item: item[1])
    if longest >= signs.policy.throttle:
        text = (
            f"held down by {reason} for {spoken(longest)} within {spoken(settle)}; the limit is "
            f"{spoken(signs.policy.throttle)} (telemetry.throttle, ours). Look at cooling and power"
        )
        yield _finding("throttled", State.DEGRADED, Cause.ENVIRONMENT, text)
    told = [signs.rises("throttle_events_total", 2 * settle, scope=scope) for scope in ("core", "package")]
    if not signs.readings("throttle_events_total", WATCH):
        told.append(signs.seen("thermal", 2 * settle))  # a line for each processor: only where nothing counts
    times = max(signs.most(events, settle) for events in told)
    if times >= CPU_THROTTLES:
        text = (
            f"processors slowed down for heat {times:.3g} times within {spoken(settle)}; our limit is {CPU_THROTTLES}"
        )
        yield _finding("throttled", State.DEGRADED, Cause.ENVIRONMENT, text)


CONDITIONS: Mapping[str, tuple[str, str]] = {
    "hot": ("hot", "The device slows down to save itself (its own threshold); look at cooling"),
    "pcie-width": (
        "pcie-width",
        "The link lost lanes (ours): seat the device again; if it stays, look at riser, slot and board",
    ),
    "pcie-generation": (
        "pcie-generation",
        "The link is slower than both ends can do under load (ours): look at seating, riser and BIOS",
    ),
    "memory-pressure": (
        "memory-pressure",
        "The host runs out of memory (ours): probes time out, and processes will be killed",
    ),
}
"""Passing condition → (rule, advice)."""


def conditions(signs: Signs) -> Iterator[Finding]:
    """A condition that comes and goes has held for a minute of ten, and not been away for long."""
    for name, (rule, advice) in CONDITIONS.items():
        events = signs.seen("condition", signs.policy.settle + STRETCH, name)
        if signs.most(events, STRETCH) >= LASTING:
            newest = max(events, key=lambda e: e.last)
            over = f"Over {spoken(signs.policy.settle)} after it last held for a minute of ten"
            text = f"{newest.detail}, last {signs.moment(newest.last)}. {advice}. {over}"
            yield _finding(rule, State.DEGRADED, Cause.ENVIRONMENT, text)


def replay_limit(generation: float, lanes: float) -> float:
    """Return the replays per minute that a bit error rate of 1e-12 explains; 31 for generation 5 with 16 lanes."""
    return math.ceil(BIT_ERROR_RATE * TRANSFERS.get(int(generation), TRANSFERS[5]) * lanes * MINUTE)


def pcie_errors(signs: Signs) -> Iterator[Finding]:
    """The link to the host repairs more errors than it may, or reports some that it cannot repair."""
    lanes, generation = (signs.value(f"pcie_{k}_max", WATCH) or d for k, d in (("width", 16), ("generation", 5)))
    limit = replay_limit(generation, lanes)
    # Over ten minutes, where DCGM takes one: a single burst is no rate (ours).
    span = 10 * MINUTE
    repaired = {
        "packets sent again": signs.rises("pcie_replays_total", signs.policy.settle + span),
        "correctable errors": signs.rises("pcie_aer_errors_total", signs.policy.settle + span, severity="correctable"),
    }
    for what, events in repaired.items():
        if (rate := signs.most(events, span, signs.trained) * MINUTE / span) > limit:
            text = f"{rate:.3g} {what} a minute on PCI Express; DCGM's limit for this link is {limit:g} "
            text += f"(bit error rate 1e-12). Look at seating, riser and slot. {_over(signs)}"
            yield _finding("pcie-replays", State.DEGRADED, Cause.HARDWARE, text)
    for severity, state in (("fatal", State.SUSPECT), ("nonfatal", State.DEGRADED)):
        events = [
            *signs.rises("pcie_aer_errors_total", severity=severity),
            *(e for e in signs.seen("aer") if e.name == severity),
        ]
        events = [e for e in events if not signs.cleared(e.last, signs.resets)]
        newest = max(events, key=lambda e: e.last, default=None)
        if newest and (severity == "fatal" or signs.now - newest.last <= DAY):
            over = "Over after a day" if severity == "nonfatal" else _until(signs, newest.last, signs.resets)
            text = f"{severity} PCI Express error {signs.moment(newest.last)}: {newest.detail.rstrip('.')}. "
            text += f"Reset-class (ours): look at seating and slot, then reset. {over}"
            yield _finding("pcie-aer", state, Cause.HARDWARE, text)


def nvlink_errors(signs: Signs) -> Iterator[Finding]:
    """A link between devices had to recover or could not, or repairs more errors than DCGM allows."""
    settle, bad = signs.policy.settle, []
    links: dict[str, list[Event]] = defaultdict(list)
    for event in signs.rises("nvlink_errors_total", 2 * settle):
        links[event.name].append(event)
    for key, events in sorted(links.items(), key=lambda link: ("kind=recovery_failed" not in link[0], link[0])):
        labels = taken_apart(key)[1]
        kind, where = labels.get("kind", ""), f"link {labels.get('link', '?')}"
        times = signs.most(events, settle, signs.trained)
        rate = signs.most(events, MINUTE, signs.trained) / MINUTE
        if kind == "recovery_failed" and signs.now - events[-1].last <= settle and times:
            bad.append(f"{where} could not recover (ours)")
        elif kind in ("replay", "recovery"):
            if times >= 1:
                bad.append(f"{where} had {times:.3g} of kind {kind} (DCGM allows none)")
        elif rate >= CRC_PER_SECOND:
            bad.append(f"{where} had {rate:.3g} of kind {kind} a second (DCGM's limit is {CRC_PER_SECOND})")
    if bad:
        more = f", and {len(bad) - 3} more" if len(bad) > 3 else ""
        text = f"NVLink: {'; '.join(bad[:3])}{more}. Look at both ends of the link. {_over(signs)}"
        yield _finding("nvlink-errors", State.DEGRADED, Cause.HARDWARE, text)


def nvlink_down(signs: Signs) -> Iterator[Finding]:
    """A link that was up is down, or the device left its fabric; also for a while after it came back."""
    # A divided device has its links off, and one that was reset waits for them.
    if signs.value("mig_enabled", signs.policy.settle) or any(signs.now - t <= TRAINING for t in signs.trainings):
        return
    newest = {e.name: e for name in ("nvlink_up", "fabric_ready") for e in signs.seen("flag", start=name)}
    for key, event in sorted(newest.items()):
        name, labels = taken_apart(key)
        down = event.after == "0" and not signs.value(name, **labels)
        fell = (event.after == "0" or event.before == "1") and signs.trained(event, -math.inf, signs.now) > 0
        if down or (fell and signs.now - event.last <= signs.policy.settle):
            what = f"NVLink {labels.get('link', '?')} went down" if labels else "the device left its NVLink fabric"
            text = f"{what} {signs.moment(event.last)} and is {'down still' if down else 'back'}. Ours: look at Fabric "
            text += f"Manager and at the other end. {'Over when it is up again' if down else _over(signs)}"
            yield _finding("nvlink-down", State.DEGRADED, Cause.UNDETERMINED, text)


# --- Rules: what the driver advises, settings, the host ---------------------------------------------------------------


def recovery_action(signs: Signs) -> Iterator[Finding]:
    """The driver itself says what must be done to recover."""
    action = signs.word("recovery_action", signs.policy.settle)
    if action not in ("", "none"):
        kind = "Reboot" if "reboot" in action else "Reset"
        known = re.search("reset|reboot|drain", action) is not None
        text = f"the NVIDIA driver's own advice is {action}. {kind}-class: drain the device and follow it"
        yield _finding("recovery-action", State.SUSPECT if known else State.DEGRADED, Cause.UNDETERMINED, text)


HEALTH = {"warning": State.DEGRADED, "alarm": State.DEGRADED, "critical": State.SUSPECT}
"""What Ascend's driver says of a device; anything else says nothing."""


def device_health(signs: Signs) -> Iterator[Finding]:
    """The driver's own verdict on the device, where it gives one."""
    word = signs.word("device_health", signs.policy.settle)
    if state := HEALTH.get(word.lower()):
        codes = sorted(c for r in signs.readings("device_fault", signs.policy.settle) for c in r.labels.values())
        reason = f"fault {', '.join(codes)}" if codes else "ask npu-smi info -t health for the reason"
        text = f"the driver calls the device's health {word}: {reason} (the vendor's own check)"
        yield _finding("device-health", state, Cause.UNDETERMINED, text)


def device_recovered(signs: Signs) -> Iterator[Finding]:
    """The driver had to restart the device to free it: work was lost, and the application may be the reason."""
    if events := signs.rises("device_recoveries_total", DAY):
        times, last = sum(e.count for e in events), max(e.last for e in events)
        text = (
            f"the driver had to restart the device {times:g} times, last {signs.moment(last)} (ours). Over after a day"
        )
        yield _finding("device-recovered", State.DEGRADED, Cause.UNDETERMINED, text)


def persistence_off(signs: Signs) -> Iterator[Finding]:
    """Without persistence, letting go of the last handle initialises the device anew and clears what should be read."""
    if signs.value("persistence_mode") == 0:
        text = (
            "persistence is off: canaryd keeps one handle, or each poll would initialise the device anew and clear "
            "its error counters. Run nvidia-persistenced, or nvidia-smi -pm 1; canaryd release lets go for an upgrade"
        )
        yield _finding("persistence-off", State.HEALTHY, Cause.ENVIRONMENT, text)


def ecc_off(signs: Signs) -> Iterator[Finding]:
    """Error correction is off where the device has it, or about to change."""
    now, pending = signs.value("ecc_enabled", when="current"), signs.value("ecc_enabled", when="pending")
    if now is not None and pending is not None and now != pending:
        text = f"error correction is {'on' if now else 'off'}, and {'on' if pending else 'off'} after the next reset"
        yield _finding("ecc-off", State.HEALTHY, Cause.ENVIRONMENT, text)
    elif now == 0:
        text = (
            "error correction is off: a flipped bit in memory goes unnoticed. Turn it on: nvidia-smi -e 1, then a reset"
        )
        yield _finding("ecc-off", State.HEALTHY, Cause.ENVIRONMENT, text)


def clock_source(signs: Signs) -> Iterator[Finding]:
    """The kernel gave up the processor's own clock: time is slow to read, and perhaps wrong."""
    left = [e for e in signs.seen("flag", start="clock_source") if e.after != "tsc" and e.before == "tsc"]
    events = [*left, *signs.seen("clock")]
    last = max((e.last for e in events), default=None)
    if last is None or any(b > last for b in signs.boots):
        return
    source = signs.word("clock_source")
    holds = signs.policy.settle if source == "tsc" else WATCH if source else DAY
    if signs.now - last <= holds:
        text = f"the kernel gave up its clock tsc {signs.moment(last)} and uses {source or 'another'}. "
        text += "Ours: update the BIOS, restart the machine"
        yield _finding("clock-source", State.DEGRADED, Cause.ENVIRONMENT, text)


def unclean_reboot(signs: Signs) -> Iterator[Finding]:
    """The machine went down without warning, or left records of a crash."""
    for event in (e for e in signs.seen("boot", DAY) if e.name == "unclean"):
        text = f"the machine started again {signs.moment(event.last)} without having been shut down: {event.detail}"
        yield _finding("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED, text)
    if records := signs.value("crash_records"):
        text = f"{records:g} records of a kernel crash wait in /sys/fs/pstore: read them, then delete them"
        yield _finding("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED, text)


LINES: Mapping[str, tuple[State, Cause, str]] = {
    "oom": (State.HEALTHY, Cause.ENVIRONMENT, "the kernel killed a process for memory"),
    "nvme": (State.HEALTHY, Cause.ENVIRONMENT, "a disk did not answer"),
    "lockup": (State.DEGRADED, Cause.UNDETERMINED, "a processor was stuck in the kernel"),
    "hang": (State.DEGRADED, Cause.UNDETERMINED, "a call into the driver hung"),
    "driver": (
        State.DEGRADED,
        Cause.UNDETERMINED,
        "the driver could not start the device, or does not match its library",
    ),
    "pcie bandwidth": (State.HEALTHY, Cause.ENVIRONMENT, "the device's link is narrower than it could be"),
    "pcie": (State.DEGRADED, Cause.UNDETERMINED, "a PCI Express device does not answer"),
    "amdgpu ring-timeout": (State.DEGRADED, Cause.UNDETERMINED, "the device did not finish its work in time"),
    "amdgpu reset-failed": (State.DEGRADED, Cause.UNDETERMINED, "the driver could not reset the device"),
    "amdgpu init-failed": (State.DEGRADED, Cause.UNDETERMINED, "the driver could not start the device"),
    "amdgpu bad-pages": (State.DEGRADED, Cause.HARDWARE, "bad memory pages have reached the driver's threshold"),
    "amdgpu fault": (State.HEALTHY, Cause.UNDETERMINED, "the device met a bad address, as an application can cause"),
    "amdgpu reset": (State.HEALTHY, Cause.UNDETERMINED, "the driver reset the device"),
}
"""Kind of a kernel-log line, with its name where that matters → what it is worth. Ours."""


def kernel_lines(signs: Signs) -> Iterator[Finding]:
    """Other lines of the kernel log that explain what follows; each for a day."""
    lines: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in (e for events in signs.by_kind.values() for e in events if signs.now - e.last <= DAY):
        lines[event.kind, event.name].append(event)
    for (kind, name), events in lines.items():
        found = LINES.get(f"{kind} {name}") or LINES.get(kind)
        if found is not None:
            state, cause, what = found
            newest, count = max(events, key=lambda e: e.last), sum(e.count for e in events)
            times = f"{count:g} times, last " if count > 1 else ""
            text = f"{what}, {times}{signs.moment(newest.last)}: {newest.detail.rstrip('.')}. Over after a day"
            yield _finding(f"kernel-{kind}", state, cause, text)


def changed(signs: Signs) -> Iterator[Finding]:
    """Something of the machine is another than a day ago: no fault, but it explains what comes later."""
    for event in signs.seen("change", DAY):
        what = event.detail if event.name == "device" else f"{event.name} changed {event.before} → {event.after}"
        text = f"{what}, {signs.moment(event.last)}"
        yield _finding("changed", State.HEALTHY, Cause.NONE, text)
    for event in signs.seen("counter-fell", DAY):
        kind = READINGS.get(taken_apart(event.name)[0])
        why = "it counts for life. Was the board replaced or cleared?"
        if kind is not None and kind.volatile:
            if any(event.first <= boot <= event.last for boot in signs.boots):
                continue
            why = "cleared by hand, at its end, or a part of what it counts is gone; no reset"
        yield _finding("changed", State.HEALTHY, Cause.NONE, f"{event.detail}, {signs.moment(event.last)}: {why}")


RULES: tuple[Callable[[Signs], Iterator[Finding]], ...] = (
    telemetry_stale,
    gpu_lost,
    standing,
    row_remap_exhausted,
    retired_pages,
    uncorrected_error,
    corrected_errors_rising,
    dimm_errors_rising,
    host_uncorrected,
    machine_check,
    xid_application,
    xid_repeated,
    xid_recovery,
    xid_inspect,
    xid_unknown,
    xid_noted,
    sxid,
    throttled,
    conditions,
    pcie_errors,
    nvlink_errors,
    nvlink_down,
    recovery_action,
    device_health,
    device_recovered,
    persistence_off,
    ecc_off,
    clock_source,
    unclean_reboot,
    kernel_lines,
    changed,
)
"""Every rule is asked, in any order."""


def findings(signs: Signs) -> Iterator[Finding]:
    """Yield what each rule finds."""
    return itertools.chain.from_iterable(rule(signs) for rule in RULES)


def _finding(rule: str, state: State, cause: Cause, message: str, probe: str = "") -> Finding:
    return Finding(rule=rule, state=state, cause=cause, message=message, probe=probe)


def lost_because(run: Run | None) -> str:
    """Return the reason of a poll if it says that its device is lost, else ""."""
    reason = reason_of(run) if run is not None and run.outcome is not Outcome.COMPLETED else ""
    # Nothing that merely speaks of another device's loss: only what `canaryd.worker.nvidia.LOST` begins with.
    return reason if reason.startswith("GPU is lost") else ""


def reason_of(run: Run) -> str:
    """Return the line of a run's detail that says why: the end of a traceback, the beginning of anything else."""
    lines = [line.strip() for line in run.detail.splitlines() if line.strip()] or [s.reason for s in run.skipped[:1]]
    return lines[-1 if lines[0].startswith("Traceback") else 0][:300] if lines else ""


def _over(signs: Signs) -> str:
    return f"Over {spoken(signs.policy.settle)} after the last"


def _returns(times: Iterable[float], resets: Sequence[float]) -> int:
    """Return after how many resets (ascending) it happened again."""
    return len({bisect.bisect_left(resets, t) for t in times}) - 1


def _until(signs: Signs, at: float | None, resets: Sequence[float]) -> str:
    """Say what ends a suspicion that is as old as `at`, or that still stands (None)."""
    what = "reboot" if resets is signs.boots else "reset"
    if at is not None and any(r > at for r in resets):
        return f"There was a {what} since; suspect until exact goldens that start after it run clean"
    return f"Suspect until a {what}, and a clean run of exact goldens after it"


def _since(signs: Signs, incident: Incident) -> str:
    """Say what exact goldens have shown since an Xid: what tells a broken device from a broken application."""
    at = incident.last
    if signs.last_mismatch is not None and signs.last_mismatch > at:
        return f"An exact golden was missed {spoken(signs.last_mismatch - at)} after it: look at the device first"
    if signs.last_pass is not None and signs.last_pass > at:
        return f"Exact goldens ran clean {spoken(signs.last_pass - at)} after it: look at the application first"
    if signs.device.torch_index is None and signs.device.backend != "cpu":
        return (
            "No exact golden can tell a broken device from a broken application here: torch does not reach the device"
        )
    return "Exact goldens have been asked for; they tell a broken device from a broken application"


def _advice(signs: Signs, incident: Incident) -> str:
    text = f"NVIDIA's Xid catalogue: {incident.xid.advice}"
    if decoded := _decoded(incident.events[-1], signs.device):
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


def _grade(event: Event, device: Device, policy: TelemetryConfig) -> str:
    """Return what an Xid calls for: by the configuration, by what the line itself says, or by the catalogue."""
    code = event.name.partition(" ")[0]
    if code in policy.xids:
        return policy.xids[code]
    action = fields_of(event).get("action", "")
    if event.name == "154" and action:
        return next((g for g in ("reboot", "none") if g in action), "reset")
    decoded = _decoded(event, device)
    return (decoded or xids.explain(xid_code(event))).grade


def _decoded(event: Event, device: Device) -> xids.Decoded | None:
    """Return what NVIDIA's table says about an NVLink 5 error; None for other Xids, and for a row it does not have."""
    fields, code = fields_of(event), xid_code(event)
    unit, info, status = (fields.get(k, "") for k in ("unit", "intr_info", "error_status"))
    found = xids.decode(code, unit, info, status, device.detail.get("driver", ""))
    return found if found.rows else None
