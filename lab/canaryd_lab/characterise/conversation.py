"""Ask a worker to carry out parts (groups of tests) of a characterisation; after a failure a new worker continues."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from canaryd.codec import from_json, to_json
from canaryd.engine.catalogue import Entry
from canaryd.engine.engine import Engine
from canaryd.facts import Subject
from canaryd.model import Device, Outcome, Run
from canaryd.supervisor.protocol import RunRequest
from canaryd.supervisor.series import Series
from canaryd_lab.characterise.results import Part, Result
from canaryd_lab.observation import Claim, Observation, Seen

MODULE = "characterise"
START = 4.0
"""Seconds that the start of a worker takes, mostly for the import of torch (ours)."""
GRACE = 45.0
"""Seconds that a part gets beyond its own time, for importing torch and loading kernels, before it is killed (our
choice)."""
SEED = 20_261_123


@dataclass
class Conversation:
    """Requests to the worker that carries out the parts of a characterisation on one device."""

    engine: Engine
    device: Device
    drill: str = ""
    scale: float = 1.0
    """Factor on the time of every part: the minutes that the user gave, divided by ten."""
    on_progress: Callable[[float, str], None] = lambda _fraction, _text: None
    deadline: float = math.inf
    """Value of `time.monotonic()` at which the user's minutes are spent and the worker is killed."""
    last: str = field(default="", init=False)
    """The last activity that the worker reported."""
    _series: Series | None = field(default=None, init=False)

    def close(self) -> None:
        """End the worker."""
        if self._series is not None:
            self.engine.workers.end(self._series)
            self._series = None

    def start(self, *, numeric: bool = True, together: bool = False) -> Series:
        """Start a worker; return its series, which the caller ends. Unless `together`, the shared worker ends first."""
        if not together:
            self.close()
        device = self.device if numeric else None
        return self.engine.workers.start("", self._progress, numeric=numeric, device=device)

    def _progress(self, fraction: float, text: str) -> None:
        self.last = text
        self.on_progress(fraction, text)

    def within(self, timeout: float) -> float:
        """Return `timeout` (s), shortened if the user's minutes end earlier."""
        return max(0.1, min(timeout, self.deadline - time.monotonic()))

    @property
    def is_late(self) -> bool:
        """Whether the user's minutes are spent. A part that was cut short for this reason has no result."""
        return time.monotonic() > self.deadline - 0.5

    def listed(self) -> list[Part]:
        """Return the parts that the worker carries out; raise `RuntimeError` if the worker does not list them."""
        outcome, value, detail = self.ask({"part": "", "device": to_json(self.device)}, 60.0)
        if outcome is not Outcome.COMPLETED:
            raise RuntimeError(f"{outcome.value}: {detail}")
        return [from_json(Part, part) for part in value["parts"]]

    def ask(self, arguments: Mapping[str, Any], timeout: float) -> tuple[Outcome, dict[str, Any], str]:
        """Return (outcome, data, detail) of a request to the shared worker, which is replaced after a failure."""
        if self._series is None:
            self._series = self.start(together=True)
        answer = self._series.answer(MODULE, arguments, self.within(timeout))
        if answer[0] not in (Outcome.COMPLETED, Outcome.SKIPPED):
            self.close()
        return answer

    def seconds(self, part: Part) -> float:
        """Return the seconds that a part may work; the start of its workers is not included."""
        return max(1.0, part.seconds * self.scale)

    def needed(self, part: Part) -> float:
        """Return the seconds that a part takes, including the start of its workers."""
        return self.seconds(part) + part.workers * START

    def carry_out(self, part: Part, **more: Any) -> Result:
        """Let the worker carry out a part, with `more` arguments; return a result even if the part fails."""
        self.last = ""
        limit = self.seconds(part)
        arguments = {
            "part": part.name, "device": to_json(self.device), "seconds": limit, "drill": self.drill,
            "memory": str(self.engine.config.state_dir / "memory"), **more,
        }  # fmt: skip
        outcome, value, detail = self.ask(arguments, limit + GRACE)
        seen = from_json(tuple[Observation, ...], value.get("observations", []))
        if outcome not in (Outcome.COMPLETED, Outcome.SKIPPED) and self.last:
            detail = f"about {self.last}: {detail}"
        if any(o.error == "device" for o in seen):
            self.close()  # its context is lost
        return result(part, outcome, detail, seen, value.get("facts", {}))

    def run_probe(
        self,
        entry: Entry,
        seconds: float,
        *,
        cases: tuple[str, ...] = (),
        series: Series | None = None,
        **more: Any,
    ) -> Run:
        """Run a probe and return its run. The run is not stored, so it counts neither for nor against the device."""
        own = series or self.start()
        request = RunRequest(
            probe_path=entry.file.path,
            spec=entry.spec,
            device=self.device,
            level="quick",
            seed=SEED,
            settings=self.engine.settings(entry.spec.name).settings,
            cases=cases,
            budget=seconds,
            **more,
        )
        try:
            return own.run(request, self.within(seconds + self.engine.timeout(entry.spec, "quick") + GRACE))
        finally:
            if series is None:
                self.engine.workers.end(own)


def result(
    part: Part,
    outcome: Outcome,
    detail: str,
    seen: tuple[Observation, ...] = (),
    facts: Mapping[str, Any] | None = None,
) -> Result:
    """Return the result of a part, without start and duration, which the caller adds. `seen`: its observations."""
    return Result(
        name=part.name,
        title=part.title,
        rank=part.rank,
        outcome=outcome,
        detail=detail,
        observations=seen,
        facts=facts or {},
    )


def observed(run: Run) -> tuple[Observation, ...]:
    """Return the facts of a probe's run as observations: right, wrong, recorded, or skipped by the probe."""
    seen = []
    for comparison in run.comparisons:
        pattern = comparison.evidence.pattern if comparison.evidence else ""
        if comparison.subject is not Subject.DEVICE:
            state, error = Seen.RAISED, "harness"
        else:
            state, error = Seen.WRONG if comparison.wrong else Seen.RIGHT, ""
        values = {"trials": comparison.trials, "wrong_trials": comparison.wrong_trials}
        name = comparison.case
        seen.append(Observation(name=name, claim=Claim.STRICT, seen=state, error=error, detail=pattern, values=values))
    for case in dict.fromkeys(r.case for r in run.recordings):
        digests = {r.digest for r in run.recordings if r.case == case}
        values = {"vectors": len(digests)}
        seen.append(Observation(name=case, claim=Claim.OPEN, seen=Seen.MEASURED, values=values))
    for skipped in run.skipped:
        name, why = skipped.case, skipped.reason
        seen.append(Observation(name=name, claim=Claim.STRICT, seen=Seen.LEFT_OUT, detail=why))
    return tuple(seen)
