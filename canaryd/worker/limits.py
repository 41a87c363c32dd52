"""Limits of a run on a device that also serves: lowest priority on the cores, short bursts, a share of the memory.

The limits come with the request; `docs/budget.md` explains them. A check on a device without a server sets none.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from canaryd.facts import Skipped, beginning
from canaryd.free_memory import of_host
from canaryd.model import Device, Reason
from canaryd.probe import Context, Skip

NICE = "CANARYD_NICE"
"""Environment variable with the nice level that a worker sets."""
IDLE = "CANARYD_IDLE"
"""Environment variable that is set if a worker's scheduling group has only workers, so that SCHED_IDLE is safe."""
FIRST_TO_GO = 1000
"""`oom_score_adj` of a worker beside a server, the highest (proc(5)): the kernel kills it before any server."""
LONGEST_REST = 0.5
"""Longest pause in seconds. If a server's queue is still long after it, canaryd is not the reason (ours)."""
TAKEN = "busy or unavailable"
"""CUDA's message if the device's compute mode, or the process that holds the device, admits no further process (CUDA
Runtime API, cudaErrorDevicesUnavailable)."""
FULL = re.compile(r"(error|Error \[(CUDA|HIP)\]): out of memory|STATUS_ALLOC_FAILED|OUT_OF_DEVICE_MEMORY")
"""Messages of drivers, their libraries and Triton when a device's memory is full, even when a context is created.
torch's own allocator raises an error of its own type."""
ENDPOINT_MEMORY = 1 << 30
"""Maximum private memory (bytes) of a worker that asks a server: the same as `budget.memory` (ours). Such a
worker uses 30 MiB."""
SKIPPED = "budget: "
"""Beginning of a run's detail if the budget prevented the run: such a run is neither a fault nor evidence."""


def step_back() -> None:
    """Lower the worker's priority for cores and memory if its environment asks for this.

    A session is its own scheduling group, and nice counts only within a group, so the group's nice is set as well
    (sched(7), "The autogroup feature"). A worker with SCHED_IDLE keeps its group's share of the cores. When it wakes
    up, it takes no core from a running task, and its core counts as free for a server that looks for one. A step that
    the system does not support or permit is left out.
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


def bound_memory() -> None:
    """Limit this process's memory so that no answer of a server can fill the machine.

    The limit is RLIMIT_DATA: RLIMIT_AS would count address space that threads only reserve (getrlimit(2)).
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = ENDPOINT_MEMORY if hard == resource.RLIM_INFINITY else min(hard, ENDPOINT_MEMORY)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


class Bursts:
    """The clock of a run that alternates bursts of work and pauses: it stops during pauses, which use no budget."""

    def __init__(self, burst: float, rest: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Pause after each `burst` seconds of work or more, for `rest` times the length of that work."""
        self.paused = 0.0
        self._burst, self._rest = burst, rest
        self._wall = clock
        self._since = self.clock()

    def clock(self) -> float:
        """Return the time of a monotonic clock in seconds, less the length of all pauses so far."""
        return self._wall() - self.paused

    def pause(self) -> None:
        """Pause if `burst` seconds of work have passed since the last pause, so that the server gets the device."""
        worked = self.clock() - self._since
        if worked < self._burst:
            return
        began = self._wall()
        time.sleep(min(LONGEST_REST, self._rest * worked))
        self.paused += self._wall() - began
        self._since = self.clock()


def install(ctx: Context, budget: Mapping[str, Any], room: int) -> Bursts | None:
    """Make a run work in bursts and restart its budget; return its clock, or None for a retest, which has its own load.

    `budget` contains "burst" (seconds) and "rest" (length of a pause as a multiple of a burst). `room`: what
    `make_room` returned.
    """
    ctx.room = room
    if ctx.intensity:
        return None
    bursts = Bursts(budget["burst"], budget["rest"])
    ctx.clock, ctx.pace = bursts.clock, bursts.pause
    ctx.deadline = ctx.clock() + ctx.budget
    return bursts


def make_room(device: Device, budget: Mapping[str, Any], meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that a run can take: budget["memory"], or budget["small"] if an accelerator's memory is short.

    Limits the runtime to that memory; a CPU's runtime is not limited. Raises `Withheld` if a server would keep too
    little. The free memory of an accelerator is the driver's number after this process has allocated its context. The
    free memory of a CPU is what the kernel can give without swapping.
    """
    if device.unit == "cpu":
        return check_room(of_host(meminfo), None, {**budget, "small": 0})
    runtime = importlib.import_module("canaryd.worker.runtime.interface").of(device)
    free, total = runtime.memory(device)
    room = check_room(free, total, budget)
    runtime.limit_memory(device, room)
    return room


class Withheld(Skip):
    """The budget does not permit a run."""

    reason = Reason.BUDGET


def check_room(free: int | None, total: int | None, budget: Mapping[str, Any]) -> int:
    """Return the bytes that a run can take while `free` of `total` are free; None means unknown and is accepted.

    A run of budget["memory"] bytes leaves budget["free"] to a server, one of budget["small"] as many as it takes. 0 for
    "small" means that there are no small runs. Raises `Withheld` if too few bytes are free.
    """
    memory, small = int(budget["memory"]), int(budget["small"])
    wanted = memory + int(budget["free"])
    if free is None or free >= wanted:
        return memory
    if small and free >= 2 * small:
        return small
    what, wanted = ("a small run", 2 * small) if small else ("budget.memory", wanted)
    of = f" of {total >> 20}" if total else ""
    need = f"{what} and what stays free need {wanted >> 20} MiB"
    raise Withheld(f"{SKIPPED}{free >> 20}{of} MiB of memory are free; {need}")


def left_out(budget: Mapping[str, Any], room: int) -> Skipped | None:
    """Return what a run with `room` bytes leaves out because the device's memory is short, or None if it is not."""
    if room >= budget["memory"]:
        return None
    why = f"{SKIPPED}the device's memory is short, so this run took at most {room >> 20} MiB of it"
    return Skipped(case="all that takes more memory", reason=why)


def excuse(error: BaseException, *, capped: bool) -> str:
    """Return the reason if the budget or another user of the device caused an error; "" for any other error.

    `capped`: whether this run may use only a part of an accelerator's memory.
    """
    text = beginning((str(error).splitlines() or [""])[0], 200)
    if isinstance(error, RuntimeError) and TAKEN in str(error):
        return f"{SKIPPED}the device admits no further process (compute mode, or its holder): {text}"
    if capped and (any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__) or FULL.search(str(error))):
        return f"{SKIPPED}the run needs more memory than it may take, or the server has taken the rest: {text}"
    return ""
