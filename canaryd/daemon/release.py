"""`canaryd release`: the daemon stops using every device for a while."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone

from canaryd.daemon.logs import log_failure
from canaryd.engine.engine import Engine
from canaryd.store.notes import RELEASE_NOTE, RELEASED_NOTE
from canaryd.store.store import Store

log = logging.getLogger("canaryd")

PERIOD = 1.0
"""Seconds between two checks for a request of `canaryd release`."""


class Releases:
    """Carries out the requests of `canaryd release`."""

    def __init__(
        self, engine: Engine, store: Store, *, changed: Callable[[], None], look_around: Callable[[], None]
    ) -> None:
        """Store the arguments. `changed` publishes the evidence; `look_around` requests an inventory."""
        self._engine = engine
        self._store = store
        self._changed = changed
        self._look_around = look_around
        self._until = 0.0
        """Until when a release was asked for, as it was read last, in seconds since the epoch."""

    def follow(self, stop: threading.Event) -> None:
        """Check for requests each second until `stop` is set. A scheduler's job would cost more than the check."""
        while not stop.wait(PERIOD):
            with log_failure("release"):
                self.check()

    def check(self) -> None:
        """Release all devices, or use them again, as `canaryd release` requests; store an answer when this is done."""
        engine, until = self._engine, self._store.note_time(RELEASE_NOTE)
        self._until = until = self._until if self._store.unreadable else until  # what was asked for last still holds
        if until > time.time():
            clock = f"{datetime.fromtimestamp(until, tz=timezone.utc).astimezone():%Y-%m-%d %H:%M:%S}"
            if not engine.released:
                log.info("released until %s: no device is touched", clock)
                threading.Thread(target=engine.release, args=(f"released until {clock} by canaryd release",)).start()
            elif not engine.holds and self._store.note(RELEASED_NOTE) != str(until):
                self._store.set_note(RELEASED_NOTE, str(until))
                self._changed()
        elif engine.released:
            log.info("the release is over: devices are tested again")
            engine.take_back()
            self._changed()
            self._store.set_note(RELEASED_NOTE, "")
            self._look_around()
