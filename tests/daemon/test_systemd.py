"""What the daemon tells a service manager: a real daemon, and a socket that hears it as systemd would."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from canaryd.daemon import systemd
from canaryd.daemon.watchdog import served, within_reach
from tests.command import ROOT, Daemon, configure, environment, eventually, marked, running, soon


class Ear:
    """A manager's socket, and what it heard: (seconds by the monotonic clock, message)."""

    def __init__(self, address: str) -> None:
        self.heard: list[tuple[float, str]] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        while message := self.socket.recv(65536):
            self.heard.append((time.monotonic(), message.decode()))

    def told(self, assignment: str) -> bool:
        return any(assignment in message.splitlines() for _, message in list(self.heard))

    def fed(self, since: float) -> int:
        """Return how often the watchdog was fed after `since`."""
        return sum("WATCHDOG=1" in message for at, message in list(self.heard) if at > since)

    def status(self) -> str:
        lines = [line for _, message in list(self.heard) for line in message.splitlines()]
        return next((line[7:] for line in reversed(lines) if line.startswith("STATUS=")), "")

    def close(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", address)
        self.thread.join(10)
        self.socket.close()


@pytest.fixture
def ear(tmp_path, monkeypatch):
    """A manager that daemons of this test report to; its watchdog wants food within 8 s."""
    address = str(tmp_path / "notify")
    found = Ear(address)
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "8000000")
    yield found
    found.close(address)


def test_a_start_says_what_the_unit_lets_through(ear, tmp_path):
    """An address that others should reach, and a firewall that stops them in silence: the log names the setting."""
    config = configure(tmp_path, "passes")
    words = "only addresses in IPAddressAllow= of the unit reach it"
    with running(Daemon(config, tmp_path / "state", "--listen", "0.0.0.0:0")) as daemon:
        daemon.line(words)
    with running(Daemon(config, tmp_path / "state")) as daemon:
        assert daemon.address
        eventually(daemon.others)
        assert not any(words in line for line in daemon.lines)


# --- The protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, systemd.Manager()),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, systemd.Manager()),
        ({"WATCHDOG_USEC": "3000000"}, systemd.Manager(watchdog=3.0)),
        ({"WATCHDOG_USEC": "soon", "NOTIFY_SOCKET": "vsock:2:1234"}, systemd.Manager()),
        ({"NOTIFY_SOCKET": "@name"}, systemd.Manager(address="@name")),
    ],
)
def test_what_is_meant_for_others_is_ignored(given, wanted):
    """Nobody to tell, a watchdog of another process, a number that is none, a socket of another family."""
    assert systemd.take(dict(given)) == wanted


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_message_arrives(tmp_path, kind):
    """At a path and at an abstract name; a line break in a value cannot begin another assignment."""
    address = str(tmp_path / "s") if kind == "path" else f"@canaryd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address.replace("@", "\0"))
        assert systemd.Manager(address=address).tell("READY=1", "STATUS=one\nMAINPID=1")
        assert end.recv(4096) == b"READY=1\nSTATUS=one MAINPID=1"


def test_a_manager_that_is_gone_or_deaf_costs_nothing(tmp_path, monkeypatch):
    """Nobody there, nobody named, and one that does not read: False, soon, and no exception."""
    assert not systemd.Manager().tell("READY=1")
    assert not systemd.Manager(address=str(tmp_path / "nobody")).tell("READY=1")
    monkeypatch.setattr(systemd, "PATIENCE", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        manager = systemd.Manager(address=str(tmp_path / "deaf"))
        assert any(not manager.tell("STATUS=" + "x" * 1000) for _ in range(100_000))


# --- The daemon ------------------------------------------------------------------------------------------------------


def test_ready_when_it_serves_and_a_status_that_follows(tmp_path, ear):
    """READY comes with an HTTP server and before evidence; the status line then says what devices are."""
    with running(Daemon(configure(tmp_path, "records"), tmp_path / "state")) as daemon:
        eventually(lambda: ear.told("READY=1"))
        assert daemon.get("/metrics")[0] == 200
        eventually(lambda: ear.status() == "1 device: 1 healthy")
        eventually(lambda: ear.fed(0.0) >= 2)
        code, _ = daemon.end()
        assert code == 0
        eventually(lambda: ear.told("STOPPING=1"))


def test_a_hung_probe_starves_nothing(tmp_path, ear):
    """READY and food come all the same while every run of the only device hangs to its deadline."""
    config = configure(tmp_path, "hangs_ignoring_sigterm", each={"hangs_ignoring_sigterm": {"timeout": "60s"}})
    with running(Daemon(config, tmp_path / "state")) as daemon:
        eventually(lambda: ear.told("READY=1"))
        eventually(lambda: len(daemon.others()) > 0 and daemon.value("canaryd_device_state", state="unknown") == 1)
        begun = time.monotonic()
        eventually(lambda: ear.fed(begun) >= 4)
        for pid in daemon.others():  # and stopped ones, which not even answer
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        eventually(lambda: ear.fed(begun) >= 4)
        assert not ear.told("STOPPING=1")


def test_a_store_that_is_locked_for_long_starves_nothing(tmp_path, ear):
    """Another process keeps the database's write lock: statements wait 5 s each, and the watchdog is fed."""
    config = configure(tmp_path, "records", each={"records": {"period": "1s"}})
    with running(Daemon(config, tmp_path / "state")) as daemon:
        eventually(lambda: ear.status() == "1 device: 1 healthy")
        other = sqlite3.connect(tmp_path / "state" / "canaryd.db", isolation_level=None, timeout=30)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            begun = time.monotonic()
            eventually(lambda: time.monotonic() - begun > 20)
            heard = [at for at, message in list(ear.heard) if "WATCHDOG=1" in message and at > begun]
            gaps = [after - before for before, after in zip([begun, *heard], [*heard, time.monotonic()], strict=True)]
            assert max(gaps) < soon(8.0), gaps
        assert daemon.get("/metrics")[0] == 200


def test_a_stopped_daemon_is_not_fed(tmp_path, ear):
    """No thread of its own feeds for a process that stands still."""
    with running(Daemon(configure(tmp_path, "records"), tmp_path / "state")) as daemon:
        eventually(lambda: ear.fed(0.0) >= 1)
        daemon.send(signal.SIGSTOP)
        time.sleep(1.0)
        begun = time.monotonic()
        time.sleep(4.0)
        assert ear.fed(begun) == 0
        daemon.send(signal.SIGCONT)
        eventually(lambda: ear.fed(begun) >= 1)


FAULTS = {
    "scheduler": "found[daemon.Daemon]._jobs.scheduler.pause()",
    "record": "found[daemon.Daemon]._look = lambda: time.sleep(1e6)",
    "http": "found[server.Server].process_request = lambda *_: time.sleep(1e6)",
}
"""What is broken in a daemon that otherwise works → how."""
BROKEN = """
import sys, threading, time
from canaryd.cli import main
from canaryd.daemon import daemon, watchdog
from canaryd.web import server

found = {}
def remember(kind, name):
    before = getattr(kind, name)
    def after(self, *arguments):
        found[kind] = self
        return before(self, *arguments)
    setattr(kind, name, after)
def fault(what):
    sys.stdin.readline()
    exec(what)
    print("broken", file=sys.stderr, flush=True)
daemon.REFRESH, watchdog.STARVED = 0.5, 3.0
remember(daemon.Daemon, "_watch")
remember(server.Server, "start")
threading.Thread(target=fault, args=(sys.argv.pop(),), daemon=True).start()
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("broken", FAULTS)
def test_what_does_not_work_is_not_fed(tmp_path, ear, broken):
    """A scheduler that stands still, a look at the record that never ends, an HTTP server that accepts nobody."""
    argv = [sys.executable, "-c", BROKEN, "run", "--config", configure(tmp_path, "records")]
    argv += ["--state-dir", tmp_path / "state", "--listen", "127.0.0.1:0", FAULTS[broken]]
    log = tmp_path / "stderr"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            list(map(str, argv)), cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        try:
            eventually(lambda: ear.fed(0.0) >= 3)
            process.stdin.write(b"now\n")
            process.stdin.flush()
            eventually(lambda: "broken" in log.read_text())
            time.sleep(6.0)  # what was on its way, a last good look among it, and STARVED
            begun = time.monotonic()
            time.sleep(7.0)
            assert ear.fed(begun) == 0
            assert process.poll() is None
        finally:
            process.kill()


def test_a_reload_is_announced_and_a_bad_one_is_said(tmp_path, ear):
    """RELOADING, then READY, in this order; the status line says that the file is bad until it is not."""
    config = configure(tmp_path, "records")
    with running(Daemon(config, tmp_path / "state")) as daemon:
        eventually(lambda: ear.told("READY=1"))
        good = config.read_text()
        for text, bad in (("nonsense: 1\n", True), (good, False)):
            before = len(ear.heard)
            config.write_text(text)
            daemon.send(signal.SIGHUP)

            def words(since: int = before) -> list[str]:
                return [line for _, message in list(ear.heard)[since:] for line in message.splitlines()]

            eventually(lambda words=words: "READY=1" in words())
            assert words().index("RELOADING=1") < words().index("READY=1")
            assert any(word.startswith("MONOTONIC_USEC=") for word in words())
            eventually(lambda bad=bad: ("the new configuration is bad" in ear.status()) == bad)


def test_no_worker_knows_the_manager(tmp_path, ear):
    """Neither the socket nor the watchdog is in a worker's environment."""
    each = {"records": {"settings": {"log": str(tmp_path / "log"), "seconds": 5.0}}}
    with running(Daemon(configure(tmp_path, "records", each=each), tmp_path / "state")) as daemon:

        def workers() -> list[bytes]:
            found = []
            for pid in marked(daemon.mark):
                with contextlib.suppress(OSError):
                    if b"worker/__main__" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(Path(f"/proc/{pid}/environ").read_bytes())
            return found

        for environ in eventually(workers):
            assert b"NOTIFY_SOCKET" not in environ
            assert b"WATCHDOG" not in environ


def test_a_watchdogs_abort_says_where_each_thread_was(tmp_path):
    """SIGABRT leaves the stacks in the log.

    Python walks the stacks of threads that go on running, so the walk itself may crash the daemon that it describes.
    That is rare, ends it all the same, and says nothing of the next.
    """
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        with running(Daemon(configure(tmp_path / name, "records"), tmp_path / name / "state")) as daemon:
            eventually(lambda daemon=daemon: daemon.get("/readyz")[0] == 200)
            code, _ = daemon.end(signal.SIGABRT)
            if code == -signal.SIGSEGV:
                continue
            assert code == -signal.SIGABRT
            assert "in _watch" in daemon.line("in _watch")
            return
    pytest.fail("the dump of the stacks crashed three daemons of three")


# --- The server seen from inside -------------------------------------------------------------------------------------


def test_only_addresses_that_no_firewall_closes_are_asked():
    """Loopback is; an address of the network, a name, are not: a rule against ourselves must restart nothing."""
    assert within_reach("127.0.0.5", 7) == ("127.0.0.5", 7)
    assert within_reach("", 7) == within_reach("0.0.0.0", 7) == ("127.0.0.1", 7)
    assert within_reach("::", 7) == ("::1", 7)
    assert within_reach("10.0.0.7", 7) is within_reach("node17", 7) is None


def test_a_server_that_takes_clients_and_does_nothing_is_found(monkeypatch):
    """It accepts, by the kernel's hand, and never hangs up; one that is not there says nothing either way."""
    monkeypatch.setattr("canaryd.daemon.watchdog.ANSWER", 0.3)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        address = mute.getsockname()
        assert served(address)
        mute.listen()
        assert not served(address)
