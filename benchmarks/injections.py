"""Exact products with one fault each: the published mix, and faults of lanes, tiles, cores, values and stuck bits.

This module decides on the bits how a fault changes a result, before any rule judges it. Primitives that drills and
tests also use are in `canaryd.worker.numeric.faults`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from canaryd.facts import Exactness
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.faults import LANES, force, lane, signed
from canaryd.worker.numeric.integers import stream
from canaryd.worker.numeric.operands import CONTENTS, Problem, Product, build
from canaryd.worker.numeric.products import FORMAT_PAIRS, LAYOUTS, multiply
from canaryd.worker.numeric.seeds import derive, mix64
from canaryd.worker.numeric.tensors import FORMATS, bits, flat_bits, host_same_bits, torch, upload
from probes import exact_matmul

SIZES = {"square": (64, 48, 96, 0), "decode": (3, 80, 160, 0), "batched": (24, 32, 48, 2)}
PERIODS = (2, 4, 8, 16)
TILE = 16
"""Number of rows and columns of a tile, and number of terms along K that an accumulator adds at once."""

Draw = Callable[[int], int]
"""Function that returns a random number from 0 to its argument minus 1."""


def draws(seed: int) -> Draw:
    """Return a function that draws random numbers, the same numbers for the same seed."""
    numbers = itertools.count(seed)
    return lambda limit: (mix64(next(numbers)) >> 1) % limit


@dataclass
class Trial:
    """A clean result, its problem, and the function that computes it again from changed operands."""

    problem: Problem
    clean: Any
    compute: Callable[[tuple[Any, ...]], Any]
    K: int
    width: int
    """Number of bits of an element of the result."""
    mantissa: int
    exponent: int


@dataclass(frozen=True)
class Struck:
    """The result of a product with an injected fault."""

    result: Any
    first: Any
    """The first result, with which a rule that compares the device with itself compares `result`."""
    operand: Any = None
    """The first operand after the fault, if the fault changed it; else None."""
    why: str = ""
    """The reason why the fault can have changed nothing, if it is already known; else ""."""


# ---------------------------------------------------------------------------------------------------------------------
# Faults.


def _addresses(total: int, draw: Draw) -> list[int]:
    """Return 2 to 9 indices at equal distances, one of the periods at which lanes, banks and fragments repeat."""
    period = PERIODS[draw(len(PERIODS))]
    start = draw(total)
    return [(start + i * period) % total for i in range(2 + draw(8))]


def _one(total: int, draw: Draw) -> list[int]:
    return [draw(total)]


def _finite_flip(value: int, trial: Trial, draw: Draw, count: int) -> int:
    """Return a bit pattern with `count` random bits flipped; flips that make it NaN or infinite are drawn again."""
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
        flat[place] = signed(new(int(flat[place]) & low), flat)
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


def _stuck_operand(trial: Trial, draw: Draw) -> Struck:
    operands = upload(trial.problem.operands, stack.cpu())
    force(lane(flat_bits(operands[0]), draw(LANES)), draw(8 * operands[0].element_size()), high=bool(draw(2)))
    result = trial.compute(operands)
    return Struck(result, result, operands[0])


def _wide(trial: Trial) -> tuple[Any, Any]:
    """Return both operands in the accumulator's format, which holds every product and partial sum exactly."""
    dtype = torch.float64 if trial.problem.operands[0].dtype == torch.float64 else torch.float32
    a, b = (operand.to(dtype) for operand in trial.problem.operands)
    return a, b


def _rounded(trial: Trial, sums: Any, *, touched: bool) -> Struck:
    """Return accumulators as a result; `touched`: whether the stuck bit ever had the wrong value."""
    result = sums.to(trial.clean.dtype)
    rounds = trial.problem.exactness is Exactness.ROUNDED
    lost = "lost in the one rounding of class R" if rounds else "below the last place of the sum"
    return Struck(result, result, why=lost if touched else "the unit already held these bits")


def _stuck_product(trial: Trial, draw: Draw) -> Struck:
    """Return the result if one multiplier (one lane along K and one of columns) has a stuck bit in its products."""
    a, b = _wide(trial)
    along, columns = slice(draw(LANES), None, LANES), slice(draw(LANES), None, LANES)
    products = a[..., :, along].unsqueeze(-1) * b[..., along, columns].unsqueeze(-3)
    faulty = products.clone()
    force(bits(faulty), draw(8 * a.element_size()), high=bool(draw(2)))
    sums = a @ b
    sums[..., columns] += faulty.sum(-2) - products.sum(-2)
    return _rounded(trial, sums, touched=not torch.equal(bits(faulty), bits(products)))


def _stuck_accumulator(trial: Trial, draw: Draw) -> Struck:
    """Return the result if the accumulators of one lane of columns have a stuck bit after each block along K."""
    a, b = _wide(trial)
    column, bit, high = draw(LANES), draw(8 * a.element_size()), bool(draw(2))
    sums, touched = torch.zeros_like(a[..., :, :1] * b[..., :1, :]), False
    for k in range(0, trial.K, TILE):
        sums += a[..., :, k : k + TILE] @ b[..., k : k + TILE, :]
        before = sums.clone()
        force(lane(bits(sums), column), bit, high=high)
        touched |= not torch.equal(bits(sums), bits(before))
    return _rounded(trial, sums, touched=touched)


def _stuck_output(trial: Trial, draw: Draw) -> Struck:
    result = trial.clean.clone()
    force(lane(bits(result), draw(LANES)), draw(trial.width), high=bool(draw(2)))
    return Struck(result, result, why="the unit already held these bits")


def _strike(trial: Trial, draw: Draw, where: Any) -> Any:
    """Return the result after the elements at `where` were zeroed, or one mantissa bit of each was flipped."""
    result = trial.clean.clone()
    raw = bits(result)
    mask = 0 if draw(2) else signed(1 << draw(trial.mantissa), raw)
    raw[where] = raw[where] ^ mask if mask else 0
    return result


def _one_lane(trial: Trial, draw: Draw) -> Struck:
    where = torch.zeros_like(trial.clean, dtype=torch.bool)
    lane(where, draw(LANES)).fill_(True)
    return Struck(_strike(trial, draw, where), trial.clean)


def _one_tile(trial: Trial, draw: Draw) -> Struck:
    where = torch.zeros_like(trial.clean, dtype=torch.bool)
    M, N = where.shape[-2:]
    row, column = draw(-(-M // TILE)) * TILE, draw(-(-N // TILE)) * TILE
    where.view(-1, M, N)[0, row : row + TILE, column : column + TILE] = True
    return Struck(_strike(trial, draw, where), trial.clean)


def _one_core(trial: Trial, draw: Draw) -> Struck:
    """Return the result with 20 to 75 % of one core's elements wrong (of four cores), as after a fault of control."""
    where = torch.zeros_like(trial.clean, dtype=torch.bool)
    M = where.shape[-2]
    share = max(1, M // 4)
    first = draw(max(1, M // share)) * share
    rows = where[..., first : first + share, :]
    hit = stream(draw(1 << 62), "hit", (rows.numel(),)) % 100 < 20 + draw(56)
    hit[draw(rows.numel())] = True
    rows.copy_(hit.view(rows.shape))
    return Struck(_strike(trial, draw, where), trial.clean)


def _value_band(trial: Trial, draw: Draw) -> Struck:
    """Return the result in which one mantissa bit is wrong in all elements with one exponent, in each computation."""
    raw = bits(trial.clean)
    exponents = (raw.to(torch.int64) >> trial.mantissa) & ((1 << trial.exponent) - 1)
    band = exponents == exponents.view(-1)[draw(raw.numel())]
    result = trial.clean.clone()
    bits(result)[band] ^= signed(1 << draw(trial.mantissa), raw)
    return Struck(result, result)


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
    "stuck bit in one lane of an operand": (85, _stuck_operand),
    "stuck bit of a multiplier's product": (60, _stuck_product),
    "stuck bit of an accumulator": (60, _stuck_accumulator),
    "stuck bit of the output": (60, _stuck_output),
    "one lane": (60, _one_lane),
    "one tile": (60, _one_tile),
    "one core": (60, _one_core),
    "values of one exponent": (60, _value_band),
}
"""Fault class → (relative number of injections, function that injects the fault)."""


# ---------------------------------------------------------------------------------------------------------------------
# Why a fault left no trace, and where clean results come from.


def why_unobserved(trial: Trial, struck: Struck) -> str:
    """Return the reason why a fault changed no bit of the result.

    For a changed operand this is found with a larger change of the same elements.
    """
    if struck.operand is None:
        return struck.why or "the two values exchanged were equal"
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


def sources(seed: int) -> dict[str, Iterator[Trial]]:
    """Return format → endless iterator of clean trials, for every format that this CPU multiplies."""
    device = stack.cpu()
    found = {}
    for source, target in FORMAT_PAIRS:
        if not exact_matmul.unsupported(device, source, target):
            label = source if source == target else f"{source}>{target}"
            found[label] = _trials_of(source, target, derive(seed, label))
    return found


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
