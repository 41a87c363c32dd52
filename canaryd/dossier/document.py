"""The stored data of which a dossier is made.

The dossier is one JSON document, from which page and OCP output are made; docs/dossier.schema.json has its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from canaryd.config.settings import Config
from canaryd.judge.characterised import Claims
from canaryd.model import Device, Event, Run, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

SCHEMA = "canaryd.dossier/2"
Json = dict[str, Any]
"""The document, or a part of it."""
MEASURED = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings that show the conditions of a run."""


class DossierError(RuntimeError):
    """Raised if the dossier cannot be written. The message says what is wrong and what to do."""


class OutputError(DossierError):
    """Raised if the output directory for the dossier cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The stored data from which the dossier is made. Each item is read from the store only once."""

    store: Store
    config: Config
    device: Device
    record: DeviceRecord | None
    runs: Sequence[Run]
    """Runs of this device, in the order of their start."""
    polls: Sequence[Run]
    events: Sequence[Event]
    verdict: Verdict
    note: str
    """A sentence about results that do not count any more, or ""."""
    drill: str
    claims: Claims

    @cached_property
    def measured(self) -> list[Run]:
        """Polls with temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in MEASURED for r in p.readings)), key=lambda p: p.started)
