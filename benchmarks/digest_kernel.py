"""The digest of each row of a 16-bit result in one kernel, which reads the result once and writes one number a row."""

from typing import Any

import triton
import triton.language as tl

from canaryd.worker.numeric.integers import below
from canaryd.worker.numeric.tensors import bits, torch

BLOCK = 1024


@triton.jit
def _rows(result, weights, sums, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        live = at < columns
        raw = tl.load(result + row.to(tl.int64) * columns + at, mask=live, other=0).to(tl.int64) & 0xFFFF
        total += raw * tl.load(weights + at, mask=live, other=0)
    tl.store(sums + row, tl.sum(total, 0))


class Fused:
    """Digests of rows as `benchmarks.digest.Wide` makes them, in sums of 64 bits, of elements of two bytes."""

    def __init__(self, columns: int, seed: int, device: Any) -> None:
        """Draw odd weights, on the host."""
        self._weights = (2 * below(seed, "weights", (columns,), 1 << 62) + 1).to(device)

    def rows(self, matrix: Any) -> Any:
        """Return the digest of each row of a contiguous matrix, int64 (rows, 1)."""
        rows, columns = matrix.shape
        sums = torch.empty(rows, dtype=torch.int64, device=matrix.device)
        _rows[(rows,)](bits(matrix), self._weights, sums, columns, BLOCK=BLOCK)
        return sums[:, None]

    def of(self, results: list[Any]) -> list[Any]:
        """Return the digests of each result."""
        return [self.rows(result) for result in results]
