"""Every sentence of a model object changed, and nothing else: what rests on wording shows."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from canaryd.facts import Sentence
from canaryd.store import rows
from canaryd.store.store import Store
from tests.story.format import load
from tests.story.host import Host, Simulated
from tests.story.playing import Played, play


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


def in_other_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    """Play a story with every sentence changed."""
    told = load(path)
    wordless = tuple(dataclasses.replace(expected, says="") for expected in told.expect)
    with monkeypatch.context() as patch:
        _rewrite(patch)
        return play(dataclasses.replace(told, expect=wordless))


def _rewrite(patch: pytest.MonkeyPatch) -> None:
    """Change every sentence that a worker says or that the store gives back."""
    compute, inventory, follow = Host.compute, Simulated.inventory, Simulated.follow
    decode, events = rows.from_json, Store.events
    patch.setattr(Host, "compute", lambda self, *a: rewritten(compute(self, *a)))
    patch.setattr(rows, "from_json", lambda kind, data: rewritten(decode(kind, data)))
    patch.setattr(Store, "events", lambda self, *a, **k: [rewritten(e) for e in events(self, *a, **k)])

    def asked(self, *arguments, **named):
        listing = inventory(self, *arguments, **named)
        fields = {name: getattr(listing, name).items() for name in ("unavailable", "failing")}
        reasons = {name: {k: changed(v) for k, v in items} for name, items in fields.items()}
        return dataclasses.replace(listing, problems=tuple(map(changed, listing.problems)), **reasons)

    def followed(self, path, position, on_batch, **named):
        def batch(records, at):
            on_batch([dataclasses.replace(r, text=changed(r.text)) for r in records], at)

        return follow(self, path, position, batch, **named)

    patch.setattr(Simulated, "inventory", asked)
    patch.setattr(Simulated, "follow", followed)
