"""The tools with which a part of a characterisation works: the device, its time, and the list of observations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from canaryd.facts import beginning
from canaryd.model import Device
from canaryd.worker.numeric import evidence, faults
from canaryd.worker.numeric.cases import QUOTED
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.operands import Inexact, Problem
from canaryd.worker.numeric.tensors import host_same_bits
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation, Runtime
from canaryd_lab.observation import Claim, Observation, Seen

BLIND = "blind"
"""Name of the drill in which every comparison says "equal", to show that the controls notice this."""
SEED = 20_261_123
"""Seed of all operands, so that two characterisations of one device compute the same data."""
Compute = Callable[[tuple[Any, ...], Any], Any]
Progress = Callable[[float, str], None]
Values = Mapping[str, float | int | str]


class DeviceFailed(Exception):
    """The device failed, and nothing more can be computed in this process."""


@dataclass
class Bench:
    """One part (group of tests) of a characterisation while it runs."""

    device: Device
    seconds: float
    """Seconds that the part may take."""
    drill: str = ""
    """The name of a fault in `faults.FAULTS` to inject into every strict result, or `BLIND`; "" for none."""
    progress: Progress = lambda _fraction, _text: None
    clock: Callable[[], float] = time.monotonic
    seen: list[Observation] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    """A directory that is kept between characterisations; "" if there is none."""
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock of the part."""
        self.begun = self.clock()

    @property
    def runtime(self) -> Runtime:
        """The runtime through which the device is characterised."""
        return interface.of(self.device)

    def computes(self, operation: Operation) -> Compute:
        """Return a function that computes an operation on the device."""
        return partial(self.runtime.run, operation)

    @property
    def left(self) -> float:
        """Return the seconds that the part has left; 0 if its time is spent."""
        return max(0.0, self.begun + self.seconds - self.clock())

    def add(
        self, name: str, claim: Claim, seen: Seen, detail: str = "", *, error: str = "", values: Values | None = None
    ) -> None:
        """Record one observation: `claim` is what the result should be, `seen` what it was."""
        self.progress(min(0.99, 1 - self.left / self.seconds), name)
        self.seen.append(
            Observation(name=name, claim=claim, seen=seen, error=error, detail=detail, values=values or {})
        )

    def out_of_time(self, name: str, claim: Claim) -> bool:
        """Return whether the part's time is spent; if it is, record the observation `name` as not reached."""
        if self.left > 0:
            return False
        self.add(name, claim, Seen.NOT_REACHED, f"the part's {self.seconds:g} s were spent before its turn")
        return True

    def note_error(self, name: str, claim: Claim, caught: Exception) -> None:
        """Record an error as an observation with the error's kind. Raises `DeviceFailed` if the device failed."""
        lines = [line.strip() for line in str(caught).splitlines() if line.strip()]
        text = f"{type(caught).__name__}: {(lines or ['no reason given'])[0]}"
        kind = "harness" if isinstance(caught, Inexact) else kind_of(caught).value
        if kind == ErrorKind.REFUSED.value:
            self.add(name, claim, Seen.REFUSED, beginning(text, QUOTED))
            return
        self.add(name, claim, Seen.RAISED, beginning(text, 4 * QUOTED), error=kind)
        if kind == ErrorKind.DEVICE.value:
            raise DeviceFailed(text) from caught

    def same(self, result: Any, golden: Any) -> bool:
        """Return whether a result equals its golden both on the device and on the host."""
        if self.drill == BLIND:
            return True
        runtime = self.runtime
        on_host = host_same_bits(runtime.download(result), runtime.download(golden))
        return runtime.agree([result], golden)[0] and on_host

    def verify(self, name: str, build: Callable[[], Problem], compute: Compute, claim: Claim = Claim.STRICT) -> None:
        """Upload and compute one problem twice; record whether both results equal the golden bit for bit."""
        if self.out_of_time(name, claim):
            return
        try:
            self._verify(name, build, compute, claim)
        except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
            self.note_error(name, claim, caught)

    def _verify(self, name: str, build: Callable[[], Problem], compute: Compute, claim: Claim) -> None:
        problem = build()
        if not problem.witnessed:
            self.add(name, claim, Seen.RAISED, "integer and float64 arithmetic of the host disagree", error="harness")
            return
        fault = faults.FAULTS.get(self.drill) if claim is Claim.STRICT else None
        injector = faults.Injector(fault, SEED, self.runtime, target=name)
        wrong = None
        for _ in range(2):
            operands = self.runtime.upload(problem.operands, self.device)
            (golden,) = self.runtime.upload((problem.golden,), self.device)
            operands = injector.before(name, operands, 0)
            result = injector.after(name, compute(operands, None))
            if not self.same(result, golden):
                wrong = result
        if wrong is None:
            self.add(name, claim, Seen.RIGHT)
            return
        again = build()
        pairs = [*zip(problem.operands, again.operands, strict=True), (problem.golden, again.golden)]
        if not all(host_same_bits(a, b) for a, b in pairs):
            self.add(name, claim, Seen.RAISED, "the host made operands and golden twice, unlike", error="harness")
            return
        observed = self.runtime.download(wrong)
        found = evidence.collect(problem.golden, observed)
        self.add(name, claim, Seen.WRONG, found.pattern, values={"wrong": found.wrong, "elements": found.total})
