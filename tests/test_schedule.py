"""What runs next, as pure functions: no clock, no process, no device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canaryd import schedule
from canaryd.catalogue import Entry, ProbeFile
from canaryd.model import Comparison, Device, Evidence, Exactness, Outcome, Run, Subject
from canaryd.probe import ProbeSpec

CPU = Device(uuid="CPU-1", backend="cpu", index=0, model="a processor", instruction_sets=("native", "avx2", "baseline"))
GPU = Device(uuid="GPU-1", backend="cuda", index=0, model="a card")
TWIN = Device(uuid="GPU-2", backend="cuda", index=1, model="a card")
NOW = 1_700_000_000.0
HOUR = 3600.0


def entry(name: str, **fields) -> Entry:
    file = ProbeFile(name=name, path=Path(f"/probes/{name}.py"), source="builtin")
    return Entry(spec=ProbeSpec(name=name, summary="under test", **fields), file=file)


def comparison(case: str = "a", *, wrong: bool = True, subject: Subject = Subject.DEVICE) -> Comparison:
    evidence = Evidence(wrong=1, total=4, first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern="one element")
    return Comparison(
        case=case,
        shape="N=4",
        seed=1,
        exactness=Exactness.UNIVERSAL,
        subject=subject,
        wrong_trials=int(wrong),
        evidence=evidence if wrong else None,
    )


def run(*comparisons: Comparison, **fields) -> Run:
    default = {"id": "r1", "device": "GPU-1", "probe": "p", "probe_version": 1, "started": NOW, "seconds": 1.0}
    return Run(comparisons=comparisons, outcome=Outcome.COMPLETED, **(default | fields))


def due(last: dict[str, float], period: float = HOUR, *, jitter: float = 0.0, luck: float = 0.5) -> list[str]:
    return schedule.due(last, {"p": period}, now=NOW, jitter=jitter, luck=luck)


# --- When ------------------------------------------------------------------------------------------------------------


def test_a_probe_that_never_ran_is_due():
    """The first round needs no past."""
    assert due({}) == ["p"]


@pytest.mark.parametrize(("ago", "is_due"), [(0.0, False), (HOUR - 1, False), (HOUR, True), (HOUR + 1, True)])
def test_a_probe_is_due_when_its_period_has_passed(ago, is_due):
    """Counted from the start of its last run, the period itself included."""
    assert bool(due({"p": NOW - ago})) is is_due


def test_a_pause_of_many_periods_makes_a_probe_due_once():
    """After a night asleep nothing has piled up: one run, and then the period counts from it."""
    assert due({"p": NOW - 1000 * HOUR}) == ["p"]
    assert due({"p": NOW}) == []


def test_a_clock_set_back_makes_everything_due():
    """A last start in the future says nothing about how long ago it was: waiting for it would lose evidence."""
    assert due({"p": NOW + 1}) == ["p"]
    assert due({"p": NOW + 365 * 24 * HOUR}) == ["p"]


def test_a_clock_set_forward_makes_a_probe_due_once():
    """It looks like a pause, and is treated like one."""
    assert due({"p": NOW - 10 * 365 * 24 * HOUR}) == ["p"]


def test_every_probe_has_its_own_period():
    """One with a long period does not hold back the others, nor the other way round."""
    last = {"short": NOW - 60, "long": NOW - 60}
    assert schedule.due(last, {"short": 30.0, "long": 3000.0}, now=NOW, jitter=0, luck=0.5) == ["short"]


@given(
    ago=st.floats(0, 4 * HOUR),
    period=st.floats(1, HOUR),
    jitter=st.floats(0, 0.5),
    luck=st.floats(0, 1),
)
def test_jitter_moves_a_period_by_no_more_than_its_fraction(ago, period, jitter, luck):
    """Whatever the luck: never due before (1 - jitter) periods, always due after (1 + jitter) of them."""
    found = due({"p": NOW - ago}, period, jitter=jitter, luck=luck)
    elapsed = NOW - (NOW - ago)  # as floating point sees it
    if elapsed < period * (1 - jitter) * (1 - 1e-9):
        assert not found
    if elapsed >= period * (1 + jitter) * (1 + 1e-9):
        assert found


def test_the_extremes_of_luck_are_the_extremes_of_jitter():
    """Luck 0 shortens by the whole fraction, luck 1 lengthens by it, one half leaves the period alone."""
    for luck, first in ((0.0, 90.0), (0.5, 100.0), (1.0, 110.0)):
        assert not due({"p": NOW - first + 0.01}, 100.0, jitter=0.1, luck=luck)
        assert due({"p": NOW - first - 0.01}, 100.0, jitter=0.1, luck=luck)


# --- What ------------------------------------------------------------------------------------------------------------


def plan(device: Device, *entries: Entry, sets=("",), level: str = "quick", **fields) -> list[schedule.Plan]:
    levels = {e.spec.name: level for e in entries}
    return schedule.plan_round(device, entries, levels=levels, seed=7, sets=sets, **fields)


def names(plans: list[schedule.Plan]) -> list[tuple[str, list[str]]]:
    return [(p.instruction_set, [s.entry.spec.name for s in p.steps]) for p in plans]


def test_a_round_is_ordered_by_the_probes_and_then_by_name():
    """Cheap and telling probes first, whatever order the catalogue has."""
    found = plan(GPU, entry("b", order=2), entry("c", order=1), entry("a", order=2))
    assert names(found) == [("", ["c", "a", "b"])]


def test_a_probe_for_another_backend_is_left_out():
    """A star is for all; where nothing applies there is no series, and no worker is started for it."""
    assert names(plan(GPU, entry("any"), entry("cpu_only", backends=("cpu",)))) == [("", ["any"])]
    assert plan(GPU, entry("cpu_only", backends=("cpu",))) == []


def test_only_probes_that_depend_on_it_run_with_every_instruction_set():
    """The others would repeat the same instructions."""
    found = plan(CPU, entry("numbers", every_instruction_set=True), entry("sensors"), sets=CPU.instruction_sets)
    assert names(found) == [("native", ["numbers", "sensors"]), ("avx2", ["numbers"]), ("baseline", ["numbers"])]


def test_probes_without_torch_form_a_series_of_their_own():
    """They run under canaryd's own interpreter, and no instruction set is chosen for them."""
    found = plan(CPU, entry("numbers"), entry("sensors", numeric=False), sets=("native",))
    assert names(found) == [("native", ["numbers"]), ("", ["sensors"])]
    assert [p.numeric for p in found] == [True, False]


def test_every_series_of_a_round_has_the_same_seed_cases_and_drill():
    """So that results of two instruction sets can be set side by side."""
    numbers = entry("numbers", every_instruction_set=True)
    steps = [s for p in plan(CPU, numbers, sets=("native", "avx2"), cases=("a",), drill="flip") for s in p.steps]
    assert {(s.seed, s.cases, s.drill, s.confirms) for s in steps} == {(7, ("a",), "flip", "")}


def test_every_probe_has_its_own_level():
    """The configuration may set one for each."""
    levels = {"a": "quick", "b": "deep"}
    (only,) = schedule.plan_round(GPU, [entry("a"), entry("b")], levels=levels, seed=1, sets=("",))
    assert [s.level for s in only.steps] == ["quick", "deep"]


def test_quick_takes_the_instruction_sets_in_turn():
    """One per round, each again after as many rounds as there are; the first round has the native one."""
    turns = [schedule.instruction_sets(CPU, "quick", turn) for turn in range(5)]
    assert turns == [("native",), ("avx2",), ("baseline",), ("native",), ("avx2",)]


@pytest.mark.parametrize("level", ["standard", "deep"])
def test_above_quick_every_round_has_all_instruction_sets(level):
    """Whatever the turn."""
    assert schedule.instruction_sets(CPU, level, 5) == CPU.instruction_sets


@pytest.mark.parametrize("level", ["quick", "standard", "deep"])
def test_other_devices_have_no_instruction_sets(level):
    """One series, without a name."""
    assert schedule.instruction_sets(GPU, level, 3) == ("",)


def test_seeds_are_fresh_and_survive_json():
    """Readers of JSON keep 53 bits."""
    seeds = {schedule.new_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)


# --- After a mismatch ------------------------------------------------------------------------------------------------


def confirm(found: Run, siblings=(), count: int = 3) -> list[schedule.Plan]:
    return schedule.confirmations(found, entry("p"), GPU, siblings, count)


def test_a_mismatch_is_repeated_as_often_as_the_policy_says():
    """Each repetition is a series, and so a worker, of its own: same case, seed, level and instruction set."""
    wrong = run(comparison("a"), comparison("b", wrong=False), seed=42, level="deep", instruction_set="avx2")
    plans = confirm(wrong)
    assert [(p.device, p.instruction_set, len(p.steps)) for p in plans] == [(GPU, "avx2", 1)] * 3
    steps = {(s.seed, s.level, s.cases, s.drill, s.confirms) for p in plans for s in p.steps}
    assert steps == {(42, "deep", ("a",), "", "r1")}


def test_every_sibling_is_asked_once_for_the_same_bytes():
    """After the accused: only a sibling can tell a broken device from a broken kernel."""
    plans = confirm(run(comparison()), [TWIN])
    assert [p.device for p in plans] == [GPU, GPU, GPU, TWIN]
    assert plans[-1].steps == plans[0].steps


def test_a_drill_does_not_ask_siblings():
    """The injected fault would be injected there too, and witness nothing."""
    plans = confirm(run(comparison(), drill="flip"), [TWIN])
    assert [p.device for p in plans] == [GPU] * 3
    assert {s.drill for p in plans for s in p.steps} == {"flip"}


def test_a_clean_run_and_a_confirmation_ask_for_nothing():
    """Otherwise a mismatch would go on for ever."""
    assert confirm(run(comparison(wrong=False))) == []
    assert confirm(run(comparison(), confirms="r0")) == []


def test_each_wrong_case_is_named_once_and_not_too_many_of_them():
    """Several uploads of one case are one case; a device that is wrong everywhere is confirmed by the first few."""
    (first, *_) = confirm(run(comparison("b"), comparison("a"), comparison("b")))
    assert first.steps[0].cases == ("b", "a")
    (first, *_) = confirm(run(*(comparison(f"c{i}") for i in range(100))))
    assert first.steps[0].cases == tuple(f"c{i}" for i in range(schedule.CONFIRMED_CASES))


def test_a_doubtful_golden_is_confirmed_too():
    """What accuses the host's processor deserves the same repetition."""
    assert len(confirm(run(comparison(subject=Subject.HOST)))) == 3


def test_a_mismatch_before_a_crash_is_confirmed():
    """Facts count, whatever became of the worker that delivered them."""
    assert len(confirm(dataclasses.replace(run(comparison()), outcome=Outcome.CRASHED))) == 3
