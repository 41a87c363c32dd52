"""The events of each device in the last month, and what may come back from before, in memory and in the store."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from canaryd.engine.inventory import bus_key
from canaryd.judge.laws import TOGETHER
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.events import triggers
from canaryd.judge.telemetry.signals import HIT, MEMORY_LOST
from canaryd.model import ON_THE_BUS, Device, Event, EventKind
from canaryd.store.notes import BOOT_NOTE, RUNNING_NOTE
from canaryd.store.rows import HOUR
from canaryd.store.store import Store

MEMORY = 31 * 86_400.0
"""Seconds for which all events stay in memory."""
HOST, BUS = "host", "bus "
"""Placeholders for the uuid in events on unknown devices: the id for the machine itself, and the prefix of the ids for
places on the bus."""
LOST = (EventKind.OFF_BUS, "driver")
"""Kind and name of the event that a poll records when the driver can no longer reach a device."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Bucket = tuple[str, str, int]
"""Kind, name and hour (since the epoch) of an event."""


class EventHistory:
    """The events of this host. Safe to use from several threads."""

    def __init__(self, store: Store) -> None:
        """Start without events; `recall` reads them."""
        self._store = store
        self._events: dict[str, dict[Bucket, Event]] = {}
        self._older: dict[str, list[Event]] = {}
        """Device → what is on record from before `MEMORY` of trouble that may come back."""
        self._mutex = threading.RLock()
        self.triggers: dict[str, str] = {}
        """Device → why its exact goldens should run now; the one who runs them removes it."""
        self.instances: Mapping[str, Sequence[str]] = {}
        """Divided device → its instances: what happens to it happens to them."""
        self.running = False
        """Whether a daemon runs on this history, so that a boot that ends before it is unclean."""

    def recall(self, now: float) -> None:
        """Read the events of the last month again from the store, because other processes may have added events."""
        with self._mutex:
            found, older = self._store.events(since=now - MEMORY), self._store.lasting(now - MEMORY)
            if self._store.unreadable:  # what was read before still holds
                return
            self._events = {}
            for event in found:
                self._add(event)
            self._older = defaultdict(list)
            for event in older:
                self._older[event.device].append(event)
            self._older = thinned(self._older)

    def life(self, device: Device) -> tuple[Event, ...]:
        """Return `of` a device, after what is on record from before that of trouble that may come back."""
        with self._mutex:
            names = {device.uuid, device.parent, HOST if device.backend == "cpu" else ""}
            older = [replace(e, device=device.uuid) for name in names - {""} for e in self._older.get(name, ())]
        return (*sorted(older, key=lambda event: event.last), *self.of(device))

    def of(self, device: Device) -> tuple[Event, ...]:
        """Return the last month's events of a device and, for an instance, of its parent device, oldest first.

        Events that were recorded for the device's place on the bus, or for the host, before the device was known are
        included.
        """
        bus_id = device.detail.get("bus_id", "")
        places = {f"{BUS}{bus_key(bus_id)}", f"{ON_THE_BUS}{bus_id}"} if bus_key(bus_id) else set()
        names = {device.uuid, device.parent, *places, HOST if device.backend == "cpu" else ""}
        with self._mutex:
            mine = self._events.get(device.uuid, {}).values()
            booted = {event.after for event in mine if event.kind == EventKind.BOOT}
            found = [
                event if name == device.uuid else replace(event, device=device.uuid)
                for name in names - {""}
                for event in self._events.get(name, {}).values()
                if name == device.uuid or name not in places or _is_of_the_place(event, booted)
            ]
        return tuple(sorted(found, key=lambda event: (event.last, event.kind, event.name)))

    def record(
        self,
        events: Sequence[Event],
        counts: Iterable[tuple[str, Mapping[str, str], float]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Store events, counts (name, labels, increment) and notes in one transaction; keep the events in memory."""
        events = self._store.dated(events)
        self._store.add_events(events, counts, notes)
        self.remember(events)

    def record_changes(self, events: Sequence[Event]) -> None:
        """Store the changes that a discovery found, and count the changes of each component."""
        if events:
            counts = [("stack_changes", {"device": e.device, "component": e.name}, 1.0) for e in events]
            self.record(events, counts)

    def remember(self, events: Sequence[Event]) -> None:
        """Add stored events to those in memory, and mark the devices that should be tested because of them."""
        by_device: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            by_device[event.device].append(event)
        with self._mutex:
            for uuid, mine in by_device.items():
                for event in mine:
                    self._add(event)
                if reason := triggers(mine):
                    for part in (uuid, *self.instances.get(uuid, ())):
                        self.triggers.setdefault(part, reason)

    def _add(self, event: Event) -> None:
        """Add an event to memory as the store does: equal events within an hour become one event with a count."""
        bucket = (event.kind, event.name, int(event.last // HOUR))
        mine = self._events.setdefault(event.device, {})
        before = mine.get(bucket)
        if before is not None:
            event = replace(
                event,
                first=min(before.first, event.first),
                last=max(before.last, event.last),
                count=before.count + event.count,
                before=before.before,
                reading=before.reading,
                labels=before.labels,
            )
        mine[bucket] = event

    # -- boots --------------------------------------------------------------------------------------------------------

    def record_boot(self, devices: Collection[str], now: float, *, boot_id: Path = BOOT_ID) -> None:
        """Record a reboot since the last call; the event says whether the machine went down while the daemon ran.

        The event has the time of the machine's start, so that it precedes everything that the kernel logged since.
        """
        with contextlib.suppress(OSError):
            current = _boot(boot_id)
            before, running = self._store.note(BOOT_NOTE), self._store.note(RUNNING_NOTE)
            if self._store.unreadable:
                return
            mark = current if self.running else ""
            if current and current != before:
                unclean = bool(running) and running == before
                started = now - _uptime()
                event = Event(
                    device="",
                    kind=EventKind.BOOT,
                    name="unclean" if unclean else "clean",
                    first=started,
                    last=started,
                    before=before,
                    after=current,
                    detail="the machine went down without stopping canaryd" if unclean else "the machine was rebooted",
                )
                with self._mutex:  # a device may be found later where something was recorded before it was known
                    places = [name for name in self._events if name.startswith(BUS)]
                events = [replace(event, device=uuid) for uuid in (*devices, *places) if before]
                self.record(events, notes={BOOT_NOTE: current, RUNNING_NOTE: mark})
            elif mark and running != mark:
                self._store.set_note(RUNNING_NOTE, mark)

    def note_stop(self) -> None:
        """Record that the daemon stopped normally."""
        self.running = False
        self._store.set_note(RUNNING_NOTE, "")


def thinned(events: Mapping[str, Sequence[Event]]) -> dict[str, list[Event]]:
    """Return what counts of the events of devices (each oldest first): trouble of each kind once between two remedies.

    That is once alone and once with another device, whose trouble of that moment is kept too: company is judged by it.
    A remedy is a reboot or a reset; of several in a row the first is enough. Changes of software are all kept.
    """
    trouble = {device: [e for e in mine if _returns(e)] for device, mine in events.items()}
    every, kept = _times(trouble), {device: list[Event]() for device in events}
    for device, mine in events.items():
        seen: set[tuple[str, str, bool]] = set()
        for event in mine:
            if event.kind in (EventKind.BOOT, EventKind.RESET):
                kept[device] += [event] * bool(seen)
                seen.clear()
            elif event.kind == EventKind.CHANGE:
                kept[device] += [event] * (event.name != "device")
            elif _returns(event) and (key := (event.kind, event.name, _beside(event, every))) not in seen:
                seen.add(key)
                kept[device].append(event)
    counted = _times({device: filter(_returns, mine) for device, mine in kept.items()})
    for device, mine in kept.items():
        known = set(map(id, mine))
        mine += [e for e in trouble[device] if id(e) not in known and _beside(e, counted)]
        mine.sort(key=lambda event: event.last)
    return kept


def _times(events: Mapping[str, Iterable[Event]]) -> dict[str, list[float]]:
    return {device: sorted(e.last for e in mine) for device, mine in events.items()}


def _beside(event: Event, times: Mapping[str, Sequence[float]]) -> bool:
    """Return whether another device has one of its `times` (ascending) at about the time of an event."""
    for device, theirs in times.items():
        following = bisect.bisect_left(theirs, event.first - TOGETHER)
        if device != event.device and following < len(theirs) and theirs[following] <= event.last + TOGETHER:
            return True
    return False


def _returns(event: Event) -> bool:
    """Return whether it is trouble that is counted over a device's life: what programs cause is not."""
    if event.kind in (EventKind.BOOT, EventKind.RESET, EventKind.CHANGE):
        return False
    # What explains an error that reached a device, or marks it as its own, is as old as that error.
    own = event.code in {*MEMORY_LOST, *HIT, *itertools.chain(*HIT.values())}
    return event.kind != "xid" or own or xids.explain(event.code).grade not in ("application", "none")


def _is_of_the_place(event: Event, booted: Collection[str]) -> bool:
    """Return whether an event recorded for a place on the bus is about the device that is there now.

    Lines of the kernel log are, and so is a reboot that is not in `booted` (reboots recorded for the device itself).
    Changes, releases and losses were recorded for a device without identity, so they do not count for this device.
    """
    if event.kind == EventKind.BOOT:
        return event.after not in booted
    return event.kind not in (EventKind.CHANGE, EventKind.RELEASE) and (event.kind, event.name) != LOST


def _boot(boot_id: Path) -> str:
    """Return the id of this boot of the machine, or "" if a container manager hides it.

    Container managers (systemd-nspawn, LXC) mount their own file over `boot_id`, with a new id for each container.
    """
    return "" if os.path.ismount(boot_id) else boot_id.read_text().strip()


def _uptime() -> float:
    """Return the seconds since the machine started, sleep included, or 0.0 if the system has no such clock."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock)
