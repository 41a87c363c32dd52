"""`canaryd run`: the clock, the queue of each device, the HTTP routes, and the signals.

The main thread only waits, follows signals and watches the clock. Each device has one queue: a tick asks what is due
and runs it as one series, so that a device never meets two probes at once and nothing piles up. The exposition is
rendered when evidence changes; a scrape copies bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import operator
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor as JobPool
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from canaryd import __version__
from canaryd.config import load, permissions
from canaryd.config.load import ConfigError
from canaryd.config.settings import Config
from canaryd.daemon import systemd
from canaryd.daemon.snapshot import budget_view, fingerprints, is_acknowledged, newest_readings, poll_views, sum_counts
from canaryd.daemon.watchdog import ANSWER, SILENT, STARVED, served, within_reach
from canaryd.engine import budget, schedule
from canaryd.engine.engine import Engine, Progress
from canaryd.judge import acks, case
from canaryd.judge.verdict import fault_rate_bound
from canaryd.metrics import families
from canaryd.metrics.exposition import Exposition, Page
from canaryd.model import Device, Outcome, Run, State, Verdict, printable
from canaryd.probe import LEVELS
from canaryd.report import status, status_page
from canaryd.store import notes
from canaryd.store.locks import Busy
from canaryd.store.notes import DAEMON_LOCK, RELEASE_NOTE, RELEASED_NOTE
from canaryd.store.store import Store
from canaryd.supervisor import cgroup, process
from canaryd.web import auth
from canaryd.web.server import PLAIN_TEXT, Answer, Route, Server

log = logging.getLogger("canaryd")
TICK = 5.0
"""Seconds between two questions to a device's queue whether something is due."""
REFRESH = 15.0
"""Seconds between two looks at what other processes stored and at evidence that has aged."""
REDISCOVER = 3600.0
"""Seconds between two inventories of devices and probes."""
RETRY = 60.0
"""Seconds until the next inventory when one found nothing to test, or that a device is gone. While it stays away it is
looked for after as long again as it was away, an hour at most."""
SUM_UP = 60.0
"""Seconds between two looks for a day that is over and not summed up yet."""
PRUNE = 3600.0
SWEEP = 5.0
"""Shortest time, in seconds, between two sweeps of telemetry."""
TRIGGER_PAUSE, LONGEST_PAUSE = 600.0, 21_600.0
"""Seconds for which a device that was tested out of turn is not tested out of turn again: a crashing application must
not keep it busy. While reasons keep coming the pause doubles, up to the second."""
LOG_RETRY = 60.0
"""Seconds until the kernel log is tried again when it cannot be read."""
STOP = 4.0
"""Seconds that a stop may take before the process leaves without its threads."""
SWITCH = 0.001
"""Seconds for which a thread keeps the interpreter while another waits: no scrape waits until a page is made."""
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
"""What mallopt(3) calls the number of heaps, and the size from which memory is not taken from one: glibc's malloc.h."""
LARGE = 128 << 10
"""That size: glibc begins with it, and raises it to the largest that was ever given back."""
HEED = 1.0
"""Seconds between two looks at what `canaryd release` asks for."""
CLOCK_JUMP = 5.0
"""Seconds by which wall and monotonic clock may part before the jobs are set anew."""
ASIDE = {budget.DOUBT: "confirmation", budget.RETEST: "retest"}
"""What a device is asked for aside from rounds of its own, in words."""


@dataclass
class Health:
    """What /healthz and /readyz answer, prepared when evidence changes."""

    healthy: bool = False
    ready: bool = False
    reasons: tuple[str, ...] = ("no evidence yet",)


class _Period(IntervalTrigger):  # type: ignore[misc]  # APScheduler has no types
    """Every so many seconds, and never a list of all that was missed.

    APScheduler's own makes one entry for each, in memory: after a clock that was set a year ahead, tens of millions.
    """

    def get_next_fire_time(self, previous_fire_time: datetime | None, now: datetime) -> datetime:
        following: datetime = super().get_next_fire_time(previous_fire_time, now)
        return now + self.interval if previous_fire_time is not None and following <= now else following


@dataclass
class Daemon:
    """One running daemon."""

    config: Config
    config_path: Path | None
    store: Store
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the command line gave: they win over every reloaded file too."""
    manager: systemd.Manager = field(default_factory=systemd.Manager)
    """Who started this process and wants to hear of it."""
    engine: Engine = field(init=False)
    _page: Exposition = field(default_factory=lambda: Exposition(Page({})))
    _status: status.Status = field(init=False)
    """What the page shows, gathered when evidence changes: a reader waits neither for a device nor for the store."""
    _health: Health = field(default_factory=Health)
    _turns: dict[tuple[str, ...], int] = field(default_factory=dict)
    """(device, probes that are due together) → how many rounds they had: which instruction set is next."""
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    """(device, probe) → when it last started, by this process."""
    _luck: dict[str, float] = field(default_factory=dict)
    _triggered: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Device → when it was last tested out of turn, by the monotonic clock, and how long not again."""
    _log: threading.Thread | None = None
    _sweep_period: float = 0.0
    _missing: frozenset[str] = frozenset()
    """Devices that are spoken of and that the last inventory did not find."""
    _missed: float = 0.0
    """When one was added to them last, by the monotonic clock."""
    _look_again: bool = False
    """Whether an inventory was asked for since the last one began."""
    _summary: str = ""
    """What the manager's status line says."""
    _looked: float = field(default_factory=time.monotonic)
    """When the last look at the record that succeeded ended, by the monotonic clock."""
    _pulsed: float = 0.0
    """When all that the daemon is for was last seen to work, by the monotonic clock."""
    _judged: float = -REFRESH
    """When a sweep last judged and rendered, by the monotonic clock."""
    _quit: threading.Event = field(default_factory=threading.Event)
    _signals: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    """A signal handler may put into it: unlike an Event, it takes no lock that the interrupted code may hold."""
    _rendering: threading.Lock = field(default_factory=threading.Lock)
    """A page from older evidence must not replace one from newer."""
    _refreshed: float = field(default_factory=time.time)
    _warned: set[str] = field(default_factory=set)
    _said: dict[str, Verdict] = field(default_factory=dict)
    """Device → the verdict that was logged last."""
    _reload_ok: bool = True
    _reloaded: float = 0.0
    _problem: str = ""
    """Of the store, when the log was told of one last."""
    _lost: tuple[float, str] | None = None
    """What the record said of its loss when its locks were taken."""
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """The lock of a running daemon."""
    _jobs: BackgroundScheduler = field(init=False)
    _server: Server = field(init=False)
    _gate: auth.WebConfig | None = None

    def __post_init__(self) -> None:
        """Prepare everything that cannot fail on hardware."""
        self.engine = Engine(
            self.config, self.store, listener=self._progress, on_change=self._render, may=self._may, beside=True
        )
        self._reloaded = time.time()
        self._jobs = BackgroundScheduler(
            timezone=timezone.utc,
            # More threads than there are jobs in "default": none waits for another, however long that one takes.
            executors={"default": JobPool(8), "devices": JobPool(32)},
            # However long the process slept, a job runs once and at once; a running one is not started again.
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        logging.getLogger("apscheduler").setLevel(logging.ERROR)

    # -- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status.

        Raises `OSError` when the address cannot be bound, `ConfigError` when the web configuration cannot be used.
        """
        host, port = self.config.listen
        sys.setswitchinterval(SWITCH)
        _share_one_heap()
        self._gate = auth.WebConfig(self.config.web_config) if self.config.web_config else None
        self._server = server = Server(host, port, self._routes(), gate=self._gate)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._divide()
        self.engine.recall()
        self.engine.watch.runs(running=True)
        self._render()
        server.start()
        log.info(
            "canaryd %s serves %s://%s:%d/metrics; state in %s",
            __version__,
            "https" if self._gate and self._gate.tls else "http",
            host,
            server.port,
            self.config.state_dir,
        )
        self._warn(self._exposed())
        self.manager.tell("READY=1", f"STATUS={self._summary}")
        self._look_around()
        self._every(REFRESH, self._refresh, "refresh")
        heeding = threading.Thread(target=self._heed, name="canaryd-release", daemon=True)
        if self.manager.watchdog:
            address = within_reach(host, server.port)
            self._every(self.manager.watchdog / 4, lambda: self._pulse(address), "pulse", now=True)
        self._every(PRUNE, lambda: self.store.prune(time.time()), "prune")
        self._every(SUM_UP, self.engine.sum_up, "days")
        with self._alone():
            self._heed_release()
            self._jobs.start()
            heeding.start()
            self._watch()
        log.info("stopping")
        self.manager.tell("STOPPING=1", "STATUS=stopping")
        self._stop(server, heeding)
        return 0

    def _exposed(self) -> Iterator[str]:
        """Say what strangers may read: the address, the keys of endpoints, the evidence."""
        gate, (host, port) = self._gate, self.config.listen
        where = f"listening on {host or 'every interface'}, port {self._server.port or port}"
        if not self._server.local and not (gate and (gate.tls or gate.authenticates)):
            yield f"{where}, without TLS and without passwords: who reaches it reads everything; see web_config"
        elif not self._server.local and gate and gate.passwords and not gate.tls:
            yield f"{where}, with passwords but without TLS: they can be read on their way; see tls_server_config"
        for endpoint in self.config.endpoints.each.values():
            if endpoint.key_file and (text := permissions.exposure(endpoint.key_file)):
                yield f"{endpoint.key_file}: {text}"
        if text := permissions.exposure(self.config.state_dir):
            yield f"{self.config.state_dir}: {text}"

    def _on_signal(self, number: int, frame: Any) -> None:  # noqa: ARG002  the signature is Python's
        self._signals.put(number)

    def _divide(self) -> None:
        """Put workers into a control group of their own, where the daemon was given one to divide."""
        try:
            group = cgroup.divide()
        except cgroup.Undivided as reason:
            log.info("workers share the limits of the daemon: %s", reason)
        else:
            process.place_workers(group)
            log.info("workers are in the control group %s", group)

    def _watch(self) -> None:
        """Follow signals and the clock, and tell the manager of it. Nothing but a reload touches the store here."""
        offset = time.time() - time.monotonic()
        fed, said = 0.0, self._summary
        while True:
            with contextlib.suppress(queue.Empty):
                signals = {self._signals.get(timeout=1.0)}
                while not self._signals.empty():  # however many SIGHUPs came: one reload, and no stop waits for them
                    signals.add(self._signals.get_nowait())
                if signals != {signal.SIGHUP}:
                    return
                self.manager.tell(*systemd.reloading())
                self._reload()
                self.manager.tell("READY=1")
            if self._pulsed > fed:
                fed = self._pulsed
                self.manager.tell("WATCHDOG=1")
            if self._summary != said:
                said = self._summary
                self.manager.tell(f"STATUS={said}")
            drift = time.time() - time.monotonic() - offset
            if abs(drift) > CLOCK_JUMP:
                # The scheduler reckons in wall time: after a jump back it would sleep until the old hour returns.
                log.warning("the clock jumped by %+.0f s; jobs are set anew", drift)
                offset += drift
                for job in self._jobs.get_jobs():
                    job.modify(next_run_time=datetime.now(timezone.utc))

    def _pulse(self, address: tuple[str, int] | None) -> None:
        """Note that the daemon works: the scheduler runs this, the record is looked at, and HTTP clients are served.

        docs/systemd.md tells what may hang without an end of the pulse, and why.
        """
        since = time.monotonic() - self._looked
        if since > STARVED:
            log.error("no look at the record has succeeded for %.0f s: the watchdog is not fed", since)
        elif address is not None and not served(address):
            log.error("the HTTP server did not answer within %.0f s: the watchdog is not fed", ANSWER)
        else:
            self._pulsed = time.monotonic()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock that tells `canaryd release` that a daemon runs; a second daemon is warned about."""
        with self._held:
            self._claim()
            yield

    def _claim(self) -> None:
        self._lost = self.store.lost
        try:
            self._held.enter_context(self.store.lock(DAEMON_LOCK))
        except Busy as busy:
            log.warning("another daemon uses this state directory, and both will test its devices: %s", busy)

    def _heed(self) -> None:
        """Look for a release each second: as jobs of the scheduler they would cost more than they do."""
        while not self._quit.wait(HEED):
            with _going_on("release"):
                self._heed_release()

    def _heed_release(self) -> None:
        """Let go of every device, or take them back, as `canaryd release` has asked for; answer when it is done."""
        engine, wanted = self.engine, self.store.note(RELEASE_NOTE)
        until = float(wanted or 0.0)
        if until > time.time():
            clock = f"{datetime.fromtimestamp(until, tz=timezone.utc).astimezone():%Y-%m-%d %H:%M:%S}"
            if not engine.released:
                log.info("released until %s: no device is touched", clock)
                threading.Thread(target=engine.release, args=(f"released until {clock} by canaryd release",)).start()
            elif not engine.holds and self.store.note(RELEASED_NOTE) != wanted:
                self.store.set_note(RELEASED_NOTE, wanted)
                self._render()
        elif engine.released:
            log.info("the release is over: devices are tested again")
            engine.take_back()
            self._render()
            self.store.set_note(RELEASED_NOTE, "")
            self._look_around()

    def _stop(self, server: Server, heeding: threading.Thread) -> None:
        self.engine.stop()
        self._quit.set()
        self.engine.watch.runs(running=False)
        server.close()
        done = threading.Event()

        def finish() -> None:
            self._jobs.shutdown(wait=True)
            heeding.join()
            done.set()

        threading.Thread(target=finish, daemon=True).start()
        if not done.wait(STOP):
            log.warning("a worker did not end within %.0f s; leaving without it", STOP)
            self.store.close()
            logging.shutdown()
            os._exit(0)  # a thread that waits for an unkillable worker must not hold the stop
        self.store.close()

    def _every(
        self, seconds: float, what: Callable[[], object], name: str, *, now: bool = False, pool: str = "default"
    ) -> None:
        def safely() -> None:
            with _going_on(name):
                what()

        extra = {"next_run_time": datetime.now(timezone.utc)} if now else {}
        trigger = _Period(seconds=seconds, timezone=timezone.utc)
        self._jobs.add_job(safely, trigger, id=name, replace_existing=True, executor=pool, **extra)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Ask for an inventory now; one that is being taken may be too old, and is followed by another."""
        self._look_again = True
        self._every(REDISCOVER, self._discover, "discover", now=True)

    def _discover(self) -> None:
        self._look_again = True
        while self._look_again and not self.engine.halted:  # the scheduler drops what falls due while this runs
            self._look_again = False
            self._take_inventory()

    def _take_inventory(self) -> None:
        self.engine.discover()
        self._warn(self.engine.problems)
        for uuid in self.engine.devices:
            name = f"device {uuid}"
            if self._jobs.get_job(name) is None:
                self._recall_spent(uuid)
                self._every(TICK, lambda uuid=uuid: self._tick(uuid), name, now=True, pool="devices")  # type: ignore[misc]
        periods = self.engine.telemetry_periods().values()
        if periods and min(periods) != self._sweep_period:
            self._sweep_period = min(periods)
            self._every(max(SWEEP, self._sweep_period), self._sweep, "telemetry", now=True, pool="devices")
        if self._log is None and self.engine.devices:  # a line is told of a device: not before any is known
            follower = threading.Thread(target=self._follow, name="canaryd-kernel-log", daemon=True)
            follower.start()  # where there may be no further thread, the next inventory tries again
            self._log = follower
        self._every(self._patience(), self._discover, "discover")
        self._refresh()

    def _patience(self) -> float:
        """Return the seconds to the next inventory."""
        missing, now = frozenset(self.engine.devices.keys() - self.engine.present), time.monotonic()
        if missing - self._missing:
            self._missed = now
        self._missing = missing
        if not (self.engine.present and self.engine.entries):
            return RETRY
        return min(max(RETRY, now - self._missed), REDISCOVER) if missing else REDISCOVER

    def _sweep(self) -> None:
        """Poll the telemetry of every device; what it shows is exported at once."""
        if self.engine.halted:
            return
        self.engine.sweep(due=True)
        self._render()
        self._judged = time.monotonic()

    def _follow(self) -> None:
        """Read the kernel log for as long as the daemon runs; a reader that dies is replaced."""
        while not self.engine.stopping:
            problem = ""
            try:
                self.engine.read_log(until_end=False)
            except Exception:
                log.exception("reading the kernel log failed; it is tried again")
                problem = "see the log of canaryd"
            if not self.engine.stopping:
                if problem := problem or self.engine.watch.log_problem:
                    self._warn([f"kernel log: {problem}"])
                    self._render()
                self._quit.wait(LOG_RETRY if problem else SWEEP)

    def _tick(self, uuid: str) -> None:
        """Run what is due on one device as one series per instruction set."""
        engine, settings = self.engine, self.config.schedule
        device = engine.devices.get(uuid)
        if device is None or uuid not in engine.present or engine.halted or not engine.reached(device):
            self._release(uuid)
            return
        periods = engine.periods(device)
        numeric = [name for name in periods if engine.entries[name].spec.numeric]
        if not numeric:
            self._release(uuid)
        try:
            self._carry_out(device, engine.owed(uuid), budget.DOUBT)
            self._carry_out(device, engine.retests(uuid), budget.RETEST)
        except Busy as busy:
            log.info("%s: confirmations and retests wait: %s", device.name, busy)
            return
        luck = self._luck.setdefault(uuid, random.random())
        last = {name: self._last[uuid, name] for name in periods if (uuid, name) in self._last}
        if not settings.run_at_start:
            for name in periods:
                last.setdefault(name, self._last.setdefault((uuid, name), time.time()))
        names = due = schedule.due(last, periods, now=time.time(), jitter=settings.jitter, luck=luck)
        hindered = numeric and uuid in engine.watch.triggers and self._waits(device, budget.DOUBT)
        trigger = "" if hindered else self._trigger(uuid)
        purpose = budget.DOUBT
        if trigger:
            log.info("%s: tested out of turn: %s", device.name, trigger)
            names = due = numeric
        else:
            names, purpose = self._within_budget(device, due, periods)
        if not names:
            return
        group = (uuid, *names)
        turn = self._turns.get(group, 0)
        levels = {n: level for n, level in engine.levels().items() if n in names}
        plans = schedule.plan_round(
            device,
            [engine.entries[n] for n in names],
            levels=levels,
            seed=schedule.new_seed(),
            trigger=trigger,
            sets=schedule.instruction_sets(device, max(levels.values(), key=LEVELS.index), turn),
        )
        started, before = time.time(), engine.account.spent(uuid)
        try:
            for plan in plans:
                engine.carry_out(plan, purpose=purpose)
        except Busy as busy:
            log.info("%s: %s; trying again in %.0f s", device.name, busy, TICK)
            return
        finally:
            self._render()
        if any(plan.numeric for plan in plans) and names == due:  # of a part that was forced, the rest waits on
            if purpose == budget.DOUBT:  # no share was spent, and what a round costs is not known by it
                engine.account.release(uuid)
            else:
                engine.account.took(uuid, tuple(names), max(0.0, engine.account.spent(uuid) - before))
            self._tell_withheld()
        self._turns[group] = turn + 1
        self._luck[uuid] = random.random()
        for name in names:
            self._last[uuid, name] = started

    # -- the budget ---------------------------------------------------------------------------------------------------

    def _within_budget(self, device: Device, names: list[str], periods: Mapping[str, float]) -> tuple[list[str], str]:
        """Return which of the probes that are due may run now, and what their time is booked on.

        All that load the device wait together. One whose evidence would grow too old runs all the same, and alone: what
        was tried without success counts as well, so that a probe that never completes is no way around the budget.
        """
        engine, policy = self.engine, self.config.budget
        loading = [n for n in names if engine.entries[n].spec.numeric and not device.is_endpoint]
        if not loading:
            return names, budget.ROUND
        facts = self._facts(device, self._expected(device.uuid, tuple(names)))
        if budget.wait(policy, facts, budget.ROUND) is None:
            return names, budget.ROUND
        young = {
            n
            for n in loading
            if self._asked(device.uuid, n) < budget.oldest(policy, case.freshness(self.config.judge, periods[n]))
        }
        purpose = budget.FORCED if young < set(loading) else budget.ROUND
        if self._waits(device, purpose, facts):
            return [n for n in names if n not in loading], budget.ROUND
        return [n for n in names if n not in young], purpose

    def _asked(self, uuid: str, probe: str) -> float:
        """Return the seconds since a probe was last asked, whatever became of it; infinite for never."""
        runs = (r for r in self.engine.evidence(uuid) if r.probe == probe and r.whole and not r.drill)
        now = time.time()
        return min((case.age(r, now) for r in runs), default=math.inf)

    def _expected(self, uuid: str, names: tuple[str, ...]) -> float:
        """Return what a round of these probes may take: as the newest took, or else as their newest runs did."""
        if cost := self.engine.account.cost(uuid, names):
            return cost
        newest = {r.probe: r.seconds for r in self.engine.evidence(uuid) if r.whole and not r.drill}
        return budget.worked(sum(newest.get(n, 0.0) for n in names if self.engine.entries[n].spec.numeric))

    def _facts(self, device: Device, expected: float = 0.0) -> budget.Facts:
        engine, now = self.engine, time.time()
        return budget.facts(
            device,
            engine.watch.readings(device.uuid, now),
            engine.watch.readings(device.parent, now) if device.parent else (),
            now=now,
            spent=engine.account.spent(device.uuid),
            expected=expected,
        )

    def _waits(self, device: Device, purpose: str, facts: budget.Facts | None = None) -> bool:
        """Whether something that is due has to wait; that and why is logged, counted and told."""
        found = budget.wait(self.config.budget, facts or self._facts(device), purpose)
        if found and self.engine.account.withhold(device.uuid, found, time.time()):
            log.info("%s: put off: %s", device.name, found.text)
            self._tell_withheld()
            self._render()
        return found is not None

    def _may(self, device: Device, purpose: str) -> bool:
        """Whether a device may be loaded that something of another one, or of a run just now, asks for."""
        if found := budget.wait(self.config.budget, self._facts(device), purpose):
            log.info("%s: not asked for a %s: %s", device.name, ASIDE[purpose], found.text)
        return found is None

    def _carry_out(self, device: Device, plans: Sequence[schedule.Plan], purpose: str) -> None:
        if plans and not self._waits(device, purpose):
            for plan in plans:
                if plan.device.uuid == device.uuid or self._may(plan.device, purpose):
                    self.engine.carry_out(plan, purpose=purpose)
            self._release(device.uuid)

    def _release(self, uuid: str) -> None:
        """Note that nothing waits on a device: it has run, or there is nothing left that could."""
        if self.engine.account.withheld(uuid) and not self.engine.stopping:
            self.engine.account.release(uuid)
            self._tell_withheld()
            self._render()

    def _tell_withheld(self) -> None:
        """Leave word for `canaryd status` of what waits, where that has changed."""
        held = {u: self.engine.account.withheld(u) for u in self.engine.devices}
        told = {u: {"since": h.since, "text": h.wait.text} for u, h in held.items() if h is not None}
        text = json.dumps(told) if told else ""
        if self.store.note(notes.BUDGET_NOTE) != text:
            self.store.set_note(notes.BUDGET_NOTE, text)

    def _recall_spent(self, uuid: str) -> None:
        """Count what the last hour's runs took before this process: a restart is no way around the budget."""
        now = time.time()
        for run in self.engine.evidence(uuid):
            age, entry = max(0.0, case.age(run, now)), self.engine.entries.get(run.probe)
            of_round = not (run.drill or run.confirms or run.intensity)
            if age < budget.HOUR and of_round and entry is not None and entry.spec.numeric:
                self.engine.account.recall(uuid, budget.worked(run.seconds), age)

    def _trigger(self, uuid: str) -> str:
        """Return why a device should be tested now, once, and not again too soon; "" where nothing calls for it."""
        now = time.monotonic()
        last, pause = self._triggered.get(uuid, (now - LONGEST_PAUSE, 0.0))
        if uuid not in self.engine.watch.triggers or now - last < pause:
            return ""
        again = 2 * pause if now - last < 2 * pause else TRIGGER_PAUSE
        self._triggered[uuid] = (now, min(again, LONGEST_PAUSE))
        return self.engine.watch.triggers.pop(uuid)

    def _progress(self, progress: Progress) -> None:
        """Log a finished run and show it at once: a suspect is not kept back until it is confirmed."""
        run = progress.done
        if run is None:
            return
        level = logging.INFO if run.outcome is Outcome.COMPLETED and not run.wrong else logging.WARNING
        wrong = f", {len(run.wrong)} comparisons WRONG" if run.wrong else ""
        first = run.detail.splitlines()[0] if run.detail else ""
        detail = f": {first}" if first and run.outcome is not Outcome.COMPLETED else ""
        what = f"{progress.device.name} {run.probe}{' (confirmation)' if run.confirms else ''}"
        log.log(level, "%s %s %s: %d results%s%s", run.id, what, run.outcome.value, run.trials, wrong, detail)
        self._render()

    def _refresh(self) -> None:
        """Take what other canaryd processes stored; judge again (evidence ages) and render, unless a sweep just did."""
        if self._look_again and not self.engine.halted:  # what was asked for was dropped, or failed
            self._look_around()
        self._look()
        self._looked = time.monotonic()  # of one that failed nothing new is shown: what was prepared must not look so

    def _look(self) -> None:
        mine = {r.id for uuid in self.engine.devices for r in self.engine.evidence(uuid)}
        # A second look at the recent past: what is being written now may become visible after this.
        since, self._refreshed = self._refreshed - REFRESH, time.time()
        for run in self.store.runs(since=since, drill=None):
            if run.id not in mine and run.device in self.engine.devices:
                self.engine.take(run)
        if self.engine.devices and not self.store.problem and self.store.lost != self._lost:
            self._begin_anew()
        elsewhere = self.store.changed_elsewhere()
        if elsewhere:
            self.engine.watch.recall(time.time())
        self._warn(self.store.problems)
        problem, self._problem = self._problem, self.store.problem
        if self._problem and not problem:
            log.warning("nothing can be stored, what is found waits in memory: %s", self._problem)
        elif problem and not self._problem:
            log.info("the store works again, and has what waited in memory")
        if elsewhere or time.monotonic() - self._judged > REFRESH:
            self.engine.decide()
            self._render()

    def _begin_anew(self) -> None:
        """Make this daemon's record and its locks again: they were removed while it ran, or set aside as damaged."""
        log.warning("%s was begun anew: its locks are taken, and devices are looked for again", self.store.path)
        self._held.close()
        self._claim()
        self.engine.watch.disown()
        self._look_around()

    def _warn(self, problems: Iterable[str]) -> None:
        """Log each problem once."""
        for problem in problems:
            if problem not in self._warned:
                log.warning("%s", problem)
                self._warned.add(problem)

    def _reload(self) -> None:
        try:
            new = replace(load.load(self.config_path), **self.overrides)
            if new.web_config != self.config.web_config:
                self._gate = auth.WebConfig(new.web_config) if new.web_config else None
                self._server.guard(self._gate)
        except ConfigError as error:
            self._reload_ok = False
            for problem in [*error.problems, "the new configuration is bad; the old one stays in force"]:
                log.error("%s", problem)  # noqa: TRY400  a mistake in a file, not a traceback
        else:
            for name in ("listen", "state_dir", "store", "telemetry.kernel_log"):
                if operator.attrgetter(name)(new) != operator.attrgetter(name)(self.config):
                    log.warning("%s changed: it takes effect at the next restart", name)
            self.config = self.engine.config = new
            self._reload_ok, self._reloaded = True, time.time()
            log.info("configuration reloaded")
            self._warn(self._exposed())
            self._look_around()
        self._render()

    # -- what is served -----------------------------------------------------------------------------------------------

    def _routes(self) -> dict[str, Route]:
        def health(_: object) -> Answer:
            state = self._health
            text = "ok\n" if state.healthy else "".join(f"{reason}\n" for reason in state.reasons)
            return Answer(200 if state.healthy else 503, PLAIN_TEXT, text.encode())

        def ready(_: object) -> Answer:
            text = b"ready\n" if self._health.ready else b"waiting for a first run on every device\n"
            return Answer(200 if self._health.ready else 503, PLAIN_TEXT, text)

        routes: dict[str, Route] = {
            "/": lambda _: Answer(200, status_page.CONTENT_TYPE, status_page.render(self._status, time.time())),
            "/metrics": lambda headers: families.answer(self._page, headers),
            "/healthz": health,
            "/readyz": ready,
        }
        return {path: self._while_it_looks(route) for path, route in routes.items()}

    def _while_it_looks(self, route: Route) -> Route:
        """Return a route that answers 503 while the daemon hangs: what was prepared before is no news of a device."""

        def guarded(headers: Mapping[str, str]) -> Answer:
            since = time.monotonic() - self._looked
            if since <= SILENT:
                return route(headers)
            text = f"canaryd hangs: its last good look at the record was {since:.0f} s ago; read its log, restart it\n"
            return Answer(503, PLAIN_TEXT, text.encode())

        return guarded

    def _render(self) -> None:
        with self._rendering:
            self._render_alone()

    def _render_alone(self) -> None:
        engine = self.engine
        now = time.time()
        if self._gate:
            self._gate.refresh()  # a bad certificate shows in the metrics before somebody needs the good one
        verdicts, said = self.store.verdicts(), acks.heeded(self.store.acks(), now)
        self._tell(verdicts)
        self._summary = self._sum_up(verdicts)
        polled = engine.telemetry_periods()
        views, reasons = [], []
        for uuid, device in sorted(engine.devices.items()):
            runs = list(engine.evidence(uuid))
            plain = [r for r in runs if not r.drill]
            present = uuid in engine.present
            polls = engine.watch.polls(uuid)
            lanes = {(r.probe, r.instruction_set): r for r in plain}.values()
            ack = acks.standing([a for a in said if a.device == uuid], now)
            views.append(
                families.DeviceView(
                    device=device,
                    present=uuid in engine.in_place,
                    verdict=verdicts.get(uuid),
                    drill_verdict=engine.drill_verdict(uuid) if len(plain) < len(runs) else None,
                    last_runs={r.probe: r for r in plain},
                    last_success={
                        r.probe: r.started
                        for r in plain
                        if r.outcome is Outcome.COMPLETED and (r.trials or r.recordings) and not (r.wrong or r.unknown)
                    },
                    fault_rate=fault_rate_bound(plain),
                    fingerprints=fingerprints(plain),
                    periods=engine.periods(device),
                    stacks={r.stack_id: r.stack for r in lanes if r.stack},
                    mismatches={r.probe: r for r in plain if r.wrong},
                    acknowledged=is_acknowledged(ack, verdicts.get(uuid)),
                    acknowledged_at=ack.at if ack else None,
                    polls=poll_views(polls, polled),
                    readings=(*engine.watch.readings(uuid, now), *newest_readings(device, plain)),
                    drifts=engine.drifts(uuid),
                    budget=None if device.is_endpoint else budget_view(engine.account, uuid),
                )
            )
            if present:
                reasons += self._stale(uuid, plain, now)
        fresh = bool(engine.present) and not reasons
        ran = {r.device for uuid in engine.devices for r in engine.evidence(uuid) if not r.drill}
        self._health = Health(
            healthy=fresh,
            ready=bool(engine.present and ran)
            and {u for u in engine.present if engine.reached(engine.devices[u])} <= ran,
            reasons=tuple(reasons) or (*engine.problems, "no device was found yet"),
        )
        self._page = families.render(
            families.Snapshot(
                version=__version__,
                devices=views,
                counters=sum_counts(self.store.counters(), engine.watch.uncounted()),
                store_problem=self.store.problem,
                abandoned_workers=process.abandoned(),
                config_reload_ok=self._reload_ok and not (self._gate and self._gate.problems),
                config_reloaded=self._reloaded,
                expected_devices=self.config.devices.expected,
                log_readable=not engine.watch.log_problem,
                log_lost=engine.watch.log_lost["lost"],
                handles_held=engine.watch.holding,
                released=bool(engine.released),
                share=self.config.budget.share,
            )
        )
        self._status = status.gather(
            self.store, self.config, now, daemon=True, evidence={uuid: self._newest(uuid) for uuid in engine.devices}
        )

    def _sum_up(self, verdicts: Mapping[str, Verdict]) -> str:
        """Return the state of all devices in place as one line, e.g. "8 devices: 7 healthy, 1 suspect"."""
        found = [verdicts[u].state if u in verdicts else State.UNKNOWN for u in sorted(self.engine.in_place)]
        counts = ", ".join(f"{found.count(state)} {state.value}" for state in State if state in found)
        what = f"{len(found)} device{'s' * (len(found) != 1)}: {counts}" if found else "no device was found yet"
        problems = () if self._reload_ok else ("the new configuration is bad, the old one is in force",)
        return "; ".join(filter(None, [what, self.engine.released, self.store.problem, *problems]))

    def _newest(self, uuid: str) -> dict[str, float | None]:
        """Return when each probe of a device last gave evidence, as `status.gather` takes it."""
        found: dict[str, float | None] = dict.fromkeys(self.engine.periods(self.engine.devices[uuid]))
        for run in self.engine.evidence(uuid):
            if run.outcome is Outcome.COMPLETED and run.whole and not run.drill:
                found[run.probe] = max(found.get(run.probe) or 0.0, run.started)
        polls = self.engine.watch.polls(uuid)
        return found | {name: poll.completed.started if poll.completed else None for name, poll in polls.items()}

    def _tell(self, verdicts: Mapping[str, Verdict]) -> None:
        """Log each change of a device's state or cause, and each finding that is new."""
        for uuid, verdict in verdicts.items():
            if uuid not in self.engine.devices:
                continue
            before, name = self._said.get(uuid), self.engine.devices[uuid].name
            self._said[uuid] = verdict
            if before is None or (before.state, before.cause) != (verdict.state, verdict.cause):
                was = f"{before.state.value} → " if before else ""
                level = logging.INFO if verdict.state is State.HEALTHY else logging.WARNING
                log.log(level, "%s %s: %s%s, cause %s", name, uuid, was, verdict.state.value, verdict.cause.value)
            known = {(f.rule, f.probe, f.state) for f in before.findings} if before else set()
            for finding in verdict.findings:
                if (finding.rule, finding.probe, finding.state) not in known:
                    level = logging.INFO if finding.state is State.HEALTHY else logging.WARNING
                    log.log(level, "%s %s: %s", name, finding.rule, printable(finding.message))

    def _stale(self, uuid: str, runs: list[Run], now: float) -> list[str]:
        """Say which probes of a device have no fresh evidence; the limits are the judge's."""
        device = self.engine.devices[uuid]
        reasons = []
        for probe, period in self.engine.periods(device).items():
            ages = [case.age(r, now) for r in runs if r.probe == probe and r.outcome is Outcome.COMPLETED and r.whole]
            limit = case.freshness(self.config.judge, period)
            if not ages:
                reasons.append(f"{device.name} {probe}: no evidence yet")
            elif (age := min(ages)) == math.inf:
                reasons.append(f"{device.name} {probe}: all evidence is dated in the future")
            elif age > limit:
                reasons.append(f"{device.name} {probe}: newest evidence is {age:.0f} s old, wanted {limit:.0f} s")
        return reasons


@contextlib.contextmanager
def _going_on(what: str) -> Iterator[None]:
    """Log what fails within, and go on."""
    try:
        yield
    except Exception:
        log.exception("%s failed; the daemon goes on", what)


def _share_one_heap() -> None:
    """Let all threads take memory from one heap: glibc gives each its own, and none of them ever shrinks.

    Pages and messages stay out of it: they would leave holes that nothing else fills, and whatever is allocated behind
    one keeps the heap that long.

    No thread waits for another because of it: they take turns at the interpreter anyway. Other C libraries have one
    heap, and no such function. benchmarks/results/footprint.md says what is used.
    """
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
