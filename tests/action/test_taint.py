"""One GPU is tainted and no other: against an API server that takes only what Kubernetes' own schema takes."""

from __future__ import annotations

import calendar
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from canaryd.action import taint
from canaryd.action.kubernetes import Api, ApiError
from canaryd.action.taint import EFFECTS, KEY, RULES, SLICES, UUID, Bounds, Selector, Writer, rule_for
from canaryd.action.watch import QUESTION
from canaryd.config.settings import Config
from canaryd.model import Ack, AckKind, Cause, Device, Finding, State, Verdict
from canaryd.report import gate, proof
from canaryd.report.proof import Decision, Proof, Proved
from canaryd.store.store import Store
from tests.api_server import COMPONENTS, ApiServer, Policy
from tests.command import ROOT, eventually
from tests.http_server import Handler, listening

validator = pytest.importorskip("kubernetes_validate", reason="NOT TESTED: the schemas of Kubernetes are not here")
NODE, DRIVER = "node-1", "gpu.nvidia.com"
GPUS = [Device(uuid=f"GPU-{n}", backend="cuda", index=n, model="NVIDIA H200") for n in range(2)]
ITEM = gate.Item(
    device="GPU-1", name="cuda:1", state=State.FAULTY, cause=Cause.HARDWARE, finding="a row", decision=gate.FAIL
)
FAILS = gate.Answer(decision=gate.FAIL, devices=(ITEM,))
HALF = Bounds(share=0.5)
POLICY = Policy(COMPONENTS / "device-taint/policy.yaml", "system:serviceaccount:canaryd:canaryd-taint")


def published(node: str, uuids: dict[str, str], generation: int = 1) -> dict:
    """Return the ResourceSlice of a node, in the shape of NVIDIA's driver: name of the device → its uuid."""
    made = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{generation}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": [{"name": name, "attributes": {"uuid": {"string": uuid}}} for name, uuid in uuids.items()],
        },
    }
    validator.validate(made, "1.37", strict=True)
    return made


class Server(ApiServer):
    """Two lists, names that are taken, versions of objects, the time of an effect, and the policy that is shipped."""

    def __init__(self, *slices: dict) -> None:
        self.slices, self.rules, self.clock = list(slices), {}, 1_800_000_000.0
        super().__init__()

    def answer(self, request, path, _query) -> tuple[int, dict]:
        if request.command == "GET":
            return 200, {"items": {SLICES: self.slices, RULES: list(self.rules.values())}[path], "metadata": {}}
        rule = request.body or None
        name = rule["metadata"]["name"] if rule else path.rpartition("/")[2]
        stands = self.rules.get(name)
        operation = {"POST": "CREATE", "PUT": "UPDATE", "DELETE": "DELETE"}[request.command]
        if POLICY.refusal(operation, "resource.k8s.io/devicetaintrules", rule, stands):
            return 422, {}
        if rule is None:
            self.writes.append("DELETE")
            return (200, {}) if self.rules.pop(name, None) else (404, {})
        validator.validate(rule, "1.37", strict=True)
        version = stands["metadata"]["resourceVersion"] if stands else None
        if rule["metadata"].get("resourceVersion") != version:
            return 409, {}
        taint = rule["spec"]["taint"]
        assert taint["effect"] in EFFECTS
        self.writes.append(f"{request.command} {taint['effect']}")
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock))
        taint.setdefault("timeAdded", now)
        rule["metadata"].setdefault("creationTimestamp", now)
        rule["metadata"]["resourceVersion"] = str(len(self.writes))
        self.rules[name] = rule
        return 200, rule

    def tainted(self) -> dict[str, str]:
        """Return device → effect."""
        return {r["spec"]["deviceSelector"]["device"]: r["spec"]["taint"]["effect"] for r in self.rules.values()}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(published(NODE, {"gpu-0": "GPU-0", "gpu-1": "GPU-1"}))
    yield made
    made.close()


def writer(server, account, answer=FAILS, silence="", limits=HALF, node=NODE) -> Writer:
    api = Api(address=server.address, account=account)
    return Writer(api=api, node=node, limits=limits, ask=lambda: (answer, silence))


def test_exactly_one_of_two_gpus_is_tainted_until_it_is_repaired_and_proven(server, account, tmp_path):
    """From the stored verdict through the gate; a repair alone withdraws nothing."""
    settings = replace(Config(), state_dir=tmp_path / "state", enforcement="act")
    now = time.time()

    def judged(state: State, cause: Cause) -> None:
        bad = (Finding(rule="r", state=state, cause=cause, message="a row"),) if state is State.FAULTY else ()
        store.set_verdict(Verdict(device="GPU-1", state=state, cause=cause, findings=bad, decided=now, since=now))

    with Store.open(settings.state_dir) as store:
        for device in GPUS:
            store.see_device(device, now)
        healthy = {"state": State.HEALTHY, "cause": Cause.NONE, "findings": (), "decided": now, "since": now}
        store.set_verdict(Verdict(device="GPU-0", **healthy))
        judged(State.FAULTY, Cause.HARDWARE)
        keeper = writer(server, account)
        keeper.ask = lambda: (gate.ask(settings, QUESTION), gate.silenced(settings, {}))
        assert keeper.turn(now) == ["cuda:1 faulty (hardware): a row: tainted gpu-1 (None)"]
        (rule,) = server.rules.values()
        assert rule["spec"]["deviceSelector"] == {"driver": DRIVER, "pool": NODE, "device": "gpu-1"}
        assert (rule["spec"]["taint"]["key"], rule["metadata"]["annotations"][UUID]) == (KEY, "GPU-1")
        judged(State.HEALTHY, Cause.NONE)
        assert keeper.turn(now) == []
        assert server.tainted() == {"gpu-1": "None"}, "healthy is not proven"
    proved = Proved(
        device="GPU-1",
        name="cuda:1",
        decision=Decision.PROVEN,
        state=State.HEALTHY,
        cause=Cause.NONE,
        results=1,
        wrong=0,
    )
    made = Proof(canaryd="x", started=now, seconds=1, loaded=1, decision=Decision.PROVEN, devices=(proved,))
    proof.keep(made, settings.state_dir)
    assert keeper.turn(now) == ["gpu-1: taint withdrawn, cuda:1 is healthy and proven"]
    assert server.tainted() == {}
    assert server.writes == ["POST None", "DELETE"]


def test_a_thousand_updates_of_one_fault_are_one_write(server, account):
    """The counts of a fault change with every run; the rule does not."""
    keeper = writer(server, account)
    for n in range(1000):
        keeper.ask = lambda n=n: (gate.Answer(decision=gate.FAIL, devices=(replace(ITEM, finding=f"{n} wrong"),)), "")
        keeper.turn(server.clock + n)
    assert server.writes == ["POST None"]


def test_effects_come_in_turn_and_no_further_than_asked(server, account):
    """Each stands for a time before the next, so that somebody can see it and use the switch."""
    keeper = writer(server, account, limits=replace(HALF, effect="NoExecute", step=300))
    begun = server.clock
    for seconds in (0, 299, 300, 599, 600, 900, 5000):
        server.clock = begun + seconds
        keeper.turn(server.clock)
    assert server.writes == ["POST None", "PUT NoSchedule", "PUT NoExecute"]
    added = next(iter(server.rules.values()))["spec"]["taint"]["timeAdded"]
    assert calendar.timegm(time.strptime(added, "%Y-%m-%dT%H:%M:%SZ")) == begun + 600


@pytest.mark.parametrize(("share", "effects"), [(0.49, {"None"}), (0.5, {"None", "NoSchedule"}), (1.0, {"NoSchedule"})])
def test_no_more_than_the_share_is_out(account, share, effects):
    """Two nodes with a GPU each that decide in the same second: by the rules that stand, the same one comes first."""
    server = Server(published("a", {"gpu-0": "GPU-1"}), published("b", {"gpu-0": "GPU-1"}))
    limits = Bounds(effect="NoSchedule", share=share, step=0)
    keepers = [writer(server, account, limits=limits, node=node) for node in "ab"]
    said = [line for _ in range(3) for keeper in keepers for line in keeper.turn(server.clock)]
    assert {r["spec"]["taint"]["effect"] for r in server.rules.values()} == effects
    assert any("stays at None" in line for line in said) is ("None" in effects)


def test_others_taints_count(server, account):
    """Those of the driver, and those of rules that select much."""
    limits = Bounds(effect="NoSchedule", share=0.5, step=0)
    server.slices[0]["spec"]["devices"][0]["taints"] = [{"key": "gpu.nvidia.com/xid", "effect": "NoSchedule"}]
    keeper = writer(server, account, limits=limits)
    said = [line for _ in range(2) for line in keeper.turn(server.clock)]
    assert said[-1] == "gpu-1 stays at None: 2 of 2 devices would be out, 1 may be"
    assert server.tainted() == {"gpu-1": "None"}


@pytest.mark.parametrize("status", [403, 404, 500])
def test_what_cannot_be_read_changes_nothing(server, account, status):
    """Neither a new rule nor the end of one; it says so once."""
    keeper = writer(server, account)
    keeper.turn(server.clock)
    server.status = status
    said = keeper.turn(server.clock)
    assert len(said) == 1
    assert said[0].startswith(f"nothing is changed: GET {SLICES}: {status}")
    assert keeper.turn(server.clock) == []
    nothing = gate.Answer(decision=gate.UNKNOWN, reason="the database did not answer within 5 s")
    keeper.ask, server.status = lambda: (nothing, ""), 200
    assert keeper.turn(server.clock) == []
    assert server.writes == ["POST None"]


def test_the_switch_withdraws_what_stands_and_logs_the_rest(server, account):
    """Log only, the default, writes nothing at all."""
    silenced = writer(server, account, silence="enforcement is log (default)")
    said = silenced.turn(server.clock)
    assert said == ["would taint cuda:1 faulty (hardware): a row (log only: enforcement is log (default))"]
    assert server.writes == []
    writer(server, account).turn(server.clock)
    other = writer(server, account, node="node-2")
    other.turn(server.clock)
    writer(server, account, silence="/etc/canaryd/no-enforcement exists").turn(server.clock)
    assert server.writes == ["POST None", "DELETE"]


def test_a_name_that_moved_to_another_gpu_is_freed(server, account):
    """GPU-1 is lost and GPU-0 took its name; then GPU-1 is replaced in its place, which is free only when proven."""
    keeper = writer(server, account)
    keeper.turn(server.clock)
    lost = replace(ITEM, decision=gate.UNKNOWN, state=State.UNKNOWN)
    server.slices[:] = [published(NODE, {"gpu-1": "GPU-0"}, generation=2)]
    keeper.ask = lambda: (gate.Answer(decision=gate.UNKNOWN, devices=(lost,)), "")
    assert keeper.turn(server.clock) == ["gpu-1: taint withdrawn, gpu-1 is another GPU now"]
    server.slices[:] = [published(NODE, {"gpu-0": "GPU-0", "gpu-1": "GPU-1"}, generation=3)]
    keeper.ask = lambda: (FAILS, "")
    keeper.turn(server.clock)
    server.slices.append(published(NODE, {"gpu-0": "GPU-0", "gpu-1": "GPU-2"}, generation=4))
    new = replace(ITEM, device="GPU-2", decision=gate.UNKNOWN, state=State.HEALTHY)
    keeper.ask = lambda: (gate.Answer(decision=gate.UNKNOWN, devices=(new,)), "")
    assert keeper.turn(server.clock) == []
    keeper.ask = lambda: (gate.Answer(decision=gate.PASS, devices=(replace(new, decision=gate.PASS),)), "")
    assert keeper.turn(server.clock) == ["gpu-1: taint withdrawn, cuda:1, in its place, is healthy and proven"]


@pytest.mark.parametrize("decision", [gate.UNKNOWN, gate.FAIL])
def test_a_gpu_that_got_another_name_stays_tainted_as_it_was(server, account, decision):
    """The other GPU is lost and a reboot gave this one its name: work that it must not get would come at once."""
    keeper = writer(server, account, limits=Bounds(share=0.5, effect="NoExecute", step=0.0))
    for _ in range(3):
        keeper.turn(server.clock)
    assert server.tainted() == {"gpu-1": "NoExecute"}
    server.slices[:] = [published(NODE, {"gpu-0": "GPU-1"}, generation=2)]
    keeper.ask = lambda: (gate.Answer(decision=decision, devices=(replace(ITEM, decision=decision),)), "")
    keeper.turn(server.clock)
    assert server.tainted() == {"gpu-0": "NoExecute"}
    assert server.writes[-2:] == ["POST NoExecute", "DELETE"]


def test_the_token_goes_nowhere_else_and_a_broken_answer_ends_nothing(account):
    """A redirection is not followed, half an answer is an error of one turn, and no message holds the token."""
    asked = []

    class Broken(Handler):
        def respond(self) -> None:
            asked.append(self.path)
            status, length = (302, "0") if self.path == "/moved" else (200, "100")
            self.reply(status, headers={"Location": "/elsewhere", "Content-Length": length})

    with listening(Broken) as address:
        api = Api(address=f"http://{address}", account=account)
        for path in ("/moved", "/half"):
            with pytest.raises(ApiError):
                api.items(path)
        (account / "token").write_text("secret\nwords")
        with pytest.raises(ApiError) as refused:
            api.items("/half")
    assert asked == ["/moved", "/half"]
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("share", ["5", "-0.1"])
def test_a_share_is_a_part(share, monkeypatch, capsys):
    """Five per cent written as 5 would let every device go."""
    monkeypatch.setenv("NODE_NAME", NODE)
    with pytest.raises(SystemExit):
        taint.main(["--share", share])
    assert "0.05" in capsys.readouterr().err


def test_a_selector_with_an_empty_part_is_refused():
    """It would match many devices, or all."""
    for part in range(3):
        place = Selector(*("" if part == n else "x" for n in range(3)))
        with pytest.raises(ValueError, match="more than one device"):
            rule_for(place, NODE, ITEM)


def test_a_gpu_that_no_slice_has_is_said_and_not_guessed(server, account):
    """By its uuid alone: a slice of another node with the same name does not help."""
    server.slices[:] = [published("node-2", {"gpu-1": "GPU-1"})]
    assert writer(server, account).turn(server.clock) == [
        "cuda:1 faulty (hardware): a row: no ResourceSlice of node-1 has GPU-1"
    ]
    assert server.writes == []


def test_it_runs_as_a_process_of_its_own(server, account, tmp_path):
    """As the manifest starts it: silent where nothing is known."""
    (tmp_path / "canaryd.yaml").write_text(f"state_dir: {tmp_path / 'state'}\nenforcement: act\n")
    now = time.time()
    with Store.open(tmp_path / "state") as store:
        store.see_device(GPUS[1], now)
        store.add_ack(Ack(device="GPU-1", kind=AckKind.REPAIRED, at=now - 60, reason="reseated"))
        bad = Finding(rule="r", state=State.FAULTY, cause=Cause.HARDWARE, message="a row")
        told = {"device": "GPU-1", "state": State.FAULTY, "cause": Cause.HARDWARE, "findings": (bad,)}
        store.set_verdict(Verdict(**told, decided=now, since=now))
    words = ["--config", tmp_path / "canaryd.yaml", "--api", server.address, "--account", account, "--share", "0.5"]
    command = [sys.executable, "-m", "canaryd.action.taint", *map(str, words)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"NODE_NAME": NODE})
    try:
        eventually(lambda: server.tainted() == {"gpu-1": "None"})
    finally:
        process.terminate()
        process.wait(10)
