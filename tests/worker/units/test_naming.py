"""Who is named: campaigns of the real sweep on a simulated GPU of 132 SMs, judged by the real judge."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.facts import Comparison, Place, Reading, Skipped
from canaryd.judge.case import Case
from canaryd.judge.cause import Mismatch
from canaryd.judge.incidents import incidents
from canaryd.judge.node import node
from canaryd.judge.units import lone_unit
from canaryd.judge.verdict import decide
from canaryd.model import Cause, Outcome, Run, State
from canaryd.probe import Context
from canaryd.report.incidents import describe, headline, incidents_json
from tests.worker.numeric.cuda import HOPPER
from tests.worker.units.simulated import SMS, Chip

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd.worker.numeric.stack import cpu  # noqa: E402
from canaryd.worker.units.sweep import sweep_units  # noqa: E402
from canaryd.worker.units.tiles import Tiles  # noqa: E402

NOW, MINUTE = 1_790_000_000.0, 60.0
TINY = [Tiles("float32", "cancel", "fma", 24, 2, 16, 16, 16), Tiles("int8", "narrow", "gemm", 31, 2, 16, 16, 16)]
GPU = replace(HOPPER, detail={**HOPPER.detail, "multiprocessors": str(SMS)})
CPU = cpu()
CAMPAIGNS = [pytest.param(3, id="some"), pytest.param(400, id="all", marks=pytest.mark.slow)]
"""How many campaigns a test runs: the bar is 99 % of 400."""
RUNS = 4
"""Runs of a campaign at least."""
ENOUGH = 4
"""Wrong tiles for which a campaign goes on, at most `LONGEST` runs: rarer faults need more runs, and are named then."""
LONGEST = 400


def sweep(chip, seed, tiles=TINY, **more):
    """The facts of one run; the host computes, so the device is its own."""
    clock = itertools.count(0, 0.001).__next__  # every look at it takes a millisecond
    context = Context(device=CPU, level="quick", seed=seed, budget=0.02, clock=clock, **more)
    return list(sweep_units(context, chip, tiles))


def a_run(device, number, facts):
    return Run(
        id=f"run-{number:06d}", device=device.uuid, probe="exact_units", probe_version=1, seconds=1.0,
        started=NOW + (number - LONGEST) * 10 * MINUTE,
        outcome=Outcome.COMPLETED, stack={"torch": "2.13.0"},
        comparisons=tuple(f for f in facts if isinstance(f, Comparison)),
        readings=tuple(f for f in facts if isinstance(f, Reading)),
        skipped=tuple(f for f in facts if isinstance(f, Skipped)),
    )  # fmt: skip


def campaign(seed, broken, *, device=GPU, enough=0, **chip):
    """Return the verdict after some runs with new operands, the chip, and whether all units were seen."""
    simulated, runs = Chip(seed, broken, **chip), []
    while len(runs) < RUNS or (sum(simulated.spoilt.values()) < enough and len(runs) < LONGEST):
        runs.append(a_run(device, len(runs), sweep(simulated, seed * LONGEST + len(runs))))
    among = node({device.uuid: device}, {device.uuid: runs}, NOW)
    case = Case(device=device, node=among, wanted={"exact_units": 900.0}, policy=JudgePolicy(), now=NOW)
    covered = all(r.value == simulated.count for run in runs for r in run.readings if r.name == "units_seen")
    return decide(case), simulated, covered


def named(verdict):
    """Return the unit that the verdict's reasons name as the only wrong one; None where none does."""
    said = {f.wrong.why for f in verdict.findings if f.wrong and f.wrong.why.startswith("Only ")}
    found = {int(re.match(r"Only (?:SM|core) (\d+) is wrong: ", why).group(1)) for why in said}
    assert len(found) <= 1, said
    return found.pop() if found else None


@pytest.mark.parametrize("campaigns", CAMPAIGNS)
@pytest.mark.parametrize("often", [1.0, pytest.param(0.3, marks=pytest.mark.slow), 0.05])
def test_one_broken_sm_of_132_is_named(often, campaigns):
    """Always wrong, or now and then: in at least 99 % of campaigns that one and, in all of them, no other."""
    right = 0
    for seed in range(campaigns):
        broken = random.Random(seed).randrange(SMS)
        verdict, chip, covered = campaign(seed, lambda sm, b=broken: often * (sm == b), enough=ENOUGH)
        assert covered, "every run reaches all SMs"
        assert set(chip.spoilt) == {broken}
        assert named(verdict) in (broken, None)
        right += (named(verdict), verdict.state, verdict.cause) == (broken, State.FAULTY, Cause.HARDWARE)
    assert right >= 0.99 * campaigns, f"{right} of {campaigns}"


@pytest.mark.parametrize("campaigns", CAMPAIGNS)
@pytest.mark.parametrize(("cores", "often", "enough"), [(2, 1.0, 0), (2, 0.2, 24), (64, 1.0, 0), (64, 0.05, 4)])
def test_one_broken_core_is_named(cores, often, enough, campaigns):
    """As an SM is; of two cores, chance explains a few wrong uploads on one of them, and it takes more."""
    right = 0
    for seed in range(campaigns):
        broken = seed % cores
        chip = {"unit": "core", "count": cores, "doubled": 0.0}
        verdict, _, covered = campaign(seed, lambda n, b=broken: often * (n == b), device=CPU, enough=enough, **chip)
        assert covered
        assert named(verdict) in (broken, None)
        right += (named(verdict), verdict.cause) == (broken, Cause.HARDWARE)
    assert right >= 0.99 * campaigns, f"{right} of {campaigns}"


@pytest.mark.parametrize("campaigns", CAMPAIGNS)
@pytest.mark.parametrize("often", [0.0005, pytest.param(0.002, marks=pytest.mark.slow), 0.02])
def test_faults_all_over_the_chip_name_no_sm(often, campaigns):
    """Whatever is wrong then, it is no single SM; two wrong tiles may meet on one by chance, 1 time in 132."""
    nobody = sum(named(campaign(10_000 + seed, lambda _: often, enough=2)[0]) is None for seed in range(campaigns))
    assert nobody >= 0.99 * campaigns, f"{nobody} of {campaigns}"


def test_where_every_sm_is_wrong_none_is_named():
    """That is software, or something that all share: the verdict leaves the cause open and says that all are wrong."""
    verdict, _, _ = campaign(0, lambda _: 1.0)
    assert (named(verdict), verdict.state, verdict.cause) == (None, State.FAULTY, Cause.UNDETERMINED)
    (incident, *_) = incidents(verdict)
    assert f"on all {SMS} SMs" in headline(incident)


def test_what_a_person_reads_names_sm_lane_and_bit():
    """The same words as for a core, in a check and as JSON; the lane is a line of the evidence."""
    verdict, _, _ = campaign(7, lambda sm: float(sm == 87), lane=19, bit=3)
    (incident, *_) = incidents(verdict)
    assert re.fullmatch(
        r"Wrong results in exact_units: \d+ of [\d,]+, always SM 87, bit 3 of float32 and int32\. Confirmed: .*"
        " Cause: hardware, .*",
        describe(incident),
    )
    lead = incident.lead
    assert any(" on SM 87: " in text and "lane 19" in text for text in lead.evidence)
    assert "Only SM 87 is wrong: 131 SMs computed the same data correctly." in lead.evidence
    (shown, *_) = incidents_json(verdict, GPU)
    assert next(p for p in shown["places"] if p["wrong"])["numbers"] == [87]
    assert Place(unit="sm", numbers=(87,)) in {p.place for p in incident.wrong.places if p.wrong}
    assert len(incident.wrong.places) == SMS


# --- What one run tells ----------------------------------------------------------------------------------------------


def test_a_wrong_unit_is_told_by_launch_with_lane_and_bit():
    """Beside its own right launches, and the others, which computed the same bytes."""
    facts = sweep(Chip(3, lambda sm: 0.5 * (sm == 40), doubled=0.0, lane=9, bit=2), 3, TINY[:1])
    found = [f for f in facts if isinstance(f, Comparison)]
    bad = [c for c in found if c.wrong]
    assert bad
    for c in bad:
        assert (c.place, c.uploads, c.trials) == (Place(unit="sm", numbers=(40,)), 1, 2)
        assert (c.evidence.lines["lane"].first, c.evidence.lines["lane"].distinct) == (9, 1)
        assert set(c.evidence.bits) == {"2"}
        assert c.evidence.pattern.startswith("lane 9, ")
    others = [c for c in found if not c.wrong and 40 not in c.place.numbers]
    assert {c.seed for c in found} == {bad[0].seed}
    assert sorted(n for c in others for n in c.place.numbers) == [n for n in range(SMS) if n != 40]


def test_an_sm_that_gets_no_block_is_said_aloud():
    """Never passed over: under "skipped", with how many, though launches grew to reach it."""
    facts = sweep(Chip(1, never=(3, 77)), 1, cases=("*",))
    (said,) = [f for f in facts if isinstance(f, Skipped)]
    assert said.case == "SMs never reached"
    assert said.reason.startswith("2 of 132 were given no work in 16 launches")
    told = {f.name: f.value for f in facts if isinstance(f, Reading)}
    assert (told["units_seen"], told["units"]) == (130, 132)


def test_a_block_that_changed_its_sm_accuses_none():
    """The device was wrong, and nobody knows where."""
    facts = sweep(Chip(1, lambda _: 1.0, moved=1.0), 1)
    bad = [f for f in facts if isinstance(f, Comparison) and f.wrong]
    assert {c.place for c in bad} == {Place(unit="device")}
    assert any("never reached" in f.case for f in facts if isinstance(f, Skipped))


def test_a_broken_part_of_the_memory_is_not_taken_for_an_sm():
    """Block 17 writes to a bad place whatever SM it runs on: the places rotate, so no SM is named."""

    class Placed(Chip):
        def schedule(self, blocks):
            return [block % self.count for block in range(blocks)]

        def launch(self, tiles, operands, blocks, shift):
            launch = super().launch(tiles, operands, blocks, shift)
            launch.results[17].view(torch.int32)[0, 0, 0] ^= 4
            return launch

    facts = [sweep(Placed(0), n) for n in range(RUNS)]
    bad = {c.place for f in facts for c in f if isinstance(c, Comparison) and c.wrong}
    assert len(bad) > RUNS
    runs = [a_run(GPU, n, each) for n, each in enumerate(facts)]
    wrong = [Mismatch(run=run, comparison=c) for run in runs for c in run.wrong]
    assert lone_unit(runs, wrong, 4) is None
