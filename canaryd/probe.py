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
"""Levels of thoroughness, in ascending order."""


@dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """The properties of a probe that the framework needs before a run. Assign one to `SPEC` at module level."""

    name: str
    """Snake case, equal to the file's stem. Never change it after publication."""
    summary: str
    """One line that says what the probe tests."""
    version: int = 1
    """Version of the probe. Increase it with every change after which a healthy device can give other numbers."""
    backends: tuple[str, ...] = ("*",)
    """Backends on which the probe runs; ("*",) for all backends of its runtimes."""
    runtimes: tuple[str, ...] = (TORCH,)
    """Runtimes through which the probe can test; ("*",) for all. A probe that itself calls torch keeps the default."""
    period: float = 1800.0
    """Seconds between two runs under `canaryd run`."""
    budget: Mapping[str, float] = field(default_factory=lambda: {"quick": 2.0, "standard": 20.0, "deep": 120.0})
    """Level → seconds of work that a run should take."""
    timeout: float = 60.0
    """Seconds that a run can take beyond its budget. After that the worker is killed."""
    every_instruction_set: bool = False
    """True: on CPUs, at levels above quick, the probe runs once for each instruction set."""
    numeric: bool = True
    """True: the probe runs under `worker.python`, with torch. False: under canaryd's interpreter (telemetry,
    endpoints)."""
    telemetry: bool = False
    """True: the probe reads what the device reports. It is polled with all other telemetry; not every run is stored."""
    settings: tuple[str, ...] = ()
    """Names of the probe's own settings, which `canaryd config check` compares with those that are configured."""
    opt_in: bool = False
    """True: the probe runs only if the configuration enables it."""
    group: bool = False
    """True: the probe uses all devices of a backend, or all cores, at once. It runs in `canaryd check` from level
    standard on, and never while a server uses the device."""
    order: int = 50
    """Position in a series of probes: lower numbers run first. Cheap and informative probes have low numbers."""

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
    """Raised by a probe to end a run that is impossible on this device. The argument is the reason, for people."""

    reason = Reason.NONE
    """The `Reason` that is stored with the run, for the judge."""


NEAREST = 3
"""Number of similar case names that are suggested for an unknown one."""


class NoCase(Skip):
    """Raised if a probe has none of the cases in `ctx.cases`."""

    reason = Reason.NO_CASE

    def __init__(self, asked: Sequence[str], names: Iterable[str]) -> None:
        """Set the message from the cases that were `asked` for and the `names` of the probe's cases on this device."""
        stable = list(dict.fromkeys(name.partition("@")[0] for name in names))
        near = dict.fromkeys(n for want in asked for n in difflib.get_close_matches(want, stable, NEAREST))
        self.nearest = tuple(near)[:NEAREST] or tuple(stable[:1])
        """Cases that the probe has: those whose names are nearest, or any one."""
        super().__init__(f"no case matches {', '.join(asked)}; it has e.g. {', '.join(self.nearest)}")


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A reading that this device or machine does not have, with the reason. Yield it instead of a reading of 0."""

    name: str
    """`Reading.name` of the reading, or its `Reading.key` if the reading is absent only with certain labels."""
    reason: str
    code: int = 0
    """The driver's error code, or 0 if there was none."""


Fact = Union[Reading, Comparison, Recording, Skipped, Absent]
"""The types of objects that `run` can yield."""


@dataclass(kw_only=True)
class Context:
    """The input of a probe. Take time, randomness and settings only from here."""

    device: Device
    level: str
    seed: int
    """Seed for the random operands of this run."""
    budget: float
    """Seconds that this run should take."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The probe's own settings from the configuration."""
    cases: tuple[str, ...] = ()
    """The only cases to run (for a confirmation, or `--case`); empty for all."""
    peers: tuple[Device, ...] = ()
    """The other devices of the group, if the probe tests a group. No other run uses them meanwhile."""
    drill: str = ""
    """Name of the fault to inject into one result; "" for none."""
    baselining: bool = False
    """True: some legitimate results of these cases are still unknown. Repeat each case to find more of them."""
    memory: str = ""
    """A directory that is kept between runs, for results that take long to compute; "" if there is none."""
    room: int = 0
    """Bytes that the run can take on the device, and as many on the host, beside a server; 0 if no server uses the
    device."""
    intensity: str = ""
    """The way in which a retest is harder, one of `canaryd.model.INTENSITIES`; "" for a normal run."""
    pace: Callable[[], None] = lambda: None
    """Function to call between trials. In a retest under load it loads the device for a moment; in a retest after
    idling it lets the device idle for a moment. It returns before the deadline, and does nothing in other runs."""
    progress: Callable[[float, str], None] = lambda _fraction, _text: None
    """Function to call with the finished part of the run (0…1) and a text about what the probe is doing."""
    clock: Callable[[], float] = time.monotonic
    deadline: float = field(init=False)
    """Value of `clock()` at which the budget is used up."""

    def __post_init__(self) -> None:
        """Start the budget: set `deadline`."""
        self.deadline = self.clock() + self.budget

    @property
    def left(self) -> float:
        """Seconds left in the budget, never negative."""
        return max(0.0, self.deadline - self.clock())

    def late(self, case: str, before: str = "its turn") -> Skipped:
        """Return the fact to yield for `case` if the time budget ended before the step that `before` names."""
        return Skipped(case=case, reason=f"the budget of {self.budget:g} s was spent before {before}", late=True)


Run = Callable[[Context], Iterator[Fact]]
"""Type of a probe's `run`."""
