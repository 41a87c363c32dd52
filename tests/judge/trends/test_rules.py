"""Slow changes: a healthy device raises no alarm however its days are distributed, and each threshold has two sides."""

import itertools
import json
import math
import random
import statistics
import time

import pytest

from canaryd.codec import from_json, to_json
from canaryd.facts import Reading
from canaryd.formatting import DAY
from canaryd.judge.telemetry.readings import in_words
from canaryd.judge.trends import change as trends_change
from canaryd.judge.trends import rules
from canaryd.judge.trends.change import change, marks, step
from canaryd.judge.trends.days import STEADY, Course, Day, Key, courses, summary, tracks
from canaryd.judge.trends.rules import findings
from canaryd.model import Cause, Outcome, Run, State

TODAY = 20_500
NOW = (TODAY + 0.5) * DAY
KERNEL = Key("recorded_kernels", "kernel_seconds{kind=prefill}", "1/quick/aa")
SPEED = Key("exact_matmul", "speed_float32", "1/quick/aa")
ERROR = Key("recorded_kernels", "recorded_error_ratio{kind=prefill}", "1/quick/aa")
HEAT = Key("nvidia_telemetry", "temperature_celsius{power=601-631,sensor=core}", "1/quick/aa")
LIMIT = Key("nvidia_telemetry", "power_limit_watts{limit=enforced}", "1/quick/aa")
USED = Key("nvidia_telemetry", "utilization_ratio{engine=gpu}", "1/quick/aa")
CORE = Key("nvidia_telemetry", "temperature_celsius{sensor=core}", "1/quick/aa")


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
    return {f.rule: f for f in findings(own, peers or {}, now)}


def run(at, *readings, **more):
    common = {"id": f"r{at}", "device": "GPU-1", "probe": "recorded_kernels", "probe_version": 1, "seconds": 1.0}
    common |= {"outcome": Outcome.COMPLETED, "stack": {"torch": "2.9"}}
    return Run(**{**common, "started": at, "readings": readings, **more})


# --- The test itself --------------------------------------------------------------------------------------------------


def test_the_rank_test_is_exact():
    """It gives the share of all ways to choose the later values, counted one by one."""
    values = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6, 5.0, 3.5]
    for picked in [(4, 6, 2), (4, 2, 7), (4, 2, 0)]:
        after = [values[i] for i in picked]
        before = [v for i, v in enumerate(values) if i not in picked]

        def wrong_way(late, of=values):
            early = [v for i, v in enumerate(of) if i not in late]
            return sum(b >= of[i] for i in late for b in early)

        seen = wrong_way(picked)
        ways = [wrong_way(late) <= seen for late in itertools.combinations(range(len(values)), 3)]
        assert trends_change.chance(after, before) == pytest.approx(sum(ways) / len(ways))


def test_equal_values_make_no_alarm():
    """A constant that stays one has changed by chance for certain; of equal values the earlier counts as higher."""
    assert trends_change.chance([1.0] * 8, [1.0] * 40) == 1.0
    assert trends_change.chance([2.0, 2.0], [1.0, 2.0, 1.0]) > trends_change.chance([2.0, 2.0], [1.0, 1.9, 1.0])


def test_no_false_alarm_of_the_rank_test_beyond_what_is_stated():
    """On exchangeable days of any distribution: at most what is allowed per series and year."""
    threshold = (
        20 * trends_change.FALSE_ALARMS / trends_change.LOOKS / len(trends_change.SPLITS)
    )  # 0.2 a year, so that there is some to count
    draws = random.Random(7)
    alarms, years = 0, 40
    for _ in range(years):
        heavy = course([draws.gauss(0, 1) / math.sqrt(draws.gammavariate(0.5, 1)) for _ in range(365)])  # Cauchy
        seen = [until for until in heavy.days if change_by_rank(heavy, threshold, until)]
        alarms += bool(seen)
    assert alarms <= 0.2 * years + 3 * math.sqrt(0.2 * years)


def change_by_rank(of, threshold, until):
    """The rank test of `change` without its condition on the scatter."""
    days = [d for d in of.days if d <= until]
    for count in trends_change.SPLITS:
        early, late = days[-count - trends_change.BEFORE : -count], days[-count:]
        if len(early) >= trends_change.LEAST_BEFORE:
            values = ([of.days[d] for d in part] for part in (late, early))
            if trends_change.chance(*values) <= threshold:
                return True
    return False


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
        values = [0.01 * v for v in healthy(draws, 365)]
        whole = course(values)
        threshold = trends_change.FALSE_ALARMS / trends_change.LOOKS / len(trends_change.SPLITS)
        for until in whole.days:
            seen = change(whole, 1, threshold, until)
            if seen is not None and seen.after >= rules.SLOWER * seen.worst:
                pytest.fail(f"{healthy.__name__}: {seen}")
        for until in range(16, 366):
            sudden = step(course(values[max(0, until - 61) : until]), 1)
            assert sudden is None or sudden.after < rules.AT_ONCE * sudden.worst, f"{healthy.__name__}: {sudden}"


# --- Slower than before -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "alarm"), [(rules.SLOWER - 0.03, False), (rules.SLOWER + 0.03, True)])
@pytest.mark.parametrize("key", [KERNEL, SPEED])
def test_slower_than_before(key, times, alarm):
    """A tenth slower than in the slowest week before is degraded, less is nothing: for times and for speeds."""
    usual, slow = (0.01, 0.01 * times) if key is KERNEL else (4e12, 4e12 / times)
    finding = found({key: stepped(usual, slow, scatter=0.002)}).get("slower-than-before")
    assert (finding is not None) is alarm
    if finding is not None:
        assert (finding.state, finding.cause, finding.probe) == (State.DEGRADED, Cause.ENVIRONMENT, key.probe)
        assert f"{in_words(key.reading)} is" in finding.message
        assert "since 2026-02-06" in finding.message  # ten days before TODAY
        assert "The results are still right." in finding.evidence
        assert [r.rejected for r in finding.rivals if r.cause is Cause.SOFTWARE] == [True]


def test_faster_is_no_finding():
    """What became better is nobody's business; `marks` shows it."""
    better = stepped(0.01, 0.008)
    assert found({KERNEL: better}) == {}
    (mark,) = marks(better, KERNEL.reading)
    assert mark.after < mark.before


@pytest.mark.parametrize(("late", "alarm"), [(5, False), (6, True), (28, True), (60, False)])
def test_a_change_is_found_after_six_days_and_becomes_the_usual(late, alarm):
    """Before that one weekend could decide; after two months it is what the device is compared with."""
    assert ("slower-than-before" in found({KERNEL: stepped(0.01, 0.013, early=60, late=late)})) is alarm


@pytest.mark.parametrize(
    ("early", "alarm"), [(trends_change.LEAST_BEFORE - 1, False), (trends_change.LEAST_BEFORE, True)]
)
def test_two_weeks_before_are_the_least(early, alarm):
    """A device of which less is known has no usual speed."""
    assert ("slower-than-before" in found({KERNEL: stepped(0.01, 0.02, early=early, late=14)})) is alarm


@pytest.mark.parametrize(("scatter", "alarm"), [(0.01, True), (0.06, False)])
def test_a_change_must_stand_out_of_the_scatter(scatter, alarm):
    """16 % are much for a device that repeats itself to 1 %, and nothing for one that moves by 6 % from day to day."""
    assert ("slower-than-before" in found({KERNEL: stepped(0.01, 0.0118, scatter=scatter)})) is alarm


def test_more_series_take_more_evidence():
    """The chance of a false alarm is shared out: what six days show of one series takes longer among fifty."""
    slow = stepped(0.01, 0.013, early=30, late=6)
    many = {Key("p", f"kernel_seconds{{kind={n}}}", "b"): course(noisy(0.01, 36, n)) for n in range(3, 52)}
    assert "slower-than-before" in found({KERNEL: slow})
    assert "slower-than-before" not in found({KERNEL: slow, **many})
    assert "slower-than-before" in found({KERNEL: stepped(0.01, 0.013, early=30, late=10), **many})


LOAD = Key("nvidia_telemetry", "utilization_ratio", "1/quick/aa")


def lost(times=1.33, late=2, busy=0.5, peer=1.0, early=40):
    """Return the findings of a device that lost its speed so many days ago, with what changed beside it."""
    own = {KERNEL: stepped(0.01, 0.01 * times, early=early, late=late, scatter=0.0001)}
    load = {LOAD: stepped(0.5, busy, early=early, late=late, scatter=0.0)} if busy is not None else {}
    peers = {"cuda:1": {KERNEL: stepped(0.01, 0.01 * peer, early=early, late=late, seed=9)}} if peer else {}
    return found({**own, **load}, peers)


@pytest.mark.parametrize(
    ("how", "alarm"),
    [
        ({"times": rules.AT_ONCE - 0.02}, False),
        ({"times": rules.AT_ONCE + 0.02}, True),
        ({"late": 1}, False),
        ({"late": 2}, True),
        ({"late": 5}, True),
        ({"late": trends_change.SPLITS[0]}, False),
        ({"early": trends_change.LEAST_BEFORE - 1}, False),
        ({"early": trends_change.LEAST_BEFORE}, True),
        ({"busy": 0.5 + rules.LOAD_MOVED + 0.05}, False),
        ({"busy": 0.5 + rules.LOAD_MOVED - 0.05}, True),
        ({"busy": None}, False),
        ({"peer": None}, False),
        ({"peer": 1.33**0.6}, False),
        ({"peer": 1.33**0.4}, True),
    ],
)
def test_speed_that_is_lost_at_once(how, alarm):
    """Two days tell it where peers and load are known and stayed as they were; from the sixth the rank test does."""
    finding = lost(**how).get("slower-at-once")
    assert (finding is not None) is alarm
    if finding is not None:
        assert (finding.state, finding.cause) == (State.DEGRADED, Cause.ENVIRONMENT)
        assert "times as slow as on its slowest day before" in finding.message
        assert "slower-than-before" not in lost(**how)


def test_another_stack_is_another_series():
    """What is slower after an upgrade is not compared with what was before."""
    before, after = course(noisy(0.01, 30), last=TODAY - 11), course(noisy(0.013, 10))
    assert found({KERNEL: before, KERNEL._replace(basis="1/quick/bb"): after}) == {}


def test_an_old_series_says_nothing_of_today():
    """Three days after its last value a series falls silent."""
    slow = stepped(0.01, 0.013)
    assert "slower-than-before" in found({KERNEL: slow}, now=NOW + (rules.FRESH - 1) * DAY)
    assert found({KERNEL: slow}, now=NOW + rules.FRESH * DAY) == {}


def test_today_and_the_future_do_not_count():
    """A day that is not over is half a day, and a day of tomorrow was dated by a clock that ran ahead."""
    slow = course([*noisy(0.01, 40), *noisy(0.013, 6)], last=TODAY)
    assert found({KERNEL: slow}) == {}
    assert "slower-than-before" in found({KERNEL: slow}, now=NOW + DAY)


@pytest.mark.parametrize(("part", "noted"), [(rules.SHARED - 0.1, False), (rules.SHARED + 0.1, True)])
def test_what_the_peers_show_too_is_not_the_device(part, noted):
    """Where peers became slower on the same days it is a note, and the rival is open."""
    peers = {f"cuda:{n}": {KERNEL: stepped(0.01, 0.01 * 1.3**part, seed=10 * n)} for n in (1, 2, 3)}
    finding = found({KERNEL: stepped(0.01, 0.013)}, peers)["slower-than-before"]
    assert finding.state is (State.HEALTHY if noted else State.DEGRADED)
    (shared,) = [r for r in finding.rivals if "share" in r.why and "peers" in r.why]
    assert shared.rejected is not noted


@pytest.mark.parametrize(
    ("key", "was", "enough", "too_little", "word"),
    [
        (LIMIT, 700.0, 700 * (1 - rules.POWER_LIMIT_MOVED) - 2, 700 * (1 - rules.POWER_LIMIT_MOVED) + 2, "power limit"),
        (USED, 0.3, 0.3 + rules.LOAD_MOVED + 0.02, 0.3 + rules.LOAD_MOVED - 0.02, "other work"),
    ],
)
def test_settings_and_load_explain_slowness(key, was, enough, too_little, word):
    """A lower power limit, or more other work since then, makes it a note; less of it is a rejected rival."""
    for value, noted in ((enough, True), (too_little, False)):
        own = {KERNEL: stepped(0.01, 0.013), key: stepped(was, value, scatter=0.0)}
        finding = found(own)["slower-than-before"]
        assert finding.state is (State.HEALTHY if noted else State.DEGRADED)
        (rival,) = [r for r in finding.rivals if word in r.why]
        assert rival.rejected is not noted
        assert any(text.startswith("Not counted against the device: ") for text in finding.evidence) is noted


# --- Slower than its peers --------------------------------------------------------------------------------------------


def units(*levels):
    """The kernel times of some devices: the first is the device's own."""
    own, *others = ({KERNEL: course(noisy(level, 5, seed=n))} for n, level in enumerate(levels))
    return own, {f"cuda:{n}": other for n, other in enumerate(others, 1)}


@pytest.mark.parametrize(("times", "alarm"), [(rules.PEERS_SLOWER - 0.04, False), (rules.PEERS_SLOWER + 0.04, True)])
def test_slower_than_peers(times, alarm):
    """A quarter slower than the peers' median, from the first days on."""
    assert ("slower-than-peers" in found(*units(0.01 * times, 0.01, 0.0101, 0.0099))) is alarm


@pytest.mark.parametrize(("spread", "alarm"), [(0.02, True), (0.10, False)])
def test_peers_that_differ_among_themselves_say_little(spread, alarm):
    """30 % stand out of peers within 2 %, not of peers within 10 %."""
    others = [0.01 * math.exp(spread * n) for n in (-1.5, -0.5, 0.5, 1.5)]
    assert ("slower-than-peers" in found(*units(0.013, *others))) is alarm


@pytest.mark.parametrize(("days", "alarm"), [(rules.LEAST_DAYS - 1, False), (rules.LEAST_DAYS, True)])
def test_peers_take_three_common_days(days, alarm):
    """What a day shows may be a day's work."""
    own, peers = units(0.014, 0.01, 0.01)
    cut = {k: Course(unit=c.unit, days=dict(list(c.days.items())[-days:])) for k, c in own.items()}
    assert ("slower-than-peers" in found(cut, peers)) is alarm


def test_one_day_on_which_a_peer_was_slower_is_enough_doubt():
    """It must be the slowest on every day."""
    own, peers = units(0.014, 0.01, 0.01)
    peers["cuda:1"][KERNEL].days[TODAY - 2] = 0.02
    assert found(own, peers) == {}


def test_two_devices_only_differ():
    """Of two nobody can tell which is as it should be: a note, on the slower one alone."""
    own, peers = units(0.014, 0.01)
    finding = found(own, peers)["slower-than-peers"]
    assert (finding.state, finding.cause) == (State.HEALTHY, Cause.NONE)
    assert "its only peer" in finding.message
    assert found(peers["cuda:1"], {"cuda:0": own}) == {}


def test_a_peer_with_another_stack_is_no_peer():
    """Another stack may be slower for a reason of its own."""
    own, peers = units(0.014, 0.01, 0.01)
    peers = {name: {KERNEL._replace(basis="1/quick/bb"): c[KERNEL]} for name, c in peers.items()}
    assert found(own, peers) == {}


def test_whose_fault_slowness_among_peers_is():
    """Hardware where limit, load and heat are known and alike; the environment where it is hotter or not known."""

    def cause(warmer=0.0, limit=700.0, *, known=True):
        own, peers = units(0.014, 0.01, 0.01)
        if known:
            for name, of in (("", own), *peers.items()):
                here = not name
                of[CORE] = course([60.0 + (warmer if here else 0.0)] * 5, unit="celsius")
                of[LIMIT] = course([limit if here else 700.0] * 5, unit="watts")
                of[USED] = course([0.5] * 5, unit="1")
        finding = found(own, peers)["slower-than-peers"]
        return finding.state, finding.cause

    assert cause() == (State.DEGRADED, Cause.HARDWARE)
    assert cause(rules.HOTTER - 1) == (State.DEGRADED, Cause.HARDWARE)
    assert cause(rules.HOTTER + 1) == (State.DEGRADED, Cause.ENVIRONMENT)
    assert cause(known=False) == (State.DEGRADED, Cause.ENVIRONMENT)
    assert cause(limit=500.0) == (State.HEALTHY, Cause.NONE)


def test_chance_of_a_slow_unit_among_healthy_ones():
    """The bound of `PEERS_SLOWER`, and a simulation that stays below the same bound where it can be counted."""

    def bound(scatter, peers):
        apart = math.log(rules.PEERS_SLOWER) / (scatter * math.sqrt(1 + 1 / peers))
        return 1 - statistics.NormalDist().cdf(apart)

    assert bound(0.04, 2) <= 3e-6
    draws = random.Random(3)
    alarms, tries = 0, 1500
    for _ in range(tries):
        own, peers = ({}, {})
        levels = [math.exp(0.08 * draws.gauss(0, 1)) for _ in range(3)]
        own = {KERNEL: course([levels[0]] * 5)}
        peers = {str(n): {KERNEL: course([level] * 5)} for n, level in enumerate(levels[1:])}
        alarms += "slower-than-peers" in found(own, peers)
    assert 0 < alarms <= tries * bound(0.08, 2)


# --- Errors, heat -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "alarm"), [(rules.ERROR_GREW - 0.1, False), (rules.ERROR_GREW + 0.1, True)])
def test_error_growing(times, alarm):
    """Half as far again from the truth as in the worst week, on the same stack: degraded hardware."""
    finding = found({ERROR: stepped(0.2, 0.2 * times)}).get("error-growing")
    assert (finding is not None) is alarm
    if finding is not None:
        assert (finding.state, finding.cause) == (State.DEGRADED, Cause.HARDWARE)


def test_an_error_that_was_none_before():
    """From nothing to something is a change without a ratio."""
    finding = found({ERROR: course([0.0] * 30 + [0.1] * 10)})["error-growing"]
    assert "there was none before" in finding.message


def test_errors_that_grow_everywhere_are_a_note():
    """All devices of a node do not fail on one day."""
    peers = {str(n): {ERROR: stepped(0.2, 0.4, seed=9 * n)} for n in (1, 2)}
    assert found({ERROR: stepped(0.2, 0.4)}, peers)["error-growing"].state is State.HEALTHY


def test_hotter_at_same_power():
    """Against the peers, or alone: each side of both limits, and the room that warms all of them."""

    def state(rise, room=None):
        own = {HEAT: stepped(60.0, 60.0 + rise, scatter=0.002)}
        other = HEAT._replace(reading="temperature_celsius{power=631-663,sensor=core}")  # peers run at other powers
        peers = {} if room is None else {"1": {other: stepped(58.0, 58.0 + room, seed=5, scatter=0.002)}}
        finding = found(own, peers).get("hotter-at-same-power")
        return finding.state if finding else None

    margin = 0.7  # the worst week lies a little above the median
    assert state(rules.HOTTER_ALONE - margin) is None
    assert state(rules.HOTTER_ALONE + margin) is State.DEGRADED
    assert state(rules.HOTTER - margin, room=0.0) is None
    assert state(rules.HOTTER + margin, room=0.0) is State.DEGRADED
    assert state(rules.HOTTER + margin, room=3.0) is State.HEALTHY


# --- From runs and polls ----------------------------------------------------------------------------------------------


def test_only_runs_as_usual_are_followed():
    """Drills, confirmations, retests, baselining, failed runs and another intensity are no readings of the usual."""
    reading = Reading(name="kernel_seconds", value=0.01, unit="seconds", labels={"kind": "prefill"})
    odd = [{"drill": "bit"}, {"confirms": "x"}, {"cases": ("a",)}, {"intensity": "steady"}, {"baselining": True}]
    odd += [{"outcome": Outcome.CRASHED}]
    assert tracks([run(DAY * n, reading, **more) for n, more in enumerate(odd)]) == {}
    ((key, track),) = tracks([run(5.0, reading), run(3.0, reading)]).items()
    assert (key.probe, key.reading, track.unit) == ("recorded_kernels", "kernel_seconds{kind=prefill}", "seconds")
    assert [p.at for p in track.points] == [3.0, 5.0]


def test_stack_version_and_level_are_the_basis():
    """Each of them begins a series of its own."""
    reading = Reading(name="speed_float32", value=1e12, unit="flops per second")
    several = [run(1.0, reading), run(2.0, reading, level="deep"), run(3.0, reading, probe_version=2)]
    assert len(tracks([*several, run(4.0, reading, stack={"torch": "2.10"})])) == 4


def test_what_is_no_number_is_left_out():
    """Texts, truths and what is not finite; and readings that nobody follows."""
    bad = [Reading(name="speed_float32", value=v) for v in ("fast", True, math.inf, math.nan)]
    assert tracks([run(1.0, *bad, Reading(name="trials", value=3))]) == {}


def test_the_best_quarter_stands_for_a_day_of_kernel_times():
    """Other work on the device makes most runs slow, and the device none the slower."""
    slow = [
        run(TODAY * DAY + n, Reading(name="kernel_seconds", value=v)) for n, v in enumerate((0.01, 0.01, *[0.03] * 6))
    ]
    (day,) = courses(runs=slow).values()
    assert day.days == {TODAY: 0.01}


def poll(at, **values):
    names = {
        "heat": ("temperature_celsius", "celsius", {"sensor": "core"}),
        "power": ("power_watts", "watts", {}),
        "limit": ("power_limit_watts", "watts", {"limit": "enforced"}),
        "clock": ("clock_hertz", "hertz", {"domain": "sm"}),
        "ecc": ("ecc_errors_total", "1", {"kind": "corrected"}),
        "held": ("throttle_seconds_total", "seconds", {"reason": "hw_thermal"}),
        "load": ("load_average", "1", {}),
        "cores": ("cpu_cores", "1", {"state": "online"}),
    }
    readings = tuple(
        Reading(name=name, value=values[short], unit=unit, labels=labels)
        for short, (name, unit, labels) in names.items()
        if short in values
    )
    return run(at, *readings, probe="nvidia_telemetry")


def readings_of(polls):
    return {key.reading: [p.value for p in track.points] for key, track in tracks(polls=polls).items()}


def test_counters_become_rates():
    """Per hour, or a share of time; a counter that began anew has risen by nothing that is known."""
    seen = readings_of([poll(0.0, ecc=5, held=0.0), poll(1800.0, ecc=8, held=900.0), poll(3600.0, ecc=0, held=900.0)])
    assert seen["ecc_errors_total{kind=corrected}"] == [6.0, 0.0]
    assert seen["throttle_seconds_total{reason=hw_thermal}"] == [0.5, 0.0]


def test_load_is_told_per_core():
    """A load of 8 is little for 64 processors."""
    assert readings_of([poll(0.0, load=8.0, cores=64)]) == {"load_average{per=core}": [0.125]}


@pytest.mark.parametrize(
    ("powers", "step", "settled"),
    [
        ((610.0, 612.0, 615.0), 300.0, True),
        ((610.0, 612.0), 300.0, False),  # two polls are no steady load
        ((610.0, 400.0, 615.0), 300.0, False),  # it came and went
        ((310.0, 312.0, 315.0), 300.0, False),  # below half of the limit
        ((610.0, 612.0, 615.0), STEADY, False),  # too far apart
    ],
)
def test_heat_counts_under_steady_load_only(powers, step, settled):
    """A device that idled a minute ago is cool at any power."""
    polls = [poll(n * step, heat=70.0, clock=1.9e9, power=p, limit=700.0) for n, p in enumerate(powers)]
    seen = readings_of(polls)
    assert any("power=" in key for key in seen) is settled
    assert ("clock_hertz{domain=sm,under=load}" in seen) is settled


def test_a_day_is_summed_up_once_and_stands_for_its_runs():
    """The summary of a day gives what its runs gave; days without one come from the runs."""
    runs = [
        run((TODAY - 3 + n // 4) * DAY + n, Reading(name="kernel_seconds", value=0.01 + n / 1e4)) for n in range(12)
    ]
    (direct,) = courses(runs=runs).values()
    days = [summary("GPU-1", TODAY - 3, runs, []), summary("GPU-1", TODAY - 2, runs, [])]
    assert [day.levels[0].count for day in days] == [4, 4]
    (mixed,) = courses(days, runs=runs[8:]).values()
    assert mixed == direct
    assert summary("GPU-1", TODAY + 9, runs, []).levels == ()
    assert all(from_json(Day, json.loads(json.dumps(to_json(day)))) == day for day in days)
    assert [(s.id, s.at) for s in days[1].stacks] == [(runs[0].stack_id, runs[4].started)]


# --- Marks, cost ------------------------------------------------------------------------------------------------------


def test_marks_show_when_it_changed():
    """Both directions, each once, on the day."""
    up_and_down = course([*noisy(0.01, 30), *noisy(0.013, 30, 1), *noisy(0.01, 30, 2)])
    first = TODAY - 90
    assert [(m.since - first, m.after > m.before) for m in marks(up_and_down, KERNEL.reading)] == [
        (30, True),
        (60, False),
    ]
    assert marks(course(noisy(0.01, 90)), KERNEL.reading) == []


def test_small_changes_are_not_marked():
    """Certain and of no use to anybody."""
    for times, count in ((trends_change.MARKED - 0.02, 0), (trends_change.MARKED + 0.02, 1)):
        assert len(marks(stepped(0.01, 0.01 * times, scatter=0.001), KERNEL.reading)) == count
    for rise, count in ((trends_change.MARK_WARMTH - 0.5, 0), (trends_change.MARK_WARMTH + 0.5, 1)):
        assert len(marks(stepped(60.0, 60.0 + rise, scatter=0.001), CORE.reading)) == count


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
    assert time.process_time() - started < 10.0  # 1 to 2 s where this was written
