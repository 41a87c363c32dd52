"""The daemon's periodic jobs, and what a jump of the clock does to them."""

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
"""Seconds by which wall and monotonic clock may part before the jobs are rescheduled."""
GENERAL, DEVICES = "default", "devices"
"""The two thread pools: jobs that never wait for a device, and jobs that do."""


class _Period(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Fires every so many seconds, without a list of all that was missed.

    APScheduler's own trigger makes one entry for each, in memory: after a clock that was set a year ahead, tens of
    millions.
    """

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        following: datetime = super().get_next_fire_time(previous_fire_time, now)
        return now + self.interval if previous_fire_time is not None and following <= now else following


class Jobs:
    """Functions that run periodically, each in a thread of its pool and never twice at once."""

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
        """Run `what` periodically, the first time after one period, or `now`; replaces the job of that name."""

        def run() -> None:
            with log_failure(name):
                what()

        first = {"next_run_time": datetime.now(timezone.utc)} if now else {}
        trigger = _Period(seconds=seconds, timezone=timezone.utc)
        self.scheduler.add_job(run, trigger, id=name, replace_existing=True, executor=pool, **first)

    def has(self, name: str) -> bool:
        """Return whether there is a job of that name."""
        return self.scheduler.get_job(name) is not None

    def follow_clock(self) -> None:
        """Run every job now if the clock has jumped since the last call.

        The scheduler counts in wall time: after a jump back it would sleep until the old hour returns.
        """
        jump = _clock_offset() - self._clock_offset
        if abs(jump) > CLOCK_JUMP:
            log.warning("the clock jumped by %+.0f s; all jobs run now", jump)
            self._clock_offset += jump
            for job in self.scheduler.get_jobs():
                job.modify(next_run_time=datetime.now(timezone.utc))


def _clock_offset() -> float:
    return time.time() - time.monotonic()
