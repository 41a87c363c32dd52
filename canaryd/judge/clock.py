"""Decide which times are credible: a clock can be unset, can run ahead, and can be set back."""

from __future__ import annotations

import math

from canaryd.model import Run

EPOCH = 1_577_836_800.0
"""2020-01-01: a clock that shows an earlier time was never set (ours). False alarms: none, it only changes dates."""
AHEAD = 3600.0
"""Seconds in the future from which a run has no known age (ours): smaller errors come from a clock that was corrected.
False alarms: none, such a run is no fresh evidence, and such an acknowledgement does not count."""
POLL_AHEAD = 60.0
"""Seconds by which a poll can be in the future and still show the present: clocks get adjusted (ours)."""


def credible(at: float, now: float) -> bool:
    """Return whether a time (s since the epoch) was read from a clock that was set, and is not in the future."""
    return EPOCH <= at <= now


def age(run: Run, now: float) -> float:
    """Return the seconds since a run began, or infinity if its start is in the future: its age is then unknown."""
    return now - run.started if run.started <= now + AHEAD else math.inf
