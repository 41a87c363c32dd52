"""Inject faults outside of products: into canaryd's own gather and comparator, and into memory.

The gather and the comparison run through `verify_case`, as in a check. A faulty gather changes nothing if the wrong
index selects an equal row (`cancel` has some in narrow formats), or if the stale row equals the new one. Memory is
swept as in memory_sweep. Two memory tests of DCGM run on the same faulty memory, without their repetitions:

- DCGM memory: 00, AA, 55, FF and 00 in every byte, written and read back.
  (NVIDIA/DCGM, nvvs/plugin_src/memory/memory.cpp)
- DCGM memtest, test 7 as by default: random words, read and inverted word by word, read again.
  (NVIDIA/DCGM, nvvs/plugin_src/memtest/memtest_wrapper.cpp and tests.cu)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.injections import SIZES, TILE, Draw, draws
from canaryd.facts import Comparison
from canaryd.probe import Context
from canaryd.worker.memory.slices import ROW, Expected, Slice, scratch_for
from canaryd.worker.memory.slices import TILE as WORDS
from canaryd.worker.memory.sweep import sweep_memory
from canaryd.worker.numeric.cases import Case
from canaryd.worker.numeric.integers import stream
from canaryd.worker.numeric.operands import CONTENTS, Product, build, make_pools
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.session import Session
from canaryd.worker.numeric.stack import cpu
from canaryd.worker.numeric.tensors import FORMATS, bits, torch
from canaryd.worker.numeric.verify import case_seed, verify_case
from canaryd.worker.runtime.interface import Operation
from tests.comparators import COMPARATORS
from tests.faulty_gathers import GATHERS, Faulty, WrongColumn, WrongIndex
from tests.faulty_memory import CELLS, faulty_device

FORMS = ("float64", "float32", "bfloat16", "float16")
TURNS = 3
"""Number of times that one injection gathers new operands; the fault is in one of them."""
ROWS = 17
"""Number of rows of the memory that is swept: more than `scratch_for` returns, so that the fault is not there."""


@dataclass
class Part:
    """The counts of the injections of one fault."""

    injected: int = 0
    changed: int = 0
    """Number of injections that changed something."""
    found: Counter[str] = field(default_factory=Counter)
    """"canaryd" or another tool → number of injections that it found."""
    told: Counter[str] = field(default_factory=Counter)
    """Words that canaryd used for the fault → number of times."""


def product(runtime: Faulty, draw: Draw, compute: Callable[..., Any] | None = None) -> Case:
    """Return a case of a random format, content, shape and layout, which `runtime` gathers and computes."""
    form, content = FORMS[draw(len(FORMS))], [*CONTENTS][draw(len(CONTENTS))]
    M, N, K, _ = [SIZES["square"], SIZES["decode"]][draw(2)]
    layout = "nt"[draw(2)] + "nt"[draw(2)]
    spec = Product(content, FORMATS[form], FORMATS[form], FORMATS[form].bits, M, N, K, 0, layout)
    run = compute or partial(runtime.run, Operation("matmul", form, form))
    name = f"{form}/{content}/square/{layout}@{M}x{N}x{K}"
    return Case(name, partial(build, spec), run, product=spec)


def verified(runtime: Faulty, case: Case, seed: int, turns: int = TURNS) -> list[Comparison]:
    """Return the comparisons of one case over `turns` gathers of operands, which stand for seconds of its budget."""
    clock = partial(getattr, runtime, "turns")
    session = Session(Context(device=cpu(), level="quick", seed=seed, budget=float(turns), clock=clock))
    session.runtime = runtime
    return [fact for fact in verify_case(session, case, float(turns)) if isinstance(fact, Comparison)]


def _gather(kind: str, draw: Draw, part: Part) -> None:
    runtime, seed = GATHERS[kind](draw(1 << 60), draw(TURNS - 1)), draw(1 << 60)
    case = product(runtime, draw)
    wrong = [c for c in verified(runtime, case, seed) if c.wrong]
    if wrong or (runtime.struck and not _alike(runtime, case, seed)):
        part.changed += 1
        part.found["canaryd"] += bool(wrong)
    part.told.update({c.evidence.pattern.partition(":")[0] for c in wrong if c.evidence})


def _alike(runtime: Faulty, case: Case, seed: int) -> bool:
    """Return whether the wrong and the right index select equal data, so that the faulty gather changes nothing."""
    assert case.product is not None
    pools = make_pools(case.product, case_seed(Context(device=cpu(), level="quick", seed=seed, budget=0.0), case))
    if isinstance(runtime, WrongColumn):
        one, other = (bits(pools.golden)[:, n] for n in runtime.moved)
    elif isinstance(runtime, WrongIndex):
        one, other = (bits(pools.operands[0])[n] for n in runtime.moved)
    else:
        return False
    return bool(torch.equal(one, other))


def _comparator(kind: str, draw: Draw, part: Part, after: int) -> None:
    """Inject a faulty comparator, and a wrong element into each product after the first `after`; count into `part`."""
    runtime, done = COMPARATORS[kind](0), 0
    case = product(runtime, draw)
    row, column = draw(3), draw(TILE)
    operation = Operation("matmul", case.name.partition("/")[0], case.name.partition("/")[0])

    def compute(operands: tuple[Any, ...], out: Any) -> Any:
        nonlocal done
        result = runtime.run(operation, operands, out)
        if done >= after:
            bits(result)[row, column] ^= 1
        done += 1
        return result

    case = Case(case.name, case.build, compute, product=case.product)
    wrong = [c for c in verified(runtime, case, draw(1 << 60)) if c.wrong]
    part.changed += done > after
    part.found["canaryd"] += bool(wrong)
    part.told.update({f"a wrong {c.subject.value}" for c in wrong})


def _dcgm_memory(memory: Slice, _draw: Draw) -> Iterator[Any]:
    for byte in (0x00, 0xAA, 0x55, 0xFF, 0x00):
        word = int.from_bytes(bytes([byte] * 8), "little", signed=True)
        expected = Expected(torch.full((WORDS,), word))
        for part in memory.parts():
            memory.write(part, expected)
        yield from (memory.difference(part, expected) for part in memory.parts())


def _dcgm_memtest(memory: Slice, draw: Draw) -> Iterator[Any]:
    plain = Expected(stream(draw(1 << 60), "words", (WORDS,)))
    for part in memory.parts():
        memory.write(part, plain)
    for part in memory.parts():
        yield memory.difference(part, plain)
        memory.write(part, plain.inverted())
    yield from (memory.difference(part, plain.inverted()) for part in memory.parts())


MEMORY_RIVALS = {"DCGM memory": _dcgm_memory, "DCGM memtest": _dcgm_memtest}


def _memory(name: str, draw: Draw, part: Part) -> None:
    fault = partial(faulty_device, name, draw(8 * WORDS), (8 + draw(8)) * WORDS + draw(WORDS), 1 << draw(61), ROWS)
    ctx = Context(device=cpu(), level="quick", seed=draw(1 << 60), budget=60.0)
    with patch("time.sleep", (device := fault()).rested), device:  # its cells leak when the test pauses
        seen = [f.evidence for f in sweep_memory(ctx, ROWS * ROW, 0.0) if isinstance(f, Comparison) and f.evidence]
    part.changed += 1
    part.found["canaryd"] += bool(seen)
    part.told.update({kind for evidence in seen if evidence.memory for kind in evidence.memory.cells})
    for rival, test in MEMORY_RIVALS.items():
        with fault():
            memory = Slice(ROWS, 0, torch.device("cpu"), scratch_for(torch.device("cpu"), 1))
            part.found[rival] += any(bool(difference.any()) for difference in test(memory, draw))


STRIKES: dict[str, Callable[[Draw, Part], None]] = {
    **{f"gather: {kind}": partial(_gather, kind) for kind in GATHERS},
    **{f"comparator {kind}, results wrong": partial(_comparator, kind, after=0) for kind in COMPARATORS},
    "comparator says equal, results wrong from the second on": partial(_comparator, "says equal", after=1),
    **{f"memory: {kind}": partial(_memory, kind) for kind in CELLS},
}
"""Fault → function that injects it once. Every injection that changes something must be found."""
CONTROLS: dict[str, Callable[[Draw, Part], None]] = {
    "comparator misses a tile, results wrong from the second on": partial(_comparator, "misses a tile", after=1)
}
"""Fault that is found only by chance → function that injects it. It is found if the bit that canaryd flips once per
case on purpose lies in the faulty tile."""


def run(injections: int, seed: int) -> dict[str, Part]:
    """Inject each fault equally often, at least twice; return fault → counts."""
    kinds = {**STRIKES, **CONTROLS}
    parts = {}
    for name, strike in kinds.items():
        part = parts[name] = Part(injected=max(2, injections // len(kinds)))
        draw = draws(derive(seed, name))
        for _ in range(part.injected):
            strike(draw, part)
    return parts
