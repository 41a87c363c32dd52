"""The time that the store believes: a node's clock may jump, start in 1970 or run years ahead."""

from __future__ import annotations

from collections.abc import Callable

from canaryd.formatting import DAY
from canaryd.judge.clock import EPOCH
from canaryd.store.rows import END, HOUR

MAX_LAG = DAY
"""Seconds that a clock may be behind the confirmed time; one further behind is not believed (ours)."""
STEP = 2 * HOUR
"""Seconds that the confirmed time advances at most in one prune: twice the daemon's hour, so that an hour of a wrong
clock costs no more than two (ours)."""
JUMP = 60.0
"""Seconds by which the clock may part from the monotonic one between two prunes; more means it was set (ours)."""
REACHED_NOTE = "reached"
"""Note: the confirmed time, in seconds since the epoch."""
AGED_NOTE = "aged"
"""Note: the time by which records are deleted, in seconds since the epoch."""


def parse_time(text: str) -> float:
    """Return the seconds since the epoch that a note holds; raise `ValueError` for what cannot be a time."""
    at = float(text)
    if not 0 <= at < END:
        raise ValueError(f"{text} is not a time")
    return at


class Clock:
    """The system clock, corrected for jumps. All times are seconds since the epoch.

    The confirmed time has come for certain, however wrong the clock was. It follows the clock by at most `STEP` at each
    prune and never goes back, unless the clock has run for a day without a jump: then the clock is right.
    """

    def __init__(
        self,
        now: Callable[[], float],
        monotonic: Callable[[], float],
        load: Callable[[str], float],
        save: Callable[[str, float], object],
    ) -> None:
        """`now` and `monotonic` are the system's clocks; `load` and `save` keep the times of the notes above."""
        self.now = now
        self._monotonic = monotonic
        self._load = load
        self._save = save
        self._newest = 0.0
        """The newest time of storing."""
        self._set: tuple[float, float] | None = None
        """When the clock was last set: by the clock itself, and by the monotonic one."""

    @property
    def confirmed(self) -> float:
        """A time that has come for certain; 0.0 at first."""
        return self._load(REACHED_NOTE)

    def saw(self, stored: float) -> None:
        """Take note of a time of storing in the database."""
        self._newest = max(self._newest, stored)

    def stamp(self) -> float:
        """Return the time of storing: it never runs back, so that new evidence does not look old."""
        now = self.now()
        if now < EPOCH:  # a clock that was never set means nothing
            return self._newest or now
        # Far ahead of the clock, the newest time may come from a clock that ran ahead: the confirmed time is enough.
        floor = self._newest if self._newest - now < MAX_LAG else self.confirmed or self._newest
        self._newest = max(now, floor)
        return self._newest

    def advance(self, now: float) -> float:
        """Let the confirmed time follow the clock, and return the time by which records are deleted.

        That time follows by at most `STEP` at each prune, however long the clock has run: one that stands years ahead
        for days must delete nothing that the years would. The price is that all is kept longer after an outage.
        """
        confirmed, tick = self.confirmed, self._monotonic()
        if now < EPOCH:
            return min(filter(None, (confirmed or self._newest, self._load(AGED_NOTE))), default=0.0)
        if self._set is None or abs((now - self._set[0]) - (tick - self._set[1])) > JUMP:
            self._set = now, tick
        before = confirmed or self._newest or now
        # A clock that has run for a day without a jump is right, however far it is from what was believed.
        right = tick - self._set[1] >= DAY
        after = now if right else min(now, before + STEP)
        if after > confirmed or (right and after < confirmed - MAX_LAG):
            self._save(REACHED_NOTE, after)
            self._newest = min(self._newest, after)
        aged = min(after, (self._load(AGED_NOTE) or before) + STEP)
        self._save(AGED_NOTE, aged)
        return aged
