"""The daemon's log: each problem is logged once, and a failure is logged without ending its thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

log = logging.getLogger("canaryd")


class Warnings:
    """A log of problems in which each problem appears only once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, problems: Iterable[str]) -> None:
        """Log the problems that are new."""
        for problem in problems:
            if problem not in self._logged:
                log.warning("%s", problem)
                self._logged.add(problem)


@contextlib.contextmanager
def log_failure(what: str) -> Iterator[None]:
    """Log any exception that the context's body raises, with its traceback, as a failure of `what`; suppress it."""
    try:
        yield
    except Exception:
        log.exception("%s failed; the daemon goes on", what)
