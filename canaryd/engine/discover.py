"""Find the devices and probes of this host, and record what changed since the last search."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from canaryd.engine import catalogue, endpoints, inventory
from canaryd.engine.evidence import Evidence
from canaryd.engine.host import Host
from canaryd.engine.learning import Learning
from canaryd.engine.polling import Watch
from canaryd.engine.workers import Workers
from canaryd.judge import acks
from canaryd.model import UNDRIVEN, Device
from canaryd.store.devices import DeviceRecord
from canaryd.supervisor.protocol import Description

VENDORS = ("host", *inventory.BACKEND_OF_MODULE)
"""Worker modules that list devices, in the order of the search. The telemetry probe of module NAME is
NAME_telemetry."""


class Discovery:
    """Keeps the devices and probes of `host` up to date."""

    def __init__(self, host: Host, workers: Workers, watch: Watch, evidence: Evidence, learning: Learning) -> None:
        """Store the parts of the engine that discovery uses; nothing is searched yet."""
        self._host = host
        self._workers = workers
        self._watch = watch
        self._evidence = evidence
        self._learning = learning
        self.last_seen: dict[str, float] = {}
        """Device → when it was last found, in seconds since the epoch; empty before the first discovery."""
        self._records: dict[str, DeviceRecord] = {}
        """Every device ever seen here, as it was read last."""

    def discover(self, on_wait: Callable[[str], None], *, keep: bool) -> None:
        """Find probes and devices through workers, and record the changes; `on_wait` is called if a wait is long.

        `keep`: tests follow at once, so a worker stays for them if this host has only a processor and built-in probes.

        Data that cannot be read now stays unchanged. A missing device stays known, as not present, for as long as the
        judge watches a suspect device.
        """
        host = self._host
        files, problems = catalogue.find(host.config.probes.directories, host.config.probes.enabled)
        # A worker imports torch for seconds, on another core: long enough to read the record.
        reader = threading.Thread(target=self.recall, name="canaryd-record")
        reader.start()
        listing = self._workers.ask(lambda series: series.inventory(self._vendor_settings()), numeric=False)
        paths = [f.path for f in files]
        series, alone = self._workers.start(), False
        try:
            described = series.describe(paths, on_wait=on_wait)
            found = [*described.devices, *(device for devices in listing.devices.values() for device in devices)]
            alone = bool(described.torch) and not listing.failing and all(device.unit == "cpu" for device in found)
            alone = alone and all(file.source == "builtin" for file in files)  # others may change torch as they load
        finally:
            (self._workers.keep if keep and alone else self._workers.end)(series)
        runtimes = {
            name: self._workers.ask(operator.methodcaller("reach", name, on_wait=on_wait), numeric=True, runtime=name)
            for name in host.config.worker.runtimes.each
        }
        reader.join()
        entries, more = _loaded(files, described)
        with host.mutex:
            if self._workers.halted:
                return
            host.looked = True
            if entries or not files:
                host.entries = {n: e for n, e in entries.items() if host.is_enabled(e.spec)}
            host.unloaded = frozenset(f.name for f in files) - entries.keys()
            host.problems = [
                *map(str, [*problems, *more]),
                *catalogue.unknown(host.config.probes.each, files),
                *_stack_problem(described),
                *(f"worker.runtimes.{name}: {found.problem}" for name, found in runtimes.items() if found.problem),
                *listing.problems,
            ]
            host.failing = {**listing.failing, **({"torch": described.lost} if described.lost else {})}
            here = {uuid for uuid, r in self._read().items() if r.present}
            self._take_inventory(
                inventory.merge(described, listing, self._known(), here | host.devices.keys(), runtimes), here
            )

    def ignored(self, on_wait: Callable[[str], None]) -> list[str]:
        """Return one line for each problem with a probe that the configuration names.

        `on_wait` is called if a wait is long.
        """
        probes = self._host.config.probes
        files, problems = catalogue.find(probes.directories, probes.enabled)
        lines: list[str] = []
        given = {name: probe.settings for name, probe in probes.each.items() if probe.settings}
        own, lost = [file for file in files if file.source != "builtin" or file.name in given], []
        if own:
            paths = [f.path for f in own]
            described = self._workers.ask(lambda series: series.describe(paths, on_wait=on_wait), numeric=True)
            entries, more = _loaded(own, described)
            problems += more
            for entry in entries.values():
                lines += catalogue.unknown_settings(entry, given.get(entry.spec.name, ()))
            lost = [described.torch_reason] if described.lost else []
        return [*lost, *map(str, problems), *lines, *catalogue.unknown(probes.each, files)]

    def _vendor_settings(self) -> dict[str, Mapping[str, object]]:
        """Return vendor → the settings of its telemetry probe, for each vendor whose probe is not disabled."""
        named = {name: self._host.settings(f"{name}_telemetry") for name in VENDORS}
        return {name: settings.settings for name, settings in named.items() if settings.enabled is not False}

    def _take_inventory(self, found: inventory.Found, here: Collection[str]) -> None:
        """Store the devices that an inventory found; `here` are the uuids of the devices that were present before."""
        host, store = self._host, self._host.store
        now, known = host.clock(), self._known()
        devices = [d for d in found.devices if inventory.is_included(d, host.config)]
        devices += endpoints.listed(host.config, devices)
        host.present = {d.uuid for d in devices}
        if found.devices or devices:
            there = {u: r for u, r in self._read().items() if r.present}
            # What this configuration leaves out may be another's, as where a check has one of its own.
            out = {u for u, r in there.items() if not inventory.is_included(r.device, host.config)}
            kept = {u for u, r in there.items() if r.device.backend in found.uncertain} - out
            gone = [r for u, r in there.items() if u not in host.present | kept | out]
            gone = [r for r in gone if UNDRIVEN not in r.device.detail]
            for device in devices:
                store.see_device(device, now)
            store.set_present(host.present | kept, now, unseen=out)
            self._watch.history.record_changes(inventory.changes(known, here, devices, gone, now))
        self.recall()
        self.last_seen = {uuid: r.last_seen for uuid, r in self._read().items()}

    def _known(self) -> dict[str, Device]:
        return {uuid: r.device for uuid, r in self._read().items()}

    def _read(self) -> Mapping[str, DeviceRecord]:
        """Return uuid → record of every device ever seen here. If the store is unreadable, earlier records remain."""
        store = self._host.store
        found = {r.device.uuid: r for r in store.devices()}
        self._records = self._records | found if store.unreadable else found
        return self._records

    def _remembered(self, now: float) -> list[DeviceRecord]:
        """Return the devices that are still known; with an unreadable store, those known before or present.

        Only a readable store shows which devices are missing, replaced or forgotten.
        """
        host, store = self._host, self._host.store
        known = self._read().values()
        here = {r.device.uuid for r in known if r.present} | host.present
        acknowledged, verdicts = acks.heeded(store.acks(), now), store.verdicts()
        found = [
            r
            for r in known
            if inventory.remembered(r, store, here, host.config, now, acknowledged, verdict=verdicts.get(r.device.uuid))
        ]
        if not store.unreadable:
            return found
        before = host.devices.keys() | host.present
        return [r for r in known if r.device.uuid in before and inventory.is_included(r.device, host.config)]

    def recall(self, *, runs: bool = True) -> None:
        """Load the known devices and runs from the store, so that a faulty device stays faulty after a restart.

        If `runs` is False, no device can be judged yet.
        """
        host = self._host
        with host.mutex:
            host.store.changes()  # a record that could not be read before may be there
            now = host.clock()
            records = self._remembered(now)
            # A new mapping each time: other threads iterate over the old one.
            host.devices = {r.device.uuid: r.device for r in records}
            host.in_place = {r.device.uuid for r in records if r.present}
            if runs:
                self._evidence.recall()
            self._learning.refresh(always=True)
            instances: dict[str, list[str]] = {}
            for device in host.devices.values():
                if device.parent:
                    instances.setdefault(device.parent, []).append(device.uuid)
            self._watch.history.instances = instances
            self._watch.history.recall(now)
            self._watch.history.record_boot(list(host.devices), now)


def _loaded(
    files: Sequence[catalogue.ProbeFile], described: Description
) -> tuple[dict[str, catalogue.Entry], list[catalogue.Problem]]:
    """Return (usable probes by name, problems). Files that could not be read because torch failed are in neither."""
    reached = [f for f in files if not described.lost or f.path in described.probes]
    return catalogue.load(reached, described.probes)


def _stack_problem(described: Description) -> list[str]:
    return [described.torch_reason] if described.torch is None and described.torch_reason else []
