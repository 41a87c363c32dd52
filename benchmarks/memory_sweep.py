"""What a sweep of memory costs: seconds for a byte written and read back, against a plain copy of the same memory.

    python -m benchmarks.memory_sweep [--mebibytes 256] [--pairs 20] [--device cuda]

Each pair sweeps an allocation with one pattern, as the probe does, and then copies it; the ratio is the median of the
pairs. A CPU works in one thread. It prints, and stores nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics

from canaryd_lab.worker.characterise.speed import patterns, swept_and_copied

from canaryd.worker.numeric import stack
from canaryd.worker.numeric.tensors import torch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the allocation")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of a pass and a copy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    found = [d for d in stack.discover()[0] if d.backend == given.device]
    if not found:
        parser.error(f"--device {given.device}: this torch finds none")
    torch.set_num_threads(1)
    for name, expected in patterns(found[0]).items():
        pairs, wrong = swept_and_copied(found[0], expected, given.mebibytes << 20, given.pairs, math.inf)
        if wrong:
            raise SystemExit("words were wrong: this memory is faulty, and no figure is given")
        ratios = [swept / copied for swept, copied in pairs]
        print(
            f"{name}: {statistics.median(ratios):.2f} x a copy ({min(ratios):.2f} to {max(ratios):.2f}, "
            f"{len(pairs)} pairs of {given.mebibytes} MiB, {found[0].model})"
        )


if __name__ == "__main__":
    main()
