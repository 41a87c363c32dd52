"""Functions that all benchmarks share: the machine's description, paired timing with intervals, result files."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

import canaryd
from canaryd.supervisor.environment import INSTRUCTION_SETS, SCRUBBED, STRICT
from canaryd.worker.numeric import stack
from canaryd.worker.numeric.tensors import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DISTURBED = 0.05
"""Share of processor time used by other processes at which a measured time is no longer trusted."""
T = TypeVar("T")
RESAMPLES = 4000
"""Number of bootstrap resamples. About a hundred of them lie beyond each end of a 95 % interval."""
UNIT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""Environment variables that systemd/canaryd.service sets for the daemon."""


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    return parser


def worker_environment(instruction_set: str) -> dict[str, str]:
    """Return the environment variables with which canaryd starts a worker for this instruction set."""
    kept = {name: value for name, value in os.environ.items() if name not in SCRUBBED}
    return {**kept, **STRICT, **INSTRUCTION_SETS[instruction_set]}


def become_worker() -> None:
    """Restart this program with a worker's environment if it has another one: libraries read it only at their start."""
    wanted = worker_environment("native")
    if dict(os.environ) != wanted:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)  # noqa: S606  this very program


def machine() -> dict[str, str]:
    """Return facts for the report: date, commit, processor, load and software versions."""
    host = stack.cpu()
    facts = {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "canaryd": canaryd.__version__,
        "commit": _commit(),
        "cpu": host.model,
        "cores": host.detail["cores"],
        "load at start": f"{os.getloadavg()[0]:.2f}",
        **stack.stack(host, ""),
    }
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "none"
    # The results of earlier benchmarks are no change of what is measured.
    return commit + (" with changes" if git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of pairs, and its 95 % interval."""

    median: float
    low: float
    high: float
    pairs: int

    def against(self, target: float) -> str:
        """Return "reached" if the whole interval is at or above `target`, "missed" if below, else "not resolved"."""
        if self.low >= target:
            return "reached"
        return "missed" if self.high < target else "not resolved"

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} to {self.high:.4f})"


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call of `work`."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleave(sides: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return the seconds of each of the `sides` for each round. They alternate, so a slow phase affects all of them."""
    return [[seconds(side) for side in sides] for _ in range(rounds)]


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the median of first / second over the pairs, with a percentile bootstrap interval (seeded)."""
    ratios = [first / second for first, second in pairs]
    return Ratio(statistics.median(ratios), *interval(ratios), len(ratios))


def interval(
    values: Sequence[Any], estimate: Callable[[Sequence[Any]], float] = statistics.median
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval (seeded) of `estimate`, a function of values."""
    rng = random.Random(0)
    found = sorted(estimate(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = RESAMPLES * 25 // 1000
    return found[tail], found[-1 - tail]


@dataclass
class Bystanders:
    """A context that measures the share of processor time that other processes used, on the cores open to this one.

    This process, and its children that have ended and were waited for, do not count as others.
    """

    share: float = 0.0
    also: Sequence[psutil.Process] = ()
    """More processes that do not count as others; neither do their children that have ended."""
    cores: Sequence[int] | None = None
    """The cores that are measured; None for those that this process may use."""

    def __enter__(self) -> Bystanders:  # noqa: PYI034  typing.Self came with Python 3.11
        self._before = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        total, busy, own = (after - before for after, before in zip(self._read(), self._before, strict=True))
        self.share = max(0.0, busy - own) / total if total else 0.0

    def _read(self) -> tuple[float, float, float]:
        every = psutil.cpu_times(percpu=True)
        usable = getattr(os, "sched_getaffinity", lambda _: range(len(every)))(0)
        machine = [every[core] for core in self.cores or usable]
        # Its last field is time that waited for the disk: Linux alone has it, and nobody used it.
        own = sum(sum(process.cpu_times()[:4]) for process in (psutil.Process(), *self.also))
        total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in machine)
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in machine)
        return total, total - idle, own


def undisturbed(measure: Callable[[], T], count: int, also: Sequence[psutil.Process] = ()) -> tuple[list[T], str]:
    """Repeat a measurement until `count` of the results were undisturbed: others used less than `DISTURBED`.

    Returns (the undisturbed results, ""). After `2 * count` attempts without enough of them it returns (all results, a
    warning for the report). A result is dropped for what others did, never for its value.
    """
    everything: list[tuple[T, float]] = []
    while sum(share < DISTURBED for _, share in everything) < count and len(everything) < 2 * count:
        with Bystanders(also=also) as others:
            value = measure()
        everything.append((value, others.share))
    calm = [value for value, share in everything if share < DISTURBED]
    if len(calm) == count:
        return calm, ""
    typical = statistics.median(share for _, share in everything)
    return [value for value, _ in everything], (
        f"disturbed: others used {100 * typical:.0f} % of the processor time; only {len(calm)} of {len(everything)} "
        "were quiet"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write(out: Path, name: str, title: str, facts: Mapping[str, str], body: str, data: Mapping[str, Any]) -> None:
    """Print the report, and write it as NAME.md and the data as NAME.json into the directory `out`."""
    named = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    report = f"# {title}\n\n{body}\nMeasured on:\n\n{named}\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(report)
    (out / f"{name}.json").write_text(json.dumps({"machine": dict(facts), **data}, indent=1) + "\n")
    print(report)
