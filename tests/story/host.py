"""A simulated machine with a real engine: rounds, as the daemon plays them, and the time between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from canaryd.config.settings import (
    Config,
    DevicesConfig,
    EndpointConfig,
    EndpointsConfig,
    ProbesConfig,
    ProbeSettings,
    RuntimesConfig,
    WorkerConfig,
)
from canaryd.engine import schedule
from canaryd.engine.engine import Engine
from canaryd.engine.polling import poll_tasks
from canaryd.engine.room import Room
from canaryd.facts import (
    LogPosition,
    LogRecord,
)
from canaryd.model import Outcome, Run, Verdict
from canaryd.probe import LEVELS
from canaryd.store.store import Store
from canaryd.supervisor.protocol import Description, Listing, Reach, RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.story.catalogue import HOUR, SPECS
from tests.story.format import Story
from tests.story.happenings import DOINGS
from tests.story.hardware import Hardware


class Simulated(Series):
    """A worker that computes what the story says."""

    def __init__(self, host: Host, instruction_set: str) -> None:
        """Nothing is started."""
        super().__init__(WorkerSpec(), instruction_set=instruction_set)
        self.host = host
        self.lane = instruction_set

    def describe(self, paths: Sequence[Path], *, on_wait: Callable[[str], None]) -> Description:
        """Return the simulated catalogue and what torch sees."""
        chips = [c for c in self.host.chips.values() if c.present and c.part.reached and not c.card]
        stack = chips[0].stack if chips else {}
        return Description(
            torch=stack.get("torch", "2.13.0"),
            devices=tuple(c.device for c in chips),
            stack=stack,
            probes={p: SPECS.get(p.stem, "it is not simulated") for p in paths},
        )

    def reach(self, runtime: str, *, on_wait: Callable[[str], None]) -> Reach:
        """Return what another runtime reaches."""
        return Reach(devices=tuple(c.device for c in self.host.chips.values() if c.device.runtime == runtime))

    def inventory(self, settings: Mapping[str, Mapping[str, Any]], timeout: float = 15.0) -> Listing:
        """Return what the vendor's library lists."""
        gpus = tuple(c.device for c in self.host.chips.values() if c.present and c.part.backend == "cuda")
        if why := self.host.machine.unlisted:
            return Listing(unavailable={"nvidia": why}, failing={"nvidia": why})
        return Listing(devices={"nvidia": gpus})

    def follow(
        self,
        path: str,
        position: LogPosition,
        on_batch: Callable[[Sequence[LogRecord], LogPosition], None],
        *,
        until_end: bool = False,
    ) -> str:
        """Hand over what the kernel logged since."""
        arrived = [record for record in self.host.log if record.at <= self.host.now - self.host.log_late]
        records, self.host.log = arrived, [record for record in self.host.log if record not in arrived]
        on_batch(records, replace(position, boot="story", sequence=position.sequence + len(records)))
        return ""

    def run(self, request: RunRequest, timeout: float) -> Run:
        """Compute."""
        return self.host.compute(request, self.lane)

    def answer(
        self, question: str, arguments: Mapping[str, Any], timeout: float
    ) -> tuple[Outcome, dict[str, Any], str]:
        """Return that nothing is installed here, or what a story altered."""
        altered = [*self.host.machine.altered]
        found = {"compared": 300, "altered": altered, "misread": [], "without": []}
        return (Outcome.COMPLETED, found, "") if altered else (Outcome.SKIPPED, {}, "it is simulated")

    def close(self) -> None:
        """There is nothing to end."""

    def kill(self, reason: str = "") -> None:
        """There is nothing to kill."""


class Watcher(Engine):
    """The real engine with simulated workers."""

    def __init__(self, host: Host) -> None:
        """Nothing is touched yet."""
        self.host = host
        self.carrying, self.told = "", False
        super().__init__(host.config, Store.open(host.config.state_dir, now=host.clock), clock=host.clock)
        self.workers.start = lambda instruction_set="", *_, **__: Simulated(host, instruction_set)
        self.room = Room(lambda: None)  # simulated workers take no memory

    def add(self, run: Run) -> Run:
        """Keep what a worker said, too, so that it can be told again."""
        if self.host.facts is not None:
            self.host.facts.append((self.host.round, run))
        return super().add(run)

    def take(self, run: Run) -> None:
        """See whether a run has something to tell."""
        self.told = bool(run.wrong or run.unknown) or run.outcome is not Outcome.COMPLETED
        super().take(run)

    def poll(self) -> None:
        """Poll the telemetry of all devices; for speed, nobody is judged before the end of the round."""
        self.watch.sweep(poll_tasks(self), stopped=lambda: False, hold=False, due=False, record=False)

    def decide(self) -> dict[str, Verdict]:
        """While a device is tested judge it alone, after runs that tell of something; for speed.

        All are judged at the end of the round.
        """
        if self.carrying:
            return {self.carrying: self.verdict(self.carrying)} if self.told else {}
        return super().decide()


class Host(Hardware):
    """A machine of a story with its engine and its clock."""

    def __init__(self, story: Story, number: int, directory: Path, seed: int) -> None:
        """Make the machine and discover it."""
        super().__init__(story, number, seed)
        self.others: Sequence[Host] = ()
        """The other machines of the story."""
        self.facts: list[tuple[int, Run]] | None = None
        """Every run with the round in which it came, where somebody wants them."""
        self.retold: dict[int, list[Run]] | None = None
        """Round → the runs that come then, where they are those of an earlier play; None: devices compute."""
        self.log_late = 0.0
        """Seconds by which a line of the kernel log comes later than it was written."""
        self.lived = 0.0
        self.log: list[LogRecord] = []
        self.last: dict[tuple[str, str], float] = {}
        self.turns: dict[str, int] = {}
        probes = directory / f"probes{number}"
        probes.mkdir(parents=True)
        for name in story.probes:  # those that are not simulated are described as such
            (probes / f"{name}.py").touch()
        periods = {name: story.seconds for name, spec in SPECS.items() if spec.telemetry}
        each = {n: ProbeSettings(period=periods.get(n), enabled=n in story.probes) for n in SPECS}
        endpoint = {
            name: EndpointConfig(
                url="http://127.0.0.1:1/v1",
                devices=tuple(self.chips[part].uuid for part in parts),
                exact=Path("/srv/exact") if self.machine.exact else None,
            )
            for name, parts in self.machine.servers.items()
        }
        self.config = Config(
            state_dir=directory / f"state{number}",
            worker=WorkerConfig(runtimes=RuntimesConfig(onnx="onnx")),
            probes=ProbesConfig(directories=(probes,), each=each),
            devices=DevicesConfig(expected=self.machine.expected),
            endpoints=EndpointsConfig(each=endpoint),
        )
        self.engine = Watcher(self)
        self.engine.discover()

    def clock(self) -> float:
        """Return the simulated time, in seconds since the epoch."""
        return self.now

    def close(self) -> None:
        """Let go of the store."""
        self.engine.stop()
        self.engine.watch.disown()
        self.engine.store.close()

    def restart(self) -> None:
        """Stop the daemon and start another on the same store."""
        self.close()
        self.begin()

    def begin(self) -> None:
        """Start a daemon on what the store holds."""
        self.last.clear()
        self.engine = Watcher(self)
        self.engine.discover()

    # -- a round -------------------------------------------------------------------------------------------------------

    def play(self, number: int) -> dict[str, Verdict]:
        """Play one round, as the daemon does: events, telemetry, what is due on each device, and a look at all."""
        self.round = number
        begun = self.now
        while self.engine.days.sum_up():  # the days that are over
            pass
        for happening in self.story.events:
            again = self.retold is not None and happening.do in ("check", "drill")  # its runs are told
            if happening.at <= number < happening.at + happening.rounds and not again:
                DOINGS[happening.do](self, happening, first=happening.at == number)
        at = self.now
        jumped = at - begun
        if self.log:
            self.engine.read_log(until_end=True)
        self.engine.poll()
        apart, devices = self.story.apart, list(self.engine.devices if self.retold is None else ())
        for uuid in sorted(devices, key=self.names.__getitem__) if apart else devices:
            self._tick(uuid, at if apart else self.now)
        for run in (self.retold or {}).pop(number, ()):
            self.hear(run)
        if self.engine.unread:
            self.engine.recall()
        verdicts = self.engine.decide()
        self.live(begun + jumped, self.story.seconds)
        return {self.names[uuid]: verdict for uuid, verdict in verdicts.items()}

    def live(self, since: float, seconds: float) -> None:
        """Let so much time pass from then on, and prune every hour, as the daemon does: so clocks are confirmed."""
        born, end = since - self.lived, self.lived + seconds
        for hour in range(int(self.lived // HOUR) + 1, int(end // HOUR) + 1):
            self.lived = hour * HOUR
            self.now = born + self.lived
            self.engine.store.prune(self.now)
        self.lived, self.now = end, born + end

    def hear(self, run: Run) -> None:
        """Add a run of an earlier play."""
        self.now = max(self.now, run.started + run.seconds)
        self.engine.carrying = run.device
        self.engine.add(run)
        self.engine.carrying = ""

    def _tick(self, uuid: str, begun: float) -> None:
        """Play a device's round, which the schedule takes to have begun at `begun` (epoch s)."""
        engine = self.engine
        device = engine.devices[uuid]
        if uuid not in engine.present or not device.is_reached:
            return
        engine.carrying = uuid
        for plan in engine.experiments.owed(uuid):
            engine.carry_out(plan)
        for plan in engine.experiments.retests(uuid):
            engine.carry_out(plan)
        periods = engine.periods(device)
        last = {name: self.last[uuid, name] for name in periods if (uuid, name) in self.last}
        trigger = engine.watch.history.triggers.pop(uuid, "")
        names = schedule.due(last, periods, now=begun, luck=0.5)
        if trigger:
            names = list(periods)
        levels = {n: level for n, level in engine.levels().items() if n in names}
        turn = self.turns[uuid] = self.turns.get(uuid, -1) + 1
        self.turn(self.names[uuid], "plan")
        sets = schedule.instruction_sets(device, max(levels.values(), key=LEVELS.index, default="quick"), turn)
        plans = schedule.plan_round(
            device,
            [engine.entries[n] for n in names],
            levels=levels,
            seed=self.rng.getrandbits(53),
            trigger=trigger,
            sets=sets,
        )
        for name in names:
            self.last[uuid, name] = begun
        for plan in plans:
            engine.carry_out(plan)
        engine.carrying = ""
