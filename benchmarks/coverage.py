"""Measure which flipped and stuck bits each level of `exact_matmul` detects, by content, and how much it verifies.

One bit flips once: in an operand, in a product of two elements, in a partial sum (in the order of K; a kernel has its
own order) or in a result. The flip is detected if the result, rounded to its format, has other bits. A bit that is
stuck at 0 is detected if one of these flips of a 1 is detected, and likewise for 1. Bits are those of the stored
number. Products and partial sums are examined in float32, or in float64 if they have more than 24 bits, which is more
than goldens use: no exact test detects a product's bits below the accumulator's last place. Zeros are left out, because
sparse contents consist mostly of zeros.

The first table runs each level for its time, as a check does. The second has the recall per second: the number of
multiplications and additions (for results: elements) per second in which a flipped bit would be detected, for each
content over the time of its own cases. A fault that flips one bit in n of them is found within 3n of them in 95 % of
cases. The third has, for each format, the fraction of flips that the best content for each bit detects, and the number
of stuck bits that any content detects. The last sorts the contents: first the one that detects most stuck bits, then
the one that adds most, and so on, with the fraction of flips that each detects alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from canaryd.facts import Comparison, Reading
from canaryd.model import Device
from canaryd.probe import LEVELS, Context
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.operands import make_pools
from canaryd.worker.numeric.tensors import bits, torch
from canaryd.worker.numeric.verify import case_seed
from probes import exact_matmul

STAGES = ("operand A", "operand B", "products", "partial sums", "results")
SAMPLE = 12
"""Number of rows and columns of each pool of operands that are examined."""
FLIPS = 1024
"""Number of flips of each bit, at random places."""
SEED = 1

Seen = dict[tuple[str, int], tuple[float, float]]
"""(stage, bit) → (fraction of flips 1 → 0, of flips 0 → 1) that changed the result. Bit 0 is the lowest."""


@dataclass(frozen=True)
class Level:
    """One run of a level, and the bits that its cases detect."""

    name: str
    seconds: float
    cases: int
    readings: dict[str, Any]
    seen: dict[str, dict[str, Seen]]
    """Format → content → the detected flips."""
    recall: dict[str, dict[str, float]]
    """Content, or "all" → stage → number of operations per second in which a flip would be detected."""


def _flipped(values: Any, bit: int) -> Any:
    """Return numbers as float64 after one bit of each was flipped."""
    raw = bits(values)
    top = 8 * values.element_size() - 1
    mask = 1 << bit if bit < top or raw.dtype == torch.uint8 else -(1 << top)
    return (raw ^ mask).view(values.dtype).to(torch.float64)


def of_case(case: Case, seed: int) -> Seen:
    """Return the flips that one case detects."""
    product = case.product
    assert product is not None
    pools = make_pools(product.of_pools, seed)
    a, b = (pool[:SAMPLE] for pool in pools.operands)
    # Exact, as their sums are: the golden's bound holds for every term and partial sum.
    terms = a.to(torch.float64).unsqueeze(1) * b.to(torch.float64).unsqueeze(0)
    sums = terms.cumsum(-1)
    live = torch.nonzero(terms * sums)
    at = live[torch.randint(len(live), (FLIPS,), generator=torch.Generator().manual_seed(seed % (1 << 63)))]
    i, j, k = at.T
    answer = sums[i, j, -1]
    rounded = answer.to(product.target.dtype)
    golden = bits(rounded)

    def seen(
        stage: str, values: Any, factor: Any = 1.0, whole: Any = answer
    ) -> Iterable[tuple[tuple[str, int], tuple[float, float]]]:
        for bit in range(8 * values.element_size()):
            changed = (_flipped(values, bit) - values.to(torch.float64)) * factor
            wrong = bits((whole + changed).to(product.target.dtype)) != golden
            ones = ((bits(values) >> bit) & 1) == 1
            yield (stage, bit), (float((wrong & ones).sum()) / FLIPS, float((wrong & ~ones).sum()) / FLIPS)

    left, right = (bits(pool)[row, k].view(pool.dtype) for pool, row in ((a, i), (b, j)))
    return dict(
        itertools.chain(
            seen("operand A", left, right.to(torch.float64)),
            seen("operand B", right, left.to(torch.float64)),
            seen("products", terms[i, j, k].to(torch.float64 if product.source.bits > 12 else torch.float32)),
            seen("partial sums", sums[i, j, k].to(torch.float64 if product.source.bits > 24 else torch.float32)),
            seen("results", rounded, whole=rounded.to(torch.float64)),
        )
    )


def measure(device: Device, name: str) -> Level:
    """Run one level for its time, and examine the data of its cases; exit if a result is wrong."""
    context = Context(device=device, level=name, seed=SEED, budget=exact_matmul.SPEC.budget[name])
    started = time.perf_counter()
    facts = list(exact_matmul.run(context))
    seconds = time.perf_counter() - started
    compared = [fact for fact in facts if isinstance(fact, Comparison)]
    if wrong := [fact.case for fact in compared if fact.wrong]:
        raise SystemExit(f"this machine is wrong in {', '.join(wrong)}")
    readings = {fact.name: fact.value for fact in facts if isinstance(fact, Reading)}
    speeds = {key.removeprefix("speed_"): float(speed) for key, speed in readings.items() if key.startswith("speed_")}
    ran = {fact.case for fact in compared}
    trials = {fact.case: fact.trials for fact in compared}
    seen: dict[str, dict[str, Seen]] = {}
    looked: dict[str, dict[str, float]] = {}
    times: Counter[str] = Counter()
    for case in exact_matmul.every_case(context, speeds)[0]:
        if case.name in ran and case.product is not None:
            form, content = case.name.split("/")[:2]
            contents, one = seen.setdefault(form, {}), of_case(case, case_seed(context, case))
            contents[content] = best([contents.get(content, {}), one])
            times[content] += 1  # the cases of a run share its time
            for stage in STAGES:
                each = trials[case.name] * case.product.elements * (1 if stage == "results" else case.product.K)
                sums = looked.setdefault(content, dict.fromkeys(STAGES, 0.0))
                sums[stage] += each * flips(one, stage)
    recall = {
        content: {stage: sums[stage] / (seconds * times[content] / len(ran)) for stage in STAGES}
        for content, sums in looked.items()
    }
    recall["all"] = {stage: sum(sums[stage] for sums in looked.values()) / seconds for stage in STAGES}
    return Level(name, seconds, len(ran), readings, seen, recall)


def best(found: Iterable[Seen]) -> Seen:
    """Return for each bit the largest fractions of all that were `found`."""
    largest: Seen = {}
    for each in found:
        for bit, shares in each.items():
            zero, one = largest.get(bit, (0.0, 0.0))
            largest[bit] = max(shares[0], zero), max(shares[1], one)
    return largest


def flips(seen: Seen, stage: str = "") -> float:
    """Return the mean fraction of detected flips over all bits of a stage ("": of all stages)."""
    return statistics.mean(min(1.0, sum(shares)) for (where, _), shares in seen.items() if stage in ("", where))


def stuck(seen: Seen, stage: str = "") -> set[tuple[str, int, int]]:
    """Return the detected stuck bits of a stage ("": of all stages), as (stage, bit, stuck value)."""
    found = ((where, bit, value) for (where, bit), shares in seen.items() for value in (0, 1) if shares[value])
    return {one for one in found if stage in ("", one[0])}


def in_order(contents: dict[str, Seen]) -> Iterable[tuple[str, int]]:
    """Yield (content, number of stuck bits that it adds to those before); the next is always the one that adds most."""
    left, have = {content: stuck(seen) for content, seen in contents.items()}, set[tuple[str, int, int]]()
    while left:
        content = max(left, key=lambda each: (len(left[each] - have), flips(contents[each])))
        gained = left.pop(content) - have
        yield content, len(gained)
        have |= gained


def report(levels: list[Level]) -> str:
    """Return the body of the report."""
    ran = common.table(
        ["level", "seconds", "cases", "fresh operands", "results", "Gflop verified per second", "device's share"],
        [
            [
                *(level.name, f"{level.seconds:.1f}", level.cases, level.readings["gathers"], level.readings["trials"]),
                f"{1e-9 * level.readings['operations'] / level.seconds:.1f}",
                f"{100 * level.readings['device_seconds'] / level.seconds:.0f} %",
            ]
            for level in levels
        ],
    )
    per_second = common.table(
        ["level", "content", *STAGES],
        [
            [level.name, content, *(f"{1e-9 * found[stage]:.3g}" for stage in STAGES)]
            for level in levels
            for content, found in level.recall.items()
        ],
    )
    by_stage = common.table(
        ["level", "format", *STAGES],
        [
            [level.name, form, *(_in_words(best(contents.values()), stage) for stage in STAGES)]
            for level in levels
            for form, contents in level.seen.items()
        ],
    )
    orders = common.table(
        ["level", "format", "contents: stuck bits added, flips seen"],
        [
            [
                *(level.name, form),
                "; ".join(f"{name}: {gained}, {_percent(contents[name])}" for name, gained in in_order(contents)),
            ]
            for level in levels
            for form, contents in level.seen.items()
        ],
    )
    words = "Share of flips that were seen, and stuck bits (0 and 1 counted apart)"
    ran += f"\nRecall per second, in 1e9 multiplications and additions, or elements of results:\n\n{per_second}"
    return f"{ran}\n{words}:\n\n{by_stage}\nContents in the order of what they add:\n\n{orders}"


def _percent(seen: Seen, stage: str = "") -> str:
    return f"{100 * flips(seen, stage):.1f} %"


def _in_words(seen: Seen, stage: str) -> str:
    every = 2 * sum(where == stage for where, _ in seen)
    return f"{_percent(seen, stage)}, {len(stuck(seen, stage))} of {every}"


def main() -> None:
    """Measure each level and write the report."""
    parser = common.options(__doc__)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    common.become_worker()
    facts = common.machine()
    found = [d for d in stack.discover()[0] if d.backend == arguments.device]
    if not found:
        parser.error(f"--device {arguments.device}: this torch finds none")
    levels = [measure(found[0], name) for name in arguments.levels]
    data = {
        level.name: {
            "seconds": level.seconds,
            "readings": level.readings,
            "recall_per_second": level.recall,
            "seen": {
                form: {
                    content: [[stage, bit, *shares] for (stage, bit), shares in found.items()]
                    for content, found in contents.items()
                }
                for form, contents in level.seen.items()
            },
        }
        for level in levels
    }
    name = f"coverage-{arguments.device}"
    common.write(arguments.out, name, f"What the levels cover on {found[0].model}", facts, report(levels), data)


if __name__ == "__main__":
    main()
