"""The rule for errors that a device itself raised while a probe computed on it."""

from __future__ import annotations

from collections.abc import Iterator

from canaryd.formatting import format_duration
from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.hangs import repeated
from canaryd.judge.phrases import KERNEL_LOG, count, reason_of
from canaryd.model import MPS_CLIENT, Cause, Finding, Outcome, Run, State

REPEATS = 2
"""Runs that an error of the device ended, within `judge.repeat_window`, that make it suspect by themselves (ours)."""


def device_error(case: Case) -> Iterator[Finding]:
    """The device failed while it computed: suspect when that repeats, or when a sibling completes the same.

    Where siblings fail too and none completes it, the software that they share is the cause. Only what this device has
    completed on this software, at that level, can repeat: a kernel that reads beyond its operands fails every time.
    """
    errors = _errors(case)
    errors += [r for r in case.current if r.outcome is Outcome.DEVICE_ERROR and r not in errors]
    if not errors:
        yield from _seldom(case)
        return
    works = {_work(r) for r in errors}
    met = [
        [r for r in runs if _work(r) in works and age(r, case.now) <= case.policy.repeat_window]
        for uuid, runs in case.peers.items()
        if case.devices[uuid].kind == case.device.kind and case.devices[uuid].part != case.device.part
    ]
    erring = [runs for runs in met if any(r.outcome is Outcome.DEVICE_ERROR for r in runs)]
    # What a sibling ran before the first error may have been other software.
    first = age(errors[0], case.now)
    sound = [
        runs
        for runs in met
        if runs not in erring and any(r.outcome is Outcome.COMPLETED and age(r, case.now) <= first for r in runs)
    ]
    # An error of any client of MPS ends all of them (NVIDIA Multi-Process Service, "Error Containment").
    alone = [r for r in errors if MPS_CLIENT not in r.environment]
    done = [(_work(r), r.stack_id) for r in case.runs if r.outcome is Outcome.COMPLETED]
    repeated = sum(any(_is_same(r, *each) for each in done) for r in alone) >= REPEATS
    if erring and not sound:
        state, cause = State.UNKNOWN, Cause.SOFTWARE
        who = f"{count(len(erring), 'identical device')} failed too, and none completed it."
        action = "Check what they share: driver, libraries, server"
    else:
        state = State.SUSPECT if repeated or (sound and alone) else State.UNKNOWN
        cause = Cause.HARDWARE if repeated and sound and not erring else Cause.UNDETERMINED
        who = f"{count(len(sound), 'identical device')} ran the same without an error." if sound else ""
        if state is State.UNKNOWN and len(errors) >= REPEATS:
            who = "No identical device here has run it on this software: it may be the software."
        if not alone:
            who = "It runs under MPS, where an error of any other client ends this one too."
        action = f"Take it out of service and read the kernel log: {KERNEL_LOG}"
    newest = errors[-1]
    times = f" in {len(errors)} runs" if len(errors) >= REPEATS else ""
    message = f"The device failed while {newest.probe} computed on it{times}: {reason_of(newest)}"
    clears = f"Clears {format_duration(case.policy.repeat_window)} after the last error, if every probe has completed."
    yield make_finding("device-error", state, cause, message, action, newest, (who, clears))


def _seldom(case: Case) -> Iterator[Finding]:
    """It failed again and again, with days in between, and its siblings never did: suspect."""
    watch = format_duration(case.policy.watch)
    for probe in sorted(case.wanted):
        errors, sound = repeated(case, probe, {Outcome.DEVICE_ERROR})
        if errors and not any(MPS_CLIENT in r.environment for r in errors):
            newest = errors[-1]
            yield make_finding(
                "device-error",
                State.SUSPECT,
                Cause.UNDETERMINED,
                f"The device failed {len(errors)} separate times within {watch} while {probe} computed on it: "
                f"{reason_of(newest)}",
                f"Take it out of service and read the kernel log: {KERNEL_LOG}",
                newest,
                (f"{count(sound, 'identical device')} never failed this way.", f"Clears {watch} after it stops."),
            )


def _work(run: Run) -> tuple[str, str]:
    """Return what a run did: levels compute with other sizes, and so with other kernels."""
    return run.probe, run.level


def _is_same(error: Run, work: tuple[str, str], stack_id: str) -> bool:
    """Return whether a run that completed did what this one did, on its software, where that is known.

    A runtime that aborts its process (ROCm does) leaves no stack behind.
    """
    return work == _work(error) and (not error.stack or stack_id == error.stack_id)


def _errors(case: Case) -> list[Run]:
    """Return the runs within `judge.repeat_window` that an error of the device ended, oldest first."""
    failed = (r for r in case.runs if r.outcome is Outcome.DEVICE_ERROR)
    found = [r for r in failed if age(r, case.now) <= case.policy.repeat_window]
    return sorted(found, key=lambda r: -age(r, case.now))
