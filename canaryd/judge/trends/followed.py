"""Which readings are followed over time, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from canaryd.facts import SPEEDS
from canaryd.judge.telemetry.readings import split_key


@dataclass(frozen=True, kw_only=True)
class Followed:
    """How a reading is followed."""

    worse: int = 0
    """1 where more is worse, -1 where less is, 0 where neither."""
    level: str = "median"
    """"median"; "mean"; "best", the edge of the best quarter, for what other work on the device only makes worse."""
    rule: str = ""
    """The kind of rule that judges it: "slower", "error" or "hotter"; "" for what is only shown."""


SHOWN = Followed()
FOLLOWED: Mapping[str, Followed] = {
    "kernel_seconds": Followed(worse=1, level="best", rule="slower"),
    "recorded_error_ratio": Followed(worse=1, rule="error"),
    "canary_logit_distance": Followed(worse=1, rule="error"),
    "canary_margin_min": Followed(worse=-1),
    "canary_sensitive_margin": SHOWN,
    # Latencies of endpoints depend on their load; `judge.recordings` judges them where the load is known.
    "endpoint_first_token_seconds": Followed(worse=1),
    "endpoint_token_seconds": Followed(worse=1),
    "temperature_celsius": Followed(worse=1),
    "power_watts": SHOWN,
    "power_limit_watts": SHOWN,
    "clock_hertz": Followed(worse=-1),
    "utilization_ratio": SHOWN,
    "load_average": SHOWN,
    "fan_ratio": SHOWN,
    # Counters as rates; `judge.telemetry` judges them.
    "ecc_errors_total": Followed(worse=1, level="mean"),
    "edac_errors_total": Followed(worse=1, level="mean"),
    "pcie_replays_total": Followed(worse=1, level="mean"),
    "throttle_seconds_total": Followed(worse=1, level="mean"),
}
"""Readings that are followed over time."""
SPEED = Followed(worse=-1, level="best", rule="slower")
"""Every reading whose name begins with `speed_`."""
HEAT = Followed(worse=1, rule="hotter")
"""Temperatures within one band of power."""


def followed(reading: str) -> Followed | None:
    """Return how a reading (name or key) is followed; None where it is not."""
    name, labels = split_key(reading)
    if name == "temperature_celsius" and "power" in labels:
        return HEAT
    if name.startswith(SPEEDS):
        return SPEED
    return FOLLOWED.get(name)
