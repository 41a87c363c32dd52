"""A simulator of fleets: plays stories, written as YAML files, through the real engine, schedule, store and judge.

Only hardware, the worker process and time are replaced: `Simulated` is a `Series` whose devices compute, fail and
report as the story says. Everything that remembers or decides is canaryd's own. `Story` is the format of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from canaryd.cli import baseline
from canaryd.codec import from_json
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
from canaryd.config.values import parse_duration
from canaryd.engine import schedule
from canaryd.engine.engine import Engine
from canaryd.engine.room import Room
from canaryd.facts import (
    Comparison,
    Doubt,
    Evidence,
    Exactness,
    LogPosition,
    LogRecord,
    Place,
    Reading,
    Recording,
    Skipped,
    Subject,
    WrongMemory,
)
from canaryd.judge.incidents import incidents
from canaryd.model import Ack, Cause, Device, Event, Finding, Outcome, Run, State, Verdict
from canaryd.probe import LEVELS, ProbeSpec
from canaryd.store.retention import Retention
from canaryd.store.store import Store
from canaryd.supervisor.protocol import Description, Listing, Reach, RunRequest, WorkerSpec
from canaryd.supervisor.series import Series
from tests.places import line, place

STORIES = Path(__file__).parent / "stories"
START = 1_609_459_200.0
"""2021-01-01 UTC: in the past, since the watch doubts lines of the kernel log that lie in the future."""
HOUR, DAY = 3_600.0, 86_400.0
FOREVER = 10**9
SHAPE, ROWS, COLUMNS = "M=64 N=64 K=256", 64, 64
CASES = ("bfloat16/cancel/prefill/nt", "float16/full/decode/nn", "float32/wide/square/tn")
"""Exact cases of a run: each with a fixed seed, and with the run's own."""
KERNELS = ("gemm/prefill", "gemm/decode", "softmax/rows")
"""Recorded cases of a run."""
TILES = 8
REPEATS = 10
"""Recordings of each case in a run that baselines: three such runs learn it."""
ANSWER = "completions/reef/fresh"
"""The endpoint's case; asked so often while it is learnt that one run does."""
ANSWERED = ("the", "reef", "is", "a", "wall", "of", "coral", "in", "warm", "clear", "water", "near", "the", "coast")
LEARNT_AT_ONCE = 30
EXACT, RECORDED, CANARY = "exact_matmul", "recorded_kernels", "endpoint_canary"
SERVED, MEMORY, LINKS = "exact_endpoint", "memory_sweep", "collectives"
PATTERNS, WORDS = ("int64/address/sweep@8191", "int64/inversions/sweep@8191"), 8191
"""Cases of a sweep of memory, and the words of its one slice."""
ASKED, ANSWERS = ("completions/alone", "completions/again", "completions/8-at-once"), 8
"""Cases of a served exact canary, and how many answers each has."""
NVIDIA, HOST = "nvidia_telemetry", "host_telemetry"
SELFTEST = "vendor_selftest"
SPECS: Mapping[str, ProbeSpec] = {
    spec.name: spec
    for spec in (
        ProbeSpec(name=EXACT, summary="exact products", runtimes=("*",), every_instruction_set=True, order=10),
        ProbeSpec(name=RECORDED, summary="recorded kernels", backends=("cuda",), order=30),
        ProbeSpec(name=CANARY, summary="an endpoint's answers", backends=("endpoint",), numeric=False, order=40),
        ProbeSpec(name=SERVED, summary="exact answers", backends=("exact_endpoint",), numeric=False, order=40),
        ProbeSpec(name=MEMORY, summary="memory", order=60),
        ProbeSpec(name=LINKS, summary="links", backends=("cpu", "cuda"), group=True, order=64),
        ProbeSpec(name=SELFTEST, summary="the vendor's self-test", backends=("cuda",), numeric=False, order=90),
        ProbeSpec(name=NVIDIA, summary="telemetry", backends=("cuda",), numeric=False, telemetry=True, period=15.0),
        ProbeSpec(name=HOST, summary="telemetry", backends=("cpu",), numeric=False, telemetry=True, period=15.0),
    )
}
"""The simulated catalogue, shaped like the shipped probes."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: eight times as fast."""
OUTCOMES = {outcome.value for outcome in Outcome} - {Outcome.COMPLETED.value}
KINDS = {"exact", "upload", "golden", "comparator", "link", "recorded", "garbage", "nothing", "selftest", *OUTCOMES}
"""What may go wrong: a result (exact), all results of an upload, the host's golden, the comparator, a link (of one
device or `place`: all its links; of two devices: the one between them; the event `check` shows it), a recorded case
(with `bits` the same departure each time), an endpoint's answer (garbage), all skipped (nothing), a vendor's self-test,
or how a worker ends."""
Names = tuple[str, ...] | str


# --- The format -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """One device, or `count` alike ones whose names get a number."""

    name: str
    count: int = 1
    backend: str = "cuda"
    model: str = "NVIDIA H200"
    stack: Mapping[str, str] = field(default_factory=lambda: {"torch": "2.13.0", "driver": "580.65", "blas": "12.9"})
    kernel: str = "tile128"
    """The kernel that computes the recorded cases; a link of their chain."""
    cores: int = 2
    """CPUs only."""
    instruction_sets: tuple[str, ...] = ()
    temperature: float = 60.0
    swing: float = 0.0
    """Degrees by which the temperature rises in the afternoon and falls at night."""
    trials: int = 4
    """Results per exact comparison."""
    speed: float = 1.0
    """Times as fast as others of its model."""
    reached: bool = True
    """Whether the torch under test sees it."""
    present: bool = True
    characterised: bool = True
    """Whether canaryd ships its goldens as characterised."""
    rounds_nothing: tuple[str, ...] = ()
    """Cases that are shipped as characterised on any device."""
    weak_identity: bool = False
    card: str = ""
    """Name of the device of the same host that is the same part through another runtime."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One host: an engine and a store of its own."""

    devices: tuple[Part, ...]
    expected: int | None = None
    """`devices.expected` of its configuration."""
    endpoint: tuple[str, ...] = ()
    """Devices behind its endpoint "endpoint:main"; none: it has no endpoint."""
    replica: tuple[str, ...] = ()
    """Devices behind a second server of the same model, "endpoint:other"."""
    questions: int = 1
    """Cases that its endpoints are asked in each run."""
    answers: int = LEARNT_AT_ONCE
    """How often one run asks a case while it is learnt."""
    gauges: bool = True
    """Whether its servers tell that they serve others."""
    logprobs: bool = True
    """Whether its servers give log probabilities."""
    exact: bool = False
    """Whether its servers serve an exact canary, so that every answer has one right result."""
    unlisted: str = ""
    """Why the vendor's library cannot list its devices; "" where it can."""

    @property
    def servers(self) -> dict[str, tuple[str, ...]]:
        """Return the devices behind each of its servers."""
        return {name: parts for name, parts in (("main", self.endpoint), ("other", self.replica)) if parts}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong by chance, while all of its conditions hold."""

    kind: str
    """One of `KINDS`."""
    device: Names = "*"
    probability: float = 1.0
    """Per result for exact, per upload for upload, golden and comparator, per recording, or per run."""
    after: int = 0
    until: int = FOREVER
    """Rounds, the first included, the last not."""
    times: int = FOREVER
    """How often it happens at most."""
    temperature_above: float = -math.inf
    probe: str = ""
    case: str = ""
    seed: str = ""
    """"fixed" or "fresh": only these operands."""
    place: str = ""
    """Only where it runs there, e.g. "core 3"."""
    instruction_set: str = ""
    stack: Mapping[str, str] = field(default_factory=dict)
    """Only under this software."""
    bits: tuple[int, ...] = ()
    """Bits that it flips; empty: others each time."""
    row: int | None = None
    column: int | None = None
    cell: str = ""
    """What a wrong word of memory turns out to be, a `Cell`; faults without it strike no sweep of memory."""
    intensity: Names = ()
    """Only in retests that ask so; all runs where not given."""
    same: str = ""
    """A name: all devices with it get the same wrong bits from the same bytes, as a wrong kernel gives."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What a healthy recorded case does: exact modes with their probabilities, or other bits each time."""

    case: str
    modes: tuple[float, ...] = (1.0,)
    nondeterministic: bool = False
    sigma: float = 1e-4
    """Scatter of each tile's value where bits are others each time."""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that happens to devices, their host or their operator at the start of a round."""

    at: int
    do: str
    """See `DOINGS`."""
    device: Names = "*"
    stack: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    counters: Mapping[str, float] = field(default_factory=dict)
    readings: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 1
    """How many rounds in a row it happens."""
    index: int = 0
    bus_id: str = ""
    xid: int = 0
    text: str = ""
    temperature: float = 0.0
    speed: float = 1.0
    seconds: float = 0.0
    clients: int = 0
    links: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    reason: str = ""
    days: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the judge must say of devices at the end of rounds: at one, by one, or, without either, at the last."""

    device: Names
    at: int | None = None
    by: int | None = None
    after: int = 0
    """First round that counts for `by`, `never`, `always_below` and `never_rule`."""
    state: str = ""
    cause: str = ""
    rules: tuple[str, ...] = ()
    """Rules that must be among the findings."""
    says: str = ""
    """Words that one of the findings must hold."""
    incidents: int | None = None
    """How many incidents its findings must be."""
    always_below: str = ""
    never: str = ""
    """A cause that no verdict beyond healthy may have."""
    never_rule: str = ""
    gone: bool = False
    """It must not be spoken of any more."""
    drill: bool = False
    """It is the verdict on the drill that is meant."""

    def due(self, last: int) -> int:
        """Return the round after which it can have failed."""
        if self.drill:
            return last
        if not (self.wants_a_verdict or self.gone):
            return self.after
        return last if (due := self.at if self.by is None else self.by) is None else due

    @property
    def wants_a_verdict(self) -> bool:
        """Whether a verdict must say something."""
        return bool(self.state or self.cause or self.rules or self.says or self.incidents is not None)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Which wait is held against what the faults' rate predicts, over several seeds."""

    device: str
    state: str = "suspect"
    probability: float = 0.99
    seeds: int = 20


@dataclass(frozen=True, kw_only=True)
class Story:
    """One file of tests/stories."""

    name: str
    text: str
    hosts: tuple[Machine, ...]
    expect: tuple[Expectation, ...]
    rounds: int
    period: str = "30m"
    seed: int = 1
    faults: tuple[Fault, ...] = ()
    noise: tuple[Noise, ...] = ()
    events: tuple[Happening, ...] = ()
    probes: tuple[str, ...] = (EXACT, RECORDED, NVIDIA, HOST)
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` for a word that nobody knows: it would silently be no fault, or no expectation."""
        if not self.expect:
            raise ValueError("expect: holds nothing, so that no verdict could be wrong; say what must come")
        names = [*self.names(), *(f"endpoint:{e}@{n}" for n, h in enumerate(self.hosts) for e in h.servers)]
        if len(names) != len(set(names)):
            raise ValueError("hosts: two devices have the same name")
        for fault in self.faults:
            _known("faults.kind", fault.kind, KINDS)
            _known("faults.probe", fault.probe, {"", *SPECS})
        for happening in self.events:
            _known("events.do", happening.do, DOINGS)
            _within("events.at", happening.at, self.rounds)
        for each in (*self.faults, *self.events, *self.expect):
            for name in _listed(each.device, names):
                _known("device", name, {*names, "*"})
        for noise in self.noise:
            _known("noise.case", noise.case, {*KERNELS, ANSWER})
        for expected in self.expect:
            for number in (expected.at, expected.by):
                _within("expect", number or 0, self.rounds)
            _known("expect.state", expected.state, {"", *(s.value for s in State)})
            _known("expect.always_below", expected.always_below, {"", *(s.value for s in State)})
            _known("expect.cause", expected.cause, {"", *(c.value for c in Cause)})
            _known("expect.never", expected.never, {"", *(c.value for c in Cause)})

    def names(self) -> list[str]:
        """Return the names of all devices."""
        return [name for host in self.hosts for part in host.devices for name in _numbered(part)]

    @property
    def seconds(self) -> float:
        """Length of a round."""
        return parse_duration(self.period)


def load(path: Path) -> Story:
    """Read a story; raises `ValueError` with the file's name for what the format does not have."""
    try:
        return from_json(Story, yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _known(where: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ValueError(f"{where}: {word!r} is none of {', '.join(sorted(known))}")


def _within(where: str, number: int, rounds: int) -> None:
    if not 0 <= number < rounds:
        raise ValueError(f"{where}: round {number} is not among the {rounds} rounds, which count from 0")


def _listed(names: Names, every: Sequence[str]) -> Sequence[str]:
    return every if names == "*" else (names,) if isinstance(names, str) else names


def _numbered(part: Part) -> list[str]:
    return [part.name] if part.count == 1 else [f"{part.name}{n}" for n in range(part.count)]


# --- Simulated hardware -----------------------------------------------------------------------------------------------


def _digest(*words: object) -> str:
    return hashlib.blake2b(repr(words).encode(), digest_size=8).hexdigest()


def words(finding: Finding) -> tuple[str, ...]:
    """Return every sentence of a finding."""
    return finding.message, finding.action, *finding.evidence


@dataclass
class Chip:
    """What a device is and how it is just now."""

    name: str
    part: Part
    index: int
    uuid: str
    bus_id: str
    stack: dict[str, str]
    kernel: str
    present: bool
    speed: float
    card: str = ""
    heat: float = 0.0
    lost: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    readings: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """It as an inventory finds it."""
        bus = {"bus_id": self.bus_id} if self.part.backend == "cuda" else {}
        return Device(
            uuid=self.uuid,
            backend=self.part.backend,
            index=self.index,
            model=self.part.model,
            weak_identity=self.part.weak_identity,
            instruction_sets=self.part.instruction_sets,
            detail={**bus, "driver": self.stack.get("driver", ""), "cores": str(self.part.cores)},
            torch_index=self.index if self.part.reached and self.part.backend != "cpu" and not self.card else None,
            card=self.card,
        )


@dataclass
class Server:
    """A model server as it is just now."""

    parts: tuple[str, ...]
    latency: float = 0.05
    """Seconds for a token."""
    clients: int = 0
    """How many others it serves."""
    links: dict[str, str] = field(default_factory=dict)
    """Links of its chain that are others than in the beginning."""


class Simulated(Series):
    """A worker that computes what the story says."""

    def __init__(self, host: Host, instruction_set: str) -> None:
        """Nothing is started."""
        super().__init__(WorkerSpec(), instruction_set=instruction_set)
        self.host = host
        self.lane = instruction_set

    def describe(self, paths: Sequence[Path], *, on_wait: Callable[[str], None]) -> Description:
        """Return the simulated catalogue and what torch sees."""
        del on_wait
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
        del on_wait
        return Reach(devices=tuple(c.device for c in self.host.chips.values() if c.device.runtime == runtime))

    def inventory(self, settings: Mapping[str, Mapping[str, Any]], timeout: float = 15.0) -> Listing:
        """Return what the vendor's library lists."""
        del settings, timeout
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
        del path, until_end
        records, self.host.log = self.host.log, []
        on_batch(records, replace(position, boot="story", sequence=position.sequence + len(records)))
        return ""

    def run(self, request: RunRequest, timeout: float) -> Run:
        """Compute."""
        del timeout
        return self.host.compute(request, self.lane)

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
        super().__init__(
            host.config, Store.open(host.config.state_dir, now=host.clock, monotonic=host.monotonic), clock=host.clock
        )
        self.workers.start = lambda instruction_set="", *_, **__: Simulated(host, instruction_set)
        self.room = Room(lambda: None)  # simulated workers take no memory

    def take(self, run: Run) -> None:
        """See whether a run has something to tell."""
        self.told = bool(run.wrong or run.recordings) or run.outcome is not Outcome.COMPLETED
        super().take(run)

    def decide(self) -> dict[str, Verdict]:
        """While a device is tested judge it alone, after runs that tell of something; for speed.

        All are judged at the end of the round.
        """
        if self.carrying:
            return {self.carrying: self.verdict(self.carrying)} if self.told else {}
        return super().decide()


class Host:
    """One machine of a story, its engine and its clock."""

    def __init__(self, story: Story, number: int, directory: Path, seed: int) -> None:
        """Make the machine and discover it."""
        self.story, self.machine, self.seed = story, story.hosts[number], seed
        self.others: Sequence[Host] = ()
        """The other machines of the story."""
        self.rng = random.Random(f"{seed}/{number}")
        self.now, self.round, self.count = START, 0, 0
        self.lived = 0.0
        self.log: list[LogRecord] = []
        self.fired: dict[int, int] = {}
        self.served: dict[str, Server] = {}
        self.chips: dict[str, Chip] = {}
        self.names: dict[str, str] = {}
        self.last: dict[tuple[str, str], float] = {}
        self.turns: dict[str, int] = {}
        for part in self.machine.devices:
            for name in _numbered(part):
                self._place(name, part, number)
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
        for name, parts in self.machine.servers.items():
            self.names[f"endpoint:{name}"] = f"endpoint:{name}@{number}"
            self.served[f"endpoint:{name}@{number}"] = Server(parts)
        self.engine = Watcher(self)
        self.engine.discover()

    def _place(self, name: str, part: Part, number: int) -> None:
        index = sum(c.part.backend == part.backend for c in self.chips.values())
        uuid = f"{'CPU' if part.backend == 'cpu' else 'GPU'}-{_digest(number, name)}"
        self.chips[name] = Chip(
            name=name,
            part=part,
            index=index,
            uuid=uuid,
            bus_id=f"0000:{index + 16:02x}:00.0",
            stack=dict(part.stack),
            kernel=part.kernel,
            present=part.present,
            speed=part.speed,
            card=self.chips[part.card].uuid if part.card else "",
        )
        self.names[uuid] = name

    @property
    def cores(self) -> int:
        """How many cores make goldens."""
        return next((c.part.cores for c in self.chips.values() if c.part.backend == "cpu"), 2)

    def clock(self) -> float:
        """Return the simulated time, in seconds since the epoch."""
        return self.now

    def monotonic(self) -> float:
        """Return the seconds since the story began, however its clock was set."""
        return self.lived

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
        while self.engine.sum_up():  # the days that are over
            pass
        for happening in self.story.events:
            if happening.at <= number < happening.at + happening.rounds:
                DOINGS[happening.do](self, happening, first=happening.at == number)
        jumped = self.now - begun if self.now != begun else 0.0
        if self.log:
            self.engine.read_log(until_end=True)
        self.engine.sweep()
        for uuid in list(self.engine.devices):
            self._tick(uuid)
        if self.engine.unread:
            self.engine.recall()
        verdicts = self.engine.decide()
        self._live(begun + jumped)
        return {self.names[uuid]: verdict for uuid, verdict in verdicts.items()}

    def _live(self, since: float) -> None:
        """Let the time until the next round pass, and prune every hour, as the daemon does: so clocks are confirmed."""
        born, end = since - self.lived, self.lived + self.story.seconds
        for hour in range(int(self.lived // HOUR) + 1, int(end // HOUR) + 1):
            self.lived = hour * HOUR
            self.now = born + self.lived
            self.engine.store.prune(self.now)
        self.lived, self.now = end, born + end

    def _tick(self, uuid: str) -> None:
        engine = self.engine
        device = engine.devices[uuid]
        if uuid not in engine.present or not engine.reached(device):
            return
        engine.carrying, begun = uuid, self.now
        for plan in engine.owed(uuid):
            engine.carry_out(plan)
        for plan in engine.retests(uuid):
            engine.carry_out(plan)
        periods = engine.periods(device)
        last = {name: self.last[uuid, name] for name in periods if (uuid, name) in self.last}
        trigger = engine.watch.history.triggers.pop(uuid, "")
        names = schedule.due(last, periods, now=begun, jitter=0.0, luck=0.5)
        if trigger:
            names = list(periods)
        levels = {n: level for n, level in engine.levels().items() if n in names}
        turn = self.turns[uuid] = self.turns.get(uuid, -1) + 1
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

    def of(self, names: Names) -> list[Chip]:
        """Return the named devices of this machine."""
        return [c for n, c in self.chips.items() if names == "*" or n in _listed(names, ())]

    def servers(self, names: Names) -> list[Server]:
        """Return the named endpoints of this machine."""
        return [s for n, s in self.served.items() if names == "*" or n in _listed(names, ())]

    # -- what a worker would do ----------------------------------------------------------------------------------------

    def temperature(self, chip: Chip, at: float) -> float:
        """Return a device's temperature: warmest at 15:00."""
        daily = chip.part.swing * math.cos(2 * math.pi * ((at % DAY) / DAY - 15 / 24))
        return chip.part.temperature + daily + chip.heat

    def _active(self, fault: Fault, name: str, stack: Mapping[str, str], temperature: float) -> bool:
        return (
            (fault.device == "*" or name in _listed(fault.device, ()))
            and fault.after <= self.round < fault.until
            and self.fired.get(id(fault), 0) < fault.times
            and temperature > fault.temperature_above
            and fault.stack.items() <= stack.items()
        )

    def _struck(self, fault: Fault, chances: int = 1) -> int:
        """Return in how many of so many chances a fault happens."""
        most = fault.times - self.fired.get(id(fault), 0)
        hits = min(most, _binomial(self.rng, chances, fault.probability))
        self.fired[id(fault)] = self.fired.get(id(fault), 0) + hits
        return hits

    def compute(self, request: RunRequest, lane: str) -> Run:
        """Return what a run of a probe gives on a device as it is now."""
        started, name = self.now, self.names[request.device.uuid]
        self.now += 2.0
        self.count += 1
        chip = self.chips.get(name)
        stack = {**chip.stack, **({"instruction_set": lane} if lane else {})} if chip is not None else {}
        heat = self.temperature(chip, started) if chip is not None else 0.0
        probe = request.spec.name
        faults = [
            f
            for f in self.story.faults
            if f.probe in ("", probe)
            and f.instruction_set in ("", lane)
            and (not f.intensity or request.intensity in _listed(f.intensity, ()))
            and self._active(f, name, stack, heat)
        ]
        run = Run(
            id=f"{int(started * 1000):012x}-{self.count:06x}",
            device=request.device.uuid,
            probe=probe,
            probe_version=request.spec.version,
            started=started,
            seconds=2.0,
            outcome=Outcome.COMPLETED,
            level=request.level,
            seed=request.seed,
            instruction_set=lane,
            stack=stack,
            environment={"temperature": f"{heat:.0f}"},
            repro=f"canaryd check --probe {probe} --device {request.device.name} --seed {request.seed}",
            drill=request.drill,
            confirms=request.confirms,
            trigger=request.trigger,
            cases=request.cases,
            intensity=request.intensity,
        )
        # A fault of the whole run is one of numeric probes, unless the story names another.
        broken = [f for f in faults if f.kind in OUTCOMES and (f.probe or not request.spec.telemetry)]
        for fault in broken:
            if self._struck(fault):
                return replace(run, outcome=Outcome(fault.kind), detail=f"simulated: {fault.kind}")
        if any(f.kind == "nothing" and not request.spec.telemetry and self._struck(f) for f in faults):
            return replace(run, skipped=(Skipped(case="all", reason="no kernel for this device"),))
        if probe == LINKS:
            return replace(run, comparisons=tuple(self._sent(request)))
        if probe == SERVED:
            return replace(run, comparisons=tuple(self._exact_answers(request, faults)))
        if chip is None:
            return replace(run, **self._answers(request, self.served[name], faults), baselining=request.baselining)
        if request.spec.telemetry:
            if chip.lost:
                return replace(run, outcome=Outcome.ERRORED, detail="GPU is lost: NVML says so")
            return replace(run, readings=tuple(self._telemetry(chip, heat)), stack={})
        if probe == SELFTEST:
            word = "fail" if any(self._struck(f) for f in faults if f.kind == "selftest") else "pass"
            labels = {"tool": "dcgmi", "test": "memory"}
            return replace(run, readings=(Reading(name=SELFTEST, value=word, labels=labels),), stack={})
        if probe == RECORDED:
            found = tuple(self._recordings(request, chip, faults))
            told = tuple(self._times(chip))
            return replace(run, recordings=found, readings=told, baselining=request.baselining)
        told = self._sweep if probe == MEMORY else self._comparisons
        comparisons = tuple(told(request, chip, [f for f in faults if bool(f.cell) is (probe == MEMORY)], lane))
        trials = sum(c.trials for c in comparisons)
        return replace(run, comparisons=comparisons, readings=(Reading(name="trials", value=trials, unit="1"),))

    def _sent(self, request: RunRequest) -> Iterator[Comparison]:
        """Yield what went over every link of a group: between devices, or between the cores of a processor.

        A fault of one device, or with a place, is of all its links; of two devices, of the link between them.
        """
        group = [self.names[d.uuid] for d in (request.device, *request.peers)]
        ends = group if request.peers else [f"core {n}" for n in range(self.cores)]
        for pair in itertools.permutations(range(len(ends)), 2):
            clean = Comparison(
                case="int64/walking/send@64",
                shape="words=64",
                seed=request.seed,
                exactness=Exactness.UNIVERSAL,
                place=Place(unit="link", numbers=pair),
            )
            between = [ends[n] for n in pair]
            faults = [f for f in self.story.faults if f.kind == "link" and f.after <= self.round < f.until]
            for fault in faults:
                named = [fault.place] if fault.place else _listed(fault.device, ends)
                if all(n in between for n in named) and self._struck(fault):
                    clean = replace(clean, wrong_trials=1, evidence=self._evidence(fault, clean, ""))
            yield clean

    def _exact_answers(self, request: RunRequest, faults: Sequence[Fault]) -> Iterator[Comparison]:
        """Yield the comparisons of a served exact canary. A fault with bits is wrong in the same way each time."""
        found = []
        for case in (c for c in ASKED if not request.cases or c in request.cases):
            clean = Comparison(case=case, shape="8 prompts", seed=1, exactness=Exactness.UNIVERSAL, trials=ANSWERS)
            for fault in (f for f in faults if f.kind == "exact" and f.case in ("", case)):
                if hits := self._struck(fault, ANSWERS):
                    seen = replace(self._evidence(fault, clean, ""), bits={}, repeats=3, repeats_wrong=3)
                    seen = replace(seen, repeats_alike=3 if fault.bits else 0)
                    clean = replace(clean, wrong_trials=hits, evidence=seen, characterised=not fault.bits)
            found.append(clean)
        proven = any(c.wrong_trials < c.trials for c in found)
        yield from (replace(c, characterised=c.characterised or proven) for c in found)

    def _comparisons(self, request: RunRequest, chip: Chip, faults: Sequence[Fault], lane: str) -> Iterator[Comparison]:
        part = chip.part
        places = ["device"]
        if part.backend == "cpu":
            places = [f"all {part.cores} threads", *(f"core {n}" for n in range(part.cores))]
        for case in (c for c in CASES if not request.cases or c in request.cases):
            for seed, which in ((1, "fixed"), (request.seed, "fresh")):
                for where in places:
                    clean = Comparison(
                        case=case,
                        shape=SHAPE,
                        seed=seed,
                        exactness=Exactness.UNIVERSAL,
                        place=place(where),
                        trials=part.trials,
                        characterised=part.characterised or case in part.rounds_nothing,
                    )
                    mine = [
                        f
                        for f in faults
                        if f.case in ("", case)
                        and f.seed in ("", which)
                        and (f.kind == "golden" or f.place in ("", where))
                    ]
                    yield from self._compared(request, clean, mine, lane)

    def _sweep(self, request: RunRequest, chip: Chip, faults: Sequence[Fault], lane: str) -> Iterator[Comparison]:
        """Yield what the patterns of a sweep of memory find: a fault is a word."""
        for case in (c for c in PATTERNS if not request.cases or c in request.cases):
            clean = Comparison(
                case=case,
                shape=f"words={WORDS}",
                seed=request.seed,
                exactness=Exactness.UNIVERSAL,
                place=place("memory"),
                characterised=chip.part.characterised,
            )
            found = list(self._compared(request, clean, [f for f in faults if f.case in ("", case)], lane))
            for c in found:
                cell = next((f.cell for f in faults), "flipped")
                memory = WrongMemory(cells={cell: 1}, rose=1, fell=0, allocation=8 * WORDS, offset=64, address=1 << 40)
                yield replace(c, evidence=replace(c.evidence, memory=memory, lines={})) if c.evidence else c

    def _compared(
        self, request: RunRequest, clean: Comparison, faults: Sequence[Fault], lane: str
    ) -> Iterator[Comparison]:
        """Yield what one upload gives: a wrong golden is not compared with, a wrong comparator is told beside it."""
        found, wrong = clean, 0
        for fault in faults:
            if fault.kind == "golden":
                maker = f"core {self.rng.randrange(self.cores)}"
                maker = fault.place if fault.place.startswith("cores ") else maker
                if fault.place in ("", maker) and self._struck(fault):
                    evidence = self._evidence(fault, clean, lane)
                    two = maker.startswith("cores ")
                    doubt = Doubt.MADE_TWICE if two else Doubt.ARITHMETIC
                    wrong_golden = replace(clean, subject=Subject.HOST, place=place(maker), doubt=doubt)
                    yield replace(wrong_golden, trials=1, wrong_trials=1, evidence=evidence)
                    return
            if fault.kind == "comparator" and self._struck(fault):
                evidence = replace(self._evidence(fault, clean, lane), wrong=0, first=(), bits={}, lines={})
                yield replace(clean, subject=Subject.COMPARATOR, trials=1, wrong_trials=1, evidence=evidence)
            hits = 0
            if fault.kind == "exact":
                hits = self._struck(fault, clean.trials)
            elif fault.kind == "upload":
                hits = clean.trials * self._struck(fault)
            if hits:
                wrong = min(clean.trials, wrong + hits)
                found = replace(clean, wrong_trials=wrong, evidence=self._evidence(fault, clean, lane))
        if request.drill and clean.case == CASES[0]:
            drilled = Fault(kind="exact", bits=(3,), row=1, column=1)
            found = replace(clean, wrong_trials=clean.trials, evidence=self._evidence(drilled, clean, lane))
        yield found

    def _evidence(self, fault: Fault, comparison: Comparison, lane: str) -> Evidence:
        """Return one wrong element, shaped as `canaryd.worker.numeric.evidence.collect` shapes it."""
        rng = self.rng
        if fault.same:
            rng = random.Random(_digest(fault.same, comparison.case, comparison.seed, lane))
        row = rng.randrange(ROWS) if fault.row is None else fault.row
        column = rng.randrange(COLUMNS) if fault.column is None else fault.column
        bits = fault.bits or tuple(sorted(rng.sample(range(32), rng.choice((1, 2, 2, 3)))))
        golden = int(_digest(comparison.case, comparison.seed, row, column)[:8], 16)
        observed = golden ^ sum(1 << bit for bit in bits)
        lines = {"row": line(row), "column": line(column)}
        flipped = f"only bit {bits[0]} is flipped" if len(bits) == 1 else f"bits {', '.join(map(str, bits))} flipped"
        return Evidence(
            wrong=1,
            total=ROWS * COLUMNS,
            first=(((row, column), f"0x{golden:08x}", f"0x{observed:08x}"),),
            bits={str(bit): 1 for bit in bits},
            zeroed=int(observed == 0),
            nonfinite=0,
            lines=lines,
            pattern=f"element [{row}, {column}]: {flipped}",
        )

    def _recordings(self, request: RunRequest, chip: Chip, faults: Sequence[Fault]) -> Iterator[Recording]:
        chain = {"dtype": "bfloat16", "kernel": chip.kernel}
        for case in (c for c in KERNELS if not request.cases or c in request.cases):
            noise = next((n for n in self.story.noise if n.case == case), Noise(case=case))
            source = _digest(chip.part.model, sorted(chip.stack.items()), sorted(chain.items()), case)
            right = random.Random(source)
            tiles = [right.gauss(0.0, 1.0) for _ in range(TILES)]
            for _ in range(REPEATS if request.baselining else 1):
                values = list(tiles)
                mode = self.rng.choices(range(len(noise.modes)), noise.modes)[0]
                if mode:
                    values[mode % TILES] += 1e-3 * mode
                if noise.nondeterministic:
                    values = [v + self.rng.gauss(0.0, noise.sigma) for v in values]
                for fault in faults:
                    if fault.kind == "recorded" and fault.case in ("", case) and self._struck(fault):
                        # Without bits it is another departure each time; with bits always the same one.
                        own = random.Random(_digest(fault.same or chip.uuid, case, fault.bits))
                        values[(own if fault.bits else self.rng).randrange(TILES)] += (
                            own if fault.bits else self.rng
                        ).uniform(0.2, 0.4)
                yield Recording(case=case, digest=_digest(source, values), chain=chain, values=tuple(values))

    def _times(self, chip: Chip) -> Iterator[Reading]:
        for case in KERNELS:
            seconds = 1e-3 / chip.speed * math.exp(self.rng.gauss(0.0, 0.01))
            yield Reading(name="kernel_seconds", value=seconds, unit="seconds", labels={"case": case})

    def _answers(self, request: RunRequest, server: Server, faults: Sequence[Fault]) -> dict[str, Any]:
        """Return recordings and readings of an endpoint: the usual words, unless a fault has it say others."""
        software = self.chips[server.parts[0]].stack.get("server", "vllm 0.31")
        chain = {"checkpoint": "c0ffee", "prompt": "9a3f", "server": software, "client": "1", **server.links}
        condition = ("loaded" if server.clients else "idle") if self.machine.gauges else ""
        cases = [ANSWER, *(f"completions/question{n}/fresh" for n in range(1, self.machine.questions))]
        found = [
            self._answer(case, chain, condition, faults)
            for _ in range(self.machine.answers if request.baselining else 1)
            for case in cases
            if not request.cases or case in request.cases
        ]
        seconds = server.latency * (1 + server.clients)
        token = Reading(name="endpoint_token_seconds", value=seconds, unit="seconds", labels={"api": "completions"})
        return {"recordings": tuple(found), "readings": (token,)}

    def _answer(self, case: str, chain: Mapping[str, str], condition: str, faults: Sequence[Fault]) -> Recording:
        noise = next((n for n in self.story.noise if n.case == case), Noise(case=case))
        tokens, right = ANSWERED, (case, sorted(chain.items()))
        values = [-0.1 - 0.01 * (int(_digest(t, right)[:4], 16) % 9) for t in tokens]
        mode = self.rng.choices(range(len(noise.modes)), noise.modes)[0]
        values[-1] -= 1e-3 * mode
        for fault in (f for f in faults if f.case in ("", case)):
            if fault.kind == "recorded" and self._struck(fault):
                values[2] -= 0.3 + (0.0 if fault.bits else self.rng.random())
                tokens = tokens if self.machine.logprobs else (*tokens[:2], "was", *tokens[3:])
            if fault.kind == "garbage" and self._struck(fault):
                tokens = ("!",) * len(tokens)
        said = Recording(
            case=case,
            digest=_digest(tokens),
            chain=chain,
            condition=condition,
            text=" ".join(tokens),
            finish="length",
        )
        if not self.machine.logprobs:
            return said
        digest, margins = _digest(tokens, values), (2.0,) * len(tokens)
        return replace(said, digest=digest, tokens=tokens, values=tuple(values), margins=margins)

    def _telemetry(self, chip: Chip, heat: float) -> Iterator[Reading]:
        if chip.part.backend == "cpu":
            yield Reading(name="load_average", value=1.0, unit="1")
            base = {"machine_check_exceptions_total": 0.0}
        else:
            yield Reading(name="temperature_celsius", value=heat, unit="celsius", labels={"sensor": "core"})
            chip.counters["energy_joules_total"] = chip.counters.get("energy_joules_total", 0.0) + 500 * 1800.0
            base = {
                "ecc_errors_total{kind=corrected,location=dram}": 0.0,
                "ecc_errors_total{kind=uncorrected,location=dram}": 0.0,
                "throttle_seconds_total{reason=hw_thermal}": 0.0,
                "row_remap_pending": 0.0,
                "row_remap_failed": 0.0,
                "persistence_mode": 1.0,
            }
        for key, value in {**base, **chip.counters, **chip.readings}.items():
            if not math.isnan(value):
                yield _reading(key, value)


def _reading(key: str, value: float) -> Reading:
    name, _, inside = key.removesuffix("}").partition("{")
    labels = dict(pair.split("=", 1) for pair in inside.split(",") if pair)
    return Reading(name=name, value=value, unit="1", labels=labels)


def _binomial(rng: random.Random, trials: int, probability: float) -> int:
    """Return successes among trials: by gaps, so that a million trials at one in a million cost a few steps."""
    if probability >= 1.0:
        return trials
    if probability <= 0.0:
        return 0
    hits, at = 0, 0
    while True:
        at += int(math.log(1.0 - rng.random()) / math.log1p(-probability)) + 1
        if at > trials:
            return hits
        hits += 1


# --- What happens -----------------------------------------------------------------------------------------------------


def _stack(host: Host, what: Happening, *, first: bool) -> None:
    """Other software, or another kernel; a driver is loaded anew, which begins its counters at 0."""
    del first
    for chip in host.of(what.device):
        chip.stack.update(what.stack)
        chip.kernel = what.kernel or chip.kernel
        if "driver" in what.stack:
            chip.counters = {k: v for k, v in chip.counters.items() if "aggregate" in k}
    host.engine.discover()


def _reboot(host: Host, what: Happening, *, first: bool) -> None:
    """The machine starts again; dated by the story, since the real watch would look at the real machine's start."""
    del what, first
    for chip in host.chips.values():
        chip.lost = False
        chip.counters = {k: v for k, v in chip.counters.items() if "aggregate" in k}
    at = host.now
    events = [
        Event(device=uuid, kind="boot", name="clean", first=at, last=at, detail="the machine was rebooted")
        for uuid in host.engine.devices
    ]
    host.now += 60.0
    host.restart()
    host.engine.watch.history.record(events)
    host.now -= 60.0


def _restart(host: Host, what: Happening, *, first: bool) -> None:
    """The daemon starts again."""
    del what, first
    host.restart()


def _damage(host: Host, what: Happening, *, first: bool) -> None:
    """The disk loses what is in the database, and the daemon starts again."""
    del what, first
    path = host.engine.store.path
    host.close()
    path.write_bytes(b"\xff" * path.stat().st_size)
    host.begin()


def _hide(host: Host, what: Happening, *, first: bool) -> None:
    """The daemon starts again while the database cannot be read, and can be read in the next round."""
    del what
    path = host.engine.store.path
    aside = path.with_suffix(".aside")
    if first:
        host.close()
        path.rename(aside)
        path.mkdir()
        host.begin()
    else:
        path.rmdir()
        aside.rename(path)


def _move(host: Host, what: Happening, *, first: bool) -> None:
    """A card sits in another slot: index and bus address are others."""
    del first
    for chip in host.of(what.device):
        chip.index, chip.bus_id = what.index, what.bus_id or f"0000:{what.index + 64:02x}:00.0"
    host.engine.discover()


def _vanish(host: Host, what: Happening, *, first: bool) -> None:
    """Devices are not found any more."""
    del first
    for chip in host.of(what.device):
        chip.present = False
    host.engine.discover()


def _return(host: Host, what: Happening, *, first: bool) -> None:
    """They are back."""
    del first
    for chip in host.of(what.device):
        chip.present = True
    host.engine.discover()


def _release(host: Host, what: Happening, *, first: bool) -> None:
    """An operator lets canaryd go of every device, and take them back a little later."""
    del what, first
    host.engine.release("released by the story")
    host.engine.take_back()


def _xid(host: Host, what: Happening, *, first: bool) -> None:
    """The driver logs an Xid; after Xid 79 the device answers no more until the machine is started again."""
    del first
    for chip in host.of(what.device):
        chip.lost |= what.xid == 79
        text = what.text or f"NVRM: Xid (PCI:{chip.bus_id}): {what.xid}"
        host.log.append(
            LogRecord(
                boot="story",
                sequence=host.count,
                at=host.now,
                kind="xid",
                name=str(what.xid),
                bus_id=chip.bus_id,
                text=text,
            )
        )


def _counters(host: Host, what: Happening, *, first: bool) -> None:
    """Counters of telemetry rise by so much."""
    del first
    for chip in host.of(what.device):
        for key, rise in what.counters.items():
            chip.counters[key] = chip.counters.get(key, 0.0) + rise


def _readings(host: Host, what: Happening, *, first: bool) -> None:
    """Gauges of telemetry say something else from now on; the driver refuses to give those that are .nan."""
    del first
    for chip in host.of(what.device):
        chip.readings.update(what.readings)


def _heat(host: Host, what: Happening, *, first: bool) -> None:
    """Devices get warmer, or cooler, by so many degrees."""
    if first:
        for chip in host.of(what.device):
            chip.heat += what.temperature


def _speed(host: Host, what: Happening, *, first: bool) -> None:
    """Devices compute so many times as fast from now on."""
    del first
    for chip in host.of(what.device):
        chip.speed = what.speed


def _ack(host: Host, what: Happening, *, first: bool) -> None:
    """An operator says something of devices."""
    del first
    for chip in host.of(what.device):
        until = host.now + what.days * DAY if what.days else 0.0
        with Store.open(host.config.state_dir, now=host.clock) as store:  # a process of its own, as canaryd ack is
            verdict = store.verdicts().get(chip.uuid)
            doubts = [f.rule for f in verdict.findings if f.state is State.SUSPECT or f.acknowledged] if verdict else []
            word = {"kind": what.kind, "at": host.now, "reason": what.reason, "until": until, "by": "story"}
            store.add_ack(Ack(device=chip.uuid, rules=tuple(doubts), **word))


def _clock(host: Host, what: Happening, *, first: bool) -> None:
    """The clock of the machine is set."""
    if first:
        host.now += what.seconds


def _drill(host: Host, what: Happening, *, first: bool) -> None:
    """An operator injects a fault by software."""
    del first
    for chip in host.of(what.device):
        device = host.engine.devices[chip.uuid]
        entries = [host.engine.entries[EXACT]]
        for plan in schedule.plan_round(
            device, entries, levels=host.engine.levels("quick"), seed=7, sets=("",), drill="bitflip"
        ):
            host.engine.carry_out(plan)


def _check(host: Host, what: Happening, *, first: bool) -> None:
    """An operator drains the machine and tests the links between its devices, or the cores of its processor."""
    del first
    engine = host.engine
    entry = engine.entries[LINKS]
    devices = [engine.devices[chip.uuid] for chip in host.of(what.device)]
    step = schedule.Step(entry=entry, level="standard", seed=host.rng.getrandbits(53))
    engine.together = frozenset(d.uuid for d in devices)
    alone = (schedule.Plan(device=d, instruction_set="", steps=(step,)) for d in devices if d.backend == "cpu")
    for plan in (*alone, *schedule.plan_group(devices, entry, step)):
        engine.carry_out(plan)
    engine.together = frozenset()


def _latency(host: Host, what: Happening, *, first: bool) -> None:
    """An endpoint takes so long for a token from now on."""
    del first
    for server in host.servers(what.device):
        server.latency = what.seconds


def _clients(host: Host, what: Happening, *, first: bool) -> None:
    """An endpoint serves so many others from now on, and each waits for all."""
    del first
    for server in host.servers(what.device):
        server.clients = what.clients


def _serve(host: Host, what: Happening, *, first: bool) -> None:
    """An endpoint is started again with other links of its chain."""
    del first
    for server in host.servers(what.device):
        server.links.update(what.links)


def _prune(host: Host, what: Happening, *, first: bool) -> None:
    """The clean runs on record become too old to be kept."""
    del what, first
    host.engine.store.keep = Retention(successes=0.0)
    host.engine.store.prune(host.now + 1.0)


def _import(host: Host, what: Happening, *, first: bool) -> None:
    """An operator imports here what `canaryd baseline export` prints on each other machine."""
    del first
    if host.of(what.device):
        for other in host.others:
            store, every = other.engine.store, baseline.Selection()
            exported = baseline.document(baseline.chosen(store, every), baseline.met_by(store, every))
            with Store.open(host.config.state_dir, now=host.clock) as here:  # the command is a process of its own
                baseline.import_document(here, json.dumps(exported))


DOINGS: Mapping[str, Callable[..., None]] = {
    "prune": _prune,
    "import": _import,
    "stack": _stack,
    "reboot": _reboot,
    "restart_daemon": _restart,
    "damage_store": _damage,
    "hide_store": _hide,
    "move": _move,
    "vanish": _vanish,
    "return": _return,
    "release": _release,
    "xid": _xid,
    "counters": _counters,
    "readings": _readings,
    "heat": _heat,
    "speed": _speed,
    "ack": _ack,
    "clock_jump": _clock,
    "drill": _drill,
    "check": _check,
    "latency": _latency,
    "clients": _clients,
    "serve": _serve,
}
"""What may happen; the docstring of each says what it does."""


# --- Playing, and holding against what is expected --------------------------------------------------------------------


@dataclass
class Played:
    """What the judge said at the end of every round."""

    story: Story
    verdicts: dict[str, list[Verdict | None]]
    """Device → verdict by round; None while the device is not spoken of."""
    drills: dict[str, list[Verdict]]

    def failures(self) -> list[str]:
        """Return what was expected by the newest round and did not come, one sentence each."""
        every = [*self.verdicts]
        newest = max(map(len, self.verdicts.values()), default=self.story.rounds) - 1
        found = []
        for expected in self.story.expect:
            if newest < expected.due(self.story.rounds - 1):
                continue
            for name in _listed(expected.device, every):
                found += [f"{name}: {text}" for text in self._against(expected, name)]
        return found

    def _against(self, expected: Expectation, name: str) -> Iterator[str]:
        told: Sequence[Verdict | None] = self.drills.get(name, []) if expected.drill else self.verdicts.get(name, [])
        if not told:
            yield "no verdict was given"
            return
        window = list(enumerate(told))[0 if expected.drill else expected.after :]
        for number, verdict in window:
            if verdict is None:
                continue
            where = f"at the end of round {number} it was {summary(verdict)}"
            if expected.always_below and verdict.state.severity >= State(expected.always_below).severity:
                yield f"wanted always below {expected.always_below}; {where}"
                break
            if expected.never and verdict.state is not State.HEALTHY and verdict.cause.value == expected.never:
                yield f"wanted never {expected.never}; {where}"
                break
            if expected.never_rule and any(f.rule == expected.never_rule for f in verdict.findings):
                yield f"wanted never {expected.never_rule}; {where}"
                break
        if expected.gone and (last := told[-1 if expected.at is None else expected.at]) is not None:
            yield f"wanted it to be gone; it was {summary(last)}"
        if not expected.wants_a_verdict:
            return
        if expected.by is not None:
            if not any(self._fits(expected, v) for n, v in window if n <= expected.by):
                last = told[min(expected.by, len(told) - 1)]
                yield f"wanted {_wish(expected)} by round {expected.by}; then it was {summary(last)}"
            return
        number = len(told) - 1 if expected.at is None else expected.at
        if not self._fits(expected, told[number]):
            yield f"wanted {_wish(expected)} at the end of round {number}; it was {summary(told[number])}"

    def _fits(self, expected: Expectation, verdict: Verdict | None) -> bool:
        return (
            verdict is not None
            and expected.state in ("", verdict.state.value)
            and expected.cause in ("", verdict.cause.value)
            and expected.incidents in (None, len(incidents(verdict)))
            and {*expected.rules} <= {f.rule for f in verdict.findings}
            and (not expected.says or any(expected.says in text for f in verdict.findings for text in words(f)))
        )


def _wish(expected: Expectation) -> str:
    words = [expected.state, expected.cause, *expected.rules, f'"{expected.says}"' if expected.says else ""]
    words.append("" if expected.incidents is None else f"{expected.incidents} incidents")
    return " ".join(filter(None, words))


def summary(verdict: Verdict | None) -> str:
    """Return a verdict in a few words."""
    if verdict is None:
        return "not spoken of"
    rules = ", ".join(dict.fromkeys(f.rule for f in verdict.findings)) or "nothing found"
    return f"{verdict.state.value} {verdict.cause.value} ({rules})"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for the stores, in memory where there is such a place: thousands of commits wait for no disk."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="canaryd-story-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def play(
    story: Story,
    *,
    seed: int | None = None,
    watch: Callable[[int, Mapping[str, Verdict]], bool] = lambda _number, _verdicts: False,
    until_failed: bool = False,
) -> Played:
    """Play a story from beginning to end; `watch` is told every round's verdicts, and ends it by returning True.

    With `until_failed` it also ends when something that was expected did not come.
    """
    with scratch() as directory, contextlib.ExitStack() as open_:
        hosts = []
        for number in range(len(story.hosts)):
            host = Host(story, number, directory, story.seed if seed is None else seed)
            open_.callback(host.close)
            hosts.append(host)
        for host in hosts:
            host.others = [other for other in hosts if other is not host]
        verdicts: dict[str, list[Verdict | None]] = {}
        drills: dict[str, list[Verdict]] = {}
        for number in range(story.rounds):
            now: dict[str, Verdict] = {}
            for host in hosts:
                now.update(host.play(number))
                for what in story.events:
                    if what.do == "drill" and what.at == number:
                        for chip in host.of(what.device):
                            drills.setdefault(chip.name, []).append(host.engine.drill_verdict(chip.uuid))
            for name in {*verdicts, *now}:
                told = verdicts.setdefault(name, [None] * number)
                told.append(now.get(name))
            played = Played(story=story, verdicts=verdicts, drills=drills)
            if watch(number, now) or (until_failed and played.failures()):
                break
    return played


# --- Statistics -------------------------------------------------------------------------------------------------------


def chances(story: Story) -> list[float]:
    """Return, per round, the chance that the story's `statistics.device` shows a fault for the first time in it.

    1 - (1 - p)^n over the results n that the round compares while the conditions hold: independent trials at a
    constant rate, as design and literature describe a defect that fires once in a million.
    """
    if story.statistics is None:
        raise ValueError(f"{story.name}: it has no statistics")
    name = story.statistics.device
    part = next(p for h in story.hosts for p in h.devices if name in _numbered(p))
    places = 1 + part.cores if part.backend == "cpu" else 1
    found = []
    for number in range(story.rounds):
        at = START + number * story.seconds
        warm = part.temperature + part.swing * math.cos(2 * math.pi * ((at % DAY) / DAY - 15 / 24))
        clean = 0.0
        for fault in story.faults:
            holds = fault.after <= number < fault.until and warm > fault.temperature_above
            if holds and name in _listed(fault.device, [name]):
                cases = 1 if fault.case else len(CASES)
                trials = part.trials * cases * (1 if fault.seed else 2) * (1 if fault.place else places)
                clean += trials * math.log1p(-min(fault.probability, 1 - 1e-12))
        found.append(-math.expm1(clean))
    return found


def rounds_until(each: Sequence[float], probability: float) -> int | None:
    """Return after how many rounds a fault has shown with this probability; None where the rounds are too few."""
    clean = 1.0
    for number, chance in enumerate(each):
        clean *= 1.0 - chance
        if 1.0 - clean >= probability:
            return number + 1
    return None


def detected(story: Story, seed: int) -> int | None:
    """Return in which round, counted from 1, the device of `statistics` reached its state; None for never."""
    wanted = story.statistics
    if wanted is None:
        raise ValueError(f"{story.name}: it has no statistics")
    least = State(wanted.state).severity
    found: list[int] = []

    def watch(number: int, verdicts: Mapping[str, Verdict]) -> bool:
        if verdicts[wanted.device].state.severity >= least:
            found.append(number + 1)
        return bool(found)

    play(story, seed=seed, watch=watch)
    return found[0] if found else None


def too_rare(times: int, trials: int, chance: float) -> bool:
    """Whether so few or so many events would come less often than once in a thousand (two-sided binomial test)."""
    each = [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    return min(sum(each[: times + 1]), sum(each[times:])) < 5e-4


def timeline(played: Played, *, verbose: bool = False) -> Iterator[str]:
    """Yield a line whenever the verdict on a device changed; with `verbose` what was found, too."""
    changes = []
    for name, told in played.verdicts.items():
        before = ""
        for number, verdict in enumerate(told):
            now = summary(verdict)
            if now != before:
                changes.append((number, name, now, verdict))
            before = now
    for number, name, now, verdict in sorted(changes, key=lambda change: change[:2]):
        hours = number * played.story.seconds / 3600
        yield f"round {number:4}  {hours:7.1f} h  {name:12} {now}"
        if verbose and verdict is not None:
            yield from (f"{'':36}{f.rule}: {f.message}" for f in verdict.findings)
    for name, drills in played.drills.items():
        yield from (f"drill{'':18}  {name:12} {summary(verdict)}" for verdict in drills)


def main() -> int:
    """Play one story for a person."""
    parser = argparse.ArgumentParser(prog="scripts/story", description="Play a story and print how verdicts change.")
    parser.add_argument("story", type=Path)
    parser.add_argument("--seed", type=int, help="another course of chance (default: the story's own)")
    parser.add_argument("--verbose", action="store_true", help="print the findings in full")
    arguments = parser.parse_args()
    try:
        told = load(arguments.story)
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.stderr.write(f"scripts/story: {error}\n")
        return 64
    out = sys.stdout
    out.write(f"{told.name}: {told.text.strip()}\n\n")
    if told.statistics is not None:
        each = chances(told)
        medians = [rounds_until(each, q) for q in (0.5, told.statistics.probability)]
        out.write(f"{told.statistics.device} should first show by round {medians[0]} with 50 %, by round {medians[1]} ")
        out.write(f"with {told.statistics.probability:.0%}, counted from 1\n\n")
    played = play(told, seed=arguments.seed)
    out.writelines(f"{line}\n" for line in timeline(played, verbose=arguments.verbose))
    failures = played.failures()
    out.write("\n" + ("\n".join(failures) or "as expected") + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
