"""Which module of the worker answers a question that is not a probe: canaryd's own, or one of another distribution."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

GROUP = "canaryd.answers"
"""Entry points of other distributions: question → a module with `answer`, which the worker imports."""
OWN = {"reproducer": "canaryd.worker.numeric.reproducer"}


class Answerer(NamedTuple):
    """A module of the worker that answers."""

    module: str
    package: Path | None
    """`__init__.py` of the package that the module is of; None for canaryd's own, which every worker has."""


def answerer(question: str) -> Answerer:
    """Return which module answers a question; raises `LookupError` where nothing that is installed does."""
    if question in OWN:
        return Answerer(OWN[question], None)
    for point in metadata.entry_points(group=GROUP, name=question):
        found = importlib.util.find_spec(point.module.partition(".")[0])
        if found is not None and found.origin:
            return Answerer(point.module, Path(found.origin))
    raise LookupError(f"nothing that is installed answers {question!r}")
