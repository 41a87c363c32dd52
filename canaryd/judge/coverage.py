"""Rules for missing evidence: what did not run, is stale, or is gone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from canaryd.formatting import moment
from canaryd.judge.case import AHEAD, Docket, age
from canaryd.judge.confirmation import spoken
from canaryd.judge.findings import make_finding
from canaryd.judge.telemetry import signals
from canaryd.model import Cause, Finding, Outcome, State, Subject

OUTCOMES: Mapping[Outcome, tuple[Cause, str]] = {
    Outcome.SKIPPED: (Cause.ENVIRONMENT, "was skipped"),
    Outcome.ERRORED: (Cause.HARNESS, "raised an error"),
    Outcome.CRASHED: (Cause.UNDETERMINED, "crashed: the worker died"),
    Outcome.TIMED_OUT: (Cause.UNDETERMINED, "timed out: a hung driver or a busy machine"),
    Outcome.OUT_OF_MEMORY: (Cause.ENVIRONMENT, "ran out of memory: free some, or lower the level"),
    Outcome.UNKILLABLE: (
        Cause.UNDETERMINED,
        "left a worker that survives SIGKILL: the driver may hang, see the kernel log",
    ),
    Outcome.GARBLED: (Cause.HARNESS, "answered what is not the protocol"),
}
"""What a run that did not complete is blamed on, and how its sentence goes on after the probe's name."""


def not_completed(docket: Docket) -> Iterator[Finding]:
    """The newest run of a wanted probe did not complete: nothing is known about the numbers."""
    for run in docket.current:
        if run.outcome is not Outcome.COMPLETED:
            cause, text = OUTCOMES[run.outcome]
            lane = f" ({run.instruction_set})" if run.instruction_set else ""
            reason = signals.reason_of(run)
            message = f"{run.probe}{lane} {text}" + (f": {reason}" if reason else "")
            yield make_finding("not-completed", State.UNKNOWN, cause, message, run)


def unreached(docket: Docket) -> Iterator[Finding]:
    """The device is there, but nothing can compute on it: no driver, or a torch that does not see it."""
    device = docket.device
    if docket.gone_since is not None:
        return
    if (
        device.backend == "cpu"
        or device.is_endpoint
        or device.torch_index is not None
        or docket.divided
        or any(r.trials for r in docket.runs)
    ):
        return
    if why := device.detail.get("undriven", ""):
        driven = device.detail.get("kernel_driver", "none") != "none"
        lack = "it cannot be asked" if driven else "nothing drives it"
        text = f"it is on the PCI bus at {device.detail.get('bus_id', '?')}, but {lack}: {why}"
    else:
        text = (
            "its driver lists it, but the torch under test does not reach it, so nothing was computed on it: point "
            "worker.python at the serving engine's interpreter, and look at CUDA_VISIBLE_DEVICES"
        )
    yield Finding(rule="unreached", state=State.UNKNOWN, cause=Cause.ENVIRONMENT, message=text)


def devices_missing(docket: Docket) -> Iterator[Finding]:
    """Fewer accelerators are found than the configuration expects."""
    if docket.count is not None and docket.count[0] < docket.count[1]:
        found, expected = docket.count
        text = (
            f"{found} of {expected} accelerators are found: look for the others in the kernel log and on the bus; "
            "those taken out on purpose belong into devices.absent, with devices.expected lowered"
        )
        yield Finding(rule="devices-missing", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text)


def devices_unlisted(docket: Docket) -> Iterator[Finding]:
    """A vendor's library or driver is there and could not say which devices there are: some may be missing here."""
    for vendor, why in sorted(docket.unlisted.items()):
        text = f"the {vendor} devices of this host could not be listed, so some may be missing from this report: {why}"
        yield Finding(rule="devices-unlisted", state=State.UNKNOWN, cause=Cause.ENVIRONMENT, message=text)


def no_fresh_evidence(docket: Docket) -> Iterator[Finding]:
    """Nothing was asked, nothing has run, or it is too long ago: unknown, never healthy."""
    if not docket.wanted and not docket.divided and not any(unreached(docket)):
        text = "no enabled probe gives evidence about this device; disabled is not healthy"
        yield Finding(rule="no-evidence", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text)
    for probe in sorted(docket.wanted):
        completed = [r for r in docket.scheduled(probe) if r.outcome is Outcome.COMPLETED]
        if not completed and any(unreached(docket)):
            continue
        if not completed:
            text = f"no evidence yet: {probe} has not completed a run on this device"
            yield Finding(rule="no-evidence", state=State.UNKNOWN, cause=Cause.UNDETERMINED, message=text, probe=probe)
        elif (old := age(completed[-1], docket.now)) > docket.limit(probe):
            period = spoken(docket.wanted[probe])
            what = f"{spoken(old)} old" if old < math.inf else "dated in the future, so its age is not known"
            text = f"evidence is {what}: {probe} has not completed since, though wanted every {period}"
            yield make_finding("stale-evidence", State.UNKNOWN, Cause.UNDETERMINED, text, completed[-1])


def checked_nothing(docket: Docket) -> Iterator[Finding]:
    """A run completed without looking at anything: skipped parts are fine, skipping all of them is not evidence."""
    for run in docket.current:
        idle = not run.readings or any(r.name == "trials" and r.value == 0 for r in run.readings)
        compared = any(c.subject is Subject.DEVICE for c in run.comparisons)
        if run.outcome is Outcome.COMPLETED and idle and not compared:
            reason = f"; first skipped: {run.skipped[0].case}, {run.skipped[0].reason}" if run.skipped else ""
            message = f"{run.probe} completed, but it checked nothing{reason}"
            yield make_finding("checked-nothing", State.UNKNOWN, Cause.HARNESS, message, run)


def history_lost(docket: Docket) -> Iterator[Finding]:
    """The database was damaged and begun anew: what was suspect before is not known, until somebody has looked."""
    if docket.lost is None:
        return
    at, aside = docket.lost
    if docket.now - at < docket.policy.watch and not any(a.at >= at for a in docket.said):
        text = (
            f"the records of this machine were damaged or removed, and begun anew on {moment(at, seconds=False)}, so "
            f"what was found of this device before is not known; what is left of them is {aside}. Ends after "
            f"{spoken(docket.policy.watch)}, or with "
            f'canaryd ack {docket.device.name} --reason "…"'
        )
        yield Finding(rule="history-lost", state=State.UNKNOWN, cause=Cause.HARNESS, message=text)


def clock_set_back(docket: Docket) -> Iterator[Finding]:
    """A run is dated in the future: its age is not known, so it is no fresh evidence. By itself it is only said."""
    ahead = [r for r in docket.runs if r.started > docket.now + AHEAD]
    if ahead:
        lead = spoken(ahead[-1].started - docket.now)
        text = f"runs are dated up to {lead} in the future: was the clock set back? They are no fresh evidence"
        yield make_finding("clock-set-back", State.HEALTHY, Cause.ENVIRONMENT, text, ahead[-1])


def vanished(docket: Docket) -> Iterator[Finding]:
    """The device was there and is not found any more: whatever it was, nothing is known of it now."""
    if docket.gone_since is not None:
        ago = spoken(max(0.0, docket.now - docket.gone_since) // 60 * 60)
        yield Finding(
            rule="device-vanished",
            state=State.UNKNOWN,
            cause=Cause.UNDETERMINED,
            message=f"{docket.device.name} ({docket.device.model}) was last found {ago} ago and is not found now:"
            " look for it in the kernel log and on the bus; taken out on purpose, it is forgotten after judge.watch",
        )
