"""The single worker of a series: it starts when it is needed, and is replaced after it was lost."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from canaryd.model import Outcome, Reason
from canaryd.supervisor.environment import beside_mps
from canaryd.supervisor.process import AFTERLIFE, LostError, Worker
from canaryd.supervisor.protocol import WorkerSpec

DETAIL = 4096
"""Number of bytes of a lost worker's last output that become part of its run."""
PING = 5.0
"""Seconds within which a worker must answer between two runs; otherwise a new worker replaces it."""
TEARDOWN = 15.0
"""Maximum seconds for a worker on an accelerator to end, after a request or after SIGKILL. The driver first frees
memory and context, which takes long beside a server and on a node of eight devices (ours)."""
STACKS = re.compile(r"Fatal Python error|(Current thread|Thread) 0x")
"""Pattern for the first line of a stack dump (Python's faulthandler)."""
ABORTS = re.compile(r"^Memory access fault by GPU|HSA_STATUS_ERROR_(EXCEPTION|MEMORY|ILLEGAL_INS)", re.MULTILINE)
"""Pattern for the text that ROCm's runtime prints before it aborts a process whose device failed. The process gets no
exception (ROCR-Runtime, runtime.cpp and hsa.cpp)."""
SAID, WIDTH = 2, 200
"""SAID: number of output lines before a stack dump that `telling` keeps. WIDTH: maximum characters of each line."""


def telling(printed: str) -> str:
    """Return one line from the text that a lost worker printed: its last output, and where its main thread was."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    dump = next((i for i, line in enumerate(lines) if STACKS.match(line)), len(lines))
    current = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    place = next((line for line in lines[current:] if line.startswith('File "') and "<frozen" not in line), "")
    return "; ".join(line[:WIDTH] for line in (*lines[:dump][-SAID:], place) if line)


class Slot:
    """The present worker of a series. One thread owns a slot; other threads can only call `kill`."""

    def __init__(self, spec: WorkerSpec, instruction_set: str, grace: float) -> None:
        """Start no worker yet. `grace`: seconds between SIGTERM and SIGKILL."""
        self.spec = spec
        self.instruction_set = instruction_set
        self.grace = grace
        self.stopped = ""
        """Why `kill` was called; "" until then."""
        self.workers_started = 0
        self.wall_seconds = 0.0
        """Time from the start of the workers to their ends, without the pauses of their runs."""
        self.processor_seconds: float | None = 0.0
        """Processor time of the workers that have ended; None where that of one is unknown."""
        self._began = 0.0
        self._worker: Worker | None = None

    def ready(self, deadline: float) -> Worker:
        """Return the running worker if it answers, otherwise a new one; raise `LostError` if none can be started."""
        if self.stopped:
            raise LostError(Outcome.ERRORED, f"stopped: {self.stopped}", Reason.STOPPED)
        if self._worker is not None and not self._answers(self._worker, deadline):
            self.close()
        if self._worker is None:
            self._worker = self._started(deadline)
        return self._worker

    def receive(self, worker: Worker, deadline: float) -> dict[str, Any]:
        """Return the worker's next message; raise `LostError` if none comes before the deadline."""
        return worker.receive(deadline, lambda: self.stopped)

    @property
    def where(self) -> str:
        """The setting that names the interpreter: "worker.command", or "worker.python" with its path."""
        return "worker.command" if self.spec.command else f"worker.python ({self.spec.python})"

    def _started(self, deadline: float) -> Worker:
        spec, where = self.spec, self.where
        self._began = time.monotonic()
        try:
            self._worker = worker = Worker(spec, self.instruction_set)
        except OSError as error:
            why = error if spec.command else error.strerror or error  # a command is not named otherwise
            raise LostError(Outcome.ERRORED, f"{where} cannot be started: {why}") from error
        self.workers_started += 1
        try:
            message = self.receive(worker, deadline)
        except LostError as lost:
            if lost.outcome is not Outcome.CRASHED:
                raise
            raise LostError(Outcome.ERRORED, f"{where} does not run the worker: {lost.detail}") from lost
        with decoding(message):
            worker.python = str(message["python"])
        return worker

    def _answers(self, worker: Worker, deadline: float) -> bool:
        """Return whether a worker still answers after earlier runs. If it died between two runs, neither run failed."""
        try:
            worker.begin()
            worker.send({"op": "ping"})
            while self.receive(worker, min(deadline, time.monotonic() + PING)).get("kind") != "ready":
                pass  # late messages from a thread of an earlier probe
        except LostError:
            return False
        return True

    def discard(self, lost: LostError, *, brief: bool = False) -> tuple[Outcome, str]:
        """End a lost worker; return (outcome, reason with the worker's last output; one line if `brief`)."""
        worker, self._worker = self._worker, None
        outcome, detail = lost.outcome, lost.detail
        if worker is None:
            return outcome, detail
        # Only a worker that overran gets SIGTERM first, which makes it print where it hangs.
        ask = functools.partial(worker.signal, signal.SIGTERM) if outcome is Outcome.TIMED_OUT else None
        shares = ask is not None and self.is_mps_client
        # Beside a server under MPS it may finish first: killed at work, it could take the server with it.
        if not self._end(worker, worker.leave if shares else ask, self._patience if shares else self.grace):
            outcome = Outcome.UNKILLABLE
            detail += "; it survived SIGKILL (uninterruptible sleep, as in a hung driver) and was abandoned"
        printed = worker.chatter[-DETAIL:].decode(errors="replace").strip()
        if outcome is Outcome.CRASHED and self._on_device and ABORTS.search(printed):
            outcome = Outcome.DEVICE_ERROR
        if brief:
            return outcome, "; ".join(filter(None, (detail, telling(printed))))
        return outcome, f"{detail}\nlast output:\n{printed}" if printed else detail

    def close(self) -> None:
        """End the worker without force if possible; this takes at most grace + 1 seconds, or 30 s on an accelerator."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._end(worker, worker.leave if self._on_device else worker.hang_up, self._patience)

    def kill(self, reason: str) -> None:
        """Kill the worker from another thread or a signal handler, and never start another."""
        self.stopped = reason
        worker = self._worker
        if worker is not None:
            worker.signal(signal.SIGKILL)

    @property
    def _on_device(self) -> bool:
        """Whether the worker uses one accelerator. Such a worker should finish the device's work before it ends."""
        return self.spec.only is not None and self.spec.only.unit != "cpu"

    @property
    def is_mps_client(self) -> bool:
        """Whether the worker shares its NVIDIA device with the server through MPS, so that a kill can end both."""
        on_cuda = self.spec.only is not None and self.spec.only.backend == "cuda"
        return on_cuda and beside_mps({**os.environ, **self.spec.env})

    @property
    def _patience(self) -> float:
        return max(self.grace, TEARDOWN) if self._on_device else self.grace

    @property
    def _afterlife(self) -> float:
        return TEARDOWN if self._on_device else AFTERLIFE

    def _end(self, worker: Worker, ask: Callable[[], None] | None, grace: float) -> bool:
        """End a worker and add its times to the totals; return False if the worker could not be killed."""
        ended = worker.end(ask=ask, grace=grace, afterlife=self._afterlife)
        self.wall_seconds += time.monotonic() - self._began
        known = self.processor_seconds is not None and worker.processor_seconds is not None
        self.processor_seconds = (self.processor_seconds or 0.0) + (worker.processor_seconds or 0.0) if known else None
        return ended


@contextmanager
def decoding(message: Mapping[str, Any]) -> Iterator[None]:
    """Turn any error that occurs while the context reads `message` into a `LostError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error} in {str(message)[:200]}"
        raise LostError(Outcome.GARBLED, f"the worker broke the protocol: {what}") from error
