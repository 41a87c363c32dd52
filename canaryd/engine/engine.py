"""Carry out plans and judge the results, for `canaryd check`, `canaryd drill` and `canaryd run`.

A plan becomes a series: several runs in one worker, under the lock of the device. Each run is stored, its device is
judged, and wrong results are confirmed. Every wait for hardware happens in a worker, so this process cannot hang in a
driver.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from canaryd.engine import budget, endpoints, experiment, schedule
from canaryd.engine.counts import Counts
from canaryd.engine.days import Days
from canaryd.engine.decide import Decisions
from canaryd.engine.discover import Discovery
from canaryd.engine.evidence import Acknowledgements, Evidence
from canaryd.engine.experiment import Experiments
from canaryd.engine.host import Host, Options
from canaryd.engine.learning import Learning
from canaryd.engine.polling import Watch, poll_tasks
from canaryd.engine.room import CONTEXT, Room
from canaryd.engine.schedule import Plan, Step
from canaryd.engine.workers import Workers
from canaryd.free_memory import available
from canaryd.judge.recordings.baseline import Baseline
from canaryd.model import IN_USE, IN_USE_ALONE, Device, Event, EventKind, Outcome, Reason, Run, Verdict
from canaryd.store.locks import Busy
from canaryd.supervisor.protocol import RunRequest, new_run_id

LEARNING = 2
"""Number of extra runs that can follow an endpoint's run at once: the first learns the results of new server software,
the second is compared with them."""
SHAPED = ("exact_matmul", "exact_attention")
"""Probes that also test with the sizes of the served models."""
IDLE = (Outcome.COMPLETED, Outcome.SKIPPED, Outcome.ERRORED, Outcome.GARBLED)
"""Outcomes that are possible even if a run never reached its device; other outcomes come from the device or its
driver."""
CONFIRM_WAIT = 60.0
"""Minimum seconds for which a confirmation waits for a device that another process holds."""


class ShortError(Busy):
    """A group of devices has too little free memory for the library by which they send to each other."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a series."""

    device: Device
    instruction_set: str
    probe: str
    fraction: float
    text: str
    done: Run | None = None
    """The run that has just finished, or None while a run is going on."""


Listener = Callable[[Progress], None]


@dataclass
class Engine(Host):
    """The host, the evidence on its devices, and the means to test them.

    The parts of the engine share this `Host` and its mutex, and each part owns what it keeps in memory.
    """

    listener: Listener = lambda _: None
    on_change: Callable[[], None] = lambda: None
    """Function that is called when the evidence changed for a reason other than a run."""
    may: Callable[[Device, str], bool] = lambda _, __: True
    """Function (device, purpose) → whether a test is allowed to load the device now; called before each
    confirmation."""
    beside: bool = False
    """Whether servers can use the devices at the same time, so that runs keep to the budget. In a daemon this is always
    True. A check also keeps to the budget on each accelerator that another process uses."""
    shared: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Uuid of an accelerator on which a check kept to the budget → the sign that another process uses the accelerator,
    and the bytes of its memory that a run takes."""
    ran: set[str] = field(default_factory=set)
    """Devices on which this process has run a probe."""
    tried: set[str] = field(default_factory=set)
    """Uuids of the devices in `ran` with a run that gave a result, or that failed because of the device itself."""
    account: budget.Account = field(default_factory=budget.Account)
    room: Room = field(default_factory=lambda: Room(available))
    """Memory of this host for series that run at the same time; a series waits until enough memory is free."""
    workers: Workers = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        """Create the parts of the engine; no device is touched yet."""
        self.workers = Workers(self)
        self.watch = Watch(
            *(self.store, lambda: self.config, lambda: self.workers.start(numeric=False), self.workers.end),
            self.clock,
        )
        self.watch.kernel_log.on_records = self._on_kernel_log
        self._acks = Acknowledgements(self)
        self._evidence = Evidence(self, self._acks)
        self._counts = Counts(self, self._acks)
        self._learning = Learning(self, self._evidence, self._acks)
        self.days = Days(self, self._acks)
        self.discovery = Discovery(self, self.workers, self.watch, self._evidence, self._learning)
        self.decisions = Decisions(
            *(self, self.watch, self._evidence, self._counts, self._acks, self._learning, self.days),
            self.discovery,
        )
        self.experiments = Experiments(self, self._evidence)

    def _on_kernel_log(self) -> None:
        self.decide()
        self.on_change()

    # -- stopping and releasing ---------------------------------------------------------------------------------------

    @property
    def released(self) -> str:
        """The reason why no device must be used at present, or "" if devices can be used."""
        return self.workers.released

    @property
    def halted(self) -> str:
        """The reason why no worker can be started at present, or "" if workers can be started."""
        return self.workers.halted

    @property
    def holds(self) -> bool:
        """Whether a worker exists that is allowed to use a device, including one that survived SIGKILL."""
        return self.workers.hold_devices

    def stop(self, reason: str = "canaryd is shutting down") -> None:
        """Kill every worker now and never start another; any thread can call this."""
        self.workers.stop(reason)

    def release(self, reason: str) -> None:
        """Stop using every device until `take_back` is called; `holds` becomes false when no device is held."""
        self.workers.release(reason)
        self.watch.let_go()
        self._note_release("canaryd let go of every device")

    def take_back(self) -> None:
        """Allow the use of devices again."""
        self.workers.take_back()
        self._note_release("canaryd took the devices back")

    def _note_release(self, detail: str) -> None:
        """Record that every device was released: a device that vanishes now was taken away on purpose."""
        now = self.clock()
        event = Event(device="", kind=EventKind.RELEASE, name="canaryd", first=now, last=now, detail=detail)
        self.watch.history.record([replace(event, device=uuid) for uuid in list(self.devices)])

    # -- looking ------------------------------------------------------------------------------------------------------

    def discover(self, on_wait: Callable[[str], None] = lambda _: None, *, keep: bool = False) -> None:
        """Find probes and devices through workers, and record the changes; `on_wait` is called if a wait is long.

        `keep`: the worker is kept for a check that follows, if it fits. The check then ends the worker.
        """
        self.discovery.discover(on_wait, keep=keep)

    def recall(self, *, runs: bool = True) -> None:
        """Load the known devices, and their runs if `runs`, from the store. Without runs no device can be judged."""
        self.discovery.recall(runs=runs)

    @property
    def unread(self) -> bool:
        """Whether the store can contain evidence that this process has not read yet."""
        return bool(self.store.unreadable) or self._evidence.outdated

    def sweep(self, *, hold: bool = False, due: bool = False, record: bool = False) -> None:
        """Poll the telemetry of all devices once, then judge them; with `due`, skip polls whose period has not passed.

        `hold` keeps the drivers open for the next sweep. `record` stores every poll, even if it shows nothing new.
        """
        if self.halted:
            return
        self.watch.sweep(poll_tasks(self), stopped=lambda: bool(self.halted), hold=hold, due=due, record=record)
        self.decide()

    def read_log(self, *, until_end: bool) -> None:
        """Read the kernel log from the last stored position to its end if `until_end`, else until canaryd stops."""
        series = self.workers.start(numeric=False, uses_device=False)
        try:
            self.watch.read_log(series, self.in_place_first, until_end=until_end)
        finally:
            self.workers.end(series)

    # -- running ------------------------------------------------------------------------------------------------------

    def carry_out(
        self,
        plan: Plan,
        *,
        wait: float = 0.0,
        on_wait: Callable[[str], None] = lambda _: None,
        purpose: str = budget.ROUND,
    ) -> list[Run]:
        """Run a series, and the confirmations that its mismatches require; return all runs.

        Each run is stored when it ends, and its device is then judged. The time of the series counts towards the budget
        of `purpose`, the time of its confirmations towards the budget of `DOUBT`. `Busy` is raised if canaryd stops, or
        if another process still holds the device after `wait` seconds.
        """
        runs = self._run_locked(plan, purpose, wait, on_wait)
        for run in list(runs):
            for again in self.experiments.confirmations(run):
                if self.halted:
                    return runs
                try:
                    runs += self._run_locked(again, budget.DOUBT, max(wait, CONFIRM_WAIT), on_wait, confirms=True)
                except Busy as busy:
                    self.problems.append(f"{again.device.name}: did not confirm run {run.id}: {busy}")
        self._compare_files(plan.device, runs, wait)
        for _ in range(0 if plan.device.has_witnesses else LEARNING):
            steps = self._learning.steps_to_repeat(plan, runs)
            if not steps or self.halted:
                break
            runs += self._run_locked(replace(plan, steps=steps), purpose, wait, on_wait)
        return runs

    def _compare_files(self, device: Device, runs: Sequence[Run], wait: float) -> None:
        """Record whether the software of a wrong run is as it was installed; for each software once a day."""
        history, now = self.watch.history, self.clock()
        run = experiment.to_compare(device, runs)
        if run is None or self.halted or experiment.was_compared(run, history.of(device), now):
            return
        ask = partial(self.answer, device, timeout=experiment.LONGEST, wait=max(wait, CONFIRM_WAIT))
        with contextlib.suppress(Busy):  # the next wrong run asks again
            history.record([experiment.compare(device, run, now, ask)])
            self.decide()

    def _run_locked(
        self, plan: Plan, purpose: str, wait: float, on_wait: Callable[[str], None], *, confirms: bool = False
    ) -> list[Run]:
        """Run a series under its device's lock and return its runs; [] for a confirmation that `may` forbids.

        `confirms`: whether the series is a confirmation. `on_wait` is called if another process holds the device.
        """
        group = {d.physical: d for d in (plan.device, *plan.peers)}
        with contextlib.ExitStack() as held:
            for _, device in sorted(group.items()):  # in one order, so that no two series wait for each other
                held.enter_context(self.locked(device, wait, on_wait, self._doing(plan)))
            held.enter_context(self._room_for(plan))
            return [] if confirms and not self.may(plan.device, purpose) else self._run_series(plan, purpose)

    def _room_for(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """Return a context that waits for the memory of a plan's worker; an endpoint's worker does not wait."""
        if not (plan.numeric and plan.device.computes_here):
            return contextlib.nullcontext()
        context = 0 if plan.device.unit == "cpu" else CONTEXT
        size = (1 + len(plan.peers)) * (self.config.budget.memory + context)
        return self.room.enter(size, lambda: bool(self.halted))

    @contextlib.contextmanager
    def locked(self, device: Device, wait: float, on_wait: Callable[[str], None], doing: str = "") -> Iterator[None]:
        """Hold a device's lock; raise `Busy` at a stop, or if another process still holds it after `wait` seconds."""
        with self.store.lock(device.physical, wait, on_wait, lambda: bool(self.halted), doing):
            yield

    def _may_yield(self, plan: Plan) -> bool:
        """Return whether a series must yield to a server if one uses its device."""
        may = self.beside or (plan.device.unit != "cpu" and not self.asked.drained)
        return may and plan.numeric and plan.device.computes_here

    def _yields(self, plan: Plan) -> bool:
        """Return whether a series yields to a server that uses its device now; raise `Busy` if it must not even start.

        A check asks the driver which processes use the accelerator. The caller holds the device's lock, so no other
        canaryd process runs there. A group needs the whole of `budget.memory`, because what its library takes has no
        limit.
        """
        if self.beside or not self._may_yield(plan):
            return self._may_yield(plan)
        found = False
        for device in (plan.device, *plan.peers):
            facts = self._look(device)
            if not (who := budget.others(facts)):
                continue
            room = budget.room(self.config.budget, facts)
            found, self.shared[device.uuid] = True, (who, min(room, self.shared.get(device.uuid, (who, room))[1]))
            if held := budget.wait(self.config.budget, facts, budget.FORCED):
                raise Busy(f"{device.name}: {who}; {held.text}")
            if plan.peers and room < self.config.budget.memory:
                raise ShortError(f"{device.name}: {who}; too little of its memory is free for links between devices")
        return found

    def _look(self, device: Device) -> budget.Conditions:
        """Return the conditions of an accelerator as its driver reports them now, or did last if it does not answer."""
        now = self.clock()
        own, whole = (
            self.watch.look(poll_tasks(self, {uuid}), stopped=lambda: bool(self.halted))
            or self.watch.readings(uuid, now)
            if uuid
            else ()
            for uuid in (device.physical, device.parent)
        )
        return budget.facts(device, own, whole, now=now, spent=0.0, expected=0.0)

    def _doing(self, plan: Plan) -> str:
        """Return a text that says what a series tests, and for how many seconds at most."""
        yields = self._may_yield(plan)
        most = sum(self._request(plan.device, step, yields=yields)[1] for step in plan.steps)
        probes = ", ".join(step.entry.spec.name for step in plan.steps)
        return f"testing {plan.device.name} ({probes}) for at most {math.ceil(most)} s"

    def _run_series(self, plan: Plan, purpose: str) -> list[Run]:
        """Run a plan's steps in one worker, store and return the runs, and count the time towards `purpose`."""
        runs: list[Run] = []
        probe = ""

        def report(fraction: float, text: str, done: Run | None = None) -> None:
            sets = plan.instruction_set
            self.listener(
                Progress(device=plan.device, instruction_set=sets, probe=probe, fraction=fraction, text=text, done=done)
            )

        yields = self._yields(plan)
        nice = budget.NICE if yields else 0
        in_use = self._in_use(plan.device)
        series = self.workers.start(plan.instruction_set, report, numeric=plan.numeric, device=plan.device, nice=nice)
        try:
            for step in plan.steps:
                if self.halted:
                    break
                probe = step.entry.spec.name
                request, seconds = self._request(plan.device, step, yields=yields)
                request = replace(request, peers=plan.peers)
                report(0.0, "starting")
                run = series.run(request, seconds)
                # A wrong bit seen before the stop still counts: a rare fault may not show again.
                if run.reason is Reason.STOPPED and not run.wrong:
                    break
                mistyped = run.reason is Reason.NO_CASE and not (step.confirms or step.trigger)
                if mistyped:
                    runs.append(run)
                    continue
                if run.outcome is Outcome.TIMED_OUT:
                    run = replace(run, environment={**run.environment, **in_use})
                parts = schedule.shares(run, plan, lambda at=run.started: new_run_id(at))  # type: ignore[misc]
                added = [self.add(part) for part in parts]
                runs += added
                self.ran.add(plan.device.uuid)
                if run.trials or run.recordings or run.outcome not in IDLE or run.reason is Reason.BUDGET:
                    self.tried.add(plan.device.uuid)
                report(1.0, run.outcome.value, added[0])
        finally:
            self.workers.end(series)
            if yields:
                took = budget.device_seconds(plan.device, series.wall_seconds, series.processor_seconds, runs)
                self.account.spend(plan.device.physical, took, purpose)
        return runs

    def _in_use(self, device: Device) -> dict[str, str]:
        """Return facts for `Run.environment` about other work's load on an accelerator; {} if it is low or unknown."""
        busy, limit = self._busy(device), self.config.budget.busy
        if device.unit == "cpu" or busy is None or busy < limit:
            return {}
        alike = [d for d in self.devices.values() if d.kind == device.kind and d.part != device.part]
        alone = not any((other := self._busy(d)) is not None and other >= limit for d in alike)
        return dict.fromkeys((IN_USE, IN_USE_ALONE) if alone else (IN_USE,), f"{100 * busy:.0f} %")

    def _busy(self, device: Device) -> float | None:
        """Return the fraction of time that other processes keep a device busy, or None if it is unknown.

        A GPU that hangs may report full load and no process; this gives None too.
        """
        now = self.clock()
        found = budget.facts(device, self.watch.readings(device.physical, now), now=now, spent=0.0, expected=0.0)
        return None if found.processes == 0 else found.busy

    def _request(self, device: Device, step: Step, *, yields: bool) -> tuple[RunRequest, float]:
        """Return (request to a worker to run a step, seconds after which that run is killed).

        A run that `yields` to a server keeps to the budget, and can pause.
        """
        spec = step.entry.spec
        restricted = bool(step.cases or step.drill or step.intensity)
        learns = not restricted and self._learning.lacks_baseline(device.uuid, spec.name)
        level = "deep" if learns and not device.has_witnesses else step.effort
        seconds = step.longer * spec.budget[level]
        request = RunRequest(
            probe_path=step.entry.file.path,
            spec=spec,
            device=device,
            level=step.level,
            seed=step.seed,
            settings=self._settings_for(spec.name, device),
            cases=step.cases,
            drill=step.drill,
            confirms=step.confirms,
            trigger=step.trigger,
            intensity=step.intensity,
            memory=str(self.config.state_dir / "memory"),
            baselining=learns,
            budget=seconds,
            beside=budget.allowance(self.config.budget) if yields else {},
        )
        pauses = budget.REST * seconds if yields else 0.0
        return request, self.timeout(spec, level) - spec.budget[level] + seconds + pauses

    def _settings_for(self, probe: str, device: Device) -> Mapping[str, object]:
        """Return a probe's settings: for an endpoint with its own, for a probe in `SHAPED` with the served models."""
        own = self.settings(probe).settings
        if not device.computes_here:
            return {**own, **endpoints.settings(self.endpoint(device))}
        if probe in SHAPED and (served := endpoints.models(self.config, device, self.devices.values())):
            return {"shapes_of": sorted(served), "ranks": served, **own}
        return own

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
        """Run a module of the worker once, with the software under test, while the device is locked.

        Returns (outcome, the module's answer to `arguments`, detail of the outcome). Raises `Busy` like `carry_out`.
        """
        with self.locked(device, wait, on_wait):
            series = self.workers.start("", on_progress, device=device)
            try:
                return series.answer(module, arguments, timeout)
            finally:
                self.workers.end(series)

    # -- evidence and verdicts ----------------------------------------------------------------------------------------

    def add(self, run: Run) -> Run:
        """Store a run, learn from it, judge all devices, and return it as it was stored; a drill is only stored."""
        learnt: Collection[Baseline] = ()
        device = self.devices.get(run.device)
        if device is not None and not device.computes_here and (run.recordings or run.comparisons):
            run = replace(run, stack=self.stack_behind(device, run))
        if run.drill:
            run = self._learning.take_in(run, keep=False)[0] if run.recordings else run
            self.store.drills.add_run(run)
            return run
        began, run = run.started, self._evidence.dated(run)
        if run.recordings:
            run, learnt = self._learning.take_in(run)
        if not (run.wrong or run.unknown):  # only what accuses must not look old
            run = replace(run, started=began, clock=None)
        self.store.add_run(run, learnt, self._learning.meet(run))
        self.take(run)
        self.decide()
        return run

    def take(self, run: Run) -> None:
        """Add a run to the evidence in memory."""
        self.decisions.take(run)

    def evidence(self, uuid: str) -> Sequence[Run]:
        """Return a device's runs that count, oldest first: clean runs in short form."""
        return self._evidence.of(uuid)

    def decide(self) -> dict[str, Verdict]:
        """Judge every known device, store the verdicts that are new, and return all verdicts by uuid."""
        return self.decisions.decide_all()

    def settle(self) -> None:
        """Lift the restrictions of the last check; then judge every device by all evidence and store the verdicts."""
        self.asked = Options()
        for verdict in self.decide().values():
            self.decisions.keep(verdict)

    def verdict(self, uuid: str) -> Verdict:
        """Judge one device now and return the verdict."""
        return self.decisions.decide(uuid)


def choose(devices: Mapping[str, Device], wanted: Sequence[str]) -> tuple[list[Device], list[str]]:
    """Return (chosen devices, words in `wanted` that match no device). Each word is a uuid, a name or a backend."""
    if not wanted:
        return list(devices.values()), []
    chosen = {d.uuid: d for d in devices.values() if any(w in (d.uuid, d.name, d.backend) for w in wanted)}
    missing = [w for w in wanted if not any(w in (d.uuid, d.name, d.backend) for d in devices.values())]
    return list(chosen.values()), missing
