"""Format times, durations, quantities and paragraphs as text, the same in every command and page."""

from __future__ import annotations

import difflib
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable
from datetime import datetime, timezone

WIDTH = 80
"""Width of text in columns if standard output is not a terminal."""
WIDEST = 110
"""Largest width of text in columns: longer lines are hard to read."""
NARROWEST = 40
"""Smallest width in columns to which text is wrapped."""
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
SCALED = {"seconds": "s", "hertz": "Hz", "bytes": "B", "bytes per second": "B/s", "flops per second": "FLOP/s"}
"""Unit that is printed with a prefix such as "G" ("1.98 GHz") → its symbol."""
PLAIN = {"celsius": "°C", "watts": "W", "1": ""}
"""Unit that is printed without a prefix → its symbol. Any other unit is its own symbol."""


def command(name: str, *options: tuple[str, str]) -> str:
    """Return the canaryd command `name` for a shell, with those of these (option, value) that have a value."""
    words = (word for option, value in options if value for word in (f"--{option.replace('_', '-')}", value))
    return shlex.join(["canaryd", name, *words])


def columns() -> int:
    """Return the width of text on this terminal in columns, at most `WIDEST`."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDTH, 0)).columns - 1))


def wrapped(lead: str, text: str, width: int | None = None, *, whole: bool = False) -> list[str]:
    """Return a text as lines of at most `width` columns (default: the terminal's). The first line begins with `lead`.

    A word longer than a line is broken. With `whole` no word is broken, because people copy it.
    """
    room, hang = columns() if width is None else width, " " * len(lead)
    return textwrap.wrap(
        text, room, initial_indent=lead, subsequent_indent=hang, break_on_hyphens=False, break_long_words=not whole
    )


def folded(text: str, width: int) -> str:
    """Return a text whose lines have at most `width` columns. A long word, such as a path to copy, is never broken."""
    lines = []
    for line in text.split("\n"):
        hang = " " * (len(line) - len(line.lstrip()) + 2)
        if len(line) <= width:
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `word`: '; did you mean "cpu:0"?', or "" if no word is similar."""
    known = list(known)
    near = difflib.get_close_matches(word, known, 1, 0.65) or [k for k in known if word and k.startswith(word)]
    return f'; did you mean "{near[0]}"?' if near else ""


def format_time(at: float, *, seconds: bool = True) -> str:
    """Return a time (epoch s) as local time, with or without `seconds`; as a number if it is outside the calendar."""
    return _calendar(at, seconds, lambda utc: utc.astimezone())


def format_utc(at: float, *, seconds: bool = True) -> str:
    """Return a time (seconds since the epoch) in UTC as text that ends with the zone, for texts that are stored."""
    return f"{_calendar(at, seconds, lambda utc: utc)} UTC"


def _calendar(at: float, seconds: bool, zoned: Callable[[datetime], datetime]) -> str:
    try:
        there = zoned(datetime.fromtimestamp(at, tz=timezone.utc))
    except (OSError, OverflowError, ValueError):  # a clock or a server is wrong
        return f"{at:g} s after 1970"
    return f"{there:%Y-%m-%d %H:%M:%S}" if seconds else f"{there:%Y-%m-%d %H:%M}"


def time_zone() -> str:
    """Return the time zone that `format_time` uses: "UTC", "UTC+02:00"."""
    offset = f"{datetime.now(tz=timezone.utc).astimezone():%z}"
    return "UTC" if offset == "+0000" else f"UTC{offset[:3]}:{offset[3:5]}"


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that gives at least 2: "90 seconds", "36 hours", "12 days"."""
    for size, unit in ((DAY, "days"), (HOUR, "hours"), (MINUTE, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:g} {unit}"
    whole = f"{max(0.0, seconds):.0f}"
    return "1 second" if whole == "1" else f"{whole} seconds"


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the divisor and symbol for values up to `largest`: ("hertz", 1.98e9) gives (1e9, "GHz")."""
    if unit not in SCALED:
        return 1.0, PLAIN.get(unit, unit)
    size, prefix = next((p for p in PREFIXES if abs(largest) >= p[0]), PREFIXES[-1] if largest else (1.0, ""))
    return size, f"{prefix}{SCALED[unit]}"


def number(value: float) -> str:
    """Return a number as text with three digits, with an exponent only if the number is very large or very small."""
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """Return a value with its unit: "1.98 GHz", "71 °C", "0.031"."""
    size, symbol = scale(unit, value)
    return f"{number(value / size)} {symbol}".rstrip()
