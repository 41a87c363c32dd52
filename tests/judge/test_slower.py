"""Slower than before: a healthy device raises no alarm however its days are distributed; thresholds have two sides."""

import math
import random
import statistics

import pytest

from canaryd.facts import Reading
from canaryd.formatting import DAY
from canaryd.judge import slower
from canaryd.judge.slower import Course, Key, findings, summary
from canaryd.model import Outcome, Run, State

TODAY = 20_500
NOW = (TODAY + 0.5) * DAY
KERNEL = Key("recorded_kernels", "kernel_seconds{kind=prefill}", "1/quick/aa")
LIMIT = Key("nvidia_telemetry", "power_limit_watts{limit=enforced}", "1/quick/aa")
LOWER = 700 * (1 - slower.POWER_LIMIT_MOVED)
USED = Key("nvidia_telemetry", "utilization_ratio{engine=gpu}", "1/quick/aa")


def course(values, last=TODAY - 1, unit="seconds"):
    """One value a day, of which the last is `last`."""
    return Course(unit=unit, days=dict(zip(range(last - len(values) + 1, last + 1), values, strict=True)))


def noisy(level, count, seed=0, scatter=0.01):
    chance = random.Random(seed)
    return [level * math.exp(scatter * chance.gauss(0, 1)) for _ in range(count)]


def stepped(before, after, early=40, late=10, seed=0, scatter=0.01):
    """A course that moves from one level to another `late` days ago."""
    return course([*noisy(before, early, seed, scatter), *noisy(after, late, seed + 1, scatter)])


def found(own, peers=None, now=NOW):
    """Return the finding, if there is one."""
    return next(findings(own, peers or {}, now), None)


def run(at, *readings, **more):
    common = {"id": f"r{at}", "device": "GPU-1", "probe": "recorded_kernels", "probe_version": 1, "seconds": 1.0}
    common |= {"outcome": Outcome.COMPLETED, "stack": {"torch": "2.9"}}
    return Run(**{**common, "started": at, "readings": readings, **more})


# --- Healthy devices --------------------------------------------------------------------------------------------------


def heavy_tails(draws, days):
    """Student's t with two degrees of freedom around 2 %."""
    return [math.exp(0.02 * draws.gauss(0, 1) / math.sqrt(draws.gammavariate(1, 1))) for _ in range(days)]


def long_memory(draws, days, part=0.8, scatter=0.03):
    """Each day's level takes over 0.8 of the day before."""
    level, seen = draws.gauss(0, scatter), []
    for _ in range(days):
        level = part * level + draws.gauss(0, scatter * math.sqrt(1 - part * part))
        seen.append(math.exp(level))
    return seen


def hours_that_depend(draws, days):
    """The median of 24 hours, each of which takes over 0.95 of the one before."""
    level, seen = 0.0, []
    for _ in range(days):
        hours = []
        for _ in range(24):
            level = 0.95 * level + draws.gauss(0, 0.05 * math.sqrt(1 - 0.95**2))
            hours.append(math.exp(level))
        seen.append(statistics.median(hours))
    return seen


def weekly(draws, days):
    """5 % slower on weekdays than on weekends, and 2 % of noise."""
    return [(1.05 if day % 7 < 5 else 1.0) * math.exp(0.02 * draws.gauss(0, 1)) for day in range(days)]


@pytest.mark.parametrize("healthy", [heavy_tails, long_memory, hours_that_depend, weekly])
def test_healthy_devices_raise_no_alarm(healthy):
    """20 device-years, looked at every day: no finding, whether days are heavy-tailed, dependent or weekly."""
    draws = random.Random(11)
    for _ in range(20):
        whole = {KERNEL: course([0.01 * v for v in healthy(draws, 365)])}
        for today in range(TODAY - 365, TODAY + 1):
            finding = found(whole, now=(today + 0.5) * DAY)
            assert finding is None, f"{healthy.__name__}: {finding}"


# --- The rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "alarm"), [(6, False), (7, True), (33, True), (34, False), (60, False)])
def test_a_change_is_found_after_a_week_and_becomes_the_usual(late, alarm):
    """Before that one weekend could decide; after a month it is what most days are."""
    assert (found({KERNEL: stepped(0.01, 0.013, early=60, late=late)}) is not None) is alarm


def test_another_stack_is_another_series():
    """What is slower after an upgrade is not compared with what was before."""
    before, after = course(noisy(0.01, 30), last=TODAY - 11), course(noisy(0.013, 10))
    assert found({KERNEL: before, KERNEL._replace(basis="1/quick/bb"): after}) is None


# --- Excuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "was", "enough", "too_little", "word"),
    [
        (LIMIT, 700.0, LOWER - 2, LOWER + 2, "power limit"),
        (USED, 0.3, 0.3 + slower.LOAD_MOVED + 0.02, 0.3 + slower.LOAD_MOVED - 0.02, "other work"),
    ],
)
def test_settings_and_load_explain_slowness(key, was, enough, too_little, word):
    """A lower power limit, or more other work since then, makes it a note; less of it is a rejected rival."""
    for value, noted in ((enough, True), (too_little, False)):
        own = {KERNEL: stepped(0.01, 0.013), key: stepped(was, value, scatter=0.0)}
        finding = found(own)
        assert finding.state is (State.HEALTHY if noted else State.DEGRADED)
        (rival,) = [r for r in finding.rivals if word in r.why]
        assert rival.rejected is not noted
        assert any(text.startswith("Not counted against the device: ") for text in finding.evidence) is noted


@pytest.mark.parametrize(("theirs", "noted"), [(0.0122, True), (0.0115, False), (0.01, False)])
def test_peers_that_became_as_slow_make_it_a_note(theirs, noted):
    """It must be 1.10 times as slow as they became, as it must be as it was; where there are none it says so."""
    own = {KERNEL: stepped(0.01, 0.013)}
    finding = found(own, {"cuda:1": {KERNEL: stepped(0.01, theirs, seed=7)}})
    assert finding.state is (State.HEALTHY if noted else State.DEGRADED)
    assert any("there is no peer" in r.why for r in found(own).rivals)


# --- From runs and polls ----------------------------------------------------------------------------------------------


def levels(*runs, polls=()):
    """Return reading → value of the day of the epoch on which these runs and polls were."""
    return {of.reading: of.value for of in summary("GPU-1", 0, runs, polls).levels}


def test_only_runs_as_usual_count():
    """Confirmations, retests, baselining, failed runs and another intensity are no readings of the usual."""
    reading = Reading(name="kernel_seconds", value=0.01, unit="seconds", labels={"kind": "prefill"})
    odd = [{"confirms": "x"}, {"cases": ("a",)}, {"intensity": "steady"}, {"baselining": True}]
    odd += [{"outcome": Outcome.CRASHED}]
    assert levels(*(run(n, reading, **more) for n, more in enumerate(odd))) == {}
    assert levels(run(5.0, reading), run(3.0, reading)) == {"kernel_seconds{kind=prefill}": 0.01}
