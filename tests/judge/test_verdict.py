"""The judge: each rule from both sides, properties that must hold for any history, and that no rule is idle."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.facts import Doubt, Subject
from canaryd.judge.device_errors import REPEATS
from canaryd.judge.verdict import exit_code, fault_rate_bound, worst
from canaryd.model import Cause, Outcome, State, Verdict
from tests.judge.made import (
    CPU,
    FAULTY,
    GPU,
    HEALTHY,
    HOUR,
    MINUTE,
    NOW,
    OTHER_STACK,
    STACK,
    SUSPECT,
    TWIN,
    UNKNOWN,
    ages,
    ask,
    comparisons,
    device,
    fresh,
    message,
    mismatches,
    right,
    rules,
    run,
    wrong,
)
from tests.judge.scenarios import SCENARIOS
from tests.places import place


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    """Each history gets the state, the cause and exactly the findings that the table says."""
    verdict, state, cause, spoken = SCENARIOS[name]()
    assert (verdict.state, verdict.cause, rules(verdict)) == (state, cause, spoken), verdict.findings


# --- Since, exit codes, bounds ---------------------------------------------------------------------------------------


def test_since_stays_while_state_and_cause_stay():
    """`since` is inherited only from a verdict of the same state and cause."""
    first = ask(run(60, wrong()))
    assert (first.since, first.decided) == (NOW, NOW)
    again = ask(run(60, wrong()), previous=first, now=NOW + 10)
    assert (again.since, again.decided) == (NOW, NOW + 10)
    blamed = ask(run(60, wrong()), previous=again, now=NOW + 20, peers=[(TWIN, [run(60, right(), of=TWIN)])])
    assert blamed.since == NOW + 20


@pytest.mark.parametrize(
    ("states", "state", "code"),
    [
        ("", UNKNOWN, 3), ("healthy", HEALTHY, 0), ("healthy degraded", State.DEGRADED, 1),
        ("degraded unknown", UNKNOWN, 3),
        ("unknown suspect", SUSPECT, 2), ("faulty unknown", FAULTY, 2),
    ],
)  # fmt: skip
def test_the_worst_device_decides_the_exit_code(states, state, code):
    """No device at all is unknown; a known bad device weighs more than an unknown one."""
    made = [
        Verdict(device="d", state=State(s), cause=Cause.NONE, findings=(), decided=NOW, since=NOW)
        for s in states.split()
    ]
    assert worst(made) is state
    assert exit_code(worst(made)) == code


def test_fault_rate_bound():
    """So many clean trials bound the rate at 95 %; a mismatch or no trial gives no bound."""
    runs = [
        run(60, right(trials=600), right(trials=400)),
        run(60, right(trials=5), wrong(characterised=False), probe="bad"), run(60, probe="none"),
        run(60, right(), probe="once"),
    ]  # fmt: skip
    bounds = fault_rate_bound(runs)
    assert set(bounds) == {"exact_matmul", "once"}
    assert bounds["exact_matmul"] == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert bounds["exact_matmul"] == pytest.approx(3 / 1000, rel=0.01), "the rule of three"
    assert bounds["once"] == pytest.approx(0.95)


def histories(of, **fixed):
    return st.lists(
        st.builds(
            lambda ago, facts, outcome, stack, confirms: run(
                ago, *facts, of=of, outcome=outcome, stack=stack, confirms=confirms, **fixed
            ),
            ages,
            st.lists(comparisons, max_size=3),
            st.sampled_from([Outcome.COMPLETED] * 5 + list(Outcome)),
            st.sampled_from([STACK, OTHER_STACK]),
            st.sampled_from(["", "", "the-mismatch"]),
        ),
        max_size=5,
    )


nodes = st.tuples(histories(TWIN), histories(CPU)).map(lambda r: [(TWIN, r[0]), (CPU, r[1])])
few = settings(max_examples=60)


@few
@given(histories(GPU), nodes, st.randoms())
def test_order_does_not_matter(runs, peers, random):
    """Shuffled or doubled runs, and peers in another order, give the same verdict."""
    shuffled = [*runs, *runs]
    random.shuffle(shuffled)
    turned = [(d, random.sample(r, len(r))) for d, r in reversed(peers)]
    assert ask(*runs, peers=peers) == ask(*shuffled, peers=turned)


@few
@given(histories(GPU), histories(CPU))
def test_a_clean_run_never_accuses_and_never_acquits(runs, host_runs):
    """One more clean run makes no device worse, and changes no suspicion within the watch (no sibling, no software)."""
    peers = [(CPU, host_runs)]
    before, after = ask(*runs, peers=peers), ask(*runs, fresh(), peers=peers)
    # What ends in an error of the device each time may be the software; what also ends well is an intermittent fault.
    now_and_then = sum(r.outcome is Outcome.DEVICE_ERROR for r in runs) >= REPEATS
    assert after.state.severity <= before.state.severity or now_and_then
    if before.state in (SUSPECT, FAULTY):
        assert (after.state, after.cause) == (before.state, before.cause)


@few
@given(histories(GPU), nodes)
def test_a_mismatch_within_the_watch_is_never_healthy(runs, peers):
    """However clean everything else is, a wrong result on record forbids `healthy`, unless a new stack cured it."""
    verdict = ask(*runs, run(5 * HOUR, wrong(characterised=False), stack={}), fresh(), peers=peers)
    assert verdict.state is not HEALTHY
    assert ask(*runs, run(5 * HOUR, wrong(), stack={}), fresh(), peers=peers).state in (SUSPECT, FAULTY)


@few
@given(nodes)
def test_no_runs_is_unknown(peers):
    """Whatever the neighbours did, a device without a run of its own is not healthy and not accused."""
    assert ask(peers=peers).state is UNKNOWN


@few
@given(histories(GPU), nodes)
def test_an_accelerator_beside_an_erring_host_is_never_faulty(runs, peers):
    """As long as the CPU was wrong within a day of every mismatch, the accelerator is suspect at most."""
    erring = [(d, [*r, *(run(h * 10 * HOUR, wrong(), of=CPU) for h in range(6))] if d is CPU else r) for d, r in peers]
    assert ask(*runs, peers=erring).state is not FAULTY


def test_a_vanished_device_is_unknown_whatever_it_was():
    """What was healthy a minute ago and is gone now is unknown; a device that is there is not touched by the rule."""
    assert ask(fresh()).state is State.HEALTHY
    gone = ask(fresh(), gone_since=NOW - 2 * HOUR)
    assert (gone.state, gone.cause) == (State.UNKNOWN, Cause.UNDETERMINED)
    assert message(gone, "device-vanished").endswith("is gone; it was last found 2 hours ago")


def test_a_run_limited_to_some_cases_is_no_evidence_for_the_whole_probe():
    """A clean look at one case does not stand for the probe, nor does its mismatch go unseen."""
    part = dataclasses.replace(fresh(), cases=("float32/dense",))
    assert ask(part).state is State.UNKNOWN
    wrong = dataclasses.replace(mismatches(HOUR)[0], cases=("float32/dense",))
    assert ask(fresh(), wrong).state is State.SUSPECT


def test_a_clock_that_was_not_set_does_not_clear_a_mismatch():
    """A mismatch dated 1970 counts as of now: otherwise it would be cleared by its age at once."""
    unset = dataclasses.replace(mismatches(HOUR)[0], started=12.0)
    assert ask(fresh(), unset).state is State.SUSPECT


def test_a_run_of_a_clock_that_was_not_set_is_not_the_newest():
    """Of now, it would be fresh for ever: it would hide that no later run completed, or that one did."""
    passed = dataclasses.replace(fresh(), id="passed", started=12.0)
    skipped = dataclasses.replace(fresh(), id="skipped", outcome=Outcome.SKIPPED, comparisons=())
    assert ask(passed).state is ask(passed, skipped).state is State.UNKNOWN
    assert ask(dataclasses.replace(skipped, started=12.0), fresh()).state is State.HEALTHY


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.COMPLETED, Outcome.SKIPPED)])
def test_a_failure_under_a_clock_that_was_not_set_is_not_outranked(outcome):
    """A device that fails at boot, before the time is set, is not healthy by what passed before that boot."""
    failed = dataclasses.replace(fresh(), id="failed", outcome=outcome, comparisons=(), readings=())
    assert ask(fresh(), dataclasses.replace(failed, started=12.0)).state is not State.HEALTHY


def test_a_wrong_reference_is_never_confirmed():
    """A damaged digest file contradicts one core in the same words every time: no core is faulty for it."""
    cpu = dataclasses.replace(GPU, uuid="CPU-1", backend="cpu", index=0)
    odd = {"subject": Subject.HOST, "place": place("core 0"), "doubt": Doubt.DIGEST, "trials": 1}
    first = run(2 * HOUR, wrong(seed=1, **odd), of=cpu, id="first")
    again = [run(2 * HOUR - 1 - i, wrong(seed=1, **odd), of=cpu, confirms="first") for i in range(3)]
    verdict = ask(first, *again, fresh(of=cpu), of=cpu)
    assert verdict.state in (State.SUSPECT, State.UNKNOWN)
    assert "exact-mismatch-confirmed" not in rules(verdict)


# --- One part through several runtimes --------------------------------------------------------------------------------


THROUGH_ONNX = device("ONNX-CPU-a", "onnx-cpu", model="Xeon", card=CPU.uuid, torch_index=None)


def test_the_same_part_through_another_runtime_acquits_neither_and_says_where_to_look():
    """A processor that is right through torch and wrong through ONNX Runtime: the cause is open, the place is named."""
    wrongs = [run(n * MINUTE, wrong(seed=n), of=THROUGH_ONNX) for n in (1, 2, 3)]
    found = ask(*wrongs, of=THROUGH_ONNX, peers=[(CPU, [fresh(of=CPU)])])
    assert (found.state, found.cause) == (State.FAULTY, Cause.UNDETERMINED)
    lead = found.findings[0]
    assert any("computes correctly through cpu:0" in text for text in lead.evidence)
    assert not any("its CPU passed" in rival.why for finding in found.findings for rival in finding.rivals)
    assert ask(fresh(of=CPU), of=CPU, peers=[(THROUGH_ONNX, wrongs)]).state is State.HEALTHY
