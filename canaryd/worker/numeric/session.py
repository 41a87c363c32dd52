"""One run of an exact probe on one device: the places of its cases, the makers of their goldens, and its totals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from canaryd.facts import DEVICE_SECONDS, HOST_SECONDS, Comparison, Place, Reading
from canaryd.probe import Context, Skip
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.operands import Problem, Product
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import can_pin, event, seconds_between, torch, visible_cores
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.faulty import GATHERS, Faulty
from canaryd.worker.runtime.interface import Runtime

PENDING = 64
"""Most pairs of events that a run keeps before it adds up their times (ours)."""


T = TypeVar("T")


@functools.lru_cache
def thread(task: str) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the one host thread for a task: a new thread each time would have new memory and worker threads."""
    return ThreadPoolExecutor(1)


@dataclass
class Session:
    """One run of an exact probe on one device: places, cores for the goldens, fault injection, totals."""

    ctx: Context
    cores: tuple[int, ...] = field(default_factory=visible_cores)
    runtime: Runtime = field(init=False)
    injector: faults.Injector = field(init=False)
    trials: int = 0
    elements: int = 0
    operations: int = 0
    began: float = field(init=False)
    """Start of the run, by the run's clock."""
    made_twice: int = 0
    gathers: int = 0
    """Number of turns of fresh operands that the device gathered."""
    digests: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Case that the device has no kernel for → reason."""
    places: set[Place] = field(default_factory=set)
    pools: tuple[tuple[Product, int], Problem] | None = None
    """The last pools made, with their product and seed."""
    begun: tuple[tuple[str, int], Future[tuple[Problem, list[Comparison]]]] | None = None
    """Name and seed of the case that is being made in another thread, and its future result."""
    repeated: int = 0
    """Number of results of turns that the device repeated without the host."""
    single_steps: str = ""
    """Reason why the device cannot repeat turns without the host, or ""."""
    cores_compared: bool = False
    """Whether the cores have computed the operands of a wrong result one by one."""
    looking: Future[Any] | None = None
    """The newest comparison that the host does in another thread; it ends before the run does."""
    _device_seconds: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end events of work on the device, whose times are not added up yet."""

    def __post_init__(self) -> None:
        """Find the drill's fault; raise `Skip` for an unknown name."""
        self.began = self.ctx.clock()
        drill = self.ctx.drill
        if drill and drill not in faults.FAULTS and drill not in GATHERS:
            raise Skip(f"unknown fault {drill!r}; there are {', '.join((*faults.FAULTS, *GATHERS))}")
        fault = faults.FAULTS.get(drill)
        self.runtime = interface.of(self.ctx.device)
        if drill in GATHERS and self.runtime.gathers:
            self.runtime = GATHERS[drill](self.ctx.seed)
        self.injector = faults.Injector(fault, self.ctx.seed, self.runtime)

    def look(self, work: Callable[[], T]) -> Future[T]:
        """Let the host do `work` in another thread while the device computes, or at once if the host is the device."""
        if self.ctx.device.unit == "cpu":
            done: Future[T] = Future()
            done.set_result(work())
            return done
        self.looking = found = thread("look").submit(work)
        return found

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Count the block's time as the device's: by the device's events if it has them, else by the run's clock.

        Events count from the block's first work on the device to its last. Gaps in which the device waits for the host
        are included, so the share is an upper bound.
        """
        handed, start = self.ctx.clock(), event(self.ctx.device)
        yield
        if start is None:
            self._device_seconds += self.ctx.clock() - handed
            return
        self._events.append((start, event(self.ctx.device)))
        if len(self._events) >= PENDING:
            self._add_up()

    def _add_up(self) -> None:
        self._device_seconds += sum(seconds_between(start, end) for start, end in self._events)
        self._events.clear()

    @property
    def device_seconds(self) -> float:
        """Seconds that the device worked so far; waits for the device."""
        self._add_up()
        return self._device_seconds

    def times(self) -> Iterator[Reading]:
        """Yield the seconds that the device worked, and those in which only the host worked."""
        device = self.device_seconds
        host = max(0.0, self.ctx.clock() - self.began - device)
        yield Reading(name=DEVICE_SECONDS, value=device, unit="seconds")
        yield Reading(name=HOST_SECONDS, value=host, unit="seconds")

    @property
    def struck(self) -> bool:
        """Whether the drill's fault was injected."""
        return self.injector.spent or (isinstance(self.runtime, Faulty) and self.runtime.struck > 0)

    @property
    def pins(self) -> bool:
        """Whether the device's work can be pinned to one core."""
        return self.ctx.device.unit == "cpu" and self.runtime.pins

    def _draw(self, case: str) -> int:
        """Return a random number for a case, from the run's seed: a confirmation of the case gets the same one."""
        return derive(self.ctx.seed, f"place of {case.partition('@')[0]}")

    def place(self, case: str) -> int | None:
        """Return the core that runs a case on a CPU, for half of the cases; None for all cores together."""
        draw = self._draw(case)
        if not self.pins or draw & 1:
            return None
        return self.cores[(draw >> 1) % len(self.cores)]

    def place_of(self, core: int | None) -> Place:
        """Return the `Place` of work on one core, or on all of them (None)."""
        if not self.pins:
            return Place(unit="device")
        if core is None:
            return Place(unit="threads", numbers=(torch.get_num_threads(),))
        return Place(unit="core", numbers=(core,)) if can_pin() else Place(unit="thread")

    def makers(self, case: str, *avoid: int | None) -> tuple[int, int]:
        """Return two host cores to make a golden on, not in `avoid` if possible (its first above all).

        Both are the same if there is only one: then making it twice shows errors that pass, but not those that stay.
        """
        others = [c for c in self.cores if c not in avoid] or [c for c in self.cores if c not in avoid[:1]]
        others = others or list(self.cores)
        first = others[(self._draw(case) >> 20) % len(others)]
        second = next((c for c in [*others[::-1], *self.cores] if c != first), first)
        return first, second

    @staticmethod
    def place_of_makers(first: int, second: int) -> Place:
        """Return the `Place` of a golden that these two cores made."""
        return Place(unit="core", numbers=(first, second)) if can_pin() else Place(unit="threads")
