"""Answers of NVML as facts: readings, or absences with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from canaryd.facts import Reading, reading_key
from canaryd.probe import Absent
from canaryd.worker.telemetry import nvml_values as values
from canaryd.worker.telemetry.interface import DeviceLost
from canaryd.worker.telemetry.nvml import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LOST,
    REASONS,
    Ask,
    Check,
    Missing,
    ask_nvml,
)

Fact = Reading | Absent


def once(ask: Ask) -> Ask:
    """Return an `Ask` that calls only once; after a failure every reading gets the same `Missing`."""
    try:
        given, missing = ask(), None
    except Missing as error:
        given, missing = None, error

    def again() -> Any:
        if missing:
            raise missing
        return given

    return again


def missing_code(ask: Ask) -> int | None:
    """Return NVML's code for why a value is missing; None where there is a value."""
    try:
        ask()
    except Missing as error:
        return error.code
    return None


def part(ask: Ask, check: Check, which: int | str) -> Any:
    """Return one item or member of a call's answer, checked and in base units."""
    given = ask()
    return check(given[which] if isinstance(which, int) else getattr(given, which))


def absent(name: str, error: Missing) -> Absent:
    """Return why a reading could not be had, with NVML's code."""
    return Absent(name=name, reason=str(error), code=error.code)


def make_fact(name: str, ask: Ask, unit: str = "1", /, **labels: str) -> Fact:
    """Return one reading, or why it is absent."""
    try:
        return Reading(name=name, value=ask(), unit=unit, labels=labels)
    except Missing as error:
        return absent(reading_key(name, labels), error)


def worded(name: str, label: str, words: tuple[str, ...], ask: Ask) -> Fact:
    """Return the reading 1 with the word as its label."""
    try:
        return Reading(name=name, value=1, unit="1", labels={label: values.word(words, ask())})
    except Missing as error:
        return absent(name, error)


def any_reading(facts: Iterable[Fact]) -> bool:
    """Return whether any of the facts is a reading."""
    return any(isinstance(f, Reading) for f in facts)


def merged(facts: Iterable[Fact]) -> Iterator[Fact]:
    """Yield facts; where all of one name are absent for the same reason, yield one `Absent` for the name."""
    grouped: dict[str, list[Fact]] = {}
    for fact in facts:
        grouped.setdefault(fact.name.partition("{")[0], []).append(fact)
    for name, group in grouped.items():
        reasons = {(f.reason, f.code) if isinstance(f, Absent) else None for f in group}
        if len(group) > 1 and len(reasons) == 1 and (shared := reasons.pop()):
            yield Absent(name=name, reason=shared[0], code=shared[1])
        else:
            yield from group


def ask_fields(nvml: ModuleType, handle: Any, fields: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
    """Return field values by (number, link), all from one call."""
    wanted = list(fields)
    return dict(zip(wanted, ask_nvml(nvml, "nvmlDeviceGetFieldValues", handle, wanted), strict=True))


def field_of(batch: Ask, check: Check, number: int, link: int = 0) -> Any:
    """Return one value of a batch, checked and in base units. Each value has its own return code."""
    given = batch()[number, link]
    if given.nvmlReturn == GPU_IS_LOST:
        raise DeviceLost(LOST)
    if given.nvmlReturn == 2:  # NVML_ERROR_INVALID_ARGUMENT
        raise Missing("the driver does not know this field", FUNCTION_NOT_FOUND)
    if given.nvmlReturn:
        raise Missing(REASONS.get(given.nvmlReturn, f"NVML: error {given.nvmlReturn}"), given.nvmlReturn)
    if given.valueType >= len(values.VALUES):
        raise Missing(f"the driver gave a value of an unknown type ({given.valueType})")
    return check(getattr(given.value, values.VALUES[given.valueType]))
