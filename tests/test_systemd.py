"""The units by the tools of systemd, and what they rely on: capabilities, OOM scores and control groups, all real."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from canaryd.config.load import load
from canaryd.model import Device, Outcome
from canaryd.probe import LEVELS, ProbeSpec
from canaryd.supervisor import cgroup
from canaryd.supervisor.process import _place
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.__main__ import OOM_SCORE
from tests.command import MARK, ROOT, canaryd, configure, environment, eventually, marked, open_to_all
from tests.programs import needed

UNITS = ROOT / "systemd"
SERVICE, CHECK = UNITS / "canaryd.service", UNITS / "canaryd-check@.service"
EXPOSURE = 20
"""Tenths that `systemd-analyze security` may give: 2.0 is its "OK"."""
CAP_SYSLOG = 1 << 34
NOBODY = pwd.getpwnam("nobody")


def tool(name: str) -> str:
    return needed(name, untested="what is shipped was not tried by it")


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, timeout=120)


def settings(unit: Path) -> list[str]:
    """Return the assignments of a unit, in order."""
    return [line for line in unit.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)]


# --- The units by systemd's own tools --------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path) -> Path:
    """A root with what the units call, and systemd's own targets."""
    analyze = tool("systemd-analyze")
    targets = run(analyze, "--no-pager", "unit-paths").stdout.split()
    into = tmp_path / "root/usr/lib/systemd/system"
    into.mkdir(parents=True)
    for path in {found.name: found for place in targets for found in sorted(Path(place).glob("*.target"))}.values():
        shutil.copy(path, into, follow_symlinks=False)
    if not (into / "sysinit.target").exists():
        pytest.skip("systemd's own units are not installed here")
    for program in ("opt/canaryd/bin/canaryd", "bin/sh"):
        path = tmp_path / "root" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    (tmp_path / "root/etc/systemd/system").mkdir(parents=True)
    return tmp_path / "root"


def verify(root: Path, *units: Path) -> str:
    """Return all that `systemd-analyze verify` says; its status alone forgives unknown keys and bad values."""
    names = []
    for unit in units:
        shutil.copy(unit, root / "etc/systemd/system")
        names.append(f"/etc/systemd/system/{unit.name}")
    done = run(tool("systemd-analyze"), "verify", f"--root={root}", *names)
    return done.stdout + done.stderr


def test_verify_prints_nothing_at_all(root):
    """No unknown key, no bad value, nothing that cannot be found."""
    assert verify(root, SERVICE, CHECK) == ""


def test_verify_would_say_something(root, tmp_path):
    """The test above can fail: a misspelt key is said."""
    bad = tmp_path / "bad.service"
    bad.write_text(SERVICE.read_text().replace("MemorySwapMax=", "MemorySwap="))
    assert "MemorySwap" in verify(root, bad)


def test_the_documented_lines_open_the_service_to_the_network(root):
    """docs/security.md: the second is taken by the shipped configuration, the third by systemd, beside the unit."""
    text = (ROOT / "docs/security.md").read_text()
    _, listens, admits = re.findall("^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0].splitlines()
    made, _, restart = admits.partition(" && systemctl daemon-reload")
    assert restart == " && systemctl restart canaryd"
    config = root / "etc/canaryd/canaryd.yaml"
    config.parent.mkdir()
    config.write_text(canaryd("config", "example").out)
    for line in (listens, made):
        assert run("/bin/sh", "-c", line.replace("/etc/", f"{root}/etc/")).returncode == 0
    loaded = load(config)
    assert loaded.listen == ("", 19469)
    assert loaded.tls.client_ca_file == root / "etc/canaryd/clients.crt"
    assert verify(root, SERVICE) == ""
    (dropped,) = (root / "etc/systemd/system/canaryd.service.d").iterdir()
    assert settings(dropped) == ["IPAddressAllow=10.0.0.0/8"]


@pytest.mark.parametrize("unit", [SERVICE, CHECK], ids=lambda path: path.name)
def test_the_exposure_is_low(unit):
    """2.0 or lower, by `systemd-analyze security`."""
    done = run(tool("systemd-analyze"), "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", unit)
    assert done.returncode == 0, done.stdout[-400:]
    assert "Overall exposure level" in done.stdout


ALLOWED = """
import ctypes, os, struct, sys
# Linux, seccomp_filter.rst: the number of the call and its first argument are compared; all else gets EAFNOSUPPORT.
load = lambda at: struct.pack("HBBI", 0x20, 0, 0, at)
skip = lambda value, yes, no: struct.pack("HBBI", 0x15, yes, no, value)
end = lambda how: struct.pack("HBBI", 0x06, 0, 0, how)
number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
families = [int(word) for word in sys.argv[1].split(",")]
steps = [load(0), skip(number, 1, 0), end(0x7FFF0000), load(16)]
steps += [skip(family, len(families) - at, 0) for at, family in enumerate(families)]
code = ctypes.create_string_buffer(b"".join([*steps, end(0x00050000 | 97), end(0x7FFF0000)]))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
program = Program(len(steps) + 2, ctypes.cast(code, ctypes.c_void_p))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Start a command that may make sockets of some families only, as RestrictAddressFamilies= does."""


@pytest.mark.torch
@pytest.mark.parametrize("unit", [SERVICE, CHECK], ids=lambda path: path.name)
def test_the_units_let_processes_meet_over_loopback(unit):
    """Gloo and NCCL list the interfaces through netlink; without it every gate at level standard was UNKNOWN."""
    pytest.importorskip("torch", reason="torch is not installed in this interpreter")
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("the number of socket(2) on this machine is not in this test")
    (line,) = [line for line in settings(unit) if line.startswith("RestrictAddressFamilies=")]
    families = ",".join(str(int(getattr(socket, name))) for name in line.partition("=")[2].split())
    meet = "import torch.distributed as d; d.ProcessGroupGloo.create_device(interface='lo')"
    done = run(sys.executable, "-c", ALLOWED, families, sys.executable, "-c", meet)
    assert done.returncode == 0, done.stderr[-400:]
    refused = run(sys.executable, "-c", ALLOWED, "1,2", sys.executable, "-c", "import socket; socket.if_nameindex()")
    assert "not supported" in refused.stderr


def test_every_line_says_why():
    """A comment stands before each assignment."""
    lines = SERVICE.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        assert not re.match(r"[A-Z]\w+=", line) or before.startswith("# "), line


def test_the_gates_lines_are_the_daemons():
    """A line without a comment of its own stands in the daemon's unit as well, where it has one."""
    lines = CHECK.read_text().splitlines()
    known = set(settings(SERVICE))
    for before, line in itertools.pairwise(lines):
        assert not re.match(r"[A-Z]\w+=", line) or before.startswith("# ") or line in known, line


def test_the_gate_is_as_hardened_as_the_daemon():
    """Nothing that confines the daemon is forgotten; what is left out is about a daemon, its groups or its priority."""
    left_out = {line.partition("=")[0] for line in set(settings(SERVICE)) - set(settings(CHECK))}
    assert left_out == {
        *("Description", "StartLimitIntervalSec", "StartLimitBurst", "Type", "NotifyAccess", "ExecStart", "ExecReload"),
        *("ExecStopPost", "TimeoutStartSec", "WatchdogSec", "Restart", "RestartPreventExitStatus", "RestartSec"),
        *("RuntimeDirectory", "RuntimeDirectoryMode", "CPUWeight", "IOWeight", "Nice", "OOMScoreAdjust", "Delegate"),
        *("ReadWritePaths", "WantedBy", "Environment"),
    }


def test_what_a_gate_is_asked_for_is_what_check_understands():
    """The unit's own options at every level, and those of the guide's file: a mistake would keep a server down."""
    (own,) = re.findall(r'^Environment="CHECK=(.*)"$', CHECK.read_text(), re.MULTILINE)
    (guide,) = re.findall(r"^CHECK=(.*)$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    for options in (*(own.replace("%i", level) for level in LEVELS), guide):
        assert canaryd("check", *options.split(), "--help").code == 0, options
    assert canaryd("check", *own.replace("%i", "vllm").split(), "--help").code == 64


def test_users_and_directories(tmp_path):
    """The tools of systemd make the user, its groups and the directories, twice without a word."""
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    if os.geteuid() != 0:
        pytest.skip("only root can give directories to other users")
    (tmp_path / "etc").mkdir()
    assert run(sysusers, f"--root={tmp_path}", UNITS / "canaryd.sysusers").returncode == 0
    passwd = dict(line.split(":", 1) for line in (tmp_path / "etc/passwd").read_text().splitlines())
    assert passwd["canaryd"].endswith(":/var/lib/canaryd:/usr/sbin/nologin")
    uid, groups = int(passwd["canaryd"].split(":")[1]), (tmp_path / "etc/group").read_text()
    assert {"canaryd", "render"} <= {line.partition(":")[0] for line in groups.splitlines()}
    for _ in range(2):
        made = run(tmpfiles, f"--root={tmp_path}", "--create", UNITS / "canaryd.tmpfiles")
        again = run(sysusers, f"--root={tmp_path}", UNITS / "canaryd.sysusers")
        assert (made.returncode, made.stderr, again.returncode, again.stderr) == (0, "", 0, "")
    found = {
        str(path.relative_to(tmp_path)): (path.stat().st_uid, oct(path.stat().st_mode & 0o7777))
        for path in tmp_path.rglob("*canaryd*/**/")
        if path.is_dir()
    }
    assert {name.rstrip("/"): value for name, value in found.items()} == {
        "var/lib/canaryd": (uid, "0o750"),
        "var/lib/canaryd/locks": (uid, "0o750"),
        "var/lib/canaryd/memory": (uid, "0o700"),
        "var/cache/canaryd": (uid, "0o750"),
        "etc/canaryd": (0, "0o755"),
        "etc/canaryd/probes.d": (0, "0o755"),
    }


def test_what_root_left_becomes_the_services(tmp_path):
    """A check by root before the installation made the history; links in it are given away, not what they lead to."""
    sysusers, tmpfiles = tool("systemd-sysusers"), tool("systemd-tmpfiles")
    if os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    state, outside = tmp_path / "var/lib/canaryd", tmp_path / "outside"
    for directory in (tmp_path / "etc", state / "locks", outside):
        directory.mkdir(parents=True)
    for path in (state / "canaryd.db", state / "locks/daemon.lock", outside / "file"):
        path.write_text("root's")
    (state / "link").symlink_to("../../../outside/file")
    (state / "directory").symlink_to("../../../outside")
    assert run(sysusers, f"--root={tmp_path}", UNITS / "canaryd.sysusers").returncode == 0
    made = run(tmpfiles, f"--root={tmp_path}", "--create", UNITS / "canaryd.tmpfiles")
    assert (made.returncode, made.stderr) == (0, "")
    owners = {path.lstat().st_uid for path in (state, *state.rglob("*"))}
    assert owners == {state.stat().st_uid}
    assert owners != {0}
    assert {path.stat().st_uid for path in (outside, outside / "file")} == {0}
    assert (state / "canaryd.db").stat().st_mode & 0o777 == 0o644


# --- Out of memory: workers go first ---------------------------------------------------------------------------------


def score(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


SAYS_ITS_SCORE = """
import sys
from pathlib import Path
from canaryd.probe import ProbeSpec, Reading
SPEC = ProbeSpec(name="scored", summary="says its OOM score", version=1)
AT_IMPORT, TORCH = int(Path("/proc/self/oom_score_adj").read_text()), "torch" in sys.modules
def run(ctx):
    yield Reading(name="score", value=AT_IMPORT, unit="1")
    yield Reading(name="torch", value=int(TORCH), unit="1")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an OOM score")
def test_a_worker_gives_up_the_daemons_protection_before_torch(tmp_path):
    """When a probe's file is loaded, the score is set, and torch is not there yet."""
    path = tmp_path / "scored.py"
    path.write_text(SAYS_ITS_SCORE)
    spec = ProbeSpec(name="scored", summary="says its OOM score", version=1)
    device = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
    before = score()
    with Series(WorkerSpec()) as series:
        request = RunRequest(probe_path=path, spec=spec, device=device, level="quick", seed=1)
        done = series.run(request, 60.0)
    assert done.outcome is Outcome.COMPLETED, done.detail
    said = {reading.name: reading.value for reading in done.readings}
    assert said == {"score": max(before, OOM_SCORE), "torch": 0}
    assert score() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an OOM score")
def test_a_worker_that_goes_earlier_anyway_stays_there():
    """A container that was given a higher score keeps it."""
    code = """
        from pathlib import Path
        from canaryd.worker.__main__ import go_first
        mine = Path("/proc/self/oom_score_adj")
        mine.write_text("900")
        go_first()
        print(mine.read_text())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 900


# --- Capabilities: one process reads the kernel log ------------------------------------------------------------------


def as_a_service() -> tuple[list[str], dict[str, str]]:
    """Return (what starts Python as systemd would: nobody's, with CAP_SYSLOG as an ambient capability, environment).

    The interpreter of the tests, or the system's of the same version with the tests' packages, if that one is in a
    home that nobody may enter.
    """
    setpriv = tool("setpriv")
    if os.geteuid() != 0:
        pytest.skip("only root can start a process as another user")
    ids = [f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups", "--no-new-privs"]
    caps = [f"--{name}=-all,+syslog" for name in ("inh-caps", "ambient-caps", "bounding-set")]
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    again = (
        "import subprocess, sys, yaml, apscheduler; sys.exit(subprocess.call([sys.executable, '-c', 'import canaryd']))"
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python, extra in (
        (sys.executable, {}),
        (shutil.which(version, path="/usr/bin") or "", {"PYTHONPATH": packages}),
    ):
        argv = [setpriv, *ids, *caps, python]
        trial = subprocess.run(
            [*argv, "-c", again], cwd=ROOT, env=environment(**extra), capture_output=True, text=True, check=False
        )
        if trial.returncode == 0:
            return argv, environment(**extra)
    pytest.skip(f"nobody cannot start an interpreter here with CAP_SYSLOG: {trial.stderr.strip()[-200:]}")


def held(pid: int | str) -> dict[str, int]:
    """Return a process's capability sets as bits."""
    found = re.findall(r"^Cap(\w+):\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return {name: int(value, 16) for name, value in found}


LENDS = """
import json, subprocess, sys, threading
from canaryd.supervisor import capabilities as privileges

def child():
    code = "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('CapAmb', 'CapEff'))])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

def elsewhere():
    thread = threading.Thread(target=lambda: said.append(child()))
    thread.start()
    thread.join()

said = [child()]
waiting, over = threading.Event(), threading.Event()
privileges.withdraw()
said.append(child())
def other():
    waiting.wait()
    said.append(child())
    over.set()
thread = threading.Thread(target=other)
thread.start()
with privileges.reading_kernel_log():
    said.append(child())
    waiting.set()
    over.wait()
thread.join()
said.append(child())
print(json.dumps(said))
"""


def test_the_capability_is_lent_to_one_thread_and_taken_back():
    """Kept by children before; by none after; by those of the lending thread meanwhile, not by those of another."""
    argv, environ = as_a_service()
    done = subprocess.run([*argv, "-c", LENDS], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yes, no = (f"['{bits:016x}', '{bits:016x}']" for bits in (CAP_SYSLOG, 0))
    assert json.loads(done.stdout) == [yes, no, yes, no, no]


def test_without_a_capability_nothing_is_changed():
    """As root or as anybody: no ambient set, nothing to lend, no error."""
    code = "from canaryd.supervisor import capabilities as p\np.withdraw()\n"
    code += "with p.reading_kernel_log(): print(p._held('CapAmb'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_only_the_reader_of_the_kernel_log_keeps_the_capability():
    """A daemon with CAP_SYSLOG, real workers: the one that holds /dev/kmsg has it, and no other has any at all."""
    argv, environ = as_a_service()
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("there is no /dev/kmsg here")
    with open_to_all() as directory:
        each = {"records": {"period": "1s", "settings": {"log": str(directory / "log"), "seconds": 2.0}}}
        config = configure(
            directory, "records", each=each, telemetry={"kernel_log": "/dev/kmsg"}, worker={"python": argv[-1]}
        )
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY.pw_uid, NOBODY.pw_gid)
        argv += ["-m", "canaryd", "run", "--config", str(config)]
        argv += ["--state-dir", str(directory / "state"), "--listen", "127.0.0.1:0"]
        mark = f"caps-{os.getpid()}"
        with (
            (directory / "stderr").open("wb") as stderr,
            subprocess.Popen(argv, cwd=ROOT, env={**environ, MARK: mark}, stderr=stderr) as process,
        ):
            try:
                readers, others = {}, {}

                def look() -> bool:
                    assert process.poll() is None, (directory / "stderr").read_text()
                    for pid in marked(mark):
                        with contextlib.suppress(OSError):
                            opened = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                            worker = b"worker/__main__" in Path(f"/proc/{pid}/cmdline").read_bytes()
                            if worker:
                                (readers if "/dev/kmsg" in opened else others)[pid] = (held(pid), score(pid))
                    return bool(readers) and len(others) >= 3

                eventually(look)
                others = {pid: found for pid, found in others.items() if pid not in readers}
                assert len(readers) == 1
                ((caps, adjusted),) = readers.values()
                assert (caps["Eff"], caps["Prm"], caps["Amb"]) == (CAP_SYSLOG,) * 3
                assert adjusted >= OOM_SCORE
                assert {tuple(caps[name] for name in ("Eff", "Prm", "Amb")) for caps, _ in others.values()} == {
                    (0, 0, 0)
                }
                assert held(process.pid)["Amb"] == 0
                assert {
                    held(f"{process.pid}/task/{task.name}")["Amb"]
                    for task in Path(f"/proc/{process.pid}/task").iterdir()
                } == {0}
            finally:
                process.kill()
                for pid in marked(mark):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


# --- Control groups --------------------------------------------------------------------------------------------------


def belongs_to(path: str) -> str:
    return f"12:cpu:/\n0::{path}\n"


@pytest.mark.parametrize(
    ("membership", "reason"),
    [
        (None, "no cgroup version 2"),
        ("1:name=systemd:/\n", "no cgroup version 2"),
        (belongs_to("/elsewhere"), "is not a cgroup"),
        (belongs_to("/a"), "not delegated"),
    ],
)
def test_a_group_that_is_not_ours_is_left_alone(tmp_path, membership, reason):
    """Version 1, another machine's path, a group that was not delegated: a reason, and nothing is made."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/cgroup.procs").touch()
    mine = tmp_path / "membership"
    if membership is not None:
        mine.write_text(membership)
    with pytest.raises(cgroup.Undivided, match=reason):
        cgroup.divide(tmp_path, mine)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["cgroup.procs"]


@pytest.mark.parametrize(
    ("memory", "pids", "wanted"),
    [
        ("4294967296", "4096", (str((4 << 30) - (256 << 20)), "3840")),
        ("max", "max", ("max", "max")),
        ("268435456", "100", ("max", "max")),
    ],
)
def test_workers_get_the_services_limits_less_the_daemons_part(tmp_path, memory, pids, wanted):
    """What the kernel shows in files is read from files; a limit that is too small to be split acts alone."""
    own, workers = tmp_path, tmp_path / "workers"
    workers.mkdir()
    for name, text in (("memory.max", memory), ("pids.max", pids)):
        (own / name).write_text(f"{text}\n")
        (workers / name).write_text("max\n")
    cgroup._limit(own)
    assert ((workers / "memory.max").read_text().strip(), (workers / "pids.max").read_text().strip()) == wanted
    assert not (workers / "cpu.weight").exists()  # a controller that is not there is not missed


DIVIDES = """
import os, sys
from pathlib import Path
from canaryd.supervisor import cgroup, process
from canaryd.supervisor.protocol import WorkerSpec
from canaryd.supervisor.series import Series
root = Path(sys.argv[1])
sys.stdin.readline()
group = cgroup.divide(root)
process.place_workers(group)
with Series(WorkerSpec()) as series:
    series.describe([])
    for pid in ("self", series._slot._worker._process.pid):
        print(next(l for l in open(f"/proc/{pid}/cgroup") if l.startswith("0::")).strip())
"""


@pytest.fixture
def delegated():
    """A real control group with systemd's mark of delegation: (where groups are mounted, the group)."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    (mount,) = [Path(words[1]) for words in mounts if words[2] == "cgroup2"][:1] or [None]
    if mount is None or os.geteuid() != 0:
        pytest.skip("there is no control group of version 2 that this user can write")
    group = mount / f"canaryd-test-{os.getpid()}"
    try:
        group.mkdir()
        os.setxattr(group, "user.delegate", b"1")
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    yield mount, group
    for path in (group / cgroup.DAEMON, group / cgroup.WORKERS, group):
        if path.exists():
            eventually(lambda path=path: not (path / "cgroup.procs").read_text())
            path.rmdir()


def test_daemon_and_workers_part_in_a_real_group(delegated):
    """The daemon goes into one leaf, each worker into the other, and limits follow where the controllers are."""
    mount, group = delegated
    argv = [sys.executable, "-c", DIVIDES, str(mount)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        said, _ = process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    assert said.split() == [f"0::/{group.name}/{leaf}" for leaf in (cgroup.DAEMON, cgroup.WORKERS)]
    given = (group / "cgroup.controllers").read_text().split()
    assert set((group / "cgroup.subtree_control").read_text().split()) == {*given} & {*cgroup.CONTROLLERS}


def test_a_group_that_is_gone_costs_its_limits_and_no_worker(tmp_path, monkeypatch, caplog):
    """Workers start all the same, and the log says so once."""
    monkeypatch.setattr(_place, "group", tmp_path / "gone")
    for _ in range(2):
        with Series(WorkerSpec()) as series:
            assert not series.describe([]).lost
    assert len([record for record in caplog.records if "share the daemon" in record.message]) == 1


def test_a_daemon_says_where_its_workers_are(tmp_path):
    """Without a delegated group: one line, and it works as ever."""
    from tests.command import Daemon, running

    with running(Daemon(configure(tmp_path, "records"), tmp_path / "state")) as daemon:
        daemon.line("serves http://")
        time.sleep(1.0)
        assert sum("workers share the limits" in line for line in daemon.lines) == 1


@pytest.mark.parametrize(
    ("enabled", "lines", "files", "wanted"),
    [
        ("1", "0::/user.slice/session-1.scope", (), True),
        ("0", "0::/user.slice/session-1.scope", (), False),
        ("1", "0::/user.slice/session-1.scope", ("user.slice",), False),
        ("1", "0::/system.slice/canaryd.service", ("system.slice", "system.slice/canaryd.service"), False),
        ("1", "0::/", ("",), False),
        ("1", "2:cpu,cpuacct:/\n0::/", (), True),
        ("1", "2:cpu,cpuacct:/docker/1\n0::/", (), False),
        ("1", "nonsense", (), False),
    ],
    ids=["session", "off", "slice", "service", "container", "version 1", "container of version 1", "unreadable"],
)
def test_who_has_a_group_of_the_scheduler(tmp_path, enabled, lines, files, wanted):
    """A session has one where the kernel makes them and no control group divides the processor."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    for name, text in (("sys/kernel/sched_autogroup_enabled", enabled), ("self/cgroup", lines)):
        (proc / name).parent.mkdir(parents=True)
        (proc / name).write_text(text + "\n")
    for name in files:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cpu.weight").write_text("100\n")
    assert cgroup.apart(None, root, proc) is wanted
    assert cgroup.apart(None, root, tmp_path / "nothing") is False


def test_workers_in_a_control_group_are_apart_where_it_divides_the_processor(tmp_path):
    """A service without the controller has no group there but those of sessions, where they are made."""
    assert cgroup.apart(tmp_path, tmp_path, tmp_path / "nothing") is False
    (tmp_path / "cpu.weight").write_text("50\n")
    assert cgroup.apart(tmp_path, tmp_path, tmp_path / "nothing") is True
