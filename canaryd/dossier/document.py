"""The document of a dossier, from which JSON, page and OCP output are made (docs/dossier.schema.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from canaryd import __version__
from canaryd.config.settings import Config
from canaryd.model import Device, Event, Run, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

SCHEMA = "canaryd.dossier/2"
MEASURED = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings that show the conditions of a run."""


class DossierError(RuntimeError):
    """Raised if the dossier cannot be written. The message says what is wrong and what to do."""


class OutputError(DossierError):
    """Raised if the output directory for the dossier cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A number of results, and of wrong ones among them."""

    wrong: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Rate(Share):
    """A number of independent trials, and of wrong ones among them, with the 95 % interval (Clopper and Pearson)."""

    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Counts of uploads of operands and of results. Only uploads are independent, so only they have an interval."""

    uploads: Rate
    results: Share


@dataclass(frozen=True, kw_only=True)
class Spot(Tried):
    """The results that were computed at one place: a core, an SM, a group of them, or the device."""

    place: str
    unit: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FailingCase(Tried):
    """A test case that failed: the counts of all its results with equal operands and one instruction set."""

    probe: str
    version: int
    instruction_set: str
    case: str
    shape: str
    seed: int
    subject: str
    exactness: str
    characterised: bool
    characterised_by: str
    first: float
    last: float
    runs: Rate
    run_ids: tuple[str, ...]
    places: tuple[Spot, ...]
    pattern: str
    reproduced: str
    lines: Mapping[str, str]
    zeroed: int
    nonfinite: int
    wrong_elements: int
    elements_of_result: int
    elements: tuple[Mapping[str, Any], ...]
    format: str
    bits: Mapping[str, int]
    repro: str
    core: int | None = None
    """The processor core on which the case failed most often, or None if no core is known."""
    needed: int
    """Number of runs in which the fault appears at least once with 95 % probability."""
    exhibit: str = ""
    """The directory with the case's wrong elements and, if there are any, operands and script; "" if there is none."""
    exhibit_absent: str = ""
    """The reason why there is no script that repeats the case, or "" if there is one."""
    script: str = ""
    """The command that repeats the case without canaryd, or "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class Totals(Tried):
    """The results of all runs of one probe."""

    probe: str
    runs: int
    not_completed: int
    rules_out: float | None
    recordings: int
    unknown: int
    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Happening:
    """An entry of the timeline."""

    at: float
    kind: str
    text: str
    conditions: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The names and numbers that identify the part and the machine that contains it."""

    name: str
    uuid: str
    serial: str
    weak: bool
    backend: str
    model: str
    host: str
    server: Mapping[str, str]
    first_seen: float | None
    last_seen: float | None
    present: bool
    parent: str
    torch_name: str
    detail: Mapping[str, str]
    stack: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a dossier: everything that the store has about one device."""

    schema: str = SCHEMA
    canaryd: str = __version__
    generated: float
    timezone: str = "UTC"
    kind: str
    title: str
    summary: str
    why_not_rma: str
    drill: str
    redacted: bool = False
    verdict: Mapping[str, Any]
    identity: Identity
    failures: tuple[FailingCase, ...]
    failures_omitted: int
    bits: tuple[Mapping[str, Any], ...]
    places: tuple[Spot, ...]
    probes: tuple[Totals, ...]
    peers: tuple[Mapping[str, Any], ...]
    timeline: tuple[Happening, ...]
    timeline_omitted: int
    selftests: tuple[Mapping[str, Any], ...]
    acks: tuple[Mapping[str, Any], ...]
    reproduce: tuple[Mapping[str, str], ...]
    next_step: tuple[str, ...]
    not_checked: tuple[str, ...]
    problems: tuple[str, ...]
    contents: tuple[Mapping[str, str], ...] = ()
    absent: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The stored data from which the dossier is made. Each item is read from the store only once."""

    store: Store
    config: Config
    device: Device
    record: DeviceRecord | None
    runs: Sequence[Run]
    """Runs of this device, either drills or real runs, in the order of their start."""
    polls: Sequence[Run]
    events: Sequence[Event]
    verdict: Verdict
    note: str
    """A sentence about the age of the verdict, or "" if it is up to date."""
    drill: bool

    @cached_property
    def measured(self) -> list[Run]:
        """Polls with temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in MEASURED for r in p.readings)), key=lambda p: p.started)
