"""Scenarios of evidence, its age, and its absence."""

from dataclasses import replace

from canaryd.facts import Reading, Skipped
from canaryd.model import MPS_CLIENT, Ack, Cause, Event, Finding, Outcome, State
from tests.judge.made import (
    DAY,
    ERR,
    FAULTY,
    GPU,
    HEALTHY,
    HOUR,
    MINUTE,
    NOW,
    OTHER_STACK,
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
    fresh,
    mismatches,
    right,
    run,
    signs,
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


def vanishing(*hours, besides=(), peer=(), alone=False, of=GPU, **changes):
    """Judge a device that vanished so many hours ago; `besides` are its other events, `peer` those of a sibling."""
    events = sorted([*sighted(*hours, of=of, **changes), *besides], key=lambda e: e.last)
    peers = () if alone else [(TWIN, [fresh(of=TWIN)])]
    return ask(fresh(of=of), of=of, peers=peers, signs=signs(events=events), sightings={TWIN.uuid: peer})


DEPARTED = Finding(rule="recording-departed", state=State.SUSPECT, cause=Cause.HARDWARE, message="story: unknown bits")
GARBAGE = Finding(rule="broken-output", state=State.FAULTY, cause=Cause.UNDETERMINED, message="story: !!!!")


def hanging(answers, sibling="1111111111", apart=HOUR, pair=(GPU, TWIN), third=None):
    """Judge the first of a pair that completed ("1") or timed out ("0") in its runs, newest last, beside the others.

    Of what is " " no run is at hand.
    """

    def runs(of, told):
        ends = {"1": {}, "0": {"outcome": Outcome.TIMED_OUT}}
        return [
            run(MINUTE + apart * (len(told) - 1 - n), *[right(seed=9)] * (answer == "1"), of=of, **ends[answer])
            for n, answer in enumerate(told)
            if answer in ends
        ]

    peers = [(pair[1], runs(pair[1], sibling))]
    if third is not None:
        other = replace(pair[1], uuid="GPU-third", index=7)
        peers.append((other, runs(other, third)))
    return ask(*runs(pair[0], answers), of=pair[0], peers=peers)


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
    "two errors of the device under MPS, a sibling runs": lambda: (
        ask(
            *(run(hours * HOUR, outcome=ERR, environment={MPS_CLIENT: "yes"}) for hours in (5, 1)), fresh(),
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
    "a crash before a completed run": lambda: (
        ask(run(HOUR, outcome=Outcome.CRASHED), fresh()), HEALTHY, Cause.NONE, set(),
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
    "an hour ahead": lambda: (ask(run(-3600, right())), HEALTHY, Cause.NONE, set()),
    "more than an hour ahead": lambda: (
        ask(run(-3601, right())), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    "undated, and so never fresh": lambda: (
        ask(run(-DAY, right(), clock=NOW - 60)), UNKNOWN, U, {"clock-set-back", "stale-evidence"},
    ),
    "undated, and a newer one by the clock": lambda: (
        ask(run(-DAY, right(), clock=NOW - 3 * HOUR), fresh()), HEALTHY, Cause.NONE, {"clock-set-back"},
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
    "4,999 results in a check": lambda: (ask(fresh(), compared=(4999, 5000)), UNKNOWN, U, {"too-few-results"}),
    "5,000 results in a check": lambda: (ask(fresh(), compared=(5000, 5000)), HEALTHY, Cause.NONE, set()),
    "few results in a check, and a probe that crashed": lambda: (
        ask(fresh(), run(30, outcome=Outcome.CRASHED), compared=(1, 5000)), UNKNOWN, U, {"not-completed"},
    ),
    "only readings that nothing judges": lambda: (
        ask(run(60, readings=(Reading(name="switches", value="none"), Reading(name="trials", value=9)))),
        UNKNOWN, N, {"checked-nothing"},
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
    "30 days and one clean trial too few": lambda: (
        ask(run(30 * DAY, wrong(trials=10)), run(DAY, right(trials=28)), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "a second before 30 days": lambda: (
        ask(run(30 * DAY - 1, wrong(trials=10)), run(DAY, right(trials=9000)), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "faulty does not clear by time": lambda: (
        ask(*mismatches(99 * DAY + 60, 99 * DAY), run(DAY, right(trials=9000)), fresh()),
        FAULTY, U, {"exact-mismatch-confirmed"},
    ),
    "software fault, new stack clean": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9, trials=3), stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])],
        ),
        HEALTHY, Cause.NONE, set(),
    ),
    "software fault, new stack clean for one trial too few": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9, trials=2), stack=OTHER_STACK),
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
    "hardware fault, new stack clean": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(60, right(9), stack=OTHER_STACK),
            peers=[(TWIN, [run(HOUR, right(seed=1000), of=TWIN)])],
        ),
        FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    # recordings, and endpoints
    "the endpoint behind which it is alone answers garbage": lambda: (
        ask(fresh(), serving={"endpoint:main": (1, [DEPARTED, GARBAGE])}),
        HEALTHY, Cause.NONE, {"endpoint-departed"},
    ),
    "hung two separate times, siblings answer": lambda: (hanging("1011101"), UNKNOWN, U, {"keeps-failing"}),
    "hung two separate times, and not for a day": lambda: (hanging("10101" + 24 * "1"), HEALTHY, Cause.NONE, set()),
    "hung for three runs, and once more": lambda: (hanging("1100011101"), SUSPECT, U, {"keeps-failing"}),
    "hung three times, the answers are forgotten": lambda: (hanging("0  0  0  111"), SUSPECT, U, {"keeps-failing"}),
    "hung three times in hours, a day ago": lambda: (hanging("10101" * 2 + 21 * "1"), SUSPECT, U, {"keeps-failing"}),
    "hung three separate times, siblings answer": lambda: (hanging("10110101"), SUSPECT, U, {"keeps-failing"}),
    "hung three separate times, alone": lambda: (hanging("10110101", ""), UNKNOWN, U, {"keeps-failing"}),
    "hung three separate times, its sibling once, at another time": lambda: (
        hanging("10110101", "1011111111"), SUSPECT, U, {"keeps-failing"},
    ),
    "hung three separate times, its sibling with it": lambda: (
        hanging("10110101", "10110101"), UNKNOWN, U, {"keeps-failing"},
    ),
    "hangs for ever, as one of two siblings does": lambda: (
        hanging("11100000", "11111111", third="11100000"), UNKNOWN, U, {"not-completed", "stale-evidence"},
    ),
    "hangs for ever, and both siblings answer": lambda: (
        hanging("11100000", "11111111", third="11111111"), SUSPECT, U,
        {"not-completed", "stale-evidence", "keeps-failing"},
    ),
    "vanished three times, at a reboot": lambda: (
        vanishing(60, 40, 26, besides=happened("boot", "clean", 40.1)), HEALTHY, Cause.NONE, set(),
    ),
    "vanished three times, once while released": lambda: (
        vanishing(60, 40, 26, besides=happened("release", "canaryd", 40.1)), HEALTHY, Cause.NONE, set(),
    ),
    "results alone do not outlast a fault that strikes uploads": lambda: (
        ask(
            run(31 * DAY, wrong(trials=3, wrong_trials=3)), run(HOUR, right(trials=1000, uploads=1)), fresh(),
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    # an operator's word
    "an acknowledgement that has run out": lambda: (
        ask(run(2 * HOUR, wrong(), right(9)), fresh(), acks=[said("acknowledged", HOUR, until=NOW)]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "what is faulty stays so, known or not": lambda: (
        ask(*mismatches(3 * HOUR, 2 * HOUR), fresh(), acks=[said("acknowledged", HOUR)]),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed", "acknowledged"},
    ),
    # records lost
    "the records were lost, and somebody has looked": lambda: (
        ask(fresh(), history_lost=(NOW - DAY, "canaryd.db.corrupt-X"), acks=[said("acknowledged", HOUR, NOW - 1)]),
        HEALTHY, Cause.NONE, set(),
    ),
}  # fmt: skip
"""Scenarios of evidence: outcomes, its age, ways out, endpoints, hangs, telemetry, what operators say."""


def said(kind, ago, until=NOW + DAY, rule="exact-mismatch"):
    rules = (rule,) * (kind == "acknowledged")
    return Ack(device="GPU-a", kind=kind, at=NOW - ago, until=until, reason="seen, ticket 4711", rules=rules)
