"""What to run next: pure functions of the catalogue, the clock and what ran before."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from canaryd.catalogue import Entry
from canaryd.model import Device, Run

CONFIRMED_UNKNOWN = 8
"""Cases with unknown bits that it repeats: all that an endpoint's quick run has."""
CONFIRMED_CASES = 3
"""Wrong cases that one confirmation run repeats: more say nothing new, and make the repro command unreadable."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One probe to run within a series."""

    entry: Entry
    level: str
    seed: int
    cases: tuple[str, ...] = ()
    drill: str = ""
    confirms: str = ""
    trigger: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A series: steps on one device that share one worker, and so one start of the stack under test."""

    device: Device
    instruction_set: str
    """"" where the device is not a CPU."""
    steps: tuple[Step, ...]

    @property
    def numeric(self) -> bool:
        """Whether its probes need the stack under test; the others run under canaryd's own interpreter."""
        return all(step.entry.spec.numeric for step in self.steps)


def new_seed() -> int:
    """Return a fresh seed: unsigned, below 2**53 so that JSON readers keep every digit."""
    return secrets.randbits(53)


def applies(entry: Entry, device: Device) -> bool:
    """Return whether a probe is meant for the device's backend; an endpoint is no device of every kind."""
    return device.backend in entry.spec.backends or ("*" in entry.spec.backends and device.backend != "endpoint")


def instruction_sets(device: Device, level: str, turn: int = 0) -> tuple[str, ...]:
    """Return the execution paths a round covers: all of them above quick, one in rotation at quick; ("",) off CPUs."""
    if not device.instruction_sets:
        return ("",)
    if level == "quick":
        return (device.instruction_sets[turn % len(device.instruction_sets)],)
    return device.instruction_sets


def plan_round(
    device: Device,
    entries: Sequence[Entry],
    *,
    levels: Mapping[str, str],
    seed: int,
    sets: Sequence[str],
    cases: tuple[str, ...] = (),
    drill: str = "",
    trigger: str = "",
) -> list[Plan]:
    """Return the series of one round on one device: every entry that applies, once per instruction set.

    Probes that need no torch form a series of their own; telemetry is no part of a round. `levels` maps probe name →
    level. A probe that does not depend on the instruction set runs with the first only. Every instruction set gets the
    same seed, so that their results can be set side by side.
    """
    plans = []
    mine = sorted(
        (e for e in entries if applies(e, device) and not e.spec.telemetry), key=lambda e: (e.spec.order, e.spec.name)
    )
    for number, name in enumerate(sets):
        for numeric in (True, False):
            steps = tuple(
                Step(entry=e, level=levels[e.spec.name], seed=seed, cases=cases, drill=drill, trigger=trigger)
                for e in mine
                if e.spec.numeric is numeric and (number == 0 or e.spec.every_instruction_set)
            )
            if steps:
                plans.append(Plan(device=device, instruction_set=name if numeric else "", steps=steps))
    return plans


def due(
    last: Mapping[str, float], periods: Mapping[str, float], *, now: float, jitter: float, luck: float
) -> list[str]:
    """Return the probes whose period has passed since they last started.

    `luck` in 0…1 shortens or lengthens each period by up to `jitter` of it. A probe that never ran is due; so is one
    whose last start lies in the future, since the clock was set back and waiting for it would lose evidence.
    However many periods have passed, a probe is due once: nothing piles up over a pause.
    """
    scale = 1.0 + jitter * (2.0 * luck - 1.0)
    return [
        name
        for name, period in periods.items()
        if name not in last or last[name] > now or now - last[name] >= period * scale
    ]


def confirmations(run: Run, entry: Entry, device: Device, siblings: Sequence[Device], count: int) -> list[Plan]:
    """Return what a mismatch, or unknown bits, ask for at once.

    `count` re-runs on the accused, each a worker and an upload of its own, and the same bytes once on every sibling.
    Empty when nothing was wrong, or when the run is itself a confirmation.
    """
    if not (run.wrong or run.unknown) or run.confirms:
        return []
    # Of unknown vectors others each time: a run with many of them is called for again until all were repeated.
    turn = run.seed % max(1, len(run.unknown))
    unknown = (*run.unknown[turn:], *run.unknown[:turn])
    wrong = tuple(dict.fromkeys(c.case for c in run.wrong))[:CONFIRMED_CASES]
    cases = tuple(dict.fromkeys((*wrong, *unknown[:CONFIRMED_UNKNOWN])))
    step = Step(entry=entry, level=run.level, seed=run.seed, cases=cases, drill=run.drill, confirms=run.id)
    again = [Plan(device=device, instruction_set=run.instruction_set, steps=(step,)) for _ in range(count)]
    # A drill's fault is injected by software: a sibling would be injected too, and would witness nothing.
    others = [] if run.drill else [Plan(device=s, instruction_set=run.instruction_set, steps=(step,)) for s in siblings]
    return again + others
