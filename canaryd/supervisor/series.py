"""Run probes in workers, with a limit on every wait, and report the outcome. No worker can hang canaryd.

A worker is one process in its own session. Requests go to its standard input. Answers come through a separate pipe, or
through standard output behind `worker.command`. Of all other output, the last part is kept. One thread owns a `Series`;
other threads can only call `Series.kill`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from canaryd.codec import from_json, to_json
from canaryd.facts import Comparison, LogPosition, LogRecord, Reading, Recording, Skipped, whole
from canaryd.formatting import command
from canaryd.model import MPS_CLIENT, Device, Outcome, Run
from canaryd.probe import Absent, Fact, ProbeSpec
from canaryd.supervisor import capabilities
from canaryd.supervisor.answers import answerer
from canaryd.supervisor.environment import INSTRUCTION_SETS
from canaryd.supervisor.process import MAX_RUN, MAX_TOLD, LostError, Worker
from canaryd.supervisor.protocol import (
    Answer,
    Description,
    Listing,
    Reach,
    RunRequest,
    WorkerSpec,
    facts_in,
    new_run_id,
    parse_text,
)
from canaryd.supervisor.slot import Slot, decoding

T = TypeVar("T")

STARVED = 4.0
"""Maximum extra time that a low-priority worker gets while it waits for a core, in multiples of its timeout (our
choice). After that it counts as hung."""
IMPORT = 120.0
"""Maximum seconds for the import of torch: ten times a slow one, from a cold disk or on a loaded host (ours)."""
PATIENCE = 10.0
"""Seconds of a long wait after which `on_wait` is called (ours)."""
SILENCE = 30.0
"""Seconds without a message after which canaryd kills the worker that reads the kernel log (ours)."""


class Series:
    """Several runs on one device that share a worker, so that the worker starts only once.

    After a failed run the next run gets a new worker, because the failure may have damaged the process or its context
    on the device. A skipped run is no failure.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        instruction_set: str = "",
        grace: float = 2.0,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> None:
        """Store the options (`grace`: seconds before SIGKILL); raise `ValueError` for an unknown `instruction_set`."""
        if instruction_set not in INSTRUCTION_SETS:
            known = ", ".join(filter(None, INSTRUCTION_SETS))
            raise ValueError(f"instruction_set: {instruction_set!r} is not one of {known}")
        self._slot = Slot(spec, instruction_set, grace)
        self._on_progress = on_progress

    def __enter__(self) -> Series:  # noqa: PYI034 - typing.Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def workers_started(self) -> int:
        """Number of workers that this series has started."""
        return self._slot.workers_started

    @property
    def wall_seconds(self) -> float:
        """Seconds for which the workers of this series have lived, without the pauses of their runs."""
        return self._slot.wall_seconds

    @property
    def processor_seconds(self) -> float | None:
        """Processor seconds of the series' ended workers, or None if the time of one of them is unknown."""
        return self._slot.processor_seconds

    def serve(self, spec: WorkerSpec, instruction_set: str, on_progress: Callable[[float, str], None] | None) -> bool:
        """Use the running worker for `spec` from now on and return True; return False if `spec` needs another worker.

        The devices that the worker sees do not change. The caller must know that it sees none besides `spec.only`.
        """
        if replace(spec, only=None) != self._slot.spec or INSTRUCTION_SETS[instruction_set]:
            return False
        self._slot.spec, self._slot.instruction_set, self._on_progress = spec, instruction_set, on_progress
        return True

    def describe(
        self,
        paths: Sequence[Path],
        timeout: float = 60.0,
        *,
        import_timeout: float = IMPORT,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Description:
        """Return what the worker finds: the version of torch, the devices, and the specs of the probes at `paths`.

        Never raises because of a worker. `timeout` limits each single answer, in seconds. `import_timeout` limits the
        import of torch, which comes first; `on_wait` is called once if the import takes long. If torch hangs or crashes
        at import, probes that do not need torch are still described. If a probe crashes or hangs the worker, this
        failure becomes its description, and a new worker is asked for the other probes.
        """
        probes: dict[Path, ProbeSpec | str] = {}
        python = lost_torch = ""
        where = self._slot.where
        while True:
            waiting = [path for path in paths if path not in probes]
            imported = False
            try:
                worker = self._slot.ready(time.monotonic() + timeout)
                python = worker.python
                places = [worker.place(path) for path in waiting]
                worker.send({"op": "describe", "probes": places, "torch": not lost_torch})
                self._await_import(worker, import_timeout, on_wait)
                imported = True
                while True:
                    message = self._slot.receive(worker, time.monotonic() + timeout)
                    with decoding(message):
                        if message["kind"] == "described":
                            return _description(where, message, probes, lost_torch)
                        if message["kind"] == "probe":
                            error = message["error"]
                            probes[waiting[0]] = parse_text(error) if error else from_json(ProbeSpec, message["spec"])
                            del waiting[0]
            except LostError as lost:
                _, reason = self._slot.discard(lost, brief=True)
                if python and not self._slot.stopped and not (imported or lost_torch):
                    lost_torch = reason
                elif waiting and imported and not self._slot.stopped:
                    probes[waiting[0]] = reason
                else:
                    return Description(torch_reason=reason, lost=f"{where} failed", probes=probes)

    def _await_import(self, worker: Worker, timeout: float, on_wait: Callable[[str], None]) -> None:
        """Wait until the worker has tried to import torch; raise `LostError` if the worker does not survive that."""
        what = f"torch of {self._slot.where} to import"
        message = self._receive_patiently(worker, timeout, what, on_wait)
        with decoding(message):
            if message["kind"] != "imported":
                raise ValueError(message["kind"])

    def _receive_patiently(
        self, worker: Worker, timeout: float, what: str, on_wait: Callable[[str], None]
    ) -> dict[str, Any]:
        """Return the next message; after `PATIENCE` seconds, call `on_wait` once with a text that names `what`."""
        begun = time.monotonic()
        try:
            return self._slot.receive(worker, begun + min(PATIENCE, timeout))
        except LostError as lost:
            if lost.outcome is not Outcome.TIMED_OUT or timeout <= PATIENCE:
                raise
            on_wait(f"waiting for {what}, for at most {timeout:.0f} s")
            return self._slot.receive(worker, begun + timeout)

    def reach(self, runtime: str, timeout: float = IMPORT, *, on_wait: Callable[[str], None] = lambda _: None) -> Reach:
        """Return the devices that a runtime other than torch finds. Never raises because of a worker.

        `timeout`: seconds that import and search may take; `on_wait` is called once if they take long.
        """
        what = f"{runtime} of {self._slot.where} to import and to list its devices"
        try:
            worker = self._slot.ready(time.monotonic() + timeout)
            worker.begin()
            worker.send({"op": "reach", "runtime": runtime})
            while True:
                message = self._receive_patiently(worker, timeout, what, on_wait)
                with decoding(message):
                    if message["kind"] == "reached":
                        devices = from_json(tuple[Device, ...], message["devices"])
                        return Reach(devices=devices, problem=parse_text(message["problem"]))
        except LostError as lost:
            return Reach(problem=f"{self._slot.where} failed: {self._slot.discard(lost, brief=True)[1]}")

    def inventory(self, settings: Mapping[str, Mapping[str, Any]], timeout: float = 15.0) -> Listing:
        """Return the devices of this machine that vendor modules find; `settings`: module → its probe's settings.

        Never raises because of a worker. `timeout` limits each module, in seconds. A module that crashes or hangs the
        worker is unavailable for that reason, and the other modules are still asked.
        """
        devices: dict[str, tuple[Device, ...]] = {}
        unavailable: dict[str, str] = {}
        failing: dict[str, str] = {}
        facts: dict[str, str] = {}
        problems: list[str] = []
        waiting = list(settings)
        while waiting:
            try:
                worker = self._slot.ready(time.monotonic() + timeout)
                worker.begin()
                worker.send({"op": "inventory", "settings": {name: to_json(settings[name]) for name in waiting}})
                while waiting:
                    message = self._slot.receive(worker, time.monotonic() + timeout)
                    with decoding(message):
                        if message["kind"] != "inventoried":
                            continue
                        name = waiting[0]
                        if message["unavailable"]:
                            unavailable[name] = str(message["unavailable"])
                            if message["here"]:
                                failing[name] = unavailable[name]
                        else:
                            found = from_json(tuple[Device, ...], message["devices"])
                            more = from_json(dict[str, str], message["facts"])
                            problems += from_json(tuple[str, ...], message["problems"])
                            facts |= more
                            devices[name] = found
                        del waiting[0]
            except LostError as lost:
                _, reason = self._slot.discard(lost)
                name = waiting.pop(0)
                unavailable[name] = failing[name] = reason.splitlines()[0]
                if self._slot.stopped:
                    unavailable |= dict.fromkeys(waiting, self._slot.stopped)
                    break
        return Listing(devices=devices, unavailable=unavailable, failing=failing, facts=facts, problems=tuple(problems))

    def follow(
        self,
        path: str,
        position: LogPosition,
        on_batch: Callable[[Sequence[LogRecord], LogPosition], None],
        *,
        until_end: bool = False,
    ) -> str:
        """Read the kernel log from `position` on, and return the reason why reading ended.

        Each batch of records goes to `on_batch`, with the position after it. With `until_end`, reading stops at the end
        of the log and the reason is "".
        """
        records: list[LogRecord] = []
        try:
            with capabilities.reading_kernel_log():
                worker = self._slot.ready(time.monotonic() + SILENCE)
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
                message = self._slot.receive(worker, time.monotonic() + SILENCE)
                batch = None
                with decoding(message):
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
            return self._slot.discard(lost)[1]

    def run(self, request: RunRequest, timeout: float) -> Run:
        """Run one probe and return its run, at most `timeout` + grace + 1 seconds later.

        Never raises because of a worker. Facts that arrived before a worker was lost are part of the run.
        """
        started, deadline = time.time(), time.monotonic() + timeout
        run, ready_at, worker = new_run_id(started), None, None
        facts: list[Fact] = []
        try:
            worker = self._slot.ready(deadline)
            ready_at = time.monotonic()
            lenience = STARVED * timeout if self._slot.spec.nice else 0.0
            worker.be_lenient(lenience)
            worker.begin(MAX_RUN if request.spec.numeric else MAX_TOLD)
            worker.send(self._run_message(worker, request, run, deadline - ready_at + lenience + self._slot.grace))
            message = self._receive_result(worker, run, facts, deadline)
            with decoding(message):
                answer = from_json(Answer, message)
            self._slot.wall_seconds -= answer.paused
            if answer.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED):
                self.close()
        except LostError as lost:
            seconds = time.monotonic() - ready_at if ready_at is not None else 0.0
            outcome, detail = self._slot.discard(lost)
            facts += _last_facts(worker.unreceived if worker else (), run)
            answer = Answer(outcome=outcome, seconds=seconds, detail=detail, reason=lost.reason)
        absent, recordings = _only(Absent, facts), _only(Recording, facts)
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
            instruction_set=self._slot.instruction_set,
            readings=_only(Reading, facts),
            comparisons=_only(Comparison, facts),
            recordings=recordings,
            skipped=_only(Skipped, facts),
            absent={fact.name: fact.reason for fact in absent} | dict(answer.absent),
            codes={fact.name: fact.code for fact in absent if fact.code},
            stack=answer.stack,
            environment={**answer.environment, **({MPS_CLIENT: "yes"} if self._slot.is_mps_client else {})},
            detail=answer.detail,
            reason=answer.reason,
            repro=command(
                *("check", ("device", request.device.name), ("probe", request.spec.name)),
                *(("case", case) for case in request.cases),
                *(("seed", str(request.seed)), ("level", request.level)),
                *(("instruction_set", self._slot.instruction_set), ("intensity", request.intensity)),
            ),
            drill=request.drill,
            confirms=request.confirms,
            trigger=request.trigger,
            cases=request.cases,
            baselining=request.baselining and bool(recordings),
            intensity=request.intensity,
        )

    def _run_message(self, worker: Worker, request: RunRequest, run: str, timeout: float) -> dict[str, Any]:
        """Return the message that starts a run; the worker ends itself soon after `timeout` seconds."""
        return {
            "op": "run",
            "id": run,
            "probe": worker.place(request.probe_path),
            "device": to_json(request.device),
            "level": request.level,
            "seed": request.seed,
            "budget": request.spec.budget[request.level] if request.budget is None else request.budget,
            "settings": to_json(request.settings),
            "cases": request.cases,
            "peers": to_json(request.peers),
            "drill": request.drill,
            "baselining": request.baselining,
            "memory": "" if self._slot.spec.command else request.memory,
            "intensity": request.intensity,
            "beside": request.beside,
            "instruction_set": self._slot.instruction_set,
            "timeout": timeout,
        }

    def _receive_result(self, worker: Worker, run: str, facts: list[Fact], deadline: float) -> dict[str, Any]:
        """Collect the facts of a run in `facts` until its result or answer arrives; return the fields of that."""
        while True:
            message = self._slot.receive(worker, deadline)
            progress = None
            with decoding(message):
                if message.pop("id") != run:
                    continue  # a late message from a thread of an earlier probe
                kind = message.pop("kind")
                if kind in ("result", "answered"):
                    return message
                if kind == "progress":
                    progress = (float(message["fraction"]), str(message["text"]))
                else:
                    facts += facts_in(kind, message)
            if progress is not None and self._on_progress is not None:
                self._on_progress(*progress)

    def answer(self, module: str, arguments: Mapping[str, Any], timeout: float) -> tuple[Outcome, dict[str, Any], str]:
        """Ask the worker the question `module` (`answers.py`) with these arguments.

        Returns (outcome, answer, detail of the outcome); the answer is empty unless the outcome is completed. Never
        raises because of a worker.
        """
        deadline, run = time.monotonic() + timeout, new_run_id(time.time())
        name, package = answerer(module)
        try:
            worker = self._slot.ready(deadline)
            worker.begin()
            placed = "" if package is None else worker.place(package)
            request = {"op": "answer", "id": run, "module": name, "package": placed}
            worker.send({**request, "arguments": arguments, "timeout": timeout})
            message = self._receive_result(worker, run, [], deadline)
            with decoding(message):
                return Outcome(message["outcome"]), dict(whole(message["value"])), str(message["detail"])
        except LostError as lost:
            outcome, detail = self._slot.discard(lost)
            return outcome, {}, detail

    def close(self) -> None:
        """End the worker without force if possible; this takes at most grace + 1 seconds, or 30 s on an accelerator."""
        self._slot.close()

    @property
    def stopped(self) -> bool:
        """Whether `kill` was called, so that canaryd itself ended the series."""
        return bool(self._slot.stopped)

    def kill(self, reason: str = "canaryd is shutting down") -> None:
        """Kill the worker, from any thread or a signal handler. The present run and all later runs end as errored."""
        self._slot.kill(reason)


def _description(
    where: str, message: Mapping[str, Any], probes: Mapping[Path, ProbeSpec | str], lost_torch: str
) -> Description:
    """Return the description in a worker's message; leave out probes that need torch if `lost_torch` is set."""
    lost = f"torch of {where} does not import" if lost_torch else ""
    if lost:
        probes = {path: spec for path, spec in probes.items() if isinstance(spec, ProbeSpec) and not spec.numeric}
    return Description(
        torch=None if message["torch"] is None else parse_text(message["torch"]),
        torch_reason=f"{lost}: {lost_torch}" if lost else parse_text(message["torch_reason"] or ""),
        lost=lost,
        devices=from_json(tuple[Device, ...], message["devices"]),
        stack=from_json(dict[str, str], message["stack"]),
        probes=probes,
    )


def _last_facts(messages: Iterable[Mapping[str, Any]], run: str) -> Iterator[Fact]:
    """Yield the facts of a run in the last messages of a lost worker: a wrong bit among them may not show again."""
    for message in messages:
        with suppress(LostError), decoding(message):
            if message["id"] == run and message["kind"] in ("fact", "readings"):
                yield from facts_in(message["kind"], message)


def _only(kind: type[T], facts: Iterable[object]) -> tuple[T, ...]:
    return tuple(fact for fact in facts if isinstance(fact, kind))
