"""A limit on the workers that test devices at the same time: this host's memory, or a container's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

CONTEXT = 512 << 20
"""Bytes of host memory that a vendor's runtime takes for one accelerator beside the worker's own (ours)."""
WAIT = 1.0
"""Seconds between two checks of a waiting series for a stop."""


class Room:
    """Admits a series of runs if enough memory is free for it, or if no other series runs."""

    def __init__(self, available: Callable[[], int | None]) -> None:
        """Begin without reservations. `available` returns the bytes that are free now; None (unknown) sets no limit."""
        self._available = available
        self._left = threading.Condition()
        self._inside = 0
        self._free: int | None = None
        """What was available when nobody was inside: those who have just come in have not taken their part yet."""

    @contextlib.contextmanager
    def enter(self, wanted: int, stopped: Callable[[], bool]) -> Iterator[None]:
        """Reserve memory for a series that takes `wanted` bytes; wait until it is free, or until `stopped`."""
        with self._left:
            while not self._fits(wanted) and not stopped():
                self._left.wait(WAIT)
            self._inside += 1
            self._free = None if self._free is None else self._free - wanted
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._free = None if self._free is None else self._free + wanted
                self._left.notify_all()

    def _fits(self, wanted: int) -> bool:
        if not self._inside:
            self._free = self._available()
            return True
        return self._free is None or self._free >= wanted
