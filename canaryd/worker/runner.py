"""Run probes on request: JSON lines on standard input, JSON lines on the protocol's file descriptor.

docs/architecture.md describes requests and answers. Facts are sent as they are yielded, so that they survive a crash of
the probe; telemetry is sent in batches, because the next poll repeats it. The end of standard input ends the process at
once, so that neither a killed daemon nor a killed `docker exec` leaves an orphan.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import faulthandler
import importlib
import importlib.util
import io
import json
import math
import os
import platform
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from canaryd.codec import from_json, to_json
from canaryd.facts import Comparison, LogPosition, Reading, Recording, Skipped
from canaryd.hidden import hide
from canaryd.model import Device, Outcome, Reason
from canaryd.probe import Absent, Context, NoCase, ProbeSpec, Skip
from canaryd.worker import limits, visible

GRACE = 5.0
"""Seconds after the supervisor's deadline when a worker ends itself, even if a thread holds the interpreter lock."""
PROGRESS_PERIOD = 0.1
"""Shortest time in seconds between two progress lines; reports that come earlier are dropped."""
DETAIL = 16_384
"""Maximum number of characters kept of a traceback, counted from its end."""
BATCH = 256
"""Number of telemetry readings in one message. All other facts are sent at once, so that they survive a crash."""
INSTEAD = "convert tensors with .item() or .tolist(), and yield Absent for what is not a number"
OWN = ("kind", "id", "type", "outcome")
"""Fields whose values are words of the protocol, so they need no check for secrets."""
FACTS = (Reading, Comparison, Recording, Skipped, Absent)


def serve(protocol: int, nonce: str) -> None:
    """Answer the requests on standard input, one after the other, until it ends."""
    # Only this file uses the pipes to the supervisor: a probe's input() and its children get neither.
    limits.step_back()
    visible.narrow()
    requests = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device, not a path to compute with
        os.dup2(nothing.fileno(), 0)
    os.set_inheritable(protocol, False)
    faulthandler.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # SIGTERM prints where the probe hangs, even inside a C call that holds the interpreter lock, and then ends it.
    faulthandler.register(signal.SIGTERM, chain=True)
    sys.stdout, sys.stderr = Lines(sys.stdout), Lines(sys.stderr)
    # No core dumps, they fill disks. A limit of 1 byte stops files and the pipe to a collector, 0 only files (core(5)).
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0 if hard == 0 else 1, hard))
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, inbox), name="canaryd-requests", daemon=True).start()
    Runner(protocol, nonce).serve(inbox)


def _listen(requests: int, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    with open(requests, "rb") as pipe:
        for line in pipe:
            inbox.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the probe's children go too
    os._exit(0)


class Lines(io.TextIOWrapper):
    """Standard output or error, written in whole lines without secrets."""

    def __init__(self, stream: TextIO) -> None:
        buffering = bool(getattr(stream, "line_buffering", False))
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=buffering)
        self._stream = stream  # it would close the buffer when it is collected
        self._rest = ""

    def write(self, text: str) -> int:
        """Keep text until its line is complete, because a secret may arrive in parts."""
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            super().write(hide("\n".join([*lines, ""])))
        if len(self._rest) > DETAIL:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete last line too."""
        rest, self._rest = self._rest, ""
        if rest:
            super().write(hide(rest))
        super().flush()


class Runner:
    """Loads probes, runs them and sends the facts that they yield."""

    def __init__(self, protocol: int, nonce: str) -> None:
        self._protocol = protocol
        self._nonce = nonce.encode()
        self._lock = threading.Lock()
        self._modules: dict[Path, ModuleType] = {}
        self._root = Path(__file__).resolve().parents[2]

    def serve(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
        """Handle requests forever; only `_listen` ends the process."""
        operations: Mapping[str, Callable[[dict[str, Any]], None]] = {
            "ping": self.ping,
            "describe": self.describe,
            "inventory": self.inventory,
            "reach": self.reach,
            "run": self.run,
            "answer": self.answer,
            "follow": self.follow,
            "unpack": self.unpack,
            "leave": self.leave,
        }
        self.ping({})
        while True:
            request = inbox.get()
            operations[request["op"]](request)

    def ping(self, _: dict[str, Any]) -> None:
        """Answer that the worker is ready."""
        self._send(kind="ready", python=platform.python_version())

    def unpack(self, request: dict[str, Any]) -> None:
        """Write the files that a supervisor on another machine sent."""
        for name, content in request["files"].items():
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))

    def leave(self, _: dict[str, Any]) -> None:
        """End this process when the work on its device has ended; the supervisor then ends the child processes."""
        with contextlib.suppress(BaseException):  # a device that fails now has failed before, and the run has said so
            if table := sys.modules.get("canaryd.worker.runtime.interface"):
                table.let_go()
        os._exit(0)

    def describe(self, request: dict[str, Any]) -> None:
        """Import torch and send the result; send each probe's spec or error, then the devices and the software found.

        If `torch` is false in the request, torch is not imported, because its import crashed a worker before.
        """
        if not request["torch"]:
            sys.modules["torch"] = None  # type: ignore[assignment]  # its import raises ImportError
        with contextlib.suppress(BaseException):  # what a broken installation raises shows below
            importlib.import_module("canaryd.worker.numeric.tensors")
        self._send(kind="imported")
        for path in request["probes"]:
            try:
                spec, error = to_json(self._load(path).SPEC), None
            except BaseException as caught:  # noqa: BLE001 - a broken probe must not stop the others
                spec, error = None, _last_line(caught)
            self._send(kind="probe", path=path, spec=spec, error=error)
        try:
            devices, stack, torch, reason = importlib.import_module("canaryd.worker.numeric.stack").discover()
        except BaseException as caught:  # noqa: BLE001 - vendor libraries raise anything
            devices, stack, torch, reason = [], {}, None, f"cannot list the devices: {_last_line(caught)}"
        self._send(kind="described", devices=to_json(devices), stack=stack, torch=torch, torch_reason=reason)

    def reach(self, request: dict[str, Any]) -> None:
        """Send the devices of a runtime other than torch, or the reason why it has none here."""
        devices, problem = [], ""
        try:
            found = importlib.import_module("canaryd.worker.runtime.interface").named(request["runtime"]).devices()
            importlib.import_module("canaryd.worker.numeric.tensors").need_torch()  # it makes the goldens
            devices = to_json(found)
        except BaseException as caught:  # noqa: BLE001 - vendor libraries raise anything
            problem = str(caught) if isinstance(caught, Skip) else _last_line(caught)
        self._send(kind="reached", devices=devices, problem=problem)

    def inventory(self, request: dict[str, Any]) -> None:
        """Send the devices that each vendor's module finds, or the reason why it finds none."""
        vendors = importlib.import_module("canaryd.worker.telemetry.interface")
        for name, settings in request["settings"].items():
            devices, facts, problems, unavailable, here = [], {}, [], "", True
            try:
                devices, facts, problems = vendors.inventory(name, settings)
            except BaseException as caught:  # noqa: BLE001 - vendor libraries raise anything
                unavailable = str(caught) if isinstance(caught, vendors.Unavailable) else _last_line(caught)
                here = not isinstance(caught, vendors.NotHere)
            self._send(
                kind="inventoried",
                vendor=name,
                devices=to_json(devices),
                facts=facts,
                problems=problems,
                unavailable=unavailable,
                here=here,
            )

    def follow(self, request: dict[str, Any]) -> None:
        """Send the records of the kernel log in batches; a message after each batch gives the position reached."""
        log = importlib.import_module("canaryd.worker.telemetry.kernel_log")
        reason = ""
        try:
            for item in log.follow(
                request["path"], boot=request["boot"], after=request["after"], until_end=request["until_end"]
            ):
                if isinstance(item, LogPosition):
                    self._send(kind="position", value=to_json(item))
                else:
                    self._send(kind="record", value=to_json(item))
        except Exception as error:  # noqa: BLE001 - every error must reach the supervisor
            reason = str(error) if isinstance(error, (OSError, ValueError)) else _last_line(error)
        self._send(kind="followed", reason=reason)

    def run(self, request: dict[str, Any]) -> None:
        """Run one probe; send its facts as they come and then the result."""
        run = request["id"]
        device = from_json(Device, request["device"])
        seconds, numeric, detail, reason = 0.0, False, "", Reason.NONE
        limited, capped, room, bursts = request["beside"], False, 0, None
        readings: list[list[Any]] = []
        faulthandler.dump_traceback_later(request["timeout"] + GRACE, exit=True)
        try:
            if not device.computes_here:
                limits.bound_memory()
            probe = self._load(request["probe"])
            numeric = probe.SPEC.numeric
            retest = bool(numeric and request["intensity"])
            # Imported before the budget starts, because it loads torch.
            stress = importlib.import_module("canaryd.worker.numeric.stress") if retest else None
            if limited and numeric:
                capped = device.unit != "cpu"
                room = limits.make_room(device, limited)
            context = self._context(request, device)
            sensors: Callable[[], list[Any]] = stress.install(context) if stress is not None else list
            if limited and numeric:
                bursts = limits.install(context, limited, room)
                if (less := limits.left_out(limited, room)) is not None:
                    self._send(kind="fact", id=run, type="Skipped", value=_plain(less))
            begun = time.monotonic()
            try:
                self._send_facts(run, probe, context, readings, bursts)
            finally:
                seconds = time.monotonic() - begun
                self._send_readings(run, [*readings, *map(_compact, sensors())])
            outcome = Outcome.COMPLETED
        except Skip as skip:
            outcome, detail, reason = Outcome.SKIPPED, str(skip), skip.reason
            for name in skip.nearest if isinstance(skip, NoCase) else ():
                left_out = Skipped(case=name, reason="not what was asked for")
                self._send(kind="fact", id=run, type="Skipped", value=_plain(left_out))
        except BaseException as error:  # noqa: BLE001 - SystemExit and its kind are a probe's errors too
            outcome = _outcome_of(error, device)
            traceback.clear_frames(error.__traceback__)  # frees what filled the memory before anything is written
            detail = hide("".join(traceback.format_exception(type(error), error, error.__traceback__)))[-DETAIL:]
            if isinstance(error, MemoryError) and not device.computes_here:
                detail = f"the server's answers need more than {limits.ENDPOINT_MEMORY >> 20} MiB of memory"
            excusable = numeric and outcome is not Outcome.DEVICE_ERROR
            excuse, why = _excuse(error, device, capped=capped) if excusable else ("", reason)
            if excuse:
                outcome, detail, reason = Outcome.SKIPPED, excuse, why
        surroundings = _surroundings(device, request["instruction_set"]) if numeric else {}
        faulthandler.cancel_dump_traceback_later()
        paused = bursts.paused if bursts is not None else 0.0
        self._send(
            kind="result",
            id=run,
            outcome=outcome.value,
            seconds=seconds,
            paused=paused,
            detail=detail,
            reason=reason.value,
            **surroundings,
        )

    def _context(self, request: dict[str, Any], device: Device) -> Context:
        """Return the context for a probe; the budget of the run starts now."""
        return Context(
            device=device,
            level=request["level"],
            seed=request["seed"],
            budget=request["budget"],
            settings=request["settings"],
            cases=tuple(request["cases"]),
            peers=from_json(tuple[Device, ...], request["peers"]),
            drill=request["drill"],
            baselining=request["baselining"],
            memory=request["memory"],
            intensity=request["intensity"],
            progress=self._progress(request["id"]),
        )

    def _send_facts(
        self,
        run: str,
        probe: ModuleType,
        context: Context,
        readings: list[list[Any]],
        bursts: limits.Bursts | None,
    ) -> None:
        """Send each fact as the probe yields it; readings collect in `readings` until a batch is complete."""
        for fact in probe.run(context):
            if isinstance(fact, (Reading, Absent)):
                readings.append(_compact(fact))
                if probe.SPEC.telemetry and len(readings) < BATCH:
                    continue
            self._send_readings(run, readings)
            if not isinstance(fact, (Reading, Absent)):
                self._send(kind="fact", id=run, type=type(fact).__name__, value=_plain(fact))
            if bursts is not None:
                bursts.pause()  # for probes that never call ctx.pace

    def answer(self, request: dict[str, Any]) -> None:
        """Answer a request that runs no probe, by a module of the worker; send its progress, then its answer."""
        run = request["id"]
        faulthandler.dump_traceback_later(request["timeout"] + GRACE, exit=True)
        try:
            if request["package"]:
                self._open(request["module"].partition(".")[0], self._root / request["package"])
            module = importlib.import_module(request["module"])
            value, outcome, detail = module.answer(request["arguments"], self._progress(run)), Outcome.COMPLETED, ""
        except Skip as skip:
            value, outcome, detail = {}, Outcome.SKIPPED, str(skip)
        except BaseException as error:  # noqa: BLE001 - every error must reach the supervisor
            value, outcome = {}, _outcome_of(error, None)
            traceback.clear_frames(error.__traceback__)
            bad_input = isinstance(error, (ValueError, OSError))
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            detail = str(error) if bad_input else "".join(lines)[-DETAIL:]
        faulthandler.cancel_dump_traceback_later()
        self._send(kind="answered", id=run, outcome=outcome.value, value=value, detail=detail)

    def _send_readings(self, run: str, readings: list[list[Any]]) -> None:
        """Send the collected readings as one message, because a message for each would be most of telemetry's cost."""
        if readings:
            self._send(kind="readings", id=run, values=readings)
            readings.clear()

    def _open(self, name: str, path: Path) -> None:
        """Make the package `name` importable from its `__init__.py` at `path`, but no package beside it."""
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path}: not a package")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])

    def _load(self, name: str) -> ModuleType:
        path = self._root / name  # an absolute name stays itself
        if path not in self._modules:
            spec = importlib.util.spec_from_file_location(f"canaryd_probe_{path.stem}", path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path}: not a probe; the file must end in .py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses and pickle look the module up
            spec.loader.exec_module(module)
            if not isinstance(getattr(module, "SPEC", None), ProbeSpec):
                found = type(module.SPEC).__name__ if hasattr(module, "SPEC") else "missing"
                raise TypeError(f"{path}: SPEC is {found}; write SPEC = ProbeSpec(…) at module level")
            if not callable(getattr(module, "run", None)):
                raise TypeError(f"{path}: no function run; write def run(ctx): … that yields facts")
            self._modules[path] = module
        return self._modules[path]

    def _progress(self, run: str) -> Callable[[float, str], None]:
        latest = float("-inf")

        def progress(fraction: float, text: str) -> None:
            nonlocal latest
            now = time.monotonic()
            if now - latest >= PROGRESS_PERIOD:
                latest = now
                self._send(kind="progress", id=run, fraction=min(1.0, max(0.0, float(fraction))), text=str(text)[:200])

        return progress

    def _send(self, **message: Any) -> None:
        """Send a message without secrets. What a probe learns leaves the worker only here or through `Lines`."""
        own = {name: message.pop(name) for name in OWN if name in message}
        body = json.dumps(own | hide(message), allow_nan=False).encode()
        # The leading newline ends an unfinished line that a probe may have left on the same descriptor.
        data = memoryview(b"\n" + self._nonce + b" " + body + b"\n")
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._protocol, data) :]
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.write(2, f"canaryd: the worker lost its protocol pipe: {error}\n".encode())
                os._exit(1)


def _compact(fact: Reading | Absent) -> list[Any]:
    """Return a reading as [name, value, unit, labels], an absence as [name, reason, code]; raise for invalid data."""
    if isinstance(fact, Absent):
        if (type(fact.name), type(fact.reason), type(fact.code)) != (str, str, int):
            raise ValueError(f"the probe yielded an Absent that is not plain data: {fact!r:.200}; {INSTEAD}")
        return [fact.name, fact.reason, fact.code]
    value, labels = fact.value, fact.labels
    texts = [fact.name, fact.unit, *labels, *labels.values()]
    good = isinstance(value, (str, int, float)) and not (isinstance(value, float) and not math.isfinite(value))
    if not (good and all(isinstance(text, str) for text in texts)):
        raise ValueError(f"the probe yielded a Reading that is not plain data: {fact!r:.200}; {INSTEAD}")
    return [fact.name, value, fact.unit, dict(labels)]


def _plain(fact: Any) -> Any:
    """Return a fact as JSON data; raise `TypeError` or `ValueError`, which names the type, if `fact` is not a fact."""
    if type(fact) not in FACTS:
        wanted = ", ".join(kind.__name__ for kind in FACTS)
        raise TypeError(f"the probe yielded {type(fact).__name__}; it may yield {wanted}")
    data = to_json(fact)
    try:
        from_json(type(fact), json.loads(json.dumps(data, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the probe yielded a {type(fact).__name__} that is not plain data: {error}; {INSTEAD}"
        ) from error
    return data


def _surroundings(device: Device, instruction_set: str) -> dict[str, Any]:
    """Return "stack" and "environment", or the reason for their absence in "absent"."""
    try:
        runtime = importlib.import_module("canaryd.worker.runtime.interface").of(device)
        environment = importlib.import_module("canaryd.worker.numeric.stack").environment()
        return {"stack": runtime.stack(device, instruction_set), "environment": environment}
    except BaseException as error:  # noqa: BLE001 - the run is sent in any case
        return {"absent": {"stack": _last_line(error)}}


def _excuse(error: BaseException, device: Device, *, capped: bool) -> tuple[str, Reason]:
    """Return (reason, its code) if the budget, another user or an unfit torch caused an error, else the reason ""."""
    if importlib.import_module("canaryd.worker.numeric.errors").is_unbuilt(error):
        return str(importlib.import_module("canaryd.worker.numeric.stack").built_for_others(device, error)), Reason.NONE
    return limits.excuse(error, capped=capped), Reason.BUDGET


def _outcome_of(error: BaseException, device: Device | None) -> Outcome:
    """Return the outcome of a run that raised an exception; for a `RuntimeError` the backend's message decides.

    A device's error counts even if the clean-up after it raised another error, because the device works no more.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return Outcome.OUT_OF_MEMORY
    errors = importlib.import_module("canaryd.worker.numeric.errors")
    if device is None or device.is_accelerator:
        chain: list[BaseException] = [error]
        while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
            chain.append(before)
        if any(isinstance(e, RuntimeError) and errors.kind_of(e) is errors.ErrorKind.DEVICE for e in chain):
            return Outcome.DEVICE_ERROR
    memory = isinstance(error, (MemoryError, RuntimeError)) and errors.kind_of(error) is errors.ErrorKind.MEMORY
    return Outcome.OUT_OF_MEMORY if memory else Outcome.ERRORED


def _last_line(error: BaseException) -> str:
    """Return an exception's type and message, or the place where it was raised if it has no message."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()[-DETAIL:]
    frames = traceback.extract_tb(error.__traceback__)
    if ":" in text or not frames:
        return text
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})"
