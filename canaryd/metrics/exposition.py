"""The two text formats of Prometheus for metrics, written from families and series as prepared bytes.

Written by hand: a node with 8 GPUs has thousands of series. The client library's writer parses every label again and
would take a third of the daemon's processor time. When it chooses a format, it also raises on an Accept header such as
"application/openmetrics-text;version=x".
"""

from __future__ import annotations

import enum
import functools
import re
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the classic text format."""
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Media type of OpenMetrics 1.0: the same series, with exemplars and units."""
UNITS = ("seconds", "bytes", "celsius", "watts", "joules", "hertz")
"""Units with which a metric's name can end, before `_total`."""
LEVEL = 1
"""Compression level of gzip. It is the fastest, because the scraper waits; the page already shrinks to a twentieth."""
OF_DEVICE = ("device", "index", "model")
"""Label names of metrics about a device."""
OF_PROBE = (*OF_DEVICE, "probe")
"""Label names of metrics about a probe on a device."""


class Family(NamedTuple):
    """One metric: its Prometheus type, its label names in the order that `Page.add` takes them, and its HELP text."""

    type: str
    labels: tuple[str, ...]
    help: str


class Exemplar(NamedTuple):
    """The newest run that increased a counter."""

    run: str
    """The run's id, far shorter than the 128 characters that OpenMetrics allows for an exemplar."""
    at: float
    """Time of the run (epoch s)."""


def unit_of(name: str) -> str:
    """Return the unit in a metric's name, or "" for a plain number."""
    last = name.removesuffix("_total").rpartition("_")[2]
    return last if last in UNITS else ""


class Page:
    """The series of one exposition, grouped by family."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._lines: dict[str, list[str]] = {name: [] for name in families}
        self._templates = {name: _template(name, family.labels) for name, family in families.items()}
        self._exemplars: dict[str, dict[int, Exemplar]] = {}
        """Family → index of its line → exemplar."""

    def add(self, name: str, value: float, *labels: str, exemplar: Exemplar | None = None) -> None:
        """Add one series with the values of its labels; an `exemplar` is shown only in OpenMetrics."""
        lines = self._lines[name]
        if exemplar:
            self._exemplars.setdefault(name, {})[len(lines)] = exemplar
        lines.append(self._templates[name] % (*map(_escaped, labels), _number(value)))

    def add_set(self, name: str, chosen: enum.Enum, *labels: str) -> None:
        """Add one series for each member of the enumeration of `chosen`: 1 for `chosen`, 0 for all others."""
        for member in type(chosen):
            self.add(name, member is chosen, *labels, member.value)

    def text(self) -> bytes:
        """Return all families that have series in the text format. Each family begins with its HELP and TYPE lines."""
        return "".join(
            f"# HELP {name} {self._families[name].help}\n# TYPE {name} {self._families[name].type}\n{''.join(lines)}"
            for name, lines in self._lines.items()
            if lines
        ).encode()

    def openmetrics(self) -> bytes:
        """Return all families that have series as OpenMetrics, without the final line: more families may follow."""
        return "".join(self._openmetrics(name, lines) for name, lines in self._lines.items() if lines).encode()

    def _openmetrics(self, name: str, lines: list[str]) -> str:
        family = self._families[name]
        bare = name.removesuffix("_total") if family.type == "counter" else name
        unit = f"# UNIT {bare} {unit_of(name)}\n" if unit_of(name) else ""
        if name in self._exemplars:
            lines = [*lines]
            for number, (run, at) in self._exemplars[name].items():
                lines[number] = f'{lines[number][:-1]} # {{run_id="{_escaped(run)}"}} 1.0 {at:.3f}\n'
        return f"# TYPE {bare} {family.type}\n{unit}# HELP {bare} {family.help}\n{''.join(lines)}"


@functools.lru_cache(maxsize=1024)
def _template(name: str, labels: tuple[str, ...]) -> str:
    return name + ("{" + ",".join(f'{label}="%s"' for label in labels) + "}" if labels else "") + " %s\n"


@functools.lru_cache(maxsize=4096)
def _escaped(label: str) -> str:
    """Return a label's value with escapes. Lone surrogates are replaced, since one would break the whole page."""
    clean = label.encode("utf-8", "replace").decode()
    return clean.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@functools.lru_cache(maxsize=4096)
def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


class Prepared:
    """The first part of an HTTP body, which stays the same until the evidence changes."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._making = threading.Lock()
        self._deflated = b""

    def gzip(self, rest: bytes) -> bytes:
        """Return `body` and `rest` as one gzip member (RFC 1952).

        The body is compressed only once and ends with a full flush, so that a new compressor can continue after it (RFC
        1951: no reference goes back across the flush).
        """
        with self._making:
            if not self._deflated:
                packer = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
                self._deflated = packer.compress(self.body) + packer.flush(zlib.Z_FULL_FLUSH)
        packer = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS)
        end = packer.compress(rest) + packer.flush()
        check = zlib.crc32(rest, self._check)
        return _GZIP_HEAD + self._deflated + end + struct.pack("<II", check, (len(self.body) + len(rest)) % 2**32)

    @functools.cached_property
    def _check(self) -> int:
        return zlib.crc32(self.body)


_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
"""Header of a gzip member: deflate, no name, no time, system unknown."""


class Exposition:
    """One page in both formats: text and OpenMetrics."""

    def __init__(self, page: Page) -> None:
        self.text = Prepared(page.text())
        self.openmetrics = Prepared(page.openmetrics())


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header gives OpenMetrics 1.0 a weight above 0 that is not below the text format's."""
    wanted = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for media, settings in _choices(accept):
        known = media == "text/plain" or settings.get("version") == "1.0.0"
        if media in wanted and known:
            wanted[media] = max(wanted[media], _weight(settings))
    return 0.0 < wanted["application/openmetrics-text"] >= wanted["text/plain"]


def takes_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header names gzip with a weight above 0; "*" is not enough."""
    return any(coding == "gzip" and _weight(settings) > 0.0 for coding, settings in _choices(accept_encoding))


def _choices(header: str) -> list[tuple[str, dict[str, str]]]:
    """Return (lower-case value, settings) for each choice in a header, e.g. "text/plain;version=0.0.4;q=0.5, */*"."""
    found = []
    for choice in header.lower().split(","):
        value, *settings = (part.strip() for part in choice.split(";"))
        pairs = (setting.partition("=") for setting in settings)
        found.append((value, {name.strip(): text.strip().strip('"') for name, _, text in pairs}))
    return found


def _weight(settings: Mapping[str, str]) -> float:
    """Return the weight `q` of a choice in a header: 1 if it is missing, 0 if RFC 9110 does not allow it."""
    weight = settings.get("q", "1")
    return float(weight) if re.fullmatch(r"[01](\.[0-9]{0,3})?", weight) else 0.0
