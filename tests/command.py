"""canaryd as its users meet it: `python -m canaryd` in a process of its own, on light probes in a directory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
PROBES = ROOT / "tests/probes"
BUILTIN = tuple(sorted(path.stem for path in (ROOT / "probes").glob("[!_]*.py")))
RUN_ID = re.compile(r"\b[0-9a-f]{12}-[0-9a-f]{10}\b")
PATIENCE = 60.0
MARK = "CANARYD_TEST_MARK"
"""Environment variable by which a test finds every process that its canaryd started, and theirs."""


@functools.cache
def bare_python() -> str:
    """Return an interpreter without torch, so that listing the devices does not cost torch's start."""
    directory = tempfile.mkdtemp(prefix="canaryd-bare-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    return f"{directory}/bin/python"


@contextlib.contextmanager
def open_to_all() -> Iterator[Path]:
    """Make a directory that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="canaryd-open-") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def free_port() -> int:
    """Return a port of the loopback that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def catalogue(directory: Path, *names: str) -> Path:
    """Copy probes of tests/probes to `directory`; "records:second" is a copy under another name."""
    directory.mkdir(exist_ok=True)
    for name in names:
        original, _, copy = name.partition(":")
        text = (PROBES / f"{original}.py").read_text()
        if copy:
            text = text.replace(f'name="{original}"', f'name="{copy}"')
        path = directory / f"{copy or original}.py"
        path.write_text(text)
        path.chmod(0o644)
    directory.chmod(0o755)
    return directory


def configure(directory: Path, *names: str, each: Mapping[str, Any] | None = None, **sections: Any) -> Path:
    """Write a configuration with these probes of tests/probes alone; JSON is YAML."""
    probes = {name: {"enabled": False} for name in BUILTIN} | dict(each or {})
    probes["directories"] = [str(catalogue(directory / "probes.d", *names))]
    quiet = directory / "kernel.log"  # what this machine's kernel says belongs into no test that did not ask for it
    quiet.touch()
    telemetry = {"kernel_log": str(quiet)}
    content = {"worker": {"python": bare_python()}, "probes": probes, "telemetry": telemetry} | sections
    path = directory / "canaryd.yaml"
    path.write_text(json.dumps(content, indent=2))
    return path


def environment(**extra: str) -> dict[str, str]:
    """Return the environment for a canaryd, which conftest has cleaned of what this machine's user set for his own."""
    return os.environ | extra


def exchange(one: Path, other: Path) -> None:
    """Let two paths change places at once: a thread of the engine would create a directory that is missing."""
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swap):
        raise OSError(ctypes.get_errno(), f"{one} and {other} did not change places")


class Answer(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


WAITS = re.compile("^canaryd: waiting for torch of .*\n", re.MULTILINE)
"""A line that only a busy machine prints."""
STARTED = """
import json, os, runpy, signal, socket, sys
from canaryd.cli.main import parser
parser()
asked = socket.socket(fileno=int(sys.argv.pop()))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait are reaped
while True:
    said, fds, *_ = socket.recv_fds(asked, 1 << 20, 3)
    if not said:
        os._exit(0)
    if not os.fork():
        break
    list(map(os.close, fds))
asked.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
if child := os.fork():
    try:
        os.write(fds[0], b"%d " % child)
        os.write(fds[0], b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        os._exit(0)  # nobody may wait any more
os.close(fds[0])
for number, fd in enumerate(fds[1:], 1):
    os.dup2(fd, number)
    os.close(fd)
words, variables = json.loads(said)
os.environ.clear()
os.environ.update(variables)
sys.argv = ["canaryd", *words]
runpy.run_module("canaryd", run_name="__main__", alter_sys=True)
"""
"""A Python that has loaded canaryd's command line, and runs each command that it is told in a process of its own."""
OF_A_START = ("PYTHON", "LANG", "LC_", "LD_", "MALLOC_", "TZ")
"""Variables that a Python reads when it starts."""


@functools.cache
def started(*variables: tuple[str, str]) -> socket.socket:
    """Start such a Python, and return where it is told commands; it ends with this process."""
    asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, "-c", STARTED, str(theirs.fileno())]
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(**dict(variables)), pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(lambda: (asked.close(), process.wait(PATIENCE)))
    return asked


def canaryd(*arguments: object, timeout: float = 120.0, **extra: str) -> Answer:
    """Run one command to its end, in a process of its own. Whatever it is given, no traceback may show.

    Most of a short command is the start of its Python, so each is forked from one that has loaded the command line.
    """
    variables = environment(**extra)
    of_start = sorted(item for item in variables.items() if item[0].startswith(OF_A_START))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        here, there = socket.socketpair()
        with here:
            with there:
                said = json.dumps([list(map(str, arguments)), variables]).encode()
                fds = [there.fileno(), out.fileno(), err.fileno()]
                socket.send_fds(started(*of_start), [said], fds)
            here.settimeout(timeout)
            told = b""
            try:
                while more := here.recv(100):
                    told += more
            except TimeoutError as error:
                os.kill(int(told.split()[0]), signal.SIGKILL)
                raise subprocess.TimeoutExpired([*map(str, arguments)], timeout) from error
        out.seek(0)
        err.seek(0)
        answer = Answer(int(told.split()[1]), out.read().decode(), WAITS.sub("", err.read().decode()))
    # That of a probe is data, and indented in a document.
    assert not re.search("^Traceback", answer.out + answer.err, re.MULTILINE), answer.out + answer.err
    return answer


IN_TURN = """
import contextlib, encodings.ascii, encodings.idna, encodings.utf_8_sig, io, json, os, sys
from canaryd.cli.main import main, parser
if len(sys.argv) > 1:  # only now: another user may not be able to read this interpreter's own files
    parser()
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
for command in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def in_turn(*commands: Sequence[object], user: int | None = None, timeout: float = 300.0, **extra: str) -> list[Answer]:
    """Run commands one after the other in one process, which costs one start; as `user`, which needs root."""
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, *([] if user is None else [str(user)])],
        input=json.dumps([[str(word) for word in command] for command in commands]),
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    said = (json.loads(line) for line in done.stdout.splitlines())
    return [Answer(code, out, WAITS.sub("", err)) for code, out, err in said]


def soon(seconds: float) -> float:
    """Return how long may take what takes `seconds` at most on an idle machine: four times that where others run."""
    return seconds * (4 if "PYTEST_XDIST_WORKER" in os.environ or os.getloadavg()[0] > (os.cpu_count() or 1) else 1)


def eventually(what: Callable[[], Any], within: float = PATIENCE, every: float = 0.25) -> Any:
    """Ask `every` so many seconds until the answer is true and return it; fail after `within` seconds, or `soon`."""
    within = soon(within)
    end = time.monotonic() + within
    while not (answer := what()):
        assert time.monotonic() < end, f"not within {within} s: {what}"
        time.sleep(every)
    return answer


class Process:
    """A canaryd that runs beside the test."""

    def __init__(self, *arguments: object, stderr: int = subprocess.PIPE) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "canaryd", *map(str, arguments)],
            cwd=ROOT,
            env=environment(**{MARK: self.mark}),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        if self.popen.stderr:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.lines.append(line.rstrip("\n"))

    def line(self, text: str, within: float = PATIENCE) -> str:
        """Wait for a line on standard error that contains `text`."""
        return str(eventually(lambda: next((line for line in self.lines if text in line), ""), within))

    def others(self) -> list[int]:
        """Return the ids of the living processes that came of this one."""
        return [pid for pid in marked(self.mark) if pid != self.popen.pid]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        self.popen.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM, within: float = PATIENCE) -> tuple[int, float]:
        """Send a signal, wait for the end; return the status and the seconds that it took."""
        begun = time.monotonic()
        self.send(number)
        code = self.popen.wait(within)
        return code, time.monotonic() - begun

    def close(self) -> None:
        """Leave nothing behind, whatever became of the test."""
        for pid in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(PATIENCE)
        if self.popen.stderr:
            self._reader.join(PATIENCE)
            self.popen.stderr.close()
        if self.popen.stdout:
            self.popen.stdout.close()


class Daemon(Process):
    """A running `canaryd run`."""

    def __init__(self, config: Path, state: Path, *arguments: object) -> None:
        super().__init__("run", "--config", config, "--state-dir", state, "--listen", "127.0.0.1:0", *arguments)

    @property
    def address(self) -> str:
        """Where it serves; waits for the line that says so."""
        return self.line("serves http").partition("serves ")[2].partition("/metrics")[0]

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def value(self, name: str, **labels: str) -> float | None:
        """Return the first sample of `name` with these labels, None where there is none."""
        status, page = self.get("/metrics")
        assert status == 200
        # That of other names is not read: with eight GPUs the page has more than a thousand samples.
        asked = "".join(f"{line}\n" for line in page.splitlines() if line.startswith(name))
        for family in text_string_to_metric_families(asked):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None


def marked(mark: str) -> list[int]:
    """Return the ids of living processes (zombies are dead) whose environment carries `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            alive = entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def children() -> set[int]:
    """Return the ids of this process's children, zombies too."""
    return {int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


@contextlib.contextmanager
def running(process: Process) -> Iterator[Any]:
    """Close a process at the end of a test."""
    try:
        yield process
    finally:
        process.close()


def intervals(log: Path) -> list[tuple[float, float]]:
    """Return when the probe `records` ran, as (begin, end), in order; what never ended is left out."""
    begun, found = {}, []
    for line in log.read_text().splitlines():
        word, pid, at = line.split()
        if word == "begin":
            begun[pid] = float(at)
        else:
            found.append((begun.pop(pid), float(at)))
    return sorted(found)
