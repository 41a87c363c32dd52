"""State and error counters of NVLinks: all in one call, where that is known to give what single calls give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from canaryd.worker.telemetry import nvml_values as values
from canaryd.worker.telemetry.nvml import NOT_SUPPORTED, REASONS, Ask, Missing, field_value, parse_count
from canaryd.worker.telemetry.nvml_facts import (
    Fact,
    absent,
    any_reading,
    ask_fields,
    field_of,
    make_fact,
    missing_code,
    once,
)

UP = "up"
KINDS = (UP, *values.LINK_ERRORS)


def read_links(nvml: Any, handle: Any, how_many: Ask) -> Iterator[Fact]:
    """Yield state and errors of the NVLinks that a GPU has.

    The field numbers of links are documented less than the calls, and differ between generations: once a day both are
    asked, and what gave the same is read by its field until tomorrow.
    """
    try:
        links, why = range(how_many()), Missing("this device has no NVLink")
    except Missing as error:
        links, why = range(0), error
    if not links:
        yield absent("nvlink_up", why)
        yield absent("nvlink_errors_total", why)
        return
    ways = nvml.noted("links")
    if ways is None:
        ways = _compare(nvml, handle, links) if nvml.remembers else {"fields": [], "absent": []}
        nvml.note("links", ways)
    field = _fields(nvml, handle, [(kind, link) for kind, link in ways["fields"] if link in links])
    by_field = {(kind, link) for kind, link in ways["fields"]}

    def ask(kind: str, link: int) -> Any:
        if kind in ways["absent"]:
            raise Missing(REASONS[NOT_SUPPORTED], NOT_SUPPORTED)
        return field(kind, link) if (kind, link) in by_field else _call(nvml, handle, kind, link)

    for link in links:
        yield make_fact("nvlink_up", partial(ask, UP, link), link=str(link))
    facts: list[Fact] = []
    for kind in values.LINK_ERRORS:
        facts += [make_fact("nvlink_errors_total", partial(ask, kind, n), kind=kind, link=str(n)) for n in links]
        if not any_reading(facts):
            break  # from Blackwell on, links have other counters
    if not any_reading(facts):
        wanted = [(number, link) for number in values.LINK_FIELDS.values() for link in links]
        counter = partial(field_of, once(partial(ask_fields, nvml, handle, wanted)), parse_count)
        counted = [
            make_fact("nvlink_errors_total", partial(counter, number, link), kind=kind, link=str(link))
            for kind, number in values.LINK_FIELDS.items()
            for link in links
        ]
        facts = counted if any_reading(counted) else facts
    yield from facts


def _call(nvml: Any, handle: Any, kind: str, link: int) -> Any:
    if kind == UP:
        return field_value(nvml, values.is_up, "nvmlDeviceGetNvLinkState", handle, link)
    number = values.LINK_ERRORS.index(kind)
    return field_value(nvml, parse_count, "nvmlDeviceGetNvLinkErrorCounter", handle, link, number)


def _fields(nvml: Any, handle: Any, which: list[tuple[str, int]]) -> Any:
    """Return a function from kind and link to a value, all from one call."""
    wanted = [at for kind, link in which if (at := values.link_field(kind, link))]
    batch = once(partial(ask_fields, nvml, handle, wanted)) if wanted else dict

    def ask(kind: str, link: int) -> Any:
        at = values.link_field(kind, link)
        if at is None:
            raise Missing("no field has this counter of this link")
        return field_of(batch, values.is_up if kind == UP else parse_count, *at)

    return ask


def _compare(nvml: Any, handle: Any, links: range) -> dict[str, list[Any]]:
    """Return of which kinds and links a field gives what the call gives, and which kinds the device lacks."""
    field = _fields(nvml, handle, [(kind, link) for kind in KINDS for link in links])
    ways: dict[str, list[Any]] = {"fields": [], "absent": []}
    for kind in KINDS:
        calls = [once(partial(_call, nvml, handle, kind, link)) for link in links]
        if all(missing_code(call) == NOT_SUPPORTED for call in calls):
            ways["absent"].append(kind)
        else:
            same = (link for call, link in zip(calls, links, strict=True) if _same(call, partial(field, kind, link)))
            ways["fields"] += [(kind, link) for link in same]
    return ways


def _same(one: Ask, other: Ask) -> bool:
    try:
        return bool(one() == other())
    except Missing:
        return False
