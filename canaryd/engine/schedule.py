"""What to run next: pure functions of the catalogue, the clock and what ran before."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from canaryd.config.settings import JudgePolicy
from canaryd.engine.catalogue import Entry
from canaryd.model import INTENSITIES, Device, Outcome, Run

CONFIRMED_UNKNOWN = 8
"""Cases with unknown bits that it repeats: all that an endpoint's quick run has."""
CONFIRMED_CASES = 3
"""Wrong cases that one confirmation run repeats: more say nothing new, and make the repro command unreadable."""
ROUNDS = (0.0, 3600.0, 21_600.0)
"""Seconds after one round of retests, all intensities once, until the next may begin; ours: the first rounds come while
the conditions of the mismatch may still hold."""
DAY = 86_400.0
"""Seconds between two retests once `ROUNDS` are over, one intensity after the other; and the time over which
`RETEST_SHARE` is reckoned."""
RETEST_SHARE = 0.05
"""Part of a device's time that its retests, confirmations of them included, may take before another is begun; ours:
three rounds of the longest probe here fit into a day, and a serving node keeps the rest."""
UNSETTLED = 3600.0
"""Seconds after which a mismatch is retested though its confirmations did not all complete; ours."""


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
    intensity: str = ""
    """How a retest asks harder: one of `INTENSITIES`; "" for a run as usual."""

    @property
    def effort(self) -> str:
        """The level whose budget it has: a retest takes the time of deep, whatever level its cases come from."""
        return "deep" if self.intensity else self.level


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
    intensity: str = "",
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
                Step(
                    entry=e,
                    level=levels[e.spec.name],
                    seed=seed,
                    cases=cases,
                    drill=drill,
                    trigger=trigger,
                    intensity=intensity,
                )
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
    Empty when nothing was wrong, or when the run is itself a confirmation. A retest is confirmed at its own intensity:
    what shows under load alone would be clean without it.
    """
    if not (run.wrong or run.unknown) or run.confirms:
        return []
    step = Step(
        entry=entry,
        level=run.level,
        seed=run.seed,
        cases=_repeated(run),
        drill=run.drill,
        confirms=run.id,
        intensity=run.intensity,
    )
    again = [Plan(device=device, instruction_set=run.instruction_set, steps=(step,)) for _ in range(count)]
    # A drill's fault is injected by software: a sibling would be injected too, and would witness nothing.
    others = [] if run.drill else [Plan(device=s, instruction_set=run.instruction_set, steps=(step,)) for s in siblings]
    return again + others


def _repeated(run: Run) -> tuple[str, ...]:
    """Return the cases of a run that are to be asked again: wrong ones first, then those with unknown bits."""
    # Of unknown vectors others each time: a run with many of them is called for again until all were repeated.
    turn = run.seed % max(1, len(run.unknown))
    unknown = (*run.unknown[turn:], *run.unknown[:turn])
    wrong = tuple(dict.fromkeys(c.case for c in run.wrong))[:CONFIRMED_CASES]
    return tuple(dict.fromkeys((*wrong, *unknown[:CONFIRMED_UNKNOWN])))


def can_be_retested(entry: Entry, device: Device) -> bool:
    """Return whether retests mean something: a probe that computes, on a device that is ours to load."""
    return entry.spec.numeric and not device.is_endpoint and applies(entry, device)


def retests(
    run: Run, intensity: str, entries: Mapping[str, Entry], device: Device, *, seed: int, turn: int = 0
) -> list[Plan]:
    """Return one retest of a run with a mismatch, or unknown bits, on its device or on a sibling; [] where none may be.

    "repeated", "steady", "pulsed" and "idle" ask the same cases of the same bytes, for the time of a deep run.
    "content" asks the whole probe at level deep from `seed`, a fresh one: all contents, shapes and layouts; on CPUs
    also another instruction set, the next with each `turn`. Where nothing was wrong but recorded bits were unknown,
    it asks every other probe that computes as well: the exact ones tell a fault from a stack that changed.
    """
    entry = entries.get(run.probe)
    if entry is None or run.drill or not can_be_retested(entry, device):
        return []
    why = f"retest of {run.id}"
    if intensity != "content":
        step = Step(entry=entry, level=run.level, seed=run.seed, cases=_repeated(run), trigger=why, intensity=intensity)
        return [Plan(device=device, instruction_set=run.instruction_set, steps=(step,))]
    asked = [entry] if run.wrong else [e for e in entries.values() if can_be_retested(e, device)]
    others = [name for name in device.instruction_sets if name != run.instruction_set]
    return plan_round(
        device,
        asked,
        levels={e.spec.name: "deep" for e in asked},
        seed=seed,
        sets=(run.instruction_set, *others[turn % len(others) :][:1]) if others else (run.instruction_set,),
        trigger=why,
        intensity=intensity,
    )


def may_be_retested(runs: Iterable[Run], now: float) -> bool:
    """Return whether the retests of the last day left a device something of `RETEST_SHARE`; `runs` are its own."""
    took = sum(r.seconds for r in runs if r.intensity and not r.drill and 0 <= now - r.started < DAY)
    return took < RETEST_SHARE * DAY


def retests_due(runs: Sequence[Run], policy: JudgePolicy, now: float) -> list[tuple[Run, str]]:
    """Return which mismatches of one device are to be retested now, and at which intensity; the most urgent first.

    For a device that is suspect, and only while it is. `runs` are its own, of probes that can be retested. The newest
    mismatch of each probe and instruction set is retested once its confirmations are through: every intensity once at
    once, again an hour and six hours after that, then one a day in turn. A retest that was lost counts as asked, for
    what crashes under load must not be asked for ever. Two of them, and a mismatch, lie `repeat_gap` apart, so that
    each is independent evidence. None begins while those of the last day took `RETEST_SHARE` of it. Drills call for
    nothing; a run that is dated in the future (the clock was set back) waits for its time.
    """
    if not may_be_retested(runs, now):
        return []
    past = sorted((r for r in runs if r.started <= now and not r.drill), key=lambda r: (r.started, r.id))
    retested = [r for r in past if r.intensity]
    if any(now - r.started < policy.repeat_gap for r in past if r.intensity or r.wrong):
        return []
    calling = {(r.probe, r.instruction_set): r for r in past if (r.wrong or r.unknown) and not r.confirms}
    found = []
    for lane, run in calling.items():
        confirmed = sum(r.confirms == run.id and r.outcome is Outcome.COMPLETED for r in past)
        asked = [
            r
            for r in retested
            if (r.probe, r.instruction_set) == lane and not r.confirms and (r.started, r.id) > (run.started, run.id)
        ]
        settled = confirmed >= policy.confirm_runs or now - run.started >= UNSETTLED
        if settled and (not asked or now - asked[-1].started >= _pause(len(asked))):
            times = Counter(r.intensity for r in asked)
            found.append((len(asked), -run.started, run, min(INTENSITIES, key=lambda i: times[i])))
    return [(run, intensity) for *_, run, intensity in sorted(found, key=lambda each: each[:2])]


def _pause(asked: int) -> float:
    """Return the seconds from the newest of so many retests to the next."""
    rounds, within = divmod(asked, len(INTENSITIES))
    if rounds >= len(ROUNDS):
        return DAY
    return 0.0 if within else ROUNDS[rounds]
