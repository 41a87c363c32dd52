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


@pytest.mark.parametrize(("ago", "is_due"), [(0.0, False), (HOUR - 1, False), (HOUR, True), (HOUR + 1, True)])
def test_a_probe_is_due_when_its_period_has_passed(ago, is_due):
    """Counted from the start of its last run, the period itself included."""
    assert bool(due({"p": NOW - ago})) is is_due


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


def test_quick_takes_the_instruction_sets_in_turn():
    """One per round, each again after as many rounds as there are; the first round has the native one."""
    turns = [schedule.instruction_sets(CPU, "quick", turn) for turn in range(5)]
    assert turns == [("native",), ("avx2",), ("baseline",), ("native",), ("avx2",)]


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


@pytest.mark.parametrize("intensity", INTENSITIES)
def test_endpoints_and_what_is_not_computed_are_never_retested(intensity):
    """A server that is not ours to load, a reading."""
    server = Device(uuid="endpoint:main", backend="endpoint", index=0, model="a server")
    assert retest(run(comparison()), intensity)
    assert retest(run(comparison(), device="endpoint:main", probe="e"), intensity, device=server) == []
    assert retest(run(comparison(), probe="s"), intensity, entry("s", numeric=False)) == []
    assert retest(run(comparison(), probe="gone"), intensity) == []


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


@pytest.mark.parametrize("cost", [240.0, 720.0, 3000.0])
def test_retests_take_no_more_than_their_share_of_a_day(cost):
    """None begins while the last day's took the share: the most there can be is that and one retest."""
    found = asked_over(2.5 * schedule.DAY, 60.0, cost)
    for start, _ in found:
        within = [after for after, _ in found if start - schedule.DAY < after < start]
        assert len(within) * cost < schedule.RETEST_SHARE * schedule.DAY
    assert len(found) > 3


def test_a_retest_dated_in_the_future_holds_up_nothing():
    """The clock was set back: it neither counts as asked nor keeps the next one waiting."""
    ahead = clean("t", NOW + 2 * HOUR, intensity="repeated", seconds=1e6)
    assert due_now([run(comparison()), *confirmed(), ahead], HOUR) == [("r1", "repeated")]
