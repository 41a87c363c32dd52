"""What a sweep of memory costs: seconds for a byte written and read back, against a plain copy of the same memory.

    python -m benchmarks.memory_sweep [--mebibytes 256] [--pairs 20]

One thread, its own processor time, so that other work on the machine counts little. Each pair copies an allocation and
then writes and checks it with one pattern; the ratio is the median of the pairs. It prints, and stores nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

from canaryd.worker.memory.slices import ROW, TILE, Expected, Slice, own_numbers, scratch_for
from canaryd.worker.numeric.integers import stream
from canaryd.worker.numeric.tensors import torch, visible_cores


def _seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def _write_and_check(memory: Slice, expected: Expected) -> None:
    for part in memory.parts():
        memory.write(part, expected)
    wrong = sum(bool(memory.difference(part, expected).view(torch.uint8).any()) for part in memory.parts())
    if wrong:
        raise SystemExit(f"{wrong} groups of rows were wrong: this memory is faulty, and no figure is given")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the allocation")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a copy and a pass")
    given = parser.parse_args()
    torch.set_num_threads(1)
    host = torch.device("cpu")
    rows = (given.mebibytes << 20) // ROW
    memory = Slice(rows, 0, host, scratch_for(host, rows))
    other = torch.zeros_like(memory.words)
    for name, expected in (("own numbers", own_numbers(host)), ("a tile", Expected(stream(1, "tile", (TILE,))))):
        _write_and_check(memory, expected)
        ratios = []
        for _ in range(given.pairs):
            copy = _seconds(lambda: other.copy_(memory.words))
            swept = _seconds(partial(_write_and_check, memory, expected))
            ratios.append(swept / copy)
        low, high = min(ratios), max(ratios)
        print(f"{name}: {statistics.median(ratios):.2f} x a copy ({low:.2f} to {high:.2f}, {given.pairs} pairs)")
    print(
        f"{rows * ROW >> 20} MiB, one thread of a machine with {len(visible_cores())} cores, beside other load or not"
    )


if __name__ == "__main__":
    main()
