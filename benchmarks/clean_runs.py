"""Count false alarms: run distinct exact goldens on a healthy machine; none of them may be found wrong.

A run makes one golden from its own seed, computes the result once and compares it twice (by torch and by the C
library). Its key is (case with sizes, seed, instruction set, threads). All keys must differ, and so must all goldens;
both are counted. Each combination of instruction set and threads has its own process, because libraries choose their
kernels at their start. At its end each process runs controls: results with one bit flipped on purpose, which must be
found wrong. Another runtime (`--runtime`) must be installed in this Python; it chooses its threads itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks import common
from canaryd.codec import to_json
from canaryd.model import RUNTIMES, TORCH, Device
from canaryd.probe import Context
from canaryd.worker.numeric import evidence, faults, indexing, quantized
from canaryd.worker.numeric import operands as numeric_operands
from canaryd.worker.numeric import stack as numeric_stack
from canaryd.worker.numeric.attention import CONTENTS, MASKS
from canaryd.worker.numeric.cases import Case, product_case, refusal
from canaryd.worker.numeric.integers import digest
from canaryd.worker.numeric.operands import Inexact
from canaryd.worker.numeric.products import FORMAT_PAIRS, int8_pairs
from canaryd.worker.numeric.seeds import derive
from canaryd.worker.numeric.served import ATTENDED
from canaryd.worker.numeric.sizes import LONG, shapes_of
from canaryd.worker.numeric.tensors import host_same_bits, torch
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.interface import Operation, Packing
from probes import exact_attention, exact_integer, exact_matmul

KEPT = 100
"""Largest number of runs that were not right whose details are written out."""
PROGRESS = 5.0
"""Seconds between two lines of progress."""
GROUPS = ("family", "format", "content", "kind", "layout or kernel", "mask", "instruction set", "threads")
WEIGHTS = {"product": 6, "attention": 3, "integer": 1}
"""Family of cases → its weight in the mix of runs."""
SETS_OF_SIZES = {"jax": 4}
"""Runtime that compiles every shape → number of sets of sizes per class. Elsewhere each run has its own sizes."""

Maker = Callable[[random.Random], Case]


# ---------------------------------------------------------------------------------------------------------------------
# One process: one instruction set, one number of threads.


def products(context: Context) -> Iterator[Maker]:
    """Yield a maker of cases for every format, content, kind of shape and layout that this machine can multiply."""
    for source, target in FORMAT_PAIRS:
        if exact_matmul.unsupported(context.device, source, target):
            continue
        kinds, layouts = shapes_of(context.device, source)
        for name, kind, layout in itertools.product(numeric_operands.CONTENTS, kinds, layouts):
            yield partial(_product, context.device, source, target, name, kind, layout)
    for left, name in int8_pairs(context.device):
        saturates = name == "wide" and numeric_stack.int8_pairs_saturate()
        tiny = _int8(context.device, left, name, "nt", random.Random(1))
        if not saturates and not refusal(context.device, tiny.build(1), tiny.compute):
            yield from (partial(_int8, context.device, left, name, layout) for layout in ("nn", "nt"))
    for pair, layout in itertools.product(quantized.pairs(context.device), quantized.LAYOUTS):
        yield partial(_quantized, context.device, pair, layout)


def _product(device: Device, source: str, target: str, name: str, kind: str, layout: str, rng: random.Random) -> Case:
    sizes = product_sizes(rng, kind, 16 if source.startswith("float8") else 1)
    return product_case(device, source, target, name, kind, layout, sizes)


def product_sizes(rng: random.Random, kind: str, step: int) -> tuple[int, int, int, int]:
    """Return random M, N, K and batch (0: none), small to medium; M, N and K are multiples of `step`."""

    def size(low: int, high: int) -> int:
        return rng.randint(-(-low // step), high // step) * step

    if kind == "square":
        side = size(32, 448)
        return side, side, side, 0
    if kind == "prefill":
        return size(32, 256), size(64, 768), size(32, 768), 0
    if kind == "decode":
        return size(1, 32), size(64, 1536), size(64, 2048), 0
    if kind == "long":
        side = size(32, 192)
        return side, side, LONG * side, 0
    return size(8, 96), size(8, 96), size(16, 192), rng.randint(2, 5)


def _int8(device: Device, left: str, name: str, layout: str, rng: random.Random) -> Case:
    M, N, K = (8 * rng.randint(4, 40) for _ in range(3))
    return Case(
        f"{left}>int32/{name}/square/{layout}@{M}x{N}x{K}",
        partial(numeric_operands.build_int8, name, M, N, K, layout, left=left),
        partial(interface.of(device).run, Operation("matmul", left, "int32")),
    )


def _quantized(device: Device, pair: tuple[Packing, str], layout: str, rng: random.Random) -> Case:
    sizes = rng.randint(1, 64), 128 * rng.randint(1, 4), 128 * rng.randint(1, 4)
    return quantized.case(device, *pair, "decode" if sizes[0] < quantized.PREFILL // 2 else "prefill", layout, sizes)


def attentions(context: Context) -> Iterator[Maker]:
    """Yield a maker of cases for every kernel, format, content, mask and kind of shape that this machine supports."""
    for kernel, form in itertools.product(interface.of(context.device).attention_kernels, ATTENDED):
        for mask, (kind, sizes) in itertools.product(MASKS, exact_attention.SIZES["quick"].items()):
            if not exact_attention.refuses(context.device, kernel, form, mask, sizes):
                for name in CONTENTS:
                    yield partial(_attention, context.device, kernel, form, name, mask, kind)


def _attention(device: Device, kernel: str, form: str, name: str, mask: str, kind: str, rng: random.Random) -> Case:
    return exact_attention.attention_case(device, kernel, form, name, mask, kind, attention_sizes(rng, kind))


def attention_sizes(rng: random.Random, kind: str) -> tuple[int, ...]:
    """Return random sizes: batch, heads, heads of keys, queries, keys and width of a head."""
    B, G, D = rng.randint(1, 2), rng.randint(1, 2), rng.choice((64, 96, 128))
    if kind == "decode":
        return B, G, G, rng.randint(1, 7), rng.randint(64, 1536), D
    rows = rng.randint(16, 256)
    return B, G * (2 if kind == "grouped" else 1), G, rows, rows + (rng.randint(0, 64) if kind == "grouped" else 0), D


def integers(context: Context) -> Iterator[Maker]:
    """Yield a maker of cases for every integer and index operation that this machine supports."""
    for name in indexing.OPERATIONS:
        tiny = exact_integer._case(context.device, name, 256)  # noqa: SLF001
        if not refusal(context.device, tiny.build(1), tiny.compute):
            yield partial(_integer, context.device, name)


def _integer(device: Device, name: str, rng: random.Random) -> Case:
    return exact_integer._case(device, name, 16 * rng.randint(16, 1024))  # noqa: SLF001


def run_one(case: Case, seed: int, device: Device, *, spoil: bool = False) -> dict[str, Any]:
    """Make, compute and compare one golden; return the outcome with details. `spoil` flips one bit of the result."""
    try:
        problem = case.build(seed)
    except Inexact as error:
        return {"outcome": "inexact", "detail": str(error)}
    runtime = interface.of(device)
    try:
        result = case.compute(runtime.upload(problem.operands, device), None)
    except (RuntimeError, NotImplementedError) as error:
        return {"outcome": "refused", "detail": str(error).splitlines()[0][:200]}
    if spoil:
        result = runtime.changed(result, faults.FAULTS["flip"].change, seed)
    done = {"outcome": "right", "digest": digest(problem.golden), "elements": problem.golden.numel()}
    if not problem.witnessed:
        return {**done, "outcome": "doubted", "detail": "two ways of making the golden disagree"}
    (by_device,) = runtime.agree([result], *runtime.upload((problem.golden,), device))
    observed = runtime.download(result)
    by_host = host_same_bits(observed, problem.golden)
    if by_device != by_host:
        return {**done, "outcome": "doubted", "detail": f"equal by the device: {by_device}, by the host: {by_host}"}
    if not by_device:
        found = to_json(evidence.collect(problem.golden, observed))
        return {**done, "outcome": "wrong", "shape": problem.shape, "detail": found["pattern"], "evidence": found}
    return done


def of_runtime(name: str) -> Device:
    """Return the processor of this host as a device of a runtime. Raises `Skip` if the runtime is not installed."""
    return next(device for device in interface.named(name).devices() if device.unit == "cpu")


def serve(arguments: argparse.Namespace) -> None:
    """Do the `--runs` runs of one process; print a line of JSON for the software, and for each run and control."""
    torch.set_num_threads(arguments.threads[0])
    device = of_runtime(arguments.runtime)
    where = (arguments.instruction_sets[0], arguments.threads[0])
    start = derive(arguments.seed, "/".join(map(str, where)))
    rng = random.Random(start)
    context = Context(device=device, level="standard", seed=start, budget=3600.0)
    with interface.of(device).strict(device):
        families = {
            "product": list(products(context)),
            "attention": list(attentions(context)),
            "integer": list(integers(context)),
        }
        stack = interface.of(device).stack(device, where[0])
        print(json.dumps({"stack": stack, "classes": {k: len(v) for k, v in families.items()}}), flush=True)
        # Every class of a family in turn, in an order of its own, so that few runs already touch many classes.
        decks = {name: itertools.cycle(rng.sample(makers, len(makers))) for name, makers in families.items()}
        hands = itertools.cycle([name for name, weight in WEIGHTS.items() if families[name] for _ in range(weight)])
        for number, family in zip(range(arguments.runs), hands):  # noqa: B905  hands never end
            sets = SETS_OF_SIZES.get(arguments.runtime)
            sizes = random.Random(rng.randrange(sets)) if sets else rng
            case, seed = next(decks[family])(sizes), derive(start, f"run {number}")
            done = run_one(case, seed, device)
            line = {"family": family, "case": case.name, "seed": seed, **done}
            print(json.dumps(line), flush=True)
        for family in filter(families.get, families):
            done = run_one(next(decks[family])(rng), derive(start, f"control {family}"), device, spoil=True)
            print(json.dumps({"control": done["outcome"] == "wrong"}), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The one that counts.


class Tally:
    """The counts over the runs of all processes."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.outcomes: Counter[str] = Counter()
        self.elements = 0
        self.keys: set[tuple[str, int, str, int]] = set()
        self.digests: set[str] = set()
        self.classes: set[str] = set()
        self.groups: dict[str, dict[str, Counter[str]]] = {name: {} for name in GROUPS}
        self.controls: Counter[bool] = Counter()
        self.findings: list[dict[str, Any]] = []
        self.stacks: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._started = self._told = time.monotonic()

    @property
    def clean(self) -> bool:
        """Whether every wanted run was right and distinct, and every control was found wrong."""
        right = self.outcomes["right"]
        found = self.controls[True] > 0 and not self.controls[False]
        return found and right == self.wanted == len(self.keys) == len(self.digests) == sum(self.outcomes.values())

    def add(self, line: dict[str, Any], instruction_set: str, threads: int) -> None:
        """Count one run or one control, from its printed line."""
        with self._lock:
            if "control" in line:
                self.controls[line["control"]] += 1
                return
            outcome = line["outcome"]
            self.outcomes[outcome] += 1
            if outcome == "right":
                self.keys.add((line["case"], line["seed"], instruction_set, threads))
                self.digests.add(line["digest"])
                self.elements += line["elements"]
            elif len(self.findings) < KEPT:
                self.findings.append({**line, "instruction_set": instruction_set, "threads": threads})
            stable = line["case"].partition("@")[0]
            self.classes.add(stable)
            names = [line["family"], *[*stable.split("/"), "-", "-"][:5], instruction_set, str(threads)]
            for group, name in zip(GROUPS, names, strict=True):
                self.groups[group].setdefault(name, Counter())[outcome] += 1
            if outcome != "right":
                print(f"{outcome}: {line['case']} seed {line['seed']}: {line['detail']}", flush=True)
            if time.monotonic() - self._told >= PROGRESS:
                self._told = time.monotonic()
                done, spent = sum(self.outcomes.values()), self._told - self._started
                rest = spent / done * (self.wanted - done)
                print(f"{done} of {self.wanted} runs, {self.outcomes['right']} right, {rest:.0f} s left", flush=True)

    def report(self) -> str:
        """Return the body of the report: counts, findings and tables."""
        right, runs = self.outcomes["right"], sum(self.outcomes.values())
        others = ", ".join(f"{count} {name}" for name, count in self.outcomes.items() if name != "right") or "none"
        text = (
            f"{right} of {runs} runs right, others: {others} (wanted {self.wanted}). Distinct keys: {len(self.keys)},\n"
            f"distinct goldens: {len(self.digests)}, classes: {len(self.classes)}, elements compared: "
            f"{self.elements:,}.\nControls, one bit flipped on purpose: {self.controls[True]} of "
            f"{self.controls.total()} found.\n"
        )
        if self.clean:
            text += f"No false alarm in {right} runs bounds their rate by {3 / right:.1e} (95 %).\n"
        for finding in self.findings:
            where = f"{finding['instruction_set']}, {finding['threads']} threads"
            text += f"\n- {finding['outcome']}: {finding['case']}, seed {finding['seed']}, {where}: {finding['detail']}"
        for group, names in self.groups.items():
            rows = [[name, sum(count.values()), count["right"]] for name, count in sorted(names.items())]
            text += "\n\n" + common.table([group, "runs", "right"], rows).rstrip()
        return text + "\n"


def follow(tally: Tally, runtime: str, instruction_set: str, threads: int, runs: int, seed: int) -> None:
    """Start one process and add its runs to `tally`. Raises `RuntimeError` if the process fails."""
    env = common.worker_environment(instruction_set)
    words = [
        "--serve",
        "--runtime",
        runtime,
        "--instruction-sets",
        instruction_set,
        "--threads",
        threads,
        "--runs",
        runs,
        "--seed",
        seed,
    ]
    argv = [sys.executable, "-m", "benchmarks.clean_runs", *map(str, words)]
    with subprocess.Popen(argv, cwd=common.ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tally.stacks[f"{instruction_set}, {threads} threads"] = json.loads(next(process.stdout, "null"))
        for line in process.stdout:
            tally.add(json.loads(line), instruction_set, threads)
    if process.returncode:
        raise RuntimeError(f"the process for {instruction_set}, {threads} threads ended with {process.returncode}")


def main() -> None:
    """Divide the runs among processes and write the report; exit with 1 unless all runs were right and distinct."""
    parser = common.options(__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other runs (default: %(default)s)")
    parser.add_argument("--runtime", choices=RUNTIMES, default=TORCH, help="default: %(default)s")
    parser.add_argument("--instruction-sets", nargs="+", default=[])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    facts = common.machine()
    tally, runtime = Tally(arguments.runs), arguments.runtime
    arguments.instruction_sets = arguments.instruction_sets or list(of_runtime(runtime).instruction_sets) or [""]
    if runtime != TORCH:
        arguments.threads = arguments.threads[:1]
    places = list(itertools.product(sorted(set(arguments.threads)), arguments.instruction_sets))
    share, rest = divmod(arguments.runs, len(places))
    started = time.monotonic()
    for threads in sorted(set(arguments.threads)):
        at_once = max(1, len(os.sched_getaffinity(0)) // threads)
        with ThreadPoolExecutor(at_once) as pool:
            jobs = [
                pool.submit(
                    follow, tally, runtime, isa, threads, share + (places.index((threads, isa)) < rest), arguments.seed
                )
                for isa in arguments.instruction_sets
            ]
        for job in jobs:
            job.result()
    common.write(
        arguments.out,
        "clean_runs" if runtime == TORCH else f"clean_runs-{runtime}",
        "False alarms of exact goldens over distinct clean runs"
        + ("" if runtime == TORCH else f", {runtime} on the CPU"),
        {**facts, "seconds": f"{time.monotonic() - started:.0f}", "seed": str(arguments.seed)},
        tally.report(),
        {
            "clean": tally.clean,
            "wanted": tally.wanted,
            "outcomes": tally.outcomes,
            "distinct_keys": len(tally.keys),
            "distinct_goldens": len(tally.digests),
            "classes": sorted(tally.classes),
            "elements": tally.elements,
            "groups": tally.groups,
            "controls_found": tally.controls[True],
            "controls_missed": tally.controls[False],
            "findings": tally.findings,
            "processes": tally.stacks,
        },
    )
    sys.exit(0 if tally.clean else 1)


if __name__ == "__main__":
    main()
