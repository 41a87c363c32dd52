"""Where on a device results were computed, from the `places` of a failure in a dossier's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_unit(place: Mapping[str, Any]) -> bool:
    """Return whether a place names exactly one core or SM."""
    return place["unit"] in ("core", "sm") and len(place["numbers"]) == 1


def failing_core(failure: Mapping[str, Any]) -> int | None:
    """Return the processor core on which a case failed most often; None where no core is known."""
    cores = [p for p in failure["places"] if is_unit(p) and p["unit"] == "core" and p["results"]["wrong"]]
    worst = max(cores, key=lambda p: p["results"]["wrong"], default=None)
    return None if worst is None else int(worst["numbers"][0])
