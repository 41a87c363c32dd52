"""Scenarios of wrong results."""

import dataclasses

from canaryd.facts import Span
from canaryd.model import Cause, Outcome
from tests.judge.made import (
    CPU,
    DAY,
    FAULTY,
    GPU,
    HEALTHY,
    HOUR,
    MINUTE,
    NOW,
    OTHER_FIRST,
    OTHER_STACK,
    SUSPECT,
    THIRD,
    TWIN,
    UNKNOWN,
    UNREACHED,
    E,
    H,
    N,
    S,
    U,
    ask,
    comparator,
    confirmations,
    device,
    fresh,
    host,
    mismatches,
    right,
    run,
    signs,
    turned,
    vendors,
    wrong,
)
from tests.places import line, place

UNDRIVEN = device("PCI-1", torch_index=None, detail={"bus_id": "0000:65:00.0", "undriven": "no driver is loaded"})


def spots(*pairs):
    """Return two wrong uploads in runs too close together to count as independent; each pair is (place, fields)."""
    return [run(HOUR + i, wrong(seed=i, place=place(where), **fields)) for i, (where, fields) in enumerate(pairs)]


def beside(failing, *siblings):
    """Judge a device with so many failing runs of 50, beside siblings with theirs; no two share seeds or bits."""

    def record(of, count, first):
        ages = [HOUR * (1 + n) for n in range(50)]
        facts = [wrong(seed=first + n, trials=100) if n < count else right(first + n, 100) for n in range(50)]
        return [run(age, fact, of=of) for age, fact in zip(ages, facts, strict=True)]

    peers = [(of, record(of, count, 1000 * (2 + n))) for n, (of, count) in enumerate(siblings)]
    return ask(*record(GPU, failing, 1000), fresh(), peers=peers)


MISMATCHES = {
    # name: (verdict, state, cause, rules that speak)
    "clean": lambda: (ask(fresh()), HEALTHY, Cause.NONE, set()),
    "torch does not reach it": lambda: (ask(of=UNREACHED), UNKNOWN, E, {"unreached"}),
    "nothing drives it": lambda: (ask(of=UNDRIVEN), UNKNOWN, E, {"unreached"}),
    "divided, its instances are tested": lambda: (
        ask(of=UNREACHED, wanted={}, divided=True), HEALTHY, Cause.NONE, set(),
    ),
    "once divided, as a remembered instance shows": lambda: (
        ask(of=UNREACHED, peers=[(device("MIG-1", parent="GPU-u"), [])]), UNKNOWN, E, {"unreached"},
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
    "one golden had two results long ago, and now the shipped digests differ": lambda: (
        ask(
            run(40 * DAY, host(seed=8), of=CPU),
            *(run(MINUTE * n, right(seed=n), host("core 3", seed=9), of=CPU) for n in (30, 20, 10)), of=CPU,
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
}  # fmt: skip
"""Scenarios of wrong results: grounds, causes, the host, goldens in doubt, the comparator, classes never met."""
