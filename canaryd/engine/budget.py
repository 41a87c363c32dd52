"""Rules for when canaryd may load a device that serves requests, and an account of the device time that canaryd used.

A round of tests waits in quiet hours, while the device is busy or hot, and while the hourly share of device time is
used up. When the newest evidence would become too old, the round runs anyway, no larger than usual. Nothing runs if
memory is short or the compute mode forbids it. docs/budget.md says what waits for what.
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
"""Purposes of a series of runs: a round of probes that are due; a round that is forced because the evidence would
become too old; a retest of a suspect; and a confirmation of a mismatch or a test after an event."""
PURPOSES = (ROUND, FORCED, RETEST, DOUBT)
REASONS = ("compute_mode", "memory", "starting", "quiet_hours", "heat", "load", "share")
"""Reasons to postpone a test, in the order in which they are checked."""
_REASONS_FOR: Mapping[str, tuple[str, ...]] = {
    ROUND: REASONS,
    FORCED: ("compute_mode", "memory", "starting"),
    RETEST: ("compute_mode", "memory", "starting", "quiet_hours", "heat"),
    DOUBT: ("compute_mode", "memory", "starting"),
}
"""Purpose → the reasons that can postpone a series of that purpose. Retests have their own share
(`schedule.RETEST_SHARE`), and they should run under load."""

HOUR = 3600.0
"""Length in seconds of the period over which the share of device time is measured."""
COVERAGE = 0.75
"""Age at which evidence forces a round to run, as a fraction of the age at which the evidence is stale. Until then
the round can wait for a free device (ours)."""
NICE = 10
"""Nice level of workers. A core that a server keeps busy gives them a tenth of its time (weights 110 to 1024, Linux,
kernel/sched/core.c, sched_prio_to_weight). At 19 they would get a seventieth, and starting torch would take minutes
(ours)."""
BURST = 0.05
"""Seconds of work after which a run pauses, so that a server's request waits no longer than this."""
FREE = 512 << 20
"""Bytes of memory that a test leaves free for the server."""
SMALL = 256 << 20
"""Bytes that a small run takes on an accelerator where a server left too little for `budget.memory`; it leaves as
many free (ours)."""
STARTING = 600.0
"""Seconds for which tests wait after a process began to compute on an accelerator: it may be a server that loads its
model. vLLM ends at its start if memory becomes free while it measures (vllm-project/vllm, issue 56830), as it does when
a test ends. Deployments allow ten minutes and more for a start (ours)."""
STARTS = 2 * STARTING
"""Seconds for which processes that begin one after the other make tests wait; then a server that starts again and again
is no reason to know nothing of its device (ours)."""
HEADROOM = 5.0
"""Degrees Celsius below a device's throttle point at which rounds begin to wait."""
REST = 3.0
"""Ratio of each pause to the burst before it, so that a round works for a quarter of its time (ours)."""
UNHELD = 300 << 20
"""Bytes of memory in use up to which an accelerator counts as free of other processes (ours). An idle MI300X shows 284
MiB beyond what its driver calls reserved. A container sees only the memory of outside processes."""
TELL_USE = ("cuda", "rocm")
"""Kinds of devices (`Device.unit`) on which used memory reveals other processes. It does not on an idle Ascend, which
uses 3 GiB, or on an Apple GPU, which draws the screen."""
CONTEXT = 512 << 20
"""Bytes that a CUDA or HIP context with its kernels takes beside the memory that torch allocates (ours, generous)."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Measurements of a device at one moment. None means unknown; an unknown value postpones nothing."""

    now: float
    """Time of the measurements (epoch s)."""
    accelerator: bool = True
    spent: float = 0.0
    """Seconds of device time that rounds used in the last hour."""
    expected: float = 0.0
    """Device seconds that this round is expected to take; 0 if no similar round has run yet."""
    busy: float | None = None
    """Fraction of the time for which the device is in use; above 1 if tasks wait for a CPU."""
    free: int | None = None
    """Bytes of memory that are free on the device."""
    margin: float | None = None
    """Degrees Celsius from the device's temperature up to its throttle point; negative if the device is hotter."""
    mode: str = ""
    """Compute mode as NVML names it, or "" if the device has none."""
    processes: int | None = None
    """Number of processes that compute on the device."""
    newest: float | None = None
    """Seconds since the newest of these processes began."""
    starting: float = 0.0
    """Seconds for which tests have been waiting for new processes."""
    held: int | None = None
    """Bytes of device memory in use, without the driver's part; None also if used memory reveals no process
    (`TELL_USE`)."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The reason why a test does not run now."""

    reason: str
    """One of `REASONS`."""
    text: str
    """The measured value and the limit, in words."""


def others(facts: Conditions) -> str:
    """Return a clause with the sign that another process uses an accelerator, or "" if there is no sign.

    A processor always gives "", because other processes always compute on it.
    """
    if not facts.accelerator:
        return ""
    if facts.processes:
        return "1 process computes on it" if facts.processes == 1 else f"{facts.processes} processes compute on it"
    if facts.held is not None and facts.held > UNHELD:
        return f"{facts.held >> 20:,} MiB of its memory are in use"
    return ""


def wait(policy: BudgetConfig, facts: Conditions, purpose: str) -> Wait | None:
    """Return the first reason that postpones runs with this `purpose` under `facts`, or None if they can start now."""
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


def room(policy: BudgetConfig, facts: Conditions) -> int:
    """Return the bytes that a run takes on a device: `policy.memory`, or `SMALL` where an accelerator lacks memory."""
    short = facts.accelerator and facts.free is not None and facts.free < policy.memory + FREE + CONTEXT
    return min(policy.memory, SMALL) if short else policy.memory


def _memory(policy: BudgetConfig, facts: Conditions) -> str:
    wanted = policy.memory + FREE
    if facts.accelerator:
        wanted = min(wanted, 2 * SMALL) + CONTEXT
    if facts.free is None or facts.free >= wanted:
        return ""
    return f"{facts.free >> 20:,} MiB of memory free, {wanted >> 20:,} MiB needed"


def _starting(_: BudgetConfig, facts: Conditions) -> str:
    if facts.newest is None or facts.newest >= STARTING or facts.starting >= STARTS:
        return ""
    return f"a process began {facts.newest:.0f} s ago, and a server gets {STARTING / 60:g} min to load its model"


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
    "starting": _starting,
    "quiet_hours": _quiet_hours,
    "heat": _heat,
    "load": _load,
    "share": _share,
}


def facts(
    device: Device, own: Iterable[Reading], whole: Iterable[Reading] = (), *, now: float, spent: float, expected: float
) -> Conditions:
    """Return the conditions of a device: `own` are its fresh readings, `whole` those of its parent device.

    An instance of a divided GPU has its own memory. It shares heat and the compute mode with the whole GPU. The result
    repeats `now`, `spent` and `expected`.
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
        newest=_one(mine, "compute_process_age_seconds"),
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
    """Return the smallest distance (°C) of any sensor from its throttle or critical point, or None if it is unknown."""
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
    """Return the limits of a run that shares its device with a server, by name.

    "burst": seconds of work before each pause. "rest": length of a pause, in bursts. "memory": bytes that the run can
    use. "free": bytes that it must leave free. "small": bytes of both for a run where an accelerator's memory is short.
    """
    return {"burst": BURST, "rest": REST, "memory": policy.memory, "free": FREE, "small": min(policy.memory, SMALL)}


def device_seconds(device: Device, wall: float, processor: float | None, runs: Iterable[Run] = ()) -> float:
    """Return the seconds of a device's time that a worker used; `wall`: the worker's lifetime without its pauses.

    For a CPU this is `processor`, the worker's processor time, divided by the number of cores. For an accelerator it is
    the time that `runs` report, measured by the device's own events if it has them. If a run crashed or hung, it
    reports no time. The result is then `wall` minus the time that the runs report for work on the host.
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
    """Return the estimated seconds of work in a past run that took `seconds` of wall time, pauses included."""
    return seconds / (1.0 + REST)


@dataclass
class Withheld:
    """A postponed round of one device."""

    since: float
    """Time (epoch s) at which the round was first postponed."""
    wait: Wait
    """The newest reason to postpone the round."""
    counted: set[str] = field(default_factory=set)
    """Reasons that the totals already count for this round."""


class Account:
    """An account of this process: device time used, and rounds postponed. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin an empty account. `clock` is monotonic, so that setting the system clock does not change a share."""
        self._clock = clock
        self._mutex = threading.Lock()
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._skipped: Counter[tuple[str, str]] = Counter()
        self._withheld: dict[str, Withheld] = {}
        self._cost: dict[tuple[str, tuple[str, ...]], float] = {}
        self._starting: dict[str, float] = {}

    def spend(self, device: str, seconds: float, purpose: str) -> None:
        """Add `seconds` of device time to the total of `purpose`; rounds also count towards the hourly share."""
        with self._mutex:
            self._seconds[device, purpose] += seconds
            if purpose in (ROUND, FORCED):
                self._recent.setdefault(device, deque()).append((self._clock(), seconds))

    def recall(self, device: str, seconds: float, age: float) -> None:
        """Count `seconds` that an earlier process used `age` seconds ago in the hourly share, but not in the totals."""
        with self._mutex:
            self._recent.setdefault(device, deque()).append((self._clock() - age, seconds))

    def spent(self, device: str) -> float:
        """Return the seconds of a device's time that rounds used in the last hour."""
        with self._mutex:
            recent, since = self._recent.get(device, deque()), self._clock() - HOUR
            kept = deque(each for each in recent if each[0] > since)
            self._recent[device] = kept
            return sum(seconds for _, seconds in kept)

    def starting(self, device: str, newest: float | None) -> float:
        """Return for how many seconds new processes have begun on a device; `newest`: the newest one's age in seconds.

        0 if no process is new.
        """
        with self._mutex:
            if newest is None or newest >= STARTING:
                self._starting.pop(device, None)
                return 0.0
            return self._clock() - self._starting.setdefault(device, self._clock() - newest)

    def cost(self, device: str, probes: tuple[str, ...]) -> float:
        """Return the device seconds that the newest round of these probes took, or 0 if no such round has run."""
        return self._cost.get((device, probes), 0.0)

    def took(self, device: str, probes: tuple[str, ...], seconds: float) -> None:
        """Record the device seconds that a round of these probes took. The round is no longer postponed."""
        with self._mutex:
            self._cost[device, probes] = seconds
            self._withheld.pop(device, None)

    def release(self, device: str) -> None:
        """Forget the postponed round of a device, because it has run or is no longer due."""
        with self._mutex:
            self._withheld.pop(device, None)

    def withhold(self, device: str, wait: Wait, now: float) -> bool:
        """Record that a round is postponed; return whether its reason is new. Totals count a reason once per round."""
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
        """Return the postponed round of a device, or None if no round is postponed."""
        return self._withheld.get(device)

    def totals(self, device: str) -> tuple[dict[str, float], dict[str, int]]:
        """Return (purpose → seconds used, reason → number of postponed rounds) of one device, zeros included."""
        with self._mutex:
            return (
                {purpose: self._seconds[device, purpose] for purpose in PURPOSES},
                {reason: self._skipped[device, reason] for reason in REASONS},
            )
