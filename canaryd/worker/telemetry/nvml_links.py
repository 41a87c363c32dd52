"""State and error counters of NVLinks: one call reads all fields that are known to equal the single calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from canaryd.facts import Reading
from canaryd.probe import Absent
from canaryd.worker.telemetry import nvml_values as values
from canaryd.worker.telemetry.nvml import NOT_SUPPORTED, REASONS, Missing, parse_count
from canaryd.worker.telemetry.nvml_asked import Asked
from canaryd.worker.telemetry.sysfs import Fact, attempt

UP = "up"
KINDS = (UP, *values.LINK_ERRORS)
Ask = Callable[[str, int], Any]
"""Function that takes a kind of value and the number of a link, and returns the value; it raises `Missing`."""


def read_links(asked: Asked, links: range) -> Iterator[Fact]:
    """Yield the state and the errors of a GPU's NVLinks.

    NVML gives each value by a field and by a call. The fields are documented less than the calls, and differ between
    generations. So both are read once a day; values for which both are equal are read by the field until the next day.
    """
    none: dict[str, list[Any]] = {"fields": [], "absent": []}
    ways = asked.daily("links", partial(_compare, asked, links)) if asked.remembers else none
    by_field = [(kind, link) for kind, link in ways["fields"] if link in links]
    field = _fields(asked, by_field)

    def ask(kind: str, link: int) -> Any:
        if kind in ways["absent"]:
            raise Missing(REASONS[NOT_SUPPORTED], NOT_SUPPORTED)
        return field(kind, link) if (kind, link) in by_field else _call(asked, kind, link)

    for link in links:
        yield attempt("nvlink_up", partial(ask, UP, link), link=str(link))
    errors = _errors({values.LINK_ERRORS[0]: partial(ask, values.LINK_ERRORS[0])}, links)
    if _any(errors):
        errors += _errors({kind: partial(ask, kind) for kind in values.LINK_ERRORS[1:]}, links)
    else:  # from Blackwell on, links have other counters
        wanted = [(number, link) for number in values.LINK_FIELDS.values() for link in links]
        fields = {kind: partial(asked.field, wanted, number) for kind, number in values.LINK_FIELDS.items()}
        counted = _errors(fields, links)
        errors = counted if _any(counted) else errors
    yield from errors


def _errors(asks: Mapping[str, Callable[[int], Any]], links: range) -> list[Fact]:
    each = ((kind, ask, link) for kind, ask in asks.items() for link in links)
    return [attempt("nvlink_errors_total", partial(ask, n), kind=kind, link=str(n)) for kind, ask, n in each]


def _any(facts: list[Fact]) -> bool:
    return not all(isinstance(fact, Absent) for fact in facts)


def _call(asked: Asked, kind: str, link: int) -> Any:
    if kind == UP:
        return asked.value("NvLinkState", link, check=values.is_up)
    return asked.value("NvLinkErrorCounter", link, values.LINK_ERRORS.index(kind))


def _fields(asked: Asked, which: list[tuple[str, int]]) -> Ask:
    """Return a function (kind, link) → value of a field; one NVML call reads the fields of all pairs in `which`."""
    wanted = [at for kind, link in which if (at := values.link_field(kind, link))]

    def ask(kind: str, link: int) -> Any:
        at = values.link_field(kind, link)
        if at is None:
            raise Missing("no field has this counter of this link")
        return asked.field(wanted, *at, check=values.is_up if kind == UP else parse_count)

    return ask


def _compare(asked: Asked, links: range) -> dict[str, list[Any]]:
    """Return the (kind, link) pairs whose field equals the call ("fields"), and the unsupported kinds ("absent")."""
    field = _fields(asked, [(kind, link) for kind in KINDS for link in links])
    ways: dict[str, list[Any]] = {"fields": [], "absent": []}
    for kind in KINDS:
        calls = [attempt(kind, partial(_call, asked, kind, link)) for link in links]
        if all(isinstance(call, Absent) and call.code == NOT_SUPPORTED for call in calls):
            ways["absent"].append(kind)
        for call, link in zip(calls, links, strict=True):
            if isinstance(call, Reading) and call == attempt(kind, partial(field, kind, link)):
                ways["fields"].append((kind, link))
    return ways
