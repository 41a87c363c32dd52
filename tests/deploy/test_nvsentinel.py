"""deploy/nvsentinel: NVSentinel's types take it, and its Job reads what `canaryd prove` found, with the reason."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from canaryd.action import nvsentinel
from tests.cli.test_prove import FAULTY
from tests.command import ROOT, configure
from tests.deploy.test_kubernetes import HERE, LINT, SCHEMAS, VERSIONS, found, one
from tests.programs import accepted

FILES = ROOT / "deploy/nvsentinel"
VALUES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FILES.glob("*.yaml"))}
CONFIG = VALUES["values"]["lifecycle-manager"]["config"]
(TEST,) = CONFIG["tests"].values()
(PREFLIGHT,) = VALUES["preflight"]["preflight"]["initContainers"]


def rendered(template: str, **given: Any) -> dict[str, Any]:
    """Return a template filled in as Go's text/template does, as far as this one goes."""

    def value(text: str, here: Any) -> str:
        quote, _, path = text.rpartition(" ")
        for word in re.findall(r"\w+", path):
            here = (given if word in given else here)[word]
        return json.dumps(here) if quote == "quote" else str(here)

    def fill(text: str, here: Any) -> str:
        text = text.replace("(index .Nodes 0)", ".Node")
        return re.sub(r"\{\{([^{}]+)\}\}", lambda found: value(found[1].strip(), here), text)

    def repeat(block: re.Match[str]) -> str:
        return "".join(fill(block[2].rstrip(), each) for each in given[block[1]])

    return yaml.safe_load(
        fill(re.sub(r"\s*\{\{- range \.(\w+)\}\}(.*?)\{\{- end\}\}", repeat, template, flags=re.DOTALL), {})
    )


def job() -> dict[str, Any]:
    """Return the Job as the lifecycle manager makes it."""
    provider = CONFIG["providers"][TEST["provider"]]
    given = {"key": "node.kubernetes.io/unschedulable", "value": "", "operator": "Exists", "effect": "NoSchedule"}
    return rendered(
        CONFIG["templates"][provider["templateFile"]],
        ValidationRequestName="node-a-validation",
        TestGroupName="canaryd-prove-group-1",
        Namespace="nvsentinel",
        TimeoutSeconds=provider["timeoutSeconds"],
        Node={"NodeName": "node-a"},
        Tolerations=[{key.capitalize(): text for key, text in given.items()}],
        Image=TEST["image"],
        Command=TEST["command"],
        Env=[{key.capitalize(): text for key, text in each.items()} for each in TEST["env"]],
    )


@pytest.mark.parametrize("name", VALUES)
def test_nvsentinels_types_take_it(name):
    """Each name that a test, a provider or a template bears is there."""
    schema = json.loads((SCHEMAS / "nvsentinel.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(VALUES[name])
    assert CONFIG["providers"][TEST["provider"]]["templateFile"] in CONFIG["templates"]


def test_yamllint_takes_every_file():
    """Values and policies alike."""
    accepted(found("yamllint"), "-d", LINT, FILES)


def test_kubernetes_takes_the_job_and_the_check(tmp_path):
    """Strictly; the check as the webhook puts it into a pod."""
    check = {key: value for key, value in PREFLIGHT.items() if key != "defaultEnabled"}
    check["image"] = "{repository}:{tag}".format(**check["image"])
    spec = {"initContainers": [check], "containers": [{"name": "main", "image": "work"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "work"}, "spec": spec}
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all([job(), pod]))
    for version in VERSIONS:
        accepted(found("kubernetes-validate"), "--strict", "-k", version, path)


def test_the_job_is_tried_once_and_keeps_its_proof_on_the_node():
    """Who retries until it passes lets a fault through that shows half the time."""
    assert CONFIG["providers"][TEST["provider"]]["retries"] == 0
    spec = job()["spec"]
    assert spec["backoffLimit"] == 0
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == TEST["command"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in container["env"]
    volumes = {each["name"]: each for each in spec["template"]["spec"]["volumes"]}
    assert volumes["state"]["hostPath"]["path"] == "/var/lib/canaryd"


def shell(command: list[str], tmp_path: Path, program: str) -> tuple[str, int, str]:
    """Run a container's command with this `canaryd`. Returns the Job's condition, the status, and the message."""
    assert command[:4] == ["/usr/bin/tini", "--", "/bin/sh", "-c"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/canaryd").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "bin/canaryd").chmod(0o755)
    message = tmp_path / "termination-log"
    message.touch()
    script = re.sub("--for [0-9]+m", "--for 6s", command[4]).replace("/dev/termination-log", str(message))
    environ = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip().startswith(message.read_text())
    return "Failed" if done.returncode else "Complete", done.returncode, message.read_text()


@pytest.mark.parametrize(
    ("wrong", "names", "condition", "status", "begins"),
    [
        ("False", (), "Complete", 0, "proven: 1 device, "),
        ("ctx.intensity == 'steady'", (), "Failed", 1, "refused: cpu:0 "),
        ("False", ("crashes",), "Failed", 2, "not proven: cpu:0 unknown"),
    ],
    ids=["proven", "refused", "not-proven"],
)
def test_the_job_reads_what_was_found(tmp_path, wrong, names, condition, status, begins):
    """As its container would run, with real tests; what is unknown fails, with its own reason."""
    config = configure(tmp_path, *names)
    (tmp_path / "probes.d/faulty.py").write_text(FAULTY.replace("WRONG", wrong))
    more = f"--wait 5s --config {config} --state-dir {tmp_path / 'state'}"
    got = shell(TEST["command"], tmp_path, f'cd {ROOT} && exec {sys.executable} -m canaryd "$@" {more}')
    assert got[:2] == (condition, status), got
    assert got[2].startswith(begins), got


@pytest.mark.parametrize("command", [TEST["command"], PREFLIGHT["command"]], ids=["job", "preflight"])
@pytest.mark.parametrize(
    ("code", "status"), [(0, 0), (2, 1), (3, 2), (64, 2), (130, 2), (137, 2)], ids="prove-{0}".format
)
def test_every_status_has_a_meaning_in_nvsentinels_contract(tmp_path, command, code, status):
    """0 passed, 1 failed, 2 could not be tested; a message is never longer than Kubernetes keeps."""
    got = shell(command, tmp_path, f"printf 'line %.0s' $(seq 2000); exit {code}")
    assert got[1] == status
    assert 3900 < len(got[2]) <= 4096


def test_without_a_line_the_log_is_the_message(tmp_path):
    """An empty file lets the kubelet take the end of the log."""
    assert shell(TEST["command"], tmp_path, "echo 'canaryd: bad' >&2; exit 64")[2] == ""
    for each in (job()["spec"]["template"]["spec"]["containers"][0], PREFLIGHT):
        assert each["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_rule_matches_what_is_sent():
    """Agent, and fatal."""
    ((rule, *_),) = [r["match"]["all"] for r in VALUES["quarantine"]["fault-quarantine"]["ruleSets"]]
    assert rule["expression"] == f"event.agent == '{nvsentinel.AGENT}' && event.isFatal == true"


def test_the_emitter_has_what_it_needs_and_no_more():
    """No token; root for NVSentinel's socket, and the capabilities by which root takes canaryd's rights."""
    documents = list(yaml.safe_load_all((HERE / "components/nvsentinel/events.yaml").read_text()))
    spec = one(documents, "DaemonSet", "canaryd-nvsentinel")["spec"]["template"]["spec"]
    assert len(documents) == 1
    assert spec["automountServiceAccountToken"] is False
    (only,) = spec["containers"]
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SETUID", "SETGID"]}
    assert {m["name"] for m in only["volumeMounts"] if not m.get("readOnly")} == {"told"}
    assert only["command"] == ["python3", "-m", nvsentinel.__name__]
    done = subprocess.run(
        [sys.executable, *only["command"][1:], *only["args"]],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "NODE_NAME"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "NODE_NAME is not set" in done.stderr) == (2, True)
