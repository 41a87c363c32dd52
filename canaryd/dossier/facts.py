"""What the store holds about the device of a dossier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from canaryd.config.settings import Config
from canaryd.model import Device, Event, Run, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

MEASURED = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings that tell the conditions of a run."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the dossier reads from the store, once."""

    store: Store
    config: Config
    device: Device
    record: DeviceRecord | None
    runs: Sequence[Run]
    """Of this device, either drills or real runs, in the order of their start."""
    polls: Sequence[Run]
    events: Sequence[Event]
    verdict: Verdict
    note: str
    """A sentence on how current the verdict is; "" where it is."""
    drill: bool

    @cached_property
    def measured(self) -> list[Run]:
        """Polls with temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in MEASURED for r in p.readings)), key=lambda p: p.started)
