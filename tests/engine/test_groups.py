"""Probes that test a group: who is in it, which locks it holds, and what each end of a link is told."""

import threading

import pytest

from canaryd.config.settings import Config
from canaryd.engine import budget, check, schedule
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.engine.engine import Engine
from canaryd.facts import Comparison, Exactness, Place, Reading
from canaryd.model import Device, Outcome, Run
from canaryd.probe import ProbeSpec
from canaryd.store.store import Store
from tests.command import canaryd

SPEC = ProbeSpec(name="collectives", summary="links", backends=("cpu", "cuda", "rocm"), group=True)


def gpu(index, backend="cuda", **more):
    return Device(uuid=f"{backend}-{index}", backend=backend, index=index, model="H100", torch_index=index, **more)


GPUS = (gpu(0), gpu(3), gpu(5))


@pytest.fixture
def entry(tmp_path):
    """The probe of links as the catalogue has it."""
    return Entry(file=ProbeFile(name="collectives", path=tmp_path / "collectives.py", source="builtin"), spec=SPEC)


def step(entry):
    return schedule.Step(entry=entry, level="standard", seed=1)


def sent(ends, *, wrong=0):
    return Comparison(
        case="int64/walking/send@64", shape="words=64", seed=1, exactness=Exactness.UNIVERSAL,
        place=Place(unit="link", numbers=ends), wrong_trials=wrong,
    )  # fmt: skip


def run(comparisons):
    return Run(
        id="first", device=GPUS[0].uuid, probe="collectives", probe_version=1, started=1.0, seconds=1.0,
        outcome=Outcome.COMPLETED, level="standard", seed=1, instruction_set="", comparisons=tuple(comparisons),
        readings=(Reading(name="trials", value=9, unit="1"), Reading(name="links", value=6, unit="1")),
    )  # fmt: skip


def test_each_end_is_told_of_its_own_links(entry):
    """With the device at the other end, and the numbers of the devices; of operations of all, of its own result."""
    plan = schedule.Plan(device=GPUS[0], instruction_set="", steps=(step(entry),), peers=GPUS[1:])
    found = schedule.shares(run([sent((0, 1)), sent((2, 1), wrong=1), sent((2,))]), plan, lambda: "other")
    assert [(r.id, r.device) for r in found] == [("first", "cuda-0"), ("other", "cuda-3"), ("other", "cuda-5")]
    told = [[(c.place, c.peer, c.wrong_trials) for c in r.comparisons] for r in found]
    first, second = Place(unit="link", numbers=(0, 3)), Place(unit="link", numbers=(5, 3))
    assert told == [
        [(first, "cuda-3", 0)],
        [(first, "cuda-0", 0), (second, "cuda-5", 1)],
        [(second, "cuda-3", 1), (Place(unit="device"), "", 0)],
    ]
    assert [r.trials for r in found] == [1, 2, 2]


def test_all_devices_of_a_group_are_locked(entry, tmp_path):
    """No other series uses one of them meanwhile, in this process or another."""
    from canaryd.config.settings import Config
    from canaryd.engine.engine import Engine
    from canaryd.store.locks import Busy
    from canaryd.store.store import Store

    engine = Engine(Config(state_dir=tmp_path / "state"), Store.open(tmp_path / "state"))
    plan = schedule.Plan(device=GPUS[0], instruction_set="", steps=(step(entry),), peers=GPUS[1:])
    entered, leave = threading.Event(), threading.Event()
    engine._run_series = lambda *_: [entered.set(), leave.wait(20)][:0]
    holder = threading.Thread(target=lambda: engine.carry_out(plan))
    holder.start()
    try:
        assert entered.wait(20)
        for device in GPUS:
            with pytest.raises(Busy), engine.locked(device, 0.0, lambda _: None):
                pass
    finally:
        leave.set()
        holder.join()
    with engine.locked(GPUS[2], 0.0, lambda _: None):
        pass
    engine.store.close()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("drill", [False, True])
def test_a_check_of_links_between_cores(tmp_path, drill):
    """Real processes, joined by gloo: healthy, and links are no longer what was not tested; a drill names the link."""
    common = ("--state-dir", tmp_path / "state", "--device", "cpu:0")
    if drill:
        answer = canaryd("drill", "--probe", "collectives", *common)
        assert answer.code == 2, answer.out
        assert "Wrong results in collectives" in " ".join(answer.out.split())
        assert "always link" in " ".join(answer.out.split())
        return
    answer = canaryd("check", "--probe", "collectives", "--level", "quick", "--json", *common)
    assert answer.code == 0, answer.out
    (device,) = answer.document["devices"]
    (done,) = device["runs"]
    assert (done["probe"], done["outcome"], done["wrong_trials"]) == ("collectives", "completed", 0)
    assert not [gap for gap in answer.document["not_checked"] if gap.startswith("links")]


def test_links_are_left_out_where_memory_is_short(entry, tmp_path):
    """What their library takes has no limit; the rest of the check goes on, and the links are a gap of it."""
    with Store.open(tmp_path) as store:
        engine = Engine(Config(), store)
        engine.entries = {"collectives": entry}
        engine.together = frozenset(d.uuid for d in GPUS)
        read = (("memory_total_bytes", 80 << 30), ("memory_used_bytes", 79 << 30), ("compute_processes", 1))
        readings = tuple(Reading(name=name, value=value) for name, value in read)
        engine.watch.readings = lambda *_: readings
        result = check.Result(level="standard", started=1.0)
        plan = schedule.Plan(device=GPUS[0], instruction_set="", steps=(step(entry),), peers=GPUS[1:])
        check._carry_out(engine, [plan], result, 0.0, lambda _: None)
        assert (result.missed, engine.together) == ({}, frozenset())
        ((_, skipped),) = result.skipped["cuda-0"]
        assert "too little of its memory is free for links" in skipped.reason
        assert engine.shared == {"cuda-0": ("1 process computes on it", budget.SMALL)}
