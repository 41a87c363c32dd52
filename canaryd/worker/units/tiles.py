"""The exact tiles that every unit computes: many small products, the same bytes for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from canaryd.worker.numeric.operands import Problem, Product, build, build_int8
from canaryd.worker.numeric.tensors import FORMATS, torch


@dataclass(frozen=True)
class Tiles:
    """`rounds` products M x K times K x N of one kind."""

    source: str
    """Format of the operands: a name of `FORMATS`, "int8", or "int32" (values of int8 in 32 bits)."""
    content: str
    """A content of products (docs/goldens.md)."""
    path: str
    """How a unit computes them: "dot" (tensor cores), "fma" (one multiplication and addition after the other), or
    "gemm" (the library of a processor)."""
    accumulator: int
    """Significant bits of the narrowest container of a partial sum."""
    rounds: int
    M: int
    N: int
    K: int

    @property
    def name(self) -> str:
        """The case."""
        sizes = f"{self.rounds}x{self.M}x{self.N}x{self.K}"
        label = self.source if self.source == self.target else f"{self.source}>{self.target}"
        return f"{label}/{self.content}/tiles/{self.path}@{sizes}"

    @property
    def is_integer(self) -> bool:
        """Whether nothing in it can round."""
        return self.source.startswith("int")

    @property
    def target(self) -> str:
        """Format of the results: that of the accumulator, but where a processor's library has no such kernel."""
        if self.is_integer:
            return "int32"
        return self.source if self.path == "gemm" else "float32"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of all results: rounds, M, N."""
        return self.rounds, self.M, self.N

    def build(self, seed: int) -> Problem:
        """Return operands A (rounds, M, K) and B (rounds, N, K), the second factor's columns, and their products.

        The golden is (rounds, M, N). Raises `Inexact` as the products' builders do.
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
"""In place of a unit's number: the block changed its unit while it computed."""


@dataclass(frozen=True)
class Launch:
    """What every unit computed from one upload."""

    results: Any
    """(blocks, rounds, M, N), where they were computed. A block is one unit's turn."""
    units: list[int]
    """The unit of each block, by the device's own number, or `MOVED`."""
    lanes: Any = None
    """(blocks, M, N): the lane of the warp that held each element; None where there are none."""
