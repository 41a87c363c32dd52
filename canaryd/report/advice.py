"""The first two lines of a status: may this machine's numbers be trusted, and what to do now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from canaryd.formatting import format_time
from canaryd.judge.incidents import incidents
from canaryd.judge.wording import whom_to_tell
from canaryd.model import Cause, State
from canaryd.report.incidents import ON_ANOTHER, Step, brief
from canaryd.report.status import UNTENDED_RULE, DeviceStatus, Status
from canaryd.report.terminal import cause_note

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


def answer(status: Status) -> str:
    """Return whether this machine's numbers can be trusted, and because of which devices: one line."""
    if status.unreadable and status.state is State.UNKNOWN:
        return f"{ANSWERS[State.UNKNOWN]}: {status.unreadable}"
    if status.daemon and not status.devices:
        return f"{ANSWERS[State.UNKNOWN]}: the daemon is still looking for devices"
    if not status.devices:
        return f"{ANSWERS[State.UNKNOWN]}: no device has been tested yet"
    if status.first_tests:
        return f"{ANSWERS[State.UNKNOWN]}: first tests are running on {_names(status.first_tests)}"
    alike: dict[tuple[State, Cause, str], list[DeviceStatus]] = {}
    for d in status.devices:
        alike.setdefault((d.verdict.state, d.verdict.cause, _what_is_wrong(d, status.state)), []).append(d)
    # What is wrong comes before verdicts that are merely old: these say nothing of a device.
    told = sorted(alike, key=lambda key: (-key[0].severity, _is_only_old(alike[key][0])))
    return f"{ANSWERS[status.state]}: " + "; ".join(_counted(key, alike[key], status.state) for key in told)


def _what_is_wrong(d: DeviceStatus, worst: State) -> str:
    """Return the worst incident of a device in the worst state; that its verdict is old comes last."""
    if d.verdict.state is not worst or worst is State.HEALTHY:
        return ""
    found = sorted(incidents(d.verdict), key=lambda i: (-i.state.severity, i.lead.rule == UNTENDED_RULE))
    return brief(found[0]) if found else ""


def _is_only_old(d: DeviceStatus) -> bool:
    """Whether nothing makes a device doubtful but that its verdict was not renewed."""
    return all(f.rule == UNTENDED_RULE for f in d.verdict.findings if f.state is d.verdict.state)


def _counted(key: tuple[State, Cause, str], same: Sequence[DeviceStatus], of_node: State) -> str:
    """Return which devices are in a state; of the worst of the node, also why, and what is wrong with all of them."""
    state, cause, worst = key
    if state is State.HEALTHY and len(same) > 1:
        return f"{len(same)} devices are healthy"
    known = cause is not Cause.NONE and state is not State.UNKNOWN and state is of_node
    why = f" ({cause_note(cause)})" if known else ""
    what = f": {worst}" if worst else ""
    return f"{_names(same)} {'is' if len(same) == 1 else 'are'} {state.value}{why}{what}"


def _names(devices: Sequence[DeviceStatus]) -> str:
    names = [d.device.name for d in devices]
    if len(names) > NAMED + 1:
        names = [*names[:NAMED], f"{len(names) - NAMED} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def is_advised(status: Status, d: DeviceStatus) -> bool:
    """Return whether the advice says what to do about the worst incident of a device, so that it need not say so."""
    first = status.devices[0].verdict
    found = incidents(d.verdict)
    known = bool(found) and found[0].wrong is not None and first.cause in (Cause.HARDWARE, Cause.UNDETERMINED)
    return known and State.FAULTY is d.verdict.state and d.verdict.cause is first.cause


def advice(status: Status) -> str:
    """Return what to do now about the worst devices, in one line."""
    return " ".join(map(str, steps(status)))


def steps(status: Status) -> Iterator[Step]:
    """Yield what to do now about the worst devices."""
    if status.first_tests or (status.daemon and not status.devices):
        yield Step("Wait some minutes, then ask again. No device counts as healthy before it is judged.")
    elif status.devices:
        yield from _steps_for_devices(status)
    elif status.unreadable:
        yield Step("Make the stored record readable, then ask again.")
    else:
        yield _start()
    if others := [text for text in status.problems if text != status.unreadable]:
        many = "a problem" if len(others) == 1 else "problems"
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
        if not status.daemon:
            yield Step("The daemon is not running, so nothing else is tested: start it (canaryd run).")
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
    cause = first.verdict.cause
    if cause is Cause.HARDWARE:
        each = len(worst) > 1 and not first.device.weak_identity
        case = whom_to_tell(first.device) + " for each" * each
        yield Step(f"{_out_of_service(worst)}, then {case}:", f"canaryd report {first.device.name} -o ./case")
    elif cause is Cause.SOFTWARE:
        yield Step(f"Do not use the results of {names}. Roll back or fix the software that the findings name.")
    elif cause is Cause.ENVIRONMENT:
        yield Step(f"Do not use the results of {names}. Fix what the findings name: heat, power or cables.")
    elif cause is Cause.HARNESS:
        yield Step(f"Do not use the results of {names}. Read the findings: the test itself may be wrong.")
    else:
        yield Step(f"{_out_of_service(worst)}.")
        found = incidents(first.verdict)
        if repeat := found[0].repeat if found else "":
            yield Step(ON_ANOTHER, repeat)
        else:
            yield Step("The cause is not known; the findings say how to find it.")


def _out_of_service(worst: Sequence[DeviceStatus]) -> str:
    if processors := [d for d in worst if d.device.backend == "cpu"]:
        return f"Take this whole node out of service ({_names(processors)} is its processor)"
    return f"Take {_names(worst)} out of service"


def _steps_for_unknown(status: Status, worst: Sequence[DeviceStatus]) -> Iterator[Step]:
    names = _names(worst)
    it, is_ = ("it", "is") if len(worst) == 1 else ("them", "are")
    if status.released_until:
        yield Step("Nothing is tested because the devices are released. To end the release:", "canaryd release --end")
        return
    if gone := [d for d in worst if not d.present]:
        missed, are = ("it", "is") if len(gone) == 1 else ("them", "are")
        yield Step(f"Find out why {_names(gone)} {are} gone: look at the kernel log, the power and the slot.")
        yield Step(f"If you removed {missed}, list {missed} under devices.absent in the configuration.")
    if gone == list(worst):
        return
    if not status.daemon:
        yield _start()
    else:
        yield Step(f"See below why {names} {is_} unknown. To test {it} now:", _check(worst))


def _check(devices: Sequence[DeviceStatus]) -> str:
    return f"canaryd check --device {devices[0].device.name}" if len(devices) == 1 else "canaryd check"
