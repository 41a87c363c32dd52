"""The thresholds of the judgement that an operator can set; those of single rules are constants in the rules' files.

docs/thresholds.md lists both.
"""

from __future__ import annotations

from dataclasses import dataclass

from canaryd.config.schema import setting
from canaryd.config.values import DURATION, whole


@dataclass(frozen=True, kw_only=True)
class JudgePolicy:
    """The numbers of the judge, durations in seconds. docs/thresholds.md has source and false-alarm rate of each."""

    stale_after: float = setting(
        DURATION, '"2h"', "A device is unknown when its newest evidence is older than this and than three periods."
    )
    confirm_runs: int = setting(
        whole(1, 100), "3", "A mismatch is confirmed when this many new processes all repeat it."
    )
    repeat_window: float = setting(DURATION, '"24h"', "Two mismatches within this time make a device faulty.")
    repeat_gap: float = setting(
        DURATION, '"60s"', "Mismatches closer together than this count as one, because they may have one cause."
    )
    week_count: int = setting(whole(2, 1000), "3", "This many mismatches within judge.week make a device faulty.")
    week: float = setting(DURATION, '"7d"', "The time in which judge.week_count mismatches count.")
    watch: float = setting(DURATION, '"30d"', "A suspect device stays suspect for at least this long.")
