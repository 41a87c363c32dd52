"""Numbers as the dossier writes them: counts, shares, intervals, ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def clipped(text: str, most: int, end: str = "…") -> str:
    """Return a text of at most `most` letters and the mark that it was cut."""
    return text if len(text) <= most else text[:most].rstrip() + end


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers in few words: "0…14, 17"."""
    stretches: list[list[int]] = []
    for n in numbers:
        if stretches and n == stretches[-1][-1] + 1:
            stretches[-1].append(n)
        else:
            stretches.append([n])
    return ", ".join(", ".join(map(str, s)) if len(s) < 3 else f"{s[0]}…{s[-1]}" for s in stretches)


def flipped(expected: str, observed: str) -> list[int]:
    """Return the bits in which two hex numbers differ, ascending; bit 0 is the lowest."""
    changed = int(expected, 16) ^ int(observed, 16)
    return [bit for bit in range(changed.bit_length()) if changed >> bit & 1]


def share(value: float | None) -> str:
    """Return a share of 1 as a percentage of three digits; a tiny one as "1 of 200,000"."""
    if value is None:
        return "not known"
    if value in (0.0, 1.0):
        return f"{100 * value:.0f} %"
    return f"{100 * value:.3g} %" if value >= 1e-5 else f"1 of {1 / value:,.0f}"


def counted(tally: Mapping[str, Any]) -> str:
    """Return "3 of 1,000", or "none" where nothing was tried."""
    return f"{tally['wrong']:,} of {tally['total']:,}" if tally["total"] else "none"


def rated(rate: Mapping[str, Any]) -> str:
    """Return "3 of 3 (95 % interval: 29.2 % to 100 %)"."""
    interval = f" (95 % interval: {share(rate['low'])} to {share(rate['high'])})"
    return counted(rate) + (interval if rate["total"] else "")


def ruled_out(probe: Mapping[str, Any]) -> str:
    """Return which fault rate the clean results of a test rule out: "more than 0.3 %", or "nothing"."""
    return f"more than {share(probe['rules_out'])}" if probe["rules_out"] is not None else "nothing"


def flipped_bits(failure: Mapping[str, Any]) -> str:
    """Return which bits a failing case flipped: "13", "0…3, 7"."""
    return ranges([int(bit) for bit in failure["bits"]]) or "not recorded"


def wrong_places(failure: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the places of a failing case at which a result was wrong."""
    return [p for p in failure["places"] if p["results"]["wrong"]]
