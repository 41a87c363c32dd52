"""Everything a probe author needs: `SPEC = ProbeSpec(…)` and `def run(ctx) -> Iterator[Fact]`.

A probe measures and yields facts; it never decides. Time, deadline, process, errors, storage and judgement belong to
the framework. See docs/writing-a-probe.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from canaryd.model import (
    Comparison,
    Device,
    Doubt,
    Evidence,
    Exactness,
    Place,
    Reading,
    Reason,
    Recording,
    Skipped,
    Span,
    Subject,
)

__all__ = [
    "LEVELS",
    "Absent",
    "Comparison",
    "Context",
    "Device",
    "Doubt",
    "Evidence",
    "Exactness",
    "Fact",
    "Place",
    "ProbeSpec",
    "Reading",
    "Recording",
    "Skip",
    "Skipped",
    "Span",
    "Subject",
]

LEVELS = ("quick", "standard", "deep")
"""How hard to look, in ascending order."""


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """What the framework must know of a probe before it runs. Assign one to `SPEC` at module level."""

    name: str
    """Snake case, equal to the file's stem; never changed once published."""
    summary: str
    """One line: what it stresses."""
    version: int = 1
    """Raised whenever the numbers that a healthy device gives may change."""
    backends: tuple[str, ...] = ("*",)
    """Backends it applies to; ("*",) for all."""
    period: float = 1800.0
    """Seconds between two runs under `canaryd run`."""
    budget: Mapping[str, float] = field(default_factory=lambda: {"quick": 2.0, "standard": 20.0, "deep": 120.0})
    """Seconds of work a run should aim at, per level."""
    timeout: float = 60.0
    """Seconds beyond the budget after which the worker is killed."""
    every_instruction_set: bool = False
    """True: on CPUs, levels above quick run it once per instruction set."""
    numeric: bool = True
    """True: runs under `worker.python` beside torch; False: under canaryd's own interpreter (telemetry, endpoints)."""
    telemetry: bool = False
    """True: reads what the device says of itself; polled in a sweep with all other telemetry, not kept run by run."""
    opt_in: bool = False
    """True: runs only where the configuration enables it."""
    order: int = 50
    """Position within a series, ascending: cheap and telling probes first."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a name, level or number that cannot be meant."""
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", self.name):
            raise ValueError(f"name: {self.name!r} is not snake case (a-z, 0-9, _; at most 63 characters)")
        if self.version < 1:
            raise ValueError(f"version: {self.version} is not a positive integer")
        if self.period <= 0 or self.timeout <= 0:
            raise ValueError("period and timeout must be positive numbers of seconds")
        if self.telemetry and self.numeric:
            raise ValueError("telemetry: runs under canaryd's own interpreter; write numeric=False beside it")
        if set(self.budget) != set(LEVELS) or any(v <= 0 for v in self.budget.values()):
            raise ValueError(f"budget: wanted positive seconds for each of {', '.join(LEVELS)}")


class Skip(Exception):
    """Raise to end a run that cannot apply here; the argument is the reason that people will read."""

    reason = Reason.NONE
    """What the judge has to know of it."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A reading that this device or this machine does not give, and why. Never yield a zero in its place."""

    name: str
    """As `Reading.name`, or as `Reading.key` where only some of its labels are missing."""
    reason: str


Fact = Union[Reading, Comparison, Recording, Skipped, Absent]
"""What `run` may yield."""


@dataclass(kw_only=True)
class Context:
    """What a probe is given. All time, randomness and intent come from here, none from the surroundings."""

    device: Device
    level: str
    seed: int
    """Seed of this run's fresh operands."""
    budget: float
    """Seconds this run should aim at."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The probe's own section of the configuration."""
    cases: tuple[str, ...] = ()
    """Run only these cases (confirmation, `--case`); empty for all."""
    drill: str = ""
    """Name of the fault to inject into one result; "" for none."""
    baselining: bool = False
    """True: the judge lacks a baseline of what is recorded here; repeat each case so that all its modes show."""
    memory: str = ""
    """A directory that outlives the worker, for what takes long to find out; "" where there is none."""
    intensity: str = ""
    """How a retest asks harder: one of `canaryd.model.INTENSITIES`; "" for a run as usual."""
    pace: Callable[[], None] = lambda: None
    """Call it between trials. In a retest under load or after idling it loads the device, or lets it idle, for a
    moment, never past the deadline; in every other run it does nothing."""
    progress: Callable[[float, str], None] = lambda _fraction, _text: None
    """Report how far the run is (0…1) and what it is doing."""
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(init=False)
    """`clock()` value at which the budget is spent."""

    def __post_init__(self) -> None:
        """Start the budget."""
        self.deadline = self.clock() + self.budget

    @property
    def left(self) -> float:
        """Seconds of budget left, never negative."""
        return max(0.0, self.deadline - self.clock())


Run = Callable[[Context], Iterator[Fact]]
"""Type of a probe's `run`."""
