"""Turn two tensors that should be equal into evidence: how many elements, where, which bits, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from canaryd.facts import Evidence, Span
from canaryd.worker.numeric.tensors import FORMATS, bits, torch

FIRST = 64
"""Wrong elements written out with their bits."""
EXAMINED = 65_536
"""Wrong elements looked at for the bit histogram."""
WARP = 32
"""Lanes of a warp (NVIDIA PTX ISA, WARP_SZ)."""

_AXES = ("batch", "head", "row", "column")


def collect(golden: Any, observed: Any) -> Evidence:
    """Compare two host tensors of equal kind that differ somewhere; return what the difference looks like.

    What found the difference may have erred, or the look at the elements may: then no element is wrong.
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
    histogram: dict[str, int] = {}
    for bit in range(width):
        count = sum(1 for w, h in zip(want, have, strict=True) if (w ^ h) >> bit & 1)
        if count:
            histogram[str(bit)] = count
    sign = 1 << (width - 1)
    zeroed = sum(1 for h in have if h & ~sign == 0) if golden.is_floating_point() else have.count(0)
    values = observed[at]
    nonfinite = int((~torch.isfinite(values.to(torch.float64))).sum()) if golden.is_floating_point() else 0
    lines = _lines(where, golden.shape)
    digits = width // 4
    exchanged = wrong == 2 and want == have[::-1]
    return Evidence(
        wrong=wrong,
        total=golden.numel(),
        first=tuple(
            (tuple(index), f"0x{w:0{digits}x}", f"0x{h:0{digits}x}")
            for index, w, h in zip(where[:FIRST].tolist(), want, have, strict=False)
        ),
        bits=histogram,
        zeroed=zeroed,
        nonfinite=nonfinite,
        lines=lines,
        pattern=_sentence(golden, where, histogram, lines, len(want), zeroed, nonfinite, exchanged=exchanged),
    )


def _lines(where: Any, shape: Any) -> dict[str, Span]:
    """Return, per axis, what the wrong indices share: one value, a residue, or only a range."""
    names = _AXES[-len(shape) :] if len(shape) > 1 else ("element",)
    lines = {}
    for axis, name in enumerate(names):
        if shape[axis] == 1:
            continue  # an axis of one element says nothing about where
        lines[name] = span(where[:, axis].tolist(), shape[axis])
    return lines


def span(indices: Iterable[int], size: int) -> Span:
    """Return what indices below `size` share: one value, a residue, or only a range."""
    values = sorted(set(indices))
    # Lanes, fragments and tiles repeat with powers of two: the largest period that all wrong indices share.
    periods = (p for p in (128, 64, 32, 16, 8, 4, 2) if size > p and len({v % p for v in values}) == 1)
    period = 0 if len(values) == 1 else next(periods, 0)
    return Span(first=values[0], last=values[-1], distinct=len(values), period=period)


def bit_name(dtype: Any, bit: int) -> str:
    """Name a bit of a format: "bit 0 (lowest of the mantissa)", "bit 30 (exponent)", "bit 31 (sign)"."""
    form = FORMATS.get(str(dtype).removeprefix("torch."))
    if form is None:
        return f"bit {bit}"
    if bit == 8 * dtype.itemsize - 1:
        return f"bit {bit} (sign)"
    if bit >= form.bits - 1:
        return f"bit {bit} (exponent)"
    return f"bit {bit} ({'mantissa' if bit else 'lowest of the mantissa'})"


def _sentence(
    golden: Any,
    where: Any,
    histogram: dict[str, int],
    lines: dict[str, Span],
    examined: int,
    zeroed: int,
    nonfinite: int,
    *,
    exchanged: bool,
) -> str:
    count = int(where.shape[0])
    if count == 1:
        place = "element [" + ", ".join(str(v) for v in where[0].tolist()) + "]"
    else:
        place = ", ".join(f"{name} {text}" for name, text in lines.items()) or "everywhere"
    if exchanged:
        return f"{place}: two values exchanged"
    if nonfinite == examined:
        return f"{place}: NaN or infinity"
    if zeroed == examined:
        return f"{place}: zero instead of the value"
    if len(histogram) == 1:
        return f"{place}: only {bit_name(golden.dtype, int(next(iter(histogram))))} is flipped"
    extra = [f"{zeroed} zeroed"] * bool(zeroed) + [f"{nonfinite} not finite"] * bool(nonfinite)
    return f"{place}: bits {', '.join(histogram)} flipped" + (f" ({', '.join(extra)})" if extra else "")


def collect_nothing(golden: Any, pattern: str = "") -> Evidence:
    """Return evidence of a disagreement that no element shows (a digest, a comparator), with `pattern` as its words."""
    return Evidence(wrong=0, total=golden.numel(), first=(), bits={}, zeroed=0, nonfinite=0, lines={}, pattern=pattern)
