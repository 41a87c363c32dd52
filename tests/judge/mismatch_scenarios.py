"""Scenarios of wrong results."""

from canaryd.model import Cause, Outcome
from tests.judge.made import (
    CPU,
    DAY,
    FAULTY,
    GPU,
    HEALTHY,
    HOUR,
    NOW,
    OTHER_FIRST,
    OTHER_STACK,
    SUSPECT,
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
    mismatches,
    right,
    run,
    signs,
    wrong,
)
from tests.places import lane, line, place

UNDRIVEN = device("PCI-1", torch_index=None, detail={"bus_id": "0000:65:00.0", "undriven": "no driver is loaded"})


def cured(*of_twin):
    """Judge a device that was wrong on two data in a class that nobody met, and is right on other software."""
    of_gpu = [run(3 * HOUR - n, wrong(seed=n, characterised=False)) for n in (1, 2)]
    return ask(*of_gpu, fresh(stack=OTHER_STACK), run(9, right(trials=9), stack=OTHER_STACK), peers=[(TWIN, of_twin)])


def spots(*pairs):
    """Return two wrong uploads in runs too close together to count as independent; each pair is (place, fields)."""
    return [run(HOUR + i, wrong(seed=i, place=place(where), **fields)) for i, (where, fields) in enumerate(pairs)]


MISMATCHES = {
    # name: (verdict, state, cause, rules that speak)
    "torch does not reach it": lambda: (ask(of=UNREACHED), UNKNOWN, E, {"unreached"}),
    "nothing drives it": lambda: (ask(of=UNDRIVEN), UNKNOWN, E, {"unreached"}),
    "divided, its instances are tested": lambda: (
        ask(of=UNREACHED, wanted={}, divided=True), HEALTHY, Cause.NONE, set(),
    ),
    "7 of 8": lambda: (ask(fresh(of=CPU), of=CPU, accelerators=(7, 8)), UNKNOWN, U, {"devices-missing"}),
    "a vendor that could not be asked": lambda: (
        ask(fresh(of=CPU), of=CPU, unlisted={"nvidia": "version mismatch"}), UNKNOWN, E, {"devices-unlisted"},
    ),
    "8 of 8": lambda: (ask(fresh(of=CPU), of=CPU, accelerators=(8, 8)), HEALTHY, Cause.NONE, set()),
    "gone, and condemned by itself before": lambda: (
        ask(fresh(), signs=signs(remap_failed=1), gone_since=NOW - HOUR),
        FAULTY, H, {"device-vanished", "memory-failed"},
    ),
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
    "confirmations that crashed confirm nothing": lambda: (
        ask(*confirmations(3, outcome=Outcome.CRASHED), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "two wrong runs 59 s apart": lambda: (ask(*mismatches(1059, 1000), fresh()), SUSPECT, U, {"exact-mismatch"}),
    "two wrong runs 60 s apart": lambda: (
        ask(*mismatches(1060, 1000), fresh()), FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "two wrong uploads on two cores": lambda: (
        ask(*spots(("core 3", {}), ("core 4", {})), fresh()), SUSPECT, U, {"exact-mismatch"},
    ),
    "the same bit of another row": lambda: (
        ask(*spots(("device", {"bits": ("5",)}), ("device", {"bits": ("5",), "lines": {"row": line(3)}})), fresh()),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "the same bit of one lane in other columns": lambda: (
        ask(*spots(*(("device", {"bits": ("5",), "lines": {"column": lane(n)}}) for n in (5, 21))), fresh()),
        FAULTY, U, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    # cause
    "sibling right on the same bytes under another stack": lambda: (
        ask(run(HOUR, wrong()), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN, stack=OTHER_STACK)])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "unrecorded stacks are not equal": lambda: (
        ask(run(HOUR, wrong(), stack={}), fresh(), peers=[(TWIN, [run(HOUR, right(), of=TWIN, stack={})])]),
        SUSPECT, U, {"exact-mismatch"},
    ),
    "sibling wrong in the same bits": lambda: (
        ask(*mismatches(2 * HOUR, HOUR), fresh(), peers=[(TWIN, [run(HOUR, wrong(seed=1000), of=TWIN)])]),
        FAULTY, S, {"exact-mismatch", "exact-mismatch-confirmed"},
    ),
    "software's mismatch does not confirm the device's own": lambda: (
        ask(
            *mismatches(2 * HOUR), run(HOUR, wrong(), probe="exact_attention"), fresh(),
            peers=[(TWIN, [run(60, wrong(1000), of=TWIN), run(60, right(), of=TWIN, probe="exact_attention")])],
        ),
        SUSPECT, H, {"exact-mismatch"},
    ),
    # the host
    "the host's CPU was wrong within 24 h": lambda: (
        ask(*mismatches(2 * HOUR, HOUR), fresh(), peers=[(CPU, [run(HOUR + DAY, wrong(seed=4), of=CPU)])]),
        SUSPECT, U, {"exact-mismatch", "host-in-doubt"},
    ),
    "two accelerators wrong alike do not accuse the host": lambda: (
        ask(
            run(HOUR, wrong(), of=CPU), of=CPU,
            peers=[(GPU, [run(HOUR, wrong(seed=2))]), (TWIN, [run(HOUR, wrong(seed=2), of=TWIN)])],
        ),
        SUSPECT, U, {"exact-mismatch"},
    ),
    # comparator
    "comparator twice within a minute": lambda: (
        ask(run(HOUR, comparator()), run(HOUR + 59, comparator()), fresh()), SUSPECT, U, {"comparator-disagreement"},
    ),
    # not characterised
    "uncharacterised": lambda: (
        ask(run(2 * HOUR, wrong(characterised=False)), run(HOUR, wrong(characterised=False)), fresh()),
        UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, a bug that other software cures, of which memory has not all that a sibling gave": lambda: (
        cured(run(3 * HOUR, wrong(characterised=False), of=TWIN)),
        HEALTHY, Cause.NONE, set(),
    ),
    "uncharacterised, as before, but a sibling gave other bits": lambda: (
        cured(
            run(3 * HOUR, wrong(characterised=False), of=TWIN),
            run(3 * HOUR, wrong(seed=2, first=OTHER_FIRST, characterised=False), of=TWIN),
        ),
        UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, as before, but a sibling was right": lambda: (
        cured(run(3 * HOUR, wrong(characterised=False), right(seed=2), of=TWIN)),
        UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, and no sibling gave the same bits": lambda: (
        cured(run(3 * HOUR, right(seed=3), of=TWIN)), UNKNOWN, U, {"uncharacterised-mismatch"},
    ),
    "uncharacterised, on a processor": lambda: (
        ask(run(HOUR, wrong(characterised=False), of=CPU), fresh(CPU), of=CPU),
        UNKNOWN, N, {"uncharacterised-mismatch"},
    ),
}  # fmt: skip
"""Scenarios of wrong results: grounds, causes, the host, goldens in doubt, the comparator, classes never met."""
