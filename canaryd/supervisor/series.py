"""Starts workers, asks them, bounds every wait and says what became of them. Never hangs on what it started.

A worker is one process in a session of its own: standard input carries requests, a pipe of its own (or, behind
`worker.command`, standard output) carries the answers, and the rest of what it prints is kept as a bounded tail. One
thread owns a `Series`; only `Series.kill` may be called from another.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.model import (
    Comparison,
    Device,
    LogPosition,
    LogRecord,
    Outcome,
    Reason,
    Run,
    whole,
)
from canaryd.probe import ProbeSpec
from canaryd.supervisor import capabilities
from canaryd.supervisor.environment import INSTRUCTION_SETS
from canaryd.supervisor.process import LostError, Worker
from canaryd.supervisor.protocol import (
    FACTS,
    Answer,
    Description,
    Listing,
    RunRequest,
    WorkerSpec,
    new_run_id,
    parse_fact,
    parse_text,
)

DETAIL = 4096
"""Bytes of what a lost worker printed that become part of its run."""
PING = 5.0
"""Seconds that a worker has to answer between two runs before a fresh one takes its place."""
STARVED = 4.0
"""How many times its timeout a worker that has stepped back may wait for a core in addition: that is no hang (ours)."""


class Series:
    """Runs on one device that share a worker, so that its start is paid for once.

    After anything but a completed or a skipped run the next one gets a fresh worker: a failed run may leave a device's
    context or the process itself poisoned.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        instruction_set: str = "",
        grace: float = 2.0,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> None:
        """`grace`: seconds between SIGTERM and SIGKILL. Raises `ValueError` for an unknown instruction set."""
        if instruction_set not in INSTRUCTION_SETS:
            known = ", ".join(filter(None, INSTRUCTION_SETS))
            raise ValueError(f"instruction_set: {instruction_set!r} is not one of {known}")
        self.workers_started = 0
        self.wall_seconds = 0.0
        """Time from the start of its workers to their ends, less what their runs have paused."""
        self.processor_seconds: float | None = 0.0
        """Processor time of its workers that have ended; None where that of one is not known."""
        self._began = 0.0
        self._spec = spec
        self._instruction_set = instruction_set
        self._grace = grace
        self._on_progress = on_progress
        self._worker: Worker | None = None
        self._stopped = ""

    def __enter__(self) -> Series:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, paths: Sequence[Path], timeout: float = 60.0) -> Description:
        """Ask for the interpreter, the devices and the specs of the probes at `paths`.

        Never raises for what a worker does. `timeout` is the patience, in seconds, for each single answer. A probe that
        takes the worker down is described by that, and the others are asked for again.
        """
        probes: dict[Path, ProbeSpec | str] = {}
        python = ""
        while True:
            waiting = [path for path in paths if path not in probes]
            try:
                worker = self._ready(time.monotonic() + timeout)
                python = worker.python
                worker.send({"op": "describe", "probes": [worker.place(path) for path in waiting]})
                while True:
                    message = worker.receive(time.monotonic() + timeout, self._why_stopped)
                    with _decoding(message):
                        if message["kind"] == "described":
                            return Description(
                                python=python,
                                torch=None if message["torch"] is None else parse_text(message["torch"]),
                                torch_reason=parse_text(message["torch_reason"] or ""),
                                devices=from_json(tuple[Device, ...], message["devices"]),
                                stack=from_json(dict[str, str], message["stack"]),
                                probes=probes,
                            )
                        if message["kind"] == "probe":
                            error = message["error"]
                            probes[waiting[0]] = parse_text(error) if error else from_json(ProbeSpec, message["spec"])
                            del waiting[0]
            except LostError as lost:
                _, reason = self._discard(lost)
                if waiting and python and not self._stopped:
                    probes[waiting[0]] = reason
                    continue
                return Description(python=python, torch_reason=reason, probes=probes | dict.fromkeys(waiting, reason))

    def inventory(self, settings: Mapping[str, Mapping[str, Any]], timeout: float = 15.0) -> Listing:
        """Ask the vendor modules that `settings` names (each with its probe's settings) what is on this machine.

        Never raises for what a worker does. `timeout` is the patience, in seconds, for each module; one that takes the
        worker down, or hangs, is unavailable for that reason, and the others are asked all the same.
        """
        devices: dict[str, tuple[Device, ...]] = {}
        unavailable: dict[str, str] = {}
        failing: dict[str, str] = {}
        facts: dict[str, str] = {}
        problems: list[str] = []
        waiting = list(settings)
        while waiting:
            try:
                worker = self._ready(time.monotonic() + timeout)
                worker.begin()
                worker.send({"op": "inventory", "settings": {name: to_json(settings[name]) for name in waiting}})
                while waiting:
                    message = worker.receive(time.monotonic() + timeout, self._why_stopped)
                    with _decoding(message):
                        if message["kind"] != "inventoried":
                            continue
                        name = waiting[0]
                        if message["unavailable"]:
                            unavailable[name] = str(message["unavailable"])
                            if message["here"]:
                                failing[name] = unavailable[name]
                        else:
                            found = from_json(tuple[Device, ...], message["devices"])
                            told = from_json(dict[str, str], message["facts"])
                            problems += from_json(tuple[str, ...], message["problems"])
                            facts |= told
                            devices[name] = found
                        del waiting[0]
            except LostError as lost:
                _, reason = self._discard(lost)
                name = waiting.pop(0)
                unavailable[name] = failing[name] = reason.splitlines()[0]
                if self._stopped:
                    unavailable |= dict.fromkeys(waiting, self._stopped)
                    break
        return Listing(devices=devices, unavailable=unavailable, failing=failing, facts=facts, problems=tuple(problems))

    def follow(
        self,
        path: str,
        position: LogPosition,
        on_batch: Callable[[Sequence[LogRecord], LogPosition], None],
        *,
        until_end: bool = False,
        silence: float = 30.0,
    ) -> str:
        """Read the kernel log from `position` on, and hand over each batch of records with the position after it.

        Returns why it ended: "" at the end of the log with `until_end`, else a reason. A reader that is silent for
        `silence` seconds is killed.
        """
        records: list[LogRecord] = []
        try:
            with capabilities.reading_kernel_log():
                worker = self._ready(time.monotonic() + silence)
            worker.begin()
            worker.send(
                {
                    "op": "follow",
                    "path": path,
                    "boot": position.boot,
                    "after": position.sequence,
                    "until_end": until_end,
                }
            )
            while True:
                message = worker.receive(time.monotonic() + silence, self._why_stopped)
                batch = None
                with _decoding(message):
                    kind = message["kind"]
                    if kind == "followed":
                        return str(message["reason"])
                    if kind == "record":
                        records.append(from_json(LogRecord, message["value"]))
                    elif kind == "position":
                        batch, records = records, []
                        position = from_json(LogPosition, message["value"])
                if batch is not None:
                    on_batch(batch, position)
                    worker.begin()
        except LostError as lost:
            return self._discard(lost)[1]

    def run(self, request: RunRequest, timeout: float) -> Run:
        """Run one probe and return what became of it, at the latest `timeout` + grace + 1 seconds from now.

        Never raises for anything that a worker does. Facts that arrived before a worker was lost are part of the run.
        """
        started, deadline = time.time(), time.monotonic() + timeout
        run = new_run_id(started)
        facts: dict[str, list[Any]] = {name: [] for name in FACTS}
        answer: Answer | None = None
        begun = None
        try:
            worker = self._ready(deadline)
            begun = time.monotonic()
            lenience = STARVED * timeout if self._spec.nice else 0.0
            worker.be_lenient(lenience)
            worker.send(
                {
                    "op": "run",
                    "id": run,
                    "probe": worker.place(request.probe_path),
                    "device": to_json(request.device),
                    "level": request.level,
                    "seed": request.seed,
                    "budget": request.spec.budget[request.level] if request.budget is None else request.budget,
                    "settings": to_json(request.settings),
                    "cases": request.cases,
                    "drill": request.drill,
                    "baselining": request.baselining,
                    "memory": "" if self._spec.command else request.memory,
                    "intensity": request.intensity,
                    "beside": request.beside,
                    "instruction_set": self._instruction_set,
                    "timeout": deadline - begun + lenience + self._grace,
                }
            )
            while answer is None:
                message = worker.receive(deadline, self._why_stopped)
                progress = None
                with _decoding(message):
                    if message.pop("id") != run:
                        continue  # the last words of a thread that an earlier probe left behind
                    kind = message.pop("kind")
                    if kind == "progress":
                        progress = (float(message["fraction"]), str(message["text"]))
                    elif kind == "readings":
                        for item in message["values"]:
                            fact = parse_fact(item)
                            facts[type(fact).__name__].append(fact)
                    elif kind == "fact":
                        fact = from_json(FACTS[message["type"]], message["value"])
                        if isinstance(fact, Comparison) and not 0 <= fact.wrong_trials <= fact.trials:
                            raise ValueError(f"{fact.wrong_trials} wrong of {fact.trials} trials")
                        facts[message["type"]].append(fact)
                    elif kind == "result":
                        answer = from_json(Answer, message)
                        self.wall_seconds -= answer.paused
                    else:
                        raise ValueError(f"unknown kind {kind!r}")
                if progress is not None and self._on_progress is not None:
                    self._on_progress(*progress)
            if answer.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED):
                self.close()
        except LostError as lost:
            seconds = time.monotonic() - begun if begun is not None else 0.0
            outcome, detail = self._discard(lost)
            answer = Answer(outcome=outcome, seconds=seconds, detail=detail, reason=lost.reason)
        return Run(
            id=run,
            device=request.device.uuid,
            probe=request.spec.name,
            probe_version=request.spec.version,
            started=started,
            seconds=answer.seconds,
            outcome=answer.outcome,
            level=request.level,
            seed=request.seed,
            instruction_set=self._instruction_set,
            readings=tuple(facts["Reading"]),
            comparisons=tuple(facts["Comparison"]),
            recordings=tuple(facts["Recording"]),
            skipped=tuple(facts["Skipped"]),
            absent={fact.name: fact.reason for fact in facts["Absent"]} | dict(answer.absent),
            stack=answer.stack,
            environment=answer.environment,
            detail=answer.detail,
            reason=answer.reason,
            repro=self._repro(request),
            drill=request.drill,
            confirms=request.confirms,
            trigger=request.trigger,
            cases=request.cases,
            baselining=request.baselining and bool(facts["Recording"]),
            intensity=request.intensity,
        )

    def answer(self, module: str, arguments: Mapping[str, Any], timeout: float) -> tuple[Outcome, dict[str, Any], str]:
        """Let one of the worker's own modules answer a question that is no probe.

        Returns the outcome, the answer (empty unless completed) and what is to be said about it. Never raises for
        anything that a worker does.
        """
        deadline, run = time.monotonic() + timeout, new_run_id(time.time())
        try:
            worker = self._ready(deadline)
            worker.begin()
            worker.send({"op": "answer", "id": run, "module": module, "arguments": arguments, "timeout": timeout})
            while True:
                message = worker.receive(deadline, self._why_stopped)
                progress = None
                with _decoding(message):
                    if message["id"] != run:
                        continue
                    if message["kind"] == "answered":
                        return Outcome(message["outcome"]), dict(whole(message["value"])), str(message["detail"])
                    progress = (float(message["fraction"]), str(message["text"]))
                if self._on_progress is not None:
                    self._on_progress(*progress)
        except LostError as lost:
            outcome, detail = self._discard(lost)
            return outcome, {}, detail

    def close(self) -> None:
        """End the worker, politely first; waits at most grace + 1 seconds."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(ask=worker.hang_up, grace=self._grace)
            self._account(worker)

    def kill(self, reason: str = "canaryd is shutting down") -> None:
        """Kill the worker from another thread or a signal handler; this and every later run ends at once as errored."""
        self._stopped = reason
        worker = self._worker
        if worker is not None:
            worker.signal(signal.SIGKILL)

    @property
    def stopped(self) -> bool:
        """Whether `kill` was called: canaryd itself ended it."""
        return bool(self._stopped)

    def _why_stopped(self) -> str:
        return self._stopped

    def _ready(self, deadline: float) -> Worker:
        if self._stopped:
            raise LostError(Outcome.ERRORED, f"stopped: {self._stopped}", Reason.STOPPED)
        if self._worker is not None and not self._answers(self._worker, deadline):
            self.close()
        if self._worker is not None:
            return self._worker
        where = "worker.command" if self._spec.command else f"worker.python ({self._spec.python})"
        self._began = time.monotonic()
        try:
            self._worker = Worker(self._spec, self._instruction_set)
        except OSError as error:
            raise LostError(Outcome.ERRORED, f"{where} cannot be started: {error}") from error
        self.workers_started += 1
        try:
            message = self._worker.receive(deadline, self._why_stopped)
        except LostError as lost:
            if lost.outcome is not Outcome.CRASHED:
                raise
            raise LostError(Outcome.ERRORED, f"{where} does not run the worker: {lost.detail}") from lost
        with _decoding(message):
            self._worker.python = str(message["python"])
        return self._worker

    def _answers(self, worker: Worker, deadline: float) -> bool:
        """Ask a worker that has served before whether it still does: one that died since is nobody's outcome."""
        try:
            worker.begin()
            worker.send({"op": "ping"})
            while worker.receive(min(deadline, time.monotonic() + PING), self._why_stopped).get("kind") != "ready":
                pass  # the last words of a thread that an earlier probe left behind
        except LostError:
            return False
        return True

    def _discard(self, lost: LostError) -> tuple[Outcome, str]:
        worker, self._worker = self._worker, None
        outcome, detail = lost.outcome, lost.detail
        if worker is None:
            return outcome, detail
        # Only a worker that overran is asked first: SIGTERM makes it print where it hangs.
        ask = functools.partial(worker.signal, signal.SIGTERM) if outcome is Outcome.TIMED_OUT else None
        if not worker.end(ask=ask, grace=self._grace):
            outcome = Outcome.UNKILLABLE
            detail += "; it survived SIGKILL (uninterruptible sleep, as in a hung driver) and was abandoned"
        self._account(worker)
        printed = worker.chatter[-DETAIL:].decode(errors="replace").strip()
        return outcome, f"{detail}\nlast output:\n{printed}" if printed else detail

    def _account(self, worker: Worker) -> None:
        self.wall_seconds += time.monotonic() - self._began
        known = self.processor_seconds is not None and worker.processor_seconds is not None
        self.processor_seconds = (self.processor_seconds or 0.0) + (worker.processor_seconds or 0.0) if known else None

    def _repro(self, request: RunRequest) -> str:
        words = ["canaryd", "check", "--device", request.device.name, "--probe", request.spec.name]
        for case in request.cases:
            words += ["--case", case]
        words += ["--seed", str(request.seed), "--level", request.level]
        if self._instruction_set:
            words += ["--instruction-set", self._instruction_set]
        if request.intensity:
            words += ["--intensity", request.intensity]
        return shlex.join(words)


@contextlib.contextmanager
def _decoding(message: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error} in {str(message)[:200]}"
        raise LostError(Outcome.GARBLED, f"the worker sent what is not the protocol: {said}") from error
