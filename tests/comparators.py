"""Comparators that err: no drills, because they show only beside a wrong result."""

from __future__ import annotations

from typing import Any

from canaryd.worker.numeric.tensors import bits
from tests.faulty_gathers import Faulty

TILE = 16
"""Rows and columns of the corner at which a comparator does not look."""


class SaysEqual(Faulty):
    """The comparator finds every result right."""

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """See `Runtime.agree`."""
        right = super().agree(results, golden)
        self.struck += right.count(False)
        return [True] * len(right)


class MissesTile(Faulty):
    """The comparator does not look at the first rows and columns."""

    def agree(self, results: list[Any], golden: Any) -> list[bool]:
        """See `Runtime.agree`."""
        seen = [result.clone() for result in results]
        for result in seen:
            bits(result)[..., :TILE, :TILE] = bits(golden)[..., :TILE, :TILE]
        right = super().agree(seen, golden)
        self.struck += right != super().agree(results, golden)
        return right


COMPARATORS: dict[str, type[Faulty]] = {"says equal": SaysEqual, "misses a tile": MissesTile}
"""What a broken comparator does → the runtime that does it."""
