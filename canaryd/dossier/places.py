"""Where on a device results were computed, from the `places` of a failure in a dossier's JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from canaryd.dossier.text import counted, share, wrong_places
from canaryd.judge.statistics import RULE_OF_THREE

NAMED = 4
"""Places that are named one by one."""
LEAST_RUNS = 1000
"""Of a script at least (ours)."""
COPIED = 10
"""Runs of a script between two fresh copies of the operands (ours): some faults spoil all results of a copy, others
need a device that is busy."""


def is_unit(place: Mapping[str, Any]) -> bool:
    """Return whether a place names exactly one core or SM."""
    return place["unit"] in ("core", "sm") and len(place["numbers"]) == 1


def failing_core(failure: Mapping[str, Any]) -> int | None:
    """Return the processor core on which a case failed most often; None where no core is known."""
    cores = [p for p in failure["places"] if is_unit(p) and p["unit"] == "core" and p["results"]["wrong"]]
    worst = max(cores, key=lambda p: p["results"]["wrong"], default=None)
    return None if worst is None else int(worst["numbers"][0])


def enough_runs(failure: Mapping[str, Any], document: Mapping[str, Any]) -> int:
    """Return how many runs of a failing case show its fault with 95 % probability, as often as it was recorded.

    A case is named because it failed, so its own rate is too high: what its test computed, or its core, counts too.
    Results of one upload may be wrong together, so there are enough fresh copies as well.
    """
    core = failing_core(failure)
    at = [p for p in document["places"] if is_unit(p) and p["unit"] == "core" and p["numbers"] == [core]]
    all_of_it = at or [p for p in document["probes"] if p["probe"] == failure["probe"]]
    each = [
        repeats * math.ceil(RULE_OF_THREE * tally[kind]["total"] / tally[kind]["wrong"])
        for tally in (failure, *all_of_it)
        for kind, repeats in (("results", 1), ("uploads", COPIED))
        if tally[kind]["wrong"]
    ]
    runs: int = max(each)
    digits: int = 10 ** max(0, len(str(runs)) - 2)
    return max(LEAST_RUNS, math.ceil(runs / digits) * digits)


def told_places(failure: Mapping[str, Any]) -> str:
    """Return where a case failed, worst first, with the shares: "core 3: 8 of 32 (25 %)"; "" where nobody knows."""
    wrong = sorted(wrong_places(failure), key=lambda p: -p["results"]["wrong"])
    told = [
        f"{p['place']}: {counted(p['results'])} ({share(p['results']['wrong'] / p['results']['total'])})"
        for p in wrong[:NAMED]
    ]
    return ", ".join([*told, *([f"{len(wrong) - NAMED} more"] if len(wrong) > NAMED else [])])


def shared_lines(failure: Mapping[str, Any]) -> str:
    """Return in which rows, columns and the like all wrong elements of a case lie, as a sentence; "" for nothing."""
    shared = "; ".join(f"{axis} {text}" for axis, text in failure["lines"].items())
    return f"All wrong elements lie in {shared}." if shared else ""
