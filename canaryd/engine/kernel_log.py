"""Conversion of kernel log records to events of the devices that they are about."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import ne
from pathlib import Path

from canaryd.engine.events import BOOT_ID, BUS, HOST, EventHistory
from canaryd.engine.inventory import bus_key
from canaryd.facts import LogPosition, LogRecord
from canaryd.judge.clock import credible
from canaryd.judge.telemetry import xids
from canaryd.judge.telemetry.events import log_event
from canaryd.model import Device, Event, EventKind
from canaryd.store.notes import LOG_NOTE, LOG_PROBLEM_NOTE
from canaryd.store.store import Store
from canaryd.supervisor import killed
from canaryd.supervisor.series import Series

OWN = frozenset({"xid", EventKind.OFF_BUS, "amdgpu", "intel", "driver"})
"""Kinds of records that are always about an accelerator."""
OF_PROCESSES = frozenset({"application", "either"})
"""Natures of Xids (NVIDIA's error numbers) that the kill of a working process can cause. Xids of another nature
count against the device even at the moment of a kill."""
COUNTING = frozenset({"mce", "edac"})
"""Kinds of records each of which counts the errors since the last one."""
MINOR = frozenset(
    {*("mismatch", "soft-recovered", "reset", "fault", "ras-corrected", "ras-deferred"), *("correctable", "link-down")}
)
"""Names of records that are at most a note about a device; if the device is unknown, they mean nothing."""


class KernelLog:
    """Reads the kernel log from the last stored position on, and stores its events."""

    def __init__(self, store: Store, history: EventHistory) -> None:
        """Start at no position; nothing is read yet."""
        self._store = store
        self._history = history
        self.on_records: Callable[[], None] = lambda: None
        """Called when new records have become events."""
        self.problem = ""
        """Why the kernel log is not read; "" while it is."""
        self.lost: Counter[str] = Counter()
        """Records that were overwritten before they were read ("lost") and lines that are no records ("garbled"), since
        this process began."""

    def read(
        self, path: Path, series: Series, devices: Callable[[], Iterable[Device]], *, until_end: bool, owned: bool
    ) -> None:
        """Read the log from the last stored position; `problem` then holds the reason why reading ended.

        If `owned` is False, another process reads the log: `problem` becomes the reason that this process stored.
        """
        if not owned:
            self.problem = self._store.note(LOG_PROBLEM_NOTE)
            return
        note, present = self._store.note(LOG_NOTE), _present_boot()
        if self._store.unreadable:  # from the beginning every line would count twice
            self.set_problem(f"how far it was read before is not known: {self._store.unreadable}")
            return
        boot, _, sequence = note.rpartition(":")
        may_be_present = _may_be(note, present)
        if may_be_present and present:
            boot = present
        if not re.fullmatch("-1|[0-9]{1,18}|", sequence):
            if may_be_present:
                self.set_problem(
                    f"how far it was read before is not known: {sequence!r:.30} on record is damaged; it is read again"
                    " after a reboot"
                )
                return
            sequence = ""  # of an earlier boot, of which no line is left
        position = LogPosition(boot=boot, sequence=int(sequence) if sequence else -1)
        seen: Counter[str] = Counter()

        def take(records: Sequence[LogRecord], position: LogPosition) -> None:
            self.set_problem("")
            for name, count in (("lost", position.lost), ("garbled", position.garbled)):
                self.lost[name] += count - seen[name]
                seen[name] = count
            self._record(records, position, list(devices()))
            if records:
                self.on_records()

        ended = series.follow(str(path), position, take, until_end=until_end)
        self.set_problem(ended.partition("\n")[0], stopped=series.stopped)

    def set_problem(self, problem: str, *, stopped: bool = False) -> None:
        """Set the reason why the log is not read. It is also stored, unless canaryd `stopped` the reading itself."""
        self.problem = problem
        note = "" if stopped else problem
        if self._store.note(LOG_PROBLEM_NOTE) != note:
            self._store.set_note(LOG_PROBLEM_NOTE, note)

    def _record(self, records: Sequence[LogRecord], position: LogPosition, devices: Sequence[Device]) -> None:
        """Store the events of records, the counters, and the log `position` after these records in one transaction."""
        note = {LOG_NOTE: f"{position.boot}:{position.sequence}"}
        if not records:
            if self._store.note(LOG_NOTE) != note[LOG_NOTE]:
                self._store.add_events((), notes=note)
            return
        events = [_event(record, devices) for record in records]
        self._history.record(events, [_counter(r, e) for r, e in zip(records, events, strict=True)], note)


def _present_boot() -> str:
    """Return the id of this boot, or "" if it cannot be read."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _may_be(note: str, present: str) -> bool:
    """Return whether the stored position `note` is from this boot, whose id is `present`.

    One damaged character in the stored id is tolerated. Ids of boots are random: two differ in about 30 places.
    """
    return len(note) >= len(present) and sum(map(ne, note, present)) <= 1


def addressee(record: LogRecord, devices: Sequence[Device]) -> str:
    """Return the uuid of the device that a record is about, or of the host's CPU.

    If several of the `devices` were at the record's place one after another, the first of them counts. A GPU's fault
    never counts for the host: if the GPU is unknown, return the id of its place on the bus. All other records belong to
    the CPU, also a driver's message that does not name one of several devices. If the CPU is unknown, return `HOST`.
    """
    parts = _parts(record)
    whole = [d for d in devices if d.is_whole]
    for device in whole:
        if parts == {bus_key(device.detail.get("bus_id", ""))} != {""}:
            return device.uuid
    if record.kind in OWN and parts:
        return f"{BUS}{bus_key(record.bus_id)}"
    return next((d.uuid for d in whole if d.backend == "cpu"), HOST)


def _parts(record: LogRecord) -> set[str]:
    """Return the bus addresses of the devices that a record can be about: one device, or all devices below a port."""
    return {bus_key(place) for place in record.fields.get("below", record.bus_id).split()} - {""}


def _is_only(place: str, devices: Sequence[Device]) -> bool:
    """Return whether no second device has the backend of the device at a place; True if no device is there."""
    whole = [d for d in devices if d.is_whole]
    here = next((d for d in whole if bus_key(d.detail.get("bus_id", "")) == bus_key(place)), None)
    return here is None or sum(d.backend == here.backend for d in whole) == 1


def _event(record: LogRecord, devices: Sequence[Device]) -> Event:
    """Return the event of a record. The fault of a part that canaryd does not test is recorded but blames no device."""
    fields = dict(record.fields)
    process, only = fields.pop("process", ""), fields.pop("only", "")
    record = replace(record, fields=fields)
    if only and not _is_only(only, devices):
        record = replace(record, bus_id="")
    event = log_event(record, addressee(record, devices))
    if record.kind in COUNTING:
        event = replace(event, count=float(fields.get("count", 1)))
    known, parts = {bus_key(d.detail.get("bus_id", "")) for d in devices}, _parts(record)
    if process and record.kind == "xid" and _is_of_killed(int(process), event.code, record, parts):
        event = replace(event, kind="elsewhere", name=f"xid {record.name} of a worker that canaryd killed")
    kind = ""
    if record.kind in OWN:
        kind = "" if parts else "unplaced"
    elif record.kind != "sxid" and parts and known.isdisjoint(parts):  # an NVSwitch is the host's
        kind = "elsewhere"
    elif len(parts) > 1:
        kind = "port"
    if kind:
        kind = "elsewhere" if record.name in MINOR else kind
        event = replace(event, kind=kind, name=f"{record.kind} {record.name}".strip())
    now = time.time()
    if not credible(event.last, now):  # logged before the clock was set
        event = replace(event, first=now, last=now)
    return event


def _is_of_killed(process: int, code: int | None, record: LogRecord, parts: set[str]) -> bool:
    """Return whether an Xid is that of a worker that canaryd killed.

    Where only the place tells, what asks for more than a look at the application counts: it may be a server's.
    """
    known = xids.explain(code)
    is_on = (lambda bus_id: bus_key(bus_id) in parts) if known.grade in ("application", "none") else (lambda _: False)
    return known.nature in OF_PROCESSES and killed.was_killed(process, record.at, is_on)


def _counter(record: LogRecord, event: Event) -> tuple[str, dict[str, str], float]:
    """Return (name, labels, 1.0) of the counter that a record increases by one."""
    if record.kind in ("xid", "sxid"):
        return f"{record.kind}_errors", {"device": event.device, record.kind: record.name}, 1.0
    name = record.name if event.kind == record.kind else event.name
    return "kernel_log_events", {"device": event.device, "kind": event.kind, "name": name}, 1.0
