"""Controls: injected faults must be seen as wrong. If they are not, results that were seen as right prove nothing."""

from __future__ import annotations

from dataclasses import replace

from canaryd.worker.numeric import faults
from canaryd.worker.numeric.errors import ErrorKind, kind_of
from canaryd.worker.numeric.operands import Problem, build
from canaryd.worker.numeric.products import label_of
from canaryd.worker.numeric.tensors import bits
from canaryd.worker.runtime.interface import Operation
from canaryd_lab.observation import Claim, Seen
from canaryd_lab.worker.characterise.bench import SEED, Bench
from canaryd_lab.worker.characterise.exactness import product_of

PAIRS = (
    ("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32"),
    ("float16", "float16"),
)  # fmt: skip


def controls(bench: Bench) -> None:
    """Run two kinds of control: right results with a wrong golden, and results with an injected fault."""
    with bench.runtime.strict(bench.device):
        for source, target in PAIRS:
            problem = build(product_of(bench.device, source, target, "dense", "nt", (64, 64, 128, 0)), SEED)
            name = label_of(source, target)
            _one(bench, f"{name}/wrong golden", source, target, _with_wrong_golden(problem), None)
            if bench.seen[-1].seen is Seen.REFUSED:
                continue
            for fault in faults.FAULTS.values():
                _one(bench, f"{name}/fault {fault.name}", source, target, problem, fault)
    unforeseen = kind_of(RuntimeError("the frobnicator is out of tune"))
    seen = Seen.WRONG if unforeseen is ErrorKind.OTHER else Seen.RIGHT
    bench.add("an error that nobody foresaw", Claim.CONTROL, seen, f"taken for: {unforeseen.value}")


def _with_wrong_golden(problem: Problem) -> Problem:
    golden = problem.golden.clone()
    bits(golden).view(-1)[golden.numel() // 3] ^= 1
    return replace(problem, golden=golden)


def _one(bench: Bench, name: str, source: str, target: str, problem: Problem, fault: faults.Fault | None) -> None:
    """Compute a problem with a fault (None: with a wrong golden); record whether the comparison saw it."""
    runtime = bench.runtime
    try:
        operands = runtime.upload(problem.operands, bench.device)
        (golden,) = runtime.upload((problem.golden,), bench.device)
        injector = faults.Injector(fault, SEED, runtime, target=name)
        operands = injector.before(name, operands, 0)
        result = injector.after(name, runtime.run(Operation("matmul", source, target), operands, None))
        bench.add(name, Claim.CONTROL, Seen.RIGHT if bench.same(result, golden) else Seen.WRONG)
    except Exception as caught:  # noqa: BLE001  whatever a device raises is a result
        bench.note_error(name, Claim.CONTROL, caught)
