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
    """A number of wrong ones among a total."""

    wrong: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Rate(Share):
    """A number of wrong independent trials among all, with the 95 % interval of Clopper and Pearson."""

    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Counts of uploads and of results. Results of one upload are not independent, so only uploads have an interval."""

    uploads: Rate
    results: Share


@dataclass(frozen=True, kw_only=True)
class Spot(Tried):
    """The results of one place: a core, an SM, several of them, or the device."""

    place: str
    unit: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FailingCase(Tried):
    """A failing case: results of the same operands on the same instruction set."""

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
    """Number of runs that show the fault with 95 % probability."""
    exhibit: str = ""
    """The directory with the case's evidence, or "" if there is none."""
    exhibit_absent: str = ""
    """The reason why there is no script."""
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
    """The identity of the part, and its location."""

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
    """Everything in the store about one device."""

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
    """The data that the dossier reads once from the store."""

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
    """A sentence on how current the verdict is, or "" if it is current."""
    drill: bool

    @cached_property
    def measured(self) -> list[Run]:
        """Polls with temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in MEASURED for r in p.readings)), key=lambda p: p.started)
