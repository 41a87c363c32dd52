"""deploy/kubernetes: it builds, Kubernetes' own schemas take it, and enforcement is off until it is asked for."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from canaryd.config import load
from canaryd.model import Cause, Device, Finding, State, Verdict
from canaryd.store.store import Store
from tests.command import ROOT, eventually
from tests.programs import accepted, needed

HERE = ROOT / "deploy/kubernetes"
SCHEMAS = ROOT / "tests/deploy/kubernetes"
COMPONENTS = sorted(path.name for path in (HERE / "components").iterdir())
NPD = HERE / "components/node-problem-detector"
CONDITION = NPD / "canaryd-condition"
VERSIONS = ("1.28", "1.31", "1.34", "1.37")
"""Three years of releases; what the first takes and the last takes, those between take."""
LINT = """\
extends: default
rules:
  line-length: {max: 120}
  document-start: disable
  comments: {min-spaces-from-content: 1}
ignore: [prometheusrule.yaml]
"""


def found(program: str) -> str:
    return needed(program, untested="what is shipped was not checked by it")


def build(directory: Path) -> list[dict[str, Any]]:
    """Return what Kustomize makes of a directory."""
    kustomize = shutil.which("kustomize")
    command = [kustomize, "build"] if kustomize else [found("kubectl"), "kustomize"]
    return [d for d in yaml.safe_load_all(accepted(*command, directory)) if d]


def overlay(directory: Path, *components: str) -> Path:
    """Write an overlay of the base and some components."""
    here = os.path.relpath(HERE, directory)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{here}/base"],
        "components": [f"{here}/components/{name}" for name in components],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return directory


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (match,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return match


def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return one(documents, "DaemonSet", "canaryd")["spec"]["template"]["spec"]


def container(documents: list[dict[str, Any]], name: str = "canaryd") -> dict[str, Any]:
    (match,) = [c for c in pod(documents)["containers"] if c["name"] == name]
    return match


def documented_patches() -> list[dict[str, Any]]:
    """Return the patches for the way back to an older release, as way-back.yaml of the example says to name it."""
    text = (HERE / "example/way-back.yaml").read_text()
    (line,) = re.findall(r"^# patches: (.*)$", text, re.MULTILINE)
    (patch,) = yaml.safe_load(line)
    return [{"target": patch["target"], "patch": text}]


# --- Checked by their own tools ---------------------------------------------------------------------------------------

CHOICES = [(), *((name,) for name in COMPONENTS), *itertools.combinations(COMPONENTS, 2), tuple(COMPONENTS)]


@pytest.mark.parametrize("components", [(), tuple(COMPONENTS)], ids=["base", "everything"])
def test_kubernetes_takes_what_is_built(tmp_path, components):
    """Strictly: an unknown field is an error; custom resources by schemas written from their reference."""
    validate = found("kubernetes-validate")
    documents = build(overlay(tmp_path, *components))
    custom = {"PodMonitor", "PrometheusRule"}
    since_1_30 = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    builtin = tmp_path / "builtin.yaml"
    for version in VERSIONS:
        left_out = custom | (since_1_30 if version == "1.28" else set())
        builtin.write_text(yaml.safe_dump_all(d for d in documents if d["kind"] not in left_out))
        accepted(validate, "--strict", "-k", version, builtin)
    for document in documents:
        if document["kind"] in custom:
            schema = json.loads((SCHEMAS / f"{document['kind'].lower()}.schema.json").read_text())
            jsonschema.Draft202012Validator(schema).validate(document)


def test_the_documented_way_back_puts_the_copy_in_place_once(tmp_path):
    """In every pod, by the older image, after the directory was given to the user; on a node without a copy nothing."""
    (tmp_path / "k8s").mkdir()
    path = overlay(tmp_path / "k8s", *COMPONENTS) / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    content |= {"images": [{"name": "canaryd", "newTag": "older"}], "patches": documented_patches()}
    path.write_text(yaml.safe_dump(content))
    built = tmp_path / "built.yaml"
    built.write_text(yaml.safe_dump(one(documents := build(path.parent), "DaemonSet", "canaryd")))
    accepted(found("kubernetes-validate"), "--strict", "-k", VERSIONS[0], built)
    *_, state, back = pod(documents)["initContainers"]
    assert (state["name"], back["name"], back["image"]) == ("state", "way-back", "canaryd:older")
    place = tmp_path / "state"
    Store.open(place).close()
    with contextlib.closing(sqlite3.connect(place / "canaryd.db")) as db:
        db.execute("PRAGMA user_version = 5")
    Store.open(place).close()
    command = [word.replace("/var/lib/canaryd", str(place)) for word in back["command"]]
    for _ in range(2):
        accepted(*command)
        with contextlib.closing(sqlite3.connect(place / "canaryd.db")) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (5,)
    (newer,) = place.glob("newer-*")
    assert (newer / "canaryd.db").exists()


@pytest.mark.parametrize("moved", [(), ("canaryd.db",), ("canaryd.db", "canaryd.db-wal")])
def test_a_way_back_that_was_killed_goes_on(tmp_path, moved):
    """The newer database and its log stay together, the copy is put in place last, and evidence stays where it is."""
    (patch,) = documented_patches()
    command = yaml.safe_load(patch["patch"])[0]["value"]["command"]
    for name in ("canaryd.db", "canaryd.db-wal", "canaryd.db.version-5", "canaryd.db.corrupt-20260101T000000Z"):
        (tmp_path / name).write_text(name)
    (tmp_path / "newer.part").mkdir()
    for name in moved:
        (tmp_path / name).rename(tmp_path / "newer.part" / name)
    accepted(*(word.replace("/var/lib/canaryd", str(tmp_path)) for word in command))
    assert (tmp_path / "canaryd.db").read_text() == "canaryd.db.version-5"
    assert {p.name for p in tmp_path.glob("canaryd.db*")} == {"canaryd.db", "canaryd.db.corrupt-20260101T000000Z"}
    (newer,) = tmp_path.glob("newer*")
    assert {p.name for p in newer.iterdir()} == {"canaryd.db", "canaryd.db-wal"}


def test_the_example_is_taken_and_the_image_is_yours(tmp_path):
    """No container is left with a name that nobody can pull."""
    documents = build(HERE / "example")
    images = {c["image"] for kind in ("containers", "initContainers") for c in pod(documents)[kind]}
    assert images == {"registry.example.org/canaryd:0.1.0"}
    assert "expected: 8" in one(documents, "ConfigMap", "canaryd")["data"]["canaryd.yaml"]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(d for d in documents if "coreos" not in d["apiVersion"]))
    accepted(found("kubernetes-validate"), "--strict", "-k", VERSIONS[-1], tmp_path / "all.yaml")


@pytest.mark.parametrize("components", CHOICES, ids="+".join)
def test_every_choice_of_components_builds(tmp_path, components):
    """In any combination of two, and all; every volume that is mounted is there."""
    documents = build(overlay(tmp_path, *components))
    spec = pod(documents)
    volumes = {v["name"] for v in spec["volumes"]}
    for each in [*spec["containers"], *spec["initContainers"]]:
        assert {m["name"] for m in each.get("volumeMounts", ())} <= volumes
        assert each["resources"]["requests"]
        assert each["resources"]["limits"]["memory"]


def test_yamllint_takes_every_file():
    """Generated rules aside, which their own test compares."""
    accepted(found("yamllint"), "-d", LINT, HERE)


def test_shellcheck_takes_the_scripts(tmp_path):
    """The plugin, and the loop of the container."""
    loop = tmp_path / "loop"
    loop.write_text(f"#!/bin/sh\n{gate_loop()}")
    accepted(found("shellcheck"), CONDITION, loop)


def test_every_file_that_a_kustomization_names_is_there():
    """Checked without Kustomize, for machines that have none."""
    for path in HERE.rglob("kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        named = [*content.get("resources", ()), *content.get("components", ())]
        named += [patch["path"] for patch in content.get("patches", ())]
        named += [file for maker in content.get("configMapGenerator", ()) for file in maker["files"]]
        assert named
        assert [name for name in named if not (path.parent / name).exists()] == [], path


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_the_rules_are_those_of_prometheus():
    """One source: the file is what its generator makes, and it holds the very groups."""
    accepted(sys.executable, HERE / "rules.py", "--check")
    made = yaml.safe_load_all((HERE / "components/prometheus-operator/prometheusrule.yaml").read_text())
    groups = [g for d in made for g in d["spec"]["groups"]]
    source = sorted((ROOT / "deploy/prometheus").glob("*.rules.yml"))
    assert groups == [g for path in source for g in yaml.safe_load(path.read_text())["groups"]]


# --- What must not go wrong -------------------------------------------------------------------------------------------


def test_broken_hardware_does_not_restart_the_pod(tmp_path):
    """/healthz is 503 where a device is faulty: no liveness probe may ask it."""
    for name in ("livenessProbe", "startupProbe"):
        assert container(build(overlay(tmp_path)))[name].get("tcpSocket") == {"port": "metrics"}


def test_the_base_has_no_privilege(tmp_path):
    """Not root, no capability, nothing writable but its own, and no token of the API server."""
    documents = build(overlay(tmp_path))
    spec, main = pod(documents), container(documents)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert not {d["kind"] for d in documents} & {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}


def test_processes_that_meet_have_room_to(tmp_path):
    """A runtime gives a pod 64 MiB of /dev/shm, and NCCL wants more for eight GPUs (`collectives`)."""
    documents = build(overlay(tmp_path))
    (shm,) = [m["name"] for m in container(documents)["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    (volume,) = [v for v in pod(documents)["volumes"] if v["name"] == shm]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_nvidias_hooks_may_write_the_containers_root(tmp_path):
    """They write links and ld.so.cache there: where the runtime makes it read-only first, no container is created."""
    context = container(build(overlay(tmp_path, "nvidia")))["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", COMPONENTS)
def test_only_devices_that_need_it_make_it_privileged(tmp_path, name):
    """And then without a capability list that Kubernetes would apply beside it."""
    context = container(build(overlay(tmp_path, name)))["securityContext"]
    assert context.get("privileged", False) is (name in ("amd", "kernel-log"))
    assert not context.get("privileged") or "capabilities" not in context


RIGHTS = {
    "device-taint": {
        ("resourceslices", "list"),
        *(("devicetaintrules", v) for v in ("list", "create", "update", "delete")),
    },
    "pod-label": {("pods", "list"), ("pods", "patch"), ("services", "get")},
}


@pytest.mark.parametrize("component", COMPONENTS)
def test_only_the_writers_of_taints_and_labels_may_ask_the_api_server(component):
    """Each by an account of its own, whose rights a policy narrows; it only reads the record."""
    paths = (HERE / "components" / component).glob("*.yaml")
    documents = [d for path in paths for d in yaml.safe_load_all(path.read_text()) if "metadata" in d]
    roles = [d for d in documents if d["kind"] in ("ClusterRole", "Role")]
    rights = {(r, v) for role in roles for rule in role["rules"] for r in rule["resources"] for v in rule["verbs"]}
    assert rights == RIGHTS.get(component, set())
    for name in {role["metadata"]["name"] for role in roles}:
        spec = one(documents, "DaemonSet", name)["spec"]["template"]["spec"]
        assert spec["serviceAccountName"] == name
        assert all(mount["readOnly"] for each in spec["containers"] for mount in each["volumeMounts"])
        (condition,) = one(documents, "ValidatingAdmissionPolicy", name)["spec"]["matchConditions"]
        assert condition["expression"] == f"request.userInfo.username.endsWith(':{name}')"


def test_taints_do_nothing_until_they_are_asked_to():
    """The effect that is shipped only shows."""
    text = (HERE / "components/device-taint/taint.yaml").read_text()
    spec = one(list(yaml.safe_load_all(text)), "DaemonSet", "canaryd-taint")["spec"]["template"]["spec"]
    assert spec["containers"][0]["args"] == ["--effect=None", "--share=0.05"]


@pytest.mark.parametrize(
    "path", [HERE / "base/canaryd.yaml", HERE / "example/canaryd.yaml"], ids=lambda p: p.parent.name
)
def test_the_configuration_is_one_and_enforces_nothing(path):
    """Log only until an operator says otherwise."""
    assert load.load(path).enforcement == "log"


# --- The condition of the node ----------------------------------------------------------------------------------------


def test_node_problem_detector_takes_the_monitor():
    """By its own source: the shape, a default for each permanent condition, the path and time that it gets."""
    monitor = json.loads((NPD / "canaryd-monitor.json").read_text())
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / "npd.schema.json").read_text())).validate(monitor)
    assert {r["condition"] for r in monitor["rules"] if r["type"] == "permanent"} == {
        c["type"] for c in monitor["conditions"]
    }
    daemonset = next(d for d in yaml.safe_load_all((NPD / "npd.yaml").read_text()) if d["kind"] == "DaemonSet")
    (detector,) = daemonset["spec"]["template"]["spec"]["containers"]
    (plugin,) = [m["mountPath"] for m in detector["volumeMounts"] if m["name"] == "plugin"]
    assert {r["path"] for r in monitor["rules"]} == {f"{plugin}/{CONDITION.name}"}
    assert f"--config.custom-plugin-monitor={plugin}/canaryd-monitor.json" in detector["command"]
    assert CONDITION.stat().st_mode & 0o111


def condition(answer: Path, which: str = "faulty") -> tuple[int, str]:
    done = subprocess.run(["/bin/sh", CONDITION, which, answer], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "age", "line", "faulty", "silent"),
    [
        (0, 0, "pass:", 0, 0),
        (2, 0, "fail: cuda:3 faulty/hardware", 1, 0),
        (0, 0, "fail: cuda:3 faulty/hardware", 0, 0),  # silenced by the switch
        (2, 400, "fail: cuda:3 faulty/hardware", 1, 1),
        (0, 400, "pass:", 0, 1),
        (0, -4000, "pass:", 0, 1),  # of a clock that was ahead
    ],
)
def test_a_failed_gate_stays_until_a_newer_answer(tmp_path, code, age, line, faulty, silent):
    """An old answer is a condition of its own and clears nothing; no status is `unknown`, which might be acted on."""
    (tmp_path / "gate").write_text(f"{code} {int(time.time()) - age} {line}\n")
    assert condition(tmp_path / "gate") == (faulty, line if faulty else "")
    got, text = condition(tmp_path / "gate", "silent")
    assert (got, "no answer here for 5 minutes" in text) == (silent, bool(silent))


@pytest.mark.parametrize("content", [None, "", "\n", "2\n", "2 soon fail: x\n", "rubbish"])
def test_an_answer_that_is_none_does_nothing(tmp_path, content):
    """No file, half a file, another file: no fault, and silence."""
    if content is not None:
        (tmp_path / "gate").write_text(content)
    assert condition(tmp_path / "gate")[0] == 0
    assert condition(tmp_path / "gate", "silent")[0] == 1


class Reenacted:
    """node-problem-detector's rule for a permanent condition, re-enacted by its source; the program was not run here.

    generateStatus of pkg/custompluginmonitor/custom_plugin_monitor.go: the transition time changes with the status, and
    while that stays true with the reason and, if the flag is on, with the message.
    """

    def __init__(self, monitor: dict[str, Any], kind: str) -> None:
        self.by_message = monitor["pluginConfig"]["enable_message_change_based_condition_update"]
        (default,) = [c for c in monitor["conditions"] if c["type"] == kind]
        self.status, self.message, self.cleared, self.transitions = 0, default["message"], default["message"], 0

    def take(self, status: int, message: str) -> None:
        """Take what the plugin returned and printed."""
        if status != self.status or (status == 1 and self.by_message and message != self.message):
            self.status, self.message = status, message if status else self.cleared
            self.transitions += 1


def test_an_unchanged_fault_changes_the_transition_once(tmp_path):
    """60 answers, some of them old: an auto-repairer that waits for some minutes gets to act."""
    monitor = json.loads((NPD / "canaryd-monitor.json").read_text())
    loop = f"""
        for i in $(seq 60); do
            echo "2 $(($(date +%s) - i * 7 % 400)) fail: cuda:3 faulty/hardware" >{tmp_path}/gate
            line=$(sh {CONDITION} faulty {tmp_path}/gate)
            echo "$? $line"
        done"""
    done = subprocess.run(["/bin/sh", "-c", loop], capture_output=True, text=True, check=True)
    detector = Reenacted(monitor, "CanarydDeviceFaulty")
    for answer in done.stdout.splitlines():
        status, _, message = answer.partition(" ")
        detector.take(int(status), message)
    assert len(done.stdout.splitlines()) == 60
    assert (detector.status, detector.message, detector.transitions) == (1, "fail: cuda:3 faulty/hardware", 1)
    detector.take(*condition(tmp_path / "none"))
    assert detector.transitions == 2


def shortens() -> str:
    """Return the program that makes the line of what `canaryd gate --json` printed."""
    (variable,) = yaml.safe_load((NPD / "gate.yaml").read_text())["spec"]["template"]["spec"]["containers"][0]["env"]
    return str(variable["value"])


def gate_loop() -> str:
    spec = yaml.safe_load((NPD / "gate.yaml").read_text())["spec"]["template"]["spec"]
    return str(spec["containers"][0]["args"][0])


@pytest.mark.parametrize("before", ["2 fail: cuda:3 faulty/hardware", "0 pass:", ""])
def test_a_node_of_which_nothing_is_known_is_silent_where_the_gate_only_logs(tmp_path, before):
    """The gate exits with 0 whatever it says, and "unknown" is no answer; that the switch is on shows at once."""
    program, answer = tmp_path / "bin/canaryd", tmp_path / "run/gate"
    program.parent.mkdir()
    answer.parent.mkdir()
    program.write_text("""#!/bin/sh\necho '{"decision": "unknown", "devices": []}'\n""")
    program.chmod(0o755)
    if before:
        code, line = before.split(" ", 1)
        answer.write_text(f"{code} {int(time.time()) - 400} {line}\n")
    environ = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "SHORT": shortens()}
    loop = gate_loop().replace("/run/canaryd", str(answer.parent)).replace("sleep 60", "sleep 0.1")
    process = subprocess.Popen(["/bin/sh", "-c", loop], env=environ)
    try:
        eventually(lambda: answer.exists() and "unknown" in answer.read_text())
        assert condition(answer) == (0, "")
        assert condition(answer, "silent")[0] == 1
    finally:
        process.terminate()
        process.wait(10)


def test_the_loop_asks_the_gate_and_the_condition_follows(tmp_path):
    """From a stored verdict to the status of the plugin, with the switch in between."""
    state, answer = tmp_path / "state", tmp_path / "run/gate"
    answer.parent.mkdir()
    (tmp_path / "canaryd.yaml").write_text("enforcement: act")
    program = tmp_path / "bin/canaryd"
    program.parent.mkdir()
    files = f"--config {tmp_path}/canaryd.yaml --state-dir {state}"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m canaryd "$@" {files}\n')
    program.chmod(0o755)
    now = time.time()
    with Store.open(state) as store:
        store.see_device(Device(uuid="GPU-3", backend="cuda", index=3, model="NVIDIA H200"), now)
        bad = Finding(rule="r", state=State.FAULTY, cause=Cause.HARDWARE, message="a row")
        told = {"device": "GPU-3", "state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (bad,)}
        assert store.set_verdict(Verdict(**told, decided=now, since=now))

    def asking() -> subprocess.Popen[str]:
        text = gate_loop().replace("/run/canaryd", str(answer.parent))
        environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "SHORT": shortens()}
        return subprocess.Popen(["/bin/sh", "-c", text], env=environment, stdout=subprocess.PIPE, text=True)

    def asked() -> tuple[int, str]:
        answer.unlink(missing_ok=True)
        with asking() as loop:
            try:
                eventually(answer.exists)
            finally:
                loop.terminate()
        return condition(answer)

    assert asked() == (1, "fail: cuda:3 faulty/hardware")
    (tmp_path / "no-enforcement").touch()
    assert asked() == (0, "")

    answer.write_text("2 1 fail: cuda:3 faulty/hardware\n")
    program.write_text("""#!/bin/sh\necho '{"decision": "unknown", "devices": []}'; exit 3\n""")
    with asking() as loop:
        assert loop.stdout.readline() == "unknown: \n"
        loop.terminate()
    assert condition(answer) == (1, "fail: cuda:3 faulty/hardware"), "what is unknown clears nothing"
