"""Rules for the host: memory, machine checks, clock source, reboots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from canaryd.judge.telemetry.events import taken_apart
from canaryd.judge.telemetry.signals import DAY, WATCH, Signs, finding, until
from canaryd.model import Cause, Event, Finding, State

MACHINE_CHECKS = 10
"""Corrected machine checks in a day: mcelog's default for a memory module, taken for all (ours)."""


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
            yield finding("dimm-errors-rising", State.DEGRADED, Cause.HARDWARE, text)


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
        yield finding("host-uncorrected-error", State.SUSPECT, Cause.HARDWARE, text + until(signs, when, signs.boots))


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
        yield finding("machine-check", State.SUSPECT, Cause.HARDWARE, text + until(signs, newest.last, signs.boots))
    elif corrected >= MACHINE_CHECKS:
        text = (
            f"{corrected:.3g} machine checks in a day, corrected; the limit is {MACHINE_CHECKS} (mcelog's, for memory)"
        )
        yield finding("machine-check", State.DEGRADED, Cause.HARDWARE, text)


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
        yield finding("clock-source", State.DEGRADED, Cause.ENVIRONMENT, text)


def unclean_reboot(signs: Signs) -> Iterator[Finding]:
    """The machine went down without warning, or left records of a crash."""
    for event in (e for e in signs.seen("boot", DAY) if e.name == "unclean"):
        text = f"the machine started again {signs.moment(event.last)} without having been shut down: {event.detail}"
        yield finding("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED, text)
    if records := signs.value("crash_records"):
        text = f"{records:g} records of a kernel crash wait in /sys/fs/pstore: read them, then delete them"
        yield finding("unclean-reboot", State.HEALTHY, Cause.UNDETERMINED, text)
