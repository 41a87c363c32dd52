"""Stores, devices and verdicts as tests of `canaryd status` make them."""

import json
from dataclasses import replace

import jsonschema

from canaryd.config.settings import Config
from canaryd.engine.check import ONLY
from canaryd.facts import Comparison, Evidence, Exactness
from canaryd.model import Ack, Cause, Device, Finding, Outcome, Run, State, Verdict
from canaryd.report import status
from canaryd.report.status_text import as_json as status_json
from tests.command import ROOT

NOW = 1_790_000_000.0
GPU = Device(uuid="GPU-1", backend="cuda", index=3, model="NVIDIA H200")
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor")
SCHEMA = json.loads((ROOT / "docs/status.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def verdict(state, cause, *messages, decided=NOW - 60):
    found = tuple(Finding(rule="a-rule", state=state, cause=cause, message=m) for m in messages)
    return Verdict(device=GPU.uuid, state=state, cause=cause, findings=found, decided=decided, since=NOW - 7200)


def ask(store, now=NOW, config=None):
    found = status.gather(store, config or Config(), now)
    VALIDATOR.validate(json.loads(json.dumps(status_json(found))))
    return found


def beside(store, *told, daemon=True):
    """Return the status of cuda:0, cuda:1 … with these states and causes, as a running daemon sees it."""
    for index, (state, cause) in enumerate(told):
        device = replace(GPU, uuid=f"GPU-{index}", index=index)
        store.see_device(device, NOW)
        found = Finding(rule="a-rule", state=state, cause=cause, message="a reason", action="Mend it")
        listed = () if state is State.HEALTHY else (found,)
        store.set_verdict(replace(verdict(state, cause), device=device.uuid, findings=listed))
    return replace(ask(store), daemon=daemon)


H, S, E, U, X = Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.UNDETERMINED, Cause.HARNESS


def acknowledge(store, at=NOW - 10, until=NOW + 600, rules=("exact-mismatch",), **more):
    given = {"device": GPU.uuid, "kind": "acknowledged", "at": at, "reason": "RMA 7", "by": "anna"}
    store.add_ack(Ack(**given | {"until": until, "rules": rules} | more))


def mismatch(number, **more):
    """Return a run that was wrong, stored when it started."""
    bits = Evidence(wrong=1, total=9, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one")
    seen = Comparison(case="bf16", shape="M=1", seed=1, exactness=Exactness.UNIVERSAL, wrong_trials=1, evidence=bits)
    return run(number, comparisons=(seen,), **more)


def run(number, **what):
    base = {"id": f"{number:012x}-aaaaaa", "device": GPU.uuid, "probe": "exact", "probe_version": 1, "seconds": 1.0}
    return Run(**base | {"started": NOW - 1000 + number, "outcome": Outcome.COMPLETED} | what)


def on_record(store, *, level="quick", probes=("exact_matmul", *ONLY), state=State.HEALTHY):
    """Return the status of a node whose GPU ran these probes at a level."""
    store.see_device(GPU, NOW)
    cause = Cause.NONE if state is State.HEALTHY else Cause.HARDWARE
    store.set_verdict(verdict(state, cause, *([] if state is State.HEALTHY else ["a fault"])))
    for number, probe in enumerate(probes):
        run = Run(
            id=f"r{number}",
            device=GPU.uuid,
            probe=probe,
            probe_version=1,
            started=NOW - 60,
            seconds=1.0,
            outcome=Outcome.COMPLETED,
            level=level,
        )
        store.add_run(run)
    return ask(store)
