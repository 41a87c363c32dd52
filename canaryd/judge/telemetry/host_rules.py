"""Rules for the host: memory, machine checks, clock source, reboots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import ALONE, recurrence
from canaryd.judge.phrases import count
from canaryd.judge.telemetry.signals import DAY, HELD, TRAINING, Signs, recovery, sentence, source_of
from canaryd.model import Cause, Event, EventKind, Finding, State

MACHINE_CHECKS = 10
"""Corrected machine checks in a day: mcelog's default for a memory module, used for all (ours)."""
REBOOT = "Recommended: reboot (canaryd's own rule)."


def dimm_errors_rising(signs: Signs) -> Iterator[Finding]:
    """A memory module of the host has more corrected errors in a day than mcelog's default allows."""
    modules: dict[str, list[Event]] = defaultdict(list)
    for event in signs.rises("edac_errors_total", kind="corrected"):
        modules[event.name].append(event)
    limit = signs.policy.dimm_corrected_per_day
    for _, events in sorted(modules.items()):
        if (day := signs.most(events, DAY)) >= limit:
            yield finding(
                *("dimm-errors-rising", State.DEGRADED, Cause.HARDWARE),
                f"{_module(events[-1].labels)}: {day:.3g} corrected errors in a day (limit {limit}).",
                "Plan to replace the memory module.",
                "Limit: telemetry.dimm_corrected_per_day; the default is mcelog's.",
                f"Clears after {format_duration(DAY + signs.policy.settle)} below the limit.",
            )


def host_uncorrected(signs: Signs) -> Iterator[Finding]:
    """The host's memory lost data: every golden and every operand goes through it."""
    events = [*signs.rises("edac_errors_total", kind="uncorrected"), *signs.named("edac", "uncorrected")]
    events = sorted([*events, *signs.named("mce", "memory")], key=lambda e: e.last)
    open_ = [e for e in events if not signs.cleared(e.last, signs.boots)]
    standing = [r for r in signs.readings("edac_errors_total") if r.labels.get("kind") == "uncorrected" and r.value]
    if open_ or standing:
        facts = [*(r.labels for r in standing), *(e.labels or e.fields for e in open_)]
        where = next((f": {_module(f)}" for f in reversed(facts) if "dimm" in f), "")
        when = max((e.last for e in open_), default=None)
        action = "Find and replace the memory module, then restart the machine."
        action, clears = recovery(signs, when, signs.boots, action)
        yield finding(
            *("host-uncorrected-error", State.SUSPECT, Cause.HARDWARE),
            f"Uncorrected error in the host's memory{where}.",
            action,
            f"Last at {signs.moment(when)}." if when is not None else "Counted since the driver was loaded.",
            source_of(open_[-1]) if open_ else "",
            REBOOT,
            clears,
        )


def _module(labels: Mapping[str, str]) -> str:
    """Return a memory module in words, by the labels of a counter or the fields of a line."""
    return f"memory module {labels.get('dimm', 'unknown')} (controller {labels.get('controller', 'unknown')})"


def _fatal(signs: Signs) -> list[Event]:
    """Return what the processor could not correct, also where it restarted the machine.

    Some firmware tells that at each start anew, so only a start without a shutdown before it counts.
    """
    died = [e.last for e in signs.named(EventKind.BOOT, "unclean")]
    restarts = [e for e in signs.named("last-boot", "error") if any(0 <= e.last - at <= TRAINING for at in died)]
    return [*signs.rises("machine_check_exceptions_total"), *signs.named("mce", "uncorrected"), *restarts]


def machine_check(signs: Signs) -> Iterator[Finding]:
    """A processor of the host reported an error of its own, or restarted the machine by one again and again."""
    lines, events = signs.seen("mce"), _fatal(signs)
    open_ = [e for e in events if e.kind != "last-boot" and not signs.cleared(e.last, signs.boots)]
    life = signs.life if events else signs
    again = recurrence(((e.last, ALONE) for e in _fatal(life)), life.boots, signs.now - HELD)
    restarts = [e for e in events if e.kind == "last-boot"]
    # "logged" shows no severity; an error that the processor could not correct would have been an exception.
    corrected = signs.most([e for e in lines if e.name not in ("uncorrected", "memory")], DAY)
    if again.is_faulty or len(restarts) > 1:
        newest = max(events, key=lambda e: e.last)
        yield finding(
            *("machine-check", State.FAULTY if again.is_faulty else State.SUSPECT, Cause.HARDWARE),
            f"Uncorrected errors of the processor came back after {count(again.back, 'reboot')}.",
            "Find the part in the event log of the BMC, and replace it.",
            f"They restarted the machine {len(restarts)} times in {format_duration(HELD)}." if restarts else "",
            f"Last at {signs.moment(newest.last)}.",
            source_of(newest),
            f"Clears after {format_duration(HELD)} without another (canaryd's own rule).",
        )
    elif open_:
        newest = max(open_, key=lambda e: e.last)
        message = "Machine check: a processor reported an uncorrected error."
        action = "Decode the error, then restart the machine."
        if "severity" in newest.fields:  # the firmware speaks for any part
            section = newest.fields.get("section")
            message = f"The firmware reported an uncorrected error{f': {section}' if section else ''}."
            action = "Find the part in the event log of the BMC, then restart the machine."
        action, clears = recovery(signs, newest.last, signs.boots, action)
        yield finding(
            *("machine-check", State.SUSPECT, Cause.HARDWARE),
            message,
            action,
            f"Last at {signs.moment(newest.last)}.",
            source_of(newest),
            REBOOT,
            clears,
        )
    elif corrected >= MACHINE_CHECKS:
        yield finding(
            *("machine-check", State.DEGRADED, Cause.HARDWARE),
            f"{corrected:.3g} corrected machine checks in a day (limit {MACHINE_CHECKS}).",
            "Decode the errors to find the part.",
            "Limit: mcelog's default for memory modules, which canaryd uses for all machine checks.",
            f"Clears after {format_duration(DAY + signs.policy.settle)} below the limit.",
        )


def clock_source(signs: Signs) -> Iterator[Finding]:
    """The kernel gave up the processor's own clock: time is slow to read, and perhaps wrong."""
    left = [e for e in signs.seen(EventKind.FLAG, HELD, "clock_source") if e.after != "tsc" and e.before == "tsc"]
    last = max((e.last for e in (*left, *signs.seen("clock"))), default=None)
    if last is None or any(b > last for b in signs.boots):
        return
    source = signs.word("clock_source")
    holds = signs.policy.settle if source == "tsc" else HELD if source else DAY
    if signs.now - last <= holds:
        now = "uses it again" if source == "tsc" else f"uses {source or 'another one'} now"
        yield finding(
            *("clock-source", State.DEGRADED, Cause.ENVIRONMENT),
            f"The kernel gave up the processor's clock (tsc) and {now}.",
            "Update the BIOS and restart the machine.",
            f"At {signs.moment(last)}.",
            "Time is slow to read now, and may be wrong (canaryd's own rule).",
            f"Clears after a reboot, or {format_duration(signs.policy.settle)} after the kernel uses tsc again.",
        )


def unclean_reboot(signs: Signs) -> Iterator[Finding]:
    """The machine went down without warning, or left records of a crash."""
    for event in signs.named(EventKind.BOOT, "unclean", DAY):
        yield finding(
            *("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED),
            "The machine restarted without a shutdown.",
            "Find out why: power, or a kernel crash.",
            f"It started at {signs.moment(event.last)}.",
            sentence(event.detail),
            "Clears after a day.",
        )
    if records := signs.value("crash_records"):
        yield finding(
            *("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED),
            f"{records:g} kernel crash records in /sys/fs/pstore.",
            "Read them, then delete them.",
            "Clears when no record is left.",
        )
