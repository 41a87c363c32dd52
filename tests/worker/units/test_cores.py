"""The cores of this machine: each computes alone, and the one that is wrong is named."""

import os

import pytest

from canaryd.facts import Comparison, Place, Reading, Skipped
from canaryd.judge.units import lone_unit
from canaryd.model import Outcome, Run
from canaryd.probe import Context

torch = pytest.importorskip("torch", reason="the numeric worker is tested where torch is installed")
pytestmark = pytest.mark.torch

from canaryd.judge.cause import Mismatch  # noqa: E402
from canaryd.worker.numeric.products import multiply  # noqa: E402
from canaryd.worker.numeric.stack import cpu  # noqa: E402
from canaryd.worker.numeric.tensors import bits, can_pin, visible_cores  # noqa: E402
from canaryd.worker.runtime import torch as runtime  # noqa: E402
from canaryd.worker.units import processors  # noqa: E402

CORES = visible_cores()
pinned = pytest.mark.skipif(not can_pin() or len(CORES) < 2, reason="one core here, or none can be chosen")


def context(name, maker, level="quick", **more):
    probe = maker.load(name)
    return probe, Context(device=cpu(), level=level, seed=5, budget=0.05, **more)


def comparisons(probe, ctx):
    return [f for f in probe.run(ctx) if isinstance(f, Comparison)]


def break_core(monkeypatch, module, core):
    """From now on every product that is computed on this core alone has a wrong bit."""

    def broken(*arguments, **more):
        result = multiply(*arguments, **more)
        if os.sched_getaffinity(0) == {core}:
            bits(result).view(-1)[3] ^= 1 << 2
        return result

    monkeypatch.setattr(module, "multiply", broken)


def told_by_the_judge(found):
    """Return what the judge names: the only wrong unit, and those that are right."""
    run = Run(id="run-1", device="CPU-1", probe="exact_units", probe_version=1, started=1.0, seconds=1.0,
              outcome=Outcome.COMPLETED, comparisons=tuple(found), stack={"torch": "2.13"})  # fmt: skip
    return lone_unit([run], [Mismatch(run=run, comparison=c) for c in run.wrong], 4)


def others_than(core):
    return Place(unit="core", numbers=tuple(c for c in CORES if c != core))


@pinned
def test_every_core_computes_every_kind_of_tile_and_is_right(maker):
    """The same bytes; all cores are seen, and told in one comparison per kind."""
    probe, ctx = context("exact_units", maker, level="deep", cases=("*",))
    facts = list(probe.run(ctx))
    found = [f for f in facts if isinstance(f, Comparison)]
    assert [c.place.numbers for c in found] == [CORES] * len(probe.KINDS["cpu"])
    assert not any(c.wrong for c in found)
    assert [f for f in facts if isinstance(f, Skipped)] == []
    assert {f.name: f.value for f in facts if isinstance(f, Reading)}["units_seen"] == len(CORES)


@pinned
@pytest.mark.parametrize("core", CORES[-1:])
def test_a_core_that_multiplies_wrongly_is_named_in_one_run(maker, monkeypatch, core):
    """By the real probe and the judge: all its tiles are wrong, those of the other cores right."""
    break_core(monkeypatch, processors, core)
    found = comparisons(*context("exact_units", maker, cases=("*",)))
    assert {c.place for c in found if c.wrong} == {Place(unit="core", numbers=(core,))}
    assert all(c.wrong_trials == c.trials for c in found if c.wrong)
    assert told_by_the_judge(found) == (Place(unit="core", numbers=(core,)), others_than(core))


@pinned
@pytest.mark.parametrize("core", CORES[-1:])
def test_a_wrong_product_is_computed_on_every_core_once_a_run(maker, monkeypatch, core):
    """Whatever place found it: the operands of the first wrong result go to all cores, and the judge names one."""
    break_core(monkeypatch, runtime, core)
    found = comparisons(*context("exact_matmul", maker, cases=("float32/dense", "float32/full")))
    bad = [c for c in found if c.wrong]
    assert {c.place for c in bad} == {Place(unit="core", numbers=(core,))}
    first = (bad[0].case, bad[0].seed)
    right = {c.place.core for c in found if not c.wrong and (c.case, c.seed) == first}
    assert right >= set(CORES) - {core}
    assert told_by_the_judge(found) == (Place(unit="core", numbers=(core,)), others_than(core))


@pinned
def test_software_that_is_wrong_on_every_core_names_none(maker, monkeypatch):
    """The same wrong bit wherever it runs."""

    def broken(*arguments, **more):
        result = multiply(*arguments, **more)
        bits(result).view(-1)[3] ^= 1 << 2
        return result

    for module, probe, case in ((processors, "exact_units", "tiles"), (runtime, "exact_matmul", "fixed24")):
        monkeypatch.setattr(module, "multiply", broken)
        found = comparisons(*context(probe, maker, cases=(f"float32/dense/{case}",)))
        assert any(c.wrong for c in found)
        assert told_by_the_judge(found) is None


@pytest.mark.parametrize("fault", ["flip", "zero", "swap", "nan", "stuck", "consistent"])
def test_every_drill_is_caught(maker, fault):
    """One bit in one block, or an operand that all cores share."""
    found = comparisons(*context("exact_units", maker, drill=fault))
    assert any(c.wrong for c in found)
    if fault in ("flip", "zero", "swap", "nan"):
        (bad,) = [c for c in found if c.wrong]
        assert bad.place.is_unit


def test_where_no_core_can_be_chosen_it_is_said_aloud(maker, monkeypatch):
    """As on macOS: every case is skipped with the reason, and nothing passes silently."""
    monkeypatch.setattr(processors, "can_pin", lambda: False)
    probe, ctx = context("exact_units", maker)
    facts = list(probe.run(ctx))
    assert comparisons(probe, ctx) == []
    *reasons, last = [f for f in facts if isinstance(f, Skipped)]
    assert reasons
    assert all("choose the core" in f.reason for f in reasons)
    assert (last.case, last.reason.split(" in ")[0]) == (
        "cores never reached",
        f"{len(CORES)} of {len(CORES)} were given no work",
    )
    assert {f.name: f.value for f in facts if isinstance(f, Reading)}["units_seen"] == 0
