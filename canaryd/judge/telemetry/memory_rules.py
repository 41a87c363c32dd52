"""Rules for the memory of an accelerator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.laws import ALONE, Company, Moment, Trouble, Who, closest, company, meet, recurrence
from canaryd.judge.telemetry.events import within
from canaryd.judge.telemetry.signals import (
    DAY,
    DRAIN_AND_RESET,
    ECC,
    HELD,
    HIT,
    Signs,
    drain_and_reset,
    escalated,
    in_company,
    recovery,
    source_of,
    spans,
)
from canaryd.model import Cause, Event, EventKind, Finding, State

LEAST_STEP, TIMES_MEAN = 100, 10
"""Corrected errors in a day that are a step, when they are also so many times the mean day before (ours)."""
MOST_RETIRED, MANY_DOUBLE_BIT = 63, 15
"""Retired pages: DCGM's limit, and its softer limit for those with double-bit errors (DcgmGPUHardwareLimits.h)."""
MOST_REMAPPED = 512
"""Rows remapped for uncorrectable errors: NVIDIA's RMA policy, and DCGM's limit."""


class Flag(NamedTuple):
    """A reading above 0 by which the device itself asks for a reset or a return."""

    reading: str
    labels: Mapping[str, str]
    age: float
    """Age in seconds up to which a poll still shows it; 0 stands for `telemetry.settle`."""
    state: State
    message: str
    action: str
    grade: str


RETURN = "Run the vendor's field diagnostic, which decides on a return."
RMA_POLICY = "Recommended: RMA (NVIDIA's RMA policy: the field diagnostic decides on the return)."
# Some flags never fall on the same part: those hold for `HELD`, so that a driver that hangs later does not lift the
# finding.
FLAGS: Mapping[str, Flag] = {
    "row-remap-failed": Flag(
        *("row_remap_failed", {}, HELD, State.FAULTY),
        "A memory row could not be replaced by a spare one.",
        *(RETURN, RMA_POLICY),
    ),
    "sram-threshold": Flag(
        *("ecc_sram_threshold_exceeded", {}, HELD, State.FAULTY),
        "The device counts more uncorrectable SRAM errors than its threshold allows.",
        *(RETURN, RMA_POLICY),
    ),
    "row-remap-pending": Flag(
        *("row_remap_pending", {}, 0.0, State.DEGRADED),
        "A bad memory row will be replaced at the next reset.",
        *(DRAIN_AND_RESET, "Recommended: reset (NVIDIA's memory error management)."),
    ),
    "retired-pages-pending": Flag(
        *("retired_pages_pending", {}, 0.0, State.DEGRADED),
        "A bad memory page will be retired at the next reset.",
        *(DRAIN_AND_RESET, "Recommended: reset (NVIDIA's page retirement)."),
    ),
    "memory-bad-pages": Flag(
        *("memory_bad_pages", {"status": "pending"}, 0.0, State.DEGRADED),
        "Bad memory pages wait to be taken out of use.",
        *("Drain the device and reload its driver.", "Recommended: reset (AMD)."),
    ),
}
"""Rule → the flag that it reads."""


def flags(signs: Signs) -> Iterator[Finding]:
    """The device itself reports that its memory needs a reset or a return."""
    for rule, flag in FLAGS.items():
        if signs.value(flag.reading, flag.age or signs.policy.settle, **flag.labels):
            clears = "Clears when the device no longer reports it."
            yield finding(rule, flag.state, Cause.HARDWARE, flag.message, flag.action, flag.grade, clears)


def row_remap_exhausted(signs: Signs) -> Iterator[Finding]:
    """Spare rows run out: in a bank, or in all."""
    rows = signs.value("row_remap_rows", HELD, cause="uncorrectable") or 0
    banks = signs.value("row_remap_banks", HELD, available="none") or 0
    if rows >= MOST_REMAPPED:
        yield finding(
            *("row-remap-exhausted", State.FAULTY, Cause.HARDWARE),
            f"{rows:g} memory rows were replaced after uncorrectable errors (limit {MOST_REMAPPED}).",
            RETURN,
            "Recommended: RMA (NVIDIA's RMA policy and DCGM's limit: the field diagnostic decides on the return).",
        )
    elif banks:
        yield finding(
            *("row-remap-exhausted", State.DEGRADED, Cause.HARDWARE),
            f"{banks:g} memory {'bank has' if banks == 1 else 'banks have'} no spare row left.",
            "Plan to return the device.",
            "A bad row there cannot be replaced (canaryd's own rule).",
        )


def retired_pages(signs: Signs) -> Iterator[Finding]:
    """Pages of memory were taken out of use, on devices that cannot replace rows."""
    pages = {r.labels.get("cause", ""): float(r.value) for r in signs.readings("retired_pages", HELD)}
    if sum(pages.values()) >= MOST_RETIRED:
        yield finding(
            *("retired-pages", State.FAULTY, Cause.HARDWARE),
            f"{sum(pages.values()):g} memory pages are retired (limit {MOST_RETIRED}).",
            RETURN,
            "Recommended: RMA (DCGM's limit).",
        )
    elif pages.get("double_bit", 0) >= MANY_DOUBLE_BIT:
        yield finding(
            *("retired-pages", State.DEGRADED, Cause.HARDWARE),
            f"{pages['double_bit']:g} memory pages are retired after double-bit errors (limit {MANY_DOUBLE_BIT}).",
            "Return the device if more than one page a week follows.",
            "Limit: DCGM's softer one.",
        )


def _logged(signs: Signs) -> list[Event]:
    """Return the lines by which the driver says that the device lost data."""
    ras = [e for kind in ("amdgpu", "intel") for e in signs.named(kind, "ras-uncorrected")]
    return [*ras, *signs.memory_lost]


def _unexplained(signs: Signs, by: int | None) -> list[Event]:
    return [e for e in _logged(signs) if by not in HIT.get(e.code or 0, ())]


def _occasions(signs: Signs) -> Iterator[tuple[float, Event, Company]]:
    """Yield when the device lost data, what shows it, and who else did.

    What the device itself counted is its own, unless others counted it between the same polls too: a dip of the power
    strikes all. A line with a mark beside it is as that is; another one is not, where others have one that it does not
    explain.
    """
    marked = signs.trouble(lambda other: other.marks)
    lines = [(at, e) for e in _logged(signs) for at in spans([e])]
    codes = {e.code for _, e in lines}
    told = {c: replace(signs.trouble(partial(_unexplained, by=c)), own=[at for at, _ in lines]) for c in codes}
    known = [at.last for at, _ in lines] + [e.last for e in signs.counted_losses if e.reading == ECC[0]]
    for e in signs.counted_losses:
        # A lifetime count shows the same errors at a less certain time: across a reset it may have risen before that.
        is_volatile = e.reading == ECC[0]
        if is_volatile or not any(e.first <= at <= e.last for at in known):
            yield e.last if is_volatile else e.first, e, closest(_of_mark(marked, at) for at in spans([e]))
    for at, e in lines:
        beside = [_of_mark(marked, mark) for mark in marked.own if meet(at, mark)]
        yield at.last, e, closest(beside or [company(told[e.code], at)])


def _of_mark(marked: Trouble, at: Moment) -> Company:
    found = company(marked, at)
    return found if found.who is Who.TOGETHER else ALONE


def uncorrected_error(signs: Signs) -> Iterator[Finding]:
    """The device reported that it lost data: suspect until a reset and an exact pass after it."""
    rises, logged = signs.counted_losses, _logged(signs)
    wiped = signs.seen(EventKind.RESET, HELD, ECC[0], kind="uncorrected")
    life = signs.life if rises or logged else signs
    occasions = [*_occasions(life)]
    again = recurrence(((at, found) for at, _, found in occasions), life.resets, signs.now - HELD)
    if again.is_faulty:
        yield finding(
            *("uncorrected-error", State.FAULTY, again.company.cause),
            f"Uncorrected memory errors came back after {again.back} resets or reboots.",
            RETURN,
            "Clean tests in between do not clear it.",
            in_company(again.company),
            escalated(again.company.cause),
            f"Clears after {format_duration(HELD)} without another.",
        )
        return
    volatile = [r for r in signs.readings(ECC[0]) if r.labels.get("kind") == "uncorrected"]
    # One that was read before and is not now still stands, until a reset and an exact pass came after it.
    standing = [
        r
        for r, age, limit in signs.by_name.get(ECC[0], ())
        if r.labels.get("kind") == "uncorrected" and r.value and age <= HELD
        if age <= limit or not signs.cleared(signs.now - age, signs.resets)
    ]
    # While nothing was lost since the last reset, the lifetime count rose before it, though no poll came in between.
    early = ECC[1:] if volatile and not standing else ()
    came = [(e.first if e.reading in early else e.last, e) for e in (*rises, *logged)]
    held = [(at, e) for at, e in came if not signs.cleared(at, signs.resets)]
    events = [*(e for _, e in held), *(e for e in wiped if not signs.passed(e.last))]
    if not events and not standing:
        return
    places = [e.labels.get("location") or e.fields.get("block") for e in events]
    places += [r.labels.get("location") for r in standing]
    where = ", ".join(sorted({place or "the device's memory" for place in places}))
    when = max((e.last for e in events), default=None)
    before_reset = max((at for at, _ in held), default=0.0 if events else None)
    whose = [found for _, e, found in occasions if e in events]
    if standing or any(e in wiped for e in events):  # as the rises that made the count; at first sight it is its own
        whose += [found for _, e, found in occasions if e in rises] or [ALONE]
    found = closest(whose or [ALONE])
    action, clears = recovery(signs, before_reset, signs.resets, drain_and_reset(signs, found))
    error = "Uncorrected error" if any(e.kind == "intel" for e in events) else "Uncorrected memory error"
    spot = f"on {1 + len(found.names)} devices at once" if found.names else f"in {where}"
    yield finding(
        *("uncorrected-error", State.SUSPECT, found.cause),
        f"{error} {spot}.",
        action,
        in_company(found),
        "Counted since the driver was loaded." if when is None else f"Last at {signs.moment(when)}.",
        *(source_of(e) for e in events if e in logged),
        signs.advised("reset", "NVIDIA's memory error management"),
        clears,
    )


def corrected_errors_rising(signs: Signs) -> Iterator[Finding]:
    """Corrected errors come at a rate, or in a step: results are still right, but the reserve shrinks."""
    day, before, most = 0.0, 0.0, signs.policy.corrected_per_day
    rises = [e for name in ECC for e in signs.rises(name, kind="corrected")]
    first = min((e.first for e in rises), default=signs.now)
    days = max(1.0, (signs.now - first) / DAY - 1)
    for place in {e.labels.get("location", "") for e in rises}:
        # Volatile and aggregate count the same errors: the larger of the two, never their sum.
        both = [[e for e in rises if e.reading == name and e.labels.get("location", "") == place] for name in ECC]
        day += max(signs.most(each, DAY) for each in both)
        before += max(sum(within(e, -math.inf, signs.now - DAY) for e in each) for each in both)
    step = day >= LEAST_STEP and day >= TIMES_MEAN * before / days
    if day >= most or step:
        yield finding(
            *("corrected-errors-rising", State.DEGRADED, Cause.HARDWARE),
            f"{day:.0f} corrected memory errors in a day; normal here is {before / days:.3g} a day.",
            f"Run an exact test: canaryd check --device {signs.device.name}",
            f"Limit: {most} a day (telemetry.corrected_per_day), or {LEAST_STEP} and {TIMES_MEAN} times normal.",
            "These limits are canaryd's own.",
            "NVIDIA's RMA policy does not cover corrected errors." if signs.is_of_nvidia else "",
            "An exact test shows whether results are right.",
            f"Clears after {format_duration(DAY + signs.policy.settle)} below the limit.",
        )
