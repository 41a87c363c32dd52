"""deploy/ansible: its linter takes it, and it rolls the Debian package out on a machine with a real systemd."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.boot.machine import Machine, booted, why_not
from tests.command import BUILTIN, PROBES, ROOT
from tests.programs import needed

HERE = ROOT / "deploy/ansible"
LIGHT = {
    "probes": {name: {"enabled": False} for name in BUILTIN if not name.endswith("_telemetry")}
    | {"passes": {"period": "5s"}}
}
"""A configuration that needs no torch."""
MODULES = ("python3-apt", "python-apt-common", "distro-info-data")
"""What Ansible's apt module wants on a node, and would fetch by itself where there is a network."""


def found(program: str) -> str:
    return needed(program, untested="the role was not checked by it (PyPI: ansible-core, ansible-lint)")


def environment(program: str) -> dict[str, str]:
    """Return an environment in which the programs beside it are found, and no configuration of this machine's."""
    path = f"{Path(program).parent}:{os.environ['PATH']}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
    return kept | {"PATH": path, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "0", "LC_ALL": "C.UTF-8"}


@pytest.mark.slow
def test_ansible_lint_takes_it():
    """By the profile for production, and a warning is an error."""
    linter = found("ansible-lint")
    argv = [linter, "--offline", "--strict", "--profile", "production", "."]
    done = subprocess.run(argv, cwd=HERE, env=environment(linter), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["site.yml", "silence.yml"])
def test_the_playbooks_parse(name):
    """With the example's inventory."""
    playbook = found("ansible-playbook")
    argv = [playbook, "--syntax-check", "-i", "inventory.yml", name, "-e", "canaryd_deb=x"]
    done = subprocess.run(argv, cwd=HERE, env=environment(playbook), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("said", "ran"),
    [
        ("", set()),
        ("false", {"Take the switch away"}),
        ("true", {"Put the switch that silences enforcement in its place"}),
    ],
)
def test_a_roll_out_that_does_not_speak_of_the_switch_leaves_it_alone(said, ran):
    """Somebody else may have silenced the fleet; only the word itself puts the switch or takes it away."""
    playbook = found("ansible-playbook")
    content = [
        {
            "hosts": "localhost",
            "gather_facts": False,
            "tasks": [
                {"ansible.builtin.import_role": {"name": str(HERE / "roles/canaryd"), "tasks_from": "silence.yml"}}
            ],
        }
    ]
    argv = [
        playbook,
        "--check",
        "-c",
        "local",
        "-i",
        "localhost,",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    ]
    argv += ["-e", f"canaryd_silenced={said}"] if said else []
    done = subprocess.run(
        [*argv, "/dev/stdin"],
        input=json.dumps(content),
        env=environment(playbook),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tasks = dict(re.findall(r"^TASK \[(?:\S+ : )?(.*)\] \*+\n(\w+):", done.stdout, re.MULTILINE))
    assert {name for name, what in tasks.items() if "switch" in name and what != "skipping"} == ran


GATE = {"pass": 0, "fail": 2, "unknown": 3}
"""Decision of `canaryd gate` → its exit status when enforced."""
BEGAN = 1000


def verified(directory: Path, before: str, after: str, *, upgraded: bool, daemon: bool = True, **device: Any) -> str:
    """Run the tasks that end the role on a node; return what Ansible said, "" where the roll-out goes on.

    `before` and `after` are the gate's decisions, `device` is what `canaryd status` says of its device.
    """
    playbook = found("ansible-playbook")
    program = directory / "canaryd"
    tested = {"exact_matmul": BEGAN + 1, "nvidia_telemetry": BEGAN + 2}
    known = {"name": "cuda:0", "present": True, "state": "healthy", "decided": BEGAN + 1, "evidence": tested}
    others = [{**known, "name": name, "findings": []} for name in device.pop("more", ())]
    status = {"daemon_running": daemon, "devices": [{**known, "findings": [], **device}, *others]}
    said = {"status": (status, 0), "gate": ({"decision": after, "devices": []}, GATE[after])}
    cases = "".join(f"{name}) echo '{json.dumps(what)}'; exit {code} ;; " for name, (what, code) in said.items())
    program.write_text(f"#!/bin/sh\ncase $1 in {cases} esac\n")
    program.chmod(0o755)
    tasks = (HERE / "roles/canaryd/tasks/verify.yml").read_text().replace("delay: 10", "delay: 0")
    (directory / "verify.yml").write_text(tasks.replace("/opt/canaryd/bin/canaryd", str(program)))
    known = {"rc": GATE[before], "stdout": json.dumps({"decision": before})} if before else {"rc": 127, "stdout": ""}
    given = {
        "canaryd_patience": 10,
        "canaryd_began": {"stdout": str(BEGAN)},
        "canaryd_package": {"changed": upgraded},
        "canaryd_configured": {"changed": False},
        "canaryd_before": known,
    }
    play = {"hosts": "localhost", "gather_facts": False, "vars": given, "tasks": [{"import_tasks": "verify.yml"}]}
    (directory / "play.yml").write_text(json.dumps([play]))
    argv = [playbook, "-c", "local", "-i", "localhost,", "-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(
        [*argv, directory / "play.yml"], env=environment(playbook), capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize(
    ("before", "after", "stops"),
    [
        ("pass", "pass", False),
        ("pass", "unknown", True),
        ("pass", "fail", True),
        ("unknown", "unknown", False),
        ("fail", "fail", False),
        ("", "unknown", False),
    ],
)
def test_what_the_new_release_says_decides_whether_the_next_node_follows(tmp_path, before, after, stops):
    """A release that cannot judge what the one before could stops at its first node, as one that finds faults."""
    said = verified(tmp_path, before, after, upgraded=False)
    assert bool(said) is stops, said


OLD = {"exact_matmul": BEGAN - 60, "recorded_kernels": None, "nvidia_telemetry": BEGAN + 2}
"""What a device's newest tests are before the new release has tested it: telemetry is polled at once."""


@pytest.mark.parametrize(
    ("said", "stops"),
    [
        ({}, False),
        ({"daemon": False}, True),
        ({"decided": BEGAN - 1}, True),
        # judged anew, on tests of the release before
        ({"evidence": OLD}, True),
        ({"evidence": OLD, "state": "degraded"}, True),
        ({"evidence": OLD, "present": False}, True),
        # tests that wait for the server; what the gate speaks about; devices that are not tested themselves
        ({"evidence": OLD, "findings": [{"rule": "budget-withheld"}]}, False),
        ({"evidence": OLD, "state": "faulty"}, False),
        ({"evidence": {"nvidia_telemetry": BEGAN + 2}, "state": "unknown"}, False),
        ({"evidence": {"nvidia_telemetry": BEGAN + 2}}, False),
        # a GPU that was tested whole before it was divided
        ({"evidence": OLD, "more": ["cuda:0.0"]}, False),
        ({"evidence": OLD, "more": ["cuda:00"]}, True),
    ],
)
def test_a_release_that_judges_nothing_stops_the_roll_out(tmp_path, said, stops):
    """No daemon, no new verdict, or one that rests on the release before: the wait ends as a failure."""
    told = verified(tmp_path, "pass", "pass", upgraded=True, **said)
    assert bool(told) is stops, told


@pytest.mark.parametrize("said", ["", "perhaps"])
def test_the_playbook_of_the_switch_wants_a_word(said):
    """Neither silence nor its end is anybody's default."""
    playbook = found("ansible-playbook")
    argv = [playbook, "--check", "-c", "local", "-i", "node,", "silence.yml", "-e", "ansible_become=false"]
    argv += ["-e", f"{{hosts: inference, ansible_python_interpreter: {sys.executable}}}"]
    argv += ["-e", f"canaryd_silenced={said}"] if said else []
    inventory = json.dumps({"inference": {"hosts": {"node": None}}})
    argv[argv.index("node,")] = "/dev/stdin"
    done = subprocess.run(
        argv, cwd=HERE, input=inventory, env=environment(playbook), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "canaryd_silenced" in done.stdout


# --- On a machine with systemd ----------------------------------------------------------------------------------------


class Controller:
    """Ansible on this machine, which reaches a booted one by a stand-in for ssh."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine = machine
        self.directory = directory
        ssh = directory / "ssh"
        enter = f"nsenter -t {machine.leader} -m -u -i -n -p -C -r -w"
        variables = "env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ssh.write_text(f'#!/bin/bash\nexec {enter} {variables} /bin/sh -c "${{@: -1}}"\n')
        ssh.chmod(0o755)
        self.variables = {
            "ansible_ssh_executable": str(ssh),
            "ansible_ssh_transfer_method": "piped",
            "ansible_become": False,  # it arrives as root, and a bare Debian has no sudo
            "ansible_python_interpreter": "/usr/bin/python3",
            "canaryd_config": LIGHT,
            "canaryd_deb": str(package(directory)),
            "canaryd_patience": 120,
        }

    def play(self, name: str, **variables: object) -> tuple[int, str]:
        """Run a playbook; return its status and what it said."""
        playbook = found("ansible-playbook")
        inventory = {"inference": {"hosts": {"node": None}, "vars": self.variables | variables}}
        (self.directory / "inventory.json").write_text(json.dumps(inventory))
        argv = [playbook, "-i", self.directory / "inventory.json", HERE / name]
        done = subprocess.run(
            argv, cwd=HERE, env=environment(playbook), capture_output=True, text=True, timeout=600, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def changed(self, said: str) -> int:
        """Return how many tasks changed something."""
        match = re.search(r"^node .*changed=(\d+)", said, re.MULTILINE)
        assert match, said
        return int(match[1])


def package(directory: Path) -> Path:
    """Build the Debian package of this clone."""
    clone = directory / "clone"
    kept = shutil.ignore_patterns("__pycache__", ".*", "tests", "benchmarks", "dist", "docs")
    shutil.copytree(ROOT, clone, ignore=kept)
    stamp = {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run([clone / "scripts/deb"], env=os.environ | stamp, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (clone / "dist").glob("*.deb")
    return built


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    """A machine without canaryd, and Ansible that reaches it."""
    if reason := why_not():
        pytest.skip(f"the role was not run: {reason}")
    found("ansible-playbook")
    directory = tmp_path_factory.mktemp("ansible")
    done = subprocess.run(["apt-get", "download", *MODULES], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the role was not run: {', '.join(MODULES)} cannot be fetched: {done.stderr.splitlines()[-1]}")
    with booted(directory) as machine:
        for path in directory.glob("*.deb"):
            shutil.copy(path, machine.root / "srv")
        machine.shell("mkdir -p /var/cache/apt/archives/partial; dpkg -i /srv/*.deb")
        machine.put("/etc/canaryd/probes.d/passes.py", (PROBES / "passes.py").read_text())
        yield Controller(machine, directory)


@pytest.mark.slow
def test_it_installs_a_canaryd_that_works(controller):
    """From a bare Debian to a judged node; nothing changes when it is run again."""
    code, said = controller.play("site.yml")
    assert code == 0, said
    assert controller.machine.show("ActiveState") == "active"
    assert "enforcement: log" in controller.machine.out("cat", "/etc/canaryd/canaryd.yaml")
    assert controller.machine.run("canaryd", "status", check=False).returncode in (0, 1)
    code, said = controller.play("site.yml")
    assert (code, controller.changed(said)) == (0, 0), said


@pytest.mark.slow
def test_a_bad_configuration_stops_the_roll_out_and_is_not_put_in_place(controller):
    """Canaryd's own check says what is wrong; the service runs on with what it had."""
    controller.play("site.yml")
    before = controller.machine.out("cat", "/etc/canaryd/canaryd.yaml")
    code, said = controller.play("site.yml", canaryd_config=LIGHT | {"shedule": {"level": "quick"}})
    assert code != 0
    assert "shedule" in said
    assert controller.machine.out("cat", "/etc/canaryd/canaryd.yaml") == before
    assert controller.machine.show("ActiveState") == "active"


@pytest.mark.slow
def test_one_command_silences(controller):
    """And one ends it; nothing else is touched, and where it acts the gate says so."""
    controller.play("site.yml", canaryd_enforcement="act")
    gate = controller.machine.run("canaryd", "gate", "--json", check=False)
    assert json.loads(gate.stdout)["acts"] is True
    pid = controller.machine.show("MainPID")
    for silenced in (True, False, True):
        code, said = controller.play("silence.yml", canaryd_silenced=silenced)
        assert (code, controller.changed(said)) == (0, 1), said
        gate = controller.machine.run("canaryd", "gate", "--json", check=False)
        assert json.loads(gate.stdout)["acts"] is not silenced
    assert controller.machine.show("MainPID") == pid
    code, said = controller.play("site.yml", canaryd_enforcement="act")  # a roll-out in the middle of an incident
    assert (code, controller.changed(said)) == (0, 0), said
    gate = controller.machine.run("canaryd", "gate", "--json", check=False)
    assert json.loads(gate.stdout)["acts"] is False


@pytest.mark.slow
def test_passwords_of_an_older_role_are_not_dropped_in_silence(controller):
    """The play ends before anything changes, and says what to write instead."""
    code, said = controller.play("site.yml", canaryd_web_config={"basic_auth_users": {"prometheus": "x"}})
    assert code != 0
    assert "name certificates under tls in canaryd_config" in said
    assert controller.machine.show("ActiveState") == "active"
