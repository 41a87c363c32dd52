"""Endpoints as devices: learnt, watched, judged apart from the devices behind them. Real engine, store and workers."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from canaryd.config.settings import Config, EndpointConfig, EndpointsConfig, ProbesConfig, ProbeSettings
from canaryd.engine import endpoints
from canaryd.engine.engine import Engine
from canaryd.model import Cause, Device, Finding, State, Verdict
from canaryd.store.store import Store
from tests.command import PROBES, canaryd, catalogue, configure
from tests.engines import ask, cpu, rules, start

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
GPUS = [Device(uuid=f"GPU-{i}", backend="cuda", index=i, model="H100") for i in range(2)]
URL = "http://127.0.0.1:9/v1"
CHAIN = {"checkpoint": "c1", "server": "s 1", "client": "generic 1"}
WORDS = ["so", "it", "was", "said", "and", "so", "it", "was", "sung"]


def vector(shift: float = 0.0, **fields):
    values = [shift - 0.1 * n for n in range(len(WORDS))]
    return {"digest": f"{shift:016.6f}", "tokens": WORDS, "values": values, "text": " ".join(WORDS), **fields}


class Host:
    """A host with its CPU and one endpoint, whose answers a file holds."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.answers = directory / "answers.json"
        self.path = configure(
            directory,
            "recalls",
            each={"recalls": {"settings": {"file": str(self.answers)}}},
            endpoints={name: {"url": URL, "model": "tiny"} for name in names or ("main",)},
            state_dir=str(directory / "state"),
        )
        text = (PROBES / "recalls.py").read_text().replace('backends=("cpu", "endpoint")', 'backends=("endpoint",)')
        (directory / "probes.d" / "recalls.py").write_text(text)
        self.say(vector())

    def say(self, *vectors, chain=None):
        self.answers.write_text(json.dumps({"cases": {"story": vectors}, "chain": chain or CHAIN}))

    def start(self) -> Engine:
        return start(self.path)


@pytest.fixture
def host(tmp_path):
    """Return a host that answers alike."""
    return Host(tmp_path)


def test_products_take_the_sizes_of_the_models_that_a_device_serves(tmp_path):
    """Unless the setting names others; a GGUF file has no config.json."""
    every = [CPU, *GPUS]
    directory, other = tmp_path / "qwen", tmp_path / "other"
    ends = {
        "a": EndpointConfig(url=URL, directory=directory, devices=("cuda:1",)),
        "b": EndpointConfig(url=URL, directory=other / "model.gguf"),
        "c": EndpointConfig(url="http://elsewhere:8000/v1", directory=other),
    }
    config = Config(endpoints=EndpointsConfig(each=ends))
    assert [endpoints.models(config, device, every) for device in every] == [
        {},
        {},
        {str(directory): 1},
        *[{}] * (len(GPUS) - 2),
    ]
    shared = EndpointConfig(url=URL, directory=directory, devices=("cuda:0", "cuda:1"))
    config = Config(endpoints=EndpointsConfig(each={"a": shared}))
    assert [endpoints.models(config, device, every) for device in GPUS[:2]] == [{str(directory): 2}] * 2


def test_products_and_attention_are_given_the_served_model(tmp_path):
    """Of the device that serves it, and no other probe; the probe's own setting wins."""
    ends = {"a": EndpointConfig(url=URL, directory=tmp_path / "qwen", devices=("cuda:1",))}
    own = ProbesConfig(each={"exact_matmul": ProbeSettings(settings={"shapes_of": ["/srv/own"]})})
    served = {"shapes_of": [str(tmp_path / "qwen")], "ranks": {str(tmp_path / "qwen"): 1}}
    for probes, wanted in ((ProbesConfig(), served), (own, {**served, "shapes_of": ["/srv/own"]})):
        config = Config(state_dir=tmp_path / "state", endpoints=EndpointsConfig(each=ends), probes=probes)
        engine = Engine(config, Store.open(tmp_path / "state"))
        engine.devices = {d.uuid: d for d in (CPU, *GPUS)}
        assert engine._settings_for("exact_matmul", GPUS[1]) == wanted
        assert engine._settings_for("exact_attention", GPUS[1]) == served
        assert engine._settings_for("exact_attention", GPUS[0]) == {}
        assert engine._settings_for("memory_sweep", GPUS[1]) == {}
        engine.store.close()


def test_the_first_run_learns_and_the_next_one_passes(host):
    """A baseline in one go, and a healthy endpoint that nobody takes for an accelerator."""
    engine = host.start()
    first, again = ask(engine)
    assert (first.baselining, again.baselining, again.trigger) == (True, False, "what was learnt is compared")
    assert rules(engine)["baseline-learning"].state is State.HEALTHY
    assert engine.verdict("endpoint:main").state is State.HEALTHY
    (second,) = ask(engine)
    assert not second.baselining
    assert engine.verdict("endpoint:main").state is State.HEALTHY
    assert engine.devices["endpoint:main"].detail["behind"] == "cpu:0"


def test_unknown_bits_are_confirmed_and_the_device_behind_is_tested(host):
    """Three re-runs in new workers, then the endpoint is a suspect; a restart of the daemon forgets nothing.

    The device keeps its own state, and is to be tested deeply at once.
    """
    catalogue(host.path.parent / "probes.d", "fails_under_load")  # one that can test the device
    engine = host.start()
    ask(engine)
    assert engine.experiments.retests(cpu(engine)) == []
    host.say(vector(0.01))
    runs = ask(engine)
    assert [bool(r.confirms) for r in runs] == [False, True, True, True]
    for known in (engine, host.start()):
        found = rules(known)["recording-departed"]
        assert (found.state, found.cause) == (State.SUSPECT, Cause.UNDETERMINED)
        behind = rules(known, cpu(known))["endpoint-departed"]
        assert behind.state is State.HEALTHY
        assert "endpoint:main, served by this device, gives wrong answers" in behind.message
        steps = [step for plan in known.experiments.retests(cpu(known)) for step in plan.steps]
        assert {(step.trigger, step.level) for step in steps} == {("endpoint:main departed", "deep")}


def test_a_faulty_device_behind_it_teaches_nothing(host):
    """What a broken machine answers is not learnt, whatever the endpoint itself looks like."""
    engine = host.start()
    uuid = cpu(engine)
    fault = Finding(rule="exact-mismatch", state=State.FAULTY, cause=Cause.HARDWARE, message="wrong")
    verdict = Verdict(
        device=uuid, state=State.FAULTY, cause=Cause.HARDWARE, findings=(fault,), decided=time.time(), since=0.0
    )
    engine.store.set_verdict(verdict)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "decide", dict)  # nothing wrong is in its runs: the verdict above would be taken back
        ask(engine)
    assert engine.store.baselines("endpoint:main") == []


def test_a_process_beside_it_sees_what_was_learnt(host):
    """A check learns while a daemon holds its own memory: known bits are known to both at once."""
    beside = host.start()
    ask(host.start())
    for run in beside.store.runs("endpoint:main"):
        beside.take(run)
    assert beside.verdict("endpoint:main").state is State.HEALTHY
    assert not beside._learning.lacks_baseline("endpoint:main", "recalls")


def test_a_changed_chain_is_learnt_at_once_and_accuses_nobody(host):
    """The same call runs again to learn; the old baseline is kept, the device behind is left alone."""
    engine = host.start()
    ask(engine)
    host.say(vector(0.5), chain=CHAIN | {"server": "s 2"})
    runs = ask(engine)
    assert [r.trigger for r in runs] == ["", "the chain changed", "what was learnt is compared"]
    assert rules(engine)["chain-changed"].state is State.HEALTHY
    assert "Changed: server (s 1 → s 2)." in rules(engine)["chain-changed"].evidence
    assert "endpoint-departed" not in rules(engine, cpu(engine))
    assert len(engine.store.baselines("endpoint:main")) == 2


def test_an_endpoint_that_is_not_configured_any_more_is_forgotten(host):
    """It never was a thing that could vanish."""
    ask(host.start())
    host.path.write_text(host.path.read_text().replace('"main": {', '"other": {'))
    engine = host.start()
    assert "endpoint:main" not in engine.devices
    assert "endpoint:other" in engine.devices


def test_check_and_status_show_it(host):
    """As a device of its own, with its own verdict and exit code."""
    done = canaryd("check", "--config", host.path, "--level", "quick", "--device", "endpoint:main", "--json")
    (device,) = done.document["devices"]
    assert (device["device"], device["backend"], device["state"]) == ("endpoint:main", "endpoint", "healthy")
    assert done.code == 0
    host.say(vector(0.01))
    done = canaryd("check", "--config", host.path, "--level", "quick", "--device", "endpoint:main")
    assert done.code == 2
    assert "recalls differs from its baseline (case story); it repeats in 3 retests." in " ".join(done.out.split())
    status = canaryd("status", "--config", host.path)
    assert "endpoint:main" in status.out


def test_that_it_is_judged_by_text_alone_is_told_everywhere(host, tmp_path):
    """By check, as text and as JSON, in the dossier, and in the list of baselines."""
    told = "Judged by text alone: no log probabilities in 1 of 1 case."
    host.say(vector(tokens=[], values=[]))
    done = canaryd("check", "--config", host.path, "--level", "quick", "--device", "endpoint:main", "--json")
    found = {f["rule"]: f["message"] for f in done.document["devices"][0]["findings"]}
    assert (done.code, found["recording-text-only"]) == (0, told)
    done = canaryd("check", "--config", host.path, "--level", "quick", "--device", "endpoint:main")
    assert told in " ".join(done.out.split())
    assert "tiny 1 recording, 0 differ from the baseline, " in " ".join(done.out.split()), "not: 0 results, 0 wrong"
    assert "bit-stable, text alone" in canaryd("baseline", "list", "--config", host.path).out
    document = canaryd("baseline", "list", "--json", "--config", host.path).document
    assert [b["text_only"] for b in document["baselines"]] == [True]
    report = canaryd("report", "endpoint:main", "-o", tmp_path / "case", "--config", host.path)
    assert report.code == 0, report.err
    pages = [p.read_text() for p in (tmp_path / "case").rglob("*.html")]
    assert any("Judged by text alone" in page for page in pages)


ACCEPTED = "endpoint:main recalls story: 1 result accepted\nthe next run updates the verdict\n"


def test_an_operator_can_accept_another_model(host):
    """No vector is taken then; what was learnt is what was meant."""
    engine = host.start()
    ask(engine)
    host.say(vector(0.5), chain=CHAIN | {"checkpoint": "c2"})
    ask(engine)
    assert engine.verdict("endpoint:main").state is State.UNKNOWN
    done = canaryd("baseline", "accept", "endpoint:main", "--reason", "deployed v2", "--config", host.path)
    assert "accepted with its changed model or software" in done.out
    assert engine.verdict("endpoint:main").state is State.HEALTHY


def test_an_operator_can_accept_what_is_new(host):
    """With a reason, which is kept; then the same bits are known, and the old ones still are."""
    engine = host.start()
    ask(engine)
    host.say(vector(0.01))
    ask(engine)
    listed = canaryd("baseline", "list", "--config", host.path)
    assert "endpoint:main  recalls  story  1        30 of 30  bit-stable" in listed.out
    refused = canaryd("baseline", "accept", "endpoint:main", "--config", host.path)
    assert (refused.code, "--reason" in refused.err) == (64, True)
    done = canaryd("baseline", "accept", "endpoint:main", "--reason", "moved to node 7", "--config", host.path)
    assert (done.code, done.out) == (0, ACCEPTED)
    again = host.start()
    assert set(rules(again)) == set()
    assert again.verdict("endpoint:main").state is State.HEALTHY
    document = canaryd("baseline", "export", "--config", host.path).document
    assert [(len(b["known"]), b["accepted"]) for b in document["baselines"]] == [(2, "moved to node 7")]
    nothing = canaryd("baseline", "accept", "cpu:0", "--reason", "x", "--config", host.path)
    assert "nothing to accept" in nothing.out


def test_baselines_survive_a_full_disk(host, monkeypatch):
    """What cannot be written waits in memory, is part of every answer, and moves to disk later."""
    engine = host.start()
    ask(engine)
    (known,) = engine.store.baselines("endpoint:main")
    other = dataclasses.replace(known, case="other")
    monkeypatch.setattr(engine.store, "commit", full_disk)
    assert not engine.store.set_baselines([other])
    assert {b.case for b in engine.store.baselines()} == {"story", "other"}
    monkeypatch.undo()
    assert engine.store.set_baselines([])
    with Store.open(engine.store.state_dir) as store:
        assert {b.case for b in store.baselines()} == {"story", "other"}


def full_disk(*_):
    raise OSError(28, "No space left on device")
