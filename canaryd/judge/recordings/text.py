"""Phrases that several findings share."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: "1 case", "3 cases"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def and_more(number: int) -> str:
    """Return " and 3 more" where `number` things are meant and one of them was named; "" for one."""
    return f" and {number - 1} more" if number > 1 else ""
