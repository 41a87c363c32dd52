"""Scenarios of evidence, its age, and its absence."""

import dataclasses

from canaryd.facts import Reading, Recording, Skipped
from canaryd.model import MPS_CLIENT, Ack, Cause, Event, Finding, Outcome, State
from tests.judge.made import (
    CPU,
    DAY,
    ERR,
    FAULTY,
    GPU,
    HEALTHY,
    HOUR,
    MINUTE,
    NOW,
    OTHER_FIRST,
    OTHER_STACK,
    POLICY,
    SERVERS,
    SUSPECT,
    TODAY,
    TWIN,
    UNKNOWN,
    E,
    H,
    N,
    S,
    U,
    ask,
    erring,
    fresh,
    host,
    mismatches,
    right,
    run,
    signs,
    vendors,
    wrong,
)


def sighted(*hours, gone=1.0, seen=0.25, of=GPU, **changes):
    """Return the inventory's events of a device that vanished so many hours ago, each time for `gone` hours.

    It was last found `seen` hours before it was missed.
    """
    found = []
    for ago in hours:
        lost, back = NOW - ago * HOUR, NOW - (ago - gone) * HOUR
        common = {"device": of.uuid, "kind": "change", "name": "device", **changes}
        found.append(Event(first=lost - seen * HOUR, last=lost, before="found", after="gone", **common))
        found.append(Event(first=back, last=back, before="gone", after="found", **common))
    return sorted(found, key=lambda e: e.last)


def happened(kind, name, *hours, **changes):
    """Return events of GPU so many hours ago."""
    times = [NOW - ago * HOUR for ago in hours]
    return [Event(device=GPU.uuid, kind=kind, name=name, first=t, last=t, **changes) for t in times]


def fresh_results(number, ago=90.0):
    """Return a clean run with so many results."""
    return run(ago, right(trials=number))


TWO = {"exact_matmul": HOUR / 2, "memory_sweep": HOUR / 2}
LATE = {"probe": "memory_sweep", "skipped": (Skipped(case="a", reason="no time", late=True),)}
OTHER_KIND = dataclasses.replace(GPU, uuid="NPU-0", backend="npu")


def vanishing(*hours, besides=(), peer=(), alone=False, of=GPU, **changes):
    """Judge a device that vanished so many hours ago; `besides` are its other events, `peer` those of a sibling."""
    events = sorted([*sighted(*hours, of=of, **changes), *besides], key=lambda e: e.last)
    peers = () if alone else [(TWIN, [fresh(of=TWIN)])]
    return ask(fresh(of=of), of=of, peers=peers, signs=signs(events=events), sightings={TWIN.uuid: peer})


DEPARTED = Finding(rule="recording-departed", state=State.SUSPECT, cause=Cause.HARDWARE, message="story: unknown bits")
GARBAGE = Finding(rule="broken-output", state=State.FAULTY, cause=Cause.UNDETERMINED, message="story: !!!!")
CHANGED = Finding(rule="chain-changed", state=State.UNKNOWN, cause=Cause.SOFTWARE, message="story: another model")
SLOWER = Finding(rule="slower-than-before", state=State.DEGRADED, cause=Cause.ENVIRONMENT, message="12 % slower")


def hanging(answers, sibling="1111111111", apart=HOUR, pair=(GPU, TWIN)):
    """Judge the first of a pair that completed ("1") or timed out ("0") in its runs, newest last, beside the other."""

    def runs(of, told):
        ends = {"1": {}, "0": {"outcome": Outcome.TIMED_OUT}}
        return [
            run(MINUTE + apart * (len(told) - 1 - n), *[right(seed=9)] * (answer == "1"), of=of, **ends[answer])
            for n, answer in enumerate(told)
        ]

    return ask(*runs(pair[0], answers), of=pair[0], peers=[(pair[1], runs(pair[1], sibling))])


EVIDENCE = {
    # outcomes
    "never ran": lambda: (ask(), UNKNOWN, U, {"no-evidence"}),
    "nothing wanted": lambda: (ask(fresh(), wanted={}), UNKNOWN, U, {"no-evidence"}),
    **{
        f"newest {outcome.value}": lambda outcome=outcome, cause=cause: (
            ask(run(HOUR, right()), run(MINUTE, outcome=outcome)), UNKNOWN, cause, {"not-completed"},
        )
        for outcome, cause in {
            Outcome.SKIPPED: E, Outcome.OUT_OF_MEMORY: E, Outcome.ERRORED: N, Outcome.GARBLED: N,
            Outcome.CRASHED: U, Outcome.TIMED_OUT: U, Outcome.UNKILLABLE: U,
        }.items()
    },
    "an error of the device, alone": lambda: (
        ask(run(HOUR, right()), run(MINUTE, outcome=ERR)), UNKNOWN, U, {"device-error"},
    ),
    "an error of the device, a sibling ran before": lambda: (
        ask(run(HOUR, right()), run(MINUTE, outcome=ERR), peers=[(TWIN, [run(HOUR, right(), of=TWIN)])]),
        UNKNOWN, U, {"device-error"},
    ),
    "an error of the device, a sibling runs": lambda: (
        ask(run(HOUR, outcome=ERR), fresh(), peers=[(TWIN, [run(MINUTE, right(), of=TWIN)])]),
        SUSPECT, U, {"device-error"},
    ),
    "two errors of the device, alone": lambda: (
        ask(run(5 * HOUR, outcome=ERR), run(HOUR, outcome=ERR), fresh()), SUSPECT, U, {"device-error"},
    ),
    "two errors of the device alone, in what it has never completed": lambda: (
        ask(run(5 * HOUR, outcome=ERR, level="deep"), run(HOUR, outcome=ERR, level="deep"), fresh()),
        UNKNOWN, U, {"device-error"},
    ),
    "two errors of the device alone, on software on which it has completed nothing": lambda: (
        ask(
            run(HOUR + 3, right()), run(HOUR, outcome=ERR, stack={"torch": "newer"}),
            run(MINUTE, outcome=ERR, stack={"torch": "newer"}),
        ),
        UNKNOWN, U, {"device-error"},
    ),
    "two errors of the device that aborted the worker, which left no stack": lambda: (
        ask(run(5 * HOUR, outcome=ERR, stack={}), run(HOUR, outcome=ERR, stack={}), fresh()),
        SUSPECT, U, {"device-error"},
    ),
    "two errors of the device under MPS, a sibling runs": lambda: (
        ask(
            *(run(hours * HOUR, outcome=ERR, environment={MPS_CLIENT: "yes"}) for hours in (5, 1)), fresh(),
            peers=[(TWIN, [run(MINUTE, right(), of=TWIN)])],
        ),
        UNKNOWN, U, {"device-error"},
    ),
    "two errors of the device, a sibling runs something smaller": lambda: (
        ask(
            run(5 * HOUR, outcome=ERR, level="deep"), run(HOUR, outcome=ERR, level="deep"), fresh(),
            peers=[(TWIN, [run(MINUTE, right(), of=TWIN)])],
        ),
        UNKNOWN, U, {"device-error"},
    ),
    "two errors of the device, a sibling runs": lambda: (
        ask(
            run(5 * HOUR, outcome=ERR), run(HOUR, outcome=ERR), fresh(),
            peers=[(TWIN, [run(MINUTE, right(), of=TWIN)])],
        ),
        SUSPECT, H, {"device-error"},
    ),
    "two errors of the device, and of its sibling": lambda: (
        ask(
            run(5 * HOUR, outcome=ERR), run(HOUR, outcome=ERR), fresh(),
            peers=[(TWIN, [run(MINUTE, of=TWIN, outcome=ERR)])],
        ),
        UNKNOWN, Cause.SOFTWARE, {"device-error"},
    ),
    "two errors of the device a day ago": lambda: (
        ask(run(26 * HOUR, outcome=ERR), run(25 * HOUR, outcome=ERR), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "a crash before a completed run": lambda: (
        ask(run(HOUR, outcome=Outcome.CRASHED), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "a crash of one instruction set": lambda: (
        ask(run(HOUR, outcome=Outcome.CRASHED, instruction_set="avx2"), fresh(instruction_set="native")),
        UNKNOWN, U, {"not-completed"},
    ),
    "an old crash of an instruction set no longer used": lambda: (
        ask(run(3 * HOUR, outcome=Outcome.CRASHED, instruction_set="avx2"), fresh(instruction_set="native")),
        HEALTHY, Cause.NONE, set(),
    ),
    "an old crash with nothing since": lambda: (
        ask(run(4 * HOUR, right()), run(3 * HOUR, outcome=Outcome.CRASHED)),
        UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "a failed run of a probe that is not wanted": lambda: (
        ask(fresh(), run(MINUTE, probe="other", outcome=Outcome.ERRORED)), HEALTHY, Cause.NONE, set(),
    ),
    "never completed": lambda: (
        ask(run(60, outcome=Outcome.CRASHED)), UNKNOWN, U, {"not-completed", "no-evidence"},
    ),
    "only a confirmation has run": lambda: (ask(run(60, right(), confirms="x")), UNKNOWN, U, {"no-evidence"}),
    # staleness
    "two hours old": lambda: (ask(run(7200, right())), HEALTHY, Cause.NONE, set()),
    "two hours and a second old": lambda: (ask(run(7201, right())), UNKNOWN, U, {"stale-evidence"}),
    "three periods old": lambda: (
        ask(run(3 * DAY, right()), wanted={"exact_matmul": DAY}), HEALTHY, Cause.NONE, set(),
    ),
    "three periods and a second old": lambda: (
        ask(run(3 * DAY + 1, right()), wanted={"exact_matmul": DAY}), UNKNOWN, U, {"stale-evidence"},
    ),
    "an hour ahead": lambda: (ask(run(-3600, right())), HEALTHY, Cause.NONE, set()),
    "more than an hour ahead": lambda: (
        ask(run(-3601, right())), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    "dated ahead by the store, two hours old by the clock": lambda: (
        ask(run(-DAY, right(), clock=NOW - 7200)), HEALTHY, Cause.NONE, {"clock-set-back"},
    ),
    "dated ahead by the store, two hours and a second old by the clock": lambda: (
        ask(run(-DAY, right(), clock=NOW - 7201)), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    "dated ahead by the store, and a newer one by the clock": lambda: (
        ask(run(-DAY, right(), clock=NOW - 3 * HOUR), fresh()), HEALTHY, Cause.NONE, {"clock-set-back"},
    ),
    "dated ahead by the store, and ahead by the clock": lambda: (
        ask(run(-DAY, right(), clock=NOW + 3601)), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    "the future hides no staleness": lambda: (
        ask(run(-DAY, right()), run(7201, right())), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    # nothing checked
    "checked nothing": lambda: (ask(run(60, readings=())), UNKNOWN, N, {"checked-nothing"}),
    "zero trials": lambda: (
        ask(run(60, readings=(Reading(name="trials", value=0),))), UNKNOWN, N, {"checked-nothing"},
    ),
    "compared no result": lambda: (
        ask(run(60, right(trials=0), readings=())), UNKNOWN, N, {"checked-nothing"},
    ),
    "no time, beside 4,999 fresh results": lambda: (
        ask(fresh_results(4999), run(60, **LATE), wanted=TWO), UNKNOWN, E, {"checked-nothing"},
    ),
    "no time, beside 5,000 fresh results": lambda: (
        ask(fresh_results(5000), run(60, **LATE), wanted=TWO), HEALTHY, Cause.NONE, {"checked-nothing"},
    ),
    "no time, beside 5,000 results of two hours and a second ago": lambda: (
        ask(fresh_results(5000, 7201), fresh_results(1), run(60, **LATE), wanted=TWO), UNKNOWN, E, {"checked-nothing"},
    ),
    "no time on a device whose usual results nobody knows": lambda: (
        ask(run(60, **LATE), of=OTHER_KIND, wanted={"memory_sweep": HOUR}), UNKNOWN, E, {"checked-nothing"},
    ),
    "another reason, beside 5,000 fresh results": lambda: (
        ask(fresh_results(5000), run(60, **{**LATE, "skipped": (Skipped(case="a", reason="refused"),)}), wanted=TWO),
        UNKNOWN, N, {"checked-nothing"},
    ),
    "4,999 results in a check": lambda: (ask(fresh(), compared=(4999, 5000)), UNKNOWN, U, {"too-few-results"}),
    "5,000 results in a check": lambda: (ask(fresh(), compared=(5000, 5000)), HEALTHY, Cause.NONE, set()),
    "few results in a check, and a probe that crashed": lambda: (
        ask(fresh(), run(30, outcome=Outcome.CRASHED), compared=(1, 5000)), UNKNOWN, U, {"not-completed"},
    ),
    "only readings that nothing judges": lambda: (
        ask(run(60, readings=(Reading(name="switches", value="none"), Reading(name="trials", value=9)))),
        UNKNOWN, N, {"checked-nothing"},
    ),
    "only readings that are judged": lambda: (
        ask(run(60, readings=(Reading(name="power_watts", value=40.0),))), HEALTHY, Cause.NONE, set(),
    ),
    "only readings that are followed": lambda: (
        ask(run(60, readings=(Reading(name="speed_copy", value=40.0),))), HEALTHY, Cause.NONE, set(),
    ),
    "only recordings": lambda: (
        ask(run(60, recordings=(Recording(case="x", digest="0" * 16),))), HEALTHY, Cause.NONE, set(),
    ),
    "some parts skipped": lambda: (
        ask(run(60, right(), skipped=(Skipped(case="float8", reason="not on this device"),))),
        HEALTHY, Cause.NONE, set(),
    ),
    # ways out
    "30 days and 3/p clean trials": lambda: (
        ask(run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=29)), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "30 days, and one of them without a test": lambda: (
        ask(
            run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=29)), fresh(),
            days={*range(TODAY - 120, TODAY + 1)} - {TODAY - 9},
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "30 days, tested every second day as its period says": lambda: (
        ask(
            run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=29)), fresh(),
            days=range(TODAY - 30, TODAY, 2), wanted={"exact_matmul": 2 * DAY},
        ),
        HEALTHY, Cause.NONE, set(),
    ),
    "30 days by a clock that is not believed": lambda: (
        ask(
            run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=29)), fresh(),
            confirmed_time=NOW - DAY,
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "30 days and one clean trial too few": lambda: (
        ask(run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=28)), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "a second before 30 days": lambda: (
        ask(run(30 * DAY - 1, wrong(trials=10)), run(DAY, right(trials=9000)), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "clean trials of another probe or instruction set": lambda: (
        ask(
            run(30 * DAY, wrong(trials=10)), fresh(), run(DAY, right(trials=99), instruction_set="avx2"),
            run(DAY, right(trials=99), probe="other"),
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "wrong trials that cannot accuse are not clean ones either": lambda: (
        ask(
            run(30 * DAY, wrong(trials=10), of=CPU),
            run(DAY, wrong(2, 30, wrong_trials=9, characterised=False), of=CPU), fresh(CPU), of=CPU,
        ),
        SUSPECT, U, {"exact-mismatch", "uncharacterised-mismatch"},
    ),
    "a golden disagreement clears too": lambda: (
        ask(fresh(CPU), of=CPU, peers=[(GPU, [run(30 * DAY, host()), run(DAY, right(2), right(3))])]),
        HEALTHY, Cause.NONE, set(),
    ),
    "faulty does not clear by time": lambda: (
        ask(*mismatches(99 * DAY + 60, 99 * DAY), run(DAY, right(trials=9000)), fresh()),
        FAULTY, U, {"exact-mismatch-confirmed"},
    ),
    "software fault, new stack clean": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9), stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        HEALTHY, Cause.NONE, set(),
    ),
    "software fault, new stack wrong": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, wrong(9, first=OTHER_FIRST), stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "software fault, new stack compared nothing": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed", "checked-nothing"},
    ),
    "software fault, the old stack is back": lambda: (
        ask(
            *mismatches(3 * HOUR, 2 * HOUR), run(HOUR, right(9), stack=OTHER_STACK), fresh(),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "software fault, another instruction set is no new stack": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9), stack=OTHER_STACK, instruction_set="avx2"), fresh(),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "hardware fault, new stack clean": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9), stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, right(seed=1000), of=TWIN)])],
        ),
        FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    # recordings, and endpoints
    "a recording departed": lambda: (
        ask(fresh(), recordings=[DEPARTED]), SUSPECT, H, {"recording-departed"},
    ),
    "the one endpoint behind which it is alone departed": lambda: (
        ask(fresh(), serving={"endpoint:main": (1, [DEPARTED])}),
        SUSPECT, H, {"endpoint-departed"},
    ),
    "an endpoint behind which it is one of two departed": lambda: (
        ask(fresh(), serving={"endpoint:main": (2, [DEPARTED])}),
        HEALTHY, Cause.NONE, {"endpoint-departed"},
    ),
    "the endpoint behind which it is alone answers garbage": lambda: (
        ask(fresh(), serving={"endpoint:main": (1, [DEPARTED, GARBAGE])}),
        HEALTHY, Cause.NONE, {"endpoint-departed"},
    ),
    "hung two separate times, siblings answer": lambda: (hanging("1011101"), HEALTHY, Cause.NONE, set()),
    "hung three separate times, siblings answer": lambda: (hanging("10110101"), SUSPECT, U, {"keeps-failing"}),
    "hung three times in a row, siblings answer": lambda: (hanging("100011"), HEALTHY, Cause.NONE, set()),
    "hung in its last two runs, siblings answer": lambda: (
        hanging("111100"), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "hung in its last three runs, siblings answer": lambda: (
        hanging("111000"), SUSPECT, U, {"keeps-failing", "not-completed", "stale-evidence"},
    ),
    "a server hung in its last three runs, its replica answers": lambda: (
        hanging("111000", pair=SERVERS), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "a server hung three separate times, its replica answers": lambda: (
        hanging("10110101", pair=SERVERS), UNKNOWN, U, {"keeps-failing"},
    ),
    "a server hung seven times in a month, its replica answers": lambda: (
        hanging("01" * 7 + "1" * 20, "1" * 34, apart=20 * HOUR, pair=SERVERS), HEALTHY, Cause.NONE, set(),
    ),
    "never answered, siblings answer": lambda: (
        hanging("000"), SUSPECT, U, {"keeps-failing", "no-evidence", "not-completed"},
    ),
    "hung in its last three runs, a sibling had once before": lambda: (
        hanging("111000", "1111101111"), SUSPECT, U, {"keeps-failing", "not-completed", "stale-evidence"},
    ),
    "hung in its last five runs, a sibling in one meanwhile": lambda: (
        hanging("11100000", "1111110111"), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "hung in its last three runs, a sibling has run twice since": lambda: (
        hanging("111000", "11"), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "hung in its last three runs, alone": lambda: (
        hanging("111000", ""), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "hung three separate times, as a sibling did": lambda: (
        hanging("10110101", "10111111"), UNKNOWN, U, {"keeps-failing"},
    ),
    "hung three separate times, alone": lambda: (hanging("10110101", ""), UNKNOWN, U, {"keeps-failing"}),
    "hung three separate times, within 20 runs": lambda: (
        hanging("101010" + "1" * 14, apart=2 * HOUR), SUSPECT, U, {"keeps-failing"},
    ),
    "hung three separate times, 20 runs ago": lambda: (
        hanging("101010" + "1" * 15, apart=2 * HOUR), HEALTHY, Cause.NONE, set(),
    ),
    "hung seven times in a month, a sibling answers": lambda: (
        hanging("01" * 7 + "1" * 20, "1" * 34, apart=20 * HOUR), SUSPECT, U, {"keeps-failing"},
    ),
    "hung six times in a month, a sibling answers": lambda: (  # one of two by chance: 1 in 32
        hanging("01" * 6 + "1" * 20, "1" * 32, apart=20 * HOUR), HEALTHY, Cause.NONE, set(),
    ),
    "hung seven times in a month, as a sibling did once": lambda: (
        hanging("01" * 7 + "1" * 20, "0" + "1" * 33, apart=20 * HOUR), HEALTHY, Cause.NONE, set(),
    ),
    "hung seven times in a month, alone": lambda: (
        hanging("01" * 7 + "1" * 20, "", apart=20 * HOUR), HEALTHY, Cause.NONE, set(),
    ),
    "hung seven times within a day of each other": lambda: (
        hanging("01" * 7 + "1" * 20, "1" * 34, apart=10 * HOUR), HEALTHY, Cause.NONE, set(),
    ),
    "seven errors of the device in a month, a sibling has none": lambda: (
        erring(2, 6, 10, 14, 18, 22, 26), SUSPECT, U, {"device-error"},
    ),
    "six errors of the device in a month, a sibling has none": lambda: (
        erring(2, 6, 10, 14, 18, 22), HEALTHY, Cause.NONE, set(),
    ),
    "seven errors of the device in a month, one of another MPS client": lambda: (
        erring(2, 6, 10, 14, 18, 22, 26, environment={MPS_CLIENT: "yes"}), HEALTHY, Cause.NONE, set(),
    ),
    "seven errors of the device, the first over a month ago": lambda: (
        erring(2, 6, 10, 14, 18, 22, 31), HEALTHY, Cause.NONE, set(),
    ),
    "vanished five times in a month, a sibling stayed": lambda: (
        vanishing(600, 500, 400, 300, 200), SUSPECT, H, {"keeps-vanishing"},
    ),
    "vanished four times in a month, a sibling stayed": lambda: (
        vanishing(600, 500, 400, 300), HEALTHY, Cause.NONE, set(),
    ),
    "vanished five times, the first over a month ago": lambda: (
        vanishing(721, 500, 400, 300, 200), HEALTHY, Cause.NONE, set(),
    ),
    "vanished twice, a sibling stayed": lambda: (vanishing(60, 26), HEALTHY, Cause.NONE, set()),
    "vanished three times, a sibling stayed": lambda: (vanishing(60, 40, 26), SUSPECT, H, {"keeps-vanishing"}),
    "vanished three times, the first over a week ago": lambda: (vanishing(169, 40, 26), HEALTHY, Cause.NONE, set()),
    "vanished three times, alone": lambda: (vanishing(60, 40, 26, alone=True), UNKNOWN, U, {"keeps-vanishing"}),
    "vanished three times, once with its sibling": lambda: (
        vanishing(60, 40, 26, peer=sighted(60, of=TWIN)), HEALTHY, Cause.NONE, set(),
    ),
    "vanished three times beside a sibling that had vanished long before": lambda: (
        vanishing(60, 40, 26, peer=sighted(100, gone=99.5, of=TWIN)), UNKNOWN, U, {"keeps-vanishing"},
    ),
    "vanished three times, at a reboot": lambda: (
        vanishing(60, 40, 26, besides=happened("boot", "clean", 40.1)), HEALTHY, Cause.NONE, set(),
    ),
    "vanished three times, rebooted before it was last seen": lambda: (
        vanishing(60, 40, 26, besides=happened("boot", "clean", 40.3)), SUSPECT, H, {"keeps-vanishing"},
    ),
    "vanished three times, once while released": lambda: (
        vanishing(60, 40, 26, besides=happened("release", "canaryd", 40.1)), HEALTHY, Cause.NONE, set(),
    ),
    "vanished three times, once for another driver": lambda: (
        vanishing(60, 40, 26, besides=happened("change", "driver", 39, before="580", after="590")),
        HEALTHY, Cause.NONE, set(),
    ),
    "vanished three times within an hour": lambda: (
        vanishing(26, count=5), SUSPECT, H, {"keeps-vanishing"},
    ),
    "an instance vanished three times": lambda: (
        vanishing(60, 40, 26, of=dataclasses.replace(GPU, parent="GPU-whole")), HEALTHY, Cause.NONE, set(),
    ),
    "an endpoint's own troubles are none of its devices'": lambda: (
        ask(fresh(), serving={"endpoint:main": (1, [CHANGED])}), HEALTHY, Cause.NONE, set(),
    ),
    "slower than before": lambda: (ask(fresh(), slower=[SLOWER]), State.DEGRADED, E, {"slower-than-before"}),
    "results alone do not outlast a fault that strikes uploads": lambda: (
        ask(
            run(31 * DAY, wrong(trials=3, wrong_trials=3)), run(HOUR, right(trials=1000, uploads=1)), fresh(),
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "nor do uploads alone one that strikes results": lambda: (
        ask(run(31 * DAY, wrong(trials=1000)), run(HOUR, right(trials=1000, uploads=1000)), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    # an operator's word
    "a suspicion that is known": lambda: (
        ask(run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("acknowledged", HOUR)]),
        UNKNOWN, U, {"exact-mismatch", "acknowledged"},
    ),
    "a suspicion that is newer than the word": lambda: (
        ask(run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("acknowledged", 3 * HOUR)]),
        SUSPECT, U, {"exact-mismatch", "acknowledged"},
    ),
    "a self-test whose failure is known fails alike again": lambda: (
        ask(
            vendors(3 * HOUR, "pass", "fail"), vendors(HOUR, "pass", "fail"), fresh(),
            acks=[said("acknowledged", 2 * HOUR, rule="vendor-selftest")],
        ),
        UNKNOWN, U, {"vendor-selftest", "acknowledged"},
    ),
    "a self-test whose failure is known fails in another test too": lambda: (
        ask(
            vendors(3 * HOUR, "pass", "fail"), vendors(HOUR, "fail", "fail"), fresh(),
            acks=[said("acknowledged", 2 * HOUR, rule="vendor-selftest")],
        ),
        SUSPECT, U, {"vendor-selftest", "acknowledged"},
    ),
    "a suspicion of another kind than the one that is known": lambda: (
        ask(fresh(), recordings=[DEPARTED], acks=[said("acknowledged", HOUR)]),
        SUSPECT, H, {"recording-departed", "acknowledged"},
    ),
    "an acknowledgement that has run out": lambda: (
        ask(run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("acknowledged", HOUR, until=NOW)]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "an acknowledgement that has run out by a clock that is not believed": lambda: (
        ask(
            run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("acknowledged", HOUR, until=NOW)],
            confirmed_time=NOW - MINUTE,
        ),
        UNKNOWN, U, {"exact-mismatch", "acknowledged"},
    ),
    "an acknowledgement that a newer one has ended": lambda: (
        ask(
            run(3 * HOUR, wrong(), right(9)), fresh(),
            acks=[said("acknowledged", 2 * HOUR), said("acknowledged", HOUR, until=NOW - HOUR)],
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "what is faulty stays so, known or not": lambda: (
        ask(*mismatches(3 * HOUR, 2 * HOUR), fresh(), acks=[said("acknowledged", HOUR)]),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed", "acknowledged"},
    ),
    "a healthy device that was acknowledged": lambda: (
        ask(fresh(), acks=[said("acknowledged", HOUR)]), HEALTHY, Cause.NONE, {"acknowledged"},
    ),
    "a part that is still there, though it was said to be replaced": lambda: (
        ask(run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("replaced", HOUR)]),
        SUSPECT, U, {"exact-mismatch", "replaced-is-here"},
    ),
    # records lost
    "the records were lost yesterday": lambda: (
        ask(fresh(), history_lost=(NOW - DAY, "canaryd.db.corrupt-X")), UNKNOWN, Cause.HARNESS, {"history-lost"},
    ),
    "the records were lost a watch ago": lambda: (
        ask(fresh(), history_lost=(NOW - POLICY.watch, "canaryd.db.corrupt-X")), HEALTHY, Cause.NONE, set(),
    ),
    "the records were lost, and the machine was off for a watch": lambda: (
        ask(fresh(), history_lost=(NOW - POLICY.watch, "canaryd.db.corrupt-X"), days=()),
        UNKNOWN, Cause.HARNESS, {"history-lost"},
    ),
    "the records were lost, and somebody has looked": lambda: (
        ask(fresh(), history_lost=(NOW - DAY, "canaryd.db.corrupt-X"), acks=[said("acknowledged", HOUR, NOW - 1)]),
        HEALTHY, Cause.NONE, set(),
    ),
    "the records cannot be read": lambda: (
        ask(fresh(), unread="cannot read canaryd.db: database is locked"), UNKNOWN, Cause.HARNESS, {"record-unread"},
    ),
    # drills
    "a drill in the real world": lambda: (
        ask(run(60, wrong(), drill="stuck bit"), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "a drill": lambda: (ask(run(60, wrong(), drill="stuck bit"), drill=True), SUSPECT, U, {"exact-mismatch"}),
    "a drill an hour and a second ago": lambda: (
        ask(run(3601, wrong(), drill="stuck bit"), drill=True), UNKNOWN, U, {"no-evidence"},
    ),
    "a drill does not see real mismatches": lambda: (
        ask(run(60, wrong()), run(60, right(), drill="none"), drill=True), HEALTHY, Cause.NONE, set(),
    ),
}  # fmt: skip
"""Scenarios of evidence: outcomes, its age, ways out, endpoints, hangs, telemetry, what operators say."""


def said(kind, ago, until=NOW + DAY, rule="exact-mismatch"):
    rules = (rule,) * (kind == "acknowledged")
    return Ack(device="GPU-a", kind=kind, at=NOW - ago, until=until, reason="seen, ticket 4711", rules=rules)
