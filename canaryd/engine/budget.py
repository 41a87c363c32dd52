"""What canaryd may take of a device that serves, and why a round waits: pure functions over facts, and an account.

A round waits for its share, for load, heat, power and the operator's hours, until evidence would grow too old; it then
runs all the same, as small as ever. Nothing runs where memory is short or the compute mode forbids it. docs/budget.md
has the reasons.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from canaryd.config.settings import BudgetConfig
from canaryd.model import Device, Reading

ROUND, FORCED, RETEST, DOUBT = "round", "forced", "retest", "doubt"
"""What a series is for: probes that are due; the same because evidence would grow too old; a retest of a suspect; a
confirmation of a mismatch, or a test that an event called for."""
PURPOSES = (ROUND, FORCED, RETEST, DOUBT)
REASONS = ("compute_mode", "memory", "quiet_hours", "heat", "power", "load", "share")
"""Why something waits, the most binding first."""
_HEEDED: Mapping[str, tuple[str, ...]] = {
    ROUND: REASONS,
    FORCED: ("compute_mode", "memory"),
    RETEST: ("compute_mode", "memory", "quiet_hours", "heat", "power"),
    DOUBT: ("compute_mode", "memory"),
}
"""What each purpose waits for. Retests have a share of their own (`schedule.RETEST_SHARE`) and are meant for load."""

HOUR = 3600.0
"""Seconds over which a share is reckoned."""
COVERAGE = 0.75
"""Part of the age at which evidence counts as stale after which a round is forced: what is left is time for it to wait
for its device (ours)."""
NICE = 10
"""Nice level of workers: a core that a server keeps busy gives them a tenth of its time (weights 110 to 1024, Linux,
kernel/sched/core.c, sched_prio_to_weight). At 19 it would be a seventieth, and torch's start alone take minutes (ours).
"""
REST = 3.0
"""A pause is so many times as long as the burst before it: a round works a quarter of the time that it lasts (ours)."""
CONTEXT = 512 << 20
"""Bytes that a CUDA or HIP context with its kernels takes beside what torch allocates (ours, ample)."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a device at one moment; None where it is not known, which holds nothing back."""

    now: float
    """Seconds since the epoch."""
    accelerator: bool = True
    spent: float = 0.0
    """Seconds of device time that rounds took in the last hour."""
    expected: float = 0.0
    """Seconds that this one is expected to take; 0 where none like it has run yet."""
    busy: float | None = None
    """Part of the time for which it is in use; above 1 where a CPU's tasks wait."""
    free: int | None = None
    """Bytes of memory that are free."""
    power: float | None = None
    """Power drawn over its limit."""
    margin: float | None = None
    """Degrees left until it slows itself down."""
    mode: str = ""
    """Its compute mode, as NVML calls it; "" where it has none."""
    processes: int | None = None
    """Processes that compute on it."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Why something does not run now."""

    reason: str
    """One of `REASONS`."""
    text: str
    """It in words."""


def wait(policy: BudgetConfig, facts: Facts, purpose: str) -> Wait | None:
    """Return the most binding reason why a series has to wait; None where it may run."""
    for reason in _HEEDED[purpose]:
        if text := _CHECKS[reason](policy, facts):
            return Wait(reason=reason, text=text)
    return None


def _compute_mode(_: BudgetConfig, facts: Facts) -> str:
    if facts.mode == "prohibited":
        return "its compute mode lets nobody compute"
    if facts.mode.startswith("exclusive") and facts.processes == 0:
        return "its compute mode is exclusive: a server that starts would be refused while canaryd holds it"
    return ""  # held by others: the worker asks, and is let in where the holder is MPS


def _memory(policy: BudgetConfig, facts: Facts) -> str:
    wanted = policy.memory + policy.free + (CONTEXT if facts.accelerator else 0)
    if facts.free is None or facts.free >= wanted:
        return ""
    return f"{facts.free >> 20} MiB of its memory are free, and {wanted >> 20} MiB are wanted"


def _quiet_hours(policy: BudgetConfig, facts: Facts) -> str:
    local = datetime.fromtimestamp(facts.now).astimezone()
    minute = 60 * local.hour + local.minute
    for begin, end in policy.quiet_hours:
        if begin <= minute < end if begin < end else minute >= begin or minute < end:
            return f"quiet hours {begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    return ""


def _heat(policy: BudgetConfig, facts: Facts) -> str:
    if not policy.headroom or facts.margin is None or facts.margin >= policy.headroom:
        return ""
    return f"{facts.margin:.0f} °C are left until it slows itself down, and {policy.headroom:g} °C are wanted"


def _power(policy: BudgetConfig, facts: Facts) -> str:
    if policy.power is None or facts.power is None or facts.power < policy.power:
        return ""
    return f"it draws {facts.power:.0%} of its power limit, and less than {policy.power:.0%} is wanted"


def _load(policy: BudgetConfig, facts: Facts) -> str:
    if policy.busy >= 1 or facts.busy is None or facts.busy < policy.busy:
        return ""
    return f"it is in use for {facts.busy:.0%} of the time, and less than {policy.busy:.0%} is wanted"


def _share(policy: BudgetConfig, facts: Facts) -> str:
    may = policy.share * HOUR
    if not facts.spent or facts.spent + facts.expected <= may:
        return ""  # the first round of an hour runs whatever it takes: how long is known afterwards
    return (
        f"rounds took {facts.spent:.1f} s of it within the hour, another {facts.expected:.1f} s, and {may:g} s may be"
    )


_CHECKS: Mapping[str, Callable[[BudgetConfig, Facts], str]] = {
    "compute_mode": _compute_mode,
    "memory": _memory,
    "quiet_hours": _quiet_hours,
    "heat": _heat,
    "power": _power,
    "load": _load,
    "share": _share,
}


def facts(
    device: Device, own: Iterable[Reading], whole: Iterable[Reading] = (), *, now: float, spent: float, expected: float
) -> Facts:
    """Return what fresh readings of a device say; `whole` are those of the device that it is an instance of.

    An instance of a divided device has memory of its own, and shares heat, power and the compute mode.
    """
    mine: dict[str, list[Reading]] = {}
    for reading in own:
        if isinstance(reading.value, (int, float)):
            mine.setdefault(reading.name, []).append(reading)
    shared: dict[str, list[Reading]] = {}
    for reading in whole:
        if isinstance(reading.value, (int, float)):
            shared.setdefault(reading.name, []).append(reading)
    heat = mine if "temperature_celsius" in mine or not device.parent else shared
    draws = mine if "power_watts" in mine or not device.parent else shared
    total, used = _one(mine, "memory_total_bytes"), _one(mine, "memory_used_bytes")
    free = _one(mine, "memory_available_bytes") if device.backend == "cpu" else None
    if total is not None and used is not None:
        free = total - used
    busy = [float(r.value) for r in mine.get("utilization_ratio", ()) if r.labels.get("engine") != "memory"]
    if device.backend == "cpu":
        load, cores = _one(mine, "load_average"), _one(mine, "cpu_cores", state="online")
        busy = [load / cores] if load is not None and cores else []
    watts, limit = _one(draws, "power_watts"), _one(draws, "power_limit_watts", limit="enforced")
    processes = _one(mine, "compute_processes")
    return Facts(
        now=now,
        accelerator=device.backend != "cpu",
        spent=spent,
        expected=expected,
        busy=max(busy, default=None),
        free=None if free is None else int(free),
        power=watts / limit if watts is not None and limit else None,
        margin=_margin(heat),
        mode=next((r.labels.get("mode", "") for r in mine.get("compute_mode", shared.get("compute_mode", ()))), ""),
        processes=None if processes is None else int(processes),
    )


def _one(readings: Mapping[str, list[Reading]], name: str, **labels: str) -> float | None:
    found = (float(r.value) for r in readings.get(name, ()) if labels.items() <= r.labels.items())
    return next(found, None)


def _margin(readings: Mapping[str, list[Reading]]) -> float | None:
    """Return the smallest distance of a sensor from where the device slows down, or is in danger."""
    thresholds = {
        r.labels.get("threshold", ""): float(r.value) for r in readings.get("temperature_threshold_celsius", ())
    }
    left = [float(r.value) for r in readings.get("temperature_margin_celsius", ())]
    for reading in readings.get("temperature_celsius", ()):
        sensor = reading.labels.get("sensor", "")
        limit = thresholds.get("slowdown") if sensor == "core" else thresholds.get(f"{sensor}_crit")
        if limit:
            left.append(limit - float(reading.value))
    return min(left, default=None)


def allowance(policy: BudgetConfig) -> dict[str, float]:
    """Return what a run beside a server is told: seconds of a burst, pause over burst, bytes to take and to leave."""
    return {"burst": policy.burst, "rest": REST, "memory": policy.memory, "free": policy.free}


def oldest(policy: BudgetConfig, fresh: float) -> float:
    """Return the age in seconds of evidence at which a round is forced; `fresh` is the age up to which it counts."""
    return COVERAGE * fresh if policy.evidence is None else policy.evidence


def device_seconds(device: Device, wall: float, processor: float | None) -> float:
    """Return how much of a device's time a worker took.

    Of a CPU its processor time, over all cores. Of an accelerator the time for which the worker was there, its pauses
    left out: more than it computed for, since torch's start and the goldens' making on the host are in it.
    """
    if device.backend == "cpu" and processor is not None:
        return processor / (os.cpu_count() or 1)
    return max(0.0, wall)


def worked(seconds: float) -> float:
    """Return how much of a run's wall time was work, the rest being pauses: an estimate, for runs of the past."""
    return seconds / (1.0 + REST)


@dataclass
class Withheld:
    """A round that is due and waits."""

    since: float
    """Since when, in seconds since the epoch."""
    wait: Wait
    """Why, as things stand."""
    counted: set[str] = field(default_factory=set)
    """Reasons that have been counted for this round."""


class Account:
    """What was spent and what was skipped, by this process. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is a monotonic one: a share of an hour must not depend on a clock that is set."""
        self._clock = clock
        self._mutex = threading.Lock()
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._withheld: dict[str, Withheld] = {}
        self._cost: dict[tuple[str, tuple[str, ...]], float] = {}

    def spend(self, device: str, seconds: float, purpose: str) -> None:
        """Add device time; that of rounds counts towards the share of the hour."""
        with self._mutex:
            self._seconds[device, purpose] += seconds
            if purpose in (ROUND, FORCED):
                self._recent.setdefault(device, deque()).append((self._clock(), seconds))

    def recall(self, device: str, seconds: float, age: float) -> None:
        """Take up what an earlier process spent `age` seconds ago: a restart begins no new hour, and counts nothing."""
        with self._mutex:
            self._recent.setdefault(device, deque()).append((self._clock() - age, seconds))

    def spent(self, device: str) -> float:
        """Return the seconds that rounds took of a device within the last hour."""
        with self._mutex:
            recent, since = self._recent.get(device, deque()), self._clock() - HOUR
            kept = deque(each for each in recent if each[0] > since)
            self._recent[device] = kept
            return sum(seconds for _, seconds in kept)

    def cost(self, device: str, probes: tuple[str, ...]) -> float:
        """Return what the newest round of these probes took; 0 where none has run."""
        return self._cost.get((device, probes), 0.0)

    def took(self, device: str, probes: tuple[str, ...], seconds: float) -> None:
        """Note what a round of these probes took, and that it waits no longer."""
        with self._mutex:
            self._cost[device, probes] = seconds
            self._withheld.pop(device, None)

    def release(self, device: str) -> None:
        """Note that what waited has run."""
        with self._mutex:
            self._withheld.pop(device, None)

    def withhold(self, device: str, wait: Wait, now: float) -> bool:
        """Note that a round that is due waits; return whether that, or its reason, is news. Counts each reason once."""
        with self._mutex:
            held = self._withheld.setdefault(device, Withheld(since=now, wait=wait))
            news = wait.reason not in held.counted or held.wait.reason != wait.reason
            if wait.reason not in held.counted:
                held.counted.add(wait.reason)
                self._skipped[device, wait.reason] += 1
            if news:
                held.wait = wait
            return news

    def withheld(self, device: str) -> Withheld | None:
        """Return what waits on a device; None where nothing does."""
        return self._withheld.get(device)

    def totals(self, device: str) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds spent by purpose and the rounds put off by reason, 0 where there were none."""
        with self._mutex:
            return (
                {purpose: self._seconds[device, purpose] for purpose in PURPOSES},
                {reason: self._skipped[device, reason] for reason in REASONS},
            )
