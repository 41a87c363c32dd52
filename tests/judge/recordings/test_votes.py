"""Siblings, when a case is first recorded."""

import dataclasses

import pytest

from canaryd.judge.recordings.baseline import LEARN
from canaryd.model import Cause, State
from tests.judge.recordings.made import (
    DAY,
    GOOD,
    GPU,
    HOUR,
    KERNEL,
    NOW,
    POLICY,
    STRANGE,
    History,
    recording,
    twin,
    voted,
)

UNWITNESSED = {"baseline-learning healthy": (State.HEALTHY, Cause.NONE)}
OUTVOTED = UNWITNESSED | {"recording-departed suspect": (State.SUSPECT, Cause.HARDWARE)}
DISPUTED = UNWITNESSED | {"recording-departed unknown": (State.UNKNOWN, Cause.UNDETERMINED)}


def why_disputed(mine, *others):
    """Return why the devices disagree, as the finding says it last."""
    message = mine.found(**{h.of.name: h for h in others})["recording-departed unknown"].message
    return message.rpartition("; ")[2].removesuffix(".")


def test_the_odd_one_of_three_is_a_suspect_and_the_others_are_not():
    """A unit that was bad when it was first recorded does not become its own standard."""
    bad, good, other = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    assert voted(bad, good, other) == OUTVOTED
    assert voted(good, bad, other) == {}


def test_of_two_that_disagree_nobody_is_accused():
    """Nor of four that are split evenly: there is no majority to go by."""
    a, b, c, d = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD), twin("d", STRANGE)
    assert voted(a, b) == voted(b, a) == DISPUTED
    assert why_disputed(a, b) == "no majority shows which is right"
    split = {"recording-departed unknown": (State.UNKNOWN, Cause.UNDETERMINED)}
    assert voted(a, b, c, d) == voted(b, a, c, d) == split


@pytest.mark.parametrize(
    "other",
    [
        {"chain": KERNEL | {"kernel": "sm90_gemm_64x256"}},
        {"model": "A100"},
        {"times": LEARN - 2},
    ],
    ids=["another kernel", "another model", "not learnt yet"],
)
def test_what_is_not_comparable_does_not_vote(other):
    """Another kernel may round otherwise, another model has other kernels, and what is not learnt says nothing."""
    assert voted(twin("a", STRANGE), twin("b", GOOD, **other), twin("c", GOOD, **other)) == {
        "baseline-learning healthy": (State.HEALTHY, Cause.NONE)
    }


def test_a_baseline_from_another_host_is_a_witness_and_a_vote():
    """Taken in with `canaryd baseline import`, it stands in for the sibling that this host lacks."""
    bad, good, far = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    imported = tuple(dataclasses.replace(b, imported_kind=("cuda", "H100")) for b in far.baselines.values())
    assert voted(bad, good, imported=imported) == OUTVOTED
    assert voted(good, imported=imported) == {}


def test_instances_of_one_gpu_have_one_vote_and_are_no_witnesses_for_each_other():
    """One bad part, divided in three, must not outvote a healthy one."""
    parts = [twin(name, STRANGE, parent="GPU-bad") for name in "abc"]
    good = twin("d", GOOD, parent="GPU-good")
    assert voted(good, *parts) == DISPUTED
    assert voted(parts[0], *parts[1:]) == {"baseline-learning healthy": (State.HEALTHY, Cause.NONE)}


def gpu(name, *learnt, later=()):
    """A GPU that learnt these vectors, then gave those of `later`, an hour apart, each once: its retests pass."""
    history = History(of=dataclasses.replace(GPU, uuid=f"GPU-{name}", index=ord(name) - ord("a")))
    of_kernel = [dataclasses.replace(v, chain=KERNEL, case="gemm/decode") for v in (*learnt, *later)]
    history.learn(9 * DAY, *of_kernel[: len(learnt)])
    for number, vector in enumerate(of_kernel[len(learnt) :]):
        first = history.add((len(later) - number) * HOUR, vector)
        if first.unknown:
            history.confirm(first, *[of_kernel[0]] * POLICY.confirm_runs)
    return history


def test_a_mode_that_a_sibling_learnt_is_held_against_nobody():
    """One run in ten takes it, and the thirty of this device's learning did not meet it; another vector counts."""
    rare = [GOOD] * 9 + [STRANGE]
    siblings = gpu("b", *rare, later=rare * 20), gpu("c", *rare, later=rare * 20)
    mine = gpu("a", GOOD, later=rare * 6)
    assert not {*voted(mine, *siblings)} & {"recording-departed suspect", "recording-departed unknown"}
    alone = {"recording-departed suspect": (State.SUSPECT, Cause.HARDWARE)}
    other = gpu("a", GOOD, later=[recording(0.02) if v is STRANGE else v for v in rare * 6])
    assert voted(other, *siblings).items() >= alone.items()
    siblings = gpu("b", GOOD, later=[GOOD] * 200), gpu("c", GOOD, later=[GOOD] * 200)
    assert voted(mine, *siblings).items() >= alone.items()


def both(name, later, *learnt):
    """As `gpu`, of two cases: `later` has pairs of vectors."""
    first, second = ("gemm/decode", "gemm/prefill")
    of = [
        [dataclasses.replace(v, chain=KERNEL, case=c) for v, c in zip(p, (first, second), strict=True)] for p in later
    ]
    history = History(of=dataclasses.replace(GPU, uuid=f"GPU-{name}", index=ord(name) - ord("a")))
    clean = [dataclasses.replace(GOOD, chain=KERNEL, case=c) for c in (first, second)]
    for number in range(LEARN):
        mode = dataclasses.replace(learnt[number % len(learnt)], chain=KERNEL, case=first)
        history.add(9 * DAY - number, mode, clean[1], baselining=True)
    for number, pair in enumerate(of):
        made = history.add((len(of) - number) * HOUR, *pair)
        if made.unknown:
            for again in range(POLICY.confirm_runs):
                history.add(NOW - made.started - 1 - again, *clean, confirms=made.id, cases=(first, second))
    return history


def test_a_mode_that_siblings_learnt_adds_nothing_to_what_is_held_against_a_device():
    """Neither to another case's one unknown vector, nor where memory keeps the newest alone; and it hides none."""
    rare = [GOOD] * 9 + [STRANGE]
    siblings = [both(name, [(v, GOOD) for v in rare * 20], *rare) for name in "bc"]
    once = both("a", [*((v, GOOD) for v in rare * 6), (GOOD, recording(0.02))], GOOD)
    assert "recording-departed suspect" not in voted(once, *siblings)
    siblings = gpu("b", *rare, later=rare * 20), gpu("c", *rare, later=rare * 20)
    long = gpu("a", GOOD, later=[*rare * 40, recording(0.02)])
    odd = [r for r in long.runs if r.unknown and not r.confirms][-10:]
    long.runs = [r for r in long.runs if {r.id, r.confirms} & {o.id for o in odd}]
    assert "recording-departed suspect" not in voted(long, *siblings)
    bad = [recording(0.02) if v is STRANGE else v for v in rare * 6]
    assert "recording-departed suspect" in voted(gpu("a", GOOD, later=[*rare * 6, *bad]), *siblings)
