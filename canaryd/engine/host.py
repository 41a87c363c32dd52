"""Data that the parts of the engine share: settings, the store, and the devices and probes of this host."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from canaryd.config.settings import Config, EndpointConfig, ProbeSettings
from canaryd.engine import endpoints, schedule
from canaryd.engine.catalogue import Entry
from canaryd.facts import ENDPOINT_SERVER
from canaryd.model import ENDPOINT, Device, Run
from canaryd.probe import ProbeSpec
from canaryd.store.locks import WAIT
from canaryd.store.store import Store

STACK_BEHIND = ("driver", "cuda", "vbios", "gsp_firmware", "kernel")
"""Names of facts about devices and the host that can change the numbers that a server computes."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a check or a drill."""

    level: str = "standard"
    probes: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    intensity: str = ""
    """Intensity of the tests, as for a retest: one of `INTENSITIES`, or "" for normal runs."""
    seed: int | None = None
    instruction_set: str = ""
    seconds: float = 0.0
    """Seconds for which rounds are repeated; 0 means one round."""
    at_once: bool = False
    """Whether processors are tested beside the accelerators, not before them: for load, not for a quick answer."""
    drill: str = ""
    drained: bool = False
    """Whether the operator says that no server uses the devices, even if processes are seen on them."""
    wait: float = WAIT
    """Seconds to wait for a device that another canaryd process is testing."""


@dataclass
class Host:
    """The known devices and probes of this host, with their settings."""

    config: Config
    store: Store
    clock: Callable[[], float] = time.time
    devices: dict[str, Device] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    """Probe name → the probe's file and spec."""
    asked: Options = Options()
    """What a check asked for; the verdicts of a check of a part are about this part alone, and are not stored."""
    together: frozenset[str] = frozenset()
    """Uuids of the devices that a check also tests together, as a group; empty for a daemon, which never does that."""
    compared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Uuid of a device → (number of results in a check of a whole level, least number required); empty for a daemon."""
    problems: list[str] = field(default_factory=list)
    """Problems of the probes or of the software under test, one sentence each."""
    failing: dict[str, str] = field(default_factory=dict)
    """Vendor whose software is installed, or "torch" → the reason why its devices could not be listed."""
    unloaded: frozenset[str] = frozenset()
    """Names of the probes whose files exist but could not be loaded."""
    looked: bool = False
    """Whether this process has searched for devices and probes; it cannot judge before that."""
    stopping: str = ""
    """The reason why canaryd stops, or "" while it does not stop."""
    present: set[str] = field(default_factory=set)
    """Devices that this process found at its last discovery."""
    in_place: set[str] = field(default_factory=set)
    """Uuids of the devices that the last successful discovery found, perhaps before a restart of canaryd."""
    mutex: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Guards everything that the parts of the engine keep in memory. No thread holds it while it waits for a worker."""

    @property
    def restricted(self) -> bool:
        """Whether a check asked for only some probes, cases or an intensity; its result says nothing about the rest."""
        return bool(self.asked.probes or self.asked.cases or self.asked.intensity)

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, probe: str) -> ProbeSettings:
        """Return the section of a probe in the configuration, or the defaults if there is no section."""
        return self.config.probes.each.get(probe, ProbeSettings())

    def is_enabled(self, spec: ProbeSpec) -> bool:
        """Return whether a probe is enabled in the configuration, or else by the probe's own default."""
        enabled = self.settings(spec.name).enabled
        return not spec.opt_in if enabled is None else enabled

    def levels(self, level: str | None = None) -> dict[str, str]:
        """Return probe → level: `level` for every probe, or each probe's own configured level if `level` is None."""
        return {n: level or self.settings(n).level or self.config.schedule.level for n in self.entries}

    def periods(self, device: Device) -> dict[str, float]:
        """Return probe → period in seconds, for each probe that tests a device. Telemetry probes are left out.

        The result is {} for a divided GPU: its instances are tested, because CUDA cannot use the whole GPU.
        """
        divided = self.is_divided(device)
        return {
            name: self.settings(name).period or entry.spec.period
            for name, entry in self.entries.items()
            if schedule.applies(entry, device)
            and not entry.spec.telemetry
            and not (divided and entry.spec.numeric)
            and (not entry.spec.group or device.uuid in self.together)
            and (not self.asked.probes or name in self.asked.probes)
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
        """Return whether a device has instances; instances that are only remembered do not count."""
        return any(d.parent == device.uuid for u, d in self.devices.items() if u in self.present | self.in_place)

    def in_place_first(self) -> list[Device]:
        """Return all known devices; devices that are in place come before those that are gone."""
        with self.mutex:
            return sorted(self.devices.values(), key=lambda d: d.uuid not in self.in_place)

    def unreached(self) -> set[str]:
        """Return the uuids of present devices that torch does not see although numeric probes should test them."""
        return {
            uuid
            for uuid, device in self.devices.items()
            if uuid in self.present
            and not device.is_reached
            and any(self.entries[name].spec.numeric for name in self.periods(device))
        }

    def kin(self, uuid: str) -> frozenset[str]:
        """Return the uuids of a device and its siblings, which are the devices of the same backend and model."""
        of = self.devices.get(uuid)
        same = (d for d in self.devices.values() if of and d.kind == of.kind)
        return frozenset({uuid, *(d.uuid for d in same)})

    def siblings(self, device: Device) -> list[Device]:
        """Return the other devices of the same backend and model that are present."""
        return [self.devices[u] for u in sorted(self.kin(device.uuid) - {device.uuid}) if u in self.present]

    def endpoint(self, device: Device) -> EndpointConfig:
        """Return the settings of an endpoint; the defaults for a device, and if a reload has removed it."""
        return endpoints.named(self.config).get(device.uuid.removeprefix(f"{ENDPOINT}:"), EndpointConfig())

    def devices_behind(self, device: Device) -> list[Device]:
        """Return the devices that serve an endpoint; [] for a device."""
        served = self.endpoint(device)
        return endpoints.behind(served, self.devices.values()) if served.url else []

    def stack_behind(self, device: Device, run: Run) -> dict[str, str]:
        """Return fact → value for the software of an endpoint: its server (read from `run`), its devices, the host."""
        parts = self.devices_behind(device)
        parts += [d for d in self.devices.values() if d.backend == "cpu" and d not in parts]
        found: dict[str, set[str]] = {}
        for part in parts:
            for key in STACK_BEHIND:
                if key in part.detail:
                    found.setdefault(key, set()).add(part.detail[key])
        found |= {"server": {str(r.value)} for r in run.readings if r.name == ENDPOINT_SERVER}  # noqa: B035  at most one
        return {key: " ".join(sorted(values)) for key, values in found.items()}
