"""Which times are credible: one rule for polls, events and messages."""

from __future__ import annotations

EPOCH = 1_577_836_800.0
"""2020-01-01: a clock that shows an earlier time has not been set (ours). False alarms: none, it only moves events."""
POLL_AHEAD = 60.0
"""Seconds by which a poll may be dated in the future and still describe the present: clocks get adjusted (ours)."""


def credible(at: float, now: float) -> bool:
    """Whether a time (seconds since the epoch) comes from a clock that was set, and is not in the future."""
    return EPOCH <= at <= now
