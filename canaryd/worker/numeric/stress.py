"""The conditions that a retest creates between trials: steady load, pulsed load, or idling.

The trials do not change; only the moment at which they run is chosen. Load is one product of random numbers after
another, in memory of its own. It runs between trials and not beside them, so that a wrong result has one cause. On a
CPU it uses all visible cores, whichever core the trials are pinned to. On an accelerator it runs up to the moment of
the trial, whose kernels queue directly behind the last product.

Limits: pulses that a host makes last milliseconds. They reach voltage regulators and clock control, but not the
resonances of a package at megahertz. How far clocks fall in a pause depends on the driver and on the host's other
work. Telemetry shows the effect.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from canaryd.model import TORCH, Device
from canaryd.probe import Absent, Context, Reading, Skip
from canaryd.worker.numeric.tensors import need_torch, on_cores, torch, torch_device, visible_cores

WARM_UP = 30.0
"""Seconds of load before the first trial. After it die and package are as hot as in serving, but not a heavy cooler."""
PAUSE = 10.0
"""Seconds of idling before the first trial, and again before each later group of them."""
BEFORE = 0.25
"""Largest share of the run's time for the load before the first trial, or for one pause."""
LOAD = 0.5
"""Seconds of load, steady or pulsed, before each later group of trials: five times as long as the group."""
PULSE = 0.01
"""Seconds of one burst of load, and of the pause after it."""
GROUP = {"steady": 0.1, "pulsed": 0.1, "idle": 1.0}
"""Condition → seconds of trials between two loads or pauses. In "idle", the rise of clocks and voltage is tested."""
SMALLEST, LARGEST = 512, 4096
"""Smallest and largest side of the square product that makes the load; a product should last for `WORTH`. The largest
needs 96 MiB on an accelerator and 192 MiB on a CPU, which a serving node can spare."""
WORTH = 0.002
"""Seconds that one product should last, so that the time for launching it does not matter."""


def install(ctx: Context) -> Callable[[], list[Reading | Absent]]:
    """Make the probe of this run call a `Pace` between its trials; return a function for the end of the run.

    That function returns the conditions of the trials as readings. Raises `Skip` if torch, which makes the load, is
    missing or cannot use the device.
    """
    if ctx.intensity not in GROUP:
        return list
    need_torch()
    if ctx.intensity != "idle":
        _torch_device(ctx.device)  # here and not at the first trial: a device without load is no failure
    ctx.pace = pace = Pace(ctx)
    return pace.facts


def _torch_device(device: Device) -> Any:
    """Return the torch device that computes the load: the device itself, or the CPU if its runtime is not torch."""
    if device.runtime != TORCH and device.unit != "cpu":
        raise Skip(f"torch makes the load of a retest, and {device.name} is not known to be a device of torch")
    return torch.device("cpu") if device.unit == "cpu" else torch_device(device)


class Pace:
    """The load or the pauses of one run; the probe calls this object between trials."""

    def __init__(self, ctx: Context) -> None:
        """Remember which cores are visible now, before a trial is pinned to one of them, so that the load uses all."""
        self._ctx = ctx
        self._cores = visible_cores()
        self._load: _Load | None = None
        self._began: float | None = None
        self._trials_until = 0.0
        self._ends_idle = True
        self.load_seconds = self.pause_seconds = self.operations = 0.0

    def __call__(self) -> None:
        """Load the device or let it idle, if the present group of trials is over and time is left."""
        now = self._ctx.clock()
        first = self._began is None
        if first:
            self._began = self._trials_until = now
        if self._ctx.left <= 0.0 or now < self._trials_until:
            return
        before = self._ctx.budget * BEFORE
        if self._ctx.intensity == "idle":
            self._pause(min(PAUSE, before))
        elif self._ctx.intensity == "steady":
            self._work(min(WARM_UP, before) if first else LOAD)
            self._ends_idle = False
        else:
            self._pulses(min(WARM_UP, before) if first else LOAD)
        if self._load is not None and not (self._ends_idle or self._ctx.device.unit == "cpu"):
            self._load.enqueue()  # not waited for: on an accelerator the trial queues directly behind it
        self._trials_until = self._ctx.clock() + GROUP[self._ctx.intensity]

    def facts(self) -> list[Reading | Absent]:
        """Return the seconds under load and idle between the trials, the share of load, and its speed."""
        if self._began is None:
            reason = f"{self._ctx.intensity} retest: no trial of this probe asked for it (ctx.pace), they ran as usual"
            return [Absent(name="load_seconds", reason=reason), Absent(name="pause_seconds", reason=reason)]
        whole = max(self._ctx.clock() - self._began, 1e-9)
        facts: list[Reading | Absent] = [
            Reading(name="load_seconds", value=self.load_seconds, unit="seconds"),
            Reading(name="pause_seconds", value=self.pause_seconds, unit="seconds"),
            Reading(name="load_duty", value=self.load_seconds / whole, unit="1"),
        ]
        if self.load_seconds > 0.0:
            speed = self.operations / self.load_seconds
            facts.append(Reading(name="load_speed", value=speed, unit="flops per second"))
        return facts

    def _pulses(self, seconds: float) -> None:
        """Alternate bursts of load and pauses for `seconds`; a burst is the last part in every second call."""
        end = self._ctx.clock() + seconds
        while self._ctx.clock() < end and self._ctx.left > 0.0:
            self._work(PULSE)
            self._pause(PULSE)
        self._ends_idle = not self._ends_idle
        if not self._ends_idle:
            self._work(PULSE)

    def _pause(self, seconds: float) -> None:
        began = self._ctx.clock()
        time.sleep(min(seconds, self._ctx.left))
        self.pause_seconds += self._ctx.clock() - began

    def _work(self, seconds: float) -> None:
        began = self._ctx.clock()
        end = began + min(seconds, self._ctx.left)
        # An accelerator's load needs no core, and another golden may be in the making on one.
        with on_cores(self._cores, len(self._cores)) if self._ctx.device.unit == "cpu" else contextlib.nullcontext():
            if self._load is None:
                self._load = _Load(_torch_device(self._ctx.device))
                began = self._ctx.clock()  # finding its size is not the load that was asked for
            while self._ctx.clock() < end:
                self._load.enqueue()
                self._load.finish()
                self.operations += self._load.operations
        self.load_seconds += self._ctx.clock() - began


class _Load:
    """The load: products of random numbers, about `PULSE` seconds of them per call."""

    def __init__(self, device: Any) -> None:
        # Of narrow formats float16 is the one that every accelerator has; 4,096 products of it stay far below infinity.
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        random = torch.Generator().manual_seed(0)  # its own generator, so that no other random numbers change
        self._count, n = 1, SMALLEST
        while True:
            self._a, self._b = (torch.randn((n, n), generator=random).to(device, dtype) for _ in range(2))
            self._out = torch.empty_like(self._a)
            seconds = min(self._timed() for _ in range(3))
            if seconds >= WORTH or n >= LARGEST:
                break
            n *= 2
        self._count = max(1, round(PULSE / seconds))
        self.operations = self._count * 2.0 * n**3
        """Floating-point operations of one `enqueue`."""

    def _timed(self) -> float:
        began = time.perf_counter()
        self.enqueue()
        self.finish()
        return time.perf_counter() - began

    def enqueue(self) -> None:
        """Enqueue the products; an accelerator can still be computing them when this returns."""
        for _ in range(self._count):
            torch.matmul(self._a, self._b, out=self._out)

    def finish(self) -> None:
        """Wait for the products."""
        self._out[0, 0].item()
