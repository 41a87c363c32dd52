"""What devices say about themselves: telemetry polls, the kernel log, reboots; what happened becomes an event.

One sweep polls every device through one worker, which then ends: between sweeps nothing of ours holds a driver. The
one exception is a driver without persistence, which would re-initialise its devices each time (`Watch.holding`). A
poll is stored when it shows something new, and now and then for the record; an event is stored always.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from canaryd.config.settings import Config
from canaryd.engine.inventory import bus_key
from canaryd.judge.clock import POLL_AHEAD, credible
from canaryd.judge.telemetry import signals
from canaryd.judge.telemetry.events import changes, judged_values, log_event, triggers
from canaryd.judge.telemetry.signals import Poll
from canaryd.model import Device, Event, LogPosition, LogRecord, Outcome, Reading, Run
from canaryd.store.locks import Busy
from canaryd.store.notes import BOOT_NOTE, LOG_NOTE, LOG_PROBLEM_NOTE, RUNNING_NOTE, TELEMETRY_LOCK
from canaryd.store.rows import HOUR
from canaryd.store.store import Store
from canaryd.supervisor import process
from canaryd.supervisor.protocol import RunRequest
from canaryd.supervisor.series import Series

MEMORY = 31 * 86_400.0
"""Seconds for which events are held in memory: more than the longest window of a rule."""
RECALLED = 20
"""Completed polls that are read at the start: a value that was missing in the newest is in one before."""
EARLY = 0.7
"""Share of its period after which a poll is due: sweeps do not come to the second."""
BACKOFF = 600.0
"""Longest pause, in seconds, between two polls of a device whose polls take their worker down."""
HOST, BUS = "host", "bus "
"""Whom an event is about while the inventory does not know the device: the machine, or a place on the bus."""
OWN = frozenset({"xid", "off-bus", "amdgpu", "driver"})
"""Kinds of lines that are about an accelerator and nothing else."""
FOREIGN = frozenset({"aer", "pcie", "nvme"})
"""Kinds of lines that any part on the bus can cause."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TAKEN_DOWN = (Outcome.TIMED_OUT, Outcome.CRASHED, Outcome.UNKILLABLE, Outcome.GARBLED, Outcome.OUT_OF_MEMORY)
Bucket = tuple[str, str, int]
"""Kind, name and hour of an event."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One poll to be done."""

    request: RunRequest
    timeout: float
    """Seconds after which it is killed."""
    period: float
    """Seconds between two such polls."""


@dataclass
class _Lane:
    """One telemetry probe on one device."""

    period: float
    since: float
    newest: Run | None = None
    completed: Run | None = None
    failures: int = 0
    polled: float = -math.inf
    """Monotonic time of the newest poll."""
    rest_until: float = 0.0
    """Monotonic time before which it is not polled again."""
    known: dict[str, Reading] = field(default_factory=dict)
    """The newest value of every reading, whichever poll it is from: what is missing for a moment is not forgotten."""
    kept: Run | None = None
    """The newest completed poll that was stored."""
    mark: tuple[tuple[str, float | str], ...] | None = None
    """What of it makes another poll worth storing."""
    stored: float = -math.inf
    """When the newest poll that was stored began, completed or not."""
    uncounted: Counter[Outcome] = field(default_factory=Counter)


class Watch:
    """The telemetry of this host. Safe to use from several threads; only one of them sweeps."""

    def __init__(
        self, store: Store, config: Callable[[], Config], start: Callable[[], Series], end: Callable[[Series], None]
    ) -> None:
        """`start` makes a series under canaryd's own interpreter, `end` closes it."""
        self._store = store
        self._config = config
        self._start, self._end = start, end
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._events: dict[str, dict[Bucket, Event]] = {}
        self._mutex = threading.RLock()
        self._sweeping = threading.Lock()
        self._series: Series | None = None
        self._owned: contextlib.ExitStack | None = None
        self.triggers: dict[str, str] = {}
        """Device → why its exact goldens should run now; whoever runs them takes it out."""
        self.instances: Mapping[str, Sequence[str]] = {}
        """Divided device → its instances: what happens to it happens to them."""
        self.heard: Callable[[], None] = lambda: None
        """Called when the kernel log has told something."""
        self.log_problem = ""
        """Why the kernel log is not read; "" while it is."""
        self.log_lost: Counter[str] = Counter()
        """Records that went by unread ("lost") and lines that are none ("garbled"), since this process began."""

    # -- polls --------------------------------------------------------------------------------------------------------

    def sweep(
        self, todo: Iterable[Task], *, stopped: Callable[[], bool], hold: bool = False, due: bool = False
    ) -> None:
        """Poll devices, all through one worker; with `due`, only those whose period has passed.

        `hold` keeps the worker, and with it the drivers' handles, whatever the drivers' persistence. A device whose
        polls take the worker down is asked less and less often.
        """
        with self._sweeping:
            self.own()
            for task in todo:
                lane = self._lane(task)
                if stopped():
                    break
                now = time.monotonic()
                if lane.newest is not None and lane.newest.outcome is Outcome.UNKILLABLE and process.stuck():
                    continue  # another one would hang beside it
                if now < lane.rest_until or (due and now - lane.polled < task.period * EARLY):
                    continue
                lane.polled = now
                if self._series is None:
                    self._series = self._start()
                run = self._series.run(task.request, task.timeout)
                if stopped():
                    break
                self._take(run, lane)
            if not hold and not self.holding:
                self._let_go()

    def own(self) -> bool:
        """Become the one process that records telemetry on this state directory, if no other is.

        Two that watch the same counters and the same log would count everything twice. Whoever comes second reads what
        it shows, and takes events from the store.
        """
        with self._mutex:
            if self._owned is None:
                owned = contextlib.ExitStack()
                with contextlib.suppress(Busy):
                    owned.enter_context(self._store.lock(TELEMETRY_LOCK))
                    self._owned = owned
            return self._owned is not None

    def disown(self) -> None:
        """Leave recording to others."""
        with self._mutex:
            if self._owned is not None:
                self._owned.close()
                self._owned = None

    @property
    def holding(self) -> bool:
        """Whether a driver without persistence is in use: letting go of it would reset what is to be read."""
        with self._mutex:  # a poll that failed for once is no reason to let go
            newest = [lane.completed for lane in self._lanes.values()]
        return any(
            reading.name == "persistence_mode" and not reading.value
            for run in newest
            if run is not None and abs(time.time() - run.started) < BACKOFF
            for reading in run.readings
        )

    def let_go(self) -> None:
        """End the worker that holds a driver, if one does."""
        with self._sweeping:
            self._let_go()

    def _let_go(self) -> None:
        if self._series is not None:
            self._end(self._series)
            self._series = None

    def _lane(self, task: Task) -> _Lane:
        device, probe = task.request.device.uuid, task.request.spec.name
        with self._mutex:
            if (device, probe) not in self._lanes:
                done = self._store.polls(device, probe, completed=True, limit=RECALLED)
                lane = _Lane(period=task.period, since=time.time(), kept=done[-1] if done else None)
                lane.completed = lane.kept
                lane.known = {r.key: r for run in done for r in run.readings}
                self._lanes[device, probe] = lane
            lane = self._lanes[device, probe]
            lane.period = task.period
            return lane

    def _take(self, run: Run, lane: _Lane) -> None:
        """Count a poll, find out what happened since the one before, and store it where that says something new."""
        events: list[Event] = []
        completed = run.outcome is Outcome.COMPLETED
        with self._mutex:
            same = lane.newest is not None and lane.newest.outcome is run.outcome
            if completed and lane.completed is not None:
                events = changes(replace(lane.completed, readings=tuple(lane.known.values())), run)
            if (reason := signals.lost_because(run)) and not signals.lost_because(lane.newest):
                # An event, for it is forgotten once the driver answers again.
                at = run.started
                events = [Event(device=run.device, kind="off-bus", name="driver", first=at, last=at, detail=reason)]
            events = self._store.dated(events)
            lane.newest, lane.failures = run, 0 if completed else lane.failures + 1
            if completed:
                lane.completed = run
                lane.known |= {r.key: r for r in run.readings}
            lane.rest_until = 0.0
            if run.outcome in TAKEN_DOWN:
                lane.rest_until = time.monotonic() + min(BACKOFF, lane.period * 2 ** min(lane.failures, 10))
            lane.uncounted[run.outcome] += 1
            if not self.own():
                return
            kept = lane.kept
            mark = judged_values(run) if completed else lane.mark
            new = completed and (kept is None or mark != (lane.mark or judged_values(kept)))
            due = not 0 <= run.started - lane.stored < self._config().telemetry.keep
            if events or new or due or not same:
                self._store.add_poll(run, lane.uncounted, events)
                lane.kept, lane.stored, lane.mark = (run if completed else kept), run.started, mark
                lane.uncounted = Counter()
        if events:
            self._remember(events)

    def polls(self, device: str) -> dict[str, Poll]:
        """Return the state of each telemetry probe that this process has polled on a device."""
        with self._mutex:
            return {
                probe: Poll(
                    period=lane.period,
                    newest=lane.newest,
                    completed=lane.completed,
                    failures=lane.failures,
                    since=lane.since,
                )
                for (uuid, probe), lane in self._lanes.items()
                if uuid == device
            }

    def readings(self, device: str, now: float) -> tuple[Reading, ...]:
        """Return what the fresh polls of a device say; nothing of a poll that is too old to be the truth."""
        return tuple(
            reading
            for poll in self.polls(device).values()
            if poll.completed is not None
            and not signals.lost_because(poll.newest)
            and -POLL_AHEAD <= now - poll.completed.started <= signals.stale_after(poll.period)
            for reading in poll.completed.readings
        )

    def uncounted(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return the polls that the store has not counted yet, as its `counters` would."""
        with self._mutex:
            return {
                ("probe_runs", frozenset({"device": uuid, "probe": probe, "outcome": outcome.value}.items())): float(n)
                for (uuid, probe), lane in self._lanes.items()
                for outcome, n in lane.uncounted.items()
            }

    # -- events -------------------------------------------------------------------------------------------------------

    def recall(self, now: float) -> None:
        """Read the events of the last month from the store: other processes may have added some."""
        with self._mutex:
            self._events = {}
            for event in self._store.events(since=now - MEMORY):
                self._add(event)

    def _add(self, event: Event) -> None:
        """Add an event to those in memory, as the store does: equal ones of an hour are one with a count."""
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

    def events(self, device: Device) -> tuple[Event, ...]:
        """Return what happened in the last month to a device and to the one it is an instance of, oldest first.

        What was heard of its place on the bus, or of the host, before the inventory knew it, is among it.
        """
        place = bus_key(device.detail.get("bus_id", ""))
        names = {device.uuid, device.parent, f"{BUS}{place}" if place else "", HOST if device.backend == "cpu" else ""}
        with self._mutex:
            found = [
                event if name == device.uuid else replace(event, device=device.uuid)
                for name in names - {""}
                for event in self._events.get(name, {}).values()
            ]
        return tuple(sorted(found, key=lambda event: (event.last, event.kind, event.name)))

    def happened(
        self,
        events: Sequence[Event],
        counts: Iterable[tuple[str, Mapping[str, str], float]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Store events with counters and notes in one transaction, and call for exact goldens where they ask for it."""
        events = self._store.dated(events)
        self._store.add_events(events, counts, notes)
        if events:
            self._remember(events)

    def _remember(self, events: Sequence[Event]) -> None:
        """Add to what is in memory; `recall` merges it with what the store has made of it."""
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

    def changed(self, events: Sequence[Event]) -> None:
        """Store what an inventory found changed, and count it by component."""
        if events:
            counts = [("stack_changes", {"device": e.device, "component": e.name}, 1.0) for e in events]
            self.happened(events, counts)

    def boot(self, devices: Collection[str], now: float, *, boot_id: Path = BOOT_ID) -> None:
        """Notice a reboot since the last look, and whether the daemon of the time before was stopped or cut off.

        It is dated by the machine's start: what the kernel logged since then came after it.
        """
        with contextlib.suppress(OSError):
            current = boot_id.read_text().strip()
            before, running = self._store.note(BOOT_NOTE), self._store.note(RUNNING_NOTE)
            if current and current != before:
                unclean = bool(running) and running == before
                started = now - _uptime()
                text = "the machine went down without stopping canaryd" if unclean else "the machine was rebooted"
                events = [
                    Event(
                        device=uuid,
                        kind="boot",
                        name="unclean" if unclean else "clean",
                        first=started,
                        last=started,
                        before=before,
                        after=current,
                        detail=text,
                    )
                    for uuid in devices
                    if before
                ]
                self.happened(events, notes={BOOT_NOTE: current, RUNNING_NOTE: ""})

    def runs(self, *, running: bool, boot_id: Path = BOOT_ID) -> None:
        """Note that a daemon runs on this boot, or that it stopped in good order."""
        with contextlib.suppress(OSError):
            self._store.set_note(RUNNING_NOTE, boot_id.read_text().strip() if running else "")

    # -- the kernel log -----------------------------------------------------------------------------------------------

    def read_log(self, series: Series, devices: Callable[[], Iterable[Device]], *, until_end: bool) -> None:
        """Read the kernel log from where the store says that it was counted; `log_problem` says why it ended.

        Where another process records telemetry, it reads the log as well, and nothing is done here.
        """
        if not self.own():
            self.log_problem = self._store.note(LOG_PROBLEM_NOTE)
            return
        boot, _, sequence = self._store.note(LOG_NOTE).rpartition(":")
        position = LogPosition(boot=boot, sequence=int(sequence) if sequence else -1)
        seen: Counter[str] = Counter()

        def take(records: Sequence[LogRecord], position: LogPosition) -> None:
            self._say(log_problem="")
            for name, count in (("lost", position.lost), ("garbled", position.garbled)):
                self.log_lost[name] += count - seen[name]
                seen[name] = count
            self._count(records, position, list(devices()))
            if records:
                self.heard()

        ended = series.follow(str(self._config().telemetry.kernel_log), position, take, until_end=until_end)
        self._say(log_problem=ended.partition("\n")[0])

    def _say(self, *, log_problem: str) -> None:
        self.log_problem = log_problem
        if self._store.note(LOG_PROBLEM_NOTE) != log_problem:
            self._store.set_note(LOG_PROBLEM_NOTE, log_problem)

    def _count(self, records: Sequence[LogRecord], position: LogPosition, devices: Sequence[Device]) -> None:
        note = {LOG_NOTE: f"{position.boot}:{position.sequence}"}
        if not records:
            if self._store.note(LOG_NOTE) != note[LOG_NOTE]:
                self._store.add_events((), notes=note)
            return
        events = [_told(record, devices) for record in records]
        self.happened(events, [_counter(r, e) for r, e in zip(records, events, strict=True)], note)


def _uptime() -> float:
    """Return the seconds since the machine started, sleep included; 0.0 where the system does not tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return 0.0 if clock is None else time.clock_gettime(clock)


def addressee(record: LogRecord, devices: Sequence[Device]) -> str:
    """Return whom a line of the kernel log is about: a device's uuid; until it is known, `HOST` or a place on the bus.

    A GPU's fault is never the host's, also where the GPU is not watched; other parts' faults are told by the host.
    """
    place = bus_key(record.bus_id)
    whole = [d for d in devices if not d.parent]
    for device in whole:
        if place and bus_key(device.detail.get("bus_id", "")) == place:
            return device.uuid
    if record.kind in OWN:
        return f"{BUS}{place}"
    return next((d.uuid for d in whole if d.backend == "cpu"), HOST)


def _told(record: LogRecord, devices: Sequence[Device]) -> Event:
    """Return the event of a line. What another part of the machine reports is told, and accuses nobody here."""
    event = log_event(record, addressee(record, devices))
    known = {bus_key(d.detail.get("bus_id", "")) for d in devices}
    if record.kind in FOREIGN and (place := bus_key(record.bus_id)) and place not in known:
        event = replace(event, kind="elsewhere", name=f"{record.kind} {record.name}".strip())
    now = time.time()
    if not credible(event.last, now):  # by a clock that had not been set
        event = replace(event, first=now, last=now)
    return event


def _counter(record: LogRecord, event: Event) -> tuple[str, dict[str, str], float]:
    if record.kind in ("xid", "sxid"):
        return f"{record.kind}_errors", {"device": event.device, record.kind: record.name}, 1.0
    name = event.name if event.kind == "elsewhere" else record.name
    return "kernel_log_events", {"device": event.device, "kind": event.kind, "name": name}, 1.0
