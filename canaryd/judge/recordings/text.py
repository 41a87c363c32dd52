"""Phrases that several findings share."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 case", "3 cases"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def and_more(number: int) -> str:
    """Return " and 3 more" where `number` things are meant and one of them was named; "" for one."""
    return f" and {number - 1} more" if number > 1 else ""
