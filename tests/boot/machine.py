"""A Debian 12 with a real systemd, booted in a container of its own network, for tests/test_boot.py.

Every flag of systemd-nspawn has its reason: `--capability=all` and /dev/kmsg because a container has no kernel log
otherwise, the unified hierarchy because IPAddressDeny is not enforced in the hybrid one, the private network because
all capabilities would reach the host's interfaces. With --keep-unit alone all machines would share one control group,
and so the group of each unit: every machine is started in one of its own. Commands enter with nsenter: without systemd
on the host there is no machinectl.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("CANARYD_BOOT") or Path.home() / ".cache/canaryd-boot")
"""Where tests/boot/make_root leaves the root and wheels."""
BOOTED = f"root-{hashlib.sha256((ROOT / 'tests/boot/packages').read_bytes()).hexdigest()[:12]}.tar"
"""The root with the packages that are asked for today: one of an older list is not booted."""
PATIENCE = 120.0
CLONE = ("canaryd", "deploy", "packaging", "probes", "scripts", "systemd", "LICENSE", "README.md", "pyproject.toml")
"""What of the repository an installation needs."""
TOOLS = ("systemd-nspawn", "nsenter", "pgrep", "tar")


GET = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=20)
except urllib.error.HTTPError as error:
    answer = error
print(answer.read().decode(), answer.status, sep="\\n", end="")
"""
"""Inside there is what Debian's smallest installation has beside systemd and Python: no curl, no ps, no kill."""


class Task(NamedTuple):
    """A process of the container."""

    pid: int
    """Inside."""
    age: float
    """Seconds since its start."""
    idle: bool
    """Whether it computes only on cores that nobody else wants."""
    args: str


def why_not(*, torch: bool = False) -> str:
    """Return why no machine can be booted here, "" where one can."""
    wanted = [BOOTED, "wheels", *(["torch", "debs"] if torch else [])]
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "booting a container wants root on Linux"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed: apt install systemd-container util-linux"
    if missing := [name for name in wanted if not (CACHE / name).exists()]:
        return f"{CACHE}/{missing[0]} is not there: tests/boot/make_root{' --torch' if torch else ''} makes it"
    return ""


def copy_clone(into: Path, version: str = "") -> Path:
    """Copy what an installation needs of the repository, as another version where one is given."""
    into.mkdir(parents=True)
    for name in CLONE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy2(ROOT / name, into / name)
    if version:
        (into / "canaryd/__init__.py").write_text(f'"""A later canaryd."""\n\n__version__ = "{version}"\n')
    return into


def _control_groups(name: str) -> list[Path]:
    """Make a group of that name beside this process, in each hierarchy that systemd uses: the unified one or both."""
    made = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, path = line.split(":", 2)
        for mounted in {"": ("", "unified"), "name=systemd": ("systemd",)}.get(hierarchy, ()):
            beside = Path("/sys/fs/cgroup", mounted, path.lstrip("/"))
            if (beside / "cgroup.procs").exists():
                (beside / name).mkdir()
                made.append(beside / name)
    return made


class Machine:
    """A booted container; `root` is its file system as the host sees it."""

    def __init__(self, directory: Path) -> None:
        """Unpack and boot in memory, mounted below `directory`; about three seconds."""
        self.root = directory / "root"
        self.root.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "canaryd-boot", self.root], check=True)
        subprocess.run(["tar", "-C", self.root, "-xf", CACHE / BOOTED], check=True)
        self.leader = ""
        self._log = (directory / "nspawn.log").open("wb")
        name = f"canaryd-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self._groups = _control_groups(name)
        entered = ["sh", "-c", 'for group in $0; do echo $$ >"$group/cgroup.procs"; done; exec "$@"']
        argv = ["systemd-nspawn", "-q", "-D", self.root, "-M", name, "--register=no", "--keep-unit", "-b"]
        argv += ["--console=pipe", "--private-network", "--capability=all", "--system-call-filter=@known"]
        self.popen = subprocess.Popen(
            [*entered, " ".join(map(str, self._groups)), *argv, "--bind=/dev/kmsg"],
            env=os.environ | {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self.eventually(self._booted)
        except BaseException:
            self.close()
            raise

    def _leader(self) -> str:
        """Return the host's process id of the container's first process, "" before there is one."""
        done = subprocess.run(["pgrep", "-P", str(self.popen.pid)], capture_output=True, text=True, check=False)
        return done.stdout.split()[0] if done.stdout.split() else ""

    def _booted(self) -> bool:
        assert self.popen.poll() is None, Path(self._log.name).read_text()
        self.leader = self._leader()  # anew: the first child of systemd-nspawn only prepares the one that stays
        if not self.leader:
            return False
        done = self.run("systemctl", "is-system-running", check=False)
        return done.stdout.strip() in {"running", "degraded"}

    def run(
        self, *argv: object, check: bool = True, timeout: float = 300.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root, with an environment of its own; a failure shows what it said."""
        inside = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        enter = ["nsenter", "-t", self.leader, "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w"]
        done = subprocess.run(
            [*enter, *map(str, argv)],
            env={**inside, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not check or done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def out(self, *argv: object) -> str:
        """Return what a command inside printed, without the last newline."""
        return self.run(*argv).stdout.strip()

    def shell(self, text: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a line of shell inside."""
        return self.run("sh", "-c", text, **options)

    def show(self, what: str, unit: str = "canaryd.service") -> str:
        """Return a property of a unit."""
        return self.out("systemctl", "show", "--value", "-p", what, unit)

    def restart(self) -> None:
        """Start the service anew; it is stopped more often here than the unit's limit lets anyone."""
        self.run("systemctl", "reset-failed", "canaryd", check=False)
        self.run("systemctl", "restart", "canaryd")

    def journal(self, unit: str = "canaryd.service") -> str:
        """Return what a unit, and systemd about it, have logged."""
        return self.out("journalctl", "--no-pager", "-o", "cat", "-u", unit)

    def get(self, path: str) -> tuple[int, str]:
        """Ask the daemon; return status (0: no connection) and body."""
        done = self.run("python3", "-c", GET, f"http://127.0.0.1:19469{path}", check=False)
        body, _, code = done.stdout.rpartition("\n")
        return int(code or 0), body

    def processes(self) -> list[Task]:
        """Return canaryd's living processes, the daemon's and its workers'."""
        inside, found = Path(f"/proc/{self.leader}/root/proc"), []
        uptime = float((inside / "uptime").read_text().split()[0])
        for path in inside.glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                args = (path / "cmdline").read_text().replace("\0", " ")
                stat = (path / "stat").read_text().rpartition(")")[2].split()  # from the third field on, proc(5)
                if "/opt/canaryd" in args and stat[0] != "Z":
                    age = uptime - int(stat[19]) / os.sysconf("SC_CLK_TCK")
                    found.append(Task(int(path.name), age, stat[38] == str(os.SCHED_IDLE), args))
        return found

    def runs(self) -> dict[str, str]:
        """Return the stored runs: id → probe, read from the database itself."""
        code = (
            "import json, sqlite3; db = sqlite3.connect('file:/var/lib/canaryd/canaryd.db?mode=ro', uri=True);"
            "print(json.dumps(dict(db.execute('SELECT id, probe FROM runs'))))"
        )
        return dict(json.loads(self.out("python3", "-c", code)))

    def eventually(self, what: Any, within: float = PATIENCE) -> Any:
        """Ask until the answer is true and return it; fail after `within` seconds."""
        end = time.monotonic() + within
        while not (answer := what()):
            assert time.monotonic() < end, f"not within {within} s: {what}"
            time.sleep(0.25)
        return answer

    def put(self, path: str, text: str) -> None:
        """Write a file, root's and readable for all."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o644)

    def close(self) -> None:
        """End the container and everything in it, and give the space back."""
        if self.popen.poll() is None and (leader := self._leader()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(leader), signal.SIGKILL)  # the first of its process namespace: the others go with it
        try:
            self.popen.wait(PATIENCE)
        finally:
            self.popen.kill()
            self._log.close()
            for group in self._groups:
                for path, _, _ in os.walk(group, topdown=False):
                    with contextlib.suppress(OSError):
                        Path(path).rmdir()
            subprocess.run(["umount", self.root], check=True)


@contextlib.contextmanager
def booted(directory: Path) -> Iterator[Machine]:
    """A machine for as long as it is needed."""
    machine = Machine(directory)
    try:
        yield machine
    finally:
        machine.close()
