"""Fresh operands at the speed of the device: rows and columns of uploaded pools, gathered there turn by turn.

The host makes the pools once and computes their answers twice; after that, a turn costs it only some index numbers.
Errors of the gather are found as well. Operands and golden are gathered by two uploads of the same indices, so an index
that changed in one upload gives a wrong result. `differs` looks now and then for errors that would change both alike.
"""

from __future__ import annotations

from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.operands import Problem, Product, draw
from canaryd.worker.numeric.tensors import host_same_bits
from canaryd.worker.runtime.interface import Operation, Runtime

PRODUCTS = 8
"""Results computed from one gather: fresh ones every eighth product leave the device nearly all of its time (our
choice; benchmarks.verified_gemm has the share)."""

Arrays = tuple[Any, ...]


class Gatherer:
    """The pools of one product on a device."""

    def __init__(self, runtime: Runtime, device: Device, product: Product, pools: Problem, seed: int) -> None:
        """Upload the pools, each as its layout wants it: rows to take whole, or columns."""
        self._runtime, self._device, self._product, self._seed = runtime, device, product, seed
        a, b = pools.operands
        row_major, column_major = product.layout[0] == "n", product.layout[1] == "t"
        pool_a = a if row_major else a.T.contiguous()
        pool_b = b if column_major else b.T.contiguous()
        self._pools = runtime.upload((pool_a, pool_b, pools.golden), device)
        self._ways = [
            (
                Operation("rows") if row_major else Operation("columns", turned=True, together=together),
                Operation("rows", turned=True) if column_major else Operation("columns", together=together),
                # Columns first, while there are few rows: whole rows are copied several times faster.
                Operation("columns", together=together),
                Operation("rows"),
            )
            for together in (1, product.together)
        ]
        self._kept: list[Any] = [None, None, None, None]

    def gather(self, turn: int) -> tuple[Arrays, Any]:
        """Return operands and golden of a turn, on the device; they are overwritten by the next turn."""
        rows, columns = draw(self._product, self._seed, turn)
        if not self._product.batch:
            rows, columns = rows[0], columns[0]
        ways = self._ways[turn > 0]
        drawn = zip(ways, (rows, columns, columns, rows), strict=True)
        indices = self._runtime.upload(tuple(_of_runs(index, way.together) for way, index in drawn), self._device)
        run, kept = self._runtime.run, self._kept
        for at, (way, index) in enumerate(zip(ways, indices, strict=True)):
            pool = self._pools[at] if at < len(self._pools) else kept[at - 1]
            kept[at] = run(way, (pool, index), kept[at])
        return (kept[0], kept[1]), kept[3]


def _of_runs(index: Any, together: int) -> Any:
    return index if together == 1 else index[..., ::together] // together


def differs(runtime: Runtime, operands: Arrays, golden: Any, right: Problem) -> str:
    """Return what the device gathered otherwise than the host did, in words; "" where all of it is right."""
    pairs = zip(
        ("operand A", "operand B", "the golden"), (*operands, golden), (*right.operands, right.golden), strict=True
    )
    wrong = [name for name, array, own in pairs if not host_same_bits(runtime.download(array), own)]
    return f"the device gathered {' and '.join(wrong)} wrongly" if wrong else ""
