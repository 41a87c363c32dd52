"""Measure how many bits of a sum a kernel's accumulator keeps.

One output is big + small - big, exact in the operand format; the three terms are at three places of K that change from
row to row, and every other term is 0. In some rows the small term is added to the big one first. With big = 2**n small,
the answer is small if the accumulator keeps n + 1 bits. The width is the largest number of bits with which every row is
right. With one bit more, a small term of 3 becomes 4 if the accumulator rounds to nearest, and 0 if it truncates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from canaryd.worker.numeric.characterised import accumulator
from canaryd.worker.numeric.integers import below, permutation
from canaryd.worker.numeric.products import FORMAT_PAIRS, label_of, multiply
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import FORMATS, Format, torch
from canaryd.worker.runtime.interface import Operation
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import BLIND, SEED, Bench
from canaryd_lab.worker.characterise.exactness import switches_of

ROWS, COLUMNS, DEPTHS = 64, 32, (64, 512)
"""Rows and columns of the result, and the lengths of its sums. The places of the three terms change from row to row."""
SOFTWARE = 11
"""Number of bits that a float16 accumulator in software keeps; the method of measuring is checked with it."""
Multiply = Callable[[tuple[Any, ...]], Any]


def operands(source: Format, target: Format, n: int, small: int, K: int) -> tuple[Any, Any, float] | None:
    """Return (A, B by columns, unit); each output is 2**n + `small` - 2**n units. None if no exponents fit."""
    low = max(2 * source.emin, target.emin, -100)
    high = min(2 * source.emax, target.emax, 100) - 2
    unit = min(0, high - n)
    if unit < low:
        return None
    big = unit + n
    a_big = min(source.emax, max(source.emin, -(-big // 2)))
    a_small = min(source.emax - 1, max(source.emin, -(-unit // 2)))
    if not (source.emin <= big - a_big <= source.emax and source.emin <= unit - a_small <= source.emax):
        return None
    half, rows = K // 2, torch.arange(ROWS)
    # Big and small terms mixed over K: kernels add even and odd places, or whole blocks, in accumulators of their own.
    order = permutation(SEED, f"places {K}", K)
    first = below(SEED, f"first {K}", (ROWS,), half)
    second = (first + 1 + below(SEED, f"second {K}", (ROWS,), half - 1)) % half
    a = torch.zeros((ROWS, K), dtype=torch.float64)
    a[rows, order[first]] = 2.0**a_big
    a[rows, order[second]] = -(2.0**a_big)
    a[rows, order[half + below(SEED, f"small {K}", (ROWS,), half)]] = small * 2.0**a_small
    b = torch.empty((COLUMNS, K), dtype=torch.float64)
    b[:, order[:half]] = 2.0 ** (big - a_big)
    b[:, order[half:]] = 2.0 ** (unit - a_small)
    work = torch.float32 if source.bits <= 24 else torch.float64
    return a.to(work).to(source.dtype), b.to(work).to(source.dtype).t(), 2.0**unit


def measure(source: Format, target: Format, multiply_: Multiply) -> dict[str, float | int | str]:
    """Return the bits that the accumulator keeps, the bits tried, and how the first lost bit is rounded, if any."""
    kept, tried, rounding = 0, 0, ""
    for n in range(1, 60):
        fits, right = False, True
        for K in DEPTHS if multiply_ is not in_software else DEPTHS[:1]:
            made = operands(source, target, n, 1, K)
            if made is None:
                continue
            fits = True
            result = multiply_(made[:2]).to(torch.float64) / made[2]
            right = right and bool((result == 1).all())
        if not fits:
            break
        tried = n + 1
        if not right:
            rounding = _rounding(source, target, n + 1, multiply_)
            break
        kept = n + 1
    values: dict[str, float | int | str] = {"kept_bits": kept, "tried_bits": tried}
    return {**values, "loss": rounding} if rounding else values


def _rounding(source: Format, target: Format, n: int, multiply_: Multiply) -> str:
    """Return a text that says how the accumulator rounds a term of 3, which lies between two neighbours 4 apart."""
    made = operands(source, target, n, 3, DEPTHS[0])
    if made is None:
        return "not known: no exponents fit"
    result = multiply_(made[:2]).to(torch.float64) / made[2]
    lost = sorted({float(v) for v in result.flatten().tolist() if v != 3})
    if lost == [4.0]:
        return "rounds to nearest"
    if lost in ([0.0], [0.0, 4.0]):  # 4 where the negative big term came first: towards zero is up there
        return "truncates"
    return f"gives {', '.join(f'{v:g}' for v in lost[:6])} for 3" if lost else "keeps more in another order"


def in_software(made: tuple[Any, ...]) -> Any:
    """Return the product of the operands, added term by term in float16: an accumulator of known width."""
    a, b = (t.to(torch.float32) for t in made)
    total = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float16)
    for k in range(a.shape[1]):
        total = total + (a[:, k : k + 1] * b[k : k + 1]).to(torch.float16)
    return total.to(torch.float32)


def widths(bench: Bench) -> None:
    """Measure every pair of formats with switches off, then with each on; compare with the assumed width."""
    found = measure(FORMATS["float16"], FORMATS["float16"], in_software)
    seen = Seen.WRONG if found["kept_bits"] == SOFTWARE and bench.drill != BLIND else Seen.RIGHT
    text = f"an accumulator of {SOFTWARE} bits, made in software, must measure {SOFTWARE}, not 24"
    bench.add("float16 in software", Claim.CONTROL, seen, text, values=found)
    with bench.runtime.strict(bench.device):
        for pair in FORMAT_PAIRS:
            _pair(bench, float8(bench.device, pair[0]), pair[1])


def _pair(bench: Bench, source: str, target: str) -> None:
    name = label_of(source, target)
    if source == "tfloat32" and bench.device.unit != "cuda":
        bench.add(name, Claim.STRICT, Seen.NOT_OFFERED, "TF32 is a format of NVIDIA's tensor cores")
        return
    _one(bench, name, source, target, Claim.STRICT)
    if bench.seen[-1].seen is Seen.REFUSED:
        return
    for switch in switches_of(source):
        label = f"{name}/switch {switch.name}"
        if bench.device.backend not in switch.backends:
            reason = f"not offered here: it is for {', '.join(switch.backends)}"
            bench.add(label, Claim.OPEN, Seen.NOT_OFFERED, reason)
            continue
        try:
            with switch.turn_on():
                _one(bench, label, source, target, Claim.OPEN, fast=switch.fast)
        except AttributeError as error:
            bench.add(label, Claim.OPEN, Seen.NOT_OFFERED, f"not offered here: {error}")


def _one(bench: Bench, name: str, source: str, target: str, claim: Claim, *, fast: bool = False) -> None:
    if bench.out_of_time(name, claim):
        return
    runtime = bench.runtime
    compute: Any = partial(multiply, source, target, fast=True)
    if not fast:
        compute = bench.computes(Operation("matmul", source, target))
    assumed = accumulator(bench.device, source).bits
    try:
        found = measure(
            FORMATS[source],
            FORMATS[target],
            lambda made: runtime.download(compute(runtime.upload(made, bench.device), None)),
        )
    except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
        bench.note_error(name, claim, caught)
        return
    if claim is Claim.OPEN:
        bench.add(name, claim, Seen.MEASURED, values=found)
        return
    enough = int(found["kept_bits"]) >= min(assumed, int(found["tried_bits"]))
    text = "" if enough else f"the goldens assume {assumed} bits"
    bench.add(name, claim, Seen.RIGHT if enough else Seen.WRONG, text, values={**found, "assumed_bits": assumed})
