"""The rules of telemetry: from events and the newest polls to findings.

Everything is a pure function. `events.changes` and `events.log_event` turn polls and lines of the kernel log into
events; `RULES`, below, has every rule that turns them into findings, and `findings` calls them. docs/telemetry.md has
the rules as a table, each with its source and why it raises no false alarm. A finding whose state is healthy is a
*note*: it is shown and never counts against the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.clock import POLL_AHEAD
from canaryd.judge.findings import finding
from canaryd.judge.laws import Moment, company, recurrence
from canaryd.judge.phrases import count, reason_of
from canaryd.judge.telemetry.events import HARMFUL, is_number, unread
from canaryd.judge.telemetry.host_rules import (
    clock_source,
    dimm_errors_rising,
    host_uncorrected,
    machine_check,
    unclean_reboot,
)
from canaryd.judge.telemetry.line_rules import kernel_lines
from canaryd.judge.telemetry.link_rules import lanes_lost, nvlink_down, nvlink_errors, pcie_errors, pcie_uncorrected
from canaryd.judge.telemetry.memory_rules import (
    corrected_errors_rising,
    flags,
    retired_pages,
    row_remap_exhausted,
    uncorrected_error,
)
from canaryd.judge.telemetry.readings import READINGS, in_words
from canaryd.judge.telemetry.signals import (
    DAY,
    HELD,
    HOUR,
    MINUTE,
    RECOVERY,
    Signs,
    clears_after,
    in_company,
    lost_because,
    recovery,
    sentence,
    source_of,
    spans,
    stale_after,
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
from canaryd.model import Cause, Device, EventKind, Finding, Outcome, State

LASTING, STRETCH = MINUTE, 10 * MINUTE
"""Seconds for which a passing condition must have held, and within how many (ours): at least two polls, so neither one
odd reading nor scattered blips count."""
LOST_TOGETHER = HOUR
"""Seconds within which devices leave the bus together (ours): heat or an overloaded supply takes one after another."""
COUNTED = frozenset(name for name, kind in READINGS.items() if kind.event)
"""Counters each rise of which is judged."""
MOST_NAMED = 4
"""Kinds of readings, and counts, that one finding names (ours)."""
CPU_THROTTLES = 10
"""Times in `telemetry.settle` that processors slow down for heat (ours): fewer is a fan that catches up."""


class Failure(NamedTuple):
    """Why polls fail, by their outcome."""

    why: str
    action: str


OUTCOMES: Mapping[Outcome, Failure] = {
    Outcome.TIMED_OUT: Failure("a call into the driver hung", "Check the driver and kernel log."),
    Outcome.UNKILLABLE: Failure(
        "a call into the driver hangs and survives SIGKILL",
        "Check the driver and kernel log; only a reboot ends such a call.",
    ),
    Outcome.CRASHED: Failure("the vendor's library crashed its worker", "Check the driver and its library."),
    Outcome.OUT_OF_MEMORY: Failure("memory ran out", "Free memory on the host."),
    Outcome.SKIPPED: Failure("the device cannot be read", "Check driver, library and permissions (see the reason)."),
    Outcome.ERRORED: Failure("the probe raised an error", "Report the error as a bug of the probe."),
    Outcome.GARBLED: Failure("the worker's answer was garbled", "Report the error as a bug of canaryd."),
}
MUTE = Failure("its polls give no reading any more", "Check driver, library and permissions (see the reason).")
NO_POLL = Failure("canaryd did not read it", "Check whether the daemon is overloaded or stopped.")


def telemetry_stale(signs: Signs) -> Iterator[Finding]:
    """No poll has given readings for too long; one failed poll alone shows nothing, nor polls that never gave any.

    The finding hides nothing beside it, because only numbers are `unknown`. A device that is gone may be silent.
    """
    if signs.gone:
        return
    for probe, poll in sorted(signs.polls.items()):
        mute = poll.completed is not None and not poll.completed.readings and bool(poll.known)
        read = [at for _, at in poll.known.values()] if mute else [poll.completed.started] if poll.completed else []
        times = (poll.since, *read)
        seen = max((t for t in times if t <= signs.now + POLL_AHEAD), default=None)
        limit = stale_after(poll.period)
        if lost_because(poll.newest) or (seen is not None and signs.now - seen <= limit):
            continue
        failure, reason = NO_POLL, ""
        if poll.newest is not None and poll.newest.outcome in OUTCOMES:
            failure, reason = OUTCOMES[poll.newest.outcome], reason_of(poll.newest)
        elif mute and poll.newest is not None:
            failure, reason = MUTE, next(iter(poll.newest.absent.values()), "")
        since = "since the clock was set back" if seen is None else f"for {format_duration(signs.now - seen)}"
        yield finding(
            *("telemetry-stale", State.DEGRADED, Cause.ENVIRONMENT),
            f"No readings from {probe} {since} (limit {format_duration(limit)}): {failure.why}.",
            failure.action,
            f"Reason: {reason.rstrip('.')}." if reason else "",
            f"{count(poll.failures, 'attempt')} in a row failed." if poll.failures else "",
            "Clears with the next complete reading.",
            probe=probe,
        )


def readings_lost(signs: Signs) -> Iterator[Finding]:
    """The driver fails to read, twice in a row, what it read before. What was counted until then stands."""
    for probe, poll in sorted(signs.polls.items()):
        run = poll.completed
        lost = [u for u in unread(run, poll.known) if u.at < poll.before] if run and not signs.gone else []
        if run is None or not lost:
            continue
        codes = {run.codes.get(u.reading.key, run.codes.get(u.reading.name, 0)) for u in lost}
        reasons = {run.absent.get(u.reading.key, run.absent.get(u.reading.name, "")) for u in lost}
        counters = [u for u in lost if is_number(u.reading) and u.reading.name in COUNTED]
        names = list(dict.fromkeys(in_words(u.reading.name) for u in (*counters, *lost)))
        more = f" and {len(names) - MOST_NAMED} more kinds" if len(names) > MOST_NAMED else ""
        counts = [f"{in_words(u.reading.key)} {u.reading.value:g}" for u in counters if u.reading.value]
        yield finding(
            *("readings-lost", State.DEGRADED, Cause.ENVIRONMENT),
            f"{count(len(lost), 'reading')} can no longer be read (driver code {', '.join(map(str, sorted(codes)))}):"
            f" {', '.join(names[:MOST_NAMED])}{more}.",
            "Look for the reason in the kernel log; drain the device and reset it.",
            *(f"Reason: {reason}." for reason in sorted(filter(None, reasons))),
            f"Last read at {signs.moment(max(u.at for u in lost))}.",
            f"Counted by then, and it stands: {', '.join(counts[:MOST_NAMED])}." if counts else "",
            "Rules and alerts on them see nothing new until they can be read again.",
            "Clears with the next poll that reads them.",
            probe=probe,
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
    occasions = [(at.last, company(trouble, at)) for at in spans(signs.life.losses)]
    occasions += [(signs.now, company(trouble, Moment(signs.now, signs.now)))] * (bool(lost) and not events)
    found = occasions[-1][1]
    answers = any(p.completed is not None and p.completed.started > max(times) for p in signs.polls.values())
    what = [
        in_company(found),
        *(f"{text.rstrip('.')}." for text in lost),
        _identity(signs.device),
        *(f"Last event at {signs.moment(e.last)}." for e in events[-1:]),
        *(source_of(e) for e in events[-1:]),
        "The device answers again." if answers else "",
    ]
    # A loss is of the fatal class: two within `HELD` are enough.
    again = recurrence(occasions, signs.life.boots, signs.now - HELD, few=2)
    if again.is_faulty:
        yield finding(
            *("gpu-lost", State.FAULTY, again.company.cause),
            f"The device was lost again after {count(again.back, 'reboot')}.",
            "Check seating, riser, power and slot; return the part if the fault moves with it.",
            *what,
            signs.advised("inspection", "NVIDIA's Xid catalogue: contact support; when to return it is canaryd's rule"),
            f"Clears after {format_duration(HELD)}.",
        )
    elif lost or not signs.cleared(max(times), signs.boots):
        shared = "Check the power, cooling and PCIe switch that they share, then restart the machine."
        restart = "Drain every device of this node, then restart the machine." if found.is_own else shared
        action, clears = recovery(signs, max(times), signs.boots, restart)
        with_others = f" with {count(len(found.names), 'other device')}" if found.names else ""
        yield finding(
            *("gpu-lost", State.SUSPECT, found.cause),
            f"The driver or the kernel lost the device{with_others}{'; it answers again' if answers else ''}.",
            action,
            *what,
            signs.advised("reboot", "NVIDIA's Xid catalogue"),
            clears,
        )


def _identity(device: Device) -> str:
    """Return which part in which slot a device is, as it was when it last answered."""
    known = (("serial", "serial {}"), ("bus_id", "PCI address {}"), ("slot", "slot {}"))
    told = [text.format(device.detail[name]) for name, text in known if device.detail.get(name)]
    return f"It was {', '.join([device.model, *told])}."


def throttled(signs: Signs) -> Iterator[Finding]:
    """Heat or power held the clocks down for longer than the policy allows: slow, but right."""
    settle, seconds = signs.policy.settle, {}
    for reason in HARMFUL:
        rises = signs.rises("throttle_seconds_total", 2 * settle, reason=reason)
        held = signs.seen(EventKind.CONDITION, 2 * settle, "throttle_active", reason=reason)
        seconds[reason] = signs.most([*rises, *held], settle)
    # Not the sum: hw_slowdown counts again what hw_thermal and hw_power_brake count.
    reason, longest = max(seconds.items(), key=lambda item: item[1])
    clears = f"Clears {format_duration(settle)} after it is below the limit."
    if longest >= signs.policy.throttle:
        limit = format_duration(signs.policy.throttle)
        yield finding(
            *("throttled", State.DEGRADED, Cause.ENVIRONMENT),
            f"Slowed down by {HARMFUL[reason]} for {format_duration(longest)} in {format_duration(settle)}"
            f" (limit {limit}).",
            "Check cooling and power.",
            f"The driver names the reason {reason}. Limit: telemetry.throttle (canaryd's own).",
            clears,
        )
    counts = [signs.rises("throttle_events_total", 2 * settle, scope=scope) for scope in ("core", "package")]
    if not signs.readings("throttle_events_total", HELD):
        counts.append(signs.seen("thermal", 2 * settle))  # a line for each processor: only where nothing counts
    times = max(signs.most(events, settle) for events in counts)
    if times >= CPU_THROTTLES:
        yield finding(
            *("throttled", State.DEGRADED, Cause.ENVIRONMENT),
            f"Processors slowed down for heat {times:.3g} times in {format_duration(settle)} (limit {CPU_THROTTLES}).",
            "Check cooling.",
            "The limit is canaryd's own.",
            clears,
        )


CONDITIONS: Mapping[str, tuple[str, str]] = {
    "hot": ("Check cooling.", "The limit is the device's own: it slows down there."),
    "pcie-width": (
        "Reseat the device; if it stays, check riser, slot and board.",
        "The link lost lanes (canaryd's own rule).",
    ),
    "pcie-generation": (
        "Check seating, riser and BIOS.",
        "Under load the link is slower than both ends support (canaryd's own rule).",
    ),
    "memory-pressure": (
        "Free memory on the host.",
        "The host runs out of memory (canaryd's own rule): probes time out, and the kernel will kill processes.",
    ),
}
"""Passing condition, also the name of its rule → (action, evidence)."""


def conditions(signs: Signs) -> Iterator[Finding]:
    """A condition that comes and goes has held for a minute of ten, not long ago."""
    for name, (action, why) in CONDITIONS.items():
        events = signs.named(EventKind.CONDITION, name, signs.policy.settle + STRETCH)
        if signs.most(events, STRETCH) >= LASTING:
            newest = max(events, key=lambda e: e.last)
            yield finding(
                *(name, State.DEGRADED, Cause.ENVIRONMENT),
                sentence(newest.detail or name),
                action,
                why,
                f"It held for at least {format_duration(LASTING)} of {format_duration(STRETCH)};"
                f" last at {signs.moment(newest.last)}.",
                clears_after(signs.policy.settle),
            )


def recovery_action(signs: Signs) -> Iterator[Finding]:
    """The driver itself advises an action to recover."""
    advice = signs.word("recovery_action", signs.policy.settle)
    if advice not in ("", "none"):
        grade, action = RECOVERY.get(advice, ("reset", "Drain the device and follow the driver's advice."))
        yield finding(
            *("recovery-action", State.SUSPECT if advice in RECOVERY else State.DEGRADED, Cause.UNDETERMINED),
            f"The NVIDIA driver asks for recovery: {advice.replace('_', ' ')}.",
            action,
            f"Recommended: {grade} (NVIDIA's driver).",
            "Clears when the driver no longer asks for it.",
        )


HEALTH = {"warning": State.DEGRADED, "alarm": State.DEGRADED, "critical": State.SUSPECT}
"""Health that Ascend's driver reports → state; any other word shows nothing."""


def device_health(signs: Signs) -> Iterator[Finding]:
    """The driver's own verdict on the device, where it gives one."""
    word = signs.word("device_health", signs.policy.settle)
    if state := HEALTH.get(word.lower()):
        codes = sorted(c for r in signs.readings("device_fault", signs.policy.settle) for c in r.labels.values())
        faults = f" (fault {', '.join(codes)})" if codes else ""
        yield finding(
            *("device-health", state, Cause.UNDETERMINED),
            f"The driver reports the device's health as {word}{faults}.",
            "Look up the fault with the vendor." if codes else "See the reason: npu-smi info -t health",
            "Source: the vendor's own check.",
            "Clears when the driver reports ok.",
        )


def device_recovered(signs: Signs) -> Iterator[Finding]:
    """The driver had to restart the device to free it: work was lost, and the application may be the reason."""
    if events := signs.rises("device_recoveries_total", DAY):
        times, last = sum(e.count for e in events), max(e.last for e in events)
        yield finding(
            *("device-recovered", State.DEGRADED, Cause.UNDETERMINED),
            f"The driver restarted the device {times:g} {'time' if times == 1 else 'times'} in a day to free it.",
            "Check the application, then the device.",
            f"Last at {signs.moment(last)}.",
            "Work was lost; the application may be the reason (canaryd's own rule).",
            "Clears after a day.",
        )


def persistence_off(signs: Signs) -> Iterator[Finding]:
    """Without persistence, closing the last handle re-initialises the device and clears its error counters."""
    if signs.value("persistence_mode") == 0:
        yield finding(
            *("persistence-off", State.HEALTHY, Cause.ENVIRONMENT),
            "Persistence mode is off, so canaryd keeps a handle of the device open.",
            "Run nvidia-persistenced, or nvidia-smi -pm 1.",
            "Without the handle each poll would re-initialise the device and clear its error counters.",
            "To upgrade the driver, run canaryd release: it closes the handle.",
        )


def ecc_off(signs: Signs) -> Iterator[Finding]:
    """Error correction is off where the device has it, or about to change."""
    now, pending = signs.value("ecc_enabled", when="current"), signs.value("ecc_enabled", when="pending")
    if now is not None and pending is not None and now != pending:
        yield finding(
            *("ecc-off", State.HEALTHY, Cause.ENVIRONMENT),
            f"Error correction (ECC) is {'on' if now else 'off'}; after a reset it is {'on' if pending else 'off'}.",
            "Reset the device to turn it on." if pending else "To keep it on, run nvidia-smi -e 1.",
        )
    elif now == 0:
        yield finding(
            *("ecc-off", State.HEALTHY, Cause.ENVIRONMENT),
            "Error correction (ECC) is off.",
            "Turn it on: nvidia-smi -e 1, then reset the device.",
            "Without it a flipped bit in memory goes unnoticed.",
        )


def changed(signs: Signs) -> Iterator[Finding]:
    """Something of the machine differs from a day ago: no fault, but it explains what comes later."""
    for event in signs.seen(EventKind.CHANGE, DAY):
        is_device = event.name == "device" and event.detail
        message = event.detail if is_device else f"{event.name} changed: {event.before} → {event.after}"
        found = f"Found at {signs.moment(event.last)}."
        yield finding("changed", State.HEALTHY, Cause.NONE, f"{message}.", "", found, "Clears after a day.")
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
            *("changed", State.HEALTHY, Cause.NONE),
            f"{event.detail or f'{event.name} fell'}.",
            action,
            f"At {signs.moment(event.last)}.",
            why,
            "Clears after a day.",
        )


RULES: tuple[Callable[[Signs], Iterator[Finding]], ...] = (
    # The device and its driver.
    telemetry_stale,
    readings_lost,
    gpu_lost,
    device_health,
    device_recovered,
    recovery_action,
    # Memory of an accelerator.
    flags,
    row_remap_exhausted,
    retired_pages,
    uncorrected_error,
    corrected_errors_rising,
    # The host.
    dimm_errors_rising,
    host_uncorrected,
    machine_check,
    clock_source,
    unclean_reboot,
    # Codes of NVIDIA's driver.
    xid_application,
    xid_repeated,
    xid_recovery,
    xid_inspect,
    xid_unknown,
    xid_noted,
    sxid,
    # Heat and power; conditions that come and go.
    throttled,
    conditions,
    # Links.
    pcie_errors,
    pcie_uncorrected,
    lanes_lost,
    nvlink_errors,
    nvlink_down,
    # Settings, other lines, changes.
    persistence_off,
    ecc_off,
    kernel_lines,
    changed,
)
"""Every rule of telemetry. Their order has no effect."""


def findings(signs: Signs) -> Iterator[Finding]:
    """Yield the findings of every rule."""
    return itertools.chain.from_iterable(rule(signs) for rule in RULES)
