"""Which injected faults are found: canaryd's bitwise rule beside four rules of thumb, on the same faulty tensors.

Every injection corrupts one result (or one operand) of an exact product. Whether the result changed is decided by the C
library's memcmp; each rule then sees the faulty tensor and what that rule compares with. A fault that changed no bit of
the result cannot be found by looking at results: it is counted apart, with its reason.

The rules:
- canaryd: the bits of the result are those of the golden.
- first product: |result - first result| <= 1e-3 in every element, where a NaN compares false and so is no error. A
  fault that is always there is in the first result too. (gpu-burn, and DCGM's targeted stress in the same manner)
- relative, over K: |result - reference| / |reference| / K <= 1e-6, or 1e-3 for 16-bit and 8-bit formats, against a
  reference of the host; NaN compares false. (SuperBench's kernels)
- relative L2: ||result - reference|| / ||reference|| < 5e-3 against float64; NaN fails it.
- not finite: only NaN and infinity are errors. (what a serving engine notices by itself)
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import common
from canaryd.facts import Exactness
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.operands import CONTENTS, Problem, Product, build
from canaryd.worker.numeric.products import FORMAT_PAIRS, LAYOUTS, multiply
from canaryd.worker.numeric.seeds import derive, mix64
from canaryd.worker.numeric.tensors import FORMATS, bits, host_same_bits, same_bits, strict_switches, torch, upload
from probes import exact_matmul

SIZES = {"square": (64, 48, 96, 0), "decode": (3, 80, 160, 0), "batched": (24, 32, 48, 2)}
PERIODS = (2, 4, 8, 16)
RULES = ("canaryd", "first product", "relative, over K", "relative L2", "not finite")

Draw = Callable[[int], int]
"""Returns a number below its argument."""


@dataclass
class Trial:
    """A clean result, its problem, and how to compute it again from changed operands."""

    problem: Problem
    clean: Any
    compute: Callable[[tuple[Any, ...]], Any]
    K: int
    width: int
    """Bits of an element of the result."""
    mantissa: int
    exponent: int


@dataclass(frozen=True)
class Struck:
    """What a fault left behind."""

    result: Any
    first: Any
    """The first result, which a rule that compares the device with itself would have kept."""
    operand: Any = None
    """The first operand as the fault left it, where it struck there."""


@dataclass
class Row:
    """What became of the injections of one fault class in one format."""

    injected: int = 0
    changed: int = 0
    found: Counter[str] = field(default_factory=Counter)
    unobserved: Counter[str] = field(default_factory=Counter)


# ---------------------------------------------------------------------------------------------------------------------
# Faults.


def _addresses(total: int, draw: Draw) -> list[int]:
    """Between 2 and 9 elements at one of the periods at which lanes, banks and fragments repeat."""
    period = PERIODS[draw(len(PERIODS))]
    start = draw(total)
    return [(start + i * period) % total for i in range(2 + draw(8))]


def _one(total: int, draw: Draw) -> list[int]:
    return [draw(total)]


def _signed(mask: int, width: int) -> int:
    return mask - (1 << width) if mask >> (width - 1) and width > 8 else mask


def _finite_flip(value: int, trial: Trial, draw: Draw, count: int) -> int:
    """Flip `count` bits of one pattern so that it stays finite: an exponent of ones is drawn again."""
    top = (1 << trial.exponent) - 1
    while True:
        mask = 0
        while mask.bit_count() < count:
            mask |= 1 << draw(trial.width)
        if ((value ^ mask) >> trial.mantissa) & top != top:
            return value ^ mask


def _change(trial: Trial, places: list[int], new: Callable[[int], int]) -> Any:
    result = trial.clean.clone()
    flat = bits(result).view(-1)
    low = (1 << trial.width) - 1
    for place in places:
        flat[place] = _signed(new(int(flat[place]) & low), trial.width)
    return result


def _zeroed(trial: Trial, draw: Draw, where: Callable[[int, Draw], list[int]]) -> Struck:
    return Struck(_change(trial, where(trial.clean.numel(), draw), lambda _: 0), trial.clean)


def _flipped(trial: Trial, draw: Draw, where: Callable[[int, Draw], list[int]], most: int) -> Struck:
    count = 1 if most == 1 else 2 + draw(most - 1)
    places = sorted(set(where(trial.clean.numel(), draw)))  # a place named twice would be flipped back
    return Struck(_change(trial, places, lambda v: _finite_flip(v, trial, draw, count)), trial.clean)


def _not_finite(trial: Trial, draw: Draw) -> Struck:
    infinity = ((1 << trial.exponent) - 1) << trial.mantissa
    pattern = (infinity | (draw(2) << (trial.mantissa - 1))) | (draw(2) << (trial.width - 1))
    return Struck(_change(trial, _one(trial.clean.numel(), draw), lambda _: pattern), trial.clean)


def _lowest_bit(trial: Trial, draw: Draw) -> Struck:
    return Struck(_change(trial, _one(trial.clean.numel(), draw), lambda v: v ^ 1), trial.clean)


def _swapped(trial: Trial, draw: Draw) -> Struck:
    result = trial.clean.clone()
    flat = bits(result).view(-1)
    first, second = draw(flat.numel()), draw(flat.numel())
    flat[first], flat[second] = flat[second].clone(), flat[first].clone()
    return Struck(result, trial.clean)


def _consistent(trial: Trial, draw: Draw) -> Struck:
    place, bit = draw(trial.clean.numel()), draw(trial.width - 1)
    result = _change(trial, [place], lambda v: v ^ (1 << bit))
    return Struck(result, result)  # the first product had it too


def _stuck(trial: Trial, draw: Draw) -> Struck:
    operands = upload(trial.problem.operands, stack.cpu())
    raw = bits(operands[0])
    flat = raw.view(-1) if raw.is_contiguous() else raw.transpose(-1, -2).view(-1)
    width = operands[0].element_size() * 8
    lane = flat[draw(16) :: 16]
    mask = 1 << draw(width)
    if draw(2):
        lane |= _signed(mask, width)
    else:
        lane &= _signed(~mask & ((1 << width) - 1), width)
    result = trial.compute(operands)
    return Struck(result, result, operands[0])


FAULTS: dict[str, tuple[int, Callable[[Trial, Draw], Struck]]] = {
    # The published error mix in thousandths: half zeroed values, half finite flips, 1 % NaN or infinity; periodic.
    "mix: zeroed, periodic addresses": (220, partial(_zeroed, where=_addresses)),
    "mix: one bit flipped, periodic addresses": (110, partial(_flipped, where=_addresses, most=1)),
    "mix: several bits flipped, periodic addresses": (110, partial(_flipped, where=_addresses, most=6)),
    "mix: NaN or infinity": (5, _not_finite),
    # Beside the mix.
    "one element zeroed": (85, partial(_zeroed, where=_one)),
    "one bit of one element flipped": (85, partial(_flipped, where=_one, most=1)),
    "NaN or infinity in one element": (55, _not_finite),
    "lowest mantissa bit of one element": (85, _lowest_bit),
    "two elements exchanged": (75, _swapped),
    "the same wrong bit every time": (85, _consistent),
    "stuck bit in one lane of an operand": (85, _stuck),
}
"""Fault class → share of the injections, and what it does."""


# ---------------------------------------------------------------------------------------------------------------------
# Rules.


def judge(trial: Trial, struck: Struck, form: str) -> dict[str, bool]:
    """Return which rule finds this result wrong."""
    seen, kept, reference = (t.to(torch.float64) for t in (struck.result, struck.first, trial.problem.golden))
    tolerance = 1e-6 if form in ("float64", "float32") else 1e-3
    relative = (seen - reference).abs() / reference.abs() / trial.K
    distance = float(torch.linalg.vector_norm(seen - reference) / torch.linalg.vector_norm(reference))
    return {
        "canaryd": not same_bits(struck.result, trial.problem.golden),
        "first product": bool(((seen - kept).abs() > 1e-3).any()),
        "relative, over K": bool((relative > tolerance).any()),
        "relative L2": not distance < 5e-3,
        "not finite": not bool(torch.isfinite(seen).all()),
    }


def why_unobserved(trial: Trial, struck: Struck) -> str:
    """Say why a fault left every bit of the result as it was; of an operand by striking the same elements harder."""
    if struck.operand is None:
        return "the two values exchanged were equal"
    before, after = trial.problem.operands[0], struck.operand
    changed = bits(before) != bits(after)
    if not bool(changed.any()):
        return "the operand already held these bits"
    values = before.to(torch.float64)
    if bool((values == after.to(torch.float64)).all()):
        return "a zero changed its sign"
    largest = (-values.abs().max()).to(before.dtype)
    harder = torch.where(changed, bits(largest), bits(before)).view(before.dtype)
    if host_same_bits(trial.compute(upload((harder, trial.problem.operands[1]), stack.cpu())), trial.clean):
        return "the elements meet only zeros"
    rounded = trial.problem.exactness is Exactness.ROUNDED
    return "lost in the one rounding of class R" if rounded else "below the last place of the sum"


# ---------------------------------------------------------------------------------------------------------------------
# The run.


def _trials(seed: int) -> dict[str, Iterator[Trial]]:
    """Return an endless source of clean trials for every format that this CPU multiplies."""
    device = stack.cpu()
    sources = {}
    for source, target in FORMAT_PAIRS:
        if not exact_matmul.unsupported(device, source, target):
            label = source if source == target else f"{source}>{target}"
            sources[label] = _trials_of(source, target, derive(seed, label))
    return sources


def _trials_of(source: str, target: str, seed: int) -> Iterator[Trial]:
    scaled = source.startswith("float8")
    sizes = {"square": (64, 48, 96, 0)} if scaled else SIZES
    layouts = ("nt",) if scaled else LAYOUTS
    room = accumulator(stack.cpu(), source).bits
    choices = itertools.cycle(itertools.product(CONTENTS, sizes.values(), layouts))
    compute = partial(multiply, source, target, out=None)
    for number, (name, (M, N, K, batch), layout) in enumerate(choices):
        spec = Product(name, FORMATS[source], FORMATS[target], room, M, N, K, batch, layout)
        problem = build(spec, derive(seed, str(number)))
        clean = compute(upload(problem.operands, stack.cpu()))
        if not host_same_bits(clean, problem.golden):
            sys.exit(f"{source}>{target}/{name}/{layout}: the clean result is wrong; no recall is measured here")
        form = FORMATS[target]
        width = clean.element_size() * 8
        yield Trial(problem, clean, compute, K, width, form.bits - 1, width - form.bits)


def run(injections: int, seed: int) -> dict[tuple[str, str], Row]:
    """Inject, judge and count; return (fault class, format) → row. At least one injection per class and format."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    total = sum(share for share, _ in FAULTS.values())
    with strict_switches():
        sources = _trials(seed)
        for form, trials in sources.items():
            for fault, (share, strike) in FAULTS.items():
                row = rows[fault, form]
                numbers = itertools.count(derive(seed, f"{form} {fault}"))
                draw = partial(_draw, numbers)
                for _ in range(max(1, -(-injections * share // (total * len(sources))))):
                    trial = next(trials)
                    struck = strike(trial, draw)
                    row.injected += 1
                    if host_same_bits(struck.result, trial.clean):
                        row.unobserved[why_unobserved(trial, struck)] += 1
                        continue
                    row.changed += 1
                    row.found.update(rule for rule, found in judge(trial, struck, form).items() if found)
    return dict(rows)


def _draw(numbers: Iterator[int], limit: int) -> int:
    return (mix64(next(numbers)) >> 1) % limit


def summary(rows: dict[tuple[str, str], Row], by: int) -> dict[str, Row]:
    """Sum the rows by fault class (0) or by format (1), with their total last."""
    sums: dict[str, Row] = defaultdict(Row)
    for key, row in rows.items():
        for name in (key[by], "all"):
            into = sums[name]
            into.injected += row.injected
            into.changed += row.changed
            into.found.update(row.found)
            into.unobserved.update(row.unobserved)
    sums["all"] = sums.pop("all")
    return dict(sums)


def _table(first: str, rows: dict[str, Row]) -> str:
    header = [first, "injected", "changed a bit", *RULES, "unobserved"]
    return common.table(
        header,
        [
            [name, r.injected, r.changed, *(_share(r.found[rule], r.changed) for rule in RULES), r.unobserved.total()]
            for name, r in rows.items()
        ],
    )


def _share(found: int, of: int) -> str:
    return f"{found} ({100 * found / of:.1f} %)" if of else "none to find"


def report(rows: dict[tuple[str, str], Row]) -> str:
    """Return the tables: by fault class, by format, every cell of canaryd's own row, and why some were not observed."""
    reasons = summary(rows, 0)["all"].unobserved
    rules = (__doc__ or "").partition("The rules:\n")[2]
    formats = sorted({form for _, form in rows})
    cells = [
        [fault, *(f"{rows[fault, form].found['canaryd']} of {rows[fault, form].changed}" for form in formats)]
        for fault in FAULTS
    ]
    return "\n".join(
        [
            f"Shares are of the faults that changed a bit of the result.\n\n{rules}",
            _table("fault", summary(rows, 0)),
            _table("format", summary(rows, 1)),
            "canaryd by fault and format, found of changed:\n",
            common.table(["fault", *formats], cells),
            "Changed no bit of the result:\n",
            common.table(["why", "injections"], sorted(reasons.items())),
        ]
    )


def main() -> None:
    """Run, print, write; end with 1 where canaryd missed a fault that changed a bit."""
    parser = common.options(__doc__)
    parser.add_argument("--injections", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    facts = common.machine()
    rows = run(options.injections, options.seed)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["cpu"].lower()).strip("-") or "cpu"
    data = {
        "injections": options.injections,
        "seed": options.seed,
        "rows": [
            {
                "fault": fault,
                "format": form,
                "injected": row.injected,
                "changed": row.changed,
                "found": {rule: row.found[rule] for rule in RULES},
                "unobserved": dict(row.unobserved),
            }
            for (fault, form), row in rows.items()
        ],
    }
    common.write(options.out, f"detection-{slug}", "Detection of injected faults", facts, report(rows), data)
    if any(row.found["canaryd"] != row.changed for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
