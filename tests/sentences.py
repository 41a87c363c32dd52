"""Every sentence of a model object changed, and nothing else: what rests on wording shows."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from canaryd.facts import Sentence


def changed(text: str) -> str:
    """Return a text that no rule could know: backwards, in capitals."""
    return text[::-1].upper()


def rewritten(value: Any) -> Any:
    """Return a model object with every field that is declared as a `Sentence` changed, at any depth."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _field(getattr(value, name), hint) for name, hint in _telling(type(value)).items()}
        return dataclasses.replace(value, **fields) if fields else value
    if isinstance(value, tuple):
        return tuple(map(rewritten, value))
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _telling(kind: type) -> dict[str, Any]:
    """Return the fields that are a sentence or may hold one at any depth, with their types."""
    hints = _hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if _tells(hints[f.name])}


def _tells(hint: Any) -> bool:
    if hint == Sentence:
        return True
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return bool(_telling(hint))
    return any(_tells(argument) for argument in typing.get_args(hint))


def _field(value: Any, hint: Any) -> Any:
    if hint == Sentence:
        return changed(value)
    arguments = typing.get_args(hint)
    if Sentence in arguments:
        if isinstance(value, Mapping):
            return {key: changed(text) for key, text in value.items()}
        return tuple(map(changed, value))
    return rewritten(value)
