"""One pod is labelled and no other, and never the last: against an API server that takes only what Kubernetes takes."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from canaryd.action import label
from canaryd.action.kubernetes import Api, ApiError
from canaryd.action.label import KEY, OUT, PENDING, TRUSTED, Labeller, place
from canaryd.model import Cause, Device, Finding, State, Verdict
from canaryd.report import gate
from canaryd.store.store import Store
from tests.api_server import COMPONENTS, ApiServer, Policy, merge
from tests.command import ROOT, configure, eventually
from tests.dossier.made import run

validator = pytest.importorskip("kubernetes_validate", reason="NOT TESTED: the schemas of Kubernetes are not here")
NODE, SPACE = "node-1", "serving"
PATH = f"/api/v1/namespaces/{SPACE}"
POLICY = Policy(COMPONENTS / "pod-label/policy.yaml", "system:serviceaccount:canaryd:canaryd-label")
ITEM = gate.Item(
    device="endpoint:main", name="endpoint:main", state=State.FAULTY, cause=Cause.SOFTWARE, finding="x", decision="fail"
)
FAILS = gate.Answer(decision=gate.FAIL, devices=(ITEM,))
PASSES = gate.Answer(decision=gate.PASS, devices=(replace(ITEM, state=State.HEALTHY, finding="", decision=gate.PASS),))
UNKNOWN = gate.Answer(decision=gate.UNKNOWN, reason="the database did not answer within 5 s")


class Server(ApiServer):
    """Pods by name, and one Service; patches are merged."""

    def __init__(self, *names: str) -> None:
        self.objects, self.reads, self.lists, self.before_list = {}, 0, 200, lambda: None
        self.lock = threading.Lock()
        for number, name in enumerate(names, 1):
            self.start(name, f"10.0.0.{number}", f"node-{number}")
        super().__init__()

    def start(self, name: str, address: str = "10.0.0.9", node: str = NODE, **labels: str) -> None:
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "uid": f"{name}-{time.monotonic_ns()}", "labels": {"app": "vllm"} | labels},
            "spec": {"nodeName": node, "containers": [{"name": "vllm", "image": "vllm"}]},
            "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        validator.validate(made, "1.37", strict=True)
        self.objects[f"{PATH}/pods/{name}"] = made

    def pod(self, name: str) -> dict:
        return self.objects[f"{PATH}/pods/{name}"]

    def labels(self) -> dict[str, str | None]:
        """Return pod → the value of the label."""
        pods = {p.rpartition("/")[2]: o for p, o in self.objects.items() if o["kind"] == "Pod"}
        return {name: pod["metadata"].get("labels", {}).get(KEY) for name, pod in pods.items()}

    def answer(self, request, path, query) -> tuple[int, dict]:
        if request.command == "GET" and path != f"{PATH}/pods":
            return (200, self.objects[path]) if path in self.objects else (404, {})
        if request.command == "GET":
            self.reads += 1
            if not query.get("fieldSelector"):
                self.before_list()
                if self.lists != 200:
                    return self.lists, {}
            with self.lock:
                return 200, {"items": [copy.deepcopy(p) for p in self.selected(query)], "metadata": {}}
        if request.headers["Content-Type"] != "application/merge-patch+json":
            return 415, {}
        with self.lock:
            old, new = self.objects[path], copy.deepcopy(self.objects[path])
            if request.body["metadata"].pop("uid") != old["metadata"]["uid"]:
                return 409, {}
            (value,) = request.body["metadata"]["labels"].values()
            merge(new, request.body)
            validator.validate(new, "1.37", strict=True)
            if POLICY.refusal(request.command.replace("PATCH", "UPDATE"), "/pods", new, old):
                return 422, {}
            self.objects[path] = new
            self.writes.append(f"{path.rpartition('/')[2]} {value}")
            return 200, new

    def selected(self, query: dict[str, str]) -> list[dict]:
        def pairs(selector: str) -> list[tuple[str, str]]:
            return [tuple(term.split("=")) for term in query.get(selector, "").split(",") if term]

        fields = {
            "metadata.name": lambda p: p["metadata"]["name"],
            "status.podIP": lambda p: p["status"]["podIP"],
            "spec.nodeName": lambda p: p["spec"]["nodeName"],
        }
        return [
            p
            for p in (o for o in self.objects.values() if o["kind"] == "Pod")
            if all(p["metadata"].get("labels", {}).get(key) == value for key, value in pairs("labelSelector"))
            and all(fields[key](p) == value for key, value in pairs("fieldSelector"))
        ]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server("a", "b")
    yield made
    made.close()


def labeller(server, account, answer=FAILS, silence="", pod="a", field="", service="") -> Labeller:
    question = gate.Question(endpoint="main")
    api = Api(address=server.address, account=account)
    ask = lambda: (answer, silence)  # noqa: E731
    given = {"namespace": SPACE, "selector": "app=vllm", "field": field or f"metadata.name={pod}", "service": service}
    return Labeller(api=api, ask=ask, question=question, **given)


def test_a_thousand_updates_of_one_fault_are_written_once(server, account):
    """It is announced and written, whatever its counts; then it is trusted again, once too."""
    keeper = labeller(server, account)
    for n in range(1000):
        keeper.ask = lambda n=n: (replace(FAILS, devices=(replace(ITEM, finding=f"{n} wrong"),)), "")
        keeper.turn(0.0)
    assert server.labels() == {"a": OUT, "b": None}
    keeper.ask = lambda: (PASSES, "")
    for _ in range(3):
        keeper.turn(0.0)
    assert server.writes == [f"a {PENDING}", f"a {OUT}", f"a {TRUSTED}"]


def test_the_last_trusted_pod_serves_on(server, account):
    """Its label says that it is not trusted; it leaves when another is, and comes back when that one ends."""
    one, other = (labeller(server, account, pod=name) for name in "ab")
    said = [f"a: {KEY}={value}: fail: endpoint:main faulty (software): x" for value in (PENDING, OUT)]
    assert one.turn(0.0) == said
    assert other.turn(0.0)[-1] == "b stays in service: no other pod of app=vllm is ready and trusted"
    assert server.labels() == {"a": OUT, "b": PENDING}
    server.start("c", "10.0.0.3")
    other.turn(0.0)
    assert server.labels() == {"a": OUT, "b": OUT, "c": None}
    del server.objects[f"{PATH}/pods/c"]
    one.turn(0.0)
    assert server.labels() == {"a": PENDING, "b": OUT}


@pytest.mark.parametrize(
    "changed",
    [
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": None}},
        {"status": {"phase": "Failed"}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"metadata": {"labels": {KEY: PENDING}}},
        {"metadata": {"labels": {"app": "another"}}},
    ],
    ids=str,
)
def test_only_pods_that_serve_count_as_others(server, account, changed):
    """One that is not ready, ends, has ended, is not trusted or serves another model takes no requests."""
    merge(server.pod("b"), changed)
    labeller(server, account).turn(0.0)
    assert server.labels()["a"] == PENDING


def test_two_that_leave_at_once_do_not_both_leave(server, account):
    """The second takes its whole turn while the first counts."""
    first, second = (labeller(server, account, pod=name) for name in "ab")

    def meanwhile() -> None:
        server.before_list = lambda: None
        second.turn(0.0)

    server.before_list = meanwhile
    first.turn(0.0)
    assert server.labels() == {"a": PENDING, "b": PENDING}


def test_of_many_that_leave_at_once_one_stays(account):
    """Five processes in one moment, over and over; what the server ever says has a pod that serves."""
    for _ in range(3):
        server = Server(*"abcde")
        keepers = [labeller(server, account, pod=name) for name in "abcde"]
        begun = threading.Barrier(len(keepers))

        def turn(keeper: Labeller, begun: threading.Barrier = begun) -> None:
            begun.wait()
            keeper.turn(0.0)

        threads = [threading.Thread(target=turn, args=(keeper,)) for keeper in keepers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(server.labels().values()) <= {PENDING, OUT}
        assert PENDING in server.labels().values()
        server.close()


@pytest.mark.parametrize("status", [403, 500])
def test_what_cannot_be_read_takes_nothing_out(server, account, status):
    """Neither the pod itself nor, once it is announced, the others."""
    keeper = labeller(server, account)
    server.status = status
    (said,) = keeper.turn(0.0)
    assert said.startswith(f"nothing is changed: GET {PATH}/pods?labelSelector=app%3Dvllm")
    server.status, server.lists = 200, status
    keeper.turn(0.0)
    assert server.labels() == {"a": PENDING, "b": None}


def test_what_is_unknown_changes_nothing(server, account):
    """A pod that is out stays out until it is the last, one without a label gets none."""
    keeper = labeller(server, account, answer=UNKNOWN)
    assert keeper.turn(0.0) == []
    keeper.ask = lambda: (FAILS, "")
    keeper.turn(0.0)
    keeper.ask = lambda: (UNKNOWN, "")
    assert keeper.turn(0.0) == []
    assert server.writes == [f"a {PENDING}", f"a {OUT}"]
    del server.objects[f"{PATH}/pods/b"]
    keeper.turn(0.0)
    assert server.labels() == {"a": PENDING}


def test_the_switch_withdraws_and_log_only_writes_nothing(server, account):
    """It says what it would do."""
    silenced = labeller(server, account, silence="enforcement is log (default)")
    reason = "would fail: endpoint:main faulty (software): x (log only: enforcement is log (default))"
    assert silenced.turn(0.0) == [f"would take the pod out: {reason}"]
    assert server.writes == []
    labeller(server, account).turn(0.0)
    assert silenced.turn(0.0) == [f"a: {KEY} withdrawn: enforcement is silenced (enforcement is log (default))"]
    assert server.labels() == {"a": None, "b": None}
    assert server.pod("a")["metadata"]["labels"] == {"app": "vllm"}


@pytest.mark.parametrize(
    ("field", "pods"),
    [("metadata.name=z", "0 pods"), (f"status.podIP=10.0.0.1,spec.nodeName={NODE}", "2 pods")],
)
def test_none_or_several_pods_are_refused(server, account, field, pods):
    """It does not guess, and says so."""
    server.start("d", "10.0.0.1")
    (said,) = labeller(server, account, field=field).turn(0.0)
    assert said == f"nothing is changed: {pods} of app=vllm with {field}; exactly one must match"
    assert server.writes == []


def test_a_new_pod_of_the_same_name_is_left_alone(server, account):
    """It took the name between the question and the write."""
    keeper = labeller(server, account)
    pod = keeper.pod()
    server.start("a")
    with pytest.raises(ApiError, match="409"):
        list(keeper.change(pod, None, PENDING, ""))
    assert server.labels()["a"] is None


def service(**spec: object) -> dict:
    made = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}}
    made["spec"] = {"selector": {"app": "vllm"}, "internalTrafficPolicy": "Local", "ports": [{"port": 80}]} | spec
    validator.validate(made, "1.37", strict=True)
    return made


def test_behind_a_service_the_pod_of_this_node_is_found(server, account):
    """If the Service answers from this node alone, and has one pod here."""
    keeper = labeller(server, account, field="spec.nodeName=node-2", service="a")
    server.objects[f"{PATH}/services/a"] = service()
    keeper.turn(0.0)
    assert server.labels() == {"a": None, "b": OUT}


@pytest.mark.parametrize(
    "spec", [{"internalTrafficPolicy": "Cluster"}, {"clusterIP": "None"}, {"selector": {}}], ids=str
)
def test_a_service_that_may_answer_from_elsewhere_is_refused(server, account, spec):
    """Its answers would be those of other pods."""
    server.objects[f"{PATH}/services/a"] = service(**spec)
    (said,) = labeller(server, account, field="spec.nodeName=node-2", service="a").turn(0.0)
    assert said == "nothing is changed: Service a may answer from another pod than b"
    assert server.writes == []


def test_the_endpoint_tells_where_its_pod_is():
    """By name in its own pod, else by its address or its Service on this node."""
    node = {"NODE_NAME": NODE}
    assert place("http://127.0.0.1:8000/v1", SPACE, {"POD_NAME": "a"}) == ("metadata.name=a", "")
    found = [place(f"http://{host}:80/v1", SPACE, node) for host in ("10.0.0.1", "[fd00:0::1]", "vllm.serving.svc")]
    here = f"spec.nodeName={NODE}"
    assert found == [(f"status.podIP=10.0.0.1,{here}", ""), (f"status.podIP=fd00::1,{here}", ""), (here, "vllm")]
    for host in ("localhost", "vllm", "vllm.another", "a.vllm.serving.svc"):
        with pytest.raises(ValueError, match="neither a pod's address nor a Service of serving"):
            place(f"http://{host}/v1", SPACE, node)
    with pytest.raises(ValueError, match="neither POD_NAME nor NODE_NAME"):
        place("http://10.0.0.1/v1", SPACE, {})


def test_the_documented_filter_leaves_out_what_is_false_alone():
    """A pod that has no label yet, or serves on as the last, gets requests."""
    text = (ROOT / "docs/enforcement.md").read_text()
    (config,) = [c for c in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "EndpointPickerConfig" in c]
    (plugin,) = yaml.safe_load(config)["plugins"]
    (term,) = plugin["parameters"]["matchExpressions"]
    assert (plugin["type"], term["key"], term["operator"]) == ("label-selector-filter", KEY, "NotIn")
    assert [value for value in (None, TRUSTED, PENDING, OUT) if value in term["values"]] == [OUT]


def started(tmp_path, server, *more: str) -> subprocess.Popen[str]:
    """Start the process as the manifest does, in a pod of its own."""
    (tmp_path / "token").write_text("secret\n")
    given = {"config": tmp_path / "canaryd.yaml", "api": server.address, "account": tmp_path, "every": 0.2}
    given |= {"endpoint": "main", "namespace": SPACE, "selector": "app=vllm"}
    command = [sys.executable, "-m", "canaryd.action.label", *(f"--{k}={v}" for k, v in given.items()), *more]
    environ = os.environ | {"POD_NAME": "a"}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


def judged(store: Store, uuid: str, state: State, cause: Cause) -> None:
    now = time.time()
    bad = (Finding(rule="r", state=state, cause=cause, message="a row"),) if state is not State.HEALTHY else ()
    store.set_verdict(Verdict(device=uuid, state=state, cause=cause, findings=bad, decided=now, since=now))


def test_it_runs_as_a_process_of_its_own(server, tmp_path):
    """From stored verdicts of the endpoint and its GPU, not of another GPU or a drill; the switch withdraws it."""
    url = "http://127.0.0.1:8000/v1"
    state = str(tmp_path / "state")
    configure(tmp_path, endpoints={"main": {"url": url, "devices": ["cuda:0"]}}, enforcement="act", state_dir=state)
    devices = [Device(uuid=f"GPU-{n}", backend="cuda", index=n, model="H200") for n in range(2)]
    with Store.open(tmp_path / "state") as store:
        for device in (Device(uuid="endpoint:main", backend="endpoint", index=0, model="m"), *devices):
            store.see_device(device, time.time())
            judged(store, device.uuid, State.HEALTHY, Cause.NONE)
        judged(store, "GPU-1", State.FAULTY, Cause.HARDWARE)
        store.drills.add_run(replace(run(0, wrong=100, drill="consistent"), device="GPU-0"))
        process = started(tmp_path, server)
        try:
            eventually(lambda: server.labels()["a"] == TRUSTED)
            judged(store, "GPU-0", State.FAULTY, Cause.HARDWARE)
            eventually(lambda: server.labels()["a"] == OUT)
            judged(store, "GPU-0", State.HEALTHY, Cause.NONE)
            eventually(lambda: server.labels()["a"] == TRUSTED)
            judged(store, "endpoint:main", State.FAULTY, Cause.SOFTWARE)
            eventually(lambda: server.labels()["a"] == OUT)
            (tmp_path / "no-enforcement").touch()
            eventually(lambda: server.labels()["a"] is None)
        finally:
            process.terminate()
            said = process.communicate(timeout=10)[0]
    assert "endpoint:main faulty (software): a row" in said
    assert server.labels()["b"] is None


@pytest.mark.parametrize(("more", "ends"), [((), None), (("--on=unknown",), OUT)])
def test_what_is_unknown_takes_a_pod_out_where_it_is_asked_to(server, tmp_path, more, ends):
    """As for a load balancer: `/endpoints/NAME/ready?on=unknown`."""
    state, ends_at = str(tmp_path / "state"), {"main": {"url": "http://127.0.0.1:8000/v1"}}
    configure(tmp_path, endpoints=ends_at, enforcement="act", state_dir=state)
    Store.open(tmp_path / "state").close()
    process = started(tmp_path, server, *more)
    try:
        eventually(lambda: server.reads >= 3 and server.labels()["a"] == ends)
    finally:
        process.terminate()
        process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--endpoint=other", "--selector=app=vllm"], "no such endpoint"),
        (["--endpoint=main", "--selector="], "labels that all pods of the model have"),
        (["--endpoint=main", f"--selector=app=vllm,{KEY}!=false"], "labels that all pods of the model have"),
    ],
)
def test_what_names_no_pods_is_a_usage_error(tmp_path, monkeypatch, capsys, words, says):
    """Also a selector that would lose the pod with its label."""
    path = configure(tmp_path, endpoints={"main": {"url": "http://127.0.0.1:8000/v1"}})
    monkeypatch.setenv("POD_NAME", "a")
    with pytest.raises(SystemExit):
        label.main([*words, f"--namespace={SPACE}", f"--config={path}"])
    assert says in capsys.readouterr().err
