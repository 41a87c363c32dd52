"""What supervisor and worker say to each other."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.model import (
    Comparison,
    Device,
    Outcome,
    Reading,
    Reason,
    Recording,
    Skipped,
    shared,
)
from canaryd.probe import Absent, ProbeSpec

FACTS: Mapping[str, Any] = {kind.__name__: kind for kind in (Reading, Comparison, Recording, Skipped, Absent)}


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """How to start a worker."""

    python: str = sys.executable
    """Interpreter of the stack under test; Python 3.10 or newer."""
    command: tuple[str, ...] = ()
    """Instead of `python`: a command that ends in an interpreter elsewhere, e.g. docker exec -i vllm python3."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set last, above everything that canaryd sets or removes."""
    nice: int = 0
    """Nice level at which it runs beside a server, where it also goes first when memory runs out; 0 for neither."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to run, and on what."""

    probe_path: Path
    spec: ProbeSpec
    device: Device
    level: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    """Only these cases; empty for all."""
    drill: str = ""
    confirms: str = ""
    trigger: str = ""
    baselining: bool = False
    memory: str = ""
    intensity: str = ""
    """How a retest asks harder: one of `canaryd.model.INTENSITIES`; "" for a run as usual."""
    budget: float | None = None
    """Seconds of work to aim at; None for what the probe's spec says of the level."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """What the run may take beside a server (`canaryd.budget.allowance`); empty where it has the device to itself."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a worker's interpreter has to offer."""

    python: str = ""
    """Its version; "" where it could not be started."""
    torch: str | None = None
    """torch's version."""
    torch_reason: str = ""
    """Why there is no torch, or why nothing could be found out."""
    devices: tuple[Device, ...] = ()
    stack: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[Path, ProbeSpec | str] = field(default_factory=dict)
    """Probe file → its spec, or what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What the telemetry modules of canaryd's own interpreter find on this machine."""

    devices: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """Vendor module → its devices; a module that could not be asked is not in it."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Vendor module → why it could not be asked."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """Those among them that should have answered: something of the vendor is installed."""
    facts: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def new_run_id(now: float) -> str:
    """Return an id that sorts by `now` (seconds since the epoch) and never repeats.

    40 random bits: of a thousand ids of one millisecond two are the same once in two million times.
    """
    return f"{int(now * 1000):012x}-{secrets.token_hex(5)}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a worker says at the end of a run."""

    outcome: Outcome
    seconds: float
    paused: float = 0.0
    """Seconds of these that the run paused beside a server."""
    detail: str = ""
    reason: Reason = Reason.NONE
    stack: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"a run of {self.seconds} seconds")


def parse_text(value: object) -> str:
    """Return a text; raise `TypeError` for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value


def parse_fact(item: Any) -> Reading | Absent:
    """Return what stands for [name, value, unit, labels] or [name, reason]; raise `ValueError` for anything else.

    By hand: telemetry sends some two thousand of them at a time, and `from_json` takes ten times as long.
    """
    if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], str):
        return Absent(name=item[0], reason=item[1])
    if not (isinstance(item, list) and len(item) == 4):
        raise ValueError(f"no reading: {item!r:.100}")
    name, value, unit, labels = item
    texts = isinstance(name, str) and isinstance(unit, str) and isinstance(labels, dict)
    if not (texts and isinstance(value, (str, int, float)) and all(isinstance(v, str) for v in labels.values())):
        raise ValueError(f"no reading: {item!r:.100}")
    return Reading(
        name=shared(name),
        value=shared(value) if isinstance(value, str) else value,
        unit=shared(unit),
        labels={shared(k): shared(v) for k, v in labels.items()},
    )
