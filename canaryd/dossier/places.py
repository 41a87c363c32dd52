"""Where on a device a result was computed, as `Comparison.place` names it ("core 3", "SM 17", "device")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def core_of(place: str) -> int | None:
    """Return the number of the one processor core that a place names, or None."""
    found = re.fullmatch(r"core (\d+)", place)
    return int(found[1]) if found else None


def is_unit(place: str) -> bool:
    """Whether a place names exactly one core or SM."""
    return re.fullmatch(r"(core|SM) \d+", place) is not None


def by_number(place: str) -> list[Any]:
    """Return a sort key that puts "core 2" before "core 10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", place)]


def failing_core(failure: Mapping[str, Any]) -> int | None:
    """Return the processor core on which a case failed most often; None where no core is known."""
    cores = [(p["results"]["wrong"], core) for p in failure["places"] if (core := core_of(p["place"])) is not None]
    wrong, core = max(cores, key=lambda found: found[0], default=(0, None))
    return core if wrong else None
