"""The first two lines of a status: may this machine's numbers be trusted, and what to do now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from canaryd.formatting import format_time
from canaryd.model import Cause, State
from canaryd.report.status import DeviceStatus, Status

NAMED = 4
"""Devices that are named one by one in a sentence."""
ANSWERS = {
    State.HEALTHY: "YES, trust this node's numbers",
    State.DEGRADED: "YES, this node's numbers are right so far",
    State.UNKNOWN: "UNKNOWN whether this node's numbers are right",
    State.SUSPECT: "NO, do not trust this node's numbers",
    State.FAULTY: "NO, do not trust this node's numbers",
}
"""What the worst state of a machine means for its numbers: those of a degraded device are right so far."""


class Step(NamedTuple):
    """One thing to do."""

    text: str
    command: str = ""
    """What to type for it; "" for nothing."""

    def __str__(self) -> str:
        return f"{self.text} {self.command}".rstrip()


def answer(status: Status) -> str:
    """Return whether this machine's numbers can be trusted, and because of which devices: one line."""
    if not status.devices:
        return f"{ANSWERS[State.UNKNOWN]}: no device has been tested yet"
    alike = groupby(status.devices, key=lambda d: (d.verdict.state, d.verdict.cause))
    return f"{ANSWERS[status.state]}: " + "; ".join(
        _counted(state, cause, list(same)) for (state, cause), same in alike
    )


def _counted(state: State, cause: Cause, same: Sequence[DeviceStatus]) -> str:
    if state is State.HEALTHY and len(same) > 1:
        return f"{len(same)} devices are healthy"
    why = "" if cause is Cause.NONE else f" ({cause.value})"
    return f"{_names(same)} {'is' if len(same) == 1 else 'are'} {state.value}{why}"


def _names(devices: Sequence[DeviceStatus]) -> str:
    names = [d.device.name for d in devices]
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def advice(status: Status) -> str:
    """Return what to do now about the worst devices, in one line."""
    return " ".join(map(str, steps(status)))


def steps(status: Status) -> Iterator[Step]:
    """Yield what to do now about the worst devices."""
    if status.devices:
        yield from _steps_for_devices(status)
    else:
        yield _start()
    if status.problems:
        many = "a problem" if len(status.problems) == 1 else "problems"
        yield Step(f"canaryd itself has {many} (see below).")


def _start() -> Step:
    return Step("Start the daemon (canaryd run), or test once:", "canaryd check")


def _steps_for_devices(status: Status) -> Iterator[Step]:
    state = status.state
    worst = [d for d in status.devices if d.verdict.state is state]
    if state is State.FAULTY:  # what to do depends on the cause, and the first costs most
        worst = [d for d in worst if d.verdict.cause is worst[0].verdict.cause]
    names = _names(worst)
    it, is_ = ("it", "is") if len(worst) == 1 else ("them", "are")
    if all(d.acknowledged for d in worst):
        until = format_time(min(d.acknowledged_until for d in worst), seconds=False)
        yield Step(f"Nothing new: {names} {is_} acknowledged until {until}.")
        yield Step(f"Still, send {it} no work and do not use {'its' if len(worst) == 1 else 'their'} results.")
    elif state is State.FAULTY:
        yield from _steps_for_faulty(worst)
    elif state is State.SUSPECT:
        yield Step(f"Send {names} no new work, and hold back {'its' if len(worst) == 1 else 'their'} results.")
        if status.daemon:
            yield Step(f"canaryd tests {it} again automatically.")
        else:
            yield Step(f"No daemon runs that would test {it} again; type:", _check(worst))
    elif state is State.UNKNOWN:
        yield from _steps_for_unknown(status, worst)
    elif state is State.DEGRADED:
        yield Step(f"Nothing urgent. Plan to look at {names}; the findings say what to look at.")
    elif status.daemon:
        yield Step("Nothing.")
    else:
        yield Step("Nothing urgent. The daemon is not running: start it (canaryd run).")


def _steps_for_faulty(worst: Sequence[DeviceStatus]) -> Iterator[Step]:
    names, first = _names(worst), worst[0]
    its = "its" if len(worst) == 1 else "their"
    cause = first.verdict.cause
    if cause is Cause.HARDWARE:
        yield Step(f"Take {names} out of service and do not use {its} results.")
        yield Step("Then open a vendor case with the report:", f"canaryd report {first.device.name} -o ./case")
    elif cause is Cause.SOFTWARE:
        yield Step(f"Do not use the results of {names}. Roll back or fix the software that the findings name.")
    elif cause is Cause.ENVIRONMENT:
        yield Step(f"Do not use the results of {names}. Fix what the findings name: heat, power or cables.")
    elif cause is Cause.HARNESS:
        yield Step(f"Do not use the results of {names}. Read the findings: the test itself may be wrong.")
    else:
        yield Step(f"Take {names} out of service and do not use {its} results.")
        yield Step("The cause is not known; the findings say how to find it.")


def _steps_for_unknown(status: Status, worst: Sequence[DeviceStatus]) -> Iterator[Step]:
    names = _names(worst)
    it, is_ = ("it", "is") if len(worst) == 1 else ("them", "are")
    if status.released_until:
        yield Step("Nothing is tested because the devices are released. To end the release:", "canaryd release --end")
    elif not any(d.present for d in worst):
        yield Step(f"Find out why {names} {is_} gone: look at the kernel log, the power and the slot.")
        yield Step(f"If you removed {it}, list {it} under devices.absent in the configuration.")
    elif not status.daemon:
        yield _start()
    else:
        yield Step(f"See below why {names} {is_} unknown. To test {it} now:", _check(worst))


def _check(devices: Sequence[DeviceStatus]) -> str:
    return f"canaryd check --device {devices[0].device.name}" if len(devices) == 1 else "canaryd check"
