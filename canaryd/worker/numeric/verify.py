"""Verify exact goldens: build twice, upload, compute, compare on the device and on the host, collect evidence.

A probe gives its cases and how to compute them; `verify_all` does the rest and yields comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canaryd.facts import Comparison, Doubt, Evidence, Place, Reading, Skipped, Subject
from canaryd.model import Device
from canaryd.probe import Absent, Context, Fact, Skip
from canaryd.worker.numeric import evidence, faults
from canaryd.worker.numeric.errors import is_refusal
from canaryd.worker.numeric.integers import combine, digest
from canaryd.worker.numeric.operands import Problem
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.stack import capability
from canaryd.worker.numeric.tensors import (
    as_text,
    bits,
    can_pin,
    host_same_bits,
    need_torch,
    on_core,
    overrides,
    same_bits,
    strict_switches,
    torch,
    upload,
    visible_cores,
    words,
)

FIXED_SEED = 20_260_101
"""Seed of the fixed cases, whose golden digests ship with the package and whose results make the fingerprint."""
FRESH_UPLOADS = 3
"""Fresh uploads tried at once after a mismatch, in the same process."""
WRONG_ENOUGH = 3
"""Wrong results after which an upload is not repeated further."""
QUOTED = 90
"""Characters kept of a backend's error where it does not support a problem."""
BURST = 8
"""Results computed on an accelerator before one look at their comparisons: one synchronisation for all."""
BURST_BYTES = 64 << 20
"""Memory that the results of one burst may hold."""


@dataclass(frozen=True)
class Accumulator:
    """The format of partial sums on a backend, and whether healthy devices were shown to be exact up to there."""

    bits: int
    characterised: bool
    why: str


def accumulator(device: Device, source: str) -> Accumulator:
    """Return the narrowest container that a kernel of `device` may use for partial sums of `source` products.

    Sources: NVIDIA CUDA C++ Programming Guide (float32 accumulation of tensor cores, when reduced-precision reduction
    is off); M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ CS 2021 (additions inside a block are
    aligned and truncated: two bits of margin); DeepSeek-V3 report, section 3.3.2 (FP8 on Hopper accumulates about 14
    bits: one bit of margin). x86 CPUs: `benchmarks/clean_runs.py`, see benchmarks/results/.
    """
    x86 = device.backend == "cpu" and device.detail.get("architecture") in ("x86_64", "AMD64")
    if source == "float64":
        return Accumulator(53, x86, "float64 products and sums")
    if source.startswith("float8"):
        return Accumulator(13, x86, "Hopper's FP8 accumulation keeps about 14 bits")
    if device.backend == "cpu":
        if x86 or source == "float32":
            return Accumulator(24, x86, "float32 partial sums")
        return Accumulator(11 if source == "float16" else 24, False, "Arm kernels may accumulate in float16")
    if device.backend in ("cuda", "rocm"):
        # Tensor cores before Hopper need two bits of margin, and so do those after data-centre Blackwell and AMD's
        # matrix cores, of which nothing is known: a device that rounds now and then meets a class before it misses it.
        margin = 0 if source == "float32" or capability(device)[0] in (9, 10) else 2
        return Accumulator(24 - margin, False, "float32 partial sums, reduced-precision reduction off")
    narrow = {"float32": 24, "float16": 11, "bfloat16": 8}
    return Accumulator(narrow.get(source, 8), False, "undocumented: the narrowest possible format")


SETTLED = ("cuda", "rocm")
"""Backends whose float32 products round no operand under the strict switches, and whose integer kernels torch tests bit
for bit. Elsewhere what rounds nothing has still been wrong on healthy devices: pytorch issues 78915 (top-k), 90635
(cumulative sum), 183885 (argsort) and 195595 (64-bit keys through float32), all of MPS; CANN's first training products
multiply float32 in float16 (precision mode force_fp16)."""


def is_characterised(device: Device, source: str, *, rounds_nothing: bool = False) -> bool:
    """Return whether canaryd ships the cases of a format as characterised on a device (docs/goldens.md).

    What rounds nothing is, on the backends in `SETTLED`, unless the environment overrides the switches; processors have
    a table of their own. All else is characterised by evidence, which is the judge's part.
    """
    if overrides():
        return False
    return accumulator(device, source).characterised or (rounds_nothing and device.backend in SETTLED)


@dataclass(frozen=True)
class Case:
    """One golden to verify: how to build it from a seed, and how the device computes it."""

    name: str
    """"dtype/content/shape-kind/layout@sizes": the part before "@" is stable, the sizes follow from the budget."""
    build: Callable[[int], Problem]
    compute: Callable[[tuple[Any, ...], Any], Any]
    """(operands on the device, a result to reuse or None) → result, contiguous."""
    characterised: bool = True
    """Whether canaryd ships it as characterised (`is_characterised`)."""
    struck: int = 0
    """Which operand an injected operand fault strikes: one in which every bit reaches the result."""
    fixed: bool = False
    """True: built from FIXED_SEED, one trial, part of the fingerprint."""


def chosen(ctx: Context, name: str) -> bool:
    """Return whether `ctx.cases` selects a case: empty or "*", its full name, or a prefix that ends before "/" or "@".

    With "*" a run tries every variant of every case as long as its budget lasts, whatever its level.
    """
    return not ctx.cases or any(
        want in ("*", name) or (name.startswith(want) and name[len(want)] in "/@") for want in ctx.cases
    )


def refusal(device: Device, problem: Problem, compute: Callable[[tuple[Any, ...], Any], Any]) -> str:
    """Return why the device does not support this problem, or "" after it has computed it under the strict switches.

    Any other error is raised: a failing device must not look like a missing kernel.
    """
    try:
        with strict_switches():
            _first_result(device, compute, upload(problem.operands, device))
    except Refused as refused:
        return str(refused)
    return ""


class Refused(Exception):
    """A kernel does not take a problem; the text says why."""


def _first_result(device: Device, compute: Callable[[tuple[Any, ...], Any], Any], operands: tuple[Any, ...]) -> Any:
    """Return the first result of an upload; raise `Refused` where there is no kernel for it."""
    try:
        return compute(operands, None)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise Refused(why_refused(device, error)) from error


def why_refused(device: Device, error: Exception) -> str:
    """Return the reason of a case that was skipped because of this error."""
    text = (str(error).splitlines() or ["no reason given"])[0]
    text = text if len(text) <= QUOTED else text[:QUOTED] + "…"
    return f"this torch on {device.backend} does not support it: {text}"


def restrict(ctx: Context, cases: Sequence[Case]) -> list[Case]:
    """Keep the cases that `ctx.cases` selects; raise `Skip` where there is none."""
    kept = [case for case in cases if chosen(ctx, case.name)]
    if not cases:
        raise Skip(f"this torch on {ctx.device.backend} supports no case of this probe")
    if not kept:
        raise Skip(f"no case matches {', '.join(ctx.cases)}; the first of {len(cases)} here is {cases[0].name}")
    return kept


@dataclass
class Session:
    """One run of an exact probe on one device: places, cores for the goldens, fault injection, totals."""

    ctx: Context
    cores: tuple[int, ...] = field(default_factory=visible_cores)
    injector: faults.Injector = field(init=False)
    trials: int = 0
    elements: int = 0
    made_twice: int = 0
    digests: list[tuple[str, str]] = field(default_factory=list)
    refused: list[Case] = field(default_factory=list)
    """Cases that the device has no kernel for."""
    places: set[Place] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Look up the drill's fault; raise `Skip` for a name that is not in the list."""
        if self.ctx.drill and self.ctx.drill not in faults.FAULTS:
            raise Skip(f"unknown fault {self.ctx.drill!r}; there are {', '.join(faults.FAULTS)}")
        fault = faults.FAULTS[self.ctx.drill] if self.ctx.drill else None
        self.injector = faults.Injector(fault, self.ctx.seed)

    def _draw(self, case: str) -> int:
        """Draw a number for a case from the run's seed: the same when the case is confirmed, alone or not."""
        return derive(self.ctx.seed, f"place of {case.partition('@')[0]}")

    def place(self, case: str) -> int | None:
        """Return where a case runs on a CPU: half of them on all cores together (None), half on one core alone."""
        draw = self._draw(case)
        if self.ctx.device.backend != "cpu" or draw & 1:
            return None
        return self.cores[(draw >> 1) % len(self.cores)]

    def place_of(self, core: int | None) -> Place:
        """Return the place of what runs on one core, or on all of them (None)."""
        if self.ctx.device.backend != "cpu":
            return Place(unit="device")
        if core is None:
            return Place(unit="threads", numbers=(torch.get_num_threads(),))
        return Place(unit="core", numbers=(core,)) if can_pin() else Place(unit="thread")

    def makers(self, case: str, *avoid: int | None) -> tuple[int, int]:
        """Return two host cores to make a golden on, away from others where there is a choice, from the first of all.

        Twice the same where there is no other: what passes shows by making it again, and only what stays does not.
        """
        others = [c for c in self.cores if c not in avoid] or [c for c in self.cores if c not in avoid[:1]]
        others = others or list(self.cores)
        first = others[(self._draw(case) >> 20) % len(others)]
        second = next((c for c in [*others[::-1], *self.cores] if c != first), first)
        return first, second

    @staticmethod
    def place_of_makers(first: int, second: int) -> Place:
        """Return the place of a golden that two cores made, or one core twice."""
        return Place(unit="core", numbers=(first, second)) if can_pin() else Place(unit="threads")


def verify_all(ctx: Context, fresh: Sequence[Case], fixed: Sequence[Case], shipped: Path | None) -> Iterator[Fact]:
    """Verify the fixed cases once each and the fresh cases for the rest of the budget; yield every fact of the run.

    `shipped` is the file of golden digests made elsewhere. Raises `Skip` when there is nothing to do.
    """
    need_torch()
    session = Session(ctx)
    fixed, fresh = _asked_for(ctx, fixed, fresh)
    start = ctx.seed % max(1, len(fresh))  # where a budget ends early, another run starts with other cases
    fresh = [*fresh[start:], *fresh[:start]]
    digests = json.loads(shipped.read_text()) if shipped and shipped.exists() else {}
    if shipped and not digests:
        yield Absent(name="shipped_digests", reason=f"{shipped} is missing or empty: this installation is damaged")
    session.injector.arm([c.name for c in fresh or fixed])
    fresh.sort(key=lambda case: case.name != session.injector.target)  # a drill's case goes first
    with strict_switches() as switches:
        yield Reading(name="switches", value=as_text(switches))
        for number, case in enumerate([*fixed, *fresh]):
            remaining = len(fixed) + len(fresh) - number
            ctx.progress(number / (len(fixed) + len(fresh)), case.name)
            # A loaded machine still gets fresh operands: only the fixed ones forever would prove little.
            needed = case.fixed or number == len(fixed) or (ctx.cases and "*" not in ctx.cases)
            if ctx.left <= 0.0 and not needed:
                yield Skipped(case=case.name, reason=f"the budget of {ctx.budget:g} s was spent before its turn")
                continue
            # A fixed case is brief, unless a retest is about it.
            brief = case.fixed and not (ctx.intensity and ctx.cases)
            seconds = 0.0 if brief else ctx.left / remaining
            before = session.trials
            try:
                yield from _verify(session, case, seconds, digests.get(case.name, ""))
            except Refused as refused:
                if session.trials > before:
                    raise  # the device has computed this case already
                session.refused.append(case)
                yield Skipped(case=case.name, reason=str(refused))
    if ctx.drill and not session.injector.spent:
        raise Skip(f"the fault {ctx.drill!r} was not injected: no result was computed for its case")
    if len(session.refused) == len(fixed) + len(fresh):
        raise Skip(f"this torch on {ctx.device.backend} supports no case that was asked for")
    yield Reading(name="trials", value=session.trials, unit="1")
    yield Reading(name="elements_compared", value=session.elements, unit="1")
    yield Reading(name="goldens_made_on_two_cores", value=session.made_twice, unit="1")
    yield Reading(name="places", value=", ".join(sorted(map(str, session.places))))
    met = [case for case in fixed if case not in session.refused]
    if met and not ctx.cases and len(session.digests) == len(met):
        yield Reading(name="golden_fingerprint", value=combine(session.digests), unit="1")


def _asked_for(ctx: Context, fixed: Sequence[Case], fresh: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    kept = restrict(ctx, [*fixed, *fresh])
    return [c for c in kept if c.fixed], [c for c in kept if not c.fixed]


def case_seed(ctx: Context, case: Case) -> int:
    """Return the seed of a case's operands: fixed, or derived from the run's seed and the case's stable name."""
    return FIXED_SEED if case.fixed else derive(ctx.seed, case.name.partition("@")[0])


def _verify(session: Session, case: Case, seconds: float, shipped: str) -> Iterator[Fact]:
    ctx = session.ctx
    core = session.place(case.name)
    seed = case_seed(ctx, case)
    started = ctx.clock()
    problem, doubts = _make(session, case, seed, core, shipped)
    yield from doubts
    if doubts:
        return  # a doubtful golden accuses only the core that made it
    comparison, comparator = _measure(session, case, problem, seed, core, seconds - (ctx.clock() - started))
    if comparison.digest:  # of the first upload only: a wrong result must change the fingerprint, not remove it
        session.digests.append((case.name, comparison.digest))
    if comparison.wrong:
        again = []
        for _ in range(FRESH_UPLOADS):
            problem, doubts = _make(session, case, seed, core, shipped)
            yield from doubts
            if doubts:
                break
            again.append(_measure(session, case, problem, seed, core, 0.0)[0])
        comparison = _with_reproduction(comparison, again)
        yield from (c for c in again if c.wrong)
    yield comparison
    if comparator is not None:
        yield comparator


def _with_reproduction(comparison: Comparison, again: list[Comparison]) -> Comparison:
    assert comparison.evidence is not None
    wrong = [c.evidence for c in again if c.evidence is not None]
    same = sum(1 for e in wrong if e.first == comparison.evidence.first)
    found = replace(comparison.evidence, repeats=len(again), repeats_wrong=len(wrong), repeats_alike=same)
    return replace(comparison, evidence=found)


def _make(session: Session, case: Case, seed: int, core: int | None, shipped: str) -> tuple[Problem, list[Comparison]]:
    """Build a problem twice on the host; return it with the comparisons that failed (none on a healthy host)."""
    first, second = session.makers(case.name, core)
    with on_core(first):
        problem = case.build(seed)
    doubts = []

    def doubt(kind: Doubt, place: Place, text: str, other: Any = None, made: str = "") -> None:
        if other is not None and other.shape == problem.golden.shape and not host_same_bits(other, problem.golden):
            found = evidence.collect(problem.golden, other)
        else:
            found = evidence.collect_nothing(problem.golden)
        doubts.append(
            Comparison(
                case=case.name,
                shape=problem.shape,
                seed=seed,
                exactness=problem.exactness,
                subject=Subject.HOST,
                place=place,
                doubt=kind,
                digest=made,
                wrong_trials=1,
                evidence=replace(found, pattern=f"{text}: {found.pattern}" if found.wrong else text),
            )
        )

    with on_core(second):
        twin = case.build(seed)
    session.made_twice += can_pin() and first != second
    pairs = [*zip(problem.operands, twin.operands, strict=True), (problem.golden, twin.golden)]
    if all(host_same_bits(a, b) for a, b in pairs):
        _spoil([twin.golden])  # a result must not find the right answer in freed memory
    else:
        text = "this host computed operands and golden twice and got two results"
        doubt(Doubt.MADE_TWICE, session.place_of_makers(first, second), text, twin.golden)
    maker = Place(unit="core", numbers=(first,)) if can_pin() else Place(unit="thread")
    if not problem.witnessed:
        doubt(Doubt.ARITHMETIC, maker, "integer and float64 arithmetic of this host disagree on the golden")
    if shipped and case.fixed and (made := digest(problem.golden)) != shipped:
        text = f"the golden has digest {made}; the one shipped with canaryd has {shipped}"
        doubt(Doubt.DIGEST, maker, text, made=made)
    return problem, doubts


def _agree(results: list[Any], golden: Any) -> list[bool]:
    """Compare results with the golden where they lie; on an accelerator with one synchronisation for all of them."""
    if golden.device.type == "cpu":
        return [same_bits(result, golden) for result in results]
    *raw, right = words(*results, golden)
    return [not differs for differs in torch.stack([(r != right).any() for r in raw]).tolist()]


def _spoil(results: list[Any]) -> None:
    """Overwrite results once they are compared: the next ones may land in this memory, and a kernel that writes
    nothing must not find it right already.
    """  # noqa: D205  the sentence needs two lines
    for result in results:
        bits(result).fill_(-1 if result.element_size() > 1 else 255)


def _measure(
    session: Session, case: Case, problem: Problem, seed: int, core: int | None, seconds: float
) -> tuple[Comparison, Comparison | None]:
    """Compute and compare for `seconds` over one upload; return the comparison, and one more if the comparator errs."""
    ctx = session.ctx
    operands = upload(problem.operands, ctx.device)
    (golden,) = upload((problem.golden,), ctx.device)
    session.injector.before(case.name, operands[case.struck])
    burst = 1 if golden.device.type == "cpu" else max(1, min(BURST, BURST_BYTES // max(1, golden.nbytes)))
    place = session.place_of(core)
    session.places.add(place)
    trials = wrong = 0
    found = None
    observed_digest = ""
    comparator_erred = ""
    buffers: list[Any] = [None] * burst
    with on_core(core):
        started = ctx.clock()
        while True:
            ctx.pace()
            if trials == 0:
                results = [_first_result(ctx.device, case.compute, operands)]
            else:
                results = [case.compute(operands, buffer) for buffer in buffers]
            for i, result in enumerate(results):
                session.injector.after(case.name, result)
                buffers[i] = result
            agreed = _agree(results, golden)
            if trials == 0:
                # The comparator can be the broken part: the host compares the first result of every upload itself.
                host_says = _host_agrees(session, case, core, results[0], problem.golden)
                if host_says != agreed[0]:
                    words = ("differs", "equals") if agreed[0] else ("equals", "differs")
                    comparator_erred = f"the host finds that the result {words[0]}, the device that it {words[1]}"
                    agreed[0] = agreed[0] and host_says
                if case.fixed:
                    observed_digest = digest(results[0])
            trials += len(results)
            for result, right in zip(results, agreed, strict=True):
                if not right:
                    wrong += 1
                    found = found or _evidence(problem.golden, result)
            _spoil(results)
            if wrong >= WRONG_ENOUGH or (trials > 1 and ctx.clock() - started >= seconds):
                break
    session.trials += trials
    session.elements += trials * golden.numel()
    comparison = Comparison(
        case=case.name,
        shape=problem.shape,
        seed=seed,
        exactness=problem.exactness,
        place=place,
        trials=trials,
        wrong_trials=wrong,
        evidence=found,
        digest=observed_digest,
        characterised=case.characterised,
    )
    return comparison, _comparator_error(comparison, problem.golden, comparator_erred) if comparator_erred else None


def _host_agrees(session: Session, case: Case, core: int | None, result: Any, golden: Any) -> bool:
    """Compare a result on the host, on another core than the one that computed it."""
    with on_core(None if core is None else session.makers(case.name, core)[0]):
        return host_same_bits(result.cpu(), golden)


def _comparator_error(comparison: Comparison, golden: Any, text: str) -> Comparison:
    """Return the comparison that accuses the comparator; `text` says how host and device disagree."""
    doubt = evidence.collect_nothing(golden, text)
    erred = replace(comparison, subject=Subject.COMPARATOR, doubt=Doubt.COMPARATOR, evidence=doubt, digest="")
    return replace(erred, trials=1, wrong_trials=1)


def _evidence(golden: Any, result: Any) -> Evidence:
    observed = result.cpu()
    if host_same_bits(observed, golden):
        return evidence.collect_nothing(golden, "the device saw a difference that the host's copy does not show")
    return evidence.collect(golden, observed)
