"""The messages between supervisor and worker."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canaryd.codec import from_json
from canaryd.facts import Comparison, Reading, Recording, Skipped, shared
from canaryd.model import Device, Outcome, Reason
from canaryd.probe import Absent, Fact, ProbeSpec

FACT_TYPES: Mapping[str, Any] = {kind.__name__: kind for kind in (Comparison, Recording, Skipped)}


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The command, environment and priority with which a worker is started."""

    python: str = sys.executable
    """Path of the interpreter of the stack under test; Python 3.10 or newer."""
    command: tuple[str, ...] = ()
    """Command that starts an interpreter elsewhere, e.g. docker exec -i vllm python3; it replaces `python`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that override all variables that canaryd sets or removes."""
    nice: int = 0
    """Nice level. Above 0, the worker yields to a server and is the first to be killed if memory is short."""
    only: Device | None = None
    """The only device that the worker can see, or None if it can see all devices."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A request to run one probe on one device."""

    probe_path: Path
    spec: ProbeSpec
    device: Device
    level: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    """Names of the cases to run; empty means all cases."""
    peers: tuple[Device, ...] = ()
    """The other devices of the group, for a probe that tests a group."""
    drill: str = ""
    confirms: str = ""
    trigger: str = ""
    baselining: bool = False
    memory: str = ""
    intensity: str = ""
    """Intensity of a retest, one of `canaryd.model.INTENSITIES`, or "" for a normal run."""
    budget: float | None = None
    """Seconds of work to aim at, or None for the probe's own budget at this level."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Limits of a run that shares its device with a server (`canaryd.engine.budget.allowance`); empty if there is no
    server."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The torch, the devices and the probes that a worker's interpreter found."""

    torch: str | None = None
    """Version of torch, or None if there is no torch."""
    torch_reason: str = ""
    """The reason why there is no torch, or why the worker failed; "" if torch was found."""
    lost: str = ""
    """The interpreter that gave no answer about torch and devices, or "" if it answered; `torch_reason` has the
    reason."""
    devices: tuple[Device, ...] = ()
    stack: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[Path, ProbeSpec | str] = field(default_factory=dict)
    """Probe file → its spec, or its error as text. Files that could not be loaded because `lost` is set are left
    out."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The devices that a runtime other than torch reaches from its interpreter."""

    devices: tuple[Device, ...] = ()
    problem: str = ""
    """The reason why no devices could be listed, or "" if the runtime answered."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The devices that the vendor modules found on this machine, under canaryd's own interpreter."""

    devices: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """Vendor module → its devices; modules that failed are left out."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Vendor module → the reason why it failed."""
    failing: Mapping[str, str] = field(default_factory=dict)
    """The entries of `unavailable` for vendors whose software is installed: their failure is a problem."""
    facts: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def new_run_id(now: float) -> str:
    """Return a new run id; ids sort by `now` (epoch s).

    An id has 40 random bits: among a thousand ids of one millisecond, two are equal with a chance of 1 in two million.
    """
    return f"{int(now * 1000):012x}-{secrets.token_hex(5)}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a run, in the form that the worker sends."""

    outcome: Outcome
    seconds: float
    paused: float = 0.0
    """Seconds, out of `seconds`, in which the run paused for a server."""
    detail: str = ""
    reason: Reason = Reason.NONE
    stack: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds < 0:
            raise ValueError(f"seconds is {self.seconds}, but must not be negative")


MOST = 2**63
"""Limit (exclusive) for numbers in messages, because the store holds only smaller ones (SQLite's INTEGER)."""
MOST_COUNTED = 2**40
"""Limit (exclusive) for the trials and for the uploads of one comparison: sums over a run stay below `MOST`."""
MOST_READ = 2**64
"""Limit (exclusive) for readings, larger than `MOST`: drivers set all 64 bits of a counter that they do not know."""


def parse_text(value: object) -> str:
    """Return `value` if it is a text; raise `TypeError` for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not text")
    return value


def parse_fact(item: Any) -> Reading | Absent:
    """Return a reading from [name, value, unit, labels], or a missing one from [name, reason, code].

    Raises `ValueError` for anything else. Written by hand, because telemetry sends about 2,000 facts at a time and
    `from_json` takes ten times as long.
    """
    if isinstance(item, list) and len(item) == 3:
        name, reason, code = item
        if isinstance(name, str) and isinstance(reason, str) and type(code) is int and abs(code) < MOST:
            return Absent(name=name, reason=reason, code=code)
    if not (isinstance(item, list) and len(item) == 4):
        raise ValueError(f"not a reading: {item!r:.100}")
    name, value, unit, labels = item
    texts = isinstance(name, str) and isinstance(unit, str) and isinstance(labels, dict)
    if not (texts and isinstance(value, (str, int, float)) and all(isinstance(v, str) for v in labels.values())):
        raise ValueError(f"not a reading: {item!r:.100}")
    if isinstance(value, int) and abs(value) >= MOST_READ:
        raise ValueError(f"{name} has more than 64 bits")
    return Reading(
        name=shared(name),
        value=shared(value) if isinstance(value, str) else value,
        unit=shared(unit),
        labels={shared(k): shared(v) for k, v in labels.items()},
    )


def facts_in(kind: str, message: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the facts in a message of this kind; raise `LookupError`, `TypeError` or `ValueError` if malformed."""
    if kind == "readings":
        yield from map(parse_fact, message["values"])
    elif kind == "fact":
        fact: Fact = from_json(FACT_TYPES[message["type"]], message["value"])
        if isinstance(fact, Comparison) and not (
            0 <= fact.wrong_trials <= fact.trials < MOST_COUNTED and 0 <= fact.uploads < MOST_COUNTED
        ):
            raise ValueError(f"{fact.wrong_trials} wrong of {fact.trials} trials of {fact.uploads} uploads")
        yield fact
    else:
        raise ValueError(f"unknown kind {kind!r}")
