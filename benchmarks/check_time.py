"""Measure how long a person waits for `canaryd check`, and how much it verifies: wall time from command to exit.

`--beside DIR` names a checkout of another version, whose checks alternate with those of this one. Operations are
counted from the stored runs of each version: the shape of every compared product, and the number of its results. The
raw rate, measured before the first check, is that of unverified float32 products of 2048 by torch.matmul.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from canaryd.worker.numeric.tensors import torch

TARGET = 15.0
"""Maximum seconds for a quick check on a machine without accelerators."""
SIZE = 2048
"""Rows and columns of the unverified products."""


@dataclass(frozen=True)
class Checked:
    """The figures of one check."""

    seconds: float
    state: str
    products: float
    """Seconds of all runs of `exact_matmul`, including the start of the worker."""
    operations: float
    """Operations in the verified floating-point products of `exact_matmul`, 2MNK for each product."""
    float32: float
    """The part of `operations` with operands and results in float32."""
    device: float | None
    """Fraction of `products` in which the device computed, or None if the version does not report it."""


def check(level: str, config: Path | None, tree: Path) -> Checked:
    """Run one check with the code of a checkout on an empty state directory; exit the program if nothing ran.

    The exit status alone is not enough, because a crash of the interpreter also ends with 1.
    """
    with tempfile.TemporaryDirectory(prefix="canaryd-") as state:
        words = ["--json", "--level", level, "--state-dir", state, *(["--config", str(config)] if config else [])]
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "canaryd", "check", *words],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
            runs = [run for device in answer["devices"] for run in device["runs"]]
        except (ValueError, LookupError, TypeError):
            runs = []
        if not runs:
            sys.exit(f"canaryd check ended with {done.returncode} and no run:\n{(done.stdout + done.stderr)[-2000:]}")
        products = [run for run in runs if run["probe"] == "exact_matmul"]
        took = sum(run["seconds"] for run in products)
        told = [run["device_seconds"] for run in products if run.get("device_seconds") is not None]
        share = sum(told) / took if told and took else None
        return Checked(seconds, answer["state"], took, *_verified(Path(state) / "canaryd.db"), share)


def _verified(database: Path) -> tuple[float, float]:
    """Return the operations of all compared floating-point products in the database, and of those in float32."""
    every = single = 0.0
    with sqlite3.connect(database) as record:
        bodies = [body for (body,) in record.execute("SELECT body FROM runs WHERE probe = 'exact_matmul'")]
    for body in bodies:
        run = json.loads(body if isinstance(body, str) else zlib.decompress(body))
        for compared in run["comparisons"]:
            sizes = {name: int(value) for name, value in re.findall(r"\b(batch|M|N|K)=(\d+)", compared["shape"])}
            form = compared["case"].partition("/")[0]
            if not {"M", "N", "K"} <= set(sizes) or "int" in form:
                continue
            count = 2.0 * sizes.get("batch", 1) * sizes["M"] * sizes["N"] * sizes["K"] * compared.get("trials", 1)
            every += count
            single += count if form == "float32" else 0.0
    return every, single


def raw_rate() -> float:
    """Return the operations per second of unverified float32 products."""
    a, b = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)
    times = [common.seconds(lambda: torch.matmul(a, b, out=out)) for _ in range(20)]
    return 2.0 * SIZE**3 / statistics.median(times)


def main() -> None:
    """Run the checks and write the report; exit with 1 if a check ran nothing."""
    parser = common.options(__doc__)
    parser.add_argument("--level", choices=("quick", "standard", "deep"), default="quick")
    parser.add_argument("--config", type=Path, help="configuration of the check (default: none)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--beside", type=Path, help="checkout of another version, checked in turn")
    arguments = parser.parse_args()
    facts = common.machine()
    trees = {"this one": common.ROOT} | ({arguments.beside.name: arguments.beside} if arguments.beside else {})
    raw = raw_rate()
    found: dict[str, list[Checked]] = {name: [] for name in trees}
    for _ in range(arguments.runs):
        for name, tree in trees.items():
            found[name].append(checked := check(arguments.level, arguments.config, tree.resolve()))
            print(f"{name}: {checked.seconds:.1f} s, {checked.state}", flush=True)
    longest = max(c.seconds for c in found["this one"])
    judged = "no target"
    if arguments.level == "quick":
        judged = f"{'reached' if longest <= TARGET else 'missed'} (every run ≤ {TARGET:g} s)"
    times = common.table(
        ["version", "level", "runs", "shortest", "median", "longest", "verdicts", "target"],
        [
            [
                *(name, arguments.level, len(checks)),
                *(f"{t([c.seconds for c in checks]):.1f} s" for t in (min, statistics.median, max)),
                ", ".join(sorted({c.state for c in checks})),
                judged if name == "this one" else "",
            ]
            for name, checks in found.items()
        ],
    )
    rows = [[name, *_rates(checks)] for name, checks in found.items() if all(c.products for c in checks)]
    body = f"{times}\n\nProducts verified by `exact_matmul` (medians). Raw float32 at {SIZE}: "
    body += f"{1e-9 * raw:.1f} Gflop/s.\n\n"
    heads = [
        "version",
        "seconds",
        "device's share",
        "Gflop",
        "of it float32",
        "Gflop/s",
        "float32 over the whole check",
    ]
    body += common.table(heads, rows)
    data = {
        "raw": raw,
        "judged": judged,
        "checks": {name: [vars(c) for c in checks] for name, checks in found.items()},
    }
    title = f"check_time-{arguments.level}{'-beside' if arguments.beside else ''}"
    common.write(arguments.out, title, "Time of a check", facts, body, data)


def _rates(checks: list[Checked]) -> list[str]:
    median = statistics.median
    shares = [c.device for c in checks if c.device is not None]
    return [
        f"{median([c.products for c in checks]):.1f} s",
        f"{100 * median(shares):.1f} %" if shares else "not told",
        f"{1e-9 * median([c.operations for c in checks]):.1f}",
        f"{1e-9 * median([c.float32 for c in checks]):.1f}",
        f"{1e-9 * median([c.operations / c.products for c in checks]):.1f}",
        f"{1e-9 * median([c.float32 / c.seconds for c in checks]):.2f} Gflop/s",
    ]


if __name__ == "__main__":
    main()
