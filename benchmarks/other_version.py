"""Measure the verified and unverified products of another checkout on a CPU, in turn with those of this one.

The other version's own benchmark prepares everything in a process of its own. Where it would measure, it waits for
orders instead. Only one of the two processes works at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common


@dataclass(frozen=True)
class Beside:
    """Both versions at one size, measured in the same rounds."""

    name: str
    """Folder of the other version."""
    commit: str
    ratio: common.Ratio
    """Throughput of this version's verified products over its unverified ones."""
    other: common.Ratio
    """The same of the other version."""
    verified: common.Ratio
    """Throughput of this version's verified products over the other's."""
    unverified: common.Ratio
    """The same of unverified products, which are the same work for both versions: 1 if the measurement is fair."""
    others: float
    """Fraction of the processor time that other processes than these two used meanwhile."""


def rotate(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Return what each of the `sides` returns in each round. Each round begins one side later than the one before."""
    times = []
    for turn in range(rounds):
        order = [(turn + step) % len(sides) for step in range(len(sides))]
        found = {at: sides[at]() for at in order}
        times.append([found[at] for at in sorted(found)])
    return times


def serve() -> None:
    """Run the benchmark of the checkout in the current directory, but time only what standard input asks for.

    A line "side bursts" is answered with seconds; side 0: unverified, 1: verified.
    """
    common.become_worker()  # the other version's environment, which may not be this one's
    from benchmarks import verified_gemm  # noqa: PLC0415  that of the checkout

    answers, names = sys.stdout, {"benchmarks", "canaryd", "canaryd_lab", "probes"}

    def interleave(first: Any, *more: Any) -> list[list[float]]:
        # Some versions take a sequence of sides, others two sides.
        sides = [first, more[0]] if callable(first) else first
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if name.partition(".")[0] in names and path and not Path(path).resolve().is_relative_to(Path.cwd()):
                raise SystemExit(f"{name} is {path}, which is not in the other checkout, {Path.cwd()}")
        print(0.0, file=answers, flush=True)
        for line in sys.stdin:
            side, bursts = map(int, line.split())
            took = common.seconds(lambda: [sides[side]() for _ in range(bursts)])  # noqa: B023  called at once
            print(took, file=answers, flush=True)
        return [[1.0] * len(sides)]

    vars(common)["interleave"] = interleave
    vars(verified_gemm)["SAMPLE"] = 0.0  # each call of a side is then one burst
    with contextlib.redirect_stdout(io.StringIO()):  # its report has no measured times
        verified_gemm.main()


def measure(
    tree: Path, options: Sequence[object], mine: Sequence[Callable[[int], object]], bursts: int, burst: int, rounds: int
) -> Beside:
    """Measure in turn with the checkout `tree`, whose benchmark gets `options`; exit the program if that fails.

    `mine`: functions that compute so many bursts of `burst` products, unverified and verified.
    """
    tree = tree.resolve()
    path = os.pathsep.join([str(tree), str(tree / "lab"), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = f"import runpy; runpy.run_path({__file__!r})['serve']()"
    with tempfile.TemporaryDirectory() as out:
        argv = [sys.executable, "-c", code, "--pairs", "1", "--out", out, *map(str, options)]
        with subprocess.Popen(
            argv,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None

            def said(answers: Any = child.stdout) -> float:
                if not (line := answers.readline()):
                    raise SystemExit(f"the benchmark in {tree} ended; its complaint stands above")
                return float(line)

            def theirs(side: int, orders: Any = child.stdin) -> float:
                orders.write(f"{side} {bursts}\n")
                orders.flush()
                return said()

            said()  # it is prepared
            sides = [partial(common.seconds, partial(side, bursts)) for side in mine]
            with common.Bystanders(also=[psutil.Process(child.pid)]) as bystanders:
                times = rotate([*sides, *(partial(theirs, side) for side in range(2))], rounds)
            child.stdin.close()
            if child.wait():
                raise SystemExit(f"the benchmark in {tree} ended with {child.returncode}")
        (report,) = (json.loads(each.read_text()) for each in Path(out).glob("*.json"))
    (row,) = report["rows"]
    counts = [burst, burst, row["repeats"], row["repeats"]]
    each = [[took / count for took, count in zip(turn, counts, strict=True)] for turn in times]

    def ratio(first: int, second: int) -> common.Ratio:
        return common.ratio([(turn[first], turn[second]) for turn in each])

    return Beside(
        tree.name, report["machine"]["commit"], ratio(0, 1), ratio(2, 3), ratio(3, 1), ratio(2, 0), bystanders.share
    )


def report(rows: Sequence[tuple[int, int, Beside]]) -> str:
    """Return the part of the report about both versions; `rows`: (size, K, what was measured)."""
    if not rows:
        return ""
    sides = ["verified / unverified, this", "the same, other", "this / other, verified", "this / other, unverified"]
    name, commit = rows[0][2].name, rows[0][2].commit
    about = (
        f"\nIn turn with another version ({name}, commit {commit}): throughputs, with 95 % intervals.\n"
        "Unverified products are the same work for both, so the last ratio is 1 if the measurement is fair.\n\n"
    )
    return about + common.table(
        ["size", "K", "rounds", *sides, "others"],
        [
            [size, k, b.ratio.pairs, b.ratio, b.other, b.verified, b.unverified, f"{100 * b.others:.0f} %"]
            for size, k, b in rows
        ],
    )
