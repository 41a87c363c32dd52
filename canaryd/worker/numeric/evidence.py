"""Describe the difference between two tensors that should be equal: how many elements differ, where, in which bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from canaryd.facts import Evidence, Span
from canaryd.worker.numeric.tensors import FORMATS, bits, torch

FIRST = 64
"""Maximum number of wrong elements that the evidence lists with their bits."""
EXAMINED = 65_536
"""Maximum number of wrong elements that are counted in the bit histogram."""
WARP = 32
"""Number of lanes of a warp (NVIDIA PTX ISA, WARP_SZ)."""

_AXES = ("batch", "head", "row", "column")


def collect(golden: Any, observed: Any, origin: tuple[int, ...] = ()) -> Evidence:
    """Compare two host tensors that an earlier comparison found different; return the evidence of their difference.

    If this comparison finds no difference, one of the two erred, and the evidence contains no wrong element. `origin`:
    the index in the whole result at which the tensors begin, if they are a part of it.
    """
    width = golden.element_size() * 8
    unsigned = (1 << width) - 1
    expected, got = bits(golden.contiguous()), bits(observed.contiguous())
    where = torch.nonzero(expected != got)
    wrong = int(where.shape[0])
    if not wrong:
        return collect_nothing(golden, "one comparison on the host found a difference, the next one none")
    where = where[:EXAMINED]
    at = tuple(where.T)
    want = [v & unsigned for v in expected[at].tolist()]
    have = [v & unsigned for v in got[at].tolist()]
    flipped = [w ^ h for w, h in zip(want, have, strict=True)]
    zero = ~(1 << (width - 1)) if golden.is_floating_point() else -1
    digits, shape = width // 4, golden.shape
    where = where + torch.tensor(origin) if origin else where
    names = _AXES[-len(shape) :] if len(shape) > 1 else ("element",)
    found = Evidence(
        wrong=wrong,
        total=golden.numel(),
        first=tuple(
            (tuple(index), f"0x{w:0{digits}x}", f"0x{h:0{digits}x}")
            for index, w, h in zip(where[:FIRST].tolist(), want, have, strict=False)
        ),
        bits={str(bit): n for bit in range(width) if (n := sum(each >> bit & 1 for each in flipped))},
        zeroed=sum(h & zero == 0 for h in have),
        nonfinite=int((~torch.isfinite(observed[at].to(torch.float64))).sum()) if golden.is_floating_point() else 0,
        # An axis of one element says nothing about where.
        lines={n: span(where[:, i].tolist(), shape[i]) for i, n in enumerate(names) if shape[i] > 1},
        pattern="",
    )
    exchanged = wrong == 2 and want == have[::-1]
    return replace(found, pattern=_sentence(golden, where, found, len(want), exchanged=exchanged))


def span(indices: Iterable[int], size: int) -> Span:
    """Return what all `indices` below `size` have in common: one value, a residue of a power of two, or a range."""
    values = sorted(set(indices))
    # Lanes, fragments and tiles repeat with powers of two: the largest period that all wrong indices share.
    periods = (p for p in (128, 64, 32, 16, 8, 4, 2) if size > p and len({v % p for v in values}) == 1)
    period = 0 if len(values) == 1 else next(periods, 0)
    return Span(first=values[0], last=values[-1], distinct=len(values), period=period)


def bit_name(dtype: Any, bit: int) -> str:
    """Return the name of a bit in a format: "bit 0 (lowest of the mantissa)", "bit 30 (exponent)", "bit 31 (sign)"."""
    form = FORMATS.get(str(dtype).removeprefix("torch."))
    if form is None:
        return f"bit {bit}"
    if bit == 8 * dtype.itemsize - 1:
        return f"bit {bit} (sign)"
    if bit >= form.bits - 1:
        return f"bit {bit} (exponent)"
    return f"bit {bit} ({'mantissa' if bit else 'lowest of the mantissa'})"


def _sentence(golden: Any, where: Any, found: Evidence, examined: int, *, exchanged: bool) -> str:
    place = f"element {where[0].tolist()}"
    if len(where) != 1:
        place = ", ".join(f"{name} {text}" for name, text in found.lines.items()) or "everywhere"
    if exchanged:
        return f"{place}: two values exchanged"
    if found.nonfinite == examined:
        return f"{place}: NaN or infinity"
    if found.zeroed == examined:
        return f"{place}: zero instead of the value"
    if len(found.bits) == 1:
        return f"{place}: only {bit_name(golden.dtype, int(next(iter(found.bits))))} is flipped"
    counts = {"zeroed": found.zeroed, "not finite": found.nonfinite}
    extra = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{place}: bits {', '.join(found.bits)} flipped" + (f" ({extra})" if extra else "")


def collect_nothing(golden: Any, pattern: str = "") -> Evidence:
    """Return evidence without a wrong element; `pattern` is the text that says what was wrong instead."""
    return Evidence(wrong=0, total=golden.numel(), first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern=pattern)
