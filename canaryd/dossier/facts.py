"""What the store holds about the device of a dossier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from canaryd.config.settings import Config
from canaryd.facts import SELF_TEST
from canaryd.judge.selftest import MESSAGE, PROBE
from canaryd.model import Device, Event, Run, Verdict
from canaryd.store.devices import DeviceRecord
from canaryd.store.store import Store

PLOTTED = ("temperature_celsius", "power_watts", "clock_hertz")
"""Readings that the dossier plots."""


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
    def plotted_polls(self) -> list[Run]:
        """Polls with temperature, power or clocks, oldest first."""
        return sorted((p for p in self.polls if any(r.name in PLOTTED for r in p.readings)), key=lambda p: p.started)


def selftests(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the vendor's self-test said of each of its tests, in the newest run that gave results."""
    said = [r for r in runs if r.probe == PROBE and any(each.name == SELF_TEST for each in r.readings)]
    if not said:
        return []
    told = {each.labels.get("test"): each.value for each in said[-1].readings if each.name == MESSAGE}
    return [
        {
            "tool": each.labels.get("tool", ""),
            "suite": each.labels.get("suite", ""),
            "test": each.labels.get("test", ""),
            "result": str(each.value),
            "message": str(told.get(each.labels.get("test"), "")),
            "at": said[-1].started,
        }
        for each in said[-1].readings
        if each.name == SELF_TEST
    ]
