"""How many workers test devices side by side: as many as this host's memory, or a container's, has room for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

CONTEXT = 512 << 20
"""Bytes of host memory that a vendor's runtime takes for one accelerator beside the worker's own (ours)."""
WAIT = 1.0
"""Seconds after which a waiting series looks whether it was stopped."""


class Room:
    """Lets series in while there is memory for one more; alone, a series is always let in."""

    def __init__(self, available: Callable[[], int | None]) -> None:
        """`available` returns the bytes that could be taken now; None where nobody can tell, which limits nothing."""
        self._available = available
        self._left = threading.Condition()
        self._inside = 0
        self._free: int | None = None
        """What was available when nobody was inside: those who have just come in have not taken their part yet."""

    @contextlib.contextmanager
    def enter(self, wanted: int, stopped: Callable[[], bool]) -> Iterator[None]:
        """Hold room for a series that takes `wanted` bytes; wait for it until `stopped`."""
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
