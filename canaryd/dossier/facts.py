"""What the store knows of the device that a dossier is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from canaryd.config.settings import Config
from canaryd.model import Device, Event, Run, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

SHOWN = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings whose course is shown."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is read of the store, once."""

    store: Store
    config: Config
    device: Device
    record: DeviceRecord | None
    runs: Sequence[Run]
    """Of this device, of one world, in the order of their start."""
    polls: Sequence[Run]
    events: Sequence[Event]
    verdict: Verdict
    note: str
    """What is to be said of the verdict beside what it says."""
    drill: bool
    now: float

    @cached_property
    def telling(self) -> list[Run]:
        """The polls that tell temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in SHOWN for r in p.readings)), key=lambda p: p.started)
