"""The first two lines of a status: whether this machine's numbers can be trusted, and what to do now."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from canaryd.formatting import format_time
from canaryd.judge.incidents import Incident, incidents
from canaryd.model import Cause, State
from canaryd.report.incidents import Step, brief, names_of, next_step, precaution, step
from canaryd.report.status import UNTENDED_RULE, DeviceStatus, Status
from canaryd.report.terminal import cause_words
from canaryd.store.locks import user_name

ANSWERS = {
    State.HEALTHY: "YES, trust this node's numbers",
    State.DEGRADED: "YES, this node's numbers are right so far",
    State.UNKNOWN: "UNKNOWN whether this node's numbers are right",
    State.SUSPECT: "NO, do not trust this node's numbers",
    State.FAULTY: "NO, do not trust this node's numbers",
}
"""Worst state of a machine → whether to trust its numbers. A degraded device has computed correctly so far."""
NO_ALERT = "it raises no alert, because no daemon runs on this state directory"
"""Note about a drill whose fault was found while no daemon runs."""
START = (Step("Start the daemon:", "canaryd run"), Step("Or test once:", "canaryd check"))
"""Steps to show if no device has been tested yet."""


def answer(status: Status) -> str:
    """Return one line: whether this machine's numbers can be trusted, and which devices are the reason."""
    if status.unreadable and status.state is State.UNKNOWN:
        return f"{ANSWERS[State.UNKNOWN]}: {status.unreadable}"
    if status.daemon and not status.devices:
        return f"{ANSWERS[State.UNKNOWN]}: the daemon is still looking for devices"
    if status.closed:
        return f"{ANSWERS[State.UNKNOWN]}: {status.absent} does not exist, and user {user_name()} cannot make it"
    if not status.devices:
        why = f": {status.absent} does not exist" if status.absent else ""
        return f"{ANSWERS[State.UNKNOWN]}: no device has been tested yet{why}"
    if status.first_tests:
        return f"{ANSWERS[State.UNKNOWN]}: first tests are running on {_names(status.first_tests)}"
    alike: dict[tuple[State, Cause, str], list[DeviceStatus]] = {}
    for d in status.devices:
        alike.setdefault((d.verdict.state, d.verdict.cause, _what_is_wrong(d, status.state)), []).append(d)
    # What is wrong comes before verdicts that are merely old: these say nothing of a device.
    ordered = sorted(alike, key=lambda key: (-key[0].severity, _is_only_old(alike[key][0])))
    return f"{_whether(status)}: " + "; ".join(_counted(key, alike[key], status.state) for key in ordered)


def _whether(status: Status) -> str:
    """Return whether to trust the machine; if only some accelerators are wrong and all else is right, which not to."""
    wrong = [d for d in status.devices if d.verdict.state.severity >= State.SUSPECT.severity]
    others = [d for d in status.devices if d not in wrong]
    names, parts = {d.device.name for d in wrong}, {d.device.part for d in wrong}
    spread = any(d.device.backend == "cpu" for d in wrong) or any(
        d.device.part in parts or not names.isdisjoint(d.device.detail.get("behind", "").split()) for d in others
    )
    if spread or not (wrong and others) or any(d.verdict.state is State.UNKNOWN for d in others):
        return ANSWERS[status.state]
    return f"NO, do not trust the numbers of {_names(wrong)}"


def _what_is_wrong(d: DeviceStatus, worst: State) -> str:
    """Return the device's worst incident as a clause; "" if the device's state is better than `worst` or is healthy."""
    if d.verdict.state is not worst or worst is State.HEALTHY:
        return ""
    found = _worst_incident(d)
    return brief(found) if found else ""


def _worst_incident(d: DeviceStatus) -> Incident | None:
    return next(iter(incidents(d.verdict)), None)


def _is_only_old(d: DeviceStatus) -> bool:
    """Return whether the only problem of a device is that its verdict was not renewed."""
    return all(f.rule == UNTENDED_RULE for f in d.verdict.findings if f.state is d.verdict.state)


def _counted(key: tuple[State, Cause, str], same: Sequence[DeviceStatus], of_node: State) -> str:
    """Return a clause about the devices `same`, which share the `key`: "cuda:0 is faulty (hardware)".

    `key` is (state, cause, worst incident). Only for the node's worst state, `of_node`, cause and incident are
    included.
    """
    state, cause, worst = key
    if state is State.HEALTHY and len(same) > 1:
        return f"{len(same)} devices are healthy"
    known = cause is not Cause.NONE and state is not State.UNKNOWN and state is of_node
    why = f" ({cause_words(cause)})" if known else ""
    what = f": {worst}" if worst else ""
    return f"{_names(same)} {'is' if len(same) == 1 else 'are'} {state.value}{why}{what}"


def _names(devices: Sequence[DeviceStatus]) -> str:
    return names_of([d.device for d in devices])


def _accused(status: Status) -> list[DeviceStatus]:
    """Return the devices that the advice is about: all in the worst state; if that is faulty, those of one cause."""
    worst = [d for d in status.devices if d.verdict.state is status.state]
    if status.state is State.FAULTY:  # what to do depends on the cause
        worst = [d for d in worst if d.verdict.cause is worst[0].verdict.cause]
    return worst


def advised(status: Status) -> frozenset[str]:
    """Return the uuids of devices for which the advice already says what to do, so that no other line repeats it."""
    worst, unknown = _accused(status), status.state is State.UNKNOWN
    if status.first_tests or all(d.acknowledged for d in worst) or (unknown and status.released_until):
        return frozenset(d.device.uuid for d in worst)
    there = [d for d in worst if d.present or not unknown]  # how to find those that are gone is said in any case
    return frozenset(d.device.uuid for d in worst if d not in there or _alike(there) or _step([d]) == _step(there))


def _alike(devices: Sequence[DeviceStatus]) -> bool:
    """Return whether all devices are faulty for the same reason (rule and cause): then one step helps them all."""
    found = [_worst_incident(d) for d in devices]
    kinds = {
        (i.lead.rule, i.state, i.cause, type(d.device), "" if i.wrong else i.lead.action) if i else None
        for d, i in zip(devices, found, strict=True)
    }
    return len(kinds) == 1 and all(i is not None and i.state is State.FAULTY for i in found)


def _step(devices: Sequence[DeviceStatus]) -> Step:
    """Return what to do about the first device's worst incident, or about all devices if they are `_alike`.

    The step has no text if the device has no incident, or if its verdict is only too old.
    """
    found = _worst_incident(devices[0])
    if found is None or found.lead.rule == UNTENDED_RULE:
        return Step("")
    return step(found, *(d.device for d in (devices if _alike(devices) else devices[:1])))


def drills(status: Status) -> list[str]:
    """Return one line for each kind of drill (test with an injected fault) in the last hour: whether it was caught."""
    alike: dict[tuple[str, bool], list[DeviceStatus]] = {}
    for d in status.devices:
        if d.drill:
            alike.setdefault((d.drill.fault, d.drill.caught), []).append(d)
    return [_drill(caught, same, daemon=status.daemon) for (_, caught), same in alike.items()]


def raised_until(until: float) -> str:
    """Return when the alert of a drill ends, as a clause."""
    return f"the alert CanarydDrill ends at about {format_time(until, seconds=False)}"


def _drill(caught: bool, same: Sequence[DeviceStatus], *, daemon: bool) -> str:
    seen = [d.drill for d in same if d.drill]
    at = format_time(max(each.at for each in seen), seconds=False)
    raised = raised_until(max(each.until for each in seen)) if daemon else NO_ALERT
    what = f"caught; {raised}" if caught else "not caught, so it raises no alert"
    return f"drill of {at} ({seen[0].fault}) on {_names(same)}: {what}"


def advice(status: Status) -> str:
    """Return one line: what to do now about the worst devices."""
    return " ".join(map(str, steps(status)))


def steps(status: Status) -> Iterator[Step]:
    """Yield what to do now about the worst devices."""
    if status.unreadable and status.state is State.UNKNOWN:
        yield Step("Make the stored record readable, then ask again.")
    elif status.first_tests or (status.daemon and not status.devices):
        yield Step("Wait some minutes, then ask again. No device counts as healthy before it is judged.")
    elif status.closed:
        yield Step("A daemon may run all the same, without a record: its /readyz says so.")
        sudo = "use sudo, or " if os.geteuid() else ""
        yield Step(f"To keep a record, {sudo}name another directory with --state-dir.")
    elif status.devices:
        yield from (todo for todo in _steps_for_devices(status) if todo.text)
    else:
        yield from START
    if many := _problems(status):
        yield Step(f"canaryd itself has {many} (see below).")


def _problems(status: Status) -> str:
    """Return "a problem" or "problems" if canaryd reports problems of its own, besides an unreadable store; else ""."""
    others = [text for text in status.problems if text != status.unreadable]
    return "" if not others else "a problem" if len(others) == 1 else "problems"


def _steps_for_devices(status: Status) -> Iterator[Step]:
    worst, state = _accused(status), status.state
    it, is_, its = ("it", "is", "its") if len(worst) == 1 else ("them", "are", "their")
    names, todo = _names(worst), _step(worst)
    if state is State.HEALTHY:
        idle = "Nothing." if status.daemon else "Nothing urgent."
        yield Step("Nothing is wrong with the devices." if _problems(status) else idle)
        if not status.daemon:
            yield Step("The daemon is not running. Start it:", "canaryd run")
    elif all(d.acknowledged for d in worst):
        until = format_time(min(d.acknowledgement.until for d in worst if d.acknowledgement), seconds=False)
        yield Step(f"Nothing new: {names} {is_} acknowledged until {until}.")
        yield Step(f"Still, send {it} no work and do not use {its} results.")
        return
    elif state is State.FAULTY:
        yield todo if todo.text else Step(precaution(worst[0].verdict.cause, [d.device for d in worst]))
        if all(d.verdict.state in (State.FAULTY, State.HEALTHY) for d in status.devices):  # else there is more to read
            found = _worst_incident(worst[0])
            yield next_step(found, worst[0].device) if found else Step("")
        if not status.daemon:
            yield Step("The daemon is not running, so nothing else is tested. Start it:", "canaryd run")
    elif state is State.SUSPECT:
        yield Step(f"Send {names} no new work, and hold back {its} results.")
        yield _step_for_suspect(status, worst, todo)
    elif state is State.DEGRADED:
        yield Step(f"Nothing urgent. Plan to look at {names}.")
        yield todo
    else:
        yield from _steps_for_unknown(status, worst)
    if others := [d for d in worst if d.device.uuid not in advised(status)]:
        yield Step(f"For {_names(others)}, see below.")


def _step_for_suspect(status: Status, worst: Sequence[DeviceStatus], todo: Step) -> Step:
    found = _worst_incident(worst[0])
    it = "it" if len(worst) == 1 else "them"
    waits = not todo.text or bool(found and found.wrong and found.wrong.to_come)
    if waits and not status.daemon:
        return Step(f"No daemon runs that would test {it} again; type:", _check(worst))
    return todo if todo.text else Step(f"canaryd tests {it} again automatically.")


def _steps_for_unknown(status: Status, worst: Sequence[DeviceStatus]) -> Iterator[Step]:
    if status.released_until:
        yield Step("Nothing is tested because the devices are released. To end the release:", "canaryd release --end")
        return
    if gone := [d for d in worst if not d.present]:
        missed, are = ("it", "is") if len(gone) == 1 else ("them", "are")
        yield Step(f"Find out why {_names(gone)} {are} gone: look at the kernel log, the power and the slot.")
        yield Step(f"If you removed {missed}, list {missed} under devices.absent in the configuration.")
    if not (here := [d for d in worst if d.present]):
        return
    it, is_ = ("it", "is") if len(here) == 1 else ("them", "are")
    todo = _step(here)
    if todo.text:
        yield todo
    elif not status.daemon:
        yield from START
    else:
        yield Step(f"See below why {_names(here)} {is_} unknown. To test {it} now:", _check(here))


def _check(devices: Sequence[DeviceStatus]) -> str:
    return f"canaryd check --device {devices[0].device.name}" if len(devices) == 1 else "canaryd check"
