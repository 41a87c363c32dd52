"""The judgement of telemetry: from what a device says about itself to events, and from these to findings.

Everything is a pure function. `changes` and `happened` turn polls and lines of the kernel log into events, `RULES` turn
events and the newest polls into findings. docs/telemetry.md has the rules as a table, each with its source and with
why it raises no false alarm. A finding whose state is healthy is a *note*: shown, never held against the device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from canaryd.formatting import format_duration
from canaryd.judge.telemetry.events import HARMFUL, has, taken_apart, within
from canaryd.judge.telemetry.host_rules import (
    clock_source,
    dimm_errors_rising,
    host_uncorrected,
    machine_check,
    unclean_reboot,
)
from canaryd.judge.telemetry.link_rules import nvlink_down, nvlink_errors, pcie_errors
from canaryd.judge.telemetry.readings import READINGS
from canaryd.judge.telemetry.signals import (
    AHEAD,
    DAY,
    MINUTE,
    WATCH,
    Signs,
    finding,
    lost_because,
    returns,
    stale_after,
    until,
)
from canaryd.judge.telemetry.xid_rules import (
    sxid,
    xid_application,
    xid_inspect,
    xid_noted,
    xid_recovery,
    xid_repeated,
    xid_unknown,
)
from canaryd.judge.wording import reason_of
from canaryd.model import Cause, Event, Finding, Outcome, State

LASTING, STRETCH = MINUTE, 10 * MINUTE
"""Seconds for which a passing condition must have held, and within how many: two polls at least, so one odd reading is
none, and neither are blips here and there (ours)."""
LEAST_STEP, TIMES_MEAN = 100, 10
"""Corrected errors in a day that are a step, when they are also so many times the mean day before (ours)."""
MOST_RETIRED, MANY_DOUBLE_BIT = 63, 15
"""Retired pages: DCGM's limit, and its softer limit for those with double-bit errors (DcgmGPUHardwareLimits.h)."""
MOST_REMAPPED = 512
"""Rows remapped for uncorrectable errors: NVIDIA's RMA policy, and DCGM's limit."""
CPU_THROTTLES = 10
"""Times in `telemetry.settle` that processors slow down for heat (ours): less is a fan that catches up."""
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
        since = "since the clock was set back" if seen is None else f"for {format_duration(signs.now - seen)}"
        text = f"{probe}: no poll has completed {since} ({poll.failures} failed in a row): {why}"
        yield finding("telemetry-stale", State.UNKNOWN, cause, text, probe)


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
    if returns(times, signs.boots) >= 1:
        text = (
            f"lost again after a reboot, within 30 days: {what}. Inspection-class (NVIDIA's Xid catalogue: contact "
            "support): look at seating, riser, power and slot, and return the part if the fault goes with it (ours)"
        )
        yield finding("gpu-lost", State.FAULTY, Cause.HARDWARE, text)
    elif lost or not signs.cleared(max(times), signs.boots):
        text = f"lost: {what}. Reboot-class (NVIDIA's Xid catalogue): restart the machine. "
        yield finding("gpu-lost", State.SUSPECT, Cause.HARDWARE, text + until(signs, max(times), signs.boots))


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
            yield finding(rule, state, Cause.HARDWARE, text)


def row_remap_exhausted(signs: Signs) -> Iterator[Finding]:
    """Spare rows run out: in a bank, or in all."""
    rows = signs.value("row_remap_rows", WATCH, cause="uncorrectable") or 0
    banks = signs.value("row_remap_banks", WATCH, available="none") or 0
    if rows >= MOST_REMAPPED:
        text = (
            f"{rows:g} memory rows were replaced after uncorrectable errors; NVIDIA's RMA policy and DCGM's limit are "
            f"{MOST_REMAPPED}. RMA-class: run the field diagnostic; it decides on the return"
        )
        yield finding("row-remap-exhausted", State.FAULTY, Cause.HARDWARE, text)
    elif banks:
        text = (
            f"{banks:g} memory banks have no spare row left: a bad row there cannot be replaced. Plan a return (ours)"
        )
        yield finding("row-remap-exhausted", State.DEGRADED, Cause.HARDWARE, text)


def retired_pages(signs: Signs) -> Iterator[Finding]:
    """Pages of memory were taken out of use, on devices that cannot replace rows."""
    pages = {r.labels.get("cause", ""): float(r.value) for r in signs.readings("retired_pages", WATCH)}
    if sum(pages.values()) >= MOST_RETIRED:
        text = f"{sum(pages.values()):g} memory pages are retired; DCGM's limit is {MOST_RETIRED}. "
        text += "RMA-class: run the field diagnostic"
        yield finding("retired-pages", State.FAULTY, Cause.HARDWARE, text)
    elif pages.get("double_bit", 0) >= MANY_DOUBLE_BIT:
        text = (
            f"{pages['double_bit']:g} memory pages are retired after double-bit errors; DCGM's softer limit is "
            f"{MANY_DOUBLE_BIT}. Beyond it, more than one a week calls for a return"
        )
        yield finding("retired-pages", State.DEGRADED, Cause.HARDWARE, text)


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
    yield finding("uncorrected-error", State.SUSPECT, Cause.HARDWARE, text + until(signs, before_reset, signs.resets))


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
            f"Over after a day below it and {format_duration(signs.policy.settle)}"
        )
        yield finding("corrected-errors-rising", State.DEGRADED, Cause.HARDWARE, text)


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
            f"held down by {reason} for {format_duration(longest)} within {format_duration(settle)}; the limit is "
            f"{format_duration(signs.policy.throttle)} (telemetry.throttle, ours). Look at cooling and power"
        )
        yield finding("throttled", State.DEGRADED, Cause.ENVIRONMENT, text)
    told = [signs.rises("throttle_events_total", 2 * settle, scope=scope) for scope in ("core", "package")]
    if not signs.readings("throttle_events_total", WATCH):
        told.append(signs.seen("thermal", 2 * settle))  # a line for each processor: only where nothing counts
    times = max(signs.most(events, settle) for events in told)
    if times >= CPU_THROTTLES:
        text = f"processors slowed down for heat {times:.3g} times within {format_duration(settle)}; our limit is {CPU_THROTTLES}"  # noqa: E501
        yield finding("throttled", State.DEGRADED, Cause.ENVIRONMENT, text)


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
            over = f"Over {format_duration(signs.policy.settle)} after it last held for a minute of ten"
            text = f"{newest.detail}, last {signs.moment(newest.last)}. {advice}. {over}"
            yield finding(rule, State.DEGRADED, Cause.ENVIRONMENT, text)


def recovery_action(signs: Signs) -> Iterator[Finding]:
    """The driver itself says what must be done to recover."""
    action = signs.word("recovery_action", signs.policy.settle)
    if action not in ("", "none"):
        kind = "Reboot" if "reboot" in action else "Reset"
        known = re.search("reset|reboot|drain", action) is not None
        text = f"the NVIDIA driver's own advice is {action}. {kind}-class: drain the device and follow it"
        yield finding("recovery-action", State.SUSPECT if known else State.DEGRADED, Cause.UNDETERMINED, text)


HEALTH = {"warning": State.DEGRADED, "alarm": State.DEGRADED, "critical": State.SUSPECT}
"""What Ascend's driver says of a device; anything else says nothing."""


def device_health(signs: Signs) -> Iterator[Finding]:
    """The driver's own verdict on the device, where it gives one."""
    word = signs.word("device_health", signs.policy.settle)
    if state := HEALTH.get(word.lower()):
        codes = sorted(c for r in signs.readings("device_fault", signs.policy.settle) for c in r.labels.values())
        reason = f"fault {', '.join(codes)}" if codes else "ask npu-smi info -t health for the reason"
        text = f"the driver calls the device's health {word}: {reason} (the vendor's own check)"
        yield finding("device-health", state, Cause.UNDETERMINED, text)


def device_recovered(signs: Signs) -> Iterator[Finding]:
    """The driver had to restart the device to free it: work was lost, and the application may be the reason."""
    if events := signs.rises("device_recoveries_total", DAY):
        times, last = sum(e.count for e in events), max(e.last for e in events)
        text = (
            f"the driver had to restart the device {times:g} times, last {signs.moment(last)} (ours). Over after a day"
        )
        yield finding("device-recovered", State.DEGRADED, Cause.UNDETERMINED, text)


def persistence_off(signs: Signs) -> Iterator[Finding]:
    """Without persistence, letting go of the last handle initialises the device anew and clears what should be read."""
    if signs.value("persistence_mode") == 0:
        text = (
            "persistence is off: canaryd keeps one handle, or each poll would initialise the device anew and clear "
            "its error counters. Run nvidia-persistenced, or nvidia-smi -pm 1; canaryd release lets go for an upgrade"
        )
        yield finding("persistence-off", State.HEALTHY, Cause.ENVIRONMENT, text)


def ecc_off(signs: Signs) -> Iterator[Finding]:
    """Error correction is off where the device has it, or about to change."""
    now, pending = signs.value("ecc_enabled", when="current"), signs.value("ecc_enabled", when="pending")
    if now is not None and pending is not None and now != pending:
        text = f"error correction is {'on' if now else 'off'}, and {'on' if pending else 'off'} after the next reset"
        yield finding("ecc-off", State.HEALTHY, Cause.ENVIRONMENT, text)
    elif now == 0:
        text = (
            "error correction is off: a flipped bit in memory goes unnoticed. Turn it on: nvidia-smi -e 1, then a reset"
        )
        yield finding("ecc-off", State.HEALTHY, Cause.ENVIRONMENT, text)


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
            yield finding(f"kernel-{kind}", state, cause, text)


def changed(signs: Signs) -> Iterator[Finding]:
    """Something of the machine is another than a day ago: no fault, but it explains what comes later."""
    for event in signs.seen("change", DAY):
        what = event.detail if event.name == "device" else f"{event.name} changed {event.before} → {event.after}"
        text = f"{what}, {signs.moment(event.last)}"
        yield finding("changed", State.HEALTHY, Cause.NONE, text)
    for event in signs.seen("counter-fell", DAY):
        kind = READINGS.get(taken_apart(event.name)[0])
        why = "it counts for life. Was the board replaced or cleared?"
        if kind is not None and kind.volatile:
            if any(event.first <= boot <= event.last for boot in signs.boots):
                continue
            why = "cleared by hand, at its end, or a part of what it counts is gone; no reset"
        yield finding("changed", State.HEALTHY, Cause.NONE, f"{event.detail}, {signs.moment(event.last)}: {why}")


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
