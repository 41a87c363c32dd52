"""Load and pauses between trials: as long as they should be, nowhere but where they should be, and told afterwards."""

import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.engine import schedule
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.facts import Reading
from canaryd.judge import case, node
from canaryd.judge.verdict import decide
from canaryd.model import INTENSITIES, Device, Outcome, State
from canaryd.probe import Context, ProbeSpec
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from canaryd.worker.numeric import stress, tensors
from canaryd.worker.numeric.stack import cpu

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

PROBE = Path(__file__).resolve().parents[2] / "probes" / "fails_under_load.py"
SLACK = 0.6
"""Seconds by which a busy machine may be late: one look for the size of the load, one product, one sleep."""


def paced(intensity, budget=2.0):
    """A context with its pace, and what tells about it afterwards."""
    ctx = Context(device=cpu(), level="quick", seed=1, budget=budget, intensity=intensity)
    return ctx, stress.install(ctx)


def told(facts):
    return {fact.name: fact.value for fact in facts() if isinstance(fact, Reading)}


def lasts(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.parametrize("intensity", ["steady", "pulsed"])
def test_load_comes_before_the_first_trial_and_between_groups_of_them(intensity):
    """A quarter of a short budget at first; nothing while the trials have their turn; then load again."""
    ctx, facts = paced(intensity, budget=4.0)
    assert 1.0 * 0.9 <= lasts(ctx.pace) <= 1.0 + SLACK
    assert lasts(ctx.pace) < 0.05
    before = told(facts)["load_seconds"]
    time.sleep(stress.GROUP[intensity])
    assert stress.LOAD * 0.9 <= lasts(ctx.pace) <= stress.LOAD + SLACK
    assert told(facts)["load_seconds"] > before
    assert told(facts)["load_speed"] > 1e6


def test_steady_load_does_not_pause_and_pulsed_load_does():
    """Time between the trials is all load, or load and pauses in turn."""
    seconds = {}
    for intensity in ("steady", "pulsed"):
        ctx, facts = paced(intensity)
        ctx.pace()
        seconds[intensity] = told(facts)
    assert seconds["steady"]["pause_seconds"] == 0.0
    assert seconds["steady"]["load_duty"] > 0.1  # the machine may be busy with other things
    assert seconds["pulsed"]["pause_seconds"] >= stress.PULSE  # a busy machine makes bursts longer, so fewer
    assert seconds["pulsed"]["load_seconds"] >= stress.PULSE


@pytest.mark.parametrize("intensity", stress.GROUP)
def test_nothing_runs_past_the_deadline(intensity):
    """What is left of the budget bounds every load and every pause; a spent one leaves none."""
    ctx, facts = paced(intensity, budget=30.0)
    ctx.deadline = ctx.clock() + 0.3
    assert lasts(ctx.pace) <= 0.3 + SLACK
    ctx.deadline = ctx.clock()
    time.sleep(stress.GROUP[intensity])
    before = told(facts)
    assert lasts(ctx.pace) < 0.05
    assert told(facts)["load_seconds"] == before["load_seconds"]
    assert told(facts)["pause_seconds"] == before["pause_seconds"]


@pytest.mark.skipif(len(tensors.visible_cores()) < 2 or not tensors.can_pin(), reason="needs two cores to choose from")
def test_load_runs_on_all_cores_while_the_trials_stay_pinned():
    """Within a pinned block the load leaves the core, and afterwards thread count and core are what they were."""
    ctx, _ = paced("steady")
    cores, main, seen, over = set(tensors.visible_cores()), threading.get_native_id(), [], threading.Event()

    def look():
        while not over.wait(0.01):
            seen.append(os.sched_getaffinity(main))

    threads = torch.get_num_threads()
    with tensors.on_core(max(cores)):
        watcher = threading.Thread(target=look)
        watcher.start()
        ctx.pace()
        over.set()
        watcher.join()
        assert os.sched_getaffinity(0) == {max(cores)}
        assert torch.get_num_threads() == 1
    assert cores in seen
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


def test_retests_find_what_confirmations_do_not():
    """A device wrong only when hot: three confirmations are clean and it stays suspect; two retests show it again."""
    device = Device(uuid="CPU-test", backend="cpu", index=0, model="a processor")
    spec = ProbeSpec(name=PROBE.stem, summary="x", budget={"quick": 0.2, "standard": 0.5, "deep": 1.0})
    entry = Entry(spec=spec, file=ProbeFile(name=PROBE.stem, path=PROBE, source="directory"))
    policy, now, runs = JudgePolicy(), 1_700_000_000.0, []

    def carry_out(plan, **settings):
        nonlocal now
        (step,) = plan.steps
        request = RunRequest(
            probe_path=PROBE,
            spec=spec,
            device=device,
            level=step.level,
            seed=step.seed,
            cases=step.cases,
            confirms=step.confirms,
            intensity=step.intensity,
            settings=settings,
            budget=spec.budget[step.effort],
        )
        run = series.run(request, 60.0)
        assert run.outcome is Outcome.COMPLETED, run.detail
        now += 10.0
        runs.append(dataclasses.replace(run, started=now))
        return runs[-1]

    def state():
        among = node.node({device.uuid: device}, {device.uuid: runs}, now)
        verdict = decide(case.Case(device=device, node=among, wanted={}, policy=policy, now=now))
        return max((f.state for f in verdict.findings if f.probe == spec.name), key=lambda s: s.severity)

    with Series(WorkerSpec(), grace=0.5) as series:
        (first,) = schedule.plan_round(device, [entry], levels={spec.name: "quick"}, seed=7, sets=("",))
        mismatch = carry_out(first, serving=True)
        again = [carry_out(plan) for plan in schedule.confirmations(mismatch, entry, device, [], 3)]
        assert [bool(run.wrong) for run in (mismatch, *again)] == [True, False, False, False]
        assert state() is State.SUSPECT
        now += policy.repeat_gap
        ((called, first_asked),) = schedule.retests_due(runs, policy, now)
        assert (called.id, first_asked) == (mismatch.id, "repeated")
        found = {}
        for intensity in INTENSITIES:
            now += policy.repeat_gap
            (plan,) = schedule.retests(called, intensity, {spec.name: entry}, device, seed=8)
            found[intensity] = carry_out(plan)
    assert {name for name, run in found.items() if run.wrong} == {"steady", "pulsed"}
    assert state() is State.FAULTY
    steady = found["steady"]
    assert (steady.intensity, steady.confirms, steady.trigger) == ("steady", "", "")
    assert steady.repro.endswith("--seed 7 --level quick --intensity steady")
    assert {r.name for r in steady.readings} == {"load_seconds", "pause_seconds", "load_duty", "load_speed"}
    assert found["repeated"].readings == ()
