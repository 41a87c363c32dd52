"""Wrong words of memory: which of them show a broken cell, and what they are called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from canaryd.facts import Cell, Evidence

CELLS = {
    Cell.STUCK: "stuck cells",
    Cell.ALIAS: "aliased addresses",
    Cell.COUPLED: "coupled cells",
    Cell.LEAKING: "leaking cells",
    Cell.FLIPPED: "passing flips",
    Cell.TRANSFER: "wrong transfers",
}
"""What wrong words of memory are called."""


def name_cells(cells: Sequence[Cell]) -> str:
    """Return what wrong words of memory are, e.g. "stuck cells, wrong transfers"."""
    return ", ".join(CELLS[cell] for cell in cells)


def cells_in(found: Iterable[Evidence]) -> tuple[Cell, ...]:
    """Return what wrong words of memory turned out to be, in the order of `Cell`; empty where none was tested."""
    seen = {name for each in found if each.memory for name in each.memory.cells}
    return tuple(cell for cell in Cell if cell.value in seen)


def broken_cells(found: Iterable[Evidence]) -> tuple[Cell, ...]:
    """Return what is wrong with cells, where it lasts and most words of the same allocation are right.

    A wrong kernel would be wrong at most addresses, or at none.
    """
    return tuple(cell for cell in cells_in(each for each in found if each.wrong * 2 < each.total) if cell.lasts)
