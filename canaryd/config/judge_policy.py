"""The thresholds that several rules share. Thresholds of a single rule are constants in that rule's file.

docs/thresholds.md lists both, with source and false-alarm rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from canaryd.config.schema import setting
from canaryd.config.values import DURATION


@dataclass(frozen=True, kw_only=True)
class JudgePolicy:
    """The judge's thresholds; durations are in seconds. Only `stale_after` is a setting."""

    stale_after: float = setting(
        DURATION, '"2h"', "A device is unknown when its newest evidence is older than this and than three periods."
    )
    confirm_runs: ClassVar[int] = 3
    """Number of repeats, each in a new process, that must all fail to confirm a wrong result."""
    repeat_window: ClassVar[float] = 86_400.0
    """Seconds within which two wrong runs make a device faulty."""
    repeat_gap: ClassVar[float] = 60.0
    """Seconds below which two wrong runs count as one, because both can have one cause."""
    week_count: ClassVar[int] = 3
    """Number of wrong runs within `week` that make a device faulty."""
    week: ClassVar[float] = 7 * 86_400.0
    watch: ClassVar[float] = 30 * 86_400.0
    """Least time in seconds for which a suspect device stays suspect: its observation period."""
