"""`canaryd gate`: whether this node may take work. A scheduler asks it and gets one quick answer from the store.

It uses no device, writes nothing, and waits at most `PATIENCE`. Three rules keep it from taking many nodes out of
service at once: it only logs until the configuration lets it act; one file or one variable silences it; and an unknown
state fails no node unless an option says so (docs/enforcement.md).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.config.settings import Config
from canaryd.engine import endpoints
from canaryd.facts import beginning, printable
from canaryd.formatting import format_duration
from canaryd.judge import clock
from canaryd.judge.incidents import incidents
from canaryd.judge.phrases import count
from canaryd.model import TORCH, Cause, Device, Outcome, State
from canaryd.report import proof, status
from canaryd.report.incidents import brief
from canaryd.report.status import DeviceStatus, Status
from canaryd.report.terminal import cause_words, state_note, typed
from canaryd.store.database import DATABASE, StoreTooNew
from canaryd.store.store import Store

SCHEMA = "canaryd.gate/1"
PATIENCE = 5.0
"""Seconds after which the answer is "unknown" if the store has not answered. Reading a verdict takes milliseconds."""
END_PATIENCE = 0.5
"""Seconds to wait for the killed reader of the store to end. It needs microseconds, unless a disk hangs. Our choice."""
SWITCH = Path("/etc/canaryd/no-enforcement")
"""A file that stops enforcement, whatever it contains. So does a file of this name beside the configuration file."""
VARIABLE = "CANARYD_ENFORCEMENT"
"""Environment variable that stops enforcement with any value except "act". It cannot start enforcement."""
CAUSES = (Cause.HARDWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED)
"""Causes for which the gate acts by default. Wrong software makes every node faulty at once, and draining all nodes
repairs nothing; an error of the test itself must cost no node (ours)."""
ACTS_ON = (State.DEGRADED, State.UNKNOWN, State.SUSPECT, State.FAULTY)
LOOKED = 50
"""Number of a device's newest runs that are searched for a completed one."""

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
EXIT = {PASS: 0, FAIL: 2, UNKNOWN: 3}
"""Decision → exit status while enforcement acts. Otherwise the exit status is always 0."""
UNTESTED = "start the daemon (canaryd run), or run canaryd check"
NOT_A_FAILURE = "unknown: exit 3, not fail"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the gate has to decide: for which devices, and which states and causes fail."""

    on: tuple[State, ...] = (State.FAULTY,)
    """States that make the node fail. A worse state fails too; `unknown` fails only if it is in this tuple."""
    causes: tuple[Cause, ...] = CAUSES
    devices: tuple[str, ...] = ()
    """The devices to decide about, by uuid, name, backend, or an accelerator's index; empty for all."""
    endpoint: str = ""
    """Name of a configured endpoint, to decide about it and the devices that serve it instead; "" for none."""
    max_age: float = 0.0
    """Age in seconds of a device's newest completed test above which the answer is unknown; 0.0: the judge's limit."""
    proven: bool = False
    """Whether a device is unknown that no `canaryd prove` has proven since its last repair."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """The decision about one device."""

    device: str
    """`Device.uuid`."""
    name: str
    state: State
    cause: Cause
    finding: str
    """The worst incident as a clause, with the same words as in every report; "" if there is none."""
    decision: str
    """`PASS`, `FAIL` or `UNKNOWN`."""
    why: str = ""
    """The reason for the decision if the device's state does not explain it; else ""."""

    def __str__(self) -> str:
        text = f"{self.name} {state_note(self.state.value, self.cause)}"
        return ": ".join(part for part in (text, self.why, self.finding) if part)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The decision about the node, the same whether or not enforcement acts on it."""

    decision: str
    devices: tuple[Item, ...] = ()
    """The decisions about single devices, the worst first."""
    reason: str = ""
    """The reason why the decision is unknown, or "" if the devices' own reasons show it."""


def ask(settings: Config, question: Question, patience: float = PATIENCE) -> Answer:
    """Return the decision from the store, or unknown with a reason if no answer comes within `patience` seconds."""
    return settled(_within(patience, lambda: _read(settings, question, time.time())), question)


def settled(answer: Answer, question: Question) -> Answer:
    """Return the answer; what is unknown fails where the question says so."""
    fails = answer.decision == UNKNOWN and State.UNKNOWN in question.on
    return replace(answer, decision=FAIL) if fails else answer


def decide(found: Status, question: Question, newest: Mapping[str, float | None]) -> Answer:
    """Return the decision. `newest`: device → start of its newest completed test (epoch s), or None if not known."""
    chosen, missing = _chosen([d.device for d in found.devices], question.devices)
    items = [_item(d, question, newest.get(d.device.uuid), found.now) for d in found.devices if d.device.uuid in chosen]
    rank = (FAIL, UNKNOWN, PASS)
    items.sort(key=lambda i: (rank.index(i.decision), -i.state.severity))
    reason = ""
    if missing:
        there = ", ".join(d.device.name for d in found.devices) or "none"
        reason = f"no device {' or '.join(missing)}; this host has {there}"
    elif not items:
        reason = f"no device has been tested yet: {UNTESTED}"
    decisions = {i.decision for i in items} | ({UNKNOWN} if reason else set())
    return Answer(decision=next(d for d in rank if d in decisions), devices=tuple(items), reason=reason)


def silenced(settings: Config, environ: Mapping[str, str]) -> str:
    """Return the reason why enforcement is off, or "" if it is on.

    A switch file that cannot be checked also turns enforcement off, because the file may exist.
    """
    if (value := environ.get(VARIABLE, "act")) != "act":
        return f"{VARIABLE}={printable(value)} in the environment"
    for path in dict.fromkeys((SWITCH, *([settings.file.absolute().parent / SWITCH.name] if settings.file else []))):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path} cannot be checked: {error.strerror}"
        return f"{path} exists"
    if settings.enforcement != "act":
        return f"enforcement is {settings.enforcement} ({settings.file or 'default'})"
    return ""


def exit_code(answer: Answer, silence: str) -> int:
    """Return the decision's exit status, or 0 if `silence` gives a reason why enforcement is off."""
    return 0 if silence else EXIT[answer.decision]


def as_json(answer: Answer, question: Question, silence: str) -> dict[str, Any]:
    """Return the object that `canaryd gate --json` prints (docs/enforcement.md)."""
    return {
        "schema": SCHEMA,
        "decision": answer.decision,
        "acts": not silence,
        "silenced_by": silence,
        "exit_code": exit_code(answer, silence),
        "on": [s.value for s in _fails(question)],
        "causes": [c.value for c in question.causes],
        "reason": answer.reason,
        "devices": [to_json(item) for item in answer.devices],
    }


def as_text(answer: Answer, question: Question, silence: str, width: int = 0) -> str:
    """Return `in_words` with what the exit status means, at most `width` columns wide; 0 means no limit."""
    unknown = answer.decision == UNKNOWN
    aside = f" [exit 0, log only: {silence}]" if silence else f" [{NOT_A_FAILURE}]" if unknown else ""
    line = in_words(answer, question, silence)
    if width and len(line) + len(aside) > width:
        aside = " [exit 0, log only]" if silence else aside
        line = beginning(line, width - len(aside))
    return f"{line}{printable(aside)}"


def in_words(answer: Answer, question: Question, silence: str) -> str:
    """Return one line that begins with the decision."""
    decisive = [i for i in answer.devices if i.decision == answer.decision]
    parts = [answer.reason] if answer.reason else []
    if answer.decision == PASS:
        states = ", ".join(s.value for s in _fails(question))
        parts.append(f"{count(len(decisive), 'device')}, none of them {states}")
        parts += [str(i) for i in answer.devices if i.why][:1]
    elif decisive:
        more = f" (and {', '.join(i.name for i in decisive[1:])})" if len(decisive) > 1 else ""
        parts.append(f"{str(decisive[0]).rstrip('.')}{more}")
    decision = {PASS: "pass", FAIL: "would fail" if silence else "fail", UNKNOWN: "unknown"}[answer.decision]
    return printable(typed(" ".join(f"{decision}: {'; '.join(parts)}".split())))


# -- one device -------------------------------------------------------------------------------------------------------


def _fails(question: Question) -> tuple[State, ...]:
    least = min(s.severity for s in question.on)
    return tuple(s for s in State if s.severity >= least and (s is not State.UNKNOWN or s in question.on))


def _item(d: DeviceStatus, question: Question, newest: float | None, now: float) -> Item:
    verdict = d.verdict
    decision, why = PASS, ""
    if verdict.state in _fails(question):
        decision = FAIL
        if verdict.state is not State.UNKNOWN and verdict.cause not in question.causes:
            decision, why = PASS, f"passes: {cause_words(verdict.cause)} is not among the causes to fail for"
    elif any(s is State.UNKNOWN for s in (verdict.state, *(f.state for f in verdict.findings))):
        decision = UNKNOWN  # suspicion alone passes; it makes nothing known that is not
    elif question.max_age and (newest is None or now - newest > question.max_age):
        decision = FAIL if State.UNKNOWN in question.on else UNKNOWN
        age = (
            "no completed test of known age"
            if newest is None
            else f"the newest test is {format_duration(now - newest)} old"
        )
        why = f"{age} (limit {format_duration(question.max_age)})"
    found = incidents(verdict)
    return Item(
        device=d.device.uuid,
        name=d.device.name,
        state=verdict.state,
        cause=verdict.cause,
        finding=brief(found[0]) if found else "",
        decision=decision,
        why=why,
    )


def _chosen(devices: Sequence[Device], names: Sequence[str]) -> tuple[Collection[str], list[str]]:
    """Return the uuids of the devices that `names` select, and the names that match no device.

    A partitioned device and its instances share silicon: if one is selected, so is the other.
    """
    if not names:
        return {d.uuid for d in devices}, []
    named = {name: {d.uuid: d for d in devices if _is_named(d, name)} for name in names}
    parts = {d.uuid for found in named.values() for d in found.values()}
    above = {d.parent for found in named.values() for d in found.values() if d.parent}
    return (
        {d.uuid for d in devices if d.uuid in parts | above or d.parent in parts},
        [name for name, found in named.items() if not found],
    )


def _is_named(device: Device, name: str) -> bool:
    if name.isdecimal():
        return device.is_accelerator and device.runtime == TORCH and device.index == int(name)
    return name in (device.uuid, device.name, device.backend)


# -- the store, without locking anything -------------------------------------------------------------------------------


def _read(settings: Config, question: Question, now: float) -> Answer:
    path = settings.state_dir / DATABASE
    try:
        path.stat()
    except PermissionError:
        pass  # the store says it, and what to type
    except FileNotFoundError as error:
        with contextlib.closing(Store.open(settings.state_dir, for_reading=True)) as store:
            reason = store.unreadable or f"cannot read {path}: {error.strerror}; {UNTESTED}"
        return Answer(decision=UNKNOWN, reason=reason)
    except OSError as error:
        return Answer(decision=UNKNOWN, reason=f"cannot read {path}: {error.strerror}")
    try:
        with contextlib.closing(Store.open(settings.state_dir, for_reading=True)) as store:
            # Whether a daemon runs is not tested by its lock: that could block one that starts at this moment. A
            # verdict that is not renewed is unknown by its age.
            found = status.gather(store, settings, now, daemon=True, evidence={})
            uuids = [d.device.uuid for d in found.devices] if question.max_age else []
            newest = {uuid: _newest(store, uuid, now) for uuid in uuids}
            problems = [*store.problems, *([store.problem] if store.problem else [])]
    except StoreTooNew as error:
        return Answer(decision=UNKNOWN, reason=str(error))
    if question.endpoint:
        parts = endpoints.parts(settings, question.endpoint, [d.device for d in found.devices])
        question = replace(question, devices=parts)
    answer = decide(found, question, newest)
    if question.proven:
        answer = _only_proven(answer, question, found, settings.state_dir)
    if problems and answer.decision != FAIL:
        return replace(answer, decision=UNKNOWN, reason="; ".join(problems))
    return answer


def _only_proven(answer: Answer, question: Question, found: Status, state_dir: Path) -> Answer:
    acks = {d.device.uuid: d.acks for d in found.devices}
    unproven = FAIL if State.UNKNOWN in question.on else UNKNOWN
    items = [
        replace(item, decision=unproven, why=why)
        if item.decision == PASS and (why := proof.missing(state_dir, item.device, acks[item.device]))
        else item
        for item in answer.devices
    ]
    decisions = {answer.decision, *(item.decision for item in items)}
    return replace(answer, devices=tuple(items), decision=next(d for d in (FAIL, UNKNOWN, PASS) if d in decisions))


def _newest(store: Store, device: str, now: float) -> float | None:
    for limit in (1, LOOKED):  # one is enough nearly always, and reading a run takes time
        runs = store.runs(device, limit=limit)
        ages = [clock.age(r, now) for r in runs if r.outcome is Outcome.COMPLETED and r.whole]
        if (least := min(ages, default=math.inf)) < math.inf:
            return now - least
    return None


def _within(patience: float, work: Callable[[], Answer]) -> Answer:
    """Return the answer of `work`, or unknown if it takes longer than `patience` seconds, because a disk can hang.

    A child process does the work; it is killed after that time.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(writing, work)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], patience)[0]:
            os.kill(child, signal.SIGKILL)
            _reap(child)
            return Answer(decision=UNKNOWN, reason=f"the database did not answer within {patience:g} s")
        written = pipe.read()
    os.waitpid(child, 0)
    try:
        return from_json(Answer, json.loads(written))
    except ValueError:
        why = written.decode() or "the process that reads it died"
        return Answer(decision=UNKNOWN, reason=f"the database could not be read: {why}")


def _reap(child: int) -> None:
    """Wait for a killed child process, at most `END_PATIENCE` seconds. If it hangs in the kernel, leave it to init."""
    end = time.monotonic() + END_PATIENCE
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)


def _answer(pipe: int, work: Callable[[], Answer]) -> None:
    """Write the result of `work` as JSON, or the reason why it failed, to `pipe`; then end this (child) process."""
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            text = json.dumps(to_json(work()))
        except Exception as error:  # noqa: BLE001  a gate always answers
            text = f"{type(error).__name__}: {error}"
        with os.fdopen(pipe, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
    finally:
        os._exit(0)
