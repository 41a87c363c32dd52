"""What canaryd may take from a device that serves, and why a test is postponed: pure functions, and an account.

A round waits for its share, for load, heat and the operator's quiet hours, until the evidence would become too
old. Then it runs anyway, as small as always. Nothing runs where memory is short or the compute mode forbids it.
docs/budget.md has the reasons.
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
from canaryd.facts import DEVICE_SECONDS, HOST_SECONDS, Reading
from canaryd.model import EXCLUSIVE, PROHIBITED, Device, Outcome, Run

ROUND, FORCED, RETEST, DOUBT = "round", "forced", "retest", "doubt"
"""Purposes of a series: probes that are due; the same, forced because the evidence would become too old; a retest of a
suspect; and a confirmation of a mismatch or a test after an event."""
PURPOSES = (ROUND, FORCED, RETEST, DOUBT)
REASONS = ("compute_mode", "memory", "quiet_hours", "heat", "load", "share")
"""Reasons to postpone a test, the most binding first."""
_REASONS_FOR: Mapping[str, tuple[str, ...]] = {
    ROUND: REASONS,
    FORCED: ("compute_mode", "memory"),
    RETEST: ("compute_mode", "memory", "quiet_hours", "heat"),
    DOUBT: ("compute_mode", "memory"),
}
"""Purpose → the reasons that postpone it. Retests have a share of their own (`schedule.RETEST_SHARE`), and should run
under load."""

HOUR = 3600.0
"""Seconds for which a share is calculated."""
COVERAGE = 0.75
"""Fraction of the age at which evidence becomes stale after which a round is forced. The rest is time to wait for the
device (ours)."""
NICE = 10
"""Nice level of workers. A core that a server keeps busy gives them a tenth of its time (weights 110 to 1024, Linux,
kernel/sched/core.c, sched_prio_to_weight). At 19 they would get a seventieth, and starting torch would take minutes
(ours)."""
BURST = 0.05
"""A run pauses each time it has worked for this many seconds: a request beside it waits no longer than that."""
FREE = 512 << 20
"""Bytes of memory that always stay free for the server."""
HEADROOM = 5.0
"""Rounds wait while the device is less than this many degrees Celsius below its throttle point."""
REST = 3.0
"""A pause is this many times as long as the burst before it, so that a round works a quarter of its time (ours)."""
UNHELD = 300 << 20
"""Bytes of memory in use up to which nobody else uses an accelerator (ours): drivers need some beside what they call
reserved; an idle MI300X shows 284 MiB. A container cannot see the processes outside it, but their memory."""
TELL_USE = ("cuda", "rocm")
"""Units whose used memory shows other processes: an idle Ascend has 3 GiB in use, and an Apple GPU draws the screen."""
CONTEXT = 512 << 20
"""Bytes of a CUDA or HIP context with its kernels, in addition to what torch allocates (ours, ample)."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is known of a device at one moment. None means unknown, which postpones nothing."""

    now: float
    """Seconds since the epoch."""
    accelerator: bool = True
    spent: float = 0.0
    """Seconds of device time that rounds used in the last hour."""
    expected: float = 0.0
    """Seconds that this round is expected to take; 0 where no similar one has run yet."""
    busy: float | None = None
    """Fraction of the time for which it is in use; above 1 where tasks wait for a CPU."""
    free: int | None = None
    """Free bytes of memory."""
    margin: float | None = None
    """Degrees Celsius below the throttle point."""
    mode: str = ""
    """Compute mode, as NVML names it; "" where there is none."""
    processes: int | None = None
    """Number of processes that compute on it."""
    held: int | None = None
    """Bytes of its memory in use beyond what its driver keeps; None also where that says nothing of other processes."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Why a test does not run now."""

    reason: str
    """One of `REASONS`."""
    text: str
    """The reason in words: what was measured, and the limit."""


def others(facts: Conditions) -> str:
    """Return what shows that another process uses an accelerator on which canaryd runs nothing; "" for nothing.

    Processors are not meant: there something always computes.
    """
    if not facts.accelerator:
        return ""
    if facts.processes:
        return "1 process computes on it" if facts.processes == 1 else f"{facts.processes} processes compute on it"
    if facts.held is not None and facts.held > UNHELD:
        return f"{facts.held >> 20:,} MiB of its memory are in use"
    return ""


def wait(policy: BudgetConfig, facts: Conditions, purpose: str) -> Wait | None:
    """Return the most binding reason to postpone a series; None if it may run."""
    for reason in _REASONS_FOR[purpose]:
        if text := _CHECKS[reason](policy, facts):
            return Wait(reason=reason, text=text)
    return None


def _compute_mode(_: BudgetConfig, facts: Conditions) -> str:
    if facts.mode == PROHIBITED:
        return "the compute mode prohibits computing"
    if facts.mode.startswith(EXCLUSIVE) and facts.processes == 0:
        return "the compute mode is exclusive, so no server could start during the test"
    return ""  # another process holds it: the worker tries, and succeeds if that is MPS


def _memory(policy: BudgetConfig, facts: Conditions) -> str:
    wanted = policy.memory + FREE + (CONTEXT if facts.accelerator else 0)
    if facts.free is None or facts.free >= wanted:
        return ""
    return f"{facts.free >> 20:,} MiB of memory free, {wanted >> 20:,} MiB needed"


def _quiet_hours(policy: BudgetConfig, facts: Conditions) -> str:
    local = datetime.fromtimestamp(facts.now).astimezone()
    minute = 60 * local.hour + local.minute
    for begin, end in policy.quiet_hours:
        if begin <= minute < end if begin < end else minute >= begin or minute < end:
            return f"quiet hours {begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    return ""


def _heat(_: BudgetConfig, facts: Conditions) -> str:
    if facts.margin is None or facts.margin >= HEADROOM:
        return ""
    if facts.margin < 0:
        return f"{-facts.margin:.0f} °C above its throttle point"
    return f"{facts.margin:.0f} °C below its throttle point ({HEADROOM:g} °C needed)"


def _load(policy: BudgetConfig, facts: Conditions) -> str:
    if policy.busy >= 1 or facts.busy is None or facts.busy < policy.busy:
        return ""
    what = "device" if facts.accelerator else "CPU"
    return f"{what} load is {100 * facts.busy:.0f} % (limit {100 * policy.busy:g} %)"


def _share(policy: BudgetConfig, facts: Conditions) -> str:
    limit = policy.share * HOUR
    if not facts.spent or facts.spent + facts.expected <= limit:
        return ""  # the first round of an hour always runs, because only then its time is known
    return f"{facts.spent:.1f} s used this hour, this needs {facts.expected:.1f} s, limit {limit:g} s"


_CHECKS: Mapping[str, Callable[[BudgetConfig, Conditions], str]] = {
    "compute_mode": _compute_mode,
    "memory": _memory,
    "quiet_hours": _quiet_hours,
    "heat": _heat,
    "load": _load,
    "share": _share,
}


def facts(
    device: Device, own: Iterable[Reading], whole: Iterable[Reading] = (), *, now: float, spent: float, expected: float
) -> Conditions:
    """Return the facts in the fresh readings of a device; `whole` are those of the device that it is an instance of.

    An instance of a divided device has its own memory, and shares heat and the compute mode.
    """
    mine, shared = _by_name(own), _by_name(whole)
    heat = mine if "temperature_celsius" in mine or not device.parent else shared
    total, used = _one(mine, "memory_total_bytes"), _one(mine, "memory_used_bytes")
    reserved = _one(mine, "memory_reserved_bytes") or 0
    free = _one(mine, "memory_available_bytes") if device.unit == "cpu" else None
    if total is not None and used is not None:
        free = total - used
    busy = [float(r.value) for r in mine.get("utilization_ratio", ()) if r.labels.get("engine") != "memory"]
    if device.unit == "cpu":
        load, cores = _one(mine, "load_average"), _one(mine, "cpu_cores", state="online")
        busy = [load / cores] if load is not None and cores else []
    processes = _one(mine, "compute_processes")
    return Conditions(
        now=now,
        accelerator=device.unit != "cpu",
        spent=spent,
        expected=expected,
        busy=max(busy, default=None),
        free=None if free is None else int(free),
        margin=_margin(heat),
        mode=next((r.labels.get("mode", "") for r in mine.get("compute_mode", shared.get("compute_mode", ()))), ""),
        processes=None if processes is None else int(processes),
        held=None if used is None or device.unit not in TELL_USE else int(used - reserved),
    )


def _by_name(readings: Iterable[Reading]) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        if isinstance(reading.value, (int, float)):
            found.setdefault(reading.name, []).append(reading)
    return found


def _one(readings: Mapping[str, list[Reading]], name: str, **labels: str) -> float | None:
    found = (float(r.value) for r in readings.get(name, ()) if labels.items() <= r.labels.items())
    return next(found, None)


def _margin(readings: Mapping[str, list[Reading]]) -> float | None:
    """Return the smallest distance of a sensor from its throttle or critical point, in degrees; None where unknown."""
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
    """Return the limits of a run beside a server: seconds of a burst, pause over burst, bytes to use and to leave."""
    return {"burst": BURST, "rest": REST, "memory": policy.memory, "free": FREE}


def device_seconds(device: Device, wall: float, processor: float | None, runs: Iterable[Run] = ()) -> float:
    """Return how many seconds of a device's time a worker used.

    For a CPU, its processor time divided by all cores. For an accelerator, what its `runs` report, which is measured by
    the device's own events where it has them. Where a run that was not skipped reports nothing, because it crashed or
    hangs, the worker's life without its pauses, less what the others report as the host's part.
    """
    if device.unit == "cpu" and processor is not None:
        return processor / (os.cpu_count() or 1)
    names = (DEVICE_SECONDS, HOST_SECONDS)
    told = [
        {r.name: float(r.value) for r in run.readings if r.name in names}
        for run in runs
        if run.outcome is not Outcome.SKIPPED
    ]
    if told and all(DEVICE_SECONDS in times for times in told):
        return min(max(0.0, wall), sum(times[DEVICE_SECONDS] for times in told))
    return max(0.0, wall - sum(times.get(HOST_SECONDS, 0.0) for times in told))


def worked(seconds: float) -> float:
    """Return an estimate of how much of a past run's wall time was work; the rest was pauses."""
    return seconds / (1.0 + REST)


@dataclass
class Withheld:
    """A postponed round."""

    since: float
    """When it was first postponed, in seconds since the epoch."""
    wait: Wait
    """The newest reason."""
    counted: set[str] = field(default_factory=set)
    """Reasons that were counted for this round."""


class Account:
    """Device time used and rounds postponed by this process. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is monotonic, so that setting the system clock does not change a share."""
        self._clock = clock
        self._mutex = threading.Lock()
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._withheld: dict[str, Withheld] = {}
        self._cost: dict[tuple[str, tuple[str, ...]], float] = {}

    def spend(self, device: str, seconds: float, purpose: str) -> None:
        """Add device time; time of rounds counts towards the hourly share."""
        with self._mutex:
            self._seconds[device, purpose] += seconds
            if purpose in (ROUND, FORCED):
                self._recent.setdefault(device, deque()).append((self._clock(), seconds))

    def recall(self, device: str, seconds: float, age: float) -> None:
        """Add time that an earlier process used `age` seconds ago to the hourly share, but not to the totals."""
        with self._mutex:
            self._recent.setdefault(device, deque()).append((self._clock() - age, seconds))

    def spent(self, device: str) -> float:
        """Return the seconds that rounds used of a device in the last hour."""
        with self._mutex:
            recent, since = self._recent.get(device, deque()), self._clock() - HOUR
            kept = deque(each for each in recent if each[0] > since)
            self._recent[device] = kept
            return sum(seconds for _, seconds in kept)

    def cost(self, device: str, probes: tuple[str, ...]) -> float:
        """Return the device seconds of the newest round of these probes; 0 where none has run."""
        return self._cost.get((device, probes), 0.0)

    def took(self, device: str, probes: tuple[str, ...], seconds: float) -> None:
        """Note the device seconds of a round of these probes, and that it no longer waits."""
        with self._mutex:
            self._cost[device, probes] = seconds
            self._withheld.pop(device, None)

    def release(self, device: str) -> None:
        """Note that the postponed round has run."""
        with self._mutex:
            self._withheld.pop(device, None)

    def withhold(self, device: str, wait: Wait, now: float) -> bool:
        """Note that a round is postponed; return whether that or its reason is new. Counts each reason once."""
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
        """Return the postponed round of a device; None where there is none."""
        return self._withheld.get(device)

    def totals(self, device: str) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds used by purpose and the rounds postponed by reason; 0 where there were none."""
        with self._mutex:
            return (
                {purpose: self._seconds[device, purpose] for purpose in PURPOSES},
                {reason: self._skipped[device, reason] for reason in REASONS},
            )
