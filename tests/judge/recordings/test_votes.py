"""Siblings, when a case is first recorded."""

import dataclasses

import pytest

from canaryd.facts import Comparison, Exactness
from canaryd.judge.recordings.baseline import LEARN
from canaryd.judge.recordings.record import Peer
from canaryd.model import Cause, State
from tests.judge.recordings.made import DAY, GOOD, GPU, HOUR, KERNEL, STRANGE, History, recording, twin, voted

OUTVOTED = {"recording-outvoted": (State.SUSPECT, Cause.HARDWARE), "baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}
DISPUTED = {
    "recording-disputed": (State.UNKNOWN, Cause.UNDETERMINED),
    "baseline-unwitnessed": (State.HEALTHY, Cause.NONE),
}


def why_disputed(mine, *others):
    """Return why the devices disagree, as the finding says it last."""
    message = mine.found(**{h.of.name: h for h in others})["recording-disputed"].message
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
    split = {"recording-disputed": (State.UNKNOWN, Cause.UNDETERMINED)}
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
        "baseline-unwitnessed": (State.HEALTHY, Cause.NONE)
    }


def test_where_kernels_are_not_known_nobody_is_accused():
    """Two accelerators may have chosen different ones."""
    blind = {"chain": {"dtype": "bfloat16"}}
    three = [twin("a", STRANGE, **blind), twin("b", GOOD, **blind), twin("c", GOOD, **blind)]
    assert voted(*three) == DISPUTED
    assert why_disputed(*three) == "they may have chosen different kernels"


def test_kernels_that_do_not_repeat_do_not_vote():
    """Their bits differ from run to run; that they differ from device to device says nothing."""
    first, second = (History(of=dataclasses.replace(GPU, uuid=f"GPU-{n}", index=i)) for i, n in enumerate("ab"))
    for number, history in enumerate((first, second)):
        vectors = [recording(0.001 * (10 * n + number), chain=KERNEL) for n in range(LEARN)]
        history.learn(9 * DAY, *vectors)
        history.add(HOUR, vectors[0])
    assert voted(first, second) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_a_baseline_from_another_host_is_a_witness_and_a_vote():
    """Taken in with `canaryd baseline import`, it stands in for the sibling that this host lacks."""
    bad, good, far = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    imported = tuple(dataclasses.replace(b, imported_kind=("cuda", "H100")) for b in far.baselines.values())
    assert voted(bad, good, imported=imported) == OUTVOTED
    assert voted(good, imported=imported) == {}


def test_what_is_imported_of_another_model_does_not_vote():
    """The stack of a processor says nothing of its model."""
    bad, good, far = twin("a", STRANGE), twin("b", GOOD), twin("c", GOOD)
    imported = tuple(dataclasses.replace(b, imported_kind=("cuda", "A100")) for b in far.baselines.values())
    assert voted(bad, good, imported=imported) == DISPUTED


def test_instances_of_one_gpu_have_one_vote_and_are_no_witnesses_for_each_other():
    """One bad part, divided in three, must not outvote a healthy one."""
    parts = [twin(name, STRANGE, parent="GPU-bad") for name in "abc"]
    good = twin("d", GOOD, parent="GPU-good")
    assert voted(good, *parts) == DISPUTED
    assert voted(parts[0], *parts[1:]) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_a_suspect_has_no_vote():
    """What it gives is nobody's standard."""
    mine, others = twin("a", GOOD), [twin("b", STRANGE), twin("c", STRANGE)]
    peers = {h.of.name: Peer(device=h.of, trusted=False, runs=tuple(h.runs), baselines=h.baselines) for h in others}
    assert voted(mine, peers=peers) == {"baseline-unwitnessed": (State.HEALTHY, Cause.NONE)}


def test_what_went_bad_while_it_was_learnt_is_disputed():
    """It shares a vector with its siblings, and gives another one now that none of them knows."""
    made = [dataclasses.replace(v, chain=KERNEL, case="gemm/prefill") for v in [GOOD] * 10 + [STRANGE] * 20]
    turned = History(of=dataclasses.replace(GPU, uuid="GPU-t", index=9)).learn(9 * DAY, *made)
    turned.add(HOUR, made[-1])
    siblings = [twin(name, GOOD) for name in "abc"]
    assert voted(turned, *siblings) == DISPUTED
    assert why_disputed(turned, *siblings) == "it gave theirs too, while its baseline was learnt"
    turned.add(HOUR / 2, made[0])
    assert "recording-disputed" not in voted(turned, *siblings)


@pytest.mark.parametrize(
    ("processes", "expected"), [(2, {"baseline-unwitnessed"}), (3, {"baseline-unwitnessed", "recording-outvoted"})]
)
def test_a_vote_takes_several_processes(processes, expected):
    """What one process gives may stick to it."""
    devices = []
    for name, vector in (("a", STRANGE), ("b", GOOD), ("c", GOOD)):
        history = History(of=dataclasses.replace(GPU, uuid=f"GPU-{name}", index=ord(name)))
        made = dataclasses.replace(vector, chain=KERNEL, case="gemm/prefill")
        history.add(9 * DAY, *[made] * LEARN, baselining=True)
        for number in range(processes):
            history.add(HOUR - number, made)
        devices.append(history)
    assert set(voted(*devices)) == expected


def test_operands_that_this_host_made_otherwise_speak_against_it():
    """They come from one seed, and nothing else has changed."""
    chain = KERNEL | {"prompt": "1111"}
    history = twin("a", GOOD, chain=chain)
    history.add(HOUR / 2, dataclasses.replace(STRANGE, chain=chain | {"prompt": "2222"}, case="gemm/prefill"))
    found = history.found()["chain-changed"]
    assert (found.state, found.cause) == (State.UNKNOWN, Cause.HARDWARE)


def test_a_reference_is_a_witness():
    """A bound that the same case met all the while it was learnt, in the run that recorded it."""
    held = Comparison(case="gemm/prefill", shape="", seed=1, exactness=Exactness.MARGIN)
    for missed in (False, True):
        history = History(of=GPU)
        made = dataclasses.replace(GOOD, case="gemm/prefill", chain=KERNEL)
        for number in range(LEARN):
            with_bound = () if missed and number == 7 else (held,)
            history.add(9 * DAY - number, made, comparisons=with_bound, baselining=True)
        history.add(HOUR, made, comparisons=(held,))
        assert ("baseline-unwitnessed" in voted(history)) is missed
