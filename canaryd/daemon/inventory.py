"""The daemon's regular search for devices and probes, and the start of jobs for what it finds."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from canaryd.daemon.jobs import DEVICES, Jobs
from canaryd.daemon.logs import Warnings
from canaryd.daemon.rounds import TICK, Rounds
from canaryd.engine.engine import Engine

log = logging.getLogger("canaryd")

REDISCOVER = 3600.0
"""Seconds between two inventories of devices and probes."""
RETRY = 60.0
"""Seconds to the next inventory if a device is missing, a device cannot compute yet, or there was nothing to test.
The wait grows with the time for which a device has been missing, up to `REDISCOVER`."""
SWEEP = 5.0
"""Minimum time in seconds between two sweeps of telemetry."""
LOG_RETRY = 60.0
"""Seconds to the next attempt to read the kernel log after a failure."""


class Inventories:
    """Takes inventories, and starts the jobs for devices, for telemetry and for the kernel log."""

    def __init__(
        self,
        engine: Engine,
        jobs: Jobs,
        rounds: Rounds,
        warnings: Warnings,
        *,
        changed: Callable[[], None],
        refresh: Callable[[], None],
        stop: threading.Event,
    ) -> None:
        """Store the arguments. `changed` publishes; `refresh` judges and publishes; `stop` ends the log's reader."""
        self._engine = engine
        self._jobs = jobs
        self._rounds = rounds
        self._warnings = warnings
        self._changed = changed
        self._refresh = refresh
        self._stop = stop
        self.pending = False
        """Whether an inventory was asked for since the last one began."""
        self.swept = -math.inf
        """When a sweep last judged and published, by the monotonic clock."""
        self._sweep_period = 0.0
        self._kernel_log: threading.Thread | None = None
        self._missing: frozenset[str] = frozenset()
        """Devices that the last inventory did not find or could not reach; also "torch" where it could not be asked."""
        self._lost: set[str] = set()
        """Devices in place that the driver had lost at the last sweep."""
        self._missing_since = 0.0
        """When one was added to them last, by the monotonic clock."""

    def look_around(self) -> None:
        """Request an inventory now. An inventory in progress may be too old, so another one follows it."""
        self.pending = True
        self._jobs.every(REDISCOVER, self.discover, "discover", now=True)

    def discover(self) -> None:
        """Take inventories until no further one is requested."""
        self.pending = True
        while self.pending and not self._engine.halted:  # the scheduler drops what falls due while this runs
            self.pending = False
            self.take()

    def take(self) -> None:
        """Take one inventory, start the jobs for new devices, and set the time of the next inventory."""
        engine = self._engine
        engine.discover(log.info)
        self._warnings.log(engine.problems)
        for uuid in engine.devices:
            name = f"device {uuid}"
            if not self._jobs.has(name):
                self._rounds.recall_spent(uuid)
                self._jobs.every(TICK, lambda uuid=uuid: self._rounds.tick(uuid), name, now=True, pool=DEVICES)  # type: ignore[misc]
        periods = engine.telemetry_periods().values()
        if periods and min(periods) != self._sweep_period:
            self._sweep_period = min(periods)
            self._jobs.every(max(SWEEP, self._sweep_period), self.sweep, "telemetry", now=True, pool=DEVICES)
        if self._kernel_log is None and engine.devices:  # each line belongs to a device: first there must be one
            reader = threading.Thread(target=self._read_kernel_log, name="canaryd-kernel-log", daemon=True)
            reader.start()  # where there can be no further thread, the next inventory tries again
            self._kernel_log = reader
        self._jobs.every(self._wait(), self.discover, "discover")
        self._refresh()

    def _wait(self) -> float:
        """Return the seconds to wait for the next inventory."""
        engine, now = self._engine, time.monotonic()
        missing = frozenset(
            engine.devices.keys() - engine.present | engine.failing.keys() & {"torch"} | engine.unreached()
        )
        if missing - self._missing:
            self._missing_since = now
        self._missing = missing
        if not (engine.present and engine.entries):
            return RETRY
        return min(max(RETRY, now - self._missing_since), REDISCOVER) if missing else REDISCOVER

    def sweep(self) -> None:
        """Poll the telemetry of every device, and publish the result at once."""
        if self._engine.halted:
            return
        self._engine.sweep(due=True)
        self._changed()
        self.swept = time.monotonic()
        lost = {uuid for uuid in self._engine.in_place if self._engine.watch.lost(uuid)}
        if lost != self._lost & self._engine.in_place:
            self.look_around()  # what the driver has lost may be on no list any more, and what answers again is on one
        self._lost = lost

    def _read_kernel_log(self) -> None:
        """Read the kernel log as long as the daemon runs; replace a reader that dies."""
        while not self._engine.stopping:
            kernel_log = self._engine.watch.kernel_log
            try:
                self._engine.read_log(until_end=False)
            except Exception:
                if self._engine.stopping:
                    return  # the store may be closed by now
                log.exception("reading the kernel log failed; trying again in %.0f s", LOG_RETRY)
                kernel_log.set_problem("it failed; see the log of canaryd")
            if not self._engine.stopping:
                if problem := kernel_log.problem:
                    self._warnings.log([f"kernel log: {problem}"])
                    self._changed()
                self._stop.wait(LOG_RETRY if problem else SWEEP)
