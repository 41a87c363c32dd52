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
        hints = _hints(type(value))
        fields = {f.name: _field(getattr(value, f.name), hints[f.name]) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple):
        return tuple(map(rewritten, value))
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _field(value: Any, hint: Any) -> Any:
    if hint == Sentence:
        return changed(value)
    arguments = typing.get_args(hint)
    if Sentence in arguments:
        if isinstance(value, Mapping):
            return {key: changed(text) for key, text in value.items()}
        return tuple(map(changed, value))
    return rewritten(value)
