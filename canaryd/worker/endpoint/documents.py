"""JSON from a server that may be hostile: bounded before it is parsed, and strict where two readers would differ."""

from __future__ import annotations

import json
from typing import Any

from canaryd.facts import whole

MAX_VALUES = 1_000_000
"""Most values of a document. 20,000 scored tokens of a prompt with their alternatives have about 900,000; the worst
document of this size takes about 140 MiB (tests/worker/endpoint/test_documents.py)."""


def read(text: str) -> tuple[Any, str]:
    """Return the data and "", or None and what is wrong, as in "the answer is not JSON, or incomplete"."""
    if sum(map(text.count, ",:[{")) > MAX_VALUES:
        return None, f"has more than {MAX_VALUES:,} values"
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except _Twice:
        return None, "has an object with two values of one name"
    except RecursionError:
        return None, "is nested too deeply"
    except ValueError:
        return None, "is not JSON, or incomplete"
    try:
        return whole(data), "is null" if data is None else ""
    except ValueError:
        return None, "is nested too deeply"


class _Twice(Exception):
    """A name stands twice in an object: readers differ in which of the values they take (RFC 8259, section 4)."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found
