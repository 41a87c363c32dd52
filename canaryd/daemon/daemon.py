"""`canaryd run`: the daemon's parts, its signals, and its regular reading of the store.

The main thread only waits, handles signals and watches the clock. `rounds` tests devices, `inventory` finds devices and
probes, and every change of the evidence goes to `publisher`, which prepares all pages.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canaryd import __version__
from canaryd.config import load, permissions
from canaryd.config.load import ConfigError
from canaryd.config.settings import Config, TlsConfig
from canaryd.daemon import systemd
from canaryd.daemon.inventory import Inventories
from canaryd.daemon.jobs import Jobs
from canaryd.daemon.logs import Warnings, log_failure
from canaryd.daemon.publisher import Publisher
from canaryd.daemon.release import Releases
from canaryd.daemon.rounds import Rounds, log_run
from canaryd.daemon.watchdog import Watchdog, within_reach
from canaryd.engine.engine import Engine, Progress
from canaryd.store.locks import Busy
from canaryd.store.notes import DAEMON_LOCK
from canaryd.store.store import Store
from canaryd.supervisor import cgroup, process
from canaryd.web.server import Route, Server
from canaryd.web.tls import Tls

log = logging.getLogger("canaryd")

REFRESH = 15.0
"""Seconds between two readings of other processes' records; after each reading the evidence is judged again."""
SUM_UP = 60.0
"""Seconds between two searches for a past day that has no summary yet."""
PRUNE = 3600.0
STOP = 4.0
"""Maximum seconds for a stop; after that the process exits even if threads still run."""
SAVE = 0.5
"""Last seconds of `STOP`: they are reserved for a final write if a worker does not end (ours)."""
SWITCH = 0.001
"""Seconds for which a thread can keep the interpreter while another waits, so that no scrape waits for a whole page."""


@dataclass
class Daemon:
    """One daemon while it runs."""

    config: Config
    config_path: Path | None
    store: Store
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings from the command line; they take precedence over the file, also after a reload."""
    manager: systemd.Manager = field(default_factory=systemd.Manager)
    """The service manager that started this process."""
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        """Create the parts of the daemon that use no hardware."""
        self.engine = engine = Engine(self.config, self.store, listener=self._progress, beside=True)
        self._quit = threading.Event()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()  # unlike an Event's, its `put` takes no lock
        self._jobs = Jobs()
        self._warnings = Warnings()
        self._watchdog = Watchdog()
        self._publisher = publisher = Publisher(engine, self.store)
        self._rounds = Rounds(engine, self.store, publisher.changed)
        engine.on_change, engine.may = publisher.changed, self._rounds.may
        self._inventories = Inventories(
            engine,
            self._jobs,
            self._rounds,
            self._warnings,
            changed=publisher.changed,
            refresh=self._refresh,
            stop=self._quit,
        )
        self._releases = Releases(
            engine, self.store, changed=publisher.changed, look_around=self._inventories.look_around
        )
        self._daemon_lock = contextlib.ExitStack()
        self._problem = ""
        """The store's problem that was logged last."""
        self._generation = 0  # `Store.generation` when this daemon took its lock
        self._seen: object = None  # `Store.changes` at the last look
        self._server: Server

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status.

        Raises `OSError` if the address cannot be bound, `ConfigError` if the files of TLS cannot be used.
        """
        host, port = self.config.listen
        sys.setswitchinterval(SWITCH)
        tls = self._publisher.tls = Tls(self.config.tls) if self.config.tls != TlsConfig() else None
        self._server = server = Server(host, port, self._routes(), tls=tls)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signals.put(number))
        _place_workers()
        self.engine.watch.history.running = True
        self.engine.recall(runs=False)  # stored verdicts are served at once; runs are read with the first inventory
        self._publisher.changed()
        server.start()
        log.info(
            "canaryd %s serves %s://%s:%d/metrics; state in %s",
            __version__,
            "https" if tls else "http",
            host,
            server.port,
            self.config.state_dir,
        )
        if self.manager.address and not server.local:
            log.info("only addresses in IPAddressAllow= of the unit reach it; as shipped, these are loopback's alone")
        self._warnings.log(self._exposed())
        self.manager.tell("READY=1", f"STATUS={self._publisher.summary}")
        self._start_jobs(within_reach(host, server.port))
        releases = threading.Thread(
            target=self._releases.follow, args=(self._quit,), name="canaryd-release", daemon=True
        )
        with self._daemon_lock:
            self._take_lock()
            self._releases.check()
            self._jobs.scheduler.start()
            releases.start()
            self._watch()
        log.info("stopping")
        self._stop(releases)
        return 0

    def _start_jobs(self, address: tuple[str, int] | None) -> None:
        self._inventories.look_around()
        self._jobs.every(REFRESH, self._refresh, "refresh")
        if self.manager.watchdog:
            self._jobs.every(self.manager.watchdog / 4, lambda: self._watchdog.pulse(address), "pulse", now=True)
        self._jobs.every(PRUNE, lambda: self.store.prune(time.time()), "prune")
        self._jobs.every(SUM_UP, self.engine.days.sum_up, "days")

    def _routes(self) -> dict[str, Route]:
        return {path: self._watchdog.guard(route) for path, route in self._publisher.routes().items()}

    def _progress(self, progress: Progress) -> None:
        """Log a finished run and publish it at once, so that a suspect is reported before it is confirmed."""
        if log_run(progress):
            self._publisher.changed()

    def _exposed(self) -> Iterator[str]:
        """Yield a warning for each part that strangers can read: the address, the keys of endpoints, the evidence."""
        host, port = self.config.listen
        if not self._server.local and not self._publisher.tls:
            where = f"listening on {host or 'every interface'}, port {self._server.port or port}"
            yield f"{where}, without TLS: who reaches it reads everything; see docs/security.md"
        if (key := self.config.tls.key_file) and (text := permissions.exposure(key)):
            yield f"{key}: {text}"
        for endpoint in self.config.endpoints.each.values():
            if endpoint.key_file and (text := permissions.exposure(endpoint.key_file)):
                yield f"{endpoint.key_file}: {text}"
        if text := permissions.exposure(self.config.state_dir):
            yield f"{self.config.state_dir}: {text}"

    # The main thread

    def _watch(self) -> None:
        """Handle signals, clock jumps and reports to systemd; return at a stop. Only a reload uses the store."""
        fed, reported = 0.0, self._publisher.summary
        while True:
            with contextlib.suppress(queue.Empty):
                signals = {self._signals.get(timeout=1.0)}
                while not self._signals.empty():  # however many SIGHUPs came: one reload, and no stop waits for them
                    signals.add(self._signals.get_nowait())
                if signals != {signal.SIGHUP}:
                    return
                self.manager.tell(*systemd.reloading())
                with log_failure("reload"):
                    self._reload()
                self.manager.tell("READY=1")
            if self._watchdog.pulsed > fed:
                fed = self._watchdog.pulsed
                self.manager.tell("WATCHDOG=1")
            if self._publisher.summary != reported:
                reported = self._publisher.summary
                self.manager.tell(f"STATUS={reported}")
            self._jobs.follow_clock()

    def _reload(self) -> None:
        publisher, bad = self._publisher, "the new configuration is bad; the old one stays in force"
        try:
            new = replace(load.load(self.config_path), **self.overrides)
        except ConfigError as error:
            publisher.config_ok = False
            for problem in [*error.problems, bad]:
                log.error("%s", problem)  # noqa: TRY400  a mistake in a file, not a traceback
        except Exception:  # a mistake of canaryd
            publisher.config_ok = False
            log.exception("%s", bad)
        else:
            for name in ("listen", "tls", "state_dir", "store", "telemetry.kernel_log"):
                if operator.attrgetter(name)(new) != operator.attrgetter(name)(self.config):
                    log.warning("%s changed: it takes effect at the next restart", name)
            self.config = self.engine.config = new
            publisher.config_ok, publisher.config_read = True, time.time()
            log.info("configuration reloaded")
            self._warnings.log(self._exposed())
            self._inventories.look_around()
        publisher.changed()

    def _stop(self, releases: threading.Thread) -> None:
        """End all threads and store what is known. After `STOP` seconds, exit even if some threads still run.

        Every wait has a limit: a worker may be unkillable, or another process may hold the database.
        """
        over, ended, saved = time.monotonic() + STOP, threading.Event(), threading.Event()

        def finish() -> None:
            self.engine.stop()
            self._quit.set()
            self.manager.tell("STOPPING=1", "STATUS=stopping")
            self._server.close()
            self._jobs.scheduler.shutdown(wait=True)
            releases.join()
            ended.set()

        def save() -> None:
            self.engine.watch.history.note_stop()
            ended.wait(over - SAVE - time.monotonic())
            self.store.close()
            saved.set()

        for what in (finish, save):
            threading.Thread(target=what, daemon=True).start()
        if not (saved.wait(over - time.monotonic()) and ended.is_set()):
            unfinished = "a worker did not end" if saved.is_set() else "the database could not be written"
            log.warning("%s within %.0f s; leaving without it", unfinished, STOP)
            logging.shutdown()
            os._exit(0)  # a thread that waits for an unkillable worker must not hold the stop

    # The store

    def _refresh(self) -> None:
        """Read what other processes stored. Then judge again and publish, unless a telemetry sweep has just done so."""
        if self._inventories.pending and not self.engine.halted:  # the inventory that was asked for failed
            self._inventories.look_around()
        self._look()
        self._watchdog.looked = time.monotonic()  # not where the look raises: then the pages must not seem fresh

    def _look(self) -> None:
        seen, self._seen = self._seen, (self.store.changes(), self.store.drills.changes())
        if self.engine.unread:
            self.engine.recall()
        if self.engine.devices and not self.store.problem and self.store.generation != self._generation:
            self._follow_database()
        elsewhere = seen != self._seen
        if elsewhere:
            self.engine.watch.history.recall(time.time())
        self._warnings.log(self.store.problems)
        problem, self._problem = self._problem, self.store.problem
        if self._problem and not problem:
            log.warning("nothing can be stored, what is found waits in memory: %s", self._problem)
        elif problem and not self._problem:
            log.info("the store works again, and has what waited in memory")
        if elsewhere or time.monotonic() - self._inventories.swept > REFRESH:
            self.engine.decide()
            self._publisher.changed()

    def _follow_database(self) -> None:
        """Take the locks of the present database, if it replaced the old one or was mounted after the start."""
        log.warning("%s is another database: taking its locks and looking for devices again", self.store.path)
        self._daemon_lock.close()
        self._take_lock()
        self.engine.watch.disown()
        self._inventories.look_around()

    def _take_lock(self) -> None:
        """Take the lock that tells `canaryd release` that a daemon runs; warn if another daemon holds it."""
        self._generation = self.store.generation
        try:
            self._daemon_lock.enter_context(self.store.lock(DAEMON_LOCK))
        except Busy as busy:
            log.warning("another daemon uses this state directory, and both will test its devices: %s", busy)


def _place_workers() -> None:
    """Put workers into their own control group, if the daemon's group was delegated to it."""
    try:
        group = cgroup.divide()
    except cgroup.Undivided as reason:
        log.info("workers share the limits of the daemon: %s", reason)
    else:
        process.place_workers(group)
        log.info("workers are in the control group %s", group)
