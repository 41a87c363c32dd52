"""`canaryd gate`: may this node take work? One quick answer for drains, taints and prologs, from what is stored.

It touches no device, writes nothing, waits for nobody beyond `PATIENCE`, and knows no drill. Three rules keep it from
emptying a fleet: it only says what it would do until the configuration tells it to act, one file or one variable
silences it, and what is not known never acts unless it was asked for by name (docs/enforcement.md).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.config.settings import Config
from canaryd.formatting import spoken
from canaryd.judge import clock
from canaryd.model import Cause, Device, Outcome, State, printable
from canaryd.report import status
from canaryd.report.status import DeviceStatus, Status
from canaryd.store.database import DATABASE, StoreTooNew
from canaryd.store.store import Store

SCHEMA = "canaryd.gate/1"
PATIENCE = 5.0
"""Seconds that the store may take to answer; beyond, the answer is unknown. A verdict is read in milliseconds."""
SWITCH = Path("/etc/canaryd/no-enforcement")
"""While this file is there nothing acts, whatever it holds; one beside the configuration file in use counts as well."""
VARIABLE = "CANARYD_ENFORCEMENT"
"""Environment variable that silences enforcement with any value but "act"; it can never turn it on."""
CAUSES = (Cause.HARDWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED)
"""Causes that act unless others are named. A roll-out of wrong software makes every node faulty at once, and taking
them all out mends nothing; a harness that errs must cost no node (ours)."""
ACTS_ON = (State.DEGRADED, State.UNKNOWN, State.SUSPECT, State.FAULTY)
LOOKED = 50
"""Newest runs of a device among which one that completed is looked for."""

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
EXIT = {PASS: 0, FAIL: 2, UNKNOWN: 3}
"""Exit status where enforcement acts; where it does not, it is 0 whatever the answer is."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    on: tuple[State, ...] = (State.FAULTY,)
    """What fails: these states and what is worse. `unknown` fails only where it is named itself."""
    causes: tuple[Cause, ...] = CAUSES
    devices: tuple[str, ...] = ()
    """Only these, by uuid, name, backend, or an accelerator's index; empty for all."""
    max_age: float = 0.0
    """Seconds after which a device without a completed test is unknown; 0.0 leaves it to the judge."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """What is said of one device."""

    device: str
    """`Device.uuid`."""
    name: str
    state: State
    cause: Cause
    finding: str
    """The worst finding in words; "" where there is none."""
    decision: str
    """`PASS`, `FAIL` or `UNKNOWN`."""
    why: str = ""
    """Why the decision is not what the state alone would give; "" where it is."""

    def __str__(self) -> str:
        text = f"{self.name} {self.state.value}/{self.cause.value}"
        return ": ".join(part for part in (text, self.why, self.finding) if part)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What `canaryd gate` says, before it is asked whether it acts."""

    decision: str
    devices: tuple[Item, ...] = ()
    """The worst first."""
    reason: str = ""
    """Why nothing is known, or not all that was asked for; "" where the devices say it."""


def ask(settings: Config, question: Question, patience: float = PATIENCE) -> Answer:
    """Return the answer of the store; unknown, with the reason, where it has none within `patience` seconds."""
    answer = _within(patience, lambda: _read(settings, question, time.time()))
    if answer.decision == UNKNOWN and State.UNKNOWN in question.on:
        return replace(answer, decision=FAIL)
    return answer


def decide(found: Status, question: Question, newest: Mapping[str, float | None]) -> Answer:
    """Return the answer to a question; `newest` is when each device's newest completed test began, if that is known."""
    chosen, missing = _chosen([d.device for d in found.devices], question.devices)
    items = [_item(d, question, newest.get(d.device.uuid), found.now) for d in found.devices if d.device.uuid in chosen]
    rank = (FAIL, UNKNOWN, PASS)
    items.sort(key=lambda i: (rank.index(i.decision), -i.state.severity))
    reason = ""
    if missing:
        there = ", ".join(d.device.name for d in found.devices) or "none"
        reason = f"no device here is called {' or '.join(missing)}; there are {there}"
    elif not items:
        reason = "no device has been seen yet: start the daemon (canaryd run), or run canaryd check"
    decisions = {i.decision for i in items} | ({UNKNOWN} if reason else set())
    return Answer(decision=next(d for d in rank if d in decisions), devices=tuple(items), reason=reason)


def silenced(settings: Config, environ: Mapping[str, str]) -> str:
    """Return why enforcement does not act, in words; "" where it acts.

    What cannot be looked at silences: a switch that nobody can read must not be taken for one that is off.
    """
    if (word := environ.get(VARIABLE, "act")) != "act":
        return f"{VARIABLE}={printable(word)} in the environment"
    for path in dict.fromkeys((SWITCH, *([settings.file.absolute().parent / SWITCH.name] if settings.file else []))):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path} cannot be looked at: {error.strerror}"
        return f"{path} is there"
    if settings.enforcement != "act":
        return f"enforcement is {settings.enforcement} in {settings.file or 'the defaults'}"
    return ""


def exit_code(answer: Answer, silence: str) -> int:
    """Return the exit status: that of the answer where it acts, 0 where something silences it."""
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


def as_text(answer: Answer, question: Question, silence: str) -> str:
    """Return the answer as one line, the decision first."""
    told = [i for i in answer.devices if i.decision == answer.decision]
    said = [answer.reason] if answer.reason else []
    if answer.decision == PASS:
        beside = [i for i in answer.devices if i.why]
        states = ", ".join(s.value for s in _fails(question))
        said.append(f"{len(told)} {'device' if len(told) == 1 else 'devices'}, none to fail on ({states})")
        said += [str(beside[0])] if beside else []
    elif told:
        more = f" (and {', '.join(i.name for i in told[1:])})" if len(told) > 1 else ""
        said.append(f"{told[0]}{more}")
    word = {PASS: "pass", FAIL: "would fail" if silence else "fail", UNKNOWN: "unknown"}[answer.decision]
    aside = f" [log only: {silence}]" if silence else " [unknown does not act]" if answer.decision == UNKNOWN else ""
    return printable(" ".join(f"{word}: {'; '.join(said)}{aside}".split()))


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
            decision, why = PASS, f"not acted on, for the cause is {verdict.cause.value}"
    elif verdict.state is State.UNKNOWN:
        decision = UNKNOWN
    elif question.max_age and (newest is None or now - newest > question.max_age):
        decision = FAIL if State.UNKNOWN in question.on else UNKNOWN
        ago = "no test of known age completed" if newest is None else f"the newest test is {spoken(now - newest)} old"
        why = f"{ago}, more than {spoken(question.max_age)} were not to be"
    worst = max(verdict.findings, key=lambda f: f.state.severity, default=None)
    return Item(
        device=d.device.uuid,
        name=d.device.name,
        state=verdict.state,
        cause=verdict.cause,
        finding=worst.message if worst else "",
        decision=decision,
        why=why,
    )


def _chosen(devices: Sequence[Device], words: Sequence[str]) -> tuple[Collection[str], list[str]]:
    """Return the uuids that are asked about, and the words that name nothing.

    An instance of a divided device is no better than the device, and the other way round: the one brings the other.
    """
    if not words:
        return {d.uuid for d in devices}, []
    named = {word: {d.uuid: d for d in devices if _called(d, word)} for word in words}
    parts = {d.uuid for found in named.values() for d in found.values()}
    above = {d.parent for found in named.values() for d in found.values() if d.parent}
    return (
        {d.uuid for d in devices if d.uuid in parts | above or d.parent in parts},
        [word for word, found in named.items() if not found],
    )


def _called(device: Device, word: str) -> bool:
    if word.isdecimal():
        return device.backend != "cpu" and not device.is_endpoint and device.index == int(word)
    return word in (device.uuid, device.name, device.backend)


# -- the store, without disturbing anybody ----------------------------------------------------------------------------


def _read(settings: Config, question: Question, now: float) -> Answer:
    path = settings.state_dir / DATABASE
    try:
        path.stat()
    except OSError as error:
        return Answer(decision=UNKNOWN, reason=f"{path}: {error.strerror}: nothing is known of this machine")
    try:
        with contextlib.closing(Store.open(settings.state_dir, for_reading=True)) as store:
            # No lock is tried for whether a daemon runs: one that starts at this moment would meet it. A verdict that
            # nobody renews is unknown by its age.
            found = status.gather(store, settings, now, daemon=True, evidence={})
            asked = [d.device.uuid for d in found.devices] if question.max_age else []
            newest = {uuid: _newest(store, uuid, now) for uuid in asked}
            problems = [*store.problems, *([store.problem] if store.problem else [])]
    except StoreTooNew as error:
        return Answer(decision=UNKNOWN, reason=str(error))
    answer = decide(found, question, newest)
    if problems and answer.decision != FAIL:
        return replace(answer, decision=UNKNOWN, reason="; ".join(problems))
    return answer


def _newest(store: Store, device: str, now: float) -> float | None:
    for limit in (1, LOOKED):  # one is enough nearly always, and reading a run takes time
        runs = store.runs(device, limit=limit)
        ages = [clock.age(r, now) for r in runs if r.outcome is Outcome.COMPLETED and r.whole]
        if (least := min(ages, default=math.inf)) < math.inf:
            return now - least
    return None


def _within(patience: float, work: Callable[[], Answer]) -> Answer:
    """Do `work` in a child that is abandoned after `patience` seconds: a disk that hangs must not hang a prolog."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _tell(writing, work)
    os.close(writing)
    try:
        told = b"".join(_chunks(reading, time.monotonic() + patience))
    except TimeoutError:
        os.kill(child, signal.SIGKILL)  # and not waited for: it may sit in the kernel
        return Answer(decision=UNKNOWN, reason=f"the store did not answer within {patience:g} s")
    finally:
        os.close(reading)
    os.waitpid(child, 0)
    try:
        return from_json(Answer, json.loads(told))
    except ValueError:
        return Answer(decision=UNKNOWN, reason=f"the store could not be read: {told.decode() or 'its reader died'}")


def _tell(pipe: int, work: Callable[[], Answer]) -> None:
    """Write what `work` returns, or why it failed, and end this process: whoever waits for our output must not wait."""
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        try:
            told = json.dumps(to_json(work()))
        except Exception as error:  # noqa: BLE001  whatever it is, a gate answers
            told = f"{type(error).__name__}: {error}"
        with os.fdopen(pipe, "w", encoding="utf-8", errors="backslashreplace") as out:
            out.write(told)
    finally:
        os._exit(0)


def _chunks(pipe: int, deadline: float) -> Iterator[bytes]:
    while True:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        if not (chunk := os.read(pipe, 1 << 16)):
            return
        yield chunk
