"""Times, durations, quantities and paragraphs as text, the same in every command and page."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Callable, Iterable
from datetime import datetime, timezone

WIDTH = 80
"""Columns of text where standard output is not a terminal."""
WIDEST = 110
"""Columns of text at most: longer lines are hard to read."""
NARROWEST = 40
"""Columns below which text is not wrapped any further."""
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
SCALED = {"seconds": "s", "hertz": "Hz", "bytes": "B", "bytes per second": "B/s", "flops per second": "FLOP/s"}
"""Units that take a prefix ("1.98 GHz"), and their symbols."""
PLAIN = {"celsius": "°C", "watts": "W", "1": ""}
"""Units that take no prefix, and their symbols; any other unit is its own symbol."""


def columns() -> int:
    """Return how many columns text may use on this terminal: `WIDEST` at most."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDTH, 0)).columns - 1))


def wrapped(lead: str, text: str, width: int | None = None, *, whole: bool = False) -> list[str]:
    """Return a text as lines of at most `width` columns (default: the terminal's), the first of which begins `lead`.

    A word that is longer is broken, unless the words stay `whole` because they are to be copied.
    """
    room, hang = columns() if width is None else width, " " * len(lead)
    return textwrap.wrap(
        text, room, initial_indent=lead, subsequent_indent=hang, break_on_hyphens=False, break_long_words=not whole
    )


def folded(text: str, width: int) -> str:
    """Return a text whose lines have at most `width` columns; a word, such as a path to copy, is never broken."""
    lines = []
    for line in text.split("\n"):
        hang = " " * (len(line) - len(line.lstrip()) + 2)
        if len(line) <= width:
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about a word that is not known: the known one that is nearest, or nothing."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f'; did you mean "{near[0]}"?' if near else ""


KINDS = ("cpu", "gpu", "cuda", "rocm", "hip", "xpu", "npu", "mps", "tpu", "endpoint")
"""Words with which the name of a device begins, here or elsewhere."""


def did_you_mean_device(word: str, known: Iterable[str]) -> str:
    """Return what `did_you_mean` does, but never a device of another kind: "gpu0" is not "cpu:0"."""
    kind = word.rstrip("0123456789:.").lower()
    return did_you_mean(word, (name for name in known if kind not in KINDS or name.startswith(kind)))


def format_time(at: float, *, seconds: bool = True) -> str:
    """Return a time (seconds since the epoch) as local time; as seconds where no calendar has it."""
    return _calendar(at, seconds, lambda utc: utc.astimezone())


def format_utc(at: float, *, seconds: bool = True) -> str:
    """Return a time that names its zone, for what is stored and may be read in another one."""
    return f"{_calendar(at, seconds, lambda utc: utc)} UTC"


def _calendar(at: float, seconds: bool, zoned: Callable[[datetime], datetime]) -> str:
    try:
        there = zoned(datetime.fromtimestamp(at, tz=timezone.utc))
    except (OSError, OverflowError, ValueError):  # a clock or a server is wrong
        return f"{at:g} s after 1970"
    return f"{there:%Y-%m-%d %H:%M:%S}" if seconds else f"{there:%Y-%m-%d %H:%M}"


def time_zone() -> str:
    """Return the zone of the times that `format_time` writes: "UTC", "UTC+02:00"."""
    offset = f"{datetime.now(tz=timezone.utc).astimezone():%z}"
    return "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:5]}"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit of which there are two: "90 seconds", "36 hours", "12 days"."""
    for size, unit in ((DAY, "days"), (HOUR, "hours"), (MINUTE, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:g} {unit}"
    whole = f"{max(0.0, seconds):.0f}"
    return "1 second" if whole == "1" else f"{whole} seconds"


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the divisor and the symbol for values of a unit: ("hertz", 1.98e9) gives (1e9, "GHz")."""
    if unit not in SCALED:
        return 1.0, PLAIN.get(unit, unit)
    size, prefix = next((p for p in PREFIXES if abs(largest) >= p[0]), PREFIXES[-1] if largest else (1.0, ""))
    return size, f"{prefix}{SCALED[unit]}"


def number(value: float) -> str:
    """Return a number to three digits, without an exponent as long as that is readable."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: "1.98 GHz", "71 °C", "0.031"."""
    size, symbol = scale(unit, value)
    return f"{number(value / size)} {symbol}".rstrip()
