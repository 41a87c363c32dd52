"""The one path from a plan to a verdict, shared by `canaryd check`, `canaryd drill` and `canaryd run`.

Discover devices and probes through a worker; carry a series out under the device's lock; store each run; confirm what
was wrong; judge. Everything that waits on hardware happens in a worker; nothing here can hang on a driver.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from canaryd.config.settings import Config, EndpointConfig, ProbeSettings
from canaryd.engine import budget, catalogue, endpoints, inventory, schedule
from canaryd.engine.catalogue import Entry
from canaryd.engine.decisions import REJUDGED, news
from canaryd.engine.evidence import FAILURES, FEW, NEWEST, RECORD, SHOWN, expired, fold, last_pass, without_recordings
from canaryd.engine.polling import Task, Watch
from canaryd.engine.schedule import Plan, Step
from canaryd.judge import acks
from canaryd.judge import verdict as judge_verdict
from canaryd.judge.case import DRILL_EXPIRY, Node, node
from canaryd.judge.recordings import drift, intake, rules
from canaryd.judge.recordings.baseline import Baseline, Key, key_of
from canaryd.judge.recordings.drift import Drift
from canaryd.judge.recordings.record import Peer, Record
from canaryd.judge.telemetry.signals import Signs
from canaryd.judge.trends import days
from canaryd.judge.trends.rules import findings
from canaryd.model import (
    DATED,
    ENDPOINT,
    INTENSITIES,
    Ack,
    Device,
    Finding,
    Outcome,
    Run,
    State,
    Verdict,
)
from canaryd.probe import ProbeSpec
from canaryd.store.locks import Busy
from canaryd.store.store import DOUBTED, STEP, Store
from canaryd.supervisor import process
from canaryd.supervisor.protocol import RunRequest, WorkerSpec
from canaryd.supervisor.series import Series

LEARNING = 2
"""Runs of an endpoint that may follow one at once: to learn a chain, and to compare with what was learnt."""
TRIES = 3
"""Times the confirmations that are wanted after which those that do not complete are given up."""
STACK_BEHIND = ("driver", "cuda", "vbios", "gsp_firmware", "kernel")
"""What devices and host say of themselves that a server's numbers may depend on."""
VENDORS = ("host", *inventory.BACKENDS)
"""Modules of the worker that list devices, in the order in which they are asked; each has a probe NAME_telemetry."""
DAY, HOUR = 86_400.0, 3600.0
BACK = 14
"""Days back for which runs and polls are kept, and so can be summed up."""
SEEN = 90 * DAY
"""Seconds back for which summaries are looked at: more than the rules of docs/judgement.md ask for."""
STOPPED = "stopped: "
"""How the detail of a run begins that canaryd itself cut short; such a run is no evidence and is not stored."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a long command tells its reader."""

    device: Device
    instruction_set: str
    probe: str
    fraction: float
    text: str
    done: Run | None = None
    """The finished run, when one has just finished."""


Listener = Callable[[Progress], None]
T = TypeVar("T")


@dataclass
class Engine:
    """Devices, probes and evidence of this host, and how to add to them."""

    config: Config
    store: Store
    listener: Listener = lambda _: None
    on_change: Callable[[], None] = lambda: None
    """Called when something other than a run has changed what is known."""
    may: Callable[[Device, str], bool] = lambda _, __: True
    """Asked before each confirmation whether that device may be loaded for that purpose just now."""
    clock: Callable[[], float] = time.time
    devices: dict[str, Device] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    """Probes that a restricted check asked for; its verdicts are about them alone and are not stored."""
    cases: tuple[str, ...] = ()
    """Cases that it asked for, likewise."""
    intensity: str = ""
    """How hard it asked, likewise."""
    beside: bool = False
    """Whether the devices serve meanwhile, so that runs keep to the budget; a check has them to itself."""
    account: budget.Account = field(default_factory=budget.Account)
    problems: list[str] = field(default_factory=list)
    """What is wrong with the catalogue or the stack under test, one sentence each."""
    failing: dict[str, str] = field(default_factory=dict)
    """Vendor of whom something is installed → why it could not be asked for devices."""
    present: set[str] = field(default_factory=set)
    in_place: set[str] = field(default_factory=set)
    """Devices that the last inventory which succeeded found, be it before a restart."""
    _last_seen: dict[str, float] = field(default_factory=dict)
    _recalled: set[str] = field(default_factory=set)
    """Probes whose newest runs have been read from the store."""
    _evidence: dict[str, list[Run]] = field(default_factory=dict)
    _mismatched: frozenset[str] = frozenset()
    """Devices with a mismatch on record."""
    _doubted: frozenset[str] = frozenset()
    """Devices against which something spoke when the verdicts were read last: they witness nothing."""
    _baselines: dict[str, dict[Key, Baseline]] = field(default_factory=dict)
    _imported: tuple[Baseline, ...] = ()
    """Baselines of devices that are not of this host."""
    _acks: dict[str, tuple[Ack, ...]] = field(default_factory=dict)
    _courses: dict[str, dict[days.Key, days.Course]] = field(default_factory=dict)
    """Device → its readings day by day."""
    _behind: float = 0.0
    """Seconds that are added to the clock while it stands far before a time that has come for certain."""
    _said: tuple[Ack, ...] = ()
    """All words that count."""
    _trends: dict[str, tuple[int, tuple[Finding, ...]]] = field(default_factory=dict)
    """Device → the day on which its days were looked at, and what was found."""
    _as_of: object = None
    """What the store said of other writers when baselines and acks were read; None where they have to be."""
    _recorded: dict[str, tuple[float, tuple[Finding, ...], tuple[Drift, ...]]] = field(default_factory=dict)
    """Device → when its recordings were judged, and what was found; emptied when one is added."""
    _series: dict[Series, bool] = field(default_factory=dict)
    """Workers at large → whether they may touch a device."""
    stopping: str = ""
    """Why `stop` was called; "" until then."""
    released: str = ""
    """Why no device may be touched just now; "" when they may."""
    watch: Watch = field(init=False)
    _mutex: threading.RLock = field(default_factory=threading.RLock)
    _workers: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_series`; never held while anything waits, so that `stop` is heard at once."""

    def __post_init__(self) -> None:
        """Begin to watch; nothing is touched yet."""
        self.watch = Watch(self.store, lambda: self.config, lambda: self._worker("", numeric=False), self._end)
        self.watch.heard = self._heard

    @property
    def restricted(self) -> bool:
        """Whether only a part was asked for, which says nothing about the rest."""
        return bool(self.only or self.cases or self.intensity)

    def _heard(self) -> None:
        self.decide()
        self.on_change()

    # -- discovery ----------------------------------------------------------------------------------------------------

    def discover(self) -> None:
        """Find probes and devices through workers, and notice what changed since the last time.

        What a silent worker cannot tell stays as it was. A device that is gone stays known, and not present, until it
        has been away for as long as the judge watches a suspect.
        """
        enabled = [name for name, probe in self.config.probes.each.items() if probe.enabled]
        files, problems = catalogue.find(self.config.probes.directories, enabled)
        listing = self._ask(lambda series: series.inventory(self._vendor_settings()), numeric=False)
        described = self._ask(lambda series: series.describe([f.path for f in files]), numeric=True)
        entries, more = catalogue.load(files, described.probes)
        unknown = [name for name in self.config.probes.each if name not in {f.name for f in files}]
        with self._mutex:
            if self.halted:
                return
            if entries or not files:
                self.entries = {n: e for n, e in entries.items() if self._wanted(e.spec)}
            self.problems = [str(p) for p in [*problems, *more]]
            self.problems += [f"probes.{name}: no probe of that name was found" for name in unknown]
            if described.torch is None and described.torch_reason:
                self.problems.append(described.torch_reason)
            self.problems += listing.problems
            self.failing = dict(listing.failing)
            here = {r.device.uuid for r in self.store.devices() if r.present}
            self._take_inventory(inventory.merge(described, listing, self._known(), here), here)

    def _take_inventory(self, found: inventory.Found, here: Collection[str]) -> None:
        now, known = self.clock(), self._known()
        devices = [d for d in found.devices if self._included(d)]
        devices += endpoints.listed(self.config, devices)
        self.present = {d.uuid for d in devices}
        if devices:
            records = {r.device.uuid: r for r in self.store.devices()}
            kept = {u for u, r in records.items() if r.present and r.device.backend in found.uncertain}
            gone = [r.device for u, r in records.items() if r.present and u not in self.present | kept]
            gone = [d for d in gone if self._included(d) and inventory.PLACEHOLDER not in d.detail]
            for device in devices:
                self.store.see_device(device, now)
            self.store.set_present(self.present | kept, now)
            self.watch.changed(inventory.changes(known, here, devices, gone, now))
        self.recall()
        self._last_seen = {r.device.uuid: r.last_seen for r in self.store.devices()}

    def _known(self) -> dict[str, Device]:
        return {r.device.uuid: r.device for r in self.store.devices()}

    def _ask(self, question: Callable[[Series], T], *, numeric: bool) -> T:
        series = self._worker("", numeric=numeric)
        try:
            return question(series)
        finally:
            self._end(series)

    def _vendor_settings(self) -> dict[str, Mapping[str, object]]:
        """Return the vendors to be asked for devices, with the settings of their probes; disabled ones are not."""
        named = {name: self.settings(f"{name}_telemetry") for name in VENDORS}
        return {name: settings.settings for name, settings in named.items() if settings.enabled is not False}

    def recall(self) -> None:
        """Take up what the store knows of devices and runs: what was faulty stays so before anything is looked at."""
        with self._mutex:
            now = self.clock()
            known = self.store.devices()
            here = {r.device.uuid for r in known if r.present} | self.present
            said = acks.heeded(self.store.acks(), now)
            found = self.store.verdicts()
            spoken_of = (
                r
                for r in known
                if inventory.remembered(r, here, self.config, now, said, verdict=found.get(r.device.uuid))
            )
            records = [r for r in spoken_of if self._included(r.device)]
            # New mappings each time: other threads iterate over the old ones.
            self.devices = {r.device.uuid: r.device for r in records}
            self.in_place = {r.device.uuid for r in records if r.present}
            self._mismatched = self.store.mismatched()
            new = set(self.entries) - self._recalled
            self._recalled |= new
            for uuid in self.devices:
                if new or uuid not in self._evidence:
                    self._evidence[uuid] = self._load(uuid)
            self._as_of = None
            self._refresh()
            parts: dict[str, list[str]] = {}
            for device in self.devices.values():
                if device.parent:
                    parts.setdefault(device.parent, []).append(device.uuid)
            self.watch.instances = parts
            self.watch.recall(now)
            self.watch.boot(list(self.devices), now)

    def _included(self, device: Device) -> bool:
        wanted = self.config.devices.include
        return not wanted or any(w in (device.uuid, device.name, device.backend) for w in wanted)

    def _worker(
        self,
        instruction_set: str,
        on_progress: Callable[[float, str], None] | None = None,
        *,
        numeric: bool = True,
        device: Device | None = None,
        touches: bool = True,
        nice: int = 0,
    ) -> Series:
        settings = self.config.worker
        spec = WorkerSpec()
        if numeric:
            # An instance of a divided GPU has to be named before CUDA starts, or the process sees another one.
            only = {"CUDA_VISIBLE_DEVICES": device.uuid} if device is not None and device.parent else {}
            python = settings.python or sys.executable
            spec = WorkerSpec(python=python, command=tuple(settings.command), env={**only, **settings.env}, nice=nice)
        series = Series(spec, instruction_set=instruction_set, grace=settings.grace, on_progress=on_progress)
        with self._workers:
            self._series[series] = touches
            if self.stopping or (self.released and touches):
                series.kill(self.halted)
        return series

    def _end(self, series: Series) -> None:
        series.close()
        with self._workers:
            self._series.pop(series, None)

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, probe: str) -> ProbeSettings:
        """Return the configuration's section of a probe, defaults where it has none."""
        return self.config.probes.each.get(probe, ProbeSettings())

    def _wanted(self, spec: ProbeSpec) -> bool:
        enabled = self.settings(spec.name).enabled
        return not spec.opt_in if enabled is None else enabled

    def levels(self, level: str | None = None) -> dict[str, str]:
        """Return probe → level: the given one for all, or each probe's own setting."""
        return {n: level or self.settings(n).level or self.config.schedule.level for n in self.entries}

    def periods(self, device: Device) -> dict[str, float]:
        """Return the probes, telemetry left out, that apply to a device with their periods in seconds.

        A divided GPU is tested through its instances: CUDA does not reach it as a whole.
        """
        divided = any(d.parent == device.uuid for u, d in self.devices.items() if u in self.present)
        return {
            name: self.settings(name).period or entry.spec.period
            for name, entry in self.entries.items()
            if schedule.applies(entry, device)
            and not entry.spec.telemetry
            and not (divided and entry.spec.numeric)
            and (not self.only or name in self.only)
        }

    def telemetry_periods(self) -> dict[str, float]:
        """Return the telemetry probes with their periods in seconds."""
        telemetry = {name: entry for name, entry in self.entries.items() if entry.spec.telemetry}
        return {name: self.settings(name).period or entry.spec.period for name, entry in telemetry.items()}

    def reached(self, device: Device) -> bool:
        """Whether a device can be asked to compute; without torch, the CPU's runs say what is missing."""
        return device.backend == "cpu" or device.is_endpoint or device.torch_index is not None

    def timeout(self, spec: ProbeSpec, level: str) -> float:
        """Return the seconds after which a run of a probe is killed."""
        return spec.budget[level] + (self.settings(spec.name).timeout or spec.timeout)

    # -- telemetry ----------------------------------------------------------------------------------------------------

    def sweep(self, *, hold: bool = False, due: bool = False) -> None:
        """Poll the telemetry of all devices once, and judge; with `due`, only what its period calls for.

        `hold` keeps the drivers' handles for the next sweep.
        """
        if self.halted:
            return
        periods = self.telemetry_periods()
        devices = sorted((d for u, d in self.devices.items() if u in self.in_place), key=lambda d: d.uuid)
        tasks = [
            Task(
                request=RunRequest(
                    probe_path=entry.file.path,
                    spec=entry.spec,
                    device=device,
                    level="quick",
                    seed=0,
                    settings=self.settings(name).settings,
                ),
                timeout=self.timeout(entry.spec, "quick"),
                period=periods[name],
            )
            for name, entry in sorted(self.entries.items(), key=lambda item: item[1].spec.order)
            if entry.spec.telemetry and (not self.only or name in self.only)
            for device in devices
            if schedule.applies(entry, device)
        ]
        self.watch.sweep(tasks, stopped=lambda: bool(self.halted), hold=hold, due=due)
        self.decide()

    def read_log(self, *, until_end: bool) -> None:
        """Read the kernel log on from where it was counted: to its end, or for ever."""
        series = self._worker("", numeric=False, touches=False)
        try:
            self.watch.read_log(series, lambda: list(self.devices.values()), until_end=until_end)
        finally:
            self._end(series)

    @property
    def halted(self) -> str:
        """Why nothing may be started just now; "" when it may."""
        return self.stopping or self.released

    def release(self, reason: str) -> None:
        """Let go of every device and touch none until `take_back`; `holds` tells when it is done."""
        with self._workers:
            self.released = reason
            for series, touches in self._series.items():
                if touches:
                    series.kill(reason)
        self.watch.let_go()

    @property
    def holds(self) -> bool:
        """Whether a worker that may hold a device is there, one that survives SIGKILL included."""
        with self._workers:
            return any(self._series.values()) or bool(process.stuck())

    def take_back(self) -> None:
        """Touch devices again."""
        self.released = ""

    # -- carrying out -------------------------------------------------------------------------------------------------

    def carry_out(
        self,
        plan: Plan,
        *,
        wait: float = 0.0,
        on_wait: Callable[[str], None] = lambda _: None,
        purpose: str = budget.ROUND,
    ) -> list[Run]:
        """Run a series and the confirmations that its mismatches ask for; return all runs.

        `purpose` is what its time is booked on; its confirmations are booked as such.
        Raises `Busy` when the device stays locked by another process for `wait` seconds, or until `stop`. Runs are
        stored as they end, and the device is judged after each.
        """
        with self.store.lock(plan.device.uuid, wait, on_wait, lambda: bool(self.halted)):
            runs = self._series_of(plan, purpose)
        for run in list(runs):
            for again in self._confirmations(run):
                if self.halted:
                    return runs
                try:
                    with self.store.lock(again.device.uuid, max(wait, 60.0), on_wait, lambda: bool(self.halted)):
                        if self.may(again.device, budget.DOUBT):  # else the accused owes it
                            runs += self._series_of(again, budget.DOUBT)
                except Busy as busy:
                    self.problems.append(f"{again.device.name}: not asked to confirm {run.id}: {busy}")
        for _ in range(LEARNING if plan.device.is_endpoint else 0):
            steps = self._to_learn(plan, runs)
            if not steps or self.halted:
                break
            with self.store.lock(plan.device.uuid, wait, on_wait, lambda: bool(self.halted)):
                runs += self._series_of(replace(plan, steps=steps), purpose)
        return runs

    def _to_learn(self, plan: Plan, runs: Sequence[Run]) -> tuple[Step, ...]:
        """Return the steps to be run once more: they met a chain that is not learnt, or have just learnt one.

        Neither may stay unknown until the next turn; what was learnt is compared with nothing before it is asked again.
        """
        whole = {r.probe: r for r in runs if r.recordings and r.whole and not r.drill}
        found = []
        for step in plan.steps:
            run = whole.get(step.entry.spec.name)
            if run is not None and run.baselining != self._lacks_baseline(plan.device.uuid, run.probe):
                why = "what was learnt is compared" if run.baselining else "the chain changed"
                found += [replace(step, trigger=why)]
        return tuple(found)

    def _lacks_baseline(self, uuid: str, probe: str) -> bool:
        """Whether the newest recording of any of a probe's cases has no complete baseline, or there is none at all."""
        self._refresh()
        newest = {s.case: key_of(r, s) for r in self.evidence(uuid) if r.probe == probe for s in r.recordings}
        known = self._baselines.get(uuid, {})
        return not newest or any(key not in known or not known[key].complete for key in newest.values())

    def owed(self, uuid: str) -> list[Plan]:
        """Return the confirmations that recent mismatches lack: a stop, a crash or a busy device cut them short."""
        runs, now = self.evidence(uuid), self.clock()
        plans: list[Plan] = []
        for run in runs:
            recent = now - run.started < self.config.judge.repeat_window
            wanted = (run.wrong or run.unknown) and not run.confirms and (run.whole or run.intensity)
            if wanted and recent and not run.drill and run.probe in self.entries:
                again = [other for other in runs if other.confirms == run.id]
                done = sum(other.outcome is Outcome.COMPLETED for other in again)
                # What never completes is not asked for ever.
                spent = len(again) >= TRIES * self.config.judge.confirm_runs
                missing = 0 if spent else self.config.judge.confirm_runs - done
                plans += schedule.confirmations(run, self.entries[run.probe], self.devices[uuid], [], missing)
        return plans

    def retests(self, uuid: str) -> list[Plan]:
        """Return the next retest of a suspect, harder than what made it one (docs/judgement.md); [] where none is due.

        For recorded bits there is no right answer, so a sibling is asked the same.
        """
        device, verdict = self.devices[uuid], self.store.verdict(uuid)
        if verdict is None or verdict.state is State.FAULTY or not verdict.doubted:
            return []
        mine = [
            r
            for r in self.evidence(uuid)
            if r.probe in self.entries and schedule.can_be_retested(self.entries[r.probe], device)
        ]
        for run, how in schedule.retests_due(mine, self.config.judge, self.clock())[:1]:
            turn = sum(r.intensity == how and not r.confirms and r.instruction_set == run.instruction_set for r in mine)
            asked = [device, *([] if run.wrong else self._next_sibling(device, turn + INTENSITIES.index(how)))]
            seed = schedule.new_seed()
            return [p for d in asked for p in schedule.retests(run, how, self.entries, d, seed=seed, turn=turn)]
        return []

    def _siblings(self, device: Device) -> list[Device]:
        """Return the other devices here of the same backend and model."""
        return [self.devices[u] for u in sorted(self._kin(device.uuid) - {device.uuid}) if u in self.present]

    def _next_sibling(self, device: Device, turn: int) -> list[Device]:
        """Return the sibling that is retested beside a device, in turn; none whose own share of a day is used up.

        Each device begins with the one that comes after it: several suspects must not all ask the same.
        """
        kin, now = self._siblings(device), self.clock()
        after = [*(s for s in kin if s.uuid > device.uuid), *(s for s in kin if s.uuid < device.uuid)]
        free = [s for s in after if schedule.may_be_retested(self.evidence(s.uuid), now)]
        return [free[turn % len(free)]] if free else []

    def _confirmations(self, run: Run) -> list[Plan]:
        if run.probe not in self.entries or run.device not in self.devices:
            return []
        device, count = self.devices[run.device], self.config.judge.confirm_runs
        return schedule.confirmations(run, self.entries[run.probe], device, self._siblings(device), count)

    def _series_of(self, plan: Plan, purpose: str) -> list[Run]:
        runs: list[Run] = []
        step_now: list[Step] = []

        def tell(fraction: float, text: str, done: Run | None = None) -> None:
            self.listener(
                Progress(
                    device=plan.device,
                    instruction_set=plan.instruction_set,
                    probe=step_now[-1].entry.spec.name,
                    fraction=fraction,
                    text=text,
                    done=done,
                )
            )

        spares = self.beside and plan.numeric and not plan.device.is_endpoint
        nice = budget.NICE if spares else 0
        series = self._worker(plan.instruction_set, tell, numeric=plan.numeric, device=plan.device, nice=nice)
        try:
            for step in plan.steps:
                if self.halted:
                    break
                step_now.append(step)
                spec = step.entry.spec
                asked = bool(step.cases or step.drill or step.intensity)
                learns = not asked and self._lacks_baseline(plan.device.uuid, spec.name)
                # Nothing can be said of an endpoint before it is learnt, and a server costs no device of ours.
                level = "deep" if learns and plan.device.is_endpoint else step.effort
                tell(0.0, "starting")
                request = RunRequest(
                    probe_path=step.entry.file.path,
                    spec=spec,
                    device=plan.device,
                    level=step.level,
                    seed=step.seed,
                    settings=self._told(spec.name, plan.device),
                    cases=step.cases,
                    drill=step.drill,
                    confirms=step.confirms,
                    trigger=step.trigger,
                    intensity=step.intensity,
                    memory=str(self.config.state_dir / "memory"),
                    baselining=learns,
                    budget=spec.budget[level],
                    beside=budget.allowance(self.config.budget) if spares else {},
                )
                pauses = budget.REST * spec.budget[level] if spares else 0.0
                run = series.run(request, self.timeout(spec, level) + pauses)
                # A wrong bit seen before the stop is evidence all the same: a rare fault may not show it again.
                if run.outcome is Outcome.ERRORED and run.detail.startswith(STOPPED) and not run.wrong:
                    break
                run = self.add(run)
                runs.append(run)
                tell(1.0, run.outcome.value, run)
        finally:
            self._end(series)
            if spares:
                took = budget.device_seconds(plan.device, series.wall_seconds, series.processor_seconds)
                self.account.spend(plan.device.uuid, took, purpose)
        return runs

    def _told(self, probe: str, device: Device) -> Mapping[str, object]:
        """Return what a probe is told: its own settings, and of an endpoint what is configured for that."""
        own = self.settings(probe).settings
        if not device.is_endpoint:
            return own
        return {**own, **endpoints.settings(self._endpoint(device))}

    def answer(
        self,
        device: Device,
        module: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float,
        wait: float,
        on_wait: Callable[[str], None] = lambda _: None,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> tuple[Outcome, dict[str, Any], str]:
        """Let a module of the worker answer a question under the stack under test, with the device to itself.

        Returns the outcome, the answer and what is to be said about it. Raises `Busy` as `carry_out` does.
        """
        with self.store.lock(device.uuid, wait, on_wait, lambda: bool(self.halted)):
            series = self._worker("", on_progress, device=device)
            try:
                return series.answer(module, arguments, timeout)
            finally:
                self._end(series)

    def stop(self, reason: str = "canaryd is shutting down") -> None:
        """Kill every worker now and start no more; callable from any thread."""
        with self._workers:
            self.stopping = reason
            for series in self._series:
                series.kill(reason)

    # -- evidence and verdicts ----------------------------------------------------------------------------------------

    def add(self, run: Run) -> Run:
        """Store a run and judge its device and the siblings that it may speak for; return it as it was stored.

        Baselines learn from it where nothing speaks against its device: a bad unit must not become its own standard.
        """
        learnt: Collection[Baseline] = ()
        if run.started >= (reached := self.store.reached) - DOUBTED:
            self._behind = 0.0
        elif (run.wrong or run.recordings) and not run.drill:
            # A clock set back must not make a mismatch older than what came before it; distances stay.
            self._behind = self._behind or reached - run.started
            detail = f"{DATED}{run.started:.0f}"
            run = replace(run, started=run.started + self._behind, environment={**run.environment, "clock": detail})
        if run.recordings:
            run, learnt = self._held_against_baselines(run)
        self.store.add_run(run, learnt)
        self.take(run)
        self.decide()
        return run

    def _refresh(self) -> None:
        """Read again what another process may have learnt, counted, accepted or said."""
        with self._mutex:
            now = self.store.written_elsewhere()
            if now is None or now != self._as_of:
                self._as_of = now
                said = tuple(self.store.acks())
                self._acks = {uuid: tuple(a for a in said if a.device == uuid) for uuid in self.devices}
                self._baselines = {uuid: {} for uuid in self.devices}
                known = self.store.baselines()
                for baseline in (b for b in known if b.device in self.devices):
                    # What a part gave before its repair is history, unless an operator said that it is right.
                    if baseline.first > self._cut(baseline.device) or baseline.pinned:
                        self._baselines[baseline.device][baseline.key] = baseline
                self._imported = tuple(b for b in known if b.imported)
                self._doubt(self.store.verdicts())
                self._recorded.clear()
                if said != self._said:  # days before a repair are history
                    self._said = said
                    self._trends.clear()
                    self._courses.clear()

    def _cut(self, uuid: str) -> float:
        """Return since when what a device does is evidence."""
        return acks.cut(self.devices[uuid], self._heeded(uuid))

    def _heeded(self, uuid: str) -> tuple[Ack, ...]:
        """Return the words on a device that count now: whether one is of the future, the clock may tell later."""
        return acks.heeded(self._acks.get(uuid, ()), self.clock())

    def _trusted(self, run: Run) -> bool:
        """Whether baselines may learn from a run: nothing speaks against what it was computed on.

        That an endpoint departed on an old chain does not keep it from learning a new one, or it could never clear;
        what its devices were found guilty of by themselves does.
        """
        if run.wrong or run.drill or run.cases or run.intensity or run.outcome is not Outcome.COMPLETED:
            return False
        device = self.devices.get(run.device)
        if device is None or not device.is_endpoint:
            before = self.store.verdict(run.device)
            return before is None or not before.doubted
        verdicts = self.store.verdicts()
        parts = endpoints.behind(self._endpoint(device), self.devices.values())
        found = [f for d in parts if d.uuid in verdicts for f in verdicts[d.uuid].findings]
        guilty = [f for f in found if f.state.severity >= State.SUSPECT.severity or f.acknowledged]
        return all(f.rule == "endpoint-departed" for f in guilty)

    def _endpoint(self, device: Device) -> EndpointConfig:
        # One that a reload took out of the configuration stays known for a while.
        return endpoints.named(self.config).get(device.uuid.partition(":")[2], EndpointConfig())

    def _stack_behind(self, device: Device) -> dict[str, str]:
        """Return the software below a server: what its devices, and the host, say of themselves."""
        parts = [*endpoints.behind(self._endpoint(device), self.devices.values())]
        parts += [d for d in self.devices.values() if d.backend == "cpu" and d not in parts]
        found: dict[str, set[str]] = {}
        for part in parts:
            for key in STACK_BEHIND:
                if key in part.detail:
                    found.setdefault(key, set()).add(part.detail[key])
        return {key: " ".join(sorted(values)) for key, values in found.items()}

    def _held_against_baselines(self, run: Run) -> tuple[Run, Collection[Baseline]]:
        device = self.devices.get(run.device)
        if device is not None and device.is_endpoint:
            run = replace(run, stack=self._stack_behind(device))
        trusted = self._trusted(run)
        self._refresh()
        with self._mutex:
            mine = self._baselines.setdefault(run.device, {})
            try:
                run, learnt = intake.intake(run, mine, learns=trusted)
            except ValueError as error:  # a baseline that cannot be: the evidence is worth more than the comparison
                self.problems.append(f"{run.device} {run.probe}: not held against its baselines: {error}")
                return run, ()
            self._baselines[run.device] = mine | learnt
        return run, learnt.values()

    def take(self, run: Run) -> None:
        """Count a run among the evidence in memory, once: `add` and a look at the store may both bring it."""
        with self._mutex:
            self._forget_findings(run.device)
            runs = self._evidence.setdefault(run.device, [])
            if all(known.id != run.id for known in runs):
                kin = self._kin(run.device)
                if run.wrong and not run.drill and not kin & self._mismatched:
                    # From now on it is judged by its whole record, and so are those that may speak for or against it.
                    self._mismatched |= {run.device}
                    self._evidence |= {uuid: self._load(uuid) for uuid in kin}
                    runs = [known for known in self._evidence[run.device] if known.id != run.id]
                self._evidence[run.device] = self._remembered(run.device, [*runs, fold(run)])

    def _kin(self, uuid: str) -> frozenset[str]:
        """Return a device and its siblings: those of the same backend and model."""
        of = self.devices.get(uuid)
        same = (d for d in self.devices.values() if of and d.kind == of.kind)
        return frozenset({uuid, *(d.uuid for d in same)})

    def _remembered(self, uuid: str, runs: Sequence[Run]) -> list[Run]:
        """Return what of a device's runs (oldest first) is kept in memory: the newest of each kind, lane by lane."""
        plain, now = RECORD if self._kin(uuid) & self._mismatched else NEWEST, self.clock()
        seen: Counter[object] = Counter()
        shown: Counter[object] = Counter()
        kept = []
        for run in reversed(runs):
            failed = bool(run.wrong or run.unknown)
            lane = (run.probe, run.instruction_set, run.drill, failed, bool(run.confirms), run.intensity)
            seen[lane] += 1
            if seen[lane] <= (FAILURES if failed or run.confirms else plain) and not expired(run, now):
                # What was known is counted in the baselines; of many recordings the newest few runs are enough to show.
                # Those that did not complete, or looked at a part alone, never take the place of one that tells all.
                kind = lane, run.whole, run.outcome is Outcome.COMPLETED
                many = len(run.recordings) > FEW and not run.unknown
                shown[kind] += many
                kept.append(without_recordings(run) if many and shown[kind] > SHOWN else run)
        return kept[::-1]

    def _forget_findings(self, uuid: str) -> None:
        """Judge anew what a new recording of a device may bear on: itself and those that may witness."""
        of = self.devices.get(uuid)
        for other in list(self._recorded):
            device = self.devices.get(other)
            if of is None or device is None or device.backend == of.backend:
                self._recorded.pop(other, None)

    def _load(self, uuid: str) -> list[Run]:
        """Read from the store what the judge needs: what went wrong, the newest of the rest, and recent drills."""
        # One probe at a time: the many runs of one must not hide the last run of another with a longer period.
        # A device with a mismatch is judged by its whole record, how often it fails and what it did since; and beside
        # it its siblings, whose clean records count by their length.
        limit = RECORD if self._kin(uuid) & self._mismatched else NEWEST
        runs: dict[str, Run] = {}

        def take(found: Iterable[Run]) -> None:
            runs.update((run.id, fold(run)) for run in found)

        take(self.store.runs(uuid, failed=True))
        for probe in self.entries:
            take(self.store.runs(uuid, probe, failed=False, limit=limit))
        take(self.store.runs(uuid, drill=True, since=self.clock() - DRILL_EXPIRY))
        return self._remembered(uuid, [runs[name] for name in sorted(runs)])

    def evidence(self, uuid: str) -> Sequence[Run]:
        """Return the runs that the judge sees of a device, clean ones folded, drills only while they are recent."""
        with self._mutex:
            runs, now = self._evidence.get(uuid, ()), self.clock()
            cut = self._cut(uuid) if uuid in self.devices else 0.0
            return tuple(run for run in runs if run.started > cut and not expired(run, now))

    def _look(self) -> dict[str, Verdict]:
        """Read again what others may have written, and return the verdicts as they stand."""
        self._refresh()
        self._doubt(verdicts := self.store.verdicts())
        return verdicts

    def _doubt(self, verdicts: Mapping[str, Verdict]) -> None:
        self._doubted = frozenset(uuid for uuid, verdict in verdicts.items() if verdict.doubted)

    def decide(self) -> dict[str, Verdict]:
        """Judge every known device from the evidence at hand, store what changed, and return the verdicts."""
        previous = self._look()
        with self._mutex:
            nodes = {served: self._node(served=served) for served in (False, True)}
            return {u: self._decide(u, nodes[d.is_endpoint], previous.get(u)) for u, d in self.devices.items()}

    def settle(self) -> None:
        """Judge every device by all evidence, and store it: what a command asked for a part of may have shown more."""
        self.only, self.cases, self.intensity = frozenset(), (), ""
        for verdict in self.decide().values():
            self.store.set_verdict(verdict)

    def verdict(self, uuid: str) -> Verdict:
        """Judge one device now."""
        previous = self._look().get(uuid)
        return self._decide(uuid, self._node(served=self.devices[uuid].is_endpoint), previous)

    def drill_verdict(self, uuid: str, since: float = 0.0) -> Verdict:
        """Judge a device's drills since `since` by the same rules; never stored, never mixed with the other verdict."""
        self._look()
        served = self.devices[uuid].is_endpoint
        return self._decide(uuid, self._node(served=served, drill=True, since=since), None, drill=True)

    def _signs(self, device: Device, runs: Sequence[Run]) -> Signs:
        polls = {n: p for n, p in self.watch.polls(device.uuid).items() if n in self.entries}
        parts = [u for u, d in self.devices.items() if d.parent == device.uuid and u in self.present]
        passes = [last_pass(self.evidence(u)) for u in parts] or [last_pass(runs)]
        wrong = [r for each in (runs, *map(self.evidence, parts)) for r in each if r.wrong and not r.drill]
        return Signs(
            device=device,
            polls=polls,
            events=tuple(e for e in self.watch.events(device) if e.last > self._cut(device.uuid)),
            # A divided device has passed when all of its instances have.
            last_pass=min((p for p in passes if p is not None), default=None) if None not in passes else None,
            last_mismatch=max((r.started for r in wrong), default=None),
            now=self.clock(),
            policy=self.config.telemetry,
        )

    def _of_recordings(self, device: Device, *, drill: bool) -> tuple[Finding, ...]:
        """Return what the recordings of a device say; kept for a while, since looking at all of them takes time."""
        now = self.clock()
        if not drill and device.uuid in self._recorded and 0 <= now - self._recorded[device.uuid][0] < REJUDGED:
            return self._recorded[device.uuid][1]
        of = {u: tuple(r for r in self.evidence(u) if r.recordings or r.readings) for u in self.devices}
        record = Record(
            device=device,
            runs=tuple(r for r in of[device.uuid] if bool(r.drill) == drill),
            baselines=self._baselines.get(device.uuid, {}),
            policy=self.config.judge,
            now=now,
            reached=self._reached(),
            peers={
                d.name: Peer(
                    device=d,
                    trusted=u not in self._doubted,
                    runs=tuple(r for r in of[u] if not r.drill),
                    baselines=self._baselines.get(u, {}),
                )
                for u, d in self.devices.items()
                if u != device.uuid and not self._shares(device, d)
            },
            imported=self._imported,
        )
        found = tuple(rules.findings(record))
        if not drill:
            self._recorded[device.uuid] = (now, found, drift.drifts(record))
        return found

    def drifts(self, uuid: str) -> tuple[Drift, ...]:
        """Return how far a device's newest recordings are from what is known of them."""
        with self._mutex:
            self._refresh()
            self._of_recordings(self.devices[uuid], drill=False)
            return self._recorded[uuid][2]

    def sum_up(self) -> bool:
        """Sum up one day of one device that is over and has no summary yet; whether there was one.

        One at a time, for it takes a second: a day's runs and polls are read. A day without any is summed up as well,
        so that nobody looks again.
        """
        today = int(self._reached() // DAY)  # a clock that ran ahead must not close days that have not come
        first_seen = {r.device.uuid: r.first_seen for r in self.store.devices()}
        for uuid in list(self.devices):
            have = self.store.summed(uuid, (today - BACK) * DAY)
            for day in range(max(today - BACK, int(first_seen.get(uuid, 0.0) // DAY)), today):
                if day in have:
                    continue
                begin, end = day * DAY, (day + 1) * DAY
                runs = [
                    replace(run, comparisons=(), recordings=())  # hour by hour: a day of them whole is tens of MiB
                    for hour in range(25)  # one more, for they are stored after they started
                    for run in self.store.runs(
                        uuid, since=begin + hour * HOUR, until=begin + (hour + 1) * HOUR, drill=None
                    )
                ]
                self.store.add_day(days.summary(uuid, day, runs, self.store.polls(uuid, since=begin, until=end)))
                with self._mutex:
                    self._courses.pop(uuid, None)
                    self._trends.clear()
                return True
        return False

    def _trend(self, device: Device) -> tuple[Finding, ...]:
        """Return the findings on a device's slow changes (docs/judgement.md); kept for a day."""
        now = self.clock()
        today = int(now // DAY)
        if self._trends.get(device.uuid, (None, ()))[0] != today:
            kin = self._kin(device.uuid)
            for uuid in kin - set(self._courses):
                self._courses[uuid] = days.courses(self.store.days(uuid, max(now - SEEN, self._cut(uuid))))
            peers = {self.devices[u].name: self._courses[u] for u in kin - {device.uuid}}
            self._trends[device.uuid] = today, tuple(findings(self._courses[device.uuid], peers, now))
        return self._trends[device.uuid][1]

    def _shares(self, device: Device, other: Device) -> bool:
        """Whether two endpoints have a device in common: then neither is a witness for or against the other."""
        if not (device.is_endpoint and other.is_endpoint):
            return False
        mine, theirs = (
            {d.uuid for d in endpoints.behind(self._endpoint(e), self.devices.values())} for e in (device, other)
        )
        return bool(mine & theirs)

    def _reached(self) -> float:
        """Return a time that has come for certain: a watch is over by that, and not by a clock that ran ahead."""
        at = self.store.reached
        return min(self.clock(), at + STEP) if at else self.clock()

    def _serving(self, device: Device, *, drill: bool) -> dict[str, tuple[int, Sequence[Finding]]]:
        """Return how many devices each endpoint has that a device serves, and what was found of it."""
        found: dict[str, tuple[int, Sequence[Finding]]] = {}
        for name, endpoint in endpoints.named(self.config).items():
            parts = endpoints.behind(endpoint, self.devices.values())
            uuid = f"{ENDPOINT}:{name}"
            if uuid in self.devices and any(d.uuid == device.uuid for d in parts):
                found[uuid] = len(parts), self._of_recordings(self.devices[uuid], drill=drill)
        return found

    def _count(self, device: Device) -> tuple[int, int] | None:
        """Return how many accelerators are found and expected, where the configuration says so; the host answers."""
        expected = self.config.devices.expected
        if expected is None or device.backend != "cpu":
            return None
        here = [d for u, d in self.devices.items() if u in self.present]
        found = [d for d in here if not (d.backend == "cpu" or d.is_endpoint or d.parent)]
        return sum(inventory.PLACEHOLDER not in d.detail for d in found), expected

    def _node(self, *, served: bool, drill: bool = False, since: float = 0.0) -> Node:
        """Return the devices of this node, or its endpoints, with the evidence on them, for any number of verdicts."""
        with self._mutex:
            devices = {u: d for u, d in self.devices.items() if d.is_endpoint == served}
            runs: dict[str, Sequence[Run]] = {u: [r for r in self.evidence(u) if r.started >= since] for u in devices}
        if self.restricted:  # what was asked for is a part, and the verdict is about that part
            part = self.cases, self.intensity
            for uuid, listed in runs.items():
                runs[uuid] = [
                    replace(r, cases=(), intensity="") if (r.cases, r.intensity) == part else r for r in listed
                ]
        return node(devices, runs, self.clock(), drill=drill)

    def _decide(self, uuid: str, among: Node, previous: Verdict | None, *, drill: bool = False) -> Verdict:
        with self._mutex:
            device = self.devices[uuid]
            served = device.is_endpoint
            verdict = judge_verdict.decide(
                device,
                among,
                wanted=self.periods(device),
                policy=self.config.judge,
                now=self.clock(),
                reached=self._reached(),
                previous=previous,
                drill=drill,
                gone_since=None if uuid in self.in_place else self._last_seen.get(uuid),
                signs=None if drill or served else self._signs(device, among.runs[uuid]),
                count=self._count(device),
                unlisted=self.failing if device.backend == "cpu" else {},
                recorded=self._of_recordings(device, drill=drill),
                said=() if drill else self._heeded(uuid),
                lost=None if drill else self.store.lost,
                trends=() if drill else self._trend(device),
                serving={} if served else self._serving(device, drill=drill),
            )
            if not drill and not self.restricted and news(verdict, previous):
                self.store.set_verdict(verdict)
            return verdict


def choose(devices: Mapping[str, Device], wanted: Sequence[str]) -> tuple[list[Device], list[str]]:
    """Return the devices that any of `wanted` names (uuid, name, index-free backend), and the words that name none."""
    if not wanted:
        return list(devices.values()), []
    chosen = {d.uuid: d for d in devices.values() if any(w in (d.uuid, d.name, d.backend) for w in wanted)}
    missing = [w for w in wanted if not any(w in (d.uuid, d.name, d.backend) for d in devices.values())]
    return list(chosen.values()), missing
