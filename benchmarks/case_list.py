"""Simulate which kernels the cases of `exact_matmul` reach on GPUs, and how much of the time products take there.

No GPU is needed: the list is the probe's own, for the capability and the number of units (SMs or compute units) of each
chip. It is drawn for many seeds, because the levels take kinds of shape and layouts in turn. `--beside DIR` adds the
list of another checkout. Assumptions:

- A kernel computes tiles of 128 x 128, one per unit at a time (fewer rows where M is smaller, half the columns without
  tensor cores), and splits no sum. Tiles run at 75 % of the published dense rate, as they did on an H200.
- A product also takes at least its bytes at the published bandwidth, and 1.4 µs between kernels of a graph.
- A turn is one gather and a burst of products in a graph. Beside the products it takes `TURN` seconds, and the bytes of
  gather, comparison and spoiling at `REACHED` of the published bandwidth. These two numbers are fitted to the bfloat16
  turns in results/verified_gemm-cuda-bfloat16.md; those of float32 were not used. Digests of rows, which no GPU has
  made yet, read each result once at the same bandwidth.
- All cases of a run take equal time. "Products at most" is a bound: it counts nothing that the host does for a case
  (making pools, first turn, capture), as if all of it were done beside the turns of the case before.
- "With the host of then" subtracts `CASE` seconds for every case. That is what the H200's run of exact_matmul took for
  each, without making pools; it launched every product from the host, and its code was older.
- The pools take `MAKING` seconds for each element of K, half of it where they have 64 rows, as on the H200's host.

First come the H200's own records beside the model: turns, and the share that products at the chip's own rate had of the
run of exact_matmul in the characterisation.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from canaryd.model import Device
from canaryd.probe import LEVELS, Context
from canaryd.worker.numeric.operands import POOL, POOLS
from canaryd.worker.numeric.products import format_pairs, label_of
from canaryd.worker.numeric.sizes import stem
from canaryd.worker.numeric.tensors import FORMATS
from canaryd.worker.runtime import interface
from canaryd.worker.runtime.torch import BURST
from probes import exact_matmul

try:
    from canaryd.worker.numeric.digests import PIECE, UNFIT
except ImportError:  # a checkout that compares goldens
    PIECE, UNFIT = 0, ()
SEEDS = range(60)
TILE, LAUNCH, EFFICIENCY = 128, 1.4e-6, 0.75
TURN, REACHED = 1.0e-4, 0.46
CASE, MAKING = 0.027, 2.1e-5
FIXED_CASES = 60
"""Number of fixed cases of a run, about: they take the host's time too."""
RUN = "characterise-NVIDIA-H200-torch2.11.0+cu130-cuda13.0-driver580.159.04.json"

Lists = dict[str, dict[str, list[list[str]]]]
"""Chip → level → for each seed the names of a run's cases."""


@dataclass(frozen=True)
class Chip:
    """One GPU by its data sheet: FLOP/s are those of dense products."""

    name: str
    backend: str
    capability: str
    units: int
    bandwidth: float
    rates: Mapping[str, float]
    """Format of the operands → operations per second."""

    @property
    def device(self) -> Device:
        """The chip as canaryd finds it."""
        detail = {"capability": self.capability, "multiprocessors": str(self.units)}
        return Device(
            uuid=f"GPU-{self.name}", backend=self.backend, index=0, torch_index=0, model=self.name, detail=detail
        )


def _rates(float64: float, float32: float, tfloat32: float, half: float, float8: float) -> dict[str, float]:
    narrow = dict.fromkeys((name for name in FORMATS if name.startswith("float8")), float8)
    wide = {"float64": float64, "float32": float32, "tfloat32": tfloat32, "bfloat16": half, "float16": half}
    return {name: 1e12 * rate for name, rate in (wide | narrow).items()}


HOPPER = _rates(67, 67, 494.5, 989.5, 1979)
H200 = Chip("H200", "cuda", "9.0", 132, 4.8e12, HOPPER)
CHIPS = (  # data sheets of NVIDIA H100 SXM, H200 SXM and HGX B200, and of AMD MI300X
    Chip("H100", "cuda", "9.0", 132, 3.35e12, HOPPER),
    H200,
    Chip("B200", "cuda", "10.0", 148, 8.0e12, _rates(37, 75, 1125, 2250, 4500)),
    Chip("MI300X", "rocm", "9.4", 304, 5.3e12, _rates(163.4, 163.4, 653.7, 1307.4, 2614.9)),
)


@dataclass(frozen=True)
class Shape:
    """A product by its case's name."""

    source: str
    target: str
    kind: str
    layout: str
    batch: int
    M: int
    N: int
    K: int

    @property
    def tiles(self) -> int:
        """Number of tiles of the result."""
        return self.batch * math.ceil(self.M / TILE) * math.ceil(self.N / TILE)

    @property
    def aligned(self) -> bool:
        """Whether the strides of A, B and the result are multiples of 64 elements."""
        strides = (self.K if self.layout[0] == "n" else self.M, self.N if self.layout[1] == "n" else self.K, self.N)
        return not any(stride % 64 for stride in strides)

    @property
    def operands(self) -> int:
        """Bytes of A and B."""
        return self.batch * self.K * (self.M + self.N) * int(FORMATS[self.source].dtype.itemsize)

    @property
    def result(self) -> int:
        """Bytes of the result."""
        return self.batch * self.M * self.N * int(FORMATS[self.target].dtype.itemsize)

    @property
    def operations(self) -> float:
        """Multiplications and additions of the product."""
        return 2.0 * self.batch * self.M * self.N * self.K

    def seconds(self, chip: Chip) -> float:
        """Return the time of one product."""
        parts = 2 if self.source in ("float64", "float32") else 1
        waves = math.ceil(parts * self.tiles / chip.units) / parts
        work = 2.0 * waves * min(self.M, TILE) * TILE * self.K / (EFFICIENCY * chip.rates[self.source] / chip.units)
        return LAUNCH + max(work, (self.operands + self.result) / chip.bandwidth)

    def turn(self, chip: Chip, burst: int, *, digests: bool) -> tuple[float, float]:
        """Return (seconds of a turn's products, seconds of the whole turn); `burst`: largest number of products.

        With `digests`, digests of the rows are compared where they fit; otherwise, the results with a golden.
        """
        count = max(1, min(burst, interface.BURST_BYTES // self.result))
        products = count * self.seconds(chip)
        if digests and self.N * FORMATS[self.target].dtype.itemsize % PIECE == 0:
            moved = self.operands + self.result * (1.0 + count)  # one result is spoilt
        else:  # read: result, golden, and a truth value per word of 8 bytes, which is written before
            moved = self.operands + 2 * self.result + count * self.result * (2 + 2 / 8)
        return products, products + TURN + moved / (REACHED * chip.bandwidth)


def shape_of(name: str) -> Shape | None:
    """Return the shape of a case's floating-point product, or None for any other case."""
    label, _, kind, last = [*name.split("/"), "", ""][:4]
    source, _, target = label.partition(">")
    found = re.fullmatch(r"(\w\w)@(?:(\d+)x)?(\d+)x(\d+)x(\d+)", last)
    if not found or source not in FORMATS:
        return None
    batch, *sizes = (int(size or 1) for size in found.groups()[1:])
    return Shape(source, target or source, kind, found[1], batch, *sizes)


def every() -> Lists:
    """Return the names of this checkout's fresh cases."""
    return {chip.name: {level: names(chip, level) for level in LEVELS} for chip in CHIPS}


def names(chip: Chip, level: str) -> list[list[str]]:
    """Return the names of the fresh cases of a run on a chip, for each seed."""
    cube = {source: Shape(source, source, "", "nn", 1, 1024, 1024, 1024) for source in chip.rates}
    speeds = {
        label_of(source, target): cube[source].operations / cube[source].seconds(chip)
        for source, target in format_pairs(chip.device)
        if chip.backend == "cuda" or source != "tfloat32"
    }
    runs = (Context(device=chip.device, level=level, seed=seed, budget=1.0) for seed in SEEDS)
    return [[case.name for case in exact_matmul.every_case(ctx, speeds)[0]] for ctx in runs]


def beside(tree: Path) -> tuple[Lists, int, bool]:
    """Return the names of another checkout's cases, the products of its bursts, and whether it compares digests."""
    code = (
        f"import json, runpy, sys; sys.path.append({str(common.ROOT)!r}); found = runpy.run_path({__file__!r}); "
        "print(json.dumps([found['every'](), found['BURST'], found['PIECE'] > 0]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True)
    lists, burst, digests = json.loads(done.stdout)
    return lists, burst, digests


def figures(chip: Chip, level: str, runs: list[list[str]], burst: int, *, digests: bool) -> dict[str, float]:
    """Return the figures of a list on a chip; shares are those of 16-bit cases, or of the time."""
    shapes = [[(name, shape) for name in run if (shape := shape_of(name))] for run in runs]
    half = [s for run in shapes for _, s in run if s.source in ("bfloat16", "float16")]
    turns = [s.turn(chip, burst, digests=digests and chip.backend not in UNFIT) for run in shapes for _, s in run]
    cases = statistics.mean(map(len, shapes))
    bound = statistics.mean(products / whole for products, whole in turns)
    budget = exact_matmul.SPEC.budget[level]
    return {
        "cases": cases,
        "aligned": statistics.mean(s.aligned for s in half),
        "two_waves": statistics.mean(s.tiles >= 2 * chip.units for s in half),
        "turn": statistics.mean(whole for _, whole in turns),
        "bound": bound,
        "with_host": bound * max(0.0, 1.0 - CASE * (cases + FIXED_CASES) / budget),
        "pools": statistics.mean(map(_making, shapes)),
    }


def _making(shapes: list[tuple[str, Shape]]) -> float:
    """Return the host's seconds for the pools of a run's cases; 16-bit batches have pools of their own."""
    half = ("bfloat16", "float16")
    pools = {
        (stem(name), s.K, POOLS.get(s.kind, POOL), s.batch > 1 and s.source == s.target and s.source in half)
        for name, s in shapes
    }
    return sum(MAKING * K * rows / POOL for _, K, rows, _ in pools)


def recorded() -> list[list[str]]:
    """Return rows of (what the H200's files record, the recorded figure, the model's, their ratio)."""
    found = []
    for form in ("bfloat16", "float32"):
        text = (common.RESULTS / f"verified_gemm-cuda-{form}.md").read_text()
        for size, ratio, speed in re.findall(r"^\| (\d+) \|.*?\| ([\d.]+) \(.* \| ([\d.]+) \|$", text, re.MULTILINE):
            shape = Shape(form, form, "square", "nn", 1, *[int(size)] * 3)
            burst = min(8, interface.BURST_BYTES // shape.result)
            seen = burst * shape.operations / (1e9 * float(speed)) / float(ratio)
            model = shape.turn(H200, 8, digests=False)[1]
            found.append((f"turn of {burst} {form} products of {size}, µs", 1e6 * seen, 1e6 * model))
    parts = json.loads((common.RESULTS / RUN).read_text())["parts"]
    part = next(part for part in parts if part["name"] == "cases/exact_matmul")
    readings = part["facts"]["readings"]
    ran = {o["name"]: o["values"]["trials"] for o in part["observations"] if o["values"].get("trials")}
    shapes = {name: known for name in ran if (known := shape_of(name))}
    at_rate = sum(ran[name] * s.operations / (EFFICIENCY * H200.rates[s.source]) for name, s in shapes.items())
    modelled = CASE * len(ran) + _making(list(shapes.items()))
    taken = readings["device_seconds"] + readings["host_seconds"]
    rows = [*found, ("exact_matmul of the characterisation, s", taken, modelled)]
    rows += [("products' share of it at the chip's rate, %", 100 * at_rate / taken, 100 * at_rate / modelled)]
    return [[what, f"{seen:.3g}", f"{model:.3g}", f"{model / seen:.2f}"] for what, seen, model in rows]


HEADER = ["list", "chip", "level", "cases of a run", "16-bit: aligned to 64", "16-bit: 2 waves and more",
          "a turn, ms", "products at most", "with the host of then", "pools made, s", "budget, s"]  # fmt: skip


def row(name: str, chip: Chip, level: str, found: dict[str, float]) -> list[object]:
    """Return one row of the table of lists."""
    aligned, waves, bound, with_host = (
        f"{100 * found[key]:.1f} %" for key in ("aligned", "two_waves", "bound", "with_host")
    )
    return [name, chip.name, level, round(found["cases"]), aligned, waves, f"{1e3 * found['turn']:.1f}", bound,
            with_host, f"{found['pools']:.1f}", f"{exact_matmul.SPEC.budget[level]:.0f}"]  # fmt: skip


def main() -> None:
    """Compare the model with the records, simulate the lists, and write the report."""
    parser = common.options(__doc__)
    parser.add_argument("--beside", type=Path, help="checkout of another version, whose list comes first")
    arguments = parser.parse_args()
    lists = {"this": (every(), BURST, True)}
    if arguments.beside:
        lists = {arguments.beside.name: beside(arguments.beside.absolute()), **lists}
    found = [
        (name, chip, level, figures(chip, level, every_list[chip.name][level], burst, digests=digests))
        for name, (every_list, burst, digests) in lists.items()
        for level in LEVELS
        for chip in CHIPS
    ]
    records = common.table(["record of the H200", "recorded", "model", "model / recorded"], recorded())
    body = f"{records}\n{common.table(HEADER, [row(*each) for each in found])}"
    facts = common.machine()
    common.write(
        arguments.out,
        "case_list",
        "Simulated: the kernels that the cases of exact_matmul reach, and the products' share of the time",
        {key: facts[key] for key in ("date", "canaryd", "commit", "torch")},
        f"{body}\nA simulation, not a measurement: benchmarks/case_list.py states its assumptions.\n",
        {"lists": [{"list": name, "chip": chip.name, "level": level, **each} for name, chip, level, each in found]},
    )


if __name__ == "__main__":
    main()
