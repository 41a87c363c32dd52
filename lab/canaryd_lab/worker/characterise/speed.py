"""The cost of verification: products per second with and without verification."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from canaryd.probe import Context
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.gathering import Gatherer
from canaryd.worker.numeric.operands import Problem, Product, build, make_pools
from canaryd.worker.numeric.products import FORMAT_PAIRS, computing, label_of, multiply
from canaryd.worker.numeric.repeating import EQUAL, RepeatedTurns
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import float8
from canaryd.worker.numeric.tensors import bits, strict_switches, synchronize, torch, torch_device, upload
from canaryd.worker.runtime.graphs import Graph, cannot_be_captured, why_not
from canaryd.worker.runtime.interface import Operation
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import SEED, Bench
from canaryd_lab.worker.characterise.exactness import product_of

SIZES = (512, 1024, 2048, 4096, 8192)
GROWTH = 5.0
"""Assumed ratio of the times for a size and for half the size (ours): between 4 (golden) and 8 (product)."""
SAMPLE = 0.15
"""Shortest time in seconds of one measurement of speed."""


def _offered(bench: Bench) -> list[tuple[str, str]]:
    """Return the pairs of formats that the device multiplies; record the other pairs as observations."""
    found = []
    for given, target in FORMAT_PAIRS:
        source = float8(bench.device, given)
        name = label_of(source, target)
        if source == "tfloat32" and bench.device.unit != "cuda":
            bench.add(name, Claim.OPEN, Seen.NOT_OFFERED, "TF32 is a format of NVIDIA's tensor cores")
            continue
        try:
            problem = build(product_of(bench.device, source, target, "permute", "nt", (32, 32, 32, 0)), SEED)
            bench.runtime.run(
                Operation("matmul", source, target), bench.runtime.upload(problem.operands, bench.device), None
            )
        except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
            bench.note_error(name, Claim.OPEN, caught)
        else:
            found.append((source, target))
    return found


def throughput(bench: Bench) -> None:
    """Measure products per second with and without verification, for each size from 512 up in every pair of formats."""
    with strict_switches():
        offered = _offered(bench)
        took: dict[str, float] = {}
        for size in SIZES:
            for source, target in offered:
                name = f"{label_of(source, target)}/{size}"
                expected = GROWTH * took.get(label_of(source, target), 0.0)
                if expected > bench.left:
                    text = f"it would take {expected:.0f} s, and {bench.left:.0f} s are left"
                    bench.add(name, Claim.OPEN, Seen.NOT_REACHED, text)
                    continue
                started = bench.clock()
                try:
                    _speed(bench, name, source, target, size)
                except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
                    bench.note_error(name, Claim.OPEN, caught)
                took[label_of(source, target)] = bench.clock() - started


class Repetition:
    """Products that a GPU repeats without the host: unverified, or verified on fresh operands as in exact_matmul."""

    def __init__(self, session: Session, case: Case, pools: Problem, seed: int) -> None:
        """Capture both kinds of burst; raise `ValueError` if a comparison misses a fault, or a runtime's exception."""
        assert case.product is not None
        runtime, device = session.runtime, session.ctx.device
        gatherer = Gatherer(runtime, device, case.product, pools, seed)
        operands, golden = gatherer.gather(0)
        results = runtime.room(case.compute(operands, None), runtime.burst(golden))
        self.count = len(results)
        """Products of a burst."""
        self._turns = RepeatedTurns(session, case, gatherer, results)
        if blind := self._turns.blind(seed):
            raise ValueError(blind)
        target = torch_device(device)

        def unverified() -> Any:
            for result in results:
                case.compute(operands, result)
            return torch.zeros(self.count, dtype=torch.bool, device=target)

        self._raw = Graph(target, unverified)

    def unverified(self, bursts: int) -> None:
        """Launch the burst of multiplications `bursts` times, and wait for the end."""
        for _ in range(bursts):
            self._raw.launch()
        self._raw.answers()

    def verified(self, bursts: int) -> int:
        """Gather, multiply and compare `bursts` times; return the number of results that differ from their golden."""
        return sum(len(turn.answers) - turn.answers.count(EQUAL) for turn in self._turns.turns(math.inf, bursts))


def _speed(bench: Bench, name: str, source: str, target: str, size: int) -> None:
    """Measure and record the speed of products of one size.

    The operands are dense: with zeros a GPU draws less power, so its clocks are higher than with served weights. FP8
    products are exact in so few bits that large ones have zeros in B all the same: their speeds can be too high.
    """
    product = product_of(bench.device, source, target, "dense", "nt", (size, size, size, 0))
    (raw_seconds, busy), (verified_seconds, verified_busy), wrong = _measured(bench, source, target, product)
    work = 2.0 * size**3
    values: dict[str, float | int | str] = {
        "raw_flops_per_second": work / raw_seconds,
        "verified_flops_per_second": work / verified_seconds,
        "verified_over_raw": round(raw_seconds / verified_seconds, 4),
    }
    values |= {n: round(v, 4) for n, v in (("raw_busy", busy), ("verified_busy", verified_busy)) if v is not None}
    text = f"{wrong} verified products were wrong" if wrong else ""
    bench.add(name, Claim.STRICT, Seen.WRONG if wrong else Seen.RIGHT, text, values=values)


Speeds = tuple[tuple[float, float | None], tuple[float, float | None], int]
"""(unverified speed, verified speed, number of wrong products). A speed is (seconds per product, share of the time in
which the device was busy or None)."""


def _measured(bench: Bench, source: str, target: str, product: Product) -> Speeds:
    if bench.runtime.repeats(bench.device) and not bench.runtime.cannot_repeat:
        try:
            return _repeated(bench, source, target, product)
        except Exception as error:
            if cannot_be_captured(error):
                bench.runtime.cannot_repeat = why_not(error)
            elif kind_of(error) is not ErrorKind.MEMORY:  # one by one takes less
                raise
    return _one_by_one(bench, source, target, product)


def _repeated(bench: Bench, source: str, target: str, product: Product) -> Speeds:
    """Return the speeds of bursts that the device repeats, as in exact_matmul."""
    session = Session(Context(device=bench.device, level="standard", seed=SEED, budget=bench.left))
    case = Case("throughput", partial(build, product), computing(bench.device, source, target), product=product)
    repetition = Repetition(session, case, make_pools(product.of_pools, SEED), SEED)
    wrong = repetition.verified(1)
    repetition.unverified(1)

    def seconds(work: Callable[[int], Any]) -> tuple[float, float]:
        started = time.perf_counter()
        work(1)
        bursts = max(1, round(SAMPLE / max(time.perf_counter() - started, 1e-6)))
        busy, started = session.device_seconds, time.perf_counter()
        work(bursts)
        took = time.perf_counter() - started
        return took / (bursts * repetition.count), min(1.0, (session.device_seconds - busy) / took)

    def verified(bursts: int) -> None:
        nonlocal wrong
        wrong += repetition.verified(bursts)

    raw, _ = seconds(repetition.unverified)
    return (raw, None), seconds(verified), wrong


def _one_by_one(bench: Bench, source: str, target: str, product: Product) -> Speeds:
    """Return the speeds of products that the host starts one after the other."""
    problem = build(product, SEED)
    operands = upload(problem.operands, bench.device)
    (golden,) = upload((problem.golden,), bench.device)
    expected = bits(golden)
    wrong = 0

    def raw() -> None:
        multiply(source, target, operands, None)

    def verified() -> None:
        nonlocal wrong
        wrong += bool((bits(multiply(source, target, operands, None)) != expected).any())

    return _timed(bench, raw), _timed(bench, verified), wrong


def _timed(bench: Bench, work: Callable[[], None]) -> tuple[float, float | None]:
    """Return (seconds of one call of `work`, share of the time that the processor worked; None on other devices)."""
    work()
    synchronize(bench.device)
    calls, started, processor = 0, time.perf_counter(), time.process_time()
    while calls < 2 or time.perf_counter() - started < SAMPLE:
        work()
        calls += 1
    synchronize(bench.device)
    took = time.perf_counter() - started
    if bench.device.unit != "cpu":
        return took / calls, None
    return took / calls, min(1.0, (time.process_time() - processor) / took / torch.get_num_threads())
