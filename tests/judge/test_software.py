"""`canaryd ack --software`: what the evidence must show before an operator's word counts, and what is said if not."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.judge.case import Case
from canaryd.judge.cause import Right, Same, SameKey
from canaryd.judge.node import node
from canaryd.judge.software import missing
from canaryd.judge.verdict import decide
from canaryd.model import Cause, State
from canaryd.store.store import Store
from tests.command import canaryd
from tests.judge import made as t
from tests.judge.evidence_scenarios import said
from tests.judge.made import CPU, DAY, GPU, HOUR, NOW, OTHER_STACK, TWIN, right, run, wrong

WRONG = (run(9 * DAY, wrong(seed=5)), run(9 * DAY - HOUR, wrong(seed=6)))


def since(count=5, span=DAY, *comparisons, **changes):
    """Return so many runs on other software, over so many seconds."""
    comparisons = comparisons or (right(seed=7, trials=9),)
    fields = {"stack": OTHER_STACK, **changes}
    return [run(2 * DAY - n * span / max(1, count - 1), *comparisons, **fields) for n in range(count)]


def case(*runs, of=GPU, peers=(), **changes):
    devices = {**{d.uuid: d for d, _ in peers}, of.uuid: of}
    among = node(devices, {**{d.uuid: r for d, r in peers}, of.uuid: runs}, NOW)
    return Case(device=of, node=among, wanted=t.WANTED, policy=t.POLICY, now=NOW, **changes)


CASES = {
    "enough": (lambda: case(*WRONG, *since()), ""),
    "nothing is wrong": (lambda: case(*since()), "no wrong results"),
    "the software is in use": (lambda: case(*WRONG), "still runs on the software"),
    "it came back": (lambda: case(*WRONG, *since(), run(HOUR, right(seed=8))), "still runs on the software"),
    "an hour too short": (
        lambda: case(*WRONG, *since(5, DAY - HOUR)),
        "needs 3 right results from 3 uploads in 4 runs over 24 hours on other software, and has 45 from 45 in 5 runs",
    ),
    "a run too few": (lambda: case(*WRONG, *since(3)), "27 from 27 in 3 runs over 24 hours"),
    "a rare fault and few results": (
        lambda: case(run(9 * DAY, wrong(trials=400), right(seed=2, trials=400)), *since(4)),
        "needs 2,400 right results from 1,203 uploads",
    ),
    "wrong there, too": (
        lambda: case(*WRONG, *since(), run(HOUR, wrong(seed=9), stack=OTHER_STACK)),
        "exact_matmul was wrong on other software too, in 1 of 46 uploads",
    ),
    "a sibling is right on the same bytes": (
        lambda: case(*WRONG, *since(), peers=[(TWIN, [run(8 * DAY, right(seed=5), right(seed=6), of=TWIN)])]),
        "the cause is hardware: Identical devices compute the same data correctly",
    ),
    "the host was wrong, too": (
        lambda: case(*WRONG, *since(), peers=[(CPU, [run(9 * DAY, wrong(seed=50), of=CPU)])]),
        "the host's CPU was wrong at about the same time",
    ),
    "software that was not recorded": (
        lambda: case(*(dataclasses.replace(r, stack={}) for r in WRONG), *since()),
        "do not say on which software",
    ),
    "references": (
        lambda: case(run(9 * DAY, t.host("core 3"), of=CPU), run(HOUR, right(seed=9), of=CPU), of=CPU),
        "computes references wrongly",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_says_what_is_missing(name):
    """And none where the evidence supports the word."""
    make, expected = CASES[name]
    said = missing(make())
    assert expected in said
    assert bool(said) is bool(expected)


def test_the_word_counts_with_the_evidence_alone():
    """Without the word the device waits for a week, without the evidence for ever; a newer mismatch needs a newer word.

    It is for siblings too that a history alone tells nothing of.
    """
    word = said("software", HOUR)
    twin = [(TWIN, [run(8 * DAY, right(seed=99), of=TWIN)])]
    runs = (*WRONG, *since(), run(60, right(seed=9), stack=OTHER_STACK))
    assert decide(case(*runs, peers=twin)).state is State.FAULTY
    assert decide(case(*runs, peers=twin, acks=(word,))).state is State.HEALTHY
    few = (*WRONG, *since(3))
    assert decide(case(*few, peers=twin, acks=(word,))).state is State.FAULTY
    old = decide(case(*runs, run(30, right(seed=9)), peers=twin, acks=(word,)))
    assert (old.state, old.cause) == (State.FAULTY, Cause.SOFTWARE), "the old software is back, and so is the verdict"
    newer = dataclasses.replace(word, at=NOW - 8.99 * DAY)
    assert decide(case(*runs, peers=twin, acks=(newer,))).state is State.FAULTY


def test_the_command_refuses_in_a_sentence_and_keeps_the_word(tmp_path):
    """Refused: exit 64 and nothing kept. Accepted: kept with its reason, like every word."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    store.see_device(GPU, NOW)
    for each in (*WRONG, *since(3)):
        store.add_run(each)
    command = ("ack", "cuda:0", "--reason", "driver 580.95 is bad", "--software", "--state-dir", tmp_path / "state")
    done = canaryd(*command)
    assert (done.code, store.acks()) == (64, [])
    assert "--software is refused: exact_matmul needs 3 right results" in " ".join(done.err.split())
    for each in since(2, DAY):
        store.add_run(each)
    done = canaryd(*command)
    assert (done.code, "no longer count while other software runs" in " ".join(done.out.split())) == (0, True)
    assert [(a.kind, a.reason) for a in store.acks()] == [("software", "driver 580.95 is bad")]
    history = canaryd("history", "cuda:0", "--state-dir", tmp_path / "state", "--since", "400d")
    assert "wrong results put down to software by" in " ".join(history.out.split())


def test_what_siblings_computed_in_runs_that_are_gone_counts_for_the_command(tmp_path):
    """A sibling was right on data on which this device is always wrong: the command judges as the daemon does."""
    store = Store.open(tmp_path / "state", now=lambda: NOW)
    twin = run(8 * DAY, right(seed=99), of=TWIN)
    for device in (GPU, TWIN):
        store.see_device(device, NOW)
    for each in (*WRONG, *since(), twin):
        store.add_run(each)
    wrong_on = WRONG[0]
    key = SameKey(wrong_on.probe, wrong_on.probe_version, wrong_on.stack_id, own=True)
    gone = Right(4, ("bfloat16/wide", "M=32", 7))
    store.set_compared(GPU.uuid, {key: Same(right={TWIN.uuid: gone})}, wrong_on.started)
    done = canaryd("ack", "cuda:0", "--reason", "bad", "--software", "--state-dir", tmp_path / "state")
    assert (done.code, store.acks()) == (64, [])
    assert "the cause is hardware" in " ".join(done.err.split())
