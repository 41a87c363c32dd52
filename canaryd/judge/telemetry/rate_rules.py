"""Rules for what is counted over a time and has a limit: corrected errors, throttling, link errors, conditions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from canaryd.formatting import format_duration
from canaryd.judge.findings import finding
from canaryd.judge.telemetry.events import HARMFUL, within
from canaryd.judge.telemetry.signals import DAY, ECC, HELD, MINUTE, Signs, sentence
from canaryd.model import Cause, Event, EventKind, Finding, State

LASTING, STRETCH = MINUTE, 10 * MINUTE
"""Seconds for which a passing condition must have held, and within how many (ours): at least two polls, so neither one
odd reading nor scattered blips count."""
CPU_THROTTLES = 10
"""Times in `telemetry.settle` that processors slow down for heat (ours): fewer is a fan that catches up."""
MACHINE_CHECKS = 10
"""Corrected machine checks in a day: mcelog's default for a memory module, used for all (ours)."""
LEAST_STEP, TIMES_MEAN = 100, 10
"""Corrected errors in a day that are a step, when they are also so many times the mean day before (ours)."""
BIT_ERROR_RATE = 1e-12
"""Errors per bit that PCI Express allows; DCGM derives its limit of replays from it."""
TRANSFERS = {1: 2.5e9, 2: 5e9, 3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9, 7: 128e9}
"""PCI Express generation → transfers per second and lane (PCI Express Base Specifications 1.0 to 7.0)."""
BURST = 10 * MINUTE
"""Seconds over which replays are counted, where DCGM takes a minute: a single burst is no rate (ours)."""
CRC_PER_SECOND = 100
"""NVLink CRC errors: DCGM's limit (DcgmGPUHardwareLimits.h)."""
RECOVERED, UNRECOVERED = ("replay", "recovery"), ("recovery_failed",)
"""Kinds of NVLink errors of which DCGM allows none, and of which one shows a broken link."""
LINK = "NVLink link {link}: {count:.3g} {kind} errors in {window} (limit {limit:g})."


class Rate(NamedTuple):
    """Events of one kind that are degraded where they reach a limit. Each place (their labels) is counted by itself."""

    rule: str
    cause: Cause
    events: Callable[[Signs], Iterable[Event]]
    seconds: float
    """Time in which they are counted; 0 stands for `telemetry.settle`."""
    limit: Callable[[Signs], float]
    message: str
    """With {count}, {limit}, {lasted}, {most} (both in words), {window}, {detail} and the names of labels."""
    action: str
    source: str
    """Whose limit it is."""
    links: bool = False
    """Whether errors do not count while the device's links train."""


def replay_limit(generation: float, lanes: float) -> float:
    """Return the replays per minute that a bit error rate of 1e-12 explains; 31 for generation 5 with 16 lanes."""
    return math.ceil(BIT_ERROR_RATE * TRANSFERS.get(int(generation), TRANSFERS[5]) * lanes * MINUTE)


def _replays(signs: Signs) -> float:
    lanes, generation = (signs.value(f"pcie_{k}_max", HELD) or d for k, d in (("width", 16), ("generation", 5)))
    return math.nextafter(replay_limit(generation, lanes) * BURST / MINUTE, math.inf)


def _slowed(signs: Signs) -> Iterable[Event]:
    found = [*signs.rises("throttle_seconds_total"), *signs.seen(EventKind.CONDITION, math.inf, "throttle_active")]
    return (e for e in found if e.labels.get("reason") in HARMFUL)


def _heat(signs: Signs) -> Iterable[Event]:
    """Return what counts that processors slow down; the log has a line for each, so only where nothing counts."""
    lines = [] if signs.readings("throttle_events_total", HELD) else signs.seen("thermal")
    return [*signs.rises("throttle_events_total"), *lines]


def _checks(signs: Signs) -> Iterable[Event]:
    """Return corrected machine checks. "logged" has no severity; what could not be corrected is an exception."""
    return (e for e in signs.seen("mce") if e.name not in ("uncorrected", "memory"))


def _rises(name: str, **labels: str) -> Callable[[Signs], Iterable[Event]]:
    return lambda signs: signs.rises(name, **labels)


def _held(rule: str, name: str, action: str, source: str) -> Rate:
    """Return the row of a condition that comes and goes."""
    return Rate(
        *(rule, Cause.ENVIRONMENT, lambda signs: signs.named(EventKind.CONDITION, name)),
        STRETCH,
        lambda _: LASTING,
        *("{detail}", action, f"{source} It held for {{lasted}} of {{window}}."),
    )


def _replayed(what: str, name: str, **labels: str) -> Rate:
    """Return the row of what a PCIe link corrects."""
    return Rate(
        *("link-errors", Cause.HARDWARE, _rises(name, **labels), BURST, _replays),
        f"{{count:.3g}} {what} in {{window}} (limit {{limit:g}}).",
        *("Check seating, riser and slot.", "Limit: DCGM's for this link (bit error rate 1e-12)."),
        links=True,
    )


def _nvlink(kinds: Collection[str], seconds: float, limit: float, message: str, source: str) -> Rate:
    """Return the row of errors of some kinds of a device-to-device link; without `kinds` of all that no row names."""

    def errors(signs: Signs) -> Iterable[Event]:
        rises = signs.rises("nvlink_errors_total")
        named = kinds or (*RECOVERED, *UNRECOVERED)
        return (e for e in rises if (e.labels.get("kind", "") in named) is bool(kinds))

    limits = *("link-errors", Cause.HARDWARE, errors, seconds), lambda _: limit
    return Rate(*limits, message, "Check both ends of the link.", source, links=True)


RATES = (
    Rate(
        *("corrected-errors-rising", Cause.HARDWARE, _rises("edac_errors_total", kind="corrected")),
        *(DAY, lambda signs: signs.policy.dimm_corrected_per_day),
        "Memory module {dimm} (controller {controller}): {count:.3g} corrected errors in a day (limit {limit:g}).",
        "Plan to replace the memory module.",
        "Limit: telemetry.dimm_corrected_per_day; the default is mcelog's.",
    ),
    Rate(
        *("corrected-errors-rising", Cause.HARDWARE, _checks, DAY, lambda _: MACHINE_CHECKS),
        "{count:.3g} corrected machine checks in a day (limit {limit:g}).",
        "Decode the errors to find the part.",
        "Limit: mcelog's default for memory modules, which canaryd uses for all machine checks.",
    ),
    Rate(
        *("throttled", Cause.ENVIRONMENT, _slowed, 0, lambda signs: signs.policy.throttle),
        "Slowed down by {why} ({reason}) for {lasted} in {window} (limit {most}).",
        *("Check cooling and power.", "Limit: telemetry.throttle (canaryd's own)."),
    ),
    Rate(
        *("throttled", Cause.ENVIRONMENT, _heat, 0, lambda _: CPU_THROTTLES),
        "Processors slowed down for heat {count:.3g} times in {window} (limit {limit:g}).",
        *("Check cooling.", "The limit is canaryd's own."),
    ),
    _held("throttled", "hot", "Check cooling.", "The limit is the device's own: it slows down there."),
    _held(
        *("pcie-slow", "pcie-width", "Reseat the device; if it stays, check riser, slot and board."),
        "The link lost lanes (canaryd's own rule).",
    ),
    _held(
        *("pcie-slow", "pcie-generation", "Check seating, riser and BIOS."),
        "Under load the link is slower than both ends support (canaryd's own rule).",
    ),
    _held(
        *("memory-pressure", "memory-pressure", "Free memory on the host."),
        "The host runs out of memory (canaryd's own rule): probes time out, and the kernel will kill processes.",
    ),
    _replayed("PCIe replays", "pcie_replays_total"),
    _replayed("correctable PCIe errors", "pcie_aer_errors_total", severity="correctable"),
    _nvlink(
        UNRECOVERED,
        0,
        math.ulp(0),
        "NVLink link {link} could not recover.",
        "That none may fail is canaryd's own rule.",
    ),
    _nvlink(RECOVERED, 0, 1, LINK, "Limit: DCGM's."),
    _nvlink((), MINUTE, CRC_PER_SECOND * MINUTE, LINK, "Limit: DCGM's."),
)
"""Every rate; the conditions that events name are among them."""


def rates(signs: Signs) -> Iterator[Finding]:
    """Something is counted more often, or held for longer, than its limit allows: not long ago, and at one place."""
    for rate in RATES:
        seconds, limit = rate.seconds or signs.policy.settle, rate.limit(signs)
        places: dict[object, list[Event]] = defaultdict(list)
        for event in rate.events(signs):
            if signs.now - event.last <= signs.policy.settle + seconds:
                places[tuple(event.labels.items())].append(event)
        found = []
        for events in places.values():
            count = signs.most(events, seconds, signs.trained if rate.links else within)
            if count >= limit:
                found.append((count, *_words(rate, max(events, key=lambda e: e.last), count, limit, seconds)))
        if found:
            (_, message, why), *others = sorted(found, key=lambda each: (-each[0], each[1]))
            after = format_duration(signs.policy.settle + (DAY if seconds == DAY else 0))
            more = (text for _, text, _ in others)
            clears = f"Clears after {after} below the limit."
            yield finding(rate.rule, State.DEGRADED, rate.cause, message, rate.action, *more, why, clears)


def _words(rate: Rate, newest: Event, count: float, limit: float, seconds: float) -> tuple[str, str]:
    """Return what a rate counted at one place, and whose limit it is."""
    known: dict[str, object] = defaultdict(lambda: "unknown", newest.labels)
    known.update(
        count=count,
        limit=limit,
        detail=sentence(newest.detail or newest.name),
        why=HARMFUL.get(newest.labels.get("reason", "")),
    )
    known.update(lasted=format_duration(count), most=format_duration(limit), window=format_duration(seconds))
    return rate.message.format_map(known), rate.source.format_map(known)


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
