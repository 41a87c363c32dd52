"""Starts workers, asks them, bounds every wait and says what became of them. Never hangs on what it started.

A worker is one process in a session of its own: standard input carries requests, a pipe of its own (or, behind
`worker.command`, standard output) carries the answers, and the rest of what it prints is kept as a bounded tail. One
thread owns a `Series`; only `Series.kill` may be called from another.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import math
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from canaryd import cgroup, privileges
from canaryd.model import (
    Comparison,
    Device,
    LogPosition,
    LogRecord,
    Outcome,
    Reading,
    Recording,
    Run,
    Skipped,
    from_json,
    shared,
    to_json,
    whole,
)
from canaryd.probe import Absent, ProbeSpec

log = logging.getLogger(__name__)

CHATTER = 65_536
"""Bytes kept of what a worker prints."""
MAX_LINE = 16 * 1024 * 1024
"""Bytes in one line of the protocol beyond which it is garbled."""
MAX_RUN = 64 * 1024 * 1024
"""Bytes of protocol in one run beyond which it is garbled."""
LONGEST_INTEGER = 40
"""Characters; what is longer is no number of a device, and none that every reader of JSON can hold."""
MAX_SHIPPED = 64 * 1024 * 1024
"""Bytes of one probe directory that are sent through `worker.command`."""
DETAIL = 4096
"""Bytes of what a lost worker printed that become part of its run."""
TICK = 0.1
"""Longest sleep, in seconds, between two looks at the worker's process."""
PING = 5.0
"""Seconds that a worker has to answer between two runs before a fresh one takes its place."""
AWAY = 2.0
"""Seconds between two looks at a worker from which this process was stopped, or its machine asleep: the worker is not
charged for them (ours)."""
STARVED = 4.0
"""How many times its timeout a worker that has stepped back may wait for a core in addition: that is no hang (ours)."""
AFTERLIFE = 1.0
"""Seconds that a worker has to disappear after SIGKILL, or after it closed its protocol."""
WAKE = 30.0
"""Seconds after SIGKILL for one that is not held by the kernel but waits for a core to end on: one that has stepped
back gets little of a busy one (ours)."""

INSTRUCTION_SETS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""Execution path of a CPU → environment that makes torch take it; "" and "native" leave the choice to the libraries."""
STRICT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of nvidia-smi; otherwise the fastest device comes first
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "OMP_WAIT_POLICY": "PASSIVE",  # a spinning barrier would take the cores from the server beside it
    "PYTHONUNBUFFERED": "1",
}
"""Environment of every worker: libraries read these only when they start, so a probe cannot set them."""
BELOW_NORMAL = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Environment of a worker that steps back: its kernels wait for the server's where both are clients of MPS (NVIDIA
Multi-Process Service, "Client Priority Level Control"). torch's streams have the lowest priority anyway, and priorities
of streams count within one process only."""
SCRUBBED = (
    # Not set to 0 either: that would keep the tfloat32 cases, which allow TF32 themselves, off its units.
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    # Emulated float32 and float64 products split their operands: the exact goldens' bound does not cover that.
    *("CUBLAS_EMULATE_SINGLE_PRECISION", "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE"),
)
"""Environment that no worker inherits: it changes numbers behind the back of the one who started canaryd."""

PACKAGE = Path(__file__).resolve().parent
ENTRY = "canaryd/worker/__main__.py"
# Runs behind `worker.command`, where nothing of canaryd exists: unpacks it, runs it, removes it whatever became of it.
BOOTSTRAP = """
import sys
sys.path = [p for p in sys.path if p]
if sys.version_info < (3, 10):
    sys.exit("canaryd: the worker needs Python 3.10 or newer; %s is %s" % (sys.executable, sys.version.split()[0]))
import base64, json, os, signal, subprocess, tempfile
signal.signal(signal.SIGTERM, lambda *_: None)
pipe = open(0, "rb", buffering=0, closefd=False)
size, packed = int(pipe.readline()), b""
while len(packed) < size:
    packed += pipe.read(size - len(packed)) or sys.exit("canaryd: standard input ended early")
head = json.loads(packed)
env = {k: v for k, v in os.environ.items() if k not in head["unset"]}
env.update(head["set"])
with tempfile.TemporaryDirectory(prefix="canaryd-") as tree:
    for name, content in head["files"].items():
        path = os.path.join(tree, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    fd = os.dup(1)
    os.dup2(2, 1)
    argv = [sys.executable, os.path.join(tree, head["entry"]), "--fd", str(fd), "--nonce", head["nonce"]]
    code = subprocess.call(argv, env=env, pass_fds=[fd])
sys.exit(code if code >= 0 else 128 - code)
"""

FACTS: Mapping[str, Any] = {kind.__name__: kind for kind in (Reading, Comparison, Recording, Skipped, Absent)}


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """How to start a worker."""

    python: str = sys.executable
    """Interpreter of the stack under test; Python 3.10 or newer."""
    command: tuple[str, ...] = ()
    """Instead of `python`: a command that ends in an interpreter elsewhere, e.g. docker exec -i vllm python3."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set last, above everything that canaryd sets or removes."""
    nice: int = 0
    """Nice level at which it runs beside a server, where it also goes first when memory runs out; 0 for neither."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run, and on what."""

    probe_path: Path
    spec: ProbeSpec
    device: Device
    level: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    """Only these cases; empty for all."""
    drill: str = ""
    confirms: str = ""
    trigger: str = ""
    baselining: bool = False
    memory: str = ""
    intensity: str = ""
    """How a retest asks harder: one of `canaryd.model.INTENSITIES`; "" for a run as usual."""
    budget: float | None = None
    """Seconds of work to aim at; None for what the probe's spec says of the level."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """What the run may take beside a server (`canaryd.budget.allowance`); empty where it has the device to itself."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a worker's interpreter has to offer."""

    python: str = ""
    """Its version; "" where it could not be started."""
    torch: str | None = None
    """torch's version."""
    torch_reason: str = ""
    """Why there is no torch, or why nothing could be found out."""
    devices: tuple[Device, ...] = ()
    stack: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[Path, ProbeSpec | str] = field(default_factory=dict)
    """Probe file → its spec, or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What the telemetry modules of canaryd's own interpreter find on this machine."""

    devices: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """Vendor module → its devices; a module that could not be asked is not in it."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Vendor module → why it could not be asked."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Those among them that should have answered: something of the vendor is installed."""
    facts: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def new_run_id(now: float) -> str:
    """Return an id that sorts by `now` (seconds since the epoch) and never repeats.

    40 random bits: of a thousand ids of one millisecond two are the same once in two million times.
    """
    return f"{int(now * 1000):012x}-{secrets.token_hex(5)}"


def abandoned() -> int:
    """Return how many workers this process has given up because they survived SIGKILL."""
    return _abandoned.count


def stuck() -> int:
    """Return how many of them are still there."""
    return _abandoned.reap()


class _Abandoned:
    """Workers in uninterruptible sleep: counted, and reaped without waiting should they ever wake."""

    def __init__(self) -> None:
        self.count = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self.count += 1
            self._processes.append(process)

    def reap(self) -> int:
        with self._lock:
            self._processes = [process for process in self._processes if process.poll() is None]
            return len(self._processes)


_abandoned = _Abandoned()


def place_workers(group: Path) -> None:
    """Put every worker that is started from now on into a control group (a directory of cgroup version 2)."""
    _place.group = group


@dataclass
class _Place:
    """Where workers are put."""

    group: Path | None = None

    def put(self, pid: int) -> None:
        """Move a process that has just been started, before it had time to use anything."""
        if self.group is None:
            return
        try:
            (self.group / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")
        except ProcessLookupError:
            pass  # it has ended already, and that tells the story
        except OSError as error:
            log.warning("workers share the limits of the daemon from now on: %s: %s", self.group, error.strerror)
            self.group = None


_place = _Place()


class _LostError(Exception):
    """The worker is of no more use; says which outcome that is, and why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class _Worker:
    """One process and its pipes. No method blocks for longer than its arguments say."""

    def __init__(self, spec: WorkerSpec, instruction_set: str) -> None:
        _abandoned.reap()
        self.python = ""
        self.chatter = bytearray()
        self._remote = bool(spec.command)
        self._nonce = secrets.token_hex(8)
        self._messages: deque[dict[str, Any]] = deque()
        self._received = 0
        self._line = bytearray()
        self._outgoing = bytearray()
        self._shipped: dict[Path, str] = {}
        self._protocol_ended: float | None = None
        self._looked = time.monotonic()
        self._away = 0.0  # seconds in which nobody looked
        self._reaped = False
        self._lock = threading.RLock()  # a signal handler may call kill() in the very thread that holds it
        self._oom_kills = _oom_kills()
        self._selector = selectors.DefaultSelector()  # before the process: where this fails there is nobody to leave
        self.processor_seconds: float | None = None
        """Processor time that it has used, children included; known once it has ended, None where it cannot be."""
        self._lenience = self._waited_before = 0.0
        stepping_back = {"CANARYD_NICE": str(spec.nice), **BELOW_NORMAL} if spec.nice else {}
        if spec.nice and not self._remote and cgroup.apart(_place.group):  # else nobody could tell who is in its group
            stepping_back |= {"CANARYD_IDLE": "1"}
        setting = {**STRICT, **INSTRUCTION_SETS[instruction_set], **stepping_back, **spec.env}
        if self._remote:
            try:
                self._process = _spawn([*spec.command, "-c", BOOTSTRAP], stderr=subprocess.PIPE)
            except OSError:
                self._selector.close()
                raise
            protocol, chatter = _pipe(self._process.stdout), _pipe(self._process.stderr)
            head = {"set": setting, "unset": SCRUBBED, "entry": ENTRY, "nonce": self._nonce, "files": _own_files()}
            packed = json.dumps(head).encode()
            self._outgoing += f"{len(packed)}\n".encode() + packed
        else:
            ours, theirs = os.pipe()
            protocol = os.fdopen(ours, "rb", buffering=0)
            argv = [spec.python, str(PACKAGE.parent / ENTRY), "--fd", str(theirs), "--nonce", self._nonce]
            env = {name: value for name, value in os.environ.items() if name not in SCRUBBED} | setting
            try:
                self._process = _spawn(argv, stderr=subprocess.STDOUT, env=env, pass_fds=(theirs,))
            except OSError:
                self._selector.close()
                protocol.close()
                raise
            finally:
                os.close(theirs)
            chatter = _pipe(self._process.stdout)
        self._stdin = _pipe(self._process.stdin)
        os.set_blocking(self._stdin.fileno(), False)
        self._pipes = (self._stdin, protocol, chatter)
        self._selector.register(protocol, selectors.EVENT_READ, self._read_protocol)
        self._selector.register(chatter, selectors.EVENT_READ, self._read_chatter)
        self._write_later()

    def begin(self) -> None:
        """Forget what was printed and received so far: a new run starts."""
        self.chatter.clear()
        self._received = 0
        self._looked, self._away = time.monotonic(), 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one request; it is written while waiting for the answer."""
        self._outgoing += json.dumps(message, default=str).encode() + b"\n"
        self._write_later()

    def place(self, path: Path) -> str:
        """Return the name under which the worker finds a probe's file, sending its directory along if need be."""
        path = path.resolve()
        if not self._remote:
            return str(path)
        if path.parent not in self._shipped:
            into = f"probes/{len(self._shipped)}"
            try:
                self.send({"op": "unpack", "files": _pack(path.parent, into)})
            except OSError as error:
                raise _LostError(Outcome.ERRORED, f"{path.parent} cannot be sent to worker.command: {error}") from error
            self._shipped[path.parent] = into
        return f"{self._shipped[path.parent]}/{path.name}"

    def receive(self, deadline: float, stopped: Callable[[], str]) -> dict[str, Any]:
        """Return the next message; raise `_LostError` when there will be none, or none before `deadline`.

        The deadline moves by the time for which this process itself did not run.
        """
        while not self._messages:
            if reason := stopped():
                raise _LostError(Outcome.ERRORED, f"stopped: {reason}")
            now = time.monotonic()
            if now - self._looked > AWAY:
                self._away += now - self._looked
                self._pump(0.0)  # what it answered meanwhile is waiting
                continue
            if now >= deadline + self._away and now >= deadline + self._away + self._starved():
                raise _LostError(Outcome.TIMED_OUT, "the worker did not answer before its deadline and was killed")
            if self.exited():
                self._drain()
                if not self._messages:
                    raise self._death()
            elif self._protocol_ended is not None and now > self._protocol_ended + AFTERLIFE:
                raise _LostError(Outcome.GARBLED, "the worker closed its end of the protocol without an answer")
            else:
                pause, left = TICK if self._protocol_ended is None else 0.01, deadline + self._away - now
                self._pump(min(pause, left) if left > 0 else pause)
        return self._messages.popleft()

    def be_lenient(self, seconds: float) -> None:
        """From now on move the deadline by the time for which others had its core, by `seconds` at most."""
        self._lenience, self._waited_before = seconds, _waited(self._process.pid)

    def _starved(self) -> float:
        return min(self._lenience, _waited(self._process.pid) - self._waited_before) if self._lenience else 0.0

    def exited(self) -> bool:
        """Tell whether the process has ended, without reaping it: until then its process group's id stays its own."""
        if self._reaped:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # SIGCHLD is ignored in this process: the kernel reaps by itself
            return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its children."""
        with self._lock:
            if not self._reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def end(self, *, ask: Callable[[], None] | None, grace: float) -> bool:
        """End the whole process group; return False where the worker was abandoned.

        `ask` asks for it politely; SIGKILL follows when the worker is gone or `grace` seconds are over.
        """
        if ask is not None:
            ask()
            self._await_exit(grace)
        self.signal(signal.SIGKILL)
        patience = time.monotonic() + WAKE
        while not (gone := self._await_exit(AFTERLIFE)) and time.monotonic() < patience:
            if not _runnable(self._process.pid):
                break
        with self._lock:
            if gone:
                self.signal(signal.SIGKILL)  # children that were born meanwhile
                self._weigh()
                self._process.wait()
            else:
                _abandoned.add(self._process)
            self._reaped = True
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        return gone

    def hang_up(self) -> None:
        """Close standard input, which a worker takes as its end."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._stdin)
        self._stdin.close()

    def _weigh(self) -> None:
        """Note what it has cost, while the kernel still knows: it forgets with the process."""
        if not (self._remote or self._reaped):
            self.processor_seconds = _processor_seconds(self._process.pid)

    def _await_exit(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.exited():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(_LostError):  # nonsense no longer matters
                self._pump(min(0.01, left))  # its last words must not block it
        with contextlib.suppress(_LostError):
            self._drain()
        return True

    def _drain(self) -> None:
        """Read what a dead worker left in the pipes; bounded, for its children may still be writing."""
        for _ in range(64):
            if not self._pump(0.0):
                break

    def _pump(self, timeout: float) -> bool:
        """Read and write what is ready within `timeout` seconds; return whether anything was."""
        self._looked = time.monotonic()
        ready = self._selector.select(timeout)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _write_later(self) -> None:
        if self._outgoing and self._stdin not in self._selector.get_map():
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._write)

    def _write(self) -> None:
        try:
            del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing[:CHATTER])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outgoing.clear()  # its exit tells the story
        if not self._outgoing:
            self._selector.unregister(self._stdin)

    def _keep(self, data: bytes) -> None:
        self.chatter += data
        del self.chatter[:-CHATTER]

    def _read_chatter(self) -> None:
        chatter = self._pipes[2]
        data = os.read(chatter.fileno(), CHATTER)
        if not data:
            self._selector.unregister(chatter)
        self._keep(data)

    def _read_protocol(self) -> None:
        protocol = self._pipes[1]
        data = os.read(protocol.fileno(), CHATTER)
        if not data:
            self._selector.unregister(protocol)
            self._protocol_ended = time.monotonic()
            return
        try:
            self._split(data)
        except _LostError:
            self._line.clear()
            self._selector.unregister(protocol)  # nothing after nonsense is read, let alone kept
            raise

    def _split(self, data: bytes) -> None:
        self._received += len(data)
        self._line += data
        if b"\n" in data:
            *lines, self._line = self._line.split(b"\n")
            for line in lines:
                self._take(bytes(line))
        if len(self._line) > MAX_LINE or self._received > MAX_RUN:
            raise _LostError(Outcome.GARBLED, f"the worker sent {self._received} bytes, too many to be facts")

    def _take(self, line: bytes) -> None:
        if not line:
            return
        nonce, _, body = line.partition(b" ")
        if nonce != self._nonce.encode():
            if not self._remote:
                raise _LostError(Outcome.GARBLED, f"on the protocol's descriptor stood {line[:80]!r}")
            self._keep(line + b"\n")  # what the command itself prints
            return
        try:
            message = json.loads(body, parse_float=_finite, parse_int=_integer, parse_constant=_finite)
            message = whole(message) if b"\\ud" in body.lower() else message
        except (ValueError, RecursionError) as error:
            raise _LostError(Outcome.GARBLED, f"the worker sent {body[:80]!r}: {error}") from error
        if not isinstance(message, dict):
            raise _LostError(Outcome.GARBLED, f"the worker sent {body[:80]!r}, not an object")
        self._messages.append(message)

    def _death(self) -> _LostError:
        with self._lock:
            self.signal(signal.SIGKILL)  # its children first, while the group's id cannot have passed to strangers
            self._weigh()
            code = self._process.wait()
            self._reaped = True
        number = -code if code < 0 else code - 128 if self._remote and code > 128 else 0
        if self._away and code == 1:  # stopped with us, it found its time over when it went on
            return _LostError(Outcome.ERRORED, f"stopped: canaryd itself did not run for {self._away:.0f} s meanwhile")
        try:
            how = f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return _LostError(Outcome.CRASHED, f"the worker exited with status {code} before it answered")
        if number == signal.SIGKILL:
            now = _oom_kills()
            if now > self._oom_kills:
                why = f"the kernel's count of out-of-memory kills rose from {self._oom_kills} to {now}"
                return _LostError(Outcome.OUT_OF_MEMORY, f"the worker {how}, and {why}")
            how += ", not by canaryd: by hand, or by an out-of-memory killer that this machine does not count"
        return _LostError(Outcome.CRASHED, f"the worker {how}")


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
        self._worker: _Worker | None = None
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
                                torch=None if message["torch"] is None else _text(message["torch"]),
                                torch_reason=_text(message["torch_reason"] or ""),
                                devices=from_json(tuple[Device, ...], message["devices"]),
                                stack=from_json(dict[str, str], message["stack"]),
                                probes=probes,
                            )
                        if message["kind"] == "probe":
                            error = message["error"]
                            probes[waiting[0]] = _text(error) if error else from_json(ProbeSpec, message["spec"])
                            del waiting[0]
            except _LostError as lost:
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
            except _LostError as lost:
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
            with privileges.reading_kernel_log():
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
        except _LostError as lost:
            return self._discard(lost)[1]

    def run(self, request: RunRequest, timeout: float) -> Run:
        """Run one probe and return what became of it, at the latest `timeout` + grace + 1 seconds from now.

        Never raises for anything that a worker does. Facts that arrived before a worker was lost are part of the run.
        """
        started, deadline = time.time(), time.monotonic() + timeout
        run = new_run_id(started)
        facts: dict[str, list[Any]] = {name: [] for name in FACTS}
        answer: _Answer | None = None
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
                            fact = _fact(item)
                            facts[type(fact).__name__].append(fact)
                    elif kind == "fact":
                        fact = from_json(FACTS[message["type"]], message["value"])
                        if isinstance(fact, Comparison) and not 0 <= fact.wrong_trials <= fact.trials:
                            raise ValueError(f"{fact.wrong_trials} wrong of {fact.trials} trials")
                        facts[message["type"]].append(fact)
                    elif kind == "result":
                        answer = from_json(_Answer, message)
                        self.wall_seconds -= answer.paused
                    else:
                        raise ValueError(f"unknown kind {kind!r}")
                if progress is not None and self._on_progress is not None:
                    self._on_progress(*progress)
            if answer.outcome not in (Outcome.COMPLETED, Outcome.SKIPPED):
                self.close()
        except _LostError as lost:
            seconds = time.monotonic() - begun if begun is not None else 0.0
            outcome, detail = self._discard(lost)
            answer = _Answer(outcome=outcome, seconds=seconds, detail=detail)
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
        except _LostError as lost:
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

    def _why_stopped(self) -> str:
        return self._stopped

    def _ready(self, deadline: float) -> _Worker:
        if self._stopped:
            raise _LostError(Outcome.ERRORED, f"stopped: {self._stopped}")
        if self._worker is not None and not self._answers(self._worker, deadline):
            self.close()
        if self._worker is not None:
            return self._worker
        where = "worker.command" if self._spec.command else f"worker.python ({self._spec.python})"
        self._began = time.monotonic()
        try:
            self._worker = _Worker(self._spec, self._instruction_set)
        except OSError as error:
            raise _LostError(Outcome.ERRORED, f"{where} cannot be started: {error}") from error
        self.workers_started += 1
        try:
            message = self._worker.receive(deadline, self._why_stopped)
        except _LostError as lost:
            if lost.outcome is not Outcome.CRASHED:
                raise
            raise _LostError(Outcome.ERRORED, f"{where} does not run the worker: {lost.reason}") from lost
        with _decoding(message):
            self._worker.python = str(message["python"])
        return self._worker

    def _answers(self, worker: _Worker, deadline: float) -> bool:
        """Ask a worker that has served before whether it still does: one that died since is nobody's outcome."""
        try:
            worker.begin()
            worker.send({"op": "ping"})
            while worker.receive(min(deadline, time.monotonic() + PING), self._why_stopped).get("kind") != "ready":
                pass  # the last words of a thread that an earlier probe left behind
        except _LostError:
            return False
        return True

    def _discard(self, lost: _LostError) -> tuple[Outcome, str]:
        worker, self._worker = self._worker, None
        outcome, reason = lost.outcome, lost.reason
        if worker is None:
            return outcome, reason
        # Only a worker that overran is asked first: SIGTERM makes it print where it hangs.
        ask = functools.partial(worker.signal, signal.SIGTERM) if outcome is Outcome.TIMED_OUT else None
        if not worker.end(ask=ask, grace=self._grace):
            outcome = Outcome.UNKILLABLE
            reason += "; it survived SIGKILL (uninterruptible sleep, as in a hung driver) and was abandoned"
        self._account(worker)
        printed = worker.chatter[-DETAIL:].decode(errors="replace").strip()
        return outcome, f"{reason}\nlast output:\n{printed}" if printed else reason

    def _account(self, worker: _Worker) -> None:
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


@dataclass(frozen=True, kw_only=True)
class _Answer:
    outcome: Outcome
    seconds: float
    paused: float = 0.0
    """Seconds of these that the run paused beside a server."""
    detail: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"a run of {self.seconds} seconds")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no number that a fact may hold")
    return number


def _integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value


def _fact(item: Any) -> Reading | Absent:
    """Return what stands for [name, value, unit, labels] or [name, reason]; raise `ValueError` for anything else.

    By hand: telemetry sends some two thousand of them at a time, and `from_json` takes ten times as long.
    """
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], str):
        return Absent(name=item[0], reason=item[1])
    if not (isinstance(item, list) and len(item) == 4):
        raise ValueError(f"no reading: {item!r:.100}")
    name, value, unit, labels = item
    texts = isinstance(name, str) and isinstance(unit, str) and isinstance(labels, dict)
    if not (texts and isinstance(value, (str, int, float)) and all(isinstance(v, str) for v in labels.values())):
        raise ValueError(f"no reading: {item!r:.100}")
    return Reading(
        name=shared(name),
        value=shared(value) if isinstance(value, str) else value,
        unit=shared(unit),
        labels={shared(k): shared(v) for k, v in labels.items()},
    )


@contextlib.contextmanager
def _decoding(message: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        said = f"{type(error).__name__}: {error} in {str(message)[:200]}"
        raise _LostError(Outcome.GARBLED, f"the worker sent what is not the protocol: {said}") from error


def _spawn(
    argv: Sequence[str], *, stderr: int, env: Mapping[str, str] | None = None, pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        bufsize=0,
        start_new_session=True,
        env=env,
        pass_fds=pass_fds,
    )
    _place.put(process.pid)
    return process


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _own_files() -> dict[str, str]:
    paths = [*(PACKAGE / name for name in ("__init__.py", "model.py", "probe.py")), *(PACKAGE / "worker").glob("*.py")]
    paths += (PACKAGE / "worker").glob("*.json")
    return {str(path.relative_to(PACKAGE.parent)): base64.b64encode(path.read_bytes()).decode() for path in paths}


def _pack(directory: Path, into: str) -> dict[str, str]:
    """Return the files of a probe directory, its data included, as name below `into` → base64."""
    files, size = {}, 0
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            size += path.stat().st_size
            if size > MAX_SHIPPED:
                raise OSError(f"its files exceed {MAX_SHIPPED} bytes; keep probes in a directory of their own")
            files[f"{into}/{name}"] = base64.b64encode(path.read_bytes()).decode()
    return files


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for memory since it started; 0 where it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _waited(pid: int) -> float:
    """Return the seconds for which a process's first thread was ready to run and others ran; 0.0 where unknown.

    Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat": the second field, in nanoseconds.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _stat(process: Path) -> list[str]:
    """Return what proc_pid_stat(5) says of a process or thread after its name, which may hold anything; or OSError."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _runnable(pid: int) -> bool:
    """Whether a thread of a process runs, or waits for a core: state R of proc_pid_stat(5)."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if _stat(task)[:1] == ["R"]:
                    return True
    return False


def _processor_seconds(pid: int) -> float | None:
    """Return the processor time of a process and its children that have ended: fields 14 to 17 of proc_pid_stat(5)."""
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, _stat(Path(f"/proc/{pid}"))[11:15])) / os.sysconf("SC_CLK_TCK")
    return None
