"""`canaryd prove`: proven, refused and not proven; real processes, and faults that show only under load or late."""

import json
import subprocess

import pytest

from canaryd.cli.prove import _proof
from canaryd.engine.check import Result
from canaryd.engine.prove import LOADS
from canaryd.facts import Comparison, Exactness
from canaryd.model import Cause, Device, Finding, Outcome, Run, State, Verdict
from canaryd.report.proof import Decision
from tests.command import canaryd, configure

FAULTY = """
import time
from pathlib import Path
from canaryd.probe import Comparison, Evidence, Exactness, Place, ProbeSpec, Span

SPEC = ProbeSpec(name="faulty", summary="Wrong as told", numeric=False,
    budget=dict.fromkeys(["quick", "standard", "deep"], 0.2))
EVIDENCE = Evidence(wrong=1, total=4, first=(((0, 1), "3f800000", "3f800001"),), bits={"0": 1}, zeroed=0, nonfinite=0,
    lines={"row": Span(first=0, last=0, distinct=1)}, pattern="one bit")

def run(ctx):
    begun = Path(__file__).with_suffix(".begun")
    begun.exists() or begun.touch()
    for core in (0, 1):
        wrong = bool(WRONG)
        yield Comparison(case="only", shape="M=2 N=2", seed=ctx.seed, exactness=Exactness.UNIVERSAL, trials=4,
            place=Place(unit="core", numbers=(core,)), wrong_trials=int(wrong), evidence=EVIDENCE if wrong else None)
"""
COMMON = ("--wait", "5s")


def prove(tmp_path, wrong, *words, names=()):
    config = configure(tmp_path, *names, enforcement="act")
    (tmp_path / "probes.d/faulty.py").write_text(FAULTY.replace("WRONG", wrong))
    answer = canaryd("prove", "--for", "6s", *words, *COMMON, "--config", config, "--state-dir", tmp_path / "state")
    kept = tmp_path / "state/proof.json"
    assert kept.exists(), answer
    return answer, json.loads(kept.read_text())


def gate(tmp_path, *words):
    return canaryd("gate", *words, "--config", tmp_path / "canaryd.yaml", "--state-dir", tmp_path / "state")


def test_a_healthy_node_is_proven_and_the_gate_knows_it(tmp_path):
    """Tested cold, under both loads and hot; a repair after it makes the proof void."""
    answer, kept = prove(tmp_path, "False")
    assert answer.code == 0, answer
    assert answer.out.startswith("proven: 1 device, "), answer.out
    assert kept["decision"] == "proven"
    (device,) = kept["devices"]
    assert (device["wrong"], all(device["under_load"].values()), {*device["under_load"]}) == (
        0,
        True,
        {"steady", "pulsed"},
    )
    assert kept["loaded"] >= 5
    assert "pass" in gate(tmp_path, "--proven").out
    words = ("--config", tmp_path / "canaryd.yaml", "--state-dir", tmp_path / "state")
    assert canaryd("ack", "cpu:0", "--repaired", "--reason", "new board", *words).code == 0
    assert canaryd("check", "--level", "quick", *words).code == 0
    assert "pass" in gate(tmp_path).out
    assert "unknown: cpu:0 healthy: it was repaired after the newest proof" in gate(tmp_path, "--proven").out


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("ctx.intensity == 'steady'", id="only-under-full-load"),
        pytest.param("time.time() - begun.stat().st_mtime > 3", id="only-after-a-while"),
        pytest.param("core == 1", id="only-on-one-core"),
    ],
)
def test_a_fault_is_refused(tmp_path, wrong):
    """Whenever it shows: exit status 2, and the line names it."""
    answer, kept = prove(tmp_path, wrong)
    assert (answer.code, kept["decision"]) == (2, "refused"), answer
    assert answer.out.startswith(("refused: cpu:0 faulty", "refused: cpu:0 suspect")), answer.out
    assert "Wrong results in faulty" in answer.out or "wrong results in faulty" in answer.out


def test_what_could_not_run_is_not_proven(tmp_path):
    """A probe that crashes: exit status 3, with the reason."""
    answer, kept = prove(tmp_path, "False", names=["crashes"])
    assert (answer.code, kept["decision"]) == (3, "not proven"), answer
    assert answer.out.startswith("not proven: cpu:0 unknown"), answer.out


def test_a_proof_that_is_cut_short_leaves_none(tmp_path):
    """Killed, or on a full disk: an older proof does not stand for what was not shown again."""
    answer, _ = prove(tmp_path, "False")
    assert answer.code == 0, answer
    words = ("--config", tmp_path / "canaryd.yaml", "--state-dir", tmp_path / "state")
    with pytest.raises(subprocess.TimeoutExpired):
        canaryd("prove", "--for", "5m", *words, timeout=10)
    assert "nothing was proven here" in gate(tmp_path, "--proven").out
    assert "fail: cpu:0 healthy: nothing was proven here" in gate(tmp_path, "--proven", "--on", "unknown").out


def test_the_gate_knows_no_proof_before_one(tmp_path):
    """What was never proven is unknown to `gate --proven`."""
    config = configure(tmp_path, "passes", enforcement="act")
    words = ("--config", config, "--state-dir", tmp_path / "state")
    assert canaryd("check", *words).code == 0
    answer = gate(tmp_path, "--proven")
    assert (answer.code, "nothing was proven here; type canaryd prove" in answer.out) == (3, True), answer


@pytest.mark.parametrize("strict", [False, True])
def test_a_degraded_device_is_proven_with_a_note_unless_asked(strict):
    """Slow is not wrong: who wants to refuse it says so."""
    device = Device(uuid="GPU-1", backend="cuda", index=1, model="NVIDIA H200")
    slow = Finding(rule="throttled", state=State.DEGRADED, cause=Cause.ENVIRONMENT, message="It throttles.")
    told = {"state": State.DEGRADED, "cause": Cause.ENVIRONMENT, "findings": (slow,)}
    right = Comparison(case="c", shape="N=4", seed=1, exactness=Exactness.UNIVERSAL, trials=4)
    common = {"device": "GPU-1", "probe": "p", "probe_version": 1, "started": 1.0, "seconds": 1.0}
    results = [
        Result(
            level="quick",
            started=1.0,
            devices=[device],
            verdicts={"GPU-1": Verdict(device="GPU-1", decided=1.0, since=1.0, **told)},
            runs={"GPU-1": [Run(id=load, outcome=Outcome.COMPLETED, comparisons=(right,), intensity=load, **common)]},
        )
        for load in LOADS
    ]
    found = _proof(results, [device], 1.0, strict=strict)
    assert found.decision is (Decision.REFUSED if strict else Decision.PROVEN)
    assert str(found).startswith("refused: cuda:1 degraded (environment)" if strict else "proven: 1 device, 8 results")
    assert "cuda:1 degraded (environment): " in str(found)
