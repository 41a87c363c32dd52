"""Wrong words of memory: which of them show a broken cell, and the words for them."""

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
"""Kind of fault of a wrong word of memory → words for it."""


def name_cells(cells: Sequence[Cell]) -> str:
    """Return the kinds of fault of wrong words of memory as text, e.g. "stuck cells, wrong transfers"."""
    return ", ".join(CELLS[cell] for cell in cells)


def cells_in(found: Iterable[Evidence]) -> tuple[Cell, ...]:
    """Return the kinds of fault of wrong words of memory, in the order of `Cell`; () if memory was not tested."""
    seen = {name for each in found if each.memory for name in each.memory.cells}
    return tuple(cell for cell in Cell if cell.value in seen)


def broken_cells(found: Iterable[Evidence]) -> tuple[Cell, ...]:
    """Return the kinds of lasting faults of memory, if most words of the same allocation are right; else ().

    A wrong kernel would be wrong at most addresses, or at none.
    """
    return tuple(cell for cell in cells_in(each for each in found if each.wrong * 2 < each.total) if cell.lasts)
