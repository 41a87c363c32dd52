"""Pure functions that plan the next runs from the probes, the clock and earlier runs."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from canaryd.config.judge_policy import JudgePolicy
from canaryd.engine.catalogue import Entry
from canaryd.facts import TRIALS, Comparison, Place, Reading
from canaryd.model import INTENSITIES, Device, Outcome, Run

JITTER = 0.1
"""Maximum shift of a run, as a fraction of its period, so that hosts do not all run at the same time."""
CONFIRMED_UNKNOWN = 8
"""Largest number of cases outside the baseline that one confirmation run repeats; an endpoint's quick run has as
many."""
CONFIRMED_CASES = 3
"""Largest number of wrong cases that one confirmation run repeats. More cases would prove nothing new, and would
make the command that repeats the run unreadable."""
ROUNDS = (0.0, 3600.0, 21_600.0)
"""Seconds to wait before each of the first rounds of retests; a round retests once at every intensity. These rounds
come soon (ours), while the conditions of the mismatch may still hold."""
DAY = 86_400.0
"""Seconds between two retests after `ROUNDS`; each of them takes the next intensity. Also the period over which
`RETEST_SHARE` is measured."""
RETEST_SHARE = 0.05
"""Largest fraction of a device's day for its retests and their confirmations; beyond it no retest starts (ours).
Three rounds of the longest probe fit into a day, and a serving node keeps the rest."""
UNSETTLED = 3600.0
"""Seconds after which a mismatch is retested even if some of its confirmations did not complete (ours)."""


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
    """Intensity of a retest, one of `INTENSITIES`, or "" for a normal run."""
    longer: float = 1.0
    """Factor for the run's time budget, e.g. 2.0 for twice the time."""

    @property
    def effort(self) -> str:
        """The level whose time budget the run gets: "deep" for a retest, else the step's own level."""
        return "deep" if self.intensity else self.level


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A series: steps on one device that share one worker, so that torch starts only once."""

    device: Device
    instruction_set: str
    """Instruction set of the CPU, or "" for other devices."""
    steps: tuple[Step, ...]
    peers: tuple[Device, ...] = ()
    """The other devices of a group that is tested together. Each device at an end of a link gets its own run."""

    @property
    def numeric(self) -> bool:
        """Whether the probes need the software under test (torch, …); others run under canaryd's own interpreter."""
        return all(step.entry.spec.numeric for step in self.steps)


def new_seed() -> int:
    """Return a new random seed: unsigned, and below 2**53 so that JSON readers keep every digit."""
    return secrets.randbits(53)


def applies(entry: Entry, device: Device) -> bool:
    """Return whether a probe supports a device's backend and runtime."""
    spec = entry.spec
    if device.runtime not in spec.runtimes and "*" not in spec.runtimes:
        return False
    return not {*device.tested_as}.isdisjoint(spec.backends)


def instruction_sets(device: Device, level: str, turn: int = 0) -> tuple[str, ...]:
    """Return the instruction sets that a round tests; ("",) if the device has none.

    At level quick this is one set, a different one for each `turn`. At other levels it is all sets.
    """
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
    longer: float = 1.0,
) -> list[Plan]:
    """Return the series of one round on one device: every probe in `entries` that applies, once per instruction set.

    Probes without torch form their own series; telemetry is not part of a round. `levels` maps probe name → level.
    `sets` are the instruction sets. They all get the same seed, so that the results can be compared. A probe that does
    not depend on the instruction set runs only with the first. A probe that tests devices together is part of the round
    only on a processor, where the cores are tested together.
    """
    plans = []
    chosen = (e for e in entries if applies(e, device) and not e.spec.telemetry)
    alone = (e for e in chosen if not e.spec.group or device.unit == "cpu")
    mine = sorted(alone, key=lambda e: (e.spec.order, e.spec.name))
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
                    longer=longer,
                )
                for e in mine
                if e.spec.numeric is numeric and (number == 0 or e.spec.every_instruction_set)
            )
            if steps:
                plans.append(Plan(device=device, instruction_set=name if numeric else "", steps=steps))
    return plans


def plan_group(devices: Sequence[Device], entry: Entry, step: Step) -> list[Plan]:
    """Return one plan for each backend with at least two devices, which tests the devices of the backend together."""
    # Instances of a divided GPU have no links of their own.
    whole = (d for d in devices if d.unit != "cpu" and not d.parent and applies(entry, d))
    of_backend: dict[str, list[Device]] = defaultdict(list)
    for device in sorted(whole, key=lambda d: (d.backend, d.index, d.uuid)):
        of_backend[device.backend].append(device)
    groups = (group for group in of_backend.values() if len(group) > 1)
    return [Plan(device=lead, instruction_set="", steps=(step,), peers=tuple(peers)) for lead, *peers in groups]


def shares(run: Run, plan: Plan, new_id: Callable[[], str]) -> list[Run]:
    """Return the run of a group as one run for each device, with the comparisons of that device's links.

    `run` numbers the two ends of a link within the group; the result has the indices of the devices instead. A run
    without comparisons stays one run, of the group's first device.
    """
    group = (plan.device, *plan.peers)
    if not plan.peers or not run.comparisons:
        return [run]
    found = []
    for number, device in enumerate(group):
        mine = tuple(_of_end(c, number, group) for c in run.comparisons if number in c.place.numbers)
        first = device is plan.device
        trials = Reading(name=TRIALS, value=sum(c.trials for c in mine), unit="1")
        readings = run.readings if first else (trials,)
        found.append(
            replace(run, id=run.id if first else new_id(), device=device.uuid, comparisons=mine, readings=readings)
        )
    return found


def _of_end(comparison: Comparison, number: int, group: Sequence[Device]) -> Comparison:
    """Return the comparison of a link for the device `number` of the group: the other end becomes `peer`.

    A comparison with only one number is about the device itself.
    """
    ends = comparison.place.numbers
    if len(ends) == 1:
        return replace(comparison, place=Place(unit="device"))
    place = Place(unit="link", numbers=tuple(group[end].index for end in ends))
    return replace(comparison, place=place, peer=group[sum(ends) - number].uuid)


def due(last: Mapping[str, float], periods: Mapping[str, float], *, now: float, luck: float) -> list[str]:
    """Return the probes whose period has passed since they last started (`last`: probe → epoch s).

    `luck` in 0…1 shortens or lengthens each period by up to the fraction `JITTER`. A probe that never ran is due. A
    probe whose last start lies in the future is due too, because the clock was set back. A probe is due only once,
    however many periods have passed.
    """
    scale = 1.0 + JITTER * (2.0 * luck - 1.0)
    return [
        name
        for name, period in periods.items()
        if name not in last or last[name] > now or now - last[name] >= period * scale
    ]


def confirmations(run: Run, entry: Entry, device: Device, siblings: Sequence[Device], count: int) -> list[Plan]:
    """Return the plans that confirm a run with wrong results, or with recordings that differ from the baseline.

    There are `count` plans for the same device, each with its own worker and upload, and one plan for every sibling,
    all with the same bytes. The list is empty if nothing was wrong or the run is itself a confirmation. A retest is
    confirmed at its own intensity, because a fault that shows only under load would not show without load.
    """
    if not (run.wrong or run.unknown) or run.confirms:
        return []
    step = Step(
        entry=entry,
        level=run.level,
        seed=run.seed,
        cases=cases_to_repeat(run),
        drill=run.drill,
        confirms=run.id,
        intensity=run.intensity,
    )
    again = [Plan(device=device, instruction_set=run.instruction_set, steps=(step,)) for _ in range(count)]
    # A drill's fault is injected by software, so a sibling would have it too and prove nothing.
    others = [] if run.drill or entry.spec.group else siblings
    return again + [Plan(device=s, instruction_set=run.instruction_set, steps=(step,)) for s in others]


def cases_to_repeat(run: Run) -> tuple[str, ...]:
    """Return the cases to repeat: the wrong ones, then those outside the baseline; if there are none, `run.cases`."""
    if not (run.wrong or run.unknown):
        return run.cases
    # Different ones each time: a run with many unknown vectors is repeated until all were.
    turn = run.seed % max(1, len(run.unknown))
    unknown = (*run.unknown[turn:], *run.unknown[:turn])
    wrong = tuple(dict.fromkeys(c.case for c in run.wrong))[:CONFIRMED_CASES]
    return tuple(dict.fromkeys((*wrong, *unknown[:CONFIRMED_UNKNOWN])))


def can_be_retested(entry: Entry, device: Device) -> bool:
    """Return whether a probe can be used for retests of a device: it is numeric and loads only this device."""
    return device.computes_here and entry.spec.numeric and not entry.spec.group and applies(entry, device)


def retests(
    run: Run, intensity: str, entries: Mapping[str, Entry], device: Device, *, seed: int, turn: int = 0
) -> list[Plan]:
    """Return the plans of one retest of `run`, on its own device or on a sibling; [] if no retest is possible.

    "repeated", "steady", "pulsed" and "idle" repeat the same cases with the same bytes, for the time of a deep run.
    "content" runs the whole probe at level deep from the new `seed`: all contents, shapes and layouts. On CPUs it also
    uses another instruction set, the next one with each `turn`. If no result was wrong, but recordings differ from the
    baseline, all other numeric probes run too: exact results distinguish a fault from a changed stack.
    """
    entry = entries.get(run.probe)
    if entry is None or not can_be_retested(entry, device):
        return []
    why = f"retest of {run.id}"
    if intensity != "content":
        step = Step(
            entry=entry, level=run.level, seed=run.seed, cases=cases_to_repeat(run), trigger=why, intensity=intensity
        )
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


def deep_test(entries: Mapping[str, Entry], device: Device, *, trigger: str) -> list[Plan]:
    """Return the plans that run every numeric probe once at level deep, on all instruction sets of a device."""
    asked = [e for e in entries.values() if can_be_retested(e, device)]
    return plan_round(
        device,
        asked,
        levels={e.spec.name: "deep" for e in asked},
        seed=new_seed(),
        sets=instruction_sets(device, "deep"),
        trigger=trigger,
        intensity="content",
    )


def may_be_retested(runs: Iterable[Run], now: float) -> bool:
    """Return whether retests used less than `RETEST_SHARE` of the last day; `runs` are the runs of one device."""
    took = sum(r.seconds for r in runs if r.intensity and 0 <= now - r.started < DAY)
    return took < RETEST_SHARE * DAY


def retests_due(runs: Sequence[Run], policy: JudgePolicy, now: float) -> list[tuple[Run, str]]:
    """Return (mismatch, intensity) for the retests of one suspect that are due now; the most urgent comes first.

    `runs` are the device's runs of probes that can be retested. The newest mismatch of each probe and instruction set
    is retested after its confirmations. Every intensity runs once immediately, again after one hour and after six
    hours; then one intensity runs each day. Retests that do not complete count too; otherwise a retest that crashes
    under load would be repeated forever. Retests and mismatches are at least `repeat_gap` apart, so that each is
    independent evidence. No retest starts if the retests of the last day used `RETEST_SHARE`. A run dated in the future
    (the clock was set back) is ignored until that time.
    """
    if not may_be_retested(runs, now):
        return []
    past = sorted((r for r in runs if r.started <= now), key=lambda r: (r.started, r.id))
    retested = [r for r in past if r.intensity]
    if any(now - r.started < policy.repeat_gap for r in past if r.intensity or r.wrong):
        return []
    calling = {(r.probe, r.instruction_set): r for r in past if (r.wrong or r.unknown) and not r.confirms}
    found = []
    for lane, run in calling.items():
        confirmed = sum(r.confirms == run.id and r.outcome is Outcome.COMPLETED for r in past)
        done = [
            r
            for r in retested
            if (r.probe, r.instruction_set) == lane and not r.confirms and (r.started, r.id) > (run.started, run.id)
        ]
        settled = confirmed >= policy.confirm_runs or now - run.started >= UNSETTLED
        if settled and (not done or now - done[-1].started >= _pause(len(done))):
            times = Counter(r.intensity for r in done)
            found.append((len(done), -run.started, run, min(INTENSITIES, key=lambda i: times[i])))
    return [(run, intensity) for *_, run, intensity in sorted(found, key=lambda each: each[:2])]


def _pause(retests: int) -> float:
    """Return the minimum seconds between a device's newest retest and the next one, after `retests` retests so far."""
    rounds, within = divmod(retests, len(INTENSITIES))
    if rounds >= len(ROUNDS):
        return DAY
    return 0.0 if within else ROUNDS[rounds]
