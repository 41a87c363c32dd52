"""What runs next, as pure functions: no clock, no process, no device."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from canaryd.config.judge_policy import JudgePolicy
from canaryd.engine import schedule
from canaryd.engine.catalogue import Entry, ProbeFile
from canaryd.facts import Comparison, Evidence, Exactness, Subject
from canaryd.model import INTENSITIES, Device, Outcome, Run
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


def due(last: dict[str, float], period: float = HOUR, *, luck: float = 0.5) -> list[str]:
    return schedule.due(last, {"p": period}, now=NOW, luck=luck)


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
    assert schedule.due(last, {"short": 30.0, "long": 3000.0}, now=NOW, luck=0.5) == ["short"]


def test_luck_moves_a_period_by_a_tenth():
    """Luck 0 shortens it, luck 1 lengthens it, one half leaves it alone."""
    for luck, first in ((0.0, 90.0), (0.5, 100.0), (1.0, 110.0)):
        assert not due({"p": NOW - first + 0.01}, 100.0, luck=luck)
        assert due({"p": NOW - first - 0.01}, 100.0, luck=luck)


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


# --- What a suspect is asked beyond its confirmations ----------------------------------------------------------------

POLICY = JudgePolicy()
GAP = POLICY.repeat_gap


def clean(ident: str, started: float, **fields) -> Run:
    return run(comparison(wrong=False), id=ident, started=started, **fields)


def confirmed(root: str = "r1", count: int = POLICY.confirm_runs) -> list[Run]:
    return [clean(f"{root}c{i}", NOW + i, confirms=root) for i in range(count)]


def due_now(runs: list[Run], after: float) -> list[tuple[str, str]]:
    return [(found.id, intensity) for found, intensity in schedule.retests_due(runs, POLICY, NOW + after)]


def retest(found: Run, intensity: str, *others: Entry, device: Device = GPU, **fields) -> list[schedule.Plan]:
    entries = {e.spec.name: e for e in (*others, entry("p", every_instruction_set=True))}
    return schedule.retests(found, intensity, entries, device, seed=99, **fields)


@pytest.mark.parametrize("intensity", sorted(set(INTENSITIES) - {"content"}))
def test_a_retest_asks_the_same_bytes_for_the_time_of_a_deep_run(intensity):
    """Cases, seed and level make the operands, so they stay; only time and conditions are others."""
    (plan,) = retest(run(comparison("a"), comparison("b", wrong=False), seed=42, instruction_set="avx2"), intensity)
    (step,) = plan.steps
    assert (plan.instruction_set, step.cases, step.seed, step.level) == ("avx2", ("a",), 42, "standard")
    assert (step.intensity, step.effort, step.confirms, step.trigger) == (intensity, "deep", "", "retest of r1")


def test_a_run_as_usual_has_the_time_of_its_level():
    """Only a retest has that of deep."""
    assert [s.effort for s in plan(GPU, entry("p"))[0].steps] == ["quick"]


def test_other_content_is_the_whole_probe_at_level_deep_with_a_fresh_seed():
    """No other probe where this one was wrong, and no case left out."""
    (plan,) = retest(run(comparison(), seed=42), "content", entry("other"))
    assert [(s.entry.spec.name, s.level, s.seed, s.cases, s.intensity) for s in plan.steps] == [
        ("p", "deep", 99, (), "content")
    ]


def test_other_content_on_a_cpu_takes_another_instruction_set_too_in_turn():
    """The path that failed, and each time the next one."""
    found = run(comparison(), device="CPU-1", instruction_set="avx2")
    turns = [[p.instruction_set for p in retest(found, "content", device=CPU, turn=turn)] for turn in range(3)]
    assert turns == [["avx2", "native"], ["avx2", "baseline"], ["avx2", "native"]]


def test_unknown_recorded_bits_ask_every_probe_that_computes():
    """The exact ones tell a fault from a stack that changed; sensors and endpoints have nothing to say."""
    others = [entry("exact"), entry("sensors", numeric=False), entry("cpu_only", backends=("cpu",))]
    (plan,) = retest(run(unknown=("x",)), "content", *others)
    assert sorted(s.entry.spec.name for s in plan.steps) == ["exact", "p"]
    (plan,) = retest(run(unknown=("x",)), "steady", *others)
    assert [(s.entry.spec.name, s.cases) for s in plan.steps] == [("p", ("x",))]


@pytest.mark.parametrize("intensity", INTENSITIES)
def test_drills_endpoints_and_what_is_not_computed_are_never_retested(intensity):
    """A fault of software, a server that is not ours to load, a reading."""
    server = Device(uuid="endpoint:main", backend="endpoint", index=0, model="a server")
    assert retest(run(comparison()), intensity)
    assert retest(run(comparison(), drill="flip"), intensity) == []
    assert retest(run(comparison(), device="endpoint:main", probe="e"), intensity, device=server) == []
    assert retest(run(comparison(), probe="s"), intensity, entry("s", numeric=False)) == []
    assert retest(run(comparison(), probe="gone"), intensity) == []


def test_a_retest_that_was_wrong_is_confirmed_at_its_own_intensity():
    """Without the load, the confirmations would be clean."""
    (first, *_) = confirm(run(comparison(), intensity="pulsed"))
    assert (first.steps[0].intensity, first.steps[0].effort) == ("pulsed", "deep")


def test_a_round_at_an_intensity_carries_it_in_every_step():
    """What the repro command of a retest asks for."""
    plans = plan(CPU, entry("p"), entry("q"), sets=("native",), intensity="steady")
    assert [s.intensity for p in plans for s in p.steps] == ["steady", "steady"]


def test_a_mismatch_is_retested_once_its_confirmations_are_through():
    """Not while some are outstanding, unless they never came; and not before it is independent evidence."""
    wrong = run(comparison())
    assert due_now([wrong, *confirmed(count=2)], GAP) == []
    assert due_now([wrong, *confirmed()], GAP - 1) == []
    assert due_now([wrong, *confirmed()], GAP) == [("r1", "repeated")]
    lost = [dataclasses.replace(r, outcome=Outcome.CRASHED) for r in confirmed()]
    assert due_now([wrong, *lost], schedule.UNSETTLED - 1) == []
    assert due_now([wrong, *lost], schedule.UNSETTLED) == [("r1", "repeated")]


def asked_over(seconds: float, step: float, cost: float = 1.0) -> list[tuple[float, str]]:
    """Play the clock: whatever is due is run at once and is clean. Return when each retest began."""
    runs = [run(comparison()), *confirmed()]
    found: list[tuple[float, str]] = []
    after = 0.0
    while after <= seconds:
        for _, intensity in due_now(runs, after)[:1]:
            runs.append(clean(f"t{len(found)}", NOW + after, intensity=intensity, seconds=cost))
            found.append((after, intensity))
        after += step
    return found


def test_each_intensity_is_asked_soon_then_at_growing_intervals():
    """A round at once, one after an hour, one after six, and then one intensity a day."""
    found = asked_over(4 * schedule.DAY, 20.0)
    assert [intensity for _, intensity in found[:15]] == list(INTENSITIES) * 3
    starts = [after for after, _ in found]
    assert starts[:5] == [GAP * i for i in range(1, 6)]
    assert starts[5] - starts[4] == schedule.ROUNDS[1]
    assert starts[10] - starts[9] == schedule.ROUNDS[2]
    assert {b - a for a, b in itertools.pairwise(starts[14:])} == {schedule.DAY}
    assert [intensity for _, intensity in found[15:]] == list(INTENSITIES[: len(found) - 15])
    assert len(found) == 18


def test_any_two_retests_are_independent_evidence():
    """No two begin closer than what the judge counts apart."""
    starts = [after for after, _ in asked_over(20_000.0, 1.0)]
    assert min(b - a for a, b in itertools.pairwise([0.0, *starts])) >= GAP


@pytest.mark.parametrize("cost", [240.0, 720.0, 3000.0])
def test_retests_take_no_more_than_their_share_of_a_day(cost):
    """None begins while the last day's took the share: the most there can be is that and one retest."""
    found = asked_over(2.5 * schedule.DAY, 60.0, cost)
    for start, _ in found:
        within = [after for after, _ in found if start - schedule.DAY < after < start]
        assert len(within) * cost < schedule.RETEST_SHARE * schedule.DAY
    assert len(found) > 3


def test_the_share_is_crossed_from_both_sides():
    """One second below it the next retest is due, at it none is; confirmations of retests count, usual runs do not."""
    share = schedule.RETEST_SHARE * schedule.DAY
    wrong = [run(comparison()), *confirmed()]
    usual = clean("u", NOW + 10, seconds=share)
    for spent, expected in ((share - 1, [("r1", "content")]), (share, [])):
        taken = [
            clean("t", NOW + 10, intensity="repeated", seconds=100.0),
            clean("tc", NOW + 20, intensity="repeated", confirms="t", seconds=spent - 100.0),
        ]
        assert due_now([*wrong, usual, *taken], 100.0) == expected


def test_a_newer_mismatch_begins_anew_and_every_lane_has_its_own():
    """Rounds count from the newest mismatch of a probe and instruction set; the least asked comes first."""
    past = [run(comparison()), *confirmed(), clean("t", NOW + 100, intensity="repeated")]
    assert due_now(past, 200.0) == [("r1", "content")]
    again = run(comparison(), id="r2", started=NOW + 200)
    assert due_now([*past, again, *confirmed("r2")], 300.0) == [("r2", "repeated")]
    other = run(comparison(), id="r3", started=NOW + 200, instruction_set="avx2")
    assert due_now([*past, other, *confirmed("r3")], 300.0) == [("r3", "repeated"), ("r1", "content")]


def test_a_wrong_retest_is_a_mismatch_and_its_confirmations_are_no_retests():
    """It begins anew; what confirms it at its intensity does not use up the round."""
    past = [run(comparison()), *confirmed(), run(comparison(), id="r4", started=NOW + 100, intensity="steady")]
    past += [clean(f"c{i}", NOW + 101 + i, confirms="r4", intensity="steady") for i in range(3)]
    assert due_now(past, 200.0) == [("r4", "repeated")]
    past += [clean("t0", NOW + 200, intensity="repeated"), clean("t1", NOW + 300, intensity="content")]
    assert due_now(past, 400.0) == [("r4", "steady")]


def test_a_retest_dated_in_the_future_holds_up_nothing():
    """The clock was set back: it neither counts as asked nor keeps the next one waiting."""
    ahead = clean("t", NOW + 2 * HOUR, intensity="repeated", seconds=1e6)
    assert due_now([run(comparison()), *confirmed(), ahead], HOUR) == [("r1", "repeated")]


def test_a_lost_retest_counts_as_asked():
    """What crashes under load is not asked for ever."""
    lost = dataclasses.replace(clean("t", NOW + 100, intensity="repeated"), outcome=Outcome.CRASHED)
    assert due_now([run(comparison()), *confirmed(), lost], 200.0) == [("r1", "content")]


def test_nothing_wrong_drills_and_the_future_call_for_no_retest():
    """A confirmation that was wrong calls for none of its own either."""
    assert due_now([clean("c", NOW)], HOUR) == []
    assert due_now([run(comparison(), drill="flip"), *confirmed()], HOUR) == []
    assert due_now([run(comparison(), started=NOW + 2 * HOUR)], HOUR) == []
    assert due_now([run(comparison(), id="x", confirms="r0")], HOUR) == []
    assert due_now([run(unknown=("x",)), *confirmed()], HOUR) == [("r1", "repeated")]
