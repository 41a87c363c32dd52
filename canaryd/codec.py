"""Convert model objects to JSON data and back. Unknown fields and wrong types are refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from canaryd.facts import SHARED, shared
from canaryd.model import Finding

ITEMS = 64
"""Largest number of items in a mapping that is cached, so that equal mappings share memory (ours)."""
T = TypeVar("T")


def to_json(value: Any, *, sparse: bool = False) -> Any:
    """Return a model object as data for `json.dumps`: a dataclass becomes an object, an enum its value.

    `sparse` leaves out the fields that have their defaults, and `from_json` puts them back. Every later release reads
    such stored data, so no default of a stored class must ever change.
    """
    kind: object = type(value)
    return _encoder(kind, sparse)(value)


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return a document as JSON in UTF-8 with sorted names and without spaces: equal documents give equal bytes."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


@functools.cache
def _encoder(kind: Any, sparse: bool) -> Callable[[Any], Any]:
    """Return the function that converts a value of type `kind` to JSON data. The function is cached for each type."""
    if dataclasses.is_dataclass(kind):
        defaults = {f.name: _default(f) for f in dataclasses.fields(kind)}
        if sparse:
            return lambda value: {
                name: to_json(item, sparse=True)
                for name, default in defaults.items()
                if (item := getattr(value, name)) != default
            }
        return lambda value: {name: to_json(getattr(value, name)) for name in defaults}
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, Mapping):
        return lambda value: {str(k): to_json(v, sparse=sparse) for k, v in value.items()}
    if issubclass(kind, (list, tuple)):
        return lambda value: [to_json(v, sparse=sparse) for v in value]
    return lambda value: value


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or `MISSING` if the field has none. No value equals `MISSING`."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def finding_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as `check --json` and `history --json` print it, with its state under the name "severity"."""
    shown = ("rule", "probe", "cause", "message", "action", "evidence", "repro", "runs", "rivals", "characterised")
    return {"severity": finding.state.value} | {name: to_json(getattr(finding, name)) for name in shown}


def from_json(kind: type[T], data: Any) -> T:
    """Return a model object of type `kind`, rebuilt from the data that `to_json` returned.

    Raises `ValueError` with the path to the value that has the wrong shape. Unknown fields are refused: they mean that
    the writer is newer than the reader, and a reader that dropped them would lose evidence.
    """
    wanted: Any = kind
    try:
        value: T = _decoder(wanted)(data)
    except _UnfitError as error:
        raise ValueError(f"{kind.__name__}{''.join(reversed(error.path))}: {error}") from error.__cause__
    return value


class _UnfitError(ValueError):
    """Raised for data of the wrong shape. Each enclosing decoder adds its field name or index to `path`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []
        """The steps to it, the innermost first."""


@functools.cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return the function that rebuilds a value of type `kind` from JSON data. The function is cached for each type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda data: data
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _object(kind)
    if origin is typing.Union or origin is types.UnionType:
        return _choice(args)
    if origin is tuple:
        return _list(args)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(args[1])
    return _plain(kind)


def _object(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    fields = {name: _decoder(hint) for name, hint in hints.items()}
    exact = {name: hint for name, hint in hints.items() if hint in (int, float, bool)}

    def decode(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise _UnfitError(f"wanted an object, got {type(data).__name__}")
        if not data.keys() <= fields.keys():
            raise _UnfitError(f"unknown field {min(data.keys() - fields.keys())!r}")
        decoded = {}
        for name, value in data.items():
            if type(value) is exact.get(name):  # most values: a call for each would take a third of a start
                decoded[name] = value
                continue
            try:
                decoded[name] = fields[name](value)
            except _UnfitError as error:
                error.path.append(f".{name}")
                raise
        try:
            return kind(**decoded)
        except TypeError as error:
            raise _UnfitError(str(error)) from error

    return decode


def _choice(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    decoders = [_decoder(kind) for kind in kinds]

    def decode(data: Any) -> Any:
        if type(data) in kinds:
            # An exact match first: an integer of more than 53 bits must not become a float.
            return data
        for each in decoders:
            try:
                return each(data)
            except ValueError:
                continue
        raise _UnfitError(f"got {type(data).__name__}, wanted one of {kinds}")

    return decode


def _list(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    alike = kinds[1:] == (Ellipsis,)
    decoders = [_decoder(kind) for kind in kinds if kind is not Ellipsis]
    whole_numbers = alike and kinds[0] is int

    def decode(data: Any) -> Any:
        if not isinstance(data, (list, tuple)):
            raise _UnfitError(f"wanted a list, got {type(data).__name__}")
        if not alike and len(decoders) != len(data):
            raise _UnfitError(f"wanted {len(decoders)} items, got {len(data)}")
        if whole_numbers and all(type(value) is int for value in data):
            return tuple(data)
        found = []
        try:
            for each, value in zip(itertools.repeat(decoders[0]) if alike else decoders, data, strict=False):
                found.append(each(value))
        except _UnfitError as error:
            error.path.append(f"[{len(found)}]")
            raise
        return tuple(found)

    return decode


def _mapping(kind: Any) -> Callable[[Any], Any]:
    item = _decoder(kind)

    def decode(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise _UnfitError(f"wanted an object, got {type(data).__name__}")
        found = {}
        for name, value in data.items():
            try:
                found[shared(str(name))] = item(value)
            except _UnfitError as error:
                error.path.append(f".{name}")
                raise
        few = len(found) <= ITEMS and (kind is int or (kind is str and all(len(v) <= SHARED for v in found.values())))
        return _known_mapping(tuple(found.items())) if few else found

    return decode


@functools.lru_cache(maxsize=512)
def _known_mapping(items: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    return dict(items)


def _plain(kind: Any) -> Callable[[Any], Any]:
    def member(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError:
            raise _UnfitError(f"{data!r} is not one of {[m.value for m in kind]}") from None

    def decode(data: Any) -> Any:
        if isinstance(data, kind) and (kind is bool or not isinstance(data, bool)):
            return shared(data) if kind is str else data
        if kind is float and isinstance(data, int) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise _UnfitError("a whole number beyond all measure") from None
        raise _UnfitError(f"wanted {kind.__name__}, got {type(data).__name__}")

    return member if issubclass(kind, enum.Enum) else decode
