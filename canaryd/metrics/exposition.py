"""The text format of Prometheus, written from families and series as prepared bytes.

Written by hand: a node with 8 GPUs has thousands of series. The client library's writer parses every label again and
would take a third of the daemon's processor time.
"""

from __future__ import annotations

import enum
import functools
import gzip
import re
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

from canaryd.web.server import Answer

TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the text format."""
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


class Page:
    """The series of one exposition, grouped by family."""

    def __init__(self, families: Mapping[str, Family]) -> None:
        self._families = families
        self._lines: dict[str, list[str]] = {name: [] for name in families}
        self._templates = {name: _template(name, family.labels) for name, family in families.items()}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add one series with the values of its labels."""
        self._lines[name].append(self._templates[name] % (*map(_escaped, labels), _number(value)))

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


class Exposition:
    """A page that is ready to be sent, plain or packed."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    @functools.cached_property
    def _packed(self) -> bytes:
        return gzip.compress(self.text, LEVEL)

    def answer(self, headers: Mapping[str, str]) -> Answer:
        """Return the page as the answer to a scrape; it is packed if the request's headers name gzip."""
        vary = "Vary: Accept-Encoding"
        if takes_gzip(headers.get("accept-encoding", "")):
            return Answer(200, TEXT, self._packed, (vary, "Content-Encoding: gzip"))
        return Answer(200, TEXT, self.text, (vary,))


def takes_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header names gzip with a weight other than 0; "*" is not enough."""
    choices = (choice.partition(";") for choice in "".join(accept_encoding.lower().split()).split(","))
    return any(coding == "gzip" and not re.fullmatch(r"q=0?\.?0*", weight) for coding, _, weight in choices)
