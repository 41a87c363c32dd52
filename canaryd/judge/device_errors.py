"""The rule for errors that a device itself raised while a probe computed on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from canaryd.formatting import format_duration
from canaryd.judge.case import Case
from canaryd.judge.clock import age
from canaryd.judge.findings import make_finding
from canaryd.judge.hangs import TAKE_OUT, identical, seldom
from canaryd.judge.phrases import count, reason_of
from canaryd.model import MPS_CLIENT, Cause, Finding, Outcome, Run, State

REPEATS = 2
"""Runs that an error of the device ended, within `judge.repeat_window`, that make it suspect by themselves (ours)."""
SELDOM_FAILED = "The device failed {times} separate times within {watch} while {probe} computed on it: {reason}"


def device_error(case: Case) -> Iterator[Finding]:
    """The device failed while it computed: suspect when that repeats, or when a sibling completes the same.

    Where siblings fail too and none completes it, the software that they share is the cause. Only what this device has
    completed on this software, at that level, can repeat: a kernel that reads beyond its operands fails every time.
    """
    failed = [
        r for r in case.runs if r.outcome is Outcome.DEVICE_ERROR and age(r, case.now) <= case.policy.repeat_window
    ]
    errors = sorted(failed, key=lambda r: -age(r, case.now))
    errors += [r for r in case.current if r.outcome is Outcome.DEVICE_ERROR and r not in errors]
    if not errors:
        for probe in sorted(case.wanted):
            yield from seldom(case, probe, "device-error", {Outcome.DEVICE_ERROR}, SELDOM_FAILED)
        return
    erring, sound = _siblings(case, errors)
    # An error of any client of MPS ends all of them (NVIDIA Multi-Process Service, "Error Containment").
    alone = [r for r in errors if MPS_CLIENT not in r.environment]
    done = [(_work(r), r.stack_id) for r in case.runs if r.outcome is Outcome.COMPLETED]
    repeated = sum(any(_is_same(r, *each) for each in done) for r in alone) >= REPEATS
    if erring and not sound:
        state, cause = State.UNKNOWN, Cause.SOFTWARE
        who = f"{count(erring, 'identical device')} failed too, and none completed it."
        action = "Check what they share: driver, libraries, server"
    else:
        state = State.SUSPECT if repeated or (sound and alone) else State.UNKNOWN
        cause = Cause.HARDWARE if repeated and sound and not erring else Cause.UNDETERMINED
        who = f"{count(sound, 'identical device')} ran the same without an error." if sound else ""
        if state is State.UNKNOWN and len(errors) >= REPEATS:
            who = "No identical device here has run it on this software: it may be the software."
        if not alone:
            who = "It runs under MPS, where an error of any other client ends this one too."
        action = TAKE_OUT
    newest = errors[-1]
    times = f" in {len(errors)} runs" if len(errors) >= REPEATS else ""
    message = f"The device failed while {newest.probe} computed on it{times}: {reason_of(newest)}"
    clears = f"Clears {format_duration(case.policy.repeat_window)} after the last error, if every probe has completed."
    yield make_finding("device-error", state, cause, message, action, newest, (who, clears))


def _siblings(case: Case, errors: Sequence[Run]) -> tuple[int, int]:
    """Return how many identical devices failed the same work too, and how many others completed it."""
    works, erring, sound = {_work(r) for r in errors}, 0, 0
    for runs in identical(case).values():
        met = [r for r in runs if _work(r) in works and age(r, case.now) <= case.policy.repeat_window]
        failed = any(r.outcome is Outcome.DEVICE_ERROR for r in met)
        # What a sibling ran before the first error may have been other software.
        since = [r for r in met if age(r, case.now) <= age(errors[0], case.now)]
        erring += failed
        sound += not failed and any(r.outcome is Outcome.COMPLETED for r in since)
    return erring, sound


def _work(run: Run) -> tuple[str, str]:
    """Return what a run did: levels compute with other sizes, and so with other kernels."""
    return run.probe, run.level


def _is_same(error: Run, work: tuple[str, str], stack_id: str) -> bool:
    """Return whether a run that completed did what this one did, on its software, where that is known.

    A runtime that aborts its process (ROCm does) leaves no stack behind.
    """
    return work == _work(error) and (not error.stack or stack_id == error.stack_id)
