"""What runs found is counted for good: live, after a restart, beside another process, and whatever memory keeps."""

from __future__ import annotations

import dataclasses

import pytest

from canaryd.config.settings import Config
from canaryd.engine.engine import Engine
from canaryd.engine.evidence import NEWEST
from canaryd.engine.host import Options
from canaryd.facts import TRIALS, Comparison, Evidence, Exactness, Reading
from canaryd.formatting import DAY
from canaryd.judge.case import Case, Mismatches
from canaryd.judge.tally import total
from canaryd.model import Ack, Cause, Device, State
from canaryd.store.database import PASSED_NOTE
from canaryd.store.store import Store
from tests.engine.test_engine import CPU, NOW, made

START = NOW - NOW % DAY
QUARTER = 900.0


@pytest.fixture
def config(tmp_path):
    """Settings of an engine that knows a device and looks at no hardware."""
    return Config(state_dir=tmp_path)


def start(config, clock=lambda: START + 5 * DAY):
    engine = Engine(config, Store.open(config.state_dir, now=clock), clock=clock)
    engine.devices = {CPU.uuid: CPU}
    engine._evidence.recall()
    return engine


def add(engine, *runs):
    """Store runs of this process and let the engine hear of them."""
    for run in runs:
        engine.store.add_run(run)
        engine.take(run)


def runs_of(device, numbers, wrong=(), **changes):
    """Return runs of a device, one each quarter of an hour."""
    return [
        dataclasses.replace(made(n, "passes", wrong=n in wrong, **changes), device=device, started=START + QUARTER * n)
        for n in numbers
    ]


def counted(engine, device):
    """Return the number of results before, between and after the first and the newest mismatch."""
    engine.decide()
    found = engine._counts.of(device)
    times = [t.first for t in found if t.lane.erred]
    first, newest = min(times), max(times)
    parts = (
        [t for t in found if t.first < first],
        [t for t in found if first < t.first < newest],
        [t for t in found if t.first > newest],
    )
    return tuple(total(part).results for part in parts)


def test_live_and_read_back_are_alike(config):
    """400 runs in 100 hours with two mismatches in the middle of days: the same counts after a restart."""
    engine = start(config)
    device = CPU.uuid
    add(engine, *runs_of(device, range(400), wrong=(130, 210)))
    assert len(engine.evidence(device)) == NEWEST + 2
    assert counted(engine, device) == (130, 79, 189)
    assert len(engine._counts.of(device)) < 10, "what need not be told apart is added up"
    engine.store.close()
    again = start(config)
    assert counted(again, device) == (130, 79, 189)
    again.store.close()


def test_what_another_process_stores_is_counted_once(config):
    """A check beside the daemon: its clean runs, and its mismatch, which is the first."""
    engine = start(config)
    device = CPU.uuid
    add(engine, *runs_of(device, range(10)))
    with Store.open(config.state_dir) as other:
        for run in runs_of(device, range(10, 20), wrong=(14, 16)):
            other.add_run(run)
    assert counted(engine, device) == (14, 1, 3)
    add(engine, *runs_of(device, range(20, 25)))
    assert counted(engine, device) == (14, 1, 8)
    engine.store.close()


def test_a_repair_at_noon_cuts_the_day(config):
    """What was counted before it is history, on that day too, and so are its tests."""
    engine = start(config)
    device = CPU.uuid
    add(engine, *runs_of(device, range(48), wrong=(20,)))
    with Store.open(config.state_dir) as other:
        other.add_ack(Ack(device=device, kind="repaired", at=START + 12 * 3600.0, reason="new socket"))
    add(engine, *runs_of(device, range(49, 96), wrong=(60, 70)))
    assert counted(engine, device) == (11, 9, 25)
    engine.store.close()


def test_runs_that_checked_nothing_are_no_tests(config):
    """Three days of them are no days of tests: a watch counts days of tests."""
    engine = start(config)
    device = CPU.uuid
    for number, run in enumerate(runs_of(device, range(400), wrong=(0,))):
        idle = 0 < number < 300
        readings = (Reading(name="switches", value="none"), Reading(name=TRIALS, value=0 if idle else run.trials))
        add(engine, dataclasses.replace(run, readings=readings, comparisons=() if idle else run.comparisons))
    engine.decide()
    days = frozenset(int((START + QUARTER * number) // DAY) for number in (0, *range(300, 400)))
    assert engine._counts.tested(device) == {"passes": days}
    engine.store.close()
    again = start(config)
    again.decide()
    assert again._counts.tested(device) == {"passes": days}
    again.store.close()


def test_a_drill_counts_for_nothing(config):
    """Not its injected wrong results, not its right ones, and its day is no day of tests."""
    engine, device = start(config), CPU.uuid
    add(engine, *runs_of(device, range(10), wrong=(4,)))
    assert counted(engine, device) == (4, 0, 5)
    for run in runs_of(device, range(96, 106), wrong=(100,), drill="flip"):
        engine.add(run)
    assert counted(engine, device) == (4, 0, 5)
    assert engine._counts.tested(device) == {"passes": {int(START // DAY)}}
    engine.store.close()


@pytest.mark.parametrize("kept", [3, 50, 1000])
def test_a_suspect_clears_at_the_same_time_whatever_is_kept(config, monkeypatch, kept):
    """One wrong result in 100: three hundred clean ones and 30 days of tests clear it, though memory keeps three."""
    monkeypatch.setattr("canaryd.engine.evidence.NEWEST", kept)
    now = [START]
    engine = start(config, clock=lambda: now[0])
    device = CPU.uuid

    def until(day, step):
        for number in range(round((now[0] - START) / QUARTER), round(day * DAY / QUARTER), step):
            now[0] = START + QUARTER * number
            add(engine, *runs_of(device, [number], wrong=(99,)))
        now[0] = START + day * DAY
        return engine.verdict(device)

    assert (until(2, 1).state, engine.verdict(device).cause) == (State.SUSPECT, Cause.UNDETERMINED)
    assert until(31, 24).state is State.SUSPECT, "30 days, but fewer than 300 clean results"
    assert until(52, 24).state is State.SUSPECT
    for asked in Options(probes=("passes",)), Options(cases=("a",)), Options(intensity="idle"):
        with monkeypatch.context() as restricted:
            restricted.setattr(engine, "asked", asked)
            assert engine.verdict(device).state is State.SUSPECT, "a check of a part counts the whole record"
    assert until(54, 24).state is State.UNKNOWN, "no probe is enabled here"
    engine.store.close()


GPUS = [Device(uuid=f"GPU-{n}", backend="cuda", index=n, model="H100", torch_index=n) for n in range(8)]
SOFTWARE = {"torch": "2.13.0"}


def compared(case="x", seed=1, *, wrong=0, look=7):
    """Return ten uploads of a case; wrong results with an equal `look` have equal bits."""
    first = (((look, 1), "0x3f80", "0x3f00"),)
    evidence = Evidence(wrong=2, total=64, first=first, bits={"7": 1}, zeroed=0, nonfinite=0, lines={}, pattern="two")
    of = {"case": case, "shape": "M=32", "seed": seed, "exactness": Exactness.UNIVERSAL, "trials": 10, "uploads": 10}
    return Comparison(**of, wrong_trials=wrong, evidence=evidence if wrong else None)


class Fleet:
    """An engine with identical GPUs that a test moves through time."""

    def __init__(self, config, gpus):
        """Start at START, with so many GPUs."""
        self.now, self.number, self.config = START, 0, config
        self.devices = {g.uuid: g for g in GPUS[:gpus]}
        self.start()

    def start(self):
        """Start an engine with what is on record."""
        self.engine = start(self.config, clock=lambda: self.now)
        self.engine.devices = dict(self.devices)
        self.engine._acks.read()
        self.engine._evidence.recall()

    def run(self, gpu, *comparisons, **changes):
        """Store a run of a GPU, now."""
        self.number += 1
        fields = {"device": GPUS[gpu].uuid, "comparisons": comparisons, "stack": SOFTWARE, **changes}
        run = dataclasses.replace(made(self.number, at=self.now - self.number), **fields)
        add(self.engine, run)
        return run

    def cause(self, gpu, case):
        """Return the causes of a GPU's mismatches in a case."""
        among = self.engine.decisions._node(Device)
        judged = Case(device=GPUS[gpu], node=among, wanted={}, policy=self.engine.config.judge, now=self.now)
        return {m.cause for m in judged.accusations if m.comparison.case == case}


def test_shared_failures_that_memory_forgot_are_not_the_devices_own(config, monkeypatch):
    """Two GPUs share a bug in one case; one of them is wrong elsewhere in 4 of 80 runs, which accuses it of nothing."""
    monkeypatch.setattr("canaryd.engine.evidence.FAILURES", 16)
    fleet = Fleet(config, 8)
    for number in range(80):
        fleet.now = START + QUARTER * number
        for gpu in range(8):
            lone = gpu == 0 and number in (21, 71, 73, 75)
            shared = gpu < 2 and number % 2 == 0
            fleet.run(gpu, compared("x", wrong=int(shared)), compared("y", wrong=int(lone), look=9))
    assert fleet.cause(0, "x") == {Cause.SOFTWARE}
    assert fleet.cause(0, "y") == {Cause.UNDETERMINED}
    fleet.engine.store.close()


def test_a_new_record_counts_no_less_than_what_is_at_hand(config):
    """The file is lost while two GPUs share a bug: then one wrong run in 40 does not make the third one hardware."""
    fleet = Fleet(config, 3)
    for number in range(120):
        fleet.now = START + QUARTER * number
        if number == 80:
            for path in config.state_dir.glob("canaryd.db*"):
                path.rename(f"{path}.moved")
        for gpu in range(3):
            shared = gpu > 0 and (number % 2 == 1 if number < 80 else number == 90)
            lone = gpu == 0 and number == 100
            seed = 2 if number < 80 else 3
            fleet.run(gpu, compared("x", wrong=int(shared)), compared("y", seed, wrong=int(lone), look=number))
    assert fleet.cause(0, "y") == {Cause.UNDETERMINED}
    fleet.engine.store.close()


def test_passed_retests_count_as_long_as_the_failure(config):
    """One wrong result that no retest repeats: it is no fault of the hardware when the clean runs of then are gone."""
    fleet = Fleet(config, 2)
    for number in range(20):
        fleet.now = START + DAY / 8 * number
        fleet.run(0, compared(seed=100 + number), compared("y", 100 + number))
        fleet.run(1, compared(seed=100 + number), compared("y", 100 + number, wrong=int(number == 0), look=2))
    wrong = fleet.run(0, compared(seed=5, wrong=10), compared("y", 5))
    fleet.run(1, compared(seed=5), compared("y", 5, wrong=10, look=3))
    for _ in range(3):
        fleet.now += 60.0
        fleet.run(0, compared(seed=5), confirms=wrong.id, cases=("x",))
    assert fleet.cause(0, "x") == {Cause.UNDETERMINED}
    fleet.now += 46 * DAY
    fleet.engine.store.set_note(PASSED_NOTE, repr(fleet.now))
    fleet.run(0, compared(seed=200), compared("y", 200))
    fleet.engine.store.prune(fleet.now)
    fleet.engine.store.close()
    fleet.start()
    assert fleet.cause(0, "x") == {Cause.UNDETERMINED}
    assert len(fleet.engine.store.runs(failed=False)) == 4
    fleet.engine.store.close()


def test_what_a_clock_dated_ahead_is_merged_with_nothing(config):
    """The clock is ahead for two hours while older software runs; then a fault of the newer software comes back."""
    fleet = Fleet(config, 2)

    def rounds(count, stack, wrong=0):
        for _ in range(count):
            fleet.now += QUARTER
            for gpu in range(2):
                fleet.run(gpu, compared(wrong=wrong), stack=stack)
            fleet.engine.decide()
        return fleet.cause(0, "x")

    older = {"torch": "2.12.0"}
    rounds(5, older)
    assert rounds(5, SOFTWARE, wrong=1) == {Cause.SOFTWARE}
    assert rounds(20, older) == set()
    fleet.now += 300 * DAY
    rounds(8, older)
    fleet.now -= 300 * DAY
    rounds(8, older)
    assert rounds(5, SOFTWARE, wrong=1) == {Cause.SOFTWARE}
    fleet.engine.store.close()


def test_runs_dated_ahead_are_no_clean_trials(config):
    """Forty clean ones, before the clock was set right, do not clear what was wrong in one run of ten."""
    engine = start(config, clock=lambda: START + 40 * DAY)
    add(engine, *(dataclasses.replace(r, started=r.started + 300 * DAY) for r in runs_of(CPU.uuid, range(40))))
    add(engine, *(dataclasses.replace(r, id=f"b{r.id}") for r in runs_of(CPU.uuid, range(12), wrong=(9,))))
    assert len(engine._counts.of(CPU.uuid)) == 4
    among = engine.decisions._node(Device)
    case = Case(device=CPU, node=among, wanted={}, policy=config.judge, now=START + 40 * DAY)
    clean = Mismatches(case, among.accusing[CPU.uuid]).clean
    assert clean.results == 2
    engine.store.close()


def test_what_a_sibling_gave_before_its_repair_is_not_shared(config):
    """Two of three are wrong alike, one of them is repaired and right from then on: the other one is at fault."""
    fleet = Fleet(config, 3)

    def rounds(count, *bad):
        for _ in range(count):
            fleet.now += QUARTER
            for gpu in range(3):
                data = int(fleet.now)
                fleet.run(gpu, compared("x", data, wrong=10 * (gpu in bad)), compared("y", data))
            fleet.engine.decide()
        return fleet.cause(0, "x")

    assert rounds(10, 0, 1) == {Cause.SOFTWARE}
    assert rounds(20, 0) == {Cause.SOFTWARE}
    fleet.engine.store.add_ack(Ack(device="GPU-1", kind="repaired", at=fleet.now + 60.0, reason="new board"))
    fleet.engine._acks.read()
    assert rounds(20, 0) == {Cause.HARDWARE}
    fleet.engine.store.close()
    fleet.start()
    assert fleet.cause(0, "x") == {Cause.HARDWARE}
    fleet.engine.store.close()
