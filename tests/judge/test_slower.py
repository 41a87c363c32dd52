"""Slower than before: a healthy device raises no alarm however its days are distributed; thresholds have two sides."""

import json
import math
import random
import statistics
import time

import pytest

from canaryd.codec import from_json, to_json
from canaryd.facts import Reading
from canaryd.formatting import DAY
from canaryd.judge import slower
from canaryd.judge.slower import Course, Key, courses, findings, summary
from canaryd.judge.slower import Day as Summary
from canaryd.judge.telemetry.readings import in_words
from canaryd.model import Cause, Outcome, Run, State

TODAY = 20_500
NOW = (TODAY + 0.5) * DAY
KERNEL = Key("recorded_kernels", "kernel_seconds{kind=prefill}", "1/quick/aa")
SPEED = Key("exact_matmul", "speed_float32", "1/quick/aa")
LIMIT = Key("nvidia_telemetry", "power_limit_watts{limit=enforced}", "1/quick/aa")
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


@pytest.mark.parametrize(("times", "alarm"), [(slower.SLOWER - 0.02, False), (slower.SLOWER + 0.02, True)])
@pytest.mark.parametrize("key", [KERNEL, SPEED])
def test_slower_than_before(key, times, alarm):
    """A tenth slower than its usual day is degraded, less is nothing: for times and for speeds."""
    usual, slow = (0.01, 0.01 * times) if key is KERNEL else (4e12, 4e12 / times)
    finding = found({key: stepped(usual, slow, scatter=0.002)})
    assert (finding is not None) is alarm
    if finding is not None:
        assert (finding.rule, finding.state) == ("slower-than-before", State.DEGRADED)
        assert (finding.cause, finding.probe) == (Cause.ENVIRONMENT, key.probe)
        assert f"{in_words(key.reading)} is" in finding.message
        assert "since 2026-02-09" in finding.message  # seven days before TODAY
        assert "The results are still right." in finding.evidence
        assert [r.rejected for r in finding.rivals if r.cause is Cause.SOFTWARE] == [True]


def test_faster_is_no_finding():
    """What became better is nobody's business."""
    assert found({KERNEL: stepped(0.01, 0.008), SPEED: stepped(4e12, 5e12)}) is None


@pytest.mark.parametrize(("late", "alarm"), [(6, False), (7, True), (33, True), (34, False), (60, False)])
def test_a_change_is_found_after_a_week_and_becomes_the_usual(late, alarm):
    """Before that one weekend could decide; after a month it is what most days are."""
    assert (found({KERNEL: stepped(0.01, 0.013, early=60, late=late)}) is not None) is alarm


@pytest.mark.parametrize("days", [13, 14])
def test_two_weeks_before_are_the_least(days):
    """A device of which less is known has no usual speed."""
    assert (found({KERNEL: stepped(0.01, 0.02, early=days, late=7)}) is not None) is (days >= slower.LEAST_BEFORE)


def test_each_day_of_the_week_must_be_slow():
    """One day as fast as ever shows that it can."""
    slow = stepped(0.01, 0.013)
    slow.days[TODAY - 3] = 0.0105
    assert found({KERNEL: slow}) is None


def test_one_slow_week_before_hides_nothing():
    """What is usual is the median of the days, not the worst of them."""
    slow = stepped(0.01, 0.013)
    slow.days.update(dict.fromkeys(range(TODAY - 30, TODAY - 23), 0.02))
    assert found({KERNEL: slow}) is not None


def test_another_stack_is_another_series():
    """What is slower after an upgrade is not compared with what was before."""
    before, after = course(noisy(0.01, 30), last=TODAY - 11), course(noisy(0.013, 10))
    assert found({KERNEL: before, KERNEL._replace(basis="1/quick/bb"): after}) is None


def test_an_old_series_says_nothing_of_today():
    """Three days after its last value a series falls silent."""
    slow = stepped(0.01, 0.013)
    assert found({KERNEL: slow}, now=NOW + (slower.FRESH - 1) * DAY) is not None
    assert found({KERNEL: slow}, now=NOW + slower.FRESH * DAY) is None


def test_today_and_the_future_do_not_count():
    """A day that is not over is half a day, and a day of tomorrow was dated by a clock that ran ahead."""
    slow = course([*noisy(0.01, 40), *noisy(0.013, 7)], last=TODAY)
    assert found({KERNEL: slow}) is None
    assert found({KERNEL: slow}, now=NOW + DAY) is not None


def test_a_reading_that_shows_nothing_is_no_speed():
    """A time or a speed of 0 is no measurement; neither is a division by it."""
    assert found({KERNEL: course([0.0] * 40 + [0.01] * 10), SPEED: course([4e12] * 40 + [0.0] * 10)}) is None


# --- Excuses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "noted"), [(slower.SHARED - 0.1, False), (slower.SHARED + 0.1, True)])
def test_what_the_peers_show_too_is_not_the_device(part, noted):
    """Where peers became slower on the same days it is a note, and the rival is open."""
    peers = {f"cuda:{n}": {KERNEL: stepped(0.01, 0.01 * 1.3**part, seed=10 * n)} for n in (1, 2, 3)}
    finding = found({KERNEL: stepped(0.01, 0.013)}, peers)
    assert finding.state is (State.HEALTHY if noted else State.DEGRADED)
    (shared,) = [r for r in finding.rivals if "share" in r.why and "peers" in r.why]
    assert shared.rejected is not noted


def test_a_peer_with_another_stack_is_no_peer():
    """Another stack may be slower for a reason of its own."""
    peers = {"cuda:1": {KERNEL._replace(basis="1/quick/bb"): stepped(0.01, 0.013)}}
    finding = found({KERNEL: stepped(0.01, 0.013)}, peers)
    assert finding.state is State.DEGRADED
    assert any("no peer to compare with" in r.why for r in finding.rivals)


@pytest.mark.parametrize(
    ("key", "was", "enough", "too_little", "word"),
    [
        (
            LIMIT,
            700.0,
            700 * (1 - slower.POWER_LIMIT_MOVED) - 2,
            700 * (1 - slower.POWER_LIMIT_MOVED) + 2,
            "power limit",
        ),
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


# --- From runs and polls ----------------------------------------------------------------------------------------------


def levels(*runs, polls=()):
    """Return reading → value of the day of the epoch on which these runs and polls were."""
    return {of.reading: of.value for of in summary("GPU-1", 0, runs, polls).levels}


def test_only_runs_as_usual_count():
    """Drills, confirmations, retests, baselining, failed runs and another intensity are no readings of the usual."""
    reading = Reading(name="kernel_seconds", value=0.01, unit="seconds", labels={"kind": "prefill"})
    odd = [{"drill": "bit"}, {"confirms": "x"}, {"cases": ("a",)}, {"intensity": "steady"}, {"baselining": True}]
    odd += [{"outcome": Outcome.CRASHED}]
    assert levels(*(run(n, reading, **more) for n, more in enumerate(odd))) == {}
    assert levels(run(5.0, reading), run(3.0, reading)) == {"kernel_seconds{kind=prefill}": 0.01}


def test_stack_version_and_level_are_the_basis():
    """Each of them begins a series of its own."""
    reading = Reading(name="speed_float32", value=1e12, unit="flops per second")
    several = [run(1.0, reading), run(2.0, reading, level="deep"), run(3.0, reading, probe_version=2)]
    day = summary("GPU-1", 0, [*several, run(4.0, reading, stack={"torch": "2.10"})], [])
    assert len({of.basis for of in day.levels}) == 4


def test_what_is_no_number_is_left_out():
    """Texts, truths and what is not finite; and readings that tell nothing of speed."""
    bad = [Reading(name="speed_float32", value=v) for v in ("fast", True, math.inf, math.nan)]
    assert levels(run(1.0, *bad, Reading(name="trials", value=3))) == {}


def test_the_best_quarter_stands_for_a_day():
    """Other work on the device makes most runs slow, and the device none the slower."""
    times = [run(n, Reading(name="kernel_seconds", value=v)) for n, v in enumerate((0.01, 0.01, *[0.03] * 6))]
    assert levels(*times) == {"kernel_seconds": 0.01}
    speeds = [run(n, Reading(name="speed_float32", value=v)) for n, v in enumerate((3.0, 3.0, *[1.0] * 6))]
    assert levels(*speeds) == {"speed_float32": 3.0}


def test_what_may_explain_slowness_comes_from_polls():
    """Power limit and use as they are; a load per core, because 8 is little for 64 processors."""
    values = [
        Reading(name="power_limit_watts", value=700.0, unit="watts", labels={"limit": "enforced"}),
        Reading(name="power_limit_watts", value=800.0, unit="watts", labels={"limit": "max"}),
        Reading(name="utilization_ratio", value=0.5, unit="1", labels={"engine": "gpu"}),
        Reading(name="load_average", value=8.0, unit="1"),
        Reading(name="cpu_cores", value=64, unit="1", labels={"state": "online"}),
        Reading(name="temperature_celsius", value=60.0, unit="celsius"),
    ]
    assert levels(polls=[run(1.0, *values, probe="nvidia_telemetry")]) == {
        "power_limit_watts{limit=enforced}": 700.0,
        "utilization_ratio{engine=gpu}": 0.5,
        "load_average{per=core}": 0.125,
    }


def test_a_day_is_summed_up_from_its_own_runs():
    """Days, stacks and the tests of a day; what it leaves is read again as it was written."""
    runs = [run((TODAY - 3 + n // 4) * DAY + n, Reading(name="kernel_seconds", value=0.01)) for n in range(8)]
    days = [summary("GPU-1", TODAY - 3, runs, []), summary("GPU-1", TODAY - 2, runs, [])]
    assert [day.levels[0].count for day in days] == [4, 4]
    assert [list(of.days) for of in courses(days).values()] == [[TODAY - 3, TODAY - 2]]
    assert summary("GPU-1", TODAY + 9, runs, []).levels == ()
    assert all(from_json(Summary, json.loads(json.dumps(to_json(day)))) == day for day in days)
    assert [(s.id, s.at) for s in days[1].stacks] == [(runs[0].stack_id, runs[4].started)]


def test_it_is_cheap():
    """16 devices of 40 series and two months, all of them changed: far below a second a look."""
    of = {
        str(n): {
            Key("p", f"kernel_seconds{{kind={k}}}", "b"): stepped(0.01, 0.013, 60, 8, seed=n * 40 + k)
            for k in range(40)
        }
        for n in range(16)
    }
    started = time.process_time()
    for name, own in of.items():
        list(findings(own, {other: c for other, c in of.items() if other != name}, NOW))
    assert time.process_time() - started < 5.0  # 0.1 s where this was written
