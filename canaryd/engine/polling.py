"""Telemetry: poll what devices and drivers report. A change between two polls becomes an event.

One sweep polls every device through one worker, which then ends, so that no driver is held between sweeps. The
exception is a driver without persistence, which would initialise its devices again each time (`Watch.holding`). A poll
is stored when it shows something new, and at least every `KEEP` seconds; every event is stored.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from canaryd.config.settings import Config
from canaryd.engine import schedule
from canaryd.engine.events import LOST, EventHistory
from canaryd.engine.host import Host
from canaryd.engine.kernel_log import KernelLog
from canaryd.facts import Reading
from canaryd.judge.clock import POLL_AHEAD
from canaryd.judge.telemetry import signals
from canaryd.judge.telemetry.events import changes, judged_values, unread
from canaryd.judge.telemetry.signals import Poll
from canaryd.model import Device, Event, Outcome, Run
from canaryd.store.locks import Busy
from canaryd.store.notes import TELEMETRY_LOCK
from canaryd.store.store import Store
from canaryd.supervisor import process
from canaryd.supervisor.protocol import RunRequest
from canaryd.supervisor.series import Series

KEEP = 300.0
"""Seconds after which a poll is stored even if it shows nothing new."""
RECALLED = 20
"""Number of completed polls that are read at a start: the newest may lack a value that an older one has."""
EARLY = 0.7
"""Fraction of its period after which a poll is due, because sweeps do not start at exact times."""
BACKOFF = 600.0
"""Longest pause, in seconds, between two polls of a device whose polls crash or hang their worker."""
TAKEN_DOWN = (Outcome.TIMED_OUT, Outcome.CRASHED, Outcome.UNKILLABLE, Outcome.GARBLED, Outcome.OUT_OF_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of a telemetry probe on one device."""

    request: RunRequest
    timeout: float
    """Seconds after which the poll is killed."""
    period: float
    """Seconds between two polls of this probe on this device."""


@dataclass
class _Lane:
    """The state of the polls of one telemetry probe on one device."""

    poll: Poll
    """What the judge sees of them."""
    polled: float = -math.inf
    """Monotonic time of the newest poll."""
    rest_until: float = 0.0
    """Monotonic time before which the device is not polled again."""
    recorded: Run | None = None
    """The newest completed poll whose events this or another process recorded; the next poll is compared with it."""
    kept: Run | None = None
    """The newest completed poll that was stored."""
    mark: tuple[tuple[str, float | str], ...] | None = None
    """The values in `kept` that are compared: a poll with other values is worth storing."""
    stored: float = -math.inf
    """Start (epoch s) of the newest stored poll, completed or not."""
    uncounted: Counter[Outcome] = field(default_factory=Counter)
    """Outcome → number of polls that the store has not counted yet."""

    def should_poll(self, now: float, period: float, *, due: bool) -> bool:
        """Return whether to poll at monotonic time `now`; with `due`, only if most of the period has passed."""
        newest = self.poll.newest
        if newest is not None and newest.outcome is Outcome.UNKILLABLE and process.stuck():
            return False  # another worker would hang as well
        return now >= self.rest_until and not (due and now - self.polled < period * EARLY)

    def events(self, run: Run) -> list[Event]:
        """Return the events that the new poll `run` shows, compared with the polls before it."""
        poll = self.poll
        if (reason := signals.lost_because(run)) and not signals.lost_because(poll.newest):
            # An event, because the loss no longer shows once the driver answers again.
            at = run.started  # it came at an unknown time since the poll before
            first = min(at, poll.completed.started) if poll.completed else at
            return [Event(device=run.device, kind=LOST[0], name=LOST[1], first=first, last=at, detail=reason)]
        if run.outcome is Outcome.COMPLETED and self.recorded is not None:
            failed = poll.newest.started if poll.failures and poll.newest is not None else 0.0
            return changes(replace(self.recorded, readings=tuple(r for r, _ in poll.known.values())), run, failed)
        return []

    def recall(self, polls: Sequence[Run]) -> None:
        """Continue from the completed `polls` in the store (oldest first), if they are newer than those in memory."""
        if polls and (self.recorded is None or polls[-1].started > self.recorded.started):
            self.kept = self.recorded = polls[-1]
            self.mark = None
            for run in polls:
                self._know(run)

    def take(self, run: Run, *, recorded: bool) -> None:
        """Make `run` the newest poll; `recorded`: this process records the events since the poll before it."""
        completed, poll = run.outcome is Outcome.COMPLETED, self.poll
        if completed:
            before = poll.completed.started if poll.completed else 0.0
            self.poll = replace(poll, newest=run, completed=run, before=before, failures=0)
        else:
            self.poll = replace(poll, newest=run, failures=poll.failures + 1)
        if completed and recorded:
            self.recorded = run
            self._know(run)
        self.rest_until = 0.0
        if run.outcome in TAKEN_DOWN:
            self.rest_until = time.monotonic() + min(BACKOFF, poll.period * 2 ** min(self.poll.failures, 10))
        self.uncounted[run.outcome] += 1

    def _know(self, run: Run) -> None:
        """Add a poll's readings to those that are known."""
        lost = {u.reading.key: (u.reading, u.at) for u in run.unread}
        known = {**self.poll.known, **lost, **{r.key: (r, run.started) for r in run.readings}}
        self.poll = replace(self.poll, known=known)


class Watch:
    """The telemetry of this host. Safe to use from several threads; only one of them sweeps."""

    def __init__(
        self,
        store: Store,
        config: Callable[[], Config],
        start: Callable[[], Series],
        end: Callable[[Series], None],
        clock: Callable[[], float],
    ) -> None:
        """Start without polls. `start` makes a series under canaryd's own interpreter; `end` closes it."""
        self._store = store
        self._clock = clock
        self._config = config
        self._start, self._end = start, end
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._mutex = threading.RLock()
        self._sweeping = threading.Lock()
        self._series: Series | None = None
        self._owned: contextlib.ExitStack | None = None
        self.history = EventHistory(store)
        self.kernel_log = KernelLog(store, self.history)

    # -- polls --------------------------------------------------------------------------------------------------------

    def sweep(
        self,
        todo: Iterable[Task],
        *,
        stopped: Callable[[], bool],
        hold: bool,
        due: bool,
        record: bool,
    ) -> None:
        """Poll devices through one worker; with `due`, only devices whose period has passed.

        `record` stores every poll, even if it shows nothing new. `hold` keeps the worker after the sweep, and with it
        the drivers' handles. A device whose polls crash or hang the worker is polled less and less often.
        """
        with self._sweeping:
            self.own()
            for task in todo:
                lane = self._lane(task.request.device.uuid, task.request.spec.name, task.period)
                if stopped():
                    break
                now = time.monotonic()
                if not lane.should_poll(now, task.period, due=due):
                    continue
                lane.polled = now
                if self._series is None:
                    self._series = self._start()
                run = self._series.run(task.request, task.timeout)
                if stopped():
                    break
                self._take(run, lane, record=record)
            if not hold and not self.holding:
                self._let_go()

    def look(self, todo: Iterable[Task], *, stopped: Callable[[], bool]) -> tuple[Reading, ...]:
        """Return fresh telemetry readings for one decision; they are neither stored nor judged.

        A driver that hung in a recent poll is not asked.
        """
        found: list[Reading] = []
        with self._sweeping:
            held = self._series is not None
            for task in todo:
                lane = self._lanes.get((task.request.device.uuid, task.request.spec.name))
                if stopped():
                    break
                if lane is not None and not lane.should_poll(time.monotonic(), task.period, due=False):
                    continue
                if self._series is None:
                    self._series = self._start()
                found += self._series.run(task.request, task.timeout).readings
            if not held:
                self._let_go()
        return tuple(found)

    def own(self) -> bool:
        """Make this process the one that records telemetry in the state directory; return False if another process is.

        Two recorders would count every rise of a counter and every line of the log twice. The other processes use the
        readings of the recording process, and read events from the store.
        """
        with self._mutex:
            if self._owned is None:
                owned = contextlib.ExitStack()
                with contextlib.suppress(Busy):
                    owned.enter_context(self._store.lock(TELEMETRY_LOCK))
                    self._owned = owned
                    for (device, probe), lane in self._lanes.items():  # another process may have recorded meanwhile
                        lane.recall(self._store.polls(device, probe, completed=True, limit=RECALLED))
            return self._owned is not None

    def disown(self) -> None:
        """Stop recording telemetry, so that another process can."""
        with self._mutex:
            if self._owned is not None:
                self._owned.close()
                self._owned = None

    @property
    def holding(self) -> bool:
        """Whether a driver without persistence is in use: closing it would reset values that the next poll reads."""
        with self._mutex:  # only completed polls: one failed poll must not release the driver
            newest = [lane.poll.completed for lane in self._lanes.values()]
        return any(
            reading.name == "persistence_mode" and not reading.value
            for run in newest
            if run is not None and abs(time.time() - run.started) < BACKOFF
            for reading in run.readings
        )

    def let_go(self) -> None:
        """End the worker that holds a driver, if there is one."""
        with self._sweeping:
            self._let_go()

    def _let_go(self) -> None:
        if self._series is not None:
            self._end(self._series)
            self._series = None

    def _lane(self, device: str, probe: str, period: float, known_since: float = 0.0) -> _Lane:
        """Return the state of a probe's polls on a device. A new one starts with polls stored since `known_since`."""
        with self._mutex:
            if (device, probe) not in self._lanes:
                lane = _Lane(Poll(period=period, newest=None, completed=None, since=self._clock()))
                lane.recall(self._store.polls(device, probe, known_since, completed=True, limit=RECALLED))
                if last := lane.recorded:
                    lane.poll = replace(lane.poll, completed=last, before=last.started)
                self._lanes[device, probe] = lane
            lane = self._lanes[device, probe]
            lane.poll = replace(lane.poll, period=period)
            return lane

    def _take(self, run: Run, lane: _Lane, *, record: bool) -> None:
        """Count a poll, find the events since the previous poll, and store the poll if it shows something new."""
        with self._mutex:
            if lost := unread(run, lane.poll.known):  # on record too: polls that had it are forgotten
                run = replace(run, unread=lost)
            same = lane.poll.newest is not None and lane.poll.newest.outcome is run.outcome
            owned = self.own()
            events = self._store.dated(lane.events(run))
            lane.take(run, recorded=owned)
            if not owned:
                return
            completed = run.outcome is Outcome.COMPLETED
            mark = judged_values(run) if completed else lane.mark
            new = completed and (lane.kept is None or mark != (lane.mark or judged_values(lane.kept)))
            due = not 0 <= run.started - lane.stored < KEEP
            if record or events or new or due or not same:
                self._store.add_poll(run, lane.uncounted, events)
                lane.kept, lane.stored, lane.mark = (run if completed else lane.kept), run.started, mark
                lane.uncounted = Counter()
        self.history.remember(events)

    def polls(self, device: str) -> dict[str, Poll]:
        """Return telemetry probe → state of its polls on a device; probes without a poll in memory are left out."""
        with self._mutex:
            return {
                probe: lane.poll
                for (uuid, probe), lane in self._lanes.items()
                if uuid == device and (lane.poll.newest or lane.poll.completed)
            }

    def recorded(self, device: str, periods: Mapping[str, float], since: float) -> dict[str, Poll]:
        """Return telemetry probe → state of its polls, for the judge. Everything before `since` is left out.

        Stored polls stand in for probes that this process has not polled yet. A device's reports thus count from the
        first verdict after a start, even if the device is gone and cannot be polled.
        """
        with self._mutex:
            for probe in periods.keys() - {probe for uuid, probe in self._lanes if uuid == device}:
                self._lane(device, probe, periods[probe], since)
            found = self.polls(device)
        return {probe: poll.after(since) for probe, poll in found.items()} if since else found

    def lost(self, device: str) -> bool:
        """Return whether the newest poll says that a device no longer answers its driver."""
        return any(signals.lost_because(poll.newest) for poll in self.polls(device).values())

    def readings(self, device: str, now: float) -> tuple[Reading, ...]:
        """Return the readings of a device's fresh polls; stale polls contribute none."""
        return tuple(
            reading
            for poll in self.polls(device).values()
            if poll.completed is not None
            and not signals.lost_because(poll.newest)
            and -POLL_AHEAD <= now - poll.completed.started <= signals.stale_after(poll.period)
            for reading in poll.completed.readings
        )

    def uncounted(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return counter → number of polls that the store has not counted yet, with the keys of `Store.counters`."""
        with self._mutex:
            return {
                ("probe_runs", frozenset({"device": uuid, "probe": probe, "outcome": outcome.value}.items())): float(n)
                for (uuid, probe), lane in self._lanes.items()
                for outcome, n in lane.uncounted.items()
            }

    # -- the kernel log -----------------------------------------------------------------------------------------------

    def read_log(self, series: Series, devices: Callable[[], Iterable[Device]], *, until_end: bool) -> None:
        """Read the kernel log from the last stored position; `kernel_log.problem` then says why reading ended."""
        path = self._config().telemetry.kernel_log
        self.kernel_log.read(path, series, devices, until_end=until_end, owned=self.own())


def poll_tasks(host: Host, uuids: Collection[str] = ()) -> list[Task]:
    """Return a task for each telemetry probe on each device in place, or only on the devices in `uuids` if given.

    With `uuids`, probes that a restricted check left out are included.
    """
    periods = host.telemetry_periods()
    devices = sorted((d for u, d in host.devices.items() if u in host.in_place), key=lambda d: d.uuid)
    return [
        Task(
            request=RunRequest(
                probe_path=entry.file.path,
                spec=entry.spec,
                device=device,
                level="quick",
                seed=0,
                settings=host.settings(name).settings,
                memory=str(host.config.state_dir / "memory"),
            ),
            timeout=host.timeout(entry.spec, "quick"),
            period=periods[name],
        )
        for name, entry in sorted(host.entries.items(), key=lambda item: item[1].spec.order)
        if entry.spec.telemetry and (uuids or not host.asked.probes or name in host.asked.probes)
        for device in devices
        if schedule.applies(entry, device) and (not uuids or device.uuid in uuids)
    ]
