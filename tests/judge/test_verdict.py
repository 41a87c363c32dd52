"""The judge: each rule from both sides, properties that must hold for any history, and that no rule is idle."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canaryd.config.judge_policy import JudgePolicy
from canaryd.config.settings import TelemetryConfig
from canaryd.facts import Comparison, Doubt, Evidence, Exactness, Reading, Skipped, Span, Subject
from canaryd.judge import case, findings
from canaryd.judge import verdict as judge_verdict
from canaryd.judge.case import Case
from canaryd.judge.device_errors import REPEATS
from canaryd.judge.node import node
from canaryd.judge.phrases import PROVIDER
from canaryd.judge.telemetry.signals import Poll, Signs
from canaryd.judge.verdict import decide, exit_code, fault_rate_bound, worst
from canaryd.model import MPS_CLIENT, Ack, Cause, Device, Event, Finding, Outcome, Run, State, Verdict
from tests.places import line, place

NOW = 1_790_000_000.0
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
POLICY = JudgePolicy()
STACK, OTHER_STACK = {"torch": "2.13.0", "driver": "580.95"}, {"torch": "2.13.1", "driver": "580.95"}
WANTED = {"exact_matmul": 900.0}


def device(uuid="GPU-a", backend="cuda", index=0, **changes):
    model = "H100" if backend == "cuda" else "Xeon"
    return Device(**{"uuid": uuid, "backend": backend, "index": index, "model": model, "torch_index": index, **changes})


GPU, TWIN, THIRD = device(), device("GPU-b", index=1), device("GPU-c", index=2)
CPU = device("CPU-a", "cpu")
SERVERS = device("endpoint:a", "endpoint"), device("endpoint:b", "endpoint", 1)
UNREACHED = device("GPU-u", torch_index=None)
UNDRIVEN = device("PCI-1", torch_index=None, detail={"bus_id": "0000:65:00.0", "undriven": "no driver is loaded"})

FIRST = (((3, 17), "0x3f80", "0x3f00"),)
OTHER_FIRST = (((5, 1), "0x3f80", "0x0000"),)


def evidence(first=FIRST, bits=("7", "3"), lines=None, **changes):
    fields = {"wrong": 12, "total": 4096, "zeroed": 0, "nonfinite": 0, "pattern": "12 elements, row 17"}
    return Evidence(
        **{**fields, "first": first, "bits": dict.fromkeys(bits, 12), "lines": lines or {"row": line(17)}, **changes}
    )


def right(seed=1, trials=1, case="bfloat16/wide", **changes):
    fields = {"case": case, "shape": "M=32", "seed": seed, "exactness": Exactness.UNIVERSAL, "place": place("device")}
    return Comparison(**{**fields, "trials": trials, "uploads": trials, **changes})


def wrong(seed=1, trials=1, wrong_trials=1, first=FIRST, bits=("7", "3"), lines=None, **changes):
    seen = evidence(first, bits, lines)
    return right(seed, trials, **{"wrong_trials": wrong_trials, "evidence": seen, "uploads": 1, **changes})


def host(where="cores 0 and 3", **changes):
    return wrong(subject=Subject.HOST, place=place(where), **changes)


def comparator(**changes):
    return wrong(subject=Subject.COMPARATOR, **changes)


NUMBERS = itertools.count()


def run(ago, *comparisons, of=GPU, **changes):
    """Return a completed run that started `ago` seconds before now."""
    fields = {"probe": "exact_matmul", "probe_version": 1, "seconds": 4.0, "outcome": Outcome.COMPLETED, "stack": STACK}
    fields |= {"comparisons": comparisons, "readings": (Reading(name="trials", value=9),), "repro": "canaryd check …"}
    fields["id"] = f"run-{next(NUMBERS):06d}"
    return Run(device=of.uuid, started=NOW - ago, **{**fields, **changes})


def fresh(of=GPU, **changes):
    """Return a clean run that is a minute old, with seeds nobody else has used."""
    return run(MINUTE, right(seed=99), of=of, **changes)


TODAY = int(NOW // DAY)


def ask(*runs, of=GPU, peers=(), days=range(TODAY - 120, TODAY + 1), **changes):
    """Judge `of` by its runs; `peers` are (device, runs) pairs, `days` the days on which all of them were tested."""
    given = {"wanted": WANTED, "policy": POLICY, "now": NOW, "previous": None}
    given |= changes
    devices = {**{d.uuid: d for d, _ in peers}, of.uuid: of}
    evidence = {**{d.uuid: r for d, r in peers}, of.uuid: runs}
    summed = {uuid: {"exact_matmul": days} for uuid in devices}
    among = node(devices, evidence, given["now"], drill=given.get("drill", False), summed=summed)
    return decide(Case(device=of, node=among, **given))


def rules(verdict):
    return {f.rule for f in verdict.findings}


def signs(*, remap_failed=0, age=5.0, events=()):
    """Return the telemetry of a device that its driver was asked about so many seconds ago."""
    reading = Reading(name="row_remap_failed", value=remap_failed)
    poll = run(age, probe="nvidia_telemetry", readings=(reading,))
    return Signs(
        device=GPU,
        polls={"nvidia_telemetry": Poll(period=15.0, newest=poll, completed=poll)},
        events=tuple(events),
        last_pass=None,
        last_mismatch=None,
        now=NOW,
        policy=TelemetryConfig(),
    )


def vendors(ago, *results, of=GPU):
    """Return a run of the vendor's self-test so long ago, with what each of its tests said."""
    given = {"name": "vendor_selftest", "unit": "1"}
    found = (Reading(value=r, labels={"tool": "dcgmi diag", "test": str(n)}, **given) for n, r in enumerate(results))
    return run(ago, probe="vendor_selftest", readings=tuple(found), of=of)


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


def vanishing(*hours, besides=(), peer=(), alone=False, of=GPU, **changes):
    """Judge a device that vanished so many hours ago; `besides` are its other events, `peer` those of a sibling."""
    events = sorted([*sighted(*hours, of=of, **changes), *besides], key=lambda e: e.last)
    peers = () if alone else [(TWIN, [fresh(of=TWIN)])]
    return ask(fresh(of=of), of=of, peers=peers, signs=signs(events=events), sightings={TWIN.uuid: peer})


DEPARTED = Finding(rule="recording-departed", state=State.SUSPECT, cause=Cause.HARDWARE, message="story: unknown bits")
GARBAGE = Finding(rule="broken-output", state=State.FAULTY, cause=Cause.UNDETERMINED, message="story: !!!!")
CHANGED = Finding(rule="chain-changed", state=State.UNKNOWN, cause=Cause.SOFTWARE, message="story: another model")
SLOWER = Finding(rule="slower-than-before", state=State.DEGRADED, cause=Cause.ENVIRONMENT, message="12 % slower")
H, S, E, N, U = Cause.HARDWARE, Cause.SOFTWARE, Cause.ENVIRONMENT, Cause.HARNESS, Cause.UNDETERMINED


def mismatches(*ages, **changes):
    """Return wrong runs of those ages whose seeds, bits and places share nothing."""
    return [run(age, wrong(seed=1000 + i, **changes)) for i, age in enumerate(ages)]


def confirmations(count, *, clean=0, **changes):
    """Return a wrong run and so many confirmations of it, all too close together to count as independent."""
    return [
        run(2 * HOUR, wrong(), id="the-mismatch"),
        *(run(2 * HOUR - 1 - i, wrong(), confirms="the-mismatch", **changes) for i in range(count)),
        *(run(2 * HOUR - 9 - i, right(), confirms="the-mismatch") for i in range(clean)),
    ]


def spots(*pairs):
    """Return two wrong uploads in runs too close together to count as independent; each pair is (place, fields)."""
    return [run(HOUR + i, wrong(seed=i, place=place(where), **fields)) for i, (where, fields) in enumerate(pairs)]


def turned(times):
    """Return a run that was right and so many that are wrong on the same bytes, too close together to confirm."""
    return [run(DAY, right()), *(run(HOUR - n, wrong()) for n in range(times))]


def beside(failing, *siblings):
    """Judge a device with so many failing runs of 50, beside siblings with theirs; no two share seeds or bits."""

    def record(of, count, first):
        ages = [HOUR * (1 + n) for n in range(50)]
        facts = [wrong(seed=first + n, trials=100) if n < count else right(first + n, 100) for n in range(50)]
        return [run(age, fact, of=of) for age, fact in zip(ages, facts, strict=True)]

    peers = [(of, record(of, count, 1000 * (2 + n))) for n, (of, count) in enumerate(siblings)]
    return ask(*record(GPU, failing, 1000), fresh(), peers=peers)


def hanging(answers, sibling="1111111111", apart=HOUR, pair=(GPU, TWIN)):
    """Judge the first of a pair that completed ("1") or timed out ("0") in its runs, newest last, beside the other."""

    def runs(of, told):
        ends = {"1": {}, "0": {"outcome": Outcome.TIMED_OUT}}
        return [
            run(MINUTE + apart * (len(told) - 1 - n), *[right(seed=9)] * (answer == "1"), of=of, **ends[answer])
            for n, answer in enumerate(told)
        ]

    return ask(*runs(pair[0], answers), of=pair[0], peers=[(pair[1], runs(pair[1], sibling))])


def erring(*days, **changes):
    """Judge a device that ended runs with an error of its own so many days ago, beside a sibling."""
    errors = [run(d * DAY, outcome=ERR, **changes) for d in days]
    return ask(*reversed(errors), fresh(), peers=[(TWIN, [fresh(of=TWIN)])])


ERR = Outcome.DEVICE_ERROR
SUSPECT, FAULTY, UNKNOWN, HEALTHY = State.SUSPECT, State.FAULTY, State.UNKNOWN, State.HEALTHY

SCENARIOS = {
    # name: (verdict, state, cause, rules that speak)
    "clean": lambda: (ask(fresh()), HEALTHY, Cause.NONE, set()),
    "torch does not reach it": lambda: (ask(of=UNREACHED), UNKNOWN, E, {"unreached"}),
    "nothing drives it": lambda: (ask(of=UNDRIVEN), UNKNOWN, E, {"unreached"}),
    "divided, its instances are tested": lambda: (
        ask(of=UNREACHED, wanted={}, peers=[(device("MIG-1", parent="GPU-u"), [])]), HEALTHY, Cause.NONE, set(),
    ),
    "no probe wanted": lambda: (ask(wanted={}), UNKNOWN, U, {"no-evidence"}),
    "7 of 8": lambda: (ask(fresh(of=CPU), of=CPU, accelerators=(7, 8)), UNKNOWN, U, {"devices-missing"}),
    "a vendor that could not be asked": lambda: (
        ask(fresh(of=CPU), of=CPU, unlisted={"nvidia": "version mismatch"}), UNKNOWN, E, {"devices-unlisted"},
    ),
    "gone, and torch does not reach it": lambda: (
        ask(of=UNREACHED, gone_since=NOW - HOUR), UNKNOWN, U, {"device-vanished", "no-evidence"},
    ),
    "8 of 8": lambda: (ask(fresh(of=CPU), of=CPU, accelerators=(8, 8)), HEALTHY, Cause.NONE, set()),
    "its driver says that a row could not be remapped": lambda: (
        ask(fresh(), signs=signs(remap_failed=1)), FAULTY, H, {"row-remap-failed"},
    ),
    "gone, and condemned by itself before": lambda: (
        ask(fresh(), signs=signs(remap_failed=1), gone_since=NOW - HOUR),
        FAULTY, H, {"device-vanished", "row-remap-failed"},
    ),
    "gone, and silent since": lambda: (
        ask(fresh(), signs=signs(age=HOUR), gone_since=NOW - HOUR), UNKNOWN, U, {"device-vanished"},
    ),
    "silent": lambda: (ask(fresh(), signs=signs(age=HOUR)), UNKNOWN, N, {"telemetry-stale"}),
    "gone": lambda: (ask(fresh(), gone_since=NOW - HOUR), UNKNOWN, U, {"device-vanished"}),
    "one mismatch": lambda: (ask(run(60, wrong())), SUSPECT, U, {"exact-mismatch"}),
    "a mismatch that a crashed run delivered": lambda: (
        ask(run(120, wrong(), outcome=Outcome.CRASHED, stack={}), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "suspect while newest runs are clean": lambda: (ask(run(DAY, wrong()), fresh()), SUSPECT, U, {"exact-mismatch"}),
    # grounds
    "3 of 3 confirmations wrong": lambda: (
        ask(*confirmations(3), fresh()), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "2 of 3 confirmations wrong": lambda: (ask(*confirmations(2, clean=1), fresh()), SUSPECT, U, {"exact-mismatch"}),
    "the third confirmation timed out": lambda: (
        ask(*confirmations(2), run(HOUR, confirms="the-mismatch", outcome=Outcome.TIMED_OUT), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "confirmations that crashed confirm nothing": lambda: (
        ask(*confirmations(3, outcome=Outcome.CRASHED), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "two wrong runs 59 s apart": lambda: (ask(*mismatches(1059, 1000), fresh()), SUSPECT, U, {"exact-mismatch"}),
    "two wrong runs 60 s apart": lambda: (
        ask(*mismatches(1060, 1000), fresh()), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "two wrong runs 24 h and 1 s apart": lambda: (
        ask(*mismatches(DAY + 1001, 1000), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "two wrong runs 24 h apart": lambda: (
        ask(*mismatches(DAY + 1000, 1000), fresh()), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "two probes wrong within a day": lambda: (
        ask(run(2 * HOUR, wrong(), probe="exact_attention"), run(HOUR, wrong(seed=5, first=OTHER_FIRST)), fresh()),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "three wrong runs in 7 days": lambda: (
        ask(*mismatches(7 * DAY + 1000, 4 * DAY, 1000), fresh()),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "three wrong runs in 7 days and 1 s": lambda: (
        ask(*mismatches(7 * DAY + 1001, 4 * DAY, 1000), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "two wrong uploads on one core": lambda: (
        ask(*spots(("core 3", {}), ("core 3", {})), fresh()),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "two wrong uploads on two cores": lambda: (
        ask(*spots(("core 3", {}), ("core 4", {})), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "two wrong uploads on all cores": lambda: (
        ask(*spots(("all 2 threads", {}), ("all 2 threads", {})), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "the same bit of the same row twice": lambda: (
        ask(*spots(("device", {"bits": ("5",)}), ("device", {"bits": ("5",)})), fresh()),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "another bit of the same row": lambda: (
        ask(*spots(("device", {"bits": ("5",)}), ("device", {"bits": ("6",)})), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "the same bit of another row": lambda: (
        ask(*spots(("device", {"bits": ("5",)}), ("device", {"bits": ("5",), "lines": {"row": line(3)}})), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "the same bit in the same range of rows is no place": lambda: (
        ask(*spots(*[("device", {"bits": ("5",), "lines": {"row": Span(first=0, last=31, distinct=4)}})] * 2), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    # cause
    "sibling right on the same bytes": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN)])]),
        SUSPECT, H, {"exact-mismatch"},
    ),
    "sibling right on the same bytes under another stack": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN, stack=OTHER_STACK)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "sibling right on the bytes of another version of the probe": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN, probe_version=2)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "right on the same bytes, but another model": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(dataclasses.replace(TWIN, model="A10"), [run(60, right())])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "unrecorded stacks are not equal": lambda: (
        ask(run(HOUR, wrong(), stack={}), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN, stack={})])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "a rare fault, right on the same bytes by a sibling for long": lambda: (
        ask(run(HOUR, wrong(trials=100)), peers=[(TWIN, [run(HOUR, right(trials=900), of=TWIN)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "right on the same bytes before, and 3 times wrong": lambda: (
        ask(*turned(3), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN)])]), SUSPECT, U, {"exact-mismatch"},
    ),
    "right on the same bytes before, and 4 times wrong": lambda: (
        ask(*turned(4), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN)])]), SUSPECT, H, {"exact-mismatch"},
    ),
    "6 failing runs beside a sibling that ran as long without one": lambda: (
        beside(6, (TWIN, 0)), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "7 failing runs beside a sibling that ran as long without one": lambda: (
        beside(7, (TWIN, 0)), FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "4 failing runs beside two siblings without one": lambda: (
        beside(4, (TWIN, 0), (THIRD, 0)), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "5 failing runs beside two siblings without one": lambda: (
        beside(5, (TWIN, 0), (THIRD, 0)), FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "16 failing runs beside a sibling with one": lambda: (
        beside(16, (TWIN, 1)), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "17 failing runs beside a sibling with one": lambda: (
        beside(17, (TWIN, 1)), FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "less than 5 times as often as a sibling": lambda: (
        beside(44, (TWIN, 9)), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "5 times as often as a sibling": lambda: (
        beside(46, (TWIN, 9)), FAULTY, H, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "sibling wrong in the same bits": lambda: (
        ask(*mismatches(2 * HOUR, HOUR), fresh(), peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])]),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "sibling wrong with the same digest": lambda: (
        ask(
            run(HOUR, wrong(first=(), digest="cafe")),
            peers=[(TWIN, [run(HOUR, wrong(first=(), digest="cafe"), of=TWIN)])],
        ),
        SUSPECT, S, {"exact-mismatch"},
    ),
    "sibling wrong in other bits": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, wrong(first=OTHER_FIRST), of=TWIN)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "one sibling wrong alike, one right": lambda: (
        ask(
            run(HOUR, wrong()),
            peers=[(TWIN, [run(HOUR, wrong(), of=TWIN)]), (THIRD, [run(HOUR, right(), of=THIRD)])],
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "wrong alike on one golden: a sibling's record elsewhere proves nothing": lambda: (
        ask(
            run(HOUR, wrong()),
            peers=[(TWIN, [run(HOUR, wrong(), of=TWIN)]), (THIRD, [run(HOUR, right(8, 9000), of=THIRD)])],
        ),
        SUSPECT, S, {"exact-mismatch"},
    ),
    "a software fault and one mismatch of the device's own": lambda: (
        ask(
            *mismatches(2 * HOUR, HOUR), run(HOUR, wrong(), probe="exact_attention"), fresh(),
            peers=[(TWIN, [run(60, wrong(1000), of=TWIN), run(60, right(), of=TWIN, probe="exact_attention")])],
        ),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "software's mismatch does not confirm the device's own": lambda: (
        ask(
            *mismatches(2 * HOUR), run(HOUR, wrong(), probe="exact_attention"), fresh(),
            peers=[(TWIN, [run(60, wrong(1000), of=TWIN), run(60, right(), of=TWIN, probe="exact_attention")])],
        ),
        SUSPECT, H, {"exact-mismatch"},
    ),
    "the accused is not its own sibling": lambda: (
        ask(runs := run(HOUR, wrong()), fresh(), peers=[(GPU, [runs])]), SUSPECT, U, {"exact-mismatch"},
    ),
    # the host
    "the host's CPU was wrong within 24 h": lambda: (
        ask(*mismatches(2 * HOUR, HOUR), fresh(), peers=[(CPU, [run(HOUR + DAY, wrong(seed=4), of=CPU)])]),
        SUSPECT, U, {"exact-mismatch", "host-in-doubt"},
    ),
    "the host's CPU was wrong 24 h and 1 s before": lambda: (
        ask(*mismatches(HOUR), fresh(), peers=[(CPU, [run(HOUR + DAY + 1, wrong(seed=4), of=CPU)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "the host's golden disagreed in a sibling's run": lambda: (
        ask(*mismatches(2 * HOUR, HOUR), fresh(), peers=[(TWIN, [run(HOUR, host(), of=TWIN)])]),
        SUSPECT, U, {"exact-mismatch", "host-in-doubt"},
    ),
    "every device of the host is wrong in its own way": lambda: (
        ask(
            run(HOUR, wrong(), of=CPU), of=CPU,
            peers=[
                (GPU, [run(HOUR, wrong(seed=2))]),
                (TWIN, [run(HOUR, wrong(seed=2, first=OTHER_FIRST), of=TWIN)]),
            ],
        ),
        SUSPECT, H, {"exact-mismatch"},
    ),
    "two accelerators wrong alike do not accuse the host": lambda: (
        ask(
            run(HOUR, wrong(), of=CPU), of=CPU,
            peers=[(GPU, [run(HOUR, wrong(seed=2))]), (TWIN, [run(HOUR, wrong(seed=2), of=TWIN)])],
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "one accelerator is not every device": lambda: (
        ask(run(HOUR, wrong(), of=CPU), of=CPU, peers=[(GPU, [run(HOUR, wrong(seed=2))])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    # goldens in doubt
    "two cores disagree in the CPU's own run": lambda: (
        ask(run(MINUTE, host(), right(2), of=CPU), of=CPU), SUSPECT, H, {"golden-disagreement"},
    ),
    "the only core disagrees with itself": lambda: (
        ask(run(MINUTE, host("core 3 twice"), right(2), of=CPU), of=CPU), SUSPECT, H, {"golden-disagreement"},
    ),
    "a lone core disagrees with itself, in a container that was moved": lambda: (
        ask(run(HOUR, host("core 3 twice"), of=CPU), run(MINUTE, host("core 5 twice"), right(2), of=CPU), of=CPU),
        FAULTY, H, {"golden-disagreement", "exact-mismatch-confirmed"},
    ),
    "a bad file of digests, and one golden made twice, unlike, long ago": lambda: (
        ask(
            run(40 * DAY, host(seed=8), of=CPU),
            *(run(MINUTE * n, host("core 3", seed=9), of=CPU) for n in (30, 20, 10)), of=CPU,
        ),
        SUSPECT, H, {"golden-disagreement"},
    ),
    "two cores disagree in an accelerator's run: the CPU": lambda: (
        ask(fresh(CPU), of=CPU, peers=[(GPU, [run(HOUR, host())])]), SUSPECT, H, {"golden-disagreement"},
    ),
    "two cores disagree in an accelerator's run: the accelerator": lambda: (
        ask(run(HOUR, host(), right(2))), UNKNOWN, N, {"golden-in-doubt"},
    ),
    "the accelerator's next run has sound goldens": lambda: (
        ask(run(HOUR, host(), right(2)), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "cores disagree twice": lambda: (
        ask(fresh(CPU), of=CPU, peers=[(GPU, [run(HOUR, host()), run(2 * HOUR, host())])]),
        FAULTY, H, {"golden-disagreement", "exact-mismatch-confirmed"},
    ),
    "a golden and a result of the CPU, an hour apart": lambda: (
        ask(run(2 * HOUR, wrong(seed=4), of=CPU), run(HOUR, host(), right(2), of=CPU), of=CPU),
        FAULTY, H, {"golden-disagreement", "exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "one core against the reference, never made right": lambda: (
        ask(run(MINUTE, host("core 3"), right(2), of=CPU), of=CPU), SUSPECT, U, {"golden-disagreement"},
    ),
    "one core against the reference, elsewhere made right": lambda: (
        ask(run(MINUTE, host("core 3"), right(2), of=CPU), run(HOUR, right(), of=CPU), of=CPU),
        SUSPECT, H, {"golden-disagreement"},
    ),
    "one core against the reference twice in a run": lambda: (
        ask(run(MINUTE, host("core 3"), host("core 3", seed=2), right(9), of=CPU), of=CPU),
        SUSPECT, U, {"golden-disagreement"},
    ),
    "two cores against the reference in the same words": lambda: (
        ask(run(HOUR, host("core 3"), of=CPU), run(MINUTE, host("core 4"), right(2), of=CPU), of=CPU),
        UNKNOWN, N, {"golden-in-doubt"},
    ),
    # comparator
    "the vendor's self-test failed": lambda: (
        ask(vendors(HOUR, "pass", "fail"), fresh()), SUSPECT, U, {"vendor-selftest"},
    ),
    "the vendor's self-test failed the same test on a sibling": lambda: (
        ask(vendors(HOUR, "pass", "fail"), fresh(), peers=[(TWIN, [vendors(2 * HOUR, "fail", "fail", of=TWIN)])]),
        UNKNOWN, U, {"vendor-selftest"},
    ),
    "the vendor's self-test failed a test that a sibling passes": lambda: (
        ask(vendors(HOUR, "fail", "fail"), fresh(), peers=[(TWIN, [vendors(HOUR, "pass", "fail", of=TWIN)])]),
        SUSPECT, U, {"vendor-selftest"},
    ),
    "the vendor's self-test fails on two, and a third passes": lambda: (
        ask(
            vendors(HOUR, "fail"), fresh(),
            peers=[(TWIN, [vendors(HOUR, "fail", of=TWIN)]), (THIRD, [vendors(HOUR, "pass", of=THIRD)])],
        ),
        SUSPECT, U, {"vendor-selftest"},
    ),
    "the vendor's self-test failed on a sibling two days before": lambda: (
        ask(vendors(HOUR, "fail"), fresh(), peers=[(TWIN, [vendors(2 * DAY, "fail", of=TWIN)])]),
        SUSPECT, U, {"vendor-selftest"},
    ),
    "the vendor's self-test failed once, and passed since": lambda: (
        ask(vendors(DAY, "fail"), vendors(HOUR, "pass"), fresh()), HEALTHY, Cause.NONE, set(),
    ),
    "comparator once": lambda: (ask(run(HOUR, comparator()), fresh()), SUSPECT, U, {"comparator-disagreement"}),
    "comparator twice": lambda: (
        ask(run(9 * DAY, comparator()), run(HOUR, comparator()), fresh()), SUSPECT, H, {"comparator-disagreement"},
    ),
    "comparator twice, and on another GPU since the same day": lambda: (
        ask(
            run(9 * DAY, comparator()), run(HOUR, comparator()), fresh(),
            peers=[(TWIN, [run(9 * DAY - HOUR, comparator(), of=TWIN)])],
        ),
        SUSPECT, U, {"comparator-disagreement"},
    ),
    "comparator twice, and on another GPU since two days later": lambda: (
        ask(
            run(9 * DAY, comparator()), run(HOUR, comparator()), fresh(),
            peers=[(TWIN, [run(7 * DAY, comparator(), of=TWIN)])],
        ),
        SUSPECT, H, {"comparator-disagreement"},
    ),
    "comparator twice within a minute": lambda: (
        ask(run(HOUR, comparator()), run(HOUR + 59, comparator()), fresh()), SUSPECT, U, {"comparator-disagreement"},
    ),
    "comparator twice, host in doubt": lambda: (
        ask(run(9 * DAY, comparator()), run(HOUR, comparator()), fresh(), peers=[(CPU, [run(HOUR, wrong(), of=CPU)])]),
        SUSPECT, U, {"comparator-disagreement"},
    ),
    # not characterised
    "uncharacterised": lambda: (
        ask(run(2 * HOUR, wrong(characterised=False)), run(HOUR, wrong(characterised=False)), fresh()),
        UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, on a processor": lambda: (
        ask(run(HOUR, wrong(characterised=False), of=CPU), fresh(CPU), of=CPU),
        UNKNOWN, N, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, one of two results wrong": lambda: (
        ask(run(HOUR, wrong(trials=2, characterised=False)), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "uncharacterised, wrong in two ways on the same bytes": lambda: (
        ask(
            run(HOUR, wrong(characterised=False), wrong(characterised=False, first=OTHER_FIRST, bits=("1",))), fresh()
        ),
        UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, contradicts itself on a processor": lambda: (
        ask(run(HOUR, wrong(trials=2, characterised=False), of=CPU), fresh(CPU), of=CPU),
        UNKNOWN, N, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, right and wrong in other classes": lambda: (
        ask(run(HOUR, wrong(characterised=False), wrong(case="other", trials=2, characterised=False)), fresh()),
        SUSPECT, U, {"exact-mismatch", "uncharacterised-mismatch"},
    ),
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
    "only readings": lambda: (
        ask(run(60, readings=(Reading(name="temperature", value=40.0),))), HEALTHY, Cause.NONE, set(),
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
    "30 days, and a run that is wanted every second day": lambda: (
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
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
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
    "hung in its last three runs, a sibling had one too": lambda: (
        hanging("111000", "1111101111"), UNKNOWN, U, {"not-completed", "stale-evidence"},
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
    "slower than before": lambda: (ask(fresh(), trends=[SLOWER]), State.DEGRADED, E, {"slower-than-before"}),
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


def said(kind, ago, until=NOW + DAY, rule="exact-mismatch"):
    rules = (rule,) * (kind == "acknowledged")
    return Ack(device="GPU-a", kind=kind, at=NOW - ago, until=until, reason="seen, ticket 4711", rules=rules)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name):
    """Each history gets the state, the cause and exactly the findings that the table says."""
    verdict, state, cause, spoken = SCENARIOS[name]()
    assert (verdict.state, verdict.cause, rules(verdict)) == (state, cause, spoken), verdict.findings


def failing():
    """Return whether any scenario fails."""
    for scenario in SCENARIOS.values():
        verdict, *expected = scenario()
        if [verdict.state, verdict.cause, rules(verdict)] != expected:
            return True
    return False


@pytest.mark.parametrize(
    ("module", "table", "part"),
    [(m, t, p) for m, t in ((judge_verdict, "RULES"), (case, "GROUNDS")) for p in getattr(m, t)],
    ids=lambda p: getattr(p, "__name__", p),
)
def test_no_rule_is_idle(monkeypatch, module, table, part):
    """Switching off any one rule, or any one ground of confirmation, makes a scenario fail."""
    monkeypatch.setattr(module, table, tuple(p for p in getattr(module, table) if p is not part))
    assert failing()


# --- Rivals ---------------------------------------------------------------------------------------------------------


def rivals(verdict):
    found = next(f for f in verdict.findings if f.rule.startswith("exact-mismatch"))
    return {(r.cause, r.why.partition(":")[0]): r.rejected for r in found.rivals}


def test_a_sibling_that_is_right_rejects_every_rival():
    """It shares kernel, golden and host with the accused, and is right."""
    sibling = (TWIN, [run(HOUR, right(), of=TWIN)])
    found = rivals(ask(run(HOUR, wrong()), fresh(), peers=[sibling]))
    assert found == {(S, "a wrong kernel"): True, (Cause.HARNESS, "a wrong reference"): True, (H, NEAR): True}


def test_a_sibling_that_computed_the_same_is_not_said_to_be_missing():
    """It is right where this device is wrong now and then: that tells too little, and is no lack of a sibling."""
    sibling = (TWIN, [run(HOUR, right(), of=TWIN)])
    found = ask(run(2 * HOUR, right()), run(HOUR, wrong()), fresh(), peers=[sibling])
    kernel = next(r for r in found.findings[0].rivals if r.cause is S)
    assert (found.cause, kernel.rejected) == (U, False)
    assert kernel.why == "a wrong kernel: the identical devices have not run long enough to tell: cuda:1"


HOST, NEAR = "the host's memory, CPU or PCIe", "the host's memory or CPU"


def test_nothing_is_rejected_without_evidence():
    """A lone device: kernel, golden and host are all still open."""
    found = rivals(ask(run(HOUR, wrong()), fresh()))
    assert found == {(S, "a wrong kernel"): False, (Cause.HARNESS, "a wrong reference"): False, (H, HOST): False}


def test_a_host_that_computes_right_is_rejected_as_a_rival():
    """Its CPU ran exact goldens within a day of the mismatch, and they were right; earlier ones do not count."""
    for ago, known in ((HOUR, True), (3 * DAY, False)):
        host = (CPU, [run(ago, right(), of=CPU)])
        found = rivals(ask(run(HOUR, wrong()), fresh(), peers=[host]))
        assert ((H, NEAR) in found) is known


def test_a_golden_that_was_met_before_is_rejected_as_a_rival():
    """The device itself has given the right bits for these operands."""
    verdict = ask(run(HOUR, wrong(trials=10, wrong_trials=1)), fresh())
    assert rivals(verdict)[Cause.HARNESS, "a wrong reference"] is True


def test_software_names_the_device_as_the_rejected_rival():
    """Siblings that give the same wrong bits clear the device of being the only one."""
    verdict = ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, wrong(), of=TWIN)])])
    assert verdict.cause is S
    assert rivals(verdict)[H, "a fault of this device alone"] is True


# --- What people read ------------------------------------------------------------------------------------------------


def finding(verdict, rule):
    return next(f for f in verdict.findings if f.rule == rule)


def message(verdict, rule):
    return finding(verdict, rule).message


def test_a_suspicion_names_what_where_how_many_and_what_next():
    """What was seen and what to do; case, seed, place, count and pattern, and when it clears, stand behind it."""
    seen = dataclasses.replace(evidence(), repeats=3, repeats_wrong=2)
    verdict = ask(run(60, wrong(seed=7, place=place("core 3"), evidence=seen), id="r1"))
    found = finding(verdict, "exact-mismatch")
    assert found.message == "exact_matmul computed 1 of 1 results wrong; 1 run failed"
    assert found.action == "Wait for 3 automatic retests"
    assert found.evidence == (
        "Cause unknown: no identical device here to compare with.",
        "Clears after 30 days with 3 clean uploads and 3 clean results.",
        "Proven exact (bfloat16/wide): it rounds nothing, so it is exact on devices of this kind.",
        (
            "Newest: bfloat16/wide (M=32, seed 7) on core 3: 12 of 4096 elements wrong: 12 elements, row 17; "
            "2 of 3 fresh uploads wrong."
        ),
    )
    assert (verdict.findings[0].runs, verdict.findings[0].repro) == (("r1",), "canaryd check --repeat r1")


def test_why_torch_sees_no_gpu_is_told():
    """In torch's words; a fabric that is not ready names what CUDA waits for, and no interpreter."""
    for why, code, action in (
        ("Error 802: system not yet initialized", "802", "Start Fabric Manager"),
        ("Torch not compiled with CUDA enabled", "", "Set worker.python"),
    ):
        told = {"unseen": why, "unseen_code": code}
        found = finding(ask(of=dataclasses.replace(UNREACHED, detail=told)), "unreached")
        assert found.message.endswith(f"nothing was computed on it; torch says: {why}")
        assert found.action.startswith(action)


def test_clean_confirmations_do_not_acquit():
    """After three clean confirmation runs the device is suspect still, and the finding says why."""
    verdict = ask(*confirmations(0, clean=3), fresh())
    assert verdict.state is SUSPECT
    found = finding(verdict, "exact-mismatch")
    assert "3 of 3 retests passed, which does not clear the device." in found.evidence
    assert found.action == (
        "To find the cause, repeat the test on another node (not here) with the same model and software"
    )
    assert found.repro == f"canaryd check --repeat {found.runs[-1]}"


def test_three_confirmations_outlast_any_number_of_clean_ones():
    """Clean runs after a confirmed mismatch do not outvote it."""
    assert ask(*confirmations(3, clean=5), fresh()).state is FAULTY


def test_confirmed_hardware_says_what_to_do():
    """A confirmed hardware fault leads to the dossier, but only where the identity names a part."""
    twin = [(TWIN, [run(HOUR, right(seed=1000), of=TWIN)])]
    runs = (*mismatches(2 * HOUR, HOUR), fresh())
    strong = finding(ask(*runs, peers=twin), "exact-mismatch-confirmed")
    assert strong.message.startswith(
        "Wrong results in exact_matmul, confirmed: 2 runs at least 60 seconds apart failed"
    )
    assert strong.action == "Take it out of service, then open a vendor case: canaryd report cuda:0 -o DIR"
    weak = dataclasses.replace(GPU, weak_identity=True)
    text = finding(ask(*runs, of=weak, peers=twin), "exact-mismatch-confirmed").action
    assert text.startswith(f"Take it out of service, then tell {PROVIDER}: canaryd report cuda:0")


def test_confirmed_software_says_no_rma():
    """Every device of the model wrong alike: faulty numbers, but no part to send back."""
    verdict = SCENARIOS["sibling wrong in the same bits"]()[0]
    assert "Do not send it back" in finding(verdict, "exact-mismatch-confirmed").action


def test_the_accused_host_is_named():
    """An accelerator that shares a bad hour with its host points at the host's CPU by name."""
    verdict = SCENARIOS["the host's CPU was wrong within 24 h"]()[0]
    found = finding(verdict, "host-in-doubt")
    assert "CPU: cpu:0 (Xeon)." in found.evidence
    assert found.cause is H


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"outcome": Outcome.CRASHED, "detail": "the worker was killed by SIGSEGV\nlast output:\nnoise"}, "by SIGSEGV"),
        (
            {"outcome": Outcome.ERRORED, "detail": "Traceback (…):\n  File …\nValueError: boom\n"},
            "error: ValueError: boom",
        ),
        ({"outcome": Outcome.SKIPPED, "detail": "torch is missing"}, "exact_matmul was skipped: torch is missing"),
        ({"outcome": Outcome.SKIPPED, "skipped": (Skipped(case="a", reason="no such kernel"),)}, "no such kernel"),
        (
            {"outcome": Outcome.UNKILLABLE, "instruction_set": "avx2"},
            "(avx2) left a process that survives",
        ),
    ],
)
def test_an_outcome_says_why(fields, text):
    """A run that did not complete is reported with the one line of its detail that says why."""
    verdict = ask(run(HOUR, right()), run(60, **fields))
    assert text in message(verdict, "not-completed")
    assert "noise" not in message(verdict, "not-completed")


@pytest.mark.parametrize(("ago", "text"), [(7201, "2 hours"), (5 * HOUR + 9, "5 hours"), (3 * DAY, "3 days")])
def test_stale_evidence_says_its_age(ago, text):
    """The age stands in the finding in whole units."""
    found = message(ask(run(ago, right())), "stale-evidence")
    assert found == f"The last result of exact_matmul is {text} old; its interval is 15 minutes"


def test_a_finding_lists_a_bounded_number_of_runs():
    """A device that fails for months does not drag every run id into each verdict."""
    found = ask(*mismatches(*(600.0 * i for i in range(1, 100)))).findings[0]
    assert len(found.runs) == findings.RUNS_NAMED


def test_worst_first():
    """Findings are sorted by state, then by probe."""
    verdict = ask(
        *mismatches(2 * HOUR, HOUR),
        run(60, outcome=Outcome.CRASHED),
        wanted={"zeta": 60, "exact_matmul": 60, "beta": 60},
    )
    assert [(f.state, f.probe) for f in verdict.findings] == [
        (FAULTY, "exact_matmul"), (SUSPECT, "exact_matmul"),
        (UNKNOWN, "beta"), (UNKNOWN, "exact_matmul"), (UNKNOWN, "zeta"),
    ]  # fmt: skip


def test_ties_name_the_costlier_cause():
    """Of two unknown findings, the environment names the verdict before the harness."""
    wanted = {"a": 900, "b": 900}
    runs = [run(60, probe="a", outcome=Outcome.GARBLED), run(60, probe="b", outcome=Outcome.OUT_OF_MEMORY)]
    completed = [run(HOUR, right(), probe=p) for p in wanted]
    assert ask(*runs, *completed, wanted=wanted).cause is E


# --- Since, exit codes, bounds ---------------------------------------------------------------------------------------


def test_since_stays_while_state_and_cause_stay():
    """`since` is inherited only from a verdict of the same state and cause."""
    first = ask(run(60, wrong()))
    assert (first.since, first.decided) == (NOW, NOW)
    again = ask(run(60, wrong()), previous=first, now=NOW + 10)
    assert (again.since, again.decided) == (NOW, NOW + 10)
    blamed = ask(run(60, wrong()), previous=again, now=NOW + 20, peers=[(TWIN, [run(60, right(), of=TWIN)])])
    assert blamed.since == NOW + 20


@pytest.mark.parametrize(
    ("states", "state", "code"),
    [
        ("", UNKNOWN, 3), ("healthy", HEALTHY, 0), ("healthy degraded", State.DEGRADED, 1),
        ("degraded unknown", UNKNOWN, 3),
        ("unknown suspect", SUSPECT, 2), ("faulty unknown", FAULTY, 2),
    ],
)  # fmt: skip
def test_the_worst_device_decides_the_exit_code(states, state, code):
    """No device at all is unknown; a known bad device weighs more than an unknown one."""
    made = [
        Verdict(device="d", state=State(s), cause=Cause.NONE, findings=(), decided=NOW, since=NOW)
        for s in states.split()
    ]
    assert worst(made) is state
    assert exit_code(worst(made)) == code


def test_fault_rate_bound():
    """So many clean trials bound the rate at 95 %; a mismatch, no trial, or the other world gives no bound."""
    runs = [
        run(60, right(trials=600), right(trials=400)), run(60, right(trials=2000), drill="x"),
        run(60, right(trials=5), wrong(characterised=False), probe="bad"), run(60, probe="none"),
        run(60, right(), probe="once"),
    ]  # fmt: skip
    bounds = fault_rate_bound(runs)
    assert set(bounds) == {"exact_matmul", "once"}
    assert bounds["exact_matmul"] == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert bounds["exact_matmul"] == pytest.approx(3 / 1000, rel=0.01), "the rule of three"
    assert bounds["once"] == pytest.approx(0.95)
    assert fault_rate_bound(runs, drill=True) == {"exact_matmul": pytest.approx(1 - math.exp(math.log(0.05) / 2000))}


# --- Properties ------------------------------------------------------------------------------------------------------

ages = st.integers(min_value=0, max_value=40).map(lambda h: h * HOUR) | st.integers(0, 200).map(float)
places = st.sampled_from(["device", "core 0", "core 1", "cores 0 and 1"])
kinds = st.sampled_from([right, wrong, host, comparator])
comparisons = st.builds(
    lambda kind, seed, where, characterised, first: kind(
        seed=seed, characterised=characterised, **({"where": where} if kind is host else {"place": place(where)}),
        **({} if kind is right else {"first": first}),
    ),
    kinds, st.integers(1, 3), places, st.booleans(), st.sampled_from([FIRST, OTHER_FIRST]),
)  # fmt: skip


def histories(of, **fixed):
    return st.lists(
        st.builds(
            lambda ago, facts, outcome, stack, confirms: run(
                ago, *facts, of=of, outcome=outcome, stack=stack, confirms=confirms, **fixed
            ),
            ages,
            st.lists(comparisons, max_size=3),
            st.sampled_from([Outcome.COMPLETED] * 5 + list(Outcome)),
            st.sampled_from([STACK, OTHER_STACK]),
            st.sampled_from(["", "", "the-mismatch"]),
        ),
        max_size=5,
    )


nodes = st.tuples(histories(TWIN), histories(CPU)).map(lambda r: [(TWIN, r[0]), (CPU, r[1])])
few = settings(max_examples=60)


@few
@given(histories(GPU), nodes, st.randoms())
def test_order_does_not_matter(runs, peers, random):
    """Shuffled or doubled runs, and peers in another order, give the same verdict."""
    shuffled = [*runs, *runs]
    random.shuffle(shuffled)
    turned = [(d, random.sample(r, len(r))) for d, r in reversed(peers)]
    assert ask(*runs, peers=peers) == ask(*shuffled, peers=turned)


@few
@given(histories(GPU), histories(CPU))
def test_a_clean_run_never_accuses_and_never_acquits(runs, host_runs):
    """One more clean run makes no device worse, and changes no suspicion within the watch (no sibling, no software)."""
    peers = [(CPU, host_runs)]
    before, after = ask(*runs, peers=peers), ask(*runs, fresh(), peers=peers)
    # What ends in an error of the device each time may be the software; what also ends well is an intermittent fault.
    now_and_then = sum(r.outcome is Outcome.DEVICE_ERROR for r in runs) >= REPEATS
    assert after.state.severity <= before.state.severity or now_and_then
    if before.state in (SUSPECT, FAULTY):
        assert (after.state, after.cause) == (before.state, before.cause)


@few
@given(histories(GPU), nodes)
def test_a_mismatch_within_the_watch_is_never_healthy(runs, peers):
    """However clean everything else is, a wrong result on record forbids `healthy`, unless a new stack cured it."""
    verdict = ask(*runs, run(5 * HOUR, wrong(characterised=False), stack={}), fresh(), peers=peers)
    assert verdict.state is not HEALTHY
    assert ask(*runs, run(5 * HOUR, wrong(), stack={}), fresh(), peers=peers).state in (SUSPECT, FAULTY)


@few
@given(histories(GPU), nodes, histories(GPU, drill="stuck bit"), histories(TWIN, drill="stuck bit"))
def test_drills_never_reach_the_real_verdict(runs, peers, drills, twin_drills):
    """Drill runs, the device's own or its siblings', change nothing outside the drill, and the other way round."""
    mixed = [(d, [*r, *twin_drills] if d is TWIN else r) for d, r in peers]
    assert ask(*runs, *drills, peers=mixed) == ask(*runs, peers=peers)
    only = [(TWIN, twin_drills), (CPU, [])]
    assert ask(*runs, *drills, peers=mixed, drill=True) == ask(*drills, peers=only, drill=True)


@few
@given(nodes)
def test_no_runs_is_unknown(peers):
    """Whatever the neighbours did, a device without a run of its own is not healthy and not accused."""
    assert ask(peers=peers).state is UNKNOWN


@few
@given(histories(GPU), nodes)
def test_an_accelerator_beside_an_erring_host_is_never_faulty(runs, peers):
    """As long as the CPU was wrong within a day of every mismatch, the accelerator is suspect at most."""
    erring = [(d, [*r, *(run(h * 10 * HOUR, wrong(), of=CPU) for h in range(6))] if d is CPU else r) for d, r in peers]
    assert ask(*runs, peers=erring).state is not FAULTY


@few
@given(histories(CPU), histories(GPU))
def test_every_finding_can_be_acted_on(runs, gpu_runs):
    """Findings are sorted, name a rule and a sentence, and the worst one gives the state."""
    verdict = ask(*runs, of=CPU, peers=[(GPU, gpu_runs)])
    severities = [f.state.severity for f in verdict.findings]
    assert severities == sorted(severities, reverse=True)
    assert verdict.state.severity == max(severities, default=0)
    assert all(f.rule and f.message for f in verdict.findings)


def test_a_vanished_device_is_unknown_whatever_it_was():
    """What was healthy a minute ago and is gone now is unknown; a device that is there is not touched by the rule."""
    assert ask(fresh()).state is State.HEALTHY
    gone = ask(fresh(), gone_since=NOW - 2 * HOUR)
    assert (gone.state, gone.cause) == (State.UNKNOWN, Cause.UNDETERMINED)
    assert message(gone, "device-vanished").endswith("is gone; it was last found 2 hours ago")


def test_a_run_limited_to_some_cases_is_no_evidence_for_the_whole_probe():
    """A clean look at one case does not stand for the probe, nor does its mismatch go unseen."""
    part = dataclasses.replace(fresh(), cases=("float32/dense",))
    assert ask(part).state is State.UNKNOWN
    wrong = dataclasses.replace(mismatches(HOUR)[0], cases=("float32/dense",))
    assert ask(fresh(), wrong).state is State.SUSPECT


def test_a_clock_that_was_not_set_does_not_clear_a_mismatch():
    """A mismatch dated 1970 counts as of now: otherwise it would be cleared by its age at once."""
    unset = dataclasses.replace(mismatches(HOUR)[0], started=12.0)
    assert ask(fresh(), unset).state is State.SUSPECT


def test_a_wrong_reference_is_never_confirmed():
    """A damaged digest file contradicts one core in the same words every time: no core is faulty for it."""
    cpu = dataclasses.replace(GPU, uuid="CPU-1", backend="cpu", index=0)
    odd = {"subject": Subject.HOST, "place": place("core 0"), "doubt": Doubt.DIGEST, "trials": 1}
    first = run(2 * HOUR, wrong(seed=1, **odd), of=cpu, id="first")
    again = [run(2 * HOUR - 1 - i, wrong(seed=1, **odd), of=cpu, confirms="first") for i in range(3)]
    verdict = ask(first, *again, fresh(of=cpu), of=cpu)
    assert verdict.state in (State.SUSPECT, State.UNKNOWN)
    assert "exact-mismatch-confirmed" not in rules(verdict)


# --- One part through several runtimes --------------------------------------------------------------------------------

THROUGH_ONNX = device("ONNX-CPU-a", "onnx-cpu", model="Xeon", card=CPU.uuid, torch_index=None)


def test_the_same_part_through_another_runtime_acquits_neither_and_says_where_to_look():
    """A processor that is right through torch and wrong through ONNX Runtime: the cause is open, the place is named."""
    wrongs = [run(n * MINUTE, wrong(seed=n), of=THROUGH_ONNX) for n in (1, 2, 3)]
    found = ask(*wrongs, of=THROUGH_ONNX, peers=[(CPU, [fresh(of=CPU)])])
    assert (found.state, found.cause) == (State.FAULTY, Cause.UNDETERMINED)
    lead = found.findings[0]
    assert any("computes correctly through cpu:0" in text for text in lead.evidence)
    assert not any("its CPU passed" in rival.why for finding in found.findings for rival in finding.rivals)
    assert ask(fresh(of=CPU), of=CPU, peers=[(THROUGH_ONNX, wrongs)]).state is State.HEALTHY


def test_another_runtime_that_is_wrong_too_is_no_witness():
    """Then the sentence about the other runtime is not said."""
    wrongs = [run(n * MINUTE, wrong(seed=n), of=THROUGH_ONNX) for n in (1, 2, 3)]
    also = [run(MINUTE, wrong(seed=7), of=CPU)]
    found = ask(*wrongs, of=THROUGH_ONNX, peers=[(CPU, also)])
    assert found.state in (State.SUSPECT, State.FAULTY)
    assert not any("computes correctly through" in text for f in found.findings for text in f.evidence)
