"""One worker process: start it, read its messages, kill it, and wait for its end."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from canaryd.codec import to_json
from canaryd.facts import whole
from canaryd.model import Outcome, Reason
from canaryd.supervisor import cgroup, killed
from canaryd.supervisor.environment import BELOW_NORMAL, INSTRUCTION_SETS, SCRUBBED, STRICT
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.remote import BOOTSTRAP, ENTRY, PACKAGE, TEMPORARY, own_files, pack

log = logging.getLogger(__name__)
CHATTER = 65_536
"""Number of bytes of a worker's printed output that are kept; older output is dropped."""
MAX_LINE = 16 * 1024 * 1024
"""Longest line of the protocol, in bytes; a longer line makes the run garbled."""
MAX_RUN = 64 * 1024 * 1024
"""Maximum protocol bytes of a numeric run; more bytes make the run garbled."""
MAX_TOLD = 16 * 1024 * 1024
"""Maximum protocol bytes of a run that is not numeric: a server or driver decides how much such a run sends. An
endpoint's longest run sends about 5 MB (probes/endpoint_canary.py)."""
LONGEST_INTEGER = 40
"""Maximum characters of an integer in a message. No device reports longer ones; some JSON readers cannot hold them."""
TICK = 0.1
"""Longest time, in seconds, between two checks of the worker's process."""
AWAY = 2.0
"""If more seconds than this pass between two checks of a worker, this process was stopped or the machine was asleep.
The worker's deadline then moves by that time (ours)."""
AFTERLIFE = 1.0
"""Seconds within which a worker must end after SIGKILL, or after it closed its protocol pipe."""
WAKE = 30.0
"""Seconds within which a worker must end after SIGKILL if it is not blocked in the kernel but waits for a core. A
low-priority worker gets little time on a busy core (ours)."""


def abandoned() -> int:
    """Return the number of workers that this process has abandoned because they survived SIGKILL."""
    return _abandoned.count


def stuck() -> int:
    """Return the number of abandoned workers that still exist."""
    return _abandoned.reap()


class _Abandoned:
    """Workers that survived SIGKILL: they are counted, and removed from the process table when they end."""

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
    """The control group for workers."""

    group: Path | None = None

    def put(self, pid: int) -> None:
        """Move a process into the group; it has just started and has not used any resources."""
        if self.group is None:
            return
        try:
            (self.group / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")
        except ProcessLookupError:
            pass  # it has ended already, which its outcome will show
        except OSError as error:
            log.warning("workers now share the daemon's limits: %s: %s", self.group, error.strerror)
            self.group = None


_place = _Place()


class LostError(Exception):
    """A worker can no longer be used; the error holds the outcome of the worker's run, and the reason."""

    def __init__(self, outcome: Outcome, detail: str, reason: Reason = Reason.NONE) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.reason = reason


class Worker:
    """One process and its pipes. No method blocks for longer than its arguments allow."""

    def __init__(self, spec: WorkerSpec, instruction_set: str) -> None:
        _abandoned.reap()
        self.python = ""
        self.chatter = bytearray()
        self._remote = bool(spec.command)
        self._bus_id = "" if spec.only is None else spec.only.detail.get("bus_id", "")
        self._nonce = secrets.token_hex(8)
        self.unreceived: deque[dict[str, Any]] = deque()
        """Messages that have arrived and were not received yet."""
        self._received = 0
        self._most = MAX_RUN
        self._line = bytearray()
        self._outgoing = bytearray()
        self._shipped: dict[Path, str] = {}
        self._protocol_ended: float | None = None
        self._looked = time.monotonic()
        self._away = 0.0  # seconds for which this process did not run
        self._reaped = False
        self._lock = threading.RLock()  # a signal handler may call kill() in the very thread that holds it
        self._oom_kills = _oom_kills()
        self._selector = selectors.DefaultSelector()  # before the process: if this fails, no process is left behind
        self.processor_seconds: float | None = None
        """Processor seconds of the worker and its children; None before it has ended, or where it is unknown."""
        self._lenience = self._waited_before = 0.0
        priority = {"CANARYD_NICE": str(spec.nice), **BELOW_NORMAL} if spec.nice else {}
        if spec.nice and not self._remote and cgroup.apart(_place.group):  # a remote worker's group is unknown
            priority |= {"CANARYD_IDLE": "1"}
        only = {"CANARYD_ONLY": json.dumps(to_json(spec.only))} if spec.only is not None else {}
        setting = {**STRICT, **INSTRUCTION_SETS[instruction_set], **priority, **spec.env, **only}
        if self._remote:
            try:
                self._process = _spawn([*spec.command, "-c", BOOTSTRAP], stderr=subprocess.PIPE)
            except OSError:
                self._selector.close()
                raise
            protocol, chatter = _pipe(self._process.stdout), _pipe(self._process.stderr)
            head = {"set": setting, "unset": SCRUBBED, "entry": ENTRY, "nonce": self._nonce, "files": own_files()}
            head["temporary"] = TEMPORARY
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

    def begin(self, most: int = MAX_RUN) -> None:
        """Start a new run: forget earlier output and the count of received bytes, and accept at most `most` bytes."""
        self.chatter.clear()
        self._received, self._most = 0, most
        self._looked, self._away = time.monotonic(), 0.0

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue one request; it is written while `receive` waits for the answer."""
        self._outgoing += json.dumps(message, default=str).encode() + b"\n"
        self._write_later()

    def place(self, path: Path) -> str:
        """Return the path of a probe's file as the worker sees it; a remote worker first gets the file's directory."""
        path = path.resolve()
        if not self._remote:
            return str(path)
        if path.parent not in self._shipped:
            into = f"probes/{len(self._shipped)}"
            try:
                self.send({"op": "unpack", "files": pack(path.parent, into)})
            except OSError as error:
                raise LostError(Outcome.ERRORED, f"cannot send {path.parent} to worker.command: {error}") from error
            self._shipped[path.parent] = into
        return f"{self._shipped[path.parent]}/{path.name}"

    def receive(self, deadline: float, stopped: Callable[[], str]) -> dict[str, Any]:
        """Return the next message; raise `LostError` at `deadline`, or earlier if no message can come any more.

        `stopped` returns the reason why canaryd stops, or "". The deadline moves by the time in which this process did
        not run.
        """
        while not self.unreceived:
            if reason := stopped():
                raise LostError(Outcome.ERRORED, f"stopped: {reason}", Reason.STOPPED)
            now = time.monotonic()
            if now - self._looked > AWAY:
                self._away += now - self._looked
                self._pump(0.0)  # its answer may be waiting in the pipe
                continue
            if now >= deadline + self._away and now >= deadline + self._away + self._starved():
                raise LostError(Outcome.TIMED_OUT, "the worker did not answer before its deadline and was killed")
            if self.exited():
                self._drain()
                if not self.unreceived:
                    raise self._death()
            elif self._protocol_ended is not None and now > self._protocol_ended + AFTERLIFE:
                raise LostError(Outcome.GARBLED, "the worker closed its protocol pipe without an answer")
            else:
                pause, left = TICK if self._protocol_ended is None else 0.01, deadline + self._away - now
                self._pump(min(pause, left) if left > 0 else pause)
        return self.unreceived.popleft()

    def be_lenient(self, seconds: float) -> None:
        """Extend the deadline of `receive` by the time that the worker waits for a core, but by at most `seconds`."""
        self._lenience, self._waited_before = seconds, _waited(self._process.pid)

    def _starved(self) -> float:
        return min(self._lenience, _waited(self._process.pid) - self._waited_before) if self._lenience else 0.0

    def exited(self) -> bool:
        """Return whether the process has ended. It remains as a zombie, so that no other process gets its id."""
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
                if not self.exited():
                    killed.note(self._process.pid, self._bus_id, hidden=self._remote)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def end(self, *, ask: Callable[[], None] | None, grace: float, afterlife: float) -> bool:
        """End the worker and its children; return False if the worker survived SIGKILL and was abandoned.

        `ask` is called first and asks the worker to end. SIGKILL follows when the worker has ended, or after `grace`
        seconds. After SIGKILL the worker must end within `afterlife` seconds.
        """
        if ask is not None:
            ask()
            self._await_exit(grace)
        self.signal(signal.SIGKILL)
        patience = time.monotonic() + WAKE
        while not (gone := self._await_exit(afterlife)) and time.monotonic() < patience:
            if not _runnable(self._process.pid):
                break
        with self._lock:
            if gone:
                self.signal(signal.SIGKILL)  # children that were started in the meantime
                self._note_processor_time()
                self._process.wait()
            else:
                _abandoned.add(self._process)
            self._reaped = True
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()
        return gone

    def leave(self) -> None:
        """Ask the worker to wait for the work on its device, and then to end."""
        self.send({"op": "leave"})

    def hang_up(self) -> None:
        """Close standard input, which asks the worker to end."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._stdin)
        self._stdin.close()

    def _note_processor_time(self) -> None:
        """Save the worker's processor time; the kernel forgets it when this process collects the exit status."""
        if not (self._remote or self._reaped):
            self.processor_seconds = _processor_seconds(self._process.pid)

    def _await_exit(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.exited():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(LostError):  # garbage no longer matters
                self._pump(min(0.01, left))  # a full pipe must not block it
        with contextlib.suppress(LostError):
            self._drain()
        return True

    def _drain(self) -> None:
        """Read what a dead worker left in the pipes. The amount is limited, because its children may still write."""
        for _ in range(64):
            if not self._pump(0.0):
                break

    def _pump(self, timeout: float) -> bool:
        """Read and write whatever the pipes allow within `timeout` seconds; return whether any pipe was ready."""
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
            self._outgoing.clear()  # its outcome will show why it ended
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
        except LostError:
            self._line.clear()
            self._selector.unregister(protocol)  # read nothing after garbage
            raise

    def _split(self, data: bytes) -> None:
        self._received += len(data)
        self._line += data
        if b"\n" in data:
            *lines, self._line = self._line.split(b"\n")
            for line in lines:
                self._take(bytes(line))
        if len(self._line) > MAX_LINE or self._received > self._most:
            raise LostError(Outcome.GARBLED, f"the worker sent too much: {self._received} bytes in one run")

    def _take(self, line: bytes) -> None:
        if not line:
            return
        nonce, _, body = line.partition(b" ")
        if nonce != self._nonce.encode():
            if not self._remote:
                raise LostError(Outcome.GARBLED, f"the worker sent {line[:80]!r}, which is not the protocol")
            self._keep(line + b"\n")  # what the command itself prints
            return
        try:
            message = json.loads(body, parse_float=_finite, parse_int=_integer, parse_constant=_finite)
            message = whole(message) if b"\\ud" in body.lower() else message
        except (ValueError, RecursionError) as error:
            raise LostError(Outcome.GARBLED, f"the worker sent {body[:80]!r}: {error}") from error
        if not isinstance(message, dict):
            raise LostError(Outcome.GARBLED, f"the worker sent {body[:80]!r}, which is not an object")
        self.unreceived.append(message)

    def _death(self) -> LostError:
        with self._lock:
            self.signal(signal.SIGKILL)  # its children first, while the group's id is still reserved
            self._note_processor_time()
            code = self._process.wait()
            self._reaped = True
        number = -code if code < 0 else code - 128 if self._remote and code > 128 else 0
        if self._away and code == 1:  # stopped together with canaryd, it ran out of time
            detail = f"stopped: canaryd itself did not run for {self._away:.0f} s"
            return LostError(Outcome.ERRORED, detail, Reason.STOPPED)
        try:
            how = f"was killed by {signal.Signals(number).name}"
        except ValueError:
            return LostError(Outcome.CRASHED, f"the worker exited with status {code} without an answer")
        if number == signal.SIGKILL:
            now = _oom_kills()
            if now > self._oom_kills:
                why = f"the kernel's count of out-of-memory kills rose from {self._oom_kills} to {now}"
                return LostError(Outcome.OUT_OF_MEMORY, f"the worker {how}, and {why}")
            how += ", not by canaryd: by a person, or by an out-of-memory killer that this machine does not count"
        return LostError(Outcome.CRASHED, f"the worker {how}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError(f"an integer has {len(text)} digits, limit {LONGEST_INTEGER}")
    return int(text)


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


def _oom_kills() -> int:
    """Return the number of processes that the kernel has killed for memory since its start, or 0 if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _waited(pid: int) -> float:
    """Return the seconds for which a process's first thread has waited for a core, or 0.0 if unknown.

    Source: Linux, Documentation/scheduler/sched-stats.rst, "/proc/<pid>/schedstat": the second field, in nanoseconds.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _stat(process: Path) -> list[str]:
    """Return the fields after the name in proc_pid_stat(5) of a process or thread; raise `OSError` if it has ended."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _runnable(pid: int) -> bool:
    """Return whether any thread of a process runs or waits for a core: state R of proc_pid_stat(5)."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if _stat(task)[:1] == ["R"]:
                    return True
    return False


def _processor_seconds(pid: int) -> float | None:
    """Return the processor seconds (proc_pid_stat(5)) of a process and its ended children; None if unreadable."""
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, _stat(Path(f"/proc/{pid}"))[11:15])) / os.sysconf("SC_CLK_TCK")
    return None
