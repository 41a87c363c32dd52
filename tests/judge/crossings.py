"""Values on both sides of each threshold that no other test crosses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from canaryd.config.judge_policy import JudgePolicy
from canaryd.engine import schedule
from canaryd.facts import Reading
from canaryd.judge.clock import EPOCH, POLL_AHEAD
from canaryd.judge.node import DRILL_EXPIRY
from canaryd.judge.recordings import baseline, rules, speed, triage
from canaryd.judge.slower import SPAN, TIME, Course
from canaryd.judge.statistics import RULE_OF_THREE, tail
from canaryd.judge.telemetry.rules import STRETCH
from canaryd.model import INTENSITIES, State
from tests.engine import test_schedule
from tests.judge import made, test_cause, test_slower
from tests.judge.recordings import made as recorded
from tests.judge.recordings import test_baseline, test_triage
from tests.judge.telemetry import made as telemetry

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
POLICY = JudgePolicy()


# --- Crossing each threshold that no other test crosses from both sides ----------------------------------------------


class Crossing(NamedTuple):
    """What is observed just on this side of a threshold, and just beyond it."""

    observe: Callable[[Any], object]
    near: object
    seen_near: object
    far: object
    seen_far: object


def ask(*runs, **fields):
    verdict = made.ask(*runs, **fields)
    return verdict.state, verdict.cause


def drill(ago):
    return ask(made.run(ago, made.wrong(), drill="stuck bit"), drill=True)[0]


def compared_twice(apart):
    first, second = (made.run(ago, made.comparator()) for ago in (HOUR + apart, HOUR))
    return ask(first, second, made.fresh())[1]


def whole_host(apart):
    """Return what the CPU is charged with when its accelerators were wrong so long before it."""
    t = made
    peers = [
        (t.GPU, [t.run(HOUR + apart, t.wrong(seed=2))]),
        (t.TWIN, [t.run(HOUR + apart, t.wrong(seed=2, first=t.OTHER_FIRST), of=t.TWIN)]),
    ]
    return ask(t.run(HOUR, t.wrong(), of=t.CPU), of=t.CPU, peers=peers)[1]


def host_was_right(apart):
    """Whether a host that computed right so long before a mismatch is rejected as a rival."""
    t = made
    peers = [(t.CPU, [t.run(HOUR + apart, t.right(), of=t.CPU)])]
    found = test_cause.rivals(t.ask(t.run(HOUR, t.wrong()), t.fresh(), peers=peers))
    return (t.H, "the host's memory or CPU") in found


def recordings(history, now=recorded.NOW):
    return {rule: f.state for rule, f in history.found(now).items()}


def twenty_known():
    t = recorded
    history = t.History().learn()
    for n in range(20):
        history.add(2 * DAY - n * HOUR, t.GOOD)
    return history


def came_back(times):
    """Whether unknown bits are a departure that came so often beside 20 known ones, and that no re-run repeated."""
    t, history = recorded, twenty_known()
    for n in range(times):
        history.confirm(history.add(DAY - n * HOUR, t.STRANGE), t.GOOD, t.GOOD, t.GOOD)
    return "recording-departed" in history.found()


@functools.cache
def too_often():
    """Return the fewest times that are too many by `ALPHA` beside 20 known ones."""
    rate = next(iter(twenty_known().baselines.values())).rate("")
    return next(k for k in itertools.count(2) if tail(k, 20 + k, rate) <= rules.ALPHA)


def unsteady(reruns):
    """Return what a departure of a case that never repeats itself amounts to, by so many re-runs that repeat it."""
    t = recorded
    history = t.History(policy=t.asking(reruns))
    history.learn(9 * DAY, *(t.recording(n / 1000) for n in range(baseline.LEARN)))
    history.confirm(history.add(HOUR, t.recording(0.5)), *[t.recording(0.5 + n / 10) for n in range(1, reruns + 1)])
    (found,) = [state for rule, state in recordings(history).items() if rule.startswith("recording")]
    return found


def waited(ago):
    t = recorded
    history = t.History().learn()
    history.add(ago, t.STRANGE)
    return "recording-unconfirmed" in history.found()


def new_chain(ago):
    """Whether a chain that was learnt so long before now is told still."""
    t = recorded
    history = t.History().learn(90 * DAY)
    moved = t.recording(0.5, chain=t.CHAIN | {"server": "another"})
    history.learn(ago, moved)
    history.add(HOUR, moved)
    return "chain-changed" in history.found()


def known_since(runs):
    """Whether so many known vectors after a departure of 31 days ago clear it."""
    t = recorded
    history = t.departed(t.STRANGE, t.STRANGE, t.STRANGE)
    for n in range(runs):
        history.add(HOUR - 1 - n, t.GOOD)
    return "recording-departed" not in history.found(t.NOW + 31 * DAY)


def slow(before=speed.EARLIER, late=speed.NEWEST, extra=1.0):
    """Whether an idle endpoint is called slow that needs so much longer to the first token in the newest runs."""
    t = recorded
    asked = dataclasses.replace(t.GOOD, condition="idle")
    history = t.History().learn(9 * DAY, asked)
    for n in range(before + speed.NEWEST):
        seconds = 0.001 + extra * (n >= before + speed.NEWEST - late)
        reading = Reading(name="endpoint_first_token_seconds", value=seconds, unit="seconds")
        history.add(2 * HOUR - n, asked, readings=(reading,))
    return "endpoint-slow" in history.found()


def voters(count):
    """Whether the one that differs among so many devices is accused."""
    t = recorded
    others = [t.twin(name, t.GOOD) for name in "bcd"[: count - 1]]
    return "recording-outvoted" in t.voted(t.twin("a", t.STRANGE), *others)


def noise(vectors):
    """Whether so many vectors of a server that batches measure a noise, so that a far one is beyond it."""
    t = test_baseline
    seen = [t.near(t.BASE, n / 1000) for n in range(vectors)]
    full = t.learnt(*t.under("loaded", *[t.PLAIN] * (baseline.LEARN - vectors), *seen))
    return full.noise("") is not None


def farthest(shares):
    """Return whether two odd vectors while learning widen the noise; one alone is left out."""
    t = test_baseline
    odd = [t.near(t.BASE, 4.0 * (n + 1)) for n in range(shares)]
    vectors = [t.recording(tuple(v + n / 1000 for v in t.BASE)) for n in range(baseline.LEARN - shares)]
    return t.learnt(*vectors, *odd).noise("") > 1.0


def slow_days_ago(oldest):
    """Whether it is slower than before when the first of the 14 days before was so many days ago."""
    t = test_slower
    usual = [t.TODAY - oldest, *range(t.TODAY - 20, t.TODAY - 7)]
    days = {**dict.fromkeys(usual, 0.01), **dict.fromkeys(range(t.TODAY - 7, t.TODAY), 0.013)}
    return t.found({t.KERNEL: Course(unit="s", days=days)}) is not None


def best_of_eight(fast):
    """Whether so many fast runs of eight stand for the day."""
    times = [0.01] * fast + [0.03] * (8 - fast)
    runs = [test_slower.run(n, Reading(name=TIME, value=v)) for n, v in enumerate(times)]
    return test_slower.levels(*runs)[TIME] == 0.01


def peer_days(late):
    """Return the state where the only peer became slow too, and has values on `late` of the seven days since."""
    t = test_slower
    peer = t.stepped(0.01, 0.013, late=7, seed=7)
    days = sorted(peer.days)
    peer = Course(unit="s", days={d: peer.days[d] for d in [*days[:-7], *days[-late:]]})
    return t.found({t.KERNEL: t.stepped(0.01, 0.013, late=7)}, {"cuda:1": {t.KERNEL: peer}}).state


def told(*found, **fields):
    return bool(telemetry.told(telemetry.sign(*found, **fields)))


def dated(at):
    return told(dataclasses.replace(telemetry.xid(79), first=at, last=at))


def generation(number):
    """Whether 170 replays in ten minutes are too many for a link of this generation."""
    only = {"pcie_generation_max": number}
    return told(telemetry.rise("pcie_replays_total", 170, ago=60), only=only)


def held(seconds):
    """Whether a minute of heat, spread over so many seconds, is one."""
    return told(telemetry.event("condition", "hot", 60, lasted=seconds, count=60.0))


def replays(count, generation, width):
    """Whether so many replays in ten minutes are too many for a link of this generation and width."""
    only = {"pcie_generation_max": generation, "pcie_width_max": width, "pcie_width": width}
    return told(telemetry.rise("pcie_replays_total", count, ago=60), only=only)


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
KNOWN = test_triage.KNOWN
SALAD = test_triage.SALAD.split()
SCRIPTS = ("reef", "\u0440\u0438\u0444", "\u0628\u062d\u0631", "\u0928\u0926\u0940")  # Latin, Cyrillic, Arabic, Nagari


def called(text, *known, **more):
    return test_triage.name_of(test_triage.answer(text, **more), *known)


def shuffled(letters, counts):
    drawn = [letter for letter, count in zip(letters, counts, strict=True) for _ in range(count)]
    random.Random(1).shuffle(drawn)
    return "".join(drawn)


def refrain(words):
    """Return 8 times a refrain of so many words, each time with another word behind it."""
    line = " ".join(SALAD[:words])
    return " ".join(f"{line} {chr(97 + n) * 3}" for n in range(8))


def mixed(plain, odd=3):
    """Return how words that mix Latin and Cyrillic are called, among so many that do not."""
    return called(" ".join([*["r\u0435ef", "s\u0435a", "t\u0456de"][:odd], *(test_triage.REEF.split()[:plain])]))


def switching(times, words=24, scripts=4):
    """Return how words in several scripts are called, among which the script changes so many times."""
    made, number = [], 0
    for place in range(words):
        number += 0 < place <= times
        made.append(SCRIPTS[number % scripts] + LETTERS[place] * (number % scripts == 0))
    return called(" ".join(made))


def unlike(word, count, words=20, known=KNOWN):
    """Return how words are called of which so many are one that is unlike a word."""
    return called(" ".join([word] * count + test_triage.REEF.replace(",", "").split()[: words - count]), known)


def salad(known=0, repeated=0, marks=0, count=30):
    """Return how words are called that come nowhere in the known answer, but for so many."""
    words = ["reef", "coast", "ridge", "rock"][:known] + SALAD[: count - known - repeated]
    return called(" ".join([*words, *words[:repeated]]) + " ." * marks, KNOWN)


def stopped(length):
    names = tuple(map(str, range(100, 140)))
    known = test_triage.answer(test_triage.REEF, tokens=names)
    return called(test_triage.REEF[:200], known, tokens=names[:length], finish="stop")


def doubting(by, values=32):
    now = test_triage.tokens(*[-0.4 - by] * values, text=test_triage.REEF.replace("reef", "rock"))
    return test_triage.name_of(now, test_triage.SURE)


def repeated_cases(count):
    """Return how many of so many wrong cases a confirmation repeats."""
    t = test_schedule
    (first, *_) = t.confirm(t.run(*(t.comparison(f"c{n}") for n in range(count))))
    return len(first.steps[0].cases)


def repeated_unknown(count):
    (first, *_) = test_schedule.confirm(test_schedule.run(unknown=tuple(f"c{n}" for n in range(count)), seed=0))
    return len(first.steps[0].cases)


def retested(*, rounds=0, pause=DAY, seconds=1.0, confirmed=3, ago=0.0):
    """Whether a mismatch is retested again, `pause` seconds after the newest of so many rounds of retests."""
    t = test_schedule
    count = rounds * len(INTENSITIES)
    start = ago or pause + 120.0 * (count + confirmed + 1)
    runs = [t.run(t.comparison(), id="first", started=t.NOW - start)]
    runs += [t.run(id=f"c{n}", started=t.NOW - start + 61.0 + n, confirms="first") for n in range(confirmed)]
    for n in range(count):
        fields = {"started": t.NOW - pause - 120.0 * (count - 1 - n), "intensity": INTENSITIES[n % len(INTENSITIES)]}
        runs.append(t.run(id=f"r{n}", seconds=seconds, **fields))
    return bool(schedule.retests_due(runs, POLICY, t.NOW))


FULL = test_triage.REEF
LONG = " ".join([FULL, *(test_triage.LANGUAGES[name] for name in ("german", "french", "spanish"))])
CIRCLE = ["the", "reef", "of", "the", "coast"] * 7
CROSSINGS: Mapping[str, Crossing] = {
    # the judge
    "judge.node.DRILL_EXPIRY": Crossing(drill, DRILL_EXPIRY, State.SUSPECT, DRILL_EXPIRY + 1, State.UNKNOWN),
    "judge.watch: comparator": Crossing(
        compared_twice, POLICY.watch, made.H, POLICY.watch + 1, made.U
    ),
    "judge.repeat_window: whole host": Crossing(
        whole_host, POLICY.repeat_window, made.H, POLICY.repeat_window + 1, made.U
    ),
    "judge.repeat_window: the host was right": Crossing(
        host_was_right, POLICY.repeat_window, True, POLICY.repeat_window + 1, False
    ),
    "judge.repeat_window: retests are awaited": Crossing(
        waited, POLICY.repeat_window, True, POLICY.repeat_window + 1, False
    ),
    "judge.week: a new chain is told": Crossing(new_chain, POLICY.week, True, POLICY.week + 1, False),
    # recordings
    "judge.recordings.rules.ALPHA": Crossing(came_back, too_often() - 1, False, too_often(), True),
    "judge.recordings.speed.NEWEST": Crossing(lambda n: slow(late=n), 1, False, 2, True),
    "judge.recordings.speed.EARLIER": Crossing(lambda n: slow(before=n), speed.EARLIER - 1, False, speed.EARLIER, True),
    "judge.recordings.speed.LATENCIES": Crossing(lambda s: slow(extra=s), 0.099, False, 0.101, True),
    "judge.recordings.baseline.Baseline.rate": Crossing(unsteady, 2, State.UNKNOWN, 3, State.SUSPECT),
    # 1 departure in 1 known run and itself: 6 known ones since outlast that.
    "judge.recordings.rules.departed": Crossing(known_since, 2 * RULE_OF_THREE - 1, False, 2 * RULE_OF_THREE, True),
    "judge.recordings.votes.outvoted": Crossing(voters, 2, False, 3, True),
    "judge.recordings.baseline.Baseline.noise: vectors": Crossing(noise, 2, False, 3, True),
    "judge.recordings.baseline.Baseline.noise: farthest": Crossing(farthest, 1, False, 2, True),
    # slower than before
    "judge.slower.SPAN": Crossing(slow_days_ago, SPAN, True, SPAN + 1, False),
    "judge.slower.level": Crossing(best_of_eight, 1, False, 2, True),
    "judge.slower._moved": Crossing(peer_days, 3, State.DEGRADED, 4, State.HEALTHY),
    # telemetry
    "judge.telemetry.link_rules.pcie_errors: link not known": Crossing(lambda n: replays(n, None, None), 310, False, 311, True),  # noqa: E501
    "judge.telemetry.link_rules.replay_limit": Crossing(lambda n: replays(n, 9, 16), 310, False, 311, True),
    "judge.clock.EPOCH": Crossing(dated, EPOCH, False, EPOCH - 1, True),
    "judge.clock.POLL_AHEAD": Crossing(
        lambda s: told(completed=telemetry.poll(-s)), POLL_AHEAD, False, POLL_AHEAD + 1, True
    ),
    "judge.telemetry.rules.STRETCH": Crossing(held, STRETCH, True, STRETCH + 10, False),
    "judge.telemetry.link_rules.TRANSFERS": Crossing(generation, 5, False, 4, True),
    # triage
    "judge.recordings.triage.SENTINEL": Crossing(
        lambda v: test_triage.name_of(test_triage.tokens(-0.1, v)),
        triage.SENTINEL + 0.1, "", triage.SENTINEL, "non-finite logits",
    ),
    "judge.recordings.triage.EARLY": Crossing(stopped, 10, "coherent but different", 9, "nothing generated"),
    "judge.recordings.triage.LOOP_LENGTH": Crossing(
        lambda n: called("The reef lies off Z" + "abc" * n), 15, "", 16, "repetition loop"
    ),
    "judge.recordings.triage.LOOP_SHARE": Crossing(
        lambda n: called(FULL[: n - 1] + "Z" + "abc" * 20), 181, "", 180, "repetition loop"
    ),
    "judge.recordings.triage.DISTINCT": Crossing(lambda n: called(refrain(n)), 13, "", 14, "repetition loop"),
    "judge.recordings.triage.REPLACED": Crossing(lambda n: called(FULL[: n - 3] + "\ufffd" * 3), 150, "", 149, "gibberish"),  # noqa: E501
    "judge.recordings.triage.CONTROLS": Crossing(lambda n: called(FULL[: n - 3] + "\ue000" * 3), 300, "", 299, "gibberish"),  # noqa: E501
    "judge.recordings.triage.ENTROPY_LOW": Crossing(
        lambda n: called(shuffled("abc", (100, 100 - n, n))), 50, "", 49, "gibberish"
    ),
    "judge.recordings.triage.ENTROPY_HIGH": Crossing(
        lambda n: called(shuffled(LETTERS[:n], [3] * n)), 51, "", 52, "gibberish"
    ),
    "judge.recordings.triage.MIXED": Crossing(mixed, 57, "", 56, "gibberish"),
    "judge.recordings.triage.SWITCHES": Crossing(switching, 12, "", 13, "gibberish"),
    "judge.recordings.triage.UNLIKE": Crossing(lambda n: unlike("xqztw", n), 6, "coherent but different", 7, "gibberish"),  # noqa: E501
    "judge.recordings.triage.OVERLAP": Crossing(lambda n: salad(known=n), 3, "coherent but different", 2, "gibberish"),
    "judge.recordings.triage.VARIED": Crossing(lambda n: salad(repeated=n), 3, "coherent but different", 2, "gibberish"),  # noqa: E501
    "judge.recordings.triage.MARKS": Crossing(lambda n: salad(marks=n), 10, "coherent but different", 9, "gibberish"),
    "judge.recordings.triage.DOUBT": Crossing(
        doubting, triage.DOUBT - 0.01, "coherent but different", triage.DOUBT + 0.01, "gibberish"
    ),
    "judge.recordings.triage.NEAR_TIE": Crossing(
        lambda m: test_triage.fork(m).certainty, triage.NEAR_TIE - 0.001, "possible", triage.NEAR_TIE, "likely"
    ),
    "judge.recordings.triage._loop: repeats of a short part": Crossing(
        lambda n: called("Z" + "abcdefghijkl" * n), 5, "", 6, "repetition loop"
    ),
    "judge.recordings.triage._loop: repeats of a long part": Crossing(
        lambda n: called("Z" + "the reef of the coast of a sea" * n), 2, "", 3, "repetition loop"
    ),
    "judge.recordings.triage._loop: a long part": Crossing(
        lambda n: called("Z" + "abcdefghijklmnop"[:n] * 4), 15, "", 16, "repetition loop"
    ),
    "judge.recordings.triage._loop: its end": Crossing(lambda n: called(LONG + "Z" + "abc" * n), 85, "", 86, "repetition loop"),  # noqa: E501
    "judge.recordings.triage._loop: words": Crossing(
        lambda n: called(" ".join([*CIRCLE[: n - 5], *SALAD[:5]])), 39, "", 40, "repetition loop"
    ),
    "judge.recordings.triage._gibberish: odd characters": Crossing(
        lambda n: called("The reef lies" + "\ufffd" * n), 2, "", 3, "gibberish"
    ),
    "judge.recordings.triage._gibberish: few different ones": Crossing(
        lambda n: called(shuffled("ab", (32, n - 32))), 63, "", 64, "gibberish"
    ),
    "judge.recordings.triage._gibberish: many different ones": Crossing(
        lambda n: called(shuffled(LETTERS + "0123456789+-", [2] * 63 + [n - 126])), 127, "", 128, "gibberish"
    ),
    "judge.recordings.triage._gibberish: mixed words": Crossing(lambda n: mixed(20, odd=n), 2, "", 3, "gibberish"),
    "judge.recordings.triage._gibberish: words": Crossing(lambda n: switching(n, words=n), 23, "", 24, "gibberish"),
    "judge.recordings.triage._gibberish: scripts": Crossing(lambda n: switching(23, scripts=n), 3, "", 4, "gibberish"),
    "judge.recordings.triage._unlike: words": Crossing(
        lambda n: unlike("xqztw", 9, words=n), 19, "coherent but different", 20, "gibberish"
    ),
    "judge.recordings.triage._unlike: words of the known answer": Crossing(
        lambda n: unlike("xqztw", 9, known=test_triage.answer(" ".join(test_triage.REEF.split()[:n]))),
        19, "coherent but different", 20, "gibberish",
    ),
    "judge.recordings.triage._unlike: words of a salad": Crossing(
        lambda n: salad(count=n), 29, "coherent but different", 30, "gibberish"
    ),
    "judge.recordings.triage._unlike: positions": Crossing(
        lambda n: doubting(2 * triage.DOUBT, values=n), 15, "coherent but different", 16, "gibberish"
    ),
    "judge.recordings.triage._wordlike: long": Crossing(
        lambda n: unlike("banana" * 3 + "b" * (n - 18), 7), 18, "coherent but different", 19, "gibberish"
    ),
    "judge.recordings.triage._wordlike: short": Crossing(
        lambda n: unlike("bcd"[:n], 7), 2, "coherent but different", 3, "gibberish"
    ),
    # confirmations and retests
    "engine.schedule.CONFIRMED_CASES": Crossing(
        repeated_cases, schedule.CONFIRMED_CASES, 3, schedule.CONFIRMED_CASES + 1, 3
    ),
    "engine.schedule.CONFIRMED_UNKNOWN": Crossing(
        repeated_unknown, schedule.CONFIRMED_UNKNOWN, 8, schedule.CONFIRMED_UNKNOWN + 1, 8
    ),
    "engine.schedule.ROUNDS: second": Crossing(
        lambda s: retested(rounds=1, pause=s), schedule.ROUNDS[1] - 1, False, schedule.ROUNDS[1], True
    ),
    "engine.schedule.ROUNDS: third": Crossing(
        lambda s: retested(rounds=2, pause=s), schedule.ROUNDS[2] - 1, False, schedule.ROUNDS[2], True
    ),
    "engine.schedule.DAY": Crossing(
        lambda s: retested(rounds=3, pause=s), schedule.DAY - 1, False, schedule.DAY, True
    ),
    "engine.schedule.RETEST_SHARE": Crossing(
        lambda s: retested(rounds=1, pause=HOUR, seconds=s / len(INTENSITIES)),
        schedule.RETEST_SHARE * DAY - 1, True, schedule.RETEST_SHARE * DAY, False,
    ),
    "engine.schedule.UNSETTLED": Crossing(
        lambda s: retested(confirmed=0, ago=s), schedule.UNSETTLED - 1, False, schedule.UNSETTLED, True
    ),
}  # fmt: skip
"""Threshold, with ": what" where it decides several things → its two sides."""
