"""Rules for missing evidence: what did not run, is stale, or is gone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from canaryd.formatting import format_duration, format_utc
from canaryd.judge.acks import cut
from canaryd.judge.case import Case
from canaryd.judge.clock import AHEAD, age
from canaryd.judge.findings import NO_EVIDENCE, NOT_COMPLETED, finding, make_finding
from canaryd.judge.phrases import KERNEL_LOG, reason_of
from canaryd.judge.watch import has_looked
from canaryd.model import (
    IN_USE,
    KERNEL_DRIVER,
    UNDRIVEN,
    UNIDENTIFIED,
    UNSEEN,
    UNSEEN_CODE,
    Cause,
    Device,
    Finding,
    ModelServer,
    Outcome,
    State,
)

OUTCOMES: Mapping[Outcome, tuple[Cause, str, str]] = {
    Outcome.SKIPPED: (
        Cause.ENVIRONMENT,
        "was skipped",
        "Remove the reason, or disable the probe: probes.{}.enabled: false",
    ),
    Outcome.ERRORED: (Cause.HARNESS, "ended with an error", "Fix what the error names, or report a bug of canaryd"),
    Outcome.CRASHED: (Cause.UNDETERMINED, "crashed", f"Read the kernel log: {KERNEL_LOG}"),
    Outcome.TIMED_OUT: (Cause.UNDETERMINED, "timed out", "Check whether the driver hangs or the machine is overloaded"),
    Outcome.OUT_OF_MEMORY: (Cause.ENVIRONMENT, "ran out of memory", "Free memory, or lower the level"),
    Outcome.UNKILLABLE: (
        Cause.UNDETERMINED,
        "left a process that survives SIGKILL",
        "Look for a hung driver in the kernel log; only a reboot removes the process",
    ),
    Outcome.GARBLED: (
        Cause.HARNESS,
        "sent an unreadable answer",
        "Disable the probe, or report a bug: something wrote into canaryd's own channel",
    ),
}
"""Outcome of a run that did not complete → its cause, how its sentence goes on, and what to do; "{}" is the probe."""

ENDPOINT_SKIPPED = "Correct the server or its settings as the reason says, then run: canaryd check --device {device}"
"""A server that cannot be tested is no reason to stop testing servers."""


LEAST_RESULTS = {"cpu": 5000, "cuda": 5000}
"""Backend → results that a check, whatever its level, has to compare before it calls a device healthy."""


def least_results(device: Device) -> int:
    """Return how many results a check of a device has to compare: one where nobody has measured what is usual."""
    return LEAST_RESULTS.get(device.backend, 1)


def not_completed(case: Case) -> Iterator[Finding]:
    """The newest run of a wanted probe did not complete: nothing is known about the numbers."""
    for run in case.current:
        if run.outcome in OUTCOMES:  # errors of the device have a rule of their own
            cause, text, action = OUTCOMES[run.outcome]
            lane = f" ({run.instruction_set})" if run.instruction_set else ""
            reason = reason_of(run)
            message = f"{run.probe}{lane} {text}" + (f": {reason}" if reason else "")
            if run.outcome is Outcome.SKIPPED and isinstance(case.device, ModelServer):
                action = ENDPOINT_SKIPPED
            if in_use := run.environment.get(IN_USE):
                message = f"{run.probe}{lane} {text} while other programs kept the device busy ({in_use})"
                action = "Test it when it is free: canaryd check --device {device}"
            action = action.format(run.probe, device=case.device.name)
            yield make_finding(NOT_COMPLETED, State.UNKNOWN, cause, message, action, run)


def unreached(case: Case) -> Iterator[Finding]:
    """The device is there, but nothing can compute on it: no driver, or a torch that does not see it."""
    detail, cause = case.device.detail, Cause.ENVIRONMENT
    if case.gone_since is not None or _is_reached(case):
        return
    bus_id = detail.get("bus_id", "")
    if not detail.get(UNDRIVEN):
        text = "The driver lists this device, but torch does not see it: nothing was computed on it"
        text += f"; torch says: {detail[UNSEEN]}" if detail.get(UNSEEN) else ""
        action = "Set worker.python to the serving engine's interpreter; check CUDA_VISIBLE_DEVICES"
        # cudaErrorSystemNotReady: what runs beside the driver has not finished, or is missing
        if detail.get(UNSEEN_CODE) == "802":
            action = "Start Fabric Manager, which CUDA waits for: systemctl status nvidia-fabricmanager"
    elif UNIDENTIFIED in detail:
        at = f" at PCI address {bus_id}" if bus_id else ""
        text = f"The driver cannot identify the device{at}: {detail[UNDRIVEN]}"
        action, cause = f"Check permissions, driver and kernel log: {KERNEL_LOG}", Cause.UNDETERMINED
    else:
        lack = "has no driver" if detail.get(KERNEL_DRIVER, "none") == "none" else "cannot be queried"
        text = f"The device at PCI address {bus_id or '?'} {lack}: {detail[UNDRIVEN]}"
        action = "Load its driver; if a virtual machine uses it, leave it out: devices.include"
    yield finding("unreached", State.UNKNOWN, cause, text, action)


def _is_reached(case: Case) -> bool:
    return case.device.is_reached or case.divided or any(r.trials for r in case.runs)


def devices_missing(case: Case) -> Iterator[Finding]:
    """Fewer accelerators are found than the configuration expects."""
    if case.accelerators is not None and case.accelerators[0] < case.accelerators[1]:
        found, expected = case.accelerators
        yield finding(
            *("devices-missing", State.UNKNOWN, Cause.UNDETERMINED),
            f"{found} of {expected} accelerators found",
            "Look for the others in the kernel log and on the bus",
            "List devices you removed under devices.absent, and lower devices.expected.",
        )


def devices_unlisted(case: Case) -> Iterator[Finding]:
    """A vendor's library or driver is there and could not list its devices: some may be missing here."""
    for vendor, why in sorted(case.unlisted.items()):
        action = "Check the driver: until it answers, devices may be missing here"
        if vendor == "torch":
            action = "Repair the torch installation, or set worker.python to another interpreter"
        text = f"The {vendor} devices of this host could not be listed: {why}"
        yield finding("devices-unlisted", State.UNKNOWN, Cause.ENVIRONMENT, text, action)


def no_fresh_evidence(case: Case) -> Iterator[Finding]:
    """No probe is enabled, none has run, the last run is too old, or a check compared too few results: unknown."""
    done, least = case.compared or (0, 0)
    if done < least and not any(not_completed(case)):  # else that is the reason
        yield finding(
            *("too-few-results", State.UNKNOWN, Cause.UNDETERMINED),
            f"{done:,} of at least {least:,} results were compared: too few to call this device healthy",
            "Check again when the machine is less busy",
        )
    if not case.wanted and not case.divided and not case.unlisted and not any(unreached(case)):
        text, action = "None of the chosen probes tests this device", "Choose one that does: canaryd probes lists them"
        yield finding(NO_EVIDENCE, State.UNKNOWN, Cause.UNDETERMINED, text, action)
    yield from itertools.chain.from_iterable(_stale(case, probe) for probe in sorted(case.wanted))


def _stale(case: Case, probe: str) -> Iterator[Finding]:
    """Yield the finding that a probe has no result, or no fresh one."""
    completed = [r for r in case.scheduled(probe) if r.outcome is Outcome.COMPLETED]
    if not completed and not any(unreached(case)):
        since = "since it was repaired or replaced" if cut(case.device, case.acks) else "on this device yet"
        text = f"{probe} has not completed a run {since}"
        action = "Leave it to the daemon where one runs, or run it now: canaryd check"
        yield finding(NO_EVIDENCE, State.UNKNOWN, Cause.UNDETERMINED, text, action, probe=probe)
    elif completed and (old := age(completed[-1], case.now)) > case.limit(probe):
        aged = f"is {format_duration(old)} old" if old < math.inf else "is dated in the future, so its age is unknown"
        text = f"The last result of {probe} {aged}; its interval is {format_duration(case.wanted[probe])}"
        action = "Check that the daemon runs: canaryd status"
        yield make_finding("stale-evidence", State.UNKNOWN, Cause.UNDETERMINED, text, action, completed[-1])


def checked_nothing(case: Case) -> Iterator[Finding]:
    """A run completed without looking at anything: skipped parts are fine, skipping all of them is not evidence.

    Where only time was lacking and others gave enough results, it is a note: this part is not tested.
    """
    for run in case.current:
        if run.outcome is not Outcome.COMPLETED or has_looked(run):
            continue
        reason = f": {run.skipped[0].case} was skipped, {run.skipped[0].reason}" if run.skipped else ""
        text = f"{run.probe} completed but checked nothing{reason}"
        state, cause = State.UNKNOWN, Cause.HARNESS
        alone = f"test it alone: canaryd check --probe {run.probe} --device {case.device.name}"
        action = f"To see why, {alone} -v"
        if any(part.late for part in run.skipped):
            cause, action = Cause.ENVIRONMENT, f"When the machine is less busy, {alone}"
            if case.fresh_results >= least_results(case.device):
                state, text = State.HEALTHY, "Not tested: its time was over before its first result"
        yield make_finding("checked-nothing", state, cause, text, action, run)


def history_lost(case: Case) -> Iterator[Finding]:
    """The database was damaged or removed, and a new one begun: earlier faults are unknown until it is acknowledged."""
    if case.history_lost is None:
        return
    at, aside = case.history_lost
    if not case.watched(at, case.wanted.keys(), [case.device.uuid]) and not any(a.at >= at for a in case.acks):
        day = format_utc(at, seconds=False)
        yield finding(
            *("history-lost", State.UNKNOWN, Cause.HARNESS),
            f"The record of this machine was lost on {day}; earlier faults are unknown",
            f'If no fault was known here: canaryd ack {case.device.name} --reason "…"',
            f"Clears by itself after {format_duration(case.policy.watch)} of tests.",
            f"What is left of it: {aside}.",
        )


def record_unread(case: Case) -> Iterator[Finding]:
    """The database is there and cannot be read: earlier faults are unknown until it can."""
    if case.unread:
        yield finding(
            *("record-unread", State.UNKNOWN, Cause.HARNESS),
            f"Earlier faults are unknown: {case.unread}",
            "Remove that reason; canaryd then reads the record by itself",
        )


def clock_set_back(case: Case) -> Iterator[Finding]:
    """A run is dated in the future: its age is unknown, so it is no fresh evidence. By itself this is only a note."""
    ahead = [r for r in case.runs if r.started > case.now + AHEAD]
    if ahead:
        lead = format_duration(ahead[-1].started - case.now)
        text = f"Runs are dated up to {lead} in the future and do not count as fresh"
        action = "Check this machine's clock"
        yield make_finding("clock-set-back", State.HEALTHY, Cause.ENVIRONMENT, text, action, ahead[-1])


def vanished(case: Case) -> Iterator[Finding]:
    """The device disappeared: unknown."""
    if case.gone_since is not None:
        ago = format_duration(max(0.0, case.now - case.gone_since) // 60 * 60)
        yield finding(
            *("device-vanished", State.UNKNOWN, Cause.UNDETERMINED),
            f"{case.device.name} ({case.device.model}) is gone; it was last found {ago} ago",
            # By its uuid: another part may have its name by now.
            "Look for it in the kernel log and on the bus. If it was replaced: "
            f'canaryd ack {case.device.uuid} --replaced --reason "…"',
            f"A device that was removed on purpose is forgotten after {format_duration(case.policy.watch)}.",
        )
