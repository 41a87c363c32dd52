"""Digests of rows: what a GPU compares in its repeated turns, in place of whole goldens (right results).

The digest of a row is the products of its bytes t_j, taken as signed, with eight vectors of weights: w_1 t_1 + ... +
w_n t_n. The rows of a turn's golden are rows of the pools' answers with the same columns. So the digests of the pools'
128 rows give what every row of a result must have: the device gathers no golden, and reads every result once.

Which faults a digest cannot see. The weights are odd, from -63 to 63. Sums of rows of up to `LONGEST` bytes stay below
2**31 and do not wrap. One wrong byte of a row is always found, because no weight is 0. Two or more are missed by one
vector with a probability of at most 1/64 (fix all weights but one: at most one of its 64 values makes the sum 0), and
so by all eight with at most 2**-48. Weights are drawn anew for every case, so that what one draw misses, another
finds. `benchmarks.digest` counts what is missed. If a digest differs, the host compares the whole result with its own
golden. The first turn of every case is compared in full by device and host.
"""

from __future__ import annotations

from typing import Any

from canaryd.worker.numeric.integers import below
from canaryd.worker.numeric.tensors import joined, torch

VECTORS = 8
"""Number of vectors of weights: on CUDA torch multiplies integers only by multiples of 8 columns."""
FEWEST, PIECE = 17, 8
"""Fewest rows, and divisor of their bytes, for which torch multiplies integers on CUDA (pytorch,
aten/src/ATen/native/cuda/Blas.cpp, _int_mm_out_cuda)."""
UNFIT: tuple[str, ...] = ("rocm",)
"""Backends that compare goldens. hipBLASLt's products of integers with a small side end on an MI300X in an error that
the next call inherits (bitsandbytes, pull request 1934), on gfx1200 in a crash (ROCm/rocm-libraries, issue 5205)."""
LONGEST = (1 << 31) // (63 * 128)
"""Largest number of bytes of a row whose sums do not wrap."""


class Digest:
    """Digests of rows of one length, with weights of their own, on one device of torch."""

    def __init__(self, columns: int, element: int, seed: int, device: Any) -> None:
        """Draw the weights on the host and upload them; `element`: number of bytes of an element of a row."""
        weights = 2 * below(seed, "weights", (VECTORS, columns * element), 64) - 63
        self._weights = weights.to(torch.int8).to(device).T
        self._memory: dict[int, Any] = {}

    def rows(self, matrices: Any) -> Any:
        """Return the digests of all rows of contiguous matrices (..., rows, columns), int32 (..., rows, `VECTORS`).

        The next call for as many rows overwrites them.
        """
        pieces = matrices.reshape(-1, matrices.shape[-1]).view(torch.int8)
        # In deterministic mode torch would fill new memory first.
        if (memory := self._memory.get(len(pieces))) is None:
            memory = self._memory[len(pieces)] = pieces.new_empty((len(pieces), VECTORS), dtype=torch.int32)
        torch._int_mm(pieces, self._weights, out=memory)  # noqa: SLF001
        return memory.view(*matrices.shape[:-1], VECTORS)

    def of(self, results: list[Any]) -> list[Any]:
        """Return the digests of each result; they are adjacent in memory, as the results must be."""
        (block,) = joined(results)
        made = self.rows(block)
        return list(made) if block.dim() > results[0].dim() else [made]


def fits(results: list[Any], pool: int) -> bool:
    """Return whether the rows of these results, and the `pool` rows of a pool, can be digested.

    Results that are not adjacent cannot: the digests of one would overwrite those of another.
    """
    result = results[0]
    row = result.shape[-1] * result.element_size()
    rows = min(pool, len(results) * result.numel() // max(1, result.shape[-1]))
    fit = row % PIECE == 0 and 0 < row <= LONGEST and rows >= FEWEST and result.is_contiguous()
    return bool(fit and len(joined(results)) == 1)
