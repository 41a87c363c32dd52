"""Find the worker's module, canaryd's or another package's, that answers a question other than a test run."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

GROUP = "canaryd.answers"
"""Entry-point group for other packages: question → a module with a function `answer`, which the worker imports."""
OWN = {"reproducer": "canaryd.worker.numeric.reproducer", "installed": "canaryd.worker.installed"}


class Answerer(NamedTuple):
    """A module of the worker that answers one question."""

    module: str
    package: Path | None
    """`__init__.py` of the module's package, or None for canaryd's own modules, which every worker has."""


def answerer(question: str) -> Answerer:
    """Return the worker's module that answers a question; raise `LookupError` if no installed module does."""
    if question in OWN:
        return Answerer(OWN[question], None)
    for point in metadata.entry_points(group=GROUP, name=question):
        found = importlib.util.find_spec(point.module.partition(".")[0])
        if found is not None and found.origin:
            return Answerer(point.module, Path(found.origin))
    raise LookupError(f"nothing that is installed answers {question!r}")
