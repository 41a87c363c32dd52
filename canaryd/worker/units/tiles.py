"""The exact tiles that every unit computes: many small products with the same operands for all units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from canaryd.worker.numeric.operands import Problem, Product, build, build_int8
from canaryd.worker.numeric.tensors import FORMATS, torch


@dataclass(frozen=True)
class Tiles:
    """A batch of `rounds` products M x K times K x N of one kind."""

    source: str
    """Format of the operands: a name of `FORMATS`, "int8", or "int32" (values of int8 in 32 bits)."""
    content: str
    """A content class of products (docs/goldens.md)."""
    path: str
    """Way to compute the products: "dot" (tensor cores), "fma" (one multiplication and addition after the other), or
    "gemm" (the library of a processor)."""
    accumulator: int
    """Number of significant bits of the narrowest format in which a unit can keep a partial sum."""
    rounds: int
    M: int
    N: int
    K: int

    @property
    def name(self) -> str:
        """Name of the case."""
        sizes = f"{self.rounds}x{self.M}x{self.N}x{self.K}"
        label = self.source if self.source == self.target else f"{self.source}>{self.target}"
        return f"{label}/{self.content}/tiles/{self.path}@{sizes}"

    @property
    def is_integer(self) -> bool:
        """Whether the products are of integers, so that nothing is rounded."""
        return self.source.startswith("int")

    @property
    def target(self) -> str:
        """Format of the results: that of the partial sums, except for "gemm", which returns the operands' format."""
        if self.is_integer:
            return "int32"
        return self.source if self.path == "gemm" else "float32"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Shape of all results: rounds, M, N."""
        return self.rounds, self.M, self.N

    def build(self, seed: int) -> Problem:
        """Return the problem: operands A (rounds, M, K) and B (rounds, N, K), golden (right result) (rounds, M, N).

        Rows of B are the columns to multiply. Raises `Inexact` under the same conditions as the builders of products.
        """
        shape = f"M={self.rounds * self.M} N={self.N} K={self.K} rounds={self.rounds}"
        if self.is_integer:  # all rounds have one B
            made = build_int8(self.content, self.rounds * self.M, self.N, self.K, "nt", seed)
            a, b = (operand.to(getattr(torch, self.source)) for operand in made.operands)
            b = b.mT.expand(self.rounds, self.N, self.K)
        else:
            source, target = FORMATS[self.source], FORMATS[self.target]
            sizes = (self.M, self.N, self.K, self.rounds)
            made = build(Product(self.content, source, target, self.accumulator, *sizes, layout="nt"), seed)
            a, b = made.operands[0], made.operands[1].mT
        operands = (a.view(self.rounds, self.M, self.K).contiguous(), b.contiguous())
        return replace(made, operands=operands, golden=made.golden.view(self.sizes), shape=shape)


MOVED = -1
"""Number that replaces a unit's number if the block moved to another unit while it computed."""


@dataclass(frozen=True)
class Launch:
    """The results of one launch: every unit computed the same uploaded operands."""

    results: Any
    """Results (blocks, rounds, M, N), on the device that computed them. One unit computes each block."""
    units: list[int]
    """The unit of each block, by the device's own number, or `MOVED`."""
    lanes: Any = None
    """The lane of the warp that held each element (blocks, M, N), or None where units have no lanes."""
