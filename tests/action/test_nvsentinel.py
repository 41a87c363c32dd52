"""NVSentinel is told of transitions alone: a real gRPC server on a Unix socket, and events decoded by protobuf."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace

import pytest

from canaryd.action.nvsentinel import AGENT, CALL, CHECK, LONGEST, Emitter
from canaryd.action.watch import QUESTION
from canaryd.config import load
from canaryd.config.settings import Config
from canaryd.model import Cause, Device, Finding, State, Verdict
from canaryd.report import gate, proof
from canaryd.report.proof import Decision, Proof, Proved
from canaryd.store.store import Store
from tests.command import ROOT, canaryd, configure, eventually

grpc = pytest.importorskip("grpc", reason="NOT TESTED: grpcio is not here")
pb = pytest.importorskip("google.protobuf.descriptor_pb2", reason="NOT TESTED: protobuf is not here")
NODE = "node-1"
FIELDS = {
    "Stamp": [("seconds", 1, "int64"), ("nanos", 2, "int32")],
    "Entity": [("entityType", 1, "string"), ("entityValue", 2, "string")],
    "HealthEvent": [
        ("version", 1, "uint32"),
        ("agent", 2, "string"),
        ("componentClass", 3, "string"),
        ("checkName", 4, "string"),
        ("isFatal", 5, "bool"),
        ("isHealthy", 6, "bool"),
        ("message", 7, "string"),
        ("recommendedAction", 8, "uint32"),
        ("errorCode", 9, "string*"),
        ("entitiesImpacted", 10, "Entity*"),
        ("generatedTimestamp", 12, "Stamp"),
        ("nodeName", 13, "string"),
        ("processingStrategy", 16, "uint32"),
        ("id", 17, "string"),
        ("customRecommendedAction", 18, "string"),
    ],
    "HealthEvents": [("version", 1, "uint32"), ("events", 2, "HealthEvent*")],
}
"""Messages of NVSentinel: name, number and type of each field; "*" repeats."""
RUN_FIELDDIAG, CONTACT_SUPPORT, EXECUTE, STORE_ONLY = 6, 5, 1, 2
ITEM = gate.Item(
    device="GPU-1", name="cuda:1", state=State.FAULTY, cause=Cause.HARDWARE, finding="a row", decision=gate.FAIL
)
SUSPECT = replace(ITEM, state=State.SUSPECT, cause=Cause.UNDETERMINED, decision=gate.PASS)
UNKNOWN = replace(ITEM, state=State.UNKNOWN, cause=Cause.UNDETERMINED, decision=gate.UNKNOWN)
SOUND = replace(ITEM, state=State.HEALTHY, cause=Cause.NONE, finding="", decision=gate.PASS)
UNPROVEN = replace(SOUND, decision=gate.UNKNOWN, why="nothing was proven here; type canaryd prove")


def reader():
    """Return the class of `HealthEvents`, made from its description."""
    from google.protobuf import descriptor_pool, message_factory

    file = pb.FileDescriptorProto(name="events.proto", package="datamodels", syntax="proto3")
    kinds = {name: getattr(pb.FieldDescriptorProto, f"TYPE_{name.upper()}") for name in ("bool", "string", "uint32")}
    kinds |= {name: getattr(pb.FieldDescriptorProto, f"TYPE_{name.upper()}") for name in ("int32", "int64")}
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            added = message.field.add(name=field, number=number, label=3 if kind.endswith("*") else 1)
            added.type = kinds.get(kind.rstrip("*"), pb.FieldDescriptorProto.TYPE_MESSAGE)
            if added.type == pb.FieldDescriptorProto.TYPE_MESSAGE:
                added.type_name = f".datamodels.{kind.rstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("datamodels.HealthEvents"))


class Connector:
    """NVSentinel's platform connector, as far as publishers see it."""

    def __init__(self, path) -> None:
        self.path, self.events, self.calls, self.kind = path, [], 0, reader()
        self.address = f"unix://{path}"

    def taken(self, body: bytes, _context: object) -> bytes:
        read = self.kind.FromString(body)
        assert read.SerializeToString(deterministic=True) == body, "as protobuf itself would encode it"
        self.calls += 1
        self.events += read.events
        return b""

    @contextlib.contextmanager
    def serving(self) -> Iterator[Connector]:
        service, method = CALL.strip("/").split("/")
        methods = {method: grpc.unary_unary_rpc_method_handler(self.taken)}
        handlers = [grpc.method_handlers_generic_handler(service, methods)]
        server = grpc.server(futures.ThreadPoolExecutor(2), handlers=handlers)
        assert server.add_insecure_port(self.address)
        server.start()
        try:
            yield self
        finally:
            server.stop(0).wait()

    @property
    def told(self) -> list[tuple[str, bool, bool, int, int]]:
        """Device, fatal, healthy, recommended action and strategy of each event."""
        return [
            (e.entitiesImpacted[0].entityValue, e.isFatal, e.isHealthy, e.recommendedAction, e.processingStrategy)
            for e in self.events
        ]


@pytest.fixture
def connector(tmp_path) -> Iterator[Connector]:
    with Connector(tmp_path / "s").serving() as made:
        yield made


def answer(*items: gate.Item) -> gate.Answer:
    decisions = {item.decision for item in items}
    return gate.Answer(
        decision=next(d for d in (gate.FAIL, gate.UNKNOWN, gate.PASS) if d in decisions), devices=tuple(items)
    )


def emitter(connector, tmp_path, *, remembers: bool = True) -> Emitter:
    if remembers:
        (tmp_path / "told").write_text("{}")
    return Emitter(node=NODE, ask=lambda: (answer(ITEM), ""), socket=connector.address, memory=tmp_path / "told")


def turns(made: Emitter, *items: gate.Item, silence: str = "") -> list[str]:
    return [line for item in items for line in asked(made, answer(item), silence)]


def asked(made: Emitter, found: gate.Answer, silence: str = "") -> list[str]:
    made.ask = lambda: (found, silence)
    return made.turn(1_800_000_000.5)


def proven(state_dir, device: str, at: float) -> None:
    sound = {"decision": Decision.PROVEN, "state": State.HEALTHY, "cause": Cause.NONE, "results": 1, "wrong": 0}
    proved = Proved(device=device, name="cuda:1", **sound)
    made = Proof(canaryd="x", started=at, seconds=1, loaded=1, decision=Decision.PROVEN, devices=(proved,))
    proof.keep(made, state_dir)


def test_a_confirmed_fault_is_fatal_and_ends_with_a_proof(connector, tmp_path):
    """From the stored verdict through the gate, every field of the event."""
    settings = replace(Config(), state_dir=tmp_path / "state", enforcement="act")
    now = time.time()
    made = emitter(connector, tmp_path)
    made.ask = lambda: (gate.ask(settings, QUESTION), gate.silenced(settings, {}))

    def judged(state: State, cause: Cause) -> None:
        bad = () if state is State.HEALTHY else (Finding(rule="r", state=state, cause=cause, message="a row"),)
        store.set_verdict(Verdict(device="GPU-1", state=state, cause=cause, findings=bad, decided=now, since=now))

    with Store.open(settings.state_dir) as store:
        store.see_device(Device(uuid="GPU-1", backend="cuda", index=1, model="NVIDIA H200"), now)
        judged(State.HEALTHY, Cause.NONE)
        assert made.turn(now) == []
        judged(State.SUSPECT, Cause.UNDETERMINED)
        made.turn(now)
        judged(State.FAULTY, Cause.HARDWARE)
        assert made.turn(now) == ["sent: fatal: cuda:1 faulty (hardware): a row"]
        event = connector.events[-1]
        assert (event.version, event.agent, event.componentClass, event.checkName) == (1, AGENT, "GPU", CHECK)
        assert (event.message, event.nodeName) == ("cuda:1 faulty (hardware): a row", NODE)
        assert event.generatedTimestamp.seconds == int(now)
        (entity,) = event.entitiesImpacted
        assert (entity.entityType, entity.entityValue) == ("GPU_UUID", "GPU-1")
        judged(State.HEALTHY, Cause.NONE)
        assert made.turn(now) == [], "healthy is not proven"
    proven(settings.state_dir, "GPU-1", now)
    assert made.turn(now) == ["sent: healthy: cuda:1 healthy"]
    assert connector.told == [
        ("GPU-1", False, False, 0, STORE_ONLY),
        ("GPU-1", True, False, RUN_FIELDDIAG, EXECUTE),
        ("GPU-1", False, True, 0, EXECUTE),
    ]


def test_a_thousand_updates_of_one_fault_are_one_event(connector, tmp_path):
    """The counts of a fault change with every run; a restart tells nothing again either."""
    made = emitter(connector, tmp_path)
    for n in range(1000):
        turns(made, replace(ITEM, finding=f"{n} wrong"))
    turns(Emitter(node=NODE, ask=made.ask, socket=connector.address, memory=made.memory), ITEM, UNKNOWN, ITEM)
    assert connector.calls == len(connector.events) == 1


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([SUSPECT, UNPROVEN], [("GPU-1", False, False, 0, STORE_ONLY), ("GPU-1", False, True, 0, STORE_ONLY)]),
        ([ITEM, SUSPECT, UNKNOWN, UNPROVEN], [("GPU-1", True, False, RUN_FIELDDIAG, EXECUTE)]),
        ([replace(ITEM, cause=Cause.SOFTWARE, decision=gate.PASS)], [("GPU-1", False, False, 0, STORE_ONLY)]),
        ([replace(ITEM, cause=Cause.ENVIRONMENT)], [("GPU-1", False, False, 0, STORE_ONLY)]),
        ([replace(SOUND, state=State.DEGRADED), UNKNOWN, SOUND], []),
        ([replace(SUSPECT, device="endpoint:main", name="endpoint:main")], []),
        ([replace(ITEM, device="CPU-1", name="cpu:0")], [("CPU-1", True, False, CONTACT_SUPPORT, EXECUTE)]),
    ],
    ids=["suspicion-clears", "only-a-proof", "software", "environment", "nothing", "server", "processor"],
)
def test_only_confirmed_hardware_is_fatal(connector, tmp_path, items, expected):
    """Suspicion is only stored, and what is unknown clears nothing."""
    turns(emitter(connector, tmp_path), *items)
    assert connector.told == expected


def test_it_only_logs_until_it_may_act(connector, tmp_path):
    """By default, and while the switch is on; what was not sent is sent afterwards, and what was is not taken back."""
    silence = "enforcement is log (default)"
    made = emitter(connector, tmp_path)
    assert turns(made, ITEM, ITEM, silence=silence) == [f"would send: cuda:1 fatal (log only: {silence})"]
    assert connector.told == []
    turns(made, ITEM)
    turns(made, ITEM, SOUND, silence="/etc/canaryd/no-enforcement exists")
    assert [told[:3] for told in connector.told] == [("GPU-1", True, False)]


def test_what_was_not_delivered_is_sent_again(connector, tmp_path):
    """While NVSentinel is away, one line says so. When it is back, it gets the event with the time of sending."""
    made = emitter(connector, tmp_path)
    made.socket = f"unix://{tmp_path}/away"
    said = turns(made, ITEM, ITEM)
    assert len(said) == 1
    assert said[0].startswith(f"nothing is changed: unix://{tmp_path}/away: UNAVAILABLE")
    made.socket = connector.address
    turns(made, ITEM)
    assert connector.events[0].generatedTimestamp.seconds == 1_800_000_000
    assert json.loads(made.memory.read_text()) == {"GPU-1": "fatal"}


@pytest.mark.parametrize("kept", [None, "", "[]", '{"GPU-1": "ill"}'])
def test_where_nothing_is_remembered_a_proof_is_told_once(connector, tmp_path, kept):
    """An event of before may stand: only a healthy and proven device ends it."""
    if kept is not None:
        (tmp_path / "told").write_text(kept)
    made = emitter(connector, tmp_path, remembers=False)
    turns(made, UNPROVEN, UNKNOWN, SOUND, SOUND)
    assert connector.told == [("GPU-1", False, True, 0, EXECUTE)]


def test_a_part_that_is_gone_ends_when_all_others_are_proven(connector, tmp_path):
    """`ack --replaced` retires it; where the record is lost with it, nothing is known, and nothing ends."""
    made, other = emitter(connector, tmp_path), replace(SOUND, device="GPU-2")
    turns(made, ITEM, replace(UNPROVEN, device="GPU-2"))
    asked(made, gate.Answer(decision=gate.UNKNOWN, reason="no device has been tested yet"))
    assert len(connector.told) == 1
    assert turns(made, other) == ["sent: healthy: GPU-1 is gone; 1 device here, healthy and proven"]
    assert connector.told[-1] == ("GPU-1", False, True, 0, EXECUTE)


def test_a_message_fits_into_a_condition_of_the_node(connector, tmp_path):
    """Which is limited, and split at each ";": a part without the device's name would never be removed."""
    turns(emitter(connector, tmp_path), replace(ITEM, finding="wörter; " * 200))
    assert 0.9 * LONGEST < len(connector.events[0].message) <= LONGEST
    assert ";" not in connector.events[0].message


def test_a_memory_that_cannot_be_kept_is_said(connector, tmp_path):
    """The event is sent all the same, once."""
    made = emitter(connector, tmp_path)
    made.memory = tmp_path / "none/told"
    said = turns(made, ITEM, ITEM)
    assert (
        said[-1] == f"{made.memory} cannot be written: No such file or directory; after a restart events are sent again"
    )
    assert connector.calls == 1


def test_a_drill_is_no_event(connector, tmp_path):
    """Caught, and nothing becomes of it."""
    config = configure(tmp_path, "records", enforcement="act")
    words = ("--config", config, "--state-dir", tmp_path / "state")
    canaryd("check", *words)
    assert canaryd("drill", "--probe", "records", *words).code == 2
    settings = replace(load.load(config), state_dir=tmp_path / "state")
    made = emitter(connector, tmp_path)
    found = gate.ask(settings, QUESTION)
    assert found.devices
    assert asked(made, found) == []
    assert connector.calls == 0


def test_it_runs_as_a_process_of_its_own(connector, tmp_path):
    """As the manifest starts it; it asks the gate again after it has spoken gRPC."""
    (tmp_path / "canaryd.yaml").write_text(f"state_dir: {tmp_path / 'state'}\nenforcement: act\n")
    now = time.time()
    words = ["--config", tmp_path / "canaryd.yaml", "--socket", connector.address, "--memory", tmp_path / "told"]
    command = [sys.executable, "-m", "canaryd.action.nvsentinel", *map(str, words), "--every", "0.2"]
    with Store.open(tmp_path / "state") as store:
        store.see_device(Device(uuid="GPU-1", backend="cuda", index=1, model="NVIDIA H200"), now)
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"NODE_NAME": NODE})
        try:
            for number, state in enumerate((State.SUSPECT, State.FAULTY, State.HEALTHY), 1):
                if state is State.HEALTHY:
                    proven(tmp_path / "state", "GPU-1", now)
                cause = Cause.NONE if state is State.HEALTHY else Cause.HARDWARE
                bad = () if state is State.HEALTHY else (Finding(rule="r", state=state, cause=cause, message="a row"),)
                told = {"device": "GPU-1", "state": state, "cause": cause, "findings": bad}
                store.set_verdict(Verdict(**told, decided=now, since=now))
                eventually(lambda number=number: len(connector.events) == number)
        finally:
            process.terminate()
            process.wait(10)
    assert [told[1:3] for told in connector.told] == [(False, False), (True, False), (False, True)]
