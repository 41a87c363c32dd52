"""A run beside a server: last in line for the cores, in small bursts, within its share of memory.

What it may take comes with the request; `docs/budget.md` says why so. A check that nobody shares the device with asks
for none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from canaryd.model import Device
from canaryd.probe import Context, Skip

NICE = "CANARYD_NICE"
"""Environment variable that asks a worker to step back; its value is the nice level."""
IDLE = "CANARYD_IDLE"
"""One that is set where the worker's group has none but workers in it, so that it may have the lowest claim there."""
FIRST_TO_GO = 1000
"""`oom_score_adj` of such a worker, the highest there is (proc(5)): when memory runs out it goes before any server."""
LONGEST_REST = 0.5
"""Seconds that one pause lasts at most: a server's queue is empty by then, or has another reason to be long (ours)."""
TAKEN = "busy or unavailable"
"""What CUDA says where the device's compute mode, or its holder, lets no further process in: CUDA Runtime API,
cudaErrorDevicesUnavailable."""
SKIPPED = "budget: "
"""How the detail of a run begins that the budget kept from running: no fault of anybody's, and no evidence."""


def step_back() -> None:
    """Take the lowest claim on cores and memory that a worker can live with, where its environment asks for it.

    A session of its own is a group of its own for the scheduler, and nice counts only within one: the group's nice is
    set as well (sched(7), "The autogroup feature"). With SCHED_IDLE within a group of its own it gets what the group
    gets, and yet does not take a core from whoever runs when it wakes up; a core that it has counts as free when a
    server looks for one. Where the system allows or has none of it, the work is done anyway.
    """
    wanted = os.environ.get(NICE, "")
    if not wanted.isdigit():
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(int(wanted), os.getpriority(os.PRIO_PROCESS, 0)))
    if os.environ.get(IDLE):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for name, value in (("autogroup", wanted), ("oom_score_adj", str(FIRST_TO_GO))):
        with contextlib.suppress(OSError):
            Path("/proc/self", name).write_text(value)


class Bursts:
    """The clock of a run that works in bursts: it stands while the run pauses, so that pauses cost no budget."""

    def __init__(self, burst: float, rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Pause for `rest` times as long as was worked, whenever that is `burst` seconds or more."""
        self.paused = 0.0
        self.pauses = 0
        self._burst, self._rest = burst, rest
        self._wall = clock
        self._since = self.clock()

    def clock(self) -> float:
        """Return the seconds of a monotonic clock, less all pauses."""
        return self._wall() - self.paused

    def pause(self) -> None:
        """Let the server have the device, if a burst has been worked since the last time."""
        worked = self.clock() - self._since
        if worked < self._burst:
            return
        began = self._wall()
        time.sleep(min(LONGEST_REST, self._rest * worked))
        self.paused += self._wall() - began
        self.pauses += 1
        self._since = self.clock()


def install(ctx: Context, budget: Mapping[str, Any]) -> Bursts | None:
    """Make a run work in bursts, and start its own budget anew; None for a retest, whose load has a rhythm of its own.

    `budget` says "burst" (seconds) and "rest" (how many times as long the pause is).
    """
    if ctx.intensity:
        return None
    bursts = Bursts(budget["burst"], budget["rest"])
    ctx.clock, ctx.pace = bursts.clock, bursts.pause
    ctx.deadline = ctx.clock() + ctx.budget
    return bursts


def make_room(device: Device, budget: Mapping[str, Any], meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise `Skip` where taking "memory" bytes would leave fewer than "free" to the server; cap what torch may take.

    On an accelerator both count what the driver says is free now, the context of this process already taken. A CPU has
    no such cap; its memory is what the kernel thinks can be had without swapping.
    """
    if device.backend == "cpu":
        check_room(_available(meminfo), None, budget)
        return
    tensors = importlib.import_module("canaryd.worker.numeric.tensors")
    module: Any = getattr(tensors.torch, "cuda" if device.backend == "rocm" else device.backend, None)
    if not hasattr(module, "mem_get_info"):
        return  # without torch the probe says so itself; and not every kind of device can be asked
    target = tensors.torch_device(device)
    free, total = module.mem_get_info(target)
    # What torch already holds, from an earlier probe of the series, is in use and will be used again.
    held = module.memory_reserved(target)
    check_room(free + held, total, budget)
    module.set_per_process_memory_fraction(min(1.0, budget["memory"] / total), target)


def check_room(free: int | None, total: int | None, budget: Mapping[str, Any]) -> None:
    """Raise `Skip` where `free` bytes are too few; None is not known, and holds nothing back."""
    wanted = budget["memory"] + budget["free"]
    if free is not None and free < wanted:
        of = f" of {_mib(total)}" if total else ""
        raise Skip(
            f"{SKIPPED}{_mib(free)}{of} MiB of memory are free; budget.memory and budget.free want {_mib(wanted)} MiB"
        )


def excuse(error: BaseException, *, capped: bool) -> str:
    """Return why an error is the budget's or the device's owner's doing and no fault; "" where it is none of that.

    `capped`: whether torch's memory was capped for this run.
    """
    said = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, RuntimeError) and TAKEN in str(error):
        return f"{SKIPPED}the device lets no further process compute (compute mode, or its holder): {said}"
    if capped and any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__):
        return f"{SKIPPED}more than budget.memory was asked for, or the server has taken the rest: {said}"
    return ""


def _available(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _mib(size: int) -> int:
    return size >> 20
