"""Everything a probe author needs: `SPEC = ProbeSpec(…)` and `def run(ctx) -> Iterator[Fact]`.

A probe measures and yields facts; it never judges. The framework handles time, processes, errors, storage and
verdicts. See docs/writing-a-probe.md.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from canaryd.facts import Comparison, Doubt, Evidence, Exactness, Place, Reading, Recording, Skipped, Span, Subject
from canaryd.model import TORCH, Device, Reason

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
    "NoCase",
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
"""How thoroughly to test, in ascending order."""


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """What the framework must know about a probe before it runs. Assign one to `SPEC` at module level."""

    name: str
    """Snake case, equal to the file's stem. Never change it after publication."""
    summary: str
    """One line: what it tests."""
    version: int = 1
    """Raise it whenever the numbers of a healthy device may change."""
    backends: tuple[str, ...] = ("*",)
    """Backends it applies to; ("*",) for all of its runtimes."""
    runtimes: tuple[str, ...] = (TORCH,)
    """Runtimes through which it can test; ("*",) for all. A probe that calls torch itself keeps the default."""
    period: float = 1800.0
    """Seconds between two runs under `canaryd run`."""
    budget: Mapping[str, float] = field(default_factory=lambda: {"quick": 2.0, "standard": 20.0, "deep": 120.0})
    """Level → seconds of work that a run should aim at."""
    timeout: float = 60.0
    """Seconds that a run may take beyond its budget before the worker is killed."""
    every_instruction_set: bool = False
    """True: on CPUs, levels above quick run it once for each instruction set."""
    numeric: bool = True
    """True: runs under `worker.python`, with torch. False: under canaryd's own interpreter (telemetry, endpoints)."""
    telemetry: bool = False
    """True: reads what the device reports. It is polled with all other telemetry, and not every run is kept."""
    opt_in: bool = False
    """True: runs only if the configuration enables it."""
    group: bool = False
    """True: uses all devices of a backend at once, or all cores. It runs in `canaryd check` from level standard on, and
    never beside a server."""
    order: int = 50
    """Position within a series, ascending: cheap and informative probes first."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for an invalid name, level or number."""
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", self.name):
            raise ValueError(f"name: {self.name!r} is not snake case (a-z, 0-9, _; at most 63 characters)")
        if self.version < 1:
            raise ValueError(f"version: {self.version} is not a positive integer")
        if self.period <= 0 or self.timeout <= 0:
            raise ValueError("period and timeout must be positive numbers of seconds")
        if self.telemetry and self.numeric:
            raise ValueError("telemetry: runs under canaryd's own interpreter; also write numeric=False")
        if set(self.budget) != set(LEVELS) or any(v <= 0 for v in self.budget.values()):
            raise ValueError(f"budget: wanted positive seconds for each of {', '.join(LEVELS)}")


class Skip(Exception):
    """Raise it to end a run that does not apply here; the argument is the reason that people will read."""

    reason = Reason.NONE
    """What the judge has to know of it."""


NEAREST = 3
"""Names of cases that are suggested for one that does not exist."""


class NoCase(Skip):
    """Raise it where a probe has none of the cases that `ctx.cases` asks for."""

    reason = Reason.NO_CASE

    def __init__(self, asked: Sequence[str], names: Iterable[str]) -> None:
        """Make the message; `names` are the cases that the probe has on this device."""
        stable = list(dict.fromkeys(name.partition("@")[0] for name in names))
        near = dict.fromkeys(n for want in asked for n in difflib.get_close_matches(want, stable, NEAREST))
        self.nearest = tuple(near)[:NEAREST] or tuple(stable[:1])
        """Cases that the probe has: those whose names are nearest, or any one."""
        super().__init__(f"no case matches {', '.join(asked)}; it has e.g. {', '.join(self.nearest)}")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A reading that this device or machine does not have, and why. Never yield a zero instead."""

    name: str
    """The `Reading.name`, or the `Reading.key` if only some of its labels are missing."""
    reason: str
    code: int = 0
    """The driver's code for it, where one was given."""


Fact = Union[Reading, Comparison, Recording, Skipped, Absent]
"""What `run` may yield."""


@dataclass(kw_only=True)
class Context:
    """What a probe gets. Take time, randomness and settings only from here."""

    device: Device
    level: str
    seed: int
    """Seed of this run's new operands."""
    budget: float
    """Seconds that this run should aim at."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The probe's own settings in the configuration."""
    cases: tuple[str, ...] = ()
    """Run only these cases (confirmation, `--case`); empty for all."""
    peers: tuple[Device, ...] = ()
    """Of a probe that tests a group: the other devices of it, which no other run uses meanwhile."""
    drill: str = ""
    """Name of the fault to inject into one result; "" for none."""
    baselining: bool = False
    """True: the judge has no baseline of these recordings yet; repeat each case so that all its modes show."""
    memory: str = ""
    """A directory that outlives the worker, for results that take long to compute; "" where there is none."""
    room: int = 0
    """Bytes that the run may take on the device and on the host, beside a server; 0 where it has them to itself."""
    intensity: str = ""
    """How a retest is harder: one of `canaryd.model.INTENSITIES`; "" for a normal run."""
    pace: Callable[[], None] = lambda: None
    """Call it between trials. In a retest under load or after idling it loads the device, or lets it idle, for a
    moment, and never past the deadline. In every other run it does nothing."""
    progress: Callable[[float, str], None] = lambda _fraction, _text: None
    """Report how far the run is (0…1) and what it is doing."""
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(init=False)
    """Value of `clock()` at which the budget is used up."""

    def __post_init__(self) -> None:
        """Start the budget."""
        self.deadline = self.clock() + self.budget

    @property
    def left(self) -> float:
        """Seconds of budget left, never negative."""
        return max(0.0, self.deadline - self.clock())

    def late(self, case: str, before: str = "its turn") -> Skipped:
        """Return that a part was left out, because the budget was spent `before`."""
        return Skipped(case=case, reason=f"the budget of {self.budget:g} s was spent before {before}", late=True)


Run = Callable[[Context], Iterator[Fact]]
"""Type of a probe's `run`."""
