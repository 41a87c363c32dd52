"""The format of a story: `Story`, which is a YAML file, and everything in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from canaryd.codec import from_json
from canaryd.config.values import parse_duration
from canaryd.model import Cause, State
from tests.story.catalogue import ANSWER, EXACT, FOREVER, HOST, KERNELS, KINDS, LEARNT_AT_ONCE, NVIDIA, RECORDED, SPECS
from tests.story.happenings import DOINGS

STORIES = Path(__file__).parents[1] / "stories"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's where PyYAML has it: eight times as fast."""
Names = tuple[str, ...] | str


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
    sizes: tuple[str, ...] = ()
    """Sizes in the names of its exact cases with fresh operands, of one round after the other; the last ones stay."""
    graphs: int = FOREVER
    """Round from which on a graph computes its exact cases with fresh operands, too; on other operands."""
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
    starts: bool = True
    """Whether its servers tell when they started."""
    batches: bool = False
    """Whether answers vary in their last bits while its servers serve several requests, as our own while learning."""
    tunes: bool = False
    """Whether its servers tune their kernels at every start, and then answer with other last bits."""
    repeats: str = ""
    """What its servers say of their bits, a value of the reading `endpoint_repeats`; "" for nothing."""
    exact: bool = False
    """Whether its servers serve an exact canary, so that every answer has one right result."""
    altered: tuple[str, ...] = ()
    """Files of its torch that are not those that were installed."""
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
    subject: str = ""
    """What its worst incident must point to, a value of `Whose`."""
    reach: tuple[str, ...] = ()
    """The names of all devices that the remedy of its worst incident must reach."""
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
        wanted = self.state, self.cause, self.rules, self.says, self.subject, self.reach
        return any(wanted) or self.incidents is not None


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
    apart: bool = False
    """Whether a device draws the same chances, in the same rounds, if other devices are added, removed or listed in
    another order. Then devices are tested in the order of their names, however they are listed."""
    salt: str = ""
    """A word from which devices get other uuids than without it."""

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
            for name in listed(each.device, names):
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
        return [name for host in self.hosts for part in host.devices for name in numbered(part)]

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


def listed(names: Names, every: Sequence[str]) -> Sequence[str]:
    """Return names one by one; "*" is every one."""
    return every if names == "*" else (names,) if isinstance(names, str) else names


def numbered(part: Part) -> list[str]:
    """Return the names of the devices of a part."""
    return [part.name] if part.count == 1 else [f"{part.name}{n}" for n in range(part.count)]
