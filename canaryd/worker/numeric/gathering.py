"""Operands that the device itself gathers from uploaded pools (rows of A, columns of B), new ones for every turn.

A turn is one draw of rows and columns. The host makes the pools once and computes their answers twice; after that, a
turn costs the host only some index numbers. Errors of the gather are found as well: operands and golden (right result)
are gathered by two uploads of the same indices, so an index that changed in one upload gives a wrong result. `differs`
sometimes checks for errors that change both in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from canaryd.model import Device
from canaryd.worker.numeric.digests import Digest
from canaryd.worker.numeric.operands import SHEET, Problem, Product, draw, gather, gather_golden, sheet
from canaryd.worker.numeric.tensors import host_same_bits
from canaryd.worker.runtime.interface import Operation, Runtime

PRODUCTS = 8
"""Number of results computed from one gather. With new operands for every eighth product, nearly all device time is
spent on products (ours; benchmarks.verified_gemm has the share)."""

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class LaidOut(Problem):
    """The pools of a problem, with copies in the memory layout that the gather needs."""

    arrays: Arrays = ()
    """The pools of A, B and the golden (right results), each by rows or by columns as the gather needs it."""


class Gatherer:
    """The pools of one product on a device, from which it gathers operands and goldens."""

    renews = True
    """Whether each turn has new operands."""
    digest: Digest | None = None
    """What makes digests of rows, which take the place of the golden; None: the golden is gathered."""

    def __init__(self, runtime: Runtime, device: Device, product: Product, pools: Problem, seed: int) -> None:
        """Upload the pools in the memory layout that the product needs: by rows or by columns."""
        self._runtime, self._device, self._product, self._seed = runtime, device, product, seed
        self._of_host = pools
        row_major, column_major = product.layout[0] == "n", product.layout[1] == "t"
        self._pools = runtime.upload((pools if isinstance(pools, LaidOut) else laid_out(product, pools)).arrays, device)
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

    def twin(self) -> Gatherer:
        """Return a second gatherer with the same pools and its own memory for the gathered arrays."""
        other = copy.copy(self)
        other._kept = [None, None, None, None]  # noqa: SLF001
        return other

    def digesting(self, digest: Digest) -> Gatherer:
        """Return a gatherer with the same pools and operands' memory, which gathers digests in place of goldens."""
        other = copy.copy(self)
        other._kept, other.digest = [*self._kept[:3], None], digest  # noqa: SLF001
        return other

    @property
    def answers(self) -> Any:
        """The matrix of results of all pool rows and pool columns, on the device; goldens are gathered from it."""
        return self._pools[2]

    def answer(self, turn: int, choice: int) -> int:
        """Return the index, in the flattened `answers`, of one element of the turn's golden; `choice` picks it."""
        rows, columns = (index[0] for index in draw(self._product, self._seed, turn))
        row, column = divmod(choice % (len(rows) * len(columns)), len(columns))
        return int(rows[row]) * self._product.of_pools.N + int(columns[column])

    def gather(self, turn: int) -> tuple[Arrays, Any]:
        """Return (operands, golden) of draw number `turn`, on the device; the next turn overwrites this memory."""
        return self.gather_by(self._upload(draw(self._product, self._seed, turn), turn), turn)

    def sheet(self, number: int) -> Arrays:
        """Return the indices of the `SHEET` turns of sheet `number`, on the device; `gather_by` takes one of them."""
        return self._upload(sheet(self._product, self._seed, number), number * SHEET + 1)

    def _upload(self, drawn: tuple[Any, Any], turn: int) -> Arrays:
        """Upload the drawn rows and columns (…, batch, count) twice: for the operands, and for the golden."""
        rows, columns = drawn if self._product.batch else (each[..., 0, :] for each in drawn)
        each = zip(self._ways[turn > 0], (rows, columns, columns, rows), strict=True)
        return self._runtime.upload(tuple(_of_runs(index, way.together) for way, index in each), self._device)

    def gather_by(self, indices: Arrays, turn: int) -> tuple[Arrays, Any]:
        """Return (operands, golden or its digests) for a turn's indices; turn 0 gathers in another way than later ones.

        Digests are int32 (..., rows, `digests.VECTORS`).
        """
        run, kept = self._runtime.run, self._kept
        for at, (way, index) in enumerate(zip(self._ways[turn > 0], indices, strict=True)):
            pool = self._pools[at] if at < len(self._pools) else kept[at - 1]
            if at == len(self._pools) and self.digest is not None:
                pool = self.digest.rows(pool)
            kept[at] = run(way, (pool, index), kept[at])
        return (kept[0], kept[1]), kept[3]

    def compared(self, results: list[Any]) -> list[Any]:
        """Return what is compared of the results with what `gather_by` returns: themselves, or their digests."""
        return results if self.digest is None else self.digest.of(results)

    def right(self, turn: int) -> Any:
        """Return the golden of a turn, made by the host."""
        return gather_golden(self._product, self._of_host, self._seed, turn)

    def differs(self, held: Sequence[Any], turn: int) -> str:
        """Return a text that names the arrays which the device gathered wrongly in a turn, or "" if all are right.

        `held`: operands and golden of the device, copied to the host; the golden can be missing.
        """
        right = gather(self._product, self._of_host, self._seed, turn)
        pairs = zip(("operand A", "operand B", "the golden"), held, (*right.operands, right.golden), strict=True)
        wrong = [name for name, array, own in pairs if array is not None and not host_same_bits(array, own)]
        return f"the device gathered {' and '.join(wrong)} wrongly" if wrong else ""


class Held(Gatherer):
    """One upload, which all turns repeat: operands that no pools give, such as those of attention."""

    renews = False

    def __init__(self, runtime: Runtime, device: Device, problem: Problem) -> None:
        """Upload the operands and the golden."""
        self._of_host = problem
        *operands, golden = runtime.upload((*problem.operands, problem.golden), device)
        self._held = tuple(operands), golden
        self._pools = (None, None, golden)

    def twin(self) -> Gatherer:
        """Return the same: no turn overwrites anything."""
        return self

    def answer(self, turn: int, choice: int) -> int:  # noqa: ARG002
        """Return the index of one element of the flattened golden."""
        return int(choice % self._of_host.golden.numel())

    def gather(self, turn: int) -> tuple[Arrays, Any]:  # noqa: ARG002
        """Return (operands, golden)."""
        return self._held

    def sheet(self, number: int) -> Arrays:  # noqa: ARG002
        """Return no indices."""
        return ()

    def gather_by(self, indices: Arrays, turn: int) -> tuple[Arrays, Any]:  # noqa: ARG002
        """Return (operands, golden)."""
        return self._held

    def right(self, turn: int) -> Any:  # noqa: ARG002
        """Return the host's golden."""
        return self._of_host.golden

    def differs(self, held: Sequence[Any], turn: int) -> str:  # noqa: ARG002
        """Return "": nothing is gathered."""
        return ""


def laid_out(product: Product, pools: Problem) -> LaidOut:
    """Return the pools of a product with copies in the memory layout that its gather needs."""
    a, b = pools.operands
    arrays = (
        a if product.layout[0] == "n" else a.T.contiguous(),
        b if product.layout[1] == "t" else b.T.contiguous(),
        pools.golden,
    )
    return LaidOut(**{f.name: getattr(pools, f.name) for f in fields(Problem)}, arrays=arrays)


def _of_runs(index: Any, together: int) -> Any:
    return index if together == 1 else index[..., ::together] // together
