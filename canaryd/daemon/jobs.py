"""The daemon's periodic jobs, and their reaction to a jump of the clock."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime, timezone

from apscheduler.executors.pool import ThreadPoolExecutor as JobPool
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from canaryd.daemon.logs import log_failure

log = logging.getLogger("canaryd")

CLOCK_JUMP = 5.0
"""Seconds by which wall clock and monotonic clock can drift apart before all jobs are rescheduled."""
GENERAL, DEVICES = "default", "devices"
"""Names of the two thread pools: one for jobs that never wait for a device, one for jobs that do."""


class _Period(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """A trigger that fires at regular intervals and skips the times that were missed.

    APScheduler's own trigger lists every missed time in memory: tens of millions if the clock was set a year ahead.
    """

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        following: datetime = super().get_next_fire_time(previous_fire_time, now)
        return now + self.interval if previous_fire_time is not None and following <= now else following


class Jobs:
    """Functions that run periodically in one of two thread pools. A function never runs twice at the same time."""

    def __init__(self) -> None:
        self.scheduler = BackgroundScheduler(
            timezone=timezone.utc,
            # More threads than there are general jobs: none waits for another, however long that one takes.
            executors={GENERAL: JobPool(8), DEVICES: JobPool(32)},
            # However long the process slept, a job runs once and at once; a running one is not started again.
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._clock_offset = _clock_offset()
        logging.getLogger("apscheduler").setLevel(logging.ERROR)

    def every(
        self, seconds: float, what: Callable[[], object], name: str, *, now: bool = False, pool: str = GENERAL
    ) -> None:
        """Run `what` every `seconds`; with `now` the first run is at once. This replaces a job of the same name."""

        def run() -> None:
            with log_failure(name):
                what()

        first = {"next_run_time": datetime.now(timezone.utc)} if now else {}
        trigger = _Period(seconds=seconds, timezone=timezone.utc)
        self.scheduler.add_job(run, trigger, id=name, replace_existing=True, executor=pool, **first)

    def has(self, name: str) -> bool:
        """Return whether a job of that name exists."""
        return self.scheduler.get_job(name) is not None

    def follow_clock(self) -> None:
        """Run every job now if the clock has jumped since the last call.

        The scheduler uses wall time: after a jump back it would sleep until the old time is reached again.
        """
        jump = _clock_offset() - self._clock_offset
        if abs(jump) > CLOCK_JUMP:
            log.warning("the clock jumped by %+.0f s; all jobs run now", jump)
            self._clock_offset += jump
            for job in self.scheduler.get_jobs():
                job.modify(next_run_time=datetime.now(timezone.utc))


def _clock_offset() -> float:
    return time.time() - time.monotonic()
