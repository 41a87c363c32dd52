"""What the parts of the engine share: settings, the store, and the devices and probes of this host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from canaryd.config.settings import Config, EndpointConfig, ProbeSettings
from canaryd.engine import endpoints, schedule
from canaryd.engine.catalogue import Entry
from canaryd.facts import ENDPOINT_SERVER
from canaryd.model import TORCH, Device, Run
from canaryd.probe import ProbeSpec
from canaryd.store.store import Store

STACK_BEHIND = ("driver", "cuda", "vbios", "gsp_firmware", "kernel")
"""Facts about devices and host on which the numbers of a server may depend."""


@dataclass
class Host:
    """The known devices and probes of this host, and how they are configured."""

    config: Config
    store: Store
    clock: Callable[[], float] = time.time
    devices: dict[str, Device] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    """Probe name → probe."""
    only: frozenset[str] = frozenset()
    """The probes that a restricted check asked for; its verdicts are about these alone and are not stored."""
    cases: tuple[str, ...] = ()
    """The cases that it asked for."""
    intensity: str = ""
    """The intensity that it asked for."""
    together: frozenset[str] = frozenset()
    """The devices that a check tests as groups too; empty for a daemon, which never does."""
    compared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Device → results that a check of the whole level compared, and the least that it has to; empty for a daemon."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with the probes or the stack under test, one sentence each."""
    failing: dict[str, str] = field(default_factory=dict)
    """Vendor whose software is installed, or "torch" → why its devices could not be listed."""
    unloaded: frozenset[str] = frozenset()
    """Probes that are there and could not be loaded."""
    looked: bool = False
    """Whether this process has looked for devices and probes; until then it cannot judge."""
    stopping: str = ""
    """Why canaryd stops; "" until then."""
    present: set[str] = field(default_factory=set)
    """Devices that this process found at its last discovery."""
    ran: set[str] = field(default_factory=set)
    """Devices on which this process has run a probe."""
    tried: set[str] = field(default_factory=set)
    """Those of `ran` on which a run gave a result, or was ended by the device."""
    in_place: set[str] = field(default_factory=set)
    """Devices that the last successful discovery found, also one before a restart."""
    mutex: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Guards everything that the parts of the engine keep in memory. Never held while a worker is waited for."""

    @property
    def restricted(self) -> bool:
        """Whether only a part was asked for, which proves nothing about the rest."""
        return bool(self.only or self.cases or self.intensity)

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, probe: str) -> ProbeSettings:
        """Return the configuration's section of a probe, or the defaults."""
        return self.config.probes.each.get(probe, ProbeSettings())

    def is_enabled(self, spec: ProbeSpec) -> bool:
        """Return whether a probe is enabled, by the configuration or by its own default."""
        enabled = self.settings(spec.name).enabled
        return not spec.opt_in if enabled is None else enabled

    def levels(self, level: str | None = None) -> dict[str, str]:
        """Return probe → level: `level` for all, or each probe's own setting."""
        return {n: level or self.settings(n).level or self.config.schedule.level for n in self.entries}

    def periods(self, device: Device) -> dict[str, float]:
        """Return probe → period in seconds for each probe that tests a device; telemetry is left out.

        A divided GPU is tested through its instances, because CUDA cannot use it as a whole.
        """
        divided = self.is_divided(device)
        return {
            name: self.settings(name).period or entry.spec.period
            for name, entry in self.entries.items()
            if schedule.applies(entry, device)
            and not entry.spec.telemetry
            and not (divided and entry.spec.numeric)
            and (not entry.spec.group or device.uuid in self.together)
            and (not self.only or name in self.only)
        }

    def telemetry_periods(self) -> dict[str, float]:
        """Return telemetry probe → period in seconds."""
        telemetry = {name: entry for name, entry in self.entries.items() if entry.spec.telemetry}
        return {name: self.settings(name).period or entry.spec.period for name, entry in telemetry.items()}

    def timeout(self, spec: ProbeSpec, level: str) -> float:
        """Return the seconds after which a run of a probe is killed."""
        return spec.budget[level] + (self.settings(spec.name).timeout or spec.timeout)

    # -- devices ------------------------------------------------------------------------------------------------------

    def is_divided(self, device: Device) -> bool:
        """Return whether a device has instances; one that is remembered only is none."""
        return any(d.parent == device.uuid for u, d in self.devices.items() if u in self.present | self.in_place)

    def in_place_first(self) -> list[Device]:
        """Return all known devices; one that is gone from its place on the bus after the one there now."""
        with self.mutex:
            return sorted(self.devices.values(), key=lambda d: d.uuid not in self.in_place)

    def reached(self, device: Device) -> bool:
        """Return whether probes can run on a device. The CPU counts without torch: its runs report what is missing."""
        return device.unit == "cpu" or device.is_endpoint or device.runtime != TORCH or device.torch_index is not None

    def unreached(self) -> set[str]:
        """Return the devices that are there and wanted, and that torch does not show: their fabric may not be ready."""
        return {
            uuid
            for uuid, device in self.devices.items()
            if uuid in self.present
            and not self.reached(device)
            and any(self.entries[name].spec.numeric for name in self.periods(device))
        }

    def kin(self, uuid: str) -> frozenset[str]:
        """Return a device and its siblings: those of the same backend and model."""
        of = self.devices.get(uuid)
        same = (d for d in self.devices.values() if of and d.kind == of.kind)
        return frozenset({uuid, *(d.uuid for d in same)})

    def siblings(self, device: Device) -> list[Device]:
        """Return the other devices of the same backend and model that are present."""
        return [self.devices[u] for u in sorted(self.kin(device.uuid) - {device.uuid}) if u in self.present]

    def endpoint(self, device: Device) -> EndpointConfig:
        """Return the settings of an endpoint, or the defaults for one that a reload has removed."""
        return endpoints.named(self.config).get(device.uuid.partition(":")[2], EndpointConfig())

    def devices_behind(self, device: Device) -> list[Device]:
        """Return the devices that serve an endpoint."""
        return endpoints.behind(self.endpoint(device), self.devices.values())

    def stack_behind(self, device: Device, run: Run) -> dict[str, str]:
        """Return the software of a server as its probe tells it, and below it as its devices and the host report it."""
        parts = self.devices_behind(device)
        parts += [d for d in self.devices.values() if d.backend == "cpu" and d not in parts]
        found: dict[str, set[str]] = {}
        for part in parts:
            for key in STACK_BEHIND:
                if key in part.detail:
                    found.setdefault(key, set()).add(part.detail[key])
        found |= {"server": {str(r.value)} for r in run.readings if r.name == ENDPOINT_SERVER}  # noqa: B035  at most one
        return {key: " ".join(sorted(values)) for key, values in found.items()}

    def share_a_device(self, device: Device, other: Device) -> bool:
        """Return whether two endpoints are served by a common device, so that neither can be evidence on the other."""
        if not (device.is_endpoint and other.is_endpoint):
            return False
        mine, theirs = ({d.uuid for d in self.devices_behind(endpoint)} for endpoint in (device, other))
        return bool(mine & theirs)
