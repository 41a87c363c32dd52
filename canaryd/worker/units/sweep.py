"""Compute the same exact tiles (small products) on every unit of a device; yield a comparison for each wrong unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from canaryd.facts import TRIALS, Comparison, Doubt, Evidence, Place, Reading, Skipped, Subject
from canaryd.model import Device
from canaryd.probe import Context, Fact, Skip
from canaryd.worker.numeric import evidence
from canaryd.worker.numeric.cases import Case, Refused, restrict, why_refused
from canaryd.worker.numeric.characterised import is_characterised
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.making import make_twice
from canaryd.worker.numeric.operands import Problem
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.tensors import bits, host_same_bits
from canaryd.worker.numeric.verify import case_seed
from canaryd.worker.runtime.interface import burst_bytes
from canaryd.worker.units.processors import Processor
from canaryd.worker.units.tiles import MOVED, Launch, Tiles

LEAST = 2
"""Smallest number of launches of a case. The second launch writes its results to other places in memory."""
PATIENCE = 8
"""Number of launches of a case after which the case no longer waits for units that no block has reached."""
WRONG_ENOUGH = 4
"""Number of wrong launches after which a case stops: enough to see whether a unit is wrong always or sometimes."""
NAMED = 8
"""Maximum number of wrong units of a case that are reported one by one. More are reported together, because no single
unit is then to blame."""
MOST_BLOCKS = 8
"""Maximum number of blocks per unit in a launch. It is used if fewer did not reach every unit and if the results fit
into a burst."""


@dataclass
class _Tally:
    """The counts of computed and wrong tiles of one unit in one launch."""

    tiles: int = 0
    wrong: int = 0
    found: Evidence | None = None
    """Evidence of the unit's first wrong block."""


@dataclass
class _Sweep:
    """The state of one run: the units that computed so far, the number of launches and the size of the next."""

    session: Session
    processor: Processor
    seen: set[int] = field(default_factory=set)
    blocks: int = 0
    """Number of blocks of the next launch."""
    launches: int = 0

    @property
    def unreached(self) -> int:
        """Number of units that no block has reached yet."""
        return max(0, self.processor.count - len(self.seen))

    def compute(self, case: Case, tiles: Tiles, problem: Problem) -> tuple[dict[int, _Tally], str]:
        """Upload a problem and compute it once on every unit; return (unit → its counts, error of the comparison).

        The error is "" if the host, which compares the first block too, agrees with the device.
        """
        session = self.session
        runtime, device = session.runtime, session.ctx.device
        shift = session.ctx.seed + self.launches  # no unit keeps the same place in memory
        blocks = min(self.blocks, max(self.processor.count, burst_bytes(session.ctx.room) // problem.golden.nbytes))
        with session.on_device():
            operands = session.injector.before(case.name, runtime.upload(problem.operands, device), 0)
            (golden,) = runtime.upload((problem.golden,), device)
            launch = self.processor.launch(tiles, operands, blocks, shift)
            launch = replace(launch, results=session.injector.after(case.name, launch.results))
            wrong = (bits(launch.results) != bits(golden)).flatten(2).any(-1).tolist()
        self.launches += 1
        host_says = host_same_bits(runtime.download(launch.results[0]), problem.golden)
        erred = ""
        if host_says == any(wrong[0]):
            words = ("equals", "differs") if host_says else ("differs", "equals")
            erred = f"the host finds that the first block {words[0]}, the device that it {words[1]}"
        tallies: dict[int, _Tally] = defaultdict(_Tally)
        for block, (unit, tiles_wrong) in enumerate(zip(launch.units, wrong, strict=True)):
            tally = tallies[unit]
            tally.tiles += len(tiles_wrong)
            tally.wrong += sum(tiles_wrong)
            if tally.wrong and tally.found is None:
                tally.found = _evidence(problem.golden, launch, block)
        self._count(problem, tallies)
        return dict(tallies), erred

    def _count(self, problem: Problem, tallies: dict[int, _Tally]) -> None:
        """Add the results to the run's totals; double the blocks of the next launch if some units have not computed."""
        computed = sum(tally.tiles for tally in tallies.values())
        rounds = problem.golden.shape[0]
        self.session.trials += computed
        self.session.operations += computed * problem.operations // rounds
        self.seen |= tallies.keys() - {MOVED}
        if self.unreached:
            self.blocks = min(2 * self.blocks, MOST_BLOCKS * self.processor.count)


def sweep_units(ctx: Context, processor: Processor, every: Sequence[Tiles]) -> Iterator[Fact]:
    """Compute every kind of tiles on every unit; yield every fact of the run, with a reason for each skipped case."""
    session = Session(ctx)
    sweep = _Sweep(session, processor, blocks=processor.count)
    cases = {tiles.name: tiles for tiles in every}
    asked = restrict(ctx, [_case(ctx.device, tiles) for tiles in every])
    refused = {case.name: why for case in asked if (why := processor.refuses(cases[case.name]))}
    yield from (Skipped(case=name, reason=why) for name, why in refused.items())
    asked = [case for case in asked if case.name not in refused]
    turn = ctx.seed % max(1, len(asked))  # where a budget ends early, another run begins with another case
    session.injector.arm([case.name for case in asked])
    asked = sorted([*asked[turn:], *asked[:turn]], key=lambda case: case.name != session.injector.target)
    with session.runtime.strict(ctx.device):
        for number, case in enumerate(asked):
            ctx.progress(number / len(asked), case.name)
            if ctx.left <= 0.0 and number and not ctx.cases:
                yield ctx.late(case.name)
                continue
            try:
                yield from _verify(sweep, case, cases[case.name], ctx.left / (len(asked) - number))
            except Refused as why:
                yield Skipped(case=case.name, reason=str(why))
    yield from _summary(sweep)


def _summary(sweep: _Sweep) -> Iterator[Fact]:
    """Yield the totals of the run, and the number of units that no block reached.

    If nothing could be computed here, this is not reported as a missing test of the device: other probes test it.
    """
    session, unit = sweep.session, sweep.processor.unit
    if session.ctx.drill and not session.injector.spent:
        raise Skip(f"the fault {session.ctx.drill!r} was not injected: no result was computed for its case")
    if sweep.unreached:
        count = sweep.processor.count
        reason = f"{sweep.unreached} of {count} were given no work in {sweep.launches} launches: not tested"
        yield Skipped(case=f"{Place(unit=unit)}s never reached", reason=reason)
    yield Reading(name="units_seen", value=len(sweep.seen), unit="1")
    yield Reading(name="units", value=sweep.processor.count, unit="1")
    yield Reading(name="launches", value=sweep.launches, unit="1")
    yield Reading(name=TRIALS, value=session.trials, unit="1")
    yield Reading(name="operations", value=session.operations, unit="1")
    yield from session.times()
    yield Reading(name="goldens_made_on_two_cores", value=session.made_twice, unit="1")


def _case(device: Device, tiles: Tiles) -> Case:
    """Return the case for these tiles. Its function computes nothing, because the processor computes.

    On a GPU no case counts as known to be right on healthy devices: no kernel of canaryd's own was seen on one.
    """
    known = device.backend == "cpu" and is_characterised(device, tiles.source, rounds_nothing=tiles.is_integer)
    return Case(tiles.name, tiles.build, lambda _operands, _out: None, known)


def _verify(sweep: _Sweep, case: Case, tiles: Tiles, seconds: float) -> Iterator[Fact]:
    """Compute one case for `seconds`, at least `LEAST` times, and yield its comparisons."""
    session = sweep.session
    until = session.ctx.clock() + seconds
    seed = case_seed(session.ctx, case)
    problem, doubts = make_twice(session, case, seed, None, "")
    yield from doubts
    if doubts:
        return  # a doubtful golden accuses only the core that made it
    launches: list[dict[int, _Tally]] = []
    failed = 0
    sample = Comparison(
        case=case.name,
        shape=problem.shape,
        seed=seed,
        exactness=problem.exactness,
        characterised=case.characterised,
    )
    while (
        len(launches) < LEAST
        or (sweep.unreached and len(launches) < PATIENCE)
        or (failed < WRONG_ENOUGH and session.ctx.clock() < until)
    ):
        session.ctx.pace()
        try:
            tallies, erred = sweep.compute(case, tiles, problem)
        except Exception as error:
            if launches or not is_refusal(error):
                raise
            raise Refused(why_refused(session.ctx.device, error)) from error
        launches.append(tallies)
        failed += any(tally.wrong for tally in tallies.values())
        if erred:
            doubt = evidence.collect_nothing(problem.golden, erred)
            yield replace(
                sample, subject=Subject.COMPARATOR, doubt=Doubt.COMPARATOR, wrong_trials=1, evidence=doubt,
                place=Place(unit="device"),
            )  # fmt: skip
    yield from _comparisons(sample, sweep.processor.unit, launches)


def _comparisons(sample: Comparison, unit: str, launches: Sequence[dict[int, _Tally]]) -> Iterator[Comparison]:
    """Yield one comparison per wrong unit and launch, and one for all right units that computed equally many tiles."""
    of: dict[int, list[_Tally]] = defaultdict(list)
    for tallies in launches:
        for number, tally in tallies.items():
            of[number].append(tally)
    bad = sorted(number for number, each in of.items() if any(tally.wrong for tally in each))
    if len(bad) > NAMED:
        every = [tally for number in bad for tally in of[number]]
        numbers = tuple(number for number in bad if number != MOVED)
        yield replace(
            sample,
            place=Place(unit=unit, numbers=numbers),
            trials=sum(tally.tiles for tally in every),
            wrong_trials=sum(tally.wrong for tally in every),
            evidence=next(tally.found for tally in every if tally.found),
            uploads=len(launches),
        )
    else:
        for number in bad:
            place = _place(unit, number)
            for tally in (each for each in of[number] if each.wrong):
                yield replace(sample, place=place, trials=tally.tiles, wrong_trials=tally.wrong, evidence=tally.found)
            if clean := [each for each in of[number] if not each.wrong]:
                yield replace(sample, place=place, trials=sum(t.tiles for t in clean), uploads=len(clean))
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in sorted(of.keys() - set(bad)):
        alike[sum(tally.tiles for tally in of[number]), number == MOVED].append(number)
    for same in alike.values():
        tiles = sum(tally.tiles for number in same for tally in of[number])
        uploads = max(len(of[number]) for number in same)
        yield replace(sample, place=_place(unit, *same), trials=tiles, uploads=uploads)


def _place(unit: str, *numbers: int) -> Place:
    return Place(unit="device") if MOVED in numbers else Place(unit=unit, numbers=numbers)


def _evidence(golden: Any, launch: Launch, block: int) -> Evidence:
    """Return the evidence of the wrong tiles of a block, viewed as one matrix, with the lane that all of them share."""
    observed = launch.results[block].cpu()
    width = golden.shape[-1]
    found = evidence.collect(golden.view(-1, width), observed.view(-1, width))
    if launch.lanes is None or not found.wrong:
        return found
    where = bits(golden) != bits(observed)
    lanes = launch.lanes[block].cpu().expand(golden.shape)[where].tolist()
    span = evidence.span(lanes, evidence.WARP)
    return replace(found, lines={**found.lines, "lane": span}, pattern=f"lane {span}, {found.pattern}")
