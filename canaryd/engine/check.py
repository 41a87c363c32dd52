"""`canaryd check` and `canaryd drill`: test devices once, as the daemon does, and collect the results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from canaryd.engine import schedule
from canaryd.engine.catalogue import Entry
from canaryd.engine.engine import Engine, ShortError
from canaryd.engine.host import Options
from canaryd.engine.schedule import Plan
from canaryd.facts import Skipped
from canaryd.formatting import command
from canaryd.judge.coverage import least_results
from canaryd.judge.findings import NO_EVIDENCE, conclusion
from canaryd.judge.phrases import count
from canaryd.judge.tally import counted
from canaryd.judge.telemetry.signals import Poll
from canaryd.judge.verdict import fault_rate_bound, worst
from canaryd.judge.watch import has_looked
from canaryd.model import Cause, Device, Event, Finding, Outcome, Reason, Run, State, Verdict
from canaryd.store.locks import Busy


class Gap(NamedTuple):
    """A part of a device that a check did not test."""

    what: str
    """The untested part, in a few words."""
    detail: str
    """The reason why the part was not tested, or the way to test it."""

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}"


NOT_EXAMINED = "not-examined"
"""Rule of the finding that a check could not do everything that was asked for. This module makes it, not the judge."""
MOST_MEMORY = "most memory"
OTHER_SETS = "other instruction sets"
NOT_CHECKED: Mapping[str, tuple[Gap, ...]] = {
    "quick": (
        Gap(OTHER_SETS, "each round tests one set of each processor; type canaryd check --level standard"),
        Gap("most shapes and layouts", "one of each was tested, in rotation; type canaryd check --level standard"),
        Gap("large products", "larger than 512, or of more than 4 ms; type canaryd check --level standard"),
        Gap(
            MOST_MEMORY,
            "beyond 16 MiB of each device and of the host; type canaryd check --level deep on a drained node",
        ),
    ),
    "standard": (
        Gap("some layouts", "not every format was tested with every layout and shape; type canaryd check --level deep"),
        Gap("large products", "larger than 2048, or of more than 30 ms; type canaryd check --level deep"),
        Gap(
            MOST_MEMORY,
            "beyond 1 GiB of each device and of the host; type canaryd check --level deep on a drained node",
        ),
    ),
    "deep": (
        Gap("some layouts", "of formats for which a processor has no units of its own"),
        Gap("very large products", "larger than 4096, or of more than 100 ms"),
    ),
}
NO_ENDPOINT = Gap("serving engine", "name it under endpoints in the configuration to test it and its model")
NEVER_CHECKED = (Gap("higher load", "load, power and temperature above those of this check"),)
EXACT = ("exact_attention", "exact_integer", "exact_matmul", "exact_units")
"""Probes that run again if a check has too few results; they give nearly all results."""
LONGEST = 3
"""Maximum time of a check with repeated tests, in multiples of the time of its first round."""
SHORTEST = 0.02
"""Least share of its usual time that a test under load gets: some seconds for the longest (ours)."""
START = 4.0
"""Seconds that a worker takes to load torch: a guess for who waits, which the time that passes soon replaces."""
ONLY = {"memory_sweep": "memory", "exact_units": "each core or SM", "collectives": "links"}
"""Probe → the part of a device that only this probe tests."""


def untested(runs: Mapping[str, Sequence[Run]]) -> list[Gap]:
    """Return the gaps in the tests: parts in `ONLY` and probes that ran out of time, with the devices concerned.

    `runs`: device name → runs on this device.
    """
    late: dict[str, list[str]] = {}
    for name, done in runs.items():
        looked = {r.probe for r in done if has_looked(r)} | ONLY.keys()
        for probe in {r.probe for r in done if any(part.late for part in r.skipped)} - looked:
            late.setdefault(probe, []).append(name)
    gaps = lacking({name: {r.probe for r in done if r.trials} for name, done in runs.items()})
    return gaps + [Gap(probe, f"not tested on {', '.join(of)}") for probe, of in sorted(late.items())]


def lacking(done: Mapping[str, Collection[str]]) -> list[Gap]:
    """Return a gap for each part in `ONLY` not tested on every device; `done`: device → probes that gave results."""
    gaps = []
    for probe, what in ONLY.items():
        without = [name for name, probes in done.items() if probe not in probes]
        gaps += [Gap(what, f"not tested on {', '.join(without)}")] if without else []
    return gaps


def all_gaps(level: str, found: Sequence[Gap], tested: Iterable[Device]) -> tuple[Gap, ...]:
    """Return the gaps `found`, and those that every check of this `level` leaves. No gap is listed twice.

    `tested`: the devices that gave a result.
    """
    left_out = {MOST_MEMORY} if any(g.what == ONLY["memory_sweep"] for g in found) else set()
    if not any(len(device.instruction_sets) > 1 for device in tested):
        left_out.add(OTHER_SETS)
    return (*found, *(g for g in NOT_CHECKED[level] if g.what not in left_out), *NEVER_CHECKED)


@dataclass(kw_only=True)
class Result:
    """The results of one check, and the reasons for what it could not do."""

    level: str
    started: float
    seconds: float = 0.0
    drill: str = ""
    devices: list[Device] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    skipped: dict[str, list[tuple[str, Skipped]]] = field(default_factory=dict)
    """Device → list of (probe, the skipped part and the reason)."""
    planned: Counter[str] = field(default_factory=Counter)
    """Device → number of tests that were planned on it, without retests."""
    missed: dict[str, str] = field(default_factory=dict)
    """Device → the reason why a test that was asked for could not run on it."""
    shared: dict[str, str] = field(default_factory=dict)
    """Device → the reason why its tests ran with the limits beside a server; a sentence without the device's name."""
    rules_out: dict[str, dict[str, float]] = field(default_factory=dict)
    polls: dict[str, dict[str, Poll]] = field(default_factory=dict)
    """Device → telemetry probe → the state of its polls."""
    events: dict[str, tuple[Event, ...]] = field(default_factory=dict)
    """Device → its events of the last month."""
    not_checked: tuple[Gap, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> State:
        """The state of the worst device, or unknown if no device was examined."""
        return worst(list(self.verdicts.values()))

    @property
    def having_case(self) -> frozenset[str]:
        """The names of the probes that have at least one of the requested cases, or whose cases are not known."""
        return frozenset(r.probe for runs in self.runs.values() for r in runs if r.reason is not Reason.NO_CASE)

    @property
    def without_case(self) -> list[Run]:
        """All runs, if no probe has any of the requested cases; else []."""
        return [] if self.having_case or self.missed else [r for runs in self.runs.values() for r in runs]


def run(
    engine: Engine,
    options: Options,
    devices: Sequence[Device],
    on_wait: Callable[[str], None],
    on_plan: Callable[[int, float], None] = lambda _, __: None,
) -> Result:
    """Carry out one check on `devices` and return its result. A device that cannot be used is unknown, not healthy.

    `on_plan` is told what comes: the number of further parts, and the seconds that they usually take.
    """
    begun = time.monotonic()
    engine.asked = options
    result = Result(level=options.level, started=engine.clock(), drill=options.drill, devices=list(devices))
    entries = [e for name, e in engine.entries.items() if _is_asked(options, e)]
    groups = [e for e in entries if e.spec.group]
    engine.together = _in_groups(engine, options, groups, _here(engine, devices))
    turn = 0

    def test(
        entries: Sequence[Entry], devices: Sequence[Device], longer: float = 1.0, groups: Sequence[Entry] = ()
    ) -> None:
        ahead = [
            [_plans(engine, options, entries, device, turn, longer) for device in group]
            for group in _side_by_side(_here(engine, devices), at_once=options.at_once)
        ]
        ahead += [[_plans_of_groups(engine, options, entry, devices)] for entry in groups]
        on_plan(
            sum(len(plan.steps) for group in ahead for plans in group for plan in plans),
            sum(max((_usual(plans) for plans in group), default=0.0) for group in ahead),
        )
        for group in ahead:
            with ThreadPoolExecutor(max(1, len(group))) as pool:
                for ended in [pool.submit(_carry_out, engine, p, result, options.wait, on_wait) for p in group]:
                    ended.result()

    if not any(device.backend == "cpu" for device in devices):
        engine.workers.end_spare()
    if not options.drill:
        # Before and after: what a device counted while it was under test, and how warm it was, is part of the evidence.
        engine.read_log(until_end=True)
        engine.sweep(hold=True, record=True)
    while True:
        test(entries, devices, _shorter(engine, options, entries, _here(engine, devices)), groups)
        turn += 1
        over = time.monotonic() - begun >= options.seconds or not _here(engine, devices)
        if engine.stopping or result.without_case or over:
            break
    turn = 0
    _complete(engine, options, devices, result, time.monotonic() - begun, test)
    engine.workers.end_spare()
    if not options.drill:
        engine.read_log(until_end=True)
        engine.sweep(record=True)
        engine.watch.let_go()
        engine.watch.history.recall(engine.clock())  # where a daemon records, what it recorded meanwhile
    engine.together -= _skipped_together(engine, result)
    if options.cases and (having := result.having_case):
        engine.asked = replace(options, probes=tuple(having))
    _conclude(engine, options, result)
    if not options.drill:
        engine.settle()
    result.seconds = time.monotonic() - begun
    return result


def _complete(
    engine: Engine,
    options: Options,
    devices: Sequence[Device],
    result: Result,
    took: float,
    test: Callable[[Sequence[Entry], Sequence[Device], float], None],
) -> None:
    """Run the probes in `EXACT` again on devices with too few results. The check takes at most `LONGEST` times `took`.

    `took`: seconds that the first round took. `test` runs probes on devices; its third argument multiplies their
    duration. Sets `engine.compared` to device → (number of results, least number required).
    """
    exact = {name: entry for name, entry in engine.entries.items() if name in EXACT}
    counted = [d for d in _here(engine, devices) if _is_counted(engine, options, d)]
    once = {d.uuid: [r for r in result.runs.get(d.uuid, ()) if r.probe in exact] for d in counted}
    end = time.monotonic() + (LONGEST - 1) * took
    while True:
        engine.compared = {}
        few: dict[str, float] = {}  # device → how many times what the exact probes gave it lacks
        for uuid in once.keys() - result.missed.keys():
            of, gave_once = found(result.runs.get(uuid, ())), found(once[uuid])["results"]
            done, least = engine.compared[uuid] = of["results"], least_results(engine.devices[uuid])
            if done < least and gave_once and not of["wrong"]:
                few[uuid] = (least - done) / gave_once
        runs = [run for uuid in few for run in once[uuid]]
        left = end - time.monotonic()
        usual = sum(max(run.seconds, exact[run.probe].spec.budget[options.level]) for run in runs)
        if engine.stopping or not few or left < usual:
            return
        # A longer run gives more results than two runs, which make their operands anew.
        longer = min(left / usual, max(1.0, *few.values()))
        test(list(exact.values()), [d for d in counted if d.uuid in few], longer)


def _is_counted(engine: Engine, options: Options, device: Device) -> bool:
    """Return whether a check must reach a least number of results: only if the operator restricted nothing."""
    chosen = options.probes or options.cases or options.intensity or options.instruction_set
    if chosen or options.seconds or options.drill or any(engine.settings(n).enabled is False for n in EXACT):
        return False
    return "exact_matmul" in engine.periods(device)


def _is_asked(options: Options, entry: Entry) -> bool:
    """Return whether a probe is part of a check. Probes that test devices together take too long for a quick check."""
    if options.probes:
        return entry.spec.name in options.probes
    return not entry.spec.group or options.level != "quick"


def alarmed(result: Result) -> bool:
    """Return whether any run detected the injected fault of a drill."""
    return any(run.wrong or run.unknown for runs in result.runs.values() for run in runs)


def ended(result: Result) -> bool:
    """Return whether any run completed, so that a fault could show."""
    return any(run.outcome is Outcome.COMPLETED for runs in result.runs.values() for run in runs)


def _here(engine: Engine, devices: Iterable[Device]) -> list[Device]:
    """Return the devices that were found by the last discovery and that probes can reach."""
    return [d for d in devices if d.uuid in engine.in_place and d.is_reached]


def _side_by_side(devices: Sequence[Device], *, at_once: bool) -> list[list[Device]]:
    """Return groups of devices in the order of their tests; the devices of one group are tested at the same time.

    All accelerators form one group; memory limits it (`canaryd.engine.room`). A processor is tested alone, because it
    needs its cores, and first, because the other verdicts depend on it; `at_once` both are one group. Endpoints are
    alone, because two may share a server.
    """
    processors = [] if at_once else [[d] for d in devices if d.unit == "cpu"]
    others = [d for d in devices if d.computes_here and [d] not in processors]
    return [*processors, *([others] if others else []), *([d] for d in devices if not d.computes_here)]


def _plans(
    engine: Engine, options: Options, entries: Sequence[Entry], device: Device, turn: int, longer: float
) -> Sequence[schedule.Plan]:
    sets = (options.instruction_set,) if options.instruction_set and device.instruction_sets else ()
    return schedule.plan_round(
        device,
        entries,
        levels=engine.levels(options.level),
        seed=schedule.new_seed() if options.seed is None else options.seed,
        sets=sets or schedule.instruction_sets(device, options.level, turn),
        cases=options.cases,
        drill=options.drill,
        intensity=options.intensity,
        longer=longer,
    )


def _shorter(engine: Engine, options: Options, entries: Sequence[Entry], devices: Sequence[Device]) -> float:
    """Return the share of their usual time that tests under load get, so that a round ends in `options.seconds`."""
    if not options.at_once:
        return 1.0
    usual = max((_usual(_plans(engine, options, entries, d, 0, 1.0)) for d in devices), default=0.0)
    return min(1.0, max(SHORTEST, options.seconds / usual)) if usual else 1.0


def _usual(plans: Sequence[Plan]) -> float:
    """Return the seconds that plans take on a device that nothing else uses."""
    return sum(
        START * plan.numeric + sum(step.entry.spec.budget[step.effort] * step.longer for step in plan.steps)
        for plan in plans
    )


def _in_groups(engine: Engine, options: Options, entries: Sequence[Entry], devices: Sequence[Device]) -> frozenset[str]:
    """Return the uuids of the devices that must get results from probes in `entries`, which test devices together."""
    plans = [plan for entry in entries for plan in _plans_of_groups(engine, options, entry, devices)]
    cores = {d.uuid for d in devices for entry in entries if d.unit == "cpu" and schedule.applies(entry, d)}
    return frozenset(cores | {d.uuid for plan in plans for d in (plan.device, *plan.peers)})


def _skipped_together(engine: Engine, result: Result) -> frozenset[str]:
    """Return the uuids of devices whose links count as not checked, because a library for testing them is missing."""
    backends = {
        engine.devices[uuid].backend
        for uuid, runs in result.runs.items()
        if any(r.outcome is Outcome.SKIPPED and engine.entries[r.probe].spec.group for r in runs)
    }
    return frozenset(uuid for uuid in engine.together if engine.devices[uuid].backend in backends)


def _plans_of_groups(
    engine: Engine, options: Options, entry: Entry, devices: Sequence[Device]
) -> Sequence[schedule.Plan]:
    step = schedule.Step(
        entry=entry,
        level=options.level,
        seed=schedule.new_seed() if options.seed is None else options.seed,
        cases=options.cases,
        drill=options.drill,
        intensity=options.intensity,
    )
    return schedule.plan_group(_here(engine, devices), entry, step)


def _carry_out(
    engine: Engine, plans: Sequence[Plan], result: Result, wait: float, on_wait: Callable[[str], None]
) -> None:
    with engine.mutex:
        result.planned.update(plan.device.uuid for plan in plans for _ in plan.steps)
    for plan in plans:
        try:
            runs = engine.carry_out(plan, wait=wait, on_wait=on_wait)
        except Busy as busy:
            why = engine.stopping or str(busy)
            with engine.mutex:  # a device's confirmations write to its siblings' parts of the result too
                mine = result.skipped.setdefault(plan.device.uuid, [])
                mine += [(s.entry.spec.name, Skipped(case="*", reason=why)) for s in plan.steps]
                if isinstance(busy, ShortError):  # the links alone are not tested
                    engine.together -= {d.uuid for d in (plan.device, *plan.peers)}
                else:
                    result.missed[plan.device.uuid] = why
            continue
        with engine.mutex:
            _add(result, plan.device, runs)
            if engine.stopping:
                result.missed[plan.device.uuid] = engine.stopping


def _add(result: Result, device: Device, runs: Sequence[Run]) -> None:
    """Add the runs of a plan to the result; besides runs on `device` they can include runs on other devices."""
    result.skipped.setdefault(device.uuid, [])
    for done in runs:
        result.runs.setdefault(done.device, []).append(done)
        skipped = result.skipped.setdefault(done.device, [])
        if done.outcome is Outcome.SKIPPED:
            skipped.append((done.probe, Skipped(case="*", reason=done.detail or "the probe gave no reason")))
        skipped += [(done.probe, s) for s in done.skipped if (done.probe, s) not in skipped]


def _conclude(engine: Engine, options: Options, result: Result) -> None:
    drilled = {d.uuid: result.runs.get(d.uuid, []) for d in result.devices} if options.drill else {}
    rehearsed = engine.decisions.rehearse(drilled)
    for device in result.devices:
        uuid = device.uuid
        verdict = rehearsed.get(uuid) or engine.verdict(uuid)
        result.verdicts[uuid] = _missing(verdict, options, device, _incomplete(result, uuid))
        result.rules_out[uuid] = fault_rate_bound(result.runs.get(uuid, []))
        if not options.drill:
            polls = engine.watch.polls(uuid).items()  # recalled ones are not of this check
            result.polls[uuid] = {name: poll for name, poll in polls if poll.newest is not None}
            result.events[uuid] = engine.watch.history.of(device)
            result.skipped.setdefault(uuid, []).extend(_unread(result.polls[uuid]))
        left_out = [n for n in engine.config.probes.each if engine.settings(n).enabled is False]
        result.skipped.setdefault(uuid, []).extend(
            (n, Skipped(case="*", reason="disabled in the configuration")) for n in left_out
        )
        if uuid in engine.shared:
            result.shared[uuid] = _kept(*engine.shared[uuid], options)
    result.problems = [*engine.problems, *engine.store.problems]
    if engine.stopping and not result.missed:
        result.problems.append(f"{engine.stopping}; what had not ended by then is not part of this report")
    gaps: list[Gap] = []
    if options.probes or options.cases:
        selected = ", ".join([*options.probes, *options.cases])
        gaps.append(Gap("other probes and cases", f"only {selected} was selected"))
    if shared := [d.name for d in result.devices if d.uuid in result.shared]:
        gaps.append(Gap("most memory of shared devices", f"other processes use {', '.join(shared)}"))
    memory = engine.config.budget.memory
    if short := [d.name for d in result.devices if engine.shared.get(d.uuid, ("", memory))[1] < memory]:
        gaps.append(Gap("all that takes more memory", f"too little is free on {', '.join(short)}"))
    if silent := [d.name for d in result.devices if not (result.polls.get(d.uuid) or d.card or options.drill)]:
        gaps.append(Gap("telemetry", f"no telemetry probe ran for {', '.join(silent)}"))
    if engine.watch.kernel_log.problem:
        gaps.append(Gap("kernel log", engine.watch.kernel_log.problem))
    here = [d for d in result.devices if d.computes_here]
    gaps += [NO_ENDPOINT] if here == result.devices else []
    gaps += untested({d.name: result.runs.get(d.uuid, ()) for d in here})
    tested = [d for d in result.devices if any(r.trials for r in result.runs.get(d.uuid, ()))]
    result.not_checked = all_gaps(options.level, gaps, tested)


def _kept(who: str, room: int, options: Options) -> str:
    """Return a sentence that explains limited tests: `who` else uses the device. `room`: the limit in bytes."""
    command = "drill" if options.drill else "check"
    return (
        f"{who}, so the tests kept to the budget: at most {room >> 20:,} MiB of its memory, pauses, low priority; "
        f"where no server needs it, type canaryd {command} --drained"
    )


def _why(run: Run) -> tuple[str, str]:
    """Return (outcome, reason) of a poll without readings; the outcome is "" if the reason already names it."""
    if run.outcome is Outcome.COMPLETED:
        return "it gave no reading", next(iter(run.absent.values()), "")
    return "" if run.outcome is Outcome.SKIPPED else run.outcome.value, run.detail.partition("\n")[0]


def _unread(polls: Mapping[str, Poll]) -> list[tuple[str, Skipped]]:
    """Return (name, reason) for each telemetry probe that could not be read."""
    return [
        (probe, Skipped(case="*", reason=": ".join(filter(None, _why(poll.newest)))))
        for probe, poll in polls.items()
        if poll.newest is not None and not (poll.newest.outcome is Outcome.COMPLETED and poll.newest.readings)
    ]


def _incomplete(result: Result, uuid: str) -> str:
    """Return the reason why a device's check is incomplete, with the number of tests that ended, or "" if complete."""
    if not (why := result.missed.get(uuid, "")):
        return ""
    runs, planned = result.runs.get(uuid, []), result.planned[uuid]
    ended = min(planned, sum(not run.confirms for run in runs))
    return f"{why}; {ended} of {count(planned, 'test')} had ended ({compared(runs)})"


def _missing(verdict: Verdict, options: Options, device: Device, why: str) -> Verdict:
    """Return the verdict, with a finding of state unknown if `why` is not "": old evidence replaces no missed test."""
    if not why:
        return verdict
    finding = Finding(
        rule=NOT_EXAMINED,
        state=State.UNKNOWN,
        cause=Cause.ENVIRONMENT,
        message=why,
        action=f"Run it again: {_command(options, device)}",
    )
    # That its other probes have no result yet follows from it.
    rest = [f for f in verdict.findings if f.rule != NO_EVIDENCE]
    findings = tuple(sorted((*rest, finding), key=lambda f: -f.state.severity))
    if verdict.state.severity > State.UNKNOWN.severity:
        return replace(verdict, findings=findings)
    state, cause = conclusion(findings)
    return replace(verdict, findings=findings, state=state, cause=cause)


def _command(options: Options, device: Device) -> str:
    """Return the command line that repeats this check on one device."""
    return command(
        *("drill" if options.drill else "check", ("fault", options.drill)),
        ("level", "" if options.drill or options.level == Options.level else options.level),
        *(("device", device.name), *(("probe", name) for name in options.probes)),
        *(("case", name) for name in options.cases),
        *(("seed", "" if options.seed is None else str(options.seed)), ("instruction_set", options.instruction_set)),
        *(("intensity", options.intensity), ("for", f"{options.seconds:.0f}s" if options.seconds else "")),
    ) + (" --drained" if options.drained else "")


def found(runs: Sequence[Run]) -> dict[str, int]:
    """Return the totals of all runs: "results", "wrong" ones, "recordings", and those that "differ" from baselines."""
    results = counted(runs)
    return {
        "results": results.of,
        "wrong": results.wrong,
        "recordings": sum(len(r.recordings) for r in runs),
        "differ": sum(len(r.unknown) for r in runs),
    }


def gave(run: Run) -> str:
    """Return the numbers of results, of wrong ones and of recordings of a run, as text."""
    results = counted([run])
    counts = [count(results.of, "result")] if results.of or not run.recordings else []
    counts += [f"{results.wrong:,} WRONG"] if results.wrong else []
    return ", ".join(counts + ([count(len(run.recordings), "recording")] if run.recordings else []))


def compared(runs: Sequence[Run]) -> str:
    """Return the number of exact results of all runs as text, or of recordings if there are no exact results."""
    of = found(runs)
    if of["results"] or not of["recordings"]:
        return f"{count(of['results'], 'result')}, {of['wrong']:,} wrong"
    return f"{count(of['recordings'], 'recording')}, {of['differ']:,} differ from the baseline"
