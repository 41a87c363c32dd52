"""Which end of a wrong link is at fault: both are suspects until one of them errs with a third."""

import itertools

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Culprit, Evidence, Exactness, Place, Reading, Way, WrongTransfer
from canaryd.judge import verdict
from canaryd.judge.case import Case
from canaryd.judge.node import node
from canaryd.model import Cause, Device, Outcome, Run, State

NOW = 1_800_000_000.0
CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a CPU", detail={"architecture": "x86_64"})
GPUS = tuple(Device(uuid=f"GPU-{n}", backend="cuda", index=n, torch_index=n, model="H100", detail={}) for n in range(4))
WRONG = Evidence(
    wrong=1, total=64, first=(((7,), "0x0", "0x800"),), bits={"11": 1}, zeroed=0, nonfinite=0, lines={},
    pattern="element 7: only bit 11 is flipped", repeats=3, repeats_wrong=3,
    transfer=WrongTransfer(way=Way.BETWEEN, culprit=Culprit.TRANSFER),
)  # fmt: skip


def sent(place, *, wrong, peer=""):
    return Comparison(
        case="int64/walking/send@64", shape="words=64", seed=1, exactness=Exactness.UNIVERSAL, place=place, peer=peer,
        wrong_trials=int(wrong), evidence=WRONG if wrong else None,
    )  # fmt: skip


def run(number, device, comparisons, confirms=""):
    return Run(
        id=f"run-{number:04d}", device=device.uuid, probe="collectives", probe_version=1, started=NOW - 500 + number,
        seconds=1.0, outcome=Outcome.COMPLETED, level="standard", seed=1, instruction_set="", stack={"torch": "1"},
        comparisons=tuple(comparisons), confirms=confirms,
        readings=(Reading(name="trials", value=len(comparisons), unit="1"),),
    )  # fmt: skip


def judged(devices, wrong, times=4):
    """The verdicts after a check and its three confirmations; `wrong`: pairs of devices (or cores of a processor)."""
    runs = {d.uuid: [] for d in devices}
    numbers = itertools.count()
    if devices == (CPU,):
        for turn in range(times):
            links = [
                sent(Place(unit="link", numbers=pair), wrong=pair in wrong)
                for pair in itertools.permutations(range(4), 2)
            ]
            runs[CPU.uuid].append(run(next(numbers), CPU, links, confirms="run-0000" if turn else ""))
    else:
        for turn, device in itertools.product(range(times), devices):
            links = [
                sent(Place(unit="link", numbers=pair), wrong=pair in wrong, peer=f"GPU-{sum(pair) - device.index}")
                for pair in itertools.permutations([d.index for d in devices], 2)
                if device.index in pair
            ]
            first = f"run-{device.index:04d}"
            runs[device.uuid].append(run(next(numbers), device, links, confirms=first if turn else ""))
    of = {d.uuid: d for d in devices}
    among = node(of, runs, NOW, summed={uuid: {"collectives": ()} for uuid in of})
    cases = [Case(device=d, node=among, wanted={"collectives": 900.0}, policy=JudgePolicy(), now=NOW) for d in devices]
    return [verdict.decide(case) for case in cases]


def whys(found):
    return " ".join(text for finding in found.findings for text in (finding.message, *finding.evidence))


@pytest.mark.parametrize("both", [True, False])
def test_both_ends_are_suspects_and_no_more(both):
    """One link that is wrong, in one direction or both: neither end is ever confirmed, and no third is touched."""
    wrong = {(0, 1), (1, 0)} if both else {(0, 1)}
    first, second, third, fourth = judged(GPUS, wrong, times=40)
    for end, other in ((first, "cuda:1"), (second, "cuda:0")):
        assert (end.state, end.cause) == (State.SUSPECT, Cause.UNDETERMINED)
        assert f"data between it and {other} is wrong; either end or the link" in whys(end)
    assert third.state is fourth.state is State.HEALTHY


@pytest.mark.parametrize("direction", ["sends", "receives", "both"])
def test_the_end_that_errs_with_a_third_is_at_fault(direction):
    """Only it: those at the other ends are healthy."""
    out = {(1, n) for n in (0, 2, 3)} if direction != "receives" else set()
    into = {(n, 1) for n in (0, 2, 3)} if direction != "sends" else set()
    first, second, third, fourth = judged(GPUS, out | into)
    assert (second.state, second.cause) == (State.FAULTY, Cause.HARDWARE)
    assert "Data between it and cuda:0, cuda:2, cuda:3 is wrong; its peers are right with all others." in whys(second)
    assert {v.state for v in (first, third, fourth)} == {State.HEALTHY}


def test_two_devices_have_no_third():
    """Then nobody can tell which end it is."""
    first, second = judged(GPUS[:2], {(0, 1)})
    assert {(v.state, v.cause) for v in (first, second)} == {(State.SUSPECT, Cause.UNDETERMINED)}


def test_where_everything_is_wrong_no_device_is_accused_of_it():
    """The library, or what all share."""
    found = judged(GPUS, set(itertools.permutations(range(4), 2)))
    assert {(v.state, v.cause) for v in found} == {(State.SUSPECT, Cause.UNDETERMINED)}


def test_two_wrong_links_that_share_no_end_accuse_all_four():
    """None of them errs with a third."""
    found = judged(GPUS, {(0, 1), (2, 3)})
    assert {(v.state, v.cause) for v in found} == {(State.SUSPECT, Cause.UNDETERMINED)}


@pytest.mark.parametrize("pair", list(itertools.permutations(range(4), 2)))
def test_a_wrong_link_between_cores_is_named(pair):
    """The processor is at fault, whichever end it is."""
    (found,) = judged((CPU,), {pair})
    assert (found.state, found.cause) == (State.FAULTY, Cause.HARDWARE)
    assert f"Only link {pair[0]} to {pair[1]} is wrong: 11 other links carried the same data correctly." in whys(found)


def test_a_core_at_which_all_links_are_wrong_is_named():
    """And not its links one by one."""
    (found,) = judged((CPU,), {(2, n) for n in (0, 1, 3)})
    assert (found.state, found.cause) == (State.FAULTY, Cause.HARDWARE)
    assert "Only core 2 is wrong: 6 other links carried the same data correctly." in whys(found)


def test_where_all_links_between_cores_are_wrong_none_is_named():
    """It may be the library."""
    (found,) = judged((CPU,), set(itertools.permutations(range(4), 2)))
    assert (found.state, found.cause) == (State.FAULTY, Cause.UNDETERMINED)
    assert "Only" not in whys(found)
