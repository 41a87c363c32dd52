"""How probably, and after how many rounds, a fault of a story shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from canaryd.model import State, Verdict
from tests.story.catalogue import CASES, DAY, START
from tests.story.format import Story, listed, numbered
from tests.story.playing import play


def chances(story: Story) -> list[float]:
    """Return, per round, the chance that the story's `statistics.device` shows a fault for the first time in it.

    1 - (1 - p)^n over the results n that the round compares while the conditions hold: independent trials at a
    constant rate, as design and literature describe a defect that fires once in a million.
    """
    if story.statistics is None:
        raise ValueError(f"{story.name}: it has no statistics")
    name = story.statistics.device
    part = next(p for h in story.hosts for p in h.devices if name in numbered(p))
    places = 1 + part.cores if part.backend == "cpu" else 1
    found = []
    for number in range(story.rounds):
        at = START + number * story.seconds
        warm = part.temperature + part.swing * math.cos(2 * math.pi * ((at % DAY) / DAY - 15 / 24))
        clean = 0.0
        for fault in story.faults:
            holds = fault.after <= number < fault.until and warm > fault.temperature_above
            if holds and name in listed(fault.device, [name]):
                cases = 1 if fault.case else len(CASES)
                trials = part.trials * cases * (1 if fault.seed else 2) * (1 if fault.place else places)
                clean += trials * math.log1p(-min(fault.probability, 1 - 1e-12))
        found.append(-math.expm1(clean))
    return found


def rounds_until(each: Sequence[float], probability: float) -> int | None:
    """Return after how many rounds a fault has shown with this probability; None where the rounds are too few."""
    clean = 1.0
    for number, chance in enumerate(each):
        clean *= 1.0 - chance
        if 1.0 - clean >= probability:
            return number + 1
    return None


def detected(story: Story, seed: int) -> int | None:
    """Return in which round, counted from 1, the device of `statistics` reached its state; None for never."""
    wanted = story.statistics
    if wanted is None:
        raise ValueError(f"{story.name}: it has no statistics")
    least = State(wanted.state).severity
    found: list[int] = []

    def watch(number: int, verdicts: Mapping[str, Verdict]) -> bool:
        if verdicts[wanted.device].state.severity >= least:
            found.append(number + 1)
        return bool(found)

    play(story, seed=seed, watch=watch)
    return found[0] if found else None


def too_rare(times: int, trials: int, chance: float) -> bool:
    """Whether so few or so many events would come less often than once in a thousand (two-sided binomial test)."""
    each = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    return min(sum(each[: times + 1]), sum(each[times:])) < 5e-4
