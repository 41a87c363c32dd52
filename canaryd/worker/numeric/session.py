"""The state of one run of an exact probe on one device: where cases run, which cores make goldens, and the totals."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from canaryd.facts import DEVICE_SECONDS, HOST_SECONDS, TRIALS, Comparison, Place, Reading
from canaryd.probe import Absent, Context, Fact, Skip
from canaryd.worker.numeric import faults
from canaryd.worker.numeric.operands import Problem, Product
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.tensors import can_pin, event, seconds_between, torch, visible_cores
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Runtime

PENDING = 64
"""Maximum number of pairs of timing events that a run keeps before it adds up their times (ours)."""


T = TypeVar("T")


@functools.lru_cache
def thread(task: str) -> ThreadPoolExecutor:  # noqa: ARG001
    """Return the one host thread for a task: a new thread each time would have new memory and worker threads."""
    return ThreadPoolExecutor(1)


@dataclass
class Session:
    """The state of one run of an exact probe on one device: cores, makers of goldens, fault injection, totals."""

    ctx: Context
    cores: tuple[int, ...] = field(default_factory=visible_cores)
    runtime: Runtime = field(init=False)
    injector: faults.Injector = field(init=False)
    trials: int = 0
    operations: int = 0
    began: float = field(init=False)
    """Time at which the run started, by the run's clock."""
    made_twice: int = 0
    gathers: int = 0
    """Number of times that the device gathered new operands."""
    digests: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Name of a case for which the device has no kernel → reason."""
    pools: tuple[tuple[Product, int], Problem] | None = None
    """The pools that were made last, with their product and seed; None before the first."""
    begun: tuple[tuple[str, int], Future[tuple[Problem, list[Comparison]]]] | None = None
    """Name and seed of the case that another thread is making, and the future with its data; None if there is none."""
    repeated: int = 0
    """Number of results that the device computed and compared without the host."""
    single_steps: str = ""
    """Reason why the host must start each operation of the device itself, or "" if it need not."""
    digested: int = 0
    """Number of these results of which the device compared digests of the rows."""
    undigested: str = ""
    """Reason why the device compares no digests, or ""."""
    cores_compared: bool = False
    """Whether a wrong result of this run was already computed again on each of the other cores."""
    looking: Future[Any] | None = None
    """The newest comparison that the host does in another thread, or None. The run waits for it before the run ends."""
    _device_seconds: float = 0.0
    _events: list[tuple[Any, Any]] = field(default_factory=list)
    """Pairs of a start and an end event of work on the device, whose times are not added up yet."""

    def __post_init__(self) -> None:
        """Find the fault to inject; raise `Skip` for an unknown name."""
        self.began = self.ctx.clock()
        fault = faults.FAULTS.get(self.ctx.drill)
        if self.ctx.drill and fault is None:
            raise Skip(f"unknown fault {self.ctx.drill!r}; there are {', '.join(faults.FAULTS)}")
        self.runtime = interface.of(self.ctx.device)
        self.injector = faults.Injector(fault, self.ctx.seed, self.runtime)

    def look(self, work: Callable[[], T]) -> Future[T]:
        """Return a future of `work`, which another host thread does; if the device is the host, it is already done."""
        if self.ctx.device.unit == "cpu":
            done: Future[T] = Future()
            done.set_result(work())
            return done
        self.looking = found = thread("look").submit(work)
        return found

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Add the block's time to the device's time, by the device's events if it has them, else by the run's clock.

        Events count from the block's first work on the device to its last. Gaps in which the device waits for the host
        are included, so the device's share of the time is an upper bound.
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
        """Seconds that the device has worked so far. Reading this waits for the device."""
        self._add_up()
        return self._device_seconds

    def totals(self) -> Iterator[Fact]:
        """Yield what the run counted, as readings."""
        yield Reading(name=TRIALS, value=self.trials, unit="1")
        yield Reading(name="gathers", value=self.gathers, unit="1")
        if self.single_steps:
            yield Absent(name="repeated", reason=f"this device could not repeat turns by itself: {self.single_steps}")
        else:
            yield Reading(name="repeated", value=self.repeated, unit="1")
            if self.undigested:
                yield Absent(name="digested", reason=f"this device compared goldens: {self.undigested}")
            else:
                yield Reading(name="digested", value=self.digested, unit="1")
        yield Reading(name="operations", value=self.operations, unit="1")
        yield from self.times()
        yield Reading(name="goldens_made_on_two_cores", value=self.made_twice, unit="1")

    def times(self) -> Iterator[Reading]:
        """Yield the seconds that the device worked, and those in which only the host worked."""
        device = self.device_seconds
        host = max(0.0, self.ctx.clock() - self.began - device)
        yield Reading(name=DEVICE_SECONDS, value=device, unit="seconds")
        yield Reading(name=HOST_SECONDS, value=host, unit="seconds")

    @property
    def pins(self) -> bool:
        """Whether the device's work can be pinned to one core."""
        return self.ctx.device.unit == "cpu" and self.runtime.pins

    def _draw(self, case: str) -> int:
        """Return a number drawn from the run's seed and the case's name before "@"; the sizes do not change it."""
        return derive(self.ctx.seed, f"place of {case.partition('@')[0]}")

    def place(self, case: str) -> int | None:
        """Return the CPU core that runs this case; None for all cores (half of the cases) and for other devices."""
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
        """Return two host cores that make a golden: if possible none of `avoid`, otherwise not the first of `avoid`.

        If there is only one core, it is returned twice: then making the golden twice shows temporary errors, but not
        permanent ones.
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
